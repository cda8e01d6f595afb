"""Comparing what a state was saved with to what it is restored into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import grain

from shapebucket.loading.map_dataset import BucketedMapDataset


def changes(found: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Returns which parts of a state's fingerprint differ from this loader's, and how; empty if none does."""
    names = [*mine, *sorted(found.keys() - mine.keys())]
    return "; ".join(
        f"{name} {found.get(name)!r}, here {mine.get(name)!r}" for name in names if found.get(name) != mine.get(name)
    )


def joined(dataset: grain.MapDataset[Any]) -> dict[str, Any]:
    """Returns the fingerprint of the loader that a data set is made of, by name; of several, a list of theirs; {} for none."""
    found = [loader.fingerprint for loader in _loaders(dataset)]
    if len(found) == 1:
        return found[0]
    return {name: [each[name] for each in found] for name in (found[0] if found else ())}


def _loaders(dataset: grain.MapDataset[Any]) -> Iterator[BucketedMapDataset]:
    """Yields the loaders among a data set and its parents."""
    if isinstance(dataset, BucketedMapDataset):
        yield dataset
        return
    for parent in dataset.parents:
        yield from _loaders(parent)
