"""What only JAX's internals tell: the settings that are part of `jit`'s key.

Each public setting can be read by itself, but there are dozens, and more with each release; the tuple of all of them, which
`jit` itself compares at each call, is private. It costs 0.1 µs to read. tests/test_step_contract.py fails when it moves.
"""

from __future__ import annotations

from collections.abc import Hashable

import jax

try:
    from jax._src import config as _config
except ImportError:  # it has moved: see below
    _config = None

_PUBLIC = (
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_disable_jit",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
)


def _public_settings() -> Hashable:
    """Returns the settings that are known to matter, where JAX's own tuple is not found."""
    return (jax.sharding.get_abstract_mesh(), *[getattr(jax.config, name) for name in _PUBLIC])


configuration = getattr(_config, "trace_context", _public_settings)
"""Returns the settings in force in this thread which decide how a function is traced, as something to compare."""
