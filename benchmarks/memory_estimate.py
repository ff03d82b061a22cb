"""Memory of training steps: what `vitrail show RECIPE --plan` estimates, compared with the measured peak.

    python benchmarks/memory_estimate.py --device cuda
    python benchmarks/memory_estimate.py --device cpu --only deit --json

Eleven configurations with random weights on random images, eager; nothing is downloaded. The peak is that of two steps,
model, optimiser state and copies included: on CUDA `torch.cuda.max_memory_allocated`, on a CPU the running sum of all
allocations that torch's profiler records.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from vitrail.config import RunConfig
from vitrail.data.batch import Batch
from vitrail.engine.device import choose_precision
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import TrainStep
from vitrail.learn.objective import Objective
from vitrail.model.build import create_model
from vitrail.recipes import configured
from vitrail.run.estimate import estimate_memory, untrained

# Name -> recipe, its settings, batch on CUDA, batch on a CPU.
ROWS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "ViT-Ti/4 32 px": ("small-deit", {}, 1000, 64),
    "DeiT-S 224 px": ("deit-300", {"model": {"name": "deit_small"}}, 256, 8),
    "DeiT-S, checkpointing": (
        "deit-300",
        {"model": {"name": "deit_small"}, "engine": {"activation_checkpointing": "blocks"}},
        256,
        8,
    ),
    "ViT-B": ("vit", {"model": {"name": "vit_base"}, "optim": {"name": "lamb"}}, 128, 2),
    "CaiT-XXS24": ("cait-400", {"model": {"name": "cait_xxs24"}}, 128, 4),
    "ResMLP-S12": ("resmlp-400", {"model": {"name": "resmlp_s12"}}, 256, 8),
    "PatchConvNet-S60": ("patchconvnet-1k", {}, 128, 4),
    "resnet18_32": ("small-rsb", {"model": {"name": "resnet18_32", "drop_path": None}}, 512, 32),
    "DeiT-S, distilled": ("deit-1000-distilled", {"model": {"name": "deit_small_distilled"}}, 128, 4),
    "MoCo resnet18_32": ("small-moco", {"model": {"name": "resnet18_32"}}, 256, 32),
    "NOLA on ViT-S": ("nola-vit", {"model": {"name": "vit_small", "weights": "none"}}, 128, 8),
}


def configuration(row: str, device: str, folder: Path) -> RunConfig:
    """The recipe of a row with its batch; its teacher, where it has one, is a small model of random weights."""
    recipe, settings, on_cuda, on_cpu = ROWS[row]
    settings = {**settings, "data": {"batch": on_cuda if device == "cuda" else on_cpu}}
    if "distilled" in row:
        if not (folder / "model.json").is_file():
            create_model("timm:regnety_016").save(folder)
        settings |= {"objective": {"teacher": str(folder)}}
    engine = {**settings.get("engine", {}), "device": device, "accumulate": 1}
    return configured(recipe, {**settings, "engine": engine})


def random_batch(objective: Objective, config: RunConfig, device: torch.device) -> Batch:
    """As the loader gives it: bytes, or floats and weights of classes where images are mixed."""
    count, classes = config.data.batch, len(objective.model.classes)
    mixed = bool(config.data.augment.mixup or config.data.augment.cutmix)
    sides = [view.size or objective.model.preprocess.size for view in objective.views.all()]
    if mixed:
        views = tuple(torch.randn(count, 3, side, side, device=device) for side in sides)
    else:
        views = tuple(torch.randint(256, (count, 3, s, s), dtype=torch.uint8, device=device) for s in sides)
    label = torch.randint(classes, (count,), device=device)
    target = torch.rand(count, classes, device=device).softmax(1) if mixed else label
    return Batch(views, label, target, torch.arange(count, device=device))


def two_steps(objective: Objective, config: RunConfig, device: torch.device, autocast: torch.dtype | None) -> None:
    schedule = make_schedule(config.optim, config.data.batch, 10_000)
    step = TrainStep(objective, config.optim, schedule, device=device, autocast=autocast, ema=config.engine.ema)
    batch = random_batch(objective, config, device)
    for _ in range(2):
        step.feed(batch)


def measured(config: RunConfig, device: torch.device, autocast: torch.dtype | None) -> int:
    """Bytes at the peak of two steps, the model included."""
    if device.type == "cuda":
        objective, _ = untrained(config)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        two_steps(objective, config, device, autocast)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    objective, _ = untrained(config)
    stored = {t.untyped_storage()._cdata: t for t in (*objective.parameters(), *objective.buffers())}
    begun = sum(t.untyped_storage().nbytes() for t in stored.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        two_steps(objective, config, device, autocast)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = begun
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    options = parser.parse_args()
    device = torch.device(options.device)
    autocast = choose_precision("auto", device)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in ROWS if options.only.lower() in name.lower()):
            torch.manual_seed(0)
            config = configuration(name, options.device, Path(folder))
            objective, _ = untrained(config)
            began = time.monotonic()
            estimate = estimate_memory(objective, config, device=device, autocast=autocast)
            seconds = time.monotonic() - began
            del objective
            gc.collect()
            peak = measured(config, device, autocast)
            gc.collect()
            ratio = None if estimate.peak is None else round(estimate.peak / peak, 3)
            rows.append(
                {
                    "configuration": name,
                    "batch": config.data.batch,
                    "optimizer": config.optim.name,
                    "estimate": estimate.to_json(),
                    "peak": peak,
                    "ratio": ratio,
                    "seconds": round(seconds, 2),
                }
            )
            if not options.json:
                guess = "none: " + estimate.note if estimate.peak is None else f"{estimate.peak / 2**20:9.1f}"
                print(
                    f"{name:<20} batch {config.data.batch:5d}  {config.optim.name:<6} estimate {guess} MiB  "
                    f"measured {peak / 2**20:9.1f} MiB  ratio {ratio}  (estimated in {seconds:.2f} s)",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
