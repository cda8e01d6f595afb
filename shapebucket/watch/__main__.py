"""`python -m shapebucket.watch train.py ARGS`: runs a script, untouched, and says at the end what compiled, and why."""

from __future__ import annotations

import argparse
import atexit
import importlib
import importlib.util
import io
import json
import os
import pkgutil
import runpy
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shapebucket.watch.recording import CompileWatch


def main(arguments: Sequence[str] | None = None, *, at_exit: bool = False) -> None:
    """Runs the command. The script's own exit, error or interruption goes on its way.

    Args:
        arguments: those of the command line, if not given.
        at_exit: whether to tell when the process ends, after threads and exit handlers of the script, or else when it has run.
    """
    options = _parser().parse_args(arguments)
    module, script = options.module is not None, options.module or options.script
    if not script:
        _parser().error("a script, or -m and a module, is needed")
    if not module and not Path(script[0]).exists():
        _parser().error(f"cannot read the script {script[0]!r}: there is none")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        _parser().error(f"cannot write {str(options.json)!r}: make its folder first")
    report = _Report(None if options.json is None else options.json.absolute())
    if at_exit:
        atexit.register(report.tell)  # before the script's, so it runs after them, and after threads
    try:
        with _told_of_sigterm():
            _run(script, module)
    except _Terminated:
        report.tell()
        os.kill(os.getpid(), signal.SIGTERM)  # so that whoever waits for the process sees what ended it
    except KeyboardInterrupt:
        report.interrupted = at_exit
        raise
    except Exception as error:
        error = error.with_traceback(_of_the_script(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)  # what Python itself would do
        sys.exit(1)
    finally:
        if not at_exit:
            report.tell()


class _Report:
    """The watch of the run, from JAX's import on, and what is told of it: once, and not by processes forked from this one.

    Attributes:
        interrupted: whether to end the process by SIGINT then; Python does so itself after a KeyboardInterrupt, but forgets it
            when an exit handler runs code from a string, as `dataclasses` does.
    """

    def __init__(self, path: Path | None) -> None:
        self.interrupted = False
        self._path = path
        self._watch: CompileWatch | None = None
        self._untold = {os.getpid()}
        self._open = ExitStack()
        self._open.enter_context(_once_jax_is_there(self._begin))

    def _begin(self) -> None:
        from shapebucket.watch.recording import watch_compiles

        importlib.import_module("shapebucket.watch.diagnosis")  # modules may not load any more when the process ends
        self._watch = self._open.enter_context(watch_compiles(count_calls=True))

    def tell(self) -> None:
        """Prints the diagnosis, and writes it; what goes wrong is said, and changes nothing of how the run ends."""
        if os.getpid() not in self._untold:
            self._open.close()  # while Python can still do it
            return
        self._untold.clear()
        with _saying_what_fails():
            text, values = self._diagnosis()
            with _saying_what_fails():
                encoding = sys.stdout.encoding or "utf-8"
                print(f"\nshapebucket.watch: {text}".encode(encoding, "replace").decode(encoding), flush=True)
            if self._path is not None:
                self._path.write_text(json.dumps(values, indent=1) + "\n")
        if self.interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)

    def _diagnosis(self) -> tuple[str, dict[str, Any]]:
        self._open.close()
        if self._watch is None:  # without JAX, which the real one would load
            return "nothing compiled", {"compiles": 0, "cached": 0, "seconds": 0.0, "functions": [], "events": []}
        diagnosis = self._watch.diagnose()
        return str(diagnosis), diagnosis.to_json()


@contextmanager
def _saying_what_fails() -> Generator[None]:
    """Says an error in the diagnosis, and goes on."""
    try:
        yield
    except Exception as error:
        if isinstance(error, BrokenPipeError):  # Python flushes at exit, and would make a status of another failure
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with suppress(Exception):
            print(f"shapebucket.watch: cannot tell the diagnosis: {error!r}", file=sys.stderr, flush=True)


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
        finder.end()


class _JaxFinder(MetaPathFinder):
    """Finds JAX as Python would, and acts when it has been loaded."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds nothing but JAX, by the other finders; somebody may look for it without loading it."""
        if fullname != "jax":
            return None
        others: list[Any] = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec: ModuleSpec | None = next((each for each in found if each is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_act(module: ModuleType) -> None:
                del loader.exec_module
                load(module)
                if self.end():
                    self._act()

            loader.exec_module = load_and_act
        return spec

    def end(self) -> bool:
        """Looks for JAX no more; returns whether it did."""
        if self not in sys.meta_path:
            return False
        sys.meta_path.remove(self)
        return True


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


@contextmanager
def _told_of_sigterm() -> Generator[None]:
    """Raises `_Terminated` for a SIGTERM that would end this process; those forked from it end as ever."""
    process = os.getpid()

    def terminated(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == process:
            raise _Terminated
        os.kill(os.getpid(), number)

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # ignored, or somebody else's
        yield
        return
    signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(script: Sequence[str], module: bool) -> None:
    """Runs a script or a module, with `sys.argv`, `sys.path` and `__main__` as Python itself would set and leave them."""
    sys.argv = list(script)
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if module else Path(script[0]).resolve().parent)
    if module:
        spec, code = _found(script[0])
        sys.argv[0] = spec.origin or script[0]
        _run_as_main(code, __file__=spec.origin, __spec__=spec, __loader__=spec.loader, __package__=spec.parent)
    elif pkgutil.get_importer(script[0]) is not None:  # a folder or an archive
        runpy.run_path(script[0], run_name="__main__")
    else:
        path = str(Path(script[0]).absolute())
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        _run_as_main(code, __file__=path, __spec__=None, __package__=None)


def _run_as_main(code: CodeType, **names: Any) -> None:
    """Runs code as the module `__main__`, which stays, for threads, exit handlers and pickles of the script's classes."""
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    vars(main_module).update(names)
    exec(code, vars(main_module))


def _found(name: str) -> tuple[ModuleSpec, CodeType]:
    """Returns where a module is that is to be run, and its code; of a package, its `__main__`."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    loader: Any = None if spec is None else spec.loader
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise ImportError(f"no module to run is named {name!r}")
    return spec, code


def _of_the_script(traceback: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the frames that ran the script."""
    while traceback is not None and (
        traceback.tb_frame.f_code.co_filename == __file__ or traceback.tb_frame.f_globals.get("__name__") == "runpy"
    ):
        traceback = traceback.tb_next
    return traceback


if __name__ == "__main__":
    main(at_exit=True)
