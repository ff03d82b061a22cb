"""How fast images reach the model: a plain torchvision pipeline, our loader on the same JPEGs, and on a packed set.

    python benchmarks/loader.py [--data imagenette] [--images 2048] [--rounds 5] [--workers 0 2]

`--data` is a folder with train/CLASS/*.jpg, also looked for in the folder that VITRAIL_DATA names. It is packed (images
as they are) into a temporary folder first; what that takes is printed.

read            bytes of an image become pixels in a uint8 batch, nothing else
read, augment   random resized crop to 112 pixels, mirror, normalised float batch: what a training step receives

All ways read the same images, at random, in batches of 128; files are in the page cache after the first round, so that
decoding and not the disk is compared. Workers stay alive between rounds. Rounds are interleaved; figures are medians,
ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounds import in_turns, where
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from vitrail.data.augment.host import Augment
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.dataset import Split
from vitrail.data.loading.loader import LoaderSpec, TrainLoader
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.open import open_data, open_source
from vitrail.data.pack import pack
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.packed import PackedReader

BATCH = 128
SIZE = 112
CONFIG = PreprocessConfig(size=SIZE, interpolation="bilinear")


class Pixels(Dataset[torch.Tensor]):
    """Rows in, their pixels out as a uint8 batch [rows, height, width, 3]; images must have one size."""

    def __init__(self, split: Split, mapped: bool = False) -> None:
        self.split, self.mapped = split, mapped

    def __getitem__(self, rows: list[int]) -> torch.Tensor:
        reader = self.split.reader
        if self.mapped:
            assert isinstance(reader, PackedReader)
            return torch.from_numpy(np.stack([reader.pixels(int(self.split.index[row])) for row in rows]))
        return torch.from_numpy(np.stack([np.asarray(self.split.read(row)) for row in rows]))


def torchvision_way(folder: Path, rows: list[int], workers: int, augment: bool) -> Iterator[Any]:
    changes: list[v2.Transform] = [v2.PILToTensor()]
    if augment:
        # On Pillow images, which is the quicker back-end here; antialiasing is Pillow's own.
        normalize = v2.Normalize(CONFIG.mean, CONFIG.std)
        changes = [
            v2.RandomResizedCrop(SIZE),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            normalize,
        ]
    images = Subset(ImageFolder(folder, v2.Compose(changes)), rows)
    return DataLoader(images, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)  # type: ignore[return-value]


def read_way(split: Split, rows: list[int], workers: int, mapped: bool) -> Iterator[Any]:
    batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    return DataLoader(  # type: ignore[return-value]
        Pixels(split, mapped), batch_size=None, sampler=batches, num_workers=workers, persistent_workers=workers > 0
    )


def augment_way(split: Split, rows: list[int], workers: int) -> TrainLoader:
    part = split.take(rows)
    return TrainLoader(
        LoaderSpec(
            part,
            BatchSampler(len(part), BATCH, 0),
            Augment(AugmentConfig(), CONFIG),
            Preprocess(CONFIG),
            classes=int(split.labels.max()) + 1,
            multilabel=False,
            seed=0,
            device="cpu",
            workers=workers,
            start=0,
            stop=len(rows) // BATCH,
        )
    )


def passed(loader: Any) -> Callable[[], None]:
    def once() -> None:
        for _ in loader:
            pass

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("imagenette"))
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    asked = parser.parse_args()
    data = asked.data if asked.data.exists() else Path(os.environ.get("VITRAIL_DATA", "."), asked.data)
    if not (data / "train").is_dir():
        parser.error(f"no folder {data}/train; name one with --data, or its parent with VITRAIL_DATA")
    torch.set_num_threads(1)  # as in a worker: the cores belong to the workers
    cpu = torch.device("cpu")
    with ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "packed"
        source = open_source(str(data))
        began = time.perf_counter()
        made = pack(source, out, size=0)
        took = time.perf_counter() - began
        jpegs, packed = (open_data(uri)["train"] for uri in (data, out))
        count = min(asked.images, len(jpegs)) // BATCH * BATCH
        rows = np.random.default_rng(0).permutation(len(jpegs))[:count].tolist()
        print(f"{where(cpu)}, {len(os.sched_getaffinity(0))} cores, {count} images a round, {asked.rounds} rounds")
        print(f"packing: {made.images} images, {made.bytes / 1e6:.0f} MB, {made.images / took:.0f} img/s, once")
        print(f"{'':<46} {'workers':>7} {'img/s':>8} {'x our JPEG':>11} {'x torchvision':>14} {'quartiles':>15}")
        for workers in asked.workers:
            for title, ways in (
                (
                    "read",
                    {
                        "torchvision, JPEG": torchvision_way(data / "train", rows, workers, augment=False),
                        "vitrail, JPEG": read_way(jpegs, rows, workers, mapped=False),
                        "vitrail, packed (Pillow images)": read_way(packed, rows, workers, mapped=False),
                        "vitrail, packed (mapped arrays)": read_way(packed, rows, workers, mapped=True),
                    },
                ),
                (
                    "read, augment",
                    {
                        "torchvision, JPEG": torchvision_way(data / "train", rows, workers, augment=True),
                        "vitrail, JPEG": stack.enter_context(augment_way(jpegs, rows, workers)),
                        "vitrail, packed": stack.enter_context(augment_way(packed, rows, workers)),
                    },
                ),
            ):
                timed = in_turns({name: passed(loader) for name, loader in ways.items()}, cpu, asked.rounds)
                for name in ways:
                    middle, low, high = timed.ratio("torchvision, JPEG", name)
                    own, _, _ = timed.ratio("vitrail, JPEG", name)
                    label, speed = f"{title:<14} {name}", count / timed.median(name)
                    ratios = f"{own:>11.2f} {middle:>14.2f} {low:>7.2f} .. {high:.2f}"
                    print(f"{label:<46} {workers:>7} {speed:>8.0f} {ratios}", flush=True)


if __name__ == "__main__":
    main()
