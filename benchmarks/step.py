"""Dispatch: the compiled step against the right executable called directly, and against plain jit on the same call;
on a flax.nnx module, against nnx.jit.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
from flax import nnx
from harness import Result, interleave, main, result

import shapebucket as sb
from shapebucket.step.signature import signature_of


def step_fn(state: list, batch: dict) -> list:
    """Touches every leaf and computes next to nothing."""
    one = batch["tokens"][0, 0] + batch["weights"].shape[0]
    return [leaf + one for leaf in state]


def measure(quick: bool) -> list[Result]:
    layout = sb.Layout({"tokens": "float32[s]", "weights": "float32[s]"})
    plan = sb.BucketPlan(layout, [sb.Bucket((("s", size),), 2) for size in (4, 8)])
    batch = jax.device_put(sb.pad([], plan.buckets[0], plan))
    results = []
    calls = 200 if quick else 2000
    for leaves in (3, 100, 500):
        state = [jnp.zeros(()) for _ in range(leaves)]
        step = sb.CompiledStep(step_fn, plan)
        step.compile(state, sb.BATCH, progress=False)
        executable = next(each.compiled for each in step.executables if each.bucket == plan.buckets[0])
        jitted = jax.jit(step_fn)

        def loop(run, state=state) -> None:
            for _ in range(calls):
                out = run(state, batch)
            jax.block_until_ready(out)

        seconds = interleave(
            {
                "step": lambda loop=loop, run=step: loop(run),
                "compiled": lambda loop=loop, run=executable: loop(run),
                "jit": lambda loop=loop, run=jitted: loop(run),
            },
            3 if quick else 7,
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
    results.append(_against_nnx_jit(plan, batch, calls, rounds=3 if quick else 7))
    for name, each in (("numpy", sb.pad([], plan.buckets[0], plan)), ("JAX", batch)):
        started = time.perf_counter()
        for _ in range(10_000):
            signature_of(each)
        results.append(
            result(
                f"signature of a batch of {name} arrays, µs", [1e2 * (time.perf_counter() - started)], better="lower"
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


def _against_nnx_jit(plan: sb.BucketPlan, batch: dict, calls: int, rounds: int) -> Result:
    """Times the step on a flax.nnx module against nnx.jit of the same function."""
    ours, theirs = _Layers(), _Layers()
    step = sb.CompiledStep(_touch, plan)
    step.compile(ours, sb.BATCH, progress=False)
    jitted = nnx.jit(_touch)

    def loop(run, model) -> None:
        for _ in range(calls // 10):
            run(model, batch)
        jax.block_until_ready(model.layers[0].kernel[...])

    seconds = interleave({"step": lambda: loop(step, ours), "nnx": lambda: loop(jitted, theirs)}, rounds)
    return result("nnx_jit/step seconds ratio, 100 leaves", seconds["nnx"] / seconds["step"], target=3.0)


if __name__ == "__main__":
    main("step", measure)
