"""Pictures, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shapebucket.buckets import BucketPlan
from shapebucket.errors import MissingExtraError
from shapebucket.lengths import LengthTable

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise MissingExtraError("matplotlib", "plots") from error


def plot_lengths(lengths: LengthTable, plan: BucketPlan, *, axis: str | None = None) -> Figure:
    """Draws the histogram of the lengths with the plan's boundaries.

    Args:
        lengths: of the samples.
        plan: the buckets.
        axis: which axis to draw, the first if not given.

    Returns:
        The figure; `figure.savefig("lengths.png")` writes it to a file.
    """
    column = lengths.axes.index(axis) if axis else 0
    values = lengths.values[lengths.present, column]
    bounds = np.unique(plan.sizes[:, column])
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    long_tail = values.max() > 8 * max(1, np.median(values))
    spaced = np.geomspace if long_tail else np.linspace
    bins = np.unique(spaced(max(1, values.min()), values.max() + 1, 80).astype(np.int64)) - 0.5
    axes.hist(values, bins=bins.tolist(), color="#9db4c0")
    axes.set_yscale("log" if long_tail else "linear")
    axes.set_xscale("log" if long_tail else "linear")
    for bound in bounds:
        axes.axvline(bound, color="#c1440e", linewidth=1)
        axes.annotate(
            str(bound),
            (bound, 1),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            color="#c1440e",
            fontsize=8,
        )
    axes.set_xlabel(f"length on axis {lengths.axes[column]!r} (elements)")
    axes.set_ylabel("samples")
    padding = f", padding {plan.planned.padding_fraction:.1%}" if plan.planned else ""
    overlong = int((values > bounds[-1]).sum())
    padding += f"; {overlong:,} beyond the last are cut or dropped" if overlong else ""
    figure.suptitle(f"{len(values):,} samples and the boundaries of {len(plan)} buckets{padding}", fontsize=11)
    return figure


class Throughput(NamedTuple):
    """What a run did over time.

    Attributes:
        seconds_ahead: spent before the first step, compiling ahead.
        steps: (seconds, of which compiling, real tokens) of each step.
    """

    seconds_ahead: float
    steps: Sequence[tuple[float, float, int]]


def plot_throughput(runs: Mapping[str, Throughput]) -> Figure:
    """Draws real tokens a second over time, with the time that went into compiling.

    Args:
        runs: by name.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(8, 1.2 + 1.7 * len(runs)), layout="constrained")
    panels = np.atleast_1d(np.asarray(figure.subplots(len(runs), 1, sharex=True), dtype=object))
    top = max(real / seconds for run in runs.values() for seconds, _, real in run.steps)
    for panel, (name, run) in zip(panels, runs.items(), strict=True):
        ends = np.cumsum([seconds for seconds, _, _ in run.steps])
        starts = ends - [seconds for seconds, _, _ in run.steps]
        rates = [real / seconds for seconds, _, real in run.steps]
        panel.step(np.append(starts, ends[-1]), [*rates, rates[-1]], where="post", color="#253237", linewidth=0.9)
        pauses = [(start, each[1]) for start, each in zip(starts, run.steps, strict=True) if each[1]]
        for start, compiling in [(-run.seconds_ahead, run.seconds_ahead), *pauses]:
            panel.axvspan(start, start + compiling, color="#c1440e", alpha=0.35, linewidth=0)
        share = sum(compiling for _, compiling in pauses) / ends[-1]
        mean = sum(real for _, _, real in run.steps) / ends[-1]
        ahead = f"{run.seconds_ahead:.0f} s before step 0 and " if run.seconds_ahead >= 0.5 else ""
        title = f"{name}: {mean:,.0f} real tokens/s; compiling: {ahead}{share:.0%} of the time after"
        panel.set_title(title, fontsize=9, loc="left")
        panel.set_yscale("log")
        panel.set_ylim(10, 2 * top)
        panel.set_ylabel("real tokens/s")
    panels[-1].set_xlabel("seconds of the run's own steps, step 0 at 0 (red: XLA compiles)")
    return figure
