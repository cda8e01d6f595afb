"""The private things of JAX that the watch touches: two stack frames, two loggers, and the caches of the fast path.

JAX's public events say which function compiles, and when, in the thread that compiles; they do not say for which arguments.
These stand in the frame of `cache_miss` of `jax._src.pjit`, a few frames up, with the function and what is static of it. It is
read only while something compiles, so a warm call costs nothing, and a function may have been jitted long before.
`jax_explain_cache_misses` is public; the loggers that it writes to are not. JAX's fast path never takes a
call again that raised while it was new to it, whatever raised; so what `forbid_compile` refused would stay ten times slower to
call for good. Where JAX has moved these things, events lose their signatures, refusals their reasons, and that speed, nothing
else; tests/test_watch.py fails then.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import jax

from shapebucket.watch.sharing import Shared

_EXPLAINING = ("jax._src.pjit", "jax._src.interpreters.partial_eval")  # up to JAX 0.8, and from then on


@dataclass(frozen=True)
class Call:
    """A call that made JAX compile.

    Attributes:
        fun: the function that was jitted; None where JAX runs a part of one on its own, as in the gradient of one.
        args: the positional arguments, static ones included.
        kwargs: the keyword arguments, likewise.
        static_argnums: which of `args` are static.
        static_argnames: which of `kwargs` are.
    """

    fun: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()


def call_in_progress() -> Call | jax.stages.Lowered | None:
    """Returns what compiles in this thread right now: a call, or a lowered function ahead of time; None if unknown."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if found := _read(frame):
            return found
        frame = frame.f_back
    return None


def _read(frame: FrameType) -> Call | jax.stages.Lowered | None:
    name, module = frame.f_code.co_name, frame.f_globals.get("__name__")
    if module == "jax._src.stages" and name == "compile":
        lowered = frame.f_locals.get("self")
        return lowered if isinstance(lowered, jax.stages.Lowered) else None
    if module != "jax._src.pjit" or name not in ("cache_miss", "call_impl_cache_miss"):
        return None
    found = frame.f_locals
    if name == "call_impl_cache_miss":
        return _enclosing(frame) or Call(None, tuple(found.get("args", ())), {})
    info = found.get("jit_info")
    return Call(
        found.get("fun"),
        tuple(found.get("args", ())),
        dict(found.get("kwargs", {})),
        tuple(getattr(info, "static_argnums", None) or ()),
        tuple(getattr(info, "static_argnames", None) or ()),
    )


def _enclosing(frame: FrameType) -> Call | None:
    """Returns the call of the jitted function that JAX evaluates under a transformation, such as a gradient, if it is near."""
    seen: FrameType | None = frame.f_back
    while seen is not None and str(seen.f_globals.get("__name__")).startswith("jax."):
        if seen.f_code.co_name == "cache_miss":
            found = _read(seen)
            return found if isinstance(found, Call) else None
        seen = seen.f_back
    return None


def restore_fast_path() -> None:
    """Has JAX's fast path learn anew which calls it can take: at each function's next call, from the caches behind it."""
    private = sys.modules.get("jax._src.pjit")
    for name in ("_cpp_pjit_cache_fun_only", "_cpp_pjit_cache_explicit_attributes"):
        cache = getattr(private, name, None)
        if cache is not None and hasattr(cache, "clear"):
            cache.clear()


def _globally(name: str) -> bool | None:
    """Reads a setting in a new thread, since in this one a context may have set it otherwise; None if there is none."""
    found: list[bool | None] = []
    reader = threading.Thread(target=lambda: found.append(getattr(jax.config, name, None)))
    reader.start()
    reader.join()
    return found[0]


@contextmanager
def _explaining() -> Generator[None]:
    """Has JAX explain each trace of a user's function to all who want to know, and to its log if that was asked for."""
    asked = _globally("jax_explain_cache_misses")
    if asked is None:  # this JAX has no explanations
        yield
        return
    heard = asked or jax.config.jax_explain_cache_misses  # pyright: ignore[reportAttributeAccessIssue]

    def listen(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if not message.startswith("TRACING CACHE MISS"):
            return True
        for explain in _EXPLANATIONS.users:
            explain(message)
        return heard

    loggers = [logging.getLogger(name) for name in _EXPLAINING]
    for logger in loggers:
        logger.addFilter(listen)
    jax.config.update("jax_explain_cache_misses", True)
    try:
        yield
    finally:
        jax.config.update("jax_explain_cache_misses", asked)
        for logger in loggers:
            logger.removeFilter(listen)


_EXPLANATIONS: Final = Shared[Callable[[str], None]](_explaining)


def explained_misses(explain: Callable[[str], None]) -> AbstractContextManager[None]:
    """Returns a context in which JAX explains each trace of a user's function, in the thread that traces."""
    return _EXPLANATIONS.used_by(explain)
