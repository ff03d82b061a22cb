"""Evaluation counts every image once, in one process or several, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.measure.classification import classification
from vitrail.measure.evaluator import Loaders, Predictions, evaluate, predict_all, worst_mistakes
from vitrail.measure.speed import throughput
from vitrail.registry import part

IMAGES, CLASSES = 13, 3


def pixels() -> Tensor:
    return torch.randn(IMAGES, 3, 4, 4, generator=torch.Generator().manual_seed(3))


def labels() -> Tensor:
    return torch.arange(IMAGES) % CLASSES


def batches(rows: list[int], size: int = 4, multilabel: bool = False) -> Iterator[Batch]:
    for start in range(0, len(rows), size):
        some = torch.tensor(rows[start : start + size])
        label = nn.functional.one_hot(labels(), CLASSES)[some] if multilabel else labels()[some]
        yield Batch(views=(pixels()[some],), label=label, target=label, index=100 + some)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(48), nn.Dropout(0.5), nn.Linear(48, CLASSES))


def reference() -> Tensor:
    with torch.no_grad():
        return small_model().eval()(pixels())


def test_predictions_are_the_models_own_in_evaluation_mode() -> None:
    model, seen = small_model().train(), []
    model[1].eval()  # a frozen part
    made = predict_all(model, batches(list(range(IMAGES))), progress=seen.append)
    torch.testing.assert_close(made.logits, reference())
    assert made.index.tolist() == list(range(100, 100 + IMAGES))
    assert made.target.equal(labels())
    assert sum(seen) == IMAGES
    assert [m.training for m in model.children()] == [True, False, True, True]
    assert not made.logits.is_inference()


def test_training_flags_come_back_after_an_error() -> None:
    model = small_model().train()
    with pytest.raises(RuntimeError):
        predict_all(nn.Sequential(model, nn.Linear(7, 7)).train(), batches([0, 1]))
    assert all(m.training for m in model.modules())


def test_fetching_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.measure.evaluator.FETCH_BYTES", 1)
    made = predict_all(small_model(), batches(list(range(IMAGES))))
    torch.testing.assert_close(made.logits, reference())


def test_autocast_computes_in_its_dtype_and_returns_float32() -> None:
    dtypes = []

    def model(images: Tensor) -> Tensor:
        dtypes.append((images.flatten(1) @ torch.ones(48, CLASSES)).dtype)
        return images.flatten(1) @ torch.ones(48, CLASSES)

    made = predict_all(model, batches([0, 1]), autocast=torch.bfloat16)
    assert dtypes == [torch.bfloat16]
    assert made.logits.dtype == torch.float32


def test_an_empty_loader_and_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="no images"):
        predict_all(small_model(), [])
    with pytest.raises(ValueError, match=r"logits \[images, classes\]"):
        predict_all(lambda images: images, batches([0, 1]))


@pytest.mark.parametrize("multilabel", [False, True])
def test_the_registered_evaluator_gives_the_same_numbers_as_evaluate(multilabel: bool) -> None:
    rows = list(range(IMAGES))
    data = Loaders(("a", "b", "c"), {"val": list(batches(rows, multilabel=multilabel))})
    found = part("evaluator", "classification")(small_model(), data)
    assert found["numbers"] == evaluate(small_model(), batches(rows, multilabel=multilabel)).scalars()
    assert found["tables"]["figures"]["classes"] == ["a", "b", "c"]


def test_worst_mistakes_are_the_surest_errors() -> None:
    logits = torch.tensor([[4.0, 0.0], [0.0, 1.0], [0.0, 3.0], [5.0, 0.0]])
    made = Predictions(torch.tensor([10, 11, 12, 13]), torch.tensor([0, 0, 0, 1]), logits)
    found = worst_mistakes(made)
    assert [m.index for m in found] == [13, 12, 11]
    assert found[0].truth == (1,)
    assert found[0].guess == 0
    assert found[0].probability == pytest.approx(1 / (1 + torch.tensor(-5.0).exp().item()))
    assert found[0].probability + found[0].truth_probability == pytest.approx(1)
    assert [m.index for m in worst_mistakes(made, 1)] == [13]


def test_worst_multi_label_mistakes_are_false_alarms_and_misses() -> None:
    logits = torch.tensor([[3.0, -4.0], [0.2, 5.0], [2.0, 2.0]])
    made = Predictions(torch.arange(3), torch.tensor([[1, 1], [0, 1], [1, 1]]), logits)
    missed, alarm = worst_mistakes(made)
    assert (missed.index, missed.guess, missed.truth) == (0, 1, (0, 1))
    assert missed.probability == pytest.approx(torch.tensor(-4.0).sigmoid().item())
    assert (alarm.index, alarm.guess, alarm.truth) == (1, 0, (1,))


def one_rank(rank: int, world: int, folder: str, shares: list[list[int]], multilabel: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    try:
        made = predict_all(small_model(), batches(shares[rank], multilabel=multilabel))
        torch.save({"index": made.index, "target": made.target, "logits": made.logits}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shares", "multilabel"),
    [
        ([list(range(0, IMAGES, 2)), list(range(1, IMAGES, 2))], False),
        ([[], list(range(IMAGES))], True),
    ],
    ids=["odd number of images", "a rank without images"],
)
def test_two_processes_count_every_image_once(tmp_path: Path, shares: list[list[int]], multilabel: bool) -> None:
    run_ranks(one_rank, 2, str(tmp_path), shares, multilabel)
    alone = predict_all(small_model(), batches(list(range(IMAGES)), multilabel=multilabel))
    expected = classification(alone.logits, alone.target).scalars()
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert got["index"].tolist() == list(range(100, 100 + IMAGES))
        assert got["target"].equal(alone.target)
        torch.testing.assert_close(got["logits"], alone.logits)
        assert classification(got["logits"], got["target"]).scalars() == pytest.approx(expected)


def test_throughput_runs_the_model_on_whole_batches_and_restores_it() -> None:
    shapes = set()
    model = small_model().train()

    def watched(images: Tensor) -> Tensor:
        shapes.add(tuple(images.shape))
        return model(images)

    measured = throughput(watched, 4, 2, "cpu", seconds=0.01)
    assert shapes == {(2, 3, 4, 4)}
    assert measured["images_per_second"] > 0
    assert measured["peak_memory"] is None or measured["peak_memory"] > 2**20
    throughput(model, 4, 2, "cpu", seconds=0.01)
    assert all(m.training for m in model.modules())
