"""Merging boxes until few enough are left: where the search for several axes starts.

Letters in shapes: `G` groups of samples of one shape, `A` axes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shapebucket.planner.costs import Elements
from shapebucket.planner.exact import optimal_boundaries

_GROUPS = 600


def merge_boxes(
    sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], elements: Elements, max_buckets: int
) -> npt.NDArray[np.int64]:
    """Chooses at most K boxes that hold all samples, by merging from many.

    Starts from the distinct shapes (rounded up to a grid of exact one-axis boundaries where there are more than a few
    hundred) and merges, again and again, the two groups whose common box adds the fewest elements: Ward's method (1963)
    with elements for variance. The result is good, not optimal.

    Args:
        sizes: distinct shapes, int64 [G, A].
        counts: samples of each, int64 [G].
        elements: what a row of a box costs, from int64 [..., A] to int64 [...].
        max_buckets: K.

    Returns:
        The boxes, int64 [≤ K, A].
    """
    boxes, weight = _on_grid(sizes, counts)
    cost = elements(boxes)
    alive = len(boxes)
    joint = _added(boxes, weight, cost, boxes, weight, cost, elements)
    np.fill_diagonal(joint, np.inf)
    while alive > max_buckets:
        a, b = divmod(int(np.argmin(joint)), len(boxes))
        boxes[a] = np.maximum(boxes[a], boxes[b])
        weight[a] += weight[b]
        cost[a] = elements(boxes[a])
        row = _added(boxes[[a]], weight[[a]], cost[[a]], boxes, weight, cost, elements)[0]
        row[a] = np.inf
        row[~np.isfinite(joint[a]) & (np.arange(len(boxes)) != a)] = np.inf
        joint[a], joint[:, a] = row, row
        joint[b], joint[:, b] = np.inf, np.inf
        weight[b] = 0
        alive -= 1
    return np.unique(boxes[weight > 0], axis=0)


def _added(
    a: npt.NDArray[np.int64],
    a_weight: npt.NDArray[np.int64],
    a_cost: npt.NDArray[np.int64],
    b: npt.NDArray[np.int64],
    b_weight: npt.NDArray[np.int64],
    b_cost: npt.NDArray[np.int64],
    elements: Elements,
) -> npt.NDArray[np.float64]:
    """Returns the elements that the common box of each pair adds, float64 [len(a), len(b)]."""
    common = elements(np.maximum(a[:, None], b[None, :]))
    together = (a_weight[:, None] + b_weight[None, :]) * common
    return (together - (a_weight * a_cost)[:, None] - (b_weight * b_cost)[None, :]).astype(np.float64)


def _on_grid(
    sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rounds shapes up to a grid of at most a few hundred cells; each cell shrinks to the shapes in it."""
    if len(sizes) <= _GROUPS:
        return sizes.copy(), counts.copy()
    axes = sizes.shape[1]
    levels = max(2, int(_GROUPS ** (1 / axes)))
    cells = np.zeros_like(sizes)
    for axis in range(axes):
        distinct, where = np.unique(sizes[:, axis], return_inverse=True)
        held = np.bincount(where, weights=counts).astype(np.int64)
        bounds, _ = optimal_boundaries(held, distinct, levels)
        cells[:, axis] = np.searchsorted(distinct[bounds], sizes[:, axis])
    _, group = np.unique(cells, axis=0, return_inverse=True)
    group = group.reshape(-1)
    boxes = np.zeros((int(group.max()) + 1, axes), np.int64)
    np.maximum.at(boxes, group, sizes)
    return boxes, np.bincount(group, weights=counts).astype(np.int64)
