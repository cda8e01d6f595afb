"""Names of axes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection


def axis_name(path: tuple[str, ...], suffix: str | int | None, taken: Collection[str]) -> str:
    """Returns an axis name made of a feature's path and a suffix that no other axis has: a number follows where it is taken."""
    name = re.sub(r"\W", "_", "_".join(path))
    name = name if name.isidentifier() else f"axis_{name}"
    name = name if suffix is None else f"{name}_{suffix}"
    return next(
        each for each in itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2))) if each not in taken
    )
