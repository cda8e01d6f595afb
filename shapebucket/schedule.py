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
from shapebucket.lengths import LengthTable
from shapebucket.loader_report import LoaderReport, Overlong, Remainder, check_policies, is_whole
from shapebucket.ordering import by_group, chunks, index_dtype, permutation
from shapebucket.processes import Shard, ShardLike

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


class _Epoch(NamedTuple):
    """One epoch: batch i holds rows[starts[i] : starts[i] + counts[i]] in bucket buckets[i]."""

    rows: npt.NDArray[np.signedinteger[Any]]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int64]


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
        self.plan = plan
        self.shard = Shard.of(shard)
        self.own = plan.per_process(self.shard.count)
        self.lengths = LengthTable.of(lengths, plan.layout.axes)
        self.seed, self.shuffle = int(seed), bool(shuffle)
        self.remainder: Remainder = remainder
        self.overlong: Overlong = overlong
        self.shuffle_batches = None if shuffle_batches is None else int(shuffle_batches)
        bucket_of = np.empty(len(self.lengths), np.int16)
        for part in chunks(len(bucket_of)):
            bucket_of[part] = plan.assign(self.lengths.values[part])
        present = self.lengths.present
        too_long = np.flatnonzero(present & (bucket_of < 0))
        if overlong == "error" and len(too_long):
            first = int(too_long[0])
            named = plan.layout.named(self.lengths.values[first])
            raise OverlongError(named, str(plan.buckets[-1]), sample=first, count=len(too_long))
        if overlong == "truncate":
            bucket_of[too_long] = plan.assign(self.lengths.values[too_long], truncate=True)
        bucket_of[~present] = -1
        self._bucket_of = bucket_of
        self._samples = np.zeros(len(plan), np.int64)
        for part in chunks(len(bucket_of)):
            self._samples += np.bincount(bucket_of[part] + 1, minlength=len(plan) + 1)[1:]
        self._count = int(self._samples.sum())
        kept_all = self._count == len(bucket_of)
        self._kept = None if kept_all else np.flatnonzero(bucket_of >= 0).astype(index_dtype(len(bucket_of)))
        self._overlong_dropped = len(too_long) if overlong == "drop" else 0
        sizes = plan.batch_sizes
        self._full = self._samples // sizes
        partial = promote((self._samples % sizes).tolist(), plan)
        self._partial = [each for each in partial if remainder == "pad" or each.rows == sizes[each.bucket]]
        self._length = int(self._full.sum()) + len(self._partial)
        if not self._length:
            why = f"the {self._count:,} samples fill no batch" if self._count else "it has no samples"
            raise ScheduleError(f'no batch can be made of this data: {why} (remainder="{remainder}")')
        self._forget()

    def _forget(self) -> None:
        self._epochs: dict[
            int, _Epoch
        ] = {}  # two: reading ahead stands at the end of one and the beginning of the next
        self._latest = -1  # the one that was asked for last
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_epochs", "_latest", "_lock")}

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
        number, at = divmod(index, self._length)
        epoch = self._epoch(number)
        start = epoch.starts[at]
        rows = epoch.rows[start : start + epoch.counts[at]]
        return ScheduledBatch(self.own.buckets[epoch.buckets[at]], rows[self.shard.index :: self.shard.count])

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
        }

    @cached_property
    def _lengths_hash(self) -> str:
        values = hashlib.sha256()
        for part in chunks(len(self.lengths)):
            values.update(self.lengths.values[part].astype("<i4", copy=False).tobytes())
        return values.hexdigest()[:16]

    def report(self, epoch: int = 0) -> LoaderReport:
        """Counts what becomes of every sample in an epoch, over all processes."""
        this = self._epoch(epoch)
        bucket_of_row = np.repeat(this.buckets, this.counts)
        within = np.arange(this.counts.sum()) - np.repeat(np.cumsum(this.counts) - this.counts, this.counts)
        rows = this.rows[np.repeat(this.starts, this.counts) + within]
        samples, real_elements, truncated = self.plan.tally(self.lengths.values[rows], bucket_of_row)
        return LoaderReport(
            plan=self.plan,
            batches=np.bincount(this.buckets, minlength=len(self.plan)).tolist(),
            samples=samples,
            real_elements=real_elements,
            truncated=truncated,
            overlong_dropped=self._overlong_dropped,
            remainder_dropped=self._count - len(rows),
            waiting=0,
            early=0,
            absent=int((~self.lengths.present).sum()),
        )

    def _epoch(self, number: int) -> _Epoch:
        """Returns an epoch, computed once however many threads ask; one that is there does not wait for another."""
        held = self._epochs.get(number)
        if held is None:
            with self._lock:
                held = self._epochs.get(number) or self._make(number)
        self._latest = number
        return held

    def _make(self, number: int) -> _Epoch:
        """Computes an epoch, and keeps it and the one that was asked for last."""
        latest = self._epochs.get(self._latest)
        self._epochs = {} if latest is None else {self._latest: latest}  # before the next one takes memory
        epoch = self._compute(number)
        if self.shuffle_batches:
            epoch = self._mixed(epoch, number, self.shuffle_batches)
        self._epochs = {**self._epochs, number: epoch}
        return epoch

    def _mixed(self, epoch: _Epoch, number: int, window: int) -> _Epoch:
        """Returns an epoch with its batches shuffled within windows of so many."""
        order = permutation(self._length, self.seed, number, purpose=1)
        order = order[np.argsort(order // window, kind="stable")]
        return _Epoch(epoch.rows, *(each[order] for each in (epoch.starts, epoch.counts, epoch.buckets)))

    def _compute(self, number: int) -> _Epoch:
        order = permutation(self._count, self.seed, number) if self.shuffle else np.arange(self._count)
        order = order.astype(index_dtype(len(self._bucket_of)), copy=False)
        if self._kept is not None:
            order = self._kept[order]
        arrival = by_group(self._count, lambda part: self._bucket_of[order[part]], self._samples)
        arrival = arrival.astype(order.dtype, copy=False)
        ends = np.cumsum(self._samples)
        firsts = ends - self._samples
        starts: list[npt.NDArray[np.int64]] = []
        filled: list[npt.NDArray[np.int64]] = []
        for k, bucket in enumerate(self.plan.buckets):
            first = firsts[k] + np.arange(self._full[k], dtype=np.int64) * bucket.batch_size
            starts.append(first)
            filled.append(arrival[first + bucket.batch_size - 1])
        rows = arrival  # in its memory: 400 MB for 10⁸ samples
        for part in chunks(self._count):
            rows[part] = order[arrival[part]]
        by_time = np.argsort(np.concatenate(filled), kind="stable")
        buckets = np.repeat(np.arange(len(self.plan), dtype=np.int64), self._full)[by_time]
        sizes = self.plan.batch_sizes
        leftovers = [
            [rows[firsts[k] + self._full[k] * sizes[k] :][start:stop] for k, start, stop in each.parts]
            for each in self._partial
        ]
        flat = [np.concatenate(parts) for parts in leftovers]
        counts = np.array([len(each) for each in flat], np.int64)
        return _Epoch(
            rows=np.concatenate([rows, *flat]),
            starts=np.concatenate([np.concatenate(starts)[by_time], len(rows) + np.cumsum(counts) - counts]),
            counts=np.concatenate([sizes[buckets], counts]),
            buckets=np.concatenate([buckets, np.array([each.bucket for each in self._partial], np.int64)]),
        )


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
