"""Random bases that are a function of integers, and sums of them that never hold a basis in memory.

Number `element` of basis `basis` is word `basis % 4` of one Philox4x32-10 call (Salmon et al. 2011, the generator of
Random123) with

    counter (element, basis // 4, layer, factor)    key (low and high half of the seed)

so four bases come out of one call. The upper 24 bits of the word, taken as a whole number from -2²³ to 2²³ - 1, times
2⁻²³: uniform in [-1, 1), each value exact in float32. Only whole numbers are computed until then, so bases are the same
bits on any device, in any chunk, under any version. `layer` is in the counter for a layer's own bases; bases that
layers share have `NO_LAYER` there. A smaller shape takes the beginning of a larger one.

Sums of them are float32. An element's sum runs over the bases in a fixed order, whatever the chunk and whichever other
elements or layers are computed with it: the plain twin multiplies, rounds, adds and rounds, basis after basis; the
kernel adds tile after tile, in the order that a tile of fixed size has. So weights are the same bits on one device; two
devices agree to rounding.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
NO_LAYER = WORD
"""In place of the layer: bases that all layers share."""
CHUNK = 2**16
"""Numbers of bases that the plain twin has in memory at once: as many as stay in a cache."""
_TRITON = find_spec("triton") is not None


def philox(
    counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], key: tuple[int, int]
) -> list[Tensor]:
    """Philox4x32-10: four words of a counter, which are broadcast together, to four random ones, int64 tensors.

    >>> [hex(int(word)) for word in philox((torch.tensor(0), 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    a, b, c, d = (word if isinstance(word, Tensor) else torch.tensor(word) for word in counter)
    first, second = key
    for _ in range(ROUNDS):
        a_high, a_low = _product(a, MULTIPLIERS[0])
        c_high, c_low = _product(c, MULTIPLIERS[1])
        a, b, c, d = c_high ^ b ^ first, c_low, a_high ^ d ^ second, a_low
        first, second = (first + KEY_STEPS[0]) & WORD, (second + KEY_STEPS[1]) & WORD
    return list(torch.broadcast_tensors(a, b, c, d))


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Upper and lower half of word * multiplier.

    By multiplier - 2³², which is above -2³⁰: the product then stays within int64, and `word` is what the upper half
    lacks.
    """
    short = word * (multiplier - 2**32)
    return (short >> 32) + word, short & WORD


def bases(
    first: int, count: int, start: int, elements: int, *, seed: int, factor: int, layer: int, like: Tensor
) -> Tensor:
    """Bases `first` (a multiple of 4) to first + count, elements from `start` on: [count, elements], as `like`."""
    device = like.device
    element = torch.arange(start, start + elements, device=device)
    group = torch.arange(first // 4, (first + count + 3) // 4, device=device)[:, None]
    layer_word, factor_word = torch.tensor([layer, factor], device=device).unbind(0)
    words = philox((element, group, layer_word, factor_word), (seed & WORD, seed >> 32))
    whole = torch.stack(words, 1).flatten(0, 1)[:count]  # [groups, 4, elements]: four bases of each call in turn
    return ((whole >> 8) - 2**23).to(like.dtype) * 2.0**-23


def combine(
    coefficients: Tensor, elements: int, *, seed: int, factor: int, layers: Tensor | None = None, chunk: int = CHUNK
) -> Tensor:
    """Sums of random bases: coefficients [layers, bases] -> [layers, elements], float32 (float64 for such).

    `layers` [layers] are whole numbers, one per row, that give every row its own bases; without it all rows share
    theirs, which are then generated once. `chunk` changes memory and time, not a bit of the sums. The backward pass
    generates the bases again; the gradient of a coefficient is the product of its basis and the incoming gradient.
    Raises `ValueError` for a seed, an element or a coefficient that has no counter.
    """
    if coefficients.ndim != 2 or not coefficients.shape[1]:
        raise ValueError(f"coefficients are [layers, bases] with at least one basis, not {list(coefficients.shape)}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"a seed of bases is a whole number from 0 to 2^63 - 1, not {seed}")
    if not 0 < elements <= WORD:
        raise ValueError(f"a basis has 1 to 2^32 - 1 elements, not {elements:,}; adapt smaller layers")
    if layers is not None and len(layers) != len(coefficients):
        raise ValueError(f"{len(layers)} layers are named for {len(coefficients)} rows of coefficients")
    if coefficients.dtype != torch.float64:
        coefficients = coefficients.float()
    out: Tensor = torch.ops.vitrail.combine(coefficients, layers, elements, seed, factor, max(chunk, 4))
    return out


def able(coefficients: Tensor) -> bool:
    """Whether the kernel takes these coefficients: on CUDA, in float32."""
    return _TRITON and coefficients.is_cuda and coefficients.dtype == torch.float32


def plain_combine(
    coefficients: Tensor, layers: Tensor | None, elements: int, seed: int, factor: int, chunk: int = CHUNK
) -> Tensor:
    """`combine` by PyTorch's own operations."""
    out = coefficients.new_zeros(len(coefficients), elements)
    for rows, layer in _alike(coefficients, layers):
        for basis, start, part in _parts(coefficients, elements, seed, factor, layer, chunk):
            sums = out[rows, start : start + part.shape[1]]
            for i, values in enumerate(part):
                # Two operations: `addcmul` may round once or twice, by the position of an element in its vector.
                sums.add_(coefficients[rows, basis + i, None] * values)
    return out


def plain_combine_backward(
    coefficients: Tensor, grad: Tensor, layers: Tensor | None, seed: int, factor: int, chunk: int = CHUNK
) -> Tensor:
    """The gradient of the coefficients, from grad [layers, elements]."""
    sums = torch.zeros_like(coefficients)
    for rows, layer in _alike(coefficients, layers):
        for basis, start, part in _parts(coefficients, grad.shape[1], seed, factor, layer, chunk):
            sums[rows, basis : basis + len(part)] += grad[rows, start : start + part.shape[1]] @ part.T
    return sums


def _alike(coefficients: Tensor, layers: Tensor | None) -> list[tuple[slice, int]]:
    """Rows that have the same bases, and the layer word of these."""
    if layers is None:
        return [(slice(0, len(coefficients)), NO_LAYER)]
    return [(slice(i, i + 1), int(layer)) for i, layer in enumerate(layers.tolist())]


def _parts(coefficients: Tensor, elements: int, seed: int, factor: int, layer: int, chunk: int) -> Any:
    """(first basis, first element, [bases, elements]) of every chunk; for one element, bases come in their order."""
    count = coefficients.shape[1]
    wide = min(elements, max(1, chunk // 4))
    many = max(4, chunk // wide // 4 * 4)
    for start in range(0, elements, wide):
        length = min(wide, elements - start)
        for basis in range(0, count, many):
            here = min(many, count - basis)
            part = bases(basis, here, start, length, seed=seed, factor=factor, layer=layer, like=coefficients)
            yield basis, start, part


# Operators on every device: torch.compile sees one node, not a loop over bases. Triton is imported when one runs on it.


@torch.library.custom_op("vitrail::combine", mutates_args=())
def _combine(coefficients: Tensor, layers: Tensor | None, elements: int, seed: int, factor: int, chunk: int) -> Tensor:
    if able(coefficients):
        from vitrail.kernels import bases_triton

        return bases_triton.combine(coefficients.contiguous(), layers, elements, seed, factor)
    return plain_combine(coefficients, layers, elements, seed, factor, chunk)


@torch.library.custom_op("vitrail::combine_backward", mutates_args=())
def _combine_backward(
    coefficients: Tensor, grad: Tensor, layers: Tensor | None, seed: int, factor: int, chunk: int
) -> Tensor:
    if able(coefficients):
        from vitrail.kernels import bases_triton

        return bases_triton.backward(coefficients, grad.contiguous(), layers, seed, factor)
    return plain_combine_backward(coefficients, grad, layers, seed, factor, chunk)


_combine.register_fake(lambda rows, layers, elements, *_: rows.new_empty(len(rows), elements))
_combine_backward.register_fake(lambda coefficients, *_: torch.empty_like(coefficients))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None, int, int, int, int], output: Tensor) -> None:
    coefficients, layers, _, *ctx.rest = inputs
    ctx.save_for_backward(coefficients, *(() if layers is None else (layers,)))


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
    coefficients, *layers = ctx.saved_tensors
    return _combine_backward(coefficients, grad, layers[0] if layers else None, *ctx.rest), None, None, None, None, None


_combine.register_autograd(_gradient, setup_context=_save)
