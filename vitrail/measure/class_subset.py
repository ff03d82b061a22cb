"""Evaluation on a subset of a model's classes: the others cannot be predicted (as under shift, ImageNet-A or -R)."""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.measure.evaluate import Predictions
from vitrail.schema import near


def only_classes(predictions: Predictions, classes: Sequence[str], kept: Sequence[str]) -> Predictions:
    """Logits of the `kept` classes only, in that order, for the images that have one of them.

    `classes` are those of the predictions. Labels are counted anew; images of other classes are left out, and where
    several labels may hold only the other labels are. Raises `ValueError` for an unknown class, or without images.
    """
    names = list(classes)
    unknown = [name for name in kept if name not in names]
    if unknown:
        raise ValueError(f"the model has no class {unknown[0]!r}{near(unknown[0], names)}")
    if not kept or len(set(kept)) != len(kept):
        raise ValueError(f"name each class that may be chosen once, not {', '.join(kept) or 'none'}")
    columns = [names.index(name) for name in kept]
    logits, target = predictions.logits[:, columns], predictions.target
    if predictions.multilabel:
        return Predictions(predictions.index, target[:, columns], logits)
    place = target.new_full((len(names),), -1)
    place[columns] = place.new_tensor(range(len(kept)))
    target = place[target]
    has = target >= 0
    if not has.any():
        raise ValueError(f"no image is of {', '.join(kept[:5])}{', ...' if len(kept) > 5 else ''}")
    return Predictions(predictions.index[has], target[has], logits[has])
