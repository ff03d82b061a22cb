"""Which tokens of an image go on: scores from the class token's attention, and samplers of them (ATS).

A sampler has K points in (0, 1], here (2i - 1) / 2K, and keeps the token in whose piece of the cumulated scores a
point lies; `random_sample` draws the points, `uniform_sample` is the control that ignores scores.

Points meet edges of pieces exactly all the time (equal scores, one big one), and there rounding would decide. So scores
become whole numbers first, by a power of two, and all that follows is exact: the answer depends on no order of
summation, no tile and no device. The number of points up to C / T is ⌊K C / T + ½⌋; nothing is searched.

Nothing here waits for the host; `vitrail.kernels.packing` describes packed batches.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from vitrail.kernels.covariance import without_autocast
from vitrail.kernels.packing import owners

Order = Literal["raster", "sorted"]
Source = Literal["class", "column", "random"]
BITS = 36
"""The largest score is at least 2^BITS: float32 is whole down to 2^-13 of it, and what is cut is 2^-36 of it."""
MOST_PRODUCT = 2**24
"""Tokens times points of an image for which 2 K C stays within 63 bits."""
MOST_TOKENS = 2048
"""Tokens of an image that one program of the kernel can hold."""
_TRITON = find_spec("triton") is not None


# Samplers: scores [..., tokens], points (K: a number, or [...] for each image) -> keep [..., tokens]


def inverse_sample(scores: Tensor, points: int | Tensor, mask: Tensor | None = None, order: Order = "raster") -> Tensor:
    """The strict inverse: token j is kept if a point lies in (CDF of j - 1, CDF of j].

    At most K are kept, fewer as soon as one score is 2 / K, and every token with 1 / K of all scores is among them.
    `mask` is true where a token is real; others are never kept. Scores need not add up to 1; where all are 0
    nothing is kept. `order="sorted"` cumulates them from the smallest on.

    >>> inverse_sample(torch.tensor([1.0, 1.0, 6.0, 0.0]), 4)
    tensor([ True, False,  True, False])
    """
    return _in_order(_inverse, scores, points, mask, order)


def nearest_sample(scores: Tensor, points: int | Tensor, mask: Tensor | None = None, order: Order = "raster") -> Tensor:
    """The token whose CDF is nearest to a point, the first of equals: the published rule, without the properties above.

    A token of score 0 may be kept, a token of 1 / K lost.
    """
    return _in_order(_nearest, scores, points, mask, order)


def random_sample(
    scores: Tensor,
    points: int | Tensor,
    mask: Tensor | None = None,
    order: Order = "raster",
    generator: torch.Generator | None = None,
) -> Tensor:
    """The strict inverse of the same scores at K points drawn uniformly from (0, 1]; no more points than tokens.

    Points are random, tokens are not equally likely: a token with the share s of all scores is kept with probability
    1 - (1 - s)^K. `uniform_sample` is the draw that ignores scores.
    """

    def rule(whole: Tensor, real: Tensor, count: int | Tensor) -> Tensor:
        draws = 1 - torch.rand(whole.shape, generator=generator, device=whole.device)  # in (0, 1]
        cdf = whole.cumsum(-1)
        cdf = cdf / cdf[..., -1:].clamp_min(1)  # the last is exactly 1
        places = torch.searchsorted(cdf, draws.to(cdf.dtype)).clamp_max(whole.shape[-1] - 1)
        drawn = (torch.arange(whole.shape[-1], device=whole.device) < count).expand(whole.shape)
        hits = torch.zeros_like(whole).scatter_add(-1, places, drawn.to(whole.dtype))
        return (hits > 0) & (whole > 0)

    return _in_order(rule, scores, points, mask, order)


def top_sample(scores: Tensor, points: int | Tensor, mask: Tensor | None = None) -> Tensor:
    """The K largest scores, the first of equals."""
    real = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    kept_scores = torch.where(real, scores.detach(), -torch.inf)
    if torch.compiler.is_exporting():  # ONNX has no stable sort: of equal scores any
        order = kept_scores.sort(dim=-1, descending=True).indices
    else:
        order = kept_scores.argsort(stable=True, dim=-1, descending=True)
    taken = torch.arange(scores.shape[-1], device=scores.device) < _count(points, scores.shape[-1])
    return torch.zeros_like(real).scatter(-1, order, taken.expand(real.shape)) & real


def uniform_sample(
    like: Tensor, points: int | Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """K distinct tokens, all equally likely: as many as a sampler may keep at most, whatever the scores.

    `like` [..., tokens] gives shape and device; its values are not read. All tokens are kept where there are no more
    than K. The control for score-based sampling (Fayyaz et al. 2022, arXiv 2111.15667).

    >>> uniform_sample(torch.zeros(4, 9), 3).sum(1)
    tensor([3, 3, 3, 3])
    """
    return top_sample(torch.rand(like.shape, generator=generator, device=like.device), points, mask)


def _in_order(
    rule: Callable[[Tensor, Tensor, int | Tensor], Tensor],
    scores: Tensor,
    points: int | Tensor,
    mask: Tensor | None,
    order: Order,
) -> Tensor:
    """A rule on whole numbers, in raster order or from the smallest on."""
    real = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    wide = _sane(scores, real)
    whole = _whole(wide, wide.amax(-1, keepdim=True))
    count = _count(points, scores.shape[-1])
    if order == "raster":
        return rule(whole, real, count)
    place = whole.argsort(stable=True, dim=-1)
    kept = rule(whole.gather(-1, place), real.gather(-1, place), count)
    return torch.zeros_like(kept).scatter(-1, place, kept)


def _inverse(whole: Tensor, real: Tensor, count: int | Tensor) -> Tensor:
    upto = whole.cumsum(-1)
    total = upto[..., -1:].clamp_min(1)
    return _points_upto(2 * upto, total, count) > _points_upto(2 * (upto - whole), total, count)


def _nearest(whole: Tensor, real: Tensor, count: int | Tensor) -> Tensor:
    # A token is nearest to the points between the middles of the way to the values before and after its own. Of
    # tokens with the same value only the first one counts; it is the one that has a score, or the first of all.
    upto = whole.cumsum(-1)
    total = upto[..., -1:].clamp_min(1)
    first = real & (real.cumsum(-1) == 1)
    counts = real & ((whole > 0) | first)
    low = torch.where(first, 0, 2 * upto - whole)  # twice the middle
    ends = torch.where(counts, low, 2 * total)
    ends = torch.cat([ends[..., 1:], 2 * total], -1)
    high = ends.flip(-1).cummin(-1).values.flip(-1)
    return counts & (_points_upto(high, total, count) > _points_upto(low, total, count)) & (upto[..., -1:] > 0)


def _points_upto(twice: Tensor, total: Tensor, count: int | Tensor) -> Tensor:
    """How many points (2i - 1) / 2K lie in (0, twice / 2 total]; all are whole numbers."""
    return (count * twice + total) // (2 * total)


def _sane(scores: Tensor, real: Tensor) -> Tensor:
    """At least float32, and 0 where a token is not real or its score is not positive."""
    wide = _wide(scores.detach())
    return torch.where(real & (wide > 0), wide, 0)


def _whole(wide: Tensor, top: Tensor) -> Tensor:
    """Scores as whole numbers, the largest, `top`, between 2^BITS and 2^(BITS + 1)."""
    return (wide * _inverse_power(top) * 2.0**BITS).long()


def _inverse_power(top: Tensor) -> Tensor:
    """One over the largest power of two not above `top`, exactly, so that a product with it is exact."""
    held = top.clamp(torch.finfo(top.dtype).tiny, 2.0**126)
    if torch.compiler.is_exporting():  # ONNX cannot read the bits of a float; its logarithm may be one off: as good
        return torch.exp2(-held.log2().floor())
    bits, mantissa, bias = (torch.int64, 52, 1023) if top.dtype == torch.float64 else (torch.int32, 23, 127)
    exponent = held.view(bits) >> mantissa  # the sign is 0
    return ((2 * bias - exponent) << mantissa).view(top.dtype)


def _count(points: int | Tensor, tokens: int) -> int | Tensor:
    if isinstance(points, Tensor):
        return points.long().unsqueeze(-1)  # its caller has checked it: a comparison here would wait for the device
    check_points(points, tokens)
    return points


def check_points(points: int, tokens: int) -> None:
    """Raise `ValueError` where so many sampling points among so many tokens cannot be counted in whole numbers."""
    if points < 1 or points * tokens > MOST_PRODUCT:
        raise ValueError(
            f"{points} sampling points for {tokens} tokens: must be at least 1, and points times tokens at most"
            f" {MOST_PRODUCT:,}; use fewer"
        )


# Scores


def class_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    prefix: int,
    mask: Tensor | None = None,
    value_norm: bool = True,
    source: Source = "class",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Significance scores of patch tokens (ATS, Fayyaz et al., 2021, arXiv 2111.15667): q, k, v [batch, heads, tokens,
    dim] -> [batch, patches].

    The attention it gets times the norm of its value, as a share of its head's, then as a share of all heads'. The
    attention is the class token's, and only that row of the map is computed; for comparison, the sum over all tokens'
    ("column") or that of one patch token drawn for each image ("random"). `mask` [batch, tokens] is true where a token
    is real.
    """
    with without_autocast(q):  # the row is small, and half precision would be seen in it
        if source == "column":
            attention = _logits(q, k, mask).softmax(-1)
            if mask is not None:
                attention = torch.where(mask[:, None, :, None], attention, 0)
            weight = attention.sum(-2)[..., prefix:]
        else:
            query = q[:, :, :1]
            if source == "random":
                drawn = _drawn(k[:, 0, prefix:, 0], None if mask is None else mask[:, prefix:], generator) + prefix
                query = q.take_along_dim(drawn[:, None, None, None], 2)
            # The sum over all tokens is a factor of every score of a head, so a softmax over patches does as well, and
            # does not underflow where the class token attends to little but itself.
            weight = _logits(query, k, mask)[:, :, 0, prefix:].softmax(-1)
        if value_norm:
            weight = weight * _wide(v[:, :, prefix:]).norm(dim=-1)
        if mask is not None:
            weight = torch.where(mask[:, None, prefix:], weight, 0)
        return _share(_share(weight).sum(1))


def class_attention(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """The class token's attention to all tokens: q, k [batch, heads, tokens, dim] -> [batch, heads, tokens]."""
    with without_autocast(q):
        return _logits(q[:, :, :1], k, mask)[:, :, 0].softmax(-1)


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


def _logits(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    logits = (_wide(q) * q.shape[-1] ** -0.5) @ _wide(k).mT
    # Not -inf, which would give NaN where an image has no real token left.
    return logits if mask is None else logits.masked_fill(~mask[:, None, None], torch.finfo(logits.dtype).min)


def _share(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def _drawn(like: Tensor, mask: Tensor | None, generator: torch.Generator | None) -> Tensor:
    """A real one of the patches [batch, patches] for each image, all equally likely."""
    draws = torch.rand(like.shape, generator=generator, device=like.device)
    return (draws if mask is None else torch.where(mask, draws, -1)).argmax(-1)


# Packed batches


def ragged_class_scores(qkv: Tensor, offsets: Tensor, prefix: int, value_norm: bool = True) -> Tensor:
    """`class_scores` of a packed batch: qkv [rows, 3, heads, dim] -> [rows], 0 for prefix tokens and padding rows.

    Each image's scores add up to 1. No gradient: which tokens go on is a constant.
    """
    rows, batch = len(qkv), len(offsets) - 1
    image, place, real = owners(offsets, rows)
    patch = real & (place >= prefix)
    with torch.no_grad(), without_autocast(qkv):
        wide = torch.where(real[:, None, None, None], _wide(qkv), 0)
        q, k, v = wide.unbind(1)
        theirs = q[offsets[:-1].clamp(0, rows - 1).long()][image]  # the class token's of each row's image
        logits = (theirs * k).sum(-1) * qkv.shape[-1] ** -0.5
        logits = torch.where(patch[:, None], logits, -torch.inf)
        which = image[:, None].expand(logits.shape)
        most = logits.new_full((batch, logits.shape[1]), -torch.inf).scatter_reduce(0, which, logits, "amax")
        weight = torch.where(patch[:, None], (logits - most[image]).exp(), 0)
        if value_norm:
            weight = weight * v.norm(dim=-1)
        weight = weight / _sums(weight, image, batch)
        scores = weight.sum(1)
        return scores / _sums(scores, image, batch)


def _sums(x: Tensor, image: Tensor, batch: int) -> Tensor:
    """Of each row, the sum over its image's rows."""
    sums = x.new_zeros(batch, *x.shape[1:]).index_add(0, image, x)
    return sums.clamp_min(torch.finfo(x.dtype).tiny)[image]


def ragged_inverse_sample(scores: Tensor, offsets: Tensor, points: int | Tensor) -> Tensor:
    """`inverse_sample` of a packed batch: scores [rows], points (K: a number, or [batch]) -> keep [rows]."""
    image, _, real = owners(offsets, len(scores))
    wide = _sane(scores, real)
    top = wide.new_zeros(len(offsets) - 1).scatter_reduce(0, image, wide, "amax")
    whole = _whole(wide, top[image])
    # Whole numbers: the sum over one image is exactly the difference of two sums over all.
    upto = whole.cumsum(0)
    before = torch.cat([upto.new_zeros(1), upto])[offsets.long()]
    total = before.diff().clamp_min(1)[image]
    upto = upto - before[:-1][image]
    count = points.long()[image] if isinstance(points, Tensor) else _count(points, 1)
    return _points_upto(2 * upto, total, count) > _points_upto(2 * (upto - whole), total, count)


def ragged_sample(
    qkv: Tensor, offsets: Tensor, points: int | Tensor, prefix: int, *, most: int, value_norm: bool = True
) -> tuple[Tensor, Tensor]:
    """Scores [rows], and which rows go on [rows]: those sampled and every prefix token. One launch on CUDA.

    `most` is the largest number of tokens an image can have.
    """
    if able(qkv, most):
        if not isinstance(points, Tensor):
            points = torch.full((len(offsets) - 1,), points, device=qkv.device)
        scores, keep = torch.ops.vitrail.ragged_sample(qkv.detach(), offsets, points, prefix, value_norm, most)
        return scores, keep
    return plain_ragged_sample(qkv, offsets, points, prefix, value_norm)


def plain_ragged_sample(
    qkv: Tensor, offsets: Tensor, points: int | Tensor, prefix: int, value_norm: bool = True
) -> tuple[Tensor, Tensor]:
    """The same by PyTorch's own operations."""
    _, place, real = owners(offsets, len(qkv))
    scores = ragged_class_scores(qkv, offsets, prefix, value_norm)
    return scores, ragged_inverse_sample(scores, offsets, points) | (real & (place < prefix))


def ragged_uniform_sample(
    offsets: Tensor,
    rows: int,
    points: int | Tensor,
    prefix: int,
    *,
    most: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`uniform_sample` of a packed batch: points (K: a number, or [batch]) -> which rows go on [rows], prefix tokens
    among them.

    `most` is the largest number of tokens an image has. Draws are those of a padded batch of as many tokens, so both
    layouts keep the same tokens under the same generator.
    """
    image, place, real = owners(offsets, rows)
    width = max(1, most - prefix)
    patches = torch.arange(width, device=offsets.device) < (offsets.diff() - prefix)[:, None]
    keep = uniform_sample(patches, points, patches, generator)
    # Padding rows count as the last image's, at positions that it need not have.
    kept = keep[image, (place - prefix).clamp(0, width - 1)]
    return real & ((place < prefix) | kept)


def able(qkv: Tensor, most: int) -> bool:
    """Whether the kernel takes this tensor: on CUDA, not float64, few tokens."""
    return _TRITON and qkv.is_cuda and qkv.dtype != torch.float64 and most <= MOST_TOKENS


# The operator is declared here and calls Triton when it runs: torch.compile can see it without importing it.


@torch.library.custom_op("vitrail::ragged_sample", mutates_args=(), device_types="cuda")
def _ragged_sample(
    qkv: Tensor, offsets: Tensor, points: Tensor, prefix: int, value_norm: bool, most: int
) -> tuple[Tensor, Tensor]:
    """Scores and which rows go on, [rows] each."""
    from vitrail.kernels import sampling_triton

    return sampling_triton.sample(qkv.contiguous(), offsets, points, prefix, value_norm, most)


_ragged_sample.register_fake(
    lambda qkv, *_: (qkv.new_empty(len(qkv), dtype=torch.float32), qkv.new_empty(len(qkv), dtype=torch.bool))
)
