import json
import re

import numpy as np
import pytest

import shapebucket as sb
from shapebucket.cli import main


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(1, 200, 1000))
    return path


def test_plan_prints_one_json_object(lengths_file, capsys):
    assert main(["plan", str(lengths_file), "--max-buckets", "4", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert len(summary["buckets"]) == 4
    assert summary["buckets"][-1]["axes"] == {"s": 199}
    assert summary["lower_bound"] == summary["padding_fraction"] < summary["pad_to_max"]


def test_plan_takes_several_axes_and_writes_a_plan(tmp_path, capsys):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "pairs.npz", src=rng.integers(1, 50, 500), tgt=rng.integers(1, 50, 500))
    out = tmp_path / "plan.json"
    arguments = ["plan", str(tmp_path / "pairs.npz"), "--token-budget", "1000", "--multiple-of", "8", "--out", str(out)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip() == str(sb.BucketPlan.load(out))
    assert sb.BucketPlan.load(out).layout.axes == ("src", "tgt")


def test_compare_puts_the_rules_side_by_side(lengths_file, capsys):
    assert main(["compare", str(lengths_file), "--max-buckets", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rules"]["shapebucket"] == {
        "buckets": 4,
        "padding_fraction": pytest.approx(0.2, abs=0.05),
        "computed": 1,
    }
    assert result["rules"]["constant_width"]["computed"] >= 1
    assert result["left_out"] == {
        "nemo_2d": "nemo_2d is for two axes, but the layout has 1",
        "quantile_grid": "quantile_grid is for several axes; with one it is equal_count",
    }
    assert main(["compare", str(lengths_file), "--max-buckets", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("rules with at most 4 buckets")
    assert "left out, for other numbers of axes: nemo_2d, quantile_grid" in printed


def test_options_that_mean_nothing_and_files_in_the_way_are_refused(lengths_file, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    here = str(lengths_file)
    for arguments, message in (
        (["plan", here, "--columns", "s"], "columns cannot be chosen from an .npy file"),
        (
            ["plan", here, "--workers", "2", "--lengths", "json:dumps"],
            "--lengths, --workers mean nothing for a file of lengths",
        ),
        (["measure", "x.array_record", "--columns", "s"], "--columns is for files of lengths"),
        (["measure", here, "--out", str(tmp_path / "notes.txt")], "there is a file '.*notes.txt' already"),
        (["plan", here, "--out", here], "--out '.*' is the file of lengths itself"),
        (
            ["plan", here, "--plot", str(tmp_path / "plan.xyz")],
            "a picture cannot be drawn to .*: the name must end in one of",
        ),
        (["plan", here, "--batch-size", "9" * 20], "batch_size must be a whole number of at least 1, but got 999"),
    ):
        assert main(arguments) == 2
        assert re.search(message, capsys.readouterr().err), message
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_empty_samples_can_be_compared(tmp_path, capsys):
    np.save(tmp_path / "zeros.npy", np.zeros(5, int))
    assert main(["compare", str(tmp_path / "zeros.npy")]) == 0
    assert "100.0%" in capsys.readouterr().out


def test_pictures_are_drawn(lengths_file, tmp_path):
    assert main(["plan", str(lengths_file), "--plot", str(tmp_path / "plan.png")]) == 0
    assert main(["compare", str(lengths_file), "--plot", str(tmp_path / "curve.png")]) == 0
    for name in ("plan.png", "curve.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_measure_turns_any_file_of_lengths_into_one_that_plan_takes(tmp_path, capsys):
    (tmp_path / "lengths.csv").write_text("s,t,name\n3,4,a\n5,9,b\n")
    arguments = ["measure", str(tmp_path / "lengths.csv"), "--columns", "s, t", "--out", str(tmp_path / "kept")]
    assert main(arguments) == 0
    assert "2 samples, 2 distinct shapes" in capsys.readouterr().out
    assert main(["plan", str(tmp_path / "kept"), "--json"]) == 0
    assert [each["axes"] for each in json.loads(capsys.readouterr().out)["buckets"]] == [
        {"s": 3, "t": 4},
        {"s": 5, "t": 9},
    ]


def test_a_histogram_can_be_planned_from(tmp_path, capsys):
    sb.LengthTable.of([1, 2, 2], ["s"]).histogram.save(tmp_path / "histogram.npz")
    assert main(["measure", str(tmp_path / "histogram.npz")]) == 0
    assert main(["plan", str(tmp_path / "histogram.npz"), "--plot", str(tmp_path / "plan.png")]) == 0
    assert "over 3 samples" in capsys.readouterr().out


def test_help_leads_to_each_command(capsys):
    for command in ("measure", "plan", "compare"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert "tfds:NAME/SPLIT" in shown
        assert "None" not in shown


def test_a_layout_makes_a_plan_that_a_loader_takes(tmp_path, capsys):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "images.npz", h=rng.integers(1, 50, 500), w=rng.integers(1, 50, 500))
    out = tmp_path / "plan.json"
    arguments = ["plan", str(tmp_path / "images.npz"), "--batch-size", "4", "--out", str(out)]
    assert main([*arguments, "--layout", '{"image": "uint8[h w 3]"}']) == 0
    plan = sb.BucketPlan.load(out)
    assert plan.batch_spec(plan.buckets[0])["image"].dtype == np.uint8
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--layout", '{"image": "h,w"}'])
    assert "dimensions are separated by spaces" in capsys.readouterr().err


def test_input_that_cannot_be_used_is_a_message_and_status_2(tmp_path, lengths_file, capsys):
    assert main(["plan", str(tmp_path / "nowhere.npy")]) == 2
    assert "shapebucket: [Errno 2] No such file or directory" in capsys.readouterr().err
    assert main(["plan", str(lengths_file), "--token-budget", "100"]) == 2
    message = (
        r"shapebucket: a token_budget of 100 elements cannot hold 1 row of \{'s': \d+\} \(\d+ elements each\): raise it"
    )
    assert re.match(message, capsys.readouterr().err)
    assert main(["plan", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(lengths_file), "--batch-size", "0"])
    assert "argument --batch-size: must be a whole number of at least 1, but got '0'" in capsys.readouterr().err
