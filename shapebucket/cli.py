"""The command `shapebucket`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from shapebucket.buckets import BucketPlan
from shapebucket.errors import LayoutError, PlanError, ShapebucketError
from shapebucket.layout import Layout
from shapebucket.lengths import LengthTable
from shapebucket.planner import Rule, plan_buckets, plan_by_rule
from shapebucket.tables import render


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, or 2 with a message for input that cannot be used."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ShapebucketError, OSError) as error:
        print(f"shapebucket: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("shapebucket", description="Bucket shapes for variable-length data in JAX.")
    parser.add_argument("--version", action="version", version=version("shapebucket"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser(
        "plan",
        help="choose bucket shapes from a file of lengths",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_planning(plan)
    plan.add_argument("--out", type=Path, metavar="FILE", help="write the plan, for BucketPlan.load")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw lengths and buckets, for one or two axes")
    plan.set_defaults(run=_plan)

    compare = commands.add_parser(
        "compare",
        help="put the plan beside those of other projects' rules",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_planning(compare)
    compare.set_defaults(run=_compare)

    demo = commands.add_parser(
        "demo",
        help="train a small model on bucketed text, and measure what it gains",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "shapebucket"
    demo.add_argument(
        "--out", type=Path, default=Path("shapebucket-demo"), metavar="DIR", help="for report and pictures"
    )
    demo.add_argument("--data-dir", type=Path, default=cache, metavar="DIR", help="the TFDS data set; reused")
    demo.add_argument("--quick", action="store_true", help="a part of the corpus and few steps: under a minute")
    demo.add_argument("--steps", type=_positive, metavar="N", help="steps of the bucketed run (120; 24 with --quick)")
    demo.add_argument("--max-buckets", type=_positive, default=8, metavar="K", help="buckets of the plan")
    demo.add_argument("--token-budget", type=_positive, default=4096, metavar="N", help="padded tokens of a batch")
    demo.set_defaults(run=_demo)
    return parser


def _add_planning(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of everything that plans."""
    parser.add_argument("file", type=Path, help=".npy with one array of lengths, or .npz with one for each axis")
    parser.add_argument(
        "--layout",
        type=_layout,
        metavar="JSON",
        help='which axes vary, with dtypes if a loader is to take the plan: \'{"tokens": "int32[s]"}\'',
    )
    parser.add_argument("--max-buckets", type=_positive, default=8, metavar="K", help="the most buckets")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--token-budget", type=_positive, metavar="N", help="padded elements a batch may hold (or --batch-size)"
    )
    size.add_argument("--batch-size", type=_positive, metavar="B", help="rows of every bucket (1 if neither is given)")
    parser.add_argument("--multiple-of", type=_positive, default=1, metavar="M", help="every size is a multiple of it")
    parser.add_argument(
        "--max-size", type=_positive, metavar="L", help="no bucket is larger; longer samples count as cut"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def _planning(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `plan_buckets` and `plan_by_rule`."""
    neither = options.batch_size is None and options.token_budget is None
    return {
        "layout": options.layout,
        "max_buckets": options.max_buckets,
        "token_budget": options.token_budget,
        "batch_size": 1 if neither else options.batch_size,
        "multiple_of": options.multiple_of,
        "max_size": options.max_size,
    }


def _layout(text: str) -> Layout:
    """Reads a layout."""
    try:
        return Layout(json.loads(text))
    except (json.JSONDecodeError, LayoutError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    """Reads a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but got {text!r}")
    return number


def _plan(options: argparse.Namespace) -> None:
    lengths = LengthTable.load(options.file)
    plan = plan_buckets(lengths, **_planning(options))
    if options.out:
        plan.save(options.out)
    if options.plot:
        from shapebucket.plots import plot_plan

        plot_plan(LengthTable.of(lengths, plan.layout.axes), plan).savefig(options.plot, dpi=150)
    print(json.dumps(plan.summary()) if options.json else plan)


def _compare(options: argparse.Namespace) -> None:
    lengths, arguments = LengthTable.load(options.file), _planning(options)
    plans: dict[str, BucketPlan] = {"shapebucket": plan_buckets(lengths, **arguments)}
    left_out: dict[str, str] = {}
    for rule in get_args(Rule):
        try:
            plans[rule] = plan_by_rule(rule, lengths, **arguments)
        except PlanError as error:
            left_out[rule] = str(error)
    best = plans["shapebucket"].summary()["padding_fraction"]
    facts = {
        rule: {
            "buckets": len(plan),
            "padding_fraction": (padding := plan.summary()["padding_fraction"]),
            "computed": (1 - best) / (1 - padding),
        }
        for rule, plan in plans.items()
    }
    if options.json:
        print(json.dumps({"rules": facts, "left_out": left_out}))
        return
    rows = [
        [rule, str(each["buckets"]), f"{each['padding_fraction']:.1%}", f"{each['computed']:.2f} ×"]
        for rule, each in sorted(facts.items(), key=lambda item: item[1]["padding_fraction"])
    ]
    title = f"rules with at most {options.max_buckets} buckets, where they heed a number"
    print(render(title, ["rule", "buckets", "padding", "computed"], rows, text=1))
    for rule, why in left_out.items():
        print(f"left out: {rule}: {why}")


def _demo(options: argparse.Namespace) -> None:
    from shapebucket.demo.config import DemoConfig
    from shapebucket.demo.run import run_demo

    steps = options.steps or (24 if options.quick else 120)
    config = DemoConfig(
        out=options.out,
        data_dir=options.data_dir,
        quick=options.quick,
        max_buckets=options.max_buckets,
        token_budget=options.token_budget,
        steps=steps,
    )
    run_demo(config)
