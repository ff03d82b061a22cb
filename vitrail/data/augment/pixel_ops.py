"""Operations on a batch of images where every image has its own parameters, in tensor operations only.

Images are [batch, 3, height, width] with values 0 to 255, parameters [batch]. Each operation is Pillow's and rounds
where Pillow rounds, so that bytes come out as those of the host. Values are whole numbers in float32, which holds all
that appear here exactly. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.augment.host import SOLARISE_FROM
from vitrail.data.config import Interpolation

BLUR_PASSES = 3
_FIXED = 1 << 24  # Pillow's weights are whole parts of this
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of SplitMix64, as signed


AFFINE = ("ax", "bx", "cx", "ay", "by", "cy")  # x = ax * column + bx * row + cx, and y


class CropBoxes(NamedTuple):
    """A rectangle of pixels for each image."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def resampled(images: Tensor, boxes: CropBoxes, size: int, interpolation: Interpolation) -> Tensor:
    """What is in the boxes, at size x size: Pillow's antialiased resize, first along rows and in bytes between the two.

    Each axis is one matrix product with weights [batch, size, pixels]. Pillow computes in fixed point, so a value that
    lies within about 1e-4 of a half may come out one grey level apart; and recent versions of it begin along columns
    where an image becomes lower and wider, which shows only where bicubic overshoots the byte range.
    """
    height, width = images.shape[-2:]
    across = _resampling_weights(boxes.left, boxes.width, size, width, interpolation)
    down = _resampling_weights(boxes.top, boxes.height, size, height, interpolation)
    columns = _bytes(images.flatten(1, 2) @ across.mT).unflatten(1, (3, height))
    return _bytes(down[:, None] @ columns)


def reflected_window(images: Tensor, top: Tensor, left: Tensor, size: int) -> Tensor:
    """Windows of size x size that begin at the given rows and columns of images mirrored at their borders; exact."""
    height, width = images.shape[-2:]
    rows, columns = _reflected(top, size, height), _reflected(left, size, width)
    places = (rows[:, :, None] * width + columns[:, None, :]).view(len(images), 1, size * size)
    return images.flatten(2).gather(2, places.expand(-1, 3, -1)).unflatten(2, (size, size))


def warped(images: Tensor, maps: Tensor, fill: Tensor, interpolation: Interpolation) -> Tensor:
    """Each pixel from where its image's affine map [6, batch] says, `fill` [3] from outside, as Pillow interpolates.

    Pillow computes in float64 and cuts to bytes. Values here are float32, so that one that is nearly whole may come out
    a grey level apart.
    """
    height, width = images.shape[-2:]
    xx, xy, x, yx, yy, y = (part.to(torch.float64).view(-1, 1, 1) for part in maps)
    row = torch.arange(height, device=images.device, dtype=torch.float64).view(-1, 1) + 0.5
    column = torch.arange(width, device=images.device, dtype=torch.float64) + 0.5
    across, down = xx * column + xy * row + x, yx * column + yy * row + y
    inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
    reach = {"nearest": 1, "bilinear": 2}.get(interpolation, 4)
    shift = 0.0 if reach == 1 else 0.5
    left, top = (across - shift).floor(), (down - shift).floor()
    dx, dy = ((at - shift - whole).to(torch.float32)[:, None] for at, whole in ((across, left), (down, top)))
    flat = images.flatten(2)

    def taken(i: int, j: int) -> Tensor:
        at = (top + i).clamp(0, height - 1) * width + (left + j).clamp(0, width - 1)
        return flat.gather(2, at.to(torch.int64).flatten(1)[:, None].expand(-1, 3, -1)).view_as(images)

    offsets = range(-1, 3) if reach == 4 else range(reach)
    lines = [_between([taken(i, j) for j in offsets], dx) for i in offsets]
    found = _between(lines, dy).clamp(0, 255).floor_()
    return torch.where(inside[:, None], found, fill.view(1, 3, 1, 1))


def luminance(images: Tensor) -> Tensor:
    """[batch, 1, height, width]; exact: the weights are 16-bit and so the sums below 2^24."""
    red, green, blue = images.unbind(1)
    return (red * 19595 + green * 38470 + blue * 7471 + 32768).div_(65536).floor_()[:, None]


def solarised(images: Tensor) -> Tensor:
    """Bright values inverted; exact."""
    return torch.where(images < SOLARISE_FROM, images, 255 - images)


def blended(images: Tensor, toward: Tensor, factor: Tensor) -> Tensor:
    """toward + factor * (images - toward), cut to bytes: every enhancement of Pillow is this."""
    return (toward + _per_image(factor) * (images - toward)).clamp_(0, 255).floor_()


def jittered(images: Tensor, which: Tensor, factor: Tensor) -> Tensor:
    """Brightness (0), contrast (1) or saturation (2) of each image, times its factor."""
    grey = luminance(images)
    mean = (grey.mean((1, 2, 3), keepdim=True) + 0.5).floor_()
    which = _per_image(which)
    return blended(images, torch.where(which == 2, grey, torch.where(which == 1, mean, 0.0)), factor)


def hue_turned(images: Tensor, turn: Tensor) -> Tensor:
    """Hues moved by `turn` [batch], whole bytes of which 256 are the circle: to Pillow's HSV and back.

    Of all colours four in a million come out a grey level off. Pillow computes in double, keeps float, and cuts hue and
    saturation down to bytes.
    """
    most, least = images.amax(1), images.amin(1)
    span = most - least
    red, green, blue = (most[:, None] - images).div_(span.clamp(min=1)[:, None]).to(torch.float64).unbind(1)
    sixths = torch.where(red == 0, blue - green, torch.where(green == 0, 2 + red - blue, 4 + green - red))
    circle = (sixths.to(torch.float32).to(torch.float64) / 6 + 1) % 1
    hue = torch.where(span > 0, circle.to(torch.float32).to(torch.float64).mul_(255).floor_(), 0.0)
    hue = ((hue + turn.view(-1, 1, 1)) % 256 * 6 / 255).to(torch.float32)
    share = (span / most.clamp(min=1)).to(torch.float64).mul_(255).floor_().div_(255).to(torch.float32)
    made = []
    for start in (5, 3, 1):  # red, green and blue fall and rise at different places of the circle
        along = (hue + start) % 6
        made.append(most * (1 - share * torch.minimum(along, 4 - along).clamp_(0, 1)))
    return _bytes(torch.stack(made, 1))


def blur_reach(sigma: float) -> int:
    """Pixels to either side that one box filter of a blur of up to this sigma covers."""
    return int(_whole_radius(np.array(sigma**2 / BLUR_PASSES))) + 1


def blur_weights(sigma: NDArray[np.float64], reach: int) -> NDArray[np.float64]:
    """[reach + 1, images]: weights of a pixel and of those at distance 1 to `reach` in a box filter of Pillow's blur.

    Pillow's Gaussian is three extended boxes (Gwosdek et al., 2011) whose variances sum to that of the Gaussian.
    """
    variance = sigma**2 / BLUR_PASSES
    whole = _whole_radius(variance)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    inner = np.floor(_FIXED / (2 * (whole + part) + 1))
    outer = np.floor((_FIXED - (2 * whole + 1) * inner) / 2)
    assert whole.max(initial=0) < reach
    distance = np.arange(reach + 1)[:, None]
    return np.where(distance <= whole, inner, np.where(distance == whole + 1, outer, 0)) / _FIXED


def _whole_radius(variance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pixels to either side that an extended box of this variance covers fully."""
    whole: NDArray[np.float64] = np.floor((np.sqrt(12 * variance + 1) - 1) / 2)
    return whole


def blurred(images: Tensor, weights: Tensor) -> Tensor:
    """Gaussian blur as Pillow's, by `blur_weights` [reach + 1, batch]: along rows, then columns, in bytes between."""
    centre, *sides = (_per_image(w) for w in weights)
    reach = len(sides)
    for axis in (-1, -2):
        length = images.shape[axis]
        border = (reach, reach, 0, 0) if axis == -1 else (0, 0, reach, reach)
        for _ in range(BLUR_PASSES):
            wide = F.pad(images, border, mode="replicate")
            passed = centre * images
            for distance, weight in enumerate(sides, 1):
                before, after = (wide.narrow(axis, reach + step, length) for step in (-distance, distance))
                passed = passed + weight * (before + after)
            images = _bytes(passed)
    return images


def normal_noise(seeds: Tensor, channels: int, height: int, width: int) -> Tensor:
    """N(0, 1) numbers [batch, channels, height, width], a function of each image's seed (int64) and of the place."""
    places = torch.arange(channels * height * width, device=seeds.device)
    state = _mixed(_mixed(seeds[:, None]) + places)
    first, second = (state >> 40) & 0xFFFFFF, (state >> 16) & 0xFFFFFF
    radius = torch.log((first.to(torch.float32) + 0.5) / 2**24).mul_(-2).sqrt_()
    return (radius * torch.cos(second.to(torch.float32) * (2 * math.pi / 2**24))).view(-1, channels, height, width)


def within(boxes: CropBoxes, height: int, width: int) -> Tensor:
    """[batch, 1, height, width]: which pixels are in the boxes."""
    top, left, tall, wide = (_per_image(side) for side in boxes)
    row = torch.arange(height, device=top.device).view(-1, 1)
    column = torch.arange(width, device=top.device)
    return (row >= top) & (row < top + tall) & (column >= left) & (column < left + wide)


def _between(values: list[Tensor], d: Tensor) -> Tensor:
    """One, two or four neighbours interpolated at a distance from the one before; the cubic is Pillow's."""
    if len(values) == 1:
        return values[0]
    if len(values) == 2:
        return values[0] + (values[1] - values[0]) * d
    a, b, c, e = values
    return b + d * (c - a + d * (2 * (a - b) + c - e + d * (b - a + e - c)))


def _per_image(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def _bytes(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0, 255)  # Pillow's rounding: halves go up


def _reflected(start: Tensor, count: int, length: int) -> Tensor:
    """Positions [batch, count]; as `vitrail.data.augment.host.reflected`."""
    positions = (start.to(torch.int64)[:, None] + torch.arange(count, device=start.device)).abs()
    return (length - 1) - ((length - 1) - positions).abs()


def _resampling_weights(start: Tensor, length: Tensor, size: int, extent: int, kind: Interpolation) -> Tensor:
    """[batch, size, extent]: what a pixel of a line gives to a new pixel of the stretch start .. start + length."""
    start, length = start.view(-1, 1, 1), length.view(-1, 1, 1)
    centre = (2 * torch.arange(size, device=start.device).view(-1, 1) + 1) * length / (2 * size)
    position = torch.arange(extent, device=start.device) - start
    if kind == "nearest":
        return (position == centre.floor()).to(torch.float32)
    distance = (position + 0.5 - centre) / (length / size).clamp(min=1)  # antialiasing: a smaller image, a wider filter
    inside = (position >= 0) & (position < length)
    weights = torch.where(inside, _FILTERS[kind](distance.abs_()), 0.0)
    return weights / weights.sum(-1, keepdim=True)


def _bilinear(d: Tensor) -> Tensor:
    return (1 - d).clamp_(min=0)


def _bicubic(d: Tensor) -> Tensor:
    near = (1.5 * d - 2.5) * d * d + 1
    far = ((2.5 - 0.5 * d) * d - 4) * d + 2
    return torch.where(d < 1, near, torch.where(d < 2, far, 0.0))


def _lanczos(d: Tensor) -> Tensor:
    return torch.where(d < 3, torch.sinc(d) * torch.sinc(d / 3), 0.0)


_FILTERS: dict[str, Callable[[Tensor], Tensor]] = {"bilinear": _bilinear, "bicubic": _bicubic, "lanczos": _lanczos}


def _mixed(words: Tensor) -> Tensor:
    """SplitMix64 on int64, whose products wrap around; what is shifted in from the sign is masked away."""
    words = words + _GOLDEN
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _FIRST
    words = (words ^ ((words >> 27) & ((1 << 37) - 1))) * _SECOND
    return words ^ ((words >> 31) & ((1 << 33) - 1))
