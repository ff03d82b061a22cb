"""Images to patch tokens: stems, and position embeddings at any grid.

SoT's stem (Xie et al. 2021, arXiv 2104.10935, supplement A): a 3x3 convolution and max pooling, three blocks, a 1x1
convolution, in the layouts that reproduce the published counts. A patch of 16 pixels means that all three blocks halve;
with 8 the last does not (the 112-pixel models), with 4 only the first does (32-pixel images).
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.config import ConvStem, Patchify, SotStem, StemConfig
from vitrail.model.parts.block import activation

STEM_WIDTH, BLOCK_WIDTH = 64, 128


def conv(inside: int, outside: int, size: int, stride: int = 1) -> nn.Sequential:
    """Convolution without bias, BatchNorm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inside, outside, size, stride, size // 2, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
    )


class DenseLayer(nn.Module):
    """BN-ReLU-1x1-BN-ReLU-3x3, concatenated to its input."""

    def __init__(self, inside: int, growth: int, bottleneck: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inside), nn.BatchNorm2d(growth * bottleneck)
        self.conv1 = nn.Conv2d(inside, growth * bottleneck, 1, bias=False)
        self.conv2 = nn.Conv2d(growth * bottleneck, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))], 1)


class DenseBlock(nn.Sequential):
    """Six dense layers of growth 16, then BN-1x1-average pooling (no ReLU between)."""

    def __init__(self, inside: int, halve: bool) -> None:
        layers: list[nn.Module] = [DenseLayer(inside + 16 * i, 16, 2) for i in range(6)]
        width = inside + 96
        pool = nn.AvgPool2d(2) if halve else nn.Identity()
        super().__init__(*layers, nn.BatchNorm2d(width), nn.Conv2d(width, BLOCK_WIDTH, 1, bias=False), pool)


class ResidualBlock(nn.Module):
    """Bottleneck 1x1 -> 3x3 -> 1x1 of widths 64, 64, 256, with a projection where the shape changes."""

    def __init__(self, inside: int, halve: bool) -> None:
        super().__init__()
        stride = 2 if halve else 1

        def norm(width: int) -> nn.BatchNorm2d:
            return nn.BatchNorm2d(width, eps=1e-3, momentum=0.01)

        self.conv1, self.norm1 = nn.Conv2d(inside, 64, 1, bias=False), norm(64)
        self.conv2, self.norm2 = nn.Conv2d(64, 64, 3, stride, 1, bias=False), norm(64)
        self.conv3, self.norm3 = nn.Conv2d(64, 256, 1, bias=False), norm(256)
        same = inside == 256 and not halve
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(inside, 256, 1, stride, bias=False), norm(256))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class InceptionBlock(nn.Module):
    """Four branches, concatenated to 128 channels."""

    def __init__(self, inside: int, halve: bool) -> None:
        super().__init__()
        stride = 2 if halve else 1
        self.point = conv(inside, 32, 1, stride)
        self.three = nn.Sequential(conv(inside, 32, 1), conv(32, 64, 3, stride))
        self.five = nn.Sequential(conv(inside, 16, 1), conv(16, 16, 5, stride))
        self.pool = nn.Sequential(nn.MaxPool2d(3, stride, 1), conv(inside, 16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.point(x), self.three(x), self.five(x), self.pool(x)], 1)


class NonLocalBlock(nn.Module):
    """A 3x3 convolution of stride 2, then every place attends to every other (embedded Gaussian, residual).

    The inside of the non-local part is not given; widths, biases and norms are those that give the counted 4.1979 M.
    """

    attention_products = True

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.reduce = nn.Sequential(nn.Conv2d(inside, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        self.theta, self.phi, self.value = (nn.Conv2d(64, 64, 1) for _ in range(3))
        self.out = nn.Sequential(nn.Conv2d(64, outside, 1), nn.BatchNorm2d(outside))
        self.shortcut = nn.Sequential(nn.Conv2d(64, outside, 1), nn.BatchNorm2d(outside))
        self.norm = nn.BatchNorm2d(outside)

    def forward(self, x: Tensor) -> Tensor:
        x = self.reduce(x)
        q, k, v = (layer(x).flatten(2).transpose(1, 2) for layer in (self.theta, self.phi, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).unflatten(2, x.shape[2:])
        return F.relu(self.norm(self.shortcut(x) + self.out(mixed)))


class SotEmbed(nn.Module):
    """images [batch, channels, height, width] -> [batch, width, height / patch, width / patch]."""

    def __init__(self, block: str, patch: int, width: int, channels: int = 3) -> None:
        super().__init__()
        halvings = int(math.log2(patch))
        if 2**halvings != patch or not 2 <= halvings <= 4:
            raise ValueError(f"SoT's token embedding makes patches of 4, 8 or 16 pixels, not {patch}")
        self.block = block
        self.stem = nn.Conv2d(channels, STEM_WIDTH, 3, padding=1)
        halve = [i < halvings - 1 for i in range(3)]
        kinds = {"densenet": DenseBlock, "resnet": ResidualBlock, "inception": InceptionBlock}
        last = BLOCK_WIDTH if block in ("densenet", "inception") else 256
        if block in kinds:
            blocks = [kinds[block](last if i else STEM_WIDTH, h) for i, h in enumerate(halve)]
        elif halvings != 3:
            raise ValueError("the non-local embedding makes patches of 8 pixels only")
        else:
            blocks = [NonLocalBlock(STEM_WIDTH, 128), NonLocalBlock(128, 256)]
        self.blocks = nn.Sequential(*blocks)
        self.project = nn.Conv2d(last, width, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(self.blocks(F.max_pool2d(self.stem(images), 3, 2, 1)))


class Stem(nn.Module):
    """images [batch, channels, height, width] -> tokens [batch, rows * columns, width]; patches are `patch` wide."""

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

    def __init__(self, patch: int, width: int, channels: int = 3) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def features(self, images: Tensor) -> Tensor:
        return self.proj(images)

    def forward(self, images: Tensor) -> Tensor:
        if not images.is_cuda:
            return super().forward(images)
        # There, a matrix product is several times as fast as a convolution of three channels.
        rows, columns = self.grid(images.shape[-2], images.shape[-1])
        patches = images.reshape(len(images), -1, rows, self.patch, columns, self.patch).permute(0, 2, 4, 1, 3, 5)
        return F.linear(patches.reshape(len(images), rows * columns, -1), self.proj.weight.flatten(1), self.proj.bias)


class ConvEmbed(Stem):
    """3x3 convolutions of stride 2 without biases, each doubling the width, activations between.

    With BatchNorm after each where `norm` (XCiT), without in PatchConvNet (Touvron et al. 2021, arXiv 2112.13692, and
    their code). For patches of 16 there are four, of widths w/8, w/4, w/2, w; for smaller patches, fewer.
    """

    def __init__(self, patch: int, width: int, norm: bool, act: str = "gelu", channels: int = 3) -> None:
        super().__init__()
        halvings = int(math.log2(patch))
        if 2**halvings != patch or halvings < 1:
            raise ValueError(f"a convolutional stem halves the image step by step: patch {patch} is no power of 2")
        self.patch = patch
        widths = [channels, *(max(1, width >> (halvings - 1 - i)) for i in range(halvings))]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) if norm else nn.Identity() for b in widths[1:])
        self.act = activation(act)

    def features(self, images: Tensor) -> Tensor:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            images = norm(conv(self.act(images) if i else images))
        return images


class SotTokens(Stem):
    """SoT's convolutional token embedding (arXiv 2104.10935, supplement A)."""

    def __init__(self, config: SotStem, patch: int, width: int, channels: int = 3) -> None:
        super().__init__()
        self.patch = patch
        self.embed = SotEmbed(config.block, patch, width, channels)

    def features(self, images: Tensor) -> Tensor:
        return self.embed(images)


def build_stem(config: StemConfig, patch: int, width: int, act: str = "gelu", channels: int = 3) -> Stem:
    """The stem that `config` describes."""
    if isinstance(config, ConvStem):
        return ConvEmbed(patch, width, config.norm, act, channels)
    if isinstance(config, SotStem):
        return SotTokens(config, patch, width, channels)
    assert isinstance(config, Patchify)
    return PatchEmbed(patch, width, channels)


def resize_positions(
    positions: Tensor,
    prefix: int,
    old: tuple[int, int],
    new: tuple[int, int],
    mode: str = "bicubic",
    antialias: bool = True,
) -> Tensor:
    """Position embeddings [1, prefix + rows * columns, width] moved from grid `old` to grid `new`.

    Bicubic, because bilinear lowers the norm of interpolated vectors (DeiT, arXiv 2012.12877). Antialiased by default,
    as in timm, on which published weights at other sizes depend; the resize of DeiT's code is not (`antialias=False`).
    Half precision is resized in float32.
    """
    if old == new:
        return positions
    kept, grid = positions[:, :prefix], positions[:, prefix:]
    exact = grid if grid.dtype == torch.float64 else grid.float()
    exact = exact.reshape(1, *old, -1).permute(0, 3, 1, 2)
    exact = F.interpolate(exact, size=new, mode=mode, antialias=antialias, align_corners=False)
    return torch.cat([kept, exact.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)], dim=1)


def resize_mixing(weight: Tensor, bias: Tensor, old: tuple[int, int], new: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix over patches [patches, patches] and its bias moved to another grid: rows and columns are both images.

    Rows are rescaled so that what a patch receives from a constant image stays the same. It adapts poorly and needs
    fine-tuning.
    """
    count = old[0] * old[1]
    columns = resize_positions(weight.float().t()[None], 0, old, new)[0].t()  # where a patch looks
    rows = resize_positions(columns[None], 0, old, new)[0]  # which patch looks
    rows = rows * (count / (new[0] * new[1]))
    moved = resize_positions(bias.float()[None, :, None], 0, old, new)[0, :, 0]
    return rows.to(weight.dtype), moved.to(bias.dtype)


def sinusoid(count: int, width: int) -> Tensor:
    """The fixed table [1, count, width] of sines and cosines (Vaswani et al.), as SoT uses it for all its tokens."""
    place = torch.arange(count, dtype=torch.float64)[:, None]
    channel = torch.arange(width, dtype=torch.float64)[None]
    angle = place / 10000 ** (2 * torch.div(channel, 2, rounding_mode="floor") / width)
    table = torch.where(channel % 2 == 0, angle.sin(), angle.cos())
    return table.float()[None]


class FourierPositions(nn.Module):
    """Sines and cosines of row and column at `waves` frequencies, and a learned projection (XCiT). Names follow timm's.

    Places are shares of the image, so another grid needs no interpolation.
    """

    waves = 32
    edge_layers = ("token_projection",)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token_projection = nn.Conv2d(2 * self.waves, width, 1)

    def table(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        """[1, 2 waves, rows, columns] in float32, rows first; the order of operations is that of the published code."""
        rows, columns = grid
        pair = torch.arange(self.waves, device=device).div(2, rounding_mode="floor")
        period = 10000 ** (2 * pair.float() / self.waves)

        def encoded(count: int) -> Tensor:  # [count, waves]
            place = torch.arange(1, count + 1, device=device).float()
            angle = (place / (place[-1] + 1e-6) * (2 * math.pi))[:, None] / period
            return torch.stack([angle[:, 0::2].sin(), angle[:, 1::2].cos()], 2).flatten(1)

        down = encoded(rows)[:, None].expand(-1, columns, -1)
        across = encoded(columns)[None].expand(rows, -1, -1)
        return torch.cat([down, across], 2).permute(2, 0, 1)[None]

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """[1, rows * columns, width]"""
        weight = self.token_projection.weight
        return self.token_projection(self.table(grid, weight.device).to(weight.dtype)).flatten(2).transpose(1, 2)
