"""Generation jobs: images planned by source and target class, generated batch by batch (GeNIe, arXiv 2312.02548).

A plan is a table of whole numbers: it can be stored, inspected, and carried out in any order. Everything in it follows
from a seed and from the sources of each row, so a part of a plan generates the same images as the whole. Each image is
a file of its own, so that a kill loses one batch at most.

OUT/plan.json         the job
OUT/made/000012.png   sample 12 of the plan; its record (source, method, noise, seed) is in the file itself
OUT/manifest.jsonl    the records of all, when all are there
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from vitrail.data.counter import seed_of
from vitrail.engine.progress import Progress
from vitrail.files import json_text, parse_json, replacing, write_text
from vitrail.generate.generation_methods import OF_ITS_OWN, OF_NOTHING, Request, Samples, Tools, generate

PLAN, MANIFEST, MADE = "plan.json", "manifest.jsonl", "made"
COLUMNS = ("source", "own", "target", "seeds")
RECORD = "vitrail"  # name of the text in a PNG

Policy = Literal["all", "random", "confused"]
Ints = NDArray[np.int64]
ReadImage = Callable[[int], NDArray[np.uint8]]  # row of the training split -> image [side, side, 3]


@dataclass(frozen=True, eq=False)
class Plan:
    """Images to be generated, one per row. Images are given as rows of the training split."""

    source: Ints  # [rows] an image of another class
    own: Ints  # [rows] an image of the target class
    target: Ints  # [rows] class
    seeds: Ints  # [rows]

    def __len__(self) -> int:
        return len(self.target)

    def counts(self, classes: int) -> Ints:
        """Images for each class."""
        return np.bincount(self.target, minlength=classes).astype(np.int64)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name).tolist() for name in COLUMNS}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Plan:
        """Raises `ValueError` for what is no plan."""
        try:
            columns = [np.asarray(values[name], np.int64) for name in COLUMNS]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no plan of images to be made ({type(error).__name__}: {error})") from None
        if len({column.shape for column in columns}) != 1 or columns[0].ndim != 1:
            raise ValueError("this is no plan of images to be made: its columns have different lengths")
        return cls(*columns)


def make_plan(
    labels: Ints,
    classes: Sequence[str],
    *,
    each: int | None = None,
    up_to: int | None = None,
    below: int | None = None,
    only: Sequence[int] | None = None,
    policy: Policy = "all",
    confusion: Ints | None = None,
    top: int = 4,
    seed: int = 0,
) -> Plan:
    """A plan for a training split with `labels` [images].

    `each` new images per class, or as many as bring it `up_to` so many; only for classes with fewer than `below` images
    (none: all), or for those named by `only`. Sources: images of `all` other classes in turn, of other classes drawn at
    `random`, or of the `top` classes that `confusion` [true, predicted] confuses with the target most, in either
    direction. Raises `ValueError` where nothing is left to do, or nothing can be generated.
    """
    counts = np.bincount(labels, minlength=len(classes))
    if (each is None) == (up_to is None):
        raise ValueError("say how many images: each (new ones per class) or up_to (in all)")
    wanted = _wanted(counts, each, up_to, below, only)
    if not wanted.any():
        raise ValueError("the plan is empty: no class needs images; raise each, up_to or below")
    empty = [classes[c] for c in np.flatnonzero(wanted).tolist() if not counts[c]]
    if empty:
        raise ValueError(f"class {empty[0]} has no training image; every class that gets new ones needs one")
    if policy not in get_args(Policy):
        raise ValueError(f"no policy {policy!r}; there are {', '.join(get_args(Policy))}")
    if policy == "confused" and (confusion is None or confusion.shape != (len(classes), len(classes))):
        raise ValueError(f"the policy confused needs a confusion matrix of {len(classes)} classes")
    members = [np.flatnonzero(labels == c) for c in range(len(classes))]
    rows: list[tuple[int, int, int, int]] = []
    for target in np.flatnonzero(wanted).tolist():
        others = [c for c in range(len(classes)) if c != target and len(members[c])]
        if policy == "confused":
            assert confusion is not None
            confused = confusion[target] + confusion[:, target]
            others = sorted(others, key=lambda c: (-int(confused[c]), c))[:top]
        if not others:
            raise ValueError(f"class {classes[target]} has no other class to be made from")
        for number in range(int(wanted[target])):
            pool = members[others[number % len(others)]]  # classes in turn, an image of each drawn by seed
            if policy == "random":
                pool = np.concatenate([members[c] for c in others])
            draw = seed_of("augment", seed, target, number, 0 if policy == "random" else 1)
            source = int(pool[draw % len(pool)])
            own = int(members[target][number % len(members[target])])
            rows.append((source, own, target, seed_of("genie", seed, source, target, number) >> 1))
    return Plan(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))


def _wanted(counts: Ints, each: int | None, up_to: int | None, below: int | None, only: Sequence[int] | None) -> Ints:
    """New images of each class."""
    for name, value in (("each", each), ("up_to", up_to), ("below", below)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is a number of images and must be at least 1, not {value}")
    wanted = np.full(len(counts), each) if each is not None else np.maximum(0, int(up_to or 0) - counts)
    if below is not None:
        wanted = np.where(counts < below, wanted, 0)
    if only is not None:
        wanted = np.where(np.isin(np.arange(len(counts)), list(only)), wanted, 0)
    return np.asarray(wanted, np.int64)


@dataclass(frozen=True)
class GenerationJob:
    """A plan, and how it is carried out."""

    plan: Plan
    method: str
    model: str  # that generates, in words
    data: str
    classes: tuple[str, ...]
    prompts: tuple[str, ...]  # empty where the model takes classes by number
    r: float
    seed: int
    r_schedule: str | None = None  # on which r is stated (none: that of the model)

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("method", "model", "data", "r", "seed")}
        values |= {"r_schedule": self.r_schedule} if self.r_schedule else {}  # older plans have none
        return {**values, "classes": list(self.classes), "prompts": list(self.prompts), "plan": self.plan.to_json()}


def store_plan(folder: Path, job: GenerationJob) -> None:
    """Write the plan into `folder`, or make sure that the one there is the same.

    Raises `ValueError` where the folder holds images of another job.
    """
    text = json_text(job.to_json())
    path = folder / PLAN
    if path.is_file():
        if parse_json(path.read_text(encoding="utf-8")) != json.loads(text):
            raise ValueError(f"{folder} holds images of another plan; continue that one, or name another folder")
        return
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no plan; name another folder")
    write_text(path, text)


def run_job(
    folder: Path, job: GenerationJob, read: ReadImage, labels: Ints, tools: Tools, progress: Progress, batch: int = 64
) -> int:
    """Generate what is missing; returns how many images are new.

    Batches are those of the plan whatever is missing, so that an image is the same bits however often the job was
    interrupted.
    """
    new = 0
    for first in range(0, len(job.plan), batch):
        numbers = range(first, min(first + batch, len(job.plan)))
        missing = [n for n in numbers if not image_path(folder, n).is_file()]
        if missing:
            samples = generate(job.method, _request(job, numbers, read, labels), tools)
            for n in missing:
                _write(image_path(folder, n), samples, n - first, _record(job, n, samples, n - first, labels))
            new += len(missing)
        progress.advance(len(numbers))
    return new


def write_manifest(folder: Path, count: int) -> list[dict[str, Any]]:
    """The records of all images, read from their files and written next to them."""
    records = [read_record(image_path(folder, n)) for n in range(count)]
    write_text(folder / MANIFEST, "".join(json_text(record) + "\n" for record in records))
    return records


def image_path(folder: Path, number: int) -> Path:
    return folder / MADE / f"{number:06d}.png"


def read_record(path: Path) -> dict[str, Any]:
    """The record in a generated image. Raises `ValueError` for a file without one."""
    try:
        with Image.open(path) as image:
            record: dict[str, Any] = parse_json(image.info[RECORD])
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged or was not made here; delete it and run the same command again") from error
    return record


def _request(job: GenerationJob, numbers: Sequence[int], read: ReadImage, labels: Ints) -> Request:
    """The rows of one batch, with the images that they need and no others."""
    rows = np.asarray(numbers)
    pool, index = np.unique(np.concatenate([job.plan.source[rows], job.plan.own[rows]]), return_inverse=True)
    images = torch.from_numpy(np.stack([read(int(i)) for i in pool])).permute(0, 3, 1, 2).contiguous()
    source, own = torch.from_numpy(index).split(len(rows))
    target, seeds = (torch.from_numpy(column[rows]) for column in (job.plan.target, job.plan.seeds))
    return Request(images, torch.from_numpy(labels[pool]), source, own, target, seeds, len(job.classes))


def _record(job: GenerationJob, number: int, samples: Samples, row: int, labels: Ints) -> dict[str, Any]:
    plan, target = job.plan, int(job.plan.target[number])
    r = float(samples.r[row]) if samples.r is not None else job.r if job.method == "genie" else None
    sources = plan.own if job.method in OF_ITS_OWN else plan.source
    source = None if job.method in OF_NOTHING else int(sources[number])
    weights = samples.weights[row]
    mixed = {job.classes[c]: round(float(weights[c]), 6) for c in weights.nonzero()[:, 0].tolist()}
    return {
        "number": number,
        "method": job.method,
        "target": job.classes[target],
        "source": source,
        "source_class": None if source is None else job.classes[int(labels[source])],
        **({"with": int(plan.own[number])} if job.method in ("mixup", "cutmix") else {}),
        "r": r,
        **({"r_schedule": job.r_schedule} if job.r_schedule and r is not None else {}),
        "seed": int(plan.seeds[number]),
        "prompt": job.prompts[target] if job.prompts else None,
        "model": job.model,
        "evaluations": samples.evaluations,
        **({"classes": mixed} if len(mixed) > 1 else {}),
    }


def _write(path: Path, samples: Samples, row: int, record: dict[str, Any]) -> None:
    text = PngImagePlugin.PngInfo()
    text.add_itxt(RECORD, json_text(record))
    pixels = samples.images[row].permute(1, 2, 0).cpu().numpy()
    with replacing(path) as temporary:
        Image.fromarray(np.ascontiguousarray(pixels)).save(temporary, "png", pnginfo=text)
