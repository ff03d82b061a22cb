"""Images of other channels than RGB: files and arrays keep their depth, and augmentation keeps their channels."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.augment.host import Augment
from vitrail.data.check.check import check_data
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.dataset import BadImage
from vitrail.data.loading.loader import EvalLoader
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.data.stack import StackForm, StackImage, channel_moments, composite, form_in, read_pixels

FIVE = PreprocessConfig(size=16, crop_ratio=1.0, mean=(0.0,) * 5, std=(1.0,) * 5, maximum=65535.0)


def stack(seed: int = 0, channels: int = 5, side: int = 16) -> NDArray[np.uint16]:
    return np.random.default_rng(seed).integers(0, 65536, (side, side, channels)).astype(np.uint16)


def write_pages(path: Path, pixels: NDArray[Any], **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pages = [Image.fromarray(np.ascontiguousarray(pixels[..., c])) for c in range(pixels.shape[-1])]
    pages[0].save(path, save_all=True, append_images=pages[1:], **options)


def folder(root: Path, images: int = 4, **options: Any) -> Path:
    for name in ("left", "right"):
        for i in range(images):
            write_pages(root / name / f"{i}.tif", stack(10 * i + (name == "left")), **options)
    return root


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_adobe_deflate"])
def test_pages_of_a_tiff_are_channels_in_their_order_and_depth(tmp_path: Path, compression: str | None) -> None:
    write_pages(tmp_path / "a.tif", stack(), **({"compression": compression} if compression else {}))
    read = read_pixels(tmp_path / "a.tif", "a")
    assert read.dtype == np.uint16
    assert (read == stack()).all()


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_samples_of_a_tiff_are_channels_interleaved_or_planar(tmp_path: Path, planar: str) -> None:
    tifffile = pytest.importorskip("tifffile")
    pixels = stack(channels=6)
    stored = pixels if planar == "contig" else np.moveaxis(pixels, -1, 0)
    options = {"planarconfig": planar, "photometric": "minisblack", "extrasamples": [0] * 5}
    tifffile.imwrite(tmp_path / "a.tif", stored, **options)
    assert (read_pixels(tmp_path / "a.tif", "a") == pixels).all()


def test_colour_of_sixteen_bits_keeps_its_low_byte(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    pixels = stack(channels=3)
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="rgb")
    assert (read_pixels(tmp_path / "a.tif", "a") == pixels).all()


def test_eight_bit_files_of_four_channels_are_read_without_tifffile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *a, **k: _no_tifffile(imported, name, *a, **k))
    pixels = stack(channels=4).astype(np.uint8)
    Image.fromarray(pixels, "RGBA").save(tmp_path / "a.png")
    assert (read_pixels(tmp_path / "a.png", "a") == pixels).all()


def _no_tifffile(imported: Any, name: str, *rest: Any, **options: Any) -> Any:
    if name == "tifffile":
        raise ModuleNotFoundError(name)
    return imported(name, *rest, **options)


def test_a_missing_tifffile_is_one_sentence_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tifffile = pytest.importorskip("tifffile")
    (tmp_path / "c").mkdir()
    tifffile.imwrite(tmp_path / "c" / "a.tif", stack(channels=6), photometric="minisblack", planarconfig="contig")
    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *a, **k: _no_tifffile(imported, name, *a, **k))
    with pytest.raises(BadImage, match=r"needs tifffile: pip install 'vitrail\[tiff\]'"):
        read_pixels(tmp_path / "c" / "a.tif", "a.tif")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "empty file"), (b"II*\0damaged", "damaged|truncated"), (b"no image at all", "no image")],
)
def test_damaged_files_are_bad_images_with_a_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.tif").write_bytes(content)
    with pytest.raises(BadImage, match=reason):
        read_pixels(tmp_path / "a.tif", "a.tif")


def test_images_that_differ_in_the_low_byte_alone_give_different_inputs(tmp_path: Path) -> None:
    high = stack() & 0xFF00
    for name, pixels in (("a", high), ("b", high | 1)):
        for i in range(3):
            write_pages(tmp_path / name / f"{i}.tif", pixels)
    data = open_data(tmp_path, val_fraction=0.0, test_fraction=0.0, channels=5)
    preprocess = Preprocess(FIVE)
    with EvalLoader(data["train"], preprocess, batch=6, device="cpu", workers=0) as loader:
        images = next(iter(loader)).images
    expected = torch.from_numpy(high.astype(np.float64) / 65535).permute(2, 0, 1)
    torch.testing.assert_close(images[0].double(), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        (images[3] - images[0]).double(), torch.full((5, 16, 16), 1 / 65535).double(), rtol=1e-2, atol=0
    )


def test_resizing_keeps_sixteen_bits() -> None:
    flat = np.full((32, 32, 2), 40_001, np.uint16)
    assert (StackImage(flat).resize((16, 16), Image.Resampling.BICUBIC).pixels == 40_001).all()


def test_an_rgb_stack_of_bytes_is_preprocessed_as_the_rgb_image() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3)).astype(np.uint8)
    for resize in ("crop", "squash", "pad"):
        preprocess = Preprocess(PreprocessConfig(size=24, resize=resize))  # type: ignore[arg-type]
        plain, stacked = preprocess(Image.fromarray(pixels)), preprocess(StackImage(pixels))
        assert (plain == stacked).all()


@pytest.mark.parametrize("crop", ["resized", "simple", "evaluation"])
def test_crops_flips_blur_and_erasing_keep_channels_and_depth(crop: str) -> None:
    config = AugmentConfig(crop=crop, blur=1.0, erasing=1.0, flip=1.0)  # type: ignore[arg-type]
    augmented = Augment(config, FIVE)(StackImage(stack(side=40)), (0, 0, 0, 0, 0))
    assert (augmented.dtype, tuple(augmented.shape)) == (torch.uint16, (5, 16, 16))


def test_the_same_key_augments_a_stack_as_it_does_an_rgb_image() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 20, 3)).astype(np.uint8)
    augment = Augment(AugmentConfig(crop="pad", padding=2), PreprocessConfig(size=20, crop_ratio=1.0))
    key = (1, 2, 3, 0, 0)
    assert (augment(Image.fromarray(pixels), key) == augment(StackImage(pixels), key)).all()


def test_blur_is_that_of_scipy_inside_the_image() -> None:
    from PIL import ImageFilter
    from scipy.ndimage import gaussian_filter

    pixels = stack(side=41, channels=2)
    blurred = StackImage(pixels).filter(ImageFilter.GaussianBlur(2.0)).pixels
    expected = np.stack([gaussian_filter(pixels[..., c].astype(float), 2.0, truncate=3.0) for c in range(2)], -1)
    inside = slice(8, -8)
    assert np.abs(blurred[inside, inside] - expected[inside, inside]).max() <= 1


def test_moments_are_those_of_all_pixels(tmp_path: Path) -> None:
    data = open_data(folder(tmp_path), val_fraction=0.0, test_fraction=0.0, channels=5)
    mean, std = channel_moments(data["train"], StackForm(5, 65535.0), seed=3)
    pixels = np.concatenate([stack(10 * i + k).reshape(-1, 5) for i in range(4) for k in range(2)]) / 65535
    np.testing.assert_allclose(mean, pixels.mean(0), rtol=1e-9)
    np.testing.assert_allclose(std, pixels.std(0), rtol=1e-9)


def test_arrays_keep_channels_and_depth(tmp_path: Path) -> None:
    x = np.stack([stack(i) for i in range(12)])
    np.savez(tmp_path / "a.npz", x_train=x, y_train=np.arange(12) % 2)
    data = open_data(tmp_path / "a.npz", channels=5)
    assert form_in(data) == StackForm(5, 65535.0)
    image = data["train"].read(0)
    assert (image.pixels == x[data["train"].index[0]]).all()  # type: ignore[attr-defined]


def test_arrays_of_other_channels_name_the_setting_that_reads_them(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=np.stack([stack(i) for i in range(12)]), y_train=np.arange(12) % 2)
    with pytest.raises(ValueError, match=r"5 channels of 16 bits; read them with --data.channels 5"):
        open_data(tmp_path / "a.npz")


def test_another_number_of_channels_is_one_sentence_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"left/\d\.tif has 5 channels of 16 bits, and 4 are set; set --data.channels 5"
    ):
        open_data(folder(tmp_path), channels=4)


def test_a_maximum_of_another_depth_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.maximum: left/\d\.tif has 16 bits, and 200 is of 8"):
        open_data(folder(tmp_path), channels=5, maximum=200)


def test_sources_of_rgb_images_are_rejected() -> None:
    with pytest.raises(ValueError, match="embedded:fashion holds RGB images"):
        open_data("embedded:fashion", channels=4)


def test_check_counts_stacks_and_finds_files_of_another_form(tmp_path: Path) -> None:
    write_pages(folder(tmp_path) / "right" / "odd.tif", stack(channels=2))
    report = check_data(open_data(tmp_path, channels=5))
    assert any("5 channels of 16 bits" in note for note in report.notes)
    assert "colour mode" not in {finding.check for finding in report.findings}  # that pages are not read
    unreadable = next(finding for finding in report.findings if finding.check == "unreadable")
    assert unreadable.count == 1
    assert "right/odd.tif (2 channels of 16 bits, not 5 of 16 bits" in unreadable.examples[0]


def test_check_without_channels_says_that_pages_are_not_read(tmp_path: Path) -> None:
    texts = [finding.text for finding in check_data(open_data(folder(tmp_path))).findings]
    assert any("16 bits, 5 pages, of which RGB reads the first" in text for text in texts)


def test_stacks_that_differ_in_the_last_channel_are_no_copies(tmp_path: Path) -> None:
    one, other = stack(), stack()
    other[..., 4] = 7
    for i, pixels in enumerate((one, other)):
        write_pages(tmp_path / "a" / f"{i}.tif", pixels)
        write_pages(tmp_path / "b" / f"{i}.tif", stack(50 + i))
    findings = check_data(open_data(tmp_path, val_fraction=0.0, test_fraction=0.0, channels=5)).findings
    assert not [finding for finding in findings if finding.check in ("duplicates", "leak")]


def test_a_composite_stretches_sixteen_bits_and_repeats_grey() -> None:
    deep = np.zeros((1, 3, 1), np.uint16)
    deep[0, :, 0] = (100, 150, 300)
    assert composite(deep).tolist() == [[[0] * 3, [64] * 3, [255] * 3]]
