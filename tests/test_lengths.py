import pickle

import grain
import numpy as np
import pyarrow
import pytest
from conftest import make_pairs
from pyarrow import parquet

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
            assert index == 0, "one at a time, but for the dtypes"
            return self.data[index]

        def __getitems__(self, indices):
            self.reads.append(len(indices))
            return [self.data[index] for index in indices]

    source = Source(make_pairs(600))
    table = sb.measure(source, LAYOUT, progress=False)
    assert table.values[:, 0].tolist() == [len(each["src"]) for each in source.data]
    assert source.reads == [256, 256, 88]


def test_lengths_that_are_known_are_taken_as_they_are(tmp_path):
    assert sb.measure(np.array([3, 1])).values.tolist() == [[3], [1]]
    table = sb.measure({"t": [5, 6], "s": [3, 1]}, LAYOUT, path=tmp_path / "lengths.npz")
    assert (table.axes, table.values.tolist()) == (("s", "t"), [[3, 5], [1, 6]])
    assert sb.LengthTable.load(tmp_path / "lengths.npz").layout == LAYOUT


def test_a_function_gives_lengths_without_decoding():
    rows = [{"text": "…", "n": number % 7, "m": 2 * number} for number in range(600)]
    expected = [[number % 7, 2 * number] for number in range(600)]
    layout = sb.Layout({"src": "s", "tgt": "t"})
    by_sequence = sb.measure(rows, layout, length_fn=lambda row: (row["n"], row["m"]), progress=False)
    by_name = sb.measure(rows, layout, length_fn=lambda row: {"t": row["m"], "s": row["n"]}, progress=False)
    for table in (by_sequence, by_name):
        assert (table.axes, table.layout, table.values.tolist()) == (("s", "t"), layout, expected)
    bare = sb.measure(iter(rows), length_fn=lambda row: {"n": row["n"], "m": np.int64(row["m"])}, progress=False)
    assert (bare.axes, bare.layout, bare.values.tolist()) == (("n", "m"), None, expected)
    one = sb.measure(rows, length_fn=lambda row: row["n"], progress=False)
    assert (one.axes, one.values[:, 0].tolist()) == (("s",), [row[0] for row in expected])


@pytest.mark.parametrize("wrong", [-1, 2.5, [1], "12", 2**31, None])
def test_a_function_that_gives_no_lengths_is_named_with_the_sample(wrong):
    def length_fn(row):
        return wrong if row == 3 else (1, 2)

    with pytest.raises(
        sb.LengthsError, match=r"length_fn gave .* for sample 3: a whole number from 0 to 2³¹ − 1 is needed"
    ):
        sb.measure([0, 1, 2, 3], sb.Layout({"src": "s", "tgt": "t"}), length_fn=length_fn, progress=False)


def test_a_function_that_fails_or_knows_other_axes_is_named_with_the_sample():
    layout = sb.Layout({"src": "s", "tgt": "t"})
    with pytest.raises(
        sb.LengthsError, match=r"length_fn gave \{'src': 1\} for sample 0, but the axes are \('s', 't'\)"
    ):
        sb.measure([0], layout, length_fn=lambda row: {"src": 1}, progress=False)
    with pytest.raises(ZeroDivisionError) as caught:
        sb.measure([2, 1, 0], length_fn=lambda row: 2 // row, progress=False)
    assert caught.value.__notes__ == ["shapebucket: while length_fn took the lengths of sample 2"]


def test_a_source_that_gives_too_few_elements_is_refused(tmp_path):
    class Short(list):
        def __getitems__(self, indices):
            return [self[index] for index in indices if index % 10]

    with pytest.raises(sb.LengthsError, match="__getitems__ of the data set gave 90 elements for 100 indices"):
        sb.measure(Short(range(100)), length_fn=lambda row: row, progress=False)

    class Claims:
        def __len__(self):
            return 1000

        def __iter__(self):
            return iter(range(300))

    with pytest.raises(sb.LengthsError, match="the data set has a length of 1,000, but gave 300 elements"):
        sb.measure(Claims(), length_fn=lambda row: row, path=tmp_path / "lengths.npz", progress=False)
    assert not (tmp_path / "lengths.npz").exists()


def test_an_iterable_that_gives_each_sample_once_is_measured_whole():
    class Once:
        def __init__(self, data):
            self.samples = iter(data)

        def __iter__(self):
            return self.samples

    data = make_pairs(700)
    for layout in (LAYOUT, None):
        assert len(sb.measure(Once(data), layout, progress=False)) == 700


def test_a_file_may_have_any_name(tmp_path):
    for name in ("lengths.csv", "lengths.parquet", "lengths"):
        path = tmp_path / name
        assert sb.measure([3, 5], length_fn=lambda row: row, path=path, progress=False).values.tolist() == [[3], [5]]
        assert sb.measure([3, 5], length_fn=lambda row: row, path=path, progress=False).values.tolist() == [[3], [5]]


def test_known_lengths_never_replace_a_file(tmp_path):
    sb.measure(np.array([1, 2]), path=tmp_path / "lengths.npz")
    with pytest.raises(
        sb.LengthsError, match="there is a file '.*lengths.npz' already: delete it, or give another path"
    ):
        sb.measure(np.array([1, 3]), path=tmp_path / "lengths.npz")
    with pytest.raises(sb.LengthsError, match="lengths that are known are not read: leave length_fn and workers out"):
        sb.measure(np.array([1, 3]), length_fn=len)


def test_a_folder_that_is_not_there_is_found_before_reading(tmp_path):
    def length_fn(row):
        raise AssertionError("read")

    with pytest.raises(
        sb.LengthsError, match="the lengths cannot be kept in '.*nodir/lengths.npz': there is no such folder"
    ):
        sb.measure(
            [1], sb.Layout({"x": "s"}), length_fn=length_fn, path=tmp_path / "nodir" / "lengths.npz", progress=False
        )


def test_a_file_that_is_replaced_while_it_is_mapped_stays_what_it_was(tmp_path):
    path = tmp_path / "lengths.npz"
    sb.LengthTable.of(np.ones(400_000), ["s"]).save(path)
    table = sb.LengthTable.load(path)
    sb.LengthTable.of(np.full(600_000, 2), ["s"]).save(path)
    assert (table.values == 1).all()
    link = tmp_path / "link.npz"
    link.symlink_to(path)
    sb.LengthTable.of([7], ["s"]).save(link)
    assert link.is_symlink()
    assert sb.LengthTable.load(path).values.tolist() == [[7]]


def test_worker_processes_give_the_same_table():
    data = make_pairs(1000)
    kept = grain.MapDataset.source(data).filter(lambda each: each["label"] % 3 > 0)
    alone = sb.measure(kept, LAYOUT, progress=False)
    table = sb.measure(kept, LAYOUT, workers=2, progress=False)
    np.testing.assert_array_equal(table.values, alone.values)
    assert table.layout == alone.layout


def test_an_error_in_a_worker_process_names_the_sample():
    data = make_pairs(600)
    data[300] = {**data[300], "src": data[300]["src"].tolist()}
    with pytest.raises(Exception, match="sample 300, feature 'src': is a Python list"):
        sb.measure(data, LAYOUT, workers=2, progress=False)


def test_workers_need_random_access(pairs):
    with pytest.raises(sb.LengthsError, match=r"but list_iterator has no len\(\) and \[\]"):
        sb.measure(iter(pairs), LAYOUT, workers=2)
    with pytest.raises(sb.LengthsError, match="workers must be a whole number of processes, 0 for none, but got -1"):
        sb.measure(pairs, LAYOUT, workers=-1)


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
        (None, None, r"measure\(\) takes samples .* or arrays of lengths, but got NoneType"),
        ({"train": ["a"]}, None, r"the lengths of axis 'train' must be numbers \[N\]"),
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
    with pytest.raises(sb.LengthsError, match="cannot read lengths from '.*cut.npz': it is no whole file of lengths"):
        sb.LengthTable.load(tmp_path / "cut.npz")
    np.save(tmp_path / "objects.npy", np.array([[1], [1, 2]], object), allow_pickle=True)
    with pytest.raises(sb.LengthsError, match="cannot read lengths from '.*objects.npy'"):
        sb.LengthTable.load(tmp_path / "objects.npy")


def test_a_large_table_is_mapped_from_its_file(tmp_path):
    table = sb.LengthTable.of({"s": np.arange(200_000), "t": np.arange(200_000) % 7}, ["s", "t"])
    table.save(tmp_path / "lengths.npz")
    loaded = sb.LengthTable.load(tmp_path / "lengths.npz")
    assert isinstance(loaded.values, np.memmap)
    assert loaded.values.flags.aligned
    assert not loaded.values.flags.writeable
    np.testing.assert_array_equal(loaded.values, table.values)
    with np.load(tmp_path / "lengths.npz") as plain:  # and it is an .npz file like any other
        np.testing.assert_array_equal(plain["values"], table.values)
    content = bytearray((tmp_path / "lengths.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "flipped.npz").write_bytes(content)
    with pytest.raises(sb.LengthsError, match=r"flipped.npz': it is no whole file .*Bad CRC-32 for file 'values.npy'"):
        sb.LengthTable.load(tmp_path / "flipped.npz")


def test_measure_returns_a_large_table_as_it_is_mapped(tmp_path):
    rows = range(300_000)
    table = sb.measure(rows, length_fn=lambda row: row % 100, path=tmp_path / "lengths.npz", progress=False)
    assert isinstance(table.values, np.memmap)
    assert sb.plan_buckets(table, max_buckets=4, batch_size=1) == sb.plan_buckets(
        np.arange(300_000) % 100, max_buckets=4, batch_size=1
    )


def test_tables_of_parts_are_joined_in_order():
    parts = [sb.LengthTable.of([1, 2], ["s"]), sb.LengthTable.of([3], ["s"])]
    assert sb.LengthTable.concatenate(parts).values.tolist() == [[1], [2], [3]]
    with pytest.raises(
        sb.LengthsError, match=r"tables of the same axes and layout can be joined, at least one; got \[\]"
    ):
        sb.LengthTable.concatenate([])
    with pytest.raises(sb.LengthsError, match="got"):
        sb.LengthTable.concatenate([*parts, sb.LengthTable.of([3], ["t"])])


def test_a_csv_names_its_axes_in_its_first_line(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text('name,src,"tgt, words"\n"a, b",3,5\nc,1,6\n')
    table = sb.load_lengths(path, columns=["src", "tgt, words"])
    assert (table.axes, table.values.tolist()) == (("src", "tgt, words"), [[3, 5], [1, 6]])
    path.write_bytes(b"\xef\xbb\xbfn\r\n3\r\n1\r\n")  # as spreadsheets write it
    assert sb.load_lengths(path).axes == ("n",)
    path.write_text("a, b\n3, 1\n")
    assert sb.load_lengths(path).axes == ("a", "b")
    path.write_text("3\n1\n2\n")
    table = sb.load_lengths(path)
    assert (table.axes, table.values[:, 0].tolist()) == (("s",), [3, 1, 2])


@pytest.mark.parametrize(
    ("content", "columns", "message"),
    [
        ("", None, "it is empty, or its first line is"),
        ("s\n1\ntwo\n3\n", None, "line 3 has 'two' in the column 's', which is no number: drop such lines"),
        ("s,name\n1,ann\n", None, "line 2 has 'ann' in the column 'name', which is no number"),
        ("s,t\n1,2\n3\n", None, "line 3 has 1 fields, but the first has 2"),
        ("s\n1,5\n", None, "line 2 has 2 fields, but the first has 1"),
        ("s, s\n1,5\n", None, r"two of its columns have one name: \['s', 's'\]"),
        ("s,t\n", None, r"it has no lengths, only the line \['s', 't'\]"),
        ("1,2\n", None, "its 2 columns have no names: put a line with the names of the axes first"),
        ("s,2\n", None, "its first line .* is part text, part numbers"),
        ("s\n1\n-2\n", None, "axis 's': 1 lengths are not whole numbers .* the first is -2.0 of sample 1"),
        ("s\nnan\n", None, "axis .s.: 1 lengths .* the first is nan of sample 0"),
        ("s\n1\n", ["t"], r"it has no column 't', but \['s'\]"),
    ],
)
def test_a_csv_that_holds_no_lengths_is_refused_with_the_place(tmp_path, content, columns, message):
    (tmp_path / "lengths.csv").write_text(content)
    with pytest.raises(sb.LengthsError, match=f"cannot read lengths from '.*lengths.csv': {message}"):
        sb.load_lengths(tmp_path / "lengths.csv", columns=columns)


def test_parquet(tmp_path):
    table = pyarrow.table(
        {"n": [3, 1], "m": pyarrow.array([5, 6], pyarrow.uint16()), "text": ["a", "b"], "gap": [1, None]}
    )
    parquet.write_table(table, tmp_path / "lengths.parquet")
    read = sb.load_lengths(tmp_path / "lengths.parquet", columns=["m", "n"])
    assert (read.axes, read.values.tolist()) == (("m", "n"), [[5, 3], [6, 1]])
    for columns, message in (
        (None, "the column 'text' is of string, not of numbers: choose the columns that are lengths"),
        (["gap"], "the column 'gap' has 1 nulls: drop such rows"),
        (["x"], r"it has no column 'x', but \['n', 'm', 'text', 'gap'\]"),
    ):
        with pytest.raises(sb.LengthsError, match=f"cannot read lengths from '.*lengths.parquet': {message}"):
            sb.load_lengths(tmp_path / "lengths.parquet", columns=columns)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "lengths.parquet").read_bytes()[:100])
    with pytest.raises(sb.LengthsError, match="it is no whole .parquet file"):
        sb.load_lengths(tmp_path / "cut.parquet")


def test_an_npz_of_chosen_columns(tmp_path):
    np.savez(tmp_path / "all.npz", s=[1, 2], text=["a", "b"])
    assert sb.load_lengths(tmp_path / "all.npz", columns=["s"]).values.tolist() == [[1], [2]]
    with pytest.raises(sb.LengthsError, match=r"it has no column 'x', but \['s', 'text'\]"):
        sb.load_lengths(tmp_path / "all.npz", columns=["x"])


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


def mapped(tmp_path, count: int = 300_000):
    values = np.random.default_rng(0).integers(0, 50, (count, 1)).astype(np.int32)
    sb.LengthTable(("s",), values).save(tmp_path / "lengths.npz")
    return values, sb.LengthTable.load(tmp_path / "lengths.npz")


def test_a_mapped_table_is_pickled_as_the_name_of_its_file(tmp_path):
    values, table = mapped(tmp_path)
    assert isinstance(table.values, np.memmap)
    content = pickle.dumps(table)
    assert len(content) < 2_000
    again = pickle.loads(content)
    assert isinstance(again.values, np.memmap)
    np.testing.assert_array_equal(again.values, values)
    part = pickle.loads(pickle.dumps(table.values[5:9]))
    np.testing.assert_array_equal(part, values[5:9])
    schedule = sb.Schedule(table, sb.plan_buckets(table, max_buckets=2, batch_size=8), window=10_000)
    assert len(pickle.dumps(schedule)) < 10_000
    assert pickle.loads(pickle.dumps(schedule))[3].indices.tolist() == schedule[3].indices.tolist()


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_pickled_table_says_when_its_file_is_no_longer_the_same(tmp_path, change):
    _, table = mapped(tmp_path)
    (tmp_path / "lengths.npz").unlink()
    if change == "replaced":
        mapped(tmp_path)
    content = pickle.dumps(table)
    with pytest.raises(sb.LengthsError, match=r"lengths.npz' was changed or removed while it was in use"):
        pickle.loads(content)


def test_tables_are_joined_in_a_file(tmp_path):
    layout = sb.Layout({"tokens": "int32[s]"})
    values = np.random.default_rng(0).integers(0, 50, (900_000, 1)).astype(np.int32)
    values[17] = -1
    for number in range(3):
        part = values[number * 300_000 : (number + 1) * 300_000]
        sb.LengthTable(("s",), part, layout).save(tmp_path / f"lengths-{number}.npz")
    parts = map(sb.LengthTable.load, sorted(tmp_path.glob("lengths-*.npz")))
    table = sb.LengthTable.concatenate(parts, path=tmp_path / "lengths.npz")
    assert isinstance(table.values, np.memmap)
    np.testing.assert_array_equal(table.values, values)
    assert (table.axes, table.layout, table.histogram.absent) == (("s",), layout, 1)
