"""Reading columns of numbers from `.csv` and `.parquet` files."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shapebucket.errors import LengthsError, MissingExtraError

_CHOOSE = "the columns that are lengths (columns=, --columns)"
_UTF8 = "utf-8-sig"  # with or without the mark that spreadsheets write


def read_columns(path: str | os.PathLike[str], columns: Sequence[str] | None) -> dict[str, npt.NDArray[Any]]:
    """Reads columns by name, each [N].

    Args:
        path: a `.csv` or `.parquet` file.
        columns: their names; all if None.

    Raises:
        LengthsError: for a column that is not there or not of numbers, saying where.
        MissingExtraError: for a `.parquet` file without pyarrow.
    """
    return (_read_csv if Path(path).suffix == ".csv" else _read_parquet)(path, columns)


def _read_csv(path: str | os.PathLike[str], columns: Sequence[str] | None) -> dict[str, npt.NDArray[Any]]:
    with Path(path).open(newline="", encoding=_UTF8) as file:
        reader = csv.reader(file)
        first = [name.strip() for name in next(reader, [])]
        for row in reader:
            if row and len(row) != len(first):
                raise LengthsError(f"line {reader.line_num} has {len(row)} fields, but the first has {len(first)}")
        rows = reader.line_num
    if not first:
        raise LengthsError("it is empty, or its first line is")
    has_names = not all(map(_is_number, first))
    if has_names and any(map(_is_number, first)):
        raise LengthsError(f"its first line {first} is part text, part numbers: neither names of columns nor lengths")
    if not has_names and len(first) > 1:
        raise LengthsError(f"its {len(first)} columns have no names: put a line with the names of the axes first")
    names = first if has_names else ["s"]
    if len(set(names)) < len(names):
        raise LengthsError(f"two of its columns have one name: {names}")
    if has_names and rows == 1:
        raise LengthsError(f"it has no lengths, only the line {names}")
    wanted = chosen(names, columns)
    numbers = [_column(path, names.index(name), name, skip=int(has_names)) for name in wanted]
    return dict(zip(wanted, numbers, strict=True))


def _column(path: str | os.PathLike[str], position: int, name: str, *, skip: int) -> npt.NDArray[np.float64]:
    try:
        return np.loadtxt(
            path,
            np.float64,
            delimiter=",",
            quotechar='"',
            skiprows=skip,
            usecols=position,
            ndmin=1,
            comments=None,
            encoding=_UTF8,
        )
    except ValueError:
        line, text = _first_text(path, position, skip)
        raise LengthsError(
            f"line {line} has {text!r} in the column {name!r}, which is no number: drop such lines, or choose {_CHOOSE}"
        ) from None


def _first_text(path: str | os.PathLike[str], position: int, skip: int) -> tuple[int, str]:
    """Finds the first entry of a column that is no number: its line, from 1, and what it is."""
    with Path(path).open(newline="", encoding=_UTF8) as file:
        reader = csv.reader(file)
        for row in reader:
            text = row[position] if position < len(row) else ""
            if reader.line_num > skip and row and not _is_number(text):
                return reader.line_num, text
    raise LengthsError("it is no table of numbers")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_parquet(path: str | os.PathLike[str], columns: Sequence[str] | None) -> dict[str, npt.NDArray[Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingExtraError("pyarrow", "parquet") from error
    try:
        with parquet.ParquetFile(path) as file:
            wanted = chosen(file.schema_arrow.names, columns)
            table = file.read(columns=wanted)
    except pyarrow.ArrowException as error:
        raise LengthsError(f"it is no whole .parquet file ({error})") from error
    for name in wanted:
        column = table.column(name)
        if not (pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type)):
            raise LengthsError(f"the column {name!r} is of {column.type}, not of numbers: choose {_CHOOSE}")
        if column.null_count:
            raise LengthsError(f"the column {name!r} has {column.null_count:,} nulls: drop such rows")
    return {name: table.column(name).to_numpy() for name in wanted}


def chosen(names: Sequence[str], columns: Sequence[str] | None) -> list[str]:
    """Returns the columns to read, of those that are there: all if None.

    Raises:
        LengthsError: for one that is not there.
    """
    for name in columns or ():
        if name not in names:
            raise LengthsError(f"it has no column {name!r}, but {list(names)}")
    return list(names if columns is None else columns)
