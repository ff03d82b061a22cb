"""AdaViT against a twin that computes one image and one head at a time, on kept tokens alone (arXiv 2111.15668)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.model.adaptive.adavit import KEPT_AT_START
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import Adavit
from vitrail.model.parts.modules import reset
from vitrail.model.parts.tokens import Tokens, Trace
from vitrail.model.timm_weights import load_weights
from vitrail.model.weights import load_model

DEPTH, TOKENS, HEADS = 4, 17, 4
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
FORMS = ("padded", "packed")


def small(adaptive: Adavit | None = None, cut: bool = True, **changes: object) -> Classifier:
    """17 tokens of width 32; with `cut`, decisions that differ between images, tokens, heads and branches."""
    options = {"classes": 5, "image_size": 32, "patch": 8, "width": 32, "depth": DEPTH, "heads": HEADS, **changes}
    model = create_model("deit_tiny", **{"adaptive": adaptive or Adavit(), **options}).eval()
    nn.init.normal_(model.trunk.pos_embed)
    for name, p in model.trunk.blocks.named_parameters():
        if "weight" in name and p.ndim == 2:
            nn.init.normal_(p, std=0.3 if "qkv" in name else 0.1)
    if cut and model.policy is not None:
        decide(model, 0.3, 1.0)
    return model


def decide(model: Classifier, bias: float, spread: float = 0.0, parts: str = "patches heads branches") -> Classifier:
    for decision in model.policy.decisions.values():
        for part in parts.split():
            nn.init.normal_(getattr(decision, part).weight, std=spread)
            nn.init.constant_(getattr(decision, part).bias, bias)
    return model


def formed(model: Classifier, form: str) -> Classifier:
    model.policy.config = replace(model.policy.config, form=form)
    return model


class Twin:
    """One image: a block is computed for kept tokens alone, each head by itself, each branch only where it is on."""

    def __init__(self, model: Classifier, image: Tensor) -> None:
        trunk, config = model.trunk, model.policy.config
        embedded = trunk.embed(image[None])
        x = embedded.sequence[0].clone()
        self.kept, self.heads, self.branches = [], [], []
        for i, block in enumerate(trunk.blocks):
            kept, heads, branches = list(range(len(x))), list(range(HEADS)), [True, True]
            if i >= config.whole:
                layers = model.policy.decisions[str(i)]
                sure = layers.patches(x[1:])[:, 0].sigmoid().tolist()
                kept = [0] + [k + 1 for k, p in enumerate(sure) if p > config.patch_threshold]
                heads = [h for h, p in enumerate(layers.heads(x[0]).sigmoid().tolist()) if p > config.threshold]
                branches = [p > config.threshold for p in layers.branches(x[0]).sigmoid().tolist()]
            if branches[0]:
                q, k, v = block.attn.qkv(block.norm1(x[kept])).view(len(kept), 3, HEADS, -1).unbind(1)
                mixed = torch.zeros(len(kept), HEADS, q.shape[-1])
                for h in heads:
                    scores = q[:, h] @ k[:, h].T / math.sqrt(q.shape[-1])
                    mixed[:, h] = scores.softmax(-1) @ v[:, h]
                x[kept] += block.attn.proj(mixed.flatten(1))
            if branches[1]:
                x[kept] += block.mlp(block.norm2(x[kept]))
            self.kept.append(kept)
            self.heads.append(len(heads))
            self.branches.append([float(on) for on in branches])
        self.logits = model.head(Tokens(trunk.norm(x)[None], 1, embedded.grid))[0]


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_every_form_equals_a_loop_over_images_and_heads(form: str) -> None:
    model = formed(small(), form)
    out, twins = model.outputs(IMAGES), [Twin(model, image) for image in IMAGES]
    for i, use in enumerate(out.trace.blocks):
        assert use.entering.tolist() == use.leaving.tolist() == [len(t.kept[i]) for t in twins]
        assert use.heads.tolist() == [t.heads[i] for t in twins]
        assert torch.stack([use.mixing, use.channels], 1).tolist() == [t.branches[i] for t in twins]
    cut = torch.stack([use.mixing + use.channels for use in out.trace.blocks])
    assert 0 < cut.sum() < 2 * cut.numel()  # some branches are off, some are on
    # Two orders of summation in float32, values of order 1.
    torch.testing.assert_close(out.stack, torch.stack([t.logits for t in twins]), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_rows_of_dropped_tokens_and_branches_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = formed(small(), "packed")
    rows, kind = [], type(model.trunk.blocks[0].mlp)
    plain = kind.forward

    def counted(self: nn.Module, x: Tensor) -> Tensor:
        rows.append(x.shape[:-1].numel())
        return plain(self, x)

    monkeypatch.setattr(kind, "forward", counted)
    used = [float((use.leaving * use.channels).sum()) for use in model.outputs(IMAGES).trace.blocks]
    assert rows == [n for n in used if n]
    assert sum(rows) < DEPTH * len(IMAGES) * TOKENS


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_with_everything_kept_it_is_the_plain_model(form: str) -> None:
    model = formed(decide(small(), 100.0), form)
    plain = create_model("deit_tiny", classes=5, image_size=32, patch=8, width=32, depth=DEPTH, heads=HEADS).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if ".policy." not in k})
    # The same numbers through attention with a mask and without: other kernels, float32 rounding.
    torch.testing.assert_close(model(IMAGES), plain(IMAGES), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_with_everything_off_tokens_stay_as_the_whole_blocks_left_them(form: str) -> None:
    model = formed(decide(small(), -100.0), form)
    out = model.outputs(IMAGES)
    first = model.trunk.blocks[0](model.trunk.embed(IMAGES))
    torch.testing.assert_close(out.tokens.sequence, model.trunk.norm(first.sequence))
    assert [use.entering[0].item() for use in out.trace.blocks] == [TOKENS, 1, 1, 1]  # the class token is never dropped
    assert [use.mixing[0].item() for use in out.trace.blocks] == [1, 0, 0, 0]


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_everything_may_be_dropped_but_the_class_token(form: str) -> None:
    model = formed(decide(decide(small(), 100.0), -100.0, parts="patches"), form)
    wanted = torch.stack([Twin(model, image).logits for image in IMAGES])
    torch.testing.assert_close(model.outputs(IMAGES).stack, wanted, atol=1e-5, rtol=1e-5)


def test_dropped_tokens_are_seen_by_nobody_but_their_own_gate() -> None:
    model, pixels = small(), IMAGES.clone()
    model.policy.differentiable = True
    attention = model.outputs(pixels, want={"attention.2"}).captured["attention.2"]
    kept = model.outputs(pixels, want={"kept.2"}).captured["kept.2"].bool()
    seen = torch.cat([kept.new_ones(3, 1), kept], 1)[:, None, None] | torch.eye(TOKENS, dtype=torch.bool)
    assert torch.equal(attention > 0, seen.expand_as(attention))


@torch.no_grad()
def test_usage_without_targets_is_3_exactly_where_everything_is_kept() -> None:
    config = Adavit(patches=0.0, heads=0.0, branches=0.0, usage=1.0)
    model = decide(small(config), 100.0)
    out = model.outputs(IMAGES)
    assert float(model.policy.losses(out.trace)["usage"]) == 3.0
    for part in ("patches", "heads", "branches"):
        out = decide(decide(model, 100.0), -100.0, parts=part).outputs(IMAGES)
        assert float(model.policy.losses(out.trace)["usage"]) < 3.0


@torch.no_grad()
def test_shares_are_means_over_the_whole_transformer() -> None:
    model = small()
    found = model.outputs(IMAGES).trace.losses
    for b, image in enumerate(IMAGES):
        twin = Twin(model, image)
        assert float(found["patches"][b]) == pytest.approx(sum(len(k) - 1 for k in twin.kept) / (DEPTH * (TOKENS - 1)))
        assert float(found["heads"][b]) == pytest.approx(sum(twin.heads) / (DEPTH * HEADS))
        assert float(found["branches"][b]) == pytest.approx(sum(sum(on) for on in twin.branches) / (DEPTH * 2))


def test_usage_compares_the_mean_of_a_batch_or_every_image_with_the_targets() -> None:
    policy = small(Adavit(patches=0.5, heads=0.25, branches=1.0, usage=2.0)).policy
    shares = torch.tensor([[0.2, 0.8], [0.25, 0.75], [1.0, 0.5]])
    trace = Trace((), dict(zip(("patches", "heads", "branches"), shares, strict=True)))
    assert float(policy.losses(trace)["usage"]) == pytest.approx(2 * (0 + 0.25**2 + 0.25**2))
    policy.config = replace(policy.config, usage_of="image")
    assert float(policy.losses(trace)["usage"]) == pytest.approx(2 * (0.3**2 + 0.5**2 / 2 + 0.5**2 / 2))


@pytest.mark.parametrize("temperature", [0.5, 5.0])
def test_in_training_a_gate_is_open_with_the_probability_of_its_logit(temperature: float) -> None:
    policy = small(Adavit(temperature=temperature)).policy.train()
    count = 40_000
    for logit in (-2.0, 0.0, 1.0):
        open_, wanted = float(policy._gate(torch.full((count,), logit), 0.6).mean()), 1 / (1 + math.exp(-logit))
        assert abs(open_ - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / count)  # four standard deviations


def test_at_test_time_a_gate_is_a_threshold_without_noise() -> None:
    policy = small().policy.eval()
    logits = torch.tensor([0.2, 0.4, 0.41]).requires_grad_()  # sigmoid(0.4055) is 0.6
    assert policy._gate(logits, 0.5).tolist() == [1, 1, 1]
    assert policy._gate(logits, 0.6).tolist() == [0, 0, 1]
    assert not policy._gate(logits, 0.6).requires_grad


def test_differentiable_gates_decide_the_same_and_pass_the_sigmoids_gradient() -> None:
    policy = small(Adavit(temperature=5.0)).policy.eval()
    policy.differentiable = True
    logits = torch.linspace(-3, 3, 7).requires_grad_()
    gate = policy._gate(logits, 0.6)
    assert gate.tolist() == [0, 0, 0, 0, 1, 1, 1]
    soft = (logits.detach() / 5).sigmoid()
    torch.testing.assert_close(torch.autograd.grad(gate.sum(), logits)[0], soft * (1 - soft) / 5)


def test_an_attack_gets_gradients_in_evaluation_only_where_it_asks() -> None:
    model, pixels = small(), IMAGES.clone().requires_grad_()
    shares = model.outputs(pixels).trace.losses
    assert not any(share.requires_grad for share in shares.values())
    with torch.no_grad():
        plain = model.outputs(pixels)
    model.policy.differentiable = True
    out = model.outputs(pixels)
    torch.testing.assert_close(out.stack, plain.stack, atol=1e-5, rtol=1e-5)
    for name in ("patches", "heads", "branches"):
        assert torch.equal(out.trace.losses[name].detach(), plain.trace.losses[name])
        grad = torch.autograd.grad(out.trace.losses[name].sum(), pixels, retain_graph=True)[0]
        assert grad.flatten(1).abs().amax(1).min() > 0  # every image


def test_training_steps_stay_finite_and_reach_every_decision() -> None:
    model = small(cut=False).train()
    objective = Supervised(model, SupervisedConfig())
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    label = torch.tensor([0, 1, 2])
    batch = Batch((IMAGES,), label, label, torch.arange(3))
    for _ in range(2):
        losses = objective(batch)
        optimiser.zero_grad()
        losses["loss"].backward()
        assert losses["usage"].isfinite()
        for name, p in model.named_parameters():
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
            assert "policy" not in name or p.grad.abs().max() > 0, name
        optimiser.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_task_alone_teaches_the_gates() -> None:
    model = small(Adavit(usage=0.0), cut=False).train()
    model(IMAGES).square().sum().backward()
    # In the last block the class token alone is read, so its patches teach nothing.
    taught = {name: p.grad.abs().max() > 0 for name, p in model.policy.named_parameters()}
    assert all(ok for name, ok in taught.items() if not name.startswith(f"decisions.{DEPTH - 1}.patches"))


def test_training_begins_with_nearly_everything_kept() -> None:
    model = create_model("deit_tiny", classes=5, image_size=32, patch=8, adaptive=Adavit(), depth=3)
    shares = model.train().outputs(torch.randn(8, 3, 32, 32)).trace.losses
    assert all(float(share.detach().mean()) > 0.85 for share in shares.values())
    assert all(float(share.min()) == 1 for share in model.eval().outputs(IMAGES).trace.losses.values())


@torch.no_grad()
def test_kept_shows_the_patches_of_each_block() -> None:
    model = small()
    kept = model.outputs(IMAGES, want={f"kept.{i}" for i in range(DEPTH)}).captured
    for b, image in enumerate(IMAGES):
        twin = Twin(model, image)
        for i in range(DEPTH):
            assert kept[f"kept.{i}"][b].nonzero().flatten().tolist() == [k - 1 for k in twin.kept[i] if k]


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_tokens_that_are_not_there_count_nowhere(form: str) -> None:
    model = formed(small(), form)
    tokens = model.trunk.embed(IMAGES)
    shorter = Tokens(tokens.sequence[:, :12], tokens.prefix, tokens.grid)
    mask = torch.arange(TOKENS).expand(3, -1) < 12
    masked, wanted = model.trunk.encode(replace(tokens, mask=mask))[0], model.trunk.encode(shorter)[0]
    torch.testing.assert_close(masked.sequence[:, :12], wanted.sequence, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(masked.trace.losses["patches"], wanted.trace.losses["patches"])


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_batch_of_one_is_a_row_of_the_batch(form: str) -> None:
    model = formed(small(), form)
    torch.testing.assert_close(model(IMAGES[1:2]), model(IMAGES)[1:2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_an_image_that_is_no_number_spoils_no_other(form: str) -> None:
    model, broken = formed(small(), form), IMAGES.clone()
    broken[1, 0, 5, 5] = float("nan")
    logits = model(broken)
    assert logits[1].isnan().all()
    torch.testing.assert_close(logits[[0, 2]], model(IMAGES)[[0, 2]], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_saved_and_loaded_it_decides_as_before(tmp_path: Path) -> None:
    model = small(Adavit(whole=2, patch_threshold=0.55))
    loaded = load_model(model.save(tmp_path / "model")).eval()
    assert loaded.policy.config == model.policy.config
    assert torch.equal(loaded(IMAGES), model(IMAGES))


@torch.no_grad()
def test_built_on_meta_and_reset_decisions_start_as_any_other() -> None:
    model = create_model("deit_tiny", device="meta", depth=2, width=32, heads=2, image_size=32, adaptive=Adavit())
    names = {name for name, _ in model.named_parameters() if "policy" in name}
    parts = ("patches", "heads", "branches")
    assert names == {f"trunk.policy.decisions.1.{part}.{what}" for part in parts for what in ("weight", "bias")}
    model.to_empty(device="cpu")
    reset(model)
    assert model.policy.decisions["1"].heads.bias.tolist() == [KEPT_AT_START] * 2
    assert model.eval()(IMAGES).isfinite().all()


def test_the_padded_form_is_one_graph() -> None:
    model = small()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(IMAGES), model(IMAGES), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mixer": {"kind": "sima"}}, "the mixer must be softmax"),
        ({"mixer": {"kind": "talking_heads"}}, "the mixer must be softmax"),
        ({"parallel": 2}, "parallel must be 1"),
        ({"mlp_ratio": 0.0}, "mlp_ratio must not be 0"),
        ({"local": True}, "local patch interaction"),
        ({"norm": "batchnorm"}, "BatchNorm"),
        ({"head": "mean"}, "use a head with one"),
        ({"adaptive": Adavit(whole=4)}, "nothing to decide"),
    ],
)
def test_blocks_that_gates_do_not_fit_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        create_model("deit_tiny", **{"depth": 4, "width": 32, "heads": 2, "adaptive": Adavit(), **changes})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@torch.no_grad()
def test_packed_on_cuda_equals_the_padded_form() -> None:
    model = formed(small(), "padded").cuda()
    images = torch.randn(64, 3, 32, 32, device="cuda")
    padded, packed = model.outputs(images), formed(model, "auto").outputs(images)
    torch.testing.assert_close(packed.stack, padded.stack, atol=1e-4, rtol=1e-4)
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = model.outputs(images), formed(model, "padded").outputs(images)
    # Rounding flips some decisions in both forms, so they are as far from float32, not equal.
    ours_off, theirs_off = ((out.stack.float() - padded.stack).abs().mean() for out in (ours, theirs))
    assert ours_off <= 1.5 * theirs_off + 1e-4


def test_it_starts_from_the_weights_of_a_plain_model() -> None:
    shape = {"depth": 2, "width": 32, "heads": 2, "image_size": 16, "patch": 4}
    plain = create_model("deit_tiny", classes=3, **shape)
    gated = create_model("deit_tiny", classes=3, adaptive="adavit", **shape)
    notes = load_weights(gated, plain.state_dict())
    assert sorted(notes) == sorted(f"{name} starts anew" for name in gated.state_dict() if "policy" in name)
    assert torch.equal(gated.trunk.blocks[1].attn.qkv.weight, plain.trunk.blocks[1].attn.qkv.weight)
    assert gated.layer_of("trunk.policy.decisions.1.patches.weight") == plain.layers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_as_a_cuda_graph_it_computes_everything_and_gives_the_same() -> None:
    model, images = small().cuda(), IMAGES.cuda()
    captured = model.optimize("float32", compile=False, graph=True)
    torch.testing.assert_close(captured(images), model.optimize("float32")(images), atol=1e-4, rtol=1e-4)
    other = images.flip(0)
    torch.testing.assert_close(captured(other), captured(images).flip(0), atol=1e-4, rtol=1e-4)
