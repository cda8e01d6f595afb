import numpy as np
import pytest
from matplotlib.patches import Rectangle

import shapebucket as sb
from shapebucket.plots import Throughput, plot_curve, plot_plan, plot_throughput


def test_one_axis_is_a_histogram_with_every_boundary():
    lengths = sb.LengthTable.of(np.random.default_rng(0).lognormal(3, 1, 2000).astype(int) + 1, ["s"])
    plan = sb.plan_buckets(lengths, max_buckets=5, batch_size=1, max_size=200)
    figure = plot_plan(lengths, plan)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == [str(bucket.sizes["s"]) for bucket in plan.buckets]
    assert sum(patch.get_height() for patch in axes.patches) == 2000
    assert axes.get_xscale() == "log"
    assert f"{plan.planned.overlong} are cut or dropped" in figure.get_suptitle()


def test_two_axes_are_a_heat_map_with_every_box():
    rng = np.random.default_rng(0)
    lengths = sb.LengthTable.of({"s": rng.integers(1, 50, 2000), "t": rng.integers(1, 50, 2000)}, ["s", "t"])
    plan = sb.plan_buckets(lengths, sb.Layout({"src": "s", "tgt": "t"}), max_buckets=4, batch_size=1, multiple_of=4)
    axes = plot_plan(lengths, plan).axes[0]
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert len(boxes) == 4
    assert {text.get_text() for text in axes.texts} == {f"{s} × {t}" for s, t in plan.sizes.tolist()}
    assert axes.get_xscale() == "linear"


def test_more_axes_are_refused():
    lengths = sb.LengthTable.of({"a": [1, 2], "b": [1, 2], "c": [2, 1]}, ["a", "b", "c"])
    plan = sb.plan_buckets(lengths, batch_size=1)
    with pytest.raises(sb.PlanError, match="a picture is of one or two axes"):
        plot_plan(lengths, plan)


def test_a_curve_with_rules_as_points():
    lengths = np.random.default_rng(0).integers(1, 500, 1000)
    plan = sb.plan_buckets(lengths, max_buckets=6, batch_size=1)
    others = {"powers_of_two": sb.plan_by_rule("powers_of_two", lengths, batch_size=1)}
    (axes,) = plot_curve(plan, others).axes
    curve, point = axes.lines
    assert curve.get_ydata().tolist() == list(plan.curve)
    assert point.get_xdata().tolist() == [len(others["powers_of_two"])]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["plan_buckets", "powers_of_two"]
    for wrong in ((others["powers_of_two"], None), (plan, {"by hand": sb.BucketPlan(plan.layout, plan.buckets)})):
        with pytest.raises(sb.PlanError, match="a curve is of plans that were made from lengths"):
            plot_curve(*wrong)


def test_throughput_has_a_panel_a_run_with_its_compiles(tmp_path):
    runs = {"ours": Throughput(2.0, [(1.0, 0.0, 100)] * 3), "theirs": Throughput(0.0, [(2.0, 1.0, 50)] * 2)}
    figure = plot_throughput(runs)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        "ours: 100 real tokens/s; compiling: 2 s before step 0 and 0% of the time after",
        "theirs: 25 real tokens/s; compiling: 50% of the time after",
    ]
    figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
