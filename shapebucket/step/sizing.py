"""fit_batch_sizes: the most rows of each bucket whose compiled step fits a device's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from shapebucket.buckets import Bucket, BucketPlan
from shapebucket.errors import BudgetError, StepError
from shapebucket.loader_report import is_whole
from shapebucket.step.memory import device_bytes, release
from shapebucket.step.probes import Probes
from shapebucket.step.report import Cost
from shapebucket.tables import mebibytes, progress_bars, render

_OWN_NAMES = ("max_batch_size", "progress")
_MOST_ROWS = 1 << 20
_MOST_GROWTH = 16  # from the largest batch that was compiled to the next
_PATIENCE = 4  # compiles by interpolation alone; then every other one halves what is left


@dataclass(frozen=True)
class FittedBucket:
    """A bucket with the batch size that was found for it.

    Attributes:
        bucket: of the new plan.
        peak_bytes: what a device must hold in its step: arguments, outputs and temporaries, what is donated counted once.
        next_peak_bytes: the same with the plan's `batch_multiple_of` more rows, which is beyond the budget; infinity where
            XLA refuses to compile it, None where `max_batch_size` does not allow it.
        compiles: how many batch sizes were compiled to find it.
    """

    bucket: Bucket
    peak_bytes: int
    next_peak_bytes: float | None
    compiles: int


@dataclass(frozen=True)
class BatchSizeFit:
    """What `fit_batch_sizes` found; print it.

    Attributes:
        plan: the same boundaries with the batch sizes that fit.
        buckets: what each needs, in the plan's order.
        budget_bytes: what a device may hold.
    """

    plan: BucketPlan
    buckets: tuple[FittedBucket, ...]
    budget_bytes: int

    @property
    def compiles(self) -> int:
        """How many batch sizes were compiled, over all buckets."""
        return sum(each.compiles for each in self.buckets)

    def __str__(self) -> str:
        rows = [
            [
                str(each.bucket),
                mebibytes(each.peak_bytes),
                f"{each.peak_bytes / self.budget_bytes:.1%}",
                "–" if each.next_peak_bytes is None else f"{each.next_peak_bytes / self.budget_bytes:.1%}",
                str(each.compiles),
            ]
            for each in self.buckets
        ]
        multiple = self.plan.batch_multiple_of
        more = f"with {multiple} more row{'s' * (multiple > 1)}"
        title = f"batch sizes for {mebibytes(self.budget_bytes)} MiB a device, found in {self.compiles} compiles"
        return render(title, ["bucket", "peak MiB", "of the budget", more, "compiles"], rows, text=1)


def fit_batch_sizes(
    fn: Callable[..., Any],
    plan: BucketPlan,
    memory_budget: int | None,
    *args: Any,
    max_batch_size: int = _MOST_ROWS,
    progress: bool = True,
    **kwargs: Any,
) -> BatchSizeFit:
    """Finds for each bucket the largest batch whose step fits a device's memory, by compiling alone: nothing is run.

    XLA says of a program what memory it needs. That grows nearly linearly with the rows, from a part that does not depend on
    them (parameters, optimizer, gradients); so each bucket starts from what the last one told, goes on to where the line
    through two of its batches meets the budget, and ends when a batch fits and the next multiple of the plan's
    `batch_multiple_of` does not.

        fit = fit_batch_sizes(train_step, plan, 12 * 2**30, state, BATCH, donate_argnames="state")
        print(fit)
        step = CompiledStep(train_step, fit.plan, donate_argnames="state")

    What else lies on the device (batches on their way, the state of an evaluation, fragments) is not counted: leave room.

    Args:
        fn: the step, not jitted.
        plan: its boundaries and its `batch_multiple_of` are kept, and its batch sizes are where the search starts. It must
            know the dtypes.
        memory_budget: what a device may hold in a step, in bytes; None for what JAX says of the device, where it does.
        *args: the arguments of the step with `BATCH` in the batch's place, as for `CompiledStep.compile`: arrays or
            `jax.ShapeDtypeStruct`s. Where a static argument is `OneOf` several values, the one that needs most decides.
        max_batch_size: no bucket gets more rows.
        progress: whether to show a progress bar on standard error.
        **kwargs: the step's keyword arguments; and the options that the step will have, by the names that `CompiledStep` has
            for them: `donate_argnums`, `donate_argnames`, `static_argnums`, `static_argnames`, `in_shardings`,
            `out_shardings`, `prepare`, `batch_sharding`.

    Returns:
        The plan with these batch sizes, and what each bucket needs. The order of the buckets, and so which one a sample goes
        to, is the plan's; its report counts the new batches.

    Raises:
        BudgetError: for a bucket of which not even `batch_multiple_of` rows fit.
        StepError: for numbers that cannot be, a budget that is not known, or `BATCH` not exactly once among the arguments.
        LayoutError: if the plan does not know the dtypes.
        Exception: what tracing and compiling the function raises, with the bucket in a note.
    """
    probes = Probes.of("fit_batch_sizes()", _OWN_NAMES, fn, plan, args, kwargs)
    budget = _budget(memory_budget)
    multiple = plan.batch_multiple_of
    most = _positive("max_batch_size", max_batch_size) // multiple
    if not most:
        raise StepError(f"max_batch_size {max_batch_size} is below the plan's batch_multiple_of {multiple}")
    trend = _Trend(budget)
    found: dict[int, FittedBucket] = {}
    with progress_bars(progress) as bars:
        task = bars.add_task("fit batch sizes", total=len(plan), note="")
        for index in np.argsort(-plan.row_elements, kind="stable").tolist():  # the one that may not fit at all is first
            bucket, elements = plan.buckets[index], multiple * int(plan.row_elements[index])
            search = _Search(budget, most, trend.units(elements) or bucket.batch_size // multiple, trend.fixed)
            while (units := search.next()) is not None:
                tried = replace(bucket, batch_size=units * multiple)
                bars.update(task, note=f"{tried}, compile {len(search.costs) + 1}")
                search.costs[units] = _dearest(probes, tried)
            found[index] = _fitted(search, bucket, multiple)
            trend.learn(search, elements)
            release()
            bars.advance(task)
    fitted = tuple(found[index] for index in range(len(plan)))
    return BatchSizeFit(_resized(plan, [each.bucket.batch_size for each in fitted]), fitted, budget)


@dataclass
class _Search:
    """The search for the largest batch of one bucket, in units of `batch_multiple_of` rows.

    Attributes:
        budget: bytes.
        most: units that a batch may have.
        first: units to start with.
        fixed: bytes that do not depend on the rows, as far as other buckets told.
        costs: by units, of those compiled; None where XLA refused.
    """

    budget: int
    most: int
    first: int
    fixed: float
    costs: dict[int, Cost | None] = field(default_factory=dict[int, Cost | None])

    def peak(self, units: int) -> float:
        """Returns the bytes that a batch that was compiled needs."""
        cost = self.costs[units]
        return math.inf if cost is None else cost.peak_bytes

    @property
    def beyond(self) -> int:
        """The smallest batch known not to fit, or not allowed."""
        return min((units for units in self.costs if self.peak(units) > self.budget), default=self.most + 1)

    @property
    def fits(self) -> int:
        """The largest batch known to fit below that; 0 where none is."""
        return max((units for units in self.costs if units < self.beyond), default=0)

    def next(self) -> int | None:
        """Returns the batch to compile next, or None where the largest that fits is known."""
        low, high = self.fits, self.beyond
        if high - low == 1:
            return None
        if not self.costs:
            guess = self.first
        elif high in self.costs and len(self.costs) >= _PATIENCE and len(self.costs) % 2 == 0:
            guess = (low + high) // 2
        else:
            fixed, slope = self.line()
            guess = math.floor((self.budget - fixed) / slope) if slope > 0 else high
        if low:
            guess = min(guess, low * _MOST_GROWTH)
        return min(max(guess, low + 1), high - 1)

    def line(self) -> tuple[float, float]:
        """Returns the bytes at no rows, and those of a unit, by the two batches that come nearest to the budget."""
        known = [units for units in self.costs if self.costs[units] is not None]
        points = [
            (units, self.peak(units)) for units in sorted(known, key=lambda each: abs(self.peak(each) - self.budget))
        ]
        if not points:  # XLA refused even the first
            return 0.0, 2 * self.budget / min(self.costs)
        (one, at_one), (other, at_other) = (*points, (0, min(self.fixed, points[0][1])))[:2]
        slope = (at_one - at_other) / (one - other)
        return at_one - slope * one, slope


@dataclass
class _Trend:
    """What the buckets so far tell of the next: the bytes that do not depend on the rows, and how those of a row grow.

    Attributes:
        budget: bytes.
        fixed: bytes.
        slopes: (elements, bytes) of a unit.
    """

    budget: int
    fixed: float = 0.0
    slopes: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])

    def learn(self, search: _Search, elements: int) -> None:
        """Takes in what one bucket told, whose unit has so many elements."""
        fixed, slope = search.line()
        self.fixed = min(max(fixed, 0.0), self.budget)
        if slope > 0:
            self.slopes.append((elements, slope))

    def units(self, elements: int) -> int:
        """Returns how many units of so many elements may fit: by the power of the elements that the last buckets tell, or 1."""
        if not self.slopes:
            return 0
        last, at_last = self.slopes[-1]
        power = 1.0
        for before, at_before in reversed(self.slopes[:-1]):
            if not 0.8 < before / last < 1.25:  # too near tells nothing
                told = math.log(at_last / at_before) / math.log(last / before)
                power = min(max(told, 0.5), 2.0)  # a linear layer's is 1, attention's 2
                break
        return math.floor((self.budget - self.fixed) / (at_last * (elements / last) ** power))


def _dearest(probes: Probes, bucket: Bucket) -> Cost | None:
    """Returns the cost of the static variant that needs most memory; None where XLA refuses one."""
    costs: list[Cost] = []
    for variant in probes.variants:
        compiled = probes.compile(bucket, variant)
        if compiled is None:
            return None
        costs.append(Cost.of(compiled))
    return max(costs, key=lambda each: each.peak_bytes)


def _fitted(search: _Search, bucket: Bucket, multiple: int) -> FittedBucket:
    fits, beyond = search.fits, search.beyond
    if not fits:
        raise _too_large(search, replace(bucket, batch_size=beyond * multiple))
    return FittedBucket(
        replace(bucket, batch_size=fits * multiple),
        int(search.peak(fits)),
        search.peak(beyond) if beyond in search.costs else None,
        len(search.costs),
    )


def _too_large(search: _Search, least: Bucket) -> BudgetError:
    cost = search.costs[search.beyond]
    needs = "more than XLA finds on the device" if cost is None else cost.need
    return BudgetError(
        f"the least batch, {least}, needs {needs}, but memory_budget is {mebibytes(search.budget)} MiB: raise it, donate "
        "the state, recompute with jax.checkpoint, or cut the longest samples with max_size= of "
        f"plan_buckets. A batch is a multiple of the plan's batch_multiple_of, {least.batch_size}"
    )


def _resized(plan: BucketPlan, batch_sizes: Sequence[int]) -> BucketPlan:
    """Returns the plan with other batch sizes."""
    buckets = [replace(each, batch_size=rows) for each, rows in zip(plan.buckets, batch_sizes, strict=True)]
    planned = plan.planned
    if planned is not None:
        batches = tuple(-(-samples // rows) for samples, rows in zip(planned.samples, batch_sizes, strict=True))
        by_elements = plan.row_costs is None  # another cost may depend on the batch sizes, and so may its curve
        planned = replace(planned, batches=batches, curve=planned.curve if by_elements else ())
    return replace(plan, buckets=buckets, planned=planned)


def _budget(given: int | None) -> int:
    if given is not None:
        return _positive("memory_budget", given)
    known = device_bytes()
    if known is None:
        raise StepError(
            f"the device ({jax.default_backend()}) does not say what it may hold: give the memory_budget in bytes after the "
            "plan, as in fit_batch_sizes(fn, plan, 12 * 2**30, state, BATCH)"
        )
    return known


def _positive(name: str, number: Any) -> int:
    if not is_whole(number, 1):
        raise StepError(f"{name} must be a whole number of at least 1, but got {number!r}")
    return int(number)
