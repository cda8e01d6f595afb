"""The compiled step: one executable a bucket."""

from shapebucket.step.compiled import BATCH, CompiledStep, CompileReport

__all__ = ["BATCH", "CompileReport", "CompiledStep"]
