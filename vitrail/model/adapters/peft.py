"""LoRA in the form of the peft package: a folder of adapter_config.json and adapter_model.safetensors.

There a module has lora_A [rank, inputs] and lora_B [outputs, rank], and its change is (alpha / rank) B A. A fused qkv
is one module there and three matrices here: going out, their ranks stand side by side, each in its own rows of B;
coming in, every matrix takes all of A and its rows of B. Scales go out inside of B, with alpha = rank.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail.files import parse_json, write_text
from vitrail.model.adapters.adapter_file import check_shapes, removed_on_error
from vitrail.model.adapters.apply import M, adapters_of, apply, required
from vitrail.model.adapters.config import Lora
from vitrail.model.adapters.inject import TargetMatrix, below, kind_of, matrices_of, stacked
from vitrail.model.adapters.methods import LoraGroup, LowRank
from vitrail.model.classifier import Classifier
from vitrail.model.store import read_tensors, write_tensors
from vitrail.model.timm_weights import VIT, our_name
from vitrail.schema import near

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
Factors = dict[TargetMatrix, tuple[Tensor, Tensor]]  # of a matrix: lora_A and its rows of lora_B


def export_peft(model: nn.Module, name: str, folder: str | Path, *, base: str | None = None) -> Path:
    """Write an adapter for peft, to be put on this very module there; NOLA is written out as the LoRA it amounts to.

    `base` is what peft calls `base_model_name_or_path`. Raises `ValueError` for what peft's LoRA cannot express:
    changes without factors (PRANC), prompts, and convolutions, which are cut differently there.
    """
    adapter = required(model, " to export").adapter(name)
    if adapter.prompts is not None:
        raise ValueError(f"adapter {name!r} has prompts, which peft's LoRA cannot hold; save it as a file of ours")
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    kinds = {layer: kind_of(model.get_submodule(layer)) for layer in adapter.rows}
    with torch.no_grad():
        changes = adapter.changes()
    for layer, rows in adapter.rows.items():
        if kinds[layer] == "conv":
            raise ValueError(f"{layer} is a convolution, which peft's LoRA factorises differently; leave it out")
        of_layer = [(matrix, changes[group][row]) for matrix, group, row in rows]
        for matrix, change in of_layer:
            if not isinstance(change, LowRank):
                raise ValueError(f"the change of {matrix.name} has no factors, as peft's LoRA needs them (PRANC)")
        shape = model.get_submodule(layer)._parameters["weight"].shape  # type: ignore[union-attr]
        up, down = stacked(of_layer, shape[1 if kinds[layer] == "transposed" else 0])
        tensors |= {f"{PREFIX}{layer}.lora_A.weight": down, f"{PREFIX}{layer}.lora_B.weight": up}
        ranks[layer] = len(down)
    whole = {full: tensor.detach() for full, tensor in adapter.own.tensors().items()}
    tensors |= {PREFIX + full: tensor for full, tensor in whole.items()}
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
        "modules_to_save": list(dict.fromkeys(full.rpartition(".")[0] for full in whole)) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": "transposed" in kinds.values(),
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
    folder = Path(folder)
    described = _described(folder)
    if (adapters := adapters_of(model)) is not None and name in adapters.named:
        raise ValueError(f"the model has an adapter {name!r} already; import this one under another name")
    pairs: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for full, tensor in read_tensors(folder / WEIGHTS).items():
        module, _, rest = full.removeprefix(PREFIX).partition(".lora_")
        if rest in ("A.weight", "B.weight"):
            pairs.setdefault(module, {})[rest[0]] = tensor
        elif rest:
            raise ValueError(f"{folder} holds {full}, which is more than LoRA of linear layers")
        else:
            whole[_ours(model, module)] = tensor
    check_shapes(model, whole, folder)
    plan = _plan(model, folder, described, pairs)
    with removed_on_error(model, name):
        for (rank, scale), factors in plan.items():
            layers = tuple(dict.fromkeys(matrix.layer for matrix in factors))
            config = Lora(rank=rank, scale=scale, targets=layers, train_head=bool(whole))
            apply(model, config, name, matrices=list(factors), whole=list(whole))
        adapter = required(model).adapter(name)
        values = {matrix: pair for factors in plan.values() for matrix, pair in factors.items()}
        for matrix, number, row in (row for rows in adapter.rows.values() for row in rows):
            group = cast("LoraGroup", adapter.group(number))
            group.down[row].copy_(values[matrix][0])
            group.up[row].copy_(values[matrix][1])
        for full, tensor in adapter.own.tensors().items():
            tensor.copy_(whole[full])
    return model


def _plan(
    model: nn.Module, folder: Path, described: dict[str, Any], pairs: dict[str, dict[str, Tensor]]
) -> dict[tuple[int, float], Factors]:
    """Of every rank and scale: matrices, with A and their rows of B."""
    known = {path: matrices for path, module in below(model) if (matrices := matrices_of(path, module))}
    plan: dict[tuple[int, float], Factors] = {}
    for module, pair in pairs.items():
        layer = _ours(model, module)
        if layer not in known:
            raise ValueError(f"{folder} adapts {module}, which this model does not have{near(module, known)}")
        a, b = pair.get("A"), pair.get("B")
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or kind_of(model.get_submodule(layer)) == "conv":
            raise ValueError(f"{folder}: {module} lacks lora_A or lora_B as matrices; convolutions cannot be imported")
        matrices, rank = known[layer], len(a)
        outputs, inputs = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        if (len(b), a.shape[1]) != (outputs, inputs):
            raise ValueError(f"{folder}: {module} is {len(b)} x {a.shape[1]}, in this model {outputs} x {inputs}")
        alpha = _pattern(described.get("alpha_pattern"), module, described["lora_alpha"])
        scale = alpha * math.sqrt(rank) if described.get("use_rslora") else alpha
        factors = {matrix: (a, b[matrix.start : matrix.stop]) for matrix in matrices}
        plan.setdefault((rank, float(scale)), {}).update(factors)
    if not plan:
        raise ValueError(f"{folder} holds no lora_A and lora_B")
    return plan


def _described(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} is no adapter of peft: it has no {CONFIG}")
    try:
        described: dict[str, Any] = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
        kind, _ = described["peft_type"], described["lora_alpha"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG} is damaged or no LoRA ({type(error).__name__}: {error})") from None
    if kind != "LORA":
        raise ValueError(f"{folder} is {kind}; only LORA can be imported")
    for option, plain in (("use_dora", False), ("bias", "none"), ("use_qalora", False), ("lora_bias", False)):
        if described.get(option, plain) not in (plain, None):
            raise ValueError(
                f"{folder} has {option} = {described[option]!r}, which is more than LoRA; it cannot be imported"
            )
    return described


def _ours(model: nn.Module, name: str) -> str:
    """A name of the model itself, or timm's name of one of our ViTs as ours."""
    if not isinstance(model, Classifier) or name.startswith(("trunk.", "head.fc")):
        return name
    return our_name(f"{name}.", VIT).removesuffix(".")


def _pattern(patterns: dict[str, float] | None, module: str, usual: float) -> float:
    """As peft reads them: a regular expression that the end of a module's name matches."""
    return next((v for p, v in (patterns or {}).items() if re.match(rf"(.*\.)?({p})$", module)), usual)
