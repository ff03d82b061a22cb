"""Adaptive token sampling in a trunk: what is kept, that nothing else changes, and its dial (arXiv 2111.15667)."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small import quick_of
from torch import Tensor

from vitrail.kernels.sampling import class_scores, inverse_sample, nearest_sample, top_sample
from vitrail.model.adaptive.ats import AtsPolicy, _unevenness
from vitrail.model.adaptive.budget import calibrate, matched_caps, mean_gmacs, set_budget, trace_macs
from vitrail.model.build import create_model, make_adaptive
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.export import to_onnx, to_torch
from vitrail.model.parts.tokens import Tokens, Trace
from vitrail.model.trunks.vit import Trunk
from vitrail.model.weights import load_model

DEPTH, PATCHES = 4, 64


def vit(adaptive: dict[str, Any] | None = None, **changes: Any) -> Classifier:
    """A small ViT far from its start, with peaked attention; the same weights whatever the policy."""
    torch.manual_seed(0)
    shape = {"depth": DEPTH, "width": 48, "heads": 3, "image_size": 32, "patch": 4, **changes}
    model = create_model("deit_tiny", classes=10, adaptive=adaptive, **shape).eval()
    for name, p in model.named_parameters():
        seed = sum(name.encode())
        p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 0.15)
    return model


def ats(**options: Any) -> Classifier:
    return vit({"kind": "ats", **options})


def pictures(count: int = 5) -> Tensor:
    contrast = torch.linspace(0.2, 3, count)[:, None, None, None]
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * contrast


@pytest.fixture(scope="module")
def images() -> Tensor:
    return pictures()


def leaving(model: Classifier, images: Tensor) -> Tensor:
    with torch.no_grad():
        trace = model.outputs(images).trace
    assert trace is not None
    return torch.stack([block.leaving for block in trace.blocks])  # [blocks, batch]


def test_it_adds_no_weights_and_takes_those_of_the_plain_model() -> None:
    plain, sampled = vit(), ats()
    assert sum(p.numel() for p in sampled.parameters()) == sum(p.numel() for p in plain.parameters())
    sampled.load_state_dict(plain.state_dict())


def test_a_trained_model_is_made_adaptive_and_plain_again(images: Tensor) -> None:
    plain = vit()
    made = make_adaptive(plain, {"kind": "ats", "cap": (20,)})
    with torch.no_grad():
        torch.testing.assert_close(made(images), ats(cap=(20,))(images))
        assert torch.equal(make_adaptive(made, None)(images), plain(images))
    gated = make_adaptive(plain, "adavit")
    assert any(name.startswith("trunk.policy.") for name in gated.state_dict())
    assert torch.equal(make_adaptive(gated, None)(images), plain(images))
    with pytest.raises(ValueError, match="has none"):
        make_adaptive(create_model("cifar_resnet20"), "ats")


def test_it_samples_from_a_quarter_of_the_depth_on() -> None:
    policy = create_model("deit_small", device="meta", adaptive="ats").policy
    assert isinstance(policy, AtsPolicy)
    assert policy.at == tuple(range(3, 12))


@pytest.mark.parametrize("share", ["1", "0.87", "0.865", "0.72"])
def test_a_share_asks_for_its_floor_and_never_for_fewer_than_eight(share: str) -> None:
    """max(floor(rho * patches), 8) in exact fractions; no more can be kept than there are."""
    policy = ats(cap=(float(share),)).policy
    assert isinstance(policy, AtsPolicy)
    patches = list(range(1, 400))
    wanted = [max(math.floor(Fraction(share) * n), 8) for n in patches]
    assert policy.points(1, torch.tensor(patches, dtype=torch.float32)).tolist() == wanted
    assert [policy.room(1, n) for n in patches] == [min(n, k) for n, k in zip(patches, wanted, strict=True)]


def test_images_keep_different_numbers_that_never_grow_nor_pass_the_cap(images: Tensor) -> None:
    counts = leaving(ats(cap=(40,)), images)
    assert (counts[0] == 1 + PATCHES).all()
    assert (counts[1] <= 1 + 40).all()
    assert (counts.diff(dim=0) <= 0).all()
    assert len(set(counts[-1].tolist())) > 1
    assert (counts >= 2).all()


def test_keeping_all_tokens_is_the_plain_model(images: Tensor) -> None:
    with torch.no_grad():
        expected, found = vit()(images), ats(sampling="top", cap=(PATCHES,))(images)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_tokens_that_stay_leave_the_block_as_without_sampling(images: Tensor) -> None:
    with torch.no_grad():
        plain = vit().outputs(images, want={"tokens.1"}).captured["tokens.1"]
        out = ats(layers=(1,)).outputs(images, want={"tokens.1", "kept.1"})
    kept, found = out.captured["kept.1"].bool(), out.captured["tokens.1"]
    for i in range(len(images)):
        rows = torch.cat([torch.tensor([True]), kept[i]])
        torch.testing.assert_close(found[i, : int(rows.sum())], plain[i, rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"cap": (0.7,)}, {"cap": (30,), "layers": (1, 3)}, {"cap": (1,), "least": 1}, {"value_norm": False}],
)
def test_packed_is_padded_is_one_image_at_a_time(images: Tensor, options: dict[str, Any]) -> None:
    padded, packed = ats(form="padded", **options), ats(form="packed", **options)
    with torch.no_grad():
        expected = torch.cat([padded(image[None]) for image in images])
        torch.testing.assert_close(padded(images), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed(images), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(leaving(padded, images), leaving(packed, images))


def test_the_gradient_through_a_packed_batch_is_that_of_a_padded_one(images: Tensor) -> None:
    grads = {}
    for form in ("padded", "packed"):
        model = ats(form=form).double()
        model(images.double()).square().sum().backward()
        grads[form] = {name: p.grad for name, p in model.named_parameters()}
    for name, expected in grads["padded"].items():
        assert expected is not None
        torch.testing.assert_close(grads["packed"][name], expected, rtol=1e-8, atol=1e-10, msg=name)
    assert grads["packed"]["trunk.blocks.3.attn.qkv.weight"].abs().max() > 0


def test_images_of_different_sizes_share_a_batch() -> None:
    """Tokens of a small grid, padded to those of a large one, come out as alone."""
    torch.manual_seed(3)
    trunk = ats(form="padded").trunk
    packed = ats(form="packed").trunk
    assert isinstance(trunk, Trunk)
    assert isinstance(packed, Trunk)
    large, small = torch.randn(1, 1 + 64, 48), torch.randn(1, 1 + 20, 48)
    both = torch.cat([large, torch.cat([small, torch.full((1, 44, 48), 7.0)], 1)])
    mask = torch.ones(2, 65, dtype=torch.bool)
    mask[1, 21:] = False
    with torch.no_grad():
        alone = [trunk.encode(Tokens(x, 1, (8, 8)))[0].token(0) for x in (large, small)]
        for each in (trunk, packed):
            found = each.encode(Tokens(both, 1, (8, 8), mask))[0]
            torch.testing.assert_close(found.token(0), torch.cat(alone), rtol=1e-5, atol=1e-5)


UNUSUAL = [
    {"sampling": "nearest"},
    {"sampling": "top", "cap": (0.5,)},
    {"sampling": "random"},
    {"order": "sorted"},
    {"score": "column"},
    {"score": "random"},
    {"keep_class": False},
    {"sampling": "uniform", "cap": (40,), "keep_class": False},
]


@pytest.mark.parametrize(
    "options", [*UNUSUAL, {"value_norm": False}, {"cap": (40, 0.8, 9)}, {"sampling": "uniform", "cap": (0.5,)}]
)
def test_every_variant_of_the_ablations_runs_and_drops_tokens(images: Tensor, options: dict[str, Any]) -> None:
    assert (leaving(ats(**options), images)[-1] < 1 + PATCHES).all()


@pytest.mark.parametrize(
    ("options", "sample"),
    [
        ({}, inverse_sample),
        ({"value_norm": False}, inverse_sample),
        ({"score": "column"}, inverse_sample),
        ({"order": "sorted"}, partial(inverse_sample, order="sorted")),
        ({"sampling": "nearest"}, nearest_sample),
        ({"sampling": "top"}, top_sample),
    ],
)
def test_each_variant_keeps_what_its_sampler_draws_from_its_scores(
    images: Tensor, options: dict[str, Any], sample: Callable[..., Tensor]
) -> None:
    kept, parts = {}, [f"{part}.1" for part in "qkv"]
    with torch.no_grad():
        for name, more in (("plain", {}), ("chosen", options)):
            out = ats(layers=(1,), cap=(30,), **more).outputs(images, want={*parts, "kept.1"})
            kept[name] = out.captured["kept.1"].bool()
        q, k, v = (out.captured[part] for part in parts)
    source, value_norm = options.get("score", "class"), options.get("value_norm", True)
    scores = class_scores(q, k, v, prefix=1, source=source, value_norm=value_norm)
    assert torch.equal(kept["chosen"], sample(scores, 30))
    assert torch.equal(kept["chosen"], kept["plain"]) == (not options)


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_uniform_sampling_keeps_the_cap_in_every_image_and_no_scores_decide(images: Tensor, form: str) -> None:
    model = ats(layers=(1,), cap=(24,), sampling="uniform", form=form)
    with torch.no_grad():
        torch.manual_seed(7)
        kept = [model.outputs(images.repeat(60, 1, 1, 1), want={"kept.1"}).captured["kept.1"] for _ in range(4)]
    rates = torch.cat(kept).double()  # [1200, patches]
    assert (rates.sum(1) == 24).all()
    share = 24 / PATCHES
    # Five deviations of a share of 1,200 draws.
    torch.testing.assert_close(
        rates.mean(0), torch.full((PATCHES,), share).double(), atol=5 * (share * (1 - share) / 1200) ** 0.5, rtol=0
    )


@pytest.mark.parametrize("options", [{"cap": (30, 20, 9)}, {"cap": (0.5,)}, {"cap": (200,)}])
def test_uniform_sampling_is_the_same_in_both_layouts_under_one_seed(images: Tensor, options: dict[str, Any]) -> None:
    found = []
    for form in ("padded", "packed", "packed"):
        model = ats(sampling="uniform", form=form, **options)
        torch.manual_seed(5)
        with torch.no_grad():
            found.append((model(images), leaving(model, images)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1][0], found[2][0])
    assert torch.equal(found[0][1], found[1][1])
    expected = {(30, 20, 9): [64, 30, 20, 9], (0.5,): [64, 32, 16, 8], (200,): [64] * 4}[options["cap"]]
    assert (found[0][1] == 1 + torch.tensor(expected)[:, None]).all()


def test_a_uniform_control_keeps_as_many_tokens_as_the_sampler(images: Tensor) -> None:
    model = ats(cap=(100,))
    counts = leaving(model, images)[1:].double().mean(1) - 1  # of the three sampling blocks, without the class token
    caps = matched_caps(model, [images[:2], images[2:]])
    assert caps == tuple(float(round(n)) for n in counts.tolist())
    control = ats(cap=caps, sampling="uniform")
    assert torch.equal(leaving(control, images)[1:], (1 + torch.tensor(caps))[:, None].expand(3, len(images)))


def test_uniform_sampling_refuses_settings_of_scores() -> None:
    for options in ({"score": "column"}, {"order": "sorted"}, {"value_norm": False}):
        with pytest.raises(ValueError, match="looks at no scores"):
            ats(sampling="uniform", **options)


def test_random_points_are_drawn_anew_in_every_pass(images: Tensor) -> None:
    model = ats(layers=(1,), sampling="random")
    with torch.no_grad():
        first, second = (model.outputs(images, want={"kept.1"}).captured["kept.1"] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("options", UNUSUAL)
def test_packed_sampling_refuses_what_it_cannot_do(images: Tensor, options: dict[str, Any]) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match="use form padded"):
        ats(form="packed", **options)(images)


def test_a_class_token_that_is_not_drawn_stays_as_it_was() -> None:
    model = ats(keep_class=False, layers=(1,), cap=(1,))
    images = pictures(16)
    with torch.no_grad():
        out = model.outputs(images, want={"tokens.0", "tokens.1"})
        plain = ats(layers=(1,), cap=(1,)).outputs(images, want={"tokens.1"}).captured["tokens.1"][:, 0]
    before, after = out.captured["tokens.0"][:, 0], out.captured["tokens.1"][:, 0]
    same = (before == after).all(1)
    assert same.any()
    assert torch.equal(after[~same], plain[~same]) or (~same).sum() == 0


def test_more_even_attention_keeps_more_tokens() -> None:
    images = pictures()
    model = ats()
    flat = copy.deepcopy(model)
    for block in flat.trunk.blocks:  # type: ignore[union-attr]
        block.attn.qkv.weight.data[:96].mul_(0.05)  # type: ignore[union-attr]
        block.attn.qkv.bias.data[:96].mul_(0.05)  # type: ignore[union-attr]
    assert (leaving(flat, images)[1] > leaving(model, images)[1]).all()


def test_unevenness_is_zero_for_even_attention_alone() -> None:
    even = torch.full((2, 3, 9), 1 / 9)
    assert _unevenness(even, 1, None).abs().max() < 1e-12
    row = torch.rand(2, 3, 9).softmax(-1)
    by_hand = [sum((float(row[b, h, j]) - 1 / 9) ** 2 for h in range(3) for j in range(1, 9)) for b in range(2)]
    assert _unevenness(row, 1, None).tolist() == pytest.approx(by_hand, rel=1e-5)
    mask = torch.tensor([[True] * 6 + [False] * 3]).expand(2, -1)
    short = torch.cat([torch.full((2, 3, 6), 1 / 6), torch.zeros(2, 3, 3)], -1)
    assert _unevenness(short, 1, mask).abs().max() < 1e-12


def test_unevenness_of_every_sampling_block_has_a_gradient_for_pixels(images: Tensor) -> None:
    pixels = images.clone().requires_grad_()
    trace = ats().requires_grad_(False).outputs(pixels).trace
    assert trace is not None
    assert sorted(trace.losses) == ["uniform.1", "uniform.2", "uniform.3"]
    (gradient,) = torch.autograd.grad(trace.losses["uniform.3"].sum(), pixels)
    assert (gradient.abs().amax((1, 2, 3)) > 0).all()


def test_an_image_of_nans_is_named(images: Tensor) -> None:
    bad = images.clone()
    bad[2, 0, 0, 0] = float("nan")
    with torch.no_grad(), pytest.raises(ValueError, match=r"images \[2\] of a batch of 5 hold NaN"):
        ats()(bad)


def test_packed_nans_stay_with_their_image(images: Tensor) -> None:
    bad = images.clone()
    bad[2] = float("nan")
    model = ats(form="packed")
    with torch.no_grad():
        found, expected = model(bad), model(images)
    others = [0, 1, 3, 4]
    assert found[2].isnan().all()
    torch.testing.assert_close(found[others], expected[others], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": (9,)}, "blocks are 0 to 3"),
        ({"layers": (2, 2)}, "each at most once"),
        ({"cap": (3, 4)}, "2 values for 3 layers"),
        ({"cap": (2.5,)}, "must be whole"),
        ({"capacity": (4.0,)}, "1 values for 3 layers"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ats(**options)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mixer": "sima"}, "softmax"),
        ({"mixer": "talking_heads"}, "softmax"),
        ({"head": "mean"}, "class token"),
        ({"parallel": 2}, "parallel must be 1"),
        ({"class_token_at": 2}, "class_token_at 0"),
    ],
)
def test_trunks_that_cannot_sample_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        vit({"kind": "ats"}, **changes)


def test_the_dial_by_tokens_and_by_share(images: Tensor) -> None:
    model = ats()
    model.set_budget(tokens=10)
    assert (leaving(model, images)[-1] <= 11).all()
    assert model.set_budget(ratio=0.5, images=[images]) == pytest.approx(mean_gmacs(model, [images]))
    assert (leaving(model, images)[1] <= 33).all()
    assert model.set_budget(ratio=0.5, images=images) == model.set_budget(ratio=0.5, images=[images])


def test_the_dial_does_not_take_one_unit_for_another() -> None:
    for wrong, says in (
        ({"tokens": 1}, "1 is too few sampling points"),
        ({"ratio": 2.0}, "2 is no share of the patches.*tokens= takes a number"),
        ({"ratio": 0.0}, "0 is no share"),
    ):
        with pytest.raises(ValueError, match=says):
            ats().set_budget(**wrong)


def test_figures_of_another_budget_are_forgotten() -> None:
    plain = vit()
    plain.stated = {"figures": {"top1": 0.9}, "template": "x"}
    sampled = make_adaptive(plain, "ats")
    assert sampled.stated == {"template": "x"}
    sampled.stated["figures"] = {"top1": 0.8}
    sampled.set_budget(ratio=0.5)
    assert "figures" not in sampled.stated
    assert plain.stated["figures"] == {"top1": 0.9}


def test_the_dial_finds_a_mean_cost_and_is_saved_with_the_model(images: Tensor, tmp_path: Path) -> None:
    model = ats()
    full, least = mean_gmacs(model, [images]), set_budget(ats(), ratio=1e-6, images=[images])
    assert least is not None
    wanted = (full + least) / 2
    found = model.set_budget(gmacs=wanted, images=[images])
    assert found == pytest.approx(wanted, rel=0.02)
    model.save(tmp_path / "m")
    again = load_model(tmp_path / "m")
    assert mean_gmacs(again, [images]) == pytest.approx(found)
    with pytest.raises(ValueError, match="out of reach; sampling points give"):
        model.set_budget(gmacs=1.01 * cost(vit()).macs / 1e9, images=[images])
    assert mean_gmacs(model, [images]) == pytest.approx(found)


def peaked(**options: Any) -> Classifier:
    """With sharper attention, in every block: as many points as patches keep few of them, as in a trained network."""
    model = ats(layers=tuple(range(DEPTH)), **options)
    for block in model.trunk.blocks:  # type: ignore[union-attr]
        block.attn.qkv.weight.data[:96].mul_(2.0)  # type: ignore[union-attr]
    return model


def by_hand(tokens: list[Tensor], width: int = 48, patch: int = 4, classes: int = 10) -> Tensor:
    """Multiply-accumulates of the ViT above, [images], from the tokens that enter its blocks and leave the last."""
    stem, head = PATCHES * 3 * patch**2 * width, width * classes
    total = torch.full_like(tokens[0], stem + head)
    for entering, left in pairwise(tokens):  # qkv, scores of all, values, projection, MLP of four times the width
        total = total + 3 * entering * width**2 + entering**2 * width + left * entering * width
        total = total + left * width**2 + 8 * left * width**2
    return total


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_more_points_than_patches_reach_65_percent_of_the_dense_cost_and_beyond(images: Tensor, form: str) -> None:
    model, dense = peaked(form=form), cost(vit()).macs
    whole = torch.full((1,), 1.0 + PATCHES).double()
    assert by_hand([whole] * (DEPTH + 1)).tolist() == [dense]
    shares = {}
    for points in (PATCHES, 2 * PATCHES, 16 * PATCHES, 4096 * PATCHES):
        found = model.set_budget(tokens=points, images=images)
        exact = by_hand([whole.expand(len(images)), *leaving(model, images).double()])
        assert found == pytest.approx(float(exact.mean()) / 1e9, rel=1e-12)
        shares[points] = float(exact.mean()) / dense
    assert list(shares.values()) == sorted(shares.values())
    assert shares[PATCHES] < 0.65 < shares[4096 * PATCHES] <= 1


def test_a_cost_beyond_a_share_of_one_is_found_by_a_number_of_points(images: Tensor) -> None:
    model, dense = peaked(), cost(vit()).macs / 1e9
    most = model.set_budget(ratio=1.0, images=images)
    assert most is not None
    for share in (0.65, 0.8):
        assert most < share * dense
        assert model.set_budget(gmacs=share * dense, images=images) == pytest.approx(share * dense, rel=0.01)
        assert mean_gmacs(model, [images]) == pytest.approx(share * dense, rel=0.01)
        assert next(iter(model.policy.cap.values())) > PATCHES  # type: ignore[union-attr]


def test_more_points_than_can_be_counted_are_refused_by_the_dial() -> None:
    with pytest.raises(ValueError, match="300000 sampling points for 64 tokens"):
        ats().set_budget(tokens=300_000)


@pytest.mark.parametrize(
    "options",
    [{"sampling": "top", "score": "class"}, {"sampling": "top", "score": "column"}, {"sampling": "uniform"}],
)
def test_its_cost_is_counted_with_as_many_tokens_as_can_be_kept(images: Tensor, options: dict[str, str]) -> None:
    """Counted: class row, all of them, or none, then as many queries as there is room for; the paper counts all rows
    once."""
    model = ats(cap=(20,), **options)
    assert cost(model).macs == trace_macs(model, _trace(model, images[:1]), scores="kept")


def _trace(model: Classifier, images: Tensor) -> Trace:
    with torch.no_grad():
        trace = model.outputs(images).trace
    assert trace is not None
    return trace


def test_a_static_model_has_no_dial() -> None:
    with pytest.raises(ValueError, match="adaptive='ats'"):
        vit().set_budget(tokens=3)


def test_fixed_room_changes_nothing_where_it_suffices_and_says_where_not() -> None:
    images = pictures(32)
    model = ats(form="packed")
    with torch.no_grad():
        expected = model(images)
        room = calibrate(model, [images], batch=32)
        assert len(room) == 3
        assert isinstance(model.policy, AtsPolicy)
        with model.policy.with_room(fixed=True):
            out = model.outputs(images)
        assert out.trace is not None
        assert out.trace.overflow is not None
        assert not out.trace.overflow
        torch.testing.assert_close(model.fused(out.stack), expected, rtol=1e-5, atol=1e-5)
        model.policy.capacity = tuple(r / 2 for r in room)
        with model.policy.with_room(fixed=True):
            trace = model.outputs(images).trace
        assert trace is not None
        assert bool(trace.overflow)
        # The model itself makes room as it is needed, whatever was calibrated.
        torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
        # An optimised model computes such a batch again with room enough.
        with pytest.warns(UserWarning, match="computed again"):
            torch.testing.assert_close(model.optimize("float32")(images), expected, rtol=1e-4, atol=1e-4)


def test_batches_computed_again_for_lack_of_room_are_told_once_and_counted() -> None:
    images = pictures(32)
    model = ats(form="packed")
    room = calibrate(model, [images], batch=32)
    assert isinstance(model.policy, AtsPolicy)
    enough = model.optimize("float32")
    model.policy.capacity = tuple(r / 2 for r in room)
    ready = model.optimize("float32")
    with pytest.warns(UserWarning, match=r"batch of 32 images \(number 1\)") as told:
        torch.stack([ready(images) for _ in range(3)])
    assert len(told) == 1
    assert (ready.batches, ready.recomputed) == (3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enough(images)
    assert (enough.batches, enough.recomputed) == (1, 0)


def test_drop_path_is_one_draw_an_image_in_a_packed_batch() -> None:
    torch.manual_seed(0)
    drop = vit(drop_path=0.5).trunk.blocks[3].drop_path.train()  # type: ignore[union-attr]
    offsets = torch.tensor([0, 3, 3, 10, 12])
    seen = set()
    for _ in range(30):
        keep = drop.rows(Tokens(torch.zeros(15, 4), 1, (4, 4), offsets=offsets, most=8))[:, 0]
        assert all(len(set(keep[a:b].tolist())) <= 1 for a, b in ((0, 3), (3, 10), (10, 12)))
        seen |= {(float(keep[0]), float(keep[3]))}
    assert {v for pair in seen for v in pair} == {0.0, 2.0}
    assert len(seen) == 4  # images draw apart


def test_training_through_sampling_moves_all_attention(images: Tensor) -> None:
    model = ats().train()
    model(images).logsumexp(1).sum().backward()
    for block in model.trunk.blocks:  # type: ignore[union-attr]
        for part in block.attn.qkv.weight.grad.chunk(3):  # type: ignore[union-attr]  # of q, of k and of v
            assert part.abs().max() > 0


@pytest.mark.parametrize("form", quick_of(("padded", "packed"), ("packed",)))
def test_it_compiles_whole_in_padded_and_in_packed_form(images: Tensor, form: str) -> None:
    model = ats(form=form)
    if form == "packed":
        calibrate(model, [images], batch=len(images))
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("write", "name"), quick_of([(to_torch, "m.pt2"), (to_onnx, "m.onnx")], [(to_torch, "m.pt2")]))
def test_it_is_exported_in_padded_form(tmp_path: Path, write: Any, name: str) -> None:
    if write is to_onnx:
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    model = vit({"kind": "ats", "cap": (0.6,)}, depth=2)
    differences = write(model, tmp_path / name).differences  # at batches of 1, 2 and 7
    assert max(differences.values()) < 1e-4


def test_more_points_than_can_be_counted_are_refused() -> None:
    """Where scores are whole numbers of 64 bits a sum of so many would overflow, and other tokens would be kept."""
    plain = create_model("vit_micro_28", classes=3, depth=2, width=16, heads=2)
    policy = make_adaptive(plain, {"kind": "ats", "layers": (0,), "cap": (1.0,)}).trunk.policy
    assert isinstance(policy, AtsPolicy)
    assert policy.room(0, 49) == 49
    with pytest.raises(ValueError, match="9216 sampling points for 9216 tokens"):
        policy.room(0, 9216)
