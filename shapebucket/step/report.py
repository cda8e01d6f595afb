"""What a step holds: an executable with what it took and takes, and the report of all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from shapebucket.buckets import Bucket
from shapebucket.tables import mebibytes, render


@dataclass(frozen=True)
class Cost:
    """What one executable takes, by JAX's `memory_analysis` and `cost_analysis`. Bytes are of one device.

    Attributes:
        flops: of one call, as XLA counts them; None where it does not.
        argument_bytes: of the arguments, the state among them.
        output_bytes: of what it returns.
        aliased_bytes: of the outputs that take the place of donated arguments.
        temporary_bytes: while it runs.
        code_bytes: of the program itself, where XLA tells; a CPU's does not, and says 0.
    """

    flops: float | None
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    code_bytes: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> Cost:
        """Reads the cost of an executable."""
        counted: Any = compiled.cost_analysis()
        memory: Any = compiled.memory_analysis()
        flops = counted.get("flops") if isinstance(counted, Mapping) else None
        return cls(
            flops,
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.generated_code_size_in_bytes,
        )

    @property
    def peak_bytes(self) -> int:
        """What a device must hold while it runs: arguments, outputs and temporaries, what is donated counted once.

        Not XLA's own `peak_memory_in_bytes`, which leaves the temporaries out on a CPU.
        """
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes + self.code_bytes

    @property
    def need(self) -> str:
        """The peak and its parts, for messages."""
        parts = (
            self.peak_bytes,
            self.argument_bytes,
            self.temporary_bytes,
            self.output_bytes - self.aliased_bytes,
        )
        peak, arguments, temporaries, outputs = map(mebibytes, parts)
        return (
            f"{peak} MiB (arguments {arguments}, temporaries {temporaries}, "
            f"outputs that replace no donated argument {outputs})"
        )


@dataclass(eq=False)
class Executable:
    """One program that a step holds.

    Attributes:
        bucket: whose it is; None for a batch of no bucket, compiled on a miss.
        shapes: of the batch's leaves, by path.
        statics: the static arguments that it was compiled for.
        compiled: JAX's own object.
        seconds: of tracing, lowering and compiling it.
        cost: flops and bytes.
        calls: made so far.
        last_used: `time.monotonic()` at the last call; when it was compiled, before the first.
    """

    bucket: Bucket | None
    shapes: Mapping[str, tuple[int, ...]]
    statics: Mapping[str, Any]
    compiled: jax.stages.Compiled = field(repr=False)
    seconds: float
    cost: Cost
    calls: int = 0
    last_used: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        where = str(self.bucket or ", ".join(f"{path} {list(shape)}" for path, shape in self.shapes.items()))
        return ", ".join([where, *(f"{name}={value!r}" for name, value in self.statics.items())])


@dataclass(frozen=True)
class CompileReport:
    """What `CompiledStep.compile` did.

    Attributes:
        executables: what it made, in the plan's order.
        wall_seconds: from its start to its end.
        budget_bytes: what a device may hold; None where that is not known.
        notes: what is harmless, and worth knowing.
    """

    executables: Sequence[Executable]
    wall_seconds: float
    budget_bytes: int | None = None
    notes: Sequence[str] = ()

    @property
    def seconds(self) -> Mapping[Bucket, float]:
        """The seconds of tracing, lowering and compiling for each bucket, over its static variants."""
        found: dict[Bucket, float] = {}
        for each in self.executables:
            if each.bucket is not None:
                found[each.bucket] = found.get(each.bucket, 0.0) + each.seconds
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as plain lists, dicts and numbers."""
        return {
            "wall_seconds": self.wall_seconds,
            "budget_bytes": self.budget_bytes,
            "notes": list(self.notes),
            "executables": [
                {
                    "bucket": str(each.bucket),
                    "statics": {name: repr(value) for name, value in each.statics.items()},
                    "seconds": each.seconds,
                    "flops": each.cost.flops,
                    "argument_bytes": each.cost.argument_bytes,
                    "output_bytes": each.cost.output_bytes,
                    "aliased_bytes": each.cost.aliased_bytes,
                    "temporary_bytes": each.cost.temporary_bytes,
                    "code_bytes": each.cost.code_bytes,
                    "peak_bytes": each.cost.peak_bytes,
                }
                for each in self.executables
            ],
        }

    def __str__(self) -> str:
        rows = [
            [
                str(each),
                f"{each.seconds:.2f}",
                "–" if each.cost.flops is None else f"{each.cost.flops:.3g}",
                mebibytes(each.cost.argument_bytes),
                mebibytes(each.cost.temporary_bytes),
                mebibytes(each.cost.output_bytes),
                mebibytes(each.cost.peak_bytes),
            ]
            for each in self.executables
        ]
        header = ["bucket", "seconds", "flops", "arguments MiB", "temporaries", "outputs", "peak"]
        peak = max((each.cost.peak_bytes for each in self.executables), default=0)
        of = "" if self.budget_bytes is None else f" of {mebibytes(self.budget_bytes)} ({peak / self.budget_bytes:.0%})"
        caption = "\n".join([f"the most that a device holds in a step: {mebibytes(peak)} MiB{of}", *self.notes])
        title = f"{len(rows)} executables compiled in {self.wall_seconds:.1f} s"
        return render(title, header, rows, caption=caption, text=1)
