"""The study of GeNIe makes every row once, goes on where it was, and compares what can be compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import study_calls
import torch
from PIL import Image
from processes import run_script
from study_calls import STUDIES

from vitrail.generate.generation_methods import CANDIDATES
from vitrail.learn.diffusion import choose_process
from vitrail.model.trunks.denoiser import NoiseSchedule
from vitrail.run.train import build_model

OF_STUDY = ("genie_fewshot", "genie_models", "genie_tail", "row_table")
DATA = "synthetic:shapes?n=1000&size=32&classes=6"
WAYS = [
    "labelled images alone",
    "weak",
    "strong",
    "mixup",
    "cutmix",
    "txt2img",
    "img2img_low",
    "img2img_high",
    *(f"genie 0.{n}" for n in (5, 6, 7, 8, 9)),
    "genie_ada",
    "txt2img, equal compute",
]
MADE = ["weak copies", "strong copies", "img2img_high", "txt2img", "genie 0.8", "genie_ada"]
# Rows of a smoke run by table and subject, in order.
ROWS: dict[str, dict[str, list[str]]] = {
    "diffusion": {"small-diffusion": ["all classes"]},
    "classifiers": {"oracle": ["trained here"], "backbone": ["MoCo, no labels"]},
    "oracle": {
        "genie": [f"r 0.{n}" for n in range(3, 10)],
        "genie_ada": ["r of 0.5 to 0.9"],
        "txt2img": ["r 1"],
    },
    "round trip": {"genie and back": [f"first r 0.{n}" for n in (3, 5, 7, 9)]},
    "fewshot": {"1-shot": WAYS, "2-shot": WAYS},
    "hardness": {"2-shot": ["img2img_high", *(f"genie 0.{n}" for n in (5, 6, 7, 8, 9)), "genie_ada", "txt2img"]},
    "pictures": {"png": ["samples", "sweep", "trajectory", "density"]},
    "tail": {
        "logits as learned": ["none", "balanced sampling", "mixup in training", *MADE],
        "logits adjusted": ["none", "mixup in training", *MADE],
    },
}


call = partial(study_calls.call, STUDIES / "genie.py", DATA)


def rows(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows of seed 0 by table and name."""
    stored = json.loads((folder / "rows.json").read_text())
    return {table: {name: seeds["0"] for name, seeds in made.items()} for table, made in stored.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the smoke run wrote."""
    out = tmp_path_factory.mktemp("study")
    call("--smoke", "--out", str(out))
    return out


@pytest.mark.slow
def test_every_row_is_there(folder: Path) -> None:
    made = {table: set(names) for table, names in rows(folder).items() if table != "about"}
    wanted = {t: {f"{s}, {w}" for s, whats in subjects.items() for w in whats} for t, subjects in ROWS.items()}
    assert made == wanted


@pytest.mark.slow
def test_what_is_reported_is_of_test_images(folder: Path) -> None:
    splits = {table: row["split"] for table, made in rows(folder).items() for row in made.values() if "split" in row}
    assert splits.pop("diffusion") == "val"
    assert set(splits.values()) == {"test"}


@pytest.mark.slow
def test_all_ways_add_equally_many_images_but_the_two_that_say_so(folder: Path) -> None:
    for shot in (1, 2):
        shots = rows(folder)["fewshot"]
        found = {n.partition(", ")[2]: row["extra"] for n, row in shots.items() if n.startswith(f"{shot}-shot")}
        assert found.pop("labelled images alone") == 0
        assert found.pop("txt2img, equal compute") == 3 * 4 * shot  # four steps: 26 evaluations of Ada, 8 of an image
        assert set(found.values()) == {4 * shot}


@pytest.mark.slow
def test_images_are_made_for_the_rarest_third_alone_and_equally_many_by_all(folder: Path) -> None:
    made = {name.partition(", ")[2]: row["made"] for name, row in rows(folder)["tail"].items()}
    assert made == {**dict.fromkeys(("none", "balanced sampling", "mixup in training"), 0), **dict.fromkeys(MADE, 8)}


@pytest.mark.slow
def test_a_second_call_makes_nothing_again(folder: Path) -> None:
    before = rows(folder)
    text = call("--smoke", "--out", str(folder))
    assert rows(folder) == before
    assert text.count("### ") == len(before)


@pytest.mark.slow
def test_pictures_can_be_looked_at(folder: Path) -> None:
    for name in ("samples", "sweep", "trajectory", "density"):
        with Image.open(folder / "pictures" / f"{name}.png") as picture:
            assert min(picture.convert("RGB").size) > 100


# What the parts are made of


@pytest.fixture
def of_study(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The study's own modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(STUDIES))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in OF_STUDY:
            del sys.modules[name]


@pytest.fixture
def few(of_study: None, tmp_path: Path) -> Any:
    """Episodes of random images, with features that are their mean colours at 16 places."""
    from genie_fewshot import FewShots
    from genie_models import Held, Models, Runs

    runs = Runs("synthetic:shapes?n=120&size=32")
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (60, 3, 32, 32), dtype=torch.uint8, generator=generator)
    runs._held["test"] = Held(pixels, torch.arange(60) % 6)
    models = Models(runs, tmp_path, factor=1.0, weights=None, smoke=True)
    models.embed = lambda images: torch.nn.functional.adaptive_avg_pool2d(images.float(), 4).flatten(1)  # type: ignore
    return FewShots(models, episodes=3)


@pytest.mark.parametrize("schedule", ["cosine", "scaled_linear"])
def test_r_is_as_much_noise_as_on_stable_diffusions_schedule_whatever_the_model_has(few: Any, schedule: str) -> None:
    models = few.models
    models.schedule = schedule
    config = models.config("diffusion")
    assert config.objective.schedule == schedule
    model = build_model(config.model, config, models.runs.data)
    choose_process(model, config.objective)
    models._kept["diffusion"] = model
    times = torch.tensor([models.diffuser.time(r) for r in CANDIDATES], dtype=torch.float64)
    expected = NoiseSchedule("scaled_linear").signal_to_noise(torch.tensor(CANDIDATES, dtype=torch.float64))
    torch.testing.assert_close(NoiseSchedule(schedule).signal_to_noise(times), expected, rtol=1e-9, atol=0)
    if schedule == "cosine":
        assert times.tolist() == pytest.approx([0.647, 0.737, 0.814, 0.876, 0.924], abs=2e-3)
        del models.__dict__["diffuser"]
        models.schedule = "scaled_linear"
        with pytest.raises(ValueError, match="was not trained with the schedule scaled_linear"):
            _ = models.diffuser


def test_rows_of_other_noise_are_not_mixed_with_these(tmp_path: Path) -> None:
    about = {f"{DATA}, settings": {"0": {"smoke": True}}}
    (tmp_path / "rows.json").write_text(json.dumps({"about": about}))
    done = run_script(STUDIES / "genie.py", DATA, "--smoke", "--out", str(tmp_path))
    assert done.code != 0
    assert "holds rows of other settings" in done.err


def test_images_are_made_from_other_classes_of_the_episode_and_of_labelled_images(few: Any) -> None:
    request, labels, shot = few.request(), few.runs["test"].labels, max(few.shots)
    assert (labels[request.source] != request.target).all()
    assert (labels[request.own] == request.target).all()
    rows = len(request) // 3
    for episode in range(3):
        labelled = set(few.episodes.support[episode].flatten().tolist())
        some = slice(episode * rows, (episode + 1) * rows)
        assert set(request.source[some].tolist()) == labelled
        assert set(request.own[some].tolist()) == labelled
        counts = torch.bincount(request.target[some])
        assert counts[few.episodes.classes[episode]].tolist() == [4 * shot] * 5


def test_mixed_images_are_mostly_of_the_class_they_are_labelled_with(few: Any) -> None:
    request, made = few.request(), few.images("mixup").float()
    own, other = (request.images[rows].float() for rows in (request.own, request.source))
    nearer = (made - own).abs().flatten(1).mean(1) <= (made - other).abs().flatten(1).mean(1) + 0.5  # rounding of bytes
    assert nearer.all()


def test_the_adaptive_choice_is_that_of_the_package(few: Any) -> None:
    from vitrail.generate.generation_methods import genie_ada, prototypes_of

    class Blend:
        """Moves an image towards another by r, all at once between two candidates that depend on it."""

        def __call__(self, images: torch.Tensor, target: torch.Tensor, r: float, seeds: torch.Tensor) -> torch.Tensor:
            share = torch.where(torch.tensor(r) > 0.45 + 0.1 * (1 + seeds % 4), 0.8, 0.1 * r)[:, None, None, None]
            towards = few.runs["test"].pixels[target].float()
            return (images.float() * (1 - share) + towards * share).round().to(torch.uint8)

    request, diffuser, shot = few.request(), Blend(), max(few.shots)
    images = request.images[request.source]
    for name, r in zip((f"genie {r:g}" for r in CANDIDATES), CANDIDATES, strict=True):
        made = diffuser(images, request.target, r, request.seeds)
        few._features[name] = few.models.embed(made).view(*few.sources.shape, 1, -1)
    _, r = few.adapted(shot)
    rows = len(request) // 3
    for episode in range(3):
        some = slice(episode * rows, (episode + 1) * rows)
        support = few.episodes.support[episode]
        named = few.runs["test"].labels[support.flatten()]
        # Classes that the episode does not have get some prototype: nothing is made for them.
        aims = torch.zeros(6, 48)
        aims[few.episodes.classes[episode]] = prototypes_of(
            few.models.embed,
            request.images[support.flatten()],
            torch.arange(5).repeat_interleave(shot),
            5,
        )
        assert set(named.tolist()) == set(few.episodes.classes[episode].tolist())
        found = genie_ada(
            diffuser,  # type: ignore[arg-type]
            images[some],
            request.target[some],
            request.seeds[some],
            embed=few.models.embed,
            prototypes=aims,
        )
        assert torch.equal(found.r, r[episode].flatten())
        assert len(found.r.unique()) > 1


def test_made_images_join_the_real_ones_with_the_class_they_were_made_for(of_study: None) -> None:
    from genie_tail import joined

    from vitrail.data.open import open_data
    from vitrail.generate.generation_methods import Samples

    split = open_data("synthetic:shapes?n=60&size=32")["train"]
    pixels = torch.zeros(len(split), 3, 32, 32, dtype=torch.uint8)
    made = Samples(torch.full((2, 3, 32, 32), 9, dtype=torch.uint8), torch.tensor([2, 0]), torch.zeros(2, 3), 8)
    whole, images = joined(split, pixels, made)
    assert whole.labels.tolist() == [*split.labels.tolist(), 2, 0]
    assert len(np.unique(whole.index)) == len(whole) == len(images) == len(whole.keys) == len(split) + 2
    assert whole.generated is not None
    assert whole.generated.nonzero()[0].tolist() == [len(split), len(split) + 1]
    assert (images[-2:] == 9).all()
