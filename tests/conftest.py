"""Shared by all tests: determinism, where real data are, and small things to train on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from processes import fork_workers, run_script, shorten_reports
from small import SMALL

import vitrail
from vitrail.model.build import create_model


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def _short_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_reports(monkeypatch)


@pytest.fixture
def forked_workers() -> Iterator[None]:
    """Workers of studies are forked, for tests whose claim is about what is trained and not about processes."""
    with pytest.MonkeyPatch.context() as patch:
        fork_workers(patch)
        yield


@pytest.fixture
def hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the hub could be reached, for tests that replace what would download."""
    monkeypatch.setattr("vitrail.model.trunks.timm_trunk.unreachable", lambda: "")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets that VITRAIL_DATA names; the test skips without it."""
    place = os.environ.get("VITRAIL_DATA")
    if not place or not Path(place).is_dir():
        pytest.skip("VITRAIL_DATA names no folder of real data sets")
    return Path(place)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of 3 classes x 20 small JPEGs that differ in colour: learnable, and quick to read."""
    root = tmp_path_factory.mktemp("photos")
    noise = np.random.default_rng(0)
    for c, name in enumerate(("blue", "green", "red")):
        (root / name).mkdir()
        for i in range(20):
            pixels = noise.integers(0, 120, (40, 48, 3), dtype=np.uint8)
            pixels[..., 2 - c] += 100
            Image.fromarray(pixels).save(root / name / f"{i:02d}.jpg", quality=90)
    return root


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a tiny ViT on the shapes."""
    classes = vitrail.open_data("synthetic:shapes?n=60&size=32").classes
    folder = tmp_path_factory.mktemp("teacher")
    return create_model("vit_tiny_32", classes=classes, **SMALL).save(folder)


@pytest.fixture
def interpreted() -> Callable[[str], str]:
    """Runs a script with Triton's interpreter in place of an accelerator; returns what it prints."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")

    def run(script: str) -> str:
        done = run_script(script, environment={"TRITON_INTERPRET": "1"})
        assert done.code == 0, done.err[-2000:]
        return done.out

    return run
