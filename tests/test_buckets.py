import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shapebucket as sb

LAYOUT = sb.Layout({"src": "int32[s]", "tgt": "float32[t]", "image": "uint8[t 4]"}, pad_values={"src": -1})


def bucket(s: int, t: int, rows: int = 2) -> sb.Bucket:
    return sb.Bucket((("t", t), ("s", s)), rows)


PLAN = sb.BucketPlan(LAYOUT, [bucket(16, 16), bucket(8, 8), bucket(24, 4, 3)])


def test_buckets_stand_from_cheap_to_dear():
    assert [each.sizes for each in PLAN.buckets] == [{"t": 8, "s": 8}, {"t": 4, "s": 24}, {"t": 16, "s": 16}]


def test_a_bucket_is_hashable_and_ordered():
    assert len({bucket(1, 2), bucket(1, 2), bucket(2, 1)}) == 2
    assert bucket(1, 2) < bucket(1, 3)
    assert str(bucket(1, 2)) == "[2 × t=2 s=1]"


def test_find_takes_the_cheapest_that_holds():
    assert PLAN.find({"s": 8, "t": 8}) == bucket(8, 8)
    assert PLAN.find({"s": 9, "t": 4}) == bucket(24, 4, 3)
    assert PLAN.find([5, 9]) == bucket(16, 16)
    message = r"a sample with lengths \{'t': 17, 's': 1\} fits no bucket of the plan \(the largest: \[2 × t=16 s=16\]\).*overlong="
    with pytest.raises(sb.OverlongError, match=message):
        PLAN.find({"s": 1, "t": 17})


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=30))
def test_assign_and_index_agree(lengths):
    assert PLAN.assign(lengths).tolist() == [-1 if k is None else k for k in map(PLAN.index, lengths)]


def test_truncation_keeps_the_most_elements():
    assert PLAN.assign([[4, 100], [100, 100], [1, 1]], truncate=True).tolist() == [1, 2, 0]


def test_batch_spec_has_features_masks_and_example_mask():
    spec = PLAN.batch_spec(bucket(24, 4, 3))
    assert {key: (each.shape, each.dtype.name) for key, each in spec.items()} == {
        "image": ((3, 4, 4), "uint8"),
        "src": ((3, 24), "int32"),
        "tgt": ((3, 4), "float32"),
        "s_mask": ((3, 24), "bool"),
        "t_mask": ((3, 4), "bool"),
        "example_mask": ((3,), "bool"),
    }
    lengths = sb.BucketPlan(LAYOUT, PLAN.buckets, masks="length").batch_spec(bucket(24, 4, 3))
    assert lengths["s_length"] == sb.ArraySpec((3,), np.dtype(np.int32))


def test_batch_spec_needs_dtypes():
    plan = sb.BucketPlan(sb.Layout({"x": "s"}), [sb.Bucket((("s", 1),), 1)])
    with pytest.raises(sb.LayoutError, match=r"feature 'x': its dtype is not known: write it .*'int32\[s\]'"):
        plan.batch_spec(plan.buckets[0])


def test_file_round_trip(tmp_path, token_plan):
    token_plan.save(tmp_path / "plan.json")
    loaded = sb.BucketPlan.load(tmp_path / "plan.json")
    assert loaded == token_plan
    assert loaded.planned == token_plan.planned
    assert loaded.fingerprint == token_plan.fingerprint
    assert str(loaded) == str(token_plan)


def test_the_fingerprint_tells_shapes_apart_and_nothing_else(token_plan):
    assert token_plan.fingerprint == sb.BucketPlan(token_plan.layout, token_plan.buckets).fingerprint
    assert token_plan.fingerprint != sb.BucketPlan(token_plan.layout, token_plan.buckets[:-1]).fingerprint
    assert token_plan.fingerprint != sb.BucketPlan(token_plan.layout, token_plan.buckets, masks="length").fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read a plan from '.*plan.json': Expecting"),
        ('{"version": 99}', "the plan has version 99, but this shapebucket reads 1"),
        ('{"version": 1}', "not a plan: KeyError"),
        ("[]", "not a plan: a JSON object is expected, but got list"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, content, message):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(sb.PlanError, match=message):
        sb.BucketPlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("layout", "buckets", "options", "error", "message"),
    [
        (sb.Layout({"x": "3 4"}), [], {}, sb.LayoutError, "no axis varies: give at least one dimension a name"),
        (LAYOUT, [], {}, sb.PlanError, "a plan needs at least one bucket, and no two of one shape; got none"),
        (LAYOUT, [bucket(1, 1), bucket(1, 1, 9)], {}, sb.PlanError, "no two of one shape"),
        (
            LAYOUT,
            [sb.Bucket((("s", 1),), 1)],
            {},
            sb.PlanError,
            r"has the axes \('s',\), but the layout has \('t', 's'\)",
        ),
        (
            LAYOUT,
            [bucket(1, 1)],
            {"masks": "none"},
            sb.PlanError,
            r"masks must be one of \('mask', 'length'\), but got 'none'",
        ),
        (
            sb.Layout({"s_mask": "s"}),
            [sb.Bucket((("s", 1),), 1)],
            {},
            sb.LayoutError,
            "feature 's_mask': a batch has masks or lengths of this name: rename the feature",
        ),
        (
            sb.Layout({"s_length": "s"}),
            [sb.Bucket((("s", 1),), 1)],
            {},
            sb.LayoutError,
            "feature 's_length': a batch has",
        ),
        (
            sb.Layout({"x": "example"}),
            [sb.Bucket((("example", 1),), 1)],
            {},
            sb.LayoutError,
            "feature 'example_mask': a batch has",
        ),
        (
            sb.Layout({"example_mask": "s"}),
            [sb.Bucket((("s", 1),), 1)],
            {},
            sb.LayoutError,
            "a batch has masks or lengths of",
        ),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(layout, buckets, options, error, message):
    with pytest.raises(error, match=message):
        sb.BucketPlan(layout, buckets, **options)


def test_a_bucket_has_positive_sizes():
    with pytest.raises(sb.PlanError, match="a bucket's sizes must be whole numbers of at least 1, but t is 0"):
        bucket(1, 0)
    with pytest.raises(sb.PlanError, match="but s is 8.5"):
        bucket(8.5, 1)
    with pytest.raises(sb.PlanError, match="but batch_size is 0"):
        bucket(1, 1, 0)


def test_report_counts_samples_elements_and_overlong():
    plan = sb.BucketPlan(sb.Layout({"x": "s"}), [sb.Bucket((("s", n),), 1) for n in (2, 5)])
    report = plan.report([1, 2, 3, 7])
    names = tuple(map(str, plan.buckets))
    assert report == sb.PlanReport(names, (2, 2), (2, 2), (3, 8), (4, 10), overlong=1, pad_to_max_elements=20)
    assert report.shares == (0.5, 0.5)
    assert report.padding_fraction == pytest.approx(1 - 11 / 14)
    assert report.padding_fractions == pytest.approx((1 / 4, 2 / 10))
    assert report.pad_to_max == pytest.approx(1 - 11 / 20)
    assert report.lower_bound is None
    with_absent = sb.LengthTable(("s",), np.array([[1], [2], [-1], [3], [7]], np.int32))
    assert plan.report(with_absent) == report
    assert plan.report([]).shares == (0, 0)


def test_a_printed_plan_shows_each_bucket_and_the_total(token_plan):
    lines = str(token_plan).splitlines()
    assert lines[0] == "4 buckets for tokens: 'int32[s]'"
    assert lines[1].split() == ["s", "batch", "elements", "MB", "share", "padding", "batches"]
    assert [line.split()[0] for line in lines[3:7]] == [str(each.sizes["s"]) for each in token_plan.buckets]
    verdict = r"padding .+% \(computing the least possible with as many buckets; .+% in one shape\) over 100 samples in \d+ batches"
    assert re.fullmatch(verdict, lines[-1])


def test_a_printed_report_is_a_line_a_bucket_and_a_verdict():
    plan = sb.BucketPlan(sb.Layout({"x": "s"}), [sb.Bucket((("s", n),), 2) for n in (2, 5)])
    lines = str(plan.report([1, 2, 2, 3, 7])).splitlines()
    assert lines[0] == "padding 18.8% (48.0% in one shape) over 5 samples in 3 batches; 1 samples are cut to fit"
    assert [line.split() for line in lines[1:2]] == [["bucket", "share", "fill", "padding", "batches"]]
    assert lines[3].split() == ["[2", "×", "s=2]", "60.0%", "83.3%", "16.7%", "2"]
    searched = sb.PlanReport(("a",), (1,), (1,), (100,), (201,), 0, 300, least_elements=200)
    assert searched.excess == pytest.approx(0.005)
    assert "computing at most 0.50% above the least possible with as many buckets" in searched.verdict


def test_summary_is_what_tools_rely_on(token_plan):
    summary = json.loads(json.dumps(token_plan.summary()))
    assert summary.keys() == {"buckets", "padding_fraction", "lower_bound", "pad_to_max"}
    assert summary["lower_bound"] == summary["padding_fraction"] < summary["pad_to_max"]
    assert summary["buckets"][0].keys() == {"axes", "batch_size", "share", "padding_fraction"}
    with pytest.raises(sb.PlanError, match=r"the plan was made by hand: plan.report\(lengths\)"):
        PLAN.summary()


def test_numpys_integers_become_pythons(tmp_path, token_lengths):
    plan = sb.plan_buckets(token_lengths, max_buckets=np.int64(2), batch_size=np.int64(4))
    plan.save(tmp_path / "plan.json")
    assert sb.BucketPlan.load(tmp_path / "plan.json").buckets == plan.buckets


def test_a_plan_from_bare_lengths_takes_a_layout():
    plan = sb.plan_buckets({"b": [3, 9], "a": [1, 2]}, max_buckets=2, batch_size=2)
    layout = sb.Layout({"words": "int32[b]", "other": "float32[a]"})
    placed = plan.with_layout(layout)
    assert [each.sizes for each in placed.buckets] == [{"a": 1, "b": 3}, {"a": 2, "b": 9}]
    assert placed.batch_spec(placed.buckets[0])["words"].shape == (2, 3)
    assert placed.planned == plan.planned
    assert plan.with_layout(sb.Layout({"image": "uint8[a b]"})).planned is None
    with pytest.raises(sb.PlanError, match=r"the plan has the axes \('a', 'b'\), but the layout has \('s',\)"):
        plan.with_layout(sb.Layout({"x": "s"}))


def test_a_table_counts_the_bytes_of_a_batch():
    assert PLAN.batch_bytes(bucket(24, 4, 3)) == 3 * (24 * 4 + 4 * 4 + 4 * 4)


def test_a_plan_keeps_the_multiple_of_its_batch_sizes(tmp_path):
    plan = sb.plan_buckets([3, 9, 30], max_buckets=2, token_budget=240, batch_multiple_of=4)
    assert plan.batch_multiple_of == 4
    plan.save(tmp_path / "plan.json")
    assert sb.BucketPlan.load(tmp_path / "plan.json").batch_multiple_of == 4
    assert plan.per_process(2).batch_multiple_of == 2
    by_hand = sb.BucketPlan(plan.layout, plan.buckets)
    assert by_hand.batch_multiple_of == 1
    assert by_hand.fingerprint == plan.fingerprint  # the same batches
    written = plan.to_json()
    del written["batch_multiple_of"]  # by an earlier shapebucket
    assert sb.BucketPlan.from_json(written).batch_multiple_of == 1
    with pytest.raises(sb.PlanError, match=r"the batch size of \[6 × s=4\] must be a multiple of batch_multiple_of 4"):
        sb.BucketPlan(plan.layout, [sb.Bucket((("s", 4),), 6)], batch_multiple_of=4)
