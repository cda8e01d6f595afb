"""The command `shapebucket`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from shapebucket.buckets import BucketPlan
from shapebucket.errors import LayoutError, LengthsError, PlanError, ShapebucketError
from shapebucket.histogram import LengthHistogram
from shapebucket.layout import Layout
from shapebucket.lengths import LengthTable, load_lengths
from shapebucket.measuring import measure
from shapebucket.planner import Rule, plan_buckets, plan_by_rule
from shapebucket.sources import names_samples, open_samples
from shapebucket.tables import render

_SOURCES = """\
SOURCE is one of
  FILE.npy, .npz          an array of lengths; or one array for each axis
  FILE.csv, .parquet      a column for each axis; a .csv names them in its first line
  FILE.npz                what `shapebucket measure --out` wrote
  tfds:NAME/SPLIT         a TFDS data set prepared as array_record (--data-dir says where)
  FILE.array_record       ArrayRecord files ('*.array_record' for several), with --lengths
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, or 2 with a message for input that cannot be used."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ShapebucketError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # whoever reads has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print("\n".join([f"shapebucket: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print("\n".join(["shapebucket: interrupted", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 130
    return 0


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults that say something, and keeps the lines of what follows the options."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("shapebucket", description="Bucket shapes for variable-length data in JAX.")
    parser.add_argument("--version", action="version", version=version("shapebucket"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    measuring = _command(commands, "measure", "take the lengths of every sample of a data set", _measure, _SOURCES)
    _add_source(measuring)
    measuring.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="keep the lengths there, for plan; an interrupted run goes on",
    )

    plan = _command(commands, "plan", "choose bucket shapes for a data set or a file of lengths", _plan, _SOURCES)
    _add_source(plan)
    _add_planning(plan)
    plan.add_argument("--out", type=Path, metavar="FILE", help="write the plan, for BucketPlan.load")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw lengths and buckets, for one or two axes")

    compare = _command(commands, "compare", "put the plan beside those of other projects' rules", _compare, _SOURCES)
    _add_source(compare)
    _add_planning(compare)
    compare.add_argument("--plot", type=Path, metavar="FILE", help="draw padding against the number of buckets")

    demo = _command(commands, "demo", "train a small model on bucketed text, and measure what it gains", _demo)
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "shapebucket"
    demo.add_argument(
        "--out", type=Path, default=Path("shapebucket-demo"), metavar="DIR", help="for report and pictures"
    )
    demo.add_argument("--data-dir", type=Path, default=cache, metavar="DIR", help="the TFDS data set; reused")
    demo.add_argument("--quick", action="store_true", help="a part of the corpus and few steps: under a minute")
    demo.add_argument("--steps", type=_positive, metavar="N", help="steps of the bucketed run (120; 24 with --quick)")
    demo.add_argument("--max-buckets", type=_positive, default=8, metavar="K", help="buckets of the plan")
    demo.add_argument("--token-budget", type=_positive, default=4096, metavar="N", help="padded tokens of a batch")
    return parser


def _command(
    commands: Any, name: str, does: str, run: Callable[[argparse.Namespace], None], epilog: str | None = None
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=does, description=f"{does[0].upper()}{does[1:]}.", epilog=epilog, formatter_class=_Help
    )
    parser.set_defaults(run=run)
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say where lengths come from."""
    parser.add_argument("source", metavar="SOURCE", help="see below")
    parser.add_argument(
        "--layout",
        type=_layout,
        metavar="JSON",
        help='which axes vary: \'{"tokens": "int32[s]"}\'; inferred from samples if not given; a plan from a file of lengths '
        "needs it, with dtypes, if a loader is to take the plan",
    )
    parser.add_argument(
        "--columns",
        type=_names,
        metavar="A,B",
        help="the columns of an .npz, .csv or .parquet that are axes; all if not given",
    )
    parser.add_argument(
        "--lengths",
        type=_function,
        metavar="MODULE:FUNCTION",
        help="gives the lengths of a record (bytes) or of a TFDS sample as TFDS gives it: a number, or a dict by axis; found "
        "from the current directory too. Without it, TFDS text is measured in UTF-8 bytes",
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where TFDS data sets are (TFDS' own default)")
    parser.add_argument(
        "--workers", type=_number, default=0, metavar="N", help="processes to read samples with; 0: this one"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def _add_planning(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of everything that plans."""
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


def _names(text: str) -> list[str]:
    """Reads names with commas between."""
    return [name.strip() for name in text.split(",")]


def _function(text: str) -> Callable[[Any], Any]:
    """Imports a function that is given as `module:function`."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"must be MODULE:FUNCTION, but got {text!r}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # an installed command has its own folder there
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"cannot import {text!r}: {error}") from error
    if not callable(function):
        raise argparse.ArgumentTypeError(f"{text!r} is {type(function).__name__}, no function")
    return function


def _number(text: str, least: int = 0) -> int:
    """Reads a whole number."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, but got {text!r}")
    return number


def _positive(text: str) -> int:
    """Reads a whole number of at least 1."""
    return _number(text, 1)


def _lengths(options: argparse.Namespace, *, out: Path | None = None) -> LengthTable | LengthHistogram:
    """Reads or measures the lengths of the source; measured ones are kept in a file, if one is given.

    Raises:
        LengthsError: also for options that mean nothing for the source.
    """
    if not names_samples(options.source):
        given = {"--lengths": options.lengths, "--workers": options.workers, "--data-dir": options.data_dir}
        if idle := [name for name, value in given.items() if value]:
            raise LengthsError(f"{', '.join(idle)} mean nothing for a file of lengths, {options.source!r}")
        return load_lengths(options.source, columns=options.columns)
    if options.columns:
        raise LengthsError("--columns is for files of lengths; --layout or --lengths says what is measured of samples")
    samples = open_samples(
        options.source, data_dir=options.data_dir, layout=options.layout, raw=options.lengths is not None
    )
    if options.lengths is None and len(samples) and isinstance(samples[0], bytes):
        raise LengthsError("ArrayRecord files hold bytes: say with --lengths MODULE:FUNCTION how long a record is")
    layout = options.layout or getattr(samples, "layout", None)
    return measure(samples, layout, length_fn=options.lengths, workers=options.workers, path=out)


def _measure(options: argparse.Namespace) -> None:
    lengths = _lengths(options, out=options.out)
    if options.out and not names_samples(options.source):
        if options.out.exists():
            raise LengthsError(f"there is a file {str(options.out)!r} already: delete it, or give another one")
        lengths.save(options.out)
    histogram = lengths if isinstance(lengths, LengthHistogram) else lengths.histogram
    if options.json:
        print(json.dumps({"samples": len(histogram), "absent": histogram.absent, "axes": histogram.summary()}))
        return
    print(histogram)
    if options.out:
        print(f"kept in {options.out}")


def _plan(options: argparse.Namespace) -> None:
    lengths = _lengths(options)
    plan = plan_buckets(lengths, **_planning(options))
    if options.out:
        if options.out.exists() and options.out.samefile(options.source):
            raise PlanError(f"--out {str(options.out)!r} is the file of lengths itself")
        plan.save(options.out)
    print(json.dumps(plan.summary()) if options.json else plan)
    if options.plot:
        from shapebucket.plots import plot_plan

        _draw(plot_plan(lengths, plan), options.plot)


def _compare(options: argparse.Namespace) -> None:
    lengths, arguments = _lengths(options), _planning(options)
    ours = plan_buckets(lengths, **arguments)
    rules: dict[str, BucketPlan] = {}
    left_out: dict[str, str] = {}
    for rule in get_args(Rule):
        try:
            rules[rule] = plan_by_rule(rule, lengths, **arguments)
        except PlanError as error:
            left_out[rule] = str(error)
    if options.plot:
        from shapebucket.plots import plot_curve

        most = max(map(len, [ours, *rules.values()]))
        arguments["max_buckets"] = most
        _draw(plot_curve(plan_buckets(lengths, **arguments), rules), options.plot)
    facts = _side_by_side({"shapebucket": ours, **rules})
    if options.json:
        print(json.dumps({"rules": facts, "left_out": left_out}))
        return
    rows = [
        [rule, str(each["buckets"]), f"{each['padding_fraction']:.1%}", f"{each['computed']:.2f} ×"]
        for rule, each in sorted(facts.items(), key=lambda item: item[1]["padding_fraction"])
    ]
    title = f"rules with at most {options.max_buckets} buckets, where they heed a number"
    print(render(title, ["rule", "buckets", "padding", "computed"], rows, text=1))
    if left_out:
        print(f"left out, for other numbers of axes: {', '.join(left_out)}")


def _draw(figure: Any, path: Path) -> None:
    """Writes a picture to a file, in the format of its name."""
    known = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise PlanError(
            f"a picture cannot be drawn to {str(path)!r}: the name must end in one of {', '.join(sorted(known))}"
        )
    figure.savefig(path, dpi=150)


def _side_by_side(plans: Mapping[str, BucketPlan]) -> dict[str, dict[str, Any]]:
    """Returns what each plan does, and the elements it computes on over those of the first."""
    reports = {name: plan.planned for name, plan in plans.items() if plan.planned is not None}
    first = sum(next(iter(reports.values())).padded_elements)
    return {
        name: {
            "buckets": len(plans[name]),
            "padding_fraction": report.padding_fraction,
            "computed": sum(report.padded_elements) / first,
        }
        for name, report in reports.items()
    }


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
