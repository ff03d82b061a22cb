"""File and class names of any bytes go through every command: what is written is read back as it was."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from stopping import stop_after

import vitrail
from vitrail.cli import run as command
from vitrail.config import load_yaml
from vitrail.files import json_text, readable, write_text

TINY = (
    "--model.name vit_micro_28 --model.trunk.depth 1 --model.trunk.width 16 --model.trunk.heads 1 --data.workers 0 "
    "--data.batch 16 --optim.steps 4 --optim.warmup 0 --engine.device cpu --data.bad_limit 0.5"
)
NAMES = {
    "blue": os.fsdecode(b"caf\xe9"),  # Latin-1
    "green": "a\nb'\"<b>|,;\u202eRTL",  # a line break, quotes, markup, separators, a change of direction
    "red": "x" * 120 + "ü" * 60,  # 240 bytes
}


@pytest.fixture(scope="module")
def named(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs whose folders and files have such names, one of them unreadable."""
    root = tmp_path_factory.mktemp("named") / os.fsdecode(b"f\xf6lder")
    for kind, name in NAMES.items():
        (root / name).mkdir(parents=True)
        for path in (photos / kind).iterdir():
            shutil.copy(path, root / name / os.fsdecode(b"\xe9\n" + os.fsencode(path.name)))
    (root / NAMES["blue"] / os.fsdecode(b"bad\xe9.jpg")).write_text("no image")
    return root


@pytest.fixture(scope="module")
def run(named: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert command(["train", "vit", *TINY.split(), "--data", str(named), "--out", str(out)]) == 0
    return out


def test_a_run_is_finished_and_its_files_give_the_names_back(run: Path, named: Path) -> None:
    assert "caf\\xe9" in (run / "report.html").read_text(encoding="utf-8")
    assert "bad\\xe9.jpg" in (run / "report.html").read_text(encoding="utf-8")
    assert load_yaml(run)["data"]["uri"] == str(named)
    assert set(json.loads((run / "model" / "model.json").read_text(encoding="utf-8"))["classes"]) == set(NAMES.values())
    assert set(vitrail.load(run).classes) == set(NAMES.values())


@pytest.mark.parametrize(
    "words", ["check DATA", "evaluate RUN --data DATA", "evaluate RUN --protocol knn --data DATA", "predict RUN IMAGE"]
)
def test_commands_print_them_as_text_and_as_json(
    words: str, run: Path, named: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = sorted((named / NAMES["blue"]).iterdir())[0]
    filled = [{"DATA": str(named), "RUN": str(run), "IMAGE": str(image)}.get(word, word) for word in words.split()]
    command(filled)
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    command([*filled, "--json"])
    json.loads(capsys.readouterr().out.splitlines()[0])


def test_an_interrupted_run_with_such_names_is_resumed(
    named: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "vit", *TINY.split(), "--data", str(named), "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        assert command(words) == 130
    assert command(["train", "--resume", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").is_file()


def test_pictures_packs_and_exports_take_them(run: Path, named: Path, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    assert command(["inspect", str(run), "--data", str(named), "--out", str(pages), "--what", "attention"]) == 0
    assert command(["pack", str(named), str(tmp_path / "packed")]) in (0, 1)  # 1: an image is unreadable
    packed = vitrail.open_data(str(tmp_path / "packed"))
    assert set(packed.classes) == set(NAMES.values())
    assert command(["export", str(run), str(tmp_path / "model.pt2")]) == 0


def test_names_are_readable_and_json_is_exact(tmp_path: Path) -> None:
    assert readable(NAMES["blue"]) == "caf\\xe9"
    assert readable("a\nb\u202e") == "a\\nb\\u202e"
    assert readable("naïve 👨‍👩‍👧 می‌شود") == "naïve 👨‍👩‍👧 می‌شود"
    for name in NAMES.values():
        write_text(tmp_path / "a.json", json_text({"name": name}))
        assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"name": name}
    write_text(tmp_path / "a.txt", NAMES["blue"])
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "caf\\xe9"
