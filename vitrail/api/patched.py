"""Inspection of an adaptive model under a patch of `vitrail attack`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.learn.patch import load_patch
from vitrail.measure.looker import Looker
from vitrail.model.classifier import Classifier


class Patched:
    """The same images with the patch: what is kept of them, and the first `pictures` as bytes [side, side, 3]."""

    def __init__(self, model: Classifier, folder: Path, pictures: int) -> None:
        self.model, self.looker = model, Looker(model, pictures, ())
        self.change = load_patch(folder, model.preprocess)[0].to(next(model.parameters()).device)
        self.pixels: list[NDArray[np.uint8]] = []

    def add(self, images: Tensor) -> None:
        """Images as the model takes them, [batch, 3, height, width]."""
        with torch.no_grad():
            changed = self.change(self.model._images(images))
        room = max(0, self.looker.pictures - self.looker.images)
        levels = ((changed[:room].float() * self.change.std + self.change.mean) * 255).round().clamp(0, 255)
        self.pixels += list(levels.to("cpu", torch.uint8).permute(0, 2, 3, 1).numpy())
        self.looker.add(changed)


def patched(models: Sequence[Classifier], folder: Path, pictures: int) -> list[Patched | None]:
    """One a model, none for those that spend the same on every image.

    Raises `ValueError` or `FileNotFoundError`, one sentence, where no model is adaptive or the patch does not fit.
    """
    if all(model.policy is None for model in models):
        raise ValueError("--attack: every model named spends the same on every image; name an adaptive one")
    return [None if model.policy is None else Patched(model, folder, pictures) for model in models]
