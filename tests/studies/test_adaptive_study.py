"""The study of adaptive models measures and attacks every model, goes on where it was, and prints its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import run_script
from study_calls import STUDIES

PATCHES = ["tap", "none", "random", "ntap", "slowformer"]  # the first attack brings the rows without one
VARIED = ["preserve", "destroy", "size 4", "size 12", "size 16", "eps 8", "eps 16", "eps 32"]
AVIT_ONLY = ["released prior", "centre", "another start"]


def call(folder: Path) -> str:
    words = ["--smoke", "--seeds", "1", "--jobs", "1", "--data", "synthetic:shapes?n=120&size=32"]
    environment = {"OMP_NUM_THREADS": "1"}
    done = run_script(STUDIES / "adaptive.py", *words, environment=environment, folder=folder)
    assert done.code == 0, done.err
    return done.out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the smoke run of one seed worked, and its output."""
    folder = tmp_path_factory.mktemp("study")
    return folder, call(folder)


def rows(made: tuple[Path, str]) -> dict[str, dict[str, dict[str, Any]]]:
    stored: dict[str, dict[str, dict[str, Any]]] = json.loads((made[0] / "runs/studies/adaptive/rows.json").read_text())
    return stored


@pytest.mark.slow
def test_every_row_is_there(made: tuple[Path, str]) -> None:
    stored = rows(made)
    assert len(stored["shares"]) == 2 * 8
    assert len(stored["sampling"]) == 2 * (10 + 4 + 2) - 1  # random points cannot cost as much as the first budget
    attacks = stored["attacks"]
    for kind in ("ats", "avit", "adavit"):
        wanted = {*PATCHES, *VARIED, *(AVIT_ONLY if kind == "avit" else [])}
        assert {name.partition(", ")[2] for name in attacks if name.startswith(f"{kind}, ")} == wanted
    assert len(stored["transfer"]) == 6
    assert {name.partition(", ")[2] for name in stored["defence"]} == {"none", "random", "slowformer", "patch of avit"}


@pytest.mark.slow
def test_success_is_the_share_of_savings_that_an_attack_takes_back(made: tuple[Path, str]) -> None:
    attacks, sampled = rows(made)["attacks"], rows(made)["victims"]["ats"]["0"]
    clean, learned = attacks["ats, none"]["0"], attacks["ats, slowformer"]["0"]
    most = sampled["macs"] / sampled["share"]
    assert clean["macs"] < most
    assert learned["success"] == pytest.approx((learned["macs"] - clean["macs"]) / (most - clean["macs"]), rel=1e-3)


@pytest.mark.slow
def test_a_second_call_makes_nothing_again_and_prints_the_same(made: tuple[Path, str]) -> None:
    before = rows(made)
    assert call(made[0]).endswith(made[1][made[1].index("### shares") :])
    assert rows(made) == before


def test_rows_are_kept_and_printed_over_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STUDIES))
    from row_table import Rows  # type: ignore[import-not-found]

    for seed, value in ((0, 0.5), (1, 0.7)):
        Rows(tmp_path / "rows.json").row("t", "a", seed, lambda v=value: {"top1": v, "kinds": [1]})
    kept = Rows(tmp_path / "rows.json")
    assert kept.row("t", "a", 1, dict) == {"top1": 0.7, "kinds": [1]}
    assert kept.markdown().splitlines()[-1] == "| a | 0.6 ± 0.14 | 2 |"
