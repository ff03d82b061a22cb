"""What the bank of mean shift adds to a training step of a ResNet-50: time, and memory beside the bank itself.

    python benchmarks/bank.py [--batch 256] [--compile] [--out FILE]       one accelerator, about a minute
    python benchmarks/bank.py --smoke                                      tiny, on a CPU; its figures mean nothing

A step is forward, backward and SGD of torchvision's ResNet-50 with 512 outputs at 224 pixels: bfloat16 autocast,
channels last, TF32 where float32 is multiplied, as `vitrail train` sets it. The momentum teacher's own pass is left
out, so that shares are those of the smallest step there is. With a bank the step also pushes its batch, searches the 5
nearest of every image and reads them, as `vitrail.learn.msf` does; nothing else differs. All ways take turns; shares
are medians of the rounds' ratios, with quartiles. Goals: 2 % with 128K rows, 8 % with 1M.

Memory is what a step takes at its highest point beyond what lay there before it; 'added' is that of the step with the
bank less that of the step without. A copy of the bank would show as at least the bank's own size, so 'of the bank' far
below 1 for the large bank means that there is none. 'Search alone' is the same of push, search and reading.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rounds import in_turns, where
from torch import Tensor, nn

from vitrail.learn.bank import Bank
from vitrail.learn.msf import shift_loss

WIDTH, K = 512, 5
GOALS = {128_000: 2, 1_024_000: 8}  # rows -> % of a step
PRECISIONS = {"bf16": torch.bfloat16, "float32": torch.float32}
ROUNDS = 15
MEBI = 2**20


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    batch: int
    pixels: int
    rows: tuple[int, ...]
    rounds: int


def found_near(bank: Bank, target: Tensor, labels: Tensor) -> Tensor:
    """What mean shift does with its bank: the nearest rows [batch, K, width], after the batch was pushed."""
    own = bank.push(target, labels)
    return bank.rows_at(bank.nearest(target, K, own)[1])


class Step:
    """A training step, with a bank or without."""

    def __init__(self, size: Size, device: torch.device, compiled: bool) -> None:
        from torchvision.models import resnet50

        torch.manual_seed(0)
        self.device = device
        model: nn.Module = resnet50(num_classes=WIDTH).to(device, memory_format=torch.channels_last).train()
        self.optimizer = torch.optim.SGD(
            model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4, fused=device.type == "cuda"
        )
        self.model = torch.compile(model, dynamic=False) if compiled else model
        images = torch.randn(size.batch, 3, size.pixels, size.pixels, device=device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.target = F.normalize(torch.randn(size.batch, WIDTH, device=device))
        self.labels = torch.zeros(size.batch, dtype=torch.int64, device=device)

    def __call__(self, bank: Bank | None = None) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            embedding = self.model(self.images)
        online = F.normalize(embedding.float())
        near = self.target[:, None] if bank is None else found_near(bank, self.target, self.labels)
        shift_loss(online, near).backward()
        self.optimizer.step()


def highest(work: Callable[[], object], device: torch.device) -> int:
    """Bytes that some work takes at its highest point beyond what lay there before it; 0 where nobody counts."""
    if device.type != "cuda":
        work()
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measured(size: Size, device: torch.device, compiled: bool) -> list[str]:
    """The table, as lines of Markdown."""
    step = Step(size, device, compiled)
    banks = {
        f"{rows:,} x {WIDTH}, {name}": Bank(rows, WIDTH, dtype=dtype).to(device)
        for rows in size.rows
        for name, dtype in PRECISIONS.items()
    }
    searches = {name: partial(found_near, bank, step.target, step.labels) for name, bank in banks.items()}
    ways: dict[str, Callable[[], object]] = {"alone": step}
    ways |= {name: partial(step, bank) for name, bank in banks.items()}
    timed = in_turns(ways, device, size.rounds)
    apart = in_turns(searches, device, size.rounds, lead=True)
    taken = {name: highest(way, device) for name, way in ways.items()}
    searched = {name: highest(way, device) for name, way in searches.items()}
    lines = [
        f"ResNet-50, {size.pixels} px, batch {size.batch}, bf16, channels last, {'compiled' if compiled else 'eager'}: "
        f"{timed.median('alone') * 1e3:.2f} ms a step alone, {taken['alone'] / MEBI:,.0f} MiB at its highest.",
        "",
        "| bank | step, ms | added, % | quartiles | goal, % | search alone, ms | bank, MiB | added beside it, MiB | "
        "of the bank | search alone, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, bank in banks.items():
        middle, low, high = (100 * (ratio - 1) for ratio in timed.ratio(name, "alone"))
        own = bank.rows.numel() * bank.rows.element_size()
        added = taken[name] - taken["alone"]
        goal = GOALS.get(len(bank))
        cells = [
            name,
            f"{timed.median(name) * 1e3:.2f}",
            f"{middle:.2f}",
            f"{low:.2f} to {high:.2f}",
            "" if goal is None else f"{goal} {'met' if middle <= goal else 'missed'}",
            f"{apart.median(name) * 1e3:.2f}",
            f"{own / MEBI:,.0f}",
            f"{added / MEBI:,.0f}",
            f"{added / own:.2f}",
            f"{searched[name] / MEBI:,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--compile", action="store_true", help="a faster step, of which the bank is a larger share")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    size = Size(options.batch, 224, tuple(GOALS), options.rounds)
    if options.smoke:
        size = Size(4, 32, (256, 2048), 2)
    torch.set_float32_matmul_precision("high")
    lines = [f"{where(device)}{'; a smoke run: figures mean nothing' * options.smoke}", ""]
    lines += measured(size, device, options.compile)
    text = "\n".join(lines)
    print(text, flush=True)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
