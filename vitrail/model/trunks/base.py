"""The contract of trunks: images to tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from vitrail.model.parts.tokens import Given, Tokens

CHECKPOINTING = "engine.activation_checkpointing"


class BaseTrunk(nn.Module):
    """Images to tokens: `encode(embed(images))`.

    `width`: of the tokens. `layers`: depth, for layer-wise decay. `own_head`: prefixes of parameters inside the trunk
    that are its own classifier's. `takes_prompts`: visual prompts can be put before its blocks. `opaque`: the error
    where intermediates are asked for that it does not have.
    """

    width: int
    layers: int = 0
    own_head: tuple[str, ...] = ()
    takes_prompts: bool = False
    host_decision: str = ""
    opaque: str = "this trunk gives no intermediates"

    def embed(self, images: Tensor) -> Tokens:
        """Images [batch, 3, height, width] to tokens before the first block."""
        raise NotImplementedError

    def encode(
        self,
        tokens: Tokens,
        want: Collection[str] = (),
        given: Mapping[str, Given] | None = None,
        until: int | None = None,
    ) -> tuple[Tokens, dict[str, Tensor]]:
        """Final tokens, and the intermediates that `want` names; `given` replaces some; `until` stops early."""
        if want or given or until is not None:
            raise ValueError(self.opaque)
        return tokens, {}

    @property
    def intermediates(self) -> Sequence[str]:
        """Every name that `want` knows."""
        return ()

    def checkpoint_blocks(self) -> None:
        """Compute activations of every block again in the backward pass. Raises `ValueError` where it cannot be."""
        raise ValueError(f"{CHECKPOINTING}: this trunk has no blocks that can be computed again; use none")

    def allow_checkpointing(self, part: nn.Module) -> None:
        """Raises `ValueError` where computing `part` again would count a batch twice; else there is no CUDA graph."""
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in part.modules()):
            raise ValueError(f"{CHECKPOINTING}: batch norms would update their statistics twice per step; use none")
        self.host_decision = "activation checkpointing sets random generators"

    def layer_of(self, name: str) -> int:
        """Depth of a parameter for layer-wise decay; 0 is the embedding."""
        return 0
