"""Commands and code of the documentation work as they stand there, and its pages make a site without broken links."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SMALL = "--data.limit 240 --model.trunk.depth 2"  # added to `vitrail train demo`, so that minutes become seconds
SHORTER = {"knn,linear,corruptions": "knn"}  # 75 passes over the test images; tests/measure has them


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of every block of a page that is a command or code."""
    return re.findall(
        r"^```(sh|python)\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def commands(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([a-zA-Z/_-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages <= named
    assert named - pages == {f"reference/{name}.md" for name in ("commands", "settings", "python")} | {
        "index.md",
        "contributing.md",
    }


@pytest.mark.slow
def test_the_pages_make_a_site_without_broken_links(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    text = (tmp_path / "site" / "reference" / "commands.html").read_text(encoding="utf-8")
    assert "vitrail fit" in text


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    cells = json.loads((DOCS / "examples" / "first_model.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "notebook.py").write_text(f"{text}\nprint(folder)\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "notebook.py"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split()[0] for line in done.stdout.splitlines() if "[" in line]
    assert rows == ["class_token", "mean", "attention_pool"]
    assert (tmp_path / done.stdout.splitlines()[-1] / "report.html").is_file()


@pytest.mark.slow
def test_the_tour_and_what_builds_on_it_work_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("boot.png", "bag.png"):
        shutil.copy(DOCS / name, tmp_path / "docs")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "100"}
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "env": environment, "timeout": 900}
    for page in ("start.md", "guides/adaptive.md", "guides/other-images.md"):
        for language, text in blocks(page):
            for words in [["-c", text]] if language == "python" else commands(text):
                if words[0] == "pip" or words == ["vitrail", "train", "demo"]:
                    continue  # the first lines of the page: installation, and minutes of training
                small = SMALL.split() if words[:3] == ["vitrail", "train", "demo"] else []
                call = [SHORTER.get(word, word) for word in [*words, *small]]
                call = [sys.executable, *(["-m", *call] if call[0] == "vitrail" else call)]
                done = subprocess.run(call, check=False, **options)  # type: ignore[call-overload]
                assert done.returncode == 0, f"{page}: {' '.join(words)[:200]}\n{done.stderr[-2000:]}"
