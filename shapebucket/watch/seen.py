"""The shapes seen, as lengths for the planner."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shapebucket.errors import LayoutError
from shapebucket.histogram import LengthHistogram, grouped
from shapebucket.layout import Layout
from shapebucket.watch.calls import CallCounts, Column
from shapebucket.watch.recording import CompileEvent
from shapebucket.watch.signature import Leaf, Signature

_KEYS = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]|\.(\w+)|^(\w[\w ]*)")


@dataclass(frozen=True)
class SeenShapes:
    """The sizes that varied among a function's calls.

    Attributes:
        lengths: how often which sizes came, with a layout of the leaves that have them.
        rows: the largest batch seen; 1 where the leaves have no batch axis.
        counted: whether the counts are of calls; otherwise each combination of sizes counts once.
    """

    lengths: LengthHistogram
    rows: int
    counted: bool

    def __len__(self) -> int:
        """The number of distinct combinations of sizes."""
        return len(self.lengths.counts)

    @property
    def weight(self) -> int:
        """The calls, or the combinations."""
        return len(self.lengths)

    @classmethod
    def of(cls, events: Sequence[CompileEvent], counts: CallCounts | None) -> SeenShapes | None:
        """Collects the sizes that varied from a function's compiles, and from its calls where they were counted."""
        changed = {
            (change.path, change.axis)
            for event in events
            for change in event.changes
            if change.kind == "shape" and change.axis is not None
        }
        rows = [_sizes(event.signature, changed) for event in events]
        table = Counter(tuple(row.values()) for row in rows if row is not None)
        columns = next((tuple(row) for row in rows if row is not None), ())
        if not columns or len(table) < 2:
            return None
        table = Counter(dict.fromkeys(table, 1))
        counted = False
        if counts is not None:
            places, sizes = counts.sizes
            if set(columns) <= set(places):
                order = [places.index(column) for column in columns]
                called = Counter[tuple[int, ...]]()
                for each, count in sizes.items():
                    called[tuple(each[k] for k in order)] += count
                # each that compiled came once at least; under vmap, a call shows other sizes than those that compile
                table = Counter({row: max(1, called[row]) for row in table})
                counted = True
        return _collected(columns, table, counted, _leaves(events, columns))


def is_mask(path: str, leaf: Leaf) -> bool:
    """Tells whether a leaf is a mask, by its dtype or name."""
    return leaf.dtype == "bool" or _last(path).endswith("mask")


def sizes_at(signature: Signature | None, path: str, axis: int) -> int | None:
    """Returns the size of an axis of a leaf, if there is one."""
    found = _sizes(signature, {(path, axis)})
    return None if found is None else found[path, axis]


def _sizes(signature: Signature | None, columns: set[Column]) -> dict[Column, int] | None:
    """Returns the sizes of some axes, in the order of the leaves; None where one is missing."""
    if signature is None:
        return None
    found = {
        (path.text, axis): size
        for path, leaf in zip(signature.paths, signature.leaves, strict=True)
        for axis, size in enumerate(leaf.shape)
        if (path.text, axis) in columns
    }
    return found if len(found) == len(columns) else None


def _leaves(events: Sequence[CompileEvent], columns: Sequence[Column]) -> dict[str, Leaf]:
    """Returns the latest description of each leaf that has some of the columns."""
    wanted = {path for path, _ in columns}
    return {
        path.text: leaf
        for event in events
        if event.signature is not None
        for path, leaf in zip(event.signature.paths, event.signature.leaves, strict=True)
        if path.text in wanted
    }


def _collected(
    columns: Sequence[Column], table: Mapping[tuple[int, ...], int], counted: bool, leaves: Mapping[str, Leaf]
) -> SeenShapes | None:
    """Joins columns that always agree into axes, and leaves the batch's rows out."""
    shapes = np.array(list(table), np.int64)
    leaves = {
        path: leaf for path, leaf in leaves.items() if not is_mask(path, leaf)
    } or leaves  # the loader makes masks
    batched = any(axis > 0 for _, axis in columns)  # then the first axis is the batch's
    kept = [k for k, (path, axis) in enumerate(columns) if path in leaves and (axis > 0 or not batched)]
    first = [k for k, (_, axis) in enumerate(columns) if axis == 0 and batched]
    rows = int(shapes[:, first].max()) if first else 1
    if batched and not first:
        rows = max([leaf.shape[0] for leaf in leaves.values() if len(leaf.shape) > 1], default=1)
    names: dict[Column, str] = {}
    chosen: list[int] = []
    for k in kept:
        same = next((other for other in chosen if (shapes[:, other] == shapes[:, k]).all()), None)
        if same is None:
            chosen.append(k)
        names[columns[k]] = _axis_name(columns[k], names, leaves) if same is None else names[columns[same]]
    layout = _layout(leaves, names, batched)
    if layout is None or not layout.axes:
        return None
    order = [next(k for k in chosen if names[columns[k]] == axis) for axis in layout.axes]
    distinct, counts = grouped(shapes[:, order].astype(np.int32), np.fromiter(table.values(), np.int64))
    lengths = LengthHistogram(layout.axes, distinct, counts if counted else np.ones_like(counts), layout=layout)
    return SeenShapes(lengths, max(1, rows), counted)


def _layout(leaves: Mapping[str, Leaf], names: Mapping[Column, str], batched: bool) -> Layout | None:
    """Returns the layout of a sample that has the leaves, without the batch's axis."""
    spec: dict[str, str] = {}
    for path, leaf in leaves.items():
        dims = [names.get((path, axis), str(size)) for axis, size in enumerate(leaf.shape) if axis > 0 or not batched]
        key = _last(path)
        inside = " ".join(dims)
        known = leaf.dtype in np.sctypeDict
        spec[key if key not in spec else path.replace("/", "_")] = f"{leaf.dtype}[{inside}]" if known else inside
    try:
        return Layout(spec)
    except LayoutError:  # keys that a layout does not take
        return None


def _axis_name(column: Column, taken: Mapping[Column, str], leaves: Iterable[str]) -> str:
    """Returns a name for an axis, after its leaf; with the axis' number where it is taken, or its mask's would be a leaf's."""
    path, axis = column
    name = "".join(letter if letter.isalnum() else "_" for letter in _last(path)).strip("_") or "s"
    if not name[0].isalpha():
        name = f"s_{name}"
    keys = {_last(leaf) for leaf in leaves}
    while name in taken.values() or keys & {f"{name}_mask", f"{name}_length"}:
        name = f"{name}_{axis}"
    return name


def _last(path: str) -> str:
    """Returns the last key of a path: "tokens" of `batch['tokens']`."""
    found = ["".join(groups) for groups in _KEYS.findall(path)]
    return found[-1] if found else path
