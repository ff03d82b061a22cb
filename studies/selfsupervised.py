"""Learning without labels, with wrong ones, with coarse ones, and into small models, at 32 pixels.

    python studies/selfsupervised.py cifar100.npz [cifar10.npz] --out FOLDER [--part main students ...] [--seeds 3]
                                     [--minutes 9.5] [--factor 1.0] [--models FOLDER]
    python studies/selfsupervised.py --table FOLDER        Markdown of what was found, mean and std over seeds
    python studies/selfsupervised.py --smoke --out FOLDER  all of it in a minute on a CPU; its figures mean nothing

One process. Rows are appended to FOLDER/found.jsonl as they come and teachers are kept beside it: the same command goes
on where a kill, or `--minutes`, ended it, and trains again a teacher that was lost. One seed of everything comes first,
the other seeds of `main` and `tail` last. Estimates for one H200 with four processes (studies/plans.py), which together
make 55k images a second of a pair of views, 10 s to judge a run, 45,000 training images; `--factor` multiplies all
epochs where the rate turns out another:

    part       runs                                                                       epochs   minutes
    settings   every method at four rates, with and without a last norm, by validation images 10         8
    main       BYOL-asym, MoCo, ISD, MSF (w/s, s/s), CMSF; ResNet-18, three seeds             40        10
    rates      students at three rates, CompRes at three temperatures, by validation images   10         5
    students   ResNet-20: labels, MoCo, two regressions, CompRes with one and two queues      30         2
    vit        the five methods on a small ViT                                                24         2
    attention  a ViT: labels alone, attention copied and distilled from its MoCo              20         1
    noise      labels and supervised CMSF (two ways) at 0, 25, 50 % wrong labels          20, 30         4
    coarse     the same with coarse labels, judged by fine ones                           20, 30         1
    tail       MoCo and ISD where classes have 450 to 4 images; three seeds                   90         2
    cifar10    the five methods on CIFAR-10                                                   20         2

Last, `time`: steps of every method and of labels alone, to be run with nothing else on the accelerator (a minute).
Images a second of the other rows count compilation, and whatever ran beside them.

Not a study of `vitrail compare`: most rows are judged by other labels or images than they learned from, and students
stand on a teacher.

Learning rate and last norm on the ResNet-18 are the best of `settings` for each method (a row that another needs is
made when it is not there), on CIFAR-10, long tails, wrong and coarse labels too; those of students are the best of
`rates`. The rest is as in the small- recipes, except: ResNet-18 with a 3x3 first convolution (`resnet18_32`),
projector and predictor of 1024 and 128 (BYOL-asym's ResNet-18 in the paper of ISD), weight decay 5e-4, a bank of 16,384
(smaller than the data set; 16K is on par with 128K in arXiv 2105.07269). ISD is in its own settings for a ResNet-18.

Expected (the papers of CompRes, ISD, MSF, CMSF): MSF > BYOL-asym, CMSF >= MSF, w/s >= s/s; supervised CMSF loses less
to wrong labels than cross entropy and keeps more of the fine classes under coarse labels; CompRes > regression > from
scratch without labels; ISD gains more over MoCo on rare classes than on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from found import Found, Order, hardware, study_parser, to_the_end
from selfsupervised_runs import PROBE, Runs, Trained
from selfsupervised_tables import tables

from vitrail.config import RunConfig
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.selfsupervised import MomentumPair
from vitrail.measure.probe import ProbeSettings
from vitrail.model.heads.config import Mean, Projected
from vitrail.model.store import DESCRIPTION
from vitrail.recipes import recipe, with_values
from vitrail.run.evaluate import load

PARTS = ("settings", "main", "rates", "students", "vit", "attention", "noise", "coarse", "tail", "cifar10", "time")
EPOCHS = {
    "settings": 10,
    "main": 40,
    "rates": 10,
    "students": 30,
    "vit": 24,
    "attention": 20,
    "labels": 20,  # cross entropy in noise and coarse
    "noise": 30,
    "coarse": 30,
    "tail": 90,
    "cifar10": 20,
    "time": 2,
}
TIMED, UNTIMED = 250, 100  # steps of the part time, and those of them that pass before the clock runs
ISD = {  # as published for a ResNet-18 (Tejankar et al., arXiv 2012.09259): recipe isd-r18
    "objective.momentum": 0.999,
    "objective.temperature": 0.02,
    "objective.teacher_temperature": 0.02,
    "objective.predictor_hidden": 512,
    "objective.views": "strong_strong",
    "model.head": Projected(projector="none"),
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # row -> recipe, changes
    "byol-asym, s/s": ("small-byol", {}),
    "moco, s/s": ("small-moco", {}),
    "isd, s/s": ("small-isd", ISD),
    "msf, w/s": ("small-msf", {}),
    "cmsf, w/s": ("small-cmsf", {}),
}
STRONG = {"objective.views": "strong_strong"}
BOTH_VIEWS = {**METHODS, "msf, s/s": ("small-msf", STRONG)}
BY_LABEL = {"objective.constraint": "supervised", "objective.k": 10}
SHIFTED = {  # row -> changes; both in the settings of the first
    "cmsf, nearest 10 of the label": BY_LABEL,
    "cmsf, all of the label": {**BY_LABEL, "objective.k": None},
}
TUNED: dict[str, tuple[str, dict[str, Any]]] = {**METHODS, "cmsf by label, w/s": ("small-cmsf", BY_LABEL)}
Settings = dict[str, dict[str, Any]]  # name -> changes
SETTINGS: Settings = {
    f"rate {rate:g}{', last norm' * norm}": {"optim.lr": rate, "model.head.last_norm": norm}
    for norm in (False, True)
    for rate in (0.05, 0.2, 0.5, 1.0)
}
SETTINGS_OF: dict[str, Settings] = {  # without a projector there is nothing that a last norm could stand behind
    "isd, s/s": {f"rate {rate:g}": {"optim.lr": rate} for rate in (0.01, 0.05, 0.2, 0.5)}
}
TAIL: dict[str, tuple[str, dict[str, Any]]] = {"moco, s/s": ("small-moco", {}), "isd, s/s": ("small-isd", ISD)}
FACTOR, TAIL_BANK = 100.0, 4096
NOISE = (0.0, 0.25, 0.5)

RESNET = {
    "model.name": "resnet18_32",
    "model.image_size": 32,
    "model.head": Projected(width=128, hidden=1024, norm=True),
    "data.crop_ratio": 1.0,
    "optim.weight_decay": 5e-4,
}
VIT = {
    "model.name": "vit_tiny_32",
    "model.head": Projected(width=128, hidden=1024, norm=True),  # of the mean of the patches, as small-deit
    "optim.name": "adamw",
    "optim.lr": 5e-4,
    "optim.weight_decay": 0.05,
    "optim.warmup": 2.0,
    "optim.clip": 3.0,
}
OF_OBJECTIVE = {"bank": 16_384, "predictor_hidden": 1024}  # where it has them
PLAIN = "small-simreg"  # data and optimiser of runs with labels alone, which replace what it learns:
LABELS = {  # cross entropy on crops and flips
    "objective": SupervisedConfig(),
    "model.head": Projected(projector="none"),
    "optim.lr": 0.1,
    "data.augment.jitter": 0.0,
    "data.augment.hue": 0.0,
    "data.augment.grey": 0.0,
}
REGRESSION = {"objective.layers": 1, "objective.match": "raw", "optim.name": "adam"}
REGRESSION_BN = {"objective.layers": 1, "objective.match": "batch_norm"}
STUDENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "from scratch, labels": (PLAIN, {**LABELS, "optim.weight_decay": 5e-4}),
    "from scratch, moco": ("small-moco", {}),
    "regression": ("small-simreg", REGRESSION),
    "regression, batch norm": ("small-simreg", REGRESSION_BN),
    "compres, one queue": ("small-compres", {}),
    "compres, two queues": ("small-compres", {"objective.queues": 2}),
}
STUDENT_SETTINGS: dict[str, Settings] = {
    "from scratch, moco": SETTINGS,
    **{
        what: {f"rate {rate:g}": {"optim.lr": rate} for rate in (least, 4 * least, 16 * least)}
        for what, least in (("regression", 1e-3), ("regression, batch norm", 0.1))
    },
    **{
        what: {
            f"rate {rate:g}, temperature {heat:g}": {"optim.lr": rate, "objective.temperature": heat}
            for rate in (0.05, 0.2, 0.8)
            for heat in (0.02, 0.04, 0.1)
        }
        for what in ("compres, one queue", "compres, two queues")
    },
}
ATTENTION = {
    "labels alone": "small-deit",
    "copied": "small-attention-copy",
    "distilled": "small-attention-distill",
}
STUDENT_VIT = {"model.name": "vit_tiny_32", "model.head": Mean()}  # as many tokens as the teacher: no class token
TEACHER = "moco, s/s"  # as CompRes'
UNTRAINED = "untrained"

SMOKE = {"data.batch": 20, "optim.steps": 2}
SMOKE_UNTIMED = 1
SMOKE_TRUNKS = {
    "resnet18_32": {"options": {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)}},
    "vit_tiny_32": {"depth": 2, "width": 48, "heads": 3},
}
SMOKE_BANK = 64
SMOKE_DATA = "synthetic:shapes?n=400&size=32&classes=12"


def fewer(settings: Settings) -> Settings:
    """Two rates and one temperature, for a smoke run."""
    rates = sorted({values["optim.lr"] for values in settings.values()})[:2]
    heats = sorted({values.get("objective.temperature", 0.0) for values in settings.values()})[:1]
    return {
        name: values
        for name, values in settings.items()
        if values["optim.lr"] in rates and values.get("objective.temperature", 0.0) in heats
    }


class Study:
    """All runs; each method makes the rows of one seed."""

    def __init__(self, runs: Runs, found: Found, data: Sequence[str], models: Path, factor: float, smoke: bool) -> None:
        self.runs, self.found, self.models, self.factor, self.smoke = runs, found, models, factor, smoke
        self.fine, self.other = data[0], data[-1]

    def config(self, name: str, part: str, *changes: dict[str, Any], uri: str = "") -> RunConfig:
        """A recipe with changes, as long as its part lasts."""
        config = with_values(recipe(name), {"data.uri": uri or self.fine})
        for each in changes:
            config = with_values(config, each)
        for key, value in OF_OBJECTIVE.items():
            stated = any(f"objective.{key}" in each for each in changes)
            if hasattr(config.objective, key) and not stated:
                value = TAIL_BANK if (part, key) == ("tail", "bank") else value  # noqa: PLW2901
                value = SMOKE_BANK if self.smoke and key == "bank" else value  # noqa: PLW2901
                config = with_values(config, {f"objective.{key}": value})
        config = with_values(config, {"optim.epochs": self.factor * EPOCHS[part]})
        if self.smoke:
            trunk = SMOKE_TRUNKS.get(config.model.name, {})
            config = with_values(config, {**SMOKE, "model.trunk": trunk})
        return config

    def tuned(self, what: str, name: str, part: str, changes: dict[str, Any], uri: str = "") -> RunConfig:
        """A recipe on the ResNet-18, in the settings that do best for the method `what` (whatever its views)."""
        method = what.partition(",")[0]
        best = self.best(next(tuned for tuned in TUNED if tuned.partition(",")[0] == method))
        return self.config(name, part, RESNET, changes, best, uri=uri)

    def row(
        self,
        table: str,
        subject: str,
        what: str,
        seed: int,
        config: Callable[[], RunConfig],
        judge: Callable[[Trained], dict[str, Any]],
        keep: Path | None = None,
        compiled: bool = True,
        again: bool = False,
        needed: bool = False,
    ) -> dict[str, Any] | None:
        """A row of one run: trained and judged, unless it is there (and not wanted again).

        `needed`: another row stands on it, so it is made whatever `--of` says.
        """

        def make() -> dict[str, Any]:
            done = self.runs.trained(config(), seed, compiled=compiled)
            if keep is not None:
                done.model.save(keep)
            return {**done.figures(), **judge(done)}

        method = (subject if table in ("noise", "coarse") else what).partition(",")[0].replace(" ", "-")
        if self.found.wants(method) or needed:
            return self.found.row(table, subject, what, seed, make, again)
        return None

    def worth(self, done: Trained, uri: str = "", **options: Any) -> dict[str, Any]:
        """What the trunk is worth, and the slow copy of it where there is one."""
        uri = uri or self.fine
        made: dict[str, Any] = self.runs.worth(done.model, uri, **options)
        if isinstance(done.objective, MomentumPair):
            made["target_knn20"] = self.runs.neighbours(done.objective.target.classifier, uri)
        return made

    def main(self, seed: int) -> None:
        self._untrained("main", "resnet18", RESNET, seed)
        for what, (name, changes) in BOTH_VIEWS.items():
            keep = self._place("resnet") if (what, seed) == (TEACHER, 0) else None
            config = partial(self.tuned, what, name, "main", changes)
            self.row("main", "resnet18", what, seed, config, self.worth, keep)

    def _untrained(self, part: str, subject: str, network: dict[str, Any], seed: int) -> None:
        """What the same network is worth before anything is learned."""

        def make() -> dict[str, Any]:
            return self.runs.worth(self.runs.untrained(self.config(PLAIN, part, network), seed), self.fine)

        if self.found.wants(UNTRAINED):
            self.found.row(part, subject, UNTRAINED, seed, make)

    def vit(self, seed: int) -> None:
        self._untrained("vit", "vit_tiny_32", VIT, seed)
        for what, (name, changes) in METHODS.items():
            keep = self._place("vit") if (what, seed) == (TEACHER, 0) else None
            config = partial(self.config, name, "vit", VIT, changes)
            self.row("vit", "vit_tiny_32", what, seed, config, self.worth, keep)

    def settings(self, seed: int) -> None:
        for what, (name, changes) in TUNED.items():
            for setting, values in self.settings_of(what).items():
                self._tried("settings", what, setting, partial(self._with, name, changes, values), seed)

    def _with(self, name: str, changes: dict[str, Any], values: dict[str, Any]) -> RunConfig:
        return self.config(name, "settings", RESNET, changes, values)

    def _tried(
        self, table: str, what: str, setting: str, config: Callable[[], RunConfig], seed: int = 0, needed: bool = False
    ) -> float | None:
        """How a setting does, by 20 neighbours of validation images."""

        def judge(done: Trained) -> dict[str, Any]:
            return {"val_knn20": self.runs.neighbours(done.model, self.fine, "val")}

        row = self.row(table, setting, what, seed, config, judge, needed=needed)
        return None if row is None else float(row["val_knn20"])

    def _best_of(
        self, table: str, what: str, settings: Settings, config: Callable[[dict[str, Any]], RunConfig]
    ) -> dict[str, Any]:
        """The settings that do best. Raises `RuntimeError` where none could be tried."""
        found = {}
        for setting, values in settings.items():
            worth = self._tried(table, what, setting, partial(config, values), needed=True)
            if worth is not None:
                found[setting] = worth
        if not found:
            raise RuntimeError(f"no settings of {what} could be tried")
        return settings[max(found, key=lambda each: found[each])]

    def best(self, what: str) -> dict[str, Any]:
        """The best settings of a method on the ResNet-18."""
        return self._best_of("settings", what, self.settings_of(what), partial(self._with, *TUNED[what]))

    def settings_of(self, what: str) -> Settings:
        """What is tried for a method, or for a student where `what` is one."""
        settings = STUDENT_SETTINGS.get(what) or SETTINGS_OF.get(what, SETTINGS)
        return fewer(settings) if self.smoke else settings

    def time(self, seed: int) -> None:
        ways: dict[str, tuple[str, dict[str, Any]]] = {**METHODS, "cross entropy": (PLAIN, LABELS)}
        for what, (name, changes) in ways.items():

            def make(name: str = name, changes: dict[str, Any] = changes) -> dict[str, Any]:
                steps = {} if self.smoke else {"optim.steps": TIMED}
                config = with_values(self.config(name, "time", RESNET, changes), steps)
                done = self.runs.trained(config, seed, untimed=SMOKE_UNTIMED if self.smoke else UNTIMED)
                return {"images_per_second": done.images_per_second}

            self.found.row("time", "resnet18", what, seed, make)

    def cifar10(self, seed: int) -> None:
        for what, (name, changes) in METHODS.items():
            config = partial(self.tuned, what, name, "cifar10", changes, uri=self.other)
            self.row("cifar10", "resnet18", what, seed, config, partial(self.worth, uri=self.other))

    def noise(self, seed: int) -> None:
        for share in NOISE:
            self._by_labels("noise", f"{100 * share:g} % wrong", {"data.label_noise": share}, seed, self._with_top1)

    def coarse(self, seed: int) -> None:
        self._by_labels("coarse", "coarse labels", {"data.level": "coarse"}, seed, self.worth)

    def _by_labels(
        self, part: str, what: str, data: dict[str, Any], seed: int, judge: Callable[[Trained], dict[str, Any]]
    ) -> None:
        plain = partial(self.config, PLAIN, "labels", RESNET, LABELS, data)
        self.row(part, "cross entropy", what, seed, plain, judge)
        for subject, changes in SHIFTED.items():
            shifted = partial(self.tuned, "cmsf by label, w/s", "small-cmsf", part, {**changes, **data})
            self.row(part, subject, what, seed, shifted, judge)

    def _with_top1(self, done: Trained) -> dict[str, Any]:
        return {**self.worth(done), "top1": self.runs.top1(done.model, self.fine)}

    def tail(self, seed: int) -> None:
        for what, (name, changes) in TAIL.items():
            long = {"data.long_tail": 4.0 if self.smoke else FACTOR}
            config = partial(self.tuned, what, name, "tail", {**changes, **long})
            self.row("tail", "resnet18", what, seed, config, partial(self.worth, rare=True))

    def students(self, seed: int) -> None:
        taught = any(("students", "resnet20", what, seed) not in self.found.rows for what in STUDENTS)
        teacher = self._teacher("resnet", RESNET) if taught else self._place("resnet")

        def itself() -> dict[str, Any]:
            return {**self.runs.worth(load(teacher, self.runs.device), self.fine)}

        if self.found.wants("teacher"):
            self.found.row("students", "resnet18", "the teacher, moco", seed, itself)
        for what in STUDENTS:
            self.row("students", "resnet20", what, seed, partial(self._student, what, teacher), self.worth)

    def _student(self, what: str, teacher: Path) -> RunConfig:
        """A student in the settings that do best for it, where it has several."""
        tried = partial(self._pupil, what, teacher, "rates")
        best = self._best_of("rates", what, self.settings_of(what), tried) if what in STUDENT_SETTINGS else {}
        return self._pupil(what, teacher, "students", best)

    def _pupil(self, what: str, teacher: Path, part: str, values: dict[str, Any]) -> RunConfig:
        name, changes = STUDENTS[what]
        taught = {"objective.teacher": str(teacher)} if "scratch" not in what else {}
        return self.config(name, part, changes, taught, values)

    def rates(self, seed: int) -> None:
        every = [(what, *one) for what in STUDENT_SETTINGS for one in self.settings_of(what).items()]
        taught = any(("rates", setting, what, seed) not in self.found.rows for what, setting, _ in every)
        teacher = self._teacher("resnet", RESNET) if taught else self._place("resnet")
        for what, setting, values in every:
            self._tried("rates", what, setting, partial(self._pupil, what, teacher, "rates", values), seed)

    def attention(self, seed: int) -> None:
        taught = any(("attention", "vit_tiny_32", what, seed) not in self.found.rows for what in ATTENTION)
        teacher = self._teacher("vit", VIT) if taught else self._place("vit")
        for what, name in ATTENTION.items():
            more = {} if what == "labels alone" else {"objective.teacher": str(teacher)}
            if self.smoke and what == "distilled":
                more["objective.layers"] = "all"  # of two
            config = partial(self.config, name, "attention", STUDENT_VIT, more)
            self.row("attention", "vit_tiny_32", what, seed, config, self._classified, compiled=False)

    def _classified(self, done: Trained) -> dict[str, Any]:
        return {"top1": self.runs.top1(done.model, self.fine)}

    def _place(self, trunk: str) -> Path:
        return self.models / "models" / f"moco-{trunk}-seed0"

    def _teacher(self, trunk: str, network: dict[str, Any]) -> Path:
        """Where the teacher lies; it is trained again where only its row is left."""
        place = self._place(trunk)
        if not (place / DESCRIPTION).is_file():
            what = ("teacher", trunk, TEACHER, 0)
            name, changes = METHODS[TEACHER]
            part = "main" if trunk == "resnet" else "vit"
            best = self.best(TEACHER) if trunk == "resnet" else {}
            config = partial(self.config, name, part, network, changes, best)
            self.row(*what, config, lambda _: {}, place, again=True, needed=True)
        if not (place / DESCRIPTION).is_file():
            raise RuntimeError(f"the teacher {trunk} could not be trained")
        return place

    def order(self, seeds: int) -> Order:
        """One seed of everything, then the others."""
        both = [*((part, range(1)) for part in PARTS), *((part, range(1, seeds)) for part in ("main", "tail"))]
        return [(part, getattr(self, part), of) for part, of in both]


def main() -> None:
    parser = study_parser(__doc__, "selfsupervised", PARTS)
    parser.add_argument("data", nargs="*", help="images with fine and coarse labels, and others for the part cifar10")
    parser.add_argument("--factor", type=float, default=1.0, help="times all epochs")
    options = parser.parse_args()
    if options.table is not None:
        print(tables(options.table))
        return
    data = options.data or [SMOKE_DATA] * options.smoke
    if not data:
        parser.error("say which images to learn from: a .npz file, or another form of data")
    if len(data) == 1 and not options.smoke and "cifar10" in options.part:
        parser.error("the part cifar10 wants a second data set; name it, or leave that part out with --part")
    few = options.smoke
    found = Found(options.out, options.minutes, options.of)
    probe = ProbeSettings(learning_rates=(0.1,), weight_decays=(1e-4,), epochs=2) if few else PROBE
    runs = Runs(limit=200 if few else None, most=60 if few else None, probe=probe)
    about = f"{hardware(runs.fast)}"
    found.row("about", " and ".join(data), about, 0, lambda: {"smoke": few})
    with to_the_end(found, options.minutes):
        study = Study(runs, found, data, options.models or options.out, options.factor, few)
        found.through(study.order(options.seeds), options.part, options.only)


if __name__ == "__main__":
    main()
