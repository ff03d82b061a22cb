"""Which images to label next, from embeddings [images, width] and probabilities [images, classes] of a model.

margin     the smallest differences of the two highest probabilities
typical    TypiClust (Hacohen et al., 2022, arXiv 2202.02794): the densest images of the largest unlabelled clusters
coverage   ProbCover (Yehuda et al., 2022, arXiv 2205.11320): balls of one radius that together cover the most images
both       typical with fewer than 10 labels per class, margin from then on: few labels favour typical images and many
           labels uncertain ones (TypiClust, sec. 3); the paper states no limit, this one is ours
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels.kmeans import kmeans
from vitrail.kernels.similarity import SEARCHED, parts, products, top_rows
from vitrail.measure.clustering import nearest_centre
from vitrail.measure.trust import QUERIES, checked_embeddings, threshold_for

FEW = 10  # labels per class
CLUSTERS, NEIGHBOURS, TINY = 500, 20, 5  # TypiClust: most clusters, neighbours, and images of a cluster left out
PURE, MOST_BALLS = 0.95, 10_000  # ProbCover: share of balls with one pseudo-label, and of how many it is measured
MOST_EDGES = 100_000_000  # ProbCover: pairs of images in a ball; where there would be more, a random part of the images
MOST_FITTED = 100_000  # images that k-means sees, evenly spaced; all go to the nearest centre

Suggestion = tuple[Tensor, Tensor, str]  # rows [budget], the first to label first; their scores; what these are


def suggest_rows(
    by: str, embeddings: Tensor, top: Tensor | None, labelled: Tensor, budget: int, classes: int, seed: int = 0
) -> Suggestion:
    """`budget` images that are not among `labelled`; `top` [images, 2 or more] are probabilities, if there are any."""
    free = len(embeddings) - len(labelled)
    if not 1 <= budget <= free:
        raise ValueError(f"{budget} images cannot be suggested where {free} have no label; ask for 1 to {free}")
    if by == "both":
        by = "typical" if top is None or len(labelled) < FEW * classes else "margin"
    if by == "margin":
        if top is None:
            raise ValueError("margin needs probabilities of classes, and this model has none; use typical or coverage")
        return margin(top, labelled, budget)
    unit = F.normalize(checked_embeddings(embeddings).float(), dim=1)
    return typical(unit, labelled, budget, seed) if by == "typical" else coverage(unit, labelled, budget, classes, seed)


def margin(probabilities: Tensor, labelled: Tensor, budget: int) -> Suggestion:
    """The smallest differences of the two highest probabilities."""
    highest = probabilities.topk(2, dim=1).values
    difference = (highest[:, 0] - highest[:, 1]).index_fill(0, labelled, math.inf)
    rows = difference.argsort(stable=True)[:budget]
    return rows, difference[rows], "margin: the score is the difference of the two highest probabilities"


def typicality(unit: Tensor, k: int = NEIGHBOURS) -> Tensor:
    """1 / mean distance of each row of `unit` [rows, width] to its k nearest others: [rows]; 0 with a k of 0."""
    means = []
    for own in torch.arange(len(unit)).split(QUERIES):
        near = top_rows(unit[own], unit, k + 1, own=own)[1][:, 1:]
        apart = unit[own, None].double() - unit[near].double()  # sqrt(2 - 2 cos) would lose half the digits
        means.append(apart.norm(dim=2).mean(1).nan_to_num(math.inf))
    return 1 / (torch.cat(means) + 1e-5)  # the authors' constant, for copies


def typical(unit: Tensor, labelled: Tensor, budget: int, seed: int = 0) -> Suggestion:
    """TypiClust: as many clusters as there will be labels; those with the fewest labels and then the largest first.

    As in the authors' code: neighbours are unlabelled images of the cluster, at most half of them; clusters of five
    images and fewer are left out; clusters take turns where they are too few.
    """
    count = min(budget + len(labelled), CLUSTERS, len(unit))
    cluster = _clusters(unit, count, seed)
    free = torch.ones(len(unit), dtype=torch.bool).index_fill(0, labelled, False)
    size, known, left = (np.bincount(cluster[which], minlength=count) for which in (free | True, labelled, free))
    allowed = (left > 0) & ((size > TINY) | (left[size > TINY].sum() < budget))
    picks: list[tuple[int, int, int, float]] = []  # turn, place of the cluster, row, score
    for place, c in enumerate([c for c in np.lexsort((-size, known)).tolist() if allowed[c]][:budget]):
        rows = ((cluster == c) & free).nonzero()[:, 0]
        score, order = typicality(unit[rows], min(NEIGHBOURS, len(rows) // 2)).sort(descending=True, stable=True)
        picks += [(turn, place, int(rows[i]), float(score[turn])) for turn, i in enumerate(order[:budget].tolist())]
    _, _, chosen, scores = zip(*sorted(picks)[:budget], strict=True)
    note = f"typical: the score is 1 / mean distance to neighbours in the cluster ({count} clusters)"
    return torch.tensor(chosen), torch.tensor(scores), note


def coverage(
    unit: Tensor, labelled: Tensor, budget: int, classes: int, seed: int = 0, radius: float | None = None
) -> Suggestion:
    """ProbCover: greedily the image whose ball adds the most images to the covered ones; once all are, begin anew."""
    radius = radius or pure_radius(unit, max(2, classes), seed)
    order = torch.randperm(len(unit), generator=torch.Generator().manual_seed(seed))
    pairs = len(unit) * float(np.mean([len(ball) for ball in _balls(unit[order[:QUERIES]], unit, radius)]))
    part = max(budget, int(len(unit) * min(1.0, math.sqrt(MOST_EDGES / pairs))))
    pool = torch.cat([labelled, order[~torch.isin(order, labelled)][:part]]).sort().values
    balls = _balls(unit[pool], unit[pool], radius)
    sizes, uncovered, candidates = np.array([len(ball) for ball in balls]), *np.ones((2, len(pool)), bool)
    gains, fixed, picks = sizes.copy(), torch.searchsorted(pool, labelled).tolist(), list[tuple[int, int]]()
    while len(picks) < len(fixed) + budget:
        if len(picks) >= len(fixed) and not uncovered.any():
            gains[:], uncovered[:] = sizes, True
        best = fixed[len(picks)] if len(picks) < len(fixed) else int(np.where(candidates, gains, -1).argmax())
        picks.append((best, int(gains[best])))
        fresh = balls[best][uncovered[balls[best]]]
        candidates[best] = uncovered[fresh] = False
        for image in fresh.tolist():  # one radius: the balls that hold an image are those of the images in its own
            gains[balls[image]] -= 1
    chosen, added = zip(*picks[len(fixed) :], strict=True)
    drawn = f", of {len(pool):,} drawn at random" if len(pool) < len(unit) else ""
    note = f"coverage: the score is how many images a ball of radius {radius:.3g} adds to the covered ones{drawn}"
    return pool[list(chosen)], torch.tensor(added), note


def pure_radius(unit: Tensor, classes: int, seed: int = 0) -> float:
    """The largest radius at which 95 % of the balls hold images of one pseudo-label only, by k-means into `classes`."""
    label, distances = _clusters(unit, min(classes, len(unit)), seed), []  # of the nearest with another pseudo-label
    for rows in torch.arange(0, len(unit), math.ceil(len(unit) / MOST_BALLS)).split(QUERIES):
        cosines = [
            products(unit[rows], unit[part]).masked_fill_(label[rows, None] == label[part], -1.0).amax(1)
            for part in parts(len(rows), len(unit), SEARCHED)
        ]
        distances.append((2 - 2 * torch.stack(cosines).amax(0)).clamp(min=0).sqrt())
    return threshold_for(torch.cat(distances), PURE)


def _balls(centres: Tensor, unit: Tensor, radius: float) -> list[np.ndarray]:
    """Rows of `unit` closer than `radius` to each centre; copies always are."""
    balls: list[np.ndarray] = []
    for part in parts(len(unit), len(centres), SEARCHED):
        inside = products(centres[part], unit) > 1 - max(radius**2 / 2, 1e-6)
        balls += [ball.numpy() for ball in inside.nonzero()[:, 1].split(inside.sum(1).tolist())]
    return balls


def _clusters(unit: Tensor, count: int, seed: int) -> Tensor:
    fitted = unit[:: math.ceil(len(unit) / max(count, MOST_FITTED))]
    return nearest_centre(unit, kmeans(fitted, count, seed=seed).centres)
