"""Packed batches: rows [capacity, ...] with offsets [batch + 1].

Image b owns rows offsets[b] to offsets[b + 1]; rows from offsets[-1] on are padding. Capacity is static and nothing
here waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def owners(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: its image, its position in that image, and whether it belongs to one at all, [rows] each.

    Padding rows count as the last image's.

    >>> owners(torch.tensor([0, 2, 2, 3]), 4)
    (tensor([0, 0, 2, 2]), tensor([0, 1, 0, 1]), tensor([ True,  True,  True, False]))
    """
    row = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    image = torch.searchsorted(offsets[1:].contiguous(), row, right=True).clamp_max(len(offsets) - 2)
    return image, (row - offsets[image]).long(), row < offsets[-1]


def compact(keep: Tensor, offsets: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the rows of the next packed batch come from: keep [rows] -> index [capacity], offsets, overflow (a bool).

    Kept rows come in order, then zeros as padding. Where more are kept than `capacity`, the last ones are cut.

    >>> compact(torch.tensor([True, False, True, True, True]), torch.tensor([0, 2, 4]), 4)
    (tensor([0, 2, 3, 0]), tensor([0, 1, 3]), tensor(False))
    """
    row = torch.arange(len(keep), device=keep.device)
    keep = keep & (row < offsets[-1])
    upto = keep.long().cumsum(0)
    target = torch.where(keep, upto - 1, capacity).clamp_max(capacity)  # one slot more, for all that is dropped
    index = row.new_zeros(capacity + 1).scatter(0, target, row)[:capacity]
    before = torch.cat([upto.new_zeros(1), upto])[offsets.long()]
    return index, before.clamp_max(capacity).to(offsets.dtype), before[-1] > capacity


def kept_first(keep: Tensor) -> Tensor:
    """Indices of tokens [batch, tokens] with those of `keep` first, each part in its order.

    By counting: sorting is slow, and ONNX's is not stable.

    >>> kept_first(torch.tensor([[False, True, False, True]]))
    tensor([[1, 3, 0, 2]])
    """
    upto = keep.long().cumsum(1)
    here = torch.arange(keep.shape[1], device=keep.device).expand_as(upto)
    rank = torch.where(keep, upto - 1, upto[:, -1:] + here - upto)
    return torch.zeros_like(rank).scatter(1, rank, here)


def pack(x: Tensor, mask: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """The real tokens of x [batch, tokens, ...] one after the other: rows [capacity, ...], offsets [batch + 1], index.

    `mask` [batch, tokens] is true where a token is real. `index` [capacity] is where each row was in the batch laid end
    to end. Tokens beyond `capacity` are cut (`compact` says whether there are any); rows beyond the tokens are zeros.
    """
    batch, tokens = mask.shape
    index, offsets, _ = compact(mask.flatten(), torch.arange(batch + 1, device=x.device) * tokens, capacity)
    real = torch.arange(capacity, device=x.device) < offsets[-1]
    return _masked(real, x.flatten(0, 1)[index]), offsets, index


def unpack(rows: Tensor, offsets: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Each image's rows [rows, ...] padded with zeros to [batch, most, ...], and where they are real [batch, most]."""
    position = offsets[:-1, None] + torch.arange(most, dtype=offsets.dtype, device=offsets.device)
    real = position < offsets[1:, None]
    return _masked(real, rows[torch.where(real, position, 0).long()]), real


def repack(dense: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """The inverse of `unpack`: [batch, most, ...] -> [rows, ...]."""
    image, position, real = owners(offsets, rows)
    real = real & (position < dense.shape[1])
    return _masked(real, dense[image, torch.where(real, position, 0)])


def _masked(real: Tensor, x: Tensor) -> Tensor:
    # Not a product: whatever stands in padding rows, also NaN, must leave neither values nor gradients.
    return torch.where(real.view(*real.shape, *(1,) * (x.ndim - real.ndim)), x, 0)
