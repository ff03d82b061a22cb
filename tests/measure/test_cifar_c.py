"""Files of CIFAR-10-C and ImageNet-C: errors by kind and severity, their means, and what is wrong with faulty files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.cli import run
from vitrail.data.preprocess import Preprocess
from vitrail.measure.cifar_c import ALEXNET, KINDS, OPTIONAL, mean_corruption_error, open_corrupted
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.run.protocols import evaluate_protocols

COUNT = 6  # images of each severity
WNIDS = ("n01440764", "n01443537", "n10565667")


def small(classes: tuple[str, ...] = ("a", "b", "c")) -> Classifier:
    torch.manual_seed(0)
    return create_model("deit_tiny", classes=classes, image_size=32, patch=8, width=32, depth=2, heads=2).eval()


def arrays(folder: Path, kinds: tuple[str, ...] = KINDS) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    # Random noise all looks alike to an untrained model, plain colours do not.
    images = {kind: draw.integers(0, 256, (5 * COUNT, 1, 1, 3), np.uint8).repeat(32, 1).repeat(32, 2) for kind in kinds}
    for kind, pixels in images.items():
        np.save(folder / f"{kind}.npy", pixels)
    np.save(folder / "labels.npy", np.tile(np.arange(COUNT) % 3, 5).astype(np.uint8))
    return images


def test_alexnets_errors_are_those_of_the_paper() -> None:
    table = (88.6, 89.4, 92.3, 82.0, 82.6, 78.6, 79.8, 86.7, 82.7, 81.9, 56.5, 85.3, 64.6, 71.8, 60.7)
    assert [round(100 * error, 1) for error in ALEXNET.values()] == list(table)
    own = {kind: [error] * 5 for kind, error in ALEXNET.items()}
    assert mean_corruption_error(own, ALEXNET) == pytest.approx(1)
    assert mean_corruption_error(own) == pytest.approx(np.mean(table) / 100, abs=5e-4)


def test_errors_are_averaged_by_kind_before_they_are_divided() -> None:
    errors = {"fog": [0.2, 0.4], "snow": [0.5, 0.5]}
    assert mean_corruption_error(errors) == pytest.approx(0.4)
    assert mean_corruption_error(errors, {"fog": 0.6, "snow": 0.25}) == pytest.approx((0.5 + 2) / 2)


def test_errors_by_kind_and_severity_are_those_of_a_loop(tmp_path: Path) -> None:
    images, model = arrays(tmp_path / "c"), small()
    findings, split = evaluate_protocols(model, tmp_path / "c", ["cifar_c"], workers=0, device="cpu")
    label, wanted = torch.arange(COUNT) % 3, {}
    for kind, pixels in images.items():
        parts = torch.from_numpy(pixels).movedim(3, 1).split(COUNT)
        with torch.no_grad():
            guesses = [model(Preprocess(model.preprocess).normalize(part)).argmax(1) for part in parts]
        wanted[kind] = [float((guess != label).double().mean()) for guess in guesses]
    assert split == "test"
    assert len({error for row in wanted.values() for error in row}) > 3
    found, numbers = findings["cifar_c"]["tables"]["cifar_c"], findings["cifar_c"]["numbers"]
    assert list(found) == list(KINDS)
    for kind, row in wanted.items():
        assert found[kind] == pytest.approx(row), kind
    assert numbers["mce"] == pytest.approx(np.mean([wanted[kind] for kind in ALEXNET]))
    assert numbers["mce_exact"] == pytest.approx(np.mean([wanted[kind] for kind in ALEXNET if kind != "frost"]))
    assert numbers["mce_exact"] != pytest.approx(numbers["mce"])
    assert "mce_alexnet" not in numbers


def test_files_without_frost_and_extra_kinds_have_no_mean_of_fifteen(tmp_path: Path) -> None:
    arrays(tmp_path, tuple(kind for kind in KINDS if kind not in OPTIONAL))
    findings, _ = evaluate_protocols(small(), tmp_path, ["cifar_c"], workers=0, device="cpu")
    assert list(findings["cifar_c"]["numbers"]) == ["mce_exact"]
    assert len(findings["cifar_c"]["tables"]["cifar_c"]) == 14


def test_the_command_line_prints_the_table_and_finds_data_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays(tmp_path / "data" / "CIFAR-10-C")
    small().save(tmp_path / "m")
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "data"))
    words = ["evaluate", str(tmp_path / "m"), "--data", "CIFAR-10-C", "--workers", "0", "--device", "cpu"]
    assert run([*words, "--protocol", "cifar_c"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("error by severity", "jpeg_compression", "mce_exact", "speckle_noise"))
    assert max(map(len, printed.splitlines())) <= 80
    assert run([*words, "--protocol", "cifar_c", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["protocols"]["cifar_c"]
    assert found["numbers"]["mce"] == pytest.approx(np.mean([found["tables"]["cifar_c"][kind] for kind in ALEXNET]))


def test_workers_read_the_same_arrays(tmp_path: Path) -> None:
    images = arrays(tmp_path)
    data = open_corrupted(tmp_path, ("a", "b", "c"))
    np.testing.assert_array_equal(np.asarray(data["snow/3"].read(1)), images["snow"][2 * COUNT + 1])
    again = pickle.loads(pickle.dumps(data["snow/3"]))
    np.testing.assert_array_equal(np.asarray(again.read(1)), images["snow"][2 * COUNT + 1])


def photographs(folder: Path, places: tuple[str, ...] = WNIDS) -> Path:
    shade = np.random.default_rng(0).integers(0, 256, (3, 40, 40, 3), np.uint8)
    for kind in ALEXNET:
        for severity in range(1, 6):
            for number, wnid in enumerate(places):
                (folder / kind / str(severity) / wnid).mkdir(parents=True)
                Image.fromarray(shade[number]).save(folder / kind / str(severity) / wnid / f"{number}.JPEG")
    return folder


def test_imagenet_c_is_divided_by_alexnets_errors(tmp_path: Path) -> None:
    folder, model = photographs(tmp_path / "c"), small(WNIDS)
    findings, _ = evaluate_protocols(model, folder, ["cifar_c"], workers=0, device="cpu")
    found, numbers = findings["cifar_c"]["tables"]["cifar_c"], findings["cifar_c"]["numbers"]
    guess = [p.top[0][0] for p in model.predict([folder / "fog/1" / w / f"{i}.JPEG" for i, w in enumerate(WNIDS)])]
    assert found["fog"] == pytest.approx([np.mean([g != w for g, w in zip(guess, WNIDS, strict=True)])] * 5)
    wanted = np.mean([np.mean(found[kind]) / error for kind, error in ALEXNET.items()])
    assert numbers["mce_alexnet"] == pytest.approx(wanted)
    assert numbers["mce_alexnet"] != pytest.approx(numbers["mce"])


def test_faulty_folders_of_imagenet_c_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"n02000000.*does not know"):
        open_corrupted(photographs(tmp_path / "c", (*WNIDS[:2], "n02000000")), WNIDS)
    folder = photographs(tmp_path / "d")
    for file in (folder / "snow" / "4").rglob("*.JPEG"):
        file.unlink()
    with pytest.raises(ValueError, match=r"snow/4 has no images"):
        open_corrupted(folder, WNIDS)


def test_faulty_arrays_are_one_sentence(tmp_path: Path) -> None:
    classes = ("a", "b", "c")

    def message(fault: str) -> str:
        with pytest.raises(ValueError, match=r"must be uint8 \[5 x images") as error:
            open_corrupted(tmp_path / fault, classes)
        assert "\n" not in str(error.value)
        return str(error.value)

    for fault in ("missing", "labels", "torn", "shape", "dtype", "pickled", "count", "classes", "empty"):
        arrays(tmp_path / fault)
    (tmp_path / "missing" / "fog.npy").unlink()
    assert "fog.npy" in message("missing")
    (tmp_path / "labels" / "labels.npy").unlink()
    assert "labels.npy" in message("labels")
    torn = tmp_path / "torn" / "snow.npy"
    torn.write_bytes(torn.read_bytes()[:5000])
    assert "snow.npy" in message("torn")
    np.save(tmp_path / "shape" / "fog.npy", np.zeros((30, 28, 28, 3), np.uint8))
    assert "(30, 28, 28, 3)" in message("shape")
    np.save(tmp_path / "dtype" / "fog.npy", np.zeros((30, 32, 32, 3), np.float32))
    assert "float32" in message("dtype")
    np.save(tmp_path / "pickled" / "fog.npy", np.array([{}], object), allow_pickle=True)
    assert "pickle" in message("pickled").lower()
    np.save(tmp_path / "count" / "labels.npy", np.zeros(29, np.uint8))
    assert "(29,)" in message("count")
    np.save(tmp_path / "classes" / "labels.npy", np.full(30, 9, np.uint8))
    assert "from 9 to 9, and the model has 3 classes" in message("classes")
    np.save(tmp_path / "classes" / "labels.npy", np.array([-1, 0, 2] * 10, np.int64))
    assert "from -1 to 2" in message("classes")
    (tmp_path / "empty" / "fog.npy").write_bytes(b"")
    assert "fog.npy" in message("empty")


def test_other_data_say_what_cifar_c_is_evaluated_on(tmp_path: Path) -> None:
    pixels, labels = np.zeros((30, 32, 32, 3), np.uint8), np.arange(30) % 3
    np.savez(tmp_path / "d.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    with pytest.raises(ValueError, match="files of CIFAR-10-C, CIFAR-100-C or ImageNet-C"):
        evaluate_protocols(small(("0", "1", "2")), tmp_path / "d.npz", ["cifar_c"], workers=0, device="cpu")
