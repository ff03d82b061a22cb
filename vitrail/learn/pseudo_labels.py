"""Pseudo-labels of semi-supervised CMSF (Navaneet et al., 2021, arXiv 2112.04607)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.learn.bank import UNKNOWN, ImageMemory, of_all, processes

EPOCHS, BATCH = 10, 256  # of a round, as in the authors' code


def draw_labelled(labels: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """Rows of the images whose labels may be used: `share` of every class, at least one; always the same ones."""
    rng = np.random.default_rng(0)
    rows = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    return np.sort(np.concatenate([own[: max(1, round(share * len(own)))] for own in rows]))


class PseudoLabels(nn.Module):
    """Two layers on the target's embeddings, trained between steps on those of the labelled images.

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
        place = torch.full((int(index.max()) + 1,), UNKNOWN, dtype=torch.int64)
        place[torch.from_numpy(index)] = torch.from_numpy(labels.copy())
        self.register_buffer("truth", place, persistent=False)
        self.seen = 0  # images of the step that is being made, where Python sees it
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
