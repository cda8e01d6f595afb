import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted(
    path
    for path in (Path(__file__).parent.parent / "benchmarks").glob("*.py")
    if path.stem not in ("harness", "datasets")
)


@pytest.mark.slow
@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_the_benchmark_runs_and_writes_its_results(path, tmp_path):
    file = tmp_path / "results.json"
    command = [sys.executable, str(path), "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    content = json.loads(file.read_text())
    assert content["environment"]["quick"] is True
    for each in content["results"]:
        assert each.keys() == {"metric", "value", "spread", "target", "better"}
        assert each["spread"][0] <= each["value"] <= each["spread"][1]
        assert each["metric"] in done.stdout


def test_there_are_benchmarks():
    assert {path.stem for path in BENCHMARKS} <= {
        "padding",
        "planner",
        "loader",
        "step",
        "memory",
        "end_to_end",
        "scale",
    }
    assert BENCHMARKS
