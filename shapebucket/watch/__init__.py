"""The compile watch: what compiled, why, and what to do about it.

Nothing is loaded before it is used, since `python -m shapebucket.watch` must leave it to the script when to import JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shapebucket.watch.counter import CompileCounter
    from shapebucket.watch.diagnosis import Cause, Diagnosis, FunctionReport
    from shapebucket.watch.forbidding import forbid_compile
    from shapebucket.watch.recording import CompileEvent, CompileWatch, watch_compiles
    from shapebucket.watch.signature import Change, Signature

_MODULES = {
    "counter": ("CompileCounter",),
    "diagnosis": ("Cause", "Diagnosis", "FunctionReport"),
    "forbidding": ("forbid_compile",),
    "recording": ("CompileEvent", "CompileWatch", "watch_compiles"),
    "signature": ("Change", "Signature"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Cause",
    "Change",
    "CompileCounter",
    "CompileEvent",
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
