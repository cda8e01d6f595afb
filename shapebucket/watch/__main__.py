"""`python -m shapebucket.watch train.py ARGS`: runs a script, untouched, and says at the end what compiled, and why."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shapebucket.watch.recording import CompileWatch


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command. The script's own exit, error or interruption goes on its way, after the diagnosis."""
    options = _parser().parse_args(arguments)
    module, script = options.module is not None, options.module or options.script
    if not script:
        _parser().error("a script, or -m and a module, is needed")
    if not module and not Path(script[0]).exists():
        _parser().error(f"cannot read the script {script[0]!r}: there is none")
    previous = signal.signal(signal.SIGTERM, _terminated)
    watches: list[CompileWatch] = []
    try:
        with ExitStack() as open_watches:
            begin = partial(_open_one, watches, open_watches)
            open_watches.enter_context(_once_jax_is_there(begin))
            _run(script, module)
    except _Terminated:
        _tell(watches, options.json)
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)  # so that whoever waits for the process sees what ended it
    except Exception as error:
        _tell(watches, options.json)
        error = error.with_traceback(_of_the_script(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)  # what Python itself would do
        sys.exit(1)
    except BaseException:
        _tell(watches, options.json)
        raise
    else:
        _tell(watches, options.json)


def _open_one(watches: list[CompileWatch], opened: ExitStack) -> None:
    from shapebucket.watch.recording import watch_compiles

    watches.append(opened.enter_context(watch_compiles(count_calls=True)))


@contextmanager
def _once_jax_is_there(act: Callable[[], None]) -> Generator[None]:
    """Acts when JAX has been imported, and not before: it reads the environment then, which the script may set first."""
    finder = _JaxFinder(act)
    if "jax" in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _JaxFinder(MetaPathFinder):
    """Finds JAX as Python would, and acts when it is loaded."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """Finds nothing but JAX, once."""
        if fullname != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("jax")
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            load = loader.exec_module

            def load_and_act(module: ModuleType) -> None:
                load(module)
                self._act()

            loader.exec_module = load_and_act
        return spec


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


def _tell(watches: Sequence[CompileWatch], path: Path | None) -> None:
    from shapebucket.watch.diagnosis import Diagnosis

    sys.stdout.flush()
    diagnosis = watches[0].diagnose() if watches else Diagnosis.of(())
    print(f"\nshapebucket.watch: {diagnosis}", flush=True)
    if path is not None:
        path.write_text(json.dumps(diagnosis.to_json(), indent=1) + "\n")


if __name__ == "__main__":
    main()
