"""CUDA graphs: work on a side stream, and the capture of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work on `stream`, which begins after the current one and which that one waits for."""
    outer = torch.cuda.current_stream(stream.device)
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)


def captured(
    run: Callable[[], Any], *, calls: int = 1, warm_up: int = 3, device: torch.device | None = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of so many calls, and what the last of them returned: it lies where every replay writes.

    `warm_up` calls are made before, aside, for compilation and the handles of libraries.
    """
    with on(torch.cuda.Stream(device)):
        for _ in range(warm_up):
            run()
    graph, result = torch.cuda.CUDAGraph(), None
    # Loaders copy on streams of their own, so only this thread's mistakes should end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            result = run()
    return graph, result
