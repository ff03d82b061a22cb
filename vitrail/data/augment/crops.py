"""Random rectangles, for crops and for erasing: torchvision's distributions, from numbers that are given.

Draws are [batch, BOX_DRAWS] in [0, 1), ten tries an image at once: a batch takes no loop, and one image
no call of a generator for every number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import AugmentConfig

_TRIES = 10  # as in torchvision
BOX_DRAWS = 2 * _TRIES + 2
_ERASED_SHARE, _ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)


def crop_boxes(
    config: AugmentConfig, drawn: NDArray[np.float64], height: int, width: int
) -> tuple[NDArray[np.float64], ...]:
    """Top, left, height, width, each [batch], of crops: ten tries, then the centre at the nearest ratio."""
    tall, wide = _rectangles(drawn, height * width, config.scale, config.ratio)
    fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
    found, first = fits.any(1), (np.arange(len(drawn)), fits.argmax(1))
    least, most = min(config.ratio), max(config.ratio)
    other_width, other_height = width, height
    if width / height < least:
        other_height = round(width / least)
    elif width / height > most:
        other_width = round(height * most)
    tall, wide = np.where(found, tall[first], other_height), np.where(found, wide[first], other_width)
    down, right = drawn[:, -2:].T
    top = np.where(found, np.floor(down * (height - tall + 1)), (height - other_height) // 2)
    left = np.where(found, np.floor(right * (width - wide + 1)), (width - other_width) // 2)
    return top, left, tall, wide


def erasing_boxes(drawn: NDArray[np.float64], size: int) -> tuple[NDArray[np.bool_], tuple[NDArray[np.float64], ...]]:
    """Whether ten tries found a rectangle, and its top, left, height, width; as torchvision."""
    # torchvision's ratio is height over width here, and width over height when it crops.
    wide, tall = _rectangles(drawn, size * size, _ERASED_SHARE, _ERASED_RATIO)
    fits: NDArray[np.bool_] = (tall < size) & (wide < size)
    first = np.arange(len(drawn)), fits.argmax(1)
    tall, wide = tall[first], wide[first]
    down, right = drawn[:, -2:].T
    return fits[first], (np.floor(down * (size - tall + 1)), np.floor(right * (size - wide + 1)), tall, wide)


def _rectangles(
    drawn: NDArray[np.float64], area: int, share: tuple[float, float], ratio: tuple[float, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Heights and widths [batch, tries], of a uniform share of the area and a log-uniform ratio of width to height."""
    areas = area * (share[0] + (share[1] - share[0]) * drawn[:, :_TRIES])
    low, high = np.log(ratio)
    ratios = np.exp(low + (high - low) * drawn[:, _TRIES : 2 * _TRIES])
    return np.rint(np.sqrt(areas / ratios)), np.rint(np.sqrt(areas * ratios))
