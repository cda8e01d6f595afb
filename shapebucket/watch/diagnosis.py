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
from shapebucket.watch.recording import CompileEvent
from shapebucket.watch.seen import SeenShapes, is_mask, sizes_at
from shapebucket.watch.signature import Kind

_REPEATED = 3  # compiles for one reason, from which on eager operations are worth a line
_LISTED = 4  # values that are listed; more are summed up
_REMEDIES_BY_FUNCTION = {
    "eager": "do it in NumPy before the call, or inside a jitted function",
    "ahead": "it was asked for, ahead of time",
}
_REMEDIES: dict[Kind, str] = {
    "shape": "pad it to few sizes",
    "rank": "reshape it before the call",
    "dtype": "cast it before the call, or what the function returns",
    "weak_type": "make it with a dtype of its own, as in jnp.asarray(0, jnp.int32); what the function returns likewise",
    "scalar": "pass an array of one dtype, as in jnp.float32(x)",
    "tree": "keep one structure from the first call on: placeholders for what comes later, plain dicts for any order",
    "sharding": "put it with one jax.device_put on one sharding before the first call",
    "static": "pass it as an array, without static_argnums or static_argnames, or keep to few values",
    "setting": "set it once, before the first call",
    "function": "jit it once, outside of the loop, and pass as arguments what changes",
    "unknown": "look for jax.clear_caches(), thousands of programs that fill JAX's caches, or a second jit of other options",
}


@dataclass(frozen=True)
class Cause:
    """One reason for compiles of a function.

    Attributes:
        kind: what sort of thing changed.
        compiles: how many compiles had this among their reasons.
        path: the leaf, argument, setting or name that changed.
        axis: of a shape.
        values: those that it took, as text: all of them, in the order seen.
        text: the reason, in a line.
        remedy: what to do.
    """

    kind: Kind
    compiles: int
    path: str
    axis: int | None
    values: tuple[str, ...]
    text: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {**vars(self), "values": list(self.values)}


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
            or len(self.seen) < _LISTED
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
    causes = [cause for name, group in by_name.items() for cause in _causes(group, f"{name}: " if eager else "")]
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


def _causes(events: Sequence[CompileEvent], prefix: str) -> list[Cause]:
    """Joins changes of one sort that always come together, and says each as a cause."""
    where: dict[tuple[Kind, str, int | None], list[int]] = {}
    for number, event in enumerate(events):
        for kind, path, axis, _, _ in event.changes:
            if kind != "closure":  # told with the function that closes over it
                where.setdefault((kind, path, axis), []).append(number)
    together: dict[tuple[Kind, tuple[int, ...]], list[tuple[str, int | None]]] = {}
    for (kind, path, axis), numbers in where.items():
        together.setdefault((kind, tuple(numbers)), []).append((path, axis))
    return [_cause(events, kind, numbers, places, prefix) for (kind, numbers), places in together.items()]


def _cause(
    events: Sequence[CompileEvent],
    kind: Kind,
    numbers: Sequence[int],
    places: Sequence[tuple[str, int | None]],
    prefix: str,
) -> Cause:
    path, axis = min(places, key=lambda place: _is_mask(events, place[0]))
    found = [change for number in numbers for change in events[number].changes if change[:3] == (kind, path, axis)]
    values = tuple(dict.fromkeys(text for change in found for text in (change.before, change.after)))
    remedy = _REMEDIES[kind]
    if kind == "shape" and axis is not None:
        text, values, special = _shape_text(events, path, axis)
        remedy = special or remedy
    else:
        text = _text(kind, path, values, [events[number] for number in numbers])
    if kind == "dtype" and any(value.startswith("key<") for value in values):
        remedy = "use one PRNG implementation for all keys"
    others = len({place for place, _ in places}) - 1
    remedy = _REMEDIES_BY_FUNCTION.get(events[0].function.kind, remedy)
    if others:
        text += f", and {others} other{'s' if others > 1 else ''} with it"
    return Cause(kind, len(numbers), path, axis, values, prefix + text, remedy)


def _shape_text(events: Sequence[CompileEvent], path: str, axis: int) -> tuple[str, tuple[str, ...], str]:
    """Returns the text for a size that varies, the values in the order seen, and a remedy of its own where there is one."""
    seen = [(size, event.caller) for event in events if (size := sizes_at(event.signature, path, axis)) is not None]
    sizes = list(dict.fromkeys(size for size, _ in seen))
    text = f"{path} axis {axis} took {len(sizes)} values ({_range(sizes)})"
    values = tuple(map(str, sizes))
    callers: dict[int, set[str]] = {size: {caller for each, caller in seen if each == size} for size in sizes}
    lines = {caller for each in callers.values() for caller in each}
    if len(sizes) <= _LISTED and len(lines) > 1 and all(len(each) == 1 for each in callers.values()):
        places = ", ".join(f"{size} at {next(iter(each))}" for size, each in callers.items())
        remedy = "use one batch size for all callers, or accept one program for each" if axis == 0 else ""
        return f"{text}: {places}", values, remedy
    if axis == 0 and len(sizes) == 2 and sizes[1] < sizes[0]:
        return f"{text}: {sizes[1]} is a last partial batch", values, "drop the remainder, or pad it and mask the rows"
    return text, values, ""


def _is_mask(events: Sequence[CompileEvent], path: str) -> bool:
    """Tells whether a leaf is a mask: of arrays that change together, another says more."""
    found = next((event.signature for event in events if event.signature is not None), None)
    return found is not None and any(
        is_mask(path, leaf) for each, leaf in zip(found.paths, found.leaves, strict=True) if each.text == path
    )


def _range(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) <= _LISTED else f"{min(sizes)}..{max(sizes)}"


def _listed(values: Sequence[str]) -> str:
    return ", ".join(values) if len(values) <= _LISTED else f"{', '.join(values[:3])}, … {values[-1]}"


def _then(path: str, values: Sequence[str]) -> str:
    return f"{path} was {', then '.join(values[:_LISTED])}" + (", …" if len(values) > _LISTED else "")


def _static_text(path: str, values: Sequence[str], events: Sequence[CompileEvent]) -> str:
    statics = [value for event in events if event.signature for name, value in event.signature.statics if name == path]
    if all(value.identity is not None for value in statics):
        return f"static argument {path} was a new object each time, and equals only itself ({_listed(values)})"
    return f"static argument {path} took {len(values)} values ({_listed(values)})"


def _function_text(events: Sequence[CompileEvent]) -> str:
    how = next(change.after for change in events[-1].changes if change.kind == "function")
    text = f"it was a new {how} each time"
    held: dict[str, list[str]] = {}
    for change in [change for event in events for change in event.changes if change.kind == "closure"]:
        held.setdefault(change.path, [change.before]).append(change.after)
    for name, values in held.items():
        text += f"; it holds {name}, which was {_listed(list(dict.fromkeys(values)))}"
    return text


def _text(kind: Kind, path: str, values: Sequence[str], events: Sequence[CompileEvent]) -> str:
    """Says what changed over some compiles, but for sizes."""
    match kind:
        case "static":
            return _static_text(path, values, events)
        case "function":
            return _function_text(events)
        case "unknown":
            return "of something that cannot be seen: function and arguments were compiled before"
        case "rank":
            return _then(f"the shape of {path}", values)
        case "weak_type":
            return f"{_then(path, values)}: it was made of a Python number"
        case "tree":
            return f"the structure changed: {_then(path or 'it', values)}"
        case "sharding":
            return f"{path} lay elsewhere: {', then '.join(values[:_LISTED])}"
        case "dtype" if values[0] in ("bfloat16", "float16") and values[-1] == "float32":
            return f"{_then(path, values)}: something in float32 promoted it"
        case _:
            return _then(path, values)
