"""`python -m shapebucket.watch train.py ARGS`: runs a script, untouched, and says at the end what compiled, and why."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

from shapebucket.watch.recording import CompileWatch, watch_compiles


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command. The script's own exit, error or interruption goes on its way, after the diagnosis."""
    options = _parser().parse_args(arguments)
    module, script = options.module is not None, options.module or options.script
    if not script:
        _parser().error("a script, or -m and a module, is needed")
    if not module and not Path(script[0]).exists():
        _parser().error(f"cannot read the script {script[0]!r}: there is none")
    watch = watch_compiles(count_calls=True)
    previous = signal.signal(signal.SIGTERM, _terminated)
    try:
        with watch:
            _run(script, module)
    except _Terminated:
        _tell(watch, options.json)
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)  # so that whoever waits for the process sees what ended it
    except Exception as error:
        _tell(watch, options.json)
        error = error.with_traceback(_of_the_script(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)  # what Python itself would do
        sys.exit(1)
    except BaseException:
        _tell(watch, options.json)
        raise
    else:
        _tell(watch, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m shapebucket.watch",
        usage="%(prog)s [--json FILE] (SCRIPT | -m MODULE) [ARGUMENTS ...]",
        description="Run a script, and say at the end what JAX compiled, why, and what to do about it.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the diagnosis there as well")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


class _Terminated(BaseException):
    """SIGTERM came, and the script has no handler of its own."""


def _terminated(_: int, __: FrameType | None) -> None:
    raise _Terminated


def _run(script: Sequence[str], module: bool) -> None:
    """Runs a script or a module, with `sys.argv` and `sys.path` as Python itself would set them."""
    sys.argv = list(script)
    if module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(script[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script[0]).resolve().parent)
        runpy.run_path(script[0], run_name="__main__")


def _of_the_script(traceback: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the frames that ran the script."""
    while traceback is not None and (
        traceback.tb_frame.f_code.co_filename == __file__ or traceback.tb_frame.f_globals.get("__name__") == "runpy"
    ):
        traceback = traceback.tb_next
    return traceback


def _tell(watch: CompileWatch, path: Path | None) -> None:
    sys.stdout.flush()
    diagnosis = watch.diagnose()
    print(f"\nshapebucket.watch: {diagnosis}", flush=True)
    if path is not None:
        path.write_text(json.dumps(diagnosis.to_json(), indent=1) + "\n")


if __name__ == "__main__":
    main()
