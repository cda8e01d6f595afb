"""Problem: lengths, layout and the rules that every planner shares, and the plan that boxes make of them.

Letters in shapes: `G` distinct shapes, `A` axes, `n` boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shapebucket.buckets import Bucket, BucketPlan, Lengths, Masks, check_countable, histogram_of
from shapebucket.errors import PlanError
from shapebucket.histogram import LengthHistogram, grouped
from shapebucket.layout import Layout
from shapebucket.lengths import LengthTable
from shapebucket.planner.costs import Ints

_NO_LIMIT = 1 << 40  # beyond any size, and elements of it can still be counted


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be planned.

    Attributes:
        layout: which axes vary, with the dtypes that were measured.
        lengths: of all samples.
        shapes: the distinct ones, cut at the largest size, int64 [G, A].
        counts: samples of each, int64 [G].
        step: every size is a multiple of it, int64 [A].
        limit: no size is larger, int64 [A].
        rows: from a row's elements [n] to the rows of a batch [n]; 0 where the budget holds none.
        token_budget: for messages.
        batch_multiple_of: see `BucketPlan`.
        masks: see `BucketPlan`.
    """

    layout: Layout
    lengths: LengthHistogram
    shapes: Ints
    counts: Ints
    step: Ints
    limit: Ints
    rows: Callable[[Ints], Ints]
    token_budget: int | None
    batch_multiple_of: int
    masks: Masks

    @classmethod
    def of(
        cls,
        lengths: Lengths,
        layout: Layout | None,
        *,
        batch_size: int | None,
        token_budget: int | None,
        multiple_of: int | Mapping[str, int],
        batch_multiple_of: int,
        max_batch_size: int | None,
        max_size: int | Mapping[str, int] | None,
        masks: Masks,
    ) -> Problem:
        """Checks the arguments of `plan_buckets` that every planner shares; raises what it documents."""
        layout = _layout_of(lengths, layout)
        layout.require_axes()
        histogram = histogram_of(lengths, layout.axes)
        shapes, counts = histogram.shapes.astype(np.int64), histogram.counts
        if not len(shapes):
            raise PlanError("there are no lengths to plan from")
        step = _by_axis("multiple_of", multiple_of, layout.axes, 1)
        limit = _by_axis("max_size", {} if max_size is None else max_size, layout.axes, _NO_LIMIT)
        if max_size is not None:
            capped = limit < _NO_LIMIT
            if (limit[capped] % step[capped]).any():
                raise PlanError(f"max_size {max_size} must be a multiple of multiple_of {multiple_of}")
            shapes, counts = grouped(np.minimum(shapes, limit), counts)
        check_countable(histogram, layout, shapes.max(axis=0) + step)
        rows = _rows_rule(batch_size, token_budget, batch_multiple_of, max_batch_size)
        return cls(layout, histogram, shapes, counts, step, limit, rows, token_budget, batch_multiple_of, masks)

    def align(self, sizes: Ints) -> Ints:
        """Rounds sizes up to the multiples that hold them, int64 [..., A]."""
        return np.maximum(-(-sizes // self.step) * self.step, self.step)

    def plan(self, sizes: Ints, *, row_costs: list[float] | None = None, **facts: Any) -> BucketPlan:
        """Makes the plan of some boxes, with a report.

        Args:
            sizes: int64 [n, A].
            row_costs: see `BucketPlan`.
            **facts: what the planner knows, fields of `PlanReport`.

        Raises:
            PlanError: if the budget does not hold the largest box.
        """
        elements = self.layout.elements(sizes)
        batch_sizes = self.rows(elements)
        if not batch_sizes.all():
            worst = int(np.argmax(elements))
            named = self.layout.named(sizes[worst])
            rows = f"{self.batch_multiple_of} row{'s' * (self.batch_multiple_of > 1)}"
            raise PlanError(
                f"a token_budget of {self.token_budget:,} elements cannot hold {rows} of {named} "
                f"({int(elements[worst]):,} elements each): raise it to {int(elements[worst]) * self.batch_multiple_of:,}, or "
                "limit the longest sample with max_size"
            )
        buckets = [
            Bucket(tuple(zip(self.layout.axes, each, strict=True)), rows)
            for each, rows in zip(sizes.tolist(), batch_sizes.tolist(), strict=True)
        ]
        plan = BucketPlan(
            self.layout, buckets, masks=self.masks, row_costs=row_costs, batch_multiple_of=self.batch_multiple_of
        )
        return replace(plan, planned=replace(plan.report(self.lengths), **facts))


def check_positive(name: str, number: int) -> None:
    """Raises PlanError for what is no whole number of at least 1."""
    if not isinstance(number, int | np.integer) or isinstance(number, bool) or not 1 <= number < _NO_LIMIT:
        raise PlanError(f"{name} must be a whole number of at least 1, but got {number!r}")


def _layout_of(lengths: Lengths, layout: Layout | None) -> Layout:
    """Returns the layout to plan for: the given one, with the dtypes that were measured."""
    known = isinstance(lengths, LengthTable | LengthHistogram)
    measured = lengths.layout if known else None
    if layout is None:
        axes = lengths.axes if known else lengths if isinstance(lengths, Mapping) else ("s",)
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
        check_positive(name, number)
    return np.array([given.get(axis, default) for axis in axes], np.int64)


def _rows_rule(
    batch_size: int | None, token_budget: int | None, multiple_of: int, max_batch_size: int | None
) -> Callable[[Ints], Ints]:
    """Returns the function from a row's elements [n] to the rows of a batch [n]; 0 where the budget holds none."""
    check_positive("batch_multiple_of", multiple_of)
    if (batch_size is None) == (token_budget is None):
        raise PlanError("give either batch_size (rows of every bucket) or token_budget (padded elements of a batch)")
    if max_batch_size is not None:
        check_positive("max_batch_size", max_batch_size)
        if max_batch_size < multiple_of:
            raise PlanError(f"max_batch_size {max_batch_size} is below batch_multiple_of {multiple_of}")
    if batch_size is not None:
        check_positive("batch_size", batch_size)
        if batch_size % multiple_of:
            raise PlanError(f"batch_size {batch_size} must be a multiple of batch_multiple_of {multiple_of}")
        if max_batch_size is not None:
            raise PlanError("max_batch_size bounds what token_budget gives; with batch_size it has no meaning")
        return lambda elements: np.full(len(elements), batch_size, np.int64)
    assert token_budget is not None
    check_positive("token_budget", token_budget)
    most = token_budget if max_batch_size is None else max_batch_size
    return lambda elements: np.minimum(token_budget // elements, most) // multiple_of * multiple_of
