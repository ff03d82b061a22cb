"""Activation checkpointing computes the same numbers with less memory, or is rejected in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_ranks
from torch import Tensor

from benchmarks.equality import difference, train_cell
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier

SMALL = {"classes": 5, "depth": 3, "width": 32, "heads": 2, "drop_path": 0.5, "image_size": 32, "patch": 8}
MODELS = {
    "ViT with drop path": ("vit_tiny_32", {**SMALL, "position_drop": 0.2}),
    "parallel blocks": ("vit_tiny_32", {**SMALL, "parallel": 2}),
    "CaiT": ("cait_xxs24", SMALL),
    "timm": (
        "timm:vit_tiny_patch16_224",
        {"depth": 2, "drop_path_rate": 0.5, "image_size": 32, "embed_dim": 24, "classes": 5},
    ),
}


def built(name: str, checkpointed: bool) -> Classifier:
    torch.manual_seed(0)
    kind, options = MODELS[name]
    model = create_model(kind, **options)
    if checkpointed:
        model.trunk.checkpoint_blocks()
    return model


def gradients(model: Classifier, compiled: bool = False) -> tuple[dict[str, Tensor], int]:
    """Gradients of a step by name, and the bytes that autograd keeps for them outside of blocks computed again."""
    torch.manual_seed(1)
    images, target = torch.randn(6, 3, 32, 32), torch.arange(6) % len(model.classes)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    forward = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = torch.nn.functional.cross_entropy(forward(images), target)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sum(kept.values())


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_without_it_drop_path_included(name: str) -> None:
    expected, kept = gradients(built(name, False))
    found, kept_now = gradients(built(name, True))
    assert kept_now < 0.7 * kept
    assert expected.keys() == found.keys()
    assert max(float((expected[key] - found[key]).abs().max()) for key in expected) < 1e-6


@pytest.mark.slow
def test_a_compiled_model_has_the_same_gradients() -> None:
    plain = "ViT with drop path"
    models = [built(plain, checkpointed) for checkpointed in (False, True)]
    for model in models:
        for module in model.modules():
            if hasattr(module, "rate"):
                module.rate = 0.0
        model.trunk.pos_drop.p = 0.0
    expected, found = gradients(models[0])[0], gradients(models[1], compiled=True)[0]
    assert max(float((expected[key] - found[key]).abs().max()) for key in expected) < 1e-6


def test_batch_norms_in_blocks_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"engine\.activation_checkpointing: batch norms"):
        create_model("xcit_t12_p8", **{**SMALL, "drop_path": 0.0}).trunk.checkpoint_blocks()


def test_an_adaptive_policy_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"engine\.activation_checkpointing: an adaptive policy"):
        create_model("vit_tiny_32", **SMALL, adaptive="ats").trunk.checkpoint_blocks()


def test_a_trunk_without_blocks_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"engine\.activation_checkpointing: this trunk"):
        create_model("cifar_resnet20").trunk.checkpoint_blocks()


def test_steps_that_compute_again_are_no_cuda_graph() -> None:
    from vitrail.engine.step import decides_on_the_host

    objective = Supervised(built("CaiT", False), SupervisedConfig())
    assert not decides_on_the_host(objective)
    objective.model.trunk.checkpoint_blocks()
    assert "activation checkpointing" in decides_on_the_host(objective)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "shard"), [(1, "none"), (2, "none"), (2, "full")])
def test_runs_equal_those_without_it(world: int, shard: str, tmp_path: Path) -> None:
    settings = {"optim.steps": 6, "data.workers": 0, "model.drop_path": 0.0 if world > 1 else 0.3}
    one = train_cell(run_ranks, tmp_path / "one", [(1, None)], **settings)
    again = {**settings, "engine.activation_checkpointing": "blocks", "engine.shard": shard}
    assert difference(train_cell(run_ranks, tmp_path / "again", [(world, None)], **again), one) < 1e-5
