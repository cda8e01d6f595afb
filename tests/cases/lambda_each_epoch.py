"""The loss is jitted again in each epoch, from a lambda that is new each time."""

import jax
import jax.numpy as jnp

w = jnp.ones(3)
for _epoch in range(5):
    loss = jax.jit(lambda w: (w**2).sum())
    for _ in range(3):
        loss(w)
