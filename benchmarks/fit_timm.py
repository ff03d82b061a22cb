"""`vitrail fit` compared with a plain timm script: the timm networks that meet the budget, trained in the same minutes.

    python benchmarks/fit_timm.py FIT_FOLDER --data DATA --minutes M [--largest] [--models resnet18:32 ...] [--json]

As a practitioner would write it, with nothing of vitrail's training: `timm.create_model` for every timm candidate that
met the budget of the search (`--largest`: of every architecture with its largest such image only), the minutes shared
equally; AdamW of `timm.optim.create_optimizer_v2`, timm's cosine schedule with warm-up, `timm.data.create_transform`
with RandAugment, `timm.data.Mixup`, channels-last, and bfloat16 where vitrail would use it. Weights are random, as with
`--weights none`. The best on val is evaluated once on test. vitrail gives the rows of train, val and test, and what a
network costs.

In favour of timm: images are decoded once, before the clock starts, and kept in memory as uint8 at their stored size;
workers apply the transforms. The clock of a network starts with its first batch; evaluation does not count. The cosine
follows the clock, so that it always ends. A network that met the budget in int8 is evaluated in float32.
For small images the search has no timm candidates; name some as NAME:SIZE, and those over the budget are left out.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from fit_grid import FinishedFit, correct_of_fit, difference, print_rows, read_fit, row_of_fit
from PIL import Image
from timm.data import Mixup, create_transform
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vitrail.data.dataset import DataSet, Split
from vitrail.data.open import open_data
from vitrail.engine.device import choose_precision, training_precision
from vitrail.fit.candidates import Candidate, Measured, measure
from vitrail.fit.pictures import Pictures

TICKS = 10_000  # of the schedule, over the time of a network


class DecodedImages(Dataset):
    """Images of a split, decoded into memory, with a transform."""

    def __init__(self, rows: Split) -> None:
        self.pixels = [np.asarray(rows.read(row)) for row in range(len(rows))]  # [height, width, 3] uint8
        self.labels = rows.labels.tolist()
        self.transform: Any = None

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[row])), self.labels[row]


def named(text: str) -> Candidate:
    """The candidate that NAME:SIZE names. Raises `ValueError` for other texts.

    >>> named("resnet18:32").name
    'resnet18-32'
    """
    name, _, size = text.rpartition(":")
    if not name or not size.isdigit():
        raise ValueError(f"--models: {text!r}; use NAME:SIZE, as in resnet18:32")
    return Candidate(f"timm:{name.removeprefix('timm:')}", int(size))


def networks(fit: FinishedFit, data: DataSet, models: list[str], largest: bool) -> list[Measured]:
    """timm networks within the budget. Raises `ValueError` where there are none."""
    costs = [m for m in fit.feasible if m.candidate.model.startswith("timm:") and not m.candidate.settings]
    for text in models:
        found = measure(named(text), data.classes, fit.budget, Pictures(data["train"], []), fit.folder)
        within = [m for m in found if m.meets(fit.budget)]
        costs += within[:1]
        if not within:
            print(f"{text} is left out: {found[0].reason or f'{1e3 * (found[0].latency or 0):.3g} ms'}")
    if largest:
        by_size = sorted(costs, key=lambda m: m.candidate.size)
        costs = list({m.candidate.model: m for m in by_size}.values())
    if not costs:
        raise ValueError(f"no timm network meets {fit.budget.text}; name some with --models NAME:SIZE")
    return costs


def train(network: Measured, images: DecodedImages, classes: int, seconds: float, asked: Any) -> tuple[nn.Module, int]:
    """A network trained for so many seconds, and its number of steps."""
    candidate, device = network.candidate, torch.device(asked.device)
    torch.manual_seed(asked.seed)
    model = timm.create_model(candidate.model.removeprefix("timm:"), num_classes=classes, **_sized(candidate))
    model = model.to(device, memory_format=torch.channels_last)
    images.transform = create_transform(
        candidate.size, is_training=True, auto_augment=asked.augment or None, scale=(asked.scale, 1.0), re_prob=0.0
    )
    loader = DataLoader(
        images, asked.batch, shuffle=True, drop_last=True, num_workers=asked.workers, pin_memory=device.type == "cuda"
    )
    mixup = Mixup(asked.mixup, asked.cutmix, label_smoothing=asked.smoothing, num_classes=classes)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=asked.lr, weight_decay=0.05)
    schedule = CosineLRScheduler(optimizer, TICKS, warmup_t=TICKS // 20, warmup_lr_init=1e-6, t_in_epochs=False)
    loss_of, spent, steps, began = SoftTargetCrossEntropy(), 0.0, 0, 0.0
    model.train()
    while spent < seconds:
        for inputs, labels in loader:
            began = began or time.perf_counter()
            spent = time.perf_counter() - began
            if spent >= seconds and steps:
                break
            schedule.step_update(min(TICKS - 1, int(TICKS * spent / seconds)))
            mixed, target = mixup(inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True))
            with _autocast(device, training_precision("auto", device, model)):
                loss = loss_of(model(mixed.contiguous(memory_format=torch.channels_last)).float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
    return model, steps


def _sized(candidate: Candidate) -> dict[str, Any]:
    """`img_size` for networks that need it: their tokens have positions."""
    takes = timm.models.model_entrypoint(candidate.model.removeprefix("timm:")).__module__.rpartition(".")[2]
    return {"img_size": candidate.size} if takes in ("vision_transformer", "deit", "cait", "xcit") else {}


def _autocast(device: torch.device, precision: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, precision, enabled=precision is not None)


@torch.inference_mode()
def correct(model: nn.Module, images: DecodedImages, size: int, asked: Any) -> list[bool]:
    """Whether the network is right, for every image."""
    device = torch.device(asked.device)
    images.transform = create_transform(size, is_training=False, crop_pct=1.0 if size <= 64 else 0.95)
    model.eval()
    right: list[bool] = []
    for inputs, labels in DataLoader(images, 256, num_workers=asked.workers):
        with _autocast(device, choose_precision("auto", device)):
            guess = model(inputs.to(device, memory_format=torch.channels_last)).argmax(1).cpu()
        right += (guess == labels).tolist()
    return right


def compared(fit: FinishedFit, asked: Any) -> dict[str, Any]:
    """Train all networks, evaluate the best on val, compare with the search."""
    data = open_data(asked.data)  # val is held out as in the runs of the search, whose settings are the defaults
    costs = networks(fit, data, asked.models, asked.largest)
    splits = {name: DecodedImages(data[name]) for name in ("train", "val")}
    asked.batch = min(asked.batch, len(splits["train"])) // 2 * 2  # Mixup pairs images
    seconds, trials, best = 60 * asked.minutes / len(costs), [], (-1.0, None, costs[0])
    for network in costs:
        began = time.perf_counter()
        model, steps = train(network, splits["train"], len(data.classes), seconds, asked)
        took, epochs = time.perf_counter() - began, steps * asked.batch / len(splits["train"])
        value = float(np.mean(correct(model, splits["val"], network.candidate.size, asked)))
        trials.append({"name": network.candidate.name, "val": value, "epochs": epochs, "wall": took})
        if not asked.json:
            print(f"{network.candidate.name}: val {100 * value:.2f} %, {epochs:.3g} epochs in {seconds:.3g} s")
        if value > best[0]:
            best = value, model.cpu(), network
        del model
    value, model, network = best
    assert model is not None
    split = fit.result["split"]
    rows = splits["val"] if split == "val" else DecodedImages(data[split])
    theirs = correct(model.to(asked.device), rows, network.candidate.size, asked)
    ours = correct_of_fit(fit, asked.data)
    plain = {"method": "timm", "chosen": network.candidate.name, "val": value, "test": float(np.mean(theirs))}
    plain |= {"images": len(theirs), "seconds": 60 * asked.minutes, "trained": len(costs)}
    table = [row_of_fit(fit, ours), plain]
    gap = {**difference(ours, theirs), "ratio": table[0]["seconds"] / table[1]["seconds"]}
    return {"split": split, "seconds_each": seconds, "rows": table, "difference": gap, "trials": trials}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fit", metavar="FIT_FOLDER", type=Path)
    parser.add_argument("--data", required=True, help="as the search was given it")
    parser.add_argument("--minutes", type=float, required=True, help="of training, all networks together")
    parser.add_argument("--models", nargs="+", default=[], metavar="NAME:SIZE", help="more timm networks")
    parser.add_argument("--largest", action="store_true", help="of every architecture the largest image that fits")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--augment", default="rand-m7-mstd0.5-inc1", help="RandAugment; empty: none")
    parser.add_argument("--scale", type=float, default=0.35, help="smallest area of a random crop")
    parser.add_argument("--mixup", type=float, default=0.2)
    parser.add_argument("--cutmix", type=float, default=0.0)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.minutes <= 0:
        parser.error("--minutes must be above 0")
    result = compared(read_fit(asked.fit), asked)
    if asked.json:
        print(json.dumps(result))
        return
    print_rows(result["rows"], result["difference"], result["split"], [])


if __name__ == "__main__":
    main()
