"""BucketedMapDataset: the schedule as a Grain stage. Random access, and so the main loader."""

from __future__ import annotations

import builtins
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args, overload

import grain
import numpy as np
import numpy.typing as npt

from shapebucket.buckets import BucketPlan
from shapebucket.errors import LayoutError, ScheduleError
from shapebucket.histogram import ABSENT
from shapebucket.lengths import LengthTable
from shapebucket.loader_report import LoaderReport, Overlong, Remainder, check_plan
from shapebucket.loading._grain_private import BatchesOfPlan, recorded
from shapebucket.padding import Checker, Leaves, Lengths, pad_rows, table
from shapebucket.processes import ShardLike, require_one_process
from shapebucket.sampling import evenly
from shapebucket.schedule import Schedule

Absent = Literal["error", "mask"]
_PROBES = 8
_NEAR = 1 << 16  # elements that are looked through for one that is there


class BucketedMapDataset(BatchesOfPlan, grain.MapDataset[dict[str, Any]]):
    """Batches of bucket shapes by random access: a `grain.MapDataset` over a `grain.MapDataset` of samples.

    Which samples form which batch is known before any is read (see `Schedule`), so the state of an iterator is one
    integer, and the order does not depend on threads or worker processes. Epoch e of the parent feeds epoch e of the
    loader, so `random_map` before it draws anew; shuffling before it does not work, and is found out: shuffle here.

    In several JAX processes, `shard="jax"` keeps all in step without a word between them: each makes its rows of the same
    batches, and reads only those samples (see `Schedule`, and `make_global` for what comes next).
    """

    def __init__(
        self,
        parent: grain.MapDataset[Any],
        plan: BucketPlan,
        lengths: LengthTable | npt.ArrayLike,
        *,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_batches: int | None = None,
        remainder: Remainder = "pad",
        overlong: Overlong = "error",
        absent: Absent = "error",
        shard: ShardLike = None,
        window: int | None = None,
    ) -> None:
        """Plans the epochs; reads a few samples, to warn if they have not the given lengths in a second epoch.

        Args:
            parent: the samples: dicts of arrays as the plan's layout says.
            plan: the buckets.
            lengths: of every element of `parent`, in its order, as `measure(parent, layout)` gives them.
            seed: of the order of samples.
            shuffle: whether the order is random, another one each epoch.
            shuffle_batches: a number of batches: each run of so many comes in random order; see `Schedule`.
            remainder: `"pad"` fills the partial batches at the end of an epoch with masked rows, `"drop"` leaves their
                samples out.
            overlong: what becomes of a sample that fits no bucket: `"error"`, `"truncate"` or `"drop"`.
            absent: what becomes of an element that is None when it is read, though it had a length: `"error"`, or
                `"mask"` for a filter that decides anew each time: its row is a padding row; `masked` counts them.
            shard: the rows of each batch that this process makes, (index, count), or `"jax"` for JAX's processes. A bucket's
                batch size is that of all processes together. Must be given where several JAX processes run; `(0, 1)`
                for whole batches.
            window: samples whose batches are planned together, for data sets of very many; see `Schedule`.

        Raises:
            OverlongError: if a sample fits no bucket and the policy is `"error"`.
            PlanError: if a bucket's rows cannot be dealt evenly to the processes.
            ProcessError: for a shard that cannot be, or none where several JAX processes run.
            ScheduleError: if `lengths` is not of this data set, or no batch can be made.
            LayoutError: if the plan does not know the dtypes, or a sample does not fit the layout.
        """
        if not isinstance(parent, grain.MapDataset):
            raise ScheduleError(
                f"BucketedMapDataset takes a grain.MapDataset of samples, but got {type(parent).__name__}: for an IterDataset "
                "there is BucketedIterDataset"
            )
        super().__init__(parent)
        check_plan(plan)
        plan.batch_spec(plan.buckets[0])
        if absent not in get_args(Absent):
            raise ScheduleError(f"absent must be one of {get_args(Absent)}, but got {absent!r}")
        if shard is None:
            require_one_process(
                "each would make batches of its own",
                'Say shard="jax" to deal each batch to them, or shard=(0, 1) where each is meant to make the whole batch',
            )
        self.schedule = Schedule(
            lengths,
            plan,
            seed=seed,
            shuffle=shuffle,
            shuffle_batches=shuffle_batches,
            remainder=remainder,
            overlong=overlong,
            shard=shard,
            window=window,
        )
        self.emitted = self.schedule.own  # of the batches that this process makes
        self.absent: Absent = absent
        self._masked = _Counter()
        if len(parent) != len(self.schedule.lengths):
            raise ScheduleError(
                f"the data set has {len(parent):,} elements, but lengths of {len(self.schedule.lengths):,} were given: measure "
                "this data set, before .repeat() and .batch()"
            )
        self._samples = parent
        self._checker = Checker(plan)
        self._probe()

    def _probe(self) -> None:
        """Reads a few samples of the second epoch, to warn of a data set whose order changes before an epoch is lost."""
        values = self.schedule.lengths.values
        for start in evenly(len(values), _PROBES):
            there = np.flatnonzero(values[start : start + _NEAR, 0] != ABSENT)
            if not len(there):
                continue
            index = start + int(there[0])
            try:
                self._rows(np.array([index]), len(self._samples))
            except IndexError:
                return  # a data set of one epoch
            except (ScheduleError, LayoutError) as error:
                warnings.warn(f"this loader will fail in a second epoch, if not before: {error}", stacklevel=3)
                return

    def set_slice(self, sl: builtins.slice, sequential_slice: bool = False) -> None:
        """Refuses `mp_prefetch(sequential_slice=True)`, which would cut the samples up under a schedule of all of them.

        Raises:
            ScheduleError: always. Grain calls this for sequential slices only.
        """
        raise ScheduleError(
            f"mp_prefetch(sequential_slice=True) gives each worker a part ({sl}, {sequential_slice=}) of the samples, but the "
            "schedule is of all of them: leave sequential_slice out; each worker then makes a part of the batches"
        )

    @property
    def plan(self) -> BucketPlan:
        """The buckets."""
        return self.schedule.plan

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a step was saved with if it means the same batch here: plan, lengths, seed and policies, as JSON values by name.

        The state of an iterator is Grain's, an index, which cannot hold it: save this beside the state and compare, or read
        by `ElasticIterDataset`, which does both. The shard is no part of it: a run goes on with another number of processes.
        """
        return {**self.schedule.fingerprint, "absent": self.absent}

    @property
    def masked(self) -> int:
        """Rows that became padding since their element was None when it was read (`absent="mask"`), in all reads so far.

        Counted where they are read: worker processes of `mp_prefetch` count on their own. What a batch lost is
        `len(loader.schedule[i].indices) - batch["example_mask"].sum()` anywhere.
        """
        return self._masked.value

    def report(self, epoch: int = 0) -> LoaderReport:
        """Counts what becomes of every sample in an epoch, over all processes, as planned before any is read; print it.

        Rows that `absent="mask"` then leaves empty are in it too, those of all epochs that this process itself has read,
        and none that worker processes have: see `masked`.
        """
        return replace(self.schedule.report(epoch), masked=self.masked)

    def __len__(self) -> int:
        """Batches of an epoch; the same in every epoch."""
        return len(self.schedule)

    @overload
    def __getitem__(self, index: builtins.slice) -> grain.MapDataset[dict[str, Any]]: ...
    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    def __getitem__(self, index: builtins.slice | int) -> grain.MapDataset[dict[str, Any]] | dict[str, Any]:
        """Reads and pads a batch; see `pad` for what it holds. An index from `len` on is one of a later epoch.

        Raises:
            ScheduleError: if a sample has not the length it was measured with, or for a later epoch of a data set of one.
            LayoutError: if a sample does not fit the layout.
        """
        if isinstance(index, slice):
            return self.slice(index)
        bucket, indices = self.schedule[index]
        offset = index // len(self.schedule) * len(self._samples)
        try:
            rows, lengths = self._rows(indices, offset)
        except IndexError as error:
            if not offset:
                raise
            raise ScheduleError(
                f"batch {index} is of epoch {index // len(self.schedule)}, for which the data set before the loader raised "
                f"IndexError ({error}). Perhaps it has one epoch only: Grain asks for a later one by indices from its length "
                "on. Have it take the index modulo its length, or read one epoch"
            ) from error
        self._masked.add(len(indices) - len(rows))
        truncate = self.schedule.overlong == "truncate"
        return recorded(self, partial(pad_rows, rows, lengths, bucket, self.plan, truncate=truncate))

    def _rows(self, indices: npt.NDArray[Any], offset: int) -> tuple[Sequence[Leaves], npt.NDArray[np.int64]]:
        """Reads the samples that are there, and checks that they have the lengths they were measured with.

        Returns:
            Their leaves, and their lengths [n, A].
        """
        read = [self._row(number, offset) for number in indices.tolist()]
        there = [row for row in read if row is not None]
        if len(there) < len(read):
            indices = indices[[row is not None for row in read]]
        lengths = table([each for _, each in there], self.plan.layout)
        expected = self.schedule.lengths.values[indices]
        if not np.array_equal(lengths, expected):
            raise self._changed(indices, lengths, expected)
        return [leaves for leaves, _ in there], lengths

    def _row(self, index: int, offset: int) -> tuple[Leaves, Lengths] | None:
        try:
            sample = self._samples[offset + index]
        except StopIteration as error:  # would pass for the end of the epoch
            raise ScheduleError(
                f"element {index} did not come: StopIteration was raised for it, in a map perhaps"
            ) from error
        if sample is None:
            if self.absent == "mask":
                return None
            raise ScheduleError(
                f"element {index} of the data set is None, but it had a length when it was measured: a filter before the "
                'loader must decide alike each time: measure the filtered data set, or say absent="mask" to have padding rows '
                "in place of such elements"
            )
        try:
            leaves, (lengths, _) = self._checker.check(sample)
        except LayoutError as error:
            raise error.at(index) from None
        return leaves, lengths

    def _changed(
        self, indices: npt.NDArray[Any], found: npt.NDArray[np.int64], expected: npt.NDArray[np.int32]
    ) -> ScheduleError:
        """Explains the first sample that has not the length it was measured with."""
        at = int(np.argmax((found != expected).any(axis=1)))
        named = self.plan.layout.named
        return ScheduleError(
            f"sample {indices[at]} has lengths {named(found[at])}, but "
            f"{named(expected[at])} was measured: the lengths are of other data, or the data "
            "set changes between epochs. Shuffle with the loader (shuffle=True, seed=…) and not before it; freeze a mix with "
            ".repeat(1, reseed_each_epoch=False); for random lengths use BucketedIterDataset"
        )

    def __str__(self) -> str:
        return f"BucketedMapDataset(buckets={len(self.plan)}, batches={len(self)})"

    __repr__ = __str__


class _Counter:
    """A number that several threads add to; a pickled one starts at 0."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Adds a count; most are 0, and cost no lock."""
        if count:
            with self._lock:
                self.value += count

    def __reduce__(self) -> tuple[type[_Counter], tuple[()]]:
        return _Counter, ()
