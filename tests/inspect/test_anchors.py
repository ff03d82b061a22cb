"""Anchors ranked by a run's teacher: probabilities against loops, teachers against the objectives they are of."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail
from vitrail.cli import run
from vitrail.config import from_mapping
from vitrail.data.open import open_data
from vitrail.inspect import anchors as measured
from vitrail.inspect.anchors import (
    Anchors,
    Relation,
    Views,
    anchor_probabilities,
    has_teacher,
    ranked_anchors,
    read_relation,
)
from vitrail.inspect.run import inspect_models
from vitrail.kernels.similarity import relation_loss
from vitrail.learn.config import CmsfConfig, CompresConfig, DinoConfig, DistillationConfig, IsdConfig, SupervisedConfig
from vitrail.learn.objective import Objective, TrainingFacts, build_objective
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.recipes import recipe

CLASSES = 3
FACTS = TrainingFacts(np.arange(18) % CLASSES, np.arange(18), 20)


def units(seed: int, images: int = 9, width: int = 4) -> Tensor:
    return F.normalize(torch.randn(images, width, generator=torch.Generator().manual_seed(seed)), dim=1)


def ranked(**changes: Any) -> Anchors:
    views = Views(units(0), units(1, width=6), units(2, width=6))
    return ranked_anchors(views, relation(0.2, 0.05), **{"queries": 3, "k": 4, **changes})


def relation(temperature: float, teacher_temperature: float) -> Relation:
    return Relation("a teacher", temperature, teacher_temperature, True, lambda images: Views(images, images, images))


def by_hand(queries: Tensor, memory: Tensor, temperature: float, image: int) -> list[float]:
    """The softmax of one image over all others; 0 at its own place."""
    scores = [sum(float(a) * float(b) for a, b in zip(queries[image], row, strict=True)) for row in memory]
    powers = [0.0 if i == image else math.exp(s / temperature) for i, s in enumerate(scores)]
    return [p / sum(powers) for p in powers]


# Probabilities


def test_probabilities_are_those_of_a_loop_without_oneself() -> None:
    found = anchor_probabilities(units(0)[2:5], units(0), 0.05, first=2).exp()
    for query in range(3):
        # float32 products of unit vectors, over 0.05
        assert found[query].tolist() == pytest.approx(by_hand(units(0), units(0), 0.05, query + 2), rel=1e-5)


def test_anchors_are_the_teachers_likeliest_with_both_probabilities() -> None:
    found = ranked()
    for query in range(3):
        teacher, student = by_hand(units(0), units(0), 0.05, query), by_hand(units(1, 9, 6), units(2, 9, 6), 0.2, query)
        order = sorted(range(9), key=lambda i: -teacher[i])[:4]
        assert found.rows[query].tolist() == order
        assert found.teacher[query].tolist() == pytest.approx([teacher[i] for i in order], rel=1e-5)
        assert found.student[query].tolist() == pytest.approx([student[i] for i in order], rel=1e-5)


def test_divergence_is_the_loss_that_such_runs_learn_by() -> None:
    found = ranked()
    losses = []
    for image in range(9):
        others = [i for i in range(9) if i != image]
        one = slice(image, image + 1)
        teacher, student = units(0), (units(1, 9, 6), units(2, 9, 6))
        losses.append(
            float(relation_loss(student[0][one], teacher[one], student[1][others], teacher[others], 0.2, 0.05))
        )
    assert found.divergences.tolist() == pytest.approx(losses[:3], rel=1e-4)
    assert found.divergence == pytest.approx(sum(losses) / 9, rel=1e-4)


def test_a_student_that_is_its_teacher_does_not_diverge() -> None:
    one = units(0)
    found = ranked_anchors(Views(one, one, one), relation(0.1, 0.1), queries=2, k=3)
    assert (found.divergence, found.same_first) == (0, 1)
    assert torch.equal(found.teacher, found.student)


def test_parts_of_the_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ranked(queries=7)
    monkeypatch.setattr(measured, "PART", 2 * 9)
    parts = ranked(queries=7)
    assert torch.equal(whole.rows, parts.rows)
    # float64 sums in another order
    torch.testing.assert_close(whole.student, parts.student, rtol=1e-12, atol=0)
    assert parts.divergence == pytest.approx(whole.divergence, rel=1e-12)
    assert parts.same_first == whole.same_first


def test_one_image_alone_has_no_anchors() -> None:
    with pytest.raises(ValueError, match="one image alone"):
        ranked_anchors(Views(units(0, 1), units(0, 1), units(0, 1)), relation(1, 1), queries=1, k=3)


# Teachers


def small(seed: int = 0, width: int = 16) -> Classifier:
    torch.manual_seed(seed)
    head = {"kind": "projected", "width": 8, "hidden": 16, "norm": True}
    return create_model("vit_micro_28", classes=CLASSES, depth=1, width=width, heads=2, head=head)


def shaken(objective: Objective) -> Objective:
    """As after training: the slow copy, the predictor and running means are no longer those of a new objective."""
    with torch.no_grad():
        for name, tensor in objective.state_dict().items():
            if tensor.is_floating_point() and not name.startswith("embedder."):
                tensor.add_(torch.rand_like(tensor) * 0.3)
    return objective.eval()


def images(count: int = 5) -> Tensor:
    return torch.randint(0, 256, (count, 3, 28, 28), dtype=torch.uint8)


def read(config: Any, objective: Objective) -> Relation:
    return read_relation(config, small(), objective.state_dict, torch.device("cpu"))


MOMENTUM = [
    IsdConfig(bank=16, predictor_hidden=12),
    CmsfConfig(bank=16, predictor_hidden=12),
    DinoConfig(local_views=0),
]


@pytest.mark.parametrize("config", MOMENTUM, ids=lambda config: config.kind)
def test_a_slow_copy_and_its_student_are_those_of_the_checkpoint(config: Any) -> None:
    objective: Any = shaken(build_objective(config, small(), FACTS))
    taught, some = read(config, objective), images()
    found = taught.embed(some)
    with torch.no_grad():
        copy, model = objective.target.module, objective.model
        target = F.normalize(copy.head.embed(copy.tokens(some)), dim=1)
        student = model.head.embed(model.tokens(some))
        student = F.normalize(objective.predictor(student) if hasattr(objective, "predictor") else student, dim=1)
    torch.testing.assert_close(found.teacher, target)
    torch.testing.assert_close(found.student, student)
    assert found.anchors is found.teacher
    assert taught.learned == (config.kind == "isd")
    assert not found.teacher.allclose(found.student, atol=0.1)


@pytest.mark.parametrize("queues", [1, 2])
def test_a_frozen_teacher_has_the_anchors_or_the_students_slow_copy_has(queues: int, tmp_path: Path) -> None:
    teacher = small(7, width=24)
    config = CompresConfig(teacher=str(teacher.save(tmp_path / "teacher")), queues=queues, bank=16)
    objective: Any = shaken(build_objective(config, small(), FACTS))
    found, some = read(config, objective), images()
    views = found.embed(some)
    with torch.no_grad():
        expected = F.normalize(teacher.eval().head.pooled(teacher.tokens(some)), dim=1)
        seen = objective.model.head.embed(objective.model.tokens(some))
    torch.testing.assert_close(views.teacher, expected)
    torch.testing.assert_close(views.student, F.normalize(objective.adapter(seen), dim=1).detach())
    theirs = expected if queues == 1 else objective.key.embed(some)
    torch.testing.assert_close(views.anchors, theirs)
    assert found.temperature == found.teacher_temperature == config.temperature


def test_who_has_a_teacher() -> None:
    assert has_teacher(IsdConfig())
    assert has_teacher(DistillationConfig(teacher="somewhere"))
    assert not has_teacher(SupervisedConfig())


def test_a_checkpoint_of_another_objective_is_refused_in_one_sentence() -> None:
    config = IsdConfig(bank=16, predictor_hidden=12)
    with pytest.raises(ValueError, match=r"its checkpoint has no .*, so its teacher cannot be made again"):
        read_relation(config, small(), lambda: small().state_dict(), torch.device("cpu"))


# The command

TINY: dict[str, Any] = {
    "data": {"uri": "synthetic:shapes?n=90&size=28&classes=3", "batch": 16, "workers": 0, "check": "off"},
    "optim": {"steps": 2, "warmup": 0},
    "engine": {"ema": 0, "device": "cpu"},
}
NARROW = {"name": "vit_micro_28", "trunk": {"depth": 2, "width": 32, "heads": 2}}


def trained(out: Path, base: str, **changes: Any) -> Path:
    vitrail.train(from_mapping({**TINY, **changes, "out": str(out)}, recipe(base)), quiet=True)
    return out


def test_the_command_ranks_anchors_of_an_isd_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objective = {"kind": "isd", "bank": 32, "predictor_hidden": 16}
    head = {"kind": "projected", "width": 8, "hidden": 16}
    place = trained(tmp_path / "isd", "small-isd", model={**NARROW, "head": head}, objective=objective)
    words = ["inspect", str(place), "--count", "3", "--over", "20", "--what", "anchors", "--device", "cpu"]
    assert run([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = told["models"][0]["anchors"]
    assert (found["by"], found["learned"], found["temperature"]) == ("its momentum encoder", True, 0.1)
    assert np.shape(found["rows"]) == np.shape(found["teacher"]) == np.shape(found["student"]) == (3, 6)
    assert all(image not in row for image, row in enumerate(found["rows"]))
    assert all(row == sorted(row, reverse=True) and sum(row) <= 1 + 1e-5 for row in found["teacher"])
    page = (place / "inspect" / "inspect.html").read_text(encoding="utf-8")
    assert "Anchors ranked by the teacher" in page
    assert "temperatures 0.01 and 0.1. This is what the run learned." in page
    assert (place / "inspect" / "anchors-0.png").is_file()


def test_without_a_teacher_there_is_a_sentence_and_only_for_who_asked(tmp_path: Path) -> None:
    place = trained(tmp_path / "plain", "demo", model=NARROW)
    options: dict[str, Any] = {"count": 2, "over": 4, "judge": 0, "device": "cpu", "out": tmp_path / "out"}
    asked, _ = inspect_models([place], what=["anchors"], **options)
    assert asked.notes == ("no ranked anchors: the run's objective, supervised, has no teacher to rank them",)
    alone, _ = inspect_models([place / "model"], what=["anchors"], **options)
    assert alone.notes == asked.notes
    everything, _ = inspect_models([place], **options)
    assert everything.notes == ()
    unknown, _ = inspect_models([small()], what=["anchors"], data="synthetic:shapes?n=60&size=28&classes=3", **options)
    assert unknown.notes == ("no ranked anchors: it is no run, so nothing is known of a teacher",)


def test_a_distilled_run_is_compared_until_its_teacher_is_gone(tmp_path: Path) -> None:
    classes = open_data(TINY["data"]["uri"]).classes
    teacher = create_model("vit_micro_28", classes=classes, depth=1, width=32, heads=2)
    stored = teacher.save(tmp_path / "teacher")
    objective = {"kind": "distillation", "teacher": str(stored)}
    place = trained(tmp_path / "student", "demo", model=NARROW, objective=objective)
    options: dict[str, Any] = {"count": 2, "over": 9, "judge": 0, "device": "cpu", "out": tmp_path / "out"}
    found, folder = inspect_models([place], what=["anchors"], **options)
    ranked = found.subjects[0].anchors
    assert ranked is not None
    assert (ranked.relation.learned, ranked.relation.who, ranked.images) == (False, str(stored), 9)
    assert "The run learned from it otherwise." in (folder / "inspect.html").read_text(encoding="utf-8")
    stored.rename(tmp_path / "moved")
    lost, _ = inspect_models([place], **options)
    assert lost.subjects[0].anchors is None
    assert lost.notes == (f"no ranked anchors: no run or model folder, and no weights file, at {stored}",)
