"""`vitrail fit`: its flags. `vitrail.fit(...)`, the function of the same name, is `vitrail.fit.run.fit`."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from vitrail.console import output
from vitrail.schema import Positional


@dataclass(frozen=True)
class FitCommand:
    """The best classifier for your photographs within a latency and a size, as a checked file.

    Models are measured on this machine as exported files, those that fit are trained by successive halving, the best
    is exported, calibrated, measured again and evaluated once on test. Interrupted, the same command goes on.

    Example: vitrail fit photos/ --latency 5ms --out classifier
    Example: vitrail fit photos/ --latency 2ms --size 10MB --threads 1 --minutes 60 --out classifier
    """

    data: Annotated[str, Positional("DATA")]  # a folder of class folders, or any other data of `vitrail train`
    latency: Annotated[str, "TIME"] = ""
    """most time for one image, as 5ms: median at batch 1 of the exported file, preprocessing of a decoded image
    included"""
    out: Path | None = None  # folder of the file, its page and the search (none: runs/fit-DATA-LATENCY)
    size: Annotated[str | None, "BYTES"] = None  # largest file, as 20MB (none: any)
    on: Literal["cpu", "cuda"] = "cpu"  # what the file will run on: this machine's processor or accelerator
    threads: int = 2  # of the CPU
    metric: str = "top1"  # what is best on val: top1, balanced_accuracy, macro_f1
    minutes: float = 30.0  # of training, all models together
    weights: Literal["auto", "none"] = "auto"  # auto: published weights where they can be downloaded
    json: bool = False  # print one JSON object

    def __call__(self) -> int:
        from vitrail.compare.jobs import StudyStopped
        from vitrail.fit.limits import Budget, quantity
        from vitrail.fit.page import fit_tables
        from vitrail.fit.run import fit

        if self.threads < 1 or self.minutes <= 0:
            raise ValueError("--threads and --minutes must be above 0")
        if not self.latency:
            raise ValueError("--latency: name the most time that one image may take, as in --latency 5ms")
        latency = quantity(self.latency, ("us", "ms", "s"), "--latency")
        most = None if self.size is None else quantity(self.size, ("KB", "MB", "GB"), "--size")
        budget = Budget(latency, most, self.on, self.threads)
        options: dict[str, Any] = {"metric": self.metric, "minutes": self.minutes, "weights": self.weights}
        try:
            fitted = fit(
                self.data, budget, self.out or _folder(self.data, self.latency), **options, say=_say, quiet=self.json
            )
        except StudyStopped:
            print("stopped; the same command goes on where it was", file=sys.stderr)
            return 130
        page = fitted.folder / "report.html"
        return output(self.json, fitted.to_json(), fit_tables(fitted), f"file: {fitted.file}", f"report: {page}")


def _folder(data: str, latency: str) -> Path:
    name = re.sub(r"[^\w.-]+", "-", f"fit-{Path(data).stem or 'data'}-{latency}")
    return Path("runs") / name


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _CallableModule(ModuleType):
    """Importing this folder sets `vitrail.fit` to it, and `vitrail.fit(...)` must go on working."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from vitrail.fit.run import fit

        return fit(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
