"""Counting the calls of jitted functions by the sizes that vary, since compiles alone do not tell how often a shape comes."""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any, Final, NamedTuple, Protocol

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from shapebucket.parameters import positional_of
from shapebucket.watch.functions import function_of
from shapebucket.watch.sharing import Shared
from shapebucket.watch.signature import Change, Signature

Column = tuple[str, int]
"""A leaf's path as text, and the number of an axis."""


class _Place(NamedTuple):
    """Where a call has the size of a column: its argument by position and by keyword, the way to the leaf, an axis."""

    position: int
    keyword: str
    way: tuple[Callable[[Any], Any], ...]
    axis: int


class Tracing(Protocol):
    """Tells whether this thread is within a trace."""

    @property
    def tracing(self) -> bool:
        """Whether it is."""
        ...


class CallCounts:
    """How often a function was called with which sizes, on the columns that turned out to vary.

    Calls within the trace of another program are a part of that and not counted; those under a gradient are.

    Attributes:
        calls: in all.
        closed: whether to count no more: functions outlive the watch that they were jitted under.
    """

    def __init__(self, parameters: Sequence[str], thread: Tracing) -> None:
        """Makes counts of none.

        Args:
            parameters: the names of the function's parameters that have a position.
            thread: what tells of calls within traces.
        """
        self.calls = 0
        self.closed = False
        self._parameters = list(parameters)
        self._thread = thread
        self._lock = threading.Lock()
        self._places: dict[Column, _Place] = {}
        self._order: tuple[_Place, ...] = ()
        self._first: Signature | None = None
        self._sizes: Counter[tuple[int, ...]] = Counter()

    @property
    def sizes(self) -> tuple[tuple[Column, ...], Counter[tuple[int, ...]]]:
        """The columns, and how many calls had which sizes there; calls of another structure are not among them."""
        with self._lock:
            return tuple(self._places), Counter(self._sizes)

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Counts one call; one or two microseconds."""
        if self.closed or self._thread.tracing:
            return
        sizes: list[int] | None = []
        try:
            for position, keyword, way, axis in self._order:
                value: Any = args[position] if position < len(args) else kwargs[keyword]
                for step in way:
                    value = step(value)
                sizes.append(value.shape[axis])
        except Exception:  # another structure, or what somebody else's class makes of it
            sizes = None
        with self._lock:
            self.calls += 1
            if sizes is not None and len(sizes) == len(self._order):
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
                position, keyword = self._passed(path.argument)
                self._places[text, axis] = _Place(position, keyword, tuple(map(_step, path.keys)), axis)
                self._order = tuple(self._places.values())
                self._sizes = Counter({(*sizes, leaf.shape[axis]): count for sizes, count in self._sizes.items()})

    def _passed(self, argument: int | str) -> tuple[int, str]:
        """Returns the position and the keyword by which a call may pass an argument."""
        if isinstance(argument, int):
            return argument, self._parameters[argument] if argument < len(self._parameters) else ""
        return self._parameters.index(argument) if argument in self._parameters else sys.maxsize, argument


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

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
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

    def __copy__(self) -> Any:
        return self  # as a function, it is immutable

    def __deepcopy__(self, _: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        return self._shapebucket_jitted.__reduce__()


class Counting(NamedTuple):
    """Where a watch keeps its counts, by the function's key, and what tells it of traces."""

    counts: MutableMapping[Any, CallCounts]
    thread: Tracing


def _counted(jitted: Any, fun: Callable[..., Any]) -> Any:
    """Returns a jitted function that counts its calls for all who want it."""
    users = _COUNTING.users
    if not users:  # somebody has kept the jax.jit of a watch that is over
        return jitted
    function = function_of(fun, str(getattr(fun, "__name__", "")), "", ahead=False)
    names = positional_of(fun)
    return CountedFunction(
        jitted, [each.counts.setdefault(function.key, CallCounts(names, each.thread)) for each in users]
    )


@contextmanager
def _replaced_jit() -> Generator[None]:
    """Replaces `jax.jit` by one that returns counting functions."""
    plain: Any = jax.jit

    @functools.wraps(plain)
    def jit(*args: Any, **kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        fun = args[0] if args else kwargs.get("fun")
        if fun is None or not callable(fun):  # jax.jit(static_argnums=…), a decorator that is still to be applied

            def decorate(fun: Callable[..., Any]) -> Any:
                return _counted(made(fun), fun)

            return decorate
        return _counted(made, fun)

    jax.jit = jit
    try:
        yield
    finally:
        jax.jit = plain


_COUNTING: Final = Shared[Counting](_replaced_jit)


def counted_jits(counting: Counting) -> AbstractContextManager[None]:
    """Returns a context in which `jax.jit` makes functions that count their calls."""
    return _COUNTING.used_by(counting)
