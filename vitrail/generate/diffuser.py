"""The interface of diffusion models for GeNIe (Abbasi Koohpayegani et al., 2023, arXiv 2312.02548).

    X_r = STDiff(X_S, T, r): noise the image part of the way, then denoise it under another class

`r` is a time in training: of the steps of a whole run, only those with a time of at most r are made. How much noise
that is depends on the schedule; `vitrail.model.noise.equal_noise` converts between schedules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

PURE_NOISE = 0.999  # an r above it means that nothing of the image is left


class Diffuser(Protocol):
    """Makes images of a class, from another image or from noise alone. Each depends on its own seed and on no other.

    `classes` names what targets count: target [batch] of places in it; seeds [batch] of whole numbers.
    """

    name: str
    classes: tuple[str, ...]
    steps: int

    def __call__(self, images: Tensor, target: Tensor, r: float, seeds: Tensor) -> Tensor:
        """Images [batch, 3, height, width], bytes or floats in 0..1, changed towards `target`; of the kind given."""
        ...

    def txt2img(self, target: Tensor, seeds: Tensor) -> Tensor:
        """Images of the target classes from noise alone: bytes [batch, 3, height, width]."""
        ...

    def evaluations(self, r: float) -> int:
        """What an image costs: rows that the network sees for it, two a step where it is guided."""
        ...


def steps_run(r: float, steps: int) -> int:
    """How many of `steps` are made from noise level `r` on: floor(r * steps).

    >>> [steps_run(r, 50) for r in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
    [15, 25, 30, 35, 40, 45, 50]
    """
    if not 0 <= r <= 1:
        raise ValueError(f"r is a share of the noise, so {r:g} must lie between 0 and 1")
    return steps if r > PURE_NOISE else math.floor(r * steps + 1e-9)  # 0.29 * 100 is 28.999999999999996


def check_request(
    classes: Sequence[str], target: Tensor, seeds: Tensor, images: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Targets and seeds as int64; raises `ValueError` where they do not fit the images or the classes."""
    target, seeds = (torch.as_tensor(t).to(torch.int64) for t in (target, seeds))
    count = len(target) if images is None else len(images)
    if target.shape != (count,) or seeds.shape != (count,):
        raise ValueError(
            f"{count} images need as many targets and seeds, not {list(target.shape)} and {list(seeds.shape)}"
        )
    if count and not 0 <= int(target.min()) <= int(target.max()) < len(classes):
        raise ValueError(f"targets must be places in the {len(classes)} classes, from 0 to {len(classes) - 1}")
    if images is not None:
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be [batch, 3, height, width], not {list(images.shape)}")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise ValueError(f"images must be bytes (uint8) or floats in 0..1, not {images.dtype}")
    return target, seeds


def as_signed(images: Tensor) -> Tensor:
    """Bytes, or floats in 0..1, to float32 in -1..1."""
    return images.to(torch.float32) / 127.5 - 1 if images.dtype == torch.uint8 else images.to(torch.float32) * 2 - 1


def as_given(signed: Tensor, like: torch.dtype) -> Tensor:
    """Floats in -1..1 to bytes, or to floats in 0..1."""
    if like == torch.uint8:
        return ((signed + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return ((signed + 1) / 2).clamp(0, 1).to(like)
