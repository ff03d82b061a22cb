"""transformers encoders and decoders under our heads: masks, the class token's place, adapters, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from vitrail.data.sources.text import Text
from vitrail.model.adapters.apply import apply, counts
from vitrail.model.adapters.config import Lora
from vitrail.model.classifier import Classifier
from vitrail.model.heads.config import ClassToken, Mean, SecondOrder

transformers = pytest.importorskip("transformers", reason="transformers is not here; install vitrail[text]")
pytest.importorskip("tokenizers", reason="tokenizers is not here; install vitrail[text]")

from vitrail.data.tokenizer import TOKENIZER, word_tokenizer  # noqa: E402
from vitrail.measure.saliency import word_influence  # noqa: E402
from vitrail.model.text_build import predict_texts  # noqa: E402

TEXTS = [Text("a b c d", "e f"), Text("c", "a"), Text("b b a", "f d c a b e"), Text("f", "e e")]
BOTH = SecondOrder(heads=1, rows=6, columns=5)
# float32 and sums in another order: a few units in the last place of logits near 1
ROUNDING = {"atol": 2e-6, "rtol": 1e-5}
KINDS = ("text:bert", "text:gpt")


def make(name: str, head: Any = BOTH, **more: Any) -> Classifier:
    torch.manual_seed(0)
    words = word_tokenizer(TEXTS, "last" if name.endswith("gpt") else "first")
    return vitrail.create_model(
        name, classes=("no", "yes"), head=head, tokenizer=words, width=32, depth=2, heads=2, length=32, **more
    ).eval()


def read(model: Classifier, rows: list[int], length: int | None = None) -> Tensor:
    return model.trunk.tokeniser(model.files[TOKENIZER])(TEXTS).batch(rows, length)


def hidden(model: Classifier, row: int) -> tuple[Tensor, Tensor]:
    """Of one text alone, without padding: hidden states as transformers gives them, and kinds."""
    ids, segments, kinds = read(model, [row])[0]
    more = {"token_type_ids": segments[None]} if model.spec["name"] == "text:bert" else {}
    return model.trunk.backbone(input_ids=ids[None], **more).last_hidden_state[0], kinds


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("fusion", ["sum", "words_only", "class_only", "aggregate_all", "late"])
def test_padding_does_not_change_logits(name: str, fusion: str) -> None:
    model = make(
        name, SecondOrder(heads=1, rows=6, columns=5, fusion=fusion) if fusion != "class_only" else ClassToken()
    )
    torch.testing.assert_close(model(read(model, [0, 1, 2, 3], 30)), model(read(model, [0, 1, 2, 3])), **ROUNDING)


def test_what_padding_holds_does_not_matter(name: str) -> None:
    model = make(name)
    texts = read(model, [0, 1], 20)
    other = texts.clone()
    other[:, 0][texts[:, 2] == 0] = 3
    torch.testing.assert_close(model(other), model(texts), **ROUNDING)


def test_the_order_of_a_batch_does_not_matter(name: str) -> None:
    model = make(name)
    torch.testing.assert_close(
        model(read(model, [3, 1, 0, 2])), model(read(model, [0, 1, 2, 3]))[[3, 1, 0, 2]], **ROUNDING
    )


def test_the_class_token_is_the_first_or_the_last_real_one(name: str) -> None:
    model = make(name)
    tokens = model.tokens(read(model, [0, 1, 2, 3]))
    for row in range(4):
        states, kinds = hidden(model, row)
        place = 0 if name == "text:bert" else len(kinds) - 1
        torch.testing.assert_close(tokens.token(0)[row], states[place], **ROUNDING)


def test_other_tokens_keep_their_order_behind_the_class_token(name: str) -> None:
    model = make(name)
    tokens = model.tokens(read(model, [1, 2]))
    assert tokens.prefix == 1
    assert tokens.grid == (1, tokens.sequence.shape[1] - 1)
    for row, text in enumerate((1, 2)):
        states, _ = hidden(model, text)
        rest = states[1:] if name == "text:bert" else states[:-1]
        torch.testing.assert_close(tokens.patches[row, : len(rest)], rest, **ROUNDING)


@pytest.mark.parametrize("sep_is_word", [False, True])
def test_second_order_pooling_sees_exactly_the_words(name: str, sep_is_word: bool) -> None:
    """Against a loop over sentences: cross-covariance of the words alone, by the formula."""
    model = make(name, SecondOrder(heads=1, rows=6, columns=5, normalization="none"), sep_is_word=sep_is_word)
    found = model(read(model, [0, 1, 2, 3], 25))
    head = model.head
    for row in range(4):
        states, kinds = hidden(model, row)
        words = states[(kinds == 1) | ((kinds == 2) & sep_is_word)]
        token = states[0] if name == "text:bert" else states[-1]
        x, y = (words @ head.pool.project.weight.T).split((6, 5), 1)
        pooled = (x.T @ y / len(words)).flatten()
        torch.testing.assert_close(found[row], head.fc(token) + head.fc_words(pooled), **ROUNDING)


def test_words_alone_and_mean_leave_separators_out() -> None:
    model = make("text:bert", Mean())
    states, kinds = hidden(model, 0)
    torch.testing.assert_close(
        model.head.pool(model.tokens(read(model, [0], 20)))[0], states[kinds == 1].mean(0), **ROUNDING
    )


def test_segments_tell_two_sentences_apart_in_bert_alone() -> None:
    for name, differs in (("text:bert", True), ("text:gpt", False)):
        model = make(name)
        texts = read(model, [0])
        other = texts.clone()
        other[:, 1] = 0
        assert torch.equal(model(texts), model(other)) != differs


def test_the_pooler_is_bert_s_own_layer_on_the_class_token() -> None:
    model = make("text:bert", ClassToken(), pooler=True)
    states, _ = hidden(model, 0)
    pooler = model.trunk.backbone.pooler.dense
    torch.testing.assert_close(model.tokens(read(model, [0])).token(0)[0], torch.tanh(pooler(states[0])), **ROUNDING)
    assert "trunk.backbone.pooler.dense.weight" not in make("text:bert", ClassToken()).state_dict()
    with pytest.raises(ValueError, match="has no pooler"):
        make("text:gpt", pooler=True)


def test_a_saved_model_needs_nothing_but_its_folder(name: str, tmp_path: Path) -> None:
    model = make(name)
    again = vitrail.load(model.save(tmp_path / "model"))
    assert torch.equal(again(read(again, [0, 1])), model(read(model, [0, 1])))
    said = predict_texts(again, [("a b c d", "e f")])[0]
    expected = model(read(model, [0])).detach().softmax(-1)[0]
    assert said.probability == pytest.approx(float(expected.max()), abs=1e-6)
    (tmp_path / "model" / TOKENIZER).unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks tokenizer\.json"):
        vitrail.load(tmp_path / "model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny DistilBERT as transformers saves it, with a tokenizer."""
    words = word_tokenizer(TEXTS, "first")
    torch.manual_seed(1)
    config = transformers.DistilBertConfig(vocab_size=12, dim=32, n_layers=2, n_heads=2, hidden_dim=64, pad_token_id=0)
    transformers.DistilBertModel(config).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / TOKENIZER).write_text(words)
    return tmp_path / "theirs"


def test_a_folder_of_transformers_gives_architecture_tokenizer_and_weights(folder: Path) -> None:
    model = vitrail.create_model(f"text:{folder}", classes=2, weights="hub").eval()
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    ids, _, kinds = read(model, [0, 2]).unbind(1)
    states = theirs(input_ids=ids, attention_mask=(kinds != 0).long()).last_hidden_state
    assert torch.equal(model.tokens(read(model, [0, 2])).sequence[kinds != 0], states[kinds != 0])
    other = vitrail.create_model(f"text:{folder}", classes=2, weights=str(folder)).eval()
    assert torch.equal(
        other.trunk.state_dict()["backbone.embeddings.word_embeddings.weight"], theirs.embeddings.word_embeddings.weight
    )
    anew = vitrail.create_model(f"text:{folder}", classes=2)
    assert not torch.equal(
        anew.trunk.backbone.embeddings.word_embeddings.weight, theirs.embeddings.word_embeddings.weight
    )


def test_what_does_not_fit_is_one_sentence(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no text model 'no-such-model' as a folder, nor in the cache.*hub:fetch"):
        vitrail.create_model("text:no-such-model", classes=2)
    with pytest.raises(ValueError, match="512 positions, so texts of 600 tokens do not fit"):
        vitrail.create_model(f"text:{folder}", classes=2, length=600)
    with pytest.raises(ValueError, match=r"no part 'lenght'.*did you mean 'length'"):
        vitrail.create_model(f"text:{folder}", classes=2, lenght=60)
    more = [Text(" ".join(f"w{i}" for i in range(31)))]
    with pytest.raises(ValueError, match="tokenizer has 35 tokens, its architecture 12"):
        vitrail.create_model(f"text:{folder}", classes=2, tokenizer=word_tokenizer(more, "first"))
    (folder / "config.json").write_text('{"model_type": "t5", "vocab_size": 12, "num_layers": 1, "d_model": 16}')
    with pytest.raises(ValueError, match="has an encoder and a decoder"):
        vitrail.create_model(f"text:{folder}", classes=2)
    with pytest.raises(ValueError, match="needs a vocabulary"):
        vitrail.create_model("text:bert", classes=2)
    with pytest.raises(ValueError, match="whole numbers"):
        make("text:bert")(torch.zeros(2, 3, 32, 32))


@pytest.mark.parametrize(("name", "pieces"), [("text:bert", 2 * 2 * 2), ("text:gpt", 2 * 2 * 2)])
def test_an_adapter_finds_queries_and_values_and_starts_as_nothing(name: str, pieces: int) -> None:
    model = make(name)
    before = model(read(model, [0, 1, 2]))
    apply(model, Lora(rank=2, train_head=False))
    assert counts(model).adapter == pieces * 2 * 32  # q and v of two blocks, two factors each of 2 x 32
    torch.testing.assert_close(model(read(model, [0, 1, 2])), before, **ROUNDING)


def test_depths_of_parameters_run_from_embeddings_to_head(name: str) -> None:
    model = make(name)
    found = {p: model.layer_of(p) for p, _ in model.named_parameters()}
    assert {found[p] for p in found if "embeddings." in p or ".wte." in p or ".wpe." in p} == {0}
    assert {found[p] for p in found if ".layer.1." in p or ".h.1." in p} == {2}
    assert {found[p] for p in found if p.startswith("head.")} == {3} == {model.layers}


def test_influence_of_both_is_the_sum_of_class_token_and_words(name: str) -> None:
    """Gradients add up, and the three rows are of the same logit."""
    model = make(name)
    found = word_influence(model, read(model, [0, 2]))
    torch.testing.assert_close(found["both"], found["class token"] + found["words"], **ROUNDING)
    assert float(found["both"].abs().max()) > 0


def test_influence_is_the_change_of_the_logit_when_a_word_grows() -> None:
    """Against differences in float64: scale one word's embedding by 1 + h."""
    model = make("text:bert").double()
    texts, step = read(model, [0]), 1e-5
    chosen = model(texts).argmax(1)
    found = word_influence(model, texts)["both"][0]
    table = model.trunk.backbone.get_input_embeddings()
    for place in (1, 3):

        def grown(_: Any, __: Any, out: Tensor, by: float, place: int = place) -> Tensor:
            scale = torch.ones(out.shape[1], 1, dtype=out.dtype)
            scale[place] += by
            return out * scale

        values = []
        for by in (step, -step):
            handle = table.register_forward_hook(lambda m, i, o, by=by: grown(m, i, o, by))
            values.append(float(model(texts)[0, chosen[0]].detach()))
            handle.remove()
        # central differences: error of the order of h^2 = 1e-10
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(float(found[place]), rel=1e-5, abs=1e-8)
