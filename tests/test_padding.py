import pickle
import types

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shapebucket as sb
from shapebucket import padding

LAYOUT = sb.Layout(
    {"text": {"src": "int32[s]", "weight": "float32[s]"}, "image": "uint8[h w 3]", "label": "int64[]"},
    pad_values={"text": {"src": -1, "weight": 0.5}, "image": 255},
)
BUCKET = sb.Bucket((("h", 4), ("w", 3), ("s", 6)), 4)


def plan(masks="mask"):
    return sb.BucketPlan(LAYOUT, [BUCKET], masks=masks)


def make(h: int, w: int, s: int, label: int):
    return {
        "text": {"src": np.arange(s, dtype=np.int32), "weight": np.full(s, 2, np.float32)},
        "image": np.full((h, w, 3), label, np.uint8),
        "label": np.int64(label),
    }


samples = st.lists(
    st.builds(make, st.integers(0, 4), st.integers(0, 3), st.integers(0, 6), st.integers(0, 9)), max_size=4
)


@given(samples, st.sampled_from(["mask", "length"]))
def test_unpad_undoes_pad(given_samples, masks):
    batch = sb.pad(given_samples, BUCKET, plan(masks))
    back = sb.unpad(batch, batch, LAYOUT)
    assert len(back) == len(given_samples)
    jax.tree.map(np.testing.assert_array_equal, back, given_samples)
    assert jax.tree.map(lambda x: x.dtype, back) == jax.tree.map(lambda x: x.dtype, given_samples)


@given(samples, st.sampled_from(["mask", "length"]))
def test_a_batch_has_exactly_the_planned_shapes(given_samples, masks):
    batch = sb.pad(given_samples, BUCKET, plan(masks))
    assert jax.tree.map(lambda x: sb.ArraySpec(x.shape, x.dtype), batch) == plan(masks).batch_spec(BUCKET)


def test_padding_holds_the_pad_values_and_masks_tell_it_apart():
    batch = sb.pad([make(2, 1, 3, 7)], BUCKET, plan())
    assert batch["text"]["src"][:2].tolist() == [[0, 1, 2, -1, -1, -1], [-1] * 6]
    assert batch["text"]["weight"][0].tolist() == [2, 2, 2, 0.5, 0.5, 0.5]
    assert (batch["image"][0, 2:] == 255).all()
    assert (batch["image"][0, :2, :1] == 7).all()
    assert batch["s_mask"].tolist() == [[True] * 3 + [False] * 3] + [[False] * 6] * 3
    assert batch["h_mask"].sum(axis=1).tolist() == [2, 0, 0, 0]
    assert batch["example_mask"].tolist() == [True, False, False, False]


def test_lengths_in_place_of_masks_give_the_mask_inside_jit():
    data = [make(1, 1, n, 0) for n in (0, 6, 4)]
    masked, measured = sb.pad(data, BUCKET, plan()), sb.pad(data, BUCKET, plan("length"))
    assert measured["s_length"].tolist() == [0, 6, 4, 0]
    inside = jax.jit(lambda batch: sb.length_mask(batch["s_length"], batch["text"]["src"].shape[1]))(measured)
    np.testing.assert_array_equal(inside, masked["s_mask"])
    np.testing.assert_array_equal(sb.length_mask(measured["s_length"], 6), masked["s_mask"])


def test_truncation_cuts_every_axis_at_its_end():
    batch = sb.pad([make(9, 2, 8, 1)], BUCKET, plan(), truncate=True)
    (back,) = sb.unpad(batch, batch, LAYOUT)
    assert back["image"].shape == (4, 2, 3)
    assert back["text"]["src"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_sample_too_long_is_an_error_unless_it_may_be_cut():
    with pytest.raises(
        sb.OverlongError, match=r"sample 1 with lengths \{'h': 1, 'w': 1, 's': 7\} does not fit the bucket"
    ):
        sb.pad([make(1, 1, 1, 0), make(1, 1, 7, 0)], BUCKET, plan())


def test_more_samples_than_rows_are_an_error():
    with pytest.raises(sb.PlanError, match=r"5 samples do not fit the 4 rows of \[4 × h=4 w=3 s=6\]"):
        sb.pad([make(1, 1, 1, 0)] * 5, BUCKET, plan())


def test_a_wrong_sample_is_named():
    with pytest.raises(sb.LayoutError, match="sample 1, feature 'label': is text"):
        sb.pad([make(1, 1, 1, 0), {**make(1, 1, 1, 0), "label": "x"}], BUCKET, plan())


def test_outputs_are_unpadded_with_a_layout_of_their_own():
    batch = sb.pad([make(1, 1, 2, 0), make(1, 1, 5, 0)], BUCKET, plan())
    outputs = {"logits": jax.numpy.zeros((4, 6, 10)), "score": np.arange(4), "unused": 1}
    back = sb.unpad(outputs, batch, sb.Layout({"logits": "s 10", "score": ""}))
    assert [each["logits"].shape for each in back] == [(2, 10), (5, 10)]
    assert [int(each["score"]) for each in back] == [0, 1]


def test_unpad_refuses_what_it_cannot_cut():
    batch = sb.pad([make(1, 1, 2, 0)], BUCKET, plan())
    with pytest.raises(sb.LayoutError, match="neither q_mask nor q_length, so axis 'q' cannot be cut"):
        sb.unpad({"x": np.zeros((4, 2))}, batch, sb.Layout({"x": "q"}))
    with pytest.raises(sb.LayoutError, match=r"feature 'x': has shape \(4,\), but 's' of this batch has \(4, 6\)"):
        sb.unpad({"x": np.zeros(4)}, batch, sb.Layout({"x": "s"}))
    with pytest.raises(sb.LayoutError, match=r"has shape \(4, 5\), but 's' of this batch has \(4, 6\)"):
        sb.unpad({"x": np.zeros((4, 5))}, batch, sb.Layout({"x": "s"}))
    with pytest.raises(sb.LayoutError, match=r"has shape \(4, 6, 5\), but 's 6' of this batch has \(4, 6, 6\)"):
        sb.unpad({"x": np.zeros((4, 6, 5))}, batch, sb.Layout({"x": "s 6"}))
    with pytest.raises(sb.LayoutError, match=r"has shape \(3, 6\), but 's' of this batch has \(4, 6\)"):
        sb.unpad({"x": np.zeros((3, 6))}, batch, sb.Layout({"x": "s"}))
    short = sb.pad([make(1, 1, 6, 0)], BUCKET, plan("length"))
    with pytest.raises(sb.LayoutError, match=r"has shape \(4, 5\), but 's' of this batch has \(4, 6\)"):
        sb.unpad({"x": np.zeros((4, 5))}, short, sb.Layout({"x": "s"}))
    with pytest.raises(
        sb.LayoutError, match=r"feature 'x': the outputs lack this feature of the layout \(ndarray received\)"
    ):
        sb.unpad(np.zeros((4, 6)), short, sb.Layout({"x": "s"}))
    with pytest.raises(
        sb.LayoutError, match="unpad takes the batch that a loader made, with 'example_mask', but got dict"
    ):
        sb.unpad({"x": np.zeros(4)}, {}, sb.Layout({"x": ""}))
    with pytest.raises(sb.LayoutError, match="feature 'y/z': the outputs lack this feature"):
        sb.unpad({"x": np.zeros(4)}, batch, sb.Layout({"y": {"z": "s"}}))


def test_outputs_without_an_axis_are_unpadded_too():
    batch = sb.pad([make(1, 1, 2, 0), make(1, 1, 5, 0)], BUCKET, plan())
    back = sb.unpad({"logits": np.arange(20).reshape(4, 5)}, batch, sb.Layout({"logits": "5"}))
    assert [each["logits"].tolist() for each in back] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_batches_share_no_memory():
    data = [make(2, 2, 2, 1)]
    one, two = sb.pad(data, BUCKET, plan()), sb.pad(data, BUCKET, plan())
    one["text"]["src"][:] = 99
    assert two["text"]["src"][0, 0] == 0
    assert data[0]["text"]["src"][0] == 0


def test_a_bucket_of_other_axes_is_refused():
    swapped = sb.Bucket((("s", 6), ("h", 4), ("w", 3)), 4)
    with pytest.raises(
        sb.PlanError, match=r"has the axes \('s', 'h', 'w'\), but the layout has \('h', 'w', 's'\), in this order"
    ):
        sb.pad([make(1, 1, 2, 0)], swapped, plan())


def test_an_axis_may_stand_twice_in_a_feature():
    layout = sb.Layout({"bias": "float32[n n]", "x": "float32[n]"})
    two = sb.BucketPlan(layout, [sb.Bucket((("n", 4),), 2)])
    data = [{"bias": np.ones((n, n), np.float32), "x": np.ones(n, np.float32)} for n in (2, 4)]
    batch = sb.pad(data, two.buckets[0], two)
    assert batch["bias"].sum(axis=(1, 2)).tolist() == [4, 16]
    assert layout.elements([[3]]).tolist() == [9 + 3]
    jax.tree.map(np.testing.assert_array_equal, sb.unpad(batch, batch, layout), data)


class TestChecker:
    """It says what `Layout.check` and `BucketPlan.index` say, the second time too."""

    SINGLE = sb.BucketPlan(sb.Layout({"x": "int32[s]"}), [sb.Bucket((("s", size),), 2) for size in (4, 8)])

    @staticmethod
    def asked(plan, sample):
        try:
            leaves, lengths = plan.layout.check(sample)
        except sb.LayoutError as error:
            return str(error)
        return [np.asarray(leaf).tolist() for leaf in leaves], lengths, plan.index(lengths)

    @staticmethod
    def checked(checker, sample):
        try:
            leaves, (lengths, index) = checker.check(sample)
        except sb.LayoutError as error:
            return str(error)
        return [np.asarray(leaf).tolist() for leaf in leaves], lengths, index

    @pytest.mark.parametrize("remembered", [16_384, 2])
    def test_of_one_feature(self, remembered, monkeypatch):
        monkeypatch.setattr(padding, "_REMEMBERED", remembered)
        known = np.arange(3, dtype=np.int32)
        tried = [
            {"x": known},
            {"x": known + 1},
            {"x": np.zeros(8, np.int32)},
            {"x": np.zeros(9, np.int32)},
            {"x": known.astype(np.int64)},
            {"x": known.astype(">i4")},
            {"x": np.ma.masked_array(known)},
            {"x": known.reshape(3, 1)},
            {"x": known.tolist()},
            {"x": jax.numpy.asarray(known)},
            {"x": None},
            {"y": known},
            {"x": known, "y": known},
            types.MappingProxyType({"x": known}),
            known,
            {"x": {"x": known}},
        ]
        checker = padding.Checker(self.SINGLE)
        for sample in tried * 3:
            assert self.checked(checker, sample) == self.asked(self.SINGLE, sample)
            assert len(checker._known) <= remembered

    def test_of_nested_features(self):
        good = make(2, 1, 3, 7)
        tried = [
            good,
            make(2, 1, 4, 3),
            make(9, 1, 4, 3),
            {**good, "label": 5},
            {**good, "label": np.int32(5)},
            {**good, "label": np.float64(5)},
            {**good, "label": "x"},
            {**good, "text": good["text"]["src"]},
            {**good, "text": {"src": good["text"]["src"]}},
            {**good, "text": {**good["text"], "more": 1}},
            {**good, "text": types.MappingProxyType(good["text"])},
            {**good, "text": {**good["text"], "weight": np.ones(4, np.float32)}},
            {key: good[key] for key in reversed(good)},
            {key: good[key] for key in ("text", "image")},
        ]
        checker = padding.Checker(plan())
        for sample in tried * 3:
            assert self.checked(checker, sample) == self.asked(plan(), sample)

    def test_it_can_be_pickled(self):
        checker = pickle.loads(pickle.dumps(padding.Checker(self.SINGLE)))
        assert self.checked(checker, {"x": np.zeros(5, np.int32)}) == ([[0] * 5], (5,), 1)


@pytest.mark.parametrize("size", [1, 6, 255, 256, 1024, 1025, 70_000])
@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_length_masks_of_any_size(size, dtype):
    lengths = np.array([0, 1, min(5, size), min(size, np.iinfo(dtype).max), min(size + 1, np.iinfo(dtype).max)], dtype)
    mask = sb.length_mask(lengths, size)
    np.testing.assert_array_equal(mask, np.arange(size) < lengths.astype(np.int64)[:, None])
    mask[:] = True
    np.testing.assert_array_equal(sb.length_mask(lengths, size)[0], np.zeros(size, bool))
    assert sb.length_mask(np.array([-3]), size).sum() == 0


def test_a_dimension_may_be_empty():
    layout = sb.Layout({"x": "int32[s 0]", "y": "float32[3 s 0]"})
    samples = [{"x": np.zeros((n, 0), np.int32), "y": np.zeros((3, n, 0), np.float32)} for n in (1, 4)]
    plan = sb.BucketPlan(layout, [sb.Bucket((("s", 5),), 3)])
    batch = sb.pad(samples, plan.buckets[0], plan)
    assert (batch["x"].shape, batch["y"].shape) == ((3, 5, 0), (3, 3, 5, 0))
    assert batch["s_mask"].sum(axis=1).tolist() == [1, 4, 0]
    assert [each["x"].shape for each in sb.unpad(batch, batch, layout)] == [(1, 0), (4, 0)]
