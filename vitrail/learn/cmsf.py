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
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.learn.bank import UNKNOWN, Bank, ImageMemory, make_bank, of_all, processes, sum_of_all
from vitrail.learn.config import CmsfConfig, ProtonwConfig
from vitrail.learn.msf import shift_loss
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.selfsupervised import PRECISIONS, MomentumPair, distance, one_label, reject_several, unit
from vitrail.model.classifier import Classifier

Guide = Callable[[Batch], Tensor]
"""Unit embeddings [batch, width] of another modality of the same images, without gradient."""


EPOCHS, BATCH = 10, 256  # of a round of pseudo-label training, as in the authors' code


def draw_labelled(labels: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """Rows of the images whose labels may be used: `share` of every class, at least one; always the same ones."""
    rng = np.random.default_rng(0)
    rows = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    return np.sort(np.concatenate([of_class[: max(1, round(share * len(of_class)))] for of_class in rows]))


class PseudoLabels(nn.Module):
    """Pseudo-labels: two layers on the target's embeddings, trained between steps on those of the labelled images.

    A round of training is held once per epoch; before the first, no image has a pseudo-label. All state is in
    checkpoints, and a round depends on nothing but its step, so a resumed run holds the same ones.
    """

    ready: Tensor
    truth: Tensor

    def __init__(
        self, index: NDArray[np.int64], labels: NDArray[np.int64], width: int, classes: int, threshold: float
    ) -> None:
        super().__init__()
        self.threshold = threshold
        self.bank = ImageMemory(index, width, labels, empty=True)
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, classes))
        self.requires_grad_(False)  # the engine's optimiser has nothing to do with it
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))
        truth = torch.full((int(index.max()) + 1,), UNKNOWN, dtype=torch.int64)
        truth[torch.from_numpy(index)] = torch.from_numpy(labels.copy())
        self.register_buffer("truth", truth, persistent=False)
        self.seen = 0  # images of the current step, where Python sees it
        self.batch = 0  # images of a step
        self.right: dict[str, Tensor] = {}  # shares of guesses that were right in it: all, and confident ones

    def see(self, batch: Batch, embedding: Tensor) -> Tensor:
        """Label of each image [batch]: its own where it may be used, else a confident guess, else UNKNOWN.

        Embeddings [batch, width] of labelled images are remembered.
        """
        self.seen += len(batch) * processes()
        with torch.no_grad():
            self._remember(of_all(batch.index), of_all(embedding))
            truth = self.true_label(batch.index)
            with torch.autocast(embedding.device.type, enabled=False):
                sure, guess = self.net(embedding.float()).softmax(-1).max(-1)
            guessed = torch.where((sure > self.threshold) & self.ready, guess, UNKNOWN)
            hidden = truth == UNKNOWN
            right, confident = (guess == batch.label) & hidden, hidden & (guessed != UNKNOWN)
            self.right = {  # for metrics only: nothing learns from these labels
                "pseudo": right.sum() / hidden.sum().clamp(min=1),
                "pseudo_confident": (right & confident).sum() / confident.sum().clamp(min=1),
            }
            return torch.where(hidden, guessed, truth)

    def _remember(self, index: Tensor, values: Tensor) -> None:
        """Keep the embeddings of labelled images; every image writes, so that nothing depends on how many there are.

        An image without a label writes what the first labelled one of the batch does.
        """
        labelled = (self.true_label(index) != UNKNOWN) & values.isfinite().all(1)
        first = labelled.int().argmax()
        source = torch.where(labelled, torch.arange(len(index), device=index.device), first)
        known = self.bank.where(index[source].clamp(max=len(self.truth) - 1)).clamp(min=0)
        kept = torch.where(labelled.any(), values[source].to(self.bank.rows.dtype), self.bank.rows[known])
        self.bank.rows.index_copy_(0, known, kept)

    def true_label(self, index: Tensor) -> Tensor:
        """Label of each image [batch] that may be used, else UNKNOWN."""
        inside = index.clamp(max=len(self.truth) - 1)  # images after the last labelled one have none
        return torch.where(index == inside, self.truth[inside], UNKNOWN)

    def after_step(self, step: int, images: int) -> None:
        """Hold a round where an epoch of `images` ends."""
        self.batch, self.seen = self.seen or self.batch, 0
        if (step + 1) % max(1, images // max(1, self.batch)) == 0:
            self.round(step)

    def round(self, seed: int) -> None:
        """Go on training on the remembered embeddings: SGD 0.01, momentum 0.9, decay 1e-4, in batches of 256."""
        seen = self.bank.rows.any(1)
        rows, labels = self.bank.rows[seen].float(), self.bank.labels[seen]
        if not len(rows):
            return
        generator = torch.Generator().manual_seed(seed)
        self.net.requires_grad_(True)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        for _ in range(EPOCHS):
            for part in torch.randperm(len(rows), generator=generator).to(rows.device).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(self.net(rows[part]), labels[part]).backward()
                optimizer.step()
        self.net.requires_grad_(False)
        self.net.zero_grad()
        self.ready.fill_(True)


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
    label = torch.where(labels < 0, classes, labels)  # a class too many, for those without one
    sums = torch.zeros(classes + 1, rows.shape[1], device=rows.device).index_add_(0, label, rows.float())
    counts = torch.zeros(classes + 1, device=rows.device).index_add_(0, label, torch.ones_like(label).float())
    sums, counts = sum_of_all(sums[:classes]), sum_of_all(counts[:classes])
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
            raise ValueError(f"objective.k: {config.k} neighbours of {config.pool} allowed; raise --objective.pool")
        if max(config.k or 1, config.pool) > config.bank:
            raise ValueError(
                f"objective.k: the bank has {config.bank} rows, fewer than k or pool; raise --objective.bank"
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


class Protonw(MomentumPair):
    """ProtoNW, a baseline of CMSF: cross entropy of a softmax over the cosines with the class means of a bank.

    Classes that are not in the bank are left out.
    """

    def __init__(self, model: Classifier, config: ProtonwConfig, steps: int) -> None:
        super().__init__(model, config, steps, config.predictor_hidden)
        reject_several(model, "protonw")
        self.temperature = config.temperature
        self.bank = make_bank(config.bank, self.head.features, dtype=PRECISIONS[config.bank_precision])

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        online, target, seen = self.pair(batch)
        self.bank.push(target, batch.label)
        means, counts = class_means(self.bank.here(), self.bank.labels_here(), len(self.model.classes))
        with torch.autocast(online.device.type, enabled=False):
            scores = online @ unit(means).T / self.temperature
        scores = scores.masked_fill(counts[None] == 0, float("-inf"))
        return self.losses(F.cross_entropy(scores, batch.label), seen, batch)
