import pickle

import pytest

import shapebucket as sb
from shapebucket import errors

EVERY = [
    errors.LayoutError("problem", path="a/b", sample=3),
    errors.LengthsError("problem"),
    errors.PlanError("problem"),
    errors.OverlongError({"s": 5}, "[2 × s=4]", sample=1, count=2),
    errors.ScheduleError("problem"),
    errors.ProcessError("problem"),
    errors.StateError("problem"),
    errors.StepError("problem"),
    errors.SignatureError("problem", ["tokens: this received, that expected"]),
    errors.DriftError("problem", ["state: this taken, that returned"]),
    errors.BudgetError("problem"),
    errors.RecompileError("problem", "train_step", ["batch axis 1: 32 → 40"]),
    errors.RecordError(7, "RuntimeError: corrupted", ("data.array_record", 3)),
    errors.MissingExtraError("matplotlib", "plots"),
]


def test_every_error_is_listed_here_and_is_a_shapebucket_error():
    kinds = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ShapebucketError)
    }
    assert {type(error) for error in EVERY} == kinds - {errors.ShapebucketError}
    assert {kind.__name__ for kind in kinds} <= set(sb.__all__)


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_errors_survive_the_way_from_a_worker_process(error):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    assert getattr(back, "msg", None) == getattr(error, "msg", None)
