"""Policies that reduce the patches of every image alike, between the two branches of a block (ToMe, EViT).

All tokens attend and are attended to; fewer go on to the channel branch. How many depends on no image: shapes are
static, and a batch stays dense. Nothing is learned, and nothing is added to a state dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitrail.model.config import TrunkConfig
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.parts.block import Block
from vitrail.model.parts.tokens import AdaptivePolicy, Passage, Probe, Tokens, show_kept

MILLION = 10**6
ROUNDING = 100  # millionths of a token that the products of rounded levels may be off


class ReducingPolicy(AdaptivePolicy):
    """`level` is the option named `setting`, which the budget dial moves.

    Raises `ValueError` where blocks are not plain ones with softmax attention.
    """

    same_cost = True
    setting: ClassVar[str]

    def __init__(self, config: Any, trunk: TrunkConfig, blocks: Sequence[Block], prefix: int) -> None:
        super().__init__()
        self.config, self.depth = config, len(blocks)
        self.level = float(getattr(config, self.setting))
        for block in blocks:
            if not isinstance(block, Block):
                raise ValueError(f"{config.kind} works in plain blocks, one after the other: parallel must be 1")
            if not (isinstance(block.attn, SoftmaxMixer) and block.attn.fused):
                raise ValueError(f"{config.kind} reads keys of softmax attention; the mixer must be softmax")
            if block.local_mp is not None:
                raise ValueError(f"{config.kind} leaves holes in the grid, which local patch interaction cannot read")

    @property
    def level(self) -> float:
        return self.millionths / MILLION

    @level.setter
    def level(self, value: float) -> None:
        self.millionths = round(value * MILLION)  # a whole number, which a compiled graph takes for a constant

    @property
    def static(self) -> bool:
        return True

    def checked(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """The same in order. Raises `ValueError` where one is no block, or there twice."""
        if layers and (max(layers) >= self.depth or len(set(layers)) < len(layers)):
            raise ValueError(f"adaptive.layers: {layers}, but blocks are 0 to {self.depth - 1}, each at most once")
        return tuple(sorted(layers))

    @property
    def at(self) -> tuple[int, ...]:
        """Blocks that reduce."""
        raise NotImplementedError

    def levels(self, patches: int) -> list[float]:
        """Levels that differ for so many patches, from the cheapest to the one that keeps all."""
        raise NotImplementedError

    def left(self, i: int, patches: int) -> int:
        """Patch tokens that leave block i, of so many."""
        raise NotImplementedError

    def own_macs(self, entering: Tensor, trunk: TrunkConfig, prefix: int, *, scores: bool) -> Tensor:
        """Products of choosing, [batch], in a block that so many tokens enter; `scores`: those that attention has made
        already count once more, as they are computed here."""
        raise NotImplementedError


class ReducingPassage(Passage):
    """`reduce` is called after the mixing branch of a block that reduces."""

    def __init__(self, policy: ReducingPolicy, tokens: Tokens) -> None:
        super().__init__()
        self.policy = policy
        # Counts are views of these: in a graph of small kernels, one fill for every count of every block is felt.
        self.numbers = torch.arange(tokens.sequence.shape[1] + 1.0, device=tokens.sequence.device)

    def run(self, block: Block, i: int, tokens: Tokens, probe: Probe | None) -> Tokens:
        entering, patches = self._count(tokens), tokens.sequence.shape[1] - tokens.prefix
        left = self.policy.left(i, patches)
        tokens = block(tokens, probe) if left == patches else self._reduced(block, i, tokens, left, probe)
        self.used(block, entering, self._count(tokens))
        show_kept(probe, i, tokens)
        return tokens

    def _count(self, tokens: Tokens) -> Tensor:
        return self.numbers[tokens.sequence.shape[1]].expand(len(tokens.sequence))

    def _reduced(self, block: Block, i: int, tokens: Tokens, left: int, probe: Probe | None) -> Tokens:
        mixer, x = block.attn, tokens.sequence
        assert isinstance(mixer, SoftmaxMixer)
        assert tokens.mask is None
        assert tokens.offsets is None
        keep = (None, None) if probe is None else probe.keep(i)
        shown = probe if probe is not None and probe.concerns(*(f"{kind}.{i}" for kind in mixer.shows)) else None
        mixed, q, k = mixer.mixed(block.norm1(x), tokens, i, shown)
        tokens = self.reduce(tokens, block.drop_path(block.ls1(mixed), keep[0]), left, q, k)
        x = block.after_channels(tokens.sequence, keep[1])
        return tokens.but(x if probe is None else probe(f"tokens.{i}", x))

    def reduce(self, tokens: Tokens, branch: Tensor, left: int, q: Tensor, k: Tensor) -> Tokens:
        """The mixing branch added, and so many patch tokens left; q and k [batch, heads, tokens, dim] are its own."""
        raise NotImplementedError


def gathered(x: Tensor, places: Tensor) -> Tensor:
    """Rows of x [batch, tokens, width] at places [batch, count]."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
