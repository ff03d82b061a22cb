"""Section on what the weights of a model have become, and on the features that its head reads.

    scales, ratios    LayerScale and ‖branch‖ / ‖stream‖ by depth (CaiT)           any trunk of residual branches
    cosines           class token and distillation token by depth (DeiT)           distilled heads
    sparsity, rows    of patch mixing (ResMLP)                                     ResMLP
    spectra           before and after normalisation (SoT, section 3.3.1)          second-order heads
    agreement         of classifiers, pair by pair                                 heads with several

A part that a model does not have is empty. Papers: CaiT, arXiv 2103.17239; DeiT, 2012.12877; ResMLP, 2105.03404; SoT,
2104.10935. Branches are `mixing` (attention or its replacement), `local` (XCiT's convolutions) and `channels` (MLP);
parallel ones are summed. Known are blocks of ours and of plain timm ViTs: both name their parts alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.inspect.section import Card, Chart, ImageBatch, Inspection, PagePart, Section, chart_cards
from vitrail.kernels.covariance import cross_covariance, matrix_sqrt_newton_schulz
from vitrail.measure.attention_maps import RunningMean
from vitrail.measure.ensembles import agreement
from vitrail.measure.evaluator import ResultTable, evaluation_mode
from vitrail.model.classifier import Classifier, Outputs
from vitrail.model.heads.pooled import DistilledHead
from vitrail.model.heads.second_order import CovariancePooling, CrossCovariancePooling
from vitrail.model.mixers.patches import LinearPatchesMixer
from vitrail.model.trunks.vit import Trunk
from vitrail.quantities import MISSING, number, percent, shorten
from vitrail.report.charts import curves_chart, matrix_chart, whole_percent
from vitrail.report.sheets import MOST_COLUMNS, Cell, Pixels, Sheet, colours, enlarged, evenly

Depths = dict[str, list[float | None]]  # one value per block, by name
BRANCH_PARTS = {"mixing": ("norm1", "ls1"), "local": ("norm3", "ls3"), "channels": ("norm2", "ls2")}
PARALLEL = {"mixing": "attns", "channels": "ffns"}  # lists of branches of a parallel block
NEAR_ZERO = 0.05  # of the largest magnitude of a matrix
CENTRAL = 6  # rows and columns of patches whose rows are shown
MIXING = (
    "Each tile is the row of a patch in the middle of the image: what it takes from every patch. Red adds, blue "
    "subtracts; each tile has its own scale."
)


@dataclass(frozen=True)
class WeightStatistics:
    """Statistics of one model; by depth where they are lists."""

    scales: Depths  # branch -> mean magnitude of its gains
    ratios: Depths  # branch -> ‖branch‖ / ‖stream‖, mean over images
    cosines: tuple[float, ...]  # as learned, after each block, after the final norm
    sparsity: dict[str, list[float]]  # A, B, C -> share of entries near zero
    rows: tuple[Tensor, ...]  # [down, across, rows, columns] per layer: rows of A of the central patches
    spectra: dict[str, tuple[float, ...]]  # before, after -> singular values over the first, mean
    agreement: Tensor | None  # [classifiers, classifiers]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {n: getattr(self, n) for n in ("scales", "ratios", "sparsity") if getattr(self, n)}
        if self.cosines:
            values["token_cosines"] = list(self.cosines)
        if self.spectra:
            values["spectra"] = {name: list(spectrum) for name, spectrum in self.spectra.items()}
        if self.agreement is not None:
            values["agreement"] = self.agreement.tolist()
        return values | {"notes": list(self.notes)}


CURVES: tuple[
    tuple[str, str, str, Callable[[float], str], str], ...
] = (  # field, heading, x axis, format, how to read it
    (
        *("scales", "Gains of branches (LayerScale)", "block", number),
        "Mean magnitude over channels. A branch with a small gain was hardly used.",
    ),
    (
        *("ratios", "Norm of a branch relative to the stream", "block", whole_percent),
        "‖branch‖ / ‖stream‖, mean over images. Flat: every block does its share; near zero: a block could go.",
    ),
    (
        *("cosines", "Class token and distillation token", "blocks passed", number),
        "Cosine: 0 learned apart, 1 the same vector. The first point is the two learned tokens themselves.",
    ),
    (
        *("sparsity", "Sparsity of the matrices", "block", whole_percent),
        "Share of weights below 5 % of the largest: A mixes patches, B and C are the MLP.",
    ),
    (
        *("spectra", "Singular values of second-order features", "number", number),
        "Over the largest, mean over images and heads. Normalisation lifts the tail: more directions count.",
    ),
)


class WeightSection(Section):
    """Weight statistics of all models, by depth."""

    names: ClassVar = {"learned": "gains and ratios of branches, tokens, matrices and heads"}
    explains = True

    def __init__(self, inspection: Inspection) -> None:
        super().__init__(inspection)
        self.collectors = [WeightCollector(s.model) for s in inspection.subjects]

    def add(self, batch: ImageBatch) -> None:
        batch.outputs = [each.add(images) for each, images in zip(self.collectors, batch.inputs, strict=True)]

    def finish(self) -> None:
        for subject, collector in zip(self.inspection.subjects, self.collectors, strict=True):
            subject.weights = collector.result()

    def parts(self) -> Iterator[PagePart]:
        inspection, cards = self.inspection, chart_cards(self._charts())
        known = [(s.name, s.weights.rows) for s in inspection.subjects if s.weights is not None and s.weights.rows]
        if known:
            layers = evenly(range(max(len(matrices) for _, matrices in known)), MOST_COLUMNS)
            rows = []
            for name, matrices in known:
                cells = [Cell(enlarged(mosaic(matrices[i]))) if i < len(matrices) else None for i in layers]
                rows.append((name if inspection.several else "", cells))
            sheet = Sheet("mixing", "Rows of patch mixing", [f"layer {i}" for i in layers], rows)
            cards.append(Card(sheet.title, [sheet, MIXING], wide=True))
        if cards:
            yield PagePart("learned", "Weight statistics", "Depth is counted in blocks from 0.", cards, "pair")

    def _charts(self) -> list[Chart]:
        subjects = [(s, s.weights) for s in self.inspection.subjects if s.weights is not None]
        charts = []
        for field, heading, x_label, tell, hint in CURVES:
            several = sum(bool(getattr(weights, field)) for _, weights in subjects) > 1
            lines: dict[str, list[dict[float, float]]] = {}
            for subject, weights in subjects:
                curves = getattr(weights, field) if field != "cosines" else {"cosine": weights.cosines[:-1]}
                for name, values in curves.items():
                    if known := {float(i): v for i, v in enumerate(values) if v is not None}:
                        lines[f"{subject.name} {name}" if several else name] = [known]
            if lines:
                axis = tell if tell is whole_percent else "{:g}".format
                svg = curves_chart(lines, title=heading, x_label=x_label, tell=tell, tell_axis=axis)
                charts.append(Chart(heading, svg, hint))
        for subject, weights in subjects:
            if weights.agreement is not None:
                heading = "Agreement of its classifiers" + (f", {subject.name}" if self.inspection.several else "")
                table = weights.agreement.numpy()
                svg = matrix_chart(table, "classifier", "classifier", title=heading, unit="classifier")
                hint = "Share of images on which two classifiers of the head predict the same class."
                charts.append(Chart(heading, svg, hint))
        return charts

    def lines(self) -> Iterator[str]:
        for subject in self.inspection.subjects:
            weights, who = subject.weights, self.inspection.of(subject)
            if weights is not None and weights.cosines:
                ends = f"{weights.cosines[0]:.2f} as learned and {weights.cosines[-1]:.2f} at the end"
                yield f"{who}class and distillation token have a cosine of {ends}"
            if weights is not None and weights.agreement is not None:
                count = len(weights.agreement)
                mean = (float(weights.agreement.sum()) - count) / (count * (count - 1))
                yield f"{who}two of its {count} classifiers agree on {percent(mean)} of images"

    def tables(self) -> Iterator[ResultTable | str]:
        for subject in self.inspection.subjects:
            table = None if subject.weights is None else depth_table(subject.weights)
            if table is not None:
                yield table._replace(title=f"{shorten(subject.name, 30)}: {table.title}")


def depth_table(weights: WeightStatistics) -> ResultTable | None:
    """One row per block; none where nothing is known by depth."""
    short = {"mixing": "mix", "channels": "MLP"}
    columns: dict[str, Sequence[float | None]] = {}
    columns |= {f"gain {short.get(name, name)}": values for name, values in weights.scales.items()}
    columns |= {f"ratio {short.get(name, name)}": values for name, values in weights.ratios.items()}
    columns |= {"cosine": weights.cosines[1:-1]} if weights.cosines else {}
    columns |= {f"sparse {name}": values for name, values in weights.sparsity.items()}
    rows = []
    for i in range(max((len(values) for values in columns.values()), default=0)):
        cells = [f"{i}"]
        for name, values in columns.items():
            value = values[i] if i < len(values) else None
            tell: Callable[[float], str] = percent if name.startswith(("ratio", "sparse")) else number
            cells.append(MISSING if value is None else tell(value))
        rows.append(tuple(cells))
    return (
        ResultTable("residual-branch gains and norms, relative to the residual stream", ("block", *columns), rows)
        if rows
        else None
    )


class WeightCollector:
    """Collects `WeightStatistics` of a model over batches of images."""

    def __init__(self, model: Classifier) -> None:
        self.model, self.ratios, self.tokens = model, BranchRatios(model), learned_tokens(model)
        self.cosines: list[RunningMean] = []
        self.spectra = {"before": RunningMean(), "after": RunningMean()}
        self.stacks: list[Tensor] = []

    def add(self, images: Tensor) -> Outputs:
        """Images as the model takes them, [batch, 3, height, width]; returns the forward pass."""
        known = getattr(self.model.trunk, "intermediates", ())
        names = [name for name in known if name.startswith("tokens.")] if self.tokens is not None else []
        pooled: list[tuple[Tensor, Tensor | None]] = []
        pool: Any = getattr(self.model.head, "pool", None)
        second = isinstance(pool, (CovariancePooling, CrossCovariancePooling))
        hook = pool.register_forward_pre_hook(lambda module, args: pooled.append(args)) if second else None
        with evaluation_mode(self.model), torch.inference_mode():
            try:
                with self.ratios.watching():
                    out = self.model.outputs(images, set(names))
            finally:
                if hook is not None:
                    hook.remove()
            if self.tokens is not None:
                sequences = [out.captured[name] for name in names] + [out.tokens.sequence]
                self.cosines = self.cosines or [RunningMean() for _ in sequences]
                for mean, sequence in zip(self.cosines, sequences, strict=True):
                    mean.add(F.cosine_similarity(sequence[:, 0].float(), sequence[:, 1].float(), dim=-1))
            for patches, mask in pooled:
                for name, matrices in zip(self.spectra, second_order(pool, patches, mask), strict=True):
                    values = relative_spectrum(matrices).flatten(0, -2)
                    self.spectra[name].add(values, values[:, 0] > 0)
        # An auxiliary classifier stands last and has no part in the prediction.
        auxiliary = getattr(self.model.head, "auxiliary", None) is not None
        self.stacks.append((out.stack[:, :-1] if auxiliary else out.stack).float().cpu())
        return out

    def result(self) -> WeightStatistics:
        if not self.stacks:
            raise ValueError("there is nothing to learn from: no image was given")
        stack, notes = torch.cat(self.stacks), []
        cosines = [mean.values()[0] for mean in self.cosines]
        if self.tokens is not None:
            first, second = self.tokens.float()
            cosines = [float(F.cosine_similarity(first, second, dim=0)), *cosines]
        if self.model.policy is not None:
            notes.append("ratios of branches are left out: an adaptive model's tokens differ from block to block")
        elif not self.ratios.blocks:
            notes.append("gains and ratios of branches are left out: its blocks are no residual branches known here")
        return WeightStatistics(
            scales=layer_scales(self.model),
            ratios=self.ratios.result(),
            cosines=tuple(cosines),
            sparsity=mixing_sparsity(self.model),
            rows=tuple(mixing_rows(self.model)),
            spectra={name: mean.values() for name, mean in self.spectra.items() if mean.count},
            agreement=agreement(stack) if stack.shape[1] > 1 and stack.shape[2] > 1 else None,
            notes=tuple(notes),
        )


def branch_parts(model: Classifier) -> list[dict[str, list[tuple[nn.Module, nn.Module]]]]:
    """For every block and branch the norms before and the gains behind it, one pair per parallel branch.

    Nothing where blocks are not of this kind.
    """
    trunk: Any = model.trunk
    owner = getattr(trunk, "backbone", trunk)
    blocks = owner.blocks if hasattr(owner, "blocks") and getattr(trunk, "plain", True) else ()
    by_block = []
    for block in blocks:
        parts: dict[str, list[tuple[nn.Module, nn.Module]]] = {}
        for name, (norm, gain) in BRANCH_PARTS.items():
            parallel = getattr(block, PARALLEL.get(name, ""), ())
            if parallel and all(hasattr(b, "norm") and hasattr(b, "ls") for b in parallel):
                parts[name] = [(b.norm, b.ls) for b in parallel]
            elif getattr(block, norm, None) is not None and getattr(block, gain, None) is not None:
                parts[name] = [(getattr(block, norm), getattr(block, gain))]
        by_block.append(parts)
    return by_block if all(by_block) else []


def _by_depth(values: Callable[[str, int], float | None], depth: int) -> Depths:
    """Values of every branch by depth; branches without any are left out."""
    table = {name: [values(name, i) for i in range(depth)] for name in BRANCH_PARTS}
    return {name: row for name, row in table.items() if any(value is not None for value in row)}


def layer_scales(model: Classifier) -> Depths:
    """Mean magnitude of the gains of each branch (LayerScale, gates), by depth; empty where no branch has a gain."""
    blocks = branch_parts(model)

    def magnitude(name: str, depth: int) -> float | None:
        gains = [getattr(g, "gamma", getattr(g, "gain", None)) for _, g in blocks[depth].get(name, ())]
        known = [gain.detach().flatten() for gain in gains if isinstance(gain, Tensor)]
        return float(torch.cat(known).double().abs().mean()) if known else None

    return _by_depth(magnitude, len(blocks))


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

        def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if not stream:
                stream.append(args[0])

        def behind(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            added.append(out)
            if len(added) == len(pairs):
                ratio = _norm(torch.stack(added).sum(0)) / _norm(stream[0])
                self.means.setdefault((name, depth), RunningMean()).add(ratio)
                stream.clear()
                added.clear()

        hooks: list[Any] = [norm.register_forward_pre_hook(before) for norm, _ in pairs]
        return hooks + [gain.register_forward_hook(behind) for _, gain in pairs]

    def result(self) -> Depths:
        means = {key: mean.values()[0] for key, mean in self.means.items()}
        return _by_depth(lambda name, depth: means.get((name, depth)), len(self.blocks))


def _norm(values: Tensor) -> Tensor:
    """Of [batch, ...], one per image; float32, or more where the stream has more."""
    return values.to(torch.promote_types(values.dtype, torch.float32)).flatten(1).norm(dim=1)


def sparsity(weight: Tensor) -> float:
    """Share of entries below 5 % of the largest magnitude."""
    magnitudes = weight.detach().abs()
    return float((magnitudes < NEAR_ZERO * magnitudes.max()).double().mean())


class PatchMixing(NamedTuple):
    """The matrices of a block of ResMLP: A mixes patches, B and C are the two layers of its MLP."""

    a: Tensor  # [patches, patches], row before column
    grid: tuple[int, int]
    mlp: Any  # with fc1 and fc2; none where the block has no MLP


def mixing_blocks(model: Classifier) -> list[PatchMixing]:
    """Blocks that mix patches by one learned matrix, ours and timm's ResMLP; none where the model has no such."""
    if isinstance(model.trunk, Trunk):
        ours: list[Any] = [b for b in model.trunk.blocks if isinstance(getattr(b, "attn", None), LinearPatchesMixer)]
        return [PatchMixing(b.attn.tokens.weight, b.attn.grid, b.mlp) for b in ours]
    backbone: Any = getattr(model.trunk, "backbone", None)
    theirs = [b for b in getattr(backbone, "blocks", ()) if isinstance(getattr(b, "linear_tokens", None), nn.Linear)]
    return [PatchMixing(b.linear_tokens.weight, tuple(backbone.stem.grid_size), b.mlp_channels) for b in theirs]


def mixing_sparsity(model: Classifier) -> dict[str, list[float]]:
    """By depth: of A, B and C."""
    blocks = mixing_blocks(model)
    matrices = {"A": [block.a for block in blocks]} if blocks else {}
    if blocks and all(block.mlp is not None for block in blocks):
        matrices |= {"B": [block.mlp.fc1.weight for block in blocks], "C": [block.mlp.fc2.weight for block in blocks]}
    return {name: [sparsity(weight) for weight in weights] for name, weights in matrices.items()}


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


def signed_colours(values: NDArray[np.floating], most: float) -> Pixels:
    """[rows, columns] as colours [rows, columns, 3]: blue below zero, white at it, red above, full at `most`."""
    level = 0.5 + 0.5 * np.clip(values / most, -1, 1) if most > 0 else np.full(values.shape, 0.5)
    return np.rint(colours(level, "RdBu_r")).astype(np.uint8)


def mosaic(rows: Tensor) -> Pixels:
    """Rows of a matrix over patches [down, across, rows, columns] as tiles at the positions of their patches.

    Each tile has its own scale, or the largest entries of a layer would hide all others.
    """
    down, across, height, width = rows.shape
    picture = np.full((down * (height + 1) - 1, across * (width + 1) - 1, 3), 170, dtype=np.uint8)
    for y, x in np.ndindex(down, across):
        tile = rows[y, x].numpy()
        top, left = y * (height + 1), x * (width + 1)
        picture[top : top + height, left : left + width] = signed_colours(tile, float(np.abs(tile).max()))
    return picture


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
    pool: CovariancePooling | CrossCovariancePooling, patches: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The matrices of a second-order pooling before and after their normalisation, [batch, heads, rows, columns]."""
    if isinstance(pool, CrossCovariancePooling):
        before = pool.matrices(patches, mask)
        return before, cast("Tensor", pool.norm(before)).reshape_as(before)
    x = pool.project(patches).mT
    before = cross_covariance(x, x, mask, pool.center)
    return before[:, None], matrix_sqrt_newton_schulz(before, pool.steps)[:, None]


def relative_spectrum(matrices: Tensor) -> Tensor:
    """Singular values [..., rank] of [..., rows, columns] over the largest, float64; zeros for a zero matrix."""
    values = torch.linalg.svdvals(matrices.double())
    largest = values[..., :1]
    return torch.where(largest > 0, values / largest.clamp_min(torch.finfo(values.dtype).tiny), 0.0)
