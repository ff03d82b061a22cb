"""Schedules, optimisers, guards, moving average, checkpoints."""

from __future__ import annotations

import copy
import math
import platform
from typing import cast

import pytest
import timm.optim
import torch
from processes import run_script
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.data.batch import Batch
from vitrail.engine import checkpoint
from vitrail.engine.config import OptimConfig
from vitrail.engine.device import ProcessGroup, choose_device
from vitrail.engine.lamb import Lamb
from vitrail.engine.loop import _laid_out
from vitrail.engine.muon import orthogonalised
from vitrail.engine.optimizer import build_optimizer, choose_tuned, decays, make_schedule, parameter_groups, set_step
from vitrail.engine.run_folder import RunFolder, free_name
from vitrail.engine.step import Ema, Meter, TrainStep, Updater
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.model.adapters.apply import apply
from vitrail.model.adapters.config import Lora, Nola
from vitrail.model.build import create_model
from vitrail.model.parts.modules import channels_last_works, is_convolutional, placed

CPU = torch.device("cpu")


def objective(**changes: object) -> Supervised:
    return Supervised(create_model("vit_micro_28", classes=5, **changes), SupervisedConfig())


# Schedules


def test_cosine_with_warmup_floor_and_cooldown() -> None:
    config = OptimConfig(lr=1.0, epochs=100, warmup=10, cooldown=10, floor=0.1, warmup_lr=0.0)
    curve = make_schedule(config, batch=10, images=100)
    assert (curve.steps, curve.warmup, curve.cooldown) == (1000, 100, 100)
    assert curve.lr(0) == pytest.approx(1 / 101)
    assert curve.lr(100) == pytest.approx(1.0)
    assert curve.lr(500) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 400 / 800)))
    assert curve.lr(900) == pytest.approx(0.1)
    assert curve.lr(999) == pytest.approx(0.1)
    assert all(curve.lr(s) < curve.lr(s + 1) for s in range(99))
    assert all(curve.lr(s) >= curve.lr(s + 1) for s in range(100, 999))


def test_cosine_equals_torchs_after_warmup() -> None:
    config = OptimConfig(lr=0.3, steps=50, warmup=0, floor=0.02)
    curve = make_schedule(config, batch=4, images=100)
    parameter = nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([parameter], lr=0.3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=50, eta_min=0.02)
    for step in range(50):
        assert curve.lr(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-6)
        sgd.step()
        theirs.step()


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "steps"),
    [(10, 5, 1, 2), (10, 3, 1, 4), (10, 3, 3, 10), (5, 12, 1, 1), (30, 3, 0.1, 1), (3, 1, 0.7, 3), (1000, 7, 1.1, 158)],
)
def test_steps_cover_the_epochs(rows: int, batch: int, epochs: float, steps: int) -> None:
    assert make_schedule(OptimConfig(epochs=epochs), batch, rows).steps == steps


def test_linear_step_and_constant() -> None:
    base = {"lr": 1.0, "epochs": 90, "warmup": 0}
    linear = make_schedule(OptimConfig(schedule="linear", floor=0.0, **base), 10, 10)
    assert [linear.lr(s) for s in (0, 45)] == pytest.approx([1.0, 0.5])
    steps = make_schedule(OptimConfig(schedule="step", **base), 10, 10)
    assert [steps.lr(s) for s in (0, 29, 30, 60)] == pytest.approx([1, 1, 0.1, 0.01])
    constant = make_schedule(OptimConfig(schedule="constant", **base), 10, 10)
    assert {constant.lr(s) for s in range(90)} == {1.0}


def test_learning_rate_scales_with_the_batch() -> None:
    # DeiT (arXiv 2012.12877) and Grafit (arXiv 2011.12982)
    assert make_schedule(OptimConfig(lr=5e-4, lr_batch=512), 1024, 10**6).peak == pytest.approx(1e-3)
    assert make_schedule(OptimConfig(lr=0.1, lr_batch=256), 1024, 10**6).peak == pytest.approx(0.4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_that_changes_is_applied_as_adamw_applies_it(name: str) -> None:
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.1, weight_decay_end=0.9, steps=6, warmup=0)
    curve = make_schedule(config, 1, 100)
    ours, theirs = nn.Linear(1, 3), nn.Linear(1, 3)  # one column: no matrix, so AdamW's in both cases
    theirs.load_state_dict(ours.state_dict())
    updater = Updater(build_optimizer(ours, config), 0.0)
    adam = torch.optim.AdamW([{"params": [theirs.weight]}, {"params": [theirs.bias], "weight_decay": 0.0}])
    for step in range(6):
        set_step(updater.optimizer, curve, step)
        assert all(group["weight_decay"] == 0.0 for group in updater.optimizer.param_groups)
        for group in adam.param_groups:
            group["lr"] = curve.lr(step)
        adam.param_groups[0]["weight_decay"] = curve.weight_decay(step)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        updater.apply()
        adam.step()
        torch.testing.assert_close(ours.weight, theirs.weight)
        torch.testing.assert_close(ours.bias, theirs.bias)
    before = ours.weight.detach().clone()
    ours.weight.grad, ours.bias.grad = torch.full_like(ours.weight, float("nan")), torch.zeros_like(ours.bias)
    updater.apply()
    assert torch.equal(ours.weight, before)  # a skipped step decays nothing


def test_weight_decay_may_fall_on_everything() -> None:
    groups = parameter_groups(objective(), OptimConfig(decay_all=True))
    assert all(group["decayed"] for group in groups)
    assert any(not group["decayed"] for group in parameter_groups(objective(), OptimConfig()))


def test_weight_decay_runs_on_a_cosine() -> None:
    curve = make_schedule(OptimConfig(weight_decay=0.04, weight_decay_end=0.4, steps=101), 1, 100)
    assert curve.weight_decay(0) == pytest.approx(0.04)
    assert curve.weight_decay(50) == pytest.approx(0.22)
    assert curve.weight_decay(100) == pytest.approx(0.4)


def test_a_run_is_never_all_warmup() -> None:
    curve = make_schedule(OptimConfig(epochs=1, warmup=5), batch=10, images=100)
    assert curve.steps == 10
    assert curve.warmup == 5


# Groups


def test_norms_biases_and_tokens_are_not_decayed_and_everything_is_in_one_group() -> None:
    ours = objective(layerscale=0.1)
    groups = parameter_groups(ours, OptimConfig())
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(n for n, _ in ours.named_parameters())
    plain = {name for group in groups if not group["decayed"] for name in group["names"]}
    expected = {
        n for n, _ in ours.named_parameters() if n.endswith(("bias", "gamma", "cls_token", "pos_embed")) or ".norm" in n
    }
    assert plain == expected


def test_layer_decay_falls_from_head_to_stem() -> None:
    groups = parameter_groups(objective(), OptimConfig(layer_decay=0.5))
    share = {name: group["share"] for group in groups for name in group["names"]}
    # MAE, three blocks: head and norm 1, blocks 0.5 .. 0.125 counted from above, stem below all.
    assert share["model.head.fc.weight"] == share["model.trunk.norm.weight"] == 1
    assert [share[f"model.trunk.blocks.{i}.mlp.fc1.weight"] for i in (2, 1, 0)] == [0.5, 0.25, 0.125]
    assert share["model.trunk.pos_embed"] == share["model.trunk.patch_embed.proj.weight"] == 0.0625


def test_a_head_may_have_a_rate_of_its_own() -> None:
    groups = parameter_groups(objective(), OptimConfig(layer_decay=0.5, head_rate=0.1))
    share = {name: group["share"] for group in groups for name in group["names"]}
    assert {name for name, each in share.items() if each == 0.1} == {"model.head.fc.weight", "model.head.fc.bias"}
    below = parameter_groups(objective(), OptimConfig(layer_decay=0.5))
    rest = {name: group["share"] for group in below for name in group["names"]}
    assert all(share[name] == each for name, each in rest.items() if ".head." not in name)


def test_a_layer_has_its_share_of_every_rate_the_lowest_too() -> None:
    config = OptimConfig(lr=8e-3, steps=10, warmup=0, floor=2e-3, layer_decay=0.5)
    made, curve = build_optimizer(objective(), config), make_schedule(config, 4, 40)
    for step, rate in ((0, 8e-3), (5, 5e-3), (10, 2e-3)):  # a half cosine: the end, the middle, the other end
        set_step(made, curve, step)
        found = sorted({round(float(group["lr"]), 9) for group in made.param_groups})
        assert found == pytest.approx([rate * 0.5**below for below in (4, 3, 2, 1, 0)])


@pytest.mark.parametrize("name", ["deit_tiny", "timm:vit_tiny_patch16_224", "timm:resnet18"])
def test_layer_decay_is_that_of_timm(name: str) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224" if name == "deit_tiny" else name.removeprefix("timm:"))
    names = {id(p): n for n, p in theirs.named_parameters()}
    groups = timm.optim.param_groups_layer_decay(theirs, layer_decay=0.75)
    expected = {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
    made = parameter_groups(Supervised(create_model(name), SupervisedConfig()), OptimConfig(layer_decay=0.75))
    prefix = "model.trunk." if name == "deit_tiny" else "model.trunk.backbone."
    share = {n.removeprefix(prefix): group["share"] for group in made for n in group["names"]}
    share = {n.replace("model.head.fc", "head"): value for n, value in share.items()}
    different = {n for n in expected if share[n] != pytest.approx(expected[n])}
    # To the final norm timm gives the rate of the last block, MAE that of the head.
    assert different == ({"norm.weight", "norm.bias"} if name == "deit_tiny" else set())


@pytest.mark.parametrize(
    ("tune", "inside", "outside"),
    [
        ("head", ["head.fc.weight"], ["trunk.norm.weight", "trunk.cls_token"]),
        ("last:1", ["trunk.blocks.2.attn.qkv.weight", "trunk.norm.weight"], ["trunk.blocks.1.mlp.fc1.weight"]),
        ("norm", ["trunk.blocks.0.norm1.weight", "head.fc.bias"], ["trunk.blocks.0.attn.qkv.bias"]),
        ("attention", ["trunk.blocks.0.attn.qkv.weight"], ["trunk.blocks.0.mlp.fc1.weight", "trunk.cls_token"]),
        ("full", ["trunk.cls_token"], []),
    ],
)
def test_tune_freezes_the_rest(tune: str, inside: list[str], outside: list[str]) -> None:
    model = create_model("vit_micro_28", classes=5)
    trainable, total = choose_tuned(model, tune)
    on = {n for n, p in model.named_parameters() if p.requires_grad}
    assert on >= {*inside, "head.fc.weight", "head.fc.bias"}
    assert on.isdisjoint(outside)
    assert trainable == sum(p.numel() for n, p in model.named_parameters() if n in on)
    assert total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "last", "before"),
    [
        ("cifar_resnet20", "trunk.layer3.2.conv1.weight", "trunk.layer3.1.conv2.weight"),
        ("timm:resnet18", "trunk.backbone.layer4.1.conv1.weight", "trunk.backbone.layer4.0.conv2.weight"),
    ],
)
@pytest.mark.parametrize("head", [None, "mean"])
def test_the_last_block_of_a_cnn_is_one_block(name: str, last: str, before: str, head: str | None) -> None:
    model = create_model(name, classes=5, **({} if head is None else {"head": head}))
    choose_tuned(model, "last:1")
    on = {n for n, p in model.named_parameters() if p.requires_grad}
    assert last in on
    assert before not in on


def test_tune_refuses_what_the_model_has_not() -> None:
    with pytest.raises(ValueError, match="has 3 blocks"):
        choose_tuned(create_model("vit_micro_28", classes=5), "last:4")
    with pytest.raises(ValueError, match="no such parameters"):
        choose_tuned(create_model("timm:resnet18", classes=5), "attention")


@pytest.mark.parametrize("name", ["timm:resnet18", "timm:vit_tiny_patch16_224"])
def test_tune_head_of_a_timm_model_is_its_own_classifier(name: str) -> None:
    model = create_model(name, classes=5)
    trainable, _ = choose_tuned(model, "head")
    assert trainable == model.head.features * 5 + 5


# Optimisers


@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd_looks_ahead_along_its_momentum_where_it_is_nesterovs(nesterov: bool) -> None:
    """Nesterov (Grafit, arXiv 2011.12982): p -= lr (g + m v) with v = m v + g; plain: p -= lr v."""
    torch.manual_seed(0)
    made = objective()
    config = OptimConfig(name="sgd", lr=0.1, weight_decay=0.0, momentum=0.9, nesterov=nesterov)
    optimizer = build_optimizer(made, config)
    weight = made.model.head.fc.weight
    expected, velocity = weight.detach().clone(), torch.zeros_like(weight)
    for _ in range(3):
        for parameter in made.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        velocity = 0.9 * velocity + weight.grad
        expected -= 0.1 * (weight.grad + 0.9 * velocity if nesterov else velocity)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected)


def test_lamb_equals_timms() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.randn(3))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]

    def groups(ps: list[nn.Parameter]) -> list[dict[str, object]]:
        return [{"params": ps[:2], "weight_decay": 0.1}, {"params": ps[2:], "weight_decay": 0.0}]

    mine = Lamb(groups(ours), lr=0.02, eps=1e-6)
    other = timm.optim.Lamb(groups(theirs), lr=0.02, eps=1e-6, max_grad_norm=None)
    for _ in range(8):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        other.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_our_own_optimisers_never_ask_a_tensor_for_its_number(name: str) -> None:
    class Asked(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    objective = nn.ModuleDict({"blocks": nn.ModuleDict({"fc": nn.Linear(4, 3)})})
    updater = Updater(build_optimizer(objective, OptimConfig(name=name)), clip=1.0)
    for _ in range(2):  # the first step makes the state
        objective["blocks"]["fc"](torch.randn(5, 4)).square().sum().backward()  # type: ignore[index]
        with Asked() as asked:
            updater.apply()
    assert asked.count == 0


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lamb", "adagrad", "muon"])
def test_a_bad_gradient_skips_the_update_and_leaves_no_trace(name: str) -> None:
    """Good, bad, good must equal good, good: weights, moments and counts alike."""
    config = OptimConfig(name=name, lr=0.01, clip=1.0, weight_decay=0.01)
    curve = make_schedule(config, 10, 100)

    def trained(bad_first: bool, bad_second: bool) -> tuple[dict[str, torch.Tensor], Updater]:
        torch.manual_seed(0)
        ours = objective()
        updater = Updater(build_optimizer(ours, config), config.clip)
        good = [[torch.randn_like(p) for p in ours.parameters()] for _ in range(2)]
        plan = [None] * bad_first + [good[0]] + [None] * bad_second + [good[1]]
        for step, gradients in enumerate(plan):
            set_step(updater.optimizer, curve, 7)
            for i, p in enumerate(ours.parameters()):
                p.grad = torch.full_like(p, float("nan")) if gradients is None else gradients[i].clone()
            updater.clock.fill_(step)
            updater.apply()
        return ours.state_dict(), updater

    plain, _ = trained(False, False)
    for first, second, last in ((True, False, 0), (False, True, 1)):
        guarded, updater = trained(first, second)
        assert all(torch.equal(guarded[k], v) for k, v in plain.items())
        assert updater.read_skipped() == (1, last)
        assert updater.read_skipped()[0] == 0


def test_clipping_limits_the_norm() -> None:
    config = OptimConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, clip=0.5, warmup=0, schedule="constant")
    ours = objective()
    before = torch.cat([p.detach().flatten().clone() for p in ours.parameters()])
    updater = Updater(build_optimizer(ours, config), config.clip)
    set_step(updater.optimizer, make_schedule(config, 10, 100), 0)
    for p in ours.parameters():
        p.grad = torch.randn_like(p)
    expected = torch.cat([p.grad.flatten() for p in ours.parameters()]).norm()
    norm, good = updater.apply()
    after = torch.cat([p.detach().flatten() for p in ours.parameters()])
    assert norm == pytest.approx(expected)
    assert good == 1
    assert (after - before).norm() == pytest.approx(0.5, rel=1e-4)


def test_the_meter_means_only_steps_that_counted() -> None:
    meter = Meter()
    for value, good in ((1.0, 1.0), (float("nan"), 0.0), (3.0, 1.0)):
        meter.add({"loss": torch.tensor(value)}, torch.tensor(good))
    assert meter.read(ProcessGroup()) == {"loss": 2.0}
    assert meter.read(ProcessGroup()) == {}


def test_ema_follows_its_recurrence() -> None:
    model = nn.Linear(2, 2, bias=False)
    ema = Ema(model, 0.9)
    expected = model.weight.detach().clone()
    for step in range(200):
        model.weight.data.normal_()
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
        ema.set_step(step)
        ema.follow(model)
        torch.testing.assert_close(ema.model.weight, expected)
    assert not ema.model.weight.requires_grad


# Checkpoints and folders


def state(step: int, value: float = 1.0) -> checkpoint.State:
    return checkpoint.State(step, {"a/x": torch.full((3,), value), "a/n": torch.tensor(step)}, {"data": "abc"})


def test_checkpoints_round_trip_and_old_ones_go(tmp_path) -> None:
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, state(step), keep=2)
    assert checkpoint.steps_saved(tmp_path) == [20, 30]
    found, damaged = checkpoint.newest(tmp_path)
    assert found.step == 30
    assert found.facts == {"data": "abc"}
    assert torch.equal(found.part("a")["x"], torch.ones(3))
    assert damaged == []


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "text"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, how: str) -> None:
    checkpoint.save(tmp_path, state(10), keep=2)
    path = checkpoint.save(tmp_path, state(20, 2.0), keep=2)
    whole = path.read_bytes()
    broken = {"cut": whole[:-5], "flipped": whole[:-3] + b"\x01" + whole[-2:], "empty": b"", "text": b"hello " * 50}
    path.write_bytes(broken[how])
    found, damaged = checkpoint.newest(tmp_path)
    assert found.step == 10
    assert len(damaged) == 1
    assert path.name in damaged[0]


def test_a_failed_write_leaves_the_old_checkpoint_and_no_rubbish(tmp_path, monkeypatch) -> None:
    import safetensors.torch

    checkpoint.save(tmp_path, state(10), keep=1)

    def full(tensors, path, metadata):
        path.write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, state(20), keep=1)
    assert checkpoint.newest(tmp_path)[0].step == 10
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000010.safetensors"]


def test_a_run_folder_is_never_overwritten_and_has_one_writer(tmp_path) -> None:
    run = RunFolder.create(tmp_path / "run", "seed: 0\n")
    with pytest.raises(FileExistsError, match="--resume"):
        RunFolder.create(tmp_path / "run", "seed: 0\n")
    opens = f"RunFolder.open(Path({str(run.path)!r}))"
    second = f"from pathlib import Path; from vitrail.engine.run_folder import RunFolder; {opens}"
    assert "another process is writing" in run_script(second).err
    run.unlock()
    assert run_script(second).code == 0
    RunFolder.open(tmp_path / "run").unlock()
    with pytest.raises(FileNotFoundError, match="no run folder"):
        RunFolder.open(tmp_path / "other")


def test_metrics_are_cut_back_and_torn_lines_forgotten(tmp_path) -> None:
    run = RunFolder.create(tmp_path / "run", "")
    for step in (10, 20, 30):
        run.write_metrics({"step": step, "loss": 1.0})
    run.write_metrics({"step": 20, "final": True})
    with run.metrics.open("a") as file:
        file.write('3\nnull\n{"step": 40, "lo')
    assert run.finished is False
    run.cut_metrics(20)
    assert [line["step"] for line in run.read_metrics()] == [10, 20]
    run.unlock()


def test_free_names_count_on(tmp_path) -> None:
    assert free_name(tmp_path / "a").name == "a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").mkdir()
    assert free_name(tmp_path / "a").name == "a-3"


def batches_of(count: int, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        images = torch.randint(256, (size, 3, 28, 28), dtype=torch.uint8, generator=generator)
        labels = torch.randint(3, (size,), generator=generator)
        made.append(Batch((images,), labels, labels, torch.arange(size)))
    return made


def test_a_step_is_forward_backward_clip_adamw_and_average() -> None:
    """Against the same done by hand with PyTorch's own parts."""
    ours, theirs = (create_model("vit_micro_28", classes=3, depth=1, width=32, heads=2) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    config = OptimConfig(lr=1e-3, weight_decay=0.1, clip=0.5, warmup=2, epochs=2)
    curve = make_schedule(config, 8, 24)
    step = TrainStep(Supervised(ours, SupervisedConfig()), config, curve, device=torch.device("cpu"), ema=0.9)
    no_decay = [p for n, p in theirs.named_parameters() if p.ndim < 2 or n.split(".")[-1] in ("cls_token", "pos_embed")]
    decayed = [p for p in theirs.parameters() if all(p is not q for q in no_decay)]
    adamw = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}])
    average = {n: p.detach().clone() for n, p in theirs.named_parameters()}
    for i, batch in enumerate(batches_of(5)):
        assert step.feed(batch)
        for group in adamw.param_groups:
            group["lr"] = curve.lr(i)
        adamw.zero_grad()
        torch.nn.functional.cross_entropy(theirs(batch.images), batch.label).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        adamw.step()
        decay = min(0.9, (1 + i) / (10 + i))
        average = {n: decay * average[n] + (1 - decay) * p.detach() for n, p in theirs.named_parameters()}
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # No loss depends on the bias of the keys: its gradient is rounding alone, which Adam turns into steps of 1.
        kept = [i for i in range(96) if not 32 <= i < 64] if name.endswith("qkv.bias") else slice(None)
        torch.testing.assert_close(mine[kept], other[kept], msg=name)
        torch.testing.assert_close(
            step.model.get_parameter(name)[kept], average[name][kept], msg=name, rtol=1e-5, atol=1e-7
        )


def test_pieces_of_a_step_give_the_step() -> None:
    models = [create_model("vit_micro_28", classes=3, depth=1, width=32, heads=2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    config = OptimConfig(name="sgd", lr=0.1, clip=0.0, warmup=0)
    steps = [
        TrainStep(
            Supervised(model, SupervisedConfig()),
            config,
            make_schedule(config, 8, 24),
            device=torch.device("cpu"),
            accumulate=pieces,
        )
        for model, pieces in zip(models, (1, 4), strict=True)
    ]
    for batch in batches_of(3):
        assert steps[0].feed(batch)
        fed = [steps[1].feed(batch.changed(lambda t, k=k: t[2 * k : 2 * k + 2])) for k in range(4)]
        assert fed == [False, False, False, True]
    assert steps[0].step == steps[1].step == 3
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    one, four = (step.meter.read(step.group) for step in steps)
    assert one == pytest.approx(four, rel=1e-5)


def test_where_a_graph_cannot_be_is_said() -> None:
    objective_ = objective()
    step = TrainStep(
        objective_, OptimConfig(), make_schedule(OptimConfig(), 8, 24), device=torch.device("cpu"), graph=True
    )
    assert step.why_no_graph == "only CUDA has graphs"


def test_the_stream_under_autocast_is_narrow_only_where_gains_allow() -> None:
    images = torch.zeros(1, 3, 28, 28)
    half, single = torch.bfloat16, torch.float32
    for options, dtype in (({}, half), ({"layerscale": 0.1}, half), ({"layerscale": 1e-4}, single)):
        trunk = create_model("vit_micro_28", classes=3, depth=2, **options).trunk
        with torch.autocast("cpu", torch.bfloat16):
            tokens = trunk.embed(images)
            after = trunk.encode(tokens, until=1)[0]
        assert (tokens.sequence.dtype, after.sequence.dtype) == (dtype, dtype)
    assert trunk.embed(images).sequence.dtype == torch.float32


def test_orthogonalised_matrices_are_near_the_polar_factor() -> None:
    torch.manual_seed(0)
    for rows, columns in ((16, 16), (16, 48), (48, 16)):
        matrices = torch.randn(4, rows, columns) * torch.logspace(-3, 3, 4)[:, None, None]
        made = orthogonalised(matrices)
        u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
        found = u.mT @ made @ vh.mT  # nearly diagonal, and the diagonal nearly 1
        values = found.diagonal(dim1=-2, dim2=-1)
        # The quintic does not converge: it keeps singular values between these bounds, and bf16 blurs the smallest.
        assert values.median() > 0.7
        assert values.max() < 1.25
        assert (found - torch.diag_embed(values)).abs().max() < 0.1


def test_muon_is_adamw_for_all_but_hidden_matrices() -> None:
    ours = objective(depth=2)
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}
    twin = copy.deepcopy(ours)
    config = OptimConfig(name="muon", lr=0.01, weight_decay=0.1, momentum=0.9, warmup=0, schedule="constant")
    muon = build_optimizer(ours, config)
    adam = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 if decays(n, p) else 0.0} for n, p in twin.named_parameters()], lr=0.01
    )
    set_step(muon, make_schedule(config, 10, 100), 0)
    for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    muon.step()
    adam.step()
    for (name, p), q in zip(ours.named_parameters(), twin.parameters(), strict=True):
        if p.ndim == 2 and ".blocks." in name:
            # The first step of Muon: momentum 0.1 g, looked ahead, made orthogonal, as large as one of AdamW.
            parts = 3 if "qkv" in name else 1
            gradients, moves = (t.chunk(parts) for t in (q.grad, before[name] * (1 - 0.01 * 0.1) - p.detach()))
            for gradient, move in zip(gradients, moves, strict=True):
                expected = orthogonalised(gradient[None])[0] * 0.01 * 0.2 * max(gradient.shape) ** 0.5
                assert torch.cosine_similarity(move.flatten(), expected.flatten(), dim=0) > 0.999, name
                assert float(move.norm()) == pytest.approx(float(expected.norm()), rel=0.02), name
        else:
            torch.testing.assert_close(p, q, msg=name)


def test_restored_state_has_the_strides_of_its_parameter_as_fused_steps_need_them() -> None:
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    stored = torch.randn(4, 3, 5, 5)
    placed = _laid_out(stored, weight)
    assert placed.stride() == weight.stride()
    assert torch.equal(placed, stored)
    assert _laid_out(torch.tensor(3.0), weight) == 3  # a step count


@pytest.mark.parametrize(
    ("name", "wide"), [("cifar_resnet20", True), ("patchconvnet_t20_32", True), ("vit_tiny_32", False)]
)
def test_networks_of_convolutions_are_told_from_others(name: str, wide: bool) -> None:
    assert is_convolutional(create_model(name, classes=3, device="meta")) is wide


def test_channels_are_not_put_last_where_the_backward_pass_would_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    convolutions = {
        (3, 8, 1, 2, 1): False,  # as in FastViT
        (16, 8, 1, 2, 1): True,
        (3, 8, 1, 1, 1): True,
        (3, 8, 3, 2, 1): True,
        (8, 8, 1, 2, 8): True,
    }
    for (inside, outside, kernel, stride, groups), works in convolutions.items():
        layer = torch.nn.Conv2d(inside, outside, kernel, stride, groups=groups)
        assert channels_last_works(torch.nn.Sequential(layer), CPU) is works
        assert channels_last_works(layer, CPU, training=False)
        assert channels_last_works(layer, torch.device("cuda"))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not channels_last_works(torch.nn.Conv2d(16, 8, 3), CPU)


@pytest.mark.parametrize(
    ("name", "machine", "last"),
    [("cifar_resnet20", "x86_64", True), ("cifar_resnet20", "aarch64", False), ("vit_tiny_32", "x86_64", False)],
)
def test_what_is_evaluated_has_the_faster_layout_and_the_same_logits(
    name: str, machine: str, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    model, images = create_model(name, classes=3).eval(), torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    kernel = next(m.weight for m in model.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size[0] > 1)
    with torch.inference_mode():
        logits = model(images)
        assert placed(model, CPU) is model
        torch.testing.assert_close(model(images), logits)
    assert (kernel.is_contiguous(memory_format=torch.channels_last) and not kernel.is_contiguous()) is last


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_process_that_has_the_cpu_to_itself_takes_freed_memory_again() -> None:
    resource = pytest.importorskip("resource")

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)  # 64 MiB, 16,384 pages
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert choose_device("cpu").type == "cpu"
    assert min(faults() for _ in range(8)) < 1000


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor has no such setting")
def test_a_training_on_a_cpu_has_no_denormal_numbers_in_any_thread(tmp_path) -> None:
    command = ["train", "demo", "--optim.steps", "2", "--out", str(tmp_path / "run"), "--engine.device", "cpu"]
    tiny = "print('left:', (torch.full((2**22,), 1e-20) * 1e-20).count_nonzero().item())"
    trained = run_script(f"import torch; from vitrail.cli import run; torch.set_num_threads(2); run({command}); {tiny}")
    assert trained.out.splitlines()[-1] == "left: 0", trained.err


def test_steps_with_channels_last_are_those_of_the_usual_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        torch.manual_seed(0)
        model = create_model("cifar_resnet20", classes=3, depth=8)
        config = OptimConfig(name="sgd", lr=0.01, warmup=0, schedule="constant")
        step = TrainStep(Supervised(model, SupervisedConfig()), config, make_schedule(config, 8, 80), device=CPU)
        for seed in range(4):
            images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
            label = torch.arange(8) % 3
            step.feed(Batch((images,), label, label, torch.arange(8)))
        weight = next(p for p in model.parameters() if p.ndim == 4 and p.shape[2] > 1)
        assert weight.is_contiguous(memory_format=torch.channels_last) is (machine == "x86_64")
        trained.append(model.state_dict())
    for name, tensor in trained[0].items():
        torch.testing.assert_close(tensor, trained[1][name], msg=name)


def test_a_skipped_update_leaves_running_statistics_as_they_were() -> None:
    """Good, bad, good must equal good, good; so must the moving average."""

    def trained(*bad: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = create_model("cifar_resnet20", classes=3, depth=8)
        config = OptimConfig(name="sgd", lr=0.01, warmup=0, schedule="constant")
        schedule = make_schedule(config, 4, 40)
        step = TrainStep(Supervised(model, SupervisedConfig()), config, schedule, device=CPU, ema=0.5)
        goods = iter(range(10))
        for spoiled in bad:
            seed = 99 if spoiled else next(goods)
            images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
            if spoiled:
                images[0, 0, 0, 0] = float("nan")
            step.step = 0 if spoiled else step.step
            label = torch.tensor([0, 1, 2, 0])
            step.feed(Batch((images,), label, label, torch.arange(4)))
        return model.state_dict(), cast("nn.Module", step.model).state_dict()

    for plain, guarded in zip(trained(False), trained(False, True), strict=True):
        changed = [n for n, v in plain.items() if "num_batches" not in n and not v.isfinite().all()]
        assert changed == []
        for name, value in plain.items():
            if name.endswith(("running_mean", "running_var")):
                assert torch.equal(guarded[name], value), name


@pytest.mark.parametrize("tune", ["head", "last:1", "bias"])
def test_norms_that_are_frozen_keep_their_statistics(tune: str) -> None:
    torch.manual_seed(0)
    model = create_model("cifar_resnet20", classes=3, depth=8)
    choose_tuned(model, tune)
    before = {n: b.clone() for n, b in model.named_buffers()}
    config = OptimConfig(name="sgd", lr=0.1, warmup=0, tune=tune)
    step = TrainStep(Supervised(model, SupervisedConfig()), config, make_schedule(config, 4, 40), device=CPU)
    label = torch.tensor([0, 1, 2, 0])
    for seed in range(3):
        images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        step.feed(Batch((images,), label, label, torch.arange(4)))
    for name, value in before.items():
        frozen = not any(p.requires_grad for p in model.get_submodule(name.rpartition(".")[0]).parameters())
        assert torch.equal(dict(model.named_buffers())[name], value) == frozen, name


def test_factors_of_lora_decay_and_coefficients_of_nola_do_not() -> None:
    for adapter, decayed in ((Lora(), True), (Nola(coefficients=4), False)):
        model = apply(create_model("vit_micro_28", classes=3, depth=1, width=16, heads=2), adapter)
        names = [n for n, p in model.named_parameters() if p.requires_grad and ".groups." in n]
        assert names
        assert all(decays(n, dict(model.named_parameters())[n]) == decayed for n in names)


def test_what_listens_is_clipped_by_itself() -> None:
    main, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    updater = Updater(torch.optim.SGD([main, other], lr=1.0, fused=True), clip=1.0, probe=[other])
    main.grad, other.grad = torch.tensor([0.3, 0.0, 0.4]), torch.tensor([0.0, 50.0, 0.0])
    norm, _ = updater.apply()
    assert norm == pytest.approx(0.5)
    assert main.tolist() == pytest.approx([-0.3, 0.0, -0.4])
    assert other.detach().norm() == pytest.approx(1.0, rel=1e-4)
    other.grad, main.grad = torch.full((3,), float("nan")), torch.ones(3)
    assert updater.apply()[1] == 0
