"""Parameter-efficient fine-tuning of a frozen model: settings of adapters and the header of their files. No torch."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from vitrail.files import parse_json, reject_later
from vitrail.schema import Count, Fraction, Positive, Range

ADAPTER = "adapter.safetensors"
KEY, FORMAT = "vitrail_adapter", 1
Seed = Annotated[int, Range(0, 2**63 - 1)]
Bits = Annotated[int, Range(2, 8)]


@dataclass(frozen=True)
class Lora:
    """Low-rank change of a weight: W + (scale / rank) A B, A [outputs, rank], B [rank, inputs] (arXiv 2106.09685)."""

    kind: Literal["lora"] = "lora"
    rank: Count = 4
    scale: Positive = 1.0
    """LoRA's alpha: the change is multiplied by scale / rank."""
    targets: tuple[str, ...] = ("qv",)
    """Layers that are adapted: `q`, `k`, `v`, `qv`, `qkv`, `attention` (with its output), `mlp`, `all`, or patterns of
    module names (`blocks.*.mlp.fc1`; `blocks.*.attn.qkv.v` is a third of a fused layer)."""
    train_head: bool = True
    """The classifier is trained, too, as a whole: every adapter has one of its own."""
    train_norms: bool = False
    """So are all norms. Otherwise BatchNorm keeps the statistics of the base, also in training."""
    bits: Bits | None = None
    """Round to so many bits in the forward pass of training (none: do not); gradients pass straight through."""


@dataclass(frozen=True)
class Nola:
    """LoRA whose factors are sums of random bases: only the coefficients are trained (arXiv 2310.02556)."""

    kind: Literal["nola"] = "nola"
    rank: Count = 8
    coefficients: Count = 1000
    """Bases of the factor on the output's side (k)."""
    coefficients_in: Count | None = None
    """Bases of the factor on the input's side (l; none: as many)."""
    scale: Positive = 1.0
    """c of the paper: the change is multiplied by scale / rank."""
    shared: bool = True
    """Layers of one shape have the same bases, which are then generated once for all of them; otherwise each has bases
    of its own."""
    seed: Seed = 0
    """Of the bases and of the coefficients that begin at random."""
    targets: tuple[str, ...] = ("qv",)
    """As for lora. The paper adapts `qv` or `mlp` of GPT-2 and `mlp` of ViT."""
    train_head: bool = True
    head_coefficients: Count | None = None
    """The classifier is adapted like a layer, with so many on either side (none: as `train_head` and `targets` say)."""
    train_norms: bool = False
    bits: Bits | None = None


@dataclass(frozen=True)
class Pranc:
    """The change of a weight is itself a sum of random bases, of the size of the weight (PRANC, arXiv 2206.08464)."""

    kind: Literal["pranc"] = "pranc"
    coefficients: Count = 1000
    """Bases per layer."""
    seed: Seed = 0
    targets: tuple[str, ...] = ("qv",)
    train_head: bool = True
    head_coefficients: Count | None = None
    train_norms: bool = False
    bits: Bits | None = None


@dataclass(frozen=True)
class Vpt:
    """Visual prompts: learned tokens between class tokens and patches of a frozen trunk (VPT, arXiv 2203.12119)."""

    kind: Literal["vpt"] = "vpt"
    tokens: Count = 10
    """Prompts per layer (paper: 1 to 200)."""
    deep: bool = False
    """Before every block come prompts of its own; otherwise those of the first go on through all blocks."""
    drop: Fraction = 0.0
    """Dropout on prompts in training (paper: 0.1)."""
    train_head: bool = True
    train_norms: bool = False
    bits: Bits | None = None


AdapterConfig = Lora | Nola | Pranc | Vpt


def read_header(path: str | Path) -> dict[str, Any]:
    """The JSON of an adapter file, and `bytes`, its size; `tensors` has the shapes as they are stored.

    Raises `ValueError` with one sentence for a file that is damaged or something else.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no adapter at {path}")
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError("it is cut off")
            entries = parse_json(file.read(length))
        header: dict[str, Any] | None = parse_json((entries.pop("__metadata__", None) or {}).get(KEY, "null"))
        expected = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, struct.error, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{path} is damaged or no adapter file ({type(error).__name__}: {error})") from None
    if header is None:
        raise ValueError(f"{path} is no adapter file of vitrail; `vitrail export RUN FILE.safetensors` writes one")
    reject_later(path, header, FORMAT)
    if expected != size:
        raise ValueError(f"{path} is damaged: it has {size} bytes, and should have {expected}")
    return {**header, "tensors": {name: tuple(entry["shape"]) for name, entry in entries.items()}, "bytes": size}


def summary(header: dict[str, Any]) -> dict[str, Any]:
    """The header of an adapter file as commands and reports show it."""
    configs = header["configs"]
    seeds = sorted({config["seed"] for config in configs if "seed" in config})
    options = "rank coefficients coefficients_in scale shared tokens deep drop targets train_head train_norms"
    return {
        "kind": " + ".join(dict.fromkeys(str(config["kind"]) for config in configs)),
        "name": header["name"],
        "parts": [
            {k: config[k] for k in options.split() if config.get(k) is not None}
            | ({"layers": len(layers)} if layers else {})
            for config, layers in zip(configs, header["layers"], strict=True)
        ],
        "trained": header["numbers"]["trained"],
        "of_these_whole": header["numbers"]["whole"],
        "stored": header["numbers"]["stored"],
        "bytes": header["bytes"],
        "bits": header["bits"] or 32,
        "seed": seeds[0] if len(seeds) == 1 else seeds or None,
        "base": {"architecture": header["architecture"], "hash": header["base"]},
        "classes": None if header["classes"] is None else len(header["classes"]),
    }
