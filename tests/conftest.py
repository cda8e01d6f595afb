import grain  # noqa: F401  (a data set made in a test must not pay for the import)
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
