"""`vitrail compare`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from vitrail.console import fail, output
from vitrail.schema import Positional


@dataclass(frozen=True)
class CompareCommand:
    """A study (a YAML file) run as far as it is missing, or finished runs: one table and one report.

    Interrupted, the same command goes on; finished runs are never repeated, and studies share them. Exit code: 1 where
    a run failed.

    Example: vitrail compare study.yaml --jobs 2
    Example: vitrail compare runs/a runs/b
    """

    what: Annotated[tuple[str, ...], Positional("STUDY|RUN ...")]
    """a study file (or its folder, or module:attribute), or two and more run folders"""
    jobs: int | None = None  # runs at a time (none: one per device)
    devices: Annotated[tuple[str, ...] | None, "ID ..."] = None
    """accelerators to spread runs over, as CUDA numbers them (none: all)"""
    baseline: str | None = None  # what the others are compared with (none: as the study says, or the first)
    also: Annotated[tuple[str, ...], "URI ..."] = ()  # further test sets on which every run is evaluated
    out: Path | None = None
    """folder of studies (none: runs/studies), or of the report on finished runs (none: runs/comparison)"""
    minutes: float | None = None  # then runs save and stop, and the same command goes on (none: no limit)
    seconds: float = 1.0  # time of each variant's speed measurement (0: none)
    smoke: bool = False  # two steps of every variant on a few images, to see that all of a study can be run
    json: bool = False  # print one JSON object

    def __call__(self) -> int:
        from vitrail.compare.jobs import StudyStopped
        from vitrail.compare.page import comparison_tables
        from vitrail.compare.run import compare_runs, compare_study
        from vitrail.compare.study import STUDIES, read_study, smoke

        if not self.what:
            return fail("name a study file, or at least two finished runs")
        first = Path(self.what[0])
        options: dict[str, Any] = {"seconds": self.seconds, "quiet": self.json}
        if len(self.what) > 1 or (first / "config.yaml").is_file():
            if self.smoke or any(flag is not None for flag in (self.jobs, self.devices, self.minutes)):
                return fail("--jobs, --devices, --minutes and --smoke are for studies; these runs are finished")
            comparison, folder = compare_runs(
                self.what, out=self.out, baseline=self.baseline, test_sets=self.also, **options
            )
        else:
            study = read_study(self.what[0])
            changes: dict[str, Any] = {"baseline": self.baseline, "test_sets": self.also}
            study = replace(study, **{name: value for name, value in changes.items() if value})
            study = smoke(study) if self.smoke else study
            root = self.out or (first.parent if first.is_dir() else STUDIES)  # a study's folder is among its runs
            try:
                options |= {"jobs": self.jobs, "devices": self.devices, "minutes": self.minutes}
                comparison, folder = compare_study(study, root=root, **options)
            except StudyStopped as stopped:
                print(str(stopped), file=sys.stderr)
                return 130
        report = folder / "report.html"
        values = {"folder": str(folder), "report": str(report), **comparison.to_json()}
        output(self.json, values, comparison_tables(comparison), f"report: {report}")
        return 1 if comparison.failures else 0
