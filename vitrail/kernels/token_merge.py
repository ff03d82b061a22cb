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


def merge_similar(
    x: Tensor, branch: Tensor, k: Tensor, r: int, prefix: int, size: Tensor | None = None, index: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x + branch [batch, tokens, width] with its r most similar pairs merged, by keys k [batch, heads, tokens, dim].

    size [batch, tokens], float32, is how many patches each token stands for (none: 1), and index [batch, patches] which
    patch it is (none: that of its place). Returns tokens, sizes and index of those that are left. The first `prefix`
    tokens never merge; r is at most half of the others.
    """
    if able(x, branch, k):
        merged, total, left = torch.ops.vitrail.merge_similar(x, branch, k, r, prefix, size, index)
        return merged, total, left
    slots, left = match_tokens(k, r, prefix, index)
    return *merge_tokens(x, branch, size, slots, x.shape[1] - r), left


def match_tokens(k: Tensor, r: int, prefix: int, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Slots [batch, tokens] and the index of tokens that are left, by PyTorch's own operations."""
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
    """Means of x + branch over the tokens of each slot, weighted by size, and new sizes, by the same."""
    x = (x + branch).to(x.dtype)
    size = torch.ones(slots.shape, device=x.device) if size is None else size
    if torch.compiler.is_exporting():  # threads of onnxruntime that add into one place lose sums
        shares = (slots[:, None] == torch.arange(left, device=x.device)[:, None]) * size[:, None]
        total = shares.sum(-1)
        return (shares / total[..., None]).to(x.dtype) @ x, total
    total = size.new_zeros(len(x), left).scatter_add(1, slots, size)
    share = (size / total.gather(1, slots)).to(x.dtype)  # exactly 1 of a token that stays alone
    rows = slots + left * torch.arange(len(x), device=x.device)[:, None]
    merged = x.new_zeros(len(x) * left, x.shape[-1])
    merged = merged.index_add(0, rows.flatten(), (x * share[..., None]).flatten(0, 1))
    return merged.view(len(x), left, -1), total


def able(x: Tensor, branch: Tensor, k: Tensor) -> bool:
    """Whether the kernels take these tensors: half precision of one kind, on CUDA, few tokens, no gradient wanted."""
    half = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.dtype == branch.dtype == k.dtype
    graded = torch.is_grad_enabled() and (x.requires_grad or branch.requires_grad)
    return _TRITON and half and not graded and x.shape[1] <= MOST_TOKENS


# The operator is declared here and calls Triton when it runs: torch.compile can see it without importing it.


@torch.library.custom_op("vitrail::merge_similar", mutates_args=(), device_types="cuda")
def _merge_similar(
    x: Tensor, branch: Tensor, k: Tensor, r: int, prefix: int, size: Tensor | None, index: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, sizes and index of those that are left."""
    from vitrail.kernels import token_merge_triton

    slots, left = token_merge_triton.match(k, index, r, prefix)
    return *token_merge_triton.merge(x, branch, size, slots, x.shape[1] - r), left


@_merge_similar.register_fake
def _(x: Tensor, branch: Tensor, k: Tensor, r: int, prefix: int, *_: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    merged = torch.empty_like(x[:, r:], memory_format=torch.contiguous_format)
    index = merged.new_empty(len(x), merged.shape[1] - prefix, dtype=torch.int64)
    return merged, merged.new_empty(merged.shape[:2], dtype=torch.float32), index
