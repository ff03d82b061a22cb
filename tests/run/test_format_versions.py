"""Everything that is stored says its format: without one it is of an earlier version, above ours of a later one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import vitrail
from vitrail.cli import run as command
from vitrail.data.config import PreprocessConfig
from vitrail.data.open import open_data
from vitrail.engine.checkpoint import steps_saved
from vitrail.files import FORMAT_VERSION
from vitrail.learn.attack import UniversalPatch, load_patch, save_patch
from vitrail.model.adapters.adapter_file import load_adapter, save_adapter
from vitrail.model.adapters.apply import apply
from vitrail.model.adapters.config import Lora
from vitrail.model.build import create_model

SENTENCE = r"was written by a later version of vitrail \(format 7, this one reads up to 1\); update vitrail"
SMALL = (
    "--model.name vit_micro_28 --model.trunk.depth 1 --model.trunk.width 16 --model.trunk.heads 1 --data.workers 0 "
    "--data.batch 16 --optim.steps 2 --optim.warmup 0 --engine.evaluate_every 0"
)


@pytest.fixture(scope="module")
def made(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, the same photographs packed, an adapter and a patch."""
    folder = tmp_path_factory.mktemp("stored")
    assert command(f"train vit --data {photos} {SMALL} --out {folder / 'run'} --json".split()) == 0
    assert command(["pack", str(photos), str(folder / "packed"), "--json"]) == 0
    save_adapter(apply(model(), Lora(rank=1)), "default", folder / "adapter.safetensors")
    save_patch(folder / "patch", UniversalPatch(4, "top_left", 28, 0, PreprocessConfig(size=28)), {})
    return folder


def model() -> nn.Module:
    return create_model("vit_micro_28", classes=("a", "b"), depth=1, width=16, heads=1)


def in_json(name: str) -> Callable[[Path, Callable[[dict[str, Any]], object]], None]:
    def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
        stored = json.loads((folder / name).read_text())
        edit(stored)
        (folder / name).write_text(json.dumps(stored))

    return change


def in_tensors(folder: Path, edit: Callable[[dict[str, Any]], object], file: Path, key: str) -> None:
    with safe_open(folder / file, "pt") as stream:
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (not a mapping)
        header = json.loads(stream.metadata()[key])
    edit(header)
    save_file(tensors, folder / file, {key: json.dumps(header)})


def in_checkpoint(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    step = steps_saved(folder / "run" / "checkpoint")[-1]
    in_tensors(folder, edit, Path(f"run/checkpoint/step-{step:09d}.safetensors"), "vitrail")


def in_adapter(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    in_tensors(folder, edit, Path("adapter.safetensors"), "vitrail_adapter")


STORED: dict[str, tuple[Callable[[Path, Callable[[dict[str, Any]], object]], None], Callable[[Path], object]]] = {
    "model": (in_json("run/model/model.json"), lambda folder: vitrail.load(folder / "run")),
    "run": (in_json("run/environment.json"), lambda folder: vitrail.resume(folder / "run", quiet=True)),
    "checkpoint": (in_checkpoint, lambda folder: vitrail.resume(folder / "run", quiet=True)),
    "packed": (in_json("packed/pack.json"), lambda folder: open_data(folder / "packed")),
    "adapter": (in_adapter, lambda folder: load_adapter(model(), folder / "adapter.safetensors", force=True)),
    "patch": (in_json("patch/patch.json"), lambda folder: load_patch(folder / "patch", PreprocessConfig(size=28))),
}


@pytest.mark.parametrize("kind", STORED)
def test_a_later_format_is_a_sentence_and_none_an_earlier_version(kind: str, made: Path, tmp_path: Path) -> None:
    change, read = STORED[kind]
    folder = tmp_path / "stored"
    shutil.copytree(made, folder)
    found: list[int] = []
    change(folder, lambda stored: found.append(stored["format_version"]))
    assert found == [FORMAT_VERSION] == [1]
    change(folder, lambda stored: stored.update(format_version=7))
    with pytest.raises(ValueError, match=SENTENCE) as caught:
        read(folder)
    assert "\n" not in str(caught.value)
    change(folder, lambda stored: stored.pop("format_version"))
    read(folder)


def test_the_configuration_of_a_later_run_is_not_repeated(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "stored"
    shutil.copytree(made, folder)
    in_json("run/environment.json")(folder, lambda stored: stored.update(format_version=7))
    (folder / "run" / "config.yaml").write_text("a setting of later versions: 3\n")
    assert command(["train", "--config", str(folder / "run"), "--out", str(tmp_path / "new")]) == 2
    assert "was written by a later version of vitrail" in capsys.readouterr().err
    (folder / "run" / "environment.json").write_text("{")
    assert command(["train", "--config", str(folder / "run"), "--out", str(tmp_path / "new")]) == 2
    assert "a setting of later versions" in capsys.readouterr().err


def test_the_result_of_a_study_has_one(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "run", tmp_path / "other")
    words = [
        "compare",
        str(made / "run"),
        str(tmp_path / "other"),
        "--out",
        str(tmp_path / "study"),
        "--seconds",
        "0.01",
    ]
    assert command(words) == 0
    assert json.loads((tmp_path / "study" / "table.json").read_text())["format_version"] == FORMAT_VERSION
