"""The compiled step: what a call costs over its executable and against plain jit, and what compiling ahead costs.

A call is compared with the right executable called directly and with plain jit on the same arguments, and one with a flax.nnx
module with nnx.jit; compiling in threads with one after another; a restart that finds its programs in JAX's persistent
compilation cache with one that does not.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from harness import Result, in_child, interleave, main, result

import shapebucket as sb
from shapebucket.demo.config import DemoConfig
from shapebucket.demo.model import init_state, make_train_step


def step_fn(state: list, batch: dict) -> list:
    """Touches every leaf and computes next to nothing."""
    one = batch["tokens"][0, 0] + batch["weights"].shape[0]
    return [leaf + one for leaf in state]


def dispatch(quick: bool) -> list[Result]:
    """A call with 3, 100 and 500 leaves of state and four of batch."""
    layout = sb.Layout({"tokens": "float32[s]", "weights": "float32[s]"})
    plan = sb.BucketPlan(layout, [sb.Bucket((("s", size),), 2) for size in (4, 8)])
    batch = jax.device_put(sb.pad([], plan.buckets[0], plan))
    results = []
    for leaves in (3, 100, 500):
        calls, rounds = (30, 51 if quick else 501) if leaves < 500 else (10, 21 if quick else 201)
        state = [jnp.zeros(()) for _ in range(leaves)]
        step = sb.CompiledStep(step_fn, plan)
        step.compile(state, sb.BATCH, progress=False)
        executable = next(each.compiled for each in step.executables if each.bucket == plan.buckets[0])
        jitted = jax.jit(step_fn)

        def loop(run, state=state, calls=calls) -> None:
            for _ in range(calls):
                out = run(state, batch)
            jax.block_until_ready(out)

        seconds = interleave(
            {
                "step": lambda loop=loop, run=step: loop(run),
                "compiled": lambda loop=loop, run=executable: loop(run),
                "jit": lambda loop=loop, run=jitted: loop(run),
            },
            rounds,
        )
        extra = 1e6 * (seconds["step"] - seconds["compiled"]) / calls
        results.append(result(f"step − compiled, µs a call, {leaves} leaves", extra, target=3.0, better="lower"))
        target = 1.3 if leaves == 3 else 1.05
        results.append(
            result(
                f"step/jit seconds ratio, {leaves} leaves",
                seconds["step"] / seconds["jit"],
                target=target,
                better="lower",
            )
        )
    return results


class _Layers(nnx.Module):
    """Fifty layers of two variables each."""

    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(1, 1, rngs=nnx.Rngs(0)) for _ in range(50)])


def _touch(model: _Layers, batch: dict) -> jax.Array:
    """Updates every variable of a module in place, and computes next to nothing."""
    one = batch["tokens"][0, 0]
    for layer in model.layers:
        layer.kernel[...] = layer.kernel[...] + one
        layer.bias[...] = layer.bias[...] + one
    return one


def modules(quick: bool) -> list[Result]:
    """A flax.nnx module against nnx.jit of the same function."""
    plan = sb.BucketPlan(sb.Layout({"tokens": "float32[s]"}), [sb.Bucket((("s", size),), 2) for size in (4, 8)])
    batch = jax.device_put(sb.pad([], plan.buckets[0], plan))
    ours, theirs = _Layers(), _Layers()
    step = sb.CompiledStep(_touch, plan)
    step.compile(ours, sb.BATCH, progress=False)
    jitted = nnx.jit(_touch)

    def loop(run, model) -> None:
        for _ in range(20 if quick else 200):
            run(model, batch)
        jax.block_until_ready(model.layers[0].kernel[...])

    seconds = interleave({"step": lambda: loop(step, ours), "nnx": lambda: loop(jitted, theirs)}, 3 if quick else 7)
    return [result("nnx_jit/step seconds ratio, 100 leaves", seconds["nnx"] / seconds["step"], target=3.0)]


def transformer(quick: bool) -> tuple[sb.CompiledStep, object]:
    """The demo's model, uncompiled, in 2 or 8 buckets."""
    config = DemoConfig(Path(), Path(), layers=1 if quick else 4)
    sizes = np.linspace(32, 256, 2 if quick else 8, dtype=int).tolist()
    plan = sb.BucketPlan(sb.Layout({"tokens": "int32[s]"}), [sb.Bucket((("s", size),), 8) for size in sizes])
    return sb.CompiledStep(make_train_step(config), plan, donate_argnames="state"), init_state(config)


def compiling(quick: bool) -> list[Result]:
    """As many threads as cores against one."""
    step, state = transformer(quick)
    seconds = interleave(
        {
            "one": lambda: step.compile(state, sb.BATCH, progress=False, threads=1),
            "all": lambda: step.compile(state, sb.BATCH, progress=False),
        },
        1 if quick else 3,
    )
    return [
        result("compile in one thread/in all cores, seconds ratio", seconds["one"] / seconds["all"]),
        result("compile in one thread, seconds", seconds["one"], better="lower"),
    ]


def seconds_with_cache(folder: str, quick: bool) -> float:
    """Compiles with JAX's persistent compilation cache in a folder."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    step, state = transformer(quick)
    jax.block_until_ready(state)
    started = time.perf_counter()
    step.compile(state, sb.BATCH, progress=False)
    return time.perf_counter() - started


def restarting(quick: bool) -> list[Result]:
    """A process that finds its programs in the persistent cache against one that fills it."""
    ratios = []
    for _ in range(1 if quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            first, again = (in_child(seconds_with_cache, folder, quick) for _ in range(2))
            ratios.append(first / again)
    return [result("compile of a first start/of a restart with JAX's persistent cache, seconds ratio", ratios)]


def measure(quick: bool) -> list[Result]:
    return [*dispatch(quick), *modules(quick), *compiling(quick), *restarting(quick)]


if __name__ == "__main__":
    main("step", measure)
