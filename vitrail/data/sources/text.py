"""Texts with a class (GLUE's folders, tables of text and label), and prompts with their completions.

    glue/CoLA                                 a folder whose files show the task
    text:glue/MNLI?task=mnli&dev=mismatched   GLUE: cola, rte, qnli, mnli (matched by default)
    text:reviews.csv?text=body&label=stars    columns text and label, and perhaps text_pair and split
    text:reviews                              train.tsv, val.tsv, test.tsv (or .csv) with those columns
    e2e/                                      trainset.csv, devset.csv, testset_w_refs.csv with the columns mr and ref
    text:meals.tsv?prompt=data&completion=said   any two columns, and perhaps split
    alpaca_data.json                          a list of instruction, input (which may be empty) and output; or .jsonl

GLUE's test files have no labels, so its dev becomes our test (the papers report dev) and val is held out of train as
everywhere; `--data.val_fraction 0` trains on all of train, as the papers do.

A completion is one example per row. Rows of one split with the same prompt are several references for it: they are
learned from one by one, and evaluated together. So a prompt is never in two splits that are held out here.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from vitrail.data.dataset import UNDIVIDED, DataSet, Location, Source, Split, hold_out, split_called, split_rows
from vitrail.data.sources.folder import natural
from vitrail.files import parse_json
from vitrail.schema import near

COLUMNS = ("text", "text_pair", "label", "split")
COMPLETION_COLUMNS = ("prompt", "completion", "split")
KNOWN_PAIRS = (("prompt", "completion"), ("mr", "ref"))  # without being named
TABLES, JSON = (".tsv", ".csv"), (".json", ".jsonl")
E2E_SPLITS = {"trainset": "train", "devset": "val", "testset": "test", "testset_w_refs": "test"}
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
_SHOWN = 10


class Text(NamedTuple):
    """What is classified, or a prompt and its completion."""

    text: str
    pair: str = ""  # the second of two sentences; empty: there is one


@dataclass(frozen=True)
class TextReader:
    """Gives text number i; picklable, as readers of images are."""

    texts: tuple[Text, ...]
    completions: bool = False  # pairs are a prompt and its completion
    template: str = ""  # how prompts were made of instructions
    things: ClassVar[str] = "texts"

    def __call__(self, index: int) -> Text:
        return self.texts[index]


@dataclass(frozen=True)
class GlueTask:
    """How GLUE stores one of its tasks."""

    text: str
    label: str
    pair: str = ""
    header: tuple[str, ...] = ()  # of files that have none themselves
    names: Mapping[str, str] = field(default_factory=dict)  # of classes that are stored as numbers
    dev: tuple[str, ...] = ("dev",)  # files that are evaluated on, the usual one first


TASKS = {
    "cola": GlueTask(
        "sentence",
        "label",
        header=("source", "label", "star", "sentence"),
        names={"0": "unacceptable", "1": "acceptable"},
    ),
    "mnli": GlueTask("sentence1", "gold_label", "sentence2", dev=("dev_matched", "dev_mismatched")),
    "rte": GlueTask("sentence1", "label", "sentence2"),
    "qnli": GlueTask("question", "label", "sentence"),
}


class TextRow(NamedTuple):
    """One example, and where it was."""

    place: str
    text: str
    pair: str
    label: str = ""
    split: str = ""
    template: str = ""


def texts_of(split: Split) -> list[Text]:
    """The texts of a split, row by row."""
    reader = cast("Any", split.reader)
    return [reader(int(index)) for index in split.index]


def prompt_of(template: str, text: str, more: str = "") -> str:
    """The prompt that a model trained with `template` expects for an instruction and its input; empty: the text itself.

    >>> prompt_of("", "name[The Eagle]")
    'name[The Eagle]'
    >>> prompt_of("alpaca", "Add.", "1, 2").splitlines()[-4:]
    ['### Input:', '1, 2', '', '### Response:']
    """
    return text if template != ALPACA else TEMPLATES[bool(more)].format(instruction=text, input=more)


def make_texts(
    uri: str,
    texts: Iterable[Text],
    splits: Mapping[str, Any],
    classes: Sequence[str] = (),
    labels: Any = None,
    *,
    template: str = "",
    notes: tuple[str, ...] = (),
) -> DataSet:
    """A data set of these texts; `splits` names the rows of each. Without classes they are prompts and completions."""
    # A reader gives images everywhere else; `holds_texts` tells the two apart.
    reader = TextReader(tuple(texts), not classes, template)
    count = len(reader.texts)
    labels = np.zeros(count, np.int64) if labels is None else np.asarray(labels, np.int64)
    whole = Split(UNDIVIDED, cast("Any", reader), np.arange(count), [f"text {i}" for i in range(count)], labels)
    return DataSet(uri, tuple(classes), whole.divide(splits), notes=notes)


def hold_out_prompts(data: DataSet, val_fraction: float, test_fraction: float, seed: int) -> DataSet:
    """As `hold_out`, by prompts: all rows of one prompt go to the same split."""
    prompts = {name: [text.text for text in texts_of(split)] for name, split in data.splits.items()}
    thin = {name: split.take(_first_rows(prompts[name])) for name, split in data.splits.items()}
    chosen = hold_out(replace(data, splits=thin, notes=()), val_fraction, test_fraction, seed)
    splits: dict[str, Split] = {}
    for name, split in chosen.splits.items():
        source = name if name in data.splits else UNDIVIDED if UNDIVIDED in data.splits else "train"
        wanted = {text.text for text in texts_of(split)}
        splits[name] = data[source].take([i for i, prompt in enumerate(prompts[source]) if prompt in wanted], name)
    notes = tuple(note.replace(f" {data.things} ", " prompts ") for note in chosen.notes)
    return replace(data, splits=splits, notes=(*data.notes, *notes))


def _first_rows(prompts: Sequence[str]) -> list[int]:
    first: dict[str, int] = {}
    for row, prompt in enumerate(prompts):
        first.setdefault(prompt, row)
    return list(first.values())


def open_text(location: Location) -> DataSet:
    """Texts or completions of a file or a folder of files. Raises `ValueError`, with what to do, for other files."""
    path, uri, options = location.path, location.uri, location.options
    if is_completions(path, options):
        location.reject_unknown(COMPLETION_COLUMNS)
        return _completions(path, uri, options)
    location.reject_unknown(("task", "dev", *COLUMNS, "prompt", "completion"))
    name = options.get("task")
    if name is not None and name not in TASKS:
        raise ValueError(f"{uri}: no task {name!r} (known: {', '.join(TASKS)}){near(name, TASKS)}")
    if path.is_file():
        if name is not None:
            raise ValueError(f"{uri}: a task is a folder with train.tsv; name the folder that holds {path.name}")
        table = list(_table(path, uri, options))
        return _labelled(uri, [_text_row(*row) for row in table], divided=any("split" in cells for _, cells in table))
    kind = name or _kind(path)
    if kind is None:
        raise ValueError(
            f"{uri} does not say which task it is; it needs train.tsv or train.csv with the columns text and label, or "
            f"GLUE's files (?task={' or '.join(TASKS)})"
        )
    if kind in TASKS:
        return _glue(path, uri, kind, options)
    rows = []
    for file in sorted(file for file in path.iterdir() if file.suffix.lower() in TABLES and file.is_file()):
        if split := split_called(file.stem):
            rows += [
                _text_row(f"{file.name} {line}", cells | {"split": split}) for line, cells in _table(file, uri, options)
            ]
    return _labelled(uri, rows, divided=True)


def is_completions(path: Path, options: Mapping[str, str] | None = None) -> bool:
    """Whether a file, or the training file of a folder, holds prompts and completions, by its kind and first line."""
    if path.is_dir():
        return any(split == "train" and is_completions(file) for file, split in _completion_files(path))
    if path.suffix.lower() not in TABLES:
        return path.suffix.lower() in JSON
    if options and {"prompt", "completion"} & set(options):
        return True
    try:
        _, header = next(_lines(path, str(path)), ("", []))
    except ValueError:
        return False
    return any({cell.strip() for cell in header}.issuperset(pair) for pair in KNOWN_PAIRS)


def _opens(location: Location) -> bool:
    if location.is_dir:
        return _kind(location.path) is not None or is_completions(location.path)
    return location.scheme == "text" or location.suffix in JSON


SOURCE = Source(
    {
        "glue/CoLA": "texts: a folder of GLUE (CoLA, RTE, QNLI, MNLI), or one with train.tsv of text and label",
        "text:FILE.csv": "texts: columns text and label, perhaps text_pair and split; ?text=NAME names others",
        "e2e/, text:FILE.tsv": "prompts and completions: columns mr and ref (E2E), or ?prompt=NAME&completion=NAME",
        "FILE.json, FILE.jsonl": "prompts and completions: instruction, input and output, as Alpaca has them",
    },
    open_text,
    _opens,
    options=None,
    paths=True,
)


def _glue(path: Path, uri: str, name: str, options: Mapping[str, str]) -> DataSet:
    task = TASKS[name]
    for option in COLUMNS:
        if option in options:
            raise ValueError(f"{uri}: the columns of {name} are fixed; leave ?{option}= out")
    dev = options.get("dev", task.dev[0])
    dev = dev if dev.startswith("dev") else f"dev_{dev}"
    if dev not in task.dev:
        raise ValueError(f"{uri}: {name} has no {dev} (it has {', '.join(task.dev)}){near(dev, task.dev)}")
    names = {"text": task.text, "label": task.label} | ({"text_pair": task.pair} if task.pair else {})
    rows: list[TextRow] = []
    for stem, split in (("train", "train"), (dev, "test")):
        file = path / f"{stem}.tsv"
        if not file.is_file():
            raise FileNotFoundError(f"{uri}: no {file.name} there; {name} needs train.tsv and {dev}.tsv")
        for line, cells in _table(file, uri, names, header=task.header):
            row = _text_row(f"{file.name} {line}", cells | {"split": split})
            rows.append(row._replace(label=task.names.get(row.label, row.label)))
    note = f"{dev}.tsv is evaluated as test: the labels of GLUE's own test are not public"
    return replace(_labelled(uri, rows, divided=True), notes=(note,))


def _kind(path: Path) -> str | None:
    """`table`, the name of a task, or none, by the first line of a folder's training table."""
    file = next((path / f"train{suffix}" for suffix in TABLES if (path / f"train{suffix}").is_file()), None)
    if file is None:
        return None
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline().rstrip("\r\n")
    except UnicodeDecodeError:
        return None
    header = first.split("\t") if file.suffix.lower() == ".tsv" else next(csv.reader([first]), [])
    if {"text", "label"} <= set(header):
        return "table"
    for name, task in TASKS.items():
        if not task.header and {task.text, task.pair, task.label} <= set(header):
            return name
    cola = TASKS["cola"]
    return "cola" if len(header) == len(cola.header) and header[1] in cola.names else None


def _lines(path: Path, uri: str) -> Iterator[tuple[str, list[str]]]:
    """(place, cells) of every line that is not empty. Quotes are text in .tsv, as GLUE has them, and quotes in .csv."""
    try:
        comma = path.suffix.lower() == ".csv"
        with path.open(encoding="utf-8-sig", newline="" if comma else "\n") as stream:
            if comma:
                reader = csv.reader(stream)
                lines = [(f"line {reader.line_num}", cells) for cells in reader]
            else:
                lines = [(f"line {i}", line.rstrip("\r\n").split("\t")) for i, line in enumerate(stream, 1)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{uri}: {path.name} cannot be read as UTF-8 text in columns: {error}") from None
    yield from ((number, cells) for number, cells in lines if any(cell.strip() for cell in cells))


def _table(
    path: Path,
    uri: str,
    names: Mapping[str, str],
    columns: Sequence[str] = COLUMNS,
    required: Sequence[str] = ("text", "label"),
    header: Sequence[str] = (),
) -> Iterator[tuple[str, dict[str, str]]]:
    """(place, cells by column) of a table whose columns may have other `names`; `header`: of a file that has none.

    Raises `ValueError` for a column that is required or named and not there, and for rows of another width.
    """
    if path.suffix.lower() not in TABLES:
        raise ValueError(f"{uri}: a table of texts is a .tsv or .csv file, not {path.name}")
    lines = _lines(path, uri)
    known = list(header) or [cell.strip() for cell in next(lines, ("", []))[1]]
    at = {}
    for column in columns:
        name = names.get(column, column)
        if name in known:
            at[column] = known.index(name)
        elif column in required or column in names:
            raise ValueError(
                f"{uri}: {path.name} has no column {name!r} (it has {', '.join(known) or 'none'}); choose it with "
                f"?{column}=NAME{near(name, known)}"
            )
    for line, cells in lines:
        if len(cells) != len(known):
            raise ValueError(
                f"{uri}: {path.name} {line} has {len(cells)} columns instead of {len(known)}; separators inside a "
                "text must be removed (.tsv) or the text quoted (.csv)"
            )
        yield line, {column: cells[i].strip() for column, i in at.items()}


def _text_row(line: str, cells: Mapping[str, str]) -> TextRow:
    return TextRow(line, cells["text"], cells.get("text_pair", ""), cells["label"], cells.get("split", ""))


def _labelled(uri: str, rows: Sequence[TextRow], *, divided: bool) -> DataSet:
    if not rows:
        raise ValueError(f"{uri} has a header but no rows; add one row per text")
    faults = []
    paired = any(row.pair for row in rows)
    for row in rows:
        faults += [f"{row.place}: empty {name}" for name in ("text", "label") if not getattr(row, name)]
        if paired and not row.pair:
            faults.append(f"{row.place}: empty text_pair")
        if divided and split_called(row.split) is None:
            faults.append(f"{row.place}: split {row.split!r} is not train, val or test")
    if faults:
        listed = "".join(f"\n  {fault}" for fault in faults[:_SHOWN])
        more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ValueError(f"{uri} has {len(faults)} faults; fix or remove those rows:{listed}{more}")
    classes = sorted({row.label for row in rows}, key=natural)
    number = {name: i for i, name in enumerate(classes)}
    labels = np.array([number[row.label] for row in rows], np.int64)
    splits = split_rows([split_called(row.split) if divided else UNDIVIDED for row in rows])
    if divided:
        if "train" not in splits:
            raise ValueError(f"{uri} has {' and '.join(splits)} but no rows whose split is train")
        unseen = set(labels.tolist()) - set(labels[splits["train"]].tolist())
        if unseen:
            names = ", ".join(classes[c] for c in sorted(unseen)[:_SHOWN])
            raise ValueError(f"{uri}: classes that no training row has: {names}; add training rows")
    return make_texts(uri, [Text(row.text, row.pair) for row in rows], splits, classes, labels)


def _completions(path: Path, uri: str, options: Mapping[str, str]) -> DataSet:
    if path.is_dir():
        read = [
            row._replace(split=split, place=f"{file.name} {row.place}")
            for file, split in _completion_files(path)
            for row in _examples(file, uri, options)
        ]
    else:
        read = list(_examples(path, uri, options))
    divided = path.is_dir() or any(row.split for row in read)
    rows = [row for row in read if row.text and row.pair]
    if not rows:
        raise ValueError(f"{uri} has no row with both a prompt and a completion; add some")
    odd = next((row for row in rows if divided and split_called(row.split) is None), None)
    if odd is not None:
        raise ValueError(f"{uri}: {odd.place}: split {odd.split!r} is not train, val or test; fix that column")
    splits = split_rows([split_called(row.split) if divided else UNDIVIDED for row in rows])
    if divided and "train" not in splits:
        raise ValueError(f"{uri} has {' and '.join(splits)} but no rows to train on")
    left_out = len(read) - len(rows)
    notes = (f"{left_out} rows without a prompt or a completion are left out",) if left_out else ()
    texts = [Text(row.text, row.pair) for row in rows]
    return make_texts(uri, texts, splits, template=rows[0].template, notes=notes)


def _completion_files(path: Path) -> list[tuple[Path, str]]:
    """Files of a folder whose names say which split they are; of E2E's two test files the one with references."""
    files = []
    for file in sorted(path.iterdir()):
        split = E2E_SPLITS.get(file.stem.lower()) or split_called(file.stem)
        if split is not None and file.suffix.lower() in (*TABLES, *JSON) and file.is_file():
            files.append((file, split))
    references = any(file.stem.lower() == "testset_w_refs" for file, _ in files)
    return [(file, split) for file, split in files if not (references and file.stem.lower() == "testset")]


def _examples(path: Path, uri: str, options: Mapping[str, str]) -> Iterator[TextRow]:
    if path.suffix.lower() in JSON:
        yield from _objects(path, uri, options)
        return
    if path.suffix.lower() not in TABLES:
        raise ValueError(f"{uri}: prompts and completions are a .csv, .tsv, .json or .jsonl file, not {path.name}")
    header = {cell.strip() for cell in next(_lines(path, uri), ("", []))[1]}
    pair = next((pair for pair in KNOWN_PAIRS if set(pair) <= header), KNOWN_PAIRS[0])
    names = dict(zip(("prompt", "completion"), pair, strict=True)) | dict(options)
    for line, cells in _table(path, uri, names, COMPLETION_COLUMNS):
        yield TextRow(line, cells["prompt"], cells["completion"], split=cells.get("split", ""))


def _objects(path: Path, uri: str, options: Mapping[str, str]) -> Iterator[TextRow]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".jsonl":
            entries = [(f"line {i}", parse_json(line)) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        else:
            entries = [(f"entry {i}", row) for i, row in enumerate(parse_json(text))]
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{uri}: {path.name} cannot be read as JSON in UTF-8: {error}") from None
    for place, row in entries:
        if not isinstance(row, dict):
            raise ValueError(f"{uri}: {path.name} {place} is no object with names and values; give a list of objects")
        split = str(row.get(options.get("split", "split"), ""))
        if not options and "instruction" in row and "output" in row:
            instruction, given, output = (
                str(row.get(name) or "").strip() for name in ("instruction", "input", "output")
            )
            prompt = prompt_of(ALPACA, instruction, given) if instruction else ""
            yield TextRow(place, prompt, output, split=split, template=ALPACA)
            continue
        names = {option: options.get(option, option) for option in ("prompt", "completion")}
        for option, name in names.items():
            if name not in row:
                raise ValueError(
                    f"{uri}: {path.name} {place} has neither instruction and output nor {name!r} (it has "
                    f"{', '.join(map(str, row)) or 'nothing'}); choose it with ?{option}=NAME{near(name, list(row))}"
                )
        prompt, completion = (str(row[name] or "").strip() for name in names.values())
        yield TextRow(place, prompt, completion, split=split)
