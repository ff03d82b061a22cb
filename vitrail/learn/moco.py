"""MoCo: tell the other view of an image from a bank of other images (He et al., arXiv 1911.05722; 2003.04297 for v2).

Keys must not be normalised next to their own queries, or BatchNorm tells which belong together. On one device queries
and keys are two batches, each with its own statistics over many images. In a process group the keys are shuffled across
processes first (the paper's shuffling BatchNorm, section 3.3), so that their statistics are those of other images than
their queries'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.counter import seed_of
from vitrail.kernels.similarity import log_sum, uncompiled
from vitrail.learn.bank import attend_all, make_bank, of_all, processes, rank
from vitrail.learn.config import MocoConfig
from vitrail.learn.selfsupervised import PRECISIONS, MomentumPair
from vitrail.model.classifier import Classifier


def contrast(online: Tensor, target: Tensor, bank: Tensor, temperature: float) -> Tensor:
    """InfoNCE: -log softmax of the own target among [own target, bank], mean over the batch; [batch, width] each.

    In a process group `bank` is this process's shard. Gradients reach `online` only.
    """
    own = (online * target.detach()).sum(1) / temperature
    return (torch.logaddexp(own, log_sum(online, bank, temperature, by=attend_all)) - own).mean()


class Moco(MomentumPair):
    """Contrast with a queue of the target's embeddings of earlier images; the batch is pushed after the loss.

    `symmetric`: each view is query once and key once, the loss is the mean of both, and both keys are pushed.
    """

    def __init__(self, model: Classifier, config: MocoConfig, steps: int) -> None:
        super().__init__(model, config, steps)
        self.temperature, self.symmetric = config.temperature, config.symmetric
        self.bank = make_bank(config.bank, self.head.features, dtype=PRECISIONS[config.bank_precision])
        self.step = 0

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        online, target, seen = self.both(batch) if self.symmetric else self.pair(batch)
        loss = contrast(online, target, self.bank.here(), self.temperature)
        self.bank.push(target)
        return self.losses(loss, seen.first(len(batch)), batch)

    def before_step(self, step: int) -> None:
        self.step = step

    def embed_target(self, images: Tensor) -> Tensor:
        if processes() == 1:
            return super().embed_target(images)
        order = self._order(len(images), images.device)
        return _unshuffled(super().embed_target(_shuffled(images, order)), order)

    @uncompiled
    def _order(self, count: int, device: torch.device) -> Tensor:
        """A permutation of the images of all processes, the same in each of them."""
        generator = torch.Generator().manual_seed(seed_of("shuffle", self.step))
        return torch.randperm(count * processes(), generator=generator).to(device)


@uncompiled
def _shuffled(images: Tensor, order: Tensor) -> Tensor:
    """This process's share of the images of all in `order`."""
    return of_all(images)[order][len(images) * rank() :][: len(images)]


@uncompiled
def _unshuffled(keys: Tensor, order: Tensor) -> Tensor:
    """Keys of this process's images, computed wherever `order` put them."""
    return of_all(keys)[order.argsort()][len(keys) * rank() :][: len(keys)]
