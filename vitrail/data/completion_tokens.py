"""Prompts and completions to numbers, as `vitrail.data.tokenise` has them: segment 1 is what is learned.

    prompt words   [end]   completion words   end
    0 ...           0      1 ...               1     segment

A tokenizer that puts a mark of its own in front (LLaMA's) needs none between the two; otherwise the end mark stands
there, as in LoRA's experiments with GPT-2. Prompt and completion are tokenised apart, so where one ends and the other
begins is the same for a prompt alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vitrail.data.texts import Text
from vitrail.data.tokenise import CLASS, WORD, Encoded, Tokeniser


def encode_prompts(tokeniser: Tokeniser, prompts: Sequence[str]) -> list[list[int]]:
    """Each prompt up to where its completion begins."""
    marked = _begins_with_mark(tokeniser)
    between = [] if marked or tokeniser.end is None else [tokeniser.end]
    made = []
    for one in tokeniser.tokenizer.encode_batch(list(prompts)):
        ids = list(one.ids)
        if marked and len(ids) > 1 and one.special_tokens_mask[-1]:  # some templates also close what is not at its end
            ids.pop()
        made.append([*ids, *between])
    return made


def cut_start(tokeniser: Tokeniser, prompt: list[int], most: int) -> list[int]:
    """The end of a prompt, at most so many tokens, behind its first mark where it has one."""
    if len(prompt) <= most:
        return prompt
    front = prompt[:1] if _begins_with_mark(tokeniser) and most > 1 else []
    return [*front, *prompt[len(prompt) - most + len(front) :]]


def encode_completions(tokeniser: Tokeniser, texts: Iterable[Text]) -> Encoded:
    """Prompts and completions in one row each.

    What is longer than the model reads is cut: the end of a completion, down to a quarter of the length, then the start
    of the prompt. A completion that was cut has no end mark, for it does not end there.
    """
    texts = list(texts)
    space = " " if _needs_space(tokeniser) else ""
    answers = tokeniser.tokenizer.encode_batch([space + text.pair for text in texts], add_special_tokens=False)
    ends = [] if tokeniser.end is None else [tokeniser.end]
    rows: list[tuple[list[int], list[int]]] = []
    cut, length = 0, tokeniser.length
    for prompt, answer in zip(encode_prompts(tokeniser, [text.text for text in texts]), answers, strict=True):
        completion = [*answer.ids, *ends]
        cut += len(prompt) + len(completion) > length
        kept = cut_start(tokeniser, prompt, length - min(len(completion), max(1, length // 4)))
        rows.append((kept, completion[: length - len(kept)]))
    sizes = [len(prompt) + len(completion) for prompt, completion in rows]
    kinds = np.full(sum(sizes), WORD, np.uint8)
    starts = np.cumsum([0, *sizes])
    kinds[starts[1:] - 1] = CLASS
    return Encoded(
        starts=starts,
        ids=np.concatenate([np.asarray([*prompt, *completion], np.int32) for prompt, completion in rows]),
        segments=np.concatenate([np.repeat(np.array([0, 1], np.uint8), [len(p), len(c)]) for p, c in rows]),
        kinds=kinds,
        pad=tokeniser.pad,
        cut=cut,
    )


def _begins_with_mark(tokeniser: Tokeniser) -> bool:
    mask = tokeniser.tokenizer.encode("so").special_tokens_mask
    return bool(mask and mask[0])


def _needs_space(tokeniser: Tokeniser) -> bool:
    """Whether a word inside a sentence is another token than at its start, unless a space comes first (GPT-2)."""
    alone, inside = (list(tokeniser.tokenizer.encode(text, add_special_tokens=False).ids) for text in ("so", "so so"))
    return inside[-len(alone) :] != alone
