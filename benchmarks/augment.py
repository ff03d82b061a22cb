"""How fast one core augments decoded images: our `Augment` beside timm's `create_transform`, for DeiT's policy.

    python benchmarks/augment.py [--data imagenette] [--images 128] [--rounds 9] [--size 224]

Random resized crop (bicubic) to 224 pixels, mirror, RandAugment in timm's style (`rand-m9-mstd0.5-inc1`, the same
operations of timm on both sides), erasing with probability 1/4, on the same images, decoded beforehand. `--data` is
anything that `vitrail train --data` takes, also looked for in the folder that VITRAIL_DATA names; without it pictures
of 500 x 375 pixels are made up.

timm             float images, normalised, as its transform gives them without its prefetcher
vitrail          bytes, which is what leaves our workers: models normalise in their first kernel
vitrail, floats  the same, normalised on this core as well: what timm's transform gives

Rounds are interleaved and single-threaded, and what is timed is the processor's time in this process, so that other
work on the machine counts little. Figures are medians, ratios medians of the rounds' ratios, above 1 where ours is
faster. Most of the time is Pillow's, in the resize and in RandAugment's affine maps, and the same for all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from PIL import Image
from rounds import in_turns, where
from timm.data import create_transform

from vitrail.data.augment.host import Augment, posterised
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess

POLICY = "rand-m9-mstd0.5-inc1"
ERASING = 0.25
DEIT = AugmentConfig(rand_ops=2, rand_style="timm", rand_magnitude=9, rand_std=0.5, erasing=ERASING)


def made_up(count: int) -> list[Image.Image]:
    """Smooth pictures with noise on them, of the size of a photograph in ImageNet."""
    random = np.random.default_rng(0)
    pictures = []
    for _ in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375), 3)
        noise = random.integers(-20, 21, (375, 500, 3))
        pictures.append(Image.fromarray(np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8)))
    return pictures


def timms(config: PreprocessConfig) -> Callable[[Image.Image], torch.Tensor]:
    transform = create_transform(
        config.size,
        is_training=True,
        auto_augment=POLICY,
        interpolation=config.interpolation,
        mean=config.mean,
        std=config.std,
        re_prob=ERASING,
        re_mode="pixel",
    )
    for step in transform.transforms:
        for operation in getattr(step, "ops", ()):
            if operation.name.startswith("Posterize"):  # where Pillow refuses to keep no bits, timm's own would fail
                operation.aug_fn = posterised
    return transform  # type: ignore[no-any-return]


def over(images: list[Image.Image], change: Callable[[Image.Image, int], object]) -> Callable[[], None]:
    """A round; every round has draws of its own."""
    turn = iter(range(1 << 30))

    def once() -> None:
        epoch = next(turn)
        for number, image in enumerate(images):
            change(image, epoch * len(images) + number)

    return once


def read(uri: str, count: int) -> Iterator[Image.Image]:
    train = open_data(uri)["train"]
    for row in np.random.default_rng(0).permutation(len(train))[:count].tolist():
        image = train.read(row)
        image.load()
        yield image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", type=int, default=224)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # as in a worker: the cores belong to the workers
    cpu = torch.device("cpu")
    config = PreprocessConfig(size=asked.size)
    images = made_up(asked.images) if asked.data is None else list(read(asked.data, asked.images))
    augment, preprocess, theirs = Augment(DEIT, config), Preprocess(config), timms(config)
    ways = {
        "timm": over(images, lambda image, _: theirs(image)),
        "vitrail": over(images, lambda image, number: augment(image, (0, 0, number, 0, 0))),
        "vitrail, floats": over(
            images, lambda image, number: preprocess.normalize(augment(image, (0, 0, number, 0, 0)))
        ),
    }
    timed = in_turns(ways, cpu, asked.rounds, clock=time.process_time)
    width, height = np.median([image.size for image in images], axis=0).astype(int)
    print(f"{where(cpu)}, {len(images)} images of {width} x {height} (median) to {asked.size}, {asked.rounds} rounds")
    print(f"{'':<16} {'img/s a core':>12} {'x timm':>7} {'quartiles':>14}")
    for name in ways:
        middle, low, high = timed.ratio("timm", name)
        print(f"{name:<16} {len(images) / timed.median(name):>12.0f} {middle:>7.2f} {low:>6.2f} .. {high:.2f}")


if __name__ == "__main__":
    main()
