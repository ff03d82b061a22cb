"""Base classes of self-supervised objectives: embeddings, momentum encoder, predictor, online linear probe, collapse.

A representation collapses where all images get one embedding, or embeddings that differ along a line only; the loss is
then often excellent. Spread and rank of the embeddings are logged for every objective that compares them: one small
matrix product per step, on the device.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.augment.mixing import soft
from vitrail.data.batch import Batch, View, ViewSpec
from vitrail.learn.bank import UNKNOWN, Bank
from vitrail.learn.config import PairConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.model.classifier import Classifier
from vitrail.model.heads.pooled import ProjectedHead

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
            "for all images); lower --optim.lr, use stronger views, or raise --objective.momentum where there is one"
        )
    if means["rank"] < RANK_LIMIT and classes != 2:
        return (
            f"embeddings have collapsed to a line: their effective rank is {means['rank']:.2f}, below {RANK_LIMIT}; "
            "lower --optim.lr, use stronger views, or raise --objective.momentum where there is one"
        )
    return ""


class MomentumCopy(nn.Module):
    """copy <- decay * copy + (1 - decay) * module, after every step; no gradient, part of checkpoints.

    With `steps` the decay rises on a cosine from `decay` to `end` over the run (BYOL: to 1); without, it is constant.
    Statistics of BatchNorm are its own: it is run in the mode of the module it follows.
    """

    def __init__(self, module: nn.Module, decay: float, steps: int | None = None, end: float = 1.0) -> None:
        super().__init__()
        self.decay, self.steps, self.end = decay, steps, end
        self.module = copy.deepcopy(module).requires_grad_(False)

    @classmethod
    def of(cls, module: nn.Module, decay: float, end: float | None, steps: int) -> MomentumCopy:
        """As configured: to `end` over `steps`, or constant where there is no end."""
        return cls(module, decay) if end is None else cls(module, decay, steps, end)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        with torch.no_grad():
            return self.module(*inputs, **options)

    @property
    def classifier(self) -> Classifier:
        """The copy, where it is one of a classifier."""
        assert isinstance(self.module, Classifier)
        return self.module

    def embed(self, images: Tensor) -> Tensor:
        """The copy's embeddings of images, of unit length, in float32 and without gradient: [batch, features]."""
        with torch.no_grad():
            embedding = self.classifier.head.embed(self.classifier.tokens(images))
            return F.normalize(embedding.float(), dim=-1)

    def decay_at(self, step: int) -> float:
        """Decay of a step (0 is the first)."""
        if self.steps is None:
            return self.decay
        return self.end - (self.end - self.decay) * (math.cos(math.pi * min(1.0, step / max(1, self.steps))) + 1) / 2

    @torch.no_grad()
    def follow(self, module: nn.Module, step: int) -> None:
        averages: list[Tensor] = list(self.module.parameters())
        torch._foreach_lerp_(averages, [p.detach() for p in module.parameters()], 1 - self.decay_at(step))


PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}


def unit(vectors: Tensor) -> Tensor:
    """Vectors [..., width] of length 1, in float32."""
    return F.normalize(vectors.float(), dim=-1)


def distance(online: Tensor, target: Tensor) -> Tensor:
    """Squared distance 2 - 2 cos of unit vectors [..., width]: [...]."""
    return 2 - 2 * (online * target).sum(-1)


def predictor(width: int, hidden: int) -> nn.Sequential:
    """The predictor of the online network: linear, BatchNorm, ReLU, linear; [batch, width] -> the same."""
    layers = (nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True))
    return nn.Sequential(*layers, nn.Linear(hidden, width))


def one_label(batch: Batch) -> Tensor:
    """The class of each image [batch]; UNKNOWN where several may hold. For metrics, not for learning."""
    return batch.label if batch.label.ndim == 1 else torch.full_like(batch.index, UNKNOWN)


def purity(neighbours: Tensor, labels: Tensor, bank_labels: Tensor) -> Tensor:
    """Share of the neighbours [batch, k] after the first, which is the image itself, that have its label [batch]."""
    return (bank_labels[neighbours[:, 1:]] == labels[:, None]).float().mean()


def reject_several(model: Classifier, name: str) -> None:
    """Raises `ValueError` where an image may have several labels."""
    if model.multilabel:
        raise ValueError(f"objective {name} needs one label per image; these data have several")


class Encoded(NamedTuple):
    """Embeddings of images, and the features they are computed from."""

    embedding: Tensor  # [images, features], not normalised
    pooled: Tensor  # [images, width]: input of the projector

    def first(self, count: int) -> Encoded:
        return Encoded(self.embedding[:count], self.pooled[:count])


class SelfSupervised(Objective):
    """A representation learned without labels, and an online linear probe.

    The head's classifier learns the labels from detached pooled features: the representation is what it would be
    without it, the logged loss is the representation's alone, and the metrics of a run are those of the probe. `spread`
    and `rank` of the embeddings are logged, and a collapse is reported. Raises `ValueError` where the model's head is
    not `projected`.
    """

    reading = (
        "top-1 is that of an online linear probe on detached features; it learns slowly, so early on look at knn "
        "(--evaluators classification knn)"
    )

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        if not isinstance(model.head, ProjectedHead):
            raise ValueError(
                f"this objective compares embeddings, which the head {model.spec['head']['kind']} does not project; "
                "use --model.head.kind projected"
            )
        self.model = model

    @property
    def head(self) -> ProjectedHead:
        return cast("ProjectedHead", self.model.head)

    @property
    def probe_parameters(self) -> list[nn.Parameter]:
        return list(self.head.fc.parameters())

    def encode(self, images: Tensor) -> Encoded:
        pooled = self.head.pooled(self.model.tokens(images))
        return Encoded(self.head.projector(pooled), pooled)

    def losses(
        self, loss: Tensor, seen: Encoded, batch: Batch, known: Tensor | None = None, **others: Tensor
    ) -> dict[str, Tensor]:
        """The loss with the classifier's added to its gradient and not to its value; `seen` is one view of the batch.

        `known` [batch] says whose labels may be used (none: all). Also returned for the log: the classifier's loss,
        `spread` and `rank` of the embeddings, and the `others`.
        """
        logits = self.head.fc(seen.pooled.detach()).float()
        dense = soft(batch.target, logits.shape[-1])
        if self.model.multilabel:
            each = F.binary_cross_entropy_with_logits(logits, dense, reduction="none").mean(1)
        else:
            each = F.cross_entropy(logits, dense, reduction="none")
        probe = each.mean() if known is None else (each * known).sum() / known.sum().clamp(min=1)
        values = {name: value.detach() for name, value in others.items()}
        values["spread"], values["rank"] = spread_and_rank(seen.embedding.detach())
        return {"loss": loss + probe - probe.detach(), "probe": probe.detach(), **values}

    def purity(self, neighbours: Tensor, batch: Batch, bank: Bank) -> dict[str, Tensor]:
        """`purity` of neighbours [batch, k]; nothing where there is one neighbour, or no single label."""
        if neighbours.shape[1] == 1 or batch.label.ndim > 1 or self.model.unlabelled:
            return {}
        return {"purity": purity(neighbours, batch.label, bank.labels)}

    def alarm(self, means: Mapping[str, float], done: float) -> str:
        return collapse_note(means, done, len(self.model.classes))


VIEWS = {
    "weak_strong": ViewSpec.of(View(weak=True), View()),
    "strong_strong": ViewSpec(2),
    "weak_weak": ViewSpec.of(View(weak=True), View(weak=True)),
}


class MomentumPair(SelfSupervised):
    """An online network on one view, compared with its momentum encoder on another.

    The target sees the first view, the online network the second; `views` says which of them are weak. With `hidden` a
    predictor of that width follows the online network.
    """

    def __init__(self, model: Classifier, config: PairConfig, steps: int, hidden: int | None = None) -> None:
        super().__init__(model)
        self.views = VIEWS[config.views]
        self.target = MomentumCopy.of(model, config.momentum, config.momentum_end, steps)
        self.predictor = nn.Identity() if hidden is None else predictor(self.head.features, hidden)

    @classmethod
    def build(cls, model: Classifier, config: Any, facts: TrainingFacts) -> Objective:
        return cls(model, config, facts.steps)

    def pair(self, batch: Batch) -> tuple[Tensor, Tensor, Encoded]:
        """Online and target embeddings of unit length [batch, features], and what the first comes from."""
        seen = self.encode(batch.views[1])
        return unit(self.predictor(seen.embedding)), self.embed_target(batch.views[0]), seen

    def both(self, batch: Batch) -> tuple[Tensor, Tensor, Encoded]:
        """As `pair`, of both views, each compared with the target's embedding of the other: [2 batch, features]."""
        views = torch.cat(batch.views)
        seen = self.encode(views)
        target = self.embed_target(views).roll(len(batch), 0)
        return unit(self.predictor(seen.embedding)), target, seen

    def embed_target(self, images: Tensor) -> Tensor:
        """The momentum encoder's embeddings of images, of unit length and without gradient: [batch, features]."""
        return self.target.embed(images)

    def after_step(self, step: int) -> None:
        self.target.follow(self.model, step)
