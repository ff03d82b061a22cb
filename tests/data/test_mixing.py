"""Mixup and CutMix: pairs, shares, and independence of how a batch is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from vitrail.data.augment.mixing import draw_mix, mix, partners, soft
from vitrail.data.config import AugmentConfig

MIXUP = AugmentConfig(mixup=0.8)
CUTMIX = AugmentConfig(cutmix=1.0)
BOTH = AugmentConfig(mixup=0.8, cutmix=1.0)
IMAGES = torch.randn(8, 3, 12, 10, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 4, 0, 2, 2])


def mixed(config, images=IMAGES, labels=LABELS, step=0, **more):
    return mix(images, labels, classes=5, config=config, seed=1, step=step, **more)


@pytest.mark.parametrize("config", [MIXUP, CUTMIX, BOTH])
def test_targets_sum_to_one(config):
    for step in range(20):
        torch.testing.assert_close(mixed(config, step=step)[1].sum(1), torch.ones(8), rtol=0, atol=2e-7)


def test_cutmix_weights_equal_the_area_of_the_box_counted_in_pixels():
    numbered = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 3, 12, 10)
    for step in range(50):
        images, target = mixed(CUTMIX, numbered, torch.arange(8) % 5, step=step)
        for row in range(8):
            foreign = images[row] != row
            assert torch.equal(images[row][foreign], torch.full((int(foreign.sum()),), float(row ^ 1)))
            expected = torch.zeros(5)
            expected[row % 5] += 1 - foreign[0].float().mean()
            expected[(row ^ 1) % 5] += foreign[0].float().mean()
            torch.testing.assert_close(target[row], expected, rtol=0, atol=2e-7)


def test_a_cutmix_box_is_one_rectangle():
    ones = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 12, 10)
    for step in range(50):
        hole = mixed(CUTMIX, ones, torch.tensor([0, 1]), step=step)[0][0, 0]
        assert torch.equal(hole, hole.amax(1, keepdim=True) * hole.amax(0, keepdim=True))


def test_mixup_blends_each_place_with_its_neighbour_symmetrically():
    images, target = mixed(MIXUP)
    share = draw_mix(MIXUP, 1, 0, 12, 10).share
    hot = torch.eye(5)[LABELS]
    for row in range(8):
        torch.testing.assert_close(images[row], (1 - share) * IMAGES[row] + share * IMAGES[row ^ 1])
        torch.testing.assert_close(target[row], (1 - share) * hot[row] + share * hot[row ^ 1])


@pytest.mark.parametrize("config", [MIXUP, CUTMIX, BOTH])
@pytest.mark.parametrize("cut", [2, 4, 6])
def test_a_batch_cut_into_pieces_is_mixed_as_the_whole(config, cut):
    for step in range(6):
        whole = mixed(config, step=step)
        first = mixed(config, IMAGES[:cut], LABELS[:cut], step=step)
        second = mixed(config, IMAGES[cut:], LABELS[cut:], step=step, place=cut)
        for joined, all_at_once in zip(zip(first, second, strict=True), whole, strict=True):
            assert torch.equal(torch.cat(joined), all_at_once)


@pytest.mark.parametrize("config", [MIXUP, CUTMIX])
def test_a_row_without_its_partner_is_left_exactly_alone_and_the_others_are_mixed_as_ever(config):
    kept = torch.tensor([0, 1, 3, 4, 5, 6])
    whole = mixed(config, step=2)
    images, target = mixed(config, IMAGES[kept], LABELS[kept], step=2, places=kept.numpy())
    for row, place in enumerate(kept.tolist()):
        if place in (3, 6):
            assert torch.equal(images[row], IMAGES[place])
            assert torch.equal(target[row], torch.eye(5)[LABELS[place]])
        else:
            assert torch.equal(images[row], whole[0][place])
            assert torch.equal(target[row], whole[1][place])


def test_partners_equal_a_brute_force_search():
    places = np.sort(np.random.default_rng(0).choice(60, 41, replace=False))
    expected = [next((r for r, q in enumerate(places) if q == p ^ 1), row) for row, p in enumerate(places)]
    assert partners(places).tolist() == expected


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0])
def test_shares_of_mixup_follow_the_beta_distribution(alpha):
    shares = [draw_mix(AugmentConfig(mixup=alpha), 0, step, 8, 8).share for step in range(3000)]
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def test_unclipped_cutmix_boxes_have_the_drawn_area():
    # With alpha 1 the share is uniform; the side of an unclipped box is its root, to within the rounding to pixels.
    sides = []
    for step in range(3000):
        top, left, bottom, right = draw_mix(CUTMIX, 0, step, 1000, 1000).box
        if top > 0 and left > 0 and bottom < 1000 and right < 1000:
            assert abs((bottom - top) - (right - left)) == 0
            sides.append(bottom - top)
    assert len(sides) > 300
    # A box of side s of the image is not clipped with probability (1 - s)^2: the density of s becomes 12 s (1 - s)^2.
    assert stats.kstest(np.array(sides) / 1000, stats.beta(2, 3).cdf).pvalue > 1e-3


@pytest.mark.parametrize("switch", [0.0, 0.3, 1.0])
def test_cutmix_is_chosen_with_the_switch_probability(switch):
    config = AugmentConfig(mixup=0.8, cutmix=1.0, mix_switch=switch)
    cuts = sum(draw_mix(config, 0, step, 8, 8).box is not None for step in range(2000))
    assert abs(cuts - 2000 * switch) <= 4 * (2000 * switch * (1 - switch)) ** 0.5


@pytest.mark.parametrize(("config", "cut"), [(MIXUP, False), (CUTMIX, True)])
def test_with_one_of_the_two_off_the_other_is_always_taken(config, cut):
    assert {draw_mix(config, 0, step, 8, 8).box is not None for step in range(200)} == {cut}


def test_draws_depend_on_seed_and_step():
    assert len({draw_mix(MIXUP, seed, step, 8, 8).share for seed in range(5) for step in range(5)}) == 25


def test_several_labels_are_mixed_linearly():
    labels = torch.tensor([[1, 1, 0], [0, 1, 1]])
    target = mix(IMAGES[:2], labels, classes=3, config=MIXUP, seed=1, step=0)[1]
    share = draw_mix(MIXUP, 1, 0, 12, 10).share
    torch.testing.assert_close(target, torch.tensor([[1 - share, 1.0, share], [share, 1.0, 1 - share]]))


def test_without_mixing_images_stay_and_targets_become_weights():
    images, target = mixed(AugmentConfig())
    assert images is IMAGES
    assert torch.equal(target, torch.eye(5)[LABELS])


def test_the_input_is_not_written_to():
    before = IMAGES.clone()
    for step in range(4):
        mixed(BOTH, step=step)
    assert torch.equal(IMAGES, before)


def test_soft_targets_equal_one_hot():
    assert torch.equal(soft(LABELS, 7), torch.nn.functional.one_hot(LABELS, 7).float())
