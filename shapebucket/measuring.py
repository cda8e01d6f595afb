"""measure: taking the lengths of every sample of a data set."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from shapebucket.errors import LayoutError, LengthsError
from shapebucket.layout import Layout, Tree
from shapebucket.lengths import ABSENT, LengthTable
from shapebucket.sampling import has_random_access, some
from shapebucket.tables import track

_CHUNK = 1024
_INFERRED_FROM = 256
_PROBES = 16
_SAVE_EVERY = 30.0  # seconds


def measure(
    dataset: Sequence[Tree | None] | Iterable[Tree],
    layout: Layout | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> LengthTable:
    """Takes the lengths of every sample of a data set.

    Args:
        dataset: samples: a `grain.MapDataset` or `grain.IterDataset` before `.repeat()` and `.batch()`, a TFDS data
            source (read in chunks through its `__getitems__`), a list, or any iterable that ends.
        layout: which axes vary; inferred from samples if not given.
        path: a file to keep the lengths in (`.npz`). If it is there, it is read in place of the data set, if that is still the
            one it was taken from: as long, of the same layout, and with the same content in a few samples. A run that was
            interrupted goes on where it last saved, twice a minute.
        progress: whether to show a progress bar on standard error.

    Returns:
        The table, in the data set's order, with the layout and its dtypes.

    Raises:
        LayoutError: with the sample's index, if one does not fit the layout.
        LengthsError: for a data set without samples, or a `MapDataset` without end (an iterable without end cannot be told
            from a long one, and is read for ever); or if the file is of another data set.
    """
    total = _checked_length(dataset, layout)
    if layout is None:
        seen: list[Any] = []
        if isinstance(dataset, Iterator):  # what infer takes from it must be measured too
            seen = list(itertools.islice(dataset, _INFERRED_FROM))
            dataset = itertools.chain(seen, dataset)
        layout = Layout.infer(cast(Sequence[Tree], seen or dataset), samples=_INFERRED_FROM)
    layout.require_axes()
    keep = None if path is None else _Keep(Path(path), dataset, total, layout)
    if keep is not None and (whole := keep.load(keep.path)) is not None:
        return whole
    begun = None if keep is None else keep.load(keep.partial)
    rows: list[tuple[int, ...]] = []
    if begun is not None:
        rows, layout = list(map(tuple, begun.values.tolist())), begun.layout or layout
    absent = (ABSENT,) * len(layout.axes)
    samples = enumerate(_samples(dataset, total, len(rows)), start=len(rows))
    saved = time.monotonic()
    for index, sample in track(samples, "measure", total=total, done=len(rows), enabled=progress):
        if sample is None:
            rows.append(absent)
            continue
        try:
            if not layout.has_dtypes:
                layout = layout.with_dtypes(sample)
            rows.append(layout.lengths(sample))
        except LayoutError as error:
            raise error.at(index) from None
        if keep is not None and time.monotonic() - saved > _SAVE_EVERY:
            keep.save(LengthTable(layout.axes, np.array(rows, np.int32), layout), keep.partial)
            saved = time.monotonic()
    if all(row == absent for row in rows):
        raise LengthsError(
            f"the data set has no samples: it gave {len(rows)} elements"
            + (", all absent (None): look at its filters" if rows else "; an iterator that was read before gives none")
        )
    table = LengthTable(layout.axes, np.array(rows, np.int32), layout)
    if keep is not None:
        keep.save(table, keep.path)
        keep.partial.unlink(missing_ok=True)
    return table


class _Keep:
    """The files that lengths are kept in, and what tells the data set that they are of."""

    def __init__(self, path: Path, dataset: Any, total: int | None, layout: Layout) -> None:
        if isinstance(dataset, Iterator):
            raise LengthsError(
                "an iterator cannot be told from another: give path with a data set that can be read again"
            )
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self._source = {
            "length": total,
            "dimensions": {feature.name: list(feature.dims) for feature in layout.features},
            "content": _content(dataset),
        }

    def load(self, path: Path) -> LengthTable | None:
        """Returns the lengths in a file, None if it is not there.

        Raises:
            LengthsError: if they are of another data set.
        """
        if not path.exists():
            return None
        table, source = LengthTable.load_with_source(path)
        names = {"length": "number of elements", "dimensions": "layout", "content": "content of samples"}
        changed = [
            name for key, name in names.items() if not isinstance(source, dict) or source.get(key) != self._source[key]
        ]
        if changed:
            raise LengthsError(
                f"the lengths in {os.fspath(path)!r} are of another data set (another {', '.join(changed)}): delete the file, "
                "or give another path"
            )
        return table

    def save(self, table: LengthTable, path: Path) -> None:
        """Writes lengths to a file."""
        table.save(path, source=self._source)


def _content(dataset: Any) -> str:
    """Returns a hash of a few samples: evenly spaced, or the first ones of an iterable."""
    digest = hashlib.sha256()
    for _, sample in some(dataset, _PROBES):
        _update(digest, sample)
    return digest.hexdigest()[:16]


def _update(digest: Any, node: Any) -> None:
    """Adds a sample to a hash."""
    if isinstance(node, Mapping):
        for key in sorted(cast(Mapping[str, Any], node)):
            digest.update(repr(key).encode())
            _update(digest, node[key])
    else:
        array = np.asarray(node)
        digest.update(
            f"{array.dtype}{array.shape}".encode() + (array.tobytes() if array.dtype != object else repr(node).encode())
        )


def _checked_length(dataset: Any, layout: Any) -> int | None:
    """Returns the number of elements where it is known; raises LengthsError for what cannot be measured."""
    if layout is not None and not isinstance(layout, Layout):
        raise LengthsError(f"measure() takes a Layout, as in Layout({layout!r}), but got {type(layout).__name__}")
    if isinstance(dataset, Mapping) or not (hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")):
        raise LengthsError(
            f"measure() takes samples, a data set or an iterable of dicts, but got {type(dataset).__name__}; lengths that are "
            "known go to plan_buckets as they are"
        )
    total = len(dataset) if hasattr(dataset, "__len__") else None
    if total is not None and total >= sys.maxsize:
        raise LengthsError("the data set has no end: measure it before .repeat()")
    return total


def _samples(dataset: Any, total: int | None, first: int) -> Iterator[Tree | None]:
    """Yields the elements from the first on in order, absent ones as None."""
    at, count = first, 1  # what is being read
    try:
        if total is None or not has_random_access(dataset):
            at = 0
            for sample in dataset:
                if at >= first:
                    yield sample
                at += 1  # noqa: SIM113 (the number of the one that fails, not of the last that came)
        elif hasattr(dataset, "__getitems__"):
            for at in range(first, total, _CHUNK):
                count = min(_CHUNK, total - at)
                yield from dataset.__getitems__(list(range(at, at + count)))
        else:
            for at in range(first, total):
                yield dataset[at]
    except Exception as error:
        which = f"sample {at}" if count == 1 else f"the samples {at} to {at + count - 1}"
        error.add_note(f"shapebucket: while measure() read {which}")
        raise
