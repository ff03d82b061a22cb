"""What finished studies found, as Markdown for docs/results: top-1 over seeds, the difference, the cost.

    python studies/tables.py runs/studies/NAME [...] [--also knn map ...]

`--also` adds columns of other figures, mean over seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--also", nargs="*", default=[])
    options = parser.parse_args()
    for folder in options.folders:
        made = json.loads((folder / "table.json").read_text(encoding="utf-8"))
        print(f"### {made['name']}\n\n{markdown(made, options.also)}\n")


if __name__ == "__main__":
    main()
