"""Sentences with a class: readers, the synthetic grammar, tokenising, and whole runs on them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from stopping import stop_after

import vitrail
from vitrail.config import RunConfig, from_mapping
from vitrail.data.open import open_data
from vitrail.data.sources import synthetic_text as grammar
from vitrail.data.sources.text import Text, texts_of
from vitrail.engine.loop import Stopped
from vitrail.engine.progress import Progress
from vitrail.engine.step import Updater
from vitrail.measure.classification import classification, matthews
from vitrail.model.store import read_tensors
from vitrail.recipes import recipe, with_values
from vitrail.recipes.text_models import TEXT

GLUE = Path(os.environ.get("VITRAIL_DATA", "nowhere")) / "glue"


@pytest.fixture
def extra() -> None:
    """The packages of vitrail[text]."""
    for package in ("tokenizers", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not here; install vitrail[text]")


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


# Readers


def test_cola_is_known_by_its_files_and_keeps_quotes(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", 'gj04\t1\t\tHe said "no', 'gj04\t0\t*\tSaid he "so', "bc01\t1\t\tIt, rains.")
    write(tmp_path / "dev.tsv", "gj04\t0\t*\tRains it.")
    data = open_data(tmp_path, val_fraction=0)
    assert data.classes == ("acceptable", "unacceptable")
    assert texts_of(data["train"]) == [Text('He said "no'), Text('Said he "so'), Text("It, rains.")]
    assert data["train"].labels.tolist() == [0, 1, 0]
    assert texts_of(data["test"]) == [Text("Rains it.")]
    assert data.holds_texts


@pytest.mark.parametrize(
    ("task", "header", "dev", "first", "second", "label"),
    [
        ("rte", "index sentence1 sentence2 label", "dev", "sentence1", "sentence2", "label"),
        ("qnli", "index question sentence label", "dev", "question", "sentence", "label"),
        (
            "mnli",
            "index genre sentence1 sentence2 label1 gold_label",
            "dev_matched",
            "sentence1",
            "sentence2",
            "gold_label",
        ),
    ],
)
@pytest.mark.parametrize("said", [True, False])
def test_pairs_of_glue_are_read_by_their_columns(
    tmp_path: Path, task: str, header: str, dev: str, first: str, second: str, label: str, said: bool
) -> None:
    names = header.split()

    def row(number: int, kind: str) -> str:
        cells = {first: f"one {number}", second: f"two {number}", label: kind}
        return "\t".join(cells.get(name, "x") for name in names)

    for stem in ("train", dev):
        write(tmp_path / f"{stem}.tsv", "\t".join(names), row(1, "yes"), row(2, "no"), row(3, "yes"))
    data = open_data(f"text:{tmp_path}?task={task}" if said else str(tmp_path), val_fraction=0)
    assert texts_of(data["test"]) == [Text(f"one {i}", f"two {i}") for i in (1, 2, 3)]
    assert [data.classes[c] for c in data["test"].labels] == ["yes", "no", "yes"]


def test_mnli_can_be_judged_on_other_genres(tmp_path: Path) -> None:
    head = "index\tsentence1\tsentence2\tgold_label"
    for stem, said in (("train", "t"), ("dev_matched", "m"), ("dev_mismatched", "other")):
        write(tmp_path / f"{stem}.tsv", head, f"0\t{said}\tx\ta", f"1\t{said}\tx\tb")
    data = open_data(f"text:{tmp_path}?task=mnli&dev=mismatched", val_fraction=0)
    assert {text.text for text in texts_of(data["test"])} == {"other"}


def test_a_table_has_its_own_columns_quotes_and_splits(tmp_path: Path) -> None:
    rows = ("body,stars,split", '"Good, really",5,train', "Bad,1,train", "So so,5,dev", "Never,1,test")
    path = write(tmp_path / "reviews.csv", *rows)
    data = open_data(f"text:{path}?text=body&label=stars")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 2, "val": 1, "test": 1}
    assert texts_of(data["train"])[0] == Text("Good, really")
    assert data.classes == ("1", "5")


def test_an_undivided_table_is_carved_with_every_class_in_each_split(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tsv", "text\tlabel", *(f"sentence {i}\t{'ab'[i % 2]}" for i in range(40)))
    data = open_data(f"text:{path}", val_fraction=0.2, test_fraction=0.2)
    assert {name: np.bincount(s.labels).tolist() for name, s in data.splits.items()} == {
        "train": [12, 12],
        "val": [4, 4],
        "test": [4, 4],
    }


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("txet\tlabel", "a\tx"), r"no column 'text' \(it has txet, label\).*did you mean 'txet'"),
        (("text\tlabel", "a\tx", "\ty"), r"1 faults.*\n  line 3: empty text"),
        (("text\tlabel", "a\tx", "b\tx"), "only one class"),
        (("text\tlabel", "a\tb\tx"), "line 2 has 3 columns instead of 2"),
        (("text\tlabel",), "a header but no rows"),
        (("text\ttext_pair\tlabel", "a\tb\tx", "c\t\ty"), "line 3: empty text_pair"),
        (("text\tlabel\tsplit", "a\tx\ttrain", "b\ty\ttest"), "classes that no training row has: y"),
        (("text\tlabel\tsplit", "a\tx\ttrain", "b\ty\tlater"), "split 'later' is not train, val or test"),
    ],
)
def test_what_cannot_be_used_is_one_clear_sentence(tmp_path: Path, lines: tuple[str, ...], words: str) -> None:
    path = write(tmp_path / "t.tsv", *lines)
    with pytest.raises(ValueError, match=words):
        open_data(f"text:{path}")


def test_an_unknown_task_or_folder_says_what_is_known(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", "a\tb", "1\t2")
    with pytest.raises(ValueError, match=r"no task 'coal'.*did you mean 'cola'"):
        open_data(f"text:{tmp_path}?task=coal")
    with pytest.raises(ValueError, match="does not say which task it is"):
        open_data(f"text:{tmp_path}")


@pytest.mark.skipif(not GLUE.is_dir(), reason="GLUE is not here; VITRAIL_DATA names the folder that holds glue/")
def test_glue_has_as_many_sentences_as_it_says() -> None:
    """Sizes of GLUE as SoT (arXiv 2104.10935, supplement D) uses it."""
    counts = {"CoLA": (8551, 1043), "RTE": (2490, 277)}
    for name, sizes in counts.items():
        data = open_data(GLUE / name, val_fraction=0)
        assert (len(data["train"]), len(data["test"])) == sizes


# The grammar


def acceptable(sentence: str) -> bool:
    """An independent reader of the language: a regular expression for each number of the subject."""

    def either(words: Any) -> str:
        return f"(?:{'|'.join(words)})"

    nouns = (grammar.NOUNS, [grammar.PLURALS.get(n, n + "s") for n in grammar.NOUNS])
    phrases = [
        rf"{either(grammar.DETERMINERS[n])}(?: {either(grammar.ADJECTIVES)})? {either(nouns[n])}" for n in (0, 1)
    ]
    some = either(phrases)

    def verbs(words: tuple[str, ...], plural: int) -> str:
        return either(w if plural else w + grammar.ENDINGS.get(w, "s") for w in words)

    for plural in (0, 1):
        ends = rf"(?:{verbs(grammar.TRANSITIVE, plural)} {some}|{verbs(grammar.INTRANSITIVE, plural)})"
        whole = rf"{phrases[plural]}(?: {either(grammar.PREPOSITIONS)} {some})? {ends}(?: {either(grammar.ADVERBS)})?"
        if re.fullmatch(whole, sentence):
            return True
    return False


@pytest.mark.parametrize("errors", ["agreement", "order", "both"])
def test_exactly_the_broken_sentences_are_outside_the_language(errors: str) -> None:
    data = open_data(f"synthetic:grammar?n=300&errors={errors}")
    for split in data.splits.values():
        said = [data.classes[c] == "grammatical" for c in split.labels]
        assert said == [acceptable(text.text) for text in texts_of(split)]
        assert sum(said) * 2 == len(said)


def test_each_error_leaves_all_else_as_it_was() -> None:
    for i in range(100):
        whole = grammar.sentence(1, i).split()
        order = grammar.sentence(1, i, ("order",)).split()
        agreement = grammar.sentence(1, i, ("agreement",)).split()
        assert sorted(order) == sorted(whole)
        assert order != whole
        assert sum(a != b for a, b in zip(whole, agreement, strict=True)) == 1


def test_more_sentences_change_none() -> None:
    few, many = (texts_of(open_data(f"synthetic:grammar?n={n}")["train"]) for n in (100, 200))
    assert many[: len(few)] == few


# Tokens


@pytest.fixture
def words() -> list[Text]:
    return [Text("a b c", "d e"), Text("b", "a"), Text("c c c c c c", "a b")]


def test_a_batch_is_what_a_loop_over_its_texts_gives(extra: None, words: list[Text]) -> None:
    from vitrail.data.tokenizer import Tokeniser, word_tokenizer

    encoded = Tokeniser(word_tokenizer(words, "first"), length=32, class_token="first")(words)
    made = encoded.batch([2, 0], 14)
    assert made.shape == (2, 3, 14)
    for place, row in enumerate((2, 0)):
        at = slice(int(encoded.starts[row]), int(encoded.starts[row + 1]))
        size = at.stop - at.start
        for kind, values in enumerate((encoded.ids, encoded.segments, encoded.kinds)):
            assert made[place, kind, :size].tolist() == values[at].tolist()
            assert made[place, kind, size:].tolist() == [0] * (14 - size)
    assert encoded.batch([0, 1]).shape[2] == 8  # class a b c mark d e mark


def test_bert_and_gpt_place_their_marks(extra: None, words: list[Text]) -> None:
    """Kinds: 1 a word, 2 a mark, 3 the class token."""
    from vitrail.data.tokenizer import Tokeniser, word_tokenizer

    bert = Tokeniser(word_tokenizer(words, "first"), length=32, class_token="first")(words[:1]).batch([0])[0]
    assert bert[2].tolist() == [3, 1, 1, 1, 2, 1, 1, 2]
    assert bert[1].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    gpt = Tokeniser(word_tokenizer(words, "last"), length=32, class_token="last", end=2)(words[:1]).batch([0])[0]
    assert gpt[2].tolist() == [1, 1, 1, 2, 1, 1, 3]
    assert gpt[0, [3, 6]].tolist() == [2, 2]


def test_long_texts_are_cut_the_longer_sentence_first(extra: None, words: list[Text]) -> None:
    from vitrail.data.tokenizer import Tokeniser, word_tokenizer

    for place, kinds in (("first", [3, 1, 1, 2, 1, 1, 2]), ("last", [1, 1, 1, 2, 1, 1, 3])):
        end = 2 if place == "last" else None
        made = Tokeniser(word_tokenizer(words, place), length=7, class_token=place, end=end)(words)
        assert made.batch([2])[0, 2].tolist() == kinds
        assert made.cut == (1 if place == "last" else 2)


# Figures


def test_matthews_correlation_is_scikit_learns() -> None:
    generator = np.random.default_rng(0)
    for classes in (2, 3, 7):
        target, scores = generator.integers(classes, size=200), generator.normal(size=(200, classes))
        scores[np.arange(200), target] += 0.7
        figures = classification(scores, target)
        expected = sklearn.metrics.matthews_corrcoef(target, scores.argmax(1))
        assert figures.scalars()["matthews"] == pytest.approx(expected, abs=1e-12)  # the same sums in another order
    assert matthews(np.array([[5, 0], [3, 0]])) == sklearn.metrics.matthews_corrcoef([0] * 5 + [1] * 3, [0] * 8) == 0


# Runs


TINY = {"width": 32, "depth": 2, "heads": 2, "length": 32}


def configure(out: Path, **changes: Any) -> RunConfig:
    small = {
        "out": str(out),
        "data.uri": "synthetic:grammar?n=120",
        "data.batch": 16,
        "model.trunk": TINY,
        "optim.epochs": 2.0,
        "optim.warmup": 0.0,
        "engine.device": "cpu",
        "engine.log_every": 1,
        "engine.checkpoint_every": 0.5,
    }
    return with_values(recipe("small-text"), small | changes)


def lines(run: Path) -> list[dict[str, Any]]:
    timing = {"seconds", "images_per_second"}
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in timing} for line in found]


@pytest.mark.parametrize("name", ["text:bert", "text:gpt"])
def test_a_run_that_is_stopped_and_resumed_equals_one_that_is_not(
    extra: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    changes = {"model.name": name, "engine.ema": 0.9, "engine.accumulate": 2}
    whole = vitrail.train(configure(tmp_path / "whole", **changes), quiet=True)
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        with pytest.raises(Stopped):
            vitrail.train(configure(tmp_path / "stopped", **changes), quiet=True)
    resumed = vitrail.resume(tmp_path / "stopped", quiet=True)
    assert lines(whole.path) == lines(resumed.path)
    one, other = (read_tensors(run.path / "model" / "model.safetensors") for run in (whole, resumed))
    assert all(torch.equal(one[key], other[key]) for key in one.keys() | other.keys())


def test_a_run_on_other_texts_is_not_resumed(extra: None, tmp_path: Path) -> None:
    table = tmp_path / "t.tsv"

    def say(word: str) -> None:
        rows = (f"{'good' if i % 2 else 'bad'} {word} {i}\t{i % 2}" for i in range(40))
        write(table, "text\tlabel", *rows)

    say("film")
    run = vitrail.train(configure(tmp_path / "run", **{"data.uri": f"text:{table}"}), quiet=True)
    say("book")  # as many rows and words, the same labels
    with pytest.raises(ValueError, match="only be resumed on the data it began with"):
        vitrail.resume(run.path, quiet=True)


def test_the_report_of_a_run_tells_matthews_and_shows_words(extra: None, tmp_path: Path) -> None:
    run = vitrail.train(configure(tmp_path / "run", **{"optim.steps": 2}), quiet=True)
    page = run.report.read_text()
    assert "Matthews correlation" in page
    assert "12 test texts are classified correctly" in page
    for row in ("class token", "words", "both"):
        assert f">{row}</th>" in page
    stored = json.loads((run.path / "model" / "model.json").read_text())["stated"]["figures"]
    assert stored["matthews"] == run.figures.scalars()["matthews"]


def test_a_run_on_texts_speaks_of_texts(
    extra: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(Progress, "advance", lambda self, by=1, note="": notes.append(note))
    rows = (f"{'good' if i % 2 else 'bad'} film {i}\t{i % 2}" for i in range(80))
    table = write(tmp_path / "t.tsv", "text\tlabel", *rows)
    vitrail.train(configure(tmp_path / "run", **{"data.uri": f"text:{table}", "data.limit": 48, "optim.steps": 2}))
    said = capsys.readouterr().err + "".join(notes)
    for words in (" texts (0.1 of all) held out", "48 of 64 texts drawn", " texts/s"):
        assert words in said
    assert "image" not in said
    assert "img" not in said


def test_examples_of_a_bad_update_are_called_texts(
    extra: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = Updater.apply

    def spoilt(self: Updater) -> tuple[torch.Tensor, torch.Tensor]:
        self.parameters[0].grad = torch.full_like(self.parameters[0], math.nan)
        return apply(self)

    monkeypatch.setattr(Updater, "apply", spoilt)
    run = vitrail.train(configure(tmp_path / "run", **{"optim.steps": 2}), quiet=True)
    assert any("(texts " in note for note in run.notes)


def test_a_saved_run_is_judged_alike(extra: None, tmp_path: Path) -> None:
    run = vitrail.train(configure(tmp_path / "run", **{"optim.steps": 3}), quiet=True)
    figures, _, split = vitrail.evaluate(run.path, "synthetic:grammar?n=120", device="cpu")
    assert split == "test"
    assert figures.loss == pytest.approx(run.figures.loss, abs=1e-6)  # float32, another batch size


def test_padding_to_one_length_learns_the_same(extra: None, tmp_path: Path) -> None:
    """Without dropout the two differ by rounding alone; five steps of it stay below 1e-4 of a loss near 0.7."""
    runs = []
    for pad in ("longest", "length"):
        config = configure(tmp_path / pad, **{"data.pad": pad, "optim.steps": 5})
        config = replace(config, model=replace(config.model, head=replace(config.model.head, drop=0.0)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.Dropout, "forward", lambda _, x: x)
            patch.setattr(torch.nn.functional, "dropout", lambda x, *a, **k: x)
            sdpa = torch.nn.functional.scaled_dot_product_attention
            patch.setattr(
                torch.nn.functional,
                "scaled_dot_product_attention",
                lambda *a, sdpa=sdpa, **k: sdpa(*a, **{**k, "dropout_p": 0.0}),
            )
            runs.append(vitrail.train(config, quiet=True))
    assert math.isclose(runs[0].figures.loss, runs[1].figures.loss, abs_tol=1e-4)


def test_an_adapter_of_a_text_model_is_stored_alone_and_found_again(extra: None, tmp_path: Path) -> None:
    base = vitrail.train(configure(tmp_path / "base", **{"optim.steps": 2}), quiet=True)
    config = configure(tmp_path / "adapted", **{"optim.steps": 3, "model.weights": str(base.path)})
    config = from_mapping({"model": {"adapter": {"kind": "nola", "coefficients": 8, "rank": 2}}}, config)
    run = vitrail.train(config, quiet=True)
    assert run.adapter is not None
    head = sum(p.numel() for n, p in run.model.named_parameters() if n.startswith("head."))
    assert run.adapter["trained"] == head + 2 * 2 * (8 + 8)  # q and v of two blocks, 8 + 8 each
    figures, _, _ = vitrail.evaluate(run.path, "synthetic:grammar?n=120", device="cpu")
    assert figures.loss == pytest.approx(run.figures.loss, abs=1e-5)  # merged: rounding of the weights


@pytest.mark.parametrize("name", TEXT)
def test_a_recipe_trains_for_two_steps(extra: None, tmp_path: Path, name: str) -> None:
    changes = {
        "out": str(tmp_path / "run"),
        "data.uri": "synthetic:grammar?n=60",
        "data.batch": 8,
        "model.trunk": TINY,
        "optim.steps": 2,
        "engine.device": "cpu",
    }
    run = vitrail.train(with_values(recipe(name), changes), quiet=True)
    assert run.split == "test"
    assert (run.path / "model" / "tokenizer.json").is_file()


def test_texts_and_images_are_not_mixed_up(tmp_path: Path) -> None:
    image = with_values(
        recipe("vit"), {"data.uri": "synthetic:grammar?n=60", "engine.device": "cpu", "out": str(tmp_path / "a")}
    )
    with pytest.raises(ValueError, match="holds texts, the model reads images"):
        vitrail.train(image, quiet=True)
    text = configure(tmp_path / "b", **{"data.uri": "synthetic:shapes?n=60&size=32"})
    with pytest.raises(ValueError, match="holds images, the model reads texts"):
        vitrail.train(text, quiet=True)


@pytest.mark.parametrize(("weights", "words"), [("timm", "timm has no text models"), ("hub", "hub is for text:FOLDER")])
def test_weights_that_a_text_model_cannot_have_are_said_before_data_are_read(weights: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        vitrail.train(with_values(recipe("small-text"), {"model.weights": weights}), quiet=True)


def test_the_command_line_predicts_sentences_and_pairs(
    extra: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vitrail.cli import run as vitrail_command

    done = vitrail.train(configure(tmp_path / "run", **{"optim.steps": 2}), quiet=True)
    capsys.readouterr()
    words = ["predict", str(done.path), "the dog sleeps", "some kings run\tthe cat waits", "--json", "--device", "cpu"]
    assert vitrail_command(words) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["text"] for one in said] == ["the dog sleeps", "some kings run\tthe cat waits"]
    assert all(one["label"] in grammar.CLASSES for one in said)


@pytest.mark.parametrize("verb", ["check", "pack"])
def test_what_is_for_images_only_refuses_texts(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vitrail.cli import run as vitrail_command

    more = [str(tmp_path / "packed")] if verb == "pack" else []
    assert vitrail_command([verb, "synthetic:grammar?n=40", *more]) == 2
    assert "holds texts, and this is for images only" in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("tokenizers", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not here; install vitrail[text]")
    changes = {"optim.steps": 2, "engine.checkpoint_every": 0.0}
    return vitrail.train(configure(tmp_path_factory.mktemp("texts") / "run", **changes), quiet=True).path


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("bench {run} --device cpu", "{run} reads texts, and bench measures models of images; how fast it trained"),
        ("bench text:bert --device cpu", "text:bert reads texts, and bench measures models of images"),
        (
            "bench vit_micro_28 --data synthetic:grammar?n=40",
            "synthetic:grammar?n=40 holds texts, and bench measures on",
        ),
        ("export {run} {run}/m.pt2", "m.pt2 was not written: the model reads texts, and such files take images; use"),
    ],
)
def test_commands_for_models_of_images_say_so_in_one_sentence(
    finished: Path, capsys: pytest.CaptureFixture[str], words: str, reason: str
) -> None:
    from vitrail.cli import run as vitrail_command

    assert vitrail_command(words.format(run=finished).split()) == 2
    said = capsys.readouterr().err
    assert reason.format(run=finished) in said
    assert len(said.splitlines()) == 1


def test_runs_on_texts_are_compared_without_a_price(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "other")
    made, _ = vitrail.compare_runs([finished, tmp_path / "other"], out=tmp_path / "compared", quiet=True)
    assert [row.price for row in made.rows] == [None, None]
    assert "reads texts" in made.notes[0]
