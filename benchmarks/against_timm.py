"""Our ViT beside timm's, same weights' shapes, same loop, same machine: training and inference throughput.

    python benchmarks/against_timm.py [--model deit_tiny] [--batch 8] [--rounds 9] [--device cpu]

Rounds are interleaved (ours, timm's, ours, ...), so that a slow moment of the machine falls on both; the figure is the
median of the rounds' ratios. Prints a table; the first two rounds warm up and do not count.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import timm
import torch
from torch import nn

import vitrail
from vitrail.model.timm import load_weights
from vitrail.model.zoo import ZOO

WARM_UP = 2


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def inference(model: nn.Module, images: torch.Tensor) -> Callable[[], None]:
    def once() -> None:
        with torch.inference_mode():
            model(images)

    return once


def training(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def once() -> None:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return once


def interleaved(
    first: Callable[[], None], second: Callable[[], None], rounds: int, device: torch.device
) -> list[list[float]]:
    """Seconds of both in every round, the order of the two changing from round to round."""
    times: list[list[float]] = []
    for turn in range(rounds + WARM_UP):
        took = {}
        for which, work in sorted(enumerate((first, second)), reverse=bool(turn % 2)):
            wait(device)
            start = time.perf_counter()
            work()
            wait(device)
            took[which] = time.perf_counter() - start
        times.append([took[0], took[1]])
    return times[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_tiny", choices=[n for n, spec in ZOO.items() if spec.timm])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    theirs = timm.create_model(ZOO[asked.model].timm).to(device)
    ours = vitrail.create_model(asked.model).to(device)
    load_weights(ours, theirs.state_dict())
    size = ZOO[asked.model].trunk.image_size
    images = torch.randn(asked.batch, 3, size, size, device=device)
    labels = torch.randint(0, 1000, (asked.batch,), device=device)
    print(
        f"{asked.model}, batch {asked.batch}, {size} px, {device}, float32, torch {torch.__version__}, "
        f"timm {timm.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, {asked.rounds} rounds"
    )
    print(f"{'':<10} {'ours img/s':>12} {'timm img/s':>12} {'ratio':>8} {'quartiles of the ratio':>24}")
    for name, prepare in (
        ("inference", lambda m: inference(m.eval(), images)),
        ("training", lambda m: training(m.train(), images, labels)),
    ):
        times = interleaved(prepare(ours), prepare(theirs), asked.rounds, device)
        ratios = sorted(b / a for a, b in times)
        low, _, high = statistics.quantiles(ratios, n=4)
        mine, other = (asked.batch / statistics.median(t[i] for t in times) for i in (0, 1))
        print(f"{name:<10} {mine:>12.1f} {other:>12.1f} {statistics.median(ratios):>8.3f} {low:>14.3f} .. {high:.3f}")


if __name__ == "__main__":
    main()
