"""The contract of evaluators, and what they share: predictions over a loader, subsets of classes, stored predictions.

Nothing waits for the device inside the loop: results stay there and are fetched in large pieces. In a process group
every rank predicts its own rows and all ranks get all rows, each exactly once. With one label per image and more than
`LOGIT_CLASSES` classes each batch is reduced to what metrics need, so that memory does not grow with images times
classes. With several labels it does: average precision of a class needs its logits of all images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.counter import uniform
from vitrail.data.dataset import Split
from vitrail.measure.classification import (
    Figures,
    ImageMetrics,
    SingleLabelFigures,
    class_names,
    classification,
    image_metrics,
    single_label_metrics,
)
from vitrail.model.store import read_tensors, write_tensors
from vitrail.quantities import percent
from vitrail.registry import part
from vitrail.schema import near


def rows_of_all(columns: Sequence[Tensor] | None) -> list[Tensor] | None:
    """Rows of all ranks: the first column says their order; every column is [rows, ...], as long as the others.

    A rank may have no rows at all (none), and then knows no shapes; none where no rank has any. In one process rows
    come back as they are, and in their order.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None if columns is None else list(columns)
    layouts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(layouts, None if columns is None else [(c.shape, c.dtype) for c in columns])
    known = next((layout for layout in layouts if layout is not None), None)
    if known is None:
        return None
    counts = [0 if layout is None else layout[0][0][0] for layout in layouts]
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
    gathered = []
    for number, (shape, dtype) in enumerate(known):
        padded = torch.zeros(max(counts), *shape[1:], dtype=dtype, device=device)  # ranks must send equal sizes
        if columns is not None:
            padded[: len(columns[number])] = columns[number]
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded)
        gathered.append(torch.cat([rows[:n] for rows, n in zip(received, counts, strict=True)]))
    order = gathered[0].argsort(stable=True)
    return [column[order] for column in gathered]


Model = Callable[[Tensor], Tensor]  # images [batch, 3, height, width] -> logits [batch, classes]
Advance = Callable[[int], None]  # called with the number of images just handed to the model

NOTHING = "there is nothing to evaluate: the loader gave no images; check that the split is not empty"
FETCH_BYTES = 64 * 2**20  # results kept on the device before they are fetched
LOGIT_CLASSES = 1000  # up to which predictions of one label per image keep the logits of every class
TOP = 10  # of more classes the highest logits


@dataclass(frozen=True, eq=False)
class Predictions:
    """Logits of a model and labels of each image, on the CPU."""

    index: Tensor  # [images] stable index of each image in its source
    target: Tensor  # [images] class, or [images, classes] of 0/1
    logits: Tensor  # [images, classes] float32

    @property
    def multilabel(self) -> bool:
        return self.target.ndim == 2

    @property
    def probabilities(self) -> Tensor:  # [images, classes]
        return self.logits.sigmoid() if self.multilabel else self.logits.softmax(1)

    @property
    def guess(self) -> Tensor:  # [images] class, of one label per image
        return self.logits.argmax(1)

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, eq=False)
class CompactPredictions:
    """Predictions of many classes, one label per image: per-image metrics and the highest logits, on the CPU."""

    index: Tensor  # [images] stable index of each image in its source
    target: Tensor  # [images] class
    rank: Tensor  # [images] these four as in `ImageMetrics`
    guess: Tensor
    confidence: Tensor
    loss: Tensor
    top: Tensor  # [images, TOP] classes, highest logit first; equal ones in any order
    top_logits: Tensor  # [images, TOP] float32
    classes: Tensor  # [images] how many there are, the same for all images
    multilabel = False

    @property
    def logits(self) -> Tensor:
        raise ValueError(
            f"of more than {LOGIT_CLASSES:,} classes only the highest {TOP} logits of an image are kept, and an "
            "ensemble or a choice of classes needs all; evaluate with every_logit=True"
        )

    def __len__(self) -> int:
        return len(self.index)


AnyPredictions = Predictions | CompactPredictions


@dataclass(frozen=True)
class Mistake:
    """A prediction that was wrong, and how sure the model was."""

    index: int  # stable index of the image in its source
    truth: tuple[int, ...]  # classes the image has
    guess: int  # class that was wrongly given (or, multi-label, wrongly withheld)
    probability: float  # of `guess`
    truth_probability: float  # that the model gave to the right answer


@dataclass(frozen=True)
class Loaders:
    """Data of an evaluation: class names and a loader for each split."""

    classes: Sequence[str]
    loaders: Mapping[str, Iterable[Batch]] = field(default_factory=dict)
    split: str = "val"  # that is evaluated; others may serve as reference (neighbours, probes)
    levels: Sequence[str] = ()  # names of the levels of a taxonomy, finest first
    embedded: dict[str, Any] | None = None  # embeddings by split, where several evaluators of one model share them


class Findings(TypedDict):
    """The result of an evaluator."""

    numbers: dict[str, float]  # fractions, one line of metrics.jsonl
    tables: dict[str, Any]  # plain lists and dicts
    pictures: dict[str, Any]  # name -> uint8 [height, width, 3]


class Where(TypedDict, total=False):
    """Where and how a model runs in an evaluation."""

    device: torch.device | str | None  # none: where the batches are
    autocast: torch.dtype | None
    progress: Advance | None
    every_logit: bool  # keep the logits of every class, however many there are (default: false)


class ResultTable(NamedTuple):
    """A table for the terminal, of text."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


Evaluator = Callable[..., Findings]  # (model, data, device=None, autocast=None), marked by `evaluator`
E = TypeVar("E", bound=Evaluator)


def evaluator(
    *needs: Literal["train", "embedding"], table: Callable[[Any], ResultTable | None] | None = None
) -> Callable[[E], E]:
    """Function decorator for evaluators.

    `needs`: "train" where it reads training images, of which the data must then have a loader that augments nothing;
    "embedding" where it reads the model's embedding alone, so that data with other classes than the model's will do.
    `table` shows what `Findings` has in its table of the evaluator's own name.
    """

    def mark(function: E) -> E:
        function.needs, function.table = frozenset(needs), table  # type: ignore[attr-defined]
        return function

    return mark


def needs_of(names: Iterable[str]) -> set[str]:
    """The needs of all these evaluators."""
    return {need for name in names for need in getattr(part("evaluator", name), "needs", ())}


def predict_all(model: Model, loader: Iterable[Batch], **where: Unpack[Where]) -> AnyPredictions:
    """Logits of `model`, calibrated and in evaluation mode, for every image of `loader`, in float32 on the CPU; compact
    predictions above `LOGIT_CLASSES` classes.

    Runs on `device` (none: where the batches are), under autocast where a dtype is given. In one process rows keep the
    loader's order; in a process group all ranks get the rows of all ranks, ordered by index. Every module's own
    training flag is put back afterwards. Raises `ValueError` for an empty loader.
    """
    pieces: list[tuple[Tensor, ...]] = []
    waiting: list[tuple[Tensor, ...]] = []
    waiting_bytes = 0
    calibrated: Callable[[Tensor], Tensor] | None = getattr(model, "calibrated", None)
    for batch, images in batches(model, loader, **where):
        logits = model(images).float()
        logits = logits if calibrated is None else calibrated(logits)
        if logits.ndim != 2 or len(logits) != len(batch):
            raise ValueError(
                f"the model gave shape {list(logits.shape)} for {len(batch)} images; "
                "logits [images, classes] are needed"
            )
        compact = logits.shape[1] > LOGIT_CLASSES and batch.label.ndim == 1 and not where.get("every_logit")
        classes = torch.full_like(batch.label, logits.shape[1])
        kept = (*image_metrics(logits, batch.label), *logits.topk(TOP)[::-1], classes) if compact else (logits,)
        waiting.append((batch.index, batch.label, *kept))
        waiting_bytes += sum(column.nbytes for column in kept)
        if waiting_bytes >= FETCH_BYTES:
            pieces.append(_fetch(waiting))
            waiting, waiting_bytes = [], 0
    if waiting:
        pieces.append(_fetch(waiting))
    columns = rows_of_all(_fetch(pieces) if pieces else None)
    if columns is None:
        raise ValueError(NOTHING)
    columns = [column.cpu() for column in columns]
    return Predictions(*columns) if len(columns) == 3 else CompactPredictions(*columns)


def evaluate(
    model: Model, loader: Iterable[Batch], classes: Sequence[str] | None = None, **where: Unpack[Where]
) -> Figures:
    """Metrics of `model` on every image of `loader`; the same on every rank of a process group."""
    return metrics_of(predict_all(model, loader, **where), classes)


def metrics_of(predictions: AnyPredictions, classes: Sequence[str] | None = None) -> Figures:
    """Metrics of predictions of either form; `classes` are numbers where no names are given."""
    if isinstance(predictions, Predictions):
        return classification(predictions.logits, predictions.target, classes)
    images = ImageMetrics(predictions.rank, predictions.guess, predictions.confidence, predictions.loss)
    return single_label_metrics(images, predictions.target, class_names(int(predictions.classes[0]), classes))


def worst_mistakes(predictions: AnyPredictions, most: int = 12) -> list[Mistake]:
    """The errors with the highest confidence, at most one per image, most confident first."""
    target = predictions.target
    if isinstance(predictions, CompactPredictions):
        guess, confidence, truth_probability = predictions.guess, predictions.confidence, (-predictions.loss).exp()
        wrong, probability = guess != target, confidence
    elif predictions.multilabel:
        probabilities = predictions.probabilities
        confidence, guess = (probabilities - target.to(probabilities.dtype)).abs().max(1)
        wrong, truth_probability = confidence > 0.5, 1 - confidence
        probability = probabilities.gather(1, guess[:, None])[:, 0]
    else:
        confidence, guess = (probabilities := predictions.probabilities).max(1)
        wrong, truth_probability = guess != target, probabilities.gather(1, target[:, None])[:, 0]
        probability = confidence
    order = torch.where(wrong, confidence, -1.0).argsort(descending=True, stable=True)[: min(most, int(wrong.sum()))]
    mistakes = []
    for row in order.tolist():
        truth = target[row].nonzero()[:, 0].tolist() if predictions.multilabel else [int(target[row])]
        shares = float(probability[row]), float(truth_probability[row])
        mistakes.append(Mistake(int(predictions.index[row]), tuple(truth), int(guess[row]), *shares))
    return mistakes


@evaluator()
def classify(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """Accuracy, calibration and per-class metrics of one split."""
    figures = evaluate(model, data.loaders[data.split], data.classes, **where)
    tables: dict[str, Any] = {"figures": figures.to_json()}
    if isinstance(figures, SingleLabelFigures):
        tables["confused"] = [
            {"true": figures.classes[true], "predicted": figures.classes[guess], "images": images}
            for true, guess, images in figures.confused_pairs()
        ]
    return {"numbers": figures.scalars(), "tables": tables, "pictures": {}}


def by_group(predictions: AnyPredictions, split: Split, classes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Images, top-1 with Wilson's 95 % interval and ECE of each group of a split; none where it has no groups."""
    if split.groups is None:
        return {}
    if predictions.multilabel:
        raise ValueError("accuracy by group needs images with one label each, and these have several; leave out ?group")
    group_of = dict(zip(split.index.tolist(), split.groups.tolist(), strict=True))
    names, groups = np.array([group_of[index] for index in predictions.index.tolist()]), {}
    for name in np.unique(names).tolist():
        inside = torch.from_numpy(names == name)
        chosen = type(predictions)(*(column[inside] for column in vars(predictions).values()))
        numbers = {"images": len(chosen), **metrics_of(chosen, classes).scalars()}
        groups[name] = {key: numbers[key] for key in ("images", "top1", "top1_low", "top1_high", "ece")}
    return groups


def worst_group(groups: Mapping[str, Any]) -> str:
    """The group of lowest top-1."""
    return min(groups, key=lambda name: groups[name]["top1"])


def group_table(groups: Mapping[str, Any]) -> ResultTable:
    """Accuracy and calibration by group."""
    rows = [(name, f"{row['images']:,}", *map(percent, list(row.values())[1:])) for name, row in groups.items()]
    columns = ("group", "images", "top-1", "from", "to (95 %)", "ECE")
    return ResultTable(f"by group (worst: {worst_group(groups)})", columns, rows)


def image_properties(image: Image.Image) -> tuple[float, float, float]:
    """Pixels, mean luminance, and variance of the Laplacian of luminance, which is low where an image is blurred."""
    grey = np.asarray(image.convert("L"), np.float64)
    padded = np.pad(grey, 1, "edge")
    around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    return grey.size, float(grey.mean()), float((around - 4 * grey).var())


@evaluator(table=group_table)
def evaluate_slices(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """Accuracy and calibration by terciles of image size, brightness and sharpness (variance of the Laplacian)."""
    loader: Any = data.loaders[data.split]
    if not hasattr(loader, "split"):
        raise ValueError("slices read the stored images again, and this loader has none; use vitrail evaluate RUN")
    predictions = predict_all(model, loader, **where)
    row = {index: number for number, index in enumerate(loader.split.index.tolist())}
    split = loader.split.take([row[i] for i in predictions.index.tolist()])
    slices: dict[str, Any] = {}
    properties = np.array([image_properties(split.read(row)) for row in range(len(split))])
    for name, values in zip(("pixels", "brightness", "sharpness"), properties.T, strict=True):
        third = np.searchsorted(np.quantile(values, (1 / 3, 2 / 3)), values)
        inside = {t: values[third == t] for t in np.unique(third).tolist()}
        text = {t: f"{name} {t + 1}/3: {part.min():,.0f} to {part.max():,.0f}" for t, part in inside.items()}
        grouped = replace(split, groups=np.array([text[t] for t in third.tolist()]))
        slices |= by_group(predictions, grouped, data.classes)
    numbers = {"worst_slice_top1": slices[worst_group(slices)]["top1"]}
    return {"numbers": numbers, "tables": {"slices": slices}, "pictures": {}}


def batches(model: Model, loader: Iterable[Batch], **where: Unpack[Where]) -> Iterator[tuple[Batch, Tensor]]:
    """Every batch and its images on the device, with the model in evaluation mode, no gradients, and autocast."""
    device, autocast, progress = where.get("device"), where.get("autocast"), where.get("progress")
    with evaluation_mode(model):
        for batch in loader:
            images = batch.images if device is None else batch.images.to(device, non_blocking=True)
            with torch.no_grad(), torch.autocast(images.device.type, autocast, enabled=autocast is not None):
                yield batch, images
            if progress is not None:
                progress(len(batch))


@contextmanager
def evaluation_mode(model: Model) -> Iterator[None]:
    """The model in evaluation mode; every module's own training flag is put back."""
    if not isinstance(model, nn.Module):
        yield
        return
    # Flags differ inside a model (a frozen trunk below a trained head), so one flag would not do.
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in flags.items():
            module.training = training


def _fetch(pieces: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(column).cpu() for column in zip(*pieces, strict=True))


@dataclass(frozen=True, eq=False)
class UnlabelledFigures(Figures):
    """No classes, so no per-class metrics, and no loss (NaN)."""

    spread: float
    """Of the embeddings: 0 where all images get one, 1 where they point everywhere alike."""
    rank: float
    """In how many directions they differ (participation ratio)."""

    def scalars(self) -> dict[str, float]:
        return {"spread": self.spread, "rank": self.rank}


DRAW = 0x64726177  # keeps these numbers apart from those by which training images are drawn


def draw_by_class(labels: Tensor, wanted: Callable[[int], int], seed: int) -> Tensor:
    """Rows [drawn], ascending: of a class of n rows `wanted(n)` are drawn, never more than it has.

    `labels` [rows]. Each row has a random number, a function of seed and position, and the smallest of a class are
    drawn: so a smaller draw with the same seed is part of a larger one.

    >>> draw_by_class(torch.tensor([0, 0, 1, 1, 1]), lambda n: n, seed=0).tolist()
    [0, 1, 2, 3, 4]
    """
    if labels.ndim != 1:
        raise ValueError("rows are drawn by class, so each needs one label; these have several")
    known = labels.cpu().numpy()
    order = np.lexsort((uniform(seed, DRAW, np.arange(len(known))), known))
    sizes = np.bincount(known)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]]) if len(sizes) else sizes
    counts = np.array([min(int(n), max(0, wanted(int(n)))) if n else 0 for n in sizes], np.int64)
    rank = np.arange(len(known)) - np.repeat(first, sizes)
    return torch.from_numpy(np.sort(order[rank < np.repeat(counts, sizes)])).to(labels.device)


def only_classes(predictions: AnyPredictions, classes: Sequence[str], kept: Sequence[str]) -> Predictions:
    """Logits of the `kept` classes only, in that order, for the images that have one of them.

    `classes` are those of the predictions. Labels are counted anew; images of other classes are left out, and where
    several labels may hold only the other labels are. Raises `ValueError` for an unknown class, or without images.
    """
    number = {name: i for i, name in enumerate(classes)}
    unknown = [name for name in kept if name not in number]
    if unknown:
        raise ValueError(f"the model has no class {unknown[0]!r}{near(unknown[0], list(number))}")
    if not kept or len(set(kept)) != len(kept):
        raise ValueError(f"name each class that may be chosen once, not {', '.join(kept) or 'none'}")
    columns = [number[name] for name in kept]
    logits, target = predictions.logits[:, columns], predictions.target
    if predictions.multilabel:
        return Predictions(predictions.index, target[:, columns], logits)
    renumbered = target.new_full((len(number),), -1)
    renumbered[columns] = renumbered.new_tensor(range(len(kept)))
    target = renumbered[target]
    has = target >= 0
    if not has.any():
        raise ValueError(f"no image is of {', '.join(kept[:5])}{', ...' if len(kept) > 5 else ''}")
    return Predictions(predictions.index[has], target[has], logits[has])


PREDICTIONS = "predictions.safetensors"  # in the run folder
LARGEST = float(torch.finfo(torch.float16).max)


@dataclass(frozen=True, eq=False)
class StoredPredictions:
    """`predictions.safetensors`, ordered by index."""

    index: Tensor  # [images] stable index of each image in its source
    target: Tensor  # [images] class, or [images, classes] of 0/1
    guess: Tensor  # [images] class, or [images, classes] of 0/1, as decided before logits were rounded
    logits: Tensor  # [images, classes] float16, or of `top`
    top: Tensor | None = None  # [images, TOP] classes of `logits`, highest first, where these are not all

    @property
    def multilabel(self) -> bool:
        return self.target.ndim == 2

    @property
    def right(self) -> Tensor:
        """[images] of 0/1: the class, or every label, was right."""
        same = self.guess == self.target
        return (same.all(1) if self.multilabel else same).long()

    def __len__(self) -> int:
        return len(self.index)


def write_predictions(folder: Path, predictions: AnyPredictions) -> Path:
    """Write predictions into a run folder, atomically: two bytes per logit, and the decisions exactly."""
    order = predictions.index.argsort(stable=True)
    index, target = predictions.index[order], predictions.target[order]
    logits = (predictions.logits if isinstance(predictions, Predictions) else predictions.top_logits)[order]
    # Rounding makes ties, so decisions are stored apart; an infinite logit stays the extreme one.
    guess = (logits > 0).to(torch.uint8) if predictions.multilabel else predictions.guess[order].to(torch.int32)
    rounded = logits.clamp(-LARGEST, LARGEST).to(torch.float16)
    columns = {"index": index, "target": target.to(guess.dtype), "guess": guess, "logits": rounded}
    if isinstance(predictions, CompactPredictions):
        kinds = {"confidence": torch.float32, "loss": torch.float32, "rank": torch.int32, "top": torch.int32}
        columns |= {name: getattr(predictions, name)[order].to(kind) for name, kind in kinds.items()}
    write_tensors(folder / PREDICTIONS, columns)
    return folder / PREDICTIONS


def read_predictions(folder: Path) -> StoredPredictions | None:
    """Predictions that a run stored; none where it kept none. Raises `ValueError` if they are damaged."""
    path = folder / PREDICTIONS
    if not path.is_file():
        return None
    columns = read_tensors(path)
    missing = {"index", "target", "guess", "logits"} - columns.keys()
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}; renew it with: vitrail train --resume {folder}")
    target, guess = columns["target"].long(), columns["guess"].long()
    return StoredPredictions(columns["index"], target, guess, columns["logits"], columns.get("top"))
