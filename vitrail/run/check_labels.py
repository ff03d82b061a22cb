"""Label errors of a data set by embeddings of a model, or by trainings of our own (`vitrail check --model`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vitrail.config import RunConfig, dump, from_mapping, load_yaml
from vitrail.data.check.check import TRUST, CheckReport, Finding, Level
from vitrail.data.check.contact_sheet import Suspect
from vitrail.data.check.scan import cache_file
from vitrail.data.dataset import DataSet
from vitrail.engine.device import choose_device, choose_precision, join
from vitrail.engine.loop import Stopped
from vitrail.engine.progress import Progress, duration
from vitrail.measure.evaluator import Where, batches
from vitrail.measure.label_errors import Blocks, inseparable, out_of_fold, outliers, suspects
from vitrail.measure.retrieval import embed_all
from vitrail.model.classifier import Classifier
from vitrail.model.parts.modules import placed
from vitrail.recipes import RECIPES, recipe, with_values
from vitrail.run.data_module import evaluation_batches, reads_texts, reject_other_kind
from vitrail.run.evaluate import load
from vitrail.run.run_data import fingerprint, open_run
from vitrail.run.train import train

RECIPE, FOLDS = "small-moco", 5
MEMORISED = "the model learned these labels, wrong ones too, so its embeddings find fewer errors than --model auto"


def check_labels(
    data: DataSet, report: CheckReport, model: str, epochs: int = 20, device: str = "auto", quiet: bool = True
) -> CheckReport:
    """The report with label errors, outliers and classes hard to tell apart, by embeddings of all splits together.

    `model` is a run or model folder; or `auto`: a network is then trained on these images without labels; or a recipe
    or YAML file of settings: a model is then trained five times with labels, each time without a fifth of the images,
    of which it gives the probabilities. Trainings have `epochs` epochs and stay in the user's cache. Raises
    `ValueError` where images have no labels.
    """
    if data.unlabelled or data.numeric:
        raise ValueError(f"{data.uri} has no labels to check; leave out --model")
    if any(finding.check == "label range" for finding in report.findings):
        return report  # labels of no class: to be fixed first
    place, fitted = choose_device(device), Path(model).is_file() or (model in RECIPES and not Path(model).exists())
    runs = cross_fitted(data, model, epochs, device, quiet) if fitted else []
    network = _self_supervised(data, epochs, device, quiet) if model == "auto" else load(runs[0] if runs else model)
    network = placed(network, place)
    reject_other_kind(reads_texts(network), data)
    images, pieces = [], []
    with Progress("embeddings", sum(map(len, data.splits.values())), quiet=quiet) as bar:
        where: Where = {"device": place, "autocast": choose_precision("auto", place), "progress": bar.advance}
        for split in data.splits.values():
            how = network.preprocess
            with evaluation_batches(network, split, how, batch=None, device=place, workers=None) as loader:
                pieces.append(embed_all(network, loader, **where).rows)
            lost = {key for key, _ in loader.skipped}
            images += [Suspect(split.name, row, "") for row, key in enumerate(split.keys) if key not in lost]
    embeddings, labels = (torch.cat(column) for column in zip(*pieces, strict=True))
    if runs:
        places = {(image.split, int(data[image.split].index[image.row])): n for n, image in enumerate(images)}
        blocks = held_out(data, runs, places, place)
    else:
        blocks = out_of_fold(embeddings, labels.long(), min(FOLDS, len(labels)))
    result = suspects(blocks, labels.long())
    wrong = [
        Suspect(images[i].split, images[i].row, "probably mislabelled", data.label_text(other), float(result.scores[i]))
        for i, other in zip(result.images.tolist(), result.proposed.cpu().numpy(), strict=True)
    ]
    far = [replace(images[i], reason="unlike all others") for i in outliers(embeddings).tolist()]
    pairs = [] if data.multilabel else inseparable(result.joint)
    names = tuple(f"{data.classes[a]} and {data.classes[b]} ({100 * share:.0f} %)" for a, b, share in pairs[:10])
    text = (
        f"labels that classifiers of other images contradict; they agree with {100 * result.agreement:.0f} % of all "
        f"labels and expect about {result.expected:.0f} to be wrong"
    )
    level: Level = "warning" if result.agreement >= TRUST else "note"
    findings = (
        Finding("probably mislabelled", level, len(wrong), text, _examples(data, wrong)),
        Finding("unlike all others", "note", len(far), "images far from all others", _examples(data, far)),
        Finding("classes hard to tell apart", "note", len(pairs), "pairs that are mixed up both ways", names),
        Finding("memorised labels", "note", int(not runs and _memorised(network, data)), MEMORISED),
    )
    added = tuple(finding for finding in findings if finding.count)
    return replace(report, findings=report.findings + added, suspects=(*wrong, *report.suspects, *far))


def _examples(data: DataSet, suspects: list[Suspect]) -> tuple[str, ...]:
    named = [(s, data[s.split].keys[s.row], data.label_text(data[s.split].labels[s.row])) for s in suspects[:10]]
    return tuple(f"{s.split}: {key} ({label}{s.proposed and f', probably {s.proposed}'})" for s, key, label in named)


def _memorised(model: Classifier, data: DataSet) -> bool:
    """Whether a model learned from the labels of these data; earlier versions stated the recipe only."""
    name = model.stated.get("recipe", "")
    by_recipe = name not in RECIPES or recipe(name).objective.needs_labels()
    same = Path(str(model.stated.get("data"))).resolve() == Path(data.uri).resolve()
    return same and bool(model.stated.get("needs_labels", by_recipe))


def _self_supervised(data: DataSet, epochs: int, device: str, quiet: bool) -> Classifier:
    """A network trained on these images without their labels, or read from the cache."""
    count = len(data["train"])
    batch = min(256, max(2, count // 4))
    changes = {"optim.epochs": epochs, "optim.warmup": min(1, epochs // 2), "data.batch": batch}
    title = f"training embeddings of {count} images without labels: {RECIPE}, {epochs} epochs"
    return load(_trained(data, with_values(recipe(RECIPE), changes), f"{epochs}", title, device, quiet))


def cross_fitted(data: DataSet, settings: str, epochs: int, device: str, quiet: bool) -> list[Path]:
    """Runs of a recipe or a YAML file, each on all folds of train and val but one; finished ones are in the cache."""
    config = recipe(settings) if settings in RECIPES else from_mapping({**load_yaml(settings), "out": None})
    if not config.objective.needs_labels():
        raise ValueError(
            f"--model {settings} learns without labels, so it gives no probabilities of classes; name auto"
        )
    batch = min(config.data.batch, max(2, len(data["train"]) // 4))
    changes = {"optim.epochs": epochs, "optim.warmup": min(config.optim.warmup, epochs // 5), "data.batch": batch}
    runs = []
    for number in range(1, FOLDS + 1):
        fold = with_values(config, {**changes, "data.fold": f"{number}/{FOLDS}"})
        title = f"training {number} of {FOLDS}, without a fifth of the images: {settings}, {epochs} epochs"
        name = f"{dump(fold)} {data['val'].labels.tolist() if 'val' in data.splits else ''}"
        runs.append(_trained(data, fold, name, title, device, quiet))
    return runs


def held_out(data: DataSet, runs: list[Path], places: dict[tuple[str, int], int], device: torch.device) -> Blocks:
    """Probabilities of every image by the run that has not seen it, of test images by the first run.

    `places` are the rows of the blocks, by split and index of an image.
    """

    def blocks() -> Iterator[tuple[Tensor, Tensor]]:
        where: Where = {"device": device, "autocast": choose_precision("auto", device)}
        for path in runs:
            network = placed(load(path), device)
            held = set(open_run(from_mapping(load_yaml(path)).data)["val"].keys)
            for split in data.splits.values():
                first = split.name == "test" and path == runs[0]
                part = split.take([row for row, key in enumerate(split.keys) if first or key in held])
                how = network.preprocess
                with evaluation_batches(network, part, how, batch=None, device=device, workers=None) as loader:
                    for batch, images in batches(network, loader, **where):
                        rows = torch.tensor([places[split.name, i] for i in batch.index.tolist()], device=device)
                        yield rows, network.probabilities(network(images).float())

    return blocks


def _trained(data: DataSet, config: RunConfig, name: str, title: str, device: str, quiet: bool) -> Path:
    """The folder of a finished run on these data in the cache, which is resumed where it was stopped."""
    file = cache_file(f"{data.uri} {fingerprint(data)} {name}")
    out = file.with_name(file.name.replace("scan-", "embeddings-").removesuffix(".json.gz"))
    if not (out / "model" / "model.json").is_file():
        say, began = join().say, time.monotonic()
        say(quiet, f"{title}, kept in {out}")
        changes = {"data.uri": data.uri, "evaluators": (), "out": str(out), "engine.device": device, "calibrate": False}
        try:
            train(with_values(config, {**changes, "data.check": "off"}), quiet=quiet, continued=True)
        except Stopped:
            raise KeyboardInterrupt("stopped; the same command goes on where it was") from None
        say(quiet, f"trained in {duration(time.monotonic() - began)}")
    return out
