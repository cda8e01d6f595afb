"""Counting the calls of jitted functions by the sizes that vary, since compiles alone do not tell how often a shape comes."""

from __future__ import annotations

import functools
import operator
import threading
from collections import Counter
from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any, Final, NamedTuple

import jax
from jax.core import Tracer
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from shapebucket.watch.functions import function_of
from shapebucket.watch.sharing import Shared
from shapebucket.watch.signature import Change, Signature

Column = tuple[str, int]
"""A leaf's path as text, and the number of an axis."""


class _Place(NamedTuple):
    """Where a call has the size of a column: an argument, the way from it to the leaf, an axis."""

    argument: int | str
    way: tuple[Callable[[Any], Any], ...]
    axis: int


class CallCounts:
    """How often a function was called with which sizes, on the columns that turned out to vary.

    Attributes:
        calls: in all.
        closed: whether to count no more: functions outlive the watch that they were jitted under.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.closed = False
        self._lock = threading.Lock()
        self._places: dict[Column, _Place] = {}
        self._order: tuple[_Place, ...] = ()
        self._first: Signature | None = None
        self._sizes: Counter[tuple[int, ...]] = Counter()

    @property
    def sizes(self) -> tuple[tuple[Column, ...], Counter[tuple[int, ...]]]:
        """The columns, and how many calls had which sizes there."""
        with self._lock:
            return tuple(self._places), Counter(self._sizes)

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Counts one call, unless it is a part of another program or has another tree; one or two microseconds."""
        if self.closed:
            return
        sizes: list[int] = []
        try:
            for argument, way, axis in self._order:
                value: Any = args[argument] if type(argument) is int else kwargs[argument]  # pyright: ignore[reportArgumentType]
                for step in way:
                    value = step(value)
                if isinstance(value, Tracer):
                    return
                sizes.append(value.shape[axis])
        except (LookupError, AttributeError, TypeError):
            return
        with self._lock:
            self.calls += 1
            if len(sizes) == len(self._order):
                self._sizes[tuple(sizes)] += 1

    def compiled(self, signature: Signature | None, changes: Sequence[Change]) -> None:
        """Learns from a compile which sizes vary; the calls before it had the size of the first."""
        if signature is None:
            return
        with self._lock:
            if self._first is None:
                self._first = signature
            for change in changes:
                if (
                    change.kind == "shape"
                    and change.axis is not None
                    and (change.path, change.axis) not in self._places
                ):
                    self._add(change.path, change.axis)

    def _add(self, text: str, axis: int) -> None:
        assert self._first is not None
        for path, leaf in zip(self._first.paths, self._first.leaves, strict=True):
            if path.text == text and axis < len(leaf.shape) and all(map(_can_follow, path.keys)):
                self._places[text, axis] = _Place(path.argument, tuple(map(_step, path.keys)), axis)
                self._order = tuple(self._places.values())
                self._sizes = Counter({(*sizes, leaf.shape[axis]): count for sizes, count in self._sizes.items()})


def _can_follow(key: Any) -> bool:
    return isinstance(key, DictKey | SequenceKey | GetAttrKey)


def _step(key: Any) -> Callable[[Any], Any]:
    """Returns what follows one key of a path."""
    if isinstance(key, GetAttrKey):
        return operator.attrgetter(key.name)
    return operator.itemgetter(key.key if isinstance(key, DictKey) else key.idx)


class CountedFunction:
    """What `jax.jit` returned, with its calls counted; everything else is its own."""

    def __init__(self, jitted: Any, counts: Sequence[CallCounts]) -> None:
        self._shapebucket_jitted = jitted
        self._shapebucket_counts = [each.call for each in counts]
        functools.update_wrapper(self, jitted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, and counts."""
        out = self._shapebucket_jitted(*args, **kwargs)
        for count in self._shapebucket_counts:  # after it, when a compile has told what varies; shapes outlive donation
            count(args, kwargs)
        return out

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    @property
    def lower(self) -> Any:
        """That of the jitted function; here, since `jax.stages.Wrapped` looks for it in the class."""
        return self._shapebucket_jitted.lower

    @property
    def trace(self) -> Any:
        """Likewise."""
        return self._shapebucket_jitted.trace

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_shapebucket"):  # not there yet, while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._shapebucket_jitted, name)

    def __reduce__(self) -> Any:
        return self._shapebucket_jitted.__reduce__()


def _counted(jitted: Any, fun: Callable[..., Any]) -> CountedFunction:
    function = function_of(fun, getattr(fun, "__name__", type(fun).__name__), "", ahead=False)
    return CountedFunction(jitted, [each.setdefault(function.key, CallCounts()) for each in _COUNTING.users])


@contextmanager
def _replaced_jit() -> Generator[None]:
    """Replaces `jax.jit` by one that returns counting functions."""
    plain: Any = jax.jit

    @functools.wraps(plain)
    def jit(*args: Any, **kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        fun = args[0] if args else kwargs.get("fun")
        if fun is None or not callable(fun):  # jax.jit(static_argnums=…), a decorator that is still to be applied

            def decorate(fun: Callable[..., Any]) -> CountedFunction:
                return _counted(made(fun), fun)

            return decorate
        return _counted(made, fun)

    jax.jit = jit
    try:
        yield
    finally:
        jax.jit = plain


_COUNTING: Final = Shared[MutableMapping[Any, CallCounts]](_replaced_jit)


def counted_jits(counts: MutableMapping[Any, CallCounts]) -> AbstractContextManager[None]:
    """Returns a context in which `jax.jit` makes functions that count their calls, by the key of the function."""
    return _COUNTING.used_by(counts)
