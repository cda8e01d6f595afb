"""Reading samples of a data set: a few, or a range of them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from shapebucket.errors import LengthsError


def has_random_access(dataset: Any) -> bool:
    """Whether a data set has `len` and `[]`: a `grain.MapDataset`, a TFDS data source, a list."""
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def evenly(length: int, count: int) -> list[int]:
    """Returns at most `count` positions, ascending, spread evenly over `length` of them."""
    return np.unique(np.linspace(0, length - 1, min(count, length)).astype(np.int64)).tolist() if length else []


def some(dataset: Any, count: int) -> Iterator[tuple[int, Any]]:
    """Yields at most `count` elements with their positions: evenly spread, or the first ones without random access or end."""
    if not has_random_access(dataset):
        return enumerate(itertools.islice(iter(dataset), count))
    length = len(dataset)
    return ((index, dataset[index]) for index in evenly(count if length >= sys.maxsize else length, count))


def read_range(dataset: Any, start: int, count: int) -> list[Any]:
    """Reads elements by index, all at once if the data set can."""
    at, reading = start, count
    try:
        if hasattr(dataset, "__getitems__"):
            found = dataset.__getitems__(list(range(start, start + count)))
            if len(found) != count:
                raise LengthsError(f"__getitems__ of the data set gave {len(found)} elements for {count} indices")
            return found
        reading = 1
        elements: list[Any] = []
        for at in range(start, start + count):
            elements.append(dataset[at])
        return elements
    except Exception as error:
        note_reading(error, at, reading)
        raise


def note_reading(error: Exception, at: int, count: int) -> None:
    """Adds to an error which samples were being read."""
    which = f"sample {at}" if count == 1 else f"the samples {at} to {at + count - 1}"
    error.add_note(f"shapebucket: while measure() read {which}")
