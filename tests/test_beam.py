"""Measuring on Apache Beam, on its local runners."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("apache_beam")

import apache_beam as beam
from conftest import make_pairs

import shapebucket as sb
from shapebucket.beam import CountLengths, MeasureLengths, ReadSource

LAYOUT = sb.Layout({"src": "int32[s]", "tgt": "float32[t]", "label": "int32[]"})
TOKENS = sb.Layout({"tokens": "int32[s]"})
RETRIES = "BundleBasedDirectRunner"  # tries a bundle again, as Dataflow, Flink and Spark do; the default local runner does not


class Drawn:
    """Samples that are made when they are read, so that the source is small for its workers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        if index % 1000 == 7:
            return None
        return {"tokens": np.zeros(index * index % 61, np.int32)}


class FailsOnce(beam.DoFn):
    """Raises at one sample, the first time that it is read: in whatever process."""

    def __init__(self, flag: Path, index: int) -> None:
        self.flag, self.index = flag, index

    def process(self, element):
        if element[0] == self.index and not self.flag.exists():
            self.flag.touch()
            raise RuntimeError("the worker was lost")
        yield element


def joined(folder: Path, shards: int) -> sb.LengthTable:
    files = sorted(folder.glob("lengths-*-of-*.npz"))
    assert [file.name for file in files] == [f"lengths-{n:05d}-of-{shards:05d}.npz" for n in range(shards)]
    assert sorted(each.name for each in folder.iterdir() if each not in files) == ["lengths-histogram.npz"]
    return sb.LengthTable.concatenate(map(sb.LengthTable.load, files))


def run(elements, transform) -> None:
    with beam.Pipeline(runner=RETRIES) as pipeline:
        pipeline | beam.Create(elements) | transform


def counted(folder: Path, elements, **options) -> sb.LengthHistogram:
    run(elements, CountLengths(**options) | beam.Map(lambda histogram: histogram.save(folder / "counted.npz")))
    return sb.load_lengths(folder / "counted.npz")


def assert_same(found: sb.LengthHistogram, expected: sb.LengthHistogram) -> None:
    np.testing.assert_array_equal(found.shapes, expected.shapes)
    np.testing.assert_array_equal(found.counts, expected.counts)
    assert (found.axes, found.absent, found.layout) == (expected.axes, expected.absent, expected.layout)


def test_200k_samples_in_8_shards_are_those_of_one_process_though_a_worker_fails(tmp_path):
    source, flag, folder = Drawn(200_000), tmp_path / "failed", tmp_path / "out"
    measure = MeasureLengths(str(folder / "lengths"), TOKENS, samples_per_shard=25_000)
    with beam.Pipeline(runner=RETRIES) as pipeline:
        pipeline | ReadSource(source) | beam.ParDo(FailsOnce(flag, 123_456)) | measure
    assert flag.exists()
    expected = sb.measure(source, TOKENS, progress=False)
    found = joined(folder, 8)
    np.testing.assert_array_equal(found.values, expected.values)
    assert (found.axes, found.layout) == (expected.axes, expected.layout)
    assert_same(sb.load_lengths(folder / "lengths-histogram.npz"), expected.histogram)
    assert expected.histogram.absent == 200


@pytest.mark.parametrize("runner", ["DirectRunner", RETRIES])
def test_samples_come_in_any_order_and_in_shards_of_their_own(runner, tmp_path):
    pairs = make_pairs(100)
    bounds = [0, 17, 60, 61, 100]
    elements = [
        ((shard, index - start), pairs[index])
        for shard, (start, stop) in enumerate(itertools.pairwise(bounds))
        for index in range(start, stop)
    ]
    order = np.random.default_rng(0).permutation(100)
    with beam.Pipeline(runner=runner) as pipeline:
        shuffled = pipeline | beam.Create([elements[index] for index in order])
        shuffled | MeasureLengths(str(tmp_path / "lengths"), LAYOUT)
    expected = sb.measure(pairs, LAYOUT, progress=False)
    table = joined(tmp_path, 4)
    np.testing.assert_array_equal(table.values, expected.values)
    assert table.layout == LAYOUT
    assert [len(sb.LengthTable.load(file)) for file in sorted(tmp_path.glob("*-of-*"))] == [17, 43, 1, 39]


def test_lengths_are_taken_by_a_function_or_are_the_elements(tmp_path):
    lengths = np.random.default_rng(0).integers(0, 50, (1_000, 2)).astype(np.int32)
    expected = sb.LengthTable(("a", "b"), lengths).histogram
    pairs = [tuple(row) for row in lengths.tolist()]
    assert_same(counted(tmp_path, pairs, axes=("a", "b")), expected)
    assert_same(counted(tmp_path, [{"b": b, "a": a} for a, b in pairs], axes=("a", "b")), expected)
    texts = ["x" * a for a, _ in pairs]
    assert_same(counted(tmp_path, texts, length_fn=len), sb.LengthTable(("s",), lengths[:, :1]).histogram)
    (tmp_path / "counted.npz").unlink()
    with beam.Pipeline(runner=RETRIES) as pipeline:
        indexed = pipeline | beam.Create(list(enumerate(texts)))
        indexed | MeasureLengths(str(tmp_path / "lengths"), TOKENS, length_fn=len, samples_per_shard=300)
    np.testing.assert_array_equal(joined(tmp_path, 4).values, lengths[:, :1])


def test_another_run_writes_the_same_files_anew(tmp_path):
    for count in (50, 40):
        with beam.Pipeline(runner=RETRIES) as pipeline:
            pipeline | ReadSource(Drawn(count)) | MeasureLengths(str(tmp_path / "lengths"), TOKENS)
        assert len(joined(tmp_path, 1)) == count


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0, 1, 3], "no sample was given for index 2, but for later ones"),
        ([1, 2], "no sample was given for index 0, but for later ones"),
        ([0, 1, 1, 2], "two samples were given for index 1: each has a position of its own"),
        ([0, 1, 2, 3, 12], "no sample was given for index 4, but for later ones"),
        ([0, 1, 2, 4, 5], "no sample was given for index 3, but for later ones"),
        ([(0, 0), (0, 2)], "no sample was given for index 1 of shard 0, but for later ones"),
        ([(0, 0), (2, 0)], "no sample was given for shard 1, but for later ones"),
        ([(0, 0), (0, 0)], "two samples were given for index 0 of shard 0"),
        ([0, (0, 1)], "positions are all indices, or all .shard, index in the shard., but both were given"),
        ([-1, 0], "positions are numbers from 0 on, but got -1"),
        (["a"], r"MeasureLengths takes \(position, sample\), where a position is an index or .* got tuple: ReadSource"),
    ],
)
def test_samples_that_are_missing_or_there_twice_are_errors(positions, message, tmp_path):
    elements = [(position, {"tokens": np.zeros(3, np.int32)}) for position in positions]
    with pytest.raises(sb.LengthsError, match=message):
        run(elements, MeasureLengths(str(tmp_path / "lengths"), TOKENS, samples_per_shard=4))


def test_what_cannot_be_measured_is_refused_with_its_position(tmp_path):
    def measured(elements, *arguments):
        run(elements, MeasureLengths(str(tmp_path / "lengths"), *arguments))

    broken = {"tokens": np.zeros((3, 3), np.int32)}
    with pytest.raises(sb.LayoutError, match="sample 17, feature 'tokens'"):
        measured([(17, broken)], TOKENS)
    with pytest.raises(sb.LengthsError, match=r"length_fn gave -1 for sample \(0, 3\)"):
        measured([((0, 3), -1)])
    with pytest.raises(sb.LengthsError, match="length_fn gave -1 for a sample"):
        run([-1], CountLengths())
    with pytest.raises(sb.LengthsError, match="the PCollection has no samples: it has no elements"):
        measured([], TOKENS)
    with pytest.raises(sb.LengthsError, match="no samples: its 2 elements are all absent"):
        measured([(0, None), (1, None)], TOKENS)
    with pytest.raises(sb.LengthsError, match="MeasureLengths takes .* but got dict: ReadSource gives them"):
        measured([{"tokens": np.zeros(3, np.int32)}], TOKENS)


def test_what_cannot_be_used_is_refused_at_once():
    with pytest.raises(sb.LayoutError, match="a layout whose dtypes are known is needed, as in .*, but got"):
        CountLengths(sb.Layout({"tokens": "s"}))
    with pytest.raises(sb.LengthsError, match=r"the layout names the axes, \('s',\): leave axes out"):
        CountLengths(TOKENS, axes=("s",))
    with pytest.raises(sb.LengthsError, match="samples_per_shard must be a number of samples, but got 0"):
        MeasureLengths("x", TOKENS, samples_per_shard=0)
    with pytest.raises(sb.LengthsError, match="ReadSource takes a source with len and .*, but got generator"):
        ReadSource(each for each in [])


def test_without_beam_the_error_names_the_extra():
    program = "import sys; sys.modules['apache_beam'] = None; import shapebucket.beam"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "MissingExtraError: " in done.stderr
    assert "shapebucket[beam]" in done.stderr
