"""Structure of image embeddings: PCA energy (Grafit, arXiv 2011.12982), a 2-D map, neighbours, clusters."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.kernels.kmeans import kmeans
from vitrail.kernels.similarity import top_rows
from vitrail.measure.clustering import purity, shared_images
from vitrail.schema import near

Way = Literal["pca", "tsne", "umap"]
WAYS: tuple[Way, ...] = ("pca", "tsne", "umap")
LIBRARIES = {"tsne": ("sklearn", "scikit-learn"), "umap": ("umap", "umap-learn")}  # module, package
ENERGY = 0.9
MOST_CLUSTERS = 12


def pca_energy(embedding: Tensor) -> Tensor:
    """Share of the variance of [images, width] in the first 1, 2, ... principal components: rising to 1, float64.

    Zeros where all embeddings are the same.
    """
    rows = embedding.double()
    energy = torch.linalg.svdvals(rows - rows.mean(0)).square()
    total = energy.sum()
    return energy.cumsum(0) / total if total > 0 else torch.zeros_like(energy)


def components_for(energy: Tensor, share: float = ENERGY) -> int:
    """How many components hold at least this share.

    >>> components_for(torch.tensor([0.5, 0.9, 1.0]))
    2
    """
    return int((energy < share - 1e-12).sum()) + 1


def pca_plane(embedding: Tensor) -> Tensor:
    """[images, 2], the first two principal components; each points to where its largest magnitude is positive."""
    rows = embedding.double()
    U, s, _ = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    plane = (U * s)[:, :2]
    plane = F.pad(plane, (0, 2 - plane.shape[1]))
    ends = plane.gather(0, plane.abs().argmax(0, keepdim=True))
    return plane * torch.where(ends < 0, -1.0, 1.0)


def refuse_way(way: str) -> None:
    """Raises `ValueError` where there is no such projection, or not the library that makes it."""
    if way not in WAYS:
        raise ValueError(f"no projection {way!r}{near(way, WAYS)}; there are {', '.join(WAYS)}")
    if way != "pca" and find_spec(LIBRARIES[way][0]) is None:
        raise ValueError(f"{way} needs {LIBRARIES[way][1]}, which is not installed; use --projection pca")


def plane(embedding: Tensor, way: Way = "pca", seed: int = 0) -> Tensor:
    """[images, 2] by PCA, t-SNE (scikit-learn) or UMAP (umap-learn), the latter two by cosine distance."""
    refuse_way(way)
    if way == "pca" or len(embedding) < 4:
        return pca_plane(embedding)
    rows = F.normalize(embedding.float(), dim=1).cpu().numpy()
    if way == "tsne":
        from sklearn.manifold import TSNE

        made = TSNE(
            2, perplexity=min(30.0, (len(rows) - 1) / 3), metric="cosine", init="random", random_state=seed
        ).fit_transform(rows)
    else:
        from umap import UMAP

        near_by = min(15, len(rows) - 1)
        # A seed and several threads exclude each other.
        made = UMAP(metric="cosine", random_state=seed, n_neighbors=near_by, n_jobs=1).fit_transform(rows)
    return torch.from_numpy(np.asarray(made, dtype=np.float64))


@dataclass(frozen=True)
class Neighbours:
    """The nearest other images of some images, nearest first."""

    rows: Tensor  # [queries, k]
    cosines: Tensor  # [queries, k]


def neighbours_of(embedding: Tensor, queries: int, k: int) -> Neighbours:
    """Of the first `queries` rows of [images, width] among all others, by cosine."""
    k = min(k, len(embedding) - 1)
    if k < 1:
        raise ValueError("there are no neighbours: one image alone")
    unit = F.normalize(embedding.float(), dim=1)
    own = torch.arange(min(queries, len(unit)), device=unit.device)
    # A query comes first among its own neighbours, whoever equals it.
    cosines, rows = top_rows(unit[: len(own)], unit, k + 1, own=own)
    return Neighbours(rows[:, 1:].cpu(), cosines[:, 1:].cpu())


@dataclass(frozen=True)
class ImageClusters:
    """k-means of normalised embeddings; clusters by size, largest first."""

    sizes: tuple[int, ...]
    members: tuple[NDArray[np.int64], ...]  # rows of each cluster, nearest to its centre first
    inertia: float
    purity: float | None  # none where classes are not known
    shares: tuple[tuple[int, float], ...]  # most frequent class of each cluster and its share; empty likewise


def image_clusters(embedding: Tensor, labels: NDArray[np.int64] | None, count: int, seed: int = 0) -> ImageClusters:
    """At most `count` clusters of [images, width]."""
    unit = F.normalize(embedding.float(), dim=1)
    count = min(count, len(unit))
    found = kmeans(unit, count, seed=seed)
    distance = (unit - found.centres[found.label]).square().sum(1).cpu().numpy()
    label = found.label.cpu().numpy()
    sizes = np.bincount(label, minlength=count)
    order = [int(c) for c in np.argsort(-sizes, kind="stable") if sizes[c]]
    members = tuple(
        rows[np.argsort(distance[rows], kind="stable")] for rows in (np.flatnonzero(label == c) for c in order)
    )
    pure: float | None = None
    shares: tuple[tuple[int, float], ...] = ()
    if labels is not None:
        shared = shared_images(torch.from_numpy(label), torch.from_numpy(labels), count, int(labels.max()) + 1)
        pure = purity(shared)
        shares = tuple((int(shared[c].argmax()), float(shared[c].max() / sizes[c])) for c in order)
    return ImageClusters(tuple(int(sizes[c]) for c in order), members, found.inertia, pure, shares)
