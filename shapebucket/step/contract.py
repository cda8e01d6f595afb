"""What a step was compiled for, and what tells its executables apart at a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shapebucket.buckets import Bucket
from shapebucket.errors import StepError
from shapebucket.step.arguments import OneOf, Place, at, filled, replaced
from shapebucket.step.modules import Modules
from shapebucket.step.report import Executable
from shapebucket.step.signature import Signature, Taken, leaf_at, signature_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""


@dataclass(frozen=True)
class Contract:
    """What `compile` was told, and each later call is held to.

    Attributes:
        places: of the batch, or of several, which are of one bucket at each call.
        statics: the places of the static arguments that were given.
        paths: of the leaves of a batch whose shapes tell its bucket.
        buckets: by the signature of their batches, as many as there are places.
        configuration: JAX's settings then.
        settings: the same, by name.
        memory: what a device may hold, in bytes; None where unknown.
        cap: on the number of executables.
        modules: the flax.nnx modules among the arguments; None where there are none.
    """

    places: tuple[Place, ...]
    statics: tuple[Place, ...]
    paths: tuple[tuple[str, ...], ...]
    buckets: Mapping[Signature, Bucket]
    configuration: Hashable
    settings: Mapping[str, object]
    memory: int | None
    cap: int
    modules: Modules | None = None

    def batches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Returns the batches of a call."""
        return tuple([at(args, kwargs, place) for place in self.places])

    def signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """Returns all that decides on an executable: the trees, shapes and dtypes of the batches, and the static values."""
        return (signature_of(self.batches(args, kwargs)), static_key(self.statics, args, kwargs))

    def key(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Hashable]:
        """Returns a function from a call's arguments to what a dispatch looks up: cheap, and enough to tell the buckets.

        It looks at the first batch alone; an executable checks the others.
        """
        place, paths, statics = self.places[0], self.paths, self.statics
        if isinstance(place, int) and not statics and len(paths) == 1 and len(paths[0]) == 1:  # by far the most
            name = paths[0][0]
            return lambda args, kwargs: args[place][name].shape  # noqa: ARG005

        def key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
            batch = at(args, kwargs, place)
            shapes = tuple([leaf_at(batch, path).shape for path in paths])
            return (shapes, static_key(statics, args, kwargs)) if statics else shapes

        return key


@dataclass(frozen=True)
class Stock:
    """What a step holds, as one object: a call reads it without a lock, and it is replaced as a whole, never changed.

    Attributes:
        contract: what it was compiled for.
        key: from a call's arguments to what `dispatch` looks up.
        taken: what the executables take beside their batches.
        held: by all that decides on an executable.
        dispatch: by what tells the buckets.
    """

    contract: Contract
    key: Callable[[tuple[Any, ...], dict[str, Any]], Hashable]
    taken: Taken
    held: Mapping[Signature, Executable]
    dispatch: Mapping[Hashable, Executable]

    @classmethod
    def of(cls, contract: Contract, jobs: Sequence[Job], made: Sequence[Executable]) -> Stock:
        """Takes in what was made for the jobs, in their order."""
        stock = cls(contract, contract.key(), Taken.by(made[0].compiled), {}, {})
        for job, executable in zip(jobs, made, strict=True):
            stock = stock.plus(job, executable)
        return stock

    def plus(self, job: Job, executable: Executable) -> Stock:
        """Returns the stock with one more."""
        args, kwargs = filled(job.args, job.kwargs, self.contract.places, job.batches)
        held = {**self.held, self.contract.signature(args, kwargs): executable}
        return replace(self, held=held, dispatch={self.key(args, kwargs): executable, **self.dispatch})

    def minus(self, executables: Sequence[Executable]) -> Stock:
        """Returns the stock without some."""
        held = {key: each for key, each in self.held.items() if each not in executables}
        return replace(
            self, held=held, dispatch={key: each for key, each in self.dispatch.items() if each not in executables}
        )

    @property
    def by_age(self) -> tuple[Executable, ...]:
        """The executables, the least recently used first."""
        return tuple(sorted(self.held.values(), key=lambda each: each.last_used))


@dataclass(frozen=True)
class Job:
    """One executable to be made: the arguments, with batches that stand for all of their shape."""

    bucket: Bucket | None
    batches: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def static_key(statics: Sequence[Place], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Returns the values of the static arguments as `jit` tells them apart: 1 is not True."""
    values = [at(args, kwargs, place) for place in statics]
    return tuple([(type(value), value) for value in values])


def variants(args: tuple[Any, ...], kwargs: dict[str, Any], statics: Sequence[Place]) -> Iterator[Arguments]:
    """Returns the arguments with each combination of the static values."""
    for place in (*range(len(args)), *kwargs):
        if isinstance(at(args, kwargs, place), OneOf) and place not in statics:
            raise StepError(f"OneOf is for static arguments, but argument {place!r} is none: see static_argnames")
    choices: list[tuple[Any, ...]] = []
    for place in statics:
        value = at(args, kwargs, place)
        values: tuple[Any, ...] = value.values if isinstance(value, OneOf) else (value,)
        try:
            unique = {(type(each), each): each for each in values}
        except TypeError as error:
            raise StepError(
                f"the static argument {place!r} cannot be hashed ({error}): give a tuple, a string …"
            ) from None
        choices.append(tuple(unique.values()))
    for combination in itertools.product(*choices):
        chosen = args, kwargs
        for place, value in zip(statics, combination, strict=True):
            chosen = replaced(*chosen, place, value)
        yield chosen
