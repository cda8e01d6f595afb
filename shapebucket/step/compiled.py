"""CompiledStep: one executable for each bucket, made before step 0, and an error for everything else."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import jax

from shapebucket.buckets import ArraySpec, Bucket, BucketPlan
from shapebucket.errors import BudgetError, DriftError, SignatureError, StepError
from shapebucket.padding import pad
from shapebucket.step import _jax_private
from shapebucket.step.arguments import BATCH, OneOf, Place, label_of, parameters_of, places_of, replaced, without
from shapebucket.step.drift import Returned, explained, sharding_drift, signature_drift
from shapebucket.step.memory import device_bytes, release
from shapebucket.step.report import CompileReport, Cost, Executable
from shapebucket.step.settings import changed_settings, named_settings
from shapebucket.step.signature import (
    Signature,
    argument_differences,
    as_jit_reads,
    difference,
    leaf_at,
    signature_of,
    spec_of,
    telling_leaves,
)
from shapebucket.tables import progress_bars

OnMiss = Literal["error", "compile", "evict"]

_configuration = _jax_private.configuration
_now = time.monotonic
_log = logging.getLogger("shapebucket")
_OWN_NAMES = ("progress", "threads")  # arguments of compile() itself


@dataclass(frozen=True)
class _Contract:
    """What `compile` was told, and each later call is held to.

    Attributes:
        place: of the batch.
        statics: the places of the static arguments that were given.
        paths: of the leaves of a batch whose shapes tell its bucket.
        configuration: JAX's settings then.
        settings: the same, by name.
        memory: what a device may hold, in bytes; None where unknown.
        buckets: by the signature of their batches.
    """

    place: Place
    statics: tuple[Place, ...]
    paths: tuple[tuple[str, ...], ...]
    configuration: Hashable
    settings: Mapping[str, object]
    memory: int | None
    buckets: Mapping[Signature, Bucket]


@dataclass(frozen=True)
class _Job:
    """One executable to be made: the arguments, with a batch that stands for all of its shape."""

    bucket: Bucket | None
    batch: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CompiledStep:
    """A step function with exactly one executable for each bucket of a plan.

    `compile` makes them all before the first step; a call only dispatches, and raises for any batch that is of no bucket, for
    other arguments beside it than it was compiled for, for another value of a static argument and under other settings of JAX.
    So nothing compiles after `compile`, and the number of executables never exceeds the number of buckets.

        step = CompiledStep(train_step, plan, donate_argnames="state")
        print(step.compile(state, BATCH))
        for batch in loader:
            state, loss = step(state, batch)

    A call looks at the shapes of the one or two leaves of the batch that tell its bucket, and at JAX's settings; the
    executable itself checks the tree, shapes, dtypes and shardings of all arguments, in C++. Two things it takes although
    `jit` would compile anew for them, since they change no result: another weak type of the same dtype, and an array that
    lies on no device yet (numpy's, or uncommitted) for one that does. 64-bit numpy arrays are cut to 32 bits, as `jit` does it.

    Each bucket has a Python function of its own, since JAX's caches would otherwise keep an executable alive after it was
    dropped here. It can be called from several threads; `jax.disable_jit()` runs the function itself.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        plan: BucketPlan,
        *,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Sequence[str] | None = None,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Sequence[str] | None = None,
        in_shardings: Any = None,
        out_shardings: Any = None,
        prepare: Callable[[Any], Any] | None = None,
        batch_sharding: Any = None,
        carry: str | Sequence[str] | None = None,
        strict: Literal["weak_type"] | None = None,
        on_miss: OnMiss = "error",
        max_executables: int | None = None,
        memory_budget: int | None = None,
    ) -> None:
        """Wraps a function; compiles nothing.

        Args:
            fn: the step: a pure function of arrays, not jitted; one argument is the batch.
            plan: the buckets that the batches come in.
            donate_argnums: as in `jax.jit`.
            donate_argnames: as in `jax.jit`.
            static_argnums: as in `jax.jit`; for each value that `compile` is given (`OneOf` for several) there is an
                executable a bucket.
            static_argnames: as in `jax.jit`.
            in_shardings: as in `jax.jit`.
            out_shardings: as in `jax.jit`.
            prepare: what stands between the loader and the step: a function from the loader's batch to what `fn` takes
                (adds positions, casts, …). It runs at every call, on the host. The executables are compiled for what comes
                out of it for a batch of padding alone.
            batch_sharding: a `jax.sharding.Sharding`, or a tree of them, that the prepared batch is put on; compiled for
                likewise. A batch that lies there already is left alone.
            carry: the arguments that the step returns and takes again, by name: they must come back with the tree, shapes,
                dtypes and shardings that they had, or the second step would need another program. The donated ones, if not
                given; `()` for none.
            strict: `"weak_type"` also refuses a carried argument that comes back weakly typed, or no longer so, which
                `jit` compiles again for and an executable does not mind. It is a note in the report otherwise.
            on_miss: what becomes of a batch or static value without an executable: `"error"`; `"compile"`, as long as there
                are fewer than `max_executables`, and an error then; `"evict"`, where the least recently used one goes
                for it. Both log each compile as a warning.
            max_executables: the cap; the number of buckets times that of declared static variants if not given.
            memory_budget: what a device may hold in a step, in bytes: a bucket that needs more is an error of `compile`.
                What JAX says of the device, where it does, if not given.

        Raises:
            StepError: for a function that is jitted already, what is no plan, and options that cannot be.
        """
        if not isinstance(plan, BucketPlan):
            raise StepError(f"CompiledStep takes a BucketPlan after the function, but got {type(plan).__name__}")
        if hasattr(fn, "lower") and hasattr(fn, "trace"):
            raise StepError("the step is jitted already: give the plain function, and donate_argnames and such here")
        if on_miss not in ("error", "compile", "evict"):
            raise StepError(f'on_miss is {on_miss!r}; it may be "error", "compile" or "evict"')
        if strict not in (None, "weak_type"):
            raise StepError(f'strict is {strict!r}; it may be None or "weak_type"')
        if max_executables is not None and max_executables < 1:
            raise StepError(f"max_executables is {max_executables}; a step needs at least one")
        if taken := sorted({each.name for each in parameters_of(fn)} & {*_OWN_NAMES}):
            raise StepError(
                f"the step has an argument {taken[0]!r}, which compile() means for itself: give it another name"
            )
        self.plan = plan
        self._fn = fn
        shardings = {"in_shardings": in_shardings, "out_shardings": out_shardings}
        self._jit = functools.partial(
            jax.jit,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            **{name: value for name, value in shardings.items() if value is not None},
        )
        self._statics = places_of(fn, static_argnums, static_argnames)
        self._carry = places_of(fn, donate_argnums, donate_argnames) if carry is None else places_of(fn, None, carry)
        self._carry_is_told = carry is not None
        self._prepare = prepare
        self._sharding = batch_sharding
        self._strict = strict
        self._on_miss: OnMiss = on_miss
        self._max_executables = max_executables
        self._memory_budget = memory_budget
        self._lock = threading.RLock()
        self._forget()

    def __str__(self) -> str:
        name = getattr(self._fn, "__name__", repr(self._fn))
        return f"CompiledStep({name}, {len(self._held)} executables for {len(self.plan)} buckets)"

    def __enter__(self) -> CompiledStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.clear()

    @property
    def executables(self) -> tuple[Executable, ...]:
        """The executables held, the least recently used first; never more than the cap."""
        return tuple(sorted(self._held.values(), key=lambda each: each.last_used))

    def compile(self, *args: Any, progress: bool = True, threads: int | None = None, **kwargs: Any) -> CompileReport:
        """Compiles the step for every bucket. A second call drops the executables and compiles for new arguments.

        With fewer than all allowed by `max_executables`, the first buckets of the plan are compiled, the others when
        they come.

        Args:
            *args: the arguments of the step, as it will be called, with `BATCH` in the batch's place. Arrays, or
                `jax.ShapeDtypeStruct`s; they are not consumed. A static argument may be `OneOf` several values.
            progress: whether to show a progress bar on standard error.
            threads: how many programs XLA compiles at a time: as many as there are cores, if not given. Tracing goes on one
                after another, in this thread.
            **kwargs: likewise.

        Returns:
            Seconds, flops and bytes of each executable.

        Raises:
            StepError: if `BATCH` is not among the arguments exactly once, or a batch has 64-bit numbers, which JAX would
                silently cut to 32 bits without `jax_enable_x64`.
            DriftError: if the step returns a carried argument with another tree, shape, dtype or sharding than it takes.
            BudgetError: if a bucket needs more memory than there is.
            LayoutError: if the plan does not know the dtypes.
            Exception: what tracing and compiling the function raises, with the bucket in a note.
        """
        started = time.perf_counter()
        places: list[Place] = [index for index, value in enumerate(args) if value is BATCH]
        places += [name for name, value in kwargs.items() if value is BATCH]
        if len(places) != 1:
            raise StepError(f"compile() needs BATCH in the batch's place, once; it stands in {places or 'none'}")
        if threads is not None and threads < 1:
            raise StepError(f"compile() got threads={threads}; it needs at least one")
        with self._lock:
            self._forget()
            statics = tuple(place for place in (*range(len(args)), *kwargs) if place in self._statics)
            batches = {bucket: pad([], bucket, self.plan) for bucket in self.plan.buckets}
            contract = _Contract(
                place=places[0],
                statics=statics,
                paths=tuple(telling_leaves(list(batches.values()))),
                configuration=_configuration(),
                settings=named_settings(),
                memory=self._memory_budget or device_bytes(),
                buckets={signature_of(batch): bucket for bucket, batch in batches.items()},
            )
            variants = list(_variants(args, kwargs, statics))
            cap = self._max_executables or len(self.plan) * len(variants)
            if cap < len(self.plan) * len(variants) and self._on_miss == "error":
                raise StepError(
                    f"max_executables={cap} is less than the {len(self.plan)} buckets times {len(variants)} static variants "
                    'would take: say on_miss="evict", or plan fewer buckets'
                )
            jobs = [_Job(bucket, batch, *variant) for bucket, batch in batches.items() for variant in variants][:cap]
            made, notes = self._compile_all(contract, jobs, threads or _cores(), progress)
            self._contract, self._cap, self._key = contract, cap, _key_of(contract)
            for job, executable in zip(jobs, made, strict=True):
                self._hold(job, executable)
        return CompileReport(made, time.perf_counter() - started, contract.memory, notes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step with the executable of the batch's bucket. Never compiles, unless `on_miss` says so.

        Args:
            *args: as `compile` was called, with the loader's batch in place of `BATCH`.
            **kwargs: likewise.

        Returns:
            What the function returns.

        Raises:
            StepError: if `compile` has not been called.
            SignatureError: if the batch is not of a bucket's shape, dtype and tree, another argument differs from what was
                compiled for, or JAX's settings do. The step did not run then, and nothing was donated.
        """
        try:
            held = self._dispatch[self._key(args, kwargs)]
        except (AttributeError, IndexError, KeyError, TypeError):
            held = self._missed(args, kwargs)
        contract = self._contract
        if contract is None:  # cleared by another thread meanwhile
            return self._missed(args, kwargs)
        if contract.configuration != _configuration():
            return self._reconfigured(contract, args, kwargs)
        held.calls += 1
        held.last_used = _now()
        passed = args, kwargs
        if contract.statics or self._prepare is not None or self._sharding is not None:
            passed = self._passed(contract, args, kwargs)
        try:
            return held.compiled(*passed[0], **passed[1])
        except (TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not str(error).startswith("Array has been deleted"):
                raise  # the step ran, and failed
            held.calls -= 1
            return self._refused(contract, held, error, (args, kwargs), passed)

    def evict(self, bucket: Bucket) -> None:
        """Drops the executables of a bucket, and gives their memory back. Does nothing where there are none.

        Its next batch is a miss: see `on_miss`.
        """
        with self._lock:
            self._drop([each for each in self._held.values() if each.bucket == bucket])
        release()

    def clear(self) -> None:
        """Drops all executables, and gives their memory back. The step must be compiled again before a call."""
        with self._lock:
            self._forget()
        release()

    def _forget(self) -> None:
        """Drops the executables and what they were compiled for."""
        self._contract: _Contract | None = None
        self._cap = 0
        self._key: Callable[[tuple[Any, ...], dict[str, Any]], Hashable] = _no_key
        self._held: dict[Signature, Executable] = {}
        self._dispatch: dict[Hashable, Executable] = {}
        # A call reads these without a lock: they are replaced as a whole, never changed where one could be dropped.

    def _compile_all(
        self, contract: _Contract, jobs: Sequence[_Job], threads: int, progress: bool
    ) -> tuple[list[Executable], list[str]]:
        """Traces the jobs one after another, and compiles them in threads meanwhile: XLA lets the interpreter go."""
        notes: dict[str, None] = {}
        with progress_bars(progress) as bars, ThreadPoolExecutor(threads) as pool:
            task = bars.add_task("compile", total=len(jobs), note="")
            futures: list[Future[Executable]] = []
            try:
                for job in jobs:
                    bars.update(task, note=str(job.bucket))
                    finish, weak = self._traced(contract, job)
                    notes.update(dict.fromkeys(weak))
                    futures.append(pool.submit(finish))
                    futures[-1].add_done_callback(lambda _: bars.advance(task))
                made = [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
        self._check_budget(contract, made)
        return made, list(notes)

    def _traced(self, contract: _Contract, job: _Job) -> tuple[Callable[[], Executable], list[str]]:
        """Traces and lowers the step for a batch; returns what compiles it, which any thread may do, and notes."""

        # A function of its own for each bucket: JAX's caches keep the executables of one function alive together.
        @functools.wraps(self._fn)
        def own(*args: Any, **kwargs: Any) -> Any:
            return self._fn(*args, **kwargs)

        started = time.perf_counter()
        where = f"shapebucket: while compiling the step for {job.bucket or 'a batch of no bucket'}"
        prepared = self._prepared(job.batch, _refuse_64_bits)
        args, kwargs = replaced(job.args, job.kwargs, contract.place, prepared)
        try:
            traced = self._jit(own).trace(*args, **kwargs)
            carried = self._carried(contract, job, traced.in_avals)
            returned = Returned(carried, traced.out_avals)
            weak = self._check_drift(job, carried, returned, traced.out_avals)
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
            self._check_shardings(contract, job, carried, returned, compiled)
            return Executable(
                job.bucket,
                {path: spec.shape for path, spec in _specs(job.batch).items()},
                {label_of(self._fn, place): _at(job.args, job.kwargs, place) for place in contract.statics},
                compiled,
                tracing + time.perf_counter() - started,
                Cost.of(compiled),
            )

        return finish, weak

    def _carried(self, contract: _Contract, job: _Job, dynamic: Any) -> dict[str, Any]:
        """Returns the part of each carried argument in what stands for the dynamic arguments, by its name."""
        args, kwargs = dynamic
        places = [index for index in range(len(job.args)) if index not in contract.statics]
        given: dict[Place, Any] = {**dict(zip(places, args, strict=True)), **kwargs}
        wanted = [place for place in given if place in self._carry and place != contract.place]
        if self._carry_is_told and (missing := self._unknown_carry(given)):
            raise StepError(
                f"carry names {missing[0]!r}, which is no argument that compile() was given beside the batch"
            )
        return {label_of(self._fn, place): given[place] for place in wanted}

    def _unknown_carry(self, given: Mapping[Place, Any]) -> list[str]:
        labels = {label_of(self._fn, place) for place in given}
        return sorted(place for place in self._carry if isinstance(place, str) and place not in labels)

    def _check_drift(self, job: _Job, carried: Mapping[str, Any], returned: Returned, result: Any) -> list[str]:
        """Raises DriftError if a carried argument comes back as another; returns notes."""
        lines: list[str] = []
        weak: list[str] = []
        for name, taken in carried.items():
            if name not in returned.paths:
                raise DriftError(
                    f"the step does not return {name!r}, which it is to take again at the next call: return it, or say in "
                    "carry= which arguments come back (the donated ones, if not given; () for none)"
                )
            drifted, drifted_weakly = signature_drift(name, taken, returned.part(name, result))
            lines += drifted
            weak += drifted_weakly
        if self._strict == "weak_type":
            lines, weak = lines + weak, []
        if lines:
            raise self._drift(job, lines)
        return [f"harmless here, but jit would compile twice: {line}" for line in weak]

    def _check_shardings(
        self,
        contract: _Contract,
        job: _Job,
        carried: Mapping[str, Any],
        returned: Returned,
        compiled: jax.stages.Compiled,
    ) -> None:
        """Raises DriftError if a carried argument comes back in another sharding than an executable takes it in."""
        taken = self._carried(contract, job, compiled.input_shardings)
        lines: list[str] = []
        for name, avals in carried.items():
            lines += sharding_drift(name, avals, taken[name], returned.part(name, compiled.output_shardings))
        if lines:
            raise self._drift(job, lines)

    def _drift(self, job: _Job, lines: list[str]) -> DriftError:
        return DriftError(
            f"the step returns another state than it takes (found for {job.bucket}), so the second step would need another "
            f"program:\n{explained(lines)}",
            lines,
        )

    def _check_budget(self, contract: _Contract, made: Sequence[Executable]) -> None:
        """Raises BudgetError if an executable needs more memory than there is."""
        if contract.memory is None:
            return
        over = [each for each in made if each.cost.peak_bytes > contract.memory]
        if over:
            listed = "\n".join(
                f"  {each}: {each.cost.peak_bytes / 2**20:,.1f} MiB (arguments {each.cost.argument_bytes / 2**20:,.1f}, "
                f"temporaries {each.cost.temporary_bytes / 2**20:,.1f})"
                for each in over
            )
            raise BudgetError(
                f"{len(over)} of {len(made)} buckets need more than the {contract.memory / 2**20:,.1f} MiB that a device may "
                f"hold:\n{listed}\nPlan with a smaller token_budget or batch_size, or let fit_batch_sizes() find it."
            )

    def _hold(self, job: _Job, executable: Executable) -> None:
        contract = self._contract
        assert contract is not None
        args, kwargs = replaced(job.args, job.kwargs, contract.place, job.batch)
        self._held = {**self._held, self._signature(contract, args, kwargs): executable}
        self._dispatch = {self._key(args, kwargs): executable, **self._dispatch}

    def _drop(self, executables: Sequence[Executable]) -> None:
        self._held = {key: each for key, each in self._held.items() if each not in executables}
        self._dispatch = {key: each for key, each in self._dispatch.items() if each not in executables}

    def _signature(self, contract: _Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """Returns the whole of what decides on an executable: the batch's tree, shapes and dtypes, and the static values."""
        return (signature_of(_at(args, kwargs, contract.place)), _static_key(contract.statics, args, kwargs))

    def _prepared(self, batch: Any, check: Callable[[Any], None] | None = None) -> Any:
        """Returns what `fn` takes for a batch of the loader; `check` sees it before it is put on devices."""
        if self._prepare is not None:
            batch = self._prepare(batch)
        if check is not None:
            check(batch)
        if self._sharding is None or _lies_on(batch, self._sharding):
            return batch
        return jax.device_put(batch, self._sharding)

    def _passed(
        self, contract: _Contract, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns what an executable takes for a call: the batch prepared, without the static arguments."""
        args, kwargs = replaced(args, kwargs, contract.place, self._prepared(_at(args, kwargs, contract.place)))
        return without(contract.statics, args, kwargs) if contract.statics else (args, kwargs)

    def _missed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable:
        """Returns the executable for a call that the dispatch does not know, or raises what is wrong with it."""
        contract = self._contract
        if contract is None:
            raise StepError("the step has no executables yet: call compile(state, BATCH) before the first step")
        try:
            batch = _at(args, kwargs, contract.place)
            signature = self._signature(contract, args, kwargs)
            found = self._held.get(signature)
        except (IndexError, KeyError):
            raise SignatureError(
                f"the step was compiled with the batch as argument {contract.place!r}"
                + (f" and static arguments {[*contract.statics]}" if contract.statics else "")
                + f", but was called with {len(args)} positional arguments and the keywords {sorted(kwargs)}: call it as "
                "compile() was called"
            ) from None
        except TypeError as error:  # from hash()
            raise SignatureError(
                f"a static argument cannot be hashed ({error}): give a tuple, a string or a number"
            ) from None
        if found is not None:
            return found
        if self._on_miss == "error":
            raise self._no_executable(contract, batch, args, kwargs)
        return self._compiled_late(contract, batch, args, kwargs)

    def _compiled_late(
        self, contract: _Contract, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Executable:
        """Compiles for a call that was a miss, within the cap."""
        with self._lock:
            signature = self._signature(contract, args, kwargs)
            if signature in self._held:  # another thread was first
                return self._held[signature]
            self._check_arguments(contract, args, kwargs)
            if len(self._held) >= self._cap:
                if self._on_miss == "compile":
                    error = self._no_executable(contract, batch, args, kwargs)
                    error.add_note(f"shapebucket: the {self._cap} executables that max_executables allows are there")
                    raise error
                self._drop(self.executables[: len(self._held) - self._cap + 1])
                release()
            bucket = contract.buckets.get(signature_of(batch))
            job = _Job(bucket, batch, args, kwargs)
            (made,), _ = self._compile_all(contract, [job], 1, progress=False)
            self._hold(job, made)
        _log.warning(
            "compiled %s on a miss, in %.2f s; %d of %d executables", made, made.seconds, len(self._held), self._cap
        )
        return made

    def _check_arguments(self, contract: _Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises SignatureError if what stands beside the batch is not what the executables held take."""
        if self._held:
            compiled = next(iter(self._held.values())).compiled
            passed = without(contract.statics, args, kwargs)
            found = argument_differences(self._fn, compiled, *passed, contract.statics)
            found.pop(label_of(self._fn, contract.place), None)
            if found:
                raise self._refusal(found)

    def _refused(
        self,
        contract: _Contract,
        held: Executable,
        error: Exception,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        passed: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> Any:
        """Explains why an executable refused a call, or runs the right one: the dispatch looks at a few leaves alone."""
        if self._held.get(self._signature(contract, *given)) is not held:
            right = self._missed(*given)
            right.calls += 1
            right.last_used = time.monotonic()
            return right.compiled(*passed[0], **passed[1])
        if lines := argument_differences(self._fn, held.compiled, *passed, contract.statics):
            raise self._refusal(lines) from error
        raise error  # not about the arguments

    def _refusal(self, found: Mapping[str, list[str]]) -> SignatureError:
        """Explains JAX's refusal of a call by the leaves that differ."""
        lines = [line for each in found.values() for line in each]
        return SignatureError(
            "the arguments are not those that the step was compiled for; JAX would compile anew:\n"
            f"{explained(lines)}\n"
            "Usual causes: the step returns a state of another dtype, shape, tree or sharding than it takes (a Python scalar, "
            "a promoted dtype, None that becomes an array), a donated state is used twice, prepare= gives another batch than "
            "it gave for padding, or the state that compile() saw lay elsewhere. Cast inside the step, or compile() with what "
            "will be passed.",
            lines,
        )

    def _reconfigured(self, contract: _Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function itself under `jax.disable_jit()`; raises under any other change of the settings."""
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            self._check_arguments(contract, args, kwargs)
            args, kwargs = replaced(args, kwargs, contract.place, self._prepared(_at(args, kwargs, contract.place)))
            return self._fn(*args, **kwargs)
        lines = changed_settings(contract.settings) or ["the step is called inside of a transformation, such as vmap"]
        raise SignatureError(
            "JAX's settings are not those that the step was compiled under, and an executable would silently keep to the old "
            f"ones:\n{explained(lines)}\nCall it under the settings of compile(), or compile() under these.",
            lines,
        )

    def _no_executable(
        self, contract: _Contract, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> SignatureError:
        """Explains why there is no executable for a call: by its difference from the nearest bucket, or what else."""
        if (bucket := contract.buckets.get(signature_of(batch))) is not None:
            held = [each for each in self._held.values() if each.bucket == bucket]
            if not held:
                return SignatureError(
                    f'the executable of {bucket} was evicted: compile() again, or say on_miss="evict"'
                )
            values = {label_of(self._fn, place): _at(args, kwargs, place) for place in contract.statics}
            lines = [f"{name}={value!r} received" for name, value in values.items()]
            compiled_for = "; ".join(str(dict(each.statics)) for each in held)
            return SignatureError(
                f"the step was compiled for other static values:\n{explained(lines)}\n"
                f"It was compiled for {compiled_for}. Give compile() OneOf all the values it will take, or pass as an array "
                "what takes many",
                lines,
            )
        found = _specs(batch)
        nearest, lines = self._nearest(found)
        lines = lines or [f"the containers: {jax.tree.structure(batch)} received, nested dicts expected"]
        return SignatureError(
            f"the batch is of no bucket, so the step has no executable for it; nearest is {nearest}:\n{explained(lines)}\n"
            f"{self._part_of_a_batch(found, nearest)}"
            "Batches must come from a loader with this plan and reach the step as they left it: declare a change between "
            "the two (a cast, an added feature) as prepare=. "
            f"The plan's buckets: {', '.join(map(str, self.plan.buckets))}",
            lines,
        )

    def _nearest(self, found: Mapping[str, ArraySpec]) -> tuple[Bucket, list[str]]:
        """Returns the bucket whose batches differ least from these leaves, and how they differ."""
        candidates: list[tuple[float, Bucket, list[str]]] = []
        for bucket in self.plan.buckets:
            distance, lines = difference(found, _specs(self.plan.batch_spec(bucket)))
            candidates.append((distance, bucket, lines))
        _, nearest, lines = min(candidates, key=lambda each: each[0])
        return nearest, lines

    def _part_of_a_batch(self, found: Mapping[str, ArraySpec], nearest: Bucket) -> str:
        """Says that a batch looks like one process's rows, if it does."""
        count = jax.process_count()
        rows = {spec.shape[0] for spec in found.values() if spec.shape}
        if count > 1 and rows == {nearest.batch_size // count}:
            return f"It has the rows of one of {count} processes: put the whole batch together with make_global(). "
        return ""


def _cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _no_key(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Hashable:
    """Stands for the key before `compile`."""
    raise KeyError


def _key_of(contract: _Contract) -> Callable[[tuple[Any, ...], dict[str, Any]], Hashable]:
    """Returns a function from a call's arguments to what the dispatch looks up: cheap, and of enough to tell the buckets."""
    place, paths, statics = contract.place, contract.paths, contract.statics
    if isinstance(place, int) and not statics and len(paths) == 1 and len(paths[0]) == 1:  # by far the most
        name = paths[0][0]
        return lambda args, kwargs: args[place][name].shape  # noqa: ARG005

    def key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        batch = _at(args, kwargs, place)
        shapes = tuple([leaf_at(batch, path).shape for path in paths])
        return (shapes, _static_key(statics, args, kwargs)) if statics else shapes

    return key


def _static_key(statics: Sequence[Place], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Returns the values of the static arguments as `jit` tells them apart: 1 is not True."""
    values = [_at(args, kwargs, place) for place in statics]
    return tuple([(type(value), value) for value in values])


def _at(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: Place) -> Any:
    return args[place] if isinstance(place, int) else kwargs[place]


def _variants(
    args: tuple[Any, ...], kwargs: dict[str, Any], statics: Sequence[Place]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Returns the arguments with each combination of the static values."""
    for place in (*range(len(args)), *kwargs):
        value = _at(args, kwargs, place)
        if isinstance(value, OneOf) and place not in statics:
            raise StepError(f"OneOf is for static arguments, but argument {place!r} is none: see static_argnames")
    choices: list[tuple[Any, ...]] = []
    for place in statics:
        value = _at(args, kwargs, place)
        values: tuple[Any, ...] = value.values if isinstance(value, OneOf) else (value,)
        try:
            unique = {(type(each), each): each for each in values}
        except TypeError as error:
            raise StepError(
                f"the static argument {place!r} cannot be hashed ({error}): give a tuple, a string …"
            ) from None
        choices.append(tuple(unique.values()))
    for combination in itertools.product(*choices):
        chosen = args, kwargs
        for place, value in zip(statics, combination, strict=True):
            chosen = replaced(*chosen, place, value)
        yield chosen


def _lies_on(batch: Any, sharding: Any) -> bool:
    """Says whether each leaf of a batch lies on one sharding already: putting it there again would take 0.1 ms."""
    return isinstance(sharding, jax.sharding.Sharding) and all(
        isinstance(leaf, jax.Array) and leaf.sharding == sharding for leaf in jax.tree.leaves(batch)
    )


def _refuse_64_bits(batch: Any) -> None:
    """Raises StepError for numpy arrays that JAX would silently cut to 32 bits."""
    for path, spec in _specs(batch).items():
        if (read := as_jit_reads(spec)) != spec:
            raise StepError(
                f"{path!r} of the batch is {spec.dtype}, which JAX silently cuts to {read.dtype}: cast it with .map() or "
                "prepare=, or enable jax_enable_x64"
            )


def _specs(batch: Any) -> dict[str, ArraySpec]:
    """Returns the shape and dtype of each leaf, by its path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): spec_of(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    }
