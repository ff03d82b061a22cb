"""Plans of generated images: how many, from which sources, for which classes (as in GeNIe, arXiv 2312.02548).

A plan is a table of whole numbers: it can be stored, inspected, and followed in any order. Everything in it
follows from a seed and from what each row is made of, so a part of a plan makes the same images as the whole.

Following a plan: images made batch by batch, each a file of its own, so that a kill loses one batch at most.

OUT/plan.json        what is to be made, and how
OUT/made/00012.png   number 12 of the plan; what it was made of stands in the file itself
OUT/manifest.jsonl   the same for all, when all are there
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
from torch import Tensor

from vitrail.data.counter import seed_of
from vitrail.files import replacing, write_text
from vitrail.generate.methods import OF_ITS_OWN, OF_NOTHING, Made, Request, Tools, make

Policy = Literal["all", "random", "confused"]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Plan:
    """Images to be made, one a row. Places are rows of the training split."""

    source: Ints  # [rows] place of an image of another class
    own: Ints  # [rows] place of an image of the target class
    target: Ints  # [rows] class
    seeds: Ints  # [rows]

    def __len__(self) -> int:
        return len(self.target)

    def counts(self, classes: int) -> Ints:
        """Images for each class."""
        return np.bincount(self.target, minlength=classes).astype(np.int64)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name).tolist() for name in ("source", "own", "target", "seeds")}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Plan:
        """Raises `ValueError` for what is no plan."""
        try:
            parts = [np.asarray(values[name], np.int64) for name in ("source", "own", "target", "seeds")]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no plan of images to be made ({type(error).__name__}: {error})") from None
        if len({part.shape for part in parts}) != 1 or parts[0].ndim != 1:
            raise ValueError("this is no plan of images to be made: its columns have different lengths")
        return cls(*parts)


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

    `each` new images a class, or as many as bring it `up_to` so many; only for classes with fewer than `below` images
    (none: all), or for those named by `only`. Sources: images of `all` other classes in turn, of other classes drawn at
    `random`, or of the `top` classes that `confusion` [true, said] mixes up with the target most, in either direction.
    Raises `ValueError` where nothing is left to do, or nothing can be made.
    """
    counts = np.bincount(labels, minlength=len(classes))
    if (each is None) == (up_to is None):
        raise ValueError("say how many images: each (new ones a class) or up_to (in all)")
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
    places = [np.flatnonzero(labels == c) for c in range(len(classes))]
    rows: list[tuple[int, int, int, int]] = []
    for target in np.flatnonzero(wanted).tolist():
        others = _others(target, places, policy, confusion, top)
        if not len(others):
            raise ValueError(f"class {classes[target]} has no other class to be made from")
        for number in range(int(wanted[target])):
            if policy == "random":
                source = int(others[seed_of("augment", seed, target, number, 0) % len(others)])
            else:
                source = _in_turn(others, labels, number, seed, target)
            own = int(places[target][number % len(places[target])])
            rows.append((source, own, target, seed_of("genie", seed, source, target, number) >> 1))
    return Plan(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))


def _wanted(
    counts: Ints, each: int | None, up_to: int | None, below: int | None, only: Sequence[int] | None
) -> NDArray[np.int64]:
    for name, value in (("each", each), ("up_to", up_to), ("below", below)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is a number of images and must be at least 1, not {value}")
    wanted = np.full(len(counts), each) if each is not None else np.maximum(0, int(up_to or 0) - counts)
    if below is not None:
        wanted = np.where(counts < below, wanted, 0)
    if only is not None:
        wanted = np.where(np.isin(np.arange(len(counts)), list(only)), wanted, 0)
    return np.asarray(wanted, np.int64)


def _others(target: int, places: Sequence[Ints], policy: str, confusion: Ints | None, top: int) -> Ints:
    """Places of images that the target's may be made from; of the most confused classes first."""
    kinds = [c for c in range(len(places)) if c != target and len(places[c])]
    if policy == "confused":
        assert confusion is not None
        mixed = confusion[target] + confusion[:, target]
        kinds = sorted(kinds, key=lambda c: (-int(mixed[c]), c))[:top]
    return np.concatenate([places[c] for c in kinds]) if kinds else np.zeros(0, np.int64)


def _in_turn(others: Ints, labels: Ints, number: int, seed: int, target: int) -> int:
    """An image of the classes of `others` in turn, drawn by seed."""
    order = list(dict.fromkeys(labels[others].tolist()))
    of = others[labels[others] == order[number % len(order)]]
    return int(of[seed_of("augment", seed, target, number, 1) % len(of)])


PLAN, MANIFEST, MADE = "plan.json", "manifest.jsonl", "made"
FACTS = "vitrail"  # name of the text in a PNG


@dataclass(frozen=True)
class GenerationJob:
    """A plan, and what it is to be followed with."""

    plan: Plan
    method: str
    model: str  # of the images, in words
    data: str
    classes: tuple[str, ...]
    prompts: tuple[str, ...]  # empty where the model takes classes by number
    r: float
    seed: int
    r_schedule: str | None = None  # on which r is stated (none: that of the model)

    def to_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("method", "model", "data", "r", "seed")}
        facts |= {"r_schedule": self.r_schedule} if self.r_schedule else {}  # older plans have none
        return {**facts, "classes": list(self.classes), "prompts": list(self.prompts), "plan": self.plan.to_json()}


def begin(folder: Path, order: GenerationJob) -> None:
    """Write the plan into `folder`, or make sure that the one there is the same.

    Raises `ValueError` where the folder holds what another order made.
    """
    text = json.dumps(order.to_json(), ensure_ascii=False)
    path = folder / PLAN
    if path.is_file():
        if json.loads(path.read_text(encoding="utf-8")) != json.loads(text):
            raise ValueError(f"{folder} holds images of another plan; continue that one, or name another folder")
        return
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no plan; name another folder")
    write_text(path, text)


def follow(
    folder: Path,
    order: GenerationJob,
    read: Callable[[int], NDArray[np.uint8]],
    labels: NDArray[np.int64],
    tools: Tools,
    *,
    batch: int = 64,
    advance: Callable[[int], None] | None = None,
) -> int:
    """Make what is missing; returns how many images were made now.

    `read(place)` gives a training image as the model takes it, [side, side, 3]. Batches are those of the plan whatever
    is missing, so that an image is the same bits however often the work was interrupted.
    """
    new = 0
    for first in range(0, len(order.plan), batch):
        numbers = range(first, min(first + batch, len(order.plan)))
        missing = [n for n in numbers if not place_of(folder, n).is_file()]
        if missing:
            made = make(order.method, _request(order, numbers, read, labels), tools)
            for n in missing:
                _write(place_of(folder, n), made, n - first, _facts(order, n, made, n - first, labels))
            new += len(missing)
        if advance is not None:
            advance(len(numbers))
    return new


def finish(folder: Path, count: int) -> list[dict[str, Any]]:
    """The manifest of all images, read from their files and written beside them."""
    rows = [read_facts(place_of(folder, n)) for n in range(count)]
    write_text(folder / MANIFEST, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return rows


def place_of(folder: Path, number: int) -> Path:
    return folder / MADE / f"{number:06d}.png"


def read_facts(path: Path) -> dict[str, Any]:
    """What a made image says of itself. Raises `ValueError` for a file that says nothing."""
    try:
        with Image.open(path) as image:
            found: dict[str, Any] = json.loads(image.info[FACTS])
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged or was not made here; delete it and run the same command again") from error
    return found


def _request(
    order: GenerationJob, numbers: Sequence[int], read: Callable[[int], NDArray[np.uint8]], labels: NDArray[np.int64]
) -> Request:
    """The rows of one batch, with the images that they need and no others."""
    rows = np.asarray(numbers)
    source, own = order.plan.source[rows], order.plan.own[rows]
    pool, where = np.unique(np.concatenate([source, own]), return_inverse=True)
    images = torch.from_numpy(np.stack([read(int(place)) for place in pool])).permute(0, 3, 1, 2).contiguous()
    spots = torch.from_numpy(where)
    return Request(
        images,
        torch.from_numpy(labels[pool]),
        spots[: len(rows)],
        spots[len(rows) :],
        torch.from_numpy(order.plan.target[rows]),
        torch.from_numpy(order.plan.seeds[rows]),
        len(order.classes),
    )


def _facts(order: GenerationJob, number: int, made: Made, row: int, labels: NDArray[np.int64]) -> dict[str, Any]:
    plan, target = order.plan, int(order.plan.target[number])
    levels: Tensor | None = made.r
    r = float(levels[row]) if levels is not None else order.r if order.method == "genie" else None
    place = int((plan.own if order.method in OF_ITS_OWN else plan.source)[number])
    source = None if order.method in OF_NOTHING else place
    weights = made.weights[row]
    mixed = {order.classes[c]: round(float(weights[c]), 6) for c in weights.nonzero()[:, 0].tolist()}
    return {
        "number": number,
        "method": order.method,
        "target": order.classes[target],
        "source": source,
        "source_class": None if source is None else order.classes[int(labels[source])],
        **({"with": int(plan.own[number])} if order.method in ("mixup", "cutmix") else {}),
        "r": r,
        **({"r_schedule": order.r_schedule} if order.r_schedule and r is not None else {}),
        "seed": int(plan.seeds[number]),
        "prompt": order.prompts[target] if order.prompts else None,
        "model": order.model,
        "evaluations": made.evaluations,
        **({"classes": mixed} if len(mixed) > 1 else {}),
    }


def _write(path: Path, made: Made, row: int, facts: dict[str, Any]) -> None:
    text = PngImagePlugin.PngInfo()
    text.add_itxt(FACTS, json.dumps(facts, ensure_ascii=False))
    pixels = made.images[row].permute(1, 2, 0).cpu().numpy()
    with replacing(path) as temporary:
        Image.fromarray(np.ascontiguousarray(pixels)).save(temporary, "png", pnginfo=text)
