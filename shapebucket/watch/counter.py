"""Counting compiles by JAX's own monitoring events."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the programs that XLA compiles while it is open, in every thread, eager operations included.

        with CompileCounter() as compiles:
            train()
        print(compiles.count, compiles.seconds)

    It listens to JAX's event `/jax/core/compile/backend_compile_duration`, which also fires where the persistent
    compilation cache has the program.

    Attributes:
        count: programs compiled so far.
        seconds: spent on them by XLA.
        by_function: programs by the name of the function, where JAX tells it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.by_function: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> CompileCounter:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end_listening(jax.monitoring.unregister_event_duration_listener, self._on_event)

    def __repr__(self) -> str:
        return f"CompileCounter(count={self.count}, seconds={self.seconds:.2f}, by_function={dict(self.by_function)})"

    def _on_event(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == COMPILE_EVENT:
            with self._lock:
                self.count += 1
                self.seconds += duration_secs
                self.by_function[str(kwargs.get("fun_name", "unknown"))] += 1


def end_listening(unregister: Callable[[Any], None], listener: Any) -> None:
    """Takes a listener of JAX's events away, if it is still there."""
    with suppress(
        AssertionError, ValueError
    ):  # the latter under python -O; somebody has called jax.monitoring.clear_event_listeners()
        unregister(listener)
