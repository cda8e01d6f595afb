"""CompiledStep: one executable for each bucket, made before step 0, and an error for everything else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

import jax

from shapebucket.buckets import Bucket, BucketPlan
from shapebucket.errors import SignatureError, StepError
from shapebucket.loader_report import Overlong, is_whole
from shapebucket.padding import pad
from shapebucket.step import _jax_private, inference, refusals
from shapebucket.step.arguments import at, filled, label_of, places_of_batch, refuse_own_names, replaced, without
from shapebucket.step.contract import Arguments, Contract, Job, Stock, static_key, variants
from shapebucket.step.memory import device_bytes, release
from shapebucket.step.recipe import Carry, Recipe, check_budget
from shapebucket.step.report import CompileReport, Executable
from shapebucket.step.settings import named_settings
from shapebucket.step.signature import Taken, argument_differences, signature_of, telling_leaves

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
    So nothing compiles after `compile`, and the number of executables never exceeds that of the buckets, times the declared
    values of static arguments.

        step = CompiledStep(train_step, plan, donate_argnames="state")
        print(step.compile(state, BATCH))
        for batch in loader:
            state, loss = step(state, batch)

    A call looks at the shapes of the one or two leaves of the batch that tell its bucket, and at JAX's settings; the
    executable itself checks the tree, shapes, dtypes and shardings of all arguments, in C++. Three things it takes although
    `jit` would compile anew for them: an array that lies on no device yet (numpy's, or uncommitted) for one that does, and a
    mesh with its axes renamed, which change no result; and a weakly typed array or Python number for another of the same
    dtype, which is computed with as the first was: the report of `compile` names what is weakly typed. 64-bit numpy arrays
    are cut to 32 bits, as `jit` does it.

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
        carry: Carry | None = None,
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
                given; `()` for none. Each is looked for in the result by its tree, in order; `{"state": 1}`, or a tuple of
                indices and keys, says where it is.
            strict: `"weak_type"` also refuses weakly typed arguments, and carried ones that come back weakly typed, or no
                longer so: `jit` would compile again, an executable keeps to the dtypes it was compiled with. They are
                notes in the report otherwise.
            on_miss: what becomes of a batch or static value without an executable: `"error"`; `"compile"`, as long as there
                are fewer than `max_executables`, and an error then; `"evict"`, where the least recently used one goes
                for it. Both log each compile as a warning. A batch that differs from a bucket's in a dtype alone takes some
                50 µs longer to find its executable.
            max_executables: the cap; the number of buckets times that of declared static variants if not given. It must be
                given for `on_miss="compile"`.
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
        for name, number in (("max_executables", max_executables), ("memory_budget", memory_budget)):
            if number is not None and not is_whole(number, 1):
                raise StepError(f"{name} must be a whole number of at least 1, but got {number!r}")
        if on_miss == "compile" and max_executables is None:
            raise StepError(
                'on_miss="compile" needs max_executables=: all of the buckets are there before the first miss'
            )
        refuse_own_names("compile()", _OWN_NAMES, fn)
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
        self._stock: Stock | None = None

    def __str__(self) -> str:
        name = getattr(self._fn, "__name__", repr(self._fn))
        return f"CompiledStep({name}, {len(self.executables)} executables for {len(self.plan)} buckets)"

    def __enter__(self) -> CompiledStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.clear()

    @property
    def executables(self) -> tuple[Executable, ...]:
        """The executables held, the least recently used first; never more than the cap."""
        return () if self._stock is None else self._stock.by_age

    def compile(self, *args: Any, progress: bool = True, threads: int | None = None, **kwargs: Any) -> CompileReport:
        """Compiles the step for every bucket. A second call drops the executables and compiles for new arguments.

        With fewer than all allowed by `max_executables`, the first buckets of the plan are compiled, the others when
        they come.

        Args:
            *args: the arguments of the step, as it will be called, with `BATCH` in the batch's place, or in those of several
                batches, which are of one bucket at each call. Arrays, or `jax.ShapeDtypeStruct`s; they are not consumed. A
                static argument may be `OneOf` several values.
            progress: whether to show a progress bar on standard error.
            threads: how many programs XLA compiles at a time: as many as there are cores, if not given. Tracing goes on one
                after another, in this thread.
            **kwargs: likewise.

        Returns:
            Seconds, flops and bytes of each executable.

        Raises:
            StepError: if `BATCH` is not among the arguments, or a batch has 64-bit numbers, which JAX would
                silently cut to 32 bits without `jax_enable_x64`.
            DriftError: if the step returns a carried argument with another tree, shape, dtype or sharding than it takes.
            BudgetError: if a bucket needs more memory than there is.
            LayoutError: if the plan does not know the dtypes.
            Exception: what tracing and compiling the function raises, with the bucket in a note.
        """
        started = time.perf_counter()
        places = places_of_batch("compile()", args, kwargs)
        if threads is not None and not is_whole(threads, 1):
            raise StepError(f"compile() got threads={threads!r}; it needs a whole number of at least one")
        with self._lock, jax.disable_jit(False):  # what is debugged under disable_jit() is compiled all the same
            (args, kwargs), statics, modules = self._recipe.bound(args, kwargs)
            batches = {bucket: pad([], bucket, self.plan) for bucket in self.plan.buckets}
            chosen = list(variants(args, kwargs, statics))
            jobs = [Job(bucket, (batch,) * len(places), *each) for bucket, batch in batches.items() for each in chosen]
            cap = self._max_executables or len(jobs)
            if cap < len(jobs) and self._on_miss == "error":
                raise StepError(
                    f"max_executables={cap} is less than the {len(self.plan)} buckets times {len(chosen)} static variants "
                    'would take: say on_miss="evict", or plan fewer buckets'
                )
            if self._stock is not None:  # not two sets of programs at a time
                self._stock = None
                release()
            contract = Contract(
                places=places,
                statics=statics,
                paths=tuple(telling_leaves(list(batches.values()))),
                buckets={signature_of((batch,) * len(places)): bucket for bucket, batch in batches.items()},
                configuration=_configuration(),
                settings=named_settings(),
                memory=device_bytes() if self._memory_budget is None else self._memory_budget,
                cap=cap,
                modules=modules,
            )
            made, notes = self._recipe.make(contract, jobs[:cap], threads, progress)
            self._stock = Stock.of(contract, jobs[:cap], made)
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
            DriftError, BudgetError: for what is compiled on a miss.
        """
        stock = self._stock
        if stock is None:
            raise StepError("the step has no executables yet: call compile(state, BATCH) before the first step")
        if (modules := stock.contract.modules) is None:
            return self._run(stock, args, kwargs)
        args, kwargs, instance = modules.bind(args, kwargs)
        return instance.update(self._run(stock, args, kwargs))

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
        stock = self._stock
        if stock is None:
            raise StepError("the step has no executables yet: call compile(params, BATCH) before predict()")
        contract = stock.contract
        refuse_own_names("predict()", _PREDICT_NAMES, self._fn)
        if len(contract.places) != 1:
            raise StepError(f"predict() is for steps of one batch, but this one takes {len(contract.places)}")
        (place_of_batch,) = contract.places
        own = {place_of_batch, *(() if contract.modules is None else contract.modules.places)}
        for place in (*range(len(args)), *kwargs):
            if place in self._recipe.donated and place not in own:
                raise StepError(
                    f"predict() gives {label_of(self._fn, place)!r} to the step for each batch, but it is donated to the "
                    "first: give inference a CompiledStep without donation"
                )
        try:
            samples, statics = at(args, kwargs, place_of_batch), static_key(contract.statics, args, kwargs)
        except (IndexError, KeyError):
            raise refusals.other_place(contract, args, kwargs) from None

        def run(batch: dict[str, Any]) -> Any:
            called = replaced(args, kwargs, place_of_batch, batch)
            return self(*called[0], **called[1])

        def returned() -> inference.Returned:
            held = [each for (_, key), each in (self._stock or stock).held.items() if key == statics]
            infos = {each.bucket: each.compiled.out_info for each in held if each.bucket is not None}
            return infos if contract.modules is None else {bucket: info[0] for bucket, info in infos.items()}

        return inference.predict(run, returned, samples, self.plan, overlong=overlong, outputs=outputs)

    def _run(self, stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the executable of a call, whose arguments hold no modules."""
        contract = stock.contract
        if contract.configuration != _configuration():
            return self._reconfigured(stock, args, kwargs)
        try:
            held = stock.dispatch[stock.key(args, kwargs)]
        except (AttributeError, IndexError, KeyError, TypeError):
            held = self._missed(stock, args, kwargs)
        given = args, kwargs
        if contract.statics or self._recipe.changes_batches:
            args, kwargs = without(contract.statics, *self._with_prepared(contract, args, kwargs))
        while True:
            held.calls += 1
            held.last_used = _now()
            try:
                return held.compiled(*args, **kwargs)
            except (TypeError, ValueError, RuntimeError) as error:
                held.calls -= 1
                held = self._instead(stock, held, error, given, (args, kwargs))

    def _instead(
        self, stock: Stock, held: Executable, error: Exception, given: Arguments, passed: Arguments
    ) -> Executable:
        """Returns the executable that a call should have had, since the dispatch looks at a few leaves alone; or raises.

        What it raises explains why an executable refused the call, or is the error of a step that ran.
        """
        if isinstance(error, RuntimeError):
            if lines := refusals.donated_twice(self._fn, self._recipe.donated, error, *given):
                raise refusals.same_buffer(lines) from error
            if not str(error).startswith("Array has been deleted"):
                raise error  # the step ran, and failed
        if held is not (right := self._missed(stock, *given)):
            return right
        taken = Taken.by(held.compiled)
        if found := argument_differences(self._fn, taken, *passed, stock.contract.statics):
            raise refusals.other_arguments(found) from error
        raise error  # not about the arguments

    def evict(self, bucket: Bucket) -> None:
        """Drops the executables of a bucket, and gives their memory back. Does nothing where there are none.

        Its next batch is a miss: see `on_miss`.
        """
        with self._lock:
            if self._stock is not None:
                self._stock = self._stock.minus([each for each in self._stock.held.values() if each.bucket == bucket])
        release()

    def clear(self) -> None:
        """Drops all executables, and gives their memory back. The step must be compiled again before a call."""
        with self._lock:
            self._stock = None
        release()

    close = clear

    def _with_prepared(self, contract: Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        batches = [self._recipe.prepared(batch) for batch in contract.batches(args, kwargs)]
        return filled(args, kwargs, contract.places, batches)

    def _missed(self, stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable:
        """Returns the executable for a call that the dispatch does not know, or raises what is wrong with it."""
        try:
            found = stock.held.get(stock.contract.signature(args, kwargs))
        except (IndexError, KeyError):
            raise refusals.other_place(stock.contract, args, kwargs) from None
        except TypeError as error:  # from hash()
            raise SignatureError(
                f"a static argument cannot be hashed ({error}): give a tuple, a string or a number"
            ) from None
        if found is not None:
            return found
        if self._on_miss == "error":
            raise self._no_executable(stock, args, kwargs)
        return self._compiled_late(stock.contract, args, kwargs)

    def _no_executable(self, stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SignatureError:
        return refusals.no_executable(self._fn, self.plan, stock, args, kwargs, capped=self._on_miss == "compile")

    def _compiled_late(self, contract: Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable:
        """Compiles for a call that was a miss, within the cap."""
        with self._lock:
            stock = self._stock
            if stock is None or stock.contract is not contract:
                raise StepError("the step was cleared, or compiled anew, while a call waited to compile: call it again")
            signature = contract.signature(args, kwargs)
            if signature in stock.held:  # another thread was first
                return stock.held[signature]
            self._check_arguments(stock, args, kwargs)
            if len(stock.held) >= contract.cap and self._on_miss == "compile":
                raise self._no_executable(stock, args, kwargs)
            batches = contract.batches(args, kwargs)
            job = Job(contract.buckets.get(signature_of(batches)), batches, args, kwargs)
            finish, _ = self._recipe.traced(
                contract, job
            )  # what is wrong with it shows here, before anything is dropped
            if len(stock.held) >= contract.cap:
                stock = self._stock = stock.minus(stock.by_age[: len(stock.held) - contract.cap + 1])
                release()
            made = finish()
            check_budget(contract, [made])
            self._stock = stock.plus(job, made)
            count = len(self._stock.held)
        _log.warning("compiled %s on a miss, in %.2f s; %d of %d executables", made, made.seconds, count, contract.cap)
        return made

    def _check_arguments(self, stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises SignatureError if what stands beside the batch is not what the step was compiled for."""
        contract = stock.contract
        passed = without(contract.statics, args, kwargs)
        found = argument_differences(self._fn, stock.taken, *passed, contract.statics)
        for place in contract.places:
            found.pop(label_of(self._fn, place), None)
        if found:
            raise refusals.other_arguments(found)

    def _reconfigured(self, stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function itself under `jax.disable_jit()`; raises under any other change of the settings."""
        contract = stock.contract
        if not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            raise refusals.other_settings(contract)
        if self._on_miss == "error":
            self._missed(stock, args, kwargs)
        self._check_arguments(stock, args, kwargs)
        args, kwargs = self._with_prepared(contract, args, kwargs)
        fn = self._fn if contract.modules is None else contract.modules.pure(self._fn)
        return fn(*args, **kwargs)
