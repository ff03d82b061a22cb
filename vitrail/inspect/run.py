"""`vitrail inspect`: models and images in; a page of attention, saliency, kept tokens, weights and embeddings out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.config import RunConfig, load_yaml
from vitrail.data.dataset import BadImage, DataSet
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.folder import image_files
from vitrail.data.stack import composite
from vitrail.engine.device import choose_device
from vitrail.engine.progress import Progress
from vitrail.engine.run_folder import environment, free_name
from vitrail.files import reject_unwritable
from vitrail.inspect.anchors import AnchorSection
from vitrail.inspect.attention_section import AttentionSection
from vitrail.inspect.embeddings import EmbeddingSection, Projection, check_projection
from vitrail.inspect.evidence import EvidenceSection
from vitrail.inspect.kept import KeptSection
from vitrail.inspect.model_similarity import SimilaritySection
from vitrail.inspect.page import write_inspection
from vitrail.inspect.section import ImageBatch, InspectedModel, Inspection, Section, ShownImage
from vitrail.inspect.weight_statistics import WeightSection
from vitrail.measure.attention_maps import batch_for, map_layers
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.weights import load_model
from vitrail.model.zoo import ZOO
from vitrail.run.data_module import reads_texts
from vitrail.run.run_data import division, own_data_of
from vitrail.schema import build, near

ModelSource = str | Path | Classifier
MOST_JUDGED = 64  # images that are kept for the evaluation of maps, where their number is not given
FOR_NAMES = "embedded:fashion"  # images for untrained models, where none are given
KINDS: tuple[type[Section], ...] = (  # in the order of the page
    AttentionSection,
    KeptSection,
    EvidenceSection,
    SimilaritySection,
    WeightSection,
    EmbeddingSection,
    AnchorSection,
)
SECTIONS = {name: about for kind in KINDS for name, about in kind.names.items()}


def chosen_sections(what: Sequence[str]) -> tuple[str, ...]:
    """The sections that are asked for, in the order of the page (none: all). Raises `ValueError` for an unknown one."""
    for name in what:
        if name not in SECTIONS:
            raise ValueError(f"--what: no section {name!r}{near(name, SECTIONS)}; there are {', '.join(SECTIONS)}")
    return tuple(name for name in SECTIONS if name in what or not what)


def inspect_models(
    models: Sequence[ModelSource],
    *,
    data: str | Path | DataSet | None = None,
    images: Sequence[str | Path] = (),
    split: str | None = None,
    count: int = 8,
    over: int = 256,
    layers: Sequence[int] = (),
    judge: int | None = None,
    what: Sequence[str] = (),
    projection: Projection = "pca",
    attack: str | Path | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    quiet: bool = True,
) -> tuple[Inspection, Path]:
    """Inspect one or several models; writes `inspect.html`, PNGs and SVGs into `out`.

    Where it is not given, `out` is RUN/inspect for one run, which its report links to, else runs/inspect, numbered.
    `models` are run folders, model folders, names of the zoo (untrained) or classifiers. Images are `images` (files or
    folders), or a split of `data` (none: the first run's own data, or clothes where the first is but a name; split
    none: test, or val where there is no test), the same number of each class. The first `count` become pictures;
    metrics are means `over` so many. `layers` are those shown in pictures (none: chosen evenly). Saliency maps are
    evaluated on `judge` images (none: as many as take about a minute). `what` names sections of the page (`SECTIONS`;
    none: all that apply), and nothing else is computed. `projection` computes the map of embeddings: pca, tsne or umap.
    `attack` is a folder with a patch (`vitrail attack`), under which adaptive models are inspected once more. The first
    two models are compared with each other. Raises `ValueError` or `FileNotFoundError` in one sentence.
    """
    if not models:
        raise ValueError("name at least one run or model to inspect")
    if judge is not None and judge < 0:
        raise ValueError(f"judge is a number of images, or 0 for none, not {judge}")
    if count < 1 or over < 1:
        raise ValueError(f"count and over are numbers of images and must be at least 1, not {count} and {over}")
    if images and data is not None:
        raise ValueError("--data and --images both say which images; use one of them")
    asked = chosen_sections(what)
    if attack is not None and "kept" not in asked:
        raise ValueError("--attack changes what is kept, and that section was not asked for; add kept to --what")
    check_projection(projection)
    chosen_device = choose_device(device)
    subjects = [_subject(model, name, chosen_device) for model, name in zip(models, short_names(models), strict=True)]
    _check_layers(subjects, layers)
    folder = _default_folder(models) if out is None else Path(out)
    reject_unwritable(folder)
    inspection = Inspection(
        subjects,
        source="",
        what=asked,
        everything=set(asked) == set(SECTIONS),
        device=chosen_device,
        count=count,
        layers=tuple(layers),
        judge=judge,
        projection=projection,
        attack=None if attack is None else Path(attack),
        notes=tuple(_notes(models, subjects)),
    )
    inspection.sections = [
        kind(inspection) for kind in KINDS if kind is AttentionSection or set(kind.names) & set(asked)
    ]
    source = _files(images, subjects[0].model) if images else _split(models, data, split, max(count, over))
    _collect(inspection, source, max(count, over), quiet)
    write_inspection(folder, inspection, environment())
    return inspection, folder


def _collect(inspection: Inspection, source: ImageSource, most: int, quiet: bool) -> None:
    """Run every section over the images."""
    subjects, room = inspection.subjects, inspection.count
    if "judged" in inspection.what:
        room = max(room, MOST_JUDGED if inspection.judge is None else inspection.judge)
    preprocess = [Preprocess(subject.model.preprocess) for subject in subjects]
    read: list[int] = []
    size = min(batch_for(subject.model) for subject in subjects)
    with Progress("inspect", min(len(source.captions), most), quiet=quiet) as bar:
        for batch in _batches(source, size, most, bar):
            read += [row for row, _ in batch]
            inputs: list[Tensor] = []
            for subject, prepare in zip(subjects, preprocess, strict=True):
                inputs.append(torch.stack([prepare(image) for _, image in batch]))
                kept = max(0, room - len(subject.pixels))
                subject.pixels += [image.permute(1, 2, 0).numpy() for image in inputs[-1][:kept]]
                subject.boxes += [source.box(row, subject.model) for row, _ in batch[:kept]]
            images = ImageBatch([tensor.to(inspection.device) for tensor in inputs])
            for section in inspection.sections:
                section.add(images)
            bar.advance(len(batch))
    inspection.source, inspection.classes, inspection.levels = source.name, source.classes, source.level_names
    inspection.captions = tuple(source.captions[row] for row in read[: inspection.count])
    inspection.label, inspection.level = (None if v is None else v[read] for v in (source.labels, source.levels))
    for section in inspection.sections:
        section.finish()
    for row in sorted(inspection.shown):  # read again: only these are kept
        try:
            pixels = composite(preprocess[0](source.read(read[row])).permute(1, 2, 0).numpy())
        except BadImage:  # gone since it was read before
            continue
        inspection.more[row] = ShownImage(pixels, source.captions[read[row]])


def _subject(model: ModelSource, name: str, device: torch.device) -> InspectedModel:
    loaded = load_any(model).to(device).eval()
    loaded.reject_other("inspect")
    if reads_texts(loaded):
        raise ValueError(f"{name} reads texts, and pages are of images; the report of its run shows what words do")
    return InspectedModel(name, name if isinstance(model, Classifier) else str(model), loaded, run_of(model))


def _notes(models: Sequence[ModelSource], subjects: Sequence[InspectedModel]) -> list[str]:
    notes = [f"{s.name} is untrained" for s, model in zip(subjects, models, strict=True) if _in_zoo(model)]
    return notes + [
        f"{s.name} learned without labels and knows no classes, so there are no maps of evidence for one"
        for s in subjects
        if s.model.unlabelled
    ]


def _check_layers(subjects: Sequence[InspectedModel], layers: Sequence[int]) -> None:
    """Raises `ValueError` where no model has the layers that are asked for."""
    known = {layer for subject in subjects for layer in map_layers(subject.model)}
    for layer in layers:
        if known and layer not in known:
            raise ValueError(f"--layers: no layer {layer}; layers with attention maps are 0 to {max(known)}")


def _default_folder(models: Sequence[ModelSource]) -> Path:
    """Inside a run that is inspected alone, where its report links to; otherwise runs/inspect, numbered."""
    first = models[0]
    if len(models) == 1 and not isinstance(first, Classifier) and (Path(first) / "config.yaml").is_file():
        return Path(first) / "inspect"
    return free_name(Path("runs") / "inspect")


@dataclass(frozen=True)
class ImageSource:
    """Images to inspect, read one by one."""

    name: str
    captions: Sequence[str]
    read: Callable[[int], Image.Image]  # row -> RGB image; raises BadImage
    strict: bool  # each was named by a person: one that cannot be read is an error
    # (row, model) -> box of its object, in sides of the model's input; none where that is unknown
    box: Callable[[int, Classifier], NDArray[np.float32] | None] = lambda row, model: None
    labels: NDArray[np.int64] | None = None  # [images]; none where they are unknown
    levels: NDArray[np.int64] | None = None  # [images, levels] of a taxonomy
    classes: tuple[str, ...] = ()
    level_names: tuple[str, ...] = ()


def _batches(source: ImageSource, size: int, most: int, bar: Progress) -> Iterator[list[tuple[int, Image.Image]]]:
    """Rows and images, `size` at a time; one that cannot be read is an error, or skipped and logged."""
    batch: list[tuple[int, Image.Image]] = []
    given = 0
    for row in range(len(source.captions)):
        if given + len(batch) >= most:
            break
        try:
            batch.append((row, source.read(row)))
        except BadImage as error:
            if source.strict:
                raise ValueError(f"{error.key} cannot be read: {error.reason}") from None
            bar.say(f"skipped {error}")
        if len(batch) == size:
            yield batch
            given, batch = given + len(batch), []
    if batch:
        yield batch
    elif not given:
        raise ValueError(f"none of the images of {source.name} could be read; run `vitrail check` on the data")


def _files(paths: Sequence[str | Path], model: Classifier) -> ImageSource:
    files = [file for path in map(Path, paths) for file in (image_files(path) if path.is_dir() else [path])]
    if not files:
        raise ValueError(f"no images in {', '.join(map(str, paths))}")
    name = str(paths[0]) if len(paths) == 1 else f"{len(files)} files"
    strict = not any(Path(path).is_dir() for path in paths)
    return ImageSource(name, [p.name for p in files], lambda i: model.opened(files[i], str(files[i])), strict)


def _split(
    models: Sequence[ModelSource], data: str | Path | DataSet | None, split: str | None, most: int
) -> ImageSource:
    opened = data if isinstance(data, DataSet) else data_of(models[0], data)
    split = split or ("test" if "test" in opened.splits else "val")
    if split not in opened.splits:
        raise ValueError(
            f"{opened.uri} has no split {split!r}; it has {', '.join(opened.splits)}{near(split, opened.splits)}"
        )
    images = opened[split]
    rows = by_turns(images.labels, most)
    labels = _first_labels(images.labels)[rows]

    def box(i: int, model: Classifier) -> NDArray[np.float32] | None:
        size = model.preprocess.size
        if images.boxes is None or images.read(rows[i]).size != (size, size) or model.preprocess.crop_ratio < 1:
            return None
        return np.asarray(images.boxes[rows[i]] / size, dtype=np.float32)

    return ImageSource(
        f"{split} of {opened.uri}",
        [opened.classes[label] for label in labels],
        lambda i: images.read(rows[i]),
        strict=False,
        box=box,
        labels=None if opened.unlabelled else labels,
        levels=None if images.levels is None else images.levels[rows],
        classes=opened.classes,
        level_names=tuple(level.name for level in opened.levels),
    )


def by_turns(labels: NDArray[np.int64], most: int) -> list[int]:
    """Rows of at most so many images: the first of each class, then the second of each, and so on.

    >>> by_turns(np.array([0, 0, 0, 1, 1, 2]), 4)
    [0, 3, 5, 1]
    """
    kinds = _first_labels(labels)
    turn = np.zeros(len(kinds), dtype=np.int64)
    for kind in np.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        turn[rows] = np.arange(len(rows))
    return [int(row) for row in np.lexsort((kinds, turn))[:most]]


def _first_labels(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    return labels.argmax(1) if labels.ndim == 2 else labels


def run_of(model: ModelSource) -> tuple[Path, RunConfig] | None:
    """The run that a model is of, and its configuration; none of a model that stands alone."""
    for folder in [] if isinstance(model, Classifier) else [Path(model), Path(model).parent]:
        if (folder / "config.yaml").is_file():
            return folder, build(RunConfig, {**load_yaml(folder), "out": None})
    return None


def data_of(model: ModelSource, data: str | Path | None) -> DataSet:
    """Data as the run of a model divided them; none: those it was trained on, or small images for a name alone."""
    run = run_of(model)
    if data is not None:
        return open_data(data, **({} if run is None else division(run[1].data)))
    if run is None and _in_zoo(model):
        return open_data(FOR_NAMES)
    if run is None:
        raise ValueError("the first model is no run that knows its data; say which images: --data URI or --images PATH")
    config = run[1].data
    with own_data_of(run[0]):
        return open_data(config.uri, level=config.level, **division(config))


def load_any(model: ModelSource) -> Classifier:
    """A run, a saved model, or an untrained one of the zoo or of timm."""
    if isinstance(model, Classifier):
        return model
    if _in_zoo(model):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return create_model(str(model))  # a name of timm has its own weights' settings, but none of its weights
    return load_model(model)


def _in_zoo(model: ModelSource) -> bool:
    named = str(model) in ZOO or str(model).startswith("timm:")
    return not isinstance(model, Classifier) and named and not Path(model).exists()


def short_names(models: Sequence[ModelSource]) -> list[str]:
    """Short names that tell the models apart."""
    names = []
    for model in models:
        if isinstance(model, Classifier):
            names.append(str(model.spec.get("name") or "model"))
        else:
            path = Path(model).resolve()
            names.append(path.parent.name if path.name == "model" else path.name)
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]
