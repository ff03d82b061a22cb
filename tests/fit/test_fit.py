"""`vitrail fit`: a latency in, a file within it out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.cli import run as command
from vitrail.compare.study import Study
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.open import open_data
from vitrail.fit import candidates, finished_file
from vitrail.fit import run as fitting
from vitrail.fit.candidates import (
    Candidate,
    Measured,
    build,
    candidates_for,
    expected,
    known_without_measuring,
    measure,
    others_at_work,
    within_time,
)
from vitrail.fit.finished_file import FitResult, faster, in_fewer_bits
from vitrail.fit.limits import Budget, quantity
from vitrail.fit.page import rows, verdict
from vitrail.fit.pictures import PICTURES, Pictures
from vitrail.fit.run import trainable
from vitrail.fit.search import SHARES, TAUGHT, Form, Search, Trial, most_promising
from vitrail.model.export import read_onnx, to_single_onnx
from vitrail.recipes import recipe, with_values
from vitrail.run.evaluate import evaluate, load
from vitrail.run.run_data import open_run

SCRATCH = with_values(recipe("scratch"), {"data.batch": 5})


@pytest.fixture
def small() -> Pictures:
    """Of 28 pixels."""
    return Pictures(open_data("embedded:fashion")["train"], [])


def test_photographs_far_too_large_are_decoded_and_timed_as_a_trained_model_gets_them(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 26, 3), np.uint8)
    for i in range(40):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.fromarray(noise).resize((1300, 1000)).save(tmp_path / "ab"[i % 2] / f"{i}.jpg")
    pictures = Pictures(open_data(str(tmp_path))["train"], [AugmentConfig(scale=(0.25, 1.0))])
    assert (pictures.side, pictures.size) == (1000, (1300, 1000))
    config = pictures.preprocess(PreprocessConfig(size=96))
    assert config.reducing_gap == 2
    whole, reduced = (pictures.decoded(c) for c in (PreprocessConfig(size=96), config))
    assert {image.size for image in whole} == {(1300, 1000)}
    assert {image.size for image in reduced} == {(325, 250)}  # of at least 2 x 96 / 0.875: a quarter
    assert len(whole) == len(reduced) <= PICTURES
    assert pictures.seconds(config) > 0
    assert 0 < pictures.preparing(96) < 1
    assert pictures.preprocess(PreprocessConfig(size=280)) == PreprocessConfig(size=280)  # 640 pixels are needed


def cost(name: str, milliseconds: float, size: int = 128, megabytes: float = 1.0) -> Measured:
    return Measured(Candidate(name, size), milliseconds / 1e3, int(megabytes * 1e6))


@pytest.mark.parametrize(("text", "value"), [("5ms", 0.005), ("0.5 s", 0.5), ("250US", 250e-6)])
def test_a_time_is_a_number_and_a_unit(text: str, value: float) -> None:
    assert quantity(text, ("us", "ms", "s"), "--latency") == pytest.approx(value)


@pytest.mark.parametrize("text", ["5", "ms", "-5ms", "0ms", "5 minutes", "5MB", "1e3ms"])
def test_another_text_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"--latency: .* as in 5ms"):
        quantity(text, ("us", "ms", "s"), "--latency")


def test_a_budget_keeps_a_tenth_of_the_latency_in_reserve_and_nothing_of_the_size() -> None:
    budget = Budget(0.010, 2e6)
    assert budget.meets(0.009, 2e6)
    assert not budget.meets(0.0091, 2e6)
    assert budget.meets(0.0099, 2e6, share=1.0)
    assert not budget.meets(0.001, 2.1e6)
    assert Budget(0.010).meets(0.001, 1e12)


def test_small_images_get_small_networks_and_photographs_the_sizes_that_they_have() -> None:
    assert {c.size for c in candidates_for(32)} == {28, 32}
    assert {c.size for c in candidates_for(150)} == {96, 128, 160}
    assert {c.size for c in candidates_for(70)} == {96}
    assert {c.size for c in candidates_for(4000)} == {160, 192, 224}


@pytest.mark.parametrize(
    ("enough_at", "chosen"),
    [  # a photo network learns enough with images of at most so many pixels
        (128, [("timm:resnet18", 128), ("timm:resnet18", 96)]),
        (100, [("timm:resnet18", 96), ("timm:resnet18", 64), ("timm:resnet18", 48)]),
        (64, [("timm:resnet18", 64), ("timm:resnet18", 48)]),
        (50, [("timm:resnet18", 48)]),
        (1, []),
    ],
)
def test_where_time_is_short_images_are_smaller(enough_at: int, chosen: list[tuple[str, int]]) -> None:
    found = [Candidate("timm:resnet18", 128), Candidate("timm:resnet18", 96)]
    within, slower = within_time(found, lambda candidate: enough_at / candidate.size)
    assert [(c.model, c.size) for c in within] == chosen
    assert [c.size for c in slower] == ([] if chosen else [48])


def test_what_learns_nearly_enough_takes_part_in_its_fastest_form() -> None:
    found = [Candidate("timm:resnet18", 128), Candidate("vit_micro_28", 28), Candidate("sot_7_32", 28)]
    found += [Candidate("resmlp_t12_32", 28)]
    learns = {"resnet18-128": 0.2, "resnet18-64": 0.4, "resnet18-48": 0.6, "vit_micro_28-28": 2.0, "sot_7_32-28": 0.3}
    learns["resmlp_t12_32-28"] = 0.4
    within, slower = within_time(found, lambda candidate: learns[candidate.name])
    assert [c.name for c in within] == ["resnet18-48", "vit_micro_28-28"]
    assert [c.name for c in slower] == ["resmlp_t12_32-28", "sot_7_32-28"]


@pytest.mark.parametrize(
    ("images", "minutes", "sizes", "taught"),
    [
        (1000, 10, {128, 96}, True),  # 20 epochs of 1,000 images in 195 s (0.65 of 600 s, shared by two): 103 images/s
        (1000, 2, {96, 64, 48}, False),  # 513 images/s
        (1000, 1, {64, 48}, False),  # 1,026 images/s
        (100_000, 5.4, {96, 64, 48}, False),  # 60,000 images in 105 s: 570 images/s
    ],
)
def test_a_processor_trains_what_it_can_learn_in_the_time(
    images: int, minutes: float, sizes: set[int], taught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "candidates_for", lambda _: [Candidate("timm:resnet18", s) for s in (128, 96)])
    monkeypatch.setattr(fitting, "on_accelerator", lambda: False)
    measured = {"timm:resnet18": 600.0, "timm:resnet50": 200.0}  # images/s at 96 pixels
    speed = lambda candidate, _: measured[candidate.model] * (96 / candidate.size) ** 2  # noqa: E731
    monkeypatch.setattr(fitting, "training_speed", speed)
    data, said, speeds = type("Data", (dict,), {"classes": ["a", "b"]})(train=range(images)), [], {}
    found, slower, teacher_at = trainable(data, 128, 60 * minutes, speeds, False, said.append)
    assert {candidate.size for candidate in found} == sizes
    assert not slower
    assert teacher_at(96) == (Candidate("timm:resnet50", 96) if taught else None)
    assert speeds.items() >= {("resnet18-48", 2400.0), ("resnet50-96", 200.0)}
    assert len(said) == (1 if taught else 3)


def test_published_weights_need_a_tenth_of_the_time_and_keep_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "candidates_for", lambda _: [Candidate("timm:resnet18", s) for s in (128, 96)])
    monkeypatch.setattr(fitting, "on_accelerator", lambda: False)
    monkeypatch.setattr(fitting, "training_speed", lambda candidate, _: 600.0 * (96 / candidate.size) ** 2)
    data = type("Data", (dict,), {"classes": ["a", "b"]})(train=range(1000))
    sizes = {}  # 2,000 images in 0.325 of the seconds: 337.5 images/s in 18.2 s, 600 in 10.3
    for seconds in (20, 15, 8):
        found, _, _ = trainable(data, 128, seconds, {}, True, lambda _: None)
        sizes[seconds] = [candidate.size for candidate in found]
    assert sizes == {20: [128, 96], 15: [96], 8: [96]}


def test_training_speed_is_of_forward_and_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(Candidate("vit_micro_28", 28), ["a", "b"])
    seen: list[tuple[int, bool]] = []
    model.register_forward_hook(lambda model, inputs, _: seen.append((len(inputs[0]), model.training)))
    monkeypatch.setattr(candidates, "build", lambda *_: model)
    clock = iter([0.0, 5.0, 10.0, 12.0, 20.0, 23.0])  # the first pass takes five seconds, the second two
    monkeypatch.setattr(candidates.time, "perf_counter", lambda: next(clock))
    assert candidates.training_speed(Candidate("vit_micro_28", 28), ["a", "b"]) == 32 / 2
    assert seen == [(32, True)] * 3
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("side", [28, 33, 96])
def test_every_candidate_can_be_built_and_named_in_a_study(side: int) -> None:
    base = recipe("scratch")
    names = {c.name: {"model": {"name": c.model, "image_size": c.size, **c.settings}} for c in candidates_for(side)}
    assert set(Study("all", base, names, budget="none").variants) == set(names)
    for candidate in candidates_for(side):
        if candidate.size <= 96:
            assert build(candidate, ["a", "b", "c"]).preprocess.size == candidate.size


def test_the_first_rung_has_the_largest_form_of_the_architectures_that_are_expected_to_be_best() -> None:
    costs = [cost("deit_small", 1, 96), cost("deit_small", 3, 128), cost("timm:resnet26d", 2), cost("unknown", 9)]
    for published, order in (False, ["timm:resnet26d", "deit_small"]), (True, ["deit_small", "timm:resnet26d"]):
        chosen = most_promising(costs, 2, published)
        assert [m.candidate.model for m in chosen] == order
        assert {m.candidate.size for m in chosen if m.candidate.model == "deit_small"} == {128}


def test_what_is_merged_comes_right_after_the_whole() -> None:
    merging = {"trunk": {"adaptive": {"kind": "tome", "r": 8}}}
    whole, merged, worse = Candidate("deit_tiny", 96), Candidate("deit_tiny", 96, merging), Candidate("deit_small", 96)
    assert expected(whole, False) > expected(merged, False) > expected(worse, False)


def no_smaller(_: Candidate) -> None:
    """No other image size."""


@pytest.mark.parametrize(("seconds", "again"), [(24_100, True), (23_900, False)])  # 60 epochs of four trainings
def test_a_second_seed_decides_between_two_that_are_close_where_there_is_time(
    seconds: float, again: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = {("a", 1): 0.81, ("b", 1): 0.80, ("a", 2): 0.78, ("b", 2): 0.79}
    calls: list[tuple[int, int, int]] = []

    def rung(
        search: Search,
        number: int,
        forms: list[Form],
        teacher: object = None,
        seeds: int = 1,
        shared_by: int = 0,
        **_: int,
    ) -> list[Trial]:
        calls.append((number, seeds, shared_by))
        found = [Trial(f, number, values[f.measured.candidate.model, seeds], 0.02, 1, 1, "", seeds) for f in forms]
        search.trials += found
        return found

    monkeypatch.setattr(Search, "_rung", rung)
    state = {"speeds": {"a-128": 1.0, "b-128": 1.0}}
    said: list[str] = []
    search = Search(SCRATCH, 100, 100, seconds, tmp_path, "top1", state, lambda: None, said.append)
    best = search.run([cost("a", 1), cost("b", 2)], None, Candidate("a", 32), lambda _: [], no_smaller)
    assert [call[:2] for call in calls] == [(0, 1), (2, 1), (2, 2)][: 3 if again else 2]
    assert {shared for *_, shared in calls[1:]} == ({4} if again else {2})  # both, and both again
    assert best.form.measured.candidate.model == ("b" if again else "a")
    assert {t.seeds for t in search.trials if t.rung == 2} == {2 if again else 1}
    assert ("there is no time for a second seed" in said[-1]) is not again


@pytest.mark.parametrize(
    ("speed", "published", "forms"), [(59, False, 1), (61, False, 2), (79, True, 2), (81, False, 3)]
)
def test_the_best_is_taught_and_has_another_head_where_there_is_time(
    speed: float, published: bool, forms: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rungs: list[list[str]] = []

    def rung(search: Search, number: int, forms: list[Form], *_: object, **__: object) -> list[Trial]:
        rungs.append([form.name for form in forms])
        return [Trial(form, number, 0.5 + 0.1 * place, 0.02, 1, 1, "") for place, form in enumerate(forms)]

    monkeypatch.setattr(Search, "_rung", rung)
    # 300 s: 100 for each of two forms and a teacher, 75 for three; 60 epochs of 100 images are 60 and 80 images/s
    base = recipe("finetune") if published else SCRATCH
    search = Search(base, 100, 100, 300, tmp_path, "top1", {}, lambda: None, lambda _: None)
    search.state["speeds"] = {"a-128": speed, "b-128": speed}
    pooled = lambda _: [Form(cost("pooled", 1))]  # noqa: E731
    best = search.run([cost("b", 1), cost("a", 2)], None, Candidate("t", 32), pooled, no_smaller)
    assert rungs[0] == ["b-128", "a-128"]
    assert rungs[1] == ["a-128", "a-128-distilled", "pooled-128"][:forms]
    assert best.form.name == rungs[1][-1]


@pytest.mark.parametrize(("count", "lengths"), [(4, [3.0, 5.0]), (3, [35 / 4]), (2, [35 / 3])])
def test_three_or_fewer_have_the_time_of_two_rungs_at_once(
    count: int, lengths: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planned: list[tuple[int, float]] = []

    def train(search: Search, name: str, number: int, forms: list[Form], seconds: float, *_: object) -> list[Trial]:
        planned.append((number, seconds))
        return [Trial(form, number, 0.5 - 0.1 * place, 0.02, 1, seconds, "") for place, form in enumerate(forms)]

    monkeypatch.setattr(Search, "train", train)
    costs = [cost(model, 1) for model in ("timm:resnet26d", "timm:resnet18", "deit_tiny", "deit_small")[:count]]
    state = {"speeds": {m.candidate.name: 1000 for m in costs}}
    search = Search(SCRATCH, 100, 50, 100, tmp_path, "top1", state, lambda: None, lambda _: None)
    search.run(costs, None, None, lambda _: [], no_smaller)
    assert [number for number, _ in planned] == [*range(len(lengths)), 2]
    # 15 and 20 s, and one more share in reserve
    assert [seconds for _, seconds in planned[:-1]] == pytest.approx(lengths)


def test_the_page_numbers_the_rungs_that_there_were(tmp_path: Path) -> None:
    form = Form(cost("a", 1))
    trials = tuple(Trial(form, rung, 0.5, 0.02, 1, 1, "") for rung in (0, 2))
    fitted = FitResult(tmp_path, tmp_path / "file", Budget(0.005), 0.004, 1, "test", 1, 2, trials[1], trials, (), ())
    assert [row["rung"] for row in rows(fitted)] == ["2", "1"]


def test_the_page_does_not_say_that_the_chosen_one_was_ahead_of_a_better_one_with_a_slower_file(tmp_path: Path) -> None:
    names = {"slower": 0.6, "chosen": 0.5, "behind": 0.4}
    trials = tuple(Trial(Form(cost(name, 1)), 2, value, 0.02, 1, 1, "") for name, value in names.items())
    fitted = FitResult(tmp_path, tmp_path / "file", Budget(0.005), 0.004, 1, "test", 1, 2, trials[1], trials, (), ())
    assert "ahead of behind-128 by more than twice" in verdict(fitted)
    fitted = replace(fitted, trials=trials[:2])
    assert "ahead" not in verdict(fitted)


@pytest.mark.parametrize(
    ("speeds", "left"),
    [
        # 100 images, and 100 s that candidates, the larger one and one more share: an epoch in 100 / 6 s is 6 images/s.
        ([7, 40, 50, 60], [7, 40, 50, 60]),
        ([40, 50, 60, 5], [40, 50, 60]),  # the slowest is left out,
        ([40, 5, 50, 60], [40, 5, 50]),  # unless much is expected of it
        ([40, 1, 50, 60], [40, 50, 60]),  # and it is not far too slow;
        ([1, 2, 3, 4], [1, 2, 4]),  # the second rung takes three
        ([1, 1], [1, 1]),
    ],
)
def test_the_slowest_are_left_out_where_first_trials_would_be_too_short(
    tmp_path: Path, speeds: list[float], left: list[float]
) -> None:
    models = ["timm:resnet26d", "timm:resnet18", "deit_tiny", "deit_small"][: len(speeds)]
    costs = [cost(model, 1 + number) for number, model in enumerate(models)]
    by_name = dict(zip((m.candidate.name for m in costs), speeds, strict=True))
    state = {"speeds": by_name, "epochs": {}}
    seconds = 100 / SHARES[0]
    search = Search(SCRATCH, 100, 50, seconds, tmp_path, "top1", state, lambda: None, lambda _: None)
    assert [by_name[m.candidate.name] for m in search._first(costs[::-1], 1, no_smaller)] == left


def test_what_is_slow_to_learn_gets_smaller_images_before_it_is_left_out(tmp_path: Path) -> None:
    models = ["timm:resnet26d", "timm:resnet18", "deit_tiny", "deit_small"]
    state = {"speeds": {"resnet26d-128": 40, "resnet18-128": 50, "deit_tiny-128": 5, "deit_small-128": 2}}
    state["speeds"] |= {"deit_tiny-96": 5.5, "deit_tiny-64": 9, "deit_small-96": 3}
    asked: list[str] = []

    def smaller(slow: Candidate) -> Measured | None:
        asked.append(slow.name)
        sizes = {"deit_tiny-128": 96, "deit_tiny-96": 64, "deit_small-128": 96}
        candidate = replace(slow, size=sizes[slow.name]) if slow.name in sizes else None
        return None if candidate is None else Measured(candidate, 1e-3, 1)

    said: list[str] = []
    search = Search(SCRATCH, 100, 50, 100 / SHARES[0], tmp_path, "top1", state, lambda: None, said.append)
    first = search._first([cost(model, 1) for model in models], 0, smaller)  # 20 s, then 25 s each: 5 and 4 images/s
    assert [m.candidate.name for m in first] == ["resnet26d-128", "resnet18-128", "deit_tiny-128"]
    assert asked == ["deit_small-128", "deit_small-96"]
    assert said[0].startswith("deit_small-96 takes the place of deit_small-128: 4 first trials would be of 20 s, 0.4 ")
    assert said[1].startswith("deit_small-96 is left out: 4 first trials would be of 20 s, 0.6 epochs of deit_small-96")
    state["speeds"] |= {"deit_tiny-128": 3, "deit_small-128": 40}
    first = search._first([cost(model, 1) for model in models], 0, smaller)
    assert [m.candidate.name for m in first] == ["resnet26d-128", "resnet18-128", "deit_tiny-96", "deit_small-128"]


def test_who_would_be_left_out_gets_smaller_images_first_though_another_is_slower(tmp_path: Path) -> None:
    models = ["timm:resnet26d", "timm:resnet18", "deit_tiny", "deit_small"]
    state = {"speeds": {"resnet26d-128": 3, "resnet18-128": 50, "deit_tiny-128": 50, "deit_small-128": 4}}
    state["speeds"] |= {"deit_small-96": 9}

    def smaller(slow: Candidate) -> Measured | None:
        return Measured(replace(slow, size=96), 1e-3, 1) if slow.name == "deit_small-128" else None

    said: list[str] = []
    search = Search(SCRATCH, 100, 50, 100 / SHARES[0], tmp_path, "top1", state, lambda: None, said.append)
    first = search._first([cost(model, 1) for model in models], 0, smaller)  # 20 s, then 25 s each: 5 and 4 images/s
    assert said[0].startswith("deit_small-96 takes the place of deit_small-128: 4 first trials would be of 20 s, 0.8 ")
    assert said[1].startswith("deit_small-96 is left out: 4 first trials would be of 20 s, 0.6 epochs of resnet26d-128")
    assert [m.candidate.name for m in first] == ["resnet26d-128", "resnet18-128", "deit_tiny-128"]


def test_the_least_expected_are_left_out_where_first_trials_would_be_of_a_second(tmp_path: Path) -> None:
    costs = [cost(model, 1) for model in ("timm:resnet26d", "timm:resnet18", "deit_tiny", "deit_small")]
    state = {"speeds": {m.candidate.name: speed for m, speed in zip(costs, (400, 900, 900, 900), strict=True)}}
    search = Search(SCRATCH, 100, 50, 6 / SHARES[0], tmp_path, "top1", state, lambda: None, lambda _: None)
    assert [m.candidate.model for m in search._first(costs[::-1], 0, no_smaller)] == [
        "timm:resnet26d",
        "timm:resnet18",
        "deit_tiny",
    ]


@pytest.mark.parametrize(("teacher", "share"), [(None, 1), (Candidate("t", 32), 1 / 2)])
@pytest.mark.parametrize(("spent", "left"), [(100, 900), (300, 700), (500, 650)])  # at least its share of 1,000
def test_the_last_trainings_have_what_time_is_left(
    spent: float,
    left: float,
    teacher: Candidate | None,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    lengths: list[float] = []
    monkeypatch.setattr(Search, "train", lambda _, name, number, forms, seconds, *more: lengths.append(seconds))
    search = Search(SCRATCH, 100, 50, 1000, tmp_path, "top1", {}, lambda: None, lambda _: None)
    form = Form(cost("a", 1))
    search.trials = [Trial(form, 0, 0.5, 0.02, 1, spent / 4, ""), Trial(form, 1, 0.5, 0.02, 3, 3 * spent / 4, "")]
    search.trials.append(Trial(form, 2, 0.5, 0.02, 9, 600, ""))  # a second seed has as long as the first
    search._rung(2, [form], teacher)
    assert lengths == [pytest.approx(left * share)]


def test_later_trainings_are_as_long_as_earlier_ones_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rates = [1e3, 5e3, 6e3]  # images/s of a run; with the first, it began

    def compared(study: Study, **_: object) -> tuple[SimpleNamespace, str]:
        history = [{"images_per_second": rate} for rate in rates] + [{"loss": 1.0}]
        member = SimpleNamespace(metrics={"top1": 0.5}, seconds=10.0, path="", history=history)
        rows = [SimpleNamespace(variant=name, failures=(), members=[member]) for name in study.variants]
        return SimpleNamespace(rows=rows), ""

    monkeypatch.setattr("vitrail.fit.search.compare_study", compared)
    state = {"speeds": {"vit_micro_28-28": 3e3, "resnet18_32-28": 1e3}, "epochs": {}}
    search = Search(recipe("scratch"), 10_000, 50, 1000, tmp_path, "top1", state, lambda: None, lambda _: None)
    form = Form(Measured(Candidate("vit_micro_28", 28), 1e-3, 1))
    assert search.train("rung-0", 0, [form], 10)[0].epochs == 3
    assert search.train("rung-1", 1, [form], 20)[0].epochs == 11
    rates[1:] = [500.0]
    taught = replace(form, training=TAUGHT)
    assert search.train("rung-2", 2, [taught], 30, Candidate("resnet18_32", 28))[0].epochs == 16.5
    assert search.train("rung-2-seeds", 2, [form], 40)[0].epochs == 22  # a pupil's rate is not that of the plain form
    assert state["speeds"]["vit_micro_28-28"] == 3e3  # by which a search that goes on makes the same first choice


@pytest.mark.slow  # exporters take seconds
def test_the_file_that_is_measured_computes_the_same_as_the_model(tmp_path: Path) -> None:
    model = build(Candidate("vit_micro_28", 28), ["a", "b", "c"])
    path = tmp_path / "new" / "one.onnx"  # the first candidate of a search comes before its folder
    assert to_single_onnx(model, path) == path.stat().st_size
    image = torch.randint(256, (1, 3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = model(image).softmax(1)
    assert torch.allclose(read_onnx(path)(image), wanted, atol=1e-5)


def test_eager_latency_is_of_one_thread_and_leaves_the_number_of_threads() -> None:
    threads, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        candidates._eager_latency(lambda images: seen.append(torch.get_num_threads()), 8)
        assert (set(seen), torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(threads)


def test_forms_have_names_of_their_own() -> None:
    pooled = Candidate("vit_tiny_32", 32, {"head": {"kind": "attention_pool"}}, "int8")
    merged = Candidate("deit_tiny", 96, {"trunk": {"adaptive": {"kind": "tome", "r": 4}}})
    assert pooled.name == "vit_tiny_32-32-attention_pool-int8"
    assert merged.name == "deit_tiny-96-tome"
    assert Form(Measured(pooled), {"objective": {"kind": "distillation"}}).name.endswith("-distilled")
    assert Measured.from_json(json.loads(json.dumps(Measured(merged, 0.1, 5).to_json()))) == Measured(merged, 0.1, 5)


def test_a_budget_that_nothing_meets_is_answered_with_the_nearest_that_can_be_met(
    small: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = [cost("slow", 20), cost("fast", 1.8), Measured(Candidate("x", 32))]
    monkeypatch.setattr(Pictures, "preparing", lambda *_: 0.0004)
    text = fitting._nothing_fits(Budget(0.001), measured, small)
    assert "nothing meets 1 ms on 2 CPU threads" in text
    assert text.endswith("the nearest is fast-128: --latency 2ms")
    monkeypatch.setattr(Pictures, "preparing", lambda *_: 0.0015)
    text = fitting._nothing_fits(Budget(0.001), measured, small)
    assert text.endswith("2ms (1.5 ms of it to resize images of 28 x 28 pixels; smaller ones take less)")
    hopeless = [Measured(Candidate("slow", 32), eager=0.08), Measured(Candidate("fast", 32), eager=0.02)]
    text = fitting._nothing_fits(Budget(0.001), hopeless, small)
    assert text.endswith("fast-32 is nearest, 20 ms in PyTorch: --latency 20ms")


def test_where_nothing_that_learns_enough_is_fast_enough_others_are_tried(
    photographs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow processor with few minutes the networks that learn most need not be those that are fastest."""
    times = {"cifar_resnet20": 9.0, "sot_7_32": 6.0, "vit_micro_28": 3.0}
    speeds = {"cifar_resnet20": 9e9, "sot_7_32": 2.0, "vit_micro_28": 1.0, "resnet18_32": 1.0}
    monkeypatch.setattr(fitting, "candidates_for", lambda _: [Candidate(name, 28) for name in times])
    monkeypatch.setattr(fitting, "on_accelerator", lambda: False)
    monkeypatch.setattr(fitting, "training_speed", lambda candidate, _: speeds[candidate.model])
    monkeypatch.setattr(fitting, "measure", lambda c, *_: [cost(c.model, times[c.model], c.size)])
    searched: list[Measured] = []
    monkeypatch.setattr(Search, "run", lambda self, fits, *_: searched.extend(fits) or stop())

    def stop() -> None:
        raise KeyboardInterrupt

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        fitting.fit(photographs, Budget(4e-3), tmp_path / "out", minutes=1, weights="none", say=said.append)
    assert [m.candidate.model for m in searched] == ["vit_micro_28"]
    assert "of what learns enough in 1 minutes nothing meets 4 ms on 2 CPU threads; trying what learns less" in said
    with pytest.raises(ValueError, match=r"nearest is vit_micro_28-28: --latency 3\.3ms"):
        fitting.fit(photographs, Budget(2e-3), tmp_path / "other", minutes=1, weights="none", say=said.append)


def test_what_a_larger_budget_would_buy_is_the_slowest_within_twice_the_budget() -> None:
    found = fitting._next_larger(Budget(0.002), [cost("in", 1.9), cost("over", 2.5), cost("best", 3.9), cost("far", 9)])
    assert found is not None
    assert found.candidate.model == "best"
    assert fitting._next_larger(Budget(0.002), [cost("in", 1.0)]) is None
    small = Measured(Candidate("best", 128, precision="int8"), 0.001, 1)  # its training is one of the first rung
    assert fitting._next_larger(Budget(0.002), [cost("best", 3.9), small]) is None


def test_a_hopeless_candidate_is_not_exported(small: Pictures, tmp_path: Path) -> None:
    (found,) = measure(Candidate("vit_tiny_32", 32), ["a", "b"], Budget(1e-6), small, tmp_path)
    assert found.latency is None
    assert "times the budget" in found.reason
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("enough", "asked"), [(2, ["a-128", "a-96", "b-128"]), (None, ["a-128", "a-96", "b-128", "c-128"])]
)
def test_measuring_ends_when_enough_architectures_meet_the_budget(
    enough: int | None, asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = {"a-128": 1.2, "a-96": 0.8, "b-128": 0.7, "c-128": 0.6}  # b fits with 128 pixels: 96 tell nothing more
    calls: list[str] = []

    def measured(candidate: Candidate, *_: object) -> list[Measured]:
        calls.append(candidate.name)
        return [cost(candidate.model, times[candidate.name], candidate.size)]

    monkeypatch.setattr(fitting, "measure", measured)
    candidates = [Candidate(model, size) for model in "abc" for size in (128, 96)]
    state: dict[str, Any] = {"measured": []}
    data = open_data("embedded:fashion")
    where = data, Budget(0.001), [], tmp_path, state, lambda: None, lambda _: None
    found = fitting.measure_all(candidates, enough, *where)
    assert calls == asked
    assert [m.to_json() for m in found] == state["measured"]
    assert fitting.measure_all(candidates, enough, *where) == found  # goes on: nothing is measured again
    assert calls == asked


def test_a_busy_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for mean, text in (1.9, ""), (2.1, "load 2.1 on 4 cores"):
        monkeypatch.setattr("os.getloadavg", lambda mean=mean: (mean, 0.0, 0.0), raising=False)
        assert others_at_work() == text


def test_larger_images_tell_what_need_not_be_measured_with_smaller_ones() -> None:
    budget = Budget(0.001)
    known = [cost("slow", 5.5, 128), cost("near", 5.3, 128), cost("fits", 0.8, 128), Measured(Candidate("odd", 128))]
    assert known_without_measuring(Candidate("slow", 96), known, budget) == "slow-128 is far over the budget"
    assert (
        known_without_measuring(Candidate("near", 96), known, budget) == ""
    )  # 2.98 ms by area: int8 may bring that in
    assert "meets the budget" in known_without_measuring(Candidate("fits", 96), known, budget)
    assert known_without_measuring(Candidate("odd", 96), known, budget) == ""
    assert known_without_measuring(Candidate("fits", 96, {"head": {"kind": "mean"}}), known, budget) == ""


def test_a_file_that_does_not_run_in_int8_keeps_what_was_measured_of_it(
    small: Pictures, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Fail(Exception):  # onnxruntime's are no RuntimeError
        pass

    def no_kernel(*given: object) -> None:
        raise Fail("no such operator\nof this processor")

    monkeypatch.setattr(candidates, "write_int8", no_kernel)
    monkeypatch.setattr("vitrail.fit.pictures.SECONDS", 0.0)
    monkeypatch.setattr(candidates, "GAIN_OF_INT8", 1e9)
    monkeypatch.setattr(candidates, "HOPELESS", 1e9)
    plain, int8 = measure(Candidate("vit_micro_28", 28), ["a", "b"], Budget(1e-6), small, tmp_path)
    assert plain.latency is not None
    assert (int8.latency, int8.reason) == (None, "cannot run in int8: no such operator")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "as in --latency 5ms"),
        (["--latency", "5"], "use a number above 0 and a unit"),
        (["--latency", "5ms", "--size", "3"], "--size"),
        (["--latency", "5ms", "--threads", "0"], "--threads"),
        (["--latency", "5ms", "--minutes", "0"], "--minutes"),
    ],
)
def test_bad_flags_get_one_sentence(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["fit", "embedded:fashion", "--out", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def photographs(tmp_path: Path) -> str:
    """A few pictures of three classes, 28 pixels wide."""
    rows = open_data("embedded:fashion")["train"]
    chosen = [i for i in range(len(rows)) if rows.labels[i] < 3][:180]
    pixels = np.stack([np.asarray(rows.read(i)) for i in chosen])
    labels, names = rows.labels[chosen], np.array(["a", "b", "c"])
    parts = {"x_train": pixels[:140], "y_train": labels[:140], "x_test": pixels[140:], "y_test": labels[140:]}
    np.savez(tmp_path / "clothes.npz", **parts, classes=names)
    return str(tmp_path / "clothes.npz")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_photographs_and_a_latency_become_a_checked_file(
    photographs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    networks = [Candidate("vit_micro_28", 28), Candidate("cifar_resnet20", 28)]
    monkeypatch.setattr(fitting, "candidates_for", lambda _: networks)
    monkeypatch.setattr(fitting, "TEACHERS", {"small": "vit_micro_28"})
    out = tmp_path / "classifier"
    arguments = ["fit", photographs, "--latency", "500ms", "--minutes", "0.1", "--weights", "none", "--json"]
    assert command([*arguments, "--out", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["latency"] <= 0.5
    assert result["bytes"] == (out / "model.onnx").stat().st_size
    assert result["split"] == "test"
    assert result["interval"][0] <= result["top1"] <= result["interval"][1]
    assert {trial["rung"] for trial in result["trials"]} == {0, 2}  # of two candidates
    lines = [line for path in (out / "studies").glob("run-*/metrics.jsonl") for line in path.read_text().splitlines()]
    assert {json.loads(line)["split"] for line in lines} == {"train", "val"}  # test was for the file alone
    assert "<table" in (out / "report.html").read_text()

    runs = sorted((out / "studies").glob("run-*"))
    assert command([*arguments, "--out", str(out)]) == 0  # goes on: nothing is trained again
    assert json.loads(capsys.readouterr().out)["top1"] == result["top1"]
    assert sorted((out / "studies").glob("run-*")) == runs
    assert command([*arguments, "--out", str(out), "--threads", "1"]) == 2
    assert "another budget" in capsys.readouterr().err

    picture = tmp_path / "picture.png"
    open_data(photographs)["train"].read(0).save(picture)
    words = [sys.executable, str(out / "predict.py"), str(out / "model.onnx"), str(picture), "--json"]
    answer = subprocess.run(words, capture_output=True, check=True)
    assert json.loads(answer.stdout)["label"] in ("a", "b", "c")


def trained(name: str, folder: Path, precision: candidates.Precision = "float32") -> Trial:
    """As if it were: random weights."""
    candidate = Candidate(name, 28, precision=precision)
    torch.manual_seed(0)
    build(candidate, ["a", "b", "c"]).save(folder)
    return Trial(Form(Measured(candidate, 0.9e-3, 5)), 2, 0.5, 0.01, 3, 4, str(folder))


def test_weights_whose_file_takes_too_long_are_tried_in_int8_and_with_smaller_images(
    photographs: str, tmp_path: Path
) -> None:
    data = open_run(with_values(SCRATCH, {"data.uri": photographs}).data)
    trial = trained("cifar_resnet20", tmp_path / "run")
    where = data, Budget(1e-3), "macro_f1", tmp_path / "out"
    int8, smaller = faster(trial, 1.05e-3, *where)  # 28 x sqrt(0.9 / 1.05) = 25.9 pixels
    assert (int8.form.name, int8.value, int8.path) == ("cifar_resnet20-28-int8", trial.value, trial.path)
    assert (int8.form.lose, smaller.form.lose) == (0.3, 0.3)
    assert smaller.form.name == "cifar_resnet20-24"
    assert load(smaller.path).preprocess.size == 24
    figures, _, _ = evaluate(trial.path, data, split="val", image_size=24)
    assert smaller.value == figures.scalars()["macro_f1"]
    assert figures.loss != evaluate(trial.path, data, split="val")[0].loss
    assert (smaller.rung, smaller.epochs, smaller.form.measured.latency) == (2, 3, None)
    assert [t.form.name for t in faster(trial, 2e-3, *where)] == ["cifar_resnet20-28-int8"]  # 18.8: far smaller
    assert [t.form.name for t in faster(smaller, 1.05e-3, *where)] == ["cifar_resnet20-24-int8"]  # smaller once only
    more, _ = faster(int8, 1.05e-3, *where)
    assert (more.form.name, more.form.lose) == ("cifar_resnet20-28-int8", 2.0)
    assert [t.form.name for t in faster(more, 1.05e-3, *where)] == ["cifar_resnet20-24-int8"]
    vit = trained("vit_micro_28", tmp_path / "vit", "int8")  # patches of 7 pixels
    assert [(t.form.name, t.form.lose) for t in faster(vit, 1.05e-3, *where)] == [("vit_micro_28-28-int8", 2.0)]
    assert [(t.form.name, t.form.lose) for t in in_fewer_bits(vit, Budget(1e-3))] == [("vit_micro_28-28-int8", 2.0)]
    on_accelerator = data, Budget(1e-3, on="cuda"), "macro_f1", tmp_path / "out"
    assert [t.form.name for t in faster(trial, 1.05e-3, *on_accelerator)] == ["cifar_resnet20-24"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_file_over_its_budget_is_made_faster_before_what_learned_less_is_deployed(
    photographs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "candidates_for", lambda _: [Candidate("cifar_resnet20", 28)])
    monkeypatch.setattr(fitting, "TEACHERS", {"small": "cifar_resnet20"})
    seen = []

    def latency(file: Path, *_: object) -> float:
        metadata = pytest.importorskip("onnxruntime").InferenceSession(str(file)).get_modelmeta().custom_metadata_map
        seen.append(json.loads(metadata["preprocess"])["size"])
        return 0.51 if seen[-1] == 28 else 0.4

    monkeypatch.setattr(finished_file, "settled_latency", latency)
    said: list[str] = []
    out = tmp_path / "out"
    found = fitting.fit(photographs, Budget(0.5), out, minutes=0.05, weights="none", say=said.append)
    assert seen[-1] == 24  # after float32, int8 and int8 that may cost more
    assert set(seen[:-1]) == {28}
    assert found.chosen.form.measured.candidate.size == 24
    assert (found.latency, found.chosen.seconds, found.bytes) == (0.4, 0, (out / "model.onnx").stat().st_size)
    assert [row["name"] for row in rows(found) if row["chosen"]] == [found.chosen.form.name]
    assert any("cifar_resnet20-28, 510 ms" in text and "over the budget" in text for text in said)
    assert f"{found.chosen.form.name} has weights of another row, images of 24 pixels" in " ".join(found.notes)
    assert load(found.chosen.path).preprocess.size == 24
    assert [path for path in out.iterdir() if path.name.startswith("cifar")] == [Path(found.chosen.path)]


@pytest.mark.parametrize(
    ("latencies", "found"), [([4e-3], 4e-3), ([7e-3, 6e-3, 4e-3], 4e-3), ([7e-3, 6e-3, 8e-3], 6e-3)]
)
def test_a_file_over_its_budget_is_measured_again(
    latencies: list[float], found: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter(latencies)
    monkeypatch.setattr(finished_file, "file_latency", lambda *_: next(measured))
    monkeypatch.setattr(finished_file, "PAUSE", 0)
    assert finished_file.settled_latency(Path("file"), [], Budget(5e-3)) == found
    assert not list(measured)
