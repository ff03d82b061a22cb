"""Files that are no files, archives that lie, labels that are none: one sentence each, and nothing hangs."""

from __future__ import annotations

import io
import json
import os
import socket
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.cli import run as command
from vitrail.data.check.scan import copied_files, scan
from vitrail.data.dataset import BadImage
from vitrail.data.decode import decode, stored_mode
from vitrail.data.open import open_data

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (30, 16, 16, 3), np.uint8), np.arange(30) % 3


@pytest.fixture
def odd(photos: Path, tmp_path: Path) -> dict[str, Path]:
    """Photographs with a pipe, a socket, a folder and links among them."""
    root = tmp_path / "odd"
    for kind in ("blue", "green", "red"):
        (root / kind).mkdir(parents=True)
        for path in (photos / kind).iterdir():
            os.link(path, root / kind / path.name)
    paths = {name: root / "blue" / f"{name}.jpg" for name in ("pipe", "socket", "folder", "device", "loop", "link")}
    os.mkfifo(paths["pipe"])
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(root / "blue")  # paths of sockets are short
    listener.bind("socket.jpg")
    listener.close()
    os.chdir(tmp_path)
    paths["folder"].mkdir()
    paths["device"].symlink_to("/dev/zero")
    paths["loop"].symlink_to(paths["loop"])
    paths["link"].symlink_to(root / "green" / "00.jpg")
    (root / "blue" / "up").symlink_to(root, target_is_directory=True)
    return paths


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pipe", "a pipe, not a file"),
        ("socket", "a socket, not a file"),
        ("folder", "a folder"),
        ("device", "a device"),
    ],
)
def test_only_files_are_opened_as_images(name: str, reason: str, odd: dict[str, Path]) -> None:
    with pytest.raises(BadImage, match=reason):
        decode(odd[name], name)
    assert stored_mode(odd[name]) == ""


def test_a_scan_ends_and_reports_what_is_no_file(odd: dict[str, Path]) -> None:
    data = open_data(str(odd["pipe"].parents[1]))
    reasons = dict(scan(data))
    named = {Path(key).name: reason for key, reason in reasons.items() if "/up/" not in key}
    assert named["pipe.jpg"] == "a pipe, not a file"
    assert named["socket.jpg"] == "a socket, not a file"
    assert named["device.jpg"] == "a device, not a file"
    assert "link.jpg" not in named  # it leads to a file
    copied_files(data)


def test_a_pipe_is_no_data_set(odd: dict[str, Path]) -> None:
    os.mkfifo(odd["pipe"].parent / "table.csv")
    with pytest.raises(ValueError, match=r"table.csv is a pipe; name a file or a folder"):
        open_data(odd["pipe"].parent / "table.csv")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "x" * 5000 + "/y"])
def test_names_that_no_file_can_have_are_a_sentence(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="no data at"):
        open_data(name)


def edited(path: Path, change: Callable[[bytearray, int], None]) -> None:
    np.savez_compressed(path, x_train=X, y_train=Y)
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


@pytest.mark.parametrize("change", [damaged_deflate, encrypted, unknown_method])
def test_a_damaged_npz_is_a_sentence(change: Callable[[bytearray, int], None], tmp_path: Path) -> None:
    edited(tmp_path / "a.npz", change)
    with pytest.raises(ValueError, match=r"cannot be read as plain arrays"):
        open_data(tmp_path / "a.npz")


def test_an_npz_whose_header_lies_is_not_believed(tmp_path: Path) -> None:
    header = b"{'descr':'|u1','fortran_order':False,'shape':(100000000,32,32,3)}"
    header += b" " * (-(11 + len(header)) % 64) + b"\n"
    labels = io.BytesIO()
    np.save(labels, Y)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x_train.npy", b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + bytes(100))
        archive.writestr("y_train.npy", labels.getvalue())
    with pytest.raises(ValueError, match=r"header of x_train claims 307200000000 bytes"):
        open_data(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"y_train": np.array(3)}, "y_train must have a row per image"),
        ({"y_train": Y.astype(np.uint64) + np.uint64(2**63)}, r"y_train\[2\] is 9223372036854775810, for 30 images"),
        ({"y_train": np.where(Y == 2, 200_000_000, Y)}, r"y_train\[2\] is 200000000, for 30 images; labels count"),
        ({"x_train": np.zeros((30, 0, 5, 3), np.uint8)}, r"images without pixels, \(0, 5, 3\)"),
        ({"classes": np.array(["a", "b", "a"])}, "classes has 'a' twice"),
    ],
)
def test_arrays_that_cannot_be_a_data_set_are_named(
    arrays: dict[str, np.ndarray], sentence: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", **({"x_train": X, "y_train": Y} | arrays))
    with pytest.raises(ValueError, match=sentence):
        open_data(tmp_path / "a.npz")


def jpeg() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(stream, "JPEG")
    return stream.getvalue()


def write_tar(path: Path, *more: tuple[str, bytes]) -> bytes:
    rows = [(f"{i:04d}.jpg", jpeg()) for i in range(12)] + [(f"{i:04d}.cls", b"%d" % (i % 3)) for i in range(12)]
    with tarfile.open(path, "w") as tar:
        for name, data in (*rows, *more):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path.read_bytes()


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        (b"null", "a label of 77.json is None, neither text nor a whole number"),
        (b"NaN", "a label of 77.json is nan"),
        (b'{"a": 1}', "a label of 77.json is {'a': 1}"),
        (b"true", "a label of 77.json is True"),
        (b"[" * 100_000 + b"]" * 100_000, "cannot be read as a plain tar file"),
    ],
)
def test_labels_in_a_tar_are_text_or_whole_numbers(label: bytes, sentence: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", ("77.jpg", jpeg()), ("77.json", b'{"label":' + label + b"}"))
    with pytest.raises(ValueError, match=sentence):
        open_data(tmp_path / "a.tar")


def test_a_tar_with_a_key_twice_or_a_huge_label_is_rejected(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", ("0000.jpg", jpeg()), ("0000.cls", b"2"))
    with pytest.raises(ValueError, match=r"0000.jpg is there twice"):
        open_data(tmp_path / "a.tar")
    write_tar(tmp_path / "b.tar", ("77.jpg", jpeg()), ("77.cls", b"1" * 2**21))
    with pytest.raises(ValueError, match=r"77.cls is no label, it has 2097152 bytes"):
        open_data(tmp_path / "b.tar")


def test_members_that_are_longer_than_their_tar_are_not_read(tmp_path: Path) -> None:
    raw = write_tar(tmp_path / "base.tar")
    end = -(-len(raw.rstrip(b"\0")) // 512) * 512
    member = tarfile.TarInfo("0100.jpg")
    member.size = 2**45
    (tmp_path / "long.tar").write_bytes(raw[:end] + member.tobuf(tarfile.GNU_FORMAT) + bytes(20480))
    sparse = tarfile.TarInfo("0099.jpg")
    sparse.size = 512
    header = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    header[156:157] = b"S"
    header[386:398], header[398:410] = b"00000000000\0", b"00000001000\0"
    header[483:495] = b"\x80" + (2**40).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "sparse.tar").write_bytes(raw[:end] + bytes(header) + b"\xff\xd8\xff" + bytes(509 + 10240))
    for name in ("long.tar", "sparse.tar"):
        with pytest.raises(ValueError, match=rf"{name} cannot be read as a plain tar file"):
            open_data(tmp_path / name)


def test_a_check_of_a_folder_with_a_pipe_ends(odd: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    command(["check", str(odd["pipe"].parents[1]), "--json"])
    assert "a pipe, not a file" in json.dumps(json.loads(capsys.readouterr().out))
