"""Preprocessing wherever nothing is random: how an image becomes the model's input, and where its boxes then are.

One object does it everywhere, because the same weights lose points under another resize. Resizing is Pillow's, called
directly: its pixels are those of timm's evaluation transform, which published weights were measured with, and without
transform objects around it an image of 28 pixels takes half the time. (torchvision's tensor resize is quicker on large
images; equality with timm is tested for this path only.)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.config import PreprocessConfig
from vitrail.data.stack import StackImage, pixels_of

PIXELS = (torch.uint8, torch.uint16)  # of images that are not normalised yet
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class Preprocess:
    """Image -> tensor [channels, size, size] in the depth of the image, uint8 [3, size, size] of an RGB image;
    `normalize` makes batches of those the model's input.

    As timm's `crop_mode` "center", "squash" and "border", pixel by pixel. In all three the image is first resized for
    a square of size / crop_ratio, of which the centre is taken; so `pad` and `squash` keep the whole image where
    crop_ratio is 1. What `pad` adds has the mean colour.
    """

    def __init__(self, config: PreprocessConfig) -> None:
        self.config = config
        self._moments: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, image: Image.Image) -> Tensor:
        return as_tensor(pixels_of(self.square(image)))

    def square(self, image: Image.Image) -> Image.Image:
        """The image as the model will see it, before it becomes numbers. Raises `ValueError` unless it is RGB."""
        if image.mode != "RGB":
            raise ValueError(f"an image of mode {image.mode} cannot be preprocessed; convert it to RGB first")
        size = self.config.size
        image = resized(image, self._resized_size(*image.size), self.config)
        width, height = image.size
        left, top = _centre(width, size), _centre(height, size)
        if (width, height) == (size, size):
            return image
        if width >= size and height >= size:
            return image.crop((left, top, left + size, top + size))
        if isinstance(image, StackImage):
            full = np.full((size, size, len(self.config.mean)), self._mean_colour(), image.pixels.dtype)
            y, x = max(0, -top), max(0, -left)
            inside = image.pixels[max(0, top) :, max(0, left) :][: size - y, : size - x]
            full[y : y + len(inside), x : x + inside.shape[1]] = inside
            return StackImage(full)
        canvas = Image.new("RGB", (size, size), self._mean_colour())
        canvas.paste(image, (-left, -top))
        return canvas

    @property
    def at_least(self) -> int | None:
        """What `decode` may leave of an image's sides; none where it must leave all."""
        gap = self.config.reducing_gap
        return None if gap is None else int(gap * int(self.config.size / self.config.crop_ratio))

    def normalize(self, images: Tensor) -> Tensor:
        """Pixels [..., channels, height, width] -> float32 (x / maximum - mean) / std, on their device; floats pass
        unchanged.

        >>> Preprocess(PreprocessConfig(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))).normalize(
        ...     torch.tensor([0, 255, 255], dtype=torch.uint8).view(3, 1, 1)
        ... ).flatten()
        tensor([-1.,  1.,  1.])
        """
        if images.is_floating_point():
            return images
        if images.dtype not in PIXELS:
            raise ValueError(f"images must be uint8, uint16 or already normalised floats, not {images.dtype}")
        mean, std = self._moments_on(images.device)
        return images.to(torch.float32).div_(self.config.maximum).sub_(mean).div_(std)

    def _moments_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._moments:  # copied once per device: a copy in every batch would make the host wait
            mean, std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (self.config.mean, self.config.std))
            self._moments[device] = mean, std
        return self._moments[device]

    def __getstate__(self) -> dict[str, object]:
        return {"config": self.config, "_moments": {}}  # worker processes must not receive device tensors

    def _resized_size(self, width: int, height: int) -> tuple[int, int]:
        target = math.floor(self.config.size / self.config.crop_ratio)
        if self.config.resize == "squash":
            return target, target
        if self.config.resize == "crop":
            return shorter_side(width, height, target)
        scale = max(width / target, height / target)
        return max(1, round(width / scale)), max(1, round(height / scale))

    def _mean_colour(self) -> tuple[int, ...]:
        return tuple(round(self.config.maximum * m) for m in self.config.mean)


def shorter_side(width: int, height: int, target: int) -> tuple[int, int]:
    """Width and height with the shorter side `target` and the longer one rounded down, as torchvision does."""
    if width <= height:
        return target, int(target * height / width)
    return int(target * width / height), target


def resized(image: Image.Image, size: tuple[int, int], config: PreprocessConfig) -> Image.Image:
    """The image at (width, height); itself where it has that size already."""
    if image.size == size:
        return image
    return image.resize(size, RESAMPLING[config.interpolation], reducing_gap=config.reducing_gap)


def as_tensor(pixels: NDArray[Any]) -> Tensor:
    """[height, width, channels] array -> [channels, height, width] tensor with memory of its own."""
    return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C"))


def _centre(length: int, size: int) -> int:
    """Where a centred window of `size` begins; negative where the window is the longer one."""
    return round((length - size) / 2) if length >= size else -((size - length) // 2)
