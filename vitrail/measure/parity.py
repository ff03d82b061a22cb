"""How far predicted values are from true ones: MAE, RMSE and R2, with bootstrap intervals over images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from vitrail.measure.classification import Figures, Floats
from vitrail.measure.evaluator import AnyPredictions, Findings, Loaders, Model, Where, evaluator, predict_all

DRAWS = 500  # of the bootstrap
SCORES = {"r2": "R2", "mae": "MAE", "rmse": "RMSE"}


def scores(predicted: Floats, true: Floats) -> tuple[float, float, float]:
    """R2, mean absolute error and root mean squared error; R2 of equal true values is NaN."""
    error, spread = predicted - true, float(np.square(true - true.mean()).sum())
    squares = float(np.square(error).sum())
    r2 = 1 - squares / spread if spread else float("nan")
    return r2, float(np.abs(error).mean()), float(np.sqrt(squares / len(true)))


@dataclass(frozen=True, eq=False)
class RegressionFigures(Figures):
    """Metrics of values, in the units of the data; `loss` is the mean squared error."""

    values: tuple[tuple[float, float, float], ...]  # R2, MAE and RMSE, each with its 95 % interval
    parity: tuple[Floats, Floats]  # true and predicted values

    def scalars(self) -> dict[str, float]:
        each = zip(SCORES, self.values, strict=True)
        return {f"{name}{end}": v for name, row in each for end, v in zip(("", "_low", "_high"), row, strict=True)}

    def rows(self) -> Iterator[tuple[str, float, float, float]]:
        """Name, value, low and high of each metric."""
        return ((name, *row) for name, row in zip(SCORES.values(), self.values, strict=True))


def regression_figures(predictions: AnyPredictions) -> RegressionFigures:
    """Metrics of predictions whose targets are values [images]."""
    true, predicted = (t.numpy().astype(np.float64) for t in (predictions.target, predictions.logits[:, 0]))
    random, best = np.random.default_rng(0), scores(predicted, true)
    samples = (random.integers(len(true), size=len(true)) for _ in range(DRAWS))
    draws = [scores(predicted[rows], true[rows]) for rows in samples]
    low, high = np.nanquantile(draws, (0.025, 0.975), axis=0).tolist() if len(true) > 1 else (best, best)
    none = np.zeros(0)
    rows = tuple(zip(best, low, high, strict=True))
    return RegressionFigures(
        (), len(true), best[2] ** 2, none, none, none, np.zeros(0, np.int64), rows, (true, predicted)
    )


@evaluator()
def evaluate_regression(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """R2, mean absolute error and root mean squared error of one split."""
    figures = regression_figures(predict_all(model, data.loaders[data.split], **where))
    return {"numbers": {**figures.scalars(), "loss": figures.loss}, "tables": {}, "pictures": {}}
