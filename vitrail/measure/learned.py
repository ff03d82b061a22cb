"""Learned quantities of a model other than attention maps: gains, ratios, tokens, matrices, spectra, embeddings.

    scales, ratios    LayerScale and ‖branch‖ / ‖stream‖ by depth (CaiT)           any trunk of residual branches
    cosines           class token and distillation token by depth (DeiT)           distilled heads
    sparsity, rows    of patch mixing (ResMLP)                                     ResMLP
    spectra           before and after normalisation (SoT, section 3.3.1)          second-order heads
    agreement         of classifiers, pair by pair                                 heads with several
    energy, plane     of embeddings (Grafit)                                       all
    neighbours        of the chosen images; clusters of all                        all

A part that a model does not have is empty. Only embeddings outlive their batch. Papers: CaiT, arXiv 2103.17239; DeiT,
2012.12877; ResMLP, 2105.03404; SoT, 2104.10935; Grafit, 2011.12982.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.kernels.second_order import cross_covariance, matrix_sqrt_newton_schulz
from vitrail.measure.branches import BranchRatios, layer_scales
from vitrail.measure.embeddings import (
    MOST_CLUSTERS,
    ImageClusters,
    Neighbours,
    Way,
    components_for,
    image_clusters,
    neighbours_of,
    pca_energy,
    plane,
)
from vitrail.measure.ensembles import agreement
from vitrail.measure.evaluate import evaluation_mode
from vitrail.measure.looking import Mean
from vitrail.measure.patch_mixing import mixing_rows, mixing_sparsity
from vitrail.model.classifier import Classifier, Outputs
from vitrail.model.heads.distilled import DistilledHead
from vitrail.model.heads.second_order import CovariancePooling, CrossCovariancePooling

PARTS = ("learned", "embedding", "neighbours", "clusters")
NEAREST = 6


@dataclass(frozen=True)
class Learned:
    """Figures of one model; by depth where they are lists."""

    images: int
    scales: dict[str, list[float | None]]  # branch -> mean magnitude of its gains
    ratios: dict[str, list[float | None]]  # branch -> ‖branch‖ / ‖stream‖, mean over images
    cosines: tuple[float, ...]  # as learned, after each block, after the final norm
    sparsity: dict[str, list[float]]  # A, B, C -> share of entries near zero
    rows: tuple[Tensor, ...]  # [down, across, rows, columns] a layer: rows of A of the central patches
    spectra: dict[str, tuple[float, ...]]  # before, after -> singular values over the first, mean
    agreement: Tensor | None  # [classifiers, classifiers]
    energy: tuple[float, ...]  # of the first 1, 2, ... principal components of the embeddings
    width: int  # of the embeddings
    plane: Tensor | None  # [images, 2]
    way: Way
    neighbours: Neighbours | None
    clusters: ImageClusters | None
    labels: NDArray[np.int64] | None  # [images], numbers of the data's classes
    levels: NDArray[np.int64] | None  # [images, levels] of a taxonomy, finest first
    notes: tuple[str, ...]

    @property
    def components(self) -> int:
        """Principal components that hold 90 % of the variance; 0 where that is not known."""
        return components_for(torch.tensor(self.energy, dtype=torch.float64)) if self.energy else 0

    def to_json(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name in ("scales", "ratios", "sparsity"):
            if getattr(self, name):
                made[name] = getattr(self, name)
        if self.cosines:
            made["token_cosines"] = list(self.cosines)
        if self.spectra:
            made["spectra"] = {name: list(values) for name, values in self.spectra.items()}
        if self.agreement is not None:
            made["agreement"] = self.agreement.tolist()
        if self.energy:
            made["pca"] = {"energy": list(self.energy), "components_90": self.components, "images": self.images}
        if self.neighbours is not None:
            made["neighbours"] = {
                "rows": self.neighbours.rows.tolist(),
                "cosines": [[round(float(v), 6) for v in row] for row in self.neighbours.cosines],
            }
        if self.clusters is not None:
            made["clusters"] = {"sizes": list(self.clusters.sizes), "purity": self.clusters.purity}
        return made | {"notes": list(self.notes)}


class Learner:
    """Gathers `Learned` of a model over batches of images; `parts` are those of `PARTS` that are wanted."""

    def __init__(self, model: Classifier, parts: Collection[str] = PARTS) -> None:
        self.model, self.parts = model, set(parts)
        self.inner = "learned" in self.parts
        self.ratios = BranchRatios(model)
        self.two_tokens = learned_tokens(model) if self.inner else None
        self.cosines: list[Mean] = []
        self.spectra = {"before": Mean(), "after": Mean()}
        self.stacks: list[Tensor] = []
        self.embedding: list[Tensor] = []
        self.images = 0

    def add(self, images: Tensor) -> None:
        """Images as the model takes them, [batch, 3, height, width]."""
        with evaluation_mode(self.model), torch.inference_mode():
            if self.inner:
                self._look(images)
            else:
                self._embed(self.model.outputs(images))
        self.images += len(images)

    def _look(self, images: Tensor) -> None:
        known = getattr(self.model.trunk, "intermediates", ())
        names = [name for name in known if name.startswith("tokens.")] if self.two_tokens is not None else []
        pooled: list[tuple[Tensor, Tensor | None]] = []
        pool: Any = getattr(self.model.head, "pool", None)
        second = isinstance(pool, (CovariancePooling, CrossCovariancePooling))
        hook = pool.register_forward_pre_hook(lambda module, given: pooled.append(given)) if second else None
        try:
            with self.ratios.watching():
                out = self.model.outputs(images, set(names))
        finally:
            if hook is not None:
                hook.remove()
        if self.two_tokens is not None:
            self._compare([out.captured[name] for name in names] + [out.tokens.sequence])
        for words, mask in pooled:
            self._spectra(pool, words, mask)
        self.stacks.append(self._classifiers(out.stack).float().cpu())
        self._embed(out)

    def _embed(self, out: Outputs) -> None:
        if self.parts - {"learned"}:
            self.embedding.append(out.representation.float().flatten(1).cpu())

    def _compare(self, sequences: list[Tensor]) -> None:
        self.cosines = self.cosines or [Mean() for _ in sequences]
        for mean, sequence in zip(self.cosines, sequences, strict=True):
            likeness = F.cosine_similarity(sequence[:, 0].float(), sequence[:, 1].float(), dim=-1)
            mean.add(likeness, torch.ones(len(likeness), dtype=torch.bool))

    def _spectra(self, pool: CovariancePooling | CrossCovariancePooling, words: Tensor, mask: Tensor | None) -> None:
        for name, matrices in zip(("before", "after"), second_order(pool, words, mask), strict=True):
            values = relative_spectrum(matrices).flatten(0, -2)
            self.spectra[name].add(values, values[:, 0] > 0)

    def _classifiers(self, stack: Tensor) -> Tensor:
        """The stack without an auxiliary classifier, which stands last and has no part in the prediction."""
        return stack[:, :-1] if getattr(self.model.head, "auxiliary", None) is not None else stack

    def result(
        self,
        pictures: int = 8,
        labels: NDArray[np.int64] | None = None,
        levels: NDArray[np.int64] | None = None,
        way: Way = "pca",
    ) -> Learned:
        """Neighbours are those of the first `pictures` images; `labels` and `levels` are of all, where known."""
        if not self.images:
            raise ValueError("there is nothing to learn from: no image was given")
        embedding = torch.cat(self.embedding) if self.embedding else torch.zeros(0, 0)
        stack = torch.cat(self.stacks) if self.stacks else torch.zeros(0, 0, 0)
        several = stack.shape[1] > 1 and stack.shape[2] > 1
        kinds = MOST_CLUSTERS if labels is None else len(np.unique(labels))
        enough = self.images > 1
        return Learned(
            images=self.images,
            scales=layer_scales(self.model) if self.inner else {},
            ratios=self.ratios.result(),
            cosines=self._cosines(),
            sparsity=mixing_sparsity(self.model) if self.inner else {},
            rows=tuple(mixing_rows(self.model)) if self.inner else (),
            spectra={name: mean.values() for name, mean in self.spectra.items() if mean.count},
            agreement=agreement(stack) if several else None,
            energy=tuple(pca_energy(embedding).tolist()) if "embedding" in self.parts and enough else (),
            width=embedding.shape[1],
            plane=plane(embedding, way) if "embedding" in self.parts and enough else None,
            way=way,
            neighbours=neighbours_of(embedding, pictures, NEAREST) if "neighbours" in self.parts and enough else None,
            clusters=image_clusters(embedding, labels, min(kinds, MOST_CLUSTERS))
            if "clusters" in self.parts and enough
            else None,
            labels=labels,
            levels=levels,
            notes=tuple(self._notes()),
        )

    def _cosines(self) -> tuple[float, ...]:
        if self.two_tokens is None:
            return ()
        first, second = self.two_tokens.float()
        learned = float(F.cosine_similarity(first, second, dim=0))
        return (learned, *(mean.values()[0] for mean in self.cosines))

    def _notes(self) -> list[str]:
        said = []
        if self.inner and self.model.policy is not None:
            said.append("ratios of branches are left out: an adaptive model's tokens differ from block to block")
        elif self.inner and not self.ratios.blocks:
            said.append("gains and ratios of branches are left out: its blocks are no residual branches known here")
        if self.parts - {"learned"} and self.images == 1:
            said.append("one image alone has no neighbours and no spread")
        return said


def learned_tokens(model: Classifier) -> Tensor | None:
    """Class and distillation token as they are learned, [2, width]; none where the model has no such pair."""
    trunk: Any = model.trunk
    if model.policy is not None:
        return None
    if isinstance(model.head, DistilledHead) and getattr(trunk, "cls_token", None) is not None:
        return cast("Tensor", trunk.cls_token).detach()[0, :2]
    backbone: Any = getattr(trunk, "backbone", None)
    if getattr(trunk, "plain", False) and getattr(backbone, "dist_token", None) is not None:
        return torch.cat([backbone.cls_token, backbone.dist_token], 1).detach()[0]
    return None


def second_order(
    pool: CovariancePooling | CrossCovariancePooling, words: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The matrices of a second-order pooling before and after their normalisation, [batch, heads, rows, columns]."""
    if isinstance(pool, CrossCovariancePooling):
        before = pool.matrices(words, mask)
        return before, cast("Tensor", pool.norm(before)).reshape_as(before)
    x = pool.project(words).mT
    before = cross_covariance(x, x, mask, pool.center)
    return before[:, None], matrix_sqrt_newton_schulz(before, pool.steps)[:, None]


def relative_spectrum(matrices: Tensor) -> Tensor:
    """Singular values [..., rank] of [..., rows, columns] over the largest, float64; zeros for a zero matrix."""
    values = torch.linalg.svdvals(matrices.double())
    largest = values[..., :1]
    return torch.where(largest > 0, values / largest.clamp_min(torch.finfo(values.dtype).tiny), 0.0)
