"""A call of the device, captured once and launched as a whole: for work of one shape whose kernels are short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def captured(
    run: Callable[[], Any], *, calls: int = 1, warm_up: int = 3, device: torch.device | None = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of so many calls, and what the last of them returned: it lies where every replay writes.

    `warm_up` calls are made before, aside, for compilation and the handles of libraries.
    """
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(warm_up):
            run()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph, made = torch.cuda.CUDAGraph(), None
    # Loaders copy on streams of their own, so only this thread's mistakes should end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            made = run()
    return graph, made


class Replay:
    """`replay(*inputs)` is `run(*inputs)` as one CUDA graph, for inputs of the shapes and kinds it was made with.

    What it returns lies where the next call writes: copy what must outlast it.
    """

    def __init__(self, run: Callable[..., Any], *inputs: Tensor) -> None:
        self.inputs = [each.clone() for each in inputs]
        self.graph, self.made = captured(lambda: run(*self.inputs), device=inputs[0].device)

    def __call__(self, *inputs: Tensor) -> Any:
        for place, given in zip(self.inputs, inputs, strict=True):
            place.copy_(given)
        self.graph.replay()
        return self.made
