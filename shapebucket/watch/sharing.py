"""Changes to the process that several contexts need at once, and that may end in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """A change that the first user makes and the last one takes back.

    Attributes:
        users: those that there are now.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[None]]) -> None:
        """Keeps the change, a context, for when there are users."""
        self.users: tuple[T, ...] = ()
        self._change = change
        self._lock = threading.Lock()
        self._changed = ExitStack()

    @contextmanager
    def used_by(self, user: T) -> Generator[None]:
        """Adds a user for as long as the context lasts."""
        with self._lock:
            if not self.users:
                self._changed.enter_context(self._change())
            self.users = (*self.users, user)
        try:
            yield
        finally:
            with self._lock:
                place = next(k for k, each in enumerate(self.users) if each is user)
                self.users = self.users[:place] + self.users[place + 1 :]
                if not self.users:
                    self._changed.close()
