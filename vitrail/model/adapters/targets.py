"""Which layers of any model are adapted, by what they are called."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from vitrail.schema import near

Kind = Literal["linear", "transposed", "conv"]
PARTS = ("q", "k", "v")
FUSED = ("qkv", "c_attn", "Wqkv")  # ours and timm's, GPT-2's, and others that stack q, k and v in thirds
ROLES = {
    "q": ("q", "q_proj", "query", "to_q", "wq", "q_lin"),
    "k": ("k", "k_proj", "key", "to_k", "wk", "k_lin"),
    "v": ("v", "v_proj", "value", "to_v", "wv", "v_lin"),
    "output": ("proj", "o_proj", "out_proj", "c_proj", "dense", "wo", "out_lin", "to_out"),
    "mlp": (
        *("fc1", "fc2", "c_fc", "c_proj", "gate_proj", "up_proj", "down_proj", "lin1", "lin2", "w1", "w2", "w3"),
        *("fc_in", "fc_out", "dense"),
    ),
}
SETS = {
    **{part: (part,) for part in PARTS},
    "qv": ("q", "v"),
    "qkv": PARTS,
    "attention": (*PARTS, "output"),
    "mlp": ("mlp",),
    "all": (),
}


@dataclass(frozen=True)
class TargetMatrix:
    """A weight, or a third of a fused one, as a matrix."""

    layer: str  # name of its module
    part: str  # of a fused layer: q, k or v; otherwise empty
    start: int  # first output of the layer that it computes
    shape: tuple[int, int]  # outputs and inputs; of a convolution, as square as its kernel allows

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.part}" if self.part else self.layer

    @property
    def stop(self) -> int:
        return self.start + self.shape[0]


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of layer that an adapter can change; none where it cannot."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Conv2d):
        return "conv"
    named = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)  # transformers' linear layer of GPT-2
    weight = module._parameters.get("weight")
    return "transposed" if named and weight is not None and weight.ndim == 2 else None


def square(entries: int) -> tuple[int, int]:
    """Sides of the matrix of so many entries that is nearest to a square, for kernels as in NOLA (arXiv 2310.02556).

    >>> square(64 * 3 * 7 * 7), square(16 * 3 * 3 * 3)
    ((96, 98), (18, 24))
    """
    side = next(d for d in range(math.isqrt(entries), 0, -1) if entries % d == 0)
    return side, entries // side


def matrices_of(name: str, module: nn.Module) -> list[TargetMatrix]:
    """The matrices of a layer: one, or three where q, k and v are fused; none of a model that is one bare layer."""
    kind, weight = kind_of(module), module._parameters.get("weight")
    if kind is None or weight is None or not name:
        return []
    if kind == "conv":
        return [TargetMatrix(name, "", 0, square(weight.numel()))]
    outputs, inputs = weight.T.shape if kind == "transposed" else weight.shape
    leaf = name.rpartition(".")[2]
    if leaf in FUSED and (outputs == 3 * inputs or (leaf == "qkv" and outputs % 3 == 0)):
        third = outputs // 3
        return [TargetMatrix(name, part, i * third, (third, inputs)) for i, part in enumerate(PARTS)]
    return [TargetMatrix(name, "", 0, (outputs, inputs))]


def role_of(matrix: TargetMatrix) -> str:
    """q, k, v, output, mlp, or nothing, by the name of a layer and of what it lies in."""
    if matrix.part:
        return matrix.part
    *path, leaf = matrix.layer.split(".")
    if leaf.isdigit() and path:  # `to_out.0`
        leaf = path.pop()
    inside = any(part in ("attn", "attention") or "attention" in part or part.endswith("_attn") for part in path)
    return next((role for role in (*PARTS, "output" if inside else "mlp") if leaf in ROLES[role]), "")


def below(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model without its adapters, by name."""
    adapters = model._modules.get("adapters")
    return model.named_modules(memo=set() if adapters is None else {adapters})


def find(model: nn.Module, targets: Sequence[str], leave: Sequence[str] = ()) -> list[TargetMatrix]:
    """The matrices that any target names, in the order of the model, without layers named in `leave`.

    Raises `ValueError` where a target names nothing.
    """
    known = [matrix for name, module in below(model) if name not in leave for matrix in matrices_of(name, module)]
    chosen: set[TargetMatrix] = set()
    for target in targets:
        matching = {matrix for matrix in known if _matches(matrix, target)}
        if not matching:
            raise ValueError(_without_match(model, target, known, leave))
        chosen |= matching
    if not chosen:
        raise ValueError("an adapter without targets adapts nothing; name some, for instance qv, mlp or all")
    return [matrix for matrix in known if matrix in chosen]


def _matches(matrix: TargetMatrix, target: str) -> bool:
    if target in SETS:
        return target == "all" or role_of(matrix) in SETS[target]
    return _fits(matrix.name, target) or _fits(matrix.layer, target)


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern matches a name or its end, from a dot on."""
    return fnmatchcase(f".{name}", f"*.{pattern}")


def _without_match(model: nn.Module, target: str, known: list[TargetMatrix], leave: Sequence[str]) -> str:
    others = {
        type(module).__name__
        for name, module in below(model)
        if name not in leave and target not in SETS and _fits(name, target)
    }
    if others:
        return (
            f"what {target!r} matches cannot be adapted: {', '.join(sorted(others))}; adapters work on nn.Linear,"
            " nn.Conv2d and Conv1D"
        )
    examples = ", ".join(matrix.name for matrix in known[:4]) or "no linear layer and no convolution"
    return (
        f"no layer matches the target {target!r}{near(target, SETS)}; use {', '.join(SETS)} or a pattern of names"
        f" (here: {examples}{', ...' if len(known) > 4 else ''})"
    )
