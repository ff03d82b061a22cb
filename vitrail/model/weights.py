"""Starting from weights: published ones, a run of our own, or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.model.classifier import Classifier
from vitrail.model.store import WEIGHTS, load_model, model_folder, read_description, read_tensors
from vitrail.model.timm_weights import load_weights
from vitrail.model.trunks.timm_trunk import no_weights, timm_preprocess
from vitrail.model.zoo import ZOO
from vitrail.schema import build


def start_from(model: Classifier, name: str, weights: str) -> list[str]:
    """Fill `model` from `weights` (timm, a run or model folder, a file); returns what was adapted, in words.

    The weights' own normalisation, crop ratio and interpolation come with them. Raises one sentence with a remedy where
    there are no such weights.
    """
    if hasattr(model.trunk, "tokeniser"):
        from vitrail.model.text_build import load_text_weights

        notes = load_text_weights(model, weights)
    elif weights == "timm":
        notes = _published(model, name)
    else:
        path = Path(weights)
        if path.is_dir():
            from vitrail.data.config import PreprocessConfig

            folder = model_folder(path)
            described = read_description(folder)
            used = build(PreprocessConfig, described["preprocess"])
            model.preprocess = replace(used, size=model.preprocess.size)
            tensors = load_model(folder).state_dict() if "adapter" in described else read_tensors(folder / WEIGHTS)
            try:
                notes = load_weights(model, tensors) + _other_policy(described["spec"], model.spec)
            except ValueError as error:
                theirs = described["spec"].get("name")
                if not theirs or theirs == name:
                    raise
                raise ValueError(
                    f"{weights} is a {theirs} and not a {name}: set --model.name {theirs}; {error}"
                ) from None
        else:
            notes = load_weights(model, read_tensors(path))
    model.stated["weights"] = {"from": weights, "adapted": notes}
    return notes


def _other_policy(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """What is said where weights of an adaptive model go into one that decides otherwise."""
    there, here = (dict((spec.get("trunk") or {}).get("adaptive") or {}) for spec in (theirs, ours))
    if not there or not here or there.get("kind") != here.get("kind"):
        return []
    apart = [
        f"{name} {here.get(name)} in place of {value}"
        for name, value in there.items()
        if here.get(name, value) != value
    ]
    return [f"tokens are chosen otherwise than where the weights come from: {', '.join(apart)}"] if apart else []


def published_models() -> list[str]:
    """Models of the zoo of which timm has weights."""
    import timm

    return [name for name, spec in ZOO.items() if spec.timm and timm.models.is_model_pretrained(spec.timm)]


def _published(model: Classifier, name: str) -> list[str]:
    import timm

    theirs = ZOO[name].timm
    if theirs is None or not timm.models.is_model_pretrained(theirs):
        raise ValueError(f"no published weights for {name}; models that have them: {', '.join(published_models())}")
    try:
        published = timm.create_model(theirs, pretrained=True)
    except Exception as error:
        raise ValueError(no_weights(theirs, error)) from None
    model.preprocess = replace(timm_preprocess(published), size=model.preprocess.size)
    return load_weights(model, published.state_dict())
