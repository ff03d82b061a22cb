"""Weights of a model: a saved one is loaded, a new one starts from published weights, a run of ours, or a file.

A model folder can hold an adapter alone. Its description then has the entry `adapter`: where the base's weights were
(`weights`: none, timm, or a path; `relative`: that path as seen from this folder, for runs that are moved together),
and the `seed` with which all that no weights filled was initialised. A hash tells whether it is the same base.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.data.config import PreprocessConfig
from vitrail.model import store
from vitrail.model.adapters.config import ADAPTER, read_header
from vitrail.model.assemble import from_spec
from vitrail.model.classifier import Calibration, Classifier
from vitrail.model.hub import weights_in
from vitrail.model.zoo import ZOO
from vitrail.schema import build

NAMED = ("none", "timm", "hub")  # weights that are no path
IMAGENET = 1000  # classes of ImageNet-1k


def load_model(
    path: str | Path,
    device: str | torch.device | None = None,
    *,
    base: str | Path | None = None,
    bits: int | None = None,
    merged: bool = True,
) -> Classifier:
    """A saved classifier, in eval mode, ready to preprocess its own input.

    One that was trained as an adapter is built again from its base, which is looked for where it was (or at `base`);
    the adapter, with its coefficients rounded to `bits`, is merged, or in use where `merged` is false. Raises one
    sentence where the base is gone or is another one now.
    """
    folder = store.model_folder(path)
    description = store.read_description(folder)
    if "adapter" in description:
        return _load_adapted(folder, description, base, bits, merged).to(device or "cpu").eval()
    for option, value in (("base", base), ("bits", bits)):
        if value is not None:
            raise ValueError(f"{option}: {path} is a whole model, not an adapter of one; leave it out")
    store.reject_mixed(description, folder / store.WEIGHTS)
    tensors = store.read_tensors(folder / store.WEIGHTS)
    try:
        model = _described(description, "meta")
    except (RuntimeError, TypeError, MemoryError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder / store.DESCRIPTION} describes no model that can be built ({reason})") from None
    _check_tensors(model, tensors, folder / store.WEIGHTS)
    model.load_state_dict(tensors, strict=True, assign=True)
    for module in model.modules():  # what is computed and not stored still lives on the meta device
        fill = getattr(module, "fill_buffers", None)
        if callable(fill):
            fill()
    if any(buffer.is_meta for buffer in model.buffers()):  # of timm: rotary positions, which its files leave out
        model = _described(description, "cpu")
        model.load_state_dict(tensors, strict=True)
    model.stated, model.files = description.get("stated", {}), store.read_files(folder, description)
    return model.to(device or "cpu").eval()


def _check_tensors(model: Classifier, tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Raises `ValueError` for tensors that are missing, unknown, of another shape, or not finite."""
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    wrong = [f"lacks {name}" for name in shapes if name not in tensors]
    wrong += [f"has {name}, which the model has not" for name in tensors if name not in shapes]
    wrong += [
        f"has {name} of shape {tuple(tensors[name].shape)}, not {shape}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if wrong:
        raise ValueError(f"{file} does not fit the description next to it: it {wrong[0]}")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{file} holds weights that are NaN or infinite (first: {name}); train or copy it again")


def _described(description: Mapping[str, Any], device: str | None, pretrained: bool = False) -> Classifier:
    """The model of a description, with new weights."""
    options = {key: description[key] for key in ("classes", "multilabel")}
    preprocess = build(PreprocessConfig, description["preprocess"])
    model = from_spec(description["spec"], **options, preprocess=preprocess, device=device, pretrained=pretrained)
    if description.get("calibration") is not None:
        model.calibration = Calibration.from_json(description["calibration"])
        if len(model.calibration.scale) not in (0, len(model.classes)):
            raise ValueError(f"the calibration is of {len(model.calibration.scale)} classes, not {len(model.classes)}")
    return model


def save_adapted(model: Classifier, folder: Path, *, weights: str, seed: int) -> Path:
    """Write the adapter in use and where its base came from: `weights` as a configuration has them, and the seed."""
    from vitrail.model.adapters.adapter_file import save_adapter
    from vitrail.model.adapters.apply import adapters_of

    adapters = adapters_of(model)
    if adapters is None or adapters.active is None:
        raise ValueError("no adapter is in use; save the model as a whole")
    folder.mkdir(parents=True, exist_ok=True)
    save_adapter(model, adapters.active, folder / ADAPTER)
    if weights.startswith("hub"):  # of a text model: a folder, which is looked for like any other, or a name
        named = Path(str(model.spec["trunk"]["name"]))
        weights = str(named) if named.is_dir() else "hub"
    entry: dict[str, Any] = {"file": ADAPTER, "weights": weights, "seed": seed}
    if weights not in NAMED:
        path = Path(weights).resolve()
        entry |= {"weights": str(path), "relative": os.path.relpath(path, folder.resolve())}
    return store.write_description(model, folder, store.FORMAT, folder / ADAPTER, adapter=entry)


def _load_adapted(
    folder: Path, description: dict[str, Any], base: str | Path | None, bits: int | None, merged: bool
) -> Classifier:
    from vitrail.model.adapters.adapter_file import OtherBase, load_adapter
    from vitrail.model.adapters.apply import merged_copy, quantise

    recorded = description["adapter"]
    file = folder / str(recorded.get("file", ADAPTER))
    read_header(file)  # one sentence for a file that is damaged or gone, before the base is looked for
    store.reject_mixed(description, file)
    weights, spec = _base_weights(folder, recorded, base), description["spec"]
    pretrained = weights == "timm" and spec["trunk"].get("kind") == "timm"
    with torch.random.fork_rng(devices=[]):  # as training began: what the weights do not fill comes from the seed
        torch.default_generator.manual_seed(int(recorded["seed"]))
        model = _described(description, None, pretrained)
        if weights != "none" and not pretrained:
            start_from(model, str(spec.get("name", "")), weights)
    model.preprocess = build(PreprocessConfig, description["preprocess"])
    model.stated, model.files = description.get("stated", {}), store.read_files(folder, description)
    try:
        load_adapter(model, file)
    except OtherBase as error:
        weights = str(base or recorded["weights"])
        origin = "the random start that its seed makes" if weights == "none" else weights
        raise ValueError(
            f"the base of {folder} has changed: {origin} is not what it was trained on (base {error.then}, now"
            f" {error.now}); name the old weights with base (--base PATH)"
        ) from None
    if bits is not None:
        quantise(model, bits)
    return merged_copy(model) if merged else model


def _base_weights(folder: Path, recorded: dict[str, Any], base: str | Path | None) -> str:
    if base is not None:
        if not Path(base).exists():
            raise FileNotFoundError(f"no base at {base}; name the run, model folder or weights file it was trained on")
        return str(base)
    weights = str(recorded["weights"])
    if weights in NAMED:
        return weights
    for path in (Path(weights), folder / str(recorded.get("relative", ""))):
        if path.exists() and path.resolve() != folder.resolve():
            return str(path)
    raise FileNotFoundError(
        f"{folder} holds an adapter alone, and its base is gone from {weights}; say where it is now with base"
        " (--base PATH)"
    )


def start_from(model: Classifier, name: str, weights: str) -> list[str]:
    """Fill `model` from `weights`: timm, a run or model folder, a file, or a folder with one as the hub has it.

    Returns notes on what was adapted; a sentence about all that was loaded is in `model.stated["weights"]`.

    The weights' own normalisation, crop ratio and interpolation come with them. Raises one sentence with a remedy where
    there are no such weights.
    """
    path = source = Path(weights)
    if hasattr(model.trunk, "tokeniser"):
        from vitrail.model.text_build import HUB, load_text_weights

        saved = weights not in HUB and any((path / f / store.DESCRIPTION).is_file() for f in ("", "model"))
        notes = load_text_weights(model, weights, load_model(path).state_dict() if saved else None)
    elif weights == "timm":
        notes = _published(model, name)
    else:
        from vitrail.model.timm_weights import load_weights

        if path.is_dir() and not store.holds_model(path):
            source = weights_in(path) or path
        notes = _of_folder(model, name, path) if source.is_dir() else load_weights(model, store.read_tensors(source))
    model.stated["weights"] = {"from": weights, "adapted": notes, "loaded": _loaded(model, notes, str(source))}
    return notes


def state_published(model: Classifier) -> None:
    """Write into `model.stated` what timm loaded into its own model, as `start_from` does."""
    backbone: Any = model.trunk.backbone
    settings, anew = backbone.pretrained_cfg, list[str]()
    if not getattr(backbone, "classifier_is_published", False):
        anew = [f"{name} (({settings['num_classes']},) in the weights) starts anew" for name in model.head_parameters()]
    if model.channels != 3:
        from vitrail.model.timm_weights import adapted_note

        anew.append(adapted_note(model.channels))
    loaded = _loaded(model, anew, f"{settings.get('hf_hub_id') or settings.get('url')}")
    model.stated["weights"] = {"from": "timm", "adapted": anew, "loaded": loaded}


def _loaded(model: Classifier, notes: Sequence[str], source: str) -> str:
    """One sentence: how many tensors came from where, what was resized, which head was replaced."""
    anew = [note for note in notes if note.endswith("starts anew")]
    total = sum(not name.endswith("num_batches_tracked") for name in model.state_dict())
    others = [note for note in notes if note not in anew]
    counts = [int(match[1]) for note in anew if (match := re.search(r"\(\((\d+),.*in the weights", note))]
    if any(count > 1 for count in counts):
        others.append(f"the head for {max(counts)} classes was replaced")
    elif anew:
        others.append(f"{len(anew)} tensors ({anew[0].partition(' ')[0]}, ...) start from random values")
    return "; ".join((f"loaded {total - len(anew)} of {total} tensors from {source}", *others))


def _of_folder(model: Classifier, name: str, path: Path) -> list[str]:
    from vitrail.model.timm_weights import load_weights

    folder = store.model_folder(path)
    description = store.read_description(folder)
    theirs = replace(build(PreprocessConfig, description["preprocess"]), size=model.preprocess.size)
    model.preprocess = theirs if len(theirs.mean) == model.channels else model.preprocess
    adapted = "adapter" in description
    tensors = load_model(folder).state_dict() if adapted else store.read_tensors(folder / store.WEIGHTS)
    try:
        return load_weights(model, tensors) + _other_policy(description["spec"], model.spec)
    except ValueError as error:
        theirs = description["spec"].get("name")
        if not theirs or theirs == name:
            raise
        raise ValueError(f"{path} is a {theirs} and not a {name}: set --model.name {theirs}; {error}") from None


def _other_policy(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """A note where weights of an adaptive model go into one that decides otherwise."""
    there, here = (dict((spec.get("trunk") or {}).get("adaptive") or {}) for spec in (theirs, ours))
    if not there or not here or there.get("kind") != here.get("kind"):
        return []
    options = [
        f"{key} {here[key]} in place of {value}" for key, value in there.items() if here.get(key, value) != value
    ]
    return [f"tokens are chosen otherwise than where the weights come from: {', '.join(options)}"] if options else []


def published_models() -> list[str]:
    """Models of the zoo of which timm has weights."""
    import timm

    return [name for name, spec in ZOO.items() if spec.timm and timm.models.is_model_pretrained(spec.timm)]


def checkpoint_of(name: str, weights: str = "") -> str:
    """timm's name, tag included, of the checkpoint of a model by name; empty where only a file can have its weights.

    `name` and `weights` as for `published_classifier`. Raises `ValueError` for weights that timm does not have.
    """
    import timm

    from vitrail.model.trunks.timm_trunk import known_to_timm, unknown_name

    named = next((text for text in (weights, name) if text.startswith("timm:")), "")
    theirs = named.removeprefix("timm:") if named else ZOO[name].timm
    if theirs is None:
        if weights:
            return ""
        raise ValueError(f"no published weights for {name}; models that have them: {', '.join(published_models())}")
    if not known_to_timm(theirs):
        raise ValueError(unknown_name(theirs))
    try:
        settings = timm.get_pretrained_cfg(theirs)
    except RuntimeError:  # an unknown tag
        settings = None
    if settings is None or settings.num_classes != IMAGENET:
        tags = timm.list_pretrained(f"{theirs.partition('.')[0]}.*")
        raise ValueError(f"timm has no weights {theirs!r} with the 1,000 classes of ImageNet; it has {', '.join(tags)}")
    return f"{settings.architecture}.{settings.tag}".rstrip(".")


def published_classifier(name: str, weights: str = "") -> Classifier:
    """A model by name with its published weights, image size and preprocessing, and the classes of ImageNet-1k.

    `timm:NAME` is timm's implementation, a name of the zoo ours. `weights` is another checkpoint of timm (`timm:NAME`)
    or a file; none: the model's own. Classes are the 1,000 WordNet ids, which published weights count in sorted order.
    Raises one sentence where weights cannot be fetched or do not fill the whole model.
    """
    import timm
    from timm.data.imagenet_info import ImageNetInfo

    from vitrail.model.build import create_model
    from vitrail.model.timm_weights import load_weights
    from vitrail.model.trunks.timm_trunk import published_backbone, timm_preprocess

    checkpoint, classes = checkpoint_of(name, weights), ImageNetInfo("imagenet-1k").label_names()
    tensors = None
    if weights and not weights.startswith("timm:"):
        if not Path(weights).is_file():
            raise FileNotFoundError(f"no weights file at {weights}; name a .safetensors or .pth file, or timm:NAME")
        tensors = store.read_tensors(Path(weights))
    if tensors is not None and not checkpoint:
        model = create_model(name, classes=classes)
        notes = load_weights(model, tensors)
    else:
        try:  # timm itself renames what the authors' files call otherwise
            if tensors is None:
                published = published_backbone(checkpoint, "--weights FOLDER/model.safetensors")
            else:
                overlay = {"state_dict": tensors}
                published = timm.create_model(checkpoint, pretrained=True, pretrained_cfg_overlay=overlay)
        except Exception as error:
            if tensors is None:
                raise
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{weights} does not hold the weights of timm:{checkpoint} ({reason})") from None
        preprocess, state = timm_preprocess(published), published.state_dict()
        if name.startswith("timm:"):
            model = create_model(f"timm:{checkpoint}", classes=classes, preprocess=preprocess)
            state = {f"trunk.backbone.{key}": tensor for key, tensor in state.items()}
        else:
            model = create_model(name, classes=classes, preprocess=preprocess, image_size=preprocess.size)
        notes = load_weights(model, state)
    if notes:
        raise ValueError(f"{weights or checkpoint} does not fill the whole of {name}: {'; '.join(notes[:3])}")
    model.stated["published"] = checkpoint
    return model.eval()


def _published(model: Classifier, name: str) -> list[str]:
    import timm

    from vitrail.model.timm_weights import load_weights
    from vitrail.model.trunks.timm_trunk import published_backbone, timm_preprocess

    theirs = ZOO[name].timm
    if theirs is None or not timm.models.is_model_pretrained(theirs):
        raise ValueError(f"no published weights for {name}; models that have them: {', '.join(published_models())}")
    published = published_backbone(theirs)
    if model.channels == 3:
        model.preprocess = replace(timm_preprocess(published), size=model.preprocess.size)
    return load_weights(model, published.state_dict())
