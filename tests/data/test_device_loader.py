"""The device loaders give the host loaders' rows, labels and batches; only the draws of an augmentation are others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.augment.device_augment import DeviceAugment
from vitrail.data.augment.host import Augment
from vitrail.data.augment.mixing import mix
from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.dataset import BadImage, Split
from vitrail.data.loading import device_loader
from vitrail.data.loading.device_loader import DeviceEvalLoader, DeviceImages, DeviceLoader, fits, stored_size
from vitrail.data.loading.loader import EvalLoader, LoaderSpec, TrainLoader
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.open import open_source
from vitrail.data.pack import pack
from vitrail.data.preprocess import Preprocess

SMALL = PreprocessConfig(size=8, crop_ratio=1.0)
PREPROCESS = Preprocess(SMALL)
PLAIN = AugmentConfig(crop="evaluation", flip=0.0)
SHIFTED = AugmentConfig(crop="pad", padding=2)
BUSY = AugmentConfig(crop="resized", three=True, rand_ops=2, jitter=0.3, erasing=0.5)
MIXED = replace(SHIFTED, mixup=0.8, cutmix=1.0)
SEED = 5


@dataclass(frozen=True)
class NumberedImages:
    """The image of index i is noise drawn from i; `bad` ones cannot be decoded, and sizes go round in `sizes`."""

    bad: frozenset[int] = frozenset()
    sizes: tuple[tuple[int, int], ...] = ((8, 8),)  # width, height

    def __call__(self, index: int) -> Image.Image:
        if index in self.bad:
            raise BadImage(f"file {index}", "truncated")
        width, height = self.sizes[index % len(self.sizes)]
        return Image.fromarray(np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8))


def split_of(rows: int = 11, bad: tuple[int, ...] = (), multilabel: bool = False, **reader) -> Split:
    index = np.arange(rows)[::-1] + 100  # rows and stable indices are not the same thing
    several = np.stack([index % 2, index % 3 == 0], 1).astype(np.int64)
    keys = [f"file {i}" for i in index]
    labels = several if multilabel else index % 3
    return Split(
        "train", NumberedImages(frozenset(bad), **reader), index, keys, labels, np.stack([index % 3, index % 2], 1)
    )


def train(augment: AugmentConfig = SHIFTED, split: Split | None = None, batch: int = 4, kind=DeviceLoader, **more):
    split = split or split_of()
    settings = {"classes": 3, "multilabel": False, "device": "cpu", "workers": 0, "start": 0, "stop": 6} | more
    order = BatchSampler(len(split), batch, SEED)
    images = [settings.pop("images")] if "images" in settings else []
    return kind(LoaderSpec(split, order, Augment(augment, SMALL), PREPROCESS, seed=SEED, **settings), *images)


def assert_same(ours: list[Batch], theirs: list[Batch], pixels: bool = True) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.step == b.step
        assert [v.shape for v in a.views] == [v.shape for v in b.views]
        if pixels:
            assert all(torch.equal(v, w) for v, w in zip(a.views, b.views, strict=True))
        for name in ("label", "target", "index", "levels"):
            assert torch.equal(getattr(a, name), getattr(b, name))
            assert getattr(a, name).dtype == getattr(b, name).dtype


def joined(batches: list[Batch]) -> Batch:
    views = tuple(torch.cat(views) for views in zip(*(b.views for b in batches), strict=True))
    parts = {name: torch.cat([getattr(b, name) for b in batches]) for name in ("label", "target", "index", "levels")}
    return Batch(views, step=batches[0].step, **parts)


# training


def test_without_anything_random_batches_equal_those_of_the_host_loader():
    for settings in ({}, {"split": split_of(bad=(103, 107))}, {"split": split_of(sizes=((12, 9), (7, 15)))}):
        ours, theirs = train(PLAIN, **settings), train(PLAIN, kind=TrainLoader, **settings)
        assert_same(list(ours), list(theirs))
        assert ours.skipped == theirs.skipped


@pytest.mark.parametrize("augment", [SHIFTED, MIXED, BUSY])
def test_rows_labels_targets_and_indices_are_those_of_the_host_loader(augment):
    for split in (split_of(), split_of(bad=(104,))):
        ours, theirs = train(augment, split, views=2), train(augment, split, views=2, kind=TrainLoader)
        assert_same(list(ours), list(theirs), pixels=False)
        assert len(ours) == len(theirs)
        assert ours.skipped == theirs.skipped


def test_several_labels_come_as_by_the_host_loader():
    split = split_of(multilabel=True)
    settings = {"split": split, "classes": 2, "multilabel": True}
    assert_same(list(train(MIXED, **settings)), list(train(MIXED, kind=TrainLoader, **settings)), pixels=False)


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("bad", [(), (104,)])
def test_batches_do_not_depend_on_how_many_are_augmented_together_nor_on_where_the_run_begins(monkeypatch, steps, bad):
    settings = {"split": split_of(bad=bad), "views": 2, "accumulate": 2}
    whole = list(train(BUSY, **settings))
    groups = []

    def counted(self, tasks, pixels, made=DeviceLoader._augmented):
        groups.append(len(tasks))
        return made(self, tasks, pixels)

    monkeypatch.setattr(DeviceLoader, "_augmented", counted)
    monkeypatch.setitem(device_loader.TOGETHER, "cpu", steps * 4 * 2 * 3 * 8 * 8)  # bytes of so many steps
    assert_same(list(train(BUSY, **settings)), whole)
    assert groups == [2 * len(range(first, min(6, first + steps))) for first in range(0, 6, steps)]
    resumed = list(train(BUSY, start=3, **settings))
    assert [batch.step for batch in resumed] == [3, 3, 4, 4, 5, 5]
    assert_same(resumed, whole[6:])


def test_a_group_of_which_one_batch_cannot_be_read_gives_the_others(monkeypatch):
    split = split_of(8, bad=tuple(100 + i for i in range(8)))
    order = BatchSampler(8, 4, SEED)
    wanted = {int(split.index[draw.row]) for draw in order.draws(0)}
    split = split_of(8, bad=tuple(100 + i for i in range(8) if 100 + i not in wanted))
    batches = iter(train(SHIFTED, split))
    assert set(next(batches).index.tolist()) == wanted
    with pytest.raises(ValueError, match="none of the 4 images of a batch of step 1 could be read"):
        next(batches)


def test_pixels_are_those_of_the_key_of_each_draw():
    change, order, split = DeviceAugment(BUSY, SMALL), BatchSampler(11, 4, SEED), split_of()
    for step, batch in enumerate(train(BUSY, views=2)):
        for place, draw in enumerate(order.draws(step)):
            index = int(split.index[draw.row])
            pixels = torch.from_numpy(np.array(NumberedImages()(index))).permute(2, 0, 1)[None]
            for view in range(2):
                made = change(pixels, np.array([[SEED, draw.epoch, index, view, draw.repeat]]))
                assert torch.equal(batch.views[view][place], made[0])


def test_two_views_and_two_epochs_of_an_image_differ():
    batch, later = (next(iter(train(BUSY, batch=11, views=2, start=s, stop=s + 1))) for s in (0, 1))
    images = [
        {int(i): view[n] for n, i in enumerate(of.index)}
        for of, view in ((batch, batch.views[0]), (batch, batch.views[1]), (later, later.views[0]))
    ]
    for index, image in images[0].items():
        assert not torch.equal(image, images[1][index])
        assert not torch.equal(image, images[2][index])


def test_views_are_mixed_as_the_host_loader_mixes():
    batch, plain = (next(iter(train(augment, batch=8, views=2))) for augment in (MIXED, SHIFTED))
    for view, unmixed in zip(batch.views, plain.views, strict=True):
        images, target = mix(PREPROCESS.normalize(unmixed), plain.label, classes=3, config=MIXED, seed=SEED, step=0)
        assert torch.equal(view, images)
        assert torch.equal(batch.target, target)


def test_a_second_pass_and_a_second_loader_over_the_same_images_give_the_same():
    loader = train(replace(BUSY, cutmix=1.0))
    first = list(loader)
    assert_same(list(loader), first)
    images = DeviceImages(split_of(), BUSY, PREPROCESS, device="cpu")
    assert_same(list(train(replace(BUSY, cutmix=1.0), images=images)), first)


def test_images_are_read_once_and_only_when_wanted():
    seen = []

    @dataclass(frozen=True)
    class Counting(NumberedImages):
        def __call__(self, index: int) -> Image.Image:
            seen.append(index)
            return super().__call__(index)

    split = replace(split_of(), reader=Counting())
    loader = train(PLAIN, split)
    assert seen == []
    for _ in range(2):
        list(loader)
        assert sorted(seen) == sorted(split.index.tolist())


def test_starting_at_a_step_equals_skipping_the_steps_before():
    assert_same(list(train(MIXED, start=4, stop=9)), list(train(MIXED, stop=9))[4:])


@pytest.mark.parametrize("augment", [BUSY, MIXED])
def test_ranks_and_pieces_partition_the_global_batch(augment):
    whole = list(train(augment, batch=8, stop=3))
    ranks = [list(train(augment, batch=8, stop=3, rank=rank, world=2, accumulate=2)) for rank in range(2)]
    for step in range(3):
        pieces = [batch for rank in ranks for batch in rank[2 * step : 2 * step + 2]]
        assert [len(piece) for piece in pieces] == [2, 2, 2, 2]
        assert_same([joined(pieces)], [whole[step]])


def test_workers_that_read_images_change_nothing():
    split = split_of(bad=(104,))
    with train(MIXED, split, workers=1, stop=2) as loader:
        assert_same(list(loader), list(train(MIXED, split, stop=2)))


def test_a_batch_of_which_nothing_can_be_read_names_an_image():
    split = split_of(bad=tuple(range(101, 111)))
    with pytest.raises(ValueError, match=r"none of the 2 images .*file 10\d \(truncated\)"):
        list(train(split=split, batch=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 3, "accumulate": 4}, "at least 4"),
        ({"classes": 2}, "from 0 to 2, the model has 2 classes"),
        ({"split": split_of(bad=tuple(range(100, 111)))}, "none of the first images of train"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        list(train(**settings))


# what is kept on the device


@pytest.mark.parametrize(
    ("crop", "sizes", "expected"),
    [
        ("resized", ((12, 10),), (10, 12)),
        ("resized", ((12, 10), (10, 12)), (10, 10)),  # ceil(8 / 0.8)
        ("simple", ((24, 16),), (8, 12)),
        ("pad", ((24, 16), (8, 8)), (8, 8)),
        ("evaluation", ((24, 16),), (8, 8)),
    ],
)
def test_images_are_kept_at_the_size_their_crop_wants(crop, sizes, expected):
    preprocess = Preprocess(PreprocessConfig(size=8, crop_ratio=0.8))
    split, config = split_of(sizes=sizes), AugmentConfig(crop=crop)
    assert stored_size(split, config, preprocess) == expected
    pixels = DeviceImages(split, config, preprocess, device="cpu").pixels
    assert pixels.shape == (11, 3, *expected)


def test_images_of_one_size_are_kept_byte_by_byte():
    split = split_of(sizes=((13, 9),))
    pixels = DeviceImages(split, BUSY, PREPROCESS, device="cpu").pixels
    for row in range(len(split)):
        np.testing.assert_array_equal(pixels[row].permute(1, 2, 0).numpy(), np.array(split.read(row)))


def test_images_of_unequal_size_are_resized_by_their_shorter_side_and_cropped_at_the_centre():
    split = split_of(sizes=((20, 10), (10, 30)))
    preprocess = Preprocess(PreprocessConfig(size=8, crop_ratio=1.0))
    pixels = DeviceImages(split, BUSY, preprocess, device="cpu").pixels
    for row in range(len(split)):
        np.testing.assert_array_equal(pixels[row].numpy(), preprocess(split.read(row)).numpy())


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [4, 1]])
def test_packed_images_are_taken_from_the_cache_as_they_are(tmp_path, monkeypatch, rows):
    for i in range(6):
        place = tmp_path / "photos" / "ab"[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        NumberedImages(sizes=((12, 9),))(i).save(place / f"{i}.png")
    pack(open_source(str(tmp_path / "photos")), tmp_path / "packed", shard_bytes=2 * 12 * 9 * 3)
    split = open_source(str(tmp_path / "packed"))["all"].take(rows)
    expected = np.stack([np.array(split.read(row)) for row in range(len(split))])
    monkeypatch.setattr(DeviceImages, "_read", None)  # no image is read one by one
    pixels = DeviceImages(split, BUSY, PREPROCESS, device="cpu").pixels
    np.testing.assert_array_equal(pixels.permute(0, 2, 3, 1).numpy(), expected)


def test_what_fits_a_processor_is_small(monkeypatch):
    busy = AugmentConfig(crop="resized")
    assert fits(split_of(sizes=((64, 64),)), PREPROCESS, "cpu", busy)
    assert not fits(split_of(sizes=((65, 64),)), PREPROCESS, "cpu", busy)
    assert fits(split_of(), PREPROCESS, "cpu")
    assert not fits(split_of(), Preprocess(PreprocessConfig(size=65)), "cpu")
    assert not fits(split_of(bad=tuple(range(100, 111))), PREPROCESS, "cpu", busy)
    assert not fits(split_of(), PREPROCESS, "meta", busy)
    monkeypatch.setattr(device_loader, "HOST_BYTES", 11 * 3 * 8 * 8 - 1)
    assert not fits(split_of(), PREPROCESS, "cpu", busy)


@pytest.mark.parametrize(("free", "answer"), [(3 * 11 * 3 * 8 * 8, True), (3 * 11 * 3 * 8 * 8 - 3, False)])
def test_what_fits_an_accelerator_leaves_two_thirds_of_it_free(monkeypatch, free, answer):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 40))
    assert fits(split_of(), PREPROCESS, "cuda", SHIFTED) is answer


# evaluation


@pytest.mark.parametrize("sizes", [((8, 8),), ((12, 9), (7, 15))])
def test_evaluation_equals_that_of_the_host_in_every_pass(sizes):
    split = split_of(bad=(109, 102, 101, 100), sizes=sizes)
    for rank in range(2):
        settings = {"batch": 4, "device": "cpu", "workers": 0, "rank": rank, "world": 2}
        theirs = EvalLoader(split, PREPROCESS, **settings)
        with DeviceEvalLoader(split, PREPROCESS, **settings) as ours:
            assert len(ours) == len(theirs)
            expected = list(theirs)
            for _ in range(3):
                assert_same(list(ours), expected)
            assert ours.skipped == theirs.skipped


def test_evaluation_reads_images_once_and_again_if_the_first_pass_was_left_early():
    seen = []

    @dataclass(frozen=True)
    class Counting(NumberedImages):
        def __call__(self, index: int) -> Image.Image:
            seen.append(index)
            return super().__call__(index)

    split = replace(split_of(), reader=Counting())
    loader = DeviceEvalLoader(split, PREPROCESS, batch=4, device="cpu", workers=0)
    next(iter(loader))
    expected = list(EvalLoader(split_of(), PREPROCESS, batch=4, device="cpu", workers=0))
    seen.clear()
    for _ in range(2):
        assert_same(list(loader), expected)
        assert seen == split.index.tolist()


def test_an_evaluation_of_which_nothing_can_be_read_is_an_error_in_every_pass():
    split = split_of(3, bad=(100, 101, 102))
    loader = DeviceEvalLoader(split, PREPROCESS, batch=4, device="cpu", workers=0)
    for _ in range(2):
        with pytest.raises(ValueError, match="none of the 3 images of train"):
            list(loader)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_batches_on_an_accelerator_equal_those_on_the_host():
    augment = replace(SHIFTED, three=True, cutmix=1.0)
    with train(augment, split_of(bad=(104,)), device="cuda", views=2) as loader:
        ours = list(loader)
    theirs = list(train(augment, split_of(bad=(104,)), views=2))
    assert {view.device.type for batch in ours for view in batch.views} == {"cuda"}
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip((a.target, a.label, a.index), (b.target, b.label, b.index), strict=True):
            torch.testing.assert_close(x.cpu(), y)
        for x, y in zip(a.views, b.views, strict=True):
            level = 1 / 255 / min(SMALL.std)
            assert float((x.cpu() - y).abs().max()) < 1.01 * level
