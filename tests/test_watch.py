import copy
import dataclasses
import functools
import gc
import json
import logging
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shapebucket as sb
from shapebucket.watch import CompileWatch
from shapebucket.watch.counter import COMPILE_EVENT

ONES = np.ones(3, np.float32)


def fresh(fn=None, **options):
    """A jitted function that no test before has compiled."""

    def total(x, y=0.0, *, n=1):
        return jax.tree.reduce(lambda a, b: a + jnp.sum(b), (x, y), 0.0) * n

    return jax.jit(fn or total, **options)


def only(watch: CompileWatch, name: str = "total"):
    return [event for event in watch.events if event.function.name == name]


def report_of(watch: CompileWatch, name: str):
    return next(each for each in watch.diagnose().functions if (each.name, each.kind) == (name, "call"))


def test_an_event_tells_function_place_arguments_time_and_memory():
    step = fresh()
    with sb.watch_compiles() as watch:
        step({"a": ONES, "b": np.ones((2, 5), np.int32)})
        step({"a": ONES, "b": np.ones((2, 7), np.int32)})
    first, second = watch.events
    assert first.function.name == "total"
    assert re.fullmatch(r".*test_watch\.py:\d+", first.function.where)
    assert re.fullmatch(r".*test_watch\.py:\d+ in test_an_event_tells.*", first.caller)
    assert str(first.signature) == "x['a']: float32[3] of NumPy, x['b']: int32[2, 5] of NumPy"
    assert first.first
    assert not second.first
    assert [tuple(change) for change in second.changes] == [("shape", "x['b']", 1, "5", "7")]
    assert min(first.trace_seconds, first.lower_seconds, first.compile_seconds) > 0
    assert first.seconds == first.trace_seconds + first.lower_seconds + first.compile_seconds
    assert re.search(r"^total compiled at .* in \d\.\d\d s: x\['b'\] axis 1: 5 → 7$", str(second))
    assert json.loads(json.dumps(second.to_json()))["signature"]["leaves"][1]["shape"] == [2, 7]
    assert watch.count == 2
    assert watch.by_function == {"total": 2}
    assert watch.seconds == first.seconds + second.seconds


ONE_DEVICE = jax.devices()[0]
MESH = jax.sharding.Mesh(np.array([ONE_DEVICE]), ("d",))
CHANGES = {
    "shape": (lambda f: (f(ONES), f(np.ones(4, np.float32))), ["x axis 0: 3 → 4"]),
    "rank": (lambda f: (f(ONES), f(np.ones((3, 1), np.float32))), ["x: [3] → [3, 1]"]),
    "dtype": (lambda f: (f(ONES), f(ONES.astype(np.int32))), ["x: float32 of NumPy → int32 of NumPy"]),
    "weak type": (
        lambda f: (f(jnp.asarray(1.0)), f(jnp.asarray(1.0, jnp.float32))),
        ["x: weak float32 → float32"],
    ),
    "another Python number": (lambda f: (f(1.0), f(1)), ["x: a Python float → a Python int"]),
    "number and array": (lambda f: (f(1.0), f(np.float32(1))), ["x: a Python float → float32[] of NumPy"]),
    "a leaf more": (lambda f: (f({"a": ONES}), f({"a": ONES, "b": ONES})), ["x['b']: absent → float32[3] of NumPy"]),
    "None": (lambda f: (f(ONES, None), f(ONES, ONES)), ["y: absent → float32[3] of NumPy"]),
    "containers": (lambda f: (f({"a": (ONES,)}), f({"a": [ONES]})), ["x: tuple → list"]),
    "order": (
        lambda f: (f(OrderedDict(a=ONES, b=ONES)), f(OrderedDict(b=ONES, a=ONES))),
        ["x: OrderedDict ('a', 'b') → OrderedDict ('b', 'a')"],
    ),
    "keyword": (lambda f: (f(ONES, ONES), f(ONES, y=ONES)), ["the arguments: all by position → by keyword: y"]),
    "committed": (
        lambda f: (f(ONES), f(jax.device_put(ONES, ONE_DEVICE))),
        [f"x: uncommitted → committed to {ONE_DEVICE}"],
    ),
    "static": (lambda f: (f(ONES, n=1), f(ONES, n=2)), ["static argument n: 1 → 2"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_makes_jit_compile_again_is_told(name):
    calls, lines = CHANGES[name]
    with sb.watch_compiles() as watch:
        calls(fresh(static_argnames="n"))
    assert len(only(watch)) == 2
    assert [str(change) for change in only(watch)[1].changes] == lines


def test_two_spellings_of_one_sharding_are_told_as_such():
    step = fresh()
    with sb.watch_compiles() as watch:
        step(jax.device_put(ONES, ONE_DEVICE))
        step(jax.device_put(ONES, NamedSharding(MESH, PartitionSpec())))
    assert str(only(watch)[1].changes[0]).endswith("the same spelled otherwise")


def test_a_setting_is_told():
    step = fresh()
    with sb.watch_compiles() as watch:
        step(ONES)
        with jax.default_matmul_precision("highest"):
            step(ONES)
    assert [str(change) for change in only(watch)[1].changes] == ["jax_default_matmul_precision: None → highest"]


def test_the_nearest_earlier_call_is_compared_with():
    step = fresh()
    with sb.watch_compiles() as watch:
        for shape in ((2, 3), (4, 5), (2, 5)):
            step(np.ones(shape), np.ones(2))
        step(np.ones((4, 5)), np.ones(3))
    assert [str(change) for change in watch.events[3].changes] == ["y axis 0: 2 → 3"]


class Model:
    def __init__(self, scale):
        self.scale = scale

    def apply(self, x):
        return x * self.scale


MAKERS = {
    "lambda": (lambda n: lambda x: x * n, "it was a new lambda each time; it holds n, which was 0, 1, 2"),
    "partial": (
        lambda n: functools.partial(lambda x, k: x * k, k=n),
        "it was a new functools.partial each time; it holds k, which was 0, 1, 2",
    ),
    "method": (lambda n: Model(n).apply, "it was a new method of a Model each time"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_functions_made_in_a_loop_are_one_function(name):
    make, text = MAKERS[name]
    with sb.watch_compiles() as watch:
        for n in range(3):
            jax.jit(make(n))(ONES)
    report = watch.diagnose().functions[0]
    assert (report.compiles, len(report.causes), report.causes[0].compiles) == (3, 1, 2)
    assert report.causes[0].text == text


def test_a_static_object_that_equals_only_itself_is_told():
    step = fresh(static_argnames="n")

    class Config:
        def __rmul__(self, other):
            return other

        __array_ufunc__ = None

    with sb.watch_compiles() as watch:
        for _ in range(3):
            step(ONES, n=Config())
    cause = watch.diagnose().functions[0].causes[0]
    assert cause.text.startswith("static argument n was 3 objects, each of which equals only itself (<")


def test_static_objects_that_take_turns_are_values():
    step = fresh(lambda x, *, act: act(x), static_argnames="act")
    with sb.watch_compiles() as watch:
        for n in (3, 4):
            for act in (jnp.sin, jnp.cos):
                step(np.ones(n), act=act)
    assert "static argument act took 2 values (sin, cos)" in {
        cause.text for cause in report_of(watch, "<lambda>").causes
    }


def test_cleared_caches_are_told_as_something_that_cannot_be_seen():
    step = fresh()
    with sb.watch_compiles() as watch:
        step(ONES)
        step.clear_cache()
        step(ONES)
    cause = watch.diagnose().functions[0].causes[0]
    assert cause.text == "of something that cannot be seen: function and arguments were compiled before"
    assert "jax.clear_caches()" in cause.remedy


def test_eager_operations_count_by_the_line_that_runs_them():
    with sb.watch_compiles() as watch:
        for n in range(201, 206):
            jnp.flip(np.ones(n))
    (report,) = watch.diagnose().functions
    assert report.kind == "eager"
    assert "in test_eager_operations" in report.where
    flips = [
        cause.text for cause in report.causes if re.match("_?flip: ", cause.text)
    ]  # the name varies with JAX's version
    assert [text.lstrip("_") for text in flips] == ["flip: m axis 0 took 5 values (201..205)"]
    assert {cause.remedy for cause in report.causes} == {"do it in NumPy before the call, or inside a jitted function"}


@pytest.mark.parametrize("name", ["numpy.cumsum", "numpy.add", "nn.relu", "nn.softmax", "numpy.linalg.norm"])
def test_a_function_of_jax_counts_as_the_users_where_the_user_jits_it(name):
    fun = functools.reduce(getattr, name.split("."), jax)
    arguments = [np.full(211, 2, np.float32)] * (1 + (name == "numpy.add"))
    with sb.watch_compiles() as watch:
        fun(*arguments)
    assert {event.function.kind for event in watch.events} == {"eager"}
    with sb.watch_compiles() as watch:
        jax.jit(fun)(*arguments)
    assert [event.function.kind for event in watch.events] == ["call"]


def test_a_gradient_of_a_jitted_function_counts_for_the_function():
    step = fresh(lambda x: (x**2).sum())
    with sb.watch_compiles() as watch:
        jax.grad(step)(ONES)
    event = next(event for event in watch.events if event.function.kind == "call")
    assert (event.function.name, str(event.signature)) == ("<lambda>", "x: float32[3]")
    assert re.fullmatch(r".*test_watch\.py:\d+", event.function.where)


def test_a_function_compiled_ahead_of_time_is_told_as_such():
    step = fresh()
    with sb.watch_compiles() as watch:
        for n in (3, 4):
            step.lower(np.ones(n)).compile()
    (report,) = watch.diagnose().functions
    assert report.kind == "ahead"
    assert report.causes[0].text == "argument 0 axis 0 took 2 values (3, 4)"
    assert report.causes[0].remedy == "it was asked for, ahead of time"
    assert "total, ahead of time" in str(watch.diagnose())


def noisy(x):
    jax.debug.print("{x}", x=x[0])
    return jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x).sum()


def test_warm_calls_are_neither_recorded_nor_refused(capfd):
    """Those included that take JAX's slow path each time, and those with donated arguments."""
    slow, donating = fresh(noisy), fresh(lambda s, x: s + x.sum(), donate_argnums=0)
    state = donating(donating(jnp.zeros(()), ONES), ONES)
    slow(ONES).block_until_ready()
    with sb.watch_compiles() as watch, sb.forbid_compile() as guard:
        for _ in range(3):
            state = donating(state, ONES)
            slow(ONES).block_until_ready()
        jax.effects_barrier()
    assert (watch.count, guard.count) == (0, 0)
    assert float(state) == 15


def test_compiles_in_other_threads_are_recorded():
    steps = [fresh() for _ in range(4)]
    with sb.watch_compiles() as watch:
        threads = [threading.Thread(target=step, args=(np.ones(k + 1),)) for k, step in enumerate(steps)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    sizes = {event.signature.leaves[0].shape for event in only(watch) if event.signature}
    assert sizes == {(1,), (2,), (3,), (4,)}


def test_nothing_is_left_behind():
    loggers = [logging.getLogger(name) for name in ("jax._src.pjit", "jax._src.interpreters.partial_eval")]
    before = [list(logger.filters) for logger in loggers]
    plain, asked = jax.jit, jax.config.jax_explain_cache_misses
    with sb.watch_compiles(count_calls=True) as watch, sb.forbid_compile("count") as guard:
        assert jax.jit is not plain
    fresh()(ONES)
    assert (watch.count, guard.count) == (0, 0)
    assert jax.jit is plain
    assert jax.config.jax_explain_cache_misses == asked
    assert [list(logger.filters) for logger in loggers] == before


def test_contexts_may_end_in_any_order():
    plain, asked = jax.jit, jax.config.jax_explain_cache_misses
    watches = [sb.watch_compiles(count_calls=True), sb.watch_compiles(count_calls=True)]
    guards = [sb.forbid_compile("count"), sb.forbid_compile("count")]
    for context in [*watches, *guards]:
        context.__enter__()
    step = fresh()
    step(ONES)
    for context in [*watches, *guards]:
        context.__exit__(None, None, None)
    assert jax.jit is plain
    assert jax.config.jax_explain_cache_misses == asked
    step(np.ones(4, np.float32))
    assert [watch.diagnose().function("total").calls for watch in watches] == [1, 1]
    assert [guard.count for guard in guards] == [1, 1]


def test_a_watch_ends_also_when_all_listeners_were_cleared():
    with sb.watch_compiles() as watch:
        fresh()(ONES)
        jax.monitoring.clear_event_listeners()
    fresh()(ONES)
    assert watch.count == 1


def test_arguments_are_not_kept_alive():

    step = fresh()
    with sb.watch_compiles(count_calls=True) as watch:
        x = jnp.ones(11)
        kept = weakref.ref(x)
        step(x)
        del x
        gc.collect()
        assert kept() is None
    assert len(only(watch)) == 1


def test_the_persistent_cache_is_told_apart(tmp_path):
    program = """
import sys, jax, numpy as np, shapebucket as sb
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
with sb.watch_compiles() as watch:
    for _ in range(2):
        jax.jit(lambda x: x + 1)(np.ones(3))
        jax.clear_caches()
print([event.cached for event in watch.events], str(watch.diagnose()).splitlines()[0])
"""
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("[False, True] 2 programs compiled, 1 of them from the persistent cache in ")


def test_a_representation_that_fails_does_not_end_the_run():
    class Odd:
        def __repr__(self):
            raise ValueError("no")

        def __rmul__(self, other):
            return other

        __array_ufunc__ = None

    with sb.watch_compiles() as watch:
        fresh(static_argnames="n")(ONES, n=Odd())
    assert "<Odd, whose repr raises ValueError>" in str(only(watch)[0].signature)


# --- forbid_compile


def test_a_refusal_names_what_changed_against_a_watch_of_the_warm_up():
    step = fresh(donate_argnums=0)
    with sb.watch_compiles() as watch:
        state = step(jnp.zeros(()), np.ones((8, 32), np.float32))
    with sb.forbid_compile(earlier=watch) as guard, pytest.raises(sb.RecompileError) as caught:
        step(state, np.ones((8, 40), np.float32))
    assert re.fullmatch(
        r"total compiles anew at .*test_watch\.py:\d+ in test_a_refusal_names.*, where forbid_compile\(\) allows none:\n"
        r"  y axis 1: 32 → 40\n"
        r"Pad or cast to what was compiled before, compile this before the context, or name the function in "
        r"allow=\['total'\]\.",
        str(caught.value),
    )
    assert (caught.value.function, caught.value.differences) == ("total", ["y axis 1: 32 → 40"])
    assert not state.is_deleted()
    assert guard.count == 1
    assert guard.by_function == {"total": 1}


def test_without_a_watch_jax_says_what_changed():
    step = fresh()
    step(ONES)
    with sb.forbid_compile(), pytest.raises(sb.RecompileError) as caught:
        step(np.ones(5, np.float32))
    assert caught.value.differences == ["x: f32[3] → f32[5]"]
    with sb.forbid_compile(), pytest.raises(sb.RecompileError) as caught:
        fresh()(ONES)
    assert caught.value.differences == [
        "JAX has not seen this function before: if it is made anew in a loop, jit it once, outside"
    ]
    with sb.forbid_compile(), pytest.raises(sb.RecompileError) as caught:
        step(jax.device_put(ONES, ONE_DEVICE))
    assert caught.value.differences == [
        f"of types that were traced before, by a call that was refused perhaps, or with arguments that lay elsewhere: x: float32[3] (committed to {ONE_DEVICE})"
    ]


def test_a_new_function_is_refused_as_such():
    with sb.watch_compiles() as watch:
        jax.jit(MAKERS["lambda"][0](1))(ONES)
    with sb.forbid_compile(earlier=watch), pytest.raises(sb.RecompileError) as caught:
        jax.jit(MAKERS["lambda"][0](2))(ONES)
    assert caught.value.differences == [
        "it is another lambda of the same code: if it is made anew in a loop, jit it once, outside",
        "n: 1 → 2",
    ]


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 1}], ids=["plain", "donating"])
def test_a_refused_call_compiles_once_afterwards_and_is_as_fast_as_others(options):
    """JAX's fast path would not take it any more, had the guard not cleared it."""
    step = fresh(lambda x, s: s + x.sum(), **options)
    step(ONES, jnp.zeros(()))
    state = jnp.zeros(())
    with sb.forbid_compile():
        for _ in range(2):
            with pytest.raises(sb.RecompileError):
                step(np.ones(5, np.float32), state)
        step(ONES, jnp.zeros(()))
    with sb.watch_compiles() as watch:
        assert float(step(np.ones(5, np.float32), jnp.zeros(()))) == 5
        step(np.ones(5, np.float32), jnp.zeros(()))
        step(ONES, jnp.zeros(()))
    assert watch.by_function.get("<lambda>") == 1
    with jax.no_tracing():  # refuses what the fast path does not have
        step(np.ones(5, np.float32), state)
    with jax.no_tracing():
        step(ONES, jnp.zeros(()))


def test_eager_operations_are_refused():
    with (
        sb.forbid_compile(),
        pytest.raises(sb.RecompileError, match=r"(?s) compiles anew at .*test_watch.* called with .*\[307\]"),
    ):
        jnp.flip(np.ones(307))


def test_warn_and_count_let_it_compile():
    step = fresh()
    with sb.forbid_compile("warn") as guard, pytest.warns(RuntimeWarning, match="total compiles anew at ") as told:
        step(ONES)
    assert told[0].filename == __file__
    assert guard.count == 1
    with warnings.catch_warnings(), sb.forbid_compile("count") as guard:
        warnings.simplefilter("error")
        step(np.ones(4, np.float32))
        step(np.ones(4, np.float32))
    assert guard.count == 1


def test_allowed_functions_may_compile():
    with sb.forbid_compile(allow=["total"]) as guard:
        fresh()(ONES)
    assert guard.count == 0


def test_what_another_thread_was_refused_is_raised_at_the_end():
    caught: list[BaseException] = []

    def work():
        try:
            fresh()(ONES)
        except sb.RecompileError as error:
            caught.append(error)

    def forbid():
        with sb.forbid_compile():
            thread = threading.Thread(target=work, name="reader")
            thread.start()
            thread.join()

    with pytest.raises(sb.RecompileError, match="total compiles anew") as raised:
        forbid()
    assert str(caught[0]) == str(raised.value)
    assert raised.value.__notes__[0] == "shapebucket: in the thread reader"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "raise"}, r"action must be one of \('error', 'warn', 'count'\), but got 'raise'"),
        ({"allow": "total"}, r"allow takes names of functions, as in \['total'\], but got 'total'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(sb.StepError, match=message):
        sb.forbid_compile(**options)


# --- the diagnosis


def run_pairs(count_calls: bool) -> CompileWatch:
    """Sequences of two lengths; source and mask agree, the target goes its own way."""
    with sb.watch_compiles(count_calls=count_calls) as watch:

        @jax.jit
        def train_step(state, batch):
            return state + (batch["src"] * batch["src_mask"]).sum() + batch["tgt"].sum()

        state = np.float32(0)
        for s, t in [(3, 4), (5, 4), (5, 9), (7, 4), (9, 9), (3, 4), (3, 4)]:
            batch = {
                "src": np.ones((2, s), np.float32),
                "src_mask": np.ones((2, s), bool),
                "tgt": np.ones((2, t), np.int32),
            }
            state = np.float32(train_step(state, batch))
    return watch


def test_shapes_become_lengths_and_a_plan():
    diagnosis = run_pairs(count_calls=False).diagnose()
    lengths = diagnosis.lengths()
    assert lengths.axes == ("src", "tgt")
    assert lengths.shapes.tolist() == [[3, 4], [5, 4], [5, 9], [7, 4], [9, 9]]
    assert lengths.counts.tolist() == [1] * 5
    assert str(lengths.layout) == str(sb.Layout({"src": "float32[src]", "tgt": "int32[tgt]"}))
    plan = diagnosis.plan("train_step", max_buckets=2)
    assert len(plan) == 2
    assert {bucket.batch_size for bucket in plan.buckets} == {2}
    assert diagnosis.plan(token_budget=64, max_buckets=1).buckets[0].sizes == {"src": 9, "tgt": 9}


def test_counted_calls_weigh_the_shapes():
    watch = run_pairs(count_calls=True)
    diagnosis = watch.diagnose()
    assert diagnosis.lengths().counts.tolist() == [3, 1, 1, 1, 1]
    report = diagnosis.function("train_step")
    assert report.calls == 7
    assert report.summary == (
        "train_step compiled 5 times; 3 because batch['src'] axis 1 took 4 values (3, 5, 7, 9), and batch['src_mask'] with it; "
        "2 buckets would compile 2 times with 18.9% padding (over 7 calls): src=5 tgt=4, src=9 tgt=9"
    )


def test_an_axis_is_not_named_so_that_its_lengths_would_be_a_leaf():
    step = fresh()
    with sb.watch_compiles() as watch:
        for n in (5, 7):
            step({"src": np.ones((2, n), np.int32), "src_length": np.ones((2, n), np.int32)})
    assert watch.diagnose().lengths().axes == ("src_1",)
    assert len(watch.diagnose().plan()) == 2


def test_a_batch_axis_that_varies_too_is_the_rows():
    step = fresh()
    with sb.watch_compiles() as watch:
        for shape in ((8, 5), (8, 7), (3, 7), (8, 9)):
            step(np.ones(shape, np.float32))
    assert watch.diagnose().lengths().shapes.ravel().tolist() == [5, 7, 9]
    assert watch.diagnose().plan().buckets[0].batch_size == 8


def test_an_only_axis_is_the_length():
    step = fresh()
    with sb.watch_compiles() as watch:
        for n in (5, 7, 9):
            step(np.ones(n, np.float32))
    plan = watch.diagnose().plan(max_buckets=1)
    assert [str(bucket) for bucket in plan.buckets] == ["[1 × x=9]"]


def test_a_diagnosis_prints_as_a_table_and_reasons():
    watch = run_pairs(count_calls=True)
    lines = re.sub(r"\d+\.\d", "#", str(watch.diagnose())).splitlines()
    assert lines[0] == "5 programs compiled in # s (tracing #, lowering #, XLA #)"
    assert lines[1].split() == ["function", "at", "compiles", "calls", "seconds", "memory,", "MB"]
    assert re.fullmatch(r" train_step +.*test_watch\.py:\d+ +5 +7 +# +[+-]\d+", lines[3])
    assert lines[5].startswith("train_step compiled 5 times; 3 because batch['src'] axis 1 took 4 values")
    assert lines[6] == "  1 because batch['tgt'] axis 1 took 2 values (4, 9); pad it to few sizes"


def test_a_diagnosis_is_json():
    told = json.loads(json.dumps(run_pairs(count_calls=True).diagnose().to_json()))
    assert told["compiles"] == len(told["events"]) == 5
    (function,) = told["functions"]
    assert (function["name"], function["compiles"], function["calls"]) == ("train_step", 5, 7)
    assert function["causes"][0]["path"] == "batch['src']"
    assert function["causes"][0]["values"] == ["3", "5", "7", "9"]
    assert sb.BucketPlan.from_json(function["plan"]).buckets


def test_what_holds_most_comes_first_and_eager_operations_last():
    rare, often = fresh(), fresh(lambda y: y * 2)
    with sb.watch_compiles() as watch:
        jnp.flip(np.ones(401))
        rare(ONES)
        for n in (3, 4):
            often(np.ones(n))
    assert [(each.name, each.kind) for each in watch.diagnose().functions][:2] == [
        ("<lambda>", "call"),
        ("total", "call"),
    ]
    assert str(watch.diagnose()).splitlines()[-1].startswith("eager operations that hardly repeat: ")


def test_there_may_be_nothing_to_plan():
    step = fresh()
    with sb.watch_compiles() as watch:
        pass
    assert str(watch.diagnose()) == "nothing compiled"
    with pytest.raises(sb.LengthsError, match="saw no function with shapes that vary; what compiled: none"):
        watch.diagnose().lengths()
    with sb.watch_compiles() as watch:
        step(ONES)
    with pytest.raises(sb.LengthsError, match="saw no function 'train_step'; what compiled: total"):
        watch.diagnose().plan("train_step")
    with pytest.raises(sb.LengthsError, match="no size varied among the calls of 'total' that compiled"):
        watch.diagnose().plan("total")


# --- functions that count their calls


def test_counting_functions_are_what_jit_returned_in_all_else():
    with sb.watch_compiles(count_calls=True) as watch:

        class Doubler:
            @functools.partial(jax.jit, static_argnums=0)
            def double(self, x):
                """Doubles."""
                return x * 2

        @jax.jit
        def half(x):
            return x / 2

        assert Doubler().double(ONES).tolist() == [2, 2, 2]
        assert half.lower(ONES).compile()(ONES).tolist() == [0.5] * 3
        assert half.trace(ONES).jaxpr is not None
        assert isinstance(half, jax.stages.Wrapped)
        assert jax.jit(half)(ONES).tolist() == [0.5] * 3
        assert jax.vmap(half)(ONES).tolist() == [0.5] * 3
        assert jax.grad(lambda x: half(x).sum())(ONES).tolist() == [0.5] * 3
        half.clear_cache()
        assert Doubler.double.__doc__ == "Doubles."
        with pytest.raises(AttributeError, match="nothing"):
            half.nothing  # noqa: B018
    assert {(each.name, each.calls) for each in watch.diagnose().functions} >= {("double", 1), ("half", 3)}


def test_counting_functions_work_under_flax():
    nnx = pytest.importorskip("flax.nnx")
    with sb.watch_compiles(count_calls=True) as watch:

        @nnx.jit
        def apply(model, x):
            return model(x)

        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        for rows in (2, 2, 5):
            assert apply(model, np.ones((rows, 3), np.float32)).shape == (rows, 2)
    report = watch.diagnose().function("apply")
    assert report.compiles == 2
    assert "axis 0 took 2 values (2, 5)" in report.causes[0].text


# --- what a watch must not do to the run that it watches


class Super:
    def apply(self, x):
        return x * 2


class Lazy(Super):
    """`super()` has its method close over the class, where `shape` is a property."""

    dtype = "float32"

    @property
    def shape(self):
        raise RuntimeError("not initialised yet")

    def apply(self, x):
        return super().apply(x)


def closing_over(value):
    return lambda x: x * 2 if value is not None else x


@pytest.mark.parametrize("make", [Lazy().apply, closing_over(np.ndarray), closing_over(Lazy())], ids=str)
def test_what_a_function_holds_on_to_is_not_run(make):
    with sb.watch_compiles() as watch, sb.forbid_compile("count"):
        assert jax.jit(make)(ONES).tolist() == [2, 2, 2]
    assert watch.events[0].signature is not None


def test_a_working_directory_that_is_gone_ends_no_run(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    step = fresh()
    with sb.watch_compiles() as watch:
        folder.rmdir()
        step(ONES)
    with sb.watch_compiles() as late:
        step(np.ones(4))
    for each in (watch, late):
        assert re.fullmatch(r"/.*test_watch\.py:\d+ in test_a_working_directory.*", each.events[0].caller)


def test_files_are_told_from_where_the_watch_was_opened(tmp_path, monkeypatch):
    step = fresh()
    monkeypatch.chdir(Path(__file__).parent)
    with sb.watch_compiles() as watch:
        monkeypatch.chdir(tmp_path)
        step(ONES)
    assert watch.events[0].caller.startswith("test_watch.py:")


def compile_event():
    """Tells the watch of a compile as JAX does."""
    jax.monitoring.record_scalar(COMPILE_EVENT, 0.0, fun_name="jit(step)")
    jax.monitoring.record_event_duration_secs(COMPILE_EVENT, 0.5, fun_name="jit(step)")


def in_a_frame_of_jax(**local):
    """Tells of a compile below a frame like that of JAX, with some locals."""
    scope = {"__name__": "jax._src.pjit"}
    exec(f"def cache_miss(act, {', '.join(local)}):\n    return act()", scope)
    scope["cache_miss"](compile_event, **local)


@pytest.mark.parametrize("local", ["fun", "renamed", "args", "kwargs"])
def test_frames_of_another_jax_end_no_run(local, caplog):
    with sb.watch_compiles() as watch:
        for _ in range(2):
            in_a_frame_of_jax(**{local: 1})
    assert [event.function.name for event in watch.events] == ["step", "step"]
    assert [event.first for event in watch.events] == [True, False]
    assert ("cannot tell why step compiles" in caplog.text) == (local != "renamed")


def test_a_long_history_is_not_searched_to_its_beginning():
    with sb.watch_compiles() as watch:
        for n in (1, *range(2, 258), 1):
            in_a_frame_of_jax(fun=closing_over, args=(np.ones(n),), kwargs={})
    assert [str(change) for change in watch.events[-1].changes] == ["value axis 0: 257 → 1"]


def alive(reference) -> bool:
    gc.collect()
    return reference() is not None


class Slots:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w

    def step(self, x):
        return x * self.w.sum()


class Array(np.ndarray):
    """One that can have weak references."""


def test_no_object_outlives_its_watch():
    array = np.ones(10).view(Array)
    reference, model = weakref.ref(array), Slots(array)
    with sb.watch_compiles() as watch:
        jax.jit(model.step)(ONES)
    assert watch.events[0].making is not None
    del array, model, watch
    jax.clear_caches()
    assert not alive(reference)


def test_a_refusal_keeps_no_arguments_alive():
    step = fresh()
    step(ONES)
    references = []

    def refused():
        batch = jax.device_put(np.ones(5, np.float32))
        references.append(weakref.ref(batch))
        with pytest.raises(sb.RecompileError):
            step(batch)

    with sb.forbid_compile() as guard:
        refused()
    assert guard.refused[0].differences == ["x: f32[3] → f32[5]"]
    assert not alive(references[0])


def test_a_setting_of_one_thread_stays_one_of_that_thread():
    with jax.explain_cache_misses(True), sb.forbid_compile("count"):
        pass
    assert not jax.config.jax_explain_cache_misses


def test_a_context_is_opened_once():
    message = r"it is opened once: call watch_compiles\(\) or forbid_compile\(\) for another"
    for context in (sb.watch_compiles(), sb.forbid_compile("count")):
        with context, pytest.raises(sb.StepError, match=message), context:
            pass
        with pytest.raises(sb.StepError, match=message), context:
            pass
    with sb.watch_compiles() as watch:
        fresh()(ONES)
    assert watch.count == 1


def test_contexts_end_without_assertions_too():
    program = """
import jax, shapebucket as sb
for context in (sb.watch_compiles(), sb.watch.CompileCounter()):
    with context:
        jax.monitoring.clear_event_listeners()
print("ended")
"""
    for optimized in ([], ["-O"]):
        run = subprocess.run([sys.executable, *optimized, "-c", program], capture_output=True, text=True, check=False)
        assert run.stdout == "ended\n", run.stderr


def test_seconds_are_those_of_the_trace_that_was_compiled():
    def slow(x):
        time.sleep(0.1)
        return x * 2

    with sb.watch_compiles() as watch:
        for n in (2, 3, 4):
            jax.eval_shape(jax.jit(slow), np.ones(n))
        jax.jit(slow)(np.ones(5))
    assert 0.1 <= only(watch, "slow")[0].trace_seconds < 0.2


# --- which function, and which of its objects


def test_transformations_of_a_function_are_others():
    def loss(w):
        return (w**2).sum()

    with sb.watch_compiles() as watch:
        for fun, x in ((loss, ONES), (jax.grad(loss), ONES), (jax.vmap(loss), np.ones((3, 3), np.float32))):
            jax.jit(fun)(x)
    events = [event for event in watch.events if event.function.kind == "call"]
    assert [event.first for event in events] == [True] * 3


@pytest.mark.parametrize("count", [2, 3])
def test_objects_that_are_kept_are_not_said_to_be_made_anew(count):
    steps = [jax.jit(MAKERS["lambda"][0](n)) for n in range(count)]
    with sb.watch_compiles() as watch:
        for step in steps * 2:
            step(ONES)
    (report,) = watch.diagnose().functions
    assert report.causes[0].text.startswith("it was another lambda of the same code; it holds n, which was 0, 1")
    assert report.causes[0].remedy.startswith("if it is made in a loop, jit it once")


@dataclasses.dataclass(frozen=True)
class Scaled:
    k: float

    def __call__(self, x):
        return x * self.k


def test_equal_callables_are_one_function():
    kept = [Scaled(2.0) for _ in range(3)]
    with sb.watch_compiles() as watch:
        for each, n in zip(kept, (3, 3, 4), strict=True):
            jax.jit(each)(np.ones(n))
    assert [list(map(str, event.changes)) for event in watch.events] == [[], ["x axis 0: 3 → 4"]]


def test_functions_compiled_ahead_of_time_are_told_apart_by_their_lines():
    one = fresh()
    with sb.watch_compiles() as watch:
        one.lower(np.ones(3)).compile()
        one.lower(np.ones(4)).compile()
    assert [each.compiles for each in watch.diagnose().functions] == [1, 1]


def test_a_sequence_is_not_said_to_be_a_batch():
    step = fresh()
    with sb.watch_compiles() as watch:
        for n in (9, 5):
            step(np.ones(n))
    assert watch.diagnose().functions[0].causes[0].text == "x axis 0 took 2 values (9, 5)"


def test_a_cause_that_cannot_be_seen_has_words():
    step = fresh()
    with sb.watch_compiles() as watch:
        step(ONES)
        step.clear_cache()
        step(ONES)
    assert str(watch.events[1]).endswith(" s: nothing that can be seen: function and arguments were compiled before")


# --- counting


def counted(*calls):
    """The shapes and counts of a function that is called in some ways."""
    with sb.watch_compiles(count_calls=True) as watch:

        @jax.jit
        def loss(w, x):
            return (w * x).sum()

        for call in calls:
            call(loss)
    report = report_of(watch, "loss")
    assert report.seen is not None
    return report.calls, dict(
        zip(report.seen.lengths.shapes.ravel().tolist(), report.seen.lengths.counts.tolist(), strict=True)
    )


def direct(n):
    return lambda loss: loss(np.float32(1), np.ones((4, n), np.float32))


def test_calls_by_keyword_and_by_position_are_one():
    by_keyword = [lambda loss, n=n: loss(x=np.ones((4, n), np.float32), w=np.float32(1)) for n in (8, 16)]
    assert counted(direct(8), direct(16), *by_keyword * 5) == (12, {8: 6, 16: 6})


def test_calls_under_a_gradient_count():
    gradients = [lambda loss, n=n: jax.grad(loss, (0, 1))(np.float32(1), np.ones((4, n), np.float32)) for n in (8, 16)]
    assert counted(*gradients * 5) == (10, {8: 5, 16: 5})
    assert counted(direct(8), direct(16), *gradients[:1] * 5) == (7, {8: 6, 16: 1})


def test_calls_within_another_program_do_not_count_and_no_size_that_compiled_is_lost():
    nested = [lambda loss, n=n: jax.jit(lambda x: loss(np.float32(1), x))(np.ones((4, n), np.float32)) for n in (8, 24)]
    assert counted(*nested, direct(8), direct(16), *nested) == (2, {8: 1, 16: 1})
    mapped = [lambda loss, n=n: jax.vmap(loss, (None, 0))(np.float32(1), np.ones((2, 4, n))) for n in (8, 16)]
    assert counted(direct(8), direct(16), *mapped)[1].keys() >= {8, 16}


def test_a_counting_function_is_copied_and_called_as_what_jit_returns():
    with sb.watch_compiles(count_calls=True):
        replaced = jax.jit

        @jax.jit
        def double(self):
            return self * 2

    assert copy.copy(double) is copy.deepcopy(double) is double
    assert double(self=ONES).tolist() == [2, 2, 2]
    assert type(replaced(lambda x: x)) is type(jax.jit(lambda x: x))


@jax.tree_util.register_pytree_with_keys_class
class Batch:
    """Its leaf cannot be read after the first calls."""

    def __init__(self, x, readable=True):
        self._x, self.readable = x, readable

    @property
    def x(self):
        if not self.readable:
            raise RuntimeError("read already")
        return self._x

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("x"), self._x),), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_arguments_that_cannot_be_read_are_counted_without_sizes():
    with sb.watch_compiles(count_calls=True) as watch:
        total = jax.jit(lambda batch: batch.x.sum())
        for n in (2, 3):
            total(Batch(np.ones(n)))
        total(Batch(np.ones(3), readable=False))
    report = report_of(watch, "<lambda>")
    assert report.seen is not None
    assert (report.calls, report.seen.weight) == (3, 2)


def test_a_reason_is_not_guessed_where_jax_explains_nothing():
    step = fresh()
    step(ONES)
    logging.disable(logging.WARNING)
    try:
        with sb.forbid_compile(), pytest.raises(sb.RecompileError) as caught:
            step(np.ones(7, np.float32))
    finally:
        logging.disable(logging.NOTSET)
    assert caught.value.differences == [
        "called with x: float32[7] of NumPy, y: a Python float"
    ] or caught.value.differences == ["called with x: float32[7] of NumPy"]
