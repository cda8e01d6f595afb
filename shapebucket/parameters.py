"""The parameters of functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def parameters_of(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of a function; none where it has no signature."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # not every callable has one
        return []


def positional_of(fn: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters that have a position."""
    return [each.name for each in parameters_of(fn) if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
