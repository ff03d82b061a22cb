"""Settings of data and augmentation. No torch here: `vitrail --help` must be quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from vitrail.schema import Count, Fraction, NotNegative, Pixels, Positive, Range, Whole

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]


@dataclass(frozen=True)
class AugmentConfig:
    """How a training image is changed. Every random draw is a function of (seed, epoch, image index, view)."""

    crop: Literal["resized", "simple", "pad", "evaluation"] = "resized"
    """`resized`: random resized crop; `simple`: resize the shorter side, reflect-pad, crop (DeiT III); `pad`: the same
    for images that already have the size; `evaluation`: as for evaluation."""
    scale: tuple[Fraction, Fraction] = (0.08, 1.0)
    """Share of the image's area that a random resized crop covers."""
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    """Aspect ratios of a random resized crop."""
    padding: Whole = 4
    """Pixels of reflected border before a `simple` or `pad` crop."""
    crop_along: Literal["both", "x"] = "both"
    """`simple` and `pad`: where the crop may lie, anywhere, or along the x-axis alone (as DeiT III words it)."""
    flip: Fraction = 0.5
    """Probability of a horizontal flip."""
    jitter: NotNegative = 0.0
    """Strength of brightness, contrast and saturation jitter."""
    hue: Annotated[float, Range(0, 0.5)] = 0.0
    """Strength of hue jitter: the most that colours turn, of a whole circle."""
    jitter_chance: Fraction = 1.0
    """Probability of jitter, hue included."""
    three: bool = False
    """3-Augment: exactly one of grey, solarise and blur for each image (DeiT III, Touvron et al. 2022, sec. 3)."""
    grey: Fraction = 0.0
    """Probability of greyscale."""
    solarise: Fraction = 0.0
    """Probability of inverting bytes of 128 and more."""
    blur: Fraction = 0.0
    """Probability of a Gaussian blur, of sigma 0.1 to 2 pixels at 224 and in proportion at other sizes."""
    rand_ops: Whole = 0
    """RandAugment: operations per image (0: off)."""
    rand_magnitude: Annotated[int, Range(0, 30)] = 9
    """RandAugment: magnitude, of 30 in torchvision's style and of 10 in timm's and big_vision's."""
    rand_style: Literal["torchvision", "timm", "big_vision"] = "torchvision"
    """Whose RandAugment: they differ in operations, magnitudes and fill (see vitrail/data/augment/policies.py). timm's
    is its increasing form, `rand-m9-mstd0.5-inc1`, as DeiT was trained with; big_vision's is for images of 224."""
    rand_std: NotNegative = 0.0
    """RandAugment, timm's style: standard deviation of the magnitude."""
    trivial: bool = False
    """TrivialAugment (Wide): one operation per image, at a magnitude drawn anew."""
    auto: bool = False
    """AutoAugment: two operations per image by a policy that was searched for, `auto_policy`."""
    auto_policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    """AutoAugment: the data that its policy was found on."""
    erasing: Fraction = 0.0
    """Probability of erasing one rectangle with noise."""
    mixup: NotNegative = 0.0
    """Beta parameter of mixup (0: off)."""
    cutmix: NotNegative = 0.0
    """Beta parameter of CutMix (0: off). With both, one of the two is drawn for each batch."""
    mix_switch: Fraction = 0.5
    """Probability of CutMix where both are on."""


def conflicts(augment: AugmentConfig, name: str = "data.augment") -> list[str]:
    """Settings of an augmentation that exclude one another, a sentence each; `name` is where they were made."""
    problems = []
    if augment.three and (augment.grey or augment.solarise or augment.blur):
        problems.append(f"{name}.three: it already draws grey, solarise or blur; leave their probabilities at 0")
    if augment.scale[0] > augment.scale[1]:
        problems.append(f"{name}.scale: the first value must not exceed the second")
    chosen = [policy for policy in ("rand_ops", "trivial", "auto") if getattr(augment, policy)]
    if len(chosen) > 1:
        problems.append(f"{name}.{chosen[1]}: it excludes {chosen[0]}; set one of rand_ops, trivial and auto")
    style = augment.rand_style
    if augment.rand_ops and style != "torchvision" and augment.rand_magnitude > 10:
        problems.append(f"{name}.rand_magnitude: {augment.rand_magnitude} is above 10, the most of {style}'s style")
    if augment.rand_ops and style != "timm" and augment.rand_std:
        problems.append(
            f"{name}.rand_std: {style}'s RandAugment has fixed magnitudes; set rand_style timm, or rand_std 0"
        )
    return problems


def check_possible(augment: AugmentConfig, size: int) -> None:
    """Raise `ValueError` where settings of an augmentation exclude one another or the size of the images."""
    if augment.crop in ("simple", "pad") and augment.padding >= size:
        raise ValueError(
            f"data.augment.padding: a border of {augment.padding} pixels cannot be reflected from an image of {size}; "
            f"use at most {size - 1}"
        )
    problems = conflicts(augment)
    if augment.rand_ops and augment.rand_style == "big_vision" and 10 * augment.rand_magnitude >= size:
        problems.append(
            f"data.augment.rand_style: big_vision's moves images by {10 * augment.rand_magnitude} pixels and these "
            f"have {size}; use torchvision or timm, or images of 224"
        )
    if problems:
        raise ValueError("; ".join(problems))


@dataclass(frozen=True)
class PreprocessConfig:
    """How an image becomes the model's input at evaluation and prediction. Travels with the model."""

    size: Pixels = 224
    """Side of the square input."""
    crop_ratio: Annotated[float, Range(0.1, 1)] = 0.875
    """Side of the centre crop over the shorter side after resizing."""
    resize: Literal["crop", "squash", "pad"] = "crop"
    """`crop`: resize the shorter side, then crop the centre; `squash`: ignore the aspect ratio; `pad`: letterbox."""
    interpolation: Interpolation = "bicubic"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Of each channel, as of the deviations below, after the division by `maximum`."""
    std: tuple[Positive, ...] = (0.229, 0.224, 0.225)
    maximum: Positive = 255.0
    """Pixel value that becomes 1: above 255, pixels have 16 bits."""
    reducing_gap: Annotated[float, Range(1, 8)] | None = None
    """Pillow's: images that are larger than they will be by twice this factor or more are first reduced by a whole
    factor, of JPEG files as they are decoded, so that this factor is left (none: all pixels are resized)."""


@dataclass(frozen=True)
class DataConfig:
    """Where images come from and how they are batched."""

    uri: str = "embedded:fashion"
    """Folder, packed folder, .csv, .parquet, .npz, .tar files, hf:OWNER/NAME, torchvision:NAME, embedded:fashion or
    synthetic:shapes[?n=...];
    texts: a folder of GLUE, text:TABLE or synthetic:grammar."""
    channels: Count = 3
    """Channels of an image. 3: every image becomes RGB of eight bits. Any other number: pages and samples of TIFF
    files, or the last axis of .npz arrays, are channels, in the depth that they have (uint8 or uint16)."""
    maximum: Positive | None = None
    """Pixel value that becomes 1 (none: 255 or 65535, by the depth): 4095 for twelve bits stored in sixteen. With 3
    channels it keeps 16 bits of colour."""
    batch: Count = 128
    """Images per optimiser step, over all processes and accumulation steps."""
    loader: Literal["auto", "host", "device", "jpeg"] = "auto"
    """`host`: decode and augment in worker processes; `device`: all images live on the device as bytes and are
    augmented there in batches; `jpeg`: decode and augment on the device, batch by batch; `auto`: device where they fit,
    else on CUDA the faster of jpeg and host. A run stores what it chose."""
    decode: Literal["auto", "once", "always"] = "auto"
    """Images of train and val from files: `once` keeps a copy in the cache folder, shrunk to what crops need, for this
    and later runs; `always` decodes them whenever they are read; `auto`: once where files hold four times the pixels or
    more. Of test images nothing is copied; the model then takes no more pixels of files than it needs (`reducing_gap`).
    A run stores what it chose."""
    workers: Whole | None = None
    """Processes that decode and augment (none: chosen from the machine)."""
    pad: Literal["longest", "length"] = "longest"
    """Texts: each batch is padded to its longest text, or all to the model's length (one shape, for compilation)."""
    sampling: Literal["shuffle", "balanced"] = "shuffle"
    """`balanced` draws every class equally often."""
    repeats: Count = 1
    """Repeated augmentation: times that a drawn image is in the batch, each time augmented anew; an epoch then shows
    1 / repeats of the images."""
    val_fraction: Fraction = 0.1
    """Share of train held out as val where the source has none."""
    test_fraction: Fraction = 0.1
    """Share held out as test where the source is one undivided tree."""
    split_seed: Whole = 0
    fold: str = ""
    """Cross-validation: I/K, such as 1/5, makes that of K stratified folds of train and val the new val."""
    judge: Literal["test", "val"] = "test"
    """Which images a run is evaluated on at the end: `val` while settings are being chosen; test then stays unseen."""
    level: str = ""
    """Level of a taxonomy that is the label, such as coarse (empty: the finest)."""
    shots: Count | None = None
    """Use so many training images of every class (few-shot)."""
    fraction: Annotated[float, Range(0, 1, above=True)] = 1.0
    """Use this share of the training images, at least one of every class."""
    long_tail: Annotated[float, Range(1)] | None = None
    """Use a long-tailed subset: the first class keeps this many times as many images as the last, exponentially."""
    label_noise: Fraction = 0.0
    """Share of the training labels replaced by another class, uniformly; val and test keep theirs."""
    limit: Count | None = None
    """Use at most this many training images, a stratified draw by `split_seed`."""
    check: Literal["full", "off"] = "full"
    """Decode and hash every image once before training (remembered between runs), or trust them: a resumed run then
    notices images that were replaced only by their sizes."""
    bad_limit: Fraction = 0.01
    """Largest share of unreadable images that a run accepts."""
    crop_ratio: Annotated[float, Range(0.1, 1)] | None = None
    """Test crop ratio (none: as the weights were trained, else 0.875, or 1 for images that are already small)."""
    resize: Literal["crop", "squash", "pad"] | None = None
    """How evaluation makes images square (none: crop)."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """How training images are changed; where an objective tells weak views from strong ones, the strong ones."""
    weak: AugmentConfig = field(default_factory=lambda: AugmentConfig(scale=(0.2, 1.0)))
    """How weak views are changed: a crop and a flip (MSF, arXiv 2105.07269). Mixing is as `augment` says."""
