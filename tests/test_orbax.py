"""Checkpoints of model and loader together, with Orbax and Grain's own handler for it."""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import flags
from conftest import end

import shapebucket as sb

READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=3)
STEPS = 5


def train_step(state, batch):
    """Sums the samples' numbers, each step's weighted anew: another order gives another state."""
    seen = jnp.where(batch["example_mask"], batch["tokens"][:, 0], 0).sum()
    return {"sum": state["sum"] * 0.9 + seen, "steps": state["steps"] + 1}, seen


def initial():
    return {"sum": jnp.zeros(()), "steps": jnp.zeros((), jnp.int32)}


@pytest.fixture(scope="module")
def source():
    from conftest import make_tokens

    return grain.MapDataset.source(make_tokens(100))


@pytest.fixture(scope="module")
def lengths(source):
    return sb.measure(source, sb.Layout({"tokens": "s"}), progress=False)


@pytest.fixture(scope="module")
def plan(lengths):
    return sb.plan_buckets(lengths, max_buckets=2, token_budget=128)


@pytest.fixture(scope="module")
def step(plan):
    step = sb.CompiledStep(train_step, plan, donate_argnames="state")
    step.compile(initial(), sb.BATCH)
    return step


def workers(count: int) -> grain.MultiprocessingOptions:
    flags.FLAGS.mark_as_parsed()  # https://github.com/google/grain/issues/1355
    return grain.MultiprocessingOptions(num_workers=count)


@pytest.fixture(params=["schedule", "elastic", "stream"])
def loader(request, source, plan, lengths):
    batches = sb.BucketedMapDataset(source, plan, lengths, seed=1).repeat(2)
    return {
        "schedule": batches.to_iter_dataset(READ),
        "elastic": sb.ElasticIterDataset(batches, READ),
        "stream": sb.BucketedIterDataset(source.repeat(2).to_iter_dataset(READ), plan, max_wait=60),
    }[request.param]


def train(step, state, iterator, steps=None):
    """Trains for some steps, or to the end; returns the state, and what each step saw."""
    seen = []
    for batch in iterator:
        state, each = step(state, batch)
        seen.append(int(each))
        if len(seen) == steps:
            break
    return state, seen


def save(directory, state, iterator):
    with ocp.CheckpointManager(directory) as manager:
        manager.save(
            int(state["steps"]),
            args=ocp.args.Composite(
                model=ocp.args.StandardSave(state), loader=grain.checkpoint.CheckpointSave(iterator)
            ),
        )


def restore(directory, iterator):
    """Restores the last checkpoint's loader into an iterator; returns its model."""
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, initial())
    with ocp.CheckpointManager(directory) as manager:
        args = ocp.args.Composite(
            model=ocp.args.StandardRestore(abstract), loader=grain.checkpoint.CheckpointRestore(iterator)
        )
        return manager.restore(manager.latest_step(), args=args).model


def assert_same(state, other):
    jax.tree.map(np.testing.assert_array_equal, state, other)


def test_model_and_loader_go_on_together(loader, step, tmp_path):
    expected, all_seen = train(step, initial(), iter(loader))
    assert len(set(all_seen)) > len(all_seen) // 2
    iterator = iter(loader)
    state, seen = train(step, initial(), iterator, STEPS)
    save(tmp_path, state, iterator)
    train(step, state, iterator, 3)  # the steps that are lost
    fresh = iter(loader)
    state = restore(tmp_path, fresh)
    assert int(state["steps"]) == STEPS
    state, rest = train(step, state, fresh)
    assert seen + rest == all_seen
    assert_same(state, expected)


def test_the_first_and_the_last_position_can_be_saved(loader, step, tmp_path):
    iterator = iter(loader)
    save(tmp_path / "first", initial(), iterator)
    expected, seen = train(step, initial(), iterator)
    save(tmp_path / "last", expected, iterator)
    fresh = iter(loader)
    state, again = train(step, restore(tmp_path / "first", fresh), fresh)
    assert again == seen
    assert_same(state, expected)
    fresh = iter(loader)
    state, again = train(step, restore(tmp_path / "last", fresh), fresh)
    assert again == []
    assert_same(state, expected)


def test_a_stream_of_another_plan_is_refused(source, lengths, plan, step, tmp_path):
    iterator = iter(sb.BucketedIterDataset(source.to_iter_dataset(READ), plan))
    state, _ = train(step, initial(), iterator, STEPS)
    save(tmp_path, state, iterator)
    other = sb.plan_buckets(lengths, max_buckets=3, token_budget=128)
    with pytest.raises(
        sb.StateError, match="the state was saved by a loader with plan '.*', here '.*': restore it into"
    ):
        restore(tmp_path, iter(sb.BucketedIterDataset(source.to_iter_dataset(READ), other)))


def test_after_a_restore_reading_starts_where_the_state_says(source, plan, step, tmp_path):
    """Grain's handler starts reading at once; what comes before the oldest waiting sample is not read again."""
    read = []

    def noted(number, sample):
        read.append(number)
        return sample

    dataset = sb.BucketedIterDataset(source.map_with_index(noted).to_iter_dataset(READ), plan, max_wait=16)
    iterator = iter(dataset)
    state, _ = train(step, initial(), iterator, STEPS)
    save(tmp_path, state, iterator)
    start = iterator.get_state()["start"]
    assert start > 0
    iterator.close()
    read.clear()
    fresh = iter(dataset)
    restore(tmp_path, fresh)
    next(fresh)
    fresh.close()
    assert min(read) == start


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["schedule", "stream"])
def test_another_number_of_workers_goes_on(kind, source, plan, lengths, step, tmp_path):
    """0 → 2 → 3 workers, each from the last one's checkpoint."""
    batches = sb.BucketedMapDataset(source, plan, lengths, seed=1).repeat(2)

    def make(count):
        if kind == "schedule":
            return sb.ElasticIterDataset(batches, READ, workers(count))
        return sb.BucketedIterDataset(sb.ElasticIterDataset(source.repeat(2), READ, workers(count)), plan, max_wait=60)

    expected, all_seen = train(step, initial(), iter(make(0)))
    state, found, last = initial(), [], None
    for count, steps in ((0, STEPS), (2, STEPS), (3, None)):
        iterator = iter(make(count))
        if last is not None:
            state = restore(last, iterator)
        state, seen = train(step, state, iterator, steps)
        found += seen
        last = tmp_path / str(count)
        save(last, state, iterator)
        end(iterator)
    assert found == all_seen
    assert_same(state, expected)


@pytest.mark.slow
def test_mp_prefetch_takes_no_state_of_another_number_of_workers(source, plan, step, tmp_path):
    """Behind mp_prefetch the restore says so. Before it, the errors are Grain's, and with more workers they come late."""

    def before(count):
        return sb.BucketedIterDataset(source.to_iter_dataset(READ), plan).mp_prefetch(workers(count))

    def behind(count):
        return sb.BucketedIterDataset(source.to_iter_dataset(READ).mp_prefetch(workers(count)), plan)

    for make, count in ((before, 2), (behind, 2)):
        iterator = iter(make(count))
        state, _ = train(step, initial(), iterator, STEPS)
        save(tmp_path / make.__name__, state, iterator)
        expected = train(step, state, iterator)[1]
        end(iterator)
        again = iter(make(count))
        assert train(step, restore(tmp_path / make.__name__, again), again)[1] == expected
        end(again)
    with pytest.raises(IndexError):
        restore(tmp_path / "before", iter(before(1)))
    more = iter(before(3))
    restore(tmp_path / "before", more)
    with pytest.raises(IndexError):
        train(step, initial(), more, 3)
    end(more)
    with pytest.raises(
        sb.StateError, match="this is no state of a BucketedIterDataset, .*: .*; one that was saved behind mp_pre"
    ):
        restore(tmp_path / "before", iter(before(0)))
    for count in (0, 1, 3):
        with pytest.raises(
            sb.StateError,
            match=r"the data set before the loader does not take its part of the state \(.*Error: .*\): build it as it was",
        ):
            restore(tmp_path / "behind", iter(behind(count)))
