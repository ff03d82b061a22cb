"""Token merging: which patch tokens join which, and the means that replace them (Bolya et al. 2023, arXiv 2210.09461).

`slots` [batch, tokens] says where each token goes among those that are left: a token that stays has a slot of its own,
in raster order after the prefix tokens; one that is merged away has the slot of the token it joins. On CUDA a merge is
two launches, of which the second also adds the residual branch.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels.covariance import without_autocast

MOST_TOKENS = 256
"""Whole numbers up to here are exact in bfloat16, so sizes are; and one program holds as many similarities."""
_TRITON = find_spec("triton") is not None


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


def match_tokens(k: Tensor, r: int, prefix: int, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Slots [batch, tokens] after r merges by keys k [batch, heads, tokens, dim], and which patch each token left is.

    `index` [batch, patches] is which patch each token was (none: patch i is token prefix + i); what is returned has r
    columns less. The first `prefix` tokens never merge; r is at most half of the others.
    """
    if able(k):
        slots, left = torch.ops.vitrail.match_tokens(k, index, r, prefix)
        return slots, left
    return plain_match_tokens(k, r, prefix, index)


def plain_match_tokens(k: Tensor, r: int, prefix: int, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same by PyTorch's own operations."""
    batch, _, tokens, _ = k.shape
    with torch.no_grad(), without_autocast(k):
        # Not divided by the number of heads: cosines have no scale.
        keys = k[:, :, prefix:].to(torch.promote_types(k.dtype, torch.float32)).sum(1)
        source, target = (pair + prefix for pair in bipartite_matching(keys, r, prefix % 2))
    kept = torch.ones(batch, tokens, dtype=torch.int64, device=k.device).scatter(1, source, 0)
    place = kept.cumsum(1) - 1
    slots = place.scatter(1, source, place.gather(1, target))
    if index is None:
        index = torch.arange(tokens - prefix, device=k.device).expand(batch, -1)
    column = place.scatter(1, source, tokens - r)[:, prefix:] - prefix  # those that are merged away: the last
    left = tokens - prefix - r
    return slots, index.new_zeros(batch, left + 1).scatter(1, column, index)[:, :left]


def merge_tokens(x: Tensor, branch: Tensor, size: Tensor | None, slots: Tensor, left: int) -> tuple[Tensor, Tensor]:
    """Means of x + branch [batch, tokens, width] over the tokens of each slot, weighted by size, and the new sizes.

    size [batch, tokens], float32 (none: 1 each) -> [batch, left, width] and [batch, left].
    """
    if slots.dtype == torch.int32:  # of the kernel
        if x.dtype == branch.dtype and able(x, branch):
            merged, total = torch.ops.vitrail.merge_tokens(x, branch, size, slots, left)
            return merged, total
        slots = slots.long()
    return plain_merge_tokens(x, branch, size, slots, left)


def plain_merge_tokens(
    x: Tensor, branch: Tensor, size: Tensor | None, slots: Tensor, left: int
) -> tuple[Tensor, Tensor]:
    """The same by PyTorch's own operations."""
    x = (x + branch).to(x.dtype)
    size = torch.ones(slots.shape, device=x.device) if size is None else size
    total = size.new_zeros(len(x), left).scatter_add(1, slots, size)
    share = (size / total.gather(1, slots)).to(x.dtype)  # exactly 1 of a token that stays alone
    rows = slots + left * torch.arange(len(x), device=x.device)[:, None]
    merged = x.new_zeros(len(x) * left, x.shape[-1])
    merged = merged.index_add(0, rows.flatten(), (x * share[..., None]).flatten(0, 1))
    return merged.view(len(x), left, -1), total


def able(*tensors: Tensor) -> bool:
    """Whether kernels take these tensors [..., tokens, channels]: half precision, on CUDA, few tokens, no gradient."""
    half = all(x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) for x in tensors)
    plain = not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    return _TRITON and half and plain and tensors[0].shape[-2] <= MOST_TOKENS and tensors[0].shape[-1] <= 1024


# Operators are declared here and call Triton when they run: torch.compile can see them without importing it.


@torch.library.custom_op("vitrail::match_tokens", mutates_args=(), device_types="cuda")
def _match_tokens(k: Tensor, index: Tensor | None, r: int, prefix: int) -> tuple[Tensor, Tensor]:
    """Slots [batch, tokens], int32, and the patches of the tokens that are left."""
    from vitrail.kernels import token_merge_triton

    return token_merge_triton.match(k, index, r, prefix)


@torch.library.custom_op("vitrail::merge_tokens", mutates_args=(), device_types="cuda")
def _merge_tokens(x: Tensor, branch: Tensor, size: Tensor | None, slots: Tensor, left: int) -> tuple[Tensor, Tensor]:
    """Means [batch, left, width] and sizes [batch, left]."""
    from vitrail.kernels import token_merge_triton

    size = None if size is None else size.contiguous()
    return token_merge_triton.merge(x.contiguous(), branch.contiguous(), size, slots, left)


def _fake_match(k: Tensor, index: Tensor | None, r: int, prefix: int) -> tuple[Tensor, Tensor]:
    batch, _, tokens, _ = k.shape
    slots = k.new_empty(batch, tokens, dtype=torch.int32)
    return slots, k.new_empty(batch, tokens - prefix - r, dtype=torch.int64)


_match_tokens.register_fake(_fake_match)
_merge_tokens.register_fake(
    lambda x, branch, size, slots, left: (
        x.new_empty(len(x), left, x.shape[-1]),
        x.new_empty(len(x), left, dtype=torch.float32),
    )
)
