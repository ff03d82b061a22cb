"""A-ViT: every token halts on its own, when the scores in its first channel add up to 1.

Yin et al. 2022, arXiv 2112.07658. A token's output is the mean of its block outputs, weighted by its halting scores;
the block at which it halts gets the remainder to 1. Halted tokens are neither updated nor attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels.packing import compact, owners
from vitrail.model.config import Avit, TrunkConfig
from vitrail.model.mixers.linear_attention import SimaMixer
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.parts.block import Block, TokenBatchNorm
from vitrail.model.parts.tokens import AdaptivePolicy, Passage, Probe, Tokens, Trace, show_kept

EARLY = 0.98  # of all halting, that the prior wants before its centre
LEAST, MOST = 0.01, 0.99  # within which halting scores are compared with the prior


class AvitPolicy(AdaptivePolicy):
    """Lets tokens halt, class tokens like any other. Nothing is learned but the channel that the trunk gives up for it.

    An image that is no number stays no number; others of its batch are not touched. Raises `ValueError` for blocks in
    which a halted token would still be felt: other mixers than softmax, talking heads and SimA, local patch
    interaction, parallel branches, BatchNorm.
    """

    def __init__(self, config: Avit, trunk: TrunkConfig, blocks: Sequence[Block], prefix: int) -> None:
        super().__init__()
        self.config, self.depth = config, len(blocks)
        for block in blocks:
            if not isinstance(block, Block):
                raise ValueError("avit works in plain blocks, one after the other: parallel must be 1")
            if not isinstance(block.attn, (SoftmaxMixer, SimaMixer)):
                raise ValueError(
                    "avit takes halted tokens out of attention; use the mixer softmax, talking_heads or sima"
                )
            if block.local_mp is not None:
                raise ValueError("avit leaves holes in the grid, which local patch interaction cannot read")
            if isinstance(block.norm1, TokenBatchNorm):
                raise ValueError("halted tokens would count in the statistics of BatchNorm; use norm layernorm")
        center = config.prior_center
        self.center = round(self.depth * 2 / 3) if center is None else center
        if center is not None and not 1 <= center < self.depth:
            raise ValueError(f"adaptive.prior_center: {center}, but it must be from 1 to {self.depth - 1}")

    def begin(self, tokens: Tokens) -> Passage:
        return _Halting(self, tokens)

    def scores(self, x: Tensor) -> Tensor:
        """Halting scores of tokens [..., width], in float32 at least: a function of their first channel."""
        return torch.sigmoid(self.config.gate_scale * x[..., 0].to(_wide(x)) - self.config.gate_center)

    def halting_prior(self, like: Tensor) -> Tensor:
        """When tokens should halt, a distribution [depth] on the device of `like`.

        Gaussian densities at 0 to depth - 1, those before the centre scaled to a sum of 0.98, those from it on to 0.02.
        Published for 12 blocks and centre 8; in general the centre is at two thirds of the depth. One factor for all
        would give the first 8 the same sum, but a prior of more than 3 in all, and a divergence that can be negative.
        """
        layer = torch.arange(self.depth, device=like.device, dtype=like.dtype)
        bell = -0.5 * ((layer - self.center) / self.config.prior_std).square()
        early, late = bell[: self.center].softmax(0), bell[self.center :].softmax(0)
        return torch.cat([EARLY * early, (1 - EARLY) * late]) if len(late) else early

    def losses(self, trace: Trace) -> dict[str, Tensor]:
        """`ponder`: blocks that a token takes plus the remainder, mean over tokens and images. `prior`: the
        divergence of each image's mean halting scores, scaled to sum 1, from the prior; mean over images."""
        halting = trace.losses["halting"]
        halting = (halting / halting.sum(1, keepdim=True).clamp_min(1e-6)).clamp(LEAST, MOST)
        prior = self.halting_prior(halting).expand_as(halting)
        return {
            "ponder": self.config.ponder * trace.losses["ponder"].mean(),
            "prior": self.config.prior * F.kl_div(halting.log(), prior, reduction="batchmean"),
        }


class _Halting(Passage):
    """Sums are kept for all tokens, [batch, tokens]; the state of those on their way lies as they do.

    That is: as they came (dense, [batch, tokens]), or as rows of one table (packed, [rows]). `place` then says where in
    the batch laid end to end each row was.
    """

    def __init__(self, policy: AvitPolicy, tokens: Tokens) -> None:
        super().__init__()
        self.policy, self.start = policy, tokens
        x = tokens.sequence
        shape, device = x.shape[:2], x.device
        self.all = tokens.mask is None  # no token is missing: no mask is needed
        self.real = torch.ones(shape, dtype=torch.bool, device=device) if tokens.mask is None else tokens.mask
        self.count = self.real.sum(1, dtype=torch.float32)
        self.place: Tensor | None = None
        self.out = torch.zeros(x.shape, dtype=_wide(x), device=device)
        self.ponder = torch.zeros(shape, dtype=_wide(x), device=device)
        self.alive, self.spent = self.real, torch.zeros_like(self.ponder)
        self.halting: list[Tensor] = []

    def run(self, block: Block, i: int, tokens: Tokens, probe: Probe | None) -> Tokens:
        if not self.all and self._may_cut(block, probe):
            tokens = self._packed(tokens)
        alive = self._counts(self.alive.float(), tokens)
        self.used(block, alive, alive)
        if self.alive.numel():
            y = block(self._input(tokens), probe).sequence
            kept = self._halt(y, tokens, last=i == self.policy.depth - 1)
            tokens = replace(tokens, sequence=y, mask=None if tokens.offsets is not None else self.alive)
        else:
            kept = self.alive
            self.halting.append(self.ponder.new_zeros(len(self.count)))
        if probe is not None and f"kept.{i}" in probe.want:
            show_kept(probe, i, replace(self.start, mask=self._everywhere(kept)))
        return tokens

    def end(self, tokens: Tokens) -> Tokens:
        if len(self.blocks) < self.policy.depth:  # stopped before the last block: what was computed last is the end
            self._add(tokens.sequence, torch.where(self.alive, 1 - self.spent, 0.0), torch.zeros_like(self.spent))
        ponder = self.ponder.masked_fill(~self.real, 0.0).sum(1) / self.count
        halting = torch.stack(self.halting, 1) if self.halting else self.out.new_zeros(len(self.count), 0)
        self.losses |= {"ponder": ponder, "halting": halting}
        return super().end(self.start.but(self.out.to(self.start.sequence.dtype)))

    def _input(self, tokens: Tokens) -> Tokens:
        """Tokens for a block: halted ones are zeros and masked as keys."""
        if tokens.offsets is not None or self.all:
            return replace(tokens, mask=None)
        # An image without any is computed with all, since a softmax over nothing is NaN; its result is not used.
        mask = self.alive | ~self.alive.any(1, keepdim=True)
        return replace(tokens, sequence=tokens.sequence.masked_fill(~self.alive[..., None], 0.0), mask=mask)

    def _halt(self, y: Tensor, tokens: Tokens, last: bool) -> Tensor:
        """Count block output y [..., width] in; returns which tokens have not halted by their own scores."""
        alive, left = self.alive, 1 - self.spent
        h = torch.ones_like(left) if last else self.policy.scores(y)
        h = torch.where(alive, h, 0.0)
        self.halting.append(self._counts(h, tokens) / self.count)
        self.spent = self.spent + h
        stop = alive if last else alive & (self.spent > 1 - self.policy.config.eps)
        self._add(y, torch.where(stop, left, h), alive + torch.where(stop, left, 0.0))
        self.alive, self.all = alive & ~stop, False
        return alive if last else self.alive

    def _add(self, y: Tensor, weight: Tensor, ponder: Tensor) -> None:
        part = y.to(weight.dtype) * weight[..., None]
        if self.place is None:
            self.out, self.ponder = self.out + part, self.ponder + ponder
            return
        self.out.flatten(0, 1).index_add_(0, self.place, part)  # each token once; without gradients, so in place
        self.ponder.flatten().index_add_(0, self.place, ponder)

    def _counts(self, values: Tensor, tokens: Tokens) -> Tensor:
        """Sum of values over the tokens of each image, [batch]."""
        if tokens.offsets is None:
            return values.sum(1)
        return values.new_zeros(len(self.count)).index_add(0, owners(tokens.offsets, len(values))[0], values)

    def _everywhere(self, kept: Tensor) -> Tensor:
        """Flags of tokens on their way as flags of all tokens, [batch, tokens]."""
        if self.place is None:
            return kept
        return torch.zeros_like(self.real).flatten().index_copy(0, self.place, kept).view_as(self.real)

    def _may_cut(self, block: Block, probe: Probe | None) -> bool:
        """Whether halted tokens can really be removed: none is requested or differentiated, shapes may change."""
        if probe is not None and any(not name.startswith("kept.") for name in (*probe.want, *probe.given)):
            return False
        if torch.is_grad_enabled() or block.training or torch.compiler.is_compiling() or self.alive.is_meta:
            return False
        captured = self.alive.is_cuda and torch.cuda.is_current_stream_capturing()
        return self.policy.config.form != "padded" and not captured

    def _packed(self, tokens: Tokens) -> Tokens:
        batch, count = self.real.shape
        if tokens.offsets is None:
            offsets = torch.arange(0, batch * count + 1, count, device=self.real.device)
            x, place = tokens.sequence.flatten(0, 1), torch.arange(batch * count, device=offsets.device)
            alive, spent = self.alive.flatten(), self.spent.flatten()
        else:
            assert self.place is not None
            offsets, x, place, alive, spent = tokens.offsets, tokens.sequence, self.place, self.alive, self.spent
        each = torch.zeros_like(self.count).index_add(0, place // count, alive.float())
        rows, most = (int(v) for v in torch.stack([each.sum(), each.max()]).tolist())
        if rows == len(x):
            self.all = tokens.offsets is None
            return tokens
        index, offsets, _ = compact(alive, offsets, rows)
        self.place, self.alive, self.spent = place[index], alive[index], spent[index]
        return replace(tokens, sequence=x[index], mask=None, index=None, offsets=offsets, most=most)


def _wide(x: Tensor) -> torch.dtype:
    """Scores and sums are kept in this, whatever the stream is in."""
    return torch.promote_types(x.dtype, torch.float32)
