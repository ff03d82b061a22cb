"""The overview of claims says what its two files say, and its verdicts follow from figures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from study_calls import script_module

ROOT = Path(__file__).parents[1]
STUDY = {"study": "s", "data": "D", "model": "M", "epochs": 100, "page": "training.md"}


@pytest.fixture(scope="module")
def claims() -> ModuleType:
    return script_module(ROOT / "tools" / "claims.py")


def slug(head: str) -> str:
    return re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-")


def seeds(row: str, *values: float) -> list[dict[str, Any]]:
    return [{"study": "s", "row": row, "seed": i, "metrics": {"top-1": v}} for i, v in enumerate(values)]


def judged(claims: ModuleType, lines: list[dict[str, Any]], **claim: Any) -> tuple[str, str]:
    given = {"study": "s", "metric": "top-1", "row": "a", **claim}
    text, verdict = claims.judged(given, claims.Rows([STUDY, *lines]))
    return text, verdict


def test_the_page_is_what_its_files_say(claims: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["claims.py", "--check"])
    assert claims.main() == 0, "run: python tools/claims.py"


def test_every_row_is_of_a_study_whose_page_exists() -> None:
    folder = ROOT / "docs" / "results"
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    studies = {line["study"]: line for line in lines if "row" not in line}
    assert {line["study"] for line in lines} == set(studies)
    for study in studies.values():
        name, _, anchor = study["page"].partition("#")
        heads = re.findall(r"^#+ (.*)", (folder / name).read_text(), re.MULTILINE)
        assert not anchor or anchor in map(slug, heads), study["page"]
    used = {
        (c["study"], c[k])
        for c in yaml.safe_load((folder / "claims.yaml").read_text())
        for k in ("row", "above")
        if k in c
    }
    assert used <= {(line["study"], line["row"]) for line in lines if "row" in line}


def test_a_difference_beyond_twice_its_error_is_a_verdict(claims: ModuleType) -> None:
    far = seeds("a", 70.0, 70.2, 70.4) + seeds("b", 68.0, 68.2, 68.4)
    text, verdict = judged(claims, far, above="b")
    assert verdict == "holds"
    assert text == "top-1 70.2 ± 0.2 against 68.2 ± 0.2; D, M, 100 epochs, 3 seeds"
    assert judged(claims, far, row="b", above="a")[1] == "does not"
    assert judged(claims, far, above="b", lower_is_better=True)[1] == "does not"
    assert judged(claims, far, above="b", by=3)[1] == "does not"
    near = seeds("a", 70.0, 70.2, 70.4) + seeds("b", 69.8, 70.0, 70.2)  # 0.2 apart, with an error of 0.16
    assert judged(claims, near, above="b")[1] == "open"


def test_a_row_of_one_seed_has_the_spread_of_its_study_or_none(claims: ModuleType) -> None:
    alone = seeds("a", 70.0) + seeds("b", 69.0)
    assert judged(claims, alone, above="b")[1] == "open"  # nothing is known of the spread
    assert judged(claims, [*alone, *seeds("c", 50.0, 50.2)], above="b")[1] == "holds"
    assert judged(claims, [*alone, *seeds("c", 50.0, 54.0)], above="b")[1] == "open"
    lucky = seeds("a", 70.0, 70.0) + seeds("b", 69.0, 69.0) + seeds("c", 50.0, 54.0, 52.0)
    assert judged(claims, lucky, above="b")[1] == "open"  # equal seeds do not make a spread of 0


def test_short_runs_and_none_leave_a_claim_open(claims: ModuleType) -> None:
    far = seeds("a", 70.0, 70.2) + seeds("b", 68.0, 68.2)
    assert judged(claims, far, above="b", epochs=300)[1] == "open (short runs: holds)"
    assert judged(claims, far, above="b", epochs=100)[1] == "holds"
    assert claims.judged({}, claims.Rows([])) == ("not run", "open")


def test_rows_of_a_study_are_added_and_replace_their_own(
    claims: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [{"seed": s, "path": "x", "metrics": {"top1": 0.5 + s / 8, "knn": None, "loss": 1.0}} for s in (0, 1)]
    (tmp_path / "table.json").write_text(json.dumps({"name": "s", "rows": [{"variant": "a", "runs": runs}]}))
    lines = [STUDY, *seeds("a", 1.0), *seeds("b", 2.0)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "claims.yaml").write_text("[]")
    monkeypatch.setattr(claims, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["claims.py", "--add", str(tmp_path / "table.json")])
    for _ in range(2):  # the second time nothing changes
        assert claims.main() == 0
        stored = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        assert stored == [STUDY, *seeds("b", 2.0), *seeds("a", 50.0, 62.5)]
    assert "0 claims" in (tmp_path / "README.md").read_text()


def test_wrong_settings_leave_a_claim_open(claims: ModuleType) -> None:
    far = seeds("a", 70.0, 70.2) + seeds("b", 68.0, 68.2)
    faulty = [{**line, "faulty": True} if line["row"] == "b" else line for line in far]
    assert judged(claims, faulty, above="b")[1] == "open (settings were wrong: holds)"
    assert judged(claims, faulty, row="b", above="a", epochs=300)[1] == "open (settings were wrong: does not)"
    assert judged(claims, [{**STUDY, "faulty": True}, *far], above="b")[1] == "open (settings were wrong: holds)"
    assert judged(claims, faulty, above="b", by=2)[1] == "open (settings were wrong)"
    assert judged(claims, faulty, at_least=60)[1] == "holds"  # the other row has nothing to do with it


def test_an_interval_stands_for_the_spread_over_seeds(claims: ModuleType) -> None:
    lines = [
        {"study": "s", "row": "a", "metrics": {"times": 1.43}, "interval": {"times": [1.42, 1.44]}},
        {"study": "s", "row": "b", "metrics": {"times": 5.8}, "interval": {"times": 1.6}},
        {"study": "s", "row": "c", "metrics": {"times": 1.4}},
    ]
    assert judged(claims, lines, metric="times", at_least=1.39) == (
        "times 1.43 (1.42 to 1.44); D, M, 100 epochs",
        "holds",
    )
    assert judged(claims, lines, metric="times", at_least=1.39, lower_is_better=True)[1] == "does not"
    assert judged(claims, lines, metric="times", at_least=1.425)[1] == "open"
    assert judged(claims, lines, metric="times", row="b", at_least=4) == (
        "times 5.8 (± 1.6); D, M, 100 epochs",
        "holds",
    )
    assert judged(claims, lines, metric="times", row="b", at_least=4.3)[1] == "open"
    assert judged(claims, lines, metric="times", row="c", at_least=0)[1] == "open"  # nothing is known of the spread


def test_figures_have_the_digits_that_they_were_kept_with(claims: ModuleType) -> None:
    def text(mean: float, std: float) -> str:
        line = {"study": "s", "row": "a", "seeds": 3, "metrics": {"top-1": mean}, "std": {"top-1": std}}
        return judged(claims, [line], at_least=0)[0].partition(";")[0]

    assert text(48.9, 0.38) == "top-1 48.90 ± 0.38"
    assert text(1.093, 0.049) == "top-1 1.093 ± 0.049"
    assert text(12, 1) == "top-1 12 ± 1"
    two = [*seeds("a", 51.2), *seeds("b", 47.03)]
    assert judged(claims, two, above="b")[0].startswith("top-1 51.20 against 47.03;")


def test_the_page_counts_why_claims_are_open(claims: ModuleType) -> None:
    lines = (
        seeds("a", 70.0, 70.2) + seeds("b", 68.0, 68.2) + [{**line, "faulty": True} for line in seeds("f", 1.0, 1.2)]
    )
    base = {"paper": "P", "claim": "c", "stated": "1", "study": "s", "metric": "top-1", "row": "a"}
    given = [
        {**base, "above": "b"},
        {**base, "row": "b", "above": "a"},
        {**base, "above": "b", "epochs": 300},
        {**base, "above": "f"},
        {**base, "above": "b", "by": 2},
        {key: base[key] for key in ("paper", "claim", "stated")},
    ]
    text = claims.page(given, claims.Rows([STUDY, *lines]))
    assert "6 claims: 1 holds, 1 does not, 4 are open" in text.replace("\n", " ")
    assert "(1 for wrong settings, 1 for short runs, 1 for lack of a clear difference, 1 not run)" in text


def printed(page: str) -> tuple[set[float], set[tuple[float, float]]]:
    """(All numbers, all pairs of a mean and its spread) that one section of a page prints."""
    name, _, anchor = page.partition("#")
    sections = re.split(r"^#+ (.*)\n", (ROOT / "docs" / "results" / name).read_text(), flags=re.MULTILINE)
    texts = zip(sections[1::2], sections[2::2], strict=True)
    text = " ".join(text for head, text in texts if not anchor or slug(head) == anchor).replace("\u2212", "-")
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.replace("**", ""))
    number = r"(?<![\w.])-?\d+(?:\.\d+)?"
    pairs = re.findall(rf"({number})(?: %)? ± (\d+(?:\.\d+)?)", text)
    return {float(x) for x in re.findall(number, text)}, {(float(mean), float(std)) for mean, std in pairs}


def test_every_figure_of_a_row_is_printed_in_the_section_it_names() -> None:
    lines = [json.loads(line) for line in (ROOT / "docs" / "results" / "rows.jsonl").read_text().splitlines()]
    found = {line["study"]: printed(line["page"]) for line in lines if "row" not in line}
    for line in (line for line in lines if "row" in line):
        numbers, pairs = found[line["study"]]
        for metric, value in line["metrics"].items():
            spread = line.get("std", line.get("interval", {})).get(metric)
            if isinstance(spread, list):
                assert {value, *spread} <= numbers, line
            else:
                assert value in numbers if spread is None else (value, spread) in pairs, line


def test_claims_are_short_and_cite_what_the_package_cites() -> None:
    claims = yaml.safe_load((ROOT / "docs" / "results" / "claims.yaml").read_text())
    source = "".join(path.read_text() for path in (ROOT / "vitrail").rglob("*.py"))
    for claim in claims:
        assert len(claim["claim"]) < 90, claim
        assert all(number in source for number in re.findall(r"\d{4}\.\d{5}", claim["paper"])), claim
    assert len({(c["paper"], c["claim"]) for c in claims}) == len(claims)


def test_means_that_were_kept_without_their_seeds_count(claims: ModuleType) -> None:
    lines = [
        {"study": "s", "row": name, "seeds": 3, "metrics": {"top-1": mean}, "std": {"top-1": 0.3}}
        for name, mean in (("a", 75.4), ("b", 74.0))
    ]
    assert judged(claims, lines, above="b") == (
        "top-1 75.4 ± 0.3 against 74.0 ± 0.3; D, M, 100 epochs, 3 seeds",
        "holds",
    )
    assert judged(claims, lines, at_least=75.0)[1] == "holds"
    assert judged(claims, lines, at_least=75.2)[1] == "open"
    with pytest.raises(ValueError, match="no row 'z' of 's'"):
        judged(claims, lines, row="z", at_least=1)
