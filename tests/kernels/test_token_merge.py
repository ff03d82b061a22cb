"""Kernels of token merging (ToMe, arXiv 2210.09461): Triton's in its interpreter, compared with the plain twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vitrail.kernels.token_merge import able, match_tokens, merge_similar, merge_tokens

INTERPRETED = """
import torch
from vitrail.kernels import token_merge, token_merge_triton

torch.manual_seed(0)
# tokens, prefix, r, heads, channels of a head
for tokens, prefix, r, heads, dim in ((10, 1, 4, 2, 16), (9, 0, 1, 1, 24), (67, 2, 30, 3, 8)):
    qkv = torch.randn(2, tokens, 3, heads, dim)
    k = qkv.permute(2, 0, 3, 1, 4)[1]  # not contiguous, as attention leaves it
    width = heads * dim
    x, branch = torch.randn(2, 2, tokens, width).unbind(0)
    size = torch.randint(1, 9, (2, tokens)).float()
    index = torch.stack([torch.randperm(500)[: tokens - prefix] for _ in range(2)])
    left = tokens - r
    for given, sizes in ((None, None), (index, size)):
        slots, kept = token_merge_triton.match(k, given, r, prefix)
        expected_slots, expected_kept = token_merge.match_tokens(k.double(), r, prefix, given)
        assert torch.equal(slots.long(), expected_slots), (tokens, slots, expected_slots)
        assert torch.equal(kept, expected_kept), tokens
        found, total = token_merge_triton.merge(x, branch, sizes, slots, left)
        mean, expected_total = token_merge.merge_tokens(x.double(), branch.double(), sizes, expected_slots, left)
        assert (found - mean).abs().max() < 2e-6, tokens
        assert torch.equal(total, expected_total), tokens
# Equal keys: the first sources join the first target, and as many as were asked for.
slots, _ = token_merge_triton.match(torch.ones(1, 1, 9, 16), None, 2, 1)
assert slots.tolist() == [[0, 1, 1, 2, 1, 3, 4, 5, 6]], slots
# What is no number: every slot has a token all the same.
slots, kept = token_merge_triton.match(torch.full((1, 1, 9, 16), torch.nan), None, 3, 1)
assert sorted(set(slots[0].tolist())) == list(range(6)), slots
# Equal tokens have themselves as their mean, to the bit.
x = torch.randn(1, 1, 32).to(torch.float16).expand(1, 9, 32).contiguous()
found, _ = token_merge_triton.merge(x, torch.zeros_like(x), torch.full((1, 9), 7.0), slots, 6)
assert torch.equal(found, x[:, :6]), found
print("merging is right")
"""


def test_the_kernels_equal_their_twins_in_the_interpreter(interpreted: Callable[[str], str]) -> None:
    assert "merging is right\n" in interpreted(INTERPRETED)


def test_a_cpu_uses_the_plain_twins() -> None:
    k, x, branch = torch.randn(2, 2, 9, 8), torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    assert not able(x, branch, k)
    slots, index = match_tokens(k, 3, 1)
    found, expected = merge_similar(x, branch, k, 3, 1), (*merge_tokens(x, branch, None, slots, 6), index)
    assert all(map(torch.equal, found, expected))


def test_an_exported_merge_equals_the_plain_one_and_adds_into_no_place() -> None:
    class Merge(torch.nn.Module):
        def forward(self, x: torch.Tensor, branch: torch.Tensor, size: torch.Tensor, slots: torch.Tensor) -> Any:
            return merge_tokens(x, branch, size, slots, 4)

    x, branch, size = torch.randn(2, 9, 16), torch.randn(2, 9, 16), torch.randint(1, 9, (2, 9)).float()
    slots = torch.tensor([[0, 1, 1, 1, 2, 3, 1, 3, 3], [0, 3, 1, 1, 2, 2, 2, 2, 2]])
    program = torch.export.export(Merge(), (x, branch, size, slots), strict=True)
    assert not [node for node in program.graph.nodes if "add_" in str(node.target) or "scatter" in str(node.target)]
    for found, expected in zip(program.module()(x, branch, size, slots), Merge()(x, branch, size, slots), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


SIZES = [(197, 1, 13), (197, 1, 98), (50, 2, 24), (256, 0, 100), (20, 1, 4)]  # tokens, prefix, merges


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "prefix", "r"), SIZES)
@pytest.mark.parametrize("dim", [64, 80])
def test_the_kernels_equal_their_twins_on_an_accelerator(
    tokens: int, prefix: int, r: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    qkv = torch.randn(33, tokens, 3, 3, dim, device="cuda").to(dtype)
    k = qkv.permute(2, 0, 3, 1, 4)[1]
    x, branch = torch.randn(2, 33, tokens, 3 * dim, device="cuda").to(dtype).unbind(0)
    size = torch.randint(1, 4, (33, tokens), device="cuda").float()
    assert able(x, branch, k)
    found, total, index = merge_similar(x, branch, k, r, prefix, size)
    slots, expected_index = match_tokens(k.double(), r, prefix)
    # Similarities in float32: an image in a hundred may order two nearly equal ones the other way.
    same = (index == expected_index).all(1)
    assert same.float().mean() >= 0.9
    stream = (x + branch).double()
    exact, sizes = merge_tokens(stream, torch.zeros_like(stream), size, slots, tokens - r)
    assert torch.equal(total[same], sizes[same])
    torch.testing.assert_close(found[same].double(), exact[same], rtol=2**-8, atol=1e-5)  # rounded once
