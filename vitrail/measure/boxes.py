"""How well guessed boxes cover the true ones: intersection over union."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from vitrail.data.loading.loader import EvalLoader
from vitrail.data.preprocess import box_table
from vitrail.measure.evaluator import Findings, Loaders, Model, Where, evaluator, predict_all


def box_iou(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union [...] of pairs of boxes [..., 4]: left, top, right, bottom.

    A box whose right is left of its left, or whose bottom is above its top, is empty: 0 with any other.

    >>> box_iou(torch.tensor([0.0, 0, 2, 2]), torch.tensor([1.0, 0, 3, 2]))
    tensor(0.3333)
    """
    low, high = torch.maximum(first[..., :2], second[..., :2]), torch.minimum(first[..., 2:], second[..., 2:])
    common = (high - low).clamp(min=0).prod(-1)
    areas = [(box[..., 2:] - box[..., :2]).clamp(min=0).prod(-1) for box in (first, second)]
    union = areas[0] + areas[1] - common
    return torch.where(union > 0, common / union, 0.0)


@evaluator()
def evaluate_boxes(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """Mean intersection over union, and the share of pictures where it is at least one half.

    `model` gives boxes [batch, 4] in sides of the picture. Raises `ValueError` where pictures have no boxes.
    """
    loader = data.loaders[data.split]
    if not isinstance(loader, EvalLoader):
        raise ValueError("boxes are known for the pictures of a split; judge with an EvalLoader")
    truth = torch.from_numpy(box_table(loader.split, loader.preprocess.config))
    said = predict_all(model, loader, **where)
    if said.logits.shape[1:] != (4,):
        raise ValueError(f"a box has four sides, and the model gives {said.logits.shape[1]} numbers; use a detector")
    found = box_iou(said.logits.double(), truth[said.index].double())
    numbers = {"mean_iou": float(found.mean()), "iou_50": float((found >= 0.5).double().mean())}
    return {"numbers": numbers, "tables": {}, "pictures": {}}
