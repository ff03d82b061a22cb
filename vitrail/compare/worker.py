"""A process that makes runs one after the other, so that what the first one compiled serves the next.

Orders come on its stdin, one a line: `{"words": [... of vitrail train], "log": FILE}`. Each is answered on its stdout
with `{"code": EXIT CODE}`. What a run prints, C code included, goes to its log. The end of stdin ends the process.

A run must not depend on the one before it: `vitrail.engine.device.prepare` sets what is global both ways, and between
runs everything they held is let go. cuBLAS and torch read some things once a process, and other code wants other
graphs: so a worker is meant for runs that differ in nothing but their seed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path


def main() -> None:
    """Carry out orders until there are no more."""
    # Duplicates, which programs that a run starts do not inherit; a run itself finds nothing on stdin.
    orders, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    with os.fdopen(orders, encoding="utf-8") as lines:
        for line in lines:
            order = json.loads(line)
            code = make(order["words"], Path(order["log"]))
            try:
                os.write(answers, json.dumps({"code": code}).encode() + b"\n")
            except BrokenPipeError:  # whoever gave the order is no more; the run is made all the same
                return


def make(words: Sequence[str], log: Path) -> int:
    """What `vitrail train WORDS` does in a process of its own; returns its exit code. Output stays with `log`."""
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    before, sys.argv = sys.argv, ["vitrail", "train", *words]
    try:
        with warnings.catch_warnings():  # those that an earlier run was told are news to this one
            runpy.run_module("vitrail", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.argv = before
    _let_go()
    _flush()
    return code


def _let_go() -> None:
    """Free what the run held, also what stands in circles of references (the reader of a packed data set does)."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _flush() -> None:
    """Nothing that this run said may come out in the log of the next."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)  # what C code printed


if __name__ == "__main__":
    main()
