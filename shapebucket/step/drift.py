"""The state that a step returns is the state that it takes: whether it is, and where not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax

from shapebucket.buckets import ArraySpec
from shapebucket.step.signature import difference, spec_of

_CAUSES = {
    "tree": "None became an array, a list a tuple, or a key was added: start from a state of the tree that comes back",
    "dtype": "an array or numpy number of a wider dtype promoted it, or a Python float an integer: x.astype(old.dtype)",
    "shape": "an axis was added, dropped or grew: keep the shape, say with a fixed window or keepdims=True",
    "weak type": "it starts from a Python number: start from an array with a dtype, jnp.zeros((), jnp.float32)",
    "sharding": "XLA chose another: put the state where it stays before compile(), or give out_shardings",
}


Path = tuple[int | str, ...]
"""Where in a result something stands: indices of tuples and lists, keys of dicts."""


class Returned:
    """Where in a step's result each carried argument comes back.

    The first part of the result that has the argument's tree is taken for it, in the order of the arguments; where none has it,
    the one that differs least.

    Args:
        carried: the abstract arguments by name, in their order.
        result: what the step returns, abstract.
        told: the paths that somebody named.
    """

    def __init__(self, carried: Mapping[str, Any], result: Any, told: Mapping[str, Path] | None = None) -> None:
        self.paths: dict[str, Path] = dict(told or {})
        """By argument; one that does not come back is missing, and so is one that holds no arrays."""
        self.notes: list[str] = []
        """Where another part might have been meant."""
        parts = list(_parts(result))
        for name, value in carried.items():
            if name in self.paths or not jax.tree.leaves(value):
                continue
            free = [(path, part) for path, part in parts if not any(_within(path, one) for one in self.paths.values())]
            alike = [each for each in free if jax.tree.structure(each[1]) == jax.tree.structure(value)]
            if not alike:
                alike = sorted(
                    (each for each in free if _related(value, each[1])), key=lambda each: _distance(value, each[1])
                )[:1]
            if alike:
                self.paths[name] = alike[0][0]
            if len({str(_specs(part)) for _, part in alike}) > 1:
                others = ", ".join(_place(path) for path, _ in alike[1:])
                self.notes.append(
                    f"{name} is taken to come back as {_place(alike[0][0])}; {others} has its tree as well: if that is meant, "
                    f"say carry={{{name!r}: {alike[1][0]}}}"
                )

    def part(self, name: str, result: Any) -> Any:
        """Returns the part of a result (or of its shardings) which is an argument that came back."""
        for key in self.paths[name]:
            result = result[key]
        return result

    def place(self, name: str) -> str:
        """Says which part of the result an argument was compared with."""
        return _place(self.paths[name])


def _parts(result: Any) -> Iterator[tuple[Path, Any]]:
    """Returns a result, and what it contains, all of the outer before what is deeper."""
    level: list[tuple[Path, Any]] = [((), result)]
    while level:
        yield from level
        level = [((*path, key), each) for path, part in level for key, each in _items(part)]


def _items(part: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(part, (tuple, list)):
        return enumerate(cast("Sequence[Any]", part))
    return cast("dict[Any, Any]", part).items() if isinstance(part, dict) else ()


def _within(path: Path, other: Path) -> bool:
    """Says whether one path leads into the other, or the other into it."""
    shorter = min(len(path), len(other))
    return path[:shorter] == other[:shorter]


def _place(path: Path) -> str:
    return "output" + "".join(f"[{key!r}]" for key in path)


def _leaves(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _specs(tree: Any) -> dict[str, ArraySpec]:
    return {path: spec_of(leaf) for path, leaf in _leaves(tree).items()}


def _distance(taken: Any, returned: Any) -> float:
    distance, _ = difference(_specs(returned), _specs(taken))
    return distance + (0 if jax.tree.structure(taken) == jax.tree.structure(returned) else 1)


def _related(taken: Any, returned: Any) -> bool:
    """Says whether two trees have a leaf in common, by path; so have two that are one leaf each, if their shapes agree."""
    one, other = _specs(taken), _specs(returned)
    if one.keys() == other.keys() == {""}:
        return one[""].shape == other[""].shape or one[""].dtype == other[""].dtype
    return bool(one.keys() & other.keys())


def signature_drift(name: str, taken: Any, returned: Any) -> tuple[list[str], list[str]]:
    """Compares an argument with what comes back, leaf by leaf.

    Returns:
        Lines for what makes `jit` compile again and an executable refuse it (tree, shape, dtype), and lines for weak types
        alone, which an executable takes.
    """
    before, after = _leaves(taken), _leaves(returned)
    lines: list[str] = []
    weak: list[str] = []
    for path in dict.fromkeys([*before, *after]):
        one, other = before.get(path), after.get(path)
        if one is None or other is None:
            lines.append(_line(name + path, _shown(one), _shown(other), "tree"))
        elif one.dtype != other.dtype:
            lines.append(_line(name + path, _shown(one), _shown(other), "dtype"))
        elif one.shape != other.shape:
            lines.append(_line(name + path, _shown(one), _shown(other), "shape"))
        elif one.weak_type != other.weak_type:
            weak.append(_line(name + path, _shown(one), _shown(other), "weak type"))
    trees = jax.tree.structure(taken), jax.tree.structure(returned)
    if not lines and trees[0] != trees[1]:
        lines.append(_line(name, str(trees[0]), str(trees[1]), "tree"))
    return lines, weak


def sharding_drift(name: str, avals: Any, taken: Any, returned: Any) -> list[str]:
    """Compares the shardings that an executable takes an argument in with those that it returns it in."""
    paths = list(_leaves(avals).items())
    tree = jax.tree.structure(avals)
    lines: list[str] = []
    for (path, aval), one, other in zip(paths, tree.flatten_up_to(taken), tree.flatten_up_to(returned), strict=True):
        if one is not None and other is not None and not one.is_equivalent_to(other, len(aval.shape)):
            lines.append(_line(name + path, str(one), str(other), "sharding"))
    return lines


def explained(lines: Sequence[str]) -> str:
    """Returns the lines of at most twelve leaves, indented."""
    more = [f"  … and {len(lines) - 12} more"] if len(lines) > 12 else []
    return "\n".join([f"  {line}" for line in lines[:12]] + more)


def _line(label: str, before: str, after: str, kind: str) -> str:
    return f"{label}: {before} taken, {after} returned ({kind}: {_CAUSES[kind]})"


def _shown(leaf: Any) -> str:
    if leaf is None:
        return "nothing"
    return f"{leaf.dtype}{list(leaf.shape)}" + (" (weak)" if getattr(leaf, "weak_type", False) else "")


def weak_leaves(name: str, taken: Any) -> list[str]:
    """Returns the paths of the leaves of an argument that are weakly typed."""
    return [name + path for path, leaf in _leaves(taken).items() if getattr(leaf, "weak_type", False)]
