"""Sections on image embeddings: PCA energy (Grafit, arXiv 2011.12982) and a 2-D map, nearest neighbours, clusters."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.inspect.section import (
    Chart,
    ImageBatch,
    InspectedModel,
    Inspection,
    PagePart,
    Section,
    chart_cards,
    sheet_part,
)
from vitrail.kernels.kmeans import kmeans
from vitrail.kernels.similarity import top_rows
from vitrail.measure.clustering import purity, shared_images
from vitrail.measure.evaluator import evaluation_mode
from vitrail.quantities import percent, shorten
from vitrail.report.charts import curves_chart, scatter_chart, whole_percent
from vitrail.report.sheets import Cell, Pixels, Row, Sheet, enlarged, image_rows
from vitrail.schema import near

Projection = Literal["pca", "tsne", "umap"]
PROJECTIONS = {"pca": "its first two principal components", "tsne": "t-SNE", "umap": "UMAP"}
LIBRARIES = {"tsne": ("sklearn", "scikit-learn"), "umap": ("umap", "umap-learn")}  # module, package
ENERGY = 0.9
MOST_CLUSTERS = 12
NEAREST = 6
OF_CLUSTER = 10  # images of a cluster that are shown
MOST_NEIGHBOURS = 8  # images whose neighbours are shown
FRAME = 5  # pixels around a neighbour
SAME, RELATED, OTHER = (63, 125, 95), (214, 158, 46), (178, 58, 72)  # green, amber, red


@dataclass(frozen=True)
class EmbeddingStatistics:
    """Structure of the embeddings of all images; parts that were not asked for are empty."""

    images: int
    width: int  # of the embeddings
    energy: tuple[float, ...]  # of the first 1, 2, ... principal components
    plane: Tensor | None  # [images, 2]
    neighbours: Neighbours | None
    clusters: ImageClusters | None

    @property
    def components(self) -> int:
        """Principal components that explain 90 % of the variance; 0 where that is not known."""
        return components_for(torch.tensor(self.energy, dtype=torch.float64)) if self.energy else 0

    @property
    def notes(self) -> list[str]:
        return ["one image alone has no neighbours and no spread"] if self.images == 1 else []

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {"notes": self.notes}
        if self.energy:
            values["pca"] = {"energy": list(self.energy), "components_90": self.components, "images": self.images}
        if self.neighbours is not None:
            cosines = [[round(float(v), 6) for v in row] for row in self.neighbours.cosines]
            values["neighbours"] = {"rows": self.neighbours.rows.tolist(), "cosines": cosines}
        if self.clusters is not None:
            values["clusters"] = {"sizes": list(self.clusters.sizes), "purity": self.clusters.purity}
        return values


def embedding_statistics(
    embedding: Tensor,
    parts: Collection[str] = ("embedding", "neighbours", "clusters"),
    pictures: int = 8,
    labels: NDArray[np.int64] | None = None,
    projection: Projection = "pca",
) -> EmbeddingStatistics:
    """Of [images, width]; neighbours are those of the first `pictures` images, `labels` of all, where known."""
    images, width = embedding.shape
    wanted = set(parts) if images > 1 else set()
    count = MOST_CLUSTERS if labels is None else min(MOST_CLUSTERS, len(np.unique(labels)))
    return EmbeddingStatistics(
        images=images,
        width=width,
        energy=tuple(pca_energy(embedding).tolist()) if "embedding" in wanted else (),
        plane=plane(embedding, projection) if "embedding" in wanted else None,
        neighbours=neighbours_of(embedding, pictures, NEAREST) if "neighbours" in wanted else None,
        clusters=image_clusters(embedding, labels, count) if "clusters" in wanted else None,
    )


class EmbeddingSection(Section):
    """Embeddings of all images, which are kept until the end."""

    names: ClassVar = {
        "embedding": "energy and a map of the embeddings",
        "neighbours": "the nearest other images",
        "clusters": "images that lie together",
    }
    explains = True

    def __init__(self, inspection: Inspection) -> None:
        super().__init__(inspection)
        self.embeddings: list[list[Tensor]] = [[] for _ in inspection.subjects]

    def add(self, batch: ImageBatch) -> None:
        for i, (subject, images) in enumerate(zip(self.inspection.subjects, batch.inputs, strict=True)):
            with evaluation_mode(subject.model), torch.inference_mode():
                out = batch.outputs[i] if batch.outputs else subject.model.outputs(images)
                self.embeddings[i].append(out.representation.float().flatten(1).cpu())

    def finish(self) -> None:
        inspection = self.inspection
        for subject, parts in zip(inspection.subjects, self.embeddings, strict=True):
            subject.embedding = embedding_statistics(
                torch.cat(parts), inspection.what, len(inspection.captions), inspection.label, inspection.projection
            )
            if subject.embedding.neighbours is not None:
                inspection.shown |= set(subject.embedding.neighbours.rows.flatten().tolist())
            if subject.embedding.clusters is not None:
                inspection.shown |= {int(r) for rows in subject.embedding.clusters.members for r in rows[:OF_CLUSTER]}

    def _statistics(self) -> Iterator[tuple[int, InspectedModel, EmbeddingStatistics]]:
        for i, subject in enumerate(self.inspection.subjects):
            if subject.embedding is not None:
                yield i, subject, subject.embedding

    def parts(self) -> Iterator[PagePart]:
        inspection, several = self.inspection, list(self._statistics())
        if charts := self._charts():
            lead = "Each image is the vector that nearest neighbours and linear probes use."
            yield PagePart("embedding", "Embeddings", lead, chart_cards(charts), "pair")
        near_ = [neighbour_sheet(inspection, s, e.neighbours, i) for i, s, e in several if e.neighbours is not None]
        if near_:
            lead = f"Among the {inspection.subjects[0].attention.images} images, by cosine."
            if inspection.classes:
                coarser = " amber ~: the same at a coarser level of the taxonomy only;"
                coarser = coarser if len(inspection.levels) > 1 else ""
                lead += f" Green ✓: the same class;{coarser} red ✗: another."
            yield sheet_part("neighbours", "Nearest neighbours", lead, near_)
        groups = [cluster_sheet(inspection, s.name, e.clusters, i) for i, s, e in several if e.clusters is not None]
        if groups:
            lead = "Clusters of all images (k-means), the largest first; in each, those nearest to its centre."
            share = " Its most frequent class and that class's share stand beside it."
            yield sheet_part("clusters", "Clusters", lead + (share if inspection.classes else ""), groups)

    def _charts(self) -> list[Chart]:
        """PCA energy of all models in one chart, then a map of each."""
        inspection, charts = self.inspection, []
        curves = {}
        for _, subject, statistics in self._statistics():
            if energy := statistics.energy:  # from no component to those that hold nearly all
                enough = sum(value < 0.99 for value in energy) + 1
                curves[subject.name] = [{0.0: 0.0} | {float(i + 1): v for i, v in enumerate(energy[:enough])}]
        if curves:
            heading = "Variance explained by the first principal components"
            style = {
                "x_label": "components",
                "tell": whole_percent,
                "tell_axis": whole_percent,
                "colours": inspection.colours,
            }
            hint = "; ".join(self._components(s, e) for _, s, e in self._statistics()) + "."
            charts.append(Chart(heading, curves_chart(curves, title=heading, **style), hint))  # type: ignore[arg-type]
        way = PROJECTIONS[inspection.projection]
        for _, subject, statistics in self._statistics():
            if statistics.plane is None:
                continue
            heading = f"Map of {subject.name}" if inspection.several else "Map of the images"
            points = statistics.plane.numpy()
            svg = scatter_chart(points, inspection.label, inspection.classes, title=f"{heading}, {way}")
            hint = f"One point per image, by {way}. Distances between far groups mean little."
            if inspection.projection == "pca":
                share = percent(statistics.energy[min(1, len(statistics.energy) - 1)], 0)
                hint = f"One point per image, by {way}. The two explain {share} of the variance."
            charts.append(Chart(heading, svg, hint.replace(" %", "\N{NO-BREAK SPACE}%")))
        return charts

    def _components(self, subject: InspectedModel, statistics: EmbeddingStatistics) -> str:
        images, width, count = statistics.images, statistics.width, statistics.components
        few = "" if images > width else f" (only {images} images: treat with caution)"
        explains, who = "explains" if count == 1 else "explain", self.inspection.of(subject)
        return f"{who}{count} of {width} principal components {explains} {percent(ENERGY, 0)} of the variance{few}"

    def lines(self) -> Iterator[str]:
        for _, subject, statistics in self._statistics():
            if statistics.energy:
                yield self._components(subject, statistics)
            clusters = statistics.clusters
            if clusters is not None and clusters.purity is not None:
                who = self.inspection.of(subject)
                yield f"{who}{len(clusters.sizes)} clusters have a purity of {percent(clusters.purity)}"


def pca_energy(embedding: Tensor) -> Tensor:
    """Share of the variance of [images, width] in the first 1, 2, ... principal components: rising to 1, float64.

    Zeros where all embeddings are the same.
    """
    rows = embedding.double()
    energy = torch.linalg.svdvals(rows - rows.mean(0)).square()
    total = energy.sum()
    return energy.cumsum(0) / total if total > 0 else torch.zeros_like(energy)


def components_for(energy: Tensor, share: float = ENERGY) -> int:
    """How many components explain at least this share.

    >>> components_for(torch.tensor([0.5, 0.9, 1.0]))
    2
    """
    return int((energy < share - 1e-12).sum()) + 1


def pca_plane(embedding: Tensor) -> Tensor:
    """[images, 2], the first two principal components; each points to where its largest magnitude is positive."""
    rows = embedding.double()
    U, s, _ = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    components = (U * s)[:, :2]
    components = F.pad(components, (0, 2 - components.shape[1]))
    ends = components.gather(0, components.abs().argmax(0, keepdim=True))
    return components * torch.where(ends < 0, -1.0, 1.0)


def check_projection(projection: str) -> None:
    """Raises `ValueError` where there is no such projection, or not the library that computes it."""
    if projection not in PROJECTIONS:
        raise ValueError(
            f"no projection {projection!r}{near(projection, PROJECTIONS)}; there are {', '.join(PROJECTIONS)}"
        )
    if projection != "pca" and find_spec(LIBRARIES[projection][0]) is None:
        package = LIBRARIES[projection][1]
        raise ValueError(f"{projection} needs {package}, which is not installed; use --projection pca")


def plane(embedding: Tensor, projection: Projection = "pca", seed: int = 0) -> Tensor:
    """[images, 2] by PCA, t-SNE (scikit-learn) or UMAP (umap-learn), the latter two by cosine distance."""
    check_projection(projection)
    if projection == "pca" or len(embedding) < 4:
        return pca_plane(embedding)
    rows = F.normalize(embedding.float(), dim=1).cpu().numpy()
    estimator: Any
    if projection == "tsne":
        from sklearn.manifold import TSNE

        perplexity = min(30.0, (len(rows) - 1) / 3)
        estimator = TSNE(2, perplexity=perplexity, metric="cosine", init="random", random_state=seed)
    else:
        from umap import UMAP

        # A seed and several threads exclude each other.
        estimator = UMAP(metric="cosine", random_state=seed, n_neighbors=min(15, len(rows) - 1), n_jobs=1)
    return torch.from_numpy(np.asarray(estimator.fit_transform(rows), dtype=np.float64))


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
    result = kmeans(unit, count, seed=seed)
    distance = (unit - result.centres[result.label]).square().sum(1).cpu().numpy()
    label = result.label.cpu().numpy()
    sizes = np.bincount(label, minlength=count)
    order = [int(c) for c in np.argsort(-sizes, kind="stable") if sizes[c]]
    clusters = [np.flatnonzero(label == c) for c in order]
    members = tuple(rows[np.argsort(distance[rows], kind="stable")] for rows in clusters)
    pure: float | None = None
    shares: tuple[tuple[int, float], ...] = ()
    if labels is not None:
        shared = shared_images(torch.from_numpy(label), torch.from_numpy(labels), count, int(labels.max()) + 1)
        pure = purity(shared)
        shares = tuple((int(shared[c].argmax()), float(shared[c].max() / sizes[c])) for c in order)
    return ImageClusters(tuple(int(sizes[c]) for c in order), members, result.inertia, pure, shares)


def framed(picture: Pixels, colour: tuple[int, int, int]) -> Pixels:
    """A picture with a border of one colour drawn over its edge."""
    copy = picture.copy()
    for edge in (copy[:FRAME], copy[-FRAME:], copy[:, :FRAME], copy[:, -FRAME:]):
        edge[...] = colour
    return copy


def shared_level(
    labels: NDArray[np.int64] | None, levels: NDArray[np.int64] | None, one: int, other: int
) -> int | None:
    """The finest level of the taxonomy at which two images have the same class; none where they have none in common.

    `levels` [images, levels], finest first; without a taxonomy the only level is that of `labels` [images].
    """
    if levels is None:
        assert labels is not None
        levels = labels[:, None]
    same = np.flatnonzero(levels[one] == levels[other])
    return int(same[0]) if len(same) else None


def neighbour_cell(inspection: Inspection, image: int, row: int, caption: str = "") -> Cell | None:
    """Image `row` beside `image`, framed by how far their classes agree, with its class or a caption below."""
    shown = inspection.more.get(row)
    if shown is None:
        return None
    pixels, caption = enlarged(shown.pixels), caption or shorten(shown.caption, 16)
    if inspection.label is None:
        return Cell(pixels, caption)
    level = shared_level(inspection.label, inspection.level, image, row)
    colour, mark = (OTHER, "✗") if level is None else (SAME, "✓") if level == 0 else (RELATED, "~")
    return Cell(framed(pixels, colour), f"{mark} {caption}")


def rank_columns(count: int) -> list[str]:
    """Columns of a sheet of neighbours: image, nearest, 2nd, 3rd, ..."""
    return ["image", *("nearest", "2nd", "3rd")[:count], *(f"{i}th" for i in range(4, count + 1))]


def neighbour_sheet(inspection: Inspection, subject: InspectedModel, neighbours: Neighbours, number: int) -> Sheet:
    """The chosen images, and beside each the nearest others, framed by how far their classes agree."""

    def cells(image: int, pixels: Pixels) -> list[Cell | None]:
        return [neighbour_cell(inspection, image, row) for row in neighbours.rows[image].tolist()]

    rows = image_rows(subject.pixels, inspection.captions[:MOST_NEIGHBOURS], cells)
    title = f"Nearest neighbours, {subject.name}"
    return Sheet(f"neighbours-{number}", title, rank_columns(neighbours.rows.shape[1]), rows)


def cluster_sheet(inspection: Inspection, name: str, clusters: ImageClusters, number: int) -> Sheet:
    """One row per cluster: those of its images that are nearest to its centre."""
    wide = min(OF_CLUSTER, max(clusters.sizes))
    rows: list[Row] = []
    for i, members in enumerate(clusters.members):
        pictures = [inspection.more.get(int(row)) for row in members[:OF_CLUSTER]]
        cells = [None if p is None else Cell(enlarged(p.pixels), shorten(p.caption, 18)) for p in pictures]
        label = "1 image" if clusters.sizes[i] == 1 else f"{clusters.sizes[i]:,} images"
        if clusters.shares:
            kind, share = clusters.shares[i]
            label = f"{percent(share, 0)} {shorten(inspection.classes[kind], 18)}, {label}"
        rows.append((label, cells + [None] * (wide - len(cells))))
    return Sheet(f"clusters-{number}", f"Clusters of {name}", ["centre"] + [""] * (wide - 1), rows)
