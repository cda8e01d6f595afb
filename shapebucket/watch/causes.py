"""The causes of a function's compiles, in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shapebucket.watch.recording import CompileEvent
from shapebucket.watch.seen import is_mask, sizes_at
from shapebucket.watch.signature import Kind

_LISTED = 4  # values that are listed; more are summed up
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
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
    "unknown": "look for jax.clear_caches(), thousands of programs that fill JAX's caches, a second jit of other options, or a "
    "`with mesh:`",
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


def causes_of(events: Sequence[CompileEvent], prefix: str) -> list[Cause]:
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
        changed = [events[number] for number in numbers]
        text = _text(kind, path, values, events if kind == "static" else changed)
        if kind == "function" and not _is_made_anew(changed):
            remedy = f"if it is made in a loop, {remedy}"
    if kind == "dtype" and any(value.startswith("key<") for value in values):
        remedy = "use one PRNG implementation for all keys"
    others = sorted({place for place, _ in places} - {path})
    remedy = _REMEDIES_BY_FUNCTION.get(events[0].function.kind, remedy)
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        text += f", and {others[0]}{more} with it"
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
    if axis == 0 and len(sizes) == 2 and sizes[1] < sizes[0] and sizes_at(events[0].signature, path, 1) is not None:
        return (
            f"{text}: {sizes[1]} may be a last partial batch",
            values,
            "drop the remainder, or pad it and mask the rows",
        )
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
    objects = {value.identity for value in statics}
    texts = {_ADDRESS.sub("", value.text) for value in statics}
    if None not in objects and len(objects) > len(texts):
        return (
            f"static argument {path} was {len(objects)} objects, each of which equals only itself ({_listed(values)})"
        )
    return f"static argument {path} took {len(values)} values ({_listed(values)})"


def _is_made_anew(events: Sequence[CompileEvent]) -> bool:
    """Tells whether compiles were of one new object after another, each of which took the place of one that is no more."""
    return len(events) > 1 and all(event.making is not None and event.making.replaces for event in events)


def _function_text(events: Sequence[CompileEvent]) -> str:
    how = next(change.after for change in events[-1].changes if change.kind == "function")
    text = f"it was a new {how} each time" if _is_made_anew(events) else f"it was another {how} of the same code"
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
            return f"{_then(path, values)}: something in float32 may have promoted it"
        case _:
            return _then(path, values)
