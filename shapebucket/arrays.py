"""Samples as TFDS and tf.data give them, as dicts of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shapebucket.errors import LayoutError
from shapebucket.layout import Feature, Layout

_TEXT = "OSU"


def as_arrays(sample: Any, layout: Layout) -> dict[str, Any]:
    """Returns the layout's features of a sample, as arrays of its dtypes: for samples of lists, text and Python's numbers.

        ds.map(functools.partial(as_arrays, layout=Layout({"tokens": "int32[s]"})))

    Text becomes its UTF-8 bytes where the layout has one axis of uint8. Numbers of another dtype are converted: floats may
    be rounded, whole numbers may not change. Features that the layout lacks are left out.

    Args:
        sample: a dict, nested as the layout is, as TFDS, tf.data, Hugging Face `datasets` or a database give it.
        layout: the features to take. Where it has no dtype, an array keeps its own.

    Raises:
        LayoutError: naming the feature, if the sample lacks one, for lists of unequal lists or of text, for numbers that the
            layout's dtype cannot hold, or for text where the layout has no axis of bytes.
    """
    return layout.to_tree([as_array(feature, _leaf(feature, sample)) for feature in layout.features])


def is_text(feature: Feature) -> bool:
    """Whether a feature can hold a text: one axis of bytes."""
    return len(feature.dims) == 1 and feature.dtype in (None, np.uint8)


def _leaf(feature: Feature, sample: Any) -> Any:
    node = sample
    for key in feature.path:
        if not isinstance(node, Mapping) or key not in node:
            raise LayoutError(f"is not in the sample, which is {_described(sample)}", path=feature.name)
        node = cast(Mapping[str, Any], node)[key]
    return node


def _described(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return f"a dict with {sorted(map(str, cast(Mapping[Any, Any], sample)))}"
    return f"{type(sample).__name__}, no dict"


def as_array(feature: Feature, leaf: Any) -> Any:
    """Does for one feature what `as_arrays` does for a sample."""
    if isinstance(leaf, np.ndarray | np.generic):
        return _of_dtype(feature, np.asarray(cast(Any, leaf)))
    if isinstance(leaf, bytes | str):
        if not is_text(feature):
            raise LayoutError(
                f"is text, but the layout says {feature.notation!r}: make tokens of it with .map(), or write 'uint8[…]' for "
                "its bytes",
                path=feature.name,
            )
        return np.frombuffer(leaf if isinstance(leaf, bytes) else leaf.encode(), np.uint8)
    if isinstance(leaf, list):
        return _from_list(feature, cast("list[Any]", leaf))
    if type(leaf) in (bool, int, float) and feature.dtype is not None:
        return _of_dtype(feature, np.asarray(leaf))
    return leaf


def _from_list(feature: Feature, leaf: list[Any]) -> npt.NDArray[Any]:
    if not leaf:
        return np.empty([dim if isinstance(dim, int) else 0 for dim in feature.dims], feature.dtype)
    try:
        array = np.array(leaf)
    except ValueError:
        array = np.array(None)
    if array.dtype.kind in _TEXT:
        raise LayoutError(
            "is a list that makes no array of numbers (ragged, or of text): leave the feature out of the layout, or make an "
            "array of it with .map()",
            path=feature.name,
        )
    return _of_dtype(feature, array)


def _of_dtype(feature: Feature, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns numbers in the layout's dtype: floats may be rounded, whole numbers may not."""
    dtype = feature.dtype
    if dtype is None or array.dtype == dtype or array.dtype.kind not in "biuf":
        return array
    with np.errstate(all="ignore"):
        cast_array = array.astype(dtype)
    rounds = array.dtype.kind == "f" and dtype.kind not in "biu"
    if not rounds and not np.array_equal(cast_array, array):
        raise LayoutError(
            f"holds numbers of {array.dtype} that {dtype} cannot hold: write another dtype in the layout",
            path=feature.name,
        )
    return cast_array
