"""`vitrail check --model`: planted label errors are found, written to a table, and fixed by it."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from vitrail.cli import run
from vitrail.config import RunConfig
from vitrail.data.check.check import CheckReport, Finding, check_data
from vitrail.data.dataset import DataSet
from vitrail.data.open import open_data
from vitrail.model.build import create_model
from vitrail.model.weights import load_model
from vitrail.run import check_labels as module
from vitrail.run.check_labels import check_labels
from vitrail.run.run_data import open_run

EMPTY = CheckReport("", {}, 3, ())


def planted(photos: Path, root: Path) -> Path:
    """The coloured photographs, two of which are in the wrong class folder."""
    shutil.copytree(photos, root)
    (root / "red" / "00.jpg").rename(root / "blue" / "a red one.jpg")
    (root / "green" / "01.jpg").rename(root / "red" / "a green one.jpg")
    return root


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """Untrained: its embeddings tell colours apart."""
    return create_model("cifar_resnet20", classes=("a", "b"), image_size=32).save(tmp_path / "network")


def named(report: CheckReport, check: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.check == check]


def of_model(report: CheckReport, data: DataSet) -> dict[str, str]:
    found = [s for s in report.suspects if s.reason == "probably mislabelled"]
    return {Path(data[s.split].keys[s.row]).name: s.proposed for s in found}


def test_planted_errors_are_found_with_their_class_in_all_splits(photos: Path, tmp_path: Path, network: Path) -> None:
    data = open_data(planted(photos, tmp_path / "data"))
    report = check_labels(data, EMPTY, str(network))
    assert of_model(report, data) == {"a red one.jpg": "red", "a green one.jpg": "green"}
    (finding,) = named(report, "probably mislabelled")
    assert (finding.level, finding.count) == ("warning", 2)
    assert any(text.endswith("a red one.jpg (blue, probably red)") for text in finding.examples)
    assert all(0 <= s.score < 0.5 for s in report.suspects if s.proposed)


def test_findings_are_added_to_those_of_the_images(photos: Path, tmp_path: Path, network: Path) -> None:
    data = open_data(planted(photos, tmp_path / "data"))
    before = check_data(data)
    report = check_labels(data, before, str(network))
    assert report.findings[: len(before.findings)] == before.findings
    assert len(report.suspects) == len(before.suspects) + 2
    assert named(report, "memorised labels") == []
    assert named(report, "classes hard to tell apart") == []


def test_classifiers_that_contradict_most_labels_give_a_note(photos: Path, tmp_path: Path, network: Path) -> None:
    files = sorted((photos / "red").iterdir())
    labels = np.random.default_rng(0).integers(0, 4, len(files))
    (tmp_path / "data.csv").write_text(
        "path,label\n" + "".join(f"{f},{c}\n" for f, c in zip(files, labels, strict=True))
    )
    report = check_labels(open_data(tmp_path / "data.csv", val_fraction=0), EMPTY, str(network))
    assert [finding.level for finding in named(report, "probably mislabelled")] == ["note"]


def test_unreadable_images_are_passed_over(photos: Path, tmp_path: Path, network: Path) -> None:
    root = planted(photos, tmp_path / "data")
    (root / "blue" / "000.jpg").write_text("no image")  # the first row
    data = open_data(root)
    assert of_model(check_labels(data, EMPTY, str(network)), data).keys() == {"a red one.jpg", "a green one.jpg"}


def test_an_image_like_no_other_is_named(photos: Path, tmp_path: Path, network: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(photos, root)
    stripes = np.zeros((40, 48, 3), np.uint8)
    stripes[::2] = 255
    Image.fromarray(stripes).save(root / "green" / "stripes.png")
    report = check_labels(open_data(root), EMPTY, str(network))
    (finding,) = named(report, "unlike all others")
    assert finding.level == "note"
    assert finding.examples[0].endswith("green/stripes.png (green)")


def test_classes_of_equal_images_are_hard_to_tell_apart(photos: Path, tmp_path: Path, network: Path) -> None:
    root = tmp_path / "data"
    for name, colour in (("red", "red"), ("crimson", "red"), ("blue", "blue")):
        (root / name).mkdir(parents=True)
        for file in sorted((photos / colour).iterdir())[::2] if name == "crimson" else (photos / colour).iterdir():
            shutil.copy(file, root / name / file.name)
    for file in sorted((photos / "red").iterdir())[::2]:
        (root / "red" / file.name).unlink()
    (finding,) = named(check_labels(open_data(root), EMPTY, str(network)), "classes hard to tell apart")
    assert finding.count == 1
    assert finding.examples[0].startswith("crimson and red (")


def test_labels_of_several_per_image(photos: Path, tmp_path: Path, network: Path) -> None:
    lines = ["path,label"]
    for name in ("blue", "green", "red"):
        label = "red|warm" if name == "red" else f"{name}|"
        lines += [f"{file},{label}" for file in sorted((photos / name).iterdir())]
    lines[5] = lines[5].removesuffix("blue|") + "blue|warm"
    (tmp_path / "data.csv").write_text("\n".join(lines))
    data = open_data(tmp_path / "data.csv")
    assert of_model(check_labels(data, EMPTY, str(network)), data) == {"04.jpg": "blue"}


@pytest.mark.parametrize(
    ("stated", "memorised"),
    [
        ({"needs_labels": True}, True),
        ({"needs_labels": False}, False),
        ({"recipe": "vit"}, True),  # earlier versions stated the recipe only
        ({"recipe": "small-moco"}, False),
        ({"recipe": "of my own"}, True),
        ({"needs_labels": True, "data": "/elsewhere"}, False),
    ],
)
def test_a_model_that_learned_these_labels_says_so(
    photos: Path, network: Path, tmp_path: Path, stated: dict[str, object], memorised: bool
) -> None:
    model = load_model(network)
    model.stated = {"data": str(photos), **stated}
    model.save(tmp_path / "stated")
    report = check_labels(open_data(photos), EMPTY, str(tmp_path / "stated"))
    assert len(named(report, "memorised labels")) == memorised


def test_runs_state_whether_labels_were_used(photos: Path, tmp_path: Path) -> None:
    words = f"--data {photos} --data.batch 16 --optim.steps 1 --data.workers 0 --json"
    small = "--model.name vit_micro_28 --model.trunk.depth 1 --model.trunk.width 32 --model.trunk.heads 2"
    for recipe, flags in (("vit", small), ("small-moco", "")):
        out = tmp_path / recipe
        assert run(["train", recipe, *words.split(), *flags.split(), "--out", str(out)]) == 0
        assert load_model(out).stated["needs_labels"] == (recipe == "vit")


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Configurations of all trainings that were begun."""
    begun: list[RunConfig] = []
    train: Callable = module.train

    def recorded(config: RunConfig, **options: bool):
        begun.append(config)
        return train(config, **options)

    monkeypatch.setattr(module, "train", recorded)
    return begun


def test_auto_learns_without_labels_once(
    photos: Path, tmp_path: Path, trainings: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    root = planted(photos, tmp_path / "data")
    (root / "blue" / "000.jpg").write_text("no image")
    data = open_data(root)
    report = check_labels(data, EMPTY, "auto", epochs=2, quiet=False)
    assert of_model(report, data).keys() >= {"a red one.jpg", "a green one.jpg"}
    (config,) = trainings
    assert not config.objective.needs_labels()
    assert (config.data.uri, config.optim.epochs) == (str(root), 2)
    err = capsys.readouterr().err
    assert "training embeddings of 49 images without labels: small-moco, 2 epochs" in err
    assert "trained in 0:" in err
    assert of_model(check_labels(data, EMPTY, "auto", epochs=2), data) == of_model(report, data)
    assert len(trainings) == 1  # read from the cache
    assert named(report, "memorised labels") == []


def test_five_trainings_give_probabilities_of_images_that_they_have_not_seen(
    photos: Path, tmp_path: Path, trainings: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = planted(photos, tmp_path / "data")
    (root / "blue" / "000.jpg").write_text("no image")
    data, seen = open_data(root), []
    held_out: Callable = module.held_out

    def recorded(*arguments):
        blocks = held_out(*arguments)
        seen.extend(blocks())
        return blocks

    monkeypatch.setattr(module, "held_out", recorded)
    model = {"name": "vit_micro_28", "trunk": {"depth": 1, "width": 32, "heads": 2}}
    settings = {"recipe": "vit", "model": model, "optim": {"lr": 3e-3}, "data": {"workers": 0, "batch": 8}}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    report = check_labels(data, EMPTY, str(tmp_path / "settings.yaml"), epochs=6)
    assert [config.data.fold for config in trainings] == [f"{number}/5" for number in range(1, 6)]
    rows = torch.cat([rows for rows, _ in seen])
    readable = sum(map(len, data.splits.values())) - 1
    assert sorted(rows.tolist()) == list(range(readable))  # each once
    for _, probabilities in seen:
        torch.testing.assert_close(probabilities.sum(1), torch.ones(len(probabilities)))
    for config in trainings:
        divided = open_run(config.data)
        assert not {*divided["val"].keys} & {*divided["train"].keys}
        assert not config.calibrate
    assert of_model(report, data).keys() >= {"a red one.jpg", "a green one.jpg"}
    assert named(report, "memorised labels") == []
    check_labels(data, EMPTY, str(tmp_path / "settings.yaml"), epochs=6)
    assert len(trainings) == 5  # read from the cache


def test_a_recipe_without_labels_gives_no_probabilities(photos: Path) -> None:
    with pytest.raises(ValueError, match=r"small-moco learns without labels, so it gives no probabilities.*name auto"):
        check_labels(open_data(photos), EMPTY, "small-moco")


def test_images_without_labels_are_rejected(tmp_path: Path, network: Path) -> None:
    for i in range(4):
        Image.new("RGB", (32, 32), (i, 0, 0)).save(tmp_path / f"{i}.png")
    with pytest.raises(ValueError, match="has no labels to check; leave out --model"):
        check_labels(open_data(tmp_path), EMPTY, str(network))


def test_the_command_writes_sheet_and_table_and_applies_its_fixes(
    photos: Path, tmp_path: Path, network: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, table, sheet = planted(photos, tmp_path / "data"), tmp_path / "suspects.csv", tmp_path / "sheet.png"
    words = ["check", str(root), "--model", str(network), "--csv", str(table), "--out", str(sheet), "--json"]
    assert run(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"probably mislabelled"} <= {finding["check"] for finding in report["findings"]}
    assert sheet.stat().st_size > 1000
    with table.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["path", "index", "split", "label", "proposed", "score", "reason", "fix"]
    wrong = {row["path"]: row for row in rows if row["reason"] == "probably mislabelled"}
    assert wrong["blue/a red one.jpg"]["label"] == "blue"
    assert all(not row["fix"] for row in rows)
    for row in wrong.values():
        row["fix"] = "remove" if "green" in row["path"] else row["proposed"]
    with table.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    out = tmp_path / "corrected.csv"
    assert run(["check", str(root), "--apply", str(table), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(out), "images": 59, "changed": 1, "removed": 1}
    before, after = open_data(root), open_data(out)
    assert after.classes == before.classes
    for name, split in after.splits.items():
        keys = [Path(key).name for key in split.keys]
        assert "a green one.jpg" not in keys
        if "a red one.jpg" in keys:
            assert after.classes[split.labels[keys.index("a red one.jpg")]] == "red"
        assert len(split) == len(before[name]) - ("red/a green one.jpg" in before[name].keys)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--apply", "x.csv"], "--apply writes a table to --out CORRECTED.csv"),
        (["--apply", "x.csv", "--out", "y.csv", "--model", "auto"], "takes neither --model nor --csv"),
        (["--model", "/nowhere"], "no model at"),
    ],
)
def test_what_the_command_cannot_do_is_said_in_one_line(
    photos: Path, flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", str(photos), *flags]) == 2
    assert sentence in capsys.readouterr().err
