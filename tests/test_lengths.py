import grain
import numpy as np
import pytest
from conftest import make_pairs

import shapebucket as sb
from shapebucket.files import replacing

LAYOUT = sb.Layout({"src": "s", "tgt": "t", "label": ""})


def test_measure_takes_every_sample_in_order_and_the_dtypes(pairs):
    expected = [[len(each["src"]), len(each["tgt"])] for each in pairs]
    dataset = grain.MapDataset.source(pairs)
    for source in (pairs, dataset, dataset.to_iter_dataset(), iter(pairs)):
        table = sb.measure(source, LAYOUT, progress=False)
        assert table.axes == ("s", "t")
        assert table.values.tolist() == expected
        assert table.values.dtype == np.int32
        assert str(table.layout) == "label: 'int32[]', src: 'int32[s]', tgt: 'float32[t]'"


def test_measure_infers_the_layout(pairs):
    for source in (pairs, iter(pairs), grain.MapDataset.source(pairs).to_iter_dataset()):
        table = sb.measure(source, progress=False)
        assert table.axes == ("src", "tgt")
        assert len(table) == len(pairs)


def test_an_iterator_is_measured_whole_though_the_layout_was_inferred_from_it():
    data = make_pairs(700)
    assert sb.measure(iter(data), progress=False).values[:, 0].tolist() == [len(each["src"]) for each in data]


def test_measure_reads_in_chunks_where_the_source_can():
    class Source:
        def __init__(self, data):
            self.data, self.reads = data, []

        def __len__(self):
            return len(self.data)

        def __getitem__(self, index):
            raise AssertionError("one at a time")

        def __getitems__(self, indices):
            self.reads.append(len(indices))
            return [self.data[index] for index in indices]

    source = Source(make_pairs(1500))
    table = sb.measure(source, LAYOUT, progress=False)
    assert table.values[:, 0].tolist() == [len(each["src"]) for each in source.data]
    assert source.reads == [1024, 476]


def test_filtered_elements_are_marked_absent(pairs):
    dataset = grain.MapDataset.source(pairs).filter(lambda each: each["label"] % 2 == 0)
    table = sb.measure(dataset, LAYOUT, progress=False)
    assert table.present.tolist() == [number % 2 == 0 for number in range(100)]


def test_measure_names_the_sample_at_fault(pairs):
    pairs[17] = {**pairs[17], "src": pairs[17]["src"].tolist()}
    with pytest.raises(sb.LayoutError, match="sample 17, feature 'src': is a Python list") as caught:
        sb.measure(pairs, LAYOUT, progress=False)
    assert (caught.value.sample, caught.value.path) == (17, "src")


def test_measure_refuses_no_samples_and_no_end(pairs):
    with pytest.raises(sb.LengthsError, match="the data set has no samples: it gave 0 elements"):
        sb.measure([], LAYOUT, progress=False)
    for layout in (LAYOUT, None):
        with pytest.raises(sb.LengthsError, match=r"no end: measure it before .repeat\(\)"):
            sb.measure(grain.MapDataset.source(pairs).repeat(), layout, progress=False)
    assert sb.Layout.infer(grain.MapDataset.source(pairs).repeat()).axes == ("src", "tgt")
    with pytest.raises(sb.LengthsError, match=r"no samples: it gave 100 elements, all absent \(None\)"):
        sb.measure(grain.MapDataset.source(pairs).filter(lambda _: False), LAYOUT, progress=False)


@pytest.mark.parametrize("kind", ["map", "iterable", "chunks"])
def test_an_error_of_the_source_says_which_sample(kind):
    class Source:
        def __len__(self):
            return 10

        def __getitem__(self, index):
            if index == 7:
                raise OSError("bad record")
            return {"x": np.zeros(index)}

    class Chunked(Source):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    source = {"map": Source(), "iterable": (Source()[index] for index in range(10)), "chunks": Chunked()}[kind]
    with pytest.raises(OSError, match="bad record") as caught:
        sb.measure(source, sb.Layout({"x": "s"}), progress=False)
    which = "the samples 0 to 9" if kind == "chunks" else "sample 7"
    assert caught.value.__notes__ == [f"shapebucket: while measure() read {which}"]


@pytest.mark.parametrize(
    ("dataset", "layout", "message"),
    [
        ([], {"x": "s"}, r"measure\(\) takes a Layout, as in Layout\(\{'x': 's'\}\), but got dict"),
        ({"x": [1]}, None, r"measure\(\) takes samples, .* but got dict; lengths that are known go to plan_buckets"),
        (None, None, "but got NoneType"),
    ],
)
def test_measure_refuses_what_is_no_data_set(dataset, layout, message):
    with pytest.raises(sb.LengthsError, match=message):
        sb.measure(dataset, layout)


def test_file_round_trip(tmp_path, pairs):
    table = sb.measure(pairs, LAYOUT, progress=False)
    table.save(tmp_path / "lengths.npz")
    loaded = sb.LengthTable.load(tmp_path / "lengths.npz")
    assert loaded.axes == table.axes
    assert loaded.layout == table.layout
    np.testing.assert_array_equal(loaded.values, table.values)


def test_plain_files_of_lengths(tmp_path):
    np.save(tmp_path / "one.npy", [3, 1, 2])
    assert sb.LengthTable.load(tmp_path / "one.npy").values.tolist() == [[3], [1], [2]]
    np.savez(tmp_path / "two.npz", s=[3, 1], t=[5.0, 6.0])
    two = sb.LengthTable.load(tmp_path / "two.npz")
    assert (two.axes, two.values.tolist()) == (("s", "t"), [[3, 5], [1, 6]])


def test_files_that_hold_no_lengths_are_refused(tmp_path):
    (tmp_path / "text.npy").write_text("no")
    with pytest.raises(sb.LengthsError, match="cannot read lengths from '.*text.npy'"):
        sb.LengthTable.load(tmp_path / "text.npy")
    np.savez(tmp_path / "empty.npz")
    with pytest.raises(sb.LengthsError, match="holds no arrays"):
        sb.LengthTable.load(tmp_path / "empty.npz")
    sb.LengthTable.of(np.arange(1000), ["s"]).save(tmp_path / "cut.npz")
    content = (tmp_path / "cut.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(sb.LengthsError, match="cannot read lengths from '.*cut.npz': it is no whole .npy or .npz file"):
        sb.LengthTable.load(tmp_path / "cut.npz")
    np.save(tmp_path / "objects.npy", np.array([[1], [1, 2]], object), allow_pickle=True)
    with pytest.raises(sb.LengthsError, match="cannot read lengths from '.*objects.npy'"):
        sb.LengthTable.load(tmp_path / "objects.npy")


def test_an_axis_may_have_any_name(tmp_path):
    table = sb.LengthTable.of({"file": [1, 2], "allow_pickle": [3, 4]}, ["file", "allow_pickle"])
    table.save(tmp_path / "lengths.npz")
    assert sb.LengthTable.load(tmp_path / "lengths.npz").axes == ("file", "allow_pickle")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write():
        with replacing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_that_cannot_be_is_refused():
    with pytest.raises(sb.LengthsError, match=r"must be int32 \[N, 1\], but got int64 \[2, 1\]"):
        sb.LengthTable(("s",), np.array([[1], [2]]))
    for values in ([[-5, 1]], [[-1, 1]]):
        with pytest.raises(sb.LengthsError, match="lengths of 0 or more, or a whole row of -1"):
            sb.LengthTable(("s", "t"), np.array(values, np.int32))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, np.nan, 3], "axis 's': 1 lengths are not whole numbers from 0 to 2³¹ − 1; the first is nan of sample 1"),
        ([1, 2.5], "the first is 2.5 of sample 1"),
        ([-1, np.inf], "2 lengths are not whole numbers .* the first is -1.0 of sample 0"),
        ([2**31], "the first is 2147483648 of sample 0"),
        ([[1]], r"the lengths of axis 's' must be numbers \[N\], but got int64 \[1, 1\]"),
        (["a"], r"must be numbers \[N\], but got <U1 \[1\]"),
        ({"t": [1]}, r"the lengths have the axes \('t',\), but the layout has \('s',\)"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths, message):
    with pytest.raises(sb.LengthsError, match=message):
        sb.LengthTable.of(lengths, ["s"])


def test_several_axes_need_an_array_each():
    with pytest.raises(sb.LengthsError, match="give a dict with one array of lengths for each"):
        sb.LengthTable.of([1, 2], ["s", "t"])
    with pytest.raises(sb.LengthsError, match=r"unequal numbers of samples: \{'s': 1, 't': 2\}"):
        sb.LengthTable.of({"s": [1], "t": [1, 2]}, ["s", "t"])
