"""Training speed of every objective on one network: images/s, compared with plain cross entropy and with MoCo.

    python benchmarks/objectives.py [--model resnet18_32] [--batch 256] [--only moco dino ...] [--jobs 6] [--out FILE]
    ... --smoke             a tiny network on the CPU; its figures mean nothing

Every row is a whole step of the engine as `vitrail train` makes it (forward, backward, optimiser, bank and momentum
encoder; on CUDA compiled, in bfloat16, one graph) on batches of random images:

    step        images/s of steps alone, on batches that lie on the device
    views       images/s with the views made on the device, as in training
    passes      forward and backward passes of the network per image, in pixels of one image: a view of half the side
                counts a quarter, a forward pass without gradient (momentum encoder, teacher) a third
    of moco     passes/s of the step, compared with MoCo's
    graph       whether steps are one CUDA graph, or why not

`--jobs` warms the compiler's cache first, that many objectives side by side; rows are timed one after the other.
Left out: diffusion and language_model, which train networks of other kinds, and attack and defence, whose victims are
adaptive models (benchmarks/adaptive.py).
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounds import where
from torch import nn

from vitrail.config import AugmentConfig, DataConfig
from vitrail.data.augment.host import Augment, view_augments
from vitrail.data.batch import Batch
from vitrail.data.dataset import DataSet
from vitrail.data.loading.device_loader import DeviceImages, DeviceLoader
from vitrail.data.loading.loader import LoaderSpec
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.engine.config import OptimConfig
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import WARM_UP_STEPS, TrainStep
from vitrail.learn import config as learn
from vitrail.learn.objective import Objective, TrainingFacts, build_objective
from vitrail.model.build import create_model
from vitrail.model.heads.config import Branches, Projected
from vitrail.recipes import recipe

BANK, CLASSES, IMAGES, STEPS = 16_384, 10, 45_056, 60
HEAD = Projected(width=128, hidden=512, norm=True, judged="trunk")
OPTIM = OptimConfig(name="sgd", lr=1e-3, steps=10_000, warmup=0.0)
DINO_OPTIM = OptimConfig(lr=1e-5, steps=10_000, warmup=0.0, weight_decay=0.04, weight_decay_end=0.4, clip=3.0)
TEACHER = "TEACHER"
PAIR: dict[str, Any] = {"predictor_hidden": 512, "bank": BANK}
OBJECTIVES: dict[str, Any] = {
    "cross entropy": learn.SupervisedConfig(),
    "moco": learn.MocoConfig(bank=BANK),
    "moco symmetric": learn.MocoConfig(bank=BANK, symmetric=True),
    "byol": learn.ByolConfig(predictor_hidden=512),
    "byol symmetric": learn.ByolConfig(predictor_hidden=512, symmetric=True),
    "isd": learn.IsdConfig(**PAIR),
    "msf": learn.MsfConfig(**PAIR),
    "cmsf self": learn.CmsfConfig(**PAIR),
    "cmsf semi": learn.CmsfConfig(**PAIR, constraint="semi"),
    "cmsf supervised": learn.CmsfConfig(**PAIR, constraint="supervised"),
    "supcon": learn.SupconConfig(),
    "protonw": learn.ProtonwConfig(**PAIR),
    "dino": learn.DinoConfig(prototypes=4096, local_views=4, local_size=16, local_scale=(0.2, 0.5)),
    "compres 1q": learn.CompresConfig(teacher=TEACHER, bank=BANK),
    "compres 2q": learn.CompresConfig(teacher=TEACHER, bank=BANK, queues=2),
    "simreg": learn.SimregConfig(teacher=TEACHER),
    "clusters": learn.ClustersConfig(teacher=TEACHER, clusters=100),
    "crd": learn.CrdConfig(teacher=TEACHER, negatives=4096),
    "distillation": learn.DistillationConfig(teacher=TEACHER),
    "grafit": learn.GrafitConfig(),
    "one": learn.OneConfig(),
    "mae": learn.MaeConfig(decoder_width=96, decoder_depth=2, decoder_heads=3),
    "attention copied": learn.AttentionTransferConfig(teacher=TEACHER, mode="copy"),
    "attention distilled": learn.AttentionTransferConfig(teacher=TEACHER, mode="distill"),
}
VIT_ONLY = ("mae", "attention copied", "attention distilled")


class Bench:
    """One network and random images, for all objectives."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.fast = self.device.type == "cuda"
        self.images = 200 if options.smoke else IMAGES
        self.trunk = {"depth": 2, "width": 48, "heads": 3} if options.smoke else {}
        self.teacher = create_model(options.model, classes=CLASSES, head=HEAD, **self.trunk).save(folder / "teacher")
        rng = np.random.default_rng(0)
        pixels = rng.integers(256, size=(self.images, 32, 32, 3), dtype=np.uint8)
        np.savez(folder / "random.npz", x_train=pixels, y_train=np.arange(self.images) % CLASSES)
        self.stored: DeviceImages | None = None
        self.data: DataSet = open_data(str(folder / "random.npz"))

    def objective(self, name: str) -> Objective:
        config = OBJECTIVES[name]
        if getattr(config, "teacher", "") == TEACHER:
            config = type(config)(**{**vars(config), "teacher": str(self.teacher)})
        head = Branches() if name == "one" else HEAD
        torch.manual_seed(0)
        model = create_model(self.options.model, classes=CLASSES, head=head, **self.trunk)
        train = self.data["train"]
        facts = TrainingFacts(train.labels, train.index, OPTIM.steps or 1, None, self.once)
        return build_objective(config, model, facts).train()

    def once(self) -> Iterator[Batch]:
        """A few training images, for objectives that look at them first."""
        train = self.data["train"]
        for first in range(0, min(len(train), 2000), 500):
            index = torch.from_numpy(train.index[first : first + 500]).to(self.device)
            images = torch.randint(256, (len(index), 3, 32, 32), dtype=torch.uint8, device=self.device)
            yield Batch((images,), index % CLASSES, index % CLASSES, index)

    def loader(self, objective: Objective, start: int, stop: int) -> DeviceLoader:
        train, model = self.data["train"], objective.model
        settings = DataConfig(uri="", augment=recipe("small-byol").data.augment)
        preprocess = Preprocess(model.preprocess)
        return DeviceLoader(
            LoaderSpec(
                train,
                BatchSampler(len(train), self.options.batch, 0),
                Augment(settings.augment, model.preprocess),
                preprocess,
                classes=CLASSES,
                multilabel=False,
                seed=0,
                device=self.device,
                workers=0,
                start=start,
                stop=stop,
                views=view_augments(objective.views, settings.augment, settings.weak, model.preprocess),
            ),
            self.pixels(settings.augment, preprocess),
        )

    def pixels(self, augment: AugmentConfig, preprocess: Preprocess) -> DeviceImages:
        """The images, on the device once for all rows."""
        if self.stored is None:
            self.stored = DeviceImages(self.data["train"], augment, preprocess, device=self.device, workers=0)
        return self.stored

    def row(self, name: str, warm: bool = False) -> dict[str, Any]:
        """Speeds of one objective; `warm`: compile and return."""
        began = time.monotonic()
        objective = self.objective(name)
        passes = passes_per_image(self.objective(name), next(iter(self.loader(objective, 0, 1))))
        optim = DINO_OPTIM if name == "dino" else OPTIM
        step = TrainStep(
            objective,
            optim,
            make_schedule(optim, self.options.batch, self.images),
            device=self.device,
            autocast=torch.bfloat16 if self.fast else None,
            compile=self.fast,
            graph=self.fast,
        )
        held = []
        for batch in self.loader(objective, 0, WARM_UP_STEPS + 2):
            held.append(batch)
            step.feed(batch)
        self.wait()
        warm_up = time.monotonic() - began
        if warm:
            return {}
        steps = 2 if self.options.smoke else STEPS
        began = time.monotonic()
        for number in range(steps):
            step.feed(held[number % len(held)])
        self.wait()
        alone = steps * self.options.batch / (time.monotonic() - began)
        began = time.monotonic()
        for batch in self.loader(objective, WARM_UP_STEPS + 2, WARM_UP_STEPS + 2 + steps):
            step.feed(batch)
        self.wait()
        views = steps * self.options.batch / (time.monotonic() - began)
        return {
            "step": alone,
            "views": views,
            "passes": passes,
            "graph": step.why_no_graph or ("yes" if step.captured else "not captured"),
            "warm_up": warm_up,
        }

    def wait(self) -> None:
        if self.fast:
            torch.cuda.synchronize(self.device)


def passes_per_image(objective: Objective, batch: Batch) -> float:
    """Forward and backward passes of whole images: a forward pass without gradient is a third of one."""
    pixels = [0.0]

    def count(module: nn.Module, given: tuple[Any, ...]) -> None:
        images = given[0]
        pixels[0] += images.shape[0] * images.shape[2] * images.shape[3] * (1 if torch.is_grad_enabled() else 1 / 3)

    first = [m for m in objective.modules() if isinstance(m, nn.Conv2d) and m.in_channels == 3]
    for layer in first:
        layer.register_forward_pre_hook(count)
    objective.before_step(0)
    objective(batch.changed(lambda tensor: tensor.cpu()))
    return pixels[0] / (len(batch) * 32 * 32)


def table(rows: dict[str, dict[str, Any]], batch: int) -> list[str]:
    base = rows.get("moco")
    lines = [f"{'objective':20} {'step':>9} {'views':>9} {'passes':>7} {'of CE':>6} {'of moco':>8}  graph"]
    plain = rows.get("cross entropy")
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"{name:20} {row['error']}")
            continue
        of_moco = row["step"] * row["passes"] / (base["step"] * base["passes"]) if base else float("nan")
        of_plain = row["step"] / plain["step"] if plain else float("nan")
        lines.append(
            f"{name:20} {row['step']:9,.0f} {row['views']:9,.0f} {row['passes']:7.2f} {of_plain:6.2f} {of_moco:8.2f}"
            f"  {row['graph']}"
        )
    return lines


def warm(options: argparse.Namespace, names: list[str]) -> None:
    """Compile every objective, several at a time, into the compiler's cache on disk."""
    command = [sys.executable, __file__, "--model", options.model, "--batch", str(options.batch), "--warm", "--only"]

    def one(name: str) -> None:
        subprocess.run([*command, name], check=False, capture_output=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18_32", help="a model of 32-pixel images")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--only", nargs="+", choices=list(OBJECTIVES))
    parser.add_argument("--jobs", type=int, default=0, help="warm the compiler's cache so many at a time (0: do not)")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.smoke:
        options.model, options.batch, options.device = "vit_tiny_32", 8, "cpu"
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    fitting = [n for n in OBJECTIVES if options.model.startswith(("vit", "deit")) or n not in VIT_ONLY]
    names = options.only or fitting
    if options.jobs and not options.warm:
        warm(options, names)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        for name in names:
            try:
                rows[name] = bench.row(name, options.warm)
            except (RuntimeError, ValueError) as error:
                rows[name] = {"error": str(error).splitlines()[0]}
            torch._dynamo.reset()
            gc.collect()
            print(name, rows[name], file=sys.stderr, flush=True)
    if options.warm:
        return
    text = "\n".join([where(bench.device), f"{options.model}, batch {options.batch}", *table(rows, options.batch)])
    print(text, flush=True)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
