"""Data sets known by name: those of torchvision, and the small one that comes with the package.

`embedded:fashion` is Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017; MIT licence) cut down to 1000 training and 200 test
images per class, 28 x 28 grey, compressed at 42.6 dB PSNR; tools/make_embedded.py made the file.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.dataset import UNDIVIDED, BadImage, DataSet, Location, Source, Split
from vitrail.data.decode import raise_if_of_the_machine, to_rgb
from vitrail.data.sources.folder import FileReader
from vitrail.schema import near

EMBEDDED = ("fashion",)

_BOOLEAN = {"train": {"train": True}, "test": {"train": False}}
_WORDS = {"train": {"split": "train"}, "val": {"split": "val"}, "test": {"split": "test"}}
_WHOLE: dict[str, dict[str, Any]] = {UNDIVIDED: {}}


def _words(*splits: str) -> dict[str, dict[str, Any]]:
    return {split: _WORDS[split] for split in splits}


TORCHVISION: dict[str, dict[str, dict[str, Any]]] = {  # name -> split -> the constructor's arguments for it
    **dict.fromkeys(("CIFAR10", "CIFAR100", "EMNIST", "FashionMNIST", "KMNIST", "MNIST", "USPS"), _BOOLEAN),
    **dict.fromkeys(("FER2013", "Food101", "GTSRB", "STL10", "SVHN", "StanfordCars"), _words("train", "test")),
    **dict.fromkeys(("DTD", "FGVCAircraft", "Flowers102", "PCAM", "RenderedSST2"), _words("train", "val", "test")),
    **dict.fromkeys(("ImageNet", "Imagenette"), _words("train", "val")),
    **dict.fromkeys(("Caltech101", "Caltech256", "EuroSAT", "FakeData", "SEMEION", "SUN397"), _WHOLE),
    "Country211": {**_words("train", "test"), "val": {"split": "valid"}},
    "OxfordIIITPet": {"train": {"split": "trainval"}, "test": {"split": "test"}},
    "Places365": {"train": {"split": "train-standard"}, "val": {"split": "val"}},
}


class EmbeddedReader:
    """Reads image number i from the mosaic in the package; nothing but the name travels to other processes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._images: NDArray[np.uint8] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_images": None}

    def images(self) -> NDArray[np.uint8]:
        """[images, height, width]"""
        if self._images is None:
            with _embedded(self.name) as stored:
                side, columns = int(stored["side"]), int(stored["columns"])
                mosaic = np.asarray(Image.open(io.BytesIO(stored["mosaic"].tobytes())).convert("L"))
            tiles = mosaic.reshape(-1, side, columns, side).swapaxes(1, 2)
            self._images = np.ascontiguousarray(tiles).reshape(-1, side, side)
        return self._images

    def __call__(self, index: int) -> Image.Image:
        return Image.fromarray(self.images()[index]).convert("RGB")


def open_embedded(location: Location) -> DataSet:
    """A data set that comes with the package."""
    name = str(location.path)
    if name not in EMBEDDED:
        raise ValueError(f"no data set {name!r} in the package (there is {', '.join(EMBEDDED)}){near(name, EMBEDDED)}")
    reader = EmbeddedReader(name)
    splits, start = {}, 0
    with _embedded(name) as stored:
        classes = tuple(str(c) for c in stored["classes"])
        for split in ("train", "test"):
            labels = stored[f"y_{split}"].astype(np.int64)
            keys = [f"{split}/{i}" for i in range(len(labels))]
            splits[split] = Split(split, reader, np.arange(start, start + len(labels)), keys, labels)
            start += len(labels)
    return DataSet(location.uri, classes, splits)


class TorchvisionReader:
    """Reads image number i from torchvision data sets that follow one another, each made again in its own process."""

    def __init__(self, name: str, arguments: tuple[dict[str, Any], ...], starts: tuple[int, ...]) -> None:
        self.name, self.arguments, self.starts = name, arguments, starts
        self._made: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}

    def __call__(self, index: int) -> Image.Image:
        which = int(np.searchsorted(self.starts, index, side="right")) - 1
        if which not in self._made:
            self._made[which] = _make(self.name, self.arguments[which])
        try:
            return to_rgb(self._made[which][index - self.starts[which]][0])
        except Exception as error:  # each data set decodes in its own way
            raise_if_of_the_machine(error, f"image {index}")
            raise BadImage(str(index), f"torchvision cannot read it ({' '.join(str(error).split())[:80]})") from None


def open_torchvision(location: Location) -> DataSet:
    """A classification data set of torchvision, from `root` (default: $VITRAIL_DATA, else `data`).

    Nothing is downloaded unless `download=true` is asked for. Other options go to torchvision's constructor. Some sets
    are published as pickles (CIFAR); torchvision itself reads those, after comparing their checksums.
    """
    name, uri = str(location.path), location.uri
    if name not in TORCHVISION:
        raise ValueError(f"no torchvision data set {name!r} (known: {', '.join(TORCHVISION)}){near(name, TORCHVISION)}")
    arguments, root = _arguments(name, location.options)
    splits, starts, of_splits = {}, [0], []
    classes: list[str] = []
    names: list[str] = []
    for split, chosen in TORCHVISION[name].items():
        data = _constructed(name, {**arguments, **chosen}, uri, root)
        labels, files = _labels(data), _files(data)
        names += files
        classes = classes or _classes(data, labels)
        starts.append(starts[-1] + len(labels))
        of_splits.append({**arguments, **chosen} | ({"download": False} if "download" in arguments else {}))
        keys = files or [f"{split}/{i}" for i in range(len(labels))]
        splits[split] = (np.arange(starts[-2], starts[-1]), keys, labels)
    reader: Any = TorchvisionReader(name, tuple(of_splits), tuple(starts[:-1]))
    if len(names) == starts[-1]:  # plain files are better read as such: checked, remembered, upright
        reader = FileReader("", tuple(names))
    return DataSet(uri, tuple(classes), {s: Split(s, reader, *parts) for s, parts in splits.items()})


EMBEDDED_SOURCE = Source(
    {"embedded:fashion": "12,000 images of Fashion-MNIST, shipped with the package"}, open_embedded
)
TORCHVISION_SOURCE = Source(
    {"torchvision:NAME": "a data set of torchvision, e.g. torchvision:CIFAR10?root=data"},
    open_torchvision,
    options=None,
)


def _embedded(name: str) -> Any:
    return np.load(Path(__file__).parents[1] / "embedded" / f"{name}.npz", allow_pickle=False)


def _make(name: str, arguments: dict[str, Any]) -> Any:
    import torchvision.datasets

    return getattr(torchvision.datasets, name)(**arguments)


def _arguments(name: str, options: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    import torchvision.datasets

    kind = getattr(torchvision.datasets, name)
    accepted = set(inspect.signature(kind).parameters)
    if "kwargs" in accepted:  # passed on to the class it extends
        accepted |= set(inspect.signature(kind.__base__).parameters)
    fixed = {key for chosen in TORCHVISION[name].values() for key in chosen}
    accepted -= {"transform", "target_transform", "transforms", "loader", "args", "kwargs", "self", *fixed}
    for key in options:
        if key not in accepted:
            known = ", ".join(sorted(accepted))
            raise ValueError(f"torchvision:{name} has no option {key!r} (it has {known}){near(key, accepted)}")
    arguments: dict[str, Any] = {key: _plain(value) for key, value in options.items()}
    root = str(arguments.get("root", os.environ.get("VITRAIL_DATA", "data")))
    if "root" in accepted:
        arguments["root"] = root
    if "download" in accepted:
        arguments["download"] = arguments.get("download", False) is True
    return arguments, root


def _plain(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if "," in text:
        return tuple(_plain(part) for part in text.split(","))
    return int(text) if text.lstrip("-").isdigit() else text


def _constructed(name: str, arguments: dict[str, Any], uri: str, root: str) -> Any:
    try:
        return _make(name, arguments)
    except ModuleNotFoundError as error:
        raise ValueError(f"{uri} needs the package {error.name}; install it") from None
    except (RuntimeError, OSError) as error:
        if arguments.get("download"):
            raise OSError(f"{uri} could not be downloaded to {root}: {' '.join(str(error).split())}") from None
        remedy = "add download=true to fetch it" if "download" in arguments else "put its files there by hand"
        raise FileNotFoundError(f"{uri} is not in {root}; {remedy}, or name its folder with root=FOLDER") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{uri}: torchvision says {' '.join(str(error).split())}") from None


def _labels(data: Any) -> NDArray[np.int64]:
    for attribute in ("targets", "labels", "_labels", "y"):
        values = getattr(data, attribute, None)
        if values is not None and len(values) == len(data):
            return np.asarray(values, dtype=np.int64)
    pairs = getattr(data, "_samples", None) or (data[i] for i in range(len(data)))
    return np.asarray([int(pair[1]) for pair in pairs], dtype=np.int64)


def _files(data: Any) -> list[str]:
    for attribute in ("samples", "_samples", "_image_files", "_images"):
        listed = getattr(data, attribute, None)
        if isinstance(listed, list) and len(listed) == len(data):
            paths = [item[0] if isinstance(item, tuple) else item for item in listed]
            if all(isinstance(path, (str, Path)) for path in paths):
                return [str(path) for path in paths]
    return []


def _classes(data: Any, labels: NDArray[np.int64]) -> list[str]:
    for attribute in ("classes", "categories"):
        names = getattr(data, attribute, None)
        if names is not None and len(names) > int(labels.max()):
            return [str(name[0]) if isinstance(name, tuple) else str(name) for name in names]
    return [str(i) for i in range(int(labels.max()) + 1)]
