"""Predictions of a model for everything a loader gives, and the figures that follow from them.

Nothing waits for the device inside the loop: results stay there and are fetched in large pieces. In a process group
every rank predicts its own rows and all ranks get all rows, each exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.measure.classification import Figures, SingleLabelFigures, classification
from vitrail.measure.ranks import rows_of_all

Model = Callable[[Tensor], Tensor]  # images [batch, 3, height, width] -> logits [batch, classes]
Progress = Callable[[int], None]  # called with the number of images just handed to the model

FETCH_BYTES = 64 * 2**20  # results kept on the device before they are fetched


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model said about each image, on the CPU."""

    index: Tensor  # [images] stable index of each image in its source
    target: Tensor  # [images] class, or [images, classes] of 0/1
    logits: Tensor  # [images, classes] float32

    @property
    def multilabel(self) -> bool:
        return self.target.ndim == 2

    @property
    def probabilities(self) -> Tensor:  # [images, classes]
        return self.logits.sigmoid() if self.multilabel else self.logits.softmax(1)

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class Mistake:
    """A prediction that was wrong, and how sure the model was."""

    index: int  # stable index of the image in its source
    truth: tuple[int, ...]  # classes the image has
    guess: int  # class that was wrongly given (or, multi-label, wrongly withheld)
    probability: float  # of `guess`
    truth_probability: float  # that the model gave to the right answer


class EvaluationData(Protocol):
    """What an evaluator may read: class names and a loader for each split."""

    @property
    def classes(self) -> Sequence[str]: ...

    @property
    def loaders(self) -> Mapping[str, Iterable[Batch]]: ...

    @property
    def split(self) -> str: ...  # the split that is judged; others may serve as reference (neighbours, probes)


@dataclass(frozen=True)
class Loaders:
    """The plain `EvaluationData`."""

    classes: Sequence[str]
    loaders: Mapping[str, Iterable[Batch]] = field(default_factory=dict)
    split: str = "val"
    levels: Sequence[str] = ()  # names of the levels of a taxonomy, finest first


class Findings(TypedDict):
    """What an evaluator found."""

    numbers: dict[str, float]  # fractions, one line of metrics.jsonl
    tables: dict[str, Any]  # plain lists and dicts
    pictures: dict[str, Any]  # name -> uint8 [height, width, 3]


class Evaluator(Protocol):
    """A named way to judge a model."""

    def __call__(
        self,
        model: Model,
        data: EvaluationData,
        *,
        device: torch.device | str | None = None,
        autocast: torch.dtype | None = None,
    ) -> Findings: ...


def predict_all(
    model: Model,
    loader: Iterable[Batch],
    *,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Predictions:
    """Logits of `model`, in evaluation mode, for every image of `loader`, in float32 on the CPU.

    Runs on `device` (none: where the batches are), under autocast where a dtype is given. In one process rows keep the
    loader's order; in a process group all ranks get the rows of all ranks, ordered by index. Every module's own
    training flag is put back afterwards. Raises `ValueError` for an empty loader.
    """
    pieces: list[Predictions] = []
    waiting: list[Predictions] = []
    waiting_bytes = 0
    with evaluation_mode(model):
        for batch in loader:
            images = batch.images if device is None else batch.images.to(device, non_blocking=True)
            # Around the model only: tensors that a loader makes and keeps must stay usable in training.
            with torch.inference_mode(), torch.autocast(images.device.type, autocast, enabled=autocast is not None):
                logits = model(images).float()
            if logits.ndim != 2 or len(logits) != len(batch):
                raise ValueError(
                    f"the model gave shape {list(logits.shape)} for {len(batch)} images; "
                    "logits [images, classes] are needed"
                )
            waiting.append(Predictions(batch.index, batch.label, logits))
            waiting_bytes += logits.numel() * 4
            if waiting_bytes >= FETCH_BYTES:
                pieces.append(_fetch(waiting))
                waiting, waiting_bytes = [], 0
            if progress is not None:
                progress(len(batch))
    if waiting:
        pieces.append(_fetch(waiting))
    own = _fetch(pieces) if pieces else None
    found = rows_of_all(None if own is None else (own.index, own.target, own.logits))
    if found is None:
        raise ValueError("there is nothing to evaluate: the loader gave no images; check that the split is not empty")
    return Predictions(*(column.cpu() for column in found))


def evaluate(
    model: Model,
    loader: Iterable[Batch],
    classes: Sequence[str] | None = None,
    *,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Figures:
    """Figures of `model` on every image of `loader`; the same on every rank of a process group."""
    made = predict_all(model, loader, device=device, autocast=autocast, progress=progress)
    return classification(made.logits, made.target, classes)


def worst_mistakes(predictions: Predictions, most: int = 12) -> list[Mistake]:
    """The errors about which the model was most sure, at most one an image, surest first."""
    probability = predictions.probabilities
    rows = torch.arange(len(predictions))
    if predictions.multilabel:
        wrongness = (probability - predictions.target.to(probability.dtype)).abs()
        sure, guess = wrongness.max(1)
        wrong = sure > 0.5
        truth = [tuple(int(c) for c in row.nonzero()[:, 0]) for row in predictions.target]
        truth_probability = 1 - sure
    else:
        sure, guess = probability.max(1)
        wrong = guess != predictions.target
        truth = [(int(c),) for c in predictions.target]
        truth_probability = probability[rows, predictions.target]
    order = torch.where(wrong, sure, -1.0).argsort(descending=True, stable=True)[: min(most, int(wrong.sum()))]
    return [
        Mistake(
            int(predictions.index[row]),
            truth[row],
            int(guess[row]),
            float(probability[row, guess[row]]),
            float(truth_probability[row]),
        )
        for row in order.tolist()
    ]


def classify(
    model: Model,
    data: EvaluationData,
    *,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
) -> Findings:
    """The evaluator "classification": accuracy, calibration and per-class figures of one split."""
    figures = evaluate(model, data.loaders[data.split], data.classes, device=device, autocast=autocast)
    tables: dict[str, Any] = {"figures": figures.to_json()}
    if isinstance(figures, SingleLabelFigures):
        tables["confused"] = [
            {"true": figures.classes[true], "predicted": figures.classes[guess], "images": images}
            for true, guess, images in figures.confused_pairs()
        ]
    return {"numbers": figures.scalars(), "tables": tables, "pictures": {}}


@contextmanager
def evaluation_mode(model: Model) -> Iterator[None]:
    """The model in evaluation mode; every module's own training flag is put back."""
    if not isinstance(model, nn.Module):
        yield
        return
    # Flags differ inside a model (a frozen trunk below a trained head), so one flag for the whole would lose them.
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in flags.items():
            module.training = training


def _fetch(pieces: Sequence[Predictions]) -> Predictions:
    return Predictions(
        torch.cat([p.index for p in pieces]).cpu(),
        torch.cat([p.target for p in pieces]).cpu(),
        torch.cat([p.logits for p in pieces]).cpu(),
    )
