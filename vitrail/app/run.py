"""`vitrail app`: what one or two models say of a picture that somebody drops on a page. No word of the page here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.dataset import BadImage
from vitrail.data.decode import decode
from vitrail.data.preprocess import Preprocess
from vitrail.engine.device import choose_device
from vitrail.inspect.run import load_any, short_names
from vitrail.measure.attention_maps import AttentionCollector
from vitrail.measure.saliency import KINDS, explain, kinds_of
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.quantities import amount, number, percent
from vitrail.report.sheets import dimmed, enlarged, evenly, overlay

MOST_MODELS = 2
LIMIT = 20  # MiB of an upload
TOP = 5  # classes that are told
SIDE = 336  # of a picture on the page, at least
MOST_STAGES = 4  # of what an adaptive model keeps


@dataclass(frozen=True)
class Answer:
    """What one model says of one picture."""

    name: str
    top: tuple[tuple[str, float], ...]  # classes and probabilities, the most likely first
    picture: NDArray[np.uint8]  # as the model sees it, [height, width, 3]
    over: NDArray[np.uint8] | None  # the map laid over it; none where the model has no such map
    kept: NDArray[np.uint8] | None  # a strip of what is left stage by stage; none where all patches stay
    cost: str
    note: str  # why there is no map; empty where there is one

    @property
    def label(self) -> str:
        return self.top[0][0]


def picture_of(path: str | Path | None, limit: int = LIMIT) -> Image.Image:
    """The uploaded file as an image. Raises `ValueError` in one sentence: too large, no image, damaged."""
    if path is None:
        raise ValueError("drop a picture here")
    path = Path(path)
    size = path.stat().st_size if path.is_file() else 0
    if size > limit * 2**20:
        raise ValueError(f"{path.name} has {size / 2**20:.1f} MiB; this page takes at most {limit}")
    try:
        return decode(path, path.name)
    except BadImage as error:
        raise ValueError(f"{path.name} cannot be read: {error.reason}") from None


class Viewer:
    """One or two models, ready to look at pictures.

    `runs` are run folders, model folders or names of models. Raises `ValueError` for more than two.
    """

    def __init__(self, runs: Sequence[str | Path | Classifier], device: str = "auto", limit: int = LIMIT) -> None:
        if not 1 <= len(runs) <= MOST_MODELS:
            raise ValueError(f"the app shows one model, or two side by side, not {len(runs)}")
        if limit < 1:
            raise ValueError(f"limit is a number of MiB, at least 1, not {limit}")
        self.place = choose_device(device)
        self.names = short_names(runs)
        self.models = [load_any(run).to(self.place).eval() for run in runs]
        self.limit = limit
        self.spent = [None if m.policy is not None else cost(m, m.preprocess.size) for m in self.models]

    @property
    def kinds(self) -> list[str]:
        """Maps that any of the models has."""
        return [kind for kind in KINDS if any(not kinds_of(model)[kind] for model in self.models)]

    @property
    def adaptive(self) -> list[bool]:
        """Which models keep only some patches."""
        return [model.policy is not None for model in self.models]

    def look(self, image: Image.Image, kind: str | None) -> list[Answer]:
        """What every model says of one picture, with the map of `kind` (none: without)."""
        return [self._answer(i, image, kind) for i in range(len(self.models))]

    def _answer(self, place: int, image: Image.Image, kind: str | None) -> Answer:
        model = self.models[place]
        pixels = Preprocess(model.preprocess)(image)
        seen = pixels.permute(1, 2, 0).numpy()
        batch = pixels[None].to(self.place)
        if model.policy is None:
            began = time.perf_counter()
            with torch.inference_mode():
                row = model.probabilities(model(batch).float())[0].cpu()
            took, kept = time.perf_counter() - began, None
            spent = self.spent[place]
            assert spent is not None
            told = f"{amount(spent.macs)} MACs, {amount(spent.parameters)} parameters"
        else:
            collector = AttentionCollector(model, 1, ())
            began = time.perf_counter()
            collector.add(batch)
            took, maps = time.perf_counter() - began, collector.result()
            row = maps.probabilities[0]
            assert maps.kept is not None
            kept = kept_strip(seen, maps.kept[0], maps.stages, maps.grid)
            left = f"{int(maps.kept[0, -1].sum())} of {maps.kept.shape[2]} patches left"
            told = left if maps.macs is None else f"{amount(maps.macs)} MACs of this image, {left}"
            if maps.macs and maps.macs_whole:
                share = percent(maps.macs / maps.macs_whole, 0)
                told += f"; the whole model takes {amount(maps.macs_whole)} ({share})"
        over, note = self._map(model, batch, kind, seen)
        best = row.topk(min(TOP, len(row)))
        top = tuple((model.classes[int(c)], float(p)) for p, c in zip(best.values, best.indices, strict=True))
        words = f"{told}; {number(1000 * took)} ms on {self.place.type}"
        return Answer(self.names[place], top, enlarged(seen, SIDE), over, kept, words, note)

    def _map(
        self, model: Classifier, batch: Tensor, kind: str | None, seen: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint8] | None, str]:
        if kind is None:
            return None, ""
        why = kinds_of(model).get(kind, "there is no such map")
        if why:
            return None, f"no {kind.replace('_', ' ')}: {why}"
        return overlay(enlarged(seen, SIDE), explain(model, batch, kind)[0].cpu()), ""


def kept_strip(
    seen: NDArray[np.uint8], kept: Tensor, decided: Sequence[int], grid: tuple[int, int]
) -> NDArray[np.uint8]:
    """What is left of an image [height, width, 3] after some of the stages, side by side; `kept` [blocks, patches]."""
    gap = np.full((seen.shape[0], max(1, seen.shape[1] // 32), 3), 255, dtype=np.uint8)
    parts: list[NDArray[np.uint8]] = []
    for stage in evenly(list(decided), MOST_STAGES):
        mask = kept[stage].reshape(grid).numpy().astype(bool)
        parts += [gap, dimmed(seen, mask)] if parts else [dimmed(seen, mask)]
    return enlarged(np.concatenate(parts, 1), SIDE)
