"""Small fixed sets of bucket shapes for variable-length data in JAX.

Importing this package, and planning, load neither JAX nor Grain: each name loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shapebucket.arrays import as_arrays
    from shapebucket.buckets import ArraySpec, Bucket, BucketPlan, PlanReport
    from shapebucket.errors import (
        BudgetError,
        DriftError,
        LayoutError,
        LengthsError,
        MissingExtraError,
        OverlongError,
        PlanError,
        ProcessError,
        RecompileError,
        RecordError,
        ScheduleError,
        ShapebucketError,
        SignatureError,
        StateError,
        StepError,
    )
    from shapebucket.global_batch import make_global
    from shapebucket.histogram import LengthHistogram
    from shapebucket.layout import Feature, Layout
    from shapebucket.lengths import LengthTable, load_lengths
    from shapebucket.loader_report import LoaderReport
    from shapebucket.loading import BucketedIterDataset, BucketedMapDataset, ElasticIterDataset
    from shapebucket.loading.lockstep import LockstepIterDataset, LockstepReport
    from shapebucket.measuring import measure
    from shapebucket.padding import length_mask, pad, unpad
    from shapebucket.planner import (
        MeasuredCost,
        PolynomialCost,
        TableCost,
        count_steps,
        from_tf_boundaries,
        plan_buckets,
        plan_by_rule,
        plan_from_tf_boundaries,
        to_tf_boundaries,
    )
    from shapebucket.records import RecordSource
    from shapebucket.schedule import Schedule, ScheduledBatch
    from shapebucket.sources import TfdsSource
    from shapebucket.step import (
        BATCH,
        BatchSizeFit,
        CompiledStep,
        CompileReport,
        Cost,
        Executable,
        FittedBucket,
        OneOf,
        fit_batch_sizes,
        measure_costs,
    )
    from shapebucket.tf_data import TfDataIterDataset, from_tf_data
    from shapebucket.watch import CompileCounter, forbid_compile, watch_compiles

_MODULES = {
    "arrays": ("as_arrays",),
    "buckets": ("ArraySpec", "Bucket", "BucketPlan", "PlanReport"),
    "errors": (
        "BudgetError",
        "DriftError",
        "LayoutError",
        "LengthsError",
        "MissingExtraError",
        "OverlongError",
        "PlanError",
        "ProcessError",
        "RecompileError",
        "RecordError",
        "RecordSource",
        "RecordError",
        "ScheduleError",
        "ShapebucketError",
        "SignatureError",
        "StateError",
        "StepError",
    ),
    "global_batch": ("make_global",),
    "layout": ("Feature", "Layout"),
    "histogram": ("LengthHistogram",),
    "lengths": ("LengthTable", "load_lengths"),
    "loader_report": ("LoaderReport",),
    "loading": ("BucketedIterDataset", "BucketedMapDataset", "ElasticIterDataset"),
    "loading.lockstep": ("LockstepIterDataset", "LockstepReport"),
    "measuring": ("measure",),
    "padding": ("length_mask", "pad", "unpad"),
    "planner": (
        "MeasuredCost",
        "PolynomialCost",
        "TableCost",
        "count_steps",
        "from_tf_boundaries",
        "plan_buckets",
        "plan_by_rule",
        "plan_from_tf_boundaries",
        "to_tf_boundaries",
    ),
    "records": ("RecordSource",),
    "schedule": ("Schedule", "ScheduledBatch"),
    "sources": ("TfdsSource",),
    "step": (
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
    ),
    "tf_data": ("TfDataIterDataset", "from_tf_data"),
    "watch": ("CompileCounter", "forbid_compile", "watch_compiles"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "BATCH",
    "ArraySpec",
    "BatchSizeFit",
    "Bucket",
    "BucketPlan",
    "BucketedIterDataset",
    "BucketedMapDataset",
    "BudgetError",
    "CompileCounter",
    "CompileReport",
    "CompiledStep",
    "Cost",
    "DriftError",
    "ElasticIterDataset",
    "Executable",
    "Feature",
    "FittedBucket",
    "Layout",
    "LayoutError",
    "LengthHistogram",
    "LengthTable",
    "LengthsError",
    "LoaderReport",
    "LockstepIterDataset",
    "LockstepReport",
    "MeasuredCost",
    "MissingExtraError",
    "OneOf",
    "OverlongError",
    "PlanError",
    "PlanReport",
    "PolynomialCost",
    "ProcessError",
    "RecompileError",
    "RecordError",
    "RecordSource",
    "Schedule",
    "ScheduleError",
    "ScheduledBatch",
    "ShapebucketError",
    "SignatureError",
    "StateError",
    "StepError",
    "TableCost",
    "TfDataIterDataset",
    "TfdsSource",
    "as_arrays",
    "count_steps",
    "fit_batch_sizes",
    "forbid_compile",
    "from_tf_boundaries",
    "from_tf_data",
    "length_mask",
    "load_lengths",
    "make_global",
    "measure",
    "measure_costs",
    "pad",
    "plan_buckets",
    "plan_by_rule",
    "plan_from_tf_boundaries",
    "to_tf_boundaries",
    "unpad",
    "watch_compiles",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # found without this function the next time
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
