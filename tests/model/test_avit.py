"""A-ViT against a twin that walks token by token and really leaves halted tokens out (arXiv 2112.07658)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.model.adaptive.avit import AvitPolicy
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import Avit, TrunkConfig
from vitrail.model.parts.modules import reset
from vitrail.model.parts.tokens import Tokens, Trace
from vitrail.model.weights import load_model, start_from

DEPTH, TOKENS = 4, 17
MIXED = Avit(gate_scale=2.0, gate_center=1.0)  # tokens halt at every depth, some run to the end
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def small(adaptive: Avit | None = MIXED, **changes: object) -> Classifier:
    """17 tokens of width 32 that differ in their first channel."""
    options = {"classes": 5, "image_size": 32, "patch": 8, "width": 32, "depth": DEPTH, "heads": 2, **changes}
    model = create_model("deit_tiny", adaptive=adaptive, **options).eval()
    nn.init.normal_(model.trunk.pos_embed)
    for name, p in model.trunk.blocks.named_parameters():
        if "weight" in name and p.ndim == 2:
            nn.init.normal_(p, std=0.3 if "qkv" in name else 0.1)
    return model


def passive(model: Classifier) -> Classifier:
    """Blocks that leave every token as it is."""
    for block in model.trunk.blocks:
        for layer in (block.attn.proj, block.mlp.fc2):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    return model


class Twin:
    """One image, one token after the other, in the order of the published loop; halted tokens are not there."""

    def __init__(self, model: Classifier, image: Tensor) -> None:
        trunk, config = model.trunk, model.policy.config
        embedded = trunk.embed(image[None])
        self.living = list(range(embedded.sequence.shape[1]))
        many = len(self.living)
        x = {k: embedded.sequence[0, k] for k in self.living}
        c, rest, self.rho, self.out = [0.0] * many, [1.0] * many, [0.0] * many, [torch.zeros(())] * many
        self.counts, self.halting, self.left, self.weights = [], [], [], [0.0] * many
        for i, block in enumerate(trunk.blocks):
            self.counts.append(len(self.living))
            if self.living:
                y = block(Tokens(torch.stack([x[k] for k in self.living])[None], 0, embedded.grid)).sequence[0]
                x = dict(zip(self.living, y, strict=True))
            total = 0.0
            for k in list(self.living):
                last = i == len(trunk.blocks) - 1
                h = torch.ones(()) if last else torch.sigmoid(config.gate_scale * x[k][0] - config.gate_center)
                total, c[k] = total + h, c[k] + h
                self.rho[k] = self.rho[k] + 1
                if c[k] > 1 - config.eps or last:
                    self.out[k] = self.out[k] + x[k] * rest[k]
                    self.rho[k], self.weights[k] = self.rho[k] + rest[k], self.weights[k] + rest[k]
                    self.living.remove(k)
                else:
                    self.out[k] = self.out[k] + x[k] * h
                    rest[k], self.weights[k] = rest[k] - h, self.weights[k] + h
            self.halting.append(torch.as_tensor(total) / many)
            self.left.append(list(self.living))
        self.logits = model.head(Tokens(trunk.norm(torch.stack(self.out))[None], trunk.prefix, embedded.grid))[0]
        self.ponder = sum(self.rho) / many


def formed(model: Classifier, form: str) -> Classifier:
    model.policy.config = replace(model.policy.config, form=form)
    return model


@pytest.mark.parametrize("form", ["padded", "auto", "packed"])
@pytest.mark.parametrize("mixer", ["softmax", "talking_heads", "sima"])
@torch.no_grad()
def test_every_form_equals_tokens_physically_removed(form: str, mixer: str) -> None:
    model = formed(small(mixer={"kind": mixer}), form)
    out, twins = model.outputs(IMAGES), [Twin(model, image) for image in IMAGES]
    counts = torch.stack([use.entering for use in out.trace.blocks], 1)
    assert counts.tolist() == [twin.counts for twin in twins]
    assert 0 < counts[:, -1].min() < counts[:, 1:].max()  # some halt, some do not
    # Two orders of summation in float32, values of order 1.
    torch.testing.assert_close(out.stack, torch.stack([t.logits for t in twins]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.trace.losses["ponder"], torch.stack([t.ponder for t in twins]))
    halting = torch.stack([torch.stack(t.halting) for t in twins])
    torch.testing.assert_close(out.trace.losses["halting"], halting, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["auto", "packed"])
@torch.no_grad()
def test_halted_tokens_are_really_gone(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = formed(small(), form)
    rows, plain = [], type(model.trunk.blocks[0].mlp).forward

    def counted(self: nn.Module, x: Tensor) -> Tensor:
        rows.append(x.shape[:-1].numel())
        return plain(self, x)

    monkeypatch.setattr(type(model.trunk.blocks[0].mlp), "forward", counted)
    counts = torch.stack([use.entering for use in model.outputs(IMAGES).trace.blocks])  # [depth, batch]
    assert rows == counts.sum(1).tolist()
    assert rows[-1] < rows[0]


def test_gradients_are_those_of_the_twin() -> None:
    model, pixels = small(), IMAGES[:2].clone().requires_grad_()
    out = model.outputs(pixels)
    loss = out.stack.square().sum() + 3 * out.trace.losses["ponder"].sum() + out.trace.losses["halting"].square().sum()
    other = IMAGES[:2].clone().requires_grad_()
    twins = [Twin(model, image) for image in other]
    wanted = sum(t.logits.square().sum() + 3 * t.ponder + torch.stack(t.halting).square().sum() for t in twins)
    ours, theirs = torch.autograd.grad(loss, pixels)[0], torch.autograd.grad(wanted, other)[0]
    assert theirs.abs().max() > 0.01
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)  # sums of thousands of float32 terms


def test_the_ponder_loss_has_a_gradient_through_the_remainder_alone() -> None:
    model, pixels = small(), IMAGES.clone().requires_grad_()
    ponder = model.outputs(pixels).trace.losses["ponder"].sum()
    assert torch.autograd.grad(ponder, pixels)[0].abs().max() > 0


@pytest.mark.parametrize("form", ["padded", "auto", "packed"])
@torch.no_grad()
def test_without_any_halting_a_token_ponders_one_more_than_the_depth(form: str) -> None:
    model = small(Avit(gate_center=1e4, form=form))
    out = model.outputs(IMAGES)
    assert out.trace.losses["ponder"].tolist() == [DEPTH + 1.0] * 3
    assert all(use.entering.tolist() == [TOKENS] * 3 for use in out.trace.blocks)
    plain = small(None)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(out.stack, plain.outputs(IMAGES).stack)  # all of the weight is on the last block


@pytest.mark.parametrize("form", ["padded", "auto", "packed"])
@torch.no_grad()
def test_with_certain_halting_one_block_is_taken(form: str) -> None:
    model = small(Avit(gate_center=-1e4, form=form))
    out = model.outputs(IMAGES)
    assert out.trace.losses["ponder"].tolist() == [2.0] * 3  # one block and the whole remainder
    assert [use.entering.tolist() for use in out.trace.blocks] == [[TOKENS] * 3] + [[0.0] * 3] * (DEPTH - 1)
    first = model.trunk.blocks[0](model.trunk.embed(IMAGES))
    torch.testing.assert_close(out.tokens.sequence, model.trunk.norm(first.sequence))


@pytest.mark.parametrize("mixer", ["softmax", "talking_heads", "sima"])
def test_an_image_without_any_token_left_has_finite_values_and_gradients(mixer: str) -> None:
    model = small(Avit(gate_center=-1e4), mixer={"kind": mixer}).train()
    out = model.outputs(IMAGES, want={"attention.2"})
    out.stack.square().sum().backward()
    assert out.trace.blocks[2].entering.tolist() == [0.0] * 3
    assert out.stack.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("form", ["padded", "auto", "packed"])
@torch.no_grad()
def test_halting_weights_sum_to_one(form: str) -> None:
    model = passive(small(replace(MIXED, form=form)))
    tokens = model.trunk.embed(IMAGES)
    torch.testing.assert_close(model.tokens(IMAGES).sequence, model.trunk.norm(tokens.sequence))


@torch.no_grad()
def test_higher_scores_never_halt_a_token_later() -> None:
    model = passive(small())
    depths = []
    for center in (-2.0, -1.0, 0.0, 1.0, 2.0, 4.0):
        model.policy.config = replace(MIXED, gate_center=center)
        kept = model.outputs(IMAGES, want={f"kept.{i}" for i in range(DEPTH)}).captured
        depths.append(torch.stack([kept[f"kept.{i}"] for i in range(DEPTH - 1)]).sum(0))
    assert all((a <= b).all() for a, b in pairwise(depths))
    assert depths[0].sum() < depths[-1].sum()


@pytest.mark.parametrize("form", ["padded", "auto", "packed"])
@torch.no_grad()
def test_kept_shows_the_patches_alive_after_each_block(form: str) -> None:
    model = formed(small(), form)
    kept = model.outputs(IMAGES, want={f"kept.{i}" for i in range(DEPTH)}).captured
    for b, image in enumerate(IMAGES):
        twin = Twin(model, image)
        for i in range(DEPTH - 1):
            assert kept[f"kept.{i}"][b].nonzero().flatten().tolist() == [k - 1 for k in twin.left[i] if k]
    assert torch.equal(kept[f"kept.{DEPTH - 1}"], kept[f"kept.{DEPTH - 2}"])  # nobody is left out by the end itself


@pytest.mark.parametrize("form", ["padded", "auto", "packed"])
@pytest.mark.parametrize("first", [True, False])
@torch.no_grad()
def test_the_class_token_may_halt_first_or_be_the_last_one(form: str, first: bool) -> None:
    model = formed(small(), form)
    model.trunk.pos_embed[0, :, 0] = -20.0 if first else 20.0
    model.trunk.pos_embed[0, 0, 0] = 20.0 if first else -20.0
    out = model.outputs(IMAGES)
    assert out.trace.blocks[1].entering.tolist() == [TOKENS - 1.0 if first else 1.0] * 3
    wanted = torch.stack([Twin(model, image).logits for image in IMAGES])
    torch.testing.assert_close(out.stack, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["padded", "auto", "packed"])
@torch.no_grad()
def test_a_batch_of_one_is_a_row_of_the_batch(form: str) -> None:
    model = formed(small(), form)
    torch.testing.assert_close(model(IMAGES[1:2]), model(IMAGES)[1:2], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_tokens_that_are_not_there_count_nowhere() -> None:
    model = small()
    tokens = model.trunk.embed(IMAGES)
    shorter = Tokens(tokens.sequence[:, :12], tokens.prefix, tokens.grid)
    mask = torch.arange(TOKENS).expand(3, -1) < 12
    masked = model.trunk.encode(replace(tokens, mask=mask))[0]
    wanted = model.trunk.encode(shorter)[0]
    assert masked.mask is mask
    torch.testing.assert_close(masked.sequence[:, :12], wanted.sequence, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(masked.trace.losses["ponder"], wanted.trace.losses["ponder"])


@torch.no_grad()
def test_heads_that_pool_patches_get_all_of_them() -> None:
    model = small(head="mean")
    out = model.outputs(IMAGES)
    assert out.tokens.mask is None
    assert out.tokens.patches.shape[1] == TOKENS - 1
    wanted = torch.stack([Twin(model, image).logits for image in IMAGES])
    torch.testing.assert_close(out.stack, wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_pass_that_ends_early_takes_its_last_block_as_the_end() -> None:
    model = passive(small())
    tokens = model.trunk.embed(IMAGES)
    for until in (0, 2):
        torch.testing.assert_close(model.trunk.encode(tokens, until=until)[0].sequence, tokens.sequence)


@torch.no_grad()
def test_looking_at_intermediates_changes_nothing() -> None:
    model = small()
    out = model.outputs(IMAGES, want={"attention.3", "tokens.2"})
    torch.testing.assert_close(out.stack, model.outputs(IMAGES).stack, atol=1e-5, rtol=1e-5)
    dead = out.captured["attention.3"].sum((1, 2)) == 0  # columns that nobody looks at
    assert dead.sum(1).tolist() == [TOKENS - n for n in out.trace.blocks[3].entering.tolist()]


@pytest.mark.parametrize("form", ["padded", "auto", "packed"])
@torch.no_grad()
def test_an_image_that_is_no_number_spoils_no_other(form: str) -> None:
    model, broken = formed(small(), form), IMAGES.clone()
    broken[1, 0, 5, 5] = float("nan")
    logits = model(broken)
    assert logits[1].isnan().all()
    torch.testing.assert_close(logits[[0, 2]], model(IMAGES)[[0, 2]], atol=1e-5, rtol=1e-5)


def test_no_parameter_is_added() -> None:
    plain, adaptive = (create_model("deit_tiny", device="meta", adaptive=a) for a in (None, Avit()))
    assert sum(p.numel() for p in adaptive.parameters()) == 5_717_416
    assert list(adaptive.state_dict()) == list(plain.state_dict())


def test_scores_and_sums_are_float32_under_autocast() -> None:
    model = small()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        passage = model.policy.begin(tokens := model.trunk.embed(IMAGES))
        for i, block in enumerate(model.trunk.blocks):
            tokens = passage.run(block, i, tokens, None)
    assert tokens.sequence.dtype == torch.bfloat16
    assert {t.dtype for t in (passage.out, passage.spent, passage.ponder, *passage.halting)} == {torch.float32}
    assert passage.end(tokens).sequence.dtype == torch.bfloat16


def test_the_prior_is_a_distribution_with_98_of_100_in_the_first_8_of_12_blocks() -> None:
    blocks = list(create_model("deit_tiny", device="meta").trunk.blocks)
    prior = AvitPolicy(Avit(), TrunkConfig(), blocks, 1).halting_prior(torch.zeros(())).double()
    bell = [math.exp(-0.5 * (i - 8) ** 2) for i in range(12)]
    wanted = [0.98 * b / sum(bell[:8]) for b in bell[:8]] + [0.02 * b / sum(bell[8:]) for b in bell[8:]]
    assert prior.tolist() == pytest.approx(wanted, abs=1e-7)
    for depth in (1, 2, 3, 6, 24):
        many = AvitPolicy(Avit(prior_std=0.05), TrunkConfig(), (blocks * 2)[:depth], 1).halting_prior(torch.zeros(()))
        assert float(many.sum()) == pytest.approx(1)


def test_policy_losses_are_the_weighted_mean_and_divergence() -> None:
    policy = small(Avit(ponder=0.5, prior=0.25)).policy
    halting, ponder = torch.rand(6, DEPTH), torch.rand(6)
    found = policy.losses(Trace((), {"halting": halting, "ponder": ponder}))
    prior, total = policy.halting_prior(halting).tolist(), 0.0
    for row in halting.tolist():
        total += sum(t * math.log(t / min(max(p / sum(row), 0.01), 0.99)) for t, p in zip(prior, row, strict=True))
    assert float(found["ponder"]) == pytest.approx(0.5 * float(ponder.mean()))
    assert float(found["prior"]) == pytest.approx(0.25 * total / 6, rel=1e-5)
    # Published weights on 12 blocks: the most that pondering can cost is 13 times 0.0005.
    assert Avit().ponder * 13 == pytest.approx(0.0065)


def test_training_steps_stay_finite_and_the_weights_of_the_policy_count() -> None:
    model = small(replace(MIXED, ponder=1.0, prior=1.0)).train()
    objective = Supervised(model, SupervisedConfig())
    optimiser = torch.optim.SGD(model.parameters(), 0.01)
    label = torch.tensor([0, 1, 2])
    batch = Batch((IMAGES,), label, label, torch.arange(3))
    for _ in range(2):
        losses = objective(batch)
        others = float(losses["loss"].detach() - losses["ponder"] - losses["prior"])
        assert math.isfinite(others)
        assert float(losses["ponder"]) > 1
        optimiser.zero_grad()
        losses["loss"].backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimiser.step()
    assert all(p.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_saved_and_loaded_it_halts_as_before(tmp_path: Path) -> None:
    model = small(replace(MIXED, eps=0.05, prior_center=2))
    loaded = load_model(model.save(tmp_path / "model")).eval()
    assert loaded.policy.config == model.policy.config
    assert torch.equal(loaded(IMAGES), model(IMAGES))


@torch.no_grad()
def test_built_on_meta_and_reset_it_runs() -> None:
    model = create_model("deit_tiny", device="meta", depth=2, width=32, heads=2, image_size=32, adaptive=Avit())
    model.to_empty(device="cpu")
    reset(model)
    assert model.eval()(IMAGES).isfinite().all()


def test_the_padded_form_is_one_graph() -> None:
    model = small()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(IMAGES), model(IMAGES), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mixer": {"kind": "xca"}}, "use the mixer softmax"),
        ({"parallel": 2}, "parallel must be 1"),
        ({"norm": "batchnorm"}, "BatchNorm"),
        ({"local": True}, "local patch interaction"),
        ({"adaptive": Avit(prior_center=4)}, "from 1 to 3"),
    ],
)
def test_blocks_in_which_halted_tokens_would_be_felt_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        create_model("deit_tiny", **{"depth": 4, "width": 32, "heads": 2, "adaptive": Avit(), **changes})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("half", [False, True])
@torch.no_grad()
def test_packed_on_cuda_equals_the_padded_form(half: bool) -> None:
    model = formed(small(), "padded").cuda()
    images = torch.randn(64, 3, 32, 32, device="cuda")
    exact = model.outputs(images)
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        padded, packed = model.outputs(images), formed(model, "auto").outputs(images)
    assert packed.trace.blocks[3].entering.mean() < TOKENS - 1
    if half:  # rounding moves some tokens over the edge in both forms, so they are as far from float32, not equal
        ours, theirs = ((out.stack.float() - exact.stack).abs().mean() for out in (packed, padded))
        assert ours <= 1.5 * theirs + 1e-4
    else:
        torch.testing.assert_close(packed.stack, padded.stack, atol=1e-4, rtol=1e-4)
        assert torch.equal(packed.trace.blocks[3].entering, padded.trace.blocks[3].entering)


def test_weights_that_were_trained_with_another_gate_say_so(tmp_path: Path) -> None:
    def gated(center: float) -> Classifier:
        return create_model("vit_micro_28", classes=3, depth=2, width=16, heads=2, adaptive=Avit(gate_center=center))

    folder = gated(75.0).save(tmp_path / "model")
    assert start_from(gated(75.0), "vit_micro_28", str(folder)) == []
    (note,) = start_from(gated(30.0), "vit_micro_28", str(folder))
    assert note.endswith("gate_center 30.0 in place of 75.0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_as_a_cuda_graph_it_computes_every_token_and_gives_the_same() -> None:
    model, images = small().cuda(), IMAGES.cuda()
    captured = model.optimize("float32", compile=False, graph=True)
    torch.testing.assert_close(captured(images), model.optimize("float32")(images), atol=1e-4, rtol=1e-4)
    other = images.flip(0)
    torch.testing.assert_close(captured(other), captured(images).flip(0), atol=1e-4, rtol=1e-4)
