"""Multiply-accumulates of an adaptive forward pass, computed from its trace."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from vitrail.model.adaptive.adavit import AdavitPolicy
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.adaptive.trace import BlockUse, Trace
from vitrail.model.block import Block
from vitrail.model.cost import NORM_COST, cost
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.tokens import Probe, Tokens

if TYPE_CHECKING:
    from vitrail.model.classifier import Classifier
    from vitrail.model.trunk import Trunk

Scores = Literal["all", "kept"]
M = TypeVar("M", bound=nn.Module)


def trace_macs(
    model: Classifier,
    trace: Trace,
    *,
    image_size: int | None = None,
    scores: Scores = "all",
    norms: bool = False,
    fixed: int | None = None,
) -> Tensor:
    """Multiply-accumulates that each image took, [batch], float64 on the CPU (whole numbers are exact).

    A block in which tokens are sampled counts scores of all tokens, as the paper does; `scores="kept"` counts what is
    computed here, the class token's row once more (not for uniform sampling) and those of the tokens that stay. Heads
    and branches that are off count nothing, and the decisions of AdaViT are added. `norms` adds five operations for
    each element of a LayerNorm, as `cost` does. Where everything was kept, the sum is `cost(...)` of the same model
    without a policy.

    `image_size` is that of the traced images (none: the model's own); `fixed` is `fixed_macs` of it, for whoever calls
    this for many batches. The head is counted with all tokens, also where fewer reach it. Raises `ValueError` where
    blocks are not plain ones with softmax attention.
    """
    trunk, size = cast("Trunk", model.trunk), image_size or model.preprocess.size
    blocks = cast("list[Block]", list(trunk.blocks))
    if len(trace.blocks) != len(blocks):
        raise ValueError(f"a trace of {len(trace.blocks)} blocks is not of a whole pass through {len(blocks)}")
    used = [_exact(use) for use in trace.blocks]
    total = torch.full_like(used[0].entering, fixed_macs(model, size, norms=norms) if fixed is None else fixed)
    policy = model.policy
    for i, (block, use) in enumerate(zip(blocks, used, strict=True)):
        more = torch.zeros_like(total)
        if isinstance(policy, AtsPolicy) and i in policy.at:
            asked = use.entering if policy.config.score == "column" else torch.ones_like(total)
            asked = torch.zeros_like(total) if policy.config.sampling == "uniform" else asked
            more = use.leaving + asked - use.entering if scores == "kept" else more
        total = total + _block_macs(block, use, use.entering + more, norms)
    if isinstance(policy, AtsPolicy) and norms and isinstance(trunk.norm, nn.LayerNorm):
        total = total - NORM_COST * trunk.width * (used[0].entering - used[-1].leaving)
    return total


def macs_of_mean(
    model: Classifier,
    trace: Trace,
    *,
    image_size: int | None = None,
    scores: Scores = "all",
    norms: bool = False,
) -> float:
    """Multiply-accumulates of an image that has the mean counts of the batch in every block, as published tables have.

    Attention grows with the square of the tokens, so the mean over images of what each took is at least that much
    (Jensen) where as many leave a block as enter it and nothing else varies: A-ViT. Elsewhere it mostly is.
    """
    means = [
        BlockUse(*(getattr(u, f.name).mean(0, keepdim=True) for f in fields(u))) for u in map(_exact, trace.blocks)
    ]
    return float(trace_macs(model, Trace(tuple(means)), image_size=image_size, scores=scores, norms=norms))


def fixed_macs(model: Classifier, image_size: int | None = None, *, norms: bool = False) -> int:
    """Multiply-accumulates that no policy can save: stem, final norm, head, and the policy's own layers."""
    trunk, size = cast("Trunk", model.trunk), image_size or model.preprocess.size
    bare, bare_trunk = _shallow(model), _shallow(trunk)
    bare_trunk.blocks, bare_trunk.policy = nn.ModuleList([_Nothing()]), None
    bare.trunk = bare_trunk
    total = cost(bare, size, norms=norms).macs
    if isinstance(model.policy, AdavitPolicy):
        rows, columns = trunk.patch_embed.grid(size, size)
        logits = rows * columns + trunk.config.heads + 2
        total += len(model.policy.decisions) * logits * trunk.width
    return total


def _block_macs(block: Block, use: BlockUse, rows: Tensor, norms: bool) -> Tensor:
    """Of one block, [batch]; `rows` are the queries whose scores count."""
    mixer = block.attn if isinstance(block, Block) else None
    if not (isinstance(mixer, SoftmaxMixer) and mixer.fused) or block.local_mp is not None:
        raise ValueError("multiply-accumulates of a trace are known for plain blocks with softmax attention only")
    n_in, n_out, width = use.entering, use.leaving, mixer.proj.in_features
    mixed = width * use.heads / mixer.heads
    mixing = 3 * n_in * width * mixed + rows * n_in * mixed + n_out * n_in * mixed + n_out * mixed * width
    hidden = 0 if block.mlp is None else block.mlp.fc1.out_features
    channels = 2 * n_out * width * hidden
    if norms and isinstance(block.norm1, nn.LayerNorm):
        mixing = mixing + NORM_COST * n_in * width
    if norms and isinstance(block.norm2, nn.LayerNorm):
        channels = channels + NORM_COST * n_out * width
    return use.mixing * mixing + use.channels * channels


def _exact(use: BlockUse) -> BlockUse:
    """Counts in which sums of 10^15 are exact, on the CPU."""
    return BlockUse(*(getattr(use, f.name).detach().to("cpu", torch.float64) for f in fields(use)))


class _Nothing(nn.Module):
    """In the place of all blocks."""

    def forward(self, tokens: Tokens, probe: Probe | None = None) -> Tokens:
        return tokens


def _shallow(module: M) -> M:
    """The same module with a list of parts of its own, so that parts can be exchanged; weights are shared."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made
