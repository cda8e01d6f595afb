"""Samples to a padded batch with masks, and back; numpy only.

Padding on the host keeps raw sizes away from JAX, where each would compile a pad of its own.

Letters in shapes: `B` rows of a batch, `L` a bucket's size on an axis.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shapebucket.buckets import EXAMPLE_MASK, Bucket, BucketPlan
from shapebucket.errors import LayoutError, OverlongError, PlanError
from shapebucket.layout import Feature, Layout, Tree

Leaves = Sequence[npt.NDArray[Any]]
"""A checked sample's arrays in the order of the layout's features; numpy scalars may stand for those of rank 0."""
Lengths = tuple[int, ...]
"""A sample's lengths in the order of the layout's axes."""
Answer = tuple[Lengths, int | None]
"""A sample's lengths, and the position of its bucket in the plan; None if it fits none."""

_PLAIN = (np.ndarray, np.memmap)  # slices of a mapped file are maps
_REMEMBERED = 16_384
_LONGEST_IN_TABLE = 1024
_SIGNATURE = attrgetter("__class__", "dtype", "shape")


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
    rows: list[Leaves] = []
    lengths: list[Lengths] = []
    for index, sample in enumerate(samples):
        try:
            leaves, sizes = plan.layout.check(sample)
        except LayoutError as error:
            raise error.at(index) from None
        rows.append(leaves)
        lengths.append(sizes)
    return pad_rows(rows, table(lengths, plan.layout), bucket, plan, truncate=truncate)


class Checker:
    """Checks samples against a plan's layout and finds their buckets, and remembers the answers: `check(sample)`.

    `Layout.check` and `BucketPlan.index` decide. Of arrays they look at type, dtype and shape alone, of which a data set has
    few, so an answer holds for all samples that agree in those.
    """

    def __init__(self, plan: BucketPlan) -> None:
        self._plan = plan
        self._known: dict[Any, Answer] = {}
        tree = plan.layout.to_tree(plan.layout.features)
        self._leaves = _leaf_getter(tree)
        self._key = next(iter(tree))
        single = len(tree) == 1 and not isinstance(tree[self._key], dict)
        self.check: Callable[[Any], tuple[Leaves, Answer]] = self._check_single if single else self._check_any

    def __reduce__(self) -> tuple[Any, ...]:
        return Checker, (self._plan,)

    def _check_any(self, sample: Any) -> tuple[Leaves, Answer]:
        """Returns a sample's leaves and the answer for them.

        Raises:
            LayoutError: if the sample does not fit the layout.
        """
        signature = None
        try:
            leaves = self._leaves(sample)
            signature = tuple(map(_SIGNATURE, leaves))
            return leaves, self._known[signature]
        except (KeyError, TypeError, AttributeError):
            pass  # new, or not plain arrays in plain dicts
        return self._ask(sample, signature)

    def _check_single(self, sample: Any) -> tuple[Leaves, Answer]:
        """Does what `_check_any` does for samples of one feature, in half the time."""
        signature = None
        try:
            if type(sample) is dict and len(sample) == 1:
                leaf = sample[self._key]
                signature = (_SIGNATURE(leaf),)
                return (leaf,), self._known[signature]
        except (KeyError, TypeError, AttributeError):
            pass
        return self._ask(sample, signature)

    def _ask(self, sample: Any, signature: tuple[tuple[Any, ...], ...] | None) -> tuple[Leaves, Answer]:
        """Has the sample checked; remembers the answer if there is a signature, and it is one of plain arrays."""
        arrays, lengths = self._plan.layout.check(sample)
        answer = lengths, self._plan.index(lengths)
        if signature is not None and all(kind in _PLAIN or issubclass(kind, np.generic) for kind, *_ in signature):
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[signature] = answer
        return arrays, answer


def _leaf_getter(tree: Mapping[str, Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that gives a sample's leaves in the layout's order.

    It raises KeyError or TypeError for a sample of another structure, or not of plain dicts.
    """
    count = len(tree)
    children = [_leaf_getter(cast("Tree", child)) if isinstance(child, dict) else None for child in tree.values()]
    pick = itemgetter(*tree)

    def flat(sample: Any) -> tuple[Any, ...]:
        if type(sample) is not dict or len(sample) != count:
            raise TypeError
        return pick(sample) if count > 1 else (pick(sample),)

    def nested(sample: Any) -> tuple[Any, ...]:
        pairs = zip(children, flat(sample), strict=True)
        return tuple(
            itertools.chain.from_iterable((value,) if child is None else child(value) for child, value in pairs)
        )

    return nested if any(children) else flat


def table(lengths: Sequence[Lengths], layout: Layout) -> npt.NDArray[np.int64]:
    """Returns the lengths of samples as int64 [n, A]."""
    shape = len(lengths), len(layout.axes)
    return np.fromiter(itertools.chain.from_iterable(lengths), np.int64, shape[0] * shape[1]).reshape(shape)


def pad_rows(
    rows: Sequence[Leaves],
    lengths: npt.NDArray[np.int64],
    bucket: Bucket,
    plan: BucketPlan,
    *,
    truncate: bool = False,
) -> dict[str, Any]:
    """Does what `pad` does, to samples that were checked already: their leaves, and their lengths [n, A]."""
    layout, count = plan.layout, len(rows)
    plan.check(bucket)
    if count > bucket.batch_size:
        raise PlanError(f"{count} samples do not fit the {bucket.batch_size} rows of {bucket}")
    sizes = bucket.sizes
    limits = list(sizes.values())
    overlong = lengths > limits
    cut = bool(overlong.any())
    if cut and not truncate:
        first = int(np.argmax(overlong.any(axis=1)))
        raise OverlongError(layout.named(lengths[first]), sample=first, bucket=str(bucket))
    columns = list(zip(*rows, strict=True)) or [()] * len(layout.features)
    batch = layout.to_tree(
        [
            _fill(feature, column, bucket.batch_size, feature.shape(sizes), cut=cut)
            for feature, column in zip(layout.features, columns, strict=True)
        ]
    )
    real = np.zeros((bucket.batch_size, len(limits)), np.int64)
    real[:count] = np.minimum(lengths, limits) if cut else lengths
    for number, (axis, size) in enumerate(bucket.axes):
        if plan.masks == "mask":
            batch[f"{axis}_mask"] = length_mask(real[:, number], size)
        else:
            batch[f"{axis}_length"] = real[:, number].astype(np.int32)
    batch[EXAMPLE_MASK] = np.arange(bucket.batch_size) < count
    return batch


def _fill(feature: Feature, leaves: Leaves, rows: int, shape: tuple[int, ...], *, cut: bool) -> npt.NDArray[Any]:
    """Copies one feature's leaves into a padded array; where one may be too long, it is cut."""
    out = np.zeros((rows, *shape), feature.known_dtype)
    if feature.pad_value:
        out.fill(feature.pad_value)
    if not feature.axes:
        for row, leaf in enumerate(leaves):
            out[row] = leaf
        return out
    box = tuple(map(slice, shape))
    parts = [leaf[box] for leaf in leaves] if cut else leaves
    if feature.axes == feature.dims[:1]:
        flat = out.reshape(rows * shape[0], *shape[1:])  # one slice a row: the fastest way to copy in numpy
        for start, part in zip(itertools.count(step=shape[0]), parts, strict=False):
            flat[start : start + len(part)] = part
    else:
        for row, part in zip(out, parts, strict=False):
            row[tuple(map(slice, part.shape))] = part
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
    if isinstance(lengths, np.ndarray):
        if size <= _LONGEST_IN_TABLE:
            return _masks(size).take(lengths.astype(np.intp), axis=0, mode="clip")
        narrow = np.min_scalar_type(size)  # numpy compares 16 bits four times faster than 64
        return np.arange(size, dtype=narrow) < np.clip(lengths, 0, size).astype(narrow)[:, None]
    return np.arange(size) < lengths[:, None]


@functools.lru_cache(maxsize=32)
def _masks(size: int) -> npt.NDArray[np.bool_]:
    """Returns the masks of all lengths, bool [size + 1, size]: to copy rows is several times faster than to compare."""
    return np.tri(size + 1, size, -1, bool)
