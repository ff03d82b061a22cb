"""Attention transfer (Li et al. 2024, arXiv 2411.09702): exact checks, who may teach whom, the kernel, whole runs."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

import vitrail
from vitrail.config import RunConfig
from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig
from vitrail.engine import checkpoint
from vitrail.engine.config import OptimConfig
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import TrainStep
from vitrail.kernels.attention_match import (
    MadeOf,
    able,
    attention_match,
    map_entropy,
    map_match,
    plain_attention_match,
)
from vitrail.learn.attention_teacher import chosen, load_source
from vitrail.learn.attention_transfer import AttentionTransfer, unused_parameters
from vitrail.learn.config import AttentionTransferConfig
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model, make_adaptive
from vitrail.model.classifier import Classifier
from vitrail.model.heads.head import mean_of_probabilities
from vitrail.model.trunks.guided import draw_keep
from vitrail.model.weights import start_from
from vitrail.recipes import recipe, with_values

SMALL: dict[str, Any] = {"classes": 3, "depth": 3, "width": 32, "heads": 4, "image_size": 16, "patch": 4}
LABELS = torch.tensor([0, 1, 2, 0])
IMAGES = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
STILL = AugmentConfig(crop="evaluation", flip=0.0)


def vit(sharp: bool = True, **options: Any) -> Classifier:
    """A small ViT; `sharp`: with weights large enough for maps that are far from uniform."""
    model = create_model("vit_tiny_32", **{**SMALL, **options})
    if sharp:
        for block in model.trunk.blocks:
            torch.nn.init.normal_(block.attn.qkv.weight, std=0.4)
            torch.nn.init.normal_(block.attn.qkv.bias, std=0.4)
    return model


def batch() -> Batch:
    return Batch((IMAGES,), LABELS, LABELS, torch.arange(4))


def transfer(student: Classifier, teacher: Any, **options: Any) -> AttentionTransfer:
    return AttentionTransfer(student, AttentionTransferConfig(**options), teacher, augment=STILL)


Layer = dict[str, Tensor]  # q, k, v [batch, heads, tokens, width / heads]; map [batch, heads, tokens, tokens]


def walk(model: Classifier, said: list[Layer] | None = None, target: str = "", heads: str = "all") -> list[Layer]:
    """Attention of every layer by hand, from the model's own weights; `target` of these heads is what another said."""
    trunk, found = model.trunk, []
    x = trunk.embed(model._images(IMAGES)).sequence
    for i, block in enumerate(trunk.blocks):
        width, count = x.shape[-1], block.attn.heads
        parts = F.linear(block.norm1(x), block.attn.qkv.weight, block.attn.qkv.bias).split(width, -1)
        made = {
            name: part.reshape(len(x), -1, count, width // count).transpose(1, 2).clone()
            for name, part in zip("qkv", parts, strict=True)
        }
        for head in chosen(heads, count, "heads") if said else ():
            made[target][:, head] = said[i][target][:, head]
        scores = torch.einsum("bhid,bhjd->bhij", made["q"], made["k"]) / math.sqrt(width // count)
        made["map"] = scores.softmax(-1)
        x = x + block.attn.proj(torch.einsum("bhij,bhjd->bhid", made["map"], made["v"]).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
        found.append({**made, "logits": model.head.fc(trunk.norm(x)[:, 0])})
    return found


def maps(model: Classifier) -> list[Tensor]:
    return [layer["map"] for layer in walk(model)]


# 1-3: copying


@pytest.mark.parametrize("target", ["map", "q", "k", "v", "qk"])
def test_a_student_that_is_its_teacher_copies_what_it_would_have_computed(target: str) -> None:
    teacher = vit()
    student = copy.deepcopy(teacher)
    expected = teacher(IMAGES)
    made = transfer(student, teacher, mode="copy", target=target)
    torch.testing.assert_close(made.model.eval()(IMAGES), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("heads", ["all", "3,0"])
@pytest.mark.parametrize("target", ["q", "k", "v"])
def test_one_copied_part_works_with_the_students_own_others(target: str, heads: str) -> None:
    """softmax(q_t k_s) v_s and so on, walked through by hand."""
    student, teacher = vit(), vit()
    with torch.no_grad():
        expected = walk(student, walk(teacher), target, heads)[-1]["logits"]
        made = transfer(student, teacher, mode="copy", target=target, heads=heads).model.eval()
        torch.testing.assert_close(made(IMAGES), expected, atol=1e-5, rtol=1e-5)


def test_copying_q_and_k_is_copying_maps() -> None:
    teacher, student = vit(), vit()
    found = []
    given = {f"attention.{i}": m.detach() for i, m in enumerate(maps(teacher))}
    by_map = student.outputs(IMAGES, given=given).stack[:, 0]
    # In qkv the rows of the values; those of q and k have no effect on either side.
    names = [n for n, _ in student.named_parameters() if any(part in n for part in ("qkv.", "proj.", "mlp"))]
    parameters = dict(student.named_parameters())
    found.append((by_map, torch.autograd.grad(by_map.square().sum(), [parameters[n] for n in names])))
    for target in ("qk", "map"):
        made = transfer(copy.deepcopy(student), copy.deepcopy(teacher), mode="copy", target=target).model
        out = made(IMAGES)
        own = dict(made.named_parameters())
        found.append((out, torch.autograd.grad(out.square().sum(), [own[n] for n in names])))
    for out, gradients in found[1:]:
        torch.testing.assert_close(out, by_map, atol=1e-5, rtol=1e-5)
        for name, one, other in zip(names, gradients, found[0][1], strict=True):
            # Sums over 68 tokens and three layers in another order, in float32.
            assert (one - other).norm() <= 1e-5 * other.norm(), name
            assert other.norm() > 0, name


def test_a_full_copy_does_not_depend_on_its_own_q_and_k_and_they_get_no_gradient() -> None:
    made = transfer(vit(), vit(), mode="copy")
    made(batch())["loss"].backward()
    before = made.model.eval()(IMAGES)
    for block in made.model.trunk.blocks:
        assert torch.count_nonzero(block.attn.qkv.weight.grad[:64]) == 0
        assert torch.count_nonzero(block.attn.qkv.bias.grad[:64]) == 0
        assert block.attn.qkv.weight.grad[64:].abs().min() > 0
        block.attn.qkv.weight.data[:64].add_(1.0)
    assert torch.equal(made.model(IMAGES), before)
    for block in made.model.trunk.guide.source.blocks:
        block.attn.qkv.weight.data[:64].mul_(-1.0)
        block.attn.qkv.weight.data[:32].add_(0.1)
    assert not torch.allclose(made.model(IMAGES), before, atol=1e-4)


def one_step(objective: AttentionTransfer, **optim: Any) -> TrainStep:
    config = OptimConfig(lr=0.1, steps=4, warmup=0, weight_decay=0.1, **optim)
    step = TrainStep(objective, config, make_schedule(config, 4, 4), device=torch.device("cpu"), ema=0.9)
    step.feed(batch())
    return step


@pytest.mark.parametrize("mode", ["copy", "distill"])
def test_a_teacher_is_never_updated_and_never_trains(mode: str) -> None:
    objective = transfer(vit(), vit(), mode=mode)
    source = objective.get_submodule(objective.frozen[0])
    before = copy.deepcopy(source.state_dict())
    one_step(objective)
    objective.train()
    assert not any(module.training for module in source.modules())
    assert all(p.grad is None and not p.requires_grad for p in source.parameters())
    assert all(torch.equal(value, before[name]) for name, value in source.state_dict().items())


def test_parameters_without_effect_are_counted() -> None:
    """ViT-L, all heads: 24 * 2 * (1024^2 + 1024)."""
    made = transfer(vit(), vit(), mode="copy")
    assert unused_parameters(made.model) == 3 * 2 * (32 * 32 + 32)
    assert f"{unused_parameters(made.model):,}" in made.notes[0]


# 4, 5: distilling


def distilled(student: Classifier, teacher: Classifier, **options: Any) -> dict[str, Tensor]:
    return transfer(student, teacher, mode="distill", **options).eval()(batch())


def test_the_loss_is_the_cross_entropy_of_both_maps_the_teacher_first() -> None:
    student, teacher = vit(), vit()
    expected = sum(
        -(t * s.log()).sum(-1).mean() for s, t in zip(maps(student), maps(teacher), strict=True)
    )  # mean over images, heads and queries, sum over layers
    turned = sum(-(s * t.log()).sum(-1).mean() for s, t in zip(maps(student), maps(teacher), strict=True))
    found = distilled(student, teacher)
    torch.testing.assert_close(found["loss_transfer"], expected.detach())
    assert abs(float(found["loss_transfer"] - turned.detach())) > 0.01
    labels = F.cross_entropy(student(IMAGES), LABELS)
    torch.testing.assert_close(found["loss"], labels + expected)


def test_the_loss_is_least_and_the_teachers_entropy_where_maps_are_the_same() -> None:
    teacher = vit()
    entropy = sum(-(t * t.log()).sum(-1).mean() for t in maps(teacher)).detach()
    same = distilled(copy.deepcopy(teacher), copy.deepcopy(teacher))
    torch.testing.assert_close(same["loss_transfer"], entropy)
    assert abs(float(same["divergence"])) < 1e-5
    other = distilled(vit(), copy.deepcopy(teacher))
    assert other["loss_transfer"] > entropy + 0.01
    torch.testing.assert_close(other["divergence"], other["loss_transfer"] - entropy)


def test_the_gradient_is_that_of_the_divergence() -> None:
    q, k, q_t, k_t = torch.randn(4, 2, 2, 7, 8, dtype=torch.float64).unbind(0)
    q, k = q.requires_grad_(), k.requires_grad_()
    own = (q @ k.mT / 8**0.5).log_softmax(-1)
    said = (q_t @ k_t.mT / 8**0.5).log_softmax(-1)
    expected = torch.autograd.grad(F.kl_div(own, said, log_target=True, reduction="sum"), (q, k))
    found = torch.autograd.grad(attention_match(q, k, q_t, k_t)[0].sum(), (q, k))
    torch.testing.assert_close(found, expected)


def test_distilling_some_layers_reaches_their_q_and_k_and_everything_below_and_nothing_else() -> None:
    student = vit()
    objective = transfer(student, vit(), mode="distill", layers="first:2")
    parts = objective.eval()
    with torch.no_grad():
        said = parts.guide(student._images(IMAGES))
    own = student.outputs(IMAGES, {f"{w}.{i}" for w in "qk" for i in (0, 1)}).captured
    torch.stack(parts._losses(own, said)[0]).sum().backward()
    reached = {n for n, p in student.named_parameters() if p.grad is not None and torch.count_nonzero(p.grad)}
    blocks = student.trunk.blocks
    assert torch.count_nonzero(blocks[1].attn.qkv.weight.grad[64:]) == 0  # its values
    assert torch.count_nonzero(blocks[0].attn.qkv.weight.grad[64:]) > 0
    for name, _ in student.named_parameters():
        low = name.startswith(("trunk.blocks.0.", "trunk.patch_embed.", "trunk.pos_embed", "trunk.cls_token"))
        middle = name.startswith(("trunk.blocks.1.norm1.", "trunk.blocks.1.attn.qkv."))
        assert (name in reached) == (low or middle), name


def test_the_loss_of_two_layers_and_two_heads_by_hand() -> None:
    student, teacher = vit(depth=2, heads=2), vit(depth=2, heads=2)
    total = 0.0
    for s, t in zip(maps(student), maps(teacher), strict=True):
        terms = [
            -float((t[b, h, i] * s[b, h, i].log()).sum().detach())
            for b in range(4)
            for h in range(2)
            for i in range(s.shape[2])
        ]
        total += sum(terms) / len(terms)
    for weight in (1.0, 3.0):
        for reduction, times in (("mean", 1), ("sum", 2)):
            found = distilled(copy.deepcopy(student), copy.deepcopy(teacher), weight=weight, head_reduction=reduction)
            assert float(found["loss_transfer"]) == pytest.approx(times * total, rel=1e-5)
            assert float(found["loss"].detach() - found["loss_labels"]) == pytest.approx(
                weight * times * total, rel=1e-5
            )


@pytest.mark.parametrize(("target", "parts"), [("q", "q"), ("k", "k"), ("v", "v"), ("qk", "qk"), ("features", None)])
def test_all_but_maps_are_drawn_by_their_mean_squared_error(target: str, parts: str | None) -> None:
    student, teacher = vit(), vit()
    names = [f"{part}.{i}" for i in range(3) for part in (parts or ["tokens"])]
    own, said = (model.outputs(IMAGES, names).captured for model in (student, teacher))
    expected = sum((own[n] - said[n]).square().mean() for n in names).detach()
    torch.testing.assert_close(distilled(student, teacher, target=target)["loss_transfer"], expected)


# 6, 7: which layers and heads, and averages


def test_choices_of_layers_and_heads() -> None:
    assert chosen("all", 4, "layers") == [0, 1, 2, 3]
    assert chosen("first:2", 4, "layers") == [0, 1]
    assert chosen("first:4", 4, "heads") == chosen("last:4", 4, "heads") == [0, 1, 2, 3]
    assert chosen("last:3", 4, "layers") == [1, 2, 3]
    assert chosen("first:0", 4, "layers") == []
    assert chosen("3,0", 4, "heads") == [3, 0]


def given_maps(student: Classifier, teacher: Classifier, **options: Any) -> list[Tensor]:
    """Maps that a copying student uses, whether given or its own."""
    made = transfer(student, teacher, mode="copy", **options).model.eval()
    return list(made.outputs(IMAGES, [f"attention.{i}" for i in range(3)]).captured.values())


@pytest.mark.parametrize("heads", ["all", "first:2", "3,0"])
@pytest.mark.parametrize("layers", ["first:2", "last:1", "0,2"])
def test_chosen_layers_and_heads_have_the_teachers_maps_and_others_their_own(layers: str, heads: str) -> None:
    student, teacher = vit(), vit()
    expected = maps(teacher)
    for i, found in enumerate(given_maps(student, teacher, layers=layers, heads=heads)):
        torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:3]))
        for h in range(4):
            taken = i in chosen(layers, 3, "layers") and h in chosen(heads, 4, "heads")
            assert torch.allclose(found[:, h], expected[i][:, h], atol=1e-5) == taken


def test_copying_no_layer_is_learning_from_scratch() -> None:
    student = vit()
    expected = student(IMAGES)
    made = transfer(student, vit(), mode="copy", layers="first:0")
    assert torch.equal(made.model(IMAGES), expected)
    assert torch.equal(transfer(copy.deepcopy(student), vit(), layers="first:0")(batch())["loss_labels"],
                       Supervised(student, made.config)(batch())["loss"])  # fmt: skip


def test_averages_over_one_axis() -> None:
    teacher = vit()
    whole = torch.stack(maps(teacher)).detach()  # [layers, images, heads, queries, keys]
    axes = {"examples": 1, "layers": 0, "heads": 2, "queries": 3}
    for name, axis in axes.items():
        found = torch.stack(given_maps(vit(), copy.deepcopy(teacher), aggregate=name))
        torch.testing.assert_close(found, whole.mean(axis, keepdim=True).expand_as(whole), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))


def test_averages_of_constant_maps_change_nothing() -> None:
    constant = torch.rand(17, 17).softmax(-1)
    stored = {f"attention.{i}": constant.expand(4, 17, 17).clone() for i in range(3)}
    for name in ("examples", "layers", "heads", "queries"):
        if name == "queries":
            stored = {key: value[:, :1].expand(4, 17, 17).clone() for key, value in stored.items()}
        for found, expected in zip(given_maps(vit(), stored, aggregate=name), stored.values(), strict=True):
            torch.testing.assert_close(found, expected.expand(4, -1, -1, -1))


def test_the_mean_over_examples_is_that_of_all_images_seen_in_training() -> None:
    teacher = vit()
    whole = torch.stack(maps(teacher)).mean(1).detach()
    made = transfer(vit(), teacher, mode="copy", aggregate="examples").model.train()
    for part in (IMAGES[:1], IMAGES[1:]):
        made(part)
    torch.testing.assert_close(made.trunk.guide.mean, whole, atol=1e-5, rtol=1e-5)
    made.eval()
    other = torch.zeros_like(IMAGES[:1])
    found = made.outputs(other, ["attention.1"]).captured["attention.1"]
    torch.testing.assert_close(found[0], whole[1], atol=1e-5, rtol=1e-5)


# 8, 9, 12-14


def test_an_exported_student_is_plain_and_answers_the_same() -> None:
    student = vit(drop_path=0.5)
    count = sum(p.numel() for p in vit().parameters())
    objective = transfer(student, vit())
    one_step(objective)
    expected = objective.model.eval()(IMAGES)
    made = objective.export_student()
    objective.guide = None  # nobody to ask
    assert torch.equal(made(IMAGES), expected)
    assert sum(p.numel() for p in made.parameters()) == count
    with pytest.raises(ValueError, match="needs its teacher at inference"):
        transfer(vit(), vit(), mode="copy").export_student()


def test_an_ensemble_averages_probabilities() -> None:
    a, b = torch.randn(2, 5, 3).unbind(0)
    together = mean_of_probabilities(torch.stack([a, b], 1)).softmax(-1)
    torch.testing.assert_close(together, (a.softmax(-1) + b.softmax(-1)) / 2)
    torch.testing.assert_close(mean_of_probabilities(torch.stack([a, a], 1)).softmax(-1), a.softmax(-1))
    assert not torch.allclose(together, ((a + b) / 2).softmax(-1), atol=1e-3)


def test_sizes_of_the_paper() -> None:
    trunk = create_model("vit_large", device="meta").trunk
    layers, heads, tokens = trunk.config.depth, trunk.config.heads, trunk.grid[0] * trunk.grid[1] + trunk.prefix
    assert layers * heads * tokens * (trunk.width // heads) * 2 == 9_682_944
    assert layers * heads * tokens * tokens == 14_902_656
    for name, count in (("vit_base", 86_567_656), ("vit_large", 304_326_632), ("vit_huge", 632_045_800)):
        model = create_model(name, classes=1000, device="meta")
        assert sum(p.numel() for p in model.parameters()) == count
    with torch.device("meta"):
        made = transfer(create_model("vit_large", device="meta"), create_model("vit_large", device="meta"), mode="copy")
    assert unused_parameters(made.model) == 50_380_800


def test_rates_of_the_recipes() -> None:
    for name, peak, end in (("attention-copy", 8e-3, 2e-3), ("attention-distill", 8e-4, 1e-6)):
        config = recipe(name)
        curve = make_schedule(config.optim, config.data.batch, 1_281_167)
        assert curve.peak == pytest.approx(peak)
        assert max(map(curve.lr, range(0, curve.steps, 977))) <= peak * (1 + 1e-6)
        assert curve.lr(curve.steps - 1) == pytest.approx(end, rel=1e-3)
    assert recipe("attention-distill", "vit_base").objective.layers == "first:9"
    assert recipe("attention-copy", "vit_base").objective.teacher == "timm:vit_base_patch16_224.mae"


def test_attention_is_nearly_uniform_at_the_start() -> None:
    """Independent unit tokens, weights of deviation 0.02."""
    for width, heads in ((1024, 16), (192, 3)):
        x = torch.randn(2, 197, width)
        q, k = (x @ (torch.randn(width, width) * 0.02) for _ in range(2))
        q, k = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k))
        _, entropy = attention_match(q, k, q, k)
        assert entropy.mean() / math.log(197) > 0.97
        _, sharp = attention_match(q, k, q * (width // heads) ** 0.5, k)
        assert sharp.mean() / math.log(197) < 0.97


# Unequal pairs


def test_layer_and_head_maps_join_unequal_models() -> None:
    student, teacher = vit(), vit(depth=5, heads=2, width=48)
    expected = maps(teacher)
    found = given_maps(student, teacher, layer_map=(0, 2, 4), head_map=(0, 1, 1, 0))
    for i, t in enumerate((0, 2, 4)):
        torch.testing.assert_close(found[i], expected[t][:, [0, 1, 1, 0]], atol=1e-5, rtol=1e-5)
    joined = given_maps(vit(), vit(depth=3, heads=4, width=64), heads="first:2")  # heads of 16 and of 8 channels
    assert joined[0].shape == (4, 4, 17, 17)


def test_a_teacher_of_other_width_is_distilled() -> None:
    student, teacher = vit(), vit(width=64)
    expected = sum(-(t * s.log()).sum(-1).mean() for s, t in zip(maps(student), maps(teacher), strict=True)).detach()
    torch.testing.assert_close(distilled(student, teacher)["loss_transfer"], expected)


def test_a_teacher_sees_images_in_its_own_normalisation_and_size() -> None:
    from dataclasses import replace

    teacher = vit(patch=8, image_size=32)
    teacher.preprocess = replace(teacher.preprocess, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    made = transfer(vit(), teacher, teacher_size=32)
    seen: list[Tensor] = []
    made.guide.source.embed, inner = lambda x: (seen.append(x), inner(x))[1], made.guide.source.embed
    made(batch())
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    exact = (IMAGES / 255 - mean) / std
    expected = F.interpolate(exact, (32, 32), mode="bicubic", antialias=True)
    torch.testing.assert_close(seen[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("teacher", "options", "words"),
    [
        ({"depth": 5}, {}, r"has 5 layers, the student 3.*--objective.layer_map 0,2,4"),
        ({"heads": 2}, {}, r"has 2 heads, the student 4.*--objective.head_map"),
        ({"patch": 8}, {}, r"into 2x2, the student into 4x4; use --objective.teacher_size 32"),
        ({"head": "mean"}, {}, r"has 0 class tokens, the student 1.*--model.head.kind"),
        ({"width": 64}, {"target": "q"}, r"16 channels, of the student 8.*use target map"),
        ({"width": 64}, {"target": "features"}, r"features of width 64.*target map"),
        ({"mixer": "talking_heads"}, {}, r"the teacher has no softmax attention.*use a plain ViT"),
        ({}, {"mode": "copy", "target": "features"}, "can be distilled, not copied"),
        ({}, {"aggregate": "heads", "target": "q"}, "use target map"),
        ({}, {"layers": "first:4"}, "the student has 3 layers; use first:3 or fewer"),
        ({}, {"layers": "some"}, "is not all, first:K, last:K or a list"),
        ({}, {"heads": "0,4"}, "the student has heads 0 to 3"),
        ({}, {"layer_map": (0, 1)}, "2 layers for the 3 that take"),
        ({}, {"layer_map": (0, 1, 3)}, "the teacher has layers 0 to 2"),
        ({}, {"layer_map": (2, 1, 0), "drop_path": "shared"}, "masks are shared layer by layer"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(teacher: dict[str, Any], options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        transfer(vit(), vit(sharp=False, **teacher), **options)


def test_a_teacher_with_other_parts_is_warned_about() -> None:
    (said,) = transfer(vit(), vit(layerscale=0.1, norm="affine")).notes
    assert "layerscale 0.1 (student: None)" in said
    assert "norm affine (student: layernorm)" in said
    assert transfer(vit(), vit()).notes == ()


# Sources


def test_a_random_teacher_is_another_draw_and_always_the_same() -> None:
    student = vit(sharp=False)
    one, two = load_source("random", student), load_source("random", student)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.trunk.pos_embed, student.trunk.pos_embed)


@pytest.mark.usefixtures("hub_answers")
def test_published_weights_come_in_our_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=0).eval()
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: theirs)
    model = load_source("timm:vit_tiny_patch16_224.mae", vit())
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval().tokens(image).sequence, theirs.forward_features(image), atol=1e-4, rtol=1e-4
        )
    with pytest.raises(ValueError, match="attention of timm:resnet50 cannot be read"):
        load_source("timm:resnet50", vit())


def test_stored_maps_teach_by_image(tmp_path: Path) -> None:
    student, teacher = vit(), vit()
    save_file(
        {f"attention.{i}": m.detach().contiguous() for i, m in enumerate(maps(teacher))}, tmp_path / "m.safetensors"
    )
    stored = load_source(str(tmp_path / "m.safetensors"), student)
    expected = distilled(copy.deepcopy(student), teacher)
    found = distilled(copy.deepcopy(student), stored)
    torch.testing.assert_close(found["loss_transfer"], expected["loss_transfer"])
    torch.testing.assert_close(found["divergence"], expected["divergence"], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="not there at inference; use distill"):
        transfer(copy.deepcopy(student), stored, mode="copy")
    with pytest.raises(ValueError, match="an image always looks the same"):
        AttentionTransfer(student, AttentionTransferConfig(), stored, augment=AugmentConfig())
    with pytest.raises(ValueError, match=r"lacks attention.3"):
        transfer(vit(depth=4), stored)
    with pytest.raises(ValueError, match=r"is 4x4x17x17, but the student's ends in 65x65"):
        transfer(vit(image_size=32), stored)


def test_the_teacher_ends_at_the_last_layer_that_is_taken() -> None:
    made = transfer(vit(depth=5), vit(depth=5), layers="first:2")
    ran: list[str] = []
    for i, block in enumerate(made.guide.source.blocks):
        block.mlp.register_forward_hook(lambda *_, i=i: ran.append(f"mlp.{i}"))
        block.attn.proj.register_forward_hook(lambda *_, i=i: ran.append(f"proj.{i}"))
    made(batch())
    assert ran == ["proj.0", "mlp.0"]
    assert len(made.guide.source.blocks) == 2


def test_shared_drop_path_drops_the_same_branches_of_both() -> None:
    torch.manual_seed(5)
    teacher = vit()
    student = copy.deepcopy(teacher)
    for block in student.trunk.blocks:
        block.drop_path.rate = 0.5
    made = transfer(student, teacher, target="features", drop_path="shared").train()
    found = made(batch())
    assert float(found["loss_transfer"]) == pytest.approx(0, abs=1e-9)  # the same weights and the same masks
    own = transfer(copy.deepcopy(student), copy.deepcopy(teacher), target="features").train()(batch())
    assert float(own["loss_transfer"]) > 0.01
    masks = draw_keep(student.trunk, torch.zeros(1000, 3, 16, 16))
    assert set(masks) == {"keep.0", "keep.1", "keep.2"}
    assert set(masks["keep.1"].unique().tolist()) == {0.0, 2.0}
    assert masks["keep.1"].mean() == pytest.approx(1.0, abs=0.1)  # 2,000 draws of deviation 1: four and a half sigma


def test_a_student_may_come_with_weights() -> None:
    student = vit()
    before = copy.deepcopy(student.state_dict())
    made = transfer(student, vit(), mode="copy").model
    after = made.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


# The kernel

INTERPRETED = """
import torch
from vitrail.kernels import attention_match_triton as kernel
from vitrail.kernels.attention_match import plain_attention_match

torch.manual_seed(0)
shapes = ((2, 2, 5, 32, 32), (1, 1, 37, 64, 80), (1, 1, 65, 80, 64))  # one tile, two of 32, two of 64
for dtype in (torch.float32, torch.bfloat16):
    for batch, heads, tokens, dim, dim_t in shapes:
        # As a qkv layer leaves them: heads beside each other, not one after the other.
        parts = [torch.randn(batch, tokens, heads, d).to(dtype).transpose(1, 2) * 2 for d in (dim, dim, dim_t, dim_t)]
        wide = [x.double().requires_grad_() for x in parts]
        cross, entropy = plain_attention_match(*wide)
        grad = torch.randn_like(cross)
        expected = torch.autograd.grad(cross, wide[:2], grad)
        found, found_entropy, lse, lse_t = kernel.forward(*parts)
        made = kernel.backward(*parts, lse, lse_t, grad.float().contiguous())
        near = 2**-22 * max((a @ b.mT).abs().max() for a, b in (wide[:2], wide[2:]))  # four roundings of a logit
        assert (found - cross).abs().max() < near, (dtype, tokens)
        assert (found_entropy - entropy).abs().max() < near, (dtype, tokens)
        # float32 sums of at most 80 terms; bfloat16 keeps 8 bits, and the interpreter cuts instead of rounding, twice.
        most = 2e-6 if dtype == torch.float32 else 2**-6
        for a, b in zip(made, expected):
            assert a.dtype == dtype
            assert (a - b).norm() / b.norm() < most, (dtype, tokens)
# Keys past the end of a tile have logits of 0, far above those of a query whose logits are all low.
for shifted in (1, 3):  # the student's keys, the teacher's
    parts = [torch.randn(1, 1, 65, 32) for _ in range(4)]
    for x in parts[shifted - 1 : shifted + 1]:
        x[..., 0] = 30.0
    parts[shifted][..., 0] = -30.0
    wide = [x.double().requires_grad_() for x in parts]
    cross, _ = plain_attention_match(*wide)
    grad = torch.randn_like(cross)
    *_, lse, lse_t = kernel.forward(*parts)
    for a, b in zip(kernel.backward(*parts, lse, lse_t, grad.float()), torch.autograd.grad(cross, wide[:2], grad)):
        assert (a - b).norm() / b.norm() < 1e-4, shifted  # logits of 160 keep 2^-16 in float32
# The operators, with their gradient and their fakes, on the same kernels.
from vitrail.kernels import attention_match as operators

operators._match.register_kernel("cpu")(kernel.forward)
operators._match_backward.register_kernel("cpu")(kernel.backward)
parts = [torch.randn(1, 9, 2, 16).transpose(1, 2).requires_grad_(i < 2) for i in range(4)]
cross, entropy = plain_attention_match(*parts)
grad = torch.randn_like(cross)
expected = torch.autograd.grad(cross, parts[:2], grad)
found, found_entropy, *_ = torch.ops.vitrail.attention_match(*parts)
assert not found_entropy.requires_grad
for a, b in zip(torch.autograd.grad(found, parts[:2], grad), expected):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
torch.library.opcheck(torch.ops.vitrail.attention_match.default, parts, test_utils=("test_schema", "test_faketensor"))
# With q and k of the teacher made again in the backward pass: the same gradients, and neither of them kept.
operators._match_again.register_kernel("cpu")(lambda *parts: kernel.forward(*parts[:4]))
operators._match_again_backward.register_kernel("cpu")(
    lambda q, k, x, w, b, *rest: kernel.backward(q, k, *operators.MadeOf(x, w, b).parts(), *rest)
)
for bias in (torch.randn(2, 2, 16), None):
    source = operators.MadeOf(torch.randn(1, 9, 24), torch.randn(2, 2, 16, 24), bias)
    q_t, k_t = source.parts()
    rows = source.x @ source.weight.flatten(0, 2).mT + (0 if bias is None else bias.flatten())
    for found, first in ((q_t, 0), (k_t, 32)):
        for head in range(2):
            at = first + 16 * head
            torch.testing.assert_close(found[:, head], rows[..., at : at + 16], atol=1e-5, rtol=1e-5)
    parts = [*(x.detach().requires_grad_() for x in parts[:2]), q_t, k_t]
    cross, _, _, _ = torch.ops.vitrail.attention_match(*parts)
    expected = torch.autograd.grad(cross, parts[:2], grad)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        again, _, _, _ = torch.ops.vitrail.attention_match_again(*parts, *source)
    assert torch.equal(again, cross)
    assert {x.untyped_storage().data_ptr() for x in kept}.isdisjoint({q_t.untyped_storage().data_ptr()})
    for a, b in zip(torch.autograd.grad(again, parts[:2], grad), expected):
        assert torch.equal(a, b)
    checked = torch.ops.vitrail.attention_match_again.default
    torch.library.opcheck(checked, (*parts, *source), test_utils=("test_schema", "test_faketensor"))
print("attention match is right")
"""


def test_the_kernel_equals_its_twin_in_the_interpreter(interpreted: Callable[[str], str]) -> None:
    assert "attention match is right" in interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "dim", "dim_t"), [(5, 32, 32), (65, 64, 32), (197, 80, 64), (257, 64, 80)])
def test_the_kernel_equals_float64_on_an_accelerator(tokens: int, dim: int, dim_t: int, dtype: torch.dtype) -> None:
    shapes = [(2, tokens, 3, d) for d in (dim, dim, dim_t, dim_t)]
    parts = [torch.randn(s, device="cuda").to(dtype).transpose(1, 2).requires_grad_() for s in shapes]
    assert able(*parts)
    wide = [x.detach().double().requires_grad_() for x in parts]
    cross, entropy = plain_attention_match(*wide)
    grad = torch.randn_like(cross)
    expected = torch.autograd.grad(cross, wide[:2], grad)
    found, found_entropy = attention_match(*parts)
    made = torch.autograd.grad(found, parts[:2], grad.float())
    assert (found - cross).abs().max() < 1e-4
    assert (found_entropy - entropy).abs().max() < 1e-4
    # bfloat16 keeps 8 bits: half of 2^-8 for the tile and as much for the result.
    most = 1e-5 if dtype == torch.float32 else 2**-7
    assert all((a - b).norm() / b.norm() < most for a, b in zip(made, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q_and_k_made_again_give_the_same_gradients_on_an_accelerator(dtype: torch.dtype) -> None:
    q, k = (torch.randn(2, 3, 197, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    x, weight = torch.randn(2, 197, 192, device="cuda", dtype=dtype), torch.randn(2, 3, 64, 192, device="cuda") / 14
    source = MadeOf(x, weight, torch.randn(2, 3, 64, device="cuda"))
    cross, entropy = attention_match(q, k, *source.parts())
    grad = torch.randn_like(cross)
    expected = torch.autograd.grad(cross, (q, k), grad)
    again, entropy_again = attention_match(q, k, *source.parts(), source)
    assert torch.equal(again, cross)
    assert torch.equal(entropy_again, entropy)
    assert all(map(torch.equal, torch.autograd.grad(again, (q, k), grad), expected))


@pytest.mark.parametrize("options", [{}, {"heads": "0,2"}, {"layers": "last:2"}, {"layers": "1", "heads": "first:3"}])
def test_q_and_k_of_the_teacher_are_what_they_are_said_to_be_made_of(options: dict[str, Any]) -> None:
    teacher = vit()
    if "layers" in options:
        for block in teacher.trunk.blocks:
            block.attn.qkv.bias = None
    objective = transfer(vit(), teacher, **options)
    assert objective.guide is not None
    said = objective.guide(objective.model._images(IMAGES))
    for layer, _ in objective.guide.config.layers:
        source = objective.guide.made_of(layer, said)
        assert source is not None
        assert not source.weight.requires_grad
        for found, name in zip(source.parts(), ("q", "k"), strict=True):
            torch.testing.assert_close(found, said[f"{name}.{layer}"])


def test_what_is_kept_of_a_teacher_is_the_smaller_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its input has half of the size of q and k; of few heads, q and k are smaller. Averages ask for none."""
    asked = []

    class Operators:
        def __getattr__(self, name: str) -> Callable[..., tuple[Tensor, ...]]:
            asked.append(name)
            return lambda q, k, q_t, k_t, *_: (*plain_attention_match(q, k, q_t, k_t), q, q)

    monkeypatch.setattr("vitrail.kernels.attention_match.able", lambda *_: True)
    monkeypatch.setattr(torch.ops, "vitrail", Operators())
    plain = [float(transfer(vit(), vit(), heads=heads)(batch())["loss"]) for heads in ("all", "first:1")]
    assert asked == ["attention_match_again"] * 3 + ["attention_match"] * 3
    assert all(map(math.isfinite, plain))
    averaged = transfer(vit(), vit(), aggregate="heads")
    assert averaged.guide is not None
    assert not any(name.startswith("input") for name in averaged.guide(averaged.model._images(IMAGES)))


def test_a_cpu_uses_the_plain_twin() -> None:
    parts = torch.randn(4, 1, 2, 5, 8).unbind(0)
    assert not able(*parts)
    assert all(map(torch.equal, attention_match(*parts), plain_attention_match(*parts)))


def test_the_plain_twin_is_the_formula() -> None:
    q, k, q_t, k_t = torch.randn(4, 1, 1, 3, 4, dtype=torch.float64).unbind(0)
    cross, entropy = plain_attention_match(q, k, q_t, k_t)
    for i in range(3):
        s = [float(q[0, 0, i] @ k[0, 0, j]) / 2 for j in range(3)]
        t = [float(q_t[0, 0, i] @ k_t[0, 0, j]) / 2 for j in range(3)]
        p = [math.exp(v) / sum(map(math.exp, t)) for v in t]
        sums = math.log(sum(map(math.exp, s)))
        assert float(cross[0, 0, i]) == pytest.approx(sums - sum(a * b for a, b in zip(p, s, strict=True)))
        assert float(entropy[0, 0, i]) == pytest.approx(-sum(a * math.log(a) for a in p))


def test_a_map_of_ones_and_zeros_has_no_entropy_and_the_loss_of_its_key() -> None:
    q, k = torch.randn(2, 1, 1, 4, 8).unbind(0)
    attention = torch.eye(4)[None, None]
    logits = q @ k.mT / 8**0.5
    torch.testing.assert_close(
        map_match(q, k, attention)[0, 0], F.cross_entropy(logits[0, 0], torch.arange(4), reduction="none")
    )
    assert torch.equal(map_entropy(attention), torch.zeros(1, 1, 4))


# Whole runs


@pytest.mark.parametrize("options", [{"mode": "distill"}, {"mode": "copy"}, {"mode": "copy", "heads": "first:2"}])
def test_the_objective_compiles_whole(options: dict[str, Any]) -> None:
    objective = transfer(vit(), vit(), **options)
    expected = objective(batch())["loss"]
    torch._dynamo.reset()
    compiled = torch.compile(objective, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(batch())["loss"], expected)


def test_a_copying_model_is_saved_with_its_teacher_and_answers_the_same(tmp_path: Path) -> None:
    for i, options in enumerate(({}, {"aggregate": "examples"}, {"heads": "0,2", "layers": "last:2"})):
        made = transfer(vit(), vit(), mode="copy", **options).model.train()
        made(IMAGES)
        made.eval().save(tmp_path / str(i))
        assert torch.equal(vitrail.load(tmp_path / str(i))(IMAGES), made(IMAGES))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    classes = vitrail.open_data("synthetic:shapes?n=60&size=32").classes
    small = {"depth": 2, "width": 32, "heads": 2, "patch": 8}
    return create_model("vit_tiny_32", classes=classes, **small).save(tmp_path_factory.mktemp("teacher"))


def run_config(teacher: Path, out: Path, mode: str) -> RunConfig:
    values = {
        "out": str(out),
        "data.uri": "synthetic:shapes?n=60&size=32",
        "data.batch": 12,
        "data.workers": 0,
        "data.check": "off",
        "optim.steps": 2,
        "engine.device": "cpu",
        "model.trunk": {"depth": 2, "width": 32, "heads": 2, "patch": 8},
        "objective.teacher": str(teacher),
    }
    return with_values(recipe(f"small-attention-{mode}"), values | {"objective.layers": "all"})


@pytest.mark.parametrize("mode", ["copy", "distill"])
def test_a_run_keeps_its_teacher_out_of_checkpoints_and_answers_when_loaded(
    mode: str, teacher: Path, tmp_path: Path
) -> None:
    run = vitrail.train(run_config(teacher, tmp_path / "run", mode), quiet=True)
    state, _ = checkpoint.newest(run.path / "checkpoint")
    name = "model.trunk.guide.source" if mode == "copy" else "guide.source"
    assert any(key.startswith("ema/") for key in state.tensors)
    assert not any("guide.source" in key for key in state.tensors)
    assert str(teacher) in state.facts[name]
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(vitrail.load(run.path)(images), run.model(images))
    described = json.loads((run.path / "model" / "model.json").read_text())
    assert described["spec"]["trunk"]["kind"] == ("guided" if mode == "copy" else "blocks")
    logged = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert ("transfer_1" in logged[0]) == (mode == "distill")


def test_a_copying_run_goes_on_where_it_was_and_with_no_other_teacher(teacher: Path, tmp_path: Path) -> None:
    shutil.copytree(teacher, tmp_path / "teacher")
    run = vitrail.train(run_config(tmp_path / "teacher", tmp_path / "run", "copy"), quiet=True)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    again = vitrail.resume(run.path, quiet=True)
    assert torch.equal(again.model(images), run.model(images))
    other = vitrail.load(tmp_path / "teacher")
    other.trunk.pos_embed.data.add_(1.0)
    other.save(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"can only be resumed with the model\.trunk\.guide\.source it began with"):
        vitrail.resume(run.path, quiet=True)


def test_an_adaptive_model_neither_gives_nor_takes_attention(tmp_path: Path) -> None:
    adaptive = make_adaptive(vit(), "ats")
    for student, teacher in ((adaptive, vit()), (vit(), adaptive)):
        with pytest.raises(ValueError, match="is adaptive and leaves out tokens, heads or blocks"):
            transfer(student, teacher)


def test_a_weights_file_of_an_autoencoder_is_a_teacher_and_a_start(tmp_path: Path) -> None:
    """As they are published: timm's names, a decoder and a mask token beside the encoder, no classifier."""
    source = vit()
    names = {n.removeprefix("trunk."): t for n, t in source.state_dict().items() if n.startswith("trunk.")}
    more = {"mask_token": torch.zeros(1, 1, 8), "decoder_pos_embed": torch.zeros(1, 5, 8)}
    torch.save({"model": {**names, **more, "decoder_blocks.0.norm1.weight": torch.ones(8)}}, tmp_path / "mae.pth")
    teacher = load_source(str(tmp_path / "mae.pth"), vit())
    assert isinstance(teacher, Classifier)
    for name, tensor in source.trunk.state_dict().items():
        assert torch.equal(teacher.trunk.state_dict()[name], tensor)
    started = vit()
    notes = start_from(started, "vit_micro_28", str(tmp_path / "mae.pth"))
    assert notes[0] == "the decoder of a masked autoencoder is left out"
    assert torch.equal(started.trunk.blocks[0].attn.qkv.weight, source.trunk.blocks[0].attn.qkv.weight)
    with pytest.raises(ValueError, match=r"assumed to be a model like the student; these weights do not fit"):
        load_source(str(tmp_path / "mae.pth"), vit(width=96))
