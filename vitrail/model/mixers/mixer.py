"""Base class of all mixers: tokens in, tokens out, and the names of the intermediates they expose."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from vitrail.model.tokens import Probe, Tokens


class Mixer(nn.Module):
    """`forward(x, tokens, layer, probe)` mixes x [batch, tokens, width]; `tokens` tells prefix, grid and mask.

    `shows` names the intermediates that can be captured or replaced. `takes_prefix` is false where class tokens would
    not learn from patches. `takes_packed`: x may be packed [capacity, width]; otherwise it is padded at the door.
    `attention_products`: its matrix products of tokens with tokens are attention's own (counted
    apart by `cost`).
    """

    shows: ClassVar[tuple[str, ...]] = ()
    takes_prefix: ClassVar[bool] = True
    takes_packed: ClassVar[bool] = False
    attention_products: ClassVar[bool] = False

    def forward(self, x: Tensor, tokens: Tokens, layer: int = 0, probe: Probe | None = None) -> Tensor:
        raise NotImplementedError

    def last_linear(self) -> nn.Module | None:
        """The layer whose output is the branch, where a gain can be folded in."""
        return None
