"""Augmentation is a pure function of the image and its key."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from processes import server
from scipy import stats
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from vitrail.data.augment.host import Augment, reflected
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.counter import seed_of
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess

SMALL = PreprocessConfig(size=16, crop_ratio=1.0)
EVERYTHING = AugmentConfig(rand_ops=2, jitter=0.3, erasing=0.5)
KEYS = [(7, epoch, index, view, 0) for epoch in range(2) for index in range(3) for view in range(2)]


def picture(width: int = 16, height: int = 16) -> Image.Image:
    pixels = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def channels_first(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def pixels_of_keys(keys: list[tuple[int, ...]]) -> list[np.ndarray]:
    augment = Augment(EVERYTHING, SMALL)
    return [augment(picture(30, 20), key).numpy() for key in keys]


def test_the_same_key_gives_the_same_pixels_in_another_process_and_in_another_order():
    here = pixels_of_keys(KEYS)
    there = server().submit(pixels_of_keys, KEYS[::-1]).result()
    for mine, other in zip(here, there[::-1], strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("part", range(5))
def test_every_part_of_the_key_changes_the_draws(part):
    key = [3, 1, 4, 1, 5]
    other = list(key)
    other[part] += 1
    first, second = pixels_of_keys([tuple(key), tuple(other)])
    assert not np.array_equal(first, second)


def fail_after_drawing(image: Image.Image) -> Image.Image:
    raise OSError(float(torch.rand(())))


def test_the_random_state_of_the_process_is_untouched_even_by_a_failure():
    before = torch.default_generator.get_state()
    pixels_of_keys(KEYS[:2])
    assert torch.equal(torch.default_generator.get_state(), before)
    augment = Augment(EVERYTHING, SMALL)
    augment._resized_crop = fail_after_drawing
    with pytest.raises(OSError, match="0"):
        augment(picture(), KEYS[0])
    assert torch.equal(torch.default_generator.get_state(), before)


def test_every_crop_gives_bytes_of_the_wanted_size():
    for crop in ("resized", "simple", "pad", "evaluation"):
        for shape in ((16, 16), (30, 20), (9, 40)):
            made = Augment(AugmentConfig(crop=crop, rand_ops=1), SMALL)(picture(*shape), (0,))
            assert (made.shape, made.dtype) == ((3, 16, 16), torch.uint8)


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_the_evaluation_crop_alone_is_the_evaluation_preprocessing_mirrored_or_not(flip):
    made = Augment(AugmentConfig(crop="evaluation", flip=flip), SMALL)(picture(30, 20), (0,))
    expected = Preprocess(SMALL)(picture(30, 20))
    assert torch.equal(made, expected.flip(-1) if flip else expected)


def test_flips_come_with_their_probability():
    augment = Augment(AugmentConfig(crop="evaluation", flip=0.3), SMALL)
    plain = Preprocess(SMALL)(picture())
    flipped = sum(not torch.equal(augment(picture(), (0, 0, i)), plain) for i in range(1000))
    assert abs(flipped - 300) < 4 * (1000 * 0.3 * 0.7) ** 0.5


@pytest.mark.parametrize("shape", [(16, 16), (22, 16), (16, 22)])
def test_a_padded_crop_is_a_window_of_the_reflected_image_and_all_windows_occur(shape):
    augment = Augment(AugmentConfig(crop="pad", padding=2, flip=0.0), SMALL)
    image = picture(*shape)
    padded = torch.nn.functional.pad(channels_first(image).float()[None], (2, 2, 2, 2), mode="reflect")[0].byte()
    windows = {
        padded[:, i : i + 16, j : j + 16].contiguous().numpy().tobytes(): (i, j)
        for i in range(padded.shape[1] - 15)
        for j in range(padded.shape[2] - 15)
    }
    seen = {windows[augment(image, (0, 0, k)).numpy().tobytes()] for k in range(12 * len(windows))}
    assert seen == set(windows.values())


def test_a_crop_along_x_keeps_the_middle_rows_and_moves_sideways():
    augment = Augment(AugmentConfig(crop="pad", padding=2, flip=0.0, crop_along="x"), SMALL)
    image = picture(22, 16)  # three rows above and below, or five columns to move over
    padded = torch.nn.functional.pad(channels_first(image).float()[None], (2, 2, 2, 2), mode="reflect")[0].byte()
    middle = 2 + (padded.shape[1] - 4 - 16) // 2
    rows = padded[:, middle : middle + 16]
    windows = {rows[:, :, j : j + 16].contiguous().numpy().tobytes(): j for j in range(padded.shape[2] - 15)}
    seen = {windows[augment(image, (0, 0, k)).numpy().tobytes()] for k in range(12 * len(windows))}
    assert seen == set(windows.values())


def test_a_padded_crop_first_resizes_the_shorter_side():
    augment = Augment(AugmentConfig(crop="pad", padding=0, flip=0.0), SMALL)
    assert torch.equal(augment(picture(40, 40), (0,)), channels_first(picture(40, 40).resize((16, 16), 3)))


@pytest.mark.parametrize("length", [2, 5, 16])
def test_reflection_equals_that_of_numpy(length):
    padding = length - 1
    expected = np.pad(np.arange(length), padding, mode="reflect")
    np.testing.assert_array_equal(reflected(-padding, length + 2 * padding, length), expected)


def test_a_resized_crop_of_the_whole_image_is_torchvisions_resize():
    augment = Augment(AugmentConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0), SMALL)
    image = picture(40, 40)
    expected = tv.resize(image, [16, 16], interpolation=tv.InterpolationMode.BICUBIC)
    assert torch.equal(augment(image, (0,)), channels_first(expected))


def test_resized_crops_are_distributed_as_torchvisions():
    """On a picture whose red is the column and green the row: means and spreads tell place and size of the box."""
    row, column = np.mgrid[0:48, 0:64].astype(np.uint8)
    image = Image.fromarray(np.stack([4 * column, 5 * row, 0 * row], -1))
    augment = Augment(AugmentConfig(flip=0.0), SMALL)
    theirs = v2.RandomResizedCrop(16, interpolation=v2.InterpolationMode.BICUBIC)
    ours = np.stack([augment(image, (0, 0, k)).numpy() for k in range(1500)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        others = np.stack([channels_first(theirs(image)).numpy() for _ in range(1500)])
    for channel in (0, 1):
        for summary in (np.mean, np.std):
            one, other = (summary(made[:, channel].astype(float), axis=(1, 2)) for made in (ours, others))
            assert stats.ks_2samp(one, other).pvalue > 1e-4


def test_a_border_wider_than_the_image_is_refused():
    with pytest.raises(ValueError, match="at most 15"):
        Augment(AugmentConfig(crop="pad", padding=16), SMALL)


def test_erasing_fills_one_rectangle_with_standard_normal_noise():
    # A mean of 0.5 and a small deviation keep the noise inside the byte range, so that its moments can be read back.
    config = PreprocessConfig(size=64, crop_ratio=1.0, mean=(0.5, 0.5, 0.5), std=(0.1, 0.1, 0.1))
    augment = Augment(AugmentConfig(crop="evaluation", flip=0.0, erasing=1.0), config)
    blank = Image.new("RGB", (64, 64), (0, 0, 0))
    values = []
    for index in range(20):
        image = augment(blank, (0, 0, index))
        erased = (image != 0).all(0)
        rows, columns = erased.any(1).nonzero().flatten(), erased.any(0).nonzero().flatten()
        box = image[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert bool((box != 0).all())
        assert int(erased.sum()) == box[0].numel()
        assert 0.015 < box[0].numel() / 64**2 < 0.35
        values.append(Preprocess(config).normalize(box).flatten())
    noise = torch.cat(values)
    assert abs(float(noise.mean())) < 4 / len(noise) ** 0.5
    assert abs(float(noise.std()) - 1) < 4 / (2 * len(noise)) ** 0.5


def test_erasing_comes_with_its_probability():
    augment = Augment(AugmentConfig(crop="evaluation", flip=0.0, erasing=0.25), SMALL)
    plain = Preprocess(SMALL)(picture())
    erased = sum(not torch.equal(augment(picture(), (0, 0, i)), plain) for i in range(1000))
    assert abs(erased - 250) < 4 * (1000 * 0.25 * 0.75) ** 0.5


def test_a_simple_crop_is_a_window_of_the_reflected_image_with_its_shorter_side_at_the_size():
    augment = Augment(AugmentConfig(crop="simple", padding=4, flip=0.0), SMALL)
    image = picture(33, 24)  # 22 x 16 once resized
    small = tv.resize(image, [16], interpolation=tv.InterpolationMode.BICUBIC)
    padded = np.pad(np.array(small), ((4, 4), (4, 4), (0, 0)), mode="reflect").transpose(2, 0, 1)
    windows = {
        padded[:, i : i + 16, j : j + 16].tobytes(): (i, j)
        for i in range(padded.shape[1] - 15)
        for j in range(padded.shape[2] - 15)
    }
    seen = [windows[augment(image, (0, 0, k)).numpy().tobytes()] for k in range(3000)]
    rows, columns = (np.bincount(axis, minlength=n) for axis, n in zip(zip(*seen, strict=True), (9, 15), strict=True))
    assert stats.chisquare(rows).pvalue > 1e-4
    assert stats.chisquare(columns).pvalue > 1e-4


def test_a_simple_crop_covers_more_of_an_image_than_a_resized_one():
    """Covered area: 0.75 against 0.43 of a picture of 500 x 375, on average."""
    row, column = np.mgrid[0:375, 0:500]
    image = Image.fromarray(np.stack([column * 255 // 499, row * 255 // 374, 0 * row], -1).astype(np.uint8))

    def covered(crop: str) -> float:
        augment = Augment(AugmentConfig(crop=crop, flip=0.0), PreprocessConfig(size=224))
        made = np.stack([augment(image, (0, 0, k)).numpy()[:2] for k in range(200)]).astype(float)
        return float(np.ptp(made.reshape(200, 2, -1), axis=-1).prod(1).mean() / 255**2)

    assert covered("simple") == pytest.approx(0.75, abs=0.015)  # the reflected border takes a hundredth
    assert covered("resized") == pytest.approx(0.43, abs=0.05)  # three standard errors of 200 crops


def test_hue_and_the_chance_of_jitter_reach_the_pixels():
    colours = np.zeros((32, 32, 3), np.uint8)
    colours[:16, :, 0], colours[16:, :, 1] = 200, 120
    image = Image.fromarray(colours)
    augment = Augment(AugmentConfig(crop="evaluation", flip=0.0, hue=0.1, jitter_chance=0.3), SMALL)
    made = [augment(image, (0, 0, i, 0, 0)) for i in range(400)]
    plain = Augment(AugmentConfig(crop="evaluation", flip=0.0), SMALL)(image, (0, 0, 0, 0, 0))
    changed = [m for m in made if not torch.equal(m, plain)]
    assert stats.binomtest(len(changed), 400, 0.3).pvalue > 1e-4
    for each in changed:  # brightness, the most of the three, stays
        torch.testing.assert_close(each.amax(0).float(), plain.amax(0).float(), rtol=0, atol=1)


def jitter_by(image: Image.Image, params: dict) -> Image.Image:
    """Colour jitter in torchvision's functions, with the parameters that its transform drew."""
    functions = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
    factors = [params[f"{name}_factor"] for name in ("brightness", "contrast", "saturation", "hue")]
    for kind in params["fn_idx"].tolist():
        if factors[kind] is not None:
            image = functions[kind](image, factors[kind])
    return image


@pytest.mark.parametrize("three", [False, True])
def test_strong_views_jitter_first_and_then_grey_blur_and_solarise_while_three_augment_jitters_last(three, monkeypatch):
    """The order of SimCLR's, MoCo v2's and BYOL's code, and of DeiT III's, composed of torchvision's functions."""
    drawn, sigmas = [], []
    make_params, blur = v2.ColorJitter.make_params, ImageFilter.GaussianBlur

    def remember_params(self, inputs):
        drawn.append(make_params(self, inputs))
        return drawn[-1]

    def remember_sigma(sigma: float) -> ImageFilter.GaussianBlur:
        sigmas.append(sigma)
        return blur(sigma)

    monkeypatch.setattr(v2.ColorJitter, "make_params", remember_params)
    monkeypatch.setattr(ImageFilter, "GaussianBlur", remember_sigma)
    chances = {"three": True} if three else {"grey": 0.5, "blur": 1.0, "solarise": 1.0}
    settings = PreprocessConfig(size=64, crop_ratio=1.0)
    augment = Augment(AugmentConfig(crop="evaluation", flip=0.0, jitter=0.4, hue=0.1, **chances), settings)
    image, seen = picture(64, 64), set()
    for k in range(30):
        made = augment(image, (0, 0, k))
        looks = [
            lambda image: tv.rgb_to_grayscale(image, 3),
            lambda image: image.filter(blur(sigmas[-1])),
            lambda image: tv.solarize(image, 128),
        ]
        expected = {}
        for kinds in ((0,), (1,), (2,)) if three else ((0, 1, 2), (1, 2)):
            view = image if three else jitter_by(image, drawn[-1])
            for kind in kinds:
                view = looks[kind](view)
            expected[kinds] = channels_first(jitter_by(view, drawn[-1]) if three else view)
        matching = [kinds for kinds, pixels in expected.items() if torch.equal(pixels, made)]
        assert len(matching) == 1
        seen.add(matching[0])
    assert len(seen) == len(expected)


def looks_of(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """Grey and solarised by other code than that under test."""
    grey = tv.to_grayscale(image, num_output_channels=3)
    return np.array(grey), np.array(tv.solarize(image, 128))


def test_three_augment_is_exactly_one_of_grey_solarise_and_blur_each_as_often():
    augment = Augment(AugmentConfig(crop="evaluation", flip=0.0, three=True), SMALL)
    image = picture()
    plain, (grey, solarised) = np.array(image), looks_of(image)
    counts = [0, 0, 0]
    for k in range(900):
        made = augment(image, (0, 0, k)).permute(1, 2, 0).numpy()
        kinds = [np.array_equal(made, grey), np.array_equal(made, solarised)]
        kinds.append(not any(kinds))
        counts[kinds.index(True)] += 1
        if kinds[2] and not np.array_equal(made, plain):  # a radius near 0.1 leaves bytes as they are
            assert made.astype(float).std() < plain.astype(float).std()
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("look", ["grey", "solarise"])
def test_grey_and_solarise_come_with_their_probabilities_and_with_torchvisions_pixels(look):
    augment = Augment(AugmentConfig(crop="pad", padding=0, flip=0.0, **{look: 0.3}), SMALL)
    image = picture()
    changed = looks_of(image)[look == "solarise"]
    count = 0
    for k in range(1000):
        made = augment(image, (0, 0, k)).permute(1, 2, 0).numpy()
        count += np.array_equal(made, changed)
        assert np.array_equal(made, changed) or np.array_equal(made, np.array(image))
    assert abs(count - 300) < 4 * (1000 * 0.3 * 0.7) ** 0.5


@pytest.mark.parametrize("size", [32, 224, 448])
def test_blur_is_pillows_with_a_sigma_of_a_tenth_to_two_pixels_at_224_and_in_proportion_elsewhere(size, monkeypatch):
    sigmas = []
    original = ImageFilter.GaussianBlur

    def remembered(sigma: float) -> ImageFilter.GaussianBlur:
        sigmas.append(sigma)
        return original(sigma)

    monkeypatch.setattr(ImageFilter, "GaussianBlur", remembered)
    settings = PreprocessConfig(size=size, crop_ratio=1.0)
    augment = Augment(AugmentConfig(crop="evaluation", flip=0.0, blur=1.0), settings)
    for k in range(60):
        made = augment(picture(size, size), (0, 0, k))
        assert torch.equal(made, channels_first(picture(size, size).filter(original(sigmas[-1]))))
    at_224 = np.array(sigmas) * 224 / size
    assert stats.kstest(at_224, "uniform", (0.1, 1.9)).pvalue > 1e-4


def gradient_energy(pixels: np.ndarray) -> float:
    pixels = pixels.astype(float)
    return float((np.diff(pixels, axis=-1) ** 2).sum() + (np.diff(pixels, axis=-2) ** 2).sum())


def test_blur_keeps_most_of_the_edges_of_a_small_photograph():
    images = open_data("embedded:fashion")["train"]
    settings = PreprocessConfig(size=32, crop_ratio=1.0)
    plain = Augment(AugmentConfig(crop="evaluation", flip=0.0), settings)
    blur = Augment(AugmentConfig(crop="evaluation", flip=0.0, blur=1.0), settings)
    kept = []
    for k in range(60):
        image = images.read(k)
        kept.append(gradient_energy(blur(image, (0, 0, k)).numpy()) / gradient_energy(plain(image, (0, 0, k)).numpy()))
    assert np.median(kept) > 0.95  # with 0.1 to 2 pixels it is below a half


def test_three_augment_and_separate_probabilities_exclude_one_another():
    with pytest.raises(ValueError, match="three"):
        Augment(AugmentConfig(three=True, blur=0.5), SMALL)


def test_an_image_that_is_not_rgb_is_refused():
    with pytest.raises(ValueError, match="mode L"):
        Augment(AugmentConfig(), SMALL)(Image.new("L", (8, 8)), (0,))


def test_a_chain_from_zero_gives_the_published_outputs_of_splitmix64():
    # First outputs of the reference implementation for seed 0: state += golden, then the finaliser.
    golden = 0x9E3779B97F4A7C15
    outputs = [seed_of("", i * golden) for i in range(3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_seeds_of_neighbouring_keys_differ_in_about_half_of_their_bits():
    keys = [(s, e, i) for s in range(4) for e in range(4) for i in range(50)]
    changed = [bin(seed_of("augment", s, e, i) ^ seed_of("augment", s, e, i + 1)).count("1") for s, e, i in keys]
    assert abs(np.mean(changed) - 32) < 4 * 4 / len(changed) ** 0.5
    assert len({seed_of("augment", *key) for key in keys}) == len(keys)
