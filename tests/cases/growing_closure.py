"""The step is made anew over a list of past losses, which grows."""

import jax
import jax.numpy as jnp


def make_step(history):
    @jax.jit
    def step(w):
        return w - 0.1 * sum(history, jnp.zeros(()))

    return step


history, w = [], jnp.ones(())
for _ in range(5):
    w = make_step(history)(w)
    history.append(w)
