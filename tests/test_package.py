import subprocess
import sys

import pytest

import shapebucket as sb

HEAVY = ("jax", "grain", "tensorflow", "tensorflow_datasets", "apache_beam", "matplotlib")


def heavy_modules_after(code: str) -> list[str]:
    program = f"{code}\nimport sys\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_import_and_planning_load_nothing_heavy():
    code = """
import numpy as np
import shapebucket as sb
data = [{"x": np.zeros(n, np.float32)} for n in (1, 5, 9)]
lengths = sb.measure(data, sb.Layout({"x": "s"}))
plan = sb.plan_buckets(lengths, max_buckets=2, batch_size=2)
str(plan), sb.Schedule(lengths, plan)[0], sb.pad(data[:1], plan.buckets[0], plan)
"""
    assert heavy_modules_after(code) == []
    assert heavy_modules_after("import shapebucket; shapebucket.BucketedMapDataset") != []


def test_loading_and_step_do_not_import_each_other():
    program = "import sys, shapebucket.{}; print(*[m for m in sys.modules if m.startswith('shapebucket.{}')])"
    for one, other in (("loading", "step"), ("step", "loading")):
        done = subprocess.run(
            [sys.executable, "-c", program.format(one, other)], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == []


def test_every_public_name_is_there():
    for name in sb.__all__:
        assert getattr(sb, name) is not None
    assert dir(sb) == sorted(sb.__all__)
    with pytest.raises(AttributeError, match="module 'shapebucket' has no attribute 'nothing'"):
        _ = sb.nothing


def test_a_missing_package_names_the_extra():
    program = """
import sys
sys.modules["matplotlib"] = None
try:
    import shapebucket.plots
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("matplotlib is not installed; get it with: pip install 'shapebucket[plots]'")
