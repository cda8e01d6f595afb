"""What the features of a TFDS data set declare, in the layout's notation."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shapebucket.errors import LayoutError, MissingExtraError
from shapebucket.naming import axis_name

Path = tuple[str, ...]
_IMAGE = ("h", "w", "c")
_VIDEO = ("t", *_IMAGE)
_TEXT = "OSU"


@dataclass(frozen=True)
class _Leaf:
    """One leaf: its notation, or why it has none."""

    path: Path
    notation: str = ""
    refusal: str = ""

    @property
    def name(self) -> str:
        return "/".join(self.path)

    def is_under(self, names: Collection[str]) -> bool:
        """Whether a name is the leaf's, or that of a feature it is part of."""
        return any("/".join(self.path[:depth]) in names for depth in range(1, len(self.path) + 1))


def tfds_notation(features: Any, only: Collection[str] | str | None, without: Collection[str] | str) -> dict[str, Any]:
    """Returns the layout of TFDS features in its notation; see `Layout.from_tfds`.

    Raises:
        LayoutError: for what is no dict of features, a name that is none of theirs, or features that make no arrays, with
            the reason for each.
        MissingExtraError: without tensorflow-datasets.
    """
    try:
        import tensorflow_datasets as tfds
    except ModuleNotFoundError as error:
        raise MissingExtraError("tensorflow_datasets", "tfds") from error
    if not isinstance(features, tfds.features.FeaturesDict):
        raise LayoutError(
            f"from_tfds takes the features of a TFDS data set, builder.info.features, but got {type(features).__name__}"
        )
    leaves = list(_Walk(tfds.features).leaves(features, ()))
    kept = _chosen(leaves, _names(only), _names(without))
    if refused := [leaf for leaf in kept if leaf.refusal]:
        reasons = "; ".join(f"{leaf.name!r} {leaf.refusal}" for leaf in refused)
        raise LayoutError(
            f"no array holds these features as they are: {reasons}. Leave them out with "
            f"without={[*(_names(without) or ()), *(leaf.name for leaf in refused)]}; or make arrays of them with .map(), and "
            "write the layout of what comes out"
        )
    tree: dict[str, Any] = {}
    for leaf in kept:
        node = tree
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        node[leaf.path[-1]] = leaf.notation
    return tree


def _names(given: Collection[str] | str | None) -> Collection[str] | None:
    return [given] if isinstance(given, str) else given


def _chosen(leaves: list[_Leaf], only: Collection[str] | None, without: Collection[str] | None) -> list[_Leaf]:
    """Returns the leaves that are asked for.

    Raises:
        LayoutError: for a name that is no feature's, or if none is left.
    """
    for option, names in (("only", only), ("without", without)):
        if unknown := [name for name in names or () if not any(leaf.is_under([name]) for leaf in leaves)]:
            raise LayoutError(
                f"{option} names {unknown}, but the data set has the features {[leaf.name for leaf in leaves]}"
            )
    kept = [leaf for leaf in leaves if (only is None or leaf.is_under(only)) and not leaf.is_under(without or ())]
    if not kept:
        raise LayoutError(f"no feature is left of {[leaf.name for leaf in leaves]}")
    return kept


class _Walk:
    """Goes through nested features in sorted order, and names the axes."""

    def __init__(self, kinds: Any) -> None:
        self._kinds = kinds  # the module tensorflow_datasets.features
        self._taken: list[str] = []

    def leaves(self, feature: Any, path: Path, length: str = "") -> Iterator[_Leaf]:
        """Yields the leaves of a feature.

        Args:
            feature: a FeatureConnector.
            path: the keys that lead to it.
            length: the dimension of the sequence around it: an axis, or a number; empty where there is none.
        """
        kinds = self._kinds
        if isinstance(feature, kinds.FeaturesDict):
            for key in sorted(feature.keys()):
                yield from self.leaves(feature[key], (*path, key), length)
        elif isinstance(feature, kinds.Dataset):
            yield _Leaf(path, refusal="is a data set of its own in each sample")
        elif isinstance(feature, kinds.Sequence) and length:
            yield _Leaf(path, refusal="is a sequence of sequences, which may be ragged")
        elif isinstance(feature, kinds.Video):  # a sequence of images, all of one size
            yield self._array(feature.get_tensor_info(), path, "", _VIDEO)
        elif isinstance(feature, kinds.Sequence):
            size = _first(feature.get_tensor_info()).shape[0]
            yield from self.leaves(feature.feature, path, self._axis(path) if size is None else str(size))
        else:
            info = feature.get_tensor_info()
            if isinstance(info, dict):
                yield _Leaf(path, refusal=f"is a {type(feature).__name__}, of which nothing is known here")
            else:
                yield self._array(info, path, length, _IMAGE if isinstance(feature, kinds.Image) else ())

    def _array(self, info: Any, path: Path, length: str, suffixes: tuple[str, ...]) -> _Leaf:
        """Returns the leaf of an array, scalar or text."""
        if info.optional:
            return _Leaf(path, refusal="is optional, and may be None")
        dtype = np.dtype(info.np_dtype)
        if dtype.kind in _TEXT:
            if length or info.shape:
                return _Leaf(path, refusal="is a list of texts, each with a length of its own")
            return _Leaf(path, f"uint8[{self._axis(path)}]")
        if length and None in info.shape:
            return _Leaf(path, refusal="is a sequence of arrays that vary in size, which is ragged")
        several = list(info.shape).count(None) > 1
        dims = [length] if length else []
        for number, size in enumerate(info.shape):
            suffix = (suffixes or range(number + 1))[number] if several else None
            dims.append(self._axis(path, suffix) if size is None else str(size))
        return _Leaf(path, f"{dtype.name}[{' '.join(dims)}]")

    def _axis(self, path: Path, suffix: str | int | None = None) -> str:
        name = axis_name(path, suffix, self._taken)
        self._taken.append(name)
        return name


def _first(info: Any) -> Any:
    """Returns the first leaf of nested dicts."""
    while isinstance(info, dict):
        info = next(iter(info.values()))
    return info
