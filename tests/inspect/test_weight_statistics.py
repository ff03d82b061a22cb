"""What a model learned: every figure against a closed form, a loop or another library."""

from __future__ import annotations

import json
import math
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from torch import Tensor, nn

from vitrail.cli import run
from vitrail.inspect import embeddings
from vitrail.inspect.embeddings import (
    FRAME,
    RELATED,
    components_for,
    framed,
    image_clusters,
    neighbours_of,
    pca_energy,
    pca_plane,
    plane,
    shared_level,
)
from vitrail.inspect.run import SECTIONS, chosen_sections, inspect_models
from vitrail.inspect.weight_statistics import (
    BranchRatios,
    WeightCollector,
    WeightStatistics,
    central_rows,
    layer_scales,
    mixing_rows,
    mixing_sparsity,
    mosaic,
    relative_spectrum,
    sparsity,
)
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.heads.config import Gramian, SecondOrder
from vitrail.model.timm_weights import load_weights
from vitrail.report.charts import scatter_chart

SMALL = {"image_size": 32, "patch": 8, "depth": 2, "width": 32, "heads": 2, "classes": 3}


def some_images(count: int = 5) -> Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)


def shaken(name: str, **options: Any) -> Classifier:
    """A model with weights that differ from what they start from."""
    made = create_model(name, **{**SMALL, **options}).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def learned(model: Classifier, *batches: Tensor) -> WeightStatistics:
    collector = WeightCollector(model)
    for batch in batches:
        collector.add(batch)
    return collector.result()


# Gains and branches


def test_layer_scales_are_the_mean_magnitude_of_each_branch() -> None:
    model = create_model("deit3_small", **SMALL)
    assert layer_scales(model) == {"mixing": pytest.approx([1e-4] * 2), "channels": pytest.approx([1e-4] * 2)}
    with torch.no_grad():
        model.trunk.blocks[1].ls1.gamma.copy_(torch.linspace(-1, 1, 32))
    by_hand = sum(abs(-1 + 2 * i / 31) for i in range(32)) / 32
    assert layer_scales(model)["mixing"] == pytest.approx([1e-4, by_hand])


def test_gates_are_gains_and_a_plain_vit_has_none() -> None:
    assert layer_scales(create_model("vit_tiny", **SMALL)) == {}
    assert layer_scales(create_model("vit_tiny", **SMALL, gate=0.25))["channels"] == [0.25, 0.25]


def ratios_by_hand(model: Classifier, images: Tensor) -> dict[str, list[float]]:
    trunk: Any = model.trunk
    x = trunk.embed(model._images(images)).sequence
    found: dict[str, list[float]] = {"mixing": [], "channels": []}
    for i, block in enumerate(trunk.blocks):
        layout = trunk.embed(model._images(images))
        mixed = block.ls1(block.attn(block.norm1(x), layout, i))
        found["mixing"].append(mean_ratio(mixed, x))
        x = x + mixed
        changed = block.ls2(block.mlp(block.norm2(x)))
        found["channels"].append(mean_ratio(changed, x))
        x = x + changed
    return found


def mean_ratio(branch: Tensor, stream: Tensor) -> float:
    each = [
        math.sqrt(float((b**2).sum())) / math.sqrt(float((s**2).sum())) for b, s in zip(branch, stream, strict=True)
    ]
    return sum(each) / len(each)


@torch.no_grad()
def test_ratios_of_branches_are_those_of_a_walk_through_the_blocks() -> None:
    model, images = shaken("deit3_small"), some_images()
    found = learned(model, images[:2], images[2:]).ratios
    for name, values in ratios_by_hand(model, images).items():
        # float32 products of batches of other sizes
        assert found[name] == pytest.approx(values, rel=1e-5)


@torch.no_grad()
def test_branches_side_by_side_are_summed() -> None:
    model, images = shaken("vit_tiny", parallel=2), some_images(2)
    trunk: Any = model.trunk
    tokens = trunk.embed(model._images(images))
    x, block = tokens.sequence, trunk.blocks[0]
    both = sum(b.ls(b.attn(b.norm(x), tokens, 0)) for b in block.attns)
    found = learned(model, images).ratios
    assert found["mixing"][0] == pytest.approx(mean_ratio(both, x), rel=1e-5)
    assert len(found["channels"]) == 2


@torch.no_grad()
def test_a_timm_vit_has_ratios_as_well() -> None:
    model = create_model("timm:vit_tiny_patch16_224", classes=3, image_size=32, depth=2, embed_dim=48, num_heads=2)
    images = some_images(2)
    backbone: Any = model.eval().trunk.backbone
    x = model.trunk.embed(model._images(images)).sequence
    expected = mean_ratio(backbone.blocks[0].attn(backbone.blocks[0].norm1(x)), x)
    assert learned(model, images).ratios["mixing"][0] == pytest.approx(expected, rel=1e-5)


def test_local_branches_of_xcit_stand_between() -> None:
    found = learned(create_model("xcit_t12_p8", **SMALL).eval(), some_images(2))
    assert set(found.ratios) == set(found.scales) == {"mixing", "local", "channels"}


def test_no_hook_stays_behind_even_after_an_error() -> None:
    model = create_model("vit_tiny", **SMALL)
    watch = BranchRatios(model)
    with pytest.raises(RuntimeError), watch.watching():
        raise RuntimeError
    learned(model, some_images(2))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_an_adaptive_model_and_a_cnn_are_told_what_they_lack() -> None:
    adaptive = create_model("vit_tiny", **SMALL, adaptive={"kind": "ats", "layers": [1], "cap": [0.5]}).eval()
    found = learned(adaptive, some_images(3))
    assert found.ratios == {}
    assert "adaptive" in found.notes[0]
    cnn = learned(create_model("cifar_resnet20", classes=3).eval(), some_images(3))
    assert (cnn.scales, cnn.ratios, cnn.cosines) == ({}, {}, ())
    assert "no residual branches known here" in cnn.notes[0]


# Tokens


@torch.no_grad()
def test_cosines_of_the_two_tokens_are_those_of_a_loop() -> None:
    model, images = shaken("deit_tiny_distilled"), some_images(4)
    found = learned(model, images[:1], images[1:]).cosines
    out = model.outputs(images, want={"tokens.0", "tokens.1"})
    layers = [out.captured["tokens.0"], out.captured["tokens.1"], out.tokens.sequence]
    by_hand = [cosine(*model.trunk.cls_token[0])]
    by_hand += [sum(cosine(one[0], one[1]) for one in layer) / 4 for layer in layers]
    assert found == pytest.approx(by_hand, rel=1e-5)
    assert learned(shaken("vit_tiny"), images).cosines == ()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


# Patch mixing


def test_sparsity_counts_entries_below_a_twentieth_of_the_largest() -> None:
    weight = torch.tensor([[1.0, -0.049], [0.051, 0.0]])
    assert sparsity(weight) == 0.5
    assert sparsity(torch.ones(3, 3)) == 0


def test_sparsity_of_resmlp_is_that_of_its_three_matrices() -> None:
    model = create_model("resmlp_s12", image_size=32, patch=8, depth=2, width=32, classes=3)
    with torch.no_grad():
        model.trunk.blocks[1].attn.tokens.weight.copy_(torch.eye(16))
    found = mixing_sparsity(model)
    assert list(found) == ["A", "B", "C"]
    assert found["A"][1] == 15 / 16
    assert mixing_sparsity(create_model("vit_tiny", **SMALL)) == {}


def test_timms_resmlp_has_the_rows_and_the_sparsity_of_ours() -> None:
    theirs = create_model("timm:resmlp_12_224", classes=3, image_size=64)
    ours = create_model("resmlp_s12", classes=3, image_size=64)
    load_weights(ours, theirs.trunk.backbone.state_dict())
    assert mixing_sparsity(theirs) == mixing_sparsity(ours)
    for one, other in zip(mixing_rows(theirs), mixing_rows(ours), strict=True):
        assert torch.equal(one, other)


def test_central_rows_are_those_of_the_patches_in_the_middle() -> None:
    weight = torch.randn(40, 40)  # a grid of 5 x 8
    found = central_rows(weight, (5, 8), most=4)
    assert found.shape == (4, 4, 5, 8)
    for y in range(4):
        for x in range(4):
            assert torch.equal(found[y, x].flatten(), weight[(y + 0) * 8 + x + 2])


def test_a_tile_is_red_where_it_adds_white_at_zero_and_blue_where_it_subtracts() -> None:
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.5]]).expand(2, 2, 2, 2)
    picture = mosaic(rows).astype(int)
    assert picture.shape == (5, 5, 3)
    red, white, blue = picture[0, 0], picture[0, 1], picture[1, 0]
    assert red[0] > red[2] + 50
    assert blue[2] > blue[0] + 50
    assert white.min() > 240
    assert (picture[2] == 170).all()


# Second order


def test_spectra_are_over_the_largest_and_svpn_takes_their_root() -> None:
    head = SecondOrder(heads=2, rows=4, columns=4, normalization="svpn", alpha=0.5)
    model = shaken("vit_tiny", head=head)
    images = some_images(3)
    spectra = learned(model, images[:1], images[1:]).spectra
    with torch.no_grad():
        out = model.outputs(images)
        matrices = model.head.pool.matrices(out.tokens.sequence[:, 1:]).double().numpy()
    before = np.stack([np.linalg.svd(m, compute_uv=False) for m in matrices.reshape(-1, 4, 4)])
    before = before / before[:, :1]
    assert spectra["before"] == pytest.approx(before.mean(0), rel=1e-4)
    # The power of a quotient is the quotient of powers. float32 decides small singular values.
    assert spectra["after"] == pytest.approx((before**0.5).mean(0), rel=1e-3)


def test_covariance_pooling_has_spectra_and_a_zero_matrix_has_zeros() -> None:
    head = SecondOrder(heads=2, rows=3, columns=3, pooling="covariance")
    spectra = learned(shaken("vit_tiny", head=head), some_images(2)).spectra
    assert spectra["before"][0] == spectra["after"][0] == 1
    assert spectra["after"][1] > spectra["before"][1]
    assert relative_spectrum(torch.zeros(2, 3, 3)).abs().max() == 0


@torch.no_grad()
def test_agreement_of_gramian_heads_is_that_of_a_count() -> None:
    head = Gramian(heads=3, gram_width=8, attention_width=16, attention_heads=2, embed_groups=1, mlp_groups=1)
    model = shaken("vit_tiny", head=head)
    images = some_images(12)
    found = learned(model, images[:5], images[5:]).agreement
    said = model.stack(images)[:, :3].argmax(-1).tolist()
    for i in range(3):
        for j in range(3):
            assert found[i, j] == pytest.approx(sum(row[i] == row[j] for row in said) / 12)
    assert learned(shaken("vit_tiny"), images).agreement is None


# Embeddings


def test_energy_is_that_of_scikit_learn_and_components_are_counted() -> None:
    rows = torch.randn(40, 6) * torch.tensor([5.0, 3.0, 1.0, 0.5, 0.1, 0.01])
    energy = pca_energy(rows)
    expected = np.cumsum(PCA().fit(rows.double().numpy()).explained_variance_ratio_)
    np.testing.assert_allclose(energy.numpy(), expected, rtol=1e-9)
    assert components_for(energy) == int(np.searchsorted(expected, 0.9)) + 1
    assert pca_energy(torch.ones(4, 3)).tolist() == [0, 0, 0]


def test_equal_variances_need_nine_of_ten_components() -> None:
    corners = torch.cat([torch.eye(10), -torch.eye(10)])
    assert components_for(pca_energy(corners)) == 9


def test_the_plane_is_that_of_scikit_learn_up_to_sign_and_has_no_sign_to_choose() -> None:
    rows = torch.randn(30, 5) * torch.tensor([5.0, 3.0, 1.0, 0.5, 0.1])
    found = pca_plane(rows)
    expected = PCA(2).fit_transform(rows.double().numpy())
    for axis in range(2):
        sign = np.sign(expected[:, axis] @ found[:, axis].numpy())
        np.testing.assert_allclose(found[:, axis].numpy(), sign * expected[:, axis], atol=1e-9)
        assert float(found[found[:, axis].abs().argmax(), axis]) > 0


def test_tsne_keeps_two_far_groups_apart() -> None:
    groups = torch.cat([torch.randn(12, 4) + 20 * torch.eye(4)[0], torch.randn(12, 4) + 20 * torch.eye(4)[1]])
    found = plane(groups, "tsne")
    assert found.shape == (24, 2)
    nearest = torch.cdist(found, found).fill_diagonal_(math.inf).argmin(1)
    assert (nearest // 12).tolist() == [0] * 12 + [1] * 12


def test_umap_is_asked_for_cosines_of_unit_vectors_with_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Umap:
        def __init__(self, **options: Any) -> None:
            asked.update(options)

        def fit_transform(self, rows: np.ndarray) -> np.ndarray:
            asked["rows"] = rows
            return rows[:, :2]

    module = types.ModuleType("umap")
    module.__spec__ = ModuleSpec("umap", None)
    monkeypatch.setattr(module, "UMAP", Umap, raising=False)
    monkeypatch.setitem(sys.modules, "umap", module)
    rows = torch.randn(8, 5)
    found = plane(rows, "umap", seed=7)
    unit = rows / rows.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(asked.pop("rows"), unit.numpy(), rtol=1e-5)
    assert asked == {"metric": "cosine", "random_state": 7, "n_neighbors": 7, "n_jobs": 1}
    torch.testing.assert_close(found, unit[:, :2].double(), rtol=1e-5, atol=1e-7)


def test_a_projection_that_is_not_there_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tsne needs scikit-learn, which is not installed; use --projection pca"):
        inspect_models([create_model("vit_tiny", **SMALL)], images=["nowhere"], projection="tsne")
    with pytest.raises(ValueError, match="no projection 'pcs'; did you mean 'pca'"):
        plane(torch.zeros(5, 2), "pcs")


def test_neighbours_are_those_of_all_cosines_without_oneself() -> None:
    rows = torch.randn(20, 4)
    rows[7] = rows[3] * 2  # the same direction: nearest, and still not itself
    found = neighbours_of(rows, 6, 3)
    cosines = F.cosine_similarity(rows[:, None].double(), rows[None].double(), dim=-1).fill_diagonal_(-2)
    assert found.rows.tolist() == cosines[:6].topk(3).indices.tolist()
    assert int(found.rows[3, 0]) == 7
    assert neighbours_of(rows[:2], 2, 5).rows.tolist() == [[1], [0]]


def test_clusters_of_far_groups_are_the_groups() -> None:
    centres = torch.eye(3)
    label = np.repeat([0, 1, 2], [10, 20, 5])
    rows = centres[label] + 0.05 * torch.randn(35, 3)
    found = image_clusters(rows, label, 3)
    assert found.sizes == (20, 10, 5)
    assert found.purity == 1
    assert found.shares == ((1, 1.0), (0, 1.0), (2, 1.0))
    assert sorted(found.members[0]) == list(range(10, 30))
    unit = F.normalize(rows, dim=1).numpy()
    reference = KMeans(3, n_init=5, random_state=0).fit(unit)
    assert found.inertia == pytest.approx(reference.inertia_, rel=1e-4)
    middle = unit[10:30].mean(0)
    distance = ((unit[found.members[0]] - middle) ** 2).sum(1)
    assert (np.diff(distance) >= -1e-7).all()
    assert image_clusters(rows, None, 3).purity is None


# Pictures


def test_a_frame_lies_on_the_edge_and_changes_nothing_inside() -> None:
    picture = np.zeros((30, 20, 3), dtype=np.uint8)
    found = framed(picture, RELATED)
    assert (found[0, 0] == RELATED).all()
    assert (found[FRAME:-FRAME, FRAME:-FRAME] == 0).all()
    assert (found == RELATED).all(-1).sum() == 30 * 20 - (30 - 2 * FRAME) * (20 - 2 * FRAME)


def test_the_finest_level_that_two_images_share() -> None:
    assert shared_level(np.array([0, 1, 2]), None, 0, 1) is None
    levels = np.array([[0, 0], [1, 0], [2, 1]])
    assert [shared_level(levels[:, 0], levels, 0, other) for other in range(3)] == [0, 1, None]


def test_a_map_has_a_point_an_image_and_names_its_classes() -> None:
    points = np.random.default_rng(0).normal(size=(20, 2))
    labels = np.arange(20) % 10
    chart = str(scatter_chart(points, labels, [f"<{i}>" for i in range(10)], title="map"))
    assert chart.count('class="spot') == 20
    assert chart.count("<rect") == 4  # two classes beyond the eight colours
    assert "&lt;3&gt;</text>" in chart
    assert "<3>" not in chart


# The command


def test_only_what_is_asked_for_is_computed(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = create_model("deit3_small", **SMALL)
    asked: set[str] = set()
    whole = Classifier.outputs

    def outputs(self: Classifier, images: Tensor, want: Any = (), given: Any = None) -> Any:
        asked.update(want)
        return whole(self, images, want, given)

    monkeypatch.setattr(Classifier, "outputs", outputs)
    options: dict[str, Any] = {"images": [photos], "count": 2, "over": 6, "out": tmp_path, "device": "cpu"}
    found, folder = inspect_models([model], what=["neighbours", "learned"], **options)
    assert asked == set()
    subject = found.subjects[0]
    assert found.what == ("learned", "neighbours")
    assert subject.evidence is None
    assert subject.attention.layers == ()
    assert subject.weights is not None
    assert subject.embedding is not None
    assert subject.embedding.plane is subject.embedding.clusters is None
    assert set(subject.weights.scales) == {"mixing", "channels"}
    page = (folder / "inspect.html").read_text(encoding="utf-8")
    assert 'id="neighbours"' in page
    assert 'id="learned"' in page
    for name in ("attention", "heads", "evidence", "judged", "embedding", "clusters", "figures"):
        assert f'id="{name}"' not in page
    inspect_models([model], what=["attention"], **options)
    assert asked == {"attention.0", "attention.1"}


def test_sections_come_in_the_order_of_the_page_and_unknown_ones_have_near_matches() -> None:
    assert chosen_sections(()) == tuple(SECTIONS)
    assert chosen_sections(["clusters", "attention"]) == ("attention", "clusters")
    with pytest.raises(ValueError, match="no section 'neighbors'; did you mean 'neighbours'"):
        chosen_sections(["neighbors"])


def test_a_section_that_no_model_has_is_said(photos: Path, tmp_path: Path) -> None:
    model = create_model("vit_tiny", **SMALL)
    found, _ = inspect_models([model], what=["kept", "likeness"], images=[photos], count=1, over=2, out=tmp_path)
    assert [line.partition(":")[0] for line in found.lacking()] == ["kept", "likeness"]


def test_a_cnn_has_embeddings(tmp_path: Path, photos: Path) -> None:
    cnn = create_model("cifar_resnet20", classes=3)
    found, _ = inspect_models([cnn], what=["embedding"], images=[photos], count=1, over=3, out=tmp_path, device="cpu")
    assert found.subjects[0].embedding is not None
    assert len(found.subjects[0].embedding.energy) > 0


def test_the_command_tells_of_resmlp_and_taxonomies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = create_model("resmlp_s12", image_size=32, patch=8, depth=2, width=32, classes=12)
    place = model.save(tmp_path / "model")
    words = ["inspect", str(place), "--data", "synthetic:shapes?n=120&size=32", "--split", "train", "--device", "cpu"]
    words += ["--count", "3", "--over", "30", "--what", "learned", "embedding", "neighbours", "clusters"]
    assert run([*words, "--out", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["models"][0]["learned"]
    assert set(told) == {"scales", "ratios", "sparsity", "pca", "neighbours", "clusters", "notes"}
    assert np.shape(told["neighbours"]["rows"]) == (3, 6)
    assert sum(told["clusters"]["sizes"]) == 30
    assert told["pca"]["energy"][-1] == pytest.approx(1)
    page = (tmp_path / "out" / "inspect.html").read_text(encoding="utf-8")
    assert "amber ~: the same at a coarser level" in page
    for name in ("mixing", "neighbours-0", "clusters-0"):
        assert (tmp_path / "out" / f"{name}.png").is_file()
    assert run([*words, "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("block") for line in lines)
    assert any("12 clusters have a purity of" in line for line in lines)


def test_modules_stay_as_they_were() -> None:
    model = create_model("vit_tiny", **SMALL).train()
    learned(model, some_images(2))
    assert all(m.training for m in model.modules() if isinstance(m, nn.Module))
