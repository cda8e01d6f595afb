"""Choices: what every planner of shapes gives: the boxes for any number of buckets, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shapebucket.planner.costs import Ints

Prices = Callable[[Ints], npt.NDArray[Any]]


class Choice(NamedTuple):
    """The boxes chosen for one number of buckets.

    Attributes:
        sizes: int64 [≤ K, A].
        cost: what all samples pay.
        bound: what they pay at least, whatever boxes are chosen.
    """

    sizes: Ints
    cost: float
    bound: float


@dataclass(frozen=True, eq=False)
class Choices:
    """The boxes for any number of buckets up to K.

    Attributes:
        curve: the least cost found with at most 1, 2, … K buckets, [≤ K], infinity for fewer than must be.
        sketch: from a number of buckets to boxes that cost what the curve says, int64 [≤ that number, A].
        choose: from a number of buckets to the best choice that can be found.
        fewest: the fewest buckets that hold all samples and what must be there.
    """

    curve: npt.NDArray[Any]
    sketch: Callable[[int], Ints]
    choose: Callable[[int], Choice]
    fewest: int

    @classmethod
    def impossible(cls, fewest: int) -> Choices:
        """Says that more buckets are needed than there may be."""

        def nothing(buckets: int) -> Any:
            raise ValueError(f"{buckets} buckets are not among the choices")

        return cls(np.empty(0), nothing, nothing, fewest)
