"""Augmentation of one training image, as a pure function of the image and a key; views weak, strong and small.

Pixels stay in Pillow until the end: RandAugment and colour jitter of torchvision take about half the time there that
they take on tensors. Padding, cropping and mirroring are plain indexing, because for images of 28 pixels the transform
objects cost more than the work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torchvision.transforms import v2

from vitrail.data.augment.pixel_ops import BOX_DRAWS, SOLARISE_FROM, blur_range, crop_boxes, erasing_boxes
from vitrail.data.augment.policies import (
    RAND_MAGNITUDES,
    RAND_STYLES,
    RandTurn,
    affine_interpolation,
    draw_turn,
    fill_colour,
    rand_augmented,
    rendering,
)
from vitrail.data.batch import ViewSpec
from vitrail.data.config import AugmentConfig, PreprocessConfig, check_possible
from vitrail.data.counter import seed_of
from vitrail.data.preprocess import RESAMPLING, Preprocess, as_tensor, resized, shorter_side
from vitrail.data.stack import pixels_of, with_pixels

ImageOperation = Callable[[Image.Image], Image.Image]


def policy_of(config: AugmentConfig, preprocess: PreprocessConfig) -> ImageOperation | None:
    """The policy of a configuration, drawn from torch's generator, on RGB images; picklable."""
    if config.rand_ops and config.rand_style == "timm":
        return TimmRandAugment(config.rand_ops, config.rand_magnitude, config.rand_std, preprocess)
    if config.rand_ops and config.rand_style == "big_vision":
        return BigVisionRandAugment(config.rand_ops, config.rand_magnitude)
    if config.rand_ops:
        return v2.RandAugment(config.rand_ops, config.rand_magnitude, RAND_MAGNITUDES)
    if config.trivial:
        return v2.TrivialAugmentWide(RAND_MAGNITUDES)
    return v2.AutoAugment(v2.AutoAugmentPolicy(config.auto_policy)) if config.auto else None


def posterised(image: Image.Image, bits: int, **_: object) -> Image.Image:
    """timm's Posterize for any number of bits: at its largest level it keeps none, which recent Pillows reject."""
    return ImageOps.posterize(image, bits) if bits else Image.new(image.mode, image.size)


class TimmRandAugment:
    """timm's RandAugment in its increasing form, by timm's own operations.

    Those draw from Python's generator. It is lent, as torch's is by `Augment`, with a seed drawn from torch's.
    """

    def __init__(self, count: int, magnitude: int, std: float, preprocess: PreprocessConfig) -> None:
        from timm.data.auto_augment import rand_augment_transform

        settings = {  # as timm.data.create_transform sets them
            "translate_const": int(preprocess.size * 0.45),
            "img_mean": fill_colour(preprocess),
            "interpolation": RESAMPLING[affine_interpolation(preprocess)],
            "magnitude_std": std,
        }
        self.count = count
        self.operations = rand_augment_transform(f"rand-m{magnitude}-n{count}-inc1", settings).ops
        for operation in self.operations:
            if operation.name.startswith("Posterize"):
                operation.aug_fn = posterised

    def __call__(self, image: Image.Image) -> Image.Image:
        *which, seed = torch.randint(1 << 62, (self.count + 1,)).tolist()
        state = random.getstate()
        try:
            random.seed(seed)
            for number in which:
                image = self.operations[number % len(self.operations)](image)
        finally:
            random.setstate(state)
        return image


class BigVisionRandAugment:
    """big_vision's RandAugment on one image, drawn from torch's generator: the pixels are those of a batch."""

    def __init__(self, count: int, magnitude: int) -> None:
        self.count, self.magnitude = count, magnitude

    def __call__(self, image: Image.Image) -> Image.Image:
        chances = torch.rand(self.count, RAND_STYLES["big_vision"].draws, dtype=torch.float64).numpy()
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].to(torch.float32)
        how = rendering("big_vision", PreprocessConfig(), pixels.device)
        for drawn in chances:
            turn = draw_turn("big_vision", drawn[None], self.magnitude, height=image.height, width=image.width)
            columns = {name: torch.from_numpy(np.asarray(v, np.float32)) for name, v in turn.columns.items()}
            pixels = rand_augmented(pixels, RandTurn(columns, turn.bounds), how)
        return Image.fromarray(pixels[0].permute(1, 2, 0).to(torch.uint8).numpy())


class Augment:
    """Image and key -> tensor [channels, size, size] in the depth of the image, uint8 [3, size, size] of an RGB image.

    In this order: crop; one of grey, solarise and blur (`three`); RandAugment, TrivialAugment or AutoAugment; colour
    jitter; grey, blur and solarise, each with its own probability; mirror; erase. 3-Augment jitters last, as the code
    of DeiT III does; views for self-supervision jitter first, as the code of SimCLR, MoCo v2 and BYOL does.

    The key is (seed, epoch, index, view, repeat). The same key gives the same pixels in any process, in any order, and
    the caller's random state is as before. Mirroring comes after the colour and geometry operations, since those are
    symmetric in distribution and a mirrored view of an array costs nothing.

    `simple` and `pad` crops are one operation: both bring the shorter side to the size (which leaves alone what has it)
    and take a window of the reflected image, at random on both axes, as the code of DeiT III does for its
    Simple Random Crop (Touvron et al., 2022, arXiv 2204.07118). Erasing covers 2 to 33 % of the image with what is
    N(0, 1) after normalisation, as far as bytes can show it.
    """

    def __init__(self, config: AugmentConfig, preprocess: PreprocessConfig) -> None:
        self.config, self.preprocess = config, preprocess
        check_possible(config, preprocess.size)
        self._evaluation = Preprocess(preprocess)
        policy = policy_of(config, preprocess)
        self._image_operations: list[ImageOperation] = [] if policy is None else [policy]
        if config.jitter or config.hue:
            jitter = v2.ColorJitter(config.jitter, config.jitter, config.jitter, config.hue)
            certain = config.jitter_chance == 1  # without a draw, as in `_drawn_looks`
            self._image_operations.append(jitter if certain else v2.RandomApply([jitter], config.jitter_chance))
        self._mean, self._std = (torch.tensor(v).view(-1, 1, 1) for v in (preprocess.mean, preprocess.std))

    def __call__(self, image: Image.Image, key: tuple[int, ...]) -> Tensor:
        """Augment one image; raises `ValueError` unless it is RGB."""
        if image.mode != "RGB":
            raise ValueError(f"an image of mode {image.mode} cannot be augmented; convert it to RGB first")
        # torchvision draws from the process's generator. It is lent and given back; torch.manual_seed would also
        # seed (and in a worker initialise) the accelerator.
        generator = torch.default_generator
        state = generator.get_state()
        try:
            generator.manual_seed(seed_of("augment", *key))
            return self._augment(image)
        finally:
            generator.set_state(state)

    def _augment(self, image: Image.Image) -> Tensor:
        flip, top, left, erase = torch.rand(4).tolist()
        looks = self._drawn_looks()
        operations = [*looks, *self._image_operations] if self.config.three else [*self._image_operations, *looks]
        if self.config.crop in ("simple", "pad"):
            pixels = self._padded_crop(image, top, left)
            image = with_pixels(image, pixels) if operations else image
        else:
            image = self._resized_crop(image) if self.config.crop == "resized" else self._evaluation.square(image)
        for operation in operations:
            image = operation(image)
        if operations or self.config.crop in ("resized", "evaluation"):
            pixels = pixels_of(image)
        tensor = as_tensor(pixels[:, ::-1] if flip < self.config.flip else pixels)
        return self._erased(tensor) if erase < self.config.erasing else tensor

    def _drawn_looks(self) -> list[ImageOperation]:
        """Those of grey, blur and solarise that this image gets, in this order."""
        config = self.config
        if not (config.three or config.grey or config.solarise or config.blur):
            return []  # without a draw: what else is random stays as it is without these settings
        which, grey, solarise, blur, radius = torch.rand(5).tolist()
        low, high = blur_range(self.preprocess.size)
        gaussian = ImageFilter.GaussianBlur(low + (high - low) * radius)
        looks: list[ImageOperation] = [
            lambda image: image.convert("L").convert("RGB"),
            lambda image: ImageOps.solarize(image, SOLARISE_FROM),
            lambda image: image.filter(gaussian),
        ]
        if config.three:
            return [looks[int(3 * which)]]
        wanted = ((0, grey < config.grey), (2, blur < config.blur), (1, solarise < config.solarise))
        return [looks[kind] for kind, want in wanted if want]

    def _padded_crop(self, image: Image.Image, top: float, left: float) -> NDArray[Any]:
        """A window at the given shares of the room that a reflected border leaves it."""
        size, padding = self.preprocess.size, self.config.padding
        image = resized(image, shorter_side(*image.size, size), self.preprocess)
        width, height = image.size
        down = int(top * (height + 2 * padding - size + 1)) - padding
        rows = reflected(down if self.config.crop_along == "both" else (height - size) // 2, size, height)
        columns = reflected(int(left * (width + 2 * padding - size + 1)) - padding, size, width)
        return pixels_of(image)[rows][:, columns]

    def _resized_crop(self, image: Image.Image) -> Image.Image:
        """A random box of the image at the size: torchvision's, without its cost, which is a tenth of the work."""
        boxes = crop_boxes(self.config, _box_draws(), image.height, image.width)
        top, left, height, width = (int(side[0]) for side in boxes)
        size = self.preprocess.size
        return resized(image.crop((left, top, left + width, top + height)), (size, size), self.preprocess)

    def _erased(self, image: Tensor) -> Tensor:
        fits, boxes = erasing_boxes(_box_draws(), image.shape[-1])
        if fits[0]:  # not where ten tries gave no rectangle that fits
            i, j, h, w = (int(side[0]) for side in boxes)
            most = self.preprocess.maximum
            noise = torch.randn(len(image), h, w).mul_(self._std).add_(self._mean).mul_(most)
            image[:, i : i + h, j : j + w] = noise.round_().clamp_(0, most).to(image.dtype)
        return image


def _box_draws() -> NDArray[np.float64]:
    return torch.rand(1, BOX_DRAWS, dtype=torch.float64).numpy()


def reflected(start: int, count: int, length: int) -> NDArray[np.int64]:
    """Positions start .. start + count - 1 of a line of `length` pixels that is mirrored at both of its ends.

    >>> reflected(-2, 6, 3).tolist()
    [2, 1, 0, 1, 2, 1]
    """
    positions = np.abs(np.arange(start, start + count))
    folded: NDArray[np.int64] = (length - 1) - np.abs((length - 1) - positions)
    return folded


def view_augments(
    spec: ViewSpec, strong: AugmentConfig, weak: AugmentConfig, preprocess: PreprocessConfig
) -> list[Augment]:
    """An augmentation for each view; those of equal settings are one object.

    Raises `ValueError` where a view wants another share of the image than a crop of its kind can give.
    """
    augments: dict[tuple[AugmentConfig, PreprocessConfig], Augment] = {}
    views = []
    for view in spec.all():
        config = weak if view.weak else strong
        if view.scale is not None:
            if config.crop != "resized":
                name = "weak" if view.weak else "augment"
                raise ValueError(f"data.{name}.crop: views of several scales need resized crops, not {config.crop}")
            config = replace(config, scale=view.scale)
        settings = config, preprocess if view.size is None else replace(preprocess, size=view.size)
        if settings not in augments:
            augments[settings] = Augment(*settings)
        views.append(augments[settings])
    return views


def stored_alike(augments: Sequence[Augment]) -> bool:
    """Whether images stored once serve all of these: a resized crop takes any size, the other crops take their own."""
    crops = {augment.config.crop for augment in augments}
    sizes = {augment.preprocess.size for augment in augments}
    return len(crops) == 1 and (crops == {"resized"} or len(sizes) == 1)
