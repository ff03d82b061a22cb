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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.dataset import UNDIVIDED, BadImage, DataSet, Location, Source, Split, split_called, split_rows
from vitrail.data.decode import decode, raise_if_of_the_machine
from vitrail.data.sources.folder import SUFFIXES, natural
from vitrail.data.sources.table import labels_of, reject_unseen, repeated
from vitrail.files import parse_json

LABELS = ("label", "cls", "class")  # of a JSON file, the first that is there
_SHOWN = 5
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


def splits_of(files: Sequence[Path], uri: str) -> list[str]:
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
    keys: list[str] = []
    texts: list[str] = []
    places: list[tuple[int, int, int]] = []  # file, first byte, bytes
    splits: list[str] = []
    for number, (file, split) in enumerate(zip(files, splits_of(files, uri), strict=True)):
        for key, start, size, text in _members(file, uri):
            inside = split_called(PurePosixPath(key).parent.parent.name)  # a tar of train/CLASS/ and val/CLASS/
            splits.append(inside or UNDIVIDED if split == UNDIVIDED else split)
            keys.append(f"{file.name}/{key}")
            places.append((number, start, size))
            texts.append(text)
    unlabelled = [key for key, text in zip(keys, texts, strict=True) if not text]
    if not keys:
        raise ValueError(f"{uri} holds no images in {len(files)} tar files; expected KEY.jpg with KEY.cls or KEY.json")
    if unlabelled:
        raise ValueError(
            f"{uri}: {len(unlabelled)} of {len(keys)} images have no label ({', '.join(unlabelled[:_SHOWN])}); put "
            "KEY.cls or KEY.json beside each KEY.jpg, or each image into a folder named after its class"
        )
    if len(set(splits)) > 1 and UNDIVIDED in splits:
        lost = keys[splits.index(UNDIVIDED)]
        raise ValueError(f"{uri}: {lost} is in no split, though others are; put it below train/, val/ or test/")
    classes, labels, multilabel = labels_of(_named(texts, files[0].parent / "classes.txt"))
    place, start, size = np.array(places, np.int64).T
    reader = TarReader(tuple(str(f.absolute()) for f in files), tuple(keys), place, start, size)
    whole = Split(UNDIVIDED, reader, np.arange(len(keys)), keys, labels).divide(split_rows(splits))
    reject_unseen(uri, classes, whole)
    return DataSet(uri, classes, whole, multilabel=multilabel)


SOURCE = Source(
    {"SHARDS, FILE.tar": "WebDataset: KEY.jpg with KEY.cls or KEY.json, split by shard name; or tars of class folders"},
    open_tars,
    lambda location: location.suffix == ".tar" or (location.is_dir and bool(inner_files(location.path, ".tar"))),
)


def _members(file: Path, uri: str) -> list[tuple[str, int, int, str]]:
    """(name, first byte, bytes, label or nothing) of every image."""
    images: list[tuple[str, str, int, int]] = []
    labels: dict[str, str] = {}
    length = file.stat().st_size
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                if member.issparse() or member.offset_data + member.size > length:
                    raise ValueError(f"{member.name} is sparse, or longer than the file")
                name = PurePosixPath(member.name)
                if not member.isfile() or name.name.startswith("."):
                    continue
                stem = (name.parent / name.name.partition(".")[0]).as_posix()  # WebDataset: up to the first dot
                if name.suffix.lower() in SUFFIXES:
                    images.append((member.name, stem, member.offset_data, member.size))
                elif name.suffix in (".cls", ".json"):
                    if member.size > LONGEST_LABEL:
                        raise ValueError(f"{member.name} is no label, it has {member.size} bytes")
                    stream = tar.extractfile(member)
                    assert stream is not None  # a plain file
                    labels[stem] = _label(stream, member.name) or labels.get(stem, "")
        if twice := repeated([name for name, *_ in images]):
            raise ValueError(f"{twice[0]} is there twice")
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        zipped = file.open("rb").read(2) == b"\x1f\x8b"
        how = "unpack it with gunzip" if zipped else f"{error}; write or fetch it again"
        raise ValueError(f"{uri}: {file.name} cannot be read as a plain tar file ({how})") from None
    return [
        (name, start, size, labels.get(stem) or PurePosixPath(name).parent.name) for name, stem, start, size in images
    ]


def _label(stream: IO[bytes], name: str) -> str:
    text = stream.read().decode("utf-8").strip()
    if name.endswith(".cls"):
        return text
    stored = parse_json(text)
    value = next((stored[key] for key in LABELS if key in stored), "") if isinstance(stored, dict) else ""
    for label in value if isinstance(value, list) else [value]:
        if not isinstance(label, str | int) or isinstance(label, bool):
            raise ValueError(f"a label of {name} is {str(label)[:40]}, neither text nor a whole number")
    return "|".join(str(label).strip() for label in value) + "|" if isinstance(value, list) else str(value).strip()


def _named(texts: list[str], file: Path) -> list[str]:
    """Labels that are numbers by the names in a file, where there is one."""
    if not file.is_file() or not all(text.isdigit() for text in texts):
        return texts
    names = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    beyond = next((text for text in texts if int(text) >= len(names)), None)
    if beyond is not None:
        raise ValueError(f"{file} names {len(names)} classes, and there is a label {beyond}; labels count from 0")
    return [names[int(text)] for text in texts]
