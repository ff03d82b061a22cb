"""A saved model, and its metrics on any data, according to its task."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch

from vitrail.data.config import PreprocessConfig
from vitrail.data.counter import seed_of, uniform
from vitrail.data.dataset import UNLABELLED, DataSet, Split, choose_level
from vitrail.data.open import open_source
from vitrail.engine.checkpoint import checkpoint_path, read, steps_saved
from vitrail.engine.device import choose_device, choose_precision
from vitrail.engine.progress import Progress
from vitrail.files import json_text, write_text
from vitrail.measure.classification import Figures
from vitrail.measure.evaluator import (
    NOTHING,
    AnyPredictions,
    Predictions,
    UnlabelledFigures,
    Where,
    batches,
    by_group,
    metrics_of,
    predict_all,
    rows_of_all,
    worst_group,
)
from vitrail.model.classifier import Calibration, Classifier
from vitrail.model.cost import cost
from vitrail.model.heads.head import writes_texts
from vitrail.model.parts.modules import placed
from vitrail.model.store import DESCRIPTION, model_folder, read_description
from vitrail.model.weights import load_model
from vitrail.run.data_module import Batches, evaluation_batches, reads_texts, reject_other_kind, reject_other_task
from vitrail.run.run_data import open_for
from vitrail.schema import ConfigError, check, near

if TYPE_CHECKING:
    from vitrail.measure.trust import Fitted

IMAGENET_V2 = frozenset(map(str, range(1000)))  # folders of ImageNet-V2 (arXiv 1902.10811) are class numbers


def figures_of(
    model: Classifier, loader: Batches, classes: Sequence[str], **where: Unpack[Where]
) -> tuple[Figures, AnyPredictions]:
    """Accuracy and the like of a classifier, and every prediction. Perplexity and BLEU of a language model, spread and
    rank of embeddings where images have no labels; predictions are then of no class: logits [examples, 0]."""
    if tuple(classes) == (UNLABELLED,):
        return _apart(model, loader, **where)
    if writes_texts(model):
        from vitrail.measure.language import language_figures

        figures = language_figures(model, loader, **where)
        return figures, _of_no_class(figures.count)
    predictions = predict_all(model, loader, **where)
    if model.regression:
        from vitrail.measure.parity import regression_figures

        return regression_figures(predictions), predictions
    return metrics_of(predictions, classes), predictions


def _of_no_class(count: int) -> Predictions:
    return Predictions(torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.zeros(count, 0))


def _apart(model: Classifier, loader: Batches, **where: Unpack[Where]) -> tuple[UnlabelledFigures, Predictions]:
    from vitrail.learn.selfsupervised import spread_and_rank

    index, embeddings = [], []
    for batch, images in batches(model, loader, **where):
        embeddings.append(model.outputs(images).representation.float())
        index.append(batch.index.to(images.device))
    rows = rows_of_all((torch.cat(index), torch.cat(embeddings)) if embeddings else None)
    if rows is None:
        raise ValueError(NOTHING)
    count, (spread, rank) = len(rows[1]), (float(v) for v in spread_and_rank(rows[1]))
    none = np.zeros(0)
    figures = UnlabelledFigures(
        (), count, float("nan"), none, none, none, np.zeros(0, np.int64), spread=spread, rank=rank
    )
    return figures, _of_no_class(count)


def load(
    path: str | Path,
    device: str | torch.device | None = None,
    *,
    base: str | Path | None = None,
    bits: int | None = None,
    merged: bool = True,
) -> Classifier:
    """The classifier of a run folder, a model folder or `hf:OWNER/NAME`; it preprocesses its own input.

    Of a run that trained an adapter: base and adapter, merged (or in use, with `merged=False`). `base` is where its
    base is now (none: where it was), `bits` rounds what the adapter trained to 2 to 8 bits.
    """
    if str(path).startswith("hf:"):
        from vitrail.model.hub import model_repository

        path = model_repository(str(path))
    return load_model(path, device, base=base, bits=bits, merged=merged)


def verify(path: str | Path) -> list[str]:
    """A sentence for each damaged checkpoint of a run, and for its model where that is; none: all is well."""
    faults, checkpoints = [], Path(path) / "checkpoint"
    for step in steps_saved(checkpoints):
        try:
            read(checkpoint_path(checkpoints, step))
        except ValueError as error:
            faults.append(str(error))
    try:
        load(path)
        from vitrail.measure.trust import FILE, Trust

        if (model_folder(path) / FILE).is_file():
            Trust.read(model_folder(path))
    except (ValueError, OSError) as error:
        faults.append(str(error))
    return faults


def evaluate(
    run: str | Path | Classifier,
    data: str | Path | DataSet,
    *,
    split: str | None = None,
    crop_ratio: float | None = None,
    image_size: int | None = None,
    batch: int | None = None,
    workers: int | None = None,
    device: str = "auto",
    precision: str = "auto",
    quiet: bool = True,
    every_logit: bool = False,
) -> tuple[Figures, AnyPredictions, str]:
    """Figures of a saved model on a split (none: test, or val where there is no test) of any data with its classes.

    Returns the figures, every prediction, and the split. Data that come undivided are divided as the model's run
    divided its own. Classes are matched by name; an unknown class is an error.
    `crop_ratio` and `image_size` take the place of the model's own (none). A run is evaluated with the weights that it
    kept. Of more than 1,000 classes predictions keep the highest logits only, unless `every_logit` is set.
    """
    chosen = choose_device(device)
    model = run if isinstance(run, Classifier) else load(run)
    placed(model, chosen)
    changes = {"crop_ratio": crop_ratio, "size": image_size}
    preprocess = replace(model.preprocess, **{name: v for name, v in changes.items() if v is not None})  # type: ignore[arg-type]
    _reject_impossible(model, preprocess)
    opened = open_for(model, data)
    reject_other_kind(reads_texts(model), opened)
    reject_other_task(writes_texts(model), opened)
    opened = _with_classes_of(model, opened)
    split = split or ("test" if "test" in opened.splits else "val")
    if split not in opened.splits:
        raise ValueError(
            f"{opened.uri} has no split {split!r}; it has {', '.join(opened.splits)}{near(split, opened.splits)}"
        )
    rows = opened[split]
    with (
        evaluation_batches(model, rows, preprocess, batch=batch, device=chosen, workers=workers) as loader,
        Progress("evaluate", len(rows), quiet=quiet) as bar,
    ):
        autocast = choose_precision(precision, chosen)
        where: Where = {"device": chosen, "autocast": autocast, "progress": bar.advance, "every_logit": every_logit}
        figures, predictions = figures_of(model, loader, model.classes, **where)
        for key, reason in loader.skipped:
            bar.say(f"skipped {key}: {reason}")
    return figures, predictions, split


HELD_OUT, REFERENCE = 2**26, 5_000  # logits of val, and training images, that are read; some, where there are more


def fit_on_val(
    model: Classifier,
    data: DataSet,
    evaluation: Callable[[Split], Batches],
    seed: int,
    outliers: DataSet | None = None,
    compare: bool = True,
    **where: Unpack[Where],
) -> Fitted:
    """Calibration, prediction sets and reject score of a model from val; `evaluation` gives the batches of a split.

    Raises `ValueError` where val has too few images. Test is never read.
    """
    from vitrail.measure.trust import FEWEST_HELD_OUT, fit_trust

    def some(rows: Split, most: int) -> Split:
        return rows.take(uniform(seed_of("trust", seed), rows.index).argsort(kind="stable")[:most])

    if (images := len(data["val"])) < 2 * FEWEST_HELD_OUT:
        raise ValueError(f"{images} val {data.things} are too few, at least {2 * FEWEST_HELD_OUT} are needed")
    with ExitStack() as stack:
        open_rows = lambda rows, most: stack.enter_context(evaluation(some(rows, most)))  # noqa: E731
        val = open_rows(data["val"], max(2_000, HELD_OUT // len(data.classes)))
        train = None if data.holds_texts else open_rows(data["train"], REFERENCE)
        others = None if outliers is None else open_rows(next(iter(outliers.splits.values())), REFERENCE)
        return fit_trust(model, val, train, seed, outliers=others, compare=compare, **where)


def calibrate(
    run: str | Path,
    data: str | Path | DataSet,
    *,
    outliers: str = "",
    compare: bool = True,
    batch: int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Fit calibration, prediction sets and reject score of a saved model on val, and store them with it.

    `outliers` are images of no class (none: they are made of val images). Without `compare`, no embeddings are compared
    with those of train, which a deployed file would have to hold. Returns what was fitted, and what it gives on
    test, where there is one.
    """
    chosen, folder = choose_device(device), model_folder(run)
    model = placed(load(run), chosen)
    model.reject_other("--calibrate")
    if writes_texts(model) or model.unlabelled:
        raise ValueError(f"{run} has no probabilities of classes to calibrate")
    opened = _with_classes_of(model, open_for(model, data))
    if not {"train", "val"} <= opened.splits.keys():
        raise ValueError(f"{opened.uri} has no train and val images to calibrate on; name data that have")
    where: Where = {"device": chosen, "autocast": choose_precision("auto", chosen)}

    def evaluation(rows: Split) -> Batches:
        return evaluation_batches(model, rows, model.preprocess, batch=batch, device=chosen, workers=None)

    model.calibration = Calibration()
    images = open_source(outliers) if outliers else None
    fitted = fit_on_val(model, opened, evaluation, int(model.stated.get("seed", 0)), images, compare, **where)
    split = "test" if "test" in opened.splits else "val"
    with evaluation(opened[split]) as loader:
        before = predict_all(model, loader, **where)
    after = fitted.calibrated(before, own=split == "val") if isinstance(before, Predictions) else before
    facts = fitted.facts(before, after, split)
    fitted.trust.save(folder)
    description = read_description(folder) | {"calibration": fitted.calibration.to_json()}
    description["stated"] = {**description["stated"], "trust": facts}
    write_text(folder / DESCRIPTION, json_text(description, indent=1))
    return facts


@dataclass(frozen=True)
class Judged:
    """Figures of one combination of a sweep."""

    data: str
    split: str
    image_size: int
    crop_ratio: float
    figures: Figures
    groups: dict[str, Any] = field(default_factory=dict)  # metrics by group

    def to_json(self) -> dict[str, Any]:
        conditions = {
            "data": self.data,
            "split": self.split,
            "image_size": self.image_size,
            "crop_ratio": self.crop_ratio,
        }
        groups = {"groups": self.groups, "worst_group": worst_group(self.groups)} if self.groups else {}
        return {**conditions, "count": self.figures.count, **self.figures.scalars(), **groups}


def sweep(
    run: str | Path | Classifier,
    data: Sequence[str | Path],
    *,
    crop_ratios: Sequence[float] = (),
    image_sizes: Sequence[int] = (),
    **options: Any,
) -> list[Judged]:
    """Figures on several data sets, at every given crop ratio and image size (none: the model's own).

    All combinations are tried on one image before data are read. `options` as for `evaluate`. A ratio or size that is
    chosen by such a table is chosen on val (`split="val"`), else its figure is too good to be true.
    """
    model = run if isinstance(run, Classifier) else load(run)
    sizes, ratios = image_sizes or (model.preprocess.size,), crop_ratios or (model.preprocess.crop_ratio,)
    for size in sizes:
        for ratio in ratios:
            _reject_impossible(model, replace(model.preprocess, size=size, crop_ratio=ratio))
    results = []
    for uri, opened in [(uri, open_for(model, uri)) for uri in data]:  # all are there before the first is read
        for size in sizes:
            for ratio in ratios:
                figures, predictions, used = evaluate(model, opened, crop_ratio=ratio, image_size=size, **options)
                groups = by_group(predictions, opened[used], model.classes)
                results.append(Judged(str(uri), used, size, ratio, figures, groups))
    return results


def _reject_impossible(model: Classifier, wanted: PreprocessConfig) -> None:
    """One sentence for a crop ratio out of range, or for images of a size that the model cannot take."""
    problems = check(wanted)
    if problems:
        raise ConfigError(problems)
    if wanted.size == model.preprocess.size:
        return
    try:
        cost(model, wanted.size)  # a forward pass without memory or time
    except (ValueError, AssertionError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or ["no reason given"]
        raise ValueError(f"image_size: the model cannot take images of {wanted.size} pixels: {reason[0]}") from None


def _known(model: Classifier) -> str:
    if model.unlabelled:
        return "learned without labels and knows none"
    return f"knows {', '.join(model.classes[:5])}{', ...' if len(model.classes) > 5 else ''}"


def _with_classes_of(model: Classifier, data: DataSet) -> DataSet:
    """`data` with its labels counted as the model counts them."""
    if data.numeric != model.regression:
        theirs, ours = ("values", "classes") if data.numeric else ("classes", "values")
        raise ValueError(f"{data.uri} has {theirs}, and the model predicts {ours}; name other data")
    if data.multilabel != model.multilabel:
        kinds = ("several labels per image", "one label per image")
        raise ValueError(
            f"{data.uri} has {kinds[not data.multilabel]}, the model was trained with {kinds[not model.multilabel]}"
        )
    if data.classes == model.classes:
        return data
    for level in data.levels:  # trained on a coarser level of the same data
        if level.classes == model.classes:
            return choose_level(data, level.name)
    wordnet = all(re.fullmatch(r"n\d{8}", name) for name in model.classes)
    if wordnet and len(model.classes) == len(data.classes) and set(data.classes) == IMAGENET_V2:
        names = sorted(model.classes)
        data = replace(data, classes=tuple(names[int(number)] for number in data.classes))
    number = {name: i for i, name in enumerate(model.classes)}
    unknown = [name for name in data.classes if name not in number]
    if unknown:
        remedy = (
            "name class folders by WordNet ids as in ImageNet, some or all, or 0 to 999, all of them, as in ImageNet-V2"
            if wordnet
            else "evaluate its embeddings on any classes: vitrail evaluate RUN --data DATA --protocol knn,linear"
        )
        raise ValueError(
            f"{data.uri} has classes that the model does not know: {', '.join(unknown[:5])}"
            f"{', ...' if len(unknown) > 5 else ''}; it {_known(model)}; {remedy}"
        )
    positions = np.array([number[name] for name in data.classes])
    splits = {}
    for name, split in data.splits.items():
        if data.multilabel:
            labels = np.zeros((len(split), len(model.classes)), dtype=split.labels.dtype)
            labels[:, positions] = split.labels
        else:
            labels = positions[split.labels]
        splits[name] = replace(split, labels=labels)
    return replace(data, classes=model.classes, splits=splits)
