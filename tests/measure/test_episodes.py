"""Few-shot episodes: how they are drawn, what is fitted to them, and equal budgets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import NearestCentroid
from sklearn.svm import SVC, LinearSVC
from torch import Tensor

from vitrail.cli import run
from vitrail.data.batch import Batch
from vitrail.learn.byol import Byol, uniformity
from vitrail.learn.config import ByolConfig
from vitrail.measure.config import EpisodeConfig
from vitrail.measure.episodes import (
    Episodes,
    FewShot,
    aimed_at,
    compare_few_shot,
    draw_episodes,
    evaluate_episodes,
    few_shot,
)
from vitrail.measure.evaluator import Loaders
from vitrail.measure.linear_classifiers import _solve, linear_svm, logistic_regression, prototypes
from vitrail.model.build import create_model
from vitrail.model.heads.config import Projected
from vitrail.schema import ConfigError

LABELS = torch.arange(400) % 8  # 50 images of each of 8 classes
SMALL = EpisodeConfig(way=5, shot=2, queries=6, episodes=20)


def problems(count: int, classes: int, shots: int, width: int, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """Unit features [problems, rows, width], labels, and queries of the same classes."""
    generator = torch.Generator().manual_seed(classes * shots)
    centre = torch.randn(count, classes, width, generator=generator, dtype=torch.float64)
    label = torch.arange(classes).repeat_interleave(shots)
    draws = torch.randn(2, count, classes * shots, width, generator=generator, dtype=torch.float64)
    known, asked = F.normalize(centre[:, label] + noise * draws, dim=-1)
    return known, label.repeat(count, 1), asked


def embedded(noise: float = 1.0, seed: int = 0) -> Tensor:
    return torch.eye(8, 16)[LABELS] + noise * torch.randn(400, 16, generator=torch.Generator().manual_seed(seed))


# What is drawn


def test_episodes_have_the_classes_they_say_and_no_image_twice() -> None:
    made = draw_episodes(LABELS, SMALL)
    assert made.support.shape == (20, 5, 2)
    assert made.queries.shape == (20, 5, 6)
    assert (LABELS[made.support] == made.classes[..., None]).all()
    assert (LABELS[made.queries] == made.classes[..., None]).all()
    for episode in range(20):
        assert len(set(made.classes[episode].tolist())) == 5
        rows = torch.cat([made.support[episode].flatten(), made.queries[episode].flatten()])
        assert len(set(rows.tolist())) == 5 * 8


def test_an_episode_depends_on_seed_and_number_alone() -> None:
    first, more = draw_episodes(LABELS, SMALL), draw_episodes(LABELS, EpisodeConfig(5, 2, 6, 50))
    assert first.support.equal(more.support[:20])
    assert first.queries.equal(more.queries[:20])
    other = draw_episodes(LABELS, EpisodeConfig(5, 2, 6, 20, episode_seed=1))
    assert not first.support.equal(other.support)


def test_more_shots_keep_queries_and_the_images_of_fewer() -> None:
    few, more = (draw_episodes(LABELS, EpisodeConfig(5, shot, 6, 20)) for shot in (1, 5))
    assert few.queries.equal(more.queries)
    assert few.support.equal(more.support[..., :1])


def test_every_class_and_image_is_drawn_equally_often() -> None:
    made = draw_episodes(LABELS, EpisodeConfig(way=2, shot=1, queries=4, episodes=2000))
    classes = torch.bincount(made.classes.flatten(), minlength=8)
    # 4000 draws of 8 classes: 500 each, standard deviation sqrt(2000 * 1/4 * 3/4) = 19; five of them.
    assert (classes - 500).abs().max() < 97
    images = torch.bincount(made.queries.flatten(), minlength=400)
    assert (images - 40).abs().max() < 5 * 40**0.5


def test_labelled_images_may_come_from_another_set() -> None:
    there = torch.arange(24) % 8
    made = draw_episodes(LABELS, SMALL, support=there)
    assert (there[made.support] == made.classes[..., None]).all()
    assert int(made.support.max()) < 24


def test_only_named_classes_are_drawn() -> None:
    made = draw_episodes(LABELS, EpisodeConfig(3, 1, 4, 30), among=[1, 4, 6])
    assert set(made.classes.unique().tolist()) == {1, 4, 6}


def test_classes_with_too_few_images_are_left_out_and_named() -> None:
    labels = torch.cat([LABELS, torch.full((7,), 8)])
    made = draw_episodes(labels, SMALL)  # each needs 8
    assert made.left_out == (8,)
    assert 8 not in made.classes


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EpisodeConfig(way=9, shot=1, queries=4), "9-way episodes need 9 classes .* and 8 have so many"),
        (EpisodeConfig(way=5, shot=40, queries=16), "40 labelled and 16 query .* and 0 have .*'bird' has 50"),
    ],
)
def test_too_few_classes_or_images_are_refused_in_a_sentence(config: EpisodeConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        draw_episodes(LABELS, config, names=["bird", *"abcdefg"])


@pytest.mark.parametrize("wrong", [{"way": 1}, {"shot": 0}, {"queries": 0}, {"episodes": 1}])
def test_settings_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        draw_episodes(LABELS, EpisodeConfig(**wrong))  # type: ignore[arg-type]


# What is fitted

CASES = [(3, 5, 1, 40, 1.0), (3, 5, 25, 40, 2.0), (2, 3, 10, 8, 1.0), (2, 20, 2, 16, 0.5)]


@pytest.mark.parametrize("case", CASES)
def test_logistic_regression_is_scikit_learns(case: tuple[int, int, int, int, float]) -> None:
    known, label, asked = problems(*case)
    ours = logistic_regression(known, label, case[1]).scores(asked).softmax(-1)
    for i in range(len(known)):
        theirs = LogisticRegression(C=1.0, tol=1e-9, max_iter=10_000).fit(known[i].numpy(), label[i].numpy())
        # Both are converged to about 1e-7.
        np.testing.assert_allclose(ours[i].numpy(), theirs.predict_proba(asked[i].numpy()), atol=1e-5)


@pytest.mark.parametrize("classify", [logistic_regression, linear_svm])
def test_classes_with_the_very_same_images_are_equally_likely(classify) -> None:
    row = F.normalize(torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    scores = classify(row.expand(1, 6, 8), torch.tensor([[0, 1, 2] * 2]), 3).scores(row)
    torch.testing.assert_close(scores, scores[..., :1].expand_as(scores))


@pytest.mark.parametrize("strength", [0.1, 10.0])
def test_the_strength_of_logistic_regression_is_scikit_learns_c(strength: float) -> None:
    known, label, asked = problems(1, 4, 6, 12, 1.0)
    ours = logistic_regression(known, label, 4, strength).scores(asked).softmax(-1)
    theirs = LogisticRegression(C=strength, tol=1e-9, max_iter=10_000).fit(known[0].numpy(), label[0].numpy())
    np.testing.assert_allclose(ours[0].numpy(), theirs.predict_proba(asked[0].numpy()), atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_linear_svm_is_scikit_learns(case: tuple[int, int, int, int, float]) -> None:
    known, label, asked = problems(*case)
    ours = linear_svm(known, label, case[1]).scores(asked)
    for i in range(len(known)):
        theirs = LinearSVC(C=1.0, dual=False, tol=1e-9, max_iter=100_000).fit(known[i].numpy(), label[i].numpy())
        np.testing.assert_allclose(ours[i].numpy(), theirs.decision_function(asked[i].numpy()), atol=1e-5)


def test_the_linear_svm_mostly_decides_as_one_of_pairs_does() -> None:
    """The hinge loss of pairs of classes is another machine: decisions agree, but not all of them."""
    known, label, asked = problems(4, 5, 5, 40, 1.0)
    ours = linear_svm(known, label, 5).scores(asked).argmax(-1)
    theirs = [SVC(kernel="linear", C=1.0).fit(known[i], label[i]).predict(asked[i]) for i in range(4)]
    assert (ours.numpy() == np.stack(theirs)).mean() > 0.9


def test_the_prototype_is_scikit_learns_nearest_centroid() -> None:
    known, label, asked = problems(4, 5, 5, 20, 2.0)
    ours = prototypes(known, label, 5).scores(asked).argmax(-1)
    for i in range(4):
        theirs = NearestCentroid().fit(known[i].numpy(), label[i].numpy()).predict(asked[i].numpy())
        assert ours[i].tolist() == theirs.tolist()


def test_what_rounding_adds_along_a_flat_direction_is_not_followed() -> None:
    """The bias of all classes together has no curvature but rounding; a step along it would be of any length."""
    curvature = torch.tensor([[2.0], [1e-18]], dtype=torch.float64)
    right = torch.tensor([[[1.0], [1e-16]], [[0.0], [1e-16]]], dtype=torch.float64)
    found = _solve(lambda change: curvature * change, right, torch.full((2,), 1e-20, dtype=torch.float64))
    torch.testing.assert_close(found[:, :, 0], torch.tensor([[0.5, 0.0], [0.0, 0.0]], dtype=torch.float64))


def test_problems_that_are_solved_together_are_solved_as_alone() -> None:
    known, label, asked = problems(6, 4, 3, 10, 1.0)
    for fit in (logistic_regression, linear_svm):
        together = fit(known, label, 4).scores(asked)
        for i in range(6):
            alone = fit(known[i : i + 1], label[i : i + 1], 4).scores(asked[i : i + 1])
            # Each stops once its gradient is 1e-7 of the first, and waits for the others where there are any.
            torch.testing.assert_close(together[i], alone[0], atol=1e-5, rtol=0)


def test_features_of_any_length_are_separated() -> None:
    known, label, asked = problems(2, 3, 6, 10, 0.5)
    ours = logistic_regression(50 * known, label, 3).scores(50 * asked).softmax(-1)
    for i in range(2):
        theirs = LogisticRegression(C=1.0, tol=1e-9, max_iter=100_000).fit(50 * known[i].numpy(), label[i].numpy())
        np.testing.assert_allclose(ours[i].numpy(), theirs.predict_proba(50 * asked[i].numpy()), atol=1e-4)


def test_a_class_without_a_labelled_image_is_refused() -> None:
    with pytest.raises(ValueError, match="one has none"):
        logistic_regression(torch.randn(1, 4, 3), torch.tensor([[0, 0, 1, 1]]), 3)


# What is counted


def test_accuracy_over_episodes_is_that_of_each_fitted_alone() -> None:
    features, made = embedded(), draw_episodes(LABELS, SMALL)
    found = few_shot(features, made)["logistic"]
    unit = F.normalize(features.double(), dim=1).numpy()
    for episode in range(5):
        label, target = np.repeat(np.arange(5), 2), np.repeat(np.arange(5), 6)
        rows = made.support[episode].flatten().numpy()
        theirs = LogisticRegression(tol=1e-9, max_iter=10_000).fit(unit[rows], label)
        asked = made.queries[episode].flatten().numpy()
        assert found.accuracy[episode] == pytest.approx(theirs.score(unit[asked], target))


def test_the_interval_is_as_published() -> None:
    values = np.random.default_rng(0).random(600)
    found = FewShot(values)
    assert found.interval == pytest.approx(1.96 * np.std(values) / np.sqrt(600))
    assert found.mean == pytest.approx(values.mean())


def test_features_without_information_are_right_by_chance() -> None:
    nothing = torch.randn(400, 16, generator=torch.Generator().manual_seed(3))
    for found in few_shot(nothing, draw_episodes(LABELS, EpisodeConfig(5, 1, 10, 200))).values():
        assert abs(found.mean - 0.2) < 4 * found.interval / 1.96  # four standard errors


def test_parts_of_episodes_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    features, made = embedded(), draw_episodes(LABELS, SMALL)
    whole = few_shot(features, made)
    monkeypatch.setattr("vitrail.measure.episodes.FLOATS_AT_ONCE", 2 * 40 * 16 * 3)
    for name, found in few_shot(features, made).items():
        assert found.accuracy.tolist() == whole[name].accuracy.tolist()


# Extra images


def repeated(times: int) -> object:
    def extra(episodes: Episodes) -> Tensor:
        return embedded()[episodes.support].repeat(1, 1, times, 1)

    return extra


def test_extra_images_are_labelled_images() -> None:
    """Two labelled images and two extra ones are four labelled images."""
    features = embedded()
    four = draw_episodes(LABELS, EpisodeConfig(5, 4, 6, 20))
    two = Episodes(four.classes, four.support[..., :2], four.queries)
    hidden = {tuple(q[0].tolist()): s[:, 2:] for q, s in zip(four.queries, four.support, strict=True)}

    def extra(episodes: Episodes) -> Tensor:
        return torch.stack([features[hidden[tuple(q[0].tolist())]] for q in episodes.queries])

    assert len(hidden) == 20  # queries of the first class name an episode
    with_extra, plain = few_shot(features, two, extra=extra), few_shot(features, four)
    for name, found in with_extra.items():
        np.testing.assert_allclose(found.accuracy, plain[name].accuracy)
        assert found.extra == 2


def test_unequal_budgets_are_refused_unless_named_as_free() -> None:
    features, made = embedded(), draw_episodes(LABELS, SMALL)
    methods = {"none": None, "twice": repeated(2), "thrice": repeated(3)}
    with pytest.raises(ValueError, match=r"different numbers .*none 0, twice 4, thrice 6"):
        compare_few_shot(features, made, methods, ["prototype"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="twice 4, thrice 6"):
        compare_few_shot(features, made, methods, ["prototype"], free=["none"])  # type: ignore[arg-type]
    found = compare_few_shot(features, made, methods, ["prototype"], free=["none", "thrice"])  # type: ignore[arg-type]
    assert {name: each["prototype"].extra for name, each in found.items()} == {"none": 0, "twice": 4, "thrice": 6}


def test_copies_of_labelled_images_leave_the_prototypes_where_they_are() -> None:
    found = compare_few_shot(
        embedded(), draw_episodes(LABELS, SMALL), {"none": None, "copies": repeated(2)}, ["prototype"], free=["none"]
    )
    difference = found["copies"]["prototype"].against(found["none"]["prototype"])
    assert (difference.mean, difference.interval) == (0, 0)


def test_a_hook_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="are needed"):
        few_shot(embedded(), draw_episodes(LABELS, SMALL), extra=lambda e: torch.zeros(len(e), 5, 16))


@pytest.mark.parametrize(("way", "shot", "extra"), [(5, 1, 4), (5, 5, 20), (8, 1, 7)])
def test_images_made_from_the_other_classes_have_the_published_budget(way: int, shot: int, extra: int) -> None:
    """5-way 1-shot: 4 a class; 5-shot: 20; 20-way 1-shot: 19, here 8-way: 7 (GeNIe, arXiv 2312.02548)."""
    source = torch.arange(400).repeat_interleave(8)
    target = torch.arange(8).repeat(400)
    features = torch.stack([source.float(), target.float()], 1)  # an image is what it was made of
    made = draw_episodes(LABELS, EpisodeConfig(way, shot, 4, 6))
    found = aimed_at(features, source, target)(made)
    assert found.shape == (6, way, extra, 2)
    for episode in range(6):
        for place, c in enumerate(made.classes[episode].tolist()):
            others = made.support[episode][torch.arange(way) != place].flatten()
            assert found[episode, place, :, 0].tolist() == others.tolist()
            assert set(found[episode, place, :, 1].tolist()) == {c}


def test_a_pair_that_was_not_made_or_made_twice_is_refused() -> None:
    source = torch.arange(400).repeat_interleave(8)
    target = torch.arange(8).repeat(400)
    made = draw_episodes(LABELS, SMALL)
    row, c = int(made.support[0, 0, 0]), int(made.classes[0, 1])
    kept = ~((source == row) & (target == c))
    features = torch.zeros(3200, 2)
    with pytest.raises(ValueError, match=f"from row {row} for class {c}"):
        aimed_at(features[kept], source[kept], target[kept])(made)
    with pytest.raises(ValueError, match="two images"):
        aimed_at(features[:2], torch.tensor([1, 1]), torch.tensor([0, 0]))


# The protocol


def model_of(classes: tuple[str, ...]) -> object:
    torch.manual_seed(0)
    return create_model("deit_tiny", classes=classes, image_size=32, patch=8, width=32, depth=2, heads=2)


def image_data(split: str = "test") -> Loaders:
    generator = torch.Generator().manual_seed(0)

    def batches(count: int) -> list[Batch]:
        label = torch.arange(count) % 4
        images = torch.randn(count, 3, 32, 32, generator=generator) + 2 * label.view(-1, 1, 1, 1)
        return [Batch((images,), label, label, torch.arange(count))]

    return Loaders(tuple("abcd"), {"train": batches(12), "test": batches(40)}, split)


def test_the_protocol_gives_numbers_and_a_table_that_can_be_stored() -> None:
    config = EpisodeConfig(way=3, shot=2, queries=4, episodes=10)
    found = evaluate_episodes(model_of(("x", "y")), image_data(), config=config)  # type: ignore[arg-type]
    assert set(found["numbers"]) == {"episodes_logistic", "episodes_svm", "episodes_prototype"}
    table = json.loads(json.dumps(found["tables"]["episodes"], allow_nan=False))
    assert (table["way"], table["shot"], table["queries"], table["episodes"]) == (3, 2, 4, 10)
    assert table["classifiers"]["svm"]["mean"] == found["numbers"]["episodes_svm"]


def test_labelled_images_from_train_are_read_there() -> None:
    config = EpisodeConfig(way=3, shot=3, queries=10, episodes=4, support="train")
    found = evaluate_episodes(model_of(("x", "y")), image_data(), config=config)  # type: ignore[arg-type]
    assert found["tables"]["episodes"]["support"] == "train"
    with pytest.raises(ValueError, match="in the same split"):  # 13 of 10 images
        evaluate_episodes(model_of(("x", "y")), image_data(), config=EpisodeConfig(3, 3, 10, 4))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(model_of(("x", "y")).save(tmp_path_factory.mktemp("model")))  # type: ignore[attr-defined]


def test_episodes_from_the_command_line(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", str(stored), "--data", "synthetic:shapes?n=300&size=32", "--workers", "0", "--device", "cpu"]
    words += ["--protocol", "episodes", "--way", "3", "--shot", "1", "--queries", "4", "--episodes", "12"]
    assert run([*words, "--split", "train", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["protocols"]["episodes"]["tables"]["episodes"]
    assert (table["way"], table["episodes"]) == (3, 12)
    assert run([*words, "--split", "train"]) == 0
    out = capsys.readouterr().out
    assert "12 episodes, 3-way 1-shot, 4 queries per class" in out
    assert "±" in out
    assert max(map(len, out.splitlines())) <= 80
    assert run([*words, "--split", "train", "--classes", "nonsense"]) == 2
    assert "no class 'nonsense'" in capsys.readouterr().err


# A backbone without labels


def siamese(**options: object) -> Byol:
    torch.manual_seed(0)
    head = Projected(width=8, hidden=16, norm=True, judged="trunk")
    model = create_model("deit_tiny", classes=3, image_size=32, patch=8, width=32, depth=2, heads=2, head=head)
    return Byol(model, ByolConfig(predictor_hidden=8, symmetric=True, **options), steps=10)  # type: ignore[arg-type]


def views(seed: int = 0) -> Batch:
    images = torch.randn(2, 6, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    label = torch.arange(6) % 3
    return Batch((images[0], images[1]), label, label, torch.arange(6))


def test_uniformity_is_over_views_of_other_images_alone() -> None:
    embedding = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    total = [
        torch.exp(F.cosine_similarity(embedding[i], embedding[j], dim=0) / 2)
        for i in range(8)
        for j in range(8)
        if i % 4 != j % 4
    ]
    torch.testing.assert_close(uniformity(embedding, 2.0), torch.stack(total).mean().log())
    alike = torch.ones(8, 5)
    assert uniformity(alike, 2.0) == pytest.approx(0.5)  # every cosine is 1: the most there is


def test_a_momentum_of_nothing_compares_the_model_with_itself() -> None:
    """The slow copy has the same weights after every step, so leaving it out changes nothing."""
    batch = views()
    direct, copied = siamese(momentum=0.0), siamese(momentum=0.0)
    copied.itself = False
    for _ in range(2):
        for objective in (direct, copied):
            loss = objective(batch)["loss"]
            loss.backward()
            with torch.no_grad():
                for weight in objective.parameters():
                    if weight.grad is not None:
                        weight.sub_(0.1 * weight.grad)
                        weight.grad = None
            objective.after_step(0)
    for mine, other in zip(direct.model.parameters(), copied.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_unisiam_is_twice_its_published_loss_and_two() -> None:
    objective, batch = siamese(momentum=0.0, uniformity=0.1), views()
    found = objective(batch)["loss"]
    z = objective.encode(torch.cat(batch.views)).embedding
    p = objective.predictor(z)
    aim = z.detach().roll(6, 0)
    published = -F.cosine_similarity(p, aim, dim=1).mean() + 0.1 * uniformity(z, 2.0)
    torch.testing.assert_close(found, 2 * published + 2)
    assert torch.autograd.grad(uniformity(z, 2.0), z)[0].abs().max() > 0  # images are pushed apart


def test_uniformity_of_one_view_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set --objective\.symmetric"):
        Byol(siamese().model, ByolConfig(uniformity=0.1), steps=1)
