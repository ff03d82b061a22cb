"""Sentences, or pairs of them, with a class: GLUE's folders, and tables with the columns text and label.

    glue/CoLA                                 a folder that says by its files what it is
    text:glue/MNLI?task=mnli&dev=mismatched   GLUE: cola, rte, qnli, mnli (matched, unless told)
    text:reviews.csv?text=body&label=stars    columns text and label, and perhaps text_pair and split
    text:reviews                              train.tsv, val.tsv, test.tsv (or .csv) with those columns

GLUE's test files have no labels, so its dev becomes our test (the papers report dev) and val is carved off train like
everywhere; `--data.val_fraction 0` trains on all of train, as the papers do.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from vitrail.data.dataset import UNDIVIDED, DataSet, Split
from vitrail.data.sources.folder import natural, split_called
from vitrail.schema import near

COLUMNS = ("text", "text_pair", "label", "split")
OPTIONS = ("task", "dev", *COLUMNS)
TABLES = (".tsv", ".csv")
_SHOWN = 10


class Text(NamedTuple):
    """What is classified, or a prompt and its completion."""

    text: str
    pair: str = ""  # the second of two sentences; empty: there is one


@dataclass(frozen=True)
class TextReader:
    """Gives text number i; picklable, as readers of images are."""

    texts: tuple[Text, ...]
    completions: bool = False  # pairs are a prompt and what is to be written after it, see vitrail/data/completions.py
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
    dev: tuple[str, ...] = ("dev",)  # files that are judged, the usual one first


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
    """One example, and where it stood."""

    place: str
    text: str
    pair: str
    label: str
    split: str


def holds_texts(data: DataSet) -> bool:
    """Whether a data set is of texts; all others are of images."""
    return data.things == TextReader.things


def texts_of(split: Split) -> list[Text]:
    """The texts of a split, row by row."""
    reader = cast("Any", split.reader)
    return [reader(int(index)) for index in split.index]


def is_text_folder(path: Path) -> bool:
    """Whether a folder's training table is one of texts, by its first line."""
    return _kind(path) is not None


def open_texts(path: Path, uri: str, options: Mapping[str, str]) -> DataSet:
    """The texts of a table or a folder of tables. Raises `ValueError`, with what to do, where they cannot be used."""
    name = options.get("task")
    if name is not None and name not in TASKS:
        raise ValueError(f"{uri}: no task {name!r} (known: {', '.join(TASKS)}){near(name, TASKS)}")
    if path.is_file():
        if name is not None:
            raise ValueError(f"{uri}: a task is a folder with train.tsv; name the folder that holds {path.name}")
        rows = list(_table(path, uri, options))
        return _assembled(uri, rows, divided="split" in _columns(path, uri, options))
    kind = name or _kind(path)
    if kind is None:
        raise ValueError(
            f"{uri} does not say which task it is; it needs train.tsv or train.csv with the columns text and label, or "
            f"GLUE's files (?task={' or '.join(TASKS)})"
        )
    if kind in TASKS:
        return _glue(path, uri, kind, options)
    rows = []
    for table in _files(path):
        split = split_called(table.stem)
        if split is not None:
            rows += [
                row._replace(split=split, place=f"{table.name} {row.place}") for row in _table(table, uri, options)
            ]
    return _assembled(uri, rows, divided=True)


def make_data(
    uri: str, texts: Sequence[Text], classes: Sequence[str], labels: Any, splits: Mapping[str, Any]
) -> DataSet:
    """A data set of these texts: `labels` [texts] of class numbers, `splits` names the rows of each."""
    # A reader gives images everywhere else; `holds_texts` tells the two apart.
    reader, keys = cast("Any", TextReader(tuple(texts))), [f"text {i}" for i in range(len(texts))]
    whole = Split(UNDIVIDED, reader, np.arange(len(texts)), keys, np.asarray(labels, np.int64))
    return DataSet(uri, tuple(classes), {name: whole.take(rows, name) for name, rows in splits.items()})


def _glue(path: Path, uri: str, name: str, options: Mapping[str, str]) -> DataSet:
    task = TASKS[name]
    for option in COLUMNS:
        if option in options:
            raise ValueError(f"{uri}: the columns of {name} are fixed; leave ?{option}= out")
    dev = options.get("dev", task.dev[0])
    dev = dev if dev.startswith("dev") else f"dev_{dev}"
    if dev not in task.dev:
        raise ValueError(f"{uri}: {name} has no {dev} (it has {', '.join(task.dev)}){near(dev, task.dev)}")
    wanted = {"text": task.text, "text_pair": task.pair, "label": task.label}
    rows: list[TextRow] = []
    for stem, split in (("train", "train"), (dev, "test")):
        file = path / f"{stem}.tsv"
        if not file.is_file():
            raise FileNotFoundError(f"{uri}: no {file.name} there; {name} needs train.tsv and {dev}.tsv")
        for row in _table(file, uri, {k: v for k, v in wanted.items() if v}, task.header):
            label = task.names.get(row.label, row.label)
            rows.append(row._replace(split=split, label=label, place=f"{file.name} {row.place}"))
    data = _assembled(uri, rows, divided=True)
    note = f"{dev}.tsv is judged as test: the labels of GLUE's own test are not public"
    return DataSet(data.uri, data.classes, data.splits, notes=(note,))


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix.lower() in TABLES and file.is_file())


def _kind(path: Path) -> str | None:
    """`table`, the name of a task, or none, by the first line of the training table."""
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
                found = [(f"line {reader.line_num}", cells) for cells in reader]
            else:
                found = [(f"line {i}", line.rstrip("\r\n").split("\t")) for i, line in enumerate(stream, 1)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{uri}: {path.name} cannot be read as UTF-8 text in columns: {error}") from None
    yield from ((place, cells) for place, cells in found if any(cell.strip() for cell in cells))


def _columns(path: Path, uri: str, names: Mapping[str, str], header: Sequence[str] = ()) -> dict[str, int]:
    """Where each of our columns stands. Raises `ValueError` for one that is not there."""
    _, first = next(_lines(path, uri), ("", []))
    known = list(header) or [cell.strip() for cell in first]
    found = {}
    for column in COLUMNS:
        name = names.get(column, column)
        if name in known:
            found[column] = known.index(name)
        elif column in ("text", "label") or column in names:
            raise ValueError(
                f"{uri}: {path.name} has no column {name!r} (it has {', '.join(known) or 'none'}); choose it with "
                f"?{column}=NAME{near(name, known)}"
            )
    return found


def _table(path: Path, uri: str, names: Mapping[str, str], header: Sequence[str] = ()) -> Iterator[TextRow]:
    if path.suffix.lower() not in TABLES:
        raise ValueError(f"{uri}: a table of texts is a .tsv or .csv file, not {path.name}")
    columns = _columns(path, uri, names, header)
    width = len(header)
    for number, (place, cells) in enumerate(_lines(path, uri)):
        if number == 0 and not header:
            width = len(cells)
            continue
        if len(cells) != width:
            raise ValueError(
                f"{uri}: {path.name} {place} has {len(cells)} columns instead of {width}; separators inside a text "
                "must be removed (.tsv) or the text quoted (.csv)"
            )
        got = {column: cells[at].strip() for column, at in columns.items()}
        yield TextRow(place, got["text"], got.get("text_pair", ""), got["label"], got.get("split", ""))


def _assembled(uri: str, rows: Sequence[TextRow], *, divided: bool) -> DataSet:
    if not rows:
        raise ValueError(f"{uri} has a header but no rows; add one row a text")
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
        raise ValueError(f"{uri} has {len(faults)} faults; mend or remove those rows:{listed}{more}")
    classes = sorted({row.label for row in rows}, key=natural)
    number = {name: i for i, name in enumerate(classes)}
    labels = np.array([number[row.label] for row in rows], np.int64)
    splits: dict[str, Any] = {UNDIVIDED: np.arange(len(rows))}
    if divided:
        meant = np.array([split_called(row.split) for row in rows])
        splits = {name: np.flatnonzero(meant == name) for name in ("train", "val", "test") if name in meant}
        if "train" not in splits:
            raise ValueError(f"{uri} has {' and '.join(splits)} but no rows whose split is train")
        unseen = set(labels.tolist()) - set(labels[splits["train"]].tolist())
        if unseen:
            names = ", ".join(classes[c] for c in sorted(unseen)[:_SHOWN])
            raise ValueError(f"{uri}: classes that no training row has: {names}; add training rows")
    return make_data(uri, [Text(row.text, row.pair) for row in rows], classes, labels, splits)
