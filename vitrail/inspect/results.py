"""Results of `vitrail inspect`: attention and embeddings of each model, and how two models relate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.inspect.evidence import Evidence
from vitrail.inspect.teacher_view import Anchors
from vitrail.inspect.weight_statistics import Learned
from vitrail.measure.attention_maps import Looks, Selection
from vitrail.schema import near

SECTIONS = {  # name: what it shows, and who has it
    "attention": "what the class token attends to, by layer",
    "heads": "the same head by head",
    "kept": "patches that adaptive models keep",
    "saliency": "what SimA marks",
    "evidence": "maps of evidence for the class",
    "judged": "how good those maps are",
    "likeness": "how alike two models are inside",
    "learned": "gains and ratios of branches, tokens, matrices and heads",
    "embedding": "energy and a map of the embeddings",
    "neighbours": "the nearest other images",
    "anchors": "images ranked by the teacher of a run, and its student's probabilities beside",
    "clusters": "images that lie together",
}


def chosen_sections(what: Sequence[str]) -> tuple[str, ...]:
    """The sections that are asked for, in the order of the page (none: all). Raises `ValueError` for an unknown one."""
    for name in what:
        if name not in SECTIONS:
            raise ValueError(f"--what: no section {name!r}{near(name, SECTIONS)}; there are {', '.join(SECTIONS)}")
    return tuple(name for name in SECTIONS if name in what or not what)


@dataclass(frozen=True)
class Picture:
    """An image that was not chosen but is shown: as a neighbour, as one of a cluster."""

    pixels: NDArray[np.uint8]  # [height, width, 3]
    caption: str


@dataclass(frozen=True)
class InspectedModel:
    """One model."""

    name: str
    path: str
    kind: str  # of its adaptive policy: ats, avit, adavit; empty where all images get all
    stages: tuple[int, ...]  # blocks at which its policy decides
    classes: tuple[str, ...]
    looks: Looks
    pixels: Sequence[NDArray[np.uint8]]  # the chosen images as the model takes them, [side, side, 3] each
    evidence: Evidence | None = None
    learned: Learned | None = None
    anchors: Anchors | None = None
    selection: Selection | None = None  # by another rule of drawing tokens
    attacked: Looks | None = None  # the same images under a patch
    attacked_pixels: Sequence[NDArray[np.uint8]] = ()

    def says(self, image: int, looks: Looks | None = None) -> str:
        """Its prediction for one of the chosen images, in words; `looks`: another look at it than the first."""
        row = (looks or self.looks).probabilities[image]
        best = int(row.argmax())
        share = float(row[best])
        return f"{self.classes[best]} {share:.0%}" if share >= 0.005 else f"{self.classes[best]} <1%"


@dataclass(frozen=True)
class Inspection:
    """One or several models on the same images."""

    subjects: tuple[InspectedModel, ...]
    source: str  # where the images are from
    captions: tuple[str, ...]  # of the chosen images: class or file name
    layers: tuple[int, ...] = ()  # asked for (none: chosen)
    cka: Tensor | None = None  # [layers, other layers], of the first two models
    divergence: dict[str, list[float | None]] = field(default_factory=dict)  # nats by matching, one a common layer
    divergence_layers: tuple[int, ...] = ()
    divergence_images: int = 0
    transfer: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    what: tuple[str, ...] = tuple(SECTIONS)  # sections that were asked for
    classes: tuple[str, ...] = ()  # of the data; none where images have no labels
    levels: tuple[str, ...] = ()  # names of the levels of their taxonomy, finest first
    more: dict[int, Picture] = field(default_factory=dict)  # other images that are shown, by their place among all

    @property
    def cka_diagonal(self) -> list[float | None]:
        """CKA of layer i of the first with layer i of the second, as far as both have it."""
        found = [] if self.cka is None else self.cka.diagonal().tolist()
        return [v if math.isfinite(v) else None for v in found]

    def lacking(self) -> list[str]:
        """Sections that somebody asked for by name and that no model here has, in words."""
        if set(self.what) == set(SECTIONS):
            return []
        many = self.subjects
        there = {
            "attention": any(s.looks.layers or s.looks.head_maps is not None for s in many),
            "heads": any(s.looks.layers for s in many),
            "kept": any(s.looks.kept is not None for s in many),
            "saliency": any(s.looks.saliency is not None for s in many),
            "evidence": any(s.evidence is not None and s.evidence.maps for s in many),
            "judged": any(s.evidence is not None and s.evidence.quality for s in many),
            "likeness": self.cka is not None or bool(self.divergence),
        }
        return [
            f"{name}: there is nothing to show here ({SECTIONS[name]})"
            for name in self.what
            if not there.get(name, True)
        ]

    def to_json(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "source": self.source,
            "models": [
                {"name": s.name, "path": s.path, "adaptive": s.kind, **s.looks.to_json()}
                | ({} if s.evidence is None else {"evidence": s.evidence.to_json()})
                | ({} if s.learned is None else {"learned": s.learned.to_json()})
                | ({} if s.anchors is None else {"anchors": s.anchors.to_json()})
                | ({} if s.attacked is None else {"attacked": s.attacked.to_json()})
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
        return made | {"notes": [*self.notes, *self.lacking()]}
