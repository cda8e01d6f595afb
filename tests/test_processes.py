"""Several processes in step. Those that need JAX's own start real processes, which print JSON, and end them in any case."""

import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
import time

import grain
import jax
import numpy as np
import pytest
from conftest import make_tokens
from grain._src.python.dataset.dataset import get_execution_summary  # no public name as yet
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shapebucket as sb
from shapebucket.loading import lockstep as lockstep_module
from shapebucket.loading.lockstep import next_buckets

LAYOUT = sb.Layout({"tokens": "int32[s]"})
READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=3)
TIMEOUT = 120  # seconds for all processes of a test together


def plan_of(*buckets: tuple[int, int]) -> sb.BucketPlan:
    return sb.BucketPlan(LAYOUT, [sb.Bucket((("s", size),), rows) for size, rows in buckets])


PLAN = plan_of((4, 8), (8, 4), (16, 4))
LENGTHS = np.random.default_rng(0).integers(0, 17, 203)


def run_processes(count: int, program: str, *, devices: int = 1) -> list:
    """Runs a program in JAX processes of some devices each; returns what each printed last, read as JSON."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [[sys.executable, "-c", PROLOGUE + program, str(port), str(count), str(i)] for i in range(count)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(each, env=environment, **pipes) for each in arguments]
    deadline = time.monotonic() + TIMEOUT
    outputs = []
    try:
        for child in children:
            try:
                outputs.append(child.communicate(timeout=max(1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                for each in children:
                    each.kill()
                outputs.append(child.communicate())
    finally:
        for child in children:
            child.kill()
            child.wait()
    for child, (_, errors) in zip(children, outputs, strict=True):
        assert child.returncode == 0, errors
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]


PROLOGUE = """
import functools, json, sys
import grain, jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import shapebucket as sb
from conftest import make_tokens

port, count, index = map(int, sys.argv[1:])
tokens = make_tokens(700)
source = grain.MapDataset.source(tokens)
lengths = sb.measure(source, sb.Layout({"tokens": "s"}), progress=False)
plan = sb.plan_buckets(lengths, max_buckets=4, token_budget=256, batch_multiple_of=4)
READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=3)
sb.BucketedMapDataset(source, plan, lengths)  # starts no backend of JAX, or initialize would raise
sb.BucketedIterDataset(source.to_iter_dataset(READ), plan)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", count, index)
mesh = jax.make_mesh((jax.device_count(),), ("data",))
data, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

def mean_of(total, batch):
    mean = jnp.where(batch["s_mask"], batch["tokens"], 0).sum() / batch["s_mask"].sum()
    return total + mean, mean

def numbers(batch):
    return batch["tokens"][batch["example_mask"], 0].tolist()

def refused(call):
    try:
        call()
    except sb.ShapebucketError as error:
        return f"{type(error).__name__}: {error}"
    return None
"""

SCHEDULED = """
loader = sb.BucketedMapDataset(source, plan, lengths, seed=3, shard="jax")
steps = 200
local = [loader[i] for i in range(steps)]
batches = loader.repeat().to_iter_dataset(READ).map(lambda batch: sb.make_global(batch, data))
batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=2)
zero = jax.device_put(jnp.zeros(()), everywhere)

def means_of(step, batches):
    step.compile(zero, sb.BATCH, progress=False)
    total, means = zero, []
    with sb.CompileCounter() as compiles:
        for _, batch in zip(range(steps), batches):
            total, mean = step(total, batch)
            means.append(float(mean))
    assert compiles.count == 0, compiles
    return means

step = sb.CompiledStep(mean_of, plan, batch_sharding=data)
declared = means_of(step, batches)
prepare = functools.partial(sb.make_global, sharding=data)
prepared = means_of(sb.CompiledStep(mean_of, plan.per_process(count), prepare=prepare), local)
assert declared == prepared
wide = jax.make_mesh((count, jax.device_count() // count), ("model", "data"))
print(json.dumps({
    "means": declared,
    "buckets": [batch["tokens"].shape for batch in local],
    "numbers": [numbers(batch) for batch in local],
    "forgotten": refused(lambda: step(zero, local[0])),
    "refusals": [
        refused(lambda: sb.BucketedMapDataset(source, plan, lengths)),
        refused(lambda: sb.BucketedIterDataset(source.to_iter_dataset(READ), plan)),
        refused(lambda: sb.make_global(local[0], everywhere)),
        refused(lambda: sb.make_global(local[0], NamedSharding(wide, P("data")))),
        refused(lambda: sb.make_global(local[0], data)),
        refused(lambda: sb.BucketedMapDataset(source, plan, lengths, shard=(0, 1))),
        refused(lambda: sb.make_global(loader[0], NamedSharding(wide, P("data")), count=1)),
    ],
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 2), (4, 1)])
def test_jax_processes_have_the_same_bucket_at_each_step_and_compute_what_one_does(count, devices):
    found = run_processes(count, SCHEDULED, devices=devices)
    tokens = make_tokens(700)
    lengths = sb.measure(tokens, sb.Layout({"tokens": "s"}), progress=False)
    plan = sb.plan_buckets(lengths, max_buckets=4, token_budget=256, batch_multiple_of=4)
    whole = sb.BucketedMapDataset(grain.MapDataset.source(tokens), plan, lengths, seed=3)
    assert len(whole) < 200
    expected = [whole[i] for i in range(200)]
    for each in found:
        rows, size = each["buckets"][0]
        hint = f"It has the rows of one of {count} processes of [{rows * count} × s={size}]: make_global() puts"
        assert hint in each["forgotten"]
        assert [(rows * count, size) for rows, size in each["buckets"]] == [x["tokens"].shape for x in expected]
        assert each["means"] == [float(np.float32(x["tokens"].sum()) / np.float32(x["s_mask"].sum())) for x in expected]
    for step, batch in enumerate(expected):
        together = sorted(itertools.chain(*(each["numbers"][step] for each in found)))
        assert together == sorted(batch["tokens"][batch["example_mask"], 0].tolist())
    assert sorted(itertools.chain(*itertools.chain(*(x["numbers"][: len(whole)] for x in found)))) == list(range(700))
    processes = f"ProcessError: {count} JAX processes run, and each would"
    silent = "at a step their batches could differ in shape, which JAX does not notice and computes wrong numbers from."
    for scheduled, streamed, replicated, copied, right, alone, told in (each["refusals"] for each in found):
        assert (
            scheduled
            == f'{processes} make batches of its own: {silent} Say shard="jax" to deal each batch to them, or '
            + ("shard=(0, 1) where each is meant to make the whole batch")
        )
        assert (
            streamed
            == f'{processes} stream batches of its own: {silent} Use BucketedMapDataset(shard="jax") where '
            + ("lengths can be known in advance; or say lockstep=True and put a LockstepIterDataset behind")
        )
        assert replicated.startswith("ProcessError: 'example_mask' of the batch was dealt into")
        assert "so it takes the parts of some processes for copies: shard the first dimension over all" in copied
        assert right is alone is told is None


STREAMED = """
local = plan.per_process(count)
mine = source[index::count][: 150 if index == 0 else 600].to_iter_dataset(READ)
batches = sb.LockstepIterDataset(sb.BucketedIterDataset(mine, local, max_wait=60, lockstep=True), local, window=4)
found = list(batches)

step = sb.CompiledStep(mean_of, plan, batch_sharding=data)
total = jax.device_put(jnp.zeros(()), everywhere)
step.compile(total, sb.BATCH, progress=False)
means = []
for batch in batches.map(lambda batch: sb.make_global(batch, data)):  # its collectives and those of the steps take turns
    total, mean = step(total, batch)
    means.append(float(mean))

def resumed(step):
    iterator = iter(batches)
    for _ in range(step):
        next(iterator)
    fresh = iter(batches)
    fresh.set_state(json.loads(json.dumps(iterator.get_state())))
    rest = list(fresh)
    jax.tree.map(np.testing.assert_array_equal, rest, found[step:])
    return len(rest)

for step in (1, 6, len(found) - 3):
    assert resumed(step) == len(found) - step

def at_different_steps():
    iterator = iter(batches)
    for _ in range(5):
        next(iterator)
    iterator.set_state({**iterator.get_state(), "step": 5 + index})
    next(iterator)

def set_in_one_alone():
    iterator = iter(batches)
    next(iterator)
    if index == 0:
        iterator.set_state(iterator.get_state())
    for _ in iterator:
        pass

counted = iter(batches)
for _ in counted:
    pass
report = counted.report()

foreign = iter(batches)
state = foreign.get_state()
state["fingerprint"]["process"] += 1
other = sb.LockstepIterDataset(sb.BucketedIterDataset(mine, local, lockstep=True), local, window=4 + index)
print(json.dumps({
    "buckets": [batch["tokens"].shape for batch in found],
    "numbers": [numbers(batch) for batch in found],
    "means": means,
    "tokens": [[int(batch["tokens"].sum()), int(batch["s_mask"].sum())] for batch in found],
    "mine": [int(each["tokens"][0]) for each in mine],
    "windows": refused(lambda: next(iter(other))),
    "steps": refused(at_different_steps),
    "alone": refused(set_in_one_alone),
    "foreign": refused(lambda: foreign.set_state(state)),
    "report": [list(report.batches), report.empty, report.held],
    "process": index,
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_streams_of_jax_processes_agree_on_each_step_and_end_together(count):
    """One has far fewer samples than the others; each resumes from its state."""
    found = run_processes(count, STREAMED)
    sums = np.sum([each["tokens"] for each in found], axis=0, dtype=np.float32)
    expected = (sums[:, 0] / sums[:, 1]).tolist()
    for each in found:
        assert each["buckets"] == found[0]["buckets"]
        assert sorted(itertools.chain(*each["numbers"])) == sorted(each["mine"])
        assert each["means"] == expected
        for what, first in (("windows", 4), ("steps", 5)):
            assert each[what] == (
                f"ProcessError: the processes of a lockstep have different {what}, "
                f"{', '.join(str(first + i) for i in range(count))}: give all the same plan (one file, BucketPlan.load) and "
                "window, and restore all from the same step"
            )
        assert each["alone"] == (
            "ProcessError: some processes of a lockstep start from a state while others are on their way: after a failure, "
            "restore all of them, from the same step"
        )
        shapes = [size for _, size in each["buckets"]]
        empty = sum(not rows for rows in each["numbers"])
        assert each["report"] == [[shapes.count(size) for size in sorted(set(shapes))], empty, 0]
        process = each["process"]
        assert each["foreign"].startswith(
            f"StateError: the state was saved by a lockstep with process {process + 1}, here {process}: each process goes on"
        )
    assert any(not n for n in found[0]["numbers"])


HELD = """
plan = sb.BucketPlan(plan.layout, [sb.Bucket((("s", size),), 4) for size in (4, 16)])
local = plan.per_process(count)
samples = [{"tokens": np.full(9 if number < 2 and index == 0 else 3, number, np.int32)} for number in range(402)]
stream = sb.BucketedIterDataset(grain.MapDataset.source(samples).to_iter_dataset(READ), local, lockstep=True)
iterator = iter(sb.LockstepIterDataset(stream, local, window=4))
steps, back = [], []
for batch in iterator:
    steps.append([batch["tokens"].shape[1], int(batch["example_mask"].sum())])
    state = iterator.get_state()
    back.append(state["seen"] - state["start"])
print(json.dumps({"steps": steps, "back": max(back)}))
"""


@pytest.mark.slow
def test_a_batch_that_no_other_process_has_is_not_held_for_ever():
    """It comes after 8 windows of batches, so a restore never reads many more than those again."""
    first, second = run_processes(2, HELD)
    at = first["steps"].index([16, 2])
    assert 8 * 4 <= at < 10 * 4
    assert second["steps"][at] == [16, 0]
    assert [size for size, _ in first["steps"]] == [size for size, _ in second["steps"]]
    assert 8 * 4 <= max(first["back"], second["back"]) < 10 * 4
    assert [sum(rows for _, rows in each["steps"]) for each in (first, second)] == [402, 402]


class Recorded(grain.MapDataset):
    """A list as a data set that notes what is read."""

    def __init__(self, data):
        super().__init__()
        self.data = data
        self.read = []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        self.read.append(index % len(self.data))
        return self.data[index % len(self.data)]


def rows_of(batches) -> list[int]:
    return [int(n) for batch in batches for n in batch["tokens"][batch["example_mask"], 0]]


@st.composite
def plans(draw, count):
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4, unique=True))
    return plan_of(*[(size, count * draw(st.integers(1, 5))) for size in sizes])


@settings(max_examples=300, deadline=None)
@given(
    st.data(),
    st.lists(st.integers(0, 24), min_size=1, max_size=120),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([None, 1, 3, 100]),
    st.sampled_from(["pad", "drop"]),
    st.sampled_from(["truncate", "drop"]),
)
def test_shards_share_each_batch_and_lose_nothing_but_what_is_counted(
    data, lengths, count, seed, shuffle, window, remainder, overlong
):
    plan = data.draw(plans(count))
    options = {
        "seed": seed,
        "shuffle": shuffle,
        "shuffle_batches": window,
        "remainder": remainder,
        "overlong": overlong,
    }
    try:
        whole = sb.Schedule(lengths, plan, **options)
    except sb.ScheduleError:
        return
    shards = [sb.Schedule(lengths, plan, **options, shard=(index, count)) for index in range(count)]
    assert {len(shard) for shard in shards} == {len(whole)}
    for epoch in range(2):
        emitted = []
        for step in range(epoch * len(whole), (epoch + 1) * len(whole)):
            bucket, rows = whole[step]
            parts = [shard[step] for shard in shards]
            assert bucket in plan.buckets
            assert {part.bucket for part in parts} == {sb.Bucket(bucket.axes, bucket.batch_size // count)}
            assert all(len(part.indices) <= part.bucket.batch_size for part in parts)
            assert max(len(part.indices) for part in parts) - min(len(part.indices) for part in parts) <= 1
            together = np.concatenate([part.indices for part in parts])
            assert sorted(together) == sorted(rows)
            emitted.extend(together)
        report = shards[0].report(epoch)
        assert len(set(emitted)) == len(emitted) == sum(report.samples)
        assert len(lengths) == report.seen == len(emitted) + report.overlong_dropped + report.remainder_dropped
        assert report == whole.report(epoch)
        if remainder == "pad":
            largest = max(bucket.sizes["s"] for bucket in plan.buckets)
            kept = [i for i, length in enumerate(lengths) if overlong == "truncate" or length <= largest]
            assert sorted(emitted) == kept


@pytest.mark.parametrize("count", [2, 4])
def test_the_loader_makes_its_rows_and_reads_no_others(count):
    tokens = make_tokens(100, longest=16)
    lengths = sb.measure(tokens, sb.Layout({"tokens": "s"}), progress=False)
    whole = sb.BucketedMapDataset(grain.MapDataset.source(tokens), PLAN, lengths, seed=1)
    seen = []
    for index in range(count):
        source = Recorded(tokens)
        loader = sb.BucketedMapDataset(source, PLAN, lengths, seed=1, shard=(index, count))
        assert len(loader) == len(whole)
        source.read.clear()
        for step, expected in enumerate(whole):
            batch = loader[step]
            rows, size = expected["tokens"].shape
            assert batch["tokens"].shape == (rows // count, size)
            assert source.read == loader.schedule[step].indices.tolist()
            assert rows_of([batch]) == source.read == rows_of([expected])[index::count]
            seen += source.read
            source.read.clear()
    assert sorted(seen) == list(range(100))


def test_a_run_goes_on_with_another_number_of_processes_from_its_step():
    tokens = make_tokens(100, longest=16)
    lengths = sb.measure(tokens, sb.Layout({"tokens": "s"}), progress=False)
    source = grain.MapDataset.source(tokens)

    def iterators(count):
        loaders = [sb.BucketedMapDataset(source, PLAN, lengths, shard=(i, count)).repeat(2) for i in range(count)]
        return [iter(loader.to_iter_dataset(READ)) for loader in loaders]

    def steps(iterators):
        return [sorted(rows_of(batches)) for batches in zip(*iterators, strict=True)]

    uninterrupted = steps(iterators(1))
    for step in (0, 7, len(uninterrupted) // 2, len(uninterrupted) // 2 + 3):
        two, four = iterators(2), iterators(4)
        before = [sorted(rows_of([next(each) for each in two])) for _ in range(step)]
        states = {json.dumps(each.get_state()) for each in two}
        assert len(states) == 1
        for each in four:
            each.set_state(json.loads(*states))
        assert before + steps(four) == uninterrupted


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("all", r"""shard must be \(index, count\), "jax" or None, but got 'all'"""),
        ("01", r"""shard must be \(index, count\), "jax" or None, but got '01'"""),
        (3, r"""shard must be \(index, count\), "jax" or None, but got 3"""),
        ((0, 2.5), r"""shard must be \(index, count\), "jax" or None, but got \(0, 2.5\)"""),
        ((0, 1, 2), r"""shard must be \(index, count\), "jax" or None, but got \(0, 1, 2\)"""),
        ((2, 2), r"shard must be \(index, count\) with 0 ≤ index < count, but got \(2, 2\)"),
        ((-1, 2), r"shard must be \(index, count\) with 0 ≤ index < count, but got \(-1, 2\)"),
        ((0, 0), r"shard must be \(index, count\) with 0 ≤ index < count, but got \(0, 0\)"),
    ],
)
def test_a_shard_that_cannot_be_is_refused(shard, message):
    with pytest.raises(sb.ProcessError, match=message):
        sb.Schedule(LENGTHS, PLAN, shard=shard)


def test_rows_must_be_dealt_evenly():
    message = (
        r"\[4 × s=8\] has 4 rows, which cannot be dealt evenly to 8 processes: plan with batch_multiple_of= the number of "
        "devices of all processes together"
    )
    with pytest.raises(sb.PlanError, match=message):
        sb.Schedule(LENGTHS, PLAN, shard=(0, 8))
    with pytest.raises(sb.PlanError, match="to 0 processes"):
        PLAN.per_process(0)


def test_a_plan_per_process_differs_in_its_rows_alone():
    plan = sb.plan_buckets(LENGTHS, max_buckets=3, batch_size=8, cost=sb.count_steps)
    half = plan.per_process(2)
    assert [each.axes for each in half.buckets] == [each.axes for each in plan.buckets]
    assert (half.batch_sizes * 2 == plan.batch_sizes).all()
    assert (half.row_costs, half.masks, half.layout) == (plan.row_costs, plan.masks, plan.layout)
    assert half.planned.samples == plan.planned.samples
    assert half.planned.buckets == tuple(map(str, half.buckets)) != plan.planned.buckets
    assert plan.per_process(1) == plan


def test_jax_says_which_process_this_is():
    schedule = sb.Schedule(LENGTHS, PLAN, shard="jax")
    assert (schedule.shard.index, schedule.shard.count) == (0, 1)
    assert schedule[3].indices.tolist() == sb.Schedule(LENGTHS, PLAN)[3].indices.tolist()


def test_a_worker_process_is_of_the_part_of_its_parent():
    schedule = sb.Schedule(LENGTHS, PLAN, shard=(1, 2))
    back = pickle.loads(pickle.dumps(schedule))
    assert [back[i].indices.tolist() for i in range(9)] == [schedule[i].indices.tolist() for i in range(9)]


def test_looking_for_other_processes_does_not_load_jax():
    program = "import sys; from shapebucket.processes import running_processes; print(running_processes(), 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]


@pytest.fixture
def sharding():
    return NamedSharding(jax.make_mesh((1,), ("data",)), P("data"))


class TestMakeGlobal:
    def test_batches_come_to_devices_in_the_background_and_the_step_is_compiled_for_them(
        self, token_plan, token_lengths, tokens, sharding
    ):
        """By Grain's own device_put in one process, and by make_global in any number."""
        loader = sb.BucketedMapDataset(grain.MapDataset.source(tokens), token_plan, token_lengths, shard="jax")
        host = loader.to_iter_dataset(READ)
        put = grain.experimental.device_put(host, sharding)
        made = grain.experimental.ThreadPrefetchIterDataset(
            host.map(lambda batch: sb.make_global(batch, sharding)), prefetch_buffer_size=2
        )
        step = sb.CompiledStep(lambda total, batch: total + batch["tokens"].sum(), token_plan, batch_sharding=sharding)
        zero = jax.device_put(np.int32(0), NamedSharding(sharding.mesh, P()))
        step.compile(zero, sb.BATCH, progress=False)
        for batches in (put, made, host):
            total = zero
            with sb.CompileCounter() as compiles:
                for batch in batches:
                    total = step(total, batch)
            assert compiles.count == 0
            assert int(total) == sum(int(each["tokens"].sum()) for each in tokens)

    def test_values_and_trees_stay(self, sharding):
        batch = {"a": {"b": np.arange(6, dtype=np.float32).reshape(2, 3)}, "mask": np.array([True, False])}
        found = sb.make_global(batch, sharding)
        assert all(leaf.sharding.is_equivalent_to(sharding, leaf.ndim) for leaf in jax.tree.leaves(found))
        jax.tree.map(np.testing.assert_array_equal, found, batch)

    @pytest.mark.parametrize(
        ("leaf", "message"),
        [
            (np.zeros(2, np.int64), "'a/b' of the batch is int64, which JAX silently cuts to int32: cast it with .map"),
            (np.int32(3), "make_global takes numpy arrays with rows, but 'a/b' of the batch is a scalar"),
            ("text", "make_global takes numpy arrays with rows, but 'a/b' of the batch is str"),
        ],
    )
    def test_leaves_that_would_not_arrive_whole_are_refused(self, sharding, leaf, message):
        with pytest.raises(sb.ProcessError, match=message):
            sb.make_global({"a": {"b": leaf}}, sharding)

    def test_as_many_parts_as_were_dealt_must_be_laid_out(self, sharding):
        message = (
            "'a' of the batch was dealt into 2 parts of 4 rows, but .* lays out 4 rows, so it takes the parts of some"
        )
        with pytest.raises(sb.ProcessError, match=message):
            sb.make_global({"a": np.zeros((4, 2), np.float32)}, sharding, count=2)


class TestLockstep:
    """In one process; `test_streams_of_jax_processes_agree_on_each_step_and_end_together` has several."""

    @pytest.fixture
    def stream(self, tokens, token_plan):
        return sb.BucketedIterDataset(
            grain.MapDataset.source(tokens).to_iter_dataset(READ), token_plan, max_wait=40, lockstep=True
        )

    @pytest.mark.parametrize("window", [1, 5, 100])
    def test_one_process_has_all_batches_of_its_stream(self, stream, token_plan, window):
        found = list(sb.LockstepIterDataset(stream, token_plan, window=window))
        assert sorted(rows_of(found)) == list(range(100))
        assert len(found) == len(list(stream))

    def test_batches_of_another_dtype_are_refused(self, stream, token_plan):
        cast = stream.map(lambda batch: {**batch, "tokens": batch["tokens"].astype(np.float32)})
        with pytest.raises(sb.ScheduleError, match="the stream before the lockstep gave arrays"):
            next(iter(sb.LockstepIterDataset(cast, token_plan)))

    def test_after_the_end_the_others_are_not_asked(self, stream, token_plan, monkeypatch):
        iterator = iter(sb.LockstepIterDataset(stream, token_plan))
        list(iterator)
        monkeypatch.setattr(lockstep_module, "_gather", None)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(iterator)

    @pytest.mark.parametrize("window", [1, 5])
    def test_it_resumes_after_every_batch(self, stream, token_plan, window):
        lockstep = sb.LockstepIterDataset(stream, token_plan, window=window)
        grain.experimental.assert_equal_output_after_checkpoint(lockstep)
        iterator = iter(lockstep)
        states, batches = [json.dumps(iterator.get_state())], []
        for batch in iterator:
            batches.append(batch)
            states.append(json.dumps(iterator.get_state()))
        fresh = iter(lockstep)
        for number, state in enumerate(states):
            fresh.set_state(json.loads(state))
            assert json.dumps(fresh.get_state()) == state
            rest = list(fresh)
            assert len(rest) == len(batches) - number
            jax.tree.map(np.testing.assert_array_equal, rest, batches[number:])

    def test_a_damaged_state_is_refused_before_anything_is_changed(self, stream, token_plan):
        iterator = iter(sb.LockstepIterDataset(stream, token_plan, window=4))
        begun = [next(iterator) for _ in range(3)]
        state = iterator.get_state()
        counts = state["counts"]
        for broken in (
            [],
            {"batches": []},
            {**counts, "batches": None},
            {**counts, "batches": counts["batches"][1:]},
            {**counts, "empty": True},
            {**counts, "collectives": -1},
        ):
            with pytest.raises(sb.StateError, match="^the counts of this state are damaged: "):
                iterator.set_state({**state, "counts": broken})
        for name, broken in (
            ("start", None),
            ("seen", state["start"] - 1),
            ("step", 1.5),
            ("held", [0]),
            ("held", "0,x"),
            ("held", str(state["seen"] - state["start"])),
            ("agreed", "0,,1"),
            ("agreed", "4"),
        ):
            with pytest.raises(
                sb.StateError, match=f"^the batches that this state says were read or held cannot be: .*{name}"
            ):
                iterator.set_state({**state, name: broken})
        assert iterator.get_state() == state
        assert sorted(rows_of([*begun, *iterator])) == list(range(100))

    def test_all_collectives_have_one_size_whatever_the_plan(self, tokens, token_plan, monkeypatch):
        """JAX does not notice that they differ, where one process starts from a state and another goes on."""
        sizes, gather = [], lockstep_module.multihost_utils.process_allgather

        def noted(sent):
            sizes.append(len(sent))
            return gather(sent)

        monkeypatch.setattr(lockstep_module.multihost_utils, "process_allgather", noted)
        for plan in (token_plan, plan_of(*[(size, 1) for size in range(1, 101)])):
            stream = sb.BucketedIterDataset(grain.MapDataset.source(tokens).to_iter_dataset(READ), plan, lockstep=True)
            next(iter(sb.LockstepIterDataset(stream, plan)))
        assert sizes == [160, 160, 320, 320]

    def test_it_resumes_under_repeat_and_behind_a_thread(self, stream, token_plan):
        behind = grain.experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=2)
        once = sb.LockstepIterDataset(behind, token_plan, window=4)
        repeated = grain.experimental.RepeatIterDataset(once, num_epochs=2)
        found = list(repeated)
        assert len(found) == 2 * len(list(once))
        iterator = iter(repeated)
        for _ in range(len(found) // 2 + 3):
            next(iterator)
        fresh = iter(repeated)
        fresh.set_state(json.loads(json.dumps(iterator.get_state())))
        jax.tree.map(np.testing.assert_array_equal, list(fresh), list(iterator))

    def test_a_prefetch_behind_it_is_refused(self, stream, token_plan):
        lockstep = sb.LockstepIterDataset(stream, token_plan)
        threaded = grain.experimental.ThreadPrefetchIterDataset(lockstep, prefetch_buffer_size=2)
        with pytest.raises(
            sb.ProcessError, match="a prefetch behind it would mix its collectives with those of the steps"
        ):
            next(iter(threaded))

    def test_batches_of_another_plan_are_refused(self, stream):
        with pytest.raises(
            sb.ScheduleError, match=r"which is no bucket's batch: give it the plan that the stream pads to"
        ):
            next(iter(sb.LockstepIterDataset(stream, PLAN)))

    def test_a_batch_held_for_long_comes_in_the_end(self):
        assert next_buckets(np.array([[3, 1], [3, 0]]), np.array([[0, 1], [0, 0]]), np.array([False, False])) == [
            0,
            0,
            1,
            0,
        ]

    def test_wrong_arguments_are_refused(self, stream, token_plan, scheduled):
        message = 'takes a grain.IterDataset of batches, but got BucketedMapDataset: a BucketedMapDataset keeps in step by itself, with shard="jax"'
        with pytest.raises(sb.ScheduleError, match=message):
            sb.LockstepIterDataset(scheduled, token_plan)
        with pytest.raises(sb.ScheduleError, match="window must be at least 1 batch, a whole number, but got 0"):
            sb.LockstepIterDataset(stream, token_plan, window=0)

    @pytest.fixture
    def scheduled(self, tokens, token_plan, token_lengths):
        return sb.BucketedMapDataset(grain.MapDataset.source(tokens), token_plan, token_lengths)

    def test_what_is_no_state_of_it_is_refused(self, stream, token_plan, scheduled):
        iterator = iter(sb.LockstepIterDataset(stream, token_plan))
        for state in (iter(stream).get_state(), "text", {}):
            with pytest.raises(sb.StateError, match="this is no state of a LockstepIterDataset"):
                iterator.set_state(state)
        whole = iter(sb.LockstepIterDataset(scheduled.to_iter_dataset(READ), token_plan, window=4))
        for _ in range(2):
            next(whole)
        short = iter(sb.LockstepIterDataset(scheduled[:3].to_iter_dataset(READ), token_plan, window=4))
        short.set_state(whole.get_state())
        with pytest.raises(
            sb.StateError, match="the state was saved after 5 batches, but the stream ends after 3: it is not"
        ):
            next(short)

    def test_a_state_that_the_stream_refuses_is_known_at_once(self, stream, token_plan):
        iterator = iter(sb.LockstepIterDataset(stream, token_plan, window=4))
        begun = [next(iterator) for _ in range(3)]
        state = iterator.get_state()
        with pytest.raises(sb.StateError, match="the data set before the loader does not take its part of the state"):
            iterator.set_state({**state, "parent": {"next_index": 3}})
        for use in (lambda: next(iterator), iterator.get_state):
            with pytest.raises(sb.StateError, match="a state that the data set before the loader refused"):
                use()
        iterator.set_state(state)
        assert sorted(rows_of([*begun, *iterator])) == list(range(100))

    @pytest.mark.parametrize("at", [0, 1, 7])
    @pytest.mark.parametrize("window", [1, 4])
    @pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
    def test_a_batch_that_could_not_be_read_is_not_passed_over(self, stream, token_plan, at, window, kind):
        """The iterator stays failed; its state goes on with the batch."""
        calls = []

        def fail_once(batch):
            calls.append(1)
            if len(calls) == at + 1:
                raise kind("once")
            return batch

        iterator = iter(sb.LockstepIterDataset(stream.map(fail_once), token_plan, window=window))
        found = []
        with pytest.raises(kind, match="once"):
            found.extend(iterator)
        again = (
            pytest.raises(OSError, match="once")
            if kind is OSError
            else pytest.raises(
                sb.ScheduleError, match=f"KeyboardInterrupt interrupted the reading of batch {at}: go on by"
            )
        )
        with again:
            next(iterator)
        iterator.set_state(json.loads(json.dumps(iterator.get_state())))
        assert sorted(rows_of([*found, *iterator])) == list(range(100))

    def test_a_replay_that_failed_can_be_tried_again(self, stream, token_plan):
        fails = []

        def maybe(batch):
            if fails:
                fails.clear()
                raise OSError("once")
            return batch

        lockstep = sb.LockstepIterDataset(stream.map(maybe), token_plan, window=4)
        iterator = iter(lockstep)
        begun = [next(iterator) for _ in range(3)]
        fresh = iter(lockstep)
        fresh.set_state(iterator.get_state())
        fails.append(1)
        with pytest.raises(OSError, match="once"):
            next(fresh)
        assert sorted(rows_of([*begun, *fresh])) == list(range(100))

    def test_a_report_counts_steps_and_what_they_cost(self, stream, token_plan):
        lockstep = sb.LockstepIterDataset(stream, token_plan, window=4)
        with pytest.raises(sb.ScheduleError, match="no step was taken yet, so there is nothing to report"):
            lockstep.report()
        iterator = iter(lockstep)
        assert iterator.report().summary == "0 steps, 0 of padding alone, 0 collectives, 0 batches held"
        sizes = [next(iterator)["tokens"].shape[1] for _ in range(5)]
        report = lockstep.report()
        assert report == iterator.report()
        assert report.batches == tuple(sizes.count(bucket.sizes["s"]) for bucket in token_plan.buckets)
        assert (report.empty, report.held) == (0, 3)
        assert 2 <= report.collectives <= 5
        assert str(report) == f"5 steps, 0 of padding alone, {report.collectives} collectives, 3 batches held"
        fresh = iter(lockstep)
        fresh.set_state(json.loads(json.dumps(iterator.get_state())))
        assert lockstep.report() == fresh.report() == report
        rest, others = list(fresh), list(iterator)
        assert len(rest) == len(others)
        assert fresh.report() == iterator.report()
        assert sum(fresh.report().batches) == 5 + len(rest)
        assert fresh.report().held == 0

    def test_it_stands_in_grains_execution_summary(self, stream, token_plan):
        tracking = grain.experimental.DatasetOptions(
            execution_tracking_mode=grain.experimental.ExecutionTrackingMode.STAGE_TIMING
        )
        lockstep = sb.LockstepIterDataset(stream, token_plan, window=4)
        iterator = iter(grain.experimental.WithOptionsIterDataset(lockstep, tracking))
        count = len(list(iterator))
        iterator._stats.report()
        nodes = get_execution_summary(iterator).nodes.values()
        for name in ("LockstepDatasetIterator", "BucketedDatasetIterator"):
            (node,) = [each for each in nodes if each.name.startswith(name)]
            assert node.num_produced_elements == count

    def test_it_names_itself(self, stream, token_plan):
        lockstep = sb.LockstepIterDataset(stream, token_plan)
        assert str(lockstep) == repr(lockstep) == "LockstepIterDataset(buckets=4, window=32)"
        assert str(iter(lockstep)) == "LockstepDatasetIterator(buckets=4)"


def test_what_all_hold_comes_evenly_mixed():
    none = np.zeros((2, 3), int)
    on = np.array([False, False])
    assert next_buckets(np.array([[4, 2, 1], [4, 2, 0]]), none, on) == [0, 1, 0, 0, 1, 0]
    assert next_buckets(np.array([[4, 0, 0], [0, 2, 2]]), none, on) == [0]
    assert next_buckets(np.array([[4, 0, 1], [0, 2, 2]]), none, on) == [2]
    assert next_buckets(np.array([[4, 0, 0], [0, 2, 2]]), none, np.array([True, False])) == [1, 2, 1, 2]
    assert sorted(next_buckets(np.array([[4, 0, 0], [0, 2, 2]]), none, np.array([True, True]))) == [
        0,
        0,
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    assert next_buckets(none, none, np.array([True, True])) == []


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=60), min_size=1, max_size=5),
    st.integers(1, 6),
)
def test_any_streams_end_together_having_emitted_everything_once(streams, window):
    """The decision alone, with lists for streams."""
    held = [np.zeros(4, int) for _ in streams]
    waiting = [list(stream) for stream in streams]
    emitted = [np.zeros(4, int) for _ in streams]
    while True:
        for mine, rest in zip(held, waiting, strict=True):
            while rest and mine.sum() < window:
                mine[rest.pop(0)] += 1
        ended = np.array([not rest and mine.sum() < window for mine, rest in zip(held, waiting, strict=True)])
        buckets = next_buckets(np.array(held), np.zeros((len(streams), 4), int), ended)
        if not buckets:
            break
        for bucket in buckets:
            assert any(mine[bucket] for mine in held)
            for mine, out in zip(held, emitted, strict=True):
                out[bucket] += mine[bucket] > 0
                mine[bucket] -= mine[bucket] > 0
    for stream, out in zip(streams, emitted, strict=True):
        assert out.tolist() == np.bincount(stream, minlength=4).tolist()
