"""Dense features in the form that detection and segmentation hosts expect: maps [batch, channels, rows, columns].

A trunk of one stride (such as a ViT) is tapped after evenly chosen blocks, the last among them; its maps are what the
blocks give, without the final norm, as timm's `forward_intermediates` has them. A trunk with stages (CIFAR ResNets,
convolutional and hierarchical timm models) gives the output of each stage.

Another stride is made without parameters: finer by bilinear interpolation (corners not aligned, as in FPN and UperNet),
coarser by the mean over blocks. Hosts bring their own 1x1 convolutions for the channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from vitrail.model.classifier import Classifier

LEVELS = 4


def feature_maps(model: Classifier, images: Tensor, levels: int | Sequence[int] | None = None) -> list[Tensor]:
    """Maps of `images` [batch, 3, height, width], finest or earliest first; gradients flow through them.

    `levels`: a number asks for so many maps at the trunk's own stride or strides (none: 4, or as many as it has
    stages); strides such as (4, 8, 16, 32) ask for a pyramid, one map per stride of so many pixels, each with
    ceil(height / stride) rows. Raises `ValueError` for an adaptive model, whose patches leave on the way, and for more
    maps than a trunk has stages.
    """
    if model.policy is not None:
        raise ValueError("an adaptive model has no dense features: its patches leave on the way")
    strides = _checked(levels)
    count = len(strides) if strides else LEVELS if levels is None else int(cast("int", levels))
    ready = model._images(images)
    maps = _native(model, ready, count)
    if not strides:
        if isinstance(levels, int) and count > len(maps):
            raise ValueError(
                f"levels is {count}, but this trunk has {len(maps)} stages; ask for a pyramid by its strides"
            )
        return maps[-count:]
    sizes = [(-(-ready.shape[2] // s), -(-ready.shape[3] // s)) for s in strides]
    if len({m.shape[2:] for m in maps}) == 1 and len(maps) >= count:  # one stride: one tap per level
        return [resized(features, size) for features, size in zip(maps[-count:], sizes, strict=True)]
    return [resized(_nearest(maps, size), size) for size in sizes]


def resized(features: Tensor, size: tuple[int, int]) -> Tensor:
    """A map at another number of rows and columns: interpolated where it grows, averaged where it shrinks."""
    for axis in (2, 3):
        wanted = (size[0], features.shape[3]) if axis == 2 else (features.shape[2], size[1])
        if wanted[axis - 2] > features.shape[axis]:
            features = F.interpolate(features, wanted, mode="bilinear", align_corners=False)
        elif wanted[axis - 2] < features.shape[axis]:
            features = F.adaptive_avg_pool2d(features, wanted)
    return features


def _native(model: Classifier, images: Tensor, count: int) -> list[Tensor]:
    """The maps of all stages, or of `count` blocks where all have one stride."""
    trunk = cast("Any", model.trunk)
    names = [name for name in trunk.intermediates if name.startswith("tokens.")]
    if names:
        chosen = [f"tokens.{i}" for i in taps(len(names), count)]
        tokens, captured = trunk.encode(trunk.embed(images), set(chosen))
        rows, columns = tokens.grid
        patches = [captured[name][:, captured[name].shape[1] - rows * columns :] for name in chosen]
        return [x.transpose(1, 2).unflatten(2, (rows, columns)) for x in patches]
    if not hasattr(trunk, "feature_maps"):
        raise ValueError(f"the trunk {type(trunk).__name__} gives no maps of inner layers")
    maps: list[Tensor] = trunk.feature_maps(images)
    return [maps[i] for i in taps(len(maps), count)] if len({m.shape[2:] for m in maps}) == 1 else maps


def taps(depth: int, count: int) -> list[int]:
    """Blocks after which maps are taken: evenly spaced, the last among them; repeated where there are fewer blocks.

    >>> taps(12, 4), taps(2, 4)
    ([2, 5, 8, 11], [0, 0, 1, 1])
    """
    return [-(-depth * (i + 1) // count) - 1 for i in range(count)]


def _nearest(maps: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """The deepest map that is at least as fine; the finest where none is."""
    fine = [m for m in maps if m.shape[2] >= size[0] and m.shape[3] >= size[1]]
    return fine[-1] if fine else maps[0]


def _checked(levels: int | Sequence[int] | None) -> tuple[int, ...]:
    """The strides that are asked for; none for a number."""
    if levels is None:
        return ()
    if isinstance(levels, int):
        if levels < 1:
            raise ValueError(f"levels is a number of maps, at least 1, or strides, not {levels}")
        return ()
    strides = tuple(levels)
    if not strides or any(not isinstance(s, int) or s < 1 for s in strides) or list(strides) != sorted(set(strides)):
        raise ValueError(f"levels as strides are rising numbers of pixels, such as (4, 8, 16, 32), not {strides}")
    return strides
