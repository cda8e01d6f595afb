"""The compile watch: what compiled, why, and what to do about it."""

from shapebucket.watch.counter import CompileCounter
from shapebucket.watch.diagnosis import Cause, Diagnosis, FunctionReport
from shapebucket.watch.forbidding import forbid_compile
from shapebucket.watch.recording import CompileEvent, CompileWatch, watch_compiles
from shapebucket.watch.signature import Change, Signature

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
