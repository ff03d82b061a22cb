"""Token samplers and the scores they sample (ATS, arXiv 2111.15667), against exact fractions and float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vitrail.kernels.packing import compact
from vitrail.kernels.sampling import (
    able,
    class_attention,
    class_scores,
    inverse_sample,
    nearest_sample,
    plain_ragged_sample,
    ragged_class_scores,
    ragged_inverse_sample,
    ragged_sample,
    ragged_uniform_sample,
    random_sample,
    top_sample,
    uniform_sample,
)

OFFSETS = (0, 5, 5, 6, 9, 30)  # an image of none, of a prefix only, of two patches (prefix 1)
ROWS = 34


def cumulated(scores: list[float]) -> list[Fraction]:
    exact = [Fraction(s) for s in scores]
    return [sum(exact[: j + 1], Fraction(0)) / sum(exact) for j in range(len(exact))]


def exact_inverse(scores: list[float], k: int) -> set[int]:
    """For each point the first token whose CDF reaches it, in exact fractions."""
    cdf = cumulated(scores)
    points = [Fraction(2 * i - 1, 2 * k) for i in range(1, k + 1)]
    return {next(j for j, c in enumerate(cdf) if c >= p) for p in points}


def exact_nearest(scores: list[float], k: int) -> set[int]:
    cdf = cumulated(scores)
    points = [Fraction(2 * i - 1, 2 * k) for i in range(1, k + 1)]
    return {min(range(len(cdf)), key=lambda j: abs(cdf[j] - p)) for p in points}


def kept(keep: Tensor) -> set[int]:
    return {i for i, yes in enumerate(keep.tolist()) if yes}


def cases(count: int) -> list[tuple[list[float], int]]:
    """Small whole scores, which meet points exactly, and scores of all sizes, as floats have them."""
    draw = random.Random(0)
    made = []
    for i in range(count):
        tokens, points = draw.randint(1, 20), draw.randint(1, 30)
        if i % 2:
            scores = [float(draw.choice((0, 0, 1, 1, 2, 3, 6))) for _ in range(tokens)]
            scores[draw.randrange(tokens)] += 1
        else:
            scores = torch.tensor([draw.gauss(0, 2) for _ in range(tokens)]).exp().tolist()
        made.append((scores, points))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_sampling_is_exact(dtype: torch.dtype) -> None:
    for scores, points in cases(300):
        assert kept(inverse_sample(torch.tensor(scores, dtype=dtype), points)) == exact_inverse(scores, points)


def test_nearest_sampling_is_exact() -> None:
    for scores, points in cases(300):
        assert kept(nearest_sample(torch.tensor(scores), points)) == exact_nearest(scores, points)


def test_the_scale_of_scores_does_not_matter() -> None:
    for scores, points in cases(20):
        expected = exact_inverse(scores, points)
        for factor in (2.0**-100, 2.0**60):  # far outside of what one factor of 2^36 can bring into range
            assert kept(inverse_sample(torch.tensor(scores) * factor, points)) == expected


def violations(sample: Callable[[Tensor, int], Tensor]) -> tuple[int, int, int]:
    """How often more than K are kept, K in spite of a score of 2 / K, and a token of 1 / K lost."""
    draw = torch.Generator().manual_seed(0)
    more = full = lost = 0
    for _ in range(300):
        tokens, points = (int(torch.randint(low, high, (), generator=draw)) for low, high in ((10, 100), (4, 60)))
        scores = (1.5 * torch.randn(tokens, generator=draw, dtype=torch.float64)).softmax(0)
        keep = sample(scores, points)
        more += int(keep.sum() > points)
        full += int((scores >= 2 / points).any() and keep.sum() >= points)
        lost += int(((scores >= 1 / points) & ~keep).sum())
    return more, full, lost


def test_the_strict_inverse_has_the_stated_properties_and_nearest_has_not() -> None:
    assert violations(inverse_sample) == (0, 0, 0)
    more, full, lost = violations(nearest_sample)
    assert more == 0  # a point has one nearest token
    assert full > 0
    assert lost > 0


@pytest.mark.parametrize("value", ["1", "1/n", "0.1"])
def test_equal_scores_and_as_many_points_keep_everything(value: str) -> None:
    for n in (*range(1, 513), 1000, 1024, 2047, 3136, 4095, 4096):
        scores = torch.full((n,), {"1": 1.0, "1/n": 1 / n, "0.1": 0.1}[value])
        assert inverse_sample(scores, n).all(), n


@pytest.mark.parametrize("n", [2, 48, 196, 4096])
def test_equal_scores_lose_a_token_by_the_nearest_rule(n: int) -> None:
    # Every point but the first is midway between two values; the first of both takes it, so the last token gets none.
    assert kept(nearest_sample(torch.ones(n), n)) == set(range(n - 1))


def test_points_beyond_tokens_keep_all_of_equal_scores() -> None:
    assert inverse_sample(torch.ones(196), 197).all()


@pytest.mark.parametrize("where", [0, 3, 195])
@pytest.mark.parametrize("points", [1, 2, 196, 1000])
def test_one_dominant_token_is_alone(where: int, points: int) -> None:
    scores = torch.zeros(196)
    scores[where] = 0.7
    assert kept(inverse_sample(scores, points)) == {where}


def test_one_token_is_kept() -> None:
    assert inverse_sample(torch.tensor([[0.3]]), 1).tolist() == [[True]]


def test_nothing_is_kept_where_there_is_no_score() -> None:
    for sample in (inverse_sample, nearest_sample, random_sample):
        assert not sample(torch.zeros(5), 3).any()


@pytest.mark.parametrize("sample", [inverse_sample, nearest_sample, top_sample])
def test_masked_tokens_are_as_if_they_were_not_there(sample: Callable[..., Tensor]) -> None:
    scores = torch.rand(40, 30)
    mask = torch.rand(40, 30) < 0.6
    mask[:, 0] = True
    keep = sample(torch.where(mask, scores, torch.nan), 12, mask)
    for row in range(40):
        assert torch.equal(keep[row][mask[row]], sample(scores[row][mask[row]], 12))
    assert not keep[~mask].any()


@pytest.mark.parametrize(
    ("sample", "options"),
    [
        (inverse_sample, {}),
        (inverse_sample, {"order": "sorted"}),
        (nearest_sample, {}),
        (nearest_sample, {"order": "sorted"}),
        (top_sample, {}),
    ],
)
def test_each_image_has_its_own_number_of_points(sample: Callable[..., Tensor], options: dict[str, str]) -> None:
    scores, points = torch.rand(4, 3, 30), torch.randint(1, 50, (4, 3))
    keep = sample(scores, points, **options)
    for i in range(4):
        for j in range(3):
            assert torch.equal(keep[i, j], sample(scores[i, j], int(points[i, j]), **options))


def test_sorted_order_is_the_rule_on_sorted_scores() -> None:
    for sample, exact in ((inverse_sample, exact_inverse), (nearest_sample, exact_nearest)):
        for scores, points in cases(60):
            order = sorted(range(len(scores)), key=lambda j: scores[j])
            expected = {order[j] for j in exact([scores[j] for j in order], points)}
            assert kept(sample(torch.tensor(scores), points, order="sorted")) == expected


def test_only_sorted_order_does_not_depend_on_places() -> None:
    scores, order = torch.rand(60), torch.randperm(60)
    assert torch.equal(
        inverse_sample(scores, 20, order="sorted")[order], inverse_sample(scores[order], 20, order="sorted")
    )
    assert not torch.equal(inverse_sample(scores, 20)[order], inverse_sample(scores[order], 20))


def test_more_even_scores_keep_more() -> None:
    logits = torch.randn(196)
    counts = [int(inverse_sample((std * logits).softmax(0), 196).sum()) for std in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)]
    assert counts[0] == 196
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)


def test_top_sampling_takes_the_largest_and_the_first_of_equals() -> None:
    assert kept(top_sample(torch.tensor([0.1, 0.4, 0.2, 0.4, 0.2]), 3)) == {1, 2, 3}
    assert top_sample(torch.rand(5), 9).all()


def test_random_points_hit_tokens_by_their_score() -> None:
    scores = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0])
    generator = torch.Generator().manual_seed(1)
    keep = random_sample(scores.expand(20_000, 6), 1, generator=generator)
    assert (keep.sum(1) == 1).all()
    # Four deviations of a share of 20,000 draws: 4 sqrt(0.25 / 20,000)
    torch.testing.assert_close(keep.double().mean(0), scores.double(), atol=0.014, rtol=0)
    assert not keep[:, scores == 0].any()


def test_random_points_are_as_many_as_asked_and_repeat_with_the_generator() -> None:
    scores, points = torch.rand(50, 30), torch.randint(1, 30, (50,))
    keep = [random_sample(scores, points, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert (keep[0].sum(1) <= points).all()
    assert torch.equal(keep[0], keep[1])
    assert not torch.equal(keep[0], keep[2])


SKEWED = torch.tensor([0.30, 0.20, 0.10] + [0.4 / 61] * 61)  # 64 tokens
DRAWS = 20_000


def keep_rates(sample: Callable[..., Tensor], points: int) -> Tensor:
    """How often each of 64 tokens with skewed scores is kept."""
    keep = sample(SKEWED.expand(DRAWS, 64), points, generator=torch.Generator().manual_seed(0))
    return keep.double().mean(0)


def test_random_points_keep_tokens_by_their_score() -> None:
    """1 - (1 - s)^K for the share s of all scores: 0.997, 0.972, 0.815, and 0.100 for the rest."""
    expected = 1 - (1 - SKEWED.double()) ** 16
    assert expected[[0, 1, 2, 3]].tolist() == pytest.approx([0.997, 0.972, 0.815, 0.100], abs=5e-4)
    rates = keep_rates(random_sample, 16)
    # Five deviations of a share of so many draws at most.
    torch.testing.assert_close(rates, expected, atol=5 * (0.25 / DRAWS) ** 0.5, rtol=0)
    assert float(rates.sum()) / 64 == pytest.approx(0.138, abs=2e-3)  # what a uniform draw of as many would have


@pytest.mark.parametrize("points", [1, 16, 40])
def test_uniform_sampling_keeps_each_token_equally_often(points: int) -> None:
    rates, share = keep_rates(uniform_sample, points), points / 64
    deviation = (share * (1 - share) / DRAWS) ** 0.5
    torch.testing.assert_close(rates, torch.full_like(rates, share), atol=5 * deviation, rtol=0)
    # Tokens drawn without replacement: pairs are kept together with k (k - 1) / (n (n - 1)).
    keep = uniform_sample(torch.zeros(DRAWS, 64), points, generator=torch.Generator().manual_seed(1)).double()
    both = (keep[:, 0] * keep[:, 1]).mean()
    assert float(both) == pytest.approx(points * (points - 1) / (64 * 63), abs=5 * (0.25 / DRAWS) ** 0.5)


def test_uniform_sampling_keeps_as_many_as_it_may_and_only_real_tokens() -> None:
    points, mask = torch.randint(1, 40, (50,)), torch.rand(50, 30) < 0.7
    keep = uniform_sample(torch.full((50, 30), torch.nan), points, mask)
    assert not keep[~mask].any()
    assert torch.equal(keep.sum(1), torch.minimum(points, mask.sum(1)))
    same = [uniform_sample(mask, points, mask, torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])


@pytest.mark.parametrize("points", [0, 2**21])
def test_an_impossible_number_of_points_is_refused(points: int) -> None:
    with pytest.raises(ValueError, match=f"{points} sampling points for 9 tokens"):
        inverse_sample(torch.rand(9), points)


# Scores


def heads(batch: int = 2, tokens: int = 11, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, batch, 3, tokens, dim, dtype=torch.float64).unbind(0)
    return 2 * q, k, v


def spelled_out(attention: Tensor, v: Tensor, prefix: int) -> Tensor:
    """The scores of ATS, an image and a head at a time: attention [heads, tokens], v [heads, tokens, dim]."""
    tokens = attention.shape[1]
    scores = [0.0] * (tokens - prefix)
    for head in range(len(attention)):
        terms = [float(attention[head, j] * v[head, j].square().sum().sqrt()) for j in range(prefix, tokens)]
        scores = [s + t / sum(terms) for s, t in zip(scores, terms, strict=True)]
    return torch.tensor(scores, dtype=torch.float64) / sum(scores)


def full_map(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhid,bhjd->bhij", q, k).div(q.shape[-1] ** 0.5).softmax(-1)


@pytest.mark.parametrize("prefix", [1, 2])
def test_scores_are_the_class_tokens_attention_times_the_norm_of_values(prefix: int) -> None:
    q, k, v = heads()
    scores = class_scores(q, k, v, prefix=prefix)
    attention = full_map(q, k)[:, :, 0]
    torch.testing.assert_close(class_attention(q, k), attention)
    for b in range(2):
        torch.testing.assert_close(scores[b], spelled_out(attention[b], v[b], prefix))
    plain = class_scores(q, k, v, prefix=prefix, value_norm=False)
    torch.testing.assert_close(plain[0], spelled_out(attention[0], torch.ones_like(v[0]), prefix))


def test_column_scores_are_what_all_tokens_look_at() -> None:
    q, k, v = heads()
    scores = class_scores(q, k, v, prefix=1, source="column")
    for b in range(2):
        torch.testing.assert_close(scores[b], spelled_out(full_map(q, k).sum(2)[b], v[b], 1))


def test_random_scores_are_a_patch_tokens_row() -> None:
    q, k, v = heads(batch=1)
    generator = torch.Generator().manual_seed(0)
    rows = [spelled_out(full_map(q, k)[0, :, j], v[0], 1) for j in range(11)]
    found = set()
    for _ in range(200):
        scores = class_scores(q, k, v, prefix=1, source="random", generator=generator)[0]
        (j,) = [j for j, row in enumerate(rows) if torch.allclose(row, scores)]
        found.add(j)
    assert found == set(range(1, 11))  # the chance that one is missed is 10 (9/10)^200


@pytest.mark.parametrize("source", ["class", "column"])
def test_scores_of_a_padded_image_are_those_of_the_image_alone(source: str) -> None:
    q, k, v = heads()
    alone = class_scores(q[:1, :, :7], k[:1, :, :7], v[:1, :, :7], prefix=1, source=source)
    mask = torch.arange(11).expand(2, 11) < torch.tensor([[7], [11]])
    for x in (q, k, v):
        x[0, :, 7:] = torch.nan
    scores = class_scores(q, k, v, prefix=1, source=source, mask=mask)
    torch.testing.assert_close(scores[:1, :6], alone)
    assert torch.equal(scores[0, 6:], torch.zeros(4, dtype=torch.float64))


def test_a_random_row_is_never_that_of_a_masked_token() -> None:
    q, k, v = heads(batch=1)
    mask = (torch.arange(11) < 3)[None]
    short = [spelled_out(full_map(q[:, :, :3], k[:, :, :3])[0, :, j], v[0, :, :3], 1) for j in (1, 2)]
    for _ in range(20):
        scores = class_scores(q, k, v, prefix=1, source="random", mask=mask)[0, :2]
        assert any(torch.allclose(scores, row) for row in short)


def test_one_row_of_the_map_is_all_that_is_computed() -> None:
    q, k, v = heads()
    for compute in (lambda: class_scores(q, k, v, prefix=1), lambda: class_attention(q, k)):
        with FlopCounterMode(display=False) as counter:
            compute()
        assert counter.get_total_flops() == 2 * 2 * 3 * 11 * 8


def test_the_row_has_a_gradient() -> None:
    q, k, v = (x[:1, :2, :4, :3].clone().requires_grad_() for x in heads())
    assert torch.autograd.gradcheck(class_attention, (q, k))
    assert torch.autograd.gradcheck(lambda *qkv: class_scores(*qkv, prefix=1), (q, k, v))


def test_scores_do_not_vanish_where_the_class_token_sees_itself_alone() -> None:
    q, k, v = (x.float() for x in heads())
    k[:, :, 0] = 1000 * q[:, :, 0]  # logits in the thousands: what is left for patches is below any float
    scores = class_scores(q, k, v, prefix=1)
    assert not class_attention(q, k)[:, :, 1:].any()
    torch.testing.assert_close(scores.sum(1), torch.ones(2))
    k[:, :, 0] = 0
    torch.testing.assert_close(scores, class_scores(q, k, v, prefix=1))


# Packed batches


def packed(dtype: torch.dtype = torch.float64, dim: int = 8) -> tuple[Tensor, Tensor]:
    qkv = torch.randn(ROWS, 3, 3, dim, dtype=dtype)
    qkv[OFFSETS[-1] :] = torch.nan
    return qkv, torch.tensor(OFFSETS)


@pytest.mark.parametrize("value_norm", [True, False])
@pytest.mark.parametrize("prefix", [1, 2])
def test_packed_scores_are_those_of_images_one_by_one(prefix: int, value_norm: bool) -> None:
    qkv, offsets = packed()
    scores = ragged_class_scores(qkv, offsets.int(), prefix, value_norm)
    for a, b in pairwise(OFFSETS):
        if b - a > prefix:
            q, k, v = qkv[a:b].permute(1, 2, 0, 3)[:, None]
            expected = class_scores(q, k, v, prefix=prefix, value_norm=value_norm)[0]
            torch.testing.assert_close(scores[a + prefix : b], expected)
        assert not scores[a : min(a + prefix, b)].any()
    assert torch.equal(scores[OFFSETS[-1] :], torch.zeros(4, dtype=torch.float64))


def test_packed_sampling_is_that_of_images_one_by_one() -> None:
    offsets, points = torch.tensor(OFFSETS), torch.tensor([3, 1, 1, 5, 9])
    scores = torch.rand(ROWS)
    scores[OFFSETS[-1] :] = torch.nan
    keep = ragged_inverse_sample(scores, offsets, points)
    for (a, b), k in zip(pairwise(OFFSETS), points.tolist(), strict=True):
        assert kept(keep[a:b]) == (exact_inverse(scores[a:b].tolist(), k) if b > a else set())
    assert not keep[OFFSETS[-1] :].any()
    nine = ragged_inverse_sample(scores, offsets, 9)
    assert torch.equal(nine, ragged_inverse_sample(scores, offsets.int(), torch.full((5,), 9)))


def test_many_equal_images_keep_everything_however_long_the_batch() -> None:
    offsets = torch.arange(513) * 196
    assert ragged_inverse_sample(torch.full((512 * 196,), 1 / 196), offsets, 196).all()


def test_prefix_tokens_always_go_on() -> None:
    qkv, offsets = packed(torch.float32)
    scores, keep = ragged_sample(qkv, offsets, 4, 2, most=21)
    sampled = ragged_inverse_sample(scores, offsets, 4)
    for a, b in pairwise(OFFSETS):
        assert keep[a : min(a + 2, b)].all()
        assert torch.equal(keep[a + 2 : b], sampled[a + 2 : b])
        assert keep[a + 2 : b].sum() <= 4
    assert not keep[OFFSETS[-1] :].any()


@pytest.mark.parametrize("prefix", [1, 2])
def test_packed_uniform_draws_are_those_of_the_padded_batch(prefix: int) -> None:
    offsets, points = torch.tensor(OFFSETS), torch.tensor([3, 1, 1, 5, 9])
    keep = ragged_uniform_sample(offsets, ROWS, points, prefix, most=21, generator=torch.Generator().manual_seed(3))
    counts = [b - a for a, b in pairwise(OFFSETS)]
    mask = torch.tensor([[j < n - prefix for j in range(21 - prefix)] for n in counts])
    padded = uniform_sample(mask, points, mask, torch.Generator().manual_seed(3))
    for image, (a, b) in enumerate(pairwise(OFFSETS)):
        expected = [True] * min(prefix, b - a) + padded[image, : max(0, b - a - prefix)].tolist()
        assert keep[a:b].tolist() == expected
        assert sum(expected[prefix:]) == min(int(points[image]), max(0, b - a - prefix))
    assert not keep[OFFSETS[-1] :].any()
    alone = ragged_uniform_sample(torch.tensor([0, 2, 4]), 5, 1, 2, most=2)  # prefix tokens alone
    assert alone.tolist() == [True] * 4 + [False]


@pytest.mark.parametrize("capacity", [0, 1, 7, 12, 40])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kept_rows_move_up_in_order(capacity: int, dtype: torch.dtype) -> None:
    keep = torch.rand(ROWS) < 0.5
    keep[OFFSETS[-1] :] = True  # they belong to nobody
    index, offsets, overflow = compact(keep, torch.tensor(OFFSETS, dtype=dtype), capacity)
    wanted = [r for r in range(OFFSETS[-1]) if keep[r]]
    assert index.tolist() == (wanted + [0] * 50)[:capacity]
    assert offsets.tolist() == [min(capacity, sum(r < end for r in wanted)) for end in OFFSETS]
    assert offsets.dtype == dtype
    assert bool(overflow) == (len(wanted) > capacity)


def test_a_batch_that_just_fits_does_not_overflow() -> None:
    index, offsets, overflow = compact(torch.ones(6, dtype=torch.bool), torch.tensor([0, 2, 6]), 6)
    assert (index.tolist(), offsets.tolist(), bool(overflow)) == ([0, 1, 2, 3, 4, 5], [0, 2, 6], False)
    assert compact(torch.ones(6, dtype=torch.bool), torch.tensor([0, 2, 6]), 5)[2]


# How they run


def everything(scores: Tensor, points: Tensor, qkv: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    q, k, v = qkv[:30].unflatten(0, (3, 10)).permute(2, 0, 3, 1, 4).unbind(0)
    made = [sample(scores, points, order="sorted") for sample in (inverse_sample, nearest_sample)]
    made += [inverse_sample(scores, 7), top_sample(scores, points), nearest_sample(scores, points, scores > 0.2)]
    made += [class_scores(q, k, v, prefix=1), class_scores(q, k, v, prefix=1, source="column")]
    scores, keep = ragged_sample(qkv, offsets, points[:5], 1, most=21)
    return (*made, scores, keep, *compact(keep, offsets, 20))


def test_nothing_waits_for_the_host() -> None:
    qkv, offsets = packed(torch.float32)
    arguments = (torch.rand(6, 30), torch.randint(1, 40, (6,)), qkv, offsets)
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="eager")
    for found, expected in zip(compiled(*arguments), everything(*arguments), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_random_draws_are_traced_too() -> None:
    torch._dynamo.reset()
    keep = torch.compile(random_sample, fullgraph=True, backend="eager")(torch.rand(6, 30), torch.full((6,), 5))
    assert (keep.sum(1) <= 5).all()
    keep = torch.compile(uniform_sample, fullgraph=True, backend="eager")(torch.rand(6, 30), torch.full((6,), 5))
    assert (keep.sum(1) == 5).all()


def test_a_cpu_uses_the_plain_twin() -> None:
    qkv, offsets = packed(torch.float32)
    assert not able(qkv, 21)
    assert all(map(torch.equal, ragged_sample(qkv, offsets, 5, 1, most=21), plain_ragged_sample(qkv, offsets, 5, 1)))


INTERPRETED = """
import torch
from vitrail.kernels import sampling, sampling_triton

torch.manual_seed(0)
sampling._ragged_sample.register_kernel("cpu")(sampling_triton.sample)
sizes = ((0, 5, 5, 6, 9, 30), 34, 21), ((0, 1), 1, 1), ((0, 70, 200), 200, 130), ((0, 3, 1028), 1030, 1025)
for bounds, rows, most in sizes:
    for dim, prefix, value_norm, dtype in ((8, 1, True, torch.float32), (24, 2, False, torch.bfloat16)):
        offsets = torch.tensor(bounds, dtype=torch.int32 if prefix == 1 else torch.int64)
        points = torch.randint(1, 2 * most + 1, (len(bounds) - 1,))
        qkv = torch.randn(rows, 3, 2, dim).to(dtype)
        qkv[bounds[-1]:] = torch.nan
        scores, keep = torch.ops.vitrail.ragged_sample(qkv, offsets, points, prefix, value_norm, most)
        real = torch.where(torch.isnan(qkv), 0, qkv).double()
        expected = sampling.ragged_class_scores(real, offsets, prefix, value_norm)
        # float32 all the way: sums of at most 24 products and 1,025 terms, and exp2 of them
        assert (scores - expected).abs().max() <= 2e-6 * expected.abs().max(), (bounds, dim)
        image, place, owned = sampling.owners(offsets, rows)
        same = sampling.ragged_inverse_sample(scores, offsets, points) | (owned & (place < prefix))
        assert torch.equal(keep, same), (bounds, dim)
# Equal scores: all keys and values alike.
qkv = torch.ones(197, 3, 2, 16)
scores, keep = torch.ops.vitrail.ragged_sample(qkv, torch.tensor([0, 197]), torch.tensor([196]), 1, True, 197)
assert keep.all()
# A dominant token, alone but for the class token.
qkv[7, 1] = 100.0
scores, keep = torch.ops.vitrail.ragged_sample(qkv, torch.tensor([0, 197]), torch.tensor([196]), 1, True, 197)
assert keep.nonzero().flatten().tolist() == [0, 7]
arguments = (qkv, torch.tensor([0, 197]), torch.tensor([196]), 1, True, 197)
torch.library.opcheck(torch.ops.vitrail.ragged_sample.default, arguments, test_utils=("test_schema", "test_faketensor"))
print("sampling is right")
"""


def test_the_kernel_equals_its_twin_in_the_interpreter(interpreted: Callable[[str], str]) -> None:
    assert "sampling is right\n" in interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("most", "dim"), [(5, 16), (65, 32), (197, 64), (1025, 48)])
def test_the_kernel_equals_its_twin_on_an_accelerator(most: int, dim: int, dtype: torch.dtype) -> None:
    lengths = torch.cat([torch.tensor([0, 1, 2, most]), torch.randint(1, most + 1, (60,))])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).cuda()
    rows = int(offsets[-1]) + 50
    qkv = torch.randn(rows, 3, 3, dim, device="cuda").to(dtype)
    qkv[rows - 50 :] = torch.nan
    points = torch.randint(1, most + 2, (64,), device="cuda")
    assert able(qkv, most)
    torch.cuda.set_sync_debug_mode("error")
    try:
        scores, keep = ragged_sample(qkv, offsets, points, 1, most=most)
        same = plain_ragged_sample(qkv, offsets, points, 1)[1]
        compact(keep, offsets, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = ragged_class_scores(qkv.double(), offsets, 1)
    # float32 all the way, as in the interpreter, but with the device's own exp2, square root and division
    assert (scores - expected).abs().max() <= 1e-5 * expected.abs().max()
    first = torch.zeros(rows, dtype=torch.bool, device="cuda")
    first[offsets[:-1][lengths.cuda() > 0]] = True
    assert torch.equal(keep, ragged_inverse_sample(scores, offsets, points) | first)
    assert (keep != same).float().mean() < 1e-3  # scores that differ in the last bit move a point across an edge rarely


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")
def test_uniform_draws_on_an_accelerator_wait_for_nothing_and_are_alike_in_both_layouts() -> None:
    offsets, points = torch.tensor(OFFSETS).cuda(), torch.tensor([3, 1, 1, 5, 9]).cuda()
    mask = torch.arange(20, device="cuda") < (offsets.diff() - 1)[:, None]
    draws = [torch.Generator("cuda").manual_seed(3) for _ in range(2)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        keep = ragged_uniform_sample(offsets, ROWS, points, 1, most=21, generator=draws[0])
        padded = uniform_sample(mask, points, mask, draws[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for image, (a, b) in enumerate(pairwise(OFFSETS)):
        assert keep[a + 1 : b].tolist() == padded[image, : max(0, b - a - 1)].tolist()
