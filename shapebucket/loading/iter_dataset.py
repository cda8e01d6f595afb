"""BucketedIterDataset: bucketing a stream of samples whose lengths are not known in advance."""

from __future__ import annotations

import base64
import bisect
import copy
import itertools
import zlib
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import grain
import numpy as np

from shapebucket.buckets import BucketPlan
from shapebucket.errors import LayoutError, OverlongError, ScheduleError, StateError
from shapebucket.loader_report import LoaderReport, Overlong, Remainder, check_plan, check_policies, is_whole
from shapebucket.loading._grain_private import BatchesOfPlan, recorded
from shapebucket.loading.boards import Board
from shapebucket.loading.fingerprints import changes
from shapebucket.loading.parents import Parent
from shapebucket.padding import Checker, Leaves, Lengths, pad_rows, table
from shapebucket.processes import require_one_process
from shapebucket.schedule import promote

_ANCHOR_EVERY = 16
_ANCHORS = 1024
_Waiting = tuple[int, Leaves, Lengths]
"""A sample in a bucket: its number in the stream, and what it was checked to be."""
_END = object()
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
        lockstep: bool = False,
    ) -> None:
        """Makes the stage; reads nothing.

        Args:
            parent: the samples: dicts of arrays as the plan's layout says.
            plan: the buckets.
            max_wait: the most samples that may pass while a sample waits; then its bucket is emitted as it is, with masked
                rows, which costs at most one batch a bucket in `max_wait` samples and leaves the batches of other buckets as
                they were. None: no limit, and a rare bucket may hold a sample to the end of the stream. A bucket of
                B rows and share p fills in about B / p samples.
            remainder: `"pad"` emits the partial batches at the end of the stream with masked rows, `"drop"` leaves their
                samples out.
            overlong: what becomes of a sample that fits no bucket: `"error"`, `"truncate"` or `"drop"`.
            lockstep: says that a `LockstepIterDataset` comes behind. Must be True where several JAX processes run, since
                streams on their own fall out of step.

        Raises:
            ProcessError: if several JAX processes run and `lockstep` is False.
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
        if max_wait is not None and not is_whole(max_wait, 1):
            raise ScheduleError(f"max_wait must be at least 1 sample, a whole number, or None, but got {max_wait!r}")
        plan.batch_spec(plan.buckets[0])
        if not lockstep:
            require_one_process(
                "each would stream batches of its own",
                'Use BucketedMapDataset(shard="jax") where lengths can be known in advance; or say lockstep=True and put a '
                "LockstepIterDataset behind",
            )
        self.plan = self.emitted = plan
        self.max_wait = None if max_wait is None else int(max_wait)
        self.remainder: Remainder = remainder
        self.overlong: Overlong = overlong
        self.checker = Checker(plan)
        self._samples = parent
        self._board = Board[LoaderReport]()

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
        self._board = Board[LoaderReport]()
        return BucketedDatasetIterator(iter(self._samples), self, self._board)

    def report(self) -> LoaderReport:
        """Counts what became of every sample of the iterator that was made last in this process; print it.

        It may be asked at any time, from any thread, whatever stages come behind: `map` changes nothing, a thread that reads
        ahead counts what it has read ahead. Under `RepeatIterDataset` the counts start anew with each pass. Before
        `mp_prefetch` each worker counts its own part, in its own process, and nothing is counted here.

        Raises:
            ScheduleError: if it has read nothing in this process: worker processes count on their own.
        """
        if self._board.report is None:
            raise ScheduleError(
                "nothing was read in this process yet, so there is nothing to report; under mp_prefetch the workers read, and "
                "count on their own: put this stage after mp_prefetch, or use BucketedMapDataset, whose report needs no reading"
            )
        return self._board.report

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_board": Board[LoaderReport]()}

    def __str__(self) -> str:
        return f"BucketedIterDataset(buckets={len(self.plan)}, max_wait={self.max_wait})"

    __repr__ = __str__


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

    def __init__(
        self, parent: grain.DatasetIterator[Any], dataset: BucketedIterDataset, board: Board[LoaderReport]
    ) -> None:
        super().__init__(parent)
        self._source = parent
        self._parent_states = Parent(parent)
        self._dataset = dataset
        self._board = board
        self._plan = dataset.plan
        self._batch_sizes = [bucket.batch_size for bucket in dataset.plan.buckets]
        self._open = True
        self._saved: dict[str, Any] | None = None  # a state that was set and not yet replayed
        self._placed = False  # whether the parent is where that state says
        self._reset()

    def _reset(self) -> None:
        """Returns to an empty stage before sample 0."""
        self._seen = 0
        self._waiting: list[list[_Waiting]] = [[] for _ in self._plan.buckets]
        self._anchors: deque[tuple[int, Any]] = deque()
        self._anchor_limit = _ANCHORS
        self._counts = _Counts(len(self._plan))
        self._flush: list[tuple[int, list[_Waiting]]] | None = None  # the last batches, once the parent has ended
        self._flushed = 0
        self._failure: BaseException | None = None

    def __next__(self) -> dict[str, Any]:
        if not self._open:
            raise ScheduleError(
                "this iterator was closed: make another with iter(dataset), and set_state() to go on with it"
            )
        self._parent_states.require_place()
        if self._saved is not None:
            self._replay(self._saved)
            self._saved = None
        try:
            return self._next_batch()
        finally:
            self._publish(self._counts, self._not_emitted())

    def _next_batch(self) -> dict[str, Any]:
        if self._flush is None:
            try:
                index = self._collect()
            except StopIteration:
                self._flush = self._last_batches()
            else:
                batch = recorded(self, partial(self._batch, index, self._waiting[index]))
                self._waiting[index] = []  # last, or an interruption on the way would lose these samples
                self._prune(self._oldest()[0])
                return batch
        if self._flushed == len(self._flush):
            raise StopIteration
        batch = recorded(self, partial(self._batch, *self._flush[self._flushed]))
        self._flushed += 1
        return batch

    def close(self) -> None:
        """Ends the iterator and its parents; `get_state` and `report` stay."""
        self._open = False
        super().close()

    def get_state(self) -> dict[str, Any]:
        """Returns the state as JSON values, new ones each time and of constant structure."""
        self._parent_states.require_place()
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
            "waiting": _pack(numbers, start),
            "flushed": self._flushed,
            "counts": self._counts.to_json(),
            "not_emitted": self._not_emitted(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes a state that `get_state` returned; the samples that waited are read again at the next `next`.

        Raises:
            StateError: if it was saved with another plan or configuration, or is no state at all.
        """
        mine = self._dataset.fingerprint
        if not isinstance(state, dict) or not isinstance(state.get("fingerprint"), dict):
            raise StateError(
                f"this is no state of a BucketedIterDataset, which get_state() returns: {str(state)[:80]!r}; one that was "
                "saved behind mp_prefetch goes back behind mp_prefetch, with as many workers"
            )
        if missing := _STATE - state.keys():
            raise StateError(f"the state is not whole: it lacks {sorted(missing)}")
        if changed := changes(state["fingerprint"], mine):
            raise StateError(
                f"the state was saved by a loader with {changed}: restore it into one with the same plan (its file, "
                "BucketPlan.load) and policies"
            )
        _unpack(state["waiting"], state["start"])
        self._parent_states.place(state["parent"])
        self._placed = True
        self._reset()
        self._saved = copy.deepcopy(state)
        self._publish(_Counts.from_json(state["counts"]), state["not_emitted"])

    def report(self) -> LoaderReport:
        """Counts what became of every sample up to the last batch; may be called from any thread."""
        return self._board.report or self._report(_Counts(len(self._plan)), 0)

    def _report(self, counts: _Counts, waiting: int) -> LoaderReport:
        return LoaderReport(plan=self._plan, waiting=waiting, **vars(counts))

    def _publish(self, counts: _Counts, waiting: int) -> None:
        self._board.report = self._report(counts, waiting)

    def _numbers(self) -> list[int]:
        """The samples in buckets, ascending."""
        return sorted([number for waiting in self._waiting for number, _, _ in waiting])

    def _not_emitted(self) -> int:
        """Samples in buckets that are still to be emitted."""
        if self._flush is None:
            return sum(map(len, self._waiting))
        return sum(len(rows) for _, rows in self._flush[self._flushed :])

    def _replay(self, saved: dict[str, Any]) -> None:
        """Reads the samples again that waited when the state was saved; if that fails, it can be tried again."""
        self._reset()
        if not self._placed:
            self._parent_states.place(saved["parent"])
        self._placed = False
        self._seen = saved["start"]
        numbers = _unpack(saved["waiting"], saved["start"])
        try:
            for number in numbers:
                self._skip(number)
                self._read(number + 1)
            self._skip(saved["seen"])
        except StopIteration:
            raise StateError(
                f"the state was saved after {saved['seen']} samples, but the data set ends after {self._seen}: it is not "
                "the one that the state was saved with"
            ) from None
        crowded = any(len(rows) >= size for rows, size in zip(self._waiting, self._batch_sizes, strict=True))
        longer = saved["flushed"] and next(self._source, _END) is not _END
        if self._numbers() != numbers or crowded or longer:
            raise StateError(
                f"the samples up to {saved['seen']}, or their number, are not those that the state was saved with: the data "
                "set, or what is done to it before the loader, is another one"
            )
        self._counts = _Counts.from_json(saved["counts"])
        self._flushed = saved["flushed"]

    def _skip(self, stop: int) -> None:
        """Passes over the samples before number `stop`, which no batch needs again."""
        oldest, _ = self._oldest()
        due = self._note(oldest)
        while self._seen < stop:
            for _ in range(self._seen, min(due, stop)):
                next(self._source)
                self._seen += 1
            due = self._note(oldest)

    def _note(self, oldest: int) -> int:
        """Notes the parent's state before sample `_seen` if that is due; returns the number at which it is due again.

        Args:
            oldest: the first sample that waits, `_seen` if none does.
        """
        past = self._seen % _ANCHOR_EVERY
        if not self._anchors or (past == 0 and self._anchors[-1][0] != self._seen):
            self._anchors.append((self._seen, self._source.get_state()))
            self._prune(oldest)
        return self._seen + _ANCHOR_EVERY - past

    def _collect(self) -> int:
        """Reads samples until a bucket is full, or one of its samples has waited for `max_wait`; returns its position."""
        if self._failure is None:
            for full, rows in enumerate(self._waiting):  # an interruption came before its batch was made
                if len(rows) == self._batch_sizes[full]:
                    return full
        limit = self._dataset.max_wait
        oldest, index = self._oldest()
        while True:
            if limit is not None and self._seen - oldest > limit:
                self._counts.early += 1
                return index
            stop = self._note(oldest)
            full = self._read(stop if limit is None else min(stop, oldest + limit + 1))
            if full is not None:
                return full
            if index < 0:  # nothing waited
                oldest, index = self._oldest()

    def _read(self, stop: int) -> int | None:
        """Puts samples up to number `stop` into their buckets; returns the position of the first bucket that is full then.

        A sample that cannot be read, or is refused, stays the next one: each call raises again, since whether the parent would
        give it again is not known. A state taken then has it still to come: set it to try again.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        source, check, waiting, batch_sizes = (
            self._source,
            self._dataset.checker.check,
            self._waiting,
            self._batch_sizes,
        )
        number = self._seen
        try:
            for number in range(self._seen, stop):
                sample = next(source)
                if sample is None:
                    self._counts.absent += 1
                    continue
                leaves, (lengths, index) = check(sample)
                if index is None:
                    index = self._bucket_of_overlong(lengths, number)
                    if index is None:
                        continue
                bucket = waiting[index]
                bucket.append((number, leaves, lengths))
                if len(bucket) == batch_sizes[index]:
                    number += 1
                    return index
            number = stop
            return None
        except StopIteration:
            raise
        except LayoutError as error:
            self._failure = error.at(number)
            raise self._failure from None
        except Exception as error:
            self._failure = error
            raise
        except BaseException as error:
            self._failure = ScheduleError(
                f"{type(error).__name__} interrupted the reading of sample {number}: go on by it.set_state(it.get_state())"
            )
            raise
        finally:
            self._seen = number

    def _bucket_of_overlong(self, lengths: Lengths, number: int) -> int | None:
        """Decides on a sample that fits no bucket: the position of the one it is cut to, or None if it is dropped."""
        if self._dataset.overlong == "error":
            raise OverlongError(self._plan.layout.named(lengths), str(self._plan.buckets[-1]), sample=number)
        if self._dataset.overlong == "truncate":
            return int(self._plan.assign([lengths], truncate=True)[0])
        self._counts.overlong_dropped += 1
        return None

    def _oldest(self) -> tuple[int, int]:
        """Returns the number of the sample that has waited longest and its bucket's position; `_seen` and -1 if none waits."""
        return min([(waiting[0][0], k) for k, waiting in enumerate(self._waiting) if waiting], default=(self._seen, -1))

    def _prune(self, oldest: int) -> None:
        """Forgets the parent's states that no waiting sample needs, the last one left out."""
        while len(self._anchors) > 1 and self._anchors[1][0] <= oldest:
            self._anchors.popleft()
        if len(self._anchors) > self._anchor_limit:
            positions = [position for position, _ in self._anchors]
            needed = {bisect.bisect_right(positions, number) - 1 for number in self._numbers()} | {len(positions) - 1}
            self._anchors = deque(anchor for i, anchor in enumerate(self._anchors) if i in needed)
            self._anchor_limit = max(_ANCHORS, 2 * len(self._anchors))

    def _last_batches(self) -> list[tuple[int, list[_Waiting]]]:
        """Decides on the last batches, once the parent has ended; the buckets stay as they are, for the state."""
        batches: list[tuple[int, list[_Waiting]]] = []
        for partial_batch in promote([len(waiting) for waiting in self._waiting], self._plan):
            rows = [each for k, start, stop in partial_batch.parts for each in self._waiting[k][start:stop]]
            full = len(rows) == self._batch_sizes[partial_batch.bucket]
            if full or self._dataset.remainder == "pad":
                batches.append((partial_batch.bucket, rows))
        self._counts.remainder_dropped = len(self._numbers()) - sum(len(rows) for _, rows in batches)
        return batches

    def _batch(self, index: int, waiting: Sequence[_Waiting]) -> dict[str, Any]:
        """Pads the samples of a bucket, and counts them."""
        _, rows, lengths = zip(*waiting, strict=True)
        found = table(lengths, self._plan.layout)
        truncate = self._dataset.overlong == "truncate"
        batch = pad_rows(rows, found, self._plan.buckets[index], self._plan, truncate=truncate)
        real = found
        if truncate:
            real = np.minimum(found, self._plan.sizes[index])
            self._counts.truncated += int((found > real).any(axis=1).sum())
        self._counts.batches[index] += 1
        self._counts.samples[index] += len(rows)
        self._counts.real_elements[index] += int(self._plan.layout.elements(real).sum())
        return batch

    def __str__(self) -> str:
        return f"BucketedDatasetIterator(buckets={len(self._plan)})"


def _pack(numbers: Sequence[int], start: int) -> str:
    """Writes ascending numbers from `start` on as text: their gaps, compressed, since hundreds of samples may wait."""
    gaps = ",".join([str(number - before) for before, number in itertools.pairwise([start, *numbers])])
    return base64.b64encode(zlib.compress(gaps.encode(), 1)).decode()


def _unpack(packed: str, start: int) -> list[int]:
    """Reads what `_pack` wrote."""
    try:
        gaps = zlib.decompress(base64.b64decode(packed, validate=True)).decode()
        return list(itertools.accumulate(map(int, gaps.split(",")), initial=start))[1:] if gaps else []
    except (ValueError, TypeError, zlib.error) as error:
        raise StateError(
            f"the state's list of waiting samples cannot be read ({error}): {str(packed)[:80]!r}"
        ) from error
