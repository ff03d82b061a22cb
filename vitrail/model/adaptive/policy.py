"""Base class of adaptive policies: how a batch passes through the blocks of a trunk."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.model.parts.block import Block
from vitrail.model.parts.tokens import BlockUse, Probe, Tokens, Trace


class AdaptivePolicy(nn.Module):
    """Decides what of each block an image gets. Parameters, if it has any, are trained with the trunk."""

    @property
    def static(self) -> bool:
        """Whether inference is the same device work for all images of a size, so that a CUDA graph may hold it."""
        return False

    def begin(self, tokens: Tokens) -> Passage:
        """The way of one batch: a new object for every forward pass, so that nothing is left from the last one."""
        raise NotImplementedError

    def losses(self, trace: Trace) -> dict[str, Tensor]:
        """Losses of the policy itself, by name and already weighted."""
        return {}


class Passage:
    """One batch on its way: `run` for each block in order, then `end`, which hands over the trace."""

    def __init__(self) -> None:
        self.blocks: list[BlockUse] = []
        self.losses: dict[str, Tensor] = {}
        self.overflow: Tensor | None = None

    def run(self, block: Block, i: int, tokens: Tokens, probe: Probe | None) -> Tokens:
        raise NotImplementedError

    def end(self, tokens: Tokens) -> Tokens:
        """Tokens for the final norm, with the trace."""
        tokens.trace = Trace(tuple(self.blocks), self.losses, self.overflow)
        return tokens

    def used(
        self,
        block: Block,
        entering: Tensor,
        leaving: Tensor,
        heads: Tensor | None = None,
        mixing: Tensor | None = None,
        channels: Tensor | None = None,
    ) -> None:
        """Write down one block; what is not given was used whole."""
        one = torch.ones_like(entering)
        all_heads = one * float(getattr(block.attn, "heads", 1))
        self.blocks.append(
            BlockUse(
                entering,
                leaving,
                all_heads if heads is None else heads,
                one if mixing is None else mixing,
                one if channels is None else channels,
            )
        )


def show_kept(probe: Probe | None, i: int, tokens: Tokens) -> None:
    """Let a probe see which of the original patches are left after block i: `kept.i`, [batch, patches], 0 or 1."""
    if probe is not None and f"kept.{i}" in probe.want:
        probe(f"kept.{i}", tokens.kept())
