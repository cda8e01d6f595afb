import collections

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
    assert report.seconds.keys() == step.executables.keys() == set(token_plan.buckets)
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


def test_a_sharding_is_compiled_for(token_plan, batches):
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    step = sb.CompiledStep(total, token_plan, batch_sharding=sharding)
    state = jax.device_put(jnp.zeros((), jnp.int32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    step.compile(state, sb.BATCH, progress=False)
    with sb.CompileCounter() as compiles:
        for batch in batches:
            state, _ = step(state, batch)
    assert compiles.count == 0
    (arguments, _) = next(iter(step.executables.values())).input_shardings
    assert arguments[1]["tokens"].is_equivalent_to(sharding, 2)


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
    assert "declare a change between the two (a cast, an added feature) as prepare=" in message
    assert compiles.count == 0
    assert not state.is_deleted()


@pytest.mark.parametrize("state", [jnp.zeros((), jnp.float32), jnp.zeros(2, jnp.int32), (jnp.zeros((), jnp.int32),)])
def test_another_state_is_refused_in_jaxs_words(step, batches, state):
    with pytest.raises(
        sb.SignatureError, match=r"(?s)Usual causes: the step returns a state of another .* JAX says:\n.*"
    ):
        step(state, batches[0])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_step_used_out_of_order_is_refused(token_plan, batches, step):
    with pytest.raises(sb.StepError, match=r"no executables yet: call compile\(state, BATCH\)"):
        sb.CompiledStep(total, token_plan)(0, batches[0])
    with pytest.raises(sb.StepError, match="compile.. needs BATCH in the batch's place, once; it stands in none"):
        step.compile(jnp.zeros(()), batches[0])
    with pytest.raises(sb.StepError, match=r"it stands in \[0, 1\]"):
        step.compile(sb.BATCH, sb.BATCH)
    with pytest.raises(
        sb.SignatureError, match="compiled with the batch as argument 1, but was called with 1 positional"
    ):
        step(jnp.zeros(()))


def test_a_function_that_does_not_compile_names_the_bucket(token_plan):
    step = sb.CompiledStep(lambda state, batch: state + batch["missing"], token_plan)
    with pytest.raises(KeyError) as caught:
        step.compile(0, sb.BATCH, progress=False)
    assert f"shapebucket: while compiling the step for the bucket {token_plan.buckets[0]}" in caught.value.__notes__
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
