"""Learning from labels: cross entropy and binary cross entropy, on hard, soft, mixed and multi-label targets."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.augment.mixing import soft
from vitrail.data.batch import Batch
from vitrail.learn.config import SupervisedConfig, named_weights
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.model.classifier import Classifier, Outputs
from vitrail.model.heads.pooled import ProjectedHead
from vitrail.schema import near


def smooth(target: Tensor, smoothing: float, style: str) -> Tensor:
    """Label smoothing of dense targets [batch, classes] that sum to 1.

    `all`: smoothing is shared over all classes, as in torch. `others`: over the other classes only, the true class
    keeps exactly 1 - smoothing, as DeiT describes it (Touvron et al., 2020, arXiv 2012.12877). Both are linear in the
    target, so mixed targets are smoothed as their parts.
    """
    if smoothing == 0:
        return target
    classes = target.shape[-1]
    if style == "all" or classes == 1:
        return target * (1 - smoothing) + smoothing / classes
    return target * (1 - smoothing) + (1 - target) * (smoothing / (classes - 1))


def cross_entropy(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean over the batch of -sum_c weights_c target_c log softmax(logits)_c; logits, target [batch, classes]."""
    terms = target * logits.float().log_softmax(-1)
    if weights is not None:
        terms = terms * weights
    return -terms.sum(-1).mean()


def binary_cross_entropy(
    logits: Tensor, target: Tensor, weights: Tensor | None = None, threshold: float | None = None, summed: bool = False
) -> Tensor:
    """One sigmoid per class against targets [batch, classes] in 0..1 (RSB, Wightman et al., 2021, arXiv 2110.00476).

    `threshold` turns soft targets into 0 and 1; `summed` sums over classes before the mean over the batch.
    """
    if threshold is not None:
        target = (target > threshold).float()
    terms = F.binary_cross_entropy_with_logits(logits.float(), target, weight=weights, reduction="none")
    return terms.sum(-1).mean() if summed else terms.mean()


def class_counts(labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """[classes] images of each."""
    return np.asarray(labels.sum(0) if labels.ndim == 2 else np.bincount(labels, minlength=classes), np.int64)


def prior_shift(counts: NDArray[np.int64], binary: bool = False) -> Tensor:
    """Logit adjustment by class frequency: log p (Menon et al., 2020, arXiv 2007.07314), or, `binary`, its log odds
    (LiVT, Xu et al., 2022, arXiv 2212.02015).

    Logits learned with it are those of equally frequent classes. A class without images counts as if it had one, for
    log 0 is not finite.

    >>> prior_shift(np.array([1, 1, 2]), binary=True).exp()
    tensor([0.3333, 0.3333, 1.0000])
    """
    known = np.maximum(counts, 1).astype(np.float64)
    prior = known / known.sum()
    shift = np.log(prior) - np.log1p(-prior) if binary and len(prior) > 1 else np.log(prior)
    return torch.tensor(shift, dtype=torch.float32)


def prior_logits(labels: NDArray[np.int64] | None, classes: int) -> Tensor:
    """[classes] log odds of each class's frequency, by which a sigmoid says how frequent it is; none: all alike.

    With one label per image and equally frequent classes that is -log(classes - 1). A frequency is at least half an
    image away from 0 and from 1; unlabelled images (-1) do not count.

    >>> prior_logits(None, 3).exp()
    tensor([0.5000, 0.5000, 0.5000])
    """
    if labels is None:
        return torch.full((classes,), -math.log(max(1, classes - 1)))
    known = labels if labels.ndim == 2 else labels[labels >= 0]
    least = 0.5 / max(1, len(known))
    frequency = np.clip(class_counts(known, classes) / max(1, len(known)), least, 1 - least)
    return torch.tensor(np.log(frequency) - np.log1p(-frequency), dtype=torch.float32)


def balanced_weights(labels: NDArray[np.int64], classes: int) -> Tensor:
    """Weights inverse to class frequency, of mean 1 over the training images; a class without images weighs 0."""
    counts = class_counts(labels, classes)
    present = counts > 0
    weights = np.where(present, counts.sum() / (max(1, present.sum()) * np.maximum(counts, 1)), 0.0)
    return torch.tensor(weights, dtype=torch.float32)


def chosen_weights(named: Mapping[str, float], classes: Sequence[str]) -> Tensor:
    """[classes] the weights that are named, and 1. Raises `ValueError` for a name that is no class."""
    for name in named:
        if name not in classes:
            raise ValueError(f"objective.class_weights: the data have no class {name!r}{near(name, classes)}")
    return torch.tensor([named.get(name, 1.0) for name in classes])


class Supervised(Objective):
    """Labels, mixed ones included, for every classifier of the head.

    With binary cross entropy, classifiers that were not trained before start at the frequency of each class.
    """

    weights: Tensor | None
    shift: Tensor | None

    def __init__(
        self, model: Classifier, config: SupervisedConfig, labels: NDArray[np.int64] | None = None, embeds: bool = False
    ) -> None:
        """`embeds`: it learns from embeddings, too, so that what projects them is trained."""
        super().__init__()
        self.model, self.config = model, config
        self.binary = config.loss == "bce" or model.multilabel
        if isinstance(model.head, ProjectedHead) and not embeds:
            model.head.projector.requires_grad_(False)  # no label reaches it, and decay alone would shrink it
        weights = None
        if config.class_weights == "balanced":
            if labels is None:
                raise ValueError("class_weights=balanced needs the training labels")
            weights = balanced_weights(labels, len(model.classes))
        elif named := named_weights(config.class_weights):
            weights = chosen_weights(named, model.classes)
        self.register_buffer("weights", weights, persistent=False)
        shift = None
        if config.logit_adjustment:
            if labels is None:
                raise ValueError("objective.logit_adjustment needs the training labels")
            if model.multilabel:
                raise ValueError("objective.logit_adjustment is for one label per image; with several set it to 0")
            counts = class_counts(labels, len(model.classes))
            shift = config.logit_adjustment * prior_shift(counts, self.binary)
        self.register_buffer("shift", shift, persistent=False)
        # So that what the head adds (decorrelation) has the same weight relative to every loss.
        model.head.loss_scale = 1 / len(model.classes) if self.binary and not config.bce_sum else 1.0
        if config.classifier_loss == "mean":
            model.head.loss_scale /= model.head.classifiers
        if self.binary and (labels is not None or not model.multilabel):
            # From zero, every class begins at one half, and the first steps only push all but one of them down.
            start = prior_logits(labels, len(model.classes))
            model.head.start_biases(start if shift is None else start - shift, self.binary_classifiers())

    @classmethod
    def build(cls, model: Classifier, config: Any, facts: TrainingFacts) -> Objective:
        return cls(model, config, facts.counted(config))

    def binary_classifiers(self) -> Collection[int]:
        """Classifiers of the head's stack whose loss is a sigmoid for each class, where labels are learned so."""
        return range(self.model.head.classifiers)

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of one classifier: logits [batch, classes], target [batch] or [batch, classes]."""
        config = self.config
        if self.shift is not None:
            logits = logits.float() + self.shift
        if not self.binary and target.ndim == 1 and config.smoothing == 0 and self.weights is None:
            return F.cross_entropy(logits.float(), target)
        dense = soft(target, logits.shape[-1])
        if self.model.multilabel:  # each class is a choice of two, so smoothing moves it towards one half
            dense = dense * (1 - config.smoothing) + config.smoothing / 2
        else:
            dense = smooth(dense, config.smoothing, config.smoothing_style)
        if self.binary:
            return binary_cross_entropy(logits, dense, self.weights, config.bce_threshold, config.bce_sum)
        return cross_entropy(logits, dense, self.weights)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        out = self.model.outputs(batch.images)
        each = [self.criterion(logits, batch.target) for logits in out.stack.unbind(1)]
        logged = {f"loss_{k}": value for k, value in enumerate(each)} if len(each) > 1 else {}
        return self.with_head_losses(self.combined(each), out, batch, logged)

    def combined(self, each: Sequence[Tensor]) -> Tensor:
        """The losses of several classifiers as one."""
        losses = torch.stack(tuple(each))
        return losses.sum() if self.config.classifier_loss == "sum" else losses.mean()

    def with_head_losses(
        self, total: Tensor, out: Outputs, batch: Batch, logged: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """`loss`, with what the head adds to it, and what is logged."""
        added = out.losses(batch.target)
        values = {name: value.detach() for name, value in {**logged, **added}.items()}
        return {"loss": sum(added.values(), total), **values}
