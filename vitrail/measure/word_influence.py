"""Influence of words on a prediction: gradient times input, token by token.

A stand-in for the relevance methods of SoT (Xie et al. 2021, arXiv 2104.10935, supplement E): the gradient of one logit
with respect to the word embeddings, times those embeddings, summed over the width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from vitrail.measure.evaluator import evaluation_mode
from vitrail.model.classifier import Classifier
from vitrail.model.heads.second_order import SecondOrderHead
from vitrail.model.parts.tokens import Tokens

CLASS, WORDS, BOTH = "class token", "words", "both"


def word_influence(model: Classifier, texts: Tensor, chosen: Tensor | None = None) -> dict[str, Tensor]:
    """[texts, length] influence of each token on the logit of `chosen` [texts] (none: of the class that is predicted).

    `texts` are [texts, 3, length], as a text model takes them. Of a second-order head that adds two classifiers: by the
    class token's alone, by the words' alone and by both, which is their sum; of any other head `both` alone.
    """
    seen: list[Tensor] = []

    def keep(_: Any, __: Any, out: Tensor) -> Tensor:
        seen.append(out.detach().requires_grad_())
        return seen[-1]

    table = cast("Any", model.trunk).backbone.get_input_embeddings()
    handle = table.register_forward_hook(keep)
    try:
        with evaluation_mode(model), torch.enable_grad():
            tokens = model.tokens(texts)
            logits = model.fused(model.head(tokens))
            chosen = logits.argmax(1) if chosen is None else chosen
            found = {}
            for name, part in _parts(model).items():
                value = part(tokens).gather(1, chosen[:, None]).sum()
                (gradient,) = torch.autograd.grad(value, seen[0], retain_graph=True)
                found[name] = (gradient * seen[0]).sum(-1).detach()
    finally:
        handle.remove()
    return found


def _parts(model: Classifier) -> dict[str, Callable[[Tokens], Tensor]]:
    head = model.head

    def both(tokens: Tokens) -> Tensor:
        return model.fused(head(tokens))

    if not isinstance(head, SecondOrderHead) or head.config.fusion != "sum":
        return {BOTH: both}

    def part(place: int) -> Callable[[Tokens], Tensor]:
        def logits(tokens: Tokens) -> Tensor:
            vector, layer = head._vectors(tokens)[place], (head.fc, head.fc_words)[place]
            assert vector is not None
            assert layer is not None
            return cast("Tensor", layer(vector.to(layer.weight.dtype)))

        return logits

    return {CLASS: part(0), WORDS: part(1), BOTH: both}
