"""Training makes its keys with another PRNG implementation than initialisation."""

import jax


@jax.jit
def dropout(key):
    return jax.random.bernoulli(key, 0.9, (8,))


dropout(jax.random.key(0))
dropout(jax.random.key(0, impl="rbg"))
