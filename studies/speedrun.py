"""How fast a plain ViT learns CIFAR-10: the recipe speedrun-cifar10 over seeds, timed, evaluated once on test.

    python studies/speedrun.py DATA.npz [--seeds 10] [--out FOLDER] [--smoke]

Settings were tried by speedrun-tuning.yaml. What is timed: from images on the device, with a new model, to the last
image evaluated. Before the clock starts, a throw-away model of the same architecture makes a few steps, so that
everything is compiled; how long that took is stated apart, and so is the gain of averaging over an image and its mirror
image. Outside the clock, the same weights are evaluated optimised for inference in float32, bf16 and fp8, too.
Rows are kept in FOLDER/rows.json and printed as Markdown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from device_runs import DeviceRuns
from row_table import Row, Rows

from vitrail.config import RunConfig
from vitrail.recipes import recipe, with_values

SMOKE = {
    **{"model.trunk.depth": 1, "model.trunk.width": 48, "model.trunk.heads": 3},
    **{"data.batch": 20, "optim.steps": 6, "data.limit": 60},
}


class SpeedRuns(DeviceRuns):
    """Timed runs, evaluated on test images."""

    @torch.inference_mode()
    def metrics(self, model: Any) -> dict[str, float]:
        """Top-1 alone, and averaged with the mirror image."""
        right, count = torch.zeros(2, device=self.device), 0
        model.eval()
        for batch in self.loader("test", model):
            with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                alone, mirrored = (model(images).float().softmax(1) for images in (batch.images, batch.images.flip(-1)))
            right += (torch.stack([alone, alone + mirrored]).argmax(2) == batch.label).sum(1)
            count += len(batch)
        return dict(zip(("top1", "top1_mirrored"), (right / count).tolist(), strict=True))

    @torch.inference_mode()
    def by_precision(self, model: Any) -> dict[str, float]:
        """Top-1 of the model optimised for inference."""
        top1 = {}
        for precision in ("float32", "bf16", *(["fp8"] if self.fast else [])):
            ready = model.optimize(precision, compile=False, graph=False)
            right = [ready(batch.images).argmax(1) == batch.label for batch in self.loader("test", model)]
            top1[f"top1_{precision}"] = float(torch.cat(right).float().mean())
        return top1

    def timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        self.wait()
        began = time.monotonic()
        result = work()
        self.wait()
        return result, time.monotonic() - began

    def run(self, config: RunConfig, seed: int) -> Row:
        def rehearsed() -> None:
            model = self.trained(config, seed + 1000, most=12)[0].model
            self.metrics(model)
            self.by_precision(model)

        _, ready = self.timed(rehearsed)
        (step, steps), learned = self.timed(lambda: self.trained(config, seed))
        metrics, evaluated = self.timed(lambda: self.metrics(step.model))
        seconds = {"seconds": learned + evaluated, "training_seconds": learned, "ready_seconds": ready}
        return {"split": "test", **metrics, **seconds, "steps": steps, **self.by_precision(step.model)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/speedrun"))
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    runs = SpeedRuns(options.data, val_fraction=0.0, limit=60 if options.smoke else None)
    config = with_values(recipe("speedrun-cifar10"), {"data.uri": options.data, **(SMOKE if options.smoke else {})})
    rows = Rows(options.out / "rows.json")
    for seed in range(options.seeds):
        rows.row("speedrun", options.data, seed, lambda s=seed: runs.run(config, s))
    print(rows.markdown())


if __name__ == "__main__":
    main()
