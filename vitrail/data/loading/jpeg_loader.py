"""Training batches from JPEG images that are decoded on the accelerator.

Encoded images stay in host memory. One thread decodes the images of each batch, every image once, and a second one
crops and augments the views by the device's policies, each on a CUDA stream of its own and a few batches ahead of the
training. The training stream waits for an event of the device and never for the host. On a processor the same threads
run with Pillow's decoder.

Order, ranks, accumulation, labels and mixing are those of `TrainLoader`, and draws those of `DeviceLoader`. A batch
depends on its step alone, so a resumed run sees the same pixels on the same hardware. What the accelerator does not
decode is decoded by the host, image by image.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.augment.device_augment import DeviceAugment
from vitrail.data.augment.flat_images import FlatImages
from vitrail.data.batch import BatchIndices, CollatedBatch
from vitrail.data.dataset import BadImage
from vitrail.data.jpeg import EncodedImages, jpeg_decoder
from vitrail.data.loading.loader import LoaderSpec, TrainLoader, collated
from vitrail.data.preprocess import as_tensor

AHEAD = 4  # batches that are decoded or augmented and not yet used up
MOSTLY = 0.9  # share of the images that the device should decode: the others are decoded one by one
_MEASURED = 1.0  # seconds for each loader of a comparison
_SAMPLE = 16  # images that the host decodes in it

T = TypeVar("T")
Ready = tuple[CollatedBatch, torch.cuda.Event | None]


class _Decoded(NamedTuple):
    """A batch between the two threads: images of its distinct rows, and which of them each draw is (-1: unreadable)."""

    indices: BatchIndices
    images: FlatImages | None
    which: NDArray[np.int64]
    reasons: dict[int, str]  # row -> why it cannot be read


class JpegLoader(TrainLoader):
    """As `TrainLoader`, with JPEG images decoded on the device and `DeviceAugment` in place of `Augment`.

    `encoded` takes the images of another loader; workers are not used. Raises as `TrainLoader`, and for the crop
    `evaluation`, whose pixels are Pillow's.
    """

    def __init__(self, spec: LoaderSpec, encoded: EncodedImages | None = None) -> None:
        super().__init__(spec)
        if any(augment.config.crop == "evaluation" for augment in self.augments):
            raise ValueError("data.augment.crop: evaluation is done by the host; use --data.loader host, or simple")
        self._changes = [DeviceAugment(a.config, a.preprocess) for a in self.augments]
        self.encoded = encoded or EncodedImages(spec.split, self.device)
        self._decode = jpeg_decoder(self.device)
        self._decoding = torch.cuda.Stream(self.device) if self._copies is not None else None
        self._threads: list[ThreadPoolExecutor] = []

    def close(self) -> None:
        """End the threads. Iterating again starts new ones."""
        while self._threads:
            self._threads.pop(0).shutdown(cancel_futures=True)
        super().close()

    def received(self) -> Iterator[CollatedBatch]:
        """Batches on the device; the threads end with the iteration."""
        threads = decode, augment = [ThreadPoolExecutor(1, f"vitrail-{work}") for work in ("decode", "augment")]
        self._threads += threads
        ahead: deque[Future[Ready]] = deque()
        indices, used = self.indices(), None
        try:
            while True:
                for each in islice(indices, AHEAD - len(ahead)):
                    ahead.append(augment.submit(self._augmented, decode.submit(self._decoded, each, used)))
                if not ahead:
                    return
                yield self._handed_over(*ahead.popleft().result())
                used = None if self._copies is None else torch.cuda.current_stream(self.device).record_event()
        finally:
            for thread in threads:
                thread.shutdown(cancel_futures=True)
            self._threads = [thread for thread in self._threads if thread not in threads]

    def _handed_over(self, batch: CollatedBatch, ready: torch.cuda.Event | None) -> CollatedBatch:
        if ready is None:
            return batch
        current = torch.cuda.current_stream(self.device)
        current.wait_event(ready)
        for tensor in (*batch.views, batch.label, batch.index, *([] if batch.levels is None else [batch.levels])):
            tensor.record_stream(current)  # else its memory could be given to a later batch while still read
        return batch

    def _decoded(self, indices: BatchIndices, used: torch.cuda.Event | None) -> _Decoded:
        """Runs in the first thread, once the device has used an earlier batch up."""
        if used is not None:
            used.synchronize()
        rows, which = np.unique(indices.draws[:, 0], return_inverse=True)
        found = [self._named(self.encoded.get, row) for row in rows.tolist()]
        images: list[Tensor] = []
        stored: list[tuple[int, int, int]] = []
        number, reasons = np.full(len(rows), -1), dict[int, str]()
        with torch.cuda.stream(self._decoding):  # which does nothing without one
            decoded = iter(self._decode([data for data, _ in filter(None, found)]))
            for place, (row, each) in enumerate(zip(rows.tolist(), found, strict=True)):
                orientation, image = 1, None
                if each is not None:
                    (_, header), image = each, next(decoded)
                    orientation = header.orientation
                    if image is None or image.shape != (3, header.height, header.width):
                        self.encoded.reject(row)
                        orientation, image = 1, None
                if image is None:
                    try:
                        image = as_tensor(np.asarray(self._named(self.split.read, row))).to(self.device)
                    except BadImage as bad:
                        reasons[row] = bad.reason
                        continue
                number[place] = len(images)
                images.append(image.flatten())
                stored.append((*image.shape[1:], orientation))
            flat = torch.cat(images) if images else None
        if flat is None:
            return _Decoded(indices, None, number[which], reasons)
        if self._decoding is not None and self._copies is not None:
            # nvJPEG writes on a stream of its own, which waits for no other, into memory of the decoding stream. That
            # must be out of use: the images are copied here, and the flat buffer is kept until it is augmented.
            self._decoding.synchronize()
            flat.record_stream(self._copies)
        lengths = np.array([len(image) for image in images])
        flat_images = FlatImages(flat, np.cumsum(lengths) - lengths, np.array(stored))
        return _Decoded(indices, flat_images, number[which], reasons)

    def _named(self, read: Callable[[int], T], row: int) -> T:
        """What is read of a row; an unexpected exception gets the image's name."""
        try:
            return read(row)
        except (BadImage, OSError):  # which have it
            raise
        except Exception as error:
            raise RuntimeError(f"{self.split.keys[row]} could not be decoded: {error}") from error

    def _augmented(self, decoded: Future[_Decoded]) -> Ready:
        """Runs in the second thread."""
        batch, split = decoded.result(), self.split
        there = batch.which >= 0
        draws = batch.indices.draws[there]
        skipped = [(split.keys[row], batch.reasons[row]) for row in batch.indices.draws[~there, 0].tolist()]
        places = batch.indices.place + np.flatnonzero(there)
        with torch.cuda.stream(self._copies):
            views: list[Tensor] = []
            for view, change in enumerate(self._changes if batch.images else []):
                assert batch.images is not None
                key = (self.spec.seed, draws[:, 1], split.index[draws[:, 0]], view, draws[:, 2])
                images = batch.images.take(batch.which[there])
                views.append(change.from_flat(images, np.stack(np.broadcast_arrays(*key), 1)))
            made = collated(split, batch.indices, tuple(views), draws[:, 0], places, skipped)
            if self._copies is None:
                return made, None
            made = made.changed(lambda t: t if t.is_cuda else t.pin_memory().to(self.device, non_blocking=True))
            return made, self._copies.record_event()


def compared_with_host(spec: LoaderSpec, encoded: EncodedImages) -> tuple[bool, str]:
    """Whether `JpegLoader` is the faster one here, and both speeds in words, after two seconds at most.

    It is timed on up to three batches after the first; of the host one process is timed, and multiplied by workers.
    """
    begin, clocks = time.perf_counter(), list[float]()
    with JpegLoader(replace(spec, start=0, stop=4, accumulate=1), encoded) as loader:
        for batch in loader.received():
            batch.index.cpu()  # waits for the device
            clocks.append(time.perf_counter())
            if clocks[-1] - begin > _MEASURED:
                break
    if len(clocks) < 2:
        return True, "its first batch took too long to time others"
    speed = loader.size * (len(clocks) - 1) / (clocks[-1] - clocks[0])
    begin = time.perf_counter()
    draws = spec.sampler.table(0)[:_SAMPLE]
    TrainLoader(spec).read(BatchIndices(0, 0, draws))
    host = len(draws) * max(1, spec.workers) / (time.perf_counter() - begin)
    return speed >= host, f"{speed:.0f} images/s, and {spec.workers} workers of the host about {host:.0f}"
