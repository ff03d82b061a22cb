"""Augmentation of a whole batch on its device: the operations of `vitrail.data.augment.host`, batched.

What is random is drawn on the host, for all images at once and as a function of each image's key; it goes to the device
in one small copy, and from there on there are only tensor operations. So an image does not depend on the batch, the
process or the device it is in, and nothing waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.augment import pixel_ops as ops
from vitrail.data.augment.policies import (
    RAND_STYLES,
    RandTurn,
    Rendering,
    draw_auto,
    draw_trivial,
    draw_turn,
    rand_augmented,
    rendering,
)
from vitrail.data.config import AugmentConfig, PreprocessConfig, check_possible
from vitrail.data.counter import bits, seed_of, uniform
from vitrail.data.preprocess import shorter_side

if TYPE_CHECKING:
    from vitrail.data.augment.flat_images import FlatImages

_HUE = 3  # after brightness, contrast and saturation
_JITTER_ORDERS = {count: np.array(list(itertools.permutations(range(count)))) for count in (_HUE, _HUE + 1)}
_SEED_BITS = 24  # of each of the two numbers that carry a seed: float32 holds them exactly
_BOX = ("top", "left", "height", "width")


@dataclass(frozen=True)
class Drawn:
    """Parameters of a batch, by name, and how many of its images are blurred, erased, and in each policy group.

    `blur_rows` and `erase_rows` begin with the rows that are, `hue_rows` with those whose hue is the first to be
    jittered, then the second, up to `hues` of them. Such operations are too dear to be done for all, and as the host
    draws it also knows how many there are.
    """

    columns: dict[str, Any]  # [batch] each: arrays on the host, float32 tensors on the device
    blurs: int = 0
    erasures: int = 0
    bounds: tuple[tuple[int, ...], ...] = ()  # a turn of the policy
    hues: tuple[int, ...] = ()  # where the rows of each turn of the jitter end

    def to(self, device: torch.device) -> Drawn:
        """The parameters on a device, in one copy that the host does not wait for."""
        if not self.columns:
            return self
        packed = torch.from_numpy(np.stack(list(self.columns.values())).astype(np.float32))
        packed = packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed.to(device)
        return replace(self, columns=dict(zip(self.columns, packed.unbind(), strict=True)))

    def turns(self) -> Iterator[RandTurn]:
        """Turns of the policy, one operation per image each."""
        for number, bounds in enumerate(self.bounds):
            prefix = f"rand_{number}_"
            columns = {name.removeprefix(prefix): v for name, v in self.columns.items() if name.startswith(prefix)}
            yield RandTurn(columns, bounds)

    def boxes(self, what: str) -> ops.CropBoxes:
        """The rectangles of `crop` or `erase`."""
        return ops.CropBoxes(*(self.columns[f"{what}_{side}"] for side in _BOX))


def draw(config: AugmentConfig, size: int, keys: NDArray[np.int64], height: ops.Sides, width: ops.Sides) -> Drawn:
    """Parameters for images of height x width with keys [batch, 5] of (seed, epoch, index, view, repeat).

    Distributed as in `Augment`; other numbers, since those come out of torch's generator one after the other.
    """
    key = bits(seed_of("device"), *keys.T)
    columns: dict[str, NDArray[Any]] = {}
    if config.crop == "resized":
        columns |= _named("crop", ops.crop_boxes(config, _uniform(key, "crop", ops.BOX_DRAWS), height, width))
    elif config.crop in ("simple", "pad"):
        down, right = _uniform(key, "crop", 2).T
        columns["crop_top"] = np.floor(down * (height + 2 * config.padding - size + 1)) - config.padding
        if config.crop_along == "x":
            columns["crop_top"] = np.full_like(columns["crop_top"], (height - size) // 2)
        columns["crop_left"] = np.floor(right * (width + 2 * config.padding - size + 1)) - config.padding
    if config.flip:
        columns["flip"] = _uniform(key, "flip", 1)[:, 0] < config.flip
    blurs = 0
    if config.three or config.grey or config.solarise or config.blur:
        which, grey, solarise, blur, radius = _uniform(key, "looks", 5).T
        look = np.floor(3 * which) if config.three else np.full(len(key), -1)
        columns["grey"] = (look == 0) | (grey < config.grey)
        columns["solarise"] = (look == 1) | (solarise < config.solarise)
        wanted = (look == 2) | (blur < config.blur)
        blurs = int(wanted.sum())
        columns["blur_rows"] = np.argsort(~wanted, kind="stable")
        low, high = ops.blur_range(size)
        columns["blur_sigma"] = low + (high - low) * radius
        weights = ops.blur_weights(columns["blur_sigma"], ops.blur_reach(high))
        columns |= {f"blur_{distance}": weight for distance, weight in enumerate(weights)}
    policy = _policy_turns(config, key, size)
    for number, chosen in enumerate(policy):
        columns |= {f"rand_{number}_{name}": values for name, values in chosen.columns.items()}
    hues: tuple[int, ...] = ()
    if config.jitter or config.hue:
        jitter, hues = _drawn_jitter(config, key)
        columns |= jitter
    erasures = 0
    if config.erasing:
        chances = _uniform(key, "erase", ops.BOX_DRAWS + 1)
        fits, boxes = ops.erasing_boxes(chances[:, 1:], size)
        wanted = fits & (chances[:, 0] < config.erasing)
        erasures = int(wanted.sum())
        columns["erase_rows"] = np.argsort(~wanted, kind="stable")
        columns |= _named("erase", boxes)
        noise = bits(seed_of("noise"), key)
        columns["noise_high"] = (noise >> np.uint64(64 - _SEED_BITS)).astype(np.int64)
        columns["noise_low"] = (noise & np.uint64((1 << _SEED_BITS) - 1)).astype(np.int64)
    return Drawn(columns, blurs, erasures, tuple(chosen.bounds for chosen in policy), hues)


def _drawn_jitter(config: AugmentConfig, key: NDArray[np.uint64]) -> tuple[dict[str, NDArray[Any]], tuple[int, ...]]:
    """Which of the three or four comes in each turn, its factor, how far hues turn, and where the rows of hues end."""
    order, *strengths, turned = _uniform(key, "jitter", 5).T
    wanted = _uniform(key, "jittered", 1)[:, 0] < config.jitter_chance
    least = max(0.0, 1 - config.jitter)
    factors = [np.where(wanted, least + (1 + config.jitter - least) * u, 1.0) for u in strengths]
    possible = _JITTER_ORDERS[_HUE + 1 if config.hue else _HUE]
    orders = possible[np.floor(order * len(possible)).astype(np.int64)]
    by_kind = np.stack([*factors, np.ones(len(key))], 1)  # which leaves an image as it is
    columns: dict[str, NDArray[Any]] = {}
    for turn, which in enumerate(orders.T):
        columns[f"jitter_{turn}"] = which
        columns[f"factor_{turn}"] = by_kind[np.arange(len(key)), which]
    if not config.hue:
        return columns, ()
    columns["hue"] = np.trunc(255 * config.hue * (2 * turned - 1))  # as torchvision does with bytes
    turns = np.where(wanted, np.argmax(orders == _HUE, 1), _HUE + 1)
    columns["hue_rows"] = np.argsort(turns, kind="stable")
    return columns, tuple(int((turns <= turn).sum()) for turn in range(_HUE + 1))


class DeviceAugment:
    """uint8 images [batch, 3, height, width] and keys -> uint8 [batch, 3, size, size], on the images' device.

    Parameters and their distributions are those of `Augment`, and so are the pixels for the same parameters: equal for
    windows, mirroring, grey, solarising and torchvision's policies, and within a grey level for resizing, blur,
    jitter and timm's RandAugment, whose roundings can fall differently. Erasing fills with the same distribution from a
    generator of its own. What is not random is not done here: for `simple` and `pad` crops the shorter side must have
    the size already, for `evaluation` the image must be the preprocessed one. Raises `ValueError` for other images.
    """

    def __init__(self, config: AugmentConfig, preprocess: PreprocessConfig) -> None:
        check_possible(config, preprocess.size)
        self.config, self.preprocess = config, preprocess
        self._blur_reach = ops.blur_reach(ops.blur_range(preprocess.size)[1])
        self._colours: dict[torch.device, tuple[Tensor, Tensor, Rendering | None]] = {}

    def __call__(self, images: Tensor, keys: NDArray[np.int64]) -> Tensor:
        """Augment images with keys [batch, 5] of (seed, epoch, index, view, repeat)."""
        height, width = images.shape[-2:]
        self._check(images, keys)
        return self.apply(images, draw(self.config, self.preprocess.size, keys, height, width).to(images.device))

    def apply(self, images: Tensor, drawn: Drawn) -> Tensor:
        """Change images by parameters that are on their device. Tensor operations only, so it can be compiled."""
        return self._changed(self._cropped(images, drawn), drawn)

    def from_flat(self, images: FlatImages, keys: NDArray[np.int64]) -> Tensor:
        """As a call, for images of unequal sizes, which are also resized here as `simple` and `pad` crops want them."""
        size, sizes = self.preprocess.size, images.sizes
        if self.config.crop == "resized":
            drawn = draw(self.config, size, keys, *sizes)
            windows = np.stack([drawn.columns[f"crop_{side}"] for side in _BOX])
        else:  # two divisions per image, rounded as on the host
            short = np.array([shorter_side(width, height, size)[::-1] for height, width in sizes.T.tolist()]).T
            drawn = draw(self.config, size, keys, *short)
            windows = np.concatenate([0 * sizes, sizes, [drawn.columns[f"crop_{side}"] for side in _BOX[:2]], short])
        pixels = images.resampled(windows, size, self.preprocess.interpolation)
        return self._changed(pixels, drawn.to(pixels.device))

    def _changed(self, images: Tensor, drawn: Drawn) -> Tensor:
        """All but the crop."""
        if "grey" in drawn.columns or "jitter_0" in drawn.columns or drawn.bounds:
            images = self._coloured(images.to(torch.float32), drawn)
        if "flip" in drawn.columns:
            images = torch.where(drawn.columns["flip"].view(-1, 1, 1, 1) > 0, images.flip(-1), images)
        images = images.to(torch.uint8)
        return self._erased(images, drawn) if drawn.erasures else images

    def _check(self, images: Tensor, keys: NDArray[np.int64]) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be uint8 [batch, 3, height, width], not {images.dtype} {list(images.shape)}")
        if keys.shape != (len(images), 5):
            raise ValueError(f"keys must be [{len(images)}, 5] for these images, not {list(keys.shape)}")
        size, crop = self.preprocess.size, self.config.crop
        height, width = images.shape[-2:]
        if crop == "evaluation" and (height, width) != (size, size):
            raise ValueError(f"images of {height} x {width} must first be preprocessed to {size} x {size}")
        if crop in ("simple", "pad") and min(height, width) != size:
            raise ValueError(f"images of {height} x {width} must first be resized to a shorter side of {size}")

    def _cropped(self, images: Tensor, drawn: Drawn) -> Tensor:
        size, crop = self.preprocess.size, self.config.crop
        if crop == "resized":
            return ops.resampled(images.to(torch.float32), drawn.boxes("crop"), size, self.preprocess.interpolation)
        if crop == "evaluation":
            return images
        return ops.reflected_window(images, drawn.columns["crop_top"], drawn.columns["crop_left"], size)

    def _coloured(self, images: Tensor, drawn: Drawn) -> Tensor:
        """Colours and policies, in the order of `Augment`."""
        if self.config.three:
            images = self._with_looks(images, drawn)
        for turn in drawn.turns():
            images = rand_augmented(images, turn, self._colours_on(images.device)[2])
        if "jitter_0" in drawn.columns:
            images = _all_jittered(images, drawn)
        return images if self.config.three else self._with_looks(images, drawn)

    def _with_looks(self, images: Tensor, drawn: Drawn) -> Tensor:
        """Grey, blur and solarise, where drawn."""
        columns = drawn.columns
        if "grey" not in columns:
            return images
        images = torch.where(columns["grey"].view(-1, 1, 1, 1) > 0, ops.luminance(images), images)
        if drawn.blurs:
            rows = columns["blur_rows"][: drawn.blurs].to(torch.int64)
            weights = torch.stack([columns[f"blur_{distance}"] for distance in range(self._blur_reach + 1)])[:, rows]
            images = images.index_copy(0, rows, ops.blurred(images[rows], weights))
        return torch.where(columns["solarise"].view(-1, 1, 1, 1) > 0, ops.solarised(images), images)

    def _erased(self, images: Tensor, drawn: Drawn) -> Tensor:
        rows = drawn.columns["erase_rows"][: drawn.erasures].to(torch.int64)
        high, low = (drawn.columns[name][rows].to(torch.int64) for name in ("noise_high", "noise_low"))
        mean, std, _ = self._colours_on(images.device)
        noise = ops.normal_noise((high << _SEED_BITS) | low, *images.shape[1:])
        noise = ((noise * std + mean) * 255).round_().clamp_(0, 255).to(torch.uint8)
        inside = ops.within(ops.CropBoxes(*(side[rows] for side in drawn.boxes("erase"))), *images.shape[-2:])
        return images.index_copy(0, rows, torch.where(inside, noise, images[rows]))

    def _colours_on(self, device: torch.device) -> tuple[Tensor, Tensor, Rendering | None]:
        """Mean and deviation as fractions, and how RandAugment fills and interpolates."""
        if device not in self._colours:  # copied once per device: a copy in every batch would make the host wait
            mean, std = (
                torch.tensor(v, device=device).view(3, 1, 1) for v in (self.preprocess.mean, self.preprocess.std)
            )
            style = self.config.rand_style if self.config.rand_ops else ""
            self._colours[device] = mean, std, rendering(style, self.preprocess, device)
        return self._colours[device]


def _all_jittered(images: Tensor, drawn: Drawn) -> Tensor:
    """Brightness, contrast, saturation and hue, in the order of each image."""
    columns, begin = drawn.columns, 0
    for turn in range(len(drawn.hues) or _HUE):
        images = ops.enhanced(images, columns[f"jitter_{turn}"], columns[f"factor_{turn}"])
        if drawn.hues and drawn.hues[turn] > begin:
            rows = columns["hue_rows"][begin : drawn.hues[turn]].to(torch.int64)
            images = images.index_copy(0, rows, ops.hue_turned(images[rows], columns["hue"][rows]))
            begin = drawn.hues[turn]
    return images


def _policy_turns(config: AugmentConfig, key: NDArray[np.uint64], size: int) -> list[RandTurn]:
    if config.trivial:
        return [draw_trivial(_uniform(key, "trivial", 3), size)]
    if config.auto:
        return list(draw_auto(_uniform(key, "auto", 5), config.auto_policy, size))
    style, turns = RAND_STYLES[config.rand_style], config.rand_ops
    chances = _uniform(key, style.stream, style.draws * turns).reshape(len(key), turns, style.draws).swapaxes(0, 1)
    return [draw_turn(config.rand_style, c, config.rand_magnitude, config.rand_std, height=size) for c in chances]


def _uniform(key: NDArray[np.uint64], purpose: str, count: int) -> NDArray[np.float64]:
    """[batch, count] in [0, 1): the same for a purpose whatever else is drawn."""
    return uniform(seed_of(purpose), key[:, None], np.arange(count))


def _named(what: str, box: tuple[NDArray[np.float64], ...]) -> dict[str, NDArray[np.float64]]:
    return {f"{what}_{side}": values for side, values in zip(_BOX, box, strict=True)}
