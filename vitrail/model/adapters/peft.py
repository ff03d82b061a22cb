"""LoRA in the form of the peft package: a folder of adapter_config.json and adapter_model.safetensors.

There a module has lora_A [rank, inputs] and lora_B [outputs, rank], and its change is (alpha / rank) B A. A fused qkv
is one module there and three pieces here: going out, the ranks of its pieces stand side by side, each in its own rows
of B; coming in, every piece takes all of A and its rows of B. Scales go out inside of B, with alpha = rank.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail.files import write_text
from vitrail.model.adapters.apply import M, apply, bank_of, remove
from vitrail.model.adapters.bank import Adapter
from vitrail.model.adapters.config import Lora
from vitrail.model.adapters.group import LowRank
from vitrail.model.adapters.lora import LoraGroup
from vitrail.model.adapters.targets import Piece, below, kind_of, pieces_of
from vitrail.schema import near

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
Place = tuple[Piece, Tensor, Tensor]  # a piece, its lora_A, its rows of lora_B


def export_peft(model: nn.Module, name: str, folder: str | Path, *, base: str | None = None) -> Path:
    """Write an adapter for peft, to be put on this very module there; NOLA is written out as the LoRA it amounts to.

    `base` is what peft calls `base_model_name_or_path`. Raises `ValueError` for what peft's LoRA cannot express:
    changes without factors (PRANC), prompts, and convolutions, which are cut differently there.
    """
    from vitrail.model.store import write_tensors

    bank = bank_of(model)
    if bank is None:
        raise ValueError(f"this {type(model).__name__} has no adapters to export; apply one first")
    adapter = bank.adapter(name)
    if adapter.prompts is not None:
        raise ValueError(f"adapter {name!r} has prompts, which peft's LoRA has no place for; save it as a file of ours")
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    transposed = False
    with torch.no_grad():
        changes = adapter.changes()
    for layer, places in adapter.places.items():
        module = model.get_submodule(layer)
        kind = kind_of(module)
        if kind == "conv":
            raise ValueError(f"{layer} is a convolution, which peft's LoRA factorises differently; leave it out")
        transposed = transposed or kind == "transposed"
        outputs = cast("Tensor", module._parameters["weight"]).shape[1 if kind == "transposed" else 0]
        ups, downs = [], []
        for piece, group, row in places:
            change = changes[group][row]
            if not isinstance(change, LowRank):
                raise ValueError(f"the change of {piece.name} has no factors, as peft's LoRA needs them (PRANC)")
            ups.append(nn.functional.pad(change.up, (0, 0, piece.start, outputs - piece.stop)))
            downs.append(change.down)
        tensors[f"{PREFIX}{layer}.lora_A.weight"] = torch.cat(downs)
        tensors[f"{PREFIX}{layer}.lora_B.weight"] = torch.cat(ups, 1)
        ranks[layer] = sum(len(down) for down in downs)
    own = adapter.own.names()
    for full in own:
        tensors[PREFIX + full] = cast("Tensor", adapter.own.get(full)).detach()
    usual = max(set(ranks.values()), key=list(ranks.values()).count)
    # Patterns are regular expressions there; a name with dots would match others' ends as well.
    others = {f"^{re.escape(layer)}$": rank for layer, rank in ranks.items() if rank != usual}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": list(ranks),
        "modules_to_save": list(dict.fromkeys(full.rpartition(".")[0] for full in own)) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
    }
    write_text(folder / CONFIG, json.dumps(described, indent=1))
    return folder


def import_peft(model: M, folder: str | Path, name: str = "default") -> M:
    """Put a LoRA that peft saved on a model, in place, and use it.

    Modules are found by their names, also where peft had timm's module of one of our ViTs. Raises `ValueError` for what
    is more than plain LoRA (DoRA, trained biases, embeddings) and for modules that the model does not have.
    """
    from vitrail.model.store import read_tensors

    folder = Path(folder)
    described = _described(folder)
    bank = bank_of(model)
    if bank is not None and name in bank.named:
        raise ValueError(f"the model has an adapter {name!r} already; import this one under another name")
    pairs: dict[str, dict[str, Tensor]] = {}
    own: dict[str, Tensor] = {}
    for full, tensor in read_tensors(folder / WEIGHTS).items():
        module, _, rest = full.removeprefix(PREFIX).partition(".lora_")
        if rest in ("A.weight", "B.weight"):
            pairs.setdefault(module, {})[rest[0]] = tensor
        elif rest:
            raise ValueError(f"{folder} holds {full}, which is more than LoRA of linear layers")
        else:
            own[_ours(model, module)] = tensor
    for full, tensor in own.items():
        have = _shape(model, full)
        if have != tuple(tensor.shape):
            said = "nothing of that name" if have is None else str(have)
            raise ValueError(f"{folder} holds {full} of shape {tuple(tensor.shape)}, the model has {said}")
    plan = _plan(model, folder, described, pairs)
    try:
        for (rank, scale), places in plan.items():
            chosen = tuple(dict.fromkeys(piece.layer for piece, _, _ in places))
            config = Lora(rank=rank, scale=scale, targets=chosen, train_head=bool(own))
            apply(model, config, name, pieces=[piece for piece, _, _ in places], whole=list(own))
        bank = bank_of(model)
        assert bank is not None
        _fill(bank.adapter(name), [place for places in plan.values() for place in places], own)
    except ValueError:
        bank = bank_of(model)
        if bank is not None and name in bank.named:
            remove(model, name)
        raise
    return model


def _plan(
    model: nn.Module, folder: Path, described: dict[str, Any], pairs: dict[str, dict[str, Tensor]]
) -> dict[tuple[int, float], list[Place]]:
    """Of every rank and scale: pieces, with A and their rows of B."""
    known = {path: pieces for path, found in below(model) if (pieces := pieces_of(path, found))}
    plan: dict[tuple[int, float], list[Place]] = {}
    for module, pair in pairs.items():
        layer = _ours(model, module)
        if layer not in known:
            raise ValueError(f"{folder} adapts {module}, which this model does not have{near(module, known)}")
        a, b = pair.get("A"), pair.get("B")
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or kind_of(model.get_submodule(layer)) == "conv":
            raise ValueError(f"{folder}: {module} lacks lora_A or lora_B as matrices; convolutions cannot be imported")
        pieces, rank = known[layer], len(a)
        outputs, inputs = sum(piece.shape[0] for piece in pieces), pieces[0].shape[1]
        if (len(b), a.shape[1]) != (outputs, inputs):
            raise ValueError(f"{folder}: {module} is {len(b)} x {a.shape[1]}, in this model {outputs} x {inputs}")
        alpha = _pattern(described.get("alpha_pattern"), module, described["lora_alpha"])
        scale = alpha * math.sqrt(rank) if described.get("use_rslora") else alpha
        plan.setdefault((rank, float(scale)), []).extend((piece, a, b[piece.start : piece.stop]) for piece in pieces)
    if not plan:
        raise ValueError(f"{folder} holds no lora_A and lora_B")
    return plan


def _described(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} is no adapter of peft: it has no {CONFIG}")
    try:
        found: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind, _ = found["peft_type"], found["lora_alpha"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG} is damaged or no LoRA ({type(error).__name__}: {error})") from None
    if kind != "LORA":
        raise ValueError(f"{folder} is {kind}; only LORA can be imported")
    for option, plain in (("use_dora", False), ("bias", "none"), ("use_qalora", False), ("lora_bias", False)):
        if found.get(option, plain) not in (plain, None):
            raise ValueError(
                f"{folder} has {option} = {found[option]!r}, which is more than LoRA; it cannot be imported"
            )
    return found


def _ours(model: nn.Module, name: str) -> str:
    """A name of the model itself, or timm's name of one of our ViTs as ours."""
    from vitrail.model.classifier import Classifier
    from vitrail.model.timm_weights import VIT, our_name

    if not isinstance(model, Classifier) or name.startswith(("trunk.", "head.fc")):
        return name
    return our_name(f"{name}.", VIT).removesuffix(".")


def _shape(model: nn.Module, full: str) -> tuple[int, ...] | None:
    path, _, leaf = full.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    found = {**module._parameters, **module._buffers}.get(leaf)
    return None if found is None else tuple(found.shape)


def _pattern(patterns: dict[str, float] | None, module: str, usual: float) -> float:
    """As peft reads them: a regular expression that the end of a module's name matches."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return usual


@torch.no_grad()
def _fill(adapter: Adapter, places: list[Place], own: dict[str, Tensor]) -> None:
    given = {piece.name: (down, up) for piece, down, up in places}
    for there in adapter.places.values():
        for piece, number, row in there:
            group = adapter.group(number)
            assert isinstance(group, LoraGroup)
            down, up = given[piece.name]
            group.down[row].copy_(down)
            group.up[row].copy_(up)
    for full, value in own.items():
        cast("Tensor", adapter.own.get(full)).copy_(value)
