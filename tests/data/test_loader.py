"""What a batch holds depends on its step, not on workers, ranks, pieces, or where the run began."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.augment.host import Augment
from vitrail.data.augment.mixing import mix
from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.dataset import BadImage, Split
from vitrail.data.loading.loader import EvalLoader, LoaderSpec, TrainLoader, auto_workers
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.preprocess import Preprocess

SMALL = PreprocessConfig(size=8, crop_ratio=1.0)
PREPROCESS = Preprocess(SMALL)
PLAIN = AugmentConfig(crop="evaluation", flip=0.0)
SHIFTED = AugmentConfig(crop="pad", padding=2)
MIXED = replace(SHIFTED, mixup=0.8, cutmix=1.0)
SEED = 5


@dataclass(frozen=True)
class NumberedImages:
    """The image of index i is noise drawn from i; `bad` ones cannot be decoded."""

    bad: frozenset[int] = frozenset()
    size: int = 8

    def __call__(self, index: int) -> Image.Image:
        if index in self.bad:
            raise BadImage(f"file {index}", "truncated")
        pixels = np.random.default_rng(index).integers(0, 256, (self.size, self.size, 3), dtype=np.uint8)
        return Image.fromarray(pixels)


def split_of(rows: int = 11, bad: tuple[int, ...] = (), multilabel: bool = False) -> Split:
    index = np.arange(rows)[::-1] + 100  # rows and stable indices are not the same thing
    labels = index % 3
    return Split(
        "train",
        NumberedImages(frozenset(bad)),
        index,
        [f"file {i}" for i in index],
        np.stack([index % 2, index % 3 == 0], 1).astype(np.int64) if multilabel else labels,
        levels=np.stack([labels, index % 2], 1),
    )


def train(augment: AugmentConfig = SHIFTED, split: Split | None = None, batch: int = 4, **more) -> TrainLoader:
    split = split or split_of()
    settings = {"classes": 3, "multilabel": False, "device": "cpu", "workers": 0, "start": 0, "stop": 6} | more
    order = BatchSampler(len(split), batch, SEED)
    return TrainLoader(LoaderSpec(split, order, Augment(augment, SMALL), PREPROCESS, seed=SEED, **settings))


def evaluation(split: Split, **more) -> EvalLoader:
    settings = {"batch": 4, "device": "cpu", "workers": 0} | more
    return EvalLoader(split, PREPROCESS, **settings)


def assert_same(ours: list[Batch], theirs: list[Batch]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.step == b.step
        assert all(torch.equal(v, w) for v, w in zip(a.views, b.views, strict=True))
        for name in ("label", "target", "index", "levels"):
            assert torch.equal(getattr(a, name), getattr(b, name))


def joined(batches: list[Batch]) -> Batch:
    views = tuple(torch.cat(views) for views in zip(*(b.views for b in batches), strict=True))
    parts = {name: torch.cat([getattr(b, name) for b in batches]) for name in ("label", "target", "index", "levels")}
    return Batch(views, step=batches[0].step, **parts)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_batch_holds_the_rows_of_its_step_in_their_order():
    split, order = split_of(), BatchSampler(11, 4, SEED)
    for step, batch in enumerate(train(PLAIN)):
        rows = [draw.row for draw in order.draws(step)]
        assert batch.step == step
        assert batch.index.tolist() == split.index[rows].tolist()
        assert batch.label.tolist() == (split.index[rows] % 3).tolist()
        assert batch.levels.tolist() == [[i % 3, i % 2] for i in split.index[rows].tolist()]
        assert torch.equal(batch.target, batch.label)
        expected = torch.stack([PREPROCESS(NumberedImages()(int(i))) for i in batch.index])
        assert torch.equal(batch.images, expected)  # bytes: a model normalises them


def repeated(rank: int = 0, world: int = 1, workers: int = 0) -> list[Batch]:
    split = split_of(12)
    order = BatchSampler(12, 12, SEED, repeats=3)
    settings = {"classes": 3, "multilabel": False, "device": "cpu", "start": 0, "stop": 2, "workers": workers}
    augment = Augment(SHIFTED, SMALL)
    with TrainLoader(
        LoaderSpec(split, order, augment, PREPROCESS, seed=SEED, rank=rank, world=world, **settings)
    ) as loader:
        return list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_copies_of_an_image_are_augmented_each_in_its_own_way(workers):
    for batch in repeated(workers=workers):
        for index in batch.index.unique():
            copies = batch.images[batch.index == index]
            assert len(copies) == 3
            assert len({copy.numpy().tobytes() for copy in copies}) == 3


def test_repeats_over_two_processes_are_those_of_one():
    parts = [repeated(rank, 2) for rank in range(2)]
    assert_same([joined(list(pieces)) for pieces in zip(*parts, strict=True)], repeated())


def test_pixels_are_those_of_the_key_of_each_draw():
    augment, order, split = Augment(SHIFTED, SMALL), BatchSampler(11, 4, SEED), split_of()
    for step, batch in enumerate(train(views=2)):
        for place, draw in enumerate(order.draws(step)):
            index = int(split.index[draw.row])
            for view in range(2):
                pixels = augment(NumberedImages()(index), (SEED, draw.epoch, index, view, draw.repeat))
                assert torch.equal(batch.views[view][place], pixels)


def test_two_views_differ():
    first, second = next(iter(train(views=2, batch=8))).views
    assert not torch.equal(first, second)


def test_workers_change_nothing_and_end_when_closed():
    with train(MIXED, split_of(bad=(104,)), workers=2) as loader:
        batches = list(loader)
        again = list(loader)
        workers = [worker.pid for worker in loader._loader._iterator._workers]
    alone = train(MIXED, split_of(bad=(104,)))
    assert_same(batches, list(alone))
    assert_same(again, batches)
    assert loader.skipped == alone.skipped == [("file 104", "truncated")]
    assert not any(is_alive(pid) for pid in workers)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_workers_leave_signals_that_reach_all_processes_to_the_main_one(name):
    with train(workers=1, stop=40) as loader:
        batches = iter(loader)
        first = next(batches)
        (worker,) = loader._loader._iterator._workers
        os.kill(worker.pid, getattr(signal, name))
        assert_same([first, *batches], list(train(stop=40)))


def test_a_pass_that_was_left_early_can_be_begun_again():
    with train(workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        del iterator
        assert_same(list(loader), list(train()))


def test_spawned_workers_change_nothing():
    with train(MIXED, workers=1, stop=2, start_method="spawn") as loader:
        assert_same(list(loader), list(train(MIXED, stop=2)))


def test_starting_at_a_step_equals_skipping_the_steps_before():
    assert_same(list(train(MIXED, start=4, stop=9)), list(train(MIXED, stop=9))[4:])


@pytest.mark.parametrize("augment", [SHIFTED, MIXED])
def test_ranks_and_pieces_partition_the_global_batch(augment):
    whole = list(train(augment, batch=8, stop=3))
    ranks = [list(train(augment, batch=8, stop=3, rank=rank, world=2, accumulate=2)) for rank in range(2)]
    for step in range(3):
        pieces = [batch for rank in ranks for batch in rank[2 * step : 2 * step + 2]]
        assert [len(piece) for piece in pieces] == [2, 2, 2, 2]
        assert_same([joined(pieces)], [whole[step]])


@pytest.mark.parametrize(("augment", "counts"), [(SHIFTED, [3, 3, 3, 2]), (MIXED, [4, 2, 2, 3])])
def test_uneven_shares_partition_the_global_batch_and_split_no_pair(augment, counts):
    whole = list(train(augment, batch=11, stop=3))
    ranks = [list(train(augment, batch=11, stop=3, rank=rank, world=2, accumulate=2)) for rank in range(2)]
    for step in range(3):
        pieces = [batch for rank in ranks for batch in rank[2 * step : 2 * step + 2]]
        assert [len(piece) for piece in pieces] == counts
        assert [piece.share for piece in pieces] == [count * 4 / 11 for count in counts]
        assert_same([joined(pieces)], [whole[step]])


def test_lengths_are_those_of_the_passes():
    loader = train(batch=8, start=1, stop=4, accumulate=2)
    assert len(loader) == len(list(loader)) == 6
    for world in (1, 3):
        loader = evaluation(split_of(), world=world)
        assert len(loader) == len(list(loader))


def test_the_random_state_of_the_process_is_untouched():
    before = torch.default_generator.get_state()
    with train(MIXED, workers=1) as loader:
        list(loader)
    list(train(MIXED))
    assert torch.equal(torch.default_generator.get_state(), before)


def test_a_bad_image_is_left_out_and_the_other_rows_keep_their_labels_and_pixels():
    whole = {(b.step, int(i)): row for b in train(stop=9) for i, row in zip(b.index, b.images, strict=True)}
    loader = train(split=split_of(bad=(103, 107)), stop=9)
    seen = set()
    for batch in loader:
        assert batch.label.tolist() == (batch.index % 3).tolist()
        for index, image in zip(batch.index.tolist(), batch.images, strict=True):
            assert torch.equal(image, whole[batch.step, index])
            seen.add((batch.step, index))
    assert seen == {(step, index) for step, index in whole if index not in (103, 107)}
    assert sorted(loader.skipped) == [("file 103", "truncated"), ("file 107", "truncated")]


def test_mixing_around_a_bad_image_leaves_its_partner_unmixed_and_the_rest_as_they_were():
    order, split = BatchSampler(11, 8, SEED), split_of(bad=(104,))
    plain = list(train(SHIFTED, batch=8))
    whole, holed = list(train(MIXED, batch=8)), list(train(MIXED, split, batch=8))
    orphans = 0
    for step, batch in enumerate(holed):
        indices = [int(split.index[draw.row]) for draw in order.draws(step)]
        kept = [place for place, index in enumerate(indices) if index != 104]
        assert batch.index.tolist() == [indices[place] for place in kept]
        for row, place in enumerate(kept):
            orphan = indices[place ^ 1] == 104
            orphans += orphan
            expected = PREPROCESS.normalize(plain[step].images)[place] if orphan else whole[step].images[place]
            assert torch.equal(batch.images[row], expected)
            expected = torch.eye(3)[plain[step].label[place]] if orphan else whole[step].target[place]
            assert torch.equal(batch.target[row], expected)
    assert orphans > 0


def test_views_are_mixed_alike():
    batch = next(iter(train(MIXED, batch=8, views=2)))
    plain = next(iter(train(SHIFTED, batch=8, views=2)))
    for view, unmixed in zip(batch.views, plain.views, strict=True):
        images, target = mix(PREPROCESS.normalize(unmixed), plain.label, classes=3, config=MIXED, seed=SEED, step=0)
        assert torch.equal(view, images)
        assert torch.equal(batch.target, target)


def test_a_batch_of_which_nothing_can_be_read_names_an_image():
    with pytest.raises(ValueError, match=r"none of the 4 images .* step 0 .*file 10\d \(truncated\)"):
        next(iter(train(split=split_of(bad=tuple(range(100, 111))))))


def test_several_labels_come_as_floats():
    split = split_of(multilabel=True)
    batch = next(iter(train(MIXED, split, classes=2, multilabel=True)))
    expected = torch.stack([batch.index % 2, batch.index % 3 == 0], 1).float()
    assert batch.label.dtype == torch.float32
    assert torch.equal(batch.label, expected)
    assert batch.target.shape == (4, 2)
    assert torch.equal(next(iter(evaluation(split))).label.sum(), torch.tensor(split.labels[:4].sum()).float())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 3, "accumulate": 4}, "3 images cannot be cut into 1 processes x 4 .* at least 4"),
        ({"batch": 11, "world": 3, "accumulate": 2, "augment": MIXED}, "5 pairs of images .* at least 12"),
        ({"batch": 7, "world": 2, "complete": True}, "7 are not a multiple of 2"),
        ({"rank": 2, "world": 2}, "rank 2"),
        ({"classes": 2}, "from 0 to 2, the model has 2 classes"),
        ({"multilabel": True}, "several labels"),
        ({"workers": -1}, "workers"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        train(**settings)


@pytest.mark.parametrize("rows", [11, 2])
def test_every_row_is_evaluated_once_over_three_ranks(rows):
    split = split_of(rows)
    seen = [int(i) for rank in range(3) for batch in evaluation(split, rank=rank, world=3) for i in batch.index]
    assert sorted(seen) == sorted(split.index.tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_keeps_the_order_and_leaves_bad_images_out(workers):
    split = split_of(bad=(102, 109, 101, 100))  # the last batch is rows 8 to 10: 102, 101, 100
    with evaluation(split, workers=workers) as loader:
        for _ in range(2):
            batches = list(loader)
            assert [len(batch) for batch in batches] == [3, 4]
            assert torch.cat([b.index for b in batches]).tolist() == [110, 108, 107, 106, 105, 104, 103]
    for batch in batches:
        assert torch.equal(batch.label, batch.index % 3)
        assert torch.equal(batch.target, batch.label)
        assert torch.equal(batch.levels, torch.stack([batch.index % 3, batch.index % 2], 1))
        expected = torch.stack([PREPROCESS(NumberedImages()(int(i))) for i in batch.index])
        assert torch.equal(batch.images, PREPROCESS.normalize(expected))
    assert [key for key, _ in loader.skipped] == ["file 109", "file 102", "file 101", "file 100"]


def test_an_evaluation_of_which_nothing_can_be_read_is_an_error():
    with pytest.raises(ValueError, match="none of the 3 images of train"):
        list(evaluation(split_of(3, bad=(100, 101, 102))))


@pytest.mark.parametrize(
    ("cores", "local", "pixels", "workers"),
    [
        (1, 1, 8, 0),
        (2, 1, 8, 0),
        (2, 1, 65, 1),
        (8, 1, 64, 2),
        (8, 1, 65, 7),
        (64, 1, 65, 16),
        (64, 8, 65, 7),
        (2, 4, 65, 0),
    ],
)
def test_the_number_of_workers_follows_cores_and_image_size(monkeypatch, cores, local, pixels, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    split = replace(split_of(bad=(110,)), reader=NumberedImages(frozenset({110}), pixels))
    assert auto_workers(split) == workers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_on_an_accelerator_equal_those_on_the_host(workers):
    with train(replace(SHIFTED, cutmix=1.0), split_of(bad=(104,)), device="cuda", workers=workers, views=2) as loader:
        ours = list(loader)
    theirs = list(train(replace(SHIFTED, cutmix=1.0), split_of(bad=(104,)), views=2))
    assert {view.device.type for batch in ours for view in batch.views} == {"cuda"}
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip((*a.views, a.target, a.label, a.index), (*b.views, b.target, b.label, b.index), strict=True):
            torch.testing.assert_close(x.cpu(), y)
