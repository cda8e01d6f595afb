"""A small decoder-only transformer language model, in plain JAX.

Letters in shapes: `B` rows, `L` positions, `V` words, `W` width, `H` heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shapebucket.demo.config import DemoConfig

Params = dict[str, Any]


class TrainState(NamedTuple):
    """What a step takes and returns."""

    params: Params
    optimizer: optax.OptState


def make_optimizer(config: DemoConfig) -> optax.GradientTransformation:
    """Returns the optimizer that all runs share; flattened, it compiles in fewer operations."""
    return optax.flatten(optax.adam(config.learning_rate))


def init_state(config: DemoConfig) -> TrainState:
    """Returns the same fresh state each time."""
    keys = iter(jax.random.split(jax.random.key(config.seed), 6))
    width, layers = config.width, config.layers

    def normal(shape: tuple[int, ...], scale: float) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape, jnp.float32)

    params: Params = {
        "words": normal((config.vocabulary, width), 0.02),
        "positions": normal((config.max_length, width), 0.02),
        "layers": {
            "norm_1": jnp.ones((layers, width)),
            "qkv": normal((layers, width, 3 * width), width**-0.5),
            "out": normal((layers, width, width), width**-0.5),
            "norm_2": jnp.ones((layers, width)),
            "up": normal((layers, width, 4 * width), width**-0.5),
            "down": normal((layers, 4 * width, width), (4 * width) ** -0.5),
        },
        "norm": jnp.ones(width),
    }
    return TrainState(params, make_optimizer(config).init(params))


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _attention(layer: Params, x: jax.Array, mask: jax.Array, heads: int) -> jax.Array:
    """Causal attention over [B, L, W] that sees real positions only; mask bool [B, L]."""
    rows, length, width = x.shape
    q, k, v = jnp.split((x @ layer["qkv"]).reshape(rows, length, heads, -1), 3, axis=-1)
    visible = jnp.tril(jnp.ones((length, length), bool)) & mask[:, None, None, :]
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) * (width // heads) ** -0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e9), axis=-1)
    return jnp.einsum("bhlm,bmhd->blhd", weights, v).reshape(rows, length, width) @ layer["out"]


def loss_fn(params: Params, batch: dict[str, jax.Array], heads: int) -> jax.Array:
    """Returns the mean cross entropy of the next word over real positions, in nats.

    Args:
        params: from `init_state`.
        batch: `tokens` int32 [B, L] and `s_mask` bool [B, L].
        heads: H.
    """
    tokens, mask = batch["tokens"], batch["s_mask"]
    x = params["words"][tokens] + params["positions"][: tokens.shape[1]]
    for number in range(params["layers"]["qkv"].shape[0]):
        layer = {name: stacked[number] for name, stacked in params["layers"].items()}
        x = x + _attention(layer, _norm(x, layer["norm_1"]), mask, heads)
        x = x + jax.nn.gelu(_norm(x, layer["norm_2"]) @ layer["up"]) @ layer["down"]
    logits = _norm(x, params["norm"]) @ params["words"].T
    predicted = jax.nn.log_softmax(logits[:, :-1])
    target = jnp.take_along_axis(predicted, tokens[:, 1:, None], axis=-1)[..., 0]
    real = mask[:, 1:]
    return -jnp.sum(target * real) / jnp.maximum(jnp.sum(real), 1)


def make_train_step(config: DemoConfig) -> Any:
    """Returns `train_step(state, batch) -> (state, loss)`, the function that all runs compile."""
    optimizer = make_optimizer(config)

    def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, batch, config.heads)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        return TrainState(params, optimizer_state), loss

    return train_step
