"""Attention of packed batches and their round trips, against images one at a time in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from vitrail.kernels.packing import compact, pack, unpack
from vitrail.kernels.ragged_attention import able, plain_ragged_attention, ragged_attention

OFFSETS = (0, 5, 5, 6, 9, 20)  # an image of none and one of one token among them
ROWS, MOST = 24, 11


def one_by_one(qkv: Tensor, offsets: Tensor, asking: list[int] | None = None) -> Tensor:
    """Attention of each image by itself, spelled out; of the rows `asking` or of all."""
    bounds = offsets.tolist()
    out = qkv.new_zeros(len(qkv), *qkv.shape[2:])
    for a, b in pairwise(bounds):
        if a < b:
            q, k, v = qkv[a:b].unbind(1)
            weights = torch.einsum("ihd,jhd->hij", q, k).div(qkv.shape[-1] ** 0.5).softmax(-1)
            out = torch.cat([out[:a], torch.einsum("hij,jhd->ihd", weights, v), out[b:]])
    return out if asking is None else out[asking]


def packed(dtype: torch.dtype = torch.float64, heads: int = 2, dim: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 3, heads, dim, dtype=dtype), torch.tensor(OFFSETS)


def some_queries(capacity: int = 15) -> tuple[Tensor, Tensor, list[int]]:
    """Rows that ask, as a sampler leaves them: index, offsets, and the list of the real ones."""
    asking = [0, 2, 3, 5, 8, 9, 12, 19]
    keep = torch.zeros(ROWS, dtype=torch.bool)
    keep[asking] = True
    index, offsets, overflow = compact(keep, torch.tensor(OFFSETS), capacity)
    assert not overflow
    return index, offsets, asking


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_packed_batch_is_its_images_one_by_one(kind: torch.dtype) -> None:
    qkv, offsets = packed()
    found = ragged_attention(qkv, offsets.to(kind), most=MOST)
    torch.testing.assert_close(found, one_by_one(qkv, offsets))
    assert torch.equal(found[OFFSETS[-1] :], torch.zeros(4, 2, 4, dtype=torch.float64))


@pytest.mark.parametrize("capacity", [8, 15, 100])
def test_chosen_queries_get_their_rows_of_the_whole(capacity: int) -> None:
    qkv, offsets = packed()
    queries, query_offsets, asking = some_queries(capacity)
    found = ragged_attention(qkv, offsets, queries, query_offsets, most=MOST)
    torch.testing.assert_close(found[: len(asking)], one_by_one(qkv, offsets)[asking])
    assert found.shape == (capacity, 2, 4)
    assert not found[len(asking) :].any()


def test_padding_of_queries_may_name_any_row() -> None:
    qkv, offsets = packed()
    queries, query_offsets, asking = some_queries()
    expected = ragged_attention(qkv, offsets, queries, query_offsets, most=MOST)
    queries[len(asking) :] = ROWS + 1000
    assert torch.equal(ragged_attention(qkv, offsets, queries, query_offsets, most=MOST), expected)


@pytest.mark.parametrize("most", [MOST, 64])
def test_room_for_longer_images_changes_nothing(most: int) -> None:
    qkv, offsets = packed()
    torch.testing.assert_close(ragged_attention(qkv, offsets, most=most), one_by_one(qkv, offsets))


def test_one_image_of_one_token_is_its_value() -> None:
    qkv = torch.randn(3, 3, 2, 4, dtype=torch.float64)
    found = ragged_attention(qkv, torch.tensor([0, 1]), most=1)
    torch.testing.assert_close(found[0], qkv[0, 2])
    assert not found[1:].any()


@pytest.mark.parametrize("some", [False, True])
def test_rows_of_nobody_leave_no_trace(some: bool) -> None:
    qkv, offsets = packed()
    asked = some_queries()[:2] if some else ()
    made = []
    for garbage in (0.0, torch.nan):
        x = qkv.clone()
        x[OFFSETS[-1] :] = garbage
        x.requires_grad_()
        out = ragged_attention(x, offsets, *asked, most=MOST)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        grad[8 if some else OFFSETS[-1] :] = garbage
        made.append((out, *torch.autograd.grad(out, x, grad)))
    assert all(map(torch.equal, *made))
    assert not made[1][1][OFFSETS[-1] :].any()


@pytest.mark.parametrize("some", [False, True])
def test_the_gradient_of_the_plain_twin(some: bool) -> None:
    qkv, offsets = packed(heads=1, dim=2)
    asked = some_queries()[:2] if some else ()
    qkv.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: plain_ragged_attention(x, offsets, *asked, most=MOST), qkv)


def test_a_batch_without_any_token_is_zeros() -> None:
    qkv = torch.full((4, 3, 2, 4), torch.nan, requires_grad=True)
    out = ragged_attention(qkv, torch.tensor([0, 0, 0]), most=3)
    (gradient,) = torch.autograd.grad(out.sum(), qkv)
    assert not out.any()
    assert not gradient.any()


def test_queries_without_their_offsets_are_refused() -> None:
    qkv, offsets = packed()
    with pytest.raises(ValueError, match="come together"):
        ragged_attention(qkv, offsets, torch.arange(3), most=MOST)


# Round trips


def test_packing_puts_real_tokens_one_after_the_other() -> None:
    x = torch.randn(4, 7, 3)
    mask = torch.rand(4, 7) < 0.5
    mask[2] = False
    rows, offsets, index = pack(x, mask, 28)
    expected = [(7 * b + t, x[b, t]) for b in range(4) for t in range(7) if mask[b, t]]
    assert offsets.tolist() == [0, *mask.sum(1).cumsum(0).tolist()]
    assert index[: len(expected)].tolist() == [i for i, _ in expected]
    assert torch.equal(rows[: len(expected)], torch.stack([value for _, value in expected]))
    assert not rows[len(expected) :].any()


def test_unpacking_a_pack_of_padded_images_gives_them_back() -> None:
    mask = torch.arange(7) < torch.tensor([[3], [7], [0], [1]])
    x = torch.where(mask[..., None], torch.randn(4, 7, 3), 0)
    dense, real = unpack(*pack(x, mask, 20)[:2], 7)
    assert torch.equal(dense, x)
    assert torch.equal(real, mask)


def test_packing_what_was_unpacked_gives_it_back() -> None:
    rows, offsets = torch.randn(ROWS, 3), torch.tensor(OFFSETS)
    rows[OFFSETS[-1] :] = 0
    found, found_offsets, index = pack(*unpack(rows, offsets, MOST), ROWS)
    assert torch.equal(found, rows)
    assert torch.equal(found_offsets, offsets)
    assert index[: OFFSETS[-1]].tolist() == [
        MOST * i + p for i, (a, b) in enumerate(pairwise(OFFSETS)) for p in range(b - a)
    ]


def test_tokens_beyond_the_capacity_are_cut() -> None:
    x = torch.randn(2, 3, 4)
    rows, offsets, _ = pack(x, torch.ones(2, 3, dtype=torch.bool), 4)
    assert torch.equal(rows, x.flatten(0, 1)[:4])
    assert offsets.tolist() == [0, 3, 4]


def test_both_ways_have_gradients_and_padding_has_none() -> None:
    mask = torch.tensor([[True, False, True], [False, True, False]])
    x = torch.randn(2, 3, 2, dtype=torch.float64)
    x[~mask] = torch.nan
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(pack(x, mask, 5)[0].sum(), x)
    assert torch.equal(gradient, mask[..., None].expand(2, 3, 2).double())
    rows = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: unpack(r, torch.tensor([0, 2, 3]), 3)[0], rows)
    assert torch.autograd.gradcheck(lambda y: pack(y, mask, 5)[0], torch.randn_like(x).requires_grad_())


# How they run


def everything(
    qkv: Tensor, offsets: Tensor, queries: Tensor, query_offsets: Tensor, mask: Tensor
) -> tuple[Tensor, ...]:
    out = ragged_attention(qkv, offsets, most=MOST)
    some = ragged_attention(qkv, offsets, queries, query_offsets, most=MOST)
    dense, real = unpack(out, offsets, MOST)
    return out, some, dense, real, *pack(dense, mask, 30)


def test_nothing_waits_for_the_host() -> None:
    qkv, offsets = packed()
    arguments = (qkv.requires_grad_(), offsets, *some_queries()[:2], torch.rand(5, MOST) < 0.5)
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="eager")
    for found, expected in zip(compiled(*arguments), everything(*arguments), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_cpu_uses_the_plain_twin() -> None:
    qkv, offsets = packed(torch.bfloat16, dim=16)
    assert not able(qkv)
    found, expected = (attend(qkv, offsets, most=MOST) for attend in (ragged_attention, plain_ragged_attention))
    assert torch.equal(found, expected)


INTERPRETED = """
import torch
from itertools import pairwise
from vitrail.kernels import ragged_attention as declared
from vitrail.kernels import ragged_attention_triton as kernel
from vitrail.kernels.packing import compact

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)  # fills memory that nobody wrote with NaN
assert torch.empty(3).isnan().all()
# The operators themselves, with their gradients; a CPU has no kernel of them outside of this test.
declared._attention.register_kernel("cpu")(kernel.forward)
declared._attention_backward.register_kernel("cpu")(kernel.backward)

def one_by_one(qkv, bounds):
    out = [qkv.new_zeros(0, *qkv.shape[2:])]
    for a, b in pairwise(bounds):
        q, k, v = qkv[a:b].permute(1, 2, 0, 3)
        out.append(((q @ k.mT) * qkv.shape[-1] ** -0.5).softmax(-1).matmul(v).transpose(0, 1))
    return torch.cat(out)

def close(found, expected, what):
    assert torch.isfinite(found).all(), what
    # float32 sums of at most 130 terms
    assert (found - expected).abs().max() <= 3e-6 * expected.abs().max(), what

# Lengths, spare rows, `most`, channels: one tile, several, none in some images, more capacity than tiles, one token.
sizes = (((5, 0, 1, 3, 11), 4, 11, 16), ((33, 64, 20), 30, 64, 24), ((130, 7, 0), 100, 130, 32), ((1,), 9, 1, 16))
for lengths, spare, most, dim in sizes:
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    end, rows = bounds[-1], bounds[-1] + spare
    for some in (False, True):
        what = (lengths, some)
        offsets = torch.tensor(bounds, dtype=torch.int32 if some else torch.int64)
        qkv = torch.randn(rows, 3, 2, dim)
        qkv[end:] = torch.nan
        qkv.requires_grad_()
        exact = qkv.detach()[:end].double().requires_grad_()
        expected = one_by_one(exact, bounds)
        queries = query_offsets = None
        count = end
        if some:
            keep = torch.rand(rows) < 0.5
            keep[0] = True
            queries, query_offsets, _ = compact(keep, offsets, rows + 3)
            count = int(query_offsets[-1])
            queries[count:] = rows + 1000
            expected = expected[queries[:count]]
        grad = torch.randn(rows + 3 if some else rows, 2, dim)
        grad[count:] = torch.nan
        out, lse = torch.ops.vitrail.ragged_attention(qkv, offsets, queries, query_offsets, most)
        (gradient,) = torch.autograd.grad(out, qkv, grad)
        (expected_gradient,) = torch.autograd.grad(expected, exact, grad[:count].double())
        assert out.shape == grad.shape and gradient.shape == qkv.shape
        close(out[:count].detach(), expected.detach(), what)
        close(gradient[:end], expected_gradient, (what, "gradient"))
        assert not out[count:].any() and not gradient[end:].any(), what
arguments = (torch.randn(9, 3, 2, 16), torch.tensor([0, 4, 9]), None, None, 5)
tests = ("test_schema", "test_faketensor")
torch.library.opcheck(torch.ops.vitrail.ragged_attention.default, arguments, test_utils=tests)
print("ragged attention is right")
"""


def test_the_kernel_equals_float64_in_the_interpreter(interpreted: Callable[[str], str]) -> None:
    assert "ragged attention is right\n" in interpreted(INTERPRETED)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize(("most", "dim"), [(1, 16), (20, 32), (64, 64), (100, 48), (197, 64), (197, 128), (577, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_and_its_gradient_equal_float64(
    most: int, dim: int, some: bool, dtype: torch.dtype, compiled: bool
) -> None:
    torch.manual_seed(most)
    lengths = torch.cat([torch.tensor([most, 1, 0]), torch.randint(1, most + 1, (13,))])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).cuda()
    end = int(offsets[-1])
    rows = end + 37
    qkv = torch.randn(rows, 3, 3, dim, device="cuda").to(dtype)
    clean = torch.where(torch.arange(rows, device="cuda")[:, None, None, None] < end, qkv, 0)
    qkv[end:] = torch.nan
    qkv.requires_grad_()
    asked: tuple[Tensor, ...] = ()
    count = end
    if some:
        keep = torch.rand(rows, device="cuda") < 0.5
        keep[0] = True
        asked = compact(keep, offsets, rows)[:2]
        count = int(asked[1][-1])
    assert able(qkv)

    def attend(qkv: Tensor, *asked: Tensor) -> Tensor:
        return ragged_attention(qkv, offsets, *asked, most=most)

    grad = torch.randn(rows, 3, dim, device="cuda").to(dtype)
    grad[count:] = torch.nan
    attend(qkv.detach(), *asked)  # a first time, which compiles and may wait
    if not compiled:
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = (torch.compile(attend, dynamic=False) if compiled else attend)(qkv, *asked)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (gradient,) = torch.autograd.grad(found, qkv, grad)
    exact, plain = clean.double().requires_grad_(), clean.clone().requires_grad_()
    expected = one_by_one(exact, offsets, asked[0][:count].tolist() if some else list(range(end)))
    (expected_gradient,) = torch.autograd.grad(expected, exact, grad[:count].double())
    theirs = plain_ragged_attention(plain, offsets, *asked, most=most)
    (their_gradient,) = torch.autograd.grad(theirs, plain, grad)
    # As near as PyTorch's own operations come in the same precision, with a little room.
    assert relative(found[:count], expected) < 1.2 * relative(theirs[:count], expected) + 1e-4
    assert relative(gradient, expected_gradient) < 1.2 * relative(their_gradient, expected_gradient) + 1e-4
    assert not found[count:].any()
    assert not gradient[end:].any()
