"""`vitrail fit` compared with an exhaustive grid of the same parts: accuracy, and training seconds of both.

    python benchmarks/fit_grid.py FIT_FOLDER --data DATA [--seconds N] [--jobs 4] [--json]

Every candidate that meets the budget, also of those that the search did not measure, is trained in every form (plain,
distilled from the search's teacher, with attention pooling) for as long as the last rung of the search trained its
winner, by the same rule for epochs and with one seed.
The runs are a study, FIT_FOLDER/studies/grid: the same command goes on where it was, and runs that the search itself
made are not repeated, but their seconds count for both. The best on val is exported into FIT_FOLDER/grid and evaluated
on test, and so is the file of the search, to compare both image by image; nothing is chosen by that. Differences are of
the search minus the grid, with a 95 % interval over the images of test: it says nothing of training again. Seconds are
of training steps, teachers included, without evaluation and without measuring speeds; runs that share an accelerator
(--jobs) take more of them, so that `planned`, their number times the length asked for, is printed as well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vitrail.compare.run import read_member
from vitrail.compare.statistics import paired_interval
from vitrail.compare.study import read_study
from vitrail.engine.run_folder import RunFolder
from vitrail.files import json_text, parse_json, write_text
from vitrail.fit.candidates import Measured
from vitrail.fit.finished_file import FILE, correct, deployed
from vitrail.fit.limits import Budget
from vitrail.fit.pictures import Pictures
from vitrail.fit.run import STATE, measure_all, trainable
from vitrail.fit.search import TAUGHT, Form, Search, Trial
from vitrail.recipes import with_values
from vitrail.run.evaluate import load
from vitrail.run.run_data import open_run


@dataclass(frozen=True)
class FinishedFit:
    """What a search left in its folder."""

    folder: Path
    state: dict[str, Any]  # of fit.json
    result: dict[str, Any]  # of result.json

    @property
    def budget(self) -> Budget:
        return Budget(**self.state["options"]["budget"])

    @property
    def chosen(self) -> Measured:
        return Measured.from_json(self.result["chosen"]["cost"])

    @property
    def feasible(self) -> list[Measured]:
        """Candidates that met the budget."""
        costs = [Measured.from_json(values) for values in self.state["measured"]]
        return [m for m in costs if m.meets(self.budget)]

    @property
    def file(self) -> Path:
        return self.folder / ("model" if self.budget.on == "cuda" else FILE)

    @property
    def seconds_of_the_winner(self) -> float:
        """For which the last rung trained its winner, as it was planned."""
        lengths = [key.rpartition(" ") for key in self.state["epochs"]]
        return max(float(seconds) for name, _, seconds in lengths if name == self.chosen.candidate.name)

    def training_seconds(self, studies: str) -> float:
        """Of all finished runs of the studies of this name (a pattern), each once."""
        runs = {run.resolve() for run in (self.folder / "studies").glob(f"{studies}/runs/*")}
        return sum(read_member(run, "").seconds or 0.0 for run in runs if RunFolder(run).finished)


def read_fit(folder: str | Path) -> FinishedFit:
    """The search of a folder. Raises `FileNotFoundError` where it did not finish."""
    paths = [Path(folder) / name for name in (STATE, "result.json")]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"no {path}: name the folder of a finished search (vitrail fit DATA --out FOLDER)")
    state, result = (parse_json(path.read_text(encoding="utf-8")) for path in paths)
    return FinishedFit(Path(folder), state, result)


def difference(ours: list[bool], others: list[bool]) -> dict[str, Any]:
    """Mean of the images that ours has right minus those of the others, and its interval, in points.

    >>> difference([True, True], [True, False])["points"]
    50.0
    """
    gap = np.array(ours, dtype=np.int64) - np.array(others, dtype=np.int64)
    return {"points": 100 * float(gap.mean()), "interval": [100 * end for end in paired_interval(gap[None])]}


def correct_of_fit(fit: FinishedFit, data: str) -> list[bool]:
    """Whether the search's file is right, for every image of the split that it was evaluated on."""
    model = load(fit.result["chosen"]["path"])
    return correct(fit.file, model, open_run(_base(fit, data).data), fit.result["split"], fit.budget)


def row_of_fit(fit: FinishedFit, correct: list[bool]) -> dict[str, Any]:
    """The search as a row of the table."""
    chosen = fit.result["chosen"]
    row = {"method": "vitrail fit", "chosen": chosen["name"], "val": chosen["value"], "test": float(np.mean(correct))}
    return {**row, "images": len(correct), "seconds": fit.training_seconds("rung-*"), "trained": len(_trained(fit))}


def _trained(fit: FinishedFit) -> set[str]:
    return {trial["name"] for trial in fit.result["trials"]}


def _base(fit: FinishedFit, data: str) -> Any:
    return with_values(read_study(fit.folder / "studies" / "rung-2").base, {"data.uri": data})


def print_rows(rows: list[dict[str, Any]], gap: dict[str, Any], split: str, notes: list[str]) -> None:
    """The table: accuracy, seconds, the difference of the first row from the second."""
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(("", "chosen", "models", "val %", f"{split} %", "training s")):
        table.add_column(name, justify="right" if number > 1 else "left", no_wrap=number > 1)
    for row in rows:
        shares = (f"{100 * row[key]:.2f}" for key in ("val", "test"))
        table.add_row(row["method"], row["chosen"], str(row["trained"]), *shares, f"{row['seconds']:.0f}")
    Console(width=120).print(table)
    low, high = gap["interval"]
    print(f"difference on {split}: {gap['points']:+.2f} points (95 % interval {low:+.2f} to {high:+.2f})")
    print(f"training seconds: {rows[0]['seconds']:.0f} and {rows[1]['seconds']:.0f}, ratio {gap['ratio']:.3f}")
    for note in notes:
        print(note)


class Grid:
    """All forms of all candidates that met the budget of a search."""

    def __init__(self, fit: FinishedFit, data: str) -> None:
        self.fit, self.out = fit, fit.folder / "grid"
        self.base = _base(fit, data)
        self.data = open_run(self.base.data)
        self.pictures = Pictures(self.data["train"], [self.base.data.augment])
        seconds, passes = 60 * fit.state["options"]["minutes"], fit.state.get("passes", {})
        published = self.base.recipe == "finetune"
        self.candidates, _, teacher_at = trainable(
            self.data, self.pictures.side, seconds, passes, published, lambda _: None
        )
        self.teacher = teacher_at(max(m.candidate.size for m in fit.feasible))
        self.out.mkdir(parents=True, exist_ok=True)
        self.path = self.out / "grid.json"
        self.state: dict[str, Any] = {name: fit.state[name] for name in ("measured", "speeds", "epochs")}
        if self.path.is_file():
            self.state = parse_json(self.path.read_text(encoding="utf-8"))

    def keep(self) -> None:
        write_text(self.path, json_text(self.state, indent=1))

    def forms(self, say: Callable[[str], None]) -> list[Form]:
        """Attention pooling counts as dear as the plain form, and trains as fast; its file is measured if it wins."""
        budget, forms = self.fit.budget, []
        where = self.data, budget, self.pictures, self.out, self.state, self.keep, say
        for measured in measure_all(self.candidates, None, *where):
            if not measured.meets(budget):
                continue
            forms.append(Form(measured))
            candidate = measured.candidate
            if self.teacher is not None and candidate.model != self.teacher.model:
                forms.append(Form(measured, TAUGHT))
            if not candidate.settings:
                pooled = replace(candidate, settings={"head": {"kind": "attention_pool"}})
                forms.append(Form(replace(measured, candidate=pooled)))
        return forms

    def run(self, seconds: float, jobs: int | None, quiet: bool) -> dict[str, Any]:
        """Train, export the best on val, compare with the search."""

        def say(text: str) -> None:
            if not quiet:
                print(text, flush=True)

        options, forms = self.fit.state["options"], self.forms(say)
        lengths = len(self.data["train"]), len(self.data["val"]), 60 * options["minutes"]
        where = self.fit.folder / "studies", options["metric"], self.state, self.keep
        search = Search(self.base, *lengths, *where, say, quiet)
        try:
            for candidate in (form.measured.candidate for form in forms):
                if candidate.settings.get("head"):  # as fast as the plain form
                    speed = search._speed(replace(candidate, settings={}), seconds)
                    self.state["speeds"].setdefault(candidate.name, speed)
            trials = search.train("grid", 2, forms, seconds, self.teacher, jobs=jobs)
        finally:
            search.idle.end()
        ranked = sorted(trials, key=lambda trial: -trial.value)
        budget, split = self.fit.budget, self.fit.result["split"]
        best = deployed(ranked, search, self.fit.feasible, self.data, budget, self.pictures, self.out, search.say)
        model = load(best.chosen.path)
        theirs = correct(best.file, model, self.data, split, budget)
        ours = correct_of_fit(self.fit, self.base.data.uri)
        grid = {"method": "grid", "chosen": best.chosen.form.name, "val": best.chosen.value}
        grid |= {"test": float(np.mean(theirs)), "images": len(theirs), "trained": len(trials)}
        grid |= {"planned": seconds * (1 + len(trials))}
        rows = [row_of_fit(self.fit, ours), {**grid, "seconds": self.fit.training_seconds("grid")}]
        gap = {**difference(ours, theirs), "ratio": rows[0]["seconds"] / max(rows[1]["seconds"], 1e-9)}
        gap["val_points"] = 100 * (rows[0]["val"] - rows[1]["val"])
        return {"split": split, "seconds_each": seconds, "rows": rows, "difference": gap, "trials": _listed(ranked)}


def _listed(trials: list[Trial]) -> list[dict[str, Any]]:
    return [{"name": t.form.name, "val": t.value, "epochs": t.epochs, "seconds": t.seconds} for t in trials]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fit", metavar="FIT_FOLDER")
    parser.add_argument("--data", required=True, help="as the search was given it")
    parser.add_argument("--seconds", type=float, help="of each training (none: as the search trained its winner)")
    parser.add_argument("--jobs", type=int, help="trainings at a time (none: one per accelerator)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    fit = read_fit(options.fit)
    seconds = fit.seconds_of_the_winner if options.seconds is None else options.seconds
    result = Grid(fit, options.data).run(seconds, options.jobs, options.json)
    if options.json:
        print(json.dumps(result))
        return
    print(f"planned for the grid: {result['rows'][1]['planned']:.0f} s")
    notes = [f"{t['name']}: val {100 * t['val']:.2f} %, {t['epochs']:g} epochs" for t in result["trials"][:5]]
    print_rows(result["rows"], result["difference"], result["split"], ["the best on val:", *notes])


if __name__ == "__main__":
    main()
