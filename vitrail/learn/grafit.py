"""Grafit: fine-grained representations from coarse labels (Touvron et al., 2020, arXiv 2011.12982).

A neighbour loss (NCA) draws images of one coarse class together, over a memory of the whole training set; an instance
loss keeps an image apart from others of its class, by agreement of its augmented views. Their sum keeps detail that the
labels do not name. The paper's baselines are the same objective with other weights:

    CE                  classification 1, neighbours 0, instance 0, projector none
    CE + instance       classification 1, neighbours 0, instance 1
    SNCA, SNCA+         neighbours 1, instance 0, projector linear, mlp
    triplet, + CE       triplet 1, classification 0 or 1
    ClusterFit+         clusters (`kernels/kmeans.py`) of a CE run's embeddings as the labels of a second run
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.batch import Batch, ViewSpec
from vitrail.kernels.similarity import neighbour_loss
from vitrail.learn.bank import ImageMemory
from vitrail.learn.config import GrafitConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.selfsupervised import MomentumCopy, predictor
from vitrail.learn.supervised import Supervised
from vitrail.model.classifier import Classifier
from vitrail.model.heads.pooled import ProjectedHead


def instance_loss(online: Tensor, target: Tensor) -> Tensor:
    """Minus the mean cosine over all ordered pairs of different views: [batch, views, width] each.

    In [-1, 1]; -1 where every view agrees with every other. No gradient reaches `target`.
    """
    views = online.shape[1]
    q, z = F.normalize(online.float(), dim=-1), F.normalize(target.detach().float(), dim=-1)
    # Sum over i != j of q_i . z_j, without the views x views table.
    pairs = (q.sum(1) * z.sum(1)).sum(-1) - (q * z).sum((1, 2))
    return -(pairs / (views * (views - 1))).mean()


def triplet_loss(embedding: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Hardest positive and hardest negative of every image in the batch, by cosine distance, with a margin.

    Batch-hard mining (Hermans et al., 2017, arXiv 1703.07737). Images without a positive or without a negative in the
    batch do not count.
    """
    unit = F.normalize(embedding.float(), dim=-1)
    distance = 1 - unit @ unit.T
    same = labels[:, None] == labels[None]
    positive = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    farthest = distance.masked_fill(~positive, float("-inf")).amax(1)
    nearest = distance.masked_fill(same, float("inf")).amin(1)
    counts = positive.any(1) & ~same.all(1)
    loss = torch.where(counts, F.relu(torch.where(counts, farthest - nearest, 0.0) + margin), 0.0)
    return loss.sum() / counts.sum().clamp(min=1)


class Grafit(Supervised):
    """See the module. Without `classification` the classifier is an online linear probe: no gradient leaves it.

    Raises `ValueError` where the model has no projected head, or views are too few.
    """

    options: GrafitConfig

    def __init__(
        self, model: Classifier, config: GrafitConfig, labels: NDArray[np.int64], index: NDArray[np.int64]
    ) -> None:
        embeds = bool(config.neighbours or config.instance or config.triplet)
        super().__init__(model, config.labels, labels, embeds=embeds)
        if not isinstance(model.head, ProjectedHead):
            raise ValueError(
                f"objective grafit compares embeddings, which the head {model.spec['head']['kind']} does not project; "
                "use --model.head.kind projected"
            )
        if labels.ndim == 2:
            raise ValueError("objective grafit needs one label per image; these data have several")
        if config.instance and config.views < 2:
            raise ValueError(
                f"objective.views: the instance loss compares views, {config.views} is too few; use 2 or more"
            )
        self.options = config
        self.views = ViewSpec(config.views if config.instance else 1)
        width = model.head.features
        self.bank = ImageMemory(index, width, labels) if config.neighbours else None
        self.predictor: nn.Module | None = None
        self.target: MomentumCopy | None = None
        if config.instance:
            self.predictor = predictor(width, config.predictor_hidden)
            self.target = MomentumCopy(model, config.momentum)
        self._seen: list[tuple[Tensor, Tensor]] = []  # indices and embeddings of the current step
        self._last: list[tuple[Tensor, Tensor]] = []  # of the last one that Python saw: a graph writes to these

    @classmethod
    def build(cls, model: Classifier, config: GrafitConfig, facts: TrainingFacts) -> Objective:
        if facts.generated is not None and not config.labels.count_generated:
            raise ValueError("objective.labels.count_generated: grafit counts all images alike; leave it on")
        return cls(model, config, facts.labels, facts.index)

    @property
    def head(self) -> ProjectedHead:
        return cast("ProjectedHead", self.model.head)

    @property
    def probe_parameters(self) -> list[nn.Parameter]:
        return [] if self.options.classification else list(self.head.fc.parameters())

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config, count = self.options, len(batch)
        images = torch.cat(batch.views) if len(batch.views) > 1 else batch.images
        out = self.model.outputs(images)
        first = out.embedding[:count]
        losses: dict[str, Tensor] = {}
        if self.bank is not None:
            rows = (first, self.bank.rows, batch.label, self.bank.labels, self.bank.where(batch.index))
            losses["neighbours"] = neighbour_loss(*rows, config.temperature)
            self._seen.append((batch.index, F.normalize(first.detach().float(), dim=-1)))
        if self.predictor is not None and self.target is not None:
            with torch.no_grad():
                target = self.target.classifier.outputs(images).embedding
            shape = (len(batch.views), count)
            pair = (t.unflatten(0, shape).transpose(0, 1) for t in (self.predictor(out.embedding), target))
            losses["instance"] = instance_loss(*pair)
        if config.classification:
            losses["classification"] = self.criterion(out.stack[:count, 0], batch.target)
        if config.triplet:
            losses["triplet"] = triplet_loss(first, batch.label, config.triplet_margin)
        total = sum((getattr(config, name) * value for name, value in losses.items()), torch.zeros_like(first[0, 0]))
        total = total.float()
        if not config.classification:
            pooled = self.head.pooled(out.tokens)[:count].detach()
            probe = self.criterion(self.head.fc(pooled), batch.target)
            total = total + probe - probe.detach()  # adds its gradient, not its value
            losses["probe"] = probe
        return {"loss": total, **{name: value.detach() for name, value in losses.items()}}

    def after_step(self, step: int) -> None:
        if self.bank is not None:
            self._last, self._seen = self._seen or self._last, []
            for index, values in self._last:
                self.bank.update(index, values)
        if self.target is not None:
            self.target.follow(self.model, step)
