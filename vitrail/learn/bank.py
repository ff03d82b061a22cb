"""A memory bank: the last embeddings, first in, first out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.kernels.similarity import top_rows, uncompiled

UNKNOWN = -1


class Bank(nn.Module):
    """The last `size` embeddings [size, width] with their labels; the oldest make room.

    It begins with random directions, is part of checkpoints, and is never copied: searches go over `rows` as they lie.
    Second rows (`second` is their width; 0: none) hold another embedding of the images in the same slots. In a process
    group `vitrail.learn.sharded_bank.make_bank` divides the rows among processes.
    """

    rows: Tensor  # [size, width]
    labels: Tensor  # [size]; UNKNOWN: none
    oldest: Tensor  # the slot that is overwritten next
    beside: Tensor  # second rows: [size, their width]

    def __init__(self, size: int, width: int, second: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("rows", random_directions(size, width).to(dtype))
        self.register_buffer("labels", torch.full((size,), UNKNOWN))
        self.register_buffer("oldest", torch.zeros((), dtype=torch.int64))
        if second:
            self.register_buffer("beside", random_directions(size, second).to(dtype))

    def __len__(self) -> int:
        return self.size

    def here(self, second: bool = False) -> Tensor:
        """The rows, or second rows, that this process holds."""
        return self.beside if second else self.rows

    def labels_here(self) -> Tensor:
        """Labels of the rows that this process holds."""
        return self.labels

    @uncompiled
    @torch.no_grad()
    def push(self, values: Tensor, labels: Tensor | None = None, second: Tensor | None = None) -> Tensor:
        """Overwrite the oldest rows with `values` [batch, width]; returns their slots [batch].

        A row that is not finite (of a step that will be skipped) leaves the old one. Nothing here waits for the device.
        Raises `ValueError` where the batch is larger than the bank.
        """
        if len(values) > self.size:
            raise ValueError(f"a bank of {self.size} rows cannot take a batch of {len(values)}; raise objective.bank")
        slots = (self.oldest + torch.arange(len(values), device=self.rows.device)) % self.size
        finite = values.isfinite().all(1)
        if second is not None:
            finite = finite & second.isfinite().all(1)
            _overwrite(self.beside, self.local(slots), finite[:, None], second)
        _overwrite(self.rows, self.local(slots), finite[:, None], values)
        labels = torch.full_like(slots, UNKNOWN) if labels is None else labels
        _overwrite(self.labels, slots, finite, labels)
        self.oldest.copy_((self.oldest + len(values)) % self.size)
        return slots

    def local(self, slots: Tensor) -> Tensor:
        """Rows of `here` that hold these slots."""
        return slots

    @uncompiled
    @torch.no_grad()
    def nearest(
        self, queries: Tensor, k: int, own: Tensor, labels: Tensor | None = None, second: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Products and slots of the k rows (`second`: second rows) nearest to queries [batch, width]: [batch, k] each.

        The slots `own` [batch] come first; with `labels` [batch] only rows of that label are taken.
        """
        return top_rows(queries, self.here(second), k, own, labels, None if labels is None else self.labels)

    @uncompiled
    @torch.no_grad()
    def rows_at(self, slots: Tensor) -> Tensor:
        """The rows of these slots [...]: [..., width], in float32."""
        return self.rows[slots].float()


def _overwrite(table: Tensor, places: Tensor, finite: Tensor, values: Tensor) -> None:
    table.index_copy_(0, places, torch.where(finite, values.detach().to(table.dtype), table[places]))


def random_directions(count: int, width: int) -> Tensor:
    """Unit vectors [count, width], the same for the same count."""
    generator = torch.Generator().manual_seed(count)
    return nn.functional.normalize(torch.randn(count, width, generator=generator))
