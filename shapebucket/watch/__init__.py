"""The compile watch: what compiled, why, and what to do about it.

Nothing is loaded before it is used, since `python -m shapebucket.watch` must leave it to the script when to import JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shapebucket.watch.causes import Cause
    from shapebucket.watch.counter import CompileCounter
    from shapebucket.watch.diagnosis import Diagnosis, FunctionReport
    from shapebucket.watch.forbidding import CompileGuard, forbid_compile
    from shapebucket.watch.recording import CompileEvent, CompileWatch, watch_compiles
    from shapebucket.watch.signature import Change, Signature

_MODULES = {
    "causes": ("Cause",),
    "counter": ("CompileCounter",),
    "diagnosis": ("Diagnosis", "FunctionReport"),
    "forbidding": ("CompileGuard", "forbid_compile"),
    "recording": ("CompileEvent", "CompileWatch", "watch_compiles"),
    "signature": ("Change", "Signature"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Cause",
    "Change",
    "CompileCounter",
    "CompileEvent",
    "CompileGuard",
    "CompileWatch",
    "Diagnosis",
    "FunctionReport",
    "Signature",
    "forbid_compile",
    "watch_compiles",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
