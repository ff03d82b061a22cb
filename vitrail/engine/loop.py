"""Training, from top to bottom: steps are the clock."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.console import out_of_memory
from vitrail.data.batch import Batch
from vitrail.data.counter import seed_of
from vitrail.engine import checkpoint
from vitrail.engine.config import EngineConfig, OptimConfig
from vitrail.engine.device import ProcessGroup, StopRequest, Vote
from vitrail.engine.optimizer import Schedule, describe_shares, optimizer_shares
from vitrail.engine.progress import Progress
from vitrail.engine.run_folder import RunFolder
from vitrail.engine.shard import StoredRows, can_shard, laid_out
from vitrail.engine.shard import like as sharded_like
from vitrail.engine.step import TrainStep
from vitrail.learn.objective import Objective
from vitrail.model.classifier import Classifier
from vitrail.quantities import duration

MAY_DIFFER = ("config", "contents", "world")  # facts: the first two are compared before
SETTLED_STEPS = 10  # after which a step allocates nothing new
LESS_IS_BETTER = ("loss", "perplexity")  # how names of such metrics end
WORTH_SAYING = 120.0  # seconds of training from which the expected time is printed
MOST_LOST = 10  # updates in a row without a finite gradient, after which a run has diverged


class Diverged(ValueError):
    """Every recent gradient was NaN or infinite."""


class TooLarge(ValueError):
    """The pieces of a batch do not fit into memory."""


class Stopped(Exception):
    """Training was interrupted; everything needed to resume is saved."""

    def __init__(self, step: int, run: Path) -> None:
        super().__init__(f"stopped after step {step}; continue with: vitrail train --resume {run}")
        self.step, self.run = step, run


@contextmanager
def resumable(run: Path) -> Iterator[None]:
    """Ctrl-C inside raises `Stopped` with the step of the newest checkpoint, where the run in this folder has begun."""
    try:
        yield
    except KeyboardInterrupt:
        if not RunFolder(run).config.is_file():
            raise
        raise Stopped(max(checkpoint.steps_saved(RunFolder(run).checkpoints), default=0), run) from None


@dataclass
class Best:
    """The best evaluation on val so far by the main metric, the first that is reported; of equal ones the earliest."""

    metric: str = ""
    value: float | None = None
    step: int = 0
    waited: int = 0  # evaluations since then
    weights: dict[str, Tensor] = field(default_factory=dict)  # on the host; empty where the last are kept

    def update(self, metrics: Mapping[str, float], step: int) -> bool:
        """Count an evaluation; returns whether it is the best so far. NaN never is."""
        self.metric = self.metric or next(iter(metrics), "")
        value = metrics.get(self.metric, math.nan)
        sign = -1 if self.metric.endswith(LESS_IS_BETTER) else 1
        if math.isnan(value) or (self.value is not None and sign * value <= sign * self.value):
            self.waited += 1
            return False
        self.value, self.step, self.waited = value, step, 0
        return True

    def facts(self) -> dict[str, Any]:
        """What a checkpoint stores besides the weights."""
        return {name: getattr(self, name) for name in ("metric", "value", "step", "waited")}


@dataclass
class LoopResult:
    """The trained model, and how long it took."""

    model: Classifier
    steps: int
    seconds: float  # of this process, without those before a resume
    images_per_second: float
    notes: list[str] = field(default_factory=list)


@dataclass
class Loop:
    """A training run: `Loop(...).run()`.

    `batches(start, stop)` gives the batches of those steps, `accumulate` per step; `evaluate(model)` gives metrics on
    val; `indices(step)` names the examples of a step, for reports of bad updates.
    """

    objective: Objective
    batches: Callable[[int, int], Iterable[Batch]]
    schedule: Schedule
    optim: OptimConfig
    engine: EngineConfig
    batch: int
    images: int  # training examples, for epochs
    folder: RunFolder
    device: torch.device
    autocast: torch.dtype | None = None  # none: float32
    compile: bool = False
    graph: bool = False
    group: ProcessGroup = field(default_factory=ProcessGroup)
    evaluate: Callable[[Classifier], Mapping[str, float]] | None = None
    indices: Callable[[int], Sequence[int]] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # what must be the same when the run is resumed
    things: str = "images"  # word for the examples
    quiet: bool = False

    def __post_init__(self) -> None:
        self.work = TrainStep(
            self.objective,
            self.optim,
            self.schedule,
            device=self.device,
            autocast=self.autocast,
            fp8=self.engine.precision == "fp8",
            compile=self.compile,
            graph=self.graph,
            ema=self.engine.ema,
            accumulate=self.engine.accumulate or 1,
            group=self.group,
            shard=self.folder.gathered if self.engine.shard == "full" and can_shard() else None,
        )
        self.saved: int | None = None  # step of the last checkpoint
        self._lost = 0  # updates in a row that were skipped
        self._logged = 0  # lines of this process
        self.best = Best()  # counted where weights or the end of the run depend on it
        self.notes: list[str] = []

    @property
    def kept(self) -> Classifier:
        """The weights that are evaluated and kept: the moving average where there is one; at the end, the selected."""
        model = self.work.model
        assert isinstance(model, Classifier)
        return model

    @property
    def step(self) -> int:
        """Steps completed so far."""
        return self.work.step

    @property
    def exhausted(self) -> bool:
        """Whether `engine.patience` evaluations in a row brought no better metric."""
        return 0 < self.engine.patience <= self.best.waited

    def run(self) -> LoopResult:
        """Train to the end of the schedule, or of patience. Raises `Stopped` when asked to stop, after saving."""
        began, first = time.monotonic(), self.step
        settling: float | None = None  # seconds of the first steps, compilation among them
        total = self.schedule.steps
        quiet = self.quiet or not self.group.main
        asked_to_stop = Vote(self.group)  # processes must agree on the step
        with ExitStack() as stack, StopRequest() as stop, Progress("train", total, quiet=quiet) as bar:
            bar.advance(self.step)
            self._window = (time.monotonic(), self.step)
            stack.callback(gc.unfreeze)
            self._describe(bar)
            if self.exhausted or self.step == total:
                self._say(bar, f"training had ended at step {self.step}; it is not continued, only evaluated again")
            for piece in self.batches(self.step, self.step if self.exhausted else total):
                try:
                    if not self.work.feed(piece):
                        continue
                except (RuntimeError, MemoryError) as error:
                    if not out_of_memory(error):
                        raise
                    raise TooLarge(self._too_large()) from error
                bar.advance(1)
                if self.step == first + SETTLED_STEPS:
                    # Objects that compilation left stay alive: collecting garbage among them takes a third of a second.
                    gc.collect()
                    gc.freeze()
                    settling = time.monotonic() - began
                finished = self.step == total
                if finished or self.step % self.engine.log_every == 0:
                    self._log(bar)
                if finished or self._due(self.engine.evaluate_every):
                    self._evaluate(bar)
                if self.exhausted and not finished:
                    finished = True
                    if self.step % self.engine.log_every:
                        self._log(bar)
                halt = not finished and asked_to_stop(stop.requested)
                if finished or halt or self._due(self.engine.checkpoint_every):
                    self.save()
                if halt:
                    raise Stopped(self.step, self.folder.path)
                if finished:
                    break
            self.work.gather()  # where nothing was left to train, too
            if self.best.weights:
                self.work.keep(self.best.weights)
            for text in self.outcome():
                self._say(bar, text)
                self.notes.append(text)
        seconds = time.monotonic() - began
        rate = (self.step - first) * self.batch / max(seconds, 1e-9)
        if self.group.main:
            apart = "" if settling is None else f", the first {SETTLED_STEPS} of them in {settling:.1f} s"
            self.folder.log(f"{self.step - first} steps in {seconds:.1f} s{apart}")
        return LoopResult(self.kept, self.step, seconds, rate, self.notes)

    def outcome(self) -> list[str]:
        """A sentence on early stopping and one on the weights that were selected, where there are any."""
        best, sentences = self.best, []
        place = f"epoch {self._epoch(best.step):.4g} (step {best.step})"
        if self.exhausted and self.step < self.schedule.steps:
            sentences.append(
                f"training stopped early at epoch {self._epoch():.4g} (step {self.step} of {self.schedule.steps}): "
                f"{best.metric} on val has not improved for {best.waited} evaluations in a row"
                + ("" if best.value is None else f", the best was {best.value:.4g} at {place}")
            )
        if self.engine.select == "best" and best.value is not None:
            sentences.append(f"the weights of {place} are kept: the best {best.metric} on val, {best.value:.4g}")
        elif self.engine.select == "best":
            sentences.append(f"the last weights are kept: {best.metric} on val was never a number to select by")
        return sentences

    def _too_large(self) -> str:
        pieces = self.engine.accumulate or 1
        more = next((n for n in range(pieces + 1, self.batch + 1) if self.batch % n == 0), None)
        cut = "" if more is None else f"set --engine.accumulate {more}, or auto (the result stays as it is); or "
        return (
            f"a batch of {self.batch} {self.things} in {pieces} piece{'s' * (pieces > 1)} does not fit into "
            f"the memory of {self.device}; {cut}choose a smaller --data.batch or --model.image_size"
        )

    def _describe(self, bar: Progress) -> None:
        """Log how many parameters each optimiser takes, and whether steps are CUDA graphs."""
        shares = optimizer_shares(self.optim.name, self.work.optimizer.param_groups)
        if not self.group.main:
            return
        self.folder.log(describe_shares(shares))
        if self.device.type == "cuda":
            why = self.work.why_no_graph or ("" if self.graph else "engine.graph is off")
            self.folder.log(f"no CUDA graph: {why}" if why else "every step is one CUDA graph")
        if self.optim.name == "muon" and 2 * shares.get("muon", 0) < sum(shares.values()):
            self._say(bar, f"warning: Muon takes less than half of the weights ({describe_shares(shares)})")

    def _every(self, epochs: float) -> int:
        return max(1, round(epochs * self.images / self.batch))

    def _due(self, epochs: float) -> bool:
        return bool(epochs) and self.step % self._every(epochs) == 0

    def _epoch(self, step: int | None = None) -> float:
        return (self.step if step is None else step) * self.batch / self.images

    def _log(self, bar: Progress) -> None:
        means = self.work.meter.read(self.group)
        skipped, last = self.work.updater.read_skipped()
        now = time.monotonic()
        steps = self.step - self._window[1]
        rate = steps * self.batch / max(now - self._window[0], 1e-9)
        self._lost = self._lost + steps if skipped == steps else 0
        if skipped:
            self._report_skipped(bar, skipped, last, steps)
        line: dict[str, Any] = {
            "step": self.step,
            "epoch": round(self._epoch(), 6),
            "split": "train",
            **means,
            "lr": self.work.lr,
        }
        if skipped:
            line["skipped_updates"] = skipped
        self._sound_alarm(bar, self.objective.alarm(means, self.step / self.schedule.steps))
        self._write({**line, "images_per_second": round(rate, 1), "seconds": round(now - self._window[0], 3)})
        unit = "img" if self.things == "images" else self.things
        loss = f"loss {means['loss']:.4f}  " if means else ""
        bar.advance(0, f"epoch {self._epoch():.1f}  {loss}{rate:,.0f} {unit}/s")
        self._window = (time.monotonic(), self.step)
        self._logged += 1
        left = (self.schedule.steps - self.step) * self.batch / max(rate, 1e-9)
        if self._logged == 2 and left >= WORTH_SAYING:  # the first lines may include compilation
            self._say(bar, f"about {duration(left)} of training left at {rate:,.0f} {self.things}/s")

    def _sound_alarm(self, bar: Progress, text: str) -> None:
        kind = text.partition(":")[0]
        if text and not any(note.partition(":")[0] == kind for note in self.notes):
            text = f"{text} (step {self.step})"
            self._say(bar, text)
            self.notes.append(text)

    def _report_skipped(self, bar: Progress, skipped: int, last: int, steps: int) -> None:
        rows = list(self.indices(last))[:8] if self.indices else []
        where = f" ({self.things} {', '.join(map(str, rows))}, ...)" if rows else ""
        safe = "none yet" if self.saved is None else f"step {self.saved}"
        text = (
            f"{skipped} of the last {steps} updates were skipped for a non-finite gradient, the last at step {last}"
            f"{where}; last good checkpoint: {safe}"
        )
        self._say(bar, text)
        self.notes.append(text)
        if self._lost >= MOST_LOST:
            raise Diverged(f"training has diverged: {text}; lower --optim.lr, clip gradients or use precision float32")

    def _evaluate(self, bar: Progress) -> None:
        if self.evaluate is None:
            return
        began = time.monotonic()
        self.work.agree()
        metrics = dict(self.evaluate(self.kept))
        self.work.train()
        if self.engine.selects_by:
            # Of the first process, so that all select and stop alike.
            improved = self.best.update(self.group.gather(metrics)[0], self.step)
            if improved and self.engine.select == "best":
                self.best.weights = self.work.weights()
        seconds = round(time.monotonic() - began, 3)
        self._write(
            {"step": self.step, "epoch": round(self._epoch(), 6), "split": "val", **metrics, "seconds": seconds}
        )
        plain = [(name, value) for name, value in metrics.items() if not name.endswith(("_low", "_high"))]
        shown = "  ".join(f"{name} {value:.4f}" for name, value in plain[:4])
        if shown:  # there are no metrics without labels
            self._say(bar, f"epoch {self._epoch():6.2f}  step {self.step:6d}  val  {shown}")
        self._window = (self._window[0] + time.monotonic() - began, self._window[1])  # evaluation is not training time

    def _say(self, bar: Progress, text: str) -> None:
        bar.say(text)
        if self.group.main:
            self.folder.log(text)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.group.main:
            self.folder.write_metrics(line)

    # State

    def state(self) -> checkpoint.State:
        """Everything a resumed run needs (all processes must call it)."""
        base = self._base()
        if base:
            from vitrail.model.adapters.adapter_file import digest

            base = base if digest(base) == self.facts["base"] else {}  # an objective may change more than it trains
        kept = {n: t for n, t in self.objective.state_dict().items() if not self._found_again(n, base)}
        tensors: dict[str, Tensor] = {f"objective/{n}": t for n, t in kept.items()}
        if self.work.ema is not None:
            average = self.work.ema.model.state_dict()  # of the model alone, which may contain a frozen module
            tensors |= {f"ema/{n}": t for n, t in average.items() if not self._found_again(f"model.{n}", base)}
        selected = self.best.weights
        tensors |= {f"best/{n}": t for n, t in selected.items() if not self._found_again(f"model.{n}", base)}
        for group in self.work.optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                for key, value in self.work.optimizer.state[parameter].items():
                    tensors[f"optimizer/{name}/{key}"] = value
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        for rank, states in enumerate(self.group.gather(random)):
            tensors |= {f"rng/{rank}/{kind}": value for kind, value in states.items()}
        # Sums are per process; the log has their mean.
        for rank, sums in enumerate(self.group.gather({k: v.cpu() for k, v in self.work.meter.state().items()})):
            tensors |= {f"meter/{rank}/{name}": value for name, value in sums.items()}
        tensors["skipped"] = self.work.updater.skipped
        tensors["last_skipped"] = self.work.updater.last_skipped
        facts = {"best": self.best.facts()} if self.best.metric else {}
        return checkpoint.State(self.step, tensors, {**self._kept_facts(), **facts})

    def _base(self) -> dict[str, Tensor]:
        """The weights below an adapter; none where the run trains a whole model."""
        if "base" not in self.facts:
            return {}
        from vitrail.model.adapters.adapter_file import base_tensors

        return base_tensors(self.objective.model)

    def _found_again(self, name: str, base: Mapping[str, Tensor]) -> bool:
        """Whether a tensor of the objective is not stored, because it comes from a teacher or an adapter's base."""
        module, _, rest = name.partition(".")
        frozen = any(name.startswith(f"{part}.") for part in self.objective.frozen)
        return frozen or (module == "model" and rest in base)

    def _kept_facts(self) -> dict[str, Any]:
        """What must be equal when the run is resumed: its facts, and the hashes of its teachers."""
        return {**self.facts, **self.objective.identities}

    def save(self) -> None:
        """Write a checkpoint. A full disk ends the run with the last good one intact."""
        self.work.agree()
        state = self.state()
        sharded = self.work.gathered is not None
        if self.group.main or sharded:
            try:
                if sharded:
                    checkpoint.save_shards(self.folder.checkpoints, state)
                    if self.group.main:
                        checkpoint.prune(self.folder.checkpoints, state.step, self.engine.keep)
                else:
                    checkpoint.save(self.folder.checkpoints, state, self.engine.keep)
            except OSError as error:
                safe = "there is none yet" if self.saved is None else f"step {self.saved} is intact"
                raise OSError(
                    f"the checkpoint of step {self.step} could not be written ({error}); last good checkpoint: {safe}; "
                    f"make room, then: vitrail train --resume {self.folder.path}"
                ) from error
        self.saved = self.step
        self.group.barrier()

    def restore(self, state: checkpoint.State) -> None:
        """Continue from a checkpoint. Raises `ValueError` where it belongs to another run."""
        for key, value in self._kept_facts().items():
            if key not in MAY_DIFFER and state.facts.get(key) != value:
                same = f"with the {key}" if key in (*self.objective.frozen, "base") else "on the data"
                raise ValueError(
                    f"the checkpoint was made with {key} = {state.facts.get(key)!r}, now it is {value!r}; "
                    f"a run can only be resumed {same} it began with"
                )
        stored = laid_out(state.stored("objective"), self.objective)
        missing = self.objective.load_state_dict(stored, strict=False).missing_keys
        if self.work.ema is not None:
            stored = laid_out(state.stored("ema"), self.work.ema.model)
            lacking = self.work.ema.model.load_state_dict(stored, strict=False).missing_keys
            missing = [*missing, *(f"model.{name}" for name in lacking)]
        base = self._base()
        missing = [name for name in missing if not self._found_again(name, base)]
        if missing:
            raise ValueError(f"the checkpoint lacks {', '.join(missing[:4])}; it belongs to another model")
        saved = state.stored("optimizer")
        self.work.follow_checkpoint(saved)
        for group in self.work.optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                values = {k.rpartition("/")[2]: v for k, v in saved.items() if k.rpartition("/")[0] == name}
                self.work.optimizer.state[parameter] = {k: _laid_out(v, parameter) for k, v in values.items()}
        self._restore_ranks(state)
        self.work.updater.skipped.copy_(state.tensors["skipped"])
        self.work.updater.last_skipped.copy_(state.tensors["last_skipped"])
        self.best = Best(**state.facts.get("best", {}), weights=state.part("best"))  # earlier versions had none
        self.work.step = self.saved = state.step

    def _restore_ranks(self, state: checkpoint.State) -> None:
        """What every process has of its own: random numbers of drop path and dropout, and sums of the meter.

        Among another number of processes each draws from a new seed, and the first takes the sums of all.
        """
        rank, before = self.group.rank, state.facts.get("world", self.group.world)
        if before == self.group.world:
            random, sums = state.part(f"rng/{rank}"), state.part(f"meter/{rank}")
            if "cpu" in random:
                torch.set_rng_state(random["cpu"])
            if "cuda" in random and self.device.type == "cuda":
                torch.cuda.set_rng_state(random["cuda"], self.device)
        else:
            torch.manual_seed(seed_of("resumed", self.facts.get("config", {}).get("seed", 0), state.step, rank))
            every = [state.part(f"meter/{number}") for number in range(before)]
            sums = {name: torch.stack([one[name] for one in every]).sum(0) * (rank == 0) for name in every[0]}
            self.notes.append(
                f"from step {state.step} on the run has {self.group.world} processes instead of {before}: images, "
                "order and augmentation are the same, drop path and dropout draw other random numbers"
            )
        self.work.meter.restore(sums, self.device)


def _laid_out(value: Tensor | StoredRows, like: Tensor) -> Tensor:
    """Optimiser state on its parameter's device and, of the same shape, with its strides, as fused steps need it."""
    if value.shape != like.shape:
        assert isinstance(value, Tensor)
        return value.to(like.device)
    laid = sharded_like(value, like)
    return torch.empty_like(like, dtype=laid.dtype).copy_(laid)
