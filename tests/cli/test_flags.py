"""Flags of every command but `train`: what a command receives for the words that are typed."""

from __future__ import annotations

import dataclasses
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from vitrail.cli import COMMANDS, run
from vitrail.cli.attack_command import PatchOptim
from vitrail.measure.config import EpisodeConfig, LongTailConfig
from vitrail.run.launch import Cluster
from vitrail.schema import read_command, settings

A, B = Path("runs/a"), Path("runs/b")
RECEIVED: dict[str, dict[str, Any]] = {  # a command line: the fields that differ from their defaults
    "fit photos --latency 5ms": {"data": "photos", "latency": "5ms"},
    "fit photos --latency=2ms --size 9MB --on cuda --threads 1 --metric macro_f1 --out c": {
        "data": "photos",
        "latency": "2ms",
        "size": "9MB",
        "on": "cuda",
        "threads": 1,
        "metric": "macro_f1",
        "out": Path("c"),
    },
    "fit --minutes 5 --weights none photos --latency 1s --out c --json": {
        "data": "photos",
        "latency": "1s",
        "minutes": 5.0,
        "weights": "none",
        "out": Path("c"),
        "json": True,
    },
    "evaluate": {"runs": ()},
    "evaluate --data": {"runs": ()},
    "evaluate runs/a --json": {"runs": (A,), "json": True},
    "evaluate --json runs/a": {"runs": (A,), "json": True},
    "evaluate --json true runs/a": {"runs": (A,), "json": True},
    "evaluate runs/a --json=false": {"runs": (A,)},
    "evaluate runs/a runs/b --ensemble --control c d": {
        "runs": (A, B),
        "ensemble": True,
        "control": (Path("c"), Path("d")),
    },
    "evaluate --split val runs/a runs/b": {"runs": (A, B), "split": "val"},
    "evaluate --data a.npz b.npz --split val runs/a": {"runs": (A,), "data": ("a.npz", "b.npz"), "split": "val"},
    "evaluate runs/a --data=a.npz b.npz": {"runs": (A,), "data": ("a.npz", "b.npz")},
    "evaluate runs/a --crop_ratio 0.8 1": {"runs": (A,), "crop_ratio": (0.8, 1.0)},
    "evaluate runs/a --crop-ratio -0.5 -1e-3": {"runs": (A,), "crop_ratio": (-0.5, -0.001)},
    "evaluate runs/a --image-size 160 192": {"runs": (A,), "image_size": (160, 192)},
    "evaluate runs/a --image_size=160": {"runs": (A,), "image_size": (160,)},
    "evaluate runs/a --batch 32 --workers 0 --device cpu": {"runs": (A,), "batch": 32, "workers": 0, "device": "cpu"},
    "evaluate runs/a --batch -3": {"runs": (A,), "batch": -3},
    "evaluate runs/a --batch 1 --batch 2": {"runs": (A,), "batch": 2},
    "evaluate runs/a --data x --data y": {"runs": (A,), "data": ("y",)},
    "evaluate runs/a --per_class --per-class": {"runs": (A,), "per_class": True},
    "evaluate runs/a --head both --attack f": {"runs": (A,), "head": "both", "attack": Path("f")},
    "evaluate runs/a --protocol knn,linear clusters": {"runs": (A,), "protocol": ("knn,linear", "clusters")},
    "evaluate runs/a --classes 'a b' c,d": {"runs": (A,), "classes": ("a b", "c,d")},
    "evaluate runs/a --classes=--odd": {"runs": (A,), "classes": ("--odd",)},
    "evaluate runs/a --split=--val": {"runs": (A,), "split": "--val"},
    "evaluate runs/a --way 3 --shot 5 --queries 15 --episodes 9 --support train --episode-seed 4": {
        "runs": (A,),
        "few_shot": EpisodeConfig(3, 5, 15, 9, "train", 4),
    },
    "evaluate runs/a --groups thirds --many 50 --few 10": {"runs": (A,), "tail": LongTailConfig("thirds", 50, 10)},
    "evaluate runs/a --base b --bits 4": {"runs": (A,), "base": Path("b"), "bits": 4},
    "evaluate runs/a --workers None --split None --base None --head None": {"runs": (A,)},
    "evaluate runs/a --split none --base auto": {"runs": (A,), "split": "none", "base": Path("auto")},
    "evaluate timm:deit_small_patch16_224.fb_in1k --weights w.pth --expect --real real.json": {
        "runs": (Path("timm:deit_small_patch16_224.fb_in1k"),),
        "weights": "w.pth",
        "expect": True,
        "real": Path("real.json"),
    },
    "evaluate runs/a --calibrate --outliers others/": {"runs": (A,), "calibrate": True, "outliers": "others/"},
    "evaluate -- runs/a": {"runs": (A,)},
    "evaluate '' --data ''": {"runs": (Path(),), "data": ("",)},
    "predict runs/a": {"run": A, "images": ()},
    "predict runs/a x.jpg --top 1 y.jpg --json": {
        "run": A,
        "images": (Path("x.jpg"), Path("y.jpg")),
        "top": 1,
        "json": True,
    },
    "predict --top 1 runs/a x.jpg": {"run": A, "images": (Path("x.jpg"),), "top": 1},
    "predict runs/a x --device cpu --head=class --base b": {
        "run": A,
        "images": (Path("x"),),
        "device": "cpu",
        "head": "class",
        "base": Path("b"),
    },
    "predict runs/a 'They drank it.' '- said she' -5 -": {
        "run": A,
        "images": (Path("They drank it."), Path("- said she"), Path("-5"), Path("-")),
    },
    "predict runs/a x --coverage 0.9 --sets raps --keep 0.95 --neighbours 3 --index photos --csv p.csv": {
        "run": A,
        "images": (Path("x"),),
        "coverage": 0.9,
        "sets": "raps",
        "keep": 0.95,
        "neighbours": 3,
        "index": "photos",
        "csv": Path("p.csv"),
    },
    "predict runs/a -- --odd.jpg -x.jpg -h": {"run": A, "images": (Path("--odd.jpg"), Path("-x.jpg"), Path("-h"))},
    "compare study.yaml --jobs 2 --devices 0 1 --smoke": {
        "what": ("study.yaml",),
        "jobs": 2,
        "devices": ("0", "1"),
        "smoke": True,
    },
    "compare s --jobs slurm --nodes 2 --gpus 8 --hours 4 --partition gpu --account lab --slurm mem_gb=64 qos=low": {
        "what": ("s",),
        "jobs": "slurm",
        "cluster": Cluster(2, 8, 4.0, "gpu", "lab", ("mem_gb=64", "qos=low")),
    },
    "compare s --devices": {"what": ("s",), "devices": ()},
    "compare s --minutes 28": {"what": ("s",), "minutes": 28.0},
    "compare s --devices None": {"what": ("s",)},
    "compare s --only plain taught --seeds 0 2": {"what": ("s",), "only": ("plain", "taught"), "seeds": (0, 2)},
    "compare a b --out o --seconds 0 --baseline none --also x y --json": {
        "what": ("a", "b"),
        "out": Path("o"),
        "seconds": 0.0,
        "baseline": "none",
        "also": ("x", "y"),
        "json": True,
    },
    "inspect runs/a deit_tiny --layers 0 2 -1 --count 4 --over 16 --judge 0": {
        "models": ("runs/a", "deit_tiny"),
        "layers": (0, 2, -1),
        "count": 4,
        "over": 16,
        "judge": 0,
    },
    "inspect a --images a.jpg dir --what evidence heads --projection tsne --split val": {
        "models": ("a",),
        "images": (Path("a.jpg"), Path("dir")),
        "what": ("evidence", "heads"),
        "projection": "tsne",
        "split": "val",
    },
    "inspect a --data x --attack f --out o --device cpu --json": {
        "models": ("a",),
        "data": "x",
        "attack": Path("f"),
        "out": Path("o"),
        "device": "cpu",
        "json": True,
    },
    "app a b --host 0.0.0.0 --port 1 --limit 2 --device cpu --browser": {
        "runs": ("a", "b"),
        "host": "0.0.0.0",
        "port": 1,
        "limit": 2,
        "device": "cpu",
        "browser": True,
    },
    "app a --no-browser": {"runs": ("a",)},
    "attack": {},
    "attack --resume f": {"resume": Path("f")},
    "attack runs/a --size 8 --place 3,4 --eps 8 --loss tap --task preserve --task_weight 0.5 --target 3": {
        "run": A,
        "size": 8,
        "place": "3,4",
        "eps": 8,
        "loss": "tap",
        "task": "preserve",
        "task_weight": 0.5,
        "target": 3,
    },
    "attack runs/a --kind perturbation --prior released --layer-weights 1 0.5 --data d --batch 4 --workers 2": {
        "run": A,
        "kind": "perturbation",
        "prior": "released",
        "layer_weights": (1.0, 0.5),
        "data": "d",
        "batch": 4,
        "workers": 2,
    },
    "attack runs/a --optim.steps 3 --optim.lr -0.1 --seed 1 --device cpu --out o --json": {
        "run": A,
        "optim": PatchOptim(3, -0.1),
        "seed": 1,
        "device": "cpu",
        "out": Path("o"),
        "json": True,
    },
    "augment d o --no-real": {"data": "d", "out": Path("o"), "real": False},
    "augment d o --no_real": {"data": "d", "out": Path("o"), "real": False},
    "augment d o --real": {"data": "d", "out": Path("o")},
    "augment d o --method mixup --model m --each 3 --up-to 9 --below 5 --only a b --policy random --judge r --top 2": {
        "data": "d",
        "out": Path("o"),
        "method": "mixup",
        "model": "m",
        "each": 3,
        "up_to": 9,
        "below": 5,
        "only": ("a", "b"),
        "policy": "random",
        "judge": Path("r"),
        "top": 2,
    },
    "augment d o --r 0.5 --r_schedule cosine --superclass auto --loop --worst 2 --seed 1 --batch 2 --json": {
        "data": "d",
        "out": Path("o"),
        "r": 0.5,
        "r_schedule": "cosine",
        "superclass": "auto",
        "loop": True,
        "worst": 2,
        "seed": 1,
        "batch": 2,
        "json": True,
    },
    "augment d o --device cpu": {"data": "d", "out": Path("o"), "device": "cpu"},
    "bench": {},
    "bench a b --train --against timm --batch search --image_size 32 --device cpu": {
        "models": ("a", "b"),
        "train": True,
        "against": "timm",
        "batch": "search",
        "image_size": 32,
        "device": "cpu",
    },
    "bench --rounds 2 a --precision bf16 --compile on --seconds 0.1 --checks --data d --attack f --out c.svg --json": {
        "models": ("a",),
        "rounds": 2,
        "precision": "bf16",
        "compile": "on",
        "seconds": 0.1,
        "checks": True,
        "data": "d",
        "attack": Path("f"),
        "out": Path("c.svg"),
        "json": True,
    },
    "export r --to onnx o": {"run": Path("r"), "out": Path("o"), "to": "onnx"},
    "export r hf:a/b --upload": {"run": Path("r"), "out": Path("hf:a/b"), "upload": True},
    "export r o --int8 --calibrate d --lose 0.5 --with_predict": {
        "run": Path("r"),
        "out": Path("o"),
        "int8": True,
        "calibrate": "d",
        "lose": 0.5,
        "with_predict": True,
    },
    "export r o --fp16": {"run": Path("r"), "out": Path("o"), "fp16": True},
    "export r o --input float --output logits --base b --bits 4 --json": {
        "run": Path("r"),
        "out": Path("o"),
        "input": "float",
        "output": "logits",
        "base": Path("b"),
        "bits": 4,
        "json": True,
    },
    "check d --model auto --epochs 3 --device cpu --csv s.csv": {
        **{"data": "d", "model": "auto", "epochs": 3, "device": "cpu", "csv": Path("s.csv")},
    },
    "check d --apply s.csv": {"data": "d", "apply": Path("s.csv")},
    "check --json d --out s.png --strict": {"data": "d", "json": True, "out": Path("s.png"), "strict": True},
    "check d --channels 5": {"data": "d", "channels": 5},
    "check d --model r --suggest 9 --by typical --labelled t.csv --csv n.csv": {
        "data": "d",
        "model": "r",
        "suggest": 9,
        "by": "typical",
        "labelled": Path("t.csv"),
        "csv": Path("n.csv"),
    },
    "pack": {},
    "pack auto --size 0 none --workers 2 --json": {
        "data": "auto",
        "out": Path("none"),
        "size": 0,
        "workers": 2,
        "json": True,
    },
    "pack --verify o": {"verify": Path("o")},
    "list": {},
    "list heads --json 'x*'": {"what": "heads", "json": True, "pattern": "x*"},
    "show vit": {"names": ("vit",)},
    "show vit --plan --measure": {"names": ("vit",), "plan": True, "measure": True},
    "show vit --json --optim.lr 1e-4 --model.head mean --engine.no-compile": {
        "names": ("vit",),
        "json": True,
        "settings": {"optim": {"lr": "1e-4"}, "model": {"head": "mean"}, "engine": {"compile": False}},
    },
}


def class_of(command: str) -> type:
    module, _, name = COMMANDS[command][0].partition(":")
    cls: type = getattr(import_module(f"vitrail.{module}"), name)
    return cls


def received(line: str) -> dict[str, Any]:
    command, *words = shlex.split(line)
    read: Any = read_command(class_of(command), words)
    fields = dataclasses.fields(read)
    defaults = {f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory() for f in fields}
    return {name: getattr(read, name) for name in defaults if getattr(read, name) != defaults[name]}


@pytest.mark.parametrize("line", RECEIVED)
def test_a_command_receives_what_is_typed(line: str) -> None:
    assert received(line) == RECEIVED[line]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("train", "show")])
def test_every_flag_of_a_command_is_typed_at_least_once_above(command: str) -> None:
    typed = " ".join(line for line in RECEIVED if line.startswith(f"{command} ")).replace("-", "_")
    flags = [s for s in settings(class_of(command)) if type(s.metavar) is str]
    assert [s.name for s in flags if f"__{s.name}" not in typed and f"__no_{s.name}" not in typed] == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("evaluate a --crop_rato 0.8", "--crop_rato: no such flag; did you mean 'crop_ratio'?"),
        ("evaluate a --quux", "--quux: no such flag; --help lists all"),
        ("evaluate a --few_shot.way 3", "--few_shot.way: no such flag; --help lists all"),
        ("evaluate a -json", "-json: no such flag; --help lists all"),
        ("evaluate a --batch", "--batch needs a value"),
        ("evaluate a --batch many", "--batch: expected a whole number, got 'many'"),
        ("evaluate a --way 1", "--way: 1 is out of range, must be at least 2"),
        ("inspect a --layers 0 x", "--layers[1]: expected a whole number, got 'x'"),
        ("export r o --to onx", "--to: 'onx' is not one of torch, onnx, adapter, peft; did you mean 'onnx'?"),
        ("attack a --steps 3", "--steps: no such flag; did you mean 'eps' or 'optim.steps'?"),
        ("attack a b", "'b' is one argument too many"),
        ("predict", "RUN is missing"),
        ("list modles", "what: 'modles' is not one of models, heads"),
        ("train --config", "--config needs a value"),
    ],
)
def test_a_wrong_flag_is_one_sentence(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"vitrail: {sentence}")
    assert (out, len(err.splitlines())) == ("", 1)


def test_all_wrong_flags_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "r", "--to", "onx", "--bits", "four", "--jsn"]) == 2
    problems = capsys.readouterr().err.splitlines()
    assert problems[0] == "vitrail: 4 problems:"
    assert [line.split(":")[0].strip() for line in problems[1:]] == ["--to", "--bits", "--jsn", "FILE is missing"]


@pytest.mark.parametrize("line", ["evaluate a --help", "evaluate -h a --bad", "evaluate a --data -h", "show -h"])
def test_help_is_asked_for_anywhere(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 0
    assert f"usage: vitrail {line.split(maxsplit=1)[0]}" in capsys.readouterr().out
