"""Inputs that once made a command hang, take all memory or end in a traceback, by name, for `test_fuzz.py`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fuzzed import prepared, use_data, use_model
from hostile import (
    ARRAYS,
    damaged_deflate,
    edited,
    encrypted,
    jpeg,
    long_tar,
    lying_npz,
    make_hostile,
    sparse_tar,
    unknown_method,
    write_tar,
)

from vitrail.cli import run as command
from vitrail.compare.study import read_study
from vitrail.config import from_mapping, load_yaml
from vitrail.files import checksum
from vitrail.model.store import DESCRIPTION, WEIGHTS

DEEP = "[" * 100_000 + "]" * 100_000
BOMB = "\n".join(
    [
        "a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]",
        *(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefg", "bcdefgh", strict=True)),
        "seed: *h",
    ]
)
STUDY = "name: x\nbase: {recipe: vit, data: {uri: photos}}\nvariants: {a: {}}\nseeds: %s\n"
YAML = {"bomb": BOMB, "deep": f"seed: {DEEP}", "cycle": "a: &a [*a]", "escape": 'name: "\\UFFFFFFFF"'}
Y = ARRAYS["y_train"]
NPZ: dict[str, dict[str, Any]] = {
    "huge label": {"y_train": np.where(Y == 2, 200_000_000, Y)},
    "label of 64 bits": {"y_train": Y.astype(np.uint64) + np.uint64(2**63)},
    "one label": {"y_train": np.array(3)},
    "no pixels": {"x_train": np.zeros((30, 0, 5, 3), np.uint8)},
    "class twice": {"classes": np.array(["a", "b", "a"])},
}
TARS: dict[str, list[tuple[str, bytes]]] = {
    "deep label": [("77.jpg", jpeg()), ("77.json", b'{"label":' + DEEP.encode() + b"}")],
    "label null": [("77.jpg", jpeg()), ("77.json", b'{"label": null}')],
    "label NaN": [("77.jpg", jpeg()), ("77.json", b'{"label": NaN}')],
    "key twice": [("0000.jpg", jpeg()), ("0000.cls", b"2")],
    "huge text": [("77.jpg", jpeg()), ("77.cls", b"1" * 2**21)],
}
MODELS: dict[str, Callable[[dict[str, Any]], object]] = {
    "wide": lambda d: d["spec"]["trunk"].update(width=10**9),
    "wide within limits": lambda d: d["spec"]["trunk"].update(width=65_536, heads=64),
    "deep": lambda d: d["spec"]["trunk"].update(depth=10**9),
    "large images": lambda d: d["preprocess"].update(size=10**6),
    "classes an int": lambda d: d.update(classes=5),
    "classes null": lambda d: d.update(classes=[None] * 3),
    "few classes": lambda d: d.update(classes=["a"]),
    "multilabel text": lambda d: d.update(multilabel="x"),
    "files no names": lambda d: d.update(files=[1, None]),
}
LINES = [
    ["predict", "MODEL", "IMAGE", "--device", "gpu"],
    ["bench", "MODEL", "--device", ""],
    ["train", "vit", "--data", "photos", "--optim.epochs", "inf"],
    ["train", "vit", "--data", "photos", "--optim.warmup", "inf"],
    ["train", "vit", "--data", "photos", "--model.trunk.attention", "3"],
    ["train", "vit", "--data", "photos", "--seed", "99999999999999999999"],
    ["inspect", "\0", "photos"],
    ["check", "x" * 300],
    ["check", "\udce9"],
]


def use_known(folder: Path, kind: str, name: str) -> bool:
    """Use one of `CORPUS`."""
    path = folder / "a"
    if kind == "yaml":
        (folder / "a.yaml").write_text(YAML[name])
        from_mapping(load_yaml(folder / "a.yaml"))
    elif kind == "study":
        (folder / "a.yaml").write_text(STUDY % name)
        read_study(folder / "a.yaml")
    elif kind == "npz":
        np.savez(folder / "a.npz", **(ARRAYS | NPZ[name]))
        use_data(folder / "a.npz")
    elif kind == "tar":
        write_tar(folder / "a.tar", *TARS[name])
        use_data(folder / "a.tar")
    elif kind == "archive":
        path = folder / ("a.tar" if "tar" in name else "a.npz")
        if name in WRITERS:
            WRITERS[name](path)
        else:
            edited(path, EDITS[name])
        use_data(path)
    elif kind == "images":
        for one in ("a", "b"):
            make_hostile(folder / "all" / one)
            os.mkfifo(folder / "all" / one / "pipe.jpg")
        use_data(folder / "all")
    elif kind == "packed":
        shutil.copytree(prepared() / "packed", path)
        (path / "pack.json").write_text(DEEP)
        use_data(path)
    elif kind == "model":
        shutil.copytree(prepared() / "model", path)
        description = json.loads((path / DESCRIPTION).read_text())
        MODELS[name](description)
        description |= {"bytes": (path / WEIGHTS).stat().st_size, "checksum": checksum(path / WEIGHTS)}
        (path / DESCRIPTION).write_text(json.dumps(description))
        use_model(path)
    else:
        names = {"MODEL": str(prepared() / "model"), "IMAGE": str(prepared() / "image.png")}
        code = command([names.get(word, word) for word in LINES[int(name)]])
        assert code in (1, 2)
        return False
    return True


WRITERS: dict[str, Callable[[Path], object]] = {"lying npz": lying_npz, "long tar": long_tar, "sparse tar": sparse_tar}
EDITS = {"deflate": damaged_deflate, "encrypted": encrypted, "method": unknown_method}
CORPUS = [
    *(("yaml", name) for name in YAML),
    *(("study", seeds) for seeds in ("1000000000", "[1e9]", DEEP)),
    *(("npz", name) for name in NPZ),
    *(("tar", name) for name in TARS),
    *(("archive", name) for name in (*WRITERS, *EDITS)),
    ("packed", "deep"),
    *(("model", name) for name in MODELS),
    *(("line", str(i)) for i in range(len(LINES))),
]
