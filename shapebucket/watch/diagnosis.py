"""The diagnosis: which functions compiled how often, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shapebucket.buckets import BucketPlan
from shapebucket.errors import LengthsError, ShapebucketError
from shapebucket.histogram import LengthHistogram
from shapebucket.planner import plan_buckets
from shapebucket.tables import render
from shapebucket.watch.calls import CallCounts
from shapebucket.watch.causes import Cause, causes_of
from shapebucket.watch.recording import CompileEvent
from shapebucket.watch.seen import SeenShapes

_FEWEST = 4  # shapes, from which on buckets are worth a word
_REPEATED = 3  # compiles for one reason, from which on eager operations are worth a line


@dataclass(frozen=True)
class FunctionReport:
    """The compiles of one function, or of the eager operations of one line.

    Attributes:
        name: the function's, or the operations'.
        where: file and line of its definition, or of the operations.
        kind: `"call"`, `"ahead"` (compiled ahead of time) or `"eager"`.
        compiles: programs compiled; so many entries the caches hold, unless they were cleared.
        cached: those of them that the persistent compilation cache had.
        seconds: of tracing, lowering and XLA together.
        memory: by how much resident memory grew over them, in bytes; None where the system does not tell.
        calls: calls counted; None if they were not.
        causes: the reasons, the most frequent first.
        seen: the sizes that varied; None if none did.
    """

    name: str
    where: str
    kind: str
    compiles: int
    cached: int
    seconds: float
    memory: int | None
    calls: int | None
    causes: tuple[Cause, ...]
    seen: SeenShapes | None

    @property
    def summary(self) -> str:
        """What happened, the main reason, and the remedy, in a line."""
        times = "once" if self.compiles == 1 else f"{self.compiles:,} times"
        parts = [f"{self.name} compiled {times}"]
        if self.causes:
            main = self.causes[0]
            parts += [f"{main.compiles:,} because {main.text}", self.advice or main.remedy]
        return "; ".join(parts)

    @property
    def is_minor(self) -> bool:
        """Whether these are eager operations that compiled for hardly any reason twice."""
        return self.kind == "eager" and all(cause.compiles < _REPEATED for cause in self.causes)

    @cached_property
    def plan(self) -> BucketPlan | None:
        """At most eight buckets, and at most half as many as shapes, for the sizes seen; None where there were few."""
        if (
            self.seen is None
            or self.kind != "call"
            or not self.causes
            or self.causes[0].kind != "shape"
            or len(self.seen) < _FEWEST
        ):
            return None
        try:
            return plan_buckets(self.seen.lengths, max_buckets=min(8, len(self.seen) // 2), batch_size=self.seen.rows)
        except ShapebucketError:  # sizes that no plan is for, such as 0 alone
            return None

    @property
    def advice(self) -> str:
        """What buckets would do for the sizes seen; empty where they are no remedy."""
        if self.plan is None or self.plan.planned is None or self.seen is None:
            return ""
        count = len(self.plan)
        weight = f"over {self.seen.weight:,} calls" if self.seen.counted else "each shape taken once"
        return (
            f"{count} buckets would compile {count} times with {self.plan.planned.padding_fraction:.1%} padding ({weight}): "
            + _shown_sizes(self.plan)
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values, with the plan."""
        plain = {name: value for name, value in vars(self).items() if name not in ("causes", "seen", "plan")}
        return plain | {
            "summary": self.summary,
            "causes": [cause.to_json() for cause in self.causes],
            "plan": None if self.plan is None else self.plan.to_json(),
        }


@dataclass(frozen=True)
class Diagnosis:
    """What compiled while a watch was open, and why; print it.

    Attributes:
        functions: the functions, by what the caches hold of them: programs, then memory; eager operations last.
        events: the compiles it was made from.
    """

    functions: tuple[FunctionReport, ...]
    events: tuple[CompileEvent, ...]

    @classmethod
    def of(cls, events: Iterable[CompileEvent], counts: Mapping[Any, CallCounts] | None = None) -> Diagnosis:
        """Makes a diagnosis of the events of a watch, and the calls it counted, by the function's key."""
        every = tuple(events)
        groups: dict[Any, list[CompileEvent]] = {}
        for event in every:
            key = ("eager", event.caller) if event.function.kind == "eager" else event.function.key
            groups.setdefault(key, []).append(event)
        reports = [_report(group, (counts or {}).get(key)) for key, group in groups.items()]
        reports.sort(key=lambda each: (each.kind == "eager", -each.compiles, -(each.memory or 0)))
        return cls(tuple(reports), every)

    @property
    def seconds(self) -> float:
        """All compiles together."""
        return sum(event.seconds for event in self.events)

    def function(self, name: str | None = None) -> FunctionReport:
        """Returns the report of a function; without a name, of that which compiled most often for its shapes.

        Raises:
            LengthsError: if there is none, or none of that name.
        """
        found = [each for each in self.functions if (each.name == name if name else each.seen is not None)]
        if not found:
            known = ", ".join(sorted({each.name for each in self.functions})) or "none"
            wanted = f"function {name!r}" if name else "function with shapes that vary"
            raise LengthsError(f"the watch saw no {wanted}; what compiled: {known}")
        return found[0]

    def lengths(self, function: str | None = None) -> LengthHistogram:
        """Returns the sizes that a function was called with, for the planner; or just compiled for, if calls were not counted.

        Sizes that always agree are one axis, named after the first leaf that has it. The first axis of the leaves counts as
        the batch's rows, unless it alone varies.

        Args:
            function: its name; that which compiled most often for its shapes, if not given.

        Raises:
            LengthsError: if its shapes did not vary.
        """
        return self._seen(function).lengths

    def plan(self, function: str | None = None, **options: Any) -> BucketPlan:
        """Plans buckets for the sizes that a function was called with.

        Args:
            function: see `lengths`.
            **options: see `plan_buckets`; the batch size is the largest seen, unless it or a budget is given.

        Raises:
            LengthsError: if its shapes did not vary.
            PlanError: for options that make no plan.
        """
        seen = self._seen(function)
        if "batch_size" not in options and "token_budget" not in options:
            options["batch_size"] = seen.rows
        return plan_buckets(seen.lengths, **options)

    def _seen(self, function: str | None) -> SeenShapes:
        report = self.function(function)
        if report.seen is None:
            raise LengthsError(
                f"no size varied among the calls of {report.name!r} that compiled, so there is nothing to plan"
            )
        return report.seen

    def to_json(self) -> dict[str, Any]:
        """Returns the diagnosis as JSON values."""
        return {
            "compiles": len(self.events),
            "cached": sum(event.cached for event in self.events),
            "seconds": self.seconds,
            "functions": [report.to_json() for report in self.functions],
            "events": [_event_json(event) for event in self.events],
        }

    def __str__(self) -> str:
        if not self.events:
            return "nothing compiled"
        shown = [each for each in self.functions if not each.is_minor]
        rest = [each for each in self.functions if each.is_minor]
        lines = [self._table(shown)] if shown else [self._title]
        for report in shown:
            if report.causes:
                lines += ["", *_explained(report)]
        if rest:
            compiles = sum(each.compiles for each in rest)
            seconds = sum(each.seconds for each in rest)
            lines += ["", f"eager operations that hardly repeat: {compiles:,} compiled in {seconds:.1f} s"]
        return "\n".join(lines)

    @property
    def _title(self) -> str:
        parts = [
            sum(getattr(event, f"{part}_seconds") for event in self.events) for part in ("trace", "lower", "compile")
        ]
        hits = sum(event.cached for event in self.events)
        cached = f", {hits:,} of them from the persistent cache" if hits else ""
        return (
            f"{len(self.events):,} programs compiled{cached} in {self.seconds:.1f} s "
            f"(tracing {parts[0]:.1f}, lowering {parts[1]:.1f}, XLA {parts[2]:.1f})"
        )

    def _table(self, reports: Sequence[FunctionReport]) -> str:
        rows = [
            [
                each.name if each.kind != "ahead" else f"{each.name}, ahead of time",
                each.where or "–",
                f"{each.compiles:,}",
                "–" if each.calls is None else f"{each.calls:,}",
                f"{each.seconds:.1f}",
                "–" if each.memory is None else f"{each.memory / 1e6:+.0f}",
            ]
            for each in reports
        ]
        return render(self._title, ["function", "at", "compiles", "calls", "seconds", "memory, MB"], rows, text=2)


def _shown_sizes(plan: BucketPlan) -> str:
    """Lists the buckets' sizes, in a line."""
    if len(plan.layout.axes) == 1:
        return f"{plan.layout.axes[0]} = {', '.join(str(size) for size in plan.sizes[:, 0])}"
    return ", ".join(" ".join(f"{axis}={size}" for axis, size in bucket.axes) for bucket in plan.buckets)


def _event_json(event: CompileEvent) -> dict[str, Any]:
    """Returns an event as JSON values; the changes of a later one tell its signature, which may have hundreds of leaves."""
    return event.to_json() if event.first else event.to_json() | {"signature": None}


def _explained(report: FunctionReport) -> list[str]:
    others = [f"  {cause.compiles:,} because {cause.text}; {cause.remedy}" for cause in report.causes[1:]]
    return [report.summary, *others]


def _report(events: Sequence[CompileEvent], counts: CallCounts | None) -> FunctionReport:
    first = events[0].function
    by_name: dict[str, list[CompileEvent]] = {}
    for event in events:
        by_name.setdefault(event.function.name, []).append(event)
    eager = first.kind == "eager"
    causes = [cause for name, group in by_name.items() for cause in causes_of(group, f"{name}: " if eager else "")]
    grown = [event.memory for event in events if event.memory is not None]
    return FunctionReport(
        name=", ".join(by_name) if eager else first.name,
        where=first.where,
        kind=first.kind,
        compiles=len(events),
        cached=sum(event.cached for event in events),
        seconds=sum(event.seconds for event in events),
        memory=sum(grown) if grown else None,
        calls=None if counts is None else counts.calls,
        causes=tuple(sorted(causes, key=lambda cause: -cause.compiles)),
        seen=SeenShapes.of(events, counts) if len(by_name) == 1 else None,
    )
