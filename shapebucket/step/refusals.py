"""Why a call was refused, leaf by leaf, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from shapebucket.buckets import ArraySpec, Bucket, BucketPlan
from shapebucket.errors import SignatureError
from shapebucket.step.arguments import at, label_of
from shapebucket.step.contract import Contract
from shapebucket.step.drift import explained
from shapebucket.step.report import Executable
from shapebucket.step.settings import changed_settings
from shapebucket.step.signature import difference, signature_of, specs_of


def other_place(contract: Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SignatureError:
    """Explains a call without an argument that `compile` had."""
    statics = f" and the static arguments {[*contract.statics]}" if contract.statics else ""
    return SignatureError(
        f"the step was compiled with the batch as argument {contract.place!r}{statics}, but was called with {len(args)} "
        f"positional arguments and the keywords {sorted(kwargs)}: call it as compile() was called"
    )


def other_arguments(found: Mapping[str, list[str]]) -> SignatureError:
    """Explains JAX's refusal of a call by the leaves that differ, which are given by argument."""
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


def other_settings(contract: Contract) -> SignatureError:
    """Explains a call under other settings of JAX."""
    lines = changed_settings(contract.settings) or ["the step is called inside of a transformation, such as vmap"]
    return SignatureError(
        "JAX's settings are not those that the step was compiled under, and an executable would silently keep to the old "
        f"ones:\n{explained(lines)}\nCall it under the settings of compile(), or compile() under these.",
        lines,
    )


def no_executable(
    fn: Callable[..., Any],
    plan: BucketPlan,
    contract: Contract,
    held: Collection[Executable],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> SignatureError:
    """Explains why there is no executable for a call: by its difference from the nearest bucket, or what else."""
    batch = at(args, kwargs, contract.place)
    if (bucket := contract.buckets.get(signature_of(batch))) is not None:
        own = [each for each in held if each.bucket == bucket]
        if not own:
            return SignatureError(f'the executable of {bucket} was evicted: compile() again, or say on_miss="evict"')
        lines = [f"{label_of(fn, place)}={at(args, kwargs, place)!r} received" for place in contract.statics]
        compiled_for = "; ".join(str(dict(each.statics)) for each in own)
        return SignatureError(
            f"the step was compiled for other static values:\n{explained(lines)}\n"
            f"It was compiled for {compiled_for}. Give compile() OneOf all the values it will take, or pass as an array "
            "what takes many",
            lines,
        )
    found = specs_of(batch)
    nearest, lines = _nearest(plan, found)
    lines = lines or [f"the containers: {jax.tree.structure(batch)} received, nested dicts expected"]
    return SignatureError(
        f"the batch is of no bucket, so the step has no executable for it; nearest is {nearest}:\n{explained(lines)}\n"
        f"{_part_of_a_batch(plan, found)}"
        "Batches must come from a loader with this plan and reach the step as they left it: declare a change between "
        "the two (a cast, an added feature) as prepare=. "
        f"The plan's buckets: {', '.join(map(str, plan.buckets))}",
        lines,
    )


def _nearest(plan: BucketPlan, found: Mapping[str, ArraySpec]) -> tuple[Bucket, list[str]]:
    """Returns the bucket whose batches differ least from these leaves, and how they differ."""
    candidates: list[tuple[float, Bucket, list[str]]] = []
    for bucket in plan.buckets:
        distance, lines = difference(found, specs_of(plan.batch_spec(bucket)))
        candidates.append((distance, bucket, lines))
    _, nearest, lines = min(candidates, key=lambda each: each[0])
    return nearest, lines


def _part_of_a_batch(plan: BucketPlan, found: Mapping[str, ArraySpec]) -> str:
    """Says that a batch has one process's rows of a bucket's, if it has."""
    count = jax.process_count()
    whole = {path: (spec.shape[0] * count, *spec.shape[1:]) for path, spec in found.items() if spec.shape}
    for bucket in plan.buckets:
        if count > 1 and whole == {path: spec.shape for path, spec in specs_of(plan.batch_spec(bucket)).items()}:
            return f"It has the rows of one of {count} processes of {bucket}: make_global() puts the batch together. "
    return ""
