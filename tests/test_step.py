import collections
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shapebucket as sb


def total(state, batch):
    """A step whose result tells what it was given."""
    real = jnp.where(batch["s_mask"], batch["tokens"], 0).sum()
    return state + real, real


@pytest.fixture
def batches(tokens, token_plan):
    """One batch of each bucket."""
    by_bucket = {bucket: [] for bucket in token_plan.buckets}
    for each in tokens:
        by_bucket[token_plan.find([len(each["tokens"])])].append(each)
    return [sb.pad(data[: bucket.batch_size], bucket, token_plan) for bucket, data in by_bucket.items()]


@pytest.fixture
def step(token_plan):
    step = sb.CompiledStep(total, token_plan, donate_argnames="state")
    step.compile(jnp.zeros((), jnp.int32), sb.BATCH, progress=False)
    return step


def test_every_bucket_is_compiled_before_the_first_step_and_none_after(token_plan, batches):
    step = sb.CompiledStep(total, token_plan, donate_argnames="state")
    state = jnp.zeros((), jnp.int32)
    with sb.CompileCounter() as ahead:
        report = step.compile(state, sb.BATCH, progress=False)
    assert ahead.count == ahead.by_function["jit(total)"] == len(token_plan) == len(step.executables)
    assert [each.bucket for each in report.executables] == list(report.seconds) == list(token_plan.buckets)
    assert str(report).startswith(f"{len(token_plan)} executables compiled in ")
    with sb.CompileCounter() as after:
        for _ in range(3):
            for batch in batches:
                state, _ = step(state, batch)
    assert after.count == 0
    assert len(step.executables) == len(token_plan)
    expected = 3 * sum(int(batch["tokens"][batch["s_mask"]].sum()) for batch in batches)
    assert int(state) == expected


def test_the_state_is_donated(step, batches):
    state = jnp.zeros((), jnp.int32)
    step(state, batches[0])
    assert state.is_deleted()


def test_the_batch_may_be_a_keyword_and_other_arguments_pass(token_plan, batches):
    step = sb.CompiledStep(lambda scale, *, batch: scale * batch["s_mask"].sum(), token_plan)
    step.compile(np.float32(2), batch=sb.BATCH, progress=False)
    assert float(step(np.float32(3), batch=batches[1])) == 3 * batches[1]["s_mask"].sum()


def test_compiling_again_replaces_the_executables(step, batches):
    step.compile(jnp.zeros((), jnp.float32), sb.BATCH, progress=False)
    assert len(step.executables) == 4
    assert step(jnp.zeros((), jnp.float32), batches[0])[0].dtype == jnp.float32


def test_prepare_stands_between_loader_and_step(token_plan, batches):
    """The executables are compiled for what prepare makes of a batch, so nothing compiles at a call."""

    def prepare(batch):
        return {
            **batch,
            "positions": np.arange(batch["tokens"].shape[1], dtype=np.int32),
            "tokens": batch["tokens"] * 2,
        }

    def fn(state, batch):
        return state + (batch["tokens"] * batch["s_mask"]).sum() + batch["positions"].sum()

    step = sb.CompiledStep(fn, token_plan, prepare=prepare)
    step.compile(jnp.int32(0), sb.BATCH, progress=False)
    batch = batches[2]
    with sb.CompileCounter() as compiles:
        result = step(jnp.int32(0), batch)
    assert compiles.count == 0
    length = batch["tokens"].shape[1]
    assert int(result) == 2 * batch["tokens"][batch["s_mask"]].sum() + length * (length - 1) // 2


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import shapebucket as sb

mesh = jax.make_mesh((2,), ("data",))
data, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
plan = sb.BucketPlan(sb.Layout({"tokens": "int32[s]"}), [sb.Bucket((("s", size),), 4) for size in (2, 8)])
step = sb.CompiledStep(lambda state, batch: state + batch["tokens"].sum(), plan, batch_sharding=data)
state = jax.device_put(jnp.zeros((), jnp.int32), everywhere)
step.compile(state, sb.BATCH, progress=False)
for executable in step.executables:
    assert executable.compiled.input_shardings[0][1]["tokens"].is_equivalent_to(data, 2)
batches = [sb.pad([{"tokens": np.arange(size, dtype=np.int32)}] * 4, bucket, plan)
           for bucket, size in zip(plan.buckets, (2, 8))]
with sb.CompileCounter() as compiles:
    for batch in batches:
        state = step(state, batch)
assert compiles.count == 0
assert int(state) == 4 * 1 + 4 * 28
try:
    step(jax.device_put(jnp.zeros((4,), jnp.int32).sum(), jax.devices()[1]), batches[0])
except sb.SignatureError as error:
    assert "state: SingleDeviceSharding" in error.differences[0], error
else:
    raise AssertionError("a state on one device was taken")
print("passed")
"""


@pytest.mark.slow
def test_a_sharding_over_two_devices_is_compiled_for():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.strip() == "passed", done.stderr


def test_an_optimizer_state_and_a_typed_key_pass(token_plan, batches):
    optimizer = optax.adamw(1e-2)
    params = {"w": jnp.ones(())}

    def fn(params, opt_state, key, batch):
        key, noise = jax.random.split(key)

        def loss(params):
            return params["w"] * batch["s_mask"].mean() + 0 * jax.random.normal(noise)

        updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key

    step = sb.CompiledStep(fn, token_plan, donate_argnums=(0, 1))
    state = (params, optimizer.init(params), jax.random.key(0))
    step.compile(*state, sb.BATCH, progress=False)
    for batch in batches:
        state = step(*state, batch)
    assert float(state[0]["w"]) < 1


def change(batch, **changes):
    return {**batch, **changes}


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (
            lambda b: change(b, tokens=b["tokens"][:, :-1]),
            r"tokens: int32\[{rows}, {short}\] received, int32\[{rows}, {size}\]",
        ),
        (
            lambda b: change(b, tokens=b["tokens"].astype(np.float32)),
            r"tokens: float32\[{rows}, {size}\] received, int32\[{rows}, {size}\] expected",
        ),
        (lambda b: change(b, extra=np.zeros(3)), r"extra: float64\[3\] received, nothing expected"),
        (
            lambda b: {key: value for key, value in b.items() if key != "s_mask"},
            r"s_mask: nothing received, bool\[{rows}, {size}\] expected",
        ),
        (lambda b: change(b, tokens=b["tokens"][:-1]), r"tokens: int32\[{fewer}, {size}\] received"),
        (lambda b: change(b, tokens=3), r"tokens: int64\[\] received"),
        (
            collections.OrderedDict,
            r"the containers: PyTreeDef\(CustomNode\(OrderedDict.* received, nested dicts expected",
        ),
    ],
)
def test_any_other_batch_is_refused_by_leaf_with_the_nearest_bucket(step, batches, wrong, line):
    batch = batches[2]
    rows, size = batch["tokens"].shape
    state = jnp.zeros((), jnp.int32)
    line = line.format(rows=rows, size=size, short=size - 1, fewer=rows - 1)
    with pytest.raises(sb.SignatureError) as caught, sb.CompileCounter() as compiles:
        step(state, wrong(batch))
    message = str(caught.value)
    assert message.startswith(
        f"the batch is of no bucket, so the step has no executable for it; nearest is [{rows} × s={size}]:\n  "
    )
    assert caught.match(line)
    assert "declare a change between the two (a cast, an added feature) as prepare=. The plan's buckets: [" in message
    assert compiles.count == 0
    assert not state.is_deleted()


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (jnp.zeros((), jnp.float32), r"state: float32\[\] received, int32\[\] expected"),
        (jnp.zeros(2, jnp.int32), r"state: int32\[2\] received, int32\[\] expected"),
        ((jnp.zeros((), jnp.int32),), r"state\[0\]: int32\[\] received, nothing expected"),
        (None, r"state: nothing received, int32\[\] expected"),
    ],
)
def test_another_state_is_refused_by_leaf(step, batches, state, line):
    with pytest.raises(
        sb.SignatureError, match=r"(?s)the arguments are not those.*Usual causes: the step returns"
    ) as caught:
        step(state, batches[0])
    assert caught.match(line)
    assert re.match(line, caught.value.differences[-1])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_another_number_of_arguments_is_refused(step, batches):
    with pytest.raises(
        sb.SignatureError, match="3 positional arguments and the keywords .. received, 2 and .. expected"
    ):
        step(jnp.zeros((), jnp.int32), batches[0], 1)


def test_a_donated_state_used_again_is_named(step, batches):
    state = jnp.zeros((), jnp.int32)
    step(state, batches[0])
    with pytest.raises(
        sb.SignatureError, match=r"(?s)given arrays that are gone:.*go on with what the call returned"
    ) as caught:
        step(state, batches[0])
    assert caught.value.differences == ["state: was deleted, or donated to an earlier call"]


def test_prepare_that_gives_another_batch_is_refused_by_leaf(token_plan, batches):
    calls = []

    def prepare(batch):
        calls.append(1)
        return batch if len(calls) <= len(token_plan) else {**batch, "tokens": batch["tokens"].astype(np.float32)}

    step = sb.CompiledStep(total, token_plan, prepare=prepare)
    step.compile(jnp.zeros((), jnp.int32), sb.BATCH, progress=False)
    with pytest.raises(sb.SignatureError, match=r"batch\['tokens'\]: float32\[.*\] received, int32"):
        step(jnp.zeros((), jnp.int32), batches[0])


def test_it_cannot_be_jitted_and_says_so(step, batches):
    with pytest.raises(sb.SignatureError, match="state: is traced; a CompiledStep cannot be transformed or jitted"):
        jax.jit(lambda state: step(state, batches[0]))(jnp.zeros((), jnp.int32))


def test_it_runs_op_by_op_where_jit_is_disabled(step, batches):
    with jax.disable_jit():
        state, real = step(jnp.zeros((), jnp.int32), batches[0])
        with pytest.raises(sb.SignatureError, match=r"state: int32\[9\] received, int32\[\] expected"):
            step(jnp.zeros(9, jnp.int32), batches[0])
    assert int(state) == int(real) == int(batches[0]["tokens"][batches[0]["s_mask"]].sum())


def test_it_names_itself(step):
    assert str(step) == "CompiledStep(total, 4 executables for 4 buckets)"


def test_what_is_no_plan_is_refused(token_plan):
    with pytest.raises(sb.StepError, match="CompiledStep takes a BucketPlan after the function, but got Layout"):
        sb.CompiledStep(total, token_plan.layout)


def test_refusals_survive_none_leaves_keys_and_uninspectable_functions(token_plan, batches):
    def fn(state, batch):
        return {**state, "a": state["a"] + batch["s_mask"].sum()}

    fn.__signature__ = "bad"
    step = sb.CompiledStep(fn, token_plan, donate_argnums=0, prepare=lambda batch: {**batch, "key": jax.random.key(0)})
    state = {"a": jnp.zeros(()), "b": None, "key": jax.random.key(1)}
    step.compile(state, sb.BATCH, progress=False)
    step(state, batches[0])
    with pytest.raises(sb.SignatureError) as caught:
        step(state, batches[0])
    assert caught.value.differences == [
        "argument 0['a']: was deleted, or donated to an earlier call",
        "argument 0['key']: was deleted, or donated to an earlier call",
    ]


def test_only_the_leaf_at_fault_is_named(token_plan, batches):
    """Python numbers and 64-bit numpy arrays are read as jit reads them."""
    step = sb.CompiledStep(lambda lr, w, batch: lr * w * batch["s_mask"].sum(), token_plan)
    step.compile(0.1, jnp.ones(4), sb.BATCH, progress=False)
    step(0.1, np.ones(4), batches[0])
    with pytest.raises(sb.SignatureError) as caught:
        step(0.1, np.ones(5), batches[0])
    assert caught.value.differences == ["w: float32[5] received, float32[4] expected"]


def test_an_error_of_a_step_that_ran_is_its_own(token_plan, batches):
    def fails(x):
        raise RuntimeError("the file was deleted")

    def fn(n, batch):
        return n + jax.pure_callback(fails, jax.ShapeDtypeStruct((), jnp.int32), batch["s_mask"].sum())

    step = sb.CompiledStep(fn, token_plan)
    step.compile(1, sb.BATCH, progress=False)
    with pytest.raises(Exception, match="the file was deleted") as caught:
        jax.block_until_ready(step(1, batches[0]))
    assert not isinstance(caught.value, sb.SignatureError)


def test_a_jitted_function_is_refused(token_plan):
    with pytest.raises(sb.StepError, match="the step is jitted already: give the plain function"):
        sb.CompiledStep(jax.jit(total, donate_argnums=0), token_plan)


def test_64_bit_features_are_refused_since_jax_would_cut_them():
    plan = sb.BucketPlan(sb.Layout({"tokens": "int64[s]"}), [sb.Bucket((("s", 4),), 2)])
    step = sb.CompiledStep(lambda batch: batch["tokens"].sum(), plan)
    with pytest.raises(sb.StepError, match="'tokens' of the batch is int64, which JAX silently cuts to int32: cast it"):
        step.compile(sb.BATCH, progress=False)
    placed = sb.CompiledStep(
        lambda batch: batch["tokens"].sum(), plan, batch_sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    with pytest.raises(sb.StepError, match="'tokens' of the batch is int64"):
        placed.compile(sb.BATCH, progress=False)
    with jax.enable_x64(True):
        step.compile(sb.BATCH, progress=False)
        assert int(step(sb.pad([{"tokens": np.array([2**40])}], plan.buckets[0], plan))) == 2**40
    narrow = sb.CompiledStep(
        lambda batch: batch["tokens"].sum(), plan, prepare=lambda batch: {"tokens": batch["tokens"].astype(np.int32)}
    )
    narrow.compile(sb.BATCH, progress=False)


def test_a_failed_compile_leaves_no_executables_and_says_so(step, batches):
    with pytest.raises(TypeError):
        step.compile(state="x", batch=sb.BATCH, progress=False)
    assert len(step.executables) == 0
    with pytest.raises(sb.StepError, match="no executables yet"):
        step(jnp.zeros((), jnp.int32), batches[0])


def test_a_step_used_out_of_order_is_refused(token_plan, batches, step):
    with pytest.raises(sb.StepError, match=r"no executables yet: call compile\(state, BATCH\)"):
        sb.CompiledStep(total, token_plan)(0, batches[0])
    with pytest.raises(sb.StepError, match="compile.. needs BATCH in the batch's place; it stands in none"):
        step.compile(jnp.zeros(()), batches[0])
    with pytest.raises(
        sb.SignatureError, match="compiled with the batch as argument 1, but was called with 1 positional"
    ):
        step(jnp.zeros(()))


def test_a_function_that_does_not_compile_names_the_bucket(token_plan):
    step = sb.CompiledStep(lambda state, batch: state + batch["missing"], token_plan)
    with pytest.raises(KeyError) as caught:
        step.compile(0, sb.BATCH, progress=False)
    assert f"shapebucket: while compiling the step for {token_plan.buckets[0]}" in caught.value.__notes__
    assert len(step.executables) == 0


def test_the_counter_counts_jits_compiles_by_function():
    def some_function(x):
        return x + 1

    jitted = jax.jit(some_function)
    inputs = [np.zeros(size, np.float32) for size in (2, 3, 4)]
    with sb.CompileCounter() as compiles:
        for each in [*inputs, *inputs]:
            jitted(each)
    assert compiles.by_function["jit(some_function)"] == 3
    assert compiles.seconds > 0
    jitted(np.zeros(5, np.float32))
    assert compiles.by_function["jit(some_function)"] == 3


RESTART = """
import sys
import jax, jax.numpy as jnp
import shapebucket as sb

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
plan = sb.BucketPlan(sb.Layout({"x": "float32[s]"}), [sb.Bucket((("s", size),), 2) for size in (2, 4, 8)])
step = sb.CompiledStep(lambda state, batch: state + batch["x"].sum(), plan, donate_argnums=0)
state = jnp.zeros(())
found.clear()
step.compile(state, sb.BATCH, progress=False)
print(*(found.count(f"/jax/compilation_cache/cache_{kind}") for kind in ("hits", "misses")))
"""


@pytest.mark.slow
def test_a_restart_finds_its_programs_in_jaxs_persistent_cache(tmp_path):
    def run():
        command = [sys.executable, "-c", RESTART, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert run() == "0 3"
    assert run() == "3 0"
