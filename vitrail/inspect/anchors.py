"""Section that ranks images as anchors by a run's teacher, with the probabilities of teacher and student.

As in CompRess (arXiv 2010.14713) and ISD (arXiv 2012.09259).

p(i) = softmax over all other images i of cos(query, anchor i) / temperature: the teacher's against its own anchors,
the student's against those that it learned to compare itself with. An image is never its own anchor. Anchors are the
inspected images: a run's own queue holds embeddings whose images are no longer known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from vitrail.config import RunConfig
from vitrail.engine import checkpoint
from vitrail.inspect.attention_section import fixed
from vitrail.inspect.embeddings import MOST_NEIGHBOURS, NEAREST, neighbour_cell, rank_columns
from vitrail.inspect.section import Card, ImageBatch, InspectedModel, Inspection, PagePart, Section
from vitrail.learn.compres import Compres
from vitrail.learn.config import CompresConfig, IsdConfig, MomentumConfig, ObjectiveConfig, PairConfig
from vitrail.learn.objective import Objective
from vitrail.learn.selfsupervised import MomentumPair, unit
from vitrail.learn.teacher import Embedder, load_embedder
from vitrail.measure.evaluator import ResultTable, evaluation_mode
from vitrail.model.classifier import Classifier
from vitrail.quantities import percent
from vitrail.report.sheets import Cell, Pixels, Sheet, image_rows

TEMPERATURE = 0.04  # CompRess', for runs that have none of their own
PART = 1 << 22  # similarities that are held at once


class AnchorSection(Section):
    """Anchors of every model whose run has a teacher."""

    names: ClassVar = {"anchors": "images ranked by the teacher of a run, and its student's probabilities beside"}
    explains = True

    def __init__(self, inspection: Inspection) -> None:
        super().__init__(inspection)
        self.collectors = [AnchorCollector(s.run, s.model, inspection.device) for s in inspection.subjects]

    def add(self, batch: ImageBatch) -> None:
        for collector, images in zip(self.collectors, batch.inputs, strict=True):
            collector.add(images)

    def finish(self) -> None:
        inspection = self.inspection
        for subject, collector in zip(inspection.subjects, self.collectors, strict=True):
            subject.anchors = collector.result(len(inspection.captions))
            if subject.anchors is not None:
                inspection.shown |= set(subject.anchors.rows.flatten().tolist())
            if collector.reason and (collector.taught or not inspection.everything):
                inspection.notes += (f"{inspection.of(subject)}{collector.reason}",)

    def parts(self) -> Iterator[PagePart]:
        inspection, cards = self.inspection, []
        for i, subject in enumerate(inspection.subjects):
            if subject.anchors is not None:
                sheet = anchor_sheet(inspection, subject, subject.anchors, i)
                line, table = self._table(subject.anchors, sheet.title)
                explained = "Divergence: KL(T ‖ S) over all anchors, nats."
                cards.append(Card(sheet.title if inspection.several else "", [sheet, line, table, explained]))
        if cards:
            images = inspection.subjects[0].attention.images
            lead = f"The {images} images as anchors, an image never its own; the teacher's likeliest first. T: the "
            lead += (
                "teacher's probability, softmax of cosines over all anchors; S: the student's. A teacher that names "
            )
            lead += "only the image itself, as MoCo's does, would leave nothing here."
            if inspection.classes:
                coarser = " amber ~ at a coarser level only," if len(inspection.levels) > 1 else ""
                lead += f" Frames: green ✓ the same class,{coarser} red ✗ another."
            yield PagePart("anchors", "Anchors ranked by the teacher", lead, cards)

    def _table(self, anchors: Anchors, title: str) -> tuple[str, ResultTable]:
        """The teacher in words, and one row per image."""
        first = anchors.rows.shape[1]
        rows = []
        for image, caption in enumerate(self.inspection.captions[: len(anchors.rows)]):
            by = (anchors.teacher[image], anchors.student[image])
            shares = [percent(float(p)) for p in (*(b[0] for b in by), *(b.sum() for b in by))]
            rows.append((caption, *shares, fixed(float(anchors.divergences[image]))))
        relation = anchors.relation
        words = f"temperature {relation.temperature:g}"
        if relation.temperature != relation.teacher_temperature:
            words = f"temperatures {relation.teacher_temperature:g} and {relation.temperature:g}"
        loss = "This is what the run learned." if relation.learned else "The run learned from it otherwise."
        columns = ("image", "likeliest, T", "S", f"first {first}, T", "S", "divergence")
        return f"Teacher: {relation.who}; {words}. {loss}", ResultTable(title, columns, rows)

    def lines(self) -> Iterator[str]:
        for subject in self.inspection.subjects:
            if subject.anchors is not None:
                yield (
                    f"{self.inspection.of(subject)}its teacher and it name the same likeliest anchor for "
                    f"{percent(subject.anchors.same_first)} of images; they diverge by "
                    f"{subject.anchors.divergence:.2f} nats"
                )


def anchor_sheet(inspection: Inspection, subject: InspectedModel, anchors: Anchors, number: int) -> Sheet:
    """The chosen images, and beside each the teacher's likeliest anchors, with both probabilities."""

    def cells(image: int, pixels: Pixels) -> list[Cell | None]:
        ranks = zip(anchors.rows[image].tolist(), anchors.teacher[image], anchors.student[image], strict=True)
        return [
            neighbour_cell(inspection, image, row, f"T {percent(float(t), 0)} S {percent(float(s), 0)}")
            for row, t, s in ranks
        ]

    rows = image_rows(subject.pixels, inspection.captions[:MOST_NEIGHBOURS], cells)
    title = f"Anchors by the teacher of {subject.name}; T: its probability, S: the student's"
    return Sheet(f"anchors-{number}", title, rank_columns(anchors.rows.shape[1]), rows)


class Views(NamedTuple):
    """Unit vectors of images, one row each."""

    teacher: Tensor  # [images, width], as query and as anchor
    student: Tensor  # [images, its width], as query
    anchors: Tensor  # [images, the same], what the student compares itself with


@dataclass(frozen=True)
class Relation:
    """A student and its teacher; `embed` takes images as the student takes them, [batch, 3, height, width]."""

    who: str  # the teacher, in words
    temperature: float
    teacher_temperature: float
    learned: bool  # whether this very comparison was the run's loss
    embed: Callable[[Tensor], Views]


def has_teacher(config: ObjectiveConfig) -> bool:
    """Whether a run of this objective learns from a teacher: another model, or its momentum encoder."""
    return bool(getattr(config, "teacher", "")) or isinstance(config, MomentumConfig)


def read_relation(
    config: ObjectiveConfig, model: Classifier, stored: Callable[[], Mapping[str, Tensor]], device: torch.device
) -> Relation:
    """The teacher of a run and `model`, which the run trained.

    `stored` gives the objective's state in the run's checkpoint, read where momentum encoders, predictors or maps
    between widths are needed; the student then has the weights that go with them. Other students are compared by the
    vector that they classify, among their own anchors, as CompRess does with two queues. Raises `ValueError` or
    `FileNotFoundError`, one sentence, where the teacher is gone.
    """
    if isinstance(config, MomentumConfig):
        like = PairConfig(config.momentum, config.momentum_end)  # DINO is no pair, and stores the same two networks
        pair = MomentumPair(deepcopy(model), like, 1, getattr(config, "predictor_hidden", None))
        _restore(pair, stored(), device)

        def with_momentum_encoder(images: Tensor) -> Views:
            target = pair.target.embed(images)
            return Views(target, unit(pair.predictor(pair.encode(images).embedding)), target)

        isd = isinstance(config, IsdConfig)
        two = (config.temperature, config.teacher_temperature) if isinstance(config, IsdConfig) else (TEMPERATURE,) * 2
        return Relation("its momentum encoder", *two, isd, torch.inference_mode()(with_momentum_encoder))
    name, size = cast("str", getattr(config, "teacher", "")), getattr(config, "teacher_size", None)
    teacher = load_embedder(name, model, size)
    if isinstance(config, CompresConfig):
        small = replace(config, bank=1, cache=False)  # its memory is not read
        taught = Compres(deepcopy(model), small, teacher, np.zeros(1, dtype=np.int64), steps=1)
        _restore(taught, stored(), device)

        def as_in_training(images: Tensor) -> Views:
            target = unit(taught.embedder.ask(images))
            student = unit(taught.adapter(taught.encode(images).embedding))
            return Views(target, student, target if taught.key is None else taught.key.embed(images))

        return Relation(name, config.temperature, config.temperature, True, torch.inference_mode()(as_in_training))
    embedder = Embedder(teacher, model, name, size).to(device).eval()

    def among_own_anchors(images: Tensor) -> Views:
        student = unit(model.outputs(images).representation)
        return Views(unit(embedder.ask(images)), student, student)

    return Relation(name, TEMPERATURE, TEMPERATURE, False, torch.inference_mode()(among_own_anchors))


def _restore(objective: Objective, stored: Mapping[str, Tensor], device: torch.device) -> None:
    """What a checkpoint holds of an objective, without its memory and its frozen teacher."""
    wanted = {name for name in objective.state_dict() if not name.startswith(("bank.", "embedder."))}
    lacking = sorted(wanted - set(stored))
    if lacking:
        raise ValueError(f"its checkpoint has no {lacking[0]}, so its teacher cannot be made again")
    objective.load_state_dict({name: stored[name] for name in wanted}, strict=False)
    objective.to(device).eval()


@dataclass(frozen=True)
class Anchors:
    """The first images as queries, all others as anchors: the teacher's most likely ones first."""

    relation: Relation
    rows: Tensor  # [queries, k]
    teacher: Tensor  # [queries, k], probabilities
    student: Tensor  # [queries, k]
    divergences: Tensor  # [queries], KL(teacher || student) over all anchors, nats
    divergence: float  # mean over all images as queries
    same_first: float  # share of all images whose most likely anchor is the same for both
    images: int

    def to_json(self) -> dict[str, Any]:
        relation = self.relation
        values = {"by": relation.who, "learned": relation.learned, "temperature": relation.temperature}
        values |= {"teacher_temperature": relation.teacher_temperature, "rows": self.rows.tolist()}
        values |= {"divergence": self.divergence, "same_first": self.same_first}
        shares = {"teacher": self.teacher, "student": self.student}
        return values | {name: [[round(v, 6) for v in row] for row in p.tolist()] for name, p in shares.items()}


def anchor_probabilities(queries: Tensor, anchors: Tensor, temperature: float, first: int = 0) -> Tensor:
    """log p [queries, images]; query j is image `first` + j, whose own column is minus infinity.

    queries [queries, width], anchors [images, width], of unit length; float64, as ISD's 0.01 makes large exponents.
    """
    scores = queries.double() @ anchors.double().T / temperature
    own = torch.arange(len(queries), device=scores.device)
    scores[own, own + first] = -torch.inf
    return scores.log_softmax(1)


def ranked_anchors(views: Views, relation: Relation, *, queries: int, k: int) -> Anchors:
    """The first `queries` of all images, with their `k` likeliest anchors.

    Raises `ValueError` where there is one image alone.
    """
    teacher, student, anchors = views
    images = len(teacher)
    if images < 2:
        raise ValueError("there are no anchors: one image alone")
    k, queries = min(k, images - 1), min(queries, images)
    shown: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    total, same = 0.0, 0
    for start in range(0, images, step := max(1, PART // images)):
        part = slice(start, start + step)
        p = anchor_probabilities(teacher[part], teacher, relation.teacher_temperature, start)
        q = anchor_probabilities(student[part], anchors, relation.temperature, start)
        # An image's own column is 0 log 0 for both.
        divergence = torch.where(p.isfinite(), p.exp() * (p - q), 0.0).sum(1)
        total += float(divergence.sum())
        same += int((p.argmax(1) == q.argmax(1)).sum())
        here = max(0, min(queries - start, len(p)))
        top, rows = p[:here].topk(k, dim=1)
        shown.append((rows, top.exp(), q[:here].gather(1, rows).exp(), divergence[:here]))
    rows, by_teacher, by_student, divergences = (torch.cat(parts).cpu() for parts in zip(*shown, strict=True))
    return Anchors(relation, rows, by_teacher, by_student, divergences, total / images, same / images, images)


class AnchorCollector:
    """Embeddings of images by both, batch by batch; `reason` says in one sentence why there is no teacher, if so."""

    def __init__(self, run: tuple[Path, RunConfig] | None, model: Classifier, device: torch.device) -> None:
        self.model, self.reason = model, ""
        self.relation: Relation | None = None
        self.views: list[tuple[Tensor, ...]] = []
        self.taught = run is not None and has_teacher(run[1].objective)
        if run is None:
            self.reason = "no ranked anchors: it is no run, so nothing is known of a teacher"
            return
        folder, objective = run[0], run[1].objective
        if not self.taught:
            self.reason = f"no ranked anchors: the run's objective, {objective.kind}, has no teacher to rank them"
            return

        def stored() -> dict[str, Tensor]:
            state = checkpoint.newest(folder / "checkpoint")[0]
            if state is None:
                raise ValueError(f"{folder} has no whole checkpoint, which holds the teacher or what goes with it")
            return state.part("objective")

        try:
            self.relation = read_relation(objective, model, stored, device)
        except (ValueError, FileNotFoundError) as error:
            self.reason = f"no ranked anchors: {str(error).removeprefix('objective.teacher: ')}"

    def add(self, images: Tensor) -> None:
        """Images as the student takes them, [batch, 3, height, width]."""
        if self.relation is not None:
            with evaluation_mode(self.model):
                self.views.append(tuple(part.float().cpu() for part in self.relation.embed(images)))

    def result(self, pictures: int) -> Anchors | None:
        """The first `pictures` images as queries; none without a teacher, or of one image alone."""
        if self.relation is None:
            return None
        views = Views(*(torch.cat(parts) for parts in zip(*self.views, strict=True)))
        if len(views.teacher) < 2:
            self.reason = "no ranked anchors: one image alone has none"
            return None
        return ranked_anchors(views, self.relation, queries=pictures, k=NEAREST)
