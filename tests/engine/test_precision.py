"""The precision of training steps on a CPU: bf16 where it has matrix units for it and the model gains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import vitrail
from vitrail.config import RunConfig
from vitrail.engine import device
from vitrail.engine.device import choose_precision, training_precision
from vitrail.model.build import create_model
from vitrail.recipes import with_values

CPU = torch.device("cpu")
BF16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@pytest.mark.parametrize(
    ("name", "gains"),
    [
        ("vit_tiny_32", True),
        ("cifar_resnet20", True),
        ("vit_micro_28", False),  # small
        ("patchconvnet_t20_32", False),  # grouped convolutions
        ("timm:mobilenetv4_conv_small", False),
    ],
)
def test_steps_are_in_bf16_where_a_cpu_with_amx_gains(name: str, gains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = create_model(name, classes=10)
    monkeypatch.setattr(device, "has_amx", lambda: True)
    assert training_precision("auto", CPU, model) is (torch.bfloat16 if gains else None)
    assert training_precision("float32", CPU, model) is None
    assert training_precision("bf16", CPU, model) is torch.bfloat16
    assert choose_precision("auto", CPU) is None  # evaluation
    monkeypatch.setattr(device, "has_amx", lambda: False)
    assert training_precision("auto", CPU, model) is None


@pytest.mark.skipif(not BF16, reason="on this CPU the first product in bf16 would turn oneDNN off")
def test_a_run_learns_in_bf16_and_is_evaluated_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "has_amx", lambda: True)
    monkeypatch.setattr(device, "AMX_PARAMETERS", 0)
    given = {
        "data.uri": "synthetic:shapes?n=90&size=28",
        "data.batch": 12,
        "data.workers": 0,
        "model.name": "vit_micro_28",
        "model.trunk": {"depth": 1, "width": 32, "heads": 2},
        "optim.steps": 4,
        "engine.device": "cpu",
        "engine.log_every": 1,
    }
    losses = {}
    for precision in ("auto", "bf16", "float32"):
        config = with_values(RunConfig(), {**given, "engine.precision": precision, "out": str(tmp_path / precision)})
        run = vitrail.train(config)
        lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        losses[precision] = [line["loss"] for line in lines if line["split"] == "train"]
        assert ("training steps use bf16" in capsys.readouterr().err) == (precision == "auto")
        written = json.loads((run.path / "environment.json").read_text())
        assert written["precision"] == {"float32": "None"}.get(precision, "torch.bfloat16")
        if precision == "auto":
            found, _, _ = vitrail.evaluate(run.path, given["data.uri"], quiet=True)
            assert found.scalars() == run.figures.scalars()
    assert losses["auto"] == losses["bf16"] != losses["float32"]
    assert losses["auto"] == pytest.approx(losses["float32"], rel=0.02)
