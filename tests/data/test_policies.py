"""Policies are those of torchvision and timm, as functions of the key."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image
from processes import server
from scipy import stats
from timm.data import create_transform
from timm.data.auto_augment import LEVEL_TO_ARG, NAME_TO_OP
from torchvision.transforms import v2

from vitrail.config import RunConfig, from_mapping
from vitrail.data.augment.host import Augment, TimmRandAugment, policy_of, posterised
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.schema import ConfigError

SMALL = PreprocessConfig(size=24, crop_ratio=1.0)
PLAIN = {"crop": "evaluation", "flip": 0.0}
STYLES = {
    "timm": AugmentConfig(**PLAIN, rand_ops=2, rand_style="timm", rand_std=0.5),
    "torchvision": AugmentConfig(**PLAIN, rand_ops=2),
    "big_vision": AugmentConfig(**PLAIN, rand_ops=2, rand_style="big_vision", rand_magnitude=2),
    "trivial": AugmentConfig(**PLAIN, trivial=True),
    "auto": AugmentConfig(**PLAIN, auto=True, auto_policy="cifar10"),
}
KEYS = [(7, epoch, index, view, repeat) for epoch in (0, 1) for index in (3, 4) for view in (0, 1) for repeat in (0, 1)]


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8))


def pixels_of_keys(style: str, keys: list[tuple[int, ...]]) -> list[np.ndarray]:
    augment = Augment(STYLES[style], SMALL)
    return [augment(picture(), key).numpy() for key in keys]


def pixels_of_styles(keys: list[tuple[int, ...]]) -> dict[str, list[np.ndarray]]:
    return {style: pixels_of_keys(style, keys) for style in STYLES}


def test_the_same_key_gives_the_same_pixels_in_another_process_and_in_another_order():
    elsewhere = server().submit(pixels_of_styles, KEYS[::-1]).result()
    for style in STYLES:
        here = pixels_of_keys(style, KEYS)
        for mine, other in zip(here, elsewhere[style][::-1], strict=True):
            np.testing.assert_array_equal(mine, other)
        assert len({made.tobytes() for made in here}) > 1


def fail_after_drawing(image: Image.Image) -> Image.Image:
    raise OSError(random.random())


def test_no_generator_of_the_process_is_touched_even_by_a_failure():
    def states():
        return random.getstate(), torch.default_generator.get_state().tolist(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = states()
    pixels_of_keys("timm", KEYS[:4])
    assert states() == before
    policy = policy_of(STYLES["timm"], SMALL)
    policy.operations = [fail_after_drawing]
    with pytest.raises(OSError, match="0"), torch.random.fork_rng(devices=[]):
        policy(picture())
    assert states() == before


def test_timms_style_has_timms_operations_and_settings():
    """Those that timm itself makes of DeiT's policy."""
    theirs = create_transform(
        24, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic", mean=SMALL.mean
    ).transforms[2]
    ours = TimmRandAugment(2, 9, 0.5, SMALL)
    assert ours.count == theirs.num_layers
    assert len(ours.operations) == len(theirs.ops) == 15
    for mine, other in zip(ours.operations, theirs.ops, strict=True):
        changed = {"aug_fn": posterised} if mine.name == "PosterizeIncreasing" else {}
        assert vars(mine) == vars(other) | changed


@pytest.mark.parametrize("bits", range(9))
def test_posterize_keeps_the_highest_bits_down_to_none(bits):
    kept = np.array(picture()) >> (8 - bits) << (8 - bits)
    np.testing.assert_array_equal(np.array(posterised(picture(), bits)), kept)


@pytest.mark.parametrize("number", range(15))
def test_one_draw_is_one_operation_of_timm_at_the_level_drawn(number):
    """The operation by timm's tables of functions, with the draws that Python's generator gives from the same seed."""
    policy = TimmRandAugment(1, 9, 0.5, SMALL)
    operation = policy.operations[number]
    policy.operations = [operation]
    changed = 0
    for key in range(12):
        torch_seed = 100 * number + key
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed)
            made = policy(picture())
            torch.manual_seed(torch_seed)
            _, seed = torch.randint(1 << 62, (2,)).tolist()
        mine = random.Random(seed)
        expected = picture()
        if mine.random() <= 0.5:
            level = max(0.0, min(10.0, mine.gauss(9, 0.5)))
            state = random.getstate()
            random.setstate(mine.getstate())
            to_arguments = LEVEL_TO_ARG[operation.name]
            arguments = to_arguments(level, {"translate_pct": 0.45}) if to_arguments else ()
            random.setstate(state)
            fill = tuple(round(255 * channel) for channel in SMALL.mean)
            expected = NAME_TO_OP[operation.name](
                expected, *arguments, fillcolor=fill, resample=Image.Resampling.BICUBIC
            )
            changed += 1
        np.testing.assert_array_equal(np.array(made), np.array(expected))
    assert 0 < changed < 12


def test_timms_operations_are_drawn_equally_often_and_come_half_the_time():
    policy = TimmRandAugment(2, 9, 0.5, SMALL)
    seen: list[int] = []
    policy.operations = [_Noted(number, seen) for number in range(15)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(3000):
            policy(picture())
    assert stats.chisquare(np.bincount(seen, minlength=15)).pvalue > 1e-4
    both = np.array(seen).reshape(-1, 2)
    assert stats.chisquare(np.bincount(both @ [15, 1], minlength=225)).pvalue > 1e-4
    assert {operation.prob for operation in TimmRandAugment(2, 9, 0.5, SMALL).operations} == {0.5}


class _Noted:
    def __init__(self, number: int, seen: list[int]) -> None:
        self.number, self.seen = number, seen

    def __call__(self, image: Image.Image) -> Image.Image:
        self.seen.append(self.number)
        return image


@pytest.mark.parametrize(
    ("style", "theirs"),
    [("trivial", v2.TrivialAugmentWide()), ("auto", v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10))],
)
def test_trivial_and_auto_are_torchvisions_in_distribution(style, theirs):
    """The pictures that come out, each as often: 14 * 31 * 2 or fewer kinds of them, told by their bytes."""
    augment = Augment(STYLES[style], SMALL)
    ours = [augment(picture(), (0, 0, k)).permute(1, 2, 0).numpy().astype(float).mean() for k in range(1500)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        others = [np.array(theirs(picture())).astype(float).mean() for _ in range(1500)]
    assert stats.ks_2samp(ours, others).pvalue > 1e-4


def test_the_two_styles_differ_where_an_image_has_left():
    """At these magnitudes the corner is left often: black in torchvision's style, the mean colour in timm's."""
    mean = [round(255 * channel) for channel in SMALL.mean]
    white = Image.new("RGB", (24, 24), (255, 255, 255))

    def corners(style: str) -> set[tuple[int, ...]]:
        policy = policy_of(STYLES[style], SMALL)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return {policy(white).getpixel(corner) for _ in range(300) for corner in ((0, 0), (23, 23), (0, 23))}

    assert (0, 0, 0) in corners("torchvision")
    assert tuple(mean) not in corners("torchvision")
    assert tuple(mean) in corners("timm")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rand_ops": 2, "trivial": True}, "data.augment.trivial: it excludes rand_ops"),
        ({"trivial": True, "auto": True}, "data.augment.auto: it excludes trivial"),
        ({"rand_ops": 2, "rand_style": "timm", "rand_magnitude": 11}, "above 10"),
        ({"rand_ops": 2, "rand_std": 0.5}, "set rand_style timm"),
        ({"rand_ops": 2, "rand_style": "big_vision", "rand_magnitude": 11}, "above 10, the most of big_vision's"),
        ({"rand_ops": 2, "rand_style": "big_vision", "rand_std": 0.5}, "set rand_style timm"),
        ({"rand_style": "other"}, "not one of torchvision, timm, big_vision"),
    ],
)
def test_settings_that_exclude_one_another_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping({"data": {"augment": values}}, RunConfig())
