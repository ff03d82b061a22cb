"""Every row of the zoo, reduced: build, train a step, save, load, other sizes, capture, compile, export, one image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import MODELS, covering_models, different_models, quick_of, reduced_model

import vitrail
from vitrail.data.config import PreprocessConfig
from vitrail.model.assemble import Parts, from_spec
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import TimmBackbone, TrunkConfig
from vitrail.model.heads.config import Gramian
from vitrail.model.mixers.config import LinearPatches, PatchMlp
from vitrail.model.zoo import ZOO
from vitrail.schema import plain

# Rows that are the same once reduced are in the slow set.
ROWS = quick_of(MODELS, different_models())


def images_of(size: int, count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("name", ROWS)
def test_every_model_trains_is_saved_and_loaded(name: str, tmp_path) -> None:
    options, size = reduced_model(name)
    model = create_model(name, **options)
    images = images_of(size, 3)
    model.train()
    stack = model.stack(images)
    loss = stack.square().mean() + sum(model.head.losses(stack, torch.tensor([0, 1, 2])).values())
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    model.save(tmp_path / "model")
    again = vitrail.load(tmp_path / "model")
    assert again.classes == ("a", "b", "<c>")
    with torch.no_grad():
        assert torch.equal(again(images), model(images))
        torch.testing.assert_close(model(images[:1]), model(images)[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", quick_of(different_models(), covering_models()))
def test_every_model_compiles_whole_and_is_exported(name: str) -> None:
    options, size = reduced_model(name)
    model = create_model(name, **options).eval()
    images = images_of(size).float() / 255
    with torch.no_grad():
        expected = model(images)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(images), expected)
        exported = torch.export.export(model, (images,))
        torch.testing.assert_close(exported.module()(images), expected)


@pytest.mark.parametrize("name", ROWS)
def test_every_model_takes_another_size_or_says_why_not(name: str) -> None:
    options, size = reduced_model(name)
    model = create_model(name, **options).eval()
    larger = torch.randn(1, 3, size * 5 // 4 // 4 * 4, size * 5 // 4 // 4 * 4)
    trunk = ZOO[name].trunk
    if isinstance(trunk, TrunkConfig):
        larger = torch.randn(1, 3, size + trunk.patch, size + 2 * trunk.patch)
    fixed = isinstance(trunk, TrunkConfig) and isinstance(trunk.mixer, (LinearPatches, PatchMlp))
    if fixed:
        with pytest.raises(ValueError, match="mixes exactly 4x4 patches"):
            model(larger)
    else:
        with torch.no_grad():
            assert model(larger).shape == (1, 3)


@pytest.mark.parametrize("name", [row for row in ROWS if isinstance(ZOO[row.values[0]].trunk, TrunkConfig)])
def test_every_intermediate_can_be_captured_and_put_back(name: str) -> None:
    options, size = reduced_model(name)
    model = create_model(name, **options).eval()
    images = torch.randn(1, 3, size, size)
    names = model.trunk.intermediates
    assert "tokens.1" in names
    with torch.no_grad():
        found = model.outputs(images, want=names)
        assert set(found.captured) == set(names)
        given = model.outputs(images, given=found.captured)
        torch.testing.assert_close(given.stack, model.stack(images))
        torch.testing.assert_close(found.stack, model.stack(images))


def test_gathered_stages_of_a_timm_backbone() -> None:
    head = Gramian(heads=2, gram_width=16, attention_width=16, attention_heads=2, gram_layer=True)

    def small(**trunk: Any) -> Classifier:
        parts = Parts(TimmBackbone(stages=True, width=64, grid=4, **trunk), head)
        preprocess = PreprocessConfig(size=64)
        return from_spec(plain(parts), classes="abc", multilabel=False, preprocess=preprocess, device=None).eval()

    model = small(name="convnext_atto", taps=2)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        tokens = model.tokens(images)
        assert tokens.sequence.shape == (2, 16, 64)
        maps = model.trunk._stages(images)
        final = model.trunk.backbone.forward_intermediates(images, intermediates_only=True)
        assert len(maps) == 6
        for mine, theirs in zip((maps[0], maps[1], maps[4], maps[5]), final, strict=True):
            torch.testing.assert_close(mine, theirs)
        assert model(images).shape == (2, 3)
    resnet = small(name="resnet18")
    with torch.no_grad():
        assert resnet(images).shape == (2, 3)
