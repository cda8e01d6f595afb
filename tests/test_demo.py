import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("tensorflow_datasets")

COMMAND = [sys.executable, "-m", "shapebucket", "demo", "--quick", "--steps", "16"]
RUN_KEYS = {
    "name",
    "padding_fraction",
    "real_tokens_per_s",
    "steps",
    "compiles",
    "compiles_after_start",
    "executables",
    "rss_mb",
    "first_loss",
    "last_loss",
}


@pytest.mark.slow
def test_the_demo_does_what_the_readme_says(tmp_path):
    """The whole path on real text: a TFDS data set, 8 buckets, 8 executables, none after the start."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    arguments = ["--out", str(tmp_path / "out"), "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    runs = {run["name"]: run for run in report["runs"]}
    assert list(runs) == ["bucketed", "pad_to_max", "batch_max"]
    assert all(run.keys() >= RUN_KEYS for run in runs.values())
    bucketed = runs["bucketed"]
    assert bucketed["compiles"] == bucketed["executables"] == len(report["plan"]["buckets"]) == 8
    assert bucketed["compiles_after_start"] == 0
    assert bucketed["last_loss"] < bucketed["first_loss"]
    assert bucketed["padding_fraction"] < runs["batch_max"]["padding_fraction"] < runs["pad_to_max"]["padding_fraction"]
    assert runs["pad_to_max"]["compiles_after_start"] == 1
    assert runs["batch_max"]["compiles_after_start"] == runs["batch_max"]["executables"] > 1
    for picture in ("lengths.png", "throughput.png"):
        assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")
    assert "shapebucket" in done.stdout
    assert list((tmp_path / "data").rglob("*.array_record*"))
