"""What is measured of a model at the end of a run, or by `vitrail evaluate`: by what the model does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vitrail.api.feed import JudgedBatches
from vitrail.measure.classification import Figures, classification
from vitrail.measure.evaluate import Predictions, Progress, predict_all
from vitrail.measure.language import language_figures
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
    """Accuracy and the like of a classifier, and every prediction; perplexity and BLEU of a language model, whose
    predictions are of no class: logits [texts, 0]."""
    if writes_texts(model):
        figures = language_figures(model, loader, device=device, autocast=autocast, progress=progress)
        none = torch.zeros(figures.count, dtype=torch.int64)
        return figures, Predictions(torch.arange(figures.count), none, torch.zeros(figures.count, 0))
    predictions = predict_all(model, loader, device=device, autocast=autocast, progress=progress)
    return classification(predictions.logits, predictions.target, classes), predictions
