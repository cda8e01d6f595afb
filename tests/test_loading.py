import gc
import json
import pickle
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import grain
import jax
import numpy as np
import pytest
from absl import flags
from conftest import assert_equal, assert_resumes_everywhere, end, make_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

import shapebucket as sb
from shapebucket.loading import iter_dataset
from shapebucket.loading._grain_private import recorded
from shapebucket.loading.map_dataset import _Counter

READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=3)


NO_THREADS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class Flaky(grain.MapDataset):
    """A list as a data set, one of whose elements fails the first time it is read."""

    def __init__(self, data):
        super().__init__()
        self.data = data
        self.fails_once = None

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        if index == self.fails_once:
            self.fails_once = None
            raise OSError("try again")
        return self.data[index % len(self.data)]


def numbers(batches) -> list[int]:
    """The samples in some batches, by their first tokens."""
    return [int(n) for batch in batches for n in batch["tokens"][batch["example_mask"], 0]]


class TestSchedule:
    def test_every_sample_comes_once_and_whole(self, scheduled, tokens, token_plan):
        batches = [scheduled[index] for index in range(len(scheduled))]
        back = [each for batch in batches for each in sb.unpad(batch, batch, token_plan.layout)]
        assert sorted(int(each["tokens"][0]) for each in back) == list(range(100))
        for each in back:
            np.testing.assert_array_equal(each["tokens"], tokens[each["tokens"][0]]["tokens"])

    def test_batches_have_exactly_the_planned_shapes(self, scheduled, token_plan):
        specs = [token_plan.batch_spec(bucket) for bucket in token_plan.buckets]
        for batch in scheduled:
            assert jax.tree.map(lambda x: sb.ArraySpec(x.shape, x.dtype), batch) in specs

    def test_it_resumes_after_every_batch(self, scheduled):
        assert_resumes_everywhere(scheduled.repeat(2).to_iter_dataset(READ))

    def test_epochs_repeat_with_another_order(self, scheduled):
        count = len(scheduled)
        two = list(scheduled.repeat(2).to_iter_dataset(READ))
        assert len(two) == 2 * count
        assert sorted(numbers(two[:count])) == sorted(numbers(two[count:])) == list(range(100))
        assert numbers(two[:count]) != numbers(two[count:])

    def test_random_maps_before_it_draw_anew_each_epoch(self, source, token_plan, token_lengths):
        def noisy(each, rng):
            return {"tokens": each["tokens"] + rng.integers(1000, dtype=np.int32)}

        loader = sb.BucketedMapDataset(source.random_map(noisy, seed=0), token_plan, token_lengths, shuffle=False)
        assert not np.array_equal(loader[0]["tokens"], loader[len(loader)]["tokens"])
        np.testing.assert_array_equal(loader[0]["tokens"], loader[0]["tokens"])

    def test_its_fingerprint_is_that_of_the_schedule_and_its_policy(self, source, token_plan, token_lengths, scheduled):
        assert scheduled.fingerprint == {**scheduled.schedule.fingerprint, "absent": "error"}
        masking = sb.BucketedMapDataset(source, token_plan, token_lengths, seed=1, absent="mask")
        assert masking.fingerprint == {**scheduled.fingerprint, "absent": "mask"}

    def test_slices_are_grains(self, scheduled):
        assert_equal(list(scheduled[1:4]), [scheduled[index] for index in (1, 2, 3)])

    def test_shuffling_before_it_is_found_out_before_training(self, source, token_plan, token_lengths):
        """A warning, since one epoch of it works; the second raises."""
        shuffled = source.shuffle(seed=0)
        measured = sb.measure(shuffled, sb.Layout({"tokens": "s"}), progress=False)
        message = r"was measured: the lengths are of other data.* Shuffle with the loader"
        with pytest.warns(
            UserWarning, match=f"this loader will fail in a second epoch, if not before: sample .*{message}"
        ):
            loader = sb.BucketedMapDataset(shuffled, token_plan, measured)
        assert sorted(numbers(loader)) == list(range(100))
        with pytest.raises(sb.ScheduleError, match=message):
            list(loader.repeat(2))
        with pytest.warns(UserWarning, match=message):
            loader = sb.BucketedMapDataset(shuffled, token_plan, token_lengths)
        with pytest.raises(sb.ScheduleError, match=message):
            list(loader)

    def test_data_sets_that_do_not_change_raise_no_alarm(self, source, token_plan):
        mix = grain.MapDataset.mix([source[:50].shuffle(seed=0), source[50:].shuffle(seed=1)])
        for parent in (source[::-1], source.repeat(2), mix.repeat(1, reseed_each_epoch=False), source[:1]):
            lengths = sb.measure(parent, sb.Layout({"tokens": "s"}), progress=False)
            loader = sb.BucketedMapDataset(parent, token_plan, lengths)
            assert len(numbers(loader.repeat(2))) == 2 * len(parent)

    def test_a_data_set_of_one_epoch_says_so_in_the_second(self, tokens, token_plan, token_lengths):
        class OneEpoch(Flaky):
            def __getitem__(self, index):
                return self.slice(index) if isinstance(index, slice) else self.data[index]

        loader = sb.BucketedMapDataset(OneEpoch(tokens), token_plan, token_lengths)
        assert sorted(numbers(loader)) == list(range(100))
        with pytest.raises(
            sb.ScheduleError,
            match=rf"batch {len(loader)} is of epoch 1, for which the data set before the loader raised IndexError \(list index "
            r"out of range\). Perhaps it has one epoch only: Grain asks for a later one by indices from its length on",
        ):
            list(loader.repeat(2))

    def test_a_sample_whose_length_changed_is_found_out(self, tokens, token_plan, token_lengths):
        loader = sb.BucketedMapDataset(grain.MapDataset.source(tokens), token_plan, token_lengths)
        tokens[5] = {"tokens": np.zeros(3 + len(tokens[5]["tokens"]), np.int32)}
        with pytest.raises(sb.ScheduleError, match=r"sample 5 has lengths \{'s': \d+\}, but \{'s': \d+\} was measured"):
            list(loader)

    def test_sequential_slices_are_refused(self, scheduled):
        options = grain.MultiprocessingOptions(num_workers=2)
        flags.FLAGS.mark_as_parsed()
        dataset = scheduled.to_iter_dataset(READ).mp_prefetch(options, sequential_slice=True)
        iterator = iter(dataset)
        with pytest.raises(Exception, match=r"mp_prefetch\(sequential_slice=True\) gives each worker a part"):
            next(iterator)
        end(iterator)

    def test_filtered_samples_are_counted_and_not_asked_for(self, source, token_plan):
        kept = source.filter(lambda each: each["tokens"][0] % 3 == 0)
        lengths = sb.measure(kept, sb.Layout({"tokens": "s"}), progress=False)
        loader = sb.BucketedMapDataset(kept, token_plan, lengths)
        assert sorted(numbers(loader)) == list(range(0, 100, 3))
        assert loader.report().absent == 66

    def test_a_filter_that_changed_its_mind_is_an_error(self, source, token_plan, token_lengths):
        message = (
            r"element \d+ of the data set is None, but it had a length when it was measured: a filter before the loader must "
            'decide alike each time: measure the filtered data set, or say absent="mask" to have padding rows in place of'
        )
        with pytest.warns(UserWarning, match=message):
            loader = sb.BucketedMapDataset(source.filter(lambda _: False), token_plan, token_lengths)
        with pytest.raises(sb.ScheduleError, match=message):
            loader[0]

    def test_elements_that_a_filter_leaves_out_now_become_padding_rows(self, source, token_plan, token_lengths):
        kept = source.filter(lambda each: each["tokens"][0] % 3 == 0)
        loader = sb.BucketedMapDataset(kept, token_plan, token_lengths, absent="mask")
        batches = list(loader)
        plain = list(sb.BucketedMapDataset(source, token_plan, token_lengths))
        assert [each["tokens"].shape for each in batches] == [each["tokens"].shape for each in plain]
        assert [numbers([each]) for each in batches] == [[n for n in numbers([x]) if n % 3 == 0] for x in plain]
        assert loader.masked == loader.report().masked == 66
        assert str(loader.report()).endswith(", 0 absent, 66 rows masked when they were read")
        assert str(loader.schedule.report()).endswith(", 0 absent")
        lost = sum(len(loader.schedule[i].indices) - int(each["example_mask"].sum()) for i, each in enumerate(batches))
        assert lost == 66
        empty = sb.BucketedMapDataset(source.filter(lambda _: False), token_plan, token_lengths, absent="mask")
        assert not empty[0]["example_mask"].any()

    def test_a_wrong_policy_for_absent_elements_is_refused(self, source, token_plan, token_lengths):
        with pytest.raises(sb.ScheduleError, match=r"absent must be one of \('error', 'mask'\), but got 'drop'"):
            sb.BucketedMapDataset(source, token_plan, token_lengths, absent="drop")

    def test_lengths_of_another_data_set_are_refused(self, source, token_plan):
        with pytest.raises(sb.ScheduleError, match="the data set has 100 elements, but lengths of 99 were given"):
            sb.BucketedMapDataset(source, token_plan, np.ones(99))

    def test_a_sample_that_does_not_fit_the_layout_is_named(self, tokens, token_plan, token_lengths):
        tokens[5] = {"tokens": tokens[5]["tokens"].astype(np.int64)}
        loader = sb.BucketedMapDataset(grain.MapDataset.source(tokens), token_plan, token_lengths)
        with pytest.raises(sb.LayoutError, match="sample 5, feature 'tokens': has dtype int64"):
            list(loader)

    def test_dtypes_must_be_known(self, source, token_plan):
        plan = sb.BucketPlan(sb.Layout({"tokens": "s"}), token_plan.buckets)
        with pytest.raises(sb.LayoutError, match="feature 'tokens': its dtype is not known"):
            sb.BucketedMapDataset(source, plan, np.ones(100))

    def test_truncation_is_counted_and_done(self, source, token_lengths):
        plan = sb.plan_buckets(token_lengths, max_buckets=2, batch_size=8, max_size=10)
        loader = sb.BucketedMapDataset(source, plan, token_lengths, overlong="truncate")
        assert max(batch["tokens"].shape[1] for batch in loader) == 10
        assert sorted(numbers(loader)) == list(range(100))
        assert loader.report().truncated == int((token_lengths.values > 10).sum()) > 0

    @pytest.mark.slow
    def test_worker_processes_give_the_same_order(self, scheduled):
        flags.FLAGS.mark_as_parsed()  # https://github.com/google/grain/issues/1355
        expected = list(scheduled.repeat(2).to_iter_dataset(READ))
        workers = scheduled.repeat(2).to_iter_dataset(READ).mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
        iterator = iter(workers)
        assert_equal(list(iterator), expected)
        end(iterator)

    def test_it_names_itself(self, scheduled):
        assert str(scheduled) == repr(scheduled) == f"BucketedMapDataset(buckets=4, batches={len(scheduled)})"


def test_a_counter_counts_what_several_threads_add():
    class Slow(int):
        """Lets another thread come between reading and writing."""

        def __radd__(self, other):
            time.sleep(0.005)
            return int(other) + int(self)

    counter = _Counter()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(counter.add, [Slow(1)] * 16))
    assert counter.value == 16
    assert pickle.loads(pickle.dumps(counter)).value == 0


def test_stop_iteration_in_a_map_does_not_pass_for_the_end(source, token_plan, token_lengths):
    def stop(sample):
        if sample["tokens"][0] == 37:
            raise StopIteration
        return sample

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = sb.BucketedMapDataset(source.map(stop), token_plan, token_lengths)
    with pytest.raises(
        sb.ScheduleError, match="element 37 did not come: StopIteration was raised for it, in a map perhaps"
    ):
        list(loader.to_iter_dataset(NO_THREADS))


class TestStream:
    def test_every_sample_comes_once_and_whole(self, source, tokens, token_plan):
        dataset = sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan)
        back = [each for batch in dataset for each in sb.unpad(batch, batch, token_plan.layout)]
        assert sorted(int(each["tokens"][0]) for each in back) == list(range(100))
        for each in back:
            np.testing.assert_array_equal(each["tokens"], tokens[each["tokens"][0]]["tokens"])
        report = dataset.report()
        assert (report.seen, sum(report.samples), report.waiting) == (100, 100, 0)

    def test_it_fills_buckets_as_the_schedule_does(self, source, token_plan, token_lengths):
        stream = list(sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan))
        schedule = list(sb.BucketedMapDataset(source, token_plan, token_lengths, shuffle=False))
        assert_equal(stream, schedule)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"max_wait": 5},
            {"max_wait": 30, "remainder": "drop"},
            {"remainder": "drop"},
        ],
    )
    def test_it_resumes_after_every_batch(self, source, token_plan, options):
        assert_resumes_everywhere(sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan, **options))

    @pytest.mark.parametrize("overlong", ["truncate", "drop"])
    def test_it_resumes_and_counts_with_overlong_samples(self, source, token_lengths, overlong):
        plan = sb.plan_buckets(token_lengths, max_buckets=3, token_budget=100, max_size=20)
        dataset = sb.BucketedIterDataset(source.to_iter_dataset(READ), plan, overlong=overlong, max_wait=20)
        assert_resumes_everywhere(dataset)
        count = int((token_lengths.values > 20).sum())
        iterator = iter(dataset)
        for _ in range(5):
            next(iterator)
        restored = iter(dataset)
        restored.set_state(json.loads(json.dumps(iterator.get_state())))
        list(iterator)
        list(restored)
        assert iterator.report() == restored.report()
        report = restored.report()
        assert report.seen == 100
        assert (report.truncated, report.overlong_dropped) == ((count, 0) if overlong == "truncate" else (0, count))

    def test_no_sample_waits_longer_than_max_wait(self, token_plan):
        tokens = [
            {"tokens": np.full(40, number, np.int32)} if number == 0 else {"tokens": np.full(2, number, np.int32)}
            for number in range(200)
        ]
        parent = grain.MapDataset.source(tokens).to_iter_dataset(grain.ReadOptions(num_threads=0))
        dataset = sb.BucketedIterDataset(parent, token_plan, max_wait=50)
        iterator = iter(dataset)
        for batch in iterator:
            if 0 in numbers([batch]):
                break
        assert batch["example_mask"].sum() == 1
        assert iterator.report().early == 1
        assert iterator.get_state()["seen"] == 51

    def test_the_state_stays_small_when_a_sample_waits_for_long(self, token_plan):
        tokens = [{"tokens": np.zeros(40 if number == 0 else 2, np.int32)} for number in range(40_000)]
        dataset = sb.BucketedIterDataset(grain.MapDataset.source(tokens).to_iter_dataset(READ), token_plan)
        iterator = iter(dataset)
        for _ in range(600):
            next(iterator)
        assert iterator.get_state()["start"] == 0
        assert len(json.dumps(iterator.get_state())) < 2000
        assert len(iterator._anchors) <= 1024 + 16
        rest = len(list(iterator))
        restored = iter(dataset)
        for _ in range(600):
            next(restored)
        state = json.loads(json.dumps(restored.get_state()))
        fresh = iter(dataset)
        fresh.set_state(state)
        assert len(list(fresh)) == rest

    def test_a_state_of_another_plan_is_refused(self, source, token_plan):
        state = iter(sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan)).get_state()
        other = iter(sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan, max_wait=7))
        with pytest.raises(
            sb.StateError,
            match="the state was saved by a loader with max_wait None, here 7: restore it into one with the same plan",
        ):
            other.set_state(state)

    def test_what_is_no_state_is_refused(self, source, token_plan):
        iterator = iter(sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan))
        with pytest.raises(sb.StateError, match=r"the state is not whole: it lacks \['counts', 'flushed'"):
            iterator.set_state({"fingerprint": iterator.get_state()["fingerprint"]})
        for state in ('{"seen": 1}', {"next_index": 3}):
            with pytest.raises(sb.StateError, match="this is no state of a BucketedIterDataset"):
                iterator.set_state(state)

    def test_a_state_of_a_longer_data_set_is_refused(self, tokens, token_plan):
        whole = iter(sb.BucketedIterDataset(grain.MapDataset.source(tokens).to_iter_dataset(READ), token_plan))
        for _ in range(5):
            next(whole)
        short = iter(sb.BucketedIterDataset(grain.MapDataset.source(tokens[:3]).to_iter_dataset(READ), token_plan))
        short.set_state(whole.get_state())
        with pytest.raises(sb.StateError, match=r"the state was saved after \d+ samples, but the data set ends after"):
            next(short)

    def test_a_restore_that_failed_can_be_tried_again(self, tokens, token_plan):
        """Whichever read fails, nothing is lost and nothing comes twice."""
        source = Flaky(tokens)
        dataset = sb.BucketedIterDataset(source.to_iter_dataset(NO_THREADS), token_plan, max_wait=40)
        iterator = iter(dataset)
        for _ in range(4):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        expected = list(iterator)
        replayed = range(state["start"], state["seen"])
        assert len(replayed) > 3
        for number in replayed:
            fresh = iter(dataset)
            fresh.set_state(state)
            source.fails_once = number
            with pytest.raises(OSError, match="try again"):
                next(fresh)
            assert fresh.get_state() == state
            assert_equal(list(fresh), expected)

    def test_a_refused_sample_stays_the_next_one(self, tokens, token_plan):
        """Each call raises again, and a state taken then has the sample still to come."""
        tokens[30] = {"tokens": tokens[30]["tokens"].tolist()}
        dataset = sb.BucketedIterDataset(grain.MapDataset.source(tokens).to_iter_dataset(READ), token_plan, max_wait=5)
        iterator = iter(dataset)
        before = []
        with pytest.raises(sb.LayoutError, match="sample 30"):
            before.extend(iterator)
        with pytest.raises(sb.LayoutError, match="sample 30"):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        tokens[30] = {"tokens": np.full(4, 30, np.int32)}
        fresh = iter(dataset)
        fresh.set_state(state)
        assert sorted(numbers(before) + numbers(fresh)) == list(range(100))
        assert fresh.report().seen == 100

    def test_a_sample_that_could_not_be_read_is_not_passed_over(self, tokens, token_plan):
        """The iterator stays failed; its state goes on with the sample, exactly."""
        source = Flaky(tokens)
        dataset = sb.BucketedIterDataset(source.to_iter_dataset(NO_THREADS), token_plan)
        expected = list(dataset)
        for number in (0, 3, 16, 40):
            source.fails_once = number
            iterator = iter(dataset)
            before = []
            with pytest.raises(OSError, match="try again"):
                before.extend(iterator)
            with pytest.raises(OSError, match="try again"):
                next(iterator)
            iterator.set_state(json.loads(json.dumps(iterator.get_state())))
            assert_equal(before + list(iterator), expected)

    def test_a_restore_starts_close_to_the_oldest_waiting_sample(self, token_plan, monkeypatch):
        """Also when the parent's states are thinned out while one sample waits for long."""
        monkeypatch.setattr(iter_dataset, "_ANCHORS", 8)
        tokens = [{"tokens": np.zeros(40 if number in (0, 1000) else 2, np.int32)} for number in range(3000)]
        dataset = sb.BucketedIterDataset(
            grain.MapDataset.source(tokens).to_iter_dataset(READ), token_plan, max_wait=1500
        )
        iterator = iter(dataset)
        for _ in iterator:
            state = iterator.get_state()
            waiting = [number - state["start"] for number in iter_dataset._unpack(state["waiting"], state["start"])]
            assert not waiting or waiting[0] < 16
            assert len(iterator._anchors) <= 8 + 16 + 2 * len(waiting)

    def test_a_report_reads_nothing(self, source, token_plan):
        dataset = sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan)
        iterator = iter(dataset)
        for _ in range(3):
            next(iterator)
        report = iterator.report()
        fresh = iter(dataset)
        fresh.set_state(iterator.get_state())
        assert fresh.report() == report
        assert fresh.get_state() == iterator.get_state()
        assert report.waiting > 0
        assert report.seen == iterator.get_state()["seen"]

    def test_a_report_stays_as_it_was_and_does_not_keep_the_iterator(self, source, token_plan):
        dataset = sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan)
        iterator = iter(dataset)
        next(iterator)
        report = dataset.report()
        assert report is iterator.report()
        for counts in (report.batches, report.samples, report.real_elements):
            assert isinstance(counts, tuple)
        before = str(report)
        next(iterator)
        assert str(report) == before != str(dataset.report())
        watched = weakref.ref(iterator)
        del iterator
        gc.collect()
        assert watched() is None
        assert sum(dataset.report().batches) == 2

    def test_a_pickled_stream_has_read_nothing(self, source, token_plan):
        dataset = sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan)
        size = len(pickle.dumps(dataset))
        next(iter(dataset))
        assert dataset.report().seen > 0
        pickled = pickle.dumps(dataset)
        with pytest.raises(sb.ScheduleError, match="nothing was read in this process yet"):
            pickle.loads(pickled).report()
        assert len(pickled) < size + 4096  # the checker remembers a few shapes

    def test_absent_elements_are_counted(self, tokens, token_plan):
        with_gaps = [None if number % 4 == 1 else each for number, each in enumerate(tokens)]
        parent = grain.MapDataset.source(with_gaps).to_iter_dataset(NO_THREADS, allow_nones=True)
        dataset = sb.BucketedIterDataset(parent, token_plan)
        iterator = iter(dataset)
        next(iterator)
        fresh = iter(dataset)
        fresh.set_state(json.loads(json.dumps(iterator.get_state())))
        for each in (iterator, fresh):
            list(each)
            assert each.report().absent == 25
            assert sum(each.report().samples) == 75

    def test_reports_from_another_thread_do_not_disturb(self, source, token_plan):
        dataset = sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan, max_wait=40)
        iterator = iter(dataset)
        for _ in range(3):
            next(iterator)
        state = iterator.get_state()
        expected = list(iterator)
        threaded = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=2)
        fresh = iter(threaded)
        outer = fresh.get_state()
        fresh.set_state(
            {**outer, **{key: state for key, value in outer.items() if isinstance(value, dict)}}
            if "fingerprint" not in outer
            else state
        )
        found = []
        with ThreadPoolExecutor(1) as pool:
            for batch in fresh:
                pool.submit(dataset.report).result()
                found.append(batch)
        assert_equal(found, expected)

    def test_anchors_stay_few_when_nothing_waits(self, token_plan):
        tokens = [{"tokens": np.zeros(1000, np.int32)} for _ in range(5000)]
        dataset = sb.BucketedIterDataset(
            grain.MapDataset.source(tokens).to_iter_dataset(READ), token_plan, overlong="drop"
        )
        iterator = iter(dataset)
        assert list(iterator) == []
        assert iterator.report().overlong_dropped == 5000
        assert len(iterator._anchors) < 5

    def test_states_are_fresh_objects(self, source, token_plan):
        iterator = iter(sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan))
        next(iterator)
        first = iterator.get_state()
        kept = json.dumps(first)
        list(iterator)
        assert json.dumps(first) == kept

    def test_overlong_is_an_error_by_default(self, source, token_lengths):
        plan = sb.plan_buckets(token_lengths, batch_size=4, max_size=10)
        with pytest.raises(sb.OverlongError, match=r"sample \d+ with lengths \{'s': \d+\} fits no bucket"):
            list(sb.BucketedIterDataset(source.to_iter_dataset(READ), plan))

    def test_a_sample_that_does_not_fit_the_layout_is_named(self, tokens, token_plan):
        tokens[5] = {"tokens": tokens[5]["tokens"].tolist()}
        parent = grain.MapDataset.source(tokens).to_iter_dataset(READ)
        with pytest.raises(sb.LayoutError, match="sample 5, feature 'tokens': is a Python list"):
            list(sb.BucketedIterDataset(parent, token_plan))

    def test_wrong_options_are_refused(self, source, token_plan):
        with pytest.raises(
            sb.ScheduleError, match="max_wait must be at least 1 sample, a whole number, or None, but got 0"
        ):
            sb.BucketedIterDataset(source.to_iter_dataset(), token_plan, max_wait=0)
        with pytest.raises(sb.ScheduleError, match="remainder must be one of"):
            sb.BucketedIterDataset(source.to_iter_dataset(), token_plan, remainder="x")
        with pytest.raises(sb.ScheduleError, match="nothing was read in this process yet"):
            sb.BucketedIterDataset(source.to_iter_dataset(), token_plan).report()

    @pytest.mark.slow
    def test_it_works_before_and_after_worker_processes(self, source, token_plan):
        flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(num_workers=2)
        stage = sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan)
        before = iter(stage.mp_prefetch(options))
        assert sorted(numbers(before)) == list(range(100))
        end(before)
        with pytest.raises(sb.ScheduleError, match="under mp_prefetch the workers read, and count on their own"):
            stage.report()
        after = iter(sb.BucketedIterDataset(source.to_iter_dataset(READ).mp_prefetch(options), token_plan))
        expected = list(sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan))
        assert_equal(list(after), expected)
        end(after)

    def test_it_names_itself(self, source, token_plan):
        dataset = sb.BucketedIterDataset(source.to_iter_dataset(), token_plan, max_wait=9)
        assert str(dataset) == repr(dataset) == "BucketedIterDataset(buckets=4, max_wait=9)"
        assert str(iter(dataset)) == "BucketedDatasetIterator(buckets=4)"


def rare_tokens(count: int, every: int) -> list[dict]:
    """One sample in `every` is long; the first token is the sample's number."""
    return [{"tokens": np.full(40 if number % every == 7 else 2, number, np.int32)} for number in range(count)]


def waits(dataset) -> list[int]:
    """How many samples passed while each emitted sample waited, full buckets and early ones, not the end of the stream."""
    iterator = iter(dataset)
    found = []
    for batch in iterator:
        state = iterator.get_state()
        if not state["flushed"]:
            found += [state["seen"] - 1 - number for number in numbers([batch])]
    return found


class TestStreamInTrouble:
    def test_after_a_refused_state_an_iterator_needs_another(self, source, token_plan):
        iterator = iter(sb.BucketedIterDataset(source.to_iter_dataset(NO_THREADS), token_plan))
        begun = [next(iterator) for _ in range(3)]
        state = iterator.get_state()
        with pytest.raises(sb.StateError, match="does not take its part of the state"):
            iterator.set_state({**state, "parent": {"next_index": 880}})
        for use in (lambda: next(iterator), iterator.get_state):
            with pytest.raises(
                sb.StateError, match="this iterator was given a state that the data set before the loader refused"
            ):
                use()
        iterator.set_state(state)
        assert sorted(numbers([*begun, *iterator])) == list(range(100))

    def test_a_file_that_cannot_be_read_at_a_restore_is_no_refusal(self, source, token_plan, tmp_path):
        """Its error comes as it is, and a later try goes on."""

        class OpensAtRestore(grain.DatasetIterator):
            def __next__(self):
                return next(self._parent)

            def get_state(self):
                return self._parent.get_state()

            def set_state(self, state):
                (tmp_path / "there").read_bytes()
                self._parent.set_state(state)

        class Opening(grain.IterDataset):
            def __iter__(self):
                return OpensAtRestore(iter(self._parent))

        iterator = iter(sb.BucketedIterDataset(Opening(source.to_iter_dataset(NO_THREADS)), token_plan))
        begun = [next(iterator) for _ in range(3)]
        state = iterator.get_state()
        with pytest.raises(FileNotFoundError, match="there"):
            iterator.set_state(state)
        with pytest.raises(
            sb.StateError, match="refused or failed to take, and is now at no known place: set one that it takes"
        ):
            next(iterator)
        (tmp_path / "there").touch()
        iterator.set_state(state)
        assert sorted(numbers([*begun, *iterator])) == list(range(100))

    @pytest.mark.parametrize("at", [0, 37, 99])
    def test_an_interruption_loses_no_sample(self, tokens, token_plan, at):
        again = []

        def interrupt(sample):
            if sample["tokens"][0] == at and not again:
                again.append(at)
                raise KeyboardInterrupt
            return sample

        parent = grain.MapDataset.source(tokens).to_iter_dataset(NO_THREADS).map(interrupt)
        iterator = iter(sb.BucketedIterDataset(parent, token_plan))
        found = []
        with pytest.raises(KeyboardInterrupt):
            found.extend(iterator)
        with pytest.raises(
            sb.ScheduleError, match=rf"KeyboardInterrupt interrupted the reading of sample {at}: go on by"
        ):
            next(iterator)
        iterator.set_state(iterator.get_state())
        assert sorted(numbers([*found, *iterator])) == list(range(100))

    def test_an_interruption_while_a_batch_is_padded_loses_no_sample(self, source, token_plan, monkeypatch):
        from shapebucket.loading import iter_dataset

        iterator = iter(sb.BucketedIterDataset(source.to_iter_dataset(NO_THREADS), token_plan))
        real, calls, found = iter_dataset.pad_rows, [], []

        def pad_rows(*arguments, **options):
            calls.append(1)
            if len(calls) % 3 == 0:
                raise KeyboardInterrupt
            return real(*arguments, **options)

        monkeypatch.setattr(iter_dataset, "pad_rows", pad_rows)
        while True:
            try:
                found.append(next(iterator))
            except KeyboardInterrupt:
                continue
            except StopIteration:
                break
        assert sorted(numbers(found)) == list(range(100))
        assert sum(iterator.report().samples) == 100

    @pytest.mark.parametrize("change", ["absent", "longer", "appended"])
    def test_a_state_goes_into_the_same_data_only(self, tokens, token_plan, change):
        def stream(data):
            return iter(
                sb.BucketedIterDataset(
                    grain.MapDataset.source(data).to_iter_dataset(NO_THREADS, allow_nones=True), token_plan
                )
            )

        saved = stream(tokens)
        batches = list(saved) if change == "appended" else [next(saved) for _ in range(4)]
        assert batches
        state = saved.get_state()
        changed = {
            "absent": [None] * 100,
            "longer": [{"tokens": np.zeros(int(token_plan.sizes.max()), np.int32)}] * 100,
            "appended": tokens + tokens[:7],
        }[change]
        other = stream(changed)
        other.set_state(state)
        with pytest.raises(
            sb.StateError, match=r"the samples up to \d+, or their number, are not those that the state was saved"
        ):
            list(other)

    def test_numpys_whole_numbers_go_into_states(self, source, token_plan):
        dataset = sb.BucketedIterDataset(source.to_iter_dataset(NO_THREADS), token_plan, max_wait=np.int64(5))
        json.dumps(iter(dataset).get_state())
        with pytest.raises(
            sb.ScheduleError, match="max_wait must be at least 1 sample, a whole number, or None, but got 2.5"
        ):
            sb.BucketedIterDataset(source.to_iter_dataset(NO_THREADS), token_plan, max_wait=2.5)


class TestStreamBounds:
    """What the stream promises of its state, and of how long a sample waits."""

    @pytest.fixture
    def wide(self):
        """Eight buckets of 64 rows."""
        buckets = [sb.Bucket((("s", size),), 64) for size in range(64, 513, 64)]
        return sb.BucketPlan(sb.Layout({"tokens": "int32[s]"}), buckets)

    def test_the_state_is_under_1_kb_at_batch_size_64(self, wide):
        rng = np.random.default_rng(0)
        tokens = [{"tokens": np.zeros(length, np.int32)} for length in rng.integers(1, 513, 20_000)]
        iterator = iter(sb.BucketedIterDataset(grain.MapDataset.source(tokens).to_iter_dataset(NO_THREADS), wide))
        sizes, waiting = [], []
        for _ in iterator:
            sizes.append(len(json.dumps(iterator.get_state())))
            waiting.append(iterator.report().waiting)
        assert max(sizes) < 1024
        assert max(waiting) > 250

    def test_a_sample_of_a_bucket_that_gets_one_in_10_000_does_not_wait_longer_than_max_wait(self, token_plan):
        parent = grain.MapDataset.source(rare_tokens(30_000, 10_000)).to_iter_dataset(NO_THREADS)
        dataset = sb.BucketedIterDataset(parent, token_plan, max_wait=2_000)
        found = waits(dataset)
        assert max(found) == 2_000
        assert dataset.report().early == 3
        assert max(waits(sb.BucketedIterDataset(parent, token_plan))) == 20_000

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.integers(1, 12), min_size=1, max_size=150),
        st.integers(1, 40),
        st.sampled_from(["truncate", "drop"]),
    )
    def test_no_sample_ever_waits_longer(self, lengths, max_wait, overlong):
        plan = sb.BucketPlan(
            sb.Layout({"tokens": "int32[s]"}),
            [sb.Bucket((("s", size),), rows) for size, rows in ((2, 9), (5, 4), (9, 3))],
        )
        tokens = [{"tokens": np.full(length, number, np.int32)} for number, length in enumerate(lengths)]
        parent = grain.MapDataset.source(tokens).to_iter_dataset(NO_THREADS)
        dataset = sb.BucketedIterDataset(parent, plan, max_wait=max_wait, overlong=overlong)
        assert max(waits(dataset), default=0) <= max_wait
        report = dataset.report()
        kept = [number for number, length in enumerate(lengths) if overlong == "truncate" or length <= 9]
        assert sorted(numbers(iter(dataset))) == kept
        assert report.seen == len(lengths)

    def test_what_is_no_list_of_waiting_samples_is_refused(self, source, token_plan):
        iterator = iter(sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan))
        next(iterator)
        state = iterator.get_state()
        for waiting in ("0,3,5", "", 7, "eJw="):
            with pytest.raises(sb.StateError, match="the state's list of waiting samples cannot be read"):
                iterator.set_state({**state, "waiting": waiting})
        iterator.set_state(state)


class TestStreamAmongGrainsStages:
    @pytest.fixture
    def stream(self, source, token_plan):
        return sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan, max_wait=40)

    def test_it_resumes_over_a_prefetching_thread_a_filter_and_a_map(self, source, token_plan):
        parent = source.to_iter_dataset(READ).filter(lambda each: each["tokens"][0] % 5 > 0).map(lambda each: each)
        parent = grain.experimental.ThreadPrefetchIterDataset(parent, prefetch_buffer_size=3)
        assert_resumes_everywhere(sb.BucketedIterDataset(parent, token_plan, max_wait=40))

    def test_a_refused_sample_comes_through_a_prefetching_thread(self, tokens, token_plan):
        tokens[30] = {"tokens": tokens[30]["tokens"].tolist()}
        stream = sb.BucketedIterDataset(grain.MapDataset.source(tokens).to_iter_dataset(READ), token_plan)
        iterator = iter(grain.experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=3))
        with pytest.raises(sb.LayoutError, match="sample 30, feature 'tokens': is a Python list"):
            list(iterator)

    @pytest.mark.slow
    @pytest.mark.parametrize("place", ["before", "after"])
    def test_it_resumes_with_worker_processes(self, tokens, token_plan, place):
        flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(num_workers=2)
        parent = grain.MapDataset.source(tokens[:60]).to_iter_dataset(READ)
        if place == "before":
            dataset = sb.BucketedIterDataset(parent, token_plan, max_wait=20).mp_prefetch(options)
        else:
            dataset = sb.BucketedIterDataset(parent.mp_prefetch(options), token_plan, max_wait=20)
        iterator = iter(dataset)
        states, batches = [json.dumps(iterator.get_state())], []
        for batch in iterator:
            batches.append(batch)
            states.append(json.dumps(iterator.get_state()))
        end(iterator)
        assert sorted(numbers(batches)) == list(range(60))
        for number in range(0, len(states), 3):
            fresh = iter(dataset)
            fresh.set_state(json.loads(states[number]))
            assert_equal(list(fresh), batches[number:])
            end(fresh)

    def test_closing_it_closes_its_parents(self, stream):
        iterator = iter(stream)
        next(iterator)
        state, report = iterator.get_state(), iterator.report()
        parent = iterator._source
        iterator.close()
        iterator.close()
        with pytest.raises(
            sb.ScheduleError, match=r"was closed: make another with iter\(dataset\), and set_state\(\) to go on"
        ):
            next(iterator)
        with pytest.raises(ValueError, match="closed iterator"):
            next(parent)
        assert (iterator.get_state(), iterator.report()) == (state, report)
        whole, rest = list(stream), iter(stream)
        rest.set_state(state)
        assert_equal(list(rest), whole[1:])

    def test_it_takes_part_in_grains_statistics(self, stream):
        """Fails when Grain moves what `_grain_private` uses: see there."""
        iterator = iter(stream)
        next(iterator)
        assert iterator._stats._is_output
        assert not iterator._source._stats._is_output

    def test_batches_are_made_where_grain_has_no_statistics(self, stream):
        class Bare:
            pass

        assert recorded(Bare(), lambda: 5) == 5
        bare = Bare()
        bare._stats = Bare()
        assert recorded(bare, lambda: 5) == 5

    def test_a_report_can_be_read_at_any_time(self, tokens, token_plan):
        """Each is of one moment: the counts agree among themselves, and go up only."""
        parent = grain.MapDataset.source(tokens).repeat(20).to_iter_dataset(NO_THREADS)
        iterator = iter(sb.BucketedIterDataset(parent, token_plan, max_wait=40))
        reports, done = [], threading.Event()

        def watch():
            while not done.is_set():
                reports.append(iterator.report())

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            seen = [iterator.get_state()["seen"] for _ in iterator]
            done.set()
            watching.result()
        assert {report.seen for report in reports} <= {0, *seen, 2000}
        assert [report.seen for report in reports] == sorted(report.seen for report in reports)
        for report in reports:
            assert all(
                count <= batches * bucket.batch_size
                for count, batches, bucket in zip(report.samples, report.batches, token_plan.buckets, strict=True)
            )
        assert iterator.report().summary.startswith("2,000 of 2,000 samples in ")
        assert iterator.report().summary.count(", 0 waiting, 0 dropped, 0 truncated") == 1


def test_what_is_no_data_set_or_no_plan_is_refused(source, token_plan, token_lengths):
    with pytest.raises(
        sb.ScheduleError, match="takes a grain.MapDataset of samples, but got .*: for an IterDataset there is"
    ):
        sb.BucketedMapDataset(source.to_iter_dataset(), token_plan, token_lengths)
    with pytest.raises(
        sb.ScheduleError, match=r"takes a grain.IterDataset of samples, but got .*: call .to_iter_dataset\(\)"
    ):
        sb.BucketedIterDataset(source, token_plan)
    with pytest.raises(
        sb.ScheduleError, match="takes the BucketPlan before the lengths, but got LengthTable in its place"
    ):
        sb.BucketedMapDataset(source, token_lengths, token_plan)


def test_lengths_in_place_of_masks(source, token_lengths):
    plan = sb.plan_buckets(token_lengths, max_buckets=3, batch_size=8, masks="length")
    batch = sb.BucketedMapDataset(source, plan, token_lengths)[0]
    assert batch.keys() == {"tokens", "s_length", "example_mask"}


def test_make_tokens_is_what_the_tests_believe():
    assert [int(each["tokens"][0]) for each in make_tokens(5)] == [0, 1, 2, 3, 4]
