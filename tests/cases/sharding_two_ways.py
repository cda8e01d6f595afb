"""The first state lies on a device, the restored one on a mesh of that same device."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


@jax.jit
def train_step(state):
    return {"w": state["w"] * 0.9}


devices = jax.devices()[:1]
mesh = jax.sharding.Mesh(devices, ("data",))
fresh = {"w": jax.device_put(jnp.ones(4), devices[0])}
restored = {"w": jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec()))}
for state in (fresh, restored):
    train_step(state)
