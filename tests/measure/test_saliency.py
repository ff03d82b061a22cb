"""Maps of evidence against hand computations, and how good they are against cases whose answer is known."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2.functional import gaussian_blur

from vitrail.inspect.evidence import area, blurred, centred, curve, inside, map_quality, pointing
from vitrail.measure.saliency import KINDS, all_kinds, explain, head_branches, kinds_of, rollout
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import Ats
from vitrail.model.heads.config import AttentionPool, SecondOrder

SMALL = {"image_size": 32, "patch": 8, "width": 32, "depth": 3, "heads": 2}


def vit(seed: int = 0, **changes: object) -> Classifier:
    torch.manual_seed(seed)
    model = create_model("deit_tiny", classes=5, **{**SMALL, **changes}).eval()
    with torch.no_grad():  # as drawn, attention is all but uniform and logits are all but equal
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model


def pictures(count: int = 3, side: int = 32) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


# Maps


def test_rollout_of_uniform_attention_is_uniform_and_of_identity_is_nothing() -> None:
    uniform = torch.full((2, 5, 5), 0.2)
    torch.testing.assert_close(rollout([uniform])[0, 1:], torch.full((4,), 0.1))
    assert rollout([torch.eye(5).expand(2, 5, 5)] * 3)[0, 1:].abs().max() == 0


def test_rollout_equals_the_product_of_its_layers_and_rows_sum_to_one() -> None:
    generator = torch.Generator().manual_seed(0)
    maps = [torch.rand(2, 3, 6, 6, generator=generator).softmax(-1) for _ in range(4)]
    for image in range(2):
        expected = torch.eye(6)
        for layer in maps:
            expected = (0.5 * layer[image].mean(0) + 0.5 * torch.eye(6)) @ expected
        torch.testing.assert_close(rollout(maps)[image], expected)
    torch.testing.assert_close(rollout(maps).sum(-1), torch.ones(2, 6))


def test_a_class_token_that_enters_late_sees_what_patches_had_gathered() -> None:
    generator = torch.Generator().manual_seed(0)
    early = torch.rand(2, 4, 4, generator=generator).softmax(-1)
    late = torch.rand(2, 5, 5, generator=generator).softmax(-1)
    before = torch.eye(5)
    before[1:, 1:] = 0.5 * (early.mean(0) + torch.eye(4))
    torch.testing.assert_close(rollout([early, late]), 0.5 * (late.mean(0) + torch.eye(5)) @ before)


def test_attention_is_the_class_row_of_the_last_map() -> None:
    model, images = vit(), pictures()
    with torch.no_grad():
        last = model.outputs(images, {"attention.2"}).captured["attention.2"]
    torch.testing.assert_close(explain(model, images, "attention").flatten(1), last.mean(1)[:, 0, 1:])


def test_grad_cam_of_a_class_token_is_a_hand_computation_before_the_last_block() -> None:
    model, images = vit(), pictures()
    found = explain(model, images, "grad_cam", torch.tensor([4, 4, 4]))
    trunk = model.trunk
    with torch.no_grad():
        middle = trunk.encode(trunk.embed(images), until=2)[0]  # type: ignore[operator, union-attr]
    x = middle.sequence.clone().requires_grad_()
    last = trunk.blocks[2](middle.but(x), None)  # type: ignore[index, operator, union-attr]
    logits = model.head(last.but(trunk.norm(last.sequence)))[:, 0]  # type: ignore[operator, union-attr]
    slope = torch.autograd.grad(logits[:, 4].sum(), x)[0]
    expected = (x * slope[:, 1:].mean(1, keepdim=True))[:, 1:].sum(-1).clamp(min=0).detach()
    torch.testing.assert_close(found.flatten(1), expected, rtol=1e-4, atol=1e-6)


def test_grad_cam_of_mean_pooling_reads_the_last_block() -> None:
    """There the slope of a class logit is the same for every patch but for the norm; a hand computation again."""
    model, images = vit(head="mean"), pictures()
    trunk = model.trunk
    with torch.no_grad():
        tokens = trunk.encode(trunk.embed(images), want={"tokens.2"})[1]["tokens.2"]  # type: ignore[operator, union-attr]
    x = tokens.clone().requires_grad_()
    pooled = trunk.norm(x)[:, trunk.prefix :].mean(1)  # type: ignore[operator, union-attr, misc]
    weight, bias = model.head.fc.weight, model.head.fc.bias  # type: ignore[union-attr]
    slope = torch.autograd.grad(F.linear(pooled, weight, bias)[:, 1].sum(), x)[0]  # type: ignore[arg-type]
    start = trunk.prefix
    expected = (x[:, start:] * slope[:, start:].mean(1, keepdim=True)).sum(-1).clamp(min=0).detach()  # type: ignore[misc]
    found = explain(model, images, "grad_cam", torch.tensor([1, 1, 1]))
    torch.testing.assert_close(found.flatten(1), expected, rtol=1e-4, atol=1e-6)


def test_gradient_attention_of_one_layer_is_map_times_slope() -> None:
    model, images = vit(depth=1), pictures()
    with torch.no_grad():
        weights = model.outputs(images, {"attention.0"}).captured["attention.0"]
    given = weights.clone().requires_grad_()
    logits = model.outputs(images, given={"attention.0": given}).stack[:, 0]
    slope = torch.autograd.grad(logits[:, 2].sum(), given)[0]
    expected = (weights * slope).clamp(min=0).mean(1)[:, 0, 1:]
    found = explain(model, images, "gradient_attention", torch.tensor([2, 2, 2]))
    torch.testing.assert_close(found.flatten(1), expected)


def test_maps_that_were_copied_from_a_teacher_have_no_slope() -> None:
    """A student of attention copy is given its maps: what is left is what its own layers say, here nothing."""
    model, images = vit(), pictures()
    with torch.no_grad():
        given = model.outputs(images, {f"attention.{i}" for i in range(3)}).captured
    outputs = model.outputs
    model.outputs = lambda images, want=(): outputs(images, want, given)  # type: ignore[method-assign, assignment]
    assert explain(model, images, "gradient_attention").abs().max() == 0


def test_a_map_for_each_class_is_that_of_the_class_asked_for() -> None:
    model = vit(head=AttentionPool(queries="per_class"))
    images = pictures()
    with torch.no_grad():
        maps = model.outputs(images).maps
    assert maps is not None
    found = explain(model, images, "head", torch.tensor([0, 3, 4]))
    torch.testing.assert_close(found.flatten(1), torch.stack([maps[0, 0], maps[1, 3], maps[2, 4]]))


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "timm:resnet18", "cifar_resnet20"])
def test_any_trunk_is_explained_by_its_name_alone(name: str) -> None:
    model = create_model(name, classes=5, **({"image_size": 32} if "vit" in name else {})).eval()
    images = pictures(2)
    kinds = all_kinds(model)
    assert ("rollout" in kinds) == ("vit" in name)
    assert "grad_cam" in kinds
    for kind in kinds:
        found = explain(model, images, kind)
        assert found.shape[0] == 2
        assert found.isfinite().all()
    if "vit" not in name:
        assert "no attention maps" in kinds_of(model)["rollout"]


def test_maps_of_a_timm_vit_are_those_of_ours_with_the_same_weights() -> None:
    theirs = create_model("timm:deit_tiny_patch16_224", image_size=32, classes=5).eval()
    ours = create_model("deit_tiny", image_size=32, classes=5).eval()
    ours.trunk.load_state_dict({k: v for k, v in theirs.trunk.backbone.state_dict().items() if "head" not in k})  # type: ignore[union-attr]
    images = pictures(2)
    for kind in ("attention", "rollout"):
        torch.testing.assert_close(explain(theirs, images, kind), explain(ours, images, kind), rtol=1e-4, atol=1e-6)


def test_nothing_of_the_model_changes_and_no_gradient_is_left() -> None:
    model, images = vit().train(), pictures()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for kind in all_kinds(model):
        explain(model, images, kind)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_what_a_model_has_not_is_refused_with_its_reason() -> None:
    with pytest.raises(ValueError, match="no map 'gradcam'; there are attention"):
        explain(vit(), pictures(), "gradcam")
    with pytest.raises(ValueError, match="its head has no map of its own"):
        explain(vit(), pictures(), "head")
    adaptive = create_model("deit_tiny", classes=5, adaptive=Ats(), **SMALL)
    assert all(why for why in kinds_of(adaptive).values())
    assert set(kinds_of(adaptive)) == set(KINDS)


# How good they are


def test_pointing_and_inside_are_those_of_pixels_counted_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    maps = torch.rand(20, 4, 4, generator=generator)
    corner = torch.rand(20, 2, generator=generator) * 0.5
    boxes = torch.cat([corner, corner + 0.4], 1)
    boxes = (boxes * 40).round() / 40  # so that a picture of 40 pixels has them exactly
    large = maps.repeat_interleave(10, 1).repeat_interleave(10, 2)
    middle = (torch.arange(40) + 0.5) / 40
    for i in range(20):
        left, top, right, bottom = boxes[i]
        there = ((middle > top) & (middle < bottom))[:, None] & ((middle > left) & (middle < right))
        assert float(inside(maps, boxes)[i]) == pytest.approx(float(large[i][there].sum() / large[i].sum()), abs=1e-5)
        row, column = divmod(int(maps[i].argmax()), 4)
        x, y = (column + 0.5) / 4, (row + 0.5) / 4
        assert bool(pointing(maps, boxes)[i]) == bool(left <= x <= right and top <= y <= bottom)


class Counter(Classifier):
    """Says class 0 with a logit that is the mean of the first channel, whatever else there is."""

    def __init__(self) -> None:
        model = vit()
        super().__init__(model.trunk, model.head, spec=model.spec, classes=model.classes, preprocess=model.preprocess)

    def forward(self, images: Tensor) -> Tensor:
        logits = torch.zeros(len(images), 5)
        logits[:, 0] = 8 * images[:, 0].mean((1, 2))
        return logits


def test_the_true_map_deletes_faster_and_inserts_sooner_than_its_opposite() -> None:
    model = Counter().eval()
    images = torch.zeros(1, 3, 32, 32)
    images[:, 0, :8, :8] = 16.0  # all evidence is in the first of sixteen patches
    true = torch.zeros(1, 4, 4)
    true[0, 0, 0] = 1
    zero = torch.tensor([0])
    whole, none = (float(model.probabilities(model(x))[0, 0]) for x in (images, torch.zeros_like(images)))
    values = curve(model, images, true, zero, insert=False)
    torch.testing.assert_close(values[0], torch.tensor([whole] + [none] * 16))
    last = curve(model, images, -true, zero, insert=False)
    torch.testing.assert_close(last[0], torch.tensor([whole] * 16 + [none]))
    assert area(curve(model, images, true, zero, insert=True)) >= area(curve(model, images, -true, zero, insert=True))


def test_the_area_of_a_straight_line_is_its_middle() -> None:
    torch.testing.assert_close(area(torch.linspace(1, 0, 9)[None]), torch.tensor([0.5]))


def test_blurring_is_torchvisions() -> None:
    images = pictures()
    torch.testing.assert_close(blurred(images), gaussian_blur(images, [25, 25], [4.0, 4.0]), rtol=1e-4, atol=1e-6)


def test_the_centre_is_brightest_in_the_middle_and_symmetric() -> None:
    made = centred(5, 5)
    assert int(made.argmax()) == 12
    torch.testing.assert_close(made, made.flip(0))


def test_judging_streams_and_names_every_kind_and_two_controls() -> None:
    model = vit()
    boxes = torch.tensor([[0.0, 0.0, 0.5, 0.5]] * 2)
    whole = map_quality(model, iter([(pictures(4)[:2], boxes), (pictures(4)[2:], boxes)]), steps=4)
    assert [row["kind"] for row in whole] == [
        "attention",
        "rollout",
        "gradient_attention",
        "grad_cam",
        "random",
        "centre",
    ]
    assert all(row["images"] == 4 for row in whole)
    together = map_quality(model, iter([(pictures(4), boxes.repeat(2, 1))]), steps=4)
    for apart, one in zip(whole, together, strict=True):
        if apart["kind"] != "random":
            assert apart["deletion"] == pytest.approx(one["deletion"], abs=1e-5)
            assert apart["inside"] == pytest.approx(one["inside"], abs=1e-5)
    with pytest.raises(ValueError, match="nothing to judge"):
        map_quality(model, iter([]))


# Parts of a head


@pytest.mark.parametrize("fusion", ["sum", "late"])
def test_each_branch_has_the_map_and_the_answer_of_a_model_with_that_part_alone(fusion: str) -> None:
    head = SecondOrder(heads=2, rows=4, columns=4, fusion=fusion)
    both, images = vit(head=head), pictures()
    chosen = both(images).argmax(1)
    found = {branch.name: branch for branch in head_branches(both, images, chosen)}
    assert list(found) == ["class token", "patch tokens", "both"]
    torch.testing.assert_close(found["both"].maps, explain(both, images, "grad_cam", chosen))
    for name, alone in (("class token", "class_only"), ("patch tokens", "words_only")):
        with warnings.catch_warnings(action="ignore"):  # settings that a part does not use
            part = vit(head=replace(head, fusion=alone))
        part.load_state_dict(both.state_dict(), strict=False)
        torch.testing.assert_close(found[name].maps, explain(part, images, "grad_cam", chosen))
        torch.testing.assert_close(found[name].probabilities, part(images).softmax(1).detach())
    assert not both.head.fc._forward_hooks
    assert head_branches(vit(), images, chosen) == []
