"""Layout: which axes of a sample vary.

Letters in shapes: `B` rows of a batch, `N` samples, `A` axes of the layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shapebucket.errors import LayoutError
from shapebucket.naming import axis_name
from shapebucket.sampling import some

Scalar = bool | int | float
Tree = Mapping[str, Any]

_NOTATION = re.compile(r"\s*(?:(?P<dtype>\w+)\s*\[(?P<inside>[^\[\]]*)\]|(?P<bare>[^\[\]]*))\s*")
_PYTHON_SCALARS: dict[type, str] = {bool: "bool", int: "int32", float: "float32"}


@dataclass(frozen=True)
class Feature:
    """One leaf of a sample.

    Attributes:
        path: the keys that lead to it.
        dims: a name for an axis that varies, a number for a size that does not.
        dtype: its dtype, or None as long as no sample has been seen.
        pad_value: what fills the padding.
    """

    path: tuple[str, ...]
    dims: tuple[str | int, ...]
    dtype: np.dtype[Any] | None = None
    pad_value: Scalar = 0

    @property
    def name(self) -> str:
        """The path as one string."""
        return "/".join(self.path)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes that vary, in the order of the array's dimensions."""
        return tuple(dim for dim in self.dims if isinstance(dim, str))

    @property
    def notation(self) -> str:
        """The feature as the user writes it: `int32[h w 3]`, or `h w 3` without a dtype."""
        dims = " ".join(str(dim) for dim in self.dims)
        return dims if self.dtype is None else f"{self.dtype.name}[{dims}]"

    @property
    def known_dtype(self) -> np.dtype[Any]:
        """The dtype; an error that says how to give it, if it is not known."""
        if self.dtype is None:
            raise LayoutError(
                f"its dtype is not known: write it in the layout, as in 'int32[{self.notation}]', or plan from lengths "
                "that measure() took, which carry the dtypes",
                path=self.name,
            )
        return self.dtype

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of this feature where the axes have the given sizes."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)


@dataclass(frozen=True, init=False)
class Layout:
    """Which axes of a sample vary, feature by feature.

    The notation of a feature is its dimensions, separated by spaces: a name is an axis that varies, a number a size
    that does not, nothing a scalar. Features that name the same axis have the same length on it. A dtype may stand
    around it, `"int32[s]"`; without one, it is taken from the first sample that `measure` or `infer` sees.

        Layout({"src": "s", "tgt": "t", "image": "h w 3", "label": ""}, pad_values={"tgt": -1})

    Features and axes are kept in sorted order of the features' paths, as JAX flattens dicts.

    Attributes:
        features: the leaves, sorted by path.
        axes: the names of the axes that vary, in order of first appearance; a sample's lengths come in this order.
    """

    features: tuple[Feature, ...]
    axes: tuple[str, ...] = field(compare=False)

    def __init__(self, spec: Tree, *, pad_values: Tree | None = None) -> None:
        """Makes a layout from its notation.

        Args:
            spec: a dict from feature to notation, nested as the samples are.
            pad_values: what fills the padding, for the features where it is not 0; nested likewise.

        Raises:
            LayoutError: for a notation that cannot be read, a pad value without a feature or that its dtype cannot
                hold.
        """
        if not isinstance(spec, Mapping):
            raise LayoutError(f'a layout is a dict from feature to notation, such as {{"tokens": "s"}}; got {spec!r}')
        if not isinstance(pad_values or {}, Mapping):
            raise LayoutError(
                f'pad_values is a dict from feature to number, such as {{"tokens": -1}}; got {pad_values!r}'
            )
        pads = dict(_walk(pad_values or {}))
        features = [_parse(path, notation, pads.pop(path, 0)) for path, notation in _walk(spec)]
        if pads:
            unknown = ", ".join(repr("/".join(path)) for path in pads)
            known = ", ".join(repr(feature.name) for feature in features)
            raise LayoutError(f"pad_values names {unknown}, which the layout does not have; it has {known}")
        self._set(features)

    def _set(self, features: Iterable[Feature]) -> None:
        """Fills the fields, of a frozen dataclass, once."""
        ordered = tuple(sorted(features, key=lambda feature: feature.path))
        axes = tuple(dict.fromkeys(axis for feature in ordered for axis in feature.axes))
        object.__setattr__(self, "features", ordered)
        object.__setattr__(self, "axes", axes)

    @classmethod
    def of(cls, features: Iterable[Feature]) -> Layout:
        """Makes a layout from features."""
        layout = cls.__new__(cls)
        layout._set(features)
        return layout

    @classmethod
    def infer(cls, dataset: Sequence[Tree] | Iterable[Tree], *, samples: int = 256) -> Layout:
        """Finds the layout from samples.

        A size that is the same in all samples seen is taken as fixed; axes that agree in all of them are one axis,
        named after the first feature that has it (with the dimension's number where several of its axes vary). What
        was not seen cannot be inferred: a size that first varies in sample 10,000 is an error there.

        Args:
            dataset: samples; with `len` and `[]` (a `grain.MapDataset`, a TFDS data source, a list) they are taken
                evenly from all of it, else the first ones.
            samples: how many to look at.

        Raises:
            LayoutError: for a sample that is not a dict of arrays, samples that differ in tree, rank or dtype, or when
                nothing varies.
        """
        seen = [(index, dict(_walk(sample))) for index, sample in some(dataset, samples) if sample is not None]
        if len(seen) < 2:
            raise LayoutError(f"cannot infer a layout from {len(seen)} samples: give at least 2, or write the layout")
        first_index, first = seen[0]
        columns: dict[tuple[str, ...], list[tuple[int, ...]]] = {path: [] for path in first}
        dtypes: dict[tuple[str, ...], np.dtype[Any]] = {}
        for index, sample in seen:
            if sample.keys() != first.keys():
                raise LayoutError(
                    f"has the features {_names(sample)}, but sample {first_index} has {_names(first)}", sample=index
                )
            for path, leaf in sample.items():
                try:
                    array = _as_array(Feature(path, ()), leaf)
                except LayoutError as error:
                    raise error.at(index) from None
                known = dtypes.setdefault(path, array.dtype)
                shapes = columns[path]
                if array.dtype != known or (shapes and len(shapes[0]) != array.ndim):
                    raise LayoutError(
                        f"is {array.dtype}{list(array.shape)}, but {known} of rank {len(shapes[0])} in sample "
                        f"{first_index}: cast or reshape with .map()",
                        path="/".join(path),
                        sample=index,
                    )
                shapes.append(array.shape)
        layout = cls.of(_infer_features(columns, dtypes))
        layout.require_axes()
        return layout

    @classmethod
    def from_tfds(
        cls,
        features: Any,
        *,
        only: Collection[str] | str | None = None,
        without: Collection[str] | str = (),
        pad_values: Tree | None = None,
    ) -> Layout:
        """Takes the layout from what a TFDS data set declares: `Layout.from_tfds(builder.info.features)`.

        Each size that is None is an axis of its own, named after its feature, with `_h`, `_w` or a number where several of its
        sizes vary; the features of one `Sequence` share an axis. Text has an axis of UTF-8 bytes, as `TfdsSource` gives it.
        Axes that agree although nothing declares it are for you to name in a layout of your own, or for `infer` to find.

        Args:
            features: a `tfds.features.FeaturesDict`.
            only: the features to take, by name, as in `"objects/bbox"`; a name takes all that is under it. All if not given.
            without: features to leave out, such as a text that only names the sample.
            pad_values: see `Layout`.

        Raises:
            LayoutError: with the reason for each, for features that no array holds: ragged ones, lists of texts, data sets in
                samples, optional ones; or when nothing varies.
            MissingExtraError: without tensorflow-datasets.
        """
        from shapebucket.tfds_features import tfds_notation

        layout = cls(tfds_notation(features, only, without), pad_values=pad_values)
        layout.require_axes()
        return layout

    @cached_property
    def axis_sets(self) -> list[tuple[str, ...]]:
        """The distinct sets of axes among the features, with repetitions, sorted: what `elements` counts."""
        return sorted({tuple(sorted(feature.axes)) for feature in self.features if feature.axes})

    @cached_property
    def _checks(self) -> list[tuple[Feature, np.dtype[Any] | None, tuple[int, ...]]]:
        """For each feature its dtype, and for each dimension the axis' position, or ~size where it is fixed."""
        return [
            (
                feature,
                feature.dtype,
                tuple(self.axes.index(dim) if isinstance(dim, str) else ~dim for dim in feature.dims),
            )
            for feature in self.features
        ]

    @cached_property
    def _flat_keys(self) -> list[str] | None:
        """The features' keys, if no feature is nested."""
        nested = any(len(feature.path) > 1 for feature in self.features)
        return None if nested else [feature.path[0] for feature in self.features]

    @cached_property
    def _skeleton(self) -> dict[str, Any]:
        return self.to_tree([None] * len(self.features))

    def require_axes(self) -> None:
        """Raises LayoutError if nothing varies."""
        if not self.axes:
            raise LayoutError(
                "no axis varies: give at least one dimension a name, as in {'tokens': 's'}. "
                "If all samples have one shape, no buckets are needed"
            )

    @property
    def has_dtypes(self) -> bool:
        """Whether every feature's dtype is known."""
        return all(feature.dtype is not None for feature in self.features)

    def with_dtypes(self, sample: Tree) -> Layout:
        """Returns this layout with the dtypes it lacks taken from a sample.

        Raises:
            LayoutError: if the sample does not fit the layout.
        """
        arrays, _ = self.check(sample)
        pairs = zip(self.features, arrays, strict=True)
        return Layout.of(_checked_pad(replace(feature, dtype=array.dtype)) for feature, array in pairs)

    def with_dtypes_of(self, other: Layout) -> Layout | None:
        """Returns this layout with the dtypes it lacks taken from another of the same features and dimensions.

        Returns:
            None where the two do not go together: another feature, dimension, or dtype.
        """
        if len(self.features) != len(other.features):
            return None
        features: list[Feature] = []
        for mine, theirs in zip(self.features, other.features, strict=True):
            dtype = mine.dtype or theirs.dtype
            if (mine.path, mine.dims) != (theirs.path, theirs.dims) or (theirs.dtype or dtype) != dtype:
                return None
            features.append(_checked_pad(replace(mine, dtype=dtype)))
        return Layout.of(features)

    def check(self, sample: Tree) -> tuple[list[npt.NDArray[Any]], tuple[int, ...]]:
        """Checks a sample against the layout.

        Args:
            sample: a dict of arrays, nested as the layout. Python and numpy numbers count as arrays of rank 0; Python's
                are read as JAX reads them, int32 and float32, where the layout has no dtype.

        Returns:
            Its leaves as arrays in the order of `features`, and its lengths in the order of `axes`.

        Raises:
            LayoutError: naming the leaf and what to do, if the sample does not fit.
        """
        arrays: list[npt.NDArray[Any]] = []
        sizes = [-1] * len(self.axes)
        for (feature, dtype, slots), leaf in zip(self._checks, self._leaves(sample), strict=True):
            plain = type(leaf) is np.ndarray and leaf.dtype == dtype
            array = cast("npt.NDArray[Any]", leaf) if plain else _as_array(feature, leaf)
            arrays.append(array)
            shape = array.shape
            if len(shape) != len(slots):
                raise LayoutError(
                    f"has rank {array.ndim} (shape {shape}), but the layout says "
                    f"{feature.notation!r}, rank {len(feature.dims)}",
                    path=feature.name,
                )
            for slot, size in zip(slots, shape, strict=True):
                if slot < 0:
                    if size != ~slot:
                        raise self._wrong_size(feature, shape, sizes)
                elif sizes[slot] < 0:
                    sizes[slot] = size
                elif sizes[slot] != size:
                    raise self._wrong_size(feature, shape, sizes)
        return arrays, tuple(sizes)

    def lengths(self, sample: Tree) -> tuple[int, ...]:
        """Returns the sample's length on each axis, in elements, in the order of `axes`.

        Raises:
            LayoutError: if the sample does not fit the layout.
        """
        return self.check(sample)[1]

    def named(self, lengths: Iterable[Any]) -> dict[str, int]:
        """Returns lengths in the order of `axes` by name, as messages show them."""
        return {axis: int(length) for axis, length in zip(self.axes, lengths, strict=True)}

    def elements(self, lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Counts the elements that a row of the given lengths computes on: the project's unit of work.

        For each distinct set of axes among the features, the product of its lengths; these are summed. Two features
        over one axis (tokens and labels) are one set, so a token counts once; constant sizes (channels) do not count.

            elements(s, t)  =  s + t      for {"src": "s", "tgt": "t", "weights": "s"}
            elements(h, w)  =  h · w      for {"image": "h w 3"}

        Args:
            lengths: integers [..., A].

        Returns:
            int64 [...].
        """
        table = np.asarray(lengths, np.int64)
        total = np.zeros(table.shape[:-1], np.int64)
        for axes in self.axis_sets:
            product = np.ones_like(total)
            for axis in axes:
                product = product * table[..., self.axes.index(axis)]
            total += product
        return total

    def to_tree(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Builds a nested dict with the layout's structure from one value for each feature."""
        tree: dict[str, Any] = {}
        for feature, leaf in zip(self.features, leaves, strict=True):
            node = tree
            for key in feature.path[:-1]:
                node = node.setdefault(key, {})
            node[feature.path[-1]] = leaf
        return tree

    def to_json(self) -> dict[str, Any]:
        """Returns the layout as JSON values; `from_json` takes them back."""
        return {
            "features": [
                {"path": list(feature.path), "notation": feature.notation, "pad_value": feature.pad_value}
                for feature in self.features
            ]
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layout:
        """Makes a layout from what `to_json` returned."""
        return cls.of(_parse(tuple(item["path"]), item["notation"], item["pad_value"]) for item in value["features"])

    def __str__(self) -> str:
        return ", ".join(f"{feature.name}: {feature.notation!r}" for feature in self.features)

    def _leaves(self, sample: Tree) -> list[Any]:
        """Returns the sample's leaves in the order of `features`."""
        keys = self._flat_keys
        if keys is not None and type(sample) is dict and len(sample) == len(keys):
            try:
                return [sample[key] for key in keys]
            except KeyError:
                pass  # the slow way says which
        leaves: list[Any] = []
        self._collect(self._skeleton, sample, (), leaves)
        return leaves

    def _collect(self, node: Tree, sample: Any, path: tuple[str, ...], leaves: list[Any]) -> None:
        """Appends the sample's leaves in the order of `features`."""
        if not isinstance(sample, Mapping):
            where = f"at {'/'.join(path)!r} " if path else ""
            raise LayoutError(
                f"a sample must be a dict of arrays {where}with the features {_names(dict(_walk(node)))}, but got "
                f"{type(sample).__name__}: wrap it, as in ds.map(lambda x: {{'tokens': x}})"
            )
        found = cast(Tree, sample)
        if found.keys() != node.keys():
            raise _wrong_keys(node, found, path)
        for key, child in node.items():
            if isinstance(child, dict):
                self._collect(cast(Tree, child), found[key], (*path, key), leaves)
            else:
                leaves.append(found[key])

    def _wrong_size(self, feature: Feature, shape: tuple[int, ...], sizes: Sequence[int]) -> LayoutError:
        """Explains the first dimension that is not as the layout says, given the axes' sizes so far."""
        known = self.named(sizes)
        expected = feature.shape(known)
        position = next(i for i, (one, other) in enumerate(zip(shape, expected, strict=True)) if one != other)
        dim = feature.dims[position]
        if isinstance(dim, int):
            problem = (
                f"has size {shape[position]} in dimension {position} (shape {shape}), but the layout "
                f"{feature.notation!r} fixes it at {dim}: give the dimension a name if it varies"
            )
        else:
            holder = next(other.name for other in self.features if dim in other.axes)
            where = "an earlier dimension of it" if holder == feature.name else repr(holder)
            problem = (
                f"has length {shape[position]} on axis {dim!r} (shape {shape}), but {where} has {known[dim]}: features "
                "that share an axis must agree on it in every sample; give them different axes if they do not"
            )
        return LayoutError(problem, path=feature.name)


def _walk(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the leaves of nested dicts with their paths, in sorted order."""
    if not isinstance(tree, Mapping):
        if not path:
            raise LayoutError(
                f"a sample must be a dict of arrays, but got {type(tree).__name__}: wrap it, as in "
                "ds.map(lambda x: {'tokens': x})"
            )
        yield path, tree
        return
    branch = cast(Mapping[Any, Any], tree)
    for key in branch:
        if not isinstance(key, str):
            raise LayoutError(f"keys must be strings, but {'/'.join(path) or 'the sample'} has the key {key!r}")
    for key in sorted(branch):
        yield from _walk(branch[key], (*path, key))


def _names(leaves: Iterable[tuple[str, ...]]) -> str:
    return "[" + ", ".join("/".join(path) for path in leaves) + "]"


def _wrong_keys(node: Tree, found: Tree, path: tuple[str, ...]) -> LayoutError:
    missing = sorted(node.keys() - found.keys())
    extra = sorted(map(str, found.keys() - node.keys()))
    problems = [f"lacks {missing}, which the layout has"] if missing else []
    problems += [f"has {extra}, which the layout has not"] if extra else []
    return LayoutError(
        f"the sample {' and '.join(problems)}: mend the layout, or make the samples fit it with .map()",
        path="/".join(path),
    )


def _parse(path: tuple[str, ...], notation: Any, pad_value: Scalar) -> Feature:
    """Reads one feature's notation."""
    name = "/".join(path)
    match = _NOTATION.fullmatch(notation) if isinstance(notation, str) else None
    if match is None:
        raise LayoutError(
            f"cannot read the notation {notation!r}: write dimensions separated by spaces, names for those that vary "
            "and numbers for those that do not, as in 's', 'h w 3', '', or with a dtype, 'int32[s]'",
            path=name,
        )
    dims: list[str | int] = []
    for word in (match["bare"] if match["dtype"] is None else match["inside"]).split():
        if word.isdecimal():
            dims.append(int(word))
        elif word.isidentifier():
            dims.append(word)
        else:
            raise LayoutError(
                f"{word!r} in {notation!r} is neither an axis name nor a size; dimensions are separated by spaces",
                path=name,
            )
    dtype = None if match["dtype"] is None else _dtype(match["dtype"], name)
    return _checked_pad(Feature(path, tuple(dims), dtype, pad_value))


def _dtype(name: str, path: str) -> np.dtype[Any]:
    """Returns the dtype of a name, those of ml_dtypes (bfloat16, float8…) included."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # a dependency of jaxlib

        kind = getattr(ml_dtypes, name, None)
        if kind is None:
            raise LayoutError(f"{name!r} is not a dtype", path=path) from None
        return np.dtype(kind)


def _checked_pad(feature: Feature) -> Feature:
    """Returns the feature if its dtype can hold its pad value."""
    value, dtype = feature.pad_value, feature.dtype
    if not isinstance(value, bool | int | float):
        raise LayoutError(f"the pad value {value!r} must be a Python number", path=feature.name)
    if dtype is not None:
        with np.errstate(all="ignore"):
            held = np.array(value).astype(dtype)
        nan = isinstance(value, float) and math.isnan(value)
        if not (held == value or (nan and held != held)):
            raise LayoutError(f"the pad value {value!r} does not fit its dtype {dtype}", path=feature.name)
        if not nan and dtype.kind != "c":
            return replace(feature, pad_value=held.item())  # 0 and 0.0 are one pad value of a float feature
    return feature


def _as_array(feature: Feature, leaf: Any) -> npt.NDArray[Any]:
    """Returns the leaf as an array of the feature's dtype; never changes a dtype that the leaf already has."""
    if type(leaf) in _PYTHON_SCALARS:
        return _scalar_as_array(feature, leaf)
    if isinstance(leaf, list | tuple):
        raise LayoutError(
            f"is a Python {type(leaf).__name__}, where an array belongs: JAX takes a list for a tree of scalars. Convert "
            "it before bucketing, as in ds.map(lambda x: {**x, 'tokens': np.asarray(x['tokens'], np.int32)}). TFDS reads "
            "Sequence(scalar) features so; Tensor(shape=(None,)) reads as an array",
            path=feature.name,
        )
    if isinstance(leaf, str | bytes):
        raise LayoutError(
            f"is text ({type(leaf).__name__}), which has no numeric dtype: tokenise it with .map(), or drop the feature",
            path=feature.name,
        )
    if leaf is None or not hasattr(leaf, "__array__") or isinstance(leaf, np.ma.MaskedArray):
        raise LayoutError(f"is {type(leaf).__name__}, where an array belongs", path=feature.name)
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise LayoutError(f"cannot be made a numpy array: {error}", path=feature.name) from error
    if array.dtype.kind in "OSUMm" or array.dtype.type is np.void or not array.dtype.isnative:
        raise LayoutError(
            f"is an array of dtype {array.dtype}, which JAX cannot hold: make it an array of numbers"
            + (" (an object array often comes from rows of unequal length)" if array.dtype.kind == "O" else ""),
            path=feature.name,
        )
    if feature.dtype is not None and array.dtype != feature.dtype:
        raise LayoutError(
            f"has dtype {array.dtype}, but the layout says {feature.dtype}: cast it with .map(), since another dtype "
            "means another compile",
            path=feature.name,
        )
    return array


def _scalar_as_array(feature: Feature, leaf: Scalar) -> npt.NDArray[Any]:
    dtype = feature.dtype or np.dtype(_PYTHON_SCALARS[type(leaf)])
    try:
        with np.errstate(all="raise"):
            array = np.asarray(leaf, dtype)
        rounded = isinstance(leaf, float) and dtype.kind not in "biu"  # floats may round, whole numbers may not
        lossless = rounded or array.item() == leaf
    except (OverflowError, FloatingPointError):
        lossless = False
        array = np.asarray(0, dtype)
    if not lossless:
        raise LayoutError(f"is the Python number {leaf!r}, which {dtype} cannot hold", path=feature.name)
    return array


def _infer_features(
    columns: Mapping[tuple[str, ...], list[tuple[int, ...]]], dtypes: Mapping[tuple[str, ...], np.dtype[Any]]
) -> Iterator[Feature]:
    """Names the axes: columns of sizes that are equal in all samples are one axis."""
    axis_of: dict[tuple[int, ...], str] = {}
    for path, shapes in columns.items():
        sizes = list(zip(*shapes, strict=True))
        varying = [number for number, column in enumerate(sizes) if len(set(column)) > 1]
        dims: list[str | int] = []
        for number, column in enumerate(sizes):
            if number not in varying:
                dims.append(column[0])
                continue
            if column not in axis_of:
                axis_of[column] = axis_name(path, number if len(varying) > 1 else None, axis_of.values())
            dims.append(axis_of[column])
        yield Feature(path, tuple(dims), dtypes[path])
