"""CIFAR ResNets: counts to the digit, shortcuts, the trunk's contract, and published weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from small import quick_of
from torch import Tensor

from vitrail.data.config import PreprocessConfig
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.heads.pooled import MeanHead
from vitrail.model.parts.modules import reset
from vitrail.model.store import read_tensors
from vitrail.model.trunks.cifar_resnet import CifarResNetTrunk, Plain, load_reference


def classifier(depth: int, classes: int = 100, **options: object) -> Classifier:
    trunk = CifarResNetTrunk(depth, **options)
    names = [str(c) for c in range(classes)]
    preprocess = PreprocessConfig(size=32, crop_ratio=1.0)
    return Classifier(trunk, MeanHead(trunk.width, classes), spec={}, classes=names, preprocess=preprocess)


@pytest.mark.parametrize(
    ("depth", "bottleneck", "parameters", "mega_macs"),
    [  # closed forms of the networks of Gramian heads' appendix (arXiv 2310.16483)
        (29, True, 336_244, 47),
        (65, True, 707_188, 101),
        (110, True, 1_170_868, 167),
        (32, False, 470_004, 69),
        (110, False, 1_733_812, 253),
    ],
)
def test_networks_count_as_published(depth: int, bottleneck: bool, parameters: int, mega_macs: int) -> None:
    with torch.device("meta"):
        counted = cost(classifier(depth, bottleneck=bottleneck))
    assert counted.parameters == parameters
    assert round(counted.macs / 1e6) == mega_macs


def test_projected_shortcuts_cost_two_small_convolutions() -> None:
    with torch.device("meta"):
        plain, projected = CifarResNetTrunk(20), CifarResNetTrunk(20, shortcut="project")
    extra = sum(p.numel() for p in projected.parameters()) - sum(p.numel() for p in plain.parameters())
    assert extra == (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64)


def test_a_padded_shortcut_keeps_every_second_pixel_between_zero_channels() -> None:
    block = Plain(4, 8, 2, "pad").eval()
    torch.nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 4, 6, 6)
    out = block(x)
    expected = torch.zeros(2, 8, 3, 3)
    for c in range(4):
        for i in range(3):
            for j in range(3):
                expected[:, 2 + c, i, j] = x[:, c, 2 * i, 2 * j]
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("bottleneck", [False, True])
def test_as_a_trunk_it_gives_the_final_map_and_names_every_depth(bottleneck: bool) -> None:
    model = classifier(29 if bottleneck else 20, bottleneck=bottleneck).eval()
    trunk = model.trunk
    assert isinstance(trunk, CifarResNetTrunk)
    images = torch.randn(2, 3, 32, 24)
    found = model.outputs(images)
    maps = trunk.feature_maps(images)
    assert [tuple(m.shape[1:]) for m in maps] == [
        (trunk.width // s, 32 // t, 24 // t) for s, t in ((4, 1), (2, 2), (1, 4))
    ]
    assert found.tokens.grid == (8, 6)
    assert found.tokens.prefix == 0
    torch.testing.assert_close(found.embedding, maps[-1].mean((2, 3)))
    assert {trunk.layer_of(name) for name, _ in trunk.named_parameters()} == set(range(trunk.layers + 1))
    assert trunk.layer_of("layer2.0.conv1.weight") == 4
    assert model.layer_of("head.fc.weight") == trunk.layers + 1 == 10
    with pytest.raises(ValueError, match="feature_maps"):
        trunk.encode(found.tokens, want={"tokens.0"})


def test_impossible_depths_name_possible_ones() -> None:
    with pytest.raises(ValueError, match=r"6n \+ 2 \(8, 14, 20, 32, .*not 18"):
        CifarResNetTrunk(18)
    with pytest.raises(ValueError, match=r"9n \+ 2 \(11, 20, 29, .*not 2"):
        CifarResNetTrunk(2, bottleneck=True)


def test_built_on_meta_and_reset_it_starts_like_any_other() -> None:
    with torch.device("meta"):
        empty = CifarResNetTrunk(20)
    made, direct = empty.to_empty(device="cpu"), CifarResNetTrunk(20)
    for trunk in (made, direct):
        torch.manual_seed(1)
        reset(trunk)
    for name, tensor in direct.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor), name
    assert float(direct.conv1.weight.detach().std()) == pytest.approx((2 / (9 * 16)) ** 0.5, rel=0.15)


def test_it_compiles_whole() -> None:
    trunk = CifarResNetTrunk(20).eval()
    x = torch.randn(2, 3, 16, 16)
    compiled = torch.compile(lambda images: trunk(images).sequence, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), trunk(x).sequence)


def test_a_model_starts_from_a_file_of_the_usual_ports(tmp_path: Path) -> None:
    theirs = classifier(20)
    names = {n.removeprefix("trunk.").replace("head.fc.", "linear."): t for n, t in theirs.state_dict().items()}
    save_file({n: t for n, t in names.items() if not n.endswith("num_batches_tracked")}, tmp_path / "port.safetensors")
    ours = create_model("cifar_resnet20", classes=len(theirs.classes), weights=str(tmp_path / "port.safetensors"))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))


def test_weights_that_do_not_fit_are_all_named() -> None:
    state = classifier(20).state_dict()
    theirs = {n.removeprefix("trunk.").replace("head.fc.", "linear."): t for n, t in state.items()}
    theirs = {n: t for n, t in theirs.items() if not n.endswith("num_batches_tracked")}
    assert set(load_reference(state, theirs)) == set(state)
    del theirs["conv1.weight"]
    theirs |= {"linear.bias": torch.zeros(10), "layer4.0.conv1.weight": torch.zeros(1)}
    with pytest.raises(ValueError) as error:
        load_reference(state, theirs)
    for words in (
        "trunk.conv1.weight: missing",
        "head.fc.bias: (10,), expected (100,)",
        "layer4.0.conv1.weight: not a",
    ):
        assert words in str(error.value)


@pytest.fixture(scope="module")
def cifar10(real_data: Path) -> tuple[Tensor, Tensor]:
    """The first 1,000 test images, normalised as ImageNet's, and their labels."""
    folder = real_data / "cifar10"
    if not (folder / "test_q95_444.jpg").is_file():
        pytest.skip("VITRAIL_DATA has no cifar10 mosaic")
    whole = np.asarray(Image.open(folder / "test_q95_444.jpg").convert("RGB"))
    rows, columns = whole.shape[0] // 32, whole.shape[1] // 32
    tiles = whole.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)[:1000]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    images = (torch.tensor(tiles) / 255 - mean[:, None, None]) / std[:, None, None]
    return images, torch.tensor(np.load(folder / "test_y.npy")[:1000].astype(np.int64))


@pytest.mark.parametrize(("depth", "right"), quick_of([(20, 917), (56, 938)], [(20, 917)]))
def test_published_weights_classify_cifar10(
    depth: int, right: int, cifar10: tuple[Tensor, Tensor], real_data: Path
) -> None:
    """Of 4,000 images 3,632 (90.80 %) and 3,714 (92.85 %) were right; here, of the first 1,000 of those."""
    file = real_data / "weights" / f"cifar10_resnet{depth}.safetensors"
    if not file.is_file():
        pytest.skip(f"VITRAIL_DATA has no {file.name}")
    model = classifier(depth, classes=10).eval()
    model.load_state_dict(load_reference(model.state_dict(), read_tensors(file)))
    images, labels = cifar10
    with torch.inference_mode():
        said = torch.cat([model(part).argmax(1) for part in images.split(250)])
    # Another JPEG decoder or another order of sums may turn an image that stands on the edge, not more.
    assert abs(int((said == labels).sum()) - right) <= 3
    assert F.one_hot(said, 10).sum(0).min() > 50
