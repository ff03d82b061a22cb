"""The hardware-relative claims of architectures-and-training §10.3 as data, and what this machine says of them.

Ratios are compared, never absolute values: the document measured on other hardware.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.measure.batch_search import free_memory, out_of_memory
from vitrail.measure.speed import MemoryWatch, Ratio, Way, fresh_images, in_turns, ratio
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.tokens import Probe, Tokens

NEEDS_GPU = "needs a GPU: peak memory is not measured on a CPU"
INFINITY = float("inf")

Quantity = Literal["speed", "memory", "macs"]
Tell = Callable[[int, int, str], None]  # told (subjects done, subjects in all, what is measured)


@dataclass(frozen=True)
class Subject:
    """A model as a claim speaks of it."""

    name: str
    image_size: int | None = None
    heads: int | None = None
    explicit: bool = False
    """Attention as two matrix products and a softmax, whose maps are stored; else the fused kernel."""


@dataclass(frozen=True)
class Claim:
    """`quantity` of one subject over that of another; it holds here where the ratio lies between `above` and `below`.

    The bounds are those of the claim's words (more, less, flat, no faster than the area), not of its figure.
    """

    text: str
    quantity: Quantity  # images a second, peak bytes, or multiply-accumulates
    subject: Subject
    to: Subject
    says: float | None
    """The document's ratio (none: it names no figure)."""
    above: float = 0.0
    below: float = INFINITY


@dataclass(frozen=True)
class Checked:
    """A claim and what came out."""

    claim: Claim
    measured: Ratio | None  # none where it could not be measured
    note: str = ""

    @property
    def holds(self) -> bool | None:
        if self.measured is None:
            return None
        return self.claim.above < self.measured.median < self.claim.below

    def to_json(self) -> dict[str, Any]:
        found = self.measured
        return {
            "claim": self.claim.text,
            "quantity": self.claim.quantity,
            "says": self.claim.says,
            "measured": None if found is None else found.median,
            "quartiles": None if found is None else [found.low, found.high],
            "holds": self.holds,
            "note": self.note,
        }


def area(size: int, native: int = 224) -> float:
    """How many times as many pixels as at the native size."""
    return (size / native) ** 2


TINY, SMALL, BASE = Subject("deit_tiny"), Subject("deit_small"), Subject("deit_base")
BASE_384, BASE_DISTILLED = Subject("deit_base_384"), Subject("deit_base_distilled")
S60 = Subject("patchconvnet_s60")
EXPLICIT_BASE, EXPLICIT_BASE_384 = Subject("deit_base", explicit=True), Subject("deit_base_384", explicit=True)


def head_claims(explicit: bool) -> tuple[Claim, ...]:
    """More heads at DeiT-S's width (table 3.21): the same MACs, fewer images a second."""
    one = Subject("deit_small", heads=1, explicit=explicit)
    how = "explicit" if explicit else "fused"
    return tuple(
        Claim(f"{heads} heads / 1 head, DeiT-S width, {how}", "speed", several, one, speed / 1079, below=1.0)
        for heads, speed in ((6, 989), (8, 971), (24, 763))
        for several in (Subject("deit_small", heads=heads, explicit=explicit),)
    )


def area_claims() -> tuple[Claim, ...]:
    """PatchConvNet's memory grows no faster than the area (table 5.2); 5 % are left for chance."""
    return tuple(
        Claim(
            f"PatchConvNet S60 at {size} / 224, area x{area(size):.2f}: linear",
            "memory",
            Subject("patchconvnet_s60", image_size=size),
            S60,
            megabytes / 1322,
            above=1.0,
            below=1.05 * area(size),
        )
        for size, megabytes in ((288, 2091), (384, 3604), (512, 6296))
    )


CLAIMS: tuple[Claim, ...] = (
    Claim("DeiT-Ti / DeiT-B", "speed", TINY, BASE, 8.7, above=1.0),
    Claim("DeiT-S / DeiT-B", "speed", SMALL, BASE, 3.2, above=1.0),
    Claim("DeiT-Ti / DeiT-S", "speed", TINY, SMALL, 8.7 / 3.2, above=1.0),
    Claim("DeiT-B with / without distillation token: < 1 %", "speed", BASE_DISTILLED, BASE, 290.9 / 292.3, above=0.99),
    Claim("DeiT-B at 224 / 384", "speed", BASE, BASE_384, 292.3 / 85.9, above=1.0),
    *head_claims(explicit=False),
    *head_claims(explicit=True),
    Claim("ViT-L / DeiT-B", "memory", Subject("vit_large"), BASE, 3789 / 2078, above=1.0),
    Claim("DeiT-B / PatchConvNet S60", "memory", BASE, S60, 2078 / 1321, above=1.0),
    Claim("PatchConvNet B60 / S60", "memory", Subject("patchconvnet_b60"), S60, 2790 / 1321, above=1.0),
    # Flat: nearer to 1 than to 2, the ratio of the depths.
    Claim("PatchConvNet S120 / S60: flat", "memory", Subject("patchconvnet_s120"), S60, 1450 / 1321, below=2**0.5),
    *area_claims(),
    Claim(
        f"ViT-B at 384 / 224, explicit, area x{area(384):.2f}: faster",
        "memory",
        EXPLICIT_BASE_384,
        EXPLICIT_BASE,
        8956 / 2078,
        above=area(384),
    ),
    Claim(f"ViT-B at 384 / 224, fused, area x{area(384):.2f}: faster", "memory", BASE_384, BASE, None, above=area(384)),
    Claim(
        "ViT-H at 224 / 126",
        "macs",
        Subject("deit3_huge"),
        Subject("deit3_huge", image_size=126),
        167.3 / 52.2,
        above=1.0,
    ),
)


@dataclass(frozen=True)
class Measures:
    """How each quantity is measured: subjects to a ratio of any two of them, or to a number each."""

    speed: Callable[[Sequence[Subject]], Callable[[Subject, Subject], Ratio]]
    memory: Callable[[Subject], int | None]  # none: not measured here
    macs: Callable[[Subject], int]


def check_claims(claims: Sequence[Claim], measures: Measures) -> tuple[Checked, ...]:
    """Every claim with its ratio here. Speeds of one batch of subjects are timed in turns, others one by one."""
    timed = _once(s for c in claims if c.quantity == "speed" for s in (c.subject, c.to))
    speeds = measures.speed(timed) if timed else None
    numbers: dict[tuple[Quantity, Subject], int | None] = {}
    for claim in claims:
        for subject in (claim.subject, claim.to) if claim.quantity != "speed" else ():
            key = (claim.quantity, subject)
            if key not in numbers:
                numbers[key] = (measures.memory if claim.quantity == "memory" else measures.macs)(subject)
    found = []
    for claim in claims:
        if claim.quantity == "speed":
            assert speeds is not None
            found.append(Checked(claim, speeds(claim.subject, claim.to)))
            continue
        over, under = (numbers[claim.quantity, s] for s in (claim.subject, claim.to))
        if over is None or under is None:
            found.append(Checked(claim, None, NEEDS_GPU))
        else:
            found.append(Checked(claim, Ratio(over / under, over / under, over / under)))
    return tuple(found)
