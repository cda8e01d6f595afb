import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shapebucket as sb
from shapebucket import histogram as module


def plainly(values: np.ndarray) -> tuple[list, list]:
    """The distinct shapes and their counts, by NumPy."""
    shapes, counts = np.unique(values[values[:, 0] >= 0], axis=0, return_counts=True)
    return shapes.tolist(), counts.tolist()


@settings(max_examples=200)
@given(st.data())
def test_shapes_are_counted_whatever_their_range(data):
    """Dense and sparse, in parts, absent elements left out and counted."""
    axes = data.draw(st.integers(1, 3))
    longest = data.draw(st.sampled_from([3, 40, 2**31 - 1]))
    row = st.one_of(st.just([-1] * axes), st.lists(st.integers(0, longest), min_size=axes, max_size=axes))
    values = np.array(data.draw(st.lists(row, max_size=40)), np.int32).reshape(-1, axes)
    names = "abc"[:axes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", 7)
        found = sb.LengthHistogram.of(values, names)
    assert (found.shapes.tolist(), found.counts.tolist()) == plainly(values)
    assert found.absent == (values[:, 0] < 0).sum()
    assert len(found) + found.absent == len(values)
    half = len(values) // 2
    parts = [sb.LengthHistogram.of(values[half:], names), sb.LengthHistogram.of(values[:half], names)]
    merged = sb.LengthHistogram.merge(parts)
    np.testing.assert_array_equal(merged.shapes, found.shapes)
    np.testing.assert_array_equal(merged.counts, found.counts)
    assert merged.absent == found.absent


def test_a_histogram_is_a_file(tmp_path):
    layout = sb.Layout({"x": "int32[s]", "y": "int32[t]"})
    values = np.array([[1, 5], [2, 4], [1, 5], [-1, -1]], np.int32)
    sb.LengthTable(("s", "t"), values, layout).histogram.save(tmp_path / "histogram.npz")
    loaded = sb.load_lengths(tmp_path / "histogram.npz")
    assert (loaded.axes, loaded.shapes.tolist(), loaded.counts.tolist()) == (("s", "t"), [[1, 5], [2, 4]], [2, 1])
    assert (loaded.absent, loaded.layout) == (1, layout)
    with pytest.raises(
        sb.LengthsError, match="holds a histogram, which is enough to plan from .* but not the lengths of every"
    ):
        sb.LengthTable.load(tmp_path / "histogram.npz")


def test_axes_in_another_order_are_the_same_histogram():
    found = sb.LengthHistogram.of(np.array([[1, 9], [2, 3], [1, 9]], np.int32), ("s", "t"))
    turned = found.on(("t", "s"))
    assert (turned.shapes.tolist(), turned.counts.tolist()) == ([[3, 2], [9, 1]], [1, 2])
    plan = sb.plan_buckets(found, sb.Layout({"a": "t", "b": "s"}), batch_size=1)
    assert plan.layout.axes == ("t", "s")
    with pytest.raises(sb.LengthsError, match=r"the lengths have the axes \('s', 't'\), but the layout has \('s',\)"):
        sb.plan_buckets(found, sb.Layout({"a": "s"}), batch_size=1)


def test_the_summary_is_of_the_samples():
    lengths = np.random.default_rng(0).integers(1, 1000, 5001)
    facts = sb.LengthTable.of(lengths, ["s"]).histogram.summary()["s"]
    assert (facts["min"], facts["max"], facts["median"]) == (lengths.min(), lengths.max(), np.median(lengths))
    assert facts["mean"] == pytest.approx(lengths.mean())
    for share in (95, 99):
        assert facts[f"p{share}"] == np.percentile(lengths, share, method="inverted_cdf")
    with pytest.raises(sb.LengthsError, match="there are no samples"):
        sb.LengthTable.of([], ["s"]).histogram.summary()


def test_histograms_that_cannot_be_are_refused():
    one = sb.LengthHistogram.of(np.array([[1]], np.int32), ("s",))
    with pytest.raises(sb.LengthsError, match="histograms of the same axes and layout can be merged, at least one"):
        sb.LengthHistogram.merge([])
    with pytest.raises(sb.LengthsError, match=r"got \[\(\('s',\), 'None'\), \(\('t',\), 'None'\)\]"):
        sb.LengthHistogram.merge([one, sb.LengthHistogram.of(np.array([[1]], np.int32), ("t",))])
    with pytest.raises(
        sb.LengthsError, match=r"has shapes int32 \[G, 1\] and counts int64 \[G\], but got int64 \[1, 1\]"
    ):
        sb.LengthHistogram(("s",), np.array([[1]]), np.array([1]))
    with pytest.raises(sb.LengthsError, match="merge takes histograms, but got LengthTable; a LengthTable has one"):
        sb.LengthHistogram.merge([sb.LengthTable.of([1], ["s"])])
    with pytest.raises(sb.LengthsError, match=r"a histogram is of lengths int32 \[N, 1\], but got int64 \[1, 1\]"):
        sb.LengthHistogram.of(np.array([[2**32 + 5]]), ("s",))
    for wrong in ([[-2, -2]], [[3, -1]]):
        with pytest.raises(sb.LengthsError, match="lengths of 0 or more, and whole rows of -1"):
            sb.LengthHistogram.of(np.array(wrong, np.int32), ("s", "t"))
    with pytest.raises(sb.LengthsError, match="lengths of 0 or more and counts of 1 or more"):
        sb.LengthHistogram(("s",), np.array([[1]], np.int32), np.array([0]))
