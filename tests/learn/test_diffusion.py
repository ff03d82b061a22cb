"""Diffusion: what is learned, what is watched, and how noise becomes an image."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vitrail
from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig
from vitrail.generate.diffusion_model import OwnDiffuser, Solver, solve, times_from
from vitrail.learn.config import DiffusionConfig
from vitrail.learn.diffusion import Diffusion, min_snr_weight
from vitrail.measure.denoising import DRAWS, evaluate_denoising, fixed_draws
from vitrail.measure.evaluator import Loaders
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.trunks.denoiser import NoiseSchedule
from vitrail.recipes import recipe, with_values

SMALL = {"width": 16, "multipliers": (1, 2), "depth": 1, "heads": 2, "image_size": 8, "draws": 2, "drop": 0.0}


def small(**changes: object) -> Classifier:
    return create_model("denoiser_32", classes=["red", "blue"], **{**SMALL, **changes})


def flat(count: int, first: int = 0) -> Batch:
    """Red and blue images in turns, each of one colour with a little grain."""
    generator = torch.Generator().manual_seed(first)
    label = torch.arange(count) % 2
    images = torch.randint(0, 20, (count, 3, 8, 8), generator=generator)
    images[torch.arange(count), torch.where(label == 0, 0, 2)] += 200
    return Batch((images.to(torch.uint8),), label, label, first + torch.arange(count))


# The objective


@pytest.mark.parametrize("prediction", ["v", "eps"])
def test_the_loss_is_the_squared_error_of_the_guess(prediction: str) -> None:
    batch = flat(4)
    objective = Diffusion(small(), DiffusionConfig(prediction=prediction))
    torch.manual_seed(3)
    found = objective(batch)["loss"]
    torch.manual_seed(3)  # time, then dropped labels, then noise
    time, _, noise = torch.rand(4), torch.rand(4), torch.randn(4, 3, 8, 8)
    angle = (time * math.pi / 2 * 0.999).view(-1, 1, 1, 1)
    images = batch.images / 127.5 - 1
    target = noise if prediction == "eps" else angle.cos() * noise - angle.sin() * images
    torch.testing.assert_close(found, target.square().mean())  # a new denoiser guesses 0


@pytest.mark.parametrize(("drop", "reached"), [(0.0, [True, True, False]), (1.0, [False, False, True])])
def test_dropped_labels_teach_what_no_class_looks_like(drop: float, reached: list[bool]) -> None:
    model = small()
    objective = Diffusion(model, DiffusionConfig(drop_label=drop))
    for parameter in model.parameters():  # layers that start at zero pass no gradient on
        torch.nn.init.normal_(parameter, std=0.1)
    objective(flat(6))["loss"].backward()
    grad = model.trunk.label.weight.grad
    assert grad is not None
    assert grad.abs().sum(1).gt(0).tolist() == reached


@pytest.mark.parametrize("prediction", ["v", "eps"])
def test_min_snr_weighs_the_error_of_the_image(prediction: str) -> None:
    schedule = NoiseSchedule("cosine", prediction)
    time = torch.tensor([0.1, 0.3, 0.5, 0.8], dtype=torch.float64)
    images, noise, off = torch.randn(3, 4, 3, 5, 5, dtype=torch.float64).unbind(0)
    seen = schedule.noised(images, noise, time)
    guess = schedule.target(images, noise, time) + off
    of_image = (schedule.clean(seen, guess, time) - images).square().mean((1, 2, 3))
    signal, share = schedule.levels(time)
    cap = (signal / share).square().clamp_max(5.0)
    of_guess = off.square().mean((1, 2, 3))
    torch.testing.assert_close(min_snr_weight(schedule, time, 5.0) * of_guess, cap * of_image)


def test_weights_are_off_by_default_and_then_both_losses_are_told() -> None:
    assert set(Diffusion(small(), DiffusionConfig())(flat(2))) == {"loss"}
    assert set(Diffusion(small(), DiffusionConfig(min_snr=5.0))(flat(2))) == {"loss", "unweighed"}


def test_a_saved_model_knows_how_it_was_trained(tmp_path: Path) -> None:
    model = small()
    Diffusion(model, DiffusionConfig(prediction="eps", schedule="scaled_linear"))
    again = vitrail.load(model.save(tmp_path))
    assert (again.trunk.schedule.prediction, again.trunk.schedule.name) == ("eps", "scaled_linear")


def test_a_step_compiles_whole() -> None:
    objective = Diffusion(small(), DiffusionConfig(min_snr=5.0))
    batch = flat(2)
    torch.manual_seed(3)
    expected = objective(batch)["loss"]
    torch._dynamo.reset()
    compiled = torch.compile(objective, fullgraph=True, backend="eager")
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(batch)["loss"], expected)


def test_what_is_no_denoiser_is_refused() -> None:
    model = create_model("vit_tiny_32", classes=2, depth=1, width=48, heads=3)
    with pytest.raises(ValueError, match=r"--model\.name denoiser_32"):
        Diffusion(model, DiffusionConfig())


def test_mixed_images_are_refused() -> None:
    with pytest.raises(ValueError, match="mixup 0"):
        Diffusion(small(), DiffusionConfig(), AugmentConfig(mixup=0.8))


# The figure on val


def loaders(batches: list[Batch]) -> Loaders:
    return Loaders(["red", "blue"], {"val": batches}, "val")


def test_the_validation_loss_is_a_function_of_weights_and_images_alone() -> None:
    model = small()
    torch.nn.init.normal_(model.trunk.last.weight, std=0.1)
    whole = flat(6)
    pieces = [whole.changed(lambda t, rows=rows: t[rows]) for rows in (slice(4, 6), slice(0, 1), slice(1, 4))]
    first = evaluate_denoising(model, loaders([whole]))["numbers"]
    torch.manual_seed(99)
    assert evaluate_denoising(model, loaders([whole]))["numbers"] == first
    # Other batches are other sums of float32.
    assert evaluate_denoising(model, loaders(pieces))["numbers"] == pytest.approx(first, rel=1e-5)
    assert model.training


def test_the_validation_loss_of_a_new_model_is_that_of_its_targets() -> None:
    """v = signal n - noise x of noise with variance 1 has the mean square signal² + noise² x² over many draws."""
    batch = flat(256)
    x = (batch.images / 127.5 - 1).square().mean((1, 2, 3))
    expected = torch.zeros(256)
    for draw in range(DRAWS):
        angle = fixed_draws(batch.index, draw)[0] * math.pi / 2 * 0.999
        expected += (angle.cos().square() + angle.sin().square() * x) / DRAWS
    found = evaluate_denoising(small(), loaders([batch]))["numbers"]["denoising_loss"]
    # 200,000 squares of unit normals: four deviations of their mean are 0.013.
    assert found == pytest.approx(float(expected.mean()), abs=0.013)


def test_times_are_spread_evenly() -> None:
    times = torch.cat([fixed_draws(torch.arange(250), draw)[0] for draw in range(DRAWS)])
    assert torch.histc(times, 10, 0, 1).tolist() == pytest.approx([100] * 10, abs=5)


def test_models_that_are_no_diffusion_models_are_not_judged() -> None:
    with pytest.raises(ValueError, match="and this is none"):
        evaluate_denoising(create_model("vit_tiny_32", classes=2, depth=1, width=48, heads=3), loaders([flat(2)]))


# Solvers, against data whose every quantity is known: x ~ N(mean, deviation²) in each pixel


def exact(schedule: NoiseSchedule, mean: float, deviation: float) -> Callable[[Tensor, float], Tensor]:
    """E[x | z] at a time."""

    def clean(z: Tensor, time: float) -> Tensor:
        signal, share = (float(level) for level in schedule.levels(torch.tensor(time, dtype=torch.float64)))
        gain = signal * deviation**2 / (signal**2 * deviation**2 + share**2)
        return mean + gain * (z - signal * mean)

    return clean


def transported(schedule: NoiseSchedule, z: Tensor, start: float, end: float, mean: float, deviation: float) -> Tensor:
    """Where the flow carries z: its place among all that are noised alike stays the same."""
    levels = [[float(v) for v in schedule.levels(torch.tensor(t, dtype=torch.float64))] for t in (start, end)]
    wide = [math.sqrt(signal**2 * deviation**2 + share**2) for signal, share in levels]
    return levels[1][0] * mean + wide[1] / wide[0] * (z - levels[0][0] * mean)


def error(solver: Solver, steps: int, name: str) -> float:
    schedule = NoiseSchedule(name)  # type: ignore[arg-type]
    z = torch.linspace(-2, 2, 9, dtype=torch.float64)
    times = [0.9 + (0.1 - 0.9) * i / steps for i in range(steps + 1)]
    found = solve(exact(schedule, 0.3, 0.5), z, times, schedule, solver)
    return float((found - transported(schedule, z, 0.9, 0.1, 0.3, 0.5)).abs().max())


@pytest.mark.parametrize(("solver", "order"), [("ddim", 1), ("dpm", 2)])
def test_solvers_come_near_the_exact_flow_at_their_order(solver: Solver, order: int) -> None:
    """Halving steps divides the error by 2^order once they are small; 160 leave a few per cent of higher terms."""
    coarse, fine = error(solver, 160, "cosine"), error(solver, 320, "cosine")
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.05)
    assert fine < (5e-3 if solver == "ddim" else 5e-5)


@pytest.mark.parametrize(("solver", "order"), [("ddim", 1), ("dpm", 2)])
def test_solvers_follow_stable_diffusions_schedule_too(solver: Solver, order: int) -> None:
    """There the second-order term nearly cancels, so that the order is only a bound."""
    coarse, fine = error(solver, 40, "scaled_linear"), error(solver, 80, "scaled_linear")
    assert math.log2(coarse / fine) > order - 0.05
    assert fine < (1e-2 if solver == "ddim" else 1e-5)


@pytest.mark.parametrize("solver", ["ddim", "dpm"])
def test_data_of_one_image_are_reached_in_one_step(solver: Solver) -> None:
    schedule = NoiseSchedule("scaled_linear")
    found = solve(exact(schedule, 0.3, 0.0), torch.randn(5, dtype=torch.float64), [1.0, 0.0], schedule, solver)
    torch.testing.assert_close(found, torch.full((5,), 0.3, dtype=torch.float64))


def test_ddim_is_the_formula_of_its_paper() -> None:
    schedule = NoiseSchedule("cosine")
    z, clean = torch.randn(4, dtype=torch.float64), exact(schedule, 0.1, 0.7)
    seen = clean(z, 0.6)
    (a, b), (s, n) = (level.tolist() for level in schedule.levels(torch.tensor([0.6, 0.4], dtype=torch.float64)))
    expected = b * seen + n * (z - a * seen) / s
    torch.testing.assert_close(solve(clean, z, [0.6, 0.4], schedule, "ddim"), expected)


def test_the_second_solver_is_that_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed (the extra generate)")
    theirs = diffusers.DPMSolverMultistepScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="sample"
    )
    theirs.set_timesteps(20)
    schedule = NoiseSchedule("scaled_linear")
    clean = exact(schedule, 0.3, 0.5)
    start = z = torch.linspace(-2, 2, 9, dtype=torch.float64)
    for t in theirs.timesteps:
        z = theirs.step(clean(z, float(t) / 1000), t, z, return_dict=False)[0]
    times = [*(float(t) / 1000 for t in theirs.timesteps), 0.0]
    # Their schedule is float32.
    torch.testing.assert_close(solve(clean, start, times, schedule, "dpm"), z, rtol=1e-5, atol=1e-5)


def test_one_call_of_the_network_a_step() -> None:
    calls = []
    schedule = NoiseSchedule()

    def clean(z: Tensor, time: float) -> Tensor:
        calls.append(time)
        return z

    solve(clean, torch.zeros(1), times_from(0.8, 50, 40), schedule)
    assert len(calls) == 40
    assert calls[0] == 0.8
    assert calls == sorted(calls, reverse=True)


@pytest.mark.parametrize("solver", ["ddim", "dpm"])
def test_a_diffuser_with_an_exact_network_carries_noise_to_the_data(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole path, guidance included: with and without a class the answer is the same, so guidance changes nothing.

    400 steps of first order: the error is below that of 320 steps above, plus that of float32 sums of 400 terms.
    """
    model = small()
    schedule = model.trunk.schedule
    clean = exact(schedule, 0.2, 0.25)

    def velocity(z: Tensor, time: Tensor, label: Tensor) -> Tensor:
        signal, share = (float(level) for level in schedule.levels(time[:1].double()))
        return ((signal * z.double() - clean(z.double(), float(time[0]))) / share).float()

    monkeypatch.setattr(model.trunk, "forward", velocity)
    diffuser = OwnDiffuser(model, steps=400, solver=solver, guidance=3.0, clip=False)
    seeds = torch.arange(4)
    start = diffuser.start(None, 1.0, seeds)
    expected = transported(schedule, start.double(), 1.0, 0.0, 0.2, 0.25).clamp(-1, 1)
    found = diffuser.txt2img(torch.zeros(4, dtype=torch.int64), seeds)
    assert (found.double() / 127.5 - 1 - expected).abs().max() < 5e-3 + 1 / 255  # bytes are half a level off at most


# All together


@pytest.mark.slow
def test_a_denoiser_learns_colours_makes_them_and_tells_them_apart() -> None:
    torch.manual_seed(1)
    model = small()
    objective = Diffusion(model, DiffusionConfig())
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    held_out = flat(32, first=1000)
    before = evaluate_denoising(model, loaders([held_out]))["numbers"]["denoising_loss"]
    for step in range(250):
        optimizer.zero_grad()
        objective(flat(16, first=32 * (step % 4)))["loss"].backward()
        optimizer.step()
    after = evaluate_denoising(model, loaders([held_out]))["numbers"]["denoising_loss"]
    assert after < before / 4
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(held_out.images).argmax(1), held_out.label)
    target = torch.tensor([0, 1] * 4)
    made = OwnDiffuser(model, steps=20).txt2img(target, torch.arange(8)).float().mean((2, 3))
    assert torch.equal((made[:, 2] > made[:, 0]).long(), target)


def test_the_recipe_trains_watches_its_loss_and_is_loaded(tmp_path: Path) -> None:
    changes = {
        "out": str(tmp_path / "run"),
        "data.uri": "synthetic:shapes?n=60&size=32",
        "data.batch": 12,
        "data.workers": 0,
        "data.check": "off",
        "optim.steps": 2,
        "engine.device": "cpu",
        "model.image_size": 16,
        "model.trunk": {"width": 8, "multipliers": (1, 1), "depth": 1, "heads": 1, "draws": 1},
    }
    run = vitrail.train(with_values(recipe("small-diffusion"), changes), quiet=True)
    lines = (run.path / "metrics.jsonl").read_text()
    assert '"denoising_loss"' in lines
    assert 0 <= run.figures.scalars()["top1"] <= 1
    assert OwnDiffuser(run.path).classes == run.model.classes
