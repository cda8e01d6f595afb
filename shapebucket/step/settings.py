"""The settings of JAX under which a step was compiled, by name."""

from __future__ import annotations

from collections.abc import Mapping

import jax


def named_settings() -> Mapping[str, object]:
    """Returns the value of each of JAX's settings in this thread, the mesh in use among them."""
    found: dict[str, object] = {}
    for name in jax.config.values:
        try:
            found[name] = getattr(jax.config, name)
        except AttributeError:  # declared, and not readable in this release
            continue
    return {**found, "the mesh of jax.set_mesh": jax.sharding.get_abstract_mesh()}


def changed_settings(before: Mapping[str, object]) -> list[str]:
    """Returns a line for each setting that is another than before."""
    now = named_settings()
    return [f"{name} is {now[name]!r}, and was {value!r}" for name, value in before.items() if now.get(name) != value]
