"""Commands and code of the documentation work as they stand there, and its pages make a site without broken links."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from documented import PAGES, SIZES, Page, Step, furnish, pages, shortened, spans, steps, unknown
from processes import run_script

import vitrail.fit.run as fitting
from vitrail.cli import run as command
from vitrail.fit.candidates import Candidate

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def is_parsed_only(page: str, named: Page) -> bool:
    return all(any(part in step.text for part in named.parsed) for step in steps(page))


def carried_out(step: Step, page: Page) -> str:
    """Run a step of a page, in the current folder; returns what went wrong, or nothing."""
    text = step.text
    if any(part in text for part in page.parsed):
        return ""
    if step.language != "sh":
        for part, other in page.texts.items():
            text = text.replace(part, other)
        if step.language == "yaml":
            name = re.search(r"^name: (\w+)$", text, re.MULTILINE)
            Path(f"{name[1]}.yaml").write_text(text, encoding="utf-8")  # type: ignore[index]
        else:
            exec(compile(text, "<page>", "exec"), {"__name__": "__main__"})
        return ""
    added = next((words for part, words in page.smaller.items() if part in text), "")
    words = shortened(shlex.split(text, comments=True), added)
    if words[0] == "vitrail":
        code = command(words[1:])
        return f"exit code {code}" if code else ""
    call = [sys.executable, *words[1:]] if words[0] == "python" else words
    if words[0] == "torchrun":
        call = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    done = subprocess.run(call, capture_output=True, text=True, timeout=300, check=False)
    return done.stderr[-2000:] if done.returncode else ""


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
    done = run_script(tmp_path / "notebook.py", folder=tmp_path)
    assert done.code == 0, done.err[-3000:]
    rows = [line.split()[0] for line in done.out.splitlines() if "[" in line]
    assert rows == ["class_token", "mean", "attention_pool"]
    assert (tmp_path / done.out.splitlines()[-1] / "report.html").is_file()


@pytest.mark.parametrize("page", pages())
def test_every_page_with_commands_or_code_is_run(page: str) -> None:
    assert not steps(page) or page in PAGES


@pytest.mark.parametrize("page", pages())
def test_every_command_of_a_page_has_known_flags_recipes_and_settings(page: str) -> None:
    for text in [*(step.text for step in steps(page) if step.language == "sh"), *spans(page)]:
        if "deit_smal " in text or "..." in text:
            continue  # what the answer to a mistake looks like; a command that is not whole
        assert unknown(shlex.split(text, comments=True)) == [], text


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_made_smaller_in_lengths_models_and_amounts_of_data_only(page: str) -> None:
    added = [word for words in PAGES[page].smaller.values() for word in words.split() if word.startswith("--")]
    assert {word.removeprefix("--") for word in added} <= set(SIZES)


@pytest.mark.parametrize("page", PAGES)
def test_the_table_names_nothing_that_a_page_does_not_have(page: str) -> None:
    named = PAGES[page]
    texts = [step.text for step in steps(page)]
    parts = [*named.smaller, *named.texts, *named.parsed]
    assert [part for part in parts if not any(part in text for text in texts)] == []


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("page", [page for page, named in PAGES.items() if not is_parsed_only(page, named)])
def test_the_commands_and_code_of_a_page_work_in_their_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(fitting, "candidates_for", lambda _: [Candidate("vit_micro_28", 28)])
    monkeypatch.setattr(fitting, "TEACHERS", {"photo": "vit_micro_28", "small": "vit_micro_28"})
    for text in PAGES[page].before:
        assert not carried_out(Step("sh", text), Page()), capsys.readouterr().err[-2000:]
    for step in steps(page):
        capsys.readouterr()
        problem = carried_out(step, PAGES[page])
        assert not problem, f"{step.text[:200]}\n{problem}\n{capsys.readouterr().err[-2000:]}"
