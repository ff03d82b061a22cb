"""The denoiser: a U-Net that is conditioned, starts at nothing, and classifies by how well noise is guessed."""

from __future__ import annotations

import math

import pytest
import torch

from vitrail.data.augment.pixel_ops import normal_noise
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import DenoiserConfig
from vitrail.model.trunks.denoiser import Denoiser, NoiseSchedule, SelfAttention, equal_noise, waves

SMALL = {"width": 16, "multipliers": (1, 2), "depth": 1, "heads": 2, "image_size": 16, "draws": 2, "drop": 0.0}


def small(classes: int = 3, **changes: object) -> Denoiser:
    return Denoiser(DenoiserConfig(**{**SMALL, **changes}), classes)


def awake(model: torch.nn.Module) -> torch.nn.Module:
    """The same with layers that start at zero drawn anew, so that everything has an effect."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def inputs(batch: int = 2, side: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, side, side), torch.linspace(0.2, 0.8, batch), torch.arange(batch) % 3


def test_the_default_is_compact() -> None:
    model = create_model("denoiser_32", device="meta")
    assert 10e6 < sum(p.numel() for p in model.parameters()) < 15e6


def test_a_new_denoiser_says_exactly_nothing() -> None:
    with torch.no_grad():
        assert torch.equal(small()(*inputs()), torch.zeros(2, 3, 16, 16))


@pytest.mark.parametrize("multipliers", [(1,), (1, 2), (1, 2, 2)])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_way_back_takes_up_all_that_the_way_down_left(multipliers: tuple[int, ...], depth: int) -> None:
    model = awake(small(multipliers=multipliers, depth=depth))
    seen: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_children():
        for i, child in enumerate(module) if name in ("down", "up") else ():
            child.register_forward_pre_hook(lambda _, given, key=f"{name}.{i}": seen.update({key: given[0].shape[1:]}))
    with torch.no_grad():
        assert model(*inputs()).shape == (2, 3, 16, 16)
    levels = len(multipliers)
    for level, multiplier in enumerate(multipliers):
        side = 16 >> level
        for i in range(depth):
            assert seen[f"down.{level * depth + i}"][1:] == (side, side)
        for i in range(depth + 1):
            channels, rows, columns = seen[f"up.{(levels - 1 - level) * (depth + 1) + i}"]
            assert (rows, columns) == (side, side)
            assert channels > 16 * multiplier  # its own and the ones that were left


def test_time_class_and_no_class_have_an_effect_each() -> None:
    model = awake(small()).eval()
    images, time, label = inputs()
    with torch.no_grad():
        said = model(images, time, label)
        for other in (
            model(images, time + 0.1, label),
            model(images, time, (label + 1) % 3),
            model(images, time, torch.full_like(label, model.no_class)),
        ):
            assert (said - other).abs().amax((1, 2, 3)).min() > 1e-4


def test_attention_is_where_it_is_wanted_and_in_the_middle() -> None:
    def places(*sides: int) -> set[str]:
        model = small(multipliers=(1, 2, 2), attention=sides)
        return {name.split(".")[0] for name, m in model.named_modules() if isinstance(m, SelfAttention)}

    assert places() == {"middle"}
    assert places(8) == places(16) == {"down", "middle", "up"}


def test_attention_is_the_textbook_formula() -> None:
    attention = awake(SelfAttention(8, 2))
    x = torch.randn(2, 8, 3, 4)
    with torch.no_grad():
        q, k, v = attention.qkv(attention.norm(x)).flatten(2).transpose(1, 2).chunk(3, -1)  # [2, 12, 8] each
        heads = [
            torch.softmax(q[..., h] @ k[..., h].transpose(1, 2) / 2.0, -1) @ v[..., h]  # sqrt(4) is 2
            for h in (slice(0, 4), slice(4, 8))
        ]
        mixed = torch.cat(heads, -1).transpose(1, 2).reshape(2, 8, 3, 4)
        torch.testing.assert_close(attention(x), x + attention.proj(mixed))


def test_the_answer_is_float32_whatever_the_precision() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert small()(*inputs()).dtype == torch.float32


def test_memory_layout_does_not_change_the_answer() -> None:
    model = awake(small()).eval()
    images, time, label = inputs()
    with torch.no_grad():
        expected = model(images, time, label)
        last = model.to(memory_format=torch.channels_last)
        # The same sums in another order: float32 keeps five digits of them.
        torch.testing.assert_close(
            last(images.contiguous(memory_format=torch.channels_last), time, label), expected, rtol=1e-4, atol=1e-5
        )


def test_neighbouring_times_are_told_apart() -> None:
    found = waves(torch.tensor([0.5, 0.501]), 64)
    assert found.shape == (2, 64)
    assert (found[0] - found[1]).abs().max() > 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"image_size": 30, "multipliers": (1, 2, 2)}, "use 28 or 32"), ({"heads": 3}, "cannot be cut into 3 heads")],
)
def test_what_cannot_be_built_is_refused_with_a_remedy(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_images_of_a_wrong_size_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 2; resize them"):
        small()(torch.randn(1, 3, 15, 16), torch.zeros(1), torch.zeros(1, dtype=torch.int64))


def test_other_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"leave --model\.head out"):
        create_model("denoiser_32", classes=3, head="mean", **SMALL)


def test_several_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="one class per image"):
        create_model("denoiser_32", classes=3, multilabel=True, **SMALL)


# Schedules

TABLE = {0.3: (0.768, 0.640), 0.5: (0.526, 0.851), 0.6: (0.401, 0.916), 0.7: (0.287, 0.958), 0.8: (0.192, 0.981)}
TABLE[0.9] = (0.119, 0.993)  # by the closed form of the schedule


@pytest.mark.parametrize("r", TABLE)
def test_stable_diffusions_schedule_keeps_what_the_table_says(r: float) -> None:
    signal, noise = NoiseSchedule("scaled_linear").levels(torch.tensor(r))
    assert (round(float(signal), 3), round(float(noise), 3)) == TABLE[r]


def test_stable_diffusions_schedule_is_the_product_of_its_steps() -> None:
    betas = [(0.00085**0.5 + (0.012**0.5 - 0.00085**0.5) * i / 999) ** 2 for i in range(1000)]
    kept, product = [], 1.0
    for beta in betas:
        product *= 1 - beta
        kept.append(product)
    times = torch.arange(1000, dtype=torch.float64) / 1000
    signal, noise = NoiseSchedule("scaled_linear").levels(times)
    torch.testing.assert_close(signal.square(), torch.tensor(kept, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(signal.square() + noise.square(), torch.ones(1000, dtype=torch.float64))


@pytest.mark.parametrize("name", ["cosine", "scaled_linear"])
def test_the_signal_only_fades(name: str) -> None:
    signal, noise = NoiseSchedule(name).levels(torch.linspace(0, 0.999, 500, dtype=torch.float64))
    assert (signal.diff() < 0).all()
    assert (noise.diff() > 0).all()


def test_the_cosine_begins_with_all_of_the_image_and_ends_with_next_to_none() -> None:
    signal, noise = NoiseSchedule("cosine").levels(torch.tensor([0.0, 1.0]))
    assert (float(signal[0]), float(noise[0])) == (1.0, 0.0)
    assert 0 < signal[1] < 0.002


@pytest.mark.parametrize("name", ["cosine", "scaled_linear"])
@pytest.mark.parametrize("prediction", ["v", "eps"])
def test_a_perfect_guess_gives_image_and_noise_back(name: str, prediction: str) -> None:
    schedule = NoiseSchedule(name, prediction)
    images, noise = torch.randn(2, 4, 3, 5, 5, dtype=torch.float64).unbind(0)
    time = torch.tensor([0.05, 0.3, 0.6, 0.95], dtype=torch.float64)
    seen, guess = schedule.noised(images, noise, time), schedule.target(images, noise, time)
    torch.testing.assert_close(schedule.clean(seen, guess, time), images)
    torch.testing.assert_close(schedule.noise(seen, guess, time), noise)


@pytest.mark.parametrize("r", TABLE)
def test_noised_images_have_the_mean_and_deviation_of_the_table(r: float) -> None:
    """40,000 draws, so a mean is right to 4 / sqrt(40000) = 0.02 deviations with 99.99 %."""
    signal, share = TABLE[r]
    noise = normal_noise(torch.arange(40), 1, 25, 40).view(40_000, 1)
    seen = NoiseSchedule("scaled_linear").noised(torch.ones_like(noise), noise, torch.full((len(noise),), r))
    assert float(seen.mean()) == pytest.approx(signal, abs=0.02 * share + 0.0005)
    assert float(seen.std()) == pytest.approx(share, abs=0.015 * share + 0.0005)


PAPER = {0.5: 0.647, 0.6: 0.737, 0.7: 0.814, 0.8: 0.876, 0.9: 0.924}  # r of Stable Diffusion -> r of the cosine


@pytest.mark.parametrize("r", PAPER)
def test_equal_noise_is_the_time_with_the_same_signal_to_noise_ratio(r: float) -> None:
    product = 1.0  # of Stable Diffusion's first 1000 r + 1 steps
    for i in range(round(1000 * r) + 1):
        product *= 1 - (0.00085**0.5 + (0.012**0.5 - 0.00085**0.5) * i / 999) ** 2
    ratio = product / (1 - product)
    found = equal_noise(r, "scaled_linear", "cosine")
    assert found == pytest.approx(math.atan(ratio**-0.5) / (math.pi / 2 * 0.999), abs=1e-9)  # in closed form
    # The table counts one step less and lets the cosine's angle go to a whole quarter of a circle.
    assert found == pytest.approx(PAPER[r], abs=2e-3)
    assert equal_noise(found, "cosine", "scaled_linear") == pytest.approx(r, abs=1e-9)


def test_equal_noise_keeps_r_of_one_schedule_and_its_order() -> None:
    for name in ("cosine", "scaled_linear"):
        assert equal_noise(0.37, name, name) == 0.37
    times = [equal_noise(i / 20, "scaled_linear", "cosine") for i in range(21)]
    assert times == sorted(times)
    assert (times[0] < 0.02, times[-1] < 1) == (True, True)  # Stable Diffusion's last step leaves some signal
    assert equal_noise(1.0, "cosine", "scaled_linear") == 1.0  # there is no such noise
    with pytest.raises(ValueError, match=r"1\.2 must lie between 0 and 1"):
        equal_noise(1.2, "scaled_linear", "cosine")


# As a classifier


def classifier(**changes: object) -> Classifier:
    return create_model("denoiser_32", classes=3, **{**SMALL, **changes})


@pytest.mark.parametrize("prediction", ["v", "eps"])
def test_logits_are_minus_the_squared_error_of_the_noise(prediction: str) -> None:
    model = awake(classifier(prediction=prediction)).eval()
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    expected = torch.zeros(2, 3)
    with torch.no_grad():
        for draw, t in enumerate((0.25, 0.75)):
            noise = normal_noise(torch.tensor([draw]), 3, 16, 16)[0]
            angle = torch.tensor(t) * torch.pi / 2 * 0.999
            for i in range(2):
                seen = angle.cos() * images[i] + angle.sin() * noise
                for c in range(3):
                    guess = model.trunk(seen[None], torch.tensor([t]), torch.tensor([c]))[0]
                    said = guess if prediction == "eps" else angle.sin() * seen + angle.cos() * guess
                    expected[i, c] -= (said - noise).square().sum() / 2
        # Sums of 768 squares in float32, in another order.
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-2)


def test_classes_in_pieces_are_classes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import vitrail.model.trunks.denoiser as module

    model = awake(classifier()).eval()
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        whole = model(images)
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 2)  # one class a call
        torch.testing.assert_close(model(images), whole, rtol=1e-4, atol=1e-2)


def test_bytes_are_brought_to_minus_one_to_one() -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 16, 16)
    found = classifier()._images(images)
    assert found.unique().tolist() == [-1.0, 1.0]
