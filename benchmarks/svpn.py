"""Cost of singular-value power normalisation: fast (1, 1), exact, and autograd through torch.linalg.svd.

    python benchmarks/svpn.py [--device cpu|cuda] [--batches 128 256 512 1024] [--sizes 14 24 38] [--rounds 7]

Forward and backward of `batch` images with 6 heads each, float32. The three take turns in every round, so that whatever
else the machine does falls on all of them; the table gives medians over rounds and ratios of medians.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from vitrail.kernels.second_order import cross_covariance, svpn, svpn_fast

HEADS, TOKENS, ALPHA = 6, 196, 0.5


def through_svd(matrices: Tensor) -> Tensor:
    """What one would write without this package; its gradient divides by differences of squared singular values."""
    U, s, Vh = torch.linalg.svd(matrices, full_matrices=False)
    return (U * s.pow(ALPHA)[..., None, :]) @ Vh


def seconds(normalize: Callable[[Tensor], Tensor], matrices: Tensor, weights: Tensor) -> float:
    """Time of one forward and backward pass."""
    leaf = matrices.detach().requires_grad_()
    if leaf.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    normalize(leaf).backward(weights)
    if leaf.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(batch: int, size: int, rounds: int, device: str) -> dict[str, float]:
    """Median seconds of each way, on cross-covariances of random tokens."""
    start = torch.randn(size, device=device, requires_grad=True)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "fast": lambda q: svpn_fast(q, ALPHA, 1, 1, start),
        "exact": lambda q: svpn(q, ALPHA),
        "svd": through_svd,
    }
    # Made in pieces of 64 images: tokens take far more memory than their matrices.
    shape = (64, HEADS, size, TOKENS)
    pieces = range(math.ceil(batch / 64))
    matrices = torch.cat(
        [cross_covariance(torch.randn(shape, device=device), torch.randn(shape, device=device)) for _ in pieces]
    )[:batch]
    weights = torch.randn_like(matrices)
    for normalize in ways.values():
        seconds(normalize, matrices, weights)
    times = [{name: seconds(way, matrices, weights) for name, way in ways.items()} for _ in range(rounds)]
    return {name: median(row[name] for row in times) for name in ways}


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of singular-value power normalisation, forward and backward.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 256, 512, 1024], help="images")
    parser.add_argument("--sizes", type=int, nargs="+", default=[14, 24, 38])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {where}, {HEADS} heads, float32, median of {options.rounds} rounds")
    print("batch  size   fast ms  exact ms    svd ms  exact/fast  svd/fast  svd/exact")
    for size in options.sizes:
        for batch in options.batches:
            fast, exact, svd = measure(batch, size, options.rounds, options.device).values()
            print(
                f"{batch:5d} {size:5d} {fast * 1e3:9.2f} {exact * 1e3:9.1f} {svd * 1e3:9.1f}"
                f" {exact / fast:11.1f} {svd / fast:9.1f} {svd / exact:10.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
