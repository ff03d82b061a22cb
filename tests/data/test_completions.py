"""Prompts and completions: what is read, how it is divided, the synthetic tables, and BLEU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vitrail.data.open import open_data
from vitrail.data.sources import synthetic_text as meals
from vitrail.data.sources.text import Text, prompt_of, texts_of
from vitrail.measure.language import corpus_bleu, words_of


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# Readers


def test_e2e_is_known_by_its_files_and_keeps_every_reference(tmp_path: Path) -> None:
    write(
        tmp_path / "trainset.csv", 'mr,ref\n"name[A], food[B]","A, with B."\n"name[A], food[B]",B at A.\nname[C],C!\n'
    )
    write(tmp_path / "devset.csv", "mr,ref\nname[D],D.\n")
    write(tmp_path / "testset.csv", "MR\nname[E]\n")  # as published: without answers, so it cannot be judged by
    write(tmp_path / "testset_w_refs.csv", "mr,ref\nname[E],E.\nname[E],This is E.\n")
    data = open_data(tmp_path)
    assert texts_of(data["train"]) == [
        Text("name[A], food[B]", "A, with B."),
        Text("name[A], food[B]", "B at A."),
        Text("name[C]", "C!"),
    ]
    assert texts_of(data["val"]) == [Text("name[D]", "D.")]
    assert texts_of(data["test"]) == [Text("name[E]", "E."), Text("name[E]", "This is E.")]
    assert data.classes == ()
    assert data.holds_texts
    assert data.holds_completions


def test_a_table_has_its_own_columns_and_splits(tmp_path: Path) -> None:
    table = write(tmp_path / "t.tsv", 'data\tsaid\twhere\na "b\tx\ttrain\nc\ty\ttest\n')
    data = open_data(f"text:{table}?prompt=data&completion=said&split=where", val_fraction=0)
    assert texts_of(data["train"]) == [Text('a "b', "x")]
    assert texts_of(data["test"]) == [Text("c", "y")]


def test_instructions_become_alpaca_s_prompts(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1, 2", "output": "3"},
        {"instruction": "Greet.", "input": "", "output": "Hello\n"},
        {"instruction": "Be silent.", "input": "", "output": ""},
    ]
    file = write(tmp_path / "alpaca.json", json.dumps(rows))
    data = open_data(file, val_fraction=0, test_fraction=0)
    before = "Below is an instruction that describes a task"
    after = "Write a response that appropriately completes the request."
    assert texts_of(data["train"]) == [
        Text(
            f"{before}, paired with an input that provides further context. {after}\n\n"
            "### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:",
            "3",
        ),
        Text(f"{before}. {after}\n\n### Instruction:\nGreet.\n\n### Response:", "Hello"),
    ]
    assert data.notes[0] == "1 rows without a prompt or a completion are left out"
    assert data["train"].reader.template == "alpaca"
    assert prompt_of("alpaca", "Add.", "1, 2") == texts_of(data["train"])[0].text


def test_lines_of_json_may_name_prompts_themselves(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", '{"q": "1 + 1", "a": 2}\n\n{"q": "2 + 2", "a": "4"}\n')
    data = open_data(f"text:{file}?prompt=q&completion=a", val_fraction=0, test_fraction=0)
    assert texts_of(data["train"]) == [Text("1 + 1", "2"), Text("2 + 2", "4")]
    assert data["train"].reader.template == ""


def test_a_prompt_is_never_on_two_sides_of_a_carved_split(tmp_path: Path) -> None:
    rows = "".join(f"prompt {i % 20}\tanswer {i}\n" for i in range(60))
    data = open_data(f"text:{write(tmp_path / 't.tsv', 'prompt	completion' + chr(10) + rows)}")
    prompts = {name: {text.text for text in texts_of(split)} for name, split in data.splits.items()}
    assert {name: len(found) for name, found in prompts.items()} == {"train": 16, "val": 2, "test": 2}
    assert len(set.union(*prompts.values())) == 20
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 48, "val": 6, "test": 6}
    assert "val: 2 prompts (0.1 of all) held out, stratified, seed 0" in data.notes


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.tsv", "mr\tref\na\tb\tc\n", "line 2 has 3 columns instead of 2"),
        ("t.csv", "mr,ref,split\na,b,train\nc,d,later\n", "line 3: split 'later' is not train, val or test"),
        ("t.json", '{"instruction": "a"}', "entry 0 is no object"),
        ("t.json", '[{"instruction": "a", "outputs": "b"}]', "has neither instruction and output nor 'prompt'"),
        ("t.json", "[", "cannot be read as JSON"),
        ("t.json", '[{"instruction": "", "output": "b"}]', "no row with both"),
    ],
)
def test_what_cannot_be_used_is_one_clear_sentence(tmp_path: Path, name: str, content: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_data(f"text:{write(tmp_path / name, content)}")


def test_an_unknown_column_is_named_with_what_is_near(tmp_path: Path) -> None:
    file = write(tmp_path / "t.csv", "data,said\na,b\n")
    with pytest.raises(ValueError, match=r"no column 'dat' \(it has data, said\).*did you mean 'data'"):
        open_data(f"text:{file}?prompt=dat&completion=said")


def test_what_needs_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="has no classes"):
        open_data("synthetic:meals", shots=2)


# Synthetic tables


@pytest.mark.parametrize("style", meals.STYLES)
def test_every_text_says_everything_that_its_table_says(style: str) -> None:
    data = open_data(f"synthetic:meals?n=400&style={style}")
    said = {"no": ("not for children", "Leave the children", "no children"), "yes": ("for children ,", "welcome")}
    for text in texts_of(data["train"]):
        facts = dict(part.rstrip("]").split("[") for part in text.text.split(", "))
        for name, value in facts.items():
            ways = said[value] if name == "children" else (value,)
            assert any(way in text.pair for way in ways), (name, text)


def test_tables_have_two_texts_and_are_in_one_split_alone() -> None:
    data = open_data("synthetic:meals?n=4000")
    found = {name: [text.text for text in texts_of(split)] for name, split in data.splits.items()}
    assert sum(map(len, found.values())) == 4000
    assert not set(found["train"]) & set(found["test"])
    assert not set(found["val"]) & (set(found["train"]) | set(found["test"]))
    assert all(found["test"].count(prompt) % 2 == 0 for prompt in found["test"])


def test_curt_texts_need_no_word_that_full_ones_lack() -> None:
    """Else a model of the one, whose vocabulary is its words, could not write the other."""
    full, curt = (texts_of(open_data(f"synthetic:meals?n=2000&style={style}")["train"]) for style in meals.STYLES)
    cut = str.maketrans("[],", "   ")
    known = {word for text in full for part in text for word in part.translate(cut).split()}
    assert {word for text in curt for word in text.pair.translate(cut).split()} <= known


def test_more_rows_change_none() -> None:
    few, many = (texts_of(open_data(f"synthetic:meals?n={n}&seed=3")["train"]) for n in (40, 80))
    assert many[: len(few)] == few
    assert texts_of(open_data("synthetic:meals?n=40&seed=4")["train"]) != few


# BLEU: figures are those that sacrebleu 2.6.0 prints, over 100

BLEU = [
    (
        ["The Vaults is a cheap pub near Café Adriatic."],
        [["A cheap pub, The Vaults, is near Café Adriatic.", "The Vaults is a cheap pub near Café Adriatic."]],
        100.00000000000004,
    ),
    (
        ["the cat sat on the mat", "a dog ran , quickly to it"],
        [["the cat is on the mat", "a cat sat on the mat"], ["a dog ran quickly to it", "the dog ran to it"]],
        58.84191416232736,
    ),
    (["It costs 3.50, not 4-5!"], [["It costs £3.50, and not 4-5."]], 33.010083098515025),
    (["the cat likes a dog"], [["the cat and a dog"]], 30.213753973567677),  # no three words in a row: smoothed
    (["the the the"], [["the cat"]], 0.0),
    (["no word here at all"], [["completely different text"]], 0.0),
]


@pytest.mark.parametrize(("written", "references", "expected"), BLEU)
def test_bleu_is_sacrebleus(written: list[str], references: list[list[str]], expected: float) -> None:
    assert 100 * corpus_bleu(written, references) == pytest.approx(
        expected, abs=1e-10
    )  # the same sums in another order


def test_bleu_counts_the_corpus_and_not_the_mean_of_texts() -> None:
    written, references = BLEU[1][:2]
    alone = [corpus_bleu([text], [answers]) for text, answers in zip(written, references, strict=True)]
    assert corpus_bleu(written, references) != pytest.approx(sum(alone) / 2, abs=1e-3)
    with pytest.raises(ValueError, match="has none"):
        corpus_bleu(["a"], [[]])


def test_words_are_cut_as_nist_does() -> None:
    assert words_of('"Non-stop", 1,000.5 at 5-6 p.m. &amp; more') == [
        *('"', "Non-stop", '"', ",", "1,000.5", "at", "5", "-", "6", "p", ".", "m", ".", "&", "more")
    ]
