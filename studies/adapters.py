"""Few numbers for a task: LoRA, NOLA and PRANC beside all weights, on images of 32 pixels.

    python studies/adapters.py cifar100.npz cifar10.npz [--other imagenette.npz] --out FOLDER [--part main bits ...]
                               [--seeds 3] [--samplings 4] [--minutes 9.5] [--models FOLDER]
    python studies/adapters.py --table FOLDER        Markdown of what was found, mean and std over seeds
    python studies/adapters.py --smoke --out FOLDER  all of it in a minute on a CPU; its figures mean nothing

One process. A ViT learns the first data set; everything else adapts it to the second (and to `--other`), or begins
from nothing. Rows are appended to FOLDER/found.jsonl as they come; the base and the files of adapters are kept beside
it: the same command goes on where a kill, or `--minutes`, ended it. Learning rates are chosen on validation images of
the second set with seed 0, one for each family; everything reported is of test images. What takes longest comes for one
seed first.

Estimates for one H200, at 30k images a second without compilation and 2.5 s to begin and judge a run:

    part      runs                                                                        epochs   minutes
    base      one ViT (12 blocks of width 192), compiled                                      40       1.5
    main      full, linear, LoRA of rank 1 and 4, NOLA of three budgets; three seeds           4       3
              and thirteen more to choose rates                                                 4       1.3
    bits      2 to 8 bits after training (three seeds); 2 and 3 in training                    4       0.8
    toy       784-256-10: dense, PRANC, NOLA; three seeds                                    200       0.8
    shots     four ways with 5 and 10 images a class; rates, then four samplings     100 steps         4
    scratch   ResNet-20: rates, dense, PRANC, LoRA, NOLA; one seed, then two more             15       2, then 3
    other     as main, of 9,500 images                                                         4       1.3

so `main bits toy shots` take about 8 minutes, and all of it about 14; it is made in this order. Last, `time`: a step of
each way of `main`, to be run with nothing else on the accelerator. `imagenette.npz` holds Imagenette's squares of 128
pixels at 32 (bicubic).

Not as the paper: the base is small and learned CIFAR-100 alone; budgets are for its size; from scratch the adapter
moves weights away from their random start, for 15 epochs; the toy's images are Fashion-MNIST's, not MNIST's. Rates of
few shots are chosen with as few images of the third data set (without one: of the target, by validation images).

Expected (NOLA, arXiv 2310.02556): full >= LoRA, NOLA > linear; NOLA with fewer numbers as good as LoRA of rank 1; 4
bits cost nothing, 3 bits in training cost NOLA less than LoRA; from scratch dense > NOLA > PRANC, LoRA; the toy's loss
is lower and its time shorter with NOLA than with PRANC; with few shots adapters beat full fine-tuning.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from adapter_runs import FEW_WAYS, ROUNDED, WAYS, Runs
from adapter_tables import tables
from found import Found, Order, hardware, study_parser, to_the_end
from torch import Tensor, nn

from vitrail.data.open import open_data
from vitrail.measure.speed import as_one_graph
from vitrail.model.adapters.apply import apply
from vitrail.model.adapters.config import AdapterConfig, Nola, Pranc

PARTS = ("main", "bits", "toy", "shots", "scratch", "other", "time")
BITS = (8, 7, 6, 5, 4, 3, 2)
SHOTS = (5, 10)
TOY: dict[str, AdapterConfig | None] = {
    "dense, all weights": None,
    "PRANC, 32 a layer": Pranc(coefficients=32, targets=("*",), train_head=False),
    "NOLA, 16 + 16 a layer": Nola(rank=4, coefficients=16, targets=("*",), train_head=False),
}
TOY_EPOCHS, TOY_BATCH, TOY_RATE, DENSE_RATE = 200, 512, 0.05, 1e-3


class Study:
    """All measurements; each method makes the rows of one seed."""

    def __init__(self, runs: Runs, found: Found) -> None:
        self.runs, self.found = runs, found
        self._toy: dict[str, tuple[Tensor, Tensor]] = {}

    def adapted(self, part: str, on: str, seed: int) -> None:
        """Accuracy and cost of every way of a part."""
        chosen = "main" if part == "other" else part
        for name, way in WAYS.items():
            if way.part == chosen and self.found.wants(name):
                self.found.row(part, way.subject, way.what, seed, partial(self.runs.judged, name, seed, on))

    def time(self, seed: int) -> None:
        for name, way in WAYS.items():
            if way.part == "main":
                self.found.row("time", way.subject, way.what, seed, partial(self.runs.timed, name))

    def bits(self, seed: int) -> None:
        for name, subject in ROUNDED.items():
            for bits in BITS:
                self.found.row("bits", subject, f"{bits}", seed, partial(self.runs.rounded, name, seed, bits))

    def shots(self, sampling: int) -> None:
        for shots in SHOTS:
            for name in FEW_WAYS:
                way = WAYS[name]
                make = partial(self.runs.few, name, shots, sampling)
                self.found.row("shots", f"{shots} images a class", f"{way.subject}, {way.what}", sampling, make)

    def toy(self, seed: int) -> None:
        for name, config in TOY.items():
            subject, what = name.split(", ", 1)
            self.found.row("toy", subject, what, seed, partial(self._toy_row, config, seed))

    def _toy_row(self, config: AdapterConfig | None, seed: int) -> dict[str, Any]:
        device = self.runs.target.device
        images, labels = self._fashion("train", device)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
        if config is not None:
            apply(model, config)
        learned = [p for p in model.parameters() if p.requires_grad]
        rate = DENSE_RATE if config is None else TOY_RATE
        fast = device.type == "cuda"
        optimizer = torch.optim.Adam(learned, lr=rate, fused=fast, capturable=fast)
        rows = torch.arange(min(TOY_BATCH, len(images)), device=device)

        def step() -> None:
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()

        if fast:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if fast else 0
        again = as_one_graph(step) if fast else step  # launches would be all the time of a network this small
        self.runs.target.wait()
        began = time.monotonic()
        for _ in range(2 if self.runs.smoke else TOY_EPOCHS):
            order = torch.randperm(len(images), device=device)
            for chosen in order[: len(order) // len(rows) * len(rows)].split(len(rows)):
                rows.copy_(chosen)
                again()
        self.runs.target.wait()
        seconds = time.monotonic() - began
        made: dict[str, Any] = {"split": "test", "train_seconds": seconds, "trained": sum(p.numel() for p in learned)}
        if fast:
            made["memory"] = torch.cuda.max_memory_allocated() - before
        with torch.no_grad():
            logits = model(images)
            made["loss"] = float(F.cross_entropy(logits, labels))
            made["train_top1"] = float((logits.argmax(1) == labels).float().mean())
            images, labels = self._fashion("test", device)
            made["top1"] = float((model(images).argmax(1) == labels).float().mean())
        return made

    def _fashion(self, split: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """Images [n, 784] in 0..1 and labels."""
        if split not in self._toy:
            rows = open_data("embedded:fashion")[split]
            count = min(len(rows), 200) if self.runs.smoke else len(rows)
            pixels = np.stack([np.asarray(rows.read(row).convert("L")) for row in range(count)])
            images = torch.from_numpy(pixels).to(device).flatten(1) / 255
            self._toy[split] = images, torch.from_numpy(rows.labels[:count].copy()).to(device)
        return self._toy[split]

    def order(self, seeds: int, samplings: int) -> Order:
        """What matters most first."""
        every, first, others = range(seeds), range(1), range(1, seeds)
        return [
            ("main", partial(self.adapted, "main", "target"), every),
            ("bits", self.bits, every),
            ("bits", partial(self.adapted, "bits", "target"), first),
            ("toy", self.toy, every),
            ("shots", self.shots, range(samplings)),
            ("scratch", partial(self.adapted, "scratch", "target"), first),
            ("other", partial(self.adapted, "other", "other"), every),
            ("bits", partial(self.adapted, "bits", "target"), others),
            ("scratch", partial(self.adapted, "scratch", "target"), others),
            ("time", self.time, first),
        ]


def main() -> None:
    parser = study_parser(__doc__, "adapters", PARTS)
    parser.add_argument("data", nargs="*", help="what the base learns, and what it is adapted to")
    parser.add_argument("--other", help="other images that it is adapted to (none: left out)")
    parser.add_argument("--samplings", type=int, default=4)
    options = parser.parse_args()
    if options.table is not None:
        print(tables(options.table))
        return
    if len(options.data) != 2 and not options.smoke:
        parser.error("name two data sets: what the base learns, and what it is adapted to")
    shapes = "synthetic:shapes?size=32&n=200"
    source, target = options.data if len(options.data) == 2 else ("embedded:fashion", shapes)
    other, parts = options.other, list(options.part)
    if options.smoke:
        other, options.samplings = other or f"{shapes}&seed=3", min(options.samplings, 1)
    if other is None and "other" in parts:
        print("no --other images: that part is left out", file=sys.stderr)
        parts.remove("other")
    found = Found(options.out, options.minutes, options.of)
    runs = Runs(source, target, other, options.models or options.out, found, options.smoke)
    about = f"base of {source}, {hardware(runs.target.fast)}"
    found.row("about", target, about, 0, lambda: {"smoke": options.smoke})
    with to_the_end(found, options.minutes):
        found.through(Study(runs, found).order(options.seeds, options.samplings), parts, options.only)


if __name__ == "__main__":
    main()
