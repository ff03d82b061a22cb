"""Masked autoencoding: patches, masks, what the trunk may see, what is learned and what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig
from vitrail.engine.config import OptimConfig
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import TrainStep
from vitrail.learn.config import MaeConfig
from vitrail.learn.mae import Mae, grid_sinusoid, normalised, patchify
from vitrail.model.build import create_model
from vitrail.model.parts.tokens import Tokens, gather, random_order

LIGHT = MaeConfig(decoder_width=32, decoder_depth=1, decoder_heads=2)


def mae(config: MaeConfig = LIGHT, augment: AugmentConfig | None = None, **options: Any) -> Mae:
    sizes = {"depth": 2, "width": 32, "heads": 2, **options}
    return Mae(create_model(sizes.pop("name", "vit_tiny_32"), classes=3, **sizes), config, augment)


def batch(images: Tensor | None = None, count: int = 4) -> Batch:
    if images is None:
        images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
    labels = torch.zeros(len(images), dtype=torch.long)
    return Batch((images,), labels, labels, torch.arange(len(images)))


def test_patches_are_squares_row_by_row() -> None:
    images = torch.randn(2, 3, 8, 12)
    found = patchify(images, 4)
    assert found.shape == (2, 6, 48)
    for n, (row, column) in enumerate((r, c) for r in range(2) for c in range(3)):
        square = images[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        torch.testing.assert_close(found[:, n], square.permute(0, 2, 3, 1).flatten(1))


def test_the_trunk_numbers_patches_the_same_way() -> None:
    trunk = create_model("vit_tiny_32", classes=3, depth=1, width=32, heads=2).trunk
    images = torch.randn(1, 3, 32, 32)
    weight = trunk.patch_embed.proj.weight.permute(0, 2, 3, 1).flatten(1)
    expected = patchify(images, 4) @ weight.T + trunk.patch_embed.proj.bias
    torch.testing.assert_close(trunk.patch_embed(images), expected, atol=1e-5, rtol=1e-5)


def test_normalised_patches_have_mean_0_and_deviation_1() -> None:
    found = normalised(torch.randn(3, 5, 48) * 7 + 2)
    torch.testing.assert_close(found.mean(-1), torch.zeros(3, 5), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.std(-1), torch.ones(3, 5), atol=1e-4, rtol=0)
    assert torch.equal(normalised(torch.full((1, 1, 48), 3.0)), torch.zeros(1, 1, 48))


def test_every_patch_is_either_visible_or_hidden_and_all_are_equally_likely() -> None:
    visible, hidden = random_order(2000, 16, 4, torch.device("cpu"))
    assert visible.shape == (2000, 4)
    both = torch.cat([visible, hidden], 1).sort(1).values
    assert torch.equal(both, torch.arange(16).expand(2000, -1))
    often = torch.bincount(visible.flatten(), minlength=16) / 2000
    assert (often - 0.25).abs().max() < 0.05  # five deviations of a share of 2,000
    assert not torch.equal(visible[0], visible[1])


def test_masks_come_from_the_runs_generator() -> None:
    objective, data = mae(), batch()
    torch.manual_seed(1)
    first = objective(data)["loss"]
    second = objective(data)["loss"]
    torch.manual_seed(1)
    assert torch.equal(objective(data)["loss"], first)
    assert not torch.equal(first, second)


def test_fixed_positions_are_sines_and_cosines_of_column_and_row() -> None:
    table = grid_sinusoid((3, 5), 8).view(3, 5, 8)
    assert torch.equal(table[0, :, :4], table[2, :, :4])  # the first half knows the column
    assert torch.equal(table[:, 0, 4:], table[:, 4, 4:])
    angles = torch.tensor([3.0, 0.03, 2.0, 0.02]).view(2, 2)  # column 3 and row 2, at frequencies 1 and 1 / 100
    torch.testing.assert_close(table[2, 3], torch.stack([angles.sin(), angles.cos()], 1).flatten())


def test_the_trunk_sees_visible_patches_only_with_their_own_positions() -> None:
    objective = mae().eval()
    trunk = objective.model.trunk
    seen: list[Tokens] = []
    encode = trunk.encode
    trunk.encode = lambda tokens: (seen.append(tokens), encode(tokens))[1]
    images = objective.model._images(batch().images)
    _, hidden = objective.guess(images)
    (tokens,) = seen
    whole = trunk.embed(images)
    assert tokens.sequence.shape[1] == 1 + 16  # a quarter of 64 patches, and the class token
    torch.testing.assert_close(tokens.patches, gather(whole.patches, tokens.index))
    torch.testing.assert_close(tokens.sequence[:, 0], whole.sequence[:, 0])
    assert all(set(i).isdisjoint(h) for i, h in zip(tokens.index.tolist(), hidden.tolist(), strict=True))


def test_hidden_pixels_do_not_change_what_is_guessed_and_visible_ones_do() -> None:
    objective = mae().eval()
    images = torch.randn(2, 3, 32, 32)
    torch.manual_seed(3)
    guessed, hidden = objective.guess(images)
    flags = torch.zeros(2, 64).scatter(1, hidden, 1.0).view(2, 1, 8, 8)
    at = flags.repeat_interleave(4, 2).repeat_interleave(4, 3)
    for where, same in ((at, True), (1 - at, False)):
        noise = torch.randn_like(images)
        torch.manual_seed(3)
        again, _ = objective.guess(images + where * noise)
        assert torch.equal(again, guessed) == same


@pytest.mark.parametrize("normalise", [True, False])
def test_the_loss_is_the_mean_square_over_hidden_patches_alone(normalise: bool) -> None:
    objective = mae(replace(LIGHT, normalise=normalise)).eval()
    data = batch()
    torch.manual_seed(4)
    found = objective(data)["loss"]
    torch.manual_seed(4)
    images = objective.model._images(data.images)
    guessed, hidden = objective.guess(images)
    total, count = 0.0, 0
    for b in range(4):
        for n in hidden[b].tolist():
            row, column = divmod(n, 8)
            square = images[b, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].permute(1, 2, 0).flatten()
            if normalise:
                square = (square - square.mean()) / (square.var() + 1e-6).sqrt()
            total += float((guessed[b, n] - square).square().sum().detach())
            count += len(square)
    assert count == 4 * 48 * 48
    assert float(found.detach()) == pytest.approx(total / count, rel=1e-5)


def test_everything_but_the_head_learns() -> None:
    objective = mae()
    objective(batch())["loss"].backward()
    for name, parameter in objective.named_parameters():
        learns = not name.startswith("model.head.")
        assert (parameter.grad is not None and bool(torch.count_nonzero(parameter.grad))) == learns, name


def test_a_picture_of_two_colours_is_learned() -> None:
    """Stripes of two colours in a random order: what is hidden follows from what is seen."""
    pattern = torch.zeros(16, 3, 32, 32, dtype=torch.uint8)
    pattern[:8, :, :, ::2] = 255
    pattern[8:, :, ::2] = 255
    objective = mae()
    config = OptimConfig(lr=3e-3, steps=80, warmup=0, weight_decay=0.0)
    step = TrainStep(objective, config, make_schedule(config, 16, 16), device=torch.device("cpu"))
    before = float(objective(batch(pattern))["loss"].detach())
    for _ in range(80):
        step.feed(batch(pattern))
    after = float(objective(batch(pattern))["loss"].detach())
    assert before > 0.9
    assert after < 0.1  # the mean of every patch would lose 47 / 48


@pytest.mark.parametrize("options", [{"head": "mean"}, {"name": "deit3_tiny", "image_size": 32, "patch": 8}])
def test_other_plain_vits_take_it(options: dict[str, Any]) -> None:
    found = mae(**options)(batch())["loss"]
    assert torch.isfinite(found)


@pytest.mark.parametrize(
    ("options", "config", "words"),
    [
        ({"mixer": "linear_patches", "head": "mean"}, LIGHT, "needs attention and a plain patch stem"),
        ({"stem": "conv"}, LIGHT, "needs attention and a plain patch stem"),
        ({}, replace(LIGHT, mask=1.0), "leaves 0 to see and 64 to guess"),
        ({}, replace(LIGHT, mask=0.0), "leaves 64 to see and 0 to guess"),
        ({}, replace(LIGHT, decoder_width=30), "use 28"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], config: MaeConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mae(config, **options)


def test_mixed_images_are_warned_about() -> None:
    assert "mixed" in mae(augment=AugmentConfig(mixup=0.8)).notes[0]
    assert mae(augment=AugmentConfig()).notes == ()


def test_the_decoder_is_not_kept(tmp_path) -> None:  # type: ignore[no-untyped-def]
    objective = mae()
    objective.model.save(tmp_path / "model")
    kept = vitrail.load(tmp_path / "model")
    assert set(kept.state_dict()) == set(
        create_model("vit_tiny_32", classes=3, depth=2, width=32, heads=2).state_dict()
    )


def test_it_compiles_whole() -> None:
    objective, data = mae(), batch()
    torch.manual_seed(1)
    expected = objective(data)["loss"]
    torch._dynamo.reset()
    compiled = torch.compile(objective, fullgraph=True, backend="eager")
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(data)["loss"], expected)
