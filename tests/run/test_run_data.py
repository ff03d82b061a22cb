"""A run is judged by images that it did not learn from, whoever asks and however its data were divided."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from vitrail.cli import run
from vitrail.config import from_mapping
from vitrail.data.open import open_data
from vitrail.measure.evaluator import read_predictions
from vitrail.registry import PARTS
from vitrail.run.evaluate import evaluate, load
from vitrail.run.protocols import ensemble, evaluate_protocols
from vitrail.run.run_data import division, open_for, own_uri

SMALL = (
    "--model.name vit_micro_28 --model.trunk.depth 1 --model.trunk.width 32 --model.trunk.heads 2 --data.workers 0 "
    "--data.batch 16 --optim.steps 2 --optim.warmup 0"
)
DIVIDED = {"val_fraction": 0.15, "test_fraction": 0.3, "split_seed": 5}


@pytest.fixture(scope="module")
def made(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that divided undivided photographs in its own way."""
    out = tmp_path_factory.mktemp("runs") / "run"
    flags = " ".join(f"--data.{name} {value}" for name, value in DIVIDED.items())
    assert run(f"train vit --data {photos} {SMALL} {flags} --out {out} --json".split()) == 0
    return out


def test_the_three_settings_that_divide_are_those_of_the_configuration() -> None:
    assert division(from_mapping({"data": {"uri": "x", **DIVIDED}}).data) == DIVIDED


def test_images_to_judge_by_are_those_the_run_held_out(made: Path, photos: Path) -> None:
    held_out = read_predictions(made).index
    assert sorted(held_out.tolist()) == sorted(open_data(photos, **DIVIDED)["test"].index.tolist())
    assert set(held_out.tolist()) & set(
        open_data(photos)["train"].index.tolist()
    )  # by default it would learn from some
    _, said, split = evaluate(made, photos)
    assert split == "test"
    assert said.index.tolist() == held_out.tolist()
    assert said.logits.shape == (18, 3)  # 0.3 of 60 photographs


def test_every_part_is_divided_as_the_run_did(made: Path, photos: Path) -> None:
    ours, theirs = open_for(load(made), photos), open_data(photos, **DIVIDED)
    assert {name: split.index.tolist() for name, split in ours.splits.items()} == {
        name: split.index.tolist() for name, split in theirs.splits.items()
    }


def test_protocols_look_at_the_same_images(made: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counted(*args: object, **options: object) -> dict[str, object]:
        seen.extend(int(i) for batch in args[1].loaders["test"] for i in batch.index)  # type: ignore[attr-defined]
        return {"numbers": {}, "tables": {}, "pictures": {}}

    monkeypatch.setitem(PARTS["evaluator"], "members", ("members", counted))
    evaluate_protocols(made, photos, ["members"])
    assert seen == read_predictions(made).index.tolist()


def test_without_data_a_run_is_judged_by_its_own(made: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert own_uri(made) == str(photos)
    found = []
    for words in (["evaluate", str(made), "--json"], ["evaluate", str(made), "--data", str(photos), "--json"]):
        assert run(words) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    final = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()][-1]
    assert found[0]["loss"] == pytest.approx(final["loss"], abs=1e-6)


def test_a_model_that_does_not_say_what_it_learned_from_is_told(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "model", tmp_path / "model")
    described = json.loads((tmp_path / "model" / "model.json").read_text())
    del described["stated"]["data"]
    (tmp_path / "model" / "model.json").write_text(json.dumps(described))
    assert run(["evaluate", str(tmp_path / "model")]) == 2
    assert "does not say which data it learned from; name some: --data URI" in capsys.readouterr().err


def test_data_that_are_not_where_the_run_found_them_are_told(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "model", tmp_path / "model")
    described = (tmp_path / "model" / "model.json").read_text()
    stated = json.loads(described)
    stated["stated"]["data"] = "photos-elsewhere"
    (tmp_path / "model" / "model.json").write_text(json.dumps(stated))
    assert run(["evaluate", str(tmp_path / "model")]) == 2
    assert "photos-elsewhere, are not found from" in capsys.readouterr().err


def test_runs_that_divided_differently_are_no_ensemble(made: Path, photos: Path, tmp_path: Path) -> None:
    other, same = tmp_path / "other", tmp_path / "same"
    flags = "--data.val_fraction 0.15 --data.test_fraction 0.3 --data.split_seed"
    for out, seed in ((other, 6), (same, 5)):
        assert run(f"train vit --data {photos} {SMALL} {flags} {seed} --seed 1 --out {out} --json".split()) == 0
    with pytest.raises(
        ValueError, match=r"divided .* differently .* one learned from images that the other is evaluated"
    ):
        ensemble([made, other], photos)
    assert ensemble([made, same], photos).split == "test"
    # Data that come divided are the same for both.
    assert ensemble([made, other], divided(photos, tmp_path)).split == "test"


WEIGHTS, TEACHER = "--model.weights", "--objective.kind distillation --objective.teacher"


@pytest.mark.parametrize(
    ("flags", "leaks", "setting"),
    [
        ("--data.split_seed 5 --data.val_fraction 0.15 --data.test_fraction 0.3", False, WEIGHTS),
        ("--data.split_seed 6", True, WEIGHTS),
        ("--data.split_seed 5 --data.val_fraction 0.15 --data.test_fraction 0.3", False, TEACHER),
        ("--data.split_seed 5 --data.val_fraction 0.3 --data.test_fraction 0.3", True, TEACHER),
    ],
    ids=["alike", "another seed", "a teacher, alike", "a teacher, a larger val"],
)
def test_a_teacher_or_weights_that_learned_from_what_is_held_out_are_told(
    made: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, leaks: bool, setting: str
) -> None:
    theirs = set(open_data(photos, **DIVIDED)["train"].index.tolist())
    chosen = from_mapping({"data": {"uri": str(photos), **settings(flags)}}).data
    ours = open_data(photos, **division(chosen))
    held = [*ours["val"].index.tolist(), *ours["test"].index.tolist()]
    known = len(theirs.intersection(held))
    assert bool(known) == leaks
    assert run(f"train vit --data {photos} {SMALL} {flags} {setting} {made} --out {tmp_path / 'run'}".split()) == 0
    told = f"may have learned from {known} of the {len(held)} images that this run holds out"
    assert (told in capsys.readouterr().err.replace("\n", " ")) == leaks


def settings(flags: str) -> dict[str, float]:
    words = flags.replace("--data.", "").split()
    return {
        name: float(value) if "." in value else int(value) for name, value in zip(words[::2], words[1::2], strict=True)
    }


def divided(photos: Path, place: Path) -> Path:
    """The photographs with a test split of their own."""
    rows = [
        f"{photos / name / f'{i:02d}.jpg'},{name},{'test' if i < 5 else 'train'}"
        for name in ("blue", "green", "red")
        for i in range(20)
    ]
    table = place / "labels.csv"
    table.write_text("\n".join(["path,label,split", *rows]))
    return table
