"""The report of a finished run on images."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor

from vitrail.data.dataset import BadImage, DataSet
from vitrail.data.preprocess import Preprocess
from vitrail.data.stack import composite
from vitrail.engine.run_folder import RunFolder
from vitrail.files import parse_json
from vitrail.measure.attention_maps import AttentionCollector, AttentionMaps, map_layers
from vitrail.measure.classification import Figures
from vitrail.measure.evaluator import AnyPredictions, UnlabelledFigures, worst_mistakes
from vitrail.measure.speed import throughput
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.quantities import memory, number
from vitrail.report.charts import parity_chart
from vitrail.report.html import AttentionPicture, DataSummary, ErrorPicture, Fragment, ModelCost, Report, write_report
from vitrail.report.sheets import Sheet, kept_sheet, overlay

if TYPE_CHECKING:
    from vitrail.measure.parity import RegressionFigures

UNFIT = ("confusion matrix", "per-class metrics", "calibration", "most confident errors")  # without labels
KEPT_IMAGES = 64  # images whose tokens are counted
SLOW_IMAGE = 3e10  # multiply-accumulates of an image, from which on a CPU is timed with one at a time


@dataclass(frozen=True)
class RunSummary:
    """What a finished run tells its report."""

    folder: RunFolder
    model: Classifier
    data: DataSet
    predictions: AnyPredictions
    figures: Figures
    split: str
    skipped: Sequence[tuple[str, str]]
    seconds: float
    device: torch.device
    autocast: torch.dtype | None
    title: str
    config: str
    adapter: Mapping[str, Any] | None = None
    """What the file of one holds."""
    trust: Mapping[str, Any] | None = None
    """What was fitted on val for its probabilities, and what that gives."""
    outcome: Sequence[str] = ()
    """Sentences on early stopping and the weights that were selected."""

    def report(self, **parts: Any) -> Report:
        """What reports of images and of texts have in common, and these parts."""
        environment = parse_json((self.folder.path / "environment.json").read_text(encoding="utf-8"))
        return Report(
            title=self.title,
            figures=self.figures,
            split=self.split,
            history=self.folder.read_metrics(),
            data=summary(self.data, self.skipped),
            config=self.config,
            environment=environment,
            command=str(environment.get("command", "")),
            created=time.strftime("%Y-%m-%d %H:%M"),
            trust=self.trust,
            outcome=self.outcome,
            **parts,
        )


def report_run(run: RunSummary) -> None:
    """Write `report.html` of a run on images."""
    model, data, split, device = run.model, run.data, run.split, run.device
    figures, without = run.figures, dict[str, Any]()
    if isinstance(figures, UnlabelledFigures):
        verdict = f"{figures.count:,} {split} images have no labels, so nothing is right or wrong. Their embeddings "
        rank, spread = number(figures.rank, 3), number(figures.spread, 3)
        verdict += f"differ in about {rank} directions, with a spread of {spread}; "
        tiles = [("spread", spread, "0: all alike"), ("rank", rank, "directions")]
        without = {
            "verdict": f"{verdict}neighbours are on the page of vitrail inspect.",
            "tiles": tiles,
            "unfit": UNFIT,
        }
    elif model.regression:
        values = cast("RegressionFigures", figures)
        tiles = [(f"{split} {name}", number(v), f"95 %: {number(a)} to {number(b)}") for name, v, a, b in values.rows()]
        chart = parity_chart(*values.parity, title=f"Predicted and true values of {split} images")
        hint = "Each point is an image. On the dashed line, predictions are right."
        content = Markup('<p>{}</p><div class="card">{}</div>').format(hint, chart)
        without = {
            "verdict": f"Predictions for {figures.count:,} {split} images are off by {tiles[1][1]} on average (MAE) and"
            f" explain {tiles[0][1]} of the variance of the true ones (R2; 1 is perfect, 0 is their mean).",
            "tiles": tiles,
            "unfit": UNFIT,
            "fragments": [Fragment("parity plot", "Parity plot", content)],
        }
    write_report(
        run.folder.report,
        run.report(
            cost=measured_cost(model, device, run.autocast, run.seconds, adapter_rows(run.adapter)),
            errors=[] if without else mistakes(data, split, run.predictions),
            attention=attention_pictures(model, data, split, device),
            kept=kept_tokens(model, data, split, device),
            inside="" if model.regression else f"vitrail inspect {run.folder.path}",
            **without,
        ),
    )


def adapter_rows(adapter: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Lines of the cost table for a model that was trained as an adapter."""
    if adapter is None:
        return []
    whole = adapter["of_these_whole"]
    of_which = f" (classifier and norms: {whole:,})" if whole else ""
    bits = "" if adapter["bits"] == 32 else f", {adapter['bits']} bits per coefficient"
    return [
        ("Parameters trained", f"{adapter['trained']:,}{of_which}, by {adapter['kind']}"),
        ("Parameters stored", f"{adapter['stored']:,}, in a file of {adapter['bytes']:,} bytes{bits}"),
        ("Base", f"{adapter['base']['architecture']}, hash {adapter['base']['hash']}"),
    ]


def measured_cost(
    model: Classifier,
    device: torch.device,
    autocast: torch.dtype | None,
    seconds: float,
    rows: Sequence[tuple[str, str]] = (),
) -> ModelCost:
    """Parameters, multiply-accumulates and a short measurement of speed and memory."""
    size = model.preprocess.size
    # What an adaptive model spends depends on the image: here stands the most, beside kept patches the mean.
    macs: float | None = None
    if model.policy is None:
        macs = cost(model, size).macs
    else:
        from vitrail.measure.compute import worst_case

        with suppress(ValueError):  # not known for every mixer of adaptive models
            macs = worst_case(model, size)
    batch = 1 if device.type == "cpu" and macs is not None and macs > SLOW_IMAGE else 64
    speed = throughput(model, size, batch, device, seconds=1.0, autocast=autocast)
    return ModelCost(
        parameters=sum(p.numel() for p in model.parameters()),
        macs=macs,
        images_per_second=speed["images_per_second"],
        # On a CPU only the peak of the whole process is known, training included: another thing, said apart.
        peak_memory=None if device.type == "cpu" else speed["peak_memory"],
        rows=[
            *rows,
            *([("Peak memory of the whole run", memory(speed["peak_memory"]))] if device.type == "cpu" else []),
        ],
        training_seconds=seconds,
        conditions=f"batch {batch}, {size} px, {speed['precision']}, {speed['device']}"
        + (f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""),
    )


def mistakes(data: DataSet, split: str, predictions: AnyPredictions, most: int = 12) -> list[ErrorPicture]:
    """The surest errors, with their pictures."""
    rows = {int(index): row for row, index in enumerate(data[split].index)}
    pictures = []
    for mistake in worst_mistakes(predictions, most):
        row = rows[mistake.index]
        with suppress(BadImage):
            pictures.append(ErrorPicture.of(mistake, data.classes, data[split].read(row), data[split].keys[row]))
    return pictures


def attention_pictures(
    model: Classifier, data: DataSet, split: str, device: torch.device, most: int = 8
) -> list[AttentionPicture]:
    """Attention of the last layer for a few images of different classes; none for models without attention maps."""
    rows, images = _readable(model, data, split, _one_of_each(data[split].labels, most) if map_layers(model) else [])
    if not images:
        return []
    collector = AttentionCollector(model, most)
    for image in images:
        collector.add(image[None].to(device))
    maps, pictures = collector.result(), []
    for i, image in enumerate(images):
        pixels, guess = composite(image.permute(1, 2, 0).numpy()), int(maps.probabilities[i].argmax())
        # The class token's row, mean over heads; without one, what patches attend to on average.
        attention = maps.class_maps[i, -1].mean(0).reshape(maps.grid)
        said: tuple[str, float, str, bool] = ("", 0.0, "", False)
        if not model.unlabelled and not model.regression:
            label = data[split].labels[rows[i]]
            wrong = not (label[guess] if np.ndim(label) else label == guess)
            said = data.classes[guess], float(maps.probabilities[i, guess]), data.label_text(label), wrong
        pictures.append(AttentionPicture(pixels, overlay(pixels, attention), *said))
    return pictures


def kept_tokens(
    model: Classifier, data: DataSet, split: str, device: torch.device, most: int = 4
) -> tuple[Sheet, AttentionMaps] | None:
    """What an adaptive model keeps: a strip of a few images, and tokens of each block; none for other models."""
    if model.policy is None:
        return None
    labels = data[split].labels
    first = _one_of_each(labels, most)
    rows = first + [row for row in range(min(KEPT_IMAGES, len(labels))) if row not in first]
    _, images = _readable(model, data, split, rows)
    if not images:
        return None
    collector = AttentionCollector(model, most)
    for start in range(0, len(images), 16):
        collector.add(torch.stack(images[start : start + 16]).to(device))
    pixels = [composite(image.permute(1, 2, 0).numpy()) for image in images[:most]]
    maps = collector.result()
    return kept_sheet("the model", maps, pixels, [""] * len(pixels), most=8), maps


def _readable(
    model: Classifier, data: DataSet, split: str, rows: Sequence[int]
) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Those rows that can be read, and their images as the model takes them, [channels, size, size]."""
    preprocess, pairs = Preprocess(model.preprocess), []
    for row in rows:
        with suppress(BadImage):
            pairs.append((row, preprocess(data[split].read(row))))
    return tuple(row for row, _ in pairs), tuple(image for _, image in pairs)


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
