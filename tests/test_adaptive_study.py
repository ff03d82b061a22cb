"""The study of adaptive models makes every row once, goes on where it was, and prints what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import study_calls
from study_calls import STUDIES, rows

SHARES = [f"share {share:g}" for share in (1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)]
PATCHES = ["random", "tap", "ntap", "slowformer"]
VARIED = ["preserve", "destroy", "size 4", "size 12", "size 16", "eps 8", "eps 16", "eps 32"]
AVIT_ONLY = ["released prior", "centre", "another start"]
ABLATIONS = {
    "reference": 1,
    "score": 2,
    "value norm": 1,
    "sampling": 3,
    "order": 1,
    "class token": 1,
    "placement": 4,
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
    assert {group: len(names(folder, "ablation", group)) for group in ABLATIONS} == ABLATIONS
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
