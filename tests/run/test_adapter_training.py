"""Adapters in whole runs: what is trained, what is kept, how base and adapter find each other again."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stopping import stop_after
from torch import Tensor, nn

import vitrail
from vitrail.cli import run as command
from vitrail.config import RunConfig, from_mapping, validate
from vitrail.engine import checkpoint
from vitrail.engine.config import OptimConfig
from vitrail.engine.loop import Stopped
from vitrail.engine.optimizer import build_optimizer, choose_tuned, parameter_groups
from vitrail.engine.step import Ema
from vitrail.learn.config import DistillationConfig, SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.model.adapters.adapter_file import load_adapter
from vitrail.model.adapters.apply import adapters_of, apply, base_state, counts, merged_copy, quantise
from vitrail.model.adapters.config import AdapterConfig, Lora, Nola, Pranc
from vitrail.model.build import create_model, make_adaptive, replace_head
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.optimize import fold_affine, fold_layerscale
from vitrail.model.timm_weights import to_timm
from vitrail.recipes import recipe
from vitrail.schema import ConfigError

DATA = "synthetic:shapes?n=60&size=32"
TRUNK = {"depth": 2, "width": 32, "heads": 2, "patch": 8}
NOLA = Nola(rank=2, coefficients=20)
HEAD = 12 * 33  # classes of the shapes, width and bias


def tiny(**options: Any) -> Classifier:
    torch.manual_seed(0)
    return create_model("vit_tiny_32", classes=12, **TRUNK, **options).eval()


def trained(config: AdapterConfig, model: Classifier | None = None) -> Classifier:
    model = apply(tiny() if model is None else model, config)
    torch.manual_seed(7)
    for parameter in adapters_of(model).adapter("default").parameters():  # type: ignore[union-attr]
        nn.init.normal_(parameter, std=0.3)
    return model


def images() -> Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def configure(out: Path, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "out": str(out),
        "data": {"uri": DATA, "batch": 12, "workers": 0, "check": "off"},
        "model": {"name": "vit_tiny_32", "trunk": TRUNK, "adapter": NOLA},
        "optim": {"steps": 4, "warmup": 0, "lr": 0.05},
        "engine": {"device": "cpu", "log_every": 1, "ema": 0.9},
    }
    for path, value in changes.items():
        section, _, name = path.partition("__")
        values[section] = {**values[section], name: value} if name else value
    return from_mapping(values, recipe("small-transfer"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of other classes, and a run that adapted it."""
    folder = tmp_path_factory.mktemp("adapted")
    torch.manual_seed(5)
    create_model("vit_tiny_32", classes=7, **TRUNK).save(folder / "base")
    vitrail.train(configure(folder / "run", model__weights=str(folder / "base")), quiet=True)
    return folder


# What is trained


def test_a_run_trains_the_adapter_and_leaves_the_base(place: Path, tmp_path: Path) -> None:
    run = vitrail.train(configure(tmp_path / "run", model__weights=str(place / "base")), quiet=True)
    before, after = load_file(place / "base" / "model.safetensors"), base_state(run.model)
    assert all(torch.equal(value, after[name]) for name, value in before.items() if not name.startswith("head."))
    adapter = adapters_of(run.model).adapter("default")  # type: ignore[union-attr]
    assert adapter.group(0).beta.abs().max() > 0
    assert run.adapter is not None
    assert run.adapter["trained"] == 2 * 2 * 40 + HEAD  # k + l for q and v of two blocks, and the classifier


def test_weight_decay_falls_on_the_classifier_and_on_no_coefficient() -> None:
    objective = Supervised(trained(NOLA), SupervisedConfig())
    before = {name: p.detach().clone() for name, p in objective.named_parameters()}
    optimizer = build_optimizer(objective, OptimConfig(lr=0.1, weight_decay=0.5))
    for parameter in objective.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    moved = {name for name, p in objective.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"model.head.fc.weight"}


def test_only_what_the_adapter_trains_is_given_to_the_optimiser() -> None:
    model = apply(tiny(), Nola(rank=2, coefficients=5, train_norms=True))
    assert choose_tuned(model, "full") == (counts(model).trained, counts(model).base)
    names = {
        name
        for group in parameter_groups(Supervised(model, SupervisedConfig()), OptimConfig())
        for name in group["names"]
    }
    norms = {
        f"model.trunk.{at}.{leaf}"
        for at in ("norm", *(f"blocks.{i}.norm{j}" for i in (0, 1) for j in (1, 2)))
        for leaf in ("weight", "bias")
    }
    own = {f"model.adapters.named.default.groups.0.{leaf}" for leaf in ("alpha", "beta")}
    assert names == {"model.head.fc.weight", "model.head.fc.bias"} | norms | own


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optim__tune": "head"}, "optim.tune: head chooses among weights that model.adapter freezes"),
        ({"optim__layer_decay": 0.7}, "optim.layer_decay: numbers of all layers lie in one tensor"),
        ({"optim__name": "muon"}, "optim.name: muon is for hidden weight matrices"),
        ({"objective": {"kind": "attack"}}, "model.adapter: attack works on a whole model"),
        ({"model__adapter": {"kind": "nola", "head_coefficients": 5}}, "train_head trains the classifier as a whole"),
        ({"model__adapter": {"kind": "nila"}}, "model.adapter.kind: 'nila' is not one of lora, nola, pranc"),
    ],
)
def test_what_cannot_be_together_is_said_before_anything_is_read(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(tmp_path / "run", **changes)
    assert said in str(caught.value)


def test_a_head_beside_an_adapter_may_have_a_rate_of_its_own() -> None:
    groups = parameter_groups(
        Supervised(trained(Nola(rank=2, coefficients=4)), SupervisedConfig()), OptimConfig(head_rate=0.01)
    )
    shares = {name: group["share"] for group in groups for name in group["names"]}
    assert {name for name, share in shares.items() if share != 1} == {"model.head.fc.weight", "model.head.fc.bias"}
    assert set(shares.values()) == {0.01, 1.0}


def test_flags_choose_an_adapter(tmp_path: Path) -> None:
    from vitrail.schema import parse_flags

    words = "--model.adapter.kind nola --model.adapter.coefficients 1000 --model.adapter.targets qv mlp"
    made = from_mapping(parse_flags(words.split())[1], recipe("small-transfer"))
    assert made.model.adapter == Nola(coefficients=1000, targets=("qv", "mlp"))
    assert validate(made) == []


def test_from_scratch_is_allowed_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = vitrail.train(configure(tmp_path / "run", optim__steps=1))
    said = capsys.readouterr().err
    assert "model.weights is none, so the adapter changes random weights" in said
    assert f"nola: {160 + HEAD:,} numbers are trained" in said
    assert "is high for adamw" not in said  # coefficients want another rate than weights
    loaded = vitrail.load(run.path)
    torch.testing.assert_close(loaded(images()), run.model(images()), rtol=1e-5, atol=1e-5)  # merged


def test_a_moving_average_follows_the_adapter_and_keeps_the_base_bits() -> None:
    model = trained(NOLA)
    ema = Ema(model, 0.99)
    ema.set_step(10**6)
    alpha = adapters_of(model).adapter("default").group(0).alpha  # type: ignore[union-attr]
    before = alpha.detach().clone()
    with torch.no_grad():
        alpha.add_(1.0)
    ema.follow(model)
    mine = adapters_of(ema.model).adapter("default").group(0).alpha  # type: ignore[union-attr]
    torch.testing.assert_close(mine, before + 0.01, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(base_state(ema.model)[name], t) for name, t in base_state(model).items())


def stop_at_two(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is interrupted after its second step."""
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        with pytest.raises(Stopped):
            vitrail.train(config, quiet=True)


@pytest.mark.parametrize("adapter", [NOLA, Pranc(coefficients=4, bits=3, train_norms=True)])
def test_a_stopped_and_resumed_run_equals_one_that_never_stopped(
    adapter: AdapterConfig, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"model__weights": str(place / "base"), "model__adapter": adapter}
    whole = vitrail.train(configure(tmp_path / "whole", **changes), quiet=True)
    stop_at_two(configure(tmp_path / "stopped", **changes), monkeypatch)
    resumed = vitrail.resume(tmp_path / "stopped", quiet=True)
    one, two = (checkpoint.newest(run.path / "checkpoint")[0] for run in (whole, resumed))
    assert one is not None
    assert two is not None
    assert [name for name, t in one.tensors.items() if not torch.equal(t, two.tensors[name])] == []
    files = [load_file(run.path / "model" / "adapter.safetensors") for run in (whole, resumed)]
    assert all(torch.equal(t, files[1][name]) for name, t in files[0].items())


def test_a_checkpoint_holds_the_adapter_and_not_its_base(place: Path) -> None:
    state = checkpoint.newest(place / "run" / "checkpoint")[0]
    assert state is not None
    base = {n for n in load_file(place / "base" / "model.safetensors") if not n.startswith("head.")}
    assert base
    assert not {f"{part}{name}" for name in base for part in ("objective/model.", "ema/")} & set(state.tensors)
    for name in ("adapters.named.default.groups.0.alpha", "head.fc.weight"):
        assert {f"objective/model.{name}", f"ema/{name}"} <= set(state.tensors)


def test_a_base_that_training_changed_is_in_the_checkpoint_and_goes_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def also(self: Supervised, step: int) -> None:
        with torch.no_grad():
            self.model.trunk.blocks[0].mlp.fc1.bias.add_(1)  # type: ignore[union-attr, index, operator]

    monkeypatch.setattr(Supervised, "after_step", also)
    weights = {"model__weights": str(place / "base")}
    whole = vitrail.train(configure(tmp_path / "whole", **weights), quiet=True)
    stop_at_two(configure(tmp_path / "stopped", **weights), monkeypatch)
    resumed = vitrail.resume(tmp_path / "stopped", quiet=True)
    files = [load_file(run.path / "model" / "model.safetensors") for run in (whole, resumed)]
    assert all(torch.equal(t, files[1][name]) for name, t in files[0].items())


def test_a_run_is_not_resumed_on_another_base(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "base", tmp_path / "base")
    run = vitrail.train(configure(tmp_path / "run", model__weights=str(tmp_path / "base")), quiet=True)
    torch.manual_seed(6)
    create_model("vit_tiny_32", classes=7, **TRUNK).save(tmp_path / "base")
    with pytest.raises(ValueError, match="can only be resumed with the base it began with"):
        vitrail.resume(run.path, quiet=True)


def test_an_adapter_learns_from_a_teacher_as_well(place: Path, tmp_path: Path) -> None:
    teacher = tiny()
    teacher.classes = vitrail.open_data(DATA).classes
    objective = DistillationConfig(teacher=str(teacher.save(tmp_path / "teacher")))
    run = vitrail.train(
        configure(tmp_path / "run", model__weights=str(place / "base"), objective=objective), quiet=True
    )
    assert run.adapter is not None
    assert not (run.path / "model" / "model.safetensors").exists()


# What is kept


def test_a_run_keeps_the_adapter_alone_and_finds_its_base_again(place: Path) -> None:
    assert sorted(file.name for file in (place / "run" / "model").iterdir()) == ["adapter.safetensors", "model.json"]
    loaded = vitrail.load(place / "run", merged=False)
    merged = vitrail.load(place / "run")
    assert adapters_of(merged) is None
    torch.testing.assert_close(merged(images()), loaded(images()), rtol=1e-5, atol=1e-5)
    assert loaded.stated["recipe"] == "small-transfer"
    by_hand = load_adapter(_with_classes(place), place / "run" / "model" / "adapter.safetensors")
    assert torch.equal(by_hand(images()), loaded(images()))


def _with_classes(place: Path) -> Classifier:
    return create_model(
        "vit_tiny_32", classes=vitrail.open_data(DATA).classes, weights=str(place / "base"), **TRUNK
    ).eval()


def test_a_base_that_is_gone_or_changed_is_said_and_can_be_named(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path / "new")
    new = tmp_path / "new"
    description = json.loads((new / "run" / "model" / "model.json").read_text())
    description["adapter"]["weights"] = str(tmp_path / "nowhere")
    (new / "run" / "model" / "model.json").write_text(json.dumps(description))
    expected = vitrail.load(place / "run")(images())
    assert torch.equal(vitrail.load(new / "run")(images()), expected)  # both were moved together
    (new / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"its base is gone from .*nowhere; say where it is now .*--base"):
        vitrail.load(new / "run")
    assert torch.equal(vitrail.load(new / "run", base=tmp_path / "elsewhere")(images()), expected)
    tiny().save(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match=r"the base of .* has changed: .*elsewhere is not .*\(base \w{16}, now \w{16}\)"
    ):
        vitrail.load(new / "run", base=tmp_path / "elsewhere")


def test_base_and_bits_of_a_whole_model_are_refused(place: Path) -> None:
    for option in ({"base": place}, {"bits": 4}):
        with pytest.raises(ValueError, match="is a whole model, not an adapter of one"):
            vitrail.load(place / "base", **option)


def test_a_run_goes_on_from_what_another_one_adapted(place: Path) -> None:
    model = create_model("vit_tiny_32", classes=12, weights=str(place / "run"), **TRUNK)
    expected = vitrail.load(place / "run").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def to_timm_of(model: Classifier) -> nn.Module:
    return to_timm(model).eval()


def saved(model: Classifier) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        return vitrail.load(model.save(folder))


WAYS: dict[str, Callable[[Classifier], nn.Module]] = {
    "optimize": lambda model: model.optimize("float32", compile=False, graph=False),
    "fold_layerscale": fold_layerscale,
    "fold_affine": fold_affine,
    "save": saved,
    "merged_copy": merged_copy,
    "make_adaptive": lambda model: make_adaptive(model, None),
    "replace_head": lambda model: _same_head(replace_head(model, "class_token")[0], model),
    "to_timm": to_timm_of,
}


def _same_head(made: Classifier, model: Classifier) -> Classifier:
    made.head.load_state_dict(model.head.state_dict())
    return made.eval()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "config", [Nola(rank=2, coefficients=9, targets=("qv", "mlp"), train_norms=True), Lora(rank=2)]
)
def test_whatever_reads_weights_gets_the_adapter_with_them(way: str, config: AdapterConfig) -> None:
    model = trained(config, tiny(head="class_token", layerscale=0.1))
    expected, state = model(images()), copy.deepcopy(model.state_dict())
    made = WAYS[way](model)
    # Merged weights are rounded once more than the two products beside each other.
    torch.testing.assert_close(made(images()), expected, rtol=1e-4, atol=1e-4)
    assert "adapters" not in dict(made.named_modules())
    assert torch.equal(model(images()), expected)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_an_exported_file_has_the_adapter_in_it(place: Path, tmp_path: Path) -> None:
    from vitrail.model.export import to_torch

    model = trained(NOLA)
    to_torch(model, tmp_path / "model.pt2", input="float", output="logits")
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(images()), model(images()), rtol=1e-4, atol=1e-4)


def test_a_merged_adapter_costs_nothing() -> None:
    assert cost(trained(NOLA)).macs == cost(tiny()).macs
    assert cost(trained(NOLA)).parameters == cost(tiny()).parameters
    assert cost(trained(NOLA)).trainable == 160 + HEAD


def test_heads_cannot_be_left_out_below_an_adapter() -> None:
    with pytest.raises(ValueError, match="merged_copy"):
        trained(NOLA).keep_heads([0])


# Counts of the recipes


def test_the_recipe_of_a_resnet_trains_as_many_numbers_as_the_paper() -> None:
    """19 convolutions of 500, a classifier of 2000, 1376 of norms: 12,876 (NOLA, arXiv 2310.02556)."""
    config = recipe("nola-resnet").model
    assert config.adapter is not None
    model = apply(create_model(config.name, classes=10), config.adapter)
    assert counts(model).trained == 12_876
    assert counts(model).whole == 1_376


@pytest.mark.parametrize(("name", "numbers"), [("nola-vit", 49_152), ("lora-vit", 221_184)])
def test_the_recipes_of_a_vit_train_what_they_say(name: str, numbers: int) -> None:
    config = recipe(name).model
    assert config.adapter is not None
    assert counts(apply(create_model(config.name, classes=10, device="meta"), config.adapter)).adapter == numbers


# Commands


def test_commands_show_judge_and_export_an_adapter(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(place / "run")
    assert command(["show", run, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["adapter"]
    size = (place / "run" / "model" / "adapter.safetensors").stat().st_size
    assert (shown["kind"], shown["trained"], shown["bytes"], shown["seed"]) == ("nola", 160 + HEAD, size, 0)
    assert shown["base"]["weights"] == str((place / "base").resolve())
    assert command(["export", run, str(tmp_path / "a.safetensors"), "--bits", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits"] == 4
    small = load_adapter(_with_classes(place), tmp_path / "a.safetensors")
    rough = quantise(vitrail.load(run, merged=False), 4)
    assert torch.equal(small(images()), rough(images()))
    figures, _, _ = vitrail.evaluate(rough, DATA, split="test", workers=0, device="cpu")
    words = ["evaluate", run, "--data", DATA, "--json", "--workers", "0", "--device", "cpu"]
    assert command([*words, "--bits", "4", "--base", str(place / "base")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bits"] == 4
    assert found["loss"] == pytest.approx(figures.scalars()["loss"], rel=1e-5)
    assert command(["export", run, str(tmp_path / "peft"), "--to", "peft"]) == 0
    assert (tmp_path / "peft" / "adapter_config.json").is_file()
    assert command(["export", str(place / "base"), str(tmp_path / "b.safetensors")]) == 2
    assert "without an adapter" in capsys.readouterr().err


def test_the_report_says_what_was_trained_and_stored(place: Path) -> None:
    text = (place / "run" / "report.html").read_text()
    size = (place / "run" / "model" / "adapter.safetensors").stat().st_size
    assert f"{160 + HEAD:,} (classifier and norms: {HEAD:,}), by nola" in text
    assert f"{161 + HEAD:,}, in a file of {size:,} bytes" in text


def test_a_base_that_training_changed_is_kept_with_the_adapter(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def also(self: Supervised, step: int) -> None:
        with torch.no_grad():
            self.model.trunk.blocks[0].mlp.fc1.bias.add_(1)  # type: ignore[union-attr, index, operator]

    monkeypatch.setattr(Supervised, "after_step", also)
    changes = {"model__weights": str(place / "base"), "engine__ema": 0.0}
    run = vitrail.train(configure(tmp_path / "run", **changes), quiet=True)
    assert run.adapter is None
    assert any("the whole model is kept" in note for note in run.notes)
    torch.testing.assert_close(vitrail.load(run.path)(images()), run.model(images()), rtol=1e-5, atol=1e-5)
