import hashlib
import itertools
import json
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shapebucket as sb
from shapebucket.schedule import promote

LAYOUT = sb.Layout({"tokens": "int32[s]"})


def plan_of(*buckets: tuple[int, int]) -> sb.BucketPlan:
    return sb.BucketPlan(LAYOUT, [sb.Bucket((("s", size),), rows) for size, rows in buckets])


PLAN = plan_of((4, 8), (8, 4), (16, 2))
LENGTHS = np.random.default_rng(0).integers(0, 17, 203)


def epoch(schedule: sb.Schedule, number: int = 0) -> list[sb.ScheduledBatch]:
    return [schedule[number * len(schedule) + index] for index in range(len(schedule))]


@settings(max_examples=200)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=80), st.integers(0, 3), st.booleans())
def test_each_sample_comes_once_an_epoch_in_a_bucket_that_holds_it(lengths, seed, shuffle):
    lengths = np.array(lengths)
    fits = lengths <= 16
    if not fits.any():
        return
    schedule = sb.Schedule(lengths, PLAN, seed=seed, shuffle=shuffle, overlong="drop")
    for number in range(2):
        batches = epoch(schedule, number)
        indices = np.concatenate([each.indices for each in batches])
        assert sorted(indices) == np.flatnonzero(fits).tolist()
        for bucket, rows in batches:
            assert 0 < len(rows) <= bucket.batch_size
            assert (lengths[rows] <= bucket.sizes["s"]).all()


def streamed(order: np.ndarray) -> list[tuple[sb.Bucket, list[int]]]:
    """What a stream would emit, full batches only."""
    waiting: dict[sb.Bucket, list[int]] = {bucket: [] for bucket in PLAN.buckets}
    out = []
    for index in order:
        bucket = PLAN.find([int(LENGTHS[index])])
        waiting[bucket].append(int(index))
        if len(waiting[bucket]) == bucket.batch_size:
            out.append((bucket, waiting[bucket]))
            waiting[bucket] = []
    return out


def test_full_batches_stand_in_the_order_in_which_a_stream_fills_them():
    schedule = sb.Schedule(LENGTHS, PLAN, shuffle=False)
    expected = streamed(np.arange(len(LENGTHS)))
    found = [(bucket, rows.tolist()) for bucket, rows in epoch(schedule)]
    assert found[: len(expected)] == expected
    assert len(found) - len(expected) < len(PLAN)


def test_epochs_differ_and_seeds_differ_and_both_are_reproducible():
    def orders(seed):
        return [
            np.concatenate([rows for _, rows in epoch(sb.Schedule(LENGTHS, PLAN, seed=seed), e)]).tolist()
            for e in (0, 1)
        ]

    assert orders(1) == orders(1)
    assert len({tuple(order) for seed in (1, 2) for order in orders(seed)}) == 4


def test_the_order_is_pinned_since_a_run_must_resume_under_another_numpy():
    schedule = sb.Schedule([1, 2, 3, 4, 5, 6, 7, 8], plan_of((8, 8)), seed=3)
    assert [schedule[epoch_number].indices.tolist() for epoch_number in (0, 1)] == [
        [6, 5, 3, 4, 2, 7, 1, 0],
        [5, 0, 1, 2, 7, 4, 3, 6],
    ]


def test_a_fingerprint_is_of_all_that_decides_on_the_batches_and_of_nothing_else():
    options = {"seed": np.int64(3), "shuffle_batches": np.int64(5)}
    mine = sb.Schedule(LENGTHS, PLAN, **options)
    assert json.loads(json.dumps(mine.fingerprint)) == mine.fingerprint
    others = [
        sb.Schedule(LENGTHS, PLAN, **{**options, **changed})
        for changed in (
            {"seed": 4},
            {"shuffle": False},
            {"shuffle_batches": None},
            {"remainder": "drop"},
            {"overlong": "drop"},
            {"window": 50},
        )
    ]
    others.append(sb.Schedule(LENGTHS, plan_of((4, 4), (8, 4), (16, 2)), **options))
    others.append(sb.Schedule(LENGTHS[::-1], PLAN, **options))
    names = ["seed", "shuffle", "shuffle_batches", "remainder", "overlong", "window", "plan", "lengths"]
    for name, other in zip(names, others, strict=True):
        assert [key for key, value in other.fingerprint.items() if value != mine.fingerprint[key]] == [name]
    assert sorted(mine.fingerprint) == sorted([*names, "order"])
    unshuffled = [sb.Schedule(LENGTHS, PLAN, seed=seed, shuffle=False).fingerprint for seed in (1, 2)]
    assert unshuffled[0] == unshuffled[1]
    for index in range(2):
        assert sb.Schedule(list(LENGTHS), PLAN, **options, shard=(index, 2)).fingerprint == mine.fingerprint


def test_batches_are_shuffled_within_windows_and_stay_the_same_batches():
    plain, mixed = (sb.Schedule(np.sort(LENGTHS), PLAN, shuffle=False, shuffle_batches=n) for n in (None, 10))

    def listed(schedule, number):
        return [(bucket, rows.tolist()) for bucket, rows in epoch(schedule, number)]

    expected = listed(plain, 0)
    orders = [listed(mixed, number) for number in range(2)]
    for start in range(0, len(expected), 10):
        for order in orders:
            assert sorted(order[start : start + 10]) == sorted(expected[start : start + 10])
    assert len(mixed) == len(plain)
    assert orders[0] != orders[1]
    assert expected not in orders
    assert mixed.report() == plain.report()
    whole = listed(sb.Schedule(np.sort(LENGTHS), PLAN, shuffle=False, shuffle_batches=10**6), 0)
    assert sorted(whole) == sorted(expected)
    changes = [sum(a[0] != b[0] for a, b in itertools.pairwise(batches)) for batches in (expected, whole)]
    assert changes[0] < 10 < changes[1]


def test_the_order_of_shuffled_batches_is_pinned_too():
    schedule = sb.Schedule([1] * 8, plan_of((1, 1)), seed=3, shuffle=False, shuffle_batches=4)
    assert [int(rows[0]) for number in (0, 1) for _, rows in epoch(schedule, number)] == [
        *(0, 1, 3, 2),
        *(7, 4, 6, 5),
        *(0, 1, 3, 2),
        *(4, 6, 5, 7),
    ]


def test_all_batches_are_pinned_with_the_number_of_their_order():
    """Where this fails, checkpoints of earlier versions mean other batches: raise `_ORDER`, and pin the new ones."""
    schedule = sb.Schedule([i * i % 17 for i in range(203)], PLAN, seed=3, shuffle_batches=5)
    batches = [[bucket.sizes["s"], rows.tolist()] for number in (0, 1) for bucket, rows in epoch(schedule, number)]
    pinned = hashlib.sha256(json.dumps(batches).encode()).hexdigest()[:16]
    assert (schedule.fingerprint["order"], pinned) == (1, "6dd0303849037fed")


def test_leftovers_are_promoted_where_they_fit_entirely():
    def promoted(*rest):
        return [(each.bucket, each.parts) for each in promote(rest, PLAN)]

    assert promoted(2, 2, 0) == [(1, [(1, 0, 2), (0, 0, 2)])]
    assert promoted(3, 2, 1) == [(1, [(1, 0, 2), (0, 1, 3)]), (2, [(2, 0, 1), (0, 0, 1)])]
    assert promoted(4, 2, 1) == [(0, [(0, 0, 4)]), (1, [(1, 0, 2)]), (2, [(2, 0, 1)])]
    assert promoted(1, 1, 1) == [(1, [(1, 0, 1), (0, 0, 1)]), (2, [(2, 0, 1)])]
    assert promoted(0, 1, 1) == [(2, [(2, 0, 1), (1, 0, 1)])]


def test_promotion_needs_a_larger_bucket_on_every_axis():
    layout = sb.Layout({"a": "int32[s]", "b": "int32[t]"})
    plan = sb.BucketPlan(layout, [sb.Bucket((("s", 2), ("t", 9)), 4), sb.Bucket((("s", 9), ("t", 8)), 4)])
    assert [each.bucket for each in promote([1, 1], plan)] == [0, 1]


def test_remainder_drop_leaves_only_full_batches_and_counts():
    schedule = sb.Schedule(LENGTHS, PLAN, remainder="drop")
    batches = epoch(schedule)
    assert all(len(rows) == bucket.batch_size for bucket, rows in batches)
    report = schedule.report()
    assert report.remainder_dropped == len(LENGTHS) - sum(len(rows) for _, rows in batches) > 0
    assert report.seen == len(LENGTHS)


def test_overlong_policies():
    lengths = [3, 40, 5, 17]
    message = (
        r"sample 1 with lengths \{'s': 40\} fits no bucket of the plan .*\(2 samples fit no bucket; this is the first\)"
    )
    with pytest.raises(sb.OverlongError, match=message):
        sb.Schedule(lengths, PLAN)
    dropped = sb.Schedule(lengths, PLAN, overlong="drop")
    assert sorted(np.concatenate([rows for _, rows in epoch(dropped)])) == [0, 2]
    assert (dropped.report().overlong_dropped, dropped.report().truncated) == (2, 0)
    cut = sb.Schedule(lengths, PLAN, overlong="truncate")
    assert sorted(np.concatenate([rows for _, rows in epoch(cut)])) == [0, 1, 2, 3]
    report = cut.report()
    assert (report.overlong_dropped, report.truncated) == (0, 2)
    assert sum(report.real_elements) == 3 + 16 + 5 + 16
    only_full = sb.Schedule([40, 17, 40], plan_of((16, 2)), overlong="truncate", remainder="drop").report()
    assert (only_full.truncated, only_full.remainder_dropped) == (2, 1)


def test_absent_elements_are_in_no_batch():
    table = sb.LengthTable(("s",), np.array([[3], [-1], [5], [-1]], np.int32))
    schedule = sb.Schedule(table, PLAN)
    assert sorted(np.concatenate([rows for _, rows in epoch(schedule)])) == [0, 2]
    assert (schedule.report().absent, schedule.report().seen) == (2, 2)


def test_the_report_counts_what_the_batches_hold():
    schedule = sb.Schedule(LENGTHS, PLAN, seed=5)
    report = schedule.report(epoch=1)
    batches = epoch(schedule, 1)
    for k, bucket in enumerate(PLAN.buckets):
        mine = [rows for each, rows in batches if each == bucket]
        assert report.batches[k] == len(mine)
        assert report.samples[k] == sum(map(len, mine))
        assert report.real_elements[k] == sum(int(LENGTHS[rows].sum()) for rows in mine)
        assert report.padded_elements[k] == len(mine) * bucket.batch_size * bucket.sizes["s"]
    assert report.padding_fraction == pytest.approx(1 - LENGTHS.sum() / sum(report.padded_elements))
    assert str(report).splitlines()[0].startswith(f"203 of 203 samples in {len(schedule)} batches, padding")
    assert report.summary == str(report).splitlines()[0] + ", 0 waiting, 0 dropped, 0 truncated"
    assert str(report).splitlines()[-1] == (
        "0 truncated, 0 dropped as overlong, 0 dropped with the remainder, 0 waiting, 0 batches emitted early, 0 absent"
    )


def test_threads_and_pickles_see_one_order():
    schedule = sb.Schedule(LENGTHS, PLAN, seed=1)
    expected = [rows.tolist() for e in range(3) for _, rows in epoch(schedule, e)]
    fresh = pickle.loads(pickle.dumps(schedule))
    numbers = np.random.default_rng(0).permutation(len(expected)).tolist()
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(numbers, pool.map(lambda index: fresh[index].indices.tolist(), numbers), strict=True))
    assert [found[index] for index in range(len(expected))] == expected


class Counting(sb.Schedule):
    """Notes which epochs and windows are computed."""

    def _compute(self, number, window, first):
        self.__dict__.setdefault("computed", []).append(number if len(self._windows) == 1 else (number, window))
        time.sleep(0.01)  # time for other threads to come
        return super()._compute(number, window, first)


def test_the_epoch_asked_for_last_is_kept_when_another_is_computed():
    schedule = Counting(LENGTHS, PLAN)
    for number in (0, 1, 0, 1, 0, 2, 0, 2, 0):
        schedule[number * len(schedule)]
    assert schedule.computed == [0, 1, 2]
    schedule[1 * len(schedule)]
    assert schedule.computed == [0, 1, 2, 1]
    for number in range(20):
        schedule[number * len(schedule)]
        assert len(schedule._held) <= 2


def test_an_epoch_is_computed_once_however_many_threads_ask():
    schedule = Counting(LENGTHS, PLAN)
    together = threading.Barrier(8)

    def ask(_):
        together.wait()
        return schedule[0].indices.tolist()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert schedule.computed == [0]
    assert all(each == found[0] for each in found)


def test_a_pickle_carries_no_epoch():
    lengths = np.ones(100_000, np.int32)
    schedule = sb.Schedule(lengths, plan_of((4, 8)))
    before = len(pickle.dumps(schedule))
    schedule[0]
    assert len(pickle.dumps(schedule)) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remainder": "keep"}, r"remainder must be one of \('pad', 'drop'\), but got 'keep'"),
        ({"overlong": "cut"}, r"overlong must be one of \('error', 'truncate', 'drop'\), but got 'cut'"),
        ({"seed": -1}, r"the seed must be a non-negative integer below 2\*\*128, but got -1"),
        ({"seed": 1.5}, "the seed must be a non-negative integer .*, but got 1.5"),
        ({"seed": True}, "the seed must be a non-negative integer .*, but got True"),
        (
            {"seed": 2**128},
            "the seed must be a non-negative integer .*, but got 340282366920938463463374607431768211456",
        ),
        ({"shuffle_batches": True}, "shuffle_batches must be a number of batches, or None, but got True"),
        ({"shuffle_batches": 0}, "shuffle_batches must be a number of batches, or None, but got 0"),
        ({"shuffle_batches": "all"}, "shuffle_batches must be a number of batches, or None, but got 'all'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(sb.ScheduleError, match=message):
        sb.Schedule([1], PLAN, **options)


def test_no_batch_is_an_error():
    with pytest.raises(
        sb.ScheduleError, match=r'no batch can be made .* the 1 samples fill no batch \(remainder="drop"\)'
    ):
        sb.Schedule([1], PLAN, remainder="drop")
    with pytest.raises(sb.ScheduleError, match="no batch can be made of this data: it has no samples"):
        sb.Schedule([99], PLAN, overlong="drop")


def test_it_names_itself():
    schedule = sb.Schedule(LENGTHS, PLAN, seed=3, shard=(1, 2))
    assert repr(schedule) == f"Schedule(buckets=3, batches={len(schedule)}, seed=3, shard=1 of 2)"


def test_negative_indices_are_refused():
    with pytest.raises(IndexError, match="a schedule has no batch -1"):
        sb.Schedule([1], PLAN)[-1]


def test_a_schedule_is_a_sequence_of_its_first_epoch():
    plan = sb.plan_buckets([1, 2, 3, 4, 5, 6, 7], max_buckets=2, batch_size=2)
    schedule = sb.Schedule([1, 2, 3, 4, 5, 6, 7], plan)
    assert sorted(np.concatenate([indices for _, indices in schedule]).tolist()) == list(range(7))
    assert len(list(schedule)) == len(schedule)


WINDOW_LENGTHS = np.random.default_rng(1).integers(0, 17, 5_000)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("window", [1, 7, 1_000, 1_100, 4_999, 5_000, 10**9])
def test_windows_give_each_sample_once_an_epoch_and_as_many_batches_in_each(shuffle, window):
    schedule = sb.Schedule(WINDOW_LENGTHS, PLAN, seed=2, shuffle=shuffle, window=window)
    orders = []
    for number in range(2):
        batches = epoch(schedule, number)
        indices = np.concatenate([rows for _, rows in batches])
        assert sorted(indices.tolist()) == list(range(5_000))
        assert all((WINDOW_LENGTHS[rows] <= bucket.sizes["s"]).all() for bucket, rows in batches)
        orders.append(indices.tolist())
    assert (orders[0] != orders[1]) == shuffle
    windows = max(1, -(-5_000 // window))
    partial = sum(len(rows) < bucket.batch_size for bucket, rows in epoch(schedule))
    assert partial <= windows * len(PLAN)
    assert len(schedule._held) <= 2
    if windows == 1:
        plain = sb.Schedule(WINDOW_LENGTHS, PLAN, seed=2, shuffle=shuffle)
        assert orders[0] == np.concatenate([rows for _, rows in epoch(plain)]).tolist()


def test_a_window_in_order_is_a_schedule_of_its_samples():
    """So all that is tested of one holds of the other."""
    schedule = sb.Schedule(WINDOW_LENGTHS, PLAN, shuffle=False, window=1_000)
    alone = [sb.Schedule(WINDOW_LENGTHS[at : at + 1_000], PLAN, shuffle=False) for at in range(0, 5_000, 1_000)]
    expected = [(b, (n * 1_000 + rows).tolist()) for n, each in enumerate(alone) for b, rows in each]
    assert [(bucket, rows.tolist()) for bucket, rows in schedule] == expected
    reports = [each.report() for each in alone]
    found = schedule.report()
    for name in ("batches", "samples", "real_elements"):
        assert getattr(found, name) == tuple(np.sum([getattr(each, name) for each in reports], axis=0))


def test_a_window_is_drawn_from_all_over_the_data_once():
    schedule = sb.Schedule(np.ones(102_400, int), plan_of((1, 1_024)), window=10_240)
    windows = [[], []]
    for number, found in enumerate(windows):
        batches = epoch(schedule, number)
        assert len(batches) == 100
        for start in range(0, 100, 10):
            indices = np.concatenate([rows for _, rows in batches[start : start + 10]])
            share = np.bincount(indices // 10_240, minlength=10)
            assert share.min() > 700  # of 1,024 where all is even
            assert len(np.unique(indices // 10)) == 1_024  # in blocks of 10
            assert (np.diff(indices) == 1).sum() < 100  # which do not stay together
            found.append(frozenset(indices.tolist()))
    assert set(windows[0]) == set(windows[1])
    assert windows[0] != windows[1]


def test_windows_are_read_in_any_order_by_threads_and_pickles():
    schedule = sb.Schedule(WINDOW_LENGTHS, PLAN, seed=1, window=500, shuffle_batches=7)
    expected = [rows.tolist() for e in range(2) for _, rows in epoch(schedule, e)]
    assert [schedule[np.int64(index)].indices.tolist() for index in range(len(expected))] == expected
    fresh = pickle.loads(pickle.dumps(schedule))
    numbers = np.random.default_rng(0).permutation(len(expected))[:400].tolist()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda index: fresh[index].indices.tolist(), numbers))
    assert found == [expected[index] for index in numbers]


def test_a_window_is_computed_once_in_a_pass():
    schedule = Counting(WINDOW_LENGTHS, PLAN, window=1_000)
    for index in range(2 * len(schedule)):
        schedule[index]
        schedule[min(index + 10, 2 * len(schedule) - 1)]  # read ahead
    assert len(schedule.computed) == len(set(schedule.computed)) == 10
    assert [number for number, _ in schedule.computed] == [0] * 5 + [1] * 5


def test_policies_and_absent_elements_count_over_all_windows():
    values = np.where(np.arange(5_000) % 10 == 3, -1, WINDOW_LENGTHS).astype(np.int32)[:, None]
    values[7::100] = 40
    table = sb.LengthTable(("s",), values)
    with pytest.raises(
        sb.OverlongError, match=r"sample 7 with lengths .*\(50 samples fit no bucket; this is the first\)"
    ):
        sb.Schedule(table, PLAN, window=600)
    for overlong, remainder in itertools.product(("drop", "truncate"), ("pad", "drop")):
        whole, parts = (
            sb.Schedule(table, PLAN, overlong=overlong, remainder=remainder, window=window) for window in (None, 600)
        )
        report = parts.report(1)
        assert (report.absent, report.overlong_dropped) == (500, 50 if overlong == "drop" else 0)
        assert report.seen == whole.report().seen == (5_000 - 500)
        assert (report.remainder_dropped > 0) == (remainder == "drop")
        if remainder == "pad":
            assert report.truncated == (50 if overlong == "truncate" else 0)
        taken = np.concatenate([rows for _, rows in parts])
        assert len(set(taken.tolist())) == len(taken) == sum(report.samples)
        assert values[taken].min() >= 0


def test_the_order_of_windows_is_pinned_too():
    schedule = sb.Schedule([1] * 9, plan_of((1, 1)), seed=3, window=3)
    found = [[int(schedule[e * 9 + i].indices[0]) for i in range(9)] for e in (0, 1)]
    assert found == [[0, 7, 3, 4, 8, 1, 2, 5, 6], [7, 3, 0, 4, 8, 1, 6, 5, 2]]


@pytest.mark.parametrize("window", [0, True, 1.5, "all"])
def test_a_window_is_a_number_of_samples(window):
    with pytest.raises(
        sb.ScheduleError, match=f"window must be a number of samples, or None for all, but got {window!r}"
    ):
        sb.Schedule([1], PLAN, window=window)
