"""Pictures, drawn by matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shapebucket.buckets import BucketPlan, Lengths, histogram_of
from shapebucket.errors import MissingExtraError, PlanError

try:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke
except ModuleNotFoundError as error:
    raise MissingExtraError("matplotlib", "plots") from error

_RED = "#c1440e"
_HALO = [withStroke(linewidth=2, foreground="white")]  # readable on dark and across lines


def plot_plan(lengths: Lengths, plan: BucketPlan) -> Figure:
    """Draws lengths and the buckets of a plan for them.

    With one axis, a histogram with the boundaries; with two, a heat map of the samples with the boxes drawn, the smallest on
    top. Scales are logarithmic where the tail needs it; lengths of 0 are drawn as 1.

    Args:
        lengths: of the samples: what `plan_buckets` takes.
        plan: the buckets, of one or two axes.

    Returns:
        The figure; `figure.savefig("plan.png")` writes it to a file.

    Raises:
        PlanError: for a plan of more axes.
        LengthsError: for lengths of other axes than the plan's.
    """
    axis_names = list(plan.layout.axes)
    if len(axis_names) > 2:
        raise PlanError(f"a picture is of one or two axes, but the plan has {axis_names}")
    given = histogram_of(lengths, axis_names)
    values, weights, count = np.maximum(given.shapes, 1), given.counts, len(axis_names)  # a scale may have no 0
    figure = Figure(figsize=(8, 4) if count == 1 else (8, 6), layout="constrained")
    axes = figure.subplots()
    if count == 1:
        _draw_histogram(axes, values[:, 0], weights, np.unique(plan.sizes))
    else:
        figure.colorbar(_draw_boxes(axes, values, weights, plan.sizes), ax=axes, label="samples")
        axes.set_ylabel(f"length on axis {axis_names[1]!r} (elements)")
    axes.set_xlabel(f"length on axis {axis_names[0]!r} (elements)")
    report = plan.report(given)
    title = f"{len(given):,} samples and the boundaries of {len(plan)} buckets, padding {report.padding_fraction:.1%}"
    figure.suptitle(title + (f"; {report.overlong:,} are cut or dropped" if report.overlong else ""), fontsize=11)
    return figure


def plot_curve(plan: BucketPlan, others: Mapping[str, BucketPlan] | None = None) -> Figure:
    """Draws the padding of the best plan found against the number of buckets, and other plans as points.

    Args:
        plan: made by `plan_buckets` for elements, so that it knows the curve.
        others: plans of the same lengths, by name: those of `plan_by_rule`, say.

    Returns:
        The figure.

    Raises:
        PlanError: for a plan that has no curve, or others that were not made from lengths.
    """
    curve = plan.curve
    if not curve or any(other.planned is None for other in (others or {}).values()):
        raise PlanError("a curve is of plans that were made from lengths, the first by plan_buckets for elements")
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(curve) + 1), curve, ".-", color=_RED, label="plan_buckets")
    for marker, (name, other) in zip(itertools.cycle("osD^v<>*PXh"), (others or {}).items(), strict=False):
        assert other.planned is not None
        axes.plot(len(other), other.planned.padding_fraction, marker, label=name, alpha=0.7)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("buckets")
    axes.set_ylabel("padding fraction")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _edges(values: npt.NDArray[Any], weights: npt.NDArray[Any], bins: int) -> tuple[npt.NDArray[np.float64], str]:
    """Returns edges of bins between whole numbers, and the scale that suits: "log" where the tail is long."""
    order, longest = np.argsort(values), int(values.max())
    running = np.cumsum(weights[order])
    median = int(values[order[np.searchsorted(running, running[-1] / 2)]])
    scale = "log" if longest > 8 * median else "linear"
    spaced = np.geomspace if scale == "log" else np.linspace
    edges = np.unique(spaced(max(1, values.min()), longest + 1, bins).astype(np.int64))
    return edges.astype(np.float64) - 0.5, scale


def _draw_histogram(axes: Axes, values: npt.NDArray[Any], weights: npt.NDArray[Any], bounds: npt.NDArray[Any]) -> None:
    edges, scale = _edges(values, weights, 80)
    axes.hist(values, bins=edges.tolist(), weights=weights, color="#9db4c0")
    axes.set_xscale(scale)
    axes.set_yscale(scale)
    axes.set_ylabel("samples")
    for bound in bounds:
        axes.axvline(bound, color=_RED, linewidth=1)
        axes.annotate(
            str(bound), (bound, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom", color=_RED, fontsize=8
        )


def _draw_boxes(axes: Axes, values: npt.NDArray[Any], weights: npt.NDArray[Any], sizes: npt.NDArray[np.int64]) -> Any:
    """Draws the heat map and the boxes, and returns the map."""
    both = np.concatenate([values, sizes])
    held = np.concatenate([weights, np.zeros(len(sizes), np.int64)])
    (x_edges, x_scale), (y_edges, y_scale) = (_edges(both[:, i], held, 60) for i in range(2))
    bins = [x_edges.tolist(), y_edges.tolist()]
    *_, image = axes.hist2d(values[:, 0], values[:, 1], bins=bins, weights=weights, norm=LogNorm(), cmap="Blues")
    axes.set_xscale(x_scale)
    axes.set_yscale(y_scale)
    left, bottom = x_edges[0], y_edges[0]
    for x, y in sizes.tolist():
        axes.add_patch(Rectangle((left, bottom), x + 0.5 - left, y + 0.5 - bottom, fill=False, edgecolor=_RED))
        axes.annotate(
            f"{x} × {y}",
            (x, y),
            (4, -2),
            textcoords="offset points",
            va="top",
            color=_RED,
            fontsize=7,
            path_effects=_HALO,
        )
    return image


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
            panel.axvspan(start, start + compiling, color=_RED, alpha=0.35, linewidth=0)
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
