"""Following a plan: images made batch by batch, each a file of its own, so that a kill loses one batch at most.

OUT/plan.json        what is to be made, and how
OUT/made/00012.png   number 12 of the plan; what it was made of stands in the file itself
OUT/manifest.jsonl   the same for all, when all are there
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin
from torch import Tensor

from vitrail.files import replacing, write_text
from vitrail.generate.baselines import OF_ITS_OWN, OF_NOTHING, Made, Request, Tools, make
from vitrail.generate.plan import Plan

PLAN, MANIFEST, MADE = "plan.json", "manifest.jsonl", "made"
FACTS = "vitrail"  # name of the text in a PNG


@dataclass(frozen=True)
class Order:
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


def begin(folder: Path, order: Order) -> None:
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
    order: Order,
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
    order: Order, numbers: Sequence[int], read: Callable[[int], NDArray[np.uint8]], labels: NDArray[np.int64]
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


def _facts(order: Order, number: int, made: Made, row: int, labels: NDArray[np.int64]) -> dict[str, Any]:
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
