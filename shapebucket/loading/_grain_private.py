"""The private things of Grain that the loaders touch: `_stats`, where stages record what they do, and `_element_spec`.

Grain (0.2.18) has no public way for a stage of somebody else's to record, or to offer the spec that the public
`grain.experimental.get_element_spec` asks for. Without `_stats`, a stage is missing from the execution summary and from the
graph, and its parent takes itself for the pipeline's output, for which Grain records a histogram entry an element: 1.4 µs of
5.3 µs a sample. Where Grain no longer has them, batches are made all the same, and tests/test_grain_tools.py fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import grain

from shapebucket.buckets import BucketPlan

T = TypeVar("T")


def recorded(stage: Any, make: Callable[[], T]) -> T:
    """Makes an element, and records its time and shapes for a dataset or an iterator, as Grain's own stages do."""
    stats: Any = getattr(stage, "_stats", None)
    if not (hasattr(stats, "record_self_time") and hasattr(stats, "record_output_spec")):
        return make()
    with stats.record_self_time():
        return stats.record_output_spec(make())


def connect(stage: Any) -> None:
    """Connects the figures of a stage with those of its parents; once these have made something, they would start anew."""
    getattr(stage, "_stats", None)


class _Emitting(Protocol):
    @property
    def emitted(self) -> BucketPlan: ...


class BatchesOfPlan:
    """Mixin for a stage that emits the batches of a plan, `emitted`, before Grain's class: offers their spec."""

    @property
    def _element_spec(self: _Emitting) -> dict[str, Any]:
        return _common([self.emitted.batch_spec(bucket) for bucket in self.emitted.buckets])


class ElementsOfParent:
    """Mixin for a stage that passes the elements of `_source` on as they are, before Grain's class: offers their spec."""

    _source: grain.MapDataset[Any]

    @property
    def _element_spec(self) -> Any:
        return grain.experimental.get_element_spec(self._source)


def _common(specs: list[Any]) -> Any:
    """Returns one spec for several of the same structure; a dimension in which they differ is None, Grain's unknown."""
    first = specs[0]
    if isinstance(first, Mapping):
        return {key: _common([each[key] for each in specs]) for key in first}
    sizes = zip(*[each.shape for each in specs], strict=True)
    shape = tuple(each[0] if len(set(each)) == 1 else None for each in sizes)
    return grain.experimental.ShapeDtypeStruct(shape, first.dtype)
