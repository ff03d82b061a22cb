"""Settings of regression. No torch here: `vitrail --help` must be quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.learn.config import ObjectiveOptions


@dataclass(frozen=True)
class RegressionConfig(ObjectiveOptions):
    """Regression: one value per image, from a table with a column `value` or a .npz file with float labels."""

    kind: Literal["regression"] = "regression"
    loss: Literal["mse", "l1", "huber"] = "mse"
    """Squared, absolute or Huber error of values that are standardised by mean and deviation of the training images."""
