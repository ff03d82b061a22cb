"""Language models: what is learned, what is judged, what is written, and whole runs, with adapters and without."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stopping import stop_after
from torch import Tensor

import vitrail
from vitrail.config import RunConfig, from_mapping, validate
from vitrail.data.batch import Batch
from vitrail.data.loading.text_loader import TextEvalLoader
from vitrail.data.open import open_data
from vitrail.data.sources.text import Text, texts_of
from vitrail.engine.loop import Stopped
from vitrail.learn.config import LanguageModelConfig
from vitrail.measure.language import corpus_bleu
from vitrail.model.adapters.apply import apply, counts
from vitrail.model.adapters.config import AdapterConfig, Lora, Nola, Pranc
from vitrail.model.classifier import Classifier
from vitrail.model.heads.config import NextToken
from vitrail.model.store import read_tensors
from vitrail.recipes import recipe, with_values
from vitrail.recipes.text_models import LANGUAGE
from vitrail.run.text_module import encode_split

transformers = pytest.importorskip("transformers", reason="transformers is not here; install vitrail[text]")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not here; install vitrail[text]")

from vitrail.data.tokenizer import (  # noqa: E402  # noqa: E402
    END,
    PADDING,
    TOKENIZER,
    Tokeniser,
    encode_completions,
    encode_prompts,
    word_tokenizer,
)
from vitrail.learn.language_model import LanguageModel  # noqa: E402
from vitrail.measure.language import language_figures, token_loss  # noqa: E402
from vitrail.model.heads.next_token import _no_repeats, complete  # noqa: E402

TEXTS = [Text("a b c", "d e"), Text("f", "a b c d"), Text("b b e a c", "f"), Text("c d", "e f a")]
WORDS = word_tokenizer(TEXTS, "last")  # [PAD] 0, [UNK] 1, <|endoftext|> 2, then a to f
NUMBER = tokenizers.Tokenizer.from_str(WORDS).get_vocab()
END_ID = NUMBER[END]


def described(kind: str) -> Any:
    """A tiny GPT-2 (embeddings make the logits) or LLaMA (a matrix of its own does, and keys are shared by queries)."""
    marks = {"pad_token_id": 0, "bos_token_id": END_ID, "eos_token_id": END_ID}
    if kind == "gpt2":
        # Without dropout: the same numbers in training as in evaluation.
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2Config(vocab_size=9, n_embd=32, n_layer=2, n_head=2, n_positions=64, **still, **marks)
    return transformers.LlamaConfig(
        vocab_size=9,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        **marks,
    )


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model as transformers saves it, with a tokenizer."""
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(described(request.param))
    with torch.no_grad():  # far from uniform, so that a wrong place would be seen
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(path)
    (path / TOKENIZER).write_text(WORDS)
    return path


@pytest.fixture
def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def ours(folder: Path, **head: Any) -> Classifier:
    made = vitrail.create_model(f"text:{folder}", classes=(), head=NextToken(**head), weights="hub", length=64)
    return made.eval()


def by_hand(text: Text) -> tuple[list[int], list[int]]:
    """Tokens of a text, and labels as transformers takes them: -100 where nothing is learned."""
    prompt = [NUMBER[word] for word in text.text.split()] + [END_ID]
    completion = [NUMBER[word] for word in text.pair.split()] + [END_ID]
    return prompt + completion, [-100] * len(prompt) + completion


def padded(rows: list[list[int]], filled: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [filled] * (longest - len(row)) for row in rows])


def batch_of(model: Classifier, texts: list[Text] = TEXTS) -> Batch:
    encoded = encode_completions(model.trunk.tokeniser(model.files[TOKENIZER]), texts)
    label = torch.zeros(len(texts), dtype=torch.int64)
    return Batch((encoded.batch(range(len(texts))),), label, label, torch.arange(len(texts)))


# What is learned


def test_the_mask_is_the_completion_and_its_end() -> None:
    encoded = encode_completions(Tokeniser(WORDS, length=64, class_token="last", end=END_ID), TEXTS)
    made = encoded.batch(range(4))
    rows = [by_hand(text) for text in TEXTS]
    assert torch.equal(made[:, 0], padded([ids for ids, _ in rows], 0))
    assert torch.equal(made[:, 1], (padded([labels for _, labels in rows], -100) != -100).long())
    assert [int((row != PADDING).sum()) for row in made[:, 2]] == [len(ids) for ids, _ in rows]


def test_the_loss_is_transformers_own_with_labels_of_minus_100(folder: Path, theirs: Any) -> None:
    rows = [by_hand(text) for text in TEXTS]
    ids, labels = padded([i for i, _ in rows], 0), padded([one for _, one in rows], -100)
    mask = padded([[1] * len(i) for i, _ in rows], 0)
    expected = theirs(input_ids=ids, attention_mask=mask, labels=labels).loss
    model = ours(folder)
    found = LanguageModel(model, LanguageModelConfig())(batch_of(model))["loss"]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)  # float32, sums in another order


def test_smoothed_labels_are_torch_s(folder: Path, theirs: Any) -> None:
    rows = [by_hand(text) for text in TEXTS]
    ids, labels = padded([i for i, _ in rows], 0), padded([one for _, one in rows], -100)
    logits = theirs(input_ids=ids, attention_mask=padded([[1] * len(i) for i, _ in rows], 0)).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)
    model = ours(folder)
    found = LanguageModel(model, LanguageModelConfig(smoothing=0.1))(batch_of(model))
    torch.testing.assert_close(found["loss"], expected, atol=1e-6, rtol=1e-6)
    plain = LanguageModel(model, LanguageModelConfig())(batch_of(model))["loss"]
    torch.testing.assert_close(found["unsmoothed"], plain, atol=1e-6, rtol=1e-6)


def test_logits_are_made_only_where_something_is_learned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = ours(folder), []
    project = model.head.project
    monkeypatch.setattr(model.head, "project", lambda states: seen.append(tuple(states.shape)) or project(states))
    LanguageModel(model, LanguageModelConfig())(batch_of(model))
    assert seen == [(sum(len(text.pair.split()) + 1 for text in TEXTS), 32)]


def test_the_model_itself_says_what_follows_a_text(folder: Path, theirs: Any) -> None:
    model = ours(folder)
    for text in TEXTS:
        logits = theirs(input_ids=torch.tensor([by_hand(text)[0]])).logits[0, -1]
        torch.testing.assert_close(model(batch_of(model, [text]).images)[0], logits, atol=1e-5, rtol=1e-5)


def test_embeddings_are_shared_or_not_as_the_architecture_says(folder: Path, theirs: Any) -> None:
    model = ours(folder)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert (model.head.table is model.trunk.backbone.get_input_embeddings().weight) == ("gpt2" in folder.name)


def test_a_saved_language_model_needs_nothing_but_its_folder(folder: Path, tmp_path: Path) -> None:
    model = ours(folder, longest=7)
    model.save(tmp_path / "model")
    again = vitrail.load(tmp_path / "model")
    assert torch.equal(again(batch_of(model).images), model(batch_of(model).images))
    assert again.head.config == NextToken(longest=7)
    assert (again.head.table is again.trunk.backbone.get_input_embeddings().weight) == ("gpt2" in folder.name)


# How texts become numbers


def byte_level() -> str:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=letters)
    made.train_from_iterator(["so it is so it is"] * 3, trainer)
    return str(made.to_str())


def with_mark() -> str:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<s>", "</s>"])
    made.train_from_iterator(["so it is so it is"] * 3, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return str(made.to_str())


def test_gpt_2_has_its_end_between_and_a_space_before_a_completion() -> None:
    """As LoRA's code for GPT-2 encodes E2E."""
    stored = byte_level()
    end = tokenizers.Tokenizer.from_str(stored).token_to_id(END)
    tokeniser = Tokeniser(stored, length=32, class_token="last", end=end)
    ids = encode_completions(tokeniser, [Text("it is", "so it")]).ids.tolist()
    expected = [tokeniser.tokenizer.encode(part).ids for part in ("it is", " so it")]
    assert ids == [*expected[0], end, *expected[1], end]


def test_a_tokenizer_with_a_mark_in_front_needs_none_between() -> None:
    stored = with_mark()
    tokeniser = Tokeniser(stored, length=32, class_token="last", end=2)
    ids = encode_completions(tokeniser, [Text("it is", "so it")]).ids.tolist()
    plain = [tokeniser.tokenizer.encode(part, add_special_tokens=False).ids for part in ("it is", "so it")]
    assert ids == [1, *plain[0], *plain[1], 2]
    assert encode_prompts(tokeniser, ["it is"]) == [[1, *plain[0]]]


@pytest.mark.parametrize(
    ("prompt", "completion", "kept"),
    [
        (4, 2, "p0 p1 p2 p3 END c0 c1 END"),  # fits
        (4, 5, "p0 p1 p2 p3 END c0 c1 c2"),  # the end of a completion is cut first, and with it its end
        (9, 5, "p4 p5 p6 p7 p8 END c0 c1"),  # down to a quarter of the length, then the start of the prompt
        (9, 1, "p4 p5 p6 p7 p8 END c0 END"),
    ],
)
def test_what_is_too_long_is_cut(prompt: int, completion: int, kept: str) -> None:
    text = Text(" ".join(f"p{i}" for i in range(prompt)), " ".join(f"c{i}" for i in range(completion)))
    words = word_tokenizer([text], "last")
    number = tokenizers.Tokenizer.from_str(words).get_vocab()
    encoded = encode_completions(Tokeniser(words, length=8, class_token="last", end=number[END]), [text])
    assert encoded.ids.tolist() == [number[END if word == "END" else word] for word in kept.split()]
    assert encoded.cut == (prompt + completion + 2 > 8)


# What is judged


def loader_of(model: Classifier, uri: str, batch: int) -> TextEvalLoader:
    split = open_data(uri)["test"]
    return TextEvalLoader(encode_split(model, split), split, batch=batch, device="cpu")


def small(**head: Any) -> Classifier:
    torch.manual_seed(0)
    texts = texts_of(open_data("synthetic:meals?n=200")["train"])
    sizes = {"width": 32, "depth": 2, "heads": 2, "length": 96}
    made = vitrail.create_model(
        "text:gpt", classes=(), head=NextToken(**head), tokenizer=word_tokenizer(texts, "last"), **sizes
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)
    return made.eval()


def test_perplexity_is_that_of_every_token_once_whatever_the_batch() -> None:
    """By hand: one text at a time, one token at a time, over all tokens of all completions."""
    model = small(judged=0)
    stored = tokenizers.Tokenizer.from_str(model.files[TOKENIZER])
    number = stored.get_vocab()
    total, tokens = 0.0, 0
    for text in texts_of(open_data("synthetic:meals?n=200")["test"]):
        prompt, completion = ([*stored.encode(part).ids, number[END]] for part in text)
        for i, word in enumerate(completion):
            texts = torch.tensor([[prompt + completion[:i], [0] * (len(prompt) + i), [1] * (len(prompt) + i)]])
            with torch.no_grad():
                total -= float(model(texts)[0].double().log_softmax(-1)[word])
            tokens += 1
    for batch in (3, 64):
        found = language_figures(model, loader_of(model, "synthetic:meals?n=200", batch), device="cpu")
        assert (found.count, found.tokens) == (20, tokens)
        assert found.loss == pytest.approx(total / tokens, rel=1e-5)  # float32 logits
        assert found.scalars()["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-4)
        assert found.bleu is None


def test_bleu_is_of_each_prompt_once_with_all_its_references() -> None:
    model = small(longest=12)
    loader = loader_of(model, "synthetic:meals?n=200", 8)
    found = language_figures(model, loader, device="cpu")
    texts = texts_of(loader.split)
    prompts = list(dict.fromkeys(text.text for text in texts))
    assert [one.prompt for one in found.written] == prompts
    references = [[text.pair for text in texts if text.text == prompt] for prompt in prompts]
    assert {len(answers) for answers in references} == {2}
    assert found.bleu == corpus_bleu(complete(model, prompts), references)
    assert found.bleu > 0
    fewer = small(longest=12, judged=3)
    assert len(language_figures(fewer, loader, device="cpu").written) == 3


def test_only_a_language_model_has_a_perplexity() -> None:
    texts = texts_of(open_data("synthetic:grammar?n=40")["train"])
    model = vitrail.create_model("text:gpt", classes=2, tokenizer=word_tokenizer(texts, "last"), width=32, depth=1)
    with pytest.raises(ValueError, match="evaluate language models"):
        token_loss(model, [])
    with pytest.raises(ValueError, match="this model classifies"):
        complete(model, ["a"])


# What is written


def greedy(theirs: Any, prompt: list[int], longest: int) -> list[int]:
    written: list[int] = []
    while len(written) < longest:
        word = int(theirs(input_ids=torch.tensor([prompt + written])).logits[0, -1].argmax())
        if word == END_ID:
            break
        written.append(word)
    return written


def spelled(ids: list[int]) -> str:
    return str(tokenizers.Tokenizer.from_str(WORDS).decode(ids))


def test_greedy_completions_take_the_likeliest_word_each_time(folder: Path, theirs: Any) -> None:
    """In one batch, so that padding in front of shorter prompts must not count."""
    prompts = [text.text for text in TEXTS]
    expected = [spelled(greedy(theirs, by_hand(text)[0][: len(text.text.split()) + 1], 6)) for text in TEXTS]
    assert complete(ours(folder, longest=6), prompts) == expected
    assert len(set(expected)) > 1


def test_beams_are_transformers_own(folder: Path, theirs: Any) -> None:
    how = {"num_beams": 4, "length_penalty": 0.8, "no_repeat_ngram_size": 2, "do_sample": False}
    for text in TEXTS:
        prompt = by_hand(text)[0][: len(text.text.split()) + 1]
        made = theirs.generate(torch.tensor([prompt]), max_new_tokens=6, eos_token_id=END_ID, pad_token_id=0, **how)[
            0
        ].tolist()[len(prompt) :]
        expected = spelled(made[: made.index(END_ID)] if END_ID in made else made)
        model = ours(folder, longest=6, beams=4, length_penalty=0.8, no_repeat=2)
        assert complete(model, [text.text]) == [expected]


def test_writing_leaves_the_model_as_it_was(folder: Path) -> None:
    model = ours(folder, longest=4).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    complete(model, ["a b"])
    assert model.training
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in before.items()
    }


# Adapters

ADAPTERS: list[AdapterConfig] = [
    Nola(rank=2, coefficients=8, targets=("qv",)),
    Lora(rank=2, targets=("qv",)),
    Pranc(coefficients=8, targets=("qv",)),
]


@pytest.mark.parametrize("config", ADAPTERS, ids=lambda c: c.kind)
def test_an_adapter_trains_queries_and_values_and_no_word(folder: Path, config: AdapterConfig) -> None:
    model = apply(ours(folder), config)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items() if not name.startswith("adapters.")}
    objective = LanguageModel(model, LanguageModelConfig())
    optimiser = torch.optim.Adam([p for p in objective.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(8):
        optimiser.zero_grad()
        loss = objective(batch_of(model))["loss"]
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".groups." in name for name in trained)
    pieces = {"gpt2": ("c_attn.q", "c_attn.v"), "llama": ("q_proj", "v_proj")}
    kind = "gpt2" if "gpt2" in folder.name else "llama"
    adapter = model.adapters.adapter("default")
    names = {piece.name for rows in adapter.rows.values() for piece, _, _ in rows}
    assert len(names) == 4
    assert all(name.endswith(pieces[kind]) for name in names)


def size(kind: str) -> Any:
    if kind.startswith("gpt2"):
        width, depth = {"gpt2-medium": (1024, 24), "gpt2-large": (1280, 36)}[kind]
        return transformers.GPT2Config(n_embd=width, n_layer=depth, n_head=width // 64)
    width, hidden, depth, keys = {
        "llama2-7b": (4096, 11008, 32, 32),
        "llama2-13b": (5120, 13824, 40, 40),
        "llama2-70b": (8192, 28672, 80, 8),
    }[kind]
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=depth,
        num_attention_heads=width // 128,
        num_key_value_heads=keys,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


@pytest.mark.parametrize(
    ("name", "model", "changes", "expected"),
    [
        ("nola-gpt2", "gpt2-medium", {}, 96_000),
        ("nola-gpt2", "gpt2-medium", {"model.adapter.targets": ("mlp",), "model.adapter.coefficients": 500}, 48_000),
        ("nola-gpt2", "gpt2-large", {}, 144_000),
        ("lora-gpt2", "gpt2-medium", {}, 393_216),
        ("lora-gpt2", "gpt2-medium", {"model.adapter.rank": 1}, 98_304),
        ("lora-gpt2", "gpt2-large", {"model.adapter.rank": 1}, 184_320),
        ("nola-llama2", "llama2-7b", {}, 57_344),
        ("nola-llama2", "llama2-13b", {}, 143_360),
        ("nola-llama2", "llama2-70b", {}, 573_440),
        ("lora-llama2", "llama2-7b", {}, 2_498_560),
        ("lora-llama2", "llama2-13b", {}, 3_911_680),
        ("lora-llama2", "llama2-70b", {}, 12_943_360),
    ],
)
def test_a_recipe_trains_as_many_numbers_as_the_paper_prints(
    name: str, model: str, changes: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    """NOLA (arXiv 2310.02556), on transformers' own architectures, without memory."""
    size(model).save_pretrained(tmp_path)
    (tmp_path / TOKENIZER).write_text(WORDS)
    sizes = {"llama2-13b": "text:meta-llama/Llama-2-13b-hf", "llama2-70b": "text:meta-llama/Llama-2-70b-hf"}
    chosen = with_values(recipe(name, sizes.get(model)), changes).model
    assert chosen.adapter is not None
    made = vitrail.create_model(f"text:{tmp_path}", classes=(), head=chosen.head, device="meta", **chosen.trunk)
    assert counts(apply(made, chosen.adapter)).trained == expected


# Runs

TINY = {"width": 32, "depth": 2, "heads": 2, "length": 96}


def configure(out: Path, **changes: Any) -> RunConfig:
    few = {
        "out": str(out),
        "data.uri": "synthetic:meals?n=100",
        "data.batch": 16,
        "model.trunk": TINY,
        "model.head.longest": 8,
        "optim.epochs": 2.0,
        "optim.warmup": 0.0,
        "engine.device": "cpu",
        "engine.log_every": 1,
        "engine.checkpoint_every": 0.5,
    }
    return with_values(recipe("small-gpt2"), few | changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> vitrail.Run:
    return vitrail.train(configure(tmp_path_factory.mktemp("runs") / "base"), quiet=True)


def lines(path: Path) -> list[dict[str, Any]]:
    timing = {"seconds", "images_per_second"}
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in timing} for line in found]


def test_a_run_leaves_its_figures_its_completions_and_a_report(run: vitrail.Run) -> None:
    last = lines(run.path)[-1]
    assert last["final"]
    assert {"perplexity", "loss", "bleu"} <= set(last)
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    stated = json.loads((run.path / "model" / "model.json").read_text())["stated"]
    assert stated["figures"] == run.figures.scalars()
    written = [json.loads(line) for line in (run.path / "completions.jsonl").read_text().splitlines()]
    assert len(written) == 5
    assert {len(one["references"]) for one in written} == {2}
    page = run.report.read_text()
    assert "perplexity" in page
    assert "Completions" in page
    assert written[0]["prompt"] in page


def test_a_saved_run_is_judged_alike(run: vitrail.Run) -> None:
    figures, said, split = vitrail.evaluate(run.path, "synthetic:meals?n=100", device="cpu")
    assert split == "test"
    assert figures.scalars() == pytest.approx(run.figures.scalars(), abs=1e-5)  # float32, another batch size
    assert tuple(said.logits.shape) == (10, 0)


@pytest.mark.parametrize("kind", ["nola", "lora", "pranc"])
def test_a_run_stores_seed_and_coefficients_alone(run: vitrail.Run, kind: str, tmp_path: Path) -> None:
    config = configure(tmp_path / "run", **{"model.weights": str(run.path), "optim.steps": 3, "optim.lr": 0.02})
    small = {"rank": 2} if kind == "lora" else {"coefficients": 8} | ({"rank": 2} if kind == "nola" else {})
    done = vitrail.train(from_mapping({"model": {"adapter": {"kind": kind, **small}}}, config), quiet=True)
    assert done.adapter is not None
    each = {"nola": 8 + 8, "lora": 2 * (32 + 32), "pranc": 8}[kind]
    assert done.adapter["trained"] == 2 * 2 * each  # queries and values of two blocks
    assert not (done.path / "model" / "model.safetensors").exists()
    stored = read_tensors(done.path / "model" / "adapter.safetensors")
    numbers = sum(tensor.numel() for name, tensor in stored.items() if "seed" not in name)
    assert numbers == done.adapter["trained"]
    figures, _, _ = vitrail.evaluate(done.path, "synthetic:meals?n=100", device="cpu")
    assert figures.loss == pytest.approx(done.figures.loss, abs=1e-5)  # merged: rounding of the weights


def test_a_run_that_is_stopped_and_resumed_equals_one_that_is_not(
    run: vitrail.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        with pytest.raises(Stopped):
            vitrail.train(configure(tmp_path / "stopped"), quiet=True)
    resumed = vitrail.resume(tmp_path / "stopped", quiet=True)
    assert lines(run.path) == lines(resumed.path)
    one, other = (read_tensors(r.path / "model" / "model.safetensors") for r in (run, resumed))
    assert all(torch.equal(one[key], other[key]) for key in one.keys() | other.keys())


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_recipe_trains_for_two_steps(name: str, tmp_path: Path) -> None:
    config = recipe(name)
    changes: dict[str, Any] = {
        "out": str(tmp_path / "run"),
        "data.uri": "synthetic:meals?n=60",
        "data.batch": 8,
        "optim.steps": 2,
        "engine.device": "cpu",
        "engine.accumulate": 2,
        "model.weights": "none",
        "model.head.longest": 4,
        "model.trunk": {**TINY, "length": 64},
    }
    kind = next((kind for kind in ("gpt2", "llama") if kind in name and not name.startswith("small")), None)
    if kind is not None:
        folder = tmp_path / kind
        small = described(kind)
        texts = texts_of(open_data(changes["data.uri"])["train"])
        words = word_tokenizer(texts, "last")
        small.vocab_size = tokenizers.Tokenizer.from_str(words).get_vocab_size()
        transformers.AutoModelForCausalLM.from_config(small).save_pretrained(folder)
        (folder / TOKENIZER).write_text(words)
        changes |= {"model.name": f"text:{folder}", "model.weights": "hub", "model.trunk": {"length": 64}}
        changes |= {"model.head.beams": min(2, config.model.head.beams)}  # type: ignore[union-attr]
    done = vitrail.train(with_values(config, changes), quiet=True)
    assert done.split == "test"
    assert math.isfinite(done.figures.scalars()["perplexity"])
    assert ("bleu" in done.figures.scalars()) == ("llama" not in name)
    assert (done.adapter is None) == (name == "small-gpt2")


def test_cut_texts_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configure(tmp_path / "run", **{"model.trunk": {**TINY, "length": 24}, "optim.steps": 1})
    vitrail.train(config)
    said = [line for line in capsys.readouterr().err.splitlines() if "longer than 24 tokens, and cut" in line]
    assert len(said) == 1
    assert "80 of 80 of train" in said[0]


def test_alpaca_is_learned_and_asked_in_its_own_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vitrail.cli import run as vitrail_command

    rows = [{"instruction": f"Say {word}.", "input": "", "output": word} for word in ("one", "two", "three")] * 8
    file = tmp_path / "alpaca.json"
    file.write_text(json.dumps(rows + [{**row, "input": "now"} for row in rows]))
    changes = {"data.uri": str(file), "data.val_fraction": 0.2, "data.test_fraction": 0.2, "optim.steps": 2}
    done = vitrail.train(configure(tmp_path / "run", **changes), quiet=True)
    asked: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "vitrail.model.heads.next_token.complete", lambda _, texts: asked.append(texts) or ["x"] * len(texts)
        )
        assert vitrail_command(["predict", str(done.path), "Say two.", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"prompt": "Say two.", "completion": "x"}
    assert asked[0][0].endswith("### Instruction:\nSay two.\n\n### Response:")


def test_the_command_line_judges_and_completes(run: vitrail.Run, capsys: pytest.CaptureFixture[str]) -> None:
    from vitrail.cli import run as vitrail_command

    data = ["--data", "synthetic:meals?n=100", "--device", "cpu"]
    assert vitrail_command(["evaluate", str(run.path), *data, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bleu"] == pytest.approx(run.figures.scalars()["bleu"])
    assert found["perplexity"] == pytest.approx(run.figures.scalars()["perplexity"], rel=1e-5)
    assert vitrail_command(["evaluate", str(run.path), *data]) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out
    assert "BLEU" in out
    prompt = "name[The Old Mill], type[pub]"
    assert vitrail_command(["predict", str(run.path), prompt, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip() == complete(vitrail.load(run.path), [prompt])[0]


# What does not go together


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"head": "class_token"}}, "belong together"),
        ({"objective": "supervised"}, "belong together"),
        ({"evaluators": ["classification"]}, "does not evaluate a model that writes"),
    ],
)
def test_what_cannot_be_together_is_said_before_data_are_read(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_mapping(changes, recipe("small-gpt2"))
    assert any("does not evaluate a model that classifies" in p for p in validate(_evaluated("bleu")))


def _evaluated(name: str) -> RunConfig:
    return with_values(recipe("small-text"), {"evaluators": (name,)})


def test_texts_with_classes_and_completions_are_not_mixed_up(run: vitrail.Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has classes, and the model writes"):
        vitrail.train(configure(tmp_path / "a", **{"data.uri": "synthetic:grammar?n=60"}), quiet=True)
    classifies = {"data.uri": "synthetic:meals?n=60", "model.trunk": TINY, "engine.device": "cpu"}
    with pytest.raises(ValueError, match="holds prompts and completions, the model classifies"):
        vitrail.train(with_values(recipe("small-text"), {**classifies, "out": str(tmp_path / "b")}), quiet=True)
    with pytest.raises(ValueError, match="has classes, and the model writes"):
        vitrail.evaluate(run.path, "synthetic:grammar?n=60", device="cpu")


MAKERS: list[tuple[Callable[[], object], str]] = [
    (lambda: vitrail.create_model("deit_tiny", classes=2, head="next_token"), "is for texts"),
    (
        lambda: vitrail.create_model("text:bert", head="next_token", tokenizer=word_tokenizer(TEXTS, "first")),
        "reads both ways",
    ),
]


@pytest.mark.parametrize(("make", "words"), MAKERS)
def test_only_decoders_write(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_what_is_written_may_say_what_the_prompt_said_but_nothing_twice() -> None:
    """transformers' own rule counts the prompt, and would forbid a name of as many tokens."""
    rules = _no_repeats(2, prompt=4)
    ids = torch.tensor([[3, 4, 5, 6, 3], [3, 4, 5, 6, 5]])
    scores = rules(ids, torch.zeros(2, 9))
    assert scores.isfinite().all()  # 3 4 stands in the prompt alone
    scores = rules(torch.tensor([[3, 4, 5, 6, 7, 8, 7]]), torch.zeros(1, 9))
    assert scores.isinf().nonzero().tolist() == [[0, 8]]
    assert _no_repeats(0, prompt=4)(ids, torch.zeros(2, 9)).isfinite().all()
