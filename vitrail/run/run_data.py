"""The data of a run: opened, checked, and divided so that no model is evaluated on an image that it was trained on."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.config import DataConfig, RunConfig
from vitrail.data.check.scan import Bad, Digests, drop_bad, examine, leak_notes, reject_if_too_many, sampled
from vitrail.data.dataset import UNDIVIDED, DataSet, Split, drop_unreadable
from vitrail.data.open import open_data, open_source
from vitrail.engine.device import ProcessGroup
from vitrail.engine.progress import Progress
from vitrail.model.classifier import Classifier
from vitrail.model.store import model_folder, read_description

DIVISION = ("val_fraction", "test_fraction", "split_seed", "fold")  # what decides which image is in which split
FORM = ("channels", "maximum")  # how images are read that are no RGB of eight bits


def division(config: DataConfig) -> dict[str, Any]:
    """The settings of a run that divide data, and channels other than RGB; a saved model states them."""
    form = {name: getattr(config, name) for name in FORM if getattr(config, name) != getattr(DataConfig(), name)}
    return {name: value for name in DIVISION if (value := getattr(config, name)) != ""} | form


def open_run(config: DataConfig) -> DataSet:
    """The data of a run: what `open_data` can be told has the same names in the configuration."""
    options = [name for name in inspect.signature(open_data).parameters if name != "uri"]
    return open_data(config.uri, **{name: getattr(config, name) for name in options})


def read_data(config: RunConfig, group: ProcessGroup, quiet: bool) -> tuple[DataSet, list[Bad]]:
    """Data that a run trains on and is evaluated on, without unreadable images, and these. Raises one sentence."""
    chosen = config.data
    data = open_run(chosen)
    if data.unlabelled and config.objective.needs_labels():
        raise ValueError(
            f"{chosen.uri} has images but no labels, and {config.recipe} learns from labels; put them into "
            f"{chosen.uri.rstrip('/')}/CLASS/, name them in a CSV with the columns path,label, or learn without labels "
            "first (vitrail train msf, byol-asym, mae-pretrain, small-msf, ...)"
        )
    if data.numeric != (config.objective.kind == "regression"):
        values = f"{chosen.uri} has values to predict, and no classes; set --objective.kind regression"
        classes = f"objective.kind: regression needs values, and {chosen.uri} has classes; name a table with a column"
        raise ValueError(
            values if data.numeric else f"{classes} value (TABLE.csv?value=COLUMN) or float labels of .npz"
        )
    if "val" not in data.splits and "test" not in data.splits:
        raise ValueError(
            f"{chosen.uri} has neither val nor test {data.things} to evaluate on; set --data.val_fraction above 0"
        )
    if chosen.judge == "val" and "val" not in data.splits:
        raise ValueError(
            f"data.judge is val, and {chosen.uri} has no such {data.things}; set --data.val_fraction above 0"
        )
    if (setting := config.engine.selects_by) and (data.unlabelled or "val" not in data.splits):
        what = "labels" if data.unlabelled else f"val {data.things}"
        remedy = "leave it out" if data.unlabelled else "set --data.val_fraction above 0, or leave it out"
        raise ValueError(f"{setting}, and {chosen.uri} has no {what} to compute a metric on val from; {remedy}")
    for split in data.splits.values():
        if not len(split):
            raise ValueError(f"{chosen.uri}: split {split.name} has no {data.things}")
    bad: list[Bad] = []
    digests: Digests = {}
    if chosen.check == "full" and group.main and not data.holds_texts:
        total = sum(len(s) for s in data.splits.values())
        with Progress("check images", total, quiet=quiet) as bar:

            def seen(done: int, _: int) -> None:
                bar.advance(done - bar.done, f"{done} read")

            bad, digests = examine(data, progress=seen)
    bad = group.gather(bad)[0]
    reject_if_too_many(bad, sum(len(s) for s in data.splits.values()), chosen.bad_limit, chosen.uri)
    for key, reason in bad:
        group.say(quiet, f"skipped {key}: {reason}")
    data = drop_bad(data, bad)
    copied = leak_notes(data) if chosen.check == "full" and group.main else ()
    known, notes = group.gather(contents(data["train"], digests) if group.main else None)[0]
    return replace(data, notes=(*data.notes, *copied, *notes), contents=known), bad


def fingerprint(data: DataSet) -> str:
    """Changes with the training images, their order or their labels."""
    digest = hashlib.sha256()
    train = data["train"]
    digest.update(repr((data.classes, len(train))).encode())
    digest.update(train.index.tobytes())
    digest.update(train.targets.tobytes())
    return digest.hexdigest()[:16]


GROUPS = 1000  # of consecutive training images, one digest each
MOST_BYTES = 2**28  # of arrays that are hashed; of more a sample of images


def contents(train: Split, digests: Digests) -> tuple[tuple[str, ...], list[str]]:
    """Digests of the training images, each of one image or, of more than 1,000, of a group; and a note on any sample.

    `digests` are those of a scan; without one, files (and images in tar files) count by their sizes alone. Arrays are
    hashed in any case, and packed ones have their listed checksums. Nothing depends on where files are or on their age.
    """
    reader, index, count = train.reader, train.index, len(train)
    stamps = np.asarray(reader.stamps(index), "<i8") if hasattr(reader, "stamps") else np.zeros(count, "<i8")
    encoded = [digests.get((train.name, i), "") for i in index.tolist()]
    if hasattr(reader, "pixels"):
        chosen = sampled(index, MOST_BYTES / reader.pixels(int(index[0])).nbytes).tolist()
        encoded = [_digest(reader.pixels(i)) if c else "" for i, c in zip(index.tolist(), chosen, strict=True)]
    if not stamps.any() and not any(encoded):
        return (), []  # drawn from a seed, checked by the package that they come with, or texts, which have their own
    bounds = np.arange(min(count, GROUPS) + 1) * count // min(count, GROUPS)
    groups = [stamps[a:b].tobytes() + json.dumps(encoded[a:b]).encode() for a, b in pairwise(bounds.tolist())]
    hashed = sum(map(bool, encoded))
    note = f"contents: {hashed:,} of {count:,} training images are hashed, for the comparison on resume"
    known = tuple(hashlib.blake2b(group, digest_size=8).hexdigest() for group in groups)
    return known, [note] if 0 < hashed < count else []


def _digest(pixels: NDArray[np.uint8]) -> str:
    return hashlib.blake2b(repr(pixels.shape).encode() + pixels.tobytes(), digest_size=8).hexdigest()


def check_contents(before: Sequence[str], data: DataSet, run: Path) -> None:
    """Raises `ValueError` that names the first training images that are not what they were in a checkpoint."""
    changed = [i for i, (was, now) in enumerate(zip_longest(before, data.contents)) if was != now]
    if changed:
        keys, groups = data["train"].keys, len(before)
        first, last = (keys[n * len(keys) // groups - (n > changed[0])] for n in (changed[0], changed[0] + 1))
        where = first if first == last else f"one from {first} to {last}"
        raise ValueError(
            f"{data.uri} holds other training {data.things} than when the run began, the first that differs being "
            f"{where}; put them back, or begin another run with --config {run} --out FOLDER"
        )


def open_for(model: Classifier, data: str | Path | DataSet) -> DataSet:
    """Data to evaluate a model on, divided as the run that made it divided its own.

    Data that come divided stay so. With others the run's fractions and seed are taken whatever data these are: of its
    own, another division would mix training and evaluation images, and of others one is as good as another. A model
    with published weights was trained elsewhere: for it they stay whole.
    """
    if isinstance(data, DataSet):
        return data
    if "published" in model.stated:
        return open_whole(str(data))
    stated = model.stated.get("division", {})
    names = DIVISION if model.stated.get("data") == str(data) else DIVISION[:-1]  # folds are of its own data
    return open_data(data, **{name: stated[name] for name in (*names, *FORM) if name in stated})


def open_whole(uri: str) -> DataSet:
    """Data of which nothing is held out: a source that is not divided is one split, val.

    Raises `ValueError` where neither val nor test has labels, as with ImageNet's validation images in one flat folder.
    """
    data = drop_unreadable(open_source(uri))
    if UNDIVIDED in data.splits:
        data = replace(data, splits={"val": replace(data[UNDIVIDED], name="val")})
    if data.unlabelled or not {"val", "test"} & data.splits.keys():
        raise ValueError(
            f"{uri} has no validation images in class folders; put ILSVRC2012_val_*.JPEG into folders of WordNet ids "
            "(n01440764, ...) with valprep.sh of github.com/soumith/imagenetloader.torch, or name a CSV of the columns "
            "path,label"
        )
    return data


def learned_before(config: RunConfig, data: DataSet) -> list[str]:
    """A sentence where weights or a teacher are of a run that may have learned from what this one holds out."""
    notes = []
    for setting, path in (
        ("model.weights", config.model.weights),
        ("objective.teacher", getattr(config.objective, "teacher", None)),
    ):
        stated = _stated(Path(path)) if path else {}
        theirs = {name: value for name, value in stated.get("division", {}).items() if name in DIVISION}
        form = {name: getattr(config.data, name) for name in FORM}
        if stated.get("data") != data.uri or {**division(config.data), **form} == {**theirs, **form}:
            continue
        learned = open_data(data.uri, **theirs, **form)["train"].index
        held = np.concatenate([data[name].index for name in ("val", "test") if name in data.splits])
        if known := int(np.isin(held, learned).sum()):
            flags = " ".join(f"--data.{name} {value}" for name, value in theirs.items())
            notes.append(
                f"warning: {setting}: {path} may have learned from {known} of the {len(held)} {data.things} that this "
                f"run holds out, so that its figures will be too good; divide as it did: {flags}"
            )
    return notes


def _stated(path: Path) -> dict[str, Any]:
    """What the model of a run says of itself; nothing where there is none."""
    try:
        return dict(read_description(model_folder(path)).get("stated", {})) if path.is_dir() else {}
    except (ValueError, OSError):
        return {}


def own_uri(run: str | Path) -> str:
    """Where the data of a run are. Raises `ValueError` for a model that does not say."""
    uri = read_description(model_folder(run)).get("stated", {}).get("data")
    if not uri:
        raise ValueError(f"{run} does not say which data it learned from; name some: --data URI")
    return str(uri)


@contextmanager
def own_data_of(run: str | Path, remedy: str = "name them with --data URI, ") -> Iterator[None]:
    """For opening the data that a run was trained on: paths in its settings are as seen from where it was begun.

    `FileNotFoundError` of data that are not found from here says so, in one sentence.
    """
    try:
        yield
    except FileNotFoundError as error:
        if not str(error).startswith("no data at "):
            raise
        uri = str(error).split("'")[1]
        raise FileNotFoundError(
            f"the data of {run}, {uri}, are not found from {Path.cwd()}; {remedy}go to the folder where the run was "
            "begun, or set VITRAIL_DATA to the folder they are in"
        ) from None
