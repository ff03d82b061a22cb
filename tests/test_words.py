"""Help, messages, pages and documentation use the words of the field: phrases that are not used, and what is said."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitrail.cli import COMMANDS, run

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vitrail"
UNITS = "second|image|core|class|coefficient|layer|epoch|step|batch|seed|run|head|patch|attack"
WORDS = {  # pattern: what we say
    rf"\b(images|img|MACs|MiB|GiB|bits|labels|ones|ms) an? ({UNITS})\b(?! (is|are|has|can)\b)": "images/s, per image",
    r"\bone a core\b": "one per core",
    r"\bcarved (off|from)\b": "held out",
    r"\b[Ww]hat it takes for what\b": "Confusion matrix",
    r"\b[Ww]here it looks\b|\bpatches look\b": "attention maps, attention distance",
    r"\b[Ww]hat it was shown\b": "Data",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bless sure than\b|\bsurer than\b": "underconfident, overconfident",
    r"\bclassifiers? that listens?\b": "online linear probe",
    r"\bslow cop(y|ies)\b|\bcopy of oneself\b": "momentum encoder, EMA teacher",
    r"\bFigures of a trained model\b": "Compute metrics for a trained model",
    r"\bas far as (it is|they are) missing\b": "Run the missing experiments",
    r"\btoo few to tell of\b|\bcomponents hold\b": "components explain ... (only N images: treat with caution)",
    r"\bbeside the stream\b": "relative to the residual stream",
    r"\b(holds|hold) for near\b": "nearest neighbours according to the teacher",
    r"\blongest shorter side\b|\bshrunk to it\b": "maximum length of the shorter side; downscaled",
    r"\b(are|is|was|were) taken for (another|“|\{)": "predicted as",
    r"\bimages of no class are told\b": "are rejected",
    r"\b[Nn]umbers (trained|stored)\b": "parameters",
    r"\bwrong labels\b": "label noise",
}
ANY = re.compile("|".join(WORDS))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEMPLATES = sorted(PACKAGE.rglob("*.jinja"))
MODULES = sorted(PACKAGE.rglob("*.py"))
MISSPELT = [  # one text for every pattern
    *(
        "90 images a second",
        "one a core",
        "carved off",
        "What it takes for what",
        "Where it looks",
        "What it was shown",
    ),
    *("mend or remove", "less sure than it could be", "a classifier that listens", "a slow copy", "wrong labels"),
    *("Figures of a trained model", "run as far as it is missing", "7 components hold 90 %", "beside the stream"),
    *("holds for near", "longest shorter side", "are taken for another", "images of no class are told by"),
    "Numbers trained",
]


def found(text: str, where: str, first: int = 1) -> list[str]:
    """`file:line: phrase (say: ...)` of every phrase in `text`, which begins at line `first`."""
    hits = []
    if ANY.search(text):
        hits = [(match, words) for pattern, words in WORDS.items() for match in re.finditer(pattern, text)]
    return [
        f"{where}:{first + text.count(chr(10), 0, match.start())}: {match[0]!r} (say: {words})" for match, words in hits
    ]


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and texts of the string literals of a module, docstrings among them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def test_no_string_of_the_package_has_a_private_phrase() -> None:
    paths = ((path, line, text) for path in MODULES for line, text in strings(path))
    assert [hit for path, line, text in paths for hit in found(text, f"{path.relative_to(ROOT)}", line)] == []


def test_no_template_has_a_private_phrase() -> None:
    assert TEMPLATES
    assert [hit for path in TEMPLATES for hit in found(path.read_text(encoding="utf-8"), path.name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_of_the_documentation_has_a_private_phrase(page: Path) -> None:
    assert found(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_no_help_has_a_private_phrase(command: str) -> None:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        run([command, "--help"])
    assert "usage: vitrail" in shown.getvalue()
    assert found(" ".join(shown.getvalue().split()), f"vitrail {command} --help") == []


def test_pages_write_percentages_in_one_way() -> None:
    """`34 %`, never `34%`: no format of a string or template leaves the space out."""
    without = re.compile(r"\{[^{}]*:[+]?\.\d%\}")
    hits = [(p, n) for p in MODULES for n, line in enumerate(p.read_text().splitlines(), 1) if without.search(line)]
    assert [f"{path.relative_to(ROOT)}:{line}" for path, line in hits] == []


def test_every_pattern_finds_the_phrase_it_is_for() -> None:
    assert {pattern for pattern in WORDS if not any(re.search(pattern, text) for text in MISSPELT)} == set()


def test_a_phrase_is_reported_with_file_line_and_what_to_say() -> None:
    assert found("a\nb\nmend it", "x.md") == ["x.md:3: 'mend' (say: fix)"]
