"""LengthTable: the lengths of every sample of a data set.

Letters in shapes: `N` samples, `A` axes of the layout.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shapebucket.errors import LengthsError
from shapebucket.files import replacing
from shapebucket.layout import Layout

ABSENT = -1
_FACTS_KEY = "__facts__"


@dataclass(frozen=True, eq=False)
class LengthTable:
    """The lengths of every sample of a data set, in its order.

    Attributes:
        axes: the names of the columns.
        values: int32 [N, A], in elements; a row of -1 stands for an element that the data set does not have (`None`, as
            `grain.MapDataset.filter` leaves it).
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
        if values.size and (
            values.min() < ABSENT or ((values == ABSENT).any(axis=1) != (values == ABSENT).all(axis=1)).any()
        ):
            raise LengthsError("a table holds lengths of 0 or more, or a whole row of -1 for an absent element")

    def __len__(self) -> int:
        return len(self.values)

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which elements the data set has, bool [N]."""
        return self.values[:, 0] != ABSENT

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
        if set(columns) != set(axes):
            raise LengthsError(f"the lengths have the axes {tuple(columns)}, but the layout has {tuple(axes)}")
        if isinstance(lengths, LengthTable):
            return lengths if lengths.axes == tuple(axes) else cls(tuple(axes), np.stack([columns[a] for a in axes], 1))
        arrays = [_whole_numbers(columns[axis], axis) for axis in axes]
        if len({len(array) for array in arrays}) > 1:
            raise LengthsError(
                f"the axes have unequal numbers of samples: {dict(zip(axes, map(len, arrays), strict=True))}"
            )
        return cls(tuple(axes), np.stack(arrays, axis=1))

    def save(self, path: str | os.PathLike[str], *, source: Mapping[str, Any] | None = None) -> None:
        """Writes the table to an `.npz` file: one array an axis, the layout, and what tells the source, as JSON values."""
        facts = {"layout": self.layout.to_json() if self.layout else None, "source": source}
        columns = {axis: self.values[:, i] for i, axis in enumerate(self.axes)}
        arrays = {_FACTS_KEY: np.array(json.dumps(facts)), **columns}
        # not np.savez: an axis may be called "file", as its first argument is
        with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LengthTable:
        """Reads lengths: what `save` wrote, an `.npz` with one array [N] an axis, or an `.npy` [N] (the axis is "s").

        Raises:
            LengthsError: naming the file, for one that holds no lengths.
        """
        return cls.load_with_source(path)[0]

    @classmethod
    def load_with_source(cls, path: str | os.PathLike[str]) -> tuple[LengthTable, Any]:
        """Reads lengths and what `save` was told of their source, None if nothing."""
        try:
            with Path(path).open("rb") as file:  # not by its name: numpy leaves a broken archive open
                content = np.load(file, allow_pickle=False)
                if isinstance(content, np.ndarray):
                    return cls.of(content, ["s"]), None
                arrays = {name: content[name] for name in content.files}
            saved = arrays.pop(_FACTS_KEY, None)
            if not arrays:
                raise LengthsError("it holds no arrays; an .npz file of lengths has one for each axis")
            if saved is None:
                return cls.of(arrays, list(arrays)), None
            facts = json.loads(str(saved))
            layout = Layout.from_json(facts["layout"]) if facts["layout"] else None
            return cls(tuple(arrays), np.stack(list(arrays.values()), axis=1), layout), facts["source"]
        except LengthsError as error:
            raise LengthsError(f"cannot read lengths from {os.fspath(path)!r}: {error}") from error
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, TypeError) as error:
            raise LengthsError(
                f"cannot read lengths from {os.fspath(path)!r}: it is no whole .npy or .npz file of numbers ({error})"
            ) from error


def _whole_numbers(column: npt.ArrayLike, axis: str) -> npt.NDArray[np.int32]:
    """Returns lengths as int32 [N] if they are lengths."""
    array = np.asarray(column)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise LengthsError(
            f"the lengths of axis {axis!r} must be numbers [N], but got {array.dtype} {list(array.shape)}"
        )
    wrong = ~np.isfinite(array) | (array != np.floor(array)) | (array < 0) | (array > np.iinfo(np.int32).max)
    if wrong.any():
        first = int(np.argmax(wrong))
        raise LengthsError(
            f"axis {axis!r}: {int(wrong.sum()):,} lengths are not whole numbers from 0 to 2³¹ − 1; the first is "
            f"{array[first]} of sample {first}: drop or mend such samples first"
        )
    return array.astype(np.int32)
