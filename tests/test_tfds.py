"""Layouts from TFDS features, and TFDS samples as arrays."""

import subprocess
import sys

import grain
import numpy as np
import pytest
import tensorflow_datasets as tfds

import shapebucket as sb
from shapebucket.cli import main

F = tfds.features
WITHOUT_TENSORFLOW = """
import importlib.machinery as machinery
find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = classmethod(
    lambda _, name, *rest: None if name.partition(".")[0] == "tensorflow" else find(name, *rest)
)
"""


def layout_of(features: dict, **options) -> sb.Layout:
    return sb.Layout.from_tfds(F.FeaturesDict(features), **options)


def written(layout: sb.Layout) -> dict[str, str]:
    return {feature.name: feature.notation for feature in layout.features}


def test_sizes_that_are_none_become_named_axes():
    layout = layout_of(
        {
            "tokens": F.Tensor(shape=(None,), dtype=np.int32),
            "image": F.Image(shape=(None, None, 3)),
            "scan": F.Image(shape=(None, 64, 1)),
            "grid": F.Tensor(shape=(None, 4, None), dtype=np.float32, encoding="zlib"),
            "nested": {"a b": {"c": F.Tensor(shape=(None, 3), dtype=np.float32)}},
            "label": F.ClassLabel(num_classes=3),
            "weight": F.Scalar(np.float32),
            "flag": np.bool_,
        }
    )
    assert written(layout) == {
        "flag": "bool[]",
        "grid": "float32[grid_0 4 grid_2]",
        "image": "uint8[image_h image_w 3]",
        "label": "int64[]",
        "nested/a b/c": "float32[nested_a_b_c 3]",
        "scan": "uint8[scan 64 1]",
        "tokens": "int32[tokens]",
        "weight": "float32[]",
    }


def test_features_of_one_sequence_share_its_axis_and_two_sequences_do_not():
    boxes = F.Sequence(
        {"bbox": F.BBoxFeature(), "label": F.ClassLabel(num_classes=3), "crop": F.Image(shape=(8, 8, 1))}
    )
    layout = layout_of({"objects": boxes, "ids": F.Sequence(np.int32), "corners": F.Sequence(np.float32, length=4)})
    assert written(layout) == {
        "corners": "float32[4]",
        "ids": "int32[ids]",
        "objects/bbox": "float32[objects 4]",
        "objects/crop": "uint8[objects 8 8 1]",
        "objects/label": "int64[objects]",
    }


def test_text_has_an_axis_of_bytes():
    assert written(layout_of({"pair": F.Translation(["de", "en"]), "id": F.Scalar(np.str_)})) == {
        "id": "uint8[id]",
        "pair/de": "uint8[pair_de]",
        "pair/en": "uint8[pair_en]",
    }


def test_axes_of_features_whose_paths_read_alike_have_different_names():
    layout = layout_of({"a": {"b": F.Sequence(np.int32)}, "a_b": F.Sequence(np.int32), "a/b": F.Text()})
    assert layout.axes == ("a_b", "a_b_2", "a_b_3")
    assert len({feature.axes for feature in layout.features}) == 3


def test_features_are_chosen_by_name_and_by_what_they_are_part_of():
    features = {"objects": F.Sequence({"bbox": F.BBoxFeature(), "name": F.Text()}), "text": F.Text(), "id": F.Text()}
    assert list(written(layout_of(features, only="text"))) == ["text"]
    assert list(written(layout_of(features, only=["objects", "id"], without="objects/name"))) == ["id", "objects/bbox"]
    assert list(written(layout_of(features, without=["objects"]))) == ["id", "text"]
    padded = layout_of(features, only="objects", without="objects/name", pad_values={"objects": {"bbox": -1}})
    assert padded.features[0].pad_value == -1


@pytest.mark.parametrize(
    ("feature", "reason"),
    [
        (F.Sequence(F.Text()), "is a list of texts, each with a length of its own"),
        (F.Tensor(shape=(2,), dtype=np.str_), "is a list of texts, each with a length of its own"),
        (F.Sequence(F.Sequence(np.int32)), "is a sequence of sequences, which may be ragged"),
        (F.Sequence({"a": F.Sequence(np.int32, length=2)}), "is a sequence of sequences, which may be ragged"),
        (
            F.Sequence(F.Tensor(shape=(None,), dtype=np.int32)),
            "is a sequence of arrays that vary in size, which is ragged",
        ),
        (F.Sequence(F.Image()), "is a sequence of arrays that vary in size, which is ragged"),
        (F.Sequence(F.Image(), length=2), "is a sequence of arrays that vary in size, which is ragged"),
        (F.Dataset({"step": np.int32}), "is a data set of its own in each sample"),
        (F.Tensor(shape=(), dtype=np.int32, optional=True), "is optional, and may be None"),
    ],
)
def test_features_that_no_array_holds_are_refused_with_the_reason(feature, reason):
    name = "bad/a" if isinstance(feature, F.Sequence) and isinstance(feature.feature, F.FeaturesDict) else "bad"
    name = "bad" if isinstance(feature, F.Dataset) else name
    features = {"good": F.Text(), "bad": feature}
    with pytest.raises(sb.LayoutError) as caught:
        layout_of(features)
    assert str(caught.value).startswith(
        f"no array holds these features as they are: '{name}' {reason}. Leave them out with "
    )
    assert f"without=['{name}']" in str(caught.value)
    assert written(layout_of(features, without=[name])) == {"good": "uint8[good]"}


def test_every_refused_feature_is_in_one_message():
    features = {
        "words": F.Sequence(F.Text()),
        "tree": F.Sequence(F.Sequence(np.int32)),
        "id": F.Text(),
        "text": F.Text(),
    }
    with pytest.raises(sb.LayoutError, match=r"'tree' is a .*; 'words' is a .*without=\['id', 'tree', 'words'\]"):
        layout_of(features, without="id")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"without": "nothing"}, r"without names \['nothing'\], but the data set has the features \['label', 'text'\]"),
        ({"only": ["text", "tex"]}, r"only names \['tex'\], but the data set has"),
        ({"without": ["label", "text"]}, r"no feature is left of \['label', 'text'\]"),
        ({"only": ["label"]}, "no axis varies: .* If all samples have one shape, no buckets are needed"),
        ({"pad_values": {"label": 0.5}}, "feature 'label': the pad value 0.5 does not fit its dtype int64"),
    ],
)
def test_choices_that_cannot_be_are_refused(options, message):
    with pytest.raises(sb.LayoutError, match=message):
        layout_of({"text": F.Text(), "label": np.int64}, **options)


def test_what_is_no_dict_of_features_is_refused():
    with pytest.raises(sb.LayoutError, match="from_tfds takes .* builder.info.features, but got Text"):
        sb.Layout.from_tfds(F.Text())


class Mixed(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """What the adapter has to turn into arrays, and what it cannot."""

    name = "mixed"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=F.FeaturesDict(
                {
                    "text": F.Text(),
                    "ids": F.Sequence(np.int16),
                    "points": F.Sequence({"at": F.Tensor(shape=(2,), dtype=np.float32), "kind": np.int64}),
                    "frames": F.Tensor(shape=(None, 3), dtype=np.float32),
                    "label": F.ClassLabel(num_classes=5),
                    "weight": np.float32,
                    "flag": np.bool_,
                    "words": F.Sequence(F.Text()),
                }
            ),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number in range(40):
            size = number % 4
            yield (
                number,
                {
                    "text": "ä" * size,
                    "ids": list(range(size)),
                    "points": {"at": [[number, 1.0]] * size, "kind": [number] * size},
                    "frames": np.full((size, 3), number, np.float32),
                    "label": number % 5,
                    "weight": 0.5,
                    "flag": size > 1,
                    "words": ["a", "b"][:size],
                },
            )


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    tfds.disable_progress_bar()
    builder = Mixed(data_dir=tmp_path_factory.mktemp("tfds"), file_format="array_record")
    builder.download_and_prepare()
    return builder


def test_samples_become_arrays_of_the_declared_dtypes(mixed):
    source = sb.TfdsSource(mixed.as_data_source("train"), sb.Layout.from_tfds(mixed.info.features, without="words"))
    by_number = sorted((source[i] for i in range(40)), key=lambda sample: (len(sample["text"]), int(sample["label"])))
    empty, full = by_number[0], by_number[-1]
    assert sorted(full) == ["flag", "frames", "ids", "label", "points", "text", "weight"]
    assert full["text"].tobytes().decode() == "äää"
    assert full["ids"].tolist() == [0, 1, 2]
    assert full["points"]["at"].shape == (3, 2)
    for sample in (empty, full, source.__getitems__([3])[0]):
        for feature in source.layout.features:
            leaf = sample
            for key in feature.path:
                leaf = leaf[key]
            assert (leaf.dtype, leaf.ndim) == (feature.dtype, len(feature.dims)), feature.name
    assert empty["points"]["at"].shape == (0, 2)
    assert sb.Layout.infer(source).has_dtypes


def test_a_data_set_goes_through_measure_schedule_and_stream(mixed):
    layout = sb.Layout.from_tfds(mixed.info.features, without="words")
    source = sb.TfdsSource(mixed.as_data_source("train"), layout)
    lengths = sb.measure(source, layout, progress=False)
    assert lengths.values[:, layout.axes.index("text")].tolist() == [len(source[i]["text"]) for i in range(40)]
    plan = sb.plan_buckets(lengths, layout, max_buckets=3, batch_size=4)
    ds = grain.MapDataset.source(source)
    for loader in (
        sb.BucketedMapDataset(ds, plan, lengths, seed=0),
        sb.BucketedIterDataset(ds.to_iter_dataset(), plan),
    ):
        found = [sample for batch in loader for sample in sb.unpad(batch, batch, layout)]
        assert sorted(sample["text"].tobytes() for sample in found) == sorted(
            source[i]["text"].tobytes() for i in range(40)
        )


def test_a_refused_data_set_is_a_message_with_what_to_do(mixed, capsys):
    with pytest.raises(sb.LayoutError, match=r"'words' is a list of texts.*without=\['words'\]"):
        sb.TfdsSource(mixed.as_data_source("train"))
    arguments = ["measure", "tfds:mixed/train", "--data-dir", str(mixed.data_path.parent.parent)]
    assert main(arguments) == 2
    assert "--layout" in capsys.readouterr().err
    assert main([*arguments, "--layout", '{"text": "uint8[s]"}', "--json"]) == 0
    assert '"axes": {"s": {"min": 0, "median": 2' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "TfdsSource takes a TFDS data source, .*; got list"),
        ({"train": []}, "one split of it: it is a dict of splits; got dict"),
    ],
)
def test_what_is_no_data_source_is_refused(source, message):
    with pytest.raises(sb.LengthsError, match=message):
        sb.TfdsSource(source)


@pytest.mark.parametrize(
    ("notation", "leaf", "message"),
    [
        ("int32[s]", [[1], [1, 2]], "is a list that makes no array of numbers"),
        ("int32[s]", [b"one", b"two"], r".* \(ragged, or of text\): leave the feature out of the layout"),
        ("int32[s]", b"text", r"is text, but the layout says 'int32\[s\]': make tokens of it with .map\(\)"),
        ("int8[s]", [1, 300], "holds numbers of int64 that int8 cannot hold: write another dtype"),
        ("int8[]", 300, "holds numbers of int64 that int8 cannot hold"),
        ("int32[s]", np.array([2**40]), "holds numbers of int64 that int32 cannot hold"),
        ("int32[]", 0.5, "holds numbers of float64 that int32 cannot hold"),
    ],
)
def test_leaves_that_do_not_fit_are_refused_by_name(notation, leaf, message):
    layout = sb.Layout({"a": {"b": notation}, "x": "s"})
    with pytest.raises(sb.LayoutError, match=f"feature 'a/b': {message}"):
        sb.as_arrays({"a": {"b": leaf}, "x": np.zeros(1)}, layout)


def test_a_sample_that_lacks_a_feature_is_refused_by_its_index(mixed):
    source = sb.TfdsSource(mixed.as_data_source("train"), sb.Layout({"txt": "uint8[s]"}))
    with pytest.raises(
        sb.LayoutError, match=r"sample 3, feature 'txt': is not in the sample, which is a dict with \['flag'"
    ):
        source[3]
    with pytest.raises(sb.LayoutError, match="sample 5, "):
        source.__getitems__([5])


def test_numbers_may_be_rounded_to_floats_and_keep_what_they_are_without_a_dtype():
    layout = sb.Layout({"x": "float32[]", "y": "s", "z": "float16[s]", "a": "int32[s]", "b": "int32[]"})
    arrays = sb.as_arrays({"x": 0.1, "y": [np.int16(3)], "z": [], "a": np.arange(3), "b": np.int64(7), "c": 0}, layout)
    assert arrays.keys() == {"x", "y", "z", "a", "b"}
    assert (arrays["a"].dtype, arrays["b"].dtype) == (np.int32, np.int32)
    assert arrays["x"] == np.float32(0.1)
    assert arrays["y"].dtype == np.int16
    assert (arrays["z"].dtype, arrays["z"].shape) == (np.float16, (0,))


def test_tensorflow_is_not_needed(mixed):
    program = f"""
{WITHOUT_TENSORFLOW}
import tensorflow_datasets as tfds
import shapebucket as sb
builder = tfds.builder_from_directory({str(mixed.data_path)!r})
layout = sb.Layout.from_tfds(builder.info.features, without="words")
source = sb.TfdsSource(builder.as_data_source("train"), layout)
plan = sb.plan_buckets(sb.measure(source, layout, progress=False), layout, max_buckets=2, batch_size=4)
print(len(plan), sb.pad([source[0], source[1]], plan.buckets[-1], plan)["text"].shape[0])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.stdout.split()[-2:] == ["2", "4"], done.stderr
