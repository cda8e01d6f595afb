"""Writing a file whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Generator[BinaryIO]:
    """Opens a new file beside `path` that takes its place when all is written: a run that is killed leaves the old one."""
    target = Path(path)
    new = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with new.open("wb") as file:
            yield file
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)
