"""measure: taking the lengths of every sample of a data set."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shapebucket.errors import LayoutError, LengthsError
from shapebucket.flags import mark_flags_parsed
from shapebucket.layout import Layout, Tree
from shapebucket.lengths import LengthTable
from shapebucket.ruler import LengthFn, Rows, Ruler
from shapebucket.sampling import has_random_access, note_reading, read_range, some
from shapebucket.tables import track

_CHUNK = 256  # samples that are read at once
_INFERRED_FROM = 256
_PROBES = 16
_SAVE_EVERY = 30.0  # seconds


def measure(
    dataset: Sequence[Any] | Iterable[Any] | Mapping[str, npt.ArrayLike] | npt.NDArray[Any],
    layout: Layout | None = None,
    *,
    length_fn: LengthFn | None = None,
    workers: int = 0,
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> LengthTable:
    """Takes the lengths of every sample of a data set.

    Args:
        dataset: samples: a `grain.MapDataset` or `grain.IterDataset` before `.repeat()` and `.batch()`, a TFDS data
            source (read in chunks through its `__getitems__`), a list, or any iterable that ends. Or lengths that are known:
            a dict of arrays [N] by axis, or, for one axis, an array [N].
        layout: which axes vary; inferred from samples if not given.
        length_fn: gives the lengths of a sample in place of the layout: an integer (one axis, "s" where no layout names it), a
            sequence in the order of the layout's axes, or a dict by axis. For sources whose samples carry their lengths,
            so that nothing need be decoded: the data set may then be of raw samples, in the order of the decoded ones.
        workers: processes to read with; 0 reads in this one. For data sets with `len` and `[]`, which Grain's worker processes
            then read: a script needs `if __name__ == "__main__":`.
        path: a file to keep the lengths in (`.npz`). If it is there, it is read in place of the data set, if that is still the
            one it was taken from: as long (where it has a length), of the same layout, and with the same content and lengths in
            16 samples. That finds another data set, not one changed sample: delete the file after such a change, or one of
            `length_fn`. A run that was interrupted goes on where it last saved: at an error, and twice a minute. Lengths
            that are known go to a new file alone.
        progress: whether to show a progress bar on standard error.

    Returns:
        The table, in the data set's order, with the layout and its dtypes. Its `histogram` is enough to plan from.

    Raises:
        LayoutError: with the sample's index, if one does not fit the layout.
        LengthsError: for a data set without samples, or a `MapDataset` without end (an iterable without end cannot be told
            from a long one, and is read for ever); for lengths that are none; or if the file is of another data set.
    """
    if layout is not None and not isinstance(layout, Layout):
        raise LengthsError(f"measure() takes a Layout, as in Layout({layout!r}), but got {type(layout).__name__}")
    if isinstance(dataset, Mapping | np.ndarray):
        if length_fn is not None or workers:
            raise LengthsError("lengths that are known are not read: leave length_fn and workers out")
        return _known(dataset, layout, path)
    total = _checked_length(dataset)
    _check_workers(workers, dataset)
    if not has_random_access(dataset) and iter(dataset) is iter(dataset):
        dataset = iter(dataset)  # it gives each sample once, however often it is asked
    dataset, ruler = _ruler(dataset, layout, length_fn)
    keep = None if path is None else _Keep(Path(path), dataset, total, ruler)
    if keep is not None and (whole := keep.load(keep.path)) is not None:
        return whole
    begun = None if keep is None else keep.load(keep.partial)
    parts = [] if begun is None else [begun.values]
    done = sum(map(len, parts))
    rows = _rows(dataset, ruler, total, done, workers)
    try:
        for part in track(rows, "measure", total=total, done=done, enabled=progress, size=len):
            parts.append(part)
            if keep is not None:
                keep.save_part(parts, ruler)
    except BaseException as error:
        if keep is not None and parts:
            keep.save_part(parts, ruler, now=True)
            error.add_note(f"shapebucket: {sum(map(len, parts)):,} lengths are kept; measure goes on there")
        raise
    finally:
        rows.close()
    table = ruler.table(parts)
    if total is not None and len(table) != total:
        raise LengthsError(f"the data set has a length of {total:,}, but gave {len(table):,} elements")
    if not table.present.any():
        raise LengthsError(
            f"the data set has no samples: it gave {len(table)} elements"
            + (
                ", all absent (None): look at its filters"
                if len(table)
                else "; an iterator that was read before gives none"
            )
        )
    return table if keep is None else keep.save(table)


def _ruler(dataset: Any, layout: Layout | None, length_fn: LengthFn | None) -> tuple[Any, Ruler]:
    """Decides how lengths are taken, from the first samples; returns the data set with what was taken from it put back."""
    head: list[Any] = []
    if isinstance(dataset, Iterator):
        head = _take(dataset, 0, _INFERRED_FROM)
        dataset = itertools.chain(head, dataset)
    if length_fn is not None:
        if layout is not None:
            layout.require_axes()
            return dataset, Ruler(layout, layout.axes, length_fn)
        given = next((length_fn(sample) for sample in _first(head, dataset) if sample is not None), 0)
        axes = tuple(given) if isinstance(given, Mapping) else ("s",)
        return dataset, Ruler(None, axes, length_fn)
    if layout is None:
        layout = Layout.infer(cast(Sequence[Tree], head or dataset), samples=_INFERRED_FROM)
    layout.require_axes()
    if not layout.has_dtypes:
        for index, sample in enumerate(_first(head, dataset)):
            if sample is not None:
                try:
                    layout = layout.with_dtypes(sample)
                except LayoutError as error:
                    raise error.at(index) from None
                break
    return dataset, Ruler(layout, layout.axes, None)


def _first(head: list[Any], dataset: Any) -> Iterable[Any]:
    """Returns the samples from the first on, of which an iterator gave `head`."""
    if isinstance(dataset, Iterator):
        return head
    return (dataset[index] for index in range(len(dataset))) if has_random_access(dataset) else dataset


class _Keep:
    """The files that lengths are kept in, and what tells the data set that they are of."""

    def __init__(self, path: Path, dataset: Any, total: int | None, ruler: Ruler) -> None:
        if isinstance(dataset, Iterator):
            raise LengthsError(
                "an iterator cannot be told from another: give path with a data set that can be read again"
            )
        if not path.absolute().parent.is_dir():
            raise LengthsError(f"the lengths cannot be kept in {os.fspath(path)!r}: there is no such folder")
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        dims = {feature.name: list(feature.dims) for feature in ruler.layout.features} if ruler.layout else None
        self._source = {
            "length": total,
            "dimensions": {"axes": list(ruler.axes), "features": dims},
            "content": _content(dataset, ruler),
        }
        self._saved = time.monotonic()

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

    def save_part(self, parts: list[Rows], ruler: Ruler, *, now: bool = False) -> None:
        """Writes what there is, twice a minute."""
        if now or time.monotonic() - self._saved > _SAVE_EVERY:
            parts[:] = [np.concatenate(parts)] if parts else []
            ruler.table(parts).save(self.partial, source={**self._source, "partial": True})
            self._saved = time.monotonic()

    def save(self, table: LengthTable) -> LengthTable:
        """Writes the whole table, and returns it as it is read: mapped where it is large."""
        table.save(self.path, source=self._source)
        self.partial.unlink(missing_ok=True)
        return LengthTable.load(self.path)


def _content(dataset: Any, ruler: Ruler) -> str:
    """Returns a hash of a few samples and their lengths: evenly spaced, or the first ones of an iterable."""
    digest = hashlib.sha256()
    for index, sample in some(dataset, _PROBES):
        _update(digest, sample)
        digest.update(ruler.rows([sample], index).tobytes())
    return digest.hexdigest()[:16]


def _update(digest: Any, node: Any) -> None:
    """Adds a sample to a hash."""
    if isinstance(node, Mapping):
        for key in sorted(cast(Mapping[str, Any], node)):
            digest.update(repr(key).encode())
            _update(digest, node[key])
    elif isinstance(node, list | tuple):
        for each in cast(Sequence[Any], node):
            _update(digest, each)
    else:
        array = np.asarray(node)  # of an object, nothing but its kind is the same in another process
        content = array.tobytes() if array.dtype != object else type(node).__name__.encode()
        digest.update(f"{array.dtype}{array.shape}".encode() + content)


def _known(
    lengths: Mapping[str, npt.ArrayLike] | npt.NDArray[Any], layout: Layout | None, path: str | os.PathLike[str] | None
) -> LengthTable:
    """Makes a table of lengths that are known, and writes it if a path is given."""
    axes = layout.axes if layout else tuple(lengths) if isinstance(lengths, Mapping) else ("s",)
    found = LengthTable.of(lengths, axes)
    table = LengthTable(found.axes, found.values, layout)
    if path is not None:
        if Path(path).exists():
            raise LengthsError(f"there is a file {os.fspath(path)!r} already: delete it, or give another path")
        table.save(path)
    return table


def _checked_length(dataset: Any) -> int | None:
    """Returns the number of elements where it is known; raises LengthsError for what cannot be measured."""
    if not (hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")):
        raise LengthsError(
            "measure() takes samples (a data set or an iterable of dicts) or arrays of lengths, but got "
            f"{type(dataset).__name__}"
        )
    total = len(dataset) if hasattr(dataset, "__len__") else None
    if total == 0:
        raise LengthsError("the data set has no samples: it gave 0 elements")
    if total is not None and total >= sys.maxsize:
        raise LengthsError("the data set has no end: measure it before .repeat()")
    return total


def _check_workers(workers: int, dataset: Any) -> None:
    if not isinstance(workers, int) or workers < 0:
        raise LengthsError(f"workers must be a whole number of processes, 0 for none, but got {workers!r}")
    if workers and not has_random_access(dataset):
        raise LengthsError(
            f"worker processes read a data set by index, but {type(dataset).__name__} has no len() and []: measure the "
            "MapDataset before .to_iter_dataset(), or leave workers out"
        )


def _rows(dataset: Any, ruler: Ruler, total: int | None, first: int, workers: int) -> Generator[Rows]:
    """Yields the lengths of the elements from the first on, in order."""
    if workers and total is not None:
        yield from _in_processes(dataset, ruler, range(first, total, _CHUNK), total, workers)
    else:
        for at, samples in _chunks(dataset, first):
            yield ruler.rows(samples, at)


def _in_processes(dataset: Any, ruler: Ruler, starts: range, total: int, workers: int) -> Generator[Rows]:
    """Yields the lengths chunk by chunk, read by Grain's worker processes."""
    import grain

    mark_flags_parsed()

    def read(start: int) -> Rows:
        return ruler.rows(read_range(dataset, start, min(_CHUNK, total - start)), start)

    chunks = grain.MapDataset.source(starts).map(read)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    iterator = iter(chunks.to_iter_dataset(options).mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)))
    try:
        yield from iterator
    finally:
        iterator.close()


def _chunks(dataset: Any, first: int) -> Iterator[tuple[int, list[Any]]]:
    """Yields the elements from the first on in order, absent ones as None, a chunk at a time with the index of its first."""
    if has_random_access(dataset):
        total = len(dataset)
        for start in range(first, total, _CHUNK):
            yield start, read_range(dataset, start, min(_CHUNK, total - start))
        return
    elements, at = iter(dataset), 0
    while chunk := _take(elements, at, _CHUNK):
        if at + len(chunk) > first:
            yield max(at, first), chunk[max(0, first - at) :]
        at += len(chunk)


def _take(elements: Iterator[Any], at: int, count: int) -> list[Any]:
    """Takes the next elements, of which the first has the given index."""
    taken: list[Any] = []
    try:
        taken.extend(itertools.islice(elements, count))
    except Exception as error:
        note_reading(error, at + len(taken), 1)
        raise
    return taken
