"""`vitrail evaluate` and `vitrail predict`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from vitrail.console import fail, output
from vitrail.files import reject_unwritable
from vitrail.measure.config import EpisodeConfig, LongTailConfig
from vitrail.schema import Positional, Unprefixed

HeadName = Literal["class", "distillation", "both"]


@dataclass(frozen=True)
class EvaluateCommand:
    """Compute metrics for a trained model, with the weights that its run kept, on any dataset with the same classes.

    Several data sets, crop ratios or image sizes give one row for each combination: choose among them on --split val.

    A name in place of a run is a model with published weights, on ImageNet: timm:NAME by timm's implementation, a name
    of the zoo (`vitrail list models`) by ours. Class folders are WordNet ids, or 0 to 999 for ImageNet-V2.

    Example: vitrail evaluate runs/demo --data embedded:fashion --crop_ratio 0.8 0.9 1.0
    Example: vitrail evaluate runs/demo --data embedded:fashion --protocol knn,linear,clusters,corruptions
    Example: vitrail evaluate runs/moco --data cifar100.npz --protocol episodes --way 5 --shot 1 --episodes 600
    Example: vitrail evaluate deit_small timm:deit_small_patch16_224 --data imagenet/val --expect --real real.json
    """

    runs: Annotated[tuple[Path, ...], Positional("RUN ...")]
    """run folder or model folder, timm:NAME or a name of the zoo; several with --ensemble, --expect or as names"""
    data: Annotated[tuple[str, ...], "URI ..."] = ()
    """folder, .csv, .parquet, .npz, .tar, hf:OWNER/NAME, torchvision:NAME, embedded:fashion, synthetic:shapes (default:
    what the run was trained on); undivided data are divided as the run divided its own"""
    split: str | None = None  # train, val or test (default: test, or val where there is none)
    crop_ratio: Annotated[tuple[float, ...], "R ..."] = ()
    """side of the centre crop over the shorter side (default: the model's own)"""
    image_size: Annotated[tuple[int, ...], "PX ..."] = ()
    """side of the model's input in pixels (default: the model's own)"""
    batch: int | None = None  # images at a time (none: 256, on a CPU 64)
    workers: int | None = None  # processes that decode
    device: str = "auto"  # auto, cpu, cuda
    json: bool = False  # print one JSON object, or a list of them
    per_class: bool = False  # print every class, too
    head: HeadName | None = None  # which classifier of a distilled model predicts (default: both, fused)
    attack: Annotated[Path | None, "FOLDER"] = None
    """output of `vitrail attack`: accuracy and compute of an adaptive model with its patch, too"""
    protocol: Annotated[tuple[str, ...], "NAME ..."] = ()
    """evaluate by these: knn, linear, linear_published, clusters, few, episodes, purity, retrieval, corruptions,
    cifar_c (files of CIFAR-10-C, ImageNet-C), slices (size, brightness, blur), members, classification,
    long_tail, long_tail_thirds"""
    classes: Annotated[tuple[str, ...], "CLASS ..."] = ()
    """only these can be predicted, and images of others are left out; episodes are drawn from these"""
    calibrate: bool = False  # fit probabilities, prediction sets and rejection again on val, and store them
    outliers: Annotated[str, "URI"] = ""  # with --calibrate: images of no class (default: made of val images)
    ensemble: bool = False  # average the probabilities of several runs, and report the gain over the best of them
    control: Annotated[tuple[Path, ...], "RUN ..."] = ()
    """as many runs that differ in their seed only: the gain of any ensemble"""
    few_shot: Annotated[EpisodeConfig, Unprefixed] = field(default_factory=EpisodeConfig)
    tail: Annotated[LongTailConfig, Unprefixed] = field(default_factory=LongTailConfig)
    base: Path | None = None
    """of an adapter's run: where the weights are that it was trained on (default: where they were)"""
    bits: int | None = None  # of an adapter's run: round its trained parameters to so many bits, 2 to 8
    weights: Annotated[str, "FILE|timm:NAME"] = ""  # of a model by name: weights from a file, or another checkpoint
    expect: bool = False  # compare top-1 with the published one, by Wilson's 95 % interval of the measured one
    real: Annotated[Path | None, "FILE"] = None  # real.json: accuracy on reassessed labels (ReaL), too

    def __call__(self) -> int:
        from vitrail.run.preflight import reject_missing_data
        from vitrail.run.run_data import own_data_of, own_uri

        named = [_is_name(run) for run in self.runs]
        compared = self.expect or self.real is not None or (all(named) and len(named) > 1)
        if not self.runs or (len(self.runs) > 1 and not (self.ensemble or compared)):
            return fail("name one run, or several with --ensemble or --expect (vitrail compare sets runs side by side)")
        if problem := self._conflict(named, compared):
            return fail(problem)
        if compared:
            return self._compare_published()
        data = self.data
        if not data:
            with own_data_of(self.runs[0]):
                data = (own_uri(self.runs[0]),)
                reject_missing_data(data[0])
        if self.calibrate or self.outliers:
            return self._calibrate(data)
        several = len(data) > 1 or self.crop_ratio or self.image_size
        if not (self.protocol or self.classes or self.ensemble or self.control):
            if self.attack is not None and several:
                return fail("--attack is evaluated on one data set, at the model's own crop ratio and image size")
            return self._sweep(data)
        if several or any(flag is not None for flag in (self.attack, self.base, self.bits)):
            return fail(
                "--protocol, --classes and --ensemble are evaluated on one data set, at the model's own crop ratio and "
                "image size, without --attack, --base and --bits"
            )
        names = [name for joined in self.protocol for name in joined.split(",") if name]
        if names and (self.ensemble or (self.classes and names != ["episodes"])):
            return fail(
                "--protocol evaluates one run with all of its classes; leave out --classes (episodes alone take it) "
                "and --ensemble"
            )
        if self.ensemble:
            return self._ensemble(data[0])
        model = _load(self.runs[0], self.head)
        return self._protocols(model, names, data[0]) if self.protocol else self._subset(model, data[0])

    def _calibrate(self, data: Sequence[str]) -> int:
        from vitrail.report.tables import trust_table
        from vitrail.run.evaluate import calibrate

        if len(data) > 1 or len(self.runs) > 1:
            return fail("--calibrate takes one run and one data set, with the run's classes")
        facts = calibrate(self.runs[0], data[0], outliers=self.outliers, batch=self.batch, device=self.device)
        return output(self.json, {"run": str(self.runs[0]), "data": data[0], **facts}, *trust_table(facts))

    def _conflict(self, named: Sequence[bool], compared: bool) -> str:
        """What cannot be asked of models by name, or of a comparison with published accuracy."""
        if self.weights and named != [True]:
            return "--weights are of one model by name (timm:NAME or one of the zoo); a run has its own"
        if (compared or any(named)) and not self.data:
            return "a model with published weights has no data of its own; name some: --data imagenet/val"
        if self.control and not self.ensemble:
            return "--control is what an ensemble is compared with; add --ensemble"
        others = self.protocol or self.classes or self.ensemble or self.control or self.calibrate or self.outliers
        if (compared or any(named)) and (others or any(v is not None for v in (self.attack, self.base, self.bits))):
            return (
                "models by name, --expect and --real go without --protocol, --classes, --ensemble, --control, "
                "--calibrate, --attack, --base and --bits"
            )
        if compared and (self.crop_ratio or self.image_size or self.head):
            return "published accuracy is of a model's own crop ratio, image size and head; leave these flags out"
        return ""

    def _model(self, run: Path) -> Any:
        from vitrail.model.weights import published_classifier

        if not _is_name(run):
            return _load(run, self.head, base=self.base, bits=self.bits)
        model = published_classifier(str(run), self.weights)
        if self.head is not None:
            model.use(self.head)
        return model

    def _compare_published(self) -> int:
        """Accuracy of each model on each data set, next to the published one."""
        from vitrail.model.store import model_folder
        from vitrail.model.weights import checkpoint_of
        from vitrail.report.tables import published_tables
        from vitrail.run.published import compare_published, read_reassessed
        from vitrail.run.run_data import open_for

        real = None if self.real is None else read_reassessed(self.real)
        for run in self.runs:  # rejected before images are read
            checkpoint_of(str(run), self.weights) if _is_name(run) else model_folder(run)
        rows = []
        for run in self.runs:
            model = self._model(run)
            for opened in [open_for(model, uri) for uri in self.data]:  # all are there before the first is read
                rows += compare_published(model, str(run), opened, real, **self._options)
        return output(self.json, [row.to_json() for row in rows], *published_tables(rows))

    @property
    def _options(self) -> dict[str, Any]:
        names = ("split", "batch", "workers", "device")
        return {"quiet": self.json, **{name: getattr(self, name) for name in names}}

    def _sweep(self, data: Sequence[str]) -> int:
        """Every combination of data set, crop ratio and image size; of a single one all metrics."""
        from vitrail.measure.classification import SingleLabelFigures
        from vitrail.measure.evaluator import group_table
        from vitrail.measure.long_tail import long_tail, long_tail_table, training_counts
        from vitrail.report import tables
        from vitrail.report.tables import sweep_table
        from vitrail.run.attack_run import attack_table, evaluate_patch, fitting_patch
        from vitrail.run.evaluate import sweep

        model = self._model(self.runs[0])
        if self.attack is not None:
            fitting_patch(model, self.attack)  # rejected before images are read
        grid: dict[str, Any] = {"crop_ratios": self.crop_ratio, "image_sizes": self.image_size}
        rows = sweep(model, data, **grid, **self._options)
        chosen = {"run": str(self.runs[0]), "head": self.head, "bits": self.bits}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        if len(rows) != 1:
            absent = dict.fromkeys(f"{row.data}: {note}" for row in rows if (note := row.figures.absent_note()))
            return output(self.json, [{**chosen, **row.to_json()} for row in rows], sweep_table(rows), *absent)
        metrics, split = rows[0].figures, rows[0].split
        values: dict[str, Any] = {}
        parts: list[Any] = [tables.headline(metrics, f"{split} of {rows[0].data}")]
        parts += [note] if (note := metrics.absent_note()) else []
        counts = training_counts(model)
        if counts is not None and isinstance(metrics, SingleLabelFigures):
            groups = long_tail(metrics, counts, self.tail)
            values["long_tail"] = groups.to_json()
            parts += [tables.result_table(long_tail_table(values["long_tail"]))] if groups.several else []
        if rows[0].groups:
            parts.append(tables.result_table(group_table(rows[0].groups)))
        if metrics.classes and (self.per_class or len(metrics.classes) <= 20):
            parts.append(tables.per_class(metrics))
        if isinstance(metrics, SingleLabelFigures):
            parts.append(tables.confused(metrics))
        if self.attack is not None:
            attacked = evaluate_patch(model, self.attack, data[0], **{**self._options, "split": split})
            values = {"attack": attacked.to_json(), **values}
            title = f"under attack{'' if attacked.same_victim else ', by a patch learned for another model'}"
            parts.append(attack_table(attacked.rows, attacked.most, title))
        return output(self.json, {**chosen, **rows[0].to_json(), **metrics.to_json(), **values}, *parts)

    def _protocols(self, model: Any, names: Sequence[str], data: str) -> int:
        """The named evaluators."""
        from vitrail.report.tables import protocol_tables
        from vitrail.run.protocols import evaluate_protocols

        settings: dict[str, Any] = {"episodes": self.few_shot, "tail": self.tail, "classes": self.classes}
        findings, split = evaluate_protocols(model, data, names, **settings, **self._options)
        reported = {name: {key: of[key] for key in ("numbers", "tables")} for name, of in findings.items()}
        values = {"run": str(self.runs[0]), "data": data, "split": split, "protocols": reported}
        return output(self.json, values, *protocol_tables(findings, f"{split} of {data}"))

    def _ensemble(self, data: str) -> int:
        """Runs as one model, compared with each of them and with the control."""
        from vitrail.report.tables import ensemble_table
        from vitrail.run.protocols import ensemble

        if self.head is not None:
            return fail("--ensemble takes every run as it predicts; leave out --head")
        if len(self.runs) < 2:
            return fail("an ensemble needs at least two runs: vitrail evaluate RUN RUN --ensemble --data URI")
        evaluated = ensemble(self.runs, data, control=self.control, classes=self.classes, **self._options)
        parts = [ensemble_table(evaluated.runs, f"{evaluated.split} of {evaluated.data}")]
        if evaluated.control is not None:
            parts.append(ensemble_table(evaluated.control, "control: seeds of one model"))
        return output(self.json, evaluated.to_json(), *parts)

    def _subset(self, model: Any, data: str) -> int:
        """Metrics where only these classes can be predicted, on the images that have one of them."""
        from vitrail.measure.evaluator import metrics_of, only_classes
        from vitrail.report import tables
        from vitrail.run.evaluate import evaluate

        model.reject_other("--classes")
        _, predictions, split = evaluate(model, data, every_logit=True, **self._options)
        kept = only_classes(predictions, model.classes, self.classes)
        metrics, total = metrics_of(kept, self.classes), len(predictions)
        conditions = {"run": str(self.runs[0]), "data": data, "split": split, "left_out": total - len(kept)}
        images = f"{len(kept):,} of {total:,} images, {len(self.classes)} classes"
        parts: list[Any] = [tables.headline(metrics, f"{split} of {data}: {images}")]
        parts += [note] if (note := metrics.absent_note()) else []
        if self.per_class or len(self.classes) <= 20:
            parts.append(tables.per_class(metrics))
        return output(self.json, {**conditions, **metrics.to_json()}, *parts)


@dataclass(frozen=True)
class PredictCommand:
    """Predictions of a trained model for images; folders are searched for images. A text model takes sentences, a
    language model prompts, which it completes.

    Probabilities are calibrated where the run had val images to do it on, and so are sets of classes (--coverage) and
    the limit below which an image is none of them (--keep).

    Example: vitrail predict runs/demo cat.jpg photos/ --json
    Example: vitrail predict runs/demo photos/ --coverage 0.95 --keep 0.95 --csv predictions.csv
    Example: vitrail predict runs/demo query.jpg --neighbours 10 --index photos/
    Example: vitrail predict runs/cola "They drank the pub dry."
    """

    run: Annotated[Path, Positional("RUN")]  # run folder or model folder
    images: Annotated[tuple[Path, ...], Positional("IMAGE|TEXT ...")]
    """image files or folders; or sentences, the two of a pair with a tab between them, as are an instruction and its
    input"""
    top: int = 3  # how many classes to name
    coverage: float | None = None  # a set of classes that holds the right one with this probability
    sets: Literal["lac", "aps", "raps"] = "lac"  # kind of set: the smallest, or larger ones for difficult images
    keep: float | None = None  # call images unknown that score below this share of images of known classes
    neighbours: int = 0  # show so many of the most similar images of --index
    index: Annotated[str, "URI"] = ""  # images to search (default: what the run was trained on)
    csv: Path | None = None  # write a table: path, label, probability, set, unknown
    device: str = "auto"  # auto, cpu, cuda
    json: bool = False  # print one JSON object per line
    head: HeadName | None = None  # which classifier of a distilled model predicts (default: both, fused)
    base: Path | None = None
    """of an adapter's run: where the weights are that it was trained on (default: where they were)"""

    def __call__(self) -> int:
        from vitrail.data.sources.folder import list_images
        from vitrail.engine.device import choose_device
        from vitrail.model.parts.modules import placed

        if not self.images:
            return fail("name at least one image or folder")
        if not any(path.exists() for path in self.images) and _reads_texts(self.run):
            return self._texts([str(path) for path in self.images])
        paths: list[Path] = []
        for path in self.images:
            files, notes = list_images(path) if path.is_dir() else ([path], [])
            paths += files
            for note in notes:
                print(f"{path}: {note}", file=sys.stderr)
        if not paths:
            return fail(f"no images in {', '.join(map(str, self.images))}")
        if self.top < 1 or self.neighbours < 0:
            return fail("--top is at least 1, and --neighbours at least 0")
        if self.csv is not None:
            reject_unwritable(self.csv, "name another --csv", file=True)
        device = choose_device(self.device)
        model = placed(_load(self.run, self.head, base=self.base), device)
        return self._answers(model, paths)

    def _answers(self, model: Any, paths: Sequence[Path]) -> int:
        from vitrail.data.sources.table import write_csv
        from vitrail.measure.trust import Trust
        from vitrail.model.store import model_folder
        from vitrail.run.predict import csv_rows, image_index, predict
        from vitrail.run.run_data import own_uri

        trust = index = None
        if self.coverage is not None or self.keep is not None:
            model.reject_other("--coverage and --keep")
            if self.head not in (None, "both"):
                return fail("--coverage and --keep were fitted for both classifiers fused; leave out --head")
            trust = Trust.read(model_folder(self.run))
        if self.neighbours or self.index:
            index = image_index(model, self.run, self.index or own_uri(self.run), quiet=self.json)
        asked: dict[str, Any] = {"coverage": self.coverage, "sets": self.sets, "keep": self.keep, "index": index}
        asked["neighbours"] = self.neighbours or 10
        answers = []
        for answer in predict(model, paths, top=self.top, trust=trust, **asked):
            output(self.json, answer.to_json(), f"{answer.path}  {answer.text()}")
            answers.append(answer)
        if self.csv is not None:
            write_csv(self.csv, csv_rows(answers))
        return 1 if any(answer.prediction.error for answer in answers) else 0

    def _print(self, of: dict[str, str], prediction: Any) -> None:
        text = "  ".join(f"{label} {100 * p:.1f} %" for label, p in prediction.top)
        output(self.json, {**of, **prediction.to_json()}, f"{next(iter(of.values()))}  {text}")

    def _texts(self, texts: list[str]) -> int:
        from vitrail.data.sources.text import Text, prompt_of
        from vitrail.engine.device import choose_device
        from vitrail.model.heads.head import writes_texts
        from vitrail.model.heads.next_token import complete
        from vitrail.model.text_build import predict_texts

        model = _load(self.run, None, device=choose_device(self.device), base=self.base)
        if not writes_texts(model):
            pairs = [Text(*text.split("\t", 1)) for text in texts]
            for text, prediction in zip(texts, predict_texts(model, pairs, top=self.top), strict=True):
                self._print({"text": text}, prediction)
            return 0
        prompts = [prompt_of(str(model.stated.get("template", "")), *text.split("\t", 1)) for text in texts]
        for text, completion in zip(texts, complete(model, prompts), strict=True):
            shown = f"{text}\n  {completion}" if len(texts) > 1 else completion
            output(self.json, {"prompt": text, "completion": completion}, shown)
        return 0


def _is_name(run: Path) -> bool:
    """Whether this is the name of a model with published weights, and no folder."""
    from vitrail.model.zoo import ZOO

    return (str(run).startswith("timm:") or str(run) in ZOO) and not run.exists()


def _load(run: Path, head: HeadName | None, **options: Any) -> Any:
    """The model of a run, with the classifier that is to predict; `options` as for `load`."""
    from vitrail.run.evaluate import load

    model = load(run, **options)
    if head is not None:
        model.use(head)
    return model


def _reads_texts(run: Path) -> bool:
    from vitrail.model.store import model_folder, read_description

    try:
        return bool(read_description(model_folder(run))["spec"]["trunk"]["kind"] == "text")
    except FileNotFoundError:  # loading the model reports it, with what to do
        return False
