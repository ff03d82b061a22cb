"""Adapters on disk: one safetensors file with the numbers of one adapter, and what they mean as JSON in its header.

It holds coefficients (factors, prompts), and what the adapter trains as a whole (classifier, norms); no base, no bases:

    groups.0.alpha    [layers, k]       rows in the order of `layers` of the JSON, those of one shape together
    groups.0.values   [layers, count, width]   prompts: of the first block, or of every block
    own.head.fc.weight                  under the model's own names
    groups.0.alpha    bytes             with `bits`: packed whole numbers, and beside them
    groups.0.alpha.scale [layers]       one scale a layer

The base is known by a hash: SHA-256 over name, type, shape and bytes of every parameter and stored buffer of the model
below its adapters, in the order of names, without those that the adapter has as a whole; its first 16 digits are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail.model.adapters.apply import M, apply, bank_of, base_state, counts, remove
from vitrail.model.adapters.bank import Adapter
from vitrail.model.adapters.config import AdapterConfig, Lora, Nola, Pranc, Vpt
from vitrail.model.adapters.header import FORMAT, KEY, read_header
from vitrail.model.adapters.pack import packed, unpacked
from vitrail.model.adapters.targets import Piece, below, pieces_of
from vitrail.schema import build, near, plain
from vitrail.version import __version__

KINDS: dict[str, type[AdapterConfig]] = {"lora": Lora, "nola": Nola, "pranc": Pranc, "vpt": Vpt}
OWN = "own."


class OtherBase(ValueError):
    """An adapter was trained on other weights than those it should be put on."""

    def __init__(self, path: str | Path, header: Mapping[str, Any], found: str) -> None:
        self.then, self.now = str(header["base"]), found
        super().__init__(
            f"{path} was trained on the base {self.then} ({header['architecture']}), this model's is {found}; take the"
            " weights it was trained on, or force=True if you know that they fit"
        )


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Changes with any name, type, shape or bit."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def base_tensors(model: nn.Module, own: list[str] | None = None) -> dict[str, Tensor]:
    """Of the model below its adapters, without what `own` names (none: what the adapter in use has as a whole)."""
    bank = bank_of(model)
    if own is None:
        own = [] if bank is None or bank.active is None else bank.adapter(bank.active).own.names()
    stored = set(model.state_dict())
    return {name: t for name, t in base_state(model).items() if name in stored and name not in own}


def base_hash(model: nn.Module, own: list[str] | None = None) -> str:
    """By which a base is known again: of its `base_tensors`."""
    return digest(base_tensors(model, own))


def save_adapter(model: nn.Module, name: str, path: str | Path, *, bits: int | None = None) -> int:
    """Write one adapter of a model; returns the size of the file in bytes.

    `bits` (2 to 8) rounds coefficients and packs them (none: float32, or what an adapter was trained to be rounded to).
    """
    from vitrail.model.store import write_tensors

    bank = bank_of(model)
    if bank is None:
        raise ValueError(f"this {type(model).__name__} has no adapters to save; apply one first")
    adapter = bank.adapter(name)
    bits = trained_bits(adapter) if bits is None else bits
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for number, group in enumerate(adapter.groups):
        for leaf, parameter in group.named_parameters():
            key = f"groups.{number}.{leaf}"
            if bits is None:
                tensors[key] = parameter.detach().float()
            else:
                shapes[key] = list(parameter.shape)
                tensors[key], tensors[f"{key}.scale"] = packed(parameter.detach().float(), bits)
    for full in adapter.own.names():
        tensors[OWN + full] = cast("Tensor", adapter.own.get(full)).detach()
    found, classes = counts(model, name), getattr(model, "classes", None)
    described = {
        "format": FORMAT,
        "vitrail": __version__,
        "name": name,
        "configs": [plain(config) for config in adapter.configs],
        "layers": [[piece.name for piece in pieces] for pieces in adapter.pieces],
        "architecture": getattr(model, "spec", {}).get("name") or type(model).__name__,
        "base": base_hash(model, adapter.own.names()),
        "classes": None if classes is None else list(classes),
        "numbers": {"trained": found.trained, "whole": found.whole, "stored": found.stored},
        "bits": bits,
        "shapes": shapes,
        "checksum": digest(tensors),
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, tensors, {KEY: json.dumps(described, ensure_ascii=False)})
    return path.stat().st_size


def trained_bits(adapter: Adapter) -> int | None:
    """Bits to which an adapter was rounded in training, if all of it was."""
    found = {config.bits for config in adapter.configs}
    return found.pop() if len(found) == 1 else None


def load_adapter(model: M, path: str | Path, name: str | None = None, *, force: bool = False) -> M:
    """Put the adapter of a file on a model, in place, and use it; `name` is what it was called (none).

    Raises `ValueError` with one sentence where the file is damaged, the model has other classes or other layers, or is
    another base than the adapter was trained on; `force=True` takes another base all the same.
    """
    header, tensors = read_adapter(path)
    name = str(header["name"]) if name is None else name
    bank = bank_of(model)
    if bank is not None and name in bank.named:
        raise ValueError(f"the model has an adapter {name!r} already; load this one under another name")
    _refuse_classes(model, header, path)
    own = [key.removeprefix(OWN) for key in tensors if key.startswith(OWN)]
    parts = [_pieces(model, names, path) for names in header["layers"]]
    _refuse_shapes(model, tensors, path)
    found = base_hash(model, own)
    if found != header["base"] and not force:
        raise OtherBase(path, header, found)
    configs = [build(KINDS[config["kind"]], config) for config in header["configs"]]
    try:
        for config, pieces in zip(configs, parts, strict=True):
            apply(model, config, name, pieces=pieces, whole=own)
        bank = bank_of(model)
        assert bank is not None
        _fill(bank.adapter(name), tensors, path)
    except ValueError:
        bank = bank_of(model)
        if bank is not None and name in bank.named:
            remove(model, name)
        raise
    return model


def read_adapter(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file, unpacked; one sentence if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    header = read_header(path)
    try:
        tensors: dict[str, Tensor] = dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, it cannot be loaded ({error})") from None
    if digest(tensors) != header["checksum"]:
        raise ValueError(f"{path} is damaged (its checksum does not match)")
    for key, shape in header["shapes"].items():
        tensors[key] = unpacked(tensors[key], tensors.pop(f"{key}.scale"), header["bits"], tuple(shape))
    return header, tensors


def _refuse_classes(model: nn.Module, header: dict[str, Any], path: str | Path) -> None:
    theirs, ours = header["classes"], getattr(model, "classes", None)
    if theirs is None or ours is None or list(ours) == theirs:
        return

    def some(names: list[str]) -> str:
        return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"

    raise ValueError(
        f"{path} is for the classes {some(theirs)}, the model has {some(list(ours))}; build the model with the classes"
        " of the adapter, which brings its own classifier"
    )


def _pieces(model: nn.Module, names: list[str], path: str | Path) -> list[Piece]:
    known = {piece.name: piece for layer, module in below(model) for piece in pieces_of(layer, module)}
    for name in names:
        if name not in known:
            raise ValueError(f"{path} adapts {name}, which this model does not have{near(name, known)}")
    return [known[name] for name in names]


def _refuse_shapes(model: nn.Module, tensors: Mapping[str, Tensor], path: str | Path) -> None:
    base = base_state(model)
    for key, tensor in tensors.items():
        if key.startswith(OWN):
            full = key.removeprefix(OWN)
            have = None if full not in base else tuple(base[full].shape)
            if have != tuple(tensor.shape):
                said = "nothing of that name" if have is None else f"{have}"
                raise ValueError(f"{path} holds {full} of shape {tuple(tensor.shape)}, the model has {said}")


@torch.no_grad()
def _fill(adapter: Adapter, tensors: Mapping[str, Tensor], path: str | Path) -> None:
    wanted = {f"groups.{i}.{leaf}": p for i, group in enumerate(adapter.groups) for leaf, p in group.named_parameters()}
    wanted |= {OWN + full: cast("Any", adapter.own.get(full)) for full in adapter.own.names()}
    for key, target in wanted.items():
        value = tensors.get(key)
        if value is None or value.shape != target.shape:
            have = "missing" if value is None else str(tuple(value.shape))
            raise ValueError(f"{path} does not fit the layers it names: {key} is {have}, not {tuple(target.shape)}")
        target.copy_(value)
