"""Streams of tf.data, against TensorFlow itself."""

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import grain
import numpy as np
import pytest
import tensorflow_datasets as tfds

import shapebucket as sb
from shapebucket.cli import main

tf = pytest.importorskip("tensorflow")
F = tfds.features
PAGE = (Path(__file__).parent.parent / "docs" / "migrating_from_tf_data.md").read_text()
TOKENS = sb.Layout({"tokens": "int32[s]"})
SIGNATURE = {"tokens": tf.TensorSpec([None], tf.int32)}


def data_of(lengths) -> "tf.data.Dataset":
    """Samples whose first token is their number; a sample of length 0 has none."""
    samples = [np.r_[number, np.arange(1, length)].astype(np.int32)[:length] for number, length in enumerate(lengths)]
    return tf.data.Dataset.from_generator(lambda: ({"tokens": s} for s in samples), output_signature=SIGNATURE)


def theirs(dataset, boundaries, batch_sizes, **options) -> list[np.ndarray]:
    bucketed = dataset.bucket_by_sequence_length(
        lambda sample: tf.shape(sample["tokens"])[0], boundaries, batch_sizes, **options
    )
    return [batch["tokens"] for batch in bucketed.as_numpy_iterator()]


def random_lengths(count: int, seed: int = 0, longest: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, longest + 1, count)


@pytest.mark.parametrize("seed", range(3))
def test_batches_are_those_of_bucket_by_sequence_length(seed):
    """All full batches, one by one and in order; and what is left over at the end is the same samples."""
    bounds, rows = [5, 11, 24, 41], [16, 8, 6, 3, 2]
    dataset = data_of(random_lengths(500, seed))
    expected = theirs(dataset, bounds, rows, pad_to_bucket_boundary=True)
    loader = sb.from_tf_data(dataset, sb.plan_from_tf_boundaries(bounds, rows, TOKENS))
    batches = list(loader)
    full = [batch for batch in expected if len(batch) == rows[np.searchsorted(bounds, batch.shape[1], side="right")]]
    assert len(full) > 40
    for one, other in zip(full, batches, strict=False):
        np.testing.assert_array_equal(one, other["tokens"])
        assert other["example_mask"].all()
        np.testing.assert_array_equal(other["s_mask"][:, 1:], one[:, 1:] > 0)
    left = sorted(row[0] for batch in expected[len(full) :] for row in batch)
    assert left == sorted(row[0] for each in batches[len(full) :] for row in each["tokens"][each["example_mask"]])
    assert len(left) > 0
    assert loader.report().seen == 500


def test_batches_are_the_same_to_the_end_where_nothing_is_left_over():
    bounds, rows = [5, 9], [4, 3, 2]
    lengths = np.random.default_rng(0).permutation([1, 2, 3, 4] * 6 + [5, 6, 7, 8] * 6)
    expected = theirs(data_of(lengths), bounds, rows, pad_to_bucket_boundary=True)
    found = list(sb.from_tf_data(data_of(lengths), sb.plan_from_tf_boundaries(bounds, rows, TOKENS)))
    assert len(expected) == len(found) == 6 + 8
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other["tokens"])


def test_the_bucket_without_a_bound_gets_the_size_that_is_said():
    """tf.data pads it to the longest of each batch, so the groups are the same, and ours are longer by padding."""
    bounds, rows = [9, 21], [5, 4, 3]
    dataset = data_of(random_lengths(300))
    expected = theirs(dataset, bounds, rows, drop_remainder=True)
    found = list(sb.from_tf_data(dataset, sb.plan_from_tf_boundaries(bounds, rows, TOKENS, longest=40)))
    assert {batch["tokens"].shape for batch in found} == {(5, 8), (4, 20), (3, 40)}
    for one, other in zip(expected, found, strict=False):
        np.testing.assert_array_equal(one, other["tokens"][:, : one.shape[1]])
        assert not other["tokens"][:, one.shape[1] :].any()


def test_plans_go_to_tf_boundaries_and_back():
    lengths = random_lengths(300)
    plan = sb.plan_buckets(lengths, TOKENS, max_buckets=4, token_budget=100)
    bounds = sb.to_tf_boundaries(plan)
    back = sb.plan_from_tf_boundaries(bounds, plan.batch_sizes.tolist(), TOKENS, longest=int(plan.sizes.max()))
    assert back.fingerprint == plan.fingerprint
    expected = theirs(data_of(lengths), bounds, plan.batch_sizes.tolist(), drop_remainder=True)
    for one, other in zip(expected, sb.from_tf_data(data_of(lengths), plan), strict=False):
        assert one[:, 0].tolist() == other["tokens"][:, 0].tolist()


def test_a_sample_beyond_the_last_bound_is_overlong():
    plan = sb.plan_from_tf_boundaries([5, 9], [2, 2, 2], TOKENS)
    with pytest.raises(sb.OverlongError, match="sample 1 with lengths {'s': 9} fits no bucket"):
        list(sb.from_tf_data(data_of([8, 9]), plan))
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.InternalError), match="elements must have length"):
        theirs(data_of([8, 9]), [5, 9], [2, 2, 2], pad_to_bucket_boundary=True)
    loader = sb.from_tf_data(data_of([8, 9]), plan, overlong="drop")
    assert len(list(loader)) == 1
    assert loader.report().overlong_dropped == 1


def test_the_code_of_the_migration_page_runs_as_printed(capsys):
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, "migrating_from_tf_data.md", "exec"), names)
    before, after = capsys.readouterr().out.splitlines()[-1].split(" → ")
    assert 0 < float(after) < float(before)


def test_text_and_nested_features_become_arrays():
    features = {
        "a": {"text": tf.constant(["ä", "bcd", ""])},
        "label": tf.constant([1, 2, 3], tf.int64),
        "other": [1, 2, 3],
    }
    layout = sb.Layout({"a": {"text": "uint8[s]"}, "label": "int64[]"})
    samples = sb.TfDataIterDataset(tf.data.Dataset.from_tensor_slices(features), layout)
    assert [sample["a"]["text"].tobytes().decode() for sample in samples] == ["ä", "bcd", ""]
    assert sb.measure(samples, layout, progress=False).values[:, 0].tolist() == [2, 3, 0]
    batch = next(iter(sb.from_tf_data(samples.dataset, sb.BucketPlan(layout, [sb.Bucket((("s", 4),), 3)]))))
    assert batch["label"].tolist() == [1, 2, 3]
    assert batch["a"]["text"].tolist() == [[195, 164, 0, 0], [98, 99, 100, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_state_goes_on_exactly_after_every_batch(shuffled):
    dataset = data_of(random_lengths(120))
    if shuffled:
        dataset = dataset.shuffle(30, seed=3, reshuffle_each_iteration=False)
    plan = sb.plan_from_tf_boundaries([9, 21, 41], [8, 4, 2, 1], TOKENS)
    loader = iter(sb.from_tf_data(dataset, plan, deterministic=True, max_wait=50))
    states, batches = [loader.get_state()], []
    for batch in loader:
        batches.append(batch["tokens"])
        states.append(json.loads(json.dumps(loader.get_state())))
    assert len(batches) > 20
    for done in range(0, len(states), 3):
        other = iter(sb.from_tf_data(dataset, plan, deterministic=True, max_wait=50))
        other.set_state(states[done])
        rest = [batch["tokens"] for batch in other]
        assert len(rest) == len(batches) - done
        for one, again in zip(batches[done:], rest, strict=True):
            np.testing.assert_array_equal(one, again)


def test_samples_are_the_same_whether_they_are_read_at_once_or_not():
    """Fixed, varying and inner sizes; and two sizes that vary, which are read one by one."""

    def make(number):
        size = number % 5
        flat = {
            "text": tf.strings.as_string(number),
            "n": number,
            "x": tf.ones([size, 2], tf.float32),
            "f": tf.ones([3]),
        }
        return {"flat": flat, "image": tf.fill([size, size + 1], number)}

    dataset = tf.data.Dataset.range(100).map(make)
    flat = {"text": "uint8[c]", "n": "int64[]", "x": "float32[s 2]", "f": "float32[3]"}
    at_once = list(sb.TfDataIterDataset(dataset, sb.Layout({"flat": flat})))
    one_by_one = list(sb.TfDataIterDataset(dataset, sb.Layout({"flat": flat, "image": "int64[h w]"})))
    assert len(at_once) == len(one_by_one) == 100
    for number, (one, other) in enumerate(zip(at_once, one_by_one, strict=True)):
        np.testing.assert_equal(one["flat"], other["flat"])
        assert one["flat"]["text"].tobytes().decode() == str(number)
        assert one["flat"]["x"].shape == (number % 5, 2)
        assert other["image"].shape == (number % 5, number % 5 + 1)
        assert one["flat"]["x"].base is None  # a sample that waits keeps no others in memory


def test_it_is_repeated_as_grains_data_sets_are():
    plan = sb.plan_from_tf_boundaries([41], [10, 1], TOKENS)
    once = sb.from_tf_data(data_of(random_lengths(40)), plan)
    twice = list(grain.experimental.RepeatIterDataset(once, num_epochs=2))
    assert len(twice) == 8
    np.testing.assert_array_equal(twice[0]["tokens"], twice[4]["tokens"])


def state_after(dataset, count: int, **options) -> tuple:
    samples = sb.TfDataIterDataset(dataset, TOKENS, **options)
    iterator = iter(samples)
    for _ in range(count):
        next(iterator)
    return samples, iterator.get_state()


def test_a_state_is_refused_where_the_order_is_not_said_to_be_the_same():
    samples, state = state_after(data_of([3, 4, 5]), 2)
    with pytest.raises(
        sb.StateError, match="restored by reading the 2 samples before again.*say deterministic=True if it is"
    ):
        iter(samples).set_state(state)
    iter(samples).set_state(iter(samples).get_state())  # the start is always known
    plan = sb.plan_from_tf_boundaries([9], [2, 2], TOKENS)
    loader = iter(sb.from_tf_data(data_of([3, 4, 5]), plan))
    next(loader)
    with pytest.raises(
        sb.StateError, match="the data set before the loader does not take its part .* deterministic=True"
    ):
        iter(sb.from_tf_data(data_of([3, 4, 5]), plan)).set_state(loader.get_state())


def test_a_state_is_refused_where_the_order_turns_out_to_be_another():
    shuffled = data_of(random_lengths(200)).shuffle(200, seed=1)  # anew each time
    samples, state = state_after(shuffled, 50, deterministic=True)
    with pytest.raises(
        sb.StateError, match="sample 49 of the tf.data.Dataset is not the one .* reshuffle_each_iteration=False"
    ):
        iter(samples).set_state(state)


def test_states_of_other_data_and_what_is_no_state_are_refused():
    _, state = state_after(data_of([3] * 9), 8, deterministic=True)
    shorter = iter(sb.TfDataIterDataset(data_of([3] * 5), TOKENS, deterministic=True))
    with pytest.raises(sb.StateError, match="saved after 8 samples, but the tf.data.Dataset has fewer"):
        shorter.set_state(state)
    with pytest.raises(sb.StateError, match="has fewer"):
        next(shorter)  # it is at no known place
    for wrong in ({"next": 3}, 7):
        with pytest.raises(sb.StateError, match="this is no state of a TfDataIterDataset: "):
            shorter.set_state(wrong)


def test_an_order_that_tf_data_may_change_cannot_be_said_to_be_the_same():
    options = tf.data.Options()
    options.deterministic = False
    with pytest.raises(sb.ScheduleError, match=r"options\(\).deterministic is False: tf.data may change the order"):
        sb.TfDataIterDataset(data_of([1]).with_options(options), TOKENS, deterministic=True)


def spec_of(**features):
    return tf.data.Dataset.from_generator(list, output_signature=features)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (lambda: data_of([1]).batch(2), r"feature 'tokens': has shape .*: leave batch\(\) out"),
        (lambda: tf.data.Dataset.range(3), "must be dicts, but are TensorSpec: make dicts of them"),
        (
            lambda: data_of([1]).map(lambda x: (x["tokens"], 1)),
            r"must be dicts, but are tuple.*lambda x, y: {'x': x, 'y': y}",
        ),
        (
            lambda: spec_of(ids=tf.TensorSpec([None], tf.int32)),
            r"'tokens': the elements .* do not have it; they have \['ids'\]",
        ),
        (
            lambda: spec_of(tokens=tf.TensorSpec([None], tf.float32)),
            r"is of float32, but the layout says 'int32\[s\]': cast it",
        ),
        (lambda: spec_of(tokens=tf.TensorSpec([], tf.int32)), r"has shape \(\), but the layout says 'int32\[s\]'$"),
        (lambda: spec_of(tokens=tf.TensorSpec([], tf.string)), "is of strings, .* make tokens of others"),
        (
            lambda: spec_of(tokens=tf.RaggedTensorSpec([None, None], tf.int32)),
            r"is of RaggedTensorSpec.*x.to_tensor\(\)",
        ),
        (
            lambda: spec_of(tokens=tf.SparseTensorSpec([None], tf.int32)),
            r"is of SparseTensorSpec.*tf.sparse.to_dense\(x\)",
        ),
    ],
)
def test_elements_that_are_no_samples_of_the_layout_are_refused_before_any_is_read(dataset, message):
    with pytest.raises(sb.LayoutError, match=message):
        sb.TfDataIterDataset(dataset(), TOKENS)


def test_what_is_no_data_set_is_refused():
    plan = sb.plan_from_tf_boundaries([9], [2, 2], TOKENS)
    with pytest.raises(sb.ScheduleError, match="takes a tf.data.Dataset of samples, but got list"):
        sb.from_tf_data([], plan)
    with pytest.raises(sb.ScheduleError, match="a loader takes the BucketPlan"):
        sb.from_tf_data(data_of([1]), TOKENS)
    with pytest.raises(sb.LayoutError, match="a Layout comes after the tf.data.Dataset, but got dict"):
        sb.TfDataIterDataset(data_of([1]), {"tokens": "s"})


def test_whole_numbers_of_more_bits_are_converted_if_they_fit():
    dataset = spec_of(tokens=tf.TensorSpec([None], tf.int64)).concatenate(
        tf.data.Dataset.from_tensors({"tokens": tf.constant([1, 2], tf.int64)})
    )
    assert next(iter(sb.TfDataIterDataset(dataset, TOKENS)))["tokens"].dtype == np.int32
    with pytest.raises(sb.LayoutError, match="feature 'tokens': holds numbers of int64 that int32 cannot hold"):
        next(iter(sb.TfDataIterDataset(dataset.map(lambda x: {"tokens": x["tokens"] + 2**40}), TOKENS)))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_failure_does_not_pass_for_the_end_of_the_data(kind, monkeypatch):
    iterator = iter(sb.TfDataIterDataset(data_of([1, 2, 3]), TOKENS, deterministic=True))
    first = next(iterator)
    state = iterator.get_state()
    from shapebucket import tf_data

    with monkeypatch.context() as patch:
        patch.setattr(tf_data, "as_array", lambda *_: (_ for _ in ()).throw(kind("stop")))
        with pytest.raises(kind):
            next(iterator)
    again = ValueError if kind is ValueError else sb.ScheduleError
    with pytest.raises(again, match="stop|KeyboardInterrupt interrupted the reading of sample 1"):
        next(iterator)
    assert iterator.get_state() == state
    iterator.set_state(state)
    assert len(list(iterator)) == 2
    assert len(first["tokens"]) == 1


def test_it_does_not_go_to_worker_processes():
    with pytest.raises(sb.ScheduleError, match="cannot go to worker processes: leave mp_prefetch out"):
        pickle.dumps(sb.TfDataIterDataset(data_of([1]), TOKENS))


def test_without_tensorflow_the_error_names_the_extra():
    program = """
import sys
sys.modules["tensorflow"] = None
import shapebucket as sb
try:
    sb.TfDataIterDataset(None, None)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tensorflow is not installed; get it with: pip install 'shapebucket[tf]'")


MOCKED = {
    "wmt14_translate/de-en": ({}, {"de": "uint8[de]", "en": "uint8[en]"}),
    "ted_hrlr_translate/az_to_en": ({}, {"az": "uint8[az]", "en": "uint8[en]"}),
    "librispeech": (
        {"without": "id"},
        {"chapter_id": "int64[]", "speaker_id": "int64[]", "speech": "int16[speech]", "text": "uint8[text]"},
    ),
    "coco/2017": (
        {"only": ["image", "objects/bbox", "objects/label"]},
        {"image": "uint8[image_h image_w 3]", "objects/bbox": "float32[objects 4]", "objects/label": "int64[objects]"},
    ),
}


@pytest.mark.parametrize("name", MOCKED)
def test_well_known_data_sets_get_a_layout_and_both_readers_give_its_arrays(name):
    """TFDS makes samples up from the specs; their text is not UTF-8, and their lengths are of no meaning."""
    options, expected = MOCKED[name]
    with tfds.testing.mock_data(num_examples=7):
        builder = tfds.builder(name)
        layout = sb.Layout.from_tfds(builder.info.features, **options)
        assert {feature.name: feature.notation for feature in layout.features} == expected
        if name.startswith("coco"):  # made up, the features of one sequence have lengths of their own
            layout = sb.Layout.from_tfds(builder.info.features, only=["image", "objects/bbox"])
        source = sb.TfdsSource(tfds.data_source(name, split="train"), layout)
        stream = sb.TfDataIterDataset(tfds.load(name, split="train"), layout)
        for samples in (list(source), list(stream)):
            assert len(samples) == 7
            longest = np.max([layout.lengths(sample) for sample in samples], axis=0).tolist()
            plan = sb.BucketPlan(layout, [sb.Bucket(tuple(zip(layout.axes, longest, strict=True)), 7)])
            batch = sb.pad(samples, plan.buckets[0], plan)
            for sample, back in zip(samples, sb.unpad(batch, batch, layout), strict=True):
                assert layout.lengths(back) == layout.lengths(sample)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("squad", r"'answers/text' is a list of texts, .* without=\['answers/text'\]"),
        ("ted_multi_translate", r"without=\['translations/language', 'translations/translation'\]"),
        ("mnist", "no axis varies"),
    ],
)
def test_well_known_data_sets_that_do_not_fit_say_why(name, message):
    with tfds.testing.mock_data(), pytest.raises(sb.LayoutError, match=message):
        sb.Layout.from_tfds(tfds.builder(name).info.features)


def test_sound_and_film_have_axes():
    features = {
        "sound": F.Audio(),
        "stereo": F.Audio(shape=(None, 2)),
        "film": F.Video((None, None, None, 3)),
        "clip": F.Video((None, 8, 8, 3)),
    }
    layout = sb.Layout.from_tfds(F.FeaturesDict(features))
    assert {feature.name: feature.notation for feature in layout.features} == {
        "clip": "uint8[clip 8 8 3]",
        "film": "uint8[film_t film_h film_w 3]",
        "sound": "int64[sound]",
        "stereo": "int64[stereo 2]",
    }
    with pytest.raises(sb.LayoutError, match="'films' is a sequence of sequences"):
        sb.Layout.from_tfds(F.FeaturesDict({"films": F.Sequence(F.Video((None, 8, 8, 3)))}))


class Lines(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """What tf.data gives of a prepared data set."""

    name = "lines"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "text": F.Text(),
            "ids": F.Sequence({"a": np.int32, "b": np.float32}),
            "label": np.int64,
            "film": F.Video((None, 2, None, 3)),
        }
        return tfds.core.DatasetInfo(builder=self, features=F.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number in range(30):
            size = number % 6
            ids = {"a": list(range(size)), "b": [0.5] * size}
            yield (
                number,
                {
                    "text": "ä" * size,
                    "ids": ids,
                    "label": number,
                    "film": np.full((size + 1, 2, size + 3, 3), number, np.uint8),
                },
            )


def test_a_prepared_data_set_gives_the_same_by_tf_data_and_by_index(tmp_path):
    """tfrecord through `tfds.load`, array_record through the data source."""
    tfds.disable_progress_bar()
    found = []
    for file_format in ("tfrecord", "array_record"):
        builder = Lines(data_dir=tmp_path / file_format, file_format=file_format)
        builder.download_and_prepare()
        layout = sb.Layout.from_tfds(builder.info.features)
        if file_format == "tfrecord":
            samples = sb.TfDataIterDataset(builder.as_dataset(split="train"), layout)
        else:
            samples = sb.TfdsSource(builder.as_data_source("train"), layout)
        lengths = sb.measure(samples, layout, progress=False)
        plan = sb.plan_buckets(lengths, layout, max_buckets=3, batch_size=4)
        ds = samples if file_format == "tfrecord" else grain.MapDataset.source(samples).to_iter_dataset()
        loader = sb.BucketedIterDataset(ds, plan)
        back = [sample for batch in loader for sample in sb.unpad(batch, batch, layout)]
        found.append(sorted(back, key=lambda sample: int(sample["label"])))
    assert len(found[0]) == 30
    for one, other in zip(*found, strict=True):
        np.testing.assert_equal(one, other)


def test_a_data_set_of_tfrecord_says_how_to_read_it(tmp_path, capsys):
    tfds.disable_progress_bar()
    Lines(data_dir=tmp_path, file_format="tfrecord").download_and_prepare()
    assert main(["measure", "tfds:lines/train", "--data-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "is in a format without random access: prepare it with file_format='array_record'" in error
    assert "from_tf_data(tfds.load('lines', split='train'), plan)" in error
