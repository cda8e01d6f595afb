"""Inference: raw samples in, one output a sample out, through the executables that are there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shapebucket as sb

LAYOUT = sb.Layout({"x": "float32[s]"})
PLAN = sb.BucketPlan(LAYOUT, [sb.Bucket((("s", size),), rows) for size, rows in ((4, 8), (8, 4), (16, 2))])
TWO = sb.BucketPlan(
    sb.Layout({"src": "float32[s]", "tgt": "float32[t]"}),
    [sb.Bucket((("s", s), ("t", t)), rows) for s, t, rows in ((4, 4, 8), (4, 16, 4), (16, 16, 2))],
)


def samples_of(count, longest=16, seed=0):
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal(rng.integers(1, longest + 1)).astype(np.float32)} for _ in range(count)]


def attention(params, batch):
    """Attends within each row, over what is real; gives a value a position and one a row."""
    x = batch["x"][..., None] * params["w"]
    scores = jnp.where(batch["s_mask"][:, None, :], x @ x.swapaxes(1, 2), -jnp.inf)
    values = jax.nn.softmax(scores, axis=-1) @ x
    total = jnp.where(batch["s_mask"][..., None], values, 0).sum(axis=1)
    return {"values": values, "mean": total / batch["s_mask"].sum(axis=1, keepdims=True)}


def alone(params, sample):
    """The same for one sample without padding, in numpy."""
    x = sample["x"].astype(np.float64)[:, None] * np.asarray(params["w"], np.float64)
    scores = np.exp(x @ x.T - (x @ x.T).max(axis=1, keepdims=True))
    values = scores / scores.sum(axis=1, keepdims=True) @ x
    return {"values": values, "mean": values.mean(axis=0)}


def compiled(fn, *before, plan=PLAN, **options):
    step = sb.CompiledStep(fn, plan, **options)
    step.compile(*before, sb.BATCH, progress=False)
    return step


PARAMS = {"w": jnp.asarray([0.5, -1.0, 2.0])}


def test_the_outputs_are_those_of_each_sample_alone_in_order_and_nothing_compiles():
    step = compiled(attention, PARAMS)
    samples = samples_of(57)
    with sb.CompileCounter() as compiles:
        found = step.predict(PARAMS, samples)
    assert compiles.count == 0
    assert len(found) == 57
    for sample, each in zip(samples, found, strict=True):
        expected = alone(PARAMS, sample)
        assert each["values"].shape == (len(sample["x"]), 3)
        assert each["mean"].shape == (3,)
        np.testing.assert_allclose(each["values"], expected["values"], rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(each["mean"], expected["mean"], rtol=2e-5, atol=1e-6)


def test_leftovers_share_batches():
    """Three lengths that fit three buckets go into one batch of the largest, where they fit, and full ones first."""
    step = compiled(lambda batch: batch["x"], plan=PLAN)
    one_each = [{"x": np.ones(size, np.float32)} for size in (3, 16)]
    assert len(step.predict(one_each)) == 2
    assert sum(each.calls for each in step.executables) == 1
    step.predict([{"x": np.ones(2, np.float32)}] * 17 + [{"x": np.ones(7, np.float32)}])
    assert [each.calls for each in sorted(step.executables, key=lambda each: each.bucket.batch_size)] == [1, 1, 2]


def test_no_samples_give_no_outputs_and_an_iterable_will_do():
    step = compiled(lambda batch: batch["x"] * 2)
    assert step.predict([]) == []
    assert step.predict(iter([])) == []
    (found,) = step.predict(each for each in samples_of(1))
    np.testing.assert_array_equal(found, samples_of(1)[0]["x"] * 2)


def test_a_sample_that_fits_no_bucket_is_treated_as_said():
    step = compiled(lambda batch: (batch["x"], batch["s_mask"].sum(axis=1)))
    samples = [{"x": np.arange(size, dtype=np.float32)} for size in (3, 20, 5)]
    with pytest.raises(sb.OverlongError, match="sample 1 with lengths {'s': 20} fits no bucket"):
        step.predict(samples)
    assert all(each.calls == 0 for each in step.executables)
    cut = step.predict(samples, overlong="truncate")
    assert [len(values) for values, _ in cut] == [3, 16, 5] == [int(count) for _, count in cut]
    np.testing.assert_array_equal(cut[1][0], np.arange(16))
    dropped = step.predict(samples, overlong="drop")
    assert dropped[1] is None
    assert [len(dropped[index][0]) for index in (0, 2)] == [3, 5]
    assert step.predict(samples[1:2], overlong="drop") == [None]
    with pytest.raises(sb.ScheduleError, match="overlong must be one of"):
        step.predict(samples, overlong="cut")


def test_the_batch_may_be_a_keyword_and_statics_and_prepare_pass():
    def fn(scale, *, batch, power, train):
        assert not train
        return scale * batch["y"] ** power

    step = sb.CompiledStep(
        fn, PLAN, static_argnames=("power", "train"), prepare=lambda batch: {**batch, "y": batch["x"] + 1}
    )
    step.compile(jnp.float32(1), batch=sb.BATCH, power=sb.OneOf(1, 2), train=False, progress=False)
    samples = samples_of(5)
    for power in (1, 2):
        found = step.predict(jnp.float32(3), batch=samples, power=power, train=False)
        for sample, each in zip(samples, found, strict=True):
            np.testing.assert_allclose(each, 3 * (sample["x"] + 1) ** power, rtol=1e-6)
    with pytest.raises(sb.SignatureError, match="power=3 received"):
        step.predict(jnp.float32(3), batch=samples, power=3, train=False)


def test_two_axes_nested_outputs_and_lengths_in_place_of_masks():
    plan = sb.BucketPlan(TWO.layout, TWO.buckets, masks="length")

    def fn(batch):
        grid = batch["src"][:, :, None] * batch["tgt"][:, None, :]
        return [grid, (batch["tgt"], {"n": batch["s_length"] + batch["t_length"], "none": None})]

    step = compiled(fn, plan=plan)
    samples = [
        {"src": np.ones(s, np.float32), "tgt": np.arange(t, dtype=np.float32)} for s, t in ((3, 2), (16, 5), (1, 9))
    ]
    for sample, (grid, (tgt, rest)) in zip(samples, step.predict(samples), strict=True):
        np.testing.assert_array_equal(grid, sample["src"][:, None] * sample["tgt"])
        np.testing.assert_array_equal(tgt, sample["tgt"])
        assert rest["n"] == len(sample["src"]) + len(sample["tgt"])
        assert rest["none"] is None


def test_outputs_without_rows_are_refused():
    step = compiled(lambda batch: {"loss": batch["x"].sum(), "x": batch["x"]})
    with pytest.raises(sb.LayoutError, match=r"feature \"\['loss'\]\": has shape \(\) for .*no row for each sample"):
        step.predict(samples_of(3))
    assert all(each.calls == 0 for each in step.executables)
    with pytest.raises(sb.LayoutError, match=r"has shape \(4, 8\) for \[8 × s=4\].*rows first"):
        compiled(lambda batch: batch["x"].T).predict(samples_of(3))


ONE = sb.BucketPlan(LAYOUT, PLAN.buckets[1:2])  # of 8


@pytest.mark.parametrize(
    ("fn", "plan", "what"),
    [
        (lambda batch: batch["x"][:, ::2], PLAN, "dimension 1 is 2, 4, 8 for .*no axis of the plan, nor of one size"),
        (lambda batch: batch["x"] @ batch["x"].T, PLAN, "dimension 1 is 8, 4, 2 for .*no axis of the plan"),
        (lambda batch: batch["x"], ONE, "dimension 1 is 8 for .*'s' or 8: say what it is with outputs="),
    ],
)
def test_dimensions_that_cannot_be_told_are_refused(fn, plan, what):
    with pytest.raises(sb.LayoutError, match=what):
        compiled(fn, plan=plan).predict(samples_of(3, longest=4))


def test_outputs_may_be_told():
    step = compiled(lambda batch: {"y": batch["x"], "fixed": batch["x"] * 2, "one": batch["x"].sum(1)}, plan=ONE)
    told = {"y": "s", "fixed": "float32[8]", "one": ""}
    (found,) = step.predict([{"x": np.ones(3, np.float32)}], outputs=told)
    assert {name: each.shape for name, each in found.items()} == {"y": (3,), "fixed": (8,), "one": ()}
    with pytest.raises(sb.LayoutError, match="outputs= has the tree .* but the step returns"):
        step.predict(samples_of(1, longest=4), outputs={"y": "s"})
    with pytest.raises(sb.LayoutError, match="outputs= names the axis 't'; the plan has"):
        step.predict(samples_of(1, longest=4), outputs={**told, "y": "t"})
    with pytest.raises(sb.LayoutError, match=r"is float32\[4, 8\] for .*outputs= says '9', \[4, 9\] with its rows"):
        step.predict(samples_of(1, longest=4), outputs={**told, "fixed": "9"})
    with pytest.raises(sb.LayoutError, match=r"outputs= says 'int32\[8\]'"):
        step.predict(samples_of(1, longest=4), outputs={**told, "fixed": "int32[8]"})


def test_what_is_no_list_of_samples_is_refused():
    step = compiled(lambda batch: batch["x"])
    with pytest.raises(sb.StepError, match="predict.. takes a list of raw samples in the batch's place, but got dict"):
        step.predict(sb.pad(samples_of(1, longest=4), PLAN.buckets[0], PLAN))
    with pytest.raises(sb.LayoutError, match="sample 1, feature 'x': has rank 2"):
        step.predict([*samples_of(1), {"x": np.zeros((2, 2), np.float32)}])
    with pytest.raises(sb.SignatureError, match="call it as compile"):
        step.predict()
    with pytest.raises(sb.StepError, match="no executables yet: call compile.params, BATCH. before predict"):
        sb.CompiledStep(lambda batch: batch["x"], PLAN).predict([])


def test_donated_arguments_and_names_of_its_own_are_refused():
    step = compiled(lambda state, batch: (state, batch["x"]), jnp.ones(4), donate_argnums=0)
    state = jnp.ones(4)
    with pytest.raises(sb.StepError, match="predict.. gives 'state' to the step for each batch, but it is donated"):
        step.predict(state, samples_of(3))
    assert not state.is_deleted()
    named = sb.CompiledStep(lambda batch, outputs: batch["x"] * outputs, PLAN)
    named.compile(sb.BATCH, jnp.float32(1), progress=False)
    with pytest.raises(sb.StepError, match="the step has an argument 'outputs', which predict.. means for itself"):
        named.predict(samples_of(1), jnp.float32(1))


def test_an_evicted_bucket_comes_back_on_a_miss():
    step = compiled(lambda batch: batch["x"] + 1, on_miss="evict")
    for bucket in PLAN.buckets:
        step.evict(bucket)
    samples = [{"x": np.ones(size, np.float32)} for size in (16, 15, 3)]
    with pytest.raises(sb.LayoutError, match="'s' or 16"):  # one bucket alone does not tell
        step.predict(samples[:1])
    found = step.predict(samples, outputs="s")
    assert [len(each) for each in found] == [16, 15, 3]


def test_it_runs_eagerly_under_disable_jit():
    step = compiled(attention, PARAMS)
    samples = samples_of(4)
    expected = step.predict(PARAMS, samples)
    with jax.disable_jit():
        found = step.predict(PARAMS, samples)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one["values"], other["values"], rtol=1e-5, atol=1e-6)
