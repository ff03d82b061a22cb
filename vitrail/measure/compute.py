"""Compute of a model on a data set per image, with and without an attack (SlowFormer, arXiv 2310.02544)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Unpack, cast

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.measure.evaluator import Where, batches
from vitrail.model.adaptive.budget import macs_of_mean, trace_macs, whole_trace
from vitrail.model.classifier import Classifier
from vitrail.model.parts.tokens import BlockUse, Trace

Change = Callable[[Tensor], Tensor]  # a model's input -> changed input
NAMES = tuple(f.name for f in fields(BlockUse))


@dataclass(frozen=True)
class Spent:
    """Compute and accuracy of an adaptive model."""

    images: int
    top1: float  # share of images whose class (or every label) was right
    macs: float  # multiply-accumulates per image, mean
    macs_of_mean: float  # of an image with the mean counts, as published tables have
    costliest: float  # of the image that took the most
    tokens: tuple[float, ...]  # that enter each block, mean over images
    leaving: float  # the last block

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "tokens": list(self.tokens)}


def spent(model: Classifier, loader: Iterable[Batch], *, change: Change | None = None, **where: Unpack[Where]) -> Spent:
    """Compute and accuracy of an adaptive model, in evaluation mode, over every image of `loader`.

    `change` is laid on the model's input. Counts stay on the device until the last batch. Raises `ValueError` for a
    model that spends the same on every image, for an empty loader, and where logits are NaN or infinite.
    """
    reject_static(model)
    used: list[Tensor] = []  # [5, blocks, batch] each
    right: list[Tensor] = []  # [2, batch] each: right, finite
    size = 0
    for batch, images in batches(model, loader, **where):
        inputs = model._images(images)
        out = model.outputs(inputs if change is None else change(inputs))
        logits = model.fused(out.stack).float()
        size = images.shape[-1]
        label = batch.label.to(logits.device)
        same = ((logits > 0) == label.bool()).all(1) if label.ndim == 2 else logits.argmax(1) == label
        right.append(torch.stack([same, logits.isfinite().all(1)]))
        blocks = cast("Trace", out.trace).blocks
        used.append(torch.stack([torch.stack([getattr(use, name) for use in blocks]) for name in NAMES]))
    if not used:
        raise ValueError("there is nothing to measure: the loader gave no images; check that the split is not empty")
    counts, ok = torch.cat(used, 2).cpu(), torch.cat(right, 1).cpu()  # the one wait for the device
    if not ok[1].all():
        raise ValueError(
            f"the model's answer to {int((~ok[1]).sum())} of {ok.shape[1]} images is no number; check its weights and "
            "the images"
        )
    trace = _trace(counts)
    macs = trace_macs(model, trace, image_size=size)
    mean_macs = macs_of_mean(model, trace, image_size=size)
    tokens, leaving = counts[0].double().mean(1).tolist(), float(counts[1, -1].double().mean())
    top1 = float(ok[0].double().mean())
    return Spent(ok.shape[1], top1, float(macs.mean()), mean_macs, float(macs.max()), tuple(tokens), leaving)


def worst_case(model: Classifier, image_size: int | None = None) -> float:
    """Multiply-accumulates of an image that is given everything: what an adaptive model can be driven to."""
    reject_static(model)
    return float(trace_macs(model, whole_trace(model, image_size), image_size=image_size))


def attack_success(flops: float, least: float, most: float) -> float:
    """Share of what adaptivity saved that an attack took back: 0 as without attack, 1 all; below 0 it saved compute.

    `least` is what the model spends without attack, `most` what it can spend. Raises `ValueError` where nothing was
    saved.

    >>> round(attack_success(4.0, 3.1, 4.6), 3)
    0.6
    """
    if not most > least:
        raise ValueError(
            f"the model spends {least:g} of at most {most:g} without an attack: nothing was saved that an attack could "
            "take back"
        )
    return (flops - least) / (most - least)


def reject_static(model: Classifier) -> None:
    if model.policy is None:
        raise ValueError(
            "the model spends the same on every image, so its compute cannot be attacked; take one with an adaptive "
            "policy (ats, avit or adavit)"
        )


def _trace(counts: Tensor) -> Trace:
    return Trace(tuple(BlockUse(*block.unbind()) for block in counts.unbind(1)))
