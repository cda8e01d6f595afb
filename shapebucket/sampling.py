"""Looking at a few samples of a data set."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np


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
