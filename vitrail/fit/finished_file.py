"""The file of the best trained weights: exported, measured, made faster where it is over the budget, evaluated once."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from PIL.Image import Image

from vitrail.data.dataset import DataSet
from vitrail.data.loading.loader import EvalLoader, auto_workers
from vitrail.data.preprocess import Preprocess
from vitrail.fit.candidates import Candidate, Measured, accelerator_latency, file_latency
from vitrail.fit.limits import HEADROOM, Budget
from vitrail.fit.pictures import Pictures
from vitrail.fit.search import Search, Trial
from vitrail.measure.classification import wilson_interval
from vitrail.measure.evaluator import Predictions
from vitrail.model.export import read_onnx
from vitrail.run.deploy import export_onnx
from vitrail.run.evaluate import calibrate, evaluate, load
from vitrail.run.run_data import open_for

FILE = "model.onnx"
ATTEMPTS, PAUSE = 3, 5.0  # of measuring the finished file; seconds between them
MORE = 2.0  # points that int8 may cost where less makes it too slow: images smaller by 8 % of their side cost as much
LEAST, PIXELS = 0.7, 4  # of the size of images that it learned from, what weights are tried with; steps of that size


@dataclass(frozen=True)
class FitResult:
    """The outcome: a file that was measured, and everything that was tried."""

    folder: Path
    file: Path
    budget: Budget
    latency: float
    bytes: int
    split: str
    correct: int
    images: int
    chosen: Trial
    trials: tuple[Trial, ...]
    measured: tuple[Measured, ...]
    notes: tuple[str, ...]
    metric: str = "top1"  # by which val chose

    @property
    def accuracy(self) -> float:
        return self.correct / self.images

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.correct, self.images)

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "file": str(self.file),
            "budget": asdict(self.budget),
            "latency": self.latency,
            "bytes": self.bytes,
            "split": self.split,
            "top1": self.accuracy,
            "interval": list(self.interval),
            "images": self.images,
            "chosen": self.chosen.to_json(),
            "trials": [trial.to_json() for trial in self.trials],
            "measured": [each.to_json() for each in self.measured],
            "notes": list(self.notes),
        }


def deployed(
    ranked: list[Trial],
    search: Search,
    measured: list[Measured],
    data: DataSet,
    budget: Budget,
    pictures: Pictures,
    out: Path,
    say: Callable[[str], None],
) -> FitResult:
    """The best trial whose file, calibrated and exported, is within the budget; evaluated once.

    Weights whose file takes too long are tried in faster forms before what learned less.
    """
    notes: list[str] = []
    failed: list[Candidate] = []
    made: set[str] = set()
    while ranked:  # another training of what failed has a file that takes as long, and comes last
        trial = min(
            ranked, key=lambda t: (t in search.trials and t.form.measured.candidate in failed, -t.rung, -t.value)
        )
        ranked = [other for other in ranked if other is not trial]
        path, candidate, file = trial.path, trial.form.measured.candidate, out / FILE
        try:
            calibrate(path, data.uri, compare=False)  # embeddings of train would take bytes and time of the file
        except ValueError as error:
            notes.append(f"probabilities are not calibrated: {error}")
        model = load(path)
        seen, change = pictures.decoded(model.preprocess), 0.0
        try:
            if budget.on == "cuda":
                file = model.save(out / "model")
                latency, size = accelerator_latency(model, seen), sum(f.stat().st_size for f in file.iterdir())
            else:
                precision: Literal["int8"] | None = "int8" if candidate.precision == "int8" else None
                exported = export_onnx(model, file, Path(path), precision, data.uri, trial.form.lose, with_predict=True)
                size, latency = exported.bytes, settled_latency(file, seen, budget)
                change = exported.precision["change"] if exported.precision else 0.0
        except Exception as error:  # exporters and runtimes have error classes of their own
            notes.append(f"{trial.form.name} was not deployed: {error}")
            say(notes[-1])
            failed.append(candidate)
            ranked += in_fewer_bits(trial, budget) if candidate.precision == "int8" else []
            continue
        if not budget.meets(latency, size, 1.0):
            notes.append(
                f"{trial.form.name}, {1e3 * latency:.3g} ms and {size / 1e6:.3g} MB as a file, is over the budget"
            )
            say(notes[-1])
            failed.append(candidate)
            slow = latency > budget.latency
            forms = faster(trial, latency, data, budget, search.metric, out) if slow else in_fewer_bits(trial, budget)
            made |= {form.path for form in forms}
            ranked += forms
            continue
        if trial not in search.trials:  # made of the weights of one
            form = replace(trial.form, measured=Measured(candidate, latency, size))
            trial = replace(trial, form=form, value=trial.value + change, seconds=0.0)
            search.trials.append(trial)
            may = f", where int8 may cost {trial.form.lose:g} points" * (candidate.precision == "int8")
            notes.append(f"{trial.form.name} has weights of another row, images of {model.preprocess.size} pixels{may}")
        for unused in {Path(path) for path in made - {trial.path}}:
            if unused.parent == out:
                shutil.rmtree(unused)
        split = "test" if "test" in data.splits else "val"
        right = correct(file, model, data, split, budget)
        counts = int(sum(right)), len(right)
        decoding = 1e3 * pictures.seconds(model.preprocess)
        notes.append(f"reading and decoding a photograph takes {decoding:.2g} ms, which the budget does not count")
        trials, all_costs = tuple(search.trials), tuple(measured)
        return FitResult(
            out, file, budget, latency, size, split, *counts, trial, trials, all_costs, tuple(notes), search.metric
        )
    raise ValueError(f"no trained model meets {budget.text} as a file: {notes[-1]}")


def in_fewer_bits(trial: Trial, budget: Budget) -> list[Trial]:
    """The same weights in int8, where they were not; where they were, in int8 that may cost more."""
    form = trial.form
    candidate = form.measured.candidate
    if budget.on != "cpu" or form.lose >= MORE:
        return []
    int8, lose = replace(candidate, precision="int8"), MORE if candidate.precision == "int8" else form.lose
    return [replace(trial, form=replace(form, measured=Measured(int8), lose=lose))]


def faster(trial: Trial, latency: float, data: DataSet, budget: Budget, metric: str, folder: Path) -> list[Trial]:
    """Weights whose file takes `latency` in fewer bits, and (once) with images that are as much smaller as that is too
    long, measured on val; their model is in `folder`. What the network cannot take is left out."""
    forms, candidate = in_fewer_bits(trial, budget), trial.form.measured.candidate
    model, most = load(trial.path), candidate.size * (HEADROOM * budget.latency / latency) ** 0.5
    sizes = range(int(most) // PIXELS * PIXELS, math.ceil(LEAST * candidate.size) - 1, -PIXELS)
    for size in () if Path(trial.path).parent == folder else sizes:
        try:
            figures, _, _ = evaluate(model, data, split="val", image_size=size)
        except ValueError:  # patches that do not divide it, say
            continue
        model.preprocess, smaller = replace(model.preprocess, size=size), replace(candidate, size=size)
        path = str(model.save(folder / smaller.name))
        form = replace(trial.form, measured=Measured(smaller))
        return [*forms, replace(trial, form=form, value=figures.scalars()[metric], path=path)]
    return forms


def settled_latency(file: Path, pictures: Sequence[Image], budget: Budget) -> float:
    """Of a file that was within the budget before: over it, it is measured again, since the machine may be busy."""
    latency = math.inf
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE * bool(attempt))
        latency = min(latency, file_latency(file, pictures, budget.threads))
        if latency <= budget.latency:
            break
    return latency


def correct(file: Path, model: Any, data: DataSet, split: str, budget: Budget) -> list[bool]:
    """Of every image, whether the file's prediction is right; one image at a time, as it is deployed."""
    if budget.on == "cuda":
        _, predictions, _ = evaluate(model, data.uri, split=split)
        assert isinstance(predictions, Predictions)  # of images with one label each
        return [bool(right) for right in predictions.guess == predictions.target]
    rows, run = open_for(model, data.uri)[split], read_onnx(file)
    right: list[bool] = []
    with EvalLoader(rows, Preprocess(model.preprocess), batch=64, device="cpu", workers=auto_workers(rows)) as loader:
        for batch in loader.received():
            for image, label in zip(batch.views[0], batch.label.tolist(), strict=True):
                right.append(int(run(image[None])[0].argmax()) == label)
    return right
