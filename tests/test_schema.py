"""Configurations: one reader for flags and YAML, every problem at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from vitrail.config import ConfigError, RunConfig, dump, from_mapping, load_yaml, validate
from vitrail.model.heads.config import Mean
from vitrail.recipes import RECIPES, recipe
from vitrail.schema import parse_flags


def read(flags: str, base: str = "vit") -> RunConfig:
    return from_mapping(parse_flags(flags.split())[1], recipe(base))


def problems(flags: str, base: str = "vit") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(flags, base)
    return caught.value.problems


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_yaml(name: str) -> None:
    config = recipe(name)
    assert from_mapping(yaml.safe_load(dump(config))) == config


def test_flags_reach_every_depth() -> None:
    config = read("--data photos --data.augment.mixup 0.2 --data.augment.scale 0.5 0.9 --model.trunk.depth 2 --seed 3")
    assert config.data.uri == "photos"
    assert config.data.augment.mixup == 0.2
    assert config.data.augment.scale == (0.5, 0.9)
    assert config.model.trunk == {"depth": 2}
    assert config.seed == 3


def test_flags_and_yaml_mean_the_same() -> None:
    text = "data: {uri: photos, batch: 32}\nmodel: {head: {kind: mean, drop: 0.1}}\nengine: {compile: false}"
    flags = "--data photos --data.batch 32 --model.head mean --model.head.drop 0.1 --engine.no-compile"
    assert read(flags) == from_mapping(yaml.safe_load(text), recipe("vit"))


def test_a_choice_with_options_takes_its_kind_alone_or_with_them() -> None:
    assert read("--model.head mean").model.head == Mean()
    assert read("--model.head.kind mean --model.head.drop 0.5").model.head == Mean(drop=0.5)
    assert read("--model.head mean --model.head.drop 0.5").model.head == Mean(drop=0.5)


def test_all_problems_are_reported_at_once_with_near_matches() -> None:
    found = problems("--model.name deit_smal --optim.lrr 1 --data.batch none --optim.clip -1 --model.head meann")
    text = "\n".join(found)
    assert len(found) == 5
    assert "did you mean 'deit_small'" in text
    assert "optim.lrr: no such setting; did you mean 'lr'" in text
    assert "data.batch: expected a whole number" in text
    assert "optim.clip: -1.0 is out of range" in text
    assert "did you mean 'mean'" in text


def test_yaml_problems_are_the_same_sentences() -> None:
    values = {"model": {"name": "deit_smal"}, "optim": {"lrr": 1, "clip": -1}}
    with pytest.raises(ConfigError) as caught:
        from_mapping(values, recipe("vit"))
    assert sorted(caught.value.problems) == sorted(problems("--model.name deit_smal --optim.lrr 1 --optim.clip -1"))


def test_a_flag_given_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        parse_flags(["--seed", "1", "--seed", "2"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--model.image_size 100", "not a multiple of the patch size 16; use 96 or 112"),
        ("--model.image_size 32", "leave 4 tokens"),
        ("--optim.tune last:x", "is not full, head"),
        ("--optim.tune head", "freezes random weights"),
        ("--data.batch 1", "0 pairs, which mixup and CutMix mix, cannot be cut into 1 pieces"),
        ("--engine.accumulate 3000", "cannot be cut into 3000 pieces"),
        ("--engine.device gpu", "is not auto, cpu"),
        ("--model.weights nowhere.pth", "neither none, timm nor an existing"),
        ("--model.trunk.heads 7", "cannot be cut into 7 heads"),
        ("--data.augment.scale 0.9 0.1", "must not exceed"),
        ("--optim.name adamx", "did you mean"),
        ("--data.augment.three --data.augment.blur 0.5", "already draws grey"),
        ("--data.augment.scale 1 2 3", "expected 2 values"),
    ],
)
def test_what_does_not_fit_is_refused_before_data_is_read(flags: str, sentence: str) -> None:
    assert any(sentence in p for p in problems(flags)), problems(flags)


def test_a_configuration_made_in_python_is_checked_too() -> None:
    config = recipe("demo")
    assert validate(config) == []
    wrong = replace(config, optim=replace(config.optim, lr=-1.0))
    assert any("optim.lr" in p for p in validate(wrong))


def test_broken_yaml_is_one_sentence(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: [1, 2")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_yaml(path)
    with pytest.raises(FileNotFoundError, match="no configuration at"):
        load_yaml(tmp_path / "none.yaml")


def test_a_setting_of_the_trunk_leaves_the_others_of_its_base() -> None:
    base = from_mapping({"model": {"name": "vit_micro_28", "trunk": {"depth": 3, "width": 32}}})
    changed = from_mapping({"model": {"trunk": {"width": 64}}}, base)
    assert changed.model.trunk == {"depth": 3, "width": 64}
