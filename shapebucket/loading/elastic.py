"""ElasticIterDataset: worker processes whose state does not depend on how many there are."""

from __future__ import annotations

import builtins
import contextlib
import multiprocessing
import os
import threading
from functools import partial
from typing import Any, TypeVar

import grain

from shapebucket.errors import ScheduleError, StateError
from shapebucket.flags import mark_flags_parsed
from shapebucket.loader_report import is_whole
from shapebucket.loading._grain_private import ElementsOfParent, close_at_exit, connect, recorded, set_parents
from shapebucket.loading.fingerprints import changes, joined

_T = TypeVar("_T")
_STATE = {"next_index", "fingerprint"}


class ElasticIterDataset(ElementsOfParent, grain.IterDataset[_T]):
    """Reads a `grain.MapDataset` in its order, with threads and worker processes; the state is one integer.

    It stands in the place of `to_iter_dataset(…).mp_prefetch(…)`, whose state holds one state a worker, so that another number
    of workers does not take it. Here the state is `{"next_index": n, "fingerprint": {…}}` for any number; the fingerprint
    is that of the `BucketedMapDataset` before it, without which a step means nothing, and another one is refused. Of other
    stages (a `shuffle` of samples, a `map`) nothing is known: they must be as they were.

    Element i comes from worker i modulo the number of workers. Elements that are None (filtered out) are passed over. The
    workers end when their parent is killed; those of `mp_prefetch` alone then wait for ever.
    """

    def __init__(
        self,
        parent: grain.MapDataset[_T],
        read_options: grain.ReadOptions | None = None,
        multiprocessing_options: grain.MultiprocessingOptions | None = None,
    ) -> None:
        """Makes the stage; reads nothing.

        Args:
            parent: what is read: batches of a `BucketedMapDataset`, after `repeat` and `map`; or samples, for a
                `BucketedIterDataset` behind this.
            read_options: of each worker, or of this process without workers; Grain's default reads 500 elements ahead.
            multiprocessing_options: how many workers, and how many elements each keeps ready. None: no workers. With workers,
                a script needs `if __name__ == "__main__":`.

        Raises:
            ScheduleError: if `parent` is no `grain.MapDataset`, or the options are not Grain's.
        """
        if not isinstance(parent, grain.MapDataset):
            raise ScheduleError(
                f"ElasticIterDataset takes a grain.MapDataset, but got {type(parent).__name__}: put it in the place of "
                ".to_iter_dataset(…).mp_prefetch(…)"
            )
        for name, value, kind in (
            ("read_options", read_options, grain.ReadOptions),
            ("multiprocessing_options", multiprocessing_options, grain.MultiprocessingOptions),
        ):
            if value is not None and not isinstance(value, kind):
                raise ScheduleError(f"{name} must be a grain.{kind.__name__} or None, but got {type(value).__name__}")
        super().__init__(parent)
        self._source = parent
        self._workers = multiprocessing_options.num_workers if multiprocessing_options else 0
        self._read, self._processes = read_options, multiprocessing_options

    def shard(self, at: int) -> _Shard[_T]:
        """Returns every n-th element from one on, for n workers."""
        part = self._source[at :: max(1, self._workers)]
        return _Shard(part.to_iter_dataset(self._read, allow_nones=True), len(part))

    def in_worker(self, shard: _Shard[_T]) -> grain.IterDataset[_T]:
        """Returns a worker's elements, as they come from it."""
        if self._processes is None or not self._workers:
            return shard
        buffered, profiled = self._processes.per_worker_buffer_size, self._processes.enable_profiling
        return shard.mp_prefetch(grain.MultiprocessingOptions(1, buffered, profiled), _watch_parent)

    @property
    def length(self) -> int:
        """Elements, those that are None included."""
        return len(self._source)

    @property
    def workers(self) -> int:
        """Worker processes."""
        return self._workers

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a state must have been saved with to be restored here, by name: that of the `BucketedMapDataset` before it.

        Of several, each name has a list; {} if there is none.
        """
        return joined(self._source)

    def set_slice(self, sl: builtins.slice, sequential_slice: bool = False) -> None:
        """Refuses `mp_prefetch`, which would cut up what is read here.

        Raises:
            ScheduleError: always.
        """
        raise ScheduleError(
            f"ElasticIterDataset has its own workers, and mp_prefetch behind it asks for a part ({sl}, {sequential_slice=}): "
            "leave mp_prefetch out, and say multiprocessing_options=grain.MultiprocessingOptions(num_workers=…)"
        )

    def __iter__(self) -> grain.DatasetIterator[_T]:
        if self._workers:
            mark_flags_parsed()
        shards = [self.shard(at) for at in range(max(1, self._workers))]
        iterator = _ElasticDatasetIterator(self, shards, [iter(self.in_worker(shard)) for shard in shards])
        if self._workers:
            close_at_exit(iterator)
        return iterator

    def __str__(self) -> str:
        return f"ElasticIterDataset(workers={self._workers})"

    __repr__ = __str__


class _Shard(grain.IterDataset[_T]):
    """The elements of one worker, from `start` on, as it is when the worker starts.

    A worker that is told its place by `set_next_index` before it has started drops the error of a start that failed, and its
    reader waits for ever.
    """

    def __init__(self, parent: grain.IterDataset[_T], length: int) -> None:
        super().__init__(parent)
        self._elements = parent
        self.length = length
        self.start = 0

    def __iter__(self) -> grain.DatasetIterator[_T]:
        iterator = iter(self._elements)
        if self.start:
            grain.experimental.set_next_index(iterator, self.start)
        return iterator

    def __str__(self) -> str:
        return f"ElasticShard(start={self.start})"


class _ElasticDatasetIterator(grain.DatasetIterator[_T]):
    """Takes turns between iterators over every n-th element each."""

    def __init__(
        self, dataset: ElasticIterDataset[_T], parts: list[_Shard[_T]], shards: list[grain.DatasetIterator[_T]]
    ) -> None:
        super().__init__(shards)
        self._dataset = dataset
        self._parts = parts
        self._shards = shards
        self._length = dataset.length
        self._next = 0
        self._placed = False  # whether the shards stand where `_next` says
        self._started = [False] * len(shards)

    def __next__(self) -> _T:
        while self._next < self._length:
            element = self._take()
            if element is not None:
                return recorded(self, partial(_same, element))
        raise StopIteration

    def _take(self) -> _T:
        """Takes the next element. One that cannot be read stays the next one."""
        self.start_prefetch()
        self._placed = False  # until it is counted, how far the shard came is not known
        element = self._ask(self._next % len(self._parts), self._next)
        self._next += 1
        self._placed = True
        return element

    def close(self) -> None:
        """Ends the iterator and its workers; `get_state` stays."""
        super().close()
        self._shards = []

    def start_prefetch(self) -> None:
        """Puts the shards in their places and starts them, all at once; does nothing the second time."""
        if not self._shards:
            raise ScheduleError(
                "this iterator was closed: make another with iter(dataset), and set_state() to go on with it"
            )
        if self._placed:
            return
        connect(self)
        for at, shard in enumerate(self._shards):
            before = max(0, -(-(self._next - at) // len(self._shards)))
            if self._dataset.workers:
                self._start(at, before)
            else:
                grain.experimental.set_next_index(shard, before)
                shard.start_prefetch()
        self._placed = True

    def _start(self, at: int, before: int) -> None:
        """Starts a worker in its place, if there is anything left to read; another one in the place of one that was started.

        Grain would start the same one again, in the place that it is told: and wait for ever if that start fails.
        """
        if self._started[at]:
            with contextlib.suppress(Exception):  # it may have died
                self._shards[at].close()
            self._parts[at] = self._dataset.shard(at)
            self._shards[at] = iter(self._dataset.in_worker(self._parts[at]))
            set_parents(self, self._shards)
            self._started[at] = False
        part, shard = self._parts[at], self._shards[at]
        if before < part.length:
            part.start = before
            shard.get_state()  # makes the iterator that start_prefetch starts
            self._started[at] = True
            shard.start_prefetch()

    def _ask(self, at: int, number: int) -> _T:
        """Takes a shard's next element."""
        try:
            return next(self._shards[at])
        except StopIteration as error:  # would pass for the end of the data
            raise ScheduleError(
                f"element {number} of {self._length} did not come: StopIteration was raised for it, in a map perhaps"
            ) from error

    def get_state(self) -> dict[str, Any]:
        """Returns how many elements were passed, the same for any number of workers, and the loader's fingerprint."""
        return {"next_index": self._next, "fingerprint": self._dataset.fingerprint}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes a state that `get_state` returned.

        Raises:
            StateError: if it is none, or of another schedule, or of a longer data set.
        """
        whole = isinstance(state, dict) and state.keys() == _STATE
        if not whole or not is_whole(state["next_index"], 0) or not isinstance(state["fingerprint"], dict):
            raise StateError(
                "ElasticIterDataset takes the state {'next_index': n, 'fingerprint': {…}}, but got "
                f"{str(state)[:80]!r}: it was saved by another pipeline (that of to_iter_dataset has no fingerprint, that of "
                "mp_prefetch one state a worker)"
            )
        if changed := changes(state["fingerprint"], self._dataset.fingerprint):
            raise StateError(
                f"the state was saved by a loader with {changed}: its steps mean other batches; restore it into one with the "
                "same plan and lengths (their files), seed and policies"
            )
        index = state["next_index"]
        if index > self._length:
            raise StateError(
                f"the state was saved after {index} elements, but the data set has {self._length}: it is not the one that the "
                "state was saved with"
            )
        self._next, self._placed = index, False

    def __str__(self) -> str:
        return f"ElasticDatasetIterator(shards={len(self._parts)})"


def _same(element: _T) -> _T:
    return element


def _watch_parent(worker: int, workers: int) -> None:
    """Starts a thread that ends this worker process when its parent has died."""
    threading.Thread(target=_end_with_parent, name=f"watch-parent-{worker}-of-{workers}", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
