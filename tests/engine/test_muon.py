"""Muon: which weights it takes, and that its step is torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from vitrail.engine.config import OptimConfig
from vitrail.engine.muon import Muon
from vitrail.engine.optimizer import build_optimizer, describe_shares, make_schedule, optimizer_shares
from vitrail.engine.step import TrainStep
from vitrail.learn.byol import Byol
from vitrail.learn.config import ByolConfig, DinoConfig, SupervisedConfig
from vitrail.learn.dino import Dino
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.heads.config import AttentionPool, ClassAttention, Gramian, Mean, Projected, SecondOrder
from vitrail.model.mixers.config import PatchConv
from vitrail.model.parts.modules import hidden_matrices

CPU = torch.device("cpu")
MUON = OptimConfig(name="muon", lr=0.01, weight_decay=0.1, momentum=0.9, warmup=0, schedule="constant")


def small_vit(**changes: object) -> Classifier:
    options: dict[str, object] = {"image_size": 16, "patch": 4, "width": 24, "depth": 2, "heads": 2, **changes}
    return create_model("vit_tiny_32", classes=5, **options)


def share(model: nn.Module) -> float:
    named = dict(model.named_parameters())
    return sum(named[name].numel() for name in hidden_matrices(model)) / sum(p.numel() for p in named.values())


@pytest.mark.parametrize("name", ["patchconvnet_t20_32", "vit_tiny_32", "cifar_resnet20", "resmlp_s12"])
def test_muon_takes_nearly_all_weights_of_convolutional_networks_too(name: str) -> None:
    assert share(create_model(name, classes=100)) > 0.9


def test_roles_of_the_weights_of_a_vision_transformer() -> None:
    found = hidden_matrices(small_vit())
    blocks = {
        f"trunk.blocks.{i}.{layer}.weight": 3 if layer == "attn.qkv" else 1
        for i in range(2)
        for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }
    assert found == blocks  # not the patch embedding, not the classifier, no tokens, positions or norms


def test_three_times_as_tall_as_wide_is_not_taken_for_fused_queries_keys_and_values() -> None:
    found = hidden_matrices(small_vit(mlp_ratio=3))
    assert found["trunk.blocks.0.mlp.fc1.weight"] == 1
    assert found["trunk.blocks.0.attn.qkv.weight"] == 3


def test_roles_of_the_weights_of_patchconvnet() -> None:
    model = create_model("patchconvnet_t20_32", classes=7)
    found = hidden_matrices(model)
    names = {name for name, p in model.named_parameters() if p.ndim == 4}
    reads_pixels = {name for name in names if model.get_parameter(name).shape[1] == 3}
    depth_wise = {name for name in names if model.get_parameter(name).shape[1] == 1}
    assert len(depth_wise) == 20
    assert reads_pixels
    assert names - reads_pixels - depth_wise <= set(found)
    assert not (reads_pixels | depth_wise) & set(found)


@pytest.mark.parametrize("style", ["full", "depthwise", "separable"])
def test_convolution_mixers_are_matrices_but_for_depth_wise_kernels(style: str) -> None:
    model = small_vit(mixer=PatchConv(style=style), head=Mean())  # type: ignore[arg-type]
    found = hidden_matrices(model)
    assert ("trunk.blocks.0.attn.conv.weight" in found) is (style == "full")
    assert ("trunk.blocks.0.attn.point.weight" in found) is (style == "separable")


HEADS = {
    "attention pooling": (AttentionPool(), {"q", "k", "v", "proj"}),
    "class attention": (ClassAttention(), {"q", "k", "v", "proj"}),
    "second order": (SecondOrder(heads=2, rows=4, columns=4), {"project"}),
    "gramian": (
        Gramian(heads=2, gram_width=8, embed_groups=4, attention_heads=4),
        {"contract", "query", "key", "proj"},
    ),
    "projector": (Projected(width=8, hidden=16), {"0", "2"}),
}


@pytest.mark.parametrize("kind", HEADS)
def test_heads_are_matrices_and_their_classifiers_are_not(kind: str) -> None:
    head, wanted = HEADS[kind]
    model = small_vit(head=head)
    inside = {name for name in hidden_matrices(model) if name.startswith("head.")}
    layers = {name.split(".")[-2] for name in inside}
    assert wanted <= layers
    assert not {"fc", "fc_words"} & layers
    logits = {n for n, p in model.head.named_parameters() if p.ndim == 2 and len(p) in (5, 10)}
    assert logits
    assert not {f"head.{n}" for n in logits} & inside


def test_grouped_layers_of_gramian_heads_are_a_matrix_for_every_group() -> None:
    found = hidden_matrices(small_vit(head=Gramian(heads=2, gram_width=8, embed_groups=4, attention_heads=4)))
    assert found["head.token.weight"] == 2 * 4
    assert found["head.attention.query.weight"] == 2


def test_predictors_are_matrices_and_prototypes_are_not() -> None:
    model = small_vit(head=Projected(width=8, hidden=16))
    assert {"predictor.0.weight", "predictor.3.weight"} <= set(
        hidden_matrices(Byol(copy.deepcopy(model), ByolConfig(predictor_hidden=8), 10))
    )
    dino = Dino(model, DinoConfig(prototypes=6, local_views=0), 10)
    assert not any(name.startswith("last.") for name in hidden_matrices(dino))


def test_timm_declares_its_classifier_and_its_fused_layers() -> None:
    model = create_model(
        "timm:vit_tiny_patch16_224", classes=7, image_size=32, embed_dim=24, depth=1, num_heads=2, patch_size=8
    )
    found = {name.removeprefix("trunk.backbone."): parts for name, parts in hidden_matrices(model).items()}
    assert found == {
        "blocks.0.attn.qkv.weight": 3,
        "blocks.0.attn.proj.weight": 1,
        "blocks.0.mlp.fc1.weight": 1,
        "blocks.0.mlp.fc2.weight": 1,
    }


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_a_step_is_torchs_on_flattened_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(
        nn.Linear(6, 10, bias=False),
        nn.Conv2d(4, 8, 3, bias=False),
        nn.Conv2d(4, 12, 1, bias=False),
        nn.Conv2d(8, 6, 3, groups=2, bias=False),
    )
    parts = [1, 1, 3, 2]  # the third as if it gave q, k and v
    pieces = [
        [nn.Parameter(piece.detach().clone().flatten(1)) for piece in p.chunk(count)]
        for p, count in zip(ours.parameters(), parts, strict=True)
    ]
    flat = [piece for group in pieces for piece in group]
    theirs = torch.optim.Muon(flat, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": list(ours.parameters()), "matrices": True, "parts": parts}]
    mine = Muon(groups, lr=torch.tensor(0.02), weight_decay=0.1, momentum=0.9)
    monkeypatch.setattr(torch, "bfloat16", torch.float32)  # both in full precision, to compare more than three digits
    for _ in range(4):
        for p, count, group in zip(ours.parameters(), parts, pieces, strict=True):
            p.grad = torch.randn_like(p)
            for piece, gradient in zip(group, p.grad.chunk(count), strict=True):
                piece.grad = gradient.flatten(1).clone()
        mine.step()
        theirs.step()
        for p, group in zip(ours.parameters(), pieces, strict=True):
            torch.testing.assert_close(p.flatten(1), torch.cat([*group]), rtol=1e-5, atol=1e-6)


def test_a_run_that_began_with_fewer_matrices_goes_on_as_it_began() -> None:
    """Checkpoints of earlier versions hold AdamW's moments for heads and convolutions."""
    objective = Supervised(small_vit(head=AttentionPool()), SupervisedConfig())
    step = TrainStep(objective, MUON, make_schedule(MUON, 4, 40), device=CPU)
    names = [name for name, _ in objective.named_parameters()]
    old = {n for n, p in objective.named_parameters() if p.ndim == 2 and ".blocks." in n}
    saved = {f"{n}/{'momentum_buffer' if n in old else 'exp_avg'}": torch.zeros(1) for n in names}
    step.follow_checkpoint(saved)
    assert {n for g in step.optimizer.param_groups if g["matrices"] for n in g["names"]} == old
    assert step.updater.optimizer is step.optimizer
    parts = {n: p for g in step.optimizer.param_groups for n, p in zip(g["names"], g["parts"], strict=True)}
    assert parts["model.trunk.blocks.0.attn.qkv.weight"] == 3
    now = step.optimizer
    step.follow_checkpoint({f"{n}/momentum_buffer": torch.zeros(1) for n in old})
    assert step.optimizer is now  # nothing to change


def test_shares_of_the_optimisers_add_up_and_are_described() -> None:
    objective = Supervised(small_vit(), SupervisedConfig())
    total = sum(p.numel() for p in objective.parameters() if p.requires_grad)
    shares = optimizer_shares("muon", build_optimizer(objective, MUON).param_groups)
    assert list(shares) == ["muon", "adamw"]
    assert sum(shares.values()) == total
    assert describe_shares(shares).startswith("optimizer: muon ")
    assert optimizer_shares("adamw", build_optimizer(objective, OptimConfig()).param_groups) == {"adamw": total}
