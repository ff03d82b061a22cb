"""Whole numbers of few bits, without gaps: 8 numbers of 3 bits are 3 bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitrail.model.adapters.quantise import from_whole, to_whole


def packed(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """values [layers, ...] as bytes [ceil(numbers * bits / 8)] and the scale of each layer [layers]."""
    whole, scale = to_whole(values.cpu(), bits)
    shifted = (whole.flatten().to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8).numpy()
    each = (shifted[:, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return torch.from_numpy(np.packbits(each.astype(np.uint8), bitorder="little")), scale.flatten().float()


def unpacked(data: Tensor, scale: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """The values that `packed` kept, [layers, ...] in float32."""
    numbers = int(np.prod(shape))
    each = np.unpackbits(data.numpy(), bitorder="little", count=numbers * bits).reshape(numbers, bits)
    shifted = (each.astype(np.int16) << np.arange(bits, dtype=np.int16)).sum(1)
    whole = torch.from_numpy(shifted - 2 ** (bits - 1)).view(shape)
    return from_whole(whole, scale.view(-1, *[1] * (len(shape) - 1)))
