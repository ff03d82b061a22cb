"""Policies: random operations on an image, by the libraries that define them.

The same words mean different things. RandAugment(2, 9) is, by torchvision's definition: two of 14 operations, each
certain to come, at level 9 of 30, nearest neighbour, black where the image has left. By timm's (`rand-m9-mstd0.5-inc1`,
what DeiT and its successors trained with): two of 15 operations, among them Invert and SolarizeAdd, each coming with
probability 1/2, at a level of 10 drawn from N(9, 0.5), interpolated as the crop is, the mean colour where the image has
left. By big_vision's: two of 16, with Cutout, each certain to come, at level 9 of 10, nearest neighbour, grey where the
image has left, and with the quirks that `vitrail/data/device_big_vision.py` lists. A recipe says which by `rand_style`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from PIL import Image, ImageOps
from torchvision.transforms import v2

from vitrail.data.config import AugmentConfig, Interpolation, PreprocessConfig
from vitrail.data.preprocess import RESAMPLING

RAND_MAGNITUDES = 31  # of torchvision's styles: 0 to 30

Policy = Callable[[Image.Image], Image.Image]


def policy_of(config: AugmentConfig, preprocess: PreprocessConfig) -> Policy | None:
    """The policy of a configuration, drawn from torch's generator, on RGB images; picklable."""
    if config.rand_ops and config.rand_style == "timm":
        return TimmRandAugment(config.rand_ops, config.rand_magnitude, config.rand_std, preprocess)
    if config.rand_ops and config.rand_style == "big_vision":
        from vitrail.data.device_big_vision import BigVisionRandAugment  # which stands on this file

        return BigVisionRandAugment(config.rand_ops, config.rand_magnitude)
    if config.rand_ops:
        return v2.RandAugment(config.rand_ops, config.rand_magnitude, RAND_MAGNITUDES)
    if config.trivial:
        return v2.TrivialAugmentWide(RAND_MAGNITUDES)
    return v2.AutoAugment(v2.AutoAugmentPolicy(config.auto_policy)) if config.auto else None


def fill_colour(preprocess: PreprocessConfig) -> tuple[int, ...]:
    """What timm's style fills with, in bytes."""
    return tuple(min(255, round(255 * channel)) for channel in preprocess.mean)


def affine_interpolation(preprocess: PreprocessConfig) -> Interpolation:
    """How timm's style moves pixels: as they are resized, but for Lanczos, which Pillow's affine maps do not have."""
    return "bicubic" if preprocess.interpolation == "lanczos" else preprocess.interpolation


def posterised(image: Image.Image, bits: int, **_: object) -> Image.Image:
    """timm's Posterize for any number of bits: at its largest level it keeps none, which recent Pillows refuse."""
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
