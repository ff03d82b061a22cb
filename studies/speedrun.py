"""How fast a plain ViT learns CIFAR-10: the recipe speedrun-cifar10 over seeds, timed, evaluated once on test.

    python studies/speedrun.py DATA.npz [--seeds 10] [--out FILE] [--smoke]

Settings were tried by speedrun-tuning.yaml. What is timed: from images on the device, with a new model, to the last
image evaluated. Before the clock starts, a throw-away model of the same architecture makes a few steps, so that
everything is compiled; how long that took is stated apart, and so is the gain of averaging over an image and its mirror
image. Outside the clock, the same weights are evaluated optimised for inference in float32, bf16 and fp8, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from device_runs import DeviceRuns

from vitrail.config import RunConfig, from_mapping
from vitrail.engine.step import TrainStep
from vitrail.recipes import recipe
from vitrail.schema import parse_flags

SMOKE = (
    "--model.trunk.depth 1 --model.trunk.width 48 --model.trunk.heads 3 --data.batch 20 "
    "--optim.steps 6 --data.limit 60 --data.loader device"
)


class Bench(DeviceRuns):
    """Data on the device, and timed runs on it."""

    split = "test"

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
        return {**found, **self.by_precision(step.model)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.data, val_fraction=0.0, limit=60 if options.smoke else None)
    flags = f"--data {options.data} {SMOKE if options.smoke else ''}".split()
    config = from_mapping(parse_flags(flags)[1], recipe("speedrun-cifar10"))
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        rows.append(bench.run(config, seed))
        write_line(rows[-1], options.out)
    for key in (k for k in rows[0] if k.startswith("top1") or k == "seconds"):
        values = [row[key] for row in rows]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        write_line({"figure": key, "mean": statistics.mean(values), "std": spread, "runs": len(values)}, options.out)


def write_line(line: dict[str, Any], out: Path | None) -> None:
    text = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()})
    print(text, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
