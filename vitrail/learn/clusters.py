"""Cluster classification: a student learns which cluster of a frozen teacher's features an image is in.

The baseline CC of CompRess (Abbasi Koohpayegani et al., 2020, arXiv 2010.14713).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.batch import Batch, ViewSpec
from vitrail.kernels.kmeans import kmeans
from vitrail.learn.bank import UNKNOWN, processes
from vitrail.learn.config import ClustersConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.selfsupervised import SelfSupervised, unit
from vitrail.learn.teacher import Embedder, load_embedder
from vitrail.model.classifier import Classifier


def cluster_images(
    embedder: Embedder, images: Iterable[Batch], index: NDArray[np.int64], clusters: int
) -> NDArray[np.int64]:
    """Cluster of each image [len(index)] by k-means of the teacher's unit features; UNKNOWN: it was not among `images`.

    In a process group each process brings the images it was given; the first one finds the clusters for all, since
    k-means need not be the same to the last bit on two devices. Raises `ValueError` for more clusters than images.
    """
    said, where = [], []
    for batch in images:
        embedder = embedder.to(batch.index.device)
        said.append(unit(embedder.ask(batch.images)))
        where.append(batch.index)
    rows, place = torch.cat(said), torch.cat(where)
    if processes() > 1:
        parts: list[tuple[Tensor, Tensor]] = [(rows, place)] * processes()
        dist.all_gather_object(parts, (rows.cpu(), place.cpu()))
        rows, place = (torch.cat([part[i] for part in parts]).to(rows.device) for i in range(2))
    if len(rows) < clusters:
        raise ValueError(f"objective.clusters: {clusters} clusters of {len(rows)} training images; use fewer")
    table = torch.full((int(index.max()) + 1,), UNKNOWN, dtype=torch.int64)
    found: list[Tensor | None] = [None]
    if processes() == 1 or dist.get_rank() == 0:
        found = [kmeans(rows, clusters).label.cpu()]
    if processes() > 1:
        dist.broadcast_object_list(found)
    assert found[0] is not None
    table[place.cpu()] = found[0]
    return table[torch.from_numpy(index)].numpy()


class Clusters(SelfSupervised):
    """Cross entropy of a linear classifier on the embedding; its labels are the clusters [images] of the training set.

    Clusters are computed before the run, from un-augmented images, and stored in checkpoints. A resumed run computes
    the teacher's features again, and takes the clusters of the checkpoint.
    """

    views = ViewSpec(1)
    edge_layers = ("classify",)
    cluster: Tensor  # [largest index + 1]

    def __init__(
        self, model: Classifier, config: ClustersConfig, clusters: NDArray[np.int64], index: NDArray[np.int64]
    ) -> None:
        super().__init__(model)
        self.classify = nn.Linear(self.head.features, config.clusters)
        table = torch.full((int(index.max()) + 1,), UNKNOWN, dtype=torch.int64)
        table[torch.from_numpy(index)] = torch.from_numpy(clusters)
        self.register_buffer("cluster", table)

    @classmethod
    def build(cls, model: Classifier, config: ClustersConfig, facts: TrainingFacts) -> Objective:
        teacher = load_embedder(config.teacher, model, config.teacher_size)
        if facts.images is None:
            raise ValueError("objective clusters looks at all training images first, and was given none")
        embedder = Embedder(teacher, model, config.teacher, config.teacher_size)
        clusters = cluster_images(embedder, facts.images(), facts.index, config.clusters)
        return cls(model, config, clusters, facts.index)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        seen = self.encode(batch.images)
        logits, wanted = self.classify(seen.embedding).float(), self.cluster[batch.index]
        loss = F.cross_entropy(logits, wanted, ignore_index=UNKNOWN)
        right = (logits.argmax(1) == wanted).float().mean()
        return self.losses(loss, seen, batch, cluster_top1=right)
