"""Residual branches by depth: their LayerScale gains, and their norm relative to that of the stream.

As in CaiT (Touvron et al. 2021, arXiv 2103.17239).

Branches are `mixing` (attention or its replacement), `local` (XCiT's convolutions) and `channels` (the MLP); those
that stand side by side are summed. Known are blocks of ours and of plain timm ViTs: both name their parts alike.

ResMLP's patch-mixing matrices: rows as images, and their sparsity compared with the MLP's (arXiv 2105.03404).

A [patches, patches] of a block mixes patches, B and C are the two layers of its MLP.

Learned quantities of a model other than attention maps: gains, ratios, tokens, matrices, spectra, embeddings.

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

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.inspect.embeddings import (
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
from vitrail.kernels.covariance import cross_covariance, matrix_sqrt_newton_schulz
from vitrail.measure.attention_statistics import RunningMean
from vitrail.measure.ensembles import agreement
from vitrail.measure.evaluator import evaluation_mode
from vitrail.model.classifier import Classifier, Outputs
from vitrail.model.heads.pooled import DistilledHead
from vitrail.model.heads.second_order import CovariancePooling, CrossCovariancePooling
from vitrail.model.mixers.patches import LinearPatchesMixer
from vitrail.model.trunks.vit import Trunk

BRANCH_PARTS = {"mixing": ("norm1", "ls1"), "local": ("norm3", "ls3"), "channels": ("norm2", "ls2")}
SIDE_BY_SIDE = {"mixing": "attns", "channels": "ffns"}  # lists of branches of a parallel block


def branch_parts(model: Classifier) -> list[dict[str, list[tuple[nn.Module, nn.Module]]]]:
    """For every block and branch the norms before and the gains behind it, one pair for each that stands beside.

    Nothing where blocks are not of this kind.
    """
    trunk: Any = model.trunk
    owner = getattr(trunk, "backbone", trunk)
    blocks = owner.blocks if hasattr(owner, "blocks") and getattr(trunk, "plain", True) else ()
    found = []
    for block in blocks:
        parts: dict[str, list[tuple[nn.Module, nn.Module]]] = {}
        for name, (norm, gain) in BRANCH_PARTS.items():
            beside = getattr(block, SIDE_BY_SIDE.get(name, ""), ())
            if beside and all(hasattr(b, "norm") and hasattr(b, "ls") for b in beside):
                parts[name] = [(b.norm, b.ls) for b in beside]
            elif getattr(block, norm, None) is not None and getattr(block, gain, None) is not None:
                parts[name] = [(getattr(block, norm), getattr(block, gain))]
        found.append(parts)
    return found if all(found) else []


def gain_values(gain: nn.Module) -> Tensor | None:
    """The learned numbers of a gain: LayerScale's, a gate's; none where a branch is added as it is."""
    for name in ("gamma", "gain"):
        values = getattr(gain, name, None)
        if isinstance(values, Tensor):
            return values.detach()
    return None


def layer_scales(model: Classifier) -> dict[str, list[float | None]]:
    """Mean magnitude of the gains of each branch, by depth; empty where no branch has a gain."""
    blocks = branch_parts(model)
    found: dict[str, list[float | None]] = {}
    for name in BRANCH_PARTS:
        depths: list[float | None] = []
        for parts in blocks:
            known = [v for _, gain in parts.get(name, ()) if (v := gain_values(gain)) is not None]
            depths.append(float(torch.cat([v.flatten() for v in known]).double().abs().mean()) if known else None)
        if any(value is not None for value in depths):
            found[name] = depths
    return found


class BranchRatios:
    """‖branch‖ / ‖stream‖ of every branch, all tokens of an image together, mean over images.

    The stream is what the branch reads, before its norm; the branch is what is added, gain included. Hooks are there
    only while `watching`.
    """

    def __init__(self, model: Classifier) -> None:
        self.blocks = branch_parts(model) if model.policy is None else []
        self.means: dict[tuple[str, int], RunningMean] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While open, every forward pass of the model counts."""
        hooks: list[Any] = []
        try:
            for depth, parts in enumerate(self.blocks):
                for name, pairs in parts.items():
                    hooks += self._watch(name, depth, pairs)
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _watch(self, name: str, depth: int, pairs: list[tuple[nn.Module, nn.Module]]) -> list[Any]:
        stream: list[Tensor] = []
        added: list[Tensor] = []

        def before(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            if not stream:
                stream.append(given[0])

        def behind(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
            added.append(out)
            if len(added) == len(pairs):
                ratio = _length(torch.stack(added).sum(0)) / _length(stream[0])
                self.means.setdefault((name, depth), RunningMean()).add(ratio, torch.ones(len(ratio), dtype=torch.bool))
                stream.clear()
                added.clear()

        made: list[Any] = [norm.register_forward_pre_hook(before) for norm, _ in pairs]
        return made + [gain.register_forward_hook(behind) for _, gain in pairs]

    def result(self) -> dict[str, list[float | None]]:
        found: dict[str, list[float | None]] = {}
        for name in BRANCH_PARTS:
            depths = [self.means[name, i].values()[0] if (name, i) in self.means else None for i in self._depths()]
            if any(value is not None for value in depths):
                found[name] = depths
        return found

    def _depths(self) -> range:
        return range(len(self.blocks))


def _length(values: Tensor) -> Tensor:
    """Of [batch, ...], one number an image; float32, or more where the stream has more."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return wide.flatten(1).norm(dim=1)


NEAR_ZERO = 0.05  # of the largest magnitude of a matrix
CENTRAL = 6  # rows and columns of patches whose rows are shown


def sparsity(weight: Tensor) -> float:
    """Share of entries below 5 % of the largest magnitude."""
    sizes = weight.detach().abs()
    return float((sizes < NEAR_ZERO * sizes.max()).double().mean())


class Mixing(NamedTuple):
    """The matrices of one block."""

    a: Tensor  # [patches, patches], row before column
    grid: tuple[int, int]
    mlp: Any  # with fc1 and fc2; none where the block has no MLP


def mixing_blocks(model: Classifier) -> list[Mixing]:
    """Blocks that mix patches by one learned matrix, ours and timm's ResMLP; none where the model has no such."""
    if isinstance(model.trunk, Trunk):
        ours = [b for b in model.trunk.blocks if isinstance(getattr(b, "attn", None), LinearPatchesMixer)]
        return [Mixing(b.attn.tokens.weight, b.attn.grid, b.mlp) for b in ours]  # type: ignore[union-attr, arg-type]
    backbone: Any = getattr(model.trunk, "backbone", None)
    theirs = [b for b in getattr(backbone, "blocks", ()) if isinstance(getattr(b, "linear_tokens", None), nn.Linear)]
    return [Mixing(b.linear_tokens.weight, tuple(backbone.stem.grid_size), b.mlp_channels) for b in theirs]


def mixing_sparsity(model: Classifier) -> dict[str, list[float]]:
    """By depth: of A, B and C."""
    blocks = mixing_blocks(model)
    if not blocks:
        return {}
    found = {"A": [sparsity(block.a) for block in blocks]}
    if all(block.mlp is not None for block in blocks):
        found |= {"B": [sparsity(block.mlp.fc1.weight) for block in blocks]}
        found |= {"C": [sparsity(block.mlp.fc2.weight) for block in blocks]}
    return found


def central_rows(weight: Tensor, grid: tuple[int, int], most: int = CENTRAL) -> Tensor:
    """The rows of A of the patches in the middle, each on the grid: [down, across, rows, columns].

    `down` and `across` are at most `most`, and the middle of an odd rest lies towards the origin.
    """
    rows, columns = grid
    whole = weight.detach().float().cpu().view(rows, columns, rows, columns)
    down, across = min(most, rows), min(most, columns)
    top, left = (rows - down) // 2, (columns - across) // 2
    return whole[top : top + down, left : left + across]


def mixing_rows(model: Classifier) -> list[Tensor]:
    """`central_rows` of every block that has them."""
    return [central_rows(block.a, block.grid) for block in mixing_blocks(model)]


WEIGHT_SECTIONS = ("learned", "embedding", "neighbours", "clusters")
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

    def __init__(self, model: Classifier, parts: Collection[str] = WEIGHT_SECTIONS) -> None:
        self.model, self.parts = model, set(parts)
        self.inner = "learned" in self.parts
        self.ratios = BranchRatios(model)
        self.two_tokens = learned_tokens(model) if self.inner else None
        self.cosines: list[RunningMean] = []
        self.spectra = {"before": RunningMean(), "after": RunningMean()}
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
        self.cosines = self.cosines or [RunningMean() for _ in sequences]
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
