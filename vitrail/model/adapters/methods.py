"""The methods: what each adapter trains, and how weights change by it. LoRA, NOLA, PRANC, and visual prompts (VPT).

Changes of weights are grouped: all matrices of one shape have their parameters in one tensor, so that one call
generates the random bases of all of them. Coefficients can be rounded to few bits: integers and one scale per layer,
symmetric around 0. NOLA quantises its coefficients but does not specify the quantiser; here the largest magnitude of a
row becomes 2^(bits - 1) - 1, so that 0 stays 0: with 2 bits there are -1, 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.kernels.bases import NO_LAYER, bases, combine
from vitrail.model.adapters.config import Lora, Nola, Pranc
from vitrail.model.parts.tokens import Tokens

NOLA_UP, NOLA_DOWN, PRANC_WEIGHT, NOLA_START = range(4)  # words of the random counter


def to_integers(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """values [layers, ...] as integers of `bits` bits, int8, and the scale of each layer [layers, 1, ...].

    Raises `ValueError` outside of 2 to 8 bits.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"coefficients are quantised to 2 to 8 bits, not {bits}")
    most = 2 ** (bits - 1) - 1
    scale = values.detach().abs().amax(tuple(range(1, values.ndim)), keepdim=True) / most
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (values.detach() / scale).round().clamp(-most, most).to(torch.int8), scale


def rounded(values: Tensor, bits: int) -> Tensor:
    """The nearest values that can be stored in `bits` bits each."""
    integers, scale = to_integers(values, bits)
    return integers * scale


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, bits: int) -> Tensor:
        return rounded(values, bits)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(values: Tensor, bits: int | None) -> Tensor:
    """Rounded values whose gradient is that of the values themselves; without `bits`, the values."""
    return values if bits is None else _StraightThrough.apply(values, bits)


class LowRank(NamedTuple):
    """A change up @ down of a weight, in float32; every scale is in `up`."""

    up: Tensor  # [outputs, rank]
    down: Tensor  # [rank, inputs]

    def matrix(self) -> Tensor:
        return self.up @ self.down


Change = LowRank | Tensor  # [outputs, inputs] where it has no factors


class AdapterGroup(nn.Module):
    """Matrices of one shape under one configuration. Row i of every parameter belongs to matrix i.

    `first` is the number of the first matrix in its adapter.
    """

    layers: Tensor | None  # numbers of the matrices, where each has its own bases

    def __init__(self, config: Any, shape: tuple[int, int], count: int, first: int, device: torch.device) -> None:
        super().__init__()
        self.config, self.shape, self.first = config, shape, first
        if not isinstance(config, Lora):  # with another seed the coefficients mean nothing
            self.register_buffer("stored_seed", torch.tensor(config.seed))
            shared = isinstance(config, Nola) and config.shared
            numbers = None if shared else torch.arange(first, first + count, device=device)
            self.register_buffer("layers", numbers, persistent=False)

    def changes(self, rows: slice = slice(None)) -> list[Change]:
        """The changes of all matrices, or of some: those of one alone are the same bits as among all."""
        raise NotImplementedError

    def combined(self, coefficients: Tensor, rows: slice, factor: int, *shape: int) -> Tensor:
        """Sums of random bases [rows, *shape], generated where they are summed and never stored."""
        layers = None if self.layers is None else self.layers[rows]
        coefficients = straight_through(coefficients[rows], self.config.bits)
        sums = combine(coefficients, math.prod(shape), seed=self.config.seed, factor=factor, layers=layers)
        return sums.unflatten(1, shape)

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        stored = state.get(f"{prefix}stored_seed")
        if stored is not None and int(stored) != (seed := getattr(self.config, "seed", int(stored))):
            raise ValueError(
                f"these coefficients belong to bases of seed {int(stored)}, this adapter's have seed {seed}; apply"
                f" it with seed {int(stored)}"
            )
        super()._load_from_state_dict(state, prefix, *rest)


class LoraGroup(AdapterGroup):
    """LoRA: both factors are trained (Hu et al. 2021, arXiv 2106.09685).

    up [matrices, outputs, rank] starts at 0, down [matrices, rank, inputs] uniform as a linear layer does.
    """

    config: Lora

    def __init__(self, config: Lora, shape: tuple[int, int], count: int, first: int, device: torch.device) -> None:
        super().__init__(config, shape, count, first, device)
        self.up = nn.Parameter(torch.empty(count, shape[0], config.rank, device=device))
        self.down = nn.Parameter(torch.empty(count, config.rank, shape[1], device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.up)
        bound = 1 / math.sqrt(self.shape[1])
        nn.init.uniform_(self.down, -bound, bound)

    def changes(self, rows: slice = slice(None)) -> list[Change]:
        bits = self.config.bits
        up = straight_through(self.up[rows], bits) * (self.config.scale / self.config.rank)
        # Unbound, not indexed: the gradient then comes back as one stack, not as a sum of mostly empty ones.
        return [LowRank(*pair) for pair in zip(up, straight_through(self.down[rows], bits).unbind(0), strict=True)]


class NolaGroup(AdapterGroup):
    """NOLA: both factors are sums of random bases, of which only the coefficients are trained.

    Koohpayegani et al. 2024, arXiv 2310.02556. The paper does not specify distribution, scale and initial values, and
    its three public versions contradict each other. Here bases are uniform, and scaled such that coefficients of
    variance 1 make a factor whose rows have the gain of a fresh linear layer: variance 1 / rank for A, 1 / inputs for
    B. A starts so, B at 0. No frozen offset is added to the sums.

    alpha [matrices, k] for A [outputs, rank], beta [matrices, l] for B [rank, inputs].
    """

    config: Nola

    def __init__(self, config: Nola, shape: tuple[int, int], count: int, first: int, device: torch.device) -> None:
        super().__init__(config, shape, count, first, device)
        k, l = config.coefficients, config.coefficients_in or config.coefficients  # noqa: E741
        self.alpha = nn.Parameter(torch.empty(count, k, device=device))
        self.beta = nn.Parameter(torch.empty(count, l, device=device))
        self.up_scale = config.scale / config.rank * math.sqrt(3 / (k * config.rank))
        self.down_scale = math.sqrt(3 / (l * shape[1]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.beta)
        if self.alpha.is_meta:
            return
        count, k = self.alpha.shape
        like = torch.empty(0, dtype=torch.float32)
        start = bases(0, k, self.first, count, seed=self.config.seed, factor=NOLA_START, layer=NO_LAYER, like=like)
        with torch.no_grad():
            self.alpha.copy_(start.T * math.sqrt(3))

    def changes(self, rows: slice = slice(None)) -> list[Change]:
        rank, (outputs, inputs) = self.config.rank, self.shape
        up = self.combined(self.alpha, rows, NOLA_UP, outputs, rank) * self.up_scale
        down = self.combined(self.beta, rows, NOLA_DOWN, rank, inputs) * self.down_scale
        return [LowRank(*pair) for pair in zip(up.unbind(0), down.unbind(0), strict=True)]


class PrancGroup(AdapterGroup):
    """PRANC: the change of a weight is a sum of random bases of the size of the weight.

    Nooralinejad et al. 2023, arXiv 2206.08464. Every layer has its own bases, as parts of one long random vector would
    be. Coefficients start at 0; bases are scaled such that coefficients of variance 1 make a weight of variance
    1 / inputs. alpha [matrices, coefficients] for a weight [outputs, inputs].
    """

    config: Pranc

    def __init__(self, config: Pranc, shape: tuple[int, int], count: int, first: int, device: torch.device) -> None:
        super().__init__(config, shape, count, first, device)
        self.alpha = nn.Parameter(torch.empty(count, config.coefficients, device=device))
        self.scale = math.sqrt(3 / (config.coefficients * shape[1]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.alpha)

    def changes(self, rows: slice = slice(None)) -> list[Change]:
        return list((self.combined(self.alpha, rows, PRANC_WEIGHT, *self.shape) * self.scale).unbind(0))


GROUPS: dict[str, type[AdapterGroup]] = {"lora": LoraGroup, "nola": NolaGroup, "pranc": PrancGroup}


class Prompts(nn.Module):
    """Visual prompts: learned tokens next to the patches of a trunk (VPT, Jia et al. 2022, arXiv 2203.12119).

    They have no positions, come between class tokens and patches and leave before the final norm: no head sees them.
    values [layers, count, width]. One layer (shallow): they enter before the first block, and what becomes of them goes
    on through the others. One layer per block (deep): before every block their places are filled anew. `tokens.LAYER`
    is captured without them. q, k, v and maps have places for them, rows that sum to 1 only with these, so they are
    neither shown nor replaced. `drop` is dropout in training, `bits` rounds (none: not).
    """

    def __init__(
        self, layers: int, count: int, width: int, patch: int, drop: float = 0.0, bits: int | None = None
    ) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(layers, count, width))
        self.bound = math.sqrt(6 / (3 * patch**2 + width))  # Xavier's, as if they came out of the patch embedding
        self.drop, self.bits = drop, bits
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.values, -self.bound, self.bound)

    @property
    def count(self) -> int:
        return int(self.values.shape[1])

    @property
    def deep(self) -> bool:
        return len(self.values) > 1

    def enter(self, tokens: Tokens) -> Tokens:
        """Before the first block. While they are among the tokens, they count as part of the prefix."""
        assert tokens.mask is None  # only adaptive policies mask or pack, and these take no prompts
        assert tokens.offsets is None
        return self._among(tokens, self._filled(tokens, 0))

    def renew(self, tokens: Tokens, layer: int) -> Tokens:
        """Before another block: filled anew where that one has its own, otherwise as the last one left them."""
        return self._among(self.leave(tokens), self._filled(tokens, layer)) if self.deep else tokens

    def leave(self, tokens: Tokens) -> Tokens:
        """The tokens without them."""
        x, prefix = tokens.sequence, tokens.prefix - self.count
        return replace(tokens, sequence=torch.cat([x[:, :prefix], x[:, tokens.prefix :]], 1), prefix=prefix)

    def shown(self, tokens: Tokens) -> tuple[Tensor, Tokens]:
        """Captured tokens of a layer, and the same made of these: gradients by what is captured are asked for."""
        bare = self.leave(tokens)
        return bare.sequence, self._among(bare, tokens.sequence[:, bare.prefix : tokens.prefix])

    def _filled(self, tokens: Tokens, layer: int) -> Tensor:
        values = straight_through(self.values[layer : layer + 1], self.bits).expand(len(tokens.sequence), -1, -1)
        return F.dropout(values, self.drop, self.training).to(tokens.sequence.dtype)

    def _among(self, tokens: Tokens, values: Tensor) -> Tokens:
        x, prefix = tokens.sequence, tokens.prefix
        x = torch.cat([x[:, :prefix], values, x[:, prefix:]], 1)
        return replace(tokens, sequence=x, prefix=prefix + self.count)

    @staticmethod
    def reject(want: Iterable[str], given: Mapping[str, object]) -> None:
        """Raises `ValueError` for intermediates that have places for prompts."""
        odd = [name for name in want if not name.startswith("tokens.")]
        odd += [name for name in given if not name.startswith("keep.")]
        if odd:
            raise ValueError(
                f"{', '.join(sorted(odd))}: a trunk with prompts shows tokens.LAYER alone and lets nothing be replaced"
                " (its q, k, v and maps have places for prompts); take a model without prompts"
            )
