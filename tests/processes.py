"""Scripts and functions in processes of their own, forked from a server that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import vitrail.compare.worker
import vitrail.run.page
from vitrail.measure.speed import throughput

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
    forks.set_forkserver_preload(["torch._dynamo", "vitrail.run.train", "vitrail.run.evaluate", "vitrail.run.page"])
    processes = ProcessPoolExecutor(1, forks, max_tasks_per_child=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INTERPRETER, "1")
        processes.submit(abs, 0).result()  # the server has this environment from its start
    return processes


def start(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Begin a function of a module in a process."""
    if forkserver.get_inherited_fds() is None:  # not a process of the server: another would be waited for at the end
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
    """Run a file, or code, as `python script words` does, with these variables added to the environment.

    Workers of its studies are forked too.
    """
    variables = {**{k: v for k, v in os.environ.items() if k != INTERPRETER}, **(environment or {})}
    method = multiprocessing.get_start_method()
    return server().submit(_as_here, method, _run, script, words, variables, folder or Path.cwd()).result()


def run_vitrail(*words: str, folder: Path) -> Ended:
    """`vitrail words` in a process of its own."""
    return run_script("from vitrail.__main__ import main\nmain()", *words, folder=folder)


class ForkedWorker:
    """Stands for the `subprocess.Popen` of a worker of a study: the same process, without seconds of imports."""

    def __init__(
        self, command: Sequence[str], stderr: Any, env: Mapping[str, str] | None, start_new_session: bool, **pipes: int
    ) -> None:
        assert command[1:] == ["-m", "vitrail.compare.worker"]
        assert (start_new_session, pipes) == (True, {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE})
        requests, stdin = multiprocessing.Pipe(duplex=False)
        stdout, answers = multiprocessing.Pipe(duplex=False)
        log = Connection(os.dup(stderr.fileno()), readable=False)
        main = sys.modules["__main__"].__dict__
        script = main.pop("__file__", None)  # else the process would run it again
        try:
            self.process = start(_work, requests, answers, log, dict(env or os.environ), Path.cwd())
        finally:
            main.update({} if script is None else {"__file__": script})
        for end in (requests, answers, log):
            end.close()
        self.stdin, self.stdout = (
            os.fdopen(os.dup(end.fileno()), mode) for end, mode in ((stdin, "wb"), (stdout, "rb"))
        )
        stdin.close()
        stdout.close()
        self.terminate, self.kill, self.pid = self.process.terminate, self.process.kill, self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0)
        return self.process.exitcode


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Fork the workers of studies instead of starting Python for each; tests/compare/test_worker.py starts it."""
    instead = SimpleNamespace(Popen=ForkedWorker, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    patch.setattr(vitrail.compare.worker, "subprocess", instead)


def shorten_reports(patch: pytest.MonkeyPatch) -> None:
    """Measure the speed that a report states on a few images only: no test asserts one, and every run has a report."""
    patch.setattr(vitrail.run.page, "SLOW_IMAGE", -1.0)  # one image at a time
    patch.setattr(vitrail.run.page, "throughput", _short_throughput)


def _short_throughput(*args: Any, seconds: float, **options: Any) -> dict[str, Any]:
    return throughput(*args, seconds=min(seconds, 0.01), **options)


def _work(requests: Connection, answers: Connection, log: Connection, environment: Mapping[str, str], at: Path) -> None:
    """The process of a forked worker."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(at)
    for descriptor, end in enumerate((requests, answers, log)):
        os.dup2(end.fileno(), descriptor)
        end.close()
    shorten_reports(pytest.MonkeyPatch())
    vitrail.compare.worker.main()


def _as_here(method: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose own processes (of data loaders) start as they do in the process of the tests."""
    multiprocessing.set_start_method(method, force=True)
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined] # that of the tests is running
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
    fork_workers(pytest.MonkeyPatch())
    shorten_reports(pytest.MonkeyPatch())
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
