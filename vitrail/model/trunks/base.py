"""What a classifier needs of a trunk."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from vitrail.model.parts.tokens import Tokens


class BaseTrunk(nn.Module):
    """Images to tokens: `encode(embed(images))`.

    `width`: of the tokens. `own_head`: prefixes of parameters inside the trunk that are its own classifier's.
    """

    width: int
    layers: int = 0  # depth, for layer-wise decay
    own_head: tuple[str, ...] = ()

    def embed(self, images: Tensor) -> Tokens:
        """Images [batch, 3, height, width] to tokens before the first block."""
        raise NotImplementedError

    def encode(
        self,
        tokens: Tokens,
        want: Collection[str] = (),
        given: Mapping[str, Tensor] | None = None,
        until: int | None = None,
    ) -> tuple[Tokens, dict[str, Tensor]]:
        """Final tokens, and the intermediates that `want` names; `given` replaces some; `until` stops early."""
        raise NotImplementedError

    @property
    def intermediates(self) -> Sequence[str]:
        """Every name that `want` knows."""
        return ()

    def layer_of(self, name: str) -> int:
        """Depth of a parameter for layer-wise decay; 0 is the embedding."""
        return 0
