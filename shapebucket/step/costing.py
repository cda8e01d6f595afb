"""measure_costs: what a step costs by size, as a cost for the planner."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from shapebucket.buckets import Bucket, BucketPlan
from shapebucket.errors import BudgetError, StepError
from shapebucket.loader_report import is_whole
from shapebucket.padding import pad
from shapebucket.planner.measured import MeasuredCost
from shapebucket.step.arguments import filled, label_of, without
from shapebucket.step.contract import Arguments
from shapebucket.step.memory import release
from shapebucket.step.probes import Probes
from shapebucket.step.report import Cost
from shapebucket.tables import progress_bars

By = Literal["seconds", "flops"]
_OWN_NAMES = ("sizes", "by", "rounds", "progress")
_POINTS = {1: 6, 2: 3}
"""Sizes on each axis, by the number of axes; 2 for more."""


def measure_costs(
    fn: Callable[..., Any],
    plan: BucketPlan,
    *args: Any,
    sizes: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    by: By = "seconds",
    rounds: int = 7,
    progress: bool = True,
    **kwargs: Any,
) -> MeasuredCost:
    """Measures what the step costs at a few sizes, so that `plan_buckets` can choose boundaries by it.

        tokens = plan_buckets(lengths, layout, token_budget=16_384)
        cost = measure_costs(train_step, tokens, state, BATCH, donate_argnames="state")
        plan = plan_buckets(lengths, layout, token_budget=16_384, cost=cost)

    One program is compiled for each size, with the batch size that the plan would have there: that of its buckets, or as many
    elements a batch as the bucket that holds the size. The cost is taken to grow with the rows from there, so plan by the same
    `token_budget` or `batch_size` afterwards. `MeasuredCost` says how sizes in between are priced.

    Seconds are the medians of rounds in which each size runs once, after one that is not timed; from the call until all
    results are there. Batches are of zeros without padding, and lie on the device before. The state is never advanced: what is
    donated is a copy. Flops are XLA's own count, of one device, without running anything; it counts a loop's body once, so
    a `lax.scan` over the length seems to cost the same at any length: measure seconds there.

    Args:
        fn: the step, not jitted.
        plan: any plan of the same axes and budget, such as one by elements: it says how large the sizes are, and what a batch
            of each is. It must know the dtypes.
        *args: the arguments of the step with `BATCH` in the batch's place, as for `CompiledStep.compile`. For flops they may
            be `jax.ShapeDtypeStruct`s.
        sizes: what to measure, in elements; by axis, where there are several, and then all their combinations. Up to 6 on one
            axis if not given (3 on each of two, 2 on each of more), from the smallest of the plan's sizes to the largest,
            each as many times as large as the one before.
        by: `"seconds"` or `"flops"`.
        rounds: how often each size runs.
        progress: whether to show a progress bar on standard error.
        **kwargs: the step's keyword arguments; and the options that the step will have, as for `fit_batch_sizes`.

    Returns:
        The cost, which prints as a table.

    Raises:
        StepError: for arguments that cannot be, and flops where XLA counts none.
        BudgetError: for a size whose batch XLA finds too large for the device.
        LayoutError: if the plan does not know the dtypes.
        Exception: what tracing and compiling the function raises, with the size in a note.
    """
    probes = Probes.of("measure_costs()", _OWN_NAMES, fn, plan, args, kwargs)
    if by not in get_args(By):
        raise StepError(f"by must be one of {get_args(By)}, but is {by!r}")
    if rounds < 1:
        raise StepError(f"rounds must be at least 1, but is {rounds!r}")
    variant, *others = probes.variants
    if others:
        raise StepError("measure_costs() takes one value of each static argument: give OneOf to CompiledStep.compile")
    grid = _grid(plan, sizes)
    buckets = [_batch_of(plan, each) for each in itertools.product(*grid)]
    with progress_bars(progress) as bars:
        task = bars.add_task(f"measure {by}", total=len(buckets) * (1 + rounds * (by == "seconds")), note="")

        def done(bucket: Bucket) -> None:
            bars.update(task, advance=1, note=str(bucket))

        if by == "flops":
            spread, costs = (), [_flops(probes, bucket, variant, done) for bucket in buckets]
        else:
            _check_real(probes, variant)
            seconds = _seconds([_call(probes, bucket, variant, done) for bucket in buckets], buckets, rounds, done)
            spread = tuple(zip(seconds.min(axis=0).tolist(), seconds.max(axis=0).tolist(), strict=True))
            costs = np.median(seconds, axis=0).tolist()
    release()
    return MeasuredCost(plan.layout, grid, tuple(each.batch_size for each in buckets), tuple(costs), by, spread)


def _grid(plan: BucketPlan, given: Sequence[int] | Mapping[str, Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    """Returns the sizes on each axis, ascending."""
    axes = plan.layout.axes
    if given is None:
        points = _POINTS.get(len(axes), 2)
        return tuple(_geometric(plan.sizes[:, axis], points) for axis in range(len(axes)))
    by_axis = given if isinstance(given, Mapping) else {axes[0]: given}
    if set(by_axis) != set(axes):
        raise StepError(f"sizes must have a list for each of the axes {axes}, but is for {tuple(by_axis)}")
    for axis, each in by_axis.items():
        if not len(each) or not all(is_whole(size, 1) for size in each):
            raise StepError(f"sizes must be whole numbers of at least 1, but those of {axis!r} are {each!r}")
    return tuple(tuple(sorted({int(size) for size in by_axis[axis]})) for axis in axes)


def _geometric(sizes: Any, points: int) -> tuple[int, ...]:
    """Returns some sizes from the smallest to the largest, multiples of what all of them are multiples of."""
    step = math.gcd(*sizes.tolist())
    spaced = np.geomspace(sizes.min(), sizes.max(), points)
    return tuple(sorted({max(step, round(float(each) / step) * step) for each in spaced}))


def _batch_of(plan: BucketPlan, sizes: Sequence[int]) -> Bucket:
    """Returns a size with the rows that the plan would give it."""
    axes = tuple(zip(plan.layout.axes, sizes, strict=True))
    index = plan.index(sizes)
    held = int(np.argmax(plan.row_elements)) if index is None else index
    rows = int(plan.batch_sizes[held])
    if (plan.batch_sizes != rows).any():
        multiple = plan.batch_multiple_of
        elements = int(plan.layout.elements(sizes))
        rows = max(1, rows * int(plan.row_elements[held]) // elements // multiple) * multiple
    return Bucket(axes, rows)


def _flops(probes: Probes, bucket: Bucket, variant: Arguments, done: Callable[[Bucket], None]) -> float:
    flops = Cost.of(_compiled(probes, bucket, variant, None)).flops
    done(bucket)
    if not flops or flops < 0:
        raise StepError(f'XLA counts no flops for {bucket} on this device ({jax.default_backend()}): say by="seconds"')
    return flops


def _compiled(probes: Probes, bucket: Bucket, variant: Arguments, batch: Any) -> jax.stages.Compiled:
    compiled = probes.compile(bucket, variant, batch)
    if compiled is None:
        raise BudgetError(
            f"{bucket} is too large for the device, as XLA finds: give sizes=, or a plan of smaller batches"
        )
    return compiled


def _check_real(probes: Probes, variant: Arguments) -> None:
    """Raises StepError for an argument that is no more than a shape."""
    args, kwargs = variant
    for place, value in (*enumerate(args), *kwargs.items()):
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value)):
            name = label_of(probes.recipe.fn, place)
            raise StepError(f'{name!r} is a ShapeDtypeStruct, which cannot run: give arrays, or say by="flops"')


def _call(probes: Probes, bucket: Bucket, variant: Arguments, done: Callable[[Bucket], None]) -> Callable[[], float]:
    """Compiles the step for a batch, and returns what runs it once and says the seconds."""
    recipe, statics = probes.recipe, probes.statics
    batch = jax.device_put(recipe.prepared(_full(probes.plan, bucket)))
    compiled = _compiled(probes, bucket, variant, batch)
    args, kwargs = filled(*variant, probes.places, [batch] * len(probes.places))

    def run() -> float:
        fresh = (
            tuple(_copied(value) if place in recipe.carry else value for place, value in enumerate(args)),
            {name: _copied(value) if name in recipe.carry else value for name, value in kwargs.items()},
        )
        passed = jax.block_until_ready(without(statics, *fresh))
        started = time.perf_counter()
        jax.block_until_ready(compiled(*passed[0], **passed[1]))
        return time.perf_counter() - started

    done(bucket)
    return run


def _seconds(
    runs: Sequence[Callable[[], float]], buckets: Sequence[Bucket], rounds: int, done: Callable[[Bucket], None]
) -> Any:
    """Runs all in turn, and again: what disturbs the machine meanwhile meets them alike. Returns float64 [rounds, P]."""
    for run in runs:
        run()
    seconds = np.zeros((rounds, len(runs)))
    for each in seconds:
        for index, run in enumerate(runs):
            each[index] = run()
            done(buckets[index])
    return seconds


def _full(plan: BucketPlan, bucket: Bucket) -> dict[str, Any]:
    """Returns a batch of zeros, all of which are real."""
    leaves = [np.zeros(each.shape(bucket.sizes), each.known_dtype) for each in plan.layout.features]
    return pad([plan.layout.to_tree(leaves)] * bucket.batch_size, bucket, plan)


def _copied(tree: Any) -> Any:
    return jax.tree.map(_copy, tree)


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
