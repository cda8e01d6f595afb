"""The signature of a batch: what decides on its executable."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from shapebucket.buckets import ArraySpec
from shapebucket.step.arguments import Place, label_of

Signature = tuple[Any, ...]
DELETED = "was deleted, or donated to an earlier call"


def signature_of(batch: Any) -> Signature:
    """Returns a hashable key of a batch's tree, shapes and dtypes, 64-bit dtypes as JAX reads them."""
    leaves, tree = jax.tree_util.tree_flatten(batch)
    return (tree, *[as_jit_reads(spec_of(leaf)) for leaf in leaves])


def telling_leaves(batches: Sequence[Any]) -> list[tuple[str, ...]]:
    """Returns the paths of the fewest leaves whose shapes tell these batches apart; of all leaves, if it takes over two.

    A call looks at these alone: an executable checks the others in C++.

    Args:
        batches: nested dicts of arrays, of the same tree.
    """
    paths = [tuple(key.key for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(batches[0])]
    shapes = {path: [leaf_at(batch, path).shape for batch in batches] for path in paths}
    for count in (1, 2):
        for chosen in itertools.combinations(paths, count):
            if len(set(zip(*(shapes[path] for path in chosen), strict=True))) == len(batches):
                return list(chosen)
    return paths


def leaf_at(batch: Any, path: tuple[str, ...]) -> Any:
    """Returns a leaf of a nested dict."""
    for key in path:
        batch = batch[key]
    return batch


def difference(found: Mapping[str, ArraySpec], expected: Mapping[str, ArraySpec]) -> tuple[float, list[str]]:
    """Compares two batches, leaf by leaf.

    Returns:
        A distance (the sum over all sizes of the difference of their logarithms; a thousand for a leaf that is missing, one
        too many, or of another rank or dtype), and a line for each leaf that differs.
    """
    distance = 0.0
    lines: list[str] = []
    for path in sorted({*found, *expected}):
        one, other = found.get(path), expected.get(path)
        if one is None or other is None:
            distance += 1000
            lines.append(f"{path}: {_shown(one)} received, {_shown(other)} expected")
        elif one != other:
            alike = one.dtype == other.dtype and len(one.shape) == len(other.shape)
            pairs = zip(one.shape, other.shape, strict=alike)
            distance += sum(abs(math.log((a + 1) / (b + 1))) for a, b in pairs) + (0 if alike else 1000)
            lines.append(f"{path}: {_shown(one)} received, {_shown(other)} expected")
    return distance, lines


class Taken(NamedTuple):
    """What an executable takes: (positional, keyword) arguments without the static ones.

    Attributes:
        avals: trees of abstract arrays.
        shardings: trees of the same structure.
    """

    avals: Any
    shardings: Any

    @classmethod
    def by(cls, executable: jax.stages.Compiled) -> Taken:
        """Asks an executable."""
        return cls(executable.in_avals, executable.input_shardings)


def argument_differences(
    fn: Callable[..., Any],
    taken: Taken,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    statics: Collection[Place] = (),
) -> dict[str, list[str]]:
    """Returns, by argument, a line for each leaf of a call that is not what an executable was compiled for.

    Args:
        fn: the step, for the names of its arguments.
        taken: what an executable takes, that refused the call or might.
        args: of the call, static ones left out.
        kwargs: likewise.
        statics: the places of the static ones.
    """
    expected_args, expected_kwargs = taken.avals
    sharding_args, sharding_kwargs = taken.shardings
    if len(args) != len(expected_args) or kwargs.keys() != expected_kwargs.keys():
        return {
            "": [
                f"{len(args)} positional arguments and the keywords {sorted(kwargs)} received, {len(expected_args)} and "
                f"{sorted(expected_kwargs)} expected"
            ]
        }
    dynamic = [index for index in range(len(args) + len(statics)) if index not in statics]
    found: dict[str, list[str]] = {}
    for label, one, other, sharding in [
        *zip([label_of(fn, index) for index in dynamic[: len(args)]], args, expected_args, sharding_args, strict=True),
        *((name, kwargs[name], expected_kwargs[name], sharding_kwargs[name]) for name in sorted(kwargs)),
    ]:
        if lines := _tree_differences(label, one, other, sharding):
            found[label] = lines
    return found


def _tree_differences(label: str, found: Any, expected: Any, shardings: Any) -> list[str]:
    """Returns a line for each leaf of one argument that differs."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(found)
    specs = {label + jax.tree_util.keystr(path): as_jit_reads(spec_of(leaf)) for path, leaf in leaves}
    wanted, wanted_tree = jax.tree_util.tree_flatten_with_path(expected)
    wanted_specs = {label + jax.tree_util.keystr(path): spec_of(leaf) for path, leaf in wanted}
    _, lines = difference(specs, wanted_specs)
    if lines or tree != wanted_tree:
        return lines or [f"{label}: the containers {tree} received, {wanted_tree} expected"]
    laid = tree.flatten_up_to(shardings)
    for (path, leaf), sharding in zip(leaves, laid, strict=True):
        if problem := _array_problem(leaf, sharding):
            lines.append(f"{label}{jax.tree_util.keystr(path)}: {problem}")
    return lines


def _array_problem(leaf: Any, sharding: Any) -> str | None:
    """Says what is wrong with an array of the right shape and dtype, if anything is."""
    if isinstance(leaf, Tracer):
        return "is traced; a CompiledStep cannot be transformed or jitted"
    if not isinstance(leaf, jax.Array):
        return None
    if leaf.is_deleted():
        return DELETED
    # What is not committed to a device is put where it is needed.
    if sharding is not None and leaf.committed and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return f"{leaf.sharding} received, {sharding} expected"
    return None


def as_jit_reads(spec: ArraySpec) -> ArraySpec:
    """Returns the spec with the dtype that JAX gives it: 32 bits for 64, without `jax_enable_x64`."""
    if isinstance(spec.dtype, np.dtype) and spec.dtype.kind in "iufc":
        return ArraySpec(spec.shape, np.dtype(jax.dtypes.canonicalize_dtype(spec.dtype)))
    return spec  # typed PRNG keys and such


def spec_of(leaf: Any) -> ArraySpec:
    """Returns the shape and dtype of an array, or of what numpy makes of another leaf."""
    array = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
    return ArraySpec(tuple(array.shape), array.dtype)


def _shown(spec: ArraySpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype}{list(spec.shape)}"


def specs_of(tree: Any) -> dict[str, ArraySpec]:
    """Returns the shape and dtype of each leaf, by its path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): spec_of(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
