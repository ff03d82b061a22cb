"""How far one attention is from another: a cross entropy of maps, without the maps.

Of every query, with logits s = q kᵀ / √dim of a student and t of a teacher, p = softmax(t):

    cross entropy = logsumexp(s) - Σ p s, with the gradient softmax(s) - p of s; entropy of p = logsumexp(t) - Σ p t

Both run over keys in tiles, so nothing of size tokens x tokens is ever stored; the backward pass computes the tiles
again. Heads of teacher and student may have different widths. No gradient reaches the teacher. What the backward pass
must keep of the teacher is q_t and k_t, or what they are a linear function of (`MadeOf`), which has half their size.

q, k [batch, heads, tokens, dim], q_t, k_t [batch, heads, tokens, dim_t] -> two of [batch, heads, tokens], in float32
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_TRITON = find_spec("triton") is not None


class MadeOf(NamedTuple):
    """The linear layer of x that q_t and k_t come from."""

    x: Tensor  # [batch, tokens, width]
    weight: Tensor  # [2, heads, dim_t, width], of q_t and of k_t
    bias: Tensor | None  # [2, heads, dim_t]

    def parts(self) -> tuple[Tensor, Tensor]:
        """q_t and k_t, [batch, heads, tokens, dim_t], in the precision of x."""
        weight, bias = self.weight, self.bias
        rows = F.linear(
            self.x, weight.flatten(0, 2).to(self.x.dtype), None if bias is None else bias.flatten().to(self.x.dtype)
        )
        q_t, k_t = rows.unflatten(-1, weight.shape[:3]).permute(2, 0, 3, 1, 4).unbind(0)
        return q_t, k_t


def attention_match(
    q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, made_of: MadeOf | None = None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each query's attention with the teacher's, and the teacher's entropy, its least value.

    The kernel where it is able, else its plain twin. With `made_of` the kernel computes q_t and k_t again in its
    backward pass, where their source is smaller than they are.
    """
    if not able(q, k, q_t, k_t):
        return plain_attention_match(q, k, q_t, k_t)
    if made_of is not None and made_of.x.shape[-1] < 2 * q_t.shape[1] * q_t.shape[-1]:
        x = made_of.x.to(q_t.dtype)
        cross, entropy, _, _ = torch.ops.vitrail.attention_match_again(q, k, q_t, k_t, x, made_of.weight, made_of.bias)
    else:
        cross, entropy, _, _ = torch.ops.vitrail.attention_match(q, k, q_t, k_t)
    return cross, entropy


def plain_attention_match(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor) -> tuple[Tensor, Tensor]:
    """The same by PyTorch's own operations, with both maps in memory."""
    with torch.no_grad():
        log_p = _logits(q_t, k_t).log_softmax(-1)
    return map_match(q, k, log_p.exp()), -(log_p.exp() * log_p).sum(-1)


def map_match(q: Tensor, k: Tensor, attention: Tensor) -> Tensor:
    """Cross entropy [batch, heads, tokens] with given maps [batch, heads, tokens, tokens] (averaged or stored ones)."""
    log_q = _logits(q, k).log_softmax(-1)
    return -(attention.detach().to(log_q) * log_q).sum(-1)


def map_entropy(attention: Tensor) -> Tensor:
    """Entropy [...] of every row of maps [..., keys]; 0 log 0 is 0."""
    wide = attention.detach() if attention.dtype == torch.float64 else attention.detach().float()
    return torch.special.entr(wide).sum(-1)


def _logits(q: Tensor, k: Tensor) -> Tensor:
    # A contiguous transpose: the strided product is many times slower on some CPUs.
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1).contiguous()
    return logits if logits.dtype == torch.float64 else logits.float()


def able(*parts: Tensor) -> bool:
    """Whether the kernel takes these tensors: on CUDA, at most 32 bits, heads of at most 128 channels."""
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    return _TRITON and all(x.is_cuda and x.dtype in kinds and x.shape[-1] <= 128 for x in parts)


# Operators are declared here and call Triton when they run: torch.compile can see them without importing it.


@torch.library.custom_op("vitrail::attention_match", mutates_args=(), device_types="cuda")
def _match(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross entropy, entropy, and the base-2 logarithms of the sums of student and teacher for the backward pass."""
    from vitrail.kernels import attention_match_triton

    return attention_match_triton.forward(q, k, q_t, k_t)


@torch.library.custom_op("vitrail::attention_match_backward", mutates_args=(), device_types="cuda")
def _match_backward(
    q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, lse: Tensor, lse_t: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of q and k."""
    from vitrail.kernels import attention_match_triton

    return attention_match_triton.backward(q, k, q_t, k_t, lse, lse_t, grad.contiguous())


# The same with the teacher's q and k computed again in the backward pass. One operator, not a recomputation that a
# compiler can see: it would notice that both are the same and keep them after all.


@torch.library.custom_op("vitrail::attention_match_again", mutates_args=(), device_types="cuda")
def _match_again(
    q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `attention_match`."""
    from vitrail.kernels import attention_match_triton

    return attention_match_triton.forward(q, k, q_t, k_t)


@torch.library.custom_op("vitrail::attention_match_again_backward", mutates_args=(), device_types="cuda")
def _match_again_backward(
    q: Tensor, k: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, lse: Tensor, lse_t: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of q and k."""
    from vitrail.kernels import attention_match_triton

    return attention_match_triton.backward(q, k, *MadeOf(x, weight, bias).parts(), lse, lse_t, grad.contiguous())


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.inputs = len(inputs)
    kept = inputs if len(inputs) == 4 else (*inputs[:2], *inputs[4:])  # q_t and k_t, or their source
    ctx.save_for_backward(*kept, *output[2:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * ctx.inputs
    backward = _match_backward if ctx.inputs == 4 else _match_again_backward
    return *backward(*ctx.saved_tensors, grad), *(None,) * (ctx.inputs - 2)


_match.register_autograd(_gradient, setup_context=_save)
_match_again.register_autograd(_gradient, setup_context=_save)


def _rows(q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = [q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(4)]
    return rows[0], rows[1], rows[2], rows[3]


def _gradients(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


for forward in (_match, _match_again):
    forward.register_fake(_rows)
for backward in (_match_backward, _match_again_backward):
    backward.register_fake(_gradients)
