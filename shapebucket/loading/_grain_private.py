"""The private things of Grain that the loaders touch.

They are `_stats`, where stages record what they do; `_element_spec`; the parents of an iterator; and the arrays in shared
memory, with the thread that frees them.

Grain (0.2.18) has no public way for a stage of somebody else's to record, or to offer the spec that the public
`grain.experimental.get_element_spec` asks for. Without `_stats`, a stage is missing from the execution summary and from the
graph, and its parent takes itself for the pipeline's output, for which Grain records a histogram entry an element: 1.4 µs of
5.3 µs a sample.

What comes from worker processes lies in shared memory, which a thread frees. At the end of a script, Grain leaves to that
thread what it can do no more, and closes iterators when the modules it needs are gone: both end in messages that nobody can
do anything about.

Where Grain no longer has these, batches are made all the same, and tests/test_grain_tools.py or tests/test_elastic.py fails.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import grain

from shapebucket.buckets import BucketPlan

T = TypeVar("T")
_LIVING: weakref.WeakSet[grain.DatasetIterator[Any]] = weakref.WeakSet()  # iterators with worker processes


def recorded(stage: Any, make: Callable[[], T]) -> T:
    """Makes an element, and records its time and shapes for a dataset or an iterator, as Grain's own stages do."""
    stats: Any = getattr(stage, "_stats", None)
    if not (hasattr(stats, "record_self_time") and hasattr(stats, "record_output_spec")):
        return make()
    with stats.record_self_time():
        return stats.record_output_spec(make())


def connect(stage: Any) -> None:
    """Connects the figures of a stage with those of its parents; once these have made something, they would start anew."""
    getattr(stage, "_stats", None)


def set_parents(iterator: grain.DatasetIterator[Any], parents: Sequence[grain.DatasetIterator[Any]]) -> None:
    """Says which iterators one reads from now: its `close` closes them, and the execution summary counts them."""
    reading: Any = iterator
    reading._parents = tuple(parents)


def close_at_exit(iterator: grain.DatasetIterator[Any]) -> None:
    """Has an iterator with worker processes closed when the script ends, if it still lives then."""
    _LIVING.add(iterator)
    atexit.unregister(_end)
    atexit.register(
        _end, os.getpid()
    )  # after those of Grain and multiprocessing, and so before them when the script ends


def _end(process: int) -> None:
    if process != os.getpid():  # a fork: the workers are its parent's
        return
    for iterator in list(_LIVING):
        with contextlib.suppress(Exception):  # the script has ended, and its own end counts
            iterator.close()
        set_parents(iterator, ())  # they go now, and not when the modules are gone
    with contextlib.suppress(ImportError, AttributeError):
        _free_shared_memory()


def _free_shared_memory() -> None:
    """Frees the elements that are gone, and the names of those that a variable of the script still holds.

    Those that are made after this, by what else ends with the script, are Grain's as ever.
    """
    from grain._src.python.ipc.shared_memory_array import SharedMemoryArray

    arrays: Any = SharedMemoryArray
    pool, arrays._del_thread_pool = arrays._del_thread_pool, None
    if pool is None:
        return
    pool.close()
    pool.join()
    kept = type(arrays.__name__, (arrays,), {"__del__": _leave})
    held: list[Any] = [each for each in gc.get_objects() if type(each) is arrays]
    for array in held:
        if array._unlink_on_del and isinstance(array.base, mmap.mmap):
            with contextlib.suppress(OSError):  # it has no name any more, perhaps
                array.shm.unlink()
        array.__class__ = kept


def _leave(array: object) -> None:
    """Does nothing: Grain's `__del__` needs modules that are gone before the variables of a script."""


class _Emitting(Protocol):
    @property
    def emitted(self) -> BucketPlan: ...


class BatchesOfPlan:
    """Mixin for a stage that emits the batches of a plan, `emitted`, before Grain's class: offers their spec."""

    @property
    def _element_spec(self: _Emitting) -> dict[str, Any]:
        return _common([self.emitted.batch_spec(bucket) for bucket in self.emitted.buckets])


class ElementsOfParent:
    """Mixin for a stage that passes the elements of `_source` on as they are, before Grain's class: offers their spec."""

    _source: grain.MapDataset[Any]

    @property
    def _element_spec(self) -> Any:
        return grain.experimental.get_element_spec(self._source)


def _common(specs: list[Any]) -> Any:
    """Returns one spec for several of the same structure; a dimension in which they differ is None, Grain's unknown."""
    first = specs[0]
    if isinstance(first, Mapping):
        return {key: _common([each[key] for each in specs]) for key in first}
    sizes = zip(*[each.shape for each in specs], strict=True)
    shape = tuple(each[0] if len(set(each)) == 1 else None for each in sizes)
    return grain.experimental.ShapeDtypeStruct(shape, first.dtype)
