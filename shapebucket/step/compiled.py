"""CompiledStep: one executable for each bucket, made before step 0, and an error for everything else."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import jax

from shapebucket.buckets import ArraySpec, Bucket, BucketPlan
from shapebucket.errors import SignatureError, StepError
from shapebucket.padding import pad
from shapebucket.step.signature import Signature, argument_differences, as_jit_reads, difference, signature_of, spec_of
from shapebucket.tables import progress_bars, render


class _Batch:
    def __repr__(self) -> str:
        return "BATCH"


BATCH: Final = _Batch()
"""Marks the batch's place among the arguments of `CompiledStep.compile`."""


@dataclass(frozen=True)
class CompileReport:
    """What `CompiledStep.compile` did.

    Attributes:
        seconds: of tracing, lowering and XLA together, for each bucket.
    """

    seconds: Mapping[Bucket, float]

    def __str__(self) -> str:
        rows = [[str(bucket), f"{seconds:.2f}"] for bucket, seconds in self.seconds.items()]
        total = sum(self.seconds.values())
        return render(f"{len(rows)} executables compiled in {total:.1f} s", ["bucket", "seconds"], rows, text=1)


class CompiledStep:
    """A step function with exactly one executable for each bucket of a plan.

    `compile` makes them all before the first step; a call only dispatches, by the tree, shapes and dtypes of its batch, and
    raises for any other batch, or for other arguments beside it than it was compiled for. So nothing compiles after `compile`,
    and the number of executables never exceeds the number of buckets.

        step = CompiledStep(train_step, plan, donate_argnames="state")
        step.compile(state, BATCH)
        for batch in loader:
            state, loss = step(state, batch)

    Each bucket has a Python function of its own, since JAX's caches would otherwise keep an executable alive after it was
    dropped here.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        plan: BucketPlan,
        *,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Sequence[str] | None = None,
        prepare: Callable[[Any], Any] | None = None,
        batch_sharding: Any = None,
    ) -> None:
        """Wraps a function; compiles nothing.

        Args:
            fn: the step: a pure function of arrays, not jitted; one argument is the batch.
            plan: the buckets that the batches come in.
            donate_argnums: as in `jax.jit`.
            donate_argnames: as in `jax.jit`.
            prepare: what stands between the loader and the step: a function from the loader's batch to what `fn` takes
                (adds positions, casts, …). It runs at every call, on the host. The executables are compiled for what comes
                out of it for a batch of padding alone.
            batch_sharding: a `jax.sharding.Sharding`, or a tree of them, that the prepared batch is put on; compiled for
                likewise.

        Raises:
            StepError: for a function that is jitted already, or what is no plan.
        """
        if not isinstance(plan, BucketPlan):
            raise StepError(f"CompiledStep takes a BucketPlan after the function, but got {type(plan).__name__}")
        if hasattr(fn, "lower") and hasattr(fn, "trace"):
            raise StepError("the step is jitted already: give the plain function, and donate_argnames and such here")
        self.plan = plan
        self._fn = fn
        self._jit = functools.partial(jax.jit, donate_argnums=donate_argnums, donate_argnames=donate_argnames)
        self._prepare = prepare
        self._sharding = batch_sharding
        self._place: int | str | None = None
        self._executables: dict[Bucket, jax.stages.Compiled] = {}
        self._dispatch: dict[Signature, jax.stages.Compiled] = {}

    def __str__(self) -> str:
        name = getattr(self._fn, "__name__", repr(self._fn))
        return f"CompiledStep({name}, {len(self._executables)} executables of {len(self.plan)} buckets)"

    @property
    def executables(self) -> Mapping[Bucket, jax.stages.Compiled]:
        """The executables held, by bucket; never more than `len(plan)`."""
        return MappingProxyType(self._executables)

    def compile(self, *args: Any, progress: bool = True, **kwargs: Any) -> CompileReport:
        """Compiles the step for every bucket. A second call drops the executables and compiles for new arguments.

        Args:
            *args: the arguments of the step, as it will be called, with `BATCH` in the batch's place. Arrays, or
                `jax.ShapeDtypeStruct`s; they are not consumed.
            progress: whether to show a progress bar on standard error.
            **kwargs: likewise.

        Returns:
            The seconds that each bucket took.

        Raises:
            StepError: if `BATCH` is not among the arguments exactly once, or a batch has 64-bit numbers, which JAX would
                silently cut to 32 bits without `jax_enable_x64`.
            LayoutError: if the plan does not know the dtypes.
            Exception: what tracing and compiling the function raises, with the bucket in a note.
        """
        places: list[int | str] = [index for index, value in enumerate(args) if value is BATCH]
        places += [name for name, value in kwargs.items() if value is BATCH]
        if len(places) != 1:
            raise StepError(f"compile() needs BATCH in the batch's place, once; it stands in {places or 'none'}")
        self._place, self._executables, self._dispatch = None, {}, {}
        executables: dict[Bucket, jax.stages.Compiled] = {}
        dispatch: dict[Signature, jax.stages.Compiled] = {}
        seconds: dict[Bucket, float] = {}
        with progress_bars(progress) as bars:
            task = bars.add_task("compile", total=len(self.plan), note="")
            for bucket in self.plan.buckets:
                bars.update(task, note=str(bucket))
                started = time.perf_counter()
                batch = pad([], bucket, self.plan)
                prepared = self._prepared(batch, _refuse_64_bits)
                try:
                    executables[bucket] = self._compile_one(*_replaced(args, kwargs, places[0], prepared))
                except Exception as error:
                    error.add_note(f"shapebucket: while compiling the step for the bucket {bucket}")
                    raise
                dispatch[signature_of(batch)] = executables[bucket]
                seconds[bucket] = time.perf_counter() - started
                bars.advance(task)
        self._place, self._executables, self._dispatch = places[0], executables, dispatch
        return CompileReport(seconds)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step with the executable of the batch's bucket. Never compiles.

        Args:
            *args: as `compile` was called, with the loader's batch in place of `BATCH`.
            **kwargs: likewise.

        Returns:
            What the function returns.

        Raises:
            StepError: if `compile` has not been called.
            SignatureError: if the batch is not of a bucket's shape, dtype and tree, or another argument differs from what
                was compiled for. The step did not run then, and nothing was donated.
        """
        try:
            batch = args[self._place] if type(self._place) is int else kwargs[self._place]  # pyright: ignore[reportArgumentType]
        except (IndexError, KeyError):
            raise self._no_batch(args, kwargs) from None
        try:
            executable = self._dispatch[signature_of(batch)]
        except (AttributeError, KeyError):
            raise self._no_bucket(batch) from None
        if self._prepare is not None or self._sharding is not None:
            args, kwargs = _replaced(args, kwargs, self._place, self._prepared(batch))
        try:
            return executable(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not str(error).startswith("Array has been deleted"):
                raise  # the step ran, and failed
            if lines := argument_differences(self._fn, executable, args, kwargs):
                raise self._refusal(lines) from error
            if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
                return self._fn(*args, **kwargs)  # an executable cannot run op by op; the user asked for that to debug
            raise  # not about the arguments

    def _compile_one(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Compiled:
        # A function of its own for each bucket: JAX's caches keep the executables of one function alive together.
        @functools.wraps(self._fn)
        def own(*args: Any, **kwargs: Any) -> Any:
            return self._fn(*args, **kwargs)

        return self._jit(own).lower(*args, **kwargs).compile()

    def _prepared(self, batch: Any, check: Callable[[Any], None] | None = None) -> Any:
        """Returns what `fn` takes for a batch of the loader; `check` sees it before it is put on devices."""
        if self._prepare is not None:
            batch = self._prepare(batch)
        if check is not None:
            check(batch)
        return batch if self._sharding is None else jax.device_put(batch, self._sharding)

    def _refusal(self, lines: list[str]) -> SignatureError:
        """Explains JAX's refusal of a call by the leaves that differ."""
        listed = "\n".join(f"  {line}" for line in lines)
        return SignatureError(
            "the arguments are not those that the step was compiled for; JAX would compile anew:\n"
            f"{listed}\n"
            "Usual causes: the step returns a state of another dtype, shape, tree or sharding than it takes (a Python scalar, "
            "a promoted dtype, None that becomes an array), a donated state is used twice, prepare= gives another batch than "
            "it gave for padding, or the state that compile() saw lay elsewhere. Cast inside the step, or compile() with what "
            "will be passed.",
            lines,
        )

    def _no_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepError | SignatureError:
        """Explains why a call has no batch."""
        if self._place is None:
            return StepError("the step has no executables yet: call compile(state, BATCH) before the first step")
        return SignatureError(
            f"the step was compiled with the batch as argument {self._place!r}, but was called with {len(args)} positional "
            f"arguments and the keywords {sorted(kwargs)}: call it as compile() was called"
        )

    def _no_bucket(self, batch: Any) -> SignatureError:
        """Explains why a batch is none of the plan's: by its difference from the nearest bucket."""
        found = _specs(batch)
        candidates: list[tuple[float, Bucket, list[str]]] = []
        for bucket in self.plan.buckets:
            distance, lines = difference(found, _specs(self.plan.batch_spec(bucket)))
            candidates.append((distance, bucket, lines))
        _, nearest, lines = min(candidates, key=lambda each: each[0])
        lines = lines or [f"the containers: {jax.tree.structure(batch)} received, nested dicts expected"]
        listed = "\n".join(f"  {line}" for line in lines)
        return SignatureError(
            f"the batch is of no bucket, so the step has no executable for it; nearest is {nearest}:\n{listed}\n"
            "Batches must come from a loader with this plan and reach the step as they left it: declare a change between "
            "the two (a cast, an added feature) as prepare=. "
            f"The plan's buckets: {', '.join(map(str, self.plan.buckets))}",
            lines,
        )


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str | None, batch: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with the batch in its place."""
    if isinstance(place, int):
        return (*args[:place], batch, *args[place + 1 :]), kwargs
    assert place is not None
    return args, {**kwargs, place: batch}


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
