"""flax.nnx modules as arguments of a compiled step: updated in place, as `nnx.jit` does, and never stale."""

import gc
import os
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shapebucket as sb
from shapebucket.step._flax_private import Access

PLAN = sb.BucketPlan(sb.Layout({"x": "float32[s]"}), [sb.Bucket((("s", size),), 4) for size in (2, 8)])
SMALL, LARGE = PLAN.buckets


def batch_of(size, seed=0):
    rng = np.random.default_rng(seed)
    rows = [{"x": rng.standard_normal(size).astype(np.float32)} for _ in range(3)]
    return sb.pad(rows, SMALL if size <= 2 else LARGE, PLAN)


class Model(nnx.Module):
    """Two layers that are one, a normalisation with statistics, dropout with keys, an array that is no variable."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, use_bias=False, rngs=rngs)])
        self.layers.append(self.layers[0])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.offset = jnp.arange(3.0)

    def __call__(self, x):
        x = x[..., None] * jnp.ones(3) + self.offset
        for layer in self.layers:
            x = self.dropout(jnp.tanh(layer(x)))
        return self.norm(x)


def make(seed=0):
    model = Model(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def train_step(model, optimizer, batch):
    def loss_fn(model):
        return jnp.where(batch["s_mask"][..., None], model(batch["x"]) ** 2, 0).sum()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def leaves_of(*modules):
    def plain(leaf):
        return np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    return {
        jax.tree_util.keystr(path): plain(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.split(tuple(modules))[1])
    }


def assert_equal(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        np.testing.assert_allclose(leaf, other[name], err_msg=name, **tolerance)


def scale(model, batch):
    """Doubles one kernel."""
    kernel = model.layers[0].kernel
    kernel[...] = kernel[...] * 2
    return batch["x"].sum()


def compiled(fn, *args, plan=PLAN, **options):
    step = sb.CompiledStep(fn, plan, **options)
    step.compile(*args, sb.BATCH, progress=False)
    return step


@pytest.mark.slow
@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_training_is_that_of_nnx_jit(donate):
    ours, theirs = make(), make()
    step = sb.CompiledStep(train_step, PLAN, donate_argnums=donate)
    before = leaves_of(*ours)
    step.compile(*ours, sb.BATCH, progress=False)
    assert_equal(leaves_of(*ours), before)  # compiling changes nothing
    assert len(step.executables) == 2
    jitted = nnx.jit(train_step)
    for number, size in enumerate((2, 8, 8, 2, 8)):
        batch = batch_of(size, number)
        expected = jitted(*theirs, batch)
        with sb.CompileCounter() as compiles:
            found = step(*ours, batch)
        assert compiles.count == 0
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert_equal(leaves_of(*ours), leaves_of(*theirs), rtol=1e-4, atol=1e-6)
    assert int(ours[0].dropout.rngs.count[...]) == 15
    assert ours[0].layers[0] is ours[0].layers[2]
    assert len(step.executables) == 2


def test_a_donated_module_gives_its_arrays():
    model, optimizer = make()
    step = compiled(lambda model, optimizer, batch: scale(model, batch), model, optimizer, donate_argnames="model")
    kernel, moment = model.layers[0].kernel[...], jax.tree.leaves(optimizer.opt_state)[1]
    offset = model.offset
    step(model, optimizer, batch_of(2))
    assert kernel.is_deleted()
    assert offset.is_deleted()
    assert not moment.is_deleted()
    step(model, optimizer, batch_of(8))
    np.testing.assert_array_equal(model.offset, np.arange(3))


def test_a_refused_call_leaves_modules_untouched():
    model, _ = make()
    step = compiled(scale, model, donate_argnums=0)
    before = leaves_of(model)
    with pytest.raises(sb.SignatureError, match="the batch is of no bucket"):
        step(model, {**batch_of(2), "x": np.zeros((4, 5), np.float32)})
    assert_equal(leaves_of(model), before)
    step(model, batch_of(2))


def test_a_miss_compiles_for_modules_as_well():
    model, _ = make()
    step = compiled(scale, model, on_miss="compile", max_executables=3)
    kernel = np.asarray(model.layers[0].kernel[...])
    odd = sb.pad([{"x": np.ones(5, np.float32)}], sb.Bucket((("s", 5),), 4), PLAN)
    for _ in range(2):
        assert float(step(model, odd)) == 5
    assert len(step.executables) == 3
    np.testing.assert_allclose(model.layers[0].kernel[...], 4 * kernel)
    model.eval()
    with pytest.raises(sb.SignatureError, match="model.dropout.deterministic: False expected, True received"):
        step(model, odd)


def test_what_a_step_does_not_change_is_not_returned():
    model, _ = make()
    model.eval()
    step = sb.CompiledStep(lambda model, batch: model(batch["x"]), PLAN)
    report = step.compile(model, sb.BATCH, progress=False)
    out, states = report.executables[0].compiled.out_info
    assert out.shape == (4, 2, 3)
    assert jax.tree.leaves(states) == []
    held = leaves_of(model)
    np.testing.assert_allclose(step(model, batch_of(8)), model(batch_of(8)["x"]), rtol=1e-5, atol=1e-6)
    assert_equal(leaves_of(model), held)


def test_the_mode_of_a_module_is_held_to():
    model, optimizer = make()
    step = compiled(lambda model, optimizer, batch: scale(model, batch), model, optimizer)
    before = leaves_of(model, optimizer)
    model.eval()
    with pytest.raises(
        sb.SignatureError, match=r"model.train\(\) and model.eval\(\) change attributes that are static"
    ) as caught:
        step(model, optimizer, batch_of(2))
    assert caught.value.differences == [
        "model.norm.use_running_average: False expected, True received",
        "model.dropout.deterministic: False expected, True received",
    ]
    assert_equal(leaves_of(model, optimizer), before)
    model.train()
    step(model, optimizer, batch_of(2))


def test_other_instances_of_the_structure_pass_each_updated_in_place():
    model, _ = make()
    step = compiled(scale, model)
    average, fresh = nnx.clone(model), Model(nnx.Rngs(1))
    start = {id(each): np.asarray(each.layers[0].kernel[...]) for each in (model, average, fresh)}
    for _ in range(2):
        for each in (model, average, fresh):
            step(each, batch_of(2))
    for each in (model, average, fresh):
        np.testing.assert_allclose(each.layers[0].kernel[...], 4 * start[id(each)])
    many = [nnx.clone(model) for _ in range(6)]
    for each in many * 2:
        step(each, batch_of(2))
    np.testing.assert_allclose(many[0].layers[0].kernel[...], 4 * model.layers[0].kernel[...])


def test_a_variable_or_a_layer_put_in_another_place_is_followed():
    """An executable's result must not go to a variable that the model holds no more."""
    model, _ = make()
    step = compiled(scale, model)
    step(model, batch_of(2))
    old = model.layers[0].kernel
    held = np.asarray(old[...])
    for change in (
        lambda: setattr(model.layers[0], "kernel", nnx.Param(jnp.full((3, 3), 2.0))),
        lambda: setattr(model.layers[0], "kernel", nnx.Param(jnp.full((3, 3), 2.0))),  # equal, and another
    ):
        change()
        step(model, batch_of(2))
        np.testing.assert_array_equal(model.layers[0].kernel[...], np.full((3, 3), 4.0))
        np.testing.assert_array_equal(old[...], held)
    layer = nnx.Linear(3, 3, rngs=nnx.Rngs(5))
    model.layers[0] = model.layers[2] = layer
    kernel = np.asarray(layer.kernel[...])
    step(model, batch_of(2))
    np.testing.assert_allclose(layer.kernel[...], 2 * kernel)
    nnx.update(model, nnx.state(Model(nnx.Rngs(7))))
    kernel = np.asarray(model.layers[0].kernel[...])
    step(model, batch_of(2))
    np.testing.assert_allclose(model.layers[0].kernel[...], 2 * kernel)


def test_batch_sizes_and_costs_are_found_for_modules_which_are_left_alone():
    model, _ = make()
    before = leaves_of(model)
    fit = sb.fit_batch_sizes(scale, PLAN, 10**5, model, sb.BATCH, progress=False, max_batch_size=64, donate_argnums=0)
    assert [bucket.batch_size for bucket in fit.plan.buckets] == [64, 64]
    for by in ("seconds", "flops"):
        cost = sb.measure_costs(scale, PLAN, model, sb.BATCH, by=by, rounds=2, progress=False, donate_argnums=0)
        assert all(each > 0 for each in cost.costs)
    assert_equal(leaves_of(model), before)


@jax.tree_util.register_pytree_node_class
class Box:
    """A container of a type of its own, to be changed in place."""

    def __init__(self, held):
        self.held = held

    def tree_flatten(self):
        return (self.held,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_variable_put_into_a_container_is_followed():
    class Holder(nnx.Module):
        def __init__(self):
            self.listed = nnx.data([nnx.Param(jnp.ones(())), (nnx.Param(jnp.ones(())),)])
            self.named = nnx.data({"a": {"b": nnx.Param(jnp.ones(()))}})
            self.boxed = nnx.data(Box(nnx.Param(jnp.ones(()))))
            self.state = nnx.data(nnx.State({"a": {"b": nnx.Param(jnp.ones(()))}}))

    def variables(model):
        return [model.listed[0], model.named["a"]["b"], model.boxed.held, model.state["a"]["b"]]

    def fn(model, batch):
        for each in variables(model):
            each[...] = each[...] * 2
        return batch["x"].sum()

    model = Holder()
    step = compiled(fn, model)
    step(model, batch_of(2))
    assert [float(each[...]) for each in variables(model)] == [2, 2, 2, 2]
    old = variables(model)
    model.listed[0] = nnx.Param(jnp.float32(2))
    model.named["a"]["b"] = nnx.Param(jnp.float32(2))
    model.boxed.held = nnx.Param(jnp.float32(2))
    model.state["a"]["b"] = nnx.Param(jnp.float32(2))
    step(model, batch_of(8))
    assert [float(each[...]) for each in variables(model)] == [4, 4, 4, 4]
    assert [float(each[...]) for each in old] == [2, 2, 2, 2]


def test_another_structure_is_refused_by_path():
    model, _ = make()
    step = compiled(scale, model)

    def refused():
        with pytest.raises(sb.SignatureError, match="not made of what they were at compile") as caught:
            step(model, batch_of(2))
        return caught.value.differences

    model.layers.append(nnx.Linear(3, 3, rngs=nnx.Rngs(5)))
    assert "model.layers[3]: nothing expected, Linear received" in refused()
    model, _ = make()
    model.layers[2] = nnx.Linear(3, 3, rngs=nnx.Rngs(5))
    assert "model.layers[2]: the same as model.layers[0] expected, Linear received" in refused()
    model, _ = make()
    step(model, batch_of(2))
    model.extra = nnx.Param(jnp.ones(()))
    assert refused() == ["model.extra: nothing expected, Param received"]
    model, _ = make()
    step(model, batch_of(2))
    model.layers[0].kernel = nnx.BatchStat(model.layers[0].kernel[...])
    assert "model.layers[0].kernel: Param expected, BatchStat received" in refused()
    model, _ = make()
    step(model, batch_of(2))
    model.layers[0].kernel = nnx.Param(model.layers[0].kernel[...], note="another")
    (line,) = refused()
    assert line.startswith("model.layers[0].kernel's metadata: {")
    assert "'note': 'another'" in line.split(" expected, ")[1]


class Same:
    """Prints alike, and is compared by identity."""

    def __repr__(self):
        return "Same()"


def test_a_static_attribute_that_only_its_identity_tells_is_refused():
    model, _ = make()
    model.config = Same()
    step = compiled(scale, model)
    step(model, batch_of(2))
    model.config = Same()
    with pytest.raises(sb.SignatureError, match="an attribute that prints as before and compares unequal to it"):
        step(model, batch_of(2))


def test_metadata_changed_in_place_is_seen():
    model, _ = make()
    step = compiled(scale, model)
    step(model, batch_of(2))
    Access.of(nnx.Variable).metadata(model.layers[0].kernel)["note"] = "another"
    with pytest.raises(sb.SignatureError, match="kernel's metadata: "):
        step(model, batch_of(2))


def test_a_variable_of_another_shape_or_dtype_is_refused_by_leaf():
    model, _ = make()
    step = compiled(scale, model)
    model.layers[0].kernel = nnx.Param(jnp.ones((3, 4)))
    model.layers[0].bias = nnx.Param(jnp.ones(3, jnp.bfloat16))
    with pytest.raises(sb.SignatureError, match="JAX would compile anew") as caught:
        step(model, batch_of(2))
    assert caught.value.differences == [
        "model.layers[0].bias: bfloat16[3] received, float32[3] expected",
        "model.layers[0].kernel: float32[3, 4] received, float32[3, 3] expected",
    ]


def test_a_module_that_drifts_is_found_at_compile():
    def promotes(model, batch):
        kernel = model.layers[1].kernel
        model.layers[1].kernel = nnx.Param(kernel[...].astype(jnp.bfloat16), **kernel.get_metadata())
        return batch["x"].sum()

    model, _ = make()
    with pytest.raises(sb.DriftError, match="another state than it takes") as caught:
        compiled(promotes, model)
    (line,) = caught.value.differences
    assert line.startswith("model.layers[1].kernel: float32[3, 3] taken, bfloat16[3, 3] returned (dtype: ")

    def sows(model, batch):
        model.seen = nnx.Intermediate(batch["x"])
        return batch["x"].sum()

    before = leaves_of(model)
    with pytest.raises(sb.DriftError, match=r"take what the step sows out again with nnx.pop\(\)") as caught:
        compiled(sows, model)
    assert any(line.startswith("model.seen: nothing taken, Intermediate") for line in caught.value.differences)
    assert_equal(leaves_of(model), before)

    def pops(model, batch):
        sows(model, batch)
        return nnx.pop(model, nnx.Intermediate)

    (seen,) = jax.tree.leaves(compiled(pops, model)(model, batch_of(2)))
    np.testing.assert_array_equal(seen, batch_of(2)["x"])


class Odd(nnx.Module):
    """Holds arrays that are no variables, a variable that holds a tree, and one that holds nothing."""

    def __init__(self):
        self.count = jnp.zeros(())
        self.tree = nnx.Variable({"a": jnp.zeros(()), "b": jnp.ones(2)})
        self.none = nnx.Variable(None)


def test_arrays_that_are_no_variables_and_trees_in_variables_are_updated_as_well():
    def fn(model, batch):
        model.count = model.count + batch["s_mask"].sum()
        model.tree.set_value({"a": model.tree["a"] + 1, "b": model.tree["b"] * 2}) if hasattr(
            model.tree, "set_value"
        ) else setattr(model.tree, "value", {"a": model.tree["a"] + 1, "b": model.tree["b"] * 2})
        return model.count

    ours, theirs = Odd(), Odd()
    step = compiled(fn, ours)
    jitted = nnx.jit(fn)
    for size in (2, 8, 2):
        assert float(step(ours, batch_of(size))) == float(jitted(theirs, batch_of(size)))
    assert_equal(leaves_of(ours), leaves_of(theirs))
    assert float(ours.count) == 3 * (2 + 8 + 2)
    ours.none = nnx.Variable(jnp.ones(()))
    with pytest.raises(sb.SignatureError, match="model.none: Variable of .* expected, Variable received"):
        step(ours, batch_of(2))


def test_a_variable_without_a_value_that_gets_one_is_refused():
    class Holder(nnx.Module):
        def __init__(self):
            self.w, self.cache = nnx.Param(jnp.ones(())), nnx.Variable(None)

    model = Holder()
    step = compiled(lambda model, batch: model.w[...] * batch["x"].sum(), model)
    step(model, batch_of(2))
    Access.of(nnx.Variable).put(model.cache, jnp.ones(()))
    with pytest.raises(sb.SignatureError, match="model.cache: Variable of .* expected, Variable received"):
        step(model, batch_of(2))


def test_an_array_attribute_that_is_replaced_is_read_anew():
    model, _ = make()
    step = compiled(lambda model, batch: model.offset.sum() + 0 * batch["x"].sum(), model)
    assert float(step(model, batch_of(2))) == 3
    model.offset = jnp.ones(3) * 5
    assert float(step(model, batch_of(2))) == 15


def test_modules_by_keyword_beside_states_and_statics():
    def fn(state, batch, *, model, power):
        scale(model, batch)
        return {"n": state["n"] + 1}, model.layers[0].kernel[...].sum() ** power

    model, _ = make()
    step = sb.CompiledStep(fn, PLAN, static_argnames="power", donate_argnames="state")
    report = step.compile({"n": jnp.int32(0)}, sb.BATCH, model=model, power=sb.OneOf(1, 2), progress=False)
    assert report.notes == []
    total = float(model.layers[0].kernel[...].sum())
    state, one = step({"n": jnp.int32(0)}, batch_of(2), model=model, power=1)
    state, two = step(state, batch_of(8), model=model, power=2)
    assert int(state["n"]) == 2
    np.testing.assert_allclose([one, two], [2 * total, (4 * total) ** 2], rtol=1e-4)
    with pytest.raises(sb.SignatureError, match=r"with the flax.nnx modules \['model'\], but was called without"):
        step(state, batch_of(2), power=1)
    drifts = sb.CompiledStep(lambda state, batch, model: {"n": state["n"] + 0.5}, PLAN, donate_argnums=0)
    with pytest.raises(sb.DriftError, match=r"state\['n'\]: int32\[\] taken"):
        drifts.compile({"n": jnp.int32(0)}, sb.BATCH, model, progress=False)


def test_a_module_serves_predict():
    model, _ = make()
    model.eval()
    samples = [{"x": np.random.default_rng(n).standard_normal(n).astype(np.float32)} for n in (1, 7, 2, 8, 3)]
    step = compiled(lambda model, batch: model(batch["x"]), model)
    for donated in (False, True):
        if donated:
            step = compiled(lambda model, batch: model(batch["x"]), model, donate_argnums=0)
        for sample, found in zip(samples, step.predict(model, samples), strict=True):
            np.testing.assert_allclose(found, model(sample["x"][None])[0], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_updated_in_place_is_refused():
    model, optimizer = make()
    with pytest.raises(sb.StepError, match="'state' is a tuple that holds a flax.nnx module"):
        compiled(lambda state, batch: batch["x"].sum(), (model, optimizer))
    with pytest.raises(sb.StepError, match="'kernel' is a bare flax.nnx variable"):
        compiled(lambda kernel, batch: batch["x"].sum(), model.layers[0].kernel)
    for kind in ("ref", "hijax") if jax.__version_info__ >= (0, 10) else ("ref",):  # flax 0.12.5 cannot make the latter
        with nnx.var_defaults(**{kind: True}):
            mutable = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        with pytest.raises(sb.StepError, match="model.kernel is a flax.nnx variable over a mutable array"):
            compiled(lambda model, batch: batch["x"].sum(), mutable)
    with pytest.raises(sb.StepError, match="the step returns a flax.nnx module: modules are updated in place"):
        compiled(lambda model, batch: (batch["x"].sum(), model), model)
    step = compiled(scale, model)
    with pytest.raises(sb.SignatureError, match="'model' was a flax.nnx module at compile.., and is a State"):
        step(nnx.state(model), batch_of(2))


def test_a_split_module_passes_as_any_state():
    """As before: a functional step over `nnx.split`'s state is none of this module's business."""
    model, _ = make()
    graphdef, state = nnx.split(model)

    def fn(state, batch):
        model = nnx.merge(graphdef, state)
        out = scale(model, batch)
        return nnx.state(model), out

    step = compiled(fn, state, donate_argnums=0)
    state, _ = step(jax.tree.map(jnp.copy, state), batch_of(2))
    np.testing.assert_allclose(state["layers"][0]["kernel"][...], 2 * model.layers[0].kernel[...])


def test_a_model_that_is_dropped_is_freed():
    model, optimizer = make()
    step = compiled(lambda model, optimizer, batch: scale(model, batch), model, optimizer)
    step(model, optimizer, batch_of(2))
    kernel = weakref.ref(model.layers[0].kernel[...])
    del model, optimizer
    gc.collect()
    assert kernel() is None


def test_it_runs_eagerly_under_disable_jit():
    model, _ = make()
    kernel = np.asarray(model.layers[0].kernel[...])
    step = compiled(scale, model)
    with jax.disable_jit():
        found = step(model, batch_of(2))
    np.testing.assert_allclose(found, batch_of(2)["x"].sum(), rtol=1e-6)
    np.testing.assert_allclose(model.layers[0].kernel[...], 2 * kernel)


def test_abstract_modules_are_enough_to_compile():
    def fn(model, batch):
        model.kernel[...] = model.kernel[...] * 2
        return batch["x"].sum()

    step = compiled(fn, nnx.eval_shape(lambda: nnx.Linear(3, 3, rngs=nnx.Rngs(0))))
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    kernel = np.asarray(model.kernel[...])
    step(model, batch_of(2))
    np.testing.assert_allclose(model.kernel[...], 2 * kernel)


def test_flaxs_slots_are_where_they_were():
    access, public = Access.of(nnx.Variable), Access.public(nnx.Variable)
    assert access.by_slots
    assert not public.by_slots
    for kind in (nnx.Param, nnx.BatchStat, nnx.RngKey, nnx.OptState):
        assert issubclass(kind, nnx.Variable)
    one = nnx.Param(jnp.ones(2), note="kept")
    assert access.get(one) is public.get(one)
    assert dict(access.metadata(one)) == dict(public.metadata(one))
    for each in (access, public):
        value = jnp.zeros(3)
        each.put(one, value)
        assert access.get(one) is public.get(one) is value
    assert not Access.of(type("Other", (), {"get_raw_value": 1, "set_raw_value": 1, "get_metadata": 1})).by_slots


def test_flax_is_never_imported():
    code = """
import sys, jax.numpy as jnp, shapebucket as sb
plan = sb.BucketPlan(sb.Layout({"x": "float32[s]"}), [sb.Bucket((("s", 2),), 4)])
step = sb.CompiledStep(lambda state, batch: state + batch["x"].sum(), plan)
step.compile(jnp.float32(0), sb.BATCH, progress=False)
step(jnp.float32(0), sb.pad([], plan.buckets[0], plan))
assert not [name for name in sys.modules if name.split(".")[0] == "flax"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


DEVICES = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
import shapebucket as sb

mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
rows, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
plan = sb.BucketPlan(sb.Layout({"x": "float32[s]"}), [sb.Bucket((("s", size),), 4) for size in (2, 8)])

def fn(model, batch):
    model.kernel[...] = model.kernel[...] + batch["x"].sum(1, keepdims=True)  # XLA would spread it as the batch
    model.bias[...] = model.bias[...] + batch["x"].sum()
    return batch["x"] + 1

for options in ({}, {"out_shardings": rows}):
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    for variable, sharding in ((model.kernel, everywhere), (model.bias, rows)):
        variable[...] = jax.device_put(variable[...], sharding)
    step = sb.CompiledStep(fn, plan, batch_sharding=rows, donate_argnums=0, **options)
    step.compile(model, sb.BATCH, progress=False)
    with sb.CompileCounter() as compiles:
        for bucket in plan.buckets * 2:
            out = step(model, sb.pad([], bucket, plan))
    assert compiles.count == 0
    assert model.kernel[...].sharding.is_equivalent_to(everywhere, 2), model.kernel[...].sharding
    assert model.bias[...].sharding.is_equivalent_to(rows, 1)
    if options:
        assert out.sharding.is_equivalent_to(rows, 2)
print("passed")
"""


@pytest.mark.slow
def test_a_module_stays_where_it_lies_on_two_devices():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.strip() == "passed", done.stderr
