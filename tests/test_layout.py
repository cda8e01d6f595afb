import grain
import jax
import ml_dtypes
import numpy as np
import pytest

import shapebucket as sb

LAYOUT = sb.Layout({"a": {"image": "h w 3"}, "src": "int32[s]", "weight": "s", "label": ""})


def sample(**changes):
    base = {
        "a": {"image": np.zeros((4, 5, 3), np.uint8)},
        "src": np.arange(7, dtype=np.int32),
        "weight": np.ones(7, np.float32),
        "label": 3,
    }
    return {**base, **changes}


def test_lengths_come_in_the_order_of_the_axes():
    assert LAYOUT.axes == ("h", "w", "s")
    assert LAYOUT.lengths(sample()) == (4, 5, 7)


def test_elements_count_each_set_of_axes_once():
    assert LAYOUT.elements([[4, 5, 7], [1, 1, 0]]).tolist() == [4 * 5 + 7, 1]


def test_dtypes_come_from_a_sample_and_keep_those_that_were_written():
    layout = LAYOUT.with_dtypes(sample())
    assert str(layout) == "a/image: 'uint8[h w 3]', label: 'int32[]', src: 'int32[s]', weight: 'float32[s]'"
    assert layout.has_dtypes
    assert not LAYOUT.has_dtypes
    assert LAYOUT.with_dtypes_of(layout) == layout
    assert LAYOUT.with_dtypes_of(sb.Layout({"src": "s"})) is None
    other = sb.Layout({"src": "int64[s]"})
    assert sb.Layout({"src": "int32[s]"}).with_dtypes_of(other) is None


def test_pad_values_are_the_writers_and_one_number_is_one_pad_value():
    measured = sb.Layout({"x": "float32[s]"})
    assert sb.Layout({"x": "s"}, pad_values={"x": -1}).with_dtypes_of(measured).features[0].pad_value == -1
    assert sb.Layout({"x": "float32[s]"}, pad_values={"x": 0.0}).to_json() == measured.to_json()


def test_json_round_trip():
    layout = sb.Layout({"x": "bfloat16[s]", "y": {"z": "s 2"}}, pad_values={"y": {"z": -1.5}})
    assert sb.Layout.from_json(layout.to_json()) == layout
    assert layout.features[0].dtype == np.dtype(ml_dtypes.bfloat16)


def test_features_order_does_not_matter():
    assert sb.Layout({"b": "t", "a": "s"}) == sb.Layout({"a": "s", "b": "t"})


def test_python_numbers_are_read_as_jax_reads_them():
    arrays, _ = sb.Layout({"x": "s", "n": "", "f": "", "b": ""}).check({"x": np.zeros(1), "n": 3, "f": 0.1, "b": True})
    assert [array.dtype.name for array in arrays] == ["bool", "float32", "int32", "float64"]


def test_a_whole_number_that_a_float_cannot_hold_is_refused():
    with pytest.raises(sb.LayoutError, match="is the Python number 16777217, which float32 cannot hold"):
        sb.Layout({"x": "s", "n": "float32[]"}).check({"x": np.zeros(1), "n": 2**24 + 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"src": np.zeros((7, 1), np.int32)},
            r"feature 'src': has rank 2 \(shape \(7, 1\)\), but the layout says 'int32\[s\]', rank 1",
        ),
        (
            {"a": {"image": np.zeros((4, 5, 1), np.uint8)}},
            r"feature 'a/image': has size 1 in dimension 2 \(shape \(4, 5, 1\)\), but the layout 'h w 3' fixes it at 3: give "
            "the dimension a name if it varies",
        ),
        (
            {"weight": np.ones(6, np.float32)},
            r"feature 'weight': has length 6 on axis 's' \(shape \(6,\)\), but 'src' has 7: features that share an axis must "
            "agree on it in every sample",
        ),
        (
            {"src": np.arange(7)},
            "feature 'src': has dtype int64, but the layout says int32: cast it with .map",
        ),
        (
            {"src": [1, 2, 3]},
            r"feature 'src': is a Python list, where an array belongs: .*np.asarray.* TFDS reads Sequence\(scalar\) features so",
        ),
        (
            {"weight": np.array([[1], [1, 2]], object)},
            r"feature 'weight': is an array of dtype object, .*rows of unequal length",
        ),
        ({"label": "cat"}, r"feature 'label': is text \(str\), which has no numeric dtype: tokenise it"),
        ({"label": b"cat"}, r"feature 'label': is text \(bytes\)"),
        ({"label": np.array("cat")}, "feature 'label': is an array of dtype <U3, which JAX cannot hold"),
        ({"label": None}, "feature 'label': is NoneType, where an array belongs"),
        ({"label": 2**40}, "feature 'label': is the Python number 1099511627776, which int32 cannot hold"),
        ({"label": np.ma.masked_array(3)}, "feature 'label': is MaskedArray, where an array belongs"),
        ({"label": np.array(3, ">i4")}, "feature 'label': is an array of dtype >i4, which JAX cannot hold"),
        ({"label": jax.random.key(0)}, "feature 'label': cannot be made a numpy array"),
        ({"extra": 1}, r"the sample has \['extra'\], which the layout has not: mend the layout"),
        ({"a": {}}, r"feature 'a': the sample lacks \['image'\], which the layout has"),
        ({"a": np.zeros(3)}, r"a sample must be a dict of arrays at 'a' with the features \[image\], but got ndarray"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused_by_leaf(changes, message):
    with pytest.raises(sb.LayoutError, match=message):
        LAYOUT.check(sample(**changes))


def test_a_bare_array_is_refused_with_the_cure():
    with pytest.raises(sb.LayoutError, match=r"got ndarray: wrap it, as in ds.map\(lambda x: \{'tokens': x\}\)"):
        sb.Layout({"tokens": "s"}).check(np.zeros(3))


@pytest.mark.parametrize(
    ("spec", "pads", "message"),
    [
        ({"x": "s-1"}, {}, "feature 'x': 's-1' in 's-1' is neither an axis name nor a size"),
        ({"x": "int32[s"}, {}, r"feature 'x': cannot read the notation 'int32\[s'"),
        ({"x": 3}, {}, "feature 'x': cannot read the notation 3"),
        ({"x": "int33[s]"}, {}, "feature 'x': 'int33' is not a dtype"),
        ({"x": "h,w"}, {}, "'h,w' in 'h,w' is neither an axis name nor a size; dimensions are separated by spaces"),
        ({"x": "s"}, 1, r"pad_values is a dict from feature to number, such as \{.tokens.: -1\}; got 1"),
        ({"x": "uint8[s]"}, {"x": -1}, "feature 'x': the pad value -1 does not fit its dtype uint8"),
        ({"x": "s"}, {"x": "0"}, "feature 'x': the pad value '0' must be a Python number"),
        ({"x": "s"}, {"y": 1}, "pad_values names 'y', which the layout does not have; it has 'x'"),
        ({1: "s"}, {}, "keys must be strings, but the sample has the key 1"),
        ("s", {}, r"a layout is a dict from feature to notation, such as \{\"tokens\": \"s\"\}; got 's'"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(spec, pads, message):
    with pytest.raises(sb.LayoutError, match=message):
        sb.Layout(spec, pad_values=pads)


def test_nan_pads_floats():
    assert np.isnan(sb.Layout({"x": "float32[s]"}, pad_values={"x": float("nan")}).features[0].pad_value)


def test_infer_names_axes_after_features_and_joins_those_that_always_agree():
    rng = np.random.default_rng(0)

    def one(n, m, h, w):
        return {
            "src": np.zeros(n, np.int32),
            "mask": np.zeros(n, bool),
            "tgt": np.zeros(m, np.float32),
            "image": np.zeros((h, w, 3), np.uint8),
            "label": 1,
        }

    data = [one(*rng.integers(1, 50, 4)) for _ in range(50)]
    layout = sb.Layout.infer(data)
    assert str(layout) == (
        "image: 'uint8[image_0 image_1 3]', label: 'int32[]', mask: 'bool[mask]', src: 'int32[mask]', tgt: 'float32[tgt]'"
    )
    assert sb.Layout.infer(grain.MapDataset.source(data)) == layout
    assert sb.Layout.infer(grain.MapDataset.source(data).to_iter_dataset()) == layout


def test_infer_gives_different_axes_different_names():
    data = [{"a_b": np.zeros(n), "a": {"b": np.zeros(m)}} for n, m in [(1, 2), (3, 3)]]
    assert sb.Layout.infer(data).axes == ("a_b", "a_b_2")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "cannot infer a layout from 0 samples: give at least 2"),
        ([{"x": np.zeros(2)}] * 3, "no axis varies"),
        ([{"x": np.zeros(2)}, {"y": np.zeros(2)}], r"sample 1: has the features \[y\], but sample 0 has \[x\]"),
        (
            [{"x": np.zeros(2)}, {"x": np.zeros((2, 1))}],
            r"sample 1, feature 'x': is float64\[2, 1\], but float64 of rank 1",
        ),
        ([{"x": np.zeros(2)}, {"x": np.zeros(3, int)}], r"sample 1, feature 'x': is int64\[3\], but float64 of rank 1"),
        ([{"x": np.zeros(2)}, {"x": [1]}], "sample 1, feature 'x': is a Python list"),
    ],
)
def test_infer_refuses_samples_that_have_no_layout(data, message):
    with pytest.raises(sb.LayoutError, match=message):
        sb.Layout.infer(data)
