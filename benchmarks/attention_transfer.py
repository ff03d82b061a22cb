"""A training step that learns from a teacher's attention, beside a plain one: milliseconds and memory, in one run.

    python benchmarks/attention_transfer.py [--model vit_base] [--batch 128] [--layers 9] [--only plain ours]
                                            [--device cpu] [--out FILE]
    ... --model vit_large --batch 16 --layers 18         the sizes of the paper's own table
    ... --smoke                                          a tiny model on the CPU; its figures mean nothing

Every way is a whole step of the engine (forward, backward, optimiser), compiled, in bfloat16, one CUDA graph:

    plain      labels only
    maps       labels, and cross entropy of stored attention maps of student and teacher, as one would write it
    ours       the same loss, streamed over tiles: no map is ever stored
    copy       the student takes the teacher's q and k in all layers, through the fused kernel
    features   labels, and the mean squared error of the last block's output

Memory is the most that a way holds on top of what was there before it, its teacher and optimiser included; it is
measured while the way warms up, all alone. Times are medians of interleaved rounds. Weights and images are random:
neither time nor memory depends on them.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rounds import in_turns, where
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.engine.config import OptimConfig
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import WARM_UP_STEPS, TrainStep
from vitrail.learn.attention_transfer import AttentionTransfer
from vitrail.learn.config import AttentionTransferConfig, SupervisedConfig
from vitrail.learn.objective import Objective
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier

ROUNDS, INPUTS = 11, 2
WAYS = ("plain", "maps", "ours", "copy", "features")
GOAL_TIME, GOAL_MEMORY = 1.45, 1.10  # of the plain step, for "ours"
GIB = 2**30


class StoredMaps(Supervised):
    """Attention distillation without any kernel of ours: maps of both models are tensors like others."""

    def __init__(self, model: Classifier, teacher: Classifier, layers: int) -> None:
        super().__init__(model, SupervisedConfig())
        self.teacher = teacher.requires_grad_(False).eval()
        self.names = [f"attention.{i}" for i in range(layers)]

    def train(self, mode: bool = True) -> StoredMaps:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            said = self.teacher.outputs(batch.images, set(self.names)).captured
        out = self.model.outputs(batch.images, set(self.names))
        each = [-(said[n].float() * out.captured[n].float().clamp(min=1e-12).log()).sum(-1).mean() for n in self.names]
        transfer = torch.stack(each).sum()
        return {"loss": self.criterion(out.stack[:, 0], batch.target) + transfer, "loss_transfer": transfer.detach()}


def objective(way: str, student: Classifier, teacher: Classifier, layers: int) -> Objective:
    student, teacher = copy.deepcopy(student), copy.deepcopy(teacher)
    if way == "plain":
        return Supervised(student, SupervisedConfig())
    if way == "maps":
        return StoredMaps(student, teacher, layers)
    config = {
        "ours": AttentionTransferConfig(mode="distill", layers=f"first:{layers}"),
        "copy": AttentionTransferConfig(mode="copy"),
        "features": AttentionTransferConfig(mode="distill", target="features", layers="last:1"),
    }[way]
    return AttentionTransfer(student, config, teacher)


@dataclass
class Ready:
    """A way that has made its first steps."""

    step: TrainStep
    peak: int  # bytes beyond what was held before


def ready(make: Callable[[], Objective], batches: list[Batch], device: torch.device) -> Ready:
    fast = device.type == "cuda"
    before = 0
    if fast:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    optim = OptimConfig(lr=1e-5, steps=10_000, warmup=0.0)
    step = TrainStep(
        make(),
        optim,
        make_schedule(optim, len(batches[0]), 10 * len(batches[0])),
        device=device,
        autocast=torch.bfloat16 if fast else None,
        compile=fast,
        graph=fast,
    )
    for i in range(WARM_UP_STEPS + 2):  # the last two capture a graph and replay it
        step.feed(batches[i % len(batches)])
    if fast:
        torch.cuda.synchronize(device)
    return Ready(step, torch.cuda.max_memory_allocated(device) - before if fast else 0)


def losses(options: argparse.Namespace, pair: tuple[Classifier, Classifier], batch: Batch, device: torch.device) -> str:
    """That maps and ours are one loss: of the same two models, on the same images, before training."""
    found = []
    for way in ("maps", "ours"):
        made = objective(way, *pair, options.layers).to(device).eval()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found.append(float(made(batch)["loss_transfer"]))
    return f"distillation loss of the untrained student: {found[0]:.4f} by stored maps, {found[1]:.4f} by ours"


def table(options: argparse.Namespace, device: torch.device) -> list[str]:
    torch.manual_seed(0)
    pair = tuple(create_model(options.model) for _ in range(2))
    assert len(pair) == 2
    size, classes = pair[0].preprocess.size, len(pair[0].classes)
    batches = []
    for _ in range(INPUTS):
        images = torch.randint(256, (options.batch, 3, size, size), dtype=torch.uint8, device=device)
        label = torch.randint(classes, (options.batch,), device=device)
        batches.append(Batch((images,), label, label, torch.arange(options.batch, device=device)))
    lines = [
        f"{options.model}, {size} px, batch {options.batch}, {options.layers} layers distilled",
        losses(options, pair, batches[0], device),
    ]
    made: dict[str, Ready] = {}
    for way in options.only:
        began = time.monotonic()
        made[way] = ready(partial(objective, way, *pair, options.layers), batches, device)
        print(f"{way}: compiled and warm after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    turn = [0]

    def work(way: str) -> None:
        turn[0] += 1
        made[way].step.feed(batches[turn[0] % len(batches)])

    found = in_turns({way: partial(work, way) for way in made}, device, 1 if options.smoke else ROUNDS)
    for way, one in made.items():
        line = f"{way:9} {found.median(way) * 1e3:8.2f} ms  {one.peak / GIB:6.2f} GiB"
        if "plain" in made:
            ratio, low, high = found.ratio(way, "plain")
            line += f"  time {ratio:5.2f} x plain ({low:.2f} to {high:.2f})"
            if one.peak:
                line += f"  memory {one.peak / made['plain'].peak:5.2f} x plain"
        if way == "ours":
            line += f"  goals: time {GOAL_TIME:.2f}, memory {GOAL_MEMORY:.2f}"
        if one.step.why_no_graph:
            line += f"  (no graph: {one.step.why_no_graph})"
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--layers", type=int, default=9, help="distilled, from the bottom")
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.smoke:
        options.model, options.batch, options.layers, options.device = "vit_tiny_32", 4, 9, "cpu"
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # all objectives are one piece of code to it
    text = "\n".join([where(device), *table(options, device)])
    print(text, flush=True)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
