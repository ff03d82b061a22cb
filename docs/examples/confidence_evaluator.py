"""An evaluator in one file: how confident a model is where it is right, and where it is wrong.

VITRAIL_PARTS=confidence_evaluator vitrail evaluate runs/demo --protocol confidence
"""

from typing import Unpack

from vitrail.measure.evaluator import Findings, Loaders, Model, ResultTable, Where, evaluator, predict_all
from vitrail.quantities import percent
from vitrail.registry import register


def confidence_table(results: dict[str, float]) -> ResultTable:
    """A row for correct predictions, and one for errors."""
    return ResultTable("mean confidence", ("predictions", "confidence"), [(k, percent(v)) for k, v in results.items()])


@register("evaluator", "confidence")
@evaluator(table=confidence_table)
def confidence(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """Mean probability of the predicted class, over correct predictions and over errors."""
    predictions = predict_all(model, data.loaders[data.split], **where)
    sure, guess = predictions.probabilities.max(1)
    right = guess == predictions.target
    groups = {"correct": sure[right], "errors": sure[~right]}
    results = {name: float(values.mean()) for name, values in groups.items() if len(values)}
    numbers = {f"confidence_{name}": value for name, value in results.items()}
    return {"numbers": numbers, "tables": {"confidence": results}, "pictures": {}}
