"""Language models: the head that predicts the next token, logits of completions, greedy and beam-search decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.tokenizer import TOKENIZER, Tokeniser, cut_start, encode_prompts
from vitrail.model.classifier import Classifier
from vitrail.model.config import TrunkConfig
from vitrail.model.heads.config import NextToken
from vitrail.model.heads.head import Head
from vitrail.model.parts.tokens import Tokens
from vitrail.model.trunks.seq2seq import SequenceResMlp
from vitrail.model.trunks.text_trunk import TextTrunk, transformers, transformers_config

CHANGED = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # what some architectures do with their logits


class NextTokenHead(Head):
    """Logits of the whole vocabulary, by a matrix of its own or, where the architecture says so, by the embeddings.

    Words come from pre-training as the trunk does, so an adapter leaves them as they are. Raises `ValueError` for
    architectures that read both ways or change their logits.
    """

    prefix = 1
    begins_anew = False
    writes_texts = True

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
    """Completions of prompts by a language model, as its head's options say; marks are left out.

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
    written, was_training = [""] * len(ready), model.training
    model.eval()
    try:
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            with torch.inference_mode():
                generated = write([ready[i] for i in rows], room, tokeniser)
            for i, ids in zip(rows, generated.tolist(), strict=True):
                stop = ids.index(tokeniser.end) if tokeniser.end in ids else len(ids)
                written[i] = str(tokeniser.tokenizer.decode(ids[:stop])).strip()
    finally:
        model.train(was_training)
    return written


Write = Callable[[list[list[int]], int, Tokeniser], Tensor]
"""Tokens of prompts, and how many tokens may be generated -> generated tokens [prompts, tokens]."""


def _padded(prompts: list[list[int]], value: int, right: bool = False) -> list[list[int]]:
    longest = max(map(len, prompts))
    fill = [[value] * (longest - len(ids)) for ids in prompts]
    return [ids + more if right else more + ids for ids, more in zip(prompts, fill, strict=True)]


def _translator(trunk: TextTrunk, head: NextTokenHead) -> Write:
    backbone, config = cast("SequenceResMlp", trunk.backbone), head.config

    def write(prompts: list[list[int]], room: int, tokeniser: Tokeniser) -> Tensor:
        source = torch.tensor(_padded(prompts, tokeniser.pad, right=True), device=head.table.device)
        return translate(backbone, head.project, source, room, config.beams, config.length_penalty)

    return write


def _generator(trunk: TextTrunk, head: NextTokenHead) -> Write:
    generator, config = _language_model(trunk, head), head.config

    def write(prompts: list[list[int]], room: int, tokeniser: Tokeniser) -> Tensor:
        ids = torch.tensor(_padded(prompts, tokeniser.pad), device=head.table.device)
        outputs: Tensor = generator.generate(
            input_ids=ids,
            attention_mask=torch.tensor(_padded([[1] * len(p) for p in prompts], 0), device=ids.device),
            max_new_tokens=room,
            do_sample=False,
            num_beams=config.beams,
            logits_processor=_no_repeats(config.no_repeat, ids.shape[1]),
            **({"length_penalty": config.length_penalty} if config.beams > 1 else {}),
            eos_token_id=tokeniser.end,
            pad_token_id=tokeniser.pad if tokeniser.end is None else tokeniser.end,  # behind those that ended
            use_cache=True,
        )
        return outputs[:, ids.shape[1] :]

    return write


def _no_repeats(count: int, prompt: int) -> Any:
    """No sequence of so many tokens twice (0: any) in what is generated; those of the prompt may be repeated.

    transformers' own option counts the prompt, too, and would forbid a name of that many tokens.
    """
    package = transformers()
    if not count:
        return package.LogitsProcessorList()
    rule = package.NoRepeatNGramLogitsProcessor(count)
    return package.LogitsProcessorList([lambda ids, scores: rule(ids[:, prompt:], scores)])


def _language_model(trunk: TextTrunk, head: NextTokenHead) -> Any:
    """transformers' language model around the same weights: nothing is copied."""
    with torch.device("meta"):
        model = transformers().AutoModelForCausalLM.from_config(transformers_config(trunk.config.architecture))
        words = nn.Linear(trunk.width, head.words, bias=False)
    words.weight = head.table
    setattr(model, model.base_model_prefix, trunk.backbone)
    model.set_output_embeddings(words)
    if left := [name for name, tensor in model.named_parameters() if tensor.is_meta]:
        raise ValueError(f"text:{trunk.config.name} has {left[0]} besides its trunk and words; it cannot write here")
    return model.eval()
