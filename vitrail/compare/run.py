"""Train the missing runs of a study, compare finished runs, write the report."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.bench.run import bench
from vitrail.compare.budgets import lengths_of
from vitrail.compare.comparison import Comparison, Failure, Member, Price, compare_members
from vitrail.compare.jobs import IdleWorkers, run_missing
from vitrail.compare.page import write_comparison
from vitrail.compare.study import STUDIES, Planned, Study, plan, read_study, run_hash, stands_on, write_study
from vitrail.compare.tuning import SettingsGrid, merged
from vitrail.config import RunConfig, load_yaml
from vitrail.engine.run_folder import RunFolder, environment, free_name
from vitrail.files import FORMAT_VERSION, json_text, parse_json, reject_unwritable, write_text
from vitrail.measure.evaluator import read_predictions
from vitrail.model.cost import cost
from vitrail.model.store import model_folder, read_description
from vitrail.run.data_module import reads_texts
from vitrail.run.evaluate import evaluate, load
from vitrail.run.launch import Cluster, Launcher
from vitrail.run.preflight import missing_parts, reject_missing_data
from vitrail.run.protocols import evaluate_protocols
from vitrail.schema import ConfigError, build, near

BUDGETS = {
    "epochs": "equal epochs",
    "time": "equal training time, from a short probe of each variant's images/s",
    "macs": "equal multiply-accumulates of training (a step counts as three forward passes)",
    "none": "no rule: each variant trains as long as it says",
}


def compare_study(
    study: Study | str | Path,
    *,
    root: str | Path = STUDIES,
    jobs: int | Launcher | None = None,
    devices: Sequence[str] | None = None,
    cluster: Cluster | None = None,
    seconds: float = 1.0,
    minutes: float | None = None,
    quiet: bool = False,
    idle: IdleWorkers | None = None,
) -> tuple[Comparison, Path]:
    """Run what is missing of a study, then compare; returns the comparison and the study's folder.

    Finished runs are never repeated, whichever study made them. `jobs` runs are trained at a time, spread over
    `devices` (none: all that CUDA shows); after `minutes` they save and stop, as on Ctrl-C. `jobs="slurm"` makes each
    run a job that asks for `cluster`, and waits for them. Speed is measured for about `seconds` per variant when all
    runs are done (0: not at all). Workers of `idle` train any variant, and are left there. Raises `ConfigError` for an
    invalid study, `vitrail.compare.jobs.StudyStopped` when interrupted.
    """
    if not isinstance(study, Study):
        study = read_study(study)
    root = Path(root)
    folder = root / study.name
    reject_unwritable(folder)
    given = study
    if study.tune.grid:
        write_study(given, folder)  # which can be resumed by its folder while settings are chosen
    end = time.monotonic() + 60 * (math.inf if minutes is None else minutes)
    study, choices = _tuned(study, end, root=root, jobs=jobs, devices=devices, cluster=cluster, quiet=quiet)
    lengths, reasons = lengths_of(study, root, **({} if quiet else {"report": _report}))
    planned = plan(study, lengths, root)
    _check_parts(planned, study.test_sets)
    write_study(given, folder)
    _link(planned, folder)
    left: dict[str, Any] = {"minutes": (end - time.monotonic()) / 60, "quiet": quiet}
    if isinstance(jobs, str):
        from vitrail.compare.cluster_jobs import run_on_cluster

        failed = run_on_cluster(planned, folder, jobs, cluster or Cluster(), **left)
    else:
        failed = run_missing(planned, folder, jobs=jobs, devices=devices, idle=idle, **left)
    planned = [p for p in planned if p.variant in study.variants]
    done = [p for p in planned if p.path not in failed]
    if not done:
        raise ValueError(f"no run of {study.name} could be finished: {next(iter(failed.values()))}")
    return _compare(
        study.name,
        [read_member(p.path, p.variant) for p in done],
        study.baseline,
        folder,
        test_sets=study.test_sets,
        protocols=study.evaluate,
        seconds=seconds,
        quiet=quiet,
        failures=[Failure(p.variant, p.seed, failed[p.path]) for p in planned if p.path in failed],
        lengths=reasons,
        order=tuple(study.variants),
        budget=BUDGETS[study.budget],
        choices=choices,
    )


def _tuned(study: Study, end: float, **options: Any) -> tuple[Study, list[str]]:
    """The study with the settings that do best on val, and a sentence on each choice."""
    tuning, left, sentences = study.tune, dict(study.tune.grid), []
    changes: dict[str, Any] = {"budget": "none", "baseline": "", "test_sets": (), "folds": 0, "tune": SettingsGrid()}
    changes |= {"seeds": study.seeds[:1], "evaluate": dict.fromkeys(tuning.evaluate)}
    study, number = replace(study, tune=SettingsGrid()), 0
    while left:
        number += 1
        runs = {**study.first, **study.variants}
        needs = {n: stands_on(study, n) for n, grid in left.items() if not isinstance(grid, str)}
        ready = [n for n in needs if not left.keys() & needs[n]]
        if not ready:
            raise ValueError(f"tune.grid: {', '.join(left)} stand on runs that wait for their choice; tune fewer")
        changes |= {"name": f"{study.name}-tuning" + (f"-{number}" if number > 1 else "")}
        changes |= {"variants": tuning.trials({name: runs[name] for name in ready})}
        changes |= {"first": {name: runs[name] for name in runs if any(name in needs[n] for n in ready)}}
        options["minutes"] = (end - time.monotonic()) / 60
        comparison, _ = compare_study(replace(study, **changes), seconds=0, **options)
        scores = {m.variant: m.metrics[tuning.by] for r in comparison.rows for m in r.members if tuning.by in m.metrics}
        for name in ready:
            candidates = tuning.candidates(name)
            tried = {candidate: scores[candidate] for candidate in candidates if candidate in scores}
            if not tried:
                reasons = [f.reason for f in comparison.failures if f.variant in candidates]
                raise ValueError(": ".join([f"tune.grid.{name}: no run has {tuning.by!r} on val", *reasons[:1]]))
            best = max(tried, key=lambda candidate: tried[candidate])
            sentences.append(f"{best} chosen from {len(candidates)} by {tuning.by} on val ({tried[best]:.4f})")
            for run in (name, *(n for n, like in tuning.grid.items() if like == name)):
                runs[run] = merged(runs[run], candidates[best])
                del left[run]
        study = replace(study, first={n: runs[n] for n in study.first}, variants={n: runs[n] for n in study.variants})
    return study, sentences


def part_of(study: Study, only: Sequence[str] = (), seeds: Sequence[int] = ()) -> Study:
    """Some variants of a study (none named: all), with some seeds (its own, or further ones), and the runs that they
    stand on. Raises `ConfigError` for names that are none, and where settings depend on a variant that is left out."""
    names, grid = list(dict.fromkeys(only or study.variants)), study.tune.grid
    known = ", ".join(study.variants)
    problems = [
        f"only: {n!r} is none of the variants ({known}){near(n, study.variants)}"
        for n in names
        if n not in study.variants
    ]
    if problems:
        raise ConfigError(problems)
    below = set[str]().union(*(stands_on(study, name) for name in names)).difference(names)
    chosen = {name: of for name, of in grid.items() if name in below or name in names}
    copies = [(n, of) for n, of in chosen.items() if isinstance(of, str) and of not in chosen]
    problems = [f"only: {name} takes the settings that are chosen for {of}; name that, too" for name, of in copies]
    if study.budget in ("time", "macs") and study.baseline not in names:
        problems.append(f"only: lengths follow from the cost of the baseline, {study.baseline}; name it, too")
    if problems:
        raise ConfigError(problems)
    runs = {**study.first, **study.variants}
    label = "-".join([study.name, *only, *(f"seed{seed}" for seed in seeds)])
    return replace(
        study,
        name=re.sub(r"[^\w.+=-]", "_", label)[:100],
        variants={name: settings for name, settings in study.variants.items() if name in names},
        first={name: settings for name, settings in runs.items() if name in below},
        seeds=tuple(seeds) or study.seeds,
        baseline=study.baseline if study.baseline in names else "",
        tune=replace(study.tune, grid=chosen),
    )


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
            raise ValueError(f"{path} has no final metrics; continue it with: vitrail train --resume {path}")
    names = _row_names(folders)
    chosen = next(iter(names.values()))
    if baseline is not None:
        chosen = names.get(Path(baseline), baseline)
        if chosen not in names.values():
            known = list(dict.fromkeys(names.values()))
            raise ValueError(f"baseline: {baseline!r} is none of {', '.join(known)}{near(baseline, known)}")
    folder = free_name(Path("runs") / "comparison") if out is None else Path(out)
    reject_unwritable(folder)
    members = [read_member(path, name) for path, name in names.items()]
    lengths = {m.variant: f"{m.epochs:g} epochs" for m in members if m.epochs is not None}
    return _compare(
        "finished runs", members, chosen, folder, test_sets=test_sets, seconds=seconds, quiet=quiet, lengths=lengths
    )


def _compare(
    name: str,
    members: Sequence[Member],
    baseline: str,
    folder: Path,
    *,
    test_sets: Sequence[str],
    seconds: float,
    quiet: bool,
    protocols: Mapping[str, str | None] | None = None,
    choices: Sequence[str] = (),
    **options: Any,
) -> tuple[Comparison, Path]:
    """Evaluate on further test sets, measure cost, compare, write `table.json` and `report.html`."""
    members = _with_test_sets(members, test_sets, folder, quiet)
    members = _with_protocols(members, protocols or {}, folder, quiet)
    prices, conditions, notes = _prices(members, seconds, quiet)
    options |= {"prices": prices, "conditions": conditions, "notes": [*choices, *notes]}
    comparison = compare_members(name, members, baseline, **options)
    table = {"format_version": FORMAT_VERSION, **comparison.to_json(), "environment": environment()}
    write_text(folder / "table.json", json_text(table, indent=1))
    write_comparison(folder / "report.html", comparison, table["environment"])
    return comparison, folder


def read_member(path: Path, variant: str) -> Member:
    """A finished run, from its folder."""
    run = RunFolder(path)
    config = _config(path)
    history = run.read_metrics()
    final = [line for line in history if line.get("final")][-1]
    return Member(
        variant=variant,
        seed=config.seed,
        path=str(path),
        metrics={k: float(v) for k, v in final.items() if isinstance(v, float) and k not in ("epoch", "step")},
        split=str(final["split"]),
        data=config.data.uri,
        fold=config.data.fold,
        classes=tuple(read_description(model_folder(path))["classes"]),
        history=history,
        predictions=read_predictions(path),
    )


def _config(path: Path) -> RunConfig:
    """As it was when the run was trained: weights that it began from need not be there any more."""
    return build(RunConfig, {**load_yaml(path), "out": None})


def _check_parts(planned: Sequence[Planned], test_sets: Sequence[str]) -> None:
    """One sentence before anything is run, instead of one from every run."""
    missing = [p for p in planned if not RunFolder(p.path).finished]
    for uri in sorted({p.config.data.uri for p in missing}.union(test_sets if missing else ())):
        reject_missing_data(uri)
    variants = {p.variant: p.config for p in missing}
    made = {p.path for p in planned}
    problems = [f"variants.{name}.{text}" for name, config in variants.items() for text in missing_parts(config, made)]
    if problems:
        raise ConfigError(problems)


def _row_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Run -> name of its row. Runs of one recipe with different seeds are one row."""
    groups: dict[tuple[str, int], list[Path]] = {}
    seen: dict[tuple[str, int], int] = {}
    for path in dict.fromkeys(paths):
        config = _config(path)
        recipe = run_hash(config, seed=False)
        repeat = seen.get((recipe, config.seed), 0)  # the same run twice makes a row of its own
        seen[recipe, config.seed] = repeat + 1
        groups.setdefault((recipe, repeat), []).append(path)
    names: dict[Path, str] = {}
    for group in groups.values():
        name = group[0].name
        if len(group) > 1:  # "tour-seed0" and "tour-seed1" are "tour"
            name = re.sub(r"[-_.]*(seed)?[-_.]*\d*$", "", name) or name
        if name in names.values():
            name = str(group[0])
        names |= dict.fromkeys(group, name)
    return names


def _with_test_sets(members: Sequence[Member], uris: Sequence[str], folder: Path, quiet: bool) -> list[Member]:
    """The same runs with their metric on further test sets; each is evaluated once and kept."""
    path = folder / "evaluations.json"
    kept: dict[str, dict[str, float]] = {}
    if uris and path.is_file():
        kept = parse_json(path.read_text(encoding="utf-8"))
    for uri in uris:
        if any(uri not in kept.get(member.path, {}) for member in members):
            reject_missing_data(uri)
    for member in members if uris else ():
        of_run = kept.setdefault(member.path, {})
        for uri in uris:
            if uri not in of_run:
                if not quiet:
                    _report(f"{member.variant}, seed {member.seed}: evaluated on {uri}")
                scores = evaluate(member.path, uri)[0].scalars()
                of_run[uri] = scores["top1"] if "top1" in scores else scores["map"]
                write_text(path, json.dumps(kept, indent=1))
    return [replace(member, elsewhere={uri: kept[member.path][uri] for uri in uris}) for member in members]


def _with_protocols(
    members: Sequence[Member], protocols: Mapping[str, str | None], folder: Path, quiet: bool
) -> list[Member]:
    """The same runs with the metrics of further protocols among their own; each is evaluated once and kept."""
    path = folder / "protocols.json"
    kept: dict[str, dict[str, dict[str, float]]] = {}
    if protocols and path.is_file():
        kept = parse_json(path.read_text(encoding="utf-8"))
    evaluated = []
    for member in members:
        of_run, metrics = kept.setdefault(member.path, {}), dict(member.metrics)
        for name, uri in protocols.items():
            key = name if uri is None else f"{name} on {uri}"
            if key not in of_run:
                if not quiet:
                    _report(f"{member.variant}, seed {member.seed}: evaluated by {key}")
                own = {"data": uri, "split": None} if uri else {"data": member.data, "split": member.split}
                findings, _ = evaluate_protocols(member.path, protocols=[name], **own)
                of_run[key] = {k: float(v) for k, v in findings[name]["numbers"].items()}
                write_text(path, json.dumps(kept, indent=1))
            suffix = "" if uri is None else f" on {uri}"
            metrics |= {f"{number}{suffix}": value for number, value in of_run[key].items()}
        evaluated.append(replace(member, metrics=metrics))
    return evaluated


def _prices(members: Sequence[Member], seconds: float, quiet: bool) -> tuple[dict[str, Price], str, list[str]]:
    """Cost of each variant, conditions and notes; all take turns, so that a slow moment of the machine affects all."""
    first = {m.variant: str(Path(m.path).resolve()) for m in reversed(members)}
    if seconds <= 0:
        return _counted(first), "", []
    if not quiet:
        _report("measuring speed")
    try:
        result = bench(list(first.values()), compile=False, seconds=seconds)
    except (ValueError, RuntimeError) as error:
        return _counted(first), "", [f"speed could not be measured: {str(error).splitlines()[0]}"]
    rows = {row.model: row for row in result.rows}
    off = max(abs(result.noise.control or 0.0), abs(result.noise.drift)) if result.noise else 0.0
    prices = {}
    for name, path in first.items():
        if (row := rows.get(path)) is not None:
            speed = row.timing.images_per_second, row.peak_memory, max(off, row.timing.spread)
            prices[name] = Price(row.parameters, row.macs, row.image_size, *speed)
    conditions = f"inference, batch {result.rows[0].batch}, {result.precision}, {result.device}, eager, in turns"
    notes = [f"the machine was not quiet: {reason}" for reason in (result.noise.reasons if result.noise else ())]
    for name, path in first.items():
        notes = [note.replace(path, name) for note in notes]
    return prices, conditions, notes


def _counted(paths: Mapping[str, str]) -> dict[str, Price]:
    prices = {}
    for name, path in paths.items():
        model = load(path)
        if not reads_texts(model):  # their cost depends on the length of the text
            value = cost(model)
            prices[name] = Price(value.parameters, value.macs, value.image_size)
    return prices


def _link(planned: Sequence[Planned], folder: Path) -> None:
    """Readable names for folders that are named by hashes."""
    links = folder / "runs"
    links.mkdir(parents=True, exist_ok=True)
    for job in planned:
        link, target = links / job.name, Path(os.path.relpath(job.path, links))
        try:
            if link.is_symlink():
                if link.readlink() == target:
                    continue
                link.unlink()
            link.symlink_to(target)
        except OSError:  # a system or file system without links: `table.json` names the folders, too
            return


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
