"""Base classes of self-supervised objectives: embeddings, momentum teacher, predictor, and online linear probe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.batch import Batch, View, ViewSpec
from vitrail.data.mixing import soft
from vitrail.learn.bank import UNKNOWN, Bank
from vitrail.learn.collapse import collapse_note, spread_and_rank
from vitrail.learn.config import PairConfig
from vitrail.learn.momentum import MomentumCopy
from vitrail.learn.objective import Objective
from vitrail.model.classifier import Classifier
from vitrail.model.heads.projected import ProjectedHead

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}


def unit(vectors: Tensor) -> Tensor:
    """Vectors [..., width] of length 1, in float32."""
    return F.normalize(vectors.float(), dim=-1)


def distance(online: Tensor, target: Tensor) -> Tensor:
    """Squared distance 2 - 2 cos of unit vectors [..., width]: [...]."""
    return 2 - 2 * (online * target).sum(-1)


def predictor(width: int, hidden: int) -> nn.Sequential:
    """The predictor of the online network: linear, BatchNorm, ReLU, linear; [batch, width] -> the same."""
    return nn.Sequential(
        nn.Linear(width, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, width),
    )


def one_label(batch: Batch) -> Tensor:
    """The class of each image [batch]; UNKNOWN where several may hold. For metrics, not for learning."""
    return batch.label if batch.label.ndim == 1 else torch.full_like(batch.index, UNKNOWN)


def purity(found: Tensor, labels: Tensor, bank_labels: Tensor) -> Tensor:
    """Share of the neighbours [batch, k] after the first, which is the image itself, that have its label [batch]."""
    return (bank_labels[found[:, 1:]] == labels[:, None]).float().mean()


def refuse_several(model: Classifier, name: str) -> None:
    """Raises `ValueError` where an image may have several labels."""
    if model.multilabel:
        raise ValueError(f"objective {name} needs one label an image; these data have several")


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
    and `rank` of the embeddings are logged, and a collapse is reported (`vitrail.learn.collapse`). Raises
    `ValueError` where the model's head is not `projected`.
    """

    reading = (
        "top-1 is that of a linear classifier that listens to the embeddings and does not shape them; it learns "
        "slowly, so early on look at knn (--evaluators classification knn)"
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
    def listening(self) -> list[nn.Parameter]:
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
        listening = each.mean() if known is None else (each * known).sum() / known.sum().clamp(min=1)
        values = {name: value.detach() for name, value in others.items()}
        values["spread"], values["rank"] = spread_and_rank(seen.embedding.detach())
        return {"loss": loss + listening - listening.detach(), "probe": listening.detach(), **values}

    def purity(self, found: Tensor, batch: Batch, bank: Bank) -> dict[str, Tensor]:
        """`purity` of neighbours [batch, k]; nothing where there is one neighbour, or no single label."""
        if found.shape[1] == 1 or batch.label.ndim > 1 or self.model.unlabelled:
            return {}
        return {"purity": purity(found, batch.label, bank.labels)}

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
