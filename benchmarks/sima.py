"""SimA against fused softmax attention, from the output of the qkv layer to the input of the projection.

    python benchmarks/sima.py [--out FILE] [--sweep] [--device cpu]

On CUDA: milliseconds at [batch, tokens, 3, 6 heads, 64] in bfloat16, forward alone and forward + backward, with ratios
to softmax and to the floor (what a copy of as many bytes takes). `--sweep` tries cuts of the kernel (`split`, `block`,
`warps` and `ahead` of kernels/sima_triton.py). Everywhere: the two orders of plain SimA by number of tokens, and where
they cross (`CROSSOVER` of kernels/sima.py).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from rounds import in_turns, where
from torch import Tensor

from vitrail.kernels.attention import packed_attention
from vitrail.kernels.sima_attention import plain_sima, product, sima
from vitrail.measure.speed import as_one_graph

SIZES = ((256, 197), (128, 577), (64, 1025), (16, 4097))  # batch, tokens
HEADS, DIM = 6, 64
ROUNDS, CALLS = 15, 8


def milliseconds(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Medians of interleaved rounds."""
    found = in_turns({name: as_one_graph(way, CALLS) for name, way in ways.items()}, torch.device("cuda"), ROUNDS)
    return {name: found.median(name) * 1e3 / CALLS for name in ways}


def example(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    qkv = torch.randn(batch, tokens, 3, HEADS, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return qkv, torch.randn(batch, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)


def copying(numbers: int) -> Callable[[], object]:
    """A copy that reads and writes `numbers` bfloat16 numbers in all."""
    source = torch.empty(numbers // 2, device="cuda", dtype=torch.bfloat16)
    return partial(torch.empty_like(source).copy_, source)


def compare(batch: int, tokens: int) -> list[str]:
    qkv, grad = example(batch, tokens)
    ways = {"softmax": packed_attention, "plain": torch.compile(plain_sima, dynamic=False), "fused": sima}

    def forward(way: Callable[[Tensor], Tensor]) -> object:
        with torch.no_grad():
            return way(qkv)

    def both(way: Callable[[Tensor], Tensor]) -> object:
        return torch.autograd.grad(way(qkv), qkv, grad)

    for way in ways.values():
        both(way)  # compiles
    lines = []
    # Forward reads qkv and writes the output; backward reads both of them and writes the gradient of qkv.
    for what, run, numbers in (("forward", forward, 4), ("both", both, 4 + 7)):
        floor = {"floor": copying(numbers * grad.numel())}
        found = milliseconds({name: partial(run, way) for name, way in ways.items()} | floor)
        for name, time in found.items():
            ratios = f"{time / found['softmax']:6.2f} x softmax {time / found['floor']:6.2f} x floor"
            lines.append(f"{batch:4} x {tokens:5} {what:8} {name:8} {time:8.4f} ms {ratios}")
    return lines


def sweep(batch: int, tokens: int) -> list[str]:
    from vitrail.kernels import sima_attention_triton as sima_triton

    qkv, grad = example(batch, tokens)
    qkv = qkv.detach()
    lines = []
    for what, run in (
        ("forward", partial(sima_triton.forward, qkv)),
        ("backward", partial(sima_triton.backward, qkv, grad)),
    ):
        found = {}
        cuts = itertools.product((1, 2, 4, 8, 16), (32, 64, 128), (2, 4, 8), (False, True))
        for split, block, warps, ahead in cuts:
            if split > 1 and tokens // split < 128:
                continue
            name = f"split {split} block {block} warps {warps}{' ahead' * ahead}"
            try:
                found |= milliseconds({name: partial(run, split=split, block=block, warps=warps, ahead=ahead)})
            except Exception as error:  # more shared memory or registers than there are
                lines.append(f"{batch:4} x {tokens:5} {what} {name}: {error!r:.80}")
        found |= milliseconds({"as shipped": run})
        best = sorted(found.items(), key=lambda pair: pair[1])
        shown = best[:6] + [pair for pair in best[6:] if pair[0] == "as shipped"]
        lines += [f"{batch:4} x {tokens:5} {what:8} {name:34} {time:8.4f} ms" for name, time in shown]
    return lines


def crossover(device: torch.device) -> list[str]:
    """Times of the two orders, and the first number of tokens from which kᵀ v first is the faster."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lines, faster = [], []
    counts = (16, 32, 48, 64, 96, 128, 192, 256, 512)
    for tokens in counts:
        batch = (1 << 20 if device.type == "cuda" else 1 << 14) // tokens // HEADS
        q, k, v = torch.randn(3, batch, HEADS, tokens, DIM, device=device, dtype=dtype).unbind(0)
        ways = {order: partial(product, q, k, v, order) for order in ("qk_first", "kv_first")}
        found = in_turns(ways, device, ROUNDS, lead=device.type == "cuda")
        ratio, low, high = found.ratio("kv_first", "qk_first")
        lines.append(f"{tokens:5} tokens of {DIM}: kv_first takes {ratio:5.2f} ({low:.2f} to {high:.2f}) x qk_first")
        faster.append(ratio < 1)
    first = next((n for i, n in enumerate(counts) if all(faster[i:])), None)
    lines.append(f"crossover: {'none' if first is None else f'{first} tokens, {first / DIM:.2f} x channels of a head'}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    lines = [where(device)]
    if device.type == "cuda":
        for size in SIZES:
            lines += sweep(*size) if options.sweep else compare(*size)
    if not options.sweep:
        lines += crossover(device)
    text = "\n".join(lines)
    print(text, flush=True)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
