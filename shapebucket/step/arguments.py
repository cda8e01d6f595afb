"""Which arguments of a step are the batch, static, donated or carried, and how a call names them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shapebucket.errors import StepError
from shapebucket.parameters import parameters_of, positional_of

Place = int | str
"""A positional argument's index or a keyword."""


class _Batch:
    def __repr__(self) -> str:
        return "BATCH"


BATCH: Final = _Batch()
"""Marks the batch's place among the arguments of `CompiledStep.compile`; or those of several batches of one bucket."""


@dataclass(frozen=True, init=False)
class OneOf:
    """The values that a static argument takes, for `CompiledStep.compile`: an executable is made for each.

        step.compile(state, BATCH, train=OneOf(True, False))

    Attributes:
        values: hashable, each once.
    """

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        if not values:
            raise StepError("OneOf() needs at least one value")
        object.__setattr__(self, "values", values)


def refuse_own_names(caller: str, own: Collection[str], fn: Callable[..., Any]) -> None:
    """Raises StepError for a step with an argument that a function which takes its arguments means for itself."""
    if taken := sorted({each.name for each in parameters_of(fn)} & {*own}):
        raise StepError(f"the step has an argument {taken[0]!r}, which {caller} means for itself: give it another name")


def places_of(
    fn: Callable[..., Any], argnums: int | Sequence[int] | None, argnames: str | Sequence[str] | None
) -> frozenset[Place]:
    """Returns the arguments that `argnums` and `argnames` mean, each by its index and by its name, as `jax.jit` reads them."""
    positional = positional_of(fn)
    numbers = [argnums] if isinstance(argnums, int) else list(argnums or ())
    names = [argnames] if isinstance(argnames, str) else list(argnames or ())
    found: set[Place] = set()
    for number in numbers:
        index = number + len(positional) if number < 0 else number
        found.add(index)
        found.update(positional[index : index + 1])
    for name in names:
        found.add(name)
        if name in positional:
            found.add(positional.index(name))
    return frozenset(found)


def label_of(fn: Callable[..., Any], place: Place) -> str:
    """Returns the name of an argument, for messages."""
    if isinstance(place, str):
        return place
    names = positional_of(fn)
    return names[place] if place < len(names) else f"argument {place}"


def places_of_batch(caller: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Place, ...]:
    """Returns where `BATCH` stands.

    Raises:
        StepError: naming the caller, if it stands nowhere.
    """
    places = tuple(place for place in (*range(len(args)), *kwargs) if at(args, kwargs, place) is BATCH)
    if not places:
        raise StepError(f"{caller} needs BATCH in the batch's place; it stands in none")
    return places


def at(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: Place) -> Any:
    """Returns the argument at a place.

    Raises:
        IndexError, KeyError: where there is none.
    """
    return args[place] if isinstance(place, int) else kwargs[place]


def without(
    places: Collection[Place], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments that are not at these places."""
    return (
        tuple(value for index, value in enumerate(args) if index not in places),
        {name: value for name, value in kwargs.items() if name not in places},
    )


def replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: Place, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with another value at one place."""
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, place: value}


def filled(
    args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[Place], values: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with other values at several places."""
    for place, value in zip(places, values, strict=True):
        args, kwargs = replaced(args, kwargs, place, value)
    return args, kwargs
