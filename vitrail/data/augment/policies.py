"""RandAugment, TrivialAugment and AutoAugment (Cubuk et al., 2019 and 2020; Muller and Hutter, 2021) on a batch.

A policy is a few turns of one operation per image. The host draws, so it knows how many images each operation gets:
images are grouped by operation, and every group is one batch of tensor operations.

The same name means different things. RandAugment(2, 9) is, by torchvision's definition: two of 14 operations, each
always applied, at level 9 of 30, nearest neighbour, filled with black. By timm's (`rand-m9-mstd0.5-inc1`, which DeiT
and its successors were trained with): two of 15 operations, among them Invert and SolarizeAdd, each applied with
probability 1/2, at a level of 10 drawn from N(9, 0.5), interpolated as the crop is, filled with the mean colour. By
big_vision's (TensorFlow's first RandAugment, `randaug(2, 10)`): two of 16, each always applied, with its quirks:

- Posterize and Solarize grow *weaker* with the level. Solarize's threshold is a byte, so that at level 10 it is not 256
  but 0, and everything is inverted.
- Contrast blends with the number of pixels over 256 and not with their mean: 196 for 224 x 224 pixels.
- Images move by up to 100 pixels and squares of up to 80 x 80 are cut out, whatever the size of the image: these
  numbers are for 224.
- The fill is grey (128), interpolation is nearest neighbour, enhancements only go one way (0.1 to 1.9).

Operations that move pixels take their affine map in fixed point (torchvision: Pillow's nearest neighbour, exact) or in
plain numbers (the other two).
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
from torch import Tensor
from torchvision.transforms import v2

from vitrail.data.augment import pixel_ops as ops
from vitrail.data.config import Interpolation, PreprocessConfig

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Column = Callable[[str], Tensor]  # parameters of a group's images [images], by name

OPERATIONS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
    *("Brightness", "Contrast", "Color", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
)
ALL = (*OPERATIONS, "Invert", "SolarizeAdd", "Cutout")  # of AutoAugment, timm's RandAugment and big_vision's, too
ENHANCES = ALL.index("Brightness")
_GROUPS = (ALL.index("ShearX"), ENHANCES, *range(ALL.index("Sharpness"), len(ALL) + 1))  # first of each, and the end
RAND_MAGNITUDES = 31  # of torchvision's styles: 0 to 30
_LEVELS = 10.0  # of timm's and big_vision's
_FIXED = 16  # bits after the point in Pillow's coordinates
_AFFINE = ("ax", "bx", "cx", "ay", "by", "cy")  # x = ax * column + bx * row + cx, and y
_MAP = ("xx", "xy", "x_whole", "x_part", "yx", "yy", "y_whole", "y_part")
_COLUMNS = (*_MAP, "factor", "step", "threshold")
_CUTOUT = ("cut_top", "cut_left", "cut_height", "cut_width")
_CUT, _GREY = 40, 128.0  # big_vision's: half a side of Cutout at the highest level, and the fill


class RandTurn(NamedTuple):
    """One operation per image: [batch] columns by name, and where in `rows` each group begins, and the last ends.

    `rows` are in order of their operation; the other columns are `operation`, the affine map of what moves pixels,
    the factor of what enhances, the step of Posterize, the threshold of Solarize, `add` of SolarizeAdd and the box of
    Cutout.
    """

    columns: dict[str, Any]
    bounds: tuple[int, ...]


class Space(NamedTuple):
    """How strong torchvision's operations are: their largest magnitudes, in so many equal levels from none."""

    levels: int
    shear: float
    shift: float | None  # pixels; none: 150 / 331 of the side
    degrees: float
    enhance: float
    bits: int  # that Posterize takes away


_RAND = Space(RAND_MAGNITUDES, 0.3, None, 30.0, 0.9, 4)
_AUTO = _RAND._replace(levels=10)
_WIDE = Space(RAND_MAGNITUDES, 0.99, 32.0, 135.0, 0.99, 6)


class Rendering(NamedTuple):
    """How operations change pixels, where it is not torchvision's way."""

    fill: Tensor  # [3], on the device of the images
    interpolation: Interpolation
    tensorflow: bool = False  # big_vision's enhancements


def fill_colour(preprocess: PreprocessConfig) -> tuple[int, ...]:
    """The fill of timm's style, in bytes."""
    return tuple(min(255, round(255 * channel)) for channel in preprocess.mean)


def affine_interpolation(preprocess: PreprocessConfig) -> Interpolation:
    """How timm's style moves pixels: as they are resized, but for Lanczos, which Pillow's affine maps do not have."""
    return "bicubic" if preprocess.interpolation == "lanczos" else preprocess.interpolation


def draw_turn(
    style: str, chances: Floats, magnitude: int, std: float = 0.0, *, height: int, width: int | None = None
) -> RandTurn:
    """A turn of RandAugment from chances [batch, draws of the style] in [0, 1), for images of height x width."""
    names, parameters = RAND_STYLES[style].operations, RAND_STYLES[style].parameters
    places = np.array([ALL.index(name) for name in names])
    operation = places[np.floor(chances[:, 0] * len(places)).astype(np.int64)]
    return parameters(operation, chances[:, 1:].T, magnitude, std, height, height if width is None else width)


def draw_trivial(chances: Floats, size: int) -> RandTurn:
    """The one turn of TrivialAugment from chances [batch, 3]: operation, sign and level of each image."""
    operation = np.floor(chances[:, 0] * len(OPERATIONS)).astype(np.int64)
    level = np.floor(chances[:, 2] * _WIDE.levels).astype(np.int64)
    return _from_table(_WIDE, operation, level, chances[:, 1], size)


def draw_auto(chances: Floats, policy: str, size: int) -> tuple[RandTurn, RandTurn]:
    """The two turns of AutoAugment from chances [batch, 5]: which pair, whether each comes, both signs."""
    pairs = _pairs(policy)
    pair = pairs[np.floor(chances[:, 0] * len(pairs)).astype(np.int64)]  # [batch, 2, 3]

    def one(number: int) -> RandTurn:
        operation, probability, level = pair[:, number].T
        applied = np.where(chances[:, 1 + number] <= probability, operation, 0).astype(np.int64)
        return _from_table(_AUTO, applied, level.astype(np.int64), chances[:, 3 + number], size)

    return one(0), one(1)


@lru_cache(4)
def _pairs(policy: str) -> Floats:
    """[pairs, 2, 3]: operation, probability and level, as torchvision lists them."""
    listed = v2.AutoAugment(v2.AutoAugmentPolicy(policy))._policies
    return np.array([[(ALL.index(name), chance, level or 0) for name, chance, level in pair] for pair in listed])


def _grouped(operation: Indices, columns: dict[str, Any]) -> RandTurn:
    """A turn of operations [batch], given by their places in `ALL`, with their parameters."""
    rows = np.argsort(operation, kind="stable")
    bounds = tuple(np.searchsorted(operation[rows], _GROUPS).tolist())
    return RandTurn({"rows": rows, "operation": operation, **columns}, bounds)


def _from_table(space: Space, operation: Indices, level: Indices, sign: Floats, size: int) -> RandTurn:
    table = _table(space, size)[operation, level, (sign > 0.5).astype(np.int64)]
    return _grouped(operation, dict(zip(_COLUMNS, table.T, strict=True)))


def _torchvision(operation: Indices, chances: Floats, magnitude: int, std: float, height: int, width: int) -> RandTurn:
    return _from_table(_RAND, operation, np.full(len(operation), magnitude), chances[0], height)


def _timm(operation: Indices, chances: Floats, magnitude: int, std: float, height: int, width: int) -> RandTurn:
    applied, radius, angle, sign = chances
    operation = np.where(applied <= 0.5, operation, ALL.index("Identity"))
    normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)
    level = np.clip(magnitude + std * normal, 0, _LEVELS) / _LEVELS
    signed = np.where(sign > 0.5, -level, level)
    middle = height / 2

    def rotation(radians: Floats) -> tuple[Floats, ...]:
        cos, sin = np.cos(-radians), np.sin(-radians)
        return cos, sin, middle - (cos + sin) * middle, -sin, cos, middle - (cos - sin) * middle

    columns = dict(zip(_AFFINE, _affine(operation, signed, 0.45 * height, rotation), strict=True)) | {
        "factor": np.maximum(0.1, 1 + 0.9 * signed),
        "step": 2.0 ** (4 + np.floor(4 * level)),  # at the largest level no bit stays
        "threshold": 256 - np.minimum(256, np.floor(256 * level)),
        "add": np.minimum(128, np.floor(110 * level)),
    }
    return _grouped(operation, columns)


def _big_vision(operation: Indices, chances: Floats, magnitude: int, std: float, height: int, width: int) -> RandTurn:
    sign, down, right = chances
    level = magnitude / _LEVELS
    bottom, side = height - 1, width - 1

    def rotation(radians: Floats) -> tuple[Floats, ...]:
        cos, sin = np.cos(radians), np.sin(radians)
        x, y = (side - (cos * side - sin * bottom)) / 2, (bottom - (sin * side + cos * bottom)) / 2
        return cos, -sin, x, sin, cos, y

    xx, xy, x, yx, yy, y = _affine(operation, np.where(sign >= 0.5, level, -level), 100.0, rotation)
    # From the middles of pixels; TensorFlow's maps are from their indices and find the nearest one.
    maps = (xx, xy, x + 0.5 - (xx + xy) / 2, yx, yy, y + 0.5 - (yx + yy) / 2)
    cut, top, left = int(level * _CUT), np.floor(down * height), np.floor(right * width)
    corner = (np.maximum(0, top - cut), np.maximum(0, left - cut))
    box = (*corner, np.minimum(height, top + cut) - corner[0], np.minimum(width, left + cut) - corner[1])
    fixed = {
        "factor": 1.8 * level + 0.1,
        "step": 2.0 ** min(7, 8 - int(4 * level)),  # a shift of all 8 bits is one of 7
        "threshold": float(int(256 * level) % 256),
        "add": float(int(110 * level)),
    }
    columns: dict[str, Any] = dict(zip((*_AFFINE, *_CUTOUT), (*maps, *box), strict=True))
    return _grouped(operation, columns | {name: np.full(len(operation), value) for name, value in fixed.items()})


def _affine(
    operation: Indices, signed: Floats, shift: float, rotation: Callable[[Floats], tuple[Floats, ...]]
) -> Floats:
    """[6, batch]: maps of what moves pixels, by up to `shift`, 0.3 (shears) and 30 degrees; others are the identity."""
    maps = np.repeat(np.array([[1.0], [0.0], [0.0], [0.0], [1.0], [0.0]]), len(signed), axis=1)
    for name, row, most in (("ShearX", 1, 0.3), ("ShearY", 3, 0.3), ("TranslateX", 2, shift), ("TranslateY", 5, shift)):
        rows = operation == ALL.index(name)
        maps[row, rows] = most * signed[rows]
    rows = operation == ALL.index("Rotate")
    maps[:, rows] = rotation(np.radians(30.0 * signed[rows]))
    return maps


class RandStyle(NamedTuple):
    """One library's RandAugment."""

    stream: str  # name of its draws
    draws: int  # random numbers per turn, the first of which chooses the operation
    operations: tuple[str, ...]
    parameters: Callable[[Indices, Floats, int, float, int, int], RandTurn]


RAND_STYLES = {
    "torchvision": RandStyle("rand", 2, OPERATIONS, _torchvision),
    "timm": RandStyle(
        "timm",
        5,
        (
            *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color"),
            *("Contrast", "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY"),
        ),
        _timm,
    ),
    "big_vision": RandStyle(
        "bigvis",
        4,
        (
            *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast"),
            *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd"),
        ),
        _big_vision,
    ),
}


def rendering(style: str, preprocess: PreprocessConfig, device: torch.device) -> Rendering | None:
    """How the RandAugment of a style changes pixels; none: torchvision's way."""
    if style == "timm":
        fill = torch.tensor(fill_colour(preprocess), device=device, dtype=torch.float32)
        return Rendering(fill, affine_interpolation(preprocess))
    return Rendering(torch.full((3,), _GREY, device=device), "nearest", True) if style == "big_vision" else None


def rand_augmented(images: Tensor, turn: RandTurn, how: Rendering | None = None) -> Tensor:
    """Images [batch, 3, height, width] of whole numbers, each under its operation; columns are on the same device.

    `how` is for maps in plain numbers; without it they are in fixed point, nearest neighbour.
    """
    for group, (begin, end) in enumerate(itertools.pairwise(turn.bounds)):
        if begin == end:
            continue
        rows = turn.columns["rows"][begin:end].to(torch.int64)
        changed = _changed(ALL[_GROUPS[group]], images[rows], lambda name, rows=rows: turn.columns[name][rows], how)  # type: ignore[misc]
        images = images.index_copy(0, rows, changed)
    return images


def _changed(name: str, images: Tensor, of: Column, how: Rendering | None) -> Tensor:
    """A group under its operation: "ShearX" stands for all that move pixels, "Brightness" for those that enhance."""
    height, width = images.shape[-2:]
    tensorflow = how is not None and how.tensorflow
    if name == "ShearX":
        if how is None:
            return ops.moved(images, torch.stack([of(part) for part in _MAP]).to(torch.int64), _FIXED)
        return ops.warped(images, torch.stack([of(part) for part in _AFFINE]), how.fill, how.interpolation)
    if name == "Brightness":
        which = of("operation") - ENHANCES
        if not tensorflow:
            return ops.enhanced(images, which, of("factor"))
        return ops.enhanced(
            images, which, of("factor"), tensorflow_grey(images), float(min(255, height * width // 256))
        )
    if name == "Sharpness":
        return ops.blended(images, ops.smoothed(images, half=0.0 if tensorflow else 0.5), of("factor"))
    if name == "Cutout":
        return torch.where(ops.within(ops.CropBoxes(*(of(side) for side in _CUTOUT)), height, width), _GREY, images)
    return _COLOURS[name](images, of)


def _solarised_sum(images: Tensor, of: Column) -> Tensor:
    added = (images + of("add").view(-1, 1, 1, 1)).clamp_(max=255)
    return torch.where(images < ops.SOLARISE_FROM, added, images)


_COLOURS: dict[str, Callable[[Tensor, Column], Tensor]] = {  # alike in every library
    "Posterize": lambda images, of: ops.posterised(images, of("step")),
    "Solarize": lambda images, of: torch.where(images < of("threshold").view(-1, 1, 1, 1), images, 255 - images),
    "SolarizeAdd": _solarised_sum,
    "Invert": lambda images, _: 255 - images,
    "AutoContrast": lambda images, _: ops.autocontrasted(images),
    "Equalize": lambda images, _: ops.equalised(images),
}


def tensorflow_grey(images: Tensor) -> Tensor:
    """[batch, 1, height, width]: TensorFlow's grey of bytes, which are made parts of 1 and then of 255.5, and cut."""
    weights = (0.2989, 0.5870, 0.1140)
    red, green, blue = (weight * channel for weight, channel in zip(weights, (images / 255).unbind(1), strict=True))
    return ((red + green + blue) * 255.5).floor_()[:, None]


@lru_cache(8)
def _table(space: Space, size: int) -> Floats:
    """[operations, levels, signs, columns]: parameters of torchvision's operations at every strength.

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
    cos, sin, middle = math.cos(radians), math.sin(radians), size / 2
    return cos, sin, middle - (cos + sin) * middle, -sin, cos, middle - (cos - sin) * middle


def _fixed_point(xx: float, xy: float, x: float, yx: float, yy: float, y: float) -> tuple[int, ...]:
    """As Pillow: parts of 2^-16, taken at the middle of a pixel. What may be large goes in two numbers, for float32."""
    ax, bx, ay, by = (math.floor(v * 2**_FIXED + 0.5) for v in (xx, xy, yx, yy))
    cx, cy = (math.floor((v + p / 2 + q / 2) * 2**_FIXED + 0.5) for v, p, q in ((x, xx, xy), (y, yx, yy)))
    part = (1 << _FIXED) - 1
    return ax, bx, cx >> _FIXED, cx & part, ay, by, cy >> _FIXED, cy & part
