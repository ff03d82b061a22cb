"""Which attention is fastest for short sequences: fused kernels of PyTorch, FlexAttention, a plain product, and ours.

    python benchmarks/attention.py [--out FILE] [--sweep]

Times are milliseconds, forward alone and forward + backward, from the output of the qkv layer to the input of the
projection, as a block uses them. `--sweep` tries cuts of our kernels (`tiles` in
kernels/attention_triton.py).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.measure.speed import as_one_graph

SIZES = ((1024, 65, 3), (2048, 65, 6), (512, 197, 6), (256, 197, 12), (256, 257, 16))  # batch, tokens, heads of 64
SWEEP = ((1024, 65, 3), (512, 197, 6))
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def fused(backend: SDPBackend) -> Callable[[Tensor], Tensor]:
    def run(qkv: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    return run


def product(qkv: Tensor) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).softmax(-1).matmul(v).transpose(1, 2).flatten(2)


def flex(qkv: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return flex_attention(q, k, v).transpose(1, 2).flatten(2)


def ours(qkv: Tensor) -> Tensor:
    from vitrail.kernels.attention import packed_attention

    return packed_attention(qkv).flatten(2)


def milliseconds(call: Callable[[], object], seconds: float = 0.2) -> float:
    """Median over replays of a CUDA graph of several calls, so that launches do not count."""
    calls = 8
    replay = as_one_graph(call, calls)
    times = []
    for _ in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def times(name: str, size: tuple[int, int, int], lock: object, out: object) -> None:
    """(forward, both) of one way at one size; None where it cannot."""
    batch, tokens, heads = size
    ways = {**{n: fused(b) for n, b in BACKENDS.items()}, "product": torch.compile(product), "ours": ours}
    ways["flex"] = torch.compile(flex, dynamic=False)
    torch.manual_seed(0)
    qkv = torch.randn(batch, tokens, 3, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(batch, tokens, heads * 64, device="cuda", dtype=torch.bfloat16)
    run = ways[name]
    try:
        torch.autograd.grad(run(qkv), qkv, grad)  # compiles; keeps nothing that belongs to this stream
        with lock:  # type: ignore[attr-defined]
            with torch.no_grad():
                forward = milliseconds(lambda: run(qkv))
            both = milliseconds(lambda: torch.autograd.grad(run(qkv), qkv, grad))
        out.put((name, size, forward, both))  # type: ignore[attr-defined]
    except Exception as error:
        out.put((name, size, None, repr(error)[:200]))  # type: ignore[attr-defined]


def sweep(size: tuple[int, int, int], lock: object, out: object) -> None:
    """Cuts of our kernels at one size."""
    from vitrail.kernels.attention_triton import backward, forward

    batch, tokens, heads = size
    qkv = torch.randn(batch, tokens, 3, heads, 64, device="cuda", dtype=torch.bfloat16)
    result, lse = forward(qkv)
    grad = torch.randn_like(result)
    whole = tokens <= 128
    ways = {
        f"forward warps {w} rows {r}": partial(forward, qkv, warps=w, rows=r)
        for w, r in itertools.product((2, 4, 8), (64,) if whole else (64, 128))
    } | {
        f"backward warps {w} keys {k}": partial(backward, qkv, result, lse, grad, warps=w, keys=k)
        for w, k in itertools.product((4, 8) if whole else (8, 16), (64,) if whole else (32, 64))
    }
    for name, way in ways.items():
        way()
        with lock:  # type: ignore[attr-defined]
            out.put((name, size, milliseconds(way), None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    context = mp.get_context("spawn")
    lock, queue = context.Lock(), context.Queue()
    names = (*BACKENDS, "product", "flex", "ours")
    if options.sweep:
        jobs = [context.Process(target=sweep, args=(size, lock, queue)) for size in SWEEP]
    else:
        jobs = [context.Process(target=times, args=(n, size, lock, queue)) for n in names for size in SIZES]
    lines = [f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"]
    pending = list(jobs)
    running: list[mp.process.BaseProcess] = []
    rows = []
    while pending or running:
        while pending and len(running) < 15:
            running.append(pending.pop(0))
            running[-1].start()
        for job in list(running):
            job.join(0.05)
            while not queue.empty():
                rows.append(queue.get())
            if not job.is_alive():
                running.remove(job)
    while not queue.empty():
        rows.append(queue.get())
    for name, size, forward, both in sorted(rows, key=lambda r: (r[1], r[0])):
        lines.append(f"{size!s:18} {name:32} {forward if forward is None else round(forward, 4)} {both}")
    text = "\n".join(lines)
    print(text, flush=True)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
