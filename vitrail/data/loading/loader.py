"""From rows to batches on the device: what a training run and an evaluation iterate over.

The main process normalises and mixes what workers made. What a batch holds depends on its step and on nothing else: not
on workers, processes, or where the run began.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

import torch
from PIL import Image
from torch import Tensor

from vitrail.data.augment.host import Augment
from vitrail.data.augment.mixing import mix
from vitrail.data.batch import Batch
from vitrail.data.dataset import BadImage, Split
from vitrail.data.loading.sampler import BatchSampler, Draw
from vitrail.data.loading.workers import BatchTask, DecodedBatch, PieceLoader
from vitrail.data.preprocess import Preprocess

TINY_PIXELS = 64 * 64
MOST_WORKERS = 16


class _TrainViews:
    """Augmented views of an image; picklable."""

    def __init__(self, augments: Sequence[Augment], seed: int) -> None:
        self.augments, self.seed = augments, seed

    def __call__(self, image: Image.Image, index: int, draw: Draw) -> list[Tensor]:
        return [
            augment(image, (self.seed, draw.epoch, index, view, draw.repeat))
            for view, augment in enumerate(self.augments)
        ]


class _EvalView:
    """The one view of an evaluation; picklable."""

    def __init__(self, preprocess: Preprocess) -> None:
        self.preprocess = preprocess

    def __call__(self, image: Image.Image, index: int, draw: Draw) -> list[Tensor]:
        return [self.preprocess(image)]


class TrainLoader(PieceLoader):
    """Batches of optimiser steps `start` to `stop`: for each step `accumulate` of them, one after the other.

    The global batch of a step is cut into world * accumulate equal runs of places; piece a of rank r is run
    r * accumulate + a. An image that cannot be read is left out and listed in `skipped`, never replaced; when mixing,
    the others keep their places and partners, and the one whose partner is missing stays unmixed. `views` is how many
    views `augment` makes of an image, or what makes each of them; mixing is as `augment` says. Raises `ValueError`
    where the batch cannot be cut, labels do not fit `classes`, or nothing of a batch can be read.
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
    ) -> None:
        self.augments = [augment] * views if isinstance(views, int) else list(views)
        super().__init__(
            split, _TrainViews(self.augments, seed), device=device, workers=workers, start_method=start_method
        )
        _check_rank(rank, world)
        _check_labels(split, classes, multilabel)
        if len(split) != order.rows:
            raise ValueError(f"the order is over {order.rows} rows, but {split.name} has {len(split)}")
        self.piece, left_over = divmod(order.batch, world * accumulate)
        if left_over:
            raise ValueError(
                f"data.batch: {order.batch} images cannot be cut into {world} processes x {accumulate} accumulation "
                f"pieces; use a multiple of {world * accumulate}"
            )
        self.mixes = bool(augment.config.mixup or augment.config.cutmix)
        if self.mixes and self.piece % 2:
            raise ValueError(
                f"data.batch: mixup and CutMix mix pairs, but {order.batch} images over {world} processes x "
                f"{accumulate} accumulation pieces are {self.piece} each; use a multiple of {2 * world * accumulate}"
            )
        self.order, self.augment, self.preprocess, self.classes, self.seed = order, augment, preprocess, classes, seed
        self.start, self.stop, self.accumulate, self.rank = start, stop, accumulate, rank

    def __len__(self) -> int:
        return max(0, self.stop - self.start) * self.accumulate

    def __iter__(self) -> Iterator[Batch]:
        for piece in self.received():
            self.note(piece.skipped)
            if not piece.views:
                key, reason = piece.skipped[0]
                raise ValueError(
                    f"none of the {len(piece.task.draws)} images of a batch of step {piece.task.step} could be read, "
                    f"the first being {key} ({reason}); run `vitrail check` on the data"
                )
            yield self._batch(piece)

    def tasks(self) -> Iterator[BatchTask]:
        for step in range(self.start, self.stop):
            yield from self.tasks_of(step)

    def tasks_of(self, step: int) -> Iterator[BatchTask]:
        """Those of one step."""
        for part in range(self.accumulate):
            place = (self.rank * self.accumulate + part) * self.piece
            yield BatchTask(step, place, self.order.table(step, place, self.piece))

    def _batch(self, piece: DecodedBatch) -> Batch:
        views = piece.views  # bytes: models normalise them in their first kernel
        target = piece.label
        if self.mixes:
            views = tuple(self.preprocess.normalize(view) for view in views)
            complete = len(piece.places) == len(piece.task.draws)
            mixed = [
                mix(
                    view,
                    piece.label,
                    classes=self.classes,
                    config=self.augment.config,
                    seed=self.seed,
                    step=piece.task.step,
                    place=piece.task.place,
                    places=None if complete else piece.places,
                )
                for view in views
            ]
            views, target = tuple(images for images, _ in mixed), mixed[0][1]
        return Batch(views, piece.label, target, piece.index, piece.levels, piece.task.step)


class EvalLoader(PieceLoader):
    """Every image of a split once, in order: rank r of w takes rows r, r + w, r + 2w, ..., none of them twice.

    The last batch may be smaller. Images that cannot be read are listed in `skipped`; a batch of which none can be read
    is left out, and if that holds for all of them the pass ends with `ValueError`.
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
        super().__init__(split, _EvalView(preprocess), device=device, workers=workers, start_method=start_method)
        _check_rank(rank, world)
        if batch < 1:
            raise ValueError(f"an evaluation batch of {batch} images is impossible; use at least 1")
        self.rows = range(rank, len(split), world)
        self.preprocess, self.batch = preprocess, batch

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.batch)

    def __iter__(self) -> Iterator[Batch]:
        empty = True
        for piece in self.received():
            self.note(piece.skipped)
            if piece.views:
                empty = False
                images = self.preprocess.normalize(piece.views[0])
                yield Batch((images,), piece.label, piece.label, piece.index, piece.levels)
        if empty and self.rows:
            key, reason = self.skipped[0]
            raise ValueError(
                f"none of the {len(self.rows)} images of {self.split.name} could be read, the first being {key} "
                f"({reason}); run `vitrail check` on the data"
            )

    def tasks(self) -> Iterator[BatchTask]:
        for first in range(0, len(self.rows), self.batch):
            yield BatchTask.once(first, self.rows[first : first + self.batch])


def auto_workers(split: Split | None = None) -> int:
    """How many workers suit this machine, for one of the processes that torchrun started on it.

    All cores this process may use but one, at most 16. Images of up to 64 x 64 pixels need little work and more cores
    are better left to the model: a quarter of the cores, at most 4. So a machine of two cores gets 1, and 0 for small
    images.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores //= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if split is not None and _tiny(split):
        return min(cores // 4, 4)
    return max(0, min(cores - 1, MOST_WORKERS))


def _tiny(split: Split) -> bool:
    for row in range(min(len(split), 8)):
        try:
            width, height = split.read(row).size
        except BadImage:
            continue
        return width * height <= TINY_PIXELS
    return False


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} does not exist among {world} processes")


def _check_labels(split: Split, classes: int, multilabel: bool) -> None:
    labels = split.labels
    if multilabel != (labels.ndim == 2):
        raise ValueError(
            f"labels of {split.name} have shape {list(labels.shape)}, which is not that of "
            f"{'several labels' if multilabel else 'one label'} an image"
        )
    if multilabel and labels.shape[1] != classes:
        raise ValueError(f"labels of {split.name} are over {labels.shape[1]} classes, the model over {classes}")
    if not multilabel and len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"labels of {split.name} run from {labels.min()} to {labels.max()}, the model has {classes} classes"
        )
