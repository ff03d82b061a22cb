"""Cost of a model: parameters and multiply-accumulates."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.model.parts.modules import without_adapters

NORM_COST = 5  # operations per element of a LayerNorm with gain and shift, as the usual profilers count them


@dataclass(frozen=True)
class Cost:
    """Cost of one image."""

    parameters: int
    macs: int  # multiply-accumulates; a "FLOP" of the papers is one of them
    image_size: int
    trainable: int

    def to_json(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("parameters", "trainable", "macs", "image_size")}


def cost(
    model: nn.Module, image_size: int | None = None, *, attention_products: bool = True, norms: bool = False
) -> Cost:
    """Parameters and multiply-accumulates of one forward pass on one image.

    Conventions differ between papers: `attention_products=False` leaves out the products of queries with keys and of
    maps with values in stem and trunk (SoT), `norms=True` adds five operations for each element of a LayerNorm.
    Counted on the meta device, so nothing is computed and a model of any size is counted in seconds; `model` itself is
    not touched and may live on any device. An adapter in use is counted as merged, where it costs nothing;
    prompts stay, and their tokens count.
    """
    preprocess: Any = getattr(model, "preprocess", None)
    if not image_size and preprocess is None:
        raise ValueError("say which image size to count: cost(model, image_size)")
    size = image_size or int(preprocess.size)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    model = without_adapters(model)
    meta = _on_meta(model)
    normed: list[int] = []  # elements of every LayerNorm
    for module in meta.modules() if norms else ():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda module, inputs, output: normed.append(output.numel()))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        channels = 3 if preprocess is None else len(preprocess.mean)
        meta(torch.empty(1, channels, size, size, device="meta", dtype=next(meta.parameters()).dtype))
    flops = counter.get_total_flops()
    if not attention_products:
        flops -= _attention_flops(meta, counter)
    parameters = sum(p.numel() for p in model.parameters())
    return Cost(parameters, flops // 2 + NORM_COST * sum(normed), size, trainable)


def _attention_flops(model: nn.Module, counter: FlopCounterMode) -> int:
    """Of products of activations with activations inside attention (linear layers are other operations)."""
    products = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
    total = 0
    for name, module in model.named_modules():
        if getattr(module, "attention_products", False):
            counted = counter.get_flop_counts().get(f"{type(model).__name__}.{name}", {})
            total += sum(n for op, n in counted.items() if op in products or "attention" in str(op))
    return total


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy whose tensors are replaced while it is made: no memory for the weights is ever taken twice."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare
    return copy.deepcopy(model, memo).eval()
