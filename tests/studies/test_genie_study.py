"""The study of GeNIe makes every row once, goes on where it was, and compares what can be compared."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import study_calls
import torch
from processes import run_script
from study_calls import STUDIES, script_module

from vitrail.compare.study import read_study
from vitrail.data.open import open_data
from vitrail.generate.generation_methods import CANDIDATES
from vitrail.learn.diffusion import choose_process
from vitrail.model.trunks.denoiser import NoiseSchedule
from vitrail.recipes import with_values
from vitrail.run.train import build_model

DATA = "synthetic:shapes?n=1000&size=32&classes=6"
TINY: dict[str, dict[str, Any]] = {
    "diffusion": {"model.trunk": {"width": 8, "multipliers": (1, 2), "depth": 1, "heads": 2}},
    "oracle": {"model.name": "cifar_resnet20"},
    "backbone": {"model.name": "cifar_resnet20", "objective.bank": 64},
}
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
# Rows of a smoke run by table and subject, in order.
ROWS: dict[str, dict[str, list[str]]] = {
    "oracle": {
        "genie": [f"r 0.{n}" for n in range(3, 10)],
        "genie_ada": ["r of 0.5 to 0.9"],
        "txt2img": ["r 1"],
    },
    "round trip": {"genie and back": [f"first r 0.{n}" for n in (3, 5, 7, 9)]},
    "fewshot": {"1-shot": WAYS, "2-shot": WAYS},
    "hardness": {"2-shot": ["img2img_high", *(f"genie 0.{n}" for n in (5, 6, 7, 8, 9)), "genie_ada", "txt2img"]},
}


call = partial(study_calls.call, STUDIES / "genie.py", DATA)


def rows(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows of seed 0 by table and name."""
    stored = json.loads((folder / "rows.json").read_text())
    return {table: {name: seeds["0"] for name, seeds in made.items()} for table, made in stored.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of genie.yaml, tiny and untrained."""
    out, data = tmp_path_factory.mktemp("runs"), open_data(DATA)
    for name, changes in TINY.items():
        config = with_values(read_study(STUDIES / "genie.yaml").configs[name], changes)
        model = build_model(config.model, config, data)
        if name == "diffusion":
            choose_process(model, config.objective)
        model.save(out / f"{name}-seed0")
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, runs: Path) -> Path:
    """Where the smoke run wrote."""
    out = tmp_path_factory.mktemp("study")
    call("--smoke", "--runs", str(runs), "--out", str(out))
    return out


@pytest.mark.slow
def test_every_row_is_there(folder: Path) -> None:
    made = {table: set(names) for table, names in rows(folder).items() if table != "about"}
    wanted = {t: {f"{s}, {w}" for s, whats in subjects.items() for w in whats} for t, subjects in ROWS.items()}
    assert made == wanted


@pytest.mark.slow
def test_what_is_reported_is_of_test_images(folder: Path) -> None:
    splits = {table: row["split"] for table, made in rows(folder).items() for row in made.values() if "split" in row}
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
def test_a_second_call_makes_nothing_again(folder: Path) -> None:
    before = rows(folder)
    text = call("--smoke", "--runs", "nowhere", "--out", str(folder))
    assert rows(folder) == before
    assert text.count("### ") == len(before)


# What the parts are made of


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Episodes of random images, with features that are their mean colours at 16 places."""
    monkeypatch.syspath_prepend(str(STUDIES))
    genie = script_module(STUDIES / "genie.py", "study_of_genie")

    uri = "synthetic:shapes?n=120&size=32"
    models = genie.Models(
        SimpleNamespace(data=uri, runs=tmp_path, out=tmp_path, diffusion="diffusion", guidance=2.0, smoke=True)
    )
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (60, 3, 32, 32), dtype=torch.uint8, generator=generator)
    models._held["test"] = genie.Held(pixels, torch.arange(60) % 6)
    models.embed = lambda images: torch.nn.functional.adaptive_avg_pool2d(images.float(), 4).flatten(1)  # type: ignore
    return genie.FewShots(models, episodes=3)


@pytest.mark.parametrize("name", ["diffusion", "diffusion-linear"])
def test_r_is_as_much_noise_as_on_stable_diffusions_schedule_whatever_the_model_has(few: Any, name: str) -> None:
    config = with_values(read_study(STUDIES / "genie.yaml").configs[name], TINY["diffusion"])
    model = build_model(config.model, config, few.models.data)
    choose_process(model, config.objective)
    few.models._run = {name: model}.__getitem__
    few.models.options.diffusion = name
    times = torch.tensor([few.models.diffuser.time(r) for r in CANDIDATES], dtype=torch.float64)
    expected = NoiseSchedule("scaled_linear").signal_to_noise(torch.tensor(CANDIDATES, dtype=torch.float64))
    schedule = "scaled_linear" if name == "diffusion-linear" else "cosine"
    torch.testing.assert_close(NoiseSchedule(schedule).signal_to_noise(times), expected, rtol=1e-9, atol=0)
    if schedule == "cosine":
        assert times.tolist() == pytest.approx([0.647, 0.737, 0.814, 0.876, 0.924], abs=2e-3)


def test_rows_of_other_noise_are_not_mixed_with_these(tmp_path: Path) -> None:
    about = {f"{DATA}, settings": {"0": {"smoke": True}}}
    (tmp_path / "rows.json").write_text(json.dumps({"about": about}))
    done = run_script(STUDIES / "genie.py", DATA, "--smoke", "--out", str(tmp_path))
    assert done.code != 0
    assert "holds rows of other settings" in done.err


def test_images_are_made_from_other_classes_of_the_episode_and_of_labelled_images(few: Any) -> None:
    request, labels, shot = few.request(), few.models["test"].labels, max(few.shots)
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
    request = few.request()
    few.models.embed = lambda images: images.float().flatten(1)
    made = few.features("mixup").view(len(request), 3, 32, 32)
    own, other = (request.images[rows].float() for rows in (request.own, request.source))
    nearer = (made - own).abs().flatten(1).mean(1) <= (made - other).abs().flatten(1).mean(1) + 0.5  # rounding of bytes
    assert nearer.all()


def test_the_adaptive_choice_is_that_of_the_package(few: Any) -> None:
    from vitrail.generate.generation_methods import genie_ada, prototypes_of

    class Blend:
        """Moves an image towards another by r, all at once between two candidates that depend on it."""

        def __call__(self, images: torch.Tensor, target: torch.Tensor, r: float, seeds: torch.Tensor) -> torch.Tensor:
            share = torch.where(torch.tensor(r) > 0.45 + 0.1 * (1 + seeds % 4), 0.8, 0.1 * r)[:, None, None, None]
            towards = few.models["test"].pixels[target].float()
            return (images.float() * (1 - share) + towards * share).round().to(torch.uint8)

    request, diffuser, shot = few.request(), Blend(), max(few.shots)
    images = request.images[request.source]
    for name, r in zip((f"genie {r:g}" for r in CANDIDATES), CANDIDATES, strict=True):
        made = diffuser(images, request.target, r, request.seeds)
        few._features[name, 0, None] = few.models.embed(made).view(*few.sources.shape, 1, -1)
    _, r = few.adapted(shot)
    rows = len(request) // 3
    for episode in range(3):
        some = slice(episode * rows, (episode + 1) * rows)
        support = few.episodes.support[episode]
        named = few.models["test"].labels[support.flatten()]
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
