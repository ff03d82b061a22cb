"""How studies of rows are cut into processes, and which rows each of them waits for; studies/all.py runs them.

A small model leaves most of an accelerator idle, so a study takes a third of the time in a dozen processes (with steps
that are one graph each: in four). What several of them need (a teacher, a chosen learning rate) is made by one, and the
others begin when its row is there; within a study what the longest chain stands on comes first. Parts that time
something are not here: they are run alone. Rows and models belong together: a folder of rows whose models are gone has
every process train them again for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Row = tuple[str, str, str, int]  # table, subject, what, seed
CIFAR100, CIFAR10, IMAGENETTE = "cifar100.npz", "cifar10.npz", "imagenette.npz"
SEEDS = range(3)


@dataclass(frozen=True)
class Process:
    """One call of a study's script."""

    study: str  # the folder of its rows
    name: str
    script: str
    words: tuple[str, ...]
    data: tuple[str, ...]  # files and folders that must be there
    waits: tuple[Row, ...] = ()  # rows of the study that others make
    # Served before others: many wait for it, or its kernels are so small that each would wait behind large ones.
    first: bool = False


def adaptive() -> list[Process]:
    def process(name: str, words: str, *waits: Row) -> Process:
        said = (CIFAR100, *words.split())
        return Process("adaptive", name, "adaptive.py", said, (CIFAR100,), waits)

    def base(seed: int) -> Row:
        return "base", "vit", "plain", seed

    made = [process(f"base {s}", f"--part base --only {s}") for s in SEEDS]
    later = []
    for s in SEEDS:
        for kind in ("avit", "ats", "adavit"):
            # The weight of A-ViT's ponder loss is chosen with seed 0; one batch of images is taken with its base.
            first: tuple[Row, ...] = (("victims", "avit", "plain", 0),) if kind == "avit" and s else ()
            own: Row = ("victims", kind, "plain", s)
            made.append(
                process(f"victim {kind} {s}", f"--part victims --of {kind} --only {s}", base(s), base(0), *first)
            )
            made.append(process(f"attacks {kind} {s}", f"--part attacks --of {kind} --only {s}", own))
            later.append(process(f"variations {kind} {s}", f"--part variations --of {kind} --only {s}", own))
        slow = [("attacks", kind, "slowformer", s) for kind in ("ats", "avit", "adavit")]
        made += [
            process(f"defence {kind} {s}", f"--part defence --of {kind} --only {s}", slow[1])
            for kind in ("defended", "control")
        ]
        made.append(process(f"transfer {s}", f"--part transfer --only {s}", *slow))
        made.append(process(f"ats {s}", f"--part ats --only {s}", ("victims", "ats", "plain", s), base(0)))
    return made + later


def attention_transfer() -> list[Process]:
    def process(name: str, words: str, *waits: Row, first: bool = False) -> Process:
        said = (CIFAR100, "--other", CIFAR10, *words.split())
        return Process("attention-transfer", name, "attention_transfer.py", said, (CIFAR100, CIFAR10), waits, first)

    def trained(teacher: str) -> Row:
        return "training", teacher, "whole", 0

    def tuned(seed: int) -> Row:
        return "main", "fine-tune", "pre-trained", seed

    def taught(seed: int, *more: tuple[str, str]) -> list[Row]:
        plain = [("scratch", "no teacher"), *((way, "pre-trained") for way in ("fine-tune", "copy", "distill"))]
        return [("main", subject, what, seed) for subject, what in (*plain, *more)]

    def whole(seed: int) -> list[Row]:
        return taught(seed, *((way, what) for way in ("copy", "distill") for what in ("fine-tuned", "random")))

    mae, families = trained("mae"), ("scratch", "tune", "copy", "distill")
    made = [process("mae", "--part teachers --of mae", first=True)]
    for of in families:  # which choose all learning rates
        waits = () if of == "scratch" else (mae,)
        made.append(process(f"main {of} 0", f"--part main --of {of} --only 0", *waits, first=True))
    made += [process(name, f"--part teachers --of {name}") for name in ("mae-other", "mae-shapes")]
    chosen = taught(0)
    for s in SEEDS[1:]:
        made += [process(f"main {of} {s}", f"--part main --of {of} --only {s}", *chosen) for of in families]
    others = " ".join(f"{way}-{teacher}" for way in ("copy", "distill") for teacher in ("tuned", "random"))
    made += [process(f"main others {s}", f"--part main --of {others} --only {s}", *chosen, tuned(s)) for s in SEEDS]
    made += [process(f"targets {s}", f"--part targets --only {s}", *chosen) for s in SEEDS]
    later: list[Process] = []
    for s in SEEDS:
        rows = [process(f"averages {s}", f"--part averages --only {s}", *chosen)]
        for of in ("copy-first", "copy-last", "distill-first"):
            depths = " ".join(f"{of}-{k}" for k in ((2, 4, 8) if of == "distill-first" else (2, 4, 6)))
            rows.append(process(f"layers {of} {s}", f"--part layers --of {depths} --only {s}", *chosen))
        rows += [process(f"{part} {s}", f"--part {part} --only {s}", *chosen) for part in ("heads", "weights")]
        rows += [
            process(f"{part} {s}", f"--part {part} --only {s}", *chosen, trained("mae-other"))
            for part in ("other", "mix")
        ]
        (later if s else made).extend(rows)
        made.append(process(f"shift {s}", f"--part shift --only {s}", *whole(s)))
        made.append(process(f"boxes {s}", f"--part boxes --only {s}", *chosen, trained("mae-shapes")))
    made.append(process("ensemble", "--part ensemble", *(row for s in SEEDS for row in whole(s))))
    made.append(process("pictures", "--part pictures", *whole(0)))
    return made + later


def adapters() -> list[Process]:
    def process(name: str, words: str, *waits: Row, data: tuple[str, ...] = (CIFAR100, CIFAR10)) -> Process:
        return Process("adapters", name, "adapters.py", (CIFAR100, CIFAR10, *words.split()), data, waits, first=True)

    ends = {  # ways that share a learning rate, and the row that is made last
        "full": ("full fine-tuning", "all weights"),
        "linear": ("linear", "classifier alone"),
        "lora-1 lora-4": ("LoRA, q and v", "rank 4"),
        "nola-60 nola-250 nola-1000": ("NOLA, MLP, rank 8", "k = l = 1000"),
    }
    base: Row = ("training", "base", "whole", 0)
    chosen: list[Row] = [("main", *row, 0) for row in ends.values()]
    nola: list[Row] = [("main", "NOLA, MLP, rank 8", "k = l = 1000", s) for s in SEEDS]
    scratch = {
        "dense": None,
        "scratch-pranc": ("PRANC", "500 a convolution, 2000"),
        "scratch-lora": ("LoRA", "rank 3"),
        "scratch-nola": ("NOLA, rank 8", "250 + 250 a convolution, 2000"),
    }
    made = []
    for ways in ends:  # the first trains the base
        waits = () if ways == "full" else (base,)
        made.append(process(f"main {ways.split('-')[0]} 0", f"--part main --of {ways} --only 0", *waits))
    made += [process(f"{of} 0", f"--part scratch --of {of} --only 0") for of in scratch]
    for s in SEEDS[1:]:
        for of, row in scratch.items():  # after the first seed, which chooses a rate
            waits = () if row is None else (("scratch", *row, 0),)
            made.append(process(f"{of} {s}", f"--part scratch --of {of} --only {s}", *waits))
    made += [process(f"main {s}", f"--part main --only {s}", *chosen) for s in SEEDS[1:]]
    for s in SEEDS:
        words = f"--other {IMAGENETTE} --part other --only {s}"
        made.append(process(f"other {s}", words, *chosen, data=(CIFAR100, CIFAR10, IMAGENETTE)))
    made += [process(f"shots {s}", f"--part shots --only {s}", *chosen) for s in range(4)]
    return [*made, process("bits", "--part bits", *chosen, *nola[1:])]


def text() -> list[Process]:
    made = []
    for part in ("cola", "rte", "grammar"):
        for head in ("class", "words", "both"):
            words = ("glue", "minilm", "--part", part, "--head", head)
            made.append(Process("text", f"{part} {head}", "text.py", words, ("glue", "minilm"), first=True))
    return made


def genie() -> list[Process]:
    oracle = "cifar10_resnet56.safetensors"

    def process(name: str, words: str, *waits: Row, first: bool = False) -> Process:
        said = (CIFAR10, "--oracle", oracle, *words.split())
        return Process("genie", name, "genie.py", said, (CIFAR10, oracle), waits, first)

    both: tuple[Row, ...] = (
        ("diffusion", "small-diffusion", "all classes", 0),
        ("classifiers", "backbone", "MoCo, no labels", 0),
    )
    made = [process(part, f"--part {part}", first=True) for part in ("diffusion", "classifiers")]
    made += [process(part, f"--part {part}", *both) for part in ("fewshot", "oracle")]
    made += [process(f"longtail {s}", f"--part longtail --only {s}", *both) for s in SEEDS]
    return [*made, process("pictures", "--part pictures", *both)]


def selfsupervised() -> list[Process]:
    """Few and long ones (`--side 4`): four fill an accelerator, and each compiles its trunks once."""
    methods = ("moco, s/s", "isd, s/s", "byol-asym, s/s", "msf, w/s", "cmsf, w/s", "cmsf by label, w/s")
    short = {method: method.partition(",")[0].replace(" ", "-") for method in methods}
    tried = [f"rate {rate}{norm}" for norm in ("", ", last norm") for rate in ("0.05", "0.2", "0.5", "1")]
    of_isd = [f"rate {rate}" for rate in ("0.01", "0.05", "0.2", "0.5")]
    chosen: dict[str, tuple[Row, ...]] = {
        short[method]: tuple(("settings", each, method, 0) for each in (of_isd if "isd" in method else tried))
        for method in methods
    }

    def process(name: str, words: str, *waits: Row) -> Process:
        said = (CIFAR100, CIFAR10, *words.split())
        first = name in ("settings 0", "main moco", "vit moco")  # teachers
        return Process("selfsupervised", name, "selfsupervised.py", said, (CIFAR100, CIFAR10), waits, first)

    def several(part: str, of: str, wait: bool = True) -> Process:
        waits = (row for method in of.split() for row in chosen[method]) if wait else ()
        return process(f"{part} {of}", f"--part {part} --of {of}", *waits)

    by_label, pairs = chosen["cmsf-by-label"], ("moco isd", "byol-asym msf", "cmsf cmsf-by-label")
    made = [process(f"settings {i}", f"--part settings --of {pair}") for i, pair in enumerate(pairs)]
    made.append(process("vit moco", "--part vit --of moco untrained"))
    made += [process("main moco", "--part main --of moco untrained", *chosen["moco"]), several("main", "msf")]
    teacher: Row = ("main", "resnet18", "moco, s/s", 0)
    made += [
        process(f"students {of.split()[-1]}", f"--part rates students --of {of}", teacher)
        for of in ("teacher from-scratch", "regression", "compres")
    ]
    made += [several("main", method) for method in ("isd", "byol-asym", "cmsf")]
    made.append(process("tail", "--part tail", *chosen["moco"], *chosen["isd"]))
    made += [process(part, f"--part {part}", *by_label) for part in ("noise", "coarse")]
    made += [several("vit", "isd byol-asym", wait=False), several("vit", "msf cmsf", wait=False)]
    made += [several("cifar10", "moco isd"), several("cifar10", "byol-asym msf cmsf")]
    made.append(process("attention", "--part attention", ("vit", "vit_tiny_32", "moco, s/s", 0)))
    return made


PLANS: dict[str, Callable[[], list[Process]]] = {
    "adaptive": adaptive,
    "attention-transfer": attention_transfer,
    "adapters": adapters,
    "text": text,
    "genie": genie,
    "selfsupervised": selfsupervised,
}
