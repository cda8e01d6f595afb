"""Giving memory back to the operating system."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable
from typing import Any

import jax


def release() -> None:
    """Collects what is no longer referenced, and lets the C library return free pages where it is glibc."""
    gc.collect()
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], Any] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def device_bytes() -> int | None:
    """Returns how many bytes the default device may use, or None where it does not tell, as a CPU doesn't."""
    device = jax.config.jax_default_device or jax.local_devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (AttributeError, RuntimeError, NotImplementedError):  # not every backend has the call
        return None
