"""CKA and the divergence of attention maps (Li et al. 2024, arXiv 2411.09702)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from vitrail.inspect.model_similarity import Divergence, Matching, cka_table, head_divergences, jensen_shannon
from vitrail.measure.attention_maps import AttentionCollector, LayerMaps
from vitrail.measure.clustering import best_matching
from vitrail.model.build import create_model


def cka(x: Tensor, y: Tensor) -> float:
    return float(cka_table([x], [y]))


def attention_divergence(first: Tensor, second: Tensor, matching: Matching = "direct") -> float | None:
    """Of maps [images, heads, tokens, tokens] of patches alone."""
    divergence = Divergence()
    there = torch.ones(first.shape[0], first.shape[-1], dtype=torch.bool)
    divergence.add(*(LayerMaps(maps, there, there, 0, (1, first.shape[-1])) for maps in (first, second)))
    return divergence.values()[matching]


def test_cka_is_one_with_itself_and_ignores_rotations_shifts_and_scale() -> None:
    x = torch.randn(40, 6, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    assert cka(x, x) == pytest.approx(1)
    y = torch.randn(40, 4, dtype=torch.float64) + x[:, :4]
    assert cka(x @ rotation * 7 + 3, y) == pytest.approx(cka(x, y), rel=1e-9)
    stretched = x @ torch.diag(torch.tensor([9.0, 1, 1, 1, 1, 0.1], dtype=torch.float64))
    assert abs(cka(stretched, y) - cka(x, y)) > 0.01
    assert cka(x, y) == pytest.approx(cka(y, x))


def test_cka_is_its_formula_by_kernels_of_images() -> None:
    x, y = torch.randn(30, 5, dtype=torch.float64), torch.randn(30, 7, dtype=torch.float64)
    centre = torch.eye(30, dtype=torch.float64) - 1 / 30
    k, m = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre
    assert cka(x, y) == pytest.approx(float((k * m).sum() / (k.norm() * m.norm())), rel=1e-9)


def test_cka_in_batches_is_cka_at_once() -> None:
    models = [create_model("vit_tiny_32", classes=3, depth=2, width=32, heads=2, image_size=16) for _ in range(2)]
    images = torch.randn(50, 3, 16, 16)
    tables = []
    for size in (50, 16):
        collectors = [AttentionCollector(model, 1, ["features"]) for model in models]
        for collector in collectors:
            for part in images.split(size):
                collector.add(part)
        tables.append(cka_table(*(collector.result().features for collector in collectors)))
    # float32 products of batches of other sizes
    torch.testing.assert_close(tables[0], tables[1], rtol=1e-4, atol=1e-6)


def random_maps(heads: int = 4, images: int = 2) -> Tensor:
    return (torch.randn(images, heads, 5, 5, dtype=torch.float64) * 3).softmax(-1)


def test_the_divergence_is_symmetric_and_between_0_and_ln_2() -> None:
    p, q = random_maps(), random_maps()
    found = jensen_shannon(p, q)
    torch.testing.assert_close(found, jensen_shannon(q, p))
    assert found.min() > 0
    assert found.max() < math.log(2)
    assert torch.equal(jensen_shannon(p, p), torch.zeros(2, 4, 5, dtype=torch.float64))
    one, other = torch.eye(2, dtype=torch.float64)
    assert float(jensen_shannon(one, other)) == pytest.approx(math.log(2))
    mean = (p + q) / 2
    by_hand = ((p * (p / mean).log()).sum(-1) + (q * (q / mean).log()).sum(-1)) / 2
    torch.testing.assert_close(found, by_hand)


def test_matchings_are_ordered() -> None:
    for _ in range(20):
        first, second = random_maps(), random_maps()
        found = {m: attention_divergence(first, second, m) for m in ("direct", "bipartite", "minimum", "averaged")}
        assert found["minimum"] <= found["bipartite"] + 1e-12
        assert found["bipartite"] <= found["direct"] + 1e-12
        assert found["averaged"] <= found["bipartite"] + 1e-12
    assert attention_divergence(random_maps(4), random_maps(3)) is None


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_the_least_assignment_is_scipys(size: int) -> None:
    for _ in range(5):
        cost = torch.rand(size, size, dtype=torch.float64)
        found = best_matching(-cost.numpy()).tolist()
        rows, columns = linear_sum_assignment(cost.numpy())
        assert sorted(found) == list(range(size))
        assert sum(float(cost[i, j]) for i, j in enumerate(found)) == pytest.approx(float(cost[rows, columns].sum()))


def test_permuted_heads_are_the_same_function_and_bipartite_sees_it() -> None:
    model = create_model("vit_tiny_32", classes=3, depth=1, width=32, heads=4, image_size=16)
    other = create_model("vit_tiny_32", classes=3, depth=1, width=32, heads=4, image_size=16)
    attention = model.trunk.blocks[0].attn
    torch.nn.init.normal_(attention.qkv.weight, std=0.4)
    other.load_state_dict(model.state_dict())
    order = torch.tensor([2, 0, 3, 1])
    moved = other.trunk.blocks[0].attn
    with torch.no_grad():
        moved.qkv.weight.copy_(attention.qkv.weight.view(3, 4, 8, 32)[:, order].reshape(96, 32))
        moved.qkv.bias.copy_(attention.qkv.bias.view(3, 4, 8)[:, order].reshape(96))
        moved.proj.weight.copy_(attention.proj.weight.view(32, 4, 8)[:, order].reshape(32, 32))
        images = torch.randn(2, 3, 16, 16)
        a, b = (m.outputs(images, ["attention.0"]) for m in (model, other))
    torch.testing.assert_close(a.stack, b.stack)
    maps = [out.captured["attention.0"] for out in (a, b)]
    assert attention_divergence(*maps, "direct") > 0.01
    assert attention_divergence(*maps, "bipartite") == pytest.approx(0, abs=1e-9)


def test_three_ways_of_one_average_pooling_lie_far_apart() -> None:
    """A uniform head beside an idle one, top and bottom halves, left and right halves; all of a 4x4 grid."""
    where = torch.arange(16)
    values = torch.randn(16, 3, dtype=torch.float64)
    uniform = torch.full((16,), 1 / 16, dtype=torch.float64)

    def half(chosen: Tensor) -> Tensor:
        return chosen.double() / 8

    idle = torch.eye(16, dtype=torch.float64)
    models = [
        ((uniform.expand(16, 16), idle), (1.0, 0.0)),
        (tuple(half(c).expand(16, 16) for c in (where < 8, where >= 8)), (0.5, 0.5)),
        (tuple(half(c).expand(16, 16) for c in (where % 4 < 2, where % 4 >= 2)), (0.5, 0.5)),
    ]
    outputs = [sum(m @ (values * gain) for m, gain in zip(maps, gains, strict=True)) for maps, gains in models]
    for a, b in itertools.combinations(range(3), 2):
        torch.testing.assert_close(outputs[a], outputs[b])
        first, second = (torch.stack(models[i][0])[None] for i in (a, b))
        for matching in ("direct", "bipartite", "minimum"):
            assert 0.2 < attention_divergence(first, second, matching) < math.log(2)
    second, third = (torch.stack(models[i][0])[None] for i in (1, 2))
    for matching in ("direct", "bipartite", "minimum"):  # half of the keys of any two halves are common
        assert attention_divergence(second, third, matching) == pytest.approx(math.log(2) / 2, rel=1e-12)
    assert attention_divergence(second, third, "averaged") == pytest.approx(0, abs=1e-12)
    assert head_divergences(second, third).shape == (2, 2)
