"""Samples to a padded batch with masks, and back; numpy only.

Padding on the host keeps raw sizes away from JAX, where each would compile a pad of its own.

Letters in shapes: `B` rows of a batch, `L` a bucket's size on an axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shapebucket.buckets import EXAMPLE_MASK, Bucket, BucketPlan
from shapebucket.errors import LayoutError, OverlongError, PlanError
from shapebucket.layout import Feature, Layout, Tree


class Row(NamedTuple):
    """A sample that was checked against its layout: its leaves and its lengths, in the layout's order."""

    leaves: list[npt.NDArray[Any]]
    lengths: tuple[int, ...]


def pad(samples: Sequence[Tree], bucket: Bucket, plan: BucketPlan, *, truncate: bool = False) -> dict[str, Any]:
    """Pads samples into one batch of exactly a bucket's shape.

    Args:
        samples: at most `bucket.batch_size` samples; rows beyond them are padding.
        bucket: one of the plan's, or another of its axes.
        plan: says layout, pad values and masks.
        truncate: whether a sample that is too long is cut at the end of each axis, in place of an error.

    Returns:
        The samples' structure with leading dimension `B` and the samples' dtypes; beside the features, for each axis a
        mask bool [B, L] (or lengths int32 [B]) and `example_mask` bool [B]; True is real. The arrays are new.

    Raises:
        LayoutError: if a sample does not fit the layout.
        OverlongError: if one does not fit the bucket and `truncate` is False.
        PlanError: for more samples than the bucket has rows, or a bucket of other axes.
    """
    rows: list[Row] = []
    for index, sample in enumerate(samples):
        try:
            rows.append(Row(*plan.layout.check(sample)))
        except LayoutError as error:
            raise error.at(index) from None
    return pad_rows(rows, bucket, plan, truncate=truncate)


def pad_rows(rows: Sequence[Row], bucket: Bucket, plan: BucketPlan, *, truncate: bool = False) -> dict[str, Any]:
    """Does what `pad` does, to samples that were checked already."""
    layout = plan.layout
    plan.check(bucket)
    if len(rows) > bucket.batch_size:
        raise PlanError(f"{len(rows)} samples do not fit the {bucket.batch_size} rows of {bucket}")
    sizes = bucket.sizes
    limits = np.array(list(sizes.values()), np.int64)
    lengths = np.zeros((bucket.batch_size, len(limits)), np.int64)
    if rows:
        lengths[: len(rows)] = [row.lengths for row in rows]
    overlong = (lengths > limits).any(axis=1)
    if overlong.any():
        if not truncate:
            first = int(np.argmax(overlong))
            named = layout.named(rows[first].lengths)
            raise OverlongError(named, sample=first, bucket=str(bucket))
        lengths = np.minimum(lengths, limits)
    arrays = [
        _fill(feature, [row.leaves[number] for row in rows], bucket, sizes)
        for number, feature in enumerate(layout.features)
    ]
    batch = layout.to_tree(arrays)
    for number, (axis, size) in enumerate(bucket.axes):
        if plan.masks == "mask":
            batch[f"{axis}_mask"] = length_mask(lengths[:, number], size)
        else:
            batch[f"{axis}_length"] = lengths[:, number].astype(np.int32)
    batch[EXAMPLE_MASK] = np.arange(bucket.batch_size) < len(rows)
    return batch


def _fill(
    feature: Feature, leaves: Sequence[npt.NDArray[Any]], bucket: Bucket, sizes: Mapping[str, int]
) -> npt.NDArray[Any]:
    """Copies one feature's leaves into a padded array; leaves that are too long are cut."""
    shape = feature.shape(sizes)
    out = np.full((bucket.batch_size, *shape), feature.pad_value, feature.known_dtype)
    for row, leaf in enumerate(leaves):
        if leaf.ndim == 1:
            part = leaf[: shape[0]]
            out[row, : len(part)] = part
        else:
            part = leaf[tuple(map(slice, shape))]
            out[(row, *map(slice, part.shape))] = part
    return out


def unpad(outputs: Tree, batch: Tree, layout: Layout) -> list[dict[str, Any]]:
    """Cuts padded arrays back into one dict a sample: the inverse of `pad`, for inputs and for outputs alike.

    `unpad(batch, batch, plan.layout)` gives the samples back. For the outputs of a model, write a layout of their own over
    the same axes: `unpad({"logits": logits}, batch, Layout({"logits": "s 32000"}))`.

    Args:
        outputs: arrays [B, …] with the layout's structure; other top-level keys are left out.
        batch: the batch they belong to, for its masks or lengths.
        layout: which axes of `outputs` vary.

    Returns:
        A list of samples, as views, without padding and padding rows, in the batch's order.

    Raises:
        LayoutError: if the batch has neither mask nor lengths of an axis, or an array has another shape than the batch's.
    """
    if not isinstance(batch, Mapping) or EXAMPLE_MASK not in batch:
        raise LayoutError(
            f"unpad takes the batch that a loader made, with {EXAMPLE_MASK!r}, but got {type(batch).__name__}"
        )
    mask = np.asarray(batch[EXAMPLE_MASK])
    lengths = {axis: _axis_lengths(batch, axis) for axis in layout.axes}
    sizes = {axis: _axis_size(outputs, batch, layout, axis) for axis in layout.axes}
    arrays: list[npt.NDArray[Any]] = []
    for feature in layout.features:
        array = np.asarray(_output(outputs, feature))
        expected = (len(mask), *feature.shape(sizes))
        if array.shape != expected:
            raise LayoutError(
                f"has shape {array.shape}, but {feature.notation!r} of this batch has {expected}", path=feature.name
            )
        arrays.append(array)
    samples: list[dict[str, Any]] = []
    for row in np.flatnonzero(mask):
        here = {axis: int(each[row]) for axis, each in lengths.items()}
        leaves = [
            array[(row, *map(slice, feature.shape(here)))]
            for feature, array in zip(layout.features, arrays, strict=True)
        ]
        samples.append(layout.to_tree(leaves))
    return samples


def _axis_lengths(batch: Tree, axis: str) -> npt.NDArray[np.integer[Any]]:
    if f"{axis}_mask" in batch:
        return np.asarray(batch[f"{axis}_mask"]).sum(axis=1)
    if f"{axis}_length" in batch:
        return np.asarray(batch[f"{axis}_length"])
    raise LayoutError(f"the batch has neither {axis}_mask nor {axis}_length, so axis {axis!r} cannot be cut")


def _output(outputs: Tree, feature: Feature) -> Any:
    """Returns one feature's array of some outputs."""
    leaf: Any = outputs
    for key in feature.path:
        if not isinstance(leaf, Mapping) or key not in leaf:
            raise LayoutError(
                f"the outputs lack this feature of the layout ({type(leaf).__name__} received)", path=feature.name
            )
        leaf = leaf[key]
    return leaf


def _axis_size(outputs: Tree, batch: Tree, layout: Layout, axis: str) -> int:
    """Returns the batch's size on an axis: of its mask; or, where it has lengths, of the first output that has the axis."""
    if f"{axis}_mask" in batch:
        return np.shape(batch[f"{axis}_mask"])[1]
    feature = next(feature for feature in layout.features if axis in feature.axes)
    shape = np.shape(_output(outputs, feature))
    size = shape[1 + feature.dims.index(axis)] if len(shape) == 1 + len(feature.dims) else 0
    return max(size, int(np.max(batch[f"{axis}_length"], initial=0)))


def length_mask(lengths: Any, size: int) -> Any:
    """Makes a mask from lengths, in numpy or inside jit: `length_mask(batch["s_length"], batch["tokens"].shape[1])`.

    Args:
        lengths: integers [B], a list, or a numpy or JAX array.
        size: `L`, a Python integer, so that the shape is static.

    Returns:
        bool [B, L], of the same array library; True is real.
    """
    if not hasattr(lengths, "shape"):
        lengths = np.asarray(lengths)
    return np.arange(size) < lengths[:, None]
