"""Encoded JPEG images in host memory, and their decoding on an accelerator.

Only what an accelerator decodes to the same picture as the host goes there: 8-bit YCbCr with its end in place. All
else (grey, CMYK, 12-bit, truncated, PNG) is left to `vitrail.data.decode`, which also gives the reason why an image
cannot be read.
"""

from __future__ import annotations

import io
import os
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.dataset import BadImage, Split
from vitrail.data.decode import MAX_PIXELS, QUIET, raise_if_of_the_machine, stored_orientation
from vitrail.data.preprocess import as_tensor
from vitrail.data.sources.folder import FileReader
from vitrail.files import odd_kind

HOST_SHARE = 1 / 4  # of the machine's memory, over its processes, that encoded images may take
_CHUNK = 1 << 26  # bytes that are allocated at a time
_PROBES = 64
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive; other codings are left to the host
_SCAN, _EXIF, _JFIF, _ADOBE = 0xDA, 0xE1, 0xE0, 0xEE
_UNKNOWN, _OF_HOST = 0, -1

Decode = Callable[[Sequence[Tensor]], list[Tensor | None]]
"""Encoded images (uint8 [bytes], on the host) -> uint8 [3, height, width], not turned; none: left to the host."""


class JpegHeader(NamedTuple):
    """Size as stored, and EXIF orientation."""

    height: int
    width: int
    orientation: int = 1


def jpeg_header(data: bytes) -> JpegHeader | None:
    """The header of an image that an accelerator may decode; none for any other, whether it is an image or not."""
    if data[:2] != b"\xff\xd8" or data[-2:] != b"\xff\xd9":
        return None
    at, frame, exif, jfif, transform = 2, 0, False, False, -1
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _SCAN:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker in _FRAMES:
            frame = at + 4
        elif marker == _EXIF:
            exif = True
        elif marker == _JFIF:
            jfif = jfif or data[at + 4 : at + 9] == b"JFIF\0"
        elif marker == _ADOBE and data[at + 4 : at + 9] == b"Adobe" and length >= 14:
            transform = data[at + 15]
        at += 2 + length
    if not frame or len(data) < max(frame + 15, at + 2) or data[at : at + 2] != b"\xff\xda":
        return None
    bits, height, width, components = struct.unpack_from(">BHHB", data, frame)
    # As libjpeg tells YCbCr from RGB: by its markers, then by the names of the components.
    coded = jfif or transform == 1 or (transform < 0 and data[frame + 6 : frame + 15 : 3] == b"\1\2\3")
    if bits != 8 or components != 3 or not coded or not 0 < height * width <= MAX_PIXELS:
        return None
    try:
        return JpegHeader(height, width, stored_orientation(data) if exif else 1)
    except Exception:  # as in `decode`
        return None


class EncodedImages:
    """The encoded images of a split, each read when it is first wanted and then kept, up to a share of host memory.

    They lie one after the other in chunks, pinned where the device is CUDA, found by a table of offsets. What no longer
    fits is read again each time, from the system's file cache at best.
    """

    def __init__(self, split: Split, device: torch.device | str, most: int | None = None) -> None:
        self.split, self._pinned = split, torch.device(device).type == "cuda"
        if most is None:
            most = int(_memory() * HOST_SHARE) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._most, self._chunks, self._filled = most, list[Tensor](), _CHUNK
        images, self._image = np.unique(split.index, return_inverse=True)  # a row may be there several times
        self._place = np.full((len(images), 2), -1)  # chunk, first byte
        self._header = np.zeros((len(images), 4), np.int64)  # orientation, height, width, bytes
        self._lock = threading.Lock()  # two loaders may share these

    def get(self, row: int) -> tuple[Tensor, JpegHeader] | None:
        """Encoded bytes and header of a row; none where the host is to decode it. Raises `OSError` as `decode`."""
        image = int(self._image[row])
        orientation, height, width, length = self._header[image].tolist()
        if orientation == _OF_HOST:
            return None
        chunk, first = self._place[image].tolist()
        if chunk >= 0:
            return self._chunks[chunk][first : first + length], JpegHeader(height, width, orientation)
        data = _encoded(self.split, row)
        header = None if data is None else jpeg_header(data)
        if data is None or header is None:
            self.reject(row)
            return None
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with self._lock:
            self._keep(image, encoded, header)
        return encoded, header

    def reject(self, row: int) -> None:
        """Leave a row to the host from now on."""
        self._header[self._image[row], 0] = _OF_HOST

    def share(self) -> float:
        """How many of some images, spread over the split, an accelerator may decode, as a fraction."""
        rows = np.unique(np.linspace(0, len(self.split) - 1, min(_PROBES, len(self.split))).astype(np.int64))
        return float(np.mean([self.get(row) is not None for row in rows.tolist()]))

    def _keep(self, image: int, encoded: Tensor, header: JpegHeader) -> None:
        length = len(encoded)
        if self._filled + length > _CHUNK:
            if length > _CHUNK or (len(self._chunks) + 1) * _CHUNK > self._most:
                return
            self._chunks.append(torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=self._pinned))
            self._filled = 0
        self._chunks[-1][self._filled : self._filled + length] = encoded
        self._header[image] = (header.orientation, header.height, header.width, length)
        self._place[image] = len(self._chunks) - 1, self._filled
        self._filled += length


def _memory() -> int:
    """Bytes that this machine, or the container that it is, has."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            most = min(most, int(Path("/sys/fs/cgroup", limit).read_text()))
    return most


def _encoded(split: Split, row: int) -> bytes | None:
    """The encoded image of a row; none where the source has none, or it cannot be read."""
    reader, index = split.reader, int(split.index[row])
    with suppress(BadImage):
        if not isinstance(reader, FileReader):
            return reader.stored(index) if hasattr(reader, "stored") else None
        path = reader.path(index)
        try:
            return None if odd_kind(path) else path.read_bytes()
        except OSError as error:
            raise_if_of_the_machine(error, split.keys[row])
    return None


def jpeg_decoder(device: torch.device) -> Decode:
    """The decoder of a device: nvJPEG by torchcodec where it is installed, else by torchvision; Pillow on the host."""
    if device.type != "cuda":
        return lambda encoded: [_by_pillow(image) for image in encoded]
    try:
        from torchcodec.decoders import decode_jpeg  # from 0.16 on; torchvision's is deprecated since 0.29
    except (ImportError, OSError, RuntimeError):  # built for another torch, or without its libraries
        from torchvision.io import decode_jpeg
    indexed = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def decoded(encoded: Sequence[Tensor]) -> list[Tensor | None]:
        if not encoded:
            return []
        try:
            return list(decode_jpeg(list(encoded), mode="RGB", device=indexed))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # all or none: the one at fault is found by itself
            return [None] if len(encoded) == 1 else [image for one in encoded for image in decoded([one])]

    return decoded


def _by_pillow(encoded: Tensor) -> Tensor | None:
    try:
        with QUIET, Image.open(io.BytesIO(encoded.numpy().tobytes())) as image:
            return as_tensor(np.asarray(image.convert("RGB")))
    except Exception:  # as in `decode`
        return None
