"""The study of learning without labels makes every row once, goes on where it was, and prints what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from study_calls import STUDIES, call, rows

BENCHMARKS = STUDIES.parent / "benchmarks"
METHODS = ["byol-asym, s/s", "moco, s/s", "isd, s/s", "msf, w/s", "cmsf, w/s"]
COMPRES = ["compres, one queue", "compres, two queues"]
SETTINGS = ["rate 0.05", "rate 0.2", "rate 0.05, last norm", "rate 0.2, last norm"]
WANTED = {  # (table, subject) -> rows
    **{("settings", each): [m for m in METHODS if "isd" not in m] + ["cmsf by label, w/s"] for each in SETTINGS},
    ("settings", "rate 0.05"): [*METHODS, "cmsf by label, w/s"],  # ISD has rates of its own, and no last norm
    ("settings", "rate 0.01"): ["isd, s/s"],
    **{("rates", each): ["from scratch, moco"] for each in SETTINGS},
    **{("rates", f"rate {each}, temperature 0.02"): COMPRES for each in ("0.05", "0.2")},
    **{("rates", f"rate {each}"): ["regression"] for each in ("0.001", "0.004")},
    **{("rates", f"rate {each}"): ["regression, batch norm"] for each in ("0.1", "0.4")},
    ("main", "resnet18"): ["untrained", *METHODS, "msf, s/s"],
    ("vit", "vit_tiny_32"): ["untrained", *METHODS],
    ("cifar10", "resnet18"): METHODS,
    ("students", "resnet18"): ["the teacher, moco"],
    ("students", "resnet20"): [
        "from scratch, labels",
        "from scratch, moco",
        "regression",
        "regression, batch norm",
        *COMPRES,
    ],
    ("attention", "vit_tiny_32"): ["labels alone", "copied", "distilled"],
    ("noise", "cross entropy"): ["0 % wrong", "25 % wrong", "50 % wrong"],
    ("noise", "cmsf, nearest 10 of the label"): ["0 % wrong", "25 % wrong", "50 % wrong"],
    ("noise", "cmsf, all of the label"): ["0 % wrong", "25 % wrong", "50 % wrong"],
    ("coarse", "cross entropy"): ["coarse labels"],
    ("coarse", "cmsf, all of the label"): ["coarse labels"],
    ("coarse", "cmsf, nearest 10 of the label"): ["coarse labels"],
    ("tail", "resnet18"): ["moco, s/s", "isd, s/s"],
    ("time", "resnet18"): [*METHODS, "cross entropy"],
}


study = partial(call, STUDIES / "selfsupervised.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the smoke run of one seed wrote."""
    out = tmp_path_factory.mktemp("study")
    study("--smoke", "--seeds", "1", "--out", str(out))
    return out


@pytest.mark.slow
def test_every_row_is_there_once(folder: Path) -> None:
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows(folder):
        assert "failed" not in row, row
        if row["table"] != "about":
            found.setdefault((row["table"], row["subject"]), []).append(row["what"])
    assert found == WANTED


@pytest.mark.slow
def test_a_second_call_makes_nothing_again(folder: Path) -> None:
    before = (folder / "found.jsonl").read_bytes()
    study("--smoke", "--seeds", "1", "--out", str(folder))
    assert (folder / "found.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_teacher_that_was_lost_is_trained_again_to_the_same_weights(folder: Path, tmp_path: Path) -> None:
    kept = [line for line in (folder / "found.jsonl").read_text().splitlines() if '"students"' not in line]
    (tmp_path / "found.jsonl").write_text("\n".join(kept) + "\n")
    study("--smoke", "--seeds", "1", "--out", str(tmp_path), "--part", "students")
    added = rows(tmp_path)[len(kept) :]
    assert [row["table"] for row in added] == ["teacher", *["students"] * 7]
    name = "models/moco-resnet-seed0/model.safetensors"  # in the settings that were chosen before
    assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.slow
def test_tables_have_every_row(folder: Path) -> None:
    text = study("--table", str(folder))
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| | |")]
    assert len(lines) == sum(len(each) for each in WANTED.values())
    assert text.count("### ") == len({table for table, _ in WANTED})
    assert "A smoke run" in text


@pytest.mark.slow
def test_a_row_has_the_settings_that_are_best_by_validation_images(folder: Path, tmp_path: Path) -> None:
    """Other validation figures, another model: what is chosen is what the rows say, and one that lacks is made."""
    kept = [row for row in rows(folder) if row["table"] == "settings"]
    found = {}
    for best in SETTINGS[1:3]:
        out = tmp_path / best.replace(" ", "-")
        out.mkdir()
        told = [{**row, "val_knn20": float(row["subject"] == best)} for row in kept]
        told = [row for row in told if (row["subject"], row["what"]) != (SETTINGS[0], "moco, s/s")]
        (out / "found.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
        study("--smoke", "--seeds", "1", "--out", str(out), "--part", "main", "--of", "moco")
        added = [(row["table"], row["subject"]) for row in rows(out)[len(told) :] if row["table"] != "about"]
        assert added == [("settings", SETTINGS[0]), ("main", "resnet18")]
        with safe_open(out / "models/moco-resnet-seed0/model.safetensors", "pt") as file:
            found[best] = [name for name in file.keys() if "running_mean" in name and "projector" in name]  # noqa: SIM118
    assert [len(names) for names in found.values()] == [1, 2]  # inside the projector, and behind it


@pytest.fixture
def of_study(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The study's own modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(STUDIES))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if (STUDIES / f"{name}.py").is_file():
            del sys.modules[name]


def test_images_are_shared_by_runs_on_the_same_rows_alone(of_study: None) -> None:
    from selfsupervised_runs import Runs

    from vitrail.data.config import DataConfig, PreprocessConfig

    runs, plain = Runs(limit=100), DataConfig(uri="synthetic:shapes?n=200&size=32&classes=12")
    size = PreprocessConfig(size=32)
    true, wrong = (runs.data(chosen)["train"].labels for chosen in (plain, replace(plain, label_noise=0.5)))
    assert (true != wrong).any()
    assert runs.images(replace(plain, label_noise=0.5), size) is runs.images(plain, size)
    assert runs.images(replace(plain, long_tail=2.0), size) is not runs.images(plain, size)


@pytest.mark.slow
def test_a_run_with_compiled_trunks_is_the_run_without(of_study: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import selfsupervised as script
    import selfsupervised_runs as module

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain = module.compiled_networks
    runs = module.Runs(limit=100)
    config = script.Study(runs, None, [script.SMOKE_DATA], Path(), 1.0, True).config("small-msf", "main", script.RESNET)
    states = []
    for wanted in (False, True):
        monkeypatch.setattr(module, "compiled_networks", lambda o, _, wanted=wanted: plain(o, wanted))
        done = runs.trained(config, 0)
        assert "tokens" not in vars(done.model)
        states.append({**done.model.state_dict(), **done.objective.target.state_dict(prefix="slow.")})
    for name, value in states[0].items():
        # Kernels are the same, in another order where gradients are summed: two steps of float32 rounding.
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
def test_the_benchmark_of_the_bank_prints_a_line_for_every_bank(tmp_path: Path) -> None:
    text = call(BENCHMARKS / "bank.py", "--smoke", "--device", "cpu", "--out", str(tmp_path / "bank.md"))
    named = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ") and " x " in line]
    assert named == [f"{count} x 512, {kind}" for count in ("256", "2,048") for kind in ("bf16", "float32")]
    assert (tmp_path / "bank.md").read_text().strip() == text.strip()
