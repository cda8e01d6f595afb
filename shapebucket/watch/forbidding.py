"""forbid_compile: from here on, nothing compiles."""

from __future__ import annotations

import re
import threading
import warnings
from collections import Counter, deque
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, get_args

from shapebucket.errors import RecompileError, StepError
from shapebucket.watch._jax_private import explained_misses, restore_fast_path
from shapebucket.watch.functions import caller_frame
from shapebucket.watch.recording import CompileEvent, CompileWatch

Action = Literal["error", "warn", "count"]
_KEPT = 64  # explanations of traces that compile nothing, until the next compile
_DIFFERENCE = re.compile(r"\* at (.+), now (.+) and before (.+)")


class CompileGuard:
    """A context in which no compile goes unnoticed; `forbid_compile` makes it.

    Attributes:
        refused: the errors as they were raised, or would have been, without their tracebacks.
    """

    def __init__(self, action: Action, allow: frozenset[str], earlier: CompileWatch | None) -> None:
        """Makes the context; see `forbid_compile`."""
        self.refused: list[RecompileError] = []
        self._action = action
        self._allow = allow
        self._explained = threading.local()
        self._watch = CompileWatch(earlier=earlier, on_compile=self._refuse)
        self._open = ExitStack()
        self._owner = 0
        self._elsewhere: list[RecompileError] = []

    @property
    def count(self) -> int:
        """The compiles so far that were not allowed."""
        return len(self.refused)

    @property
    def by_function(self) -> Counter[str]:
        """Those compiles by the function's name."""
        return Counter(error.function for error in self.refused)

    def __enter__(self) -> CompileGuard:
        with ExitStack() as opening:
            opening.enter_context(explained_misses(self._explain))
            opening.enter_context(self._watch)
            self._open = opening.pop_all()
        self._owner = threading.get_ident()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()
        if self.refused and self._action != "count":  # a warning may be an error too
            restore_fast_path()
        if kind is None and self._elsewhere:
            raise self._elsewhere[0]

    def _explain(self, message: str) -> None:
        self._explained.__dict__.setdefault("messages", deque(maxlen=_KEPT)).append(message)

    def _refuse(self, event: CompileEvent) -> None:
        messages = self._explained.__dict__.pop("messages", ())
        if event.function.name in self._allow:
            return
        error = _error(event, messages)
        self.refused.append(error)
        if self._action == "error":
            raised = RecompileError(
                str(error), error.function, error.differences
            )  # its traceback holds on to all frames
            if threading.get_ident() != self._owner:
                for each in (error, raised):
                    each.add_note(f"shapebucket: in the thread {threading.current_thread().name}")
                self._elsewhere.append(error)
            raise raised
        if self._action == "warn":
            _warn(str(error))


def forbid_compile(
    action: Action = "error", *, allow: Collection[str] = (), earlier: CompileWatch | None = None
) -> CompileGuard:
    """Makes every compile of the process an error, a warning, or counts it, while it is open.

        with watch_compiles() as watch:
            state = step(state, first_batch)
        with forbid_compile(earlier=watch):
            for batch in batches:
                state = step(state, batch)

    The error is raised before XLA runs, in the thread that would compile; the call does nothing then, donated arguments stay
    alive, and the same call compiles as usual afterwards. Calls of what is compiled already are as fast as ever. An error that
    was raised in another thread is raised again at the end, unless another is on its way.

    Args:
        action: what a compile is: `"error"`, `"warn"` (a RuntimeWarning) or `"count"`.
        allow: names of functions that may compile all the same.
        earlier: a watch that saw the compiles before, so that the message can say what changed against them. Without it, or
            for functions that it did not see, JAX's own explanation is used, which knows all of its caches but does not tell of
            shardings, nor in all versions of static values.

    Returns:
        The context, with `count`, `by_function` and `refused`.

    Raises:
        RecompileError: in the context, for a compile.
        StepError: for another action, or an `allow` that is no collection of names.
    """
    if action not in get_args(Action):
        raise StepError(f"action must be one of {get_args(Action)}, but got {action!r}")
    if isinstance(allow, str):
        raise StepError(f"allow takes names of functions, as in [{allow!r}], but got {allow!r}")
    return CompileGuard(action, frozenset(allow), earlier)


def _warn(message: str) -> None:
    """Warns of the user's line, which is many frames of JAX away."""
    frame = caller_frame()
    if frame is None:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return
    known = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, RuntimeWarning, frame.f_code.co_filename, frame.f_lineno, registry=known)


def _error(event: CompileEvent, explained: Iterable[str]) -> RecompileError:
    """Says what would compile, and why: against what the watch knows, or else by JAX's explanation of the trace before it."""
    name = event.function.name
    lines = [str(change) for change in event.changes if change.kind not in ("unknown", "function")]
    if any(change.kind == "function" for change in event.changes):
        lines.insert(0, f"it is {event.changes[0]}: if it is made anew in a loop, jit it once, outside")
    cure = "Pad or cast to what was compiled before, compile" if lines else "Compile"
    lines = lines or _jax_says(name, explained) or [_unexplained(event)]
    listed = "\n".join(f"  {line}" for line in lines)
    return RecompileError(
        f"{name} compiles anew at {event.caller}, where forbid_compile() allows none:\n{listed}\n"
        f"{cure} this before the context, or name the function in allow=[{name!r}].",
        name,
        lines,
    )


def _jax_says(name: str, explained: Iterable[str]) -> list[str]:
    """Returns the differences in JAX's explanation of why it traced a function anew; none if it did not."""
    message = next((each for each in reversed(list(explained)) if f" {name} " in each), "")
    if "never seen function" in message:
        return ["JAX has not seen this function before: if it is made anew in a loop, jit it once, outside"]
    found = [f"{path}: {before} → {now}" for path, now, before in _DIFFERENCE.findall(message)]
    return list(dict.fromkeys(found)) or [" ".join(line.split()) for line in message.splitlines()[2:]]


def _unexplained(event: CompileEvent) -> str:
    """Describes a call of which nothing is known to compare it with."""
    if event.signature is None:
        return "what it is called with cannot be told"
    if event.function.kind == "call" and not event.trace_seconds:  # JAX traces for all but where the arguments lie
        why = "by a call that was refused perhaps, or with arguments that lay elsewhere"
        return f"of types that were traced before, {why}: {event.signature}"
    return f"called with {event.signature}" if event.signature.leaves else "called without arrays"
