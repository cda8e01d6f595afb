"""What a step was compiled for, and what tells its executables apart at a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shapebucket.buckets import Bucket
from shapebucket.errors import StepError
from shapebucket.step.arguments import OneOf, Place, at, replaced
from shapebucket.step.modules import Modules
from shapebucket.step.signature import Signature, leaf_at, signature_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""


@dataclass(frozen=True)
class Contract:
    """What `compile` was told, and each later call is held to.

    Attributes:
        place: of the batch.
        statics: the places of the static arguments that were given.
        paths: of the leaves of a batch whose shapes tell its bucket.
        buckets: by the signature of their batches.
        configuration: JAX's settings then.
        settings: the same, by name.
        memory: what a device may hold, in bytes; None where unknown.
        cap: on the number of executables.
        modules: the flax.nnx modules among the arguments; None where there are none.
    """

    place: Place
    statics: tuple[Place, ...]
    paths: tuple[tuple[str, ...], ...]
    buckets: Mapping[Signature, Bucket]
    configuration: Hashable
    settings: Mapping[str, object]
    memory: int | None
    cap: int
    modules: Modules | None = None

    def signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """Returns all that decides on an executable: the batch's tree, shapes and dtypes, and the static values."""
        return (signature_of(at(args, kwargs, self.place)), static_key(self.statics, args, kwargs))

    def key(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Hashable]:
        """Returns a function from a call's arguments to what a dispatch looks up: cheap, and enough to tell the buckets."""
        place, paths, statics = self.place, self.paths, self.statics
        if isinstance(place, int) and not statics and len(paths) == 1 and len(paths[0]) == 1:  # by far the most
            name = paths[0][0]
            return lambda args, kwargs: args[place][name].shape  # noqa: ARG005

        def key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
            batch = at(args, kwargs, place)
            shapes = tuple([leaf_at(batch, path).shape for path in paths])
            return (shapes, static_key(statics, args, kwargs)) if statics else shapes

        return key


@dataclass(frozen=True)
class Job:
    """One executable to be made: the arguments, with a batch that stands for all of its shape."""

    bucket: Bucket | None
    batch: Any
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
