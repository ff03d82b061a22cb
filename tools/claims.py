"""docs/results/README.md: every claim of the implemented papers beside what was measured here.

    python tools/claims.py                 write the page
    python tools/claims.py --check         exit code 1 where the page is not what the files say
    python tools/claims.py --add TABLE     add the rows of a study (its table.json) to rows.jsonl, then write the page

Two files say it. `docs/results/rows.jsonl` holds what was measured, one line a row: either of one seed,

    {"study": "without-labels", "row": "MSF, k = 2", "seed": 0, "metrics": {"20-NN": 87.8}}

or, where seeds were not kept apart, of all: `"seeds": 3, "metrics": {"top-1": 75}, "std": {"top-1": 0.4}`. Where the
page prints an interval in place of a spread (95 %, or quartiles of timed rounds), the row has that: `"interval":
{"top-1": [74.1, 75.9]}`, or half its width. Figures are as the page prints them. One line for each study says its
data, model, epochs (or length in words), hardware, date and page, and the minutes of its rows where they are known
(`tools/charts.py` draws them). `docs/results/claims.yaml` names claims and the rows that test them: `row` `above`
another (`by` so many points; negative: no further below) or `at_least` a level. The verdict is computed, never
written:

- **holds** or **does not**: the difference of means is beyond twice its standard error (over seeds; a row has
  at least the spread that is usual in its study), on the side of the claim or on the other;
- **open**: it is not, or the study is shorter than the length at which the claim was made (`epochs` of the claim), or
  a study or row was made with wrong settings (`"faulty": true`), or there is no row yet. What a short or faulty study
  gave is shown all the same, as a direction.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

NAMES = {"top1": "top-1", "knn": "20-NN", "knn200": "200-NN", "linear": "linear", "ece": "ECE", "map": "mAP"}
FOLDER = Path(__file__).parents[1] / "docs" / "results"
HEAD = """# What papers claim, and what was measured here

Made by `python tools/claims.py` from `claims.yaml` and `rows.jsonl`; the verdicts are computed. *Holds* and *does
not*: the difference is beyond twice its standard error over seeds. *Open*: it is not, or nothing is known of the
spread, or our runs are shorter than what the claim is about, or their settings were wrong (the direction that they
show is given in brackets; it speaks neither for nor against the paper), or nothing was run. Figures are top-1 in
percent unless said otherwise; ± is the standard deviation over seeds, brackets hold a 95 % interval or the quartiles
of timed rounds. CIFAR images here were stored as JPEG (39.8 dB).
"""


@dataclass(frozen=True)
class Measured:
    """A metric of one row over its seeds."""

    mean: float
    std: float | None  # none: of one seed
    seeds: int  # 0: not a matter of seeds
    interval: float | list[float] | None = None  # half its width, or its ends
    digits: int = 1

    def text(self, digits: int) -> str:
        spread = "" if self.std is None else f" ± {self.std:.{digits}f}"
        if isinstance(self.interval, list):
            spread = f" ({self.interval[0]:.{digits}f} to {self.interval[1]:.{digits}f})"
        elif self.interval is not None:
            spread = f" (± {self.interval:.{digits}f})"
        return f"{self.mean:.{digits}f}{spread}"

    def error(self, usual: float | None) -> float | None:
        """Of the mean; `usual` is the spread over seeds in its study, as its own may be too small by chance."""
        if self.interval is not None:
            ends = self.interval if isinstance(self.interval, list) else [0, 2 * self.interval]
            return (ends[1] - ends[0]) / 4
        known = [spread for spread in (self.std, usual) if spread is not None]
        return max(known) / math.sqrt(self.seeds) if known and self.seeds else None


class Rows:
    """All that was measured, by study and row."""

    def __init__(self, lines: list[Mapping[str, Any]]) -> None:
        self.studies: dict[str, Mapping[str, Any]] = {}
        self.rows: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
        for line in lines:
            if "row" in line:
                self.rows[line["study"], line["row"]].append(line)
            else:
                self.studies[line["study"]] = line

    def measured(self, study: str, row: str, metric: str) -> Measured:
        lines = self.rows[study, row]
        if not lines:
            raise ValueError(f"no row {row!r} of {study!r} in rows.jsonl")
        values, first = [line["metrics"][metric] for line in lines], lines[0]
        std, interval = first.get("std", {}).get(metric), first.get("interval", {}).get(metric)
        ends = interval if isinstance(interval, list) else [interval]
        digits = max(len(str(v).partition(".")[2]) for v in (*values, std, *ends) if v is not None)
        if "seed" not in first:
            return Measured(values[0], std, first.get("seeds", 0), interval, digits)
        spread = statistics.stdev(values) if values[1:] else None
        return Measured(statistics.mean(values), spread, len(values), digits=digits)

    def faulty(self, study: str, rows: list[str]) -> bool:
        """Whether a study, or one of some of its rows, was made with wrong settings."""
        return any(
            line.get("faulty") for line in (self.studies[study], *(x for row in rows for x in self.rows[study, row]))
        )

    def usual_spread(self, study: str, metric: str) -> float | None:
        """The root mean square of the standard deviations that are known in a study."""
        all_rows = [self.measured(s, row, metric) for s, row in self.rows if s == study and self._has(s, row, metric)]
        known = [(m.std, m.seeds) for m in all_rows if m.std is not None]
        if not known:
            return None
        return math.sqrt(sum(std**2 * (n - 1) for std, n in known) / sum(n - 1 for _, n in known))

    def _has(self, study: str, row: str, metric: str) -> bool:
        return all(metric in line["metrics"] for line in self.rows[study, row])


def verdict(difference: float, error: float | None) -> str:
    """Whether a difference that is claimed to be above zero is."""
    if error is None or abs(difference) <= 2 * error:
        return "open"
    return "holds" if difference > 0 else "does not"


def judged(claim: Mapping[str, Any], rows: Rows) -> tuple[str, str]:
    """(what was measured, verdict) of a claim."""
    if "study" not in claim:
        return "not run", "open"
    study, metric = claim["study"], claim["metric"]
    facts = rows.studies[study]
    names = [claim[key] for key in ("row", "above") if key in claim]
    found = [rows.measured(study, name, metric) for name in names]
    usual = rows.usual_spread(study, metric)
    level = found[1].mean + claim.get("by", 0) if "above" in claim else claim["at_least"]
    difference = (found[0].mean - level) * (-1 if claim.get("lower_is_better") else 1)
    errors = [one.error(usual) for one in found]
    known = None if None in errors else math.sqrt(sum(e**2 for e in errors if e is not None))
    seeds = sorted({one.seeds for one in found if one.seeds})
    length = f"{facts['epochs']:g} epochs" if "epochs" in facts else facts.get("length")
    counted = f"{' and '.join(map(str, seeds))} {'seed' if seeds == [1] else 'seeds'}" if seeds else None
    digits = max(one.digits for one in found)  # a last zero that is printed is lost in JSON
    text = f"{metric} {' against '.join(one.text(digits) for one in found)}; "
    text += ", ".join(part for part in (facts["data"], facts["model"], length, counted) if part)
    result = verdict(difference, known)
    if rows.faulty(study, names):
        return text, "open (settings were wrong)" if result == "open" else f"open (settings were wrong: {result})"
    if result != "open" and facts.get("epochs", math.inf) < claim.get("epochs", 0):
        return text, f"open (short runs: {result})"
    return text, result


def page(claims: list[Mapping[str, Any]], rows: Rows) -> str:
    """The whole page."""
    parts, count = [HEAD], Counter[str]()
    papers: dict[str, list[str]] = defaultdict(list)
    for claim in claims:
        text, result = judged(claim, rows)
        count[text if text == "not run" else result.partition(":")[0].rstrip(")")] += 1
        where = rows.studies[claim["study"]]["page"] if "study" in claim else claim.get("page", "")
        link = f"[{where.partition('#')[0]}]({where})" if where else ""
        note = f". {claim['note']}" if "note" in claim else ""
        papers[claim["paper"]].append(f"| {claim['claim']} | {claim['stated']} | {text}{note} | {result} | {link} |")
    reasons = {
        "open (settings were wrong": "for wrong settings",
        "open (short runs": "for short runs",
        "open": "for lack of a clear difference",
        "not run": "not run",
    }
    why = ", ".join(f"{count[key]} {words}" for key, words in reasons.items())
    holds = f"{count['holds']} {'holds' if count['holds'] == 1 else 'hold'}"
    fails = f"{count['does not']} {'does' if count['does not'] == 1 else 'do'} not"
    parts.append(f"{len(claims)} claims: {holds}, {fails}, {sum(map(count.__getitem__, reasons))} are open\n({why}).\n")
    for paper, lines in papers.items():
        parts += [f"## {paper}\n", "| claim | stated | here | verdict | page |", "|---|---|---|---|---|", *lines, ""]
    return "\n".join(parts)


def rows_of(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Lines of rows.jsonl from the table.json of `vitrail compare`: one for each run, in percent."""
    return [
        {
            **{"study": table["name"], "row": row["variant"], "seed": run["seed"]},
            "metrics": {NAMES[k]: round(100 * v, 2) for k, v in run["metrics"].items() if k in NAMES and v is not None},
        }
        for row in table["rows"]
        for run in row["runs"]
    ]


def main() -> int:
    if "--add" in sys.argv:
        path = FOLDER / "rows.jsonl"
        new = rows_of(json.loads(Path(sys.argv[sys.argv.index("--add") + 1]).read_text()))
        taken = {(line["study"], line["row"], line["seed"]) for line in new}
        old = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [line for line in old if (line["study"], line.get("row"), line.get("seed")) not in taken]
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (*kept, *new)))
    rows = Rows([json.loads(line) for line in (FOLDER / "rows.jsonl").read_text().splitlines()])
    text = page(yaml.safe_load((FOLDER / "claims.yaml").read_text()), rows)
    path = FOLDER / "README.md"
    if "--check" in sys.argv:
        return int(not path.is_file() or path.read_text() != text)
    path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
