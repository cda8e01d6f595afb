"""What a step costs by size, as the planner takes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shapebucket as sb
from shapebucket.planner.measured import MeasuredCost

LAYOUT = sb.Layout({"x": "float32[s]"})
PAIRS = sb.Layout({"a": "float32[s]", "b": "float32[t]"})
STATE = jnp.ones((16, 16))
LENGTHS = np.minimum(np.random.default_rng(0).lognormal(3.5, 1, 2000).astype(int) + 1, 256)


def attention(state, batch):
    x = batch["x"][:, :, None] * state[0]
    weights = jax.nn.softmax(jnp.einsum("blw,bmw->blm", x @ state, x), axis=-1)
    return state + (weights @ x).sum(), weights.sum()


def measured(grid, cost, layout=LAYOUT, rows=3):
    """A grid measured without error: cost is of a row."""
    points = np.array(np.meshgrid(*grid, indexing="ij")).reshape(len(grid), -1)
    return MeasuredCost(
        layout, tuple(map(tuple, grid)), (rows,) * points.shape[1], tuple(rows * cost(*points)), "seconds"
    )


@pytest.mark.parametrize(
    ("row_cost", "error"),
    [
        (lambda s: 3.0 * s, 1e-9),
        (lambda s: 0.1 * s**2, 1e-9),
        (lambda s: 5.0 + 0 * s, 1e-9),
        *[(lambda s, b=b: s + b * s**2, 0.02) for b in (0.001, 0.01, 0.1)],
        (lambda s: 100.0 + s, 0.02),
    ],
)
def test_sizes_between_those_measured_are_priced_by_a_power(row_cost, error):
    cost = measured([[4, 8, 16, 32, 64, 128, 256]], row_cost)
    sizes = np.arange(4, 257)
    found = cost(sizes[:, None], np.full(len(sizes), 7))
    np.testing.assert_allclose(found, 7 * row_cost(sizes), rtol=error)
    assert found[0] == pytest.approx(cost(np.array([[1]]), np.array([7]))[0])
    assert np.isinf(cost(np.array([[257]]), np.array([1])))[0]


def test_several_axes_are_priced_on_a_grid():
    def row_cost(s, t):
        return s + 2.0 * t + 0.01 * s * t

    cost = measured([[8, 16, 32, 64], [8, 16, 32]], row_cost, PAIRS)
    s, t = np.meshgrid(np.arange(8, 65), np.arange(8, 33))
    sizes = np.stack([s.ravel(), t.ravel()], axis=1)
    found = cost(sizes, np.full(len(sizes), 2))
    np.testing.assert_allclose(found, 2 * row_cost(*sizes.T), rtol=0.04)
    np.testing.assert_allclose(cost(cost.sizes, np.array(cost.batch_sizes)), cost.costs)
    plan = sb.plan_buckets({"s": [9, 60, 30], "t": [30, 9, 10]}, PAIRS, max_buckets=2, token_budget=256, cost=cost)
    assert len(plan) == 2
    with pytest.raises(sb.PlanError, match="the cost was measured on 2 axes, but the layout has 1"):
        sb.plan_buckets([3, 9], LAYOUT, batch_size=2, cost=cost)


def test_one_size_is_enough_where_all_cost_alike():
    cost = MeasuredCost(LAYOUT, ((16,),), (4,), (8.0,), "flops")
    assert cost(np.array([[3], [16], [17]]), np.array([1, 2, 1])).tolist() == pytest.approx([2.0, 4.0, np.inf])


@pytest.mark.parametrize(
    ("grid", "rows", "costs", "message"),
    [
        (((8, 4),), (1, 1), (1.0, 1.0), "grid needs ascending sizes for each of the axes"),
        (((4,), (4,)), (1,), (1.0,), "grid needs ascending sizes for each of the axes"),
        (((4, 8),), (1,), (1.0,), "the grid has 2 sizes, each of which needs a batch size and a cost"),
        (((4,),), (0,), (1.0,), "the grid has 1 sizes, each of which needs a batch size and a cost"),
        (((4,),), (1,), (0.0,), "measured costs must be positive numbers"),
    ],
)
def test_a_grid_must_be_one(grid, rows, costs, message):
    with pytest.raises(sb.PlanError, match=message):
        MeasuredCost(LAYOUT, grid, rows, costs, "seconds")


def price(plan, cost):
    """What the samples of a plan cost."""
    return float(np.array(plan.planned.samples) @ (cost(plan.sizes, plan.batch_sizes) / plan.batch_sizes))


def test_a_plan_by_flops_costs_fewer_flops_than_one_by_elements():
    options = {"max_buckets": 4, "token_budget": 512, "multiple_of": 4}
    tokens = sb.plan_buckets(LENGTHS, LAYOUT, **options)
    with sb.CompileCounter() as compiles:
        cost = sb.measure_costs(
            attention,
            tokens,
            jax.eval_shape(lambda: STATE),
            sb.BATCH,
            by="flops",
            donate_argnames="state",
            progress=False,
        )
    assert compiles.by_function["jit(attention)"] == len(cost.costs) <= 6
    assert cost.grid[0][0] == tokens.sizes.min()
    assert cost.grid[0][-1] == tokens.sizes.max()
    assert not any(size % 4 for size in cost.grid[0])
    plan = sb.plan_buckets(LENGTHS, LAYOUT, cost=cost, **options)
    assert price(plan, cost) < price(tokens, cost)
    for bucket in plan.buckets:  # what was interpolated is what XLA counts
        own = sb.BucketPlan(LAYOUT, [bucket])
        (made,) = sb.CompiledStep(attention, own).compile(STATE, sb.BATCH, progress=False).executables
        assert made.cost.flops == pytest.approx(float(cost(own.sizes, own.batch_sizes)[0]), rel=0.05)
    lines = str(cost).splitlines()
    assert lines[0] == f"flops measured at {len(cost.costs)} sizes"
    assert lines[1].split() == ["s", "rows", "flops", "a", "step", "a", "row", "an", "element"]
    assert lines[-1].startswith("an element costs ")


def test_seconds_are_medians_of_rounds_and_leave_the_state_alone():
    tokens = sb.plan_buckets(LENGTHS, LAYOUT, max_buckets=3, token_budget=512)
    state = jnp.ones((16, 16))
    seen = []

    def prepare(batch):
        seen.append(batch)
        return batch

    def fn(state, key, batch, *, scale):
        return attention(state * scale, batch)[0], jax.random.split(key)[0]

    cost = sb.measure_costs(
        fn,
        tokens,
        state,
        jax.random.key(0),
        sb.BATCH,
        scale=2,
        sizes=[32, 256, 32],
        rounds=3,
        donate_argnums=(0, 1),
        static_argnames="scale",
        prepare=prepare,
        progress=False,
    )
    assert cost.grid == ((32, 256),)
    assert cost.unit == "seconds"
    assert all(low <= each <= high for each, (low, high) in zip(cost.costs, cost.spread, strict=True))
    assert not state.is_deleted()
    assert [(batch["x"].shape, batch["s_mask"].all()) for batch in seen] == [
        ((cost.batch_sizes[0], 32), True),
        ((cost.batch_sizes[1], 256), True),
    ]
    assert "spread" in str(cost)
    sb.plan_buckets(LENGTHS, LAYOUT, max_buckets=3, token_budget=512, cost=cost)


def test_rows_are_those_that_the_plan_would_have():
    def rows(plan, sizes):
        return sb.measure_costs(lambda batch: batch["x"].sum(), plan, sb.BATCH, sizes=sizes, by="flops", progress=False)

    fixed = sb.plan_buckets(LENGTHS, LAYOUT, max_buckets=3, batch_size=8)
    assert rows(fixed, [16, 300]).batch_sizes == (8, 8)
    budget = sb.plan_buckets(LENGTHS, LAYOUT, max_buckets=3, token_budget=2048, batch_multiple_of=4)
    assert rows(budget, [256, 2048]).batch_sizes == (8, 4)


def test_two_axes_are_measured_on_a_grid():
    plan = sb.BucketPlan(PAIRS, [sb.Bucket((("s", s), ("t", t)), 4) for s, t in ((8, 8), (16, 64), (64, 16))])
    cost = sb.measure_costs(
        lambda batch: (batch["a"][:, :, None] * batch["b"][:, None, :]).sum(),
        plan,
        sb.BATCH,
        by="flops",
        progress=False,
    )
    assert cost.grid == ((8, 24, 64), (8, 24, 64))
    assert len(cost.costs) == 9
    assert str(cost).splitlines()[1].split()[:3] == ["s", "t", "rows"]


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((STATE, sb.BATCH), {"by": "bytes"}, r"by must be one of \('seconds', 'flops'\), but is 'bytes'"),
        ((STATE, sb.BATCH), {"rounds": 0}, "rounds must be at least 1, but is 0"),
        ((STATE, sb.BATCH), {"sizes": [0]}, r"sizes must be whole numbers of at least 1, but those of 's' are \[0\]"),
        (
            (STATE, sb.BATCH),
            {"sizes": {"t": [4]}},
            r"sizes must have a list for each of the axes \('s',\), but is for \('t',\)",
        ),
        (
            (jax.ShapeDtypeStruct((16, 16), "float32"), sb.BATCH),
            {},
            "'state' is a ShapeDtypeStruct, which cannot run: give",
        ),
        ((sb.OneOf(1, 2), sb.BATCH), {"static_argnums": 0}, "takes one value of each static argument"),
        ((STATE,), {}, r"measure_costs\(\) needs BATCH in the batch's place, once"),
    ],
)
def test_arguments_that_cannot_be_are_refused(args, options, message):
    plan = sb.plan_buckets(LENGTHS, LAYOUT, max_buckets=1, batch_size=2)
    with pytest.raises(sb.StepError, match=message):
        sb.measure_costs(attention, plan, *args, progress=False, **options)


def test_a_step_that_computes_nothing_has_no_flops():
    plan = sb.plan_buckets(LENGTHS, LAYOUT, max_buckets=1, batch_size=2)
    with pytest.raises(sb.StepError, match=r"XLA counts no flops for \[2 × s=256\] on this device \(cpu\): say by="):
        sb.measure_costs(lambda batch: batch["x"], plan, sb.BATCH, by="flops", progress=False)


def test_a_batch_that_xla_refuses_is_named():
    def fn(batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")

    plan = sb.plan_buckets(LENGTHS, LAYOUT, max_buckets=1, batch_size=2)
    with pytest.raises(sb.BudgetError, match=r"\[2 × s=256\] is too large for the device, as XLA finds: give sizes="):
        sb.measure_costs(fn, plan, sb.BATCH, by="flops", progress=False)
