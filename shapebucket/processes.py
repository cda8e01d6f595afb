"""The processes that share each batch: which part a process makes. Loads JAX only where JAX's numbers are asked for."""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from typing import Literal

from shapebucket.errors import ProcessError

ShardLike = tuple[int, int] | Literal["jax"] | None


@dataclass(frozen=True)
class Shard:
    """One process's part of each batch.

    Attributes:
        index: which part, 0 ≤ index < count.
        count: the parts.
    """

    index: int
    count: int

    @classmethod
    def of(cls, shard: ShardLike) -> Shard:
        """Checks what a loader was given.

        Args:
            shard: (index, count); `"jax"` for JAX's index and count of processes as they are now, which starts JAX; or None
                for the whole.

        Raises:
            ProcessError: for anything else, or an index that is not one of the count's.
        """
        if shard is None:
            return cls(0, 1)
        if isinstance(shard, str) and shard == "jax":
            import jax

            return cls(jax.process_index(), jax.process_count())
        try:
            if isinstance(shard, str):
                raise TypeError
            index, count = map(operator.index, shard)
        except (TypeError, ValueError):
            raise ProcessError(f'shard must be (index, count), "jax" or None, but got {shard!r}') from None
        if not 0 <= index < count:
            raise ProcessError(f"shard must be (index, count) with 0 ≤ index < count, but got {(index, count)}")
        return cls(index, count)


def running_processes() -> int:
    """Returns the number of JAX's processes; 1 where JAX was not told of others. JAX is not loaded or started for this."""
    jax = sys.modules.get("jax")
    return jax.process_count() if jax is not None and jax.distributed.is_initialized() else 1


def require_one_process(what: str, cure: str) -> None:
    """Raises ProcessError where several JAX processes run, since loaders that do not know of each other fall out of step.

    Args:
        what: what each of the processes would do.
        cure: what to do instead.
    """
    if (count := running_processes()) > 1:
        raise ProcessError(
            f"{count} JAX processes run, and {what}: at a step their batches could differ in shape, which JAX does not notice "
            f"and computes wrong numbers from. {cure}"
        )
