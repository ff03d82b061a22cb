"""Starting from weights: published ones, a run of our own, or a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vitrail.model.classifier import Classifier
from vitrail.model.store import WEIGHTS, load_model, model_folder, read_description, read_tensors
from vitrail.model.timm import load_weights
from vitrail.model.timm_trunk import no_weights, timm_preprocess
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
            notes = load_weights(model, tensors)
        else:
            notes = load_weights(model, read_tensors(path))
    model.stated["weights"] = {"from": weights, "adapted": notes}
    return notes


def _published(model: Classifier, name: str) -> list[str]:
    import timm

    theirs = ZOO[name].timm
    if theirs is None or not timm.models.is_model_pretrained(theirs):
        having = [n for n, spec in ZOO.items() if spec.timm and timm.models.is_model_pretrained(spec.timm)]
        raise ValueError(f"no published weights for {name}; models that have them: {', '.join(having)}")
    try:
        published = timm.create_model(theirs, pretrained=True)
    except Exception as error:
        raise ValueError(no_weights(theirs, error)) from None
    model.preprocess = replace(timm_preprocess(published), size=model.preprocess.size)
    return load_weights(model, published.state_dict())
