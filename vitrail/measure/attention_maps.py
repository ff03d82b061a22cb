"""Attention maps and kept tokens of a model, collected over batches of images.

Tokens that ATS (arXiv 2111.15667) keeps under other rules: top-K compared with inverse transform sampling.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.measure.attention_statistics import LayerGather, LayerLook, Maps, class_rows, shares, spread_out
from vitrail.measure.compute import worst_case
from vitrail.measure.evaluator import evaluation_mode
from vitrail.model.adaptive.adavit import AdavitPolicy
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.adaptive.avit import AvitPolicy
from vitrail.model.adaptive.budget import fixed_macs, trace_macs
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.mixers.sima import SimaMixer
from vitrail.model.parts.tokens import Tokens, Trace
from vitrail.model.trunks.vit import Trunk

MOST_NUMBERS = 2**26  # of the maps of one batch, all layers together: 256 MiB
PARTS = ("maps", "features", "saliency")  # what can be asked for; tokens kept and probabilities cost nothing


class Seen:
    """One batch on its way through a model, with everything that was asked for."""

    def __init__(self, model: Classifier, images: Tensor, parts: Collection[str] = PARTS) -> None:
        self.model, self.trunk = model, cast("Trunk", model.trunk)
        self.layers = map_layers(model) if "maps" in parts else []
        want = {f"attention.{i}" for i in self.layers}
        self.sima = sima_layer(model) if "saliency" in parts else None
        known = getattr(model.trunk, "intermediates", ())
        want |= {name for name in known if name.startswith("kept.")}
        features = [name for name in known if name.startswith("tokens.")] if "features" in parts else []
        want |= set(features)
        self.depth = len(features)
        if self.sima is not None:
            want |= {f"{what}.{self.sima}" for what in ("q", "k", "tokens")}
            if isinstance(model.policy, AvitPolicy):  # which tokens are left is told by its map
                want.add(f"attention.{self.sima}")
        # An adaptive batch that is looked at in every block is padded, never packed, whatever its policy's form.
        with evaluation_mode(model), torch.inference_mode():
            out = model.outputs(images, want=want)
            self.probabilities = model.probabilities(model.fused(out.stack).float()).cpu()
            head = out.maps if "maps" in parts else None
        self.captured, self.trace = out.captured, out.trace
        self.grid = out.tokens.grid
        self.device = images.device
        self.patches = self.grid[0] * self.grid[1]
        self.count = len(images)
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

    def maps(self, i: int) -> Maps:
        """Attention of layer i on the original tokens."""
        found, prefix, policy = self.captured[f"attention.{i}"], self.prefix(i), self.model.policy
        first = torch.ones(self.count, prefix, dtype=torch.bool, device=found.device)
        if isinstance(policy, AtsPolicy):
            asking, seen = self.kept(i), self.kept(i - 1)
            found = spread_out(found, asking, seen, prefix)
        elif isinstance(policy, AvitPolicy):
            asking = seen = self.kept(i - 1)
            # `kept` tells of patches only; class tokens halt, too, and are the rest of those that entered.
            assert self.trace is not None
            first = first & (self.trace.blocks[i].entering - seen.sum(1) >= prefix)[:, None].to(first.device)
        elif isinstance(policy, AdavitPolicy):
            asking = seen = self.kept(i)
        else:
            asking = seen = self.kept(-1)
        rows, keys = (torch.cat([first, patches], 1) for patches in (asking, seen))
        weights = shares(found).masked_fill(~(rows[:, None, :, None] & keys[:, None, None]), 0.0)
        return Maps(weights, rows, keys, prefix, self.grid)

    def signed(self, i: int) -> bool:
        """Whether layer i has negative weights, so that its magnitudes are shown."""
        return bool((self.captured[f"attention.{i}"] < 0).any())

    def features(self) -> list[Tensor]:
        """The mean over the patches that each block worked on, [batch, width] a block."""
        made = []
        for i in range(self.depth):
            patches = self.captured[f"tokens.{i}"][:, self.prefix(i) :].float()
            real = torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
            if isinstance(self.model.policy, AtsPolicy):  # those that are left come first
                real = torch.arange(patches.shape[1], device=real.device) < self.kept(i).sum(1, keepdim=True)
            elif isinstance(self.model.policy, AvitPolicy):
                real = self.kept(i - 1)
            some = torch.where(real[..., None], patches, 0.0)
            made.append((some.sum(1) / real.sum(1, keepdim=True).clamp_min(1)).cpu())
        return made

    def saliency(self) -> tuple[Tensor, Tensor] | None:
        """Norms of q̂ and k̂ over all channels, [batch, patches] each, in the last SimA layer (arXiv 2206.08898)."""
        if self.sima is None:
            return None
        mixer, prefix = _mixers(self.trunk)[self.sima], self.prefix(self.sima)
        mask = None
        if isinstance(self.model.policy, AvitPolicy):
            mask = self.maps(self.sima).keys
        layout = Tokens(self.captured[f"tokens.{self.sima}"], prefix, self.grid, mask)
        hats = [cast("SimaMixer", mixer).hat(self.captured[f"{what}.{self.sima}"], layout) for what in "qk"]
        q, k = (hat.float().square().sum((1, 3)).sqrt()[:, prefix:].cpu() for hat in hats)
        return q, k


@dataclass(frozen=True)
class Looks:
    """What was gathered of one model."""

    images: int
    grid: tuple[int, int]
    pitch: float  # pixels from one patch to the next
    layers: tuple[LayerLook, ...]
    class_maps: Tensor  # [pictures, layers, heads, patches], of the chosen images
    head_maps: Tensor | None  # [pictures, patches], mean over the head's own maps
    saliency: tuple[Tensor, Tensor] | None  # of q̂ and k̂, [pictures, patches]
    kept: Tensor | None  # [pictures, blocks, patches], bool
    counts: Tensor | None  # [images, blocks], patches left after (AdaViT: inside) each block
    entering: tuple[float, ...]  # tokens, mean over images, into each block; empty where all images get all
    leaving: tuple[float, ...]
    macs: float | None  # of an image, mean
    macs_whole: float | None  # of an image that is given everything
    features: tuple[Tensor, ...]  # [images, width] a block
    probabilities: Tensor  # [pictures, classes]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "images": self.images,
            "grid": list(self.grid),
            "layers": [layer.to_json(self.pitch) for layer in self.layers],
            "macs": self.macs,
        }
        if self.entering:
            found |= {"tokens": list(self.entering), "leaving": list(self.leaving), "macs_whole": self.macs_whole}
        return found | {"notes": list(self.notes)}


class Looker:
    """Gathers `Looks` of a model; the first `pictures` images are also kept as pictures. `parts`: what is looked at."""

    def __init__(self, model: Classifier, pictures: int = 8, parts: Collection[str] = PARTS) -> None:
        self.model, self.pictures, self.parts = model, pictures, tuple(parts)
        self.layers = {i: LayerGather(i) for i in (map_layers(model) if "maps" in parts else ())}
        self.signed: set[int] = set()
        self.images = 0
        self.shown: dict[str, list[Tensor]] = {}
        self.features: list[list[Tensor]] = []
        self.counts: list[Tensor] = []
        self.traces: list[Trace] = []
        self.macs: list[Tensor] = []
        self.grid, self.size = (0, 0), 0
        self._fixed: int | None = None
        self._uncounted = ""

    def add(self, images: Tensor) -> Seen:
        """Images as the model takes them, [batch, 3, height, width]; returns the batch, for whoever compares."""
        seen = Seen(self.model, images, self.parts)
        self.grid, self.size = seen.grid, images.shape[-1]
        for i, gather in self.layers.items():
            maps = seen.maps(i)
            gather.add(maps)
            if seen.signed(i):
                self.signed.add(i)
            if self.images < self.pictures:
                self._show(f"class.{i}", class_rows(maps)[..., maps.prefix :])
        self._show("probabilities", seen.probabilities)
        if seen.head is not None:
            self._show("head", seen.head.float().mean(1))
        for name, values in zip("qk", seen.saliency() or (), strict=False):
            self._show(f"saliency.{name}", values)
        self.features.append(seen.features())
        if self.model.policy is not None:
            kept = torch.stack([seen.kept(i) for i in range(len(seen.trunk.blocks))], 1).cpu()
            self._show("kept", kept)
            self.counts.append(kept.sum(2))
            self._spent(cast("Trace", seen.trace))
        self.images += len(images)
        return seen

    def _show(self, name: str, values: Tensor) -> None:
        self.shown.setdefault(name, []).append(values[: max(0, self.pictures - self.images)].cpu())

    def _spent(self, trace: Trace) -> None:
        self.traces.append(trace)
        try:
            if self._fixed is None:
                self._fixed = fixed_macs(self.model, self.size)
            self.macs.append(trace_macs(self.model, trace, image_size=self.size, fixed=self._fixed))
        except ValueError as error:  # A-ViT with talking heads or SimA
            self._uncounted = str(error)

    def result(self) -> Looks:
        if not self.images:
            raise ValueError("there is nothing to look at: no image was given")
        shown = {name: torch.cat(values) for name, values in self.shown.items()}
        maps = [shown[f"class.{i}"] for i in self.layers]
        uses = [[_use(t, b, "entering") for t in self.traces] for b in range(self._blocks())]
        left = [[_use(t, b, "leaving") for t in self.traces] for b in range(self._blocks())]
        macs, whole = self._macs()
        return Looks(
            images=self.images,
            grid=self.grid,
            pitch=self.size / max(1, self.grid[0]),
            layers=tuple(gather.result() for gather in self.layers.values()),
            class_maps=torch.stack(maps, 1) if maps else torch.zeros(0),
            head_maps=shown.get("head"),
            saliency=(shown["saliency.q"], shown["saliency.k"]) if "saliency.q" in shown else None,
            kept=shown.get("kept"),
            counts=torch.cat(self.counts) if self.counts else None,
            entering=tuple(float(torch.cat(block).mean()) for block in uses),
            leaving=tuple(float(torch.cat(block).mean()) for block in left),
            macs=macs,
            macs_whole=whole,
            features=tuple(torch.cat(each) for each in zip(*self.features, strict=True)),
            probabilities=shown["probabilities"],
            notes=tuple(self._notes()),
        )

    def _blocks(self) -> int:
        return len(self.traces[0].blocks) if self.traces else 0

    def _macs(self) -> tuple[float | None, float | None]:
        if self.model.policy is None:
            return float(cost(self.model, self.size).macs), None
        if not self.macs:
            return None, None
        return float(torch.cat(self.macs).mean()), worst_case(self.model, self.size)

    def _notes(self) -> Iterator[str]:
        without = layers_without_maps(self.model) if "maps" in self.parts else ""
        if without:
            yield without
        if self.signed:
            some = ", ".join(map(str, sorted(self.signed)))
            yield f"weights of layers {some} may be negative: entropy, distance and pictures are of their magnitudes"
        if any(gather.row == "mean" for gather in self.layers.values()):
            some = "no class token" if not cast("Trunk", self.model.trunk).prefix else "its class token comes later"
            yield f"{some}: in its place stands the mean row, what patches look at on average"
        if self.layers and isinstance(self.model.trunk, Trunk) and self.model.trunk.config.parallel > 1:
            yield "maps are those of the first of the parallel branches"
        if self._uncounted:
            yield f"multiply-accumulates are left out: {self._uncounted}"


def map_layers(model: Classifier) -> list[int]:
    """Layers that have attention maps over tokens."""
    known: Sequence[str] = getattr(model.trunk, "intermediates", ())
    return [int(name.removeprefix("attention.")) for name in known if name.startswith("attention.")]


def layers_without_maps(model: Classifier) -> str:
    """Who has no maps, in words; nothing where all layers have."""
    if not isinstance(model.trunk, Trunk) and not map_layers(model):
        kind = model.spec.get("trunk", {}).get("kind", type(model.trunk).__name__)
        if kind == "timm":
            name = model.spec["trunk"].get("name", "")
            return (
                f"timm:{name} shows no attention maps and no tokens of inner layers: of timm's models plain ViTs are "
                "read block by block, and those that the zoo has by its own names"
            )
        return f"the trunk ({kind}) gives no attention maps and no tokens of inner layers"
    if map_layers(model):
        return ""
    if cast("Trunk", model.trunk).prompts is not None:
        return "with prompts, maps have places that are no patches, and are not shown"
    return f"the mixer {cast('Trunk', model.trunk).config.mixer.kind} has no attention maps over patches"


def sima_layer(model: Classifier) -> int | None:
    """The last layer with SimA that shows its q and k; none where there is no such."""
    if not isinstance(model.trunk, Trunk) or model.trunk.prompts is not None:
        return None
    found = [i for i, mixer in enumerate(_mixers(model.trunk)) if isinstance(mixer, SimaMixer)]
    return found[-1] if found else None


def policy_kind(model: Classifier) -> str:
    """ats, avit or adavit; empty where all images get all of the model."""
    return "" if model.policy is None else str(getattr(model.policy.config, "kind", ""))


def stages(model: Classifier) -> tuple[int, ...]:
    """Blocks at which an adaptive policy decides; none where there is no policy."""
    if isinstance(model.policy, AtsPolicy):
        return tuple(sorted(model.policy.at))
    return () if model.policy is None else tuple(range(len(cast("Trunk", model.trunk).blocks)))


def batch_for(model: Classifier, most: int = 64) -> int:
    """How many images at a time leave room for the maps of all layers."""
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


def _use(trace: Trace, block: int, what: str) -> Tensor:
    return cast("Tensor", getattr(trace.blocks[block], what)).cpu().double()


Rule = Literal["inverse", "top"]
RULES = {"inverse": "inverse transform", "nearest": "inverse, nearest", "top": "top-K", "random": "at random"}


@dataclass(frozen=True)
class Selection:
    """The chosen images once more, by the other rule."""

    own: str  # the model's rule, in words
    other: str
    looks: Looks


@contextmanager
def drawing_by(policy: AtsPolicy, rule: Rule, cap: Sequence[float]) -> Iterator[None]:
    """The policy with another rule and other caps, one a layer or one for all; then as it was."""
    config, caps = policy.config, policy.cap
    policy.config = replace(config, sampling=rule, form="padded")  # packed batches know one rule only
    try:
        policy.set_cap(cap)
        yield
    finally:
        policy.config, policy.cap = config, caps


def other_selection(model: Classifier, pixels: Sequence[NDArray[np.uint8]], counts: Tensor) -> Selection | None:
    """The same weights on `pixels` ([side, side, 3] each), top-K in place of what the model does; none unless ATS.

    K of each stage is what the model keeps there of an image on average, by `counts` [images, blocks]: both spend the
    same. A model that takes the top K by itself is shown with inverse transform sampling and its own cap, which keeps
    at most as many.
    """
    policy = model.policy
    if not isinstance(policy, AtsPolicy) or not len(pixels):
        return None
    rule: Rule = "inverse" if policy.config.sampling == "top" else "top"
    cap = list(policy.cap.values())
    if rule == "top":  # a cap of 1 would be all patches
        cap = [float(max(2, round(float(counts[:, i].double().mean())))) for i in policy.at]
    looker = Looker(model, len(pixels), ())
    device = next(model.parameters()).device
    with drawing_by(policy, rule, cap):
        looker.add(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous().to(device))
    return Selection(RULES[policy.config.sampling], RULES[rule], looker.result())
