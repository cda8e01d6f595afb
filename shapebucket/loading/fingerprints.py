"""Comparing what a state was saved with to what it is restored into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def changes(found: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Returns which parts of a state's fingerprint differ from this loader's, and how; empty if none does."""
    names = [*mine, *sorted(found.keys() - mine.keys())]
    return "; ".join(
        f"{name} {found.get(name)!r}, here {mine.get(name)!r}" for name in names if found.get(name) != mine.get(name)
    )
