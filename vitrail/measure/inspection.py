"""What `vitrail inspect` found: how each model looks, and how two of them relate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.measure.evidence import Evidence
from vitrail.measure.looker import Looks


@dataclass(frozen=True)
class Subject:
    """One model."""

    name: str
    path: str
    kind: str  # of its adaptive policy: ats, avit, adavit; empty where all images get all
    stages: tuple[int, ...]  # blocks at which its policy decides
    classes: tuple[str, ...]
    looks: Looks
    pixels: Sequence[NDArray[np.uint8]]  # the chosen images as the model takes them, [side, side, 3] each
    evidence: Evidence | None = None

    def says(self, image: int) -> str:
        """Its prediction for one of the chosen images, in words."""
        row = self.looks.probabilities[image]
        best = int(row.argmax())
        return f"{self.classes[best]} {float(row[best]):.0%}"


@dataclass(frozen=True)
class Inspection:
    """One or several models on the same images."""

    subjects: tuple[Subject, ...]
    source: str  # where the images are from
    captions: tuple[str, ...]  # of the chosen images: class or file name
    layers: tuple[int, ...] = ()  # asked for (none: chosen)
    cka: Tensor | None = None  # [layers, other layers], of the first two models
    divergence: dict[str, list[float | None]] = field(default_factory=dict)  # nats by matching, one a common layer
    divergence_layers: tuple[int, ...] = ()
    divergence_images: int = 0
    transfer: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def cka_diagonal(self) -> list[float | None]:
        """CKA of layer i of the first with layer i of the second, as far as both have it."""
        found = [] if self.cka is None else self.cka.diagonal().tolist()
        return [v if math.isfinite(v) else None for v in found]

    def to_json(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "source": self.source,
            "models": [
                {"name": s.name, "path": s.path, "adaptive": s.kind, **s.looks.to_json()}
                | ({} if s.evidence is None else {"evidence": s.evidence.to_json()})
                for s in self.subjects
            ],
        }
        if self.cka is not None:
            made["cka"] = [[v if math.isfinite(v) else None for v in row] for row in self.cka.tolist()]
        if self.divergence:
            made["divergence"] = {"layers": list(self.divergence_layers), "images": self.divergence_images}
            made["divergence"] |= self.divergence
        if self.transfer:
            made["transfer"] = self.transfer
        return made | {"notes": list(self.notes)}
