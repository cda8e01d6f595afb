"""The step counter begins as a Python number, and comes back as an int32."""

import jax
import jax.numpy as jnp


@jax.jit
def train_step(state):
    return {"w": state["w"] * 0.9, "step": state["step"] + jnp.ones((), jnp.int32)}


state = {"w": jnp.ones(3), "step": jnp.asarray(0)}
for _ in range(4):
    state = train_step(state)
