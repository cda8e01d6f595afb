"""Ruler: how the lengths of one sample are taken."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shapebucket.errors import LayoutError, LengthsError
from shapebucket.histogram import ABSENT
from shapebucket.layout import Layout
from shapebucket.lengths import LengthTable

LengthFn = Callable[[Any], "int | Sequence[int] | Mapping[str, int]"]
Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Ruler:
    """How the lengths of a sample are taken; pickled for worker processes.

    Attributes:
        layout: which axes vary, with dtypes; None where `length_fn` alone says.
        axes: their names.
        length_fn: gives the lengths in place of the layout, if not None.
    """

    layout: Layout | None
    axes: tuple[str, ...]
    length_fn: LengthFn | None

    def rows(self, samples: Iterable[Any], first: int) -> Rows:
        """Returns the lengths of samples, int32 [n, A], of which the first has the given index."""
        found = [self.row(sample, index) for index, sample in enumerate(samples, start=first)]
        return np.array(found, np.int32).reshape(-1, len(self.axes))

    def row(self, sample: Any, index: int | tuple[int, int] | None) -> tuple[int, ...]:
        """Returns the lengths of a sample, -1 for None; the index is what errors call it."""
        if sample is None:
            return (ABSENT,) * len(self.axes)
        if self.length_fn is None:
            try:
                return cast(Layout, self.layout).lengths(sample)
            except LayoutError as error:
                raise error.at(index) from None
        which = "a sample" if index is None else f"sample {index}"
        try:
            given = self.length_fn(sample)
        except Exception as error:
            error.add_note(f"shapebucket: while length_fn took the lengths of {which}")
            raise
        lengths = list(given) if isinstance(given, Sequence) else [given]
        if isinstance(given, Mapping):
            if set(given) != set(self.axes):
                raise LengthsError(f"length_fn gave {given!r} for {which}, but the axes are {self.axes}")
            lengths = [given[axis] for axis in self.axes]
        try:
            row = tuple(map(operator.index, cast(Any, lengths)))
        except TypeError:
            row = ()
        if len(row) != len(self.axes) or min(row) < 0 or max(row) > np.iinfo(np.int32).max:
            raise LengthsError(
                f"length_fn gave {given!r} for {which}: a whole number from 0 to 2³¹ − 1 is needed for each of the "
                f"axes {self.axes}"
            )
        return row

    def table(self, parts: Sequence[Rows]) -> LengthTable:
        """Makes a table of lengths."""
        empty = np.empty((0, len(self.axes)), np.int32)
        return LengthTable(self.axes, np.concatenate([empty, *parts]), self.layout)
