"""ToMe: in every block the r most similar pairs of patches become one token each (Bolya et al. 2023, arXiv 2210.09461).

Between attention and MLP every other patch proposes to merge into the most similar one of those between, by the keys of
attention, and the r most similar pairs do. A token is the mean of the patches it stands for, and weighs as many in
attention. Class and distillation tokens never merge.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels.covariance import without_autocast
from vitrail.kernels.packing import kept_first
from vitrail.model.adaptive.reduction import MILLION, ROUNDING, ReducingPassage, ReducingPolicy, gathered
from vitrail.model.config import Tome, TrunkConfig
from vitrail.model.parts.tokens import Passage, Tokens


def bipartite_matching(metric: Tensor, r: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """The r most similar pairs (section 3 of the paper): metric [batch, tokens, dim] -> sources, targets [batch, r].

    Tokens first (0 or 1), first + 2, ... have one edge each, to the most similar of the others by cosine; the r most
    similar edges stay. Several may end at one token.

    >>> bipartite_matching(torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.1, 1.0], [1.0, 1.0]]]), 1)
    (tensor([[2]]), tensor([[1]]))
    """
    unit = F.normalize(metric, dim=-1)
    similarity, nearest = (unit[:, first::2] @ unit[:, 1 - first :: 2].mT).max(-1)
    source = similarity.topk(r, dim=-1, sorted=False).indices
    return 2 * source + first, 2 * nearest.gather(1, source) + 1 - first


def merge(x: Tensor, size: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [batch, tokens, width] and sizes [batch, tokens] with `source` added to `target`, means weighted by size.

    Sources stay where they are, for the caller to leave out.
    """
    moved = size.gather(1, source)
    total = size.scatter_add(1, target, moved)
    share = (moved / total.gather(1, target)).to(x.dtype)
    # The weighted mean as a change of the target: what meets its equal stays as it is, to the bit.
    change = (gathered(x, source) - gathered(x, target)) * share[..., None]
    return x.scatter_add(1, target[..., None].expand_as(change), change), total


class TomePolicy(ReducingPolicy):
    """Merges patches in every block."""

    config: Tome
    setting = "r"

    def begin(self, tokens: Tokens) -> Passage:
        return _Merging(self)

    def merges(self, i: int) -> int:
        """Patches that block i should merge away.

        Fractions are carried from block to block, so that all blocks together merge away r times their number; the
        authors' code cuts them off in every block.
        """
        decreasing = self.config.schedule == "decreasing" and self.depth > 1

        def upto(blocks: int) -> int:
            total = self.millionths * blocks
            total = total * (2 * self.depth - 1 - blocks) // (self.depth - 1) if decreasing else total
            return (total + ROUNDING) // MILLION

        return upto(i + 1) - upto(i)

    @property
    def at(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.depth) if self.merges(i))

    def levels(self, patches: int) -> list[float]:
        return [total / self.depth for total in range(patches * self.depth, -1, -1)]

    def left(self, i: int, patches: int) -> int:
        return patches - min(self.merges(i), patches // 2)

    def own_macs(self, entering: Tensor, trunk: TrunkConfig, prefix: int, *, scores: bool) -> Tensor:
        half = ((entering - prefix) / 2).floor()
        return half * (entering - prefix - half) * (trunk.width // trunk.heads)


class _Merging(ReducingPassage):
    policy: TomePolicy
    size: Tensor | None = None

    def reduce(self, tokens: Tokens, left: int, q: Tensor, k: Tensor) -> Tokens:
        x, prefix = tokens.sequence, tokens.prefix
        with torch.no_grad(), without_autocast(k):
            keys = k[:, :, prefix:].to(torch.promote_types(k.dtype, torch.float32)).mean(1)
            pairs = bipartite_matching(keys, keys.shape[1] - left, prefix % 2)
            source, target = pairs[0] + prefix, pairs[1] + prefix
        size = torch.ones_like(x[..., 0], dtype=torch.float32) if self.size is None else self.size
        x, size = merge(x, size, source, target)
        # Tokens stay in raster order, so that neighbours propose to each other in every block; the authors' code moves
        # those that were merged into to the end.
        places = kept_first(torch.ones_like(size, dtype=torch.bool).scatter(1, source, False))[:, : prefix + left]
        self.size = size.gather(1, places)
        index = tokens.original().gather(1, places[:, prefix:] - prefix)
        weighs = self.size if self.policy.config.proportional else None
        return replace(tokens, sequence=gathered(x, places), index=index, size=weighs)

    def end(self, tokens: Tokens) -> Tokens:
        return super().end(replace(tokens, size=self.size))  # for heads that pool
