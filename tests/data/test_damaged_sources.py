"""Files that are no files, archives that lie, labels that are none: one sentence each, and nothing hangs."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hostile import (
    ARRAYS,
    damaged_deflate,
    edited,
    encrypted,
    jpeg,
    long_tar,
    lying_npz,
    sparse_tar,
    unknown_method,
    write_tar,
)

from vitrail.cli import run as command
from vitrail.data.check.scan import copied_files, scan
from vitrail.data.dataset import BadImage
from vitrail.data.decode import decode, stored_form
from vitrail.data.open import open_data
from vitrail.data.pack import pack

X, Y = ARRAYS["x_train"], ARRAYS["y_train"]


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
    assert stored_form(odd[name]) == ("", (0, 0))


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


@pytest.mark.parametrize("change", [damaged_deflate, encrypted, unknown_method])
def test_a_damaged_npz_is_a_sentence(change: Callable[[bytearray, int], None], tmp_path: Path) -> None:
    edited(tmp_path / "a.npz", change)
    with pytest.raises(ValueError, match=r"cannot be read as plain arrays"):
        open_data(tmp_path / "a.npz")


def test_an_npz_whose_header_lies_is_not_believed(tmp_path: Path) -> None:
    lying_npz(tmp_path / "a.npz")
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
    for write in (long_tar, sparse_tar):
        write(tmp_path / "a.tar")
        with pytest.raises(ValueError, match=r"a.tar cannot be read as a plain tar file"):
            open_data(tmp_path / "a.tar")


def test_a_listing_of_packed_data_without_bottom_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "pack.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match=r"pack.json cannot be used: nested too deeply"):
        open_data(tmp_path)


def test_an_array_of_packed_data_with_a_damaged_header_is_a_sentence(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **ARRAYS)
    pack(open_data(tmp_path / "a.npz"), tmp_path / "packed", workers=1)
    path = tmp_path / "packed" / "train-labels.npy"
    path.write_bytes(path.read_bytes().replace(b"'fortran_order'", b"(fortran_order'"))
    with pytest.raises(ValueError, match=r"train-labels.npy is no plain array"):
        open_data(tmp_path / "packed")


def test_a_check_of_a_folder_with_a_pipe_ends(odd: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    command(["check", str(odd["pipe"].parents[1]), "--json"])
    assert "a pipe, not a file" in json.dumps(json.loads(capsys.readouterr().out))


@contextmanager
def no_handles() -> Iterator[None]:
    """No file can be opened inside: the process has all it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open() as highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno(), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def as_tar(_: Path, out: Path) -> Path:
    write_tar(out / "photos.tar")
    return out / "photos.tar"


def as_parquet(photos: Path, out: Path) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    images = [{"bytes": path.read_bytes(), "path": path.name} for path in sorted(photos.glob("*/*.jpg"))]
    table = pyarrow.table({"image": images, "label": [number % 2 for number in range(len(images))]})
    parquet.write_table(table, out / "photos.parquet")
    return out / "photos.parquet"


@pytest.mark.parametrize("form", [lambda photos, _: photos, as_tar, as_parquet])
def test_a_lack_of_file_handles_is_no_fault_of_an_image_and_not_remembered(
    form: Callable[[Path, Path], Path], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = open_data(str(form(photos, tmp_path)))
    with no_handles(), pytest.raises(OSError, match="too many open files; close other programs"):
        next(iter(data.splits.values())).read(0)
    with no_handles(), pytest.raises(OSError, match="too many open files"):
        scan(data, workers=1)
    assert scan(data, workers=1) == []


def test_too_little_memory_for_an_image_is_not_remembered(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = open_data(str(photos))
    out = tmp_path / "packed"

    def short_of_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("vitrail.data.decode.to_rgb", short_of_memory)
        assert {reason for _, reason in scan(data)} == {"needs more memory than there is"}
        with pytest.raises(OSError, match="too little memory to decode"):
            pack(data, out)
    assert scan(data) == []
    assert pack(data, out).skipped == ()
