"""The second-order head: sizes, invariances, fusions, and the whole default head by hand (SoT, arXiv 2104.10935)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vitrail.data.batch import Batch
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model
from vitrail.model.heads.config import SecondOrder
from vitrail.model.heads.second_order import SecondOrderHead
from vitrail.model.parts.modules import reset
from vitrail.model.parts.tokens import Tokens

WIDTH, CLASSES = 12, 5
SMALL = SecondOrder(heads=2, rows=3, columns=4)
FUSIONS = ("sum", "concat", "aggregate_all", "late", "class_only", "words_only")
POOLINGS = ("mean", "covariance", "cross_covariance")
NORMALIZATIONS = ("none", "scale", "signed_root", "layernorm", "svpn", "svpn_fast")


def some_tokens(batch: int = 3, words: int = 9, prefix: int = 1, mask: Tensor | None = None) -> Tokens:
    return Tokens(torch.randn(batch, prefix + words, WIDTH), prefix, (1, words), mask)


def make(config: SecondOrder = SMALL, width: int = WIDTH, classes: int = CLASSES) -> SecondOrderHead:
    return SecondOrderHead(config, width, classes)


def small(**changes: object) -> SecondOrder:
    """`SMALL` with changes, and with defaults where the changes leave its sizes without effect."""
    if changes.get("fusion") == "class_only":
        return SecondOrder(fusion="class_only")
    return replace(SecondOrder() if changes.get("pooling") == "mean" else SMALL, **changes)


def count(head: torch.nn.Module) -> int:
    return sum(p.numel() for p in head.parameters())


# Sizes


@pytest.mark.parametrize(("width", "size", "millions"), [(240, 14, 1.458), (384, 24, 3.953), (528, 38, 9.435)])
def test_head_sizes_of_the_published_models(width: int, size: int, millions: float) -> None:
    with torch.device("meta"):
        head = make(SecondOrder(rows=size, columns=size), width, 1000)
    pooled = 6 * size * size
    projections, start = width * 2 * 6 * size, size
    assert count(head) == projections + start + (width + 1) * 1000 + (pooled + 1) * 1000
    assert round(count(head) / 1e6, 3) == millions
    assert head.features == width + pooled


def test_concat_has_one_bias_fewer_than_sum() -> None:
    assert count(make()) - count(make(replace(SMALL, fusion="concat"))) == CLASSES


def test_covariance_pooling_has_the_triangle_of_48() -> None:
    with torch.device("meta"):
        head = make(SecondOrder(pooling="covariance", fusion="words_only"), 256, 1000)
    assert head.features == 48 * 49 // 2 == 6 * 14 * 14
    assert count(head) == 256 * 48 + 48 + 1177 * 1000


def test_macs_on_the_meta_device_are_those_of_the_products() -> None:
    with torch.device("meta"):
        head = make(SecondOrder(), 240, 1000)
        tokens = Tokens(torch.empty(1, 197, 240), 1, (14, 14))
    with FlopCounterMode(display=False) as counter:
        assert head(tokens).shape == (1, 1, 1000)
    project, covariance = 196 * 240 * 168, 6 * 14 * 196 * 14
    classify = (240 + 1176) * 1000
    back = 6 * 14 * 14  # Q^T u; the first product, Q start, is a matrix times a vector, which torch does not count
    assert counter.get_total_flops() == 2 * (project + covariance + classify + back)


def test_exact_normalization_gives_shapes_on_the_meta_device() -> None:
    with torch.device("meta"):
        head = make(replace(SMALL, normalization="svpn"))
        assert head(some_tokens()).shape == (3, 1, CLASSES)


# What it computes


def test_default_head_by_hand() -> None:
    """Explicit loops over images, heads and tokens; equations 1, 2, 3, 6 and 8 of SoT."""
    head, tokens = make().double(), some_tokens()
    sequence = tokens.sequence.double()
    found = head.fuse(head(Tokens(sequence, 1, (3, 3)))).detach().numpy()
    weights = {name: p.detach().numpy() for name, p in head.named_parameters()}
    h, m, n = 2, 3, 4
    project, start = weights["pool.project.weight"], weights["pool.norm.start"]
    for b, image in enumerate(sequence.numpy()):
        vector: list[float] = []
        for i in range(h):
            W = project[i * m : (i + 1) * m]
            R = project[h * m + i * n : h * m + (i + 1) * n]
            Q = np.zeros((m, n))
            for z in image[1:]:
                Q += np.outer(W @ z, R @ z) / (len(image) - 1)
            u = Q @ start / np.linalg.norm(Q @ start)
            estimate = np.linalg.norm(Q.T @ u)
            vector += list((Q / estimate**0.5).ravel())
        logits = weights["fc.weight"] @ image[0] + weights["fc.bias"]
        logits = logits + weights["fc_words.weight"] @ np.array(vector) + weights["fc_words.bias"]
        np.testing.assert_allclose(found[b], logits, rtol=1e-9)


def test_exact_head_by_hand() -> None:
    head, tokens = make(replace(SMALL, normalization="svpn", fusion="words_only")).double(), some_tokens()
    sequence = tokens.sequence.double()
    project = head.state_dict()["pool.project.weight"].numpy()
    found = head.embed(Tokens(sequence, 1, (3, 3))).detach().numpy().reshape(3, 2, 3, 4)
    for b, i in product(range(3), range(2)):
        words = sequence[b, 1:].numpy()
        Q = (words @ project[3 * i : 3 * i + 3].T).T @ (words @ project[6 + 4 * i : 10 + 4 * i].T) / 9
        U, s, Vh = np.linalg.svd(Q, full_matrices=False)
        np.testing.assert_allclose(found[b, i], (U * s**0.5) @ Vh, atol=1e-10)


def test_covariance_head_nears_the_square_root_of_the_covariance() -> None:
    config = replace(SMALL, pooling="covariance", fusion="words_only", root_steps=30, center="channel")
    head, tokens = make(config).double(), some_tokens(words=40)
    tokens = tokens.but(tokens.sequence.double())
    size = math.isqrt(2 * 2 * 3 * 4)
    x = head.pool.project(tokens.patches).detach().numpy()[0]
    values, vectors = np.linalg.eigh(np.cov(x.T, bias=True))
    root = (vectors * values**0.5) @ vectors.T
    np.testing.assert_allclose(head.embed(tokens)[0].detach().numpy(), root[np.triu_indices(size)], atol=1e-7)


def test_sum_equals_concat_under_weight_copy() -> None:
    one, two, tokens = make(), make(replace(SMALL, fusion="concat")), some_tokens()
    two.pool.load_state_dict(one.pool.state_dict())
    with torch.no_grad():
        two.fc.weight.copy_(torch.cat([one.fc.weight, one.fc_words.weight], dim=1))
        two.fc.bias.copy_(one.fc.bias + one.fc_words.bias)
    torch.testing.assert_close(two(tokens), one(tokens))
    torch.testing.assert_close(two.embed(tokens), one.embed(tokens))


def test_late_fusion_adds_probabilities_or_logits() -> None:
    tokens = some_tokens()
    head = make(replace(SMALL, fusion="late"))
    stack = head(tokens)
    assert stack.shape == (3, 2, CLASSES)
    assert head.classifiers == 2
    torch.testing.assert_close(stack[:, 0], head.fc(tokens.sequence[:, 0]))
    mean = (stack[:, 0].softmax(-1) + stack[:, 1].softmax(-1)) / 2
    torch.testing.assert_close(head.fuse(stack).softmax(-1), mean)
    torch.testing.assert_close(head.fuse(stack), mean.log())
    added = make(replace(SMALL, fusion="late", late_rule="logits")).fuse(stack)
    torch.testing.assert_close(added, stack[:, 0] + stack[:, 1])


def test_aggregate_all_pools_the_class_token_as_a_word() -> None:
    head, words = make(replace(SMALL, fusion="aggregate_all")), make(replace(SMALL, fusion="words_only"))
    words.load_state_dict(head.state_dict())
    tokens = some_tokens()
    torch.testing.assert_close(head(tokens), words(Tokens(tokens.sequence, 0, (1, 10))))


def test_registers_are_neither_class_token_nor_words() -> None:
    for fusion in ("sum", "aggregate_all"):
        head, tokens = make(replace(SMALL, fusion=fusion)), some_tokens(prefix=3)
        without = Tokens(torch.cat([tokens.sequence[:, :1], tokens.sequence[:, 3:]], dim=1), 1, (1, 9))
        torch.testing.assert_close(head(tokens), head(without))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_word_order_does_not_matter(pooling: str) -> None:
    head, tokens = make(small(pooling=pooling)), some_tokens()
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(9)])
    torch.testing.assert_close(head(tokens.but(tokens.sequence[:, order])), head(tokens))


@pytest.mark.parametrize("normalization", ["scale", "signed_root", "layernorm"])
def test_plain_normalizations_follow_their_definition(normalization: str) -> None:
    head = make(replace(SMALL, normalization=normalization, fusion="words_only"))
    tokens = some_tokens()
    Q = head.pool.matrices(tokens.patches).detach()
    if normalization == "scale":
        expected = Q / 3**0.5
    elif normalization == "signed_root":
        root = Q.sign() * Q.abs().sqrt()
        expected = root / root.flatten(1).norm(dim=1)[:, None, None, None]
    else:
        expected = (Q - Q.mean(-1, keepdim=True)) / (Q.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(head.embed(tokens), expected.flatten(1), rtol=1e-4, atol=1e-5)


# Masks and the place of the class token


@pytest.mark.parametrize(("pooling", "fusion"), list(product(POOLINGS, ("sum", "aggregate_all"))))
@pytest.mark.parametrize("place", ["first", "last"])
def test_padding_changes_nothing_whatever_it_holds(pooling: str, fusion: str, place: str) -> None:
    centred = {} if pooling == "mean" else {"center": "channel"}
    head = make(small(pooling=pooling, fusion=fusion, class_token=place, **centred))
    tokens = some_tokens(prefix=head.prefix)
    length = tokens.sequence.shape[1]
    padded = torch.cat([tokens.sequence, torch.full((3, 4, WIDTH), torch.nan)], dim=1)
    mask = torch.arange(length + 4).expand(3, -1) < length
    found = head(Tokens(padded, head.prefix, (1, 13), mask))
    torch.testing.assert_close(found, head(tokens))
    found.sum().backward()
    assert all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None)


def test_the_last_real_token_is_the_class_token() -> None:
    head, sequence = make(replace(SMALL, class_token="last")), torch.randn(2, 8, WIDTH)
    assert head.prefix == 0
    mask = torch.tensor([[True] * 5 + [False] * 3, [False] * 2 + [True] * 6])  # padded behind, padded in front
    found = head(Tokens(sequence, 0, (1, 8), mask))
    first = make()
    first.load_state_dict(head.state_dict())
    for b, real in enumerate((sequence[0, :5], sequence[1, 2:])):
        turned = Tokens(real.roll(1, 0)[None], 1, (1, len(real) - 1))
        torch.testing.assert_close(found[b : b + 1], first(turned))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("place", ["first", "last"])
def test_an_image_without_real_words_pools_to_zeros(pooling: str, place: str) -> None:
    head = make(small(pooling=pooling, class_token=place))
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[1] = False
    if place == "first":
        mask[1, 0] = True
    tokens = Tokens(torch.randn(3, 10, WIDTH), head.prefix, (1, 9), mask)
    found = head(tokens)
    found.sum().backward()
    assert found.isfinite().all()
    assert head.embed(tokens)[1, WIDTH:].abs().max() == 0
    assert all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None)


def test_a_sequence_without_words_is_an_error() -> None:
    with pytest.raises(ValueError, match="none of them a patch"):
        make()(some_tokens(words=0))
    with pytest.raises(ValueError, match="none of them a patch"):
        make(replace(SMALL, class_token="last"))(some_tokens(words=1, prefix=0))


def test_a_trunk_without_class_token_is_an_error_that_says_what_works() -> None:
    with pytest.raises(ValueError, match="class_token none with fusion words_only"):
        make()(some_tokens(prefix=0))
    make(replace(SMALL, class_token="none", fusion="words_only"))(some_tokens(prefix=0))


@pytest.mark.parametrize("fusion", ["sum", "concat", "late", "class_only"])
def test_fusing_without_a_class_token_is_an_error_that_says_what_works(fusion: str) -> None:
    with pytest.raises(ValueError, match="use fusion words_only"):
        make(replace(SMALL, class_token="none", fusion=fusion))


def test_without_class_token_aggregate_all_is_words_only() -> None:
    one = make(replace(SMALL, class_token="none", fusion="aggregate_all"))
    two = make(replace(SMALL, class_token="none", fusion="words_only"))
    two.load_state_dict(one.state_dict())
    tokens = some_tokens(prefix=0)
    assert one.prefix == two.prefix == 0
    torch.testing.assert_close(one(tokens), two(tokens))


def test_more_singular_values_than_a_matrix_has_are_an_error() -> None:
    with pytest.raises(ValueError, match="at most 3"):
        make(replace(SMALL, singular_values=4))


def test_settings_without_effect_are_named() -> None:
    with pytest.warns(UserWarning, match="does not use center, alpha"):
        make(SecondOrder(pooling="mean", alpha=0.3, center="channel"))


@pytest.mark.filterwarnings("error")
def test_settings_with_effect_are_not_warned_about() -> None:
    for fusion, pooling in product(FUSIONS, POOLINGS):
        make(small(fusion=fusion, pooling=pooling))


# Training


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(("fusion", "pooling"), list(product(FUSIONS, POOLINGS)))
def test_every_fusion_and_pooling_trains(fusion: str, pooling: str, autocast: bool) -> None:
    head, tokens = make(small(fusion=fusion, pooling=pooling)), some_tokens()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        stack = head(tokens)
        assert head.fuse(stack).shape == (3, CLASSES)
        assert head.embed(tokens).shape == (3, head.features)
        stack.float().logsumexp(-1).sum().backward()
    assert stack.shape == (3, head.classifiers, CLASSES)
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("center", ["none", "channel", "scalar"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_every_normalization_trains_also_in_half_precision(normalization: str, center: str) -> None:
    config = replace(SMALL, normalization=normalization, center=center)
    for dtype in (torch.float32, torch.bfloat16):
        head, tokens = make(config).to(dtype), some_tokens()
        stack = head(tokens.but(tokens.sequence.to(dtype)))
        assert stack.dtype == dtype
        stack.float().logsumexp(-1).sum().backward()
        for name, parameter in head.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_constant_words_have_finite_gradients() -> None:
    for pooling, normalization in (("cross_covariance", "svpn"), ("cross_covariance", "svpn_fast"), ("covariance", "")):
        changes = {"normalization": normalization} if normalization else {}
        head = make(replace(SMALL, pooling=pooling, center="channel", **changes))
        sequence = torch.ones(2, 10, WIDTH, requires_grad=True)
        head(Tokens(sequence, 1, (3, 3))).logsumexp(-1).sum().backward()
        assert sequence.grad is not None
        assert sequence.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None)


def test_dropout_acts_on_the_pooled_words_only() -> None:
    head, tokens = make(replace(SMALL, drop=1.0, fusion="late")), some_tokens()
    whole = head.eval()(tokens)
    dropped = head.train()(tokens)
    torch.testing.assert_close(dropped[:, 0], whole[:, 0])
    torch.testing.assert_close(dropped[:, 1], head.fc_words.bias.expand(3, -1))


def test_weights_travel_by_state_dict() -> None:
    one, two, tokens = make(), make(), some_tokens()
    assert not torch.equal(one(tokens), two(tokens))
    two.load_state_dict(one.state_dict())
    torch.testing.assert_close(two(tokens), one(tokens), rtol=0, atol=0)


@pytest.mark.parametrize("changes", [{}, {"normalization": "scale"}, {"normalization": "layernorm"}])
def test_a_head_built_on_meta_starts_as_any_other(changes: dict[str, str]) -> None:
    with torch.device("meta"):
        head = make(replace(SMALL, **changes))
    head = head.to_empty(device="cpu")
    for parameter in head.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(1)
    reset(head)
    fresh = make(replace(SMALL, **changes))
    for (name, parameter), other in zip(head.named_parameters(), fresh.parameters(), strict=True):
        assert parameter.isfinite().all(), name
        if parameter.ndim == 2:
            assert 0.01 < float(parameter.detach().std()) < 0.03, name
        elif name != "pool.norm.start":
            torch.testing.assert_close(parameter, other)


@pytest.mark.parametrize("masked", [False, True])
def test_the_default_head_is_one_graph(masked: bool) -> None:
    torch.compiler.reset()
    head = make()
    tokens = some_tokens(mask=torch.arange(10).expand(3, -1) < 8 if masked else None)
    compiled = torch.compile(head, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens), head(tokens))


def test_on_swin_the_head_replaces_average_pooling_and_counts_as_table_5_prints() -> None:
    """Xie et al. (2021, arXiv 2104.10935, table 5) print 28.3 M for Swin-T and 31.6 M with their head, the size of
    whose matrices on Swin they do not print: that of DeiT-S is 1.2 % off, 25 rows and columns are 0.3 %."""
    name, classes = "timm:swin_tiny_patch4_window7_224", 1000
    plain = sum(p.numel() for p in create_model(name, device="meta").parameters())
    for size, off in ((24, 0.013), (25, 0.005)):
        head = SecondOrder(rows=size, columns=size, fusion="words_only", class_token="none")
        count = sum(p.numel() for p in create_model(name, head=head, device="meta").parameters())
        pooling = 768 * 6 * 2 * size + size  # projections of six heads, and the start of the power iteration
        assert count == plain - (768 + 1) * classes + pooling + (6 * size * size + 1) * classes
        assert count / 1e6 == pytest.approx(31.6, rel=off)


def test_swin_with_the_head_trains() -> None:
    torch.manual_seed(0)
    head = SecondOrder(rows=4, columns=4, heads=2, fusion="words_only", class_token="none")
    small = {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "window_size": 2}
    model = create_model("timm:swin_tiny_patch4_window7_224", classes=3, image_size=64, head=head, **small)
    images, target = torch.randn(6, 3, 64, 64), torch.arange(6) % 3
    objective, optimizer = Supervised(model, SupervisedConfig()), torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(3):
        loss = objective(Batch((images,), target, target, torch.arange(6)))["loss"]
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert losses[2] < losses[0]
