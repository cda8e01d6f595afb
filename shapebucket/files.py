"""Files that are whole or not there, and archives of arrays that can be memory-mapped."""

from __future__ import annotations

import json
import mmap
import os
import threading
import zipfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from shapebucket.errors import LengthsError

_FACTS = "__facts__"
_MAPPED = 1 << 20  # bytes of an array from which on it is stored as it is, and mapped
_ROWS = 1 << 20  # that are written at once


Parts = Mapping[str, Sequence[npt.NDArray[Any]]]


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Generator[BinaryIO]:
    """Opens a new file beside `path` that takes its place when all is written: a run that is killed leaves the old one."""
    target = Path(path).resolve()  # what a link points to, and not the link
    new = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with new.open("wb") as file:
            yield file
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def write_archive(target: str | os.PathLike[str] | IO[bytes], facts: Mapping[str, Any], arrays: Parts) -> None:
    """Writes arrays and facts about them, JSON values, as an `.npz` file; large arrays uncompressed, to be mapped.

    Args:
        target: a path, where the file is whole or not there; or an open file.
        facts: JSON values.
        arrays: each in parts of one dtype, which are joined along their first dimension.
    """
    # not np.savez: it cannot mix compressed and plain members; the first array begins at an aligned place
    opened = replacing(target) if isinstance(target, str | os.PathLike) else nullcontext(target)
    with opened as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, parts in {**arrays, _FACTS: [np.array([json.dumps(facts)])]}.items():
            member = zipfile.ZipInfo(f"{name}.npy")
            large = sum(part.nbytes for part in parts) >= _MAPPED
            member.compress_type = zipfile.ZIP_STORED if large else zipfile.ZIP_DEFLATED
            with archive.open(member, "w", force_zip64=True) as out:
                _write_array(out, parts)


def _write_array(out: IO[bytes], parts: Sequence[npt.NDArray[Any]]) -> None:
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    dtype = np.lib.format.dtype_to_descr(parts[0].dtype)
    np.lib.format.write_array_header_2_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    for part in parts:
        for start in range(0, len(part), _ROWS):
            out.write(part[start : start + _ROWS].tobytes())


def read_archive(path: str | os.PathLike[str]) -> tuple[dict[str, Any] | None, dict[str, npt.NDArray[Any]]]:
    """Reads an `.npz` file: what `write_archive` was told, None in a file of others, and the arrays, large ones mapped.

    Raises:
        zipfile.BadZipFile, ValueError, EOFError, zlib.error: for a file that is no whole archive of arrays.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    with Path(path).open("rb") as file, zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            with archive.open(member) as content:
                if member.compress_type == zipfile.ZIP_STORED and member.file_size >= _MAPPED:
                    while content.read(_MAPPED):  # checks the sum that tells a whole member from a broken one
                        pass
                    array = _mapped(file, member)
                else:
                    array = np.lib.format.read_array(content, allow_pickle=False)
            arrays[member.filename.removesuffix(".npy")] = array
    facts = arrays.pop(_FACTS, None)
    return None if facts is None else cast(dict[str, Any], json.loads(str(facts.item()))), arrays


def _mapped(file: BinaryIO, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """Maps an uncompressed member of an archive into memory, read only.

    Its array follows a header of 30 bytes, of which the last four tell the lengths of a name and extra fields
    (PKWARE's APPNOTE, 4.3.7), and NumPy's own header.
    """
    file.seek(member.header_offset + 26)
    lengths = np.frombuffer(file.read(4), "<u2")
    file.seek(member.header_offset + 30 + int(lengths.sum()))
    major, _ = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = header(file)
    order = "F" if fortran else "C"
    return _map(cast(Any, file), _stamp(file.fileno()), dtype, file.tell(), shape, order)


class _MappedArray(np.memmap[Any, Any]):
    """A mapped array that is pickled as the name of its file, so that worker processes map it too."""

    stamp: tuple[int, int]

    def __reduce__(self) -> Any:
        if not isinstance(self.base, mmap.mmap):  # a part of it
            return np.asarray(self).__reduce__()
        order = "C" if self.flags.c_contiguous else "F"
        return _mapped_again, (str(self.filename), self.stamp, self.dtype, self.offset, self.shape, order)


def _map(file: Any, stamp: tuple[int, int], dtype: Any, offset: int, shape: Any, order: Any) -> _MappedArray:
    array = cast(_MappedArray, _MappedArray(file, dtype, "r", offset, shape, order))
    array.stamp = stamp
    return array


def _mapped_again(path: str, stamp: tuple[int, int], *what: Any) -> _MappedArray:
    """Maps the array of a pickle.

    Raises:
        LengthsError: where the file is another one now, or gone.
    """
    if not Path(path).exists() or _stamp(path) != stamp:
        raise LengthsError(
            f"{path!r} was changed or removed while it was in use: lengths that are mapped stay in their file"
        )
    return _map(path, stamp, *what)


def _stamp(file: str | int) -> tuple[int, int]:
    """Returns what tells a file, by path or descriptor, from one that took its place."""
    found = os.stat(file)  # noqa: PTH116, a descriptor has no path
    return found.st_size, found.st_mtime_ns
