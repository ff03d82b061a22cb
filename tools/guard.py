"""What a change of structure must leave as it was: six short runs, the JSON of every command, and the lists of names.

    python tools/guard.py record CHECKOUT before.json      about five minutes on two cores
    python tools/guard.py compare before.json after.json   exits with 1 and prints what differs

Everything goes through the command line of the checkout, so that any two commits can be compared on one machine (bits
differ between machines). Left out are times, dates, versions and paths; weights are compared by their hash.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

IMAGES = "synthetic:shapes?n=240&size=32&classes=4"
SHORT = [
    "--optim.steps",
    "6",
    "--optim.warmup",
    "0",
    "--engine.log_every",
    "2",
    "--engine.device",
    "cpu",
    "--data.workers",
    "0",
    "--data.batch",
    "16",
]
VIT = ["--model.trunk.depth", "2", "--model.trunk.width", "48", "--model.trunk.heads", "3"]
RUNS: dict[str, list[str]] = {  # in order: later ones stand on earlier ones
    "supervised": ["small-deit", "--data", IMAGES, *VIT, *SHORT],
    "msf": [
        *("small-msf", "--data", IMAGES, "--model.trunk.depth", "8", *SHORT),
        *("--objective.bank", "64", "--objective.predictor_hidden", "32"),
    ],
    "distillation": ["small-deit-distilled", "--data", IMAGES, "--objective.teacher", "RUN:supervised", *VIT, *SHORT],
    "adapter": [
        "small-nola",
        "--data",
        IMAGES,
        "--model.weights",
        "RUN:supervised",
        "--model.head.kind",
        "mean",
        *VIT,
        *SHORT,
    ],
    "adaptive": ["small-ats", "--data", IMAGES, *VIT, *SHORT],
    "text": [
        *("small-text", "--data", "synthetic:grammar?n=200", *SHORT),
        *("--model.trunk.depth", "1", "--model.trunk.width", "16", "--model.trunk.heads", "2"),
    ],
}
COMMANDS: dict[str, list[str]] = {
    "evaluate": ["evaluate", "RUN:supervised"],
    "evaluate protocols": ["evaluate", "RUN:msf", "--protocol", "knn,linear,clusters"],
    "evaluate text": ["evaluate", "RUN:text"],
    "predict": ["predict", "RUN:supervised", "docs/bag.png", "docs/boot.png"],
    "compare": ["compare", "RUN:supervised", "RUN:distillation", "--out", "NEW:compare", "--seconds", "0"],
    "inspect": ["inspect", "RUN:supervised", "--count", "2", "--over", "16", "--judge", "2", "--out", "NEW:inspect"],
    "attack": ["attack", "RUN:adaptive", "--size", "8", "--optim.steps", "2", "--batch", "8", "--out", "NEW:attack"],
    "augment": ["augment", IMAGES, "NEW:more", "--method", "mixup", "--each", "2"],
    "check": ["check", IMAGES],
    "pack": ["pack", IMAGES, "NEW:packed"],
    "export": ["export", "RUN:supervised", "NEW:model.pt2"],
    "show recipe": ["show", "small-deit"],
    "show model": ["show", "deit_small"],
    **{f"list {what}": ["list", what] for what in ("models", "heads", "mixers", "adapters", "recipes", "data")},
}
LEFT_OUT = re.compile(
    r"second|_ms$|time|date|version|hardware|host|memory|energy|images_per|path|folder|^out$|^report$"
)


def plain(value: Any, folder: str) -> Any:
    """A value without what two runs on one machine may differ in."""
    if isinstance(value, dict):
        return {key: plain(item, folder) for key, item in value.items() if not LEFT_OUT.search(key)}
    if isinstance(value, list):
        return [plain(item, folder) for item in value]
    return value.replace(folder, "FOLDER") if isinstance(value, str) else value


class Recorder:
    """One checkout, asked through its command line."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.checkout, self.folder = checkout, folder
        self.environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}

    def words(self, given: list[str]) -> list[str]:
        """Words of a command with the folders of runs and outputs filled in."""
        filled = (word.replace("RUN:", f"{self.folder}/runs/") for word in given)
        return [word.replace("NEW:", f"{self.folder}/") for word in filled]

    def ask(self, *words: str) -> str:
        command = [sys.executable, "-m", "vitrail", *words]
        how = {"cwd": self.checkout, "env": self.environment, "capture_output": True, "text": True}
        done = subprocess.run(command, check=False, **how)
        if done.returncode:
            raise SystemExit(f"vitrail {' '.join(words)} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    def run(self, name: str) -> dict[str, Any]:
        """Metrics and hash of the weights of one run."""
        out = self.folder / "runs" / name
        self.ask("train", *self.words(RUNS[name]), "--out", str(out))
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        files = sorted((out / "model").glob("*.safetensors"))
        digest = hashlib.sha256(b"".join(_weights(file) for file in files)).hexdigest()
        config = (out / "config.yaml").read_text().replace(str(self.folder), "FOLDER")
        return {"metrics": plain(lines, str(self.folder)), "weights": digest, "config": config}

    def command(self, name: str) -> Any:
        """What a command prints for programs."""
        text = self.ask(*self.words(COMMANDS[name]), "--json")
        values = [json.loads(line) for line in text.splitlines() if line.startswith(("{", "["))]
        return plain(values, str(self.folder))

    def everything(self) -> dict[str, Any]:
        runs, commands = {}, {}
        for name in RUNS:
            runs[name] = self.run(name)
            print(f"run {name}", file=sys.stderr, flush=True)
        for name in COMMANDS:
            commands[name] = self.command(name)
            print(name, file=sys.stderr, flush=True)
        return {"runs": runs, "commands": commands}


def _weights(file: Path) -> bytes:
    """Names and bytes of the tensors of a file; its header may hold versions."""
    from safetensors.numpy import load_file

    tensors = load_file(file)
    return b"".join(name.encode() + tensors[name].tobytes() for name in sorted(tensors))


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Where two records differ, one line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys([*before, *after])
        return [
            line
            for key in keys
            for line in (
                differences(before[key], after[key], f"{place}/{key}")
                if key in before and key in after
                else [f"{place}/{key}: only {'before' if key in before else 'after'}"]
            )
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{place}/{i}")]
    return [] if before == after else [f"{place}: {str(before)[:80]!r} -> {str(after)[:80]!r}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("first", type=Path, help="the checkout, or the record before")
    parser.add_argument("second", type=Path, help="the record to write, or the record after")
    options = parser.parse_args()
    if options.what == "record":
        with tempfile.TemporaryDirectory() as folder:
            made = Recorder(options.first.resolve(), Path(folder)).everything()
        options.second.write_text(json.dumps(made, indent=1))
        return
    found = differences(json.loads(options.first.read_text()), json.loads(options.second.read_text()))
    print("\n".join(found) or "equal")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
