"""Mean corruption error (mCE) on the files of CIFAR-10-C, CIFAR-100-C and ImageNet-C.

Hendrycks and Dietterich, 2019, arXiv 1903.12261: 15 kinds at five severities, and four more kinds that no mean counts.
`mce` is the mean error, as tables of CIFAR-10-C print it; `mce_alexnet` divides the error of each kind by AlexNet's, as
tables of ImageNet-C do. `mce_exact` leaves out frost, which files made from the formulas alone lack: it is photographs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.dataset import DataSet, Split
from vitrail.data.sources.folder import FileReader, image_files
from vitrail.measure.corruptions import SEVERITIES
from vitrail.measure.evaluator import Findings, Loaders, Model, ResultTable, Where, evaluate, evaluator
from vitrail.quantities import percent

ALEXNET: dict[str, float] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))["alexnet"]
OPTIONAL = ("frost", "speckle_noise", "gaussian_blur", "spatter", "saturate")
KINDS = tuple(dict.fromkeys((*ALEXNET, *OPTIONAL)))


def holds_corrupted(folder: Path) -> bool:
    """Whether a folder is laid out as CIFAR-10-C (`KIND.npy`, `labels.npy`) or ImageNet-C (`KIND/SEVERITY/WNID/*`)."""
    return any((folder / name).exists() for kind in ALEXNET for name in (f"{kind}.npy", f"{kind}/1"))


def open_corrupted(folder: Path, classes: Sequence[str]) -> DataSet:
    """A split `KIND/SEVERITY` for each, labelled by a model's classes. Raises `ValueError` for a faulty file."""
    splits, read = {}, _folders if (folder / KINDS[0]).is_dir() else _arrays
    for kind in KINDS:
        if kind not in OPTIONAL or any((folder / name).exists() for name in (kind, f"{kind}.npy")):
            for severity, (reader, labels) in zip(SEVERITIES, read(folder, kind, classes), strict=True):
                name, rows = f"{kind}/{severity}", np.arange(len(labels))
                splits[name] = Split(name, reader, rows, [f"{name}/{row}" for row in rows], labels.astype(np.int64))
    return DataSet(str(folder), tuple(classes), splits)


def _arrays(folder: Path, kind: str, classes: Sequence[str]) -> Iterator[tuple[Callable[[int], Image.Image], Any]]:
    try:
        images, labels = (np.load(folder / f"{name}.npy", "r", allow_pickle=False) for name in (kind, "labels"))
        count = len(labels) if labels.ndim == 1 and labels.dtype.kind in "ui" else 0
        if not count or count % len(SEVERITIES) or (images.shape, images.dtype) != ((count, 32, 32, 3), np.uint8):
            raise ValueError(f"they are {images.dtype} {images.shape} and {labels.dtype} {labels.shape}")
        if (int(labels.min()), int(labels.max())) != (0, len(classes) - 1):
            raise ValueError(
                f"labels go from {labels.min()} to {labels.max()}, and the model has {len(classes)} classes"
            )
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"{folder}: {kind}.npy must be uint8 [5 x images, 32, 32, 3] and labels.npy class numbers [5 x images], "
            f"but {error}; fetch them again, or name other data"
        ) from None
    for part, known in zip(*(np.split(array, len(SEVERITIES)) for array in (images, labels)), strict=True):
        yield partial(_image, part), known


def _image(images: NDArray[np.uint8], index: int) -> Image.Image:
    return Image.fromarray(images[index])


def _folders(folder: Path, kind: str, classes: Sequence[str]) -> Iterator[tuple[Callable[[int], Image.Image], Any]]:
    number = {name: i for i, name in enumerate(classes)}
    for place in (folder / kind / str(severity) for severity in SEVERITIES):
        names = tuple(path.relative_to(place).as_posix() for path in image_files(place))
        if not names or (unknown := {Path(name).parts[0] for name in names} - number.keys()):
            what = f"has {unknown.pop()!r}, which the model does not know" if names else "has no images"
            raise ValueError(f"{place} {what}; its images belong into folders of the model's classes, as {classes[0]}")
        yield FileReader(str(place.absolute()), names), np.array([number[Path(name).parts[0]] for name in names])


def mean_corruption_error(errors: Mapping[str, Sequence[float]], baseline: Mapping[str, float] | None = None) -> float:
    """Mean over kinds of the mean error over severities, relative to a baseline's where one is given."""
    return float(np.mean([np.mean(values) / (baseline[kind] if baseline else 1) for kind, values in errors.items()]))


def error_table(errors: Mapping[str, Sequence[float]]) -> ResultTable:
    """Error of every kind, by severity."""
    rows = [(kind, *map(percent, (*values, float(np.mean(values))))) for kind, values in errors.items()]
    return ResultTable("error by severity", ("corruption", "1", "2", "3", "4", "5", "mean"), rows)


@evaluator(table=error_table)
def evaluate_cifar_c(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """Mean corruption error (mCE) on the files of CIFAR-10-C, CIFAR-100-C or ImageNet-C."""
    errors: dict[str, list[float]] = {}
    for kind, severity in product(KINDS, SEVERITIES):
        if loader := data.loaders.get(f"{kind}/{severity}"):
            error = 1 - evaluate(model, loader, data.classes, **where).scalars()["top1"]
            errors.setdefault(kind, []).append(error)
            getattr(loader, "close", list)()  # ends its workers: there are many loaders
    if not errors:
        raise ValueError(
            "cifar_c is evaluated on the files of CIFAR-10-C, CIFAR-100-C or ImageNet-C alone; name their folder: "
            "vitrail evaluate RUN --data FOLDER --protocol cifar_c"
        )
    counted = {kind: errors[kind] for kind in ALEXNET if kind in errors}
    numbers = {"mce_exact": mean_corruption_error({kind: e for kind, e in counted.items() if kind != "frost"})}
    if len(counted) == len(ALEXNET):
        numbers["mce"] = mean_corruption_error(counted)
        if data.classes[0] == "n01440764":  # ImageNet's first class
            numbers["mce_alexnet"] = mean_corruption_error(counted, ALEXNET)
    return {"numbers": numbers, "tables": {"cifar_c": errors}, "pictures": {}}
