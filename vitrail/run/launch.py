"""Training as jobs of a cluster, through submitit: SLURM, or the same code on this machine without a scheduler.

A job is a command line, `python -m vitrail train ... --resume auto`, once per process. Nothing else travels: submitit's
file of a job names `TrainJob` and its strings, and results are read from run folders. Before its time limit SLURM sends
SIGUSR2; the run saves its state and stops, the job is queued again and goes on where it was. No torch here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

Launcher = Literal["slurm", "local"]

SAVING_SECONDS = 120.0  # from the signal to the time limit, at most half of the job's time
MARGIN = 15.0  # seconds of these in which the job is queued again
MOST_REQUEUES = 100
STOPPED = 130  # exit code of a run that saved and stopped
POLL_EVERY = 0.5  # seconds


@dataclass(frozen=True)
class Cluster:
    """What a job asks for, with --launch or --jobs slurm."""

    nodes: int = 1  # machines of a run
    gpus: int = 1  # processes per node, one per accelerator
    hours: float = 24.0  # time limit of a job; a run that needs longer is queued again and goes on
    partition: str | None = None  # SLURM's
    account: str | None = None  # SLURM's
    slurm: Annotated[tuple[str, ...], "KEY=VALUE ..."] = ()  # further parameters of submitit: mem_gb=64 constraint=a100


class TrainJob:
    """`vitrail train ARGUMENTS` as one process of a job; the arguments continue a run that was begun."""

    def __init__(self, *arguments: str, patience: float = SAVING_SECONDS) -> None:
        self.arguments, self.patience = arguments, patience
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Run the command to its end. Raises where it failed, so that the job counts as failed."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vitrail", "train", *self.arguments], env=_environment()
        )
        try:
            while (code := self._process.poll()) is None:  # in no lock that `checkpoint`, a signal handler, would need
                time.sleep(POLL_EVERY)
        except BaseException:  # cancelled: let it save
            self._process.terminate()
            raise
        if code not in (0, STOPPED):
            raise RuntimeError(f"vitrail train ended with exit code {code}; its messages are above")
        return code

    def checkpoint(self) -> Any:
        """Called by submitit when the job must end: ask the run to save, wait for it, give back the same job.

        One process of a run is asked; all of them agree on the step at which they stop.
        """
        from submitit.helpers import DelayedSubmission

        end = time.monotonic() + self.patience
        if self._process is not None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._process.pid, signal.SIGUSR2)
                while time.monotonic() < end and os.waitpid(self._process.pid, os.WNOHANG) == (0, 0):
                    time.sleep(0.1)
        return DelayedSubmission(TrainJob(*self.arguments, patience=self.patience))


def _environment() -> dict[str, str]:
    """Variables by which the processes of a job find each other, as torchrun sets them."""
    from submitit.helpers import TorchDistributedEnvironment

    here = TorchDistributedEnvironment()
    if here.world_size == 1:
        return dict(os.environ)
    one_node = here.world_size == here.local_world_size
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1" if one_node else here.master_addr,
        "MASTER_PORT": str(here.master_port),
        "RANK": str(here.rank),
        "WORLD_SIZE": str(here.world_size),
        "LOCAL_RANK": str(here.local_rank),
        "LOCAL_WORLD_SIZE": str(here.local_world_size),
    }


def submit(
    commands: Sequence[Sequence[str]], folder: Path, launcher: Launcher, cluster: Cluster, name: str = "vitrail"
) -> list[Any]:
    """Submit runs of `vitrail train`, several as one job array; their logs go to `folder`. Returns submitit's jobs.

    Raises `ValueError` where submitit or SLURM is not there, or where a parameter is not one.
    """
    try:
        import submitit
    except ImportError:
        raise ValueError('cluster jobs need submitit; install it with: pip install "vitrail[slurm]"') from None
    further = dict(word.partition("=")[::2] for word in cluster.slurm)
    if wrong := [word for word in cluster.slurm if "=" not in word]:
        raise ValueError(f"--slurm: {wrong[0]!r} is not KEY=VALUE, as mem_gb=64")
    if min(cluster.nodes, cluster.gpus) < 1 or cluster.hours <= 0:
        raise ValueError("--nodes and --gpus must be 1 or more, and --hours above 0")
    if launcher == "local" and cluster.nodes > 1:
        raise ValueError(f"--nodes {cluster.nodes}: --launch local is this machine; leave --nodes out")
    seconds = cluster.hours * 3600
    delay = min(SAVING_SECONDS, seconds / 2)
    parameters: dict[str, Any] = {"tasks_per_node": cluster.gpus, "gpus_per_node": cluster.gpus}
    try:
        if launcher == "local":
            executor: Any = submitit.LocalExecutor(folder, max_num_timeout=MOST_REQUEUES)
            executor.update_parameters(timeout_min=seconds / 60, signal_delay_s=delay, **parameters)
        else:
            executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=MOST_REQUEUES)
            parameters |= {"timeout_min": max(1, round(seconds / 60)), "nodes": cluster.nodes, "name": name}
            own = {
                "partition": cluster.partition,
                "account": cluster.account,
                "signal_delay_s": round(delay),
                **further,
            }
            numbers = {key: int(str(value)) if str(value).isdecimal() else value for key, value in own.items()}
            executor.update_parameters(**parameters, **{f"slurm_{key}": value for key, value in numbers.items()})
        with executor.batch():
            jobs = [executor.submit(TrainJob(*words, patience=max(1.0, delay - MARGIN))) for words in commands]
    except (RuntimeError, NameError, AssertionError, submitit.core.utils.FailedJobError) as error:
        raise ValueError(f"submitit could not submit to {launcher}: {' '.join(str(error).split())}") from None
    return jobs


def launch_training(
    arguments: Sequence[str], out: Path, launcher: Launcher, cluster: Cluster, quiet: bool = False
) -> int:
    """Submit one run; returns at once for SLURM, at its end on this machine. Returns the exit code."""
    from vitrail.engine.run_folder import RunFolder

    folder = out.with_name(f"{out.name}.jobs")
    job = submit([arguments], folder, launcher, cluster, out.name)[0]
    log = folder / f"{job.job_id}_0_log.err"
    if launcher == "slurm":
        print(f"job {job.job_id} is queued; its log: {log}\nrun folder: {out}\ncancel it with: scancel {job.job_id}")
        return 0
    if not quiet:
        print(f"job {job.job_id} runs; its log: {log}", file=sys.stderr, flush=True)
    while not job.done():
        time.sleep(POLL_EVERY)
    if RunFolder(out).finished:
        print(f"run: {out}\nreport: {RunFolder(out).report}")
        return 0
    print(f"vitrail: the job ended without a finished run: {failure(log)}", file=sys.stderr)
    return 1


def failure(log: Path) -> str:
    """The reason that the log of a job gives, in one line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    told = [line.removeprefix("vitrail: ") for line in lines if line.startswith("vitrail: ")]
    return told[-1] if told else f"see {log}"
