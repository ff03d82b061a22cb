"""What Triton makes of our kernels for a Hopper GPU, read on any machine: no tile is overwritten while it is read.

Loops over tiles load ahead. A product on Hopper's tensor cores goes on while the next step of the loop begins, so a
tile that it reads needs as many copies as the loop has stages. Of tiles that are also added up, Triton (3.6 to 3.9)
keeps one copy less, and the next load overwrites one that is still read: results are wrong now and then, and more often
while something else keeps the GPU busy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from small import quick_of

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)
compiler = pytest.importorskip("triton.backends.compiler")
jit = pytest.importorskip("triton.runtime.jit")

from vitrail.kernels import (  # noqa: E402
    attention_match_triton,
    attention_triton,
    ragged_attention_triton,
    sima_attention_triton,
    token_merge_triton,
)

Kernel = Callable[[int, int, torch.dtype], None]


class Made(NamedTuple):
    """A compiled kernel."""

    name: str
    stages: int
    text: str  # Triton's last form before that of LLVM


class Hopper:
    """A driver for a device that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return compiler.GPUTarget("cuda", 90, 32)


def forget() -> None:
    """What was compiled for another device."""
    for module in (
        attention_match_triton,
        attention_triton,
        ragged_attention_triton,
        sima_attention_triton,
        token_merge_triton,
    ):
        for value in vars(module).values():
            if isinstance(value, jit.JITFunction):
                value.device_caches.clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Made]]:
    """Kernels that are compiled in the test, none of which is run."""
    found: list[Made] = []
    run = jit.JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append(Made(self.fn.__name__, kernel.metadata.num_stages, kernel.asm["ttgir"]))

    monkeypatch.setattr(jit.JITFunction, "run", compiled)
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    forget()
    yield found
    forget()


def overwritten(kernel: Made) -> list[str]:
    """Tiles in shared memory that may be loaded again while a product reads them."""
    copies = {
        name: int(count) for name, count in re.findall(r"%(\w+) = ttg\.local_alloc : \(\) -> \S+<(\d+)x", kernel.text)
    }
    views = dict(re.findall(r"%(\w+) = ttg\.memdesc_(?:index|trans|subview) %(\w+)", kernel.text))
    found = []
    for names, pending in re.findall(r"warp_group_dot_wait ([^{]*)\{pendings = (\d+)", kernel.text):
        for name in re.findall(r"%(\w+)", names) if int(pending) else ():
            while name in views:
                name = views[name]  # noqa: PLW2901
            if name in copies and copies[name] < kernel.stages:
                found.append(f"{kernel.name}: {name} has {copies[name]} copies in {kernel.stages} stages")
    return found


def of_sima(tokens: int, dim: int, dtype: torch.dtype) -> None:
    qkv = torch.zeros(2, tokens, 3, 2, dim, dtype=dtype)
    for ahead in (False, True):
        sima_attention_triton.forward(qkv, ahead=ahead)
        sima_attention_triton.backward(qkv, torch.zeros(2, tokens, 2, dim, dtype=dtype), ahead=ahead)


def of_ragged_sima(tokens: int, dim: int, dtype: torch.dtype) -> None:
    qkv, offsets = torch.zeros(2 * tokens, 3, 2, dim, dtype=dtype), torch.tensor([0, tokens, 2 * tokens])
    sima_attention_triton.forward(qkv, offsets)
    sima_attention_triton.backward(qkv, torch.zeros(2 * tokens, 2, dim, dtype=dtype), offsets)


def of_attention(tokens: int, dim: int, dtype: torch.dtype) -> None:
    qkv = torch.zeros(2, tokens, 3, 2, dim, dtype=dtype)
    out, lse = attention_triton.forward(qkv)
    attention_triton.backward(qkv, out, lse, out)


def of_sized_attention(tokens: int, dim: int, dtype: torch.dtype) -> None:
    attention_triton.forward(torch.zeros(2, tokens, 3, 2, dim, dtype=dtype), torch.ones(2, tokens))


def of_merging(tokens: int, dim: int, dtype: torch.dtype) -> None:
    x = torch.zeros(2, tokens, 3 * dim, dtype=dtype)
    slots, _ = token_merge_triton.match(torch.zeros(2, 3, tokens, dim, dtype=dtype), None, tokens // 4, 1)
    for size in (None, torch.ones(2, tokens)):
        token_merge_triton.merge(x, x, size, slots, tokens - tokens // 4)


def of_match(tokens: int, dim: int, dtype: torch.dtype) -> None:
    q, k, teacher = (torch.zeros(2, 2, tokens, dim, dtype=dtype) for _ in range(3))
    _, _, lse, lse_t = attention_match_triton.forward(q, k, teacher, teacher)
    attention_match_triton.backward(q, k, teacher, teacher, lse, lse_t, torch.zeros(2, 2, tokens))


def of_ragged(tokens: int, dim: int, dtype: torch.dtype) -> None:
    qkv, offsets = torch.zeros(2 * tokens, 3, 2, dim, dtype=dtype), torch.tensor([0, tokens, 2 * tokens])
    out, lse = ragged_attention_triton.forward(qkv, offsets, None, None, tokens)
    ragged_attention_triton.backward(qkv, out, lse, out, offsets, None, None, tokens)


SIZES = ((197, 64), (577, 32), (577, 128))  # tokens, channels of a head
CALLS = (of_sima, of_ragged_sima, of_ragged, of_match)
SHORT = (of_attention, of_sized_attention, of_merging)  # kernels of at most 256 tokens
CASES = [*((c, *size) for c in CALLS for size in SIZES), *((c, tokens, 64) for c in SHORT for tokens in (65, 197))]
QUICK = [*((c, 197, 64) for c in CALLS), (of_attention, 65, 64), (of_merging, 197, 64)]  # every kernel, usual size


@pytest.mark.parametrize(("call", "tokens", "dim"), quick_of(CASES, QUICK))
def test_no_tile_is_overwritten_while_a_product_reads_it(call: Kernel, tokens: int, dim: int, made: list[Made]) -> None:
    call(tokens, dim, torch.bfloat16)
    assert made
    assert [line for kernel in made for line in overwritten(kernel)] == []
