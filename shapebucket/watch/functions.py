"""Which function compiles: under what name it is counted, and whether it is a new object of the same code."""

from __future__ import annotations

import functools
import inspect
import os
import sysconfig
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal

import jax

from shapebucket.watch.signature import shown

Kind = Literal["call", "ahead", "eager"]
_JAX = str(Path(jax.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent) + os.sep
_PACKAGES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib")})


@dataclass(frozen=True)
class Function:
    """A function as the watch counts it: all objects made by one piece of code are one function.

    Attributes:
        name: its name.
        where: file and line of its definition, or for an eager operation of the call; empty where unknown.
        kind: `"call"` for a jitted function, `"ahead"` for one compiled ahead of time, `"eager"` for an operation of JAX's own
            outside jit.
        key: what tells it from others.
    """

    name: str
    where: str
    kind: Kind
    key: Hashable


@dataclass(frozen=True)
class Making:
    """One object of a function: its number among those seen, how it was made, and what it holds on to, as text."""

    number: int
    how: str
    held: tuple[tuple[str, str], ...] = ()


class _Makings:
    """Numbers the functions of the process, without keeping them alive where Python lets it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._next = 0

    def of(self, fun: Callable[..., Any]) -> Making:
        """Returns which object a function is, and what it holds on to."""
        owner = getattr(fun, "__self__", fun)  # JAX takes methods of one object for one function
        try:
            ref: Any = weakref.ref(owner)
        except TypeError:
            ref = lambda: owner  # noqa: E731
        with self._lock:
            known = self._numbers.get(id(owner))
            if known is None or known[0]() is not owner:
                known = self._numbers[id(owner)] = (ref, self._next)
                self._next += 1
        return Making(known[1], _how(fun), tuple(_held(fun)))


MAKINGS: Final = _Makings()


def function_of(fun: Callable[..., Any] | None, name: str, caller: str, ahead: bool) -> Function:
    """Returns the function that a callable belongs to.

    Args:
        fun: what was jitted, if known.
        name: as JAX calls it.
        caller: the line of the user's that made it compile.
        ahead: whether it was compiled ahead of time.
    """
    if ahead:
        return Function(name, "", "ahead", ("ahead", name))
    if fun is None or str(getattr(fun, "__module__", "")).split(".")[0] == "jax":
        return Function(name, caller, "eager", ("eager", caller, name))
    inner = _inner(fun)
    code = getattr(inner, "__code__", None)
    if code is None:
        return Function(name, "", "call", (type(inner).__module__, type(inner).__qualname__, name))
    return Function(name, f"{short(code.co_filename)}:{code.co_firstlineno}", "call", code)


def caller_line() -> str:
    """Returns the innermost line that is not of an installed package, or else not of JAX: "train.py:31 in main"."""
    frame: FrameType | None = inspect.currentframe()
    fallback = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_JAX, _OURS, "<frozen")):
            line = f"{short(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
            if not file.startswith(_PACKAGES):
                return line
            fallback = fallback or line
        frame = frame.f_back
    return fallback


def short(file: str) -> str:
    """Returns a file's path from the working directory, where it lies below."""
    here = str(Path.cwd()) + os.sep
    return file.removeprefix(here)


def _inner(fun: Any) -> Any:
    """Returns the function inside partials, methods and wrappers."""
    while True:
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif inspect.ismethod(fun):
            fun = fun.__func__
        elif hasattr(fun, "__wrapped__"):
            fun = fun.__wrapped__
        else:
            return fun


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
    inner = _inner(fun)
    names = getattr(getattr(inner, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(inner, "__closure__", None) or (), strict=False):
        try:
            held.append((name, _content(cell.cell_contents)))
        except ValueError:  # not filled yet
            continue
    return held


def _content(value: Any) -> str:
    """Describes a value that a function holds on to; a container by its length, an array by its type."""
    if isinstance(value, list | tuple | dict | set):
        return f"a {type(value).__name__} of {len(value)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return shown(value) if isinstance(value, bool | int | float | complex | str | None) else f"a {type(value).__name__}"
