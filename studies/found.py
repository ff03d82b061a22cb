"""What a study finds, row by row, and the models it keeps: made once, written as they come, not made again.

A row is made by what it is the row of: table, subject, what, seed. A kill, or a time that is over, loses nothing that
was written; a row that failed is said, does not end the study, and is tried again by the next call. Processes side by
side (`--part`, `--only`, `--of`; studies/plans.py) may share a folder: each sees the rows of the others. SIGTERM ends a
study after its last kernel: CUDA's MPS takes all processes down with one that is killed in the middle of one.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitrail.engine.loop import Stopped
from vitrail.model.classifier import Classifier
from vitrail.model.store import DESCRIPTION
from vitrail.run.evaluate import load

UNFINISHED = 75  # the exit code of a study that the same command goes on with
Order = Sequence[tuple[str, Callable[[int], None], Sequence[int]]]  # part, what makes the rows of a seed, seeds


def study_parser(about: str, name: str, parts: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with what all studies of this kind take; rows land in runs/studies/NAME unless said otherwise."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=list(parts), choices=parts)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="rows of these seeds (none: of all)")
    parser.add_argument("--of", nargs="+", metavar="NAME", help="rows of these models or methods (none: of all)")
    parser.add_argument("--out", type=Path, default=Path("runs/studies") / name)
    parser.add_argument("--models", type=Path, help="where models are kept (none: with the rows)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing more after so many")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print what was found there, and do nothing else")
    parser.add_argument("--smoke", action="store_true")
    return parser


def hardware(fast: bool) -> str:
    """What a study runs on, in words."""
    return f"{torch.cuda.get_device_name() if fast else 'cpu'}, torch {torch.__version__}"


class OutOfTime(Exception):
    """Nothing more is to be begun, for want of time or because a run was asked to stop."""


class Found:
    """Rows of FOLDER/found.jsonl, written as they come; what is there is not made again."""

    def __init__(self, folder: Path, minutes: float = math.inf, of: Sequence[str] | None = None) -> None:
        self.path, self.of, self.met = folder / "found.jsonl", of, set[str]()
        folder.mkdir(parents=True, exist_ok=True)
        self.until = time.monotonic() + 60 * minutes
        self.failed, self.stopped = 0, False
        if self.path.is_file() and not self.path.read_bytes().endswith(b"\n"):
            self._append("\n")  # a kill cut the last line off, and the next must not go on in it
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.broken = set[tuple[Any, ...]]()  # rows that failed in this call
        self._read()

    def _read(self) -> None:
        """Take in what other processes have written since."""
        for row in read_rows(self.path.parent):
            if "failed" not in row:
                self.rows.setdefault(key(row), row)

    def wants(self, name: str) -> bool:
        """Whether rows of this model or method are to be made (`--of`)."""
        self.met.add(name)
        return self.of is None or name in self.of

    def row(
        self, table: str, subject: str, what: str, seed: int, make: Callable[[], dict[str, Any]], again: bool = False
    ) -> dict[str, Any] | None:
        """A row, made now if it is not there; none where that failed, which is said once and does not end the study.

        `again`: what it is the row of is gone, so it is made even where it is there.
        """
        place = {"table": table, "subject": subject, "what": what, "seed": seed}
        if key(place) not in self.rows:
            self._read()
        if key(place) in self.rows and not again:
            return self.rows[key(place)]
        if key(place) in self.broken:
            return None
        if time.monotonic() > self.until:
            raise OutOfTime
        torch.manual_seed(seed)
        began = time.monotonic()
        try:
            made = {**place, **make()}
        except OutOfTime:
            raise
        except Stopped as error:  # a signal is meant for the whole study
            raise OutOfTime from error
        except Exception as error:
            self.broken.add(key(place))
            self._fail(place, error)
            return None
        made["seconds"] = time.monotonic() - began
        self.rows[key(place)] = made
        self._write(made)
        return made

    def guarded(self, table: str, what: str, seed: int, work: Callable[[], None]) -> None:
        """Do something that makes rows; what goes wrong between them does not end the study either."""
        try:
            work()
        except OutOfTime:
            raise
        except Stopped as error:
            raise OutOfTime from error
        except Exception as error:
            self._fail({"table": table, "subject": "between rows", "what": what, "seed": seed}, error)

    def through(self, order: Order, parts: Sequence[str], only: Sequence[int] | None) -> None:
        """All work of these parts and seeds (none: all seeds), in order."""
        for part, work, seeds in order:
            for seed in seeds:
                if part in parts and (only is None or seed in only):
                    self.guarded(part, part, seed, partial(work, seed))

    def _fail(self, place: dict[str, Any], error: Exception) -> None:
        self.failed += 1
        traceback.print_exc()
        self._write({**place, "failed": f"{type(error).__name__}: {error}".splitlines()[0]})

    def _write(self, row: dict[str, Any]) -> None:
        text = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
        print(text, flush=True)
        self._append(text + "\n")

    def _append(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)


@contextmanager
def to_the_end(found: Found, minutes: float) -> Iterator[None]:
    """Around all the work of a study: rows that failed make the exit code 1, a time that is over makes it another."""
    done = False
    try:
        with _asked_to_stop(found):
            yield
    except OutOfTime:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        why = "stopped" if found.stopped or time.monotonic() < found.until else f"{minutes:g} minutes are over"
        print(f"{why}; the same command goes on where it was", file=sys.stderr)
    else:
        done = True
        for name in sorted({*(found.of or ())} - found.met):
            print(f"--of {name}: nothing in these parts is called so, and no row was made for it", file=sys.stderr)
    if found.failed:
        sys.exit(f"{found.failed} rows failed; see above. The same command tries them again")
    if not done:
        sys.exit(UNFINISHED)


@contextmanager
def _asked_to_stop(found: Found) -> Iterator[None]:
    """SIGTERM is a time that is over. A run of `vitrail train` inside takes it for itself, and saves."""

    def stop(number: int, frame: object) -> None:
        found.stopped, found.until = True, -math.inf  # said again at the next row, should a library catch all errors
        raise OutOfTime

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All rows; a last line that a kill cut off is not one."""
    path = folder / "found.jsonl"
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is the row of."""
    return row["table"], row["subject"], row["what"], row["seed"]


class KeptModels:
    """Every model of a study by name and seed: from memory, from FOLDER/models, or trained now."""

    def __init__(self, folder: Path, found: Found, device: torch.device) -> None:
        self.folder, self.found, self.device = folder, found, device
        self._kept: dict[tuple[str, int], Classifier] = {}

    def training(self, name: str, seed: int) -> Callable[[], Classifier]:
        """What trains a model; whatever it needs that has rows of its own is made before it is returned."""
        raise NotImplementedError

    def place(self, name: str, seed: int) -> Path:
        return self.folder / "models" / f"{name.replace(' ', '-')}-seed{seed}"

    def __call__(self, name: str, seed: int) -> Classifier:
        if (name, seed) not in self._kept:
            folder = self.place(name, seed)
            if not (folder / DESCRIPTION).is_file():
                train = self.training(name, seed)

                def make() -> dict[str, Any]:
                    train().save(folder)
                    return {"device": self.device.type}

                if self.found.row("training", name, "whole", seed, make, again=True) is None:
                    raise RuntimeError(f"{name} of seed {seed} could not be trained")
            self._kept[name, seed] = load(folder, self.device).eval()
        return self._kept[name, seed]
