"""One remembered embedding for every training image, found by the image's stable index."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.kernels.similarity import uncompiled
from vitrail.learn.bank import UNKNOWN, random_directions
from vitrail.learn.collective import of_all


class ImageMemory(nn.Module):
    """Rows [images, width], in the order of `index`, and the labels of the images; rows are part of checkpoints.

    It begins with random directions, or `empty`: with zeros. In a process group every process holds all rows and sees
    the updates of all. Raises `ValueError` where an index comes twice.
    """

    rows: Tensor  # [images, width]
    labels: Tensor  # [images]
    row_of_index: Tensor  # [largest index + 1]

    def __init__(
        self,
        index: NDArray[np.int64],
        width: int,
        labels: NDArray[np.int64] | None = None,
        dtype: torch.dtype = torch.float32,
        empty: bool = False,
    ) -> None:
        super().__init__()
        labels = np.full(len(index), UNKNOWN) if labels is None else labels
        if len(index) != len(labels) or len(np.unique(index)) != len(index):
            raise ValueError("a memory of images takes one label and one index for every image")
        places = torch.full((int(index.max()) + 1,), UNKNOWN, dtype=torch.int64)
        places[torch.from_numpy(index)] = torch.arange(len(index))
        self.register_buffer("row_of_index", places, persistent=False)
        self.register_buffer("labels", torch.from_numpy(labels.copy()), persistent=False)
        rows = torch.zeros(len(index), width) if empty else random_directions(len(index), width)
        self.register_buffer("rows", rows.to(dtype))

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: Tensor) -> Tensor:
        """Row of each image [batch]."""
        return self.row_of_index[index]

    def known(self, index: Tensor) -> Tensor:
        """Of a memory that began empty: whether the row of each image [batch] was set."""
        return self.rows[self.where(index)].any(1)

    @uncompiled
    @torch.no_grad()
    def update(self, index: Tensor, values: Tensor, share: float = 0.5) -> None:
        """Move the rows of these images towards `values` [batch, width]: row <- (1 - share) row + share value.

        An image that comes twice moves to the last of its values; values that are not finite move nothing.
        """
        index, values = of_all(index), of_all(values.detach().to(self.rows.dtype))
        at = self.where(index)
        old = self.rows[at]
        finite = values.isfinite().all(1, keepdim=True)
        self.rows[at] = torch.where(finite, torch.lerp(old, values, share), old)
