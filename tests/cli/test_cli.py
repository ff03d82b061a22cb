"""The command line, as a person types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from vitrail.cli import COMMANDS, run
from vitrail.cli.train_command import SECTIONS
from vitrail.config import RunConfig
from vitrail.recipes import RECIPES, recipe
from vitrail.schema import hints, settings

ROOT = Path(__file__).parents[2]


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(words)
    out, err = capsys.readouterr()
    return code, out, err


def help_of(capsys: pytest.CaptureFixture[str], command: str) -> str:
    code, out, _ = ask(capsys, command, "--help")
    assert code == 0
    return out


SMALL = "--model.name vit_micro_28 --model.trunk.depth 1 --model.trunk.width 32 --model.trunk.heads 2 --data.workers 0"


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    words = f"train vit --data {photos} {SMALL} --data.batch 16 --optim.epochs 20 --out {out} --json".split()
    assert run(words) == 0
    return out


def test_help_and_lists_import_no_torch() -> None:
    asked = [
        ["--help"],
        *([command, "--help"] for command in COMMANDS),
        ["train", "demo", "--help", "all"],
        ["list", "models"],
        ["list", "recipes", "--json"],
        ["show", "deit_small"],
        ["--version"],
    ]
    script = (
        "import sys; from vitrail.cli import run\n"
        f"for words in {asked!r}: assert run(words) == 0\n"
        "assert 'torch' not in sys.modules and 'timm' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_help_names_every_command_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)
    assert "vitrail train demo" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "train"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(capsys, command).splitlines()
    example = lines[lines.index("examples:") + 1]
    assert example.startswith(f"  vitrail {command} ")
    assert "usage:" not in lines[: lines.index("examples:")]  # what it does comes first


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "train"])
def test_help_names_defaults_that_say_something_and_fits_the_terminal(
    command: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = help_of(capsys, command)
    assert not re.search(r"\(default:\s*(\)|''|True|False|\{)|None", out)
    prose = [line for line in out.splitlines() if not line.startswith("  vitrail ")]  # examples stay on one line
    assert max(map(len, prose)) <= min(columns, 100)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "train"])
def test_help_has_a_text_for_every_argument_and_flag(command: str) -> None:
    module, _, name = COMMANDS[command][0].partition(":")
    cls = getattr(import_module(f"vitrail.{module}"), name)
    assert [setting.name for setting in settings(cls) if not setting.text] == []


HYPHENATED = re.compile(r"--[a-z][\w.]*-\w+")


@pytest.mark.parametrize("words", [[], *([command] for command in COMMANDS)], ids=" ".join)
def test_help_spells_flags_with_underscores(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ask(capsys, *words, "--help")
    assert HYPHENATED.findall(out) == []


@pytest.mark.parametrize("name", ["vit", "small-moco", "attack", "finetune"])
def test_help_of_all_settings_spells_flags_with_underscores(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "train", name, "--help", "all")
    assert code == 0
    assert "--data.val_fraction" in out
    assert HYPHENATED.findall(out) == []


def test_documents_spell_flags_with_underscores() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lines = [line for path in documents for line in path.read_text().splitlines() if "vitrail" in line]
    assert len(lines) > 100
    assert [line for line in lines if HYPHENATED.search(line)] == []


def test_no_message_names_a_setting_by_an_equals_sign() -> None:
    assigned = re.compile(r"\b(data|model|optim|engine|objective)(\.[a-z_]+)+=[A-Za-z0-9]")
    assert [path.name for path in (ROOT / "vitrail").rglob("*.py") if assigned.search(path.read_text())] == []


def test_train_help_is_a_page_with_the_values_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "train", "demo", "--data", "photos/", "--help")
    assert code == 0
    assert len(out.splitlines()) <= 60
    assert f"how long ({recipe('demo').optim.epochs})" in out
    assert "--data.augment.mixup" not in out


@pytest.mark.parametrize(("section", "has", "lacks"), [("optim", "--optim.warmup", "--data.batch"), ("all", "", "")])
def test_settings_of_a_section_are_shown_by_its_name(
    section: str, has: str, lacks: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = ask(capsys, "train", "demo", "--help", section)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    wanted = [has] if has else [f"--{name}" for name in ("optim.epochs", "data.augment.mixup", "model.name", "seed")]
    assert all(name in out for name in wanted)
    assert not lacks or lacks not in out


@pytest.mark.parametrize("name", RECIPES)
def test_settings_of_every_recipe_fit_the_terminal(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = ask(capsys, "train", name, "--help", "all")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert not re.search(r"\(default:\s*(None|\{)", out)


def test_help_of_a_choice_names_its_kinds_and_the_settings_of_the_chosen_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = ask(capsys, "train", "small-moco", "--help", "objective")
    assert re.search(r"--objective KIND .*supervised, distillation.*\(default: moco\)", out, re.DOTALL)
    assert "--objective.temperature FLOAT" in out
    assert "--objective.smoothing " not in out


def test_every_group_of_settings_is_a_section_of_help() -> None:
    groups = {name for name, kind in hints(RunConfig).items() if is_dataclass(getattr(RunConfig(), name))}
    assert {*groups, "all"} == set(SECTIONS)
    assert not set(SECTIONS) & set(RECIPES)  # one word names either


def test_a_misspelt_section_of_help_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ask(capsys, "train", "--help", "optimm")
    assert code == 2
    assert "did you mean 'optim'" in err


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("words", ["--help", "train --help", "list models", "list recipes"])
def test_what_is_said_of_names_fits_the_terminal(
    words: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = ask(capsys, *words.split())
    assert code == 0
    assert "…" not in out
    # What a person would type, and the head of the page, stay on one line.
    prose = [line for line in out.splitlines() if not line.lstrip().startswith(("vitrail ", "usage:", "recipes to"))]
    assert max(map(len, prose)) <= columns


@pytest.mark.parametrize(
    ("recipe_name", "model", "read"),
    [
        ("small-mae", "--model.trunk.depth 1 --model.trunk.width 32 --model.trunk.heads 2", "top-1 means nothing"),
        ("small-byol", "--model.name vit_micro_28 --model.head.hidden 32", "top-1 is that of an online linear probe"),
    ],
)
def test_figures_of_models_that_do_not_classify_say_how_to_read_them(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe_name: str, model: str, read: str
) -> None:
    flags = f"{model} --data.batch 16 --optim.steps 1 --optim.warmup 0 --data.workers 0 --evaluators classification"
    code, out, _ = ask(capsys, *f"train {recipe_name} --data {photos} {flags} --out {tmp_path / 'run'}".split())
    assert code == 0
    assert read in " ".join(out[out.index("calibration error") :].split())  # below the figures


def test_all_config_errors_come_at_once_before_data_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    words = "train vit --data /nowhere --model.name deit_smal --optim.epoch 3 --engine.ema 2"
    code, _, err = ask(capsys, *words.split())
    assert code == 2
    assert "3 problems:" in err
    assert "did you mean 'deit_small'" in err
    assert "did you mean 'epochs'" in err
    assert "engine.ema: 2.0 is out of range" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("trian", "did you mean 'train'"),
        ("train demoo", "did you mean 'demo'"),
        ("train vit", "say where the images are"),
        ("train vit --data /nowhere/at/all", "/nowhere/at/all"),
        ("train demo --evaluators clasification", "did you mean 'classification'"),
        ("train demo vit", "train takes one recipe"),
        ("train demo --config x.yaml", "give one of"),
        ("train --config /nowhere.yaml", "no configuration at"),
        ("train --resume /nowhere", "no run folder"),
        ("evaluate /nowhere --data embedded:fashion", "no model at"),
        ("export /nowhere model.onnx", "no model at"),
        ("export /nowhere model.bin", "say --to torch or --to onnx"),
        ("bench deit_smal", "did you mean 'deit_small'"),
        ("bench deit_small --batch many", "use a number above 0, or search"),
        ("list models zzz*", "no models match"),
        ("show deit_smal", "did you mean 'deit_small'"),
        ("show deit_small --optim.lr 1", "settings change a recipe, and 'deit_small' is none"),
        ("show", "show takes one name, got none"),
        ("check /nowhere/at/all", "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ask(capsys, *words.split())
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err
    assert err.startswith("vitrail: ")


def test_train_prints_one_json_object(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"train vit --data {photos} {SMALL} --data.batch 16 --optim.steps 1 --out {tmp_path / 'run'} --json"
    code, out, _ = ask(capsys, *words.split())
    found = json.loads(out)
    assert code == 0
    assert found["run"] == str(tmp_path / "run")
    assert found["split"] == "test"
    assert 0 <= found["top1"] <= 1


def test_evaluate_as_table_and_as_json(trained: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "evaluate", str(trained), "--data", str(photos), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["split"] == "test"
    assert 0 <= found["top1"] <= 1
    assert {"top5", "ece", "loss"} <= found.keys()
    code, out, _ = ask(capsys, "evaluate", str(trained), "--data", str(photos))
    assert code == 0
    assert "green" in out
    assert max(map(len, out.splitlines())) <= 80


def test_evaluate_refuses_foreign_classes(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ask(capsys, "evaluate", str(trained), "--data", "embedded:fashion")
    assert code == 2
    assert "classes that the model does not know" in err


def test_predict_files_and_folders(
    trained: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = ask(capsys, "predict", str(trained), str(photos / "red"), "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert len(rows) == 20
    assert sum(row["label"] == "red" for row in rows) > 15
    (tmp_path / "bad.jpg").write_text("no image")
    code, out, _ = ask(capsys, "predict", str(trained), str(tmp_path / "bad.jpg"), str(photos / "red" / "00.jpg"))
    assert code == 1
    assert "bad.jpg  cannot be read: not an image" in out
    assert "red " in out


def test_predict_names_the_files_of_a_folder_that_it_skips(
    trained: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "0.jpg").write_bytes((photos / "red" / "00.jpg").read_bytes())
    (tmp_path / "notes.txt").write_text("x")
    code, out, err = ask(capsys, "predict", str(trained), str(tmp_path), "--json")
    assert code == 0
    assert len(out.splitlines()) == 1
    assert err == f"{tmp_path}: ignored 1 files that are not images (.txt)\n"


def test_evaluate_names_recall_without_images_and_what_averages_are_over(
    trained: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classes = sorted(path.name for path in photos.iterdir())
    for name in classes[1:]:
        (tmp_path / name).symlink_to(photos / name, target_is_directory=True)
    code, out, _ = ask(capsys, "evaluate", str(trained), "--data", str(tmp_path))
    assert code == 0
    present = len(classes) - 1
    assert f"1 of {len(classes)} classes have no images here; macro averages are over the {present} present" in out
    row = next(line for line in out.splitlines() if line.startswith(f"{classes[0]} "))
    assert "no images" in row


def test_check_finds_trouble_and_says_so_by_its_exit_code(photos: Path, tmp_path: Path, capsys) -> None:
    import shutil

    copied = tmp_path / "photos"
    for split in ("train", "val"):
        shutil.copytree(photos, copied / split)
    code, out, _ = ask(capsys, "check", str(copied), "--json", "--out", str(tmp_path / "sheet.png"))
    assert code == 2  # every image of train is in val, too
    assert json.loads(out)["severity"] == "errors"
    assert (tmp_path / "sheet.png").stat().st_size > 1000
    code, out, _ = ask(capsys, "check", str(photos))
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", ["cait_s36", "finetune", "second_order", "talking_heads"])
def test_show_tells_all_of_one_thing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "show", name)
    assert code == 0
    assert name in out
    code, out, _ = ask(capsys, "show", name, "--json")
    assert code == 0
    assert name in json.dumps(json.loads(out))


@pytest.mark.parametrize(("model", "drop_path"), [("deit3_small", 0.0), ("deit3_large", 0.4), ("deit3_huge", 0.5)])
def test_show_gives_a_recipe_the_values_of_the_model_that_is_named(
    model: str, drop_path: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drop path by size as DeiT III prints it (arXiv 2204.07118)."""
    code, out, _ = ask(capsys, "show", "deit3-1k-400", "--model.name", model)
    assert code == 0
    assert yaml.safe_load(out)["model"]["drop_path"] == drop_path
    code, out, _ = ask(capsys, "show", "deit3-1k-400", "--model.name", model, "--optim.lr", "1e-4", "--json")
    found = json.loads(out)["config"]
    assert (code, found["model"]["name"], found["model"]["drop_path"], found["optim"]["lr"]) == (
        *(0, model, drop_path),
        1e-4,
    )


def test_show_gives_what_the_model_and_the_batch_decide(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ask(capsys, "show", "cait-400", "--model.name", "cait_m48", "--json")
    assert json.loads(out)["resolved"] == {"model.drop_path": 0.4, "model.image_size": 224}  # CaiT, arXiv 2103.17239
    _, out, _ = ask(capsys, "show", "deit-300", "--data.batch", "256", "--json")
    assert json.loads(out)["resolved"]["optim.lr"] == pytest.approx(5e-4 / 2)  # given at 512
    assert json.loads(out)["optimizer"] is None  # one takes all
    _, out, _ = ask(capsys, "show", "small-deit", "--json")
    assert json.loads(out)["optimizer"]["muon"] == 12 * 12 * 192**2  # twelve blocks of width 192: q, k, v, out, MLP
    _, out, _ = ask(capsys, "show", "deit-300", "--data.batch", "256")
    assert "# optim.lr                     0.00025" in out


def test_show_takes_another_kind_of_objective(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "show", "deit-300", "--objective", "grafit", "--json")
    shown = json.loads(out)
    assert (code, shown["config"]["objective"]["kind"]) == (0, "grafit")
    assert {"setting": "objective.smoothing", "source": 0.1, "recipe": None} in shown["stated"]["settings"]


def test_show_names_every_wrong_setting_as_train_does(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--optim.epoch", "3", "--model.name", "deit3_larg", "--data.batch", "-1"]
    code, _, shown = ask(capsys, "show", "deit3-1k-400", *wrong)
    assert code == 2
    assert "3 problems" in shown
    assert (code, shown) == (2, ask(capsys, "train", "deit3-1k-400", *wrong)[2])


@pytest.mark.parametrize("what", ["models", "heads", "mixers", "recipes", "data"])
def test_lists_fit_a_terminal_and_come_as_json(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "list", what)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = ask(capsys, "list", what, "--json")
    assert code == 0
    assert all("name" in row for row in json.loads(out))


@pytest.mark.slow
def test_export_writes_what_predict_says(
    trained: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np
    import torch
    from PIL import Image

    out = tmp_path / "model.pt2"
    code, said, _ = ask(capsys, "export", str(trained), str(out), "--json")
    found = json.loads(said)
    assert code == 0
    assert found["file"] == str(out)
    assert found["bytes"] == out.stat().st_size
    assert (found["input"], found["output"], list(found["differences"])) == ("bytes", "probabilities", ["1", "2", "7"])
    picture = Image.open(photos / "red" / "00.jpg").resize((28, 28), Image.Resampling.BICUBIC, box=(4, 0, 44, 40))
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
    probabilities = torch.export.load(out).module()(pixels)
    assert ("blue", "green", "red")[int(probabilities.argmax())] == "red"


def test_bench_measures_a_trained_model_beside_a_named_one(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = ask(
        capsys, "bench", str(trained), "vit_micro_28", "--batch", "2", "--rounds", "2", "--seconds", "0.02", "--json"
    )
    found = json.loads(said)
    assert code == 0
    assert [row["model"] for row in found["rows"]] == [str(trained), "vit_micro_28"]
    assert found["rows"][0]["top1"] is not None
    assert all(row["images_per_second"] > 0 and row["batch"] == 2 for row in found["rows"])


def test_a_plan_whose_measured_steps_fail_says_why_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(*_: object) -> None:
        raise RuntimeError("model.weights: no published weights")

    monkeypatch.setattr("vitrail.compare.budgets.probe", failed)
    assert run(["show", "demo", "--plan", "--measure"]) == 2
    assert capsys.readouterr().err == "vitrail: model.weights: no published weights\n"
