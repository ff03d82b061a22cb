"""Section of the patches that adaptive models keep: by stage, by another rule of sampling, and under a patch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.inspect.section import Card, Chart, ImageBatch, InspectedModel, Inspection, PagePart, Section, sheet_part
from vitrail.learn.attack import load_patch
from vitrail.measure.attention_maps import AttentionCollector, AttentionMaps
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.classifier import Classifier
from vitrail.quantities import amount, percent, shorten
from vitrail.report.charts import histogram
from vitrail.report.sheets import Cell, Pixels, Row, Sheet, enlarged, kept_cells, kept_sheet, stage_columns

Rule = Literal["inverse", "top"]
RULES = {"inverse": "inverse transform", "nearest": "inverse, nearest", "top": "top-K", "random": "at random"}
SELECTION = (
    "The same weights with two rules. Top-K takes the patches with the highest scores, as many of every image; inverse "
    "transform sampling spreads its draws over all that have some, and keeps fewer where few have much. K is what the "
    "other keeps on average, so both spend the same; the model was not tuned for it."
)


class KeptSection(Section):
    """Kept patches of each stage; raises `ValueError` or `FileNotFoundError` where the attack's patch does not fit."""

    names: ClassVar = {"kept": "patches that adaptive models keep"}

    def __init__(self, inspection: Inspection) -> None:
        super().__init__(inspection)
        models, folder = [s.model for s in inspection.subjects], inspection.attack
        self.attacked: list[AttackedImages | None] = [None] * len(models)
        if folder is not None:
            if all(model.policy is None for model in models):
                raise ValueError("--attack: every model named spends the same on every image; name an adaptive one")
            self.attacked = [AttackedImages(m, folder, inspection.count) if m.policy else None for m in models]

    def add(self, batch: ImageBatch) -> None:
        for attacked, images in zip(self.attacked, batch.inputs, strict=True):
            if attacked is not None:
                attacked.add(images)

    def finish(self) -> None:
        for subject, attacked in zip(self.inspection.subjects, self.attacked, strict=True):
            if subject.attention.counts is not None:
                pixels = subject.pixels[: len(self.inspection.captions)]
                subject.selection = other_selection(subject.model, pixels, subject.attention.counts)
                if attacked is not None:
                    subject.attacked, subject.attacked_pixels = attacked.collector.result(), attacked.pixels

    def parts(self) -> Iterator[PagePart]:
        captions, sheets, cards = self.inspection.captions, [], []
        adaptive = [s for s in self.inspection.subjects if s.attention.kept is not None]
        for subject in adaptive:
            number = self.inspection.colours[subject.name]
            attacked = None if subject.attacked is None else (subject.attacked, subject.attacked_pixels)
            maps = subject.attention
            sheets.append(kept_sheet(subject.name, maps, subject.pixels, captions, number=number, attacked=attacked))
            if subject.selection is not None:
                sheets.append(selection_sheet(subject, subject.selection, captions, number))
            hint = _tokens(maps) + (f" Under the patch: {_tokens(subject.attacked)}" if subject.attacked else "")
            cards.append(Card(subject.name, [self._histograms(subject), hint]))
        if adaptive:
            lead = "The image, then what is left of it stage by stage: patches that were dropped are faded."
            lead += " “attacked”: the same image with the patch on it." if any(s.attacked for s in adaptive) else ""
            yield sheet_part("kept", "Kept patches", lead, sheets, selection=SELECTION)
            lead = "Images by the number of patches they keep; the dashed line is the mean."
            yield PagePart("how many", "Number of kept patches", lead, cards)

    def _histograms(self, subject: InspectedModel) -> list[Chart]:
        maps, charts = subject.attention, []
        assert maps.counts is not None
        for heading, stage in stage_columns(maps).items():
            svg = histogram(maps.counts[:, stage].numpy(), maps.grid[0] * maps.grid[1], title=f"Patches kept {heading}")
            before = f"{subject.name} " if self.inspection.several else ""
            charts.append(Chart(heading, svg, file=f"{before}patches kept {heading}"))
        return charts

    def verdict(self) -> Iterator[str]:
        for subject in self.inspection.subjects:
            maps, attacked = subject.attention, subject.attacked
            if not maps.leaving or maps.counts is None:
                continue
            model = subject.name if self.inspection.several else "it"
            works = "works on" if maps.policy == "adavit" else "is left with"
            patches = f"{float(maps.counts[:, -1].double().mean()):.1f} of {maps.grid[0] * maps.grid[1]} patches"
            spent = "" if maps.macs is None else f"; an image takes {amount(maps.macs)} MACs"
            whole = "" if not maps.macs_whole else f" of {amount(maps.macs_whole)}"
            yield f"In the end {model} {works} {patches} on average{spent}{whole}."
            if attacked is not None and attacked.counts is not None:
                spent = "" if attacked.macs is None else f" and {amount(attacked.macs)} MACs"
                yield f"Under the patch it is {float(attacked.counts[:, -1].double().mean()):.1f} patches{spent}."


class AttackedImages:
    """The same images with the patch: attention, and the first `pictures` as bytes [side, side, 3]."""

    def __init__(self, model: Classifier, folder: Path, pictures: int) -> None:
        self.model, self.collector = model, AttentionCollector(model, pictures, ())
        self.patch = load_patch(folder, model.preprocess)[0].to(next(model.parameters()).device)
        self.pixels: list[Pixels] = []

    def add(self, images: Tensor) -> None:
        """Images as the model takes them, [batch, 3, height, width]."""
        with torch.no_grad():
            patched = self.patch(self.model._images(images))
        room = max(0, self.collector.pictures - self.collector.images)
        levels = ((patched[:room].float() * self.patch.std + self.patch.mean) * 255).round().clamp(0, 255)
        self.pixels += list(levels.to("cpu", torch.uint8).permute(0, 2, 3, 1).numpy())
        self.collector.add(patched)


@dataclass(frozen=True)
class Selection:
    """Attention under another rule of sampling tokens."""

    own: str  # the model's rule, in words
    other: str
    attention: AttentionMaps


@contextmanager
def sampling_by(policy: AtsPolicy, rule: Rule, cap: Sequence[float]) -> Iterator[None]:
    """The policy with another rule and other caps, one per layer or one for all; then as it was."""
    config, caps = policy.config, policy.cap
    policy.config = replace(config, sampling=rule, form="padded")  # packed batches know one rule only
    try:
        policy.set_cap(cap)
        yield
    finally:
        policy.config, policy.cap = config, caps


def other_selection(model: Classifier, pixels: Sequence[Pixels], counts: Tensor) -> Selection | None:
    """Tokens that ATS (arXiv 2111.15667) keeps of `pixels` under another rule; none for other policies.

    K of each stage of top-K is what the model keeps there of an image on average, by `counts` [images, blocks]: both
    spend the same. A model that takes the top K by itself is shown with inverse transform sampling and its own cap,
    which keeps at most as many.
    """
    policy = model.policy
    if not isinstance(policy, AtsPolicy) or not len(pixels):
        return None
    rule: Rule = "inverse" if policy.config.sampling == "top" else "top"
    cap = list(policy.cap.values())
    if rule == "top":  # a cap of 1 would be all patches
        cap = [float(max(2, round(float(counts[:, i].double().mean())))) for i in policy.at]
    collector = AttentionCollector(model, len(pixels), ())
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    with sampling_by(policy, rule, cap):
        collector.add(images.to(next(model.parameters()).device))
    return Selection(RULES[policy.config.sampling], RULES[rule], collector.result())


def selection_sheet(subject: InspectedModel, selection: Selection, captions: Sequence[str], number: int) -> Sheet:
    """What is kept by the model's own rule of sampling tokens, and below it by another."""
    columns = stage_columns(subject.attention)
    rows: list[Row] = []
    for image, caption in enumerate(captions):
        pixels = subject.pixels[image]
        first: Cell | None = Cell(enlarged(pixels), shorten(caption, 18))
        for rule, maps in ((selection.own, subject.attention), (selection.other, selection.attention)):
            cells = kept_cells(maps, pixels, image, list(columns.values()))
            rows.append((f"{rule}, predicted {maps.prediction(image)}", [first, *cells]))
            first = None
    title = f"{selection.own[:1].upper()}{selection.own[1:]} compared with {selection.other}, {subject.name}"
    return Sheet(f"selection-{number}", title, ["image", *columns], rows)


def _tokens(maps: AttentionMaps) -> str:
    words = f"Tokens that enter each block, mean: {', '.join(f'{n:.1f}' for n in maps.entering)}."
    if maps.macs is not None and maps.macs_whole:
        share = percent(maps.macs / maps.macs_whole, 0)
        words += f" {amount(maps.macs)} MACs per image, {share} of the whole model's."
    return words
