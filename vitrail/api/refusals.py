"""Checks for the files that a run needs, weights, a teacher and data, before any image is read."""

from __future__ import annotations

from pathlib import Path

from vitrail.config import RunConfig
from vitrail.data.open import open_data
from vitrail.learn.config import ObjectiveConfig
from vitrail.model.config import ModelConfig
from vitrail.model.store import DESCRIPTION, model_folder, read_description, read_tensors
from vitrail.model.timm_trunk import known_to_timm, unknown_name
from vitrail.model.weights import published_models
from vitrail.model.zoo import ZOO

FETCHED = ("torchvision:", "hf:")  # to look whether such data are there may be to download them


def missing_parts(config: RunConfig) -> list[str]:
    """A sentence for each part of a run that is not there, with the setting that names it."""
    return [*_model(config.model), *_teacher(config.objective)]


def _model(chosen: ModelConfig) -> list[str]:
    name, weights = chosen.name, chosen.weights
    published = weights == "timm"
    if name.startswith("timm:") and (unknown := _timm("model.name", name, published=published)):
        return unknown
    if published and name in ZOO:
        return _timm("model.weights", f"timm:{ZOO[name].timm}", published=True) if ZOO[name].timm else _none_for(name)
    if weights in ("none", "timm", "hub", "hub:fetch"):
        return []
    if not Path(weights).exists() or (name.startswith("text:") and not (Path(weights) / "config.yaml").is_file()):
        return []  # the former is said by `validate`; a folder of transformers says itself what it lacks
    return _stored("model.weights", Path(weights))


def _teacher(objective: ObjectiveConfig) -> list[str]:
    name = getattr(objective, "teacher", None)
    if name is None or (objective.kind == "attention_transfer" and name in ("", "random")):
        return []
    if not name:
        return ["objective.teacher: name one: a run folder, timm:NAME, or a weights file of a CIFAR ResNet"]
    if name.startswith("timm:"):
        return _timm("objective.teacher", name, published=True)
    return _stored("objective.teacher", Path(name))


def _timm(setting: str, name: str, *, published: bool) -> list[str]:
    """A name that timm does not know, or of which it has no weights where these are wanted."""
    import timm

    bare = name.removeprefix("timm:")
    if not known_to_timm(bare):
        return [f"{setting}: {unknown_name(bare)}"]
    if published and not timm.models.is_model_pretrained(bare):
        return [f"{setting}: timm has no published weights of {bare}; take another model, or a run or file of weights"]
    return []


def _none_for(name: str) -> list[str]:
    having = ", ".join(published_models())
    return [
        f"model.weights: no published weights for {name}; set none, a run or a file; models that have them: {having}"
    ]


def _stored(setting: str, path: Path) -> list[str]:
    """Weights on disk. A file is read as a whole: nothing less tells that it is one."""
    if not path.exists():
        return [f"{setting}: there is nothing at {path}; name a finished run, a model folder or a file of weights"]
    if path.is_dir() and not any(
        (path / name).is_file() for name in ("config.yaml", DESCRIPTION, f"model/{DESCRIPTION}")
    ):
        return [f"{setting}: {path} is no run and no model folder; name a finished run, or a file of weights"]
    try:
        if path.is_file():
            read_tensors(path)
        else:
            read_description(model_folder(path))
    except (ValueError, OSError) as error:
        return [f"{setting}: {error}"]
    return []


def refuse_missing_data(uri: str) -> None:
    """Raises what `open_data` says of data that are not there; those that are, or must be fetched, are not touched."""
    if not uri.startswith(FETCHED) and not Path(uri).exists():
        open_data(uri)
