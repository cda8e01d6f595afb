"""Which function compiles: under what name it is counted, and whether it is a new object of the same code."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import jax
import numpy as np

from shapebucket.watch.signature import shown

Kind = Literal["call", "ahead", "eager"]
_JAX = str(Path(jax.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent) + os.sep
_DEEPEST = 64  # wrappers; one that wraps itself has no end
_PACKAGES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib")})


@dataclass(frozen=True)
class Function:
    """A function as the watch counts it: all objects made by the same code, wrappers included, are one function.

    Attributes:
        name: its name.
        where: file and line of its definition, or for an eager operation of the call; empty where unknown.
        kind: `"call"` for a jitted function, `"ahead"` for one compiled ahead of time, `"eager"` for an operation of JAX's own
            outside jit, as which `jax.pmap` counts too.
        key: what tells it from others.
    """

    name: str
    where: str
    kind: Kind
    key: Hashable


@dataclass(frozen=True)
class Making:
    """One object of a function.

    Attributes:
        number: its number among the objects that the watch saw.
        how: how it was made: `"lambda"`, `"functools.partial"`, …
        held: what it holds on to, as names and texts.
        replaces: whether the object of the same function that compiled before it is no more, so that none can call it.
    """

    number: int
    how: str
    held: tuple[tuple[str, str], ...] = ()
    replaces: bool = False


class _Owner:
    """An object that methods are of, which JAX tells from others by identity; kept alive if Python has no other way."""

    def __init__(self, owner: Any) -> None:
        self._id = id(owner)
        try:
            self._ref: Callable[[], Any] = weakref.ref(owner)
        except TypeError:
            self._ref = lambda: owner

    def __call__(self) -> Any:
        return self._ref()

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Owner) and self._id == other._id and self() is other() and self() is not None


class Makings:
    """Numbers functions as JAX's caches tell them apart: by equality, and methods by their object.

    It keeps alive only objects that cannot have weak references, such as a NamedTuple, and these for its own life.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # equality may be somebody else's code
        self._numbers: dict[Any, int] = {}
        self._seen: list[Callable[[], Any]] = []
        self._last: dict[Hashable, int] = {}

    def of(self, fun: Callable[..., Any], key: Hashable) -> Making:
        """Returns which object of a function this is, and what it holds on to; `key` is the function's."""
        ref: Any = _Owner(fun.__self__) if inspect.ismethod(fun) else weakref.ref(fun)
        with self._lock:
            number = self._numbers.setdefault(ref, len(self._seen))
            if number == len(self._seen):
                self._seen.append(ref)
            last = self._last.get(key, number)
            self._last[key] = number
            replaces = last != number and self._seen[last]() is None
        return Making(number, _how(fun), tuple(_held(fun)), replaces)


def function_of(fun: Callable[..., Any] | None, name: str, caller: str, ahead: bool, here: str = "") -> Function:
    """Returns the function that a callable belongs to.

    Args:
        fun: what was jitted, if known.
        name: as JAX calls it.
        caller: the line of the user's that made it compile.
        ahead: whether it was compiled ahead of time.
        here: see `short`.
    """
    if ahead:
        return Function(name, "", "ahead", ("ahead", caller, name))
    if fun is None or _is_of_jax(fun):
        return Function(name, caller, "eager", ("eager", caller, name))
    layers = list(_layers(fun))
    code = getattr(layers[-1], "__code__", None)
    where = "" if code is None else f"{short(code.co_filename, here)}:{code.co_firstlineno}"
    return Function(name, where, "call", tuple(map(_layer_key, layers)))


def _is_of_jax(fun: Any) -> bool:
    """Tells whether JAX made and jitted a function; one that the user jits is public as it is, or jitted already."""
    module, name = str(getattr(fun, "__module__", "")), str(getattr(fun, "__name__", ""))
    if module.split(".")[0] != "jax" or not inspect.isfunction(fun):
        return False
    return name.startswith("_") or getattr(sys.modules.get(module), name, None) is not fun


def caller_frame() -> FrameType | None:
    """Returns the innermost frame that is not of an installed package, or else not of JAX."""
    frame: FrameType | None = inspect.currentframe()
    fallback: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_JAX, _OURS, "<frozen")):
            if not file.startswith(_PACKAGES):
                return frame
            fallback = fallback or frame
        frame = frame.f_back
    return fallback


def caller_line(here: str) -> str:
    """Returns the line of that frame: "train.py:31 in main"; empty if there is none.

    Args:
        here: see `short`.
    """
    frame = caller_frame()
    return (
        "" if frame is None else f"{short(frame.f_code.co_filename, here)}:{frame.f_lineno} in {frame.f_code.co_name}"
    )


def working_directory() -> str:
    """Returns the folder that files are told from; empty if it was removed."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def short(file: str, here: str) -> str:
    """Returns a file's path from a folder, where it lies below."""
    return file.removeprefix(here + os.sep) if here else file


def _layers(fun: Any) -> Iterator[Any]:
    """Yields a callable and what is inside its partials, methods and wrappers, the innermost last."""
    for _ in range(_DEEPEST):
        yield fun
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif inspect.ismethod(fun):
            fun = fun.__func__
        elif hasattr(fun, "__wrapped__"):
            fun = fun.__wrapped__
        else:
            return


def _layer_key(layer: Any) -> tuple[Hashable, ...]:
    """Returns what tells one layer from others: `grad` and `vmap` of a function are other functions than itself."""
    code: Any = getattr(layer, "__code__", None)
    behind: list[Any] = []
    if hasattr(layer, "__wrapped__"):  # JAX's transformations are closed over by wrappers of one code
        behind = [getattr(value, "__code__", None) for _, value in _closed_over(layer)]
    return (type(layer).__module__, type(layer).__qualname__, str(getattr(layer, "__name__", "")), code, *behind)


def _closed_over(fun: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and values that a function closes over."""
    names = getattr(getattr(fun, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fun, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _how(fun: Any) -> str:
    if isinstance(fun, functools.partial):
        return "functools.partial"
    if inspect.ismethod(fun):
        return f"method of a {type(fun.__self__).__name__}"
    return "lambda" if getattr(fun, "__name__", "") == "<lambda>" else "function"


def _held(fun: Any) -> list[tuple[str, str]]:
    """Returns what a function closes over or has bound: names and texts."""
    held: list[tuple[str, str]] = []
    if isinstance(fun, functools.partial):
        held += [(f"argument {number}", _content(value)) for number, value in enumerate(fun.args)]
        held += [(name, _content(value)) for name, value in fun.keywords.items()]
    inner = list(_layers(fun))[-1]
    return held + [(name, _content(value)) for name, value in _closed_over(inner)]


def _content(value: Any) -> str:
    """Describes a value that a function holds on to; a container by its length, an array by its type."""
    if isinstance(value, list | tuple | dict | set):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, jax.Array | np.ndarray):  # of other classes, `shape` may be anything, and run anything
        return f"{value.dtype}{list(value.shape)}"
    return shown(value) if isinstance(value, bool | int | float | complex | str | None) else f"a {type(value).__name__}"
