"""Training batches from JPEG images that are decoded on the accelerator.

Encoded images stay in host memory. One thread decodes those of a batch, each once, and a second one crops and augments
the views by the device's policies, both on CUDA streams of their own and a few batches ahead. The training stream waits
for an event of the device, never for the host. On a processor the same threads run with Pillow's decoder.

Order, ranks, accumulation, labels and mixing are those of `TrainLoader`, and draws those of `DeviceLoader`. A batch
depends on its step alone, so a resumed run sees the same pixels on the same hardware.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.augment.device_augment import DeviceAugment
from vitrail.data.augment.flat_images import FlatImages
from vitrail.data.batch import BatchIndices, CollatedBatch
from vitrail.data.dataset import BadImage
from vitrail.data.jpeg import EncodedImages, Header, jpeg_decoder
from vitrail.data.loading.loader import LoaderSpec, TrainLoader, collated
from vitrail.data.preprocess import as_tensor

AHEAD = 4  # batches that are decoded or augmented and not yet used up
MOSTLY = 0.9  # share of the images that the device should decode: the others are decoded one by one
_MEASURED = 1.0  # seconds for each loader of a comparison
_SAMPLE = 16  # images that the host decodes in it


# A batch between the two threads: images of its distinct rows, which of them each draw is (-1: none), and why not.
Decoded = tuple[BatchIndices, FlatImages | None, NDArray[np.int64], dict[int, str]]
Made = tuple[CollatedBatch, torch.cuda.Event | None]


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
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        super().close()

    def received(self) -> Iterator[CollatedBatch]:
        """Batches on the device; the threads end with the iteration."""
        threads = decode, augment = [ThreadPoolExecutor(1, f"vitrail-{work}") for work in ("decode", "augment")]
        self._threads += threads
        ahead: deque[Future[Made]] = deque()
        indices, used = self.indices(), None
        try:
            while True:
                for each in islice(indices, AHEAD - len(ahead)):
                    ahead.append(augment.submit(self._augmented, decode.submit(self._decoded, each, used)))
                if not ahead:
                    return
                batch, made = ahead.popleft().result()
                yield batch if made is None else self._awaited([batch], made)[0]
                used = None if made is None else torch.cuda.current_stream(self.device).record_event()
        finally:
            for thread in threads:
                thread.shutdown(cancel_futures=True)
                self._threads.remove(thread)

    def _decoded(self, indices: BatchIndices, used: torch.cuda.Event | None) -> Decoded:
        """Runs in the first thread, once the device has used an earlier batch up."""
        if used is not None:
            used.synchronize()
        rows, which = np.unique(indices.draws[:, 0], return_inverse=True)
        number, reasons = np.full(len(rows), -1), dict[int, str]()
        found: list[tuple[int, Tensor, Header]] = []
        for place, row in enumerate(rows.tolist()):
            try:
                found.append((row, *(self.encoded.get(row) or self._pixels(row))))
                number[place] = len(found) - 1
            except BadImage as bad:
                reasons[row] = bad.reason
            except OSError:  # which names the image
                raise
            except Exception as error:
                raise RuntimeError(f"{self.split.keys[row]} could not be decoded: {error}") from error
        if not found:
            return indices, None, number[which], reasons
        with torch.cuda.stream(self._decoding):  # which does nothing without one
            decoded = iter(self._decode([data for _, data, _ in found if data.ndim == 1]))
            images = [next(decoded) if data.ndim == 1 else data.to(self.device) for _, data, _ in found]
            pairs = zip(found, images, strict=True)
            if bad_rows := [each[0] for each, image in pairs if image is None or image.shape[1:] != each[2][:2]]:
                for row in bad_rows:
                    self.encoded.reject(row)
                return self._decoded(indices, None)
            pixels = [image.flatten() for image in images if image is not None]
            stored = np.array([header for _, _, header in found])
            flat = FlatImages(torch.cat(pixels), np.cumsum([0, *map(len, pixels)])[:-1], stored)
        if self._decoding is not None and self._copies is not None:
            # nvJPEG writes on a stream of its own, which waits for no other, into memory of the decoding stream. That
            # must be out of use: the images are copied here, and the flat buffer is kept until it is augmented.
            self._decoding.synchronize()
            flat.pixels.record_stream(self._copies)
        return indices, flat, number[which], reasons

    def _pixels(self, row: int) -> tuple[Tensor, Header]:
        """An image that the host decodes."""
        image = as_tensor(np.asarray(self.split.read(row)))
        return image, (image.shape[1], image.shape[2], 1)

    def _augmented(self, decoded: Future[Decoded]) -> Made:
        """Runs in the second thread."""
        (indices, images, which, reasons), split = decoded.result(), self.split
        there = which >= 0
        rows, epochs, repeats = indices.draws[there].T
        views: list[Tensor] = []
        with torch.cuda.stream(self._copies):
            if images is not None:
                images = images.take(which[there])
                for view, change in enumerate(self._changes):
                    key = np.broadcast_arrays(self.spec.seed, epochs, split.index[rows], view, repeats)
                    views.append(change.from_flat(images, np.stack(key, 1)))
            skipped = [(split.keys[row], reasons[row]) for row in indices.draws[~there, 0].tolist()]
            batch = collated(split, indices, tuple(views), rows, indices.place + np.flatnonzero(there), skipped)
            if self._copies is None:
                return batch, None
            batch = batch.changed(lambda t: t if t.is_cuda else t.pin_memory().to(self.device, non_blocking=True))
            return batch, self._copies.record_event()


def compared_with_host(spec: LoaderSpec, encoded: EncodedImages) -> tuple[bool, str]:
    """Whether `JpegLoader` is the faster one here, and both speeds in words, after two seconds at most.

    It is timed on up to three batches after the first; of the host one process is timed, and multiplied by workers.
    """
    clocks = [time.perf_counter()]
    with JpegLoader(replace(spec, start=0, stop=4), encoded) as loader:
        for batch in loader.received():
            batch.index.cpu()  # waits for the device
            clocks.append(time.perf_counter())
            if clocks[-1] - clocks[0] > _MEASURED:
                break
    speed = loader.size * max(1, len(clocks) - 2) / (clocks[-1] - clocks[min(1, len(clocks) - 2)])
    draws, begin = spec.sampler.table(0)[:_SAMPLE], time.perf_counter()
    loader._collated[BatchIndices(0, 0, draws)]
    host = len(draws) * max(1, spec.workers) / (time.perf_counter() - begin)
    return speed >= host, f"{speed:.0f} images/s, {spec.workers} workers of the host about {host:.0f}"
