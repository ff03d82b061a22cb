"""Label errors by confident learning (Northcutt et al., 2021, arXiv 1911.00068), outliers, and inseparable classes.

Labels are [images] in 0..classes - 1, or [images, classes] of 0/1 where several may hold; embeddings [images, width].
Probabilities come in blocks, the same at every call, so that images x classes are never held at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.counter import uniform
from vitrail.data.dataset import stratum
from vitrail.measure.classification import SCORES_AT_ONCE
from vitrail.measure.probe import prepared
from vitrail.measure.trust import fit_neighbours

Blocks = Callable[[], Iterable[tuple[Tensor, Tensor]]]  # rows [some] and their probabilities [some, classes]
ROUNDING = 1e-6  # by which a probability may miss a threshold
RIDGES = (1.0, 0.1, 0.01, 1e-3, 1e-4)  # of the mean loss
SELECTION = 20_000_000  # images x classes on which the ridge is chosen, at most
KEPT, ROUNDS = 20, 10  # classes of an image that can be the true one, and rounds of EM, for noise between classes
LAST, LITTLE = 0.1, 0.02  # share of classes that only uniform noise gives as a label, and how much of it is little


@dataclass(frozen=True, eq=False)
class Suspects:
    """Images whose label is probably wrong, the least credible first, and statistics of all labels."""

    images: Tensor  # [suspects] rows
    proposed: Tensor  # [suspects] class, or [suspects, classes] of 0/1
    scores: Tensor  # [images] float64, of all: from 0, not credible, to 1
    expected: float  # number of wrong labels, by the calibrated joint
    agreement: float  # share of labels that the classifiers predict
    joint: Tensor  # sparse [classes, classes]: images by label and confident class; of several labels absent, present


def suspects(
    probabilities: Tensor | Blocks,
    labels: Tensor,
    score: Literal["noise", "ratio", "self_confidence", "margin"] = "noise",
) -> Suspects:
    """Rank labels by out-of-fold probabilities; as many are suspects as confident learning expects to be wrong.

    With p of the label and q of the most probable other class, `self_confidence` is p, `margin` (p - q + 1) / 2,
    `ratio` p / (p + q), and `noise` p / (p + sum of w q of all other classes), where w is how often a class is given
    that label by mistake, relative to chance (`_noise_weights`). An image alone in its class is no suspect. Where
    several labels may hold, each of an image, absent or present, is a problem of two classes, and the image has the
    least score.
    """
    dense = probabilities
    blocks: Blocks = dense if callable(dense) else (lambda: [(torch.arange(len(labels), device=dense.device), dense)])
    if labels.ndim == 2:
        return _several(blocks, labels)
    p = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
    confident, pieces = torch.zeros_like(labels, dtype=torch.int64), []
    for rows, block in blocks():
        label, classes = labels[rows, None], block.shape[1]
        p[rows] = block.gather(1, label)[:, 0].double()
        rank = (block > block.gather(1, label)).sum(1)
        pieces.append((rows, rank, *block.scatter(1, label, -1).topk(min(KEPT, classes), dim=1)))
    places, *columns = (torch.cat(column) for column in zip(*pieces, strict=True))
    rank, others, other_classes = (column[places.argsort()] for column in columns)
    q, proposed = others[:, 0].double(), other_classes[:, 0]
    counts = torch.bincount(labels, minlength=classes)
    thresholds = torch.where(counts > 0, torch.bincount(labels, p, classes) / counts, 2).clamp(min=2 * ROUNDING)
    for rows, block in blocks():
        reached = block >= thresholds - ROUNDING
        chosen = torch.where(reached.sum(1) > 1, block.argmax(1), reached.int().argmax(1))
        confident[rows] = torch.where(reached.any(1), chosen, -1)
    known, right, alone = confident >= 0, confident == labels, counts[labels] < 2
    against = q
    if score == "noise":
        weights, least = _noise_weights(p, others.double().clamp(min=0), other_classes, labels, rank, classes)
        against = (others.clamp(min=0) * weights).sum(1) + least * (1 - p - others.clamp(min=0).sum(1)).clamp(min=0)
    ratio = (p + ROUNDING) / (p + against + ROUNDING)
    scores = {"self_confidence": p, "margin": (p - q + 1) / 2}.get(score, ratio).masked_fill(alone, 1)
    diagonal = torch.bincount(labels[right], minlength=classes)
    total = torch.bincount(labels[known], minlength=classes) + (diagonal == 0)  # as if one image were right
    expected = float((counts * (1 - diagonal.clamp(min=1) / total)).sum())
    order = scores.argsort(stable=True)
    images = order[(~alone & (p < q))[order]][: round(expected)]
    pairs, number = (labels * classes + confident)[known].unique(return_counts=True)  # `coalesce` would warn
    places, size = torch.stack([pairs // classes, pairs % classes]), (classes, classes)
    joint = torch.sparse_coo_tensor(places, number, size, is_coalesced=True, check_invariants=False)
    return Suspects(images, proposed[images], scores, expected, float((p >= q).double().mean()), joint)


def _noise_weights(
    p: Tensor, others: Tensor, other_classes: Tensor, labels: Tensor, rank: Tensor, classes: int
) -> tuple[Tensor, float]:
    """How often each of `other_classes` [images, some] has the label of the image by mistake, relative to chance, where
    any class is as often mistaken for any; and the same for classes that are not listed.

    Two kinds of noise are mixed. Of uniform noise alone a label can be among the least probable classes (`rank` is
    their number before it), which shows how much of it there is. Noise between pairs of classes is estimated by EM
    (Dawid and Skene, 1979), with the probabilities taken for those of the true class.
    """
    keys, place = (other_classes * classes + labels[:, None]).unique(return_inverse=True)
    true, wrong = keys // classes, torch.full(keys.shape, 0.05 / max(1, classes - 1), dtype=p.dtype, device=p.device)
    right = torch.full((classes,), 0.95, dtype=p.dtype, device=p.device)
    for _ in range(ROUNDS):
        correct, mistaken = p * right[labels], others * wrong[place]
        total = (correct + mistaken.sum(1)).clamp(min=1e-300)
        correct = torch.bincount(labels, correct / total, classes)
        mistakes = torch.bincount(place.flatten(), (mistaken / total[:, None]).flatten(), len(keys))
        images = (correct + torch.bincount(true, mistakes, classes)).clamp(min=1e-300)
        right, wrong = correct / images, mistakes / images[true]
    of_class = wrong * classes / wrong.sum().clamp(min=1e-300)
    last = max(1, round(LAST * classes))
    uniform_noise = float((rank >= classes - last).double().mean()) * (classes - 1) / last
    least = uniform_noise**2 / (uniform_noise**2 + LITTLE**2)
    return least + (1 - least) * (classes - 1) * of_class[place], least


def _several(blocks: Blocks, labels: Tensor) -> Suspects:
    each = torch.arange(labels.numel(), device=labels.device).view(labels.shape)
    result = suspects(
        lambda: ((each[rows].flatten(), torch.stack([1 - p, p], 2).flatten(0, 1)) for rows, p in blocks()),
        labels.flatten(),
        "self_confidence",
    )
    scores, proposed = result.scores.view(labels.shape).amin(1), labels.clone()
    proposed.view(-1)[result.images] = result.proposed
    images = (proposed != labels).any(1).nonzero()[:, 0]
    images = images[scores[images].argsort(stable=True)]
    return replace(result, images=images, proposed=proposed[images], scores=scores)


def inseparable(joint: Tensor, share: float = 0.1, least: int = 3) -> list[tuple[int, int, float]]:
    """Pairs of classes of which each is confidently the other in at least `share` and `least` of its images, the worst
    first; third is the smaller of both shares. `joint` is that of `Suspects`."""
    (label, confident), counts = joint.indices(), joint.values()
    shares = counts / torch.bincount(label, counts, len(joint))[label]
    large = (label != confident) & (shares >= share) & (counts >= least)
    found = dict(zip(map(tuple, joint.indices()[:, large].T.tolist()), shares[large].tolist(), strict=True))
    pairs = [(a, b, min(value, found[b, a])) for (a, b), value in found.items() if a < b and (b, a) in found]
    return sorted(pairs, key=lambda pair: -pair[2])


def outliers(embeddings: Tensor, k: int = 10) -> Tensor:
    """Images far from all others, the farthest first: by the distance to the k-th neighbour at unit length.

    Far is beyond the upper quartile of distances by three times the distance of both quartiles (Tukey, 1977).
    """
    distances = -fit_neighbours(embeddings, min(k + 1, len(embeddings)))(embeddings)  # the nearest is the image itself
    low, high = np.quantile(distances.numpy(), [0.25, 0.75])
    order = distances.argsort(descending=True)
    return order[distances[order] > high + 3 * (high - low)]


def out_of_fold(embeddings: Tensor, labels: Tensor, folds: int = 5, seed: int = 0) -> Blocks:
    """Probabilities of every image by logistic regression with a ridge, fitted to the embeddings of all other folds.

    Folds are stratified, a function of seed, labels and position. Raises `ValueError` for fewer images than folds.
    """
    if not 2 <= folds <= len(labels):
        raise ValueError(f"{len(labels)} images cannot be divided into {folds} folds; 2 to {len(labels)} are possible")
    several, classes = labels.ndim == 2, labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    features = F.pad(prepared(embeddings)[0], (0, 1), value=1.0)
    order = np.lexsort((uniform(seed, np.arange(len(labels))), stratum(labels.cpu().numpy())))
    parts = [torch.from_numpy(np.sort(order[n::folds])).to(labels.device) for n in range(folds)]
    rests = [torch.cat(parts[:n] + parts[n + 1 :]) for n in range(folds)]
    rest, held = (rows[:: 1 + len(rows) * classes // SELECTION] for rows in (rests[0], parts[0]))
    accuracies = []
    for ridge in RIDGES:
        scores = features[held] @ _fit(features[rest], labels[rest], classes, ridge)
        right = (scores > 0) == (labels[held] > 0) if several else scores.argmax(1) == labels[held]
        accuracies.append(float(right.double().mean()))
    # The strongest within one standard error of the best: a flexible classifier learns the label noise, too.
    least = max(accuracies) - (max(accuracies) * (1 - max(accuracies)) / len(held)) ** 0.5
    ridge = next(r for r, accuracy in zip(RIDGES, accuracies, strict=True) if accuracy >= least)
    weights = [_fit(features[rest], labels[rest], classes, ridge) for rest in rests]
    return lambda: (
        (rows, (features[rows] @ weight).sigmoid() if several else (features[rows] @ weight).softmax(1))
        for part, weight in zip(parts, weights, strict=True)
        for rows in part.split(max(1, SCORES_AT_ONCE // classes))
    )


def _fit(features: Tensor, labels: Tensor, classes: int, ridge: float) -> Tensor:
    """Weights [width + 1, classes] of least mean cross entropy + ridge ||weights||² / 2, the last row without ridge."""
    weight = torch.zeros(features.shape[1], classes, device=features.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], 1, 100, tolerance_grad=1e-6, history_size=10, line_search_fn="strong_wolfe")
    cross_entropy = F.binary_cross_entropy_with_logits if labels.ndim == 2 else F.cross_entropy
    targets, size = labels.float() if labels.ndim == 2 else labels, max(1, SCORES_AT_ONCE // classes)

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = [ridge * weight[:-1].square().sum() / 2]
        losses[0].backward()
        for rows, target in zip(features.split(size), targets.split(size), strict=True):
            losses.append(cross_entropy(rows @ weight, target, reduction="sum") / len(labels))
            losses[-1].backward()
        return torch.stack(losses).sum().detach()

    with torch.enable_grad():
        optimizer.step(closure)
    return weight.detach()
