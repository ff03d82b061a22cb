"""Talking-heads attention with its maps stored, and without maps for `heads` times as many multiplications.

    python benchmarks/talking_heads.py [--device cuda] [--seconds 0.3] [--rounds 5] [--json FILE] [--smoke]

One mixer (qkv, attention, projection) at CaiT's widths, forward alone and forward + backward; bf16 on CUDA, where the
host queues ahead of the device, float32 elsewhere. 'ratio' is the speed without maps over that with them, the median of
rounds in turns with its quartiles; 'GiB' the highest memory of each (CUDA only).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rounds import where
from torch import Tensor

from vitrail.engine.device import keep_freed_memory
from vitrail.measure.speed import MemoryWatch, Way, in_turns, ratio
from vitrail.model.mixers.softmax import TalkingHeadsMixer
from vitrail.model.parts.tokens import Tokens

WIDTHS = {"CaiT-XXS24": (192, 4), "CaiT-XS24": (288, 6), "CaiT-S24": (384, 8)}
GRIDS = (8, 14, 18, 24, 32)  # patches per side; the class token comes later in CaiT
BATCHES = {"cuda": 64, "cpu": 1}


def call(mixer: TalkingHeadsMixer, x: Tensor, tokens: Tokens, backward: bool, _: int) -> None:
    with torch.set_grad_enabled(backward):
        out = mixer(x, tokens)
    if backward:
        torch.autograd.grad(out, [x, *mixer.parameters()], torch.ones_like(out))


def ways_of(width: int, heads: int, side: int, batch: int, device: torch.device, backward: bool) -> dict[str, Callable]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(batch, side * side, width, device=device, dtype=dtype, requires_grad=backward)
    tokens, ways = Tokens(x, 0, (side, side)), {}
    for kind in ("always", "never"):
        mixer = TalkingHeadsMixer(width, heads, stored_map=kind).to(device, dtype)  # type: ignore[arg-type]
        ways[kind] = partial(call, mixer, x, tokens, backward)
    return ways


def row_of(title: str, side: int, backward: bool, options: argparse.Namespace) -> dict[str, Any]:
    device, (width, heads) = torch.device(options.device), WIDTHS[title]
    batch = options.batch or BATCHES.get(device.type, 1)
    ways = ways_of(width, heads, side, batch, device, backward)
    peaks = {}
    for kind, work in ways.items():
        watch = MemoryWatch(device)
        watch.again()
        work(0)
        peak = watch.peak()
        peaks[kind] = None if peak is None else peak / 2**30
    how: dict[str, Any] = {"rounds": options.rounds, "seconds": options.seconds, "lead": device.type == "cuda"}
    timings = in_turns({kind: Way(work, batch) for kind, work in ways.items()}, device, **how)
    gain = ratio(timings["never"], timings["always"])
    row = {"model": title, "tokens": side * side, "batch": batch, "backward": backward, "peak_gib": peaks}
    row["ms"] = {kind: 1e3 * timing.seconds for kind, timing in timings.items()}
    return {**row, "ratio": [gain.median, gain.low, gain.high], "machine": where(device)}


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each way, about")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, help="images (none: 64 on CUDA, 1 elsewhere)")
    parser.add_argument("--json", type=Path, help="append rows to this file")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    grids, titles = GRIDS, list(WIDTHS)
    if options.smoke:
        grids, titles, options.seconds, options.rounds = (2, 3), titles[:1], 0.01, 2
    print(f"{where(torch.device(options.device))}\n")
    print(
        "| model | tokens | batch | | maps stored, ms | without, ms | ratio | GiB |\n|---|---|---|---|---|---|---|---|"
    )
    for title in titles:
        for side in grids:
            for backward in (False, True):
                row = row_of(title, side, backward, options)
                middle, low, high = row["ratio"]
                gib = " / ".join("" if peak is None else f"{peak:.2f}" for peak in row["peak_gib"].values())
                work, ms = "forward + backward" if backward else "forward", row["ms"]
                cells = (title, row["tokens"], row["batch"], work, f"{ms['always']:.2f}", f"{ms['never']:.2f}")
                print(f"| {' | '.join(map(str, cells))} | {middle:.2f} ({low:.2f} to {high:.2f}) | {gib} |", flush=True)
                if options.json:
                    with options.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
