"""The demo: real text, optimal buckets, a model trained on them, and what a user would do instead beside it."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from shapebucket.buckets import BucketPlan, padding_fraction
from shapebucket.demo.config import DemoConfig
from shapebucket.demo.corpus import data_source, directory
from shapebucket.demo.runs import RUNS, RunInput, StepRecord, Turn, rows_for_budget, run_in_turns
from shapebucket.layout import Layout
from shapebucket.lengths import LengthTable
from shapebucket.measuring import measure
from shapebucket.planner import plan_buckets
from shapebucket.plots import Throughput, plot_plan, plot_throughput
from shapebucket.tables import progress_bars, render

_LABELS = {
    "bucketed": "shapebucket",
    "pad_to_max": "pad to longest",
    "batch_max": "pad to batch's longest",
}


def run_demo(config: DemoConfig) -> dict[str, Any]:
    """Runs the demo, prints its tables, and writes its report and pictures to `config.out`.

    Returns:
        The report, as it is written to report.json.
    """
    started = time.perf_counter()
    config.out.mkdir(parents=True, exist_ok=True)
    source = data_source(config)
    lengths = measure(source, Layout({"tokens": "s"}), path=directory(config) / "lengths.npz")
    plan = plan_buckets(
        lengths,
        max_buckets=config.max_buckets,
        token_budget=config.token_budget,
        multiple_of=8,
        max_size=config.max_length,
    )
    plan.save(config.out / "plan.json")
    print(f"\n{plan}\n", flush=True)
    runs = _take_turns(config, plan, lengths)
    report = _report(config, plan, lengths, runs)
    (config.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    plot_plan(lengths, plan).savefig(config.out / "lengths.png", dpi=150)
    plot_throughput(
        {
            _LABELS[name]: Throughput(run.seconds_ahead, [(s.seconds, s.compile_seconds, s.real) for s in run.steps])
            for name, run in runs.items()
        }
    ).savefig(config.out / "throughput.png", dpi=150)
    print(_table(report))
    print(f"\nwrote report.json, plan.json, lengths.png and throughput.png to {config.out}", end="")
    print(f" in {time.perf_counter() - started:.0f} s")
    return report


class Run(NamedTuple):
    """What was seen of a run.

    Attributes:
        seconds_ahead: spent before the first step: compiling ahead, where the run does.
        turns: its turns.
    """

    seconds_ahead: float
    turns: list[Turn]

    @property
    def steps(self) -> list[StepRecord]:
        """The steps of all turns."""
        return [step for turn in self.turns for step in turn.steps]


def _take_turns(config: DemoConfig, plan: BucketPlan, lengths: LengthTable) -> dict[str, Run]:
    """Runs all of `RUNS`, turn by turn."""
    rounds = 2 if config.quick else 4
    part = {"bucketed": 1.0, "pad_to_max": 0.3, "batch_max": 0.25 if config.quick else 0.8}
    steps = {name: max(1, round(config.steps * part[name] / rounds)) for name in RUNS}
    turns: dict[str, list[Turn]] = {name: [] for name in RUNS}
    ahead: dict[str, float] = {}
    rows = rows_for_budget(lengths, config)
    print(f"training in {rounds} turns of {len(RUNS)} runs: {steps}", file=sys.stderr, flush=True)
    with progress_bars() as bars:
        bar = {name: bars.add_task(_LABELS[name], total=None, note="starts") for name in RUNS}
        with _processes([RunInput(name, config, plan, lengths, rows) for name in RUNS]) as pipes:
            for name, pipe in pipes.items():
                ahead[name] = pipe.recv()
                bars.update(bar[name], total=steps[name] * rounds, note="waits")
            for _ in range(rounds):
                for name, pipe in pipes.items():
                    pipe.send(steps[name])
                    while (answer := pipe.recv()) is True:
                        bars.update(bar[name], advance=1, note="runs")
                    turns[name].append(answer)
                    bars.update(bar[name], note=f"{answer.compiles} compiles")
    return {name: Run(ahead[name], turns[name]) for name in RUNS}


@contextmanager
def _processes(inputs: Sequence[RunInput]) -> Generator[dict[str, Connection]]:
    """Starts a process for each run, one after the other, and ends them."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes: list[Any] = []
    try:
        for given in inputs:
            pipes[given.name], theirs = context.Pipe()
            process = context.Process(target=run_in_turns, args=(given, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
        yield pipes
        for pipe in pipes.values():
            pipe.send(0)
        for process in processes:
            process.join(timeout=30)
    finally:
        for process in processes:
            process.terminate()


def _report(config: DemoConfig, plan: BucketPlan, lengths: LengthTable, seen: Mapping[str, Run]) -> dict[str, Any]:
    assert plan.planned is not None
    runs = [_run(name, each) for name, each in seen.items()]
    rate = {name: np.array([_rate(turn.steps) for turn in each.turns]) for name, each in seen.items()}
    return {
        "plan": plan.to_json() | {"padding_fraction": plan.planned.padding_fraction},
        "runs": runs,
        "real_tokens_per_s_ratio_to": {
            name: {
                "value": float(np.median(rate["bucketed"] / rate[name])),
                "spread": [float((rate["bucketed"] / rate[name]).min()), float((rate["bucketed"] / rate[name]).max())],
                "turns": len(rate[name]),
            }
            for name in RUNS[1:]
        },
        "samples": len(lengths),
        "token_budget": config.token_budget,
        "max_length": config.max_length,
        "environment": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            **{name: version(name) for name in ("jax", "jaxlib", "grain", "numpy", "tensorflow-datasets", "botocore")},
        },
    }


def _run(name: str, run: Run) -> dict[str, Any]:
    steps = run.steps
    real = sum(step.real for step in steps)
    compiling = sum(step.compile_seconds for step in steps)
    seconds = sum(step.seconds for step in steps)
    tenth = max(1, len(steps) // 10)
    last = run.turns[-1]
    return {
        "name": name,
        "padding_fraction": padding_fraction(real, sum(step.padded for step in steps)),
        "padded_tokens_per_step": sum(step.padded for step in steps) / len(steps),
        "real_tokens_per_s": real / seconds,
        "real_tokens_per_s_with_compiling_ahead": real / (seconds + run.seconds_ahead),
        "real_tokens_per_s_without_compiling": real / (seconds - compiling),
        "seconds_ahead": run.seconds_ahead,
        "steps": len(steps),
        "compiles": last.compiles,
        "compiles_after_start": last.compiles_after_start,
        "executables": last.executables,
        "rss_mb": last.rss_mb,
        "first_loss": float(np.mean([step.loss for step in steps[:tenth]])),
        "last_loss": float(np.mean([step.loss for step in steps[-tenth:]])),
    }


def _rate(steps: Sequence[StepRecord]) -> float:
    return sum(step.real for step in steps) / sum(step.seconds for step in steps)


def _table(report: Mapping[str, Any]) -> str:
    facts: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "padding": lambda run: f"{run['padding_fraction']:.1%}",
        "padded tokens a step": lambda run: f"{run['padded_tokens_per_step']:,.0f}",
        "real tokens a second, in the loop": lambda run: f"{run['real_tokens_per_s']:,.0f}",
        "… with compiling before the loop": lambda run: f"{run['real_tokens_per_s_with_compiling_ahead']:,.0f}",
        "… without any compiling": lambda run: f"{run['real_tokens_per_s_without_compiling']:,.0f}",
        "seconds of compiling before the loop": lambda run: f"{run['seconds_ahead']:.1f}",
        "steps": lambda run: str(run["steps"]),
        "compiles, all": lambda run: str(run["compiles"]),
        "compiles after step 0 began": lambda run: str(run["compiles_after_start"]),
        "executables held in memory": lambda run: str(run["executables"]),
        "resident memory, MB": lambda run: f"{run['rss_mb']:,.0f}",
        "loss, first and last steps": lambda run: f"{run['first_loss']:.2f} → {run['last_loss']:.2f}",
    }
    rows = [[name, *(cell(run) for run in report["runs"])] for name, cell in facts.items()]
    header = ["", *(_LABELS[run["name"]] for run in report["runs"])]
    ratios = "\n".join(
        f"real tokens a second: {each['value']:.1f} × {_LABELS[name]} (median of {each['turns']} turns, "
        f"{each['spread'][0]:.1f} to {each['spread'][1]:.1f})"
        for name, each in report["real_tokens_per_s_ratio_to"].items()
    )
    planned = report["plan"]["padding_fraction"]
    return render("", header, rows, caption=f"the plan promised {planned:.1%} padding\n{ratios}", text=1)
