"""The size and shape of the package in one table: `make stats`.

    python tools/stats.py [--json]
    python tools/stats.py --record "make test" START    # appends the minutes since START, in seconds since the epoch

Lines are `wc -l` of vitrail/**/*.py. A module counts as imported where an import statement of another module of the
package names it, also inside a function. The supervised run is two steps on a folder of eight images.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vitrail"
SHARED_NAMES = ("__init__.py", "config.py", "run.py", "page.py")  # may stand in several folders
LONG = 500
MINUTES = ROOT / ".pytest_cache" / "minutes.json"  # one line per run of the tests
RUN = """
import sys
from pathlib import Path
import numpy as np
from PIL import Image
folder = Path({folder!r}) / "photos"
for kind in "ab":
    for split, count in (("train", 4), ("test", 2)):
        (folder / split / kind).mkdir(parents=True)
        for i in range(count):
            pixels = np.random.default_rng(i).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / split / kind / f"{{i}}.png")
from vitrail.__main__ import main
sys.argv = ["vitrail", "train", "vit", "--data", str(folder), "--out", {folder!r} + "/run", "--optim.steps", "2",
            "--data.batch", "2", "--model.name", "vit_micro_28", "--data.workers", "0", "--engine.device", "cpu"]
try:
    main()
except SystemExit:
    pass
print("modules", sum(name.split(".")[0] == "vitrail" for name in sys.modules))
"""


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def importers(known: dict[str, Path]) -> dict[str, set[str]]:
    """For every module, the modules that import it."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            else:
                continue
            for target in targets:
                if target in known and target != name:
                    found[target].add(name)
    return found


def classes(known: dict[str, Path]) -> Counter[str]:
    """How many public classes have each name."""
    trees = (ast.parse(path.read_text()) for path in known.values())
    named = (node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    return Counter(name for name in named if not name.startswith("_"))


def imports_torch(code: str) -> bool:
    """Whether running `code` imports torch."""
    ask = f"import sys\n{code}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1] == "True"


def modules_of_a_run() -> int:
    """How many of our modules a supervised run from a folder imports."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", RUN.format(folder=folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1].split()[1])


def record(command: str, start: int) -> None:
    """Append how long a run of the tests took, and print it."""
    minutes = round((time.time() - start) / 60, 1)
    MINUTES.parent.mkdir(exist_ok=True)
    with MINUTES.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"command": command, "minutes": minutes}) + "\n")
    print(f"{command}: {minutes} minutes")


def minutes() -> dict[str, float]:
    """Minutes of the last run by command."""
    lines = MINUTES.read_text(encoding="utf-8").splitlines() if MINUTES.exists() else []
    return {f"minutes of {row['command']}": row["minutes"] for row in map(json.loads, lines)}


def stats() -> dict[str, float | bool]:
    """All of it by name."""
    known = modules()
    lines = {name: len(path.read_text().splitlines()) for name, path in known.items()}
    by_file = Counter(path.name for path in known.values() if path.name not in SHARED_NAMES)
    users = importers(known)
    help_page = (
        "import contextlib, io\nwith contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):"
    )
    return {
        "lines": sum(lines.values()),
        "files": len(known),
        f"files above {LONG} lines": sum(count > LONG for count in lines.values()),
        "files with one importer": sum(len(users[name]) == 1 for name in known),
        "file names used more than once": sum(count > 1 for count in by_file.values()),
        "class names used more than once": sum(count > 1 for count in classes(known).values()),
        "modules that a supervised run imports": modules_of_a_run(),
        "import vitrail imports torch": imports_torch("import vitrail"),
        "vitrail --help imports torch": imports_torch(
            f"{help_page}\n  sys.argv = ['vitrail', '--help']\n  from vitrail.__main__ import main\n  main()"
        ),
        **minutes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", nargs=2, metavar=("COMMAND", "START"))
    args = parser.parse_args()
    if args.record:
        record(args.record[0], int(args.record[1]))
        return
    table = stats()
    if args.json:
        print(json.dumps(table))
        return
    for name, value in table.items():
        print(f"{name:40} {value if isinstance(value, bool) else format(value, ',')}")


if __name__ == "__main__":
    main()
