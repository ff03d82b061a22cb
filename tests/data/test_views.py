"""Weak, strong and small views: each is the plain augmentation of its own settings under its own key."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.config import ConfigError, from_mapping
from vitrail.data.augment.device_augment import DeviceAugment
from vitrail.data.augment.host import Augment, stored_alike, view_augments
from vitrail.data.batch import Batch, View, ViewSpec
from vitrail.data.config import AugmentConfig, DataConfig, PreprocessConfig
from vitrail.data.dataset import Split
from vitrail.data.loading.device_loader import DeviceLoader
from vitrail.data.loading.loader import LoaderSpec, TrainLoader
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.preprocess import Preprocess
from vitrail.learn.config import ByolConfig, CmsfConfig, IsdConfig, MocoConfig, MsfConfig
from vitrail.learn.objective import TrainingFacts, build_objective
from vitrail.model.build import create_model

SEED, SIDE = 5, 12
PREPROCESS = PreprocessConfig(size=8, crop_ratio=1.0)
STRONG = AugmentConfig(scale=(0.3, 1.0), jitter=0.4, grey=0.5, solarise=0.5)
WEAK = DataConfig().weak
SPEC = ViewSpec.of(View(weak=True), View(), View(size=4, scale=(0.1, 0.3)))


def picture(index: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(index).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))


def split() -> Split:
    index = np.arange(11)[::-1] + 100
    return Split("train", picture, index, [f"file {i}" for i in index], index % 3)


def batches(kind: type[TrainLoader], spec: ViewSpec, strong: AugmentConfig = STRONG) -> list[Batch]:
    views = view_augments(spec, strong, WEAK, PREPROCESS)
    settings = {"classes": 3, "multilabel": False, "seed": SEED, "device": "cpu", "workers": 0}
    source = split()
    order = BatchSampler(len(source), 4, SEED)
    chosen = Augment(strong, PREPROCESS), Preprocess(PREPROCESS)
    return list(kind(LoaderSpec(source, order, *chosen, start=0, stop=4, views=views, **settings)))


def test_a_weak_view_is_a_crop_and_a_flip_and_nothing_else() -> None:
    assert replace(WEAK, scale=AugmentConfig().scale) == AugmentConfig()
    assert (WEAK.crop, WEAK.scale, WEAK.flip) == ("resized", (0.2, 1.0), 0.5)  # MSF, arXiv 2105.07269


@pytest.mark.parametrize("kind", [TrainLoader, DeviceLoader])
def test_each_view_is_the_plain_augmentation_of_its_settings(kind: type[TrainLoader]) -> None:
    """The oracle makes images one at a time, from their keys, with settings written out."""
    sizes = (8, 8, 4)
    configs = (WEAK, STRONG, replace(STRONG, scale=(0.1, 0.3)))
    order, source = BatchSampler(11, 4, SEED), split()
    for step, batch in enumerate(batches(kind, SPEC)):
        assert [tuple(view.shape[2:]) for view in batch.views] == [(side, side) for side in sizes]
        for place, draw in enumerate(order.draws(step)):
            index = int(source.index[draw.row])
            for view, (config, side) in enumerate(zip(configs, sizes, strict=True)):
                seen, key = replace(PREPROCESS, size=side), (SEED, draw.epoch, index, view, draw.repeat)
                if kind is TrainLoader:
                    expected = Augment(config, seen)(picture(index), key)
                else:
                    pixels = torch.from_numpy(np.array(picture(index))).permute(2, 0, 1)[None]
                    expected = DeviceAugment(config, seen)(pixels, np.array([key]))[0]
                assert torch.equal(batch.views[view][place], expected)


@pytest.mark.parametrize("kind", [TrainLoader, DeviceLoader])
def test_what_the_other_views_are_does_not_change_a_view(kind: type[TrainLoader]) -> None:
    both, mixed = batches(kind, ViewSpec.of(View(weak=True), View(weak=True))), batches(kind, SPEC)
    for ours, theirs in zip(both, mixed, strict=True):
        assert torch.equal(ours.views[0], theirs.views[0])
        assert not torch.equal(ours.views[1], theirs.views[1])


def test_the_device_loader_refuses_views_that_want_images_in_several_forms() -> None:
    padded = replace(STRONG, crop="pad", padding=2)
    assert len(batches(TrainLoader, ViewSpec.of(View(weak=True), View()), padded)) == 4
    with pytest.raises(ValueError, match=r"--data\.loader host"):
        batches(DeviceLoader, ViewSpec.of(View(weak=True), View()), padded)
    with pytest.raises(ValueError, match=r"data\.augment\.crop: .* not pad"):
        batches(TrainLoader, SPEC, padded)
    assert stored_alike(view_augments(SPEC, STRONG, WEAK, PREPROCESS))


@pytest.mark.parametrize(
    ("config", "weak"),
    [
        (ByolConfig(), (False, False)),
        (MocoConfig(bank=8), (False, False)),
        (IsdConfig(bank=8), (True, False)),
        (MsfConfig(bank=8), (True, False)),
        (CmsfConfig(bank=8), (True, False)),
        (MsfConfig(bank=8, views="weak_weak"), (True, True)),
        (MsfConfig(bank=8, views="strong_strong"), (False, False)),
        (ByolConfig(views="weak_strong"), (True, False)),
    ],
)
def test_the_teachers_view_comes_first_and_is_weak_where_the_papers_best_rows_have_it(
    config: MsfConfig, weak: tuple[bool, bool]
) -> None:
    head = {"kind": "projected", "width": 8, "hidden": 16, "norm": True}
    model = create_model("vit_micro_28", classes=3, depth=1, width=16, heads=2, head=head)
    objective = build_objective(config, model, TrainingFacts(np.arange(6) % 3, np.arange(6), 4))
    assert tuple(view.weak for view in objective.views.all()) == weak


def test_settings_of_weak_views_are_checked_under_their_own_name() -> None:
    weak = {"scale": [0.9, 0.1], "trivial": True, "auto": True, "mixup": 0.5}
    with pytest.raises(ConfigError) as error:
        from_mapping({"data": {"weak": weak}})
    said = "\n".join(error.value.problems)
    assert "data.weak.scale" in said
    assert "data.weak.auto" in said
    assert "mixed alike" in said
    assert "data.augment.scale" not in said
