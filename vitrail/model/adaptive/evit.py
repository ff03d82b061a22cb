"""EViT: the patches that the class token attends to most go on, all others as one token (Liang et al. 2022, arXiv
2202.07800)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vitrail.kernels.packing import kept_first
from vitrail.kernels.sampling import class_attention, top_sample
from vitrail.model.adaptive.reduction import MILLION, ROUNDING, ReducingPassage, ReducingPolicy, gathered
from vitrail.model.config import Evit, TrunkConfig
from vitrail.model.parts.block import Block, added
from vitrail.model.parts.tokens import Passage, Tokens


class EvitPolicy(ReducingPolicy):
    """Keeps patches in the blocks `at`. Raises `ValueError` where the trunk has no class token or too few blocks."""

    config: Evit
    setting = "keep"
    at: tuple[int, ...] = ()

    def __init__(self, config: Evit, trunk: TrunkConfig, blocks: Sequence[Block], prefix: int) -> None:
        super().__init__(config, trunk, blocks, prefix)
        usual = tuple(sorted({self.depth // 4, self.depth // 2, 3 * self.depth // 4}))
        self.at = self.checked(config.layers) or usual
        if not prefix:
            raise ValueError("evit asks the class token which patches matter; use a head with one: class_token")

    def begin(self, tokens: Tokens) -> Passage:
        return _Fusing(self, tokens)

    def levels(self, patches: int) -> list[float]:
        # Ten for each patch, because what one layer rounds up the next one rounds again.
        return [tenths / (10 * patches) for tenths in range(10, 10 * patches + 1)]

    def left(self, i: int, patches: int) -> int:
        kept = max(1, -((ROUNDING - self.millionths * patches) // MILLION))  # rounded up
        # The token of all others comes on top; a single other one gains nothing by becoming it.
        return min(patches, kept + 1) if i in self.at else patches

    def own_macs(self, entering: Tensor, trunk: TrunkConfig, prefix: int, *, scores: bool) -> Tensor:
        return entering * (trunk.width if scores else 0)


class _Fusing(ReducingPassage):
    def reduce(self, tokens: Tokens, branch: Tensor, left: int, q: Tensor, k: Tensor) -> Tokens:
        x, prefix = added(tokens.sequence, branch), tokens.prefix
        attention = class_attention(q, k).mean(1)[:, prefix:]
        places = kept_first(top_sample(attention, left - 1))
        kept, others = places[:, : left - 1], places[:, left - 1 :]
        # The sum is not divided by that of the weights, as in the paper.
        weight = attention.gather(1, others)[..., None]
        fused = (gathered(x, others + prefix) * weight).sum(1, keepdim=True).to(x.dtype)
        index = tokens.original().gather(1, kept)
        nowhere = torch.full_like(index[:, :1], tokens.grid[0] * tokens.grid[1])
        sequence = torch.cat([x[:, :prefix], gathered(x, kept + prefix), fused], 1)
        return replace(tokens, sequence=sequence, index=torch.cat([index, nowhere], 1))
