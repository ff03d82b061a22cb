"""docs/results/README.md: every claim of the implemented papers beside what was measured here.

    python tools/claims.py                 write the page
    python tools/claims.py --check         exit code 1 where the page is not what the files say
    python tools/claims.py --add TABLE     add the rows of a study (its table.json) to rows.jsonl, then write the page

Two files say it. `docs/results/rows.jsonl` holds what was measured, one line a row: either of one seed,

    {"study": "without-labels", "row": "MSF, k = 2", "seed": 0, "metrics": {"20-NN": 87.8}}

or, where seeds were not kept apart, of all: `"seeds": 3, "metrics": {"top-1": 75}, "std": {"top-1": 0.4}`. One line
for each study says its data, model, epochs, hardware, date and page. `docs/results/claims.yaml` names claims and the
rows that test them. The verdict is computed, never written:

- **holds** or **does not**: the difference of means is beyond twice its standard error (over seeds; a row has
  at least the spread that is usual in its study), on the side of the claim or on the other;
- **open**: it is not, or the study is shorter than the length at which the claim was made (`epochs` of the claim), or
  there is no row yet. What a short study gave is shown all the same, as a direction.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

NAMES = {"top1": "top-1", "knn": "20-NN", "knn200": "200-NN", "linear": "linear", "ece": "ECE", "map": "mAP"}
FOLDER = Path(__file__).parents[1] / "docs" / "results"
HEAD = """# What papers claim, and what was measured here

Made by `python tools/claims.py` from `claims.yaml` and `rows.jsonl`; the verdicts are computed. *Holds* and *does
not*: the difference is beyond twice its standard error over seeds. *Open*: it is not, or our runs are shorter than
what the claim is about (the direction that they show is given), or nothing was run. Figures are percent unless said
otherwise; ± is the standard deviation over seeds. CIFAR images here were stored as JPEG (39.8 dB).
"""


@dataclass(frozen=True)
class Measured:
    """A metric of one row over its seeds."""

    mean: float
    std: float | None  # none: of one seed
    seeds: int

    @property
    def text(self) -> str:
        spread = "" if self.std is None else f" ± {self.std:.1f}"
        return f"{self.mean:.1f}{spread}"


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
        values = [float(line["metrics"][metric]) for line in lines]
        if "seeds" in lines[0]:
            spread = lines[0].get("std", {}).get(metric)
            return Measured(values[0], None if spread is None else float(spread), int(lines[0]["seeds"]))
        return Measured(statistics.mean(values), statistics.stdev(values) if values[1:] else None, len(values))

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
    row = rows.measured(study, claim["row"], metric)
    usual = rows.usual_spread(study, metric)

    def error(of: Measured) -> float | None:
        known = [spread for spread in (of.std, usual) if spread is not None]  # of few seeds, its own may be too small
        return max(known) / math.sqrt(of.seeds) if known else None

    if "above" in claim:
        other = rows.measured(study, claim["above"], metric)
        text, difference = f"{row.text} against {other.text}", row.mean - other.mean - float(claim.get("by", 0))
        errors = [error(row), error(other)]
    else:  # a level that is to be reached
        text, difference, errors = row.text, row.mean - float(claim["at_least"]), [error(row)]
    if claim.get("lower_is_better"):
        difference = -difference
    known = None if None in errors else math.sqrt(sum(e**2 for e in errors if e is not None))
    seeds = sorted({row.seeds, *([other.seeds] if "above" in claim else [])})
    length = f"{facts['epochs']:g} epochs" if "epochs" in facts else str(facts.get("length", ""))
    noun = "seed" if seeds == [1] else "seeds"
    text = f"{metric} {text}; {facts['data']}, {facts['model']}, {length}, {' and '.join(map(str, seeds))} {noun}"
    result = verdict(difference, known)
    if result != "open" and facts.get("epochs", math.inf) < claim.get("epochs", 0):
        return text, f"open (short runs: {result})"
    return text, result


def page(claims: list[Mapping[str, Any]], rows: Rows) -> str:
    """The whole page."""
    parts, count = [HEAD], defaultdict(int)
    papers: dict[str, list[str]] = defaultdict(list)
    for claim in claims:
        text, result = judged(claim, rows)
        count[result.partition(" (")[0]] += 1
        where = rows.studies[claim["study"]]["page"] if "study" in claim else claim.get("page", "")
        link = f"[{where.partition('#')[0]}]({where})" if where else ""
        note = f". {claim['note']}" if "note" in claim else ""
        papers[claim["paper"]].append(f"| {claim['claim']} | {claim['stated']} | {text}{note} | {result} | {link} |")
    total = ", ".join(f"{count[name]} {name}" for name in ("holds", "does not", "open"))
    parts.append(f"{len(claims)} claims: {total}.\n")
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
