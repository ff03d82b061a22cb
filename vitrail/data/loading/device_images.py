"""All images of a split on the device, as bytes: read once, then never again.

What is not random is done here, once and with Pillow. Images of one size stay as they are, or get the shorter side that
`simple` and `pad` crops want; for the `evaluation` crop they are preprocessed. Images of unequal size, which no tensor
holds, become squares: the shorter side is brought to ceil(size / crop_ratio), or to the size for `simple` and `pad`,
and the centre is kept. A random crop then cannot reach what lies beyond those squares, nor more detail than they have:
that is the one difference from reading the files anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.config import AugmentConfig
from vitrail.data.dataset import BadImage, Split
from vitrail.data.loading.sampler import Draw
from vitrail.data.loading.workers import BatchTask, PieceLoader
from vitrail.data.preprocess import Preprocess, as_tensor, resized, shorter_side
from vitrail.data.sources.packed import PackedReader

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
    if device.type not in ("cpu", "cuda"):
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
    found = _sizes(split)
    if not found:
        return None
    if augment.crop == "resized":
        side = math.ceil(size / preprocess.config.crop_ratio)
        return found.pop() if len(found) == 1 else (side, side)
    if len(found) > 1:
        return size, size
    height, width = found.pop()
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
        view = _Fitted(self.preprocess, None if self._preprocessed else size)
        with _Rows(
            self.split, view, device=self.device, workers=self.workers, start_method=self._start_method
        ) as loader:
            for piece in loader.received():
                rows = piece.task.draws[:, 0]
                kept = np.isin(np.arange(len(rows)), piece.places - piece.task.place)
                reasons = [reason for _, reason in piece.skipped]
                self.bad |= dict(zip(rows[~kept].tolist(), reasons, strict=True))
                if piece.views:
                    pixels[torch.from_numpy(rows[kept]).to(self.device)] = piece.views[0]
        if len(self.bad) == len(self.split):
            raise ValueError(f"no image of {self.split.name} could be read; run `vitrail check` on the data")
        return pixels


class _Rows(PieceLoader):
    """Every row once, in order."""

    def tasks(self) -> Iterator[BatchTask]:
        for first in range(0, len(self.split), _CHUNK):
            rows = range(first, min(first + _CHUNK, len(self.split)))
            yield BatchTask.once(first, rows)


class _Fitted:
    """An image at the common size (none: preprocessed); picklable."""

    def __init__(self, preprocess: Preprocess, size: tuple[int, int] | None) -> None:
        self.preprocess, self.size = preprocess, size

    def __call__(self, image: Image.Image, index: int, draw: Draw) -> list[Tensor]:
        if self.size is None:
            return [self.preprocess(image)]
        return [as_tensor(np.asarray(covering(image, self.size, self.preprocess)))]


def covering(image: Image.Image, size: tuple[int, int], preprocess: Preprocess) -> Image.Image:
    """The image scaled until it just covers (height, width), and what is beyond cut off on both sides alike."""
    height, width = size
    scale = max(width / image.width, height / image.height)
    reached = max(width, int(image.width * scale)), max(height, int(image.height * scale))
    image = resized(image, reached, preprocess.config)
    if reached == (width, height):
        return image
    left, top = round((reached[0] - width) / 2), round((reached[1] - height) / 2)
    return image.crop((left, top, left + width, top + height))


def _sizes(split: Split) -> set[tuple[int, int]]:
    """Heights and widths of some images, spread over the split; two where a packed cache knows that they differ."""
    found: set[tuple[int, int]] = set()
    rows: NDArray[np.int64] = np.unique(np.linspace(0, len(split) - 1, min(_PROBES, len(split))).astype(np.int64))
    for row in rows.tolist():
        try:
            width, height = split.read(row).size
        except BadImage:
            continue
        found.add((height, width))
    if len(found) == 1 and isinstance(split.reader, PackedReader) and split.reader.dense() is None:
        found.add((0, 0))
    return found
