import gc
import json

import grain
import jax
import numpy as np
import pytest
from hypothesis import settings

import shapebucket as sb

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def make_pairs(count: int, seed: int = 0, longest: int = 40) -> list[dict]:
    """Pairs of random lengths whose values tell the sample and the position."""
    rng = np.random.default_rng(seed)
    return [
        {
            "src": (1000 * number + np.arange(rng.integers(1, longest + 1))).astype(np.int32),
            "tgt": rng.standard_normal(rng.integers(1, longest + 1)).astype(np.float32),
            "label": np.int32(number),
        }
        for number in range(count)
    ]


def make_tokens(count: int, seed: int = 0, longest: int = 40) -> list[dict]:
    """One-axis samples; the first token is the sample's number."""
    rng = np.random.default_rng(seed)
    return [
        {"tokens": np.concatenate([[number], np.arange(rng.integers(0, longest))]).astype(np.int32)}
        for number in range(count)
    ]


def assert_equal(found, expected):
    """Two lists of batches."""
    assert len(found) == len(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_resumes_everywhere(dataset):
    """Restores a fresh iterator after every batch, through JSON, and compares all that follows."""
    iterator = iter(dataset)
    states, batches = [json.dumps(iterator.get_state())], []
    for batch in iterator:
        batches.append(batch)
        states.append(json.dumps(iterator.get_state()))
    assert batches
    for number, state in enumerate(states):
        fresh = iter(dataset)
        fresh.set_state(json.loads(state))
        assert_equal(list(fresh), batches[number:])


def end(iterator):
    """Closes an iterator with worker processes, and frees what Grain leaves of it.

    At the end of the data an error of Grain's holds its own frame, and so the workers' semaphores. A collection that comes while
    another worker's are registered has CPython's resource tracker warn.
    """
    iterator.close()
    gc.collect()


@pytest.fixture
def pairs() -> list[dict]:
    return make_pairs(100)


@pytest.fixture
def pair_plan(pairs) -> sb.BucketPlan:
    lengths = sb.measure(pairs, sb.Layout({"src": "s", "tgt": "t", "label": ""}), progress=False)
    return sb.plan_buckets(lengths, max_buckets=4, token_budget=256, multiple_of=4)


@pytest.fixture
def tokens() -> list[dict]:
    return make_tokens(100)


@pytest.fixture
def token_lengths(tokens) -> sb.LengthTable:
    return sb.measure(tokens, sb.Layout({"tokens": "s"}), progress=False)


@pytest.fixture
def token_plan(token_lengths) -> sb.BucketPlan:
    return sb.plan_buckets(token_lengths, max_buckets=4, token_budget=128)


@pytest.fixture
def source(tokens) -> grain.MapDataset:
    return grain.MapDataset.source(tokens)


@pytest.fixture
def scheduled(source, token_plan, token_lengths) -> sb.BucketedMapDataset:
    return sb.BucketedMapDataset(source, token_plan, token_lengths, seed=1)
