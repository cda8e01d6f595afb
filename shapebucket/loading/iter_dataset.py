"""BucketedIterDataset: bucketing a stream of samples whose lengths are not known in advance."""

from __future__ import annotations

import bisect
import copy
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import grain
import numpy as np

from shapebucket.buckets import BucketPlan
from shapebucket.errors import LayoutError, OverlongError, ScheduleError, StateError
from shapebucket.loader_report import LoaderReport, Overlong, Remainder, check_plan, check_policies
from shapebucket.loading._grain_private import BatchesOfPlan, recorded
from shapebucket.padding import Row, pad_rows
from shapebucket.schedule import promote

_ANCHOR_EVERY = 16
_ANCHORS = 1024
_STATE = {"fingerprint", "parent", "start", "seen", "waiting", "flushed", "counts", "not_emitted"}


class BucketedIterDataset(BatchesOfPlan, grain.IterDataset[dict[str, Any]]):
    """Batches of bucket shapes from a stream: a `grain.IterDataset` over a `grain.IterDataset` of samples.

    Each bucket collects samples as they come and emits a batch when it is full; when the stream ends, what is left is
    emitted with masked rows. Where the lengths can be known in advance, `BucketedMapDataset` is the better loader.

    The state of an iterator is small JSON and exact: the parent's state shortly before the oldest sample that still
    waits, and which samples since then wait. Restoring reads the parent again from there, so `max_wait` bounds the
    cost of a restore.
    """

    def __init__(
        self,
        parent: grain.IterDataset[Any],
        plan: BucketPlan,
        *,
        max_wait: int | None = None,
        remainder: Remainder = "pad",
        overlong: Overlong = "error",
    ) -> None:
        """Makes the stage; reads nothing.

        Args:
            parent: the samples: dicts of arrays as the plan's layout says.
            plan: the buckets.
            max_wait: the most samples that may pass while a sample waits; then its bucket is emitted as it is, with masked
                rows. None: no limit, and a rare bucket may hold a sample to the end of the stream. A bucket of
                B rows and share p fills in about B / p samples.
            remainder: `"pad"` emits the partial batches at the end of the stream with masked rows, `"drop"` leaves their
                samples out.
            overlong: what becomes of a sample that fits no bucket: `"error"`, `"truncate"` or `"drop"`.

        Raises:
            ScheduleError: for a policy that does not exist, or a `max_wait` below 1.
            LayoutError: if the plan does not know the dtypes.
        """
        if not isinstance(parent, grain.IterDataset):
            raise ScheduleError(
                f"BucketedIterDataset takes a grain.IterDataset of samples, but got {type(parent).__name__}: call "
                ".to_iter_dataset() on a MapDataset"
            )
        super().__init__(parent)
        check_plan(plan)
        check_policies(remainder, overlong)
        if max_wait is not None and max_wait < 1:
            raise ScheduleError(f"max_wait must be at least 1 sample, or None, but got {max_wait}")
        plan.batch_spec(plan.buckets[0])
        self.plan = plan
        self.max_wait = max_wait
        self.remainder: Remainder = remainder
        self.overlong: Overlong = overlong
        self._samples = parent
        self._latest: BucketedDatasetIterator | None = None

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a state must have been saved with to be restored here: the plan's fingerprint and the policies, by name."""
        return {
            "plan": self.plan.fingerprint,
            "max_wait": self.max_wait,
            "remainder": self.remainder,
            "overlong": self.overlong,
        }

    def __iter__(self) -> BucketedDatasetIterator:
        self._latest = BucketedDatasetIterator(iter(self._samples), self)
        return self._latest

    def report(self) -> LoaderReport:
        """Counts what became of every sample of the iterator that was made last in this process; print it.

        It may be asked at any time, from any thread, whatever stages come behind: `map` changes nothing, a thread that reads
        ahead counts what it has read ahead. Under `RepeatIterDataset` the counts start anew with each pass. Before
        `mp_prefetch` each worker counts its own part, in its own process, and nothing is counted here.

        Raises:
            ScheduleError: if it has read nothing in this process: worker processes count on their own.
        """
        if self._latest is None or not self._latest.started:
            raise ScheduleError(
                "nothing was read in this process yet, so there is nothing to report; under mp_prefetch the workers read, and "
                "count on their own: put this stage after mp_prefetch, or use BucketedMapDataset, whose report needs no reading"
            )
        return self._latest.report()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": None}

    def __str__(self) -> str:
        return f"BucketedIterDataset(buckets={len(self.plan)}, max_wait={self.max_wait})"


class _Waiting(NamedTuple):
    """A sample in a bucket: its number in the stream, and its checked arrays."""

    number: int
    row: Row


class _Counts:
    """Plain counters, as they stand in a state."""

    def __init__(self, buckets: int) -> None:
        self.batches = [0] * buckets
        self.samples = [0] * buckets
        self.real_elements = [0] * buckets
        self.truncated = 0
        self.overlong_dropped = 0
        self.remainder_dropped = 0
        self.early = 0
        self.absent = 0

    def to_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, list) else value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> _Counts:
        counts = cls(len(value["batches"]))
        vars(counts).update({name: list(each) if isinstance(each, list) else each for name, each in value.items()})
        return counts


class BucketedDatasetIterator(grain.DatasetIterator[dict[str, Any]]):
    """The iterator of a `BucketedIterDataset`; not for several threads at once, as all of Grain's, but for `report`."""

    def __init__(self, parent: grain.DatasetIterator[Any], dataset: BucketedIterDataset) -> None:
        super().__init__(parent)
        self._source = parent
        self._dataset = dataset
        self._plan = dataset.plan
        self._saved: dict[str, Any] | None = None  # a state that was set and not yet replayed
        self._placed = False  # whether the parent is where that state says
        self._reset()
        self._publish()

    def _reset(self) -> None:
        """Returns to an empty stage before sample 0."""
        self._seen = 0
        self._waiting: list[list[_Waiting]] = [[] for _ in self._plan.buckets]
        self._anchors: deque[tuple[int, Any]] = deque()
        self._anchor_limit = _ANCHORS
        self._counts = _Counts(len(self._plan))
        self._flush: list[tuple[int, list[_Waiting]]] | None = None  # the last batches, once the parent has ended
        self._flushed = 0
        self._failure: Exception | None = None

    def __next__(self) -> dict[str, Any]:
        if self._saved is not None:
            self._replay(self._saved)
            self._saved = None
        try:
            return self._next_batch()
        finally:
            self._publish()

    def _next_batch(self) -> dict[str, Any]:
        while self._flush is None:
            index = self._overdue()
            if index is not None:
                self._counts.early += 1
            else:
                try:
                    index = self._read()
                except StopIteration:
                    self._end()
                    break
            if index is not None:
                rows, self._waiting[index] = self._waiting[index], []
                self._prune()
                return recorded(self, partial(self._batch, index, rows))
        assert self._flush is not None
        if self._flushed == len(self._flush):
            raise StopIteration
        self._flushed += 1
        return recorded(self, partial(self._batch, *self._flush[self._flushed - 1]))

    def get_state(self) -> dict[str, Any]:
        """Returns the state as JSON values, new ones each time and of constant structure."""
        if self._saved is not None:
            return copy.deepcopy(self._saved)
        numbers = self._numbers()
        if numbers or self._failure is not None:
            start, parent = self._anchors[0]
        else:
            start, parent = self._seen, self._source.get_state()
        return {
            "fingerprint": self._dataset.fingerprint,
            "parent": copy.deepcopy(parent),
            "start": start,
            "seen": self._seen,
            "waiting": ",".join(str(number - start) for number in numbers),
            "flushed": self._flushed,
            "counts": self._counts.to_json(),
            "not_emitted": self._not_emitted(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes a state that `get_state` returned; the samples that waited are read again at the next `next`.

        Raises:
            StateError: if it was saved with another plan or configuration.
        """
        mine = self._dataset.fingerprint
        if not isinstance(state, dict) or not isinstance(state.get("fingerprint"), dict):
            raise StateError(
                f"this is no state of a BucketedIterDataset, which get_state() returns: {str(state)[:80]!r}; one that was "
                "saved behind mp_prefetch goes back behind mp_prefetch, with as many workers"
            )
        if missing := _STATE - state.keys():
            raise StateError(f"the state is not whole: it lacks {sorted(missing)}")
        found = state["fingerprint"]
        if found != mine:
            changed = [
                f"{name} {found.get(name)!r}, here {mine[name]!r}" for name in mine if found.get(name) != mine[name]
            ]
            raise StateError(
                f"the state was saved by a loader with {'; '.join(changed)}: restore it into one with the same plan (its file, "
                "BucketPlan.load) and policies"
            )
        self._place(state["parent"])
        self._reset()
        self._saved = copy.deepcopy(state)
        self._published = (self._saved["counts"], self._saved["not_emitted"])

    def report(self) -> LoaderReport:
        """Counts what became of every sample up to the last batch; may be called from any thread."""
        counts, waiting = self._published
        return LoaderReport(plan=self._plan, waiting=waiting, **counts)

    @property
    def started(self) -> bool:
        """Whether this iterator has read anything, or has taken a state."""
        return self._seen > 0 or self._flush is not None or self._saved is not None

    def _publish(self) -> None:
        self._published: tuple[dict[str, Any], int] = (self._counts.to_json(), self._not_emitted())

    def _numbers(self) -> list[int]:
        """The samples in buckets, ascending."""
        return sorted(each.number for waiting in self._waiting for each in waiting)

    def _not_emitted(self) -> int:
        """Samples in buckets that are still to be emitted."""
        if self._flush is None:
            return sum(map(len, self._waiting))
        return sum(len(rows) for _, rows in self._flush[self._flushed :])

    def _place(self, parent: Any) -> None:
        """Restores the parent at once: what it refuses is known early, and `start_prefetch` starts in the right place."""
        try:
            self._source.set_state(copy.deepcopy(parent))
            self._source.get_state()  # where mp_prefetch finds that it has more workers than the state
        except Exception as error:
            raise StateError(
                f"the data set before the loader does not take its part of the state ({type(error).__name__}: {error}): build "
                "it as it was when the state was saved; mp_prefetch with as many workers. ElasticIterDataset takes any number"
            ) from error
        self._placed = True

    def _replay(self, saved: dict[str, Any]) -> None:
        """Reads the samples again that waited when the state was saved; if that fails, it can be tried again."""
        self._reset()
        if not self._placed:
            self._place(saved["parent"])
        self._placed = False
        waiting = {saved["start"] + int(offset) for offset in saved["waiting"].split(",") if offset}
        self._seen = saved["start"]
        while self._seen < saved["seen"]:
            try:
                sample = self._take()
            except StopIteration:
                raise StateError(
                    f"the state was saved after {saved['seen']} samples, but the data set ends after {self._seen}: it is not "
                    "the one that the state was saved with"
                ) from None
            if self._seen in waiting:
                self._admit(sample)
            self._seen += 1
        self._counts = _Counts.from_json(saved["counts"])
        self._flushed = saved["flushed"]

    def _take(self) -> Any:
        """Takes sample number `_seen` from the parent, noting the parent's state before it every few samples."""
        if not self._anchors or (self._seen % _ANCHOR_EVERY == 0 and self._anchors[-1][0] != self._seen):
            self._anchors.append((self._seen, self._source.get_state()))
            self._prune()
        return next(self._source)

    def _read(self) -> int | None:
        """Takes a sample and puts it into its bucket; returns the bucket's position if that is full now.

        A sample that cannot be read, or is refused, stays the next one: each call raises again, since whether the parent would
        give it again is not known. A state taken then has it still to come: set it to try again.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        try:
            index = self._admit(self._take())
        except StopIteration:
            raise
        except Exception as error:
            self._failure = error
            raise
        self._seen += 1
        if index is not None and len(self._waiting[index]) == self._plan.buckets[index].batch_size:
            return index
        return None

    def _admit(self, sample: Any) -> int | None:
        """Puts sample number `_seen` into its bucket; returns the bucket's position, or None if it is left out."""
        if sample is None:
            self._counts.absent += 1
            return None
        try:
            row = Row(*self._plan.layout.check(sample))
        except LayoutError as error:
            raise error.at(self._seen) from None
        index = self._plan.index(row.lengths)
        if index is None:
            if self._dataset.overlong == "error":
                named = self._plan.layout.named(row.lengths)
                raise OverlongError(named, str(self._plan.buckets[-1]), sample=self._seen)
            if self._dataset.overlong == "drop":
                self._counts.overlong_dropped += 1
                return None
            index = int(self._plan.assign([row.lengths], truncate=True)[0])
        self._waiting[index].append(_Waiting(self._seen, row))
        return index

    def _overdue(self) -> int | None:
        """Returns the bucket whose oldest sample has waited too long, if one has."""
        limit = self._dataset.max_wait
        if limit is None:
            return None
        oldest = min(((waiting[0].number, k) for k, waiting in enumerate(self._waiting) if waiting), default=None)
        return oldest[1] if oldest is not None and self._seen - oldest[0] > limit else None

    def _prune(self) -> None:
        """Forgets the parent's states that no waiting sample needs, the last one left out."""
        oldest = min((waiting[0].number for waiting in self._waiting if waiting), default=self._seen)
        while len(self._anchors) > 1 and self._anchors[1][0] <= oldest:
            self._anchors.popleft()
        if len(self._anchors) > self._anchor_limit:
            positions = [position for position, _ in self._anchors]
            needed = {bisect.bisect_right(positions, number) - 1 for number in self._numbers()} | {len(positions) - 1}
            self._anchors = deque(anchor for i, anchor in enumerate(self._anchors) if i in needed)
            self._anchor_limit = max(_ANCHORS, 2 * len(self._anchors))

    def _end(self) -> None:
        """Decides on the last batches, once the parent has ended; the buckets stay as they are, for the state."""
        self._flush = []
        for last in promote([len(waiting) for waiting in self._waiting], self._plan):
            rows = [each for k, start, stop in last.parts for each in self._waiting[k][start:stop]]
            full = len(rows) == self._plan.buckets[last.bucket].batch_size
            if full or self._dataset.remainder == "pad":
                self._flush.append((last.bucket, rows))
        self._counts.remainder_dropped = len(self._numbers()) - sum(len(rows) for _, rows in self._flush)

    def _batch(self, index: int, waiting: list[_Waiting]) -> dict[str, Any]:
        """Pads the samples of a bucket, and counts them."""
        bucket = self._plan.buckets[index]
        rows = [each.row for each in waiting]
        lengths, sizes = np.array([row.lengths for row in rows]), self._plan.sizes[index]
        self._counts.batches[index] += 1
        self._counts.samples[index] += len(rows)
        self._counts.real_elements[index] += int(self._plan.layout.elements(np.minimum(lengths, sizes)).sum())
        self._counts.truncated += int((lengths > sizes).any(axis=1).sum())
        return pad_rows(rows, bucket, self._plan, truncate=self._dataset.overlong == "truncate")

    def __str__(self) -> str:
        return f"BucketedDatasetIterator(buckets={len(self._plan)})"
