"""Training batches from JPEG images that are decoded on the accelerator.

Encoded images stay in host memory. A few threads decode a batch each, every image once, and another one crops and
augments the views by the device's policies, all on CUDA streams of their own and some batches ahead. The training
stream waits for an event of the device, never for the host. On a processor the same threads run with Pillow's decoder.
Order, labels and mixing are those of `TrainLoader`, draws those of `DeviceLoader`; a batch depends on its step alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
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
from vitrail.data.jpeg import OF_HOST, Decode, EncodedImages, Header, first_bytes, jpeg_decoder
from vitrail.data.loading.loader import LoaderSpec, TrainLoader, collated
from vitrail.data.preprocess import as_tensor

DECODERS = 3  # batches that are decoded at the same time, since each waits often for a device that is busy
AHEAD = 2  # batches per decoder that are decoded or augmented and not yet used up
_URGENT = -5  # priority of streams, which torch limits to the device's: their kernels are few and short
MOSTLY = 0.9  # share of the images that the device should decode: the others are decoded one by one
# Between the threads: a batch, its images, which of the draws can be read, and of other rows why not.
Decoded = tuple[BatchIndices, FlatImages | None, NDArray[np.bool_], dict[int, str]]
Made = tuple[CollatedBatch, torch.cuda.Event | None]
Decoder = tuple[Decode, torch.cuda.Stream | None]


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
        self._copies = self._copies and torch.cuda.Stream(self.device, priority=_URGENT)
        self._running: list[ExitStack] = []
        self.decoders = DECODERS

    def close(self) -> None:
        """End the threads and their decoders. Iterating again starts new ones."""
        for running in list(self._running):
            running.close()
        super().close()

    def received(self) -> Iterator[CollatedBatch]:
        """Batches on the device; the threads end with the iteration."""
        ahead: deque[Future[Made]] = deque()
        indices = self.indices()
        used: torch.cuda.Event | None = None
        with ExitStack() as running:
            self._running.append(running)
            running.callback(self._running.remove, running)
            augment, *threads = [ThreadPoolExecutor(1, "vitrail-jpeg") for _ in range(1 + self.decoders)]
            lanes = deque((thread, self._decoder()) for thread in threads)
            running.callback(lanes.clear)
            for thread in (augment, *threads):
                running.callback(thread.shutdown, cancel_futures=True)
            while True:
                for each in islice(indices, AHEAD * self.decoders - len(ahead)):
                    decoded = lanes[0][0].submit(self._decoded, lanes[0][1], each, used)
                    ahead.append(augment.submit(self._augmented, decoded))
                    lanes.rotate(-1)
                if not ahead:
                    return
                batch, made = ahead.popleft().result()
                yield batch if made is None else self._awaited([batch], made)[0]
                if made is not None:  # an event that the threads below wait for without spinning
                    used = torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(blocking=True))

    def _decoder(self) -> Decoder:
        return jpeg_decoder(self.device), self._copies and torch.cuda.Stream(self.device, priority=_URGENT)

    def _decoded(self, decoder: Decoder, indices: BatchIndices, used: torch.cuda.Event | None) -> Decoded:
        """Runs in one of the first threads, once the device has used an earlier batch up."""
        if used is not None:
            used.synchronize()
        decode, stream = decoder
        rows, which = np.unique(indices.draws[:, 0], return_inverse=True)
        table, reasons, kept, host = self.encoded.lookup(rows), dict[int, str](), list[Tensor](), list[Tensor]()
        for each in np.flatnonzero(table[:, 0] < 0).tolist():
            row, table[each, 0] = int(rows[each]), -1
            try:
                data, header = self.encoded.get(row) or _upright(self.split.read(row))
            except BadImage as bad:
                reasons[row] = bad.reason
                continue
            except OSError:  # which names the image
                raise
            except Exception as error:
                raise RuntimeError(f"{self.split.keys[row]} could not be decoded: {error}") from error
            (kept if data.ndim == 1 else host).append(data)  # they live until they are decoded
            table[each] = (0 if data.ndim == 1 else OF_HOST, data.data_ptr(), len(data), *header)
        ours = np.flatnonzero(table[:, 0] >= 0)
        order = np.concatenate([ours, np.flatnonzero(table[:, 0] == OF_HOST)])
        number = np.full(len(rows), -1)
        number[order] = np.arange(len(order))
        there = (chosen := number[which]) >= 0
        if not len(order):
            return indices, None, there, reasons
        offsets = first_bytes(stored := table[order, 3:])
        end = int(offsets[len(ours)])
        with torch.cuda.stream(stream):  # which does nothing without one
            pixels = torch.empty(int(offsets[-1]), dtype=torch.uint8, device=self.device)
            if len(ours) and (rejected := decode(table[ours, 1:], pixels[:end])):
                self.encoded.reject(rows[ours[rejected]])
                return self._decoded(decoder, indices, None)
            if host:
                pixels[end:] = self._sent(torch.cat([image.flatten() for image in host]))
        if stream is not None and self._copies is not None:
            # nvJPEG also writes on streams of its own, which wait for no other, into memory of this stream. That must
            # be out of use: nothing is left of the batch before, and the buffer is kept until it is augmented.
            stream.record_event(torch.cuda.Event(blocking=True)).synchronize()
            pixels.record_stream(self._copies)
        return indices, FlatImages(pixels, offsets[chosen[there]], stored[chosen[there]]), there, reasons

    def _augmented(self, decoded: Future[Decoded]) -> Made:
        """Runs in the last thread."""
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
    with JpegLoader(replace(spec, start=0, stop=4 * DECODERS), encoded) as loader:
        for batch in loader.received():
            batch.index.cpu()  # waits for the device
            clocks.append(time.perf_counter())
            if clocks[-1] - clocks[0] > 1:  # second
                break
    first = min(DECODERS, len(clocks) - 2)  # those before were decoded at the same time
    speed = loader.size * (len(clocks) - 1 - first) / (clocks[-1] - clocks[first])
    draws, begin = spec.sampler.table(0)[:16], time.perf_counter()
    loader._collated[BatchIndices(0, 0, draws)]
    host = len(draws) * max(1, spec.workers) / (time.perf_counter() - begin)
    return speed >= host, f"{speed:.0f} images/s, {spec.workers} workers of the host about {host:.0f}"
