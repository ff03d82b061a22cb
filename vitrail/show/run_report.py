"""The report of a finished run, from what the run knows."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vitrail.data.preprocess import Preprocess
from vitrail.data.source import BadImage, DataSet
from vitrail.engine.run import RunFolder
from vitrail.measure.classification import Figures
from vitrail.measure.evaluate import Predictions, worst_mistakes
from vitrail.measure.speed import throughput
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.trunk import Trunk
from vitrail.show.attention import overlay
from vitrail.show.quantities import memory
from vitrail.show.report import AttentionPicture, Cost, DataSummary, ErrorPicture, Report, write_report


def report_run(
    folder: RunFolder,
    model: Classifier,
    data: DataSet,
    predictions: Predictions,
    figures: Figures,
    *,
    split: str,
    skipped: Sequence[tuple[str, str]],
    seconds: float,
    device: torch.device,
    autocast: torch.dtype | None,
    title: str,
    config: str,
) -> None:
    """Write `report.html` of a run."""
    environment = json.loads((folder.path / "environment.json").read_text(encoding="utf-8"))
    write_report(
        folder.report,
        Report(
            title=title,
            figures=figures,
            split=split,
            history=folder.read_metrics(),
            cost=measured_cost(model, device, autocast, seconds),
            errors=mistakes(data, split, predictions),
            attention=attention_pictures(model, data, split, device),
            data=summary(data, skipped),
            config=config,
            environment=environment,
            command=str(environment.get("command", "")),
            created=time.strftime("%Y-%m-%d %H:%M"),
        ),
    )


def measured_cost(model: Classifier, device: torch.device, autocast: torch.dtype | None, seconds: float) -> Cost:
    """Parameters, multiply-accumulates and a short measurement of speed and memory."""
    size = model.preprocess.size
    counted = cost(model, size)
    speed = throughput(model, size, 64, device, seconds=1.0, autocast=autocast)
    return Cost(
        parameters=counted.parameters,
        macs=counted.macs,
        images_per_second=speed["images_per_second"],
        # On a CPU only the peak of the whole process is known, training included: another thing, said apart.
        peak_memory=None if device.type == "cpu" else speed["peak_memory"],
        rows=[("Peak memory of the whole run", memory(speed["peak_memory"]))] if device.type == "cpu" else [],
        training_seconds=seconds,
        conditions=f"batch 64, {size} px, {speed['precision']}, {speed['device']}, {torch.get_num_threads()} threads"
        if device.type == "cpu"
        else f"batch 64, {size} px, {speed['precision']}, {speed['device']}",
    )


def mistakes(data: DataSet, split: str, predictions: Predictions, most: int = 12) -> list[ErrorPicture]:
    """The surest errors, with their pictures."""
    rows = {int(index): row for row, index in enumerate(data[split].index)}
    found = []
    for mistake in worst_mistakes(predictions, most):
        row = rows[mistake.index]
        try:
            image = data[split].read(row)
        except BadImage:
            continue
        found.append(ErrorPicture.of(mistake, data.classes, image, data[split].keys[row]))
    return found


def attention_pictures(
    model: Classifier, data: DataSet, split: str, device: torch.device, most: int = 8
) -> list[AttentionPicture]:
    """Where the last layer looks, for a few images of different classes; none for models without attention maps."""
    if not isinstance(model.trunk, Trunk):
        return []
    name = f"attention.{len(model.trunk.blocks) - 1}"
    if name not in model.trunk.intermediates:
        return []
    rows = _one_of_each(data[split].labels, most)
    preprocess = Preprocess(model.preprocess)
    pictures = []
    model.eval()
    for row in rows:
        try:
            pixels = preprocess(data[split].read(row))
        except BadImage:
            continue
        with torch.inference_mode():
            found = model.outputs(pixels[None].to(device), want={name})
            probabilities = model.probabilities(model.head.fuse(found.stack).float())[0]
        weights = found.captured[name][0].float().mean(0).cpu()  # mean over heads, [tokens, tokens]
        prefix = found.tokens.prefix
        # What the class token looks at; without one, what the patches look at on average.
        seen = weights[0, prefix:] if prefix else weights.mean(0)
        image = pixels.permute(1, 2, 0).numpy()
        guess = int(probabilities.argmax())
        pictures.append(
            AttentionPicture(
                image,
                overlay(image, seen.reshape(found.tokens.grid).numpy()),
                f"{data.classes[guess]} {float(probabilities[guess]):.0%}",
            )
        )
    return pictures


def summary(data: DataSet, skipped: Sequence[tuple[str, str]]) -> DataSummary:
    """Classes, counts, notes and what was left out."""
    counts: dict[str, Any] = {}
    for name, split in data.splits.items():
        labels = split.labels
        per_class = labels.sum(0) if labels.ndim == 2 else np.bincount(labels, minlength=len(data.classes))
        counts[name] = [int(n) for n in per_class]
    return DataSummary(
        uri=data.uri,
        classes=data.classes,
        counts=counts,
        images={name: len(split) for name, split in data.splits.items()},
        notes=data.notes,
        skipped=list(skipped),
    )


def _one_of_each(labels: Any, most: int) -> list[int]:
    first: dict[int, int] = {}
    kinds = labels.argmax(1) if labels.ndim == 2 else labels
    for row, kind in enumerate(kinds):
        first.setdefault(int(kind), row)
        if len(first) == most:
            break
    return list(first.values())
