"""What finished studies found, as Markdown for docs/results: top-1 over seeds, the difference, the cost.

    python studies/tables.py runs/studies/NAME [...] [--also knn map ...] [--together]

`--also` adds columns of other figures, mean over seeds; `--together` takes the folders for seeds of one study.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MINUS = "\u2212"


def millions(value: float) -> str:
    return f"{value / 1e6:.2f} M" if value < 1e7 else f"{value / 1e6:.0f} M"


def points(against: Mapping[str, Any] | None) -> str:
    """Difference in points with its interval; bold where that leaves out zero."""
    if against is None:
        return ""
    low, high = (100 * v for v in against["interval"])
    said = f"{100 * against['difference']:+.1f} ({low:+.1f} to {high:+.1f})".replace("-", MINUS)
    return f"**{said}**" if against["clear"] else said


def markdown(made: Mapping[str, Any], also: Sequence[str] = ()) -> str:
    heads = ["variant", f"top-1 on {made['split']}, %", f"points against {made['baseline']}", *also]
    lines = ["| " + " | ".join([*heads, "parameters", "MACs"]) + " |", "|---" * (len(heads) + 2) + "|"]
    for row in made["rows"]:
        top = row["top1"]
        if top is None:  # every run failed
            lines.append(f"| {row['variant']} | failed |" + " |" * len(heads))
            continue
        said = f"{100 * top['mean']:.2f}" + (f" ± {100 * top['std']:.2f}" if top["count"] > 1 else "")
        more = [f"{row['means'][name]:.4g}" if name in row["means"] else "" for name in also]
        cells = [row["variant"], said, points(row["against"]), *more]
        cells += [millions(row["price"][key]) for key in ("parameters", "macs")]
        lines.append("| " + " | ".join(cells) + " |")
    first = made["rows"][0]
    where = made["environment"]
    seeds = sorted({row["top1"]["count"] for row in made["rows"] if row["top1"]})
    told = f"{' or '.join(map(str, seeds))} seed{'s' if seeds != [1] else ''}, {first['length']}"
    lines += ["", f"{told}; {where.get('accelerator') or 'CPU'}, PyTorch {where['torch'].partition('+')[0]}"]
    return "\n".join(lines)


def together(many: Sequence[Mapping[str, Any]]) -> str:
    """Studies of one seed each, in one table: differences are paired by seed, and their spread is that over seeds."""
    baseline = many[0]["baseline"]
    by_seed = {
        row["variant"]: {
            run["seed"]: 100 * run["top1"]
            for made in many
            for r in made["rows"]
            if r["variant"] == row["variant"]
            for run in r["runs"]
        }
        for row in many[0]["rows"]
    }
    lines = [
        f"| variant | top-1 on {many[0]['split']}, % | points against {baseline}, by seed | seeds |",
        "|---|---|---|---|",
    ]
    for variant, found in by_seed.items():
        gains = [value - by_seed[baseline][seed] for seed, value in found.items() if seed in by_seed[baseline]]
        cells = [
            variant,
            over(found.values(), ".2f"),
            "" if variant == baseline else over(gains, "+.1f"),
            str(len(found)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def over(values: Iterable[float], form: str) -> str:
    """Mean and, of several, standard deviation."""
    found = list(values)
    spread = f" ± {statistics.stdev(found):{form.removeprefix('+')}}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):{form}}".replace("-", MINUS) + spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--also", nargs="*", default=[])
    parser.add_argument("--together", action="store_true")
    options = parser.parse_args()
    tables = [json.loads((folder / "table.json").read_text(encoding="utf-8")) for folder in options.folders]
    if options.together:
        print(together(tables))
        return
    for made in tables:
        print(f"### {made['name']}\n\n{markdown(made, options.also)}\n")


if __name__ == "__main__":
    main()
