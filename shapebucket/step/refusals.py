"""Why a call was refused, leaf by leaf, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from shapebucket.buckets import ArraySpec, Bucket, BucketPlan
from shapebucket.errors import SignatureError
from shapebucket.step.arguments import Place, at, label_of
from shapebucket.step.contract import Contract, Stock
from shapebucket.step.drift import explained
from shapebucket.step.settings import changed_settings
from shapebucket.step.signature import DELETED, difference, signature_of, specs_of


def other_place(contract: Contract, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SignatureError:
    """Explains a call without an argument that `compile` had."""
    statics = f" and the static arguments {[*contract.statics]}" if contract.statics else ""
    places = " and ".join(map(repr, contract.places))
    return SignatureError(
        f"the step was compiled with the batch as argument {places}{statics}, but was called with {len(args)} "
        f"positional arguments and the keywords {sorted(kwargs)}: call it as compile() was called"
    )


def other_arguments(found: Mapping[str, list[str]]) -> SignatureError:
    """Explains JAX's refusal of a call by the leaves that differ, which are given by argument."""
    lines = [line for each in found.values() for line in each]
    if all(line.endswith(DELETED) for line in lines):
        return SignatureError(
            f"the step was given arrays that are gone:\n{explained(lines)}\n"
            "A donated argument goes with the call: go on with what the call returned, state, loss = step(state, batch).",
            lines,
        )
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
    lines = changed_settings(contract.settings) or [
        "a setting that has no name, or a transformation such as vmap around the call"
    ]
    return SignatureError(
        "JAX's settings are not those that the step was compiled under, and an executable would silently keep to the old "
        f"ones:\n{explained(lines)}\nCall it under the settings of compile(), or compile() under these.",
        lines,
    )


def donated_twice(
    fn: Callable[..., Any], donated: Collection[Place], error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """Returns the donated leaves that are one array, where an executable refused a call for that; none for another error."""
    if "donate the same buffer twice" not in str(error):
        return []
    names: dict[int, list[str]] = {}
    for place in (*range(len(args)), *kwargs):
        if place in donated:
            for path, leaf in jax.tree_util.tree_leaves_with_path(at(args, kwargs, place)):
                names.setdefault(id(leaf), []).append(label_of(fn, place) + jax.tree_util.keystr(path))
    return [f"{' and '.join(each)} are one array" for each in names.values() if len(each) > 1]


def same_buffer(lines: list[str]) -> SignatureError:
    """Explains that a donated array is there twice."""
    return SignatureError(
        f"an array is donated twice in one call, so it could not be reused:\n{explained(lines)}\n"
        "Make each leaf an array of its own: jnp.zeros_like for each, or x.copy().",
        lines,
    )


def no_executable(
    fn: Callable[..., Any],
    plan: BucketPlan,
    stock: Stock,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    capped: bool,
) -> SignatureError:
    """Explains why there is no executable for a call: by its difference from the nearest bucket, or what else.

    Args:
        fn: the step.
        plan: its buckets.
        stock: what is there.
        args: of the call.
        kwargs: likewise.
        capped: whether one would have been compiled, if there were fewer.
    """
    contract = stock.contract
    cap = f"All of the {contract.cap} executables that max_executables allows are there. " if capped else ""
    batches = contract.batches(args, kwargs)
    if (bucket := contract.buckets.get(signature_of(batches))) is not None:
        own = [each for each in stock.held.values() if each.bucket == bucket]
        if not own:
            return SignatureError(
                f"there is no executable for {bucket} now: {cap or 'it was evicted. '}"
                'compile() again, or say on_miss="evict"'
            )
        lines = [f"{label_of(fn, place)}={at(args, kwargs, place)!r} received" for place in contract.statics]
        compiled_for = "; ".join(str(dict(each.statics)) for each in own)
        return SignatureError(
            f"the step was compiled for other static values:\n{explained(lines)}\n"
            f"It is compiled for {compiled_for}. {cap}Give compile() OneOf all the values it will take, or pass as an array "
            "what takes many",
            lines,
        )
    owners = [contract.buckets.get(signature_of((batch,) * len(batches))) for batch in batches]
    if None not in owners:
        lines = [f"{label_of(fn, place)} is of {bucket}" for place, bucket in zip(contract.places, owners, strict=True)]
        return SignatureError(
            f"the batches of a call must be of one bucket, or there would be a program for each pair:\n{explained(lines)}\n"
            "Pad what belongs together as features of one sample.",
            lines,
        )
    odd = owners.index(None)
    batch, which = batches[odd], f" {label_of(fn, contract.places[odd])!r}" if len(batches) > 1 else ""
    found = specs_of(batch)
    nearest, lines = _nearest(plan, found)
    lines = lines or [f"the containers: {jax.tree.structure(batch)} received, nested dicts expected"]
    return SignatureError(
        f"the batch{which} is of no bucket, so the step has no executable for it; nearest is {nearest}:\n{explained(lines)}\n"
        f"{cap}{_part_of_a_batch(plan, found)}"
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
