"""LengthTable: the lengths of every sample of a data set.

Letters in shapes: `N` samples, `A` axes of the layout.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from shapebucket.columns import chosen, read_columns
from shapebucket.errors import LayoutError, LengthsError
from shapebucket.files import read_archive, write_archive
from shapebucket.histogram import ABSENT, LengthHistogram
from shapebucket.layout import Layout

_NPY, _PARQUET, _ARCHIVE = b"\x93NUMPY", b"PAR1", b"PK"  # what such files begin with, whatever they are called
_LONGEST = np.iinfo(np.int32).max
_CHUNK = 1 << 20  # rows that are checked at once


@dataclass(frozen=True, eq=False)
class LengthTable:
    """The lengths of every sample of a data set, in its order.

    Attributes:
        axes: the names of the columns.
        values: int32 [N, A], in elements; a row of -1 stands for an element that the data set does not have (`None`, as
            `grain.MapDataset.filter` leaves it). Mapped from its file, read only, where it is large; the processes of a machine
            share its memory, and a pickled table then holds the file's name.
        layout: the layout they were measured with, dtypes included, if they were measured.
    """

    axes: tuple[str, ...]
    values: npt.NDArray[np.int32]
    layout: Layout | None = None

    def __post_init__(self) -> None:
        values = self.values
        if values.dtype != np.int32 or values.ndim != 2 or values.shape[1] != len(self.axes):
            raise LengthsError(
                f"a table of the axes {self.axes} must be int32 [N, {len(self.axes)}], but got {values.dtype} "
                f"{list(values.shape)}; LengthTable.of makes one from arrays"
            )
        if not all(_is_sound(values[start : start + _CHUNK]) for start in range(0, len(values), _CHUNK)):
            raise LengthsError("a table holds lengths of 0 or more, or a whole row of -1 for an absent element")

    def __len__(self) -> int:
        return len(self.values)

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which elements the data set has, bool [N]."""
        return self.values[:, 0] != ABSENT

    @cached_property
    def histogram(self) -> LengthHistogram:
        """How many samples have which lengths."""
        return LengthHistogram.of(self.values, self.axes, self.layout)

    @classmethod
    def of(cls, lengths: LengthTable | npt.ArrayLike | Mapping[str, npt.ArrayLike], axes: Sequence[str]) -> LengthTable:
        """Makes a table from lengths that come from elsewhere: a column of a data frame, say.

        Args:
            lengths: one array [N] for each axis by name; or, where there is one axis, the array alone. A table passes
                through.
            axes: the names of the axes.

        Raises:
            LengthsError: for NaN, infinite, fractional, negative or too large lengths (over 2³¹ − 1), columns of
                unequal length, or other axes.
        """
        if isinstance(lengths, LengthTable):
            columns: Mapping[str, Any] = {axis: lengths.values[:, i] for i, axis in enumerate(lengths.axes)}
        elif isinstance(lengths, Mapping):
            columns = cast(Mapping[str, Any], lengths)
        elif len(axes) == 1:
            columns = {axes[0]: lengths}
        else:
            raise LengthsError(f"the layout has the axes {tuple(axes)}: give a dict with one array of lengths for each")
        check_axes(columns, axes)
        if isinstance(lengths, LengthTable):
            return lengths if lengths.axes == tuple(axes) else cls(tuple(axes), np.stack([columns[a] for a in axes], 1))
        arrays = [_whole_numbers(columns[axis], axis) for axis in axes]
        if len({len(array) for array in arrays}) > 1:
            raise LengthsError(
                f"the axes have unequal numbers of samples: {dict(zip(axes, map(len, arrays), strict=True))}"
            )
        return cls(tuple(axes), arrays[0][:, None] if len(arrays) == 1 else np.stack(arrays, axis=1))

    @classmethod
    def concatenate(cls, tables: Iterable[LengthTable], *, path: str | os.PathLike[str] | None = None) -> LengthTable:
        """Joins the tables of the parts of a data set, in their order.

        Args:
            tables: the parts; from files, say: `map(LengthTable.load, sorted(glob("lengths-*-of-00008.npz")))`.
            path: an `.npz` file to write them to, one after the other; the table is then read from there, mapped where it is
                large, and memory holds no more than the largest part.

        Raises:
            LengthsError: for none, or parts of other axes or layouts.
        """
        parts = list(tables)
        if not parts or any((part.axes, part.layout) != (parts[0].axes, parts[0].layout) for part in parts):
            raise LengthsError(
                f"tables of the same axes and layout can be joined, at least one; got {[part.axes for part in parts]}"
            )
        if path is not None:
            write_archive(path, _facts(parts[0]), {"values": [part.values for part in parts]})
            return cls.load(path)
        return cls(parts[0].axes, np.concatenate([part.values for part in parts]), parts[0].layout)

    def __str__(self) -> str:
        return str(self.histogram)

    def save(self, path: str | os.PathLike[str] | IO[bytes], *, source: Mapping[str, Any] | None = None) -> None:
        """Writes the table to an `.npz` file, by path or open, with the layout and what tells the source, JSON values."""
        write_archive(path, _facts(self, source), {"values": [self.values]})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LengthTable:
        """Reads the lengths of every sample from a file: see `load_lengths`.

        Raises:
            LengthsError: naming the file, for one that holds no lengths, or a histogram.
        """
        return cls.load_with_source(path)[0]

    @classmethod
    def load_with_source(cls, path: str | os.PathLike[str]) -> tuple[LengthTable, Any]:
        """Reads lengths and what `save` was told of their source, None if nothing."""
        lengths, source = _load(path, None)
        if isinstance(lengths, LengthHistogram):
            raise LengthsError(
                f"{os.fspath(path)!r} holds a histogram, which is enough to plan from (load_lengths reads it), but not the "
                "lengths of every sample"
            )
        return lengths, source


def load_lengths(
    path: str | os.PathLike[str], *, columns: Sequence[str] | None = None
) -> LengthTable | LengthHistogram:
    """Reads lengths from a file.

    Args:
        path: what `LengthTable.save` or `LengthHistogram.save` wrote; or an `.npy` array [N] (the axis is "s"), an `.npz` with
            one array [N] an axis, a `.csv`, or a `.parquet` (needs pyarrow). The first line of a `.csv` names its columns; a
            single column may go without, and is then the axis "s".
        columns: of an `.npz`, `.csv` or `.parquet`: those that are axes; all if not given.

    Raises:
        LengthsError: naming the file and what is wrong where, for one that holds no lengths.
    """
    lengths, source = _load(path, columns)
    if source and source.get("partial"):
        raise LengthsError(
            f"{os.fspath(path)!r} is of a run that was interrupted: run measure again, which goes on there"
        )
    return lengths


def check_axes(given: Iterable[str], axes: Sequence[str]) -> None:
    """Raises LengthsError where lengths have other axes than a layout, whatever their order."""
    if set(given) != set(axes):
        raise LengthsError(f"the lengths have the axes {tuple(given)}, but the layout has {tuple(axes)}")


def _facts(table: LengthTable, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns what a file tells of a table."""
    return {"axes": table.axes, "layout": table.layout.to_json() if table.layout else None, "source": source}


def _is_sound(values: npt.NDArray[np.int32]) -> bool:
    """Whether lengths [n, A] are 0 or more, or whole rows of -1."""
    lowest = values.min(initial=0)
    absent = values == ABSENT if lowest == ABSENT else values[:0]
    return bool(lowest >= ABSENT and (absent == absent[:, :1]).all())


def _load(path: str | os.PathLike[str], columns: Sequence[str] | None) -> tuple[LengthTable | LengthHistogram, Any]:
    """Reads lengths, and what is told of their source."""
    try:
        with Path(path).open("rb") as file:
            magic = file.read(len(_NPY))
            file.seek(0)
            if magic == _NPY:
                _no_columns(columns, "an .npy file")
                return LengthTable.of(np.lib.format.read_array(file, allow_pickle=False), ["s"]), None
        if not magic.startswith(_ARCHIVE):
            if magic.startswith(_PARQUET) or Path(path).suffix in (".csv", ".parquet"):
                arrays = read_columns(path, columns)
                return LengthTable.of(arrays, list(arrays)), None
            raise LengthsError(
                "it is none of the kinds that hold lengths: .npy, .npz (whole ones), .csv, .parquet, or what measure wrote"
            )
        facts, arrays = read_archive(path)
        if facts is None:
            return _from_arrays(arrays, columns), None
        _no_columns(columns, "a file of measured lengths")
        layout = Layout.from_json(facts["layout"]) if facts["layout"] else None
        if "values" in arrays:
            return LengthTable(tuple(facts["axes"]), arrays["values"], layout), facts["source"]
        return LengthHistogram(tuple(facts["axes"]), arrays["shapes"], arrays["counts"], facts["absent"], layout), None
    except LengthsError as error:
        raise LengthsError(f"cannot read lengths from {os.fspath(path)!r}: {error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, TypeError, LayoutError) as error:
        raise LengthsError(
            f"cannot read lengths from {os.fspath(path)!r}: it is no whole file of lengths ({error})"
        ) from error


def _no_columns(columns: Sequence[str] | None, kind: str) -> None:
    if columns is not None:
        raise LengthsError(f"columns cannot be chosen from {kind}")


def _from_arrays(arrays: Mapping[str, npt.NDArray[Any]], columns: Sequence[str] | None) -> LengthTable:
    """Makes a table of the arrays of an `.npz` file of others."""
    if not arrays:
        raise LengthsError("it holds no arrays; an .npz file of lengths has one for each axis")
    axes = chosen(list(arrays), columns)
    return LengthTable.of({axis: arrays[axis] for axis in axes}, axes)


def _whole_numbers(column: npt.ArrayLike, axis: str) -> npt.NDArray[np.int32]:
    """Returns lengths as int32 [N] if they are lengths."""
    try:
        array = np.asarray(column)
    except ValueError:
        array = np.array(None)
    if array.dtype.kind == "f":
        array = array.astype(np.float64)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise LengthsError(
            f"the lengths of axis {axis!r} must be numbers [N], but got {array.dtype} {list(array.shape)}"
        )
    if array.dtype.kind == "f" or (len(array) and not (array.min() >= 0 and array.max() <= _LONGEST)):
        wrong = ~np.isfinite(array) | (array != np.floor(array)) | (array < 0) | (array > _LONGEST)
        if wrong.any():
            first = int(np.argmax(wrong))
            raise LengthsError(
                f"axis {axis!r}: {int(wrong.sum()):,} lengths are not whole numbers from 0 to 2³¹ − 1; the first is "
                f"{array[first]} of sample {first}: drop or mend such samples first"
            )
    return array.astype(np.int32, copy=False)
