"""The compiled step: one executable a bucket."""

from shapebucket.step.arguments import BATCH, OneOf
from shapebucket.step.compiled import CompiledStep
from shapebucket.step.costing import measure_costs
from shapebucket.step.report import CompileReport, Cost, Executable
from shapebucket.step.sizing import BatchSizeFit, FittedBucket, fit_batch_sizes

__all__ = [
    "BATCH",
    "BatchSizeFit",
    "CompileReport",
    "CompiledStep",
    "Cost",
    "Executable",
    "FittedBucket",
    "OneOf",
    "fit_batch_sizes",
    "measure_costs",
]
