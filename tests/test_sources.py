import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter

import shapebucket as sb
from shapebucket.cli import main
from shapebucket.sources import open_samples

PAIRS = [("a" * (number % 7), list(range(number % 11)), number) for number in range(60)]


class Spellings(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A data set of text, lists and numbers."""

    name = "spellings"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"text": tfds.features.Text(), "ids": tfds.features.Sequence(np.int32), "label": np.int64}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number, (text, ids, label) in enumerate(PAIRS):
            yield number, {"text": text, "ids": ids, "label": label}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tfds")
    tfds.disable_progress_bar()
    Spellings(data_dir=directory, file_format="array_record").download_and_prepare()
    return directory


@pytest.fixture
def records(tmp_path):
    for part in range(2):
        writer = ArrayRecordWriter(str(tmp_path / f"data-{part}.array_record"), "group_size:1")
        for number in range(40):
            writer.write(b"x" * (number + part))
        writer.close()
    return tmp_path


def test_a_tfds_data_set_gives_dicts_of_arrays(data_dir):
    samples = open_samples("tfds:spellings/train", data_dir=data_dir)
    assert len(samples) == 60
    for one in (samples[3], samples.__getitems__([3])[0]):
        assert one["text"].dtype == np.uint8
        assert one["ids"].dtype == np.int32
        assert len(one["ids"]) == int(one["label"]) % 11
    assert len(open_samples("tfds:spellings:1.0.0/train[:10]", data_dir=data_dir)) == 10


def test_a_tfds_data_set_goes_from_measure_to_plan_by_commands(data_dir, tmp_path, capsys):
    out = str(tmp_path / "lengths")
    assert main(["measure", "tfds:spellings/train", "--data-dir", str(data_dir), "--out", out]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("60 samples, ")
    assert printed.splitlines()[1].split() == ["axis", "min", "median", "p95", "p99", "max", "mean"]
    assert main(["plan", out, "--max-buckets", "3", "--token-budget", "64", "--out", str(tmp_path / "plan.json")]) == 0
    plan = sb.BucketPlan.load(tmp_path / "plan.json")
    assert plan.layout.axes == ("ids", "text")
    assert plan.layout.has_dtypes
    capsys.readouterr()
    straight = [
        "plan",
        "tfds:spellings/train",
        "--data-dir",
        str(data_dir),
        "--max-buckets",
        "3",
        "--token-budget",
        "64",
    ]
    assert main(straight) == 0
    assert capsys.readouterr().out.strip() == str(plan)


def test_a_function_gets_what_tfds_gives(data_dir, tmp_path, capsys, monkeypatch):
    (tmp_path / "letters.py").write_text("def of(sample):\n    return len(sample['text'].decode())\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    arguments = ["measure", "tfds:spellings/train", "--data-dir", str(data_dir), "--lengths", "letters:of", "--json"]
    assert main(arguments) == 0
    assert '"max": 6' in capsys.readouterr().out


def test_array_records_are_measured_by_a_function(records, capsys, monkeypatch):
    (records / "my_lengths.py").write_text("def of(record):\n    return {'bytes': len(record)}\n")
    monkeypatch.chdir(records)
    monkeypatch.setattr(sys, "path", sys.path[:])
    out = str(records / "lengths.npz")
    arguments = ["measure", str(records / "data-*.array_record"), "--lengths", "my_lengths:of", "--out", out, "--json"]
    assert main(arguments) == 0
    assert '"axes": {"bytes": {"min": 0, "median": 20,' in capsys.readouterr().out
    assert sb.LengthTable.load(out).values[:, 0].tolist() == [*range(40), *range(1, 41)]
    assert sb.LengthTable.load(out).axes == ("bytes",)


@pytest.mark.slow
def test_the_installed_command_measures_with_worker_processes(records):
    (records / "my_lengths.py").write_text("def of(record):\n    return len(record)\n")
    command = [sys.executable, "-m", "shapebucket", "measure", "data-0.array_record", "--lengths", "my_lengths:of"]
    done = subprocess.run(
        [*command, "--workers", "2", "--json"], cwd=records, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('{"samples": 40, "absent": 0, "axes": {"s": ')


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("tfds:spellings", "a TFDS data set is given as tfds:NAME/SPLIT, with a split, but got 'tfds:spellings'"),
        ("tfds:nowhere/train", "the TFDS data set 'nowhere' in .* is not there: Dataset nowhere not found"),
        ("tfds:mnist/train", "the TFDS data set 'mnist' in .* is not prepared: run builder.download_and_prepare"),
        (
            "tfds:spellings/dev",
            "cannot read the split 'dev' of the TFDS data set 'spellings' in .* by random access: ",
        ),
        ("nowhere.array_record-00000-of-00002", "there is no file 'nowhere.array_record-00000-of-00002'"),
        ("nowhere.array_record", "there is no file 'nowhere.array_record'"),
        ("broken.array_record", "cannot read 'broken.array_record': "),
    ],
)
def test_a_source_that_is_not_there_is_a_message(source, message, data_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.array_record").write_text("no record")
    with pytest.raises(sb.LengthsError, match=message):
        open_samples(source, data_dir=data_dir)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("json", "must be MODULE:FUNCTION, but got 'json'"),
        ("json:nothing", "cannot import 'json:nothing'"),
        ("no_such_module:of", "cannot import 'no_such_module:of': No module named 'no_such_module'"),
        ("json:__name__", "'json:__name__' is str, no function"),
    ],
)
def test_a_function_that_is_none_is_a_message(function, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["measure", "x.array_record", "--lengths", function])
    assert message in capsys.readouterr().err
