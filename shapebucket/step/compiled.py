"""CompiledStep: one executable for each bucket, made before step 0, and an error for everything else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Literal

import jax

from shapebucket.buckets import Bucket, BucketPlan
from shapebucket.errors import SignatureError, StepError
from shapebucket.loader_report import Overlong
from shapebucket.padding import pad
from shapebucket.step import _jax_private, inference, refusals
from shapebucket.step.arguments import at, label_of, parameters_of, place_of_batch, replaced, without
from shapebucket.step.contract import Arguments, Contract, Job, static_key, variants
from shapebucket.step.memory import device_bytes, release
from shapebucket.step.modules import modules_among
from shapebucket.step.recipe import Recipe
from shapebucket.step.report import CompileReport, Executable
from shapebucket.step.settings import named_settings
from shapebucket.step.signature import Signature, argument_differences, signature_of, telling_leaves

OnMiss = Literal["error", "compile", "evict"]

_configuration = _jax_private.configuration
_now = time.monotonic
_log = logging.getLogger("shapebucket")
_OWN_NAMES = ("progress", "threads")  # arguments of compile() itself
_PREDICT_NAMES = ("overlong", "outputs")  # of predict()


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
        self._recipe = Recipe.of(
            fn,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            prepare=prepare,
            batch_sharding=batch_sharding,
            carry=carry,
            weak_types=strict == "weak_type",
        )
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
        place = place_of_batch("compile()", args, kwargs)
        if threads is not None and threads < 1:
            raise StepError(f"compile() got threads={threads}; it needs at least one")
        with self._lock:
            self._forget()
            statics = tuple(place for place in (*range(len(args)), *kwargs) if place in self._recipe.statics)
            modules = modules_among(self._fn, args, kwargs, statics, self._recipe.donated)
            if modules is not None:
                args, kwargs, _ = modules.bind(args, kwargs)
            batches = {bucket: pad([], bucket, self.plan) for bucket in self.plan.buckets}
            chosen = list(variants(args, kwargs, statics))
            jobs = [Job(bucket, batch, *each) for bucket, batch in batches.items() for each in chosen]
            cap = self._max_executables or len(jobs)
            if cap < len(jobs) and self._on_miss == "error":
                raise StepError(
                    f"max_executables={cap} is less than the {len(self.plan)} buckets times {len(chosen)} static variants "
                    'would take: say on_miss="evict", or plan fewer buckets'
                )
            contract = Contract(
                place=place,
                statics=statics,
                paths=tuple(telling_leaves(list(batches.values()))),
                buckets={signature_of(batch): bucket for bucket, batch in batches.items()},
                configuration=_configuration(),
                settings=named_settings(),
                memory=self._memory_budget or device_bytes(),
                cap=cap,
                modules=modules,
            )
            made, notes = self._recipe.make(contract, jobs[:cap], threads, progress)
            self._contract, self._key = contract, contract.key()
            for job, executable in zip(jobs, made, strict=False):  # as many as the cap allows
                self._hold(contract, job, executable)
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
        contract = self._contract
        if contract is None:
            raise StepError("the step has no executables yet: call compile(state, BATCH) before the first step")
        if contract.modules is not None:
            args, kwargs, instance = contract.modules.bind(args, kwargs)
            return instance.update(self._run(contract, args, kwargs))
        return self._run(contract, args, kwargs)

    def predict(
        self, *args: Any, overlong: Overlong = "error", outputs: inference.Outputs | None = None, **kwargs: Any
    ) -> list[Any]:
        """Runs raw samples: pads them into as few batches as their buckets allow, and gives the outputs back one a sample.

            probabilities = step.predict(params, samples)

        The step runs once for each batch, with the same arguments beside it. Rows that are padding, and padding within a row,
        are cut off what it returns, so a model that honours the masks gives what it would give for each sample alone, to
        rounding. Which dimensions of an output are cut follows from its shapes over the buckets: the first one has the rows,
        one that is as long as an axis in each bucket is that axis.

        Args:
            *args: as the step is called, with the samples, any iterable that ends, in the batch's place.
            overlong: what becomes of a sample that fits no bucket: `"error"`, `"truncate"` (cut to the bucket that keeps most
                of it, and so is its output), or `"drop"` (None stands in its output's place).
            outputs: the dimensions of each output after the rows, in a layout's notation, in the tree that the step returns:
                `"s 10"`, or `{"logits": "s 10", "score": ""}`. For those that cannot be told from their shapes.
            **kwargs: as the step is called.

        Returns:
            What the step returns, for each sample in the samples' order, as numpy arrays: views of its batch's.

        Raises:
            StepError: if `compile` has not been called, or an argument beside the batch is donated: the first batch takes it.
            LayoutError: for a sample that does not fit the layout, or an output whose rows or dimensions cannot be told.
            OverlongError: if a sample fits no bucket and the policy is `"error"`. Nothing ran then.
            SignatureError: as at a call.
        """
        contract = self._contract
        if contract is None:
            raise StepError("the step has no executables yet: call compile(params, BATCH) before predict()")
        if taken := sorted({each.name for each in parameters_of(self._fn)} & {*_PREDICT_NAMES}):
            raise StepError(
                f"the step has an argument {taken[0]!r}, which predict() means for itself: give it another name"
            )
        own = {contract.place, *(() if contract.modules is None else contract.modules.places)}
        for place in (*range(len(args)), *kwargs):
            if place in self._recipe.donated and place not in own:
                raise StepError(
                    f"predict() gives {label_of(self._fn, place)!r} to the step for each batch, but it is donated to the "
                    "first: give inference a CompiledStep without donation"
                )
        try:
            samples, statics = at(args, kwargs, contract.place), static_key(contract.statics, args, kwargs)
        except (IndexError, KeyError):
            raise refusals.other_place(contract, args, kwargs) from None

        def run(batch: dict[str, Any]) -> Any:
            called = replaced(args, kwargs, contract.place, batch)
            return self(*called[0], **called[1])

        def returned() -> inference.Returned:
            held = [each for (_, key), each in self._held.items() if key == statics]
            infos = {each.bucket: each.compiled.out_info for each in held if each.bucket is not None}
            return infos if contract.modules is None else {bucket: info[0] for bucket, info in infos.items()}

        return inference.predict(run, returned, samples, self.plan, overlong=overlong, outputs=outputs)

    def _run(self, contract: Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the executable of a call, whose arguments hold no modules."""
        if contract.configuration != _configuration():
            return self._reconfigured(contract, args, kwargs)
        try:
            held = self._dispatch[self._key(args, kwargs)]
        except (AttributeError, IndexError, KeyError, TypeError):
            held = self._missed(contract, args, kwargs)
        held.calls += 1
        held.last_used = _now()
        passed = args, kwargs
        if contract.statics or self._recipe.changes_batches:
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
        self._contract: Contract | None = None
        # A call reads these without a lock, so they are replaced as a whole, never changed.
        self._held: dict[Signature, Executable] = {}
        self._dispatch: dict[Hashable, Executable] = {}
        self._key: Callable[[tuple[Any, ...], dict[str, Any]], Hashable]

    def _hold(self, contract: Contract, job: Job, executable: Executable) -> None:
        args, kwargs = replaced(job.args, job.kwargs, contract.place, job.batch)
        self._held = {**self._held, contract.signature(args, kwargs): executable}
        self._dispatch = {self._key(args, kwargs): executable, **self._dispatch}

    def _drop(self, executables: Sequence[Executable]) -> None:
        self._held = {key: each for key, each in self._held.items() if each not in executables}
        self._dispatch = {key: each for key, each in self._dispatch.items() if each not in executables}

    def _passed(self, contract: Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns what an executable takes for a call: the batch prepared, without the static arguments."""
        batch = self._recipe.prepared(at(args, kwargs, contract.place))
        return without(contract.statics, *replaced(args, kwargs, contract.place, batch))

    def _missed(self, contract: Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable:
        """Returns the executable for a call that the dispatch does not know, or raises what is wrong with it."""
        try:
            found = self._held.get(contract.signature(args, kwargs))
        except (IndexError, KeyError):
            raise refusals.other_place(contract, args, kwargs) from None
        except TypeError as error:  # from hash()
            raise SignatureError(
                f"a static argument cannot be hashed ({error}): give a tuple, a string or a number"
            ) from None
        if found is not None:
            return found
        if self._on_miss == "error":
            raise self._no_executable(contract, args, kwargs)
        return self._compiled_late(contract, args, kwargs)

    def _no_executable(self, contract: Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SignatureError:
        return refusals.no_executable(self._fn, self.plan, contract, self._held.values(), args, kwargs)

    def _compiled_late(self, contract: Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable:
        """Compiles for a call that was a miss, within the cap."""
        with self._lock:
            signature = contract.signature(args, kwargs)
            if signature in self._held:  # another thread was first
                return self._held[signature]
            self._check_arguments(contract, args, kwargs)
            if len(self._held) >= contract.cap:
                if self._on_miss == "compile":
                    error = self._no_executable(contract, args, kwargs)
                    error.add_note(f"shapebucket: the {contract.cap} executables that max_executables allows are there")
                    raise error
                self._drop(self.executables[: len(self._held) - contract.cap + 1])
                release()
            batch = at(args, kwargs, contract.place)
            job = Job(contract.buckets.get(signature_of(batch)), batch, args, kwargs)
            (made,), _ = self._recipe.make(contract, [job], 1, progress=False)
            self._hold(contract, job, made)
            count = len(self._held)
        _log.warning("compiled %s on a miss, in %.2f s; %d of %d executables", made, made.seconds, count, contract.cap)
        return made

    def _check_arguments(self, contract: Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises SignatureError if what stands beside the batch is not what the executables held take."""
        for held in self._held.values():
            passed = without(contract.statics, args, kwargs)
            found = argument_differences(self._fn, held.compiled, *passed, contract.statics)
            found.pop(label_of(self._fn, contract.place), None)
            if found:
                raise refusals.other_arguments(found)
            return  # they all take the same

    def _refused(
        self, contract: Contract, held: Executable, error: Exception, given: Arguments, passed: Arguments
    ) -> Any:
        """Explains why an executable refused a call, or runs the right one: the dispatch looks at a few leaves alone."""
        if self._held.get(contract.signature(*given)) is not held:
            right = self._missed(contract, *given)
            right.calls += 1
            right.last_used = _now()
            return right.compiled(*passed[0], **passed[1])
        if found := argument_differences(self._fn, held.compiled, *passed, contract.statics):
            raise refusals.other_arguments(found) from error
        raise error  # not about the arguments

    def _reconfigured(self, contract: Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function itself under `jax.disable_jit()`; raises under any other change of the settings."""
        if not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            raise refusals.other_settings(contract)
        if self._on_miss == "error":
            self._missed(contract, args, kwargs)
        self._check_arguments(contract, args, kwargs)
        batch = self._recipe.prepared(at(args, kwargs, contract.place))
        args, kwargs = replaced(args, kwargs, contract.place, batch)
        fn = self._fn if contract.modules is None else contract.modules.pure(self._fn)
        return fn(*args, **kwargs)
