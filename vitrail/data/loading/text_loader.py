"""Batches of texts on the device, with the interface, the order and the places of the loaders of images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.data.batch import Batch
from vitrail.data.dataset import Split
from vitrail.data.loading.sampler import BatchSampler, share_of_batch
from vitrail.data.tokenizer import EncodedTexts


class _Texts(AbstractContextManager["_Texts"]):
    """What training and evaluation share."""

    def __init__(self, texts: EncodedTexts, split: Split, device: torch.device | str, length: int | None) -> None:
        assert len(texts) == len(split)
        self.texts, self.split, self.device, self.length = texts, split, torch.device(device), length
        self.skipped: list[tuple[str, str]] = []  # as loaders of images have it: every text can be read

    def close(self) -> None:
        """There are no workers to end."""

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _batch(self, rows: Sequence[int] | NDArray[np.int64], step: int = 0, share: float = 1.0) -> Batch:
        rows = np.asarray(rows, np.int64)
        label = torch.from_numpy(self.split.labels[rows]).to(self.device)
        index = torch.from_numpy(self.split.index[rows]).to(self.device)
        texts = self.texts.batch(rows, self.length).to(self.device)
        return Batch((texts,), label, label, index, step=step, share=share)


class TextTrainLoader(_Texts):
    """Batches of optimiser steps `start` to `stop`, cut as `TrainLoader` cuts them.

    `length` is what every batch is padded to (none: its longest text). Raises `ValueError` where it cannot be cut.
    """

    def __init__(
        self,
        texts: EncodedTexts,
        split: Split,
        order: BatchSampler,
        *,
        device: torch.device | str,
        start: int,
        stop: int,
        accumulate: int = 1,
        rank: int = 0,
        world: int = 1,
        length: int | None = None,
    ) -> None:
        super().__init__(texts, split, device, length)
        self.shares = [
            share_of_batch(order.batch, world, accumulate, rank, a, things="texts") for a in range(accumulate)
        ]
        self.order, self.start, self.stop, self.pieces = order, start, stop, world * accumulate

    def __len__(self) -> int:
        return max(0, self.stop - self.start) * len(self.shares)

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.start, self.stop):
            for first, count in self.shares:
                share = count * self.pieces / self.order.batch
                yield self._batch(self.order.table(step, first, count)[:, 0], step, share)


class TextEvalLoader(_Texts):
    """Every text of a split once, in order: rank r of w takes rows r, r + w, r + 2w, ..."""

    def __init__(
        self,
        texts: EncodedTexts,
        split: Split,
        *,
        batch: int,
        device: torch.device | str,
        rank: int = 0,
        world: int = 1,
        length: int | None = None,
    ) -> None:
        super().__init__(texts, split, device, length)
        if batch < 1:
            raise ValueError(f"an evaluation batch of {batch} texts is impossible; use at least 1")
        self.rows, self.size = range(rank, len(split), world), batch

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.size)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self.rows), self.size):
            yield self._batch(self.rows[first : first + self.size])
