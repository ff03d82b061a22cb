"""The JPEG engines of NVIDIA's accelerators, called in libnvjpeg: whole batches into one buffer.

Each decoder has a handle of its own: in training they wait more than they work, so that several are used at a time.
Handles are used again and never destroyed: the library does not give back all that one took of the engines, and after
some twenty of them it has no memory for another.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.jpeg import first_bytes

_HARDWARE, _PLANAR_RGB, _HOST_THREADS = 3, 3, 1  # NVJPEG_BACKEND_HARDWARE, NVJPEG_OUTPUT_RGB
_NOT_OF_AN_IMAGE = {1: "not initialised", 5: "no memory", 7: "another architecture"}  # status
_IDLE: dict[tuple[Any, int], list[tuple[ctypes.c_void_p, ctypes.c_void_p]]] = defaultdict(list)  # library, device
_IMAGE = np.dtype([("channel", np.uint64, 4), ("pitch", np.uint64, 4)])  # nvjpegImage_t


@cache
def nvjpeg_library() -> Any:
    """The library that came with torchvision or CUDA's packages, else the system's. Raises `OSError` without one."""
    packages = Path(torch.__file__).parents[1]
    files = [*packages.glob("torchvision.libs/libnvjpeg*.so*"), *packages.glob("nvidia/*/lib/libnvjpeg.so*")]
    for name in [*map(str, files), "libnvjpeg.so.13", "libnvjpeg.so.12"]:
        with suppress(OSError):
            return ctypes.CDLL(name)  # which releases the interpreter's lock in every call
    raise OSError("libnvjpeg is not installed")


class NvJpeg:
    """A decoder for one thread at a time, on the current device and stream. Raises `OSError` without JPEG engines."""

    def __init__(self, library: Any) -> None:
        self._library = library
        idle = _IDLE[library, torch.cuda.current_device() if torch.cuda.is_available() else -1]
        try:
            self._handle, self._state = idle.pop()
        except IndexError:
            self._handle, self._state = _opened(library)
        # A call returns when its pixels are there, so that a decoder that nobody holds is idle.
        weakref.finalize(self, idle.append, (self._handle, self._state)).atexit = False

    def __call__(self, encoded: NDArray[np.int64], pixels: Tensor) -> list[int]:
        """As `vitrail.data.jpeg.Decode`; returns when the pixels are there."""
        address, length, height, width, _ = encoded.T
        planes = np.arange(3) * (height * width)[:, None] + first_bytes(encoded[:, 2:])[:-1, None]
        images = np.zeros(len(planes), _IMAGE)
        images["channel"][:, :3], images["pitch"][:, :3] = pixels.data_ptr() + planes, width[:, None]
        stream = torch.cuda.current_stream(pixels.device) if pixels.is_cuda else None
        return self._rejected(0, [address.astype(np.uint64), length.astype(np.uint64), images], stream)

    def _rejected(self, first: int, arrays: list[NDArray[Any]], stream: torch.cuda.Stream | None) -> list[int]:
        """Images that cannot be decoded, from `first` on: a call decodes all or none, so they are found by halving."""
        decoder, count, on = (self._handle, self._state), len(arrays[0]), None if stream is None else stream.cuda_stream
        pointers = [ctypes.c_void_p(each) for each in (*(array.ctypes.data for array in arrays), on)]
        status = self._library.nvjpegDecodeBatchedInitialize(*decoder, count, _HOST_THREADS, _PLANAR_RGB)
        status = status or self._library.nvjpegDecodeBatched(*decoder, *pointers)
        if status in _NOT_OF_AN_IMAGE:
            raise RuntimeError(f"nvJPEG decodes no more ({_NOT_OF_AN_IMAGE[status]}); use --data.loader host")
        if stream is not None and not status:
            stream.record_event(torch.cuda.Event(blocking=True)).synchronize()  # does not spin: cores are few
        elif stream is not None:  # what it began on streams of its own
            torch.cuda.synchronize(stream.device)
        if not status or count == 1:
            return [first] if status else []
        half = count // 2
        left, right = ([array[part] for array in arrays] for part in (slice(half), slice(half, None)))
        return self._rejected(first, left, stream) + self._rejected(first + half, right, stream)


def _opened(library: Any) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    handle, state = ctypes.c_void_p(), ctypes.c_void_p()
    if status := library.nvjpegCreateEx(_HARDWARE, None, None, 0, ctypes.byref(handle)):
        raise OSError(f"libnvjpeg opens no JPEG engines here (status {status})")
    if status := library.nvjpegJpegStateCreate(handle, ctypes.byref(state)):
        library.nvjpegDestroy(handle)
        raise OSError(f"libnvjpeg has no memory for a decoder here (status {status})")
    return handle, state
