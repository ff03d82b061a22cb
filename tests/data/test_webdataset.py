"""Images inside tar files: the same images, labels and splits as in the folder they were made from."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.check.scan import scan
from vitrail.data.dataset import BadImage
from vitrail.data.open import open_data, open_source
from vitrail.data.sources.webdataset import tar_members


def write(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def png(colour: tuple[int, int, int]) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (6, 4), colour).save(stream, "PNG")
    return stream.getvalue()


def shard(count: int, start: int = 0) -> dict[str, bytes]:
    """Images whose red is their number and whose class is its remainder by three."""
    made: dict[str, bytes] = {}
    for i in range(start, start + count):
        made |= {f"{i:04d}.png": png((i, 0, 0)), f"{i:04d}.cls": str(i % 3).encode()}
    return made


def test_a_tar_of_class_folders_is_the_folder(photos: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(photos, "photos")
    folder, inside = open_source(str(photos))["all"], open_source(str(tmp_path / "photos.tar"))["all"]
    assert open_source(str(tmp_path / "photos.tar")).classes == ("blue", "green", "red")
    rows = {key.removeprefix("photos.tar/photos/"): row for row, key in enumerate(inside.keys)}
    assert sorted(rows) == sorted(folder.keys)
    for row, key in enumerate(folder.keys):
        assert np.array_equal(np.asarray(folder.read(row)), np.asarray(inside.read(rows[key])))
        assert folder.labels[row] == inside.labels[rows[key]]


def test_shards_keep_the_label_beside_each_image_and_the_split_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "train-0000.tar", shard(9))
    write(tmp_path / "train-0001.tar", shard(9, 9))
    write(tmp_path / "validation-0000.tar", shard(6, 18))
    data = open_source(str(tmp_path))
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 18, "val": 6}
    for split in data.splits.values():
        for row in range(len(split)):
            red = split.read(row).getpixel((0, 0))[0]
            assert data.classes[split.labels[row]] == str(red % 3)


def test_a_file_of_names_names_numbered_classes(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", shard(6))
    (tmp_path / "classes.txt").write_text("wren\ncrow\nauk\n")
    split = open_source(str(tmp_path))["all"]
    names = open_source(str(tmp_path)).classes
    assert [names[label] for label in split.labels] == ["wren", "crow", "auk"] * 2
    (tmp_path / "classes.txt").write_text("wren\ncrow\n")
    with pytest.raises(ValueError, match="names 2 classes, and there is a label 2"):
        open_source(str(tmp_path))


def test_lists_in_json_are_several_labels(tmp_path: Path) -> None:
    labels = (["cat", "dog"], ["dog"], [])
    members: dict[str, bytes] = {}
    for i, names in enumerate(labels):
        members |= {f"{i}.png": png((i, 0, 0)), f"{i}.json": json.dumps({"label": names}).encode()}
    data = open_source(str(write(tmp_path / "a.tar", members)))
    assert data.multilabel
    assert data["all"].labels.tolist() == [[1, 1], [0, 1], [0, 0]]


def test_a_reader_travels_to_other_processes(tmp_path: Path) -> None:
    split = open_source(str(write(tmp_path / "a.tar", shard(4))))["all"]
    assert pickle.loads(pickle.dumps(split.reader))(3).getpixel((0, 0)) == (3, 0, 0)


def test_a_bad_image_inside_is_named_and_found_warnings_before(tmp_path: Path) -> None:
    members = shard(3) | {"0001.png": b"nothing", "0002.png": b""}
    split = open_source(str(write(tmp_path / "a.tar", members)))["all"]
    with pytest.raises(BadImage, match=r"a\.tar/0001\.png: not an image"):
        split.read(1)
    assert scan(split) == [("a.tar/0001.png", "not an image"), ("a.tar/0002.png", "empty file")]


def test_splits_may_be_folders_of_one_tar(tmp_path: Path) -> None:
    members = {f"{part}/{c}/{i}.png": png((i, 0, 0)) for part in ("train", "test") for c in "ab" for i in range(4)}
    assert set(open_source(str(write(tmp_path / "whole.tar", members))).splits) == {"train", "test"}


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"readme.txt": b""}, "holds no images in 1 tar files"),
        ({**shard(2), "odd.png": png((0, 0, 0))}, r"1 of 3 images have no label \(a.tar/odd.png\); put KEY.cls"),
        ({f"train/{c}/0.png": png((0, 0, 0)) for c in "ab"} | {"0.png": png((0, 0, 0)), "0.cls": b"a"}, "in no split"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(tmp_path: Path, members: dict[str, bytes], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        open_source(str(write(tmp_path / "a.tar", members)))


def test_a_compressed_and_a_torn_tar_say_what_to_do(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.tar", shard(3)).read_bytes()
    (tmp_path / "b.tar").write_bytes(gzip.compress(whole))
    with pytest.raises(ValueError, match=r"b\.tar cannot be read as a plain tar file \(unpack it with gunzip"):
        open_source(str(tmp_path / "b.tar"))
    (tmp_path / "c.tar").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match=r"c\.tar cannot be read as a plain tar file \(.*; write or fetch it again"):
        open_source(str(tmp_path / "c.tar"))


def test_a_class_of_val_that_train_lacks_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.tar", shard(2))
    write(tmp_path / "val.tar", shard(3))
    with pytest.raises(ValueError, match=r"1 classes of val are not in train \(2\)"):
        open_data(tmp_path)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("odd", ["", "long name", "umlaut", "link", "large time"])
def test_members_are_those_that_tarfile_lists(form: int, odd: str, tmp_path: Path) -> None:
    names = ["a.jpg", "a.cls", "folder/b.jpg", f"{'deep/' * 24}c.jpg", ".hidden.jpg"]
    names += {"long name": [f"{'x' * 120}.jpg"] * (form != tarfile.USTAR_FORMAT), "umlaut": ["ä.jpg"]}.get(odd, [])
    with tarfile.open(tmp_path / "train.tar", "w", format=form) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for i, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = 300 * i + 1, 1.5 if odd == "large time" else 0
            tar.addfile(member, io.BytesIO(b"7" * member.size))
        if odd == "link":
            link = tarfile.TarInfo("d.jpg")
            link.type, link.linkname = tarfile.SYMTYPE, "a.jpg"
            tar.addfile(link)
    with tarfile.open(tmp_path / "train.tar") as tar:
        images = [m for m in tar if m.isfile() and m.name.endswith(".jpg") and not m.name.startswith(".")]
    with (tmp_path / "train.tar").open("rb") as stream:
        found = tar_members(stream, (tmp_path / "train.tar").stat().st_size, "train.tar", "uri")
    assert [(name, start, size) for name, start, size, _ in found] == [(m.name, m.offset_data, m.size) for m in images]
    assert found[0][3] == "7" * 301
