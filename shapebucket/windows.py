"""Windows: the parts of a data set whose batches are planned together; numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shapebucket.ordering import Indices, index_dtype, permutation

_BLOCK = 4096  # samples that stay together: 16 KB of lengths, so that a mapped file is read in runs
_BLOCKS = 1024  # of a window, where it is large enough for so many


class Windows:
    """A split of samples into windows of nearly one size, the same in every epoch.

    In the data set's order, a window is a run of samples. In random order, it is made of blocks of neighbours from all over the
    data set, so that windows are alike even where the data comes sorted.
    """

    def __init__(self, count: int, size: int | None, seed: int | None) -> None:
        """Splits the samples.

        Args:
            count: how many samples there are.
            size: the samples of a window, to within one block; None for one window of all.
            seed: draws the blocks; None for the data set's order.
        """
        self._arguments = count, size, seed
        self._count = count
        self._windows = 1 if size is None else max(1, -(-count // size))
        self._block = max(1, count if size is None else min(_BLOCK, size // _BLOCKS))
        blocks = -(-count // self._block)
        self._ends = np.arange(1, self._windows + 1) * blocks // self._windows
        self._order = np.arange(blocks) if seed is None else permutation(blocks, seed, 0, purpose=3)
        self._window_of = np.empty(blocks, index_dtype(self._windows))
        self._window_of[self._order] = np.repeat(np.arange(self._windows), np.diff(self._ends, prepend=0))

    def __len__(self) -> int:
        return self._windows

    def members(self, window: int) -> Indices:
        """Returns the samples of a window, ascending."""
        start = self._ends[window - 1] if window else 0
        blocks = np.sort(self._order[start : self._ends[window]]).astype(index_dtype(self._count))
        samples = (blocks[:, None] * self._block + np.arange(self._block, dtype=blocks.dtype)).ravel()
        return samples[: np.searchsorted(samples, self._count)]  # the last block may be short

    def of(self, part: slice) -> npt.NDArray[np.signedinteger]:
        """Returns the windows of some samples."""
        return self._window_of[np.arange(part.start, part.stop) // self._block]

    def __reduce__(self) -> tuple[type[Windows], tuple[int, int | None, int | None]]:
        return Windows, self._arguments
