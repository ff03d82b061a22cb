"""What a model costs: parameters and multiply-accumulates."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Cost:
    """Cost of one image."""

    parameters: int
    macs: int  # multiply-accumulates; a "FLOP" of the papers is one of them
    image_size: int
    trainable: int

    def to_json(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "trainable": self.trainable,
            "macs": self.macs,
            "image_size": self.image_size,
        }


def cost(model: nn.Module, image_size: int | None = None) -> Cost:
    """Parameters and multiply-accumulates of one forward pass on one image, attention products included.

    Counted on the meta device, so nothing is computed and a model of any size is counted in seconds; `model` itself is
    not touched and may live on any device.
    """
    size = image_size or _native_size(model)
    meta = _on_meta(model)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        meta(torch.empty(1, 3, size, size, device="meta", dtype=next(meta.parameters()).dtype))
    return Cost(
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        macs=counter.get_total_flops() // 2,
        image_size=size,
    )


def _native_size(model: nn.Module) -> int:
    preprocess = getattr(model, "preprocess", None)
    if preprocess is None:
        raise ValueError("say which image size to count: cost(model, image_size)")
    return int(preprocess.size)


def _on_meta(model: nn.Module) -> nn.Module:
    if next(model.parameters()).is_meta:
        return model.eval()
    # A copy whose tensors are replaced while it is made: no memory for the weights is ever taken twice.
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {
        id(t): nn.Parameter(t.detach().to("meta"), t.requires_grad) if isinstance(t, nn.Parameter) else t.to("meta")
        for t in tensors
    }
    return copy.deepcopy(model, memo).eval()
