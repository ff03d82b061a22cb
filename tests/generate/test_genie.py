"""GeNIe: steps, seeds, the choice of r, prompts, budgets, and the same path through a pipeline of diffusers."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vitrail.data.augment.pixel_ops import normal_noise
from vitrail.data.counter import seed_of
from vitrail.generate.diffusion_model import OwnDiffuser, steps_run
from vitrail.generate.generation_methods import (
    CANDIDATES,
    METHODS,
    Request,
    Tools,
    ada_evaluations,
    equal_compute,
    generate,
    genie,
    genie_ada,
    prompts_for,
    prototypes_of,
)
from vitrail.generate.pipelines import PipelineDiffuser, load_pipeline, square
from vitrail.measure.hard_negatives import axis_position, largest_jump
from vitrail.model.build import create_model

SMALL = {"width": 8, "multipliers": (1, 2), "depth": 1, "heads": 2, "image_size": 8}
LEVELS = {0.3: 15, 0.5: 25, 0.6: 30, 0.7: 35, 0.8: 40, 0.9: 45}


def projections(source: Tensor, edited: Tensor, target: Tensor, formula: str = "text") -> Tensor:
    """As GeNIe-Ada calls it: [batch, features], [batch, candidates, features], [batch, features]."""
    return axis_position(edited, source[:, None], target[:, None], printed=formula == "box")


@pytest.fixture
def own() -> OwnDiffuser:
    """A denoiser with random weights: what it makes is no picture, but depends on all that it should."""
    model = create_model("denoiser_32", classes=["cat", "dog", "fox"], **SMALL)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return OwnDiffuser(model, steps=50)


def pictures(count: int, seed: int = 0, side: int = 8) -> Tensor:
    return torch.randint(0, 256, (count, 3, side, side), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def counted(diffuser: OwnDiffuser, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every call of the network, as they come."""
    rows: list[int] = []
    forward = diffuser.network.forward

    def counting(images: Tensor, time: Tensor, label: Tensor) -> Tensor:
        rows.append(len(images))
        return forward(images, time, label)

    monkeypatch.setattr(diffuser.network, "forward", counting)
    return rows


# Steps, and the two ends of r


@pytest.mark.parametrize(("r", "steps"), LEVELS.items())
def test_steps_run_are_the_floor_of_r_times_all(
    own: OwnDiffuser, r: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = counted(own, monkeypatch)
    own(pictures(2), torch.tensor([0, 1]), r, torch.arange(2))
    assert rows == [4] * steps  # images with and without a class are one call
    assert own.evaluations(r) == 2 * steps


def test_without_guidance_only_the_class_is_asked_for(own: OwnDiffuser, monkeypatch: pytest.MonkeyPatch) -> None:
    own.guidance = 1.0
    rows = counted(own, monkeypatch)
    own(pictures(2), torch.tensor([0, 1]), 0.5, torch.arange(2))
    assert rows == [2] * 25
    assert own.evaluations(0.5) == 25


def test_guidance_goes_past_the_class_away_from_no_class(own: OwnDiffuser, monkeypatch: pytest.MonkeyPatch) -> None:
    images, asked = pictures(2).float() / 255, (torch.tensor([0, 1]), 0.5, torch.arange(2))
    own.guidance = 3.0
    found, said, none = own(images, *asked), own.network.forward, own.network.no_class

    def by_hand(images: Tensor, time: Tensor, label: Tensor) -> Tensor:
        free = said(images, time, torch.full_like(label, none))
        return free + 3 * (said(images, time, label) - free)

    own.guidance = 1.0
    assert (own(images, *asked) - found).abs().max() > 1e-3
    monkeypatch.setattr(own.network, "forward", by_hand)
    torch.testing.assert_close(own(images, *asked), found, rtol=0, atol=1e-5)  # 25 steps in batches of 2 and of 4


def test_shares_that_floats_round_down_are_whole_steps() -> None:
    assert 0.29 * 100 < 29
    assert steps_run(0.29, 100) == 29


def test_r_of_nothing_gives_the_source_back(own: OwnDiffuser) -> None:
    images = pictures(3)
    for r in (0.0, 0.019):
        assert torch.equal(own(images, torch.tensor([0, 1, 2]), r, torch.arange(3)), images)


def test_a_little_noise_leaves_the_source_nearly_as_it_was(own: OwnDiffuser) -> None:
    images, far = pictures(3), []
    for r in (0.02, 0.1, 0.3, 0.6):
        found = own(images, torch.tensor([0, 1, 2]), r, torch.arange(3))
        far.append(float((found.float() - images.float()).abs().mean()))
    assert far == sorted(far)
    assert far[0] < 10


def test_r_of_one_does_not_depend_on_the_source(own: OwnDiffuser) -> None:
    target, seeds = torch.tensor([0, 1]), torch.tensor([7, 8])
    found = own(pictures(2), target, 1.0, seeds)
    assert torch.equal(found, own(pictures(2, seed=5), target, 1.0, seeds))
    assert torch.equal(found, own.txt2img(target, seeds))


def test_r_of_one_begins_where_txt2img_does(own: OwnDiffuser) -> None:
    seeds = torch.tensor([3, 4])
    start = own.start(pictures(2), 1.0, seeds)
    assert torch.equal(start, own.start(None, 1.0, seeds))
    assert torch.equal(start, normal_noise(seeds, 3, 8, 8))


def test_the_way_begins_with_the_image_at_time_r(own: OwnDiffuser) -> None:
    images, seeds = pictures(2), torch.tensor([3, 4])
    angle = torch.tensor(0.6 * torch.pi / 2 * 0.999)
    expected = angle.cos() * (images / 127.5 - 1) + angle.sin() * normal_noise(seeds, 3, 8, 8)
    torch.testing.assert_close(own.start(images, 0.6, seeds), expected)


def test_r_on_stable_diffusions_schedule_is_equal_noise_on_the_models_own(own: OwnDiffuser) -> None:
    stated = OwnDiffuser(own.model, steps=50, r_schedule="scaled_linear")
    asked = (torch.tensor([0, 1]), torch.arange(2))
    for r in (0.3, 0.8):
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
        kept = float((1 - betas)[: round(1000 * r) + 1].prod())
        time = math.acos(kept**0.5) / (math.pi / 2 * 0.999)  # the cosine at which as much of the signal is kept
        found = stated(pictures(2), asked[0], r, asked[1])
        assert torch.equal(found, own(pictures(2), asked[0], time, asked[1]))
        assert not torch.equal(found, own(pictures(2), asked[0], r, asked[1]))
        assert stated.evaluations(r) == 2 * math.floor(50 * time)
    assert torch.equal(stated(pictures(2), asked[0], 1.0, asked[1]), own.txt2img(*asked))
    assert stated.evaluations(1.0) == 100


def test_r_on_the_models_own_schedule_is_not_changed() -> None:
    model = create_model("denoiser_32", classes=["cat", "dog"], schedule="scaled_linear", **SMALL)
    plain, stated = OwnDiffuser(model), OwnDiffuser(model, r_schedule="scaled_linear")
    assert [stated.time(r) for r in LEVELS] == list(LEVELS) == [plain.time(r) for r in LEVELS]


# Seeds


def test_the_same_seed_makes_the_same_image_and_another_seed_another(own: OwnDiffuser) -> None:
    images, target = pictures(2), torch.tensor([0, 1])
    first = own(images, target, 0.6, torch.tensor([1, 2]))
    torch.manual_seed(1234)
    assert torch.equal(own(images, target, 0.6, torch.tensor([1, 2])), first)
    other = own(images, target, 0.6, torch.tensor([3, 2]))
    assert not torch.equal(other[0], first[0])
    assert torch.equal(other[1], first[1])


def test_noise_depends_on_the_seed_alone_to_the_bit(own: OwnDiffuser) -> None:
    images, seeds = pictures(5), torch.tensor([9, 4, 7, 1, 2**62])
    whole = own.start(images, 0.7, seeds)
    order = torch.tensor([3, 0, 4])
    assert torch.equal(own.start(images[order], 0.7, seeds[order]), whole[order])


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_an_image_does_not_depend_on_the_batch_it_is_made_in(own: OwnDiffuser, batch: int) -> None:
    images, target = pictures(5).float() / 255, torch.tensor([0, 1, 2, 0, 1])
    seeds = torch.arange(5)
    whole = own(images, target, 0.6, seeds)
    own.batch = batch
    order = torch.tensor([4, 1, 0, 3, 2])
    found = own(images[order], target[order], 0.6, seeds[order])
    # Convolutions over batches of another size are sums in another order; 30 steps carry that on.
    torch.testing.assert_close(found, whole[order], rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_graph_of_the_network_makes_what_the_network_makes(own: OwnDiffuser, guidance: float) -> None:
    plain = OwnDiffuser(own.model, steps=10, guidance=guidance, batch=4, device="cuda")
    graph = OwnDiffuser(own.model, steps=10, guidance=guidance, batch=4, exact=True)
    images, target, seeds = pictures(10), torch.arange(10) % 3, torch.arange(10)
    for r in (0.4, 0.9):
        made = graph(images, target, r, seeds)
        assert int((made.int() - plain(images, target, r, seeds).int()).abs().max()) <= 1
        assert torch.equal(made[5:8], graph(images[5:8], target[5:8], r, seeds[5:8]))
    assert not torch.equal(graph.txt2img(target, seeds), graph.txt2img(target, seeds + 10))
    assert len(graph._graphs) == 1


def test_an_exact_diffuser_always_computes_as_many_rows(own: OwnDiffuser, monkeypatch: pytest.MonkeyPatch) -> None:
    own.exact, own.batch = True, 4
    images, target, seeds = pictures(4), torch.tensor([0, 1, 2, 0]), torch.arange(4)
    whole = own(images, target, 0.5, seeds)
    rows = counted(own, monkeypatch)
    assert torch.equal(own(images[:3], target[:3], 0.5, seeds[:3]), whole[:3])
    assert set(rows) == {8}


def test_floats_come_back_as_floats_and_bytes_as_bytes(own: OwnDiffuser) -> None:
    images, target, seeds = pictures(2), torch.tensor([0, 1]), torch.arange(2)
    as_bytes = own(images, target, 0.5, seeds)
    as_floats = own(images.float() / 255, target, 0.5, seeds)
    assert (as_bytes.dtype, as_floats.dtype) == (torch.uint8, torch.float32)
    assert (as_floats * 255 - as_bytes.float()).abs().max() < 0.51


@pytest.mark.parametrize(
    ("images", "target", "r", "message"),
    [
        (pictures(1, side=16), [0], 0.5, "8x8 pixels, these have 16x16"),
        (pictures(1), [3], 0.5, "places in the 3 classes"),
        (pictures(1), [0, 1], 0.5, "need as many targets"),
        (pictures(1), [0], 1.5, "between 0 and 1"),
        (pictures(1).long(), [0], 0.5, "bytes .uint8. or floats"),
    ],
)
def test_what_cannot_be_made_is_refused(
    own: OwnDiffuser, images: Tensor, target: list[int], r: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        own(images, torch.tensor(target), r, torch.arange(1))


def test_a_classifier_is_no_diffuser() -> None:
    with pytest.raises(ValueError, match="vitrail train small-diffusion"):
        OwnDiffuser(create_model("vit_tiny_32", classes=2, depth=1, width=48, heads=3))


# The choice of r


def embedded(batch: int = 3, features: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    source, target = torch.randn(2, batch, features, dtype=torch.float64).unbind(0)
    return source, torch.randn(batch, 5, features, dtype=torch.float64), target


def test_the_projection_is_nothing_at_the_source_and_all_at_the_target() -> None:
    source, _, target = embedded()
    ends = torch.stack([source, target], 1)
    found = projections(source, ends, target)
    torch.testing.assert_close(found, torch.stack([torch.zeros(3).double(), (target - source).norm(dim=1)], 1))


def test_the_projection_does_not_see_shifts_and_turns() -> None:
    source, edited, target = embedded()
    turn, shift = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0], torch.randn(6, dtype=torch.float64)
    moved = [x @ turn + shift for x in (source, edited, target)]
    torch.testing.assert_close(projections(*moved), projections(source, edited, target))


def test_the_projection_grows_with_the_scale_and_the_choice_does_not_change() -> None:
    source, edited, target = embedded()
    first = projections(source, edited, target)
    wider = projections(3 * source, 3 * edited, 3 * target)
    torch.testing.assert_close(wider, 3 * first)
    assert torch.equal(largest_jump(wider), largest_jump(first))


@pytest.mark.parametrize("jump", [1, 2, 3, 4])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_planted_jump_is_found(jump: int, sign: int) -> None:
    curve = 0.1 * torch.arange(5.0)
    curve[jump:] += sign * 2
    assert largest_jump(curve[None]).tolist() == [jump]


def test_the_first_candidate_is_never_chosen() -> None:
    curves = torch.randn(1000, 5)
    assert set(largest_jump(curves).tolist()) == {1, 2, 3, 4}


def test_box_and_text_can_disagree() -> None:
    """Text: places 1, 2 and 9 along the axis, so the second jump is larger. Box: cosines, of which the first is."""
    source, target = torch.zeros(1, 2), torch.tensor([[10.0, 0.0]])
    edited = torch.tensor([[[1.0, 0.0], [2.0, 3.0], [9.0, 1.0]]])
    text, box = (projections(source, edited, target, formula) for formula in ("text", "box"))
    torch.testing.assert_close(text, torch.tensor([[1.0, 2.0, 9.0]]))
    torch.testing.assert_close(box, 10 * torch.tensor([[1.0, 2 / 13**0.5, 9 / 82**0.5]]))
    assert largest_jump(text).tolist() == [2]
    assert largest_jump(box).tolist() == [1]


class Fading:
    """A diffuser whose images are known: the colour of the target from a given r on, the source's before."""

    name, classes, steps = "fading", ("a", "b"), 50

    def __init__(self, switches: dict[int, float]) -> None:
        self.switches, self.calls = switches, 0

    def __call__(self, images: Tensor, target: Tensor, r: float, seeds: Tensor) -> Tensor:
        self.calls += 1
        made = images.clone()
        for i, seed in enumerate(seeds.tolist()):
            if r >= self.switches[seed]:
                made[i] = 255 * int(target[i])
        return made

    def txt2img(self, target: Tensor, seeds: Tensor) -> Tensor:
        return (255 * target.to(torch.uint8)).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)

    def evaluations(self, r: float) -> int:
        return steps_run(r, self.steps)


def by_colour(images: Tensor) -> Tensor:
    level = images.float().mean((1, 2, 3)) / 255
    return torch.stack([1 - level, level], 1)


def test_genie_ada_keeps_the_image_just_after_the_switch_of_each() -> None:
    switches = {0: 0.6, 1: 0.7, 2: 0.8, 3: 0.9}
    diffuser = Fading(switches)
    images, target = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.ones(4, dtype=torch.int64)
    found = genie_ada(diffuser, images, target, torch.arange(4), embed=by_colour, prototypes=torch.eye(2))
    assert found.r.tolist() == pytest.approx(list(switches.values()))
    assert (found.images == 255).all()
    assert diffuser.calls == len(CANDIDATES)  # each once, and what is kept is one of them
    assert torch.equal(found.images, found.candidates[found.index, torch.arange(4)])


class Labelled(Fading):
    """Images that say which r they were made with."""

    def __call__(self, images: Tensor, target: Tensor, r: float, seeds: Tensor) -> Tensor:
        return torch.full_like(images, round(100 * r))


def chosen_r(places: list[tuple[float, float]], aim: tuple[float, float], **options: Any) -> float:
    """What GeNIe-Ada takes of r 0.5, 0.6 and 0.7, given where the source and what is made with each of them lie."""
    where = dict(zip((0, 50, 60, 70), places, strict=True))

    def embed(images: Tensor) -> Tensor:
        return torch.tensor([where[level] for level in images[:, 0, 0, 0].tolist()])

    images, one = torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.ones(1, dtype=torch.int64)
    options |= {"embed": embed, "prototypes": torch.tensor([(0.0, 0.0), aim]), "candidates": (0.5, 0.6, 0.7)}
    return round(float(genie_ada(Labelled({}), images, one, one, **options).r), 6)


def test_the_lengths_of_embeddings_choose_only_where_they_are_kept() -> None:
    """From (1, 0) to (0, 1): 1 - x + y is -1, 0.2, 1.1 of the candidates, and 0.84, 0.22, 1.45 of their directions."""
    places = [(1.0, 0.0), (10.0, 8.0), (1.0, 0.2), (0.1, 0.2)]
    assert chosen_r(places, (0.0, 1.0)) == 0.7
    assert chosen_r(places, (0.0, 1.0), unit=False) == 0.6


def test_the_text_chooses_unless_the_box_is_asked_for() -> None:
    """The places of the example above, where the two disagree."""
    places = [(0.0, 0.0), (1.0, 0.0), (2.0, 3.0), (9.0, 1.0)]
    assert chosen_r(places, (10.0, 0.0), unit=False) == 0.7
    assert chosen_r(places, (10.0, 0.0), unit=False, formula="box") == 0.6


@pytest.mark.parametrize("candidates", [(0.5,), (0.6, 0.5), (0.5, 0.5)])
def test_candidates_that_have_no_jump_are_refused(candidates: tuple[float, ...]) -> None:
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    options: dict[str, Any] = {"embed": by_colour, "prototypes": torch.eye(2), "candidates": candidates}
    with pytest.raises(ValueError, match="at least two, from small to large"):
        genie_ada(Fading({0: 0.6}), images, torch.tensor([1]), torch.tensor([0]), **options)


def test_prototypes_are_means_of_unit_vectors() -> None:
    images = torch.stack([torch.full((3, 8, 8), level, dtype=torch.uint8) for level in (0, 51, 255)])
    found = prototypes_of(by_colour, images, torch.tensor([0, 0, 1]), 2)
    second = torch.tensor([0.8, 0.2]) / (0.8**2 + 0.2**2) ** 0.5
    torch.testing.assert_close(found, torch.stack([(torch.tensor([1.0, 0.0]) + second) / 2, torch.tensor([0.0, 1.0])]))
    with pytest.raises(ValueError, match="classes 2 have no image"):
        prototypes_of(by_colour, images, torch.tensor([0, 0, 1]), 3)


# Budgets


def all_others(images: Tensor, labels: Tensor, classes: int, *, seed: int = 0) -> Request:
    """Every image of every other class, once for each class: K (N - 1) new images per class, N-way K-shot.

    Raises `ValueError` for a class without images: nothing of its own can be changed.
    """
    labels = labels.to(torch.int64)
    places = [(labels == c).nonzero()[:, 0] for c in range(classes)]
    empty = [str(c) for c, own in enumerate(places) if not len(own)]
    if empty:
        raise ValueError(f"classes {', '.join(empty[:5])} have no image; every class needs one")
    source = [(labels != c).nonzero()[:, 0] for c in range(classes)]
    own = [places[c][torch.arange(len(source[c])) % len(places[c])] for c in range(classes)]
    target = torch.repeat_interleave(torch.arange(classes), torch.tensor([len(rows) for rows in source]))
    rows = torch.cat(source)
    # Seeds follow from what is made of what, not from the place in the list: part of a request is made as the whole.
    seeds = [seed_of("genie", seed, int(s), int(t)) >> 1 for s, t in zip(rows, target, strict=True)]
    return Request(images, labels, rows, torch.cat(own), target, torch.tensor(seeds, dtype=torch.int64), classes)


def few_shot(way: int, shot: int) -> tuple[Tensor, Tensor]:
    return pictures(way * shot), torch.arange(way * shot) % way


@pytest.mark.parametrize(("way", "shot", "each"), [(5, 1, 4), (5, 5, 20), (20, 1, 19)])
def test_every_image_of_every_other_class_becomes_one(way: int, shot: int, each: int) -> None:
    images, labels = few_shot(way, shot)
    request = all_others(images, labels, way)
    assert torch.bincount(request.target).tolist() == [each] * way
    assert (labels[request.source] != request.target).all()
    assert (labels[request.own] == request.target).all()
    pairs = list(zip(request.source.tolist(), request.target.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert len(set(request.seeds.tolist())) == len(pairs)


def test_the_choice_of_r_costs_what_its_candidates_cost(own: OwnDiffuser) -> None:
    whole = own.evaluations(1.0)
    assert ada_evaluations(own, (0.6, 0.7, 0.8)) == pytest.approx(2.1 * whole)
    assert ada_evaluations(own) == pytest.approx(3.5 * whole)
    assert equal_compute(ada_evaluations(own, (0.6, 0.7, 0.8)), whole) == 2


def test_all_methods_have_the_same_budget(own: OwnDiffuser) -> None:
    own.steps = 10
    images, labels = few_shot(3, 2)
    request = all_others(images, labels, 3)
    prototypes = prototypes_of(by_colour, images, labels, 3)
    tools = Tools(own, by_colour, prototypes)
    made = {name: generate(name, request, tools) for name in METHODS}
    for one in made.values():
        assert one.images.shape == (12, 3, 8, 8)
        assert one.target.bincount().tolist() == [4, 4, 4]
        assert one.images.dtype == torch.uint8
        torch.testing.assert_close(one.weights.sum(1), torch.ones(12))
    costs = {name: one.evaluations for name, one in made.items() if one.evaluations}
    assert costs == {"img2img_low": 6, "img2img_high": 14, "txt2img": 20, "genie": 16, "genie_ada": 70}
    again = {name: generate(name, request, tools).images for name in METHODS}
    assert all(torch.equal(again[name], one.images) for name, one in made.items())


def test_genie_starts_from_other_classes_and_img2img_from_its_own(own: OwnDiffuser) -> None:
    images, labels = few_shot(3, 1)
    request = all_others(images, labels, 3)
    tools = Tools(own, r=0.7)
    sources, seeds = request.images[request.source], request.seeds
    assert torch.equal(generate("genie", request, tools).images, genie(own, sources, request.target, seeds, r=0.7))
    expected = own(request.images[request.own], request.target, 0.7, seeds)
    assert torch.equal(generate("img2img_high", request, tools).images, expected)


def test_mixtures_are_of_both_images_as_their_labels_say() -> None:
    images = torch.stack([torch.full((3, 8, 8), level, dtype=torch.uint8) for level in (0, 200)])
    request = all_others(images, torch.tensor([0, 1]), 2)
    for name in ("mixup", "cutmix"):
        made = generate(name, request)
        bright = made.images.float().mean((1, 2, 3)) / 200
        torch.testing.assert_close(bright, made.weights[:, 1], rtol=0, atol=0.5 / 200 + 1e-6)  # bytes are rounded


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_of_a_mixture_the_class_it_is_kept_as_has_the_larger_part(name: str) -> None:
    images = torch.stack([torch.full((3, 8, 8), level, dtype=torch.uint8) for level in (0, 200)])
    once = all_others(images, torch.tensor([0, 1]), 2)
    many = {n: getattr(once, n).repeat(60) for n in ("source", "own", "target")}
    made = generate(name, replace(once, **many, seeds=torch.arange(len(many["target"]))))
    share = made.weights.gather(1, made.target[:, None])
    assert share.min() >= 0.5
    assert share.unique().numel() > 10
    bright = made.images.float().mean((1, 2, 3)) / 200
    torch.testing.assert_close(bright, made.weights[:, 1], rtol=0, atol=0.5 / 200 + 1e-6)


def test_methods_say_what_they_need() -> None:
    request = all_others(*few_shot(3, 1), 3)
    with pytest.raises(ValueError, match="genie needs a diffusion model"):
        generate("genie", request)
    with pytest.raises(ValueError, match="needs embeddings"):
        generate("genie_ada", request, Tools(Fading({})))
    with pytest.raises(ValueError, match="did you mean 'mixup'"):
        generate("mixip", request)


# Prompts


def test_prompts_are_made_of_class_names() -> None:
    assert prompts_for(["Red_Fox", "cat"]) == ("a photo of a red fox.", "a photo of a cat.")
    assert prompts_for(["A320"], superclass="aircraft") == ("a photo of a a320, a type of aircraft.",)
    assert prompts_for(["cat"], template="{class} in the snow") == ("cat in the snow",)


@pytest.mark.parametrize("name", ["7", "class_7", "n01440764", "", " "])
def test_a_class_without_a_prompt_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="say what they show"):
        prompts_for(["cat", name])
    assert prompts_for(["cat", name], names={name: "tench"})[1] == "a photo of a tench."


def test_templates_that_lose_something_are_refused() -> None:
    with pytest.raises(ValueError, match="no place for the class"):
        prompts_for(["cat"], template="a photo")
    with pytest.raises(ValueError, match="none is given"):
        prompts_for(["cat"], template="{class}, {superclass}")
    with pytest.raises(ValueError, match="no place for the superclass"):
        prompts_for(["cat"], template="{class}", superclass="animal")
    with pytest.raises(ValueError, match="not there: 'fox'"):
        prompts_for(["cat"], names={"fox": "fox"})


# Pipelines


def test_a_square_is_the_centre_of_the_resized_image() -> None:
    images = torch.zeros(1, 3, 8, 16)
    images[..., 4:12] = 1.0
    assert torch.equal(square(images, 8), torch.ones(1, 3, 8, 8))
    assert square(torch.rand(2, 3, 30, 20), 16).shape == (2, 3, 16, 16)


def test_without_diffusers_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match=r"vitrail\[generate\]"):
        load_pipeline("nowhere")


def tokenizer(folder: Path) -> Any:
    """Letters alone: enough to tell prompts apart."""
    from transformers import CLIPTokenizer

    folder.mkdir()
    letters = list("abcdefghijklmnopqrstuvwxyz.,0123456789")
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 20}))
    return CLIPTokenizer.from_pretrained(str(folder))


def text_encoder(projected: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=78,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=20,
        projection_dim=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config).eval()


def vae(channels: int, **more: float) -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=4,
        **more,
    )


def unet(**more: Any) -> Any:
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        norm_num_groups=4,
        **more,
    )


def pipeline(kind: str, folder: Path) -> Any:
    import diffusers

    words, beta = tokenizer(folder / "words"), {"beta_start": 0.00085, "beta_end": 0.012}
    if kind == "sd":
        return diffusers.StableDiffusionPipeline(
            vae=vae(4),
            text_encoder=text_encoder(False),
            tokenizer=words,
            unet=unet(cross_attention_dim=32),
            scheduler=diffusers.PNDMScheduler(beta_schedule="scaled_linear", skip_prk_steps=True, **beta),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    if kind == "sdxl":
        added = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
        return diffusers.StableDiffusionXLPipeline(
            vae=vae(4),
            text_encoder=text_encoder(False),
            text_encoder_2=text_encoder(True),
            tokenizer=words,
            tokenizer_2=words,
            unet=unet(cross_attention_dim=64, projection_class_embeddings_input_dim=80, **added),
            scheduler=diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear", **beta),
        )
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(4, shift_factor=0.1),
        text_encoder=text_encoder(True),
        tokenizer=words,
        text_encoder_2=text_encoder(True),
        tokenizer_2=words,
        text_encoder_3=None,
        tokenizer_3=None,
    )


@pytest.fixture(params=["sd", "sdxl", "sd3"])
def piped(request: pytest.FixtureRequest, tmp_path: Path) -> PipelineDiffuser:
    """A pipeline of diffusers with random weights: tiny, and the same path as the published ones."""
    pytest.importorskip("diffusers", reason="diffusers is not installed (the extra generate)")
    pytest.importorskip("transformers", reason="transformers is not installed (the extra generate)")
    torch.manual_seed(0)
    classes = ("cat", "dog", "fox")
    made = pipeline(request.param, tmp_path)
    made.set_progress_bar_config(disable=True)
    return PipelineDiffuser(made, classes, prompts_for(classes), steps=50, guidance=3.0, batch=4)


def test_pipelines_run_as_many_steps_as_the_authors(piped: PipelineDiffuser) -> None:
    for r, steps in LEVELS.items():
        assert piped.steps_taken(r) == steps
        assert piped.evaluations(r) == 2 * steps
    assert piped.steps_taken(1.0) == 50


def test_pipelines_edit_and_depend_on_source_class_and_seed(piped: PipelineDiffuser) -> None:
    piped.steps = 10
    images, target, seeds = pictures(2, side=24), torch.tensor([0, 1]), torch.tensor([1, 2])
    found = piped(images, target, 0.6, seeds)
    assert found.shape == (2, 3, 16, 16)
    assert found.dtype == torch.uint8
    assert torch.equal(piped(images, target, 0.6, seeds), found)
    for other in (
        piped(pictures(2, seed=3, side=24), target, 0.6, seeds),
        piped(images, target + 1, 0.6, seeds),
        piped(images, target, 0.6, seeds + 5),
    ):
        assert not torch.equal(other, found)


def test_pipelines_forget_the_source_at_r_of_one(piped: PipelineDiffuser) -> None:
    piped.steps = 6
    target, seeds = torch.tensor([0, 1]), torch.tensor([1, 2])
    found = piped(pictures(2, side=16), target, 1.0, seeds)
    assert torch.equal(found, piped(pictures(2, seed=3, side=16), target, 1.0, seeds))
    assert torch.equal(found, piped.txt2img(target, seeds))


def test_pipelines_give_the_reconstruction_back_without_noise(piped: PipelineDiffuser) -> None:
    images = pictures(2, side=16).float() / 255
    coder = piped.pipeline.vae
    with torch.no_grad():
        mode = coder.encode(images * 2 - 1).latent_dist.mode()
        expected = (coder.decode(mode).sample.clamp(-1, 1) + 1) / 2
    found = piped(images, torch.tensor([0, 1]), 0.0, torch.arange(2))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # scaled and back, in float32


def test_pipelines_read_a_text_and_encode_an_image_once(piped: PipelineDiffuser) -> None:
    piped.steps = 5
    images, seeds = pictures(3, side=16), torch.arange(3)
    for r in (0.4, 0.6):
        piped(images, torch.tensor([0, 1, 0]), r, seeds)
    piped(images[1:], torch.tensor([1, 0]), 0.8, seeds[1:])
    assert (piped.read, piped.encoded) == (2, 3)


def test_pipelines_make_an_image_alike_in_any_batch(piped: PipelineDiffuser) -> None:
    piped.steps = 10
    images, target, seeds = pictures(3, side=16).float() / 255, torch.tensor([0, 1, 2]), torch.arange(3)
    whole = piped(images, target, 0.6, seeds)
    piped.batch = 1
    order = torch.tensor([2, 0, 1])
    # Sums in another order, in float32, carried through six steps and guidance.
    torch.testing.assert_close(piped(images[order], target[order], 0.6, seeds[order]), whole[order], rtol=0, atol=1e-4)


def test_a_pipeline_is_read_from_a_folder_and_a_missing_one_is_named(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed (the extra generate)")
    made = pipeline("sd", tmp_path)
    made.save_pretrained(str(tmp_path / "saved"))
    classes = ("cat", "dog")
    again = PipelineDiffuser(load_pipeline(tmp_path / "saved"), classes, prompts_for(classes), steps=4)
    first = PipelineDiffuser(made, classes, prompts_for(classes), steps=4)
    target, seeds = torch.tensor([0, 1]), torch.arange(2)
    assert torch.equal(again.txt2img(target, seeds), first.txt2img(target, seeds))
    with pytest.raises(FileNotFoundError, match="give a folder that holds one"):
        load_pipeline(tmp_path / "nowhere")
