"""Opening data by a name, as the command line has it: TFDS data sets and ArrayRecord files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapebucket.arrays import as_arrays
from shapebucket.errors import LayoutError, LengthsError, MissingExtraError
from shapebucket.layout import Layout
from shapebucket.records import OnError, RecordSource
from shapebucket.sampling import has_random_access

_ARRAY_RECORD = re.compile(r"\.array_?record(-\d+-of-\d+)?[*?]*$")
_TFDS = "tfds:"


def names_samples(source: str) -> bool:
    """Whether a name is one of samples, which `open_samples` opens; else it is that of a file."""
    return source.startswith(_TFDS) or _ARRAY_RECORD.search(source) is not None


def open_samples(
    source: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    layout: Layout | None = None,
    raw: bool = False,
) -> Sequence[Any]:
    """Opens a data set by random access.

    Args:
        source: `tfds:NAME/SPLIT`, where NAME may have a configuration and version, as in `wmt14_translate/de-en:1.0.0`; or one
            or more ArrayRecord files, with `*` and `?` for several in the order of their names.
        data_dir: where TFDS data sets are; TFDS' own default if not given.
        layout: the features of a TFDS data set to read; all if not given.
        raw: whether TFDS samples are as TFDS gives them, with text as bytes and lists of scalars.

    Returns:
        Samples: dicts of arrays for TFDS (a `TfdsSource`), the records' bytes for ArrayRecord files (a `RecordSource`).

    Raises:
        LengthsError: for a source that is not there or cannot be read by random access.
        LayoutError: for TFDS features that no array holds.
        MissingExtraError: if the package that reads it is not installed.
    """
    if source.startswith(_TFDS):
        return _open_tfds(source.removeprefix(_TFDS), data_dir, layout, raw)
    return _open_array_record(source)


@dataclass(frozen=True, init=False)
class TfdsSource:
    """A TFDS data source whose samples are dicts of arrays, as a layout says; for `grain.MapDataset.source` and `measure`.

        TfdsSource(tfds.data_source("my_corpus", split="train"))

    Text becomes its UTF-8 bytes, a list of scalars an array. TensorFlow is not needed.

    Attributes:
        source: the data source.
        layout: the features that are read, and what they are.
        records: the data source's samples, or None for those that cannot be read.
    """

    source: Any
    layout: Layout
    records: RecordSource = field(repr=False)

    def __init__(self, source: Any, layout: Layout | None = None, *, on_error: OnError = "error") -> None:
        """Wraps a data source; reads nothing.

        Args:
            source: what `tfds.data_source` or `builder.as_data_source` gives for one split.
            layout: the features to read, with dtypes; `Layout.from_tfds` of the data source's features if not given.
            on_error: see `RecordSource`; `records.skipped` are the samples that were skipped.

        Raises:
            LengthsError: for what is no data source, or another `on_error`.
            LayoutError: see `Layout.from_tfds`.
        """
        if not (has_random_access(source) and hasattr(source, "dataset_info")):
            splits = ", one split of it: it is a dict of splits" if isinstance(source, Mapping) else ""
            raise LengthsError(
                f"TfdsSource takes a TFDS data source, as tfds.data_source(name, split='train') gives it{splits}; got "
                f"{type(source).__name__}"
            )
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "records", RecordSource(source, on_error=on_error))
        object.__setattr__(self, "layout", layout or Layout.from_tfds(source.dataset_info.features))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        return self._arrays(index, self.records[index])

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any] | None]:
        """Reads several samples at once."""
        return [self._arrays(*pair) for pair in zip(indices, self.records.__getitems__(indices), strict=True)]

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        return (self[index] for index in range(len(self)))  # data sources need not raise IndexError

    def _arrays(self, index: int, sample: Any) -> dict[str, Any] | None:
        try:
            return None if sample is None else as_arrays(sample, self.layout)
        except LayoutError as error:
            raise error.at(index) from None


def _open_tfds(name: str, data_dir: str | os.PathLike[str] | None, layout: Layout | None, raw: bool) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ModuleNotFoundError as error:
        raise MissingExtraError("tensorflow_datasets", "tfds") from error
    name, _, split = name.rpartition("/")
    if not name:
        raise LengthsError(f"a TFDS data set is given as {_TFDS}NAME/SPLIT, with a split, but got {_TFDS + split!r}")
    where = f"the TFDS data set {name!r} in {os.fspath(data_dir) if data_dir else 'the default data_dir (--data-dir)'}"
    try:
        builder: Any = tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        raise LengthsError(f"{where} is not there: {str(error).splitlines()[0]}") from error
    if not builder.info.splits:
        raise LengthsError(
            f"{where} is not prepared: run builder.download_and_prepare(file_format='array_record') first"
        )
    try:
        samples = builder.as_data_source(split=split)
    except NotImplementedError as error:
        raise LengthsError(
            f"{where} is in a format without random access: prepare it with file_format='array_record', in another data_dir; "
            f"or stream it, shapebucket.from_tf_data(tfds.load({name!r}, split={split!r}), plan)"
        ) from error
    except ValueError as error:
        raise LengthsError(f"cannot read the split {split!r} of {where} by random access: {error}") from error
    if raw:
        return RecordSource(samples)
    try:
        return TfdsSource(samples, layout)
    except LayoutError as error:
        error.add_note("on the command line: write a layout of the features that are wanted, --layout")
        raise


def _open_array_record(pattern: str) -> Any:
    path = Path(pattern)
    files = [path] if path.is_file() else sorted(path.parent.glob(path.name))
    if not files:
        raise LengthsError(f"there is no file {pattern!r}")
    import grain

    try:
        source: Any = grain.sources.ArrayRecordDataSource(list(map(str, files)))
        len(source)  # opens the files
    except ModuleNotFoundError as error:
        raise MissingExtraError("array_record", "tfds") from error
    except (RuntimeError, ValueError) as error:
        raise LengthsError(f"cannot read {pattern!r}: {error}") from error
    return RecordSource(source)
