"""The size and shape of the package in one table: `make stats`.

    python tools/stats.py [--json]

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
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vitrail"
SHARED_NAMES = ("__init__.py", "config.py", "run.py", "page.py")  # may stand in several folders
LONG = 500
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


def stats() -> dict[str, int | bool]:
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
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    found = stats()
    if parser.parse_args().json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:40} {value if isinstance(value, bool) else format(value, ',')}")


if __name__ == "__main__":
    main()
