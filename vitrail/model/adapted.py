"""A model folder that holds an adapter alone: the base is found again, or made again, when it is loaded.

Beside `adapter.safetensors` the description has the entry `adapter`: where the base's weights were (`weights`: none,
timm, or a place; `relative`: that place as seen from this folder, for runs that are moved together), and the `seed`
with which everything that no weights filled was made. Whether it is the same base, the hash in the file tells.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from vitrail.data.config import PreprocessConfig
from vitrail.model.adapters.apply import bank_of, quantise
from vitrail.model.adapters.files import OtherBase, load_adapter, save_adapter
from vitrail.model.adapters.header import ADAPTER, read_header
from vitrail.model.adapters.merged import merged_copy
from vitrail.model.classifier import Classifier
from vitrail.model.store import FORMAT, read_files, refuse_mixed, write_description
from vitrail.schema import build


def save_adapted(model: Classifier, folder: Path, *, weights: str, seed: int) -> Path:
    """Write the adapter in use and where its base came from: `weights` as a configuration has them, and the seed."""
    bank = bank_of(model)
    if bank is None or bank.active is None:
        raise ValueError("no adapter is in use; save the model as a whole")
    folder.mkdir(parents=True, exist_ok=True)
    save_adapter(model, bank.active, folder / ADAPTER)
    found: dict[str, Any] = {"file": ADAPTER, "weights": weights, "seed": seed}
    if weights.startswith("hub"):  # of a text model: a folder, which is looked for like any other, or a name
        named = Path(str(model.spec["trunk"]["name"]))
        weights = str(named) if named.is_dir() else "hub"
        found["weights"] = weights
    if weights not in ("none", "timm", "hub"):
        there = Path(weights).resolve()
        found |= {"weights": str(there), "relative": os.path.relpath(there, folder.resolve())}
    return write_description(model, folder, FORMAT, folder / ADAPTER, adapter=found)


def load_adapted(
    folder: Path, description: dict[str, Any], *, base: str | Path | None, bits: int | None, merged: bool
) -> Classifier:
    """Base and adapter of such a folder, as `vitrail.model.store.load_model` says."""
    file = folder / str(description["adapter"].get("file", ADAPTER))
    read_header(file)  # one sentence for a file that is damaged or gone, before the base is looked for
    refuse_mixed(description, file)
    model = _base(folder, description, base)
    model.files = read_files(folder, description)
    try:
        load_adapter(model, file)
    except OtherBase as error:
        where = base or description["adapter"]["weights"]
        made = "the random start that its seed makes" if str(where) == "none" else str(where)
        raise ValueError(
            f"the base of {folder} has changed: {made} is not what it was trained on (base {error.then}, now"
            f" {error.now}); name the old weights with base (--base PATH)"
        ) from None
    if bits is not None:
        quantise(model, bits)
    return merged_copy(model) if merged else model


def _base(folder: Path, description: dict[str, Any], base: str | Path | None) -> Classifier:
    from vitrail.model.build import from_spec
    from vitrail.model.weights import start_from

    weights = _weights(folder, description["adapter"], base)
    preprocess = build(PreprocessConfig, description["preprocess"])
    spec = description["spec"]
    pretrained = weights == "timm" and spec["trunk"].get("kind") == "timm"
    with torch.random.fork_rng(devices=[]):  # as training began: what the weights do not fill is made by the seed
        torch.default_generator.manual_seed(int(description["adapter"]["seed"]))
        model = from_spec(
            spec,
            classes=description["classes"],
            multilabel=description["multilabel"],
            preprocess=preprocess,
            device=None,
            pretrained=pretrained,
        )
        if weights != "none" and not pretrained:
            start_from(model, str(spec.get("name", "")), weights)
    model.preprocess, model.stated = preprocess, description.get("stated", {})
    return model


def _weights(folder: Path, recorded: dict[str, Any], base: str | Path | None) -> str:
    if base is not None:
        if not Path(base).exists():
            raise FileNotFoundError(f"no base at {base}; name the run, model folder or weights file it was trained on")
        return str(base)
    weights = str(recorded["weights"])
    if weights in ("none", "timm", "hub"):
        return weights
    for place in (Path(weights), folder / str(recorded.get("relative", ""))):
        if place.exists() and place.resolve() != folder.resolve():
            return str(place)
    raise FileNotFoundError(
        f"{folder} holds an adapter alone, and its base is gone from {weights}; say where it is now with base"
        " (--base PATH)"
    )
