"""Parquet files with the images inside, as data sets on the Hugging Face hub are stored.

    photos/data/train-00000-of-00002.parquet    a folder of them, or one file; splits are told by their names
    hf:OWNER/NAME                               fetched once, then found in the hub's cache

The column of images is the one that holds bytes, labels are in `label`; others by `?image=NAME&label=NAME`. Class names
come with the file. A row can only be read with its neighbours, so such files are quick in their own order alone: for
training, `vitrail pack` them once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.dataset import UNDIVIDED, BadImage, DataSet, Location, Source, Split, split_rows
from vitrail.data.decode import decode
from vitrail.data.sources.folder import image_files, natural
from vitrail.data.sources.table import reading_parquet, reject_unseen, repeated
from vitrail.data.sources.webdataset import LONGEST_LABEL, inner_files, splits_of
from vitrail.files import parse_json
from vitrail.quantities import shorten

_GROUPS_KEPT = 4  # groups of rows that stay in memory, in every process


@dataclass(frozen=True, eq=False)
class HubReader:
    """Reads image number i: row `row[i]` of group `group[i]` of the file `files[place[i]]`."""

    files: tuple[str, ...]
    column: str
    place: NDArray[np.int64]  # [images]
    group: NDArray[np.int64]  # [images]
    row: NDArray[np.int64]  # [images]

    def stored(self, index: int) -> bytes:
        """The encoded image. Raises `BadImage` where there is none."""
        column = _group(self.files[self.place[index]], int(self.group[index]), self.column)
        try:
            cell = column[int(self.row[index])].as_py()
        except Exception:  # of a damaged group as of a damaged row
            raise BadImage(self.key(index), column if isinstance(column, str) else "damaged") from None
        image = cell.get("bytes") if isinstance(cell, dict) else cell
        if not image or not isinstance(image, bytes):
            raise BadImage(self.key(index), "no bytes in the table")
        return image

    def __call__(self, index: int) -> Image.Image:
        return decode(self.stored(index), self.key(index))

    def key(self, index: int) -> str:
        """What names an image to a person."""
        return f"{Path(self.files[self.place[index]]).name} group {self.group[index]} row {self.row[index]}"


@lru_cache(maxsize=_GROUPS_KEPT)
def _group(file: str, number: int, column: str) -> Any:
    """A column of a group of rows, or why it cannot be read: which is not tried again for each of its rows."""
    import pyarrow.parquet

    try:
        with reading_parquet(Path(file).name):
            return pyarrow.parquet.ParquetFile(file).read_row_group(number, [column])[column]
    except ValueError as error:
        return str(error)


def hub_files(path: Path) -> list[Path]:
    """The Parquet files of a folder, or the file itself, where images are inside; else none."""
    files = [path] if path.suffix.lower() == ".parquet" else inner_files(path, ".parquet") if path.is_dir() else []
    if not files:
        return []
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ValueError(f"{path}: Parquet tables need pyarrow; install vitrail[table]") from None
    for file in files:
        with suppress(Exception):  # a damaged file is reported when all are read
            return files if _image_columns(pyarrow.parquet.read_schema(file)) else []
    if path.is_dir() and not image_files(path):
        with reading_parquet(files[0]):
            pyarrow.parquet.read_schema(files[0])
    return []  # of a single file the source of tables reports it


def _fetched(location: Location) -> Path:
    """The folder of a data set of the hub, fetched unless it is in the cache. Raises `ValueError` in one sentence."""
    from huggingface_hub import snapshot_download

    try:
        name = location.path.as_posix()
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=["*.parquet"]))
    except Exception as error:  # a name that is not there, no network, no permission: as many types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{location.uri} could not be fetched ({reason}); connect once, or name a folder that holds it"
        ) from None


def open_parquet(location: Location) -> DataSet:
    """The labelled images of Parquet files. Raises `ValueError` where a column is missing or a label is."""
    import pyarrow.parquet

    uri, options = location.uri, location.options
    files = hub_files(_fetched(location) if location.scheme else location.path)
    if not files:
        raise ValueError(f"{uri} has no Parquet files with images inside; download it, and name its folder")
    with reading_parquet(files[0]):
        schema = pyarrow.parquet.read_schema(files[0])
    image = _choose(uri, "image", options, _image_columns(schema), schema.names)
    label = _choose(uri, "label", options, ["label"] if "label" in schema.names else [], schema.names)
    notes = ["images are inside Parquet files, which are slow in any order but their own; `vitrail pack` them first"]
    used: list[Path] = []
    places: list[tuple[int, int, int]] = []  # file, group of rows, row in it
    values: list[Any] = []
    for file in files:
        with reading_parquet(file):
            table = pyarrow.parquet.ParquetFile(file)
            if missing := {image, label} - set(table.schema_arrow.names):
                raise ValueError(f"it has no column {missing.pop()!r}, which {files[0].name} has")
            labels_read = table.read([label])[label].to_pylist()
            sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
            if (claimed := sum(map(abs, sizes))) != len(labels_read):  # a damaged number may be negative
                raise ValueError(f"it claims {claimed} rows, and has {len(labels_read)} labels")
        if labels_read and all(value == -1 for value in labels_read):
            notes.append(f"left out {file.name}: its labels are hidden (-1)")
            continue
        places += [(len(used), group, row) for group, size in enumerate(sizes) for row in range(size)]
        values += labels_read
        used.append(file)
    if not places:
        raise ValueError(f"{uri} has no rows with labels; add one row per image, or choose others with ?label=NAME")
    splits = np.array(splits_of(used, uri))
    classes, labels = _classes(uri, label, values, _names(schema, label))
    place, group, row = np.array(places, np.int64).T
    reader = HubReader(tuple(str(f.absolute()) for f in used), image, place, group, row)
    keys = [reader.key(i) for i in range(len(places))]
    split_of = Split(UNDIVIDED, reader, np.arange(len(keys)), keys, labels).divide(split_rows(splits[place].tolist()))
    reject_unseen(uri, classes, split_of)
    return DataSet(uri, classes, split_of, notes=tuple(notes))


SOURCE = Source(
    {"hf:OWNER/NAME": "a data set of the Hugging Face hub, or a folder of its Parquet files; ?image=NAME&label=NAME"},
    open_parquet,
    lambda location: location.scheme == "hf" or bool(not location.scheme and hub_files(location.path)),
    ("image", "label"),
)


def _image_columns(schema: Any) -> list[str]:
    import pyarrow

    binary = (pyarrow.binary(), pyarrow.large_binary())
    structs = [field for field in schema if pyarrow.types.is_struct(field.type)]
    return [s.name for s in structs if s.type.get_field_index("bytes") >= 0 and s.type.field("bytes").type in binary]


def _choose(uri: str, what: str, options: Mapping[str, str], likely: Sequence[str], names: Sequence[str]) -> str:
    name = options.get(what) or (likely[0] if len(likely) == 1 else "")
    if name not in names:
        columns = f"no column {name!r}" if name else f"{len(likely) or 'no'} columns that may be the {what}"
        raise ValueError(f"{uri} has {columns}; choose one with ?{what}=NAME (it has {', '.join(names)})")
    return name


def _names(schema: Any, label: str) -> list[str]:
    """Class names that the file itself gives to the numbers of a column."""
    try:
        features = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return [str(name) for name in features[label]["names"]]
    except (KeyError, TypeError, ValueError, RecursionError):
        return []


def _classes(
    uri: str, label: str, values: Sequence[Any], names: list[str]
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    remedy = "or choose another with ?label=NAME"
    if names and all(isinstance(value, int) for value in values):
        if min(values) < 0 or max(values) >= len(names):
            raise ValueError(
                f"{uri}: {label} goes from {min(values)} to {max(values)}, and there are names for {len(names)} "
                f"classes from 0; remove those rows, {remedy}"
            )
        if twice := repeated(names):
            raise ValueError(
                f"{uri}: two classes of {label} are called {shorten(twice[0], 60)!r}; rename one, {remedy}"
            )
        return tuple(names), np.array(values, np.int64)
    texts = ["" if value is None else str(value) for value in values]
    if "" in texts:
        raise ValueError(f"{uri}: row {texts.index('')} has no {label}; remove it, {remedy}")
    for row, value in enumerate(values):
        whole = isinstance(value, str | int) or (isinstance(value, float) and value.is_integer())
        if not whole or len(texts[row]) > LONGEST_LABEL:
            kind = f"a text of {len(texts[row])} characters" if isinstance(value, str) else f"a {type(value).__name__}"
            raise ValueError(f"{uri}: {label} of row {row} is {kind}, no class; change it, {remedy}")
    classes = tuple(sorted(set(texts), key=natural))
    number = {name: i for i, name in enumerate(classes)}
    return classes, np.array([number[text] for text in texts], np.int64)
