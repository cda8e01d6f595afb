"""The signature of a call: all that JAX compiles anew for, and how two of them differ. Holds no arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np
from jax.core import Tracer

from shapebucket.watch._jax_private import Call

Kind = Literal[
    "shape",
    "rank",
    "dtype",
    "weak_type",
    "scalar",
    "tree",
    "sharding",
    "static",
    "setting",
    "function",
    "closure",
    "unknown",
]

# public settings that JAX compiles anew for
_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_device",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_debug_key_reuse",
    "jax_disable_jit",
    "jax_softmax_custom_jvp",
    "jax_allow_f16_reductions",
)
_LONGEST_TEXT = 60


class Path(NamedTuple):
    """Where a leaf stands: as text (`batch['tokens']`), the argument's position or keyword, and the keys from there."""

    text: str
    argument: int | str
    keys: tuple[Any, ...]


class Leaf(NamedTuple):
    """What JAX tells of one leaf of the arguments.

    Attributes:
        shape: its shape.
        dtype: the name of the dtype that JAX gives it.
        weak: whether its dtype is weak, as that of a Python number.
        sharding: where it lies, if it is committed to it.
        source: `"jax"`, `"numpy"`, or the Python type of a scalar.
    """

    shape: tuple[int, ...]
    dtype: str
    weak: bool
    sharding: Any
    source: str

    @property
    def is_scalar(self) -> bool:
        """Whether it is a Python number."""
        return self.source not in ("jax", "numpy")

    def __str__(self) -> str:
        if self.is_scalar:
            return f"a Python {self.source}"
        return f"{self.dtype}{list(self.shape)}" + (" of NumPy" if self.source == "numpy" else "")


class Static(NamedTuple):
    """A static argument: its text, and which object it is, if it equals only itself, so that each new one is a new value."""

    text: str
    identity: int | None


class Change(NamedTuple):
    """One thing in which a call differs from an earlier one of the same function.

    Attributes:
        kind: what sort of thing.
        path: the leaf (`batch['tokens']`), argument, setting or closed-over name; empty where it is none of them.
        axis: of a shape.
        before: what it was.
        after: what it is now.
    """

    kind: Kind
    path: str
    axis: int | None
    before: str
    after: str

    def __str__(self) -> str:
        if self.kind == "unknown":
            return "nothing that can be seen: function and arguments were compiled before"
        if self.kind == "function":
            return f"another {self.after} of the same code"
        axis = "" if self.axis is None else f" axis {self.axis}"
        prefix = "static argument " if self.kind == "static" else ""
        return f"{prefix}{self.path}{axis}: {self.before} → {self.after}".removeprefix(": ")


@dataclass(frozen=True)
class Signature:
    """All that JAX compiles anew for, but the function itself.

    Attributes:
        paths: where the leaves stand, in the order of the arguments.
        leaves: the leaves.
        tree: the structure of the arguments that are not static.
        statics: the static arguments, by name.
        settings: the settings of JAX in force, by name, and the mesh.
    """

    paths: tuple[Path, ...]
    leaves: tuple[Leaf, ...]
    tree: Any
    statics: tuple[tuple[str, Static], ...]
    settings: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        parts = [
            f"{path.text}: {leaf}" + (f" ({shown_sharding(leaf.sharding)})" if leaf.sharding is not None else "")
            for path, leaf in zip(self.paths, self.leaves, strict=True)
        ]
        return ", ".join(parts + [f"{name}={value.text} (static)" for name, value in self.statics])

    def to_json(self) -> dict[str, Any]:
        """Returns the signature as JSON values."""
        leaves = [
            {
                "path": path.text,
                "shape": list(leaf.shape),
                "dtype": leaf.dtype,
                "weak_type": leaf.weak,
                "sharding": shown_sharding(leaf.sharding),
                "source": leaf.source,
            }
            for path, leaf in zip(self.paths, self.leaves, strict=True)
        ]
        return {
            "leaves": leaves,
            "static": {name: value.text for name, value in self.statics},
            "settings": dict(self.settings),
        }


def signature_of(call: Call | jax.stages.Lowered, share: Callable[[Any], Any] = lambda each: each) -> Signature:
    """Takes the signature of a call, or of a function lowered ahead of time.

    Args:
        call: what compiles.
        share: returns an equal object that it was given earlier, so that many signatures take little memory.
    """
    if isinstance(call, Call):
        labels, values, statics = _arguments(call)
    else:
        args, kwargs = call.args_info
        labels: list[tuple[str, int | str]] = [(f"argument {number}", number) for number in range(len(args))]
        labels += [(name, name) for name in sorted(kwargs)]
        values, statics = [*args, *(kwargs[name] for name in sorted(kwargs))], ()
    found, tree = jax.tree_util.tree_flatten_with_path(values)
    paths = tuple(_path(labels[cast(Any, keys[0]).idx], tuple(keys[1:])) for keys, _ in found)
    leaves = tuple(share(_leaf(value)) for _, value in found)
    # how an argument is passed, by position or keyword, is part of the tree
    return Signature(
        share(paths), leaves, share((tuple(each for _, each in labels), tree)), statics, share(_settings())
    )


def changes(old: Signature, new: Signature) -> list[Change]:
    """Lists the differences between two signatures of one function."""
    found: list[Change] = []
    before = dict(zip([path.text for path in old.paths], old.leaves, strict=True))
    after = dict(zip([path.text for path in new.paths], new.leaves, strict=True))
    if old.tree != new.tree:
        found += _tree_changes(old, new, before, after)
    for path, leaf in after.items():
        if (other := before.get(path)) is not None and other is not leaf:
            found += _leaf_changes(path, other, leaf)
    statics = dict(old.statics)
    found += [
        Change("static", name, None, statics[name].text, value.text)
        for name, value in new.statics
        if name in statics and statics[name] != value
    ]
    settings = dict(old.settings)
    return found + [
        Change("setting", name, None, settings[name], value) for name, value in new.settings if settings[name] != value
    ]


def distance(old: Signature, new: Signature) -> tuple[int, int]:
    """Tells how far two signatures are from each other: in the tree first, then in leaves, statics and settings."""
    if old.tree != new.tree:
        return 1, len({path.text for path in old.paths} ^ {path.text for path in new.paths})
    differing = sum(a is not b and a != b for a, b in zip(old.leaves, new.leaves, strict=True))
    differing += sum(a != b for a, b in zip(old.statics, new.statics, strict=False))
    return 0, differing + (old.settings != new.settings)


def shown_sharding(sharding: Any) -> str:
    """Describes where an array lies."""
    if sharding is None:
        return "uncommitted"
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        return f"NamedSharding(mesh({mesh}), {sharding.spec})"
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return f"committed to {next(iter(sharding.device_set))}"
    return str(sharding)


def shown(value: Any) -> str:
    """Returns the text of a value of the user's, cut to a line; never fails."""
    try:
        text = value.__qualname__ if inspect.isroutine(value) else repr(value)
    except Exception as error:  # a repr of somebody else's must not end the run that is watched
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def _arguments(call: Call) -> tuple[list[tuple[str, int | str]], list[Any], tuple[tuple[str, Static], ...]]:
    """Returns labels and values of the arguments, and the static ones, by the names of the function's parameters."""
    names = _names(call)
    labels: list[tuple[str, int | str]] = []
    values: list[Any] = []
    statics: list[tuple[str, Static]] = []
    for place, value in [*enumerate(call.args), *sorted(call.kwargs.items())]:
        label = names[place] if isinstance(place, int) else place
        numbers = [each if each >= 0 else each + len(call.args) for each in call.static_argnums]
        if place in numbers or label in call.static_argnames:
            statics.append((label, _static(value)))
        else:
            labels.append((label, place))
            values.append(value)
    return labels, values, tuple(statics)


def _names(call: Call) -> list[str]:
    """Returns a name for each positional argument."""
    names: list[str] = []
    try:
        parameters = list(inspect.signature(call.fun).parameters.values()) if call.fun is not None else []
    except (TypeError, ValueError):  # not every callable has one
        parameters = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{number}]" for number in range(len(call.args) - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names + [f"argument {number}" for number in range(len(names), len(call.args))]


def _path(label: tuple[str, int | str], keys: tuple[Any, ...]) -> Path:
    text, argument = label
    return Path(text + jax.tree_util.keystr(keys), argument, keys)


def _leaf(value: Any) -> Leaf:
    """Describes one leaf."""
    if isinstance(value, bool | int | float | complex) and not isinstance(value, np.generic):
        source = type(value).__name__
    else:
        source = "numpy" if isinstance(value, np.ndarray | np.generic) else "jax"
    try:
        kind = jax.typeof(value)
    except (TypeError, OverflowError):
        kind = value  # what jax.stages tells of an argument has a shape and a dtype, like an array
    array: Any = value if isinstance(value, jax.Array) and not isinstance(value, Tracer) else None
    return Leaf(
        tuple(getattr(kind, "shape", ())),
        str(getattr(kind, "dtype", type(value).__name__)),
        bool(getattr(kind, "weak_type", False)),
        array.sharding if array is not None and array.committed else None,
        source,
    )


def _static(value: Any) -> Static:
    kind: Any = type(value)
    only_itself = kind.__eq__ is object.__eq__ or inspect.isroutine(value)
    return Static(
        shown(value), id(value) if only_itself else None
    )  # JAX's caches keep it alive, so no other has its id


def _settings() -> tuple[tuple[str, str], ...]:
    mesh: Any = jax.sharding.get_abstract_mesh()
    axes = (
        ", ".join(f"{name}={size}" for name, size in mesh.shape.items()) if mesh is not None and mesh.shape else "none"
    )
    values = [(name, str(getattr(jax.config, name))) for name in _SETTINGS if hasattr(jax.config, name)]
    return (*values, ("the mesh in force", axes))


def _leaf_changes(path: str, old: Leaf, new: Leaf) -> Iterator[Change]:
    """Yields the differences between two leaves at one place; which array library an array is of is none."""
    typed_alike = (old.dtype, old.weak) == (new.dtype, new.weak)
    if old.is_scalar != new.is_scalar or (old.is_scalar and old.source != new.source):
        if not typed_alike or old.shape != new.shape:
            yield Change("scalar", path, None, str(old), str(new))
        return
    if len(old.shape) != len(new.shape):
        yield Change("rank", path, None, str(list(old.shape)), str(list(new.shape)))
    else:
        for axis, (one, other) in enumerate(zip(old.shape, new.shape, strict=True)):
            if one != other:
                yield Change("shape", path, axis, str(one), str(other))
    if old.dtype != new.dtype:
        yield Change("dtype", path, None, _dtype(old), _dtype(new))
    elif old.weak != new.weak:
        yield Change("weak_type", path, None, *(f"{'weak ' if each.weak else ''}{each.dtype}" for each in (old, new)))
    if old.sharding != new.sharding:
        same = old.sharding and new.sharding and new.sharding.is_equivalent_to(old.sharding, len(new.shape))
        spelled = (
            f"{shown_sharding(new.sharding)}, the same spelled otherwise" if same else shown_sharding(new.sharding)
        )
        yield Change("sharding", path, None, shown_sharding(old.sharding), spelled)


def _dtype(leaf: Leaf) -> str:
    return leaf.dtype + (" of NumPy" if leaf.source == "numpy" else "")


def _tree_changes(
    old: Signature, new: Signature, before: Mapping[str, Leaf], after: Mapping[str, Leaf]
) -> Iterator[Change]:
    """Yields what differs between two trees: leaves that came or went, or else their order, place or containers."""
    gone, come = before.keys() - after.keys(), after.keys() - before.keys()
    if gone or come:
        for path in before:
            if path in gone:
                yield Change("tree", path, None, str(before[path]), "absent")
        for path in after:
            if path in come:
                yield Change("tree", path, None, "absent", str(after[path]))
        return
    (old_places, old_tree), (new_places, new_tree) = old.tree, new.tree
    if old_places != new_places:
        names = [
            [path.text for path in each.paths if isinstance(path.argument, str) and not path.keys]
            for each in (old, new)
        ]
        words = [f"by keyword: {', '.join(each)}" if each else "all by position" for each in names]
        yield Change("tree", "the arguments", None, *words)
        return
    argument, words = _containers(old_tree, new_tree)
    labels = (
        [_label(path) for path in new.paths if path.argument == new_places[argument]] if argument is not None else []
    )
    yield Change("tree", labels[0] if labels else "", None, *words)


def _label(path: Path) -> str:
    """Returns the name of the argument that a leaf is of."""
    return path.text.removesuffix(jax.tree_util.keystr(path.keys))


def _containers(old: Any, new: Any) -> tuple[int | None, tuple[str, str]]:
    """Returns the argument in which two trees of the same leaves differ, and the containers that do."""
    argument: int | None = None
    while True:
        pairs = [(k, a, b) for k, (a, b) in enumerate(zip(old.children(), new.children(), strict=False)) if a != b]
        one, other = old.node_data(), new.node_data()
        if one is not None and other is not None and one != other:
            return argument, _shown_nodes(one, other)
        if not pairs:
            return argument, ("one structure", "another")
        number, old, new = pairs[0]
        argument = number if argument is None else argument


def _shown_nodes(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[str, str]:
    if one[0] is not other[0]:
        return one[0].__name__, other[0].__name__
    return f"{one[0].__name__} {shown(one[1])}", f"{other[0].__name__} {shown(other[1])}"
