"""Streams of a `tf.data.Dataset`."""

from __future__ import annotations

import importlib
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

import grain
import numpy as np

from shapebucket.arrays import as_array, is_text
from shapebucket.buckets import BucketPlan
from shapebucket.errors import LayoutError, MissingExtraError, ScheduleError, StateError
from shapebucket.layout import Feature, Layout
from shapebucket.loader_report import Overlong, Remainder, check_plan
from shapebucket.loading import BucketedIterDataset

_CHUNK = 32
"""Elements that are read at once: to cross from TensorFlow to Python for each costs more than to bucket it."""


def from_tf_data(
    dataset: Any,
    plan: BucketPlan,
    *,
    deterministic: bool = False,
    max_wait: int | None = None,
    remainder: Remainder = "pad",
    overlong: Overlong = "error",
    lockstep: bool = False,
) -> BucketedIterDataset:
    """Buckets a `tf.data.Dataset` of single samples: what `bucket_by_sequence_length` does, in shapes that are known before.

    Args:
        dataset: see `TfDataIterDataset`.
        plan: the buckets.
        deterministic: see `TfDataIterDataset`; without it, a checkpoint cannot be restored.
        max_wait: see `BucketedIterDataset`.
        remainder: see `BucketedIterDataset`.
        overlong: see `BucketedIterDataset`.
        lockstep: see `BucketedIterDataset`; each process reads its own shard, `dataset.shard(…)`.

    Returns:
        A `BucketedIterDataset`, with its report.

    Raises:
        LayoutError: if the data set's elements are not samples of the plan's layout.
        ScheduleError: see `TfDataIterDataset` and `BucketedIterDataset`.
        MissingExtraError: without TensorFlow.
    """
    check_plan(plan)
    samples = TfDataIterDataset(dataset, plan.layout, deterministic=deterministic)
    return BucketedIterDataset(
        samples, plan, max_wait=max_wait, remainder=remainder, overlong=overlong, lockstep=lockstep
    )


class TfDataIterDataset(grain.IterDataset[dict[str, Any]]):
    """The samples of a `tf.data.Dataset` as dicts of arrays: a source for `measure` and for Grain's stages.

    tf.data can write its own checkpoints, of an iterator and with all that its shuffle buffers hold: megabytes in a file, where
    a state here is a few numbers of JSON. So a state says how many samples were read, and a restore reads and drops as many.
    That is exact only for a data set that gives the same samples in the same order each time it is iterated, which is for
    you to say; the sample before the place is compared, so that a shuffle without a seed is found out, at the restore.
    """

    def __init__(self, dataset: Any, layout: Layout, *, deterministic: bool = False) -> None:
        """Makes the source; reads nothing.

        Args:
            dataset: a `tf.data.Dataset` of dicts of tensors, one sample each, before `batch` and `repeat`. Text (tf.string)
                becomes its UTF-8 bytes where the layout has one axis of uint8. See `as_arrays`.
            layout: the features to read; others are left out.
            deterministic: says that the data set gives the same order each time: shuffled not at all, or with a seed and
                `reshuffle_each_iteration=False`. Without it, a state that is not of the start is refused.

        Raises:
            LayoutError: if the elements are no samples of the layout: a tuple, ragged or sparse, or of another dtype or shape.
            ScheduleError: for what is no `tf.data.Dataset`; or one whose options say that its order is not deterministic.
            MissingExtraError: without TensorFlow.
        """
        super().__init__()
        try:
            tf: Any = importlib.import_module("tensorflow")
        except ModuleNotFoundError as error:
            raise MissingExtraError("tensorflow", "tf") from error
        if not isinstance(dataset, tf.data.Dataset):
            raise ScheduleError(f"from_tf_data takes a tf.data.Dataset of samples, but got {type(dataset).__name__}")
        if not isinstance(layout, Layout):
            raise LayoutError(f"a Layout comes after the tf.data.Dataset, but got {type(layout).__name__}")
        if deterministic and dataset.options().deterministic is False:
            raise ScheduleError(
                "deterministic=True, but the data set's options().deterministic is False: tf.data may change the order"
            )
        _check_spec(dataset.element_spec, layout, tf)
        self.dataset = dataset
        self.layout = layout
        self.deterministic = deterministic
        self._leaves = dataset.map(_picker(layout, tf))
        self._in_chunks = _splits(self._leaves, tf)

    def __iter__(self) -> TfDataIterator:
        return TfDataIterator(self)

    def read(self, start: int) -> Iterator[dict[str, Any]]:
        """Yields the samples from a number on, reading those before, and several at once where their shapes allow it."""
        rows = _rows(self._leaves.skip(start), self._in_chunks)
        for leaves in rows:
            pairs = zip(self.layout.features, leaves, strict=True)
            yield self.layout.to_tree([as_array(feature, leaf) for feature, leaf in pairs])

    def __reduce__(self) -> NoReturn:
        raise ScheduleError(
            "a tf.data.Dataset cannot go to worker processes: leave mp_prefetch out, since tf.data reads in threads of its own"
        )

    def __str__(self) -> str:
        return f"TfDataIterDataset({self.layout})"


class TfDataIterator(grain.DatasetIterator[dict[str, Any]]):
    """The iterator of a `TfDataIterDataset`."""

    def __init__(self, dataset: TfDataIterDataset) -> None:
        super().__init__()
        self._source = dataset
        self._reset()

    def _reset(self) -> None:
        self._samples: Iterator[dict[str, Any]] | None = None
        self._read = 0
        self._latest: Any = None
        self._failure: BaseException | None = None

    def __next__(self) -> dict[str, Any]:
        if self._failure is not None:  # a generator that raised would pass for one that has ended
            raise self._failure.with_traceback(None)
        if self._samples is None:
            self._samples = self._source.read(0)
        try:
            self._latest = next(self._samples)
        except StopIteration:
            raise
        except Exception as error:
            self._failure = error
            raise
        except BaseException as error:
            self._failure = ScheduleError(f"{type(error).__name__} interrupted the reading of sample {self._read}")
            raise
        self._read += 1
        return self._latest

    def get_state(self) -> dict[str, int]:
        """Returns how many samples were read, and a checksum of the last one."""
        return {"read": self._read, "last": _checksum(self._latest, self._source.layout)}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to the place of a state, by reading up to there.

        Raises:
            StateError: for what is no state; or where that would not be exact, since the order is not said to be deterministic,
                or turns out not to be.
        """
        try:
            read, last = state["read"], state["last"]
        except (TypeError, KeyError):
            raise StateError(f"this is no state of a TfDataIterDataset: {str(state)[:80]!r}") from None
        if read and not self._source.deterministic:
            raise StateError(
                f"a tf.data.Dataset is restored by reading the {read:,} samples before again, which is exact only if their "
                "order is the same: say deterministic=True if it is (no shuffle, or one with a seed and "
                "reshuffle_each_iteration=False)"
            )
        self._reset()
        if not read:
            return
        self._samples = self._source.read(read - 1)
        self._read = read - 1
        found = next(self, None)
        if found is None:
            self._failure = StateError(f"the state was saved after {read:,} samples, but the tf.data.Dataset has fewer")
        elif _checksum(found, self._source.layout) != last:
            self._failure = StateError(
                f"sample {read - 1} of the tf.data.Dataset is not the one that the state was saved after: it is another data "
                "set, or gives another order each time (a shuffle without a seed, or without reshuffle_each_iteration=False)"
            )
        if self._failure is not None:
            raise self._failure


def _picker(layout: Layout, tf: Any) -> Any:
    """Returns a function for `dataset.map` from an element to the layout's leaves."""

    def pick(*element: Any) -> tuple[Any, ...]:
        return tuple(_at(element[0], feature.path) for feature in layout.features)

    return tf.autograph.experimental.do_not_convert(pick)


def _splits(leaves: Any, tf: Any) -> bool:
    """Whether `ragged_batch` gives batches that `_column` can take apart: no tensor varies beyond its first dimension."""
    shapes = [spec.shape for spec in leaves.element_spec]
    return all(shape.rank is not None and None not in shape.as_list()[1:] for shape in shapes) and all(
        isinstance(spec, tf.TensorSpec) or spec.ragged_rank == 1 for spec in leaves.ragged_batch(1).element_spec
    )


def _rows(leaves: Any, in_chunks: bool) -> Iterator[Sequence[Any]]:
    """Yields the leaves of one element after the other, as NumPy arrays, scalars and bytes."""
    if not in_chunks:
        yield from leaves.as_numpy_iterator()
        return
    for chunk in leaves.ragged_batch(_CHUNK):
        yield from zip(*map(_column, chunk), strict=True)


def _column(tensor: Any) -> list[Any]:
    """Returns the rows of one leaf; copies, since each would keep the whole chunk in memory while it waits in a bucket."""
    if not hasattr(tensor, "row_splits"):
        return [row.copy() if isinstance(row, np.ndarray) else row for row in tensor.numpy()]
    values, bounds = tensor.values.numpy(), tensor.row_splits.numpy().tolist()
    return [values[start:stop].copy() for start, stop in itertools.pairwise(bounds)]


def _checksum(sample: Any, layout: Layout) -> int:
    """Returns a checksum of a sample's arrays; 0 for None."""
    total = 0
    if sample is None:
        return total
    for feature in layout.features:
        array = np.asarray(_at(sample, feature.path))
        total = zlib.crc32(
            np.ascontiguousarray(array).tobytes(), zlib.crc32(f"{array.dtype}{array.shape}".encode(), total)
        )
    return total


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _check_spec(spec: Any, layout: Layout, tf: Any) -> None:
    """Raises LayoutError for elements that are no samples of a layout."""
    if not isinstance(spec, Mapping):
        raise LayoutError(
            f"the elements of the tf.data.Dataset must be dicts, but are {type(spec).__name__}: make dicts of them, as in "
            "dataset.map(lambda x, y: {'x': x, 'y': y})"
        )
    for feature in layout.features:
        node: Any = spec
        for key in feature.path:
            if not isinstance(node, Mapping) or key not in node:
                raise LayoutError(
                    f"the elements of the tf.data.Dataset do not have it; they have {sorted(cast(Any, spec))}",
                    path=feature.name,
                )
            node = cast(Any, node)[key]
        _check_tensor(node, feature, tf)


def _check_tensor(spec: Any, feature: Feature, tf: Any) -> None:
    if not isinstance(spec, tf.TensorSpec):
        raise LayoutError(
            f"is of {type(spec).__name__}, where a dense tensor is needed: make one of it in dataset.map(…), as by "
            "x.to_tensor() or tf.sparse.to_dense(x), or leave the feature out of the layout",
            path=feature.name,
        )
    shape = spec.shape.as_list() if spec.shape.rank is not None else None
    if spec.dtype == tf.string:
        if shape not in ([], None) or not is_text(feature):
            raise LayoutError(
                f"is of strings, of shape {spec.shape}, but the layout says {feature.notation!r}: a single text is held by "
                "'uint8[…]', with one axis for its bytes; make tokens of others in dataset.map(…)",
                path=feature.name,
            )
        return
    if feature.dtype is not None and not np.can_cast(spec.dtype.as_numpy_dtype, feature.dtype, "same_kind"):
        raise LayoutError(
            f"is of {spec.dtype.name}, but the layout says {feature.notation!r}: cast it, as by tf.cast in dataset.map(…)",
            path=feature.name,
        )
    if shape is not None and not (
        len(shape) == len(feature.dims)
        and all(isinstance(dim, str) or size in (None, dim) for size, dim in zip(shape, feature.dims, strict=True))
    ):
        batched = "; the loader takes single samples: leave batch() out" if len(shape) == len(feature.dims) + 1 else ""
        raise LayoutError(
            f"has shape {spec.shape}, but the layout says {feature.notation!r}{batched}", path=feature.name
        )
