"""Perplexity, BLEU and sequence accuracy of a language model's completions.

BLEU (Papineni and others 2002) is that of sacrebleu's defaults over 100: words are cut as NIST's mteval-v13a does, up
to four in a row are counted, the reference nearest in length counts for brevity, and where no n-gram of a length is
right, half of one is counted, a quarter for the next length, and so on (its smoothing `exp`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from vitrail.data.batch import Batch
from vitrail.data.dataset import Split
from vitrail.data.sources.text import texts_of
from vitrail.files import json_text, write_text
from vitrail.measure.classification import Figures
from vitrail.measure.evaluator import Findings, Loaders, Model, Where, batches, evaluator
from vitrail.model.classifier import Classifier
from vitrail.model.heads.next_token import NextTokenHead, complete, completion_logits
from vitrail.model.parts.modules import without_adapters

ORDER = 4
ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
CUTS = (
    (re.compile(r"([{-~\[-` -&(-+:-@/])"), r" \1 "),  # punctuation and symbols, except in numbers and contractions
    (re.compile(r"([^0-9])([.,])"), r"\1 \2 "),  # a full stop or comma that no digit precedes
    (re.compile(r"([.,])([^0-9])"), r" \1 \2"),  # or follows
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)


def words_of(text: str) -> list[str]:
    """Words and punctuation marks.

    >>> words_of("It costs 3.50, not 4.")
    ['It', 'costs', '3.50', ',', 'not', '4', '.']
    """
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, sign in ENTITIES:
        text = text.replace(entity, sign)
    text = f" {text} "
    for pattern, way in CUTS:
        text = pattern.sub(way, text)
    return text.split()


def corpus_bleu(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """BLEU in 0..1 of all texts together; `references[i]` are the right answers to `written[i]`.

    Raises `ValueError` where a text has none.
    """
    right, all_ = [0] * ORDER, [0] * ORDER
    length = wanted = 0
    for text, answers in zip(written, references, strict=True):
        if not answers:
            raise ValueError("BLEU compares with references, and a text has none")
        words, known = words_of(text), [words_of(answer) for answer in answers]
        length += len(words)
        wanted += min((abs(len(answer) - len(words)), len(answer)) for answer in known)[1]
        for n in range(1, ORDER + 1):
            most: Counter[tuple[str, ...]] = Counter()
            for answer in known:
                most |= _grams(answer, n)
            grams = _grams(words, n)
            right[n - 1] += (grams & most).total()
            all_[n - 1] += grams.total()
    if not right[0] or not all(all_):
        return 0.0
    half, logs = 1.0, 0.0
    for hits, count in zip(right, all_, strict=True):
        half = half if hits else half / 2
        logs += math.log((hits or half) / count)
    return min(1.0, math.exp(1 - wanted / length)) * math.exp(logs / ORDER)


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


COMPLETIONS = "completions.jsonl"  # in the run folder
AT_ONCE = 16  # prompts that are completed together


@dataclass(frozen=True)
class Written:
    """A prompt, the model's completion, and the references."""

    prompt: str
    completion: str
    references: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether it is a reference, word for word."""
        return self.completion.split() in [answer.split() for answer in self.references]


@dataclass(frozen=True, eq=False)
class LanguageFigures(Figures):
    """Texts have no classes, so no per-class metrics; `loss` is the mean over tokens of completions, in nats."""

    tokens: int
    """That the mean is over, end marks included."""
    bleu: float | None
    """In 0..1, of all prompts that were completed together (none: not one was)."""
    written: tuple[Written, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # more is no float

    @property
    def sequence_accuracy(self) -> float | None:
        """Share of prompts after which a right answer was written, word for word (none: not one was completed)."""
        return sum(text.exact for text in self.written) / len(self.written) if self.written else None

    def scalars(self) -> dict[str, float]:
        metrics = {"perplexity": self.perplexity, "loss": self.loss, "bleu": self.bleu}
        metrics["sequence_accuracy"] = self.sequence_accuracy
        return {name: value for name, value in metrics.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        counts = {"kind": type(self).__name__, "count": self.count, "tokens": self.tokens}
        return {**counts, **self.scalars(), "written": [asdict(text) for text in self.written]}

    def keep(self, folder: Path) -> None:
        """Write every completion into a run folder, a line each: for metrics that are not computed here."""
        write_text(folder / COMPLETIONS, "".join(json_text(asdict(text)) + "\n" for text in self.written))


def language_figures(model: Classifier, loader: Iterable[Batch], **where: Unpack[Where]) -> LanguageFigures:
    """Perplexity and BLEU of every text that `loader` gives; the same on every rank of a process group."""
    texts, tokens, nll = token_loss(model, loader, **where)
    written = write_completions(model, cast("Any", loader).split, autocast=where.get("autocast"))
    bleu = corpus_bleu([w.completion for w in written], [w.references for w in written]) if written else None
    none, counts = np.zeros(0), np.zeros(0, np.int64)
    return LanguageFigures((), texts, nll / tokens, none, none, none, counts, tokens, bleu, written)


def token_loss(model: Classifier, loader: Iterable[Batch], **where: Unpack[Where]) -> tuple[int, int, float]:
    """Texts, tokens of their completions, and the sum of -log probability of these tokens, of all ranks."""
    _head(model)
    where["device"] = device = torch.device(where.get("device") or next(model.parameters()).device)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch, inputs in batches(model, loader, **where):
        logits, target = completion_logits(model, inputs)
        with torch.autocast(device.type, enabled=False):
            each = F.cross_entropy(logits, target, reduction="none").to(torch.float64)
        sums += torch.stack([sums.new_tensor(len(batch)), sums.new_tensor(len(target)), each.sum()])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    texts, tokens, nll = sums.tolist()
    if not tokens:
        raise ValueError("there is nothing to evaluate: the loader gave no texts; check that the split is not empty")
    return int(texts), int(tokens), nll


def write_completions(model: Classifier, split: Split, *, autocast: torch.dtype | None = None) -> tuple[Written, ...]:
    """The model's completions of the prompts of a split, each once; ranks share the work and all get all of it."""
    answers: dict[str, list[str]] = {}
    for text in texts_of(split):
        answers.setdefault(text.text, []).append(text.pair)
    prompts = list(answers)[: _head(model).config.judged]
    if not prompts:
        return ()
    model = without_adapters(model)  # an adapter would make its changes again for every word
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    rank, world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    share = prompts[rank::world]
    with torch.autocast(next(model.parameters()).device.type, autocast, enabled=autocast is not None):
        completions = dict(zip(share, complete(model, share, batch=AT_ONCE), strict=True))
    if several:
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, completions)
        completions = {prompt: text for part in gathered for prompt, text in part.items()}
    return tuple(Written(prompt, completions[prompt], tuple(answers[prompt])) for prompt in prompts)


@evaluator()
def evaluate_perplexity(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """Exp of the mean -log probability of a token of a completion, and that mean."""
    _, tokens, nll = token_loss(_writer(model), data.loaders[data.split], **where)
    numbers = {"perplexity": math.exp(min(nll / tokens, 700.0)), "loss": nll / tokens}
    return {"numbers": numbers, "tables": {}, "pictures": {}}


@evaluator()
def evaluate_bleu(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """Corpus BLEU, in 0..1, of the completions of a split's prompts, and the share that is right word for word."""
    split = cast("Any", data.loaders[data.split]).split
    written = write_completions(_writer(model), split, autocast=where.get("autocast"))
    if not written:
        raise ValueError("evaluators: bleu needs completions, but model.head.judged is 0; raise it or leave bleu out")
    numbers = {
        "bleu": corpus_bleu([w.completion for w in written], [w.references for w in written]),
        "sequence_accuracy": sum(w.exact for w in written) / len(written),
    }
    return {"numbers": numbers, "tables": {}, "pictures": {}}


def _writer(model: Model) -> Classifier:
    if not isinstance(model, Classifier):
        raise ValueError("perplexity and bleu evaluate language models, and this is none")
    return model


def _head(model: Classifier) -> NextTokenHead:
    if not isinstance(model.head, NextTokenHead):
        raise ValueError("perplexity and bleu evaluate language models (--model.head next_token), and this is none")
    return model.head
