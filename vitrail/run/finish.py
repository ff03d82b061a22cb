"""The end of a training run: calibration on val, the one evaluation on test, the saved model or adapter, the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vitrail.config import dump
from vitrail.data.check.scan import Bad
from vitrail.engine.loop import Loop
from vitrail.measure.classification import Figures
from vitrail.measure.evaluator import (
    LOGIT_CLASSES,
    Predictions,
    metrics_of,
    write_predictions,
)
from vitrail.model.adapters.config import ADAPTER, read_header, summary
from vitrail.model.classifier import Classifier
from vitrail.model.heads.head import writes_texts
from vitrail.model.parts.modules import without_adapters
from vitrail.run.evaluate import figures_of, fit_on_val
from vitrail.run.page import RunSummary
from vitrail.run.preflight import one_answer, worse_than_prior
from vitrail.run.run_data import division

if TYPE_CHECKING:
    from vitrail.measure.language import LanguageFigures
    from vitrail.measure.trust import Fitted
    from vitrail.run.train import Trainer


@dataclass(frozen=True)
class Run:
    """A finished run: where it is, how good it is, and its model."""

    path: Path
    figures: Figures
    split: str  # on which the metrics were measured
    model: Classifier
    notes: tuple[str, ...] = ()
    adapter: Mapping[str, Any] | None = None
    """Contents of the file of a trained adapter."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Metrics of further evaluators, such as `knn`."""
    reading: str = ""
    """How to read the metrics, where the model was not trained to classify."""
    objective: str = "supervised"
    """Its kind."""

    @property
    def report(self) -> Path:
        return self.path / "report.html"


def finish(trainer: Trainer, loop: Loop, seconds: float, skipped: Sequence[Bad]) -> Run:
    """Evaluate once on test (val, where settings are still being chosen), save the model, write the report."""
    config, data, folder, group = trainer.config, trainer.data, trainer.folder, trainer.group
    model, split = loop.kept, config.data.judge if "test" in data.splits else "val"
    where: dict[str, Any] = {"device": trainer.device, "autocast": trainer.precision}
    outcome = loop.outcome()
    if config.engine.select == "best" and split == "val":
        outcome.append(
            "metrics on val are optimistic, since val selected the weights; hold out test images to evaluate"
        )
        loop.notes.append(outcome[-1])
        group.say(trainer.quiet, outcome[-1])
    fitted = _fit_trust(trainer, model, loop.notes, where) if config.calibrate else None
    many = len(data.classes) > LOGIT_CLASSES and not data.multilabel
    if fitted is not None and many:  # before probabilities are reduced to what metrics need
        model.calibration = fitted.calibration
    with trainer.module.evaluation(split) as loader:
        metrics, predictions = figures_of(model, loader, data.classes, **where)
        known = ("perplexity", "bleu") if writes_texts(model) else ("classification", "regression")
        others = trainer.evaluate(model, loader, split, [name for name in config.evaluators if name not in known])
        skipped = [row for rows in group.gather([*skipped, *loader.skipped]) for row in rows]
    if trainer.reference is not None:
        trainer.reference.close()
    trusted: dict[str, Any] | None = None
    if fitted is not None:
        before, model.calibration = predictions, fitted.calibration
        if isinstance(before, Predictions):
            predictions = fitted.calibrated(before, own=split == "val")
            metrics = metrics_of(predictions, data.classes)
        trusted = fitted.facts(before, predictions, split)
    if config.objective.kind in ("supervised", "distillation"):
        loop.notes += (only := [*one_answer(predictions, data), *worse_than_prior(metrics, data)])
        group.say(trainer.quiet, *only)
    model.stated |= {
        "recipe": config.recipe,
        "needs_labels": config.objective.needs_labels(),
        "data": data.uri,
        "division": division(config.data),
        "split": split,
        "figures": {**metrics.scalars(), **others},
        "seed": config.seed,
        **({} if trusted is None else {"trust": trusted}),
        **({"selected": loop.best.facts()} if config.engine.select == "best" else {}),
    }
    adapter: dict[str, Any] | None = None
    if group.main:
        if writes_texts(model):
            cast("LanguageFigures", metrics).keep(folder.path)
        elif metrics.classes:
            write_predictions(folder.path, predictions)
        line = {"step": loop.step, "epoch": round(loop.step * loop.batch / loop.images, 6), "split": split}
        folder.write_metrics({**line, "final": True, **metrics.scalars(), **others})
        adapter = _save(trainer, model, loop.notes)
        if fitted is not None:
            fitted.trust.save(folder.model)
        summary_of_run = RunSummary(
            folder,
            without_adapters(model),
            data,
            predictions,
            metrics,
            split=split,
            skipped=list(dict.fromkeys(skipped)),
            seconds=seconds,
            **where,
            title=f"{config.model.name} on {data.uri}",
            config=dump(config),
            adapter=adapter,
            trust=trusted,
            outcome=outcome,
        )
        trainer.module.report(summary_of_run)
    group.barrier()
    return Run(
        folder.path,
        metrics,
        split,
        model.eval(),
        tuple(loop.notes),
        adapter,
        others,
        trainer.reading,
        config.objective.kind,
    )


def _fit_trust(trainer: Trainer, model: Classifier, notes: list[str], where: dict[str, Any]) -> Fitted | None:
    """What val tells about probabilities; none, with a note, where it cannot."""
    if writes_texts(model) or model.regression or trainer.data.unlabelled or "val" not in trainer.data.splits:
        return None
    try:
        return fit_on_val(model, trainer.data, trainer.module.evaluation, trainer.config.seed, **where)
    except ValueError as error:
        notes.append(f"probabilities are not calibrated: {error}")
        trainer.group.say(trainer.quiet, notes[-1])
        return None


def _save(trainer: Trainer, model: Classifier, notes: list[str]) -> dict[str, Any] | None:
    """Save the model, or the adapter alone where it has one; returns the contents of the adapter's file."""
    folder, config = trainer.folder, trainer.config
    if not trainer.base_hash:
        model.save(folder.model)
        return None
    from vitrail.model.adapters.adapter_file import base_hash
    from vitrail.model.weights import save_adapted

    if base_hash(model) != trainer.base_hash:  # an objective that changes more than it trains
        notes.append("the base changed while the adapter was trained, so the whole model is kept, merged")
        trainer.group.say(trainer.quiet, notes[-1])
        model.save(folder.model)
        return None
    save_adapted(model, folder.model, weights=config.model.weights, seed=config.seed)
    return summary(read_header(folder.model / ADAPTER))
