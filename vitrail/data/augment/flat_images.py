"""Images of unequal sizes in one flat buffer, from which windows are gathered upright and resampled in batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.augment import pixel_ops as ops
from vitrail.data.config import Interpolation

TOGETHER = 128  # windows that are resampled together: all of a batch, padded to the largest, would cost twice as much
_MOST_BYTES = 1 << 30  # of the gathered windows, as float32
# Orientation -> whether it begins at the last stored row, at the last column, and whether rows become columns.
_TURNS = np.array([(0, 0, 0), (0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)])


@dataclass(frozen=True)
class FlatImages:
    """Image i is uint8 [3, stored height, stored width] of `pixels` from offsets[i] on, and is turned by EXIF."""

    pixels: Tensor  # [bytes]
    offsets: NDArray[np.int64]
    stored: NDArray[np.int64]  # [images, 3]: height, width, orientation (1 to 8; 1 is upright)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[2, images]: heights and widths of the upright images."""
        height, width, orientation = self.stored.T
        return np.where(orientation > 4, (width, height), (height, width))

    def resampled(self, windows: NDArray[np.float64], size: int, interpolation: Interpolation) -> Tensor:
        """What is in the windows as uint8 [images, 3, size, size], as `pixel_ops.resampled`.

        Windows are [4, images]: top, left, height, width. Of [8, images] the other rows are a first row and column, and
        a height and width: the window is resized to those, reflected at its borders, and a square taken from there on.
        """
        device, parts, begin = self.pixels.device, [], 0
        table = self._table(windows, size)
        if device.type == "cuda" and (kernel := _kernel(device)) is not None:
            return kernel(self.pixels, table, size, interpolation)
        areas = windows[2] * windows[3]
        order = np.argsort(-areas, kind="stable")  # groups are of similar areas, however many sizes there are
        table = table[:, order]
        host = torch.from_numpy(np.concatenate([table, np.argsort(order)[None]]))
        columns = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
        while begin < len(order):
            end = begin + max(1, min(TOGETHER, int(_MOST_BYTES // (12 * areas[order[begin]]))))
            tall, wide = table[6:8, begin:end].max(1).tolist()
            parts.append(self._group(columns[:-1, begin:end], tall, wide, size, interpolation))
            begin = end
        return torch.cat(parts)[columns[-1]].to(torch.uint8)

    def _table(self, windows: NDArray[np.float64], size: int) -> NDArray[np.int64]:
        """[12, images]: first upright byte, bytes from a row, column and channel to the next, and windows of 8 rows."""
        height, width, orientation = self.stored.T
        last_row, last_column, turned = _TURNS[orientation].T
        first = self.offsets + last_row * (height - 1) * width + last_column * (width - 1)
        down, right = width * (1 - 2 * last_row), 1 - 2 * last_column
        steps = [first, np.where(turned, right, down), np.where(turned, down, right), height * width]
        whole = [0 * first, 0 * first, 0 * first + size, 0 * first + size]
        return np.stack([*steps, *windows, *(whole if len(windows) == 4 else ())]).astype(np.int64)

    def _group(self, table: Tensor, tall: int, wide: int, size: int, kind: Interpolation) -> Tensor:
        first, down, right, plane, top, left, height, width = (column.view(-1, 1) for column in table[:8])
        places = torch.arange(max(tall, wide, 3), device=table.device)
        rows = (top + places[:tall].minimum(height - 1)) * down
        columns = (left + places[:wide].minimum(width - 1)) * right
        channels = first + places[:3] * plane
        window = self.pixels[channels[:, :, None, None] + rows[:, None, :, None] + columns[:, None, None, :]]
        boxes = ops.CropBoxes(*torch.zeros_like(table[6:8], dtype=torch.float32), *table[6:8].to(torch.float32))
        of = [(ops.reflected_places(table[8 + i], size, table[10 + i, :, None]), table[10 + i]) for i in (0, 1)]
        return ops.resampled(window.to(torch.float32), boxes, size, kind, of)


@cache
def _kernel(device: torch.device) -> Callable[[Tensor, NDArray[np.int64], int, Interpolation], Tensor] | None:
    """The Triton kernel where it runs; elsewhere none."""
    try:
        from vitrail.kernels.windows_triton import resampled

        table = np.array([[0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 16, 16]] * 16).T  # of one pixel
        resampled(torch.zeros(3, dtype=torch.uint8, device=device), table, 16, "bicubic")
        return resampled
    except Exception as error:  # Triton is missing, or compiles nothing here
        warnings.warn(f"images are resampled without Triton, which takes longer: {error}", stacklevel=2)
        return None
