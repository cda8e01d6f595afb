"""Restoring the iterator before a stage, which may refuse its part of a state and is then at no known place."""

from __future__ import annotations

import copy
from typing import Any

import grain

from shapebucket.errors import StateError


class Parent:
    """The iterator before a stage, as far as its states go."""

    def __init__(self, iterator: grain.DatasetIterator[Any]) -> None:
        self._iterator = iterator
        self._lost = False

    def place(self, state: Any) -> None:
        """Restores it at once: what it refuses is known early, and `start_prefetch` starts in the right place.

        Raises:
            StateError: if it does not take the state. Other errors, of a file system say, come through; it is at no known place
                then as well.
        """
        self._lost = True  # Grain may move it before it refuses
        try:
            self._iterator.set_state(copy.deepcopy(state))
            self._iterator.get_state()  # where mp_prefetch finds that it has more workers than the state
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise StateError(
                f"the data set before the loader does not take its part of the state ({type(error).__name__}: {error}): build "
                "it as it was when the state was saved; mp_prefetch with as many workers. ElasticIterDataset takes any number"
            ) from error
        self._lost = False

    def require_place(self) -> None:
        """Raises StateError if it did not take the last state."""
        if self._lost:
            raise StateError(
                "this iterator was given a state that the data set before the loader refused or failed to take, and is now at "
                "no known place: set one that it takes, or make another iterator with iter(dataset)"
            )
