"""Objectives without labels against brute force and their identities."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vitrail.data.batch import Batch, ViewSpec
from vitrail.data.dataset import UNLABELLED
from vitrail.engine.config import OptimConfig
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import TrainStep
from vitrail.kernels.similarity import GROUP, largest, log_sum, relation_loss, top_rows
from vitrail.learn.bank import Bank, ImageMemory
from vitrail.learn.cmsf import Cmsf, PseudoLabels, class_means, constrained_rows, draw_labelled
from vitrail.learn.config import (
    ByolConfig,
    ClustersConfig,
    CmsfConfig,
    CompresConfig,
    CrdConfig,
    DinoConfig,
    IsdConfig,
    MocoConfig,
    MsfConfig,
    ProtonwConfig,
    SimregConfig,
    SupconConfig,
)
from vitrail.learn.moco import contrast
from vitrail.learn.msf import Msf, shift_loss
from vitrail.learn.objective import Objective, TrainingFacts, build_objective
from vitrail.learn.selfsupervised import MomentumCopy, collapse_note, purity
from vitrail.learn.supcon import supervised_contrast
from vitrail.learn.teacher import Embedder, load_embedder
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier

COUNT, CLASSES = 6, 3
INDEX = np.arange(18) * 2
FACTS = TrainingFacts(np.arange(18) % CLASSES, INDEX, 20, images=lambda: [batch_of(step, 1) for step in range(3)])


def small(seed: int = 0, width: int = 16, **head: object) -> Classifier:
    torch.manual_seed(seed)
    options = {"kind": "projected", "width": 8, "hidden": 16, "norm": True, **head}
    return create_model("vit_micro_28", classes=CLASSES, depth=1, width=width, heads=2, head=options)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small(7, width=24).save(tmp_path_factory.mktemp("teacher")))


@pytest.mark.parametrize("projector", ["mlp", "linear"])
def test_a_last_norm_is_that_of_the_batch_and_has_no_weights(projector: str) -> None:
    images = torch.randint(0, 256, (12, 3, 28, 28), dtype=torch.uint8)
    plain, normed = small(projector=projector), small(projector=projector, last_norm=True)
    assert {k: v.shape for k, v in plain.named_parameters()}.keys() == {
        k.replace("projector.0.weight", "projector.weight") if projector == "linear" else k
        for k, _ in normed.named_parameters()
    }
    normed.load_state_dict(
        {k.replace("projector.weight", "projector.0.weight"): v for k, v in plain.state_dict().items()}, strict=False
    )
    said = plain.train().head.embed(plain.tokens(images))
    expected = (said - said.mean(0)) / (said.var(0, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(normed.train().head.embed(normed.tokens(images)), expected, rtol=1e-4, atol=1e-5)


def test_a_norm_behind_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head\.last_norm stands behind a projector"):
        small(projector="none", last_norm=True)


def batch_of(step: int = 0, views: int | ViewSpec = 2) -> Batch:
    generator = torch.Generator().manual_seed(step)
    spec = ViewSpec(views) if isinstance(views, int) else views
    sides = [view.size or 28 for view in spec.all()]
    images = tuple(torch.randn(COUNT, 3, side, side, generator=generator) for side in sides)
    rows = (torch.arange(COUNT) + step * COUNT) % len(INDEX)
    return Batch(images, rows % CLASSES, rows % CLASSES, rows * 2, step=step)


CONFIGS: dict[str, Any] = {
    "byol": ByolConfig(predictor_hidden=16, momentum_end=1.0),
    "byol both ways": ByolConfig(predictor_hidden=16, symmetric=True),
    "moco": MocoConfig(bank=16, temperature=0.3),
    "moco both ways": MocoConfig(bank=16, temperature=0.3, symmetric=True),
    "isd": IsdConfig(bank=16, predictor_hidden=16, temperature=0.12, teacher_temperature=0.03),
    "msf": MsfConfig(bank=16, predictor_hidden=16, k=3),
    "msf bf16": MsfConfig(bank=16, predictor_hidden=16, k=3, bank_precision="bf16"),
    "cmsf self": CmsfConfig(bank=16, predictor_hidden=16, k=3, pool=5),
    "cmsf supervised": CmsfConfig(bank=16, predictor_hidden=16, k=3, constraint="supervised"),
    "cmsf top-all": CmsfConfig(bank=16, predictor_hidden=16, k=None, constraint="supervised"),
    "cmsf semi": CmsfConfig(bank=16, predictor_hidden=16, k=3, constraint="semi", labelled=0.5, threshold=0.3),
    "compres 1q": CompresConfig(bank=16, teacher="TEACHER", temperature=0.06),
    "compres 2q": CompresConfig(bank=16, teacher="TEACHER", queues=2, temperature=0.06),
    "compres cached": CompresConfig(bank=16, teacher="TEACHER", cache=True),
    "simreg": SimregConfig(teacher="TEACHER"),
    "regression": SimregConfig(teacher="TEACHER", layers=1, match="raw"),
    "regression with BatchNorm": SimregConfig(teacher="TEACHER", layers=1, match="batch_norm"),
    "clusters": ClustersConfig(teacher="TEACHER", clusters=4),
    "crd": CrdConfig(teacher="TEACHER", width=5, negatives=9),
    "dino": DinoConfig(prototypes=12, local_views=2, local_size=14, freeze_last=0.1),
    "dino without small views": DinoConfig(prototypes=12, local_views=0),
    "supcon": SupconConfig(),
    "protonw": ProtonwConfig(bank=16, predictor_hidden=16, temperature=0.15),
}


def made(name: str, teacher: str, **changes: object) -> Any:
    config = replace(CONFIGS[name], **changes)
    if hasattr(config, "teacher"):
        config = replace(config, teacher=teacher)
    return build_objective(config, small(), FACTS).train()


SCHEDULE = make_schedule(OptimConfig(epochs=10, warmup=0), 6, 60)


def unit(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape), dim=-1)


# The bank and what is computed over it


@pytest.mark.parametrize("part", [1 << 24, 20, 7])
@pytest.mark.parametrize("widths", [(5, 5), (5, 8)])
def test_the_relation_loss_and_its_gradient_equal_torchs_divergence(part: int, widths: tuple[int, int]) -> None:
    mine, theirs = widths
    student, teacher = unit(4, mine).requires_grad_(), unit(4, theirs)
    anchors, teacher_anchors = unit(11, mine), unit(11, theirs)
    p = (teacher @ teacher_anchors.T / 0.05).softmax(1)
    q = (student @ anchors.T / 0.2).log_softmax(1)
    expected = F.kl_div(q, p, reduction="batchmean")
    found = relation_loss(student, teacher, anchors, teacher_anchors, 0.2, 0.05, part)
    # float32 sums of scores up to 20 in another order
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    losses = (found, expected, -(p * q).sum(1).mean())
    gradients = [torch.autograd.grad(loss, student, retain_graph=True)[0] for loss in losses]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-5, atol=1e-6)  # cross entropy is enough


def test_scores_that_overflow_an_exponential_are_safe() -> None:
    """Temperature 0.007 (SwAV teachers): exp(1 / 0.007) is infinite in float32."""
    student, memory = unit(3, 5), unit(9, 5)
    expected = (student.double() @ memory.double().T / 0.007).logsumexp(1)
    torch.testing.assert_close(log_sum(student, memory, 0.007, 7).double(), expected, rtol=1e-5, atol=1e-5)


def test_the_memory_may_change_between_forward_and_backward() -> None:
    student, memory = unit(3, 5).requires_grad_(), unit(9, 5)
    (before,) = torch.autograd.grad(log_sum(student, memory, 0.1).sum(), student)
    found = log_sum(student, memory, 0.1).sum()
    memory.zero_()
    assert torch.equal(torch.autograd.grad(found, student)[0], before)


def test_contrast_is_cross_entropy_with_the_own_target_first() -> None:
    online, target, bank = unit(4, 5).requires_grad_(), unit(4, 5), unit(9, 5)
    logits = torch.cat([(online * target).sum(1, keepdim=True), online @ bank.T], 1) / 0.2
    expected = F.cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
    found = contrast(online, target, bank, 0.2)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, online), torch.autograd.grad(expected, online))


def test_similarity_distillation_with_the_query_as_an_anchor_and_a_sharp_teacher_is_contrast() -> None:
    online, target, bank = unit(1, 5), unit(1, 5), unit(9, 5)
    anchors = torch.cat([target, bank])
    found = relation_loss(online, target, anchors, anchors, 0.2, 1e-4)
    torch.testing.assert_close(found, contrast(online, target, bank, 0.2), rtol=1e-5, atol=1e-5)


def test_a_sharp_teacher_asks_for_its_nearest_anchor() -> None:
    student, teacher, anchors = unit(6, 5), unit(6, 5), unit(9, 5)
    nearest = (teacher @ anchors.T).argmax(1)
    expected = F.cross_entropy(student @ anchors.T / 0.2, nearest)
    torch.testing.assert_close(relation_loss(student, teacher, anchors, anchors, 0.2, 1e-5), expected)


@pytest.mark.parametrize("part", [1 << 24, 30, 4])
@pytest.mark.parametrize("labelled", [False, True])
def test_top_rows_equal_a_sorted_list(part: int, labelled: bool) -> None:
    queries, memory = unit(5, 4), unit(13, 4)
    own = torch.tensor([0, 12, 5, 6, 3])
    labels, memory_labels = torch.tensor([0, 1, 2, -1, 9]), torch.randint(3, (13,))
    memory_labels[own] = labels
    options = {"labels": labels, "memory_labels": memory_labels} if labelled else {}
    scores, rows = top_rows(queries, memory, 6, own, part=part, **options)
    for i in range(5):
        free = not labelled or labels[i] < 0
        allowed = [j for j in range(13) if j != own[i] and (free or memory_labels[j] == labels[i])]
        ranked = sorted(allowed, key=lambda j: -float(queries[i] @ memory[j]))
        wanted = [int(own[i]), *ranked][:6]
        assert rows[i, : len(wanted)].tolist() == wanted
        assert (scores[i] > float("-inf")).sum() == len(wanted)


@pytest.mark.parametrize(("rows", "k"), [(13, 13), (20 * GROUP, 5), (20 * GROUP + 17, 5), (20 * GROUP - 1, 6)])
def test_the_largest_by_groups_equal_those_of_all(rows: int, k: int) -> None:
    scores = torch.randn(8, rows)
    scores[1] = float("-inf")  # no row is allowed
    scores[2, 3:] = float("-inf")  # fewer than k are
    scores[3, :k] = float("inf")  # all in one group
    scores[4, -1] = 99.0  # in what is less than a group
    scores[5] = scores[5].round()  # ties
    top, places = largest(scores, k)
    assert torch.equal(top, scores.topk(k, dim=1).values)
    assert torch.equal(scores.gather(1, places), top)
    assert all(len(set(row)) == k for row in places.tolist())


@pytest.mark.parametrize("part", [7 * GROUP * 90, 1 << 24])
def test_rows_of_a_memory_of_many_groups_equal_a_sorted_one(part: int) -> None:
    queries, memory = unit(7, 8), unit(95 * GROUP + 5, 8)
    own = torch.tensor([0, 90 * GROUP, 90 * GROUP - 1, 95 * GROUP + 4, 64, 63, 4000])
    scores, rows = top_rows(queries, memory, 4, own, part=part)
    ranked = (queries @ memory.T).scatter(1, own[:, None], float("inf")).argsort(dim=1, descending=True)[:, :4]
    assert torch.equal(rows, ranked)
    assert torch.allclose(scores[:, 1:], (queries @ memory.T).gather(1, ranked)[:, 1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_a_memory_on_an_accelerator_equal_float64(dtype: torch.dtype) -> None:
    queries, memory = unit(33, 64).to(dtype).cuda(), unit(40_037, 64).to(dtype).cuda()
    own = torch.randint(40_037, (33,), device="cuda")
    scores, rows = top_rows(queries.float(), memory, 6, own, part=33 * 7000)
    exact = queries.double() @ memory.double().T
    ranked = exact.scatter(1, own[:, None], float("inf")).topk(6, dim=1)
    assert torch.equal(rows[:, 0], own)
    error = 1e-5 if dtype != torch.float32 else 2e-3  # TF32, where it is allowed
    assert (scores[:, 1:] - ranked.values[:, 1:]).abs().max() < error
    assert (exact.gather(1, rows)[:, 1:] - ranked.values[:, 1:]).abs().max() < error


def test_a_queue_is_a_deque_and_its_slots_stay_aligned() -> None:
    bank = Bank(7, 3, second=2)
    place = bank.rows.data_ptr()
    begin = [(bank.rows[i].clone(), -1, bank.beside[i].clone()) for i in range(7)]
    oracle: deque[tuple[Tensor, int, Tensor]] = deque(begin, maxlen=7)
    for count in (3, 1, 5, 7, 2, 4):
        values, labels, second = torch.randn(count, 3), torch.randint(9, (count,)), torch.randn(count, 2)
        slots = bank.push(values, labels, second)
        assert torch.equal(bank.rows[slots], values)
        oracle.extend(zip(values, labels.tolist(), second, strict=True))
        order = (int(bank.oldest) + torch.arange(7)) % 7  # oldest first
        assert torch.equal(bank.rows[order], torch.stack([row for row, _, _ in oracle]))
        assert bank.labels[order].tolist() == [label for _, label, _ in oracle]
        assert torch.equal(bank.beside[order], torch.stack([row for _, _, row in oracle]))
    assert bank.rows.data_ptr() == place, "the bank was copied"
    with pytest.raises(ValueError, match=r"cannot take a batch of 8; raise --objective\.bank"):
        bank.push(torch.randn(8, 3))


def test_a_bank_weighs_and_its_search_costs_what_is_stated() -> None:
    """128,000 rows of 512 in float32: 0.244 GiB, and 0.131 GFLOPs per query (MSF, arXiv 2105.07269)."""
    hundredth = Bank(1280, 512)
    assert round(100 * hundredth.rows.nbytes / 2**30, 3) == 0.244
    with FlopCounterMode(display=False) as counter:
        top_rows(unit(1, 512), hundredth.rows, 5)
    assert round(100 * counter.get_total_flops() / 1e9, 3) == 0.131


def test_a_queue_goes_on_where_its_state_says() -> None:
    bank, other = Bank(5, 3, dtype=torch.bfloat16), Bank(5, 3, dtype=torch.bfloat16)
    bank.push(torch.randn(3, 3), torch.tensor([4, 5, 6]))
    other.load_state_dict(bank.state_dict())
    more = torch.randn(4, 3)
    assert torch.equal(bank.push(more), other.push(more))
    for name, value in bank.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert {"rows", "labels", "oldest"} <= bank.state_dict().keys()


def test_an_empty_memory_knows_which_rows_were_set() -> None:
    bank = ImageMemory(np.array([4, 9, 2]), 3, empty=True)
    bank.update(torch.tensor([9]), torch.tensor([[0.0, 0.0, 2.0]]), share=1.0)
    assert bank.known(torch.tensor([2, 9, 4])).tolist() == [False, True, False]


def test_a_momentum_copys_decay_may_end_below_one() -> None:
    copy_ = MomentumCopy(torch.nn.Linear(2, 2), 0.5, steps=10, end=0.9)
    assert [round(copy_.decay_at(step), 6) for step in (0, 5, 10, 20)] == [0.5, 0.7, 0.9, 0.9]


# Every objective


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_reach_what_is_trained_and_no_teacher_and_no_bank(name: str, teacher: str) -> None:
    objective = made(name, teacher)
    trained = {n for n, p in objective.named_parameters() if p.requires_grad}
    assert not any(n.startswith(("target.", "target_last.", "key.", "embedder.", "bank.", "pseudo.")) for n in trained)
    losses = objective(batch_of(views=objective.views))
    losses["loss"].backward()
    reached = {n for n, p in objective.named_parameters() if p.grad is not None}
    assert reached == trained, "several processes want a gradient for every trained parameter"
    assert all(not value.requires_grad for key, value in losses.items() if key != "loss")
    assert not any(b.requires_grad for b in objective.buffers())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_classifier_listens_and_does_not_speak(name: str, teacher: str) -> None:
    """Neither the loss nor the trunk's gradient depends on the classifier; the classifier's gradient is a probe's."""
    one, two = made(name, teacher), made(name, teacher)
    with torch.no_grad():
        two.model.head.fc.weight.mul_(100)
    batch = batch_of(views=one.views)
    found = [objective(batch) for objective in (one, two)]
    assert torch.equal(found[0]["probe"], found[1]["probe"]) is False
    # the classifier's loss is added and taken away again, which rounds at its own size
    torch.testing.assert_close(found[0]["loss"], found[1]["loss"], rtol=1e-5, atol=1e-5)
    for losses in found:
        losses["loss"].backward()
    for (n, p), q in zip(one.model.named_parameters(), two.model.parameters(), strict=True):
        if not n.startswith("head.fc"):
            assert torch.equal(p.grad, q.grad), n
        else:
            assert p.grad.abs().sum() > 0, n


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_goes_on_from_its_state_bit_for_bit(name: str, teacher: str) -> None:
    def train(objective: Objective, first: int, last: int) -> list[float]:
        optimizer = torch.optim.SGD([p for p in objective.parameters() if p.requires_grad], lr=0.05)
        seen = []
        for step in range(first, last):
            loss = objective(batch_of(step, objective.views))["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            objective.after_step(step)
            seen.append(float(loss.detach()))
        return seen

    whole = made(name, teacher)
    losses = train(whole, 0, 7)
    half = made(name, teacher)
    assert train(half, 0, 4) == losses[:4]
    resumed = made(name, teacher)
    resumed.load_state_dict(copy.deepcopy(half.state_dict()))
    assert train(resumed, 4, 7) == losses[4:]
    for key, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key


@pytest.mark.parametrize("name", ["compres 1q", "dino"])
def test_a_compiled_step_is_the_plain_one_though_the_bank_changes_in_it(name: str, teacher: str) -> None:
    """One graph of the loss and the push once gave one queue another gradient at the same loss."""
    found = []
    for compiled in (False, True):
        objective = made(name, teacher)
        if compiled:
            objective.compile(dynamic=False, backend="aot_eager")
        objective(batch_of(views=objective.views))["loss"].backward()
        found.append({n: p.grad for n, p in objective.named_parameters() if p.grad is not None})
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["byol", "moco", "isd", "msf", "cmsf self", "protonw", "compres 2q"])
def test_after_every_step_the_slow_copy_has_moved_by_its_share(name: str, teacher: str) -> None:
    objective = made(name, teacher, **({"momentum": 0.9} if name == "compres 2q" else {}))
    slow = objective.key if name == "compres 2q" else objective.target
    before = [p.clone() for p in slow.module.parameters()]
    objective(batch_of(views=objective.views))
    for p in objective.model.parameters():
        p.data.add_(torch.randn_like(p))
    objective.after_step(0)
    share = 0.9 if name == "compres 2q" else CONFIGS[name].momentum
    for old, moved, now in zip(before, slow.module.parameters(), objective.model.parameters(), strict=True):
        torch.testing.assert_close(moved, share * old + (1 - share) * now)


# BYOL, MoCo, ISD, MSF


def test_mean_shift_to_one_neighbour_is_byol_exactly(teacher: str) -> None:
    byol, msf = made("byol", teacher, momentum_end=None), made("msf", teacher, k=1)
    msf.load_state_dict(byol.state_dict(), strict=False)
    for step in range(3):
        found = [objective(batch_of(step)) for objective in (byol, msf)]
        assert torch.equal(found[0]["loss"], found[1]["loss"])
        for objective, losses in zip((byol, msf), found, strict=True):
            objective.zero_grad()
            losses["loss"].backward()
        for (n, p), q in zip(byol.named_parameters(), msf.named_parameters(), strict=True):
            assert n == q[0]
            assert (p.grad is None and q[1].grad is None) or torch.equal(p.grad, q[1].grad), n


def test_byol_is_the_squared_distance_of_unit_vectors(teacher: str) -> None:
    objective, batch = made("byol", teacher), batch_of()
    twin = copy.deepcopy(objective)
    online = twin.predictor(twin.model.outputs(batch.views[1]).embedding)
    target = twin.target.module.outputs(batch.views[0]).embedding
    apart = F.normalize(online, dim=1) - F.normalize(target, dim=1)
    torch.testing.assert_close(objective(batch)["loss"], apart.square().sum(1).mean(), rtol=1e-5, atol=1e-6)


def test_moco_both_ways_contrasts_each_view_with_the_other_and_pushes_both(teacher: str) -> None:
    objective = made("moco both ways", teacher).eval()  # without statistics of the batch
    batch, rows = batch_of(), objective.bank.rows.clone()
    views = [objective.model.head.embed(objective.model.tokens(view)) for view in batch.views]
    online = [F.normalize(view, dim=1) for view in views]
    target = [objective.target.embed(view) for view in batch.views]
    terms = []
    for a, b in ((0, 1), (1, 0)):
        scores = torch.cat([(online[a] * target[b]).sum(1, keepdim=True), online[a] @ rows.T], 1) / 0.3
        terms.append(F.cross_entropy(scores, torch.zeros(COUNT, dtype=torch.int64)))
    torch.testing.assert_close(objective(batch)["loss"], sum(terms) / 2, rtol=1e-5, atol=1e-6)
    pushed = objective.bank.rows[: 2 * COUNT]
    torch.testing.assert_close(pushed, torch.cat([target[1], target[0]]))


def test_two_queues_lag_by_a_share_of_the_run(teacher: str) -> None:
    def momentum(steps: int, **changes: object) -> float:
        config = replace(CONFIGS["compres 2q"], teacher=teacher, **changes)
        return build_objective(config, small(), replace(FACTS, steps=steps)).key.decay  # type: ignore[union-attr]

    assert momentum(650_000) == pytest.approx(0.999)  # the paper's run
    assert 1 / (1 - momentum(65_000)) == pytest.approx(100)  # a tenth as long, a tenth of the lag
    assert momentum(300) == 0
    assert momentum(300, momentum=0.9) == 0.9


def test_byol_both_ways_is_the_mean_of_the_two_directions_where_nothing_depends_on_the_batch(teacher: str) -> None:
    """In evaluation mode BatchNorm treats each image alone, so the two directions can be computed apart."""
    both, one = made("byol both ways", teacher).eval(), made("byol", teacher).eval()
    batch = batch_of()
    back = Batch(batch.views[::-1], batch.label, batch.target, batch.index)
    expected = (one(batch)["loss"] + one(back)["loss"]) / 2
    torch.testing.assert_close(both(batch)["loss"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["moco", "isd"])
def test_an_image_is_never_its_own_anchor(name: str, teacher: str) -> None:
    objective, batch = made(name, teacher), batch_of()
    twin, before = copy.deepcopy(objective), objective.bank.rows.clone()
    online = F.normalize(twin.predictor(twin.model.outputs(batch.views[1]).embedding), dim=1)
    target = F.normalize(twin.target.module.outputs(batch.views[0]).embedding, dim=1)
    if name == "isd":
        p = (target @ before.T / 0.03).softmax(1)
        expected = F.kl_div((online @ before.T / 0.12).log_softmax(1), p, reduction="batchmean")
    else:
        logits = torch.cat([(online * target).sum(1, keepdim=True), online @ before.T], 1) / 0.3
        expected = F.cross_entropy(logits, torch.zeros(COUNT, dtype=torch.int64))
    torch.testing.assert_close(objective(batch)["loss"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(objective.bank.rows[:COUNT], target)
    assert torch.equal(objective.bank.rows[COUNT:], before[COUNT:])


def test_mean_shift_equals_brute_force_over_the_bank_with_the_batch_in_it(teacher: str) -> None:
    objective = made("msf", teacher)
    for step in range(4):
        batch = batch_of(step)
        twin = copy.deepcopy(objective)
        online = F.normalize(twin.predictor(twin.model.outputs(batch.views[1]).embedding), dim=1)
        target = F.normalize(twin.target.module.outputs(batch.views[0]).embedding, dim=1)
        losses = objective(batch)
        bank, right, terms = objective.bank, [], []
        for i in range(COUNT):
            nearest = sorted(range(16), key=lambda j: float((target[i] - bank.rows[j]).norm()))[:3]
            torch.testing.assert_close(bank.rows[nearest[0]], target[i])  # u itself
            terms += [(online[i] - bank.rows[j]).square().sum() for j in nearest]
            right += [int(bank.labels[j] == batch.label[i]) for j in nearest[1:]]
        torch.testing.assert_close(losses["loss"], torch.stack(terms).mean(), rtol=1e-5, atol=1e-6)
        assert losses["purity"] == pytest.approx(sum(right) / len(right))


def test_the_distance_to_neighbours_has_the_gradient_of_the_distance_to_their_mean() -> None:
    online, bank, found = unit(4, 5).requires_grad_(), unit(9, 5), torch.randint(9, (4, 3))
    (one,) = torch.autograd.grad(shift_loss(online, bank[found]), online)
    (two,) = torch.autograd.grad(-2 * (online * bank[found].mean(1)).sum(1).mean(), online)
    torch.testing.assert_close(one, two)


def test_purity_by_hand() -> None:
    bank_labels = torch.tensor([0, 0, 1, 2, -1])
    found = torch.tensor([[0, 1, 2], [2, 3, 4]])
    assert purity(found, torch.tensor([0, 1]), bank_labels) == pytest.approx(1 / 4)


# CMSF


@pytest.mark.parametrize(("k", "pool"), [(2, 4), (3, 3), (1, 5)])
def test_constrained_neighbours_equal_two_sorted_lists(k: int, pool: int) -> None:
    target, hint, rows, beside = unit(5, 4), unit(5, 6), unit(12, 4), unit(12, 6)
    own = torch.tensor([0, 11, 4, 7, 2])
    bank = Bank(12, 4, second=6)
    bank.rows.copy_(rows)
    bank.beside.copy_(beside)
    found = constrained_rows(bank, target, hint, own, k, pool)
    for i in range(5):
        others = [j for j in range(12) if j != own[i]]
        allowed = sorted(others, key=lambda j: -float(hint[i] @ beside[j]))[: pool - 1]
        ranked = sorted(allowed, key=lambda j: -float(target[i] @ rows[j]))
        assert set(found[i].tolist()) == {int(own[i]), *ranked[: k - 1]}
        assert found[i, 0] == own[i]


def test_mean_shift_by_an_older_embedding_is_half_plain_and_half_constrained(teacher: str) -> None:
    objective = made("cmsf self", teacher)
    for step in range(5):  # beyond the first epoch of 3 steps, where hints differ from targets
        batch = batch_of(step)
        twin = copy.deepcopy(objective)
        online = F.normalize(twin.predictor(twin.model.outputs(batch.views[1]).embedding), dim=1)
        target = F.normalize(twin.target.module.outputs(batch.views[0]).embedding, dim=1)
        loss, bank, terms = objective(batch)["loss"], objective.bank, []
        for i in range(COUNT):
            near = sorted(range(16), key=lambda j: float((target[i] - bank.rows[j]).norm()))
            own, hint = near[0], bank.beside[near[0]]
            allowed = sorted(near[1:], key=lambda j: float((hint - bank.beside[j]).norm()))[:4]
            constrained = [own, *(j for j in near if j in allowed)][:3]
            terms += [(online[i] - bank.rows[j]).square().sum() for j in (*near[:3], *constrained)]
        torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=1e-5, atol=1e-6)


def test_a_pool_of_the_whole_bank_is_plain_mean_shift(teacher: str) -> None:
    cmsf, msf = made("cmsf self", teacher, pool=16), made("msf", teacher)
    for step in range(4):  # beyond the first epoch of 3 steps, where hints differ from targets
        losses = [objective(batch_of(step))["loss"] for objective in (cmsf, msf)]
        torch.testing.assert_close(losses[0], losses[1])


def test_neighbours_of_one_label_are_all_neighbours_where_there_is_no_other(teacher: str) -> None:
    """C = M: once the bank holds images of one class alone, supervised CMSF is plain mean shift."""
    cmsf, msf = made("cmsf supervised", teacher), made("msf", teacher)
    for step in range(4):
        batch = batch_of(step)
        alike = replace(batch, label=torch.ones_like(batch.label), target=torch.ones_like(batch.target))
        losses = [objective(alike)["loss"] for objective in (cmsf, msf)]
        if step == 3:  # 24 images filled a bank of 16; until then it has rows without a label
            torch.testing.assert_close(losses[0], losses[1])


def test_the_hint_is_what_the_target_said_when_the_image_last_came_by(teacher: str) -> None:
    objective = made("cmsf self", teacher, bank=18)
    first: dict[int, Tensor] = {}
    for step in range(6):  # two epochs
        batch = batch_of(step)
        objective(batch)
        slots = torch.arange(COUNT) + step % 3 * COUNT
        for slot, image in zip(slots.tolist(), batch.index.tolist(), strict=True):
            said = first.setdefault(image, objective.bank.rows[slot].clone())
            assert torch.equal(objective.bank.beside[slot], said)  # in the first epoch its own stands for it
    assert not torch.equal(objective.bank.beside, objective.bank.rows)


class Shifting(torch.nn.Module):
    """A guide that would answer otherwise in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(5)

    def forward(self, batch: Batch) -> Tensor:
        return F.dropout(self.norm(batch.images.flatten(1)[:, :5]), 0.5, self.training)


def test_a_guide_stays_as_it_is_in_training(teacher: str) -> None:
    guide = Shifting()
    objective = Cmsf(small(), CONFIGS["cmsf self"], 20, FACTS.labels, FACTS.index, guide=guide, guide_width=5)
    before, batch = copy.deepcopy(guide.state_dict()), batch_of()
    objective.train()
    wanted = guide.eval()(batch)
    objective.train()
    objective(batch)["loss"].backward()
    torch.testing.assert_close(objective.bank.beside[:COUNT], wanted)
    assert all(torch.equal(v, guide.state_dict()[k]) for k, v in before.items())


def test_labels_that_may_not_be_used_do_not_reach_the_classifier_either(teacher: str) -> None:
    objective = made("cmsf semi", teacher)
    batch = batch_of()
    known = objective.pseudo.true_label(batch.index) >= 0
    assert 0 < known.sum() < len(known)
    others = torch.where(known, batch.label, (batch.label + 1) % CLASSES)
    gradients = []
    for labels in (batch.label, others):
        again = made("cmsf semi", teacher)
        again(replace(batch, label=labels, target=labels))["loss"].backward()
        gradients.append(again.model.head.fc.weight.grad)
    assert torch.equal(*gradients)
    assert gradients[0].abs().sum() > 0
    logits = objective.model.outputs(batch.views[1]).stack[:, 0]
    wanted = F.cross_entropy(logits[known], batch.label[known])
    assert made("cmsf semi", teacher)(batch)["probe"] == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "clusters"])
def test_of_a_step_without_numbers_nothing_stays(name: str, teacher: str) -> None:
    """An update that is skipped leaves banks, memories, centres and statistics finite: the next step is a good one."""
    objective = made(name, teacher)
    step = TrainStep(objective, OptimConfig(warmup=0), SCHEDULE, device=torch.device("cpu"))
    bad = batch_of(1, objective.views)
    bad.views[-1][0] = float("nan")
    bad.views[0][1] = float("inf")
    for batch in (batch_of(0, objective.views), bad):
        step.feed(batch)
    assert step.updater.read_skipped() == (1, 1)
    wrong = [n for n, t in objective.state_dict().items() if t.is_floating_point() and not t.isfinite().all()]
    assert wrong == []
    assert torch.isfinite(objective(batch_of(2, objective.views))["loss"])


def test_labels_do_not_shape_the_representation_by_the_norm_that_clips(teacher: str) -> None:
    trunks = []
    for shift in (0, 1):
        objective = made("dino", teacher)
        config = OptimConfig(lr=0.01, clip=0.1, warmup=0)
        step = TrainStep(objective, config, SCHEDULE, device=torch.device("cpu"))
        for n in range(3):
            batch = batch_of(n, objective.views)
            labels = (batch.label + shift * n) % CLASSES
            step.feed(replace(batch, label=labels, target=labels))
        trunks.append(objective.model.trunk.state_dict())
    assert all(torch.equal(v, trunks[1][k]) for k, v in trunks[0].items())


def test_purity_is_not_told_where_there_are_no_labels(teacher: str) -> None:
    assert "purity" in made("msf", teacher)(batch_of())
    alone = replace(CONFIGS["msf"], k=1)
    assert "purity" not in build_objective(alone, small(), FACTS).train()(batch_of())
    objective = made("msf", teacher)
    objective.model.classes = (UNLABELLED,)
    assert "purity" not in objective(batch_of())


def test_a_line_is_told_where_there_are_no_labels_and_not_where_two_ask_for_one() -> None:
    said = {classes: collapse_note({"spread": 0.5, "rank": 1.05}, 0.5, classes) for classes in (1, 2, 10)}
    assert [bool(said[n]) for n in (1, 2, 10)] == [True, False, True]


def test_another_modality_may_guide(teacher: str) -> None:
    seen = unit(40, 5)
    config = CONFIGS["cmsf self"]
    objective = Cmsf(small(), config, 20, FACTS.labels, FACTS.index, guide=lambda b: seen[b.index], guide_width=5)
    batch = batch_of()
    assert torch.isfinite(objective(batch)["loss"])
    assert torch.equal(objective.bank.beside[:COUNT], seen[batch.index])
    with pytest.raises(ValueError, match="guide_width"):
        Cmsf(small(), config, 20, FACTS.labels, FACTS.index, guide=lambda b: seen[b.index])


@pytest.mark.parametrize("k", [3, None])
def test_supervised_neighbours_all_have_the_label(k: int | None, teacher: str) -> None:
    """Brute force over those of the label, the image among them; where they are fewer than k, over those."""
    objective = made("cmsf supervised", teacher, k=k)
    for step in range(3):
        batch = batch_of(step)
        twin = copy.deepcopy(objective)
        online = F.normalize(twin.predictor(twin.model.outputs(batch.views[1]).embedding), dim=1)
        target = F.normalize(twin.target.module.outputs(batch.views[0]).embedding, dim=1)
        loss, bank, terms = objective(batch)["loss"], objective.bank, []
        for i in range(COUNT):
            kin = [j for j in range(16) if bank.labels[j] == batch.label[i]]
            near = sorted(kin, key=lambda j: float((target[i] - bank.rows[j]).norm()))[:k]
            terms.append(torch.stack([(online[i] - bank.rows[j]).square().sum() for j in near]).mean())
        assert step or len(kin) == 2  # at first there are only two of each class
        torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=1e-5, atol=1e-6)


def test_class_means_leave_out_rows_without_a_label() -> None:
    rows, labels = torch.randn(6, 3), torch.tensor([1, -1, 1, 0, -1, 1])
    means, counts = class_means(rows, labels, 3)
    assert counts.tolist() == [1, 3, 0]
    torch.testing.assert_close(means[1], rows[[0, 2, 5]].mean(0))
    torch.testing.assert_close(means[0], rows[3])


def test_a_share_of_every_class_is_labelled_and_always_the_same() -> None:
    labels = np.array([0] * 20 + [1] * 10 + [2])
    rows = draw_labelled(labels, 0.1)
    assert np.bincount(labels[rows]).tolist() == [2, 1, 1]
    assert np.array_equal(rows, draw_labelled(labels, 0.1))


def test_pseudo_labels_are_true_where_known_guessed_where_sure_and_absent_before_the_first_round() -> None:
    corners = torch.eye(3)
    index = np.array([0, 2, 4])
    pseudo = PseudoLabels(index, np.array([2, 0, 1]), 3, 3, threshold=0.9)
    images = torch.zeros(5, 3, 4, 4)
    batch = Batch((images,), torch.zeros(5).long(), torch.zeros(5).long(), torch.tensor([0, 2, 4, 5, 99]))
    vectors = torch.cat([corners, corners[1:2], torch.full((1, 3), 3**-0.5)])
    pseudo.net[-1].bias.data[1] = 50  # ever so sure, but not asked yet
    assert pseudo.see(batch, vectors).tolist() == [2, 0, 1, -1, -1]
    pseudo.net[-1].bias.data[1] = 0
    for seed in range(300):
        pseudo.round(seed)
    assert pseudo.see(batch, vectors).tolist() == [2, 0, 1, 0, -1]  # like the second image; like none
    guess = pseudo.net(vectors[3:]).argmax(1)  # of the two whose labels may not be used, which are 0
    assert pseudo.right["pseudo"] == (guess == 0).float().mean()
    assert pseudo.right["pseudo_confident"] == 1
    assert not any(p.requires_grad for p in pseudo.parameters())


def test_a_round_is_held_at_the_end_of_every_epoch(teacher: str) -> None:
    objective, held = made("cmsf semi", teacher), []
    objective.pseudo.round = held.append
    for step in range(7):
        objective(batch_of(step))
        objective.after_step(step)
    assert held == [2, 5]  # 18 images, 6 a step


# Frozen teachers


def test_one_queue_is_two_where_the_students_anchors_are_the_teachers(teacher: str) -> None:
    losses, rows = [], unit(16, 24)
    for queues in (1, 2):
        config = CompresConfig(bank=16, teacher=teacher, queues=queues)
        objective = build_objective(config, small(width=24, projector="none"), FACTS)
        assert isinstance(objective.adapter, torch.nn.Identity)  # both are 24 wide
        objective.bank.rows.copy_(rows)
        if queues == 2:
            objective.bank.beside.copy_(rows)
        losses.append(objective(batch_of(views=1))["loss"])
    assert torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("name", ["compres 1q", "compres 2q"])
def test_compres_is_the_divergence_over_the_bank_before_the_batch(name: str, teacher: str) -> None:
    objective = made(name, teacher)
    for step in range(3):
        batch = batch_of(step, 1)
        twin = copy.deepcopy(objective)
        t = F.normalize(twin.embedder.ask(batch.images), dim=1)
        s = F.normalize(twin.adapter(twin.model.outputs(batch.images).embedding), dim=1)
        mine = twin.bank.beside if name.endswith("2q") else twin.bank.rows
        p = (t @ twin.bank.rows.T / 0.06).softmax(1)
        expected = F.kl_div((s @ mine.T / 0.06).log_softmax(1), p, reduction="batchmean")
        torch.testing.assert_close(objective(batch)["loss"], expected, rtol=1e-4, atol=1e-5)
        slots = (torch.arange(COUNT) + step * COUNT) % 16
        torch.testing.assert_close(objective.bank.rows[slots], t)
        if name.endswith("2q"):
            key = F.normalize(twin.key.module.outputs(batch.images).embedding, dim=1)
            torch.testing.assert_close(objective.bank.beside[slots], key)


def test_a_teacher_is_asked_for_features_before_its_projector_and_only_once_when_kept() -> None:
    teacher, student = small(7, width=24), small()
    embedder = Embedder(teacher, student, index=INDEX)
    assert embedder.width == 24  # the trunk's, not the projector's 8
    batches = [batch_of(step, 1) for step in range(3)]
    said = [embedder(batch) for batch in batches]
    expected = teacher.eval().head.pooled(teacher.tokens(batches[1].images))
    torch.testing.assert_close(said[1], expected.detach())
    other = batch_of(9, 1)
    again = Batch(other.views, batches[0].label, batches[0].target, batches[0].index)
    assert torch.equal(embedder(again), said[0]), "another view of a known image is not asked for"
    embedder.after_step(15)
    assert embedder.complete
    embedder.ask = None
    assert torch.equal(embedder(again), said[0])


@pytest.mark.parametrize("match", ["unit", "raw", "batch_norm"])
def test_regression_by_hand(match: str, teacher: str) -> None:
    objective = made("simreg", teacher, match=match)
    s, t = torch.randn(6, 5), torch.randn(6, 5)
    if match == "unit":
        expected = (s / s.norm(dim=1, keepdim=True) - t / t.norm(dim=1, keepdim=True)).square().sum(1).mean()
    elif match == "raw":
        expected = (s - t).square().mean()
    else:
        s_, t_ = ((x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt() for x in (s, t))
        expected = (s_ - t_).square().mean()
    torch.testing.assert_close(objective.compare(s, t), expected)


def test_one_layer_of_regression_is_linear_and_the_teacher_is_stored_by_hash(teacher: str) -> None:
    objective = made("regression", teacher)
    assert [type(part).__name__ for part in objective.regressor] == ["Linear"]
    assert objective.identities.keys() == {"embedder.teacher"}


def test_clusters_are_those_of_the_teachers_unit_features(teacher: str) -> None:
    """scikit-learn, from the same start, agrees on who is with whom."""
    from sklearn.cluster import KMeans

    objective = made("clusters", teacher)
    embedder = Embedder(load_embedder(teacher, small()), small())
    rows = torch.cat([F.normalize(embedder.ask(batch_of(step, 1).images), dim=1) for step in range(3)])
    found = objective.cluster[torch.from_numpy(INDEX)]
    assert found.unique().tolist() == [0, 1, 2, 3]
    start = torch.stack([rows[found == c].mean(0) for c in range(4)])
    expected = KMeans(4, init=start.numpy(), n_init=1).fit(rows.numpy())
    assert expected.labels_.tolist() == found.tolist(), "Lloyd's iterations would still move something"


def test_cluster_classification_is_cross_entropy_with_the_images_cluster(teacher: str) -> None:
    objective, batch = made("clusters", teacher), batch_of(1, 1)
    twin = copy.deepcopy(objective)
    chances = twin.classify(twin.model.outputs(batch.images).embedding).log_softmax(1)
    wanted = [int(twin.cluster[i]) for i in batch.index]
    expected = -torch.stack([chances[i, c] for i, c in enumerate(wanted)]).mean()
    torch.testing.assert_close(objective(batch)["loss"], expected, rtol=1e-5, atol=1e-6)


def test_crd_is_the_authors_estimate_with_probabilities_written_out(teacher: str) -> None:
    objective = made("crd", teacher)
    constants = None
    for step in range(3):
        batch = batch_of(step, 1)
        objective.before_step(step)
        twin = copy.deepcopy(objective)
        student = F.normalize(twin.of_student(twin.model.outputs(batch.images).embedding), dim=1)
        teacher_ = F.normalize(twin.of_teacher(twin.embedder.ask(batch.images)), dim=1)
        rows = [twin.students.rows, twin.teachers.rows]
        mine, chosen = torch.tensor([list(INDEX).index(i) for i in batch.index.tolist()]), twin.draw(step)
        outs = []
        for vectors, memory in ((student, rows[1]), (teacher_, rows[0])):
            near = torch.cat([memory[mine][:, None], memory[chosen].expand(COUNT, -1, -1)], 1)
            outs.append(((near * vectors[:, None]).sum(-1) / 0.07).exp())
        constants = constants or [float(out.detach().mean()) * 18 for out in outs]  # of the first step
        expected = 0
        for out, constant in zip(outs, constants, strict=True):
            p, noise = out / constant, 9 / 18
            expected -= (torch.log(p[:, 0] / (p[:, 0] + noise)) + torch.log(noise / (p[:, 1:] + noise)).sum(1)).mean()
        torch.testing.assert_close(objective(batch)["loss"], expected, rtol=1e-4, atol=1e-5)
        after = F.normalize(rows[0][mine] / 2 + student / 2, dim=1)
        torch.testing.assert_close(objective.students.rows[mine], after.detach())


# With labels


def test_supervised_contrast_by_hand() -> None:
    x, labels = unit(7, 4), torch.tensor([0, 0, 1, 1, 1, 0, 5])  # nobody else has 5
    terms = []
    for i in range(6):
        kin = [j for j in range(7) if j != i and labels[j] == labels[i]]
        total = sum(torch.exp(x[i] @ x[j] / 0.1) for j in range(7) if j != i)
        terms.append(-sum(torch.log(torch.exp(x[i] @ x[j] / 0.1) / total) for j in kin) / len(kin))
    x.requires_grad_()
    found = supervised_contrast(x, labels, 0.1)
    torch.testing.assert_close(found, torch.stack(terms).mean())
    assert torch.isfinite(torch.autograd.grad(found, x)[0]).all()


def test_prototypes_are_the_class_means_of_the_bank(teacher: str) -> None:
    objective, batch = made("protonw", teacher), batch_of()
    batch = Batch(batch.views, batch.label.clamp(max=1), batch.target.clamp(max=1), batch.index)  # class 2 is not seen
    twin = copy.deepcopy(objective)
    online = F.normalize(twin.predictor(twin.model.outputs(batch.views[1]).embedding), dim=1)
    target = F.normalize(twin.target.module.outputs(batch.views[0]).embedding, dim=1)
    means = torch.stack([F.normalize(target[batch.label == c].mean(0), dim=0) for c in range(2)])
    expected = F.cross_entropy(online @ means.T / 0.15, batch.label)
    torch.testing.assert_close(objective(batch)["loss"], expected, rtol=1e-4, atol=1e-5)


# What does not fit


def test_what_does_not_fit_is_refused_with_the_remedy(tmp_path: Path) -> None:
    plain = create_model("vit_micro_28", classes=3, depth=1)
    with pytest.raises(ValueError, match=r"--model\.head\.kind projected"):
        build_objective(ByolConfig(), plain, FACTS)
    with pytest.raises(ValueError, match=r"raise --objective\.bank"):
        Msf(small(), MsfConfig(k=9, bank=4), 1)
    with pytest.raises(ValueError, match=r"raise --objective\.pool"):
        build_objective(CmsfConfig(k=9, pool=4), small(), FACTS)
    with pytest.raises(ValueError, match=r"objective\.teacher: name one"):
        build_objective(CompresConfig(), small(), FACTS)
    with pytest.raises(FileNotFoundError, match=r"objective\.teacher"):
        build_objective(SimregConfig(teacher=str(tmp_path / "none")), small(), FACTS)
    other = str(small(7).save(tmp_path / "teacher"))
    with pytest.raises(ValueError, match=r"objective\.clusters: 99 clusters of 18 training images"):
        build_objective(ClustersConfig(teacher=other, clusters=99), small(), FACTS)
    several = TrainingFacts(np.eye(3, dtype=np.int64), np.arange(3), 1)
    with pytest.raises(ValueError, match="needs one label per image"):
        build_objective(CmsfConfig(constraint="supervised"), small(), several)
