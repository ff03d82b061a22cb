"""Loaders whose images live on the device: what is read, decoded and copied once is afterwards only gathered.

Both are the host's loaders with another origin of pieces, so order, ranks, accumulation, labels and mixing are the same
code. On CUDA what comes next is gathered and augmented, on a stream of its own, while the current batch is used. Small
batches are augmented several at a time: the hundreds of operations cost the same to begin for 250 images as for 2,500.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.device_augment import DeviceAugment
from vitrail.data.augment.host import Augment, stored_alike
from vitrail.data.dataset import Split
from vitrail.data.loading.device_images import DeviceImages
from vitrail.data.loading.loader import EvalLoader, TrainLoader
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.loading.workers import BatchTask, DecodedBatch
from vitrail.data.preprocess import Preprocess

# Bytes of views that are augmented at a time; a batch of more is one by itself. A processor's caches hold little more.
TOGETHER = {"cuda": 8 << 20, "cpu": 1 << 20}


class DeviceLoader(TrainLoader):
    """As `TrainLoader`, with all images on the device (see `DeviceImages`) and `DeviceAugment` in place of `Augment`.

    `workers` read images, once, when the first batch is wanted; `images` takes those of another loader instead. Rows
    come in the order of `TrainLoader`, under other draws of the same augmentations. Raises as `TrainLoader`, and where
    views want images stored in different forms.
    """

    def __init__(
        self,
        split: Split,
        order: BatchSampler,
        augment: Augment,
        preprocess: Preprocess,
        *,
        classes: int,
        multilabel: bool,
        seed: int,
        device: torch.device | str,
        workers: int,
        start: int,
        stop: int,
        accumulate: int = 1,
        rank: int = 0,
        world: int = 1,
        views: int | Sequence[Augment] = 1,
        start_method: str | None = None,
        images: DeviceImages | None = None,
    ) -> None:
        super().__init__(
            split,
            order,
            augment,
            preprocess,
            classes=classes,
            multilabel=multilabel,
            seed=seed,
            device=device,
            workers=workers,
            start=start,
            stop=stop,
            accumulate=accumulate,
            rank=rank,
            world=world,
            views=views,
            start_method=start_method,
        )
        if not stored_alike([augment, *self.augments]):
            raise ValueError(
                "data.loader: device keeps images in one form, and these views want several; give data.weak the crop "
                "of data.augment (resized, where sizes differ), or use --data.loader host"
            )
        self._changes = [DeviceAugment(a.config, a.preprocess) for a in self.augments]
        self.images = images or DeviceImages(
            split, augment.config, preprocess, device=device, workers=workers, start_method=start_method
        )
        self._labels: tuple[Tensor, Tensor, Tensor | None] | None = None

    def received(self) -> Iterator[DecodedBatch]:
        """Pieces made on the device; on CUDA those of a group of steps ahead of what is used."""
        pixels = self.images.pixels
        if self._copies is None:
            for tasks in self._groups():
                yield from self._wanted(self._made(tasks, pixels))
            return
        self._copies.wait_stream(torch.cuda.current_stream(self.device))  # images may still be on their way
        ahead: list[DecodedBatch] = []
        for tasks in self._groups():
            ready = self._all_awaited(ahead)  # before the next are begun, or their use would wait for those as well
            with torch.cuda.stream(self._copies):
                ahead = self._made(tasks, pixels)
            yield from self._wanted(ready)
        yield from self._wanted(self._all_awaited(ahead))

    def _groups(self) -> Iterator[list[BatchTask]]:
        """Tasks of steps that are augmented together.

        Groups are counted from step 0, and the first is whole wherever the run begins: products of another number of
        images may round differently, and a resumed run must see the same bytes.
        """
        image = sum(3 * augment.preprocess.size**2 for augment in self.augments)
        steps = max(1, TOGETHER.get(self.device.type, TOGETHER["cpu"]) // (self.piece * self.accumulate * image))
        for first in range(self.start - self.start % steps, self.stop, steps):
            yield [task for at in range(first, min(first + steps, self.stop)) for task in self.tasks_of(at)]

    def _wanted(self, pieces: list[DecodedBatch]) -> Iterator[DecodedBatch]:
        return (piece for piece in pieces if piece.task.step >= self.start)

    def _all_awaited(self, pieces: list[DecodedBatch]) -> list[DecodedBatch]:
        return [ready for ready in map(self._awaited, pieces) if ready is not None]

    def _made(self, tasks: Sequence[BatchTask], pixels: Tensor) -> list[DecodedBatch]:
        drawn = np.concatenate([task.draws for task in tasks])
        kept = ~np.isin(drawn[:, 0], list(self.images.bad))
        label, index, levels = self._tables()
        rows = self._sent_rows(drawn[kept, 0])
        views: list[Tensor] = []
        if len(rows):
            gathered = pixels[rows]
            for view, change in enumerate(self._changes):
                key = (self.seed, drawn[kept, 1], self.split.index[drawn[kept, 0]], view, drawn[kept, 2])
                views.append(change(gathered, np.stack(np.broadcast_arrays(*key), 1)))
        label, index, levels = label[rows], index[rows], None if levels is None else levels[rows]
        pieces, begin = [], 0
        for task, own in zip(tasks, np.split(kept, np.cumsum([len(task.draws) for task in tasks])[:-1]), strict=True):
            mine = slice(begin, begin + int(own.sum()))
            begin = mine.stop
            pieces.append(
                DecodedBatch(
                    task=task,
                    views=tuple(view[mine] for view in views) if own.any() else (),
                    label=label[mine],
                    index=index[mine],
                    levels=None if levels is None else levels[mine],
                    places=task.place + np.flatnonzero(own),
                    skipped=[(self.split.keys[r], self.images.bad[r]) for r in task.draws[~own, 0].tolist()],
                )
            )
        return pieces

    def _tables(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Labels, stable indices and labels at all levels of all rows, on the device."""
        if self._labels is None:
            label = torch.from_numpy(self.split.labels).to(self.device)
            levels = None if self.split.levels is None else torch.from_numpy(self.split.levels).to(self.device)
            index = torch.from_numpy(self.split.index).to(self.device)
            self._labels = (label.to(torch.float32) if label.ndim == 2 else label), index, levels
        return self._labels

    def _sent_rows(self, rows: np.ndarray) -> Tensor:
        sent = torch.from_numpy(np.ascontiguousarray(rows))
        if self.device.type == "cuda":
            return sent.pin_memory().to(self.device, non_blocking=True)
        return sent.to(self.device)


class DeviceEvalLoader(EvalLoader):
    """As `EvalLoader`; the first complete pass leaves its batches on the device, later ones read them there.

    So pixels are those of `EvalLoader`, whatever the preprocessing.
    """

    def __init__(
        self,
        split: Split,
        preprocess: Preprocess,
        *,
        batch: int,
        device: torch.device | str,
        workers: int,
        rank: int = 0,
        world: int = 1,
        start_method: str | None = None,
    ) -> None:
        super().__init__(
            split,
            preprocess,
            batch=batch,
            device=device,
            workers=workers,
            rank=rank,
            world=world,
            start_method=start_method,
        )
        self._kept: list[DecodedBatch] | None = None

    def received(self) -> Iterator[DecodedBatch]:
        """Pieces in bytes, from the device once they are there."""
        if self._kept is not None:
            yield from self._kept
            return
        pieces: list[DecodedBatch] = []
        for piece in super().received():
            pieces.append(piece)
            yield piece
        self._kept = pieces
        self.close()  # workers have nothing left to do
