"""RandAugment (Cubuk et al., 2020) on a batch: torchvision's 14 operations, with the pixels Pillow gives.

The host draws, so it knows how many images each operation falls to: images are grouped by operation, and every group is
one batch of tensor operations. Magnitudes are those of torchvision with 31 levels, for all images the same but for the
sign.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.augment import RAND_MAGNITUDES
from vitrail.data.device_pixels import blended, jittered

OPERATIONS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
    *("Brightness", "Contrast", "Color", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
)
_MOVES, _ENHANCES = OPERATIONS.index("ShearX"), OPERATIONS.index("Brightness")
_SHARPENS = OPERATIONS.index("Sharpness")
_GROUPS = (_MOVES, _ENHANCES, *range(_SHARPENS, len(OPERATIONS) + 1))  # the first operation of each, and the end
_FIXED = 16  # bits after the point in Pillow's coordinates
_COLUMNS = ("xx", "xy", "x_whole", "x_part", "yx", "yy", "y_whole", "y_part", "factor")


class RandTurn(NamedTuple):
    """One operation an image: [batch] columns by name, and where in `rows` each group begins, and the last ends.

    `rows` are in order of their operation; the other columns are `operation`, its affine map and its factor.
    """

    columns: dict[str, Any]
    bounds: tuple[int, ...]


def draw_turn(chances: NDArray[np.float64], magnitude: int, size: int) -> RandTurn:
    """Operation and sign of each image from chances [batch, 2] in [0, 1)."""
    operation = np.floor(chances[:, 0] * len(OPERATIONS)).astype(np.int64)
    positive = (chances[:, 1] > 0.5).astype(np.int64)
    columns = dict(zip(_COLUMNS, _table(magnitude, size)[operation, positive].T, strict=True))
    rows = np.argsort(operation, kind="stable")
    bounds = tuple(np.searchsorted(operation[rows], _GROUPS).tolist())
    return RandTurn({"rows": rows, "operation": operation, **columns}, bounds)


def rand_augmented(images: Tensor, turn: RandTurn, magnitude: int) -> Tensor:
    """Images [batch, 3, size, size] of whole numbers, each under its operation; columns are on the same device."""
    columns = turn.columns
    for group, (begin, end) in enumerate(itertools.pairwise(turn.bounds)):
        if begin == end:
            continue
        rows = columns["rows"][begin:end].to(torch.int64)
        mine = images[rows]
        name = OPERATIONS[_GROUPS[group]]
        if name == "ShearX":
            mine = moved(mine, torch.stack([columns[what][rows] for what in _COLUMNS[:-1]]).to(torch.int64))
        elif name == "Brightness":
            mine = jittered(mine, columns["operation"][rows] - _ENHANCES, columns["factor"][rows])
        elif name == "Sharpness":
            mine = blended(mine, smoothed(mine), columns["factor"][rows])
        elif name == "Posterize":
            mine = posterised(mine, _bits(magnitude))
        elif name == "Solarize":
            mine = torch.where(mine < 255 * _level(1.0, 0.0, magnitude), mine, 255 - mine)
        else:
            mine = autocontrasted(mine) if name == "AutoContrast" else equalised(mine)
        images = images.index_copy(0, rows, mine)
    return images


def moved(images: Tensor, maps: Tensor) -> Tensor:
    """Each pixel from where its image's affine map says, black from outside: Pillow's nearest neighbour, exact.

    Maps are int64 [8, batch], as `_fixed_point` gives them.
    """
    height, width = images.shape[-2:]
    row = torch.arange(height, device=images.device).view(-1, 1)
    column = torch.arange(width, device=images.device)
    xx, xy, x_whole, x_part, yx, yy, y_whole, y_part = (part.view(-1, 1, 1) for part in maps)
    x = x_whole + ((x_part + xx * column + xy * row) >> _FIXED)
    y = y_whole + ((y_part + yx * column + yy * row) >> _FIXED)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    places = torch.where(inside, y * width + x, 0).flatten(1)[:, None].expand(-1, 3, -1)
    return torch.where(inside[:, None], images.flatten(2).gather(2, places).view_as(images), 0.0)


def smoothed(images: Tensor) -> Tensor:
    """Pillow's SMOOTH: the mean of 3 x 3 pixels with the middle five times; the border stays. Exact."""
    height, width = images.shape[-2:]
    if min(height, width) < 3:
        return images
    total = 4 * images[..., 1:-1, 1:-1]
    for i in range(3):
        for j in range(3):
            total = total + images[..., i : i + height - 2, j : j + width - 2]
    smooth = images.clone()
    smooth[..., 1:-1, 1:-1] = (total / 13 + 0.5).floor_()
    return smooth


def posterised(images: Tensor, bits: int) -> Tensor:
    """The highest bits of each value; exact."""
    step = 2 ** (8 - bits)
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
    values = images.to(torch.int64).view(count, -1)
    # One dimension: that is the form of scatter_add which is the same in every run, on an accelerator too.
    flat = (values + 256 * torch.arange(count, device=images.device)[:, None]).flatten()
    histogram = torch.zeros(count * 256, dtype=torch.int64, device=images.device)
    histogram = histogram.scatter_add_(0, flat, torch.ones_like(flat)).view(count, 256)
    last = histogram.gather(1, values.amax(1, keepdim=True))
    step = (values.shape[1] - last) // 255
    below = histogram.cumsum(1) - histogram
    table = ((step // 2 + below) // step.clamp(min=1)).clamp_(max=255)
    return torch.where(step > 0, table.gather(1, values), values).view(images.shape).to(torch.float32)


def _level(first: float, last: float, magnitude: int) -> float:
    return float(torch.linspace(first, last, RAND_MAGNITUDES)[magnitude])  # float32, as torchvision


def _bits(magnitude: int) -> int:
    return 8 - round(magnitude / ((RAND_MAGNITUDES - 1) / 4))


@lru_cache(8)
def _table(magnitude: int, size: int) -> NDArray[np.float64]:
    """[operations, signs, columns]: maps of the geometric operations in fixed point, and factors of the others."""
    table = np.zeros((len(OPERATIONS), 2, len(_COLUMNS)))
    for positive, sign in enumerate((-1.0, 1.0)):
        shear, angle = sign * _level(0.0, 0.3, magnitude), sign * _level(0.0, 30.0, magnitude)
        shift = -int(sign * _level(0.0, 150.0 / 331.0 * size, magnitude))
        maps = {
            "ShearX": (1.0, shear, 0.0, 0.0, 1.0, 0.0),
            "ShearY": (1.0, 0.0, 0.0, shear, 1.0, 0.0),
            "TranslateX": (1.0, 0.0, shift, 0.0, 1.0, 0.0),
            "TranslateY": (1.0, 0.0, 0.0, 0.0, 1.0, shift),
            "Rotate": _rotation(angle, size),
        }
        for name, inverse in maps.items():
            table[OPERATIONS.index(name), positive, :-1] = _fixed_point(*inverse)
        table[:, positive, -1] = 1 + sign * _level(0.0, 0.9, magnitude)
    return table


def _rotation(degrees: float, size: int) -> tuple[float, ...]:
    radians = -math.radians(degrees % 360.0)
    cos, sin = math.cos(radians), math.sin(radians)
    middle = size / 2
    return cos, sin, middle - (cos + sin) * middle, -sin, cos, middle - (cos - sin) * middle


def _fixed_point(xx: float, xy: float, x: float, yx: float, yy: float, y: float) -> tuple[int, ...]:
    """As Pillow: parts of 2^-16, taken at the middle of a pixel. What may be large goes in two numbers, for float32."""
    ax, bx, ay, by = (math.floor(v * 2**_FIXED + 0.5) for v in (xx, xy, yx, yy))
    cx, cy = (math.floor((v + p / 2 + q / 2) * 2**_FIXED + 0.5) for v, p, q in ((x, xx, xy), (y, yx, yy)))
    part = (1 << _FIXED) - 1
    return ax, bx, cx >> _FIXED, cx & part, ay, by, cy >> _FIXED, cy & part
