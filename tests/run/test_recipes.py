"""Every recipe says what its source says, fits its model, and trains."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import TEXTS, quick_of, quick_recipes, reduced_recipe
from timm.data.mixup import mixup_target
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor
from torchvision.transforms import v2

import vitrail
from vitrail.compare.study import read_study
from vitrail.config import AugmentConfig, RunConfig, validate
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import Updater
from vitrail.learn.config import AttentionTransferConfig
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model
from vitrail.model.config import TrunkConfig
from vitrail.model.zoo import ZOO
from vitrail.recipes import RECIPES, about, recipe, stated, with_values
from vitrail.recipes.row import flat
from vitrail.recipes.without_labels import STUDENTS
from vitrail.schema import ConfigError, plain


def value(config: RunConfig, path: str) -> Any:
    inner: Any = plain(config)
    for part in path.split("."):
        inner = inner[part]
    return inner


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_what_its_source_prints(name: str) -> None:
    config = recipe(name)
    assert config.recipe == name
    for path, said in stated(name).items():
        if path != "source":
            assert value(config, path) == said, path
    assert not flat(RECIPES[name].settings).keys() & flat(RECIPES[name].stated).keys()  # each is written once


def test_an_unknown_recipe_is_rejected_with_near_matches() -> None:
    with pytest.raises(ValueError, match="no recipe 'small-diet'; did you mean 'small-deit'"):
        recipe("small-diet")
    with pytest.raises(ConfigError, match="recipe: no recipe 'small-diet'; did you mean 'small-deit'"):
        vitrail.train(replace(recipe("small-deit"), recipe="small-diet"), quiet=True)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_where_it_is_from_and_what_to_expect(name: str) -> None:
    words = about(name)
    assert words.splitlines()[0].endswith(".")
    assert f"vitrail train {name}" in words
    assert "Expect:" in words
    missing = [problem for problem in validate(recipe(name)) if "model.weights" not in problem]
    assert missing == []


CAIT = {  # arXiv 2103.17239: drop path and start of LayerScale
    **{"xxs24": (0.05, 1e-5), "xxs36": (0.1, 1e-6), "xs24": (0.05, 1e-5), "xs36": (0.1, 1e-6)},
    **{"s24": (0.1, 1e-5), "s36": (0.2, 1e-6), "s48": (0.3, 1e-6)},
    **{"m24": (0.2, 1e-5), "m36": (0.3, 1e-6), "m48": (0.4, 1e-6)},
}
# PatchConvNet, arXiv 2112.13692: drop path by model
PATCHCONVNET = {"s20": 0.0, "s36": 0.05, "s60": 0.15, "s120": 0.2, "b36": 0.2, "b60": 0.3, "b120": 0.4}
DEIT3 = {"tiny": (0.0, 0.0), "small": (0.0, 0.0), "base": (0.1, 0.1), "large": (0.4, 0.3), "huge": (0.5, 0.5)}


def of_blocks(name: str, model: str) -> tuple[set[float], set[float]]:
    """Rates and starts that the blocks of a recipe's model have."""
    options = recipe(name, model).model
    made = create_model(model, device="meta", **({} if options.drop_path is None else {"drop_path": options.drop_path}))
    blocks = list(made.trunk.blocks)
    return {block.drop_path.rate for block in blocks}, {block.ls1.init for block in blocks}


@pytest.mark.parametrize("name", CAIT)
def test_blocks_of_cait_drop_and_start_as_table_3_16_says(name: str) -> None:
    rate, start = CAIT[name]
    assert of_blocks("cait-400", f"cait_{name}") == ({rate}, {start})  # one rate for all blocks


@pytest.mark.parametrize("name", PATCHCONVNET)
def test_blocks_of_patchconvnet_drop_as_table_5_8_says(name: str) -> None:
    # The start of LayerScale is not printed: that of the authors' code, 1e-4 up to S60 and 1e-6 for all larger ones.
    assert of_blocks("patchconvnet-1k", f"patchconvnet_{name}") == (
        {PATCHCONVNET[name]},
        {1e-4 if name in ("s20", "s36", "s60") else 1e-6},
    )
    # Fine-tuning has 0.1 less drop path, at least 0 (PatchConvNet, arXiv 2112.13692).
    finer = recipe("patchconvnet-resolution", f"patchconvnet_{name}").model.drop_path
    assert finer == pytest.approx(max(0, PATCHCONVNET[name] - 0.1))


@pytest.mark.parametrize("size", DEIT3)
def test_drop_path_of_deit3_is_that_of_table_6_14_and_grows_with_the_schedule(size: str) -> None:
    small, large = DEIT3[size]  # ImageNet-1k, ImageNet-21k
    assert of_blocks("deit3-1k-400", f"deit3_{size}") == ({small}, {1e-4})
    rates = {name: recipe(f"deit3-{name}", f"deit3_{size}").model.drop_path for name in ("1k-800", "21k-90", "21k-240")}
    # DeiT III (arXiv 2204.07118): 0.05 more for every 200 epochs beyond 400, and for 240 epochs on 21k
    assert rates == pytest.approx({"1k-800": small + 0.1, "21k-90": large, "21k-240": large + 0.05})


def test_every_block_of_resmlp_drops_as_the_authors_training_script_has_it() -> None:
    assert of_blocks("resmlp-400", "resmlp_s24")[0] == {0.1}


SMOOTHED = ("deit-300", "cait-400", "resmlp-400", "patchconvnet-1k", "deit3-21k-90", "deit3-resolution")


@pytest.mark.parametrize("name", SMOOTHED)
def test_smoothing_is_that_of_timm_which_the_authors_train_with(name: str) -> None:
    config = recipe(name).objective
    model = create_model("vit_micro_28", classes=[f"class {i}" for i in range(7)])
    logits, labels = torch.randn(4, 7), torch.tensor([0, 3, 3, 6])
    objective = Supervised(model, config)
    torch.testing.assert_close(objective.criterion(logits, labels), LabelSmoothingCrossEntropy(0.1)(logits, labels))
    mixed = mixup_target(labels, 7, lam=0.3, smoothing=0.1)  # smoothed already
    plain_mix = mixup_target(labels, 7, lam=0.3)
    torch.testing.assert_close(objective.criterion(logits, plain_mix), SoftTargetCrossEntropy()(logits, mixed))


def test_what_depends_on_the_size_follows_the_model() -> None:
    assert recipe("patchconvnet-1k", "patchconvnet_s120").optim.weight_decay == 0.01
    assert recipe("patchconvnet-1k", "patchconvnet_b60").optim.weight_decay == 0.05
    assert recipe("patchconvnet-21k-to-1k", "patchconvnet_b120").model.drop_path == pytest.approx(0.3)
    base = recipe("sot", "sot_base")
    assert (base.data.batch, base.optim.lr, base.optim.weight_decay) == (512, 5e-4, 0.065)


@pytest.mark.parametrize("name", STUDENTS)
def test_students_see_crops_and_flips_and_no_other_change(name: str) -> None:
    """CompRes' own augmentation: `RandomResizedCrop` and a flip, torchvision's defaults."""
    crops = v2.RandomResizedCrop(32)
    expected = AugmentConfig(crop="resized", scale=tuple(crops.scale), ratio=tuple(crops.ratio), flip=0.5)
    assert recipe(name).data.augment == expected


def test_augmentations_that_are_compared_differ_in_what_they_are_named_after_alone() -> None:
    study = read_study(Path(__file__).parents[2] / "studies" / "augmentations.yaml")
    chosen = {name: plain(config.data.augment) for name, config in study.configs.items()}
    named = {"three", "rand_ops", "rand_magnitude", "trivial"}
    rest = [{key: value for key, value in augment.items() if key not in named} for augment in chosen.values()]
    assert len(chosen) == 4
    assert all(augment == rest[0] for augment in rest)


def test_a_network_without_drop_path_is_given_none() -> None:
    assert recipe("finetune").model.drop_path == 0.1
    assert recipe("finetune", "cifar_resnet20").model.drop_path is None


def test_learning_rates_scale_with_the_batch() -> None:
    """DeiT (arXiv 2012.12877) and Grafit (arXiv 2011.12982)."""
    deit = recipe("deit-300")
    curve = make_schedule(deit.optim, deit.data.batch, 1_281_167)
    assert curve.peak == pytest.approx(1e-3)
    assert curve.warmup == round(5 * 1_281_167 / 1024)
    grafit = recipe("grafit-imagenet")
    assert make_schedule(grafit.optim, grafit.data.batch, 1_281_167).peak == pytest.approx(0.4)
    assert max(map(curve.lr, range(0, curve.steps, 997))) <= curve.peak
    assert math.isclose(curve.lr(curve.warmup), curve.peak, rel_tol=1e-6)
    middle = (curve.warmup + curve.steps) // 2
    assert curve.lr(middle) == pytest.approx((curve.peak + deit.optim.floor) / 2, rel=1e-3)  # of a cosine


def test_rates_without_labels_follow_the_batch() -> None:
    """A batch that fits one's own accelerator keeps a rate that fits it (linear, from the 256 of the sources)."""
    names = ("msf", "byol-asym", "compres-1q", "sima-dino", "small-moco", "small-cmsf", "small-dino", "small-supcon")
    for name in names:
        config = recipe(name)
        assert config.data.batch == config.optim.lr_batch == 256
        small = with_values(config, {"data.batch": 64})
        assert make_schedule(small.optim, 64, 10**4).peak == pytest.approx(config.optim.lr / 4)


@pytest.mark.parametrize("name", {repr(recipe(name).model): name for name in RECIPES if name not in TEXTS}.values())
def test_the_model_of_a_recipe_is_built_on_meta(name: str) -> None:
    """Recipes with the same settings of the model are one case."""
    chosen = recipe(name).model
    head = {} if chosen.head is None else {"head": chosen.head}
    model = create_model(chosen.name, device="meta", image_size=chosen.image_size, **head, **chosen.trunk)
    assert all(parameter.is_meta for parameter in model.parameters())


def untrained(config: RunConfig) -> tuple[str, ...]:
    """How the names of weights begin that a recipe rightly leaves as they are."""
    if config.objective.kind == "attack" or config.model.adapter is not None or config.optim.tune != "full":
        return ("",)
    if config.objective.kind == "mae":
        return ("head.",)
    if isinstance(config.objective, AttentionTransferConfig) and config.objective.mode == "copy":
        return ("trunk.guide.source.",)
    return ()


@pytest.mark.parametrize("name", quick_of((name for name in RECIPES if name not in TEXTS), quick_recipes()))
def test_a_recipe_trains_for_two_steps(
    name: str, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, trained, inner = set(), set(), Updater.apply

    def apply(self: Updater) -> tuple[Tensor, Tensor]:
        groups = self.optimizer.param_groups
        named = {n: p for g in groups for n, p in zip(g["names"], g["params"], strict=True)}
        alone.update(n for n, p in named.items() if p.grad is None)
        trained.update(n.removeprefix("model.") for n in named)
        return inner(self)

    monkeypatch.setattr(Updater, "apply", apply)
    config = reduced_recipe(name, teacher, tmp_path / "run")
    run = vitrail.train(config, quiet=True)
    assert 0 <= run.figures.scalars()["top1"] <= 1
    assert (run.path / "model").is_dir()
    assert not alone  # no gradient: decay alone would move it, and several processes would wait for it in vain
    left = {n for n, _ in run.model.named_parameters()} - trained
    assert [n for n in left if not n.startswith(untrained(config))] == []


PAIRS = [(name, model) for name, row in RECIPES.items() for model in row.by_model]


@pytest.mark.parametrize(("name", "model"), PAIRS)
def test_a_recipe_fits_every_model_that_it_has_values_for(name: str, model: str) -> None:
    config = recipe(name, model)
    assert config.model.name == model
    assert validate(config) == []
    trunk = ZOO[model].trunk if model in ZOO else None
    if isinstance(trunk, TrunkConfig):
        size = config.model.image_size or trunk.image_size
        assert size % trunk.patch == 0
        if isinstance(config.objective, AttentionTransferConfig):
            assert int(config.objective.layers.partition(":")[2] or 0) <= trunk.depth
