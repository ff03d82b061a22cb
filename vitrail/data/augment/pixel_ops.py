"""Operations on a batch of images where every image has its own parameters, in tensor operations only.

Images are [batch, 3, height, width] with values 0 to 255, parameters [batch]. Each operation is Pillow's and rounds
where Pillow rounds, so that bytes come out as those of the host. Values are whole numbers in float32, which holds all
that appear here exactly. Nothing waits for the device.

Random rectangles, for crops and for erasing, have torchvision's distributions and come from numbers that are given:
[batch, BOX_DRAWS] in [0, 1), ten tries per image at once, so that a batch takes no loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.config import AugmentConfig, Interpolation

SOLARISE_FROM = 128
BLUR_SIGMA = (0.1, 2.0)  # pixels of an image of BLUR_SIZE, as papers give it
BLUR_SIZE = 224
BLUR_PASSES = 3
_TRIES = 10  # of a random rectangle, as in torchvision
BOX_DRAWS = 2 * _TRIES + 2
_ERASED_SHARE, _ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)
_FIXED = 1 << 24  # Pillow's weights are whole parts of this
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of SplitMix64, as signed


Sides = int | NDArray[np.int64]  # of all images, or [batch]
Places = tuple[Tensor, Tensor]  # [batch, size] of a line of so many pixels [batch]


class CropBoxes(NamedTuple):
    """A rectangle of pixels for each image."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def crop_boxes(
    config: AugmentConfig, drawn: NDArray[np.float64], height: Sides, width: Sides
) -> tuple[NDArray[np.float64], ...]:
    """Top, left, height, width, each [batch], of crops: ten tries, then the centre at the nearest ratio."""
    height, width = (np.broadcast_to(np.asarray(side, np.int64), len(drawn)) for side in (height, width))
    tall, wide = _rectangles(drawn, (height * width)[:, None], config.scale, config.ratio)
    fits = (wide > 0) & (wide <= width[:, None]) & (tall > 0) & (tall <= height[:, None])
    fitting, first = fits.any(1), (np.arange(len(drawn)), fits.argmax(1))
    least, most = min(config.ratio), max(config.ratio)
    other_height = np.where(width / height < least, np.rint(width / least), height)
    other_width = np.where(width / height > most, np.rint(height * most), width)
    tall, wide = np.where(fitting, tall[first], other_height), np.where(fitting, wide[first], other_width)
    down, right = drawn[:, -2:].T
    top = np.where(fitting, np.floor(down * (height - tall + 1)), (height - other_height) // 2)
    left = np.where(fitting, np.floor(right * (width - wide + 1)), (width - other_width) // 2)
    return top, left, tall, wide


def erasing_boxes(drawn: NDArray[np.float64], size: int) -> tuple[NDArray[np.bool_], tuple[NDArray[np.float64], ...]]:
    """Whether one of ten tries fits, and its top, left, height, width; as torchvision."""
    # torchvision's ratio is height over width here, and width over height when it crops.
    wide, tall = _rectangles(drawn, size * size, _ERASED_SHARE, _ERASED_RATIO)
    fits: NDArray[np.bool_] = (tall < size) & (wide < size)
    first = np.arange(len(drawn)), fits.argmax(1)
    tall, wide = tall[first], wide[first]
    down, right = drawn[:, -2:].T
    return fits[first], (np.floor(down * (size - tall + 1)), np.floor(right * (size - wide + 1)), tall, wide)


def _rectangles(
    drawn: NDArray[np.float64], area: Sides, share: tuple[float, float], ratio: tuple[float, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Heights and widths [batch, tries], of a uniform share of the area and a log-uniform ratio of width to height."""
    areas = area * (share[0] + (share[1] - share[0]) * drawn[:, :_TRIES])
    low, high = np.log(ratio)
    ratios = np.exp(low + (high - low) * drawn[:, _TRIES : 2 * _TRIES])
    return np.rint(np.sqrt(areas / ratios)), np.rint(np.sqrt(areas * ratios))


def resampled(
    images: Tensor,
    boxes: CropBoxes,
    size: int,
    interpolation: Interpolation,
    of: Sequence[Places | None] = (None, None),
) -> Tensor:
    """What is in the boxes, at size x size: Pillow's antialiased resize, first along rows and in bytes between the two.

    Each axis is one matrix product with weights [batch, size, pixels]. Pillow computes in fixed point, so a value that
    lies within about 1e-4 of a half may come out one grey level apart; and recent versions of it begin along columns
    where an image becomes lower and wider, which shows only where bicubic overshoots the byte range. With `of` boxes
    are resized to other sizes, of which places are taken, down and across.
    """
    height, width = images.shape[-2:]
    across = _resampling_weights(boxes.left, boxes.width, size, width, interpolation, of[1])
    down = _resampling_weights(boxes.top, boxes.height, size, height, interpolation, of[0])
    columns = _bytes(images.flatten(1, 2) @ across.mT).unflatten(1, (3, height))
    return _bytes(down[:, None] @ columns)


def reflected_window(images: Tensor, top: Tensor, left: Tensor, size: int) -> Tensor:
    """Windows of size x size that begin at the given rows and columns of images mirrored at their borders; exact."""
    height, width = images.shape[-2:]
    rows, columns = reflected_places(top, size, height), reflected_places(left, size, width)
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
    values = _between(lines, dy).clamp(0, 255).floor_()
    return torch.where(inside[:, None], values, fill.view(1, 3, 1, 1))


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


def enhanced(
    images: Tensor, which: Tensor, factor: Tensor, grey: Tensor | None = None, mean: Tensor | float | None = None
) -> Tensor:
    """Brightness (0), contrast (1) or saturation (2) of each image, times its factor.

    Saturation blends with `grey` [batch, 1, height, width] and contrast with `mean`; none: Pillow's.
    """
    grey = luminance(images) if grey is None else grey
    mean = (grey.mean((1, 2, 3), keepdim=True) + 0.5).floor_() if mean is None else mean
    which = _per_image(which)
    return blended(images, torch.where(which == 2, grey, torch.where(which == 1, mean, 0.0)), factor)


def moved(images: Tensor, maps: Tensor, fraction_bits: int) -> Tensor:
    """Each pixel from where its image's affine map says, black from outside: Pillow's nearest neighbour, exact.

    Maps are int64 [8, batch] in fixed point, their offsets as whole and part.
    """
    height, width = images.shape[-2:]
    row = torch.arange(height, device=images.device).view(-1, 1)
    column = torch.arange(width, device=images.device)
    xx, xy, x_whole, x_part, yx, yy, y_whole, y_part = (part.view(-1, 1, 1) for part in maps)
    x = x_whole + ((x_part + xx * column + xy * row) >> fraction_bits)
    y = y_whole + ((y_part + yx * column + yy * row) >> fraction_bits)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    places = torch.where(inside, y * width + x, 0).flatten(1)[:, None].expand(-1, 3, -1)
    return torch.where(inside[:, None], images.flatten(2).gather(2, places).view_as(images), 0.0)


def smoothed(images: Tensor, half: float = 0.5) -> Tensor:
    """Pillow's SMOOTH: the mean of 3 x 3 pixels with the middle five times; the border stays. Exact.

    It rounds; with `half` 0 means are cut to whole numbers.
    """
    height, width = images.shape[-2:]
    if min(height, width) < 3:
        return images
    total = 4 * images[..., 1:-1, 1:-1]
    for i in range(3):
        for j in range(3):
            total = total + images[..., i : i + height - 2, j : j + width - 2]
    smooth = images.clone()
    smooth[..., 1:-1, 1:-1] = (total / 13 + half).floor_()
    return smooth


def posterised(images: Tensor, step: Tensor) -> Tensor:
    """Values cut down to multiples of their image's step [batch], a power of two; exact."""
    step = step.view(-1, 1, 1, 1)
    return (images / step).floor_() * step


def autocontrasted(images: Tensor) -> Tensor:
    """Every channel stretched to the whole range. In float64, as Pillow, since it cuts and not rounds: exact."""
    values = images.to(torch.float64)
    low, high = values.amin((-2, -1), keepdim=True), values.amax((-2, -1), keepdim=True)
    scale = torch.full_like(low, 255.0) / (high - low).clamp(min=1)  # 255.0 / tensor would round twice
    stretched = (values * scale + -low * scale).trunc_().clamp_(0, 255)
    return torch.where(high > low, stretched, values).to(torch.float32)


def equalised(images: Tensor) -> Tensor:
    """Every channel through the table that flattens its histogram, in whole numbers; exact."""
    count = images.shape[0] * 3
    values = images.to(torch.int64).reshape(count, -1)
    # One dimension: that is the form of scatter_add which is the same in every run, on an accelerator too.
    flat = (values + 256 * torch.arange(count, device=images.device)[:, None]).flatten()
    histogram = torch.zeros(count * 256, dtype=torch.int64, device=images.device)
    histogram = histogram.scatter_add_(0, flat, torch.ones_like(flat)).view(count, 256)
    last = histogram.gather(1, values.amax(1, keepdim=True))
    step = (values.shape[1] - last) // 255
    below = histogram.cumsum(1) - histogram
    table = ((step // 2 + below) // step.clamp(min=1)).clamp_(max=255)
    return torch.where(step > 0, table.gather(1, values), values).view(images.shape).to(torch.float32)


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
    channels = []
    for start in (5, 3, 1):  # red, green and blue fall and rise at different places of the circle
        along = (hue + start) % 6
        channels.append(most * (1 - share * torch.minimum(along, 4 - along).clamp_(0, 1)))
    return _bytes(torch.stack(channels, 1))


def blur_range(size: int) -> tuple[float, float]:
    """Smallest and largest sigma of the blur, in pixels of an image of this size.

    The same share of the image at every size: the pixels meant for 224 would leave little of an image of 32.

    >>> blur_range(448)
    (0.2, 4.0)
    """
    low, high = BLUR_SIGMA
    return low * size / BLUR_SIZE, high * size / BLUR_SIZE


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


def reflected_places(start: Tensor, count: int, length: Tensor | int) -> Tensor:
    """Positions [batch, count]; as `vitrail.data.augment.host.reflected`."""
    positions = (start.to(torch.int64)[:, None] + torch.arange(count, device=start.device)).abs()
    return (length - 1) - ((length - 1) - positions).abs()


def _resampling_weights(
    start: Tensor, length: Tensor, size: int, extent: int, kind: Interpolation, of: Places | None
) -> Tensor:
    """[batch, size, extent]: what a pixel of a line gives to a new pixel of the stretch start .. start + length."""
    start, length = start.view(-1, 1, 1), length.view(-1, 1, 1)
    places = torch.arange(size, device=start.device).view(-1, 1) if of is None else of[0][..., None]
    count: Tensor | int = size if of is None else of[1].view(-1, 1, 1).to(torch.float32)
    centre = (2 * places + 1) * length / (2 * count)
    position = torch.arange(extent, device=start.device) - start
    if kind == "nearest":
        return (position == centre.floor()).to(torch.float32)
    distance = (position + 0.5 - centre) / (length / count).clamp(
        min=1
    )  # antialiasing: a smaller image, a wider filter
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
