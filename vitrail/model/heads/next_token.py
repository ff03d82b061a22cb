"""Hidden states to the next word: the head of a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.config import TrunkConfig
from vitrail.model.heads.config import NextToken
from vitrail.model.heads.head import Head
from vitrail.model.parts.tokens import Tokens

if TYPE_CHECKING:
    from vitrail.model.trunks.text_trunk import TextTrunk

CHANGED = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # what some architectures do with their logits


class NextTokenHead(Head):
    """Logits of the whole vocabulary, by a matrix of its own or, where the architecture says so, by the embeddings.

    Words come from pre-training as the trunk does, so an adapter leaves them as they are. Raises `ValueError` for
    architectures that read both ways or change their logits.
    """

    prefix = 1
    begins_anew = False

    @classmethod
    def build(cls, config: Any, width: int, classes: int, trunk: TrunkConfig | None = None) -> Head:
        raise ValueError("the head next_token is for texts; use it with --model.name text:gpt or text:FOLDER")

    def __init__(self, config: NextToken, trunk: TextTrunk) -> None:
        super().__init__()
        backbone = cast("Any", trunk.backbone)
        described, name = backbone.config, trunk.config.name
        if trunk.config.class_token != "last":
            raise ValueError(f"text:{name} reads both ways, so it cannot write; use one like GPT-2 with next_token")
        for option in CHANGED:
            if getattr(described, option, None) not in (None, 1, 1.0):
                raise ValueError(f"text:{name} has {option}, which the head next_token does not know; use another one")
        self.config, self.features, self.words = config, trunk.width, int(described.vocab_size)
        embeddings: nn.Embedding = backbone.get_input_embeddings()
        tied = bool(getattr(described, "tie_word_embeddings", True))
        # Inside a tuple it is no part of this module: it is counted, stored and moved once, with the trunk.
        self.tied: tuple[nn.Embedding, ...] = (embeddings,) if tied else ()
        self.fc = None if tied else nn.Linear(trunk.width, self.words, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.fc is not None:
            nn.init.normal_(self.fc.weight, std=0.02)

    @property
    def table(self) -> nn.Parameter:
        """[words, width]"""
        return self.tied[0].weight if self.fc is None else self.fc.weight  # type: ignore[return-value]

    def project(self, states: Tensor) -> Tensor:
        """Logits [..., words] of the words that follow states [..., width]."""
        return F.linear(states, self.table) if self.fc is None else self.fc(states)

    def embed(self, tokens: Tokens) -> Tensor:
        return tokens.sequence[:, 0]

    def forward(self, tokens: Tokens) -> Tensor:
        """[batch, 1, words] after the last word of each text."""
        return self.project(self.embed(tokens))[:, None]
