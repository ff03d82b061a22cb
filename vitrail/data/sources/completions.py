"""Prompts and what is to be written after them: tables as E2E's, instructions as Alpaca's.

    e2e/                                    trainset.csv, devset.csv, testset_w_refs.csv with the columns mr and ref
    text:meals.tsv?prompt=data&completion=said   any two columns, and perhaps split
    alpaca_data.json                        a list of instruction, input (which may be empty) and output; or .jsonl

Each row is one example. Rows of one split with the same prompt are several right answers to it: they are learned from
one by one, and judged together. So a prompt never stands on two sides of a split that is carved off here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.dataset import UNDIVIDED, DataSet, Split, carve
from vitrail.data.sources.folder import split_called
from vitrail.data.sources.text_files import TABLES, Text, TextReader, _lines, make_data, texts_of
from vitrail.schema import near

OPTIONS = ("prompt", "completion", "split")
COLUMNS = (("prompt", "completion"), ("mr", "ref"))  # known without being named
JSON = (".json", ".jsonl")
INSTRUCTION = ("instruction", "input", "output")
SPLITS = {"trainset": "train", "devset": "val", "testset": "test", "testset_w_refs": "test"}  # as E2E calls them
ALPACA = "alpaca"
TEMPLATES = {
    True: (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
    ),
    False: (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:"
    ),
}
"""Alpaca's, with an input and without."""


class Example(NamedTuple):
    """One row, and where it stood."""

    place: str
    prompt: str
    completion: str
    split: str
    template: str = ""


def prompt_of(template: str, text: str, more: str = "") -> str:
    """What a model that was trained with `template` expects for an instruction and its input; empty: the text itself.

    >>> prompt_of("", "name[The Eagle]")
    'name[The Eagle]'
    >>> prompt_of("alpaca", "Add.", "1, 2").splitlines()[-4:]
    ['### Input:', '1, 2', '', '### Response:']
    """
    return text if template != ALPACA else TEMPLATES[bool(more)].format(instruction=text, input=more)


def holds_completions(data: DataSet) -> bool:
    """Whether a data set is of prompts and completions, which have no classes."""
    return any(getattr(s.reader, "completions", False) for s in data.splits.values())


def template_of(data: DataSet) -> str:
    """How instructions were made prompts; empty: they are as the source has them."""
    return next((str(getattr(s.reader, "template", "")) for s in data.splits.values()), "")


def is_completions(path: Path, options: Mapping[str, str] | None = None) -> bool:
    """Whether a file, or the training file of a folder, holds prompts and completions, by its kind and first line."""
    if path.is_dir():
        return any(split == "train" and is_completions(file) for file, split in _files(path))
    suffix = path.suffix.lower()
    if suffix in JSON:
        return True
    if suffix not in TABLES:
        return False
    if options and {"prompt", "completion"} & set(options):
        return True
    try:
        _, header = next(_lines(path, str(path)), ("", []))
    except ValueError:
        return False
    names = {cell.strip() for cell in header}
    return any(names.issuperset(pair) for pair in COLUMNS)


def open_completions(path: Path, uri: str, options: Mapping[str, str]) -> DataSet:
    """The rows of a file, or of a folder with a file a split. Raises `ValueError`, with what to do, for other files."""
    if path.is_dir():
        found = [
            row._replace(split=split, place=f"{file.name} {row.place}")
            for file, split in _files(path)
            for row in _read(file, uri, options)
        ]
        divided = True
    else:
        found = list(_read(path, uri, options))
        divided = any(row.split for row in found)
    rows = [row for row in found if row.prompt and row.completion]
    if not rows:
        raise ValueError(f"{uri} has no row with both a prompt and a completion; add some")
    odd = [row for row in rows if divided and split_called(row.split) is None]
    if odd:
        raise ValueError(f"{uri}: {odd[0].place}: split {odd[0].split!r} is not train, val or test; mend that column")
    splits: dict[str, Any] = {UNDIVIDED: np.arange(len(rows))}
    if divided:
        meant = np.array([split_called(row.split) for row in rows])
        splits = {name: np.flatnonzero(meant == name) for name in ("train", "val", "test") if name in meant}
        if "train" not in splits:
            raise ValueError(f"{uri} has {' and '.join(splits)} but no rows to train on")
    left_out = len(found) - len(rows)
    notes = (f"{left_out} rows without a prompt or a completion are left out",) if left_out else ()
    return make_completions(uri, [(row.prompt, row.completion) for row in rows], splits, rows[0].template, notes)


def make_completions(
    uri: str,
    pairs: Sequence[tuple[str, str]],
    splits: Mapping[str, Any],
    template: str = "",
    notes: tuple[str, ...] = (),
) -> DataSet:
    """A data set of these prompts and completions, without classes; `splits` names the rows of each."""
    made = make_data(uri, [Text(*pair) for pair in pairs], (), np.zeros(len(pairs), np.int64), splits)
    reader: Any = TextReader(tuple(Text(*pair) for pair in pairs), True, template)
    kept = {name: replace(split, reader=reader) for name, split in made.splits.items()}
    return replace(made, splits=kept, notes=notes)


def carve_prompts(data: DataSet, val_fraction: float, test_fraction: float, seed: int) -> DataSet:
    """As `carve`, by prompts: all rows of one prompt go to the same split."""
    prompts = {name: [text.text for text in texts_of(split)] for name, split in data.splits.items()}
    thin = {name: split.take(_firsts(prompts[name])) for name, split in data.splits.items()}
    carved = carve(replace(data, splits=thin, notes=()), val_fraction, test_fraction, seed)
    splits: dict[str, Split] = {}
    for name, chosen in carved.splits.items():
        source = name if name in data.splits else UNDIVIDED if UNDIVIDED in data.splits else "train"
        wanted = {text.text for text in texts_of(chosen)}
        splits[name] = data[source].take([i for i, prompt in enumerate(prompts[source]) if prompt in wanted], name)
    notes = tuple(note.replace(f" {data.things} ", " prompts ") for note in carved.notes)
    return replace(data, splits=splits, notes=(*data.notes, *notes))


def _firsts(prompts: Sequence[str]) -> list[int]:
    first: dict[str, int] = {}
    for row, prompt in enumerate(prompts):
        first.setdefault(prompt, row)
    return list(first.values())


def _files(path: Path) -> list[tuple[Path, str]]:
    """Files of a folder whose names say which split they are."""
    found = []
    for file in sorted(path.iterdir()):
        split = SPLITS.get(file.stem.lower()) or split_called(file.stem)
        if split is not None and file.suffix.lower() in (*TABLES, *JSON) and file.is_file():
            found.append((file, split))
    with_answers = {split for file, split in found if file.stem.lower() == "testset_w_refs"}
    return [(file, split) for file, split in found if not (split in with_answers and file.stem.lower() == "testset")]


def _read(path: Path, uri: str, options: Mapping[str, str]) -> Iterator[Example]:
    if path.suffix.lower() in JSON:
        yield from _objects(path, uri, options)
        return
    if path.suffix.lower() not in TABLES:
        raise ValueError(f"{uri}: prompts and completions are a .csv, .tsv, .json or .jsonl file, not {path.name}")
    lines = _lines(path, uri)
    _, first = next(lines, ("", []))
    header = [cell.strip() for cell in first]
    known = next((pair for pair in COLUMNS if set(pair) <= set(header)), COLUMNS[0])
    names = dict(zip(("prompt", "completion"), known, strict=True)) | {"split": "split"} | dict(options)
    for option in ("prompt", "completion", *(("split",) if "split" in options else ())):
        if names[option] not in header:
            raise ValueError(
                f"{uri}: {path.name} has no column {names[option]!r} (it has {', '.join(header) or 'none'}); choose it "
                f"with ?{option}=NAME{near(names[option], header)}"
            )
    at = {option: header.index(name) for option, name in names.items() if name in header}
    for place, cells in lines:
        if len(cells) != len(header):
            raise ValueError(
                f"{uri}: {path.name} {place} has {len(cells)} columns instead of {len(header)}; separators inside a "
                "text must be removed (.tsv) or the text quoted (.csv)"
            )
        got = {option: cells[i].strip() for option, i in at.items()}
        yield Example(place, got["prompt"], got["completion"], got.get("split", ""))


def _objects(path: Path, uri: str, options: Mapping[str, str]) -> Iterator[Example]:
    for place, row in _entries(path, uri):
        split = str(row.get(options.get("split", "split"), ""))
        if not options and "instruction" in row and "output" in row:
            instruction, given, output = (str(row.get(name) or "").strip() for name in INSTRUCTION)
            prompt = prompt_of(ALPACA, instruction, given) if instruction else ""
            yield Example(place, prompt, output, split, ALPACA)
            continue
        names = [options.get(option, option) for option in ("prompt", "completion")]
        for option, name in zip(("prompt", "completion"), names, strict=True):
            if name not in row:
                raise ValueError(
                    f"{uri}: {path.name} {place} has neither instruction and output nor {name!r} (it has "
                    f"{', '.join(map(str, row)) or 'nothing'}); choose it with ?{option}=NAME{near(name, list(row))}"
                )
        prompt, completion = (str(row[name] or "").strip() for name in names)
        yield Example(place, prompt, completion, split)


def _entries(path: Path, uri: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".jsonl":
            found = [(f"line {i}", json.loads(line)) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        else:
            found = [(f"entry {i}", row) for i, row in enumerate(json.loads(text))]
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{uri}: {path.name} cannot be read as JSON in UTF-8: {error}") from None
    for place, row in found:
        if not isinstance(row, dict):
            raise ValueError(f"{uri}: {path.name} {place} is no object with names and values; give a list of objects")
        yield place, row
