"""Schedule: a whole epoch's batches as indices, before any sample is read; numpy only.

Letters in shapes: `N` samples, `M` batches of an epoch, `K` buckets.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shapebucket.buckets import Bucket, BucketPlan
from shapebucket.errors import OverlongError, ScheduleError
from shapebucket.histogram import ABSENT
from shapebucket.lengths import LengthTable
from shapebucket.loader_report import LoaderReport, Overlong, Remainder, check_policies, is_whole
from shapebucket.ordering import Indices, by_group, chunks, index_dtype, permutation
from shapebucket.processes import Shard, ShardLike
from shapebucket.windows import Windows

_ORDER = 1  # of the way from lengths and seed to batches: one more whenever the pinned orders of the tests change
_SEEDS = 2**128


class ScheduledBatch(NamedTuple):
    """One batch before its samples are read.

    Attributes:
        bucket: its shape; of a process's part, with the rows of that part.
        indices: which samples fill its rows, int32 or int64 [n], n ≤ bucket.batch_size; the other rows are padding.
    """

    bucket: Bucket
    indices: npt.NDArray[np.signedinteger[Any]]


class _Window(NamedTuple):
    """A window's batches in an epoch: number first + i holds rows[starts[i] : starts[i] + counts[i]] in bucket buckets[i]."""

    first: int
    rows: npt.NDArray[np.signedinteger[Any]]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int64]

    def holds(self, index: int) -> bool:
        """Whether a batch of this number is among them."""
        return self.first <= index < self.first + len(self.starts)


class Partial(NamedTuple):
    """A batch made of leftovers: its bucket, and (bucket left over from, start, stop) of each part, by position."""

    bucket: int
    parts: list[tuple[int, int, int]]

    @property
    def rows(self) -> int:
        """Real rows of the batch."""
        return sum(stop - start for _, start, stop in self.parts)


class Schedule:
    """Which samples form each batch of each epoch, by random access: `schedule[i] → (bucket, indices)`.

    Samples are taken in a random order that depends on seed and epoch alone, and go to their buckets; batches stand in
    the order in which a stream would have filled them. What is left at the end of an epoch is promoted as a group into
    the unfilled rows of larger buckets, nearest first, where it fits entirely; the remaining partial batches come last. The
    number of batches is the same in every epoch, and batch i of epoch e is number `e * len(schedule) + i`.

    Several processes share one schedule by `shard=`. A plan's batch sizes are those of the whole batch, over all processes,
    so batches and their number do not depend on how many there are, and a run goes on from its step on another number
    of them. Row r of a batch goes to process r mod count; each has the same bucket at each step, and each sample is in one.

    It is a plain sequence, over numpy alone: the batch sampler of any framework's loader. An epoch is computed when it is
    first asked for, in one pass over the samples; threads may share a schedule, and a pickled one carries no epoch.

    Where an epoch of all samples takes too much memory (some 14 bytes a sample), `window=` has it computed by parts of so many
    samples, two of which are held; the lengths may be a table that is mapped from its file (`LengthTable.load`), which all
    processes of a machine share.
    """

    def __init__(
        self,
        lengths: LengthTable | npt.ArrayLike,
        plan: BucketPlan,
        *,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_batches: int | None = None,
        remainder: Remainder = "pad",
        overlong: Overlong = "error",
        shard: ShardLike = None,
        window: int | None = None,
    ) -> None:
        """Plans the epochs.

        Args:
            lengths: the lengths of every sample, in the data set's order.
            plan: the buckets.
            seed: of the order of samples, a non-negative integer below 2¹²⁸.
            shuffle: whether the order is random, another one each epoch; else the data set's own.
            shuffle_batches: a number of batches: each run of so many is put into random order, another one each epoch, after
                the batches are formed. For data in an order of its own (`shuffle=False`), where lengths may come sorted;
                batches of shuffled samples are more evenly mixed without it. None: the order in which they fill.
            remainder: what becomes of a partial batch at the end of an epoch: `"pad"` fills it with padding rows,
                `"drop"` leaves its samples out of this epoch.
            overlong: what becomes of a sample that fits no bucket: `"error"`, `"truncate"` (the loader cuts it to the
                bucket that keeps most of it), or `"drop"`.
            shard: the part of each batch that this process makes, (index, count), dealt from batches of all of them; `"jax"`
                for JAX's processes, as they are when the schedule is made; None for whole batches.
            window: samples whose batches are planned together, about so many; None for all. Each window has a remainder of its
                own: at most one partial batch a bucket. If shuffled, it is drawn once from all over the data, in blocks of up
                to 4,096 neighbours; each epoch, windows change places, and samples within them.

        Raises:
            OverlongError: if a sample fits no bucket and the policy is `"error"`.
            PlanError: if a bucket's rows cannot be dealt evenly.
            ProcessError: for a shard that cannot be.
            ScheduleError: for a policy that does not exist, or if no batch is left.
        """
        check_policies(remainder, overlong)
        if not is_whole(seed, 0) or seed >= _SEEDS:
            raise ScheduleError(f"the seed must be a non-negative integer below 2**128, but got {seed!r}")
        if shuffle_batches is not None and not is_whole(shuffle_batches, 1):
            raise ScheduleError(f"shuffle_batches must be a number of batches, or None, but got {shuffle_batches!r}")
        if window is not None and not is_whole(window, 1):
            raise ScheduleError(f"window must be a number of samples, or None for all, but got {window!r}")
        self.plan = plan
        self.shard = Shard.of(shard)
        self.own = plan.per_process(self.shard.count)
        self.lengths = LengthTable.of(lengths, plan.layout.axes)
        self.seed, self.shuffle = int(seed), bool(shuffle)
        self.remainder: Remainder = remainder
        self.overlong: Overlong = overlong
        self.shuffle_batches = None if shuffle_batches is None else int(shuffle_batches)
        self.window = None if window is None else int(window)
        self._windows = Windows(len(self.lengths), self.window, self.seed if self.shuffle else None)
        whole = len(self._windows) == 1
        self._bucket_of = np.empty(len(self.lengths), np.int16) if whole else None  # of windows, found when they are
        samples = np.zeros((len(self._windows), len(plan) + 1), np.int64)  # the first column: of no bucket
        self._absent = self._overlong_dropped = 0
        first_overlong = None
        for part in chunks(len(self.lengths)):
            values = self.lengths.values[part]
            buckets, absent = self._assigned(values), values[:, 0] == ABSENT
            overlong_here = np.flatnonzero((buckets < 0) & ~absent)
            if len(overlong_here) and first_overlong is None:
                first_overlong = part.start + int(overlong_here[0])
            self._overlong_dropped += len(overlong_here)
            self._absent += int(absent.sum())
            cells = self._windows.of(part).astype(np.int64) * (len(plan) + 1) + buckets + 1
            samples += np.bincount(cells, minlength=samples.size).reshape(samples.shape)
            if self._bucket_of is not None:
                self._bucket_of[part] = buckets
        if overlong == "error" and first_overlong is not None:
            named = plan.layout.named(self.lengths.values[first_overlong])
            largest = str(plan.buckets[-1])
            raise OverlongError(named, largest, sample=first_overlong, count=self._overlong_dropped)
        self._samples = samples[:, 1:]
        self._count = int(self._samples.sum())
        self._batches = (self._samples // plan.batch_sizes).sum(axis=1)
        self._batches += [len(self._partial(window)) for window in range(len(self._windows))]
        self._length = int(self._batches.sum())
        if not self._length:
            why = f"the {self._count:,} samples fill no batch" if self._count else "it has no samples"
            raise ScheduleError(f'no batch can be made of this data: {why} (remainder="{remainder}")')
        self._forget()

    def _assigned(self, values: npt.NDArray[np.int32]) -> npt.NDArray[np.int16]:
        """Returns the buckets of samples with lengths [N, A]; -1 for those that go to none."""
        buckets = self.plan.assign(values, truncate=self.overlong == "truncate").astype(np.int16)
        buckets[values[:, 0] == ABSENT] = -1
        return buckets

    def _partial(self, window: int) -> list[Partial]:
        """Returns the partial batches of a window."""
        sizes = self.plan.batch_sizes
        partial = promote((self._samples[window] % sizes).tolist(), self.plan)
        return [each for each in partial if self.remainder == "pad" or each.rows == sizes[each.bucket]]

    def _forget(self) -> None:
        self._held: tuple[
            _Window, ...
        ] = ()  # two: reading ahead stands at the end of one and the beginning of the next
        self._latest: _Window | None = None  # the one that was asked for last
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_held", "_latest", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        """Batches of an epoch; the same in every epoch."""
        return self._length

    def __getitem__(self, index: int) -> ScheduledBatch:
        """Returns a batch; an index from `len` on is one of a later epoch."""
        if index < 0:
            raise IndexError(f"a schedule has no batch {index}: indices start at 0 and run on into later epochs")
        window = self._window(index)
        at = index - window.first
        start = window.starts[at]
        rows = window.rows[start : start + window.counts[at]]
        return ScheduledBatch(self.own.buckets[window.buckets[at]], rows[self.shard.index :: self.shard.count])

    def __iter__(self) -> Iterator[ScheduledBatch]:
        """Yields the batches of the first epoch."""
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        shard = f"{self.shard.index} of {self.shard.count}"
        return f"Schedule(buckets={len(self.plan)}, batches={len(self)}, seed={self.seed}, shard={shard})"

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What decides which batch stands where, as JSON values by name: a step means the same only where this is the same.

        Plan and lengths stand there as hashes. The shard is left out, since a run goes on with another number of processes; the
        seed is None where nothing is shuffled.
        """
        return {
            "order": _ORDER,
            "plan": self.plan.fingerprint,
            "lengths": self._lengths_hash,
            "seed": self.seed if self.shuffle or self.shuffle_batches else None,
            "shuffle": self.shuffle,
            "shuffle_batches": self.shuffle_batches,
            "remainder": self.remainder,
            "overlong": self.overlong,
            "window": self.window,
        }

    @cached_property
    def _lengths_hash(self) -> str:
        values = hashlib.sha256()
        for part in chunks(len(self.lengths)):
            values.update(self.lengths.values[part].astype("<i4", copy=False).tobytes())
        return values.hexdigest()[:16]

    def report(self, epoch: int = 0) -> LoaderReport:
        """Counts what becomes of every sample in an epoch, over all processes."""
        batches, samples, real_elements = np.zeros((3, len(self.plan)), np.int64)
        truncated, index = 0, epoch * self._length
        while index < (epoch + 1) * self._length:
            this = self._window(index)
            index += len(this.starts)
            bucket_of_row = np.repeat(this.buckets, this.counts)
            within = np.arange(this.counts.sum()) - np.repeat(np.cumsum(this.counts) - this.counts, this.counts)
            rows = this.rows[np.repeat(this.starts, this.counts) + within]
            of_samples, of_elements, cut = self.plan.tally(self.lengths.values[rows], bucket_of_row)
            batches += np.bincount(this.buckets, minlength=len(self.plan))
            samples += of_samples
            real_elements += of_elements
            truncated += cut
        return LoaderReport(
            plan=self.plan,
            batches=batches.tolist(),
            samples=samples.tolist(),
            real_elements=real_elements.tolist(),
            truncated=truncated,
            overlong_dropped=self._overlong_dropped,
            remainder_dropped=self._count - int(samples.sum()),
            waiting=0,
            early=0,
            absent=self._absent,
        )

    def _window(self, index: int) -> _Window:
        """Returns the window of a batch, computed once however many threads ask; one that is there waits for no other."""
        held = self._find(index)
        if held is None:
            with self._lock:
                held = self._find(index) or self._make(index)
        self._latest = held
        return held

    def _find(self, index: int) -> _Window | None:
        return next((each for each in self._held if each.holds(index)), None)

    def _make(self, index: int) -> _Window:
        """Computes the window of a batch, and keeps it and the one that was asked for last."""
        kept = () if self._latest is None else (self._latest,)
        self._held = kept  # before the next one takes memory
        window = self._compute(*self._place(index))
        self._held = (*kept, window)
        return window

    def _place(self, index: int) -> tuple[int, int, int]:
        """Returns the epoch and the window of a batch, and the number of that window's first batch."""
        epoch, at = divmod(index, self._length)
        windows = np.arange(len(self._windows))
        if self.shuffle:
            windows = permutation(len(windows), self.seed, epoch, purpose=2)
        ends = np.cumsum(self._batches[windows])
        position = int(np.searchsorted(ends, at, side="right"))
        window = int(windows[position])
        return epoch, window, epoch * self._length + int(ends[position] - self._batches[window])

    def _random(self, count: int, epoch: int, window: int, purpose: int) -> Indices:
        """Returns a random order of things in a window."""
        of_window = None if len(self._windows) == 1 else window
        return permutation(count, self.seed, epoch, purpose=purpose, window=of_window)

    def _compute(self, epoch: int, window: int, first: int) -> _Window:
        """Forms the batches of a window: the full ones in the order in which they fill, then the partial ones."""
        rows, starts, filled = self._fill(epoch, window)
        sizes, samples, partial = self.plan.batch_sizes, self._samples[window], self._partial(window)
        by_time = np.argsort(filled, kind="stable")
        buckets = np.repeat(np.arange(len(sizes), dtype=np.int64), samples // sizes)[by_time]
        left = np.cumsum(samples) - samples % sizes  # where what fills no batch begins
        flat = [np.concatenate([rows[left[k] + start : left[k] + stop] for k, start, stop in p.parts]) for p in partial]
        counts = np.array([len(each) for each in flat], np.int64)
        batches = [
            np.concatenate([starts[by_time], len(rows) + np.cumsum(counts) - counts]),
            np.concatenate([sizes[buckets], counts]),
            np.concatenate([buckets, np.array([each.bucket for each in partial], np.int64)]),
        ]
        if self.shuffle_batches:
            mixed = self._random(len(batches[0]), epoch, window, purpose=1)
            mixed = mixed[np.argsort(mixed // self.shuffle_batches, kind="stable")]
            batches = [each[mixed] for each in batches]
        return _Window(first, np.concatenate([rows, *flat]), *batches)

    def _fill(self, epoch: int, window: int) -> tuple[Indices, npt.NDArray[np.int64], Indices]:
        """Deals the samples of a window to their buckets.

        Returns:
            The samples by bucket, in the order of their arrival; where each full batch starts, by bucket; and when it is full.
        """
        members, bucket_of = None, self._bucket_of
        if bucket_of is None:
            members = self._windows.members(window)
            parts = [self._assigned(self.lengths.values[members[part]]) for part in chunks(len(members))]
            bucket_of = np.concatenate(parts)
        samples, sizes = self._samples[window], self.plan.batch_sizes
        count = int(samples.sum())
        order = self._random(count, epoch, window, purpose=0) if self.shuffle else np.arange(count)
        order = order.astype(index_dtype(len(bucket_of)), copy=False)
        if count < len(bucket_of):
            order = np.flatnonzero(bucket_of >= 0).astype(order.dtype)[order]
        arrival = by_group(count, lambda part: bucket_of[order[part]], samples).astype(order.dtype, copy=False)
        starts = [
            first + np.arange(full, dtype=np.int64) * size
            for first, full, size in zip(np.cumsum(samples) - samples, samples // sizes, sizes, strict=True)
        ]
        filled = np.concatenate([arrival[each + size - 1] for each, size in zip(starts, sizes, strict=True)])
        rows = arrival  # in its memory: 400 MB for 10⁸ samples
        for part in chunks(count):
            rows[part] = order[arrival[part]]
        return rows if members is None else members[rows], np.concatenate(starts), filled


def promote(rest: Sequence[int], plan: BucketPlan) -> list[Partial]:
    """Plans the last batches from the rows that are left in each bucket.

    From the cheapest bucket up, the rows left in a bucket move into unfilled rows of larger buckets that have rows left
    too, nearest first, if those can take all of them: that saves a whole batch and costs nothing.

    Args:
        rest: rows left in each bucket, [K], fewer than its batch size.
        plan: the buckets.
    """
    partial = {k: Partial(k, [(k, 0, count)]) for k, count in enumerate(rest) if count}
    room = {k: plan.buckets[k].batch_size - rest[k] for k in partial}
    for k in list(partial):
        takers = [m for m in partial if m != k and (plan.sizes[m] >= plan.sizes[k]).all()]
        if partial[k].rows > sum(room[m] for m in takers):
            continue
        moving = partial.pop(k).parts
        for m in takers:
            while moving and room[m]:
                origin, start, stop = moving.pop()
                split = max(start, stop - room[m])
                partial[m].parts.append((origin, split, stop))
                room[m] -= stop - split
                if start < split:
                    moving.append((origin, start, split))
    return list(partial.values())
