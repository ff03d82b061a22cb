"""Targets of a sequence model, written token by token: greedy, or by beam search."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.model.seq2seq import SequenceResMlp


@torch.no_grad()
def translate(
    model: SequenceResMlp,
    project: Callable[[Tensor], Tensor],
    source: Tensor,
    most: int,
    beams: int = 1,
    length_penalty: float = 1.0,
) -> Tensor:
    """The likeliest targets found for sources [batch, length] that end with an end mark: [batch, tokens], padded.

    `project` makes logits of states. At most `most` tokens, the end mark included. Beams are compared by the sum of log
    probabilities over their length to the power of `length_penalty`, as those of transformers.
    """
    config, batch = model.config, len(source)
    memory, there = (t.repeat_interleave(beams, 0) for t in model.encode(source))
    ids = torch.full((batch * beams, 1), config.eos_token_id, dtype=torch.int64, device=source.device)
    scores = torch.full((batch, beams), float("-inf"), device=source.device)
    scores[:, 0] = 0  # all beams are the same at first
    first = torch.arange(batch, device=source.device)[:, None] * beams
    done = torch.zeros(batch * beams, dtype=torch.bool, device=source.device)
    for _ in range(most):
        chances = project(model.decode(ids, memory, there)[:, -1]).float().log_softmax(-1)
        chances[:, config.pad_token_id] = float("-inf")
        ended = torch.full_like(chances, float("-inf"))
        ended[:, config.pad_token_id] = 0.0
        total = scores.view(-1, 1) + torch.where(done[:, None], ended, chances)
        best = total.view(batch, -1).topk(beams, dim=1)
        scores, token = best.values, (best.indices % config.vocab_size).flatten()
        origin = (best.indices // config.vocab_size + first).flatten()
        ids = torch.cat([ids[origin], token[:, None]], 1)
        done = done[origin] | (token == config.eos_token_id)
        if bool(done.all()):
            break
    lengths = (ids[:, 1:] != config.pad_token_id).sum(1).view(batch, beams)
    winner = (scores / lengths**length_penalty).argmax(1) + first[:, 0]
    return ids[winner, 1:]
