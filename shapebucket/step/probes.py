"""Probes: a step compiled for any batch size of any size, to be asked what it costs and then dropped."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax

from shapebucket.buckets import Bucket, BucketPlan
from shapebucket.errors import StepError
from shapebucket.step.arguments import Place, filled, places_of_batch, refuse_own_names
from shapebucket.step.contract import Arguments, variants
from shapebucket.step.modules import Modules
from shapebucket.step.recipe import Recipe

OPTIONS = (
    "donate_argnums",
    "donate_argnames",
    "static_argnums",
    "static_argnames",
    "in_shardings",
    "out_shardings",
    "prepare",
    "batch_sharding",
)
"""The options of `CompiledStep` that decide on a program."""


@dataclass(frozen=True)
class Probes:
    """A step, how it is to be compiled, and the arguments beside the batch.

    Attributes:
        recipe: the step with its options.
        plan: says what a batch is.
        places: of the batch, or of several of one bucket.
        statics: the places of the static arguments that were given.
        variants: the arguments, with each combination of the static values, and arrays in the place of modules.
        modules: the flax.nnx modules among the arguments; None where there are none.
    """

    recipe: Recipe
    plan: BucketPlan
    places: tuple[Place, ...]
    statics: tuple[Place, ...]
    variants: tuple[Arguments, ...]
    modules: Modules | None

    @classmethod
    def of(
        cls,
        caller: str,
        own: Collection[str],
        fn: Callable[..., Any],
        plan: BucketPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Probes:
        """Reads the arguments of a function that takes a step's, and the step's options among the keywords.

        Args:
            caller: its name, for messages.
            own: the keywords that it means for itself.
            fn: the step.
            plan: says what a batch is.
            args: of the step, with `BATCH` in the batch's place.
            kwargs: of the step, and `OPTIONS`.
        """
        if not isinstance(plan, BucketPlan):
            raise StepError(f"{caller} takes a BucketPlan after the function, but got {type(plan).__name__}")
        refuse_own_names(caller, (*OPTIONS, *own), fn)
        recipe = Recipe.of(fn, **{name: value for name, value in kwargs.items() if name in OPTIONS})
        kwargs = {name: value for name, value in kwargs.items() if name not in OPTIONS}
        places = places_of_batch(caller, args, kwargs)
        (args, kwargs), statics, modules = recipe.bound(args, kwargs)
        return cls(recipe, plan, places, statics, tuple(variants(args, kwargs, statics)), modules)

    def compile(self, bucket: Bucket, variant: Arguments, batch: Any = None) -> jax.stages.Compiled | None:
        """Compiles the step for one batch, which need not be one of the plan.

        Args:
            bucket: its shape.
            variant: the arguments beside it.
            batch: what the step takes, if it is there already.

        Returns:
            The executable, which only its holder keeps; None where the compiler itself finds that a device cannot hold it.
        """
        try:
            batch = self.recipe.abstract(self.plan, bucket) if batch is None else batch
            args, kwargs = filled(*variant, self.places, [batch] * len(self.places))
            return self.recipe.jitted(self.modules).trace(*args, **kwargs).lower().compile()
        except Exception as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
                return None  # TPUs and GPUs lay the memory out at compile time
            error.add_note(f"shapebucket: while compiling the step for {bucket}")
            raise
