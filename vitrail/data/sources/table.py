"""Labels in a table: CSV, tab-separated or Parquet with the columns path and label, and perhaps split and coarse.

Paths are relative to the table. `a|b` in any label makes the whole set multi-label; `|` alone then means no label at
all. Other column names are given in the URI: `labels.csv?path=file&label=species`. A taxonomy of more levels has a
column `level:NAME` for each (`level:genus`, `level:family`), from fine to coarse, `coarse` being one of them. A column
`generated` of 0 and 1 tells images that a model made from real ones. `?group=COLUMN` names the group of each image.
A column `value` of numbers in place of `label`, or `?value=COLUMN`, is what a regression predicts.
Cells that are no whole paths become some by `?folder=images&ext=.jpg`. Separator and encoding of text are recognised.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from numpy.typing import NDArray

from vitrail.data.dataset import (
    FINEST,
    UNDIVIDED,
    DataSet,
    Location,
    Source,
    Split,
    split_called,
    split_rows,
    stacked,
    with_finest,
)
from vitrail.data.decode import raise_if_of_the_machine
from vitrail.data.sources.folder import FileReader, has_image_suffix, natural, some
from vitrail.files import file_size, replacing
from vitrail.quantities import shorten
from vitrail.schema import ConfigError, near

COLUMNS = ("path", "label", "split", "coarse", "generated", "group", "value")
SETTINGS = ("folder", "ext")  # what comes before and behind the cells of `path`
LEVEL = "level:"  # begins the name of a column that holds one more level

_BETWEEN = "|"  # labels of one image
_SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons"}
_EXTENSIONS = ("", *(e for s in (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff") for e in (s, s.upper())))
_MOST_FOLDERS, _TRIED = 200, 20  # folders, and rows in each, where missing files are looked for
_SHOWN = 10
_REMOVE = "remove"  # in place of a label, unless a class has this name
_OF_FIXES = ("path", "index", "split", "fix")


@dataclass(frozen=True)
class Table:
    """Columns of text of equal length, and what names each row to a person (`line 2`)."""

    columns: dict[str, list[str]]
    places: list[str]
    notes: tuple[str, ...] = ()


def open_table(location: Location) -> DataSet:
    """The labelled images of a table; an option gives the name of a column that is not called by its own.

    `folder` is put before, and `ext` behind, a path that does not end so. Raises `ValueError` that counts all faulty
    rows and lists the first ten, with the settings by which files would be found.
    """
    path, uri, names = location.path, location.uri, location.options
    table = _read_parquet(path, uri) if path.suffix.lower() == ".parquet" else read_text_table(path, uri)
    columns = {}
    numeric = "value" in names or ("value" in table.columns and names.get("label", "label") not in table.columns)
    for column in COLUMNS:
        name = names.get(column, "" if column == "group" else column)  # groups are counted only where asked for
        if name in table.columns:
            columns[column] = table.columns[name]
        elif column in names or column == "path" or (column == "label" and not numeric):
            raise ValueError(
                f"{uri} has no column {name!r} (it has {', '.join(table.columns) or 'none'}); "
                f"choose it with ?{column}=NAME{near(name, table.columns)}{_proposed_columns(location, table)}"
            )
    levels = _levels(uri, table.columns, names.get("coarse", "coarse"))
    if not table.places:
        raise ValueError(f"{uri} has a header but no rows; add one row per image")
    columns = {name: texts for name, texts in columns.items() if name != ("label" if numeric else "value")}
    cells = columns | {name if name == "coarse" else LEVEL + name: texts for name, texts in levels.items()}
    listed, folder, ext = columns["path"], names.get("folder", ""), names.get("ext", "")
    if not (path.parent / folder).is_dir():
        raise ValueError(f"{uri}: there is no folder {folder!r} in {path.parent}; name one from there with ?folder=")
    columns["path"] = cells["path"] = [_whole(cell, folder, ext) for cell in listed]
    _reject_faulty(location, cells, table.places, listed)
    return _assemble(path.parent, uri, columns, levels, table.notes)


SOURCE = Source(
    {
        "TABLE.csv": "columns path,label[,split]; labels separated by | make it multi-label; .tsv and .parquet, too; "
        "path,value for regression; "
        "?path=COLUMN&label=COLUMN&folder=images&ext=.jpg for other columns, and ids that are no paths"
    },
    open_table,
    lambda location: location.suffix in (".csv", ".tsv", ".parquet"),
    (*COLUMNS, *SETTINGS),
)


def _whole(cell: str, folder: str, ext: str) -> str:
    """The path that a cell stands for; an empty one stays empty."""
    ext = ext if not ext or ext.startswith(".") else f".{ext}"
    missing = "" if cell.lower().endswith(ext.lower()) else ext
    return f"{folder.rstrip('/')}/{cell}{missing}" if cell and folder else f"{cell}{missing}" if cell else ""


def read_text_table(path: Path, uri: str) -> Table:
    """Columns of text whose separator and encoding are recognised; a note says where they are not the usual ones."""
    text, note = _text_of(path.read_bytes(), path.name, uri)
    notes = [note] if note else []
    separator = _separator(text)
    if separator != ("\t" if path.suffix.lower() == ".tsv" else ","):
        notes.append(f"{path.name} is read with {_SEPARATORS[separator]} between its columns")
    try:
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        header = [name.strip() for name in next(lines, [])]
        rows = [(lines.line_num, row) for row in lines if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise ValueError(f"{uri} cannot be read as text in columns: {error}") from None
    if len(set(header)) < len(header):
        raise ValueError(f"{uri} has two columns of the same name: {', '.join(header)}")
    uneven = [f"line {number}" for number, row in rows if len(row) != len(header)]
    if uneven:
        raise ValueError(
            f"{uri}: {len(uneven)} rows do not have the header's {len(header)} columns ({some(uneven, _SHOWN)}); "
            "put quotes around text that holds a separator"
        )
    columns = {name: [row[i].strip() for _, row in rows] for i, name in enumerate(header)}
    return Table(columns, [f"line {number}" for number, _ in rows], tuple(notes))


def _text_of(data: bytes, name: str, uri: str) -> tuple[str, str]:
    """The text of a table, and a note where it is not UTF-8."""
    try:
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            return data.decode("utf-16"), f"{name} is read as UTF-16"
        return data.decode("utf-8-sig"), ""
    except UnicodeDecodeError as error:
        replaced = data.decode("utf-8", "replace")
        letters = len(re.findall("[^\0-\x7f\ufffd]", replaced))
        if re.search(rb"[\0-\x08\x0e-\x1f]", data) or letters > replaced.count("\ufffd"):  # no text, or damaged UTF-8
            raise ValueError(f"{uri} cannot be read as UTF-8 text in columns: {error}") from None
    try:
        text, encoding = data.decode("cp1252"), "Windows-1252"
    except UnicodeDecodeError:
        text, encoding = data.decode("latin-1"), "Latin-1"
    return text, f"{name} is not UTF-8 and is read as {encoding}; where names look wrong, save it as UTF-8"


def _separator(text: str) -> str:
    """The one that is most frequent in the header, outside quotes; a comma where there is none."""
    header = re.sub(r'"[^"]*"', "", text.partition("\n")[0])
    best = max(_SEPARATORS, key=header.count)
    return best if best in header else ","


def _read_parquet(path: Path, uri: str) -> Table:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ValueError(f"{uri}: Parquet tables need pyarrow; install vitrail[table], or save as CSV") from None
    with reading_parquet(uri):
        stored = pyarrow.parquet.read_table(path)
        columns = {name: [_text(value) for value in stored[name].to_pylist()] for name in stored.column_names}
    return Table(columns, [f"row {i + 1}" for i in range(stored.num_rows)])


@contextmanager
def reading_parquet(name: object) -> Iterator[None]:
    """Whatever goes wrong inside is a `ValueError` of one sentence: damaged files raise nearly every exception."""
    try:
        yield
    except Exception as error:
        raise_if_of_the_machine(error, name)
        reason = shorten(" ".join(str(error).split()), 160) or type(error).__name__
        raise ValueError(f"{name} cannot be read as Parquet: {reason}; write or fetch it again") from None


def _text(value: Any) -> str:
    if value is None or isinstance(value, bytes | dict) or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, (list, tuple)):
        return _BETWEEN.join(map(_text, value)) + (_BETWEEN if len(value) < 2 else "")  # a list is always multi-label
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _reject_faulty(
    location: Location, columns: Mapping[str, list[str]], places: Sequence[str], listed: Sequence[str]
) -> None:
    """Raise where rows are faulty; `listed` are the paths as the table has them."""
    root, uri, faults, missing = location.path.parent, location.uri, [], 0
    for row, place in enumerate(places):
        cells = {column: values[row] for column, values in columns.items()}
        faults += [f"{place}: empty {column}" for column, text in cells.items() if not text]
        file = root / cells["path"]
        if cells["path"] and (file_size(file) < 0 or not file.is_file()):
            faults.append(f"{place}: no file {shorten(cells['path'], 200)}")
            missing += 1
        if cells.get("split") and split_called(cells["split"]) is None:
            faults.append(f"{place}: split {shorten(cells['split'], 60)!r} is not train, val or test")
        if cells.get("value") and not _is_number(cells["value"]):
            faults.append(f"{place}: value {shorten(cells['value'], 60)!r} is no finite number")
        if cells.get("generated", "0") not in ("", "0", "1"):
            faults.append(f"{place}: generated {shorten(cells['generated'], 60)!r} is not 0 or 1")
    if faults:
        lines = "".join(f"\n  {fault}" for fault in faults[:_SHOWN])
        more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        hint = _proposed_settings(location, listed) if missing else ""
        raise ValueError(f"{uri} has {len(faults)} faults; fix or remove those rows:{lines}{more}{hint}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _proposed_settings(location: Location, cells: Sequence[str]) -> str:
    """The URI that finds most files of a table, where a folder below it or an extension is all that is missing."""
    root = location.path.parent
    folder, ext, hits = _search(root, cells)
    before = _existing(root, cells, location.options.get("folder", ""), location.options.get("ext", ""))
    if hits <= before:
        return ""
    given = {name: value for name, value in location.options.items() if name not in SETTINGS}
    given |= {name: value for name, value in zip(SETTINGS, (folder, ext), strict=True) if value}
    count = "all" if hits == len(cells) else f"{hits:,} of"
    return f"\n{count} {len(cells):,} files are found with: {_quoted(location, given)}"


def _proposed_columns(location: Location, table: Table) -> str:
    """The URI that opens a table one of whose columns holds the names of files."""
    if not table.columns or location.options:
        return ""
    hits = {name: _search(location.path.parent, cells) for name, cells in table.columns.items()}
    names = max(hits, key=lambda name: hits[name][2])
    folder, ext, count = hits[names]
    if not count:
        return ""
    others = [name for name in hits if name != names]
    label = others[0] if len(others) == 1 else "label" if "label" in others else "NAME"
    given = {"path": names, "label": label, "folder": folder, "ext": ext}
    return f"; try {_quoted(location, {name: value for name, value in given.items() if value})}"


def _quoted(location: Location, options: Mapping[str, str]) -> str:
    """A URI with these options, as it is typed."""
    base = location.uri.rpartition("?")[0] if location.options else location.uri
    return f'"{base}?{urlencode(options, safe="/")}"' if options else f'"{base}"'


def _search(root: Path, cells: Sequence[str]) -> tuple[str, str, int]:
    """Folder below `root` and extension with which most files exist, and how many; nearer and shorter ones first."""
    folders = [""]
    for here, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        if len(folders) > _MOST_FOLDERS:
            break
        if here != str(root) and any(map(has_image_suffix, files)):
            folders.append(Path(here).relative_to(root).as_posix())
    some_cells = [cell for cell in cells if cell][:: max(1, len(cells) // _TRIED)]
    pairs = [(folder, ext) for folder in folders for ext in _EXTENSIONS]
    folder, ext = max(pairs, key=lambda pair: _existing(root, some_cells, *pair))
    return folder, ext, _existing(root, cells, folder, ext)


def _existing(root: Path, cells: Sequence[str], folder: str, ext: str) -> int:
    paths = (root / _whole(cell, folder, ext) for cell in cells if cell)
    return sum(file_size(path) >= 0 and path.is_file() for path in paths)


def _assemble(
    root: Path,
    uri: str,
    columns: Mapping[str, list[str]],
    levels: Mapping[str, list[str]],
    read_notes: Sequence[str] = (),
) -> DataSet:
    paths = columns["path"]
    values = np.array(columns["value"], np.float32) if "value" in columns else None
    classes, labels, multilabel = labels_of(columns["label"] if values is None else ["value"] * len(paths))
    names = {level: tuple(sorted(set(texts), key=natural)) for level, texts in levels.items()}
    numbers = {level: {name: i for i, name in enumerate(known)} for level, known in names.items()}
    coarser = [np.array([numbers[level][text] for text in texts], np.int64) for level, texts in levels.items()]
    reader = FileReader(str(root.absolute()), tuple(paths))
    generated = np.array(columns["generated"]) == "1" if "generated" in columns else None
    groups = np.array(columns["group"]) if "group" in columns else None
    rows = (np.arange(len(paths)), paths, labels, stacked(labels, coarser))
    whole = Split(UNDIVIDED, reader, *rows, generated=generated, groups=groups, values=values)
    splits = {UNDIVIDED: whole}
    if "split" in columns:
        splits = whole.divide(split_rows([split_called(text) for text in columns["split"]]))
        if "train" not in splits:
            raise ValueError(f"{uri} has {' and '.join(splits)} but no rows whose split is train")
        reject_unseen(uri, classes, splits)
    repeated = len(paths) - len(set(paths))
    notes = (f"{repeated} paths are listed more than once",) if repeated else ()
    return DataSet(uri, classes, splits, with_finest(classes, multilabel, names), multilabel, (*read_notes, *notes))


def apply_fixes(data: DataSet, fixes: Path, out: Path) -> dict[str, int]:
    """Write `data` with the fixes of a table as a table that opens as data; returns how many were changed and removed.

    Raises `ConfigError` that lists all rows of an unknown image or class, before anything is written.
    """
    if data.levels or not all(isinstance(split.reader, FileReader) for split in data.splits.values()):
        raise ValueError(f"{data.uri}: fixes are for image files with one level of labels, and it holds others")
    table = read_text_table(fixes, str(fixes))
    if missing := [name for name in _OF_FIXES if name not in table.columns]:
        raise ValueError(f"{fixes} has no column {missing[0]!r}; edit a file that --csv wrote, and keep its columns")
    places = {(name, str(i)): row for name, split in data.splits.items() for row, i in enumerate(split.index.tolist())}
    wanted: dict[tuple[str, int], str] = {}
    faults = []
    for line, key, index, name, fix in zip(table.places, *(table.columns[c] for c in _OF_FIXES), strict=True):
        row = places.get((name, index), -1)
        parts = [part.strip() for part in fix.split(_BETWEEN) if part.strip()] if data.multilabel else [fix]
        unknown = [] if fix == _REMOVE else [part for part in parts if part not in data.classes]
        if fix and (row < 0 or data[name].keys[row].strip() != key):
            faults.append(f"{fixes}, {line}: {data.uri} has no image {key!r} with index {index} in split {name!r}")
        elif fix and unknown:
            faults.append(f"{fixes}, {line}: no class {unknown[0]!r}, nor {_REMOVE!r}{near(unknown[0], data.classes)}")
        elif fix and wanted.setdefault((name, row), fix) != fix:
            faults.append(f"{fixes}, {line}: {key!r} has another fix above")
    if faults:
        raise ConfigError(faults)
    rows = []
    for name, split in data.splits.items():
        for row in range(len(split)):
            label = wanted.get((name, row)) or data.label_text(split.labels[row], empty="")
            label += _BETWEEN if data.multilabel and _BETWEEN not in label else ""  # one label of several possible ones
            path = os.path.relpath(split.reader.path(int(split.index[row])), str(out.parent))  # type: ignore[attr-defined]
            if label.strip(_BETWEEN) != _REMOVE or _REMOVE in data.classes:
                rows.append((path, label, name, int(split.generated is not None and split.generated[row])))
    write_csv(out, [("path", "label", "split", "generated"), *rows])
    removed = sum(map(len, data.splits.values())) - len(rows)
    return {"images": len(rows), "changed": len(wanted) - removed, "removed": removed}


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write rows, the header first, atomically."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows(rows)


def _levels(uri: str, columns: Mapping[str, list[str]], coarse: str) -> dict[str, list[str]]:
    """The columns of coarser levels by their names, in the order of the table."""
    levels: dict[str, list[str]] = {}
    for column, texts in columns.items():
        if column != coarse and not column.startswith(LEVEL):
            continue
        name = "coarse" if column == coarse else column.removeprefix(LEVEL).strip()
        if name in ("", FINEST, *levels):
            raise ValueError(f"{uri}: column {column!r} names no new level; give each its own name, but not {FINEST!r}")
        levels[name] = texts
    return levels


def labels_of(texts: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int64], bool]:
    """Class names in natural order; labels [images], or 0/1 [images, classes] where any text names several."""
    multilabel = any(_BETWEEN in text for text in texts)
    lists = [[part.strip() for part in text.split(_BETWEEN) if part.strip()] for text in texts]
    classes = tuple(sorted({name for names in lists for name in names}, key=natural))
    number = {name: i for i, name in enumerate(classes)}
    if not multilabel:
        return classes, np.array([number[names[0]] for names in lists], np.int64), False
    labels = np.zeros((len(texts), len(classes)), np.int64)
    for row, names in enumerate(lists):
        labels[row, [number[name] for name in names]] = 1
    return classes, labels, True


def reject_unseen(uri: str, classes: Sequence[str], splits: Mapping[str, Split]) -> None:
    """Raise `ValueError` where val or test has a class that train has not; an undivided source has neither."""
    if "train" not in splits:
        return
    seen = _present(splits["train"].labels, len(classes))
    for name, split in splits.items():
        unseen = [classes[c] for c in np.flatnonzero(_present(split.labels, len(classes)) & ~seen).tolist()]
        if unseen:
            raise ValueError(
                f"{uri}: {len(unseen)} classes of {name} are not in train ({some(unseen, _SHOWN)}); add training images"
            )


def _present(labels: NDArray[np.int64], classes: int) -> NDArray[np.bool_]:
    counts = labels.sum(0) if labels.ndim == 2 else np.bincount(labels, minlength=classes)
    return np.asarray(counts > 0)


def repeated(names: Iterable[str]) -> list[str]:
    """Names that are there more than once."""
    return [name for name, count in Counter(names).items() if count > 1]
