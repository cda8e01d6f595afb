"""ElasticIterDataset: the state does not depend on the number of workers."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import grain
import numpy as np
import pytest
from absl import flags
from conftest import end, make_tokens

import shapebucket as sb

READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=3)
SHARED = Path("/dev/shm")
NO_THREADS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def workers(count: int) -> grain.MultiprocessingOptions:
    flags.FLAGS.mark_as_parsed()  # https://github.com/google/grain/issues/1355
    return grain.MultiprocessingOptions(num_workers=count)


def at(index, **fingerprint):
    """The state after so many elements."""
    return {"next_index": index, "fingerprint": fingerprint}


def through_json(state):
    return json.loads(json.dumps(state))


class FailsOnce(grain.MapDataset):
    """The numbers below a length; one of them cannot be read the first time."""

    def __init__(self, length, fails=None):
        super().__init__()
        self.length, self.fails = length, fails

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        if index == self.fails:
            self.fails = None
            raise OSError("try again")
        return index


class TestWithoutWorkers:
    def test_it_gives_what_to_iter_dataset_gives(self):
        dataset = grain.MapDataset.range(10).repeat(2)
        assert list(sb.ElasticIterDataset(dataset, READ)) == list(dataset.to_iter_dataset(READ))

    def test_states_say_how_many_elements_were_passed(self):
        elastic = iter(sb.ElasticIterDataset(grain.MapDataset.range(10), READ))
        for expected in range(10):
            assert elastic.get_state() == at(expected)
            assert next(elastic) == expected
        elastic.set_state(at(7))
        assert list(elastic) == [7, 8, 9]

    @pytest.mark.parametrize("read", [READ, NO_THREADS])
    def test_grains_own_check_passes(self, read):
        dataset = grain.MapDataset.range(10).filter(lambda number: number % 3 != 1)
        grain.experimental.assert_equal_output_after_checkpoint(sb.ElasticIterDataset(dataset, read))

    @pytest.mark.parametrize("read", [READ, NO_THREADS])
    def test_an_element_that_could_not_be_read_is_read_again(self, read):
        """Grain's own iterator with threads passes it over."""
        iterator = iter(sb.ElasticIterDataset(FailsOnce(10, fails=4), read))
        assert [next(iterator) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(OSError, match="try again"):
            next(iterator)
        assert iterator.get_state() == at(4)
        assert list(iterator) == [4, 5, 6, 7, 8, 9]

    def test_an_endless_data_set_goes_on_from_far_away(self):
        iterator = iter(sb.ElasticIterDataset(grain.MapDataset.range(10).repeat(), READ))
        iterator.set_state(at(10_000_000_004))
        assert [next(iterator) for _ in range(8)] == [4, 5, 6, 7, 8, 9, 0, 1]

    def test_the_end_stays_the_end(self):
        iterator = iter(sb.ElasticIterDataset(grain.MapDataset.range(3), READ))
        assert list(iterator) == [0, 1, 2]
        state = iterator.get_state()
        assert list(iterator) == []
        fresh = iter(sb.ElasticIterDataset(grain.MapDataset.range(3), READ))
        fresh.set_state(state)
        assert list(fresh) == []

    @pytest.mark.parametrize("read", [READ, NO_THREADS])
    def test_a_stop_iteration_in_a_map_is_not_the_end(self, read):
        dataset = grain.MapDataset.range(3).map(lambda number: next(iter(range(2 - number))))
        iterator = iter(sb.ElasticIterDataset(dataset, read))
        assert [next(iterator), next(iterator)] == [0, 0]
        with pytest.raises(sb.ScheduleError, match="element 2 of 3 did not come: StopIteration was raised for it"):
            next(iterator)

    def test_it_repeats(self):
        repeated = grain.experimental.RepeatIterDataset(sb.ElasticIterDataset(grain.MapDataset.range(3), READ), 2)
        assert list(repeated) == [0, 1, 2, 0, 1, 2]
        grain.experimental.assert_equal_output_after_checkpoint(repeated)


class TestMessages:
    def test_what_is_no_map_dataset_is_refused(self):
        with pytest.raises(
            sb.ScheduleError,
            match=r"takes a grain.MapDataset, but got PrefetchIterDataset: put it in the place of \.to_iter_dataset",
        ):
            sb.ElasticIterDataset(grain.MapDataset.range(3).to_iter_dataset())

    @pytest.mark.parametrize(
        "state",
        [
            "{}",
            {},
            {"next_index": 3},
            at("3"),
            at(-1),
            at(True),
            {**at(3), "fingerprint": "1f"},
            {**at(3), "exhausted": [0]},
        ],
    )
    def test_what_is_no_state_is_refused(self, state):
        iterator = iter(sb.ElasticIterDataset(grain.MapDataset.range(3)))
        with pytest.raises(
            sb.StateError,
            match=r"takes the state \{'next_index': n, 'fingerprint': \{…\}\}, but got .*: it was saved by another pipeline",
        ):
            iterator.set_state(state)

    def test_a_state_of_another_schedule_is_refused(self, tokens, token_plan, token_lengths):
        """Whatever stages come between; another shard is no other schedule."""
        source = grain.MapDataset.source(tokens)

        def elastic(plan=token_plan, **options):
            batches = sb.BucketedMapDataset(source, plan, token_lengths, **options)
            return iter(sb.ElasticIterDataset(batches.map(lambda batch: batch).repeat(2), READ))

        iterator = elastic(seed=1)
        next(iterator)
        state = through_json(iterator.get_state())
        for options, changed in (
            ({}, "seed 1, here 0"),
            ({"seed": 1, "shuffle_batches": 4}, "shuffle_batches None, here 4"),
            ({"seed": 1, "absent": "mask"}, "absent 'error', here 'mask'"),
            ({"seed": 1, "plan": sb.plan_buckets(token_lengths, max_buckets=2, batch_size=4)}, "plan '.*', here '.*'"),
        ):
            with pytest.raises(
                sb.StateError,
                match=f"^the state was saved by a loader with {changed}: its steps mean other batches; restore it into one",
            ):
                elastic(**options).set_state(state)
        same = elastic(seed=1)
        same.set_state(state)
        assert len(list(same)) == len(list(iterator))
        plan = sb.plan_buckets(token_lengths, max_buckets=2, batch_size=4)
        whole, half = (elastic(plan, shard=shard) for shard in ((0, 1), (1, 2)))
        half.set_state(through_json(whole.get_state()))

    def test_a_mix_of_schedules_has_the_fingerprints_of_all(self, tokens, token_plan, token_lengths):
        source = grain.MapDataset.source(tokens)
        one, two = (sb.BucketedMapDataset(source, token_plan, token_lengths, seed=seed) for seed in (1, 2))
        elastic = sb.ElasticIterDataset(grain.MapDataset.mix([one, two]), READ)
        assert elastic.fingerprint == {name: [one.fingerprint[name], two.fingerprint[name]] for name in one.fingerprint}
        assert elastic.fingerprint["seed"] == [1, 2]
        state = through_json(iter(elastic).get_state())
        other = iter(sb.ElasticIterDataset(grain.MapDataset.mix([two, one]), READ))
        with pytest.raises(sb.StateError, match=r"with seed \[1, 2\], here \[2, 1\]: its steps mean other batches"):
            other.set_state(state)

    def test_a_state_of_a_longer_data_set_is_refused(self):
        iterator = iter(sb.ElasticIterDataset(grain.MapDataset.range(3)))
        with pytest.raises(sb.StateError, match="was saved after 4 elements, but the data set has 3"):
            iterator.set_state(at(4))
        for index in (-1, True):
            with pytest.raises(sb.StateError, match="ElasticIterDataset takes the state"):
                iterator.set_state(at(index))

    def test_it_names_itself(self):
        dataset = sb.ElasticIterDataset(grain.MapDataset.range(3), READ, workers(2))
        assert str(dataset) == repr(dataset) == "ElasticIterDataset(workers=2)"
        assert str(iter(dataset)) == "ElasticDatasetIterator(shards=2)"


@pytest.mark.slow
class TestWithWorkers:
    def test_a_state_goes_from_any_number_of_workers_to_any(self):
        """0 → 2 → 3 → 1 → 0, with elements that a filter left out, over the end of an epoch."""
        dataset = grain.MapDataset.range(11).filter(lambda number: number % 4 != 1).repeat(2)
        expected = list(dataset.to_iter_dataset(READ))
        found, state = [], at(0)
        for count in (0, 2, 3, 1, 0):
            iterator = iter(sb.ElasticIterDataset(dataset, READ, workers(count)))
            iterator.set_state(through_json(state))
            found += [next(iterator) for _ in range(3)]
            state = iterator.get_state()
            end(iterator)
        iterator = iter(sb.ElasticIterDataset(dataset, READ, workers(2)))
        iterator.set_state(through_json(state))
        assert found + list(iterator) == expected
        end(iterator)

    def test_running_workers_are_placed_anew(self):
        iterator = iter(sb.ElasticIterDataset(grain.MapDataset.range(20), READ, workers(2)))
        assert [next(iterator) for _ in range(5)] == [0, 1, 2, 3, 4]
        iterator.set_state(at(2))
        assert [next(iterator) for _ in range(5)] == [2, 3, 4, 5, 6]
        iterator.set_state(at(17))
        assert list(iterator) == [17, 18, 19]
        iterator.set_state(at(18))
        assert list(iterator) == [18, 19]
        end(iterator)

    def test_workers_that_have_not_answered_are_placed_anew(self):
        iterator = iter(sb.ElasticIterDataset(grain.MapDataset.range(20), READ, workers(2)))
        for index in (20, 19, 3, 19, 20, 0, 5):
            iterator.set_state(at(index))
            iterator.start_prefetch()
        assert list(iterator) == list(range(5, 20))
        end(iterator)

    def test_an_error_in_a_worker_is_raised_and_the_element_read_again(self):
        dataset = FailsOnce(6, fails=3).map(lambda number: number)
        iterator = iter(sb.ElasticIterDataset(dataset, NO_THREADS, workers(2)))
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="try again"):
            next(iterator)
        with pytest.raises(OSError, match="try again"):  # a new process, which fails once again
            next(iterator)
        assert iterator.get_state() == at(3)
        end(iterator)

    def test_mp_prefetch_behind_it_is_refused(self):
        iterator = iter(sb.ElasticIterDataset(grain.MapDataset.range(6), READ).mp_prefetch(workers(2)))
        with pytest.raises(sb.ScheduleError, match="has its own workers, and mp_prefetch behind it asks for a part"):
            next(iterator)
        end(iterator)

    def test_a_stream_behind_it_resumes_with_another_number_of_workers(self, tokens, token_plan):
        source = grain.MapDataset.source(make_tokens(100))
        expected = list(sb.BucketedIterDataset(source.to_iter_dataset(READ), token_plan, max_wait=40))
        found, state = [], None
        for count in (0, 2, 3):
            parent = sb.ElasticIterDataset(source, READ, workers(count))
            iterator = iter(sb.BucketedIterDataset(parent, token_plan, max_wait=40))
            if state is not None:
                iterator.set_state(through_json(state))
            found += [next(iterator) for _ in range(3)]
            state = iterator.get_state()
            if count == 3:
                found += list(iterator)
            end(iterator)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one["tokens"], other["tokens"])


def test_options_of_another_kind_are_refused():
    parent = grain.MapDataset.range(10)
    with pytest.raises(
        sb.ScheduleError, match=r"multiprocessing_options must be a grain.MultiprocessingOptions or None, but got int"
    ):
        sb.ElasticIterDataset(parent, None, 2)
    with pytest.raises(
        sb.ScheduleError, match="read_options must be a grain.ReadOptions or None, but got MultiprocessingOptions"
    ):
        sb.ElasticIterDataset(parent, grain.MultiprocessingOptions(2))


class BreaksInTheWorker:
    """A source that cannot be unpickled."""

    def __init__(self):
        self.path = "here"

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index

    def __setstate__(self, state):
        raise RuntimeError("no such file in the worker")


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1, 7])
def test_a_worker_that_cannot_start_says_so(index):
    """At a restore too, where Grain's own reader would wait for ever."""
    dataset = sb.ElasticIterDataset(grain.MapDataset.source(BreaksInTheWorker()), None, workers(2))
    iterator = iter(dataset)
    iterator.set_state(at(index))
    iterator.start_prefetch()
    iterator.set_state(at(index + 1))
    iterator.set_state(at(index))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such file in the worker"):
            next(iterator)
    end(iterator)


class BreaksLater:
    """A source whose first worker dies or fails at an element, and which cannot be unpickled from then on."""

    def __init__(self, flag, fails=None):
        self.flag, self.fails = flag, fails

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == self.fails:
            self.flag.touch()
            raise OSError("the disk is gone")
        return index

    def __setstate__(self, state):
        vars(self).update(state)
        if self.flag.exists():
            raise RuntimeError("no such disk")


@pytest.mark.slow
def test_a_worker_that_cannot_start_again_says_so(tmp_path):
    """After an element that could not be read, and after a worker was killed; Grain's own reader would wait for ever."""
    dataset = sb.ElasticIterDataset(grain.MapDataset.source(BreaksLater(tmp_path / "a", 20)), NO_THREADS, workers(2))
    iterator = iter(dataset)
    assert [next(iterator) for _ in range(20)] == list(range(20))
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such disk"):
            next(iterator)
    (tmp_path / "a").unlink()
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    assert iterator.get_state() == at(20)
    end(iterator)


@pytest.mark.slow
def test_a_worker_that_was_killed_is_started_again(tmp_path):
    flag = tmp_path / "a"
    before = set(multiprocessing.active_children())
    iterator = iter(sb.ElasticIterDataset(grain.MapDataset.source(BreaksLater(flag)), NO_THREADS, workers(2)))
    assert [next(iterator) for _ in range(6)] == list(range(6))
    flag.touch()
    for child in set(multiprocessing.active_children()) - before:
        child.kill()
        child.join()
    found = list(range(6))
    with pytest.raises(RuntimeError):
        found.extend(iterator)  # what had come already is still there
    assert found == list(range(len(found)))
    with pytest.raises(RuntimeError, match="no such disk"):
        next(iterator)
    flag.unlink()
    assert list(iterator) == list(range(len(found), 40))
    end(iterator)


@pytest.mark.slow
def test_an_error_in_a_workers_first_element_passes(tmp_path):
    class FailsWithoutFile:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            if index == 1 and not (tmp_path / "there").exists():
                raise OSError("not yet")
            return index

    iterator = iter(sb.ElasticIterDataset(grain.MapDataset.source(FailsWithoutFile()), NO_THREADS, workers(2)))
    assert next(iterator) == 0
    with pytest.raises(OSError, match="not yet"):
        next(iterator)
    (tmp_path / "there").touch()
    assert list(iterator) == [1, 2, 3, 4, 5]
    end(iterator)


@pytest.mark.slow
def test_workers_start_together_and_end_with_their_data():
    dataset = sb.ElasticIterDataset(grain.MapDataset.range(20), READ, workers(2))
    iterator = iter(dataset)
    iterator.set_state(at(3))
    before = set(multiprocessing.active_children())
    iterator.start_prefetch()
    limit = time.monotonic() + 20
    while len(mine := set(multiprocessing.active_children()) - before) < 2 and time.monotonic() < limit:
        time.sleep(0.01)
    assert len(mine) == 2
    assert list(iterator) == list(range(3, 20))
    limit = time.monotonic() + 20
    while mine & set(multiprocessing.active_children()) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not mine & set(multiprocessing.active_children())
    end(iterator)


def test_a_closed_iterator_says_so_and_keeps_its_state():
    iterator = iter(sb.ElasticIterDataset(grain.MapDataset.range(3), READ))
    next(iterator)
    iterator.close()
    iterator.close()
    assert iterator.get_state() == at(1)
    with pytest.raises(
        sb.ScheduleError, match=r"was closed: make another with iter\(dataset\), and set_state\(\) to go on with it"
    ):
        next(iterator)


SCRIPT = """
import sys
import grain, numpy as np
import shapebucket as sb

if __name__ == "__main__":
    source = grain.MapDataset.range(30).map(lambda number: {"a": np.full(100_000, number)})
    read = grain.ReadOptions(num_threads=2, prefetch_buffer_size=3)
    iterator = iter(sb.ElasticIterDataset(source, read, grain.MultiprocessingOptions(num_workers=2)))
    for batch in iterator:
        if str(batch["a"][0]) == sys.argv[1]:
            break
    held = [batch, batch["a"][5:]]
    print(int(batch["a"].sum()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("last", [7, 29])
def test_a_script_that_simply_ends_prints_nothing(tmp_path, last):
    """In the middle of the data or after it, with variables that hold the iterator and arrays in shared memory."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, str(script), str(last)], env=environment, **pipes)
    assert (done.returncode, done.stdout) == (0, f"{last * 100_000}\n")
    assert_silent(done.stderr)


def assert_silent(errors):
    for sign in ("Traceback", "Exception ignored", "resource_tracker"):
        assert sign not in errors, errors


ENDS = """
import atexit, os, sys
import grain, numpy as np
from grain._src.python.ipc.shared_memory_array import SharedMemoryArray
from shapebucket.loading._grain_private import close_at_exit

def shared():
    array = SharedMemoryArray((3,))
    array.unlink_on_del()
    return array

@atexit.register  # before, and so called after
def of_another_pipeline():
    array = shared()
    name = array.shm.name
    del array
    print("gone" if name not in os.listdir("/dev/shm") else "left")

class CannotClose(grain.DatasetIterator):
    def __next__(self): ...
    def get_state(self): ...
    def set_state(self, state): ...
    def __del__(self): ...  # Grain's closes again
    def close(self):
        print("closed")
        raise OSError("it cannot be closed")

iterators = [CannotClose(), CannotClose()]
for iterator in iterators:
    close_at_exit(iterator)
sys.stdout.flush()
if not (child := os.fork()):
    atexit.unregister(of_another_pipeline)
    sys.exit()
os.waitpid(child, 0)
SharedMemoryArray.enable_async_del()
held = [shared(), shared(), shared()[1:]]
for at in sys.argv[1:]:
    held[int(at)].shm.unlink()
atexit.register(print, *[array.shm.name for array in held])
"""


@pytest.mark.skipif(not SHARED.is_dir(), reason="names of shared memory are seen in /dev/shm")
@pytest.mark.parametrize("unlinked", [0, 1])
def test_the_end_of_a_script_leaves_nothing_and_other_pipelines_alone(tmp_path, unlinked):
    """Nor does one thing that cannot be ended keep the others, or a forked child end what is its parent's."""
    script = tmp_path / "script.py"
    script.write_text(ENDS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, str(script), str(unlinked)], env=environment, **pipes)
    names, *rest = done.stdout.splitlines()
    assert rest == ["closed", "closed", "gone"], done.stderr
    assert not [name for name in names.split() if (SHARED / name).exists()]
    assert_silent(done.stderr)
