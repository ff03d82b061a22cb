"""A saved model under other protocols than plain accuracy, and several models as one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.data.dataset import DataSet
from vitrail.data.loading.loader import EvalLoader, auto_workers
from vitrail.data.preprocess import Preprocess
from vitrail.engine.device import choose_device, choose_precision, evaluation_batch
from vitrail.engine.progress import Progress
from vitrail.measure.cifar_c import holds_corrupted, open_corrupted
from vitrail.measure.config import EpisodeConfig, LongTailConfig
from vitrail.measure.ensembles import Together, together
from vitrail.measure.evaluator import AnyPredictions, Findings, Loaders, Predictions, needs_of, only_classes
from vitrail.model.classifier import Classifier
from vitrail.model.parts.modules import placed
from vitrail.registry import kinds, part
from vitrail.run.evaluate import _with_classes_of, evaluate, load
from vitrail.run.run_data import open_for
from vitrail.schema import ConfigError, near


def evaluate_protocols(
    run: str | Path | Classifier,
    data: str | Path | DataSet,
    protocols: Sequence[str],
    *,
    split: str | None = None,
    batch: int | None = None,
    workers: int | None = None,
    device: str = "auto",
    precision: str = "auto",
    quiet: bool = True,
    episodes: EpisodeConfig | None = None,
    tail: LongTailConfig | None = None,
    classes: Sequence[str] = (),
) -> tuple[dict[str, Findings], str]:
    """What the named evaluators find on a split (none: test, or val where there is no test), and which split it was.

    Those that only read the model's embedding take data with other classes, too; the others need the model's
    classes. `episodes` and `tail` are settings of the protocols episodes and long_tail, and `classes` are those that
    episodes draw from (none: all). Raises `ConfigError` for unknown names, `ValueError` for data that will not do.
    """
    known = kinds("evaluator")
    problems = [f"no protocol {name!r}{near(name, known)}" for name in protocols if name not in known]
    if problems or not protocols:
        raise ConfigError(problems or [f"no protocol is named; there are {', '.join(known)}"])
    chosen = choose_device(device)
    model = run if isinstance(run, Classifier) else load(run)
    placed(model, chosen).reject_other("--protocol")
    paths = [Path(base, str(data)) for base in ("", os.environ.get("VITRAIL_DATA", ""))]
    official = list(protocols) == ["cifar_c"] and not isinstance(data, DataSet)
    corrupted = next((path for path in paths if official and holds_corrupted(path)), None)
    opened = open_corrupted(corrupted, model.classes) if corrupted else open_for(model, data)
    if opened.unlabelled:
        raise ValueError(f"{opened.uri} has no labels to evaluate with; name images that have: --data LABELLED")
    if any("embedding" not in needs_of([name]) for name in protocols):
        opened = _with_classes_of(model, opened)
    split = split or ("test" if corrupted or "test" in opened.splits else "val")
    wanted = set(opened.splits) if corrupted else {split}
    if "train" in needs_of(protocols):
        wanted = {split, "train", "val"} & {split, *opened.splits}
    if "episodes" in protocols and episodes is not None and episodes.support == "train":
        wanted |= {"train"} & set(opened.splits)
    missing = wanted - set(opened.splits)
    if missing:
        raise ValueError(
            f"{opened.uri} has no split {split!r}; it has {', '.join(opened.splits)}{near(split, opened.splits)}"
        )
    autocast = choose_precision(precision, chosen)
    with ExitStack() as stack:
        loaders = {
            name: stack.enter_context(
                EvalLoader(
                    opened[name],
                    Preprocess(model.preprocess),
                    batch=batch or evaluation_batch(chosen),
                    device=chosen,
                    workers=auto_workers(opened[name]) if workers is None else workers,
                )
            )
            for name in sorted(wanted)
        }
        shared = Loaders(opened.classes, loaders, split, [level.name for level in opened.levels], {})
        options: dict[str, dict[str, Any]] = {
            "episodes": {"config": episodes, "classes": classes},
            "long_tail": {"config": tail},
        }
        bar = stack.enter_context(Progress("protocols", len(protocols), quiet=quiet))
        findings = {}
        for name in protocols:
            evaluator = part("evaluator", name)
            findings[name] = evaluator(model, shared, device=chosen, autocast=autocast, **options.get(name, {}))
            bar.advance(1, name)
    return findings, split


@dataclass(frozen=True)
class Ensemble:
    """Models as one, and beside them, where it was asked for, as many seeds of one model."""

    data: str
    split: str
    runs: Together
    control: Together | None = None

    def to_json(self) -> dict[str, Any]:
        facts = {"data": self.data, "split": self.split, **self.runs.to_json()}
        if self.control is not None:
            facts["control"] = self.control.to_json()
            facts["gain_over_control"] = self.runs.gain - self.control.gain
        return facts


def ensemble(
    runs: Sequence[str | Path],
    data: str | Path | DataSet,
    *,
    control: Sequence[str | Path] = (),
    classes: Sequence[str] = (),
    split: str | None = None,
    **options: Any,
) -> Ensemble:
    """Figures of saved models and of their mean probabilities on the same images; `control` likewise.

    Every logit of every image and member is held in memory, as the mean needs all probabilities.
    With `classes` only these can be chosen. `options` as for `evaluate`. Raises `ValueError` for fewer than two models,
    or a control of another size.
    """
    if len(runs) < 2:
        raise ValueError("an ensemble needs at least two runs")
    if control and len(control) != len(runs):
        raise ValueError(f"the control must have as many runs as the ensemble: {len(runs)}, not {len(control)}")
    first = load(runs[0])
    first.reject_other("--ensemble")
    known, opened = first.classes, open_for(first, data)
    split = split or ("test" if "test" in opened.splits else "val")
    members: dict[str, Predictions] = {}
    for run in dict.fromkeys(str(run) for run in (*runs, *control)):
        model = load(run)
        _reject_other_images(open_for(model, data), opened, split, run, str(runs[0]))
        _, predictions, _ = evaluate(model, opened, split=split, every_logit=True, **options)
        members[run] = counted_as(predictions, model.classes, known, run)
    if classes:
        members = {run: only_classes(predictions, known, classes) for run, predictions in members.items()}
    names = list(classes) or known
    parts = [together(_members(members, group), names) if group else None for group in (runs, control)]
    assert parts[0] is not None
    return Ensemble(opened.uri, split, parts[0], parts[1])


def _reject_other_images(trained: DataSet, opened: DataSet, split: str, run: str, first: str) -> None:
    """Raises `ValueError` where a run divided the images otherwise, and so may have learned from evaluation images."""
    if split in opened.splits and not (
        split in trained.splits
        and np.array_equal(trained[split].index, opened[split].index)  # which images, and their order
    ):
        raise ValueError(
            f"{run} and {first} divided {opened.uri} differently (data.split_seed and its fractions), so one learned "
            "from images that the other is evaluated on; name data that come with a test split, or train them alike"
        )


def counted_as(predictions: AnyPredictions, classes: Sequence[str], wanted: Sequence[str], run: str) -> Predictions:
    """Predictions with their classes in another model's order. Raises `ValueError` where the classes are others."""
    if tuple(classes) == tuple(wanted):
        return Predictions(predictions.index, predictions.target, predictions.logits)
    if sorted(classes) != sorted(wanted):
        other = sorted(set(classes) ^ set(wanted))
        raise ValueError(f"{run} has other classes than the first run, as {other[0]!r}; an ensemble needs the same")
    number = {name: i for i, name in enumerate(classes)}
    columns = torch.tensor([number[name] for name in wanted])
    target = predictions.target[:, columns] if predictions.multilabel else columns.argsort()[predictions.target]
    return Predictions(predictions.index, target, predictions.logits[:, columns])


def _members(predictions: Mapping[str, Predictions], runs: Sequence[str | Path]) -> dict[str, Predictions]:
    """A run that is named twice is two members."""
    named: dict[str, Predictions] = {}
    for run in map(str, runs):
        name, copy = run, 2
        while name in named:
            name, copy = f"({copy}) {run}", copy + 1
        named[name] = predictions[run]
    return named
