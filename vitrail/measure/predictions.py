"""Predictions of a finished run for each test image, stored so that runs can be compared image by image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitrail.measure.evaluate import Predictions
from vitrail.model.store import read_tensors, write_tensors

PREDICTIONS = "predictions.safetensors"  # in the run folder
LARGEST = float(torch.finfo(torch.float16).max)


@dataclass(frozen=True, eq=False)
class StoredPredictions:
    """`predictions.safetensors`, ordered by index."""

    index: Tensor  # [images] stable index of each image in its source
    target: Tensor  # [images] class, or [images, classes] of 0/1
    guess: Tensor  # [images] class, or [images, classes] of 0/1, as decided before logits were rounded
    logits: Tensor  # [images, classes] float16

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


def write_predictions(folder: Path, made: Predictions) -> Path:
    """Write what was predicted into a run folder, atomically: two bytes a logit, and the decisions exactly."""
    order = made.index.argsort(stable=True)
    target, logits = made.target[order], made.logits[order]
    guess = (logits > 0).to(torch.uint8) if made.multilabel else logits.argmax(1).to(torch.int32)
    tensors = {
        "index": made.index[order],
        "target": target.to(guess.dtype),
        "guess": guess,
        # Rounding makes ties, so decisions are stored apart; an infinite logit stays the extreme one.
        "logits": logits.clamp(-LARGEST, LARGEST).to(torch.float16),
    }
    write_tensors(folder / PREDICTIONS, tensors)
    return folder / PREDICTIONS


def read_predictions(folder: Path) -> StoredPredictions | None:
    """What `write_predictions` wrote; none where the run kept nothing. Raises `ValueError` if it is damaged."""
    path = folder / PREDICTIONS
    if not path.is_file():
        return None
    found = read_tensors(path)
    missing = {"index", "target", "guess", "logits"} - found.keys()
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}; renew it with: vitrail train --resume {folder}")
    return StoredPredictions(found["index"], found["target"].long(), found["guess"].long(), found["logits"])
