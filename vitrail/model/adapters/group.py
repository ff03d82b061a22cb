"""Base class of adapter groups: the trained parameters of all layers of one shape, and the weight changes they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.model.adapters.targets import Piece


class LowRank(NamedTuple):
    """A change up @ down of a weight, in float32; every scale is in `up`."""

    up: Tensor  # [outputs, rank]
    down: Tensor  # [rank, inputs]

    def matrix(self) -> Tensor:
        return self.up @ self.down


class Dense(NamedTuple):
    """A change as a matrix [outputs, inputs], in float32."""

    whole: Tensor

    def matrix(self) -> Tensor:
        return self.whole


Change = LowRank | Dense


class Group(nn.Module):
    """Pieces of one shape under one configuration. Row i of every parameter belongs to piece i."""

    seed: int | None = None

    def __init__(self, pieces: Sequence[Piece], first: int) -> None:
        super().__init__()
        self.pieces = tuple(pieces)
        self.shape = pieces[0].shape
        self.first = first  # number of the first piece in its adapter

    def reset_parameters(self) -> None:
        """The start, at which no weight is changed."""
        raise NotImplementedError

    def changes(self, rows: slice = slice(None)) -> list[Change]:
        """The changes of all pieces, or of some: those of one alone are the same bits as among all."""
        raise NotImplementedError

    def remember_seed(self, seed: int) -> None:
        """Keep the seed beside the coefficients: with another one they mean nothing."""
        self.seed = seed
        self.register_buffer("stored_seed", torch.tensor(seed))

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        stored = state.get(f"{prefix}stored_seed")
        if self.seed is not None and stored is not None and int(stored) != self.seed:
            raise ValueError(
                f"these coefficients belong to bases of seed {int(stored)}, this adapter's have seed {self.seed}; apply"
                f" it with seed {int(stored)}"
            )
        super()._load_from_state_dict(state, prefix, *rest)
