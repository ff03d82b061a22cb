"""How fast a plain ViT learns CIFAR-10: settings are tried on held-out training images, then judged once on test.

    python studies/speedrun.py tune DATA.npz [--out FILE] [--only NAME ...] [--jobs 3]
    python studies/speedrun.py judge DATA.npz [--seeds 10] [--out FILE]
    python studies/speedrun.py tune --smoke

What is timed: from images on the device, with a new model, to the last image evaluated. Before the clock starts, a
throw-away model of the same architecture makes a few steps, so that everything is compiled; how long that took is
stated apart, and so is the gain of averaging over an image and its mirror image. Outside the clock, `judge` also says
how the same weights do when they are optimised for inference in float32, bf16 and fp8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from device_runs import DeviceRuns

from vitrail.config import RunConfig, from_mapping
from vitrail.engine.step import TrainStep
from vitrail.recipes import recipe
from vitrail.schema import parse_flags

CLASS, PLAIN = "--model.head.kind class_token", "--data.augment.rand_ops 0"  # as the first round began
NO_MIX = "--data.augment.mixup 0 --data.augment.cutmix 0"
VARIANTS = {  # what was tried, as changes of the recipe
    "recipe": "",
    "first": f"{CLASS} {PLAIN}",
    "muon-4e-3": f"{CLASS} {PLAIN} --optim.lr 4e-3",
    "mean": PLAIN,
    "depth-12": f"{CLASS} {PLAIN} --model.trunk.depth 12 --optim.epochs 34",
    "rand": CLASS,
    "rand-no-mix": f"{CLASS} {NO_MIX}",
    "conv-stem": f"{CLASS} {PLAIN} --model.trunk.stem.kind conv",
    "tiny": f"{CLASS} {PLAIN} --model.name vit_tiny_32 --model.trunk.depth 12 --optim.epochs 80",
    "batch-500": "--data.batch 500",
    "batch-500-1e-3": "--data.batch 500 --optim.lr 1e-3",
    "batch-500-rand2": "--data.batch 500 --data.augment.rand_ops 2 --data.augment.rand_magnitude 9",
    "adamw": "--optim.name adamw --optim.lr 1e-3",
}
SMOKE = (
    "--model.trunk.depth 1 --model.trunk.width 48 --model.trunk.heads 3 --data.batch 20 --optim.steps 6 --data.limit 60"
)


class Bench(DeviceRuns):
    """Data on the device, and timed runs on it."""

    def __init__(self, uri: str, held_out: bool, smoke: bool = False) -> None:
        super().__init__(uri, val_fraction=0.1 if held_out else 0.0, limit=60 if smoke else None)
        self.split = "val" if held_out else "test"

    @torch.inference_mode()
    def by_precision(self, model: Any) -> dict[str, float]:
        """Share of right answers of the model optimised for inference, by precision."""
        found = {}
        for precision in ("float32", "bf16", *(["fp8"] if self.fast else [])):
            ready = model.optimize(precision, compile=False, graph=False)
            right = [
                (ready(batch.images).argmax(1) == batch.label).float().mean()
                for batch in self.judged(self.split, model)
            ]
            found[f"top1_{precision}"] = float(torch.stack(right).mean())  # batches are equally large
        return found

    @torch.inference_mode()
    def accuracy(self, step: TrainStep) -> tuple[float, float]:
        """Share of right answers, alone and averaged with the mirror image."""
        model = step.model.eval()
        right, both, count = 0, 0, 0
        for batch in self.judged(self.split, model):
            with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                plain = model(batch.images).float()
                mirrored = model(batch.images.flip(-1)).float()
            right += int((plain.argmax(1) == batch.label).sum())
            both += int(((plain.softmax(1) + mirrored.softmax(1)).argmax(1) == batch.label).sum())
            count += len(batch)
        return right / count, both / count

    def run(self, config: RunConfig, seed: int) -> dict[str, Any]:
        began = time.monotonic()
        step, _ = self.trained(config, seed + 1000, most=12)
        self.accuracy(step)
        if self.split == "test":
            self.by_precision(step.model)
        self.wait()
        ready = time.monotonic() - began
        del step
        began = time.monotonic()
        step, steps = self.trained(config, seed)
        self.wait()
        learned = time.monotonic() - began
        top1, both = self.accuracy(step)
        self.wait()
        found = {
            "seed": seed,
            "split": self.split,
            "top1": top1,
            "top1_mirrored": both,
            "seconds": time.monotonic() - began,
            "training_seconds": learned,
            "ready_seconds": ready,
            "steps": steps,
        }
        return found if self.split == "val" else {**found, **self.by_precision(step.model)}


def configured(changes: str, smoke: bool) -> RunConfig:
    config = recipe("speedrun-cifar10")
    for flags in (f"--data x.npz {changes}", *([SMOKE] if smoke else [])):
        config = from_mapping(parse_flags(flags.split())[1], config)
    return config


def tell(line: dict[str, Any], out: Path | None) -> None:
    text = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()})
    print(text, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "judge", "one"))
    parser.add_argument("data", nargs="?", default="embedded:fashion")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--changes", default="", help="other settings for judge, as flags")
    parser.add_argument("--jobs", type=int, default=1, help="variants tried side by side; their times then mean little")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.what == "tune" and options.jobs > 1:
        _side_by_side(options)
        return
    held_out = options.what != "judge"
    bench = Bench(options.data, held_out, options.smoke)
    names = options.only if held_out else ["recipe"]
    found = []
    for name in names:
        config = configured(f"{VARIANTS[name]} {options.changes}", options.smoke)
        if options.smoke:
            config = replace(config, data=replace(config.data, loader="device"))
        for seed in range(options.first, options.first + options.seeds):
            found.append(bench.run(config, seed))
            tell({"variant": name, "changes": options.changes, **found[-1]}, options.out)
    if not held_out and len(found) > 1:
        for key in (k for k in found[0] if k.startswith("top1") or k == "seconds"):
            values = [f[key] for f in found]
            spread = statistics.stdev(values)
            tell({"figure": key, "mean": statistics.mean(values), "std": spread, "runs": len(values)}, options.out)


def _side_by_side(options: argparse.Namespace) -> None:
    waiting = [(name, seed) for name in options.only for seed in range(options.first, options.first + options.seeds)]
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        running = [job for job in running if job.poll() is None]
        while waiting and len(running) < options.jobs:
            name, seed = waiting.pop(0)
            words = [sys.executable, __file__, "one", options.data, "--only", name, "--first", str(seed)]
            words += ["--out", str(options.out)] if options.out else []
            words += ["--changes", options.changes] if options.changes else []
            words += ["--smoke"] if options.smoke else []
            running.append(subprocess.Popen(words))
        time.sleep(0.2)


if __name__ == "__main__":
    main()
