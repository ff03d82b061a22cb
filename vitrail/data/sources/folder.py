"""Image folders: CLASS/*.jpg, or train, val and test folders of such; images without any folder have no labels."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.dataset import SPLIT_NAMES, UNDIVIDED, UNLABELLED, DataSet, Location, Source, Split, split_called
from vitrail.data.decode import HEIF_SUFFIXES, INSTALL_HEIF, decode, reads_heif
from vitrail.data.stack import StackForm, read_pixels
from vitrail.files import file_size

SUFFIXES = frozenset(
    ".jpg .jpeg .jfif .png .bmp .gif .tif .tiff .webp .avif .ppm .pgm .pbm .pnm .jp2 .tga".split()  # noqa: SIM905
)
_LINKS = 5  # that are named


@dataclass(frozen=True)
class FileReader:
    """Reads image number i from `root / names[i]`. `at_least` is that of `decode`."""

    root: str
    names: tuple[str, ...]
    at_least: int | None = None
    form: StackForm | None = None  # channels and depth that images keep; none: all become RGB of eight bits

    def path(self, index: int) -> Path:
        return Path(self.root) / self.names[index]

    def stamps(self, index: NDArray[np.int64]) -> list[int]:
        """The sizes of files; -1 for one that is not there."""
        return [file_size(self.path(i)) for i in index.tolist()]

    def __call__(self, index: int) -> Image.Image:
        return self.decoded(self.path(index), self.names[index], self.at_least)

    def decoded(
        self, path: Path, key: str, at_least: int | None = None, digest: hashlib.blake2b | None = None
    ) -> Image.Image:
        """The image in a file, in the form that this reader gives. Raises `BadImage`."""
        if self.form is None:
            return decode(path, key, at_least=at_least, digest=digest)
        return self.form.image(read_pixels(path, key, digest), key)

    def raw(self, index: int) -> NDArray[Any]:
        """Pixels [height, width, channels] in the depth of the file."""
        return read_pixels(self.path(index), self.names[index])

    def formed(self, form: StackForm) -> FileReader:
        """A reader of the same files that keeps their channels and depth."""
        return replace(self, form=form)


def decoded_at(split: Split, least: int | None) -> Split:
    """The split with JPEG files decoded at a fraction of their size that leaves sides of `least` (none: whole)."""
    if least is None or not isinstance(split.reader, FileReader):
        return split
    return replace(split, reader=replace(split.reader, at_least=least))


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key in which `image2` comes before `image10`, and names that differ only in zeros or case stay apart."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", name)
    return (*((0, int(n), "") if n else (1, 0, t) for n, t in parts), (2, 0, name))


def image_files(folder: str | Path) -> list[Path]:
    """Every image file below a folder, hidden ones left out, in natural order."""
    return list_images(folder)[0]


def list_images(folder: str | Path) -> tuple[list[Path], list[str]]:
    """What `image_files` gives, and notes on the files that were left out."""
    walk = _Walk(Path(folder))
    names = sorted(walk.images("."), key=natural)
    return [Path(folder) / name for name in names], walk.notes()


def open_folder(location: Location) -> DataSet:
    """The images below a folder; a class is named by its folder, in natural order. Without class folders: unlabelled.

    Everything below a class folder belongs to the class. Natural order differs from torchvision's plain order where
    names hold numbers of different lengths. Raises `ValueError` for a folder that holds no classes.
    """
    root, uri = location.path, location.uri
    top = _folders(root)
    named = {name: split for name in top if (split := split_called(name))}
    walk = _Walk(root)
    notes: list[str] = []
    if _is_divided(root, named):
        listed = _divided(root, named, uri, walk, notes)
        if others := [name for name in top if name not in named]:
            notes.append(f"ignored beside the splits: {some(others)}")
    else:
        listed = {UNDIVIDED: {name: list(walk.images(name)) for name in top}}
    loose = [f for f in _files(root) if _is_image(f)]
    if unread := sum(_is_heif(f) and not _is_image(f) for f in _files(root)):
        walk.heif["."] = unread
    populated = {split: {c: files for c, files in classes.items() if files} for split, classes in listed.items()}
    if loose and not any(populated.values()):
        notes.append("the images have no labels (no class folders): only objectives without labels learn from them")
        return _assemble(root, uri, {UNDIVIDED: {UNLABELLED: loose}}, [*notes, *walk.notes()])
    _reject_unusable(root, populated, walk)
    if loose:
        notes.append(f"ignored {len(loose)} images outside class folders, e.g. {loose[0]}")
    empty = sorted({c for split in listed.values() for c, files in split.items() if not files})
    heic = [name for name in empty if name in {PurePath(folder).name for folder in walk.heif}]
    if heic:
        notes.append(f"left out {some(heic)}, where all images are HEIC")
    if others := [name for name in empty if name not in heic]:
        notes.append(f"ignored folders without images: {some(others)}")
    return _assemble(root, uri, populated, [*notes, *walk.notes()])


SOURCE = Source(
    {"FOLDER": "CLASS/image.jpg, or train, val and test folders of class folders; images alone have no labels"},
    open_folder,
    lambda location: location.is_dir,
)


def _is_divided(root: Path, named: dict[str, str]) -> bool:
    """Whether `train` means a split. It may be a class of its own: car, bus, train."""
    train = [name for name, split in named.items() if split == "train"]
    if not train:
        return bool(named) and len(named) == len(_folders(root)) and all(_folders(root / name) for name in named)
    if not _folders(root / train[0]):
        return False
    return len(named) > 1 or not any(_is_image(f) for f in _files(root / train[0]))


def _divided(
    root: Path, named: dict[str, str], uri: str, walk: _Walk, notes: list[str]
) -> dict[str, dict[str, list[str]]]:
    listed: dict[str, dict[str, list[str]]] = {}
    for split in SPLIT_NAMES:
        folders = [name for name, meant in named.items() if meant == split]
        if len(folders) > 1:
            raise ValueError(f"{uri} has several {split} folders ({', '.join(sorted(folders))}); keep one")
        if not folders:
            continue
        classes = {c: list(walk.images(f"{folders[0]}/{c}")) for c in _folders(root / folders[0])}
        loose = sum(_is_image(f) for f in _files(root / folders[0]))
        if loose:
            notes.append(f"ignored {loose} images in {folders[0]}/ that are in no class folder")
        if any(classes.values()):
            listed[split] = classes
        else:
            notes.append(f"ignored {folders[0]}/, which has no class folders with images")
    if "train" not in listed:
        raise ValueError(
            f"{uri} has {' and '.join(listed) or 'splits'} but no train folder of class folders; "
            + (walk.heif_note() if walk.heif else "add train/CLASS/")
        )
    return listed


def _reject_unusable(root: Path, listed: dict[str, dict[str, list[str]]], walk: _Walk) -> None:
    train = listed.get("train", listed.get(UNDIVIDED, {}))
    if not train and walk.heif:
        raise ValueError(f"{root} holds no other images in class folders: {walk.heif_note()}")
    if not train:
        raise ValueError(f"{root} holds no images in class folders; expected {root}/CLASS/*.jpg (or .png, ...)")
    for split in ("val", "test"):
        unknown = sorted(set(listed.get(split, {})) - set(train), key=natural)
        if unknown:
            raise ValueError(
                f"{root}: {len(unknown)} classes of {split} are not in train ({some(unknown)}); "
                "add training images, or remove or rename those folders"
            )


def _assemble(root: Path, uri: str, listed: dict[str, dict[str, list[str]]], notes: list[str]) -> DataSet:
    classes = sorted({c for split in listed.values() for c in split}, key=natural)
    number = {name: i for i, name in enumerate(classes)}
    names: list[str] = []
    labels: list[int] = []
    bounds = {}
    for split, members in listed.items():
        start = len(names)
        for name in sorted(members, key=natural):
            names += sorted(members[name])  # the order of the disk must not matter
            labels += [number[name]] * len(members[name])
        bounds[split] = (start, len(names))
        missing = [c for c in classes if c not in members]
        if missing:
            notes.append(f"{split} has no images of {some(missing)}")
    reader = FileReader(str(root.absolute()), tuple(names))
    splits = {
        split: Split(split, reader, np.arange(a, b), names[a:b], np.asarray(labels[a:b], np.int64))
        for split, (a, b) in bounds.items()
    }
    return DataSet(uri, tuple(classes), splits, notes=tuple(notes))


class _Walk:
    """Lists images below folders of a root, as paths relative to it, and counts what it leaves out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hidden = 0
        self.others: Counter[str] = Counter()
        self.heif: Counter[str] = Counter()  # by listed folder, HEIC files that cannot be decoded here
        self.skipped_links: dict[str, str] = {}  # path -> why

    def images(self, folder: str) -> Iterator[str]:
        top = self.root / folder
        seen: set[str] = set()
        waiting = [top]
        for start in waiting:  # it grows by links, which are read after all that is no link
            if start.is_symlink() and (start, folder) != (top, ".") and self._skips(start, top, seen):
                continue
            for here, folders, files in os.walk(start):
                real = os.path.realpath(here)
                if real in seen:
                    folders.clear()
                    continue
                seen.add(real)
                folders[:] = sorted(f for f in folders if not _is_hidden(f))
                waiting += [path for f in folders if (path := Path(here, f)).is_symlink()]
                yield from self._listed(Path(here), files, folder)

    def _listed(self, here: Path, files: Sequence[str], folder: str) -> Iterator[str]:
        for name in files:
            if _is_hidden(name):
                self.hidden += 1
            elif _is_image(name):
                yield (here / name).relative_to(self.root).as_posix()
            elif _is_heif(name):
                self.heif[folder] += 1
            else:
                self.others[Path(name).suffix.lower() or name] += 1

    def _skips(self, link: Path, top: Path, seen: Collection[str]) -> bool:
        """Whether a link leads back to folders that it is in, or to one that was read."""
        target = Path(os.path.realpath(link))
        inside = [os.path.realpath(link.parent), *([] if link == top else [os.path.realpath(top)])]
        if any(target in (Path(real), *Path(real).parents) for real in inside):
            reason = "a folder above it"
        elif str(target) in seen:
            reason = "a folder that is read already"
        else:
            return False
        self.skipped_links[link.relative_to(self.root).as_posix()] = reason
        return True

    def notes(self) -> list[str]:
        """One sentence on each kind of files that were left out; links are named one by one."""
        notes = []
        if self.hidden:
            notes.append(f"ignored {self.hidden} hidden files")
        if self.others:
            kinds = some([kind for kind, _ in self.others.most_common()])
            notes.append(f"ignored {self.others.total()} files that are not images ({kinds})")
        if self.heif:
            notes.append(self.heif_note())
        links = list(self.skipped_links.items())
        notes += [f"{name} is a link to {reason} and was not followed" for name, reason in links[:_LINKS]]
        if len(links) > _LINKS:
            notes.append(f"and {len(links) - _LINKS} more links were not followed")
        return notes

    def heif_note(self) -> str:
        """How many HEIC files there are, and what reads them."""
        return f"{self.heif.total()} files are HEIC; {INSTALL_HEIF} to read them"


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def has_image_suffix(name: str | PurePath) -> bool:
    """Whether a file of this name is taken for an image: HEIC where it can be decoded."""
    return PurePath(name).suffix.lower() in SUFFIXES or (_is_heif(name) and reads_heif())


def _is_heif(name: str | PurePath) -> bool:
    return PurePath(name).suffix.lower() in HEIF_SUFFIXES


def _is_image(name: str) -> bool:
    return not _is_hidden(name) and has_image_suffix(name)


def _folders(folder: Path) -> list[str]:
    return sorted((e.name for e in os.scandir(folder) if e.is_dir() and not _is_hidden(e.name)), key=natural)


def _files(folder: Path) -> list[str]:
    return sorted(e.name for e in os.scandir(folder) if e.is_file())


def some(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
