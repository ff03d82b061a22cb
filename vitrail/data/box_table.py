"""Where the object of each picture is, by stable index, as a model sees the pictures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import PreprocessConfig
from vitrail.data.dataset import Split


def box_table(split: Split, preprocess: PreprocessConfig) -> NDArray[np.float32]:
    """[largest index + 1, 4] left, top, right, bottom in sides of the picture; NaN where no image has that index.

    Raises `ValueError` where a split has no boxes, or where preprocessing would move them.
    """
    if split.boxes is None or not len(split):
        raise ValueError(f"{split.name} has no boxes to learn from; synthetic:shapes has one for every picture")
    side = preprocess.size
    size = split.read(0).size
    if size != (side, side) or preprocess.crop_ratio < 1:
        raise ValueError(
            f"boxes are in pixels of pictures of {size[0]}x{size[1]}, and a model that takes {side}x{side} (crop ratio "
            f"{preprocess.crop_ratio:g}) sees them elsewhere; use synthetic:shapes?size={side} and data.crop_ratio 1"
        )
    table = np.full((int(split.index.max()) + 1, 4), np.nan, np.float32)
    table[split.index] = split.boxes / side
    return table
