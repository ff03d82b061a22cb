"""Inputs from outside, changed at random, and what is done with those that are accepted (for `test_fuzz.py`).

A property is a function `use(folder, **case)` that writes the input of a case into an empty folder and uses it. Cases
begin with something valid and change it slightly: bytes, entries, values, words.
"""

from __future__ import annotations

import io
import json
import math
import random
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import numpy as np
import torch
import yaml
from hostile import encoded
from hypothesis import strategies as st
from PIL import Image
from small import quick_recipes, reduced_recipe

import vitrail
from vitrail.cli import COMMANDS
from vitrail.cli import run as command
from vitrail.compare.study import plan, read_study
from vitrail.config import RunConfig, from_mapping, load_yaml
from vitrail.data.check.scan import scan
from vitrail.data.config import PreprocessConfig
from vitrail.data.dataset import BadImage
from vitrail.data.decode import decode
from vitrail.data.loading.loader import EvalLoader
from vitrail.data.open import open_source
from vitrail.data.pack import pack
from vitrail.data.preprocess import Preprocess
from vitrail.files import checksum
from vitrail.model.build import create_model
from vitrail.model.store import DESCRIPTION, WEIGHTS
from vitrail.recipes import RECIPES, recipe
from vitrail.schema import Setting, bare, plain
from vitrail.schema import settings as all_settings


class Property(NamedTuple):
    """A use, strategies of its cases, how many are tried in the quick and in the slow set, least share accepted."""

    use: Callable[..., object]
    case: dict[str, Any]
    quick: int
    thorough: int
    accepted: float


PROPERTIES: dict[str, Property] = {}
Changes = list[tuple[float, int, str]]
RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (30, 8, 8, 3), np.uint8), np.arange(30) % 3
PICTURE = Image.fromarray(RNG.integers(0, 256, (24, 24, 3), np.uint8))
IMAGES = {kind: encoded(PICTURE, kind) for kind in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP")}
SIZE = PreprocessConfig(size=16, crop_ratio=1.0)

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
WAYS = ["same", "double", "half", "more", "less", "other"]
NEAR = st.sampled_from(WAYS)
PLACE = st.integers(0, 9999).map(lambda n: n / 9999)
NOTHING: Any = st.just([])
HOW = ["flip"] * 6 + ["cut", "insert"]


def drawn(number: int) -> Changes:
    """Up to three changes, at places that are equally likely: those that hypothesis draws are mostly next to 0."""
    rng = random.Random(number)
    return [(rng.random(), rng.randrange(256), rng.choice(HOW)) for _ in range(rng.randrange(4))]


UNIFORM = st.integers(0, 2**32).map(drawn)
MUTATIONS = st.one_of(
    UNIFORM, UNIFORM, st.lists(st.tuples(PLACE, st.integers(0, 255), st.sampled_from(HOW)), max_size=3)
)


def fuzz(quick: int, thorough: int, accepted: float, **case: Any) -> Callable[[Any], Any]:
    """Register a property."""

    def mark(use: Any) -> Any:
        PROPERTIES[use.__name__.removeprefix("use_")] = Property(use, case, quick, thorough, accepted)
        return use

    return mark


def mutated(data: bytes, changes: Changes) -> bytes:
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


def chosen(items: Any, place: float) -> Any:
    rows = list(items)
    return rows[min(len(rows) - 1, int(place * len(rows)))]


def changed(value: Any, change: Any) -> Any:
    """A value near another (double, half, one more, one less, the other one), or what replaces it."""
    kind, how = change
    if kind == "odd" or how == "same":
        return how if kind == "odd" else value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        near = {"double": value * 2, "half": value / 2, "more": value + 1, "less": value - 1, "other": -value}[how]
        return int(near) if isinstance(value, int) else near
    if isinstance(value, str):
        return {"double": value * 2, "half": value[: len(value) // 2], "other": value.upper()}.get(how, value)
    if isinstance(value, list):
        return {"double": value * 2, "half": value[: len(value) // 2], "other": value[::-1]}.get(how, value)
    return value


CHANGE = st.one_of(
    st.tuples(st.just("near"), NEAR), st.tuples(st.just("near"), NEAR), st.tuples(st.just("odd"), ODD)
)  # mostly near, so that many are accepted


def replaced(tree: Any, place: float, change: Any) -> Any:
    """A JSON value with one of its inner values changed, chosen by `place`."""
    paths: list[tuple[Any, ...]] = []

    def walk(node: Any, path: tuple[Any, ...]) -> None:
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            paths.append((*path, key))
            walk(inner, (*path, key))

    walk(tree, ())
    node = tree = json.loads(json.dumps(tree))
    *above, last = chosen(paths, place)
    for key in above:
        node = node[key]
    node[last] = changed(node[last], change)
    return tree


def use_data(path: Path) -> bool:
    """Open, scan, read every image, and one batch; True where a batch was read."""
    data = vitrail.open_data(str(path))
    scan(data)
    for split in data.splits.values():
        for row in range(len(split)):
            try:
                split.read(row)
            except BadImage:
                continue
    batch = next(iter(EvalLoader(data["train"], Preprocess(SIZE), batch=4, device="cpu", workers=0)))
    assert batch.views[0].shape[1:] == (3, 16, 16)
    assert torch.isfinite(batch.views[0]).all()
    return True


@fuzz(60, 3000, 0.2, kind=st.sampled_from(sorted(IMAGES)), changes=MUTATIONS)
def use_image_bytes(folder: Path, kind: str, changes: Changes) -> None:
    image = decode(mutated(IMAGES[kind], changes), "a")
    assert image.mode == "RGB"
    assert Preprocess(SIZE)(image).shape == (3, 16, 16)


@fuzz(40, 1500, 0.15, changes=MUTATIONS, packed=st.booleans())
def use_npz_bytes(folder: Path, changes: Changes, packed: bool) -> bool:
    stream = io.BytesIO()
    (np.savez_compressed if packed else np.savez)(stream, x_train=X, y_train=Y)
    (folder / "a.npz").write_bytes(mutated(stream.getvalue(), changes))
    return use_data(folder / "a.npz")


ARRAYS = st.sampled_from(
    [
        np.array(3),
        np.zeros(0),
        np.array(["a", "b"]),
        np.array(["a", "b", "c"]),
        np.full(30, -1),
        np.full(30, np.nan),
        np.arange(30).astype(np.uint64) * np.uint64(2**58),
        np.eye(30, 3, dtype=np.int64),
        np.zeros((30, 8, 8, 3), np.float32),
        np.zeros((30, 8, 8, 4), np.uint8),
        np.zeros((30, 0, 8, 3), np.uint8),
        np.zeros((2, 8, 8), np.uint8),
        Y,
        Y.astype(np.uint8),
        Y[:, None],
        X,
        X[..., 0],
    ]
)
VALID = {
    "x_test": X,
    "y_test": Y,
    "y_train": Y.astype(np.uint8),
    "classes": np.array(["a", "b", "c"]),
    "coarse_train": Y // 2,
    "coarse_test": Y // 2,
    "coarse_classes": np.array(["a", "b"]),
    "level_a_train": Y % 2,
}


@fuzz(
    40,
    800,
    0.1,
    valid=st.lists(st.sampled_from(sorted(VALID)), max_size=4),
    arrays=st.dictionaries(st.sampled_from(["x_train", *VALID]), ARRAYS, max_size=1),
)
def use_npz_arrays(folder: Path, valid: list[str], arrays: dict[str, np.ndarray]) -> bool:
    np.savez(folder / "a.npz", **{"x_train": X, "y_train": Y, **{name: VALID[name] for name in valid}, **arrays})
    return use_data(folder / "a.npz")


@fuzz(
    40,
    1500,
    0.15,
    changes=MUTATIONS,
    label=st.one_of(st.sampled_from([0, 1, "a", "1"]), ODD),
    name=st.sampled_from(["0007.jpg", "a/b/0007.jpg", "../0007.jpg", "/0007.jpg", "0007", ".0007.jpg", "0001.jpg"]),
)
def use_tar(folder: Path, changes: Changes, label: Any, name: str) -> bool:
    stream = io.BytesIO()
    rows = [(f"{i:04d}.jpg", IMAGES["JPEG"]) for i in range(6)] + [(f"{i:04d}.cls", b"%d" % (i % 2)) for i in range(6)]
    more = json.dumps({"label": label}).encode()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for key, data in [*rows, (name, IMAGES["PNG"]), (f"{name.partition('.jpg')[0]}.json", more)]:
            member = tarfile.TarInfo(key)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    (folder / "a.tar").write_bytes(mutated(stream.getvalue(), changes))
    return use_data(folder / "a.tar")


@fuzz(
    30,
    1000,
    0.05,
    changes=MUTATIONS,
    cells=st.one_of(NOTHING, st.lists(st.lists(st.text(max_size=6), min_size=1, max_size=4), max_size=2)),
    suffix=st.sampled_from([".csv", ".tsv"]),
)
def use_table(folder: Path, changes: Changes, cells: list[list[str]], suffix: str) -> bool:
    for i in range(12):
        (folder / f"{i}.jpg").write_bytes(IMAGES["JPEG"])
    lines = ["path,label", *(f"{i}.jpg,{'ab'[i % 2]}" for i in range(12)), *(",".join(row) for row in cells)]
    text = "\n".join(lines).replace(",", "," if suffix == ".csv" else "\t").encode("utf-8", "replace")
    (folder / f"a{suffix}").write_bytes(mutated(text, changes))
    return use_data(folder / f"a{suffix}")


@fuzz(
    30,
    1000,
    0.15,
    changes=MUTATIONS,
    label=st.one_of(st.sampled_from([0, 1, 2]), ODD),
    column=st.sampled_from(["image", "img", "x"]),
)
def use_parquet(folder: Path, changes: Changes, label: Any, column: str) -> bool:
    import pyarrow as pa  # without it such files are rejected in a sentence, and this property is left out
    import pyarrow.parquet as pq

    labels = [i % 3 for i in range(11)]
    try:
        values = pa.array([*labels, label])
    except (pa.ArrowException, UnicodeError, OverflowError):  # a table cannot hold it
        values = pa.array([*labels, 0])
    images = [{"bytes": IMAGES["PNG"], "path": f"{i}.png"} for i in range(12)]
    pq.write_table(pa.table({column: images, "label": values}), folder / "train.parquet", row_group_size=4)
    (folder / "train.parquet").write_bytes(mutated((folder / "train.parquet").read_bytes(), changes))
    return use_data(folder / "train.parquet")


@cache
def prepared() -> Path:
    """A model, data and their packed form, made once in a process."""
    root = Path(tempfile.mkdtemp(dir=Path.cwd().parent))
    create_model("vit_micro_28", classes=["0", "1", "2"], depth=1, width=16, heads=1).save(root / "model")
    np.savez(root / "data.npz", x_train=X, y_train=Y, x_test=X, y_test=Y)
    pack(open_source(str(root / "data.npz")), root / "packed", workers=1)
    (root / "image.png").write_bytes(IMAGES["PNG"])
    create_model("vit_tiny_32", classes=4, depth=1, width=48, heads=3, patch=8).save(root / "teacher")
    return root


@fuzz(40, 1500, 0.15, file=PLACE, place=PLACE, change=CHANGE, changes=MUTATIONS)
def use_packed(folder: Path, file: float, place: float, change: Any, changes: Changes) -> bool:
    copied = Path(shutil.copytree(prepared() / "packed", folder / "packed"))
    path = chosen(sorted(copied.iterdir()), file)
    if path.suffix == ".json":
        path.write_text(json.dumps(replaced(json.loads(path.read_text()), place, change)))
    else:
        path.write_bytes(mutated(path.read_bytes(), changes))
    return use_data(copied)


def use_model(folder: Path) -> bool:
    model = vitrail.load(folder)
    prediction = model.predict(PICTURE)[0]
    assert len(prediction.top) > 0
    assert all(math.isfinite(share) for _, share in prediction.top)
    return True


@fuzz(60, 2000, 0.15, place=PLACE, change=CHANGE)
def use_model_description(folder: Path, place: float, change: Any) -> bool:
    copied = Path(shutil.copytree(prepared() / "model", folder / "model"))
    description = json.loads((copied / DESCRIPTION).read_text())
    (copied / DESCRIPTION).write_text(json.dumps(replaced(description, place, change)))
    return use_model(copied)


@fuzz(30, 1000, 0.1, changes=MUTATIONS, fitting=st.sampled_from([True, True, False]))
def use_weights(folder: Path, changes: Changes, fitting: bool) -> bool:
    copied = Path(shutil.copytree(prepared() / "model", folder / "model"))
    (copied / WEIGHTS).write_bytes(mutated((copied / WEIGHTS).read_bytes(), changes))
    if fitting:  # as by somebody who edits both
        description = json.loads((copied / DESCRIPTION).read_text())
        description |= {"bytes": (copied / WEIGHTS).stat().st_size, "checksum": checksum(copied / WEIGHTS)}
        (copied / DESCRIPTION).write_text(json.dumps(description))
    return use_model(copied)


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their paths as a mapping of mappings; where one is inside of another, the first stays."""
    tree: dict[str, Any] = {}
    for path, value in changes.items():
        *above, last = path.split(".")
        inner: Any = tree
        for part in above:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.setdefault(last, value)
    return tree


def setting_changed(setting: Setting, change: Any) -> Any:
    choices = [c for kind in setting.kinds if get_origin(bare(kind)) is Literal for c in get_args(bare(kind))]
    if choices and change[0] == "near" and change[1] != "same":
        return choices[WAYS.index(change[1]) % len(choices)]
    return changed(plain(setting.default), change)


@fuzz(
    150,
    5000,
    0.1,
    name=st.sampled_from(sorted(RECIPES)),
    changes=st.lists(st.tuples(PLACE, CHANGE), min_size=1, max_size=3),
)
def use_settings(folder: Path, name: str, changes: list[tuple[float, Any]]) -> None:
    base = recipe(name)
    known = list(all_settings(RunConfig, base))
    rows = [(chosen(known, place), change) for place, change in changes]
    config = from_mapping(nested({s.name: setting_changed(s, change) for s, change in rows}), base)
    assert from_mapping(json.loads(json.dumps(plain(config)))) == config  # what is accepted can be stored


FIXED = ("out", "data.uri", "data.workers", "optim.steps", "optim.epochs", "engine.device", "engine.compile")


@fuzz(
    8,
    150,
    0.3,
    name=st.sampled_from(quick_recipes()),
    changes=st.lists(st.tuples(PLACE, st.tuples(st.just("near"), NEAR)), min_size=1, max_size=2),
)
def use_training(folder: Path, name: str, changes: list[tuple[float, Any]]) -> None:
    """Two steps on a tiny model with settings near those of a recipe."""
    base = reduced_recipe(name, prepared() / "teacher", folder / "run")
    known = [s for s in all_settings(RunConfig, base) if s.name not in FIXED]
    rows = [(chosen(known, place), change) for place, change in changes]
    vitrail.train(from_mapping(nested({s.name: setting_changed(s, change) for s, change in rows}), base), quiet=True)
    assert (folder / "run" / "report.html").is_file()


@fuzz(60, 2000, 0.15, changes=MUTATIONS, damaged=st.booleans(), place=PLACE, change=CHANGE, study=st.booleans())
def use_yaml(folder: Path, changes: Changes, damaged: bool, place: float, change: Any, study: bool) -> None:
    tree: dict[str, Any] = {"recipe": "vit", "data": {"uri": "photos", "batch": 8}, "optim": {"lr": 0.1, "epochs": 3}}
    if study:
        tree = {"name": "x", "base": tree, "variants": {"a": {}, "b": {"optim": {"lr": 0.2}}}, "seeds": 2}
    else:
        del tree["recipe"]
    text = yaml.safe_dump(replaced(tree, place, change)).encode("utf-8", "replace")
    (folder / "a.yaml").write_bytes(mutated(text, changes if damaged else []))
    if study:
        read = read_study(folder / "a.yaml")
        assert len(plan(read, {}, folder)) == len(read.variants) * len(read.seeds)
    else:
        from_mapping(load_yaml(folder / "a.yaml"))


FLAGS = (
    "--json --help --data --out --device --what --protocol --split --batch --only --seeds cpu gpu 0 -1 1e9 a --way "
    "--shot --images --classes --method --each -- --size --config --resume auto --top --strict"
)
WORDS = st.one_of(
    st.sampled_from(FLAGS.split(" ")),
    st.text(max_size=6),
    st.sampled_from(
        ["\0", "\udce9", "/nope", "synthetic:shapes?n=-1", "hf:", "torchvision:", "text:", "embedded:x", "?", "ROOT"]
    ),
)
TRAIN = (
    "train vit --data ROOT/data.npz --model.name vit_micro_28 --model.trunk.depth 1 --model.trunk.width 16 "
    "--model.trunk.heads 1 --data.batch 8 --data.workers 0 --optim.warmup 0 --engine.device cpu --out run"
)
LINES = [
    "list models",
    "list recipes --json",
    "show vit_tiny",
    "show demo --json",
    "check ROOT/data.npz --json",
    "check ROOT/model",
    "predict ROOT/model ROOT/image.png --top 2 --device cpu",
    "evaluate ROOT/model --data ROOT/data.npz --split test --batch 8 --workers 0 --device cpu --json",
    "pack ROOT/data.npz out --size 4 --workers 1",
    "pack --verify ROOT/packed",
    "inspect ROOT/model --data ROOT/data.npz --what attention --count 1 --over 4 --out pages",
    "augment ROOT/data.npz out --method mixup --each 1",
    "bench ROOT/model --device cpu",
    "export nowhere model.onnx",
    "fit nowhere --latency 5ms --size 9MB --threads 1 --minutes 0.1 --weights none --out fitted",
    "attack ROOT/model --size 4 --data ROOT/data.npz",
    "compare nowhere.yaml --jobs 1",
    "app nowhere --port 1",
    f"{TRAIN} --optim.steps 1",
]
assert {line.split()[0] for line in LINES} == set(COMMANDS)


@fuzz(
    40,
    800,
    0.08,
    line=st.sampled_from(LINES),
    changes=st.one_of(NOTHING, st.lists(st.tuples(PLACE, st.sampled_from(["put", "drop", "add"]), WORDS), max_size=2)),
)
def use_arguments(folder: Path, line: str, changes: list[tuple[float, str, str]]) -> bool:
    name, *words = line.split()
    for place, how, word in changes:
        at = int(place * len(words))
        words[at : at + (how != "add")] = [] if how == "drop" else [word]
    if name == "bench":
        words += ["--rounds", "1", "--seconds", "0.01", "--batch", "2"]  # it measures for as long as it is told
    if name == "train" and not {"--optim.steps", "1"} <= set(words):  # however long a run may be, this one is short
        words += ["--optim.steps", "1"]
    if name == "app":  # a page that is shown until Ctrl-C is no hang
        from vitrail.app.server import AppServer

        AppServer.serve_forever = lambda *_: None  # type: ignore[method-assign]
    code = command([name, *(word.replace("ROOT", str(prepared())) for word in words)])
    assert code in (0, 1, 2)
    return code == 0
