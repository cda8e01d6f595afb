"""Broken records in the middle of real files."""

import logging
import pickle
import re

import grain
import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter

import shapebucket as sb
from shapebucket.cli import main

BROKEN = 37  # record 17 of the second file
CONTENT = [np.random.default_rng(number).bytes(200 + number) for number in range(60)]


def write(path, records) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def flip_a_bit(path, content: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[raw.index(content)] ^= 1
    path.write_bytes(raw)


@pytest.fixture
def source(tmp_path):
    files = [tmp_path / f"part-{part}.array_record" for part in range(3)]
    for part, file in enumerate(files):
        write(file, CONTENT[20 * part : 20 * part + 20])
    flip_a_bit(files[1], CONTENT[BROKEN])
    return grain.sources.ArrayRecordDataSource(list(map(str, files)))


def test_the_error_names_file_and_record_and_the_others_are_read(source, tmp_path):
    records = sb.RecordSource(source)
    with pytest.raises(sb.RecordError) as caught:
        list(records)
    error = caught.value
    assert (error.sample, error.record, error.file) == (37, 17, str(tmp_path / "part-1.array_record"))
    assert re.fullmatch(
        r"record 17 of .*part-1.array_record \(sample 37\) cannot be read: RuntimeError: Corrupted .* Make the file anew, or leave "
        r"such records out with RecordSource\(source, on_error='skip'\) or TfdsSource\(…, on_error='skip'\), which count them",
        str(error),
    )
    assert pickle.loads(pickle.dumps(error)).record == 17
    assert [records[number] for number in range(60) if number != BROKEN] == CONTENT[:BROKEN] + CONTENT[BROKEN + 1 :]


def test_a_measurement_that_meets_it_says_which_it_is(source):
    with pytest.raises(sb.RecordError, match="record 17 of .*part-1.array_record"):
        sb.measure(sb.RecordSource(source), length_fn=len, progress=False)


def test_a_skipped_record_is_counted_and_nothing_else_is_lost(source, caplog):
    records = sb.RecordSource(source, on_error="skip")
    with caplog.at_level(logging.WARNING, "shapebucket"):
        lengths = sb.measure(records, sb.Layout({"x": "uint8[s]"}), length_fn=len, progress=False)
        records[BROKEN]
    assert records.skipped == [BROKEN]
    assert [each.getMessage().startswith("skipped record 17 of ") for each in caplog.records] == [True]  # once
    assert np.flatnonzero(~lengths.present).tolist() == [BROKEN]
    assert lengths.histogram.absent == 1
    plan = sb.plan_buckets(lengths, max_buckets=3, batch_size=4)
    ds = grain.MapDataset.source(records).map(lambda record: {"x": np.frombuffer(record, np.uint8)})
    schedule = sb.BucketedMapDataset(ds, plan, lengths, seed=0)
    stream = sb.BucketedIterDataset(ds.to_iter_dataset(allow_nones=True), plan)
    for batches in (schedule, stream):
        found = [sample["x"].tobytes() for batch in batches for sample in sb.unpad(batch, batch, plan.layout)]
        assert sorted(found) == sorted(CONTENT[:BROKEN] + CONTENT[BROKEN + 1 :])
        assert batches.report().seen == 59
        assert batches.report().absent == 1


def test_it_goes_to_worker_processes_and_keeps_what_it_is(source):
    records = sb.RecordSource(source, on_error="skip")
    assert records[BROKEN] is None
    other = pickle.loads(pickle.dumps(records))
    assert (other.on_error, other.skipped, len(other)) == ("skip", [], 60)
    assert other[BROKEN] is None


class Texts(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    name = "texts"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"text": tfds.features.Text(), "number": np.int64}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number in range(30):
            yield number, {"text": f"the text number {number:02d}", "number": number}


def test_a_tfds_data_set_names_and_skips_its_broken_record(tmp_path, capsys):
    tfds.disable_progress_bar()
    builder = Texts(data_dir=tmp_path, file_format="array_record")
    builder.download_and_prepare()
    [file] = builder.data_path.glob("*train*")
    flip_a_bit(file, b"the text number 12")
    for split, sample in (("train", 12), ("train[5:]", 7)):
        source = sb.TfdsSource(builder.as_data_source(split))
        with pytest.raises(sb.RecordError, match=rf"record 12 of .*{file.name} \(sample {sample}\) cannot be read"):
            list(source)
        kept = sb.TfdsSource(builder.as_data_source(split), on_error="skip")
        assert sum(each is not None for each in kept) == len(source) - 1
        assert sb.measure(kept, kept.layout, progress=False).histogram.absent == 1
        assert kept.records.skipped == [sample]
    capsys.readouterr()
    assert main(["measure", "tfds:texts/train", "--data-dir", str(tmp_path)]) == 2
    assert "record 12 of " in capsys.readouterr().err


def test_errors_of_the_machine_and_of_the_index_are_not_of_the_record():
    class Unplugged(list):
        def __getitem__(self, index):
            raise OSError("the disk is gone")

    records = sb.RecordSource(Unplugged([1]), on_error="skip")
    with pytest.raises(OSError, match="the disk is gone"):
        records[0]
    with pytest.raises(IndexError):
        sb.RecordSource([1], on_error="skip")[1]
    assert sb.RecordSource([1, 2]).__getitems__([1]) == [2]


def test_a_source_without_files_names_the_sample():
    class Odd(list):
        def __getitem__(self, index):
            return 1 // 0

    with pytest.raises(sb.RecordError, match="^sample 2 cannot be read: ZeroDivisionError: "):
        sb.RecordSource(Odd([1, 2, 3]))[2]


def test_what_is_no_source_is_refused():
    with pytest.raises(sb.LengthsError, match="RecordSource takes a source with len and .*, but got generator"):
        sb.RecordSource(number for number in [1])
    with pytest.raises(sb.LengthsError, match=r"on_error must be one of \('error', 'skip'\), but got 'drop'"):
        sb.RecordSource([], on_error="drop")
