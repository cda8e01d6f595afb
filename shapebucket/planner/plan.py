"""plan_buckets: from lengths to a BucketPlan.

Letters in shapes: `N` samples, `A` axes, `G` distinct shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from shapebucket.buckets import Bucket, BucketPlan, Masks
from shapebucket.errors import PlanError
from shapebucket.layout import Layout
from shapebucket.lengths import LengthTable
from shapebucket.planner.boxes import choose_boxes
from shapebucket.planner.costs import BatchCost, Ints
from shapebucket.planner.exact import optimal_boundaries


def plan_buckets(
    lengths: LengthTable | npt.ArrayLike | Mapping[str, npt.ArrayLike],
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
    layout = _layout_of(lengths, layout)
    layout.require_axes()
    table = LengthTable.of(lengths, layout.axes)
    values = table.values[table.present].astype(np.int64)
    if not len(values):
        raise PlanError("there are no lengths to plan from")
    if (compile_cost is None) != (run_samples is None):
        raise PlanError("compile_cost and run_samples go together: the one is spread over the other")
    if max_buckets is None:
        max_buckets = 8 if compile_cost is None else 64
    _positive("max_buckets", max_buckets)
    rows = _rows_rule(batch_size, token_budget, batch_multiple_of, max_batch_size)
    step = _by_axis("multiple_of", multiple_of, layout.axes, 1)
    aligned = _aligned(values, step, max_size, multiple_of, layout.axes)
    shapes, counts = np.unique(aligned, axis=0, return_counts=True)
    shapes, counts = shapes[order := np.argsort(layout.elements(shapes), kind="stable")], counts[order]
    least: int | None = None
    row_costs: list[float] | None = None
    curve: npt.NDArray[Any] = np.zeros(0)
    if (np.diff(shapes, axis=0) >= 0).all():  # one axis, or several that grow together: each shape holds all before it
        shapes, counts, forced = _candidates(shapes, counts, step, include, every=cost != "elements")
        price = _prices(shapes, layout, rows, cost)
        chosen, curve = _optimum(counts, price, max_buckets, forced, compile_cost, run_samples)
        sizes = shapes[chosen]
        row_costs = None if cost == "elements" else [float(each) for each in price[chosen]]
        least = int(curve[len(chosen) - 1]) if cost == "elements" else None
    elif cost != "elements" or len(include) or compile_cost is not None:
        raise PlanError(
            "cost, include and compile_cost are for one axis; plan several axes by elements and max_buckets"
        )
    else:
        sizes, least = choose_boxes(shapes, counts, layout.elements, max_buckets)
    batch_sizes = rows(layout.elements(sizes))
    _check_budget(batch_sizes, sizes, layout, token_budget, batch_multiple_of)
    buckets = [
        Bucket(tuple(zip(layout.axes, each, strict=True)), n)
        for each, n in zip(sizes.tolist(), batch_sizes.tolist(), strict=True)
    ]
    report = BucketPlan(layout, buckets, masks=masks, row_costs=row_costs).report(table)
    report = replace(report, least_elements=least, curve=tuple(curve.tolist()))
    return BucketPlan(layout, buckets, masks=masks, row_costs=row_costs, planned=report)


def _rows_rule(
    batch_size: int | None, token_budget: int | None, multiple_of: int, max_batch_size: int | None
) -> Callable[[Ints], Ints]:
    """Returns the function from a row's elements [n] to the rows of a batch [n]; 0 where the budget holds none."""
    _positive("batch_multiple_of", multiple_of)
    if (batch_size is None) == (token_budget is None):
        raise PlanError("give either batch_size (rows of every bucket) or token_budget (padded elements of a batch)")
    if max_batch_size is not None:
        _positive("max_batch_size", max_batch_size)
        if max_batch_size < multiple_of:
            raise PlanError(f"max_batch_size {max_batch_size} is below batch_multiple_of {multiple_of}")
    if batch_size is not None:
        _positive("batch_size", batch_size)
        if batch_size % multiple_of:
            raise PlanError(f"batch_size {batch_size} must be a multiple of batch_multiple_of {multiple_of}")
        if max_batch_size is not None:
            raise PlanError("max_batch_size bounds what token_budget gives; with batch_size it has no meaning")
        return lambda elements: np.full(len(elements), batch_size, np.int64)
    assert token_budget is not None
    _positive("token_budget", token_budget)
    most = token_budget if max_batch_size is None else max_batch_size
    return lambda elements: np.minimum(token_budget // elements, most) // multiple_of * multiple_of


def _check_budget(batch_sizes: Ints, sizes: Ints, layout: Layout, token_budget: int | None, multiple_of: int) -> None:
    """Raises PlanError if the budget does not hold the largest bucket."""
    if batch_sizes.all():
        return
    elements = layout.elements(sizes)
    worst = int(np.argmax(elements))
    named = dict(zip(layout.axes, sizes[worst].tolist(), strict=True))
    raise PlanError(
        f"a token_budget of {token_budget:,} elements cannot hold {multiple_of} rows of {named} "
        f"({int(elements[worst]):,} elements each): raise it to {int(elements[worst]) * multiple_of:,}, or "
        "limit the longest sample with max_size"
    )


def _aligned(
    values: Ints,
    step: Ints,
    max_size: int | Mapping[str, int] | None,
    multiple_of: int | Mapping[str, int],
    axes: tuple[str, ...],
) -> Ints:
    """Rounds lengths up to the multiples that can hold them, cut at the largest size, int64 [N, A]."""
    if max_size is not None:
        limit = _by_axis("max_size", max_size, axes, np.iinfo(np.int64).max)
        capped = limit < np.iinfo(np.int64).max
        if (limit[capped] % step[capped]).any():
            raise PlanError(f"max_size {max_size} must be a multiple of multiple_of {multiple_of}")
        values = np.minimum(values, limit)
    return np.maximum(-(-values // step) * step, step)


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
        _positive("a boundary of include", bound)
        if bound % step[0]:
            raise PlanError(f"the boundary {bound} of include must be a multiple of multiple_of {step[0]}")
    sizes = np.union1d(shapes[:, 0], np.array(include, np.int64))
    if every:
        sizes = np.union1d(sizes, np.arange(step[0], shapes[-1, 0] + 1, step[0]))
    held = np.zeros(len(sizes), np.int64)
    held[np.searchsorted(sizes, shapes[:, 0])] = counts
    return sizes[:, None], held, np.searchsorted(sizes, np.unique(include)).tolist() if len(include) else []


def _prices(
    shapes: Ints, layout: Layout, rows: Callable[[Ints], Ints], cost: Literal["elements"] | BatchCost
) -> npt.NDArray[Any]:
    """Returns what a row of each candidate costs, [n]; infinity where the budget holds no row."""
    if isinstance(cost, str):
        if cost != "elements":
            raise PlanError(f'cost must be "elements" or a function of sizes and batch sizes, but got {cost!r}')
        return layout.elements(shapes)
    batch_sizes = rows(layout.elements(shapes))
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


def _layout_of(lengths: object, layout: Layout | None) -> Layout:
    """Returns the layout to plan for: the given one, with the dtypes that were measured."""
    measured = lengths.layout if isinstance(lengths, LengthTable) else None
    if layout is None:
        axes = lengths.axes if isinstance(lengths, LengthTable) else lengths if isinstance(lengths, Mapping) else ("s",)
        return measured or Layout({axis: axis for axis in cast(Iterable[str], axes)})
    if measured is None:
        return layout
    together = layout.with_dtypes_of(measured)
    if together is None:
        raise PlanError(f"the lengths were measured with the layout ({measured}), not with ({layout})")
    return together


def _by_axis(name: str, value: int | Mapping[str, int], axes: tuple[str, ...], default: int) -> npt.NDArray[np.int64]:
    """Returns one number for each axis, int64 [A]."""
    if isinstance(value, Mapping):
        given = dict(value)
        if unknown := set(given) - set(axes):
            raise PlanError(f"{name} names the axes {sorted(unknown)}, but the layout has {axes}")
    else:
        given = dict.fromkeys(axes, value)
    for number in given.values():
        _positive(name, number)
    return np.array([given.get(axis, default) for axis in axes], np.int64)


def _positive(name: str, number: int) -> None:
    if not isinstance(number, int | np.integer) or number < 1:
        raise PlanError(f"{name} must be a whole number of at least 1, but got {number!r}")
