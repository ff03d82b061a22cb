"""Local patch interaction: neighbours on the patch grid exchange information."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.model.tokens import Tokens


class LocalPatchInteraction(nn.Module):
    """3x3 depth-wise convolution, activation, BatchNorm, 3x3 depth-wise convolution (XCiT, arXiv 2106.09681).

    The paper names BatchNorm before the activation; published weights have it after. Names follow timm's. Class tokens
    have no neighbours: they receive nothing.
    """

    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.act = activation
        self.bn = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [batch, prefix + patches, width] -> the same. Raises `ValueError` where patches were dropped or padded."""
        rows, columns = tokens.grid
        batch, count, width = x.shape
        if tokens.mask is not None or count != tokens.prefix + rows * columns:
            raise ValueError("local patch interaction needs the whole grid: no dropped patches, no padding")
        image = x[:, tokens.prefix :].transpose(1, 2).reshape(batch, width, rows, columns)
        out = self.conv2(self.bn(self.act(self.conv1(image)))).flatten(2).transpose(1, 2)
        return torch.cat([torch.zeros_like(out[:, : tokens.prefix]), out], 1) if tokens.prefix else out
