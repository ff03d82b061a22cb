"""Our ViT beside timm's, same weights' shapes, same loop, same machine: training and inference throughput.

    python benchmarks/against_timm.py [--model deit_tiny] [--batch 8] [--rounds 15] [--device cpu]

Rounds are interleaved (ours, timm's, ours, ...), so that a slow moment of the machine falls on both; the figure is the
median of the rounds' ratios. `control` is timm's model against a copy of itself: how far from 1 chance alone goes.
Prints a table; the first two rounds warm up and do not count.
"""

from __future__ import annotations

import argparse
import copy
import platform
from collections.abc import Callable

import timm
import torch
from rounds import add_to_history, in_turns, where
from torch import nn

import vitrail
from vitrail.engine.device import keep_freed_memory
from vitrail.model.timm_weights import load_weights
from vitrail.model.zoo import ZOO


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


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_tiny", choices=[n for n, spec in ZOO.items() if spec.timm])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--history", action="store_true", help="append the ratios to benchmarks/history.jsonl")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    theirs = timm.create_model(ZOO[asked.model].timm).to(device)
    ours = vitrail.create_model(asked.model).to(device)
    load_weights(ours, theirs.state_dict())
    size = ZOO[asked.model].trunk.image_size
    images = torch.randn(asked.batch, 3, size, size, device=device)
    labels = torch.randint(0, 1000, (asked.batch,), device=device)
    print(
        f"{asked.model}, batch {asked.batch}, {size} px, float32, {where(device)}, timm {timm.__version__}, "
        f"{platform.machine()}, {asked.rounds} rounds"
    )
    ratios: dict[str, float] = {}
    print(f"{'':<10} {'ours img/s':>12} {'timm img/s':>12} {'ratio':>8} {'quartiles of the ratio':>24}")
    for name, prepare in (
        ("inference", lambda m: inference(m.eval(), images)),
        ("training", lambda m: training(m.train(), images, labels)),
    ):
        ways = {"ours": prepare(ours), "timm": prepare(theirs), "control": prepare(copy.deepcopy(theirs))}
        rounds = in_turns(ways, device, asked.rounds)
        for which in ("ours", "control"):
            ratio, low, high = rounds.ratio("timm", which)
            mine, other = (asked.batch / rounds.median(way) for way in (which, "timm"))
            ratios[f"{asked.model} {name} {which} / timm"] = ratio
            label = name if which == "ours" else "  control"
            print(f"{label:<10} {mine:>12.1f} {other:>12.1f} {ratio:>8.3f} {low:>14.3f} .. {high:.3f}")
    if asked.history:
        add_to_history("against_timm.py", where(device), ratios)


if __name__ == "__main__":
    main()
