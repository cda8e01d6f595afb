"""Resident memory and memory maps of a process that trains: in buckets, in a new shape each step, and with eviction.

Each runs in a process of its own, a small multi-layer perceptron with Adam.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import psutil
from harness import Result, in_child, main, result
from matplotlib.figure import Figure

import shapebucket as sb

WIDTH = 64
LAYOUT = sb.Layout({"tokens": "int32[s]"})
LONGEST = 256
POINTS = 200


class Point(NamedTuple):
    """What the process held after so many steps."""

    steps: int
    seconds: float
    rss_mb: float
    maps: int


class Curve(NamedTuple):
    """A run: its points, and the programs it compiled after the first step."""

    points: list[Point]
    compiles: int


def init_state() -> dict:
    keys = jax.random.split(jax.random.key(0), 3)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) * WIDTH**-0.5 for key in keys]
    zeros = [jnp.zeros_like(each) for each in params]
    return {"params": params, "mean": zeros, "square": [jnp.zeros_like(each) for each in params]}


def train_step(state: dict, batch: dict) -> tuple[dict, jax.Array]:
    """One step of Adam on a masked regression."""

    def loss_of(params: list) -> jax.Array:
        x = jnp.sin(batch["tokens"][..., None] * jnp.arange(WIDTH))
        for weights in params:
            x = jax.nn.gelu(x @ weights)
        return (batch["s_mask"][..., None] * (x - 1) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    mean = [0.9 * m + 0.1 * g for m, g in zip(state["mean"], grads, strict=True)]
    square = [0.99 * s + 0.01 * g * g for s, g in zip(state["square"], grads, strict=True)]
    params = [p - 1e-3 * m / (jnp.sqrt(s) + 1e-6) for p, m, s in zip(state["params"], mean, square, strict=True)]
    return {"params": params, "mean": mean, "square": square}, loss


def watch(steps: Iterator[object], limit: float, every: int) -> Curve:
    """Takes the steps, at most so many seconds; the first is not counted."""
    process = psutil.Process()
    points: list[Point] = []
    next(steps)
    with sb.CompileCounter() as compiles:
        started = time.perf_counter()
        for number, _ in enumerate(steps, 1):
            seconds = time.perf_counter() - started
            if number % every == 0 or number == 1:
                maps = Path("/proc/self/maps")
                count = len(maps.read_text().splitlines()) if maps.exists() else 0
                points.append(Point(number, seconds, process.memory_info().rss / 2**20, count))
            if seconds > limit:
                break
    return Curve(points, compiles.count)


def shapes(count: int, rows: int = 4) -> Iterator[dict]:
    """Batches of a new length each."""
    for size in range(8, 8 + count):
        bucket = sb.Bucket((("s", size),), rows)
        yield sb.pad([], bucket, sb.BucketPlan(LAYOUT, [bucket]))


def in_buckets(count: int, limit: float) -> Curve:
    """Random lengths, planned and loaded as a user does it."""
    rng = np.random.default_rng(0)
    samples = [{"tokens": rng.integers(0, 100, size, dtype=np.int32)} for size in rng.integers(1, LONGEST + 1, 4096)]
    lengths = sb.measure(samples, LAYOUT)
    plan = sb.plan_buckets(lengths, max_buckets=8, batch_size=4)
    step = sb.CompiledStep(train_step, plan, donate_argnames="state")
    state = init_state()
    step.compile(state, sb.BATCH, progress=False)
    loader = sb.BucketedMapDataset(grain.MapDataset.source(samples), plan, lengths, seed=0).repeat()

    def steps() -> Iterator[object]:
        nonlocal state
        for number in range(count + 1):
            state, loss = step(state, loader[number])
            if number % 1000 == 0:
                jax.block_until_ready(loss)
            yield

    return watch(steps(), limit, max(1, count // POINTS))


def trained(run: Callable[..., tuple[dict, jax.Array]], state: dict, batches: Iterator[dict]) -> Iterator[object]:
    """Takes a step a batch, and waits for it."""
    for batch in batches:
        state, loss = run(state, batch)
        jax.block_until_ready(loss)
        yield


def in_new_shapes(count: int, limit: float) -> Curve:
    """Plain `jit`, a length that it has not seen at each step."""
    jitted = jax.jit(train_step, donate_argnames="state")
    return watch(trained(jitted, init_state(), shapes(count + 1)), limit, 1)


def with_eviction(count: int, limit: float) -> Curve:
    """A new length at each step, at most 8 executables."""
    logging.getLogger("shapebucket").setLevel(logging.ERROR)  # a line for each compile on a miss
    first = next(shapes(1))
    bucket = sb.Bucket((("s", first["tokens"].shape[1]),), len(first["tokens"]))
    step = sb.CompiledStep(
        train_step, sb.BucketPlan(LAYOUT, [bucket]), donate_argnames="state", on_miss="evict", max_executables=8
    )
    state = init_state()
    step.compile(state, sb.BATCH, progress=False)

    return watch(trained(step, state, shapes(count + 8)), limit, 1)


def slope(points: list[Point], field: str) -> float:
    """Growth a step, by least squares over the second half: what is left when a process has warmed up."""
    late = points[len(points) // 2 :]
    return float(np.polyfit([each.steps for each in late], [getattr(each, field) for each in late], 1)[0])


class Memory:
    """The three curves."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}

    def measure(self, quick: bool) -> list[Result]:
        """Runs the three, one after another, and sums them up."""
        limit = 20.0 if quick else 120.0
        steps = 3_000 if quick else 100_000
        self.curves = {
            "8 buckets": in_child(in_buckets, steps, 10 * limit),
            "plain jit, a new shape each step": in_child(in_new_shapes, 20 if quick else 5_000, limit),
            "on_miss='evict', a new shape each step": in_child(with_eviction, 20 if quick else 200, 10 * limit),
        }
        buckets, jit, evict = self.curves.values()

        def one(metric: str, value: float, target: float | None = None) -> Result:
            return result(metric, [value], target=target, better="lower")

        last = buckets.points[-1]
        return [
            one(f"8 buckets, {last.steps:,} steps: compiles after step 0", buckets.compiles, 0),
            one(
                "8 buckets: growth of resident memory in the second half, MiB",
                slope(buckets.points, "rss_mb") * last.steps / 2,
            ),
            one("8 buckets: memory maps, last less first", last.maps - buckets.points[0].maps),
            one(f"plain jit, {jit.points[-1].steps} shapes: MiB a shape", slope(jit.points, "rss_mb")),
            one("plain jit: memory maps a shape", slope(jit.points, "maps")),
            one(f"evict, {evict.points[-1].steps} shapes: MiB a shape", slope(evict.points, "rss_mb")),
            one("evict: memory maps a shape", slope(evict.points, "maps")),
        ]

    def draw(self, path: Path) -> None:
        """Draws resident memory and maps against steps."""
        figure = Figure(figsize=(11, 5), layout="constrained")
        panels = figure.subplots(2, len(self.curves), sharex="col")
        for column, (name, curve) in enumerate(self.curves.items()):
            numbers = [each.steps for each in curve.points]
            for row, (field, label) in enumerate((("rss_mb", "resident MiB"), ("maps", "memory maps"))):
                panel = panels[row, column]
                values = [getattr(each, field) for each in curve.points]
                panel.plot(numbers, values, color="#253237")
                panel.set_ylim(0, 1.15 * max(values))
                panel.set_ylabel(label)
            panels[0, column].set_title(f"{name}\n{curve.compiles} compiles after step 0", fontsize=9)
            panels[1, column].set_xlabel("steps")
        figure.savefig(path)


if __name__ == "__main__":
    memory = Memory()
    main("memory", memory.measure, memory.draw)
