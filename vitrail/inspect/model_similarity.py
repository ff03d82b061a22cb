"""Section on the similarity of two models' internals: linear CKA of features (Kornblith et al. 2019, arXiv 1905.00414),
divergence of attention maps and the cost of attention transfer (Li et al. 2024, arXiv 2411.09702).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from vitrail.inspect.section import Chart, ImageBatch, Inspection, PagePart, Section, chart_cards
from vitrail.measure.attention_maps import CapturedBatch, LayerMaps, map_layers
from vitrail.measure.clustering import best_matching
from vitrail.measure.evaluator import ResultTable
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.trunks.vit import Trunk
from vitrail.quantities import number
from vitrail.report.charts import curves_chart, matrix_chart

Matching = Literal["direct", "bipartite", "minimum", "averaged"]
MATCHINGS: tuple[Matching, ...] = ("direct", "bipartite", "minimum", "averaged")
MOST_PAIRS = 2**30  # numbers of all pairs of heads that are compared: minutes beyond


class SimilaritySection(Section):
    """The first two models compared layer by layer."""

    names: ClassVar = {"likeness": "how alike two models are inside"}

    def __init__(self, inspection: Inspection) -> None:
        super().__init__(inspection)
        models = [s.model for s in inspection.subjects[:2]]
        self.pair = ModelDivergence(*models) if inspection.several else None

    def add(self, batch: ImageBatch) -> None:
        if self.pair is not None:
            self.pair.add(*batch.captured[:2])

    def finish(self) -> None:
        if self.pair is None:
            return
        inspection, notes = self.inspection, []
        first, other = inspection.subjects[:2]
        if first.attention.features and other.attention.features:
            inspection.cka = cka_table(first.attention.features, other.attention.features)
        else:
            notes.append("CKA is left out: one of the two shows no inner layers")
        if self.pair.reason:
            notes.append(f"divergence of maps is left out: {self.pair.reason}")
        else:
            inspection.divergence, inspection.divergence_images = self.pair.values(), self.pair.images
            inspection.divergence_layers = tuple(self.pair.layers)
        account = transfer_account(first.model, other.model)
        if isinstance(account, str):
            notes.append(account)
        else:
            inspection.transfer = account
        if len(inspection.subjects) > 2:
            notes.append(f"{first.name} and {other.name} are compared with each other, the others only shown")
        inspection.notes += tuple(notes)

    def parts(self) -> Iterator[PagePart]:
        inspection, charts = self.inspection, []
        if inspection.cka is None and not inspection.divergence:
            return
        first, other = inspection.subjects[:2]
        images = first.attention.images
        if inspection.cka is not None:
            width = max((f.shape[1] for s in (first, other) for f in s.attention.features), default=0)
            few = f", fewer than the {width} channels, which makes all values too high" if images <= width else ""
            hint = "1: the same up to rotation and scale. Of the mean over patches after each block; "
            hint += f"{images} images{few}."
            svg = matrix_chart(inspection.cka.numpy(), first.name, other.name, title="Linear CKA of layers")
            charts.append(Chart("Linear CKA of features", svg, hint, file="cka"))
        lines = {}
        for name, values in inspection.divergence.items():
            layers = zip(inspection.divergence_layers, values, strict=True)
            if known := {float(i): v for i, v in layers if v is not None}:
                lines[name] = [known]
        if lines:
            hint = (
                "0: the same maps; at most 0.69. Heads matched one by one in their order (direct), at best one to one "
            )
            hint += "(bipartite), each with its nearest (minimum), or averaged first. "
            hint += f"{inspection.divergence_images} images. Different maps may still compute the same."
            svg = curves_chart(lines, title="Divergence of attention maps", x_label="layer")
            charts.append(Chart("Jensen-Shannon divergence of attention maps, nats", svg, hint, file="divergence"))
        lead = f"{first.name} and {other.name}, layer by layer."
        yield PagePart("likeness", "Similarity of the two models", lead, chart_cards(charts), "pair")

    def verdict(self) -> Iterator[str]:
        known = [v for v in self.inspection.cka_diagonal if v is not None]
        if known:
            yield f"Features of equal layers have a CKA of {min(known):.2f} to {max(known):.2f}."

    def tables(self) -> Iterator[ResultTable | str]:
        inspection = self.inspection
        if inspection.divergence:
            columns = zip(*inspection.divergence.values(), strict=True)
            rows = [
                (f"{layer}", *(number(value) for value in values))
                for layer, values in zip(inspection.divergence_layers, columns, strict=True)
            ]
            title = f"divergence of attention maps in nats, {inspection.divergence_images} images"
            yield ResultTable(title, ("layer", *inspection.divergence), rows)


def cka_table(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Linear CKA of every layer of one model with every layer of the other, [layers, other layers], float64.

    Features [images, width] per layer, of the same images: |Ycᵀ Xc|² / (|Xcᵀ Xc| |Ycᵀ Yc|) with centred columns, in
    [0, 1]; orthogonal maps and scales do not change it; NaN where features are constant. By products of images rather
    than of channels: two deep models would otherwise need a matrix of channels for each of hundreds of pairs.
    """

    def kernels(features: Sequence[Tensor]) -> Tensor:
        centred = [layer.double() - layer.double().mean(0) for layer in features]
        products = [layer @ layer.mT for layer in centred]
        return torch.stack([(kernel / kernel.norm()).flatten() for kernel in products])

    return kernels(first) @ kernels(second).mT


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Divergence in nats of distributions [..., keys] each, in [0, ln 2]: the entropy of the mean less the mean one."""
    p, q = p.double(), q.double()
    mean = torch.special.entr((p + q) / 2) - (torch.special.entr(p) + torch.special.entr(q)) / 2
    return mean.sum(-1).clamp_min(0)


def head_divergences(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence of every head of one layer with every head of the other, [heads, other heads].

    Maps [images, heads, queries, keys]; mean over images and queries, one pair of heads at a time.
    """
    pairs = [[jensen_shannon(a, b).mean() for b in second.unbind(1)] for a in first.unbind(1)]
    return torch.stack([torch.stack(row) for row in pairs])


def _matched(table: Tensor, matching: Matching) -> float | None:
    """Mean of [heads, other heads] over pairs of heads; none where heads cannot be matched so."""
    if matching == "minimum":
        return float(table.amin(1).mean())
    if table.shape[0] != table.shape[1]:
        return None
    columns = range(len(table)) if matching == "direct" else best_matching(-table.numpy())
    return float(torch.stack([table[i, int(j)] for i, j in enumerate(columns)]).mean())


class Divergence:
    """Jensen-Shannon divergence of two models' maps in one layer under every matching of heads, over batches.

    `direct`: head i with head i; `bipartite`: one to one, the least in total; `minimum`: every head of the first with
    its nearest of the second; `averaged`: of the mean over heads. A mean over the rows that both models have. Models
    that compute the same function may be far apart (average pooling by one head or by several, say).
    """

    def __init__(self) -> None:
        self.rows = 0
        self.heads: Tensor | None = None  # sums of [heads, other heads]
        self.averaged = 0.0

    def add(self, first: LayerMaps, second: LayerMaps) -> None:
        """Maps of the same images on the same grid; prefix tokens that one has more are not compared."""
        prefix = min(first.prefix, second.prefix)
        one, rows = _common(first, prefix)
        other, other_rows = _common(second, prefix)
        common = rows & other_rows
        count = int(common.sum())
        if not count:
            return
        # Chosen rows as if of one image: [1, heads, rows, keys]
        one, other = (maps.permute(0, 2, 1, 3)[common].transpose(0, 1)[None] for maps in (one, other))
        if one.device.type == "mps":  # which has no float64
            one, other = one.cpu(), other.cpu()
        table = head_divergences(one, other).cpu() * count
        self.heads = table if self.heads is None else self.heads + table
        self.averaged += float(jensen_shannon(one.double().mean(1), other.double().mean(1)).sum())
        self.rows += count

    def values(self) -> dict[Matching, float | None]:
        """Nats, by matching; none where heads cannot be matched so."""
        if self.heads is None:
            return dict.fromkeys(MATCHINGS)
        table = self.heads / self.rows
        return {name: _matched(table, name) for name in MATCHINGS} | {"averaged": self.averaged / self.rows}


def _common(maps: LayerMaps, prefix: int) -> tuple[Tensor, Tensor]:
    """Weights and rows with so many prefix tokens; where some are left out, rows are scaled to sum 1 again."""
    if maps.prefix == prefix:
        return maps.weights, maps.rows
    keep = [i for i in range(maps.rows.shape[1]) if not prefix <= i < maps.prefix]
    weights = maps.weights[:, :, keep][..., keep]
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-30), maps.rows[:, keep]


class ModelDivergence:
    """`Divergence` of all layers that both models have, on as many images as take a bearable time."""

    def __init__(self, first: Classifier, second: Classifier) -> None:
        self.layers = {i: Divergence() for i in map_layers(first) if i in map_layers(second)}
        self.images = self.most = 0
        self.reason = "" if self.layers else "the two have no layers with attention maps in common"
        if not self.layers:
            return
        ours, theirs = cast("Trunk", first.trunk), cast("Trunk", second.trunk)
        grids = [t.patch_embed.grid(m.preprocess.size, m.preprocess.size) for t, m in ((ours, first), (theirs, second))]
        if grids[0] != grids[1]:
            sizes = " and ".join(f"{rows}x{columns}" for rows, columns in grids)
            self.reason = f"maps over {sizes} patches cannot be compared"
            return
        tokens = grids[0][0] * grids[0][1]
        self.most = max(4, MOST_PAIRS // (len(self.layers) * ours.config.heads * theirs.config.heads * tokens**2))

    def add(self, first: CapturedBatch, second: CapturedBatch) -> None:
        """One batch, or none of it where enough images were compared."""
        if self.images < self.most:
            for i, divergence in self.layers.items():
                divergence.add(first.maps(i), second.maps(i))
            self.images += first.count

    def values(self) -> dict[str, list[float | None]]:
        """By matching, one value per layer."""
        layers = [divergence.values() for divergence in self.layers.values()]
        return {name: [layer[name] for layer in layers] for name in MATCHINGS}


def transfer_account(teacher: Classifier, student: Classifier) -> dict[str, Any] | str:
    """Size and cost of attention transfer from one model to the other (Li et al. 2024, arXiv 2411.09702).

    Values per image of all maps, and of all q and k from which maps can be computed; multiply-accumulates of inference
    with attention copy (both models) and with attention distillation (the student alone). A message if they do not fit.
    """
    facts, misfit = [], "attention transfer does not fit:"
    for model in (teacher, student):
        trunk = model.trunk
        if not isinstance(trunk, Trunk) or not map_layers(model):
            return f"{misfit} one of the two has no attention maps"
        if model.policy is not None:
            return f"{misfit} an adaptive model's maps differ in size from image to image"
        rows, columns = trunk.patch_embed.grid(model.preprocess.size, model.preprocess.size)
        sizes = {"layers": len(trunk.blocks), "heads": trunk.config.heads, "tokens": trunk.prefix + rows * columns}
        facts.append((trunk.config.mixer.kind, sizes))
    (mixer, sizes), (other_mixer, other_sizes) = facts
    if (mixer, other_mixer) != ("softmax", "softmax"):
        return f"{misfit} it needs softmax attention, the mixers are {mixer} and {other_mixer}"
    for name, size in sizes.items():
        if size != other_sizes[name]:
            return f"{misfit} {size} and {other_sizes[name]} {name}"
    layers, heads, tokens = sizes.values()
    costs = [cost(model).macs for model in (teacher, student)]
    return {
        "maps": layers * heads * tokens**2,
        "queries_and_keys": 2 * layers * tokens * cast("Trunk", teacher.trunk).width,
        "macs_copy": sum(costs),
        "macs_distilled": costs[1],
    }
