"""What only flax's internals do fast: reading and writing what a `flax.nnx.Variable` holds.

The public accessors check the trace, in Python, at each write: 1 to 4 µs a variable, where a whole step takes about 2 µs for
each. The value and the metadata lie in slots of the class, which cost 0.1 µs; where they are not found, the public accessors
serve. tests/test_step_nnx.py fails when they move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MemberDescriptorType
from typing import Any


@dataclass(frozen=True)
class Access:
    """How the variables of a release of flax are read and written.

    Attributes:
        get: returns the value of a variable, as it lies there: no hook runs.
        put: replaces it.
        metadata: returns what else a variable holds, a dict that is not to be changed.
        by_slots: whether these are the slots themselves.
    """

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    metadata: Callable[[Any], Any]
    by_slots: bool

    @classmethod
    def of(cls, variable: type[Any]) -> Access:
        """Finds them in the class of variables."""
        value, metadata = _slot(variable, "_raw_value", "raw_value"), _slot(variable, "_var_metadata")
        if value is None or metadata is None:
            return cls.public(variable)
        return cls(value.__get__, value.__set__, metadata.__get__, by_slots=True)

    @classmethod
    def public(cls, variable: type[Any]) -> Access:
        """Returns the public accessors."""
        if hasattr(variable, "get_raw_value"):  # not in flax 0.12.0
            return cls(variable.get_raw_value, variable.set_raw_value, variable.get_metadata, by_slots=False)
        return cls(lambda one: one.raw_value, _set_raw_value, variable.get_metadata, by_slots=False)


def _set_raw_value(variable: Any, value: Any) -> None:
    variable.raw_value = value


def _slot(variable: type[Any], *names: str) -> MemberDescriptorType | None:
    found: Iterable[Any] = (variable.__dict__.get(name) for name in names)
    return next((each for each in found if isinstance(each, MemberDescriptorType)), None)
