"""Bucket and BucketPlan: the only answer to "which bucket?" and "what shape is that?".

Letters in shapes: `B` rows of a batch, `N` samples, `A` axes of the layout, `K` buckets of the plan.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from shapebucket.errors import LayoutError, LengthsError, OverlongError, PlanError
from shapebucket.files import replacing
from shapebucket.histogram import LengthHistogram
from shapebucket.layout import Layout
from shapebucket.lengths import LengthTable, check_axes
from shapebucket.tables import render

Masks = Literal["mask", "length"]
Lengths = LengthTable | LengthHistogram | npt.ArrayLike | Mapping[str, npt.ArrayLike]
EXAMPLE_MASK = "example_mask"
_VERSION = 1


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array of a batch; quacks like `jax.ShapeDtypeStruct`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, order=True)
class Bucket:
    """One static shape: a size for each axis, and a number of rows.

    Attributes:
        axes: (name, size) pairs in the layout's order; sizes are inclusive upper bounds, in elements.
        batch_size: rows of a batch.
    """

    axes: tuple[tuple[str, int], ...]
    batch_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple((name, _whole(name, size)) for name, size in self.axes))
        object.__setattr__(self, "batch_size", _whole("batch_size", self.batch_size))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, in elements."""
        return dict(self.axes)

    def __str__(self) -> str:
        return f"[{self.batch_size} × {' '.join(f'{name}={size}' for name, size in self.axes)}]"


def _whole(name: str, size: Any) -> int:
    """Returns a Python integer of at least 1, also for numpy's, which JSON does not take."""
    try:
        number = operator.index(size)
    except TypeError:
        number = 0
    if number < 1:
        raise PlanError(f"a bucket's sizes must be whole numbers of at least 1, but {name} is {size!r}")
    return number


@dataclass(frozen=True)
class PlanReport:
    """What a plan does to given lengths, before any remainder batch is formed; print it.

    All counts are exact integers; elements are those of `Layout.elements`.

    Attributes:
        buckets: the buckets, as text.
        samples: samples in each bucket.
        batches: batches an epoch of each bucket, the last partial one included (the loaders need a few less, since they
            promote what is left over).
        real_elements: their real elements, after cutting to the bucket where a sample is overlong.
        padded_elements: the elements computed on, padding included.
        overlong: samples longer than every bucket; they are counted in the bucket they would be cut to.
        pad_to_max_elements: the elements computed on if every sample were padded to one shape that holds them all.
        least_elements: a lower bound: no plan of as many buckets and the same alignment, with the boundaries that must be
            there, computes on fewer elements. The planner's knowledge: None for a report on other lengths or of a plan made
            by hand, or for a cost beside elements.
        curve: the least cost with at most 1, 2, … buckets, in the planner's cost, infinity where so few cannot be; empty where
            it did not look.
    """

    buckets: tuple[str, ...]
    samples: tuple[int, ...]
    batches: tuple[int, ...]
    real_elements: tuple[int, ...]
    padded_elements: tuple[int, ...]
    overlong: int
    pad_to_max_elements: int
    least_elements: int | None = None
    curve: tuple[float, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PlanReport:
        """Makes a report from its fields as JSON gives them, lists for tuples."""
        facts = {name: tuple(each) if isinstance(each, list) else each for name, each in value.items()}
        facts["curve"] = tuple(math.inf if cost is None else cost for cost in value["curve"])
        return cls(**facts)  # pyright: ignore[reportArgumentType]

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return asdict(self) | {"curve": [cost if math.isfinite(cost) else None for cost in self.curve]}

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the samples in each bucket; sums to 1."""
        total = max(1, sum(self.samples))
        return tuple(count / total for count in self.samples)

    @property
    def padding_fractions(self) -> tuple[float, ...]:
        """1 − real / padded for each bucket, 0 for an empty one."""
        return tuple(map(padding_fraction, self.real_elements, self.padded_elements))

    @property
    def padding_fraction(self) -> float:
        """1 − real / padded over all buckets."""
        return padding_fraction(sum(self.real_elements), sum(self.padded_elements))

    @property
    def pad_to_max(self) -> float:
        """The padding fraction of one shape that holds every sample."""
        return padding_fraction(sum(self.real_elements), self.pad_to_max_elements)

    @property
    def lower_bound(self) -> float | None:
        """The padding fraction that no plan of as many buckets can go below, where known."""
        return None if self.least_elements is None else padding_fraction(sum(self.real_elements), self.least_elements)

    @property
    def excess(self) -> float | None:
        """Elements computed on beyond the lower bound, as a share of it, where known: 0 for an optimal plan."""
        least = self.least_elements
        return None if not least else sum(self.padded_elements) / least - 1

    @property
    def verdict(self) -> str:
        """The padding over all buckets beside its limits, in a line."""
        limits = [f"{self.pad_to_max:.1%} in one shape"]
        if self.excess is not None:
            above = f"at most {self.excess:.2%} above " if self.excess else ""
            limits.insert(0, f"computing {above}the least possible with as many buckets")
        overlong = f"; {self.overlong:,} samples are cut to fit" if self.overlong else ""
        return (
            f"padding {self.padding_fraction:.1%} ({'; '.join(limits)}) over {sum(self.samples):,} samples in "
            f"{sum(self.batches):,} batches{overlong}"
        )

    def __str__(self) -> str:
        rows = [
            [bucket, f"{share:.1%}", f"{1 - padding:.1%}" if batches else "–", f"{padding:.1%}", f"{batches:,}"]
            for bucket, share, padding, batches in zip(
                self.buckets, self.shares, self.padding_fractions, self.batches, strict=True
            )
        ]
        return render(self.verdict, ["bucket", "share", "fill", "padding", "batches"], rows, text=1)


def _check_axes(bucket: Bucket, layout: Layout) -> None:
    """Raises PlanError for a bucket whose axes are not the layout's, in its order."""
    names = tuple(name for name, _ in bucket.axes)
    if names != layout.axes:
        raise PlanError(f"{bucket} has the axes {names}, but the layout has {layout.axes}, in this order")


def first_that_holds(lengths: npt.NDArray[Any], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Returns the position of the first of some sizes [K, A] that holds each of some lengths [N, A]; -1 where none does."""
    found = np.full(len(lengths), -1, np.int32)
    for index in reversed(range(len(sizes))):
        fits = lengths[:, 0] <= sizes[index, 0]
        for axis in range(1, sizes.shape[1]):  # five times as fast as all(axis=1)
            fits &= lengths[:, axis] <= sizes[index, axis]
        found[fits] = index
    return found


def histogram_of(lengths: Lengths, axes: Sequence[str]) -> LengthHistogram:
    """Returns the histogram of lengths in any form, with its axes in the given order.

    Raises:
        LengthsError: for lengths that are none, or of other axes.
    """
    if isinstance(lengths, LengthHistogram):
        check_axes(lengths.axes, axes)
        return lengths.on(axes)
    return LengthTable.of(lengths, axes).histogram


def check_countable(lengths: LengthHistogram, layout: Layout, sizes: npt.NDArray[np.int64]) -> None:
    """Raises LengthsError where the elements of all samples, padded to `sizes` [A] or to the longest, exceed 64 bits."""
    if not len(lengths.counts):
        return
    largest = np.maximum(lengths.shapes.max(axis=0), sizes)
    each = sum(math.prod(int(largest[layout.axes.index(axis)]) for axis in axes) for axes in layout.axis_sets)
    if each * len(lengths) >= 2**63:
        raise LengthsError(
            f"{len(lengths):,} samples of up to {layout.named(largest)} are more elements than 64 bits can count: plan from "
            "a part of the samples, or measure in larger units"
        )


def padding_fraction(real: int, padded: float) -> float:
    """Returns 1 − real / padded, or 0 where nothing is computed on."""
    return 1 - real / padded if padded else 0.0


@dataclass(frozen=True, init=False)
class BucketPlan:
    """A small fixed set of bucket shapes: what the planner makes, the loader pads to and the step compiles for.

    Attributes:
        layout: which axes of a sample vary.
        buckets: the shapes, from the cheapest row to the dearest; a sample goes to the first that holds it.
        row_costs: what a row of each costs, in the order of `buckets`; None where that is its elements.
        batch_multiple_of: every batch size is a multiple of it: the number of devices that the batch axis is sharded over.
        masks: what a batch carries beside the features: `"mask"`, a bool mask [B, size] for each axis, or `"length"`,
            int32 lengths [B], which are cheaper to transfer (`length_mask` makes the mask inside jit). A bool
            `example_mask` [B] comes with either.
        planned: what the plan does to the lengths it was made from, if it was made from lengths; not part of its identity.
    """

    layout: Layout
    buckets: tuple[Bucket, ...]
    masks: Masks
    row_costs: tuple[float, ...] | None
    batch_multiple_of: int
    planned: PlanReport | None = field(compare=False, repr=False)

    def __init__(
        self,
        layout: Layout,
        buckets: Iterable[Bucket],
        *,
        masks: Masks = "mask",
        row_costs: Sequence[float] | None = None,
        batch_multiple_of: int = 1,
        planned: PlanReport | None = None,
    ) -> None:
        """Makes a plan by hand; `plan_buckets` makes the best one.

        Args:
            layout: which axes of a sample vary.
            buckets: in any order.
            masks: see the class.
            row_costs: what a row of each costs, in the order of `buckets`, if that is not its elements.
            batch_multiple_of: see the class.
            planned: what the plan does to the lengths it was made from, in the plan's order.

        Raises:
            PlanError: for no buckets, two of one shape, or a bucket whose axes are not the layout's or whose batch size is no
                multiple of `batch_multiple_of`.
            LayoutError: if a mask's key would clash with a feature's.
        """
        if masks not in get_args(Masks):
            raise PlanError(f"masks must be one of {get_args(Masks)}, but got {masks!r}")
        layout.require_axes()
        every = list(buckets)
        for bucket in every:
            _check_axes(bucket, layout)
        if len({bucket.axes for bucket in every}) != len(every) or not every:
            listed = ", ".join(map(str, every)) or "none"
            raise PlanError(f"a plan needs at least one bucket, and no two of one shape; got {listed}")
        for bucket in every:
            if bucket.batch_size % _whole("batch_multiple_of", batch_multiple_of):
                raise PlanError(
                    f"the batch size of {bucket} must be a multiple of batch_multiple_of {batch_multiple_of}"
                )
        costs = row_costs or [int(layout.elements(list(bucket.sizes.values()))) for bucket in every]
        if len(costs) != len(every):
            raise PlanError(f"row_costs has {len(costs)} numbers for {len(every)} buckets")
        order = sorted(range(len(every)), key=lambda k: (costs[k], every[k]))
        ordered = [every[k] for k in order]
        keys = [f"{axis}_{kind}" for axis in layout.axes for kind in get_args(Masks)] + [EXAMPLE_MASK]
        names = [*keys, *{feature.path[0] for feature in layout.features}]
        for clash in {name for name in names if names.count(name) > 1}:
            raise LayoutError(
                "a batch has masks or lengths of this name: rename the feature with .map(), or the axis in the layout",
                path=clash,
            )
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "buckets", tuple(ordered))
        object.__setattr__(self, "masks", masks)
        object.__setattr__(self, "row_costs", tuple(float(costs[k]) for k in order) if row_costs else None)
        object.__setattr__(self, "batch_multiple_of", int(batch_multiple_of))
        names = tuple(map(str, ordered))
        object.__setattr__(self, "planned", planned and replace(planned, buckets=names))

    def __len__(self) -> int:
        return len(self.buckets)

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """The buckets' sizes, int64 [K, A], in elements."""
        return np.array([list(bucket.sizes.values()) for bucket in self.buckets], np.int64)

    @cached_property
    def batch_sizes(self) -> npt.NDArray[np.int64]:
        """The rows of a batch of each bucket, int64 [K]."""
        return np.array([bucket.batch_size for bucket in self.buckets], np.int64)

    @cached_property
    def row_elements(self) -> npt.NDArray[np.int64]:
        """The elements that a row of each bucket computes on, int64 [K]."""
        return self.layout.elements(self.sizes)

    @cached_property
    def _size_tuples(self) -> list[tuple[int, ...]]:
        return [tuple(sizes) for sizes in self.sizes.tolist()]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the shapes: equal for two plans that give the same batches for the same samples."""
        shapes = {key: value for key, value in self.to_json().items() if key not in ("planned", "batch_multiple_of")}
        return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16]

    def find(self, lengths: Mapping[str, int] | Sequence[int] | int) -> Bucket:
        """Returns the bucket of a sample: the cheapest that holds it.

        Args:
            lengths: the sample's length on each axis, in elements, by name or in the layout's order; a number for one axis.

        Raises:
            OverlongError: if none holds it.
        """
        if isinstance(lengths, int):
            lengths = [lengths]
        if isinstance(lengths, Mapping):
            lengths = [lengths[axis] for axis in self.layout.axes]
        index = self.index(lengths)
        if index is None:
            raise OverlongError(self.layout.named(lengths), str(self.buckets[-1]))
        return self.buckets[index]

    def index(self, lengths: Sequence[int]) -> int | None:
        """Returns the position in `buckets` of a sample's bucket, or None if none holds it.

        Args:
            lengths: the sample's length on each axis, in elements, in the layout's order.
        """
        for position, sizes in enumerate(self._size_tuples):
            for length, size in zip(lengths, sizes, strict=True):
                if length > size:
                    break
            else:
                return position
        return None

    def assign(self, lengths: npt.ArrayLike, *, truncate: bool = False) -> npt.NDArray[np.int32]:
        """Finds the bucket of every sample.

        Args:
            lengths: integers [N, A].
            truncate: whether a sample that fits no bucket goes to the one that keeps most of its elements.

        Returns:
            int32 [N], positions in `buckets`; -1 for a sample that fits none.
        """
        table = np.asarray(lengths)
        if table.ndim != 2 or table.shape[1] != len(self.layout.axes):
            raise PlanError(f"lengths must be [N, {len(self.layout.axes)}], one column an axis; got {table.shape}")
        found = first_that_holds(table, self.sizes)
        if truncate:
            overlong = np.flatnonzero(found < 0)
            kept = np.stack([self.layout.elements(np.minimum(table[overlong], sizes)) for sizes in self.sizes])
            found[overlong] = np.argmax(kept, axis=0)
        return found

    def tally(
        self,
        lengths: npt.ArrayLike,
        assigned: npt.NDArray[np.integer[Any]],
        counts: npt.NDArray[np.int64] | None = None,
    ) -> tuple[list[int], list[int], int]:
        """Counts samples that are in buckets.

        Args:
            lengths: integers [N, A].
            assigned: the bucket of each, positions in `buckets`, integers [N].
            counts: how many samples have these lengths, integers [N]; one each if not given.

        Returns:
            The samples of each bucket, their real elements after cutting to it, and how many samples are cut.
        """
        table, sizes = np.asarray(lengths), self.sizes[assigned]
        weight = np.ones(len(table), np.int64) if counts is None else counts
        real = self.layout.elements(np.minimum(table, sizes)) * weight
        inside = [assigned == k for k in range(len(self))]
        return (
            [int(weight[here].sum()) for here in inside],
            [int(real[here].sum()) for here in inside],
            int(weight[(table > sizes).any(axis=1)].sum()),
        )

    def report(self, lengths: Lengths) -> PlanReport:
        """Reports what the plan does to given lengths: those that `plan_buckets` takes; overlong samples count as cut.

        Raises:
            LengthsError: for lengths that are none, or of other axes.
        """
        given = histogram_of(lengths, self.layout.axes)
        check_countable(given, self.layout, self.sizes.max(axis=0))
        shapes = given.shapes.astype(np.int64)
        samples, real_elements, overlong = self.tally(shapes, self.assign(shapes, truncate=True), given.counts)
        return PlanReport(
            buckets=tuple(map(str, self.buckets)),
            samples=tuple(samples),
            batches=tuple((-(-np.array(samples, np.int64) // self.batch_sizes)).tolist()),
            real_elements=tuple(real_elements),
            padded_elements=tuple((np.array(samples, np.int64) * self.row_elements).tolist()),
            overlong=overlong,
            pad_to_max_elements=len(given) * int(self.layout.elements(self.sizes.max(axis=0))),
        )

    @property
    def curve(self) -> tuple[float, ...]:
        """The padding fraction of the best plan found with at most 1, 2, … buckets, NaN where so few cannot be.

        Empty for a plan made by hand or by another cost than elements.
        """
        planned = self.planned
        if planned is None or planned.least_elements is None:
            return ()
        real = sum(planned.real_elements)
        return tuple(padding_fraction(real, cost) if math.isfinite(cost) else math.nan for cost in planned.curve)

    def check(self, bucket: Bucket) -> None:
        """Raises PlanError for a bucket whose axes are not the plan's, in its order."""
        _check_axes(bucket, self.layout)

    def batch_spec(self, bucket: Bucket) -> dict[str, Any]:
        """Returns the shapes and dtypes of a bucket's batch, as a tree of `ArraySpec` with the batch's structure.

        Raises:
            LayoutError: if a feature's dtype is not known.
            PlanError: for a bucket of other axes.
        """
        self.check(bucket)
        specs = [
            ArraySpec((bucket.batch_size, *feature.shape(bucket.sizes)), feature.known_dtype)
            for feature in self.layout.features
        ]
        batch = self.layout.to_tree(specs)
        for axis, size in bucket.axes:
            shape = (bucket.batch_size, size) if self.masks == "mask" else (bucket.batch_size,)
            batch[f"{axis}_{self.masks}"] = ArraySpec(shape, np.dtype(bool if self.masks == "mask" else np.int32))
        batch[EXAMPLE_MASK] = ArraySpec((bucket.batch_size,), np.dtype(bool))
        return batch

    def batch_bytes(self, bucket: Bucket) -> int:
        """Returns the bytes of a bucket's batch: its features, masks left out.

        Raises:
            LayoutError: if a feature's dtype is not known.
        """
        shapes = [(feature.shape(bucket.sizes), feature.known_dtype.itemsize) for feature in self.layout.features]
        return bucket.batch_size * sum(math.prod(shape) * size for shape, size in shapes)

    def with_layout(self, layout: Layout) -> BucketPlan:
        """Returns the plan for another layout of the same axes: with dtypes, say, where it was made from bare lengths.

        Raises:
            PlanError: if the axes are not the same.
        """
        if set(layout.axes) != set(self.layout.axes):
            raise PlanError(f"the plan has the axes {self.layout.axes}, but the layout has {layout.axes}")
        buckets = [
            Bucket(tuple((axis, bucket.sizes[axis]) for axis in layout.axes), bucket.batch_size)
            for bucket in self.buckets
        ]
        planned = self.planned if layout.axis_sets == self.layout.axis_sets else None
        return replace(self, layout=layout, buckets=buckets, planned=planned)

    def per_process(self, count: int) -> BucketPlan:
        """Returns the plan of one process's part of each batch: the same buckets with a share of the rows.

        Args:
            count: the parts that each batch is dealt into.

        Raises:
            PlanError: if a bucket's rows cannot be dealt evenly.
        """
        for bucket in self.buckets:
            if count < 1 or bucket.batch_size % count:
                raise PlanError(
                    f"{bucket} has {bucket.batch_size} rows, which cannot be dealt evenly to {count} processes: plan with "
                    "batch_multiple_of= the number of devices of all processes together"
                )
        return replace(
            self,
            buckets=[replace(each, batch_size=each.batch_size // count) for each in self.buckets],
            batch_multiple_of=self.batch_multiple_of // math.gcd(self.batch_multiple_of, count),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values; `from_json` takes them back."""
        planned = self.planned
        return {
            "version": _VERSION,
            "layout": self.layout.to_json(),
            "masks": self.masks,
            "buckets": [{"axes": bucket.sizes, "batch_size": bucket.batch_size} for bucket in self.buckets],
            "batch_multiple_of": self.batch_multiple_of,
            "row_costs": None if self.row_costs is None else list(self.row_costs),
            "planned": None if planned is None else planned.to_json(),
        }

    @classmethod
    def from_json(cls, value: Any) -> BucketPlan:
        """Makes a plan from what `to_json` returned.

        Raises:
            PlanError: for another version, or values that are not a plan's.
        """
        if not isinstance(value, dict):
            raise PlanError(f"not a plan: a JSON object is expected, but got {type(value).__name__}")
        value = cast(dict[str, Any], value)
        if value.get("version") != _VERSION:
            raise PlanError(f"the plan has version {value.get('version')!r}, but this shapebucket reads {_VERSION}")
        try:
            planned = value["planned"]
            return cls(
                Layout.from_json(value["layout"]),
                [Bucket(tuple(item["axes"].items()), item["batch_size"]) for item in value["buckets"]],
                masks=value["masks"],
                row_costs=value["row_costs"],
                batch_multiple_of=value.get("batch_multiple_of", 1),
                planned=None if planned is None else PlanReport.from_json(planned),
            )
        except (KeyError, TypeError, AttributeError, LayoutError) as error:
            raise PlanError(f"not a plan: {error!r} while reading it") from error

    def summary(self) -> dict[str, Any]:
        """Returns what the plan does to the lengths it was made from, as JSON values: for tools.

        Raises:
            PlanError: if it was not made from lengths.
        """
        planned = self.planned
        if planned is None:
            raise PlanError("the plan was made by hand: plan.report(lengths) tells what it does to given lengths")
        facts = zip(self.buckets, planned.shares, planned.padding_fractions, strict=True)
        return {
            "buckets": [
                {"axes": bucket.sizes, "batch_size": bucket.batch_size, "share": share, "padding_fraction": padding}
                for bucket, share, padding in facts
            ],
            "padding_fraction": planned.padding_fraction,
            "lower_bound": planned.lower_bound,
            "pad_to_max": planned.pad_to_max,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a JSON file."""
        with replacing(path) as file:
            file.write(json.dumps(self.to_json(), indent=2).encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BucketPlan:
        """Reads a plan that `save` wrote.

        Raises:
            PlanError: naming the file, if it holds no plan of this version.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except (json.JSONDecodeError, PlanError) as error:
            raise PlanError(f"cannot read a plan from {os.fspath(path)!r}: {error}") from error

    def __str__(self) -> str:
        report = self.planned
        header = [*self.layout.axes, "batch", "elements", "MB"] + (["share", "padding", "batches"] if report else [])
        rows = [
            [
                *map(str, bucket.sizes.values()),
                str(bucket.batch_size),
                f"{bucket.batch_size * int(each):,}",
                f"{self.batch_bytes(bucket) / 1e6:.3g}" if self.layout.has_dtypes else "?",
            ]
            for bucket, each in zip(self.buckets, self.row_elements, strict=True)
        ]
        if report is not None:
            facts = zip(report.shares, report.padding_fractions, report.batches, strict=True)
            for row, (share, padding, batches) in zip(rows, facts, strict=True):
                row += [f"{share:.1%}", f"{padding:.1%}", f"{batches:,}"]
        title = f"{len(self)} buckets for {self.layout}"
        return render(title, header, rows, caption=None if report is None else report.verdict)
