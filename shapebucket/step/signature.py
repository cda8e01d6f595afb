"""The signature of a batch: what decides on its executable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from shapebucket.buckets import ArraySpec

Signature = tuple[Any, ...]


def signature_of(batch: Any) -> Signature:
    """Returns a hashable key of a batch's tree, shapes and dtypes; takes one or two microseconds.

    Raises:
        AttributeError: for a leaf that is no array.
    """
    leaves, tree = jax.tree_util.tree_flatten(batch)
    return (tree, *[leaf.shape for leaf in leaves], *[leaf.dtype for leaf in leaves])


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


def _shown(spec: ArraySpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype}{list(spec.shape)}"
