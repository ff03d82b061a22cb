"""Agreement of clusters of embeddings with classes: cluster alignment (CompRess, arXiv 2010.14713) by the best
one-to-one matching, and purity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.kernels.kmeans import kmeans
from vitrail.measure.evaluator import Findings, Loaders, Model, Where, evaluator
from vitrail.measure.retrieval import Rows, embedded_split


def best_matching(gain: NDArray[np.float64]) -> NDArray[np.int64]:
    """Column [rows] given to each row so that the sum of `gain` [rows, columns] is the largest; -1: none is left.

    Exact (Kuhn and Munkres): one shortest augmenting path per row, of which every step is one operation on a whole row,
    so 1000 x 1000 take seconds. Raises `ValueError` for values that are not finite.

    >>> best_matching(np.array([[1.0, 2.0], [1.0, 9.0]])).tolist()
    [0, 1]
    """
    gain = np.asarray(gain, np.float64)
    if gain.ndim != 2 or not np.isfinite(gain).all():
        raise ValueError(f"a matching needs finite values [rows, columns], not these of shape {list(gain.shape)}")
    rows, columns = gain.shape
    matched = np.full(rows, -1)
    if rows > columns:
        wide = best_matching(gain.T)
        matched[wide] = np.arange(columns)
        return matched
    cost = -gain
    row_price, column_price = np.zeros(rows), np.zeros(columns)
    owner = np.full(columns, -1)  # row that a column belongs to so far
    for row in range(rows):
        slack, came_from = np.full(columns, np.inf), np.full(columns, -1)
        done = np.zeros(columns, bool)
        current, column = row, -1
        while True:
            reduced = cost[current] - row_price[current] - column_price
            closer = ~done & (reduced < slack)
            slack[closer], came_from[closer] = reduced[closer], column
            column = int(np.where(done, np.inf, slack).argmin())
            step = slack[column]
            row_price[owner[done]] += step
            row_price[row] += step
            column_price[done] -= step
            slack[~done] -= step
            done[column] = True
            if owner[column] < 0:
                break
            current = int(owner[column])
        while column >= 0:  # turn the path over, from its free column back to the new row
            before = int(came_from[column])
            owner[column] = row if before < 0 else owner[before]
            column = before
    matched[owner[owner >= 0]] = np.flatnonzero(owner >= 0)
    return matched


def shared_images(cluster: Tensor, label: Tensor, clusters: int, classes: int) -> NDArray[np.int64]:
    """How many images each cluster and each class have in common, [clusters, classes], from numbers [images] each."""
    pairs = torch.bincount(cluster.long() * classes + label.long(), minlength=clusters * classes)
    return pairs.view(clusters, classes).cpu().numpy()


def purity(shared: NDArray[np.int64]) -> float:
    """Share of images that have the most frequent class of their cluster; 1 where every cluster is of one class."""
    return float(shared.max(1).sum() / shared.sum())


def class_of_cluster(shared: NDArray[np.int64]) -> NDArray[np.int64]:
    """The class [clusters] that each cluster stands for, no class twice; -1 where no class is left.

    Of all matchings the one with the largest sum of common images over the size of the cluster.
    """
    return best_matching(shared / np.maximum(shared.sum(1, keepdims=True), 1))


@dataclass(frozen=True, eq=False)
class Alignment:
    """Clusters of training images as a classifier of other images."""

    accuracy: float
    per_class: NDArray[np.float64]  # [classes] share of its images that are right, NaN where it has none
    purity: float  # of the clusters of training images
    clusters: int

    def to_json(self, classes: tuple[str, ...]) -> dict[str, Any]:
        shares = {name: None if np.isnan(v) else float(v) for name, v in zip(classes, self.per_class, strict=True)}
        return {"accuracy": self.accuracy, "purity": self.purity, "clusters": self.clusters, "per_class": shares}


def cluster_alignment(
    train: Rows, test: Rows, classes: int, *, clusters: int | None = None, seed: int = 0
) -> Alignment:
    """k-means on training embeddings, clusters matched one to one with classes, accuracy on others.

    `train` and `test` are embeddings [images, width], which are normalised, and labels [images]. As many clusters as
    classes (none), and no more than there are training images; a cluster without a class is never right.
    """
    rows, label = F.normalize(train[0].float(), dim=1), train[1]
    wanted = min(clusters or classes, len(rows))
    clustered = kmeans(rows, wanted, seed=seed)
    shared = shared_images(clustered.label, label, wanted, classes)
    classes_of = torch.from_numpy(class_of_cluster(shared)).to(label.device)
    guess = classes_of[nearest_centre(F.normalize(test[0].float(), dim=1), clustered.centres)]
    right = (guess == test[1]).double()
    size = torch.bincount(test[1], minlength=classes)
    hits = torch.zeros(classes, dtype=torch.float64, device=right.device).index_add_(0, test[1], right)
    per_class = torch.where(size > 0, hits / size.clamp(min=1), torch.nan)
    return Alignment(float(right.mean()), per_class.cpu().numpy(), purity(shared), wanted)


def nearest_centre(rows: Tensor, centres: Tensor) -> Tensor:
    """The centre [rows] at the least Euclidean distance; the centres of unit rows are shorter than 1."""
    # |row - centre|^2 / 2 up to what the row alone decides: one product, of a row with a 1 behind it.
    with_length = torch.cat([centres, -centres.square().sum(1, keepdim=True) / 2], 1)
    return torch.cat([(F.pad(chunk, (0, 1), value=1.0) @ with_length.T).argmax(1) for chunk in rows.split(4096)])


@evaluator("train", "embedding")
def evaluate_clusters(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """Cluster alignment with as many clusters as classes, and the clusters' purity."""
    train, test = (embedded_split(model, data, split, **where).rows for split in ("train", data.split))
    result = cluster_alignment(train, test, len(data.classes))
    numbers = {"cluster_alignment": result.accuracy, "cluster_purity": result.purity}
    return {"numbers": numbers, "tables": {"clusters": result.to_json(tuple(data.classes))}, "pictures": {}}
