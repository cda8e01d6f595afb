"""The rules by which others choose boundaries, as planners of the same interface: to compare with, and to migrate from.

Each is written from its definition, and takes the distinct lengths that are to be held, int64 [G] ascending, how many samples
have each, int64 [G], and the number of buckets; it returns inclusive boundaries, ascending, not yet aligned. Several ignore the
number of buckets: that is their rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from shapebucket.buckets import Bucket, BucketPlan, Lengths, Masks
from shapebucket.errors import PlanError
from shapebucket.histogram import grouped
from shapebucket.layout import Layout
from shapebucket.planner.costs import Ints
from shapebucket.planner.problem import Problem, check_positive

Rule = Literal[
    "pad_to_max",
    "equal_count",
    "equal_mass",
    "percentile",
    "constant_width",
    "linear_width",
    "exponential_width",
    "geometric",
    "powers_of_two",
    "alphafold3",
    "nemo_2d",
    "quantile_grid",
]
_ALPHAFOLD3 = (128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096, 4608, 5120)


def equal_count(lengths: Ints, counts: Ints, max_buckets: int) -> Ints:
    """Cuts the sorted lengths into parts of equally many samples: quantiles."""
    samples = int(counts.sum())
    return _ordered(lengths, counts, [-(-samples * k // max_buckets) - 1 for k in range(1, max_buckets + 1)])


def equal_mass(lengths: Ints, counts: Ints, max_buckets: int) -> Ints:
    """Cuts the sorted lengths into parts of equal total length, as lhotse's `estimate_duration_buckets` does.

    A part ends with the sample that takes it beyond its share; the bound, which is exclusive, is the next sample's length.
    """
    share = float(lengths @ counts) / max_buckets
    bounds, total = list[int](), 0
    for length, left in zip(lengths.tolist(), counts.tolist(), strict=True):
        while left:
            if total > share:
                bounds.append(length)
                total = 0
            taken = min(left, int((share - total) // length) + 1)
            total += taken * length
            left -= taken
    below = np.searchsorted(lengths, np.unique(bounds)) - 1
    return np.append(lengths[below[below >= 0]], lengths[-1])


def percentile(lengths: Ints, counts: Ints, max_buckets: int) -> Ints:
    """Takes lower percentiles at equal steps, as fairseq's `--num-batch-buckets` does."""
    last = int(counts.sum()) - 1
    return _ordered(lengths, counts, [last * k // max_buckets for k in range(1, max_buckets + 1)])


def constant_width(lengths: Ints, counts: Ints, max_buckets: int) -> Ints:
    """Counts equal widths down from the longest, as gluon-nlp's ConstWidthBucket does."""
    del counts
    shortest, longest = int(lengths[0]), int(lengths[-1])
    width = max(1, (1 + longest - shortest) // max_buckets)
    return np.maximum(longest - width * np.arange(max_buckets, dtype=np.int64), shortest)


def linear_width(lengths: Ints, counts: Ints, max_buckets: int) -> Ints:
    """Cuts the range into widths 1 + α, 1 + 2α, …, as gluon-nlp's LinearWidthBucket does."""
    del counts
    shortest, longest = int(lengths[0]), int(lengths[-1])
    k = np.arange(1, max_buckets + 1)
    alpha = 2 * max(0, longest - shortest - max_buckets) / (max_buckets * (max_buckets + 1))
    return np.minimum(np.rint(shortest + alpha * k * (k + 1) / 2 + k).astype(np.int64), longest)


def exponential_width(lengths: Ints, counts: Ints, max_buckets: int) -> Ints:
    """Cuts the range into widths that grow by a factor of 1.1, as gluon-nlp's ExpWidthBucket does."""
    del counts
    shortest, longest = int(lengths[0]), int(lengths[-1])
    widths = 1.1 ** np.arange(max_buckets)
    return np.rint(shortest + (longest - shortest) * np.cumsum(widths) / widths.sum()).astype(np.int64)


def geometric(lengths: Ints, counts: Ints, max_buckets: int) -> Ints:
    """Steps from 8 by x ← max(x + 1, ⌊1.1·x⌋), as tensor2tensor does; as many buckets as that takes.

    Its bounds are tf.data's, exclusive, so that the boundaries are one less; the last bucket holds the longest.
    """
    del counts, max_buckets
    longest = int(lengths[-1])
    bounds = [8]
    while bounds[-1] <= longest:
        bounds.append(max(bounds[-1] + 1, int(bounds[-1] * 1.1)))
    return np.array([*(bound - 1 for bound in bounds[:-1]), longest], np.int64)


def powers_of_two(lengths: Ints, counts: Ints, max_buckets: int) -> Ints:
    """Takes the powers of two from 16 up, as vLLM's TPU backend does; as many buckets as that takes."""
    del counts, max_buckets
    return 2 ** np.arange(4, max(4, int(np.ceil(np.log2(max(1, lengths.max()))))) + 1, dtype=np.int64)


def alphafold3(lengths: Ints, counts: Ints, max_buckets: int) -> Ints:
    """Takes AlphaFold 3's fixed list of 128 to 5,120, as far as it is needed, and the longest sample where it is beyond."""
    del counts, max_buckets
    longest = int(lengths.max())
    last = next((size for size in _ALPHAFOLD3 if size >= longest), longest)
    return np.array([*(size for size in _ALPHAFOLD3 if size < longest), last], np.int64)


def nemo_2d(shapes: Ints, counts: Ints, max_buckets: int) -> Ints:
    """Cuts the first axis by equal mass, then the second within each part, as NeMo's two-dimensional bucketing does.

    NeMo is told both numbers of parts, and leaves out samples of unusual ratio; here all are kept.

    Args:
        shapes: int64 [G, 2].
        counts: samples of each, int64 [G].
        max_buckets: the second axis is cut into ⌊√K⌋ parts, the first into as many as then fit.

    Returns:
        Boxes, int64 [≤ K, 2].
    """
    inner = max(1, math.isqrt(max_buckets))
    outer = max(1, max_buckets // inner)
    first = np.unique(equal_mass(*_along(shapes, counts, 0), outer))
    part = np.searchsorted(first, shapes[:, 0])
    boxes: list[tuple[int, int]] = []
    for p in np.unique(part):
        here = part == p
        second = np.unique(equal_mass(*_along(shapes[here], counts[here], 1), inner))
        boxes += [(int(first[p]), int(t)) for t in second]
    return np.array(boxes, np.int64)


def quantile_grid(shapes: Ints, counts: Ints, max_buckets: int) -> Ints:
    """Crosses quantiles of each axis: what one would write by hand for several axes.

    Args:
        shapes: int64 [G, A].
        counts: samples of each, int64 [G].
        max_buckets: each axis is cut into ⌊K^(1/A)⌋ parts.

    Returns:
        Boxes, int64 [≤ K, A].
    """
    axes = shapes.shape[1]
    parts = int(max_buckets ** (1 / axes) + 1e-9)
    levels = [np.unique(equal_count(*_along(shapes, counts, axis), parts)) for axis in range(axes)]
    return np.array(list(itertools.product(*levels)), np.int64)


_ONE_AXIS: dict[str, Callable[[Ints, Ints, int], Ints]] = {
    function.__name__: function
    for function in (
        equal_count,
        equal_mass,
        percentile,
        constant_width,
        linear_width,
        exponential_width,
        geometric,
        powers_of_two,
        alphafold3,
    )
}


def plan_by_rule(
    rule: Rule | Sequence[int],
    lengths: Lengths,
    layout: Layout | None = None,
    *,
    max_buckets: int = 8,
    batch_size: int | None = None,
    token_budget: int | None = None,
    multiple_of: int | Mapping[str, int] = 1,
    batch_multiple_of: int = 1,
    max_batch_size: int | None = None,
    max_size: int | Mapping[str, int] | None = None,
    masks: Masks = "mask",
) -> BucketPlan:
    """Makes a plan by somebody else's rule. All arguments but the first are those of `plan_buckets`.

    Args:
        rule: its name; or inclusive boundaries of your own, to which the longest sample is added where it is beyond them.
        lengths: see `plan_buckets`.
        layout: see `plan_buckets`; `nemo_2d` takes two axes, `quantile_grid` several, `pad_to_max` any, the others one.
        max_buckets: for the rules that heed it.
        batch_size: see `plan_buckets`.
        token_budget: see `plan_buckets`.
        multiple_of: boundaries are rounded up to it afterwards, which is how these rules are aligned.
        batch_multiple_of: see `plan_buckets`.
        max_batch_size: see `plan_buckets`.
        max_size: see `plan_buckets`.
        masks: see `plan_buckets`.

    Raises:
        PlanError: for a rule that does not exist or is not for so many axes, and as `plan_buckets`.
        LengthsError: as `plan_buckets`.
    """
    check_positive("max_buckets", max_buckets)
    problem = Problem.of(
        lengths,
        layout,
        batch_size=batch_size,
        token_budget=token_budget,
        multiple_of=multiple_of,
        batch_multiple_of=batch_multiple_of,
        max_batch_size=max_batch_size,
        max_size=max_size,
        masks=masks,
    )
    shapes, counts = grouped(np.maximum(problem.shapes, 1), problem.counts)
    axes = shapes.shape[1]
    if not isinstance(rule, str):
        sizes = _given(rule, shapes)
    elif rule == "pad_to_max":
        sizes = shapes.max(axis=0, keepdims=True)
    elif rule == "quantile_grid":
        if axes == 1:
            raise PlanError("quantile_grid is for several axes; with one it is equal_count")
        sizes = quantile_grid(shapes, counts, max_buckets)
    elif rule == "nemo_2d":
        if axes != 2:
            raise PlanError(f"nemo_2d is for two axes, but the layout has {axes}")
        sizes = nemo_2d(shapes, counts, max_buckets)
    elif rule in _ONE_AXIS:
        if axes != 1:
            raise PlanError(f"the rule {rule} is for one axis, but the layout has {axes}")
        sizes = _ONE_AXIS[rule](shapes[:, 0], counts, max_buckets)[:, None]
    else:
        raise PlanError(f"rule must be boundaries or one of {get_args(Rule)}, but got {rule!r}")
    return problem.plan(np.unique(problem.align(sizes), axis=0))


def from_tf_boundaries(bucket_boundaries: Sequence[int]) -> list[int]:
    """Turns the exclusive upper bounds of `tf.data`'s `bucket_by_sequence_length` into inclusive boundaries.

    tf.data puts a length L into the first bucket whose bound b has L < b; the last bucket, of everything else, has no bound,
    and `plan_by_rule` gives it the longest sample's. A bound of 1, for empty samples alone, is left out.
    """
    return [bound - 1 for bound in bucket_boundaries if bound > 1]


def plan_from_tf_boundaries(
    bucket_boundaries: Sequence[int],
    bucket_batch_sizes: Sequence[int],
    layout: Layout,
    *,
    longest: int | None = None,
    masks: Masks = "mask",
) -> BucketPlan:
    """Makes the plan that groups samples as `tf.data`'s `bucket_by_sequence_length` does with the same arguments.

    `to_tf_boundaries` is the way back: its bounds go with `plan.batch_sizes`.

    Args:
        bucket_boundaries: tf.data's exclusive upper bounds, ascending. A bound of 1, for empty samples alone, is left out with
            its batch size.
        bucket_batch_sizes: the rows of each bucket, one more than there are bounds.
        layout: which axis varies: one, since tf.data buckets by one length. A loader needs its dtypes.
        longest: the size of the last bucket, which has no bound in tf.data, in elements. None: there is no such bucket, and a
            sample of the last bound or longer is overlong, which is what `pad_to_bucket_boundary=True` asks for.
        masks: see `plan_buckets`.

    Raises:
        PlanError: for bounds that do not ascend, another number of batch sizes, a `longest` within the bounds, or a layout of
            several axes.
    """
    if len(layout.axes) != 1:
        raise PlanError(f"tf.data buckets one axis, but the layout has {layout.axes}")
    bounds, rows = list(bucket_boundaries), list(bucket_batch_sizes)
    for bound in bounds:
        check_positive("a bound", bound)
    if not bounds or any(bound >= following for bound, following in itertools.pairwise(bounds)):
        raise PlanError(f"bucket_boundaries must be at least one number, each larger than the one before; got {bounds}")
    if len(rows) != len(bounds) + 1:
        raise PlanError(
            f"bucket_batch_sizes must have one number for each of the {len(bounds)} bounds, and one for what is longer; got "
            f"{len(rows)}"
        )
    if longest is not None and longest < bounds[-1]:
        raise PlanError(f"longest is of samples from the last bound, {bounds[-1]}, on; got {longest}")
    sizes = [bound - 1 for bound in bounds] + ([] if longest is None else [longest])
    axis = layout.axes[0]
    buckets = [Bucket(((axis, size),), count) for size, count in zip(sizes, rows, strict=False) if size]
    return BucketPlan(layout, buckets, masks=masks)


def to_tf_boundaries(plan: BucketPlan) -> list[int]:
    """Turns a plan's boundaries into `bucket_boundaries` for `tf.data`'s `bucket_by_sequence_length` (one axis).

    The last boundary is left out: tf.data's last bucket is of everything else. `plan.batch_sizes` are its `bucket_batch_sizes`.

    Raises:
        PlanError: for a plan of several axes.
    """
    if plan.sizes.shape[1] != 1:
        raise PlanError(f"tf.data buckets one axis, but the plan has {plan.layout.axes}")
    return [int(size) + 1 for size in np.sort(plan.sizes[:, 0])[:-1]]


def _along(shapes: Ints, counts: Ints, axis: int) -> tuple[Ints, Ints]:
    """Returns the distinct lengths on one axis, and samples of each."""
    lengths, held = grouped(shapes[:, [axis]], counts)
    return lengths[:, 0], held


def _ordered(lengths: Ints, counts: Ints, positions: Sequence[int]) -> Ints:
    """Returns the lengths at positions of all samples in ascending order."""
    return lengths[np.searchsorted(np.cumsum(counts), positions, side="right")]


def _given(boundaries: Sequence[int], shapes: Ints) -> Ints:
    for bound in boundaries:
        check_positive("a boundary", bound)
    if shapes.shape[1] != 1:
        raise PlanError(f"boundaries are for one axis, but the layout has {shapes.shape[1]}")
    sizes = np.array(sorted(boundaries), np.int64)
    longest = int(shapes.max())
    return (sizes if len(sizes) and sizes[-1] >= longest else np.append(sizes, longest))[:, None]
