"""The compiled step: one executable a bucket."""

from shapebucket.step.arguments import BATCH, OneOf
from shapebucket.step.compiled import CompiledStep
from shapebucket.step.report import CompileReport, Cost, Executable

__all__ = ["BATCH", "CompileReport", "CompiledStep", "Cost", "Executable", "OneOf"]
