"""CMSF: mean shift among a constrained set of neighbours (Navaneet et al., 2021, arXiv 2112.04607).

self         nearest neighbours in an older embedding of the same images; averaged with plain mean shift
supervised   those of the image's label
semi         those of the image's label, or of its pseudo-label where it is confident; unconstrained where it is not
cross-modal  as self, with a frozen network of another modality in place of the older embedding: `guide`
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.learn.bank import UNKNOWN, Bank, ImageMemory, make_bank, sum_of_all
from vitrail.learn.config import CmsfConfig
from vitrail.learn.msf import shift_loss
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.pseudo_labels import PseudoLabels, draw_labelled
from vitrail.learn.selfsupervised import PRECISIONS, MomentumPair, distance, one_label
from vitrail.model.classifier import Classifier

Guide = Callable[[Batch], Tensor]
"""Unit embeddings [batch, width] of another modality of the same images, without gradient."""


def constrained_rows(bank: Bank, target: Tensor, hint: Tensor, own: Tensor, k: int, pool: int) -> Tensor:
    """The k rows nearest to `target` among the `pool` slots whose second rows are nearest to `hint`: slots [batch, k].

    The own slot is the first of both. target [batch, width], hint [batch, its width], own [batch].
    """
    allowed = bank.nearest(hint, pool, own, second=True)[1]
    if k == pool:
        return allowed
    scores = (bank.rows_at(allowed) * target[:, None]).sum(-1)
    scores = scores.masked_fill(allowed == own[:, None], float("inf"))
    return allowed.gather(1, scores.topk(k, dim=1).indices)


def class_means(rows: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mean row [classes, width] and number of rows [classes] of every class; rows without a label are left out.

    In a process group, of the rows of all.
    """
    place = torch.where(labels < 0, classes, labels)  # a class too many, for those without one
    sums = torch.zeros(classes + 1, rows.shape[1], device=rows.device).index_add_(0, place, rows.float())[:classes]
    counts = torch.zeros(classes + 1, device=rows.device).index_add_(0, place, torch.ones_like(place).float())[:classes]
    sums, counts = sum_of_all(sums), sum_of_all(counts)
    return sums / counts.clamp(min=1)[:, None], counts


class Cmsf(MomentumPair):
    """See the module. Raises `ValueError` where the data have several labels per image and the constraint needs one."""

    def __init__(
        self,
        model: Classifier,
        config: CmsfConfig,
        steps: int,
        labels: NDArray[np.int64],
        index: NDArray[np.int64],
        guide: Guide | None = None,
        guide_width: int = 0,
    ) -> None:
        super().__init__(model, config, steps, config.predictor_hidden)
        if config.constraint != "self" and labels.ndim == 2:
            raise ValueError(f"objective.constraint: {config.constraint} needs one label per image, these have several")
        if config.constraint == "self" and (config.k is None or config.pool < config.k):
            raise ValueError(f"objective.k: {config.k} neighbours of {config.pool} allowed; raise objective.pool")
        if max(config.k or 1, config.pool) > config.bank:
            raise ValueError(
                f"objective.k: the bank has {config.bank} rows, fewer than k or pool; raise objective.bank"
            )
        if guide is not None and not guide_width:
            raise ValueError("a guide of another modality wants guide_width, the width of its embeddings")
        self.options, self.guide = config, guide
        self.host_decision = "" if guide is None else "its guide is arbitrary code"
        if isinstance(guide, nn.Module):
            guide.requires_grad_(False).eval()
            self.frozen = ("guide",)
        width, dtype = self.head.features, PRECISIONS[config.bank_precision]
        second = (guide_width if guide else width) if config.constraint == "self" else 0
        self.bank = make_bank(config.bank, width, second, dtype)
        self.earlier: ImageMemory | None = None  # target embedding of every image at its last visit
        self.pseudo: PseudoLabels | None = None
        if config.constraint == "self" and guide is None:
            self.earlier = ImageMemory(index, width, dtype=dtype, empty=True)
        if config.constraint == "semi":
            labelled = draw_labelled(labels, config.labelled)
            self.pseudo = PseudoLabels(index[labelled], labels[labelled], width, len(model.classes), config.threshold)
            self.images = len(index)

    @classmethod
    def build(cls, model: Classifier, config: CmsfConfig, facts: TrainingFacts) -> Objective:
        return cls(model, config, facts.steps, facts.labels, facts.index)

    def train(self, mode: bool = True) -> Cmsf:
        super().train(mode)
        if isinstance(self.guide, nn.Module):
            self.guide.eval()  # frozen: a network of another modality
        return self

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        online, target, seen = self.pair(batch)
        if self.options.constraint == "self":
            loss, found = self.by_hint(batch, online, target)
            return self.losses(loss, seen, batch, **self.purity(found, batch, self.bank))
        labels, known = batch.label, None
        others: dict[str, Tensor] = {}
        if self.pseudo is not None:
            known = self.pseudo.true_label(batch.index) != UNKNOWN
            labels = self.pseudo.see(batch, target)
            others |= {"confident": (labels != UNKNOWN).float().mean(), **self.pseudo.right}
        own = self.bank.push(target, labels)
        if self.options.k is None:
            return self.losses(self.to_class_mean(online, own, labels), seen, batch, known, **others)
        scores, found = self.bank.nearest(target, self.options.k, own, labels)
        valid = scores > float("-inf")
        return self.losses(shift_loss(online, self.bank.rows_at(found), valid), seen, batch, known, **others)

    def by_hint(self, batch: Batch, online: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of plain and constrained mean shift, as in the authors' code; the loss, and rows chosen [batch, k].

        An image that is seen for the first time has no older embedding: its current one stands in, so the first epoch
        is nearly plain mean shift.
        """
        config, bank = self.options, self.bank
        assert config.k is not None
        if self.guide is not None:
            with torch.no_grad():
                hint = self.guide(batch)
        else:
            assert self.earlier is not None
            known = self.earlier.known(batch.index)[:, None]
            hint = torch.where(known, self.earlier.rows[self.earlier.where(batch.index)].float(), target)
            self.earlier.update(batch.index, target, share=1.0)
        own = bank.push(target, one_label(batch), hint)
        plain = bank.nearest(target, config.k, own)[1]
        found = constrained_rows(bank, target, hint, own, config.k, config.pool)
        return (shift_loss(online, bank.rows_at(plain)) + shift_loss(online, bank.rows_at(found))) / 2, found

    def to_class_mean(self, online: Tensor, own: Tensor, labels: Tensor) -> Tensor:
        """Mean distance to all rows of the label (top-all), or to the image's own row where there is no label.

        The mean over unit vectors of 2 - 2 cos is 2 - 2 the product with their mean, so no row is compared.
        """
        means, _ = class_means(self.bank.here(), self.bank.labels_here(), len(self.model.classes))
        towards = torch.where((labels >= 0)[:, None], means[labels.clamp(min=0)], self.bank.rows_at(own))
        return distance(online, towards).mean()

    def after_step(self, step: int) -> None:
        super().after_step(step)
        if self.pseudo is not None:
            self.pseudo.after_step(step, self.images)
