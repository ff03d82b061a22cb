"""Evaluation of many classes: the same metrics as from all logits, in memory that grows with images plus classes."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
import torch.distributed as dist
from processes import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.compare.comparison import Member, compare_members
from vitrail.data.batch import Batch
from vitrail.measure import evaluator
from vitrail.measure.classification import classification, read_figures
from vitrail.measure.ensembles import averaged, diversity, evaluate_members, fused_accuracy, head_accuracy
from vitrail.measure.evaluator import (
    CompactPredictions,
    Loaders,
    Predictions,
    classify,
    evaluate,
    metrics_of,
    only_classes,
    predict_all,
    read_predictions,
    worst_mistakes,
    write_predictions,
)
from vitrail.measure.retrieval import knn_accuracy
from vitrail.model.build import create_model

MANY, IMAGES = 300, 700


def drawn(ties: bool = False) -> tuple[Tensor, Tensor]:
    """Logits [images, classes] that often prefer the label, and labels [images]; some classes have no image."""
    generator = torch.Generator().manual_seed(5)
    target = torch.randint(MANY - 20, (IMAGES,), generator=generator)
    logits = 2 * torch.randn(IMAGES, MANY, generator=generator)
    logits[torch.arange(IMAGES), target] += 4 * torch.rand(IMAGES, generator=generator)
    return (logits.round() if ties else logits), target


def loader(target: Tensor, rows: Tensor | None = None, size: int = 64) -> Iterator[Batch]:
    """Batches whose images hold nothing but their row."""
    for some in (torch.arange(len(target)) if rows is None else rows).split(size):
        label = target[some]
        yield Batch(views=(some.float()[:, None, None, None],), label=label, target=label, index=1000 + some)


def both_forms(logits: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Predictions, Any]:
    def model(images: Tensor) -> Tensor:
        return logits[images.flatten().long()]

    dense = predict_all(model, loader(target))
    monkeypatch.setattr(evaluator, "LOGIT_CLASSES", MANY - 1)
    compact = predict_all(model, loader(target))
    assert isinstance(dense, Predictions)
    assert isinstance(compact, CompactPredictions)
    return dense, compact


@pytest.mark.parametrize("ties", [False, True])
def test_compact_predictions_have_the_metrics_of_all_logits(ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = drawn(ties)
    dense, compact = both_forms(logits, target, monkeypatch)
    names = [f"class {i}" for i in range(MANY)]
    expected, metrics = classification(dense.logits, dense.target, names), metrics_of(compact, names)
    assert metrics.to_json() == expected.to_json()
    assert metrics_of(compact).classes == tuple(map(str, range(MANY)))
    assert [m.index for m in worst_mistakes(compact)] == [m.index for m in worst_mistakes(dense)]
    for mistake, wanted in zip(worst_mistakes(compact), worst_mistakes(dense), strict=True):
        assert (mistake.truth, mistake.guess) == (wanted.truth, wanted.guess)
        assert mistake.probability == pytest.approx(wanted.probability, rel=1e-5)
        assert mistake.truth_probability == pytest.approx(wanted.truth_probability, rel=1e-5)


def test_metrics_of_compact_predictions_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = drawn()
    _, compact = both_forms(logits, target, monkeypatch)
    metrics, probabilities = metrics_of(compact), logits.double().softmax(1).numpy()
    true, guess, every = target.numpy(), probabilities.argmax(1), np.arange(MANY)
    scalars, present = metrics.scalars(), np.isin(every, true)
    assert scalars["top1"] == pytest.approx(sk.accuracy_score(true, guess), abs=1e-6)
    assert scalars["top5"] == pytest.approx(sk.top_k_accuracy_score(true, probabilities, k=5, labels=every), abs=1e-6)
    assert scalars["loss"] == pytest.approx(sk.log_loss(true, probabilities, labels=every), abs=1e-6)
    assert scalars["matthews"] == pytest.approx(sk.matthews_corrcoef(true, guess), abs=1e-6)
    per_class = sk.precision_recall_fscore_support(true, guess, labels=every, zero_division=0)
    for ours, theirs in zip((metrics.precision, metrics.recall, metrics.f1, metrics.support), per_class, strict=True):
        np.testing.assert_allclose(ours[present], theirs[present], atol=1e-6)
    assert scalars["macro_f1"] == pytest.approx(float(per_class[2][present].mean()), abs=1e-6)
    assert scalars["balanced_accuracy"] == pytest.approx(float(per_class[1][metrics.support > 0].mean()), abs=1e-6)
    np.testing.assert_array_equal(metrics.confusion, sk.confusion_matrix(true, guess, labels=every))
    confidence, right = probabilities.max(1), guess == true
    bins = np.ceil(confidence * 15)
    gaps = [abs(confidence[bins == b].mean() - right[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins)]
    assert scalars["ece"] == pytest.approx(sum(gaps), abs=1e-6)


def test_the_highest_logits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = drawn()
    _, compact = both_forms(logits, target, monkeypatch)
    assert compact.top.shape == compact.top_logits.shape == (IMAGES, 10)
    assert compact.top.equal(logits.argsort(1, descending=True)[:, :10])
    assert compact.top_logits.equal(logits.gather(1, compact.top))


class Sizes(TorchDispatchMode):
    """The most elements of a tensor that an operation gives, of any dtype and of float64."""

    largest = largest_float64 = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else [result]
        tensors = [t for t in outputs if isinstance(t, Tensor)]
        self.largest = max([self.largest, *(t.numel() for t in tensors)])
        self.largest_float64 = max([self.largest_float64, *(t.numel() for t in tensors if t.dtype == torch.float64)])
        return result


@pytest.mark.parametrize(("images", "classes"), [(96, 2000), (384, 2000), (96, 21_841), (384, 21_841)])
def test_no_tensor_of_an_evaluation_is_larger_than_the_logits_of_a_batch(images: int, classes: int) -> None:
    weight = torch.linspace(-1, 1, classes)[None]
    target = torch.arange(images) * 7 % classes
    with Sizes() as sizes:
        metrics = evaluate(
            lambda rows: rows.flatten(1) @ weight, loader(target, size=16), list(map(str, range(classes)))
        )
    assert sizes.largest == 16 * classes
    assert metrics.count == images
    assert metrics.recall.shape == (classes,)


@pytest.mark.parametrize("every_logit", [False, True])
def test_float64_copies_are_of_few_scores(every_logit: bool) -> None:
    weight, target = torch.ones(1, 10_000), torch.arange(1000)
    with Sizes() as sizes:
        evaluate(lambda rows: rows.flatten(1) @ weight, loader(target, size=500), every_logit=every_logit)
    assert sizes.largest_float64 <= 4_096_000


def test_memory_of_an_evaluation_does_not_grow_with_the_square_of_classes() -> None:
    def peak(classes: int) -> int:
        weight, target, names = torch.ones(1, classes), torch.arange(64) * 7, list(map(str, range(classes)))
        data = Loaders(names, {"val": list(loader(target))})
        tracemalloc.start()
        try:
            json.dumps(classify(lambda rows: rows.flatten(1) @ weight, data)["tables"])
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(16_000) < 5 * peak(4000)


def test_21841_classes_go_through_evaluation_storage_and_json(tmp_path: Path) -> None:
    classes, images = 21_841, 40
    logits = torch.randn(images, classes, generator=torch.Generator().manual_seed(1))
    target = torch.randint(classes, (images,), generator=torch.Generator().manual_seed(2))
    predictions = predict_all(lambda rows: logits[rows.flatten().long()], loader(target, torch.randperm(images)))
    metrics = metrics_of(predictions)
    assert metrics.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits.double(), target)), abs=1e-6)
    assert read_figures(json.loads(json.dumps(metrics.to_json()))).scalars() == metrics.scalars()
    stored = write_predictions(tmp_path, predictions)
    assert stored.stat().st_size < 200 * images  # 2 bytes of every logit are 43,682 per image
    kept = read_predictions(tmp_path)
    assert kept is not None
    assert kept.top is not None
    assert kept.index.equal(1000 + torch.arange(images))
    assert kept.target.equal(target)
    assert kept.guess.equal(logits.argmax(1))
    assert kept.top[:, 0].equal(kept.guess)
    torch.testing.assert_close(kept.logits.float(), logits.gather(1, kept.top), rtol=1e-3, atol=1e-3)


def test_runs_with_either_form_of_predictions_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = drawn()
    members = []
    for seed, predictions in enumerate(both_forms(logits, target, monkeypatch)):
        (tmp_path / str(seed)).mkdir()
        write_predictions(tmp_path / str(seed), predictions)
        scores = metrics_of(predictions).scalars()
        names, kept = tuple(map(str, range(MANY))), read_predictions(tmp_path / str(seed))
        members.append(Member(f"run{seed}", 0, str(seed), scores, "val", "data", names, predictions=kept))
    result = compare_members("forms", members, "run0")
    assert result.disagreement is not None
    assert result.disagreement[0, 1] == 0
    np.testing.assert_array_equal(result.class_scores["run0"], result.class_scores["run1"])


def test_what_needs_every_logit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = drawn()
    dense, compact = both_forms(logits, target, monkeypatch)
    sentence = r"only the highest 10 logits of an image are kept, and an ensemble .* evaluate with every_logit=True"
    with pytest.raises(ValueError, match=sentence):
        averaged([dense, compact])
    with pytest.raises(ValueError, match=sentence):
        only_classes(compact, list(map(str, range(MANY))), ["3", "5"])
    whole = predict_all(lambda rows: logits[rows.flatten().long()], loader(target), every_logit=True)
    assert isinstance(whole, Predictions)
    assert whole.logits.equal(logits)


def test_broken_logits_and_labels_are_the_same_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "LOGIT_CLASSES", MANY - 1)
    logits, target = drawn()
    for row, value in ((70, math.nan), (80, math.inf)):
        logits[row, 4] = value
    logits[90] = -math.inf
    logits[100, :50] = -math.inf  # impossible classes are no fault
    with pytest.raises(ValueError, match=r"3 of 700 rows have scores that are NaN or infinite \(first: row 70\)"):
        evaluate(lambda rows: logits[rows.flatten().long()], loader(target))
    logits, target = drawn()
    target[5] = MANY
    with pytest.raises(ValueError, match="label 300 is outside the 300 classes"):
        evaluate(lambda rows: logits[rows.flatten().long()], loader(target))
    with pytest.raises(ValueError, match="scores have 300 columns, but there are 2 classes"):
        evaluate(lambda rows: logits[rows.flatten().long()], loader(target), ["a", "b"])


def one_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    evaluator.LOGIT_CLASSES = MANY - 1
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    try:
        logits, target = drawn()
        rows = torch.arange(IMAGES if rank else 0)  # the first rank has no images
        metrics = evaluate(lambda images: logits[images.flatten().long()], loader(target, rows))
        Path(f"{folder}/{rank}.json").write_text(json.dumps(metrics.to_json()))
    finally:
        dist.destroy_process_group()


def test_all_ranks_have_the_metrics_of_all_images(tmp_path: Path) -> None:
    run_ranks(one_rank, 2, str(tmp_path))
    logits, target = drawn()
    expected = classification(logits, target).scalars()
    for rank in range(2):
        stored = read_figures(json.loads((tmp_path / f"{rank}.json").read_text()))
        assert stored.scalars() == pytest.approx(expected)


def test_members_of_a_head_are_evaluated_batch_by_batch() -> None:
    model = create_model("deit_tiny_distilled", classes=2000, depth=1, width=32, heads=1, image_size=32, patch=16)
    images, target = torch.randn(48, 3, 32, 32), torch.arange(48)
    batches = [
        Batch(views=(images[rows],), label=target[rows], target=target[rows], index=rows)
        for rows in torch.arange(48).split(16)
    ]
    with Sizes() as sizes:
        findings = evaluate_members(model.eval(), Loaders(model.classes, {"val": batches}))
    assert sizes.largest <= 16 * 2 * 2000
    stack = model.stack(images)
    spread = diversity(stack, target, votes="soft")
    assert findings["numbers"] == pytest.approx(
        {
            "members_top1": float(head_accuracy(stack, target).mean()),
            "members_together": fused_accuracy(stack, target),
            "strength": spread.strength,
            "correlation": spread.correlation,
            **({"correlation_over_strength2": spread.ratio} if spread.strength > 0 else {}),
        }
    )


def test_votes_of_neighbours_are_counted_piece_by_piece() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, memory = torch.randn(2500, 4, generator=generator), torch.randn(60, 4, generator=generator)
    labels, known = torch.arange(2500) % 60 * 50, torch.arange(60) * 50
    with Sizes() as sizes:
        accuracy = knn_accuracy(queries, labels, memory, known, neighbours=(1,))
    assert sizes.largest <= 1024 * 2951
    nearest = (torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(memory).T).argmax(1)
    assert accuracy[1] == pytest.approx(float((known[nearest] == labels).double().mean()))
