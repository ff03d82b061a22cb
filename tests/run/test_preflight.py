"""What cannot be carried out is said before any image is read, and nothing is left behind.

Images here are files that nobody can decode: whatever reads one of them complains of images, and of nothing else.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from vitrail.cli import run
from vitrail.config import from_mapping
from vitrail.files import reject_unwritable
from vitrail.model.build import create_model
from vitrail.run.evaluate import evaluate, sweep

TINY = "--model.name vit_micro_28 --model.trunk.depth 1 --model.trunk.width 32 --model.trunk.heads 2 --optim.steps 1"
ABSENT = "mps" if torch.cuda.is_available() else "cuda"
TAUGHT = "--objective.kind distillation --objective.teacher"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Class folders of images that cannot be read."""
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(10):
            (tmp_path / "photos" / name / f"{i}.jpg").write_bytes(b"no image")
    return tmp_path / "photos"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A saved model of the classes of `broken`."""
    made = create_model("vit_micro_28", classes=("cat", "dog"), depth=1, width=32, heads=2)
    return made.save(tmp_path / "saved")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file, an empty folder, and a run that never finished."""
    place = tmp_path / "here"
    (place / "empty").mkdir(parents=True)
    (place / "file").write_text("nothing")
    (place / "begun").mkdir()
    (place / "begun" / "config.yaml").write_text("recipe: vit")
    monkeypatch.chdir(place)
    return place


def said(capsys: pytest.CaptureFixture[str], words: str) -> str:
    """What a command that is refused says, in one sentence."""
    assert run(words.split()) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert "Errno" not in text
    return text


def left(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def test_without_another_problem_images_are_read_and_complained_of(broken: Path, here: Path, capsys: Any) -> None:
    assert "20 of 20 images (100.0 %) cannot be read" in said(capsys, f"train vit --data {broken} {TINY}")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--out file/run", "nothing can be written to file/run: file is a file; choose another --out"),
        ("--out file", "file already exists; choose another --out"),
        (f"{TAUGHT} gone", "objective.teacher: there is nothing at gone; name a finished run"),
        (f"{TAUGHT} empty", "objective.teacher: empty is no run and no model folder; name a finished run"),
        (f"{TAUGHT} begun", "objective.teacher: begun is a run that has not finished; continue it"),
        (f"{TAUGHT} file", "objective.teacher: file is damaged or no weights file"),
        (f"{TAUGHT} timm:deit_smal", "has no model 'deit_smal'; did you mean 'deit_small_"),
        (f"{TAUGHT} timm:resnet18.no", "timm has no published weights of resnet18.no"),
        ("--objective.kind simreg", "objective.teacher: name one"),
        ("--model.weights gone", "model.weights: 'gone' is neither none, timm nor an existing run"),
        ("--model.weights empty", "model.weights: empty is no run and no model folder"),
        ("--model.weights file", "model.weights: file is damaged or no weights file"),
        ("--model.weights timm", "model.weights: no published weights for vit_micro_28; set none"),
        (f"--engine.device {ABSENT}", f"engine.device: {ABSENT}, but torch sees n"),
    ],
)
def test_train_refuses_before_images_are_read(
    broken: Path, here: Path, capsys: pytest.CaptureFixture[str], flags: str, sentence: str
) -> None:
    before = left(here)
    assert sentence in said(capsys, f"train vit --data {broken} {TINY} {flags}")
    assert left(here) == before


def test_what_is_missing_is_said_all_at_once(broken: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, f"train vit --data {broken} {TINY} {TAUGHT} gone --model.weights empty --evaluators top")
    assert text.startswith("vitrail: 3 problems:")


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_place_that_may_not_be_written_to_is_refused_first(
    broken: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(path: object, mode: int = 0o777) -> None:
        raise OSError(error, os.strerror(error), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)  # a test that runs as root may write anywhere
    for out, name in (("--out fresh/run", "fresh/run"), ("", "runs")):
        text = said(capsys, f"train vit --data {broken} {TINY} {out}")
        assert f"nothing can be written to {name}: {os.strerror(error)}" in text


def test_looking_whether_a_place_can_be_written_to_leaves_nothing(tmp_path: Path) -> None:
    reject_unwritable(tmp_path / "a" / "b")
    reject_unwritable(tmp_path / "c.png", file=True)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder, and a file is to be written"):
        reject_unwritable(tmp_path, file=True)


@pytest.mark.parametrize(
    "words",
    [
        "export gone file/model.pt2",
        "augment gone file/more --method strong --each 1",
        "check gone --out file/sheet.png",
        "pack gone file/packed",
        "bench deit_smal --out file/chart.svg",
    ],
)
def test_a_place_is_looked_at_before_what_is_to_be_read(here: Path, capsys: Any, words: str) -> None:
    """Both are wrong: the place to write is what is said."""
    assert "file is a file" in said(capsys, words)


def test_inspect_looks_at_its_place_before_images(broken: Path, model: Path, here: Path, capsys: Any) -> None:
    assert "none of the images" in said(capsys, f"inspect {model} --data {broken} --out page")
    assert "file is a file" in said(capsys, f"inspect {model} --data {broken} --out file")


def test_a_second_data_set_that_is_not_there_is_said_before_the_first_is_read(broken: Path, model: Path) -> None:
    with pytest.raises(ValueError, match="none of the 2 images of test could be read"):
        evaluate(model, broken, workers=0)
    with pytest.raises(FileNotFoundError, match="no data at"):
        sweep(model, [broken, broken.parent / "gone"], workers=0)


def test_a_patch_that_is_not_there_is_said_before_images_are_read(broken: Path, tmp_path: Path, capsys: Any) -> None:
    adaptive = create_model(
        "vit_micro_28", classes=("cat", "dog"), depth=3, width=32, heads=2, adaptive={"kind": "ats"}
    ).save(tmp_path / "ats")
    text = said(capsys, f"evaluate {adaptive} --data {broken} --attack {tmp_path / 'gone'}")
    assert "no patch in" in text


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("--method genie --model gone", "no model at gone"),
        ("--method genei", "did you mean 'genie'"),
        ("--method genie", "needs a model that makes images"),
    ],
)
def test_augment_refuses_what_makes_images_before_data_are_opened(
    here: Path, capsys: pytest.CaptureFixture[str], method: str, sentence: str
) -> None:
    assert sentence in said(capsys, f"augment gone more --each 1 {method}")


def test_a_loop_over_what_is_no_run_does_not_advise_to_continue_it(here: Path, capsys: Any) -> None:
    assert "no model at gone" in said(capsys, "augment gone more --loop --method strong --each 1")


STUDY = """
base: {{recipe: vit, data: {{uri: {data}, batch: 4}}, optim: {{steps: 1}}}}
budget: none
seeds: 1
variants:
  plain: {{}}
  taught: {{objective: {{kind: distillation, teacher: {teacher}}}}}
"""


def test_a_study_refuses_a_missing_teacher_before_its_first_run(broken: Path, here: Path, capsys: Any) -> None:
    (here / "study.yaml").write_text(STUDY.format(data=broken, teacher="gone"))
    before = left(here)
    assert "variants.taught.objective.teacher: there is nothing at gone" in said(capsys, "compare study.yaml")
    assert left(here) == before


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [("--also gone", "no data at 'gone'"), ("--out file", "file is a file; choose another --out")],
)
def test_a_study_refuses_a_missing_test_set_and_place_before_its_first_run(
    broken: Path, model: Path, here: Path, capsys: pytest.CaptureFixture[str], flags: str, sentence: str
) -> None:
    (here / "study.yaml").write_text(STUDY.format(data=broken, teacher=model))
    before = left(here)
    assert sentence in said(capsys, f"compare study.yaml {flags}")
    assert left(here) == before


# A run and its data, seen from elsewhere


@pytest.fixture
def moved(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose settings name its data relative to where it was begun, and a working directory elsewhere."""
    monkeypatch.chdir(photos.parent)
    run_folder = tmp_path / "run"
    words = f"train vit --data {photos.name} {TINY} --data.batch 16 --data.workers 0 --out {run_folder} --json"
    assert run(words.split()) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return run_folder


def test_data_of_a_run_that_are_not_found_from_here_are_told_with_what_to_do(
    moved: Path, photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, remedy in ((f"inspect {moved}", "--data URI"), (f"train --resume {moved}", "where the run was begun")):
        text = said(capsys, words)
        assert f"the data of {moved}, {photos.name}, are not found from {Path.cwd()}" in text
        assert remedy in text
        assert "VITRAIL_DATA" in text
    monkeypatch.setenv("VITRAIL_DATA", str(photos.parent))
    assert run(["inspect", str(moved), "--what", "attention", "--over", "2", "--count", "1", "--json"]) == 0


def test_a_configuration_with_a_teacher_that_is_gone_can_still_be_read() -> None:
    """Runs are compared and shown long after their teachers were thrown away."""
    values = {"data": "photos", "objective": {"kind": "distillation", "teacher": "gone"}}
    assert from_mapping(values).objective.kind == "distillation"


# Models without classes


def test_classes_that_a_model_does_not_know_are_told_with_what_can_be_judged(broken: Path, tmp_path: Path) -> None:
    other = create_model("vit_micro_28", classes=("a", "b"), depth=1, width=32, heads=2)
    with pytest.raises(ValueError, match=r"it knows a, b; .*--protocol knn,linear"):
        evaluate(other, broken)
    unlabelled = create_model("vit_micro_28", classes=("unlabelled",), depth=1, width=32, heads=2)
    with pytest.raises(ValueError, match="it learned without labels and knows none"):
        evaluate(unlabelled, broken)


def test_no_evidence_for_a_class_is_shown_of_a_model_that_knows_none(photos: Path, tmp_path: Path) -> None:
    from vitrail.inspect.run import inspect_models

    unlabelled = create_model("vit_micro_28", classes=("unlabelled",), depth=1, width=32, heads=2)
    found, _ = inspect_models([unlabelled], data=photos, count=2, over=4, out=tmp_path / "page")
    assert found.subjects[0].evidence is None
    assert any("learned without labels" in note for note in found.notes)
