"""Images that break naive loaders, each with what must come of it; archives that lie."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Expected = NDArray[np.uint8] | str  # the RGB pixels, or the start of the reason why there are none

WIDTH, HEIGHT = 24, 16
ARRAYS = {
    "x_train": np.random.default_rng(0).integers(0, 256, (30, 16, 16, 3), np.uint8),
    "y_train": np.arange(30) % 3,
}


def colour() -> NDArray[np.uint8]:
    """[16, 24, 3] smooth, so that JPEG keeps it nearly as it is, and without any symmetry."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([x * 10, y * 15, 255 - x * 4 - y * 6], -1).astype(np.uint8)


def grey(levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.repeat(levels[..., None], 3, -1)


def on_white(rgb: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> NDArray[np.uint8]:
    share = alpha[..., None] / 255
    return np.round(rgb * share + 255 * (1 - share)).astype(np.uint8)


def png_claiming(width: int, height: int) -> bytes:
    """A valid PNG header of any size with hardly any pixels behind it."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    )


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def make_hostile(folder: Path) -> dict[str, Expected]:
    """Write the images into `folder`; file name -> pixels [height, width, 3] or the start of the reason."""
    folder.mkdir(parents=True, exist_ok=True)
    files, expected = _readable()
    jpeg = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)), "JPEG")
    png = encoded(Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)), "PNG")
    unreadable: dict[str, tuple[bytes, str]] = {
        "truncated.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
        "truncated.png": (png[: len(png) // 2], "truncated"),
        "cut_in_header.jpg": (jpeg[:30], "truncated"),
        "cut_in_header.png": (png[:20], "truncated"),
        "scrambled.jpg": (jpeg[:3] + bytes(range(100)), "damaged header"),
        "scrambled.tif": (b"II*\0" + b"\xff" * 40, "damaged header"),
        "empty.jpg": (b"", "empty file"),
        "text.jpg": (b"404 Not Found\n" * 20, "not an image"),
        "page.png": (b"<!DOCTYPE html><html></html>", "not an image"),
        "bomb.png": (png_claiming(12000, 12000), "12000x12000 pixels, more than the limit of 100000000"),
        "huge_bomb.png": (png_claiming(60000, 60000), "3600000000 pixels, more than"),
    }
    for name, (content, reason) in unreadable.items():
        files[name], expected[name] = content, reason
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "folder.jpg").mkdir(exist_ok=True)
    expected["folder.jpg"] = "a folder"
    expected["missing.jpg"] = "no such file"
    return expected


def _readable() -> tuple[dict[str, bytes], dict[str, Expected]]:
    rgb = colour()
    image = Image.fromarray(rgb)
    levels = np.ascontiguousarray(rgb[..., 0])
    alpha = np.ascontiguousarray(rgb[..., 1])
    deep = (levels.astype(np.uint16) * 257 + 3).astype(np.uint16)  # rounds to `levels`
    black = levels > 100
    files: dict[str, bytes] = {}
    expected: dict[str, Expected] = {}

    def add(name: str, picture: Image.Image, kind: str, pixels: NDArray[np.uint8], **options: object) -> None:
        files[name], expected[name] = encoded(picture, kind, **options), pixels

    add("plain.png", image, "PNG", rgb)
    add("grey.png", Image.fromarray(levels), "PNG", grey(levels))
    add("grey_16_bit.png", Image.fromarray(deep), "PNG", grey(levels))
    add("grey_16_bit.tif", Image.fromarray(deep), "TIFF", grey(levels))
    add("integer_32_bit.tif", Image.fromarray(deep.astype(np.int32)), "TIFF", grey(levels))
    add("float_unit.tif", Image.fromarray((levels / 255).astype(np.float32)), "TIFF", grey(levels))
    add("float_bytes.tif", Image.fromarray(levels.astype(np.float32)), "TIFF", grey(levels))
    stretched = np.round((levels - 0.0) * 255 / levels.max()).astype(np.uint8)
    add("float_signed.tif", Image.fromarray(levels.astype(np.float32) * 9 - 700), "TIFF", grey(stretched))
    add("one_bit.png", Image.fromarray(black).convert("1"), "PNG", grey(np.where(black, 255, 0).astype(np.uint8)))
    add("alpha.png", Image.fromarray(np.dstack([rgb, alpha])), "PNG", on_white(rgb, alpha))
    add("grey_alpha.png", Image.fromarray(np.dstack([levels, alpha])), "PNG", on_white(grey(levels), alpha))
    add("cmyk.tif", image.convert("CMYK"), "TIFF", rgb)  # Pillow's CMYK of an RGB image has no black: exact inverse
    add("cmyk_adobe.jpg", image.convert("CMYK"), "JPEG", rgb, quality=100, subsampling=0)
    add("plain.jpg", image, "JPEG", rgb, quality=100, subsampling=0)
    indices = (np.add.outer(np.arange(HEIGHT), np.arange(WIDTH)) % 4).astype(np.uint8)
    table = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [10, 20, 30]], np.uint8)
    palette = Image.frombytes("P", (WIDTH, HEIGHT), indices.tobytes())
    palette.putpalette(table.ravel().tolist())
    add("palette.png", palette, "PNG", table[indices])
    seen = np.where(indices[..., None] == 2, 255, table[indices]).astype(np.uint8)
    add("palette_transparent.png", palette, "PNG", seen, transparency=2)
    faded = on_white(table[indices], np.array([255, 128, 0, 64], np.uint8)[indices])
    add("palette_alpha.png", palette, "PNG", faded, transparency=bytes([255, 128, 0, 64]))
    add("palette.gif", palette, "GIF", table[indices])
    add("animated.gif", palette, "GIF", table[indices], save_all=True, append_images=[palette.rotate(180)])
    stored_as = {1: rgb, 2: rgb[:, ::-1], 3: rgb[::-1, ::-1], 4: rgb[::-1], 5: rgb.swapaxes(0, 1)}
    stored_as |= {6: np.rot90(rgb, 1), 7: rgb[::-1, ::-1].swapaxes(0, 1), 8: np.rot90(rgb, -1)}
    for orientation, stored in stored_as.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        turned = Image.fromarray(np.ascontiguousarray(stored))
        add(f"rotated_{orientation}.png", turned, "PNG", rgb, exif=exif)
    exif = Image.Exif()
    exif[0x0112] = 6
    add("rotated.jpg", Image.fromarray(np.rot90(rgb, 1).copy()), "JPEG", rgb, quality=100, subsampling=0, exif=exif)
    add("rotated.tif", Image.fromarray(np.rot90(rgb, 1).copy()), "TIFF", rgb, exif=exif)
    add("broken_exif.jpg", image, "JPEG", rgb, quality=100, subsampling=0, exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    return files, expected


def edited(path: Path, change: Callable[[bytearray, int], None]) -> None:
    """Write an npz file with some of its bytes changed: they and the start of its directory are given."""
    np.savez_compressed(path, **ARRAYS)
    data = bytearray(path.read_bytes())
    change(data, data.find(b"PK\x01\x02"))
    path.write_bytes(data)


def damaged_deflate(data: bytearray, _: int) -> None:
    data[60:62] = bytes(v ^ 255 for v in data[60:62])


def encrypted(data: bytearray, directory: int) -> None:
    data[6] |= 1
    data[directory + 8] |= 1


def unknown_method(data: bytearray, directory: int) -> None:
    data[8] = data[directory + 10] = 99


def lying_npz(path: Path) -> None:
    """Images of which the header claims 286 GiB."""
    header = b"{'descr':'|u1','fortran_order':False,'shape':(100000000,32,32,3)}"
    header += b" " * (-(11 + len(header)) % 64) + b"\n"
    labels = io.BytesIO()
    np.save(labels, ARRAYS["y_train"])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x_train.npy", b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + bytes(100))
        archive.writestr("y_train.npy", labels.getvalue())


def jpeg() -> bytes:
    return encoded(Image.fromarray(np.zeros((32, 32, 3), np.uint8)), "JPEG")


def write_tar(path: Path, *more: tuple[str, bytes]) -> bytes:
    rows = [(f"{i:04d}.jpg", jpeg()) for i in range(12)] + [(f"{i:04d}.cls", b"%d" % (i % 3)) for i in range(12)]
    with tarfile.open(path, "w") as tar:
        for name, data in (*rows, *more):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path.read_bytes()


def long_tar(path: Path) -> None:
    """A tar whose last member claims 32 TiB."""
    member = tarfile.TarInfo("0100.jpg")
    member.size = 2**45
    path.write_bytes(_members(path) + member.tobuf(tarfile.GNU_FORMAT) + bytes(20480))


def sparse_tar(path: Path) -> None:
    """A tar whose last member is a sparse file of 1 TiB."""
    sparse = tarfile.TarInfo("0099.jpg")
    sparse.size = 512
    header = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    header[156:157] = b"S"
    header[386:398], header[398:410] = b"00000000000\0", b"00000001000\0"
    header[483:495] = b"\x80" + (2**40).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(_members(path) + bytes(header) + b"\xff\xd8\xff" + bytes(509 + 10240))


def _members(path: Path) -> bytes:
    raw = write_tar(path)
    return raw[: -(-len(raw.rstrip(b"\0")) // 512) * 512]
