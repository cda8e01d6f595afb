"""What every benchmark shares: interleaving, ratios with their spread, the table and the JSON file."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import numpy as np

from shapebucket.tables import render

T = TypeVar("T")
PACKAGES = ("shapebucket", "numpy", "jax", "jaxlib", "grain", "flax")


@dataclass(frozen=True)
class Result:
    """One figure.

    Attributes:
        metric: what was measured, and against what.
        value: the median.
        spread: the smallest and the largest of the rounds.
        target: what it should be, if anything.
        better: whether "higher" or "lower" is better.
    """

    metric: str
    value: float
    spread: tuple[float, float]
    target: float | None = None
    better: str = "higher"

    @property
    def met(self) -> str:
        """Whether the target is met, in a word."""
        if self.target is None:
            return ""
        return "yes" if (self.value >= self.target) == (self.better == "higher") or self.value == self.target else "NO"


def interleave(competitors: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, np.ndarray]:
    """Times each competitor once a round, after one untimed round; returns seconds [rounds] by name."""
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    for number in range(rounds + 1):
        for name, run in competitors.items():
            started = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {name: np.array(each) for name, each in seconds.items()}


def in_child(run: Callable[..., T], *args: object) -> T:
    """Runs a function of a module in a fresh process, and returns what it does."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_serve, args=(there, run, *args))
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"the process of {run.__name__} ended with {child.exitcode}") from None
    finally:
        child.join()


def _serve(connection: Connection, run: Callable[..., object], *args: object) -> None:
    connection.send(run(*args))


def result(
    metric: str, values: Sequence[float] | np.ndarray, *, target: float | None = None, better: str = "higher"
) -> Result:
    """Sums the rounds of one metric up."""
    return Result(metric, float(np.median(values)), (float(np.min(values)), float(np.max(values))), target, better)


def main(name: str, measure: Callable[[bool], list[Result]], draw: Callable[[Path], None] | None = None) -> None:
    """Runs a benchmark from the command line: `--quick`, `--json FILE`, and `--plot FILE` where it draws; prints a table."""
    parser = argparse.ArgumentParser(name)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    if draw is not None:
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves there")
    options = parser.parse_args()
    results = measure(options.quick)
    environment = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "quick": options.quick,
        **{package: _version(package) for package in PACKAGES},
    }
    if draw is not None and options.plot:
        draw(options.plot)
    if options.json:
        content = {"environment": environment, "results": [asdict(each) for each in results]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    rows = [
        [
            each.metric,
            f"{each.value:.3g}",
            f"{each.spread[0]:.3g} to {each.spread[1]:.3g}",
            "" if each.target is None else f"{'≥' if each.better == 'higher' else '≤'} {each.target:g}",
            each.met,
        ]
        for each in results
    ]
    facts = ", ".join(f"{key} {value}" for key, value in environment.items())
    print(render(name, ["metric", "value", "spread", "target", "met"], rows, caption=facts, text=1))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
