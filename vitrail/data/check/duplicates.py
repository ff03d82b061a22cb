"""Fingerprints of images, taken in one pass, and what they show: copies, near copies, and images among strangers.

All comparisons are chunked products and sorted tables: a hundred thousand images take about a minute.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.check.scan import Progress, read_all
from vitrail.data.dataset import BadImage, DataSet, Split
from vitrail.data.decode import stored_form
from vitrail.data.sources.folder import FileReader, decoded_at
from vitrail.data.stack import pixels_of

SIDE = 16  # of the thumbnails
ENOUGH = 512  # pixels that sides of a JPEG keep where it is decoded smaller, to be compared


@dataclass(frozen=True)
class Fingerprints:
    """One row per image, through all splits in order."""

    splits: tuple[str, ...]
    split: NDArray[np.int64]  # [images] position in `splits`
    row: NDArray[np.int64]  # [images] row in its split
    keys: list[str]
    labels: NDArray[np.int64]  # [images] or [images, classes]
    reason: list[str]  # why it is unreadable; empty for a good image
    mode: list[str]  # how its file stores colours; empty where there is no file
    size: NDArray[np.int64]  # [images, 2] width, height
    digest: NDArray[np.uint64]  # [images] of the decoded pixels: equal for equal pictures (in files of one kind)
    outline: NDArray[np.uint64]  # [images] difference hash: a few bits apart for similar pictures
    thumbnail: NDArray[np.uint8]  # [images, SIDE, SIDE, 3]

    @property
    def good(self) -> NDArray[np.bool_]:
        """[images] whether it could be read"""
        return np.array([not reason for reason in self.reason], bool)

    def name(self, image: int) -> str:
        """`train: cats/3.jpg`"""
        return f"{self.splits[self.split[image]]}: {self.keys[image]}"


class _Fingerprint(NamedTuple):
    """Of one image; as the columns of `Fingerprints`."""

    reason: str
    mode: str
    size: tuple[int, int] = (0, 0)
    digest: int = 0
    outline: int = 0
    thumbnail: NDArray[np.uint8] = np.zeros((SIDE, SIDE, 3), np.uint8)


def take_fingerprints(data: DataSet, workers: int | None = None, progress: Progress | None = None) -> Fingerprints:
    """Read every image once, in threads."""
    splits = [decoded_at(split, ENOUGH) for split in data.splits.values()]
    places = [(split, row) for split in splits for row in range(len(split))]
    prints = list(read_all(_fingerprint, places, workers, progress))
    sizes = [len(split) for split in data.splits.values()]
    return Fingerprints(
        splits=tuple(data.splits),
        split=np.repeat(np.arange(len(sizes)), sizes),
        row=np.concatenate([np.arange(size) for size in sizes]),
        keys=[key for split in data.splits.values() for key in split.keys],
        labels=np.concatenate([split.labels for split in data.splits.values()]),
        reason=[f.reason for f in prints],
        mode=[f.mode for f in prints],
        size=np.array([f.size for f in prints], np.int64).reshape(-1, 2),
        digest=np.array([f.digest for f in prints], np.uint64),
        outline=np.array([f.outline for f in prints], np.uint64),
        thumbnail=np.array([f.thumbnail for f in prints], np.uint8).reshape(-1, SIDE, SIDE, 3),
    )


def _fingerprint(row_of: tuple[Split, int]) -> _Fingerprint:
    split, row = row_of
    reader = split.reader
    mode, size = "", (0, 0)
    if isinstance(reader, FileReader) and reader.form is None:
        mode, size = stored_form(reader.path(int(split.index[row])))
    try:
        image = split.read(row)
    except BadImage as bad:
        return _Fingerprint(bad.reason, mode)
    digest = hashlib.blake2b(repr(image.size).encode() + pixels_of(image).tobytes(), digest_size=8).digest()
    thumbnail = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), np.uint8)
    size = size if min(size) else image.size
    return _Fingerprint("", mode, size, int.from_bytes(digest, "little"), difference_hash(image), thumbnail)


def difference_hash(image: Image.Image) -> int:
    """64 bits: is each of 8 x 8 places brighter than its right neighbour, in a grey picture shrunk to 9 x 8."""
    tiny = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX), np.int16)
    return int.from_bytes(np.packbits(tiny[:, :-1] > tiny[:, 1:]).tobytes(), "big")


NEAR_BITS = 3  # of 64: at most this many may differ between near duplicates
NEAR_LEVELS = 6.0  # of 255: mean difference of the thumbnails of near duplicates
NEIGHBOURS = 10
_BANDS = 4  # one more than NEAR_BITS, so that near duplicates agree wholly in at least one band
_CROWD = 500  # images that share a band; more are compared with their neighbours in sorted order only
_REFERENCES = 50_000  # images among which neighbours are sought, at most

Images = NDArray[np.int64]


def copies(prints: Fingerprints) -> list[Images]:
    """Groups of two or more images with exactly the same pixels, in the order of their first image."""
    images = np.flatnonzero(prints.good)
    order = images[np.argsort(prints.digest[images], kind="stable")]
    digest = prints.digest[order]
    groups = np.split(order, np.flatnonzero(digest[1:] != digest[:-1]) + 1)
    return sorted((group for group in groups if len(group) > 1), key=lambda group: int(group[0]))


def near_copies(prints: Fingerprints) -> NDArray[np.int64]:
    """[pairs, 2] images that are not equal but hardly differ: resized, recompressed, slightly edited.

    Two images are near where at most 3 bits of their difference hashes and 6 levels of their thumbnails differ. Images
    that agree in 3 bits agree wholly in one of four 16-bit bands, so only images that share a band are compared.
    """
    unique = np.unique(prints.digest[prints.good], return_index=True)[1]
    images = np.sort(np.flatnonzero(prints.good)[unique])  # one of each group of copies
    pairs = [np.zeros((0, 2), np.int64)]
    for band in range(_BANDS):
        value = (prints.outline[images] >> np.uint64(16 * band)) & np.uint64(0xFFFF)
        order = images[np.lexsort((prints.outline[images], value))]
        ordered = np.sort(value)
        groups = np.split(order, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1)
        pairs += [_near_in(prints, group) for group in groups if len(group) > 1]
    return np.unique(np.sort(np.concatenate(pairs), axis=1), axis=0)


def _near_in(prints: Fingerprints, group: Images) -> NDArray[np.int64]:
    if len(group) <= _CROWD:
        first, second = np.triu_indices(len(group), 1)
    else:  # flat or empty pictures share bands by the thousand; the sorted hash brings the most alike together
        first = np.repeat(np.arange(len(group)), 16)
        second = first + np.tile(np.arange(1, 17), len(group))
        first, second = first[second < len(group)], second[second < len(group)]
    a, b = group[first], group[second]
    near = _bits_set(prints.outline[a] ^ prints.outline[b]) <= NEAR_BITS
    a, b = a[near], b[near]
    difference = np.abs(prints.thumbnail[a].astype(np.int16) - prints.thumbnail[b]).mean((1, 2, 3), dtype=np.float64)
    close = difference <= NEAR_LEVELS
    return np.stack([a[close], b[close]], 1)


def _bits_set(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    octets = words[:, None].view(np.uint8)
    return np.unpackbits(octets, axis=1).sum(1).astype(np.int64)


def strangers(prints: Fingerprints, classes: int) -> tuple[list[tuple[int, int]], float]:
    """(image, class it looks like) for images all of whose neighbours are of one other class, and a measure of trust.

    Neighbours are those of the nearest thumbnails (8 x 8, colour, each centred and scaled), copies left out. The second
    value is how often the majority of an image's neighbours has its label: where it is low, thumbnails say little about
    these classes and nothing should be concluded.
    """
    import torch

    images = np.flatnonzero(prints.good)
    if prints.labels.ndim == 2 or len(images) <= NEIGHBOURS:
        return [], 0.0
    small = prints.thumbnail[images].astype(np.float32).reshape(len(images), 8, 2, 8, 2, 3).mean((2, 4))
    features = torch.from_numpy(small.reshape(len(images), -1))
    features = features - features.mean(1, keepdim=True)
    features = torch.nn.functional.normalize(features, dim=1)
    labels = torch.from_numpy(prints.labels[images])
    digest = torch.from_numpy(prints.digest[images].view(np.int64))
    chosen = torch.arange(len(images))
    if len(images) > _REFERENCES:
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:_REFERENCES]
    odd: list[tuple[int, int]] = []
    agree = 0
    for rows in torch.arange(len(images)).split(1024):
        likeness = features[rows] @ features[chosen].T
        likeness[digest[rows, None] == digest[chosen]] = -2  # itself and its copies
        nearest = labels[chosen[likeness.topk(NEIGHBOURS).indices]]  # [rows, neighbours]
        votes = torch.zeros(len(rows), classes, dtype=torch.int64).scatter_add_(1, nearest, torch.ones_like(nearest))
        most, winner = votes.max(1)
        agree += int((winner == labels[rows]).sum())
        strange = (most == NEIGHBOURS) & (winner != labels[rows])
        odd += zip(images[rows[strange].numpy()].tolist(), winner[strange].tolist(), strict=True)
    return odd, agree / len(images)
