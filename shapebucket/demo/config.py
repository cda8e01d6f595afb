"""The demo's options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoConfig:
    """Everything that decides what the demo does.

    Attributes:
        out: where report.json and the pictures go.
        data_dir: where the TFDS data set lives; reused by the next run.
        quick: whether to take a part of the corpus and fewer steps.
        max_buckets: buckets of the plan.
        token_budget: padded tokens a batch may hold, in every run.
        steps: steps of the bucketed run; the others, which are slower, take a part of them.
        max_length: samples are cut there, in words.
        seed: of data order and model.
    """

    out: Path
    data_dir: Path
    quick: bool = False
    max_buckets: int = 8
    token_budget: int = 4096
    steps: int = 120
    max_length: int = 512
    seed: int = 0
    vocabulary: int = 4096
    width: int = 64
    layers: int = 2
    heads: int = 4
    learning_rate: float = 2e-3
