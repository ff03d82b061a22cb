"""Files to deploy: int8 measured on val, and `predict.py`, which equals `vitrail predict` without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small import quick_of

import vitrail
from vitrail.cli import run as command
from vitrail.config import from_mapping
from vitrail.data.loading.loader import EvalLoader
from vitrail.measure.trust import SOFTMAX_SCORES, Trust, fit_mahalanobis, fit_neighbours
from vitrail.model.store import model_folder
from vitrail.recipes import recipe
from vitrail.run import deploy
from vitrail.run.deploy import export_onnx
from vitrail.run.evaluate import evaluate

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

URI = "synthetic:shapes?n=1200&size=24"
SETTINGS: dict[str, Any] = {
    "data": {"uri": URI, "batch": 50, "workers": 0},
    "model": {"name": "vit_micro_28", "image_size": 16, "trunk": {"depth": 1, "patch": 4}},
    "optim": {"epochs": 2},
    "engine": {"device": "cpu"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deploy") / "run"
    return vitrail.train(from_mapping({**SETTINGS, "out": str(out)}, recipe("vit")), quiet=True).path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Odd sizes, an EXIF rotation, grey, 16 bits, alpha, a palette with a transparent colour, and no image."""
    folder, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)

    def drawn(height: int, width: int, channels: int = 3) -> Image.Image:
        small = Image.fromarray(generator.integers(0, 256, (5, 7, channels), dtype=np.uint8).squeeze())
        return small.resize((width, height))

    exif = Image.Exif()
    exif[0x0112] = 6
    drawn(31, 57).save(folder / "rotated.jpg", exif=exif)
    drawn(180, 130).save(folder / "large.jpg", exif=exif)
    drawn(170, 230).save(folder / "large.png")
    drawn(130, 17).save(folder / "tall.png")
    drawn(16, 16).save(folder / "exact.png")
    drawn(9, 40).save(folder / "flat.webp", lossless=True)
    drawn(33, 21, 1).save(folder / "grey.png")
    drawn(25, 25, 4).save(folder / "alpha.png")
    drawn(28, 40).quantize(8).save(folder / "palette.png", transparency=0)
    wide = generator.integers(0, 65536, (20, 30), dtype=np.uint16)
    Image.fromarray(wide).save(folder / "wide.png")
    (folder / "none.jpg").write_bytes(b"no image")
    return sorted(folder.iterdir())


def without_torch(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """The script in a process where torch and vitrail cannot be imported."""
    blocked = folder / "blocked"
    for name in ("torch", "vitrail", "torchvision"):
        (blocked / name).mkdir(parents=True, exist_ok=True)
        (blocked / name / "__init__.py").write_text(f"raise ImportError('{name} was imported')")
    environment = {**os.environ, "PYTHONPATH": str(blocked)}
    line = [sys.executable, str(folder / "predict.py"), str(folder / "model.onnx"), *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, env=environment, check=False)


def answers(text: str) -> dict[str, Any]:
    return {row["path"]: row for row in map(json.loads, text.splitlines())}


def reject_by(kind: str, run: Path, folder: Path) -> Path:
    """A copy of the run whose reject score is of this kind."""
    copy = shutil.copytree(run, folder / kind)
    model, trust = vitrail.load(copy), Trust.read(model_folder(copy))
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (300, 3, 16, 16), generator=generator, dtype=torch.uint8)
    with torch.inference_mode():
        outputs = model.outputs(images)
        logits, embeddings = model.fused(outputs.stack), outputs.embedding
    fitted: Any = None
    if kind == "neighbours":
        fitted = fit_neighbours(embeddings, 3)
    elif kind == "mahalanobis":
        fitted = fit_mahalanobis(embeddings, torch.arange(300) % 3)
    trust = replace(trust, kind=kind, embedding=fitted)
    replace(trust, known=trust.scores(logits, embeddings)).save(model_folder(copy))
    return copy


@pytest.mark.parametrize("kind", quick_of((*SOFTMAX_SCORES, "neighbours", "mahalanobis"), ("energy", "mahalanobis")))
def test_predict_py_equals_vitrail_predict_without_torch(
    kind: str, trained: Path, pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = reject_by(kind, trained, tmp_path), tmp_path / "deployed"
    assert command(["export", str(run), str(folder / "model.onnx"), "--with_predict"]) == 0
    unknown = set()
    for sets, coverage in (("lac", "0.9"), ("aps", "0.8"), ("raps", "0.95")):
        asked = ["--json", "--coverage", coverage, "--sets", sets, "--keep", "0.6", "--top", "2"]
        capsys.readouterr()
        command(["predict", str(run), *map(str, pictures), *asked])
        wanted = answers(capsys.readouterr().out)
        process = without_torch(folder, *pictures, *asked)
        assert process.returncode == 1, process.stderr  # one is no image
        found = answers(process.stdout)
        assert found.keys() == wanted.keys()
        for path, answer in wanted.items():
            same_answer(found[path], answer)
            unknown.add(answer.get("unknown"))
    assert {True, False} <= unknown


def same_answer(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    if "error" in wanted:
        return
    assert (found["label"], found.get("unknown")) == (wanted["label"], wanted.get("unknown"))
    assert found["probability"] == pytest.approx(wanted["probability"], abs=1e-4)
    for key in ("top", "set"):
        assert [name for name, _ in found.get(key, ())] == [name for name, _ in wanted.get(key, ())]
        assert [p for _, p in found.get(key, ())] == pytest.approx([p for _, p in wanted.get(key, ())], abs=1e-4)


@pytest.mark.parametrize(("resize", "gap"), [("crop", None), ("crop", 1.5), ("squash", 2.0), ("pad", 1.0)])
@pytest.mark.parametrize("multilabel", [False, True])
def test_predict_py_preprocesses_as_the_model(
    resize: Any,
    gap: float | None,
    multilabel: bool,
    trained: Path,
    pictures: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = vitrail.load(trained)
    ratio = 0.7 if resize == "crop" else 1.2 if resize == "squash" else 0.9
    changes = {"resize": resize, "crop_ratio": ratio, "interpolation": "lanczos", "reducing_gap": gap}
    model.preprocess = replace(model.preprocess, **changes)
    model.multilabel = multilabel
    model.save(tmp_path / "model")
    export_onnx(model, tmp_path / "model.onnx", tmp_path / "model", with_predict=True)
    command(["predict", str(tmp_path / "model"), *map(str, pictures), "--json"])
    wanted, found = answers(capsys.readouterr().out), answers(without_torch(tmp_path, *pictures, "--json").stdout)
    for path, answer in wanted.items():
        same_answer(found[path], answer)
    refused = without_torch(tmp_path, pictures[0], "--keep", "0.9")
    assert refused.returncode == 2
    assert "vitrail evaluate RUN --calibrate" in refused.stderr


def test_int8_is_measured_on_val_and_described(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    class Watched(EvalLoader):
        def __init__(self, split: Any, *args: Any, **options: Any) -> None:
            read.append(split.name)
            super().__init__(split, *args, **options)

    monkeypatch.setattr(deploy, "EvalLoader", Watched)
    line = ["export", str(trained), str(tmp_path / "model.onnx"), "--int8", "--with_predict", "--lose", "5", "--json"]
    assert command(line) == 0
    exported = json.loads(capsys.readouterr().out)
    metrics, predictions, _ = evaluate(trained, URI, split="val")
    assert exported["precision"]["images"] == len(predictions)
    assert exported["precision"]["before"] == pytest.approx(metrics.scalars()["top1"])
    assert exported["precision"]["after"] > exported["precision"]["before"] - 0.05
    assert set(read) == {"train", "val"}
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "predict.py"}


def test_the_change_of_accuracy_is_printed(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["export", str(trained), str(tmp_path / "model.onnx"), "--fp16", "--calibrate", URI]) == 0
    assert "val images: " in (text := capsys.readouterr().out)
    assert "95 % interval" in text


BAD = {
    "--int8 is for ONNX files": ["model.pt2", "--int8"],
    "--fp16 is for ONNX files": ["nola.safetensors", "--fp16"],
    "--with_predict is for ONNX files": ["model.pt2", "--with_predict"],
    "--int8 or --fp16; name one of these two": ["model.onnx", "--int8", "--fp16"],
    "--calibrate and --lose are of --int8 or --fp16": ["model.onnx", "--lose", "1"],
    "has no train images to calibrate on, or no val": ["model.onnx", "--int8", "--calibrate", "VAL"],
    "leave out --input and --output": ["model.onnx", "--with_predict", "--output", "logits"],
    "does not say which data it learned from; name them: --calibrate DATA": ["model.onnx", "--int8"],
    "is not one that vitrail wrote": ["taken/model.onnx", "--with_predict"],
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_requests_are_answered_in_a_sentence(
    sentence: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vitrail.load(trained)
    model.stated = {} if "does not say" in sentence else model.stated
    model.save(tmp_path / "model")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "predict.py").write_text("print('mine')\n")
    if "VAL" in BAD[sentence]:
        opened = deploy.open_for(model, URI)
        monkeypatch.setattr(deploy, "open_for", lambda *_: replace(opened, splits={"val": opened["val"]}))
    name, *words = BAD[sentence]
    assert command(["export", str(tmp_path / "model"), str(tmp_path / name), *words]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert len(told.strip().splitlines()) == 1
    assert not (tmp_path / name).exists()


def test_predict_py_is_short_and_needs_no_other_package() -> None:
    import ast

    tree = ast.parse(deploy.TEMPLATE.read_text(encoding="utf-8"))
    strings = [node.body[0] for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.FunctionDef))]
    told = {line for node in strings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = enumerate(deploy.TEMPLATE.read_text(encoding="utf-8").splitlines(), 1)
    assert len([line for number, line in lines if line.strip() and number not in told]) <= 60
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"argparse", "json", "numpy", "onnxruntime", "PIL"}
