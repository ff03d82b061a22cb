"""`vitrail compare`."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from vitrail.console import fail, output
from vitrail.run.launch import Cluster, Launcher
from vitrail.schema import Positional, Unprefixed


@dataclass(frozen=True)
class CompareCommand:
    """Run the missing experiments of studies (YAML files) and compare, or compare finished runs: a table and a report.

    Interrupted, the same command goes on; finished runs are never repeated, and studies share them. Exit code: 1 where
    a run failed.

    Example: vitrail compare study.yaml --jobs 2
    Example: vitrail compare study.yaml --only plain distilled --seeds 0
    Example: vitrail compare study.yaml --jobs slurm --gpus 1 --hours 4 --partition gpu
    Example: vitrail compare runs/a runs/b
    """

    what: Annotated[tuple[str, ...], Positional("STUDY ...|RUN ...")]
    """study files (or their folders, or module:attribute), run in this order; or two and more run folders"""
    jobs: Annotated[int | Launcher | None, "N|slurm"] = None
    """runs at a time (none: one per device); slurm: each run is a job of the cluster, local: the same without SLURM"""
    devices: Annotated[tuple[str, ...] | None, "ID ..."] = None
    """accelerators to spread runs over, as CUDA numbers them (none: all)"""
    only: Annotated[tuple[str, ...], "VARIANT ..."] = ()  # of a study, and the runs that these stand on (none: all)
    seeds: Annotated[tuple[int, ...], "N ..."] = ()  # of a study (none: as it says)
    baseline: str | None = None  # what the others are compared with (none: as the study says, or the first)
    also: Annotated[tuple[str, ...], "URI ..."] = ()  # further test sets on which every run is evaluated
    out: Path | None = None
    """folder of studies (none: runs/studies), or of the report on finished runs (none: runs/comparison)"""
    minutes: float | None = None  # then runs save and stop, and the same command goes on (none: no limit)
    seconds: float = 1.0  # time of each variant's speed measurement (0: none)
    smoke: bool = False  # two steps of every variant on a few images, to see that all of a study can be run
    json: bool = False  # print one JSON object, for each of several studies
    cluster: Annotated[Cluster, Unprefixed] = field(default_factory=Cluster)

    def __call__(self) -> int:
        from vitrail.compare.jobs import StudyStopped
        from vitrail.compare.page import comparison_tables
        from vitrail.compare.run import compare_runs, compare_study, part_of
        from vitrail.compare.study import STUDIES, read_study, smoke

        if not self.what:
            return fail("name a study file, or at least two finished runs")
        options: dict[str, Any] = {"seconds": self.seconds, "quiet": self.json}
        changes: dict[str, Any] = {"baseline": self.baseline, "test_sets": self.also}
        named = [what.endswith((".yaml", ".yml")) or Path(what, "study.yaml").is_file() for what in self.what]
        if (len(named) > 1 and not all(named)) or Path(self.what[0], "config.yaml").is_file():
            limits = (self.jobs, self.devices, self.minutes, self.only or None, self.seeds or None, self.smoke or None)
            if any(flag is not None for flag in limits):
                names = "--jobs, --devices, --minutes, --only, --seeds and --smoke"
                return fail(f"{names} are for studies; these runs are finished")
            results = iter([compare_runs(self.what, out=self.out, **changes, **options)])
        else:
            studies = [replace(read_study(what), **{k: v for k, v in changes.items() if v}) for what in self.what]
            if self.only or self.seeds:
                studies = [part_of(study, self.only, self.seeds) for study in studies]
            roots = [self.out or (Path(what).parent if Path(what).is_dir() else STUDIES) for what in self.what]
            options |= {"jobs": self.jobs, "devices": self.devices, "cluster": self.cluster}
            end = time.monotonic() + 60 * (math.inf if self.minutes is None else self.minutes)
            results = (
                compare_study(study, root=root, minutes=(end - time.monotonic()) / 60, **options)
                for study, root in zip(map(smoke, studies) if self.smoke else studies, roots, strict=True)
            )
        code = 0
        try:
            for comparison, folder in results:
                report = folder / "report.html"
                values = {"folder": str(folder), "report": str(report), **comparison.to_json()}
                output(self.json, values, comparison_tables(comparison), f"report: {report}")
                code = 1 if comparison.failures else code
        except StudyStopped as stopped:
            print(str(stopped), file=sys.stderr)
            return 130
        return code
