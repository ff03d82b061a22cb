"""Completions of a language model: their logits, and greedy or beam-search decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail.data.tokenizer import TOKENIZER, Tokeniser, cut_start, encode_prompts
from vitrail.model.classifier import Classifier
from vitrail.model.heads.next_token import NextTokenHead
from vitrail.model.trunks.seq2seq import SequenceResMlp
from vitrail.model.trunks.text_trunk import TextTrunk, transformers


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


def completion_logits(model: Classifier, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [tokens, words] in float32 before every token of a completion, and those tokens [tokens].

    Only there: logits of prompts and padding would often be most of a step's memory.
    """
    trunk, head = cast("TextTrunk", model.trunk), cast("NextTokenHead", model.head)
    states = trunk.states(texts).last_hidden_state
    learned = texts[:, 1, 1:] == 1  # padding has segment 0
    return head.project(states[:, :-1][learned]).float(), texts[:, 0, 1:][learned]


def complete(model: Classifier, prompts: Sequence[str], *, batch: int = 16) -> list[str]:
    """What a language model writes after each prompt, as its head's options say; marks are left out.

    A prompt that leaves no room for a completion loses its start. Raises `ValueError` for a model that classifies.
    """
    trunk, head = model.trunk, model.head
    if not isinstance(trunk, TextTrunk) or not isinstance(head, NextTokenHead):
        raise ValueError("this model classifies; only a language model (--model.head next_token) writes completions")
    tokeniser = trunk.tokeniser(model.files[TOKENIZER])
    room = min(head.config.longest, max(1, trunk.config.length // 2))
    ready = [cut_start(tokeniser, ids, trunk.config.length - room) for ids in encode_prompts(tokeniser, prompts)]
    # Prompts of like length side by side: little padding.
    order = sorted(range(len(ready)), key=lambda i: len(ready[i]))
    write = _translator(trunk, head) if isinstance(trunk.backbone, SequenceResMlp) else _generator(trunk, head)
    was_training = model.training
    written = [""] * len(ready)
    model.eval()
    try:
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            with torch.inference_mode():
                made = write([ready[i] for i in rows], room, tokeniser)
            for i, found in zip(rows, made.tolist(), strict=True):
                stop = found.index(tokeniser.end) if tokeniser.end in found else len(found)
                written[i] = str(tokeniser.tokenizer.decode(found[:stop])).strip()
    finally:
        model.train(was_training)
    return written


Write = Callable[[list[list[int]], int, Tokeniser], Tensor]
"""Tokens of prompts, and how many tokens may be written -> those that are, [prompts, tokens]."""


def _translator(trunk: TextTrunk, head: NextTokenHead) -> Write:
    backbone, how = cast("SequenceResMlp", trunk.backbone), head.config

    def write(prompts: list[list[int]], room: int, tokeniser: Tokeniser) -> Tensor:
        longest = max(map(len, prompts))
        source = torch.tensor([[*ids, *[tokeniser.pad] * (longest - len(ids))] for ids in prompts])
        return translate(backbone, head.project, source.to(head.table.device), room, how.beams, how.length_penalty)

    return write


def _generator(trunk: TextTrunk, head: NextTokenHead) -> Write:
    writer, how = _writer(trunk, head), head.config

    def write(prompts: list[list[int]], room: int, tokeniser: Tokeniser) -> Tensor:
        longest, place = max(map(len, prompts)), head.table.device
        made: Tensor = writer.generate(
            input_ids=torch.tensor([[*[tokeniser.pad] * (longest - len(p)), *p] for p in prompts], device=place),
            attention_mask=torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=place),
            max_new_tokens=room,
            do_sample=False,
            num_beams=how.beams,
            logits_processor=_no_repeats(how.no_repeat, longest),
            **({"length_penalty": how.length_penalty} if how.beams > 1 else {}),
            eos_token_id=tokeniser.end,
            pad_token_id=tokeniser.pad if tokeniser.end is None else tokeniser.end,  # behind those that ended
            use_cache=True,
        )
        return made[:, longest:]

    return write


def _no_repeats(count: int, prompt: int) -> Any:
    """No sequence of so many tokens twice (0: any) in what is written; what a prompt says may be said again.

    transformers' own option counts the prompt, too, and would forbid a name of that many tokens.
    """
    package = transformers()
    if not count:
        return package.LogitsProcessorList()
    rule = package.NoRepeatNGramLogitsProcessor(count)

    def of_written(ids: Tensor, scores: Tensor) -> Tensor:
        return cast("Tensor", rule(ids[:, prompt:], scores))

    return package.LogitsProcessorList([of_written])


def _writer(trunk: TextTrunk, head: NextTokenHead) -> Any:
    """transformers' language model around the same weights: nothing is copied."""
    package = transformers()
    values = dict(trunk.config.architecture)
    described = package.AutoConfig.for_model(str(values.pop("model_type")), **values)
    with torch.device("meta"):
        writer = package.AutoModelForCausalLM.from_config(described)
        words = nn.Linear(trunk.width, head.words, bias=False)
    words.weight = head.table
    setattr(writer, writer.base_model_prefix, trunk.backbone)
    writer.set_output_embeddings(words)
    left = [name for name, tensor in writer.named_parameters() if tensor.is_meta]
    if left:
        raise ValueError(f"text:{trunk.config.name} has {left[0]} besides its trunk and words; it cannot write here")
    return cast("Any", writer).eval()
