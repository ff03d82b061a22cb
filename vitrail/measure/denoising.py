"""How well a diffusion model takes noise away from images it has not seen, on noise and times that never change."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.data.augment.pixel_ops import normal_noise
from vitrail.measure.evaluator import NOTHING, Findings, Loaders, Model, Where, batches, evaluator
from vitrail.model.classifier import Classifier
from vitrail.model.trunks.denoiser import Denoiser

DRAWS = 4  # times and noises per image
BANDS = ("early", "middle", "late")  # thirds of the time: little, some and much noise
_GOLDEN = 0.6180339887498949


def fixed_draws(index: Tensor, draw: int) -> tuple[Tensor, Tensor]:
    """Times [batch] in 0..1 and seeds [batch] of images by their index: spread evenly, the same in every run."""
    seed = index.to(torch.int64) * DRAWS + draw
    return ((seed.to(torch.float64) + 0.5) * _GOLDEN).remainder(1).to(torch.float32), seed


@evaluator()
def evaluate_denoising(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """The training loss, unweighed and with true labels, as a function of the weights alone.

    `denoising_loss` is the mean over images; `_early`, `_middle` and `_late` those of a third of the times each. Raises
    `ValueError` for a model that is no diffusion model.
    """
    if not isinstance(model, Classifier) or not isinstance(model.trunk, Denoiser):
        raise ValueError("the evaluator denoising evaluates diffusion models (denoiser_32, ...), and this is none")
    device = where.get("device") or next(model.parameters()).device
    sums = torch.zeros(len(BANDS), 2, dtype=torch.float64, device=device)  # of losses, and how many
    for batch, images in batches(model, data.loaders[data.split], device=device, autocast=where.get("autocast")):
        label, index = (t.to(device, non_blocking=True) for t in (batch.label, batch.index))
        inputs = model._images(images)
        for draw in range(DRAWS):
            time, seed = fixed_draws(index, draw)
            noise = normal_noise(seed, *inputs.shape[1:])
            errors = model.trunk.errors(inputs, label, time, noise)[0].to(torch.float64)
            band = (time * len(BANDS)).to(torch.int64).clamp_max(len(BANDS) - 1)
            sums = sums.index_add(0, band, torch.stack([errors, torch.ones_like(errors)], 1))
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        sums = sums.clone()
        dist.all_reduce(sums)
    if not sums[:, 1].sum():
        raise ValueError(NOTHING)
    numbers = {"denoising_loss": float(sums[:, 0].sum() / sums[:, 1].sum())}
    for name, (total, count) in zip(BANDS, sums.tolist(), strict=True):
        if count:
            numbers[f"denoising_loss_{name}"] = total / count
    return {"numbers": numbers, "tables": {}, "pictures": {}}
