"""Trunk, blocks, capture and override, saving and loading."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.heads.config import Mean
from vitrail.model.parts.block import DropPath, LayerScale, drop_path_rates
from vitrail.model.parts.modules import reset
from vitrail.model.parts.stems import resize_positions
from vitrail.model.parts.tokens import Tokens
from vitrail.model.store import read_tensors
from vitrail.model.weights import load_model


def small(name: str = "deit3_tiny", **changes: object) -> Classifier:
    options = {"classes": 5, "depth": 2, "width": 64, "heads": 2, "image_size": 64, **changes}
    return create_model(name, **options).eval()


def shake(model: torch.nn.Module) -> None:
    """Random weights everywhere: LayerScale's small start would hide what a branch does."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)


def test_captured_attention_equals_the_unfused_computation() -> None:
    model = small()
    shake(model)
    images = torch.randn(2, 3, 64, 64)
    wanted = {"attention.1", "q.1", "k.1", "v.1", "tokens.0"}
    with torch.no_grad():
        found = model.outputs(images, want=wanted)
        assert set(found.captured) == wanted
        block = model.trunk.blocks[1]
        x = block.norm1(found.captured["tokens.0"])
        q, k, _ = block.attn.qkv(x).reshape(2, 17, 3, 2, 32).permute(2, 0, 3, 1, 4)
        torch.testing.assert_close(found.captured["q.1"], q)
        expected = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) / 32**0.5, -1)
        torch.testing.assert_close(found.captured["attention.1"], expected)
        torch.testing.assert_close(model.head.fuse(found.stack), model(images))


def test_given_values_replace_what_a_block_would_compute() -> None:
    model = small()
    shake(model)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        own = model.outputs(images, want={"attention.0", "q.1"})
        again = model.outputs(images, given={"attention.0": own.captured["attention.0"], "q.1": own.captured["q.1"]})
        torch.testing.assert_close(again.stack, own.stack)
        uniform = torch.full_like(own.captured["attention.0"], 1 / 17)
        other = model.outputs(images, given={"attention.0": uniform}, want={"tokens.0", "attention.0"})
        assert torch.equal(other.captured["attention.0"], uniform)
        block = model.trunk.blocks[0]
        x = model.trunk.embed(images).sequence
        v = block.attn.qkv(block.norm1(x))[..., 128:]
        x = x + block.ls1(block.attn.proj(v.mean(1, keepdim=True).expand_as(v)))
        x = x + block.ls2(block.mlp(block.norm2(x)))
        torch.testing.assert_close(other.captured["tokens.0"], x)


def test_an_unknown_intermediate_is_an_error_and_never_an_empty_answer() -> None:
    with pytest.raises(ValueError, match=r"no intermediate 'attention.2'.*did you mean"):
        small().outputs(torch.randn(1, 3, 64, 64), want={"attention.2"})


def test_until_stops_before_a_block() -> None:
    model = small()
    tokens = model.trunk.embed(torch.randn(1, 3, 64, 64))
    with torch.no_grad():
        stopped, _ = model.trunk.encode(tokens, until=1)
        _, captured = model.trunk.encode(tokens, want={"tokens.0"})
    assert torch.equal(stopped.sequence, captured["tokens.0"])


def test_padding_tokens_change_nothing() -> None:
    model = small(head="mean")
    shake(model)
    tokens = model.trunk.embed(torch.randn(2, 3, 64, 64))
    padded = torch.cat([tokens.sequence, torch.randn(2, 5, 64)], 1)
    mask = torch.arange(21).expand(2, -1) < 16
    with torch.no_grad():
        plain = model.head(model.trunk.encode(tokens)[0])
        masked = model.head(model.trunk.encode(Tokens(padded, 0, (4, 4), mask=mask))[0])
    torch.testing.assert_close(masked, plain)


def test_without_positions_a_transformer_does_not_see_the_order_of_patches() -> None:
    model = small("deit_tiny")
    shake(model)
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(16)])
    tokens = model.trunk.embed(torch.randn(1, 3, 64, 64))
    bare = tokens.sequence - model.trunk.pos_embed
    with torch.no_grad():
        straight, _ = model.trunk.encode(tokens.but(bare))
        shuffled, _ = model.trunk.encode(tokens.but(bare[:, order]))
        torch.testing.assert_close(shuffled.sequence, straight.sequence[:, order])  # patches move along
        torch.testing.assert_close(model.head(shuffled), model.head(straight))
        placed = model.head(model.trunk.encode(tokens)[0])
        moved = model.head(model.trunk.encode(tokens.but(bare[:, order] + model.trunk.pos_embed))[0])
    assert (placed - moved).abs().max() > 1e-3


def test_bicubic_positions_keep_their_norm_better_than_bilinear() -> None:
    positions = torch.randn(1, 1 + 14 * 14, 512, generator=torch.Generator().manual_seed(0))

    def ratio(mode: str, antialias: bool) -> float:
        moved = resize_positions(positions, 1, (14, 14), (24, 24), mode, antialias)
        assert torch.equal(moved[:, :1], positions[:, :1])
        return float(moved[:, 1:].norm(dim=-1).mean() / positions[:, 1:].norm(dim=-1).mean())

    # Expected values have two digits, the last of them approximate; the last case is antialiased
    assert ratio("bilinear", False) == pytest.approx(0.68, abs=0.005)
    assert ratio("bicubic", False) == pytest.approx(0.86, abs=0.005)
    assert ratio("bicubic", True) == pytest.approx(0.83, abs=0.01)
    assert resize_positions(positions, 1, (14, 14), (14, 14)) is positions


def test_images_of_any_size_are_taken_and_others_refused_in_words() -> None:
    model = small()
    assert model(torch.randn(1, 3, 96, 128)).shape == (1, 5)
    with pytest.raises(ValueError, match="cannot be cut into patches of 16"):
        model(torch.randn(1, 3, 65, 64))


def test_drop_path_keeps_the_expectation_and_rests_in_eval() -> None:
    drop = DropPath(0.25)
    branch = torch.ones(20000, 2, 3)
    drop.train()
    dropped = drop(branch)
    assert dropped[:, 0, 0].unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert (dropped == dropped[:, :1, :1]).all()
    assert dropped.mean() == pytest.approx(1.0, abs=0.02)
    drop.eval()
    assert drop(branch) is branch


def test_uniform_half_drops_as_many_branches_as_linear() -> None:
    linear = drop_path_rates(0.2, 12, "linear")
    uniform = drop_path_rates(0.1, 12, "uniform")
    assert linear[0] == 0
    assert linear[-1] == 0.2
    assert sum(linear) == pytest.approx(sum(uniform))


def test_layerscale_at_zero_is_the_identity_without_gradients_and_small_is_not() -> None:
    for start, flows in ((0.0, False), (1e-6, True)):
        model = small(layerscale=start)
        images = torch.randn(1, 3, 64, 64)
        tokens = model.trunk.embed(images)
        out, _ = model.trunk.encode(tokens)
        still = model.trunk.norm(tokens.sequence)
        assert torch.equal(out.sequence, still) is not flows
        assert (out.sequence - still).norm() < 1e-5 * still.norm()
        model(images).sum().backward()
        for name, parameter in model.trunk.blocks.named_parameters():
            if parameter.ndim == 2:  # the weights of the branches
                assert bool(parameter.grad.abs().max() > 0) is flows, name


def test_a_model_on_meta_can_be_filled_and_reset() -> None:
    model = small(device="meta").to_empty(device="cpu")
    reset(model)
    shapes = {name: p.std().item() for name, p in model.named_parameters() if p.ndim > 1}
    assert shapes["trunk.blocks.0.attn.qkv.weight"] == pytest.approx(0.02, rel=0.1)
    assert torch.equal(model.trunk.blocks[0].ls1.gamma, torch.full((64,), 1e-4))
    assert torch.isfinite(model(torch.randn(1, 3, 64, 64))).all()


def test_layerscale_multiplies_each_channel() -> None:
    scale = LayerScale(3, 0.5)
    assert torch.equal(scale(torch.tensor([[2.0, 4.0, 6.0]])), torch.tensor([[1.0, 2.0, 3.0]]))


def test_bytes_are_normalised_and_floats_are_taken_as_they_are() -> None:
    model = small()
    pixels = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    mean = torch.tensor(model.preprocess.mean).view(3, 1, 1)
    std = torch.tensor(model.preprocess.std).view(3, 1, 1)
    torch.testing.assert_close(model(pixels), model((pixels / 255 - mean) / std))


def test_prediction_is_the_same_from_path_image_array_and_tensor(tmp_path) -> None:
    model = small()
    shake(model)
    pixels = np.random.default_rng(0).integers(0, 256, (80, 70, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    asked = [tmp_path / "a.png", Image.fromarray(pixels), pixels, torch.from_numpy(pixels).permute(2, 0, 1)]
    said = model.predict(asked)
    assert len({p.label for p in said}) == 1
    assert all(p.top == said[0].top for p in said)
    assert sum(p for _, p in said[0].top) == pytest.approx(1)
    alone = model.predict(str(tmp_path / "a.png"))[0]
    assert [name for name, _ in alone.top] == [name for name, _ in said[0].top]
    assert alone.probability == pytest.approx(said[0].probability, rel=1e-5)  # another batch size, other rounding
    with pytest.raises(ValueError, match="byte arrays"):
        model.predict(pixels.astype(np.float32))


def test_unreadable_images_are_reported_in_their_place(tmp_path) -> None:
    (tmp_path / "bad.jpg").write_text("no image")
    good = Image.new("RGB", (64, 64))
    said = small().predict([good, tmp_path / "bad.jpg", good], errors="return")
    assert [p.error is None for p in said] == [True, False, True]
    with pytest.raises(Exception, match=r"bad\.jpg"):
        small().predict([tmp_path / "bad.jpg"])


def test_a_damaged_model_is_one_sentence(tmp_path) -> None:
    small().save(tmp_path)
    weights, description = tmp_path / "model.safetensors", tmp_path / "model.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="damaged"):
        load_model(tmp_path)
    weights.write_bytes(whole)
    text = description.read_text()
    description.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"model\.json is damaged"):
        load_model(tmp_path)
    description.write_text(json.dumps({**json.loads(text), "format": 99}))
    with pytest.raises(ValueError, match="later version of vitrail"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="no model at"):
        load_model(tmp_path / "elsewhere")


class Malicious:
    """What a hostile checkpoint holds: code that runs when it is unpickled."""

    def __reduce__(self):
        return (print, ("unpickled!",))


def test_a_malicious_checkpoint_is_refused_without_running_it(tmp_path, capsys) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"model": Malicious()}, path)
    with pytest.raises(ValueError, match="damaged or no weights file"):
        read_tensors(path)
    assert "unpickled!" not in capsys.readouterr().out


def test_weights_of_a_file_and_of_a_run_start_a_model(tmp_path) -> None:
    first = small(head=Mean(norm_after=True))
    shake(first)
    first.save(tmp_path / "run" / "model")
    torch.save({"model": {f"module.{k}": v for k, v in first.state_dict().items()}}, tmp_path / "weights.pth")
    images = torch.randn(1, 3, 64, 64)
    for weights in (tmp_path / "run", tmp_path / "weights.pth"):
        second = small(head=Mean(norm_after=True), weights=str(weights))
        assert torch.equal(second(images), first(images))


def test_a_model_file_may_be_read_by_others_as_far_as_the_user_lets_them(tmp_path) -> None:
    folder = create_model("vit_micro_28", classes=3).save(tmp_path / "m")
    (tmp_path / "plain").touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {(tmp_path / "plain").stat().st_mode}


def test_no_classes_cannot_be_told() -> None:
    with pytest.raises(ValueError, match="ask for at least 1"):
        create_model("vit_micro_28", classes=3).predict(np.zeros((28, 28, 3), np.uint8), top=0)
