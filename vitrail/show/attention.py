"""Attention as pictures: where a model looked, laid over the image."""

from __future__ import annotations

from collections.abc import Sequence

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


def rollout(maps: Sequence[Tensor], prefix: int) -> Tensor:
    """How much of each patch reaches the class token: `maps`, one [heads, tokens, tokens] a layer -> [patches].

    Each layer's heads are averaged, half of the residual path is mixed in, and layers are multiplied (Abnar and
    Zuidema 2020). Rows of the `prefix` leading tokens are read at the first of them; without any, at the mean of all.
    """
    if not maps:
        raise ValueError("rollout needs the attention maps of at least one layer")
    tokens = maps[0].shape[-1]
    through = torch.eye(tokens, dtype=torch.float32, device=maps[0].device)
    for layer in maps:
        mean = layer.float().mean(0)
        mean = mean / mean.sum(-1, keepdim=True)
        through = 0.5 * (through + mean @ through)
    seen = through[0] if prefix else through.mean(0)
    return seen[prefix:]
