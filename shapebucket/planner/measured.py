"""MeasuredCost: a batch's cost by what was measured at a few sizes.

Letters in shapes: `A` axes, `P` measured sizes, `n` sizes asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shapebucket.errors import PlanError
from shapebucket.layout import Layout
from shapebucket.planner.costs import Floats, Ints
from shapebucket.tables import render


@dataclass(frozen=True)
class MeasuredCost:
    """Costs what was measured on a grid of sizes, in proportion to the rows: a cost for `plan_buckets`.

    Between measured sizes, what an element costs is taken to follow a power of the length, which is exact for rows that cost
    a·L, b·L² or always the same, and within 2 % of a·L + b·L² where each size is twice the last:

        cost(L, B)  =  B · elements(L) · exp(p(log L)),   p multilinear through log(cost / (rows · elements)) at the grid

    A size below the grid costs as much as the grid's smallest; one beyond it is infinitely dear, so that no plan has it.

    Attributes:
        layout: counts the elements.
        grid: the measured sizes on each axis, ascending, in elements; what was measured is their product.
        batch_sizes: the rows of each measured batch, [P], the last axis fastest.
        costs: of each measured batch, [P]: the median, where it varies.
        unit: of the costs: "seconds", "flops".
        spread: the lowest and highest cost of each, [P]; empty where it does not vary.
    """

    layout: Layout
    grid: tuple[tuple[int, ...], ...]
    batch_sizes: tuple[int, ...]
    costs: tuple[float, ...]
    unit: str
    spread: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if len(self.grid) != len(self.layout.axes) or any(list(each) != sorted({*each}) for each in self.grid):
            raise PlanError(f"grid needs ascending sizes for each of the axes {self.layout.axes}, but is {self.grid}")
        if not len(self.sizes) == len(self.batch_sizes) == len(self.costs) or min(self.batch_sizes, default=0) < 1:
            raise PlanError(f"the grid has {len(self.sizes)} sizes, each of which needs a batch size and a cost")
        if not np.isfinite(self.costs).all() or min(self.costs) <= 0:
            raise PlanError(f"measured costs must be positive numbers, but got {self.costs}")

    @cached_property
    def sizes(self) -> Ints:
        """The measured sizes, int64 [P, A]."""
        return np.array(list(itertools.product(*self.grid)), np.int64)

    @cached_property
    def row_costs(self) -> Floats:
        """What a row of each measured size costs, float64 [P]."""
        return np.array(self.costs) / np.array(self.batch_sizes)

    def __call__(self, sizes: Ints, batch_sizes: Ints) -> Floats:
        """Returns the cost of a batch of each size, [n]."""
        if sizes.shape[1] != len(self.grid):
            raise PlanError(f"the cost was measured on {len(self.grid)} axes, but the layout has {sizes.shape[1]}")
        least = np.array([each[0] for each in self.grid])
        beyond = (sizes > np.array([each[-1] for each in self.grid])).any(axis=1)
        inside = np.maximum(sizes, least)
        measured = np.log(self.row_costs / self.layout.elements(self.sizes)).reshape([len(each) for each in self.grid])
        cells = [_cell(each, inside[:, axis]) for axis, each in enumerate(self.grid)]
        log_cost = np.zeros(len(sizes))
        for corner in itertools.product((0, 1), repeat=len(cells)):
            sides = list(zip(corner, cells, strict=True))
            weights = [share if side else 1 - share for side, (_, _, share) in sides]
            at = tuple(upper if side else lower for side, (lower, upper, _) in sides)
            log_cost += np.prod(weights, axis=0) * measured[at]
        return np.where(beyond, np.inf, batch_sizes * self.layout.elements(inside) * np.exp(log_cost))

    def __str__(self) -> str:
        each_element = self.row_costs / self.layout.elements(self.sizes)
        rows = [
            [
                *map(str, self.sizes[index]),
                str(self.batch_sizes[index]),
                f"{cost:.3g}",
                *([f"{self.spread[index][0]:.3g} to {self.spread[index][1]:.3g}"] if self.spread else []),
                f"{self.row_costs[index]:.3g}",
                f"{each_element[index]:.3g}",
            ]
            for index, cost in enumerate(self.costs)
        ]
        header = [
            *self.layout.axes,
            "rows",
            f"{self.unit} a step",
            *(["spread"] if self.spread else []),
            "a row",
            "an element",
        ]
        dearest = each_element.max() / each_element.min()
        caption = f"an element costs {dearest:.2f} times as much at the dearest size as at the cheapest"
        return render(f"{self.unit} measured at {len(self.costs)} sizes", header, rows, caption=caption)


def _cell(grid: Sequence[int], lengths: Ints) -> tuple[Ints, Ints, Floats]:
    """Returns the positions of the measured sizes below and above each length, and how far it is on the way, by logarithms."""
    upper = (
        np.clip(np.searchsorted(grid, lengths), 1, len(grid) - 1) if len(grid) > 1 else np.zeros(len(lengths), np.int64)
    )
    lower = np.maximum(upper - 1, 0)
    logs = np.log(grid)
    width = np.where(upper > lower, logs[upper] - logs[lower], 1.0)
    return lower, upper, np.clip((np.log(lengths) - logs[lower]) / width, 0.0, 1.0)
