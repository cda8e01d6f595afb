"""Sources whose records may be broken: naming the record, or leaving it out and counting it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from shapebucket.errors import LengthsError, RecordError
from shapebucket.sampling import has_random_access

OnError = Literal["error", "skip"]
_log = logging.getLogger("shapebucket")
_ENVIRONMENT = (OSError, MemoryError)  # of the machine, not of the record: never skipped


class RecordSource:
    """A source that says which record of which file cannot be read, or gives None in its place and counts it.

        RecordSource(grain.sources.ArrayRecordDataSource(files), on_error="skip")

    `measure` takes None for an absent sample, and a schedule from those lengths leaves it out: both count it. A stream counts
    it behind `to_iter_dataset(allow_nones=True)`.
    """

    def __init__(self, source: Any, *, on_error: OnError = "error") -> None:
        """Wraps a source; reads nothing.

        Args:
            source: anything with `len` and `[]`. Files are named for Grain's ArrayRecord source and those of TFDS.
            on_error: what becomes of a record that cannot be read: `"error"`, or `"skip"`, which logs it. Errors of the file
                system are never skipped.

        Raises:
            LengthsError: for a source without random access, or another `on_error`.
        """
        if not has_random_access(source):
            raise LengthsError(f"RecordSource takes a source with len and [], but got {type(source).__name__}")
        if on_error not in get_args(OnError):
            raise LengthsError(f"on_error must be one of {get_args(OnError)}, but got {on_error!r}")
        self.source = source
        self.on_error: OnError = on_error
        self._skipped: set[int] = set()
        self._lock = threading.Lock()

    @property
    def skipped(self) -> list[int]:
        """The indices of the records that were skipped, in this process; worker processes have lists of their own."""
        with self._lock:
            return sorted(self._skipped)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.source[index]
        except (IndexError, *_ENVIRONMENT):
            raise
        except Exception as error:
            return self._broken(int(index), error)

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Reads several records at once; one by one if any of them is broken."""
        if hasattr(self.source, "__getitems__"):
            try:
                return self.source.__getitems__(indices)
            except _ENVIRONMENT:
                raise
            except Exception as error:
                _log.debug("reading %d records one by one: %s", len(indices), error)
        return [self[index] for index in indices]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def _broken(self, index: int, error: Exception) -> None:
        """Notes a record that cannot be read.

        Raises:
            RecordError: unless it is to be skipped.
        """
        problem = RecordError(index, f"{type(error).__name__}: {error}", _place(self.source, index))
        if self.on_error == "error":
            raise problem from error
        with self._lock:
            new = index not in self._skipped
            self._skipped.add(index)
        if new:
            _log.warning("skipped %s, which cannot be read: %s", problem.where, problem.reason)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.source, self.on_error)

    def __repr__(self) -> str:
        return f"RecordSource({self.source!r}, on_error={self.on_error!r})"


def _made(source: Any, on_error: OnError) -> RecordSource:
    return RecordSource(source, on_error=on_error)


def _place(source: Any, index: int) -> tuple[str, int] | None:
    """Returns the file of a record and its number there, from 0, where they are known."""
    if hasattr(source, "dataset_info"):
        parts = [
            (str(each.filename), each.skip, each.examples_in_shard - each.skip if each.take < 0 else each.take)
            for each in source.dataset_info.splits[source.split].file_instructions
        ]
    elif hasattr(source, "paths"):
        parts = [(str(path), 0, _count(path)) for path in source.paths]
    else:
        return None
    if sum(count for _, _, count in parts) != len(source):
        return None  # parts of files
    for file, skip, count in parts:
        if index < count:
            return file, skip + index
        index -= count
    return None


def _count(path: Any) -> int:
    """Returns the number of records in an ArrayRecord file."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(path))
    try:
        return reader.num_records()
    finally:
        reader.close()
