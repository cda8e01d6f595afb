"""LoaderReport: what became of every sample that a loader was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from shapebucket.buckets import BucketPlan, padding_fraction
from shapebucket.errors import ScheduleError
from shapebucket.tables import render

Remainder = Literal["pad", "drop"]
Overlong = Literal["error", "truncate", "drop"]


def check_plan(plan: object) -> None:
    """Raises ScheduleError for what is no plan."""
    if not isinstance(plan, BucketPlan):
        raise ScheduleError(
            f"a loader takes the BucketPlan before the lengths, but got {type(plan).__name__} in its place"
        )


def check_policies(remainder: str, overlong: str) -> None:
    """Raises ScheduleError for a policy that does not exist, listing those that do."""
    for name, value, allowed in (
        ("remainder", remainder, get_args(Remainder)),
        ("overlong", overlong, get_args(Overlong)),
    ):
        if value not in allowed:
            raise ScheduleError(f"{name} must be one of {allowed}, but got {value!r}")


def is_whole(value: object, least: int) -> bool:
    """Returns whether a value is a whole number of at least so many; True is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


@dataclass(frozen=True)
class LoaderReport:
    """Counts, in samples, batches and elements (those of `Layout.elements`). Every sample is in exactly one of them.

        seen  =  sum(samples) + overlong_dropped + remainder_dropped + waiting

    Attributes:
        plan: the plan of the loader.
        batches: batches of each bucket.
        samples: samples emitted in each bucket.
        real_elements: real elements emitted in each bucket.
        truncated: samples cut to fit; they are among `samples`.
        overlong_dropped: samples left out since they fit no bucket.
        remainder_dropped: samples left out since they filled no batch.
        waiting: samples taken from the source that no batch holds yet; 0 for a schedule.
        early: batches that a stream emitted before they were full, since a sample had waited for `max_wait`.
        absent: elements that the data set does not have (filtered out before the loader); they are no samples.
        masked: rows of `samples` that became padding since their element was None when it was read (`absent="mask"`), in all
            epochs that this process itself has read; those of Grain's worker processes are not known here.
    """

    plan: BucketPlan
    batches: Sequence[int]
    samples: Sequence[int]
    real_elements: Sequence[int]
    truncated: int
    overlong_dropped: int
    remainder_dropped: int
    waiting: int
    early: int
    absent: int
    masked: int = 0

    def __post_init__(self) -> None:
        for name in ("batches", "samples", "real_elements"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # it is of one moment, whoever counts on

    @property
    def seen(self) -> int:
        """Samples taken from the source."""
        return sum(self.samples) + self.overlong_dropped + self.remainder_dropped + self.waiting

    @property
    def padded_elements(self) -> tuple[int, ...]:
        """Elements computed on in each bucket, padding and padding rows included."""
        return tuple((np.array(self.batches, np.int64) * self.plan.batch_sizes * self.plan.row_elements).tolist())

    @property
    def padding_fraction(self) -> float:
        """1 − real / padded over all batches, padding rows included."""
        return padding_fraction(sum(self.real_elements), sum(self.padded_elements))

    @property
    def summary(self) -> str:
        """One line, for a log or a progress bar."""
        dropped = self.overlong_dropped + self.remainder_dropped
        early = f", {self.early:,} batches early" if self.early else ""
        return f"{self._emitted}, {self.waiting:,} waiting, {dropped:,} dropped, {self.truncated:,} truncated{early}"

    @property
    def _emitted(self) -> str:
        emitted = f"{sum(self.samples):,} of {self.seen:,} samples in {sum(self.batches):,} batches"
        return f"{emitted}, padding {self.padding_fraction:.1%}"

    def to_json(self) -> dict[str, Any]:
        """Returns the counts as JSON values, without the plan."""
        counts = {name: value for name, value in asdict(self).items() if name != "plan"}
        return {**counts, "padding_fraction": self.padding_fraction}

    def __str__(self) -> str:
        rows = [
            [
                *map(str, bucket.sizes.values()),
                str(bucket.batch_size),
                f"{batches:,}",
                f"{samples:,}",
                f"{samples / (batches * bucket.batch_size):.1%}" if batches else "–",
                f"{padding_fraction(real, padded):.1%}",
            ]
            for bucket, batches, samples, real, padded in zip(
                self.plan.buckets, self.batches, self.samples, self.real_elements, self.padded_elements, strict=True
            )
        ]
        lost = {
            "truncated": self.truncated,
            "dropped as overlong": self.overlong_dropped,
            "dropped with the remainder": self.remainder_dropped,
            "waiting": self.waiting,
            "batches emitted early": self.early,
            "absent": self.absent,
        }
        if self.masked:
            lost["rows masked when they were read"] = self.masked
        return render(
            self._emitted,
            [*self.plan.layout.axes, "batch", "batches", "samples", "rows used", "padding"],
            rows,
            caption=", ".join(f"{count:,} {name}" for name, count in lost.items()),
        )
