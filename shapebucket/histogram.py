"""LengthHistogram: how many samples have which lengths: all that planning needs, however many samples there are.

Letters in shapes: `N` samples, `G` distinct shapes, `A` axes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from shapebucket.errors import LengthsError
from shapebucket.files import write_archive
from shapebucket.layout import Layout
from shapebucket.tables import render

ABSENT = -1
_CHUNK = 1 << 17  # rows that are counted at once, so that they stay in the processor's cache
_CELLS = 1 << 24  # of a dense joint histogram, 128 MB


@dataclass(frozen=True, eq=False)
class LengthHistogram:
    """The joint histogram of lengths on all axes, compressed to the shapes that occur.

    Attributes:
        axes: the names of the columns.
        shapes: distinct shapes in ascending order, int32 [G, A], in elements.
        counts: samples of each, int64 [G].
        absent: elements that the data set does not have (`None`, as `grain.MapDataset.filter` leaves it).
        layout: the layout they were measured with, if they were measured.
    """

    axes: tuple[str, ...]
    shapes: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    absent: int = 0
    layout: Layout | None = None

    def __post_init__(self) -> None:
        shapes, counts = self.shapes, self.counts
        if shapes.dtype != np.int32 or shapes.shape != (len(counts), len(self.axes)) or counts.dtype != np.int64:
            raise LengthsError(
                f"a histogram of the axes {self.axes} has shapes int32 [G, {len(self.axes)}] and counts int64 [G], but got "
                f"{shapes.dtype} {list(shapes.shape)} and {counts.dtype} {list(counts.shape)}"
            )
        if (shapes < 0).any() or (counts < 1).any() or self.absent < 0:
            raise LengthsError("a histogram holds lengths of 0 or more and counts of 1 or more")

    def __len__(self) -> int:
        """The number of samples."""
        return int(self.counts.sum())

    @classmethod
    def of(cls, values: npt.NDArray[np.int32], axes: Sequence[str], layout: Layout | None = None) -> LengthHistogram:
        """Counts shapes, at the speed of memory where they lie within a dense table of a few million cells.

        Args:
            values: int32 [N, A], those of a `LengthTable`; a row of -1 is an absent element.
            axes: their names.
            layout: see the class.

        Raises:
            LengthsError: for other values.
        """
        if values.dtype != np.int32 or values.ndim != 2 or values.shape[1] != len(axes):
            raise LengthsError(
                f"a histogram is of lengths int32 [N, {len(axes)}], but got {values.dtype} {list(values.shape)}: "
                "LengthTable.of(lengths, axes).histogram takes any"
            )
        parts = [np.asarray(values[start : start + _CHUNK]) for start in range(0, len(values), _CHUNK)]
        sizes = [1 + max((int(part[:, axis].max()) for part in parts), default=ABSENT) for axis in range(len(axes))]
        if math.prod(sizes) <= _CELLS:
            shapes, counts = _dense(parts, sizes)
        else:
            shapes, counts = _sparse(parts, len(axes))
        return cls(tuple(axes), shapes, counts, len(values) - int(counts.sum()), layout)

    @classmethod
    def merge(cls, histograms: Iterable[LengthHistogram]) -> LengthHistogram:
        """Adds the histograms of parts of a data set; exact, in any order.

        Raises:
            LengthsError: for none, or parts of other axes or layouts.
        """
        parts = list(histograms)
        if wrong := [type(part).__name__ for part in parts if not isinstance(part, LengthHistogram)]:
            raise LengthsError(f"merge takes histograms, but got {wrong[0]}; a LengthTable has one: table.histogram")
        kinds = {(part.axes, str(part.layout)) for part in parts}
        if len(kinds) != 1:
            raise LengthsError(
                f"histograms of the same axes and layout can be merged, at least one; got {sorted(kinds)}"
            )
        shapes, counts = grouped(
            np.concatenate([part.shapes for part in parts]), np.concatenate([part.counts for part in parts])
        )
        return cls(parts[0].axes, shapes, counts, sum(part.absent for part in parts), parts[0].layout)

    def on(self, axes: Sequence[str]) -> LengthHistogram:
        """Returns the histogram with its axes in another order."""
        if tuple(axes) == self.axes:
            return self
        columns = [self.axes.index(axis) for axis in axes]
        return LengthHistogram(tuple(axes), *grouped(self.shapes[:, columns], self.counts), self.absent, self.layout)

    def along(self, axis: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Returns the distinct lengths on one axis, ascending, int32 [n], and samples of each, int64 [n]."""
        lengths, counts = grouped(self.shapes[:, [self.axes.index(axis)]], self.counts)
        return lengths[:, 0], counts

    def summary(self) -> dict[str, dict[str, float]]:
        """Returns for each axis the shortest, (lower) median, 95th and 99th percentile, longest and mean length, in elements.

        Raises:
            LengthsError: for no samples.
        """
        if not len(self.counts):
            raise LengthsError("there are no samples, so no lengths to sum up")
        facts: dict[str, dict[str, float]] = {}
        for axis in self.axes:
            lengths, counts = self.along(axis)
            running = np.cumsum(counts)
            ranks = {"min": 0.0, "median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
            found = {name: int(lengths[np.searchsorted(running, share * running[-1])]) for name, share in ranks.items()}
            facts[axis] = {**found, "mean": float(lengths.astype(np.float64) @ counts / running[-1])}
        return facts

    def __str__(self) -> str:
        title = f"{len(self):,} samples, {len(self.counts):,} distinct shapes"
        if self.absent:
            title += f"; {self.absent:,} elements are absent"
        if not len(self.counts):
            return title
        names = ["min", "median", "p95", "p99", "max", "mean"]
        facts = self.summary().items()
        rows = [[axis, *(f"{round(fact[name], 1):,}" for name in names)] for axis, fact in facts]
        return render(title, ["axis", *names], rows, text=1)

    def save(self, path: str | os.PathLike[str] | IO[bytes]) -> None:
        """Writes the histogram to an `.npz` file, by path or open; `load_lengths` reads it."""
        facts = {"axes": self.axes, "absent": self.absent, "layout": self.layout.to_json() if self.layout else None}
        write_archive(path, facts, {"shapes": [self.shapes], "counts": [self.counts]})


def grouped(shapes: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Returns the distinct rows of shapes [G, A], ascending, and the sum of the counts of each."""
    if not len(shapes):
        return shapes, counts
    sizes = [int(size) + 1 for size in shapes.max(axis=0)]
    if math.prod(sizes) < 2**63:
        order = np.argsort(np.ravel_multi_index(list(shapes.T), sizes), kind="stable")
    else:
        order = np.lexsort(shapes.T[::-1])
    shapes, counts = shapes[order], counts[order]
    first = np.flatnonzero(np.append(True, (shapes[1:] != shapes[:-1]).any(axis=1)))
    return shapes[first], np.add.reduceat(counts, first)


def _present(parts: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
    """Yields the parts without their absent rows."""
    for part in parts:
        there = part if not len(part) or part[:, 0].min() > ABSENT else part[part[:, 0] != ABSENT]
        if there.min(initial=0) < 0:
            raise LengthsError("a histogram is of lengths of 0 or more, and whole rows of -1 for absent elements")
        yield there


def _dense(parts: list[npt.NDArray[Any]], sizes: Sequence[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Counts in a table of all shapes below `sizes`, [A]."""
    table = np.zeros(math.prod(sizes), np.int64)
    for part in _present(parts):
        cell = part[:, 0]
        for axis in range(1, len(sizes)):
            cell = cell * np.int64(sizes[axis]) + part[:, axis]
        if len(table) <= _CHUNK:
            table += np.bincount(cell, minlength=len(table))
        else:  # a table for each part would cost more than the part
            np.add.at(table, cell, 1)
    occurring = np.flatnonzero(table)
    shapes = np.stack(np.unravel_index(occurring, sizes), axis=1) if len(occurring) else np.empty((0, len(sizes)))
    return shapes.astype(np.int32), table[occurring]


def _sparse(parts: list[npt.NDArray[Any]], axes: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Counts what occurs, part by part; what was found is merged whenever it has doubled."""
    shapes, counts = np.empty((0, axes), np.int32), np.empty(0, np.int64)
    waiting: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]] = []
    held = 0
    for part in _present(parts):
        waiting.append(grouped(part.astype(np.int32), np.ones(len(part), np.int64)))
        held += len(waiting[-1][0])
        if held > max(len(shapes), 8 * _CHUNK):
            shapes, counts = _joined([(shapes, counts), *waiting])
            waiting, held = [], 0
    return _joined([(shapes, counts), *waiting])


def _joined(
    parts: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    return grouped(np.concatenate([shapes for shapes, _ in parts]), np.concatenate([counts for _, counts in parts]))
