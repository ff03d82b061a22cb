"""Attention maps and kept tokens of a model, collected over batches of images; entropy and distance of the maps.

Maps are [batch, heads, tokens, tokens], queries before keys, on the tokens that the image began with: prefix tokens
first, then patches in raster order. No map outlives its batch; means over images are kept in float64.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from vitrail.measure.evaluator import evaluation_mode
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.parts.tokens import Tokens, Trace
from vitrail.model.trunks.vit import Trunk
from vitrail.quantities import percent

if TYPE_CHECKING:
    from vitrail.model.mixers.linear_attention import SimaMixer

MOST_NUMBERS = 2**26  # of the maps of one batch, all layers together: 256 MiB
PARTS = ("maps", "features", "saliency")  # kept tokens and probabilities are always collected
STATISTICS = ("entropy", "entropy_share", "class_entropy", "class_entropy_share", "distance")


@dataclass(frozen=True)
class LayerMaps:
    """Attention of one layer; tokens that are gone have rows and columns of zeros."""

    weights: Tensor  # [batch, heads, tokens, tokens]; rows of `rows` sum to 1
    rows: Tensor  # [batch, tokens], true where a token is a query
    keys: Tensor  # [batch, tokens], true where a token is a key
    prefix: int
    grid: tuple[int, int]


def shares(maps: Tensor) -> Tensor:
    """Magnitudes over their row sum: a softmax map as it is; a signed one (SimA, talking heads) as a distribution."""
    wide = maps.to(torch.promote_types(maps.dtype, torch.float32)).abs()
    return wide / wide.sum(-1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)


def entropies(weights: Tensor) -> Tensor:
    """Entropy in nats of distributions [..., keys]."""
    return torch.special.entr(weights).sum(-1)


def patch_distances(grid: tuple[int, int]) -> Tensor:
    """Euclidean distance of every pair of patches, [patches, patches], in patches, float64."""
    rows, columns = (torch.arange(n, dtype=torch.float64) for n in grid)
    positions = torch.cartesian_prod(rows, columns).reshape(-1, 2)
    return (positions[:, None] - positions[None]).square().sum(-1).sqrt()


def row_distances(maps: LayerMaps) -> tuple[Tensor, Tensor]:
    """Mean attention distance of each patch, [batch, heads, patches], and which patches attend to patches at all.

    Prefix tokens have no position: their rows and columns are left out and the rest of a row is scaled to sum 1.
    """
    patches = maps.weights[:, :, maps.prefix :, maps.prefix :]
    total = patches.sum(-1)
    distance = (patches * patch_distances(maps.grid).to(patches)).sum(-1)
    attends = (total > 0) & maps.rows[:, None, maps.prefix :]
    return torch.where(attends, distance / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0), attends


def class_rows(maps: LayerMaps) -> Tensor:
    """Attention of the class token, [batch, heads, tokens]; without one, the mean over all rows there are."""
    if maps.prefix:
        return maps.weights[:, :, 0]
    return maps.weights.sum(2) / maps.rows.sum(1).clamp_min(1)[:, None, None]


class RunningMean:
    """Mean over images of values [batch, heads] or [batch]."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, values: Tensor, valid: Tensor | None = None) -> None:
        """`valid` [batch] is false for images that have no value (none: all have one)."""
        known = values.detach().cpu().double()
        known = known if valid is None else known[valid.cpu()]
        self.total = known.sum(0) + (0.0 if self.total is None else self.total)
        self.count += len(known)

    def values(self) -> tuple[float, ...]:
        """One per head; NaN where no image counted."""
        assert self.total is not None
        return tuple((self.total / self.count if self.count else self.total * math.nan).flatten().tolist())


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer: means over images, one per head."""

    layer: int
    entropy: tuple[float, ...]  # nats, mean over all rows
    entropy_share: tuple[float, ...]  # of the logarithm of the number of visible tokens
    class_entropy: tuple[float, ...]  # of the class token's row, or of the mean row
    class_entropy_share: tuple[float, ...]
    distance: tuple[float, ...]  # patches
    row: str  # "class" or "mean": whose row `class_entropy` is of

    def to_json(self, pitch: float) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in STATISTICS}
        values["distance_pixels"] = [d * pitch for d in self.distance]
        by_head = {name: [v if math.isfinite(v) else None for v in heads] for name, heads in values.items()}
        known = {name: [v for v in heads if v is not None] for name, heads in by_head.items()}
        means = {name: sum(heads) / len(heads) if heads else None for name, heads in known.items()}
        return {"layer": self.layer, **means, "row": self.row, "heads": by_head}


class LayerCollector:
    """Entropy and distance of one layer over any number of batches."""

    def __init__(self, layer: int) -> None:
        self.layer, self.row = layer, "class"
        self.means = {name: RunningMean() for name in STATISTICS}

    def add(self, maps: LayerMaps) -> None:
        self.row = "class" if maps.prefix else "mean"
        queries, keys = maps.rows.sum(1), maps.keys.sum(1)
        rows = entropies(maps.weights)
        greatest = keys.cpu().clamp_min(2).double().log().to(rows)[:, None]  # one token alone has no entropy share
        entropy = torch.where(maps.rows[:, None], rows, 0.0).sum(2) / queries.clamp_min(1)[:, None]
        class_entropy = rows[:, :, 0] if maps.prefix else entropies(class_rows(maps))
        present = maps.rows[:, 0] if maps.prefix else queries > 0
        distance, attends = row_distances(maps)
        self.means["entropy"].add(entropy, queries > 0)
        self.means["entropy_share"].add(entropy / greatest, (queries > 0) & (keys > 1))
        self.means["class_entropy"].add(class_entropy, present)
        self.means["class_entropy_share"].add(class_entropy / greatest, present & (keys > 1))
        self.means["distance"].add(distance.sum(2) / attends.sum(2).clamp_min(1), attends.any(2).all(1))

    def result(self) -> LayerStatistics:
        return LayerStatistics(layer=self.layer, row=self.row, **{n: mean.values() for n, mean in self.means.items()})


def spread_out(sampled: Tensor, query_patches: Tensor, key_patches: Tensor, prefix: int) -> Tensor:
    """A map of sampled tokens [batch, heads, queries, keys] on all of them, [batch, heads, tokens, tokens].

    The masks [batch, patches] say which patches the queries and keys are: in raster order, the first of the columns of
    each image; what follows is padding, and lands on patches that were dropped.
    """
    batch, heads, queries, keys = sampled.shape
    tokens = prefix + key_patches.shape[1]

    def positions(mask: Tensor, count: int) -> Tensor:
        first = torch.arange(prefix, device=mask.device).expand(batch, -1)
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True) + prefix
        return torch.cat([first, order], 1)[:, :count]

    columns = positions(key_patches, keys)[:, None, None].expand(-1, heads, queries, -1)
    wide = sampled.new_zeros(batch, heads, queries, tokens).scatter(3, columns, sampled)
    rows = positions(query_patches, queries)[:, None, :, None].expand(-1, heads, -1, tokens)
    return sampled.new_zeros(batch, heads, tokens, tokens).scatter(2, rows, wide)


class CapturedBatch:
    """One forward pass with the intermediates that were asked for."""

    def __init__(self, model: Classifier, images: Tensor, parts: Collection[str] = PARTS) -> None:
        self.model, self.trunk = model, cast("Trunk", model.trunk)
        known = getattr(model.trunk, "intermediates", ())
        self.sima = sima_layer(model) if "saliency" in parts else None
        features = [name for name in known if name.startswith("tokens.")] if "features" in parts else []
        self.depth = len(features)
        want = {f"attention.{i}" for i in map_layers(model) if "maps" in parts} | set(features)
        want |= {name for name in known if name.startswith("kept.")}
        if self.sima is not None:
            want |= {f"{name}.{self.sima}" for name in ("q", "k", "tokens")}
            if policy_kind(model.policy) == "avit":  # its map says which tokens are left
                want.add(f"attention.{self.sima}")
        # An adaptive batch that is captured in every block is padded, never packed, whatever its policy's form.
        with evaluation_mode(model), torch.inference_mode():
            out = model.outputs(images, want=want)
            self.probabilities = model.probabilities(model.fused(out.stack).float()).cpu()
            head = out.maps if "maps" in parts else None
        self.captured, self.trace, self.grid = out.captured, out.trace, out.tokens.grid
        self.device, self.count = images.device, len(images)
        self.patches = self.grid[0] * self.grid[1]
        self.head = head if head is not None and head.shape[-1] == self.patches else None

    def kept(self, i: int) -> Tensor:
        """Which patches are left after block i (AdaViT: which it worked on), [batch, patches], bool."""
        if i < 0 or f"kept.{i}" not in self.captured:
            return torch.ones(self.count, self.patches, dtype=torch.bool, device=self.device)
        return self.captured[f"kept.{i}"] > 0

    def prefix(self, i: int) -> int:
        """Prefix tokens in block i."""
        late = self.trunk.config.class_token_at if isinstance(self.trunk, Trunk) else 0
        return self.trunk.prefix if i >= late else 0

    def maps(self, i: int) -> LayerMaps:
        """Attention of layer i on the original tokens."""
        weights, prefix, policy = self.captured[f"attention.{i}"], self.prefix(i), self.model.policy
        first = torch.ones(self.count, prefix, dtype=torch.bool, device=weights.device)
        queries = keys = self.kept(-1)
        if policy_kind(policy) == "ats":
            queries, keys = self.kept(i), self.kept(i - 1)
            weights = spread_out(weights, queries, keys, prefix)
        elif policy_kind(policy) in ("tome", "evit"):  # EViT's token of all others lands on a patch that is gone
            queries = keys = self.kept(i - 1)
            weights = spread_out(weights, queries, keys, prefix)
        elif policy_kind(policy) == "avit":
            queries = keys = self.kept(i - 1)
            # `kept` is of patches only; class tokens halt, too, and are the rest of those that entered.
            assert self.trace is not None
            first = first & (self.trace.blocks[i].entering - keys.sum(1) >= prefix)[:, None].to(first.device)
        elif policy_kind(policy) == "adavit":
            queries = keys = self.kept(i)
        rows, columns = (torch.cat([first, patches], 1) for patches in (queries, keys))
        weights = shares(weights).masked_fill(~(rows[:, None, :, None] & columns[:, None, None]), 0.0)
        return LayerMaps(weights, rows, columns, prefix, self.grid)

    def signed(self, i: int) -> bool:
        """Whether layer i has negative weights, so that its magnitudes are shown."""
        return bool((self.captured[f"attention.{i}"] < 0).any())

    def features(self) -> list[Tensor]:
        """Mean over the patches that each block worked on, [batch, width] per block."""
        means = []
        for i in range(self.depth):
            patches = self.captured[f"tokens.{i}"][:, self.prefix(i) :].float()
            real = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
            if policy_kind(self.model.policy) == "ats":  # those that are left come first
                real = torch.arange(patches.shape[1], device=real.device) < self.kept(i).sum(1, keepdim=True)
            elif policy_kind(self.model.policy) == "avit":
                real = self.kept(i - 1)
            total = torch.where(real[..., None], patches, 0.0).sum(1)
            means.append((total / real.sum(1, keepdim=True).clamp_min(1)).cpu())
        return means

    def saliency(self) -> tuple[Tensor, Tensor] | None:
        """Norms of q̂ and k̂ over all channels, [batch, patches] each, in the last SimA layer (arXiv 2206.08898)."""
        if self.sima is None:
            return None
        mixer, prefix = cast("SimaMixer", _mixers(self.trunk)[self.sima]), self.prefix(self.sima)
        mask = self.maps(self.sima).keys if policy_kind(self.model.policy) == "avit" else None
        layout = Tokens(self.captured[f"tokens.{self.sima}"], prefix, self.grid, mask)
        hats = [mixer.hat(self.captured[f"{name}.{self.sima}"], layout) for name in "qk"]
        q, k = (hat.float().square().sum((1, 3)).sqrt()[:, prefix:].cpu() for hat in hats)
        return q, k


@dataclass(frozen=True)
class AttentionMaps:
    """Attention, kept tokens and compute of one model."""

    images: int
    grid: tuple[int, int]
    pitch: float  # pixels from one patch to the next
    layers: tuple[LayerStatistics, ...]
    class_maps: Tensor  # [pictures, layers, heads, patches], of the first images
    head_maps: Tensor | None  # [pictures, patches], mean over the maps of the classifier's head
    saliency: tuple[Tensor, Tensor] | None  # of q̂ and k̂, [pictures, patches]
    policy: str  # its kind; empty where every image gets the whole model
    stages: tuple[int, ...]  # blocks at which the policy decides
    kept: Tensor | None  # [pictures, blocks, patches], bool
    counts: Tensor | None  # [images, blocks], patches left after (AdaViT: inside) each block
    entering: tuple[float, ...]  # tokens, mean over images, into each block; empty without a policy
    leaving: tuple[float, ...]
    macs: float | None  # per image, mean
    macs_whole: float | None  # of an image that is given everything
    features: tuple[Tensor, ...]  # [images, width] per block
    classes: tuple[str, ...]
    probabilities: Tensor  # [pictures, classes]
    notes: tuple[str, ...]

    def prediction(self, image: int) -> str:
        """Likeliest class of one of the first images and its probability."""
        share, best = (float(v) for v in self.probabilities[image].max(0))
        return f"{self.classes[int(best)]} {percent(share, 0) if share >= 0.005 else '< 1 %'}"

    def to_json(self) -> dict[str, Any]:
        layers = [layer.to_json(self.pitch) for layer in self.layers]
        values = {"images": self.images, "grid": list(self.grid), "layers": layers, "macs": self.macs}
        if self.entering:
            values |= {"tokens": list(self.entering), "leaving": list(self.leaving), "macs_whole": self.macs_whole}
        return values | {"notes": list(self.notes)}


class AttentionCollector:
    """Collects `AttentionMaps` of a model over batches; the first `pictures` images keep their maps."""

    def __init__(self, model: Classifier, pictures: int = 8, parts: Collection[str] = PARTS) -> None:
        self.model, self.pictures, self.parts = model, pictures, tuple(parts)
        self.layers = {i: LayerCollector(i) for i in (map_layers(model) if "maps" in parts else ())}
        self.signed: set[int] = set()
        self.images, self.grid, self.size = 0, (0, 0), 0
        self.shown: dict[str, list[Tensor]] = {}
        self.features: list[list[Tensor]] = []
        self.counts: list[Tensor] = []
        self.traces: list[Trace] = []
        self.macs: list[Tensor] = []
        self._fixed_macs: int | None = None
        self._uncounted = ""

    def add(self, images: Tensor) -> CapturedBatch:
        """Images as the model takes them, [batch, 3, height, width]; returns the forward pass."""
        batch = CapturedBatch(self.model, images, self.parts)
        self.grid, self.size = batch.grid, images.shape[-1]
        for i, collector in self.layers.items():
            maps = batch.maps(i)
            collector.add(maps)
            if batch.signed(i):
                self.signed.add(i)
            if self.images < self.pictures:
                self._show(f"class.{i}", class_rows(maps)[..., maps.prefix :])
        self._show("probabilities", batch.probabilities)
        if batch.head is not None:
            self._show("head", batch.head.float().mean(1))
        for name, values in zip("qk", batch.saliency() or (), strict=False):
            self._show(f"saliency.{name}", values)
        self.features.append(batch.features())
        if self.model.policy is not None:
            kept = torch.stack([batch.kept(i) for i in range(len(batch.trunk.blocks))], 1).cpu()
            self._show("kept", kept)
            self.counts.append(kept.sum(2))
            self._count_macs(cast("Trace", batch.trace))
        self.images += len(images)
        return batch

    def _show(self, name: str, values: Tensor) -> None:
        self.shown.setdefault(name, []).append(values[: max(0, self.pictures - self.images)].cpu())

    def _count_macs(self, trace: Trace) -> None:
        self.traces.append(trace)
        try:
            from vitrail.model.adaptive.budget import fixed_macs, trace_macs

            if self._fixed_macs is None:
                self._fixed_macs = fixed_macs(self.model, self.size)
            self.macs.append(trace_macs(self.model, trace, image_size=self.size, fixed=self._fixed_macs))
        except ValueError as error:  # A-ViT with talking heads or SimA
            self._uncounted = str(error)

    def result(self) -> AttentionMaps:
        if not self.images:
            raise ValueError("there are no attention maps to collect: no image was given")
        shown = {name: torch.cat(values) for name, values in self.shown.items()}
        maps = [shown[f"class.{i}"] for i in self.layers]
        policy = self.model.policy
        macs, macs_whole = None, None
        if policy is None:
            macs = float(cost(self.model, self.size).macs)
        elif self.macs:
            from vitrail.measure.compute import worst_case

            macs, macs_whole = float(torch.cat(self.macs).mean()), worst_case(self.model, self.size)
        return AttentionMaps(
            images=self.images,
            grid=self.grid,
            pitch=self.size / max(1, self.grid[0]),
            layers=tuple(collector.result() for collector in self.layers.values()),
            class_maps=torch.stack(maps, 1) if maps else torch.zeros(0),
            head_maps=shown.get("head"),
            saliency=(shown["saliency.q"], shown["saliency.k"]) if "saliency.q" in shown else None,
            policy="" if policy is None else str(getattr(policy.config, "kind", "")),
            stages=stages(self.model),
            kept=shown.get("kept"),
            counts=torch.cat(self.counts) if self.counts else None,
            entering=self._mean_tokens("entering"),
            leaving=self._mean_tokens("leaving"),
            macs=macs,
            macs_whole=macs_whole,
            features=tuple(torch.cat(each) for each in zip(*self.features, strict=True)),
            classes=self.model.classes,
            probabilities=shown["probabilities"],
            notes=tuple(self._notes()),
        )

    def _mean_tokens(self, name: str) -> tuple[float, ...]:
        """Tokens that enter or leave each block, mean over images."""
        blocks = zip(*(trace.blocks for trace in self.traces), strict=True)
        return tuple(float(torch.cat([getattr(use, name).cpu().double() for use in uses]).mean()) for uses in blocks)

    def _notes(self) -> Iterator[str]:
        without = layers_without_maps(self.model) if "maps" in self.parts else ""
        if without:
            yield without
        if self.signed:
            layers = ", ".join(map(str, sorted(self.signed)))
            yield f"weights of layers {layers} may be negative: entropy, distance and pictures are of their magnitudes"
        if any(collector.row == "mean" for collector in self.layers.values()):
            reason = "no class token" if not cast("Trunk", self.model.trunk).prefix else "its class token comes later"
            yield f"{reason}: the mean row, what patches attend to on average, takes its place"
        if self.layers and isinstance(self.model.trunk, Trunk) and self.model.trunk.config.parallel > 1:
            yield "maps are those of the first of the parallel branches"
        if self._uncounted:
            yield f"multiply-accumulates are left out: {self._uncounted}"


def map_layers(model: Classifier) -> list[int]:
    """Layers that have attention maps over tokens."""
    known: Sequence[str] = getattr(model.trunk, "intermediates", ())
    return [int(name.removeprefix("attention.")) for name in known if name.startswith("attention.")]


def layers_without_maps(model: Classifier) -> str:
    """Why a model has no attention maps; empty where it has."""
    if map_layers(model):
        return ""
    if not isinstance(model.trunk, Trunk):
        kind = model.spec.get("trunk", {}).get("kind", type(model.trunk).__name__)
        if kind == "timm":
            return (
                f"timm:{model.spec['trunk'].get('name', '')} shows no attention maps and no tokens of inner layers: of "
                "timm's models plain ViTs are read block by block, and those that the zoo has by its own names"
            )
        return f"the trunk ({kind}) gives no attention maps and no tokens of inner layers"
    if model.trunk.prompts is not None:
        return "with prompts, maps have tokens that are not patches, and are not shown"
    return f"the mixer {model.trunk.config.mixer.kind} has no attention maps over patches"


def policy_kind(policy: Any) -> str:
    """ats, avit, adavit, tome or evit; empty where there is no policy."""
    return "" if policy is None else str(policy.config.kind)


def sima_layer(model: Classifier) -> int | None:
    """The last layer with SimA that shows its q and k; none where there is no such."""
    if not isinstance(model.trunk, Trunk) or model.trunk.prompts is not None or model.trunk.config.mixer.kind != "sima":
        return None
    from vitrail.model.mixers.linear_attention import SimaMixer

    layers = [i for i, mixer in enumerate(_mixers(model.trunk)) if isinstance(mixer, SimaMixer)]
    return layers[-1] if layers else None


def stages(model: Classifier) -> tuple[int, ...]:
    """Blocks at which an adaptive policy decides; none where there is no policy."""
    at: Collection[int] | None = getattr(model.policy, "at", None)
    if at is not None:
        return tuple(sorted(at))
    return () if model.policy is None else tuple(range(len(cast("Trunk", model.trunk).blocks)))


def batch_for(model: Classifier, most: int = 64) -> int:
    """Batch size that leaves room for the maps of all layers."""
    trunk = model.trunk
    if isinstance(trunk, Trunk):
        rows, columns = trunk.patch_embed.grid(model.preprocess.size, model.preprocess.size)
        heads, tokens = trunk.config.heads, trunk.prefix + rows * columns
    elif map_layers(model):  # a timm ViT
        vit = cast("Any", trunk).backbone
        heads, tokens = vit.blocks[0].attn.num_heads, trunk.prefix + vit.patch_embed.num_patches
    else:
        return most
    numbers = len(map_layers(model)) * heads * tokens**2
    return max(1, min(most, MOST_NUMBERS // max(1, numbers)))


def _mixers(trunk: Trunk) -> list[Any]:
    return [cast("Any", block).mixers[0] for block in trunk.blocks]
