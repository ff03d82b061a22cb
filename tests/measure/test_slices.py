"""Metrics by group: of a column of a table, and by size, brightness and sharpness of images."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import csv as pyarrow_csv
from pyarrow import parquet
from scipy import ndimage
from sklearn.metrics import accuracy_score
from torchmetrics.functional.classification import multiclass_calibration_error

from vitrail.cli import run
from vitrail.data.open import open_data
from vitrail.measure.classification import wilson_interval
from vitrail.measure.evaluator import Loaders, by_group, image_properties
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.registry import part
from vitrail.run.evaluate import evaluate
from vitrail.run.protocols import evaluate_protocols

CLASSES = ("cat", "dog")
SITES = ("north", "south", "west")


def small() -> Classifier:
    torch.manual_seed(0)
    return create_model("deit_tiny", classes=CLASSES, image_size=32, patch=8, width=32, depth=2, heads=2).eval()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of three sizes, dark to light and smooth to noisy; `site` is their group."""
    root, draw = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    rows = [("path", "label", "split", "site", "group")]
    for i in range(48):
        side = (24, 32, 40)[i % 3]
        noise = draw.normal(0, 1 + i, (side, side, 3))
        pixels = np.clip(noise + draw.uniform(20, 230), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(root / f"{i}.png")
        rows.append((f"{i}.png", CLASSES[i // 2 % 2], "train" if i < 12 else "test", SITES[i % 7 % 3], ""))
    with (root / "labels.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return root / "labels.csv"


def brute_force(logits: torch.Tensor, target: torch.Tensor, inside: np.ndarray) -> dict[str, Any]:
    rows = torch.from_numpy(np.flatnonzero(inside))
    right = int((logits[rows].argmax(1) == target[rows]).sum())
    low, high = wilson_interval(right, len(rows))
    ece = multiclass_calibration_error(logits[rows].softmax(1), target[rows], len(CLASSES), n_bins=15)
    top1 = accuracy_score(target[rows], logits[rows].argmax(1))
    return {"images": len(rows), "top1": top1, "top1_low": low, "top1_high": high, "ece": float(ece)}


def test_metrics_by_group_are_those_of_each_groups_images(table: Path) -> None:
    model = small()
    data = open_data(f"{table}?group=site")
    split = data["test"]
    assert split.groups is not None
    assert split.groups.tolist() == [SITES[i % 7 % 3] for i in range(12, 48)]
    _, predictions, _ = evaluate(model, data, workers=0, device="cpu")
    found = by_group(predictions, split, CLASSES)
    assert list(found) == sorted(SITES)
    for site, row in found.items():
        wanted = brute_force(predictions.logits, predictions.target, split.groups == site)
        assert row == pytest.approx(wanted, abs=1e-6), site


def test_the_command_line_prints_groups_and_the_worst(table: Path, tmp_path: Path, capsys: Any) -> None:
    small().save(tmp_path / "m")
    words = ["evaluate", str(tmp_path / "m"), "--workers", "0", "--device", "cpu", "--data"]
    assert run([*words, f"{table}?group=site", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    groups = found["groups"]
    assert sum(row["images"] for row in groups.values()) == found["count"] == 36
    assert sum(row["images"] * row["top1"] for row in groups.values()) == pytest.approx(36 * found["top1"])
    assert groups[found["worst_group"]]["top1"] == min(row["top1"] for row in groups.values())
    assert run([*words, f"{table}?group=site"]) == 0
    printed = capsys.readouterr().out
    assert f"worst: {found['worst_group']}" in " ".join(printed.split())
    assert all(site in printed for site in SITES)
    assert max(map(len, printed.splitlines())) <= 80
    assert run([*words, str(table), "--json"]) == 0
    assert "groups" not in json.loads(capsys.readouterr().out)  # a column called group, with empty cells, is no group


def test_a_parquet_table_has_groups_too(table: Path) -> None:
    parquet.write_table(pyarrow_csv.read_csv(table), table.with_suffix(".parquet"))
    split = open_data(f"{table.with_suffix('.parquet')}?group=site")["test"]
    assert split.groups is not None
    assert split.groups.tolist() == [SITES[i % 7 % 3] for i in range(12, 48)]


def test_groups_stay_with_their_images_when_data_are_divided(table: Path) -> None:
    data = open_data(f"{table}?group=site", val_fraction=0.25)
    for split in data.splits.values():
        assert split.groups is not None
        assert split.groups.tolist() == [SITES[int(Path(key).stem) % 7 % 3] for key in split.keys]


def test_wrong_groups_are_one_sentence(table: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no column 'sight' .*\?group=NAME.*site"):
        open_data(f"{table}?group=sight")
    with pytest.raises(ValueError, match="empty group"):
        open_data(f"{table}?group=group")
    several = torch.zeros(36, 2, dtype=torch.int64)
    split = open_data(f"{table}?group=site")["test"]
    _, predictions, _ = evaluate(small(), f"{table}", workers=0, device="cpu")
    with pytest.raises(ValueError, match="one label each"):
        by_group(type(predictions)(predictions.index, several, predictions.logits), split, CLASSES)


def test_properties_of_an_image_are_those_of_scipy() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (9, 14), np.uint8)
    size, light, sharp = image_properties(Image.fromarray(pixels).convert("RGB"))
    assert size == 9 * 14
    assert light == pytest.approx(pixels.mean())
    assert sharp == pytest.approx(ndimage.laplace(pixels.astype(float)).var())
    assert image_properties(Image.new("RGB", (1, 1), (9, 9, 9))) == (1, 9, 0)


def test_slices_are_terciles_of_what_brute_force_measures(table: Path) -> None:
    model = small()
    findings, split = evaluate_protocols(model, str(table), ["slices"], workers=0, device="cpu")
    assert split == "test"
    found = findings["slices"]["tables"]["slices"]
    _, predictions, _ = evaluate(model, str(table), workers=0, device="cpu")
    grey = [np.asarray(Image.open(table.parent / f"{i}.png").convert("L"), float) for i in range(12, 48)]
    measured = {
        "pixels": [g.size for g in grey],
        "brightness": [g.mean() for g in grey],
        "sharpness": [ndimage.laplace(g).var() for g in grey],
    }
    wanted = {}
    for name, values in measured.items():
        order = sorted(values)
        low, high = np.quantile(order, 1 / 3), np.quantile(order, 2 / 3)
        bounds = [(-np.inf, low), (low, high), (high, np.inf)]
        for third, (above, most) in enumerate(bounds, 1):
            inside = np.array([above < value <= most for value in values])
            if inside.any():
                edges = np.array(values)[inside]
                title = f"{name} {third}/3: {edges.min():,.0f} to {edges.max():,.0f}"
                wanted[title] = brute_force(predictions.logits, predictions.target, inside)
    assert list(found) == list(wanted)
    assert len(found) == 9
    for name, row in wanted.items():
        assert found[name] == pytest.approx(row, abs=1e-6), name
    assert findings["slices"]["numbers"] == {"worst_slice_top1": min(row["top1"] for row in wanted.values())}


def test_slices_of_images_that_are_all_alike_are_one(tmp_path: Path) -> None:
    pixels, labels = np.full((30, 32, 32, 3), 50, np.uint8), np.arange(30) % 2
    np.savez(tmp_path / "d.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels, classes=CLASSES)
    findings, _ = evaluate_protocols(small(), tmp_path / "d.npz", ["slices"], workers=0, device="cpu")
    found = findings["slices"]["tables"]["slices"]
    assert list(found) == ["pixels 1/3: 1,024 to 1,024", "brightness 1/3: 50 to 50", "sharpness 1/3: 0 to 0"]
    with pytest.raises(ValueError, match="stored images"):
        part("evaluator", "slices")(small(), Loaders(CLASSES, {"test": []}, "test"))
