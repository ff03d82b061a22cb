"""`vitrail evaluate` and `vitrail predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitrail.cli.say import fail, print_json, show
from vitrail.measure.config import EpisodeConfig, LongTailConfig


def evaluate(
    runs: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN ...")]],
    /,
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="URI ...")] = (),
    split: str | None = None,
    crop_ratio: Annotated[tuple[float, ...], tyro.conf.arg(metavar="R ...")] = (),
    image_size: Annotated[tuple[int, ...], tyro.conf.arg(metavar="PX ...")] = (),
    batch: int = 256,
    workers: int | None = None,
    device: str = "auto",
    json: bool = False,
    per_class: bool = False,
    head: Literal["class", "distillation", "both"] | None = None,
    attack: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    protocol: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = (),
    classes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="CLASS ...")] = (),
    ensemble: bool = False,
    control: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN ...")] = (),
    few_shot: tyro.conf.OmitArgPrefixes[EpisodeConfig] = EpisodeConfig(),  # noqa: B008
    tail: tyro.conf.OmitArgPrefixes[LongTailConfig] = LongTailConfig(),  # noqa: B008
    base: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
    bits: int | None = None,
) -> int:
    """Figures of a trained model, as its last weights are, on any data with its classes.

    Several data sets, crop ratios or image sizes give one row for each combination: choose among them on --split val.

    Example: vitrail evaluate runs/demo --data embedded:fashion --crop_ratio 0.8 0.9 1.0
    Example: vitrail evaluate runs/demo --data embedded:fashion --protocol knn,linear,clusters,corruptions
    Example: vitrail evaluate runs/moco --data cifar100.npz --protocol episodes --way 5 --shot 1 --episodes 600

    Args:
        runs: run folder or model folder; several with --ensemble
        data: folder, .csv, .parquet, .npz, .tar, hf:OWNER/NAME, torchvision:NAME, embedded:fashion, synthetic:shapes
            (default: what the run was trained on); undivided data are divided as the run divided its own
        split: train, val or test (default: test, or val where there is none)
        crop_ratio: side of the centre crop over the shorter side (default: the model's own)
        image_size: side of the model's input in pixels (default: the model's own)
        batch: images at a time
        workers: processes that decode
        device: auto, cpu, cuda
        json: print one JSON object, or a list of them
        per_class: print every class, too
        head: which classifier of a distilled model predicts (default: both, fused)
        attack: what `vitrail attack` left: accuracy and compute of an adaptive model with its patch, too
        protocol: knn, linear, linear_published, clusters, few, episodes, purity, retrieval, corruptions, members,
            classification, long_tail, long_tail_thirds: judge by these
        classes: only these can be chosen, and images of others are left out; episodes are drawn from these
        ensemble: average the probabilities of several runs, and tell what that gains over the best of them
        control: as many runs that differ in their seed only: what an ensemble gains by itself
        base: of an adapter's run: where the weights are that it was trained on (default: where they were)
        bits: of an adapter's run: round what it trained to so many bits, 2 to 8
    """
    from vitrail.measure.classification import SingleLabelFigures
    from vitrail.measure.long_tail import long_tail, long_tail_table, training_counts
    from vitrail.report import tables
    from vitrail.report.tables import sweep_table
    from vitrail.run.evaluate import sweep
    from vitrail.run.preflight import refuse_missing_data
    from vitrail.run.run_data import own_data_of, own_uri

    if not runs or (len(runs) > 1 and not ensemble):
        return fail("name one run, or several with --ensemble (vitrail compare sets runs side by side)")
    run = runs[0]
    if not data:
        with own_data_of(run):
            data = (own_uri(run),)
            refuse_missing_data(data[0])
    if protocol or classes or ensemble or control:
        from vitrail.cli.protocols import judge_otherwise

        if attack is not None or len(data) > 1 or crop_ratio or image_size or base is not None or bits is not None:
            return fail(
                "--protocol, --classes and --ensemble are judged on one data set, at the model's own crop ratio and "
                "image size, without --attack, --base and --bits"
            )
        how: dict[str, Any] = {"split": split, "batch": batch, "workers": workers, "device": device, "quiet": json}
        return judge_otherwise(
            runs,
            data[0],
            how,
            protocol,
            classes,
            ensemble,
            control,
            head=head,
            json=json,
            per_class=per_class,
            few_shot=few_shot,
            tail=tail,
        )
    if attack is not None and (len(data) > 1 or crop_ratio or image_size):
        return fail("--attack is judged on one data set, at the model's own crop ratio and image size")

    model = _model(run, head, base=base, bits=bits)
    if attack is not None:
        from vitrail.run.attack_run import fitting_patch, judge_patch

        fitting_patch(model, attack)  # said before images are read
    made = sweep(
        model,
        data,
        crop_ratios=crop_ratio,
        image_sizes=image_size,
        split=split,
        batch=batch,
        workers=workers,
        device=device,
        quiet=json,
    )
    chosen = {"run": str(run), **({} if head is None else {"head": head}), **({} if bits is None else {"bits": bits})}
    if len(made) != 1:
        if json:
            print_json([{**chosen, **one.to_json()} for one in made])
        else:
            show(sweep_table(made))
        return 0
    figures = made[0].figures
    counts = training_counts(model)
    groups = None if counts is None or not isinstance(figures, SingleLabelFigures) else long_tail(figures, counts, tail)
    attacked = None
    if attack is not None:
        options: dict[str, Any] = {"batch": batch, "workers": workers, "device": device, "quiet": json}
        attacked = judge_patch(model, attack, data[0], split=made[0].split, **options)
    if json:
        more = {} if attacked is None else {"attack": attacked.to_json()}
        if groups is not None:
            more["long_tail"] = groups.to_json()
        print_json({**chosen, **made[0].to_json(), **figures.to_json(), **more})
        return 0
    show(tables.headline(figures, f"{made[0].split} of {made[0].data}"))
    if groups is not None and groups.several:
        show(tables.result_table(long_tail_table(groups.to_json())))
    if figures.classes and (per_class or len(figures.classes) <= 20):
        show(tables.per_class(figures))
    if isinstance(figures, SingleLabelFigures):
        show(tables.confused(figures))
    if attacked is not None:
        from vitrail.run.attack_run import attack_table

        title = f"under attack{'' if attacked.same_victim else ', by a patch made for another model'}"
        show(attack_table(attacked.rows, attacked.most, title))
    return 0


def predict(
    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]],
    images: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="IMAGE|TEXT ...")]],
    /,
    top: int = 3,
    device: str = "auto",
    json: bool = False,
    head: Literal["class", "distillation", "both"] | None = None,
    base: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
) -> int:
    """What a trained model says of some images; folders are searched for images. A text model takes sentences, a
    language model prompts, which it completes.

    Example: vitrail predict runs/demo cat.jpg photos/ --json
    Example: vitrail predict runs/cola "They drank the pub dry."

    Args:
        run: run folder or model folder
        images: image files or folders; or sentences, the two of a pair with a tab between them, as are an instruction
            and its input
        top: how many classes to name
        device: auto, cpu, cuda
        json: print one JSON object a line
        head: which classifier of a distilled model predicts (default: both, fused)
        base: of an adapter's run: where the weights are that it was trained on (default: where they were)
    """
    from vitrail.data.sources.folder import image_files
    from vitrail.engine.device import choose_device

    if not images:
        return fail("name at least one image or folder")
    if not any(path.exists() for path in images) and _reads_texts(run):
        return _predict_texts(run, [str(path) for path in images], top, device, json, base)
    paths = [found for path in images for found in (image_files(path) if path.is_dir() else [path])]
    if not paths:
        return fail(f"no images in {', '.join(map(str, images))}")
    model = _model(run, head, device=choose_device(device), base=base)
    bad = 0
    for start in range(0, len(paths), 256):
        chunk = paths[start : start + 256]
        for path, said in zip(chunk, model.predict(chunk, top=top, errors="return"), strict=True):
            bad += said.error is not None
            if json:
                print_json({"path": str(path), **said.to_json()})
            elif said.error is not None:
                print(f"{path}  cannot be read: {said.error}")
            else:
                print(f"{path}  " + "  ".join(f"{name} {p:.1%}" for name, p in said.top))
    return 1 if bad else 0


def _model(run: Path, head: Literal["class", "distillation", "both"] | None, **options: Any) -> Any:
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
    except FileNotFoundError:  # said, with what to do, when the model is loaded
        return False


def _predict_texts(run: Path, texts: list[str], top: int, device: str, json: bool, base: Path | None) -> int:
    import vitrail as api
    from vitrail.data.sources.completions import prompt_of
    from vitrail.data.sources.text_files import Text
    from vitrail.engine.device import choose_device
    from vitrail.model.decoding import complete
    from vitrail.model.heads.next_token import writes_texts
    from vitrail.model.text_build import predict_texts

    model = api.load(run, choose_device(device), base=base)
    if writes_texts(model):
        prompts = [prompt_of(str(model.stated.get("template", "")), *text.split("\t", 1)) for text in texts]
        for text, written in zip(texts, complete(model, prompts), strict=True):
            if json:
                print_json({"prompt": text, "completion": written})
            else:
                print(f"{text}\n  {written}" if len(texts) > 1 else written)
        return 0
    found = predict_texts(model, [Text(*text.split("\t", 1)) for text in texts], top=top)
    for text, said in zip(texts, found, strict=True):
        if json:
            print_json({"text": text, **said.to_json()})
        else:
            print(f"{text}  " + "  ".join(f"{name} {p:.1%}" for name, p in said.top))
    return 0
