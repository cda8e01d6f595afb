"""The many-axis planner: K boxes so that every sample pays least for the cheapest box that holds it, and a lower bound.

This is the p-median problem (Hakimi, Operations Research 12, 1964) over a grid of boxes: samples are clients, boxes facilities,
and a sample can only go to a box that holds it.

Letters in shapes: `I` groups of samples of one shape, `J` candidate boxes, `K` chosen boxes, `A` axes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shapebucket.buckets import first_that_holds
from shapebucket.planner.costs import Elements, Floats, Ints
from shapebucket.planner.exact import optimal_boundaries
from shapebucket.planner.merge import merge_boxes

_CELLS = 4_000_000  # of the cost matrix, 32 MB
_RESTARTS = 16


@dataclass(frozen=True)
class Instance:
    """One problem.

    Attributes:
        shapes: distinct shapes of samples, int64 [I, A].
        weights: samples of each, float64 [I].
        boxes: candidate boxes, int64 [J, A]; one holds all shapes.
        prices: what a row of each box costs, float64 [J].
        costs: prices[j] where box j holds shape i, else infinity, float64 [I, J].
    """

    shapes: Ints
    weights: Floats
    boxes: Ints
    prices: Floats
    costs: Floats

    @classmethod
    def of(cls, shapes: Ints, weights: npt.ArrayLike, boxes: Ints, elements: Elements) -> Instance:
        """Makes a problem; the cost matrix follows."""
        price = elements(boxes).astype(np.float64)
        holds = np.ones((len(shapes), len(boxes)), bool)
        for axis in range(shapes.shape[1]):
            holds &= shapes[:, axis, None] <= boxes[None, :, axis]
        return cls(shapes, np.asarray(weights, np.float64), boxes, price, np.where(holds, price[None, :], np.inf))

    def cost(self, chosen: Ints) -> float:
        """Returns what the samples pay where these boxes are chosen."""
        return float(self.weights @ self.costs[:, chosen].min(axis=1))

    def nearest(self, boxes: Ints) -> Ints:
        """Returns for each box the cheapest candidate that holds it, [len(boxes)]."""
        holds = (boxes[:, None, :] <= self.boxes[None, :, :]).all(axis=2)
        return np.where(holds, self.prices[None, :], np.inf).argmin(axis=1)


def choose_boxes(
    shapes: Ints, counts: Ints, elements: Elements, max_buckets: int, *, seed: int = 0
) -> tuple[Ints, int]:
    """Chooses at most K boxes that hold all shapes, by merging, swaps and seeded restarts, and bounds the best possible.

    Where there are too many distinct shapes, the search works on shapes rounded up to a grid of exact one-axis boundaries, and
    the bound on shapes rounded down to one, so that it stays a bound.

    Args:
        shapes: distinct shapes, int64 [I, A].
        counts: samples of each, int64 [I].
        elements: what a row of a box costs, from int64 [..., A] to int64 [...].
        max_buckets: K.
        seed: of the restarts.

    Returns:
        The boxes, int64 [≤ K, A], and a number of elements that no choice of K boxes can go below.
    """
    up, up_counts = _coarse(shapes, counts, up=True)
    instance = Instance.of(up, up_counts, grid_boxes(up), elements)
    most = min(max_buckets, len(instance.boxes))
    starts = [instance.nearest(merge_boxes(up, up_counts, elements, most))]
    whole = int(instance.nearest(shapes.max(axis=0)[None, :])[0])
    rng = np.random.default_rng(seed)
    for _ in range(_RESTARTS if instance.costs.size <= _CELLS // 8 else _RESTARTS // 4):
        others = rng.choice(len(instance.boxes), most - 1, replace=False)
        starts.append(np.append(others, whole))
    chosen = min((swap_search(instance, start) for start in starts), key=instance.cost)
    boxes = _shrunk(instance.boxes[np.unique(chosen)], shapes, elements)
    best = int((counts * _cheapest(boxes, shapes, elements)[1]).sum())
    down, down_counts = _coarse(shapes, counts, up=False)
    below = instance if down is up else Instance.of(down, down_counts, grid_boxes(down), elements)
    bound = lower_bound(below, most, min(float(best), below.cost(below.nearest(boxes))))
    own = int((counts * elements(shapes)).sum())
    return boxes, min(best, max(own, int(np.ceil(bound * (1 - 1e-9)))))


def _coarse(shapes: Ints, counts: Ints, *, up: bool) -> tuple[Ints, Ints]:
    """Puts shapes on a grid that is small enough to search, rounding all up or all down; as they are, if they are few."""
    axes = shapes.shape[1]
    levels = max(2, int(_CELLS ** (1 / (2 * axes))))
    if len(shapes) <= levels**axes and len(shapes) * _grid_size(shapes) <= _CELLS:
        return shapes, counts
    rounded = np.empty_like(shapes)
    for axis in range(axes):
        sizes, where = np.unique(shapes[:, axis], return_inverse=True)
        held = np.bincount(where.reshape(-1), weights=counts).astype(np.int64)
        last, _ = optimal_boundaries(held, sizes, levels)
        cell = np.searchsorted(sizes[last], shapes[:, axis])
        first = np.concatenate([[0], last[:-1] + 1])
        rounded[:, axis] = sizes[last if up else first][cell]
    distinct, group = np.unique(rounded, axis=0, return_inverse=True)
    return distinct, np.bincount(group.reshape(-1), weights=counts).astype(np.int64)


def _grid_size(shapes: Ints) -> int:
    return int(np.prod([len(np.unique(shapes[:, axis])) for axis in range(shapes.shape[1])], dtype=np.float64))


def _cheapest(boxes: Ints, shapes: Ints, elements: Elements) -> tuple[Ints, Ints]:
    """Returns the cheapest box that holds each shape, and its price, both int64 [I]."""
    prices = elements(boxes)
    order = np.argsort(prices, kind="stable")
    found = order[first_that_holds(shapes, boxes[order])]
    return found, prices[found]


def _shrunk(boxes: Ints, shapes: Ints, elements: Elements) -> Ints:
    """Cuts every box to the shapes that go to it, which costs nothing; boxes that hold none go."""
    while True:
        mine, _ = _cheapest(boxes, shapes, elements)
        tight = np.zeros_like(boxes)
        np.maximum.at(tight, mine, shapes)
        tight = np.unique(tight[np.unique(mine)], axis=0)
        if len(tight) == len(boxes) and (tight == np.unique(boxes, axis=0)).all():
            return tight
        boxes = tight


def grid_boxes(shapes: Ints) -> Ints:
    """Returns the boxes worth considering: joint maxima of shapes, so on the grid of the sizes that occur, int64 [J, A].

    A grid point is one if, on each axis, some shape within the box has the box's size there; any other box can shrink.
    """
    levels = [np.unique(shapes[:, axis]) for axis in range(shapes.shape[1])]
    corners = np.array(list(itertools.product(*levels)), np.int64)
    tight = np.ones(len(corners), bool)
    for axis in range(shapes.shape[1]):
        touched = np.zeros(len(corners), bool)
        for start in range(0, len(corners), 4096):
            block = corners[start : start + 4096]
            inside = (shapes[None, :, :] <= block[:, None, :]).all(axis=2)
            touched[start : start + 4096] = (inside & (shapes[None, :, axis] == block[:, None, axis])).any(axis=1)
        tight &= touched
    return corners[tight]


def swap_search(instance: Instance, start: Ints) -> Ints:
    """Exchanges one chosen box for another as long as that helps (Teitz and Bart, Operations Research 16, 1968).

    All K·J exchanges are priced at once, from the cheapest and second cheapest chosen box of every shape.

    Args:
        instance: the problem.
        start: chosen boxes, positions [K]; together they hold all shapes.

    Returns:
        The improved choice, int64 [K].
    """
    chosen = np.array(start, np.int64)
    weights, costs = instance.weights, instance.costs
    while True:
        mine = costs[:, chosen]
        order = np.argsort(mine, axis=1, kind="stable")[:, :2]
        rows = np.arange(len(mine))
        first = mine[rows, order[:, 0]]
        second = mine[rows, order[:, 1]] if len(chosen) > 1 else np.full(len(mine), np.inf)
        current = float(weights @ first)
        with_new = np.minimum(costs, first[:, None])
        kept = weights @ with_new
        lost = np.minimum(costs, second[:, None]) - with_new
        total = np.empty((len(chosen), len(kept)))
        for k in range(len(chosen)):
            of_k = order[:, 0] == k
            total[k] = kept + weights[of_k] @ lost[of_k]
        k, j = divmod(int(np.argmin(total)), len(kept))
        if not total[k, j] < current * (1 - 1e-12):
            return chosen
        chosen[k] = j


def lower_bound(instance: Instance, max_buckets: int, best: float, *, steps: int = 300) -> float:
    """Returns a cost that no choice of K boxes can go below, by Lagrangian relaxation and subgradient steps.

    Relaxing "each shape goes to one box" with a multiplier a shape leaves K boxes to choose, each by what it would save:

        L(u)  =  Σ u_i + the K smallest of  Σ over i in j of min(0, w_i·p_j − u_i)    ≤  the optimum, for any u

    (Cornuéjols, Fisher and Nemhauser, Management Science 23, 1977). Steps follow Held, Wolfe and Crowder (1974).

    Args:
        instance: the problem.
        max_buckets: K.
        best: the cost of a known choice; steers the step size.
        steps: of the subgradient.
    """
    paid = instance.weights[:, None] * instance.costs
    multiplier = np.partition(paid, min(1, paid.shape[1] - 1), axis=1)[:, : min(2, paid.shape[1])].max(axis=1)
    multiplier = np.where(np.isfinite(multiplier), multiplier, paid.min(axis=1))
    highest, scale, stale = -np.inf, 2.0, 0
    for _ in range(steps):
        saving = np.minimum(paid - multiplier[:, None], 0)
        by_box = saving.sum(axis=0)
        open_boxes = np.argpartition(by_box, min(max_buckets, len(by_box)) - 1)[:max_buckets]
        value = float(multiplier.sum() + by_box[open_boxes].sum())
        if value > highest:
            highest, stale = value, 0
        else:
            stale += 1
            if stale >= 10:
                scale, stale = scale / 2, 0
        slope = 1.0 - (saving[:, open_boxes] < 0).sum(axis=1)
        size = float(slope @ slope)
        if not size or highest >= best * (1 - 1e-9) or scale < 1e-4:
            break
        multiplier += scale * (best - value) / size * slope
    return highest
