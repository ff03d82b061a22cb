"""Distillation: its losses, what a teacher sees, who may teach, kept answers, whole runs, a student that wins."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import vitrail
from vitrail.cli import run
from vitrail.config import from_mapping
from vitrail.data.augment.mixing import mix
from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.engine import checkpoint
from vitrail.engine.config import OptimConfig
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import TrainStep
from vitrail.learn.config import DistillationConfig, SupervisedConfig
from vitrail.learn.distillation import LOOK_EVERY, Distillation, softened_divergence
from vitrail.learn.objective import TrainingFacts, build_objective
from vitrail.learn.supervised import Supervised
from vitrail.learn.teacher import Teacher, load_teacher
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.heads.config import Distilled
from vitrail.model.heads.head import Head
from vitrail.model.heads.pooled import MeanHead
from vitrail.model.parts.tokens import Tokens
from vitrail.recipes import recipe
from vitrail.schema import parse_flags

CLASSES = ("blue", "green", "red")
STUDENT = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
TEACHER = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([0, 1, 2, 2, 1, 0])
STILL = AugmentConfig(crop="evaluation", flip=0.0)


class Pixels(nn.Module):
    """A trunk without weights: every pixel is a token of three channels."""

    width, prefix = 3, 0

    def embed(self, images: Tensor) -> Tokens:
        return Tokens(images.flatten(2).transpose(1, 2), 0, (images.shape[2], images.shape[3]))

    def encode(self, tokens: Tokens, want=(), given=None, until=None):  # type: ignore[no-untyped-def]
        return tokens, {}


def colour_teacher(classes: tuple[str, ...] = CLASSES, **preprocess: Any) -> Classifier:
    """Names the strongest colour: blue, green or red. Never wrong, and its logits are known by hand."""
    head = MeanHead(3, len(classes))
    head.fc.weight.data = torch.eye(3).flip(0) if len(classes) == 3 else torch.zeros(len(classes), 3)
    settings = PreprocessConfig(**{"size": 16, "crop_ratio": 1.0, "mean": (0.0,) * 3, "std": (1.0,) * 3, **preprocess})
    return Classifier(Pixels(), head, spec={}, classes=classes, preprocess=settings)


def student(head: str = "class_token", name: str = "vit_tiny_32", **options: Any) -> Classifier:
    sizes = {"depth": 2, "width": 32, "heads": 2, "image_size": 16}
    return create_model(name, classes=CLASSES, head=head, **sizes, **options)


def batch(target: Tensor = LABELS, size: int = 16, count: int = 6) -> Batch:
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)
    return Batch((images,), LABELS, target, torch.arange(count))


class Fixed(Head):
    """A head that says always the same."""

    def __init__(self, stack: Tensor) -> None:
        super().__init__()
        self.register_buffer("said", stack)

    def forward(self, tokens: Tokens) -> Tensor:
        return self.said

    def fuse(self, stack: Tensor) -> Tensor:
        return stack.mean(1)

    def losses(self, stack: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {}


def loss(own: Tensor, said: Tensor, target: Tensor = LABELS, **options: Any) -> Tensor:
    """The loss of a student that gives logits `own` under a teacher that gives `said`."""
    objective = Distillation(student(), DistillationConfig(**options), colour_teacher())
    objective.model.head = Fixed(own[:, None])
    objective.teach = lambda batch: said
    return objective(batch(target))["loss"]


# Losses (DeiT, Touvron et al. 2021, arXiv 2012.12877)


def test_hard_distillation_from_a_teacher_that_says_the_labels_is_cross_entropy() -> None:
    torch.testing.assert_close(loss(STUDENT, F.one_hot(LABELS, 3).float()), F.cross_entropy(STUDENT, LABELS))


def test_hard_distillation_is_half_labels_and_half_decisions() -> None:
    total = 0.0
    for own, said, label in zip(STUDENT.tolist(), TEACHER.tolist(), LABELS.tolist(), strict=True):
        normal = math.log(sum(math.exp(v) for v in own))
        total += 0.5 * (normal - own[label]) + 0.5 * (normal - own[said.index(max(said))])
    assert float(loss(STUDENT, TEACHER)) == pytest.approx(total / 6, rel=1e-6)


def test_soft_distillation_without_the_teachers_share_is_cross_entropy() -> None:
    torch.testing.assert_close(loss(STUDENT, TEACHER, mode="soft", weight=0.0), F.cross_entropy(STUDENT, LABELS))


def test_a_student_that_is_its_teacher_has_nothing_left_to_learn_from_it() -> None:
    assert float(loss(STUDENT, STUDENT, mode="soft", weight=1.0)) == 0


@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_logits_count_up_to_an_offset_of_each_image(mode: str) -> None:
    moved = torch.randn(6, 1, generator=torch.Generator().manual_seed(5))
    expected = loss(STUDENT, TEACHER, mode=mode)
    torch.testing.assert_close(loss(STUDENT + moved, TEACHER - 2 * moved, mode=mode), expected)


@pytest.mark.parametrize("first", ["teacher", "student"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_soft_loss_is_that_of_the_equation_in_either_direction(first: str, temperature: float) -> None:
    def softmax(row: list[float]) -> list[float]:
        powers = [math.exp(v / temperature) for v in row]
        return [p / sum(powers) for p in powers]

    total = 0.0
    for own, said in zip(STUDENT.tolist(), TEACHER.tolist(), strict=True):
        p, q = softmax(said), softmax(own)
        if first == "student":
            p, q = q, p
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    expected = temperature**2 * total / 6
    assert float(softened_divergence(STUDENT, TEACHER, temperature, first)) == pytest.approx(expected, rel=1e-5)
    whole = loss(STUDENT, TEACHER, mode="soft", temperature=temperature, first=first)
    labels = float(F.cross_entropy(STUDENT, LABELS))
    assert float(whole) == pytest.approx(0.9 * labels + 0.1 * expected, rel=1e-5)


def test_the_divergence_of_half_precision_logits_is_computed_in_full() -> None:
    own, said = STUDENT.bfloat16(), TEACHER.bfloat16()
    found = softened_divergence(own, said, 3.0)
    assert found.dtype == torch.float32
    assert torch.equal(found, softened_divergence(own.float(), said.float(), 3.0))


def test_smoothing_is_for_true_labels_only() -> None:
    found = loss(STUDENT, TEACHER, labels=SupervisedConfig(smoothing=0.1))
    labels = F.cross_entropy(STUDENT, LABELS, label_smoothing=0.1)
    torch.testing.assert_close(found, 0.5 * labels + 0.5 * F.cross_entropy(STUDENT, TEACHER.argmax(1)))


def test_where_several_labels_hold_each_decision_of_the_teacher_is_a_label() -> None:
    own, teaching = create_model("cifar_resnet20", depth=8, classes=3, multilabel=True), colour_teacher()
    teaching.multilabel = True
    teaching.classes = own.classes
    objective = Distillation(own.eval(), DistillationConfig(), teaching)
    target = torch.tensor([[1.0, 0, 0], [0, 1, 1]])
    seen = Batch((torch.rand(2, 3, 16, 16),), target, target, torch.arange(2))
    said = objective.teach(seen)
    with torch.no_grad():
        logits = own(seen.images)
        expected = [F.binary_cross_entropy_with_logits(logits, t) for t in (target, (said > 0).float())]
        torch.testing.assert_close(objective(seen)["loss"], (expected[0] + expected[1]) / 2)
    with pytest.raises(ValueError, match="several labels use hard"):
        Distillation(own, DistillationConfig(mode="soft"), teaching)
    with pytest.raises(ValueError, match="one label per image"):
        Distillation(student(), DistillationConfig(), teaching)


# Who learns what


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_a_distillation_token_learns_from_the_teacher_and_the_class_token_from_labels(mode: str) -> None:
    objective = Distillation(student("distilled"), DistillationConfig(mode=mode, weight=0.5), colour_teacher())
    seen = batch()
    with torch.no_grad():
        found = objective(seen)
        labelled, taught = objective.model.stack(seen.images).unbind(1)
        said = seen.images.float().mean((2, 3)).div(255).flip(1)  # what the colour teacher says, by hand
        first = F.cross_entropy(labelled, LABELS)
        second = F.cross_entropy(taught, said.argmax(1))
        if mode == "soft":
            second = 9 * F.kl_div((taught / 3).log_softmax(1), (said / 3).softmax(1), reduction="batchmean")
    torch.testing.assert_close(found["loss"], (first + second) / 2)
    torch.testing.assert_close(found["loss_labels"], first)


@pytest.mark.parametrize("name", ["vit_tiny_32", "cait_xxs12_32"])
def test_without_a_token_one_classifier_learns_from_both(name: str) -> None:
    own = student("class_attention" if name.startswith("cait") else "class_token", name)
    objective = Distillation(own, DistillationConfig(), colour_teacher())
    seen = batch()
    with torch.no_grad():
        found, logits = objective(seen), own(seen.images)
        said = seen.images.float().mean((2, 3)).flip(1).argmax(1)
        torch.testing.assert_close(found["loss"], (F.cross_entropy(logits, LABELS) + F.cross_entropy(logits, said)) / 2)
        assert float(found["teacher_agreement"]) == pytest.approx(float((logits.argmax(1) == said).float().mean()))


@pytest.mark.parametrize(("rule", "share"), [("sum", 2.0), ("mean", 1.0)])
def test_every_classifier_of_a_head_with_several_learns_from_both(rule: str, share: float) -> None:
    config = DistillationConfig(labels=SupervisedConfig(classifier_loss=rule))
    objective = Distillation(student(), config, colour_teacher())
    objective.model.head = Fixed(torch.stack([STUDENT, STUDENT], 1))
    objective.teach = lambda batch: TEACHER
    torch.testing.assert_close(objective(batch())["loss"], share * loss(STUDENT, TEACHER))


# What a teacher sees (item 10)


def test_the_teachers_label_is_that_of_the_augmented_and_mixed_image() -> None:
    """A red and a blue image, cut and mixed: the decision follows the pixels that are seen."""
    objective = Distillation(student(), DistillationConfig(), colour_teacher())
    pixels = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    pixels[0, 0], pixels[1, 2] = 255, 255
    labels = torch.tensor([2, 0])
    images = objective.model._images(pixels)
    mixed, target = mix(images, labels, classes=3, config=AugmentConfig(cutmix=1.0), seed=0, step=6)
    share = float(target[0, 2])  # of red in the first image, and of blue in the second
    assert 0 < share < 0.5  # less than half of each is left, or this shows nothing
    own = Batch((images,), labels, target, torch.arange(2))
    seen = replace(own, views=(mixed,))
    assert objective.teach(own).argmax(1).tolist() == [2, 0]
    assert objective.teach(seen).argmax(1).tolist() == [0, 2]
    with torch.no_grad():
        logits = objective.model(mixed)
        whole = 0.5 * F.cross_entropy(logits, target) + 0.5 * F.cross_entropy(logits, torch.tensor([0, 2]))
        torch.testing.assert_close(objective(seen)["loss"], whole)


def test_normalised_floats_reach_the_teacher_in_its_own_normalisation() -> None:
    """Exactly, with numbers that floats hold exactly: bytes 0 and 255, powers of two."""
    own = PreprocessConfig(size=16, mean=(0.5, 0.25, 0.75), std=(0.25, 0.5, 0.5))
    teacher = Teacher(colour_teacher(mean=(0.25, 0.5, 0.125), std=(0.5, 0.125, 0.25)), own)
    images = torch.randint(0, 2, (2, 3, 16, 16)) * 255
    plain = images.double() / 255
    expected, given = torch.empty_like(plain), torch.empty_like(plain)
    for c in range(3):
        given[:, c] = (plain[:, c] - own.mean[c]) / own.std[c]
        expected[:, c] = (plain[:, c] - teacher.model.preprocess.mean[c]) / teacher.model.preprocess.std[c]
    assert torch.equal(teacher.seen(given.float()), expected.float())
    assert torch.equal(teacher.model._images(teacher.seen(images.byte())), expected.float())


def test_bytes_and_the_floats_made_of_them_are_the_same_to_a_teacher() -> None:
    own = student()
    cifar = PreprocessConfig(size=16, mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))
    teacher = Teacher(create_model("cifar_resnet20", depth=8, preprocess=cifar), own.preprocess)
    images = batch().images
    torch.testing.assert_close(teacher(own._images(images)), teacher(images), rtol=1e-4, atol=1e-5)


def test_with_the_students_normalisation_floats_pass_untouched() -> None:
    own = student()
    teacher = Teacher(colour_teacher(mean=own.preprocess.mean, std=own.preprocess.std), own.preprocess)
    images = torch.randn(2, 3, 16, 16)
    assert teacher.seen(images) is images


@pytest.mark.parametrize("as_bytes", [True, False])
def test_a_teacher_of_another_size_sees_what_pillow_would_show_it(as_bytes: bool) -> None:
    picture = np.random.default_rng(0).integers(60, 196, (48, 48, 3), dtype=np.uint8)  # far from 0 and 255: no clipping
    own = PreprocessConfig(size=48)
    teacher = Teacher(colour_teacher(size=20), own)
    images = torch.from_numpy(picture).permute(2, 0, 1)[None]
    if not as_bytes:
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (own.mean, own.std))
        images = (images / 255 - mean) / std
    found = teacher.seen(images)[0].permute(1, 2, 0) * 255
    shown = np.asarray(Image.fromarray(picture).resize((20, 20), Image.Resampling.BICUBIC))
    # Pillow rounds to bytes after each of two passes, so up to one byte and a little.
    assert np.abs(found.numpy() - shown).max() < 1.1


def test_a_size_that_the_configuration_names_is_tried_warnings_before() -> None:
    config = DistillationConfig(teacher_size=24)
    assert Distillation(student(), config, colour_teacher()).teacher.size == 24
    fixed = create_model("resmlp_s12", classes=CLASSES, depth=1, width=32, image_size=32)
    with pytest.raises(ValueError, match="mixes exactly"):
        Distillation(student(), replace(config, teacher_size=48), fixed)


def test_a_teacher_stays_as_it_is_while_the_student_trains() -> None:
    teaching = create_model("cifar_resnet20", depth=8, classes=CLASSES).train()
    objective = Distillation(student(), DistillationConfig(), teaching).train()
    before = {name: tensor.clone() for name, tensor in teaching.state_dict().items()}
    objective(batch())["loss"].backward()
    assert objective.model.training
    assert not any(module.training for module in objective.teacher.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in teaching.state_dict().items())
    assert all(p.grad is None for p in teaching.parameters())
    assert all(p.grad is not None for p in objective.model.parameters())


@pytest.mark.parametrize(
    ("head", "mode", "autocast"), [("distilled", "hard", False), ("class_token", "soft", True)]
)  # two of the four combinations have every value
def test_it_compiles_whole_with_its_teacher(head: str, mode: str, autocast: bool) -> None:
    teaching = create_model("cifar_resnet20", depth=8, classes=CLASSES)  # 32 pixels: it resizes, too
    objective = Distillation(student(head), DistillationConfig(mode=mode), teaching)
    seen = batch()
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = objective(seen)
        found = torch.compile(objective, fullgraph=True, backend="eager")(seen)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")
def test_a_captured_step_with_a_teacher_changes_no_bit() -> None:
    def steps(graph: bool) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        teaching = create_model("cifar_resnet20", depth=8, classes=CLASSES)
        optim = OptimConfig(lr=1e-4, warmup=0, schedule="constant")
        step = TrainStep(
            Distillation(student("distilled"), DistillationConfig(), teaching),
            optim,
            make_schedule(optim, 6, 60),
            device=torch.device("cuda"),
            autocast=torch.bfloat16,
            graph=graph,
        )
        losses = []
        for _ in range(8):
            step.feed(batch().changed(lambda t: t.cuda()))
            losses.append(step.meter.read(step.group)["loss"])
        assert graph == step.captured, step.why_no_graph
        return losses, step.model.state_dict()

    (plain, weights), (fast, fast_weights) = steps(False), steps(True)
    assert fast == plain
    assert all(torch.equal(fast_weights[name], tensor) for name, tensor in weights.items())


# Who may teach


def test_a_teacher_with_other_classes_is_refused_with_the_remedy() -> None:
    config = DistillationConfig(teacher="runs/other")
    with pytest.raises(ValueError, match=r"has 2 classes, the data have 3; fine-tune.*--model.weights runs/other"):
        Distillation(student(), config, colour_teacher(("cat", "dog")))
    with pytest.raises(ValueError, match="calls class 1 'yellow', the data call it 'green'; fine-tune"):
        Distillation(student(), config, colour_teacher(("blue", "yellow", "red")))
    with pytest.raises(ValueError, match="calls class 0 'red', the data call it 'blue'"):  # order counts
        Distillation(student(), config, colour_teacher(("red", "green", "blue")))


def test_a_teacher_whose_classes_have_no_names_is_compared_by_number_and_that_is_said() -> None:
    objective = Distillation(student(), DistillationConfig(teacher="w.pth"), colour_teacher(("0", "1", "2")))
    assert objective.notes == ("note: only the number of classes of the teacher w.pth could be compared, 3, not names",)
    assert Distillation(student(), DistillationConfig(), colour_teacher()).notes == ()


def test_a_saved_model_teaches_as_it_predicts(tmp_path: Path) -> None:
    teaching = create_model("cifar_resnet20", depth=8, classes=CLASSES, image_size=16)
    teaching.save(tmp_path / "run" / "model")
    facts = TrainingFacts(LABELS.numpy(), np.arange(6))
    objective = build_objective(DistillationConfig(teacher=str(tmp_path / "run")), student(), facts)
    seen = batch()
    assert isinstance(objective, Distillation)
    with torch.no_grad():
        assert torch.equal(objective.teach(seen), teaching.eval()(seen.images))


@pytest.mark.parametrize("bottleneck", [False, True])
def test_a_weights_file_of_a_cifar_resnet_teaches(tmp_path: Path, bottleneck: bool) -> None:
    sizes = {"depth": 20, "block": "bottleneck" if bottleneck else "basic"}
    teaching = create_model("cifar_resnet20", classes=3, **sizes).eval()
    theirs = {
        name.removeprefix("trunk.").replace("head.fc.", "linear."): tensor
        for name, tensor in teaching.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    save_file(theirs, tmp_path / "weights.safetensors")
    found = load_teacher(str(tmp_path / "weights.safetensors"), student())
    images = batch(size=32).images
    with torch.no_grad():
        assert torch.equal(found.eval()(images), teaching(images))
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds no CIFAR ResNet"):
        load_teacher(str(tmp_path / "other.safetensors"), student())


def test_published_reference_weights_teach(real_data: Path) -> None:
    file = real_data / "weights" / "cifar10_resnet56.safetensors"
    if not file.is_file():
        pytest.skip(f"VITRAIL_DATA has no {file.name}")
    found = load_teacher(str(file), student())
    assert found.spec["trunk"]["depth"] == 56
    assert len(found.classes) == 10


@pytest.mark.usefixtures("hub_answers")
def test_a_published_model_of_timm_teaches_with_its_own_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = timm.create_model, []

    def create(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        asked.append((name, pretrained, options["num_classes"]))
        return real(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", create)
    with pytest.raises(ValueError, match=r"timm:resnet10t has 1000 classes, the data have 3; .*--model.name timm:res"):
        load_teacher("timm:resnet10t", student())
    assert asked == []  # refused before anything is fetched
    own = create_model("vit_tiny_32", classes=1000, depth=1, width=32, heads=2)
    assert len(load_teacher("timm:resnet10t", own).classes) == 1000
    assert asked == [("resnet10t", True, 1000)]
    with pytest.raises(ValueError, match="has no classifier"):
        load_teacher("timm:vit_small_patch14_dinov2", own)


def test_a_teacher_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"objective.teacher: name one"):
        load_teacher("", student())
    with pytest.raises(FileNotFoundError, match=r"objective.teacher: .*at nowhere"):
        load_teacher("nowhere", student())
    with pytest.raises(ValueError, match=r"objective.teacher: timm .* has no model 'resnet1000'"):
        load_teacher("timm:resnet1000", create_model("vit_tiny_32", classes=1000, depth=1, width=32, heads=2))


# TeacherCache that are kept


def test_kept_answers_are_those_of_the_teacher_which_is_then_asked_no_more() -> None:
    index = np.array([3, 40, 7, 11])
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    teaching = create_model("cifar_resnet20", depth=8, classes=CLASSES)
    asked: list[int] = []
    teaching.register_forward_hook(lambda *_: asked.append(1))
    own = student().eval()
    plain = Distillation(own, DistillationConfig(mode="soft"), teaching)
    keeping = Distillation(own, DistillationConfig(mode="soft", cache=True), teaching, None, index, STILL)
    assert (plain.phase, keeping.phase) == (0, 0)

    def of(*rows: int) -> Batch:
        chosen = torch.tensor(rows)
        return Batch((images[chosen],), LABELS[:2], LABELS[:2], torch.from_numpy(index)[chosen])

    keeping(of(0, 1))
    keeping.after_step(LOOK_EVERY - 1)
    assert not keeping.answers.complete
    keeping(of(2, 3))
    keeping.after_step(LOOK_EVERY - 2)
    assert not keeping.answers.complete  # nobody looked: a look makes the host wait
    keeping.after_step(2 * LOOK_EVERY - 1)
    assert keeping.answers.complete
    assert keeping.phase == 1  # so that a graph that asks the teacher is captured anew
    for rows in ((0, 1), (3, 2), (1, 3)):
        with torch.no_grad():
            expected = plain(of(*rows))
            before = len(asked)
            found = keeping(of(*rows))
            assert len(asked) == before
        # Kept answers come from batches of other images; sums inside a convolution may be ordered otherwise there.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not any("answers" in name for name in keeping.state_dict())


def test_keeping_answers_compiles_whole_before_and_after() -> None:
    seen = batch()
    keeping = Distillation(student(), DistillationConfig(cache=True), colour_teacher(), None, np.arange(6), STILL)
    torch._dynamo.reset()
    compiled = torch.compile(keeping, fullgraph=True, backend="eager")
    first = compiled(seen)
    keeping.after_step(LOOK_EVERY - 1)
    assert keeping.answers.complete
    torch.testing.assert_close(compiled(seen), first)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"crop": "resized"}, "crop resized change it; use --data.augment.crop evaluation"),
        ({"flip": 0.5, "mixup": 0.8}, "flip 0.5, mixup 0.8 change it"),
        ({"three": True}, "three True"),
    ],
)
def test_answers_of_views_that_change_are_not_kept(change: dict[str, Any], words: str) -> None:
    def objective(augment: AugmentConfig | None) -> Distillation:
        config = DistillationConfig(cache=True)
        return Distillation(student(), config, colour_teacher(), None, np.arange(6), augment)

    assert objective(replace(STILL, padding=2)).answers is not None  # a setting of a crop that is not made
    with pytest.raises(ValueError, match=words):
        objective(replace(STILL, **change))
    with pytest.raises(ValueError, match="not known"):
        objective(None)


# Runs

SMALL = (
    "--model.name vit_micro_28 --model.trunk.depth 2 --model.trunk.width 32 --model.trunk.heads 2 "
    "--data.workers 0 --data.loader host --data.augment.rand_ops 0 --data.batch 16 "
    "--optim.epochs 2 --optim.warmup 0.5 --engine.log_every 2 --model.head distilled --objective.kind distillation"
)


def teacher_in(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    create_model("cifar_resnet20", depth=8, classes=CLASSES).save(folder)
    return folder


@pytest.fixture(scope="module")
def distilled(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with a teacher beside it."""
    root = tmp_path_factory.mktemp("distilled")
    flags = f"{SMALL} --data {photos} --out {root / 'run'} --objective.teacher {teacher_in(root / 'teacher', 0)}"
    vitrail.train(from_mapping(parse_flags(flags.split())[1], recipe("vit")), quiet=True)
    return root / "run"


def test_checkpoints_hold_the_teachers_name_and_hash_and_not_its_weights(distilled: Path) -> None:
    state, _ = checkpoint.newest(distilled / "checkpoint")
    assert state is not None
    assert any(name.startswith("objective/model.") for name in state.tensors)
    assert not any(name.startswith(("objective/teacher", "ema/teacher")) for name in state.tensors)
    assert sum(t.numel() for n, t in state.tensors.items() if n.startswith("objective/")) == sum(
        t.numel() for t in vitrail.load(distilled).state_dict().values()
    )
    name, _, digest = state.facts["teacher"].rpartition(" ")
    assert name.endswith("teacher")
    assert len(digest) == 16
    assert "teacher" not in json.loads((distilled / "model" / "model.json").read_text())["spec"]
    lines = [json.loads(line) for line in (distilled / "metrics.jsonl").read_text().splitlines()]
    assert any("teacher_agreement" in line for line in lines)


def test_a_run_is_resumed_with_the_teacher_it_began_with_and_no_other(distilled: Path) -> None:
    assert vitrail.resume(distilled, quiet=True).path == distilled
    teacher_in(distilled.parent / "teacher", 1)
    with pytest.raises(ValueError, match="can only be resumed with the teacher it began with"):
        vitrail.resume(distilled, quiet=True)


def test_the_command_line_chooses_the_classifier_that_predicts(
    distilled: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = vitrail.load(distilled / "model")
    model.head.fc.bias.data = torch.tensor([99.0, 0, 0])
    model.head.fc_dist.bias.data = torch.tensor([0, 0, 200.0])
    changed = model.save(distilled.parent / "changed")
    picture = str(next((photos / "green").iterdir()))
    for head, label in (("class", "blue"), ("distillation", "red"), ("both", "red")):
        assert run(["predict", str(changed), picture, "--json", "--head", head]) == 0
        assert json.loads(capsys.readouterr().out)["label"] == label
        words = ["evaluate", str(changed), "--data", str(photos), "--json", "--head", head, "--workers", "0"]
        assert run(words) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["head"] == head
        said = np.array(found["confusion"]).sum(0)
        assert [name for name, count in zip(CLASSES, said, strict=True) if count] == [label]


# Late fusion (item 9)


def test_one_classifier_or_both_may_predict() -> None:
    model = student("distilled").eval()
    images = batch().images
    with torch.no_grad():
        first, second = model.stack(images).unbind(1)
        assert torch.equal(model.use("class")(images), first)
        assert torch.equal(model.use("distillation")(images), second)
        torch.testing.assert_close(model.use("both")(images), (first + second) / 2)
    with pytest.raises(ValueError, match="not 'teacher'"):
        model.use("teacher")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no distillation token"):
        student().use("class")


def test_summed_probabilities_and_averaged_logits_can_disagree() -> None:
    stack = torch.tensor([[[5.0, 0.0, 1.0], [-9.0, 0.0, 0.0]]])
    logits, softmax = (student(Distilled(fusion=f)).head.fuse(stack) for f in ("logits", "softmax"))
    summed = [0.0, 0.0, 0.0]
    for row in stack[0].tolist():
        total = sum(math.exp(v) for v in row)
        summed = [s + math.exp(v) / total for s, v in zip(summed, row, strict=True)]
    np.testing.assert_allclose(softmax.softmax(1)[0], [s / 2 for s in summed], rtol=1e-5)
    averaged = [sum(pair) / 2 for pair in zip(*stack[0].tolist(), strict=True)]
    np.testing.assert_allclose(logits[0], averaged, rtol=1e-6)
    assert summed.index(max(summed)) != averaged.index(max(averaged))


# What it is for


def coloured(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise in which one colour is a little stronger, and which."""
    truth = torch.randint(0, 3, (count,), generator=generator)
    images = torch.randint(0, 200, (count, 3, 8, 8), generator=generator)
    images[torch.arange(count), 2 - truth] += 30
    return images.to(torch.uint8), truth


def test_with_noisy_labels_a_student_of_a_perfect_teacher_wins() -> None:
    """Two of three labels are drawn at random; the teacher is never wrong."""
    generator = torch.Generator().manual_seed(0)
    images, truth = coloured(192, generator)
    unseen, expected = coloured(600, generator)
    wrong = torch.rand(192, generator=generator) < 2 / 3
    labels = torch.where(wrong, torch.randint(0, 3, (192,), generator=generator), truth)
    teaching = colour_teacher(size=8)
    with torch.no_grad():
        assert (teaching(unseen).argmax(1) == expected).float().mean() > 0.99

    def accuracy(taught: bool) -> float:
        torch.manual_seed(0)
        own = create_model("cifar_resnet20", depth=8, classes=CLASSES)
        own.preprocess = replace(own.preprocess, size=8)
        objective = Distillation(own, DistillationConfig(), teaching) if taught else Supervised(own, SupervisedConfig())
        objective.train()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9)
        for epoch in range(10):
            order = torch.randperm(192, generator=torch.Generator().manual_seed(epoch))
            for rows in order.split(64):
                optimizer.zero_grad()
                objective(Batch((images[rows],), labels[rows], labels[rows], rows))["loss"].backward()
                optimizer.step()
        own.eval()
        with torch.no_grad():
            return float((own(unseen).argmax(1) == expected).float().mean())

    assert accuracy(taught=True) > accuracy(taught=False) + 0.1
