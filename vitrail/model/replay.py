"""A call of the device, captured once and launched as a whole: for work of one shape whose kernels are short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Replay:
    """`replay(*inputs)` is `run(*inputs)` as one CUDA graph, for inputs of the shapes and kinds it was made with.

    What it returns lies where the next call writes: copy what must outlast it.
    """

    def __init__(self, run: Callable[..., Any], *inputs: Tensor) -> None:
        self.inputs = [each.clone() for each in inputs]
        device = inputs[0].device
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(3):  # compilation and library handles
                run(*self.inputs)
        torch.cuda.current_stream(device).wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.made = run(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        for place, given in zip(self.inputs, inputs, strict=True):
            place.copy_(given)
        self.graph.replay()
        return self.made
