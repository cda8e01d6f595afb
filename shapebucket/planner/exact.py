"""The exact one-axis planner: the boundaries that compute on the fewest elements.

Optimal one-dimensional partition by dynamic programming is old: Wang and Song, "Ckmeans.1d.dp" (R Journal, 2011);
Grønlund et al., "Fast exact k-means, k-medians and Bregman divergence clustering in 1D" (arXiv:1701.07204).

Letters in shapes: `n` candidate boundaries, `K` buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Optimum:
    """The optimal choices for every number of buckets up to K.

    Attributes:
        curve: the least cost with at most 1, 2, … K buckets, [≤ K], infinity for fewer than the forced ones need.
        chosen: from a number of buckets to the positions of the chosen candidates, ascending, int64 [≤ that number].
    """

    curve: npt.NDArray[Any]
    chosen: Callable[[int], npt.NDArray[np.int64]]


def optimal_boundaries(
    counts: npt.ArrayLike, costs: npt.ArrayLike, max_buckets: int, *, forced: Sequence[int] = ()
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Chooses at most K of n candidate boundaries so that the samples cost least: see `solve_boundaries`.

    Returns:
        The positions of the chosen candidates, ascending, int64 [≤ K]; and the curve of `Optimum`.
    """
    optimum = solve_boundaries(counts, costs, max_buckets, forced=forced)
    return optimum.chosen(len(optimum.curve)), optimum.curve


def solve_boundaries(
    counts: npt.ArrayLike, costs: npt.ArrayLike, max_buckets: int, *, forced: Sequence[int] = ()
) -> Optimum:
    """Chooses at most K of n candidate boundaries so that the samples cost least; each goes to the cheapest that holds it.

    Candidate j holds its own samples and those of all candidates before it, at `costs[j]` a sample. Where a larger candidate is
    cheaper, the smaller one is never worth having, so the costs are first replaced by their running minimum from the right,
    p. With C the running sum of the counts and C[0] = 0, the least cost of the first j candidates is

        D[1, j]  =  C[j] · p[j]
        D[k, j]  =  min over i ≤ j of  D[k − 1, i] + (C[j] − C[i]) · p[j]

    where i = j leaves bucket k unused. Since p does not fall, the best i does not fall as j grows, so each row is found by
    divide and conquer in O(n log n), all subproblems of a depth at once.

    Args:
        counts: samples of each candidate, integers [n], n ≥ 1.
        costs: what a row of each candidate costs, [n], integers (exact) or floats; infinity where it cannot be used.
        max_buckets: K, at least 1; with forced candidates at least their number, and one more if the last is not forced.
        forced: positions of candidates that are chosen whatever they cost.

    Returns:
        The optimum for each number of buckets up to K.
    """
    weight, price = np.asarray(counts, np.int64), np.asarray(costs)
    lowest = np.minimum.accumulate(price[::-1])[::-1]
    records = price == lowest
    must = sorted({int(position) for position in forced})
    if not records[must].all():
        return _with_dear_forced(weight, price, max_buckets, must, records)
    first_record = np.minimum.accumulate(np.where(records, np.arange(len(price)), len(price))[::-1])[::-1]
    ends = must if must and must[-1] == len(price) - 1 else [*must, len(price) - 1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    parts = [
        _Partition(weight[start : end + 1], lowest[start : end + 1], max_buckets)
        for start, end in zip(starts, ends, strict=True)
    ]
    curve, splits = parts[0].curve, list[npt.NDArray[np.int64]]()
    for part in parts[1:]:
        curve, split = _combined(curve, part.curve, max_buckets)
        splits.append(split)

    def chosen(buckets: int) -> npt.NDArray[np.int64]:
        left = buckets
        ends_of_parts: list[npt.NDArray[np.int64]] = []
        for start, part, split in zip(starts[:0:-1], parts[:0:-1], splits[::-1], strict=True):
            own = left - int(split[left - 1])
            ends_of_parts.append(start + part.ends(own))
            left -= own
        ends_of_parts.append(parts[0].ends(left))
        return np.unique(first_record[np.concatenate(ends_of_parts)])

    return Optimum(curve, chosen)


def _combined(
    one: npt.NDArray[Any], other: npt.NDArray[Any], most: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Splits 1, 2, … buckets between two independent parts: the least costs, and how many go to the first part."""
    count = min(most, len(one) + len(other))
    least = np.full(count, np.inf)
    split = np.ones(count, np.int64)
    for total in range(2, count + 1):
        first = np.arange(max(1, total - len(other)), min(len(one), total - 1) + 1)
        sums = one[first - 1] + other[total - first - 1]
        split[total - 1] = first[np.argmin(sums)]
        least[total - 1] = sums.min()
    return least, split


class _Partition:
    """The dynamic programme over candidates whose costs do not fall."""

    def __init__(self, counts: npt.NDArray[np.int64], costs: npt.NDArray[Any], max_buckets: int) -> None:
        weight = np.concatenate([[0], np.cumsum(counts)])
        price = np.concatenate([costs[:1], costs])
        self._n = len(counts)
        best = weight * price
        best[0] = 0
        self._choices: list[npt.NDArray[np.int64]] = []
        curve = [best[-1]]
        for _ in range(1, min(max_buckets, self._n)):
            best, choice = _next_row(best, weight, price)
            self._choices.append(choice)
            curve.append(best[-1])
        self.curve = np.array(curve)

    def ends(self, buckets: int) -> npt.NDArray[np.int64]:
        """Returns the chosen candidates with at most so many buckets, ascending; the last one is always there."""
        chosen = [self._n - 1]
        end = self._n
        for choice in reversed(self._choices[: buckets - 1]):
            if 0 < choice[end] < end:
                end = int(choice[end])
                chosen.append(end - 1)
            elif not choice[end]:
                break
        return np.array(chosen[::-1], np.int64)


def _with_dear_forced(
    counts: npt.NDArray[np.int64],
    costs: npt.NDArray[Any],
    max_buckets: int,
    forced: list[int],
    records: npt.NDArray[np.bool_],
) -> Optimum:
    """Solves the case that a forced candidate is dearer than a larger one: O(K·n²), over the candidates worth having.

    A chosen candidate is active if no larger chosen one is as cheap; samples go to the next active one. From active i to the
    next active j there is no forced candidate between that is cheaper than j. Forced candidates take no choice. Records are the
    candidates than which no larger one is cheaper.
    """
    worth = np.flatnonzero(records | np.isin(np.arange(len(costs)), forced))
    group = np.searchsorted(worth, np.arange(len(costs)))
    weight = np.concatenate([[0], np.cumsum(np.bincount(group, weights=counts, minlength=len(worth)))])
    price = costs[worth].astype(np.float64)
    is_forced = np.isin(worth, forced)
    free = max_buckets - len(forced)
    n = len(worth)
    best = np.full((free + 1, n + 1), np.inf)
    best[:, 0] = 0
    came = np.zeros((free + 1, n + 1), np.int64)
    for j in range(1, n + 1):
        cheaper = np.flatnonzero(is_forced[: j - 1] & (price[: j - 1] < price[j - 1]))
        low = int(cheaper[-1]) + 1 if len(cheaper) else 0
        steps = best[:, low:j] + (weight[j] - weight[low:j]) * price[j - 1]
        came[:, j] = low + np.argmin(steps, axis=1)
        least = steps.min(axis=1)
        best[:, j] = least if is_forced[j - 1] else np.concatenate([[np.inf], least[:-1]])
        if not is_forced[j - 1]:
            came[1:, j] = came[:-1, j].copy()
    last = int(np.flatnonzero(np.diff(weight) > 0)[-1]) + 1 if weight[-1] else 1
    final = best[:, last:].min(axis=1)

    def chosen(buckets: int) -> npt.NDArray[np.int64]:
        left = int(np.argmin(final[: buckets - len(forced) + 1]))
        j = last + int(np.argmin(best[left, last:]))
        active: list[int] = []
        while j:
            active.append(j - 1)
            previous = int(came[left, j])
            left -= not is_forced[j - 1]
            j = previous
        return np.union1d(worth[active], forced).astype(np.int64)

    return Optimum(np.concatenate([np.full(len(forced) - 1, np.inf), np.minimum.accumulate(final)]), chosen)


def _next_row(
    previous: npt.NDArray[Any], weight: npt.NDArray[np.int64], price: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Returns D[k] and the best i of each j, from D[k − 1], all [n + 1]."""
    n = len(weight) - 1
    row = np.zeros_like(previous)
    choice = np.zeros(n + 1, np.int64)
    stride = 1 << max(n.bit_length() - 1, 0)
    while stride:
        j = np.arange(stride, n + 1, 2 * stride)
        low = choice[j - stride]
        above = np.minimum(j + stride, n + 1)
        high = np.where(above <= n, choice[np.minimum(above, n)], n)
        high = np.minimum(high, j)
        widths = high - low + 1
        first = np.cumsum(widths) - widths
        i = np.arange(widths.sum()) + np.repeat(low - first, widths)
        values = previous[i] - weight[i] * np.repeat(price[j], widths)
        least = np.minimum.reduceat(values, first)
        hits = np.flatnonzero(values == np.repeat(least, widths))
        owner = np.searchsorted(first, hits, side="right") - 1
        choice[j[owner[::-1]]] = i[hits[::-1]]  # of equal ones the first stays: it is written last
        row[j] = least + weight[j] * price[j]
        stride >>= 1
    return row, choice
