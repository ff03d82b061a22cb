"""Images to patch tokens."""

from __future__ import annotations

from torch import Tensor, nn


class PatchEmbed(nn.Module):
    """Non-overlapping patches, one linear projection (architectures-and-training §2.3).

    images [batch, 3, height, width] -> tokens [batch, rows * columns, width]
    """

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(3, width, kernel_size=patch, stride=patch)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches. Raises `ValueError` where patches do not fit."""
        if height % self.patch or width % self.patch:
            raise ValueError(
                f"an image of {height}x{width} pixels cannot be cut into patches of {self.patch}; "
                f"use sides that are multiples of {self.patch}"
            )
        return height // self.patch, width // self.patch

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)
