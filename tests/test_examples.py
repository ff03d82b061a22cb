"""Parts from outside the package: the examples of docs/examples register, train, are evaluated and listed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_script

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
OUTSIDE = ("max_head", "shift_mixer", "margin_objective", "confidence_evaluator", "stripes_source")
TINY = "--model.name vit_micro_28 --optim.steps 2 --data.batch 8 --data.workers 0 --engine.device cpu"
PARTS = "--model.head max --model.head.drop 0.1 --model.trunk.mixer shift --objective margin --objective.margin 0.5"
RUN = """
import sys
from vitrail.cli import run
for words in {commands!r}:
    code = run(words)
    if code: sys.exit(code)
    print("<end>", flush=True)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What every command prints, in a process of its own: registered parts would stay in this one."""
    out = str(tmp_path_factory.mktemp("outside") / "run")
    data = "stripes:?n=60"
    commands = [
        [
            "train",
            "vit",
            "--data",
            data,
            "--out",
            out,
            *TINY.split(),
            *PARTS.split(),
            "--evaluators",
            "confidence",
            "--json",
        ],
        ["evaluate", out, "--protocol", "confidence", "--workers", "0", "--device", "cpu", "--json"],
        ["evaluate", out, "--protocol", "confidence", "--workers", "0", "--device", "cpu"],
        *(["list", what, "--json"] for what in ("heads", "mixers", "objectives", "evaluators", "data")),
    ]
    environment = {"VITRAIL_PARTS": ",".join(OUTSIDE)}
    done = run_script(RUN.format(commands=commands), environment=environment, folder=EXAMPLES)
    assert done.code == 0, done.err[-3000:]
    return done.out.split("<end>\n")


def test_parts_from_outside_train_and_are_evaluated(printed: list[str]) -> None:
    trained, evaluated = (json.loads(text.splitlines()[-1]) for text in printed[:2])
    numbers = evaluated["protocols"]["confidence"]["numbers"]
    assert "confidence_errors" in numbers
    assert all(0 < value <= 1 for value in numbers.values())
    config = (Path(trained["run"]) / "config.yaml").read_text()
    assert all(f"kind: {kind}" in config for kind in ("max", "shift", "margin"))
    metrics = [json.loads(line) for line in (Path(trained["run"]) / "metrics.jsonl").read_text().splitlines()]
    assert any("violations" in row for row in metrics)
    assert any("confidence_errors" in row for row in metrics)


def test_the_table_of_an_evaluator_from_outside_is_shown(printed: list[str]) -> None:
    assert "mean confidence" in printed[2]


def test_parts_from_outside_are_listed_with_their_settings(printed: list[str]) -> None:
    heads, mixers, objectives, evaluators, data = (json.loads(text) for text in printed[3:8])
    assert (heads[-1]["name"], heads[-1]["options"]) == ("max", {"drop": 0.0})
    assert mixers[-1]["name"] == "shift"
    assert (objectives[-1]["name"], objectives[-1]["options"]) == ("margin", {"margin": 1.0})
    assert evaluators[-1]["name"] == "confidence"
    assert "stripes:" in [row["name"] for row in data]


def test_a_head_stands_on_a_timm_model_without_the_trainer() -> None:
    check = "import sys; names = [n for n in sys.modules if n.startswith('vitrail')]; "
    check += "assert logits.shape == (2, 10); print(*names)"
    words = [sys.executable, "-c", (EXAMPLES / "head_on_timm.py").read_text() + "\n" + check]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert not [n for n in done.stdout.split() if n.split(".")[1:2] in (["engine"], ["learn"], ["run"], ["data"])]


def test_dense_features_train_under_mask_rcnn() -> None:
    """Forward and backward; every block of the trunk has a gradient."""
    check = "assert all(p.grad is not None and p.grad.any() for p in trunk.trunk.blocks.parameters())"
    words = [sys.executable, "-c", (EXAMPLES / "mask_rcnn.py").read_text() + "\n" + check]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loss_mask" in done.stdout
