"""Inspection of an adaptive model under a patch of `vitrail attack`.

`vitrail inspect`: models and images in, a page of where they look, what they keep and what they learned out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.config import RunConfig, load_yaml
from vitrail.data.dataset import BadImage, DataSet
from vitrail.data.decode import decode
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.folder import image_files
from vitrail.engine.device import choose_device
from vitrail.engine.progress import Progress
from vitrail.engine.run_folder import environment, free_name
from vitrail.files import refuse_unwritable
from vitrail.inspect.embeddings import Way, refuse_way
from vitrail.inspect.evidence import Evidence, gather_evidence
from vitrail.inspect.model_similarity import Divergences, cka_table, transfer_account
from vitrail.inspect.page import write_inspection
from vitrail.inspect.results import InspectedModel, Inspection, Picture, chosen_sections
from vitrail.inspect.teacher_view import AnchorGather
from vitrail.inspect.weight_statistics import WEIGHT_SECTIONS as LEARNED
from vitrail.inspect.weight_statistics import Learned, Learner
from vitrail.learn.attack import load_patch
from vitrail.measure.attention_maps import Looker, batch_for, map_layers, other_selection, policy_kind, stages
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.store import load_model
from vitrail.model.zoo import ZOO
from vitrail.run.data_module import reads_texts
from vitrail.run.run_data import division, own_data_of
from vitrail.schema import build, near


class Patched:
    """The same images with the patch: what is kept of them, and the first `pictures` as bytes [side, side, 3]."""

    def __init__(self, model: Classifier, folder: Path, pictures: int) -> None:
        self.model, self.looker = model, Looker(model, pictures, ())
        self.change = load_patch(folder, model.preprocess)[0].to(next(model.parameters()).device)
        self.pixels: list[NDArray[np.uint8]] = []

    def add(self, images: Tensor) -> None:
        """Images as the model takes them, [batch, 3, height, width]."""
        with torch.no_grad():
            changed = self.change(self.model._images(images))
        room = max(0, self.looker.pictures - self.looker.images)
        levels = ((changed[:room].float() * self.change.std + self.change.mean) * 255).round().clamp(0, 255)
        self.pixels += list(levels.to("cpu", torch.uint8).permute(0, 2, 3, 1).numpy())
        self.looker.add(changed)


def patched(models: Sequence[Classifier], folder: Path, pictures: int) -> list[Patched | None]:
    """One a model, none for those that spend the same on every image.

    Raises `ValueError` or `FileNotFoundError`, one sentence, where no model is adaptive or the patch does not fit.
    """
    if all(model.policy is None for model in models):
        raise ValueError("--attack: every model named spends the same on every image; name an adaptive one")
    return [None if model.policy is None else Patched(model, folder, pictures) for model in models]


MOST_JUDGED = 64  # images that are kept for judging maps, where nobody says how many
FOR_NAMES = "embedded:fashion"  # what untrained models are shown where nobody says
OF_CLUSTER = 10  # images of a cluster that are shown
LOOKS = {"maps": ("attention", "heads", "likeness"), "features": ("likeness",), "saliency": ("saliency",)}


@dataclass(frozen=True)
class Pictures:
    """Images to look at, read one by one."""

    source: str
    captions: Sequence[str]
    read: Any  # place -> RGB image; raises BadImage
    boxes: Any  # (place, model) -> where its object is, in sides of what the model sees; none where that is unknown
    strict: bool  # each was named by a person: one that cannot be read is an error
    labels: NDArray[np.int64] | None = None  # [images]; none where nobody says
    levels: NDArray[np.int64] | None = None  # [images, levels] of a taxonomy
    classes: tuple[str, ...] = ()
    level_names: tuple[str, ...] = ()


def inspect_models(
    models: Sequence[str | Path | Classifier],
    *,
    data: str | Path | DataSet | None = None,
    images: Sequence[str | Path] = (),
    split: str | None = None,
    count: int = 8,
    over: int = 256,
    layers: Sequence[int] = (),
    judge: int | None = None,
    what: Sequence[str] = (),
    projection: Way = "pca",
    attack: str | Path | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    quiet: bool = True,
) -> tuple[Inspection, Path]:
    """Look into one or several models; writes `inspect.html` and PNGs into `out`.

    Where it is not given, `out` is RUN/inspect for one run, which its report links to, else runs/inspect, numbered.
    `models` are run folders, model folders, names of the zoo (untrained) or classifiers. Images are `images` (files or
    folders), or a split of `data` (none: the first run's own data, or clothes where the first is but a name; split
    none: test, or val where there is no test), the same number of each class. The first `count` become pictures;
    figures are means `over` so many. `layers` are those shown in pictures (none: chosen evenly). Maps of evidence are
    judged on `judge` images (none: as many as take about a minute). `what` names sections of the page
    (`measure.inspection.SECTIONS`; none: all that apply), and nothing else is computed. `projection` makes the map of
    embeddings: pca, tsne or umap. `attack` is a folder with a patch (`vitrail attack`), under which adaptive models are
    looked at once more. The first two models are compared with each other. Raises `ValueError` or `FileNotFoundError`
    in one sentence.
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
    refuse_way(projection)
    place = choose_device(device)
    names = short_names(models)
    loaded = [load_any(model).to(place).eval() for model in models]
    for name, model in zip(names, loaded, strict=True):
        if reads_texts(model):
            raise ValueError(f"{name} reads texts, and pages are of images; the report of its run shows what words do")
    _refuse_layers(loaded, layers)
    folder = _own_folder(models) if out is None else Path(out)
    refuse_unwritable(folder)
    attacked = [None] * len(loaded) if attack is None else patched(loaded, Path(attack), count)
    found = _files(images) if images else _split(models, data, split, max(count, over))
    parts = [part for part, sections in LOOKS.items() if set(sections) & _for(asked, len(loaded))]
    lookers = [Looker(model, count, parts) for model in loaded]
    learners = [Learner(model, set(LEARNED) & set(asked)) for model in loaded] if set(LEARNED) & set(asked) else []
    teachers = [
        AnchorGather(_run_of(where), model, place)
        for where, model in zip(models, loaded, strict=True)
        if "anchors" in asked
    ]
    pair = Divergences(*loaded[:2]) if len(loaded) > 1 and "likeness" in asked else None
    pixels: list[list[NDArray[np.uint8]]] = [[] for _ in loaded]
    boxes: list[list[NDArray[np.float32] | None]] = [[] for _ in loaded]
    room_for = max(count, (MOST_JUDGED if judge is None else judge) if "judged" in asked else 0)
    captions: list[str] = []
    seen_places: list[int] = []
    step = min(batch_for(model) for model in loaded)
    with Progress("inspect", min(len(found.captions), max(count, over)), quiet=quiet) as bar:
        for batch in _batches(found, step, max(count, over), bar):
            inputs = [torch.stack([Preprocess(m.preprocess)(image) for _, _, image in batch]) for m in loaded]
            seen_places += [place_ for place_, _, _ in batch]
            captions += [caption for _, caption, _ in batch[: max(0, count - len(captions))]]
            for kept, where, model, tensor in zip(pixels, boxes, loaded, inputs, strict=True):
                room = max(0, room_for - len(kept))
                kept += [one.permute(1, 2, 0).numpy() for one in tensor[:room]]
                where += [found.boxes(place_, model) for place_, _, _ in batch[:room]]
            seen = [looker.add(tensor.to(place)) for looker, tensor in zip(lookers, inputs, strict=True)]
            if pair is not None:
                pair.add(seen[0], seen[1])
            for gathers in (learners, teachers, attacked):
                for gather, tensor in zip(gathers, inputs, strict=False):
                    if gather is not None:
                        gather.add(tensor.to(place))
            bar.advance(len(batch))
    evidence = [
        gather_evidence(model, some, where, count, place, judge if "judged" in asked else 0, "evidence" in asked)
        if {"evidence", "judged"} & set(asked) and not model.unlabelled
        else None
        for model, some, where in zip(loaded, pixels, boxes, strict=True)
    ]
    labels, levels = (None if of is None else of[seen_places] for of in (found.labels, found.levels))
    learned = [learner.result(len(captions), labels, levels, projection) for learner in learners]
    subjects = _subjects(loaded, names, models, lookers, pixels, len(captions), evidence, learned)
    if teachers:
        ranked = [teacher.result(len(captions), labels, levels) for teacher in teachers]
        subjects = tuple(replace(one, anchors=some) for one, some in zip(subjects, ranked, strict=True))
    if "kept" in asked:
        several = zip(subjects, loaded, attacked, strict=True)
        subjects = tuple(_with_what_else_it_keeps(one, model, under) for one, model, under in several)
    made = Inspection(
        subjects,
        found.source,
        tuple(captions),
        tuple(layers),
        what=asked,
        classes=found.classes,
        levels=found.level_names,
        more=_others(found, seen_places, subjects, Preprocess(loaded[0].preprocess)),
        **_compared(loaded, names, models, subjects, pair, _without_teacher(teachers, names, what)),
    )
    write_inspection(folder, made, environment())
    return made, folder


def _for(asked: Sequence[str], models: int) -> set[str]:
    """Sections that there can be with so many models."""
    return set(asked) - (set() if models > 1 else {"likeness"})


def _subjects(
    loaded: Sequence[Classifier],
    names: Sequence[str],
    models: Sequence[str | Path | Classifier],
    lookers: Sequence[Looker],
    pixels: Sequence[Sequence[NDArray[np.uint8]]],
    pictures: int,
    evidence: Sequence[Evidence | None],
    learned: Sequence[Learned],
) -> tuple[InspectedModel, ...]:
    return tuple(
        InspectedModel(
            name=names[i],
            path=names[i] if isinstance(models[i], Classifier) else str(models[i]),
            kind=policy_kind(model),
            stages=stages(model),
            classes=model.classes,
            looks=lookers[i].result(),
            pixels=pixels[i][:pictures],
            evidence=evidence[i],
            learned=learned[i] if learned else None,
        )
        for i, model in enumerate(loaded)
    )


def _compared(
    loaded: Sequence[Classifier],
    names: Sequence[str],
    models: Sequence[str | Path | Classifier],
    subjects: Sequence[InspectedModel],
    pair: Divergences | None,
    said_before: Sequence[str],
) -> dict[str, Any]:
    """What an `Inspection` says of the first two models together, and what a person should know."""
    options: dict[str, Any] = {}
    said = [f"{name} is untrained" for name, where in zip(names, models, strict=True) if _in_zoo(where)]
    said += [
        f"{name} learned without labels and knows no classes, so there are no maps of evidence for one"
        for name, model in zip(names, loaded, strict=True)
        if model.unlabelled
    ]
    said += said_before
    if pair is not None:
        first, second = (s.looks.features for s in subjects[:2])
        if first and second:
            options["cka"] = cka_table(first, second)
        else:
            said.append("CKA is left out: one of the two shows no inner layers")
        if pair.reason:
            said.append(f"divergence of maps is left out: {pair.reason}")
        else:
            options |= {"divergence": pair.values(), "divergence_layers": tuple(pair.layers)}
            options["divergence_images"] = pair.images
        account = transfer_account(loaded[0], loaded[1])
        if isinstance(account, str):
            said.append(account)
        else:
            options["transfer"] = account
        if len(subjects) > 2:
            said.append(f"{names[0]} and {names[1]} are compared with each other, the others only shown")
    return {"notes": tuple(said), **options}


def _with_what_else_it_keeps(subject: InspectedModel, model: Classifier, under: Patched | None) -> InspectedModel:
    """What is kept by another rule of drawing, and under a patch."""
    counts = subject.looks.counts
    if counts is None:
        return subject
    beside = other_selection(model, subject.pixels, counts)
    if under is None:
        return replace(subject, selection=beside)
    return replace(subject, selection=beside, attacked=under.looker.result(), attacked_pixels=under.pixels)


def _without_teacher(teachers: Sequence[AnchorGather], names: Sequence[str], what: Sequence[str]) -> list[str]:
    """Why there are no anchors, of those that were asked for them; of others where their teacher is lost."""
    several = len(names) > 1
    return [
        f"{name}: {one.reason}" if several else one.reason
        for name, one in zip(names, teachers, strict=False)
        if one.reason and (one.taught or "anchors" in what)
    ]


def _others(
    found: Pictures, places: Sequence[int], subjects: Sequence[InspectedModel], preprocess: Preprocess
) -> dict[int, Picture]:
    """Images that neighbours, anchors and clusters show, read again, by their number among all: only those are kept."""
    rows: set[int] = set()
    for subject in subjects:
        one = subject.learned
        for ranked in (subject.anchors, None if one is None else one.neighbours):
            rows |= set() if ranked is None else set(ranked.rows.flatten().tolist())
        if one is not None and one.clusters is not None:
            rows |= {int(row) for members in one.clusters.members for row in members[:OF_CLUSTER]}
    made = {}
    for row in sorted(rows):
        try:
            pixels = preprocess(found.read(places[row])).permute(1, 2, 0).numpy()
        except BadImage:  # gone since it was read before
            continue
        made[row] = Picture(pixels, found.captions[places[row]])
    return made


def _own_folder(models: Sequence[str | Path | Classifier]) -> Path:
    """Inside a run that is looked at alone, where its report links to; otherwise runs/inspect, numbered."""
    first = models[0]
    if len(models) == 1 and not isinstance(first, Classifier) and (Path(first) / "config.yaml").is_file():
        return Path(first) / "inspect"
    return free_name(Path("runs") / "inspect")


def _batches(found: Pictures, size: int, most: int, bar: Progress) -> Iterator[list[tuple[int, str, Image.Image]]]:
    """Places, captions and images, `size` at a time; what cannot be read is an error or left out and said."""
    ready: list[tuple[int, str, Image.Image]] = []
    given = 0
    for place, caption in enumerate(found.captions):
        if given + len(ready) >= most:
            break
        try:
            ready.append((place, caption, found.read(place)))
        except BadImage as error:
            if found.strict:
                raise ValueError(f"{error.key} cannot be read: {error.reason}") from None
            bar.say(f"skipped {error}")
        if len(ready) == size:
            yield ready
            given, ready = given + len(ready), []
    if ready:
        yield ready
    elif not given:
        raise ValueError(f"none of the images of {found.source} could be read; run `vitrail check` on the data")


def _files(paths: Sequence[str | Path]) -> Pictures:
    many = [found for path in map(Path, paths) for found in (image_files(path) if path.is_dir() else [path])]
    if not many:
        raise ValueError(f"no images in {', '.join(map(str, paths))}")
    source = str(paths[0]) if len(paths) == 1 else f"{len(many)} files"
    named = not any(Path(path).is_dir() for path in paths)
    return Pictures(
        source, [p.name for p in many], lambda i: decode(many[i], str(many[i])), lambda i, model: None, strict=named
    )


def _split(
    models: Sequence[str | Path | Classifier], data: str | Path | DataSet | None, split: str | None, most: int
) -> Pictures:
    opened = data if isinstance(data, DataSet) else _opened(models[0], data)
    split = split or ("test" if "test" in opened.splits else "val")
    if split not in opened.splits:
        raise ValueError(
            f"{opened.uri} has no split {split!r}; it has {', '.join(opened.splits)}{near(split, opened.splits)}"
        )
    rows = opened[split]
    chosen = by_turns(rows.labels, most)
    kinds = _kinds(rows.labels)
    captions = [opened.classes[kinds[row]] for row in chosen]

    def box(i: int, model: Classifier) -> NDArray[np.float32] | None:
        seen = model.preprocess
        if rows.boxes is None or rows.read(chosen[i]).size != (seen.size, seen.size) or seen.crop_ratio < 1:
            return None
        return np.asarray(rows.boxes[chosen[i]] / seen.size, dtype=np.float32)

    return Pictures(
        f"{split} of {opened.uri}",
        captions,
        lambda i: rows.read(chosen[i]),
        box,
        strict=False,
        labels=None if opened.unlabelled else kinds[chosen],
        levels=None if rows.levels is None else rows.levels[chosen],
        classes=opened.classes,
        level_names=tuple(level.name for level in opened.levels),
    )


def by_turns(labels: NDArray[np.int64], most: int) -> list[int]:
    """Rows of at most so many images: the first of each class, then the second of each, and so on.

    >>> by_turns(np.array([0, 0, 0, 1, 1, 2]), 4)
    [0, 3, 5, 1]
    """
    kinds = _kinds(labels)
    turn = np.zeros(len(kinds), dtype=np.int64)
    for kind in np.unique(kinds):
        where = np.flatnonzero(kinds == kind)
        turn[where] = np.arange(len(where))
    return [int(row) for row in np.lexsort((kinds, turn))[:most]]


def _kinds(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    return labels.argmax(1) if labels.ndim == 2 else labels


def _run_of(model: str | Path | Classifier) -> tuple[Path, RunConfig] | None:
    """The run that a model is of, and its configuration; nothing of a model that stands alone."""
    for folder in [] if isinstance(model, Classifier) else [Path(model), Path(model).parent]:
        if (folder / "config.yaml").is_file():
            return folder, build(RunConfig, {**load_yaml(folder), "out": None})
    return None


def _opened(model: str | Path | Classifier, data: str | Path | None) -> DataSet:
    """Data as the run of a model divided them; none: those it was trained on, or something to look at for a name."""
    run = _run_of(model)
    if data is not None:
        return open_data(data, **({} if run is None else division(run[1].data)))
    if run is None and _in_zoo(model):
        return open_data(FOR_NAMES)
    if run is None:
        raise ValueError("the first model is no run that knows its data; say which images: --data URI or --images PATH")
    own = run[1].data
    with own_data_of(run[0]):
        return open_data(own.uri, level=own.level, **division(own))


def load_any(model: str | Path | Classifier) -> Classifier:
    """A run, a saved model, or an untrained one of the zoo or of timm."""
    if isinstance(model, Classifier):
        return model
    if _in_zoo(model):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return create_model(str(model))  # a name of timm has its own weights' settings, but none of its weights
    return load_model(model)


def _in_zoo(model: str | Path | Classifier) -> bool:
    named = str(model) in ZOO or str(model).startswith("timm:")
    return not isinstance(model, Classifier) and named and not Path(model).exists()


def short_names(models: Sequence[str | Path | Classifier]) -> list[str]:
    """Short names that tell the models apart."""
    plain = [
        str(m.spec.get("name") or "model") if isinstance(m, Classifier) else Path(m).resolve().name for m in models
    ]
    own = [
        Path(m).resolve().parent.name if name == "model" and not isinstance(m, Classifier) else name
        for m, name in zip(models, plain, strict=True)
    ]
    return [name if own.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(own)]


def _refuse_layers(loaded: Sequence[Classifier], layers: Sequence[int]) -> None:
    """One sentence where no model has the layers that are asked for."""
    known = [map_layers(model) for model in loaded]
    for layer in layers:
        if any(known) and not any(layer in some for some in known):
            deepest = max(max(some) for some in known if some)
            raise ValueError(f"--layers: no layer {layer}; layers with attention maps are 0 to {deepest}")
