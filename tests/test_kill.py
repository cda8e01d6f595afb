"""Kills a training process again and again; what it trained on in the end is what it would have trained on undisturbed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

KILLS = 20
PATIENCE = 60.0  # seconds that a child may take for anything
CHILD = Path(__file__).parent / "training_child.py"


class Trainers:
    """Starts training children, one at a time."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, **request) -> int:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def wait(self) -> int:
        """Waits for the child's end; returns its exit status, or the negative of the signal that killed it."""
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(PATIENCE)


class Log:
    """What the children note, as it grows."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "log"
        self.file.touch()
        self.records: list[list] = []
        self.read = 0

    def update(self) -> list[list]:
        with self.file.open("rb") as file:
            file.seek(self.read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.read += len(whole)
        self.records += [json.loads(line) for line in whole.splitlines()]
        return self.records

    def await_record(self, what: str, count: int) -> None:
        """Waits for the count-th record of a kind from here on."""
        start, limit = len(self.update()), time.monotonic() + PATIENCE
        while sum(each[0] == what for each in self.update()[start:]) < count:
            assert time.monotonic() < limit, f"no {count} records {what!r} in {PATIENCE} s"
            assert not any(each[0] == "end" for each in self.records[start:]), "it ended before it was killed"
            time.sleep(0.0005)

    def batches(self) -> dict[int, list]:
        """The batches of each step, of all lives."""
        found: dict[int, list] = {}
        for what, step, *rest in self.records:
            if what == "done":
                found.setdefault(step, []).append(rest[0])
        return found

    @property
    def end(self) -> list:
        assert self.records[-1][0] == "end"
        return self.records[-1]


def kill(child: int) -> None:
    """Kills the child, and it alone; then ends the workers that it left (their shared memory is freed by its tracker)."""
    os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGTERM)


def run(trainers: Trainers, directory: Path, kind: str, workers: list[int], kills: int) -> tuple[Log, list[str]]:
    """Trains to the end, with so many kills on the way; returns the log, and what the child was at when it was killed."""
    directory.mkdir()
    log, rng, killed_at = Log(directory), random.Random(kind), []
    for life in range(kills):
        child = trainers.start(directory=str(directory), kind=kind, workers=workers[life % len(workers)])
        before = len(log.update())
        moment = rng.choice(["start", "step", "step", "save", "save"])
        if moment == "step":
            log.await_record("step", rng.randint(1, 8))
        elif moment == "save":
            log.await_record("save", rng.randint(1, 2))
        time.sleep(rng.uniform(0, 0.3 if moment == "start" else 0.005))
        kill(child)
        assert trainers.wait() == -signal.SIGKILL
        records = log.update()[before:]
        killed_at.append(records[-1][0] if records else "start")
    trainers.start(directory=str(directory), kind=kind, workers=workers[kills % len(workers)])
    assert trainers.wait() == 0
    log.update()
    return log, killed_at


@pytest.fixture(scope="module")
def numpy_trainers():
    trainers = Trainers()
    yield trainers
    trainers.close()


def assert_survives(trainers: Trainers, directory: Path, kind: str, workers: list[int]) -> None:
    undisturbed, _ = run(trainers, directory / "undisturbed", kind, workers, 0)
    disturbed, killed_at = run(trainers, directory / "disturbed", kind, workers, KILLS)
    expected = undisturbed.batches()
    assert all(len(each) == 1 for each in expected.values())
    assert sorted(number for ((numbers),) in expected.values() for number in numbers) == sorted([*range(700)] * 2)
    found = disturbed.batches()
    assert found.keys() == expected.keys() == set(range(1, len(expected) + 1))
    assert any(len(each) > 1 for each in found.values())  # some steps were lost and done again
    for step, batches in found.items():
        assert batches == expected[step] * len(batches), f"step {step}"
    assert disturbed.end == undisturbed.end  # the model, to the last bit
    assert len(killed_at) == KILLS
    assert {"step", "save"} <= set(killed_at), killed_at


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("schedule", [0]),
        ("schedule", [2]),
        ("elastic schedule", [2, 0, 3]),
        ("stream", [0]),
        ("stream", [2]),
        ("stream behind", [2, 0]),
    ],
    ids=str,
)
def test_the_same_batches_count(numpy_trainers, tmp_path, kind, workers):
    assert_survives(numpy_trainers, tmp_path, kind, workers)


@pytest.mark.slow
def test_elastic_workers_end_with_a_killed_parent(numpy_trainers, tmp_path):
    """Those of mp_prefetch alone do not, which is why ours are told to."""

    def alive(group):
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def left_after(kind, seconds):
        directory = tmp_path / kind
        directory.mkdir()
        log = Log(directory)
        child = numpy_trainers.start(directory=str(directory), kind=kind, workers=2)
        log.await_record("done", 3)
        assert len(alive(child)) >= 3
        os.kill(child, signal.SIGKILL)
        numpy_trainers.wait()
        limit = time.monotonic() + seconds
        while (left := alive(child)) and time.monotonic() < limit:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGTERM)
        return left

    assert left_after("elastic schedule", 20) == []
    assert left_after("schedule", 3) != []


@pytest.mark.slow
def test_a_compiled_step_with_orbax_checkpoints(tmp_path):
    trainers = Trainers("jax")
    try:
        assert_survives(trainers, tmp_path, "stream", [0])
    finally:
        trainers.close()
