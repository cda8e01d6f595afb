"""Orders of many integers in little time and memory: a random one, and one by group; numpy only.

Sorting 10⁸ random 64-bit keys takes numpy some 15 s and 2.4 GB. Here they are dealt into groups by their leading bits, one
chunk after another, and each group is sorted by radix; the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 18  # temporary arrays of 2 MB, which stay in the cache
_LEADING = 8  # bits, for 256 groups

Indices = npt.NDArray[np.signedinteger[Any]]


def index_dtype(count: int) -> np.dtype[Any]:
    """Returns the integers that number `count` things: int32 while they fit."""
    return np.dtype(np.int32 if count < 2**31 else np.int64)


def permutation(count: int, seed: int, epoch: int, *, purpose: int = 0, window: int | None = None) -> Indices:
    """Returns a random order of 0, 1, …, count − 1 that depends on the arguments alone: that of raw 64-bit keys.

    No two seeds (below 2¹²⁸), epochs, purposes or windows share a stream of keys (epochs below 2³², where there are windows).

    NumPy promises a stable stream for its bit generators, not for `Generator.permutation` (NEP 19); a run that resumes
    under another NumPy must see the same batches.
    """
    key = (epoch, purpose) if window is None else (epoch, purpose, window)
    if count <= _CHUNK:
        return _by_key(next(_keys(count, seed, key), np.empty(0, np.uint64)), 0).astype(index_dtype(count))
    counts = np.zeros(1 << _LEADING, np.int64)
    for keys in _keys(count, seed, key):
        counts += np.bincount(_leading(keys), minlength=len(counts))
    ends = np.cumsum(counts)
    dealt, order = np.empty(count, np.uint64), np.empty(count, index_dtype(count))
    free, start = ends - counts, 0
    for keys in _keys(count, seed, key):
        positions, places = _deal(_leading(keys), free)
        dealt[places] = keys[positions]
        order[places] = positions + start
        start += len(keys)
    for first, end in zip((ends - counts).tolist(), ends.tolist(), strict=True):
        order[first:end] = order[first:end][_by_key(dealt[first:end], _LEADING)]
    return order


def by_group(count: int, group_of: Callable[[slice], npt.NDArray[Any]], sizes: npt.NDArray[np.int64]) -> Indices:
    """Returns 0, 1, …, count − 1 by group, in ascending order within each.

    Args:
        count: how many.
        group_of: returns the groups of a slice of them, small integers from 0.
        sizes: how many each group has, int64 [groups].
    """
    order, free = np.empty(count, index_dtype(count)), np.cumsum(sizes) - sizes
    for part in chunks(count):
        positions, places = _deal(group_of(part), free)
        order[places] = positions + part.start
    return order


def chunks(count: int) -> Iterator[slice]:
    """Yields slices of a length that keeps temporary arrays small."""
    for start in range(0, count, _CHUNK):
        yield slice(start, min(count, start + _CHUNK))


def _keys(count: int, seed: int, key: tuple[int, ...]) -> Iterator[npt.NDArray[np.uint64]]:
    # A list of both would run into each other: [5, 1] is also the words of the seed 5 + 2³², and zeros at the end count for
    # nothing. Before a spawn key, a seed is filled up to 128 bits.
    bits = np.random.PCG64DXSM(np.random.SeedSequence(seed, spawn_key=key))
    for part in chunks(count):
        yield bits.random_raw(part.stop - part.start)


def _leading(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    return (keys >> np.uint64(64 - _LEADING)).astype(np.uint8)


def _deal(groups: npt.NDArray[Any], free: npt.NDArray[np.int64]) -> tuple[Indices, Indices]:
    """Returns the positions of a chunk by group, and the place of each; takes those places from the first free ones."""
    positions = np.argsort(groups, kind="stable")
    counts = np.bincount(groups, minlength=len(free))
    places = np.arange(len(groups)) + np.repeat(free - (np.cumsum(counts) - counts), counts)
    free += counts
    return positions, places


def _by_key(keys: npt.NDArray[np.uint64], leading: int) -> Indices:
    """Does what `np.argsort(keys, kind="stable")` does, for keys that agree in their leading bits and are random after those.

    Of integers of 16 bits, numpy's stable sort is a radix sort, ten times as fast as one of 64 bits. Two of those sort by
    the first 32 bits that differ; the few keys that agree there too are sorted as they are.
    """
    prefix = (keys << np.uint64(leading) >> np.uint64(32)).astype(np.uint32)
    order = np.argsort(prefix.astype(np.uint16), kind="stable")
    order = order[np.argsort((prefix >> np.uint32(16)).astype(np.uint16)[order], kind="stable")]
    prefix = prefix[order]
    same = np.flatnonzero(prefix[1:] == prefix[:-1])
    tied = np.union1d(same, same + 1)
    order[tied] = order[tied][np.argsort(keys[order[tied]], kind="stable")]
    return order
