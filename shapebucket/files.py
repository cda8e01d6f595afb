"""Files that are whole or not there, and archives of arrays that can be memory-mapped."""

from __future__ import annotations

import json
import os
import threading
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

_FACTS = "__facts__"
_MAPPED = 1 << 20  # bytes of an array from which on it is stored as it is, and mapped


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


def write_archive(
    path: str | os.PathLike[str], facts: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Writes arrays and facts about them, JSON values, to an `.npz` file; large arrays uncompressed, to be mapped."""
    # not np.savez: it cannot mix compressed and plain members; the first array begins at an aligned place
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in {**arrays, _FACTS: np.array(json.dumps(facts))}.items():
            member = zipfile.ZipInfo(f"{name}.npy")
            member.compress_type = zipfile.ZIP_STORED if array.nbytes >= _MAPPED else zipfile.ZIP_DEFLATED
            with archive.open(member, "w", force_zip64=True) as out:
                np.lib.format.write_array(out, array, allow_pickle=False)


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
    return None if facts is None else cast(dict[str, Any], json.loads(str(facts))), arrays


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
    return np.memmap(cast(Any, file), dtype, "r", file.tell(), shape, "F" if fortran else "C")
