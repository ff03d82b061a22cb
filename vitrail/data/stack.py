"""Images of any number of channels in 8 or 16 bits: TIFF stacks, arrays, and every other file by its own channels.

A `StackImage` keeps its pixels [height, width, channels] in the depth of the file, through crops and resizing; values
are scaled only where a batch is normalised. For all that shows pictures it is a Pillow image, an RGB composite.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageSequence, UnidentifiedImageError

from vitrail.data.counter import uniform
from vitrail.data.dataset import BadImage, DataSet, Split
from vitrail.data.decode import MAX_PIXELS, QUIET, raise_if_of_the_machine, reason_of
from vitrail.files import odd_kind

NO_TIFFFILE = "TIFF with several samples per pixel, which needs tifffile: pip install 'vitrail[tiff]'"
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_GREY, _COLOUR = ("L", "I", "I;16", "I;16B", "I;16L"), ("LA", "RGB", "RGBA", "CMYK")
_BITS_PER_SAMPLE = 258  # TIFF tag


class StackForm(NamedTuple):
    """Channels of every image of a data set, and the pixel value that becomes 1."""

    channels: int
    maximum: float

    @property
    def bits(self) -> int:
        return 8 if self.maximum <= 255 else 16

    def image(self, pixels: NDArray[Any], key: str) -> StackImage:
        """Pixels [height, width] or [height, width, channels] as an image; `BadImage` where they have another form."""
        channels, bits = form_of(pixels, key)
        if (channels, bits) != (self.channels, self.bits):
            expected = f"{self.channels} of {self.bits} bits, as data.channels and the first image have it"
            raise BadImage(key, f"{channels} channels of {bits} bits, not {expected}")
        return StackImage(pixels)


class StackImage(Image.Image):
    """Pixels [height, width, channels], uint8 or uint16; shown as its first three channels, or as its first in grey."""

    def __init__(self, pixels: NDArray[Any]) -> None:
        super().__init__()
        self.pixels: NDArray[Any] = pixels if pixels.ndim == 3 else pixels[..., None]
        self._mode, self._size = "RGB", (pixels.shape[1], pixels.shape[0])

    def load(self) -> Any:
        """Called by Pillow before it reads the picture: the composite is made where one is shown, and only there."""
        if self._im is None:
            self.im = Image.fromarray(composite(self.pixels)).im
        return super().load()

    def resize(self, size: Any, resample: int | None = None, *_: Any, **__: Any) -> StackImage:
        """Each channel by Pillow: bytes as those of RGB, 16 bits in float32, which holds them exactly."""
        pixels = self.pixels if self.pixels.dtype == np.uint8 else self.pixels.astype(np.float32)
        planes = [Image.fromarray(pixels[..., c]).resize(size, resample) for c in range(pixels.shape[-1])]
        return self._rounded(np.stack([np.asarray(plane) for plane in planes], -1))

    def crop(self, box: Any = None) -> StackImage:
        left, top, right, bottom = (0, 0, *self.size) if box is None else map(int, box)
        return StackImage(self.pixels[top:bottom, left:right])

    def filter(self, filter: Any) -> StackImage:  # noqa: A002, Pillow's word
        """A Gaussian blur; raises `ValueError` for other filters, which are for eight bits."""
        if not isinstance(filter, ImageFilter.GaussianBlur):
            raise ValueError("images of other channels than RGB can be blurred, but not filtered otherwise")
        import torch
        from torchvision.transforms.v2.functional import gaussian_blur

        sigma = float(np.max(filter.radius))
        largest = min(self.pixels.shape[:2])
        size = min(2 * int(np.ceil(3 * sigma)) + 1, largest - 1 + largest % 2)
        planes = torch.from_numpy(self.pixels.astype(np.float32)).permute(2, 0, 1)
        return self._rounded(gaussian_blur(planes, [size, size], [sigma]).permute(1, 2, 0).numpy())

    def _rounded(self, values: NDArray[Any]) -> StackImage:
        most = np.iinfo(self.pixels.dtype).max
        return StackImage(np.clip(np.rint(values), 0, most).astype(self.pixels.dtype))


def pixels_of(image: Image.Image) -> NDArray[Any]:
    """[height, width, channels] in the depth of the image."""
    return image.pixels if isinstance(image, StackImage) else np.asarray(image)


def with_pixels(image: Image.Image, pixels: NDArray[Any]) -> Image.Image:
    """An image of the same kind with other pixels."""
    return StackImage(pixels) if isinstance(image, StackImage) else Image.fromarray(pixels)


def composite(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """[height, width, 3] for display: the first three channels, of fewer the first; 16 bits stretched by channel."""
    shown = pixels[..., :3] if pixels.shape[-1] >= 3 else np.repeat(pixels[..., :1], 3, -1)
    if shown.dtype == np.uint8:
        return np.ascontiguousarray(shown)
    values = shown.astype(np.float32)
    low, high = values.min((0, 1)), values.max((0, 1))
    return np.round((values - low) * (255 / np.maximum(high - low, 1))).astype(np.uint8)


def form_of(pixels: NDArray[Any], key: str) -> tuple[int, int]:
    """Channels and bits of pixels. Raises `BadImage` where they are neither uint8 nor uint16."""
    if pixels.dtype not in (np.uint8, np.uint16) or pixels.ndim not in (2, 3):
        raise BadImage(key, f"pixels of {pixels.dtype} {list(pixels.shape)}; only 8 and 16 bits without sign are read")
    return (1 if pixels.ndim == 2 else pixels.shape[-1]), 8 * pixels.dtype.itemsize


def read_pixels(source: Path | bytes, key: str, digest: hashlib.blake2b | None = None) -> NDArray[Any]:
    """[height, width, channels] of a file in its own depth: pages and samples of a TIFF are channels, in their order.

    Pillow reads whatever it keeps whole, tifffile all other TIFF. Raises `BadImage(key, reason)`; `OSError` where the
    machine has no file handle or memory left. `digest` is updated with all bytes.
    """
    try:
        if isinstance(source, Path) and (kind := "a folder" if source.is_dir() else odd_kind(source)):
            raise BadImage(key, f"{kind}, not a file")
        data = source if isinstance(source, bytes) else source.read_bytes()
        if digest is not None:
            digest.update(data)
        with QUIET:
            pages = _by_pillow(data, key) or _by_tifffile(data, key)
    except BadImage:
        raise
    except Exception as error:  # damaged files raise nearly every exception type there is
        raise_if_of_the_machine(error, key)
        raise BadImage(key, reason_of(error)) from None
    if not pages:
        raise BadImage(key, "damaged header")
    if len({page.shape[:2] for page in pages}) != 1 or len({page.dtype for page in pages}) != 1:
        raise BadImage(key, "its pages differ in size or depth, so they are no channels of one image")
    return np.concatenate([page if page.ndim == 3 else page[..., None] for page in pages], -1)


def _by_pillow(data: bytes, key: str) -> list[NDArray[Any]]:
    """The pages of a file; none where Pillow cannot read them, or would cut 16 bits down to 8."""
    pages: list[NDArray[Any]] = []
    try:
        image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        return []
    with image:
        for frame in ImageSequence.Iterator(image) if image.format == "TIFF" else (image,):
            _reject_large(*frame.size, key)
            tags = getattr(frame, "tag_v2", {})
            deep = max(tags.get(_BITS_PER_SAMPLE, (8,))) > 8 or ";16" in str(getattr(frame, "tile", ""))
            if frame.mode not in (_GREY if deep else _GREY + _COLOUR) or (frame.mode == "I" and tags):
                return []
            page = np.asarray(frame)
            pages.append(page.astype(np.uint16) if frame.mode != "L" and page.dtype != np.uint8 else page)
    return pages


def _by_tifffile(data: bytes, key: str) -> list[NDArray[Any]]:
    if not data.startswith(_TIFF):
        raise BadImage(key, "no image, or 16 bits of colour, which are read from TIFF only" if data else "empty file")
    try:
        import tifffile
    except ModuleNotFoundError:
        raise BadImage(key, NO_TIFFFILE) from None
    pages = []
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        for page in cast(Any, file.pages):
            _reject_large(page.imagewidth, page.imagelength, key)
            array = page.asarray()
            pages.append(np.moveaxis(array, page.axes.index("S"), -1) if "S" in page.axes else array)
    return pages


def _reject_large(width: int, height: int, key: str) -> None:
    if width * height > MAX_PIXELS:
        raise BadImage(key, f"{width}x{height} pixels, more than the limit of {MAX_PIXELS}")


def with_channels(data: DataSet, channels: int, maximum: float | None) -> DataSet:
    """The data set whose images keep `channels` channels in their own depth, `maximum` (none: of that depth) being 1.

    With 3 channels and no maximum images are RGB of eight bits. Raises `ValueError` that names the first image where it
    has another form, and for sources that hold RGB only.
    """
    if channels == 3 and maximum is None:
        for split in data.splits.values():
            if hasattr(split.reader, "members") and len(split):
                split.read(0)  # rejects arrays of other channels or depth
        return data
    if not all(hasattr(split.reader, "form") for split in data.splits.values()):
        raise ValueError(f"data.channels: {data.uri} holds RGB images; other channels are for folders, tables and .npz")
    first = next(iter(data.splits.values()))
    problem = BadImage(data.uri, "it has no images")
    for key, index in zip(first.keys[:8], first.index.tolist(), strict=False):  # the first of all may be damaged
        try:
            found, bits = form_of(cast(Any, first.reader).raw(index), key)
            break
        except BadImage as bad:
            problem = bad
    else:
        raise ValueError(f"data.channels: {problem.key} cannot be read: {problem.reason}")
    if found != channels:
        raise ValueError(
            f"data.channels: {key} has {found} channels of {bits} bits, and {channels} are set; set --data.channels "
            f"{found}, or name other data"
        )
    form = StackForm(channels, float(2**bits - 1) if maximum is None else maximum)
    if form.bits != bits:
        raise ValueError(f"data.maximum: {key} has {bits} bits, and {form.maximum:g} is of {form.bits}; leave it out")
    splits = {name: replace(split, reader=cast(Any, split.reader).formed(form)) for name, split in data.splits.items()}
    note = f"images have {channels} channels of {bits} bits, read as they are; the value {form.maximum:g} becomes 1"
    return replace(data, splits=splits, notes=(*data.notes, note))


def form_in(data: DataSet) -> StackForm | None:
    """Channels and depth of the images of a data set; none: RGB of eight bits."""
    return next((form for split in data.splits.values() if (form := getattr(split.reader, "form", None))), None)


MEASURED = 256  # images by which mean and deviation of each channel are measured


def channel_moments(split: Split, form: StackForm, seed: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of values scaled to 0..1, over a seeded sample of a split."""
    sums = np.zeros((3, form.channels))  # pixels, sums, sums of squares
    for row in uniform(seed, split.index).argsort(kind="stable")[:MEASURED].tolist():
        try:
            values = pixels_of(split.read(row)).astype(np.float64).reshape(-1, form.channels) / form.maximum
        except BadImage:
            continue
        sums += np.stack([np.full(form.channels, len(values)), values.sum(0), np.square(values).sum(0)])
    mean = sums[1] / np.maximum(sums[0], 1)
    deviation = np.sqrt(np.maximum(sums[2] / np.maximum(sums[0], 1) - mean**2, 0))
    return tuple(mean.tolist()), tuple(np.where(deviation > 1e-6, deviation, 1.0).tolist())  # a constant stays finite
