"""The three runs that the demo compares, each in a process of its own and taking turns.

A process of its own, so that its resident memory and its compiles are its own; taking turns, so that what else the
machine does meets all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grain
import jax
import numpy as np
import psutil

from shapebucket.buckets import Bucket, BucketPlan
from shapebucket.demo.config import DemoConfig
from shapebucket.demo.corpus import data_source
from shapebucket.demo.model import init_state, make_train_step
from shapebucket.lengths import LengthTable
from shapebucket.loading import BucketedMapDataset
from shapebucket.padding import pad
from shapebucket.step import BATCH, CompiledStep
from shapebucket.watch import CompileCounter

RUNS = ("bucketed", "pad_to_max", "batch_max")
_READ = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)


@dataclass(frozen=True)
class RunInput:
    """What a run is given.

    Attributes:
        name: one of `RUNS`.
        config: the demo's options.
        plan: the buckets, of which the others take the layout.
        lengths: of all samples.
        rows: rows of a batch for `batch_max`.
    """

    name: str
    config: DemoConfig
    plan: BucketPlan
    lengths: LengthTable
    rows: int


@dataclass(frozen=True)
class StepRecord:
    """One step as it was seen.

    Attributes:
        seconds: from asking for the batch to having the loss, compiles included.
        compile_seconds: of that, XLA's.
        real: real tokens of the batch.
        padded: tokens computed on.
        loss: in nats a token.
    """

    seconds: float
    compile_seconds: float
    real: int
    padded: int
    loss: float


@dataclass(frozen=True)
class Turn:
    """What a run reports after its turn: its new steps, and its state since the start."""

    steps: list[StepRecord]
    compiles: int
    compiles_after_start: int
    executables: int
    rss_mb: float


def run_in_turns(given: RunInput, connection: Connection) -> None:
    """Serves a run over a pipe: receives numbers of steps, answers each step with True and each turn with a `Turn`.

    Answers first with the seconds it spent on compiling ahead, when it is ready. Receiving 0 ends it.
    """
    state = init_state(given.config)
    samples = grain.MapDataset.source(data_source(given.config))
    jax.block_until_ready(state)
    with CompileCounter() as compiles:
        started = time.perf_counter()
        step, batches, held = _RUNS[given.name](given, samples, state)
        connection.send(time.perf_counter() - started)
        compiled_ahead = compiles.count
        while (number := connection.recv()) > 0:
            steps: list[StepRecord] = []
            for _ in range(number):
                begun, compiling = time.perf_counter(), compiles.seconds
                batch = next(batches)
                state, loss = step(state, batch)
                value = float(loss)
                mask = batch["s_mask"]
                steps.append(
                    StepRecord(
                        time.perf_counter() - begun, compiles.seconds - compiling, int(mask.sum()), mask.size, value
                    )
                )
                connection.send(True)
            rss = psutil.Process().memory_info().rss / 2**20
            executables = compiles.count if held is None else held()
            connection.send(Turn(steps, compiles.count, compiles.count - compiled_ahead, executables, rss))


Held = Callable[[], int] | None
Prepared = tuple[Callable[..., Any], Iterator[dict[str, Any]], Held]


def _bucketed(given: RunInput, samples: Any, state: Any) -> Prepared:
    """Runs what shapebucket is for."""
    loader = BucketedMapDataset(samples, given.plan, given.lengths, seed=given.config.seed, overlong="truncate")
    step = CompiledStep(make_train_step(given.config), given.plan, donate_argnames="state")
    step.compile(state, BATCH, progress=False)
    return step, iter(loader.repeat().to_iter_dataset(_READ)), lambda: len(step.executables)


def _pad_to_max(given: RunInput, samples: Any, state: Any) -> Prepared:
    """Runs the one-shape way: every sample padded to the longest, as many rows as the budget holds."""
    del state
    longest = given.config.max_length
    rows = given.config.token_budget // longest
    return _plain_jit(given, samples, rows, partial(_pad_to, length=longest))


def _batch_max(given: RunInput, samples: Any, state: Any) -> Prepared:
    """Runs the shapes-vary way: each random batch padded to its own longest."""
    del state
    return _plain_jit(given, samples, given.rows, partial(_pad_to, length=None))


def _plain_jit(given: RunInput, samples: Any, rows: int, batch: Callable[..., Any]) -> Prepared:
    shuffled = samples.seed(given.config.seed).shuffle().repeat()
    batched = shuffled.batch(rows, batch_fn=partial(batch, plan=given.plan, longest=given.config.max_length))
    step = jax.jit(make_train_step(given.config), donate_argnames="state")
    # jit keeps every program it compiled, so what was compiled is what is held
    return step, iter(batched.to_iter_dataset(_READ)), None


def _pad_to(samples: list[Any], *, length: int | None, plan: BucketPlan, longest: int) -> dict[str, Any]:
    """Pads a batch to a length, or to its own longest; samples are cut at the same maximum in all runs."""
    size = length or min(longest, max(len(sample["tokens"]) for sample in samples))
    return pad(samples, Bucket((("s", size),), len(samples)), plan, truncate=True)


_RUNS: dict[str, Callable[[RunInput, Any, Any], Prepared]] = {
    "bucketed": _bucketed,
    "pad_to_max": _pad_to_max,
    "batch_max": _batch_max,
}


def rows_for_budget(lengths: LengthTable, config: DemoConfig) -> int:
    """Returns the most rows whose random batches, padded to their own longest, hold no more than the budget on average."""
    cut = np.sort(np.minimum(lengths.values[:, 0], config.max_length))
    below = np.arange(1, len(cut) + 1) / len(cut)
    rows = 1
    while (rows + 1) * float(cut @ np.diff(below ** (rows + 1), prepend=0)) <= config.token_budget:
        rows += 1
    return rows
