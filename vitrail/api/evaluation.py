"""A saved model, and its figures on any data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from vitrail.data.loader import EvalLoader, auto_workers
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.data.source import DataSet
from vitrail.engine.device import choose_device, choose_precision
from vitrail.engine.progress import Progress
from vitrail.measure.classification import Figures, classification
from vitrail.measure.evaluate import Predictions, predict_all
from vitrail.model.classifier import Classifier
from vitrail.model.store import load_model
from vitrail.schema import near


def load(path: str | Path, device: str | torch.device | None = None) -> Classifier:
    """The classifier of a run folder or a model folder; it preprocesses its own input."""
    return load_model(path, device)


def evaluate(
    run: str | Path | Classifier,
    data: str | Path,
    *,
    split: str | None = None,
    batch: int = 256,
    workers: int | None = None,
    device: str = "auto",
    precision: str = "auto",
    quiet: bool = True,
) -> tuple[Figures, Predictions, str]:
    """Figures of a saved model on a split (none: test, or val where there is no test) of any data with its classes.

    Returns the figures, every prediction, and the split. Classes are matched by name; an unknown class is an error.
    """
    place = choose_device(device)
    model = run if isinstance(run, Classifier) else load(run)
    model.to(place)
    opened = _with_classes_of(model, open_data(data))
    split = split or ("test" if "test" in opened.splits else "val")
    if split not in opened.splits:
        raise ValueError(
            f"{data} has no split {split!r}; it has {', '.join(opened.splits)}{near(split, opened.splits)}"
        )
    rows = opened[split]
    count = auto_workers(rows) if workers is None else workers
    with (
        EvalLoader(rows, Preprocess(model.preprocess), batch=batch, device=place, workers=count) as loader,
        Progress("evaluate", len(rows), quiet=quiet) as bar,
    ):
        autocast = choose_precision(precision, place)
        predictions = predict_all(model, loader, device=place, autocast=autocast, progress=bar.advance)
        for key, reason in loader.skipped:
            bar.say(f"skipped {key}: {reason}")
    return classification(predictions.logits, predictions.target, model.classes), predictions, split


def _with_classes_of(model: Classifier, data: DataSet) -> DataSet:
    """`data` with its labels counted as the model counts them."""
    if data.multilabel != model.multilabel:
        kinds = ("several labels an image", "one label an image")
        raise ValueError(
            f"{data.uri} has {kinds[not data.multilabel]}, the model was trained with {kinds[not model.multilabel]}"
        )
    if data.classes == model.classes:
        return data
    unknown = [name for name in data.classes if name not in model.classes]
    if unknown:
        raise ValueError(
            f"{data.uri} has classes that the model does not know: {', '.join(unknown[:5])}"
            f"{', ...' if len(unknown) > 5 else ''}; it knows {', '.join(model.classes[:5])}"
            f"{', ...' if len(model.classes) > 5 else ''}"
        )
    import numpy as np

    place = np.array([model.classes.index(name) for name in data.classes])
    splits = {}
    for name, split in data.splits.items():
        if data.multilabel:
            labels = np.zeros((len(split), len(model.classes)), dtype=split.labels.dtype)
            labels[:, place] = split.labels
        else:
            labels = place[split.labels]
        splits[name] = replace(split, labels=labels)
    return replace(data, classes=model.classes, splits=splits)
