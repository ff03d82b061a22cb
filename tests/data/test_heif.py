"""Photographs of phones: HEIC is decoded where pillow-heif is installed, and named with its remedy where it is not."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.cli import run
from vitrail.data.check.scan import scan
from vitrail.data.dataset import BadImage
from vitrail.data.decode import decode, reads_heif
from vitrail.data.open import open_data, open_source

INSTALL = "pip install 'vitrail[heif]'"


def picture(seed: int, size: tuple[int, int] = (48, 32)) -> Image.Image:
    """A smooth picture, which a lossy codec keeps to a few levels."""
    x, y = np.meshgrid(np.linspace(0, 1, size[0]), np.linspace(0, 1, size[1]))
    return Image.fromarray(np.uint8(255 * np.stack([x, y, np.full_like(x, seed % 8 / 8)], -1)))


def heic(image: Image.Image, **options: object) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif", reason="HEIC files are written by pillow-heif")
    stream = io.BytesIO()
    pillow_heif.from_pillow(image).save(stream, quality=-1, **options)
    return stream.getvalue()


@pytest.fixture
def phone(tmp_path: Path) -> Path:
    """cat: 12 PNG; dog: 12 PNG and 3 HEIC; phone: 3 HEIC alone."""
    stored = heic(picture(1))
    for name, png, photos in (("cat", 12, 0), ("dog", 12, 3), ("phone", 0, 3)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(png):
            picture(i).save(tmp_path / "photos" / name / f"{i}.png")
        for i in range(photos):
            (tmp_path / "photos" / name / f"IMG_{i}.HEIC").write_bytes(stored)
    return tmp_path / "photos"


@contextmanager
def without_heif() -> Iterator[None]:
    """As if pillow-heif were not installed: neither importable nor registered with Pillow."""
    Image.init()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
        patch.setitem(sys.modules, "pillow_heif", None)
        reads_heif.cache_clear()
        try:
            yield
        finally:
            reads_heif.cache_clear()


def test_a_heic_file_has_the_pixels_of_its_picture(tmp_path):
    (tmp_path / "a.heic").write_bytes(heic(picture(3)))
    decoded = decode(tmp_path / "a.heic", "a")
    assert decoded.mode == "RGB"
    assert np.abs(np.asarray(decoded).astype(int) - np.asarray(picture(3))).max() <= 8


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_a_heic_photograph_is_upright_as_the_same_photograph_in_jpeg_is(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    picture(2).save(stream, "jpeg", quality=95, exif=exif)
    pillow_heif = pytest.importorskip("pillow_heif", reason="HEIC files are written by pillow-heif")
    image = Image.open(stream)
    pillow_heif.register_heif_opener()
    rotated = io.BytesIO()
    image.save(rotated, "HEIF", quality=-1)
    jpeg, phone = (np.asarray(decode(data.getvalue(), "x")).astype(int) for data in (stream, rotated))
    assert jpeg.shape == phone.shape
    assert np.abs(jpeg - phone).max() <= 8


def test_a_truncated_heic_is_unreadable_even_where_a_small_size_is_enough(tmp_path):
    pillow_heif = pytest.importorskip("pillow_heif", reason="HEIC files are written by pillow-heif")
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (256, 256, 3), np.uint8))
    stream = io.BytesIO()
    pillow_heif.from_pillow(image).save(stream, thumbnails=[64])
    content = stream.getvalue()
    assert np.asarray(decode(content, "x", at_least=32)).shape == (256, 256, 3)
    with pytest.raises(BadImage):
        decode(content[: len(content) // 2], "x", at_least=32)


def test_a_folder_with_heic_files_has_their_class(phone):
    data = open_data(phone)
    assert data.classes == ("cat", "dog", "phone")
    assert sum(map(len, data.splits.values())) == 30
    assert scan(data) == []


def test_a_tar_file_with_heic_images_is_read(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("cat/0.heic", "dog/0.heic"):
            content = heic(picture(len(name)))
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    split = next(iter(open_source(str(tmp_path / "a.tar")).splits.values()))
    assert [split.read(row).size for row in range(2)] == [(48, 32)] * 2


def test_check_counts_heic_files_and_names_the_class_that_has_no_others(phone, capsys):
    with without_heif():
        run(["check", str(phone)])
    out = capsys.readouterr().out
    assert f"6 files are HEIC; {INSTALL} to read them" in out
    assert "left out phone, where all images are HEIC" in out


def test_notes_of_check_in_json_have_the_heic_files(phone, capsys):
    with without_heif():
        run(["check", str(phone), "--json"])
    assert any("6 files are HEIC" in note for note in json.loads(capsys.readouterr().out)["notes"])


def test_heic_files_are_not_called_no_images(phone):
    with without_heif():
        notes = open_source(str(phone)).notes
    assert not [note for note in notes if "not images" in note]


@pytest.mark.parametrize("layout", ["a/0.heic", "0.heic", "train/a/0.heic"])
def test_a_folder_of_heic_alone_says_what_to_install(tmp_path, layout):
    (tmp_path / layout).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / layout).write_bytes(heic(picture(0)))
    with without_heif(), pytest.raises(ValueError) as error:
        open_source(str(tmp_path))
    assert f"1 files are HEIC; {INSTALL}" in str(error.value)


def test_a_heic_file_by_name_says_what_to_install():
    content = heic(picture(0))
    with without_heif(), pytest.raises(BadImage) as bad:
        decode(content, "x")
    assert bad.value.reason == f"HEIC, which needs pillow-heif: {INSTALL}"


def test_a_scan_does_not_remember_heic_as_unreadable(phone, tmp_path):
    table = tmp_path / "labels.csv"
    files = sorted(path for path in phone.rglob("*") if path.is_file())
    table.write_text("path,label\n" + "".join(f"{f.relative_to(tmp_path)},{f.parent.name}\n" for f in files))
    with without_heif():
        assert len(scan(open_source(str(table)))) == 6
    assert scan(open_source(str(table))) == []
