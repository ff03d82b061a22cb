"""Training on a CPU: ours compared with timm's model in a plain PyTorch loop, from files to updated weights.

    python benchmarks/cpu_training.py [--data imagenette] [--threads 2] [--workers 0] [--rounds 7] [--precision auto]
        [--profile] [--smoke]

demo     the recipe `demo`: 28-pixel images in memory, padded crops, a ViT of width 64, batch 50
photos   the recipe `vit` with DeiT-Ti at 112 pixels, batch 32, from JPEG: decode, random resized crop, flip
scratch  the recipe `scratch`, timm's ResNet-26-D, at 112 pixels, batch 32, from JPEG likewise

Equal work on both sides: the same images, augmentation, architecture, label smoothing, drop path, fused AdamW, clipping
of gradients and moving average of the weights, in the same precision (as `vitrail train` chooses it: float32, or bf16
on a CPU with AMX; so `scratch` is without Muon, CutMix and TrivialAugment).
Ours are the parts that `vitrail train` builds, with `--data.loader` as it chooses itself for small images and `host`
for JPEG; the other side is timm's model with a DataLoader of torchvision transforms and timm's ModelEmaV3. Both have
the same threads and worker processes.

training   images/s of the whole loop
loading    of its batches alone (read, decode, augment, collate)
step       of forward, backward and update alone, on one batch

All take turns, so that a slow moment of the machine affects all; figures are medians of rounds, ratios are medians of
the rounds' ratios. `--data` is a folder with train/CLASS/*.jpg, also looked for in the folder that VITRAIL_DATA names;
where there is none, photos are left out. `--profile` prints the operators of either loop that take longest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from rounds import add_to_history, where
from timm.models.vision_transformer import VisionTransformer
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2

from vitrail.config import RunConfig, from_mapping
from vitrail.data.dataset import Split
from vitrail.engine.device import join, keep_freed_memory
from vitrail.engine.run_folder import RunFolder
from vitrail.engine.step import TrainStep
from vitrail.learn.config import SupervisedConfig
from vitrail.measure.speed import quartiles
from vitrail.model.config import TrunkConfig
from vitrail.recipes import recipe
from vitrail.run.run_data import read_data
from vitrail.run.train import Trainer

SETTINGS = ("demo", "photos", "scratch")
LEAST_CALLS = 3
Feed = tuple[Callable[[], Any], Callable[[Any], object]]  # the next batch, and a step on it


@dataclass(frozen=True)
class Setting:
    name: str
    config: RunConfig
    folder: Path | None  # of JPEG; none: images are in memory


class InMemory(Dataset[Any]):
    """Images of a split as arrays, as torchvision's small data sets hold them."""

    def __init__(self, split: Split, transform: v2.Transform) -> None:
        self.images = [np.asarray(split.read(row)) for row in range(len(split))]
        self.labels, self.transform = split.labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> Any:
        return self.transform(Image.fromarray(self.images[row])), self.labels[row]


def settings(options: argparse.Namespace, stack: ExitStack) -> Iterator[Setting]:
    data = {"workers": options.workers, "check": "off"}
    engine = {"device": options.device, "precision": options.precision}
    small: dict[str, Any] = {"trunk": {"depth": 1}} if options.smoke else {}
    if "demo" in options.only:
        config = from_mapping({"data": data, "engine": engine, "model": small}, recipe("demo"))
        yield Setting("demo", config, None)
    if not {"photos", "scratch"} & set(options.only):
        return
    folder = drawn(Path(stack.enter_context(tempfile.TemporaryDirectory()))) if options.smoke else options.data
    if not (folder / "train").is_dir():
        folder = Path(os.environ.get("VITRAIL_DATA", "."), folder)
    if not (folder / "train").is_dir():
        print(f"photos are left out: no folder {folder}/train; name one with --data, or its parent with VITRAIL_DATA")
        return
    augment = {"rand_ops": 0, "trivial": False, "erasing": 0.0, "mixup": 0.0, "cutmix": 0.0}
    data |= {"uri": str(folder), "loader": "host", "batch": 4 if options.smoke else 32, "augment": augment}
    models = {"photos": ("vit", {"name": "deit_tiny", **small}), "scratch": ("scratch", {"name": "timm:resnet26d"})}
    for name, (base, model) in models.items():
        if name in options.only:
            whole = {"data": data, "engine": engine, "model": {"image_size": 112, **model}, "optim": {"name": "adamw"}}
            yield Setting(name, from_mapping(whole, recipe(base)), folder)


def drawn(folder: Path) -> Path:
    """A few pictures in place of photographs."""
    rng = np.random.default_rng(0)
    for number in range(24):
        file = folder / ("train" if number < 16 else "val") / f"class{number % 2}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (128, 128, 3), dtype=np.uint8)).save(file)
    return folder


def our_feed(setting: Setting, stack: ExitStack) -> tuple[Feed, Trainer]:
    """Batches and steps as `vitrail train` makes them."""
    group, config = join(), setting.config
    data, bad = read_data(config, group, quiet=True)
    trainer = Trainer(config, data, bad, group, True, RunFolder(Path(tempfile.gettempdir()) / "never-written"))
    step = TrainStep(
        trainer.objective,
        config.optim,
        trainer.schedule,
        device=trainer.device,
        autocast=trainer.step_precision,
        compile=trainer.compile,
        graph=trainer.device.type == "cuda",
        ema=config.engine.ema,
    )
    batches = iter(stack.enter_context(trainer.module.batches(0, 10**9)))
    return (lambda: next(batches), step.feed), trainer


def timm_model(config: RunConfig, trainer: Trainer) -> nn.Module:
    classes = len(trainer.data.classes)
    if config.model.name.startswith("timm:"):
        built: nn.Module = timm.create_model(config.model.name.removeprefix("timm:"), num_classes=classes)
        return built
    trunk = trainer.model.trunk.config
    assert isinstance(trunk, TrunkConfig)
    return VisionTransformer(
        img_size=trunk.image_size,
        patch_size=trunk.patch,
        embed_dim=trunk.width,
        depth=trunk.depth,
        num_heads=trunk.heads,
        num_classes=classes,
        drop_path_rate=trunk.drop_path,
        act_layer={"relu": nn.ReLU, "gelu": nn.GELU}[trunk.activation],
    )


def timm_feed(setting: Setting, trainer: Trainer) -> Feed:
    """A plain loop over timm's model of the same architecture."""
    config, device, split = setting.config, trainer.device, trainer.data["train"]
    objective = config.objective
    assert isinstance(objective, SupervisedConfig)
    model = timm_model(config, trainer)
    ours = sum(p.numel() for p in trainer.model.parameters())
    assert ours == sum(p.numel() for p in model.parameters()), "the two models differ"
    model.to(device).train()
    average = ModelEmaV3(model, decay=config.engine.ema)
    lr, decay = trainer.schedule.peak, config.optim.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, fused=True)
    transform = transforms(config, trainer)
    images: Dataset[Any] = (
        ImageFolder(setting.folder / "train", transform) if setting.folder else InMemory(split, transform)
    )
    workers = trainer.config.data.workers or 0
    loader = DataLoader(
        images,
        config.data.batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
    )

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for pixels, labels in loader:
                yield pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        pixels, labels = batch
        with torch.autocast(device.type, trainer.step_precision, enabled=trainer.step_precision is not None):
            loss = F.cross_entropy(model(pixels), labels, label_smoothing=objective.smoothing)
        loss.backward()
        if config.optim.clip:
            nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update(model)

    batches = endless()
    return lambda: next(batches), step


def transforms(config: RunConfig, trainer: Trainer) -> v2.Transform:
    """torchvision's transforms that do what our augmentation does, on Pillow images."""
    augment, preprocess = config.data.augment, trainer.model.preprocess
    crop: v2.Transform = v2.RandomCrop(preprocess.size, padding=augment.padding)
    if augment.crop == "resized":
        method = InterpolationMode(preprocess.interpolation)
        crop = v2.RandomResizedCrop(preprocess.size, scale=augment.scale, interpolation=method)
    flips = [v2.RandomHorizontalFlip(augment.flip)] if augment.flip else []
    floats = v2.ToDtype(torch.float32, scale=True)
    return v2.Compose([crop, *flips, v2.PILToTensor(), floats, v2.Normalize(preprocess.mean, preprocess.std)])


def works(feed: Feed) -> dict[str, Callable[[], object]]:
    following, step = feed
    held = following()
    return {"training": lambda: step(following()), "loading": following, "step": lambda: step(held)}


def timed(
    ways: dict[tuple[str, str], Callable[[], object]], batch: int, options: argparse.Namespace, wait: Callable[[], None]
) -> dict[tuple[str, str], list[float]]:
    """Images/s of every way in every round."""
    lead = 3 * options.workers  # uses up what workers prefetched in the turns of others
    counts: dict[tuple[str, str], int] = {}
    for name, work in ways.items():  # warms up; several small batches are augmented together, so many calls are counted
        calls, begin = 0, time.perf_counter()
        while calls < LEAST_CALLS or time.perf_counter() - begin < options.seconds:
            work()
            wait()
            calls += 1
        counts[name] = max(2, round(calls * options.seconds / (time.perf_counter() - begin)))
    speeds: dict[tuple[str, str], list[float]] = {name: [] for name in ways}
    for done in range(options.rounds):
        for name in reversed(list(ways)) if done % 2 else ways:
            for _ in range(lead):
                ways[name]()
            wait()
            begin = time.perf_counter()
            for _ in range(counts[name]):
                ways[name]()
            wait()
            speeds[name].append(counts[name] * batch / (time.perf_counter() - begin))
    return speeds


def setting_rows(setting: Setting, options: argparse.Namespace, stack: ExitStack) -> Iterator[dict[str, Any]]:
    ours, trainer = our_feed(setting, stack)
    feeds = {"ours": ours, "timm": timm_feed(setting, trainer)}
    ways = {(part, who): work for who, feed in feeds.items() for part, work in works(feed).items()}

    def wait() -> None:
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)

    batch = setting.config.data.batch
    speeds = timed(ways, batch, options, wait)
    for part in ("training", "loading", "step"):
        mine, other = speeds[part, "ours"], speeds[part, "timm"]
        low, middle, high = quartiles([a / b for a, b in zip(mine, other, strict=True)])
        yield {
            "setting": setting.name,
            "measured": part,
            "model": setting.config.model.name,
            "batch": batch,
            "loader": trainer.config.data.loader,
            "ours_images_per_second": statistics.median(mine),
            "timm_images_per_second": statistics.median(other),
            "ratio": middle,
            "quartiles": [low, high],
            "fastest": "ours" if middle > 1 else "timm",
        }
    for who in feeds if options.profile else ():
        with torch.profiler.profile() as seen:
            for _ in range(5):
                ways["training", who]()
        print(f"{setting.name}, {who}, 5 steps:\n{seen.key_averages().table('self_cpu_time_total', row_limit=16)}")


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("imagenette"))
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--device", default="cpu")
    precisions = ("auto", "float32", "bf16")
    parser.add_argument("--precision", default="auto", choices=precisions, help="of steps on both sides")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="processes that load, besides the threads")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, help="write rows to this file")
    parser.add_argument("--history", action="store_true", help="append the ratios to benchmarks/history.jsonl")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.threads, options.rounds, options.seconds = 1, 2, 0.01
    torch.set_num_threads(options.threads)
    machine = where(torch.device(options.device))
    print(
        f"{machine}, timm {timm.__version__}, {platform.machine()}, {options.workers} workers, {options.rounds} rounds"
    )
    titles = ("setting", "measured", "batch", "ours_images_per_second", "timm_images_per_second", "ratio", "fastest")
    print(f"| {' | '.join(title.replace('_', ' ') for title in titles)} |\n{'|---' * len(titles)}|", flush=True)
    rows = []
    with ExitStack() as stack:
        for setting in settings(options, stack):
            for row in setting_rows(setting, options, stack):
                rows.append({"machine": machine, **row})
                low, high = row["quartiles"]
                ours, theirs = (f"{row[f'{who}_images_per_second']:.1f}" for who in ("ours", "timm"))
                ratio = f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"
                cells = (row["setting"], row["measured"], str(row["batch"]), ours, theirs, ratio, row["fastest"])
                print(f"| {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if options.history:
        figures = {f"{row['setting']} {row['measured']}, ours / timm": row["ratio"] for row in rows}
        add_to_history("cpu_training.py", machine, figures)


if __name__ == "__main__":
    main()
