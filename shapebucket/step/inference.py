"""Raw samples through a compiled step: padded into batches, run, and the outputs cut back to one for each sample.

Letters in shapes: `B` rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from shapebucket.buckets import Bucket, BucketPlan
from shapebucket.errors import LayoutError, StepError
from shapebucket.layout import Feature, Layout
from shapebucket.lengths import LengthTable
from shapebucket.loader_report import Overlong, check_policies
from shapebucket.padding import Leaves, Lengths, pad_rows, table, unpad
from shapebucket.schedule import Schedule

Outputs = Any
"""What a step returns, with the notation of a layout's feature in the place of each array."""
Returned = Mapping[Bucket, Any]
"""What a step returns for each bucket, abstract."""


def predict(
    run: Callable[[dict[str, Any]], Any],
    returned: Callable[[], Returned],
    samples: Any,
    plan: BucketPlan,
    *,
    overlong: Overlong = "error",
    outputs: Outputs | None = None,
) -> list[Any]:
    """Runs raw samples through a step: see `CompiledStep.predict`.

    Args:
        run: the step, from a padded batch to what it returns.
        returned: tells what it returns for each bucket that it has an executable for.
        samples: raw samples.
        plan: the buckets.
        overlong: as in `Schedule`; a dropped sample's output is None.
        outputs: what the dimensions of the outputs are, where that does not follow from their shapes.
    """
    check_policies("pad", overlong)
    rows, lengths = _checked(samples, plan.layout)
    results: list[Any] = [None] * len(rows)
    if not rows or (overlong == "drop" and (plan.assign(lengths) < 0).all()):
        return results
    lengths_table = LengthTable(plan.layout.axes, lengths.astype(np.int32))
    schedule = Schedule(lengths_table, plan, shuffle=False, overlong=overlong)
    layout = _layout(known, plan, outputs) if (known := returned()) else None
    running: tuple[Any, dict[str, Any], Sequence[int]] | None = None
    for bucket, indices in schedule:
        batch = pad_rows([rows[i] for i in indices], lengths[indices], bucket, plan, truncate=overlong == "truncate")
        out = run(batch)
        layout = layout or _layout(returned(), plan, outputs)  # the first executable may have been made just now
        if running is not None:  # one batch runs while the one before it is cut
            _cut(*running, layout, results)
        running = out, batch, indices.tolist()
    if running is not None and layout is not None:
        _cut(*running, layout, results)
    return results


def _checked(samples: Any, layout: Layout) -> tuple[list[Leaves], Any]:
    """Returns the leaves of samples, and their lengths, int64 [N, A]."""
    if isinstance(samples, Mapping) or not isinstance(samples, Iterable):
        raise StepError(
            f"predict() takes a list of raw samples in the batch's place, but got {type(samples).__name__}: a padded batch is "
            "for the step itself, a single sample belongs into a list"
        )
    rows: list[Leaves] = []
    lengths: list[Lengths] = []
    for index, sample in enumerate(cast(Iterable[Any], samples)):
        try:
            leaves, sizes = layout.check(sample)
        except LayoutError as error:
            raise error.at(index) from None
        rows.append(leaves)
        lengths.append(sizes)
    return rows, table(lengths, layout)


def _cut(out: Any, batch: dict[str, Any], indices: Sequence[int], layout: Layout, results: list[Any]) -> None:
    """Cuts what a step returned for a batch into the results of its samples."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(out)
    names = [_name(path) for path, _ in leaves]
    arrays = {name: np.asarray(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}
    for index, sample in zip(indices, unpad(arrays, batch, layout), strict=True):
        results[index] = tree.unflatten([sample[name] for name in names])


def _layout(returned: Returned, plan: BucketPlan, outputs: Outputs | None) -> Layout:
    """Returns what the dimensions of a step's outputs are: as told, or as their shapes over the buckets show.

    Raises:
        LayoutError: naming the output, where it has no row for each sample, or a dimension that cannot be told.
    """
    buckets = list(returned)
    leaves, tree = jax.tree_util.tree_flatten_with_path(returned[buckets[0]])
    names = [_name(path) for path, _ in leaves]
    columns = list(zip(*(_leaves(returned[bucket], tree) for bucket in buckets), strict=True))
    for name, column in zip(names, columns, strict=True):
        for bucket, leaf in zip(buckets, column, strict=True):
            if leaf.shape[:1] != (bucket.batch_size,):
                raise LayoutError(
                    f"has shape {leaf.shape} for {bucket}, so it has no row for each sample, and predict() cannot tell what "
                    "of it is a sample's: return a value for each row, rows first, or leave it out in a step for inference",
                    path=name,
                )
    if outputs is not None:
        return _told(outputs, dict(zip(names, columns, strict=True)), tree, buckets, plan)
    return Layout.of(
        Feature((name,), _dims(name, [leaf.shape for leaf in column], buckets, plan.layout.axes))
        for name, column in zip(names, columns, strict=True)
    )


def _leaves(out: Any, tree: Any) -> list[Any]:
    leaves, own = jax.tree.flatten(out)
    if own != tree:
        raise LayoutError(f"the step returns {own} for one bucket and {tree} for another: return the same tree for all")
    return leaves


def _dims(
    name: str, shapes: Sequence[tuple[int, ...]], buckets: Sequence[Bucket], axes: Sequence[str]
) -> tuple[str | int, ...]:
    """Finds what each dimension after the first is, from its sizes over the buckets."""
    if len({len(shape) for shape in shapes}) > 1:
        raise LayoutError(f"has another rank for each bucket: {shapes}", path=name)
    found: list[str | int] = []
    for number, sizes in enumerate(list(zip(*shapes, strict=True))[1:], start=1):
        possible: list[str | int] = [
            axis
            for axis in axes
            if all(bucket.sizes[axis] == size for bucket, size in zip(buckets, sizes, strict=True))
        ]
        if len(set(sizes)) == 1:
            possible.append(sizes[0])
        if len(possible) != 1:
            what = " or ".join(map(repr, possible)) or "no axis of the plan, nor of one size"
            raise LayoutError(
                f"dimension {number} is {', '.join(map(str, sizes))} for {', '.join(map(str, buckets))}, so it is {what}: say "
                f"what it is with outputs=, the notation of a layout in the place of each array, without the rows, as in "
                f"outputs={{'logits': 's 10'}}",
                path=name,
            )
        found += possible
    return tuple(found)


def _told(
    outputs: Outputs, columns: Mapping[str, Sequence[Any]], tree: Any, buckets: Sequence[Bucket], plan: BucketPlan
) -> Layout:
    """Reads what the dimensions are said to be, and checks that they are."""
    notations, own = jax.tree.flatten(outputs)
    if own != tree:
        raise LayoutError(
            f"outputs= has the tree {own}, but the step returns {tree}: write one notation for each array"
        )
    layout = Layout(dict(zip(columns, notations, strict=True)))
    for feature in layout.features:
        if unknown := [axis for axis in feature.axes if axis not in plan.layout.axes]:
            raise LayoutError(
                f"outputs= names the axis {unknown[0]!r}; the plan has {plan.layout.axes}", path=feature.name
            )
        for bucket, leaf in zip(buckets, columns[feature.name], strict=True):
            expected = (bucket.batch_size, *feature.shape(bucket.sizes))
            if leaf.shape != expected or feature.dtype not in (None, leaf.dtype):
                raise LayoutError(
                    f"is {leaf.dtype}{list(leaf.shape)} for {bucket}, but outputs= says {feature.notation!r}, "
                    f"{list(expected)} with its rows",
                    path=feature.name,
                )
    return layout


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "the output"
