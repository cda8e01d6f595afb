"""The exact one-axis planner: the boundaries that compute on the fewest elements.

Optimal one-dimensional partition by dynamic programming is old: Wang and Song, "Ckmeans.1d.dp" (R Journal, 2011);
Grønlund et al., "Fast exact k-means, k-medians and Bregman divergence clustering in 1D" (arXiv:1701.07204).

Letters in shapes: `n` candidate boundaries, `K` buckets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def optimal_boundaries(
    counts: npt.ArrayLike, costs: npt.ArrayLike, max_buckets: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Chooses at most K of n candidate boundaries so that the samples cost least.

    Candidate j holds `counts[j]` samples that need it or more, and a sample costs `costs[j]` in the bucket that ends
    there. With C the running sum of the counts and C[0] = 0, the least cost of the first j candidates is

        D[1, j]  =  C[j] · costs[j]
        D[k, j]  =  min over i ≤ j of  D[k − 1, i] + (C[j] − C[i]) · costs[j]

    where i = j leaves bucket k unused. Since the costs do not fall, the best i does not fall as j grows, so each row is
    found by divide and conquer in O(n log n), all subproblems of a depth at once.

    Args:
        counts: samples of each candidate, integers [n], n ≥ 1.
        costs: what a row of each candidate costs, [n], non-decreasing, integers or floats; integers are exact.
        max_buckets: K, at least 1.

    Returns:
        The positions of the chosen candidates, ascending, int64 [≤ K], the last one n − 1; and the least cost with at most
        1, 2, … K buckets, [min(K, n)].
    """
    weight = np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])
    price = np.asarray(costs)
    price = np.concatenate([price[:1], price])
    n = len(weight) - 1
    best = weight * price
    choices: list[npt.NDArray[np.int64]] = []
    curve = [best[-1]]
    for _ in range(1, min(max_buckets, n)):
        best, choice = _next_row(best, weight, price)
        choices.append(choice)
        curve.append(best[-1])
    chosen: list[int] = []
    end = n
    for choice in reversed(choices):
        if choice[end] < end:
            chosen.append(end - 1)
            end = int(choice[end])
    if end:
        chosen.append(end - 1)
    return np.array(chosen[::-1], np.int64), np.array(curve)


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
