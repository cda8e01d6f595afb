"""Every exception that shapebucket raises on purpose.

Each says the rule, the value received and where, what is allowed, and what to do next. All of them can be pickled, since
worker processes send them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ShapebucketError(Exception):
    """The base of all of them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[ShapebucketError], args: tuple[Any, ...], facts: dict[str, Any]) -> ShapebucketError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(facts)
    if isinstance(error, ImportError):
        error.msg = str(error.args[0])
    return error


class LayoutError(ShapebucketError, ValueError):
    """A sample does not fit the layout, or a layout contradicts itself.

    Attributes:
        path: the leaf's path, such as `"image/pixels"`; empty where no single leaf is at fault.
        sample: the sample's index in its data set, or (shard, index in the shard), where known.
    """

    def __init__(self, problem: str, *, path: str = "", sample: int | tuple[int, int] | None = None) -> None:
        self.problem = problem
        self.path = path
        self.sample = sample
        where = [f"sample {sample}"] if sample is not None else []
        where += [f"feature {path!r}"] if path else []
        super().__init__(f"{', '.join(where)}: {problem}" if where else problem)

    def at(self, sample: int | tuple[int, int] | None) -> LayoutError:
        """Returns the same error with the sample's index in it."""
        return LayoutError(self.problem, path=self.path, sample=sample)


class LengthsError(ShapebucketError, ValueError):
    """Lengths that cannot be: NaN, negative, fractional, or of another layout."""


class RecordError(ShapebucketError, ValueError):
    """A record of a data set cannot be read.

    Attributes:
        sample: its index in the data set.
        reason: what the reader said.
        file: the file it is in, where known.
        record: its number in the file, from 0, where known.
        where: sample, file and record in words.
    """

    def __init__(self, sample: int, reason: str, place: tuple[str, int] | None = None) -> None:
        self.sample = sample
        self.reason = reason
        self.file, self.record = place or (None, None)
        self.where = f"sample {sample}" if place is None else f"record {self.record} of {self.file} (sample {sample})"
        super().__init__(
            f"{self.where} cannot be read: {reason}. Make the file anew, or leave such records out with "
            "RecordSource(source, on_error='skip') or TfdsSource(…, on_error='skip'), which count them"
        )


class PlanError(ShapebucketError, ValueError):
    """A plan that cannot be made, or a plan file that cannot be read."""


class OverlongError(ShapebucketError, ValueError):
    """A sample fits no bucket and the policy is `overlong="error"`.

    Attributes:
        lengths: the sample's length on each axis, in elements.
        sample: the sample's index in its data set, where known.
        count: how many samples fit no bucket, where known.
    """

    def __init__(
        self,
        lengths: Mapping[str, int],
        largest: str = "",
        *,
        sample: int | None = None,
        count: int | None = None,
        bucket: str | None = None,
    ) -> None:
        self.lengths = dict(lengths)
        self.sample = sample
        self.count = count
        which = "a sample" if sample is None else f"sample {sample}"
        others = f" ({count:,} samples fit no bucket; this is the first)" if count else ""
        if bucket is not None:
            super().__init__(
                f"{which} with lengths {self.lengths} does not fit the bucket {bucket}; truncate=True cuts it"
            )
            return
        super().__init__(
            f"{which} with lengths {self.lengths} fits no bucket of the plan (the largest: {largest}){others}. "
            'Plan with the longest sample in view, or say overlong="truncate" to cut such samples or '
            'overlong="drop" to leave them out; both are counted in the report.'
        )


class ScheduleError(ShapebucketError, ValueError):
    """A schedule that cannot be made, or a data set that does not match the lengths it was planned from."""


class ProcessError(ShapebucketError, ValueError):
    """Processes that would not be in step: a part of a batch that cannot be, or loaders that do not know of each other."""


class StateError(ShapebucketError, ValueError):
    """An iterator state that belongs to another plan, configuration or data set."""


class StepError(ShapebucketError, RuntimeError):
    """A compiled step used out of order: called before `compile`, or compiled without a batch."""


class SignatureError(ShapebucketError, TypeError):
    """A compiled step was called with something it was not compiled for. It did not run, and donated nothing.

    Attributes:
        differences: a line for each leaf that differs.
    """

    def __init__(self, message: str, differences: list[str] | None = None) -> None:
        self.differences = differences or []
        super().__init__(message)


class DriftError(StepError):
    """A step returns another state than it takes, so that its second call would compile again.

    Attributes:
        differences: a line for each leaf that differs.
    """

    def __init__(self, message: str, differences: list[str] | None = None) -> None:
        self.differences = differences or []
        super().__init__(message)


class BudgetError(StepError):
    """A bucket's step needs more memory than a device may hold."""


class RecompileError(ShapebucketError, RuntimeError):
    """Something would compile where `forbid_compile` allows none. It did not run, and donated nothing.

    Attributes:
        function: the name of the function.
        differences: a line for each thing that is new about the call.
    """

    def __init__(self, message: str, function: str, differences: list[str]) -> None:
        self.function = function
        self.differences = differences
        super().__init__(message)


class MissingExtraError(ShapebucketError, ImportError):
    """A part of shapebucket needs a package that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(
            f"{package} is not installed; get it with: pip install 'shapebucket[{extra}]' (in a clone: '.[{extra}]')"
        )
