"""Batched augmentation: Pillow's pixels for the same parameters, torchvision's distribution, a function of the key."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from scipy import stats
from timm.data import auto_augment
from timm.data.auto_augment import LEVEL_TO_ARG, NAME_TO_OP
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from vitrail.data.augment.device_augment import DeviceAugment, draw
from vitrail.data.augment.pixel_ops import hue_turned, normal_noise
from vitrail.data.augment.policies import (
    ALL,
    OPERATIONS,
    RAND_STYLES,
    RandTurn,
    Rendering,
    draw_auto,
    draw_trivial,
    draw_turn,
    rand_augmented,
)
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.preprocess import RESAMPLING

TIMM_OPERATIONS, TIMM_DRAWS = RAND_STYLES["timm"].operations, RAND_STYLES["timm"].draws
PLAIN = {"crop": "evaluation", "flip": 0.0}
EVERYTHING = AugmentConfig(flip=0.5, three=True, rand_ops=2, jitter=0.4, hue=0.1, jitter_chance=0.8, erasing=0.5)


def keys_of(count: int, seed: int = 7) -> np.ndarray:
    keys = np.zeros((count, 5), np.int64)
    keys[:, 0], keys[:, 2] = seed, np.arange(count)
    return keys


def noise(count: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def smooth(count: int, height: int, width: int) -> np.ndarray:
    coarse = [
        Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC) for pixels in noise(count, 4, 5)
    ]
    return np.stack([np.array(image) for image in coarse])


def tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def changed(pixels: np.ndarray, size: int, interpolation: str = "bicubic", **settings) -> tuple[np.ndarray, dict]:
    """What comes out, channels last, and the parameters it was made with."""
    config = AugmentConfig(**settings)
    keys = keys_of(len(pixels))
    made = DeviceAugment(config, PreprocessConfig(size=size, interpolation=interpolation))(tensor(pixels), keys)
    assert (made.shape, made.dtype) == ((len(pixels), 3, size, size), torch.uint8)
    columns = draw(config, size, keys, *pixels.shape[1:3]).columns
    return made.permute(0, 2, 3, 1).numpy(), columns


def apart(made: np.ndarray, expected: list[Image.Image]) -> np.ndarray:
    return np.abs(made.astype(int) - np.stack([np.array(image) for image in expected]))


def fused() -> bool:
    """Whether Pillow was built to multiply and add with one rounding, as compilers for ARM do."""
    first, second = np.meshgrid(np.arange(256), np.arange(256))
    made = Image.blend(*(Image.fromarray(x.astype(np.uint8)) for x in (first, second)), 0.73)
    plain = np.trunc(first.astype(np.float32) + np.float32(0.73) * (second - first).astype(np.float32))
    return bool((np.asarray(made) != plain).any())


FUSED = fused()


def same(wrong: np.ndarray, operations: int = 1) -> bool:
    """To the last level; with a fused Pillow few pixels may be one off after each operation."""
    return bool(np.max(wrong) <= operations * FUSED and np.mean(np.asarray(wrong) > 0) <= 0.01 * FUSED)


def crops(pixels: np.ndarray, drawn: dict) -> list[Image.Image]:
    boxes = np.stack([drawn[f"crop_{side}"] for side in ("left", "top", "width", "height")], 1).astype(int)
    pairs = zip(pixels, boxes, strict=True)
    return [Image.fromarray(image).crop((x, y, x + w, y + h)) for image, (x, y, w, h) in pairs]


# pixels for given parameters


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", [16, 32, 64])
def test_a_resized_crop_has_the_pixels_of_pillow_going_along_rows_first(interpolation, size):
    pixels = noise(40, 40, 48)
    made, drawn = changed(pixels, size, interpolation, flip=0.0)
    how = RESAMPLING[interpolation]
    difference = apart(made, [c.resize((size, c.height), how).resize((size, size), how) for c in crops(pixels, drawn)])
    assert difference.max() <= 1
    # Weights are ratios of small numbers, so about one value in a hundred is a half, which fixed point moves off it.
    assert (difference > 0).mean() < 0.02


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_resized_crop_of_a_smooth_image_is_within_a_grey_level_of_pillow_in_any_order(interpolation):
    pixels = smooth(40, 40, 48)
    made, drawn = changed(pixels, 32, interpolation, flip=0.0)
    assert apart(made, [c.resize((32, 32), RESAMPLING[interpolation]) for c in crops(pixels, drawn)]).max() <= 1


@pytest.mark.parametrize("crop", ["simple", "pad"])
def test_a_window_of_the_reflected_image_is_exact(crop):
    pixels = noise(50, 16, 21)
    made, drawn = changed(pixels, 16, crop=crop, padding=3, flip=0.0)
    for image, window, top, left in zip(pixels, made, drawn["crop_top"], drawn["crop_left"], strict=True):
        padded = np.pad(image, ((3, 3), (3, 3), (0, 0)), mode="reflect")
        i, j = int(top) + 3, int(left) + 3
        np.testing.assert_array_equal(window, padded[i : i + 16, j : j + 16])


def test_a_window_along_x_has_the_middle_rows():
    _, drawn = changed(noise(50, 20, 16), 16, crop="simple", padding=3, flip=0.0, crop_along="x")
    assert set(drawn["crop_top"]) == {2}
    assert set(drawn["crop_left"]) == set(range(-3, 4))


def test_mirroring_is_exact():
    pixels = noise(50, 16, 16)
    made, drawn = changed(pixels, 16, crop="evaluation")
    assert 0 < drawn["flip"].sum() < 50
    np.testing.assert_array_equal(made, np.where(drawn["flip"][:, None, None, None], pixels[:, :, ::-1], pixels))


@pytest.mark.parametrize(
    ("settings", "oracle"),
    [
        ({"grey": 1.0}, lambda image: tv.to_grayscale(image, num_output_channels=3)),
        ({"solarise": 1.0}, lambda image: tv.solarize(image, 128)),
        ({"grey": 1.0, "solarise": 1.0}, lambda image: ImageOps.solarize(image.convert("L")).convert("RGB")),
    ],
)
def test_grey_and_solarise_are_exact(settings, oracle):
    pixels = noise(20, 32, 32)
    made, _ = changed(pixels, 32, **PLAIN, **settings)
    assert apart(made, [oracle(Image.fromarray(image)) for image in pixels]).max() == 0


def test_every_grey_equals_pillows_over_a_grid_of_colours():
    levels = np.arange(0, 256, 5, dtype=np.uint8)
    colours = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(1, 52 * 4, 52 * 13, 3)
    colours = colours[:, :208, :208]
    made, _ = changed(colours, 208, **PLAIN, grey=1.0)
    assert apart(made, [Image.fromarray(colours[0]).convert("L").convert("RGB")]).max() == 0


@pytest.mark.parametrize(("size", "count"), [(32, 60), (224, 12), (448, 6)])
def test_blur_has_the_pixels_of_pillows_gaussian_at_every_size(size, count):
    pixels = noise(count, size, size)
    made, drawn = changed(pixels, size, **PLAIN, blur=1.0)
    pairs = zip(pixels, drawn["blur_sigma"].tolist(), strict=True)
    difference = apart(made, [Image.fromarray(image).filter(ImageFilter.GaussianBlur(sigma)) for image, sigma in pairs])
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3


def test_jitter_has_the_pixels_of_torchvision_on_pillow_images_in_the_drawn_order():
    pixels = noise(60, 20, 20)
    made, drawn = changed(pixels, 20, **PLAIN, jitter=0.6)
    operations = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation)
    expected = []
    for i, image in enumerate(pixels):
        expected.append(Image.fromarray(image))
        for turn in range(3):
            factor = float(drawn[f"factor_{turn}"][i])
            expected[-1] = operations[drawn[f"jitter_{turn}"][i]](expected[-1], factor)
    difference = apart(made, expected)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3


def test_hues_have_the_pixels_of_torchvision_on_pillow_images_in_the_drawn_order():
    pixels = noise(200, 20, 20)
    made, drawn = changed(pixels, 20, **PLAIN, jitter=0.4, hue=0.3, jitter_chance=0.7)
    operations = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation)
    hues = draw(AugmentConfig(**PLAIN, jitter=0.4, hue=0.3, jitter_chance=0.7), 20, keys_of(200), 20, 20).hues
    jittered = set(drawn["hue_rows"][: hues[-1]].tolist())
    assert 0 < hues[0] < hues[1] < hues[2] < hues[3] < 200
    expected, hued_last = [], 0
    for i, image in enumerate(pixels):
        expected.append(Image.fromarray(image))
        for turn in range(4 if i in jittered else 0):
            kind, factor = int(drawn[f"jitter_{turn}"][i]), float(drawn[f"factor_{turn}"][i])
            if kind == 3:  # half a byte beyond, which torchvision cuts away again
                shift = float(drawn["hue"][i])
                expected[-1] = tv.adjust_hue(expected[-1], (shift + np.sign(shift) * 0.5) / 255)
            else:
                expected[-1] = operations[kind](expected[-1], factor)
            hued_last += kind == 3 == turn
    difference = apart(made, expected)
    untouched = np.array([i not in jittered for i in range(200)])
    np.testing.assert_array_equal(made[untouched], pixels[untouched])
    assert (difference > 1).mean() < 1e-3  # a level that is off before a hue is cut to bytes can turn it by one
    assert (difference > 0).mean() < 2e-3
    assert hued_last > 10


@pytest.mark.parametrize("shift", [-128, -25, -1, 0, 1, 60, 127])
def test_all_colours_turn_as_in_pillow(shift):
    values = np.arange(0, 256, 5, dtype=np.uint8)
    pixels = np.stack(np.meshgrid(values, values, values, indexing="ij"), -1).reshape(1, -1, len(values), 3)
    hue, saturation, value = Image.fromarray(pixels[0]).convert("HSV").split()
    moved = Image.fromarray(((np.asarray(hue).astype(int) + shift) % 256).astype(np.uint8))
    expected = np.asarray(Image.merge("HSV", (moved, saturation, value)).convert("RGB")).astype(int)
    made = hue_turned(tensor(pixels).float(), torch.tensor([float(shift)]))[0].permute(1, 2, 0).numpy()
    difference = np.abs(made - expected)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-4


def test_without_a_chance_nothing_is_jittered():
    pixels = noise(20, 16, 16)
    made, _ = changed(pixels, 16, **PLAIN, jitter=0.5, hue=0.5, jitter_chance=0.0)
    np.testing.assert_array_equal(made, pixels)


@pytest.mark.parametrize("three", [False, True])
def test_strong_views_jitter_first_and_then_grey_blur_and_solarise_while_three_augment_jitters_last(three):
    """The order of SimCLR's, MoCo v2's and BYOL's code, and of DeiT III's, composed of torchvision's functions."""
    pixels = noise(40, 64, 64)
    chances = {"three": True} if three else {"grey": 0.5, "blur": 0.5, "solarise": 0.5}
    made, drawn = changed(pixels, 64, **PLAIN, jitter=0.4, **chances)
    blurs = draw(AugmentConfig(**PLAIN, jitter=0.4, **chances), 64, keys_of(40), 64, 64).blurs
    blurry = set(drawn["blur_rows"][:blurs].tolist())
    operations = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation)
    expected = []
    for i, array in enumerate(pixels):
        jitter = [(operations[drawn[f"jitter_{turn}"][i]], float(drawn[f"factor_{turn}"][i])) for turn in range(3)]
        image = Image.fromarray(array)
        for function, factor in () if three else jitter:
            image = function(image, factor)
        image = tv.rgb_to_grayscale(image, 3) if drawn["grey"][i] else image
        image = image.filter(ImageFilter.GaussianBlur(float(drawn["blur_sigma"][i]))) if i in blurry else image
        image = tv.solarize(image, 128) if drawn["solarise"][i] else image
        for function, factor in jitter if three else ():
            image = function(image, factor)
        expected.append(image)
    # A level that is off before another operation can grow, or fall on the other side of where solarising begins.
    assert (apart(made, expected) > 0).mean() < 2e-3


def test_erasing_changes_the_drawn_rectangle_and_nothing_else_and_noise_is_standard_normal():
    config = AugmentConfig(**PLAIN, erasing=0.5)
    preprocess = PreprocessConfig(size=32, mean=(0.5, 0.5, 0.5), std=(0.1, 0.1, 0.1))
    made = DeviceAugment(config, preprocess)(torch.zeros(200, 3, 32, 32, dtype=torch.uint8), keys_of(200)).numpy()
    drawn = draw(config, 32, keys_of(200), 32, 32)
    erased = set(drawn.columns["erase_rows"][: drawn.erasures].tolist())
    values = []
    for row, image in enumerate(made):
        expected = np.zeros((32, 32), bool)
        if row in erased:
            top, left, tall, wide = (int(drawn.columns[f"erase_{s}"][row]) for s in ("top", "left", "height", "width"))
            expected[top : top + tall, left : left + wide] = True
        np.testing.assert_array_equal((image != 0).all(0), expected)
        np.testing.assert_array_equal((image != 0).any(0), expected)
        values.append((image[:, expected] / 255 - 0.5) / 0.1)
    noise = np.concatenate([v.ravel() for v in values])
    assert abs(noise.mean()) < 4 / len(noise) ** 0.5
    assert abs(noise.std() - 1) < 4 / (2 * len(noise)) ** 0.5


def test_noise_is_standard_normal_and_uncorrelated_between_neighbours_channels_and_seeds():
    drawn = normal_noise(torch.arange(64), 3, 16, 16).double()
    assert stats.kstest(drawn.flatten().numpy(), "norm").pvalue > 1e-4
    for one, other in (
        (drawn[..., 1:], drawn[..., :-1]),
        (drawn[:, 1:], drawn[:, :-1]),
        (drawn[1:], drawn[:-1]),
    ):
        assert abs(float((one * other).mean())) < 4 / one.numel() ** 0.5


def torchvisions(image: Image.Image, name: str, positive: bool, magnitude: int, kind=v2.RandAugment) -> Image.Image:
    """One operation of a policy of torchvision on a Pillow image."""
    theirs, bins = kind(), 10 if kind is v2.AutoAugment else 31
    levels, signed = theirs._AUGMENTATION_SPACE[name]
    level = levels(bins, image.height, image.width)
    level = 0.0 if level is None else float(level[magnitude])
    level = -level if signed and not positive else level
    nearest = v2.InterpolationMode.NEAREST
    return theirs._apply_image_or_video_transform(image, name, level, interpolation=nearest, fill=theirs._fill)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("size", [16, 33])
def test_every_operation_of_randaugment_has_the_pixels_of_torchvision_on_pillow_images(name, size):
    pixels = noise(8, size, size)
    pixels[::2] = pixels[::2] // 3 + 40  # narrower ranges, for what stretches them
    pixels[1] = smooth(1, size, size)[0]
    pixels[3, ..., 1] = 77  # a channel of one value
    chances = np.stack([np.full(8, (OPERATIONS.index(name) + 0.5) / 14), [0.2, 0.2, 0.2, 0.2, 0.8, 0.8, 0.8, 0.8]], 1)
    for magnitude in (0, 5, 9, 14, 30):
        drawn = draw_turn("torchvision", chances, magnitude, height=size)
        columns = {key: torch.from_numpy(np.asarray(v, np.float32)) for key, v in drawn.columns.items()}
        made = rand_augmented(tensor(pixels).float(), RandTurn(columns, drawn.bounds))
        made = made.permute(0, 2, 3, 1).numpy()
        pairs = zip(pixels, chances[:, 1] > 0.5, strict=True)
        assert same(apart(made, [torchvisions(Image.fromarray(p), name, up, magnitude) for p, up in pairs]))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("size", [16, 33])
def test_every_operation_of_trivialaugment_has_the_pixels_of_torchvision_on_pillow_images(name, size):
    levels = np.repeat(np.arange(31), 2)
    chances = np.stack(
        [np.full(62, (OPERATIONS.index(name) + 0.5) / 14), np.arange(62) % 2 * 0.6 + 0.2, levels / 31], 1
    )
    chances[:, 2] += 0.5 / 31
    pixels = noise(62, size, size)
    drawn = draw_trivial(chances, size)
    columns = {key: torch.from_numpy(np.asarray(v, np.float32)) for key, v in drawn.columns.items()}
    made = rand_augmented(tensor(pixels).float(), RandTurn(columns, drawn.bounds)).permute(0, 2, 3, 1).numpy()
    triples = zip(pixels, chances[:, 1] > 0.5, levels.tolist(), strict=True)
    wide = v2.TrivialAugmentWide
    expected = [torchvisions(Image.fromarray(p), name, bool(up), level, wide) for p, up, level in triples]
    assert same(apart(made, expected))


@pytest.mark.parametrize("policy", ["imagenet", "cifar10", "svhn"])
def test_autoaugment_is_the_listed_pairs_with_torchvisions_pixels(policy):
    """Each of the 25 pairs with its first, second, both or neither operation, in both signs."""
    pairs = v2.AutoAugment(v2.AutoAugmentPolicy(policy))._policies
    cases = [(pair, first, second, up) for pair in range(25) for first in (0, 1) for second in (0, 1) for up in (0, 1)]
    # A chance of 0 comes whatever the probability (0.0 included: torchvision draws `<=`), one above 1 never does.
    chances = np.array(
        [[(p + 0.5) / 25, 2.0 - 2 * a, 2.0 - 2 * b, 0.2 + 0.6 * u, 0.8 - 0.6 * u] for p, a, b, u in cases]
    )
    pixels = noise(len(cases), 20, 20)
    images = tensor(pixels).float()
    for turn in draw_auto(chances, policy, 20):
        columns = {key: torch.from_numpy(np.asarray(v, np.float32)) for key, v in turn.columns.items()}
        images = rand_augmented(images, RandTurn(columns, turn.bounds))
    expected = []
    for image, (pair, *comes, up) in zip(pixels, cases, strict=True):
        expected.append(Image.fromarray(image))
        for (name, _, level), does, positive in zip(pairs[pair], comes, (up, not up), strict=True):
            if does:
                expected[-1] = torchvisions(expected[-1], name, bool(positive), level or 0, v2.AutoAugment)
    assert same(apart(images.permute(0, 2, 3, 1).numpy(), expected), 2)


def test_randaugment_in_a_batch_is_its_operations_one_after_the_other():
    pixels = noise(64, 16, 16)
    made, drawn = changed(pixels, 16, **PLAIN, rand_ops=2, rand_magnitude=9)
    expected = []
    for i, image in enumerate(pixels):
        expected.append(Image.fromarray(image))
        for turn in range(2):
            name, up = OPERATIONS[drawn[f"rand_{turn}_operation"][i]], drawn[f"rand_{turn}_factor"][i] > 1
            expected[-1] = torchvisions(expected[-1], name, bool(up), 9)
    assert same(apart(made, expected), 2)


def timms(image: Image.Image, name: str, up: bool, level: float, how: Image.Resampling, monkeypatch) -> Image.Image:
    """One operation of timm's RandAugment on a Pillow image; the sign is the only thing it draws."""
    name = {"TranslateX": "TranslateXRel", "TranslateY": "TranslateYRel"}.get(name, name)
    name += "Increasing" * (f"{name}Increasing" in NAME_TO_OP)
    monkeypatch.setattr(auto_augment.random, "random", lambda: 0.1 if up else 0.9)
    arguments = LEVEL_TO_ARG[name](level, {}) if LEVEL_TO_ARG[name] else ()
    monkeypatch.undo()
    if name.startswith("Posterize") and arguments == (0,):
        return Image.new("RGB", image.size)  # what Pillow gave until it refused to keep no bits
    return NAME_TO_OP[name](image, *arguments, fillcolor=FILL, resample=how)


SMOOTH = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
FILL = (124, 116, 104)


@pytest.mark.parametrize(
    ("name", "interpolation"),
    [(n, "bicubic") for n in TIMM_OPERATIONS] + [(n, how) for n in SMOOTH for how in ("bilinear", "nearest")],
)
def test_every_operation_of_timms_style_has_the_pixels_of_timm_on_pillow_images(name, interpolation, monkeypatch):
    pixels = np.concatenate([noise(8, 33, 33), smooth(4, 33, 33)])
    chances = np.full((12, TIMM_DRAWS), 0.25)
    chances[:, 0] = (TIMM_OPERATIONS.index(name) + 0.5) / 15
    chances[:, 2], chances[:, 3] = 1 - np.exp(-0.5), 0.0  # one standard deviation above the magnitude
    chances[:, 4] = [0.2, 0.8] * 6
    how = Rendering(torch.tensor(FILL, dtype=torch.float32), interpolation)
    wrong = []
    for magnitude in range(10):
        # No round number, which would put the edge of the image on the middle of a pixel: that may fall to either side.
        level = magnitude + 0.1234567
        drawn = draw_turn("timm", chances, magnitude, 0.1234567, height=33)
        columns = {key: torch.from_numpy(np.asarray(v, np.float32)) for key, v in drawn.columns.items()}
        made = rand_augmented(tensor(pixels).float(), RandTurn(columns, drawn.bounds), how).permute(0, 2, 3, 1).numpy()
        pairs = zip(pixels, chances[:, 4] <= 0.5, strict=True)
        resample = RESAMPLING[interpolation]
        expected = [timms(Image.fromarray(p), name, bool(up), level, resample, monkeypatch) for p, up in pairs]
        wrong.append(apart(made, expected))
    if name not in SMOOTH:
        assert same(wrong)
    elif interpolation == "nearest":
        # Pillow's coordinates are off by up to 33 * 2^-16 pixels here on each axis, and so many change sides.
        assert np.mean(np.max(wrong, -1) > 0) < 2 * 33 * 2**-16
    else:  # float32 may cut what is nearly whole a grey level lower
        assert np.max(wrong) <= 1
        assert np.mean(np.array(wrong) > 0) < 2e-3


def test_timms_style_in_a_batch_has_timms_draws():
    """Operations equally often, half of them coming, magnitudes normal and cut at 10, signs even."""
    drawn = draw(AugmentConfig(rand_ops=2, rand_style="timm", rand_std=0.5), 100, keys_of(20000), 100, 100).columns
    for turn in range(2):
        seen = np.bincount(drawn[f"rand_{turn}_operation"], minlength=len(ALL))
        wanted = np.array([10000 * (name == "Identity") + 10000 / 15 * (name in TIMM_OPERATIONS) for name in ALL])
        assert stats.chisquare(seen[wanted > 0], wanted[wanted > 0]).pvalue > 1e-4
        assert seen.sum() == seen[wanted > 0].sum()
    shift = drawn["rand_0_cx"][drawn["rand_0_operation"] == ALL.index("TranslateX")] / 45 * 10
    assert stats.binomtest(int((shift > 0).sum()), len(shift)).pvalue > 1e-4
    level = np.abs(shift)
    assert level.max() <= 10
    below = level[level < 10]  # P(N(9, 0.5) < 10) is 0.977
    assert stats.binomtest(len(below), len(level), stats.norm.cdf(2)).pvalue > 1e-4
    assert stats.kstest(below, stats.truncnorm(-np.inf, 2, 9, 0.5).cdf).pvalue > 1e-4


def test_timms_style_is_one_graph_when_compiled():
    config = AugmentConfig(rand_ops=2, rand_style="timm", rand_std=0.5)
    pixels, keys = tensor(noise(16, 20, 20)), keys_of(16)
    augment = DeviceAugment(config, PreprocessConfig(size=16))
    drawn = draw(config, 16, keys, 20, 20).to(pixels.device)
    compiled = torch.compile(augment.apply, backend="eager", fullgraph=True)
    assert torch.equal(compiled(pixels, drawn), augment(pixels, keys))


# distributions


def test_operations_signs_and_levels_of_trivialaugment_are_independent_and_equally_frequent():
    drawn = draw(AugmentConfig(trivial=True), 16, keys_of(20000), 16, 16).columns
    level = np.rint(np.abs(drawn["rand_0_factor"] - 1) / 0.99 * 30).astype(int)
    assert stats.chisquare(np.bincount(drawn["rand_0_operation"] * 31 + level, minlength=14 * 31)).pvalue > 1e-4
    up = (drawn["rand_0_factor"] > 1)[level > 0]
    assert stats.binomtest(int(up.sum()), len(up)).pvalue > 1e-4


def test_operations_of_autoaugment_are_as_frequent_as_torchvisions_list_says():
    drawn = draw(AugmentConfig(auto=True), 16, keys_of(20000), 16, 16).columns
    pairs = v2.AutoAugment()._policies
    for turn in range(2):
        share = dict.fromkeys((*OPERATIONS, "Invert"), 0.0)
        for pair in pairs:
            name, probability, _ = pair[turn]
            share[name] += probability / 25
            share["Identity"] += (1 - probability) / 25
        seen = np.bincount(drawn[f"rand_{turn}_operation"], minlength=15)
        wanted = np.array(list(share.values()))
        assert (seen[wanted == 0] == 0).all()
        assert stats.chisquare(seen[wanted > 0], 20000 * wanted[wanted > 0]).pvalue > 1e-4


def test_operations_and_signs_of_randaugment_are_independent_and_equally_frequent():
    drawn = draw(AugmentConfig(rand_ops=2), 16, keys_of(5000), 16, 16).columns
    both = drawn["rand_0_operation"] * 14 + drawn["rand_1_operation"]
    assert stats.chisquare(np.bincount(both, minlength=196)).pvalue > 1e-4
    signed = 2 * drawn["rand_0_operation"] + (drawn["rand_0_factor"] > 1)
    assert stats.chisquare(np.bincount(signed, minlength=28)).pvalue > 1e-4
    assert set(OPERATIONS) == set(v2.RandAugment._AUGMENTATION_SPACE)


def test_boxes_of_a_resized_crop_are_distributed_as_torchvisions():
    count, height, width = 1500, 40, 56
    config = AugmentConfig(scale=(0.2, 1.0), ratio=(0.5, 2.0))
    drawn = draw(config, 32, keys_of(count), height, width).columns
    torch.manual_seed(0)
    theirs = v2.RandomResizedCrop(32, scale=(0.2, 1.0), ratio=(0.5, 2.0))
    boxes = [theirs.make_params([torch.empty(3, height, width)]) for _ in range(count)]
    for side in ("top", "left", "height", "width"):
        assert stats.ks_2samp(drawn[f"crop_{side}"], [box[side] for box in boxes]).pvalue > 1e-4
    ours = np.log(drawn["crop_width"] / drawn["crop_height"])
    assert stats.ks_2samp(ours, [np.log(box["width"] / box["height"]) for box in boxes]).pvalue > 1e-4
    assert (drawn["crop_top"] + drawn["crop_height"] <= height).all()
    assert (drawn["crop_left"] + drawn["crop_width"] <= width).all()


@pytest.mark.parametrize(("height", "width"), [(10, 60), (60, 10), (20, 22)])
def test_where_no_box_fits_the_centre_is_taken_as_by_torchvision(height, width):
    settings = {"scale": (3.9, 4.0), "ratio": (3 / 4, 4 / 3)}  # more than the image: every try fails
    drawn = draw(AugmentConfig(**settings), 8, keys_of(3), height, width).columns
    box = v2.RandomResizedCrop(8, **settings).make_params([torch.empty(3, height, width)])
    for side in ("top", "left", "height", "width"):
        assert drawn[f"crop_{side}"].tolist() == [box[side]] * 3


def test_erased_rectangles_are_distributed_as_torchvisions():
    drawn = draw(AugmentConfig(erasing=1.0), 32, keys_of(1500), 32, 32)
    torch.manual_seed(0)
    theirs = v2.RandomErasing(value="random")
    boxes = [theirs.make_params([torch.empty(3, 32, 32)]) for _ in range(1500)]
    rows = drawn.columns["erase_rows"][: drawn.erasures]
    for side, name in (("top", "i"), ("left", "j"), ("height", "h"), ("width", "w")):
        found = [box[name] for box in boxes if box["v"] is not None]
        assert stats.ks_2samp(drawn.columns[f"erase_{side}"][rows], found).pvalue > 1e-4


def test_choices_come_as_often_as_they_should():
    count = 6000
    config = AugmentConfig(crop="pad", padding=4, flip=0.3, jitter=0.4, erasing=0.25, grey=0.2, solarise=0.1, blur=0.5)
    drawn = draw(config, 16, keys_of(count), 16, 16)
    columns = drawn.columns
    for name, probability in (("flip", 0.3), ("grey", 0.2), ("solarise", 0.1)):
        assert stats.binomtest(int(columns[name].sum()), count, probability).pvalue > 1e-4
    assert stats.binomtest(drawn.blurs, count, 0.5).pvalue > 1e-4
    assert stats.binomtest(drawn.erasures, count, 0.25).pvalue > 1e-4
    for axis in ("crop_top", "crop_left"):
        assert stats.chisquare(np.bincount((columns[axis] + 4).astype(int), minlength=9)).pvalue > 1e-4
    order = columns["jitter_0"] * 9 + columns["jitter_1"] * 3 + columns["jitter_2"]
    assert stats.chisquare(np.unique(order, return_counts=True)[1]).pvalue > 1e-4
    assert len(np.unique(order)) == 6
    for turn in range(3):
        assert stats.kstest(columns[f"factor_{turn}"], "uniform", (0.6, 0.8)).pvalue > 1e-4
    at_224 = columns["blur_sigma"] * 224 / 16
    assert stats.kstest(at_224, "uniform", (0.1, 1.9)).pvalue > 1e-4


def test_hues_are_jittered_as_often_and_as_far_as_they_should_be_at_any_place_of_the_order():
    count = 6000
    config = AugmentConfig(jitter=0.4, hue=0.1, jitter_chance=0.8)
    drawn = draw(config, 16, keys_of(count), 16, 16)
    columns, chosen = drawn.columns, drawn.columns["hue_rows"][: drawn.hues[-1]]
    assert stats.binomtest(drawn.hues[-1], count, 0.8).pvalue > 1e-4
    orders = np.stack([columns[f"jitter_{turn}"] for turn in range(4)], 1)[chosen]
    assert (np.sort(orders, 1) == np.arange(4)).all()
    kinds, counts = np.unique(orders @ np.array([64, 16, 4, 1]), return_counts=True)
    assert len(kinds) == 24
    assert stats.chisquare(counts).pvalue > 1e-4
    begin = 0
    for turn, end in enumerate(drawn.hues):
        assert (columns[f"jitter_{turn}"][columns["hue_rows"][begin:end]] == 3).all()
        begin = end
    torch.manual_seed(0)
    theirs = v2.ColorJitter(0.4, 0.4, 0.4, 0.1)
    factors = np.array([theirs.make_params([])["hue_factor"] for _ in range(1500)])
    assert stats.ks_2samp(columns["hue"], np.trunc(255 * factors)).pvalue > 1e-4
    factors = np.concatenate([columns[f"factor_{turn}"][chosen] for turn in range(4)])
    assert stats.kstest(factors[factors != 1], "uniform", (0.6, 0.8)).pvalue > 1e-4
    rest = columns["hue_rows"][drawn.hues[-1] :]
    assert all((columns[f"factor_{turn}"][rest] == 1).all() for turn in range(4))


def test_jitter_without_hue_draws_what_it_drew_before_there_was_one():
    plain, more = (draw(AugmentConfig(jitter=0.4, hue=hue), 16, keys_of(50), 16, 16).columns for hue in (0.0, 0.2))
    for kind in range(3):
        of = [next(c[f"factor_{t}"][i] for t in range(4) if c[f"jitter_{t}"][i] == kind)
              for c in (plain, more) for i in range(50)]  # fmt: skip
        np.testing.assert_array_equal(of[:50], of[50:])


def test_three_augment_is_exactly_one_of_the_three_each_as_often():
    drawn = draw(AugmentConfig(three=True), 16, keys_of(3000), 16, 16)
    blurs = np.zeros(3000, bool)
    blurs[drawn.columns["blur_rows"][: drawn.blurs]] = True
    kinds = np.stack([drawn.columns["grey"], drawn.columns["solarise"], blurs])
    np.testing.assert_array_equal(kinds.sum(0), 1)
    assert stats.chisquare(kinds.sum(1)).pvalue > 1e-4


# a function of the key


def test_an_image_depends_on_its_key_and_not_on_the_batch_it_is_in():
    pixels, keys = tensor(noise(24, 20, 20)), keys_of(24)
    augment = DeviceAugment(EVERYTHING, PreprocessConfig(size=16))
    whole = augment(pixels, keys)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(augment(pixels[order], keys[order.numpy()]), whole[order])
    for part in (slice(0, 1), slice(3, 8)):
        assert torch.equal(augment(pixels[part], keys[part]), whole[part])


@pytest.mark.parametrize("part", range(5))
def test_every_part_of_the_key_changes_the_draws(part):
    keys = keys_of(8)
    other = keys.copy()
    other[:, part] += 100
    pixels = tensor(noise(1, 20, 20)).expand(8, -1, -1, -1)
    augment = DeviceAugment(EVERYTHING, PreprocessConfig(size=16))
    assert not (augment(pixels, keys) == augment(pixels, other)).all((1, 2, 3)).any()


def test_draws_of_one_operation_do_not_depend_on_the_others():
    alone = draw(AugmentConfig(flip=0.5), 16, keys_of(100), 20, 20).columns
    together = draw(EVERYTHING, 16, keys_of(100), 20, 20).columns
    for name in alone:
        np.testing.assert_array_equal(alone[name], together[name])


def test_what_is_given_stays_as_it_was():
    pixels, keys = tensor(noise(8, 16, 16)), keys_of(8)
    before, state = pixels.clone(), torch.default_generator.get_state()
    for crop in ("resized", "pad", "evaluation"):
        config = AugmentConfig(crop=crop, three=True, jitter=0.4, erasing=1.0)
        DeviceAugment(config, PreprocessConfig(size=16))(pixels, keys)
    assert torch.equal(pixels, before)
    assert torch.equal(torch.default_generator.get_state(), state)


@pytest.mark.slow  # styles of RandAugment are compiled in the quick set
def test_it_is_one_graph_when_compiled():
    pixels, keys = tensor(noise(8, 20, 20)), keys_of(8)
    augment = DeviceAugment(EVERYTHING, PreprocessConfig(size=16))
    drawn = draw(EVERYTHING, 16, keys, 20, 20).to(pixels.device)
    compiled = torch.compile(augment.apply, backend="eager", fullgraph=True)
    assert torch.equal(compiled(pixels, drawn), augment(pixels, keys))


# errors


@pytest.mark.parametrize(
    ("crop", "shape", "message"),
    [("evaluation", (3, 20, 16), "preprocessed to 16 x 16"), ("pad", (3, 20, 20), "shorter side of 16"),
     ("resized", (1, 16, 16), "uint8")],
)  # fmt: skip
def test_images_that_do_not_fit_are_refused(crop, shape, message):
    augment = DeviceAugment(AugmentConfig(crop=crop), PreprocessConfig(size=16))
    with pytest.raises(ValueError, match=message):
        augment(torch.zeros(2, *shape, dtype=torch.uint8), keys_of(2))


def test_keys_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"keys must be \[2, 5\]"):
        DeviceAugment(AugmentConfig(), PreprocessConfig(size=16))(
            torch.zeros(2, 3, 16, 16, dtype=torch.uint8), keys_of(3)
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize(
    "config",
    [
        EVERYTHING,
        AugmentConfig(rand_ops=2, rand_style="timm", rand_std=0.5),
        AugmentConfig(trivial=True),
        AugmentConfig(auto=True),
    ],
)
def test_an_accelerator_gives_the_same_pixels_but_for_roundings(config):
    pixels, keys = tensor(noise(64, 20, 20)), keys_of(64)
    augment = DeviceAugment(config, PreprocessConfig(size=16))
    difference = (augment(pixels.cuda(), keys).cpu().int() - augment(pixels, keys).int()).abs()
    assert (difference > 0).double().mean() < 1e-2
