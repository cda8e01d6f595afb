import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapebucket import ordering


def by_sorting(count: int, seed: int, epoch: int) -> np.ndarray:
    keys = np.random.PCG64DXSM(np.random.SeedSequence(seed, spawn_key=(epoch, 0))).random_raw(count)
    return np.argsort(keys, kind="stable")


@pytest.mark.parametrize("count", [0, 1, 2, 1000, 70_000])
@pytest.mark.parametrize("chunk", [1 << 20, 4096])
def test_a_permutation_is_the_order_of_its_random_keys(count, chunk, monkeypatch):
    """Whether it is sorted at once or dealt into groups first."""
    monkeypatch.setattr(ordering, "_CHUNK", chunk)
    for seed, epoch in ((0, 0), (0, 1), (7, 3)):
        found = ordering.permutation(count, seed, epoch)
        np.testing.assert_array_equal(found, by_sorting(count, seed, epoch))
        assert found.dtype == np.int32


def test_no_seed_has_the_orders_of_another():
    """Nor of its batches: as lists of words, seeds that are 2³² apart had shifted epochs of the same orders."""
    seeds = [0, 1, 5, 5 + 2**32, 5 + 2 * 2**32, 5 + 2**64, 5 + 2**96 + 2**32, 2**128 - 1]
    orders = {
        tuple(ordering.permutation(50, seed, epoch, purpose=purpose).tolist())
        for seed in seeds
        for epoch in (0, 1, 2, 3, 2**32, 2**32 + 1)
        for purpose in (0, 1)
    }
    assert len(orders) == len(seeds) * 6 * 2


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=60), st.sampled_from([0, 8])
)
def test_keys_that_agree_in_many_bits_are_sorted_too(parts, leading):
    """In the bits that the radix passes see, and in those that they do not."""
    keys = [((first << 48) + (second << 32) + third) << (0 if leading == 0 else 2) for first, second, third in parts]
    keys = np.array(keys, np.uint64)
    np.testing.assert_array_equal(ordering._by_key(keys, leading), np.argsort(keys, kind="stable"))


@pytest.mark.parametrize("chunk", [1 << 20, 7])
def test_by_group_is_a_stable_sort(chunk, monkeypatch):
    monkeypatch.setattr(ordering, "_CHUNK", chunk)
    groups = np.random.default_rng(0).integers(0, 5, 200).astype(np.int16)
    sizes = np.bincount(groups, minlength=6)
    found = ordering.by_group(200, lambda part: groups[part], sizes)
    np.testing.assert_array_equal(found, np.argsort(groups, kind="stable"))


def test_indices_are_as_small_as_they_can_be():
    assert ordering.index_dtype(2**31 - 1) == np.int32
    assert ordering.index_dtype(2**31) == np.int64
