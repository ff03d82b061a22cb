"""Attention transfer: a trunk that uses the attention of a frozen teacher (Li et al. 2024, arXiv 2411.09702).

The teacher, called guide, is always in evaluation mode and ends where the last transferred layer has computed q and k.
Where both are transferred, attention maps are never materialised: softmax(q_t k_tᵀ) v_s goes through the fused kernel.

q, k, v [batch, heads, tokens, width / heads]; attention [batch, heads, tokens, tokens]; tokens [batch, tokens, width]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.kernels.attention_match import MadeOf
from vitrail.model.config import GuideConfig, Guided
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.parts.block import Block
from vitrail.model.parts.tokens import Given, Tokens
from vitrail.model.trunks.vit import Trunk

PARTS = {"map": ("q", "k"), "qk": ("q", "k"), "q": ("q",), "k": ("k",), "v": ("v",), "features": ("tokens",)}
"""Intermediates that are transferred from a layer, by target."""


class StoredTensors(nn.Module):
    """Tensors by name in place of a teacher: the same for every image, or a row for each stable index."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "_"), tensor)

    def forward(self, name: str, batch: int, index: Tensor | None) -> Tensor:
        kept: Tensor = self.get_buffer(name.replace(".", "_"))
        whole = 3 if name.startswith("tokens.") else 4
        if kept.ndim == whole:
            assert index is not None
            return kept[index]
        return kept.expand(batch, *kept.shape)


class Guide(nn.Module):
    """Intermediates of a frozen source, under the names of the student's layers that receive them.

    `source` is a trunk or `Stored`. Maps averaged over examples are a running mean over all images seen in training.
    With `inputs` it also returns what q and k are computed from (`made_of`).
    """

    inputs = False

    scale: Tensor
    shift: Tensor
    mean: Tensor
    seen: Tensor

    def __init__(self, config: GuideConfig, source: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        if source is None and config.teacher is not None:
            source = Trunk(config.teacher, config.prefix, final_norm=False)
        elif source is None:
            source = StoredTensors(
                {f"{what}.{t}": torch.empty(config.stored) for what in self.parts for _, t in config.layers}
            )
        if isinstance(source, Trunk) and source.prompts is not None:
            raise ValueError(
                "attention transfer: the teacher has prompts, and its attention rows for them; use another"
            )
        self.source = source.requires_grad_(False)
        for name in ("scale", "shift"):
            self.register_buffer(name, torch.tensor(getattr(config, name)).view(3, 1, 1))
        if config.aggregate == "examples":
            shape = (len(config.layers), len(config.heads), config.tokens, config.tokens)
            self.register_buffer("mean", torch.zeros(shape))
            self.register_buffer("seen", torch.zeros(()))
            # Means over examples of all processes count equally many of each.
            self.complete_batches = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.train(False)

    @property
    def parts(self) -> tuple[str, ...]:
        stored = self.config.teacher is None
        return ("attention",) if stored and self.config.target == "map" else PARTS[self.config.target]

    def train(self, mode: bool = True) -> Guide:
        """A teacher never trains: its norms and drop-outs stay as at evaluation."""
        return super().train(False)

    def forward(
        self, images: Tensor, index: Tensor | None = None, keep: Mapping[str, Tensor] | None = None, learn: bool = False
    ) -> dict[str, Tensor]:
        """Transferred tensors for normalised images [batch, 3, height, width], for every layer and its chosen heads.

        `keep` are shared masks of drop path; `learn`: means over examples go on.
        """
        config = self.config
        if not config.layers:
            return {}
        with torch.no_grad():
            if isinstance(self.source, StoredTensors):
                names = [f"{what}.{t}" for what in self.parts for _, t in config.layers]
                source = {name: self.source(name, len(images), index) for name in names}
            else:
                source = self._captured(images, keep or {})
            heads = [t for _, t in config.heads]
            taken = {
                f"{kind}.{s}": source[f"{kind}.{t}"] if kind == "tokens" else pick(source[f"{kind}.{t}"], heads)
                for s, t in config.layers
                for kind in self.parts
            }
            if self.shows_inputs:
                taken |= {f"input.{s}": source[f"input.{t}"] for s, t in config.layers}
            if config.maps and "attention" not in self.parts:
                taken = {f"attention.{s}": make_map(taken[f"q.{s}"], taken[f"k.{s}"]) for s, _ in config.layers}
            return taken if config.aggregate == "none" else self._averaged(taken, learn)

    @property
    def shows_inputs(self) -> bool:
        plain = self.config.target == "map" and not self.config.maps
        return self.inputs and plain and isinstance(self.source, Trunk)

    def made_of(self, layer: int, taken: Mapping[str, Tensor]) -> MadeOf | None:
        """What q and k of one of the layers that take them are computed from; none where it was not requested."""
        if f"input.{layer}" not in taken:
            return None
        block = cast("Trunk", self.source).blocks[dict(self.config.layers)[layer]]
        mixer = cast("SoftmaxMixer", cast("Block", block).mixers[0])
        heads = [t for _, t in self.config.heads]
        weight = pick(mixer.qkv.weight.detach().unflatten(0, (3, mixer.heads, -1))[:2], heads)
        bias = mixer.qkv.bias
        rows = None if bias is None else pick(bias.detach().unflatten(0, (3, mixer.heads, -1))[:2], heads)
        return MadeOf(taken[f"input.{layer}"], weight, rows)

    def _captured(self, images: Tensor, keep: Mapping[str, Tensor]) -> dict[str, Tensor]:
        trunk = cast("Trunk", self.source)
        images = images * self.scale + self.shift
        size = self.config.size
        if size is not None and images.shape[-2:] != (size, size):
            images = F.interpolate(images, (size, size), mode="bicubic", antialias=True)
        tokens = trunk.embed(images)
        last = len(trunk.blocks) - 1
        parts = (*self.parts, "input") if self.shows_inputs else self.parts
        names = {f"{what}.{t}" for what in parts for _, t in self.config.layers}
        if "tokens" in parts:
            return trunk.encode(tokens, names, _up_to(last + 1, keep), until=last + 1)[1]
        # Of the last block only q and k (or v) matter: its mixing and its channel branch are left out.
        ends = {f"{what}.{last}" for what in parts}
        tokens, captured = trunk.encode(tokens, names - ends, _up_to(last, keep), until=last)
        block = cast("Block", trunk.blocks[last])
        x = block.norm1(tokens.sequence)
        q, k, v = cast("SoftmaxMixer", block.attn).project(x, tokens)
        return captured | {f"q.{last}": q, f"k.{last}": k, f"v.{last}": v, f"input.{last}": x}

    def _averaged(self, maps: dict[str, Tensor], learn: bool) -> dict[str, Tensor]:
        kind = self.config.aggregate
        if kind in ("heads", "queries"):
            axis = 1 if kind == "heads" else 2
            return {name: m.mean(axis, keepdim=True).expand_as(m) for name, m in maps.items()}
        if kind == "layers":
            return dict.fromkeys(maps, torch.stack(list(maps.values())).mean(0))
        now = torch.stack([m.float().mean(0) for m in maps.values()])
        count = len(next(iter(maps.values())))
        if learn:
            fresh, total = now, count
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:  # equally many of each
                total = count * dist.get_world_size()
                dist.all_reduce(fresh := now.clone())
                fresh /= dist.get_world_size()
            self.seen += total
            self.mean += (fresh - self.mean) * (total / self.seen)
        mean = torch.where(self.seen > 0, self.mean, now)  # before any training: of this batch
        return {name: m.expand(count, *m.shape) for name, m in zip(maps, mean, strict=True)}


def _up_to(depth: int, keep: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in keep.items() if int(name.removeprefix("keep.")) < depth}


def make_map(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q kᵀ / √dim), in float32."""
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1).contiguous()
    return (logits if logits.dtype == torch.float64 else logits.float()).softmax(-1)


def pick(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of x [batch, heads, ...]; x itself where that is all of them."""
    if list(heads) == list(range(x.shape[1])):
        return x
    if list(heads) == list(range(len(heads))):
        return x[:, : len(heads)]
    return torch.stack([x[:, h] for h in heads], 1)


def on_heads(value: Tensor, heads: Sequence[int], count: int) -> Given:
    """`value` in place of some of `count` heads: itself, or a function of what the others compute."""
    rows = {h: i for i, h in enumerate(heads)}
    if list(heads) == list(range(count)):
        return value

    def merged(computed: Tensor) -> Tensor:
        chosen = (value[:, rows[h]].to(computed) if h in rows else computed[:, h] for h in range(count))
        return torch.stack(list(chosen), 1)

    return merged


def draw_keep(trunk: Trunk, images: Tensor) -> dict[str, Tensor]:
    """One set of drop-path masks, [2, batch, 1, 1] per block, to be shared: 0, or 1 / (1 - rate)."""
    masks = {}
    for i, block in enumerate(trunk.blocks):
        rate = cast("Block", block).drop_path.rate
        if rate:
            drawn = torch.rand(2, len(images), 1, 1, device=images.device) >= rate
            masks[f"keep.{i}"] = drawn.float() / (1 - rate)
    return masks


@dataclass
class GuidedTokens(Tokens):
    """Tokens, and the guide's intermediates for the same images."""

    given: Mapping[str, Given] = field(default_factory=dict)


class GuidedTrunk(Trunk):
    """A trunk whose attention is its guide's, in training and at inference (attention copy).

    Its names are those of a plain trunk, and `guide`.
    """

    takes_prompts = False

    def __init__(self, config: Guided, prefix: int = 1, final_norm: bool = True, guide: Guide | None = None) -> None:
        super().__init__(config.student, prefix, final_norm)
        self.guide = Guide(config.guide) if guide is None else guide

    def embed(self, images: Tensor) -> Tokens:
        tokens = super().embed(images)
        keep = draw_keep(self, images) if self.training and self.guide.config.share_drop_path else {}
        taken = self.guide(images, None, keep, learn=self.training)
        heads = [s for s, _ in self.guide.config.heads]
        given = {name: on_heads(value, heads, self.config.heads) for name, value in taken.items()}
        return GuidedTokens(tokens.sequence, tokens.prefix, tokens.grid, given={**given, **keep})

    def encode(
        self,
        tokens: Tokens,
        want: Collection[str] = (),
        given: Mapping[str, Given] | None = None,
        until: int | None = None,
    ) -> tuple[Tokens, dict[str, Tensor]]:
        of_guide = tokens.given if isinstance(tokens, GuidedTokens) else {}
        return super().encode(tokens, want, {**of_guide, **(given or {})}, until)


def guided(trunk: Trunk, guide: Guide) -> GuidedTrunk:
    """`trunk`, its parameters included, under a guide."""
    config = Guided(student=trunk.config, guide=guide.config)
    with torch.device("meta"):
        student = GuidedTrunk(config, trunk.prefix, not isinstance(trunk.norm, nn.Identity), guide)
    own = (trunk.named_children(), trunk.named_parameters(recurse=False), trunk.named_buffers(recurse=False))
    for name, part in chain.from_iterable(own):
        setattr(student, name, part)
    return student.train(trunk.training)
