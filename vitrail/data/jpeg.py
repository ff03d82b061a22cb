"""Encoded JPEG images in host memory, and their decoding on an accelerator.

Only what it decodes to the same picture as the host goes there: 8-bit YCbCr with its end in place. All else (grey,
CMYK, 12-bit, truncated, PNG) is left to `vitrail.data.decode`, which also says why an image cannot be read.
"""

from __future__ import annotations

import ctypes
import io
import os
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.dataset import BadImage, Split
from vitrail.data.decode import MAX_PIXELS, QUIET, raise_if_of_the_machine, stored_orientation
from vitrail.data.preprocess import as_tensor
from vitrail.data.sources.folder import FileReader
from vitrail.files import odd_kind

HOST_SHARE = 1 / 4  # of the machine's memory, over its processes, that encoded images may take
_CHUNK = 1 << 26  # bytes that are allocated at a time
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive; other codings are left to the host
_ALL_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # of two a decoder may take the one that needs more memory
_SCAN, _EXIF, _JFIF, _ADOBE = 0xDA, 0xE1, 0xE0, 0xEE
OF_HOST = -2  # in place of a chunk; -1: not kept

Header = tuple[int, int, int]  # height and width as stored, EXIF orientation
# Rows of address, bytes and header, flat buffer -> filled with [3, height, width] each, or the rows it cannot decode.
Decode = Callable[[NDArray[np.int64], Tensor], list[int]]


def first_bytes(stored: NDArray[np.int64]) -> NDArray[np.int64]:
    """[images + 1]: where images with these headers [images, 3] begin in a flat buffer, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(3 * stored[:, 0] * stored[:, 1])])


def jpeg_header(data: bytes) -> Header | None:
    """The header of an image that an accelerator may decode; none for any other, whether it is an image or not."""
    if data[:2] != b"\xff\xd8" or data[-2:] != b"\xff\xd9":
        return None
    at, seen, frames = 2, dict[int, int](), 0  # marker -> where the first of its segments begins
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _SCAN:
        seen.setdefault(data[at + 1], at + 4)
        frames += data[at + 1] in _ALL_FRAMES
        at += 2 + (data[at + 2] << 8 | data[at + 3])
    frame, jfif, adobe = max(seen.get(marker, 0) for marker in _FRAMES), seen.get(_JFIF, 0), seen.get(_ADOBE, 0)
    if not frame or frames > 1 or len(data) < frame + 15 or data[at : at + 2] != bytes((0xFF, _SCAN)):
        return None
    bits, height, width, components = struct.unpack_from(">BHHB", data, frame)
    # As libjpeg tells YCbCr from RGB: by its markers, then by the names of the components.
    form = data[adobe + 11 : adobe + 12] if data[adobe : adobe + 5] == b"Adobe" else b""
    named = not form and data[frame + 6 : frame + 15 : 3] == b"\1\2\3"
    coded = data[jfif : jfif + 4] == b"JFIF" or form == b"\1" or named
    if bits != 8 or components != 3 or not coded or not 0 < height * width <= MAX_PIXELS:
        return None
    with suppress(Exception):  # as in `decode`
        return height, width, stored_orientation(data) if _EXIF in seen else 1
    return None


class EncodedImages:
    """The encoded images of a split, each read when it is first wanted and then kept, up to a share of host memory.

    They lie in chunks, pinned for CUDA, found by a table of offsets. What no longer fits is read again each time.
    """

    def __init__(self, split: Split, device: torch.device | str, most: int | None = None) -> None:
        self.split, self._pinned = split, torch.device(device).type == "cuda"
        self._most = int(_memory() * HOST_SHARE) if most is None else most
        self._chunks, self._filled = list[Tensor](), _CHUNK
        images, self._image = np.unique(split.index, return_inverse=True)  # a row may be there several times
        self._table = np.full((len(images), 6), -1)  # chunk, address, bytes, and the header
        self._lock = threading.Lock()  # several threads, and two loaders, may share these

    def lookup(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[rows, 6]: below 0 where a row is not kept, its address and bytes in host memory, and its header."""
        with self._lock:  # numpy releases the interpreter's lock as it copies this
            return self._table[self._image[rows]]

    def get(self, row: int) -> tuple[Tensor, Header] | None:
        """Encoded bytes and header of a row; none where the host is to decode it. Raises `OSError` as `decode`."""
        chunk, address, length, *stored = self._table[self._image[row]].tolist()
        if chunk >= 0:
            first = address - self._chunks[chunk].data_ptr()
            return self._chunks[chunk][first : first + length], (stored[0], stored[1], stored[2])
        data = None if chunk == OF_HOST else _encoded(self.split, row)
        header = None if data is None else jpeg_header(data)
        if data is None or header is None:
            self.reject(row)
            return None
        encoded, length = torch.frombuffer(bytearray(data), dtype=torch.uint8), len(data)
        with self._lock:
            if self._filled + length > _CHUNK >= length and (len(self._chunks) + 1) * _CHUNK <= self._most:
                self._chunks.append(torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=self._pinned))
                self._filled = 0
            if self._filled + length <= _CHUNK and self._table[self._image[row], 0] == -1:  # no other thread kept it
                self._chunks[-1][self._filled : self._filled + length] = encoded
                address = self._chunks[-1].data_ptr() + self._filled
                self._table[self._image[row]] = (len(self._chunks) - 1, address, length, *header)
                self._filled += length
        return encoded, header

    def reject(self, rows: int | NDArray[np.int64]) -> None:
        """Leave rows to the host from now on."""
        self._table[self._image[rows], 0] = OF_HOST

    def share(self) -> float:
        """How many of some images, spread over the split, an accelerator may decode, as a fraction."""
        rows = np.unique(np.linspace(0, len(self.split) - 1, 64).astype(np.int64))
        return float(np.mean([self.get(row) is not None for row in rows.tolist()]))


def _memory() -> int:  # bytes that this machine, or container, has for each of its processes
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return most // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _encoded(split: Split, row: int) -> bytes | None:
    """The encoded image of a row; none where the source has none, or it cannot be read."""
    reader, index = split.reader, int(split.index[row])
    try:
        if isinstance(reader, FileReader):
            return None if odd_kind(reader.path(index)) else reader.path(index).read_bytes()
        return reader.stored(index) if hasattr(reader, "stored") else None
    except (BadImage, OSError) as error:
        raise_if_of_the_machine(error, split.keys[row])
        return None


def jpeg_decoder(device: torch.device) -> Decode:
    """A device's JPEG engines; where it has none, nvJPEG by torchcodec or torchvision; elsewhere Pillow."""
    if device.type != "cuda":
        return partial(_copied, lambda encoded: [_by_pillow(image) for image in encoded])
    try:
        from vitrail.data.nvjpeg import NvJpeg, nvjpeg_library

        with torch.cuda.device(device):
            return NvJpeg(nvjpeg_library())
    except (OSError, RuntimeError, AttributeError, AssertionError) as error:
        warnings.warn(f"JPEG is decoded by torchvision, one batch at a time, since {error}", stacklevel=2)
    try:
        from torchcodec.decoders import ImageReadMode, decode_jpeg  # from 0.16 on; torchvision's is deprecated
    except (ImportError, OSError, RuntimeError):  # built for another torch, or without its libraries
        from torchvision.io import ImageReadMode, decode_jpeg
    indexed = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def decoded(encoded: Sequence[Tensor]) -> list[Tensor | None]:
        try:
            return decode_jpeg(list(encoded), mode=ImageReadMode.RGB, device=indexed)
        except RuntimeError:  # all or none: the one at fault is found by itself
            return [None] if len(encoded) == 1 else [image for one in encoded for image in decoded([one])]

    return partial(_copied, decoded)


def _copied(
    decoded: Callable[[list[Tensor]], list[Tensor | None]], encoded: NDArray[np.int64], pixels: Tensor
) -> list[int]:
    """`Decode` by a function that makes a tensor of each image, or none."""
    places = ((ctypes.c_ubyte * length).from_address(address) for address, length, *_ in encoded.tolist())
    images, sizes = decoded([torch.frombuffer(p, dtype=torch.uint8) for p in places]), encoded[:, 2:4].tolist()
    if not (rejected := [n for n, image in enumerate(images) if image is None or list(image.shape[1:]) != sizes[n]]):
        torch.cat([image.flatten() for image in images if image is not None], out=pixels)
    return rejected


def _by_pillow(encoded: Tensor) -> Tensor | None:
    try:
        with QUIET, Image.open(io.BytesIO(encoded.numpy().tobytes())) as image:
            return as_tensor(np.asarray(image.convert("RGB")))
    except Exception:  # as in `decode`
        return None
