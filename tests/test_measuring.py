import grain
import numpy as np
import pytest
from conftest import make_pairs

import shapebucket as sb
from shapebucket import measuring

LAYOUT = sb.Layout({"src": "s", "tgt": "t", "label": ""})


class Counting:
    """A data set that counts its reads and may fail at one element."""

    def __init__(self, data, fails_at=None):
        self.data, self.fails_at, self.reads = data, fails_at, []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if index == self.fails_at:
            raise OSError("unplugged")
        self.reads.append(index)
        return self.data[index]


def test_a_kept_file_is_read_in_place_of_the_data(tmp_path, pairs):
    path = tmp_path / "lengths.npz"
    first = sb.measure(pairs, LAYOUT, path=path, progress=False)
    source = Counting(pairs)
    second = sb.measure(source, LAYOUT, path=path, progress=False)
    np.testing.assert_array_equal(first.values, second.values)
    assert second.layout == first.layout
    assert len(source.reads) == 17  # of which one for the dtypes
    assert sb.LengthTable.load(path).axes == ("s", "t")
    assert [each.name for each in tmp_path.iterdir()] == ["lengths.npz"]


@pytest.mark.parametrize(
    ("data", "layout", "what"),
    [
        (make_pairs(99), LAYOUT, "number of elements, content of samples"),
        (make_pairs(100, seed=1), LAYOUT, "content of samples"),
        (make_pairs(100), sb.Layout({"src": "a", "tgt": "b", "label": ""}), "layout"),
    ],
)
def test_a_kept_file_of_another_data_set_is_refused_with_the_reason(tmp_path, pairs, data, layout, what):
    path = tmp_path / "lengths.npz"
    sb.measure(pairs, LAYOUT, path=path, progress=False)
    message = rf"the lengths in '.*lengths.npz' are of another data set \(another {what}\): delete the file, or give another path"
    with pytest.raises(sb.LengthsError, match=message):
        sb.measure(data, layout, path=path, progress=False)


def test_a_file_that_measure_did_not_keep_is_refused(tmp_path, pairs):
    np.savez(tmp_path / "lengths.npz", s=np.ones(100, int), t=np.ones(100, int))
    with pytest.raises(sb.LengthsError, match="are of another data set"):
        sb.measure(pairs, LAYOUT, path=tmp_path / "lengths.npz", progress=False)


@pytest.mark.parametrize("as_iterable", [False, True])
def test_an_interrupted_run_goes_on_where_it_last_saved(tmp_path, pairs, monkeypatch, as_iterable):
    monkeypatch.setattr(measuring, "_CHUNK", 10)
    path = tmp_path / "lengths.npz"

    def dataset(source):
        return Iterable(source) if as_iterable else source

    class Iterable:
        def __init__(self, source):
            self.source = source

        def __iter__(self):
            return (self.source[index] for index in range(len(self.source)))

    fails_at = 61
    broken = Counting(pairs, fails_at)
    with pytest.raises(OSError, match="unplugged"):
        sb.measure(dataset(broken), LAYOUT, path=path, progress=False)
    assert not path.exists()
    whole = Counting(pairs)
    table = sb.measure(dataset(whole), LAYOUT, path=path, progress=False)
    np.testing.assert_array_equal(table.values, sb.measure(pairs, LAYOUT, progress=False).values)
    assert [each.name for each in tmp_path.iterdir()] == ["lengths.npz"]
    if not as_iterable:
        assert whole.reads[17:] == list(range(60, 100))


def test_what_an_interrupted_run_left_is_no_file_of_lengths(tmp_path, pairs, monkeypatch):
    monkeypatch.setattr(measuring, "_CHUNK", 10)
    with pytest.raises(OSError, match="unplugged") as caught:
        sb.measure(Counting(pairs, 61), LAYOUT, path=tmp_path / "lengths.npz", progress=False)
    assert "shapebucket: 60 lengths are kept; measure goes on there" in caught.value.__notes__
    with pytest.raises(
        sb.LengthsError, match="is of a run that was interrupted: run measure again, which goes on there"
    ):
        sb.load_lengths(tmp_path / "lengths.npz.partial")


def test_raw_samples_of_any_kind_are_told_apart(tmp_path):
    path = tmp_path / "lengths.npz"
    rows = [([1, 2, 3][:n], "x" * n, np.zeros(n)) for n in (1, 2, 3)]
    sb.measure(rows, length_fn=lambda row: len(row[1]), path=path, progress=False)
    assert len(sb.measure(rows, length_fn=lambda row: len(row[1]), path=path, progress=False)) == 3
    with pytest.raises(sb.LengthsError, match="another content of samples"):
        sb.measure(rows[::-1], length_fn=lambda row: len(row[1]), path=path, progress=False)
    with pytest.raises(sb.LengthsError, match="another content of samples"):
        sb.measure(rows, length_fn=lambda row: 1, path=path, progress=False)


def test_an_iterator_cannot_be_kept(tmp_path, pairs):
    with pytest.raises(sb.LengthsError, match="an iterator cannot be told from another"):
        sb.measure(iter(pairs), LAYOUT, path=tmp_path / "lengths.npz")


def test_grains_data_sets_are_kept(tmp_path, pairs):
    dataset = grain.MapDataset.source(pairs)
    for number, source in enumerate((dataset, dataset.to_iter_dataset())):
        path = tmp_path / f"{number}.npz"
        first = sb.measure(source, LAYOUT, path=path, progress=False)
        np.testing.assert_array_equal(first.values, sb.measure(source, LAYOUT, path=path, progress=False).values)
