"""`vitrail compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from vitrail.cli.say import fail, print_json, show


def compare(
    what: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="STUDY|RUN ...")],
    /,
    jobs: int | None = None,
    devices: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="ID ...")] = None,
    baseline: str | None = None,
    also: Annotated[tuple[str, ...], tyro.conf.arg(metavar="URI ...")] = (),
    out: Path | None = None,
    seconds: float = 1.0,
    smoke: bool = False,
    json: bool = False,
) -> int:
    """A study (a YAML file) run as far as it is missing, or finished runs: one table and one report.

    Interrupted, the same command goes on; finished runs are never repeated, and studies share them. Exit code: 1 where
    a run failed.

    Example: vitrail compare study.yaml --jobs 2
    Example: vitrail compare runs/a runs/b

    Args:
        what: a study file (or its folder, or module:attribute), or two and more run folders
        jobs: runs at a time (none: one a device)
        devices: accelerators to spread runs over, as CUDA numbers them (none: all)
        baseline: what the others are compared with (none: as the study says, or the first)
        also: further test sets on which every run is judged
        out: folder of studies (none: runs/studies), or of the report on finished runs (none: runs/comparison)
        seconds: time of each variant's speed measurement (0: none)
        smoke: two steps of every variant on a few images, to see that all of a study can be made
        json: print one JSON object
    """
    from dataclasses import replace

    from vitrail.compare.jobs import StudyStopped
    from vitrail.compare.page import comparison_tables
    from vitrail.compare.run import compare_runs, compare_study
    from vitrail.compare.study import STUDIES, read_study
    from vitrail.compare.study import smoke as small

    if not what:
        return fail("name a study file, or at least two finished runs")
    if len(what) > 1 or (Path(what[0]) / "config.yaml").is_file():
        if jobs is not None or devices is not None or smoke:
            return fail("--jobs, --devices and --smoke are for studies; these runs are finished")
        made, folder = compare_runs(what, out=out, baseline=baseline, test_sets=also, seconds=seconds, quiet=json)
    else:
        study = read_study(what[0])
        changes = {name: value for name, value in (("baseline", baseline), ("test_sets", also)) if value}
        study = replace(study, **changes)  # type: ignore[arg-type]
        study = small(study) if smoke else study
        place = Path(what[0])
        root = out or (place.parent if place.is_dir() else STUDIES)  # a study's own folder stands among its runs
        try:
            made, folder = compare_study(study, root=root, jobs=jobs, devices=devices, seconds=seconds, quiet=json)
        except StudyStopped as stopped:
            print(str(stopped), file=sys.stderr)
            return 130
    if json:
        print_json({"folder": str(folder), "report": str(folder / "report.html"), **made.to_json()})
    else:
        show(comparison_tables(made))
        print(f"report: {folder / 'report.html'}")
    return 1 if made.failures else 0
