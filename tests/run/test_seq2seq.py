"""ResMLP for sequences: causal, indifferent to padding, trained, written, stored and evaluated as other text models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from vitrail.cli import run as command
from vitrail.data.batch import Batch
from vitrail.data.open import open_data
from vitrail.data.sources.synthetic_text import number, spelled
from vitrail.data.sources.text import texts_of
from vitrail.data.tokenizer import TOKENIZER, encode_completions, encode_prompts, word_tokenizer
from vitrail.learn.config import LanguageModelConfig
from vitrail.learn.language_model import LanguageModel
from vitrail.measure.language import Written
from vitrail.model.classifier import Classifier
from vitrail.model.heads.config import NextToken
from vitrail.model.heads.next_token import complete, completion_logits, translate
from vitrail.model.text_build import create_text_model
from vitrail.model.trunks.seq2seq import SequenceConfig, SequenceResMlp
from vitrail.recipes import recipe, with_values
from vitrail.recipes.text_models import SEQUENCES

BOTH = pytest.mark.parametrize("mixer", ["linear", "attention"])
TINY = {"width": 16, "depth": 1, "heads": 2, "length": 32}


def small(**changes: Any) -> SequenceResMlp:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_attention_heads": 2}
    options = {"vocab_size": 12, **sizes, "max_position_embeddings": 12, "drop": 0.0, "eos_token_id": 2, **changes}
    model = SequenceResMlp(SequenceConfig(**options)).eval()
    for parameter in model.parameters():  # shifts and biases away from 0, or padding would do no harm
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    with torch.no_grad():
        model.embed.weight[0].zero_()
    return model


def states(model: SequenceResMlp, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return model.decode(target, *model.encode(source))


@BOTH
def test_a_token_depends_on_earlier_tokens_only(mixer: str) -> None:
    model, source = small(mixer=mixer), torch.randint(3, 12, (2, 7))
    target = torch.randint(3, 12, (2, 9))
    before = states(model, source, target)
    for t in range(9):
        changed = target.clone()
        changed[:, t] = (changed[:, t] - 3 + 1) % 9 + 3
        after = states(model, source, changed)
        torch.testing.assert_close(after[:, :t], before[:, :t])
        assert not torch.allclose(after[:, t:], before[:, t:])


@pytest.mark.parametrize(("mixer", "rezero"), [("linear", True), ("linear", False), ("attention", True)])
def test_padding_changes_nothing_unless_maps_over_positions_see_it(mixer: str, rezero: bool) -> None:
    model = small(mixer=mixer, rezero=rezero)
    source, target = torch.randint(3, 12, (2, 5)), torch.randint(3, 12, (2, 4))
    alone = states(model, source, target)
    among = states(model, *(torch.nn.functional.pad(ids, (0, more)) for ids, more in ((source, 6), (target, 3))))[:, :4]
    assert torch.allclose(alone, among, atol=1e-5) == rezero


def test_parameters_follow_the_closed_form() -> None:
    width, hidden, layers, longest, words = 16, 32, 2, 12, 12
    mlp = 2 * width * hidden + hidden + width
    encoder = longest**2 + longest + mlp + 4 * width + 2 * width
    cross = 4 * width**2 + 4 * width
    decoder = encoder + 2 * width + width + cross
    expected = words * width + layers * (encoder + decoder) + 4 * width
    assert sum(p.numel() for p in small().parameters()) == expected
    maps = 2 * layers * (longest**2 + longest)
    attention = expected - maps + 2 * layers * cross + 2 * longest * width  # and positions of source and target
    assert sum(p.numel() for p in small(mixer="attention").parameters()) == attention


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 13 tokens is longer than the 12"):
        small().encode(torch.ones(1, 13, dtype=torch.int64))


@BOTH
def test_rows_of_source_and_target_give_the_states_of_each_pair_alone(mixer: str) -> None:
    model = small(mixer=mixer)
    pairs = [([5, 6, 7, 2], [8, 9, 2]), ([4, 2], [3, 2]), ([3, 4, 5, 6, 7, 2], [2])]
    ids, segments, real = torch.zeros(3, 3, 9, dtype=torch.int64).unbind(0)
    for row, (source, target) in enumerate(pairs):
        n, m = len(source), len(target)
        ids[row, : n + m] = torch.tensor([*source, *target])
        segments[row, n : n + m] = 1
        real[row, : n + m] = 1
    out = model(input_ids=ids, attention_mask=real, token_type_ids=segments).last_hidden_state
    for row, (source, target) in enumerate(pairs):
        alone = states(model, torch.tensor([source]), torch.tensor([[2, *target]]))[0]
        at = len(source) - 1
        torch.testing.assert_close(out[row, at : at + len(target) + 1], alone, rtol=1e-5, atol=1e-6)


@BOTH
def test_beam_search_finds_what_trying_everything_finds(mixer: str) -> None:
    model = small(vocab_size=5, max_position_embeddings=6, mixer=mixer)
    head = torch.nn.Linear(16, 5)
    source = torch.cat([torch.randint(3, 5, (3, 3)), torch.full((3, 1), 2)], 1)
    best: list[list[int]] = []
    with torch.no_grad():
        memory, there = model.encode(source)
        for row in range(3):
            choices = []
            for a in range(1, 5):
                for b in range(1, 5):
                    words = [a] if a == 2 else [a, b]
                    target = torch.tensor([[2, *words[:-1]]])
                    logits = head(model.decode(target, memory[row : row + 1], there[row : row + 1]))[0]
                    total = sum(float(logits.log_softmax(-1)[i, w]) for i, w in enumerate(words))
                    choices.append((total / len(words), words))
            best.append(max(choices)[1])
    found = translate(model, head, source, 2, beams=16)
    assert [[word for word in row if word] for row in found.tolist()] == best


# numbers in words


def value_of(words: str) -> int:
    """The number that English words mean, read by the usual rule: groups before million and thousand add up."""
    teens = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
    names = f"zero one two three four five six seven eight nine {teens}".split()
    tens = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
    units = {word: i for i, word in enumerate(names)} | {word: 10 * i for i, word in enumerate(tens, 2)}
    total = group = 0
    for word in words.split():
        if word == "hundred":
            group *= 100
        elif word in ("thousand", "million"):
            total, group = total + group * {"thousand": 1000, "million": 10**6}[word], 0
        else:
            group += units[word]
    return total + group


def test_spelled_numbers_mean_their_digits() -> None:
    values = [*range(2000), *(number(3, row, 9) for row in range(500)), 10**6, 10**9 - 1]
    assert [value_of(spelled(value)) for value in values] == values


def test_numbers_are_divided_by_value_and_every_length_is_as_frequent() -> None:
    data = open_data("synthetic:numbers?n=3000&seed=1&digits=4")
    values = {}
    for name, split in data.splits.items():
        pairs = texts_of(split)
        values[name] = {text.pair for text in pairs}
        assert all(str(value_of(text.text)) == text.pair.replace(" ", "") for text in pairs)
    assert not values["train"] & values["test"]
    assert not values["train"] & values["val"]
    assert not values["val"] & values["test"]
    lengths = [len(str(number(1, row, 4))) for row in range(3000)]
    assert all(abs(lengths.count(k) - 750) < 4 * (3000 * 0.25 * 0.75) ** 0.5 for k in range(1, 5))
    assert [number(1, row, 4) for row in range(9)] == [number(1, row, 4) for row in range(9)]


@pytest.mark.parametrize("query", ["n=2", "digits=0", "digits=10", "digits=x", "size=3"])
def test_wrong_options_of_numbers_are_refused(query: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"synthetic:numbers?{query}")):
        open_data(f"synthetic:numbers?{query}")


# as a text model


def model_of(name: str, texts: list[Any], **changes: Any) -> Classifier:
    torch.manual_seed(0)
    return create_text_model(
        f"text:{name}", classes=(), head=NextToken(longest=8), tokenizer=word_tokenizer(texts, "last"), **TINY | changes
    )


NAMES = pytest.mark.parametrize("name", ["resmlp", "resmlp-attention"])


@NAMES
def test_its_loss_is_that_of_teacher_forcing_one_pair_at_a_time(name: str) -> None:
    texts = list(texts_of(open_data("synthetic:numbers?n=60")["train"]))[:5]
    model = model_of(name, texts).eval()
    tokeniser = model.trunk.tokeniser(model.files[TOKENIZER])  # type: ignore[operator]
    batch = encode_completions(tokeniser, texts).batch(range(5))
    objective = LanguageModel(model, LanguageModelConfig(smoothing=0.1))
    total, count = torch.zeros(()), 0
    backbone: Any = model.trunk.backbone
    for text, source in zip(texts, encode_prompts(tokeniser, [text.text for text in texts]), strict=True):
        target = [*tokeniser.tokenizer.encode(text.pair).ids, backbone.config.eos_token_id]
        hidden = states(backbone, torch.tensor([source]), torch.tensor([[backbone.config.eos_token_id, *target[:-1]]]))
        logits = torch.nn.functional.linear(hidden[0], model.head.table)  # type: ignore[arg-type]
        total = total + torch.nn.functional.cross_entropy(
            logits, torch.tensor(target), label_smoothing=0.1, reduction="sum"
        )
        count += len(target)
    label = torch.zeros(5, dtype=torch.int64)
    found = objective(Batch((batch,), label, label, torch.arange(5)))["loss"]
    torch.testing.assert_close(found, total / count, rtol=1e-5, atol=1e-6)


@NAMES
def test_greedy_completions_are_the_likeliest_token_after_each_prefix(name: str, tmp_path: Path) -> None:
    texts = list(texts_of(open_data("synthetic:numbers?n=60")["train"]))
    model = model_of(name, texts).eval()
    tokeniser = model.trunk.tokeniser(model.files[TOKENIZER])  # type: ignore[operator]
    backbone: Any = model.trunk.backbone
    prompts = [text.text for text in texts[:6]]
    expected = []
    for source in encode_prompts(tokeniser, prompts):
        written = [backbone.config.eos_token_id]
        for _ in range(8):
            hidden = states(backbone, torch.tensor([source]), torch.tensor([written]))[0, -1]
            logits = hidden @ model.head.table.T  # type: ignore[union-attr]
            logits[backbone.config.pad_token_id] = float("-inf")
            written.append(int(logits.argmax()))
            if written[-1] == backbone.config.eos_token_id:
                break
        kept = [token for token in written[1:] if token != backbone.config.eos_token_id]
        expected.append(str(tokeniser.tokenizer.decode(kept)).strip())
    assert complete(model, prompts, batch=4) == expected
    again = vitrail.load(model.save(tmp_path / "model"))
    assert complete(again, prompts) == expected
    rows = encode_completions(tokeniser, texts[:4]).batch(range(4))
    torch.testing.assert_close(completion_logits(again, rows)[0], completion_logits(model, rows)[0])


def test_a_rule_that_it_does_not_have_is_refused() -> None:
    texts = list(texts_of(open_data("synthetic:numbers?n=60")["train"]))
    with pytest.raises(ValueError, match="no_repeat"):
        create_text_model(
            "text:resmlp", classes=(), head=NextToken(no_repeat=3), tokenizer=word_tokenizer(texts, "last"), **TINY
        )
    with pytest.raises(ValueError, match="has no part 'drop'"):
        create_text_model("text:gpt", classes=(), tokenizer=word_tokenizer(texts, "last"), drop=0.1)


def test_sequence_accuracy_counts_what_is_right_word_for_word() -> None:
    assert Written("ten", "1 0", ("1 0",)).exact
    assert Written("ten", " 1  0", ("9", "1 0")).exact
    assert not Written("ten", "1 0 0", ("1 0",)).exact
    assert not Written("ten", "", ("1 0",)).exact


@NAMES
def test_it_learns_to_write_small_numbers(name: str) -> None:
    texts = list(texts_of(open_data("synthetic:numbers?n=400&digits=2")["train"]))
    model = model_of(name, texts, drop=0.0, width=32)
    batch = encode_completions(model.trunk.tokeniser(model.files[TOKENIZER]), texts).batch(range(128))  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(*completion_logits(model, batch)).backward()
        optimizer.step()
    written = complete(model, [text.text for text in texts[:100]])
    assert sum(w == text.pair for w, text in zip(written, texts[:100], strict=True)) > 90


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_recipe_trains_reports_and_is_evaluated(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"out": str(tmp_path / "run"), "data.uri": "synthetic:numbers?n=100", "data.batch": 16}
    changes |= {"model.trunk": TINY, "optim.steps": 3, "engine.device": "cpu"}
    run = vitrail.train(with_values(recipe(name), changes), quiet=True)
    scalars = run.figures.scalars()
    assert {"perplexity", "loss", "bleu", "sequence_accuracy"} == set(scalars)
    rows = [json.loads(line) for line in (run.path / "completions.jsonl").read_text().splitlines()]
    exact = [row["completion"].split() in [r.split() for r in row["references"]] for row in rows]
    assert scalars["sequence_accuracy"] == sum(exact) / len(exact)
    assert "sequence accuracy" in (run.path / "report.html").read_text()
    capsys.readouterr()
    assert command(["evaluate", str(run.path), "--data", "synthetic:numbers?n=100", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["sequence_accuracy"] == scalars["sequence_accuracy"]
    assert again["perplexity"] == pytest.approx(scalars["perplexity"], rel=1e-4)
