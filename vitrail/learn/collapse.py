"""Collapse metrics, spread and rank of the embeddings, logged for every objective that compares them.

A representation collapses where all images get one embedding, or embeddings that differ along a line only; the loss is
then often excellent. Both metrics cost one small matrix product per step, on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

SPREAD_LIMIT = 0.1  # all cosines are about 0.99 there
RANK_LIMIT = 1.5
SETTLING = 0.1  # share of a run without warnings: an untrained network may embed all images nearly alike


def spread_and_rank(embedding: Tensor) -> tuple[Tensor, Tensor]:
    """Two scalars of embeddings [batch, width], whose lengths do not matter; without gradient.

    spread   standard deviation of the unit vectors, root mean square over channels, times sqrt(width): 0 where they
             are all the same, 1 where they point everywhere alike
    rank     (sum of the covariance's eigenvalues)^2 / sum of their squares, the participation ratio: how many
             directions they differ in; 1 for a line, `width` for a ball. No eigenvalue is computed.
    """
    with torch.no_grad(), torch.autocast(embedding.device.type, enabled=False):
        vectors = F.normalize(embedding.float(), dim=-1)
        apart = vectors - vectors.mean(0)
        few = apart if len(apart) < apart.shape[1] else apart.T  # both products have the same eigenvalues
        total, squares = apart.square().sum(), (few @ few.T).square().sum()
        return (total / len(vectors)).sqrt(), total.square() / squares.clamp(min=1e-30)


def collapse_note(means: Mapping[str, float], done: float, classes: int) -> str:
    """A sentence where the logged `spread` or `rank` is below its limit; `done` is the share of the run so far.

    With two classes a line is what labels ask for, so the rank is not checked there.
    """
    if done < SETTLING or "spread" not in means:
        return ""
    if means["spread"] < SPREAD_LIMIT:
        return (
            f"embeddings have collapsed: their spread is {means['spread']:.3f}, below {SPREAD_LIMIT} (0: one embedding "
            "for all images); lower optim.lr, use stronger views, or raise objective.momentum where there is one"
        )
    if means["rank"] < RANK_LIMIT and classes != 2:
        return (
            f"embeddings have collapsed to a line: their effective rank is {means['rank']:.2f}, below {RANK_LIMIT}; "
            "lower optim.lr, use stronger views, or raise objective.momentum where there is one"
        )
    return ""
