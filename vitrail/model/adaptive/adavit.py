"""AdaViT: before each block a small network selects patches, heads and branches (Meng et al. 2022, arXiv 2111.15668).

A token that is dropped in a block bypasses it and may be kept again in the next one. Tokens x [batch, tokens, width];
gates are 0 or 1: of tokens [batch, tokens], of heads [batch, heads], of the two branches [batch, 2].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.kernels.packing import pack
from vitrail.kernels.ragged_attention import ragged_attention
from vitrail.model.config import Adavit, TrunkConfig
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.parts.block import Block, TokenBatchNorm, added
from vitrail.model.parts.tokens import AdaptivePolicy, Passage, Probe, Tokens, Trace, show_kept

KEPT_AT_START = 3.0  # initial logit: 95 of 100 are kept in training, all at test time


@dataclass
class Gates:
    """What an image gets of a block: 0 or 1 each, with a straight-through gradient where one is wanted."""

    tokens: Tensor  # [batch, tokens]; prefix tokens always, padding never
    heads: Tensor  # [batch, heads]
    branches: Tensor  # [batch, 2]: mixing, channels


class Decision(nn.Module):
    """Logits of keeping: of a patch from its own token, of heads and branches from the class token.

    Biases start at 3 and weights near 0, so that training begins with 95 % kept, whatever the image.
    """

    edge_layers = ("patches", "heads", "branches")

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Linear(width, 1)
        self.heads = nn.Linear(width, heads)
        self.branches = nn.Linear(width, 2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.patches, self.heads, self.branches):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.constant_(layer.bias, KEPT_AT_START)

    def forward(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [batch, patches], [batch, heads] and [batch, 2], in float32 at least."""
        first, wide = tokens.token(0), torch.promote_types(tokens.sequence.dtype, torch.float32)
        return self.patches(tokens.patches)[..., 0].to(wide), self.heads(first).to(wide), self.branches(first).to(wide)


class AdavitPolicy(AdaptivePolicy):
    """Learned gates of every block but the first `whole`. In training they are drawn, at test time thresholded.

    `differentiable` says whether gates pass gradients on (straight through, by the sigmoid at the temperature); none:
    in training. True in evaluation gives the gradient of exactly the decisions taken there, which an attack needs.

    Where no gradient is wanted, rows of dropped tokens and of images whose branch is off are not computed on CUDA
    (`form`). Heads are always computed together: a head that is off saves no time here and is only counted as saved.

    An image that is no number keeps its prefix tokens alone and stays no number; others are not touched. Raises
    `ValueError` for blocks that gates do not fit: other mixers than softmax, no channel branch, local patch
    interaction, parallel branches, BatchNorm.
    """

    def __init__(self, config: Adavit, trunk: TrunkConfig, blocks: Sequence[Block], prefix: int) -> None:
        super().__init__()
        if not prefix:
            raise ValueError("adavit asks the class token about heads and branches; use a head with one: class_token")
        for block in blocks:
            if not isinstance(block, Block):
                raise ValueError("adavit works in plain blocks, one after the other: parallel must be 1")
            if not (isinstance(block.attn, SoftmaxMixer) and block.attn.fused):
                raise ValueError("adavit switches heads of softmax attention; the mixer must be softmax")
            if block.mlp is None:
                raise ValueError("adavit switches a mixing and a channel branch: mlp_ratio must not be 0")
            if block.local_mp is not None:
                raise ValueError("adavit leaves holes in the grid, which local patch interaction cannot read")
            if isinstance(block.norm1, TokenBatchNorm):
                raise ValueError("dropped tokens would count in the statistics of BatchNorm; use norm layernorm")
        if config.whole >= len(blocks):
            raise ValueError(f"adaptive.whole: {config.whole} of {len(blocks)} blocks are never cut: nothing to decide")
        self.config = config
        self.differentiable: bool | None = None
        cut = range(config.whole, len(blocks))
        self.decisions = nn.ModuleDict({str(i): Decision(trunk.width, trunk.heads) for i in cut})

    def begin(self, tokens: Tokens) -> Passage:
        return _Gated(self)

    @property
    def passes_gradients(self) -> bool:
        return self.training if self.differentiable is None else self.differentiable

    def gates(self, i: int, tokens: Tokens) -> Gates | None:
        """The decisions before block i; none where it is never cut."""
        if str(i) not in self.decisions:
            return None
        patches, heads, branches = cast("Decision", self.decisions[str(i)])(tokens)
        kept = self._gate(patches, self.config.patch_threshold)
        kept = torch.cat([kept.new_ones(len(kept), tokens.prefix), kept], 1)
        if tokens.mask is not None:
            kept = kept * tokens.mask
        threshold = self.config.threshold
        return Gates(kept, self._gate(heads, threshold), self._gate(branches, threshold))

    def _gate(self, logits: Tensor, threshold: float) -> Tensor:
        if self.training:
            even = torch.rand_like(logits).clamp(1e-7, 1 - 1e-7)
            logits = logits + (even.log() - (-even).log1p())  # the difference of two Gumbel variables is logistic
            hard = logits > 0
        else:
            hard = logits.sigmoid() > threshold
        gate = hard.to(logits.dtype)
        if not self.passes_gradients:
            return gate
        soft = (logits / self.config.temperature).sigmoid()
        return gate + (soft - soft.detach())

    def losses(self, trace: Trace) -> dict[str, Tensor]:
        """Squared differences of the shares of patches, heads and branches from their targets, weighted."""
        config, total = self.config, trace.losses["patches"].new_zeros(())
        for name, target in (("patches", config.patches), ("heads", config.heads), ("branches", config.branches)):
            share = trace.losses[name]
            share = share.mean() if config.usage_of == "batch" else share
            total = total + (share - target).square().mean()
        return {"usage": config.usage * total}


class _Gated(Passage):
    def __init__(self, policy: AdavitPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.shares: dict[str, list[Tensor]] = {"patches": [], "heads": [], "branches": []}

    def run(self, block: Block, i: int, tokens: Tokens, probe: Probe | None) -> Tokens:
        gates = self.policy.gates(i, tokens)
        if gates is None:
            count = tokens.counts()
            self.used(block, count, count)
            self._share(torch.ones_like(count), torch.ones_like(count), torch.ones_like(count))
            show_kept(probe, i, tokens)
            return block(tokens, probe)
        kept = gates.tokens.detach()
        count = kept.sum(1).float()
        self.used(block, count, count, gates.heads.detach().sum(1).float(), gates.branches.detach().float())
        patches = tokens.counts() - tokens.prefix
        self._share(gates.tokens[:, tokens.prefix :].sum(1) / patches, gates.heads.mean(1), gates.branches.mean(1))
        show_kept(probe, i, replace(tokens, mask=kept > 0))
        if self._packs(block, i, tokens, probe):
            return tokens.but(_packed(block, tokens, gates))
        return tokens.but(self._dense(block, i, tokens, gates, probe))

    def end(self, tokens: Tokens) -> Tokens:
        self.losses |= {name: torch.stack(shares).mean(0) for name, shares in self.shares.items() if shares}
        return super().end(tokens)

    def _share(self, patches: Tensor, heads: Tensor, branches: Tensor) -> None:
        for name, value in (("patches", patches), ("heads", heads), ("branches", branches)):
            self.shares[name].append(value)

    def _packs(self, block: Block, i: int, tokens: Tokens, probe: Probe | None) -> bool:
        probed = probe is not None and probe.concerns(*(f"{kind}.{i}" for kind in (*block.attn.shows, "keep")))
        if probed or torch.is_grad_enabled() or block.training or torch.compiler.is_compiling():
            return False
        x, form = tokens.sequence, self.policy.config.form
        if x.is_meta or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        return form == "packed" or (form == "auto" and x.is_cuda)

    def _dense(self, block: Block, i: int, tokens: Tokens, gates: Gates, probe: Probe | None) -> Tensor:
        x, keep = tokens.sequence, (None, None) if probe is None else probe.keep(i)
        mixed = _mixed(block, i, tokens, gates, probe)
        branch = block.drop_path(block.ls1(mixed), keep[0])
        x = added(x, branch * (gates.tokens * gates.branches[:, :1])[..., None].to(branch.dtype))
        gate = (gates.tokens * gates.branches[:, 1:])[..., None].to(x.dtype)
        x = block.after_channels(x, keep[1], gate)
        return x if probe is None else probe(f"tokens.{i}", x)


def _mixed(block: Block, i: int, tokens: Tokens, gates: Gates, probe: Probe | None) -> Tensor:
    """The mixing operation on all tokens, kept ones and the token itself as keys, heads times their gates."""
    mixer, x = cast("SoftmaxMixer", block.attn), tokens.sequence
    q, k, v = mixer.shown(block.norm1(x), tokens, i, probe)
    seen = (gates.tokens.detach() > 0)[:, None, None]
    if gates.tokens.requires_grad:
        # What a dropped token would get is multiplied by 0, but its gate learns from it: it sees itself, too.
        seen = seen | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    attention = None
    if probe is not None:
        bare = replace(tokens, mask=None)
        attention = probe.map(
            f"attention.{i}", lambda: mixer.scores(q, k, bare).masked_fill(~seen, float("-inf")).softmax(-1)
        )
    drop = mixer.attention_drop if mixer.training else 0.0
    if attention is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=drop)
    else:
        out = F.dropout(attention, drop, mixer.training).to(v) @ v
    return mixer.leave(out * gates.heads[..., None, None].to(out.dtype))


def _packed(block: Block, tokens: Tokens, gates: Gates) -> Tensor:
    """The block on those rows alone that a gate lets in; the others are what they were."""
    mixer, x = cast("SoftmaxMixer", block.attn), tokens.sequence
    kept, on = gates.tokens > 0, gates.branches > 0
    inside = kept & on[:, :1], kept & on[:, 1:]
    sizes = torch.stack([inside[0].sum(), inside[1].sum(), kept.sum(1).amax()])
    mixing, channels, most = (int(n) for n in sizes.tolist())  # one synchronisation per block
    flat = x.flatten(0, 1)
    if mixing:
        rows, offsets, place = pack(x, inside[0], mixing)
        out = ragged_attention(mixer.packed(block.norm1(rows)), offsets, most=most)
        out = out * gates.heads[place // x.shape[1], :, None].to(out.dtype)
        flat = flat.index_copy(0, place, block.after_mixing(rows, mixer.proj(out.flatten(1))))
    if channels:
        rows, _, place = pack(flat.view_as(x), inside[1], channels)
        flat = flat.index_copy(0, place, block.after_channels(rows))
    return flat.view_as(x)
