"""RandAugment, TrivialAugment and AutoAugment (Cubuk et al., 2019 and 2020; Muller and Hutter, 2021) on a batch.

Operations and their magnitudes are torchvision's, pixels are those that Pillow gives. Each is a few turns of one
operation an image. The host draws, so it knows how many images each operation falls to: images are grouped by
operation, and every group is one batch of tensor operations.

RandAugment in timm's style on a batch: its 15 operations with Pillow's smooth affine maps.

As in `device_randaugment`, whose operations on colours these are, the host draws a turn of one operation an image.
Magnitudes are drawn for each image, so that parameters are computed and not looked up.

RandAugment in big_vision's style: 16 operations, each certain to come, at a level of 10; on a batch, or one image.

It is TensorFlow's first RandAugment, with what ViTs of that library owe to it (`randaug(2, 10)`):

- Posterize and Solarize grow *weaker* with the level. Solarize's threshold is a byte, so that at level 10 it is not 256
  but 0, and everything is inverted.
- Contrast blends with the number of pixels over 256 and not with their mean: 196 for 224 x 224 pixels.
- Images move by up to 100 pixels and squares of up to 80 x 80 are cut out, whatever the size of the image: these
  numbers are for 224.
- What an image leaves is grey (128), pixels are the nearest, enhancements only ever go one way (0.1 to 1.9).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from vitrail.data.augment.host import RAND_MAGNITUDES, SOLARISE_FROM
from vitrail.data.augment.pixel_ops import AFFINE, CropBoxes, blended, jittered, warped, within
from vitrail.data.config import Interpolation

OPERATIONS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
    *("Brightness", "Contrast", "Color", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
)
_MOVES, ENHANCES = OPERATIONS.index("ShearX"), OPERATIONS.index("Brightness")
_SHARPENS = OPERATIONS.index("Sharpness")
ALL = (*OPERATIONS, "Invert", "SolarizeAdd", "Cutout")  # of AutoAugment, timm's RandAugment and big_vision's, too
_GROUPS = (_MOVES, ENHANCES, *range(_SHARPENS, len(ALL) + 1))  # the first operation of each, and the end
_FIXED = 16  # bits after the point in Pillow's coordinates
_MAP = ("xx", "xy", "x_whole", "x_part", "yx", "yy", "y_whole", "y_part")
_COLUMNS = (*_MAP, "factor", "step", "threshold")

Column = Callable[[str], Tensor]  # parameters of a group's images [images], by name


class Space(NamedTuple):
    """How strong operations are: their largest magnitudes, in so many equal levels from none."""

    levels: int
    shear: float
    shift: float | None  # pixels; none: 150 / 331 of the side
    degrees: float
    enhance: float
    bits: int  # that Posterize takes away


_RAND = Space(RAND_MAGNITUDES, 0.3, None, 30.0, 0.9, 4)
_AUTO = _RAND._replace(levels=10)
_WIDE = Space(RAND_MAGNITUDES, 0.99, 32.0, 135.0, 0.99, 6)


class Smooth(NamedTuple):
    """How what moves pixels interpolates, and what it fills with: a colour [3], on the device of the images."""

    fill: Tensor
    interpolation: Interpolation


class RandTurn(NamedTuple):
    """One operation an image: [batch] columns by name, and where in `rows` each group begins, and the last ends.

    `rows` are in order of their operation; the other columns are `operation`, the affine map of what moves pixels,
    the factor of what enhances, the step of Posterize and the threshold of Solarize (and timm's `add`).
    """

    columns: dict[str, Any]
    bounds: tuple[int, ...]


def draw_turn(chances: NDArray[np.float64], magnitude: int, size: int) -> RandTurn:
    """A turn of RandAugment from chances [batch, 2] in [0, 1): operation and sign of each image."""
    operation = np.floor(chances[:, 0] * len(OPERATIONS)).astype(np.int64)
    return _turn(_RAND, operation, np.full(len(chances), magnitude), chances[:, 1], size)


def draw_trivial(chances: NDArray[np.float64], size: int) -> RandTurn:
    """The one turn of TrivialAugment from chances [batch, 3]: operation, sign and level of each image."""
    operation = np.floor(chances[:, 0] * len(OPERATIONS)).astype(np.int64)
    level = np.floor(chances[:, 2] * _WIDE.levels).astype(np.int64)
    return _turn(_WIDE, operation, level, chances[:, 1], size)


def draw_auto(chances: NDArray[np.float64], policy: str, size: int) -> tuple[RandTurn, RandTurn]:
    """The two turns of AutoAugment from chances [batch, 5]: which pair, whether each comes, both signs."""
    pairs = _pairs(policy)
    pair = pairs[np.floor(chances[:, 0] * len(pairs)).astype(np.int64)]  # [batch, 2, 3]

    def one(number: int) -> RandTurn:
        operation, probability, level = pair[:, number].T
        comes = chances[:, 1 + number] <= probability
        return _turn(_AUTO, np.where(comes, operation, 0).astype(np.int64), level, chances[:, 3 + number], size)

    return one(0), one(1)


@lru_cache(4)
def _pairs(policy: str) -> NDArray[np.float64]:
    """[pairs, 2, 3]: operation, probability and level, as torchvision lists them."""
    listed = v2.AutoAugment(v2.AutoAugmentPolicy(policy))._policies
    return np.array([[(ALL.index(name), chance, level or 0) for name, chance, level in pair] for pair in listed])


def _turn(
    space: Space, operation: NDArray[np.int64], level: NDArray[Any], sign: NDArray[np.float64], size: int
) -> RandTurn:
    positive = (sign > 0.5).astype(np.int64)
    table = _table(space, size)[operation, level.astype(np.int64), positive]
    return grouped(operation, dict(zip(_COLUMNS, table.T, strict=True)))


def grouped(operation: NDArray[np.int64], columns: dict[str, Any]) -> RandTurn:
    """A turn of operations [batch], given by their places in `ALL`, with their parameters."""
    rows = np.argsort(operation, kind="stable")
    bounds = tuple(np.searchsorted(operation[rows], _GROUPS).tolist())
    return RandTurn({"rows": rows, "operation": operation, **columns}, bounds)


def rand_augmented(images: Tensor, turn: RandTurn, smooth: Smooth | None = None) -> Tensor:
    """Images [batch, 3, size, size] of whole numbers, each under its operation; columns are on the same device.

    `smooth` says how maps in plain numbers are interpolated; without it they are in fixed point, nearest neighbour.
    """

    def changed(name: str, mine: Tensor, of: Column) -> Tensor:
        if name == "ShearX" and smooth is not None:
            return warped(mine, torch.stack([of(what) for what in AFFINE]), *smooth)
        if name == "ShearX":
            return moved(mine, torch.stack([of(what) for what in _MAP]).to(torch.int64))
        if name == "Brightness":
            return jittered(mine, of("operation") - ENHANCES, of("factor"))
        if name == "Sharpness":
            return blended(mine, smoothed(mine), of("factor"))
        return recoloured(name, mine, of)

    return in_groups(images, turn, changed)


def in_groups(images: Tensor, turn: RandTurn, changed: Callable[[str, Tensor, Column], Tensor]) -> Tensor:
    """Each image under its operation. `changed` gets the first name of a group, its images, and their columns by name.

    Groups are operations alone, but for those that move pixels ("ShearX") and those that enhance ("Brightness").
    """
    for group, (begin, end) in enumerate(itertools.pairwise(turn.bounds)):
        if begin == end:
            continue
        rows = turn.columns["rows"][begin:end].to(torch.int64)
        mine = changed(ALL[_GROUPS[group]], images[rows], lambda name, rows=rows: turn.columns[name][rows])  # type: ignore[misc]
        images = images.index_copy(0, rows, mine)
    return images


def recoloured(name: str, images: Tensor, of: Column) -> Tensor:
    """What every library does alike: operations on single values, and by the histogram of a channel."""
    if name == "Posterize":
        return posterised(images, of("step"))
    if name == "Solarize":
        return torch.where(images < of("threshold").view(-1, 1, 1, 1), images, 255 - images)
    if name == "Invert":
        return 255 - images
    if name == "SolarizeAdd":
        added = (images + of("add").view(-1, 1, 1, 1)).clamp_(max=255)
        return torch.where(images < SOLARISE_FROM, added, images)
    return autocontrasted(images) if name == "AutoContrast" else equalised(images)


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


@lru_cache(8)
def _table(space: Space, size: int) -> NDArray[np.float64]:
    """[operations, levels, signs, columns]: parameters of every operation at every strength.

    Maps are in fixed point. Levels are made in float32, as torchvision's are.
    """
    table = np.zeros((len(ALL), space.levels, 2, len(_COLUMNS)))
    most = 150.0 / 331.0 * size if space.shift is None else space.shift
    shear, shift, degrees, enhance = (
        torch.linspace(0.0, largest, space.levels).tolist()
        for largest in (space.shear, most, space.degrees, space.enhance)
    )
    bright = torch.linspace(1.0, 0.0, space.levels).tolist()
    for level, positive in itertools.product(range(space.levels), range(2)):
        sign = 2 * positive - 1
        slope, move = sign * shear[level], -int(sign * shift[level])
        maps = {
            "ShearX": (1.0, slope, 0.0, 0.0, 1.0, 0.0),
            "ShearY": (1.0, 0.0, 0.0, slope, 1.0, 0.0),
            "TranslateX": (1.0, 0.0, move, 0.0, 1.0, 0.0),
            "TranslateY": (1.0, 0.0, 0.0, 0.0, 1.0, move),
            "Rotate": _rotation(sign * degrees[level], size),
        }
        for name, inverse in maps.items():
            table[ALL.index(name), level, positive, : len(_MAP)] = _fixed_point(*inverse)
        step = 2 ** round(level / ((space.levels - 1) / space.bits))
        # Whole numbers are below a threshold where they are below the next whole one; that one float32 holds exactly.
        table[:, level, positive, len(_MAP) :] = 1 + sign * enhance[level], step, math.ceil(255 * bright[level])
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


TIMM_OPERATIONS = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast"),
    *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY"),
)
TIMM_DRAWS = 5  # numbers a turn: operation, whether it comes, two for the magnitude, sign
_COMES = 0.5
_TIMM_LEVELS = 10.0  # timm's magnitudes are of this


def draw_timm(chances: NDArray[np.float64], magnitude: int, std: float, size: int) -> RandTurn:
    """A turn from chances [batch, TIMM_DRAWS] in [0, 1)."""
    which, comes, radius, angle, sign = chances.T
    places = np.array([ALL.index(name) for name in TIMM_OPERATIONS])
    chosen = places[np.floor(which * len(places)).astype(np.int64)]
    operation = np.where(comes <= _COMES, chosen, ALL.index("Identity"))
    normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)
    level = np.clip(magnitude + std * normal, 0, _TIMM_LEVELS) / _TIMM_LEVELS
    signed = np.where(sign > 0.5, -level, level)
    return grouped(operation, _parameters(operation, level, signed, size))


def _parameters(
    operation: NDArray[np.int64], level: NDArray[np.float64], signed: NDArray[np.float64], size: int
) -> dict[str, Any]:
    """Columns [batch] by name: those of `RandTurn`, but with the affine map in plain numbers."""
    xx, xy, x, yx, yy, y = (np.full(len(level), value) for value in (1.0, 0.0, 0.0, 0.0, 1.0, 0.0))
    is_ = {name: operation == ALL.index(name) for name in TIMM_OPERATIONS}
    xy[is_["ShearX"]] = 0.3 * signed[is_["ShearX"]]
    yx[is_["ShearY"]] = 0.3 * signed[is_["ShearY"]]
    x[is_["TranslateX"]] = 0.45 * size * signed[is_["TranslateX"]]
    y[is_["TranslateY"]] = 0.45 * size * signed[is_["TranslateY"]]
    radians = -np.radians(30.0 * signed[is_["Rotate"]])
    cos, sin, middle = np.cos(radians), np.sin(radians), size / 2
    xx[is_["Rotate"]], xy[is_["Rotate"]], x[is_["Rotate"]] = cos, sin, middle - (cos + sin) * middle
    yx[is_["Rotate"]], yy[is_["Rotate"]], y[is_["Rotate"]] = -sin, cos, middle - (cos - sin) * middle
    return {
        **dict(zip(AFFINE, (xx, xy, x, yx, yy, y), strict=True)),
        "factor": np.maximum(0.1, 1 + 0.9 * signed),
        "step": 2.0 ** (4 + np.floor(4 * level)),  # at the largest level no bit stays
        "threshold": 256 - np.minimum(256, np.floor(256 * level)),
        "add": np.minimum(128, np.floor(110 * level)),
    }


BIG_VISION_OPERATIONS = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast", "Brightness"),
    *("Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd"),
)
BIG_VISION_DRAWS = 4  # numbers a turn: operation, sign, two for the middle of what is cut out
_BIG_VISION_LEVELS, _SHIFT, _CUT, _GREY = 10.0, 100.0, 40, 128.0
_LUMINANCE = (0.2989, 0.5870, 0.1140)
_CUTOUT = ("cut_top", "cut_left", "cut_height", "cut_width")


def draw_big_vision(chances: NDArray[np.float64], magnitude: int, height: int, width: int) -> RandTurn:
    """A turn from chances [batch, BIG_VISION_DRAWS] in [0, 1)."""
    which, sign, down, right = chances.T
    places = np.array([ALL.index(name) for name in BIG_VISION_OPERATIONS])
    operation = places[np.floor(which * len(places)).astype(np.int64)]
    level = magnitude / _BIG_VISION_LEVELS
    signed = np.where(sign >= 0.5, level, -level)
    cut = int(level * _CUT)
    top, left = np.floor(down * height), np.floor(right * width)
    box = (np.maximum(0, top - cut), np.maximum(0, left - cut))
    size = (np.minimum(height, top + cut) - box[0], np.minimum(width, left + cut) - box[1])
    columns: dict[str, Any] = dict(zip(AFFINE, _maps(operation, signed, height, width), strict=True))
    columns |= dict(zip(_CUTOUT, (*box, *size), strict=True))
    steps = {
        "factor": 1.8 * level + 0.1,
        "step": 2.0 ** min(7, 8 - int(4 * level)),  # a shift of all 8 bits is one of 7
        "threshold": float(int(256 * level) % 256),
        "add": float(int(110 * level)),
    }
    return grouped(operation, columns | {name: np.full(len(chances), value) for name, value in steps.items()})


def _maps(operation: NDArray[np.int64], signed: NDArray[np.float64], height: int, width: int) -> tuple[Any, ...]:
    """Affine maps from the middles of pixels, where TensorFlow's are from their numbers and find the nearest one."""
    xx, xy, x, yx, yy, y = (np.full(len(signed), value) for value in (1.0, 0.0, 0.0, 0.0, 1.0, 0.0))
    is_ = {name: operation == ALL.index(name) for name in BIG_VISION_OPERATIONS}
    xy[is_["ShearX"]] = 0.3 * signed[is_["ShearX"]]
    yx[is_["ShearY"]] = 0.3 * signed[is_["ShearY"]]
    x[is_["TranslateX"]] = _SHIFT * signed[is_["TranslateX"]]
    y[is_["TranslateY"]] = _SHIFT * signed[is_["TranslateY"]]
    turned = is_["Rotate"]
    radians = np.radians(30.0 * signed[turned])
    cos, sin, right, bottom = np.cos(radians), np.sin(radians), width - 1, height - 1
    xx[turned], xy[turned], x[turned] = cos, -sin, (right - (cos * right - sin * bottom)) / 2
    yx[turned], yy[turned], y[turned] = sin, cos, (bottom - (sin * right + cos * bottom)) / 2
    return xx, xy, x + 0.5 - (xx + xy) / 2, yx, yy, y + 0.5 - (yx + yy) / 2


def big_vision_augmented(images: Tensor, turn: RandTurn) -> Tensor:
    """Images [batch, 3, height, width] of whole numbers, each under its operation; columns are on the same device."""
    height, width = images.shape[-2:]

    def changed(name: str, mine: Tensor, of: Column) -> Tensor:
        if name == "ShearX":
            return warped(mine, torch.stack([of(what) for what in AFFINE]), mine.new_full((3,), _GREY), "nearest")
        if name == "Brightness":
            which = (of("operation") - ENHANCES).view(-1, 1, 1, 1)
            flat = float(min(255, height * width // 256))
            return blended(mine, torch.where(which == 2, grey(mine), torch.where(which == 1, flat, 0.0)), of("factor"))
        if name == "Sharpness":
            return blended(mine, smoothed(mine, half=0.0), of("factor"))
        if name == "Cutout":
            inside = within(CropBoxes(*(of(side) for side in _CUTOUT)), height, width)
            return torch.where(inside, _GREY, mine)
        return recoloured(name, mine, of)

    return in_groups(images, turn, changed)


def grey(images: Tensor) -> Tensor:
    """[batch, 1, height, width]: TensorFlow's grey of bytes, which are made parts of 1 and then of 255.5, and cut."""
    red, green, blue = (weight * channel for weight, channel in zip(_LUMINANCE, (images / 255).unbind(1), strict=True))
    return ((red + green + blue) * 255.5).floor_()[:, None]


class BigVisionRandAugment:
    """The same for one image on the host, drawn from torch's generator: the pixels are the device's."""

    def __init__(self, count: int, magnitude: int) -> None:
        self.count, self.magnitude = count, magnitude

    def __call__(self, image: Image.Image) -> Image.Image:
        chances = torch.rand(self.count, BIG_VISION_DRAWS, dtype=torch.float64).numpy()
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].to(torch.float32)
        for each in chances:
            drawn = draw_big_vision(each[None], self.magnitude, image.height, image.width)
            columns = {name: torch.from_numpy(np.asarray(v, np.float32)) for name, v in drawn.columns.items()}
            pixels = big_vision_augmented(pixels, RandTurn(columns, drawn.bounds))
        return Image.fromarray(pixels[0].permute(1, 2, 0).to(torch.uint8).numpy())
