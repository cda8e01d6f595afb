from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shapebucket as sb
from shapebucket.planner import Rule, rules

LENGTHS = np.array([1, 1, 2, 2, 3, 3, 4, 10])


def sizes_of(plan: sb.BucketPlan) -> list[int]:
    return plan.sizes[:, 0].tolist()


@pytest.mark.parametrize(
    ("rule", "boundaries"),
    [
        ("pad_to_max", [10]),
        ("equal_count", [1, 2, 3, 10]),  # two samples in each
        ("equal_mass", [2, 4, 10]),  # a share is 6.5: exceeded by 1, 1, 2, 2, 3, then by 3, 4
        ("percentile", [1, 2, 3, 10]),
        ("constant_width", [4, 6, 8, 10]),  # widths of (1 + 10 − 1) // 4 from 10 down
        ("linear_width", [2, 4, 7, 10]),  # α = 2·(9 − 4)/20: 1 + 0.5 + 1, 1 + 1.5 + 2, 1 + 3 + 3, 1 + 5 + 4
        ("exponential_width", [3, 5, 7, 10]),  # 1 + 9·(1, 2.1, 3.31, 4.641)/4.641, rounded
        ("geometric", [7, 8, 9, 10]),
        ("powers_of_two", [16]),
        ("alphafold3", [128]),
    ],
)
def test_each_rule_is_what_its_definition_says(rule, boundaries):
    assert sizes_of(sb.plan_by_rule(rule, LENGTHS, max_buckets=4, batch_size=1)) == boundaries


def test_geometric_steps_are_tensor2tensors():
    """Bounds of 8, 9, 10, …, 20, 22, 24, …, 33, …: each the larger of one more and a tenth more, rounded down; exclusive."""
    found = rules.geometric(np.array([100]), np.ones(1, int), 0).tolist()
    assert found[:12] == [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert found[12:20] == [19, 21, 23, 25, 27, 29, 32, 35]
    assert found[-1] == 100


def test_alphafold3_ends_with_the_first_size_that_holds_the_longest():
    assert rules.alphafold3(np.array([600]), np.ones(1, int), 0).tolist() == [128, 256, 384, 512, 768]
    assert rules.alphafold3(np.array([512]), np.ones(1, int), 0).tolist() == [128, 256, 384, 512]
    assert rules.alphafold3(np.array([6000]), np.ones(1, int), 0).tolist()[-2:] == [5120, 6000]


@settings(max_examples=100)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 8))
def test_rules_of_counts_are_those_of_the_samples(lengths, max_buckets):
    """Quantiles and masses of a histogram against NumPy's of the samples."""
    ordered = np.sort(lengths)
    distinct, counts = np.unique(ordered, return_counts=True)
    at = np.ceil(len(ordered) * np.arange(1, max_buckets + 1) / max_buckets - 1e-9).astype(int) - 1
    assert rules.equal_count(distinct, counts, max_buckets).tolist() == ordered[at].tolist()
    steps = [np.percentile(ordered, 100 * k / max_buckets, method="lower") for k in range(1, max_buckets + 1)]
    assert rules.percentile(distinct, counts, max_buckets).tolist() == pytest.approx(steps)
    share, total, bounds = ordered.sum() / max_buckets, 0, []
    for length in ordered.tolist():  # sample by sample, as lhotse does
        if total > share:
            bounds.append(length)
            total = 0
        total += length
    held = {max((each for each in ordered.tolist() if each < bound), default=None) for bound in bounds}
    expected = sorted({*(held - {None}), int(ordered[-1])})
    assert sorted(set(rules.equal_mass(distinct, counts, max_buckets).tolist())) == expected


def test_gluons_widths_are_its_own():
    """Figures of gluon-nlp's own code for lengths of 1 to 512 in 8 buckets."""
    lengths, counts = np.array([1, 512]), np.ones(2, int)
    assert sorted(rules.constant_width(lengths, counts, 8).tolist()) == [64, 128, 192, 256, 320, 384, 448, 512]
    assert rules.linear_width(lengths, counts, 8).tolist()[:4] == [16, 45, 88, 145]
    assert 208 in rules.exponential_width(lengths, counts, 8).tolist()


def test_the_quantile_grid_crosses_the_axes():
    lengths = {"s": [1, 2, 3, 4], "t": [10, 10, 20, 30]}
    plan = sb.plan_by_rule("quantile_grid", lengths, sb.Layout({"x": "s", "y": "t"}), max_buckets=4, batch_size=1)
    assert plan.sizes.tolist() == [[2, 10], [4, 10], [2, 30], [4, 30]]


@settings(max_examples=200)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(1, 8), st.sampled_from([1, 8]))
def test_no_rule_of_as_many_buckets_has_less_padding_than_the_plan(lengths, max_buckets, multiple_of):
    options = {"batch_size": 1, "multiple_of": multiple_of}
    for rule in get_args(Rule):
        if rule in ("nemo_2d", "quantile_grid"):
            continue
        theirs = sb.plan_by_rule(rule, lengths, max_buckets=max_buckets, **options)
        assert (theirs.assign(np.array(lengths)[:, None]) >= 0).all()
        ours = sb.plan_buckets(lengths, max_buckets=len(theirs), **options)
        assert ours.planned.padding_fraction <= theirs.planned.padding_fraction + 1e-12


def test_nemos_two_axes_hold_everything_and_cost_no_less_than_the_search():
    rng = np.random.default_rng(0)
    lengths = {"s": rng.geometric(0.02, 2000), "t": rng.geometric(0.05, 2000)}
    layout = sb.Layout({"src": "s", "tgt": "t"})
    theirs = sb.plan_by_rule("nemo_2d", lengths, layout, max_buckets=9, batch_size=1, multiple_of=8)
    ours = sb.plan_buckets(lengths, layout, max_buckets=9, batch_size=1, multiple_of=8)
    grid = sb.plan_by_rule("quantile_grid", lengths, layout, max_buckets=9, batch_size=1, multiple_of=8)
    for rule in (theirs, grid):
        assert len(rule) <= 9
        assert rule.planned.overlong == 0
        assert ours.planned.padding_fraction < rule.planned.padding_fraction
    assert sb.plan_by_rule("pad_to_max", lengths, layout, batch_size=1).planned.padding_fraction == pytest.approx(
        ours.planned.pad_to_max, abs=0.02
    )


def test_tf_boundaries_are_exclusive():
    """A length equal to tf.data's bound goes to the next bucket there, and so it does here."""
    plan = sb.plan_by_rule(sb.from_tf_boundaries([5, 10]), [1, 4, 5, 9, 10, 30], batch_size=1)
    assert sizes_of(plan) == [4, 9, 30]
    assert plan.find([5]).sizes == {"s": 9}
    assert sb.to_tf_boundaries(plan) == [5, 10]
    assert sb.from_tf_boundaries([1, 5]) == [4]
    pairs = sb.plan_buckets({"s": [1, 9], "t": [9, 1]}, sb.Layout({"x": "s", "y": "t"}), batch_size=1)
    with pytest.raises(sb.PlanError, match=r"tf.data buckets one axis, but the plan has \('s', 't'\)"):
        sb.to_tf_boundaries(pairs)


def test_rules_are_aligned_afterwards():
    assert sizes_of(sb.plan_by_rule("equal_count", LENGTHS, max_buckets=4, batch_size=1, multiple_of=4)) == [4, 12]


@pytest.mark.parametrize(
    ("rule", "lengths", "message"),
    [
        ("best", [1], r"rule must be boundaries or one of \('pad_to_max', .*, but got 'best'"),
        ("nemo_2d", [1], "nemo_2d is for two axes, but the layout has 1"),
        ("quantile_grid", [1], "quantile_grid is for several axes; with one it is equal_count"),
        ("equal_mass", {"s": [1], "t": [2]}, "the rule equal_mass is for one axis, but the layout has 2"),
        ([4], {"s": [1], "t": [2]}, "boundaries are for one axis, but the layout has 2"),
        ([0, 4], [1], "a boundary must be a whole number of at least 1, but got 0"),
    ],
)
def test_rules_that_cannot_be_are_refused(rule, lengths, message):
    with pytest.raises(sb.PlanError, match=message):
        sb.plan_by_rule(rule, lengths, batch_size=1)


def test_a_plan_from_tf_boundaries_has_their_batch_sizes():
    layout = sb.Layout({"x": "s"})
    plan = sb.plan_from_tf_boundaries([5, 10], [8, 4, 2], layout, longest=30, masks="length")
    assert [(bucket.sizes["s"], bucket.batch_size) for bucket in plan.buckets] == [(4, 8), (9, 4), (30, 2)]
    assert plan.masks == "length"
    assert sizes_of(sb.plan_from_tf_boundaries([1, 5], [9, 8, 7], layout)) == [4]
    assert (sb.to_tf_boundaries(plan), plan.batch_sizes.tolist()) == ([5, 10], [8, 4, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([10, 5], [1, 1, 1]), r"each larger than the one before; got \[10, 5\]"),
        (([], [1]), "must be at least one number"),
        (([5, 10], [1, 1]), "one number for each of the 2 bounds, and one for what is longer; got 2"),
        (([5, 0.5], [1, 1, 1]), "a bound must be a whole number of at least 1, but got 0.5"),
        (([5], [0, 1]), "a bucket's sizes must be whole numbers of at least 1, but batch_size is 0"),
    ],
)
def test_tf_boundaries_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(sb.PlanError, match=message):
        sb.plan_from_tf_boundaries(*arguments, sb.Layout({"x": "s"}))


def test_tf_boundaries_have_one_axis_and_the_longest_is_beyond_them():
    with pytest.raises(sb.PlanError, match=r"tf.data buckets one axis, but the layout has \('s', 't'\)"):
        sb.plan_from_tf_boundaries([5], [1, 1], sb.Layout({"x": "s", "y": "t"}))
    with pytest.raises(sb.PlanError, match="longest is of samples from the last bound, 5, on; got 4"):
        sb.plan_from_tf_boundaries([5], [1, 1], sb.Layout({"x": "s"}), longest=4)
