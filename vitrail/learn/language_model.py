"""Causal language modelling: the next token of a completion, given its prompt and the tokens before it.

texts [batch, 3, length] as `vitrail.data.tokenizer` makes them: segment 1 is what is learned
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.learn.config import LanguageModelConfig
from vitrail.learn.objective import Objective
from vitrail.model.classifier import Classifier
from vitrail.model.heads.next_token import NextTokenHead, completion_logits


class LanguageModel(Objective):
    """Mean cross entropy over the tokens of completions, of each piece where a batch is computed in pieces.

    Raises `ValueError` for a model without the head `next_token`.
    """

    host_decision = "the number of tokens that a batch learns changes from step to step"

    def __init__(self, model: Classifier, config: LanguageModelConfig) -> None:
        super().__init__()
        if not isinstance(model.head, NextTokenHead):
            raise ValueError("objective language_model trains a model that writes; use --model.head next_token")
        self.model, self.config = model, config

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        logits, target = completion_logits(self.model, batch.images)
        if not self.config.smoothing:
            return {"loss": F.cross_entropy(logits, target)}
        likelihood = logits.log_softmax(-1)
        nll = F.nll_loss(likelihood, target)
        share = self.config.smoothing
        return {"loss": (1 - share) * nll - share * likelihood.mean(), "unsmoothed": nll.detach()}
