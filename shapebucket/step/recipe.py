"""How a step's executables are made: traced, compared with their contract, compiled."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from shapebucket.buckets import Bucket, BucketPlan
from shapebucket.errors import BudgetError, DriftError, StepError
from shapebucket.padding import pad
from shapebucket.step.arguments import Place, at, filled, label_of, places_of
from shapebucket.step.contract import Arguments, Contract, Job
from shapebucket.step.drift import Path, Returned, explained, sharding_drift, signature_drift, weak_leaves
from shapebucket.step.modules import Modules, modules_among
from shapebucket.step.report import Cost, Executable
from shapebucket.step.signature import as_jit_reads, spec_of, specs_of
from shapebucket.tables import mebibytes, progress_bars

Carry = str | Sequence[str] | Mapping[str, int | str | Path]
"""Names of arguments, or these with where each comes back."""


@dataclass(frozen=True)
class Recipe:
    """A step and how it is to be compiled.

    Attributes:
        fn: the function itself.
        jit: `jax.jit` with its options.
        statics: the places of the static arguments.
        donated: those of the donated ones.
        prepare: from the loader's batch to what `fn` takes; None for no change.
        sharding: where a prepared batch is put; None for leaving it.
        carry: the places of the arguments that the step returns and takes again.
        carry_is_told: whether somebody named them: each must be there then.
        carry_paths: where they come back in the result, by name, as far as that was told.
        weak_types: whether a carried argument must keep its weak types.
    """

    fn: Callable[..., Any]
    jit: functools.partial[Any]
    statics: frozenset[Place]
    donated: frozenset[Place]
    prepare: Callable[[Any], Any] | None
    sharding: Any
    carry: frozenset[Place]
    carry_is_told: bool
    carry_paths: Mapping[str, Path]
    weak_types: bool

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        *,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Sequence[str] | None = None,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Sequence[str] | None = None,
        in_shardings: Any = None,
        out_shardings: Any = None,
        prepare: Callable[[Any], Any] | None = None,
        batch_sharding: Any = None,
        carry: Carry | None = None,
        weak_types: bool = False,
    ) -> Recipe:
        """Makes a recipe of the options of `CompiledStep`.

        Raises:
            StepError: for a function that is jitted already.
        """
        if hasattr(fn, "lower") and hasattr(fn, "trace"):
            raise StepError("the step is jitted already: give the plain function, and donate_argnames and such here")
        shardings = {"in_shardings": in_shardings, "out_shardings": out_shardings}
        jit = functools.partial(
            jax.jit,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            **{name: value for name, value in shardings.items() if value is not None},
        )
        donated = places_of(fn, donate_argnums, donate_argnames)
        return cls(
            fn,
            jit,
            places_of(fn, static_argnums, static_argnames),
            donated,
            prepare,
            batch_sharding,
            carry=donated if carry is None else places_of(fn, None, carry if isinstance(carry, str) else list(carry)),
            carry_is_told=carry is not None,
            carry_paths=_paths(carry),
            weak_types=weak_types,
        )

    @property
    def changes_batches(self) -> bool:
        """Whether a batch is not passed on as it comes."""
        return self.prepare is not None or self.sharding is not None

    def bound(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Arguments, tuple[Place, ...], Modules | None]:
        """Reads the arguments that are to be compiled for.

        Returns:
            The arguments with arrays in the place of modules; the places of the static ones that were given; the modules.
        """
        statics = tuple(place for place in (*range(len(args)), *kwargs) if place in self.statics)
        modules = modules_among(self.fn, args, kwargs, statics, self.donated)
        if modules is not None:
            args, kwargs, _ = modules.bind(args, kwargs)
        return (args, kwargs), statics, modules

    def jitted(self, modules: Modules | None = None) -> Any:
        """Returns the step jitted, as a function of its own: JAX keeps the executables of one function alive together."""
        fn, jit = (self.fn, self.jit) if modules is None else (modules.pure(self.fn), modules.jit(self.jit))

        @functools.wraps(fn)
        def own(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return jit(own)

    def prepared(self, batch: Any, check: Callable[[Any], None] | None = None) -> Any:
        """Returns what `fn` takes for a batch of the loader; `check` sees it before it is put on devices."""
        if self.prepare is not None:
            batch = self.prepare(batch)
        if check is not None:
            check(batch)
        if self.sharding is None or _lies_on(batch, self.sharding):
            return batch
        return jax.device_put(batch, self.sharding)

    def abstract(self, plan: BucketPlan, bucket: Bucket) -> Any:
        """Returns what `prepared` makes of a bucket's batch, as shapes, dtypes and shardings: puts nothing on a device.

        Raises:
            StepError: for 64-bit numbers, without `jax_enable_x64`.
        """
        specs = plan.batch_spec(bucket)
        batch = jax.tree.map(_abstract, specs) if self.prepare is None else self.prepare(pad([], bucket, plan))
        _refuse_64_bits(batch)
        if self.sharding is None:
            return batch
        return jax.tree.map(_abstract, batch, jax.tree.broadcast(self.sharding, batch))

    def make(
        self, contract: Contract, jobs: Sequence[Job], threads: int | None, progress: bool
    ) -> tuple[list[Executable], list[str]]:
        """Traces the jobs one after another, and compiles them in threads meanwhile: XLA lets the interpreter go.

        Returns:
            The executables, and notes.

        Raises:
            StepError, DriftError, BudgetError: as `CompiledStep.compile`.
        """
        notes: dict[str, None] = {}
        with progress_bars(progress) as bars, ThreadPoolExecutor(threads or _cores()) as pool:
            task = bars.add_task("compile", total=len(jobs), note="")
            futures: list[Future[Executable]] = []
            try:
                for job in jobs:
                    bars.update(task, note=str(job.bucket))
                    finish, weak = self.traced(contract, job, _refuse_64_bits)
                    notes.update(dict.fromkeys(weak))
                    futures.append(pool.submit(finish))
                    futures[-1].add_done_callback(lambda _: bars.advance(task))
                made = [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
        check_budget(contract, made)
        return made, list(notes)

    def traced(
        self, contract: Contract, job: Job, check: Callable[[Any], None] | None = None
    ) -> tuple[Callable[[], Executable], list[str]]:
        """Traces and lowers the step for a batch; returns what compiles it, which any thread may do, and notes.

        Args:
            contract: what the step is compiled for.
            job: the arguments; `check` sees its prepared batches.
            check: raises what is wrong with them.
        """
        modules = contract.modules
        started = time.perf_counter()
        where = f"shapebucket: while compiling the step for {job.bucket or 'a batch of no bucket'}"
        prepared = [self.prepared(batch, check) for batch in job.batches]
        args, kwargs = filled(job.args, job.kwargs, contract.places, prepared)
        try:
            traced = self.jitted(modules).trace(*args, **kwargs)
            result = traced.out_avals
            carried = self._carried(contract, job, traced.in_avals, result)
            returned = self._returned(contract, carried, result)
            weak = self._check_drift(contract, job, traced.in_avals, carried, returned, result)
            lowered = traced.lower()
        except Exception as error:
            error.add_note(where)
            raise
        tracing = time.perf_counter() - started

        def finish() -> Executable:
            started = time.perf_counter()
            try:
                compiled = lowered.compile()
            except Exception as error:
                error.add_note(where)
                raise
            taken = self._carried(contract, job, compiled.input_shardings, result)
            _check_shardings(job, carried, taken, returned, compiled)
            return Executable(
                job.bucket,
                {path: spec.shape for path, spec in specs_of(job.batches[0]).items()},
                {label_of(self.fn, place): at(job.args, job.kwargs, place) for place in contract.statics},
                compiled,
                tracing + time.perf_counter() - started,
                Cost.of(compiled),
            )

        return finish, weak

    def _carried(self, contract: Contract, job: Job, dynamic: Any, result: Any) -> dict[str, Any]:
        """Returns the part of each carried argument in what stands for the dynamic arguments, by its name.

        Modules are always carried, and what the step does not change of them is left out.
        """
        given = self._given(contract, job, dynamic)
        labels = {label_of(self.fn, place) for place in given}
        unknown = sorted(place for place in self.carry if isinstance(place, str) and place not in labels)
        if self.carry_is_told and unknown:
            raise StepError(
                f"carry names {unknown[0]!r}, which is no argument that compile() was given beside the batch"
            )
        modules = contract.modules
        places = self.carry if modules is None else self.carry.union(modules.places)
        found = {label_of(self.fn, place): value for place, value in given.items() if place in places}
        return found if modules is None else modules.only_changed(found, result)

    def _given(self, contract: Contract, job: Job, dynamic: Any) -> dict[Place, Any]:
        """Returns what stands for each argument that is neither static nor a batch."""
        args, kwargs = dynamic
        places = [index for index in range(len(job.args)) if index not in contract.statics]
        given: dict[Place, Any] = {**dict(zip(places, args, strict=True)), **kwargs}
        return {place: value for place, value in given.items() if place not in contract.places}

    def _returned(self, contract: Contract, carried: Mapping[str, Any], result: Any) -> Returned:
        modules = contract.modules
        if modules is not None:
            return modules.returned(carried, result, self.carry_paths)
        return Returned(carried, result, self.carry_paths)

    def _check_drift(
        self,
        contract: Contract,
        job: Job,
        dynamic: Any,
        carried: Mapping[str, Any],
        returned: Returned,
        result: Any,
    ) -> list[str]:
        """Raises DriftError if a carried argument comes back as another; returns notes."""
        lines: list[str] = []
        weak: list[str] = []
        for place, value in self._given(contract, job, dynamic).items():
            if (name := label_of(self.fn, place)) not in carried:
                weak += [
                    f"{path} is weakly typed, as a Python number is: what is computed with it keeps the dtypes of that, also "
                    "for an array that is passed later (pass an array with a dtype from the start)"
                    for path in weak_leaves(name, value)
                ]
        if self.weak_types and weak:
            raise DriftError(f"strict='weak_type' refuses arguments that are weakly typed:\n{explained(weak)}", weak)
        for name, taken in carried.items():
            if not jax.tree.leaves(taken):
                continue
            if name not in returned.paths:
                raise DriftError(
                    f"the step does not return {name!r}, which it is to take again at the next call: return it, or say in "
                    "carry= which arguments come back (the donated ones, if not given; () for none)"
                )
            drifted, drifted_weakly = signature_drift(name, taken, self._part(name, returned, result))
            lines += [f"{line} [compared with {returned.place(name)}]" for line in drifted]
            weak += [f"jit would compile twice, and this step does not: {line}" for line in drifted_weakly]
        if self.weak_types:
            lines, weak = lines + weak, []
        if lines:
            raise _drift(job, lines)
        return weak + returned.notes

    def _part(self, name: str, returned: Returned, result: Any) -> Any:
        try:
            return returned.part(name, result)
        except (IndexError, KeyError, TypeError):  # only a path that was told can miss
            raise StepError(
                f"carry says that {name!r} comes back as {returned.place(name)}, but the step returns "
                f"{jax.tree.structure(result)}"
            ) from None


def _paths(carry: Carry | None) -> dict[str, Path]:
    if not isinstance(carry, Mapping):
        return {}
    return {name: path if isinstance(path, tuple) else (path,) for name, path in carry.items()}


def _check_shardings(
    job: Job, carried: Mapping[str, Any], taken: Mapping[str, Any], returned: Returned, compiled: jax.stages.Compiled
) -> None:
    """Raises DriftError if a carried argument comes back in another sharding than an executable takes it in."""
    lines: list[str] = []
    for name, avals in carried.items():
        if not jax.tree.leaves(avals):
            continue
        lines += sharding_drift(name, avals, taken[name], returned.part(name, compiled.output_shardings))
    if lines:
        raise _drift(job, lines)


def _drift(job: Job, lines: list[str]) -> DriftError:
    return DriftError(
        f"the step returns another state than it takes (found for {job.bucket}), so the second step would need another "
        f"program:\n{explained(lines)}",
        lines,
    )


def check_budget(contract: Contract, made: Sequence[Executable]) -> None:
    """Raises BudgetError if an executable needs more memory than there is."""
    budget = contract.memory
    over = [each for each in made if budget is not None and each.cost.peak_bytes > budget]
    if budget is not None and over:
        listed = "\n".join(f"  {each}: {each.cost.need}" for each in over)
        raise BudgetError(
            f"{len(over)} of {len(made)} executables need more than the {mebibytes(budget)} MiB that a device may hold:\n"
            f"{listed}\nPlan with a smaller token_budget or batch_size, or let fit_batch_sizes() find it."
        )


def _cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lies_on(batch: Any, sharding: Any) -> bool:
    """Says whether each leaf of a batch lies on one sharding already: putting it there again would take 0.1 ms."""
    return isinstance(sharding, jax.sharding.Sharding) and all(
        isinstance(leaf, jax.Array) and leaf.sharding == sharding for leaf in jax.tree.leaves(batch)
    )


def _abstract(leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    spec = spec_of(leaf)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)


def _refuse_64_bits(batch: Any) -> None:
    """Raises StepError for numpy arrays that JAX would silently cut to 32 bits."""
    for path, spec in specs_of(batch).items():
        if (read := as_jit_reads(spec)) != spec:
            raise StepError(
                f"{path!r} of the batch is {spec.dtype}, which JAX silently cuts to {read.dtype}: cast it with .map() or "
                "prepare=, or enable jax_enable_x64"
            )
