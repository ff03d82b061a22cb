"""Loaders whose images live on the device: read, decoded and copied once, afterwards only gathered.

Both are the host's loaders with another origin of batches, so order, ranks, accumulation, labels and mixing are the
same code. On CUDA the next batches are gathered and augmented, on a stream of their own, while the current one is used.
Small batches are augmented together: to launch hundreds of operations costs the same for 250 images as for 2,500.

What is not random is done once and with Pillow. Images of one size stay as they are, or get the shorter side that
`simple` and `pad` crops want; for the `evaluation` crop they are preprocessed. Images of unequal size, which no tensor
holds, become squares: the shorter side is brought to ceil(size / crop_ratio), or to the size for `simple` and `pad`,
and the centre is kept. A random crop then cannot reach what lies beyond those squares, nor more detail than they have:
that is the one difference from reading the files anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.augment.device_augment import DeviceAugment
from vitrail.data.augment.host import stored_alike
from vitrail.data.batch import BatchIndices, CollatedBatch
from vitrail.data.config import AugmentConfig
from vitrail.data.dataset import BadImage, Split
from vitrail.data.loading.loader import BatchLoader, EvalLoader, LoaderSpec, TrainLoader
from vitrail.data.loading.sampler import Draw
from vitrail.data.preprocess import Preprocess, as_tensor, resized, shorter_side
from vitrail.data.sources.packed import PackedReader

# Bytes of views that are augmented at a time; a batch of more is one by itself. A processor's caches hold little more.
TOGETHER = {"cuda": 8 << 20, "cpu": 1 << 20}
HOST_BYTES = 1 << 30  # beyond that, the copy is better left to the system's file cache
HOST_SIDE = 64  # larger images leave a processor no time for batched operations on it
DEVICE_SHARE = 1 / 3  # of what is free: weights, activations and optimiser come later
_PROBES = 16
_CHUNK = 256


def fits(
    split: Split, preprocess: Preprocess, device: torch.device | str, augment: AugmentConfig | None = None
) -> bool:
    """Whether a split should live on the device, by the size of its first images and what is free there.

    On an accelerator it may take a third of the free memory; on a processor at most 1 GiB, and images of at most 64
    pixels. They are counted at the size in which `augment` wants them kept; without it, as for evaluation.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda") or getattr(split.reader, "form", None):
        return False
    size = stored_size(split, augment, preprocess)
    if size is None:
        return False
    needed = len(split) * 3 * size[0] * size[1]
    if device.type == "cpu":
        return needed <= HOST_BYTES and max(size) <= HOST_SIDE
    free, _ = torch.cuda.mem_get_info(device)
    return needed <= free * DEVICE_SHARE


def stored_size(split: Split, augment: AugmentConfig | None, preprocess: Preprocess) -> tuple[int, int] | None:
    """Height and width in which images are kept; none where no image can be read."""
    size = preprocess.config.size
    if augment is None or augment.crop == "evaluation":
        return size, size
    sizes = _sizes(split)
    if not sizes:
        return None
    if augment.crop == "resized":
        side = math.ceil(size / preprocess.config.crop_ratio)
        return sizes.pop() if len(sizes) == 1 else (side, side)
    if len(sizes) > 1:
        return size, size
    height, width = sizes.pop()
    width, height = shorter_side(width, height, size)
    return height, width


class DeviceImages:
    """Pixels of a split, filled when first asked for; one object may serve many loaders.

    Raises `ValueError` where no image can be read. Images that cannot are in `bad`.
    """

    def __init__(
        self,
        split: Split,
        augment: AugmentConfig | None,
        preprocess: Preprocess,
        *,
        device: torch.device | str,
        workers: int = 0,
        start_method: str | None = None,
    ) -> None:
        self.split, self.augment, self.preprocess = split, augment, preprocess
        self.device, self.workers = torch.device(device), workers
        self.bad: dict[int, str] = {}  # row -> reason
        self._start_method = start_method
        self._pixels: Tensor | None = None

    @property
    def pixels(self) -> Tensor:
        """[rows, 3, height, width] uint8, on the device; rows that could not be read are black."""
        if self._pixels is None:
            size = stored_size(self.split, self.augment, self.preprocess)
            if size is None:
                raise ValueError(
                    f"none of the first images of {self.split.name} could be read; run `vitrail check` on the data"
                )
            self._pixels = self._mapped(size)
            if self._pixels is None:
                self._pixels = self._read(size)
        return self._pixels

    def _mapped(self, size: tuple[int, int]) -> Tensor | None:
        """Pixels straight from a packed cache that holds them as wanted."""
        reader = self.split.reader
        dense = reader.dense() if isinstance(reader, PackedReader) and not self._preprocessed else None
        if dense is None or any(shard.shape[1:3] != size for shard in dense):
            return None
        assert isinstance(reader, PackedReader)
        try:
            places = reader.rows(self.split.index)
        except BadImage:
            return None
        starts = np.cumsum([0, *map(len, dense)])
        pixels = torch.empty((len(places), 3, *size), dtype=torch.uint8, device=self.device)
        for shard, start, stop in zip(dense, starts[:-1], starts[1:], strict=True):
            rows = np.flatnonzero((places >= start) & (places < stop))
            for first in range(0, len(rows), _CHUNK):
                chunk = rows[first : first + _CHUNK]
                bytes_of = torch.from_numpy(shard[places[chunk] - start])
                pixels[torch.from_numpy(chunk).to(self.device)] = bytes_of.to(self.device).permute(0, 3, 1, 2)
        return pixels

    @property
    def _preprocessed(self) -> bool:
        return self.augment is None or self.augment.crop == "evaluation"

    def _read(self, size: tuple[int, int]) -> Tensor:
        pixels = torch.zeros((len(self.split), 3, *size), dtype=torch.uint8, device=self.device)
        view = partial(_fitted, self.preprocess, None if self._preprocessed else size)
        start = self._start_method
        with _Rows(self.split, view, device=self.device, workers=self.workers, start_method=start) as loader:
            for batch in loader.received():
                rows = batch.indices.draws[:, 0]
                kept = np.isin(np.arange(len(rows)), batch.places - batch.indices.place)
                reasons = [reason for _, reason in batch.skipped]
                self.bad |= dict(zip(rows[~kept].tolist(), reasons, strict=True))
                if batch.views:
                    pixels[torch.from_numpy(rows[kept]).to(self.device)] = batch.views[0]
        if len(self.bad) == len(self.split):
            raise ValueError(f"no image of {self.split.name} could be read; run `vitrail check` on the data")
        return pixels


class _Rows(BatchLoader):
    """Every row once, in order."""

    def indices(self) -> Iterator[BatchIndices]:
        for first in range(0, len(self.split), _CHUNK):
            yield BatchIndices.once(first, range(first, min(first + _CHUNK, len(self.split))))


def _fitted(
    preprocess: Preprocess, size: tuple[int, int] | None, image: Image.Image, index: int, draw: Draw
) -> list[Tensor]:
    """An image scaled until it just covers (height, width), cut on both sides alike; none: preprocessed."""
    if size is None:
        return [preprocess(image)]
    height, width = size
    scale = max(width / image.width, height / image.height)
    reached = max(width, int(image.width * scale)), max(height, int(image.height * scale))
    image = resized(image, reached, preprocess.config)
    left, top = round((reached[0] - width) / 2), round((reached[1] - height) / 2)
    return [as_tensor(np.asarray(image.crop((left, top, left + width, top + height))))]


def _sizes(split: Split) -> set[tuple[int, int]]:
    """Heights and widths of some images, spread over the split; two where a packed cache knows that they differ."""
    sizes: set[tuple[int, int]] = set()
    rows: NDArray[np.int64] = np.unique(np.linspace(0, len(split) - 1, min(_PROBES, len(split))).astype(np.int64))
    for row in rows.tolist():
        try:
            width, height = split.read(row).size
        except BadImage:
            continue
        sizes.add((height, width))
    if len(sizes) == 1 and isinstance(split.reader, PackedReader) and split.reader.dense() is None:
        sizes.add((0, 0))
    return sizes


class DeviceLoader(TrainLoader):
    """As `TrainLoader`, with all images on the device (see `DeviceImages`) and `DeviceAugment` in place of `Augment`.

    Workers read images, once, when the first batch is wanted; `images` takes those of another loader instead. Rows
    come in the order of `TrainLoader`, under other draws of the same augmentations. Raises as `TrainLoader`, and where
    views want images stored in different forms.
    """

    def __init__(self, spec: LoaderSpec, images: DeviceImages | None = None) -> None:
        super().__init__(spec)
        if not stored_alike([spec.augment, *self.augments]):
            raise ValueError(
                "data.loader: device keeps images in one form, and these views want several; give --data.weak the crop "
                "of data.augment (resized, where sizes differ), or use --data.loader host"
            )
        self._changes = [DeviceAugment(a.config, a.preprocess) for a in self.augments]
        self.images = images or DeviceImages(
            spec.split,
            spec.augment.config,
            spec.preprocess,
            device=spec.device,
            workers=spec.workers,
            start_method=spec.start_method,
        )
        self._labels: tuple[Tensor, Tensor, Tensor | None] | None = None

    def received(self) -> Iterator[CollatedBatch]:
        """Batches made on the device; on CUDA those of a group of steps ahead of what is used."""
        pixels = self.images.pixels
        if self._copies is None:
            for group in self._groups():
                yield from self._wanted(self._augmented(group, pixels))
            return
        self._copies.wait_stream(torch.cuda.current_stream(self.device))  # images may still be on their way
        ahead: list[CollatedBatch] = []
        for group in self._groups():
            ready = self._awaited(ahead)  # before the next are begun, or their use would wait for those as well
            with torch.cuda.stream(self._copies):
                ahead = self._augmented(group, pixels)
            yield from self._wanted(ready)
        yield from self._wanted(self._awaited(ahead))

    def _groups(self) -> Iterator[list[BatchIndices]]:
        """Batches of steps that are augmented together.

        Groups are counted from step 0, and the first is whole wherever the run begins: products of another number of
        images may round differently, and a resumed run must see the same bytes.
        """
        image = sum(3 * augment.preprocess.size**2 for augment in self.augments)
        batch = self.size * self.spec.accumulate * image
        steps = max(1, TOGETHER.get(self.device.type, TOGETHER["cpu"]) // batch)
        for first in range(self.spec.start - self.spec.start % steps, self.spec.stop, steps):
            last = min(first + steps, self.spec.stop)
            yield [indices for step in range(first, last) for indices in self.indices_of(step)]

    def _wanted(self, batches: list[CollatedBatch]) -> Iterator[CollatedBatch]:
        return (batch for batch in batches if batch.indices.step >= self.spec.start)

    def _augmented(self, group: Sequence[BatchIndices], pixels: Tensor) -> list[CollatedBatch]:
        draws = np.concatenate([indices.draws for indices in group])
        kept = ~np.isin(draws[:, 0], list(self.images.bad))
        rows = self._on_device(draws[kept, 0])
        views: list[Tensor] = []
        if len(rows):
            gathered = pixels[rows]
            for view, change in enumerate(self._changes):
                key = (self.spec.seed, draws[kept, 1], self.split.index[draws[kept, 0]], view, draws[kept, 2])
                views.append(change(gathered, np.stack(np.broadcast_arrays(*key), 1)))
        label, index, levels = self._tables()
        label, index, levels = label[rows], index[rows], None if levels is None else levels[rows]
        batches, begin = [], 0
        bounds = np.cumsum([len(indices.draws) for indices in group])[:-1]
        for indices, there in zip(group, np.split(kept, bounds), strict=True):
            part = slice(begin, begin + int(there.sum()))
            begin = part.stop
            batches.append(
                CollatedBatch(
                    indices,
                    views=tuple(view[part] for view in views) if there.any() else (),
                    label=label[part],
                    index=index[part],
                    levels=None if levels is None else levels[part],
                    places=indices.place + np.flatnonzero(there),
                    skipped=[(self.split.keys[r], self.images.bad[r]) for r in indices.draws[~there, 0].tolist()],
                )
            )
        return batches

    def _tables(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Labels, stable indices and labels at all levels of all rows, on the device."""
        if self._labels is None:
            label = torch.from_numpy(self.split.targets).to(self.device)
            levels = None if self.split.levels is None else torch.from_numpy(self.split.levels).to(self.device)
            index = torch.from_numpy(self.split.index).to(self.device)
            self._labels = (label.to(torch.float32) if label.ndim == 2 else label), index, levels
        return self._labels

    def _on_device(self, rows: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(rows))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


class DeviceEvalLoader(EvalLoader):
    """As `EvalLoader`; the first complete pass leaves its batches on the device, later ones read them there.

    So pixels are those of `EvalLoader`, whatever the preprocessing.
    """

    _kept: list[CollatedBatch] | None = None

    def received(self) -> Iterator[CollatedBatch]:
        """Batches in bytes, from the device once they are there."""
        if self._kept is not None:
            yield from self._kept
            return
        batches: list[CollatedBatch] = []
        for batch in super().received():
            batches.append(batch)
            yield batch
        self._kept = batches
        self.close()  # workers have nothing left to do
