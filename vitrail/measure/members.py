"""Evaluator of the classifiers of one head (Gramian heads, arXiv 2310.16483; ONE, arXiv 1806.04606)."""

from __future__ import annotations

import torch

from vitrail.measure.ensembles import diversity, fused_accuracy, head_accuracy
from vitrail.measure.evaluate import EvaluationData, Findings, Model, evaluation_mode
from vitrail.model.classifier import Classifier


@torch.no_grad()
def judge_members(
    model: Model,
    data: EvaluationData,
    *,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
) -> Findings:
    """The evaluator "members": accuracy of each classifier and of their sum, strength and correlation (Breiman).

    A head with one classifier has a strength and no correlation; one that was trained with an auxiliary classifier also
    reports that one alone, all heads removed. Raises `ValueError` where several labels may hold.
    """
    if not isinstance(model, Classifier) or model.multilabel:
        raise ValueError("members: strength and correlation are of classifiers that name one class an image")
    stacks, targets = [], []
    with evaluation_mode(model):
        for batch in data.loaders[data.split]:
            images = batch.images if device is None else batch.images.to(device, non_blocking=True)
            with torch.autocast(images.device.type, autocast, enabled=autocast is not None):
                stacks.append(model.stack(images).float().cpu())
            targets.append(batch.label.cpu())
    stack, target = torch.cat(stacks), torch.cat(targets)
    removed = {}
    if getattr(model.head, "auxiliary", None) is not None:  # it stands last and has no part in the sum
        removed["without_heads_top1"] = float(head_accuracy(stack, target)[-1])
        stack = stack[:, :-1]
    each, found = head_accuracy(stack, target), diversity(stack, target, votes="soft")
    numbers = {
        "members_top1": float(each.mean()),
        "members_together": fused_accuracy(stack, target),
        **removed,
        "strength": found.strength,
        "correlation": found.correlation if stack.shape[1] > 1 else float("nan"),
        "correlation_over_strength2": found.ratio if stack.shape[1] > 1 else float("nan"),
    }
    table = {"members": {str(i): float(v) for i, v in enumerate(each)}}
    known = {name: value for name, value in numbers.items() if value == value}  # noqa: PLR0124, NaN is no figure
    return {"numbers": known, "tables": {"members": table}, "pictures": {}}
