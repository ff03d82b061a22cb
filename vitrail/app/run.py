"""`vitrail app`: predictions and saliency maps of one or two models for an uploaded picture; nothing of the page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.app.facts import KEEP, examples_of, facts_of, trust_of
from vitrail.data.dataset import BadImage
from vitrail.data.decode import decode
from vitrail.data.preprocess import Preprocess
from vitrail.engine.device import choose_device
from vitrail.inspect.run import load_any, short_names
from vitrail.measure.attention_maps import AttentionCollector
from vitrail.measure.saliency import KINDS, explain, kinds_of
from vitrail.measure.trust import threshold_for
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.quantities import amount, number, percent, shorten
from vitrail.report.sheets import Pixels, dimmed, enlarged, evenly, overlay

MOST_MODELS = 2
LIMIT = 20  # MiB of an upload
TOP = 5  # classes that are listed
SIDE = 336  # of a picture on the page, at least
MOST_STAGES = 4  # of what an adaptive model keeps


@dataclass(frozen=True)
class Answer:
    """Prediction of one model for one picture."""

    name: str
    top: tuple[tuple[str, float], ...]  # classes and probabilities, the most likely first
    picture: Pixels  # as the model takes it
    over: Pixels | None  # the map laid over it; none where the model has no such map
    kept: Pixels | None  # a strip of what is left stage by stage; none where all patches stay
    cost: str
    note: str  # why there is no map; empty where there is one
    calibrated: bool  # whether its probabilities are
    rejected: bool | None  # none where no threshold was fitted

    @property
    def label(self) -> str:
        return self.top[0][0]


def picture_of(content: bytes, name: str) -> Image.Image:
    """The uploaded bytes as an image. Raises `ValueError`, one sentence: empty, no image, damaged, too many pixels."""
    name = shorten(name, 60) or "the upload"
    try:
        return decode(content, name)
    except BadImage as error:
        raise ValueError(f"{name} cannot be read: {error.reason}") from None


class Viewer:
    """One or two models, ready to look at pictures.

    `runs` are run folders, model folders or names of models. Raises `ValueError` for more than two.
    """

    def __init__(self, runs: Sequence[str | Path | Classifier], device: str = "auto", limit: int = LIMIT) -> None:
        if not 1 <= len(runs) <= MOST_MODELS:
            raise ValueError(f"the app shows one model, or two side by side, not {len(runs)}")
        if limit < 1:
            raise ValueError(f"limit is a number of MiB, at least 1, not {limit}")
        self.device = choose_device(device)
        self.names = short_names(runs)
        self.models = [load_any(run).to(self.device).eval() for run in runs]
        for model in self.models:
            model.reject_other("app", rgb=True)
        self.limit = limit
        self.trusts, self.examples = [trust_of(run) for run in runs], examples_of(runs[0])
        self.facts = [list(facts_of(*each)) for each in zip(runs, self.models, self.trusts, strict=True)]
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
        """Predictions of every model for one picture, with the map of `kind` (none: without)."""
        return [self._answer(i, image, kind) for i in range(len(self.models))]

    def _answer(self, i: int, image: Image.Image, kind: str | None) -> Answer:
        model, spent = self.models[i], self.spent[i]
        tensor = Preprocess(model.preprocess)(image)
        pixels, batch = tensor.permute(1, 2, 0).numpy(), tensor[None].to(self.device)
        kept = None
        began = time.perf_counter()
        if spent is not None:
            with torch.inference_mode():
                row = model.probabilities(model(batch).float())[0].cpu()
            took = time.perf_counter() - began
            words = f"{amount(spent.macs)} MACs, {amount(spent.parameters)} parameters"
        else:
            collector = AttentionCollector(model, 1, ())
            collector.add(batch)
            took, maps = time.perf_counter() - began, collector.result()
            row = maps.probabilities[0]
            assert maps.kept is not None
            kept = kept_strip(pixels, maps.kept[0], maps.stages, maps.grid)
            words = f"{int(maps.kept[0, -1].sum())} of {maps.kept.shape[2]} patches left"
            if maps.macs is not None:
                words = f"{amount(maps.macs)} MACs of this image, {words}"
            if maps.macs and maps.macs_whole:
                share = percent(maps.macs / maps.macs_whole, 0)
                words += f"; the whole model takes {amount(maps.macs_whole)} ({share})"
        large, over, note = enlarged(pixels, SIDE), None, ""
        if kind is not None:
            why = kinds_of(model).get(kind, "there is no such map")
            note = f"no {kind.replace('_', ' ')}: {why}" if why else ""
            over = None if why else overlay(large, explain(model, batch, kind)[0].cpu())
        best = row.topk(min(TOP, len(row)))
        top = tuple((model.classes[int(c)], float(p)) for p, c in zip(best.values, best.indices, strict=True))
        cost = f"{words}; {number(1000 * took)} ms on {self.device.type}"
        calibrated, rejected = model.calibration.kind != "identity", self._rejected(i, batch)
        return Answer(self.names[i], top, large, over, kept, cost, note, calibrated, rejected)

    @torch.inference_mode()
    def _rejected(self, i: int, batch: Tensor) -> bool | None:
        model, trust = self.models[i], self.trusts[i]
        if trust is None:
            return None
        out = model.outputs(batch)
        logits, embedding = model.fused(out.stack).float().cpu(), out.embedding.float().cpu()
        score = float(trust.scores(logits, embedding, multilabel=model.multilabel)[0])
        return score < threshold_for(trust.known, KEEP)


def kept_strip(pixels: Pixels, kept: Tensor, stages: Sequence[int], grid: tuple[int, int]) -> Pixels:
    """What is left of an image after some of the stages, side by side; `kept` [blocks, patches]."""
    gap = np.full((pixels.shape[0], max(1, pixels.shape[1] // 32), 3), 255, dtype=np.uint8)
    parts: list[Pixels] = []
    for stage in evenly(list(stages), MOST_STAGES):
        parts += [gap, dimmed(pixels, kept[stage].reshape(grid).numpy().astype(bool))]
    return enlarged(np.concatenate(parts[1:], 1), SIDE)
