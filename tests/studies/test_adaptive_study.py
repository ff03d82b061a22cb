"""The study of adaptive models makes every row once, goes on where it was, and prints what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import study_calls
import torch
from processes import run_script
from study_calls import STUDIES, rows

from vitrail.data.config import PreprocessConfig
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.model.build import create_model

SHARES = [f"share {share:g}" for share in (1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)]
PATCHES = ["random", "tap", "ntap", "slowformer"]
VARIED = ["preserve", "destroy", "size 4", "size 12", "size 16", "eps 8", "eps 16", "eps 32"]
AVIT_ONLY = ["released prior", "centre", "another start"]
ABLATIONS = {  # at each of two budgets
    "reference": 1,
    "score": 2,
    "value norm": 1,
    "sampling": 4,
    "order": 1,
    "class token": 1,
    "placement": 4,
    "equal token counts": 2,
}


call = partial(study_calls.call, STUDIES / "adaptive.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the smoke run of one seed wrote."""
    out = tmp_path_factory.mktemp("study")
    call("--smoke", "--seeds", "1", "--out", str(out))
    return out


def names(folder: Path, table: str, subject: str) -> list[str]:
    return [row["what"] for row in rows(folder) if (row["table"], row["subject"]) == (table, subject)]


@pytest.mark.slow
def test_every_row_is_there_once(folder: Path) -> None:
    assert names(folder, "base", "vit") == ["plain", "trained longer"]
    for state in ("without training", "fine-tuned"):
        assert names(folder, "ats", state) == SHARES
        assert names(folder, "speed", state)[: len(SHARES)] == SHARES
    both = {group: 2 * count - (group == "sampling") for group, count in ABLATIONS.items()}  # random points: at one
    assert {group: len(names(folder, "ablation", group)) for group in ABLATIONS} == both
    for victim in ("ats", "avit", "adavit"):
        assert names(folder, "victims", victim) == ["plain"]
        wanted = ["none", *PATCHES, *VARIED, *(AVIT_ONLY if victim == "avit" else [])]
        assert names(folder, "attacks", victim) == wanted
        others = [f"patch of {other}" for other in ("ats", "avit", "adavit") if other != victim]
        assert names(folder, "transfer", victim) == others
    for model in ("defended", "control"):
        assert names(folder, "defence", model) == ["none", "slowformer", "patch of avit"]
    assert not [row for row in rows(folder) if "failed" in row]


@pytest.mark.slow
def test_what_is_chosen_is_chosen_on_val_and_what_is_reported_is_of_test(folder: Path) -> None:
    splits = {row["table"]: row["split"] for row in rows(folder) if "split" in row}
    assert splits.pop("choice") == "val"
    assert set(splits.values()) == {"test"}


@pytest.mark.slow
def test_success_is_the_share_of_savings_that_an_attack_takes_back(folder: Path) -> None:
    found = {row["what"]: row for row in rows(folder) if (row["table"], row["subject"]) == ("attacks", "ats")}
    clean = found["none"]
    saved = clean["worst_case"] - clean["macs"]
    assert saved > 0
    for what in ("random", "slowformer"):
        # Figures are stored with five digits.
        assert found[what]["success"] == pytest.approx((found[what]["macs"] - clean["macs"]) / saved, abs=1e-5)


@pytest.mark.slow
def test_a_second_call_makes_nothing_again(folder: Path) -> None:
    before = (folder / "found.jsonl").read_bytes()
    call("--smoke", "--seeds", "1", "--out", str(folder))
    assert (folder / "found.jsonl").read_bytes() == before


@pytest.mark.slow
def test_tables_have_every_row(folder: Path) -> None:
    text = call("--table", str(folder))
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| | |")]
    shown = {row["table"] for row in rows(folder)} - {"about"}
    assert len(lines) == len([row for row in rows(folder) if row["table"] in shown])
    assert text.count("### ") == len(shown)


@pytest.fixture
def of_study(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The study's own modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(STUDIES))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("adaptive_models", "adaptive_tables", "device_runs", "found", "found_tables"):
            del sys.modules[name]


def test_images_resized_on_the_device_are_those_of_the_processor(of_study: None) -> None:
    from adaptive_models import ResizedImages

    split = open_data("synthetic:shapes?n=20&size=32")["train"]
    for size in (56, 128):
        ready = Preprocess(PreprocessConfig(size=size, crop_ratio=1.0))
        found = ResizedImages(split, None, ready, device="cpu").pixels
        expected = torch.stack([ready(split.read(row)) for row in range(len(split))])
        assert found.dtype == torch.uint8
        # Pillow rounds in fixed point: a value near a half may come out one grey level apart.
        assert int((found.int() - expected.int()).abs().max()) <= 1


@pytest.mark.parametrize(("pixels", "patch", "tokens", "padding"), [(32, 4, 64, 4), (56, 4, 196, 7), (128, 16, 64, 16)])
def test_other_sizes_of_images_change_tokens_crops_and_patches_alike(
    of_study: None, tmp_path: Path, pixels: int, patch: int, tokens: int, padding: int
) -> None:
    from adaptive_models import Models
    from found import Found

    runs = SimpleNamespace(device=torch.device("cpu"), images={}, data={"train": None})
    models = Models(runs, tmp_path, Found(tmp_path), False, pixels)  # type: ignore[arg-type]
    config = models.config("base")
    model = create_model(
        config.model.name, classes=3, image_size=config.model.image_size, device="meta", **config.model.trunk
    )
    assert model.preprocess.size == pixels
    assert model.trunk.patch_embed.grid(pixels, pixels) == (tokens**0.5,) * 2  # type: ignore[union-attr]
    assert model.trunk.config.patch == patch  # type: ignore[union-attr]
    assert (config.data.augment.padding, models.config("defended").objective.attack.size) == (padding, pixels // 4)
    for name in ("base", "defended"):
        models.keep_resized(models.config(name))
    assert len({id(images) for images in runs.images.values()}) == (pixels != 32)


@pytest.mark.parametrize("known", [{}, {"pixels": 32, "attack_steps": 1000}])
def test_rows_of_other_images_or_attacks_are_not_mixed(tmp_path: Path, known: dict[str, int]) -> None:
    row = {"table": "about", "subject": "x.npz", "what": "cpu", "seed": 0, "smoke": True, **known}
    (tmp_path / "found.jsonl").write_text(json.dumps(row) + "\n")
    done = run_script(STUDIES / "adaptive.py", "--smoke", "--out", str(tmp_path), "--pixels", "128")
    assert done.code != 0
    assert "holds rows of other images or attacks" in done.err


def test_a_table_says_mean_and_deviation_and_what_failed(of_study: None, tmp_path: Path) -> None:
    from adaptive_tables import tables

    place = {"table": "victims", "subject": "avit", "what": "plain"}
    lines = [
        json.dumps({**place, "seed": 0, "top1": 0.5, "macs": 3e6}),
        json.dumps({**place, "seed": 1, "top1": 0.7, "macs": 3e6}),
        json.dumps({**place, "seed": 2, "failed": "RuntimeError: no memory"}),
        '{"table": "victims", "subj',  # a kill cut it off
    ]
    (tmp_path / "found.jsonl").write_text("\n".join(lines))
    text = tables(tmp_path)
    assert "| avit | plain | 60.0 ± 14.1 | 3 ± 0 | 2 |" in text
    assert "victims / avit / plain / 2: RuntimeError: no memory" in text


def test_a_row_that_fails_is_made_by_the_next_call(of_study: None, tmp_path: Path) -> None:
    from found import Found

    def broken() -> dict[str, Any]:
        raise RuntimeError("no memory")

    assert Found(tmp_path).row("victims", "avit", "plain", 0, broken) is None
    again = Found(tmp_path).row("victims", "avit", "plain", 0, lambda: {"top1": 0.5})
    assert again is not None
    assert again["top1"] == 0.5
    assert Found(tmp_path).row("victims", "avit", "plain", 0, broken) == pytest.approx(again, abs=1e-5)


def test_a_line_that_a_kill_cut_off_does_not_spoil_the_next(of_study: None, tmp_path: Path) -> None:
    from found import Found

    (tmp_path / "found.jsonl").write_text('{"table": "victims", "subj')
    Found(tmp_path).row("victims", "avit", "plain", 0, lambda: {"top1": 0.5})
    assert json.loads((tmp_path / "found.jsonl").read_text().splitlines()[1])["top1"] == 0.5


def test_processes_side_by_side_see_the_rows_of_one_another(of_study: None, tmp_path: Path) -> None:
    from found import Found

    made: list[tuple[int, int]] = []

    def work(found: Found, who: int, seed: int) -> None:
        def make() -> dict[str, Any]:
            made.append((who, seed))
            return {"top1": 0.5}

        found.row("main", "scratch", "none", seed, make)

    one, other = Found(tmp_path), Found(tmp_path)
    one.through([("main", partial(work, one, 1), range(3)), ("rest", partial(work, one, 1), range(9))], ["main"], [0])
    other.through([("main", partial(work, other, 2), range(3))], ["main"], None)
    assert made == [(1, 0), (2, 1), (2, 2)]
    anew = one.row("main", "scratch", "none", 2, lambda: {"top1": 0.7}, again=True)
    assert anew is not None
    assert anew["top1"] == 0.7
    assert one.row("main", "scratch", "none", 2, dict) == anew


def test_nothing_is_begun_when_the_time_is_over(of_study: None, tmp_path: Path) -> None:
    from found import Found, OutOfTime

    found = Found(tmp_path, minutes=-1)
    with pytest.raises(OutOfTime):
        found.row("victims", "avit", "plain", 0, lambda: {"top1": 0.5})
