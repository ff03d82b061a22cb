"""Images made a second: many at once against one at a time, and what an image costs in steps.

    python benchmarks/generate.py [--model RUN] [--pipeline FOLDER] [--images 64] [--device cuda] [--out FILE] [--smoke]

Without --model the network has random weights: speed does not depend on them. Batches of one shape (`exact`, as
`vitrail augment` asks for them) are a graph on CUDA. With --pipeline (a folder of diffusers) the same for a published
model, in which the other way also reads its text and encodes its image anew each time, as the authors' code does.
`--smoke` is the smallest of everything, to see that it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rounds import in_turns, where
from torch import Tensor

from vitrail.generate.diffusion_model import Diffuser, OwnDiffuser
from vitrail.generate.generation_methods import CANDIDATES, USUAL_R, ada_evaluations
from vitrail.generate.pipelines import PipelineDiffuser, load_pipeline
from vitrail.model.build import create_model

ROUNDS = 3
ALONE = 8  # images that are made one at a time; each takes as long as the next
CLASSES = ("cat", "dog", "fox", "owl")
TINY = {"width": 8, "multipliers": (1, 2), "depth": 1, "heads": 1, "image_size": 8}


def costs(diffuser: Diffuser) -> list[str]:
    """Steps and network evaluations of an image, by noise."""
    whole = diffuser.evaluations(1.0)
    lines = [f"{'r':>10} {'evaluations':>12} {'of txt2img':>11}"]
    for r in (0.3, *CANDIDATES, 1.0):
        found = diffuser.evaluations(r)
        lines.append(f"{r:>10g} {found:>12} {found / whole:>11.2f}")
    for name, chosen in (("ada of 3", (0.6, 0.7, 0.8)), ("ada of 5", CANDIDATES)):
        found = ada_evaluations(diffuser, chosen)
        lines.append(f"{name:>10} {found:>12} {found / whole:>11.2f}")
    return lines


def speeds(ways: dict[str, tuple[Callable[[], object], int]], device: torch.device, rounds: int) -> list[str]:
    """Images a second of each way (what it does, and of how many images), and how many times the first it is."""
    found = in_turns({name: work for name, (work, _) in ways.items()}, device, rounds, warm_up=1)
    first, (_, few) = next(iter(ways.items()))
    lines = []
    for name, (_, images) in ways.items():
        times = [ratio * images / few for ratio in found.ratio(first, name)]
        rate = images / found.median(name)
        lines.append(f"{name:>28} {rate:10.2f} images/s  {times[0]:6.2f} x ({times[1]:.2f} to {times[2]:.2f})")
    return lines


def one_by_one(diffuser: Diffuser, images: Tensor, target: Tensor, r: float, seeds: Tensor) -> None:
    for i in range(min(ALONE, len(images))):
        diffuser(images[i : i + 1], target[i : i + 1], r, seeds[i : i + 1])


def forgetful(diffuser: PipelineDiffuser, images: Tensor, target: Tensor, r: float, seeds: Tensor) -> None:
    """One at a time, and nothing is remembered."""
    for i in range(min(ALONE, len(images))):
        diffuser._text.clear()
        diffuser._latents.clear()
        diffuser(images[i : i + 1], target[i : i + 1], r, seeds[i : i + 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--pipeline")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    device, count = torch.device(asked.device), 2 if asked.smoke else asked.images
    half = torch.bfloat16 if device.type == "cuda" else None
    tiny = TINY if asked.smoke else {}
    steps, rounds = (5, 1) if asked.smoke else (asked.steps, ROUNDS)
    model = asked.model or create_model("denoiser_32", classes=CLASSES, **tiny)
    own = OwnDiffuser(model, steps=steps, batch=count, device=device, autocast=half)
    fixed = OwnDiffuser(own.model, steps=steps, batch=count, exact=True, autocast=half)
    target, seeds = torch.arange(count) % len(own.classes), torch.arange(count)
    images = torch.randint(0, 256, (count, 3, own.size, own.size), dtype=torch.uint8)
    plain = OwnDiffuser(own.model, steps=steps, batch=count, guidance=1.0, autocast=half)
    few = min(ALONE, count)
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "one at a time": (partial(one_by_one, own, images, target, USUAL_R, seeds), few),
        "batched": (partial(own, images, target, USUAL_R, seeds), count),
        "batched, of one shape": (partial(fixed, images, target, USUAL_R, seeds), count),
        "batched, without guidance": (partial(plain, images, target, USUAL_R, seeds), count),
    }
    about = f"{own.size} pixels, r {USUAL_R:g}, {steps} steps, {count} images"
    lines = [where(device), f"{own.name}: {about}", *speeds(ways, device, rounds), *costs(own)]
    if asked.pipeline:
        loaded = load_pipeline(asked.pipeline, device=device, dtype=torch.float16 if half else torch.float32)
        piped = PipelineDiffuser(loaded, CLASSES, [f"a photo of a {c}." for c in CLASSES], steps=asked.steps)
        target = torch.arange(count) % len(CLASSES)
        ways = {
            "one at a time": (partial(forgetful, piped, images, target, USUAL_R, seeds), few),
            "one at a time, cached": (partial(one_by_one, piped, images, target, USUAL_R, seeds), few),
            "batched and cached": (partial(piped, images, target, USUAL_R, seeds), count),
        }
        lines += [f"{piped.name}: {piped.size} pixels", *speeds(ways, device, rounds), *costs(piped)]
    text = "\n".join(lines)
    print(text, flush=True)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
