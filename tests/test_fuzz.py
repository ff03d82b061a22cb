"""Mutated files and random settings: whatever is read from outside is used, or rejected in a sentence.

Each case begins with something valid and changes it: bytes, entries, values, words. A traceback is an exception of
another kind than those that commands turn into sentences. `make test-slow` tries thousands, always the same ones; with
VITRAIL_FUZZ=1 in the environment others every time.
"""

from __future__ import annotations

import inspect
import io
import json
import math
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import vitrail
from vitrail.cli import run as command
from vitrail.compare.study import read_study
from vitrail.config import RunConfig, from_mapping, load_yaml
from vitrail.data.check.scan import scan
from vitrail.data.dataset import BadImage
from vitrail.data.decode import decode
from vitrail.files import checksum
from vitrail.model.build import create_model
from vitrail.model.store import DESCRIPTION, WEIGHTS
from vitrail.recipes import RECIPES, recipe
from vitrail.schema import plain
from vitrail.schema import settings as all_settings

SENTENCES = (ValueError, OSError)  # ConfigError is a ValueError
RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (30, 8, 8, 3), np.uint8), np.arange(30) % 3
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 10**9, 0.5, math.inf, -math.inf, math.nan, 1e300]),
    st.text(max_size=8),
    st.sampled_from(["", "auto", "none", "\0", "../..", "-1", "1e400", "x" * 300, "\udce9", "[]", "a,b"]),
    st.lists(st.integers(-2, 2), max_size=3),
    st.dictionaries(st.sampled_from(["kind", "name", "size"]), st.integers(-1, 3), max_size=2),
)
MUTATIONS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 255), st.sampled_from(["flip", "cut", "insert"])), max_size=4
)


THOROUGH: dict[str, tuple[Any, list[str]]] = {}  # name of a property -> a test of many cases, its fixtures


def fuzz(quick: int, thorough: int, **strategies: Any) -> Callable[[Any], Any]:
    """A property, tried so many times in the quick set, and in the slow set (`test_many_more`)."""

    def cases(function: Any, count: int, repeatable: bool) -> Any:
        checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
        options = settings(max_examples=count, deadline=None, suppress_health_check=checks, derandomize=repeatable)
        return options(given(**strategies)(function))

    def mark(function: Any) -> Any:
        fixtures = [name for name in inspect.signature(function).parameters if name not in strategies]
        THOROUGH[function.__name__] = cases(function, thorough, "VITRAIL_FUZZ" not in os.environ), fixtures
        return cases(function, quick, True)

    return mark


def mutated(data: bytes, changes: list[tuple[float, int, str]]) -> bytes:
    raw = bytearray(data)
    for place, value, how in changes:
        at = int(place * max(0, len(raw) - 1))
        if how == "cut":
            del raw[at:]
        elif how == "insert":
            raw[at:at] = bytes([value] * 3)
        elif raw:
            raw[at] = value
    return bytes(raw)


def replaced(tree: Any, place: float, value: Any) -> Any:
    """A JSON value with one of its inner values replaced, chosen by `place`."""
    paths: list[tuple[Any, ...]] = []

    def walk(node: Any, path: tuple[Any, ...]) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, inner in items:
            paths.append((*path, key))
            walk(inner, (*path, key))

    walk(tree, ())
    tree = json.loads(json.dumps(tree))
    path = paths[min(len(paths) - 1, int(place * len(paths)))]
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return tree


def opened(path: Path) -> None:
    """Open, read every image and count what cannot be: nothing else may happen."""
    try:
        data = vitrail.open_data(str(path))
        scan(data)
        for split in data.splits.values():
            for row in range(len(split)):
                try:
                    split.read(row)
                except BadImage:
                    continue
    except SENTENCES as error:
        assert str(error).strip()


def jpeg(mode: str = "JPEG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (24, 24, 3), np.uint8)).save(stream, mode)
    return stream.getvalue()


IMAGES = {mode: jpeg(mode) for mode in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP")}


@fuzz(60, 3000, mode=st.sampled_from(sorted(IMAGES)), changes=MUTATIONS)
def test_image_bytes(mode: str, changes: list[tuple[float, int, str]]) -> None:
    try:
        assert decode(mutated(IMAGES[mode], changes), "a").mode == "RGB"
    except BadImage as error:
        assert str(error).strip()


@fuzz(40, 1500, changes=MUTATIONS, packed=st.booleans())
def test_npz_bytes(changes: list[tuple[float, int, str]], packed: bool, tmp_path: Path) -> None:
    stream = io.BytesIO()
    (np.savez_compressed if packed else np.savez)(stream, x_train=X, y_train=Y)
    (tmp_path / "a.npz").write_bytes(mutated(stream.getvalue(), changes))
    opened(tmp_path / "a.npz")


ARRAYS = st.sampled_from(
    [
        np.array(3),
        np.zeros(0),
        np.array(["a", "b"]),
        np.full(30, -1),
        np.full(30, np.nan),
        np.arange(30).astype(np.uint64) * np.uint64(2**58),
        np.eye(30, 3, dtype=np.int64),
        np.zeros((30, 8, 8, 3), np.float32),
        np.zeros((30, 8, 8, 4), np.uint8),
        np.zeros((30, 0, 8, 3), np.uint8),
        np.zeros((2, 8, 8), np.uint8),
        Y,
        X,
    ]
)


@fuzz(
    40,
    800,
    arrays=st.dictionaries(
        st.sampled_from(
            ["x_train", "y_train", "x_test", "y_test", "classes", "coarse_train", "coarse_classes", "level_a_train"]
        ),
        ARRAYS,
        max_size=4,
    ),
)
def test_npz_arrays(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"x_train": X, "y_train": Y, **arrays})
    opened(tmp_path / "a.npz")


@fuzz(
    40,
    1500,
    changes=MUTATIONS,
    label=st.one_of(ODD, st.text(max_size=5)),
    name=st.sampled_from(["0007.jpg", "a/b/0007.jpg", "../0007.jpg", "/0007.jpg", "0007", ".0007.jpg", "0001.jpg"]),
)
def test_tar_members_and_bytes(changes: list[tuple[float, int, str]], label: Any, name: str, tmp_path: Path) -> None:
    stream = io.BytesIO()
    rows = [(f"{i:04d}.jpg", IMAGES["JPEG"]) for i in range(6)] + [(f"{i:04d}.cls", b"%d" % (i % 2)) for i in range(6)]
    more = json.dumps({"label": label}).encode()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for key, data in [*rows, (name, IMAGES["PNG"]), (f"{name.partition('.jpg')[0]}.json", more)]:
            member = tarfile.TarInfo(key)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    (tmp_path / "a.tar").write_bytes(mutated(stream.getvalue(), changes))
    opened(tmp_path / "a.tar")


@fuzz(
    30,
    1000,
    changes=MUTATIONS,
    cells=st.lists(st.lists(st.text(max_size=6), min_size=1, max_size=4), max_size=4),
    suffix=st.sampled_from([".csv", ".tsv"]),
)
def test_tables(changes: list[tuple[float, int, str]], cells: list[list[str]], suffix: str, tmp_path: Path) -> None:
    for i in range(4):
        (tmp_path / f"{i}.jpg").write_bytes(IMAGES["JPEG"])
    between = "," if suffix == ".csv" else "\t"
    lines = ["path,label", *(f"{i}.jpg,{'ab'[i % 2]}" for i in range(4)), *(",".join(row) for row in cells)]
    text = "\n".join(lines).replace(",", between).encode("utf-8", "replace")
    (tmp_path / f"a{suffix}").write_bytes(mutated(text, changes))
    opened(tmp_path / f"a{suffix}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = create_model("vit_micro_28", classes=["a", "b", "c"], depth=1, width=16, heads=1)
    return small.save(tmp_path_factory.mktemp("fuzz") / "model")


@fuzz(60, 2000, place=st.floats(0, 1), value=ODD)
def test_model_descriptions(place: float, value: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = Path(shutil.copytree(model, tmp_path_factory.mktemp("m") / "model"))
    description = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps(replaced(description, place, value)))
    loads(folder)


@fuzz(30, 1000, changes=MUTATIONS, fitting=st.booleans())
def test_weights_bytes(
    changes: list[tuple[float, int, str]], fitting: bool, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(shutil.copytree(model, tmp_path_factory.mktemp("m") / "model"))
    (folder / WEIGHTS).write_bytes(mutated((folder / WEIGHTS).read_bytes(), changes))
    if fitting:  # as by somebody who edits both
        description = json.loads((folder / DESCRIPTION).read_text())
        description |= {"bytes": (folder / WEIGHTS).stat().st_size, "checksum": checksum(folder / WEIGHTS)}
        (folder / DESCRIPTION).write_text(json.dumps(description))
    loads(folder)


def loads(folder: Path) -> None:
    try:
        loaded = vitrail.load(folder)
        assert len(loaded.classes) == 3
    except SENTENCES as error:
        assert str(error).strip()


NAMES = [setting.name for setting in all_settings(RunConfig, recipe("vit"))]


@fuzz(
    150,
    5000,
    name=st.sampled_from(sorted(RECIPES)),
    changes=st.dictionaries(st.sampled_from(NAMES), ODD, min_size=1, max_size=3),
)
def test_settings(name: str, changes: dict[str, Any]) -> None:
    nested: dict[str, Any] = {}
    for path, value in changes.items():
        *above, last = path.split(".")
        inner = nested
        for part in above:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                return
        inner[last] = value
    try:
        config = from_mapping(nested, recipe(name))
        assert from_mapping(json.loads(json.dumps(plain(config)))) == config  # what is accepted can be stored
    except SENTENCES as error:
        assert 0 < len(str(error)) < 20_000


@fuzz(40, 2000, changes=MUTATIONS, place=st.floats(0, 1), value=ODD, study=st.booleans())
def test_yaml_files(
    changes: list[tuple[float, int, str]], place: float, value: Any, study: bool, tmp_path: Path
) -> None:
    tree: dict[str, Any] = {"recipe": "vit", "data": {"uri": "photos", "batch": 8}, "optim": {"lr": 0.1, "epochs": 3}}
    if study:
        tree = {"name": "x", "base": tree, "variants": {"a": {}, "b": {"optim": {"lr": 0.2}}}, "seeds": 2}
    text = yaml.safe_dump(replaced(tree, place, value)).encode("utf-8", "replace")
    (tmp_path / "a.yaml").write_bytes(mutated(text, changes))
    try:
        if study:
            read_study(tmp_path / "a.yaml")
        else:
            from_mapping(load_yaml(tmp_path / "a.yaml"))
    except SENTENCES as error:
        assert 0 < len(str(error)) < 20_000


WORDS = st.one_of(
    st.sampled_from(
        [
            "--json",
            "--help",
            "--data",
            "--out",
            "--device",
            "--what",
            "--protocol",
            "--split",
            "--batch",
            "--only",
            "--seeds",
            "cpu",
            "gpu",
            "0",
            "-1",
            "1e9",
            "a",
            "--way",
            "--shot",
            "--images",
            "--classes",
            "--method",
            "--each",
            "--",
            "--size",
            "--config",
            "--resume",
            "auto",
        ]
    ),
    st.text(max_size=6),
    st.sampled_from(
        ["\0", "\udce9", "/nope", "synthetic:shapes?n=-1", "hf:", "torchvision:", "text:", "embedded:x", "?"]
    ),
)
READING = [
    "evaluate",
    "predict",
    "inspect",
    "attack",
    "bench",
    "export",
    "check",
    "list",
    "show",
    "compare",
]  # given nothing that exists


@fuzz(60, 2000, name=st.sampled_from(READING), words=st.lists(WORDS, max_size=5))
def test_arguments_of_commands(
    name: str, words: list[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    assert command([name, *words]) in (0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(THOROUGH))
def test_many_more(name: str, request: pytest.FixtureRequest) -> None:
    """The properties above, each with thousands of cases."""
    test, fixtures = THOROUGH[name]
    test(**{fixture: request.getfixturevalue(fixture) for fixture in fixtures})
