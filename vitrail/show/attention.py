"""Attention as pictures: where a model looked, laid over the image."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

STRENGTH = 0.55  # share of the colours in an overlay; the rest is the image in grey


def overlay(image: NDArray[np.uint8], attention: Tensor | NDArray[np.floating]) -> NDArray[np.uint8]:
    """`attention` [rows, columns] as colours over `image` [height, width, 3]: dark is least, bright is most.

    The map is enlarged bilinearly and stretched to its own lowest and highest value; a constant map is all dark.
    """
    import matplotlib

    grid = np.asarray(torch.as_tensor(attention).detach().cpu().float())
    if grid.ndim != 2 or not np.isfinite(grid).all():
        raise ValueError(f"an attention map must be finite numbers [rows, columns], got shape {list(grid.shape)}")
    height, width = image.shape[:2]
    large = np.asarray(Image.fromarray(grid).resize((width, height), Image.Resampling.BILINEAR))
    low, high = float(large.min()), float(large.max())
    level = (large - low) / (high - low) if high > low else np.zeros_like(large)
    colours = matplotlib.colormaps["inferno"](level)[..., :3] * 255
    grey = image.astype(np.float64).mean(2, keepdims=True)
    return np.rint((1 - STRENGTH) * grey + STRENGTH * colours).astype(np.uint8)
