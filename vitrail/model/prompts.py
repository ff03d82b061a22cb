"""Visual prompts: learned tokens next to the patches of a trunk (Jia et al. 2022, arXiv 2203.12119)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.adapters.quantise import straight_through
from vitrail.model.parts.tokens import Tokens


class Prompts(nn.Module):
    """Tokens without positions between class tokens and patches. They leave before the final norm: no head sees them.

    values [layers, count, width]. One layer (shallow): they enter before the first block, and what becomes of them goes
    on through the others. One layer per block (deep): before every block their places are filled anew. `tokens.LAYER`
    is captured without them. q, k, v and maps have places for them, rows that sum to 1 only with these, so they are
    neither shown nor replaced. `drop` is dropout in training, `bits` rounds (none: not).
    """

    def __init__(
        self, layers: int, count: int, width: int, patch: int, drop: float = 0.0, bits: int | None = None
    ) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(layers, count, width))
        self.bound = math.sqrt(6 / (3 * patch**2 + width))  # Xavier's, as if they came out of the patch embedding
        self.drop, self.bits = drop, bits
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.values, -self.bound, self.bound)

    @property
    def count(self) -> int:
        return int(self.values.shape[1])

    @property
    def deep(self) -> bool:
        return len(self.values) > 1

    def enter(self, tokens: Tokens) -> Tokens:
        """Before the first block. While they are among the tokens, they count as part of the prefix."""
        assert tokens.mask is None  # only adaptive policies mask or pack, and these take no prompts
        assert tokens.offsets is None
        return self._among(tokens, self._filled(tokens, 0))

    def renew(self, tokens: Tokens, layer: int) -> Tokens:
        """Before another block: filled anew where that one has its own, otherwise as the last one left them."""
        return self._among(self.leave(tokens), self._filled(tokens, layer)) if self.deep else tokens

    def leave(self, tokens: Tokens) -> Tokens:
        """The tokens without them."""
        x, own = tokens.sequence, tokens.prefix - self.count
        return replace(tokens, sequence=torch.cat([x[:, :own], x[:, tokens.prefix :]], 1), prefix=own)

    def shown(self, tokens: Tokens) -> tuple[Tensor, Tokens]:
        """What is captured of a layer, and the same tokens made of it: gradients by what is captured are asked for."""
        bare = self.leave(tokens)
        return bare.sequence, self._among(bare, tokens.sequence[:, bare.prefix : tokens.prefix])

    def _filled(self, tokens: Tokens, layer: int) -> Tensor:
        values = straight_through(self.values[layer : layer + 1], self.bits).expand(len(tokens.sequence), -1, -1)
        return F.dropout(values, self.drop, self.training).to(tokens.sequence.dtype)

    def _among(self, tokens: Tokens, values: Tensor) -> Tokens:
        x, own = tokens.sequence, tokens.prefix
        return replace(tokens, sequence=torch.cat([x[:, :own], values, x[:, own:]], 1), prefix=own + self.count)

    @staticmethod
    def refuse(want: Iterable[str], given: Mapping[str, object]) -> None:
        """Raises `ValueError` for intermediates that have places for prompts."""
        odd = [name for name in want if not name.startswith("tokens.")]
        odd += [name for name in given if not name.startswith("keep.")]
        if odd:
            raise ValueError(
                f"{', '.join(sorted(odd))}: a trunk with prompts shows tokens.LAYER alone and lets nothing be replaced"
                " (its q, k, v and maps have places for prompts); take a model without prompts"
            )
