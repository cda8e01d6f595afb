"""The one-axis planner: time against the plain quadratic dynamic programme, and padding against common rules."""

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


def padding(lengths: np.ndarray, bounds: np.ndarray) -> float:
    """The padding fraction of inclusive boundaries."""
    held = bounds[np.searchsorted(bounds, lengths)]
    return float(1 - lengths.sum() / held.sum())


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
    lengths = np.minimum(rng.lognormal(4, 1, 100_000).astype(int) + 1, 2048)
    plan = sb.plan_buckets(lengths, max_buckets=8, batch_size=1)
    quantiles = np.unique(np.quantile(lengths, np.arange(1, 9) / 8, method="inverted_cdf"))
    powers = 2 ** np.arange(4, 12)
    for name, bounds in (("exact", plan.sizes[:, 0]), ("equal count", quantiles), ("powers of two", powers)):
        results.append(
            result(f"padding fraction of 8 buckets, {name}, lognormal", [padding(lengths, bounds)], better="lower")
        )
    return results


if __name__ == "__main__":
    main("planner", measure)
