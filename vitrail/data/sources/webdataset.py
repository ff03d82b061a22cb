"""Images inside tar files, as WebDataset shards have them, read in any order.

    0001.jpg 0001.cls       its class, a number or a name; or 0001.json with "label" (a list makes it multi-label)
    cat/0001.jpg            without either, the folder is the class: a tar of class folders

A shard whose name or folder says train, val or test (`train-000003.tar`, `val/0.tar`) is part of that split; a
`classes.txt` beside the shards names classes that are numbers, one a line from 0. Only headers are read at first: where
each image begins and how long it is. So there is an epoch, an order and a resume as for any folder.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.dataset import UNDIVIDED, BadImage, DataSet, Location, Source, Split, split_called, split_rows
from vitrail.data.decode import decode, raise_if_of_the_machine
from vitrail.data.sources.folder import has_image_suffix, natural
from vitrail.data.sources.table import labels_of, reject_unseen, repeated
from vitrail.files import file_size, parse_json

LABELS = ("label", "cls", "class")  # of a JSON file, the first that is there
_SHOWN = 5
Member = tuple[str, int, int, str]  # name, first byte, bytes, label or nothing
LONGEST_LABEL = 2**20  # bytes of a .cls or .json file


@dataclass(frozen=True, eq=False)
class TarReader:
    """Reads image number i: `size[i]` bytes from `start[i]` of the file `files[place[i]]`."""

    files: tuple[str, ...]
    keys: tuple[str, ...]
    place: NDArray[np.int64]  # [images]
    start: NDArray[np.int64]  # [images]
    size: NDArray[np.int64]  # [images]

    def stamps(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sizes of encoded images."""
        return self.size[index]

    def stored(self, index: int) -> bytes:
        """The encoded image. Raises `BadImage` where the file cannot be read."""
        try:
            with Path(self.files[self.place[index]]).open("rb") as stream:
                stream.seek(int(self.start[index]))
                return stream.read(int(self.size[index]))
        except OSError as error:
            raise_if_of_the_machine(error, self.keys[index])
            raise BadImage(self.keys[index], f"its file cannot be read ({error.strerror})") from None

    def __call__(self, index: int) -> Image.Image:
        return decode(self.stored(index), self.keys[index])


def inner_files(folder: Path, suffix: str) -> list[Path]:
    """Files of this suffix in a folder, or in folders of it that are called `data` or as a split is."""
    inside = [p for p in folder.iterdir() if p.is_dir() and (p.name == "data" or split_called(p.name))]
    files = [p for place in (folder, *inside) for p in place.glob(f"*{suffix}") if not p.name.startswith(".")]
    return sorted(files, key=lambda p: natural(p.relative_to(folder).as_posix()))


def splits_of(files: Sequence[PurePath], uri: str) -> list[str]:
    """The split of each file, by a word of its name or else by its folder.

    Raises `ValueError` where some have one and others none, or where train is missing.
    """
    splits = []
    for file in files:
        words = [*re.split(r"[^A-Za-z]+", file.stem), file.parent.name]
        splits.append(next((split for word in words if (split := split_called(word))), UNDIVIDED))
    if UNDIVIDED in splits and len(set(splits)) > 1:
        odd = files[splits.index(UNDIVIDED)].name
        raise ValueError(f"{uri}: {odd} says neither train, val nor test, though others do; name it after its split")
    if not {UNDIVIDED, "train"} & set(splits):
        raise ValueError(f"{uri} has {' and '.join(sorted(set(splits)))} but no file whose name says train")
    return splits


def open_tars(location: Location) -> DataSet:
    """The labelled images of tar files. Raises `ValueError` for images without a label, and for damaged files."""
    path, uri = location.path, location.uri
    files = inner_files(path, ".tar") if path.is_dir() else [path]
    members = []
    for file in files:
        with file.open("rb") as stream:
            members.append(tar_members(stream, file_size(file), file.name, uri))
    names = files[0].parent / "classes.txt"
    members = name_classes(members, lambda: names.read_text("utf-8") if names.is_file() else None, str(names))
    return assemble_tars(uri, files, members, partial(TarReader, tuple(str(file.absolute()) for file in files)))


def assemble_tars(
    uri: str, files: Sequence[PurePath], members: list[list[Member]], reader: Callable[..., TarReader]
) -> DataSet:
    """The data set of tar files with these members; `reader` takes keys, place, start and size. Raises `ValueError`."""
    keys: list[str] = []
    texts: list[str] = []
    places: list[tuple[int, int, int]] = []  # file, first byte, bytes
    splits: list[str] = []
    for number, (file, split) in enumerate(zip(files, splits_of(files, uri), strict=True)):
        for key, start, size, text in members[number]:
            inside = split_called(PurePosixPath(key).parent.parent.name)  # a tar of train/CLASS/ and val/CLASS/
            splits.append(inside or UNDIVIDED if split == UNDIVIDED else split)
            keys.append(f"{file.name}/{key}")
            places.append((number, start, size))
            texts.append(text)
    reject_unlabelled(uri, files, members)
    if len(set(splits)) > 1 and UNDIVIDED in splits:
        lost = keys[splits.index(UNDIVIDED)]
        raise ValueError(f"{uri}: {lost} is in no split, though others are; put it below train/, val/ or test/")
    classes, labels, multilabel = labels_of(texts)
    place, start, size = np.array(places, np.int64).T
    read = reader(tuple(keys), place, start, size)
    whole = Split(UNDIVIDED, read, np.arange(len(keys)), keys, labels).divide(split_rows(splits))
    reject_unseen(uri, classes, whole)
    return DataSet(uri, classes, whole, multilabel=multilabel)


def reject_unlabelled(uri: str, files: Sequence[PurePath], members: list[list[Member]]) -> None:
    """Raise `ValueError` where tar files hold no images, or some of their images have no label."""
    texts = {f"{f.name}/{key}": text for f, listed in zip(files, members, strict=True) for key, _, _, text in listed}
    if not texts:
        raise ValueError(f"{uri} holds no images in {len(files)} tar files; expected KEY.jpg with KEY.cls or KEY.json")
    if unlabelled := [key for key, text in texts.items() if not text]:
        raise ValueError(
            f"{uri}: {len(unlabelled)} of {len(texts)} images have no label ({', '.join(unlabelled[:_SHOWN])}); put "
            "KEY.cls or KEY.json beside each KEY.jpg, or each image into a folder named after its class"
        )


SOURCE = Source(
    {"SHARDS, FILE.tar": "WebDataset: KEY.jpg with KEY.cls or KEY.json, split by shard name; or tars of class folders"},
    open_tars,
    lambda location: location.suffix == ".tar" or (location.is_dir and bool(inner_files(location.path, ".tar"))),
)


def tar_members(file: IO[bytes], length: int, called: str, uri: str) -> list[Member]:
    """Every image of a tar file of `length` bytes, in order. Raises `ValueError` where it is damaged or compressed."""
    images: list[tuple[str, str, int, int]] = []
    labels: dict[str, str] = {}
    try:
        for member, start, size in _plain_files(file) or _any_files(file):
            if start + size > length:
                raise ValueError(f"{member} is longer than the file")
            folder, slash, name = member.removeprefix("./").rpartition("/")
            if name.startswith("."):
                continue
            stem = folder + slash + name.partition(".")[0]  # WebDataset: up to the first dot
            if has_image_suffix(PurePosixPath(name)):
                images.append((member, stem, start, size))
            elif name.endswith((".cls", ".json")):
                if size > LONGEST_LABEL:
                    raise ValueError(f"{member} is no label, it has {size} bytes")
                file.seek(start)
                labels[stem] = _label(file.read(size), member) or labels.get(stem, "")
        if twice := repeated([name for name, *_ in images]):
            raise ValueError(f"{twice[0]} is there twice")
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        file.seek(0)
        zipped = file.read(2) == b"\x1f\x8b"
        how = "unpack it with gunzip" if zipped else f"{error}; write or fetch it again"
        raise ValueError(f"{uri}: {called} cannot be read as a plain tar file ({how})") from None
    return [
        (name, start, size, labels.get(stem) or PurePosixPath(name).parent.name) for name, stem, start, size in images
    ]


def _any_files(file: IO[bytes]) -> list[tuple[str, int, int]]:
    """Name, first byte and bytes of every file of a tar."""
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        if odd := next((member.name for member in tar if member.issparse()), None):
            raise ValueError(f"{odd} is sparse")
        return [(member.name, member.offset_data, member.size) for member in tar if member.isfile()]


def _plain_files(file: IO[bytes]) -> list[tuple[str, int, int]] | None:
    """The same of a tar without extended headers (ustar), three times as fast as tarfile; none where it is another."""
    files: list[tuple[str, int, int]] = []
    at = 0
    while True:
        file.seek(at)
        header = file.read(tarfile.BLOCKSIZE)
        if header.count(0) == tarfile.BLOCKSIZE:
            return files
        kind, checked = header[156:157], b"%06o" % (sum(header) - sum(header[148:156]) + 8 * 32)
        if header[257:262] != b"ustar" or kind not in b"05" or header[148:156].strip(b"\0 ") != checked:
            return None
        try:
            name, folder, size = (header[a:b].partition(b"\0")[0] for a, b in ((0, 100), (345, 500), (124, 136)))
            path, length = (folder + b"/" * bool(folder) + name).decode("utf-8"), int(size, 8)
        except ValueError:
            return None
        if kind == b"0":
            files.append((path, at + tarfile.BLOCKSIZE, length))
        at += tarfile.BLOCKSIZE * (1 + -(-length // tarfile.BLOCKSIZE))


def _label(content: bytes, name: str) -> str:
    text = content.decode("utf-8").strip()
    if name.endswith(".cls"):
        return text
    stored = parse_json(text)
    value = next((stored[key] for key in LABELS if key in stored), "") if isinstance(stored, dict) else ""
    for label in value if isinstance(value, list) else [value]:
        if not isinstance(label, str | int) or isinstance(label, bool):
            raise ValueError(f"a label of {name} is {str(label)[:40]}, neither text nor a whole number")
    return "|".join(str(label).strip() for label in value) + "|" if isinstance(value, list) else str(value).strip()


def name_classes(members: list[list[Member]], read: Callable[[], str | None], file: str) -> list[list[Member]]:
    """Members with names for labels where all are numbers and `read` gives the text of a file of names."""
    if not all(text.isdigit() for listed in members for *_, text in listed) or (content := read()) is None:
        return members
    names = [line.strip() for line in content.splitlines() if line.strip()]
    beyond = next((label for listed in members for *_, label in listed if int(label) >= len(names)), None)
    if beyond is not None:
        raise ValueError(f"{file} names {len(names)} classes, and there is a label {beyond}; labels count from 0")
    return [[(key, start, size, names[int(label)]) for key, start, size, label in listed] for listed in members]
