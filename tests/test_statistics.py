"""What `report()` of a stream says when other stages stand behind it."""

import json

import grain
import pytest
from absl import flags

import shapebucket as sb

READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=3)


@pytest.fixture
def stream(tokens, token_plan):
    return sb.BucketedIterDataset(grain.MapDataset.source(tokens).to_iter_dataset(READ), token_plan, max_wait=40)


def counts(report: sb.LoaderReport) -> tuple[int, int]:
    return sum(report.batches), sum(report.samples)


def samples_of(batches) -> int:
    return sum(int(batch["example_mask"].sum()) for batch in batches)


def test_behind_a_map_it_counts_each_batch_as_it_comes(stream):
    iterator = iter(stream.map(lambda batch: batch))
    seen = []
    for batch in iterator:
        seen.append(batch)
        report = stream.report()
        assert counts(report) == (len(seen), samples_of(seen))
        assert report.seen == sum(report.samples) + report.waiting
    assert counts(stream.report())[1] == stream.report().seen == 100


def test_behind_a_thread_it_counts_what_was_read_ahead(stream):
    """So it runs ahead by at most the buffer, the batch that waits for a place in it, and the one being made."""
    iterator = iter(grain.experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=2))
    for number, _ in enumerate(iterator, start=1):
        assert number <= counts(stream.report())[0] <= number + 4
    assert counts(stream.report())[1] == 100


def test_it_goes_on_from_a_state(stream):
    iterator = iter(stream.map(lambda batch: batch))
    for _ in range(4):
        next(iterator)
    before = stream.report()
    state = json.loads(json.dumps(iterator.get_state()))
    fresh = iter(stream.map(lambda batch: batch))
    fresh.set_state(state)
    assert stream.report() == before
    rest = list(fresh)
    assert counts(stream.report()) == (4 + len(rest), 100)


def test_it_is_of_the_last_iterator(stream):
    first, second = iter(stream), iter(stream)
    for _ in range(3):
        next(first)
    next(second)
    assert counts(stream.report())[0] == 1
    assert counts(first.report())[0] == 3


def test_under_repeat_each_pass_counts_anew(stream):
    epoch = len(list(stream))
    repeated = iter(grain.experimental.RepeatIterDataset(stream, num_epochs=2))
    for _ in range(epoch):
        next(repeated)
    assert counts(stream.report()) == (epoch, 100)
    next(repeated)
    assert counts(stream.report())[0] == 1


@pytest.mark.slow
def test_before_worker_processes_nothing_is_counted_here(stream, tokens, token_plan):
    """Behind them everything is; a schedule needs no reading to report."""
    flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(num_workers=2)
    iterator = iter(stream.mp_prefetch(options))
    iterator.get_state()  # makes an iterator in this process, which reads nothing
    next(iterator)
    with pytest.raises(sb.ScheduleError, match="under mp_prefetch the workers read, and count on their own"):
        stream.report()
    iterator.close()
    behind = sb.BucketedIterDataset(
        sb.ElasticIterDataset(grain.MapDataset.source(tokens), READ, options), token_plan, max_wait=40
    )
    iterator = iter(behind)
    batches = list(iterator)
    iterator.close()
    assert counts(behind.report()) == (len(batches), 100)
