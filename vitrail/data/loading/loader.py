"""From rows to batches on the device, by worker processes: what a training run and an evaluation iterate over.

A loader lists which rows make each batch; workers read, augment and collate them; the main process copies the result to
the device (on CUDA one ahead on a stream of its own), normalises and mixes. What a batch holds depends on its step and
on nothing else: not on workers, processes, or where the run began. Everything that travels to workers is picklable, so
that they can be spawned.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrail.data.augment.host import Augment
from vitrail.data.augment.mixing import mix
from vitrail.data.batch import Batch, BatchIndices, CollatedBatch
from vitrail.data.dataset import BadImage, Split
from vitrail.data.loading.sampler import BatchSampler, Draw, share_of_batch
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.folder import decoded_at

TINY_PIXELS = 64 * 64
MOST_WORKERS = 16
TERM_PATIENCE = 20  # seconds that a worker goes on after SIGTERM

ViewsOf = Callable[[Image.Image, int, Draw], list[Tensor]]
"""Image, stable index, draw -> views, each uint8 [3, size, size]. Picklable."""
L = TypeVar("L", bound="BatchLoader")


class _Collated(Dataset[CollatedBatch]):
    """What runs in a worker: rows are read and collated."""

    def __init__(self, split: Split, views_of: ViewsOf) -> None:
        self.split, self.views_of = split, views_of

    def __getitem__(self, indices: BatchIndices) -> CollatedBatch:
        split = self.split
        views: list[list[Tensor]] = []
        rows: list[int] = []
        places: list[int] = []
        skipped: list[tuple[str, str]] = []
        for position, draw in enumerate(map(Draw._make, indices.draws.tolist()), indices.place):
            try:
                image = split.read(draw.row)
            except BadImage as bad:
                skipped.append((split.keys[draw.row], bad.reason))
                continue
            views.append(self.views_of(image, int(split.index[draw.row]), draw))
            rows.append(draw.row)
            places.append(position)
        return collated(split, indices, tuple(torch.stack(v) for v in zip(*views, strict=True)), rows, places, skipped)


def collated(split: Split, indices: BatchIndices, views: Any, rows: Any, places: Any, skipped: Any) -> CollatedBatch:
    """Views of rows, which are at these places of the global batch, with their labels."""
    label = torch.from_numpy(split.targets[rows])
    return CollatedBatch(
        indices,
        views,
        label=label.to(torch.float32) if label.ndim == 2 else label,
        index=torch.from_numpy(split.index[rows]),
        levels=None if split.levels is None else torch.from_numpy(split.levels[rows]),
        places=np.array(places, dtype=np.int64),
        skipped=skipped,
    )


class _Sampler:
    """The batches of a pass, again for each pass."""

    def __init__(self, batches: Callable[[], Iterator[BatchIndices]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[BatchIndices]:
        return self._batches()


class BatchLoader:
    """What training and evaluation share: workers, the copy to the device, and the list of what could not be read."""

    def __init__(
        self,
        split: Split,
        views_of: ViewsOf,
        *,
        device: torch.device | str,
        workers: int,
        start_method: str | None = None,
    ) -> None:
        if workers < 0:
            raise ValueError(f"data.workers: {workers} must be 0 or more")
        self.split, self.device, self.workers = split, torch.device(device), workers
        self.skipped: list[tuple[str, str]] = []  # (key, reason) of each image left out so far, once
        self._collated, self._start_method = _Collated(split, views_of), start_method
        self._loader: DataLoader[CollatedBatch] | None = None
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def close(self) -> None:
        """End the workers. Iterating again starts new ones."""
        loader, self._loader = self._loader, None
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()  # what its __del__ does, but now and not when the last reference goes

    def __enter__(self: L) -> L:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def indices(self) -> Iterator[BatchIndices]:
        """The rows of each batch of a pass."""
        raise NotImplementedError

    def received(self) -> Iterator[CollatedBatch]:
        """Batches on the device; on CUDA each is copied, on a stream of its own, while the one before is used."""
        if self._loader is None:
            self._loader = DataLoader(
                self._collated,
                batch_size=None,
                sampler=_Sampler(self.indices),
                num_workers=self.workers,
                collate_fn=_unchanged,
                pin_memory=self._copies is not None,
                persistent_workers=self.workers > 0,
                worker_init_fn=_leave_signals_to_main,
                multiprocessing_context=self._start_method if self.workers else None,
                # Its own: every pass draws a seed, which must not come out of the run's generator.
                generator=torch.Generator(),
            )
        if self._copies is None:
            for batch in self._loader:
                yield batch.changed(lambda tensor: tensor.to(self.device))
            return
        ahead: list[CollatedBatch] = []
        for batch in self._loader:
            ready = self._awaited(ahead)
            with torch.cuda.stream(self._copies):
                ahead = [batch.changed(lambda tensor: tensor.to(self.device, non_blocking=True))]
            yield from ready
        yield from self._awaited(ahead)

    def _awaited(self, batches: list[CollatedBatch], made: torch.cuda.Event | None = None) -> list[CollatedBatch]:
        """Batches that the copy stream made, by now or until an event, for use on the current one."""
        if not batches:
            return []
        current = torch.cuda.current_stream(self.device)
        assert self._copies is not None
        current.wait_event(made or self._copies.record_event())

        def used_here(tensor: Tensor) -> Tensor:
            tensor.record_stream(current)  # else its memory could be given to the next copy while still read
            return tensor

        return [batch.changed(used_here) for batch in batches]

    def note(self, skipped: list[tuple[str, str]]) -> None:
        """Add to `skipped` what is not there yet: a bad image comes again in every epoch."""
        known = {key for key, _ in self.skipped}
        self.skipped += [(key, reason) for key, reason in dict(skipped).items() if key not in known]


def _unchanged(batch: Any) -> Any:
    return batch


def _leave_signals_to_main(worker: int) -> None:
    """Ctrl-C and schedulers reach every process; the main one still wants its batch, and then ends the workers."""
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name, signal.SIGINT), signal.SIG_IGN)
    if hasattr(signal, "alarm"):  # SIGTERM may be from the main one
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(TERM_PATIENCE))


def _train_views(augments: Sequence[Augment], seed: int, image: Image.Image, index: int, draw: Draw) -> list[Tensor]:
    keys = [(seed, draw.epoch, index, view, draw.repeat) for view in range(len(augments))]
    return [augment(image, key) for augment, key in zip(augments, keys, strict=True)]


def _eval_view(preprocess: Preprocess, image: Image.Image, index: int, draw: Draw) -> list[Tensor]:
    return [preprocess(image)]


@dataclass(frozen=True)
class LoaderSpec:
    """Training batches: which images, how they are augmented, and which steps of which process."""

    split: Split
    sampler: BatchSampler
    augment: Augment  # of every view, unless `views` says otherwise; mixing is always its
    preprocess: Preprocess
    classes: int
    seed: int
    device: torch.device | str
    stop: int  # optimiser step
    start: int = 0
    multilabel: bool = False
    workers: int = 0
    accumulate: int = 1  # batches per step
    rank: int = 0
    world: int = 1
    views: int | Sequence[Augment] = 1  # how many, or the augmentation of each
    start_method: str | None = None  # of workers
    complete: bool = False  # whether a batch must have all of its images

    @property
    def augments(self) -> list[Augment]:
        """One per view."""
        return [self.augment] * self.views if isinstance(self.views, int) else list(self.views)


class TrainLoader(BatchLoader):
    """Batches of optimiser steps `start` to `stop`: for each step `accumulate` of them, one after the other.

    The global batch of a step is cut into world * accumulate runs of places (`share_of_batch`); batch a of rank r is
    run r * accumulate + a. An image that cannot be read is left out and listed in `skipped`, never replaced; when
    mixing, the others keep their places and partners, and the one whose partner is missing stays unmixed. Raises
    `ValueError` where the batch cannot be cut, labels do not fit `classes`, or too little of a batch can be read.
    """

    def __init__(self, spec: LoaderSpec) -> None:
        split, sampler, world, accumulate = spec.split, spec.sampler, spec.world, spec.accumulate
        self.spec, self.augments = spec, spec.augments
        super().__init__(
            split,
            partial(_train_views, self.augments, spec.seed),
            device=spec.device,
            workers=spec.workers,
            start_method=spec.start_method,
        )
        _check_rank(spec.rank, world)
        _check_labels(split, spec.classes, spec.multilabel)
        if len(split) != sampler.rows:
            raise ValueError(f"the order is over {sampler.rows} rows, but {split.name} has {len(split)}")
        self.mixes = bool(spec.augment.config.mixup or spec.augment.config.cutmix)
        share = partial(share_of_batch, sampler.batch, world, accumulate, pairs=self.mixes)
        self.shares = [share(spec.rank, piece) for piece in range(accumulate)]
        self.size = share(0, 0)[1]  # no share is larger, but for the last place of an odd batch
        if spec.complete and any(share(r, a)[1] != self.size for r in range(world) for a in range(accumulate)):
            unit = (1 + self.mixes) * world * accumulate
            raise ValueError(
                f"data.batch: processes that share a memory bank or running means need equally many images each, and "
                f"{sampler.batch} are not a multiple of {unit}; use one"
            )

    def __len__(self) -> int:
        return max(0, self.spec.stop - self.spec.start) * self.spec.accumulate

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.received():
            self.note(batch.skipped)
            key, reason = batch.skipped[0] if batch.skipped else ("", "")
            if key and self.spec.complete:
                raise ValueError(
                    f"{key} cannot be read any more ({reason}), and processes that share a memory bank or running "
                    "means need equally many images each; put it back, then resume the run"
                )
            if not batch.views:
                raise ValueError(
                    f"none of the {len(batch.indices.draws)} images of a batch of step {batch.indices.step} could be "
                    f"read, the first being {key} ({reason}); run `vitrail check` on the data"
                )
            yield self._mixed(batch)

    def indices(self) -> Iterator[BatchIndices]:
        for step in range(self.spec.start, self.spec.stop):
            yield from self.indices_of(step)

    def indices_of(self, step: int) -> Iterator[BatchIndices]:
        """Those of one step."""
        for first, count in self.shares:
            yield BatchIndices(step, first, self.spec.sampler.table(step, first, count))

    def _mixed(self, batch: CollatedBatch) -> Batch:
        spec, indices = self.spec, batch.indices
        # Bytes: models normalise them in their first kernel. 16 bits are not for all kernels.
        normalize = spec.preprocess.normalize
        views = tuple(normalize(view) if view.dtype == torch.uint16 else view for view in batch.views)
        target = batch.label
        if self.mixes:
            complete = len(batch.places) == len(indices.draws)
            mixed = [
                mix(
                    normalize(view),
                    batch.label,
                    classes=spec.classes,
                    config=spec.augment.config,
                    seed=spec.seed,
                    step=indices.step,
                    place=indices.place,
                    places=None if complete else batch.places,
                )
                for view in views
            ]
            views, target = tuple(images for images, _ in mixed), mixed[0][1]
        pieces, whole = spec.world * spec.accumulate, spec.sampler.batch
        share, missing = len(batch.places) * pieces / whole, len(indices.draws) - len(batch.places)
        if pieces == 1:  # the mean is over the images that are there
            share, missing = 1.0, 0
        return Batch(views, batch.label, target, batch.index, batch.levels, indices.step, share, missing)


class EvalLoader(BatchLoader):
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
        super().__init__(
            decoded_at(split, preprocess.at_least),
            partial(_eval_view, preprocess),
            device=device,
            workers=workers,
            start_method=start_method,
        )
        _check_rank(rank, world)
        if batch < 1:
            raise ValueError(f"an evaluation batch of {batch} images is impossible; use at least 1")
        self.rows = range(rank, len(split), world)
        self.preprocess, self.batch = preprocess, batch

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.batch)

    def __iter__(self) -> Iterator[Batch]:
        empty = True
        for batch in self.received():
            self.note(batch.skipped)
            if batch.views:
                empty = False
                images = self.preprocess.normalize(batch.views[0])
                yield Batch((images,), batch.label, batch.label, batch.index, batch.levels)
        if empty and self.rows:
            key, reason = self.skipped[0]
            raise ValueError(
                f"none of the {len(self.rows)} images of {self.split.name} could be read, the first being {key} "
                f"({reason}); run `vitrail check` on the data"
            )

    def indices(self) -> Iterator[BatchIndices]:
        for first in range(0, len(self.rows), self.batch):
            yield BatchIndices.once(first, self.rows[first : first + self.batch])


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
            f"{'several labels' if multilabel else 'one label'} per image"
        )
    if multilabel and labels.shape[1] != classes:
        raise ValueError(f"labels of {split.name} are over {labels.shape[1]} classes, the model over {classes}")
    if not multilabel and len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"labels of {split.name} run from {labels.min()} to {labels.max()}, the model has {classes} classes"
        )
