"""A run folder that an earlier version wrote (stopped after step 4 of 8; `model/` is of its end) is read for ever."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vitrail
from vitrail.run.train import resume

EARLIER = Path(__file__).parents[1] / "fixtures" / "earlier-run"


def test_its_model_gives_the_logits_that_it_gave() -> None:
    model = vitrail.load(EARLIER).eval()
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(images)
    expected = torch.tensor(json.loads((EARLIER / "logits.json").read_text()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_it_is_resumed_to_the_weights_that_the_earlier_version_reached(tmp_path: Path) -> None:
    """With the optimiser that each weight had: Muon left heads to AdamW then."""
    folder = tmp_path / "run"
    shutil.copytree(EARLIER, folder)
    before = (folder / "metrics.jsonl").read_text().splitlines()
    earlier = vitrail.load(EARLIER)
    (folder / "model" / "model.safetensors").unlink()
    run = resume(folder, quiet=True)
    after = (folder / "metrics.jsonl").read_text().splitlines()
    assert after[:3] == before[:3]  # up to the checkpoint
    assert json.loads(after[-1])["step"] == 8
    for (name, value), expected in zip(run.model.state_dict().items(), earlier.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=name)
    assert (folder / "model" / "model.safetensors").is_file()
    assert load_file(folder / "model" / "model.safetensors").keys() == run.model.state_dict().keys()


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in EARLIER.rglob("*") if file.is_file()) < 200_000


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "model/model.json"])
def test_it_holds_no_path_of_a_machine(name: str) -> None:
    text = (EARLIER / name).read_text()
    assert re.findall(r"(?<![\w.:/*])/[A-Za-z]\w*/?", text) == []
