"""How fast a model predicts and how much memory that takes, measured on this machine."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROUNDS = 5
WARM_UP_CALLS = 3  # compilation, kernel choice and memory pools happen in the first calls


def throughput(
    model: Callable[[Tensor], Tensor],
    image_size: int,
    batch: int,
    device: torch.device | str = "cpu",
    seconds: float = 1.0,
    *,
    autocast: torch.dtype | None = None,
) -> dict[str, Any]:
    """Images per second of inference on random images [batch, 3, image_size, image_size] already on the device.

    `images_per_second` is the median of rounds that together take about `seconds` after a warm-up, and `spread` is
    (fastest - slowest) / median. `peak_memory` is in bytes: on CUDA what tensors took (weights included), elsewhere the
    highest resident memory the whole process ever had (none where the system does not tell).
    """
    place = torch.device(device)
    images = torch.randn(batch, 3, image_size, image_size, generator=torch.Generator().manual_seed(0)).to(place)
    flags = {module: module.training for module in model.modules()} if isinstance(model, nn.Module) else {}
    for module in flags:
        module.training = False
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)

    def took(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            model(images)
        if place.type != "cpu":
            torch.accelerator.synchronize(place)
        return time.perf_counter() - start

    with torch.inference_mode(), torch.autocast(place.type, autocast, enabled=autocast is not None):
        took(WARM_UP_CALLS)
        calls = max(1, round(seconds / ROUNDS / max(took(1), 1e-6)))
        speeds = [calls * batch / took(calls) for _ in range(ROUNDS)]
    for module, training in flags.items():
        module.training = training
    median = statistics.median(speeds)
    return {
        "images_per_second": median,
        "spread": (max(speeds) - min(speeds)) / median,
        "rounds": ROUNDS,
        "batch": batch,
        "image_size": image_size,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
        "precision": str(autocast or torch.get_default_dtype()).removeprefix("torch."),
        "peak_memory": _peak_memory(place),
    }


def _peak_memory(place: torch.device) -> int | None:
    if place.type == "cuda":
        return torch.cuda.max_memory_allocated(place)
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
