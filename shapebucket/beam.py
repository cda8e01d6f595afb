"""Measuring on Apache Beam, for a corpus that one machine cannot read.

    pipeline | ReadSource(source) | MeasureLengths("gs://bucket/lengths", layout)

Letters in shapes: `n` samples, `A` axes.
"""

from __future__ import annotations

import io
import operator
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from shapebucket.errors import LayoutError, LengthsError, MissingExtraError
from shapebucket.histogram import LengthHistogram
from shapebucket.layout import Layout
from shapebucket.lengths import LengthTable
from shapebucket.ruler import LengthFn, Rows, Ruler
from shapebucket.sampling import has_random_access, read_range

try:
    import apache_beam as beam
    from apache_beam.io.filesystems import FileSystems
    from apache_beam.pvalue import AsDict
    from apache_beam.transforms.window import GlobalWindow
    from apache_beam.utils.timestamp import MIN_TIMESTAMP
    from apache_beam.utils.windowed_value import WindowedValue
except ModuleNotFoundError as error:
    raise MissingExtraError("apache_beam", "beam") from error

Position = int | tuple[int, int]
_AT_ONCE = 1 << 16  # samples whose lengths leave a worker together
_MERGED = 32  # histograms that are added up at once


class ReadSource(beam.PTransform[Any, Any]):
    """Reads a source with `len` and `[]` on all workers: gives (index, sample) for each of its samples.

    For a TFDS data source (`TfdsSource`), ArrayRecord files (Grain's source, in a `RecordSource`), any list.
    """

    def __init__(self, source: Sequence[Any], *, samples_at_once: int = 1_000) -> None:
        """Reads nothing but its length.

        Args:
            source: is pickled for the workers, which must reach the files that it names.
            samples_at_once: that a worker reads one after the other, or through the source's `__getitems__`.

        Raises:
            LengthsError: for a source without random access.
        """
        super().__init__()
        if not has_random_access(source):
            raise LengthsError(
                f"ReadSource takes a source with len and [], but got {type(source).__name__}: for another, make a PCollection "
                "of (index, sample)"
            )
        self._source, self._at_once = source, samples_at_once

    def expand(self, input_or_inputs: Any) -> Any:
        """Returns the PCollection of (index, sample)."""
        starts = input_or_inputs | beam.Create([range(0, len(self._source), self._at_once)]) | beam.FlatMap(iter)
        return starts | beam.Reshuffle() | "Read" >> beam.FlatMap(self._read)

    def _read(self, start: int) -> Iterator[tuple[int, Any]]:
        count = min(self._at_once, len(self._source) - start)
        return enumerate(read_range(self._source, start, count), start)


class CountLengths(beam.PTransform[Any, Any]):
    """Turns any PCollection of samples, or of lengths, into one `LengthHistogram`, which is enough to plan from."""

    def __init__(
        self, layout: Layout | None = None, *, length_fn: LengthFn | None = None, axes: Sequence[str] | None = None
    ) -> None:
        """Decides how lengths are taken.

        Args:
            layout: of the samples, with dtypes. None where the elements are lengths themselves, or `length_fn` gives them.
            length_fn: gives the lengths of a sample in place of the layout, as for `measure`.
            axes: names the lengths where there is no layout; ("s",) if not given.

        Raises:
            LayoutError: for a layout whose dtypes are not known, or without axes.
            LengthsError: for axes beside a layout.
        """
        super().__init__()
        self._ruler = _ruler(layout, length_fn, axes)

    def expand(self, input_or_inputs: Any) -> Any:
        """Returns the PCollection of one histogram."""
        return input_or_inputs | "Measure" >> beam.ParDo(_Measure(self._ruler, _unplaced)) | _Histogram(self._ruler)


class MeasureLengths(beam.PTransform[Any, Any]):
    """Writes the lengths of a PCollection of (position, sample), in the source's order, and their histogram.

    A position is the sample's index in the source; or (shard, index in the shard), where the source comes in shards of its own,
    as the files of a data set. The tables are written in shards, `PATH-00000-of-00008.npz`, and beside them
    `PATH-histogram.npz`, on any file system that Beam knows. Samples may come in any order and from any worker; one that is
    missing, or there twice, is an error. The result is a PCollection of the histogram. To go on:

        plan = sb.plan_buckets(sb.load_lengths("lengths-histogram.npz"), …)
        shards = sorted(glob.glob("lengths-*-of-00008.npz"))
        lengths = sb.LengthTable.concatenate(map(sb.LengthTable.load, shards), path="lengths.npz")
    """

    def __init__(
        self,
        path: str,
        layout: Layout | None = None,
        *,
        length_fn: LengthFn | None = None,
        axes: Sequence[str] | None = None,
        samples_per_shard: int = 1_000_000,
    ) -> None:
        """Decides how lengths are taken, and where they go.

        Args:
            path: what the names of the files begin with.
            layout: see `CountLengths`.
            length_fn: see `CountLengths`.
            axes: see `CountLengths`.
            samples_per_shard: of the tables, where positions are indices: a worker holds so many lengths.

        Raises:
            LayoutError, LengthsError: see `CountLengths`.
        """
        super().__init__()
        if samples_per_shard < 1:
            raise LengthsError(f"samples_per_shard must be a number of samples, but got {samples_per_shard}")
        self._path, self._ruler, self._per_shard = path, _ruler(layout, length_fn, axes), samples_per_shard

    def expand(self, input_or_inputs: Any) -> Any:
        """Returns the PCollection of one histogram."""
        blocks = input_or_inputs | "Measure" >> beam.ParDo(_Measure(self._ruler, _Places(self._per_shard)))
        sizes = blocks | "Sizes" >> beam.MapTuple(_size) | beam.CombinePerKey(sum)
        write = _WriteShard(self._path, self._ruler, self._per_shard)
        (blocks | beam.GroupByKey()) | "Write" >> beam.ParDo(write, AsDict(sizes))  # pyright: ignore[reportUnusedExpression]
        return blocks | _Histogram(self._ruler) | "Write histogram" >> beam.Map(_saved, f"{self._path}-histogram.npz")


class _Block(NamedTuple):
    """Lengths of some samples of one shard.

    Attributes:
        positions: of the samples in the shard, int64 [n].
        rows: their lengths, int32 [n, A].
        dealt: whether the shard was made of indices, and so has a size that is known.
    """

    positions: npt.NDArray[np.int64]
    rows: Rows
    dealt: bool


def _size(shard: int, block: _Block) -> tuple[int, int]:
    return shard, len(block.rows)


class _Place(NamedTuple):
    """Where a sample belongs: see `_Block`; `name` is for errors."""

    shard: int
    position: int
    dealt: bool
    name: Position | None


def _unplaced(element: Any) -> tuple[_Place, Any]:
    return _Place(0, 0, False, None), element


class _Places:
    """Takes a PCollection's elements apart: where a sample belongs, and the sample."""

    def __init__(self, per_shard: int) -> None:
        self._per_shard = per_shard

    def __call__(self, element: Any) -> tuple[_Place, Any]:
        try:
            name, sample = cast(tuple[Any, Any], element if isinstance(element, tuple) else ())
            if isinstance(name, tuple):
                shard, position = map(operator.index, name)
                place = _Place(shard, position, False, (shard, position))
            else:
                index = operator.index(name)
                place = _Place(*divmod(index, self._per_shard), True, index)
        except (TypeError, ValueError):
            raise LengthsError(
                "MeasureLengths takes (position, sample), where a position is an index or (shard, index in the shard), but got "
                f"{type(element).__name__}: ReadSource gives them; without positions, CountLengths makes the histogram"
            ) from None
        if min(place.shard, place.position) < 0:
            raise LengthsError(f"positions are numbers from 0 on, but got {name!r}")
        return place, sample


class _Measure(beam.DoFn):
    """Takes lengths, and gives them on in large blocks: what follows costs little a sample."""

    def __init__(self, ruler: Ruler, place: Callable[[Any], tuple[_Place, Any]]) -> None:
        super().__init__()
        self._ruler, self._place = ruler, place
        self._rows: dict[tuple[int, bool], list[tuple[int, tuple[int, ...]]]] = {}
        self._held = 0

    def start_bundle(self) -> None:
        self._rows, self._held = {}, 0  # what a bundle that failed has left

    def process(self, element: Any) -> Iterator[tuple[int, _Block]]:
        place, sample = self._place(element)
        row = self._ruler.row(sample, place.name)
        self._rows.setdefault((place.shard, place.dealt), []).append((place.position, row))
        self._held += 1
        if self._held == _AT_ONCE:
            yield from self._blocks()

    def finish_bundle(self) -> Any:
        return [WindowedValue(block, MIN_TIMESTAMP, (GlobalWindow(),)) for block in self._blocks()]

    def _blocks(self) -> list[tuple[int, _Block]]:
        blocks = [
            (
                shard,
                _Block(
                    np.array([at for at, _ in found], np.int64), np.array([row for _, row in found], np.int32), dealt
                ),
            )
            for (shard, dealt), found in self._rows.items()
        ]
        self.start_bundle()
        return blocks


class _Histogram(beam.PTransform[Any, Any]):
    """Adds up the lengths of all blocks."""

    def __init__(self, ruler: Ruler) -> None:
        super().__init__()
        self._ruler = ruler

    def expand(self, input_or_inputs: Any) -> Any:
        counts = input_or_inputs | "Count" >> beam.MapTuple(self._count)
        return counts | "Merge" >> beam.CombineGlobally(_Merge())

    def _count(self, _: int, block: _Block) -> LengthHistogram:
        return self._ruler.table([block.rows]).histogram


class _Merge(beam.CombineFn):
    """Adds up histograms."""

    def create_accumulator(self) -> list[LengthHistogram]:
        return []

    def add_input(self, accumulator: list[LengthHistogram], histogram: LengthHistogram) -> list[LengthHistogram]:
        accumulator.append(histogram)
        return accumulator if len(accumulator) < _MERGED else self.compact(accumulator)

    def merge_accumulators(self, accumulators: Iterable[list[LengthHistogram]]) -> list[LengthHistogram]:
        return self.compact([each for accumulator in accumulators for each in accumulator])

    def compact(self, accumulator: list[LengthHistogram]) -> list[LengthHistogram]:
        return [LengthHistogram.merge(accumulator)] if accumulator else []

    def extract_output(self, accumulator: list[LengthHistogram]) -> LengthHistogram:
        merged = self.compact(accumulator)
        if not merged or not len(merged[0].counts):
            elements = f"its {merged[0].absent:,} elements are all absent (None)" if merged else "it has no elements"
            raise LengthsError(f"the PCollection has no samples: {elements}")
        return merged[0]


class _WriteShard(beam.DoFn):
    """Writes the table of one shard, if all its samples are there once."""

    def __init__(self, path: str, ruler: Ruler, per_shard: int) -> None:
        super().__init__()
        self._path, self._ruler, self._per_shard = path, ruler, per_shard

    def process(self, element: tuple[int, Iterable[_Block]], sizes: Mapping[int, int]) -> Iterator[str]:
        shard, blocks = element[0], list(element[1])
        dealt = {block.dealt for block in blocks}
        if len(dealt) > 1:
            raise LengthsError("positions are all indices, or all (shard, index in the shard), but both were given")
        positions = np.concatenate([block.positions for block in blocks])
        order = np.argsort(positions, kind="stable")
        self._check(shard, positions[order], sizes, dealt.pop())
        rows = np.concatenate([block.rows for block in blocks])[order]
        path = f"{self._path}-{shard:05d}-of-{len(sizes):05d}.npz"
        _saved(self._ruler.table([rows]), path)
        yield path

    def _check(self, shard: int, positions: npt.NDArray[np.int64], sizes: Mapping[int, int], dealt: bool) -> None:
        """Checks positions in a shard, in ascending order, [n].

        Raises:
            LengthsError: where one is missing, or there twice.
        """
        last = max(sizes)
        if len(sizes) <= last:
            missing = min(set(range(last)) - set(sizes))
            name = self._name(missing, 0, dealt) if dealt else f"shard {missing}"
            raise LengthsError(f"no sample was given for {name}, but for later ones")
        count = len(positions)
        wrong = np.flatnonzero(positions != np.arange(count))
        at = int(wrong[0]) if len(wrong) else count
        if at and at < count and positions[at] == positions[at - 1]:
            raise LengthsError(
                f"two samples were given for {self._name(shard, at - 1, dealt)}: each has a position of its own"
            )
        if at < count or (dealt and shard < last and count < self._per_shard):
            raise LengthsError(f"no sample was given for {self._name(shard, at, dealt)}, but for later ones")

    def _name(self, shard: int, position: int, dealt: bool) -> str:
        return f"index {shard * self._per_shard + position}" if dealt else f"index {position} of shard {shard}"


def _saved(lengths: LengthTable | LengthHistogram, path: str) -> LengthTable | LengthHistogram:
    """Writes lengths to a file of any file system, which is whole or not there; another attempt writes the same."""
    content = io.BytesIO()
    lengths.save(content)
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    with FileSystems.create(temporary) as file:
        file.write(content.getvalue())
    FileSystems.rename([temporary], [path])
    return lengths


def _ruler(layout: Layout | None, length_fn: LengthFn | None, axes: Sequence[str] | None) -> Ruler:
    """Decides how lengths are taken."""
    if layout is None:
        return Ruler(None, ("s",) if axes is None else tuple(axes), length_fn or _itself)
    if axes is not None:
        raise LengthsError(f"the layout names the axes, {layout.axes}: leave axes out")
    layout.require_axes()
    if length_fn is None and not layout.has_dtypes:
        raise LayoutError(f"a layout whose dtypes are known is needed, as in 'int32[s]', but got {layout}")
    return Ruler(layout, layout.axes, length_fn)


def _itself(lengths: Any) -> Any:
    return lengths
