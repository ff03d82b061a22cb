"""Rejection of images that belong to none of the classes: scores that are higher for known images, and their metrics.

From logits [images, classes]: the highest probability (Hendrycks and Gimpel, 2017, arXiv 1610.02136), the highest logit
(Hendrycks et al., 2022, arXiv 1911.11132) and the energy, the log of the summed exponentials (Liu et al., 2020, arXiv
2010.03759). From embeddings [images, width], by what was fitted on training images: the distance to the k-th neighbour
(Sun et al., 2022, arXiv 2204.06507) and the Mahalanobis distance to the nearest class mean (Lee et al., 2018, arXiv
1807.03888), both negative. Float64 on the CPU, some images at a time. An image is rejected below a threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels.similarity import top_rows
from vitrail.measure.calibration import Scores
from vitrail.measure.classification import SCORES_AT_ONCE, Floats, average_precision, check_scores

NEIGHBOURS = 50
QUERIES = 1024  # images whose neighbours are searched at once
LEAST_SHRINKAGE = 1e-6  # so that every covariance can be inverted

SOFTMAX_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "max_probability": lambda rows: rows.softmax(1).amax(1),
    "max_logit": lambda rows: rows.amax(1),
    "energy": lambda rows: rows.logsumexp(1),
}
LABEL_SCORES: dict[str, Callable[[Tensor], Tensor]] = {  # of the label that is most certain
    "max_probability": lambda rows: rows.amax(1).sigmoid(),
    "max_logit": lambda rows: rows.amax(1),
    "energy": lambda rows: F.softplus(rows.amax(1)),
}


def logit_score(logits: Scores, kind: str, *, multilabel: bool = False) -> Tensor:
    """A score of every image [images] from its logits: `max_probability`, `max_logit` or `energy`.

    Multi-label it is the maximum over labels, of the energy log(1 + exp(logit)) too: all three then rank images alike.

    >>> logit_score(torch.tensor([[0.0, 0.0], [3.0, 0.0]]), "max_logit").tolist()
    [0.0, 3.0]
    """
    logits, scores = torch.as_tensor(logits).detach().cpu(), LABEL_SCORES if multilabel else SOFTMAX_SCORES
    if kind not in scores:
        raise ValueError(f"{kind!r} is no score of logits; there are {', '.join(scores)}")
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"logits have shape {list(logits.shape)}, not [images, classes]")
    check_scores(logits)
    size = max(1, SCORES_AT_ONCE // logits.shape[1])
    return torch.cat([scores[kind](rows.double()) for rows in logits.split(size)])


@dataclass(frozen=True, eq=False)
class NeighbourScore:
    """Minus the distance to the k-th nearest training embedding, all of unit length."""

    memory: Tensor  # [training images, width] float32, of unit length
    k: int

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Scores [images] of embeddings [images, width]."""
        pieces = []
        for rows in _checked(embeddings, self.memory.shape[1]).split(QUERIES):
            unit = F.normalize(rows.double(), dim=1)
            farthest = top_rows(unit.float(), self.memory, self.k)[1][:, -1]
            pieces.append(-(unit - self.memory[farthest]).norm(dim=1))  # sqrt(2 - 2 cos) would lose half the digits
        return torch.cat(pieces)

    def tensors(self) -> dict[str, Tensor]:
        """What is stored with `to_json`."""
        return {"memory": self.memory}

    def to_json(self) -> dict[str, Any]:
        return {"kind": "neighbours", "k": self.k, "images": len(self.memory), "width": self.memory.shape[1]}


@dataclass(frozen=True, eq=False)
class MahalanobisScore:
    """Minus the smallest squared Mahalanobis distance to a class mean, with one covariance of all classes.

    The covariance S of width d is shrunk to (1 - s) S + s trace(S) / d I, with the s of Ledoit and Wolf (2004).
    """

    means: Tensor  # [classes with images, width] float64, whitened
    whitening: Tensor  # [width, width] float64: the inverse of the Cholesky factor of the covariance
    shrinkage: float
    images: int

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Scores [images] of embeddings [images, width]."""
        pieces = _checked(embeddings, len(self.whitening)).split(max(1, SCORES_AT_ONCE // max(self.means.shape)))
        whitened = (rows.double() @ self.whitening.T for rows in pieces)
        return torch.cat([-torch.cdist(rows, self.means).amin(1).square() for rows in whitened])

    def tensors(self) -> dict[str, Tensor]:
        """What is stored with `to_json`."""
        return {"means": self.means, "whitening": self.whitening}

    def to_json(self) -> dict[str, Any]:
        facts = {"images": self.images, "classes": len(self.means), "width": len(self.whitening)}
        return {"kind": "mahalanobis", "shrinkage": self.shrinkage, **facts}


EmbeddingScore = NeighbourScore | MahalanobisScore


def fit_neighbours(embeddings: Scores, k: int = NEIGHBOURS) -> NeighbourScore:
    """Score by the distance to the k-th neighbour among training embeddings [images, width], all or a random part.

    The paper uses a k of 50 for CIFAR-10, 200 for CIFAR-100 and 1000 for ImageNet. A training image is its own nearest
    neighbour: take thresholds from other images. Raises `ValueError` for fewer than k images.
    """
    rows = _checked(torch.as_tensor(embeddings))
    if not 1 <= k <= len(rows):
        raise ValueError(f"k = {k} neighbours of {len(rows)} training images are impossible; use a k from 1 to that")
    return NeighbourScore(F.normalize(rows.float(), dim=1), k)


def fit_mahalanobis(embeddings: Scores, target: Scores) -> MahalanobisScore:
    """Class means and shared covariance of training embeddings [images, width] by label.

    `target` is [images], or [images, classes] of 0/1, where an image counts once for each of its labels. Classes
    without images have no mean. Raises `ValueError` where no embedding differs from the mean of its class.
    """
    rows, labels = _checked(torch.as_tensor(embeddings)), torch.as_tensor(target).detach().cpu()
    several = labels.ndim == 2
    if labels.ndim not in (1, 2) or len(labels) != len(rows) or (labels.is_floating_point() and not several):
        raise ValueError(
            f"labels are {labels.dtype} of shape {list(labels.shape)}: class numbers of {len(rows)} images, or 0/1 for "
            "each of their classes, are needed"
        )
    if int(labels.min()) < 0:
        raise ValueError("some images have a negative label, that is none; leave them out")
    places, classes = labels.nonzero(as_tuple=True) if several else (torch.arange(len(rows)), labels.long())
    if not len(places):
        raise ValueError("class means need training images with a label, and there are none")
    known, classes = classes.unique(return_inverse=True)
    width, count = rows.shape[1], len(places)
    pieces = list(zip(*(each.split(max(1, SCORES_AT_ONCE // width)) for each in (places, classes)), strict=True))
    means = torch.zeros(len(known), width, dtype=torch.float64)
    for part, label in pieces:
        means.index_add_(0, label, rows[part].double())
    means /= torch.bincount(classes)[:, None]
    covariance, fourth = torch.zeros(width, width, dtype=torch.float64), 0.0
    for part, label in pieces:
        centred = rows[part].double() - means[label]
        covariance += centred.T @ centred / count
        fourth += float(centred.square().sum(1).square().sum()) / count
    spread = float(covariance.trace()) / width
    if not spread > 1e-24 * float(means.square().mean()):  # equal but for rounding is equal
        raise ValueError("no embedding differs from the mean of its class; a covariance needs several images of one")
    target_distance = float((covariance - spread * torch.eye(width, dtype=torch.float64)).square().sum())
    noise = (fourth - float(covariance.square().sum())) / count
    shrinkage = min(1.0, max(LEAST_SHRINKAGE, noise / target_distance if target_distance > 0 else 0.0))
    shrunk = (1 - shrinkage) * covariance + shrinkage * spread * torch.eye(width, dtype=torch.float64)
    factor = torch.linalg.cholesky(shrunk)
    whitening = torch.linalg.solve_triangular(factor, torch.eye(width, dtype=torch.float64), upper=False)
    return MahalanobisScore(means @ whitening.T, whitening, shrinkage, len(rows))


def read_embedding_score(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> EmbeddingScore:
    """The score that `to_json` and `tensors` of a fitted one describe. Raises `ValueError` where they are damaged."""
    try:
        if facts["kind"] == "neighbours":
            score: EmbeddingScore = NeighbourScore(_checked(tensors["memory"]).float(), int(facts["k"]))
            fits = 1 <= int(facts["k"]) <= len(tensors["memory"])
        elif facts["kind"] == "mahalanobis":
            means, whitening = (_checked(tensors[name]).double() for name in ("means", "whitening"))
            score = MahalanobisScore(means, whitening, float(facts["shrinkage"]), int(facts["images"]))
            fits = len(whitening) == whitening.shape[1] == means.shape[1]
        else:
            raise ValueError(f"its kind is {facts['kind']!r}")
        if not fits or any(facts.get(name) != value for name, value in score.to_json().items()):
            raise ValueError("facts and tensors do not belong together")
        return score
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"this is no stored score of embeddings ({error}); fit it again") from None


def threshold_for(scores: Scores, keep: float = 0.95) -> float:
    """The highest threshold that keeps at least the share `keep` of known images: those whose score is not below it.

    >>> threshold_for(torch.tensor([4.0, 1.0, 3.0, 2.0]), keep=0.75)
    2.0
    """
    values = np.sort(_finite(scores))
    if not 0 < keep <= 1:
        raise ValueError(f"a share of {keep:g} cannot be kept; use one above 0 and up to 1")
    return float(values[len(values) - math.ceil(len(values) * keep - 1e-9)])


def rejection_metrics(known: Scores, unknown: Scores) -> dict[str, float]:
    """`auroc`, `fpr95`, `aupr` and `aupr_unknown` of the scores of known and of unknown images.

    AUROC is the probability that a known image scores higher than an unknown one, equal scores counting by half. FPR95
    is the share of unknown images that pass the threshold which keeps 95 % of the known. AUPR is the average precision
    with known images as positives, or unknown ones by the negative score; it depends on how many there are of each.
    """
    inside, outside = _finite(known), _finite(unknown)
    ordered = np.sort(outside)
    below, up_to = (int(np.searchsorted(ordered, inside, side).sum()) for side in ("left", "right"))
    both, positive = np.concatenate([inside, outside]), np.arange(len(inside) + len(outside)) < len(inside)
    return {
        "auroc": (below + up_to) / (2 * len(inside) * len(outside)),
        "fpr95": float((outside >= threshold_for(inside, 0.95)).mean()),
        "aupr": average_precision(both, positive),
        "aupr_unknown": average_precision(-both, ~positive),
    }


def _finite(scores: Scores) -> Floats:
    values = torch.as_tensor(scores).detach().cpu().double().numpy()
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"scores of shape {list(values.shape)}: one finite number per image, and an image, are needed")
    return values


def _checked(embeddings: Tensor, width: int | None = None) -> Tensor:
    rows = embeddings.detach().cpu()
    if rows.ndim != 2 or not rows.shape[1] or (width is None and not len(rows)) or width not in (None, rows.shape[1]):
        wanted = f"[images, {'width' if width is None else width}]"
        raise ValueError(f"embeddings have shape {list(rows.shape)}: {wanted} are needed, check model and split")
    if not rows.isfinite().all():
        raise ValueError("some embeddings are NaN or infinite: the model has diverged or its input is broken")
    return rows
