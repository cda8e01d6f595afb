"""Opening data by a name, as the command line has it: TFDS data sets and ArrayRecord files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from shapebucket.errors import LayoutError, LengthsError, MissingExtraError

_ARRAY_RECORD = re.compile(r"\.array_?record(-\d+-of-\d+)?[*?]*$")
_TFDS = "tfds:"


def names_samples(source: str) -> bool:
    """Whether a name is one of samples, which `open_samples` opens; else it is that of a file."""
    return source.startswith(_TFDS) or _ARRAY_RECORD.search(source) is not None


def open_samples(source: str, *, data_dir: str | os.PathLike[str] | None = None, raw: bool = False) -> Sequence[Any]:
    """Opens a data set by random access.

    Args:
        source: `tfds:NAME/SPLIT`, where NAME may have a configuration and version, as in `wmt14_translate/de-en:1.0.0`; or one
            or more ArrayRecord files, with `*` and `?` for several in the order of their names.
        data_dir: where TFDS data sets are; TFDS' own default if not given.
        raw: whether TFDS samples are as TFDS gives them, with text as bytes and lists of scalars.

    Returns:
        Samples: dicts of arrays for TFDS, the records' bytes for ArrayRecord files.

    Raises:
        LengthsError: for a source that is not there or cannot be read by random access.
        MissingExtraError: if the package that reads it is not installed.
    """
    if source.startswith(_TFDS):
        return _open_tfds(source.removeprefix(_TFDS), data_dir, raw)
    return _open_array_record(source)


def as_arrays(sample: Any, info: Any, path: tuple[str, ...] = ()) -> Any:
    """Returns a sample of a TFDS data source with arrays for its leaves.

    TFDS reads `Sequence(scalar)` as a list of scalars, and text as bytes; they become arrays, text one of uint8 (UTF-8).

    Args:
        sample: what the data source gave.
        info: the features' shapes and dtypes, as `features.get_tensor_info()` gives them.
        path: where in the sample this is.

    Raises:
        LayoutError: naming the feature, for lists of unequal lists, or of text.
    """
    if isinstance(sample, Mapping):
        fields = cast(Mapping[str, Any], sample)
        return {key: as_arrays(value, info[key], (*path, key)) for key, value in fields.items()}
    if isinstance(sample, bytes | str):
        return np.frombuffer(sample if isinstance(sample, bytes) else sample.encode(), np.uint8)
    if isinstance(sample, list):
        try:
            array = np.array(sample, info.np_dtype)
        except ValueError:
            array = np.array(None)
        if array.dtype == object:
            raise LayoutError(
                "is a list that makes no array of numbers (ragged, or of text): choose the features that the model needs, "
                "as in ds.map(lambda x: {'tokens': x['tokens']})",
                path="/".join(path),
            )
        return array if len(array) else array.reshape([size or 0 for size in info.shape])
    return sample


@dataclass(frozen=True)
class ArraySource:
    """A TFDS data source whose samples are dicts of arrays; for `measure`, `grain.MapDataset.source`, and Grain's workers.

    Attributes:
        source: the data source.
        info: see `as_arrays`.
    """

    source: Any
    info: Any

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return as_arrays(self.source[index], self.info)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Reads several samples at once."""
        return [as_arrays(sample, self.info) for sample in self.source.__getitems__(indices)]


def _open_tfds(name: str, data_dir: str | os.PathLike[str] | None, raw: bool) -> Any:
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
    except (NotImplementedError, ValueError) as error:
        raise LengthsError(f"cannot read the split {split!r} of {where} by random access: {error}") from error
    return samples if raw else ArraySource(samples, builder.info.features.get_tensor_info())


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
    return source
