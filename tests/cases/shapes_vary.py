"""Each batch is padded to its own longest sample."""

import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)


@jax.jit
def train_step(state, batch):
    logits = jnp.where(batch["mask"], batch["tokens"] * state["w"], 0)
    return {"w": state["w"] - 0.1 * logits.mean()}


state = {"w": jnp.ones((), jnp.float32)}
for _ in range(30):
    lengths = rng.integers(8, 40, size=4)
    longest = lengths.max()
    tokens = np.ones((4, longest), np.float32)
    state = train_step(state, {"tokens": tokens, "mask": np.arange(longest) < lengths[:, None]})
