"""RandAugment in big_vision's style: 16 operations, each certain to come, at a level of 10; on a batch, or one image.

It is TensorFlow's first RandAugment, with what ViTs of that library owe to it (`randaug(2, 10)`):

- Posterize and Solarize grow *weaker* with the level. Solarize's threshold is a byte, so that at level 10 it is not 256
  but 0, and everything is inverted.
- Contrast blends with the number of pixels over 256 and not with their mean: 196 for 224 x 224 pixels.
- Images move by up to 100 pixels and squares of up to 80 x 80 are cut out, whatever the size of the image: these
  numbers are for 224.
- What an image leaves is grey (128), pixels are the nearest, enhancements only ever go one way (0.1 to 1.9).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.device_pixels import AFFINE, Boxes, blended, warped, within
from vitrail.data.device_randaugment import ALL, ENHANCES, Column, RandTurn, grouped, in_groups, recoloured, smoothed

BIG_VISION_OPERATIONS = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast", "Brightness"),
    *("Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd"),
)
BIG_VISION_DRAWS = 4  # numbers a turn: operation, sign, two for the middle of what is cut out
_LEVELS, _SHIFT, _CUT, _GREY = 10.0, 100.0, 40, 128.0
_LUMINANCE = (0.2989, 0.5870, 0.1140)
_CUTOUT = ("cut_top", "cut_left", "cut_height", "cut_width")


def draw_big_vision(chances: NDArray[np.float64], magnitude: int, height: int, width: int) -> RandTurn:
    """A turn from chances [batch, BIG_VISION_DRAWS] in [0, 1)."""
    which, sign, down, right = chances.T
    places = np.array([ALL.index(name) for name in BIG_VISION_OPERATIONS])
    operation = places[np.floor(which * len(places)).astype(np.int64)]
    level = magnitude / _LEVELS
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
            inside = within(Boxes(*(of(side) for side in _CUTOUT)), height, width)
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
