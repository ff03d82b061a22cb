"""Corruptions are what they are called, reproducible image by image, and stronger with severity."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.measure.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    as_input,
    as_pixels,
    brightness,
    contrast,
    corrupt,
    corruption_accuracy,
    fog,
    gaussian_blur,
    gaussian_noise,
    impulse_noise,
    jpeg,
    mean_along,
    pixelate,
    shot_noise,
)
from vitrail.measure.evaluator import Loaders
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.registry import part

SIDE = 32
NONE = torch.zeros(0)  # for corruptions that draw nothing


def pictures(count: int = 6) -> Tensor:
    """Smooth pictures with edges, which lie on no grid of blocks, so that every corruption changes them; bytes."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(count, 3, 5, 5, generator=generator) * 200 + 25
    smooth = torch.nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")
    smooth[:, :, 7:18, 11:24] += 60
    return smooth.clamp(0, 255).to(torch.uint8)


def seeds(count: int) -> Tensor:
    return torch.arange(count) * 16 + 12345


def small() -> Classifier:
    torch.manual_seed(0)
    return create_model("deit_tiny", classes=4, image_size=SIDE, patch=8, width=32, depth=2, heads=2)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_higher_severity_is_farther_from_the_image(kind: str) -> None:
    images, index = pictures(), torch.arange(6)
    away = [float((corrupt(images, index, kind, s) - images).abs().mean()) for s in SEVERITIES]
    assert away[0] > 0
    assert away == sorted(set(away))


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_what_comes_out_could_be_stored_in_bytes(kind: str) -> None:
    made = corrupt(pictures(), torch.arange(6), kind, 5)
    assert made.equal(made.to(torch.uint8).float())


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_an_image_does_not_depend_on_its_batch(kind: str) -> None:
    images, index = pictures(), torch.tensor([3, 1, 4, 15, 9, 2])
    whole = corrupt(images, index, kind, 3)
    order = torch.tensor([5, 0, 3])
    some = corrupt(images[order], index[order], kind, 3)
    # Sums in another order may round a value across a half: one grey level at a few places of 9,216.
    assert (some - whole[order]).abs().max() <= 1
    assert (some != whole[order]).float().mean() < 1e-3


@pytest.mark.parametrize("kind", ["gaussian_noise", "shot_noise", "impulse_noise", "motion_blur", "fog"])
def test_seed_and_index_decide_what_is_random(kind: str) -> None:
    images = pictures(1).expand(2, -1, -1, -1)
    made = corrupt(images, torch.tensor([7, 8]), kind, 4)
    assert not made[0].equal(made[1])
    assert corrupt(images, torch.tensor([7, 7]), kind, 4)[1].equal(made[0])
    assert not corrupt(images, torch.tensor([7, 8]), kind, 4, seed=1).equal(made)


def test_gaussian_noise_has_its_deviation() -> None:
    grey = torch.full((8, 3, SIDE, SIDE), 128.0)
    noise = gaussian_noise(grey, seeds(8), 0.1) - grey
    # 24,576 values: the mean is off by 25.5 / sqrt(n) = 0.16 and the deviation by 0.12 (one sigma); four are allowed.
    assert float(noise.mean()) == pytest.approx(0, abs=0.65)
    assert float(noise.std()) == pytest.approx(25.5, abs=0.46)


@pytest.mark.parametrize("level", [60.0, 200.0])
def test_shot_noise_has_the_mean_and_the_variance_of_counts(level: float) -> None:
    photons = 50
    counts = shot_noise(torch.full((8, 3, SIDE, SIDE), level), seeds(8), photons) * photons / 255
    poisson = np.random.default_rng(0).poisson(level * photons / 255, 24576)
    # Four standard errors of the mean; the variance of the transform is larger by 1/2 of a count.
    assert float(counts.mean()) == pytest.approx(level * photons / 255, abs=4 * poisson.std() / 24576**0.5)
    assert float(counts.var()) == pytest.approx(poisson.var(), abs=0.5 + 4 * poisson.var() * (2 / 24576) ** 0.5)


def test_impulses_hit_their_share_and_are_black_or_white() -> None:
    grey = torch.full((8, 3, SIDE, SIDE), 128.0)
    made = impulse_noise(grey, seeds(8), 0.1)
    hit = made[made != 128]
    assert set(hit.tolist()) == {0.0, 255.0}
    assert len(hit) / made.numel() == pytest.approx(0.1, abs=4 * (0.09 / 24576) ** 0.5)
    assert float(hit.mean()) / 255 == pytest.approx(0.5, abs=4 * 0.5 / len(hit) ** 0.5)


def test_blur_is_scipys() -> None:
    images = pictures().float()
    made = gaussian_blur(images, NONE, 1 / SIDE)  # a sigma of one pixel
    wanted = gaussian_filter(images.double().numpy(), 1.0, mode="nearest", truncate=4.0, axes=(2, 3))
    np.testing.assert_allclose(made.numpy(), wanted, atol=1e-3)  # float32 sums of 9 values up to 255, twice


def test_motion_along_a_row_or_column_is_a_moving_mean() -> None:
    images = pictures(2).float()
    made = mean_along(images, torch.tensor([0.0, torch.pi / 2]), 4.0)
    pixels = images.double().numpy()
    across = np.mean([pixels[0][:, :, np.clip(np.arange(SIDE) + d, 0, SIDE - 1)] for d in range(-2, 3)], axis=0)
    down = np.mean([pixels[1][:, np.clip(np.arange(SIDE) + d, 0, SIDE - 1)] for d in range(-2, 3)], axis=0)
    # Coordinates are float32 of -1 to 1: about 1e-6 x 32 / 2 pixels off, times slopes up to 255.
    np.testing.assert_allclose(made[0].numpy(), across, atol=0.02)
    np.testing.assert_allclose(made[1].numpy(), down, atol=0.02)


def test_contrast_keeps_the_mean_and_scales_the_rest() -> None:
    images = pictures().float()
    made = contrast(images, NONE, 0.3)
    torch.testing.assert_close(made.std((2, 3)), 0.3 * images.std((2, 3)))
    grey = torch.full((1, 3, 4, 4), 90.0)
    torch.testing.assert_close(contrast(grey, NONE, 0.3), grey)


def test_brightness_adds_and_fog_whitens() -> None:
    images = pictures().float()
    assert (brightness(images, NONE, 0.2) - images).sub(51).abs().max() < 1e-4
    black = torch.zeros(200, 3, 16, 16)
    made = fog(black, seeds(200), 0.4)
    assert float(made.mean()) / 255 == pytest.approx(0.4, abs=0.04)  # clouds of 200 images, each nearly one number
    assert made.mean(1).flatten(1).std(1).min() > 5  # not the same everywhere
    assert made.min() >= 0


def test_pixelate_shows_block_means() -> None:
    images = pictures().float()
    made = pixelate(images, NONE, 0.25)
    blocks = images.double().numpy().reshape(6, 3, 8, 4, 8, 4).mean((3, 5))
    np.testing.assert_allclose(made.numpy(), blocks.repeat(4, 2).repeat(4, 3), atol=1e-3)


@pytest.mark.parametrize("size", [(32, 32), (27, 45)])
@pytest.mark.parametrize("quality", [7, 20, 50, 80])
def test_jpeg_is_nearly_pillows(size: tuple[int, int], quality: int) -> None:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(1, 3, 7, 7, generator=generator) * 255
    image = torch.nn.functional.interpolate(coarse, size=size, mode="bicubic").clamp(0, 255).round()
    stored = io.BytesIO()
    Image.fromarray(image[0].permute(1, 2, 0).byte().numpy()).save(stored, "JPEG", quality=quality, subsampling=0)
    wanted = torch.from_numpy(np.asarray(Image.open(stored)).copy()).permute(2, 0, 1).float()
    made = jpeg(image, NONE, quality)[0].round().clamp(0, 255)
    damage = float((wanted - image[0]).abs().mean())
    # Pillow transforms in whole numbers, so that a frequency near a half is now and then rounded the other way.
    assert float((made - wanted).abs().mean()) < 0.15 * damage + 0.5


def test_unknown_kinds_and_severities_are_refused() -> None:
    with pytest.raises(ValueError, match="no corruption 'snow'"):
        corrupt(pictures(), torch.arange(6), "snow", 1)
    with pytest.raises(ValueError, match="severity 6"):
        corrupt(pictures(), torch.arange(6), "fog", 6)


def test_a_models_input_becomes_pixels_and_back() -> None:
    model = small()
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, -1, -1)
    normal = Preprocess(model.preprocess).normalize(images)
    moments = [torch.tensor(v).view(3, 1, 1) for v in (model.preprocess.mean, model.preprocess.std)]
    assert as_pixels(normal, *moments).equal(images.float())
    torch.testing.assert_close(as_input(images.float(), *moments), normal, rtol=0, atol=0)


def loaded(model: Classifier, label: Tensor) -> Loaders:
    images, index = Preprocess(model.preprocess).normalize(pictures(9)), torch.arange(40, 49)
    rows = torch.arange(9).split(4)
    batches = [Batch((images[r],), label[r], label[r], index[r]) for r in rows]
    return Loaders(("a", "b", "c", "d"), {"test": batches}, "test")


def test_the_evaluator_counts_as_a_loop_over_kinds_and_severities() -> None:
    model = small().eval()
    normalize = Preprocess(model.preprocess).normalize
    with torch.no_grad():
        label = model(normalize(pictures(9))).argmax(1)
        label[4] = (label[4] + 1) % 4
        wanted = {}
        for kind in ("gaussian_noise", "contrast"):
            made = [corrupt(pictures(9), torch.arange(40, 49), kind, s).to(torch.uint8) for s in SEVERITIES]
            wanted[kind] = [float((model(normalize(m)).argmax(1) == label).double().mean()) for m in made]
    data = loaded(model, label)
    clean, found = corruption_accuracy(model.train(), data, kinds=("gaussian_noise", "contrast"))
    assert clean == pytest.approx(8 / 9)
    assert found == wanted
    assert model.training
    findings = part("evaluator", "corruptions")(model, data)
    table = findings["tables"]["corruptions"]
    assert table["contrast"]["severities"] == wanted["contrast"]
    every = [value for row in table.values() for value in row["severities"]]
    assert len(every) == 5 * len(CORRUPTIONS)
    assert findings["numbers"]["corrupted_top1"] == pytest.approx(np.mean(every))
    assert findings["numbers"]["corrupted_relative"] == pytest.approx(np.mean(every) / (8 / 9))


def test_several_labels_and_no_images_are_refused() -> None:
    model = small()
    with pytest.raises(ValueError, match="no images"):
        corruption_accuracy(model, Loaders(("a",), {"val": []}))
    model.multilabel = True
    with pytest.raises(ValueError, match="one class per image"):
        corruption_accuracy(model, loaded(model, torch.zeros(9, dtype=torch.int64)))
