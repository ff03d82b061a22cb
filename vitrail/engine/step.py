"""One training step as one thing: forward, loss, backward, clipping, guard, optimiser, moving average, meter.

On CUDA the whole of it can be one graph, which the host launches with a single call: what changes from step to step
(images, learning rate, clock, share of the average) lies in tensors that keep their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.engine.config import OptimConfig
from vitrail.engine.distributed import Group
from vitrail.engine.ema import Ema
from vitrail.engine.optimizer import DECOUPLED, build_optimizer, set_step
from vitrail.engine.schedule import Schedule
from vitrail.engine.update import Meter, Statistics, Updater, batch_norms
from vitrail.learn.objective import Objective
from vitrail.model.replay import captured, on

WARM_UP_STEPS = 3  # before a graph is captured: compilation, library handles, optimiser state


class TrainStep:
    """`feed` takes the pieces of each step one after the other; after `accumulate` of them the step is made.

    `graph` captures steps as a CUDA graph once they are warm; pieces of another shape than the captured ones are
    computed without it. It is left out, and `why_no_graph` says why, where something must be decided on the host.
    """

    def __init__(
        self,
        objective: Objective,
        optim: OptimConfig,
        schedule: Schedule,
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
        compile: bool = False,  # noqa: A002, as in the configuration
        graph: bool = False,
        ema: float = 0.0,
        accumulate: int = 1,
        group: Group | None = None,
    ) -> None:
        self.objective = objective.to(device)
        if device.type == "cuda" and is_convolutional(objective.model):
            self.objective.to(memory_format=torch.channels_last)  # tensor cores want it
        self.train()
        self.schedule, self.device, self.autocast = schedule, device, autocast
        self.accumulate, self.group = accumulate, group or Group()
        self.optim = optim
        self.optimizer = build_optimizer(objective, optim)
        self.updater = Updater(self.optimizer, optim.clip, objective.listening)
        self.statistics = Statistics(self.objective)
        self.ema = Ema(objective.model, ema) if ema else None
        self.meter = Meter()
        self.step = 0  # the next one
        self.lr = 0.0  # of the last one
        self.why_no_graph = _why_no_graph(objective, optim, device, accumulate, self.group)
        self._graph: _Graph | None = None
        self._phase = 0  # of the objective, that the graph was made for
        self._wants_graph = graph and not self.why_no_graph
        self._compile = compile
        self._wrapped: nn.Module | None = None
        self._pieces: list[Mapping[str, Tensor]] = []

    @property
    def captured(self) -> bool:
        """Whether steps are replayed by now."""
        return self._graph is not None and self._graph.graph is not None

    @property
    def model(self) -> nn.Module:
        """The weights that are evaluated and kept: the moving average where there is one."""
        return self.objective.model if self.ema is None else self.ema.model

    def train(self) -> None:
        """Training mode, but for batch norms of the model that are frozen: their statistics are, too."""
        self.objective.train()
        for norm in batch_norms(self.objective.model):
            own = list(norm.parameters())
            if own and not any(p.requires_grad for p in own):
                norm.eval()

    def feed(self, piece: Batch) -> bool:
        """Compute a piece; True where it completed a step."""
        if not self._pieces:
            self.objective.before_step(self.step)
        if len(self._pieces) == self.accumulate - 1:
            self.lr = set_step(self.optimizer, self.schedule, self.step)
            self.updater.clock.fill_(self.step)
            if self.ema is not None:
                self.ema.set_step(self.step)
        if not self._wants_graph:
            done = self._compute(piece)
        else:
            # Again where the first pieces were odd ones, and where steps become other work.
            if (
                self._graph is None
                or self._phase != self.objective.phase
                or not (self.captured or self._graph.fits(piece))
            ):
                self._graph, self._phase = _Graph(self._compute, piece, self.device), self.objective.phase
            done = self._graph.run(piece)
        if done:
            self.step += 1
            self.objective.after_step(self.step - 1)
        return done

    def follow_checkpoint(self, saved: Mapping[str, Tensor]) -> None:
        """Give Muon and AdamW the weights that they had when `saved`, state by "name/key", was written.

        Earlier versions gave Muon fewer matrices; a run of theirs goes on as it began.
        """
        matrices = {name.rpartition("/")[0] for name in saved if name.endswith("/momentum_buffer")}
        now = {name for group in self.optimizer.param_groups if group["matrices"] for name in group["names"]}
        if self.optim.name == "muon" and matrices != now:
            self.optimizer = build_optimizer(self.objective, self.optim, matrices)
            self.updater.optimizer = self.optimizer

    def agree(self) -> None:
        """Make the model one for all processes before it is judged or stored: weights are, running statistics not."""
        self.statistics.agree(self.group)
        if self.ema is not None:
            Statistics(self.ema.model).agree(self.group)

    def _compute(self, piece: Batch) -> bool:
        if self._wrapped is None:
            if self._compile:
                self.objective.compile(dynamic=False)
            self._wrapped = self.group.wrap(self.objective, self.device)
        if not self._pieces:
            self.statistics.keep()
        last = len(self._pieces) == self.accumulate - 1
        waiting = nullcontext() if last or self.group.world == 1 else self._wrapped.no_sync()  # type: ignore[operator]
        with waiting:
            with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                losses: dict[str, Tensor] = self._wrapped(piece)
            (losses["loss"] / self.accumulate).backward()
        self._pieces.append({name: value.detach() for name, value in losses.items()})
        if last:
            norm, good = self.updater.apply()
            self.statistics.settle(good)
            if self.ema is not None:
                self.ema.follow(self.objective.model)
            pieces, self._pieces = self._pieces, []
            means = {name: torch.stack([p[name] for p in pieces]).float().mean(0) for name in pieces[0]}
            self.meter.add({**means, "gradient_norm": norm}, good)
        return last


def _why_no_graph(objective: Objective, optim: OptimConfig, device: torch.device, accumulate: int, group: Group) -> str:
    if device.type != "cuda":
        return "only CUDA has graphs"
    if group.world > 1:
        return "several processes"
    if accumulate > 1:
        return "several pieces a step"
    if optim.weight_decay_end is not None and optim.name not in DECOUPLED:
        return f"weight decay changes, and {optim.name} takes it from the host"
    return decides_on_the_host(objective)


def decides_on_the_host(objective: Objective) -> str:
    """Why a step of this objective cannot be replayed, in words; empty where it can."""
    reasons = ((type(part).__name__, getattr(part, "host_decision", "")) for part in objective.modules())
    return next((f"{name}: {reason}" for name, reason in reasons if reason), "")


def is_convolutional(model: nn.Module) -> bool:
    """Whether most layers of a network are convolutions over images."""
    convolutions = sum(isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1) for m in model.modules())
    return convolutions > sum(isinstance(m, nn.Linear) for m in model.modules())


class Still:
    """A batch whose tensors keep their places: others of its shapes are copied into it.

    Warming up and capture must see one and the same batch. Compiled code asks of its tensors more than their shapes,
    for one whether two of them are the same, and where an answer is new it compiles, which no capture survives.
    """

    def __init__(self, piece: Batch) -> None:
        self.piece = piece.changed(torch.clone)

    def fits(self, piece: Batch) -> bool:
        own, other = self.piece.tensors(), piece.tensors()
        return len(own) == len(other) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(own, other, strict=True)
        )

    def take(self, piece: Batch) -> None:
        torch._foreach_copy_(self.piece.tensors(), piece.tensors())


class _Graph(Still):
    """A step on a batch that keeps its place: as it is until all is warm, then captured and replayed."""

    def __init__(self, work: Callable[[Batch], bool], piece: Batch, device: torch.device) -> None:
        super().__init__(piece)
        self.work, self.device = work, device
        self.graph: torch.cuda.CUDAGraph | None = None
        self._warm = 0
        self._aside = torch.cuda.Stream(device)

    def run(self, piece: Batch) -> bool:
        """Compute a piece; True where it completed a step."""
        if not self.fits(piece):
            return self._plain(piece)
        self.take(piece)
        if self._warm < WARM_UP_STEPS:
            self._warm += 1
            return self._plain(self.piece)
        if self.graph is None:
            self.graph = self._captured()
        self.graph.replay()
        return True

    def _plain(self, piece: Batch) -> bool:
        """On another stream than the usual one, as capture wants it of all that comes before."""
        with on(self._aside):
            return self.work(piece)

    def _captured(self) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # a graph has memory of its own: what warming up took must not stay beside it
        try:
            return captured(lambda: self.work(self.piece), warm_up=0, device=self.device)[0]
        except RuntimeError as error:
            advice = "this step cannot be a CUDA graph, for what is said above; use --engine.graph false"
            raise RuntimeError(advice) from error
