"""Label errors of a data set by embeddings of a model (`vitrail check --model`)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from vitrail.data.check.check import TRUST, CheckReport, Finding, Level
from vitrail.data.check.contact_sheet import Suspect
from vitrail.data.check.scan import cache_file
from vitrail.data.dataset import DataSet
from vitrail.engine.device import choose_device, choose_precision, join
from vitrail.engine.loop import Stopped
from vitrail.engine.progress import Progress, duration
from vitrail.measure.evaluator import Where
from vitrail.measure.label_errors import inseparable, out_of_fold, outliers, suspects
from vitrail.measure.retrieval import embed_all
from vitrail.model.classifier import Classifier
from vitrail.recipes import RECIPES, recipe, with_values
from vitrail.run.data_module import evaluation_batches, reads_texts, reject_other_kind
from vitrail.run.evaluate import load
from vitrail.run.run_data import fingerprint
from vitrail.run.train import train

RECIPE, FOLDS = "small-moco", 5
MEMORISED = "the model learned these labels, wrong ones too, so its embeddings find fewer errors than --model auto"


def check_labels(
    data: DataSet, report: CheckReport, model: str, epochs: int = 20, device: str = "auto", quiet: bool = True
) -> CheckReport:
    """The report with label errors, outliers and classes hard to tell apart, by embeddings of all splits together.

    `model` is a run or model folder, or `auto`: a network is then trained on these images without labels, for `epochs`
    epochs, and kept in the user's cache. Raises `ValueError` where images have no labels.
    """
    if data.unlabelled:
        raise ValueError(f"{data.uri} has no labels to check; leave out --model")
    if any(finding.check == "label range" for finding in report.findings):
        return report  # labels of no class: to be fixed first
    place = choose_device(device)
    network = (_self_supervised(data, epochs, device, quiet) if model == "auto" else load(model)).to(place)
    reject_other_kind(reads_texts(network), data)
    images, pieces = [], []
    with Progress("embeddings", sum(map(len, data.splits.values())), quiet=quiet) as bar:
        where: Where = {"device": place, "autocast": choose_precision("auto", place), "progress": bar.advance}
        for split in data.splits.values():
            how = network.preprocess
            with evaluation_batches(network, split, how, batch=256, device=place, workers=None) as loader:
                pieces.append(embed_all(network, loader, **where).rows)
            lost = {key for key, _ in loader.skipped}
            images += [Suspect(split.name, row, "") for row, key in enumerate(split.keys) if key not in lost]
    embeddings, labels = (torch.cat(column) for column in zip(*pieces, strict=True))
    result = suspects(out_of_fold(embeddings, labels.long(), min(FOLDS, len(labels))), labels.long())
    wrong = [
        Suspect(images[i].split, images[i].row, "probably mislabelled", data.label_text(other), float(result.scores[i]))
        for i, other in zip(result.images.tolist(), result.proposed.cpu().numpy(), strict=True)
    ]
    far = [replace(images[i], reason="unlike all others") for i in outliers(embeddings).tolist()]
    pairs = [] if data.multilabel else inseparable(result.joint)
    names = tuple(f"{data.classes[a]} and {data.classes[b]} ({share:.0%})" for a, b, share in pairs[:10])
    text = (
        f"labels that classifiers of other images contradict; they agree with {result.agreement:.0%} of all labels and "
        f"expect about {result.expected:.0f} to be wrong"
    )
    level: Level = "warning" if result.agreement >= TRUST else "note"
    findings = (
        Finding("probably mislabelled", level, len(wrong), text, _examples(data, wrong)),
        Finding("unlike all others", "note", len(far), "images far from all others", _examples(data, far)),
        Finding("classes hard to tell apart", "note", len(pairs), "pairs that are mixed up both ways", names),
        Finding("memorised labels", "note", int(_memorised(network, data)), MEMORISED),
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
    file = cache_file(f"{data.uri} {fingerprint(data)} {epochs}")
    out = file.with_name(file.name.replace("scan-", "embeddings-").removesuffix(".json.gz"))
    if not (out / "model" / "model.json").is_file():
        count, say, began = len(data["train"]), join().say, time.monotonic()
        say(quiet, f"training embeddings of {count} images without labels: {RECIPE}, {epochs} epochs, kept in {out}")
        changes = {"data.uri": data.uri, "data.batch": min(256, max(2, count // 4)), "evaluators": (), "out": str(out)}
        changes |= {"optim.epochs": epochs, "optim.warmup": min(1, epochs // 2), "engine.device": device}
        try:
            train(with_values(recipe(RECIPE), {**changes, "data.check": "off"}), quiet=quiet, continued=True)
        except Stopped:  # the same command resumes it
            raise KeyboardInterrupt from None
        say(quiet, f"trained in {duration(time.monotonic() - began)}")
    return load(out)
