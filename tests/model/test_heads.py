"""Class attention, class-MLP, attention pooling, two tokens, copies: their identities, and heads on any trunk."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small import shake, small
from torch import nn

import vitrail
from vitrail.model.build import create_model
from vitrail.model.heads.class_attention import AttentionPoolHead
from vitrail.model.heads.config import AttentionPool, ClassAttention, ClassToken, Distilled, Gramian, Mean, SecondOrder
from vitrail.model.parts.tokens import Tokens

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(5))


def test_class_attention_reads_patches_and_never_writes_them() -> None:
    model = small("deit_tiny", head=ClassAttention())
    tokens = model.tokens(IMAGES)
    before = tokens.sequence.clone()
    tokens.sequence.retain_grad()
    model.head(tokens).sum().backward()
    assert torch.equal(tokens.sequence, before)
    assert tokens.sequence.grad.abs().sum() > 0  # gradients do flow into the patches
    patches = model.tokens(IMAGES).sequence
    model.head.cls_token.data.normal_()
    assert torch.equal(model.tokens(IMAGES).sequence, patches)  # whatever the class token is


@pytest.mark.parametrize("token_in_keys", [True, False])
def test_class_attention_by_hand(token_in_keys: bool) -> None:
    model = small("deit_tiny", head=ClassAttention(layers=1, token_in_keys=token_in_keys, layerscale=0.3))
    tokens = model.tokens(IMAGES)
    head, block = model.head, model.head.blocks[0]
    x = head.cls_token.expand(2, -1, -1)
    z = block.norm1(torch.cat([x, tokens.sequence], 1))
    read = z if token_in_keys else z[:, 1:]
    q, k, v = block.attn.q(z[:, :1]), block.attn.k(read), block.attn.v(read)
    outs, maps = [], []
    for h in range(2):
        part = slice(32 * h, 32 * (h + 1))
        weights = torch.softmax(q[..., part] @ k[..., part].transpose(1, 2) / 32**0.5, -1)
        maps.append(weights[:, 0])
        outs.append(weights @ v[..., part])
    x = x + block.ls1.gamma * block.attn.proj(torch.cat(outs, -1))
    x = x + block.ls2.gamma * block.mlp(block.norm2(x))
    expected = head.fc(head.norm(x)[:, 0])
    torch.testing.assert_close(model(IMAGES), expected)
    found = head.blocks[0].attn.map(z, None)[:, :, 0]
    torch.testing.assert_close(found, torch.stack(maps, 1))
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 2))
    assert found.shape == (2, 2, 17 if token_in_keys else 16)
    assert head.maps(tokens).shape == (2, 2, 16)


def test_class_mlp_by_hand() -> None:
    """A linear map over class token and patches in the place of attention, twice; patches are unchanged (ResMLP)."""
    model = small("resmlp_s12_class_mlp", heads=1)
    patches = model.tokens(IMAGES).sequence
    x = model.head.cls_token.expand(2, -1, -1)
    for block in model.head.blocks:
        z = block.norm1.alpha * torch.cat([x, patches], 1) + block.norm1.beta
        gathered = torch.einsum("on,bnd->bod", block.attn.tokens.weight, z) + block.attn.tokens.bias[:, None]
        x = x + block.ls1.gamma * gathered
        hidden = F.gelu(F.linear(block.norm2.alpha * x + block.norm2.beta, block.mlp.fc1.weight, block.mlp.fc1.bias))
        x = x + block.ls2.gamma * F.linear(hidden, block.mlp.fc2.weight, block.mlp.fc2.bias)
    assert len(model.head.blocks) == 2
    x = (model.head.norm.alpha * x + model.head.norm.beta)[:, 0]
    torch.testing.assert_close(model(IMAGES), F.linear(x, model.head.fc.weight, model.head.fc.bias))


def test_class_attention_equals_timms_cait() -> None:
    import timm

    from vitrail.model.timm_weights import load_weights

    theirs = timm.create_model("cait_xxs24_224", num_classes=5).eval()
    shake(theirs)
    ours = create_model("cait_xxs24", classes=5).eval()
    load_weights(ours, theirs.state_dict())
    tokens = torch.randn(1, 196, 192)
    with torch.no_grad():
        token = theirs.cls_token.expand(1, -1, -1)
        for block in theirs.blocks_token_only:
            token = block(tokens, token)
        expected = theirs.head(theirs.norm(torch.cat([token, tokens], 1))[:, 0])
        torch.testing.assert_close(ours.head(Tokens(tokens, 0, (14, 14)))[:, 0], expected)


def test_an_mlp_classifier_by_hand() -> None:
    model = create_model("cifar_resnet20", classes=5, head=Mean(hidden=32, mlp=True)).eval()
    head = model.head
    head.act[0].running_mean.uniform_(-1, 1)
    head.act[0].running_var.uniform_(0.5, 2)
    tokens = model.tokens(torch.randn(3, 3, 32, 32))
    hidden = F.linear(tokens.sequence.mean(1), head.wide.weight, head.wide.bias)
    norm = head.act[0]
    hidden = (hidden - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    expected = F.linear(hidden.relu(), head.fc.weight, head.fc.bias)
    torch.testing.assert_close(head(tokens)[:, 0], expected)
    with pytest.raises(ValueError, match=r"head\.hidden"):
        create_model("cifar_resnet20", classes=5, head=Mean(mlp=True))


@pytest.mark.parametrize(("trunk", "start"), [({}, 1.0), ({"layerscale": 1e-4}, 1e-4)])
def test_gains_of_attention_pooling_start_as_those_of_the_trunk(trunk: dict[str, float], start: float) -> None:
    head = create_model("deit_tiny", classes=3, width=64, depth=1, heads=2, head="attention_pool", **trunk).head
    torch.testing.assert_close(head.blocks[0].ls1.gamma, torch.full((64,), start))


def test_attention_pooling_by_hand_and_its_map() -> None:
    model = small("deit_tiny", head=AttentionPool(layerscale=0.5))
    tokens = model.tokens(IMAGES)
    head, block = model.head, model.head.blocks[0]
    attn, query = block.attn, head.cls_token
    read = block.norm1(tokens.sequence)
    weights = torch.softmax(attn.q(block.norm1(query)) @ attn.k(read).transpose(1, 2) / 64**0.5, -1)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1))
    torch.testing.assert_close(head.maps(tokens), weights)
    pooled = weights @ attn.v(read)  # exactly the weighted sum of values before the output projection
    x = query + 0 * pooled + block.ls1(attn.proj(pooled))
    x = x + block.ls2(block.mlp(block.norm2(x)))
    torch.testing.assert_close(model(IMAGES), head.fc(head.norm(x))[:, 0])


@pytest.mark.parametrize("logit", ["own", "shared"])
def test_one_map_for_each_class(logit: str) -> None:
    model = small("deit_tiny", head=AttentionPool(queries="per_class", per_class_logit=logit, layerscale=0.5))
    tokens = model.tokens(IMAGES)
    head = model.head
    assert head.maps(tokens).shape == (2, 5, 16)
    logits = model(IMAGES)
    for c in range(5):  # each class alone, by the single-query head
        alone = AttentionPoolHead(AttentionPool(layerscale=0.5), 64, 1)
        state = {**head.state_dict(), "cls_token": head.cls_token[:, c : c + 1]}
        if logit == "own":
            state |= {"fc.weight": head.fc.weight[c : c + 1], "fc.bias": head.fc.bias[c : c + 1]}
        alone.load_state_dict(state)
        torch.testing.assert_close(alone(tokens)[:, 0, 0], logits[:, c])
    head.cls_token.data[:] = head.cls_token.data[:, :1]
    maps = head.maps(tokens)
    torch.testing.assert_close(maps, maps[:, :1].expand_as(maps))  # equal queries, equal maps


@pytest.mark.parametrize(
    "head", [Mean(), ClassAttention(), AttentionPool(), AttentionPool(heads=2, token_in_keys=True)], ids=str
)
def test_padding_changes_nothing(head: object) -> None:
    model = small("deit_tiny", head=head)
    tokens = model.tokens(IMAGES)
    padded = torch.cat([tokens.sequence, torch.randn(2, 4, 64)], 1)
    mask = torch.arange(20).expand(2, -1) < 16
    torch.testing.assert_close(model.head(Tokens(padded, 0, (4, 4), mask=mask)), model.head(tokens))


def test_two_tokens_two_classifiers_and_two_ways_to_fuse() -> None:
    model = small("deit_tiny", head=Distilled())
    stack = model.stack(IMAGES)
    tokens = model.tokens(IMAGES).sequence
    assert stack.shape == (2, 2, 5)
    torch.testing.assert_close(stack[:, 0], model.head.fc(tokens[:, 0]))
    torch.testing.assert_close(stack[:, 1], model.head.fc_dist(tokens[:, 1]))
    torch.testing.assert_close(model(IMAGES), stack.mean(1))
    summed = small("deit_tiny", head=Distilled(fusion="softmax")).head.fuse(stack)
    torch.testing.assert_close(summed.exp(), stack.softmax(-1).mean(1))
    # The two rules can disagree.
    torn = torch.tensor([[[9.0, 8.5, 0.0], [0.0, -8.0, 8.0]]])  # unsure but loud, sure but quiet
    assert small("deit_tiny", head=Distilled()).head.fuse(torn).argmax() == 0
    assert small("deit_tiny", head=Distilled(fusion="softmax")).head.fuse(torn).argmax() == 2


@pytest.mark.parametrize("head", [ClassToken(copies=3), Mean(copies=3)])
def test_copies_are_separate_classifiers_on_one_vector(head: ClassToken | Mean) -> None:
    model = small("deit_tiny", head=head)
    stack = model.stack(IMAGES)
    vector = model.head.embed(model.tokens(IMAGES))
    for k in range(3):
        rows = slice(5 * k, 5 * (k + 1))
        torch.testing.assert_close(stack[:, k], F.linear(vector, model.head.fc.weight[rows], model.head.fc.bias[rows]))
    torch.testing.assert_close(model(IMAGES), stack.mean(1))


HEADS = [
    ClassToken(),
    Mean(norm_after=True),
    Distilled(),
    ClassAttention(),
    AttentionPool(),
    AttentionPool(queries="per_class"),
    SecondOrder(rows=4, columns=4, heads=2),
    Gramian(heads=2, gram_width=16, attention_width=16, attention_heads=2, auxiliary=True),
]


@pytest.mark.parametrize("head", HEADS, ids=lambda h: h.kind)
def test_replacing_a_head_keeps_the_trunk(head: object, tmp_path) -> None:
    model = small("deit_tiny")
    made, notes = vitrail.replace_head(model, head)
    made.eval()
    old, new = model.trunk.state_dict(), made.trunk.state_dict()
    for name, tensor in new.items():
        if name in ("cls_token", "pos_embed") and old[name].shape != tensor.shape:
            assert any("starts anew" in n or "positions of class tokens" in n for n in notes)
        elif name in old:
            assert torch.equal(tensor, old[name]), name
    assert made(IMAGES).shape == (2, 5)
    made.save(tmp_path)
    torch.testing.assert_close(vitrail.load(tmp_path)(IMAGES), made(IMAGES))
    back, _ = vitrail.replace_head(made, "class_token")
    for block in range(2):
        name = f"blocks.{block}.attn.qkv.weight"
        assert torch.equal(back.trunk.state_dict()[name], old[name])


@pytest.mark.parametrize("head", HEADS[1:2] + HEADS[3:6] + [HEADS[-1]], ids=lambda h: h.kind)
@pytest.mark.parametrize("name", ["timm:resnet18", "cifar_resnet20"])
def test_heads_work_on_convolutional_trunks(head: object, name: str) -> None:
    model = create_model(name, classes=5, head=head).eval()
    assert model(IMAGES).shape == (2, 5)
    assert model.outputs(IMAGES).embedding.shape == (2, model.head.features)


def test_second_order_without_a_class_token_on_a_convolutional_trunk() -> None:
    head = SecondOrder(rows=4, columns=4, heads=2, class_token="none", fusion="words_only")
    assert create_model("timm:resnet18", classes=5, head=head).eval()(IMAGES).shape == (2, 5)
    with pytest.raises(ValueError, match="second_order with class_token none"):
        create_model("timm:resnet18", classes=5, head=SecondOrder())


def test_kept_heads_are_saved_and_are_the_heads_they_were(tmp_path) -> None:
    model = small("deit_tiny", head=HEADS[-1])
    stack = model.stack(IMAGES)
    model.keep_heads([1])
    torch.testing.assert_close(model.stack(IMAGES), stack[:, 1:2])
    model.save(tmp_path)
    torch.testing.assert_close(vitrail.load(tmp_path)(IMAGES), model(IMAGES))
    none = small("deit_tiny", head=HEADS[-1]).keep_heads([])
    torch.testing.assert_close(none.stack(IMAGES), stack[:, 2:])  # the auxiliary classifier, trained along
    with pytest.raises(ValueError, match="has no heads to choose from"):
        small("deit_tiny").keep_heads([0])


@pytest.mark.parametrize("head", [Distilled(fusion="softmax"), SecondOrder(fusion="late")], ids=lambda h: h.kind)
def test_summed_softmax_is_refused_where_several_labels_may_hold(head: object) -> None:
    with pytest.raises(ValueError, match="several labels may hold"):
        create_model("deit_tiny", classes=5, head=head, multilabel=True, device="meta")


def test_a_head_takes_its_open_options_from_the_trunk() -> None:
    model = create_model("cait_s24", device="meta")
    assert model.head.blocks[0].attn.heads == 8
    assert model.head.blocks[0].ls1.init == 1e-5
    unscaled = create_model("cait_s24", head=ClassAttention(scaled=False), device="meta")
    assert isinstance(unscaled.head.blocks[0].ls1, nn.Identity)
