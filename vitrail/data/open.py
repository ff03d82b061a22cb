"""One door for all sources: a URI in, a divided data set out.

    photos/                             class folders, or train, val and test folders of class folders
    packed/                             what `vitrail pack` made of any of these
    labels.csv, .tsv, .parquet          columns path, label and perhaps split, coarse, level:NAME
    arrays.npz                          x_train, y_train, x_test, y_test, classes, ...
    shards/, photos.tar                 tar files, as WebDataset has them, see vitrail/data/tars.py
    images.parquet, hf:OWNER/NAME       images inside Parquet, as the Hugging Face hub has them, see vitrail/data/hub.py
    torchvision:CIFAR10?root=data       a data set of torchvision
    embedded:fashion                    comes with the package
    synthetic:shapes?n=2000&size=64     made as it is read
    glue/CoLA, text:reviews.csv         sentences with a class, see vitrail/data/texts.py
    synthetic:grammar?n=2000            sentences, half of them broken
    e2e/, alpaca_data.json              prompts and completions, see vitrail/data/completions.py
    synthetic:meals?n=2000              tables of places to eat, and what is said of them

A relative path that does not exist is also looked for in the folder that VITRAIL_DATA names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qsl

from vitrail.data.dataset import DataSet, add_label_noise, carve, choose_level, reduce_train
from vitrail.data.sources.packed import drop_unreadable, is_packed, open_packed
from vitrail.schema import near

FORMS = (
    "a folder of class folders or one made by `vitrail pack`, a .csv, .tsv or .parquet table, an .npz file, "
    ".tar files, hf:OWNER/NAME, torchvision:NAME, embedded:fashion or synthetic:shapes; of texts a folder of GLUE, "
    "text:TABLE or synthetic:grammar; of prompts and completions a table or .json file of them, or synthetic:meals"
)
_SCHEMES = ("torchvision", "hf", "embedded", "synthetic", "text")
_EXAMPLES = ("embedded:fashion", "synthetic:shapes", "torchvision:CIFAR10")
_TABLES = (".csv", ".tsv", ".parquet")
_PROMPTS = (".json", ".jsonl")


def open_data(
    uri: str | Path,
    *,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    split_seed: int = 0,
    level: str = "",
    shots: int | None = None,
    fraction: float = 1.0,
    long_tail: float | None = None,
    label_noise: float = 0.0,
    limit: int | None = None,
) -> DataSet:
    """The data set a URI names, with train and val splits and, where there is one, test.

    `val_fraction` of train becomes val where the source has none; of an undivided tree `test_fraction` and
    `val_fraction` of the whole are carved off. `level` is the level of a taxonomy that becomes the label, after
    carving: splits are the same whatever is learned. `shots`, `fraction`, `long_tail`, `limit` and `label_noise` then
    change train alone, see `vitrail.data.dataset`. All draws are stratified and depend on `split_seed`. Raises
    `FileNotFoundError` or `ValueError` with one sentence.

    >>> data = open_data("embedded:fashion")
    >>> len(data["train"]), len(data["val"]), len(data["test"]), data.classes[1]
    (9000, 1000, 2000, 'Trouser')
    """
    from vitrail.data.sources.completions import carve_prompts, holds_completions

    data = open_source(str(uri))
    completions = holds_completions(data)  # they have no classes
    if len(data.classes) < 2 and not completions and not data.unlabelled:
        raise ValueError(f"{uri} has only one class ({', '.join(data.classes)}); a classifier needs at least two")
    if completions and (shots is not None or long_tail is not None or label_noise or level):
        raise ValueError(f"{uri} has no classes, so data.shots, long_tail, label_noise and level mean nothing there")
    if data.unlabelled and (shots is not None or long_tail is not None or label_noise or level):
        raise ValueError(f"{uri} has no labels, so data.shots, long_tail, label_noise and level mean nothing there")
    divide = carve_prompts if completions else carve
    data = choose_level(divide(data, val_fraction, test_fraction, split_seed), level)
    data = reduce_train(data, seed=split_seed, shots=shots, fraction=fraction, long_tail=long_tail, limit=limit)
    return drop_unreadable(add_label_noise(data, label_noise, split_seed, level))


def open_source(uri: str) -> DataSet:
    """The data set a URI names, divided only as far as the source itself is. Raises as `open_data`."""
    scheme, colon, rest = uri.partition(":")
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9_+-]+", scheme) and not Path(uri).exists():
        if scheme not in _SCHEMES:
            raise ValueError(f"{uri}: unknown kind of data {scheme!r} (known: {FORMS}){near(scheme, _SCHEMES)}")
        if scheme == "text":
            return _texts(rest, uri)
        name, _, query = rest.partition("?")
        return _by_name(scheme, name, uri, _options(query, uri))
    path, options = _locate(uri)
    from vitrail.data.sources.parquet import hub_files

    if inside := hub_files(path):
        return _hub(inside, uri, options)
    if path.is_dir():
        from vitrail.data.sources.completions import is_completions
        from vitrail.data.sources.folder import open_folder
        from vitrail.data.sources.text_files import is_text_folder
        from vitrail.data.sources.webdataset import inner_files, open_tars

        if is_text_folder(path) or is_completions(path):
            return _texts(uri, uri)
        _refuse_unknown(options, (), uri)
        if is_packed(path):
            return open_packed(path, uri)
        return open_tars(shards, uri) if (shards := inner_files(path, ".tar")) else open_folder(path, uri)
    suffix = path.suffix.lower()
    if suffix in _PROMPTS:
        return _texts(uri, uri)
    if suffix in _TABLES:
        from vitrail.data.sources.table import COLUMNS, open_table

        _refuse_unknown(options, COLUMNS, uri)
        return open_table(path, uri, options)
    if suffix == ".npz":
        from vitrail.data.sources.npz import open_arrays

        _refuse_unknown(options, (), uri)
        return open_arrays(path, uri)
    if suffix == ".tar":
        from vitrail.data.sources.webdataset import open_tars

        _refuse_unknown(options, (), uri)
        return open_tars([path], uri)
    packed = "; unpack it and name the folder" if suffix in (".zip", ".gz", ".tgz", ".7z") else ""
    raise ValueError(f"{path} is a single file and no known kind of data set{packed}; known are {FORMS}")


def _hub(files: Sequence[Path], uri: str, options: Mapping[str, str]) -> DataSet:
    from vitrail.data.sources.parquet import OPTIONS, open_hub

    _refuse_unknown(options, OPTIONS, uri)
    return open_hub(files, uri, options)


def _by_name(scheme: str, name: str, uri: str, options: Mapping[str, str]) -> DataSet:
    if scheme == "hf":
        from vitrail.data.sources.parquet import fetch, hub_files

        files = hub_files(fetch(name, uri))
        if not files:
            raise ValueError(f"{uri} has no Parquet files with images inside; download it, and name its folder")
        return _hub(files, uri, options)
    if scheme == "torchvision":
        from vitrail.data.sources.builtin import open_torchvision

        return open_torchvision(name, uri, options)
    if scheme == "embedded":
        from vitrail.data.sources.builtin import open_embedded

        _refuse_unknown(options, (), uri)
        return open_embedded(name, uri)
    if name == "grammar":
        from vitrail.data.sources.synthetic_text import GRAMMAR_OPTIONS, open_grammar

        _refuse_unknown(options, GRAMMAR_OPTIONS, uri)
        return open_grammar(uri, options)
    if name == "meals":
        from vitrail.data.sources.synthetic_text import MEAL_OPTIONS, open_meals

        _refuse_unknown(options, MEAL_OPTIONS, uri)
        return open_meals(uri, options)
    if name == "numbers":
        from vitrail.data.sources.synthetic_text import NUMBER_OPTIONS, open_numbers

        _refuse_unknown(options, NUMBER_OPTIONS, uri)
        return open_numbers(uri, options)
    from vitrail.data.sources.shapes import OPTIONS, open_shapes

    if name != "shapes":
        raise ValueError(
            f"{uri}: no synthetic data set {name!r}; there are synthetic:shapes, :grammar, :meals and :numbers"
        )
    _refuse_unknown(options, OPTIONS, uri)
    return open_shapes(uri, options)


def _texts(place: str, uri: str) -> DataSet:
    from vitrail.data.sources import completions
    from vitrail.data.sources.text_files import OPTIONS, open_texts

    path, options = _locate(place)
    if completions.is_completions(path, options):
        _refuse_unknown(options, completions.OPTIONS, uri)
        return completions.open_completions(path, uri, options)
    _refuse_unknown(options, (*OPTIONS, "prompt", "completion"), uri)
    return open_texts(path, uri, options)


def _locate(uri: str) -> tuple[Path, dict[str, str]]:
    """An existing path and the options after `?`. A name that itself holds a question mark wins over options."""
    folder = os.environ.get("VITRAIL_DATA")
    texts = [(uri, "")]
    if "?" in uri:
        texts.append((uri.rpartition("?")[0], uri.rpartition("?")[2]))
    for text, query in texts:
        for base in (None, folder):
            path = Path(base, text) if base else Path(text).expanduser()
            if text and path.exists():
                return path, _options(query, uri)
    wanted = Path(texts[-1][0]).expanduser()
    neighbours = _listed(wanted.parent) + (_listed(Path(folder) / wanted.parent) if folder else [])
    hint = near(wanted.name, neighbours) or near(uri, _EXAMPLES)
    also = f" nor in {folder} (VITRAIL_DATA)" if folder and not wanted.is_absolute() else ""
    raise FileNotFoundError(f"no data at {str(wanted)!r}{also} (expected {FORMS}){hint}")


def _listed(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []


def _options(query: str, uri: str) -> dict[str, str]:
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError:
        raise ValueError(f"{uri}: options are written ?name=value&name=value, not {query!r}") from None
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ValueError(f"{uri}: an option is given twice")
    return options


def _refuse_unknown(options: Mapping[str, str], known: Iterable[str], uri: str) -> None:
    known = tuple(known)
    for name in options:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{uri}: no option {name!r} ({has}){near(name, known)}")
