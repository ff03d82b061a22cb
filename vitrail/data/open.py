"""One door for all sources: a URI in, a divided data set out.

Sources are the files of `vitrail/data/sources/` and what `vitrail.registry` got from elsewhere; `vitrail list data`
lists how their data are named. A relative path that does not exist is also looked for in the folder that VITRAIL_DATA
names.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import parse_qsl

from vitrail.data.dataset import (
    DataSet,
    Location,
    Source,
    add_label_noise,
    choose_level,
    drop_unreadable,
    hold_out,
    reduce_train,
)
from vitrail.data.stack import with_channels
from vitrail.files import odd_kind
from vitrail.registry import SUFFIXES, kinds, part
from vitrail.schema import near

FORMS = (
    "a folder of class folders or one made by `vitrail pack`, a .csv, .tsv or .parquet table, an .npz file, .tar files "
    "or their URLs (s3://, https://), hf:OWNER/NAME, torchvision:NAME, embedded:fashion or synthetic:shapes; of texts "
    "a folder of GLUE, text:TABLE or synthetic:grammar; of prompts and completions a table or .json file of them, or "
    "synthetic:meals"
)
_EXAMPLES = ("embedded:fashion", "synthetic:shapes", "torchvision:CIFAR10")


def open_data(
    uri: str | Path,
    *,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    split_seed: int = 0,
    fold: str = "",
    level: str = "",
    shots: int | None = None,
    fraction: float = 1.0,
    long_tail: float | None = None,
    label_noise: float = 0.0,
    limit: int | None = None,
    channels: int = 3,
    maximum: float | None = None,
) -> DataSet:
    """The data set a URI names, with train and val splits and, where there is one, test.

    `val_fraction` of train becomes val where the source has none; of an undivided tree `test_fraction` and
    `val_fraction` of the whole are held out. With a `fold` I/K, val is that one of train and val together. `level` is
    the level of a taxonomy that then becomes the label: splits are the same whatever is learned. `shots`, `fraction`,
    `long_tail`, `limit` and `label_noise` at last change train alone. `channels` and `maximum` say how images are read
    that are no RGB of eight bits (`vitrail.data.stack.with_channels`). All draws are stratified and depend on
    `split_seed`. Raises `FileNotFoundError` or `ValueError` with one sentence.

    >>> data = open_data("embedded:fashion")
    >>> len(data["train"]), len(data["val"]), len(data["test"]), data.classes[1]
    (9000, 1000, 2000, 'Trouser')
    """
    data = open_source(str(uri))
    completions = data.holds_completions  # they have no classes
    if len(data.classes) < 2 and not completions and not data.unlabelled and not data.numeric:
        raise ValueError(f"{uri} has only one class ({', '.join(data.classes)}); a classifier needs at least two")
    missing = "classes" if completions or data.numeric else "labels" if data.unlabelled else ""
    if missing and (shots is not None or long_tail is not None or label_noise or level or (fold and not data.numeric)):
        raise ValueError(
            f"{uri} has no {missing}: data.shots, long_tail, label_noise, level and fold mean nothing there"
        )
    if completions:
        from vitrail.data.sources.text import hold_out_prompts

        data = hold_out_prompts(data, val_fraction, test_fraction, split_seed)
    else:
        data = choose_level(hold_out(data, val_fraction, test_fraction, split_seed, fold), level)
    data = reduce_train(data, seed=split_seed, shots=shots, fraction=fraction, long_tail=long_tail, limit=limit)
    return with_channels(drop_unreadable(add_label_noise(data, label_noise, split_seed, level)), channels, maximum)


def open_source(uri: str) -> DataSet:
    """The data set a URI names, divided only as far as the source itself is. Raises as `open_data`."""
    scheme, colon, name = uri.partition(":")
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9_+-]+", scheme) and not _exists(Path(uri)):
        source, location = _by_scheme(uri, scheme, name)
    else:
        location = Location(uri, "", *_locate(uri))
        # The last first: a source from elsewhere comes before the folder, which takes any.
        asked = [kind for kind in kinds("source") if location.suffix in SUFFIXES.get(kind, (location.suffix,))]
        offered = (part("source", kind) for kind in reversed(asked))
        opened = next((source for source in offered if source.opens(location)), None)
        if opened is None:
            packed = "; unpack it and name the folder" if location.suffix in (".zip", ".gz", ".tgz", ".7z") else ""
            raise ValueError(
                f"{location.path} is a single file and no known kind of data set{packed}; known are {FORMS}"
            )
        source = opened
    if source.options is not None:
        location.reject_unknown(source.options)
    return source.open(location)


def _by_scheme(uri: str, scheme: str, rest: str) -> tuple[Source, Location]:
    """The source that is registered as `scheme:name` or as `scheme`, without a look at others."""
    name, _, query = rest.partition("?")
    known = kinds("source")
    kind = next((kind for kind in (f"{scheme}:{name}", scheme) if kind in known), None)
    if kind is None and rest.startswith("//"):  # a URL, whose query may be a signature
        return part("source", "stream"), Location(uri, scheme, Path(name), {})
    if kind is not None:
        source: Source = part("source", kind)
        location = Location(uri, scheme, *(_locate(rest) if source.paths else (Path(name), _options(query, uri))))
        if source.opens(location):
            return source, location
    if members := [kind.partition(":")[2] for kind in known if kind.startswith(f"{scheme}:")]:
        listed = f"{', :'.join(members[:-1])} and :{members[-1]}" if len(members) > 1 else members[0]
        raise ValueError(f"{uri}: no {scheme} data set {name!r}; there are {scheme}:{listed}")
    blank = Location(uri, "", Path(), {})
    schemes = [k.partition(":")[0] for k in known if part("source", k).opens(blank._replace(scheme=k))]
    raise ValueError(f"{uri}: unknown kind of data {scheme!r} (known: {FORMS}){near(scheme, dict.fromkeys(schemes))}")


def _locate(uri: str) -> tuple[Path, dict[str, str]]:
    """An existing path and the options after `?`. A name that itself holds a question mark wins over options."""
    folder = os.environ.get("VITRAIL_DATA")
    texts = [(uri, "")]
    if "?" in uri:
        texts.append((uri.rpartition("?")[0], uri.rpartition("?")[2]))
    for text, query in texts:
        for base in (None, folder):
            path = Path(base, text) if base else Path(text).expanduser()
            if text and _exists(path):
                if kind := odd_kind(path):
                    raise ValueError(f"{path} is {kind}; name a file or a folder")
                return path, _options(query, uri)
    wanted = Path(texts[-1][0]).expanduser()
    neighbours = _listed(wanted.parent) + (_listed(Path(folder) / wanted.parent) if folder else [])
    hint = near(wanted.name, neighbours) or near(uri, _EXAMPLES)
    also = f" nor in {folder} (VITRAIL_DATA)" if folder and not wanted.is_absolute() else ""
    raise FileNotFoundError(f"no data at {str(wanted)!r}{also} (expected {FORMS}){hint}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long a name, or one with a null byte
        return False


def _listed(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder)]
    except (OSError, ValueError):
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
