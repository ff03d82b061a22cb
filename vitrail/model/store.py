"""Models on disk: safetensors for weights, one JSON for the rest. Nothing is ever unpickled.

Every file of ours is read through `current_names`, which knows the names of earlier versions: a model's weights, and
checkpoints, whose names begin with a section (`objective/model.head.q.weight`,
`optimizer/model.head.q.weight/exp_avg`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from vitrail.files import FORMAT_VERSION, checksum, json_text, parse_json, reject_later, replacing, write_text
from vitrail.model.config import ModelConfig
from vitrail.model.heads.config import AttentionPool
from vitrail.model.parts.modules import without_adapters
from vitrail.schema import ConfigError, Count, brief, build, plain
from vitrail.version import __version__

if TYPE_CHECKING:
    from vitrail.model.classifier import Classifier

T = TypeVar("T")

# Attention pooling had its layer's parameters next to the classifier; now it is the layer of class attention.
ATTENTION_POOL = (
    (r"query\b", "cls_token"),
    (r"(norm1|norm2|ls1|ls2|mlp)\.", r"blocks.0.\2."),
    (r"([qkv]|proj)\.", r"blocks.0.attn.\2."),
)


def current_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """The same tensors under the names that they have now.

    >>> current_names({"head.query": 1, "head.q.weight": 2, "head.fc.weight": 3})
    {'head.cls_token': 1, 'head.blocks.0.attn.q.weight': 2, 'head.fc.weight': 3}
    """
    heads = {match[1] for name in tensors if (match := re.search(r"(?:^|/)((?:[^/]*\.)?head\.)query(?:/|$)", name))}
    rules = [(rf"(^|/){re.escape(head)}{old}", rf"\1{head}{new}") for head in heads for old, new in ATTENTION_POOL]

    def current(name: str) -> str:
        return next((re.sub(old, new, name) for old, new in rules if re.search(old, name)), name)

    return {current(name): value for name, value in tensors.items()}


def earlier_layout(chosen: ModelConfig, stored: Collection[str]) -> ModelConfig:
    """The model of a run that is resumed, with the parts that its name stood for when the checkpoint was written.

    `stored` are the names in the checkpoint. PatchConvNets had BatchNorm in the stem and no biases in the pooling.
    """
    if not chosen.name.startswith("patchconvnet_") or "objective/model.trunk.patch_embed.norms.0.weight" not in stored:
        return chosen
    trunk = {"stem": {"kind": "conv", "norm": True}, **chosen.trunk}
    return replace(chosen, trunk=trunk, head=AttentionPool() if chosen.head is None else chosen.head)


WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"
FORMAT, WHOLE = 2, 1  # the newest that is read; 2 is a base and an adapter, 1 a whole model


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors, atomically; those that share memory, or are not contiguous, are copied."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    ready = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    end = 0
    for name, tensor in sorted(ready.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            ready[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    with replacing(path) as temporary:
        try:
            save_file(ready, temporary, metadata=dict(metadata or {}))
        except SafetensorError as error:  # its own kind for errors of the operating system
            raise OSError(f"cannot write {path}: {error}") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or a foreign `.pth` with `weights_only=True`. One sentence if it is damaged."""
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return current_names(load_file(path))
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} is damaged or no weights file, it cannot be loaded ({reason})") from None
    for key in ("model", "state_dict", "model_state_dict", "state_dict_ema", "model_ema"):
        if isinstance(tensors, dict) and isinstance(tensors.get(key), dict):
            tensors = tensors[key]
            break
    if not isinstance(tensors, dict) or not all(isinstance(v, Tensor) for v in tensors.values()):
        raise ValueError(f"{path} holds no plain dictionary of tensors")
    return {str(k).removeprefix("module."): v for k, v in tensors.items()}


def save_model(model: Classifier, folder: Path) -> Path:
    """Write `model` into `folder`; an adapter in use is merged in what is written, and the model stays as it is."""
    model = without_adapters(model)
    write_tensors(folder / WEIGHTS, model.state_dict())
    return write_description(model, folder, WHOLE, folder / WEIGHTS)


def write_description(model: Classifier, folder: Path, form: int, file: Path, **more: Any) -> Path:
    """The JSON next to the weights. It has size and checksum of their file, so that damage is noticed."""
    description = {
        "format": form,
        "format_version": FORMAT_VERSION,
        "vitrail": __version__,
        "spec": model.spec,
        "classes": list(model.classes),
        "multilabel": model.multilabel,
        "preprocess": plain(model.preprocess),
        "stated": model.stated,
        **({} if model.calibration.kind == "identity" else {"calibration": model.calibration.to_json()}),
        "bytes": file.stat().st_size,
        "checksum": checksum(file),
        **({"files": list(model.files)} if model.files else {}),
        **more,
    }
    for name, text in model.files.items():
        write_text(folder / name, text)
    write_text(folder / DESCRIPTION, json_text(description, indent=1))
    return folder


def holds_model(path: Path) -> bool:
    """Whether a folder is a run or a model of ours."""
    return any((path / name).is_file() for name in ("config.yaml", DESCRIPTION, f"model/{DESCRIPTION}"))


def model_folder(path: str | Path) -> Path:
    """The folder that holds a model: `path` itself, or `model/` of a run folder."""
    path = Path(path)
    for folder in (path, path / "model"):
        if (folder / DESCRIPTION).is_file():
            return folder
    if (path / "config.yaml").is_file():
        raise FileNotFoundError(
            f"{path} is a run that has not finished; continue it with: vitrail train --resume {path}"
        )
    raise FileNotFoundError(
        f"no model at {path} (neither {DESCRIPTION} nor model/{DESCRIPTION} is there); name a finished run or a model "
        "folder"
    )


@dataclass(frozen=True)
class Description:
    """The entries of `model.json` that are read, and their types."""

    format: Count
    spec: Mapping[str, Any]
    classes: tuple[str, ...]
    multilabel: bool
    preprocess: Mapping[str, Any]
    calibration: Mapping[str, Any] | None = None
    files: tuple[str, ...] = ()


def read_description(folder: Path) -> dict[str, Any]:
    """The JSON next to the weights. Raises `ValueError` where an entry is missing or cannot be what it says."""
    path = folder / DESCRIPTION
    try:
        description: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        wrong = [] if isinstance(description, dict) else ["it holds no entries"]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        wrong = [f"{type(error).__name__}: {error}"]
    if not wrong:
        reject_later(path, description, FORMAT)
        try:
            entries = {field.name for field in fields(Description)} & description.keys()
            read = build(Description, {name: description[name] for name in entries})
            lists = {name: description.get(name, []) for name in ("classes", "files")}
            wrong = [f"{name} is {brief(v)}, not a list" for name, v in lists.items() if not isinstance(v, list)]
            stated = description.get("stated", {})
            wrong += [] if isinstance(stated, dict) else [f"stated is {brief(stated)}, which has no entries"]
            wrong += ["two classes have one name"] if len(set(read.classes)) < len(read.classes) else []
        except ConfigError as error:
            wrong = error.problems
    if wrong:
        raise ValueError(f"{path} is damaged ({wrong[0]})")
    return description


def read_files(folder: Path, description: dict[str, Any]) -> dict[str, str]:
    """Texts saved with the weights, by name, as `Classifier.files`. Raises `FileNotFoundError` for what is gone."""
    texts = {}
    for name in description.get("files", ()):
        if not (folder / Path(name).name).is_file():
            raise FileNotFoundError(f"{folder} lacks {name}, which was saved with the model; copy the whole folder")
        texts[str(name)] = (folder / Path(name).name).read_text(encoding="utf-8")
    return texts


def reject_mixed(description: dict[str, Any], file: Path) -> None:
    """Raises `ValueError` for weights of another size or checksum than their description says."""
    if not file.is_file():
        return
    stored = description.get("checksum")  # earlier versions had none
    same = description.get("bytes") == file.stat().st_size
    if not same or (stored is not None and stored != checksum(file)):
        raise ValueError(f"{file} is damaged or does not belong to the description next to it; copy the folder again")
