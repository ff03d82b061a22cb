"""Which rows of a labelled set are drawn: so many of every class, at random."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vitrail.data.counter import uniform

DRAW = 0x64726177  # keeps these numbers apart from those by which training images are drawn


def draw_by_class(labels: Tensor, wanted: Callable[[int], int], seed: int) -> Tensor:
    """Rows [drawn], ascending: of a class of n rows `wanted(n)` are drawn, never more than it has.

    `labels` [rows]. Each row has a random number of its own, a function of seed and place, and the smallest of a class
    are drawn: so a smaller draw with the same seed is part of a larger one.

    >>> draw_by_class(torch.tensor([0, 0, 1, 1, 1]), lambda n: n, seed=0).tolist()
    [0, 1, 2, 3, 4]
    """
    if labels.ndim != 1:
        raise ValueError("rows are drawn by class, so each needs one label; these have several")
    known = labels.cpu().numpy()
    order = np.lexsort((uniform(seed, DRAW, np.arange(len(known))), known))
    sizes = np.bincount(known)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]]) if len(sizes) else sizes
    counts = np.array([min(int(n), max(0, wanted(int(n)))) if n else 0 for n in sizes], np.int64)
    place = np.arange(len(known)) - np.repeat(first, sizes)
    chosen = np.sort(order[place < np.repeat(counts, sizes)])
    return torch.from_numpy(chosen).to(labels.device)
