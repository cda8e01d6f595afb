"""A schedule gives a Python number each step, which is passed as static."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnames="lr")
def train_step(w, lr):
    return w - lr * w


w = jnp.ones(3)
for number in range(6):
    w = train_step(w, lr=round(0.1 * 0.9**number, 4))
