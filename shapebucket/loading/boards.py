"""Where an iterator leaves its last report, for its data set to read."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Board(Generic[T]):
    """Holds a report, so that the data set does not keep the iterator alive."""

    report: T | None = None
