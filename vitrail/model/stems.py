"""Images to patch tokens."""

from __future__ import annotations

import math
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.block import activation
from vitrail.model.config import ConvStem, Patchify, SotStem, StemConfig
from vitrail.model.sot_stem import SotEmbed


class Stem(nn.Module):
    """images [batch, 3, height, width] -> tokens [batch, rows * columns, width]; one patch is `patch` pixels wide."""

    patch: int

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches. Raises `ValueError` where patches do not fit."""
        if height % self.patch or width % self.patch:
            raise ValueError(
                f"an image of {height}x{width} pixels cannot be cut into patches of {self.patch}; "
                f"use sides that are multiples of {self.patch}"
            )
        return height // self.patch, width // self.patch

    def features(self, images: Tensor) -> Tensor:
        """[batch, width, rows, columns]"""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images).flatten(2).transpose(1, 2)


class PatchEmbed(Stem):
    """Non-overlapping patches, one linear projection (ViT, Dosovitskiy et al. 2020, arXiv 2010.11929)."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(3, width, kernel_size=patch, stride=patch)

    def features(self, images: Tensor) -> Tensor:
        return self.proj(images)

    def forward(self, images: Tensor) -> Tensor:
        if not images.is_cuda:
            return super().forward(images)
        # There, a matrix product is several times as fast as a convolution of three channels.
        rows, columns = self.grid(images.shape[-2], images.shape[-1])
        patches = images.reshape(len(images), 3, rows, self.patch, columns, self.patch).permute(0, 2, 4, 1, 3, 5)
        return F.linear(patches.reshape(len(images), rows * columns, -1), self.proj.weight.flatten(1), self.proj.bias)


class ConvEmbed(Stem):
    """3x3 convolutions of stride 2 without biases, each doubling the width, activations between.

    With BatchNorm after each where `norm` (XCiT), without in PatchConvNet (Touvron et al. 2021, arXiv 2112.13692, and
    their code). For patches of 16 there are four, of widths w/8, w/4, w/2, w; for smaller patches, fewer.
    """

    def __init__(self, patch: int, width: int, norm: bool, act: str = "gelu") -> None:
        super().__init__()
        halvings = int(math.log2(patch))
        if 2**halvings != patch or halvings < 1:
            raise ValueError(f"a convolutional stem halves the image step by step: patch {patch} is no power of 2")
        self.patch = patch
        widths = [3, *(max(1, width >> (halvings - 1 - i)) for i in range(halvings))]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) if norm else nn.Identity() for b in widths[1:])
        self.act = activation(act)

    def features(self, images: Tensor) -> Tensor:
        x = images
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x if i == 0 else self.act(x)))
        return x


class SotTokens(Stem):
    """SoT's convolutional token embedding (arXiv 2104.10935, supplement A)."""

    def __init__(self, config: SotStem, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.embed = SotEmbed(config.block, patch, width)

    def features(self, images: Tensor) -> Tensor:
        return self.embed(images)


def build_stem(config: StemConfig, patch: int, width: int, act: str = "gelu") -> Stem:
    """The stem that `config` describes."""
    if isinstance(config, ConvStem):
        return ConvEmbed(patch, width, config.norm, act)
    if isinstance(config, SotStem):
        return SotTokens(config, patch, width)
    assert isinstance(config, Patchify)
    return PatchEmbed(patch, width)
