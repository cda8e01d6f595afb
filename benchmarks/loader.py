"""Loader speed: schedule and stream against Grain's own batching, and a bare numpy fill.

Grain's batches are padded to the longest of all samples, in random order; or, "tight", to their own longest in data that was
sorted by length before, which fills fewer bytes than any buckets can. The source is a list behind a plain MapDataset without
the metrics that `MapDataset.source` records: the stages are compared, not the source.
"""

from __future__ import annotations

import time
from functools import partial

import grain
import numpy as np
from harness import Result, interleave, main, result

import shapebucket as sb

LONGEST, ROWS = 512, 64


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
    rng = np.random.default_rng(0)
    count = 20_000 if quick else 200_000
    data = [{"tokens": np.ones(length, np.int32)} for length in rng.integers(1, LONGEST + 1, count)]
    source = Source(data)
    lengths = sb.measure(data, sb.Layout({"tokens": "s"}), progress=False)
    plan = sb.plan_buckets(lengths, max_buckets=4, batch_size=ROWS, multiple_of=8)
    schedule = sb.BucketedMapDataset(source, plan, lengths)
    no_threads = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    stream = sb.BucketedIterDataset(source.to_iter_dataset(no_threads), plan)
    batches = count // ROWS - 8
    grain_map = source.shuffle(seed=0).batch(ROWS, batch_fn=pad_to_longest)
    grain_iter = source.to_iter_dataset(no_threads).batch(ROWS, batch_fn=pad_to_longest)
    by_length = Source(sorted(data, key=lambda each: len(each["tokens"])))
    tight_map = by_length.batch(ROWS, batch_fn=partial(pad_to_longest, width=None))
    schedule[0]  # plan the epoch
    seconds = interleave(
        {
            "schedule": partial(index_all, schedule, batches),
            "grain map": partial(index_all, grain_map, batches),
            "grain map, sorted": partial(index_all, tight_map, batches),
            "stream": partial(drain, stream, batches),
            "grain iter": partial(drain, grain_iter, batches),
            "fill": partial(fill, data, batches),
        },
        3 if quick else 5,
    )
    samples = batches * ROWS
    results = [
        result("schedule/grain_batch samples/s ratio", seconds["grain map"] / seconds["schedule"], target=0.9),
        result(
            "schedule/grain_batch tight, samples/s ratio",
            seconds["grain map, sorted"] / seconds["schedule"],
        ),
        result("stream/grain_batch samples/s ratio", seconds["grain iter"] / seconds["stream"], target=0.75),
        result("schedule/numpy_fill samples/s ratio", seconds["fill"] / seconds["schedule"]),
        result("schedule µs a sample", 1e6 * seconds["schedule"] / samples, better="lower"),
        result("stream µs a sample", 1e6 * seconds["stream"] / samples, better="lower"),
    ]
    many = rng.integers(1, LONGEST + 1, 100_000 if quick else 1_000_000)
    times = []
    for seed in range(3):
        started = time.perf_counter()
        sb.Schedule(many, plan, seed=seed)[0]
        times.append(time.perf_counter() - started)
    results.append(
        result(
            f"schedule of {len(many):,} samples, made and its first epoch, seconds", times, target=0.1, better="lower"
        )
    )
    return results


if __name__ == "__main__":
    main("loader", measure)
