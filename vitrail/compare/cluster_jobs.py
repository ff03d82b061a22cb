"""The runs of a study as jobs of a cluster: those that are ready form one job array, the scheduler does the rest.

As with local workers, what is finished, begun or missing is read from the run folders. Ids of jobs are kept beside the
study, so that the same command waits for jobs that are still queued instead of submitting their runs twice.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.compare.jobs import StudyStopped
from vitrail.compare.study import Planned
from vitrail.config import dump
from vitrail.engine.device import StopRequest
from vitrail.engine.progress import Progress
from vitrail.engine.run_folder import RunFolder
from vitrail.files import parse_json, write_text
from vitrail.run.launch import POLL_EVERY, Cluster, Launcher, failure, submit


def run_on_cluster(
    planned: Sequence[Planned],
    folder: Path,
    launcher: Launcher,
    cluster: Cluster,
    *,
    minutes: float | None = None,
    quiet: bool = False,
) -> dict[Path, str]:
    """As `run_missing`, with one job per run. Raises `StudyStopped` when interrupted: jobs of SLURM go on."""
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    unique = {p.path: p for p in planned}
    waiting = {path: p for path, p in unique.items() if not RunFolder(path).finished}
    record = folder / "jobs.json"
    queued: dict[Path, Any] = _still_queued(record, folder, waiting) if launcher == "slurm" else {}
    failed: dict[Path, str] = {}
    with StopRequest() as stop, Progress("study", len(unique), quiet=quiet) as progress:
        progress.advance(len(unique) - len(waiting))
        while waiting:
            for path in [path for path, p in waiting.items() if any(need in failed for need in p.needs)]:
                lost = next(need for need in waiting.pop(path).needs if need in failed)
                failed[path] = f"it stands on {lost}, which failed: {failed[lost]}"
                progress.advance(1, f"{unique[path].name} failed")
            if ready := [p for path, p in waiting.items() if path not in queued and waiting.keys().isdisjoint(p.needs)]:
                jobs = submit([_arguments(p, folder) for p in ready], folder / "jobs", launcher, cluster, folder.name)
                queued |= {p.path: job for p, job in zip(ready, jobs, strict=True)}
                write_text(record, json.dumps({str(path): job.job_id for path, job in queued.items()}, indent=1))
                progress.say(f"{len(jobs)} jobs queued: {', '.join(str(job.job_id) for job in jobs)}")
            time.sleep(POLL_EVERY)
            for path in [path for path, job in queued.items() if path in waiting and job.done()]:
                job, run = queued.pop(path), waiting.pop(path)
                if not RunFolder(path).finished:
                    failed[path] = failure(Path(job.paths.stderr))
                outcome = f"failed: {failed[path]}" if path in failed else "finished"
                progress.advance(1, f"{run.name} {outcome}")
                progress.say(f"{run.name}: {outcome}")
            if waiting and (stop.requested or time.monotonic() > end):
                _stop(launcher, [job for path, job in queued.items() if path in waiting])
    return failed


def _stop(launcher: Launcher, jobs: Sequence[Any]) -> None:
    again = "the same command goes on where it was"
    if launcher == "local":  # nobody would look after them
        for job in jobs:
            job.cancel()
        raise StudyStopped(f"stopped; {again}")
    ids = " ".join(str(job.job_id) for job in jobs)
    raise StudyStopped(f"no longer waiting, but the jobs go on; cancel them with: scancel {ids}; {again}")


def _arguments(run: Planned, folder: Path) -> list[str]:
    config = folder / "configs" / f"{run.name}.yaml"
    write_text(config, dump(run.config))
    return ["--config", str(config.absolute()), "--out", str(run.path.absolute()), "--resume", "auto", "--json"]


def _still_queued(record: Path, folder: Path, waiting: dict[Path, Planned]) -> dict[Path, Any]:
    """Jobs of an earlier command that have not ended."""
    known = parse_json(record.read_text(encoding="utf-8")) if record.is_file() else {}
    if not known:
        return {}
    import submitit

    named = [path for path in waiting if str(path) in known]
    jobs: dict[Path, Any] = {path: submitit.SlurmJob(folder / "jobs", known[str(path)]) for path in named}
    return {path: job for path, job in jobs.items() if not job.done()}
