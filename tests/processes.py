"""Scripts and functions in processes of their own, forked from a server that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

INTERPRETER = "TRITON_INTERPRET"


class Ended(NamedTuple):
    """How a script ended: exit code and output."""

    code: int
    out: str
    err: str


@cache
def server() -> ProcessPoolExecutor:
    """Processes that run one script each. Triton is imported as its interpreter, which nothing else on a CPU uses."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["torch._dynamo", "vitrail.run.train", "vitrail.run.evaluate"])
    processes = ProcessPoolExecutor(1, forks, max_tasks_per_child=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INTERPRETER, "1")
        processes.submit(abs, 0).result()  # the server has this environment from its start
    return processes


def start(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Begin a function of a module in a process."""
    server()
    method = multiprocessing.get_start_method()
    process = multiprocessing.get_context("forkserver").Process(target=_as_here, args=(method, function, *args))
    process.start()
    return process


def run_ranks(function: Callable[..., None], *args: Any, world: int = 2) -> None:
    """Run `function(rank, *args)` in so many processes; raises what one of them raises."""
    server()
    ranks = (multiprocessing.get_start_method(), function, *args)
    torch.multiprocessing.start_processes(_rank, ranks, nprocs=world, start_method="forkserver")


def run_script(
    script: str | Path, *words: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Ended:
    """Run a file, or code, as `python script words` does, with these variables added to the environment."""
    variables = {**{k: v for k, v in os.environ.items() if k != INTERPRETER}, **(environment or {})}
    method = multiprocessing.get_start_method()
    return server().submit(_as_here, method, _run, script, words, variables, folder or Path.cwd()).result()


def _as_here(method: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose own processes (of data loaders) start as they do in the process of the tests."""
    multiprocessing.set_start_method(method, force=True)
    return function(*args)


def _rank(rank: int, method: str, function: Callable[..., None], *args: Any) -> None:
    _as_here(method, function, rank, *args)


def _run(script: str | Path, words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Ended:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    source = script.read_text(encoding="utf-8") if isinstance(script, Path) else script
    sys.argv = [str(script) if isinstance(script, Path) else "-c", *words]
    sys.path.insert(0, str(script.parent) if isinstance(script, Path) else str(folder))
    main = sys.modules["__main__"] = type(sys)("__main__")  # where dataclasses and pickle look its classes up
    main.__file__ = sys.argv[0]
    code = 0
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            exec(compile(source, sys.argv[0], "exec"), main.__dict__)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            code = 1
            traceback.print_exc()
    return Ended(code, out.getvalue(), err.getvalue())
