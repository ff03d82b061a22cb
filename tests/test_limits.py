"""Settings, YAML and studies that would take memory or time without bound are rejected in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitrail.compare.study import read_study
from vitrail.config import RunConfig, from_mapping, load_yaml
from vitrail.schema import ConfigError, parse_flags


def test_references_of_yaml_are_not_written_out_without_end(tmp_path: Path) -> None:
    lines = ["a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    for before, name in zip("abcdefg", "bcdefgh", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    (tmp_path / "bomb.yaml").write_text("\n".join([*lines, "seed: *h"]))
    with pytest.raises(ConfigError, match="holds more than 100,000 values"):
        load_yaml(tmp_path / "bomb.yaml")
    (tmp_path / "anchors.yaml").write_text("optim: &o {lr: 0.1}\nother: *o\n")
    assert load_yaml(tmp_path / "anchors.yaml")["other"] == {"lr": 0.1}


@pytest.mark.parametrize("text", ["seed: " + "[" * 20_000 + "]" * 20_000, "a: &a [*a]"])
def test_yaml_without_bottom_is_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_yaml(tmp_path / "deep.yaml")


@pytest.mark.parametrize("text", ['name: "\\UFFFFFFFF"', "name: 2001-99-99"])
def test_yaml_with_absurd_escapes_or_dates_is_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"odd.yaml is not valid YAML"):
        load_yaml(tmp_path / "odd.yaml")


def test_yaml_in_another_encoding_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("name: café".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin.yaml is not UTF-8 text"):
        load_yaml(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    "flag", ["--optim.epochs inf", "--optim.warmup inf", "--optim.lr nan", "--seed 99999999999999999999"]
)
def test_numbers_are_finite(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"is no finite number below 1e\+18"):
        from_mapping(parse_flags(flag.split())[1], RunConfig())


def test_a_setting_of_another_kind_of_trunk_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"model.trunk.attention: deit_small has no such setting"):
        from_mapping({"model": {"name": "deit_small", "trunk": {"attention": [3]}}}, RunConfig())


def test_a_message_quotes_a_line_of_a_value() -> None:
    with pytest.raises(ConfigError) as error:
        from_mapping({"seed": list(range(10**6)), "model": {"name": ["x" * 10**6]}}, RunConfig())
    assert len(str(error.value)) < 500


def test_a_study_has_so_many_seeds(tmp_path: Path) -> None:
    (tmp_path / "huge.yaml").write_text(
        "name: x\nbase: {recipe: vit, data: {uri: photos}}\nvariants: {a: {}}\nseeds: 1000000000\n"
    )
    with pytest.raises(ConfigError, match="seeds: 1000000000 are more than 10,000"):
        read_study(tmp_path / "huge.yaml")
