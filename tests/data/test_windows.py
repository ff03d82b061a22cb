"""Windows of a flat buffer: the Triton kernel and its plain twin."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vitrail.data.augment import flat_images
from vitrail.data.augment.flat_images import FlatImages

SIZE = 12


def images() -> FlatImages:
    """Noise of unequal sizes, turned in several ways."""
    stored = np.array([(20, 30, 1), (12, 40, 6), (9, 24, 3)])
    lengths = 3 * stored[:, 0] * stored[:, 1]
    pixels = np.random.default_rng(0).integers(0, 256, lengths.sum(), dtype=np.uint8)
    return FlatImages(torch.from_numpy(pixels), np.cumsum(lengths) - lengths, stored)


def windows(crop: str, size: int = SIZE) -> NDArray[np.float64]:
    height, width = images().sizes
    if crop == "resized":
        return np.array([(1, 2, 0), (2, 0, 1), height - 4, width - 5], float)
    places = [(-3, -2, 5), (1, -3, 2), (size, size + 9, size), (size + 3, size, size + 20)]
    return np.array([*(0 * images().sizes), height, width, *places], float)


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor, kind: str) -> None:
    """Sums are of other orders, so that halves, of which bilinear weights make many, are rounded up or down."""
    apart = (ours.int() - theirs.int()).abs()
    assert int(apart.max()) <= (0 if kind == "nearest" else 1)
    assert float((apart > 0).float().mean()) <= (0.01 if kind == "bilinear" else 1e-3)


INTERPRETED = """
from test_windows import SIZE, assert_equal, images, windows
from vitrail.kernels import windows_triton
made = images()
for kind, crop in (("nearest", "simple"), ("bilinear", "resized"), ("bicubic", "simple"), ("lanczos", "resized")):
    found = windows_triton.resampled(made.pixels, made._table(windows(crop), SIZE), SIZE, kind)
    assert_equal(found, made.resampled(windows(crop), SIZE, kind), kind)
print("windows are right")
"""


def test_the_kernel_equals_its_twin_in_the_interpreter(interpreted: Callable[[str], str]) -> None:
    here = f"import sys\nsys.path.insert(0, {str(__file__).rsplit('/', 1)[0]!r})\n"
    assert "windows are right\n" in interpreted(here + INTERPRETED)


@pytest.mark.parametrize("crop", ["resized", "simple"])
def test_windows_are_bytes(crop: str) -> None:
    made = images().resampled(windows(crop), SIZE, "bicubic")
    assert made.dtype == torch.uint8
    assert made.shape == (3, 3, SIZE, SIZE)


def test_without_triton_the_twin_works_and_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vitrail.kernels.windows_triton", None)
    flat_images._kernel.cache_clear()
    with pytest.warns(UserWarning, match="images are resampled without Triton, which takes longer: "):
        assert flat_images._kernel(torch.device("cuda")) is None
    flat_images._kernel.cache_clear()


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("size", [16, 224])
@pytest.mark.parametrize("crop", ["resized", "simple"])
@pytest.mark.parametrize("kind", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_the_kernel_equals_its_twin_on_the_accelerator(kind: str, crop: str, size: int) -> None:
    made = images()
    there = FlatImages(made.pixels.cuda(), made.offsets, made.stored)
    assert flat_images._kernel(there.pixels.device) is not None
    ours = there.resampled(windows(crop, size), size, kind).cpu()
    assert_equal(ours, made.resampled(windows(crop, size), size, kind), kind)
