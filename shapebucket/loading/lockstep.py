"""LockstepIterDataset: several processes that stream samples of their own agree on each step's bucket.

Letters in shapes: `P` processes, `K` buckets.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils

from shapebucket.buckets import BucketPlan
from shapebucket.errors import ProcessError, ScheduleError, StateError
from shapebucket.loader_report import check_plan, is_whole
from shapebucket.loading._grain_private import BatchesOfPlan, connect, recorded
from shapebucket.loading.boards import Board
from shapebucket.loading.fingerprints import changes
from shapebucket.loading.parents import Parent
from shapebucket.padding import pad

_WIDTH = 160  # integers sent at a time: those of any plan of up to 79 buckets
_MEETING, _AGREEMENT = 1, 2  # what for
_LONG = 8  # windows of batches that may be read while a batch is held, so that a restore has a bounded way back
_STATE = {"fingerprint", "parent", "start", "seen", "held", "agreed", "step", "counts"}

Counts = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class LockstepReport:
    """What keeping in step cost this process. What became of the samples is in the report of the stream.

    Attributes:
        batches: steps with each bucket of the plan, the same in every process.
        empty: those among them in which this process had no batch, and emitted padding rows alone.
        collectives: how often the processes told each other what they hold.
        held: batches that this process has read and not emitted.
    """

    batches: tuple[int, ...]
    empty: int
    collectives: int
    held: int

    @property
    def summary(self) -> str:
        """One line, for a log or a progress bar."""
        steps = sum(self.batches)
        return f"{steps:,} steps, {self.empty:,} of padding alone, {self.collectives:,} collectives, {self.held:,} batches held"

    def __str__(self) -> str:
        return self.summary


class LockstepIterDataset(BatchesOfPlan, grain.IterDataset[dict[str, Any]]):
    """Batches of a stream, such that every JAX process has the same bucket at each step, and as many steps.

    For data without known lengths, where `BucketedMapDataset(shard="jax")` cannot be used: that one needs no agreement.
    Every process streams samples of its own, and holds back a few batches. When it has `window` of them, the processes tell
    each other how many of each bucket they hold (a collective of a few integers), and all emit what all have. Where they
    have nothing in common, they emit the bucket most of them have, and the others a batch of padding rows; so it is with a
    batch held for 8 windows, and with those whose stream has ended, until all have. Shuffled streams fill their buckets so
    much alike that in simulations with 8 buckets, 2 to 32 processes and a window of 32, fewer than one batch in a thousand
    was padding, and one collective did for 14 to 28 steps.

        local = plan.per_process(jax.process_count())
        mine = ds[jax.process_index() :: jax.process_count()].to_iter_dataset()
        stream = sb.BucketedIterDataset(mine, local, max_wait=10_000, lockstep=True)
        batches = sb.LockstepIterDataset(stream, local)

    It must be the last stage, but for maps: a collective must run on the thread of the steps, in the same order in every
    process, so no prefetch may stand behind it (before it, any may). A process whose stream raises leaves the others waiting,
    until JAX finds it gone. The collectives are two tiny programs, which JAX compiles at the first step, and a
    `CompileCounter` counts.

    The state is exact, of one process, and restored into the same one of as many, all at the same step.
    """

    def __init__(self, parent: grain.IterDataset[Any], plan: BucketPlan, *, window: int = 32) -> None:
        """Makes the stage; reads nothing.

        Args:
            parent: the batches of this process: a `BucketedIterDataset` with `lockstep=True`, and what prefetches it.
            plan: the buckets of those: `plan.per_process(jax.process_count())`, the same in every process.
            window: batches that each process holds back. More make fewer collectives and fewer batches of padding, and cost
                memory, and reading them again at a restore.

        Raises:
            ScheduleError: if the parent is no `grain.IterDataset`, or for a window below 1.
            LayoutError: if the plan does not know the dtypes.
        """
        if not isinstance(parent, grain.IterDataset):
            raise ScheduleError(
                f"LockstepIterDataset takes a grain.IterDataset of batches, but got {type(parent).__name__}: a "
                'BucketedMapDataset keeps in step by itself, with shard="jax"'
            )
        super().__init__(parent)
        check_plan(plan)
        if not is_whole(window, 1):
            raise ScheduleError(f"window must be at least 1 batch, a whole number, but got {window!r}")
        self.plan = self.emitted = plan
        self.window = int(window)
        self._batches = parent
        self._position = {_shapes(plan.batch_spec(bucket)): k for k, bucket in enumerate(plan.buckets)}
        self._board = Board[LockstepReport]()

    def __iter__(self) -> LockstepDatasetIterator:
        self._board = Board[LockstepReport]()
        return LockstepDatasetIterator(iter(self._batches), self, self._board)

    def report(self) -> LockstepReport:
        """Counts the steps of the iterator that was made last, up to its last one; from any thread.

        Raises:
            ScheduleError: if none has taken a step.
        """
        if self._board.report is None:
            raise ScheduleError("no step was taken yet, so there is nothing to report")
        return self._board.report

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a state must have been saved with to be restored here, by name."""
        return {
            "plan": self.plan.fingerprint,
            "window": self.window,
            "process": jax.process_index(),
            "processes": jax.process_count(),
        }

    def position(self, batch: Any) -> int:
        """Returns the position in the plan of a batch's bucket.

        Raises:
            ScheduleError: if it has none.
        """
        shapes = _shapes(batch)
        if shapes not in self._position:
            raise ScheduleError(
                f"the stream before the lockstep gave arrays {list(shapes)}, which is no bucket's batch: give it the plan "
                "that the stream pads to, plan.per_process(jax.process_count()), and put maps over batches after it"
            )
        return self._position[shapes]

    def require_sound(self, state: dict[str, Any]) -> None:
        """Raises StateError for values that no state has."""
        counts, buckets = state["counts"], len(self.plan)
        if not (
            isinstance(counts, dict)
            and counts.keys() == {"batches", "empty", "collectives"}
            and isinstance(counts["batches"], list)
            and len(counts["batches"]) == buckets
            and all(is_whole(each, 0) for each in (*counts["batches"], counts["empty"], counts["collectives"]))
        ):
            raise StateError(f"the counts of this state are damaged: {str(counts)[:80]!r}")
        start, seen = state["start"], state["seen"]
        if not (
            is_whole(start, 0)
            and is_whole(seen, start)
            and is_whole(state["step"], 0)
            and _lists_below(state["held"], seen - start)
            and _lists_below(state["agreed"], buckets)
        ):
            places = {name: state[name] for name in ("start", "seen", "step", "held", "agreed")}
            raise StateError(f"the batches that this state says were read or held cannot be: {str(places)[:160]!r}")

    def __str__(self) -> str:
        return f"LockstepIterDataset(buckets={len(self.plan)}, window={self.window})"

    __repr__ = __str__


class _Held(NamedTuple):
    """A batch that is held back: its number in the stream, and the parent's state before it."""

    number: int
    state: Any
    batch: dict[str, Any]


class LockstepDatasetIterator(grain.DatasetIterator[dict[str, Any]]):
    """The iterator of a `LockstepIterDataset`."""

    def __init__(
        self, parent: grain.DatasetIterator[Any], dataset: LockstepIterDataset, board: Board[LockstepReport]
    ) -> None:
        super().__init__(parent)
        self._source = parent
        self._parent_states = Parent(parent)
        self._dataset = dataset
        self._board = board
        self._thread = threading.get_ident()
        self._saved: dict[str, Any] | None = None  # a state that was set and not yet replayed
        self._placed = False  # whether the parent is where that state says
        self._met = False
        self._reset()

    def _reset(self) -> None:
        """Returns to an empty stage before batch 0."""
        self._seen = 0
        self._step = 0
        self._ended = False
        self._finished = False
        self._held: list[deque[_Held]] = [deque() for _ in self._dataset.plan.buckets]
        self._agreed: deque[int] = deque()  # the buckets of the next steps
        self._batches = [0] * len(self._dataset.plan)
        self._empty = self._collectives = 0
        self._failure: tuple[BaseException, Any] | None = None  # of a read, and the parent's state before it

    def __next__(self) -> dict[str, Any]:
        if threading.get_ident() != self._thread:
            raise ProcessError(
                "a lockstep ran on another thread than the one that made its iterator: a prefetch behind it would mix its "
                "collectives with those of the steps. Put ThreadPrefetchIterDataset and mp_prefetch before it"
            )
        self._parent_states.require_place()
        connect(self)
        if self._saved is not None:
            self._replay(self._saved)
            self._saved = None
        if not self._met:
            self._meet()
        if not self._agreed and not self._finished:
            self._agreed.extend(self._agree())
            self._finished = not self._agreed  # no collective after the end: the others may ask no more
        if not self._agreed:
            raise StopIteration
        self._read_if_room()  # now, and not all at once when the next steps are agreed on
        position = self._agreed[0]
        batch = recorded(self, partial(self._batch, position))
        self._agreed.popleft()  # last, or an interruption on the way would lose the batch
        self._count(position)
        return batch

    def _batch(self, position: int) -> dict[str, Any]:
        """Returns the batch of the next step, one of padding rows if this process holds none of its bucket."""
        held, plan = self._held[position], self._dataset.plan
        return held[0].batch if held else pad([], plan.buckets[position], plan)

    def _count(self, position: int) -> None:
        """Takes a step."""
        held = self._held[position]
        self._step += 1
        self._batches[position] += 1
        self._empty += not held
        if held:
            held.popleft()
        self._board.report = self._report()

    def _report(self) -> LockstepReport:
        return LockstepReport(tuple(self._batches), self._empty, self._collectives, sum(map(len, self._held)))

    def report(self) -> LockstepReport:
        """Counts the steps up to the last one; may be called from any thread."""
        return self._board.report or self._report()

    def get_state(self) -> dict[str, Any]:
        """Returns the state as JSON values, new ones each time and of constant structure."""
        self._parent_states.require_place()
        if self._saved is not None:
            return copy.deepcopy(self._saved)
        held = sorted((each for batches in self._held for each in batches), key=lambda each: each.number)
        if held:
            start, parent = held[0].number, held[0].state
        else:
            start, parent = self._seen, self._failure[1] if self._failure else self._source.get_state()
        return {
            "fingerprint": self._dataset.fingerprint,
            "parent": copy.deepcopy(parent),
            "start": start,
            "seen": self._seen,
            "held": ",".join(str(each.number - start) for each in held),
            "agreed": ",".join(map(str, self._agreed)),
            "step": self._step,
            "counts": {"batches": list(self._batches), "empty": self._empty, "collectives": self._collectives},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes a state that `get_state` returned; the batches that were held are read again at the next `next`.

        Raises:
            StateError: if it was saved with another plan or window, by another process, or by one of another number; if it is
                damaged; or if the stream does not take its part. But for the last, the iterator stays as it was.
        """
        mine = self._dataset.fingerprint
        if not isinstance(state, dict) or not state.keys() >= _STATE or not isinstance(state["fingerprint"], dict):
            raise StateError(
                f"this is no state of a LockstepIterDataset, which get_state() returns: {str(state)[:80]!r}"
            )
        if changed := changes(state["fingerprint"], mine):
            raise StateError(
                f"the state was saved by a lockstep with {changed}: each process goes on from its own state, with "
                "the same plan and window, in as many processes"
            )
        self._dataset.require_sound(state)
        self._parent_states.place(state["parent"])
        self._placed = True
        self._reset()
        self._met = False
        self._saved = copy.deepcopy(state)
        self._restore_counts(state["counts"])
        self._board.report = replace(self._report(), held=len(_numbers(state["held"])))

    def _replay(self, saved: dict[str, Any]) -> None:
        """Reads the batches again that were held when the state was saved; if that fails, it can be tried again."""
        self._reset()
        if not self._placed:
            self._parent_states.place(saved["parent"])
        self._placed = False
        self._seen = saved["start"]
        held = {saved["start"] + offset for offset in _numbers(saved["held"])}
        while self._seen < saved["seen"]:
            if not self._read(keep=self._seen in held):
                raise StateError(
                    f"the state was saved after {saved['seen']} batches, but the stream ends after {self._seen}: it is not the "
                    "one that the state was saved with"
                )
        self._agreed.extend(_numbers(saved["agreed"]))
        self._step = saved["step"]
        self._restore_counts(saved["counts"])

    def _restore_counts(self, counts: dict[str, Any]) -> None:
        self._batches = list(counts["batches"])
        self._empty, self._collectives = counts["empty"], counts["collectives"]

    def _read(self, *, keep: bool = True) -> bool:
        """Takes a batch from the parent, and holds it back; returns whether there was one.

        One that cannot be read stays the next one: each call raises again, since whether the parent would give it again is not
        known. A state taken then has it still to come: to try again, set it, and in every other process one of the same step.
        """
        if self._failure is not None:
            raise self._failure[0].with_traceback(None)
        state = copy.deepcopy(self._source.get_state())
        try:
            batch = next(self._source, None)
            if batch is None:
                return False
            if keep:
                self._held[self._dataset.position(batch)].append(_Held(self._seen, state, batch))
            self._seen += 1
        except Exception as error:
            self._failure = error, state
            raise
        except BaseException as error:
            why = (
                f"{type(error).__name__} interrupted the reading of batch {self._seen}: go on by it.set_state(it.get_state()), "
                "with several processes in each of them"
            )
            self._failure = ScheduleError(why), state
            raise
        return True

    def _read_if_room(self) -> bool:
        """Reads a batch if there are fewer than a window of them and the stream has not ended; returns whether it did."""
        if self._ended or sum(map(len, self._held)) >= self._dataset.window:
            return False
        self._ended = not self._read()
        return not self._ended

    def _meet(self) -> None:
        """Finds out whether all processes mean the same before they rely on it.

        Raises:
            ProcessError: if one has another plan or window, or is at another step.
        """
        plan = int(self._dataset.plan.fingerprint[:7], 16)
        every = self._gather(_MEETING, [plan, self._dataset.window, self._step])
        for what, column in zip(("plans", "windows", "steps"), every.T.tolist(), strict=True):  # a plan by its hash
            if len(set(column)) > 1:
                raise ProcessError(
                    f"the processes of a lockstep have different {what}, {', '.join(map(str, column))}: give all the same plan "
                    "(one file, BucketPlan.load) and window, and restore all from the same step"
                )
        self._met = True

    def _agree(self) -> list[int]:
        """Reads up to a window of batches, and agrees with the other processes on the buckets of the next steps."""
        while self._read_if_room():
            pass
        old = self._seen - _LONG * self._dataset.window
        overdue = [sum(each.number < old for each in held) for held in self._held]
        self._collectives += 1
        every = self._gather(_AGREEMENT, [self._ended, *map(len, self._held), *overdue])
        counts, overdue = np.split(every[:, 1:], 2, axis=1)
        return next_buckets(counts, overdue, every[:, 0].astype(bool))

    def _gather(self, purpose: int, numbers: list[int]) -> Counts:
        """Returns the numbers of every process, int32 [P, len(numbers)], in a collective of the size of the longest."""
        return _gather(purpose, numbers, 2 * len(self._dataset.plan) + 1)

    def __str__(self) -> str:
        return f"LockstepDatasetIterator(buckets={len(self._dataset.plan)})"


def next_buckets(counts: Counts, overdue: Counts, ended: npt.NDArray[np.bool_]) -> list[int]:
    """Decides on the buckets of the next steps: those that every process whose stream goes on can fill, evenly mixed.

    Args:
        counts: the batches of each bucket that each process holds, integers [P, K].
        overdue: those among them that it has held for too long; they come too.
        ended: whether its stream has ended, bool [P]. One that goes on holds at least one batch.

    Returns:
        Positions of buckets. If the processes have nothing in common, one step: the bucket that most of them hold, and of which
        they hold most. If all have ended, all that is left; none if nothing is.
    """
    steps = counts[~ended].min(axis=0) if not ended.all() else counts.max(axis=0)
    steps = np.maximum(steps, overdue.max(axis=0))
    if not steps.any() and not ended.all():
        steps[np.lexsort((counts.sum(axis=0), (counts > 0).sum(axis=0)))[-1]] = 1
    buckets = np.repeat(np.arange(len(steps)), steps)
    times = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in steps])
    return buckets[np.argsort(times, kind="stable")].tolist()


def _gather(purpose: int, numbers: list[int], most: int) -> Counts:
    """Returns the numbers of every process, int32 [P, len(numbers)]; all must call it.

    What is sent has room for `most` numbers whatever it is for, and the same size for any plans but those of very many buckets:
    JAX does not notice collectives that differ, and computes wrong numbers, or waits.

    Raises:
        ProcessError: if they called it for different purposes.
    """
    sent = np.zeros(-(-(1 + most) // _WIDTH) * _WIDTH, np.int32)
    sent[: 1 + len(numbers)] = [purpose, *numbers]
    every = np.asarray(multihost_utils.process_allgather(sent))
    if len({*every[:, 0].tolist()}) > 1:
        raise ProcessError(
            "some processes of a lockstep start from a state while others are on their way: after a failure, restore all of "
            "them, from the same step"
        )
    return every[:, 1 : 1 + len(numbers)]


def _numbers(listed: str) -> list[int]:
    return [int(number) for number in listed.split(",") if number]


def _lists_below(listed: object, limit: int) -> bool:
    """Returns whether something is a list of numbers below a limit, as `_numbers` reads it."""
    if not isinstance(listed, str):
        return False
    return all(each.isdecimal() and int(each) < limit for each in listed.split(",")) if listed else True


def _shapes(batch: Any) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Returns the path, shape and dtype of each leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return tuple((jax.tree_util.keystr(path), tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves)
