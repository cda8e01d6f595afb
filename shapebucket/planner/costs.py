"""What a batch costs: the planner's objective, beside the elements computed on.

A cost is a function from bucket sizes int64 [n, A] and batch sizes int64 [n] to the cost of one batch of each, float64 [n], in
one unit: elements, seconds, flops. The planner divides by the batch size, so a cost that does not shrink with the batch (a
fixed time a step, a budget that an integer number of rows cannot fill) is spread over fewer rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shapebucket.errors import PlanError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
BatchCost = Callable[[Ints, Ints], Floats]


def count_steps(sizes: Ints, batch_sizes: Ints) -> Floats:
    """Costs 1 a batch: fewest steps, for a device that takes as long for a step whatever it holds."""
    del batch_sizes
    return np.ones(len(sizes))


@dataclass(frozen=True)
class PolynomialCost:
    """Costs `per_batch + rows · Σ over axes (linear · L + quadratic · L²)`: a transformer's layers and its attention.

    Attributes:
        linear: a, of each element on an axis.
        quadratic: b, of each pair of elements on an axis.
        per_batch: what a step costs beside its rows.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    per_batch: float = 0.0

    def __call__(self, sizes: Ints, batch_sizes: Ints) -> Floats:
        """Returns the cost of a batch of each size."""
        length = sizes.astype(np.float64)
        return self.per_batch + batch_sizes * (self.linear * length + self.quadratic * length**2).sum(axis=1)


@dataclass(frozen=True)
class TableCost:
    """Costs what was measured: the cost of a batch by its length, linear between the measured lengths (one axis).

    Attributes:
        lengths: measured lengths in elements, ascending; between the first and the last are the sizes that a plan may have.
        costs: of a batch of each (seconds a step, say), with the batch size that the plan will give it.
    """

    lengths: Sequence[int]
    costs: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(map(int, self.lengths)))
        object.__setattr__(self, "costs", tuple(map(float, self.costs)))
        if len(self.lengths) != len(self.costs) or not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise PlanError("a cost table needs ascending lengths and one cost for each")
        if not np.isfinite(self.costs).all() or min(self.costs) <= 0:
            raise PlanError(f"the costs of a table must be positive numbers, but got {self.costs}")

    def __call__(self, sizes: Ints, batch_sizes: Ints) -> Floats:
        """Returns the cost of a batch of each size."""
        del batch_sizes
        if sizes.shape[1] != 1:
            raise PlanError(f"a cost table is for one axis, but the layout has {sizes.shape[1]}")
        return np.interp(sizes[:, 0], self.lengths, self.costs, left=np.inf, right=np.inf)
