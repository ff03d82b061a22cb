"""Evaluation preprocessing is timm's, pixel by pixel."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from vitrail.data.config import PreprocessConfig
from vitrail.data.decode import decode
from vitrail.data.loading.loader import EvalLoader
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess

TIMM_CROP_MODE = {"crop": "center", "squash": "squash", "pad": "border"}


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def timm_transform(config: PreprocessConfig, **changes: object):
    return create_transform(
        config.size,
        is_training=False,
        interpolation=config.interpolation,
        mean=config.mean,
        std=config.std,
        crop_pct=config.crop_ratio,
        crop_mode=TIMM_CROP_MODE[config.resize],
        **changes,
    )


@pytest.mark.parametrize("resize", ["crop", "squash", "pad"])
@pytest.mark.parametrize("crop_ratio", [0.875, 0.95, 1.0])
@pytest.mark.parametrize("shape", [(50, 37), (37, 50), (33, 33), (32, 32), (20, 12), (71, 9)])
def test_bytes_equal_those_of_timm(resize, crop_ratio, shape):
    config = PreprocessConfig(size=32, crop_ratio=crop_ratio, resize=resize)
    ours = Preprocess(config)(picture(*shape))
    theirs = timm_transform(config, normalize=False)(picture(*shape))
    assert ours.dtype == torch.uint8
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "lanczos"])
def test_other_interpolations_equal_those_of_timm(interpolation):
    config = PreprocessConfig(size=24, interpolation=interpolation)
    assert torch.equal(Preprocess(config)(picture(60, 41)), timm_transform(config, normalize=False)(picture(60, 41)))


def test_normalised_values_equal_those_of_timm():
    config = PreprocessConfig(size=24)
    preprocess = Preprocess(config)
    assert torch.equal(preprocess.normalize(preprocess(picture(60, 41))), timm_transform(config)(picture(60, 41)))


def test_normalize_takes_any_leading_dimensions_and_leaves_its_input():
    preprocess = Preprocess(PreprocessConfig())
    images = torch.randint(0, 256, (2, 4, 3, 5, 6), dtype=torch.uint8)
    before = images.clone()
    made = preprocess.normalize(images)
    assert torch.equal(made[1, 2], preprocess.normalize(images[1, 2]))
    assert torch.equal(images, before)


def test_floats_pass_unchanged():
    images = torch.randn(2, 3, 4, 4)
    assert Preprocess(PreprocessConfig()).normalize(images) is images


def test_images_that_are_not_bytes_are_refused():
    with pytest.raises(ValueError, match="uint8"):
        Preprocess(PreprocessConfig()).normalize(torch.zeros(3, 4, 4, dtype=torch.int64))


def test_an_image_that_is_not_rgb_is_refused():
    with pytest.raises(ValueError, match="mode L"):
        Preprocess(PreprocessConfig())(Image.new("L", (8, 8)))


def test_a_letterbox_of_an_extremely_thin_image_keeps_a_line_of_it():
    tall = Image.new("RGB", (1, 999), (255, 0, 0))
    square = Preprocess(PreprocessConfig(size=16, crop_ratio=1.0, resize="pad", mean=(0.0, 0.0, 0.0)))(tall)
    assert int((square[0] == 255).sum()) == 16
    assert int(square[1:].sum()) == 0


def test_the_tensor_does_not_share_memory_with_the_image():
    image = picture(16, 16)
    made = Preprocess(PreprocessConfig(size=16, crop_ratio=1.0))(image)
    made.zero_()
    assert np.asarray(image).any()


def test_a_used_preprocess_survives_pickling():
    preprocess = Preprocess(PreprocessConfig(size=16))
    images = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8)
    expected = preprocess.normalize(images)
    assert torch.equal(pickle.loads(pickle.dumps(preprocess)).normalize(images), expected)


@pytest.mark.parametrize("resize", ["crop", "squash", "pad"])
def test_what_is_far_too_large_is_reduced_first_as_pillow_does(resize: str, tmp_path: Path) -> None:
    whole, gap = PreprocessConfig(size=32, crop_ratio=1.0, resize=resize), 2.0
    reduced = replace(whole, reducing_gap=gap)
    smooth = picture(40, 30).resize((400, 300), Image.Resampling.BICUBIC)
    small = smooth.resize((120, 90))
    assert torch.equal(Preprocess(reduced)(small), Preprocess(whole)(small))  # twice the gap is not reached
    ours, exact = (Preprocess(config)(smooth).int() for config in (reduced, whole))
    assert 0 < (ours - exact).abs().float().mean() < 3
    if resize == "squash":
        theirs = smooth.resize((32, 32), Image.Resampling.BICUBIC, reducing_gap=gap)
        assert np.array_equal(ours.permute(1, 2, 0), np.asarray(theirs))
    assert (Preprocess(whole).at_least, Preprocess(reduced).at_least) == (None, 64)
    smooth.save(tmp_path / "smooth.jpg", quality=95)
    decoded = decode(tmp_path / "smooth.jpg", "", at_least=Preprocess(reduced).at_least)
    assert decoded.size == (100, 75)
    assert (Preprocess(reduced)(decoded).int() - exact).abs().float().mean() < 3


def test_evaluation_decodes_files_as_small_as_the_model_allows(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(4):
            picture(40, 30).resize((400, 300)).save(tmp_path / name / f"{i}.jpg")
    rows = open_data(str(tmp_path))["train"]
    for gap, size in (None, (400, 300)), (2.0, (100, 75)):
        preprocess = Preprocess(PreprocessConfig(size=32, crop_ratio=1.0, reducing_gap=gap))
        with EvalLoader(rows, preprocess, batch=4, device="cpu", workers=0) as loader:
            assert loader.split.read(0).size == size
            (batch, *_) = loader.received()
        assert torch.equal(batch.views[0][0], preprocess(loader.split.read(0)))
