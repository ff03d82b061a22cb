"""Training batches from JPEG images that are decoded on the accelerator.

Encoded images stay in host memory. One thread decodes those of a batch, each once, and a second one crops and augments
the views by the device's policies, both on CUDA streams of their own and a few batches ahead. The training stream waits
for an event of the device, never for the host. On a processor the same threads run with Pillow's decoder. Order, labels
and mixing are those of `TrainLoader`, draws those of `DeviceLoader`; a batch depends on its step alone.
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
from PIL import Image
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
# Between the threads: a batch, its images, which of the draws can be read, and of other rows why not.
Decoded = tuple[BatchIndices, FlatImages | None, NDArray[np.bool_], dict[int, str]]
Made = tuple[CollatedBatch, torch.cuda.Event | None]


class JpegLoader(TrainLoader):
    """As `TrainLoader`, with JPEG images decoded on the device and `DeviceAugment` in place of `Augment`.

    `encoded` takes the images of another loader; workers are not used. Raises also for the crop `evaluation`.
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
        indices = self.indices()
        used: torch.cuda.Event | None = None
        try:
            while True:
                for each in islice(indices, AHEAD - len(ahead)):
                    ahead.append(augment.submit(self._augmented, decode.submit(self._decoded, each, used)))
                if not ahead:
                    return
                batch, made = ahead.popleft().result()
                yield batch if made is None else self._awaited([batch], made)[0]
                if made is not None:  # an event that the thread below waits for without spinning
                    used = torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(blocking=True))
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
        for each, row in enumerate(rows.tolist()):
            try:
                found.append((row, *(self.encoded.get(row) or _upright(self.split.read(row)))))
                number[each] = len(found) - 1
            except BadImage as bad:
                reasons[row] = bad.reason
            except OSError:  # which names the image
                raise
            except Exception as error:
                raise RuntimeError(f"{self.split.keys[row]} could not be decoded: {error}") from error
        there = (chosen := number[which]) >= 0
        if not found:
            return indices, None, there, reasons
        with torch.cuda.stream(self._decoding):  # which does nothing without one
            decoded = iter(self._decode([d for _, d, _ in found if d.ndim == 1]))
            images = [next(decoded) if d.ndim == 1 else self._sent(d) if self._decoding else d for _, d, _ in found]
            pairs = zip(found, images, strict=True)
            if rejected := [each[0] for each, image in pairs if image is None or image.shape[1:] != each[2][:2]]:
                self.encoded.reject(rejected)
                return self._decoded(indices, None)
            pixels = [image.flatten() for image in images if image is not None]
            stored, offsets = np.array([header for _, _, header in found]), np.cumsum([0, *map(len, pixels)])
            flat = FlatImages(torch.cat(pixels), offsets[chosen[there]], stored[chosen[there]])
        if self._decoding is not None and self._copies is not None:
            # nvJPEG writes on a stream of its own, which waits for no other, into memory of the decoding stream. That
            # must be out of use: the images are copied here, and the flat buffer is kept until it is augmented.
            self._decoding.synchronize()
            flat.pixels.record_stream(self._copies)
        return indices, flat, there, reasons

    def _augmented(self, decoded: Future[Decoded]) -> Made:
        """Runs in the second thread."""
        (indices, images, there, reasons), split = decoded.result(), self.split
        rows, epochs, repeats = indices.draws[there].T
        views: list[Tensor] = []
        with torch.cuda.stream(self._copies):
            for view, change in enumerate(self._changes):
                key = np.broadcast_arrays(self.spec.seed, epochs, split.index[rows], view, repeats)
                views += [change.from_flat(images, np.stack(key, 1))] if images else []
            skipped = [(split.keys[row], reasons[row]) for row in indices.draws[~there, 0].tolist()]
            batch = collated(split, indices, tuple(views), rows, indices.place + np.flatnonzero(there), skipped)
            return batch.changed(self._sent), None if self._copies is None else self._copies.record_event()

    def _sent(self, tensor: Tensor) -> Tensor:
        if self._copies is None:
            return tensor.to(self.device)
        return tensor if tensor.is_cuda else tensor.pin_memory().to(self.device, non_blocking=True)


def _upright(image: Image.Image) -> tuple[Tensor, Header]:
    return as_tensor(np.asarray(image)), (image.height, image.width, 1)


def compared_with_host(spec: LoaderSpec, encoded: EncodedImages) -> tuple[bool, str]:
    """Whether `JpegLoader` is faster on a few batches than this process times the workers of the host; both speeds."""
    clocks = [time.perf_counter()]
    with JpegLoader(replace(spec, start=0, stop=4), encoded) as loader:
        for batch in loader.received():
            batch.index.cpu()  # waits for the device
            clocks.append(time.perf_counter())
            if clocks[-1] - clocks[0] > 1:  # second
                break
    speed = loader.size * max(1, len(clocks) - 2) / (clocks[-1] - clocks[min(1, len(clocks) - 2)])
    draws, begin = spec.sampler.table(0)[:16], time.perf_counter()
    loader._collated[BatchIndices(0, 0, draws)]
    host = len(draws) * max(1, spec.workers) / (time.perf_counter() - begin)
    return speed >= host, f"{speed:.0f} images/s, {spec.workers} workers of the host about {host:.0f}"
