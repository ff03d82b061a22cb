"""All checks before data is read, in the order in which `train` makes them, and warnings where nothing is invalid."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch

from vitrail.config import RUN_OF, RunConfig, validate
from vitrail.data.dataset import DataSet
from vitrail.data.open import open_data
from vitrail.engine.device import ProcessGroup, choose_device, choose_precision
from vitrail.engine.run_folder import unused
from vitrail.files import reject_unwritable
from vitrail.learn.attack_config import AttackConfig
from vitrail.learn.config import ObjectiveConfig
from vitrail.measure.classification import Figures, SingleLabelFigures, prior_loss
from vitrail.measure.evaluator import AnyPredictions
from vitrail.model.config import OWN_TEXT, ModelConfig
from vitrail.model.heads.config import Distilled
from vitrail.model.hub import WEIGHT_FILES, weights_in
from vitrail.model.store import holds_model, model_folder, read_description, read_tensors
from vitrail.model.zoo import ZOO
from vitrail.quantities import number
from vitrail.recipes import RECIPES, recipe, with_values
from vitrail.registry import kinds
from vitrail.schema import ConfigError, near

FETCHED = ("torchvision:", "hf:")  # to look whether such data are there may be to download them


def check_settings(config: RunConfig) -> None:
    """Raises `ConfigError` with everything that is wrong with a configuration, missing files among it."""
    problems = validate(config)
    if config.recipe not in RECIPES:
        problems.append(f"recipe: no recipe {config.recipe!r}{near(config.recipe, RECIPES)}")
    known = kinds("evaluator")
    problems += [
        f"evaluators: no evaluator {name!r}{near(name, known)}" for name in config.evaluators if name not in known
    ]
    if not config.data.uri:
        problems.append(
            "data: say where the images are, or the texts (--data FOLDER; `vitrail list data` names the forms)"
        )
    problems += missing_parts(config)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


COLOUR = ("jitter", "hue", "three", "grey", "solarise", "rand_ops", "trivial", "auto")  # of RGB in eight bits


def without_unfit(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The configuration less the settings of its recipe that its channels or values exclude, and a note on each.

    Raises `ConfigError` where they were set otherwise than the recipe has them: nothing that was asked for is dropped.
    """
    off, unfit = RunConfig(), dict[str, str]()
    if config.data.channels != 3 or config.data.maximum is not None:
        unfit = {f"data.{part}.{name}": "it is of RGB in eight bits" for part in ("augment", "weak") for name in COLOUR}
    if config.objective.kind == "regression":
        unfit |= dict.fromkeys(
            (f"data.{n}" for n in ("sampling", "shots", "long_tail", "label_noise")), "it is of classes"
        )
        unfit |= {"data.augment.cutmix": "the share of a box is no share of a value"}
        if "regression" not in config.evaluators:
            unfit |= {"evaluators": "they are of classes"}
            off = replace(off, evaluators=("regression",))
    if not unfit:
        return config, []
    named, notes, problems = recipe(config.recipe, config.model.name), [], []
    for path, reason in unfit.items():
        value, fit, before = (attrgetter(path)(settings) for settings in (config, off, named))
        if value == fit:
            continue
        if value == before:
            config = with_values(config, {path: fit})
            notes.append(f"{path}: {fit} in place of {value}, which the recipe has, since {reason}")
        else:
            problems.append(f"{path}: {value} does not go with this run, since {reason}; set {fit}")
    if problems:
        raise ConfigError(problems)
    return config, notes


def check_machine(config: RunConfig, group: ProcessGroup) -> None:
    """Raises where this machine lacks the device, its precision or a package that the run needs."""
    if config.engine.track != "none":
        from vitrail.engine.trackers import reject_untracked

        reject_untracked(config.engine.track)
    choose_precision(config.engine.precision, choose_device(config.engine.device, group))
    if config.model.weights == "timm":
        from vitrail.model.trunks.timm_trunk import local_weights

        name = config.model.name
        theirs = name.removeprefix("timm:") if name.startswith("timm:") else ZOO[name].timm
        if problem := local_weights(theirs or "")[1]:
            raise ValueError(problem)


def check_output(config: RunConfig, group: ProcessGroup) -> None:
    """Raises where the run folder exists, or could not be written."""
    if config.out is not None:
        path = Path(config.out)
        if not unused(path):
            how = f"continue it with: vitrail train --resume {path}, or " if (path / "config.yaml").exists() else ""
            raise FileExistsError(f"{path} already exists; {how}choose another --out")
    if group.main:
        reject_unwritable(config.out or "runs")


def missing_parts(config: RunConfig, made_before: Container[Path] = ()) -> list[str]:
    """A sentence for each part of a run that is not there, with the setting that names it. `made_before` are folders
    of runs that will be there."""
    return [*_model(config.model, made_before), *_teacher(config.objective, made_before)]


def _model(chosen: ModelConfig, made_before: Container[Path]) -> list[str]:
    name, weights = chosen.name, chosen.weights
    published = weights == "timm"
    if name.startswith("timm:") and (unknown := _timm("model.name", name, published=published)):
        return unknown
    if published and name in ZOO:
        return _timm("model.weights", f"timm:{ZOO[name].timm}", published=True) if ZOO[name].timm else _none_for(name)
    if weights in ("none", "timm", "hub", "hub:fetch") or Path(weights) in made_before:
        return []
    if weights.startswith(RUN_OF):
        return [_of_a_study("model.weights", weights)]
    if not Path(weights).exists() or (name.startswith("text:") and not (Path(weights) / "config.yaml").is_file()):
        return []  # the former is said by `validate`; a folder of transformers says itself what it lacks
    return _stored("model.weights", Path(weights))


def _teacher(objective: ObjectiveConfig, made_before: Container[Path]) -> list[str]:
    name = getattr(objective, "teacher", None)
    if name is None or (objective.kind == "attention_transfer" and name in ("", "random")):
        return []
    if not name:
        return ["objective.teacher: name one: a run folder, timm:NAME, or a weights file of a CIFAR ResNet"]
    if name.startswith("timm:"):
        return _timm("objective.teacher", name, published=True)
    if name.startswith(RUN_OF):
        return [_of_a_study("objective.teacher", name)]
    return [] if Path(name) in made_before else _stored("objective.teacher", Path(name))


def _of_a_study(setting: str, name: str) -> str:
    return f"{setting}: {name} names a run of a study file (vitrail compare); name a run folder or a file of weights"


def _timm(setting: str, name: str, *, published: bool) -> list[str]:
    """A name that timm does not know, or of which it has no weights where these are wanted."""
    import timm

    from vitrail.model.trunks.timm_trunk import known_to_timm, unknown_name

    bare = name.removeprefix("timm:")
    if not known_to_timm(bare):
        return [f"{setting}: {unknown_name(bare)}"]
    if published and not timm.models.is_model_pretrained(bare):
        return [f"{setting}: timm has no published weights of {bare}; take another model, or a run or file of weights"]
    return []


def _none_for(name: str) -> list[str]:
    from vitrail.model.weights import published_models

    having = ", ".join(published_models())
    return [
        f"model.weights: no published weights for {name}; set none, a run or a file; models that have them: {having}"
    ]


def _stored(setting: str, path: Path) -> list[str]:
    """Weights on disk. A file is read as a whole: nothing less tells that it is one."""
    if not path.exists():
        return [f"{setting}: there is nothing at {path}; name a finished run, a model folder or a file of weights"]
    if path.is_dir() and not holds_model(path):
        file = weights_in(path) if setting == "model.weights" else None
        if file is None:
            lacks = f" (it has no {' or '.join(WEIGHT_FILES[:2])})" if setting == "model.weights" else ""
            return [
                f"{setting}: {path} is no run and no model folder{lacks}; name a finished run, or a file of weights"
            ]
        path = file
    try:
        if path.is_file():
            read_tensors(path)
        else:
            read_description(model_folder(path))
    except (ValueError, OSError) as error:
        return [f"{setting}: {error}"]
    return []


def reject_missing_data(uri: str) -> None:
    """Raises what `open_data` says of data that are not there; those that are, or must be fetched, are not touched."""
    if not uri.startswith(FETCHED) and not Path(uri).exists():
        open_data(uri)


FEW_IMAGES = 2000  # below this a transformer from scratch mostly memorises
FEW_STEPS, SMALL_BATCH = 3, 16  # an epoch of fewer steps is said, and this batch advised
HIGH_RATES = {  # optimiser -> learning rate from which a model seldom learns anything, and one that is usual
    "adam": (0.01, 1e-3),
    "adamw": (0.01, 1e-3),
    "lamb": (0.05, 4e-3),
    "muon": (0.2, 0.02),
    "sgd": (5.0, 0.1),
    "adagrad": (0.5, 0.01),
}
LOW = 0.05  # share of the usual learning rate below which a model from scratch hardly learns


def warnings_before(config: RunConfig, data: DataSet, parameters: int, tuned: int, peak: float) -> list[str]:
    """Warnings and notes before a run; `peak` is the learning rate that is reached."""
    notes = []
    count, adapter = len(data["train"]), config.model.adapter
    size = f"{parameters / 1e6:.1f} M" if parameters >= 1e6 else f"{parameters:,}"
    if adapter is not None:
        notes.append(f"{adapter.kind}: {tuned:,} numbers are trained, {parameters:,} parameters stay as they are")
        if config.model.weights == "none":
            notes.append(
                "warning: model.weights is none, so the adapter changes random weights; give a run or file to adapt one"
                " that was trained"
            )
    elif config.optim.tune != "full":
        notes.append(f"tune {config.optim.tune}: {tuned:,} of {parameters:,} parameters are trained")
    elif config.model.name.startswith("text:") and config.model.name not in OWN_TEXT and config.model.weights == "none":
        notes.append(
            f"warning: weights of {config.model.name} are not read and training begins from random ones; "
            "--model.weights hub reads them"
        )
    elif config.model.weights == "none" and count < FEW_IMAGES:
        notes.append(
            f"warning: {count} training {data.things} are few for {size} parameters from scratch; "
            "start from weights (vitrail train finetune, or --model.weights timm|RUN|PATH)"
        )
    if count < FEW_STEPS * config.data.batch and config.data.batch > 2 * SMALL_BATCH:
        notes.append(
            f"warning: {count} training {data.things} are {count / config.data.batch:.2g} batches of "
            f"{config.data.batch}, so that an epoch has hardly a step; set --data.batch {SMALL_BATCH}"
        )
    row, chosen = ZOO.get(config.model.name), config.model.head
    if row is not None and isinstance(row.head, Distilled) and chosen is not None and not isinstance(chosen, Distilled):
        notes.append(
            f"warning: model.head {chosen.kind} replaces what {config.model.name} is named for; keep its distillation "
            "token with --model.head.kind distilled"
        )
    learns_weights = not isinstance(config.objective, AttackConfig)  # a patch wants another rate
    learns_weights = learns_weights and (adapter is None or adapter.kind == "lora")  # as do coefficients
    high, usual = HIGH_RATES[config.optim.name]
    from_scratch = config.model.weights == "none" and adapter is None and config.objective.kind == "supervised"
    low = from_scratch and peak < LOW * usual
    if learns_weights and config.optim.tune != "head" and (peak >= high or low):
        scaled = "" if peak == config.optim.lr else f" ({config.optim.lr:g} scaled to a batch of {config.data.batch})"
        set_it = ", and --optim.lr_batch none takes --optim.lr as it is" if low and scaled else ""
        notes.append(
            f"warning: a learning rate of {peak:g}{scaled} is {'low' if low else 'high'} for {config.optim.name}"
            f"{' from scratch' if low else ''}; {usual:g} is usual{set_it}"
        )
    return notes


def one_answer(predictions: AnyPredictions, data: DataSet) -> list[str]:
    """A warning where a model predicts one class for every image; several labels per image are not checked."""
    predicted = predictions.guess.unique() if not predictions.multilabel else torch.empty(0)
    if len(predicted) != 1 or len(predictions) < 2:
        return []
    return [
        f"warning: all {len(predictions):,} {data.things} are predicted as {data.classes[int(predicted)]!r}, so "
        "nothing was learned; train longer, or with another optim.lr"
    ]


def worse_than_prior(metrics: Figures, data: DataSet) -> list[str]:
    """A warning where the loss is above that of predicting class frequencies; not for several labels per image."""
    if not isinstance(metrics, SingleLabelFigures):
        return []
    prior = prior_loss(np.bincount(data["train"].labels, minlength=len(data.classes)), metrics.support)
    if metrics.loss <= prior:
        return []
    return [
        f"warning: the loss, {number(metrics.loss)}, is worse than that of predicting class frequencies alone, "
        f"{number(prior)}; training diverged (lower --optim.lr) or the model is far too confident"
    ]
