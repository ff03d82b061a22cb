"""Corruptions of CIFAR-10-C: the published generator's results, byte by byte or within a stated distance."""

from __future__ import annotations

import colorsys
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from studies.make_cifar_c import KINDS, PARAMETERS, SEVERITIES, corrupt, make
from vitrail.measure.cifar_c import ALEXNET, open_corrupted
from vitrail.measure.cifar_c import KINDS as READ

REFERENCE = Path(__file__).parents[1] / "fixtures" / "cifar_c.npz"
# Of the reference, which OpenCV, scikit-image and scipy made with the same draws: most grey levels apart, and in which
# share of values. One level is a float that is nearly whole before it is cut; OpenCV rounds coordinates of a warp.
APART = {
    **dict.fromkeys(("defocus_blur", "saturate", "brightness", "zoom_blur", "glass_blur", "gaussian_blur"), (1, 0.08)),
    "elastic_transform": (8, 0.04),
}
Bytes = NDArray[np.uint8]


def picture() -> Bytes:
    """Waves, edges, greys, black and white."""
    row, column = np.mgrid[0:32, 0:32]
    waves = [
        128 + 90 * np.sin(row / 3.0 + c) * np.cos(column / 5.0 - c) + 60 * (row + column > 28 + 9 * c) for c in range(3)
    ]
    image = np.clip(np.stack(waves, 2), 0, 255).astype(np.uint8)
    image[4:9, 20:28], image[20:24, 3:9], image[28:, :4], image[26:28, 26:] = (255, 0, 30), 77, 255, 0
    return image


def cut(x: NDArray[Any]) -> Bytes:
    return (np.clip(x, 0, 1) * 255).astype(np.uint8)


def assert_near(found: Bytes, wanted: Bytes, share: float = 0.08, most: int = 1) -> None:
    distance = np.abs(found.astype(int) - wanted)
    assert distance.max() <= most
    assert (distance > 0).mean() <= share


class Fixed:
    """Draws that are all the same share of their range."""

    def __init__(self, share: float) -> None:
        self.share = share

    def uniform(self, low: float, high: float, size: Any = None) -> Any:
        value = low + (high - low) * self.share
        return value if size is None else np.full(size, value)

    def normal(self, mean: float, deviation: float, size: Any) -> Any:
        return np.full(size, mean + deviation * (self.share - 0.5))


def changed(kind: str, severity: int, draw: Any) -> NDArray[Any]:
    return np.asarray(KINDS[kind](picture() / 255, draw, PARAMETERS[kind][severity - 1]))


def test_kinds_are_those_that_are_read_but_frost() -> None:
    assert set(KINDS) == set(PARAMETERS) == set(READ) - {"frost"}
    assert set(ALEXNET) - {"frost"} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_severity_is_the_published_generators(kind: str) -> None:
    with np.load(REFERENCE) as stored:
        wanted = stored[kind]  # [5, 7, 7, 3]: every fifth pixel
    found = np.stack([corrupt(picture(), kind, severity, 7) for severity in SEVERITIES])
    assert found.shape == (5, 32, 32, 3)
    assert found.dtype == np.uint8
    most, share = APART.get(kind, (0, 0.0))
    assert_near(found[:, 1::5, 1::5], wanted, share, most)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_colours_change_as_in_hsv(severity: int) -> None:
    gain, offset = PARAMETERS["saturate"][severity - 1]
    brighter, saturated = np.zeros((32, 32, 3)), np.zeros((32, 32, 3))
    for place in np.ndindex(32, 32):
        hue, saturation, value = colorsys.rgb_to_hsv(*(picture()[place] / 255))
        brighter[place] = colorsys.hsv_to_rgb(hue, saturation, min(1, value + PARAMETERS["brightness"][severity - 1]))
        saturated[place] = colorsys.hsv_to_rgb(hue, np.clip(saturation * gain + offset, 0, 1), value)
    assert_near(corrupt(picture(), "brightness", severity), cut(brighter))
    assert_near(corrupt(picture(), "saturate", severity), cut(saturated))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_pixelate_and_jpeg_are_those_of_numpy_and_pillow(severity: int) -> None:
    x, image, c = picture() / 255, Image.fromarray(picture()), {k: v[severity - 1] for k, v in PARAMETERS.items()}
    mean = x.reshape(-1, 3).mean(0)
    assert_near(corrupt(picture(), "contrast", severity), cut(mean + c["contrast"] * (x - mean)), 0.01)
    side = int(32 * c["pixelate"])
    blocks = image.resize((side, side), Image.Resampling.BOX).resize((32, 32), Image.Resampling.BOX)
    np.testing.assert_array_equal(corrupt(picture(), "pixelate", severity), np.asarray(blocks))
    stream = io.BytesIO()
    image.save(stream, format="JPEG", quality=c["jpeg_compression"])
    np.testing.assert_array_equal(corrupt(picture(), "jpeg_compression", severity), np.asarray(Image.open(stream)))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_blurs_are_those_of_scipy(severity: int) -> None:
    x, c = picture() / 255, {k: v[severity - 1] for k, v in PARAMETERS.items()}
    sigma = (c["gaussian_blur"], c["gaussian_blur"], 0)
    assert_near(corrupt(picture(), "gaussian_blur", severity), cut(ndimage.gaussian_filter(x, sigma, mode="nearest")))
    radius, soft = c["defocus_blur"]
    grid = np.arange(-8, 9)
    disk = (grid[:, None] ** 2 + grid**2 <= radius**2).astype(float)
    taps = np.exp(-(np.array([-1, 0, 1]) ** 2) / (2 * soft**2))
    kernel = ndimage.convolve(disk / disk.sum(), np.outer(taps, taps) / taps.sum() ** 2)
    assert_near(
        corrupt(picture(), "defocus_blur", severity), cut(ndimage.correlate(x, kernel[..., None], mode="mirror"))
    )
    layers = [x]
    for factor in np.arange(1, c["zoom_blur"], 0.01):
        kept = int(np.ceil(32 / factor))
        top = (32 - kept) // 2
        zoomed = ndimage.zoom(x[top : top + kept, top : top + kept], (factor, factor, 1), order=1)
        trim = (len(zoomed) - 32) // 2
        layers.append(zoomed[trim : trim + 32, trim : trim + 32])
    assert_near(corrupt(picture(), "zoom_blur", severity), cut(sum(layers) / len(layers)))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_motion_blur_is_image_magicks_loop(severity: int) -> None:
    radius, sigma = PARAMETERS["motion_blur"][severity - 1]
    angle, width = np.deg2rad(-45 + 90 * 0.8), 2 * radius + 1
    weights = np.exp(-(np.arange(width) ** 2) / (2 * sigma**2))
    image, total = picture().astype(float), np.zeros((32, 32, 3))
    for i, weight in enumerate(weights / weights.sum()):
        down, across = int(np.ceil(i * np.sin(angle) - 0.5)), int(np.ceil(i * np.cos(angle) - 0.5))
        for y, x in np.ndindex(32, 32):
            total[y, x] += weight * image[min(max(y + down, 0), 31), min(max(x + across, 0), 31)]
    assert_near(changed("motion_blur", severity, Fixed(0.8)), np.rint(total).astype(np.uint8), 0.001)


def test_snow_without_flakes_pales_and_elastic_without_draws_changes_nothing() -> None:
    x = picture() / 255
    grey = (0.299 * x[..., 0] + 0.587 * x[..., 1] + 0.114 * x[..., 2])[..., None]
    for severity in SEVERITIES:
        kept = PARAMETERS["snow"][severity - 1][6]
        pale = kept * x + (1 - kept) * np.maximum(x, grey * 1.5 + 0.5)
        np.testing.assert_allclose(changed("snow", severity, Fixed(0.5)), pale, atol=1e-12)
        np.testing.assert_allclose(changed("elastic_transform", severity, Fixed(0.5)), x, atol=1e-9)


def test_noises_have_their_moments() -> None:
    grey = np.full((32, 32, 3), 128, np.uint8)
    for severity in SEVERITIES:
        c = {kind: values[severity - 1] for kind, values in PARAMETERS.items()}
        drawn = {k: np.stack([corrupt(grey, k, severity, i) for i in range(40)]) / 255 for k in list(KINDS)[:3]}
        assert drawn["gaussian_noise"].std() == pytest.approx(c["gaussian_noise"], rel=0.02)
        assert drawn["shot_noise"].var() == pytest.approx(128 / 255 / c["shot_noise"], rel=0.03)
        black, white = (drawn["impulse_noise"] == 0).mean(), (drawn["impulse_noise"] == 1).mean()
        assert black == pytest.approx(c["impulse_noise"] / 2, rel=0.1)
        assert white == pytest.approx(c["impulse_noise"] / 2, rel=0.1)
        speckled = np.stack([corrupt(grey, "speckle_noise", severity, i) for i in range(40)]) / 255
        assert speckled.std() == pytest.approx(c["speckle_noise"] * 128 / 255, rel=0.02)


def test_glass_blur_takes_pixels_from_above_and_left() -> None:
    place = np.stack([*np.mgrid[0:32, 0:32], np.zeros((32, 32), int)], 2).astype(np.uint8)
    moved = corrupt(place, "glass_blur", 1).astype(int)  # sigma 0.05 blurs nothing
    step = place[..., :2].astype(int) - moved[..., :2]
    inner = step[2:, 2:]
    assert set(np.unique(inner)) <= {0, 1, 2}  # a level more where the cut to bytes takes one
    assert 0.4 < (inner > 0).mean() < 0.7
    assert step[:2].max() <= 1


def test_draws_are_a_function_of_seed_kind_severity_and_index() -> None:
    one = corrupt(picture(), "gaussian_noise", 3, 5)
    np.testing.assert_array_equal(one, corrupt(picture(), "gaussian_noise", 3, 5))
    assert not np.array_equal(one, corrupt(picture(), "gaussian_noise", 3, 6))
    assert not np.array_equal(one, corrupt(picture(), "gaussian_noise", 3, 5, seed=1))
    grey = np.full((32, 32, 3), 128, np.uint8)
    impulses = [corrupt(grey, "impulse_noise", severity, 5) != 128 for severity in (4, 5)]
    assert not (impulses[0] <= impulses[1]).all()  # severities do not share draws


@pytest.mark.slow
def test_files_are_written_as_the_published_ones_are(tmp_path: Path) -> None:
    pixels = np.stack([np.roll(picture(), i, 0) for i in range(12)])
    labels = np.arange(12) % 3
    np.savez(tmp_path / "d.npz", x_train=pixels, y_train=labels, x_test=pixels[:6], y_test=labels[:6])
    make(str(tmp_path / "d.npz"), tmp_path / "c", images=5)
    assert {path.stem for path in (tmp_path / "c").iterdir()} == {*KINDS, "labels"}
    data = open_corrupted(tmp_path / "c", ("a", "b", "c"))
    assert len(data.splits) == 5 * len(KINDS)
    found = np.asarray(data["fog/4"].read(2))
    np.testing.assert_array_equal(found, corrupt(pixels[2], "fog", 4, 12 + 2))  # stable indices count through train
    assert data["fog/4"].labels.tolist() == labels[:5].tolist()
    np.savez(tmp_path / "e.npz", x_train=pixels[:, :28], y_train=labels, x_test=pixels[:6, :28], y_test=labels[:6])
    with pytest.raises(ValueError, match="32 x 32"):
        make(str(tmp_path / "e.npz"), tmp_path / "f")
