import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shapebucket as sb
from shapebucket.planner import boxes as boxes_module
from shapebucket.planner import optimal_boundaries, solve_boxes


def least_cost(counts, costs, max_buckets):
    """Brute force: every set of boundaries that holds the last candidate."""
    n = len(counts)
    best = None
    for size in range(1, min(max_buckets, n) + 1):
        for inner in itertools.combinations(range(n - 1), size - 1):
            bounds = [*inner, n - 1]
            total = sum(
                sum(counts[start:end]) * costs[end - 1]
                for start, end in itertools.pairwise([0, *(bound + 1 for bound in bounds)])
            )
            best = total if best is None else min(best, total)
    return best


@settings(max_examples=300)
@given(st.data())
def test_the_one_axis_planner_is_optimal(data):
    n = data.draw(st.integers(1, 9))
    counts = data.draw(st.lists(st.integers(0, 20), min_size=n, max_size=n))
    costs = sorted(data.draw(st.lists(st.integers(0, 50), min_size=n, max_size=n)))
    max_buckets = data.draw(st.integers(1, 6))
    chosen, curve = optimal_boundaries(counts, costs, max_buckets)
    bounds = [0, *(chosen + 1)]
    achieved = sum(sum(counts[a:b]) * costs[b - 1] for a, b in itertools.pairwise(bounds))
    assert chosen[-1] == n - 1
    assert len(chosen) <= max_buckets
    assert achieved == curve[-1] == least_cost(counts, costs, max_buckets)
    assert curve.tolist() == [least_cost(counts, costs, k) for k in range(1, len(curve) + 1)]


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 7),
)
def test_alignment_is_inside_the_optimisation(lengths, max_buckets, multiple_of):
    """No set of aligned boundaries has less padding than the plan."""
    plan = sb.plan_buckets(lengths, max_buckets=max_buckets, batch_size=1, multiple_of=multiple_of)
    sizes = plan.sizes[:, 0]
    assert (sizes % multiple_of == 0).all()
    aligned = np.maximum(-(-np.array(lengths) // multiple_of) * multiple_of, multiple_of)
    distinct, counts = np.unique(aligned, return_counts=True)
    assert sum(plan.planned.padded_elements) == least_cost(counts.tolist(), distinct.tolist(), max_buckets)
    assert plan.planned.lower_bound == plan.planned.padding_fraction


def least_cost_with(counts, costs, max_buckets, forced):
    """Brute force over all sets that have the forced ones: each sample goes to the cheapest that holds it."""
    n, last, curve, best = len(counts), max(np.flatnonzero(counts), default=0), [], np.inf
    free = [j for j in range(n) if j not in forced]
    for k in range(1, max_buckets + 1):
        for extra in itertools.combinations(free, k - len(forced)) if k >= len(forced) else []:
            chosen = {*forced, *extra}
            if chosen and max(chosen) >= last:
                best = min(best, sum(counts[i] * min(costs[j] for j in chosen if j >= i) for i in range(last + 1)))
        curve.append(best)
    return curve


@settings(max_examples=400)
@given(st.data())
def test_any_costs_and_forced_boundaries_are_planned_exactly(data):
    """Costs that fall as buckets grow, and forced boundaries that are dearer than larger ones, included."""
    n = data.draw(st.integers(1, 7))
    counts = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    costs = data.draw(st.lists(st.integers(1, 30), min_size=n, max_size=n))
    forced = sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=3)))
    if not forced or forced[-1] != n - 1:
        counts[-1] = max(1, counts[-1])
    need = len(forced) + (0 if forced and forced[-1] == n - 1 else 1)
    max_buckets = data.draw(st.integers(need, need + 3))
    chosen, curve = optimal_boundaries(counts, costs, max_buckets, forced=forced)
    assert set(forced) <= set(chosen.tolist())
    assert len(chosen) <= max_buckets
    paid = sum(count * min(costs[j] for j in chosen if j >= i) for i, count in enumerate(counts) if count)
    expected = least_cost_with(counts, costs, max_buckets, forced)
    assert paid == curve[-1] == expected[-1]
    assert curve.tolist() == expected[: len(curve)]


def test_large_instances_agree_with_a_plain_dynamic_programme():
    rng = np.random.default_rng(0)
    counts, costs = rng.integers(0, 50, 300), np.cumsum(rng.integers(0, 5, 300))
    weight = np.concatenate([[0], np.cumsum(counts)])
    best = np.where(np.arange(301) == 0, 0, np.iinfo(np.int64).max // 2)
    expected = []
    for _ in range(12):
        best = np.array(
            [0] + [min(best[i] + (weight[j] - weight[i]) * costs[j - 1] for i in range(j)) for j in range(1, 301)]
        )
        expected.append(best[-1])
    _, curve = optimal_boundaries(counts, costs, 12)
    assert curve.tolist() == np.minimum.accumulate(expected).tolist()


def test_float_costs():
    chosen, curve = optimal_boundaries([5, 1, 5], [1.5, 2.25, 10.0], 2)
    assert chosen.tolist() == [1, 2]
    assert curve[-1] == 6 * 2.25 + 50


@pytest.mark.parametrize("cells", [10**6, 20])
def test_several_axes_come_close_to_the_best_and_the_bound_holds(cells, monkeypatch):
    """On small instances, against every choice of boxes: the cost within 2 %, mostly equal, and the bound never above.

    With few cells the shapes are coarsened: the cost may rise, the bound may not.
    """
    monkeypatch.setattr(boxes_module, "_CELLS", cells)
    rng = np.random.default_rng(0)
    equal = 0
    for number in range(60 if cells == 20 else 40):
        axes = 2 + number % 2

        def elements(sizes, axes=axes):
            return np.asarray(sizes).sum(axis=-1) if axes == 2 else np.asarray(sizes).prod(axis=-1)

        shapes = np.unique(rng.integers(1, 12, (7, axes)), axis=0)
        counts = rng.integers(1, 50, len(shapes))
        corners = np.array(list(itertools.product(*(np.unique(shapes[:, axis]) for axis in range(axes)))))
        holds = (shapes[:, None] <= corners[None]).all(axis=2)
        price = np.where(holds, elements(corners), 10**9)
        choices = itertools.combinations(np.flatnonzero(holds.any(axis=0)).tolist(), 2)
        best = min(int((counts * price[:, list(choice)].min(axis=1)).sum()) for choice in choices)
        choices = solve_boxes(shapes, counts, elements, 2, forced=shapes[:0])
        boxes, paid, bound = choices.choose(2)
        cost = int(
            (counts * np.where((shapes[:, None] <= boxes[None]).all(axis=2), elements(boxes), 10**9).min(axis=1)).sum()
        )
        assert len(boxes) <= 2
        assert paid == cost
        assert bound <= best <= cost
        assert choices.curve[0] >= choices.curve[1] >= best
        assert cost <= 1.02 * best or cells == 20
        equal += cost == best
    assert equal >= (36 if cells > 20 else 1)


def test_many_distinct_shapes_are_coarsened_and_the_bound_still_holds(monkeypatch):
    monkeypatch.setattr(boxes_module, "_CELLS", 400_000)
    rng = np.random.default_rng(0)
    lengths = {"s": rng.integers(1, 500, 5_000), "t": rng.integers(1, 500, 5_000)}
    layout = sb.Layout({"src": "s", "tgt": "t"})
    plans = [
        sb.plan_buckets(lengths, layout, max_buckets=k, token_budget=4096, multiple_of=m)
        for k, m in [(8, 1), (8, 8), (1, 8)]
    ]
    for plan in plans:
        assert plan.planned.lower_bound <= plan.planned.padding_fraction
        assert (plan.assign(np.stack([lengths["s"], lengths["t"]], axis=1)) >= 0).all()
    fine, aligned, one = plans
    assert len(fine) == len(aligned) == 8
    assert fine.planned.excess < 0.07
    assert fine.planned.padding_fraction < 1.02 * aligned.planned.padding_fraction
    assert aligned.planned.padding_fraction < one.planned.padding_fraction


def test_a_token_budget_gives_short_buckets_more_rows():
    plan = sb.plan_buckets([1, 2, 4, 8], max_buckets=4, token_budget=16)
    assert [(each.sizes["s"], each.batch_size) for each in plan.buckets] == [(1, 16), (2, 8), (4, 4), (8, 2)]
    aligned = sb.plan_buckets([1, 3, 5], max_buckets=3, token_budget=32, batch_multiple_of=4)
    assert [each.batch_size for each in aligned.buckets] == [32, 8, 4]


def test_max_size_cuts_and_counts():
    plan = sb.plan_buckets([3, 10, 100], max_buckets=2, batch_size=1, max_size=8)
    assert plan.sizes.tolist() == [[3], [8]]
    assert plan.planned.overlong == 2
    assert sum(plan.planned.real_elements) == 3 + 8 + 8


def test_fewer_buckets_where_fewer_are_exact():
    assert len(sb.plan_buckets([3, 3, 7], max_buckets=8, batch_size=1)) == 2


def test_zero_lengths_go_to_the_smallest_bucket():
    assert sb.plan_buckets([0, 0], batch_size=1, multiple_of=4).sizes.tolist() == [[4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either batch_size .* or token_budget"),
        ({"batch_size": 1, "token_budget": 1}, "give either batch_size .* or token_budget"),
        ({"batch_size": 1, "max_buckets": 0}, "max_buckets must be a whole number of at least 1, but got 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number of at least 1, but got 2.5"),
        ({"batch_size": 6, "batch_multiple_of": 4}, "batch_size 6 must be a multiple of batch_multiple_of 4"),
        (
            {"batch_size": 1, "multiple_of": {"x": 2}},
            r"multiple_of names the axes \['x'\], but the layout has \('s',\)",
        ),
        ({"batch_size": 1, "multiple_of": 8, "max_size": 12}, "max_size 12 must be a multiple of multiple_of 8"),
        (
            {"token_budget": 64, "multiple_of": 8, "batch_multiple_of": 2},
            r"a token_budget of 64 elements cannot hold 2 rows of \{'s': 56\} \(56 elements each\): raise it to 112, or limit",
        ),
    ],
)
def test_numbers_that_make_no_plan_are_refused(options, message):
    with pytest.raises(sb.PlanError, match=message):
        sb.plan_buckets([1, 20, 50], **options)


def test_no_lengths_make_no_plan():
    with pytest.raises(sb.PlanError, match="there are no lengths to plan from"):
        sb.plan_buckets([], batch_size=1)


def test_the_layout_must_be_the_one_that_was_measured(token_lengths):
    with pytest.raises(sb.PlanError, match="the lengths were measured with the layout"):
        sb.plan_buckets(token_lengths, sb.Layout({"other": "s"}), batch_size=1)
    plan = sb.plan_buckets(token_lengths, sb.Layout({"tokens": "s"}), batch_size=1)
    assert plan.layout == token_lengths.layout


def test_the_layouts_pad_values_survive_planning(token_lengths):
    plan = sb.plan_buckets(token_lengths, sb.Layout({"tokens": "s"}, pad_values={"tokens": -1}), batch_size=1)
    assert str(plan.layout) == "tokens: 'int32[s]'"
    assert plan.layout.features[0].pad_value == -1


def test_axes_that_grow_together_are_planned_exactly():
    lengths = np.random.default_rng(0).integers(1, 200, 2000)
    layout = sb.Layout({"src": "s", "tgt": "t"})
    one = sb.plan_buckets(lengths, max_buckets=5, batch_size=1)
    same = sb.plan_buckets({"s": lengths, "t": lengths}, layout, max_buckets=5, batch_size=1)
    constant = sb.plan_buckets({"s": lengths, "t": np.full(2000, 7)}, layout, max_buckets=5, batch_size=1)
    assert same.sizes[:, 0].tolist() == one.sizes[:, 0].tolist()
    assert constant.sizes[:, 0].tolist() == one.sizes[:, 0].tolist()
    assert same.planned.lower_bound == same.planned.padding_fraction


def test_max_batch_size_bounds_rows():
    plan = sb.plan_buckets([1, 4], max_buckets=2, token_budget=64, max_batch_size=20, batch_multiple_of=8)
    assert [each.batch_size for each in plan.buckets] == [16, 16]
    with pytest.raises(sb.PlanError, match="max_batch_size 4 is below batch_multiple_of 8"):
        sb.plan_buckets([1], token_budget=64, max_batch_size=4, batch_multiple_of=8)


def step_seconds(size):
    """A measured step that is fast at multiples of 16, as accelerators are."""
    return float(size if size % 16 == 0 else 3 * size)


def test_a_measured_cost_moves_the_boundaries():
    lengths = np.random.default_rng(0).integers(1, 65, 1000)
    table = sb.TableCost(tuple(range(1, 65)), tuple(step_seconds(size) for size in range(1, 65)))
    plan = sb.plan_buckets(lengths, max_buckets=4, batch_size=8, cost=table)
    assert plan.sizes[:, 0].tolist() == [16, 32, 48, 64]
    assert plan.row_costs == (2, 4, 6, 8)
    assert plan.planned.lower_bound is None
    assert sb.BucketPlan.from_json(plan.to_json()) == plan


def test_attention_moves_boundaries_up_where_it_is_dear():
    lengths = np.random.default_rng(0).integers(1, 1001, 5000)
    linear = sb.plan_buckets(lengths, max_buckets=4, batch_size=1)
    square = sb.plan_buckets(lengths, max_buckets=4, batch_size=1, cost=sb.PolynomialCost(linear=0, quadratic=1))
    same = sb.plan_buckets(lengths, max_buckets=4, batch_size=1, cost=sb.PolynomialCost())
    assert same.sizes.tolist() == linear.sizes.tolist()
    assert (square.sizes[:-1] > linear.sizes[:-1]).all()


def test_a_budget_that_rows_cannot_fill_counts_where_steps_cost_alike():
    """A bucket of 513 under a budget of 1,024 holds one row, one of 512 two: 512 takes half the steps."""
    lengths = [500] * 50 + [512] * 50 + [513] * 50 + [1024]
    plan = sb.plan_buckets(lengths, max_buckets=2, token_budget=1024, cost=sb.count_steps)
    assert plan.sizes[:, 0].tolist() == [512, 1024]
    by_elements = sb.plan_buckets(lengths, max_buckets=2, token_budget=1024)
    assert by_elements.sizes[:, 0].tolist() == [513, 1024]


def test_boundaries_that_the_user_insists_on_are_there():
    lengths = np.random.default_rng(0).integers(1, 400, 1000)
    plan = sb.plan_buckets(lengths, max_buckets=4, batch_size=1, multiple_of=8, include=[128, 512])
    assert {128, 512} <= set(plan.sizes[:, 0].tolist())
    assert len(plan) == 4
    assert plan.planned.lower_bound == plan.planned.padding_fraction


def test_a_dear_boundary_that_the_user_insists_on_holds_nothing():
    table = sb.TableCost((1, 10, 12, 20), (1.0, 9.0, 2.0, 4.0))
    plan = sb.plan_buckets([10] * 5 + [20], max_buckets=3, batch_size=1, cost=table, include=[10])
    assert plan.find([10]).sizes == {"s": 12}
    assert plan.planned.samples[[each.sizes["s"] for each in plan.buckets].index(10)] == 0


def test_the_number_of_buckets_follows_from_what_a_compile_costs():
    lengths = np.random.default_rng(0).integers(1, 500, 10_000)
    counts = [
        len(sb.plan_buckets(lengths, batch_size=1, compile_cost=cost, run_samples=100_000))
        for cost in (1e9, 1e6, 1e4, 0)
    ]
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert 1 < counts[1] < counts[2] < counts[3] == 64
    plan = sb.plan_buckets(lengths, batch_size=1, compile_cost=1e6, run_samples=100_000)
    total = [cost * 10 + 1e6 * k for k, cost in enumerate(plan.planned.curve, start=1)]
    assert len(plan) == 1 + int(np.argmin(total))
    assert sum(plan.planned.padded_elements) == plan.planned.curve[len(plan) - 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": "flops"}, 'cost must be "elements" or a function of sizes and batch sizes, but got .flops.'),
        (
            {"cost": lambda sizes, rows: np.full(len(sizes), np.nan)},
            "the cost of a batch of size .* is nan: costs are 0 or more",
        ),
        (
            {"cost": sb.TableCost((1, 2), (1.0, 2.0))},
            r"the cost of the size \[50\] is not finite: a cost table must reach it",
        ),
        ({"compile_cost": 1.0}, "compile_cost is spread over one of run_samples, run_tokens, run_steps"),
        ({"run_steps": 1.0}, "compile_cost is spread over one of run_samples, run_tokens, run_steps"),
        ({"compile_cost": 1, "run_steps": 0}, "run_steps must be a number above 0, but got 0"),
        ({"cost": None}, "cost must be .elements. or a function of sizes and batch sizes, but got None"),
        (
            {"cost": lambda sizes, rows: sizes},
            r"cost must return one number for each of \d+ sizes, but returned \[\d+, 1\]",
        ),
        ({"compile_cost": "1", "run_steps": 1}, "compile_cost must be a number of 0 or more, but got '1'"),
        ({"compile_cost": -1.0, "run_samples": 1}, "compile_cost must be a number of 0 or more, but got -1.0"),
        ({"include": [0]}, "a boundary of include must be a whole number of at least 1, but got 0"),
        (
            {"include": [12], "multiple_of": 8},
            r"the boundary 12 of include must be a multiple of multiple_of \{'s': 8\}",
        ),
        ({"include": [10, 20], "max_buckets": 2}, "max_buckets 2 is too few: include and the longest samples need 3"),
    ],
)
def test_costs_and_boundaries_that_make_no_sense_are_refused(options, message):
    with pytest.raises(sb.PlanError, match=message):
        sb.plan_buckets([1, 20, 50], batch_size=1, **options)


@pytest.mark.parametrize("square", [False, True])
def test_several_axes_by_another_cost_with_boxes_that_must_be_there(square):
    """Against every choice of boxes from the joint maxima, on small instances."""
    rng = np.random.default_rng(1)
    layout = sb.Layout({"x": "s", "y": "t"})

    def cost(sizes, rows):
        return rows * (sizes**2).sum(axis=1) if square else 5.0 + rows * sizes.prod(axis=1)

    equal = 0
    for _ in range(20):
        shapes = rng.integers(1, 9, (6, 2))
        box = rng.integers(1, 12, 2)
        plan = sb.plan_buckets(
            {"s": shapes[:, 0], "t": shapes[:, 1]},
            layout,
            max_buckets=3,
            batch_size=2,
            cost=cost,
            include=[{"s": box[0], "t": box[1]}],
        )
        assert box.tolist() in plan.sizes.tolist()
        assert len(plan) <= 3
        corners = np.array(list(itertools.product(np.unique(shapes[:, 0]), np.unique(shapes[:, 1]))))
        corners = np.concatenate([corners, box[None]])
        price = cost(corners, np.full(len(corners), 2)) / 2
        pays = np.where((shapes[:, None] <= corners[None]).all(axis=2), price, np.inf)
        choices = itertools.combinations(range(len(corners) - 1), 2)
        best = min(pays[:, [*choice, len(corners) - 1]].min(axis=1).sum() for choice in choices)
        found = plan.assign(shapes)
        paid = sum(np.array(plan.row_costs)[found])
        assert best - 1e-9 <= paid <= 1.02 * best
        assert plan.planned.curve[-1] == pytest.approx(paid)
        equal += paid == pytest.approx(best)
    assert equal >= 19


def test_a_boundary_of_several_axes_is_a_dict():
    lengths, layout = {"s": [1, 5, 9], "t": [9, 5, 1]}, sb.Layout({"x": "s", "y": "t"})
    with pytest.raises(
        sb.PlanError, match=r"include has 4: with the axes \('s', 't'\), a boundary is a dict with a size for each"
    ):
        sb.plan_buckets(lengths, layout, batch_size=1, include=[4])
    with pytest.raises(sb.PlanError, match="max_buckets 1 is too few: include and the longest samples need 2"):
        sb.plan_buckets(lengths, layout, batch_size=1, max_buckets=1, include=[{"s": 4, "t": 4}])
    plan = sb.plan_buckets(lengths, layout, batch_size=1, max_buckets=1, include=[{"s": 20, "t": 20}])
    assert plan.sizes.tolist() == [[20, 20]]


def test_the_number_of_buckets_of_several_axes_follows_from_what_a_compile_costs():
    rng = np.random.default_rng(0)
    lengths = {"s": rng.integers(1, 60, 5000), "t": rng.integers(1, 60, 5000)}
    layout = sb.Layout({"x": "s", "y": "t"})
    counts = [
        len(
            sb.plan_buckets(
                lengths, layout, batch_size=1, multiple_of=4, compile_cost=cost, run_samples=50_000, max_buckets=24
            )
        )
        for cost in (1e9, 3e4, 0)
    ]
    assert counts[0] == 1 < counts[1] < counts[2] == 24


def test_the_run_may_be_told_in_tokens_or_steps():
    lengths = np.random.default_rng(0).integers(1, 500, 10_000)
    by_samples = sb.plan_buckets(lengths, batch_size=4, compile_cost=1e6, run_samples=100_000)
    by_tokens = sb.plan_buckets(lengths, batch_size=4, compile_cost=1e6, run_tokens=10 * int(lengths.sum()))
    by_steps = sb.plan_buckets(lengths, batch_size=4, compile_cost=1e6, run_steps=25_000)
    assert by_samples == by_tokens == by_steps
    budget = sb.plan_buckets(lengths, token_budget=2000, compile_cost=1e6, run_steps=5_000)
    totals = []
    for k in range(1, 65):
        plan = sb.plan_buckets(lengths, token_budget=2000, max_buckets=k)
        each = [count / bucket.batch_size for count, bucket in zip(plan.planned.samples, plan.buckets, strict=True)]
        epochs = 5_000 / sum(each)
        totals.append((sum(plan.planned.padded_elements) * epochs + 1e6 * k) / (epochs * 10_000))
    assert len(budget) == 1 + int(np.argmin(totals)) > 1


def test_the_curve_is_the_padding_of_each_number_of_buckets():
    lengths = np.random.default_rng(0).integers(1, 500, 10_000)
    plan = sb.plan_buckets(lengths, max_buckets=4, batch_size=1)
    each = [sb.plan_buckets(lengths, max_buckets=k, batch_size=1).planned.padding_fraction for k in (1, 2, 3, 4)]
    assert plan.curve == tuple(each)
    assert sb.plan_buckets(lengths, batch_size=1, cost=sb.count_steps).curve == ()
    assert sb.BucketPlan(plan.layout, plan.buckets).curve == ()
    pairs = {"s": lengths, "t": lengths[::-1]}
    two = sb.plan_buckets(pairs, sb.Layout({"x": "s", "y": "t"}), max_buckets=4, batch_size=1, multiple_of=16)
    assert len(two.curve) == 4
    assert list(two.curve) == sorted(two.curve, reverse=True)
    assert two.curve[-1] == two.planned.padding_fraction


def test_boxes_that_the_budget_allows_are_found_though_one_box_for_all_is_none():
    lengths = {"s": [100, 1] + [1] * 1000, "t": [1, 100] + [1] * 1000}
    layout = sb.Layout({"x": "s", "y": "t"})
    two = sb.plan_buckets(lengths, layout, token_budget=150, max_buckets=2)
    assert two.sizes.tolist() == [[1, 100], [100, 1]]
    for cost in ("elements", sb.count_steps):
        three = sb.plan_buckets(lengths, layout, token_budget=150, max_buckets=3, cost=cost)
        assert [1, 1] in three.sizes.tolist()
        assert np.isnan(three.curve[0]) if cost == "elements" else three.curve == ()
        assert (
            sb.BucketPlan.from_json(json.loads(json.dumps(three.to_json(), allow_nan=False))).planned == three.planned
        )
    with pytest.raises(sb.PlanError, match="max_buckets 1 is too few: include and the longest samples need 2"):
        sb.plan_buckets(lengths, layout, token_budget=150, max_buckets=1)
    with pytest.raises(sb.PlanError, match="a token_budget of 100 elements cannot hold 1 row of"):
        sb.plan_buckets(lengths, layout, token_budget=100, max_buckets=3)
    both = [{"s": 100, "t": 1}, {"s": 1, "t": 100}]
    assert len(sb.plan_buckets(lengths, layout, batch_size=1, max_buckets=2, include=both)) == 2


def test_a_number_of_buckets_is_chosen_where_some_are_impossible():
    table = sb.TableCost(np.array([1, 5, 10, 12, 20]), np.array([1.0, 9.0, 9.0, 2.0, 4.0]))
    for run in ({"run_steps": 10}, {"run_samples": 10}, {"run_tokens": 100}):
        plan = sb.plan_buckets([5, 10, 20], cost=table, batch_size=1, include=[5, 10], compile_cost=1.0, **run)
        assert {5, 10} < set(plan.sizes[:, 0].tolist())
    with pytest.raises(sb.PlanError, match="a token_budget of 5 elements cannot hold 1 row"):
        sb.plan_buckets([10], token_budget=5, compile_cost=1.0, run_steps=10)
    assert len(sb.plan_buckets([0, 0], batch_size=1, compile_cost=1.0, run_tokens=10)) == 1


def test_a_boundary_that_must_be_there_may_not_be_beyond_the_limit():
    with pytest.raises(sb.PlanError, match=r"the boundary 16 of include is beyond max_size \{'s': 8\}"):
        sb.plan_buckets([1, 4, 20, 20], max_size=8, include=[16], batch_size=1)
    with pytest.raises(sb.PlanError, match="include must be a list of boundaries, but got 512"):
        sb.plan_buckets([1, 4], include=512, batch_size=1)


def test_more_elements_than_can_be_counted_are_refused():
    shapes = np.array([[1000, 2000, 2000], [10_000, 4000, 4000]], np.int32)
    many = sb.LengthHistogram(("t", "h", "w"), shapes, np.array([50_000_000, 100_000_000]))
    with pytest.raises(
        sb.LengthsError, match="are more elements than 64 bits can count: plan from a part of the samples"
    ):
        sb.plan_buckets(many, sb.Layout({"x": "t h w"}), batch_size=1)


def test_a_histogram_is_enough_to_plan_from():
    lengths = np.random.default_rng(0).integers(0, 300, 5000)
    table = sb.LengthTable.of(lengths, ["s"])
    options = {"max_buckets": 5, "token_budget": 1024, "multiple_of": 4, "max_size": 256}
    assert sb.plan_buckets(table.histogram, **options) == sb.plan_buckets(lengths, **options)
    assert sb.plan_buckets(table.histogram, **options).planned == sb.plan_buckets(lengths, **options).planned


def test_a_cost_table_must_be_one():
    with pytest.raises(sb.PlanError, match="ascending lengths and one cost for each"):
        sb.TableCost((2, 1), (1.0, 1.0))
    with pytest.raises(sb.PlanError, match="must be positive numbers"):
        sb.TableCost((1, 2), (1.0, 0.0))
