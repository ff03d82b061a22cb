"""Whether an answer can be trusted: what is fitted on held-out images and stored with a model, and rejection scores.

Scores for rejection are higher for images that belong to a class.

From logits [images, classes]: the highest probability (Hendrycks and Gimpel, 2017, arXiv 1610.02136), the highest logit
(Hendrycks et al., 2022, arXiv 1911.11132) and the energy, the log of the summed exponentials (Liu et al., 2020, arXiv
2010.03759). From embeddings [images, width], by what was fitted on training images: the distance to the k-th neighbour
(Sun et al., 2022, arXiv 2204.06507) and the Mahalanobis distance to the nearest class mean (Lee et al., 2018, arXiv
1807.03888), both negative. Float64 on the CPU, some images at a time. An image is rejected below a threshold.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.files import FORMAT_VERSION, LaterVersion, parse_json, reject_later
from vitrail.kernels.similarity import top_rows
from vitrail.measure.calibration import (
    METHODS,
    ConformalRule,
    Scores,
    calibration_metrics,
    chance_ece,
    choose_calibration,
    coverage_interval,
    fit_robust_temperature,
    fit_vector_scaling,
    set_metrics,
)
from vitrail.measure.classification import SCORES_AT_ONCE, Floats, average_precision, check_scores
from vitrail.measure.evaluator import (
    NOTHING,
    AnyPredictions,
    Predictions,
    Where,
    batches,
    draw_by_class,
    rows_of_all,
)
from vitrail.model.classifier import Calibration, Classifier
from vitrail.model.store import read_tensors, write_tensors

NEIGHBOURS = 50
QUERIES = 1024  # images whose neighbours are searched at once
LEAST_SHRINKAGE = 1e-6  # so that every covariance can be inverted
FEWEST_HELD_OUT = 20  # images of each half of val
OUTLIERS = 2_000  # that are made of each kind, about
TILES = 4  # by row and by column
WORTH = 0.02  # of AUROC, by which a reject score of embeddings must be ahead of those of logits
COVERAGES = (0.9, 0.95, 0.99)  # that are measured

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
        for rows in checked_embeddings(embeddings, self.memory.shape[1]).split(QUERIES):
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
        pieces = checked_embeddings(embeddings, len(self.whitening)).split(
            max(1, SCORES_AT_ONCE // max(self.means.shape))
        )
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
    rows = checked_embeddings(torch.as_tensor(embeddings))
    if not 1 <= k <= len(rows):
        raise ValueError(f"k = {k} neighbours of {len(rows)} training images are impossible; use a k from 1 to that")
    return NeighbourScore(F.normalize(rows.float(), dim=1), k)


def fit_mahalanobis(embeddings: Scores, target: Scores) -> MahalanobisScore:
    """Class means and shared covariance of training embeddings [images, width] by label.

    `target` is [images], or [images, classes] of 0/1, where an image counts once for each of its labels. Classes
    without images have no mean. Raises `ValueError` where no embedding differs from the mean of its class.
    """
    rows, labels = checked_embeddings(torch.as_tensor(embeddings)), torch.as_tensor(target).detach().cpu()
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
            score: EmbeddingScore = NeighbourScore(checked_embeddings(tensors["memory"]).float(), int(facts["k"]))
            fits = 1 <= int(facts["k"]) <= len(tensors["memory"])
        elif facts["kind"] == "mahalanobis":
            means, whitening = (checked_embeddings(tensors[name]).double() for name in ("means", "whitening"))
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


FILE = "trust.safetensors"  # beside the weights of a model
EXCLUSIVE = "of more probable classes"  # scores of aps and raps; earlier versions added the probability of the class


@dataclass(frozen=True, eq=False)
class Trust:
    """Scores of held-out images, from which thresholds for any share of images follow."""

    labels: Mapping[str, Tensor]  # method of prediction sets -> [images] scores of labels; none where several may hold
    known: Tensor  # [images] reject scores
    kind: str = "energy"  # of reject score
    embedding: EmbeddingScore | None = None  # the score itself, where it is one of embeddings
    auroc: Mapping[str, float] = field(default_factory=dict)
    """Of every kind of reject score against outliers, by which it was chosen."""

    def rule(self, coverage: float, method: str = "lac") -> ConformalRule:
        """The rule of prediction sets that hold the label with probability `coverage`."""
        if not self.labels:
            raise ValueError("prediction sets are for one label per image, and this model may give several")
        rule = ConformalRule(method, coverage, math.inf, 1)  # rejects what cannot be
        if method not in self.labels:
            raise ValueError(
                f"an earlier version fitted {method} sets of this model by another score, which made them too large; "
                "use lac, or fit again with: vitrail evaluate RUN --calibrate"
            )
        return rule.at(self.labels[method])

    def scores(self, logits: Tensor, embeddings: Tensor, *, multilabel: bool = False) -> Tensor:
        """Reject scores [images] from logits as the model gives them, and embeddings."""
        if self.embedding is not None:
            return self.embedding(embeddings)
        return logit_score(logits, self.kind, multilabel=multilabel)

    def save(self, folder: Path) -> None:
        """Write it beside the model in `folder`."""
        tensors = {f"labels.{method}": scores for method, scores in self.labels.items()} | {"known": self.known}
        facts: dict[str, Any] = {"format_version": FORMAT_VERSION, "kind": self.kind, "auroc": dict(self.auroc)}
        facts["scores"] = EXCLUSIVE
        if self.embedding is not None:
            tensors |= self.embedding.tensors()
            facts["embedding"] = self.embedding.to_json()
        write_tensors(folder / FILE, tensors, {"facts": json.dumps(facts)})

    @classmethod
    def read(cls, folder: Path) -> Trust:
        """What was saved beside a model. Raises `ValueError` where it is damaged, or where there is nothing."""
        from safetensors import safe_open

        if not (folder / FILE).is_file():
            raise ValueError(
                f"nothing was fitted for {folder} on held-out images, so prediction sets and rejection are not known; "
                "fit them with: vitrail evaluate RUN --calibrate"
            )
        tensors = read_tensors(folder / FILE)
        try:
            with safe_open(folder / FILE, "pt") as file:
                facts = parse_json((file.metadata() or {})["facts"])
            reject_later(folder / FILE, facts)
            score = read_embedding_score(facts["embedding"], tensors) if "embedding" in facts else None
            labels = {name.removeprefix("labels."): t for name, t in tensors.items() if name.startswith("labels.")}
            if facts.get("scores") != EXCLUSIVE:
                labels = {name: scores for name, scores in labels.items() if name == "lac"}
            if score is None and facts["kind"] not in SOFTMAX_SCORES:
                raise ValueError(f"its kind is {facts['kind']!r}")
            return cls(labels, tensors["known"], str(facts["kind"]), score, dict(facts["auroc"]))
        except LaterVersion:
            raise
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{folder / FILE} is damaged ({error}); fit it again: vitrail evaluate RUN --calibrate"
            ) from None


@dataclass(frozen=True, eq=False)
class Fitted:
    """What one half of val gave for probabilities and rejection, and the other for prediction sets."""

    calibration: Calibration
    other: Calibration  # of the same kind, by the second half
    first: Tensor  # [images] stable index of the first half
    trust: Trust
    images: int

    def calibrated(self, predictions: Predictions, own: bool) -> Predictions:
        """Predictions of the calibrated model; of val itself (`own`), each by the half that it is not in."""
        logits = self.calibration(predictions.logits)
        if own:
            first = torch.isin(predictions.index, self.first)
            logits = torch.where(first[:, None], self.other(predictions.logits), logits)
        return replace(predictions, logits=logits)

    def facts(self, before: AnyPredictions, after: AnyPredictions, split: str) -> dict[str, Any]:
        """What was fitted, and what it gives on the evaluated split; up to `LOGIT_CLASSES` classes."""
        trust = self.trust
        calibration = {"kind": self.calibration.kind, "temperature": self.calibration.temperature}
        facts: dict[str, Any] = {"split": split, "images": self.images, **calibration}
        facts["reject"] = {"kind": trust.kind, "auroc": dict(trust.auroc)}
        if not (isinstance(before, Predictions) and isinstance(after, Predictions)):
            return facts
        facts |= {when: calibration_metrics(p.logits, p.target) for when, p in (("before", before), ("after", after))}
        if not trust.labels:
            return facts
        facts["chance"] = chance_ece(after.probabilities.amax(1))
        # Of val only images count from which the quantile was not taken.
        rows = torch.isin(before.index, self.first) if split == "val" else torch.ones(len(before), dtype=torch.bool)
        chances, target = self.calibration(before.logits[rows]).softmax(1), before.target[rows]
        facts["sets"] = []
        for rule in map(trust.rule, COVERAGES if rows.any() else ()):
            inside = rule.sets(chances)
            row = {"asked": rule.coverage, "interval": coverage_interval(rule.images, rule.coverage, len(target))}
            single = float((inside.sum(1) == 1).double().mean())
            facts["sets"].append({**row, "single": single, "note": rule.note, **set_metrics(inside, target)})
        return facts


def fit_trust(
    model: Classifier,
    val: Iterable[Batch],
    train: Iterable[Batch] | None,
    seed: int,
    *,
    outliers: Iterable[Batch] | None = None,
    compare: bool = True,
    **where: Unpack[Where],
) -> Fitted:
    """Calibration, prediction sets and a reject score from val, which is cut in two, stratified.

    The first half gives temperature or vector scaling, and the reject score; the second, the scores of labels. Images
    of `train` are what embeddings are compared with (not `compare`: scores of logits only). The reject score is the one
    that tells val images best from `outliers`; without any, from tiles of val images in random order and means of two.
    One of embeddings must be ahead by `WORTH`: it makes a deployed file larger and slower.
    `val` should come in random order. The model stays as it is. Raises `ValueError` for too few images.
    """
    index, target, logits, embeddings = outputs_of(model, val, **where)
    half = torch.arange(len(index)) % 2 == 0
    if target.ndim == 1:
        half = torch.zeros_like(half).index_fill_(0, draw_by_class(target, lambda n: (n + 1) // 2, seed), True)
    if min(int(half.sum()), int((~half).sum())) < FEWEST_HELD_OUT:
        raise ValueError(f"{len(index)} examples of val are too few; calibration needs {4 * FEWEST_HELD_OUT} or more")
    several = target.ndim == 2
    calibration = choose_calibration(logits[half], target[half], seed)
    if calibration.kind == "vector":
        other = fit_vector_scaling(logits[~half], target[~half])
    else:
        other = Calibration("temperature", fit_robust_temperature(logits[~half], target[~half]))
    chances, labels = calibration(logits[~half]).softmax(1), {}
    if not several:
        labels = {name: ConformalRule(name, 0.9, 0, 1).label_scores(chances, target[~half]) for name in METHODS}
    rows = logits[half], embeddings[half]
    made: list[Iterable[Batch]] = [] if train is None else [outliers] if outliers else [_Made(val, how) for how in MADE]
    unknown = [outputs_of(model, batches_of, **where)[2:] for batches_of in made]
    fitted: dict[str, EmbeddingScore | None] = dict.fromkeys(SOFTMAX_SCORES)
    if train is not None and compare:
        _, known_target, _, memory = outputs_of(model, train, **where)
        fitted["neighbours"] = fit_neighbours(memory, max(1, min(NEIGHBOURS, len(memory) // 1000)))
        with suppress(ValueError):  # no two images of one class
            fitted["mahalanobis"] = fit_mahalanobis(memory, known_target)
    each = {kind: Trust(labels, torch.empty(0), kind, score) for kind, score in fitted.items()}
    known = {kind: one.scores(*rows, multilabel=several) for kind, one in each.items()}
    auroc = {
        kind: statistics.mean(
            rejection_metrics(known[kind], one.scores(*them, multilabel=several))["auroc"] for them in unknown
        )
        for kind, one in each.items()
        if unknown
    }
    best = max(auroc, key=lambda kind: auroc[kind] - (WORTH if fitted[kind] else 0)) if auroc else "energy"
    trust = replace(each[best], known=known[best].sort().values, auroc=auroc)
    return Fitted(calibration, other, index[half], trust, int(half.sum()))


def _jigsaw(images: Tensor) -> Tensor:
    """Tiles of every image in random order."""
    *_, rows, columns = images.shape
    height, width = rows // TILES, columns // TILES
    tiles = images[..., : height * TILES, : width * TILES].unfold(2, height, height).unfold(3, width, width)
    tiles = tiles.flatten(2, 3)  # [batch, channels, tiles, height, width]
    order = torch.rand(len(images), TILES**2, generator=torch.Generator().manual_seed(len(images))).argsort(1)
    picked = tiles.take_along_dim(order.to(images.device)[:, None, :, None, None], 2).unflatten(2, (TILES, TILES))
    made = images.clone()
    made[..., : height * TILES, : width * TILES] = picked.permute(0, 1, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)
    return made


def _means(images: Tensor) -> Tensor:
    """Every image and the one before it, half and half."""
    return ((images.float() + images.roll(1, 0).float()) / 2).to(images.dtype)


MADE = (_jigsaw, _means)


@dataclass(frozen=True)
class _Made:
    """Batches of outliers, made of those of a loader."""

    loader: Iterable[Batch]
    how: Callable[[Tensor], Tensor]

    def __iter__(self) -> Iterator[Batch]:
        seen = 0
        for batch in self.loader:
            if seen >= OUTLIERS or len(batch) < 2:
                return
            seen += len(batch)
            yield replace(batch, views=(self.how(batch.images),))


def outputs_of(model: Classifier, loader: Iterable[Batch], **where: Unpack[Where]) -> list[Tensor]:
    """Index, label, logits as the model gives them, and embedding of every image, by index, in float32 on the CPU."""
    pieces = []
    for batch, images in batches(model, loader, **where):
        out = model.outputs(images)
        rows = batch.index, batch.label, model.fused(out.stack).float(), out.embedding.float()
        pieces.append([column.to(images.device) for column in rows])
    columns = rows_of_all([torch.cat(column) for column in zip(*pieces, strict=True)] or None)
    if columns is None:
        raise ValueError(NOTHING)
    order = columns[0].argsort(stable=True)  # whatever the number of processes
    return [column[order].cpu() for column in columns]


def _finite(scores: Scores) -> Floats:
    values = torch.as_tensor(scores).detach().cpu().double().numpy()
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"scores of shape {list(values.shape)}: one finite number per image, and an image, are needed")
    return values


def checked_embeddings(embeddings: Tensor, width: int | None = None) -> Tensor:
    """Embeddings [images, width] on the CPU. Raises `ValueError` for another shape, no images, or NaN."""
    rows = embeddings.detach().cpu()
    if rows.ndim != 2 or not rows.shape[1] or (width is None and not len(rows)) or width not in (None, rows.shape[1]):
        wanted = f"[images, {'width' if width is None else width}]"
        raise ValueError(f"embeddings have shape {list(rows.shape)}: {wanted} are needed, check model and split")
    if not rows.isfinite().all():
        raise ValueError("some embeddings are NaN or infinite: the model has diverged or its input is broken")
    return rows
