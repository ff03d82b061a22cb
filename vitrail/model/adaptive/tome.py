"""ToMe: in every block, or in some, the most similar pairs of patches become one token each (Bolya et al. 2023, arXiv
2210.09461).

Between attention and MLP every other patch proposes to merge into the most similar one of those between, by the keys of
attention, and the r most similar pairs do. A token is the mean of the patches it stands for, and weighs as many in
attention. Class and distillation tokens never merge. Tokens stay in raster order, so that neighbours propose to each
other in every block; the authors' code moves those that were merged into to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from vitrail.kernels.token_merge import merge_similar
from vitrail.model.adaptive.reduction import MILLION, ROUNDING, ReducingPassage, ReducingPolicy
from vitrail.model.config import Tome, TrunkConfig
from vitrail.model.parts.block import Block
from vitrail.model.parts.tokens import Passage, Tokens


class TomePolicy(ReducingPolicy):
    """Merges patches in every block, or in those that `layers` names. Raises `ValueError` where there are too few."""

    config: Tome
    setting = "r"

    def __init__(self, config: Tome, trunk: TrunkConfig, blocks: Sequence[Block], prefix: int) -> None:
        super().__init__(config, trunk, blocks, prefix)
        self.layers = self.checked(config.layers) or tuple(range(self.depth))

    def begin(self, tokens: Tokens) -> Passage:
        return _Merging(self, tokens)

    def merges(self, i: int) -> int:
        """Patches that block i should merge away.

        Fractions are carried from one merging block to the next, so that all together merge away r times their number;
        the authors' code cuts them off in every block.
        """
        count = len(self.layers)
        decreasing = self.config.schedule == "decreasing" and count > 1

        def upto(merging: int) -> int:
            total = self.millionths * merging
            total = total * (2 * count - 1 - merging) // (count - 1) if decreasing else total
            return (total + ROUNDING) // MILLION

        done = sum(layer < i for layer in self.layers)
        return upto(done + 1) - upto(done) if i in self.layers else 0

    @property
    def at(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.depth) if self.merges(i))

    def levels(self, patches: int) -> list[float]:
        return [total / len(self.layers) for total in range(patches * len(self.layers), -1, -1)]

    def left(self, i: int, patches: int) -> int:
        return patches - min(self.merges(i), patches // 2)

    def own_macs(self, entering: Tensor, trunk: TrunkConfig, prefix: int, *, scores: bool) -> Tensor:
        half = ((entering - prefix) / 2).floor()
        return half * (entering - prefix - half) * (trunk.width // trunk.heads)


class _Merging(ReducingPassage):
    policy: TomePolicy
    size: Tensor | None = None

    def reduce(self, tokens: Tokens, branch: Tensor, left: int, q: Tensor, k: Tensor) -> Tokens:
        r = tokens.sequence.shape[1] - tokens.prefix - left
        x, self.size, index = merge_similar(tokens.sequence, branch, k, r, tokens.prefix, self.size, tokens.index)
        return replace(tokens, sequence=x, index=index, size=self.size if self.policy.config.proportional else None)

    def end(self, tokens: Tokens) -> Tokens:
        return super().end(replace(tokens, size=self.size))  # for heads that pool
