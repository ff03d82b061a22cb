"""`vitrail compare`: make what a study lacks, put finished runs side by side, write the report."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.bench.run import bench
from vitrail.compare.budgets import lengths_of
from vitrail.compare.jobs import run_missing
from vitrail.compare.page import write_comparison
from vitrail.compare.paired_runs import compare_members
from vitrail.compare.statistics import Comparison, Failure, Member, Price
from vitrail.compare.study import STUDIES, Planned, Study, plan, read_study, run_hash, write_study
from vitrail.config import RunConfig, load_yaml
from vitrail.engine.run_folder import RunFolder, environment, free_name
from vitrail.files import refuse_unwritable, write_text
from vitrail.measure.evaluator import read_predictions
from vitrail.model.cost import cost
from vitrail.model.store import model_folder, read_description
from vitrail.run.data_module import reads_texts
from vitrail.run.evaluate import evaluate, load
from vitrail.run.preflight import missing_parts, refuse_missing_data
from vitrail.schema import ConfigError, build, near

BUDGETS = {
    "epochs": "equal epochs",
    "time": "equal training time, from a short probe of each variant's images a second",
    "macs": "equal multiply-accumulates of training (a step counts as three forward passes)",
    "none": "no rule: each variant trains as long as it says",
}


def compare_study(
    study: Study | str | Path,
    *,
    root: str | Path = STUDIES,
    jobs: int | None = None,
    devices: Sequence[str] | None = None,
    seconds: float = 1.0,
    quiet: bool = False,
) -> tuple[Comparison, Path]:
    """Run what is missing of a study, then compare; returns the comparison and the study's folder.

    Finished runs are never repeated, whichever study made them. `jobs` runs are made at a time, spread over `devices`
    (none: all that CUDA shows). Speed is measured for about `seconds` a variant when all runs are done (0: not at all).
    Raises `ConfigError` for a study that makes no sense, `vitrail.compare.jobs.StudyStopped` when interrupted.
    """
    if not isinstance(study, Study):
        study = read_study(study)
    root = Path(root)
    folder = root / study.name
    refuse_unwritable(folder)
    lengths, said = lengths_of(study, root, tell=None if quiet else _say)
    planned = plan(study, lengths, root)
    _refuse_without_parts(planned, study.test_sets)
    write_study(study, folder)
    _link(planned, folder)
    failed = run_missing(planned, folder, jobs=jobs, devices=devices, quiet=quiet)
    done = [p for p in planned if p.path not in failed]
    if not done:
        raise ValueError(f"no run of {study.name} could be finished: {next(iter(failed.values()))}")
    members = [read_member(p.path, p.variant) for p in done]
    members = _judged_elsewhere(members, study.test_sets, folder, quiet)
    prices, conditions, notes = _prices(members, seconds, quiet)
    made = compare_members(
        study.name,
        members,
        study.baseline,
        failures=[Failure(p.variant, p.seed, failed[p.path]) for p in planned if p.path in failed],
        prices=prices,
        lengths=said,
        order=tuple(study.variants),
        conditions=conditions,
        budget=BUDGETS[study.budget],
        notes=notes,
    )
    _write(made, folder)
    return made, folder


def _refuse_without_parts(planned: Sequence[Planned], test_sets: Sequence[str]) -> None:
    """One sentence before anything is run, instead of one from every run."""
    lacking = [p for p in planned if not RunFolder(p.path).finished]
    for uri in sorted({p.config.data.uri for p in lacking}.union(test_sets if lacking else ())):
        refuse_missing_data(uri)
    variants = {p.variant: p.config for p in lacking}
    problems = [f"variants.{name}.{text}" for name, config in variants.items() for text in missing_parts(config)]
    if problems:
        raise ConfigError(problems)


def compare_runs(
    paths: Sequence[str | Path],
    *,
    out: str | Path | None = None,
    baseline: str | None = None,
    test_sets: Sequence[str] = (),
    seconds: float = 1.0,
    quiet: bool = False,
) -> tuple[Comparison, Path]:
    """Compare finished runs; those that differ in nothing but the seed are one row.

    `baseline` is a row's name or a run (none: the first). Writes `table.json` and `report.html` into `out` (none:
    runs/comparison, numbered). Raises `ValueError` for a run that has not finished.
    """
    if len(paths) < 2:
        raise ValueError("name at least two finished runs, or one study file")
    folders = [Path(p) for p in paths]
    for path in folders:
        if not RunFolder(path).finished:
            model_folder(path)  # says what is wrong with a folder that is no run, or a run that is not finished
            raise ValueError(f"{path} has no final figures; continue it with: vitrail train --resume {path}")
    names = _row_names(folders)
    chosen = next(iter(names.values()))
    if baseline is not None:
        chosen = names.get(Path(baseline), baseline)
        if chosen not in names.values():
            known = list(dict.fromkeys(names.values()))
            raise ValueError(f"baseline: {baseline!r} is none of {', '.join(known)}{near(baseline, known)}")
    folder = free_name(Path("runs") / "comparison") if out is None else Path(out)
    refuse_unwritable(folder)
    members = [read_member(path, name) for path, name in names.items()]
    members = _judged_elsewhere(members, test_sets, folder, quiet)
    prices, conditions, notes = _prices(members, seconds, quiet)
    lengths = {m.variant: f"{m.epochs:g} epochs" for m in members if m.epochs is not None}
    made = compare_members(
        "finished runs", members, chosen, prices=prices, lengths=lengths, conditions=conditions, notes=notes
    )
    _write(made, folder)
    return made, folder


def read_member(path: Path, variant: str) -> Member:
    """What a finished run folder knows."""
    run = RunFolder(path)
    config = _config(path)
    history = run.read_metrics()
    final = [line for line in history if line.get("final")][-1]
    figures = {k: float(v) for k, v in final.items() if isinstance(v, float) and k not in ("epoch", "step")}
    return Member(
        variant=variant,
        seed=config.seed,
        path=str(path),
        figures=figures,
        split=str(final["split"]),
        data=config.data.uri,
        classes=tuple(read_description(model_folder(path))["classes"]),
        history=history,
        predictions=read_predictions(path),
    )


def _config(path: Path) -> RunConfig:
    """As it was when the run was made: weights that it began from need not be there any more."""
    return build(RunConfig, {**load_yaml(path), "out": None})


def _row_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Run -> name of its row. Runs of one recipe with different seeds are one row."""
    groups: dict[tuple[str, int], list[Path]] = {}
    seen: dict[tuple[str, int], int] = {}
    for path in dict.fromkeys(paths):
        config = _config(path)
        recipe = run_hash(config, seed=False)
        again = seen.get((recipe, config.seed), 0)  # the same run twice makes a row of its own
        seen[recipe, config.seed] = again + 1
        groups.setdefault((recipe, again), []).append(path)
    made: dict[Path, str] = {}
    for group in groups.values():
        name = group[0].name
        if len(group) > 1:  # "tour-seed0" and "tour-seed1" are "tour"
            name = re.sub(r"[-_.]*(seed)?[-_.]*\d*$", "", name) or name
        if name in made.values():
            name = str(group[0])
        made |= dict.fromkeys(group, name)
    return made


def _judged_elsewhere(members: Sequence[Member], uris: Sequence[str], folder: Path, quiet: bool) -> list[Member]:
    """The same runs with their figure on further test sets; each is measured once and kept."""
    from dataclasses import replace

    kept_at = folder / "evaluations.json"
    kept: dict[str, dict[str, float]] = {}
    if uris and kept_at.is_file():
        kept = json.loads(kept_at.read_text(encoding="utf-8"))
    for uri in uris:
        if any(uri not in kept.get(member.path, {}) for member in members):
            refuse_missing_data(uri)
    made = []
    for member in members:
        found = {}
        for uri in uris:
            of_run = kept.setdefault(member.path, {})
            if uri not in of_run:
                if not quiet:
                    _say(f"{member.variant}, seed {member.seed}: judged on {uri}")
                scores = evaluate(member.path, uri)[0].scalars()
                of_run[uri] = scores["top1"] if "top1" in scores else scores["map"]
                write_text(kept_at, json.dumps(kept, indent=1))
            found[uri] = of_run[uri]
        made.append(replace(member, elsewhere=found))
    return made


def _prices(members: Sequence[Member], seconds: float, quiet: bool) -> tuple[dict[str, Price], str, list[str]]:
    """Cost of each variant; all of them take turns, so that a slow moment of the machine falls on all."""
    first = {m.variant: str(Path(m.path).resolve()) for m in reversed(members)}
    if seconds > 0:
        if not quiet:
            _say("measuring speed")
        try:
            found = bench(list(first.values()), compile=False, seconds=seconds)
        except (ValueError, RuntimeError) as error:
            return _counted(first), "", [f"speed could not be measured: {str(error).splitlines()[0]}"]
        rows = {row.model: row for row in found.rows}
        made = {
            name: Price(row.parameters, row.macs, row.image_size, row.timing.images_per_second, row.peak_memory)
            for name, path in first.items()
            if (row := rows.get(path)) is not None
        }
        batch = found.rows[0].batch
        noise = found.noise.reasons if found.noise is not None else ()
        conditions = f"inference, batch {batch}, {found.precision}, {found.device}, eager, in turns"
        said = [f"the machine was not quiet: {reason}" for reason in noise]
        for name, path in first.items():
            said = [text.replace(path, name) for text in said]
        return made, conditions, said
    return _counted(first), "", []


def _counted(paths: Mapping[str, str]) -> dict[str, Price]:
    made = {}
    for name, path in paths.items():
        model = load(path)
        if reads_texts(model):  # what one costs depends on the length of the text
            continue
        counted = cost(model)
        made[name] = Price(counted.parameters, counted.macs, counted.image_size)
    return made


def _link(planned: Sequence[Planned], folder: Path) -> None:
    """Names a person knows for folders that are named by what they hold."""
    place = folder / "runs"
    place.mkdir(parents=True, exist_ok=True)
    for one in planned:
        link, target = place / one.name, Path(os.path.relpath(one.path, place))
        try:
            if link.is_symlink():
                if link.readlink() == target:
                    continue
                link.unlink()
            link.symlink_to(target)
        except OSError:  # a system or file system without links: `table.json` names the folders, too
            return


def _write(made: Comparison, folder: Path) -> None:
    found: dict[str, Any] = {**made.to_json(), "environment": environment()}
    write_text(folder / "table.json", json.dumps(found, indent=1, ensure_ascii=False))
    write_comparison(folder / "report.html", made, found["environment"])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
