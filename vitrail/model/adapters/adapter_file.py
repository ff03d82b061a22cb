"""Adapters on disk: one safetensors file with the tensors of one adapter, and what they mean as JSON in its header.

It holds coefficients (factors, prompts), and what the adapter trains as a whole (classifier, norms); no base, no bases:

    groups.0.alpha    [layers, k]       rows in the order of `layers` of the JSON, those of one shape together
    groups.0.values   [layers, count, width]   prompts: of the first block, or of every block
    own.head.fc.weight                  under the model's own names
    groups.0.alpha    bytes             with `bits`: packed whole numbers, 8 of 3 bits in 3 bytes, and with them
    groups.0.alpha.scale [layers]       one scale per layer

The base is known by a hash: SHA-256 over name, type, shape and bytes of every parameter and stored buffer of the model
below its adapters, in the order of names, without those that the adapter has as a whole; its first 16 digits are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vitrail.files import FORMAT_VERSION, json_text
from vitrail.model import store
from vitrail.model.adapters.apply import (
    M,
    adapters_of,
    apply,
    base_state,
    counts,
    remove,
    required,
)
from vitrail.model.adapters.config import FORMAT, KEY, AdapterConfig, Lora, Nola, Pranc, Vpt, read_header
from vitrail.model.adapters.inject import Adapter, below, matrices_of
from vitrail.model.adapters.methods import to_integers
from vitrail.schema import build, near, plain
from vitrail.version import __version__

KINDS: dict[str, type[AdapterConfig]] = {config.kind: config for config in (Lora, Nola, Pranc, Vpt)}
OWN = "own."


class OtherBase(ValueError):
    """An adapter was trained on other weights than those it should be put on."""

    def __init__(self, path: str | Path, header: Mapping[str, Any], base: str) -> None:
        self.then, self.now = str(header["base"]), base
        super().__init__(
            f"{path} was trained on the base {self.then} ({header['architecture']}), this model's is {base}; take the"
            " weights it was trained on, or force=True if you know that they fit"
        )


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Changes with any name, type, shape or bit."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]


def base_tensors(model: nn.Module, whole: list[str] | None = None) -> dict[str, Tensor]:
    """Of the model below its adapters, without what `whole` names (none: what the adapter in use has as a whole)."""
    adapters = adapters_of(model)
    if whole is None:
        whole = [] if adapters is None or adapters.in_use is None else list(adapters.in_use.own.tensors())
    stored = set(model.state_dict())
    return {name: t for name, t in base_state(model).items() if name in stored and name not in whole}


def base_hash(model: nn.Module, whole: list[str] | None = None) -> str:
    """By which a base is known again: of its `base_tensors`."""
    return digest(base_tensors(model, whole))


def packed(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """values [layers, ...] as bytes [ceil(entries * bits / 8)] and the scale of each layer [layers]."""
    integers, scale = to_integers(values.cpu(), bits)
    shifted = (integers.flatten().to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8).numpy()
    digits = (shifted[:, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return torch.from_numpy(np.packbits(digits.astype(np.uint8), bitorder="little")), scale.flatten().float()


def unpacked(data: Tensor, scale: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """The values that `packed` kept, [layers, ...] in float32."""
    entries = int(np.prod(shape))
    digits = np.unpackbits(data.numpy(), bitorder="little", count=entries * bits).reshape(entries, bits)
    shifted = (digits.astype(np.int16) << np.arange(bits, dtype=np.int16)).sum(1)
    integers = torch.from_numpy(shifted - 2 ** (bits - 1)).view(shape)
    return integers.to(scale.dtype) * scale.view(-1, *[1] * (len(shape) - 1))


def _tensors(adapter: Adapter) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Coefficients (factors, prompts), and what is trained as a whole, by the names of the file."""
    leaves = [(i, leaf, p) for i, group in enumerate(adapter.groups) for leaf, p in group.named_parameters()]
    whole = {OWN + name: tensor.detach() for name, tensor in adapter.own.tensors().items()}
    return {f"groups.{i}.{leaf}": p.detach() for i, leaf, p in leaves}, whole


def save_adapter(model: nn.Module, name: str, path: str | Path, *, bits: int | None = None) -> int:
    """Write one adapter of a model; returns the size of the file in bytes.

    `bits` (2 to 8) rounds coefficients and packs them (none: float32, or what an adapter was trained to be rounded to).
    """
    adapter = required(model, " to save").adapter(name)
    trained_bits = {config.bits for config in adapter.configs}
    if bits is None and len(trained_bits) == 1:
        (bits,) = trained_bits
    coefficients, tensors = _tensors(adapter)
    for key, parameter in coefficients.items():
        if bits is None:
            tensors[key] = parameter.float()
        else:
            tensors[key], tensors[f"{key}.scale"] = packed(parameter.float(), bits)
    numbers, classes = counts(model, name), getattr(model, "classes", None)
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "vitrail": __version__,
        "name": name,
        "configs": [plain(config) for config in adapter.configs],
        "layers": [[matrix.name for matrix in matrices] for matrices in adapter.matrices],
        "architecture": getattr(model, "spec", {}).get("name") or type(model).__name__,
        "base": base_hash(model, list(adapter.own.tensors())),
        "classes": None if classes is None else list(classes),
        "numbers": {"trained": numbers.trained, "whole": numbers.whole, "stored": numbers.stored},
        "bits": bits,
        "shapes": {} if bits is None else {key: list(p.shape) for key, p in coefficients.items()},
        "checksum": digest(tensors),
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    store.write_tensors(path, tensors, {KEY: json_text(header)})
    return path.stat().st_size


def load_adapter(model: M, path: str | Path, name: str | None = None, *, force: bool = False) -> M:
    """Put the adapter of a file on a model, in place, and use it; `name` is what it was called (none).

    Raises `ValueError` with one sentence where the file is damaged, the model has other classes or other layers, or is
    another base than the adapter was trained on; `force=True` takes another base all the same.
    """
    header, tensors = read_adapter(path)
    name = str(header["name"]) if name is None else name
    if (adapters := adapters_of(model)) is not None and name in adapters.named:
        raise ValueError(f"the model has an adapter {name!r} already; load this one under another name")
    theirs, ours = header["classes"], getattr(model, "classes", None)
    if theirs is not None and ours is not None and list(ours) != theirs:
        raise ValueError(
            f"{path} is for the classes {_shown(theirs)}, the model has {_shown(ours)}; build the model with the"
            " classes of the adapter, which brings its own classifier"
        )
    known = {matrix.name: matrix for layer, module in below(model) for matrix in matrices_of(layer, module)}
    if unknown := [layer for layers in header["layers"] for layer in layers if layer not in known]:
        raise ValueError(f"{path} adapts {unknown[0]}, which this model does not have{near(unknown[0], known)}")
    whole = {key.removeprefix(OWN): tensor for key, tensor in tensors.items() if key.startswith(OWN)}
    check_shapes(model, whole, path)
    base = base_hash(model, list(whole))
    if base != header["base"] and not force:
        raise OtherBase(path, header, base)
    with removed_on_error(model, name):
        for config, layers in zip(header["configs"], header["layers"], strict=True):
            matrices = [known[layer] for layer in layers]
            apply(model, build(KINDS[config["kind"]], config), name, matrices=matrices, whole=list(whole))
        coefficients, own = _tensors(required(model).adapter(name))
        for key, target in (coefficients | own).items():
            value = tensors.get(key)
            if value is None or value.shape != target.shape:
                have = "missing" if value is None else str(tuple(value.shape))
                raise ValueError(f"{path} does not fit the layers it names: {key} is {have}, not {tuple(target.shape)}")
            target.copy_(value)
    return model


def read_adapter(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file, unpacked; one sentence if it is damaged."""
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


def _shown(classes: Sequence[str]) -> str:
    return f"{len(classes)} ({', '.join(classes[:3])}{', ...' if len(classes) > 3 else ''})"


def check_shapes(model: nn.Module, whole: Mapping[str, Tensor], path: str | Path) -> None:
    """Raises `ValueError` for tensors that the model does not have in the same shape."""
    base = base_state(model)
    for name, tensor in whole.items():
        have = tuple(base[name].shape) if name in base else None
        if have != tuple(tensor.shape):
            shown = "nothing of that name" if have is None else str(have)
            raise ValueError(f"{path} holds {name} of shape {tuple(tensor.shape)}, the model has {shown}")


@contextmanager
def removed_on_error(model: nn.Module, name: str) -> Iterator[None]:
    """Take a new adapter off again where reading it fails."""
    try:
        with torch.no_grad():
            yield
    except ValueError:
        if (adapters := adapters_of(model)) is not None and name in adapters.named:
            remove(model, name)
        raise
