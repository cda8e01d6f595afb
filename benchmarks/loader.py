"""Loader speed: schedule and stream against Grain's own batching, a bare numpy fill, and other projects' bucketing.

Grain's batches are padded to the longest of all samples, in random order; or, "tight", to their own longest in data that was
sorted by length before, which fills fewer bytes than any buckets can. The source is a list behind a plain MapDataset without
the metrics that `MapDataset.source` records: the stages are compared, not the source.

The peers, tf.data's `bucket_by_sequence_length` and lhotse's `DynamicBucketingSampler`, come with `pip install '.[peers]'`;
one that is not installed is left out. Neither makes masks. tf.data is given the samples as one ragged tensor in memory, which
suits it best (from a Python generator it is four times slower); lhotse's sampler, which gives lists of samples, is followed
by the same padding as Grain's batches, to each batch's longest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import grain
import numpy as np
from harness import Result, interleave, main, result

import shapebucket as sb

LONGEST, ROWS = 512, 64
NO_THREADS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class Source(grain.MapDataset):
    """A list as a data set."""

    def __init__(self, data: list) -> None:
        super().__init__()
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return self._data[index % len(self._data)]


def pad_to_longest(samples: list[dict], width: int | None = LONGEST) -> dict[str, np.ndarray]:
    width = width or max(len(sample["tokens"]) for sample in samples)
    tokens = np.zeros((len(samples), width), np.int32)
    mask = np.zeros((len(samples), width), bool)
    for row, sample in enumerate(samples):
        length = len(sample["tokens"])
        tokens[row, :length] = sample["tokens"]
        mask[row, :length] = True
    return {"tokens": tokens, "mask": mask}


def drain(dataset, batches: int) -> int:
    iterator = iter(dataset)
    return sum(len(next(iterator)["tokens"]) for _ in range(batches))


def index_all(dataset, batches: int) -> int:
    return sum(len(dataset[number]["tokens"]) for number in range(batches))


def fill(data: list[dict], batches: int) -> None:
    for start in range(0, batches * ROWS, ROWS):
        pad_to_longest(data[start : start + ROWS])


def measure(quick: bool) -> list[Result]:
    return [*measure_speed(quick), *measure_state(quick), *measure_schedule(quick)]


def measure_speed(quick: bool) -> list[Result]:
    rng = np.random.default_rng(0)
    count = 20_000 if quick else 200_000
    data = [{"tokens": np.ones(length, np.int32)} for length in rng.integers(1, LONGEST + 1, count)]
    source = Source(data)
    lengths = sb.measure(data, sb.Layout({"tokens": "s"}), progress=False)
    plan = sb.plan_buckets(lengths, max_buckets=4, batch_size=ROWS, multiple_of=8)
    schedule = sb.BucketedMapDataset(source, plan, lengths)
    stream = sb.BucketedIterDataset(source.to_iter_dataset(NO_THREADS), plan)
    batches = count // ROWS - 8
    grain_map = source.shuffle(seed=0).batch(ROWS, batch_fn=pad_to_longest)
    grain_iter = source.to_iter_dataset(NO_THREADS).batch(ROWS, batch_fn=pad_to_longest)
    by_length = Source(sorted(data, key=lambda each: len(each["tokens"])))
    tight_map = by_length.batch(ROWS, batch_fn=partial(pad_to_longest, width=None))
    schedule[0]  # plan the epoch
    peers = installed_peers(data, plan)
    seconds = interleave(
        {
            "schedule": partial(index_all, schedule, batches),
            "grain map": partial(index_all, grain_map, batches),
            "grain map, sorted": partial(index_all, tight_map, batches),
            "stream": partial(drain, stream, batches),
            "grain iter": partial(drain, grain_iter, batches),
            "fill": partial(fill, data, batches),
            **{name: partial(run, batches) for name, run in peers.items()},
        },
        3 if quick else 5,
    )
    samples = batches * ROWS
    return [
        result("schedule/grain_batch samples/s ratio", seconds["grain map"] / seconds["schedule"], target=0.9),
        result(
            "schedule/grain_batch tight, samples/s ratio",
            seconds["grain map, sorted"] / seconds["schedule"],
        ),
        result("stream/grain_batch samples/s ratio", seconds["grain iter"] / seconds["stream"], target=0.75),
        result("schedule/numpy_fill samples/s ratio", seconds["fill"] / seconds["schedule"]),
        result("schedule µs a sample", 1e6 * seconds["schedule"] / samples, better="lower"),
        result("stream µs a sample", 1e6 * seconds["stream"] / samples, better="lower"),
        *(
            result(f"{ours}/{name} samples/s ratio", seconds[name] / seconds[ours])
            for name in peers
            for ours in ("schedule", "stream")
        ),
    ]


def installed_peers(data: list[dict], plan: sb.BucketPlan) -> dict[str, Callable[[int], None]]:
    """Makes a function from a number of batches for each peer that is installed; says which are not."""
    peers: dict[str, Callable[[int], None]] = {}
    for name, package, make in (("tf.data", "tensorflow", tf_data), ("lhotse", "lhotse", lhotse_sampler)):
        if find_spec(package) is None:
            print(f"{name} is left out: {package} is not installed (pip install '.[peers]')", file=sys.stderr)
        else:
            peers[name] = make(data, plan)
    return peers


def tf_data(data: list[dict], plan: sb.BucketPlan) -> Callable[[int], None]:
    import tensorflow as tf

    tokens = tf.RaggedTensor.from_row_lengths(
        np.concatenate([sample["tokens"] for sample in data]), [len(sample["tokens"]) for sample in data]
    )
    dataset = (
        tf.data.Dataset.from_tensor_slices(tokens)
        .map(lambda row: tf.convert_to_tensor(row))
        .bucket_by_sequence_length(
            tf.size,
            [int(size) + 1 for size in plan.sizes[:, 0]],  # exclusive
            [*plan.batch_sizes.tolist(), 1],
            pad_to_bucket_boundary=True,
        )
    )

    def run(batches: int) -> None:
        iterator = dataset.as_numpy_iterator()
        for _ in range(batches):
            next(iterator)

    return run


def lhotse_sampler(data: list[dict], plan: sb.BucketPlan) -> Callable[[int], None]:
    import warnings

    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    cuts = CutSet.from_cuts(
        MonoCut(id=str(number), start=0, duration=float(len(sample["tokens"])), channel=0)
        for number, sample in enumerate(data)
    )
    warnings.filterwarnings("ignore", "You are using DynamicBucketingSampler with an eagerly read CutSet")

    def run(batches: int) -> None:
        sampler = DynamicBucketingSampler(
            cuts, max_cuts=ROWS, num_buckets=len(plan), duration_bins=plan.sizes[:-1, 0].tolist(), buffer_size=10_000
        )
        for _, batch in zip(range(batches), sampler, strict=False):
            pad_to_longest([data[int(cut.id)] for cut in batch], None)

    return run


def measure_state(quick: bool) -> list[Result]:
    """A stream of eight buckets of 64 rows, the last of which gets one sample in 20,000, with `max_wait` 10,000."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LONGEST - 63, 25_000)
    lengths[1_000::20_000] = LONGEST
    data = [{"tokens": np.ones(length, np.int32)} for length in lengths]
    plan = sb.BucketPlan(
        sb.Layout({"tokens": "int32[s]"}), [sb.Bucket((("s", size),), ROWS) for size in range(64, LONGEST + 1, 64)]
    )
    stream = sb.BucketedIterDataset(Source(data).to_iter_dataset(NO_THREADS), plan, max_wait=10_000)
    iterator = iter(stream)
    saving, sizes, state = [], [], iterator.get_state()
    while state["seen"] < 10_990:
        next(iterator)
        started = time.perf_counter()
        state = iterator.get_state()
        saving.append(time.perf_counter() - started)
        sizes.append(len(json.dumps(state)))
    restoring = []
    for _ in range(3 if quick else 9):
        fresh = iter(stream)
        started = time.perf_counter()
        fresh.set_state(state)
        next(fresh)
        restoring.append(time.perf_counter() - started)
    return [
        result("stream get_state, ms", 1e3 * np.array(saving), target=0.1, better="lower"),
        result("stream state, bytes of JSON", sizes, target=1024, better="lower"),
        result("stream restore with max_wait 10,000, seconds", restoring, target=0.1, better="lower"),
    ]


HUGE = """
import time
from pathlib import Path
import numpy as np
import shapebucket as sb

rng = np.random.default_rng(0)
lengths = np.empty((100_000_000, 1), np.int32)
for part in np.split(lengths, 100):
    part[:] = rng.integers(1, 513, part.shape)
plan = sb.BucketPlan(sb.Layout({"tokens": "s"}), [sb.Bucket((("s", size),), 64) for size in (128, 256, 384, 512)])
table = sb.LengthTable(("s",), lengths)
started = time.perf_counter()
sb.Schedule(table, plan)[0]
seconds = time.perf_counter() - started
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(seconds, int(status["VmHWM"].split()[0]) / 2**20)  # not ru_maxrss, which starts from the parent's
"""


def measure_schedule(quick: bool) -> list[Result]:
    rng = np.random.default_rng(0)
    many = rng.integers(1, LONGEST + 1, 100_000 if quick else 1_000_000)
    plan = sb.plan_buckets(many, max_buckets=4, batch_size=ROWS, multiple_of=8)
    times = []
    for seed in range(5):
        started = time.perf_counter()
        sb.Schedule(many, plan, seed=seed)[0]
        times.append(time.perf_counter() - started)
    name = "schedule of {}, made and its first epoch, {}"
    results = [result(name.format(f"{len(many):,} samples", "seconds"), times, target=0.1, better="lower")]
    if not quick and sys.platform == "linux":  # in a process of its own, whose peak of memory is its own
        done = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True)
        seconds, memory = map(float, done.stdout.split())
        results += [
            result(name.format("100,000,000 samples", "seconds"), [seconds], target=20, better="lower"),
            result(name.format("100,000,000 samples", "peak GiB"), [memory], target=2, better="lower"),
        ]
    return results


if __name__ == "__main__":
    main("loader", measure)
