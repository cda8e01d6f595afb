"""make_global: the parts of a batch that the processes hold, put together to arrays over all their devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shapebucket.errors import ProcessError


def make_global(batch: Any, sharding: Any, *, count: int | None = None) -> Any:
    """Puts each process's rows on its devices, as one global array a leaf; nothing is sent between processes.

    Every process must call it with a batch of the same bucket, as loaders with `shard=` give it. The rows of process p
    come where the sharding lays p's devices, so the order of rows is not that of one process; their masks go with them.

        data = NamedSharding(mesh, PartitionSpec("data"))
        batches = loader.to_iter_dataset(options).map(lambda batch: sb.make_global(batch, data))
        batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=2)
        step = sb.CompiledStep(train_step, plan, batch_sharding=data)

    `grain.experimental.device_put` does the same in one process; in several it asks that each has the whole batch.

    Args:
        batch: a tree of numpy arrays [B / count, …].
        sharding: a `jax.sharding.Sharding`, or a tree of them that is a prefix of the batch's.
        count: the parts that the batch was dealt into, which is the count of the loader's shard; None: JAX's processes. Fewer
            where a model is spread over processes, so that some need the same rows: those load the same part.

    Returns:
        The same tree of `jax.Array`s [B, …] with the given sharding.

    Raises:
        ProcessError: if the sharding does not lay out as many parts, so that rows would be lost or taken for copies of each
            other; or for a leaf without rows, or of 64 bits, which JAX would silently cut to 32 without `jax_enable_x64`.
    """
    count = jax.process_count() if count is None else count
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        _check_leaf(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
    whole = jax.make_array_from_process_local_data(sharding, batch)
    for (path, leaf), array in zip(jax.tree_util.tree_leaves_with_path(batch), jax.tree.leaves(whole), strict=True):
        if array.shape[0] != leaf.shape[0] * count:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ProcessError(
                f"{name!r} of the batch was dealt into {count} parts of {leaf.shape[0]} rows, but {array.sharding} lays out "
                f"{array.shape[0]} rows, so it takes the parts of some processes for copies: shard the first dimension over "
                "all of them; or, where processes share rows by design, give them the same part (shard=) and its count here"
            )
    return whole


def _check_leaf(name: str, leaf: Any) -> None:
    """Raises ProcessError for a leaf that would not arrive as it is."""
    if not isinstance(leaf, np.ndarray) or not leaf.ndim:
        kind = "a scalar" if isinstance(leaf, np.ndarray | np.generic) else type(leaf).__name__
        raise ProcessError(f"make_global takes numpy arrays with rows, but {name!r} of the batch is {kind}")
    if (read := jax.dtypes.canonicalize_dtype(leaf.dtype)) != leaf.dtype:
        raise ProcessError(
            f"{name!r} of the batch is {leaf.dtype}, which JAX silently cuts to {read}: cast it with .map(), or enable "
            "jax_enable_x64"
        )
