"""Speed: arithmetic of timings, what is compared with what, and how it is shown. No test asserts a time."""

from __future__ import annotations

import io
import itertools
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from vitrail.bench import run as benching
from vitrail.bench.claims import (
    CLAIMS,
    NEEDS_GPU,
    Checked,
    Claim,
    ClaimSubject,
    DeviceMeter,
    build_subject,
    check_claims,
)
from vitrail.bench.page import bench_tables, save_chart
from vitrail.bench.roofline import (
    Ceiling,
    Load,
    copy_share,
    energy_meter,
    joules_per_image,
    measure_ceiling,
    product_share,
    search_batch,
)
from vitrail.bench.run import Bench, BenchRow, bench
from vitrail.bench.subjects import Conditions, load_subject, make_call, twin, twin_of
from vitrail.data.loading.loader import EvalLoader
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.engine.progress import Progress
from vitrail.learn.attack import UniversalPatch, save_patch
from vitrail.measure import speed
from vitrail.measure.compute import spent
from vitrail.measure.speed import MemoryWatch, Ratio, Timing, Way, fresh_images, in_turns, noise, ratio, timed_calls
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import Ats
from vitrail.model.zoo import ZOO

CPU, META = torch.device("cpu"), torch.device("meta")
QUICK: dict[str, Any] = {"batch": 2, "rounds": 3, "seconds": 0.01, "device": "cpu"}


def timing(*rounds: float, batch: int = 1) -> Timing:
    return Timing(batch, rounds, rounds)


# Timing


def test_a_slow_way_is_slower_whatever_its_place() -> None:
    ways = {"slow": Way(lambda _: time.sleep(0.02)), "fast": Way(lambda _: time.sleep(0.0005))}
    for order in (ways, dict(reversed(ways.items()))):
        found = in_turns(order, CPU, rounds=3, seconds=0.01, warm_up=1)
        assert found["fast"].images_per_second > found["slow"].images_per_second
        assert found["fast"].latency(50) < found["slow"].latency(50)


def test_images_a_second_count_every_image_of_every_call() -> None:
    measured = Timing(batch=8, rounds=(2.0, 4.0, 1.0), calls=(1.0, 1.0, 2.0, 2.0, 0.5, 0.5))
    assert measured.speeds == [8.0, 4.0, 16.0]
    assert measured.images_per_second == 8.0


@pytest.mark.parametrize("count", [1, 2, 7, 100, 333])
def test_percentiles_and_quartiles_are_numpys(count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count).tolist()
    for percent in (50, 90, 99):
        assert speed.percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-12)
    assert speed.quartiles(values) == pytest.approx(np.percentile(values, [25, 50, 75]), rel=1e-12)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    ours, theirs = timing(1.0, 2.0, 10.0), timing(2.0, 1.0, 30.0)
    found = ratio(ours, theirs)  # per round 2, 0.5, 3; of the medians it would be 1
    assert (found.median, found.low, found.high) == pytest.approx((2.0, 1.25, 2.5))


def test_rounds_turn_the_order_around_and_number_their_calls() -> None:
    seen: list[tuple[str, int]] = []
    ways = {name: Way(lambda i, name=name: seen.append((name, i))) for name in "ab"}
    found = in_turns(ways, CPU, rounds=3, seconds=0.0, warm_up=0)
    assert seen[2:] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]  # the first two are probes
    assert all(len(one.rounds) == len(one.calls) == 3 for one in found.values())


def test_without_patience_three_rounds_are_still_made() -> None:
    found = in_turns({"a": Way(lambda _: None)}, CPU, rounds=9, seconds=0.0, warm_up=0, patience=0.0)
    assert len(found["a"].rounds) == 3


def test_a_round_makes_as_many_calls_as_it_is_told_and_no_probes() -> None:
    seen: list[int] = []
    found = in_turns({"a": Way(seen.append)}, CPU, rounds=2, calls=3, warm_up=1)
    assert seen == [0, 0, 1, 2, 3, 4, 5]
    assert (len(found["a"].rounds), len(found["a"].calls)) == (2, 6)


def test_seconds_of_a_call_are_the_median_over_rounds() -> None:
    assert Timing(8, rounds=(2.0, 4.0, 1.0), calls=(1.0, 1.0, 2.0, 2.0, 0.5, 0.5)).seconds == 1.0


def test_on_a_host_the_given_clock_is_read_around_every_call() -> None:
    ticks = iter([10.0, 13.0, 20.0, 24.0])
    assert timed_calls(lambda _: None, 2, CPU, clock=lambda: next(ticks)) == [3.0, 4.0]


class FakeCuda:
    """A stream whose clock the work moves; events remember it, in milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.waits = 0.0, 0
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                assert stream is cuda
                self.at = cuda.clock

            def synchronize(self) -> None:
                cuda.waits += 1

            def elapsed_time(self, later: Event) -> float:
                return later.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: cuda)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def test_on_cuda_calls_are_timed_by_events_and_the_host_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    def work(i: int) -> None:
        cuda.clock += 10.0 * (i + 1)

    assert timed_calls(work, 3, torch.device("cuda"), first=1) == pytest.approx([0.02, 0.03, 0.04])
    assert cuda.waits == 1


def test_a_lead_lets_the_device_idle_before_the_first_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    slept: list[int] = []

    def sleep(cycles: int) -> None:
        slept.append(cycles)
        cuda.clock += 500.0

    def work(_: int) -> None:
        cuda.clock += 10.0

    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    assert timed_calls(work, 2, torch.device("cuda"), lead=True) == pytest.approx([0.01, 0.01])
    assert slept == [speed.LEAD_CYCLES]


def test_peak_memory_leaves_out_what_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1700)
    assert MemoryWatch(torch.device("cuda")).peak() == 700
    assert MemoryWatch(CPU).peak() is None


def test_inputs_differ_from_call_to_call_and_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = fresh_images(2, 8, CPU)
    assert [tuple(one.shape) for one in sets] == [(2, 3, 8, 8)] * speed.FRESH_SETS
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(sets, 2))
    monkeypatch.setattr(speed, "FRESH_BYTES", 2 * sets[0].nbytes)
    assert len(fresh_images(2, 8, CPU)) == 2
    assert len(fresh_images(200, 8, CPU)) == 1


# Noise

STEADY = (1.0, 1.01, 1.0, 0.99, 1.0, 1.01, 1.0)


@pytest.mark.parametrize(
    ("rounds", "control", "said"),
    [
        (STEADY, 1.01, None),
        ((1.0, 1.3, 1.0, 0.8, 1.0, 1.3, 0.8), 1.0, "quartiles of a are .* apart"),
        ((1.0, 1.0, 1.0, 1.04, 1.08, 1.08, 1.08), 1.0, "second half took 8 % longer"),
        (STEADY, 0.95, r"a model against itself is off by -5.0 %"),
        ((1.0, 1.0), 1.0, "2 rounds are too few"),
    ],
    ids=["quiet", "spread", "drift", "control", "too few rounds"],
)
def test_a_noisy_machine_is_called_so_with_the_number(
    rounds: tuple[float, ...], control: float, said: str | None
) -> None:
    found = noise({"a": timing(*rounds)}, Ratio(control, control, control))
    assert found.noisy == (said is not None)
    assert len(found.reasons) == (said is not None)
    if said is not None:
        assert re.search(said, found.reasons[0])


def test_drift_is_of_the_machine_not_of_one_way() -> None:
    rising = timing(1.0, 1.0, 1.0, 1.2, 1.2, 1.2)
    assert noise({"a": rising}).drift == pytest.approx(0.2)
    falling = timing(1.2, 1.2, 1.2, 1.0, 1.0, 1.0)
    assert noise({"a": rising, "b": falling}).drift == pytest.approx(0.0, abs=1e-12)


# Ceilings and energy


def test_ceilings_are_positive_and_say_what_they_are_of() -> None:
    found = measure_ceiling(CPU, torch.float32, Load(side=32, copied=2**16, calls=2))
    assert found.product > 0
    assert found.copy > 0
    assert (found.precision, found.side) == ("float32", 32)


def test_shares_of_a_ceiling() -> None:
    ceiling = Ceiling(product=1e12, copy=1e9, precision="bfloat16", side=8192)
    assert product_share(5_000_000_000, 20.0, ceiling) == pytest.approx(0.2)  # 2 x 5e9 x 20 / 1e12
    assert product_share(5_000_000_000, 20.0, ceiling, train=True) == pytest.approx(0.6)
    assert copy_share(10_000_000, 5.0, ceiling) == pytest.approx(0.05)


def package(folder: Path, used: int, most: int = 1000_000_000) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "energy_uj").write_text(f"{used}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return folder


def test_a_cpus_energy_is_the_sum_of_its_packages_also_when_a_counter_begins_anew(tmp_path: Path) -> None:
    package(tmp_path / "intel-rapl:0", 990_000_000)
    package(tmp_path / "intel-rapl:1", 5_000_000)
    package(tmp_path / "intel-rapl:0:0", 777_000_000)  # a part of package 0
    meter = energy_meter(CPU, tmp_path)
    assert meter is not None
    before = meter()
    package(tmp_path / "intel-rapl:0", 20_000_000)
    package(tmp_path / "intel-rapl:1", 7_000_000)
    after = meter()
    assert before == pytest.approx(995.0)
    assert after == pytest.approx(995.0 + 30 + 2)


def test_without_a_counter_there_is_no_meter_and_no_error(tmp_path: Path) -> None:
    assert energy_meter(CPU, tmp_path / "nothing") is None
    package(tmp_path / "intel-rapl:0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("not a number")
    assert energy_meter(CPU, tmp_path) is None
    assert energy_meter(torch.device("cuda")) is None or torch.cuda.is_available()
    assert joules_per_image(lambda i: None, 1, CPU, None) is None


def test_joules_an_image_are_energy_over_images() -> None:
    calls: list[int] = []
    counter = iter([100.0, 160.0])
    found = joules_per_image(lambda i: calls.append(i) or time.sleep(0.001), 4, CPU, lambda: next(counter), 0.02)
    assert found == pytest.approx(60.0 / (4 * (len(calls) - 1)))  # the first call is the probe


# Batch size


def fake(largest: int, speed_of: Callable[[int], float] = float) -> Callable[[int], float]:
    def attempt(batch: int) -> float:
        if batch > largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return speed_of(batch)

    return attempt


@pytest.mark.parametrize("largest", [1, 2, 37, 64, 100])
def test_the_search_finds_the_largest_batch_that_fits(largest: int) -> None:
    found = search_batch(fake(largest), most=4096)
    assert found.largest == largest
    assert found.limit == "memory"


def test_the_search_takes_the_fastest_not_the_largest() -> None:
    found = search_batch(fake(100, lambda batch: -abs(batch - 17.0)), most=4096)
    assert found.best == 16
    assert found.largest == 100
    assert found.images_per_second[16] == -1.0
    assert list(found.images_per_second) == sorted(found.images_per_second)


def test_the_search_stops_at_its_cap_without_passing_it() -> None:
    tried: list[int] = []
    found = search_batch(lambda batch: tried.append(batch) or 1.0, most=48)
    assert tried == [1, 2, 4, 8, 16, 32, 48]
    assert (found.largest, found.limit) == (48, "cap")


def test_the_search_comes_as_close_as_asked() -> None:
    tried: list[int] = []

    def attempt(batch: int) -> float:
        tried.append(batch)
        return fake(1000)(batch)

    found = search_batch(attempt, most=4096, closeness=1 / 4)
    assert 800 <= found.largest <= 1000
    assert len(tried) < 14  # 11 doublings, then the gap of 512 is halved twice


def test_the_search_can_be_told_to_stop() -> None:
    found = search_batch(fake(10**6), most=4096, stop=lambda: "time")
    assert (found.largest, found.limit) == (1, "time")


def test_a_model_that_does_not_fit_at_all_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="not even a batch of 1 fits into memory"):
        search_batch(fake(0), most=64)


def test_the_search_hides_no_other_error() -> None:
    def attempt(batch: int) -> float:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        search_batch(attempt, most=64)


# Models


def test_every_name_that_timm_has_is_paired() -> None:
    """Those of tests/model/test_timm.py, which compares them tensor by tensor."""
    paired = {name: twin_of(name) for name in ZOO}
    assert {name: known for name, known in paired.items() if known} == {
        name: f"timm:{spec.timm}" for name, spec in ZOO.items() if spec.timm
    }
    assert sum(known is not None for known in paired.values()) >= 25
    assert twin_of("runs/mine") is None


@pytest.mark.parametrize("name", ["vit_tiny", "deit_base_384", "deit3_small", "cait_xs24", "resmlp_b24_p8"])
def test_a_twin_is_the_same_architecture(name: str) -> None:
    ours = load_subject(name, None, META)
    ours.twin = twin_of(name)
    theirs = twin(ours, META)
    assert not isinstance(theirs.module, Classifier)  # timm's own, nothing of ours around it
    assert count(theirs.module) == count(ours.module)
    assert theirs.size == ours.size


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_a_twin_has_the_same_classes_size_and_drop_path() -> None:
    ours = load_subject("cait_xxs24", 64, META)
    ours.twin = twin_of("cait_xxs24")
    theirs = twin(ours, META)
    assert (theirs.size, theirs.classes) == (64, 1000)
    rates = {m.drop_prob for m in theirs.module.modules() if isinstance(m, timm.layers.DropPath)}
    assert rates == {0.05}  # CaiT-XXS24, arXiv 2103.17239


def conditions(train: bool) -> Conditions:
    return Conditions(CPU, None, train, ("eager",))


@pytest.mark.parametrize("name", ["vit_micro_28", "timm:test_vit"])
@pytest.mark.parametrize("train", [False, True])
def test_a_call_is_a_forward_pass_or_a_whole_training_step(name: str, train: bool) -> None:
    one = load_subject(name, None, CPU)
    before = [p.detach().clone() for p in one.module.parameters()]
    call = make_call(one.module, "eager", conditions(train))
    call(torch.randn(2, 3, one.size, one.size), torch.tensor([0, 1]))
    changed = [not torch.equal(a, b) for a, b in zip(before, one.module.parameters(), strict=True)]
    assert any(changed) == train
    assert all(p.grad is None for p in one.module.parameters())
    assert one.module.training == train


@pytest.mark.parametrize("name", ["vit_micro_28", "timm:test_vit"])
@pytest.mark.parametrize("train", [False, True])
def test_an_optimized_call_leaves_the_weights_alone(name: str, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)  # what is compiled does not matter here
    one = load_subject(name, None, CPU)
    before = [p.detach().clone() for p in one.module.parameters()]
    eager, optimized = (make_call(one.module, form, conditions(train)) for form in ("eager", "optimized"))
    images, targets = torch.randn(2, 3, one.size, one.size), torch.tensor([0, 1])
    logits = optimized(images, targets)
    assert all(torch.equal(a, b) for a, b in zip(before, one.module.parameters(), strict=True))
    if not train:
        torch.testing.assert_close(logits, eager(images, targets))


def test_a_multilabel_model_is_trained_on_many_labels() -> None:
    model = create_model("vit_micro_28", classes=3, multilabel=True, depth=1, width=32, heads=2)
    weight = model.head.fc.weight.detach().clone()
    call = make_call(model, "eager", conditions(train=True), multilabel=True)
    call(torch.randn(2, 3, 28, 28), torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))
    assert not torch.equal(model.head.fc.weight, weight)


# A whole benchmark


@pytest.fixture(scope="module")
def three() -> Bench:
    return bench(["vit_micro_28", "cifar_resnet20", "timm:test_vit"], **QUICK)


def test_json_has_every_figure_with_its_conditions(three: Bench) -> None:
    found = three.to_json()
    assert found["what"] == "inference"
    assert set(found) >= {"device", "precision", "versions", "ceiling", "noise", "rows", "searches", "checks", "notes"}
    assert {"noisy", "spread", "drift", "control", "reasons"} == set(found["noise"])
    assert found["versions"]["torch"] == torch.__version__
    row = found["rows"][1]
    assert row["model"] == "cifar_resnet20"
    assert (row["batch"], row["image_size"], row["rounds"], row["form"]) == (2, 32, 3, "eager")
    assert set(row["latency_seconds"]) == {"p50", "p90", "p99"}
    low, high = row["images_per_second_quartiles"]
    assert low <= row["images_per_second"] <= high
    assert row["peak_memory"] is None
    assert {"parameters", "macs", "product_share", "copy_share", "joules_per_image", "top1", "calls"} <= set(row)
    assert json.loads(json.dumps(found)) == found


def test_counts_are_those_of_the_catalogue(three: Bench) -> None:
    from vitrail.catalogue import counts

    for row in three.rows[:2]:
        assert (row.parameters, row.macs) == (counts()[row.model]["parameters"], counts()[row.model]["macs"])


def test_ratios_are_to_the_first_model(three: Bench) -> None:
    assert [row.reference for row in three.rows] == [None, "vit_micro_28", "vit_micro_28"]
    first, second = three.rows[0].timing, three.rows[1].timing
    expected = np.median(np.divide(second.speeds, first.speeds))
    assert three.rows[1].ratio is not None
    assert three.rows[1].ratio.median == pytest.approx(expected)


def test_shares_follow_from_counts_speed_and_ceiling(three: Bench) -> None:
    assert three.ceiling is not None
    for row in three.rows:
        assert row.product_share == pytest.approx(2 * row.macs * row.timing.images_per_second / three.ceiling.product)


def test_against_timm_compares_each_with_its_twin_and_says_who_has_none() -> None:
    found = bench(["deit_tiny", "vit_tiny_32"], against="timm", image_size=32, **QUICK)
    assert [(row.model, row.reference) for row in found.rows] == [
        ("deit_tiny", "timm:deit_tiny_patch16_224"),
        ("timm:deit_tiny_patch16_224", None),
        ("vit_tiny_32", None),
    ]
    assert found.rows[0].macs == found.rows[1].macs
    assert found.rows[0].parameters == found.rows[1].parameters
    assert found.notes == ("vit_tiny_32 has no timm twin: timm has no model of this architecture",)


def test_a_folders_accuracy_is_shown_and_drawn(tmp_path: Path) -> None:
    model = create_model("vit_micro_28", classes=3, depth=1)
    model.stated["figures"] = {"top1": 0.875}
    model.save(tmp_path / "model")
    found = bench([tmp_path / "model"], against="timm", train=True, **QUICK)
    assert found.rows[0].top1 == 0.875
    assert found.to_json()["what"] == "training"
    assert "only names of the zoo have one" in found.notes[0]
    assert "87.5 %" in render(found)
    assert "top-1 accuracy" in save_chart(found, tmp_path / "a.svg").read_text()


def test_under_attack_an_adaptive_model_is_measured_again_on_real_images(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = create_model("vit_micro_28", adaptive=Ats())
    model.save(tmp_path / "model")
    patch = UniversalPatch(14, "top_left", 28, 0, model.preprocess)
    save_patch(tmp_path / "patch", patch, {})
    settings: dict[str, Any] = {"batch": 2, "rounds": 1, "seconds": 0.01, "compile": False}
    found = bench([tmp_path / "model"], data="embedded:fashion", attack=tmp_path / "patch", **settings)
    plain, changed = found.rows
    assert changed.model == f"{plain.model}, attacked"
    rows = open_data("embedded:fashion")["test"].take(range(8))  # four batches of two, as the benchmark takes
    loader = EvalLoader(rows, Preprocess(model.preprocess), batch=8, device="cpu", workers=0)
    assert plain.macs == round(spent(model, loader).macs)
    assert changed.macs == round(spent(model, loader, change=patch).macs)
    assert plain.macs != changed.macs
    with pytest.raises(ValueError, match="spends the same on every image"):
        bench(["vit_micro_28"], data="embedded:fashion", attack=tmp_path / "patch", **settings)
    with pytest.raises(ValueError, match="name --data"):
        bench([tmp_path / "model"], attack=tmp_path / "patch", **settings)


def test_a_searched_batch_is_used_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(benching.roofline.MOST, "cpu", 4)
    found = bench(["vit_micro_28"], **{**QUICK, "batch": "search"})
    search = found.searches["vit_micro_28"]
    assert set(search["images_per_second"]) == {"1", "2", "4"}
    assert found.rows[0].batch == search["best"]


def test_on_a_cpu_heavy_models_get_small_batches() -> None:
    heavy, light = load_subject("deit_base", None, META), load_subject("vit_micro_28", None, META)
    benching._choose_batches([light], None, conditions(train=False), Progress("bench", 1, quiet=True))
    assert light.batch == 8
    benching._choose_batches([light, heavy], None, conditions(train=False), Progress("bench", 1, quiet=True))
    assert (light.batch, heavy.batch) == (1, 1)  # all the same, so that rows can be compared


def failing(name: str, error: Exception, form: str = "eager") -> Callable[..., Any]:
    """`make_call`, but for one model in one form."""

    def make(model: Any, asked: str, *rest: Any) -> Any:
        if asked == form and getattr(model, "spec", {}).get("name") == name:
            raise error
        return make_call(model, "eager", *rest)

    return make


def test_a_model_that_does_not_fit_is_left_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(benching, "make_call", failing("cifar_resnet20", error))
    found = bench(["vit_micro_28", "cifar_resnet20"], **QUICK)
    assert [row.model for row in found.rows] == ["vit_micro_28"]
    assert found.notes == ("cifar_resnet20 does not fit into memory at batch 2; use a smaller batch",)
    with pytest.raises(ValueError, match="nothing could be measured: cifar_resnet20 does not fit"):
        bench(["cifar_resnet20"], **QUICK)


def test_a_form_that_cannot_be_made_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("no compiler\nmore lines")
    monkeypatch.setattr(benching, "make_call", failing("vit_micro_28", error, "optimized"))
    found = bench(["vit_micro_28", "cifar_resnet20"], compile=True, **QUICK)
    assert [(row.model, row.form) for row in found.rows] == [
        ("vit_micro_28", "eager"),
        ("cifar_resnet20", "eager"),
        ("cifar_resnet20", "optimized"),
    ]
    assert found.rows[2].reference == "vit_micro_28"
    assert found.notes == ("vit_micro_28 could not be optimized (RuntimeError: no compiler)",)


def test_models_themselves_are_measured_and_left_as_they_are() -> None:
    small, wide = (create_model("vit_micro_28", classes=3, depth=1, width=w, heads=2) for w in (32, 64))
    before = {name: value.clone() for name, value in small.state_dict().items()}
    found = bench({"small": small, "wide": wide, "cifar_resnet20": small}, train=True, **QUICK)
    assert [row.model for row in found.rows] == ["small", "wide", "cifar_resnet20"]
    counts = [sum(p.numel() for p in model.parameters()) for model in (small, wide, small)]
    assert [row.parameters for row in found.rows] == counts
    assert all(torch.equal(small.state_dict()[name], value) for name, value in before.items())


def test_the_public_function_works_also_when_its_folder_was_imported() -> None:
    import vitrail

    assert vitrail.bench(["vit_micro_28"], **QUICK).rows[0].model == "vit_micro_28"  # type: ignore[operator]


def test_a_model_of_another_library_is_refused() -> None:
    with pytest.raises(ValueError, match="mine: a Linear is no model of vitrail; name timm's by `timm:NAME`"):
        bench({"mine": torch.nn.Linear(2, 2)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("names", "settings", "sentence"),
    [
        ([], {}, "name at least one model"),
        (["deit_smal"], {}, "no model and no folder 'deit_smal'; did you mean 'deit_small'"),
        (["timm:resnet18x"], {}, "did you mean 'resnet18"),
        (["deit_small"], {"batch": 0}, "batch: 0; use a number above 0, or search"),
        (["deit_small"], {"batch": "serch"}, "batch: 'serch'; use a number above 0, or search"),
        (["deit_small"], {"precision": "fp4"}, "precision: 'fp4'; use auto, bf16 or float32"),
        (["deit_small"], {"rounds": 0}, "rounds: 0; use 1 or more"),
        (["deit_small"], {"against": "keras"}, "only timm has twins"),
    ],
)
def test_impossible_requests_are_one_sentence(names: list[str], settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        bench(names, **settings)


def test_progress_ends_at_its_total(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Progress] = []
    reported: list[int] = []

    class Recorded(Progress):
        def advance(self, by: int = 1, note: str = "") -> None:
            super().advance(by, note)
            bars.append(self)
            reported.append(self.done)

    monkeypatch.setattr(benching, "Progress", Recorded)
    bench(["vit_micro_28"], **QUICK)
    assert reported == sorted(reported)
    assert len({bar.total for bar in bars}) == 1
    assert reported[-1] == bars[-1].total


def test_settings_of_torch_are_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    on_cuda = Conditions(torch.device("cuda"), None, False, ("eager", "optimized"))
    with benching._torch_settings(on_cuda, "auto"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before == "highest"


# Claims


def test_a_claim_is_checked_against_the_ratio_of_what_was_measured() -> None:
    a, b = ClaimSubject("a"), ClaimSubject("b")
    asked: list[ClaimSubject] = []
    memory = {a: 300, b: 200}

    def weigh(one: ClaimSubject) -> int:
        asked.append(one)
        return memory[one]

    claims = (
        Claim("more memory", "memory", a, b, 2.0, above=1.0),
        Claim("flat", "memory", a, b, 1.1, below=1.4),
        Claim("faster", "speed", a, b, 3.0, above=1.0),
        Claim("fewer MACs", "macs", b, a, 0.5, below=1.0),
    )
    measures = SimpleNamespace(
        speed=lambda _: lambda one, to: Ratio(2.5, 2.4, 2.6), memory=weigh, macs={a: 10, b: 4}.__getitem__
    )
    found = check_claims(claims, measures)
    assert [one.measured.median for one in found if one.measured] == [1.5, 1.5, 2.5, 0.4]
    assert [one.holds for one in found] == [True, False, True, True]
    assert asked == [a, b]  # once for all claims
    assert found[0].to_json()["says"] == 2.0


@pytest.mark.parametrize(("low", "high", "sure"), [(1.01, 1.2, True), (0.99, 1.2, False), (1.01, 1.3, False)])
def test_a_claim_is_sure_where_the_quartiles_agree(low: float, high: float, sure: bool) -> None:
    claim = Claim("between", "speed", ClaimSubject("a"), ClaimSubject("b"), None, above=1.0, below=1.25)
    checked = Checked(claim, Ratio(1.1, low, high))
    assert checked.holds
    assert checked.sure == sure
    assert checked.to_json()["sure"] == sure


def test_what_cannot_be_measured_says_why_and_holds_neither_way() -> None:
    measures = SimpleNamespace(speed=lambda _: lambda one, to: "too slow", memory=lambda _: NEEDS_GPU, macs=lambda _: 1)
    a = ClaimSubject("a")
    found = check_claims((Claim("c", "memory", a, a, 1.0), Claim("d", "speed", a, a, 1.0)), measures)
    assert [(one.measured, one.holds, one.note) for one in found] == [(None, None, NEEDS_GPU), (None, None, "too slow")]


def test_claims_on_stand_ins_are_measured_on_a_cpu() -> None:
    small, large = ClaimSubject("vit_micro_28", heads=2), ClaimSubject("vit_micro_28", image_size=56, explicit=True)
    told: list[str] = []
    measures = DeviceMeter(CPU, None, batch=2, rounds=3, seconds=0.01, report=told.append)
    claims = tuple(Claim(quantity, quantity, large, small, None) for quantity in ("speed", "memory", "macs"))
    found = check_claims(claims, measures)
    assert found[0].measured is not None
    assert found[0].measured.low > 0
    assert found[1].note == NEEDS_GPU
    assert found[2].measured is not None
    assert found[2].measured.median > 3  # about four times the patches
    assert "vit_micro_28, 56 px, explicit: speed" in told


def test_lower_resolution_saves_the_macs_that_the_document_derives() -> None:
    claim = next(c for c in CLAIMS if c.quantity == "macs")
    (found,) = check_claims((claim,), DeviceMeter(CPU, None, batch=1, rounds=1, seconds=0.0, report=lambda _: None))
    assert found.measured is not None
    assert found.measured.median == pytest.approx(167.3 / 52.2, rel=2e-3)  # both are printed to three figures
    assert found.holds


@pytest.mark.parametrize("one", list(dict.fromkeys(s for c in CLAIMS for s in (c.subject, c.to))), ids=str)
def test_every_subject_of_a_claim_can_be_built(one: ClaimSubject) -> None:
    model = build_subject(one, META)
    assert model.preprocess.size == (one.image_size or ZOO[one.name].trunk.image_size)
    if one.heads is not None:
        assert model.trunk.blocks[0].attn.heads == one.heads


def test_explicit_attention_is_the_same_function_without_a_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, explicit = (
        build_subject(ClaimSubject("vit_micro_28"), CPU),
        build_subject(ClaimSubject("vit_micro_28", explicit=True), CPU),
    )
    explicit.load_state_dict(fused.state_dict())
    images = torch.randn(2, 3, 28, 28)
    with torch.inference_mode():
        expected = fused(images)

        def refuse(*_: object, **__: object) -> Tensor:
            raise AssertionError("a fused kernel ran")

        monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
        torch.testing.assert_close(explicit(images), expected)


# What a person sees


def made_up(name: str, rate: float, **changes: Any) -> BenchRow:
    seconds = tuple(256 / rate * factor for factor in (1.0, 1.02, 0.98, 1.01, 0.99))
    row = BenchRow(
        model=name,
        form="eager",
        family="timm" if name.startswith("timm:") else "vitrail",
        parameters=304_326_632,
        macs=61_603_000_000,
        image_size=224,
        timing=Timing(256, seconds, seconds),
        peak_memory=123 * 2**30,
        product_share=0.4321,
        copy_share=0.1,
        joules_per_image=0.123,
        top1=0.8312,
        reference="timm:x",
        ratio=Ratio(12.345, 11.111, 13.131),
    )
    return replace(row, **changes)


@pytest.fixture
def wide() -> Bench:
    """Long names, large and small numbers, two forms, several batches, checks."""
    long = "timm:vit_base_patch16_siglip_gap_512.v2_webli"
    other = Timing(4096, (0.004,), (0.004,))
    rows = (
        made_up("deit_small_distilled_with_a_long_name", 123_456.0),
        made_up("deit_small_distilled_with_a_long_name", 0.0123, form="optimized"),
        made_up(long, 1.0, timing=other, ratio=None, top1=0.5),
    )
    checks = tuple(Checked(claim, Ratio(12.34, 0.5, 12.4)) for claim in CLAIMS)
    ceiling = Ceiling(790e12, 4.1e12, "bfloat16", 8192)
    found = noise({"a": timing(1.0, 2.0, 3.0)})
    return Bench(
        rows,
        False,
        "NVIDIA H200",
        "bfloat16",
        {},
        "timm",
        ceiling,
        found,
        checks=checks,
        check_batch=256,
        notes=("a note",),
    )


def render(found: Bench, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(bench_tables(found))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_tables_fit_eighty_columns_and_cut_nothing_but_names(wide: Bench) -> None:
    text = render(wide)
    assert max(map(len, text.splitlines())) <= 80
    for heading in ("batch", "img/s", "spread", "p50 ms", "p99 ms", "of peak", "x timm, quartiles", "memory", "J/img"):
        assert heading in text
    for figure in ("123,456", "1,024,000", "12.345 11.111-13.131", "123.00 GiB", "83.1 %", "43 %"):
        assert figure in text
    assert all(claim.text in text for claim in CLAIMS)
    assert "  optimized" in text
    cut = [line for line in text.splitlines() if "…" in line]
    assert all(line.index("…") < 40 for line in cut)


def test_remarks_tell_ceilings_noise_and_notes(wide: Bench) -> None:
    text = " ".join(render(wide).split())
    assert "share of 790 TFLOP/s, a bfloat16 matrix product measured here" in text
    assert "share of 4,100 GB/s" in text
    assert "noisy machine: the quartiles of a are" in text
    assert "a note" in text


def test_claims_show_ratio_verdict_and_doubt(wide: Bench) -> None:
    claim = Claim("a claim", "speed", ClaimSubject("a"), ClaimSubject("b"), 0.9952, above=0.99)
    found = tuple(
        Checked(claim, one) for one in (Ratio(1.002, 0.995, 1.1), Ratio(0.985, 0.98, 0.99), Ratio(1.0, 0.98, 1.1), None)
    )
    lines = [" ".join(line.split()) for line in render(replace(wide, rows=(), checks=found)).splitlines()]
    shown = [line.removeprefix("img/s a claim 0.995 ") for line in lines if "a claim" in line]
    assert shown == ["1 yes", "0.985 no", "1 yes ?", "– –"]  # noqa: RUF001
    assert lines[0] == "claims of the literature as ratios, batch 256, bfloat16, NVIDIA H200"


def test_a_quiet_machine_is_called_so() -> None:
    found = noise({"a": timing(*STEADY)}, Ratio(1.002, 1.0, 1.0))
    text = render(Bench((made_up("a", 10.0),), True, "cpu", "float32", {}, noise=found))
    assert "quiet machine; a model against itself: 1.002" in text
    assert "training steps, batch 256" in text


def test_the_chart_shows_every_model(wide: Bench, tmp_path: Path) -> None:
    rows = (replace(wide.rows[0], top1=None, model="a-model"), replace(wide.rows[2], model="timm:another"))
    text = save_chart(replace(wide, rows=rows), tmp_path / "new" / "bench.svg").read_text()
    ElementTree.fromstring(text)
    assert all(word in text for word in ("a-model", "timm:another", "milliseconds per image", "MACs per image"))
    assert all(colour in text for colour in ("#2a4d9c", "#b23a48"))  # ours and timm's
    assert all(f'<g class="v{colour}">' in text for colour in (0, 1))
    assert text.count('class="whisker"') == 2  # quartiles of the time


def test_names_of_points_in_one_place_stand_apart(wide: Bench, tmp_path: Path) -> None:
    rows = tuple(made_up(name, 100.0, top1=None) for name in ("a-model", "timm:another", "a-third"))
    text = save_chart(replace(wide, rows=rows), tmp_path / "a.svg").read_text()
    places = [re.search(rf'y="([\d.]+)"[^>]*>{row.model}<', text) for row in rows]
    heights = sorted(float(found.group(1)) for found in places if found)
    assert len(heights) == 3
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 8  # as tall as their letters


@pytest.mark.parametrize("ending", ["png", "pdf", "jpg"])
def test_charts_of_another_format_are_rejected(wide: Bench, ending: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"charts are SVG now; name a file that ends in .svg"):
        save_chart(wide, tmp_path / f"a.{ending}")


def test_charts_of_nothing_are_rejected(wide: Bench, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        save_chart(replace(wide, rows=()), tmp_path / "a.svg")
