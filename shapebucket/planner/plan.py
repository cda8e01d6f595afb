"""plan_buckets: from lengths to a BucketPlan.

Letters in shapes: `G` distinct shapes, `A` axes, `n` candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from shapebucket.buckets import BucketPlan, Lengths, Masks, first_that_holds
from shapebucket.errors import PlanError
from shapebucket.histogram import grouped
from shapebucket.layout import Layout
from shapebucket.planner.boxes import solve_boxes
from shapebucket.planner.choices import Choice, Choices, Prices
from shapebucket.planner.costs import BatchCost, Ints
from shapebucket.planner.exact import solve_boundaries
from shapebucket.planner.problem import Problem, check_positive

Cost = Literal["elements"] | BatchCost
Include = Sequence[int | Mapping[str, int]]


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
    include: Include = (),
    cost: Cost = "elements",
    compile_cost: float | None = None,
    run_samples: float | None = None,
    run_tokens: float | None = None,
    run_steps: float | None = None,
    masks: Masks = "mask",
) -> BucketPlan:
    """Chooses the bucket shapes that cost least, by default those that compute on the fewest elements.

    With one axis (for elements, also with several that grow together) the plan is optimal: no other set of as many boundaries,
    up to the longest sample, multiples of `multiple_of`, and those of `include` among them, costs less. With several axes it is
    a good one, found by a search; `plan.planned.lower_bound` is the padding that no plan of as many buckets can go below.

    Args:
        lengths: what `measure` returned, or its histogram; or arrays [N] of lengths in elements, by axis.
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
        include: boundaries that the plan has whatever they cost: `[512]` for one axis, `[{"s": 64, "t": 128}]` for several.
        cost: what a batch costs: `"elements"`, or a function of sizes and batch sizes: `count_steps`, `PolynomialCost`
            (attention), `TableCost` (measured seconds, one axis), or your own. A size that is no sample's may then be chosen,
            where it is cheaper; with several axes, the candidates are the sizes that samples have.
        compile_cost: what one more bucket costs once, in the unit of `cost` (seconds to compile it, for a cost in seconds;
            elements computed in that time, for elements). The number of buckets is then chosen, up to `max_buckets`, for a run
            as long as one of the next three says.
        run_samples: samples of the run.
        run_tokens: real elements of the run, padding left out.
        run_steps: steps of the run. The plan then costs least for each sample seen, as more buckets mean more samples a step.
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
    run = _Run.of(compile_cost, run_samples=run_samples, run_tokens=run_tokens, run_steps=run_steps)
    if max_buckets is None:
        max_buckets = 8 if run is None else 64
    check_positive("max_buckets", max_buckets)
    if cost != "elements" and not callable(cost):
        raise PlanError(f'cost must be "elements" or a function of sizes and batch sizes, but got {cost!r}')
    shapes, counts = grouped(problem.align(problem.shapes), problem.counts)
    forced = _forced(include, problem)

    def price(sizes: Ints) -> npt.NDArray[Any]:
        return _prices(sizes, problem, cost)

    _check_held(np.concatenate([shapes, forced]), problem, price)
    by_elements = cost == "elements"
    if shapes.shape[1] == 1:
        choices = _one_axis(shapes, counts, price, max_buckets, forced, 0 if by_elements else int(problem.step[0]))
    elif by_elements and not len(forced) and (np.diff(shapes, axis=0) >= 0).all():  # the axes grow together
        choices = _one_axis(shapes, counts, price, max_buckets, forced, 0)
    else:
        choices = solve_boxes(shapes, counts, price, max_buckets, forced=forced)
    possible = np.flatnonzero(np.isfinite(choices.curve)) + 1
    if not len(possible):
        raise PlanError(f"max_buckets {max_buckets} is too few: include and the longest samples need {choices.fewest}")
    buckets = int(possible[-1]) if run is None else run.buckets(choices, possible, problem, price)
    chosen = choices.choose(buckets)
    curve = choices.curve.copy()
    curve[buckets - 1] = min(chosen.cost, curve[buckets - 1])
    return problem.plan(
        chosen.sizes,
        row_costs=None if by_elements else price(chosen.sizes).tolist(),
        least_elements=math.ceil(chosen.bound) if by_elements else None,
        curve=tuple(np.minimum.accumulate(curve).tolist()),
    )


@dataclass(frozen=True)
class _Run:
    """What the number of buckets follows from: the cost of one more bucket, and the length of the run.

    Attributes:
        compile_cost: of a bucket, once.
        unit: what the length counts.
        length: of the run.
    """

    compile_cost: float
    unit: Literal["run_samples", "run_tokens", "run_steps"]
    length: float

    @classmethod
    def of(cls, compile_cost: float | None, **lengths: float | None) -> _Run | None:
        """Checks the arguments of `plan_buckets`; returns None where none is given."""
        given = {name: number for name, number in lengths.items() if number is not None}
        if compile_cost is None and not given:
            return None
        if compile_cost is None or len(given) != 1:
            raise PlanError(
                f"compile_cost is spread over one of {', '.join(lengths)}, and each means nothing without the other; got "
                f"{', '.join(['compile_cost'] * (compile_cost is not None) + list(given))}"
            )
        ((unit, length),) = given.items()
        if not _is_number(compile_cost) or compile_cost < 0:
            raise PlanError(f"compile_cost must be a number of 0 or more, but got {compile_cost!r}")
        if not _is_number(length) or length <= 0:
            raise PlanError(f"{unit} must be a number above 0, but got {length!r}")
        return cls(compile_cost, cast(Any, unit), length)

    def buckets(self, choices: Choices, numbers: Ints, problem: Problem, price: Prices) -> int:
        """Returns the number of buckets, one of the given ones, with which a sample of the run costs least."""
        samples = int(problem.counts.sum())
        if self.unit == "run_steps":
            epoch = np.array([_steps(choices.sketch(k), problem, price) for k in numbers.tolist()])
            epochs = self.length / epoch
        elif self.unit == "run_tokens":
            epochs = self.length / max(1, int(problem.counts @ problem.layout.elements(problem.shapes)))
        else:
            epochs = self.length / samples
        return int(numbers[np.argmin(choices.curve[numbers - 1] + self.compile_cost * numbers / epochs)])


def _steps(sizes: Ints, problem: Problem, price: Prices) -> float:
    """Returns the steps of an epoch, remainders left out."""
    sizes = sizes[np.argsort(price(sizes), kind="stable")]
    rows = problem.rows(problem.layout.elements(sizes))
    return float((problem.counts / rows[first_that_holds(problem.shapes, sizes)]).sum())


def _one_axis(
    shapes: Ints, counts: npt.NDArray[np.int64], price: Prices, max_buckets: int, forced: Ints, step: int
) -> Choices:
    """Plans exactly where each candidate holds all before it.

    Args:
        shapes: int64 [G, A], each of which holds all before it.
        counts: samples of each, int64 [G].
        price: of a row of each size.
        max_buckets: K.
        forced: boundaries that must be chosen.
        step: every multiple of it up to the longest shape is a candidate too, since a larger one may be cheaper; 0: none.
    """
    sizes, held = shapes, counts
    if step or len(forced):
        sizes = _candidates(shapes[:, 0], forced[:, 0], price, step)
        held = np.zeros(len(sizes), np.int64)
        held[np.searchsorted(sizes[:, 0], shapes[:, 0])] = counts
    must = np.searchsorted(sizes[:, 0], forced[:, 0]).tolist()
    needed = len(must) + int(not len(must) or int(forced.max()) < int(shapes.max()))
    if max_buckets < needed:
        return Choices.impossible(needed)
    optimum = solve_boundaries(held, price(sizes), max_buckets, forced=must)

    def sketch(buckets: int) -> Ints:
        return sizes[optimum.chosen(buckets)]

    def choose(buckets: int) -> Choice:
        cost = optimum.curve[buckets - 1]
        return Choice(sketch(buckets), cost, cost)

    return Choices(optimum.curve, sketch, choose, needed)


def _candidates(lengths: Ints, forced: Ints, price: Prices, step: int) -> Ints:
    """Returns the boundaries worth considering, int64 [n, 1], ascending: samples' lengths, forced ones, and cheaper multiples.

    Of the multiples from one length to the next, which hold the same samples, the cheapest is enough.
    """
    always = np.union1d(lengths, forced)
    if not step:
        return always[:, None]
    every = np.arange(step, always[-1] + 1, step)
    cell = np.searchsorted(always, every, side="right")
    order = np.lexsort((price(every[:, None]), cell))
    first = np.append(True, np.diff(cell) != 0)  # of each cell; they ascend with the multiples, and so in `order`
    cheapest = every[order[first]]
    return np.union1d(always, cheapest)[:, None]


def _check_held(sizes: Ints, problem: Problem, price: Prices) -> None:
    """Raises PlanError where the budget does not hold a sample or a box that must be there, or its cost is not finite."""
    dear = sizes[~np.isfinite(price(sizes))]
    if len(dear):
        worst = dear[[np.argmax(problem.layout.elements(dear))]]
        problem.plan(worst)  # says so, if it is the budget
        raise PlanError(f"the cost of the size {worst[0].tolist()} is not finite: a cost table must reach it")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and bool(np.isfinite(value))


def _forced(include: Include, problem: Problem) -> Ints:
    """Returns the boundaries that must be chosen, int64 [n, A], ascending."""
    boxes: list[list[int]] = []
    axes = problem.layout.axes
    if not isinstance(include, Sequence | np.ndarray) or isinstance(include, str):
        raise PlanError(f"include must be a list of boundaries, but got {include!r}")
    for box in include:
        sizes = box if isinstance(box, Mapping) else {axes[0]: box}
        if set(sizes) != set(axes):
            raise PlanError(f"include has {box!r}: with the axes {axes}, a boundary is a dict with a size for each")
        for size in sizes.values():
            check_positive("a boundary of include", size)
        boxes.append([int(sizes[axis]) for axis in axes])
        if (np.array(boxes[-1]) % problem.step).any():
            raise PlanError(
                f"the boundary {box} of include must be a multiple of multiple_of {problem.layout.named(problem.step)}"
            )
        if (np.array(boxes[-1]) > problem.limit).any():
            raise PlanError(f"the boundary {box} of include is beyond max_size {problem.layout.named(problem.limit)}")
    return np.unique(np.array(boxes, np.int64).reshape(-1, len(axes)), axis=0)


def _prices(sizes: Ints, problem: Problem, cost: Cost) -> npt.NDArray[Any]:
    """Returns what a row of each size costs, [n]; infinity where the budget holds no row."""
    elements = problem.layout.elements(sizes)
    batch_sizes = problem.rows(elements)
    usable = batch_sizes > 0
    if isinstance(cost, str):
        return elements if usable.all() else np.where(usable, elements, np.inf)
    price = np.full(len(sizes), np.inf)
    found = np.asarray(cost(sizes[usable], batch_sizes[usable]), np.float64)
    if found.shape != (int(usable.sum()),):
        raise PlanError(
            f"cost must return one number for each of {int(usable.sum())} sizes, but returned {list(found.shape)}"
        )
    price[usable] = found / batch_sizes[usable]
    wrong = np.isnan(price) | (price < 0)
    if wrong.any():
        first = int(np.argmax(wrong))
        raise PlanError(f"the cost of a batch of size {sizes[first].tolist()} is {price[first]}: costs are 0 or more")
    return price
