"""DeiT-S trained from JPEG files: decoded on the accelerator, by host workers, and compared with no input at all.

    python benchmarks/jpeg.py [--data imagenette] [--images 4096] [--batch 512] [--steps 40] [--rounds 5]
                              [--decoders 3 6] [--smoke]

synthetic   batches that already lie on the device, two host cores
jpeg        `--data.loader jpeg`: decoded, cropped and mirrored on the device, two host cores
host        `--data.loader host`, one worker per core of the machine, at most 16
timm        workers and collation of timm.data.create_loader, as many; their bytes are copied as those of `host`

All feed the same compiled step, in turns; every turn begins with untimed steps that use up what was prefetched between
turns. Figures are medians of rounds, ratios are medians of the rounds' ratios. `--data` is a folder with
train/CLASS/*.jpg, also looked for in the folder that VITRAIL_DATA names. Its first photographs are enlarged to 256
pixels and encoded again (quality 90, 4:2:0): real pictures, but upsampled ones. An index repeats them to 1.28 million
entries, and files are in memory after the first turn, so that decoding and not the disk is compared.

Of `jpeg` also the host's time per batch in each stage. Then decoders alone (nvImageCodec where it is installed), and
how far their pixels are from the host's. `--smoke` runs all of it with a tiny model and drawn pictures, in seconds.
DALI is not compared.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from vitrail.data.augment.host import Augment
from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig
from vitrail.data.dataset import Split
from vitrail.data.decode import decode
from vitrail.data.jpeg import first_bytes, jpeg_decoder, jpeg_header
from vitrail.data.loading.jpeg_loader import AHEAD, DECODERS, Decoder, JpegLoader
from vitrail.data.loading.loader import LoaderSpec, TrainLoader
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.open import open_source
from vitrail.data.preprocess import Preprocess, as_tensor

SIDE, ENTRIES, PREFETCHED = 256, 1_280_000, 2  # PREFETCHED: batches per worker, torch's default
Pair = tuple[float, float]


@dataclass
class Feed:
    """Batches of one way, on so many cores, of which `lead` may be waiting when its turn begins."""

    batches: Iterator[Batch]
    cores: set[int]
    lead: int = 1
    stages: Callable[[], dict[str, float]] | None = None  # milliseconds of the host per batch


def encoded(image: Image.Image, subsampling: int = 2) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90, subsampling=subsampling)
    return stream.getvalue()


def batch_of(images: Sequence[bytes], device: torch.device) -> tuple[NDArray[np.int64], torch.Tensor]:
    """What a decoder is called with, while the images live. Raises `ValueError` where one cannot be decoded there."""
    rows = []
    for number, data in enumerate(images):
        if (header := jpeg_header(data)) is None:
            raise ValueError(f"image {number} is not decoded on {device}; choose baseline JPEG in colour")
        rows.append((np.frombuffer(data, np.uint8).ctypes.data, len(data), *header))
    table = np.array(rows)
    return table, torch.empty(int(first_bytes(table[:, 2:])[-1]), dtype=torch.uint8, device=device)


def pixel_difference(images: Sequence[bytes], device: torch.device) -> Pair:
    """Mean and 99.9th percentile of absolute differences between bytes decoded by the host and on a device.

    Of 255, on an H200 (hardware decoder, torchvision 0.26): 0.000 and 0 for 4:4:4, 0.381 and 9 for 4:2:0. Raises
    `ValueError` where the device decodes one of the images not at all.
    """
    table, pixels = batch_of(images, device)
    if rejected := jpeg_decoder(device)(table, pixels):
        raise ValueError(f"image {rejected[0]} is not decoded on {device}; choose baseline JPEG in colour")
    host = torch.cat([as_tensor(np.asarray(decode(data, str(n)))).flatten() for n, data in enumerate(images)])
    values = (host.to(torch.int16) - pixels.cpu().to(torch.int16)).abs().numpy()
    return float(values.mean()), float(np.quantile(values, 0.999))


class TimedLoader(JpegLoader):
    """Keeps how long a batch takes the host in each stage, without the wait for an earlier batch to be used up."""

    def __init__(self, spec: LoaderSpec) -> None:
        super().__init__(spec)
        self.seconds: dict[str, list[float]] = {"decode call": [], "decode stage": [], "augment stage": []}

    def _timed(self, stage: str, work: Callable[..., Any], *given: Any) -> Any:
        begin = time.perf_counter()
        done = work(*given)
        self.seconds[stage].append(time.perf_counter() - begin)
        return done

    def _decoder(self) -> Decoder:
        decoder, stream = super()._decoder()
        return partial(self._timed, "decode call", decoder), stream

    def _decoded(self, decoder: Decoder, indices: Any, used: torch.cuda.Event | None) -> Any:
        if used is not None:
            used.synchronize()
        return self._timed("decode stage", super()._decoded, decoder, indices, None)

    def _augmented(self, decoded: Any) -> Any:
        decoded.result()
        return self._timed("augment stage", super()._augmented, decoded)

    def stages(self) -> dict[str, float]:
        """Medians in milliseconds; batches are in the first stage several at a time."""
        call, whole, augment = (1e3 * statistics.median(values) for values in self.seconds.values())
        return {"decode call": call, "rest of the decode stage": whole - call, "augment stage": augment}


def on_cores(cores: set[int]) -> None:
    """All threads of this process; what is started later inherits it."""
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def pictures(data: Path | None, count: int) -> list[Image.Image]:
    """Photographs, or drawn pictures."""
    if data is None:
        rng = np.random.default_rng(0)
        return [Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)) for _ in range(count)]
    files = sorted((data / "train").glob("*/*.jpg"), key=lambda file: file.name)[:count]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda file: Image.open(file).convert("RGB"), files))


def written(images: list[Image.Image], folder: Path, side: int) -> Split:
    def write(number: int) -> None:
        file = folder / f"class{number % 10}" / f"{number:06d}.jpg"
        file.write_bytes(encoded(images[number].resize((side, side), Image.Resampling.BICUBIC)))

    for number in range(10):
        (folder / f"class{number}").mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(len(images))))
    return open_source(str(folder))["all"]


class Repeated(Dataset[Any]):
    """timm's data set, again and again; its transform is set by create_loader."""

    def __init__(self, folder: Path, entries: int) -> None:
        from timm.data import create_dataset

        self.inner, self.entries = create_dataset("", root=str(folder)), entries

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "transform":
            self.inner.transform = value
        object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return self.entries

    def __getitem__(self, number: int) -> Any:
        return self.inner[number % len(self.inner)]


def timm_batches(folder: Path, entries: int, batch: int, workers: int, device: torch.device) -> Iterator[Batch]:
    from timm.data import create_loader

    loader = create_loader(
        Repeated(folder, entries),
        (3, 224, 224),
        batch,
        is_training=True,
        num_workers=workers,
        interpolation="bicubic",
        color_jitter=None,
        use_prefetcher=True,
        pin_memory=device.type == "cuda",
        device=torch.device("cpu"),
        persistent_workers=workers > 0,
    )
    for images, labels in loader.loader:
        pixels, classes = (tensor.to(device, non_blocking=True) for tensor in (images, labels))
        yield Batch((pixels,), classes, classes, classes)


def training(options: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    from vitrail.engine.config import OptimConfig
    from vitrail.engine.optimizer import make_schedule
    from vitrail.engine.step import TrainStep
    from vitrail.learn.config import SupervisedConfig
    from vitrail.learn.supervised import Supervised
    from vitrail.model.build import create_model

    fast = device.type == "cuda"
    torch.set_float32_matmul_precision("high" if fast else "highest")
    small = {"depth": 1, "width": 48, "heads": 3} if options.smoke else {}
    model = create_model("deit_small", classes=10, **small)
    optim = OptimConfig(lr=1e-4, clip=0.0)
    schedule = make_schedule(optim, options.batch, 50_000)
    objective = Supervised(model, SupervisedConfig())
    autocast = torch.bfloat16 if fast else None
    return model, TrainStep(objective, optim, schedule, device=device, autocast=autocast, compile=fast, graph=fast)


def synthetic(batch: int, device: torch.device) -> Iterator[Batch]:
    held = []
    for _ in range(4):
        images = torch.randint(256, (batch, 3, 224, 224), dtype=torch.uint8, device=device)
        labels = torch.randint(10, (batch,), device=device)
        held.append(Batch((images,), labels, labels, torch.arange(batch, device=device)))
    while True:
        yield from held


def timed(feeds: dict[str, Feed], step: Any, options: argparse.Namespace, wait: Callable[[], None]) -> dict[str, Any]:
    """Images/s of every way in every round."""
    speeds: dict[str, list[float]] = {name: [] for name in feeds}
    for done in range(options.rounds):
        for name in reversed(list(feeds)) if done % 2 else feeds:
            feed = feeds[name]
            on_cores(feed.cores)
            for _ in range(feed.lead):
                step.feed(next(feed.batches))
            wait()
            begin = time.perf_counter()
            for _ in range(options.steps):
                step.feed(next(feed.batches))
            wait()
            speeds[name].append(options.steps * options.batch / (time.perf_counter() - begin))
        print(f"  round {done + 1}: " + ", ".join(f"{n} {s[-1]:.0f}" for n, s in speeds.items()), flush=True)
    return speeds


def decoder_rows(images: list[bytes], device: torch.device, rounds: int, wait: Callable[[], None]) -> dict[str, float]:
    """Images/s of decoders alone."""
    given, ours = batch_of(images, device), jpeg_decoder(device)
    ways: dict[str, Callable[[], object]] = {"decode only, jpeg": lambda: ours(*given)}
    try:
        from nvidia import nvimgcodec

        decoder = nvimgcodec.Decoder()
        ways["decode only, nvImageCodec"] = lambda: decoder.decode(images)
    except Exception as error:  # not installed, or no device that it knows
        print(f"nvImageCodec is not compared: {error}")
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for done in range(rounds + 1):
        for name, work in ways.items():
            begin = time.perf_counter()
            work()
            wait()
            if done:
                speeds[name].append(len(images) / (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in speeds.items()}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("imagenette"))
    parser.add_argument("--images", type=int, default=4096, help="different photographs")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40, help="timed steps per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, help="of host and timm (none: one per core, at most 16)")
    parser.add_argument("--only", nargs="+", default=["host", "timm", "jpeg"], help="compared with synthetic")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write rows to this file")
    parser.add_argument("--history", action="store_true", help="append the figures to benchmarks/history.jsonl")
    parser.add_argument("--decoders", type=int, nargs="+", default=[DECODERS], help="batches decoded at the same time")
    parser.add_argument("--cores", type=int, nargs="+", default=[2], help="host cores of the JPEG loader")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.images, options.batch, options.steps, options.rounds, options.workers = 16, 4, 2, 2, 1
        options.data = None
    elif not (options.data / "train").is_dir():
        options.data = Path(os.environ.get("VITRAIL_DATA", "."), options.data)
        if not (options.data / "train").is_dir():
            parser.error(f"no folder {options.data}/train; name one with --data, or its parent with VITRAIL_DATA")
    if options.workers is None:
        options.workers = min(16, len(os.sched_getaffinity(0)))
    return options


def all_feeds(options: argparse.Namespace, split: Split, spec: LoaderSpec, stack: ExitStack) -> dict[str, Feed]:
    """The ways to compare; those with worker processes come first, since they should not fork beside busy threads."""
    every, device = os.sched_getaffinity(0), torch.device(spec.device)
    two = set(sorted(every)[:2])
    feeds = {"synthetic": Feed(synthetic(options.batch, device), two)}
    if "host" in options.only:
        feeds["host"] = Feed(iter(stack.enter_context(TrainLoader(spec))), every, PREFETCHED * options.workers + 2)
    if "timm" in options.only:
        folder = Path(split.reader.root)  # type: ignore[attr-defined]
        theirs = timm_batches(folder, len(spec.split), options.batch, options.workers, device)
        feeds["timm"] = Feed(theirs, every, PREFETCHED * options.workers + 2)
    if "jpeg" in options.only:
        for count, cores in itertools.product(options.decoders, options.cores):
            loader = stack.enter_context(TimedLoader(spec))
            loader.decoders = count
            for row in range(len(split)):
                loader.encoded.get(row)  # as after an epoch
            name = "jpeg" + f", {count} decoders" * (count != DECODERS) + f", {cores} cores" * (cores != 2)
            feeds[name] = Feed(iter(loader), set(sorted(every)[:cores]), AHEAD * count + 1, loader.stages)
    return feeds


def training_rows(speeds: dict[str, list[float]], feeds: dict[str, Feed]) -> Iterator[dict[str, Any]]:
    for name, rounds in speeds.items():
        ratios = [a / b for a, b in zip(rounds, speeds["synthetic"], strict=True)]
        low, ratio, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
        cores, speed = len(feeds[name].cores), statistics.median(rounds)
        print(
            f"{name:<18} {cores:>3} cores {speed:>9.0f} images/s {ratio:>7.3f} of synthetic ({low:.3f} .. {high:.3f})"
        )
        row = {
            "way": name,
            "cores": cores,
            "images_per_second": speed,
            "of_synthetic": ratio,
            "quartiles": [low, high],
        }
        if (stages := feeds[name].stages) is not None:
            row["milliseconds"] = stages()
            print("  of the host per batch: " + ", ".join(f"{n} {ms:.1f} ms" for n, ms in stages().items()))
        yield row


def main() -> None:
    from rounds import add_to_history, where

    options = parsed()
    device, every = torch.device(options.device), os.sched_getaffinity(0)
    side, entries = (64, 200) if options.smoke else (SIDE, ENTRIES)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with ExitStack() as stack:
        images = pictures(options.data, options.images)
        split = written(images, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "photographs", side)
        model, step = training(options, device)
        spec = LoaderSpec(
            split.take(np.resize(np.arange(len(split)), entries)),
            BatchSampler(entries, options.batch, 0),
            Augment(AugmentConfig(), model.preprocess),
            Preprocess(model.preprocess),
            classes=10,
            seed=0,
            device=device,
            stop=10**9,
            workers=options.workers,
        )
        files = [split.reader.path(int(i)).read_bytes() for i in split.index[:512]]  # type: ignore[attr-defined]
        size = f"{statistics.mean(map(len, files)) / 1000:.1f} kB"
        print(f"{where(device)}, {len(every)} cores, {len(split)} photographs at {side} px ({size}), {entries} entries")
        print(f"batch {options.batch}, {options.steps} steps, {options.rounds} rounds, {options.workers} workers")
        feeds = all_feeds(options, split, spec, stack)
        for _ in range(12 if device.type == "cuda" else 1):  # compiles and captures
            step.feed(next(feeds["synthetic"].batches))
        rows = list(training_rows(timed(feeds, step, options, wait), feeds))
        on_cores(feeds["synthetic"].cores)
        for name, speed in decoder_rows(files, device, options.rounds, wait).items():
            rows.append({"way": name, "cores": 2, "images_per_second": speed})
            print(f"{name:<28} {speed:>9.0f} images/s")
        for title, subsampling in (("4:4:4", 0), ("4:2:0", 2)):
            large = [
                encoded(image.resize((side, side), Image.Resampling.BICUBIC), subsampling) for image in images[:64]
            ]
            mean, most = pixel_difference(large, device)
            rows.append({"way": f"pixels {title}", "mean": mean, "p99_9": most})
            print(f"pixels {title}: mean difference {mean:.3f}, 99.9th percentile {most:.1f}")
        on_cores(every)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if options.history:
        figures = {title(row): row["images_per_second"] for row in rows if "images_per_second" in row}
        add_to_history("jpeg.py", where(device), figures)


def title(row: dict[str, Any]) -> str:
    """The name of a figure in the history.

    >>> title({"way": "jpeg", "cores": 2, "of_synthetic": 0.7}), title({"way": "synthetic", "cores": 2})
    ('jpeg, two cores, images/s', 'synthetic, images/s')
    >>> title({"way": "jpeg, 4 cores", "cores": 4, "of_synthetic": 0.7})
    'jpeg, 4 cores, images/s'
    """
    fed = "of_synthetic" in row and row["way"] != "synthetic"
    way = row["way"].removesuffix(f", {row['cores']} cores") if fed else row["way"]
    return f"{way}, {'two' if row['cores'] == 2 else row['cores']} cores, images/s" if fed else f"{way}, images/s"


if __name__ == "__main__":
    main()
