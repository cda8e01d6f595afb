"""The planner: time against the plain quadratic dynamic programme, a histogram against NumPy's, and very many shapes.

How much its plans pad is in `padding.py`.
"""

from __future__ import annotations

import time

import numpy as np
from harness import Result, interleave, main, result

import shapebucket as sb
from shapebucket.planner import optimal_boundaries


def quadratic(counts: np.ndarray, costs: np.ndarray, max_buckets: int) -> float:
    """The same recurrence, all pairs at once: O(K·n²) in numpy."""
    weight = np.concatenate([[0], np.cumsum(counts)])
    best = weight * np.concatenate([costs[:1], costs])
    table = (weight[1:, None] - weight[None, :]) * costs[:, None]
    table = np.where(
        np.arange(len(weight))[None, :] <= np.arange(1, len(weight))[:, None], table, np.iinfo(np.int64).max // 2
    )
    for _ in range(1, max_buckets):
        best = np.concatenate([[0], (best[None, :] + table).min(axis=1)])
    return float(best[-1])


def measure(quick: bool) -> list[Result]:
    rng = np.random.default_rng(0)
    results = []
    rounds = 3 if quick else 7
    n = 1000 if quick else 4000
    counts, costs = rng.integers(0, 50, n), np.arange(1, n + 1)
    assert optimal_boundaries(counts, costs, 16)[1][-1] == quadratic(counts, costs, 16)
    seconds = interleave(
        {
            "ours": lambda: optimal_boundaries(counts, costs, 16),
            "quadratic": lambda: quadratic(counts, costs, 16),
        },
        rounds,
    )
    results.append(result(f"quadratic/ours seconds ratio, n={n}, K=16", seconds["quadratic"] / seconds["ours"]))
    results.append(result(f"ours seconds, n={n}, K=16", seconds["ours"], target=0.05, better="lower"))
    large = 20_000 if quick else 100_000
    counts, costs = rng.integers(0, 50, large), np.arange(1, large + 1)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        optimal_boundaries(counts, costs, 64)
        times.append(time.perf_counter() - started)
    results.append(result(f"ours seconds, n={large}, K=64", times, target=2.0, better="lower"))
    return [*results, *histogram(rng, quick), *many_shapes(rng, quick)]


def histogram(rng: np.random.Generator, quick: bool) -> list[Result]:
    """Counting lengths, of one axis and of two, against `np.bincount` of as many numbers."""
    count = 2_000_000 if quick else 100_000_000
    lengths = rng.integers(1, 2049, (count, 1), np.int32)
    pairs = lengths.reshape(-1, 2)
    seconds = interleave(
        {
            "ours": lambda: sb.LengthHistogram.of(lengths, ("s",)),
            "two axes": lambda: sb.LengthHistogram.of(pairs, ("s", "t")),
            "bincount": lambda: np.bincount(lengths[:, 0]),
            "sum": lambda: lengths.sum(),
        },
        3,
    )
    return [
        result(
            f"histogram of {count:,} lengths: bincount/ours seconds", seconds["bincount"] / seconds["ours"], target=1.0
        ),
        result(f"histogram of {count // 2:,} pairs: bincount/ours seconds", seconds["bincount"] / seconds["two axes"]),
        result(
            f"histogram of {count:,} lengths: ours/sum of them, seconds",
            seconds["ours"] / seconds["sum"],
            better="lower",
        ),
        result(f"histogram of {count:,} lengths: seconds", seconds["ours"], better="lower"),
    ]


def many_shapes(rng: np.random.Generator, quick: bool) -> list[Result]:
    """Two axes with so many distinct shapes that they are coarsened."""
    count = 12_000 if quick else 115_000
    lengths = {"s": rng.integers(1, 1001, count), "t": rng.integers(1, 1001, count)}
    layout = sb.Layout({"x": "s", "y": "t"})
    distinct = len(sb.LengthTable.of(lengths, layout.axes).histogram.counts)
    results = []
    for buckets in (8, 16):
        started = time.perf_counter()
        plan = sb.plan_buckets(lengths, layout, max_buckets=buckets, batch_size=1)
        seconds = time.perf_counter() - started
        title = f"two axes, {distinct:,} distinct shapes, K={buckets}"
        results.append(result(f"{title}: seconds", [seconds], target=60.0, better="lower"))
        results.append(result(f"{title}: cost/bound − 1", [plan.planned.excess], better="lower"))
    return results


if __name__ == "__main__":
    main("planner", measure)
