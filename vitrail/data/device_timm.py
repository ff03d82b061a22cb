"""RandAugment in timm's style on a batch: its 15 operations with Pillow's smooth affine maps.

As in `device_randaugment`, whose operations on colours these are, the host draws a turn of one operation an image.
Magnitudes are drawn for each image, so that parameters are computed and not looked up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.device_pixels import AFFINE
from vitrail.data.device_randaugment import ALL, RandTurn, grouped

TIMM_OPERATIONS = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast"),
    *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY"),
)
TIMM_DRAWS = 5  # numbers a turn: operation, whether it comes, two for the magnitude, sign
_COMES = 0.5
_LEVELS = 10.0  # timm's magnitudes are of this


def draw_timm(chances: NDArray[np.float64], magnitude: int, std: float, size: int) -> RandTurn:
    """A turn from chances [batch, TIMM_DRAWS] in [0, 1)."""
    which, comes, radius, angle, sign = chances.T
    places = np.array([ALL.index(name) for name in TIMM_OPERATIONS])
    chosen = places[np.floor(which * len(places)).astype(np.int64)]
    operation = np.where(comes <= _COMES, chosen, ALL.index("Identity"))
    normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)
    level = np.clip(magnitude + std * normal, 0, _LEVELS) / _LEVELS
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
