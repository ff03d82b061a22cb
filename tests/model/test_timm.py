"""timm: equal logits with the same weights, both ways, at any size."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from small import quick_of

from vitrail.model.build import create_model
from vitrail.model.cost import cost
from vitrail.model.heads.config import Mean
from vitrail.model.timm_weights import from_timm_names, load_weights, to_timm
from vitrail.model.zoo import ZOO

FAMILIES = [
    *("vit_tiny", "vit_small", "deit_tiny", "deit_small", "deit_tiny_distilled", "deit3_small"),
    *("cait_xxs24", "resmlp_s12", "resmlp_s24"),
]
QUICK = ("vit_tiny", "deit_tiny_distilled", "deit3_small", "cait_xxs24", "resmlp_s12")  # one size of each family


def random_timm(name: str, **options: object) -> torch.nn.Module:
    """A timm model whose every weight is random: starts such as LayerScale 1e-6 would hide differences."""
    model = timm.create_model(name, **options).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.05, generator=generator)
    return model


@pytest.mark.parametrize("name", quick_of(FAMILIES, QUICK))
def test_logits_equal_timm(name: str) -> None:
    theirs = random_timm(ZOO[name].timm)
    ours = create_model(name).eval()
    assert load_weights(ours, theirs.state_dict()) == []
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert (ours(images) - theirs(images)).abs().max() < 1e-4
        ours, theirs, images = ours.double(), theirs.double(), images.double()
        assert (ours(images) - theirs(images)).abs().max() < 1e-9


def test_the_stack_of_a_distilled_model_is_timms_pair() -> None:
    theirs = random_timm("deit_tiny_distilled_patch16_224")
    ours = create_model("deit_tiny_distilled").eval()
    load_weights(ours, theirs.state_dict())
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        features = theirs.forward_features(images)
        pair = torch.stack([theirs.head(features[:, 0]), theirs.head_dist(features[:, 1])], 1)
        torch.testing.assert_close(ours.stack(images), pair)


@pytest.mark.parametrize("name", [n for n, spec in ZOO.items() if spec.timm])
def test_every_published_model_is_ours_tensor_by_tensor(name: str) -> None:
    """Names and shapes of all weights that timm publishes, at full size, without memory."""
    with torch.device("meta"):
        theirs = timm.create_model(ZOO[name].timm, num_classes=1000)
    size = theirs.pretrained_cfg["input_size"][-1]
    ours = create_model(name, device="meta", image_size=size)
    renamed = {k: v.squeeze().shape for k, v in from_timm_names(theirs.state_dict()).items()}
    assert renamed == {k: v.squeeze().shape for k, v in ours.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "size"),
    quick_of(
        [(name, size) for name in ("deit_tiny", "deit3_small") for size in (160, 256)],
        [("deit_tiny", 256), ("deit3_small", 160)],
    ),
)
def test_logits_equal_timm_at_another_size(name: str, size: int) -> None:
    theirs = random_timm(ZOO[name].timm, dynamic_img_size=True).double()
    ours = create_model(name).eval()
    load_weights(ours, theirs.state_dict())
    ours.double()
    images = torch.randn(1, 3, size, size, dtype=torch.float64)
    with torch.no_grad():
        assert (ours(images) - theirs(images)).abs().max() < 1e-6


def test_weights_move_to_another_grid_as_timm_moves_them() -> None:
    theirs = random_timm("deit_tiny_patch16_224")
    moved = timm.create_model("deit_tiny_patch16_224", img_size=160).eval()
    state = timm.models.vision_transformer.checkpoint_filter_fn(theirs.state_dict(), moved)
    moved.load_state_dict(state)
    ours = create_model("deit_tiny", image_size=160).eval()
    assert load_weights(ours, theirs.state_dict()) == ["positions resized 14x14 -> 10x10"]
    images = torch.randn(1, 3, 160, 160)
    with torch.no_grad():
        assert (ours(images) - moved(images)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "head"), [("deit_tiny", None), ("deit3_tiny", None), ("vit_tiny", Mean(norm_after=True))]
)
def test_to_timm_and_back(name: str, head: Mean | None) -> None:
    ours = create_model(name, classes=7, depth=2, width=64, heads=2, image_size=64, head=head).eval()
    theirs = to_timm(ours)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(theirs(images), ours(images))
    back = create_model(name, classes=7, depth=2, width=64, heads=2, image_size=64, head=head).eval()
    load_weights(back, theirs.state_dict())
    with torch.no_grad():
        assert torch.equal(back(images), ours(images))


def test_a_classifier_of_another_size_starts_anew_and_says_so() -> None:
    theirs = random_timm("deit_tiny_patch16_224")
    ours = create_model("deit_tiny", classes=5)
    fresh = ours.head.fc.weight.detach().clone()
    notes = load_weights(ours, theirs.state_dict())
    assert len(notes) == 2
    assert all("starts anew" in note for note in notes)
    assert torch.equal(ours.head.fc.weight, fresh)
    assert torch.equal(ours.trunk.norm.weight, theirs.norm.weight)


def test_weights_of_another_architecture_are_refused_with_a_list() -> None:
    with pytest.raises(ValueError, match=r"do not fit the model: .*expected"):
        load_weights(create_model("deit_tiny"), random_timm("deit_small_patch16_224").state_dict())


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny_patch4_window7_224", "convnext_atto", "vit_tiny_patch16_224"])
def test_any_timm_model_keeps_its_own_classifier(name: str) -> None:
    theirs = random_timm(name, num_classes=5)
    ours = create_model(f"timm:{name}", classes=5).eval()
    ours.trunk.backbone.load_state_dict(theirs.state_dict())
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))
        features = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
        torch.testing.assert_close(ours.outputs(images).embedding, features)
    assert ours.head_parameters() == {
        f"trunk.backbone.{n}" for n, _ in theirs.named_parameters() if n.startswith(("head.fc", "fc.", "head."))
    } - {f"trunk.backbone.{n}" for n, _ in theirs.named_parameters() if n.startswith("head.norm")}


@pytest.mark.parametrize(
    ("name", "parameters", "giga", "printed"),
    [
        ("mobilenetv2_100", 3_504_872, 0.301, 0.33),
        ("resnet18", 11_689_512, 1.814, 1.82),
        ("resnet50", 25_557_032, 4.089, 4.14),
    ],
)
def test_networks_of_timm_are_counted_as_stated(name: str, parameters: int, giga: float, printed: float) -> None:
    """Students of CompRess (arXiv 2010.14713); its table prints up to a tenth more, for no stated reason."""
    found = cost(create_model(f"timm:{name}", device="meta", classes=1000), 224)
    assert found.parameters == parameters
    assert round(found.macs / 1e9, 3) == giga == pytest.approx(printed, rel=0.1)


@pytest.mark.parametrize("name", ["resmlp_12_224", "levit_128s", "pvt_v2_b0", "twins_svt_small", "efficientformer_l1"])
def test_features_reach_their_own_classifier_in_the_form_that_it_takes(name: str) -> None:
    """Families whose features are no maps though they have no `patch_embed`, or maps though they have one."""
    ours = create_model(f"timm:{name}", classes=5).eval()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), ours.trunk.backbone(images))


def test_a_model_of_several_feature_maps_is_refused_in_one_sentence() -> None:
    model = create_model("timm:coat_tiny", classes=5).eval()
    with pytest.raises(ValueError, match="several feature maps side by side and cannot be a trunk"):
        model(torch.zeros(1, 3, 224, 224))


def test_a_timm_model_takes_a_head_of_ours() -> None:
    model = create_model("timm:resnet18", classes=5, head="mean").eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model.head.fc(model.trunk.backbone.forward_features(images).mean((2, 3)))
        torch.testing.assert_close(model(images), expected)


def test_a_head_that_needs_a_token_is_refused_on_a_convolutional_trunk() -> None:
    with pytest.raises(ValueError, match="needs 1; heads that pool patches work: mean"):
        create_model("timm:resnet18", classes=5, head="class_token")


def test_unknown_timm_names_have_near_matches() -> None:
    with pytest.raises(ValueError, match="did you mean 'resnet18"):
        create_model("timm:resnet18x")


def test_a_timm_trunk_says_that_it_has_no_intermediates() -> None:
    model = create_model("timm:resnet18", classes=5)
    with pytest.raises(ValueError, match="gives no such intermediates"):
        model.outputs(torch.randn(1, 3, 64, 64), want={"attention.0"})


@pytest.mark.usefixtures("hub_answers")
def test_missing_published_weights_are_one_sentence_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("cannot reach the hub")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ValueError, match=r"could not be fetched .*cannot reach the hub.*--model.weights none"):
        create_model("deit_tiny", weights="timm")
    with pytest.raises(ValueError, match=r"no published weights for vit_micro_28; models that have them: .*deit_tiny"):
        create_model("vit_micro_28", weights="timm")


@pytest.mark.usefixtures("hub_answers")
def test_published_weights_bring_their_own_preprocessing(monkeypatch: pytest.MonkeyPatch) -> None:
    published = random_timm("deit3_small_patch16_224")
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: published)
    ours = create_model("deit3_small", weights="timm", image_size=192)
    assert ours.preprocess.crop_ratio == published.pretrained_cfg["crop_pct"]
    assert ours.preprocess.mean == published.pretrained_cfg["mean"]
    assert ours.preprocess.size == 192
    assert torch.equal(ours.head.fc.weight, published.head.weight)


@pytest.mark.parametrize("name", ["mobilenetv4_conv_small_050", "efficientnet_lite0", "resnet10t"])
def test_a_new_classifier_of_few_classes_starts_near_the_loss_of_a_guess(name):
    torch.manual_seed(0)
    model = create_model(f"timm:{name}", classes=10).train()
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=10)
    images, labels = torch.randn(16, 3, 64, 64), torch.arange(16) % 10
    with torch.no_grad():
        assert abs(float(torch.nn.functional.cross_entropy(model(images), labels)) - math.log(10)) < 0.4
    ours = dict(model.trunk.backbone.named_parameters())
    changed = [key for key, value in theirs.named_parameters() if not torch.equal(value, ours[key])]
    assert changed == ([] if name == "resnet10t" else ["classifier.weight"])  # its bias was zero
