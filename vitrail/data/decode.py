"""From a file or bytes to an upright RGB image, or one plain reason why not.

Header, pixels and conversion all happen inside one guard: most damaged files open without complaint and fail only
when their pixels are asked for.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import threading
import warnings
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vitrail.data.dataset import BadImage
from vitrail.files import odd_kind

MAX_PIXELS = 100_000_000
NO_MEMORY = "needs more memory than there is"  # true of this process, perhaps not of the next
INSTALL_HEIF = "pip install 'vitrail[heif]'"
NO_HEIF = f"HEIC, which needs pillow-heif: {INSTALL_HEIF}"  # as above, true of this environment
HEIF_SUFFIXES = frozenset((".heic", ".heif", ".hif"))
_LARGE = 2**26  # bytes
_OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_ORIENTATION = 0x0112  # EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF")
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")


@cache
def reads_heif() -> bool:
    """Whether HEIC and HEIF files can be decoded; the first call imports pillow-heif where it is installed."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return False
    register_heif_opener()
    return True


def decode(
    source: Path | bytes | BinaryIO,
    key: str,
    max_pixels: int = MAX_PIXELS,
    at_least: int | None = None,
    digest: hashlib.blake2b | None = None,
) -> Image.Image:
    """The upright RGB image in a file or in bytes; raises `BadImage(key, reason)` for anything that is not one.

    Alpha is laid on white, 16-bit grey is scaled (not clipped) to 8 bits, of several frames the first is taken, and a
    header that claims more than `max_pixels` is rejected before any pixel is decoded. Where an image is larger than
    Pillow's own limit (`PIL.Image.MAX_IMAGE_PIXELS`, doubled), Pillow rejects it whatever `max_pixels` says.

    `at_least` lets a JPEG be decoded at 1/2, 1/4 or 1/8 of its size, as long as both sides stay at least that long. It
    saves most of the time for large photographs. It changes pixels slightly: the reduction is a mean over blocks in the
    frequency domain rather than the resampling filter that would follow. `digest` is updated with all bytes of a file.
    Raises `OSError` where the machine has no file handle or memory left, whatever the file holds.
    """
    try:
        with QUIET:
            return _decode(source, key, max_pixels, at_least, digest)
    except BadImage:
        raise
    except Exception as error:  # damaged files make Pillow raise nearly every exception type there is
        raise_if_of_the_machine(error, key)
        raise BadImage(key, reason_of(error)) from None


def raise_if_of_the_machine(error: Exception, key: object) -> None:
    """Raises where a file was not read because the process has no file handle or memory left."""
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        what = f"cannot read {key}: {os.strerror(error.errno).lower()}"
        raise OSError(f"{what}; close other programs, raise `ulimit -n` or use fewer workers") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow image as 8-bit RGB: alpha on white, wide numbers scaled.

    16-bit modes are divided by 257. A 32-bit integer image is taken as 8-bit where it fits in 0..255 and as 16-bit
    where it fits in 0..65535; a float image as 0..1 or 0..255 where it fits; any other range is stretched from its
    smallest to its largest value.
    """
    if image.mode.startswith("I;16"):
        return Image.fromarray(_from_16_bits(np.asarray(image).astype(np.uint32))).convert("RGB")
    if image.mode in ("I", "F"):
        return Image.fromarray(_from_wide(np.asarray(image))).convert("RGB")
    if image.has_transparency_data or image.mode in ("La", "RGBa"):
        straight = image.convert({"La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode)).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), straight).convert("RGB")
    return image.convert("RGB")


def stored_form(path: Path) -> tuple[str, tuple[int, int]]:
    """How a file stores its colours, as Pillow calls it (`L`, `CMYK`, `I;16`, ...), with the number of pages of a TIFF
    stack (`I;16, 5 pages`), and width and height as stored; empty and zeros where it is no image."""
    try:
        if odd_kind(path):
            return "", (0, 0)
        with QUIET, path.open("rb") as stream, _open(stream) as image:
            pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
            return image.mode if pages == 1 else f"{image.mode}, {pages} pages", image.size
    except Exception:  # as in `decode`
        return "", (0, 0)


def stored_orientation(data: bytes) -> int:
    """The EXIF orientation of an encoded image, 1 to 8, from its header alone; 1 where there is none."""
    with QUIET, _open(io.BytesIO(data)) as image:
        orientation = _orientation(image)
    return orientation if orientation in _UPRIGHT else 1


def _decode(
    source: Path | bytes | BinaryIO,
    key: str,
    max_pixels: int,
    at_least: int | None,
    digest: hashlib.blake2b | None = None,
) -> Image.Image:
    if isinstance(source, Path):
        kind = "a folder" if source.is_dir() else odd_kind(source)
        if kind:
            raise BadImage(key, f"{kind}, not a file")
        with source.open("rb") as opened:
            if digest is not None and os.fstat(opened.fileno()).st_size < _LARGE:  # read once, and decoded from memory
                data = opened.read()
                digest.update(data)
                return _decode(data, key, max_pixels, at_least)
            while digest is not None and (block := opened.read(2**20)):
                digest.update(block)
            opened.seek(0)
            return _decode(opened, key, max_pixels, at_least)
    stream: BinaryIO = io.BytesIO(source) if isinstance(source, bytes) else source
    start = stream.tell()
    head = stream.read(16)
    stream.seek(start)
    if not head:
        raise BadImage(key, "empty file")
    try:
        image = _open(stream)
    except UnidentifiedImageError:
        if _is_heif(head) and not reads_heif():
            raise BadImage(key, NO_HEIF) from None
        known = head.startswith(_MAGIC) or _is_heif(head)
        raise BadImage(key, "damaged header" if known else "not an image") from None
    with image:
        width, height = image.size
        if width * height > max_pixels:
            raise BadImage(key, f"{width}x{height} pixels, more than the limit of {max_pixels}")
        if at_least is not None and image.format != "HEIF":  # of these it would decode the thumbnail alone
            image.draft(None, (at_least, at_least))  # no mode: size only
        image.load()
        upright = _UPRIGHT.get(_orientation(image))
        rgb = to_rgb(image if upright is None else image.transpose(upright))
    rgb.info = {}  # profiles and thumbnails of the file would only travel along to worker processes
    return rgb


def _open(stream: BinaryIO) -> Image.Image:
    start = stream.tell()
    try:
        return Image.open(stream)
    except UnidentifiedImageError:
        stream.seek(start)
        if not (_is_heif(stream.read(16)) and reads_heif()):
            raise
        stream.seek(start)
        return Image.open(stream)


def _is_heif(head: bytes) -> bool:
    return head[4:8] == b"ftyp" and head[8:12] in _HEIF_BRANDS


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # a broken EXIF block does not make the picture unreadable
        return 1


def _from_16_bits(values: NDArray[np.uint32]) -> NDArray[np.uint8]:
    return ((values + 128) // 257).astype(np.uint8)


def _from_wide(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    numbers = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(numbers.min()), float(numbers.max())
    if values.dtype.kind == "f" and low >= 0 and high <= 1:
        numbers = numbers * 255
    elif low >= 0 and high <= 255:
        pass
    elif values.dtype.kind != "f" and low >= 0 and high <= 65535:
        return _from_16_bits(numbers.astype(np.uint32))
    else:
        numbers = (numbers - low) * (255 / max(high - low, 1e-300))
    return np.round(numbers).astype(np.uint8)


def reason_of(error: Exception) -> str:
    """One plain reason why a file could not be read."""
    text = " ".join(str(error).split())
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, Image.DecompressionBombError):
        pixels = re.search(r"\d+", text)
        return f"{pixels[0] if pixels else 'too many'} pixels, more than Pillow's limit"
    if isinstance(error, EOFError) or re.search(r"truncat|incomplete|end of file", text, re.IGNORECASE):
        return "truncated"
    if isinstance(error, MemoryError):
        return NO_MEMORY
    return f"damaged ({text[:80] or type(error).__name__})"


class _Quiet:
    """Silences warnings while any thread is inside.

    `warnings.catch_warnings` alone is not safe under threads: interleaved exits may restore another thread's filters,
    and leave the process silent for good.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._saved = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._saved = warnings.catch_warnings()
                self._saved.__enter__()
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._saved.__exit__(None, None, None)


QUIET = _Quiet()
