"""The schedule of very many samples: by windows over lengths in a mapped file, against an epoch at once.

Each figure is of a process of its own. Memory is what is private to the process (RssAnon, sampled every 5 ms) above what it
held when the lengths were mapped; the file's pages are shared by all processes of a machine. `docs/scale.md` reckons from here
to 10¹⁰ samples.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import Result, in_child, main, result

import shapebucket as sb

WINDOW = 1_000_000
PART = 5_000_000  # lengths that are drawn at once
PLAN = sb.BucketPlan(
    sb.Layout({"tokens": "int32[s]"}),
    [sb.Bucket((("s", size),), 16_384 // size) for size in (32, 64, 96, 128, 192, 256, 512, 1024)],
)


class Costs(NamedTuple):
    """What a schedule costs.

    Attributes:
        made: seconds until it is there.
        first: seconds from then to the first batch.
        epoch: seconds of a pass over all batches of an epoch, as indices, from the second window on.
        memory: the peak of private memory, MiB.
        padding: the padding fraction of an epoch.
    """

    made: float
    first: float
    epoch: float
    memory: float
    padding: float


class Peak:
    """The most private memory of this process while it is open, in MiB above what it held at first."""

    def __enter__(self) -> Peak:
        self._start = self._most = _private()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self._most = max(self._most, _private())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def mib(self) -> float:
        """What was held in addition at most, MiB."""
        return (self._most - self._start) / 2**10


def _private() -> int:
    """Private memory of this process, KiB."""
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])


def cost_of(path: str, window: int | None) -> Costs:
    table = sb.LengthTable.load(path)
    with Peak() as peak:
        times = [time.perf_counter()]
        schedule = sb.Schedule(table, PLAN, window=window)
        times.append(time.perf_counter())
        schedule[0]
        times.append(time.perf_counter())
        for _ in schedule:
            pass
        times.append(time.perf_counter())
    made, first, epoch = np.diff(times).tolist()
    return Costs(made, first, epoch, peak.mib, schedule.report().padding_fraction)


def drawn(count: int, folder: Path) -> Iterator[sb.LengthTable]:
    """Yields the lengths of so many samples in parts, each in a file of its own, from which it is mapped."""
    rng = np.random.default_rng(0)
    for number, start in enumerate(range(0, count, PART)):
        lengths = np.minimum(rng.lognormal(4.5, 0.8, min(PART, count - start)), 1023).astype(np.int32) + 1
        path = folder / f"part-{number}.npz"
        sb.LengthTable.of(lengths, ["s"]).save(path)
        yield sb.LengthTable.load(path)
        path.unlink()


def measure(quick: bool) -> list[Result]:
    if sys.platform != "linux":
        print("left out: private memory is read from Linux's /proc")
        return []
    results = []
    for count in (100_000, 2_000_000) if quick else (1_000_000, 10_000_000, 100_000_000):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lengths.npz"
            sb.LengthTable.concatenate(drawn(count, Path(folder)), path=path)
            runs = {window: [] for window in (WINDOW // 10 if quick else WINDOW, None)}
            for _ in range(1 if quick else 3):  # in turns
                for window, costs in runs.items():
                    costs.append(in_child(cost_of, str(path), window))
        results += _results(count, *runs.values())
    return results


def _results(count: int, windows: list[Costs], whole: list[Costs]) -> list[Result]:
    results = []
    for name, costs in (("windows", windows), ("at once", whole)):
        title = f"{count:,} samples, {name}"
        results += [
            result(f"{title}: seconds to make", [each.made for each in costs], better="lower"),
            result(f"{title}: seconds to the first batch", [each.first for each in costs], better="lower"),
            result(
                f"{title}: seconds of an epoch's indices", [each.first + each.epoch for each in costs], better="lower"
            ),
            result(f"{title}: private MiB", [each.memory for each in costs], better="lower"),
        ]
    pairs = list(zip(windows, whole, strict=True))
    padded = [(1 - b.padding) / (1 - a.padding) for a, b in pairs]
    results += [
        result(f"{count:,} samples: at once/windows, private memory", [b.memory / a.memory for a, b in pairs]),
        result(
            f"{count:,} samples: windows/at once, seconds of an epoch",
            [(a.first + a.epoch) / (b.first + b.epoch) for a, b in pairs],
            better="lower",
        ),
        result(f"{count:,} samples: windows/at once, padded elements", padded, better="lower"),
    ]
    return results


if __name__ == "__main__":
    main("scale", measure)
