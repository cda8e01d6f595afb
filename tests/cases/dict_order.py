"""Two readers fill an OrderedDict in another order; a plain dict would be sorted."""

from collections import OrderedDict

import jax
import numpy as np


@jax.jit
def train_step(batch):
    return batch["tokens"].sum() + batch["labels"].sum()


tokens, labels = np.ones((2, 3), np.float32), np.ones(2, np.float32)
train_step(OrderedDict(tokens=tokens, labels=labels))
train_step(OrderedDict(labels=labels, tokens=tokens))
