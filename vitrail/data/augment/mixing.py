"""Mixup and CutMix over a batch, such that pieces of a batch are mixed as the whole would be.

Place i of the global batch is mixed with place i ^ 1: adjacent pairs always lie in one even-sized piece, whatever the
number of processes and accumulation steps. What is drawn (which of the two, ratio, box) depends on (seed, step) only
and is drawn on the host, so nothing waits for the device and all processes agree without talking.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.config import AugmentConfig
from vitrail.data.counter import seed_of


class Box(NamedTuple):
    """A rectangle of pixels; bottom and right are outside."""

    top: int
    left: int
    bottom: int
    right: int


class MixDraw(NamedTuple):
    """What a batch is mixed with: the partner's share, and the box it comes in (none: mixup, blended everywhere)."""

    share: float
    box: Box | None


def draw_mix(config: AugmentConfig, seed: int, step: int, height: int, width: int) -> MixDraw | None:
    """The draw of one optimiser step; none where mixing is off.

    One's own share is drawn from Beta(alpha, alpha), with the alpha of whichever of the two is chosen: CutMix with
    probability `mix_switch` if both are on. A CutMix box has a side of sqrt(partner's share) of the image's, a centre
    anywhere, and is clipped at the border; the share is then that of the box as it is.
    """
    if not config.mixup and not config.cutmix:
        return None
    generator = np.random.Generator(np.random.Philox(seed_of("mix", seed, step)))
    switch = generator.random()
    cut = config.cutmix > 0 and (not config.mixup or switch < config.mix_switch)
    alpha = config.cutmix if cut else config.mixup
    share = 1 - generator.beta(alpha, alpha)
    if not cut:
        return MixDraw(share, None)
    top, bottom = _cut(generator, height, share)
    left, right = _cut(generator, width, share)
    return MixDraw((bottom - top) * (right - left) / (height * width), Box(top, left, bottom, right))


def mix(
    images: Tensor,
    target: Tensor,
    *,
    classes: int,
    config: AugmentConfig,
    seed: int,
    step: int,
    place: int = 0,
    places: NDArray[np.int64] | None = None,
) -> tuple[Tensor, Tensor]:
    """Mixed images [batch, 3, height, width] (float) and targets [batch, classes] that sum to what they summed to.

    `target` is [batch] of classes or [batch, classes] of weights. `place` is the first row's place in the global batch;
    where rows are missing, `places` [batch] gives each row's own instead. A row whose partner is not there keeps its
    image and its target, exactly.
    """
    target = soft(target, classes)
    drawn = draw_mix(config, seed, step, images.shape[-2], images.shape[-1])
    if drawn is None or len(images) == 0:
        return images, target
    if places is None and place % 2 == 0 and len(images) % 2 == 0:
        partner = torch.arange(len(images), device=images.device) ^ 1  # the usual case copies nothing to the device
    else:
        places = np.arange(place, place + len(images)) if places is None else places
        partner = torch.from_numpy(partners(places)).to(images.device)
    # lerp(x, x, share) is exactly x, which is what leaves a row without a partner alone.
    target = torch.lerp(target, target[partner], drawn.share)
    if drawn.box is None:
        return torch.lerp(images, images[partner], drawn.share), target
    top, left, bottom, right = drawn.box
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = images[partner, :, top:bottom, left:right]
    return mixed, target


def soft(target: Tensor, classes: int) -> Tensor:
    """Class numbers [batch] as weights [batch, classes]; weights as they are, in float32, and values as [batch, 1]."""
    if target.is_floating_point() and target.ndim == 1:
        return target[:, None]
    if target.ndim == 2:
        return target.to(torch.float32)
    weights = torch.zeros(len(target), classes, device=target.device)
    return weights.scatter_(1, target[:, None], 1.0)  # F.one_hot reads its input back from an accelerator


def partners(places: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row the row whose place is its own place ^ 1; the row itself where there is none.

    >>> partners(np.array([0, 1, 3, 4, 5])).tolist()
    [1, 0, 2, 4, 3]
    """
    row_of = {place: row for row, place in enumerate(places.tolist())}
    return np.array([row_of.get(place ^ 1, row) for place, row in row_of.items()], dtype=np.int64)


def _cut(generator: np.random.Generator, length: int, share: float) -> tuple[int, int]:
    half = int(length * share**0.5) // 2
    centre = int(generator.integers(length))
    return max(centre - half, 0), min(centre + half, length)
