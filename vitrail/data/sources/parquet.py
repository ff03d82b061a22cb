"""Parquet files with the images inside, as data sets on the Hugging Face hub are stored.

    photos/data/train-00000-of-00002.parquet    a folder of them, or one file; splits are told by their names
    hf:OWNER/NAME                               fetched once, then found in the hub's cache

The column of images is the one that holds bytes, labels are in `label`; others by `?image=NAME&label=NAME`. Class names
come with the file. A row can only be read with its neighbours, so such files are quick in their own order alone: for
training, `vitrail pack` them once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.dataset import UNDIVIDED, BadImage, DataSet, Location, Source, Split, split_rows
from vitrail.data.decode import decode
from vitrail.data.sources.folder import natural
from vitrail.data.sources.table import reject_unseen
from vitrail.data.sources.webdataset import inner_files, splits_of
from vitrail.files import parse_json

_GROUPS_KEPT = 4  # groups of rows that stay in memory, in every process


@dataclass(frozen=True, eq=False)
class HubReader:
    """Reads image number i: row `row[i]` of group `group[i]` of the file `files[place[i]]`."""

    decodes: ClassVar[bool] = True  # so that a scan has something to find
    files: tuple[str, ...]
    column: str
    place: NDArray[np.int64]  # [images]
    group: NDArray[np.int64]  # [images]
    row: NDArray[np.int64]  # [images]

    def __call__(self, index: int) -> Image.Image:
        file = self.files[self.place[index]]
        cell = _group(file, int(self.group[index]), self.column)[int(self.row[index])].as_py()
        if not cell or not cell.get("bytes"):
            raise BadImage(self.key(index), "no bytes in the table")
        return decode(cell["bytes"], self.key(index))

    def key(self, index: int) -> str:
        """What names an image to a person."""
        return f"{Path(self.files[self.place[index]]).name} group {self.group[index]} row {self.row[index]}"


@lru_cache(maxsize=_GROUPS_KEPT)
def _group(file: str, number: int, column: str) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(file).read_row_group(number, [column])[column]


def hub_files(path: Path) -> list[Path]:
    """The Parquet files of a folder, or the file itself, where images are inside; else none."""
    files = [path] if path.suffix.lower() == ".parquet" else inner_files(path, ".parquet") if path.is_dir() else []
    if not files:
        return []
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ValueError(f"{path}: Parquet tables need pyarrow; install vitrail[table]") from None
    try:
        return files if _image_columns(pyarrow.parquet.read_schema(files[0])) else []
    except (OSError, ValueError):  # the source of tables reports it
        return []


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
    schema = pyarrow.parquet.read_schema(files[0])
    image = _choose(uri, "image", options, _image_columns(schema), schema.names)
    label = _choose(uri, "label", options, ["label"] if "label" in schema.names else [], schema.names)
    notes = ["images are inside Parquet files, which are slow in any order but their own; `vitrail pack` them first"]
    used: list[Path] = []
    places: list[tuple[int, int, int]] = []  # file, group of rows, row in it
    values: list[Any] = []
    for file in files:
        table = pyarrow.parquet.ParquetFile(file)
        labels_read = table.read([label])[label].to_pylist()
        if labels_read and all(value == -1 for value in labels_read):
            notes.append(f"left out {file.name}: its labels are hidden (-1)")
            continue
        sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
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

    is_struct = pyarrow.types.is_struct
    return [field.name for field in schema if is_struct(field.type) and field.type.get_field_index("bytes") >= 0]


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
    except (KeyError, TypeError, ValueError):
        return []


def _classes(
    uri: str, label: str, values: Sequence[Any], names: list[str]
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    if names and all(isinstance(value, int) for value in values):
        labels = np.array(values, np.int64)
        if labels.min() < 0 or labels.max() >= len(names):
            raise ValueError(
                f"{uri}: {label} goes from {labels.min()} to {labels.max()}, and there are names for {len(names)} "
                "classes from 0; remove those rows, or choose another with ?label=NAME"
            )
        return tuple(names), labels
    texts = ["" if value is None else str(value) for value in values]
    if "" in texts:
        raise ValueError(f"{uri}: row {texts.index('')} has no {label}; remove it, or choose another with ?label=NAME")
    classes = tuple(sorted(set(texts), key=natural))
    number = {name: i for i, name in enumerate(classes)}
    return classes, np.array([number[text] for text in texts], np.int64)
