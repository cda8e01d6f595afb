"""`python -m shapebucket.watch`, on the faults of tests/cases, and on scripts that end in every way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shapebucket.watch.__main__ import main

CASES = Path(__file__).parent / "cases"
CAUSES = {
    "bf16_promotion": "train_step compiled 2 times; 1 because params['scale'] was bfloat16, then float32: something in "
    "float32 may have promoted it; cast it before the call, or what the function returns",
    "dict_order": "train_step compiled 2 times; 1 because the structure changed: batch was OrderedDict ('tokens', 'labels'), "
    "then OrderedDict ('labels', 'tokens'); keep one structure from the first call on: placeholders for what comes later, "
    "plain dicts for any order",
    "evaluation_batch_size": "forward compiled 2 times; 1 because images axis 0 took 2 values (32, 100): 32 at "
    "tests/cases/evaluation_batch_size.py:14 in train, 100 at tests/cases/evaluation_batch_size.py:18 in evaluate; use one "
    "batch size for all callers, or accept one program for each",
    "growing_closure": "step compiled 5 times; 4 because it was a new function each time; it holds history, which was a list "
    "of 0, a list of 1, a list of 2, … a list of 4; jit it once, outside of the loop, and pass as arguments what changes",
    "lambda_each_epoch": "<lambda> compiled 5 times; 4 because it was a new lambda each time; jit it once, outside of the "
    "loop, and pass as arguments what changes",
    "last_partial_batch": "train_step compiled 2 times; 1 because images axis 0 took 2 values (32, 4): 4 may be a last partial "
    "batch; drop the remainder, or pad it and mask the rows",
    "numpy_float64": "train_step compiled 2 times; 1 because pixels was float32 of NumPy, then float64 of NumPy; cast it "
    "before the call, or what the function returns",
    "prng_impl": "dropout compiled 2 times; 1 because key was key<fry>, then key<rbg>; use one PRNG implementation for all "
    "keys",
    "shapes_vary": "train_step compiled 14 times; 13 because batch['tokens'] axis 1 took 14 values (17..39), and batch['mask'] "
    "with it; 7 buckets would compile 7 times with 1.7% padding (over 30 calls): tokens = 17, 23, 29, 32, 35, 37, 39",
    "sharding_two_ways": "train_step compiled 2 times; 1 because state['w'] lay elsewhere: committed to {device}, then "
    "NamedSharding(mesh(data=1), {spec}), the same spelled otherwise; put it with one jax.device_put on one sharding before "
    "the first call",
    "static_learning_rate": "train_step compiled 6 times; 5 because static argument lr took 6 values (0.1, 0.09, 0.081, … "
    "0.059); pass it as an array, without static_argnums or static_argnames, or keep to few values",
    "weak_counter": "train_step compiled 2 times; 1 because state['step'] was weak int32, then int32: it was made of a Python "
    "number; make it with a dtype of its own, as in jnp.asarray(0, jnp.int32); what the function returns likewise",
}


@pytest.fixture
def here(monkeypatch):
    """In the repository's folder, with what the command changes put back."""
    monkeypatch.chdir(CASES.parent.parent)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def test_every_case_is_here():
    assert {path.stem for path in CASES.glob("*.py")} == set(CAUSES)
    assert len(CAUSES) == 12


@pytest.mark.parametrize("case", CAUSES)
def test_the_cause_of_each_fault_is_named_in_one_line(case, here, capsys):
    import jax

    main([f"tests/cases/{case}.py"])
    expected = CAUSES[case].format(device=jax.devices()[0], spec=repr(jax.sharding.PartitionSpec()))
    assert expected in capsys.readouterr().out.splitlines()


def run(*arguments, cwd=None, options=(), **environment):
    environment = os.environ | {"PYTHONPATH": str(CASES.parent.parent)} | environment
    return subprocess.run(
        [sys.executable, *options, "-m", "shapebucket.watch", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        check=False,
    )


SCRIPT = """
import sys
import jax, numpy as np
from helper import shape

@jax.jit
def double(x):
    return x * 2

if __name__ == "__main__":
    for n in range(1, 4):
        double(np.ones(shape(n)))
    print(sys.argv[1:], __name__)
    {end}
"""
SUMMARY = "double compiled 3 times; 2 because x axis 0 took 3 values (1, 2, 3); pad it to few sizes"


def write(folder, end="pass"):
    (folder / "helper.py").write_text("def shape(n):\n    return (n,)\n")
    (folder / "train.py").write_text(SCRIPT.format(end=end))
    return folder / "train.py"


def test_a_script_runs_untouched_and_the_diagnosis_follows(tmp_path):
    done = run("--json", tmp_path / "out.json", write(tmp_path), "--json", "a b", cwd="/")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "['--json', 'a b'] __main__"
    assert lines[2].startswith("shapebucket.watch: 3 programs compiled in ")
    assert SUMMARY in lines
    assert done.stderr == ""
    told = json.loads((tmp_path / "out.json").read_text())
    assert [each["summary"] for each in told["functions"]] == [SUMMARY]
    assert told["functions"][0]["calls"] == 3


def test_a_module_runs_too(tmp_path):
    write(tmp_path)
    done = run("-m", "train", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "['x'] __main__"
    assert SUMMARY in done.stdout


def test_a_script_that_exits_keeps_its_status(tmp_path):
    done = run(write(tmp_path, "sys.exit(7)"))
    assert done.returncode == 7
    assert SUMMARY in done.stdout


def test_a_script_that_fails_shows_its_own_traceback(tmp_path):
    done = run("--json", tmp_path / "out.json", write(tmp_path, "raise ValueError('it failed')"))
    assert done.returncode == 1
    assert SUMMARY in done.stdout
    assert "ValueError: it failed" in done.stderr
    assert "train.py" in done.stderr
    assert "runpy" not in done.stderr
    assert (tmp_path / "out.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_script_is_diagnosed(tmp_path, number):
    script = write(tmp_path, "import time; sys.stdout.flush(); time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "shapebucket.watch", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(CASES.parent.parent)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "[] __main__\n"
    time.sleep(0.2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == -number
    assert SUMMARY in out


def test_a_script_may_set_the_environment_before_it_imports_jax(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os\nos.environ['JAX_ENABLE_X64'] = '1'\nfrom jax import jit\nimport numpy as np\n"
        "double = jit(lambda x: x * 2)\nprint(double(np.ones(2)).dtype)\n"
    )
    done = run("--json", tmp_path / "out.json", tmp_path / "train.py")
    assert done.stdout.splitlines()[0] == "float64"
    assert json.loads((tmp_path / "out.json").read_text())["functions"][0]["calls"] == 1


def test_a_script_without_jax_compiles_nothing(tmp_path):
    (tmp_path / "train.py").write_text("print(1)\n")
    done = run(tmp_path / "train.py")
    assert done.stdout.splitlines() == ["1", "", "shapebucket.watch: nothing compiled"]


def test_without_a_script_the_usage_is_shown():
    for arguments in ([], ["-m"]):
        done = run(*arguments)
        assert done.returncode == 2
        assert "usage: python -m shapebucket.watch [--json FILE] (SCRIPT | -m MODULE) [ARGUMENTS ...]" in done.stderr
        assert "a script, or -m and a module, is needed" in done.stderr


def test_a_script_that_is_not_there_is_said(tmp_path):
    done = run(tmp_path / "nothing.py")
    assert done.returncode == 2
    assert f"cannot read the script {str(tmp_path / 'nothing.py')!r}" in done.stderr


COMPILING = """
import jax, numpy as np
double = jax.jit(lambda x: x * 2)
for n in (1, 2, 3):
    double(np.ones(n))
"""
FOUND = "<lambda> compiled 3 times; 2 because x axis 0 took 3 values (1, 2, 3); pad it to few sizes"


def test_a_script_may_look_for_jax_before_it_imports_it(tmp_path):
    (tmp_path / "train.py").write_text(
        "import importlib.util\nassert importlib.util.find_spec('jax')\n"
        + COMPILING
        + "print(vars(jax.__spec__.loader).keys())"
    )
    done = run(tmp_path / "train.py")
    assert FOUND in done.stdout, done.stderr
    assert "exec_module" not in done.stdout


def test_processes_forked_from_a_script_end_as_ever(tmp_path):
    (tmp_path / "train.py").write_text("""
import multiprocessing, os, signal, sys, time

def work(pipe):
    pipe.send(1)
    time.sleep(60)

fork = multiprocessing.get_context("fork")
mine, other = fork.Pipe()
process = fork.Process(target=work, args=(other,))
process.start()
mine.recv()
process.terminate()
process.join()
print("exit code", process.exitcode, flush=True)
child = os.fork()
if not child:
    sys.exit(3)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    done = run(tmp_path / "train.py")
    assert done.stdout.splitlines() == ["exit code -15", "child 3", "", "shapebucket.watch: nothing compiled"]
    assert done.stderr == ""


def test_sigterm_that_is_ignored_or_handled_is_left_alone(here, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("import signal, sys\nsys.seen = signal.getsignal(signal.SIGTERM)\n")
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "seen", None, raising=False)
    try:
        for handler in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, handler)
            main([str(tmp_path / "train.py")])
            assert (sys.seen is signal.SIG_IGN) == (handler is signal.SIG_IGN)
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_diagnosis_that_cannot_be_told_changes_no_status(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nprint('ran', flush=True)\nsys.stdout.close()\nsys.exit(5)\n")
    done = run(tmp_path / "train.py")
    assert (done.returncode, done.stdout) == (5, "ran\n")
    assert "shapebucket.watch: cannot tell the diagnosis: ValueError(" in done.stderr


def test_a_reader_that_is_gone_changes_no_status(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nreader, writer = os.pipe()\nos.dup2(writer, 1)\nos.close(reader)\nsys.exit(5)\n")
    done = run(script)
    assert done.returncode == 5
    assert done.stderr == "shapebucket.watch: cannot tell the diagnosis: BrokenPipeError(32, 'Broken pipe')\n"


def test_a_diagnosis_that_cannot_be_written_is_printed_and_the_other_way_round(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys\nif sys.argv[1:]: sys.stdout.close()\nsys.exit(5)\n")
    done = run("--json", tmp_path, script)
    assert (done.returncode, done.stdout) == (5, "\nshapebucket.watch: nothing compiled\n")
    assert "cannot tell the diagnosis: IsADirectoryError(" in done.stderr
    assert run("--json", tmp_path / "out.json", script, "close").returncode == 5
    assert json.loads((tmp_path / "out.json").read_text())["compiles"] == 0


def test_a_diagnosis_is_told_in_any_encoding(tmp_path):
    done = run(write(tmp_path), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert SUMMARY in done.stdout


def test_a_folder_that_is_not_there_is_said_before_the_run(tmp_path):
    done = run("--json", tmp_path / "no" / "out.json", write(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"cannot write {str(tmp_path / 'no' / 'out.json')!r}: make its folder first" in done.stderr


def test_a_safe_path_stays_one(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nprint(sys.path)\n")
    path = run(tmp_path / "train.py", options=["-P"]).stdout.splitlines()[0]
    assert str(CASES.parent.parent) in path
    assert str(tmp_path) not in path


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_threads_and_exit_handlers_of_a_script_belong_to_it(tmp_path, module):
    (tmp_path / "train.py").write_text(
        """
import atexit, pickle, threading
from concurrent.futures import ThreadPoolExecutor

class Held:
    pass

def work():
    main_ended.wait()
"""
        + COMPILING.replace("\n", "\n    ")
        + """
    print(type(pickle.loads(pickle.dumps(Held()))) is Held)

pool = ThreadPoolExecutor(1)
pool.submit(int).result()  # its thread waits for more until Python ends it
main_ended = threading.Event()
threading.Thread(target=work).start()
atexit.register(print, "at exit")
main_ended.set()
"""
    )
    done = run(*(["-m", "train"] if module else ["train.py"]), cwd=tmp_path)
    assert done.stdout.splitlines()[:3] == ["True", "at exit", ""], done.stderr
    assert FOUND in done.stdout


def test_a_script_has_the_name_that_python_gives_it(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys\nprint(__file__, sys._getframe().f_code.co_filename, sys.argv, __spec__)\n"
    )
    plain = subprocess.run([sys.executable, "train.py", "x"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert run("train.py", "x", cwd=tmp_path).stdout.splitlines()[0] == plain.stdout.strip()


def test_a_module_that_is_not_there_is_said(tmp_path):
    done = run("-m", "nothing_of_that_name", cwd=tmp_path)
    assert done.returncode == 1
    assert "ImportError: no module to run is named 'nothing_of_that_name'" in done.stderr
