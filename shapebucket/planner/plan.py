"""plan_buckets: from lengths to a BucketPlan.

Letters in shapes: `N` samples, `A` axes, `G` distinct shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from shapebucket.buckets import Bucket, BucketPlan, Masks
from shapebucket.errors import PlanError
from shapebucket.layout import Layout
from shapebucket.lengths import LengthTable
from shapebucket.planner.boxes import choose_boxes
from shapebucket.planner.exact import optimal_boundaries


def plan_buckets(
    lengths: LengthTable | npt.ArrayLike | Mapping[str, npt.ArrayLike],
    layout: Layout | None = None,
    *,
    max_buckets: int = 8,
    batch_size: int | None = None,
    token_budget: int | None = None,
    multiple_of: int | Mapping[str, int] = 1,
    batch_multiple_of: int = 1,
    max_batch_size: int | None = None,
    max_size: int | Mapping[str, int] | None = None,
    masks: Masks = "mask",
) -> BucketPlan:
    """Chooses the bucket shapes that compute on the fewest elements.

    With one axis the plan is optimal: no other set of at most `max_buckets` boundaries that are multiples of `multiple_of`
    has less padding. With several axes it is a good one, found by a search; `plan.planned.lower_bound` is the padding that no
    plan of as many buckets can go below.

    Args:
        lengths: what `measure` returned; or arrays [N] of lengths in elements, by axis.
        layout: which axes vary; taken from `lengths` where they were measured, and "s" alone where neither says.
        max_buckets: the most buckets, so the most executables; fewer are made where fewer hold everything exactly.
        batch_size: rows of every bucket. Give this or `token_budget`.
        token_budget: the most padded elements of a batch, as `Layout.elements` counts them: short buckets get more rows.
        multiple_of: every size is a multiple of it; one for all axes or by axis. Accelerators like 8 to 128.
        batch_multiple_of: every batch size is a multiple of it: the number of devices that the batch axis is sharded over.
        max_batch_size: no bucket has more rows, whatever the budget allows: a bound where samples also have features of a
            fixed size, which elements do not count.
        max_size: no bucket is larger, in elements; one for all axes or by axis. Longer samples are planned as if they were
            cut there: give the loader `overlong="truncate"`, or `"drop"`.
        masks: see `BucketPlan`.

    Returns:
        The plan, with the report of what it does to these lengths.

    Raises:
        PlanError: for numbers that make no plan, or a budget that cannot hold one multiple of the longest sample.
        LengthsError: for lengths that are none, or of other axes than the layout's.
    """
    layout = _layout_of(lengths, layout)
    table = LengthTable.of(lengths, layout.axes)
    values = table.values[table.present].astype(np.int64)
    if not len(values):
        raise PlanError("there are no lengths to plan from")
    for name, number in (("max_buckets", max_buckets), ("batch_multiple_of", batch_multiple_of)):
        _positive(name, number)
    if (batch_size is None) == (token_budget is None):
        raise PlanError("give either batch_size (rows of every bucket) or token_budget (padded elements of a batch)")
    step = _by_axis("multiple_of", multiple_of, layout.axes, 1)
    if max_size is not None:
        limit = _by_axis("max_size", max_size, layout.axes, np.iinfo(np.int64).max)
        capped = limit < np.iinfo(np.int64).max
        if (limit[capped] % step[capped]).any():
            raise PlanError(f"max_size {max_size} must be a multiple of multiple_of {multiple_of}")
        cut = np.minimum(values, limit)
    else:
        cut = values
    aligned = np.maximum(-(-cut // step) * step, step)
    shapes, counts = np.unique(aligned, axis=0, return_counts=True)
    shapes, counts = shapes[order := np.argsort(layout.elements(shapes), kind="stable")], counts[order]
    if (np.diff(shapes, axis=0) >= 0).all():  # one axis, or several that grow together: each shape holds all before it
        chosen, curve = optimal_boundaries(counts, layout.elements(shapes), max_buckets)
        sizes, least = shapes[chosen], int(curve[-1])
    else:
        sizes, least = choose_boxes(shapes, counts, layout.elements, max_buckets)
    rows = _batch_sizes(layout.elements(sizes), batch_size, token_budget, batch_multiple_of, sizes, layout)
    if max_batch_size is not None:
        _positive("max_batch_size", max_batch_size)
        if max_batch_size < batch_multiple_of:
            raise PlanError(f"max_batch_size {max_batch_size} is below batch_multiple_of {batch_multiple_of}")
        most = max_batch_size // batch_multiple_of * batch_multiple_of
        rows = [min(each, most) for each in rows]
    buckets = [
        Bucket(tuple(zip(layout.axes, each, strict=True)), n) for each, n in zip(sizes.tolist(), rows, strict=True)
    ]
    plan = BucketPlan(layout, buckets, masks=masks)
    report = replace(plan.report(table), least_elements=least)
    return BucketPlan(layout, buckets, masks=masks, planned=report)


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


def _batch_sizes(
    elements: npt.NDArray[np.int64],
    batch_size: int | None,
    token_budget: int | None,
    batch_multiple_of: int,
    sizes: npt.NDArray[np.int64],
    layout: Layout,
) -> list[int]:
    if batch_size is not None:
        _positive("batch_size", batch_size)
        if batch_size % batch_multiple_of:
            raise PlanError(f"batch_size {batch_size} must be a multiple of batch_multiple_of {batch_multiple_of}")
        return [batch_size] * len(elements)
    assert token_budget is not None
    _positive("token_budget", token_budget)
    rows = token_budget // elements // batch_multiple_of * batch_multiple_of
    if not rows.all():
        worst = int(np.argmax(elements))
        named = dict(zip(layout.axes, sizes[worst].tolist(), strict=True))
        raise PlanError(
            f"a token_budget of {token_budget:,} elements cannot hold {batch_multiple_of} rows of {named} "
            f"({int(elements[worst]):,} elements each): raise it to {int(elements[worst]) * batch_multiple_of:,}, or "
            "limit the longest sample with max_size"
        )
    return rows.tolist()
