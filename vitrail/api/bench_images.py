"""Images of a data set for a benchmark, with a patch or without: what an adaptive model takes depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vitrail.api.bench_subjects import Subject
from vitrail.data.batch import Batch
from vitrail.data.loader import EvalLoader
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.learn.patch import load_patch
from vitrail.measure.compute import spent
from vitrail.measure.speed import FRESH_SETS
from vitrail.model.classifier import Classifier


def attacked(chosen: Sequence[Subject], folder: Path) -> list[Subject]:
    """Every subject, and each adaptive model a second time behind itself, under the patch of `folder`.

    Raises `ValueError` where no model is adaptive or the patch does not fit one.
    """
    found: list[Subject] = []
    for one in chosen:
        found.append(one)
        if isinstance(one.module, Classifier) and one.module.policy is not None:
            change = load_patch(folder, one.module.preprocess)[0].to(next(one.module.parameters()).device)
            found.append(replace(one, name=f"{one.name}, attacked", change=change, forms={}))
    if len(found) == len(chosen):
        raise ValueError("--attack: every model named spends the same on every image; name an adaptive one")
    return found


class RealImages:
    """Images of the test split (val where there is none) as each model sees them."""

    def __init__(self, uri: str) -> None:
        data = open_data(uri)
        if data.things != "images":
            raise ValueError(f"--data {uri} holds {data.things}, and bench measures on images; name a set of images")
        split = next((s for s in ("test", "val") if s in data.splits and len(data[s])), None)
        if split is None:
            raise ValueError(f"{uri} has neither test nor val images to measure on")
        self.rows = data[split]

    def __call__(self, one: Subject, device: torch.device) -> list[Tensor]:
        """Batches for a subject, changed as it says; its mean cost on them is noted where it is adaptive."""
        model = one.module
        if not isinstance(model, Classifier):
            raise ValueError(f"{one.name}: --data needs to know how images are prepared; name a model of ours")
        if one.size != model.preprocess.size:
            raise ValueError(
                f"{one.name}: --data is at the model's own {model.preprocess.size} pixels; leave image_size"
            )
        wanted = [int(i) % len(self.rows) for i in range(one.batch * FRESH_SETS)]
        rows = self.rows.take(wanted[: len(self.rows)])
        preprocess = Preprocess(model.preprocess)
        with EvalLoader(rows, preprocess, batch=one.batch, device=device, workers=0) as loader, torch.no_grad():
            read = [(model._images(batch.images), batch.label) for batch in loader]
            images, label = (torch.cat(parts) for parts in zip(*read, strict=True))
            images = images if one.change is None else one.change(images)
        if model.policy is not None:
            index = torch.arange(len(images), device=images.device)
            parts = zip(*(t.split(one.batch) for t in (images, label, index)), strict=True)
            one.macs = round(spent(model, (Batch((x,), y, y, i) for x, y, i in parts)).macs)
        return list(images[torch.tensor(wanted, device=images.device)].split(one.batch))
