"""Texts as integers: what a text model reads is an integer tensor [3, length].

    row 0   token ids
    row 1   segments: 0 for the first sentence, 1 for the second
    row 2   kinds: PADDING, WORD, MARK (separators and the like) or CLASS

So a batch of texts is one tensor, as a batch of images is, and goes through losses, evaluators and averages alike.
Of a prompt and its completion, segment 1 is what is learned:

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


class TextTokens(NamedTuple):
    """One text."""

    ids: list[int]
    segments: list[int]
    kinds: list[int]
    cut: bool  # it was longer than the model reads


@dataclass(frozen=True)
class EncodedTexts:
    """Token ids of texts, one behind the other."""

    starts: NDArray[np.int64]  # [texts + 1]
    ids: NDArray[np.int32]  # [tokens], as are segments and kinds
    segments: NDArray[np.uint8]
    kinds: NDArray[np.uint8]
    pad: int = 0
    cut: int = 0  # texts that were longer than the model reads

    @classmethod
    def of(cls, rows: Sequence[TextTokens], pad: int) -> EncodedTexts:
        """These texts."""
        ids, segments, kinds, cut = zip(*rows, strict=True)
        starts = np.cumsum([0, *map(len, ids)])
        flat = np.concatenate([np.asarray(row, np.int32) for row in ids])
        bytes_of = (np.concatenate([np.asarray(row, np.uint8) for row in column]) for column in (segments, kinds))
        return cls(starts, flat, next(bytes_of), next(bytes_of), pad, sum(cut))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, rows: Sequence[int] | NDArray[np.int64], length: int | None = None) -> Tensor:
        """These texts, [rows, 3, length], padded at the end to `length` (none: to the longest of them)."""
        rows = np.asarray(rows, np.int64)
        begin = self.starts[rows]
        sizes = self.starts[rows + 1] - begin
        length = int(sizes.max()) if length is None else length
        position = np.arange(length)
        real = position < sizes[:, None]
        at = np.where(real, begin[:, None] + position, 0)
        columns = ((self.ids, self.pad), (self.segments, 0), (self.kinds, PADDING))
        padded = [np.where(real, values[at], fill).astype(np.int64) for values, fill in columns]
        return torch.from_numpy(np.stack(padded, 1))

    def digest(self) -> str:
        """Changes with any token of any text."""
        digest = hashlib.sha256(self.starts.tobytes())
        for values in (self.ids, self.kinds):
            digest.update(values.tobytes())
        return digest.hexdigest()[:16]


class Tokeniser:
    """Texts to `EncodedTexts`, by a stored tokenizer (the text of its `tokenizer.json`).

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
        return EncodedTexts.of(
            self._by_template(texts) if self.end is None else self._joined(texts, self.end), self.pad
        )

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """What a person calls each token."""
        return [str(self.tokenizer.decode([int(i)]) or self.tokenizer.id_to_token(int(i))) for i in ids]

    def _by_template(self, texts: Sequence[Text]) -> list[TextTokens]:
        self.tokenizer.enable_truncation(self.length, strategy="longest_first")
        encodings = self.tokenizer.encode_batch([tuple(text) if text.pair else text.text for text in texts])
        self.tokenizer.no_truncation()
        rows = []
        for encoding, text in zip(encodings, texts, strict=True):
            kinds = [MARK if special else WORD for special in encoding.special_tokens_mask]
            if not kinds:
                raise ValueError(f"the tokenizer makes nothing of {text.text[:40]!r}; give every text some words")
            if not self.last and kinds[0] != MARK:
                raise ValueError(
                    "the tokenizer of this model puts no class token in front; use --model.trunk.class_token last"
                )
            kinds[-1 if self.last else 0] = CLASS
            rows.append(TextTokens(encoding.ids, encoding.type_ids, kinds, bool(encoding.overflowing)))
        return rows

    def _joined(self, texts: Sequence[Text], end: int) -> list[TextTokens]:
        first = self.tokenizer.encode_batch([text.text for text in texts])
        second = self.tokenizer.encode_batch([text.pair for text in texts], add_special_tokens=False)
        rows = []
        for encoding, other in zip(first, second, strict=True):
            a, b = list(encoding.ids), list(other.ids)
            room = self.length - (2 if b else 1)
            cut = len(a) + len(b) > room
            while len(a) + len(b) > room:
                (a if len(a) >= len(b) else b).pop()
            kinds = [MARK if special else WORD for special in encoding.special_tokens_mask[: len(a)]]
            between = [end] if b else []
            segments = [0] * len([*a, *between]) + [1] * len(b) + [int(bool(b))]
            kinds += [*[MARK] * len(between), *[WORD] * len(b), CLASS]
            rows.append(TextTokens([*a, *between, *b, end], segments, kinds, cut))
        return rows


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
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.add_special_tokens(special)
    if class_token == "first":
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{FIRST} $A {SEPARATOR}",
            pair=f"{FIRST} $A {SEPARATOR} $B:1 {SEPARATOR}:1",
            special_tokens=[(FIRST, vocabulary[FIRST]), (SEPARATOR, vocabulary[SEPARATOR])],
        )
    return str(tokenizer.to_str())


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
    rows = []
    for encoding in tokeniser.tokenizer.encode_batch(list(prompts)):
        ids = list(encoding.ids)
        if marked and len(ids) > 1 and encoding.special_tokens_mask[-1]:  # some templates also close an unfinished text
            ids.pop()
        rows.append([*ids, *between])
    return rows


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
    rows, length = [], tokeniser.length
    for prompt, answer in zip(encode_prompts(tokeniser, [text.text for text in texts]), answers, strict=True):
        completion = [*answer.ids, *ends]
        cut = len(prompt) + len(completion) > length
        kept = cut_start(tokeniser, prompt, length - min(len(completion), max(1, length // 4)))
        ids = [*kept, *completion[: length - len(kept)]]
        segments = [0] * len(kept) + [1] * (len(ids) - len(kept))
        rows.append(TextTokens(ids, segments, [WORD] * (len(ids) - 1) + [CLASS], cut))
    return EncodedTexts.of(rows, tokeniser.pad)


def _begins_with_mark(tokeniser: Tokeniser) -> bool:
    mask = tokeniser.tokenizer.encode("so").special_tokens_mask
    return bool(mask and mask[0])


def _needs_space(tokeniser: Tokeniser) -> bool:
    """Whether a word inside a sentence is another token than at its start, unless a space comes first (GPT-2)."""
    alone, inside = (list(tokeniser.tokenizer.encode(text, add_special_tokens=False).ids) for text in ("so", "so so"))
    return inside[-len(alone) :] != alone
