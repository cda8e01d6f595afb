"""What makes `jit` compile anew, row by row, and what a compiled step says to each."""

import collections
import logging
import os
import subprocess
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shapebucket as sb

PLAN = sb.BucketPlan(sb.Layout({"x": "float32[s]"}), [sb.Bucket((("s", size),), 4) for size in (2, 8)])
SMALL, LARGE = PLAN.buckets
BATCH = sb.pad([{"x": np.arange(2, dtype=np.float32)}], SMALL, PLAN)


class TraceCounter:
    """Counts what `jit` traces: each new entry of its cache that is more than another way to the same program."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event, _seconds, **_):
        self.count += event in ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration")


def scaled(state, batch):
    leaf = jax.tree.leaves(state)[0]
    return jax.tree.map(lambda each: each, state), leaf * batch["x"].sum()


def both(state, batch=BATCH, *, fn=scaled):
    """Returns the function jitted and called once, and the step compiled for the same."""

    def own(state, batch):  # two jits of one function share their entries
        return fn(state, batch)

    jitted = jax.jit(own)
    jitted(state, batch)
    step = sb.CompiledStep(own, PLAN)
    step.compile(state, sb.BATCH, progress=False)
    return jitted, step


def one():
    return {"w": jnp.ones(3), "n": None}


ALIKE = {
    "the order of a dict": (one, lambda: ({"n": None, "w": jnp.ones(3)}, dict(reversed(BATCH.items())))),
    "numpy's strides": (one, lambda: (one(), {**BATCH, "x": np.zeros((2, 4), np.float32).T})),
    "64 bits, where they are off": (one, lambda: (one(), {**BATCH, "x": BATCH["x"].astype(np.float64)})),
    "the value of a Python float": (lambda: 1.0, lambda: (2.0, BATCH)),
    "numpy for a JAX array": (one, lambda: ({"w": np.ones(3, np.float32), "n": None}, BATCH)),
    "a JAX array for numpy": (one, lambda: (one(), jax.device_put(BATCH))),
}


@pytest.mark.parametrize("row", ALIKE)
def test_what_compiles_nothing_new_passes(row):
    before, after = ALIKE[row]
    jitted, step = both(before())
    args = after()
    with sb.CompileCounter() as compiles:
        expected = jitted(*args)
    assert compiles.count == 0
    with TraceCounter() as traces:
        found = step(*args)
    assert traces.count == 0
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("setting", [jax.debug_nans, jax.log_compiles])
def test_settings_that_compile_nothing_new_pass(setting, caplog):
    jitted, step = both(one())
    with caplog.at_level(logging.CRITICAL), setting(True), TraceCounter() as traces:
        jitted(one(), BATCH)
        step(one(), BATCH)
    assert traces.count == 0


REFUSED = {
    "a shape": (one, lambda: {"w": jnp.ones(4), "n": None}, "state['w']: float32[4] received, float32[3] expected"),
    "a dtype": (
        one,
        lambda: {"w": jnp.ones(3, jnp.bfloat16), "n": None},
        "state['w']: bfloat16[3] received, float32[3] expected",
    ),
    "a Python int for a float": (lambda: 1.0, lambda: 1, "state: int32[] received, float32[] expected"),
    "a Python int for a bool": (lambda: True, lambda: 1, "state: int32[] received, bool[] expected"),
    "an array for None": (
        one,
        lambda: {"w": jnp.ones(3), "n": jnp.ones(())},
        "state['n']: float32[] received, nothing expected",
    ),
    "a key more": (one, lambda: {**one(), "more": jnp.ones(())}, "state['more']: float32[] received, nothing expected"),
    "a list for a tuple": (
        lambda: (jnp.ones(3),),
        lambda: [jnp.ones(3)],
        "state: the containers PyTreeDef([*]) received, PyTreeDef((*,)) expected",
    ),
    "an OrderedDict for a dict": (
        one,
        lambda: collections.OrderedDict(n=None, w=jnp.ones(3)),
        "state: the containers PyTreeDef(CustomNode(OrderedDict[('n', 'w')], [None, *])) received, "
        "PyTreeDef({'n': None, 'w': *}) expected",
    ),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_compiles_anew_is_refused_by_leaf(row):
    before, after, line = REFUSED[row]
    jitted, step = both(before())
    state = after()
    with pytest.raises(sb.SignatureError) as caught, TraceCounter() as traces:
        step(state, BATCH)
    assert traces.count == 0
    assert caught.value.differences == [line]
    with TraceCounter() as traces:
        jitted(state, BATCH)
    assert traces.count > 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (jnp.float32(1), jnp.asarray(1.0)),  # a weak type
        (jnp.float32(1), 1.0),
        (1.0, jnp.float32(1)),
        (jnp.float32(1), jax.device_put(jnp.float32(1), jax.devices()[0])),  # committed
    ],
)
def test_what_compiles_anew_and_is_taken_passes(before, after):
    """As the class's documentation declares."""
    jitted, step = both(before)
    with TraceCounter() as traces:
        expected = jitted(after, BATCH)[1]
    assert traces.count > 0
    with TraceCounter() as traces:
        found = step(after, BATCH)[1]
    assert traces.count == 0
    assert float(found) == float(expected)


SETTINGS = {
    "jax_default_matmul_precision": lambda: jax.default_matmul_precision("highest"),
    "jax_enable_x64": lambda: jax.enable_x64(True),
    "jax_numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "jax_numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "jax_default_device": lambda: jax.default_device(jax.devices()[0]),
    "jax_threefry_partitionable": lambda: jax.threefry_partitionable(False),
    "the mesh of jax.set_mesh": lambda: jax.set_mesh(
        jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_is_refused_by_name(name):
    jitted, step = both(one())
    with SETTINGS[name]():
        with TraceCounter() as traces:
            jitted(one(), BATCH)
        assert traces.count > 0
        with pytest.raises(
            sb.SignatureError, match=r"JAX's settings are not those that the step was compiled under"
        ) as caught:
            step(one(), BATCH)
        (line,) = caught.value.differences
        assert line.startswith(f"{name} is ")
    step(one(), BATCH)


def test_jaxs_own_tuple_of_settings_is_where_it_was():
    from jax._src import config

    from shapebucket.step import _jax_private

    assert _jax_private.configuration is config.trace_context
    assert _jax_private._public_settings() == _jax_private._public_settings()
    with jax.default_matmul_precision("highest"):
        changed = _jax_private._public_settings()
    assert changed != _jax_private._public_settings()


def test_a_step_compiled_under_a_setting_runs_under_it():
    with jax.default_matmul_precision("highest"):
        _, step = both(one())
        step(one(), BATCH)
    with pytest.raises(sb.SignatureError, match="jax_default_matmul_precision is None, and was 'highest'"):
        step(one(), BATCH)


class Config:
    """Hashed by identity."""


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (1, 2, "2"),
        (1, True, "True"),
        (float("nan"), float("nan"), "nan"),
        (Config(), Config(), "<"),
        ("gelu", "relu", "'relu'"),
    ],
)
def test_another_static_value_is_refused(before, after, shown):
    def fn(batch, kind):
        return batch["x"].sum() * (2 if kind is after else 3)

    jitted = jax.jit(fn, static_argnames="kind")
    jitted(BATCH, before)
    with TraceCounter() as traces:
        jitted(BATCH, after)
    assert traces.count > 0
    step = sb.CompiledStep(fn, PLAN, static_argnames="kind")
    step.compile(sb.BATCH, before, progress=False)
    assert float(step(BATCH, before)) == 3
    with pytest.raises(sb.SignatureError, match="compiled for other static values") as caught:
        step(BATCH, after)
    assert caught.value.differences[0].startswith(f"kind={shown}")


def test_there_is_an_executable_for_each_declared_static_value():
    def fn(state, batch, *, train, depth):
        return state + batch["x"].sum() * (depth if train else 0)

    step = sb.CompiledStep(fn, PLAN, static_argnames=("train", "depth"))
    report = step.compile(
        jnp.float32(0), sb.BATCH, train=sb.OneOf(True, False, True), depth=sb.OneOf(1, 2), progress=False
    )
    assert len(step.executables) == len(report.executables) == 8
    assert len(report.seconds) == 2
    for train in (True, False):
        for depth in (1, 2):
            state = jnp.float32(1)
            with TraceCounter() as traces:
                found = step(state, BATCH, train=train, depth=depth)
            assert traces.count == 0
            assert float(found) == 1 + (depth if train else 0)
    assert str(report.executables[1]) == "[4 × s=2], train=True, depth=2"
    with pytest.raises(sb.SignatureError, match="depth=3 received"):
        step(jnp.float32(1), BATCH, train=True, depth=3)
    with pytest.raises(sb.SignatureError, match="a static argument cannot be hashed"):
        step(jnp.float32(1), BATCH, train=[], depth=1)
    with pytest.raises(sb.SignatureError, match="call it as compile"):
        step(jnp.float32(1), BATCH, train=True)


def test_static_numbers_and_names_mean_the_same_argument():
    def fn(scale, batch, power):
        return scale * batch["x"].sum() ** power

    for options in ({"static_argnums": 2}, {"static_argnums": (-1,)}, {"static_argnames": "power"}):
        step = sb.CompiledStep(fn, PLAN, **options)
        step.compile(jnp.float32(2), sb.BATCH, 2, progress=False)
        assert float(step(jnp.float32(3), BATCH, 2)) == 3
        with pytest.raises(sb.SignatureError, match="power=3 received"):
            step(jnp.float32(3), BATCH, 3)
    step = sb.CompiledStep(fn, PLAN, static_argnums=2)
    step.compile(jnp.float32(2), batch=sb.BATCH, power=2, progress=False)
    assert float(step(jnp.float32(3), batch=BATCH, power=2)) == 3
    first = sb.CompiledStep(lambda kind, batch: batch["x"].sum() * kind, PLAN, static_argnums=0)
    first.compile(4, sb.BATCH, progress=False)
    assert float(first(4, BATCH)) == 4


def test_static_arguments_that_cannot_be_are_refused():
    step = sb.CompiledStep(lambda batch, kind: batch["x"].sum() * kind, PLAN, static_argnames="kind")
    with pytest.raises(sb.StepError, match="the static argument 1 cannot be hashed"):
        step.compile(sb.BATCH, [], progress=False)
    with pytest.raises(sb.StepError, match="OneOf is for static arguments, but argument 0 is none"):
        sb.CompiledStep(scaled, PLAN).compile(sb.OneOf(1, 2), sb.BATCH, progress=False)
    with pytest.raises(sb.StepError, match=r"OneOf\(\) needs at least one value"):
        sb.OneOf()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_miss": "ignore"}, 'on_miss is \'ignore\'; it may be "error", "compile" or "evict"'),
        ({"strict": True}, 'strict is True; it may be None or "weak_type"'),
        ({"max_executables": 0}, "max_executables must be a whole number of at least 1, but got 0"),
        ({"memory_budget": 0}, "memory_budget must be a whole number of at least 1, but got 0"),
        ({"max_executables": 2.5}, "max_executables must be a whole number of at least 1, but got 2.5"),
        ({"on_miss": "compile"}, 'on_miss="compile" needs max_executables=: all of the buckets are there'),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(sb.StepError, match=message):
        sb.CompiledStep(scaled, PLAN, **options)


def test_an_argument_that_compile_means_for_itself_is_refused():
    with pytest.raises(sb.StepError, match="the step has an argument 'threads', which compile.. means for itself"):
        sb.CompiledStep(lambda batch, threads: batch["x"] * threads, PLAN)


DRIFTS = {
    "a weak counter made an int": (
        {"n": jnp.int32(0)},
        lambda state: {"n": state["n"] + 0.5},
        "state['n']: int32[] taken, float32[] (weak) returned (dtype: an array or numpy number of a wider dtype promoted it",
    ),
    "bf16 promoted": (
        {"w": jnp.ones(2, jnp.bfloat16)},
        lambda state: {"w": state["w"] * jnp.float32(2)},
        "state['w']: bfloat16[2] taken, float32[2] returned (dtype: ",
    ),
    "None became an array": (
        {"w": jnp.ones(2), "ema": None},
        lambda state: {"w": state["w"], "ema": state["w"]},
        "state['ema']: nothing taken, float32[2] returned (tree: None became an array",
    ),
    "a list became a tuple": (
        {"w": [jnp.ones(2)]},
        lambda state: {"w": tuple(state["w"])},
        "state: PyTreeDef({'w': [*]}) taken, PyTreeDef({'w': (*,)}) returned (tree: ",
    ),
    "an axis grew": (
        {"w": jnp.ones(2)},
        lambda state: {"w": jnp.append(state["w"], 1.0)},
        "state['w']: float32[2] taken, float32[3] returned (shape: ",
    ),
}


@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.parametrize("shape", ["alone", "first", "last"])
def test_a_state_that_drifts_is_found_before_any_compile(drift, shape):
    state, change, line = DRIFTS[drift]

    def fn(state, batch):
        loss = batch["x"].sum()
        return {"alone": change(state), "first": (change(state), loss), "last": (loss, change(state))}[shape]

    step = sb.CompiledStep(fn, PLAN, donate_argnums=0)
    with sb.CompileCounter() as compiles, pytest.raises(sb.DriftError, match="another state than it takes") as caught:
        step.compile(state, sb.BATCH, progress=False)
    assert compiles.by_function["jit(fn)"] == 0
    assert len(caught.value.differences) == 1
    assert caught.value.differences[0].startswith(line)
    assert step.executables == ()


def test_several_carried_arguments_are_each_compared():
    optimizer = optax.adam(1e-3)
    params = {"w": jnp.ones(3)}

    def fn(params, opt_state, key, batch):
        grads = jax.grad(lambda params: (params["w"] * batch["x"].sum()).sum())(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, jax.random.split(key)[0]

    args = (params, optimizer.init(params), jax.random.key(0))
    step = sb.CompiledStep(fn, PLAN, carry=("params", "opt_state", "key"))
    assert step.compile(*args, sb.BATCH, progress=False).notes == []

    def drifts(params, opt_state, key, batch):
        params, opt_state, _ = fn(params, opt_state, key, batch)
        return opt_state, params, jax.random.split(key)

    with pytest.raises(sb.DriftError) as caught:
        sb.CompiledStep(drifts, PLAN, donate_argnames=("params", "opt_state", "key")).compile(
            *args, sb.BATCH, progress=False
        )
    assert [line.split(" taken")[0] for line in caught.value.differences] == ["key: key<fry>[]"]


def test_a_weak_type_that_comes_or_goes_is_a_note_or_an_error():
    def fn(state, batch):
        return {"total": state["total"] + batch["x"].sum()}

    state = {"total": jnp.asarray(0.0)}
    step = sb.CompiledStep(fn, PLAN, donate_argnames="state")
    report = step.compile(state, sb.BATCH, progress=False)
    (note,) = report.notes
    assert note.startswith(
        "jit would compile twice, and this step does not: state['total']: float32[] (weak) taken, float32[] returned (weak type:"
    )
    assert note in str(report)
    state = step(state, BATCH)
    assert float(step(state, BATCH)["total"]) == 2
    strict = sb.CompiledStep(fn, PLAN, donate_argnames="state", strict="weak_type")
    with pytest.raises(sb.DriftError, match="weak type: it starts from a Python number"):
        strict.compile({"total": jnp.asarray(0.0)}, sb.BATCH, progress=False)


def test_a_carried_argument_must_come_back():
    def fn(state, batch):
        return batch["x"].sum() + state["w"].sum()

    with pytest.raises(sb.DriftError, match="the step does not return 'state', which it is to take again"):
        sb.CompiledStep(fn, PLAN, carry="state").compile(one(), sb.BATCH, progress=False)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        sb.CompiledStep(fn, PLAN, donate_argnums=0, carry=()).compile(one(), sb.BATCH, progress=False)
    with pytest.raises(sb.StepError, match="carry names 'params', which is no argument that compile"):
        sb.CompiledStep(fn, PLAN, carry="params").compile(one(), sb.BATCH, progress=False)


def test_the_report_tells_flops_and_bytes_of_each_bucket():
    def fn(state, batch):
        return state + jnp.outer(batch["x"][0], batch["x"][0]).sum(), batch["x"]

    report = sb.CompiledStep(fn, PLAN).compile(jnp.ones((256, 256)), sb.BATCH, progress=False)
    small, large = report.executables
    assert small.cost.argument_bytes == 256 * 256 * 4 + 4 * 2 * 4
    assert small.cost.output_bytes >= 256 * 256 * 4 + 4 * 2 * 4
    assert small.cost.peak_bytes == (
        small.cost.argument_bytes
        + small.cost.output_bytes
        - small.cost.aliased_bytes
        + small.cost.temporary_bytes
        + small.cost.code_bytes
    )
    assert large.cost.flops > small.cost.flops > 0
    assert 0 < small.seconds < 60
    assert report.wall_seconds > 0
    text = str(report)
    assert text.startswith("2 executables compiled in ")
    assert "the most that a device holds in a step: 0.5 MiB" in text
    plain = report.to_json()["executables"][0]
    assert plain["bucket"] == "[4 × s=2]"
    assert plain["peak_bytes"] == small.cost.peak_bytes


def test_donated_bytes_are_counted_once():
    def fn(state, batch):
        return state + batch["x"].sum()

    state = jnp.ones((256, 256))
    plain = sb.CompiledStep(fn, PLAN).compile(state, sb.BATCH, progress=False).executables[0].cost
    donated = sb.CompiledStep(fn, PLAN, donate_argnums=0).compile(state, sb.BATCH, progress=False).executables[0].cost
    assert donated.aliased_bytes == state.nbytes
    assert donated.peak_bytes == plain.peak_bytes - state.nbytes


def test_a_bucket_that_does_not_fit_fails_at_compile_by_name():
    def fn(batch):
        return jnp.outer(batch["x"].ravel(), jnp.arange(10_000.0))

    step = sb.CompiledStep(fn, PLAN, memory_budget=2**20)
    with pytest.raises(
        sb.BudgetError, match=r"1 of 2 executables need more than the 1.0 MiB.*\n  \[4 × s=8\]: 1.2 MiB"
    ) as caught:
        step.compile(sb.BATCH, progress=False)
    assert "token_budget" in str(caught.value)
    assert step.executables == ()
    report = sb.CompiledStep(fn, PLAN, memory_budget=10**9).compile(sb.BATCH, progress=False)
    assert "of 953.7 (0%)" in str(report)


def test_several_batches_are_of_one_bucket():
    def fn(state, left, *, right):
        return state + left["x"].sum() + 10 * right["x"].sum()

    step = sb.CompiledStep(fn, PLAN, donate_argnums=0)
    step.compile(jnp.float32(0), sb.BATCH, right=sb.BATCH, progress=False)
    assert len(step.executables) == 2
    for size in (2, 8):
        assert float(step(jnp.float32(1), of_length(size), right=of_length(size))) == 1 + 44 * size
    state = jnp.float32(1)
    with pytest.raises(sb.SignatureError, match="the batches of a call must be of one bucket") as caught:
        step(state, of_length(2), right=of_length(8))
    assert caught.value.differences == ["left is of [4 × s=2]", "right is of [4 × s=8]"]
    with pytest.raises(sb.SignatureError, match=r"the batch 'right' is of no bucket.*nearest is \[4 × s=2\]"):
        step(state, of_length(2), right=of_length(3))
    assert not state.is_deleted()
    with jax.disable_jit():
        assert float(step(state, of_length(2), right=of_length(2))) == 89
    with pytest.raises(sb.StepError, match=r"predict\(\) is for steps of one batch, but this one takes 2"):
        step.predict(state, [], right=[])
    prepared = sb.CompiledStep(fn, PLAN, prepare=lambda batch: {**batch, "x": batch["x"] * 2}, on_miss="evict")
    prepared.compile(jnp.float32(0), sb.BATCH, right=sb.BATCH, progress=False)
    assert float(prepared(jnp.float32(1), of_length(2), right=of_length(3))) == 1 + 2 * (8 + 120)
    assert len(prepared.executables) == 2


def test_a_weakly_typed_argument_keeps_the_dtypes_it_was_compiled_with_and_is_named():
    def fn(scale, batch):
        return (scale * batch["x"].astype(jnp.bfloat16)).sum()

    step = sb.CompiledStep(fn, PLAN)
    (note,) = step.compile(1.1, sb.BATCH, progress=False).notes
    assert note.startswith("scale is weakly typed, as a Python number is: what is computed with it keeps the dtypes")
    assert jax.jit(fn)(np.float32(1.1), BATCH).dtype == jnp.float32
    assert step(np.float32(1.1), BATCH).dtype == jnp.bfloat16
    with pytest.raises(sb.DriftError, match="strict='weak_type' refuses arguments that are weakly typed") as caught:
        sb.CompiledStep(fn, PLAN, strict="weak_type").compile(1.1, sb.BATCH, progress=False)
    assert caught.value.differences == [note]
    assert step.compile(np.float32(1.1), sb.BATCH, progress=False).notes == []
    assert step(np.float32(1.1), BATCH).dtype == jnp.float32


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (lambda params, ema: (params, ema), ["params['w']"]),
        (lambda params, ema: ((params, ema), 0.0), ["params['w']"]),
        (lambda params, ema: {"loss": 0.0, "state": (params, ema)}, ["params['w']"]),
    ],
)
def test_a_drift_is_found_beside_a_twin(result, names):
    """The average of the parameters has their tree, and so have gradients."""

    def fn(params, ema, batch):
        half = jax.tree.map(lambda each: each.astype(jnp.bfloat16), params)
        return result(half, jax.tree.map(lambda each: each + batch["x"].sum(), ema))

    state = {"w": jnp.ones(3)}
    step = sb.CompiledStep(fn, PLAN, donate_argnums=(0, 1))
    with pytest.raises(sb.DriftError) as caught:
        step.compile(state, {"w": jnp.ones(3)}, sb.BATCH, progress=False)
    assert [line.split(":")[0] for line in caught.value.differences] == names


def test_where_a_state_comes_back_can_be_told_and_is_asked_where_it_is_not_clear():
    def fn(state, batch):
        grads = {"w": state["w"] * batch["x"].sum()}
        return grads, jax.tree.map(lambda each: each.astype(jnp.bfloat16), state)

    state = {"w": jnp.ones(3)}
    (note,) = sb.CompiledStep(fn, PLAN, carry="state").compile(state, sb.BATCH, progress=False).notes
    assert note == (
        "state is taken to come back as output[0]; output[1] has its tree as well: if that is meant, say "
        "carry={'state': (1,)}"
    )
    for path in (1, (1,)):
        with pytest.raises(sb.DriftError, match=r"bfloat16\[3\] returned .* \[compared with output\[1\]\]"):
            sb.CompiledStep(fn, PLAN, carry={"state": path}).compile(state, sb.BATCH, progress=False)
    with pytest.raises(sb.StepError, match=r"carry says that 'state' comes back as output\[7\], but the step returns"):
        sb.CompiledStep(fn, PLAN, carry={"state": 7}).compile(state, sb.BATCH, progress=False)


def test_a_carried_argument_without_arrays_cannot_drift():
    def fn(params, opt_state, batch):
        return jax.tree.map(lambda each: each - batch["x"].sum(), params), jnp.float32(0)

    optimizer = optax.sgd(0.1)
    params = {"w": jnp.ones(3)}
    step = sb.CompiledStep(fn, PLAN, donate_argnums=(0, 1))
    assert step.compile(params, optimizer.init(params), sb.BATCH, progress=False).notes == []


def test_disable_jit_at_compile_is_for_the_calls():
    step = sb.CompiledStep(total, PLAN)
    with jax.disable_jit():
        step.compile(sb.BATCH, progress=False)
        assert float(step(of_length(2))) == 8
        with pytest.raises(sb.SignatureError, match="the batch is of no bucket"):
            step(of_length(3))
    assert float(step(of_length(2))) == 8


def test_a_miss_that_fails_costs_no_executable_and_a_wrong_state_is_refused_without_any():
    def fn(state, batch):
        return state + batch["x"].sum()

    step = sb.CompiledStep(fn, PLAN, on_miss="evict")
    step.compile(jnp.float32(0), sb.BATCH, progress=False)
    with pytest.raises(KeyError):
        step(jnp.float32(0), {"y": np.ones((4, 2), np.float32)})
    assert len(step.executables) == 2
    for bucket in PLAN.buckets:
        step.evict(bucket)
    with pytest.raises(sb.SignatureError, match=r"state: float32\[7\] received, float32\[\] expected"):
        step(jnp.zeros(7), of_length(2))
    assert float(step(jnp.float32(1), of_length(2))) == 9


def test_a_call_that_waits_for_a_compile_meanwhile_cleared_says_so():
    """Its program would be of other settings, or of a step that was cleared."""
    step = sb.CompiledStep(total, PLAN, on_miss="evict")
    step.compile(sb.BATCH, progress=False)
    failures = []

    def late():
        try:
            step(of_length(5))
        except sb.StepError as error:
            failures.append(str(error))

    thread = threading.Thread(target=late)
    with step._lock:
        thread.start()
        deadline = time.monotonic() + 10
        while thread.is_alive() and time.monotonic() < deadline and not _waits(thread):
            time.sleep(0.01)
        step.clear()
    thread.join()
    assert failures == ["the step was cleared, or compiled anew, while a call waited to compile: call it again"]
    assert step.executables == ()


def _waits(thread):
    """Says whether a thread is at the step's lock."""
    frame = sys._current_frames().get(thread.ident)
    return frame is not None and frame.f_code.co_name == "_compiled_late"


def test_a_wrong_state_with_a_batch_found_the_long_way_is_refused_by_leaf():
    step = sb.CompiledStep(lambda state, batch: state + batch["x"].sum(), PLAN, on_miss="compile", max_executables=3)
    step.compile(jnp.float32(0), sb.BATCH, progress=False)
    halves = {**of_length(2), "x": np.ones((4, 2), np.float16)}
    step(jnp.float32(0), halves)
    calls = sum(each.calls for each in step.executables)
    with pytest.raises(sb.SignatureError, match=r"state: int32\[\] received, float32\[\] expected"):
        step(jnp.int32(0), halves)
    assert sum(each.calls for each in step.executables) == calls


def test_an_array_that_is_donated_twice_is_named():
    step = sb.CompiledStep(
        lambda state, batch: jax.tree.map(lambda each: each + batch["x"].sum(), state), PLAN, donate_argnums=0
    )
    zeros = jnp.zeros(3)
    step.compile({"m": zeros, "v": zeros}, sb.BATCH, progress=False)
    with pytest.raises(sb.SignatureError, match="an array is donated twice in one call") as caught:
        step({"m": zeros, "v": zeros}, of_length(2))
    assert caught.value.differences == ["state['m'] and state['v'] are one array"]
    assert not zeros.is_deleted()


def test_a_bucket_that_the_cap_left_out_says_so():
    step = sb.CompiledStep(total, PLAN, on_miss="compile", max_executables=1)
    step.compile(sb.BATCH, progress=False)
    with pytest.raises(sb.SignatureError, match="now: All of the 1 executables that max_executables allows are there"):
        step(of_length(8))


@pytest.mark.parametrize("drop", [lambda step: step.evict(SMALL), lambda step: step.close()])
def test_what_is_dropped_is_gone(drop):
    step = sb.CompiledStep(total, PLAN)
    step.compile(sb.BATCH, progress=False)
    step(of_length(2))
    gone = [weakref.ref(each.compiled) for each in step.executables if each.bucket == SMALL]
    drop(step)
    assert [each() for each in gone] == [None]


def of_length(size):
    return {"x": np.ones((4, size), np.float32), "s_mask": np.ones((4, size), bool), "example_mask": np.ones(4, bool)}


def total(batch):
    return batch["x"].sum()


def test_a_miss_may_compile_within_the_cap(caplog):
    step = sb.CompiledStep(total, PLAN, on_miss="compile", max_executables=3)
    step.compile(sb.BATCH, progress=False)
    with caplog.at_level(logging.WARNING, "shapebucket"):
        assert float(step(of_length(5))) == 20
    (record,) = caplog.records
    assert record.getMessage().startswith("compiled example_mask [4], s_mask [4, 5], x [4, 5] on a miss, in ")
    assert record.getMessage().endswith("3 of 3 executables")
    with TraceCounter() as traces:
        step(of_length(5))
    assert traces.count == 0
    with pytest.raises(
        sb.SignatureError, match=r"(?s)of no bucket.*All of the 3 executables that max_executables allows are there\. "
    ):
        step(of_length(6))
    assert [each.bucket for each in step.executables if each.calls == 2] == [None]


def test_a_miss_may_evict_the_least_recently_used():
    step = sb.CompiledStep(total, PLAN, on_miss="evict")
    step.compile(sb.BATCH, progress=False)
    step(of_length(8))
    step(of_length(2))
    for size in (3, 4, 5):
        assert float(step(of_length(size))) == 4 * size
        assert len(step.executables) == 2
    assert [each.shapes["x"][1] for each in step.executables] == [4, 5]
    step(of_length(4))
    assert [each.shapes["x"][1] for each in step.executables] == [5, 4]
    assert float(step(of_length(2))) == 8
    assert step.executables[-1].bucket == SMALL


def test_batches_that_differ_in_a_leaf_the_dispatch_does_not_look_at_are_told_apart():
    step = sb.CompiledStep(total, PLAN, on_miss="compile", max_executables=4)
    step.compile(sb.BATCH, progress=False)
    more = {**of_length(2), "more": np.ones(3, np.float32)}
    assert float(step(more)) == 8
    with TraceCounter() as traces:
        assert float(step(more)) == float(step(of_length(2))) == 8
    assert traces.count == 0
    assert len(step.executables) == 3
    halves = {**of_length(2), "x": np.ones((4, 2), np.float16)}
    assert step(halves).dtype == np.float16
    assert len(step.executables) == 4


def test_a_miss_with_another_state_compiles_nothing():
    step = sb.CompiledStep(lambda state, batch: state + batch["x"].sum(), PLAN, on_miss="evict")
    step.compile(jnp.float32(0), sb.BATCH, progress=False)
    with pytest.raises(sb.SignatureError, match=r"state: int32\[\] received, float32\[\] expected"):
        step(jnp.int32(0), of_length(5))
    assert {each.bucket for each in step.executables} == {*PLAN.buckets}


def test_fewer_executables_than_buckets_need_eviction():
    with pytest.raises(sb.StepError, match="max_executables=1 is less than the 2 buckets times 1 static variants"):
        sb.CompiledStep(total, PLAN, max_executables=1).compile(sb.BATCH, progress=False)
    step = sb.CompiledStep(total, PLAN, max_executables=1, on_miss="evict")
    assert len(step.compile(sb.BATCH, progress=False).executables) == 1
    for size in (2, 8, 2):
        assert float(step(of_length(size))) == 4 * size
        assert len(step.executables) == 1


def test_an_evicted_bucket_is_a_miss():
    step = sb.CompiledStep(total, PLAN)
    step.compile(sb.BATCH, progress=False)
    step.evict(SMALL)
    assert [each.bucket for each in step.executables] == [LARGE]
    with pytest.raises(
        sb.SignatureError, match=r"no executable for \[4 × s=2\] now: it was evicted. compile\(\) again"
    ):
        step(of_length(2))
    assert float(step(of_length(8))) == 32
    step.evict(SMALL)
    with step:
        pass
    assert step.executables == ()
    with pytest.raises(sb.StepError, match="no executables yet"):
        step(of_length(8))


def test_several_threads_share_a_step():
    step = sb.CompiledStep(total, PLAN, on_miss="compile", max_executables=3)
    step.compile(sb.BATCH, progress=False)
    results, failures = [], []

    def run(size):
        try:
            results.extend(float(step(of_length(size))) / size for _ in range(50))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(size,)) for size in (2, 8, 5, 5)]
    with sb.CompileCounter() as compiles:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert failures == []
    assert results == [4.0] * 200
    assert compiles.by_function["jit(total)"] == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_changes_nothing_but_the_time(threads):
    step = sb.CompiledStep(total, PLAN)
    report = step.compile(sb.BATCH, progress=False, threads=threads)
    assert [each.bucket for each in report.executables] == list(PLAN.buckets)
    with pytest.raises(sb.StepError, match="threads=0; it needs a whole number of at least one"):
        step.compile(sb.BATCH, progress=False, threads=0)


def test_gradients_checkpointing_and_accumulation_pass():
    """Two halves of a batch, rematerialised: the sum of their gradients is the whole batch's."""

    def loss(params, x):
        return (jax.checkpoint(jnp.tanh)(x * params["w"]) ** 2).sum()

    def fn(params, batch):
        halves = batch["x"].reshape(2, -1, batch["x"].shape[1])

        def accumulate(total, half):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, half)), None

        grads, _ = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), halves)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads

    params = {"w": jnp.float32(0.5)}
    step = sb.CompiledStep(fn, PLAN, donate_argnums=0)
    step.compile(params, sb.BATCH, progress=False)
    expected = jax.grad(loss)(params, BATCH["x"])
    _, grads = step(params, BATCH)
    np.testing.assert_allclose(grads["w"], expected["w"], rtol=1e-6)


def test_a_batch_may_be_of_two_axes_and_nested():
    layout = sb.Layout({"pair": {"src": "float32[s]", "tgt": "float32[t]"}})
    buckets = [sb.Bucket((("s", s), ("t", t)), 2) for s, t in ((2, 2), (2, 4), (4, 2))]
    plan = sb.BucketPlan(layout, buckets)
    step = sb.CompiledStep(lambda batch: batch["pair"]["src"].sum() + 10 * batch["pair"]["tgt"].sum(), plan)
    step.compile(sb.BATCH, progress=False)
    for bucket in plan.buckets:
        s, t = (size for _, size in bucket.axes)
        sample = {"pair": {"src": np.ones(s, np.float32), "tgt": np.ones(t, np.float32)}}
        assert float(step(sb.pad([sample] * 2, bucket, plan))) == 2 * s + 20 * t


DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import shapebucket as sb

devices = np.array(jax.devices())
mesh, renamed, turned = Mesh(devices, ("d",)), Mesh(devices, ("e",)), Mesh(devices[::-1], ("d",))
plan = sb.BucketPlan(sb.Layout({"x": "float32[s]"}), [sb.Bucket((("s", size),), 4) for size in (2, 8)])
batch = sb.pad([], plan.buckets[0], plan)
rows, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())

def fn(state, batch):
    return state * 2 + batch["x"].sum()

def compiles(call):
    with sb.CompileCounter() as counter:
        call()
    return counter.by_function["jit(fn)"]

def refused(step, state):
    try:
        step(state, batch)
    except sb.SignatureError as error:
        return error.differences
    return []

state = jnp.zeros((4, 2))
def placed(sharding):
    jitted = jax.jit(fn)
    jitted(jax.device_put(state, sharding), batch)
    step = sb.CompiledStep(fn, plan, carry=())
    step.compile(jax.device_put(state, sharding), sb.BATCH, progress=False)
    return jitted, step

jitted, step = placed(rows)
for like in (NamedSharding(mesh, P("d", None)), NamedSharding(Mesh(devices, ("d",)), P("d"))):
    again = jax.device_put(state, like)
    assert compiles(lambda: jitted(again, batch)) == 0
    assert refused(step, again) == []
for accepted in (NamedSharding(renamed, P("e")),):  # the same devices hold the same parts
    again = jax.device_put(state, accepted)
    assert compiles(lambda: jitted(again, batch)) == 1
    assert refused(step, again) == []
assert refused(step, np.zeros((4, 2), np.float32)) == refused(step, jnp.zeros((4, 2))) == []  # on no device yet
for other in (everywhere, NamedSharding(mesh, P(None, "d")), NamedSharding(turned, P("d")),
              jax.sharding.SingleDeviceSharding(devices[1])):
    again = jax.device_put(state, other)
    assert compiles(lambda: jitted(again, batch)) == 1
    (line,) = refused(step, again)
    assert line.startswith("state: ") and "received" in line, line

# A replicated state that comes back sharded, since XLA spreads what meets a sharded batch.
spread = sb.CompiledStep(lambda state, batch: state + batch["x"], sb.BucketPlan(plan.layout, plan.buckets[:1]),
                         batch_sharding=rows, donate_argnums=0)
try:
    spread.compile(jax.device_put(state, everywhere), sb.BATCH, progress=False)
except sb.DriftError as error:
    assert "(sharding: XLA chose another: put the state where it stays before compile()" in error.differences[0], error
else:
    raise AssertionError("a state that comes back sharded was not found")
kept = sb.CompiledStep(lambda state, batch: state + batch["x"], sb.BucketPlan(plan.layout, plan.buckets[:1]),
                       batch_sharding=rows, donate_argnums=0, out_shardings=everywhere)
state = jnp.zeros((4, 2))
kept.compile(jax.device_put(state, everywhere), sb.BATCH, progress=False)
lying = jax.device_put(batch, rows)
out = kept(jax.device_put(state, everywhere), lying)
assert out.sharding.is_equivalent_to(everywhere, 2) and not lying["x"].is_deleted()

# An array on no device yet is put where it is needed, also on a miss and without jit.
grown = sb.CompiledStep(lambda state, batch: state + batch["x"].sum(), plan, on_miss="evict")
grown.compile(jax.device_put(jnp.zeros(2), everywhere), sb.BATCH, progress=False)
more = {"x": np.ones((4, 5), np.float32), "s_mask": np.ones((4, 5), bool), "example_mask": np.ones(4, bool)}
assert float(grown(jnp.zeros(2), more)[0]) == 20
with jax.disable_jit():
    assert float(grown(jnp.zeros(2), more)[0]) == 20

state = jnp.zeros((4, 2))
given = sb.CompiledStep(fn, plan, in_shardings=(everywhere, rows), out_shardings=everywhere)
given.compile(state, sb.BATCH, progress=False)
with sb.CompileCounter() as counter:
    given(given(jax.device_put(state, everywhere), batch), batch)
assert counter.count == 0
print("passed")
"""


@pytest.mark.slow
def test_shardings_over_two_devices():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.strip() == "passed", done.stderr
