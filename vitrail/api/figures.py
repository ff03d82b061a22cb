"""Metrics of a model at the end of a run, or by `vitrail evaluate`, according to its task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vitrail.api.feed import JudgedBatches
from vitrail.data.source import UNLABELLED
from vitrail.learn.collapse import spread_and_rank
from vitrail.measure.classification import Figures, classification
from vitrail.measure.evaluate import Predictions, Progress, evaluation_mode, predict_all
from vitrail.measure.language import language_figures
from vitrail.measure.ranks import rows_of_all
from vitrail.measure.unlabelled import UnlabelledFigures
from vitrail.model.classifier import Classifier
from vitrail.model.heads.next_token import writes_texts


def figures_of(
    model: Classifier,
    loader: JudgedBatches,
    classes: Sequence[str],
    *,
    device: torch.device,
    autocast: torch.dtype | None,
    progress: Progress | None = None,
) -> tuple[Figures, Predictions]:
    """Accuracy and the like of a classifier, and every prediction. Perplexity and BLEU of a language model, spread and
    rank of embeddings where images have no labels; predictions are then of no class: logits [examples, 0]."""
    if tuple(classes) == (UNLABELLED,):
        return _apart(model, loader, device=device, autocast=autocast, progress=progress)
    if writes_texts(model):
        figures = language_figures(model, loader, device=device, autocast=autocast, progress=progress)
        return figures, _of_no_class(figures.count)
    predictions = predict_all(model, loader, device=device, autocast=autocast, progress=progress)
    return classification(predictions.logits, predictions.target, classes), predictions


def _of_no_class(count: int) -> Predictions:
    return Predictions(torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.zeros(count, 0))


@torch.inference_mode()
def _apart(
    model: Classifier,
    loader: JudgedBatches,
    *,
    device: torch.device,
    autocast: torch.dtype | None,
    progress: Progress | None,
) -> tuple[UnlabelledFigures, Predictions]:
    index, found = [], []
    with evaluation_mode(model), torch.autocast(device.type, autocast, enabled=autocast is not None):
        for batch in loader:
            found.append(model.outputs(batch.images.to(device, non_blocking=True)).representation.float())
            index.append(batch.index.to(device))
            if progress is not None:
                progress(len(batch))
    rows = rows_of_all((torch.cat(index), torch.cat(found)) if found else None)
    if rows is None:
        raise ValueError("there is nothing to evaluate: the loader gave no images; check that the split is not empty")
    count, (spread, rank) = len(rows[1]), (float(v) for v in spread_and_rank(rows[1]))
    none = np.zeros(0)
    figures = UnlabelledFigures(
        (), count, float("nan"), none, none, none, np.zeros(0, np.int64), spread=spread, rank=rank
    )
    return figures, _of_no_class(count)
