"""What Grain asks of its stages by private names: the spec of their elements, and the time they take.

Grain 0.2.18 lets nobody outside offer an element spec to `grain.experimental.get_element_spec`, or appear with figures of
his own in the execution summary and the graph that Grain logs in its debug modes. It reads both from the names
`_element_spec` and `_stats`, so these stand here and nowhere else. Loading does not need them: where they have moved, Grain's
tools know less of our stages, and tests/test_grain_tools.py fails.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import grain

from shapebucket.buckets import BucketPlan

_T = TypeVar("_T")


class _Planned(Protocol):
    @property
    def plan(self) -> BucketPlan: ...


class BatchesOfPlan:
    """Mixin for a stage with a `plan`: offers Grain the spec of its batches. It stands before Grain's class."""

    @property
    def _element_spec(self: _Planned) -> dict[str, Any]:
        return _common([self.plan.batch_spec(bucket) for bucket in self.plan.buckets])


class ElementsOfParent:
    """Mixin for a stage that passes the elements of `_source` on as they are."""

    _source: grain.MapDataset[Any]

    @property
    def _element_spec(self) -> Any:
        return grain.experimental.get_element_spec(self._source)


class OwnTime:
    """Measures the time that a stage itself takes for an element, that of its parents left out.

    It is made before the parents are asked: Grain connects the figures of a pipeline when it is first asked for those of its
    last stage.
    """

    def __init__(self, stage: Any) -> None:
        self._stats = getattr(stage, "_stats", None)
        self._spent = 0
        self._since = time.perf_counter_ns()

    def pause(self) -> None:
        """Stops before a parent is asked."""
        self._spent += time.perf_counter_ns() - self._since

    def resume(self) -> None:
        """Goes on after it has answered."""
        self._since = time.perf_counter_ns()

    def made(self, element: _T) -> _T:
        """Reports an element, and returns it."""
        if self._stats is None:
            return element
        self.pause()
        with self._stats.record_self_time(offset_ns=self._spent):
            return self._stats.record_output_spec(element)


def _common(specs: list[Any]) -> Any:
    """Returns one spec for several of the same structure; a dimension in which they differ is None, Grain's unknown."""
    first = specs[0]
    if isinstance(first, Mapping):
        return {key: _common([each[key] for each in specs]) for key in first}
    shape = tuple(
        sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*[each.shape for each in specs], strict=True)
    )
    return grain.experimental.ShapeDtypeStruct(shape, first.dtype)
