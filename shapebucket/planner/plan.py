"""plan_buckets: from lengths to a BucketPlan.

Letters in shapes: `N` samples, `A` axes, `G` distinct shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shapebucket.buckets import BucketPlan, Masks
from shapebucket.errors import PlanError
from shapebucket.layout import Layout
from shapebucket.planner.boxes import choose_boxes
from shapebucket.planner.costs import BatchCost, Ints
from shapebucket.planner.exact import optimal_boundaries
from shapebucket.planner.problem import Lengths, Problem, check_positive


def plan_buckets(
    lengths: Lengths,
    layout: Layout | None = None,
    *,
    max_buckets: int | None = None,
    batch_size: int | None = None,
    token_budget: int | None = None,
    multiple_of: int | Mapping[str, int] = 1,
    batch_multiple_of: int = 1,
    max_batch_size: int | None = None,
    max_size: int | Mapping[str, int] | None = None,
    include: Sequence[int] = (),
    cost: Literal["elements"] | BatchCost = "elements",
    compile_cost: float | None = None,
    run_samples: float | None = None,
    masks: Masks = "mask",
) -> BucketPlan:
    """Chooses the bucket shapes that cost least, by default those that compute on the fewest elements.

    With one axis (or several that grow together) the plan is optimal: no other set of as many boundaries that are multiples of
    `multiple_of` costs less. With several axes it is a good one, found by a search; `plan.planned.lower_bound` is the padding
    that no plan of as many buckets can go below.

    Args:
        lengths: what `measure` returned; or arrays [N] of lengths in elements, by axis.
        layout: which axes vary; taken from `lengths` where they were measured, and "s" alone where neither says.
        max_buckets: the most buckets, so the most executables: 8 if not given, or 64 with `compile_cost`. Fewer are made where
            fewer cost as little.
        batch_size: rows of every bucket. Give this or `token_budget`.
        token_budget: the most padded elements of a batch, as `Layout.elements` counts them: short buckets get more rows.
        multiple_of: every size is a multiple of it; one for all axes or by axis. Accelerators like 8 to 128.
        batch_multiple_of: every batch size is a multiple of it: the number of devices that the batch axis is sharded over.
        max_batch_size: no bucket has more rows, whatever the budget allows: a bound where samples also have features of a
            fixed size, which elements do not count.
        max_size: no bucket is larger, in elements; one for all axes or by axis. Longer samples are planned as if they were
            cut there: give the loader `overlong="truncate"`, or `"drop"`.
        include: boundaries that the plan has whatever they cost (one axis).
        cost: what a batch costs: `"elements"`, or a function of sizes and batch sizes (one axis): `count_steps`,
            `PolynomialCost` (attention), `TableCost` (measured seconds), or your own. A size that is no sample's may then be
            chosen, where it is cheaper.
        compile_cost: what one more bucket costs once, in the unit of `cost` (seconds to compile it, for a cost in seconds;
            elements computed in that time, for elements). The number of buckets is then chosen, up to `max_buckets`, for a run
            of `run_samples`.
        run_samples: samples of the run that `compile_cost` is spread over.
        masks: see `BucketPlan`.

    Returns:
        The plan, with the report of what it does to these lengths.

    Raises:
        PlanError: for numbers that make no plan, or a budget that cannot hold one multiple of the longest sample.
        LengthsError: for lengths that are none, or of other axes than the layout's.
    """
    problem = Problem.of(
        lengths,
        layout,
        batch_size=batch_size,
        token_budget=token_budget,
        multiple_of=multiple_of,
        batch_multiple_of=batch_multiple_of,
        max_batch_size=max_batch_size,
        max_size=max_size,
        masks=masks,
    )
    if (compile_cost is None) != (run_samples is None):
        raise PlanError("compile_cost and run_samples go together: the one is spread over the other")
    if max_buckets is None:
        max_buckets = 8 if compile_cost is None else 64
    check_positive("max_buckets", max_buckets)
    elements = problem.layout.elements
    shapes, counts = np.unique(problem.align(problem.values), axis=0, return_counts=True)
    shapes, counts = shapes[order := np.argsort(elements(shapes), kind="stable")], counts[order]
    if (np.diff(shapes, axis=0) < 0).any():  # several axes, and not each shape holds all before it
        if cost != "elements" or len(include) or compile_cost is not None:
            raise PlanError(
                "cost, include and compile_cost are for one axis; plan several axes by elements and max_buckets"
            )
        sizes, least = choose_boxes(shapes, counts, elements, max_buckets)
        return problem.plan(sizes, least_elements=least)
    shapes, counts, forced = _candidates(shapes, counts, problem.step, include, every=cost != "elements")
    price = _prices(shapes, problem, cost)
    chosen, curve = _optimum(counts, price, max_buckets, forced, compile_cost, run_samples)
    by_elements = cost == "elements"
    return problem.plan(
        shapes[chosen],
        row_costs=None if by_elements else price[chosen].tolist(),
        least_elements=int(curve[len(chosen) - 1]) if by_elements else None,
        curve=tuple(curve.tolist()),
    )


def _candidates(
    shapes: Ints, counts: Ints, step: Ints, include: Sequence[int], *, every: bool
) -> tuple[Ints, Ints, list[int]]:
    """Adds to the shapes of samples those that must be chosen and, if larger ones may be cheaper, every multiple.

    Returns:
        The shapes, samples of each, and the positions of those that must be chosen.
    """
    if not len(include) and not every:
        return shapes, counts, []
    if shapes.shape[1] != 1:
        raise PlanError("cost and include are for one axis; plan several axes by elements")
    for bound in include:
        check_positive("a boundary of include", bound)
        if bound % step[0]:
            raise PlanError(f"the boundary {bound} of include must be a multiple of multiple_of {step[0]}")
    sizes = np.union1d(shapes[:, 0], np.array(include, np.int64))
    if every:
        sizes = np.union1d(sizes, np.arange(step[0], shapes[-1, 0] + 1, step[0]))
    held = np.zeros(len(sizes), np.int64)
    held[np.searchsorted(sizes, shapes[:, 0])] = counts
    return sizes[:, None], held, np.searchsorted(sizes, np.unique(include)).tolist() if len(include) else []


def _prices(shapes: Ints, problem: Problem, cost: Literal["elements"] | BatchCost) -> npt.NDArray[Any]:
    """Returns what a row of each candidate costs, [n]; infinity where the budget holds no row."""
    if isinstance(cost, str):
        if cost != "elements":
            raise PlanError(f'cost must be "elements" or a function of sizes and batch sizes, but got {cost!r}')
        return problem.layout.elements(shapes)
    batch_sizes = problem.rows(problem.layout.elements(shapes))
    usable = batch_sizes > 0
    price = np.full(len(shapes), np.inf)
    price[usable] = np.asarray(cost(shapes[usable], batch_sizes[usable]), np.float64) / batch_sizes[usable]
    if np.isnan(price).any() or (price < 0).any():
        first = int(np.argmax(np.isnan(price) | (price < 0)))
        raise PlanError(f"the cost of a batch of size {shapes[first].tolist()} is {price[first]}: costs are 0 or more")
    if not np.isfinite(price[-1]) and usable[-1]:
        raise PlanError(f"the cost of the largest size, {shapes[-1].tolist()}, is not finite: a table must reach it")
    return price


def _optimum(
    counts: Ints,
    price: npt.NDArray[Any],
    max_buckets: int,
    forced: list[int],
    compile_cost: float | None,
    run_samples: float | None,
) -> tuple[Ints, npt.NDArray[Any]]:
    """Returns the chosen candidates and the curve of least costs; the number of buckets as `compile_cost` says."""
    need = len(forced) + (0 if forced and forced[-1] == len(price) - 1 else 1)
    if max_buckets < need:
        raise PlanError(f"max_buckets {max_buckets} is too few: include and the longest sample need {need}")
    if not np.isfinite(price[-1]):  # the caller says which budget would do
        return np.array([len(price) - 1]), np.zeros(1)
    chosen, curve = optimal_boundaries(counts, price, max_buckets, forced=forced)
    if compile_cost is None or run_samples is None:
        return chosen, curve
    for name, number in (("compile_cost", compile_cost), ("run_samples", run_samples)):
        if not (np.isfinite(number) and number >= 0):
            raise PlanError(f"{name} must be a number of 0 or more, but got {number!r}")
    total = curve * (run_samples / counts.sum()) + compile_cost * np.arange(1, len(curve) + 1)
    best = int(np.argmin(total)) + 1
    return optimal_boundaries(counts, price, best, forced=forced)[0], curve
