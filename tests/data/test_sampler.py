"""The training stream: every image once an epoch, batches always full, any step from nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from timm.data.distributed_sampler import RepeatAugSampler

from vitrail.data.loading.sampler import BatchSampler, Draw


@pytest.mark.parametrize(("rows", "batch"), [(10, 5), (10, 3), (7, 1), (5, 12), (1, 4)])
def test_every_row_comes_once_an_epoch_and_every_batch_is_full(rows, batch):
    order = BatchSampler(rows, batch, seed=3)
    steps = [order.draws(step) for step in range(5 * rows)]
    assert {len(step) for step in steps} == {batch}
    stream = [draw for step in steps for draw in step]
    for epoch in range(len(stream) // rows):
        part = stream[epoch * rows : (epoch + 1) * rows]
        assert sorted(part) == [Draw(row, epoch, 0) for row in range(rows)]


@pytest.mark.parametrize("sampling", ["shuffle", "balanced"])
def test_a_step_needs_no_steps_before_it(sampling):
    labels = np.array([0, 0, 0, 1, 1, 2])
    walked = BatchSampler(6, 4, seed=1, sampling=sampling, labels=labels)
    steps = [walked.draws(step) for step in range(20)]
    for step in (19, 0, 7, 13):
        assert BatchSampler(6, 4, seed=1, sampling=sampling, labels=labels).draws(step) == steps[step]
        assert walked.draws(step) == steps[step]


def test_parts_of_a_step_are_slices_of_it():
    order = BatchSampler(5, 12, seed=0)
    assert order.draws(2, 3, 6) == order.draws(2)[3:9]
    assert order.draws(2, 8) == order.draws(2)[8:]


def test_seeds_and_epochs_are_shuffled_differently():
    orders = {
        tuple(d.row for d in BatchSampler(50, 50, seed=seed).draws(step)) for seed in range(3) for step in range(3)
    }
    assert len(orders) == 9


def test_the_first_row_of_an_epoch_is_uniform():
    order = BatchSampler(8, 8, seed=0)
    counts = Counter(order.draws(step)[0].row for step in range(4000))
    deviation = (4000 / 8 * 7 / 8) ** 0.5
    assert all(abs(counts[row] - 500) < 4.5 * deviation for row in range(8))


def test_balanced_sampling_draws_classes_equally_often():
    labels = np.array([0] * 90 + [1] * 9 + [4] * 1)  # classes 2 and 3 have no images
    order = BatchSampler(100, 100, seed=0, sampling="balanced", labels=labels)
    counts = Counter(int(labels[draw.row]) for step in range(60) for draw in order.draws(step))
    deviation = (6000 / 3 * 2 / 3) ** 0.5
    assert set(counts) == {0, 1, 4}
    assert all(abs(count - 2000) < 4 * deviation for count in counts.values())


def test_balanced_sampling_cycles_through_the_rows_of_a_class():
    labels = np.array([0] * 20 + [1] * 3)
    order = BatchSampler(23, 23, seed=5, sampling="balanced", labels=labels)
    for epoch in range(10):
        rows = [draw.row for draw in order.draws(epoch)]
        for members in (range(20), range(20, 23)):
            times = [rows.count(row) for row in members]
            assert max(times) - min(times) <= 1


@pytest.mark.parametrize("multilabel", [False, True])
def test_repeat_counts_earlier_occurrences_in_the_epoch(multilabel):
    labels = np.array([0] * 9 + [1])
    held = np.eye(2, dtype=np.int64)[labels]
    order = BatchSampler(10, 7, seed=2, sampling="balanced", labels=held if multilabel else labels)
    seen: Counter[tuple[int, int]] = Counter()
    for draw in (d for step in range(40) for d in order.draws(step)):
        assert draw.repeat == seen[draw.row, draw.epoch]
        seen[draw.row, draw.epoch] += 1
    assert max(seen.values()) > 1


def test_rows_with_several_labels_are_weighed_by_the_mean_inverse_frequency_of_their_labels():
    labels = np.array([[1, 0], [1, 0], [1, 0], [1, 1], [0, 0], [0, 0]])
    # frequencies: label 0 four times, label 1 once, no label twice
    weights = np.array([1 / 4, 1 / 4, 1 / 4, (1 / 4 + 1) / 2, 1 / 2, 1 / 2])
    order = BatchSampler(6, 6, seed=0, sampling="balanced", labels=labels)
    counts = Counter(draw.row for step in range(2000) for draw in order.draws(step))
    for row, share in enumerate(weights / weights.sum()):
        assert abs(counts[row] - 12000 * share) < 4 * (12000 * share * (1 - share)) ** 0.5


@pytest.mark.parametrize(("rows", "batch", "repeats"), [(12, 6, 3), (60, 24, 3), (31, 8, 3), (50, 12, 4), (9, 9, 9)])
def test_each_drawn_row_comes_repeats_times_and_an_epoch_is_as_long_as_ever(rows, batch, repeats):
    order = BatchSampler(rows, batch, seed=3, repeats=repeats)
    draws = [draw for step in range(4 * rows) for draw in order.draws(step)]
    epochs = Counter(draw.epoch for draw in draws)
    for epoch in list(epochs)[:-1]:
        assert epochs[epoch] == rows
        times = Counter(draw.row for draw in draws if draw.epoch == epoch)
        assert len(times) == -(-rows // repeats)
        assert sorted(times.values()) == [rows % repeats] * (rows % repeats > 0) + [repeats] * (rows // repeats)


@pytest.mark.parametrize("sampling", ["shuffle", "balanced"])
def test_copies_have_keys_of_their_own(sampling):
    labels = np.array([0] * 20 + [1] * 3)
    order = BatchSampler(23, 12, seed=1, sampling=sampling, labels=labels, repeats=3)
    draws = [draw for step in range(50) for draw in order.draws(step)]
    assert len(set(draws)) == len(draws)


def test_a_batch_holds_what_the_samplers_of_all_processes_hold_together():
    """timm's RepeatAugSampler (DeiT's), with its shuffling replaced by ours."""
    rows, batch, world, repeats = 48, 12, 4, 3
    order = BatchSampler(rows, batch, seed=0, repeats=repeats)
    permutation = BatchSampler(rows, rows, seed=0).table(0)[:, 0]
    each = []
    for rank in range(world):
        sampler = RepeatAugSampler(range(rows), world, rank, shuffle=False, num_repeats=repeats, selected_round=0)
        each.append([int(permutation[i]) for i in sampler])
    assert len(each[0]) == rows // world
    for step in range(rows // batch):
        part = slice(step * batch // world, (step + 1) * batch // world)
        theirs = sorted(row for own in each for row in own[part])
        assert sorted(draw.row for draw in order.draws(step)) == theirs


@pytest.mark.parametrize("batch", [6, 12, 16, 18, 32, 50, 64, 1024])
@pytest.mark.parametrize("sampling", ["shuffle", "balanced"])
def test_no_image_is_mixed_with_itself_and_its_copies_have_other_partners(batch, sampling):
    rows = max(1999, batch)
    labels = np.arange(rows) % 7
    order = BatchSampler(rows, batch, seed=0, sampling=sampling, labels=labels, repeats=3)
    for step in range(150):
        table = order.table(step)
        even, odd = table[0::2, 0], table[1::2, 0]
        assert (even != odd).all()
        if batch >= 12:
            partner = dict(zip(map(tuple, table[0::2].tolist()), odd.tolist(), strict=True))
            partner |= dict(zip(map(tuple, table[1::2].tolist()), even.tolist(), strict=True))
            met: dict[tuple[int, int], set[int]] = {}
            for (row, epoch, _), other in partner.items():
                met.setdefault((row, epoch), set()).add(other)
            assert all(len(others) > 1 for key, others in met.items() if _copies(table, key) == 3)


def _copies(table: np.ndarray, key: tuple[int, int]) -> int:
    return int(((table[:, 0] == key[0]) & (table[:, 1] == key[1])).sum())


@pytest.mark.parametrize("sampling", ["shuffle", "balanced"])
def test_repeats_leave_steps_independent_and_their_parts_slices(sampling):
    labels = np.arange(50) % 3
    made = [BatchSampler(50, 16, seed=1, sampling=sampling, labels=labels, repeats=3) for _ in range(2)]
    steps = [made[0].draws(step) for step in range(12)]
    for step in (11, 0, 7):
        assert made[1].draws(step) == steps[step]
        assert made[1].draws(step, 4, 8) == steps[step][4:12]


def test_balanced_repeats_keep_classes_equally_often():
    labels = np.array([0] * 90 + [1] * 10)
    order = BatchSampler(100, 50, seed=0, sampling="balanced", labels=labels, repeats=2)
    counts = Counter(int(labels[draw.row]) for step in range(120) for draw in order.draws(step))
    # 3000 independent draws of a class, each counted twice
    assert abs(counts[0] - 3000) < 4 * 2 * (3000 / 4) ** 0.5


def test_at_most_two_epochs_are_kept():
    order = BatchSampler(4, 4, seed=0)
    for step in range(9):
        order.draws(step)
    assert len(order._epochs) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 0, "batch": 4}, "nothing to train on"),
        ({"rows": 4, "batch": 0}, "at least 1"),
        ({"rows": 4, "batch": 4, "sampling": "random"}, "shuffle, balanced"),
        ({"rows": 4, "batch": 4, "sampling": "balanced"}, "needs one label"),
        ({"rows": 4, "batch": 8, "repeats": 5}, "data.repeats: 5 copies .* use 1 to 4"),
        ({"rows": 9, "batch": 4, "repeats": 5}, "use 1 to 4"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BatchSampler(seed=0, **settings)


def test_places_outside_the_batch_are_refused():
    with pytest.raises(ValueError, match="a batch has 4"):
        BatchSampler(9, 4, seed=0).draws(0, 2, 3)
