"""The many-axis planner: K boxes so that every sample pays least for the cheapest box that holds it, and a lower bound.

This is the p-median problem (Hakimi, Operations Research 12, 1964) over a grid of boxes: samples are clients, boxes facilities,
and a sample can only go to a box that holds it.

Letters in shapes: `I` groups of samples of one shape, `J` candidate boxes, `K` chosen boxes, `A` axes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shapebucket.buckets import first_that_holds
from shapebucket.errors import PlanError
from shapebucket.histogram import grouped
from shapebucket.planner.choices import Choice, Choices, Prices
from shapebucket.planner.costs import Floats, Ints
from shapebucket.planner.exact import optimal_boundaries

_CELLS = 4_000_000  # of the cost matrix, 32 MB
_RESTARTS = 16
_SWAPS_ON_THE_WAY = 2


@dataclass(frozen=True, eq=False)
class Instance:
    """One problem.

    Attributes:
        shapes: distinct shapes of samples, int64 [I, A].
        weights: samples of each, float64 [I].
        boxes: candidate boxes, int64 [J, A]; some hold all shapes together.
        prices: what a row of each box costs, float64 [J].
        costs: prices[j] where box j holds shape i, else infinity, float64 [I, J].
        forced: positions of boxes that must be chosen.
    """

    shapes: Ints
    weights: Floats
    boxes: Ints
    prices: Floats
    costs: Floats
    forced: Ints

    @classmethod
    def of(cls, shapes: Ints, weights: npt.ArrayLike, price: Prices, forced: Ints) -> Instance:
        """Makes a problem; the candidates are joint maxima of shapes, and the forced boxes [n, A]."""
        boxes = np.unique(np.concatenate([grid_boxes(shapes), forced]), axis=0)
        prices = price(boxes).astype(np.float64)
        holds = np.ones((len(shapes), len(boxes)), bool)
        for axis in range(shapes.shape[1]):
            holds &= shapes[:, axis, None] <= boxes[None, :, axis]
        costs = np.where(holds, prices[None, :], np.inf)
        must = np.flatnonzero(_among(boxes, forced))
        return cls(shapes, np.asarray(weights, np.float64), boxes, prices, costs, must)

    def cost(self, chosen: Ints) -> float:
        """Returns what the samples pay where these boxes are chosen."""
        return float(self.weights @ self.costs[:, chosen].min(axis=1))

    def nearest(self, boxes: Ints) -> Ints:
        """Returns for each box the cheapest candidate that holds it, [len(boxes)]."""
        holds = (boxes[:, None, :] <= self.boxes[None, :, :]).all(axis=2)
        return np.where(holds, self.prices[None, :], np.inf).argmin(axis=1)

    def with_best_added(self, chosen: Ints) -> Ints:
        """Returns a choice with one more box: the one that saves most."""
        least = self.costs[:, chosen].min(axis=1, initial=np.inf)
        return np.append(chosen, np.argmin(self.weights @ np.minimum(self.costs, least[:, None])))


def solve_boxes(shapes: Ints, counts: Ints, price: Prices, max_buckets: int, *, forced: Ints, seed: int = 0) -> Choices:
    """Chooses at most K boxes that hold all shapes, greedily, by swaps and seeded restarts, and bounds the best possible.

    Where there are too many distinct shapes, the search works on shapes rounded up to a grid of exact one-axis boundaries, and
    the bound on shapes rounded down to one, so that it stays a bound. Both are over the candidates of `Instance`: the bound
    is one for all boxes where no larger box is cheaper.

    The curve is that of the greedy choice (Cornuéjols, Fisher and Nemhauser 1977), each step of which a few swaps improve.

    Args:
        shapes: distinct shapes, int64 [I, A].
        counts: samples of each, int64 [I].
        price: what a row of a box costs, from int64 [n, A] to [n].
        max_buckets: K.
        forced: boxes that must be chosen, int64 [n, A].
        seed: of the restarts.
    """
    instance = Instance.of(*_coarse(shapes, counts, up=True), price, forced)
    most = min(max_buckets, len(instance.boxes))
    path = [_cover(instance)]
    fewest = len(path[0])
    if fewest > most:
        return Choices.impossible(fewest)
    while len(path[-1]) < most:
        path.append(swap_search(instance, instance.with_best_added(path[-1]), swaps=_SWAPS_ON_THE_WAY))
    curve = np.concatenate([np.full(fewest - 1, np.inf), [instance.cost(each) for each in path]])

    def sketch(buckets: int) -> Ints:
        return instance.boxes[path[buckets - fewest]]

    def choose(buckets: int) -> Choice:
        starts = [path[buckets - fewest]]
        rng = np.random.default_rng(seed)
        for _ in range(_RESTARTS if instance.costs.size <= _CELLS // 8 else _RESTARTS // 4):
            others = rng.choice(len(instance.boxes), buckets - len(path[0]), replace=False)
            starts.append(np.append(path[0], others))
        found = [swap_search(instance, start) for start in starts if _hold_all(instance, start)]
        best = min(found, key=instance.cost)
        boxes = _shrunk(instance.boxes[np.unique(best)], shapes, price, forced)
        cost = float(counts @ _cheapest(boxes, shapes, price)[1])
        return Choice(boxes, cost, _bound(instance, boxes, cost, shapes, counts, price, buckets))

    return Choices(curve, sketch, choose, fewest)


def _among(boxes: Ints, others: Ints) -> npt.NDArray[np.bool_]:
    """Returns which boxes [n, A] are among others [m, A]."""
    return (boxes[:, None] == others[None]).all(axis=2).any(axis=1)


def _hold_all(instance: Instance, chosen: Ints) -> bool:
    """Whether each shape has a box among the chosen ones."""
    return bool(len(chosen)) and np.isfinite(instance.cost(chosen))


def _cover(instance: Instance) -> Ints:
    """Returns few boxes that hold all shapes, the forced ones among them: as the budget allows, one, or greedily more."""
    chosen, held = instance.forced, np.isfinite(instance.costs)
    missing = ~held[:, chosen].any(axis=1)
    while missing.any():
        holds = held[missing].sum(axis=0)
        if not holds.any():
            raise PlanError(
                "too many distinct shapes to search them all, and rounded up to fewer, some exceed the token_budget: raise it "
                "a little, or align with multiple_of"
            )
        best = np.flatnonzero(holds == holds.max())
        chosen = np.append(chosen, best[np.argmin(instance.prices[best])])
        missing = ~held[:, chosen].any(axis=1)
    return chosen


def _bound(
    instance: Instance, boxes: Ints, cost: float, shapes: Ints, counts: Ints, price: Prices, buckets: int
) -> float:
    """Returns a cost that no choice of so many candidates can go below."""
    down, down_counts = _coarse(shapes, counts, up=False)
    below = instance if down is shapes else Instance.of(down, down_counts, price, boxes[:0])
    bound = lower_bound(below, buckets, min(cost, below.cost(below.nearest(boxes))))
    own = float(counts @ price(shapes))
    return min(cost, max(own, bound * (1 - 1e-9)))


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
    return grouped(rounded, counts)


def _grid_size(shapes: Ints) -> int:
    return int(np.prod([len(np.unique(shapes[:, axis])) for axis in range(shapes.shape[1])], dtype=np.float64))


def _cheapest(boxes: Ints, shapes: Ints, price: Prices) -> tuple[Ints, npt.NDArray[Any]]:
    """Returns the cheapest box that holds each shape, and its price, both [I]."""
    prices = price(boxes)
    order = np.argsort(prices, kind="stable")
    found = order[first_that_holds(shapes, boxes[order])]
    return found, prices[found]


def _shrunk(boxes: Ints, shapes: Ints, price: Prices, forced: Ints) -> Ints:
    """Cuts every box to the shapes that go to it, where that costs nothing; boxes that hold none go, unless forced."""
    boxes = np.unique(boxes, axis=0)
    while True:
        mine, _ = _cheapest(boxes, shapes, price)
        tight = np.zeros_like(boxes)
        np.maximum.at(tight, mine, shapes)
        used = np.unique(mine)
        stays = (price(tight[used]) > price(boxes[used])) | _among(boxes[used], forced)
        tight = np.where(stays[:, None], boxes[used], tight[used])
        tight = np.unique(np.concatenate([tight, forced]), axis=0)
        if len(tight) == len(boxes) and (tight == boxes).all():
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


def swap_search(instance: Instance, start: Ints, *, swaps: int | None = None) -> Ints:
    """Exchanges one chosen box for another as long as that helps (Teitz and Bart, Operations Research 16, 1968).

    Forced boxes stay. All K·J exchanges are priced at once, from the cheapest and second cheapest chosen box of every shape.

    Args:
        instance: the problem.
        start: chosen boxes, positions [K]; together they hold all shapes, and the forced ones are among them.
        swaps: the most exchanges.

    Returns:
        The improved choice, int64 [K].
    """
    chosen = np.array(start, np.int64)
    weights, costs = instance.weights, instance.costs
    for _ in itertools.count() if swaps is None else range(swaps):
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
        total[np.isin(chosen, instance.forced)] = np.inf
        k, j = divmod(int(np.argmin(total)), len(kept))
        if not total[k, j] < current * (1 - 1e-12):
            break
        chosen[k] = j
    return chosen


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
