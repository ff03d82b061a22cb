"""Random bases: the generator against its published vectors, sums against bases that are written out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vitrail.kernels.bases import NO_LAYER, able, bases, combine, philox, plain_combine, plain_combine_backward

ONES = 0xFFFFFFFF
# Random123, kat_vectors, philox4x32 with 10 rounds: counter, key, expected
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def spelled_out(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in Python's whole numbers, which have no width."""
    a, b, c, d = counter
    for i in range(10):
        first, second = ((k + i * step) % 2**32 for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        one, two = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (two >> 32) ^ b ^ first, two % 2**32, (one >> 32) ^ d ^ second, one % 2**32
    return a, b, c, d


def explicit(count: int, elements: int, seed: int, factor: int, layer: int = NO_LAYER) -> Tensor:
    """[count, elements] in float64, one number at a time."""
    rows = []
    for basis in range(count):
        words = (
            spelled_out((e, basis // 4, layer, factor), (seed % 2**32, seed >> 32))[basis % 4] for e in range(elements)
        )
        rows.append([((word >> 8) - 2**23) / 2**23 for word in words])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in philox((torch.tensor(counter[0]), *counter[1:]), key)) == expected
    assert spelled_out(counter, key) == expected


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 1, 2**63 - 1])
@pytest.mark.parametrize("layer", [0, 5, NO_LAYER])
def test_bases_are_the_words_of_their_counters(seed: int, layer: int) -> None:
    found = bases(0, 10, 0, 9, seed=seed, factor=2, layer=layer, like=torch.empty(0))
    assert found.dtype == torch.float32
    assert torch.equal(found.double(), explicit(10, 9, seed, 2, layer))


def test_bases_are_uniform_in_their_interval() -> None:
    values = bases(0, 64, 0, 4096, seed=3, factor=0, layer=NO_LAYER, like=torch.empty(0)).double()
    count = values.numel()
    assert -1 <= values.min() < -0.9999 < 0.9999 < values.max() < 1
    # Five standard deviations: of a mean of uniform numbers, and of a mean of their squares (variance 4 / 45).
    assert abs(values.mean()) < 5 * (1 / 3 / count) ** 0.5
    assert abs(values.square().mean() - 1 / 3) < 5 * (4 / 45 / count) ** 0.5
    # Of 2016 pairs of rows, products of 4096 elements have a deviation of 1 / 3 / 64.
    products = (values @ values.T / 4096).fill_diagonal_(0)
    assert products.abs().max() < 5.5 / 3 / 64


def test_bases_differ_by_every_part_of_the_key() -> None:
    like = torch.empty(0)

    def drawn(seed: int = 1, factor: int = 1, layer: int = 1, first: int = 0, start: int = 0) -> bytes:
        return bases(first, 4, start, 50, seed=seed, factor=factor, layer=layer, like=like).numpy().tobytes()

    keys = [{}, {"seed": 2}, {"seed": 1 + 2**32}, {"factor": 2}, {"layer": 2}, {"first": 4}, {"start": 50}]
    assert len({drawn(**key) for key in keys}) == len(keys)


@pytest.mark.parametrize("separate", [False, True])
def test_sums_and_gradients_are_those_of_explicit_bases(separate: bool) -> None:
    layers = torch.tensor([4, 0, 9]) if separate else None
    coefficients = torch.randn(3, 11, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 30, dtype=torch.float64)
    whole = torch.stack([explicit(11, 30, 5, 1, layer) for layer in ([4, 0, 9] if separate else [NO_LAYER] * 3)])
    expected = torch.einsum("lk,lke->le", coefficients, whole)
    found = combine(coefficients, 30, seed=5, factor=1, layers=layers)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    (gradient,) = torch.autograd.grad(found, coefficients, grad)
    (right,) = torch.autograd.grad(expected, coefficients, grad)
    torch.testing.assert_close(gradient, right, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("separate", [False, True])
def test_no_chunk_changes_a_bit(separate: bool) -> None:
    coefficients = torch.randn(3, 37)
    layers = torch.arange(3) if separate else None
    expected = combine(coefficients, 101, seed=1, factor=0, layers=layers)
    for chunk in (20, 63, 404, 1000, 10**6):
        assert torch.equal(combine(coefficients, 101, seed=1, factor=0, layers=layers, chunk=chunk), expected)


@pytest.mark.parametrize("separate", [False, True])
def test_a_layer_alone_is_the_same_bits_as_among_others(separate: bool) -> None:
    coefficients = torch.randn(6, 50)
    layers = torch.arange(6) if separate else None
    together = combine(coefficients, 77, seed=1, factor=0, layers=layers)
    for i in range(6):
        own = None if layers is None else layers[i : i + 1]
        assert torch.equal(combine(coefficients[i : i + 1], 77, seed=1, factor=0, layers=own)[0], together[i])


def test_a_smaller_shape_takes_the_beginning_of_a_larger_one() -> None:
    coefficients = torch.randn(2, 9)
    small, large = (combine(coefficients, size, seed=0, factor=0) for size in (40, 90))
    assert torch.equal(small, large[:, :40])


def test_sums_on_the_meta_device_have_their_shape() -> None:
    made = combine(torch.empty(72, 1000, device="meta"), 10**9, seed=0, factor=0)
    assert made.is_meta
    assert made.shape == (72, 10**9)


def test_a_compiled_sum_is_one_node_with_the_same_bits_and_gradient() -> None:
    coefficients = torch.randn(2, 12, requires_grad=True)

    def loss(c: Tensor) -> Tensor:
        return combine(c, 20, seed=0, factor=0).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found, expected = (torch.autograd.grad(way(coefficients), coefficients)[0] for way in (compiled, loss))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": -1}, "seed of bases"),
        ({"seed": 2**63}, "seed of bases"),
        ({"elements": 2**32}, "elements"),
        ({"elements": 0}, "elements"),
        ({"coefficients": torch.zeros(2, 0)}, "at least one basis"),
        ({"coefficients": torch.zeros(3)}, "at least one basis"),
        ({"layers": torch.arange(3)}, "3 layers are named for 2 rows"),
    ],
)
def test_what_has_no_counter_is_refused(change: dict[str, object], said: str) -> None:
    options = {"coefficients": torch.zeros(2, 4), "elements": 4, "seed": 0, "factor": 0, **change}
    with pytest.raises(ValueError, match=said):
        combine(**options)  # type: ignore[arg-type]


def test_a_cpu_uses_the_plain_twin() -> None:
    coefficients = torch.randn(2, 9)
    assert not able(coefficients)
    assert torch.equal(combine(coefficients, 7, seed=1, factor=0), plain_combine(coefficients, None, 7, 1, 0))


INTERPRETED = """
import torch
from vitrail.kernels import bases_triton
from vitrail.kernels.bases import plain_combine, plain_combine_backward

torch.manual_seed(0)
seed = 2**62 + 2**31 + 5
for layers in (None, torch.arange(5) * 3):
    # With coefficients of 0 and 1 a sum is a basis, and exact in any order.
    unit = torch.eye(5)
    assert torch.equal(bases_triton.combine(unit, layers, 70, seed, 2), plain_combine(unit, layers, 70, seed, 2))
    coefficients, grad = torch.randn(5, 70), torch.randn(5, 130)
    # float32 sums of 70 and 130 terms of about 1: a few times 2^-24 * sqrt(terms) a step, sqrt(terms) steps
    found = bases_triton.combine(coefficients, layers, 130, seed, 1)
    torch.testing.assert_close(found, plain_combine(coefficients, layers, 130, seed, 1), rtol=0, atol=1e-5)
    found = bases_triton.backward(coefficients, grad, layers, seed, 1)
    expected = plain_combine_backward(coefficients, grad, layers, seed, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
print("bases are right")
"""


def test_the_kernel_equals_its_twin_in_the_interpreter(interpreted: Callable[[str], str]) -> None:
    assert "bases are right\n" in interpreted(INTERPRETED)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("seed", [0, 2**62 + 2**31 + 5])
def test_bases_are_the_same_bits_on_the_accelerator(seed: int, separate: bool) -> None:
    unit = torch.eye(70)
    layers = torch.arange(70) if separate else None
    expected = plain_combine(unit, layers, 1000, seed, 3)
    moved = None if layers is None else layers.cuda()
    assert torch.equal(combine(unit.cuda(), 1000, seed=seed, factor=3, layers=moved).cpu(), expected)
    assert torch.equal(plain_combine(unit.cuda(), moved, 1000, seed, 3).cpu(), expected)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(("many", "count", "elements"), [(1, 5, 3), (24, 1000, 5000), (72, 513, 10240)])
def test_the_kernel_equals_its_twin_on_the_accelerator(many: int, count: int, elements: int, separate: bool) -> None:
    coefficients = torch.randn(many, count, device="cuda", requires_grad=True)
    layers = torch.arange(many, device="cuda") * 2 if separate else None
    grad = torch.randn(many, elements, device="cuda")
    found = combine(coefficients, elements, seed=9, factor=1, layers=layers)
    exact = coefficients.detach().double()
    # float32 sums of n terms whose sizes are about 1: n^0.5 * 2^-24 a step of the sum, n steps at random signs
    room = 4 * 2.0**-24
    large = 2**24  # numbers at once: launches are what the twin takes here
    expected = plain_combine(exact, layers, elements, 9, 1, large)
    assert (found.double() - expected).abs().max() < room * count
    (gradient,) = torch.autograd.grad(found, coefficients, grad)
    right = plain_combine_backward(exact, grad.double(), layers, 9, 1, large)
    assert (gradient.double() - right).abs().max() < room * elements
    assert torch.equal(
        gradient,
        torch.autograd.grad(combine(coefficients, elements, seed=9, factor=1, layers=layers), coefficients, grad)[0],
    )


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("separate", [False, True])
def test_a_layer_alone_is_the_same_bits_on_the_accelerator(separate: bool) -> None:
    coefficients = torch.randn(70, 301, device="cuda")
    layers = torch.arange(70, device="cuda") if separate else None
    together = combine(coefficients, 999, seed=1, factor=0, layers=layers)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 30)):
        own = None if layers is None else layers[rows]
        assert torch.equal(combine(coefficients[rows], 999, seed=1, factor=0, layers=own), together[rows])


@pytest.mark.gpu
@gpu
def test_sums_can_be_captured_in_a_graph() -> None:
    coefficients = torch.randn(3, 100, device="cuda")
    layers = torch.arange(3, device="cuda")
    expected = [combine(coefficients, 50, seed=1, factor=0, layers=own) for own in (None, layers)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [combine(coefficients, 50, seed=1, factor=0, layers=own) for own in (None, layers)]
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
