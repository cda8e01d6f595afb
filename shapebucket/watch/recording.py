"""watch_compiles: every compile of the process as an event, with its cause."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax.monitoring

from shapebucket.errors import StepError
from shapebucket.watch._jax_private import Call, call_in_progress
from shapebucket.watch.calls import CallCounts, Counting, counted_jits
from shapebucket.watch.counter import COMPILE_EVENT, end_listening
from shapebucket.watch.functions import Function, Making, Makings, caller_line, function_of, working_directory
from shapebucket.watch.signature import Change, Signature, changes, distance, signature_of

if TYPE_CHECKING:
    from shapebucket.watch.diagnosis import Diagnosis

_LOGGER = logging.getLogger(__name__)
_TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"
_LOWER_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"
_COMPARED = 256  # the latest compiles of a function; each takes time, for each leaf
_TRANSFORMED = re.compile(r"^(?:jit|pjit)\((.*)\)$")


@dataclass(frozen=True)
class CompileEvent:
    """One program that was compiled.

    Attributes:
        function: whose.
        caller: the user's line that needed it: "train.py:31 in main".
        signature: of the call; None where it cannot be told.
        making: which of the function's objects it was, where known: a lambda in a loop is another one each time.
        changes: what differs from the nearest of the function's last 256 calls that compiled; empty for its first.
        first: whether it is the function's first.
        trace_seconds: spent in Python, on tracing, in the thread that compiled.
        lower_seconds: spent on lowering, likewise.
        compile_seconds: spent by XLA, or on fetching from the persistent cache.
        cached: whether the persistent compilation cache had it.
        memory: by how much resident memory grew meanwhile, in bytes; None where the system does not tell.
    """

    function: Function
    caller: str
    signature: Signature | None
    making: Making | None
    changes: tuple[Change, ...]
    first: bool
    trace_seconds: float = 0.0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    cached: bool = False
    memory: int | None = None

    @property
    def seconds(self) -> float:
        """Tracing, lowering and XLA together."""
        return self.trace_seconds + self.lower_seconds + self.compile_seconds

    def __str__(self) -> str:
        why = "first" if self.first else "; ".join(map(str, self.changes))
        found = ", from the persistent cache" if self.cached else ""
        return f"{self.function.name} compiled at {self.caller} in {self.seconds:.2f} s{found}: {why}"

    def to_json(self) -> dict[str, Any]:
        """Returns the event as JSON values."""
        return {
            "function": self.function.name,
            "where": self.function.where,
            "kind": self.function.kind,
            "caller": self.caller,
            "first": self.first,
            "changes": [change._asdict() for change in self.changes],
            "signature": None if self.signature is None else self.signature.to_json(),
            "trace_seconds": self.trace_seconds,
            "lower_seconds": self.lower_seconds,
            "compile_seconds": self.compile_seconds,
            "cached": self.cached,
            "memory": self.memory,
        }


@dataclass
class _Thread(threading.local):
    """What a thread is at: how deep in traces, seconds of tracing and lowering by name, and a compile that is not finished."""

    depth: int = 0
    memory: int | None = None
    open: CompileEvent | None = None
    cached: bool = False
    spent: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def tracing(self) -> bool:
        """Whether it is within a trace."""
        return self.depth > 0


class CompileWatch:
    """Records what compiles while it is open, in every thread; `watch_compiles` makes it.

    A warm call costs nothing, since JAX tells only of compiles. Every compile is kept as an event, of some kilobytes. Of the
    arguments it keeps no arrays, but types, shardings and structures, with what custom nodes have in these.
    """

    def __init__(
        self,
        *,
        count_calls: bool = False,
        earlier: CompileWatch | None = None,
        on_compile: Callable[[CompileEvent], None] | None = None,
    ) -> None:
        """Makes a watch that is not open yet.

        Args:
            count_calls: see `watch_compiles`.
            earlier: a watch whose events to compare with.
            on_compile: is told of each compile before it begins; what it raises is raised to whoever called.
        """
        self._on_compile = on_compile
        self._lock = threading.Lock()
        self._thread = _Thread()
        self._events: list[CompileEvent] = []
        self._known: dict[Any, list[CompileEvent]] = {}
        self._shared: dict[Any, Any] = {}
        self._counts: dict[Any, CallCounts] | None = {} if count_calls else None
        self._open, self._opened = ExitStack(), False
        self._here = working_directory()
        self._makings = Makings() if earlier is None else earlier._makings
        for event in () if earlier is None else earlier.events:
            self._known.setdefault(event.function.key, []).append(event)

    def __enter__(self) -> CompileWatch:
        """Begins to listen.

        Raises:
            StepError: if it was opened before.
        """
        with self._lock:
            if self._opened:
                raise StepError(
                    "a watch was opened that is open or was before; it is opened once: "
                    "call watch_compiles() or forbid_compile() for another"
                )
            self._opened = True
        self._here = working_directory()
        with ExitStack() as opening:
            monitoring = jax.monitoring
            monitoring.register_scalar_listener(self._on_start)
            opening.callback(end_listening, monitoring.unregister_scalar_listener, self._on_start)
            monitoring.register_event_duration_secs_listener(self._on_end)
            opening.callback(end_listening, monitoring.unregister_event_duration_listener, self._on_end)
            monitoring.register_event_listener(self._on_event)
            opening.callback(end_listening, monitoring.unregister_event_listener, self._on_event)
            if self._counts is not None:
                opening.enter_context(counted_jits(Counting(self._counts, self._thread)))
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()
        for counts in self.calls.values():
            counts.closed = True

    @property
    def events(self) -> tuple[CompileEvent, ...]:
        """The compiles so far, in the order in which they ended."""
        with self._lock:
            return tuple(self._events)

    @property
    def count(self) -> int:
        """Programs compiled so far, those included that the persistent cache had."""
        return len(self.events)

    @property
    def seconds(self) -> float:
        """Spent on them by tracing, lowering and XLA."""
        return sum(event.seconds for event in self.events)

    @property
    def by_function(self) -> Counter[str]:
        """Programs by the function's name."""
        return Counter(event.function.name for event in self.events)

    @property
    def calls(self) -> Mapping[Any, CallCounts]:
        """The calls counted, by the key of the function; empty without `count_calls`."""
        return dict(self._counts or {})

    def diagnose(self) -> Diagnosis:
        """Says which functions compiled how often, why, and what to do."""
        from shapebucket.watch.diagnosis import Diagnosis

        return Diagnosis.of(self.events, self.calls)

    def _on_start(self, event: str, value: float, **kwargs: Any) -> None:  # noqa: ARG002
        """JAX begins to trace, lower or compile, in this thread."""
        here = self._thread
        if event == _TRACE_EVENT:
            if not here.depth:
                here.memory = resident_bytes()
            here.depth += 1
        elif event == COMPILE_EVENT:
            here.open, here.cached = None, False  # that of a compile that was refused never ended
            if here.memory is None:
                here.memory = resident_bytes()
            name = _plain(str(kwargs.get("fun_name", "unknown")))
            trace, lower = here.spent.pop(name, (0.0, 0.0))
            here.open = replace(self._describe(name), trace_seconds=trace, lower_seconds=lower)
            if self._on_compile is not None:
                self._on_compile(here.open)

    def _on_end(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        """JAX has traced, lowered or compiled."""
        here = self._thread
        if event == _TRACE_EVENT and here.depth:
            here.depth -= 1
        if event in (_TRACE_EVENT, _LOWER_EVENT) and not here.depth:
            name = _plain(str(kwargs.get("fun_name", "unknown")))
            traced = here.spent.get(name, (0.0, 0.0))[0]  # a trace begins anew: of one before it, nothing was compiled
            here.spent[name] = (duration_secs, 0.0) if event == _TRACE_EVENT else (traced, duration_secs)
        elif event == COMPILE_EVENT and here.open is not None:
            begun, here.open = here.open, None
            now, before, here.memory = resident_bytes(), here.memory, None
            with self._lock:
                done = replace(
                    begun,
                    compile_seconds=duration_secs,
                    cached=here.cached,
                    memory=None if now is None or before is None else now - before,
                )
                self._events.append(done)
                self._known.setdefault(done.function.key, []).append(done)
                if self._counts is not None and (counts := self._counts.get(done.function.key)) is not None:
                    counts.compiled(done.signature, done.changes)

    def _on_event(self, event: str, **_: Any) -> None:
        if event == _CACHE_HIT_EVENT:
            self._thread.cached = True

    def _describe(self, name: str) -> CompileEvent:
        """Returns what is known of the compile that begins in this thread."""
        try:
            return self._described(name)
        except Exception:  # JAX's own frames and somebody else's classes are asked: the run that is watched must go on
            _LOGGER.warning("shapebucket: cannot tell why %s compiles, nor its arguments", name, exc_info=True)
        function = Function(name, "", "call", ("named", name))
        changes = _why(self._earlier(function), None, None)
        return CompileEvent(function, "", None, None, changes, not changes)

    def _described(self, name: str) -> CompileEvent:
        call, caller = call_in_progress(), caller_line(self._here)
        fun = call.fun if isinstance(call, Call) else None
        function = function_of(fun, name, caller, isinstance(call, jax.stages.Lowered), self._here)
        making = self._makings.of(fun, function.key) if fun is not None and function.kind == "call" else None
        signature = None if call is None else signature_of(call, self._share)
        earlier = self._earlier(function)
        return CompileEvent(function, caller, signature, making, _why(earlier, signature, making), not earlier)

    def _earlier(self, function: Function) -> Sequence[CompileEvent]:
        with self._lock:
            return list(self._known.get(function.key, ()))

    def _share(self, value: Any) -> Any:
        return self._shared.setdefault(value, value)


def watch_compiles(*, count_calls: bool = False) -> CompileWatch:
    """Records every compile of the process while it is open: what, why, how long, and how much memory it took.

        with watch_compiles() as watch:
            train()
        print(watch.diagnose())

    Functions may have been jitted before; compiles of then are not known, so the first that is seen has nothing to be
    compared with. Eager operations and compiles in other threads are recorded too.

    Args:
        count_calls: whether to count the calls of functions that are jitted while it is open, by the sizes that vary, so that
            a plan weighs shapes by their calls. `jax.jit` is replaced meanwhile by one that returns counting functions; a call
            of theirs takes a few microseconds more.

    Returns:
        The watch, to be opened with `with`.
    """
    return CompileWatch(count_calls=count_calls)


def resident_bytes() -> int | None:
    """Returns the resident memory of the process, where the system tells."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _plain(name: str) -> str:
    """Returns the name of a function without JAX's "jit(…)" around it."""
    found = _TRANSFORMED.match(name)
    return found[1] if found else name


def _why(earlier: Sequence[CompileEvent], signature: Signature | None, making: Making | None) -> tuple[Change, ...]:
    """Returns what is new about a call against the nearest of the latest earlier ones."""
    if not earlier:
        return ()
    last = earlier[-1]
    same_object = [
        event for event in earlier if making is None or event.making is None or event.making.number == making.number
    ]
    if not same_object and making is not None:
        return _new_object(last, making)
    comparable = [event for event in reversed(same_object[-_COMPARED:]) if event.signature is not None]
    if signature is None or not comparable:
        return (Change("unknown", "", None, "", ""),)
    nearest = min(comparable, key=lambda event: distance(event.signature, signature))  # pyright: ignore[reportArgumentType]
    assert nearest.signature is not None
    return tuple(changes(nearest.signature, signature)) or (Change("unknown", "", None, "", ""),)


def _new_object(last: CompileEvent, making: Making) -> tuple[Change, ...]:
    """Returns that a function is a new object, and what it holds that the last one did not."""
    held = dict(last.making.held) if last.making is not None else {}
    closures = [
        Change("closure", name, None, held[name], text) for name, text in making.held if held.get(name, text) != text
    ]
    return (Change("function", "", None, "", making.how), *closures)
