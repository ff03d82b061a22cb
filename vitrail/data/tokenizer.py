"""Texts to numbers, once: what a text model reads is an integer tensor [3, length].

    row 0   numbers of the tokens
    row 1   segments: 0 for the first sentence, 1 for the second
    row 2   what stands there: PADDING, WORD, MARK (separators and the like) or CLASS

So a batch of texts is one tensor, as a batch of images is, and goes through losses, evaluators and averages alike.

Prompts and completions to numbers, as `vitrail.data.tokenizer` has them: segment 1 is what is learned.

    prompt words   [end]   completion words   end
    0 ...           0      1 ...               1     segment

A tokenizer that puts a mark of its own in front (LLaMA's) needs none between the two; otherwise the end mark stands
there, as in LoRA's experiments with GPT-2. Prompt and completion are tokenised apart, so where one ends and the other
begins is the same for a prompt alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.sources.text import Text

PADDING, WORD, MARK, CLASS = range(4)
TOKENIZER = "tokenizer.json"
UNKNOWN, PAD, FIRST, SEPARATOR, END = "[UNK]", "[PAD]", "[CLS]", "[SEP]", "<|endoftext|>"
MOST_WORDS = 30_000  # of a vocabulary that is taken from the training texts


def need_text_extra(package: str) -> str:
    """One sentence for the person who has not installed what text needs."""
    return f"text models need the package {package}; install vitrail[text]"


@dataclass(frozen=True)
class EncodedTexts:
    """Texts as numbers, one behind the other."""

    starts: NDArray[np.int64]  # [texts + 1]
    ids: NDArray[np.int32]  # [tokens], as are segments and kinds
    segments: NDArray[np.uint8]
    kinds: NDArray[np.uint8]
    pad: int = 0
    cut: int = 0  # texts that were longer than the model reads

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, rows: Sequence[int] | NDArray[np.int64], length: int | None = None) -> Tensor:
        """These texts, [rows, 3, length], padded at the end to `length` (none: to the longest of them)."""
        rows = np.asarray(rows, np.int64)
        begin = self.starts[rows]
        sizes = self.starts[rows + 1] - begin
        length = int(sizes.max()) if length is None else length
        place = np.arange(length)
        real = place < sizes[:, None]
        at = np.where(real, begin[:, None] + place, 0)
        made = np.zeros((len(rows), 3, length), np.int64)
        made[:, 0] = np.where(real, self.ids[at], self.pad)
        made[:, 1] = np.where(real, self.segments[at], 0)
        made[:, 2] = np.where(real, self.kinds[at], PADDING)
        return torch.from_numpy(made)

    def digest(self) -> str:
        """Changes with any token of any text."""
        found = hashlib.sha256(self.starts.tobytes())
        for values in (self.ids, self.kinds):
            found.update(values.tobytes())
        return found.hexdigest()[:16]


class _One(NamedTuple):
    ids: list[int]
    segments: list[int]
    kinds: list[int]
    cut: bool


class Tokeniser:
    """Texts to `Encoded`, by a stored tokenizer (the text of its `tokenizer.json`).

    `class_token="first"`: the tokenizer's own template, whose first token is the class token. `"last"`: the template,
    then `end` between two sentences and behind the last, which is then the class token; without an `end` the last token
    is. What is longer than `length` is cut, the longer of two sentences first.
    """

    def __init__(
        self, stored: str, *, length: int, class_token: Literal["first", "last"], pad: int = 0, end: int | None = None
    ) -> None:
        self.tokenizer = _read(stored)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.length, self.last, self.pad = length, class_token == "last", pad
        self.end = end if self.last else None

    @property
    def words(self) -> int:
        """Size of the vocabulary."""
        return int(self.tokenizer.get_vocab_size())

    def __call__(self, texts: Iterable[Text]) -> EncodedTexts:
        """Raises `ValueError` where the template has no class token to put first."""
        texts = list(texts)
        made = self._by_template(texts) if self.end is None else self._joined(texts, self.end)
        return EncodedTexts(
            starts=np.cumsum([0, *(len(one.ids) for one in made)]),
            ids=np.concatenate([np.asarray(one.ids, np.int32) for one in made]),
            segments=np.concatenate([np.asarray(one.segments, np.uint8) for one in made]),
            kinds=np.concatenate([np.asarray(one.kinds, np.uint8) for one in made]),
            pad=self.pad,
            cut=sum(one.cut for one in made),
        )

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """What a person calls each token."""
        return [str(self.tokenizer.decode([int(i)]) or self.tokenizer.id_to_token(int(i))) for i in ids]

    def _by_template(self, texts: Sequence[Text]) -> list[_One]:
        self.tokenizer.enable_truncation(self.length, strategy="longest_first")
        found = self.tokenizer.encode_batch([tuple(text) if text.pair else text.text for text in texts])
        self.tokenizer.no_truncation()
        made = []
        for one, text in zip(found, texts, strict=True):
            kinds = [MARK if special else WORD for special in one.special_tokens_mask]
            if not kinds:
                raise ValueError(f"the tokenizer makes nothing of {text.text[:40]!r}; give every text some words")
            if not self.last and kinds[0] != MARK:
                raise ValueError(
                    "the tokenizer of this model puts no class token in front; use --model.trunk.class_token last"
                )
            kinds[-1 if self.last else 0] = CLASS
            made.append(_One(one.ids, one.type_ids, kinds, bool(one.overflowing)))
        return made

    def _joined(self, texts: Sequence[Text], end: int) -> list[_One]:
        first = self.tokenizer.encode_batch([text.text for text in texts])
        second = self.tokenizer.encode_batch([text.pair for text in texts], add_special_tokens=False)
        made = []
        for one, other in zip(first, second, strict=True):
            a, b = list(one.ids), list(other.ids)
            room = self.length - (2 if b else 1)
            cut = len(a) + len(b) > room
            while len(a) + len(b) > room:
                (a if len(a) >= len(b) else b).pop()
            kinds = [MARK if special else WORD for special in one.special_tokens_mask[: len(a)]]
            between = [end] if b else []
            made.append(
                _One(
                    [*a, *between, *b, end],
                    [0] * len([*a, *between]) + [1] * len(b) + [int(bool(b))],
                    [*kinds, *[MARK] * len(between), *[WORD] * len(b), CLASS],
                    cut,
                )
            )
        return made


def word_tokenizer(texts: Iterable[Text], class_token: Literal["first", "last"]) -> str:
    """The tokenizer (as JSON) whose vocabulary is the words of these texts, the most frequent first."""
    tokenizers = _package()
    special = [PAD, UNKNOWN, END] if class_token == "last" else [PAD, UNKNOWN, FIRST, SEPARATOR]
    split = tokenizers.pre_tokenizers.Whitespace()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for part in text for word, _ in split.pre_tokenize_str(part))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:MOST_WORDS]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*special, *ranked]))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    made.pre_tokenizer = split
    made.add_special_tokens(special)
    if class_token == "first":
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{FIRST} $A {SEPARATOR}",
            pair=f"{FIRST} $A {SEPARATOR} $B:1 {SEPARATOR}:1",
            special_tokens=[(FIRST, vocabulary[FIRST]), (SEPARATOR, vocabulary[SEPARATOR])],
        )
    return str(made.to_str())


def _package() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise ValueError(need_text_extra("tokenizers")) from None
    return tokenizers


def _read(stored: str) -> Any:
    try:
        return _package().Tokenizer.from_str(stored)
    except ValueError:
        raise
    except Exception as error:  # the library raises its own plain Exception
        raise ValueError(f"the tokenizer is damaged: {' '.join(str(error).split())[:160]}") from None


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


def encode_completions(tokeniser: Tokeniser, texts: Iterable[Text]) -> EncodedTexts:
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
    return EncodedTexts(
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
