"""The largest batch that fits, by compiling alone."""

import dataclasses
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shapebucket as sb
from shapebucket.step.sizing import _Search, _Trend

LAYOUT = sb.Layout({"x": "float32[s]"})
WIDTH = 32


def plan_of(*sizes, rows=4, multiple=1):
    return sb.BucketPlan(LAYOUT, [sb.Bucket((("s", size),), rows) for size in sizes], batch_multiple_of=multiple)


def attention(state, batch):
    """One layer of attention with its gradient: memory of the rows times the square of the length."""

    def loss(w):
        x = batch["x"][:, :, None] * w[0]
        scores = jnp.einsum("blw,bmw->blm", x @ w, x)
        weights = jax.nn.softmax(jnp.where(batch["s_mask"][:, None, :], scores, -1e9), axis=-1)
        return (weights @ x).sum()

    value, slope = jax.value_and_grad(loss)(state)
    return state - 0.01 * slope, value


STATE = jnp.ones((WIDTH, WIDTH))


def with_rows(plan, rows):
    buckets = [dataclasses.replace(each, batch_size=size) for each, size in zip(plan.buckets, rows, strict=True)]
    return dataclasses.replace(plan, buckets=buckets)


def assert_exact(fn, fit, *args, **options):
    """Each bucket of the plan fits, by what CompiledStep compiles, and no bucket does with one multiple more."""
    budget, plan = fit.budget_bytes, fit.plan
    made = sb.CompiledStep(fn, plan, memory_budget=budget, **options).compile(*args, progress=False).executables
    assert [each.cost.peak_bytes for each in made] == [each.peak_bytes for each in fit.buckets]
    more = with_rows(plan, plan.batch_sizes + plan.batch_multiple_of)
    made = sb.CompiledStep(fn, more, memory_budget=1 << 50, **options).compile(*args, progress=False).executables
    assert [each.cost.peak_bytes for each in made] == [each.next_peak_bytes for each in fit.buckets]
    assert min(each.cost.peak_bytes for each in made) > budget


def test_the_largest_batch_of_each_bucket_is_found_in_few_compiles():
    plan = plan_of(8, 32, 96)
    with sb.CompileCounter() as compiles:
        fit = sb.fit_batch_sizes(attention, plan, 4_000_000, STATE, sb.BATCH, donate_argnames="state", progress=False)
    assert compiles.by_function["jit(attention)"] == fit.compiles == sum(each.compiles for each in fit.buckets)
    assert fit.compiles <= 4 * len(plan)
    assert fit.plan.buckets == tuple(each.bucket for each in fit.buckets)
    np.testing.assert_array_equal(fit.plan.sizes, plan.sizes)
    assert_exact(attention, fit, STATE, sb.BATCH, donate_argnames="state")
    again = sb.fit_batch_sizes(attention, plan, 4_000_000, STATE, sb.BATCH, donate_argnames="state", progress=False)
    assert again == fit


def test_memory_that_does_not_depend_on_the_rows_is_taken_for_what_it_is():
    def fn(table, batch):
        large = jnp.outer(table, table)  # 4 MB, whatever the batch
        return (large @ large).sum() + (batch["x"] ** 2).sum(axis=1)[:, None] * jnp.ones(100)

    table = jnp.ones(1000)
    fit = sb.fit_batch_sizes(fn, plan_of(16, 64), 10_000_000, table, sb.BATCH, progress=False)
    assert fit.compiles <= 10
    assert fit.plan.batch_sizes.min() > 100
    assert_exact(fn, fit, table, sb.BATCH)


def test_batch_sizes_are_multiples_of_the_plans():
    plan = plan_of(32, rows=12, multiple=6)
    fit = sb.fit_batch_sizes(attention, plan, 2_000_000, STATE, sb.BATCH, progress=False)
    assert fit.plan.batch_multiple_of == 6
    assert not (fit.plan.batch_sizes % 6).any()
    assert_exact(attention, fit, STATE, sb.BATCH)
    assert "with 6 more rows" in str(fit)


def test_the_rows_have_a_limit():
    """Also where the memory does not grow with them: jit drops an argument that is not used."""
    plan = plan_of(8, rows=2)
    fit = sb.fit_batch_sizes(
        lambda state, batch: state + 1, plan, 1_000_000, STATE, sb.BATCH, max_batch_size=999, progress=False
    )
    assert fit.plan.batch_sizes.tolist() == [999]
    assert fit.buckets[0].next_peak_bytes is None
    assert fit.compiles <= 4
    assert str(fit).splitlines()[-1].split() == ["[999", "×", "s=8]", "0.0078", "0.8%", "–", "4"]


def test_the_options_of_the_step_are_heeded():
    def fn(batch, state, *, wide):
        return state + batch["doubled"].sum() * (jnp.outer(batch["x"].ravel(), batch["x"].ravel()).sum() if wide else 1)

    def prepare(batch):
        return {**batch, "doubled": np.concatenate([batch["x"], batch["x"]], axis=1)}

    options = {"donate_argnums": 1, "static_argnames": "wide", "prepare": prepare}
    shape = jax.ShapeDtypeStruct((100, 100), jnp.float32)
    args = {"state": shape, "batch": sb.BATCH}
    budgeted = {
        wide: sb.fit_batch_sizes(fn, plan_of(16), 1_000_000, **args, wide=wide, **options, progress=False)
        for wide in (False, True, sb.OneOf(False, True))
    }
    narrow, wide, both = budgeted.values()
    assert both.plan == wide.plan
    assert narrow.plan.batch_sizes[0] > wide.plan.batch_sizes[0]
    step = sb.CompiledStep(fn, narrow.plan, **options)
    (made,) = step.compile(**args, wide=False, progress=False).executables
    assert made.cost.peak_bytes == narrow.buckets[0].peak_bytes


SHARDED = """
import jax, jax.numpy as jnp
import shapebucket as sb

mesh = jax.make_mesh((2,), ("data",))
data, everywhere = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (["data"], []))
layout = sb.Layout({"x": "float32[s]"})
plan = sb.BucketPlan(layout, [sb.Bucket((("s", size),), 4) for size in (16, 64)], batch_multiple_of=2)
state = jax.device_put(jnp.ones(1000), everywhere)
fn = lambda state, batch: state + jnp.outer(batch["x"].sum(1), state).sum()
one = sb.fit_batch_sizes(fn, plan, 200_000, state, sb.BATCH, batch_sharding=data, progress=False)
single = sb.fit_batch_sizes(fn, plan, 200_000, jnp.ones(1000), sb.BATCH, progress=False)
made = sb.CompiledStep(fn, one.plan, batch_sharding=data).compile(state, sb.BATCH, progress=False)
assert [each.cost.peak_bytes for each in made.executables] == [each.peak_bytes for each in one.buckets]
print(*one.plan.batch_sizes, *single.plan.batch_sizes)
"""


@pytest.mark.slow
def test_a_batch_over_two_devices_has_twice_the_rows():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, check=False, env=environment)
    assert not done.returncode, done.stderr
    two = np.array(done.stdout.split(), int).reshape(2, 2)
    assert (abs(two[0] - 2 * two[1]) <= 4).all(), two


def test_a_bucket_of_which_no_batch_fits_is_named():
    with pytest.raises(sb.BudgetError) as caught:
        sb.fit_batch_sizes(attention, plan_of(8, 256, rows=4, multiple=2), 300_000, STATE, sb.BATCH, progress=False)
    assert caught.match(
        r"^the least batch, \[2 × s=256\], needs [\d.]+ MiB \(arguments 0\.0\d+, temporaries [\d.]+, outputs "
    )
    assert caught.match(r"but memory_budget is 0\.29 MiB: raise it, donate the state, recompute with jax\.checkpoint")
    assert caught.match(r"A batch is a multiple of the plan's batch_multiple_of, 2$")


def test_what_xla_refuses_does_not_fit():
    def fn(batch):
        if batch["x"].shape[0] > 100:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")
        return batch["x"].sum()

    fit = sb.fit_batch_sizes(fn, plan_of(8, rows=300), 1 << 40, sb.BATCH, progress=False)
    assert fit.plan.batch_sizes.tolist() == [100]
    assert fit.buckets[0].next_peak_bytes == math.inf
    assert fit.compiles <= 12

    def never(batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")

    with pytest.raises(sb.BudgetError, match="needs more than XLA finds on the device, but memory_budget is"):
        sb.fit_batch_sizes(never, plan_of(8), 1 << 40, sb.BATCH, progress=False)


def test_an_error_of_the_step_names_the_bucket():
    with pytest.raises(KeyError) as caught:
        sb.fit_batch_sizes(lambda batch: batch["y"], plan_of(8), 1000, sb.BATCH, progress=False)
    assert caught.value.__notes__[-1] == "shapebucket: while compiling the step for [4 × s=8]"


def test_the_plan_is_the_same_but_for_the_rows():
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    layout = sb.Layout({"x": "float32[s]"})
    for cost in ("elements", sb.PolynomialCost(1, 0.1, 5)):
        plan = sb.plan_buckets(lengths, layout, max_buckets=3, token_budget=1024, cost=cost, masks="length")
        fit = sb.fit_batch_sizes(
            lambda batch: jnp.outer(batch["x"], batch["x"]).sum(), plan, 40_000_000, sb.BATCH, progress=False
        )
        assert (fit.plan.layout, fit.plan.masks, fit.plan.row_costs) == (plan.layout, plan.masks, plan.row_costs)
        report = fit.plan.report(lengths)
        assert fit.plan.planned.batches == report.batches
        assert fit.plan.planned.padded_elements == report.padded_elements
        assert fit.plan.planned.buckets == report.buckets
        assert fit.plan.curve == plan.curve
        assert (fit.plan.planned.curve == ()) == (cost != "elements")


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (
            (None, sb.BATCH),
            {},
            r"the device \(cpu\) does not say what it may hold: give the memory_budget in bytes after",
        ),
        ((1.5, sb.BATCH), {}, r"memory_budget must be a whole number of at least 1, but got 1.5"),
        ((1000, sb.BATCH), {"max_batch_size": 1}, "max_batch_size 1 is below the plan's batch_multiple_of 2"),
        ((1000,), {}, r"fit_batch_sizes\(\) needs BATCH in the batch's place; it stands in none"),
    ],
)
def test_arguments_that_cannot_be_are_refused(args, options, message):
    def fn(batch, *rest):
        return batch["x"]

    with pytest.raises(sb.StepError, match=message):
        sb.fit_batch_sizes(fn, plan_of(8, multiple=2), *args, **options)


def test_a_step_with_an_argument_of_the_same_name_is_refused():
    with pytest.raises(
        sb.StepError, match=r"the step has an argument 'prepare', which fit_batch_sizes\(\) means for itself"
    ):
        sb.fit_batch_sizes(lambda batch, prepare: 1, plan_of(8), 1000, sb.BATCH, 1)
    with pytest.raises(
        sb.StepError, match=r"fit_batch_sizes\(\) takes a BucketPlan after the function, but got Layout"
    ):
        sb.fit_batch_sizes(attention, LAYOUT, 1000, STATE, sb.BATCH)


@given(
    budget=st.integers(1, 10**9),
    fixed=st.integers(0, 10**9),
    slope=st.floats(0, 10**7),
    power=st.floats(0.3, 3),
    steps=st.integers(1, 10**6),
    most=st.integers(1, 1 << 20),
    first=st.integers(1, 1 << 20),
    told=st.integers(0, 10**9),
    refused=st.integers(1, 1 << 21),
)
def test_the_search_is_exact_for_any_growth(budget, fixed, slope, power, steps, most, first, told, refused):
    """Bytes that grow in steps and by any power of the rows, and a compiler that refuses from some batch on."""

    def cost(units):
        if units >= refused:
            return None
        return sb.Cost(None, int(fixed + slope * units**power) // steps * steps, 0, 0, 0, 0)

    search = _Search(budget, most, first, float(min(told, budget)))
    while (units := search.next()) is not None:
        assert units not in search.costs
        search.costs[units] = cost(units)
    fits = search.fits
    assert 0 <= fits <= most
    assert not fits or search.peak(fits) <= budget
    assert fits == most or search.peak(fits + 1) > budget
    assert len(search.costs) <= 50


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(1.0, 1e9)), max_size=4),
    st.integers(1, 10**6),
    st.floats(0.0, 1e9),
)
def test_what_other_buckets_tell_is_never_wild(slopes, elements, fixed):
    """Buckets of nearly as many elements tell no power; and none above that of attention is believed."""
    trend = _Trend(10**9, fixed, slopes)
    units = trend.units(elements)
    if not slopes:
        assert units == 0
        return
    last, at_last = slopes[-1]
    ratio = last / elements
    assert 0 <= units <= (10**9 - fixed) / at_last * max(ratio**0.5, ratio**2) + 1


def test_buckets_of_nearly_as_many_elements_on_two_axes():
    layout = sb.Layout({"a": "float32[s]", "b": "float32[t]"})
    for sizes in ([(512, 8), (8, 510), (8, 8)], [(8, 512), (510, 8), (8, 8)]):
        plan = sb.BucketPlan(layout, [sb.Bucket((("s", s), ("t", t)), 4) for s, t in sizes])
        fit = sb.fit_batch_sizes(
            lambda batch: jnp.tanh(batch["a"]).sum(1) * jnp.tanh(batch["b"]).sum(1),
            plan,
            2**20,
            sb.BATCH,
            progress=False,
        )
        assert all(each.peak_bytes <= 2**20 for each in fit.buckets)
