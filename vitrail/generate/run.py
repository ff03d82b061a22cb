"""Generate training images for classes that are rare or confused, and write a data set of real and generated ones."""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.compare.run import compare_runs
from vitrail.config import RunConfig, load_yaml
from vitrail.data.config import DataConfig, PreprocessConfig
from vitrail.data.dataset import DataSet, Split
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.folder import FileReader
from vitrail.engine.device import choose_device, join
from vitrail.engine.progress import Progress
from vitrail.engine.run_folder import RunFolder
from vitrail.files import reject_unwritable, replacing, write_text
from vitrail.generate.diffusion_model import Diffuser, OwnDiffuser
from vitrail.generate.generation_methods import (
    CANDIDATES,
    METHODS,
    NEEDS_DIFFUSION,
    USUAL_R,
    Tools,
    prompts_for,
    prototypes_of,
)
from vitrail.generate.job import (
    MADE,
    GenerationJob,
    Policy,
    ReadImage,
    image_path,
    make_plan,
    run_job,
    store_plan,
    write_manifest,
)
from vitrail.measure.classification import SingleLabelFigures
from vitrail.measure.evaluator import evaluation_mode
from vitrail.model.classifier import Classifier
from vitrail.model.config import NoiseScheduleName
from vitrail.model.store import model_folder
from vitrail.report.sheets import Pair, contact_sheet
from vitrail.run.evaluate import evaluate, load
from vitrail.run.run_data import own_data_of, read_data
from vitrail.run.train import resume, train
from vitrail.schema import build, near

PIPELINE = "pipeline:"
TABLE = "labels.csv"
SUBSETS = ("shots", "fraction", "long_tail", "label_noise", "limit")
PROTOTYPE_IMAGES = 200  # of each class
SHOWN = 48  # images of the contact sheet


@dataclass(frozen=True)
class Augmented:
    """A data set with generated images."""

    folder: Path
    table: Path  # an ordinary data set: `--data TABLE`
    made: int  # generated images in all
    new: int  # of these, by this call
    counts: Mapping[str, tuple[int, int]]  # class -> real and generated training images

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "data": str(self.table),
            "made": self.made,
            "new": self.new,
            "classes": {name: {"real": real, "made": made} for name, (real, made) in self.counts.items()},
        }


def augment(
    data: str | Path | DataSet,
    out: str | Path,
    *,
    method: str = "genie",
    model: str | Path = "",
    each: int | None = None,
    up_to: int | None = None,
    below: int | None = None,
    only: Sequence[str] = (),
    policy: Policy = "all",
    judge: str | Path | Classifier | None = None,
    top: int = 4,
    r: float = USUAL_R,
    candidates: Sequence[float] = CANDIDATES,
    r_schedule: NoiseScheduleName | None = None,
    names: Mapping[str, str] | None = None,
    superclass: str | None = None,
    real: bool = True,
    seed: int = 0,
    batch: int = 64,
    device: str = "auto",
    quiet: bool = False,
) -> Augmented:
    """Generate images for the training split of `data` and leave a data set of real and generated ones in `out`.

    `method` is one of weak, strong, mixup, cutmix, img2img_low, img2img_high, txt2img, genie, genie_ada. `model`
    generates: a run of small-diffusion, or `pipeline:FOLDER` for one of diffusers. How many, for which classes and from
    which sources: see `vitrail.generate.job.make_plan`; `judge`, a trained classifier, gives the confusion matrix (on
    val, never on test) and the embeddings of genie_ada. `r_schedule="scaled_linear"`: r and candidates are stated on
    Stable Diffusion's schedule, as in papers, and become times with equal noise of the model's own (none: they are such
    times). Interrupted, the same call goes on and leaves the same files. Val and test images are copied as they are
    (`real=False`: nothing real is). Raises one sentence for what cannot be done, before work starts.
    """
    folder, generator = Path(out), str(model)
    _check_job(folder, method, generator, policy, judged=judge is not None)
    dataset = data if isinstance(data, DataSet) else open_data(data)
    classes = dataset.classes
    if dataset.multilabel:
        raise ValueError("images are made for one class each; this data has several labels per image")
    unknown = [name for name in only if name not in classes]
    if unknown:
        raise ValueError(f"no class {unknown[0]!r}{near(unknown[0], classes)} in {dataset.uri}")
    on = choose_device(device)
    split = dataset["train"]
    classifier = _load_judge(judge, classes)
    diffuser, prompts = _load_diffuser(method, generator, classes, names, superclass, on, batch, r_schedule)
    if diffuser is not None and diffuser.classes != classes:
        raise ValueError(
            f"{model} makes images of {', '.join(diffuser.classes[:4])}, ...; the data's classes are "
            f"{', '.join(classes[:4])}, ...: train one on this data"
        )
    confusion = None
    if policy == "confused" and classifier is not None:
        metrics = _metrics(classifier, dataset, device)
        order = [list(metrics.classes).index(name) for name in classes]
        confusion = np.asarray(metrics.confusion, np.int64)[np.ix_(order, order)]
    plan = make_plan(
        split.labels,
        classes,
        each=each,
        up_to=up_to,
        below=below,
        only=[classes.index(name) for name in only] or None,
        policy=policy,
        confusion=confusion,
        top=top,
        seed=seed,
    )
    job = GenerationJob(plan, method, generator or "none", dataset.uri, tuple(classes), prompts, r, seed, r_schedule)
    read = _reader(split, getattr(diffuser, "size", None))
    store_plan(folder, job)
    tools = Tools(diffuser, r=r, candidates=tuple(candidates))
    if method == "genie_ada":
        assert classifier is not None
        tools = _with_embedding(tools, classifier.to(on), split, len(classes), read)
    with Progress("augment", len(plan), quiet=quiet) as progress:
        new = run_job(folder, job, read, split.labels, tools, progress, batch)
    records = write_manifest(folder, len(plan))
    table = write_table(folder, dataset, [record["target"] for record in records], real=real)
    pairs = []
    for n in np.linspace(0, len(records) - 1, min(SHOWN, len(records))).round().astype(int).tolist():
        source, picture = records[n]["source"], np.asarray(Image.open(image_path(folder, n)))
        pairs.append(Pair(None if source is None else read(source), picture, records[n]))
    contact_sheet(folder, pairs, title=f"{method}: {len(records)} images of {dataset.uri}")
    have, more = np.bincount(split.labels, minlength=len(classes)), plan.counts(len(classes))
    counts = {name: (int(have[c]), int(more[c])) for c, name in enumerate(classes)}
    return Augmented(folder, table, len(plan), new, counts)


def _check_job(folder: Path, method: str, model: str, policy: str = "all", *, judged: bool = True) -> None:
    """Problems that are known before data are opened: a method, a classifier, a model or a folder that is not there."""
    if method not in METHODS:
        raise ValueError(f"no method {method!r}{near(method, METHODS)}; there are {', '.join(METHODS)}")
    for needed, what in ((method == "genie_ada", "method genie_ada"), (policy == "confused", "policy confused")):
        if needed and not judged:
            raise ValueError(f"the {what} needs a trained classifier; name one with --judge RUN")
    if method in NEEDS_DIFFUSION and not model:
        raise ValueError(
            f"the method {method} needs a model that makes images: --model RUN of small-diffusion, or "
            "--model pipeline:FOLDER"
        )
    if method in NEEDS_DIFFUSION and not model.startswith(PIPELINE):
        model_folder(model)
    reject_unwritable(folder, "name another OUT")


def write_table(folder: Path, data: DataSet, targets: Sequence[str], *, real: bool = True) -> Path:
    """`labels.csv`: the generated images as training images, and the real ones of all splits."""
    lines = [("path", "label", "split", "generated")]
    for split in data.splits.values() if real else ():
        for row, label in enumerate(split.labels):
            lines.append((_copied(folder, split, row), data.classes[int(label)], split.name, "0"))
    lines += [(f"{MADE}/{n:06d}.png", name, "train", "1") for n, name in enumerate(targets)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    write_text(folder / TABLE, text.getvalue())
    return folder / TABLE


def _copied(folder: Path, split: Split, row: int) -> str:
    """A real image in the folder: a hard link where it is a file of the same disk, else a copy."""
    reader, index = split.reader, int(split.index[row])
    if isinstance(reader, FileReader):
        source = reader.path(index)
        name = f"real/{split.name}/{index:06d}{source.suffix.lower()}"
        target = folder / name
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except OSError:
                with replacing(target) as temporary:
                    shutil.copyfile(source, temporary)
        return name
    name = f"real/{split.name}/{index:06d}.png"
    if not (folder / name).is_file():
        with replacing(folder / name) as temporary:
            split.read(row).save(temporary, "png")
    return name


def _load_judge(judge: str | Path | Classifier | None, classes: Sequence[str]) -> Classifier | None:
    if judge is None:
        return None
    model = judge if isinstance(judge, Classifier) else load(judge)
    missing = [name for name in classes if name not in model.classes]
    if missing:
        raise ValueError(f"--judge was not trained on class {missing[0]}; use a classifier of this data's classes")
    return model


def _metrics(model: Classifier, data: DataSet, device: str) -> SingleLabelFigures:
    """Metrics on val images, or on training images where there are no others."""
    split = "val" if "val" in data.splits and len(data["val"]) else "train"
    metrics = evaluate(model, data, split=split, device=device)[0]
    assert isinstance(metrics, SingleLabelFigures)
    return metrics


def _load_diffuser(
    method: str,
    model: str,
    classes: Sequence[str],
    names: Mapping[str, str] | None,
    superclass: str | None,
    device: torch.device,
    batch: int,
    r_schedule: NoiseScheduleName | None,
) -> tuple[Diffuser | None, tuple[str, ...]]:
    if method not in NEEDS_DIFFUSION:
        if r_schedule is not None:
            raise ValueError(f"the method {method} adds no noise; leave --r_schedule out")
        return None, ()
    if not model.startswith(PIPELINE):
        return OwnDiffuser(model, batch=batch, exact=True, r_schedule=r_schedule, device=device), ()
    if r_schedule is not None:
        raise ValueError("r of a pipeline is a time of its own schedule; leave --r_schedule out")
    from vitrail.generate.pipelines import PipelineDiffuser, load_pipeline

    prompts = prompts_for(classes, superclass=superclass, names=names)
    name, dtype = model.removeprefix(PIPELINE), torch.float16 if device.type == "cuda" else torch.float32
    pipeline = load_pipeline(name, device=device, dtype=dtype)
    return PipelineDiffuser(pipeline, classes, prompts, name=name), prompts


def _reader(split: Split, size: int | None) -> ReadImage:
    """Training images by their row, as bytes [side, side, 3]: at the model's size, or as they are.

    Photographs of many sizes are cropped to a square of their median shorter side.
    """
    if size is None:
        sizes = [split.read(i).size for i in np.linspace(0, len(split) - 1, min(len(split), 32)).astype(int).tolist()]
        size = int(np.median([min(sides) for sides in sizes]))
        if set(sizes) == {(size, size)}:
            return lambda row: np.asarray(split.read(row).convert("RGB"))
    preprocess = Preprocess(PreprocessConfig(size=size, crop_ratio=1.0))
    return lambda row: preprocess(split.read(row)).permute(1, 2, 0).numpy()


def _with_embedding(tools: Tools, model: Classifier, split: Split, classes: int, read: ReadImage) -> Tools:
    """GeNIe-Ada's features: those of the classifier, and each class's prototype from its training images."""
    device, side = next(model.parameters()).device, model.preprocess.size

    @torch.no_grad()
    def embed(images: Tensor) -> Tensor:
        images = images.to(device)
        if images.shape[-1] != side:
            images = torch.nn.functional.interpolate(images.float(), (side, side), mode="bilinear", antialias=True)
            images = images.round().clamp(0, 255).to(torch.uint8)
        with evaluation_mode(model):
            return model.outputs(images).representation.float().cpu()

    rows = [i for c in range(classes) for i in np.flatnonzero(split.labels == c)[:PROTOTYPE_IMAGES].tolist()]
    parts = []
    for first in range(0, len(rows), 256):
        images = np.stack([read(i) for i in rows[first : first + 256]])
        parts.append(embed(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()))
    features, labels = torch.cat(parts), torch.from_numpy(split.labels[rows])
    return replace(tools, embed=embed, prototypes=prototypes_of(lambda _: features, torch.empty(0), labels, classes))


def failure_loop(
    run: str | Path, out: str | Path, *, worst: int = 3, quiet: bool = False, **options: Any
) -> tuple[Augmented, Path, Path]:
    """Generate images for the `worst` classes of a finished run, train it again on all of them, and compare.

    The worst classes are chosen on val. The new run has the old one's settings, seed included, and the generated images
    besides; its epochs are longer by as many. Returns the generated set, the new run, and the folder of the comparison.
    Every step resumes where it was interrupted. `options` are those of `augment`; policy is `confused` unless another
    is named.
    """
    run, folder = Path(run), Path(out)
    if not RunFolder(run).finished:
        model_folder(run)  # says what is wrong with a folder that is no run
        raise ValueError(f"{run} is not a finished run; continue it with: vitrail train --resume {run}")
    config = build(RunConfig, {**load_yaml(run), "out": None})
    _check_job(folder, options.get("method", "genie"), str(options.get("model", "")))
    with own_data_of(run, ""):
        data = read_data(config, join(), quiet)[0]  # as it was trained on: few shots, a long tail and the like
    model = load(run)
    metrics = _metrics(model, data, config.engine.device)
    weakest = [metrics.classes[c] for c in np.argsort(np.asarray(metrics.recall), kind="stable")[: max(1, worst)]]
    settings: dict[str, Any] = {"policy": "confused", "judge": model, "only": weakest, **options}
    augmented = augment(data, folder / "data", quiet=quiet, **settings)
    retrained = folder / "retrained"
    if not (retrained / "config.yaml").is_file():
        whole = DataConfig()  # what was left out of the training images is not in the table
        subset = {name: getattr(whole, name) for name in SUBSETS}
        source = replace(config.data, uri=str(augmented.table), level="", val_fraction=0.0, test_fraction=0.0, **subset)
        train(replace(config, data=source, out=str(retrained)), quiet=quiet)
    elif not RunFolder(retrained).finished:
        resume(retrained, quiet=quiet)
    _, comparison = compare_runs([run, retrained], out=folder / "comparison", quiet=quiet)
    return augmented, retrained, comparison
