"""One training step: forward, loss, backward, clipping, guard, optimiser, moving average of the weights, meter.

Nothing in it waits for the device. On CUDA the whole step can be one graph, which the host launches with a single call:
what changes from step to step (images, learning rate, clock, decay of the average) lies in tensors at fixed addresses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.engine.config import OptimConfig
from vitrail.engine.device import ProcessGroup
from vitrail.engine.optimizer import DECOUPLED, Schedule, build_optimizer, set_step
from vitrail.engine.shard import gather_into, hold, shard_objective, whole, with_copied_weights, without_weights
from vitrail.kernels.cuda_graph import captured, on
from vitrail.learn.objective import Objective
from vitrail.model.parts.modules import channels_last_works, is_convolutional


class Ema:
    """A second copy of the model that follows it: average <- average + (1 - decay) * (weights - average).

    The decay rises from 0.1 as (1 + step) / (10 + step) up to its value, so that short runs do not average in their
    random start. It depends on the step alone: resuming needs no counter. What changes from step to step is a tensor
    on the device, so that `follow` can be replayed by a CUDA graph.
    """

    def __init__(self, model: nn.Module, decay: float, empty: nn.Module | None = None) -> None:
        """`empty`: of a sharded model, a copy without weights to hold the average."""
        self.decay = decay
        average = copy.deepcopy(model) if empty is None else with_copied_weights(empty, model)
        self.model = average.eval().requires_grad_(False)
        self.share = torch.zeros((), device=next(self.model.parameters()).device)  # 1 - decay of this step

    def set_step(self, step: int) -> None:
        """Prepare `follow` for optimiser step `step` (0 is the first)."""
        self.share.fill_(1 - min(self.decay, (1 + step) / (10 + step)))

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        """Follow the weights; buffers are copied."""
        average: list[Tensor] = list(self.model.parameters())
        weights = [p.detach() for p in model.parameters()]
        if self.share.device.type == "cpu":
            torch._foreach_lerp_(average, weights, float(self.share))  # in one pass over the memory
        else:
            difference = torch._foreach_sub(weights, average)
            torch._foreach_mul_(difference, self.share)
            torch._foreach_add_(average, difference)
        for mine, other in zip(self.model.buffers(), model.buffers(), strict=True):
            mine.copy_(other)


class Updater:
    """Clips, guards and applies gradients.

    Parameters of an online linear probe (`probe`) are clipped by a norm of their own, so that they do not shrink the
    steps of the network; the norm that is logged is the network's. A gradient with NaN or infinity anywhere skips the
    whole update on the device (`found_inf` of the fused optimisers and of Lamb), and the next logging step reports it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, clip: float, probe: Sequence[Tensor] = ()) -> None:
        self.optimizer, self.clip = optimizer, clip
        probed = {id(p) for p in probe}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.parameters = [p for p in parameters if id(p) not in probed]
        self.probe = [p for p in parameters if id(p) in probed]
        self.all_parameters = parameters
        device = parameters[0].device
        self.clock = torch.zeros((), device=device)  # the current step
        self.skipped = torch.zeros((), device=device)  # updates since the last report
        self.last_skipped = torch.full((), -1.0, device=device)  # the step of the last one

    def apply(self) -> tuple[Tensor, Tensor]:
        """Apply the gradients and drop them; returns their norm, and 1 (0 where the update was skipped)."""
        groups = [part for part in (self.parameters, self.probe) if part]
        norms = [whole(torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None])) for part in groups]
        norm, bad = norms[0], (~torch.isfinite(torch.stack(norms)).all()).float()
        if self.clip:
            for part, total in zip(groups, norms, strict=True):
                torch.nn.utils.clip_grads_with_norm_(part, self.clip, total)
        self.optimizer.found_inf = bad  # type: ignore[attr-defined]
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self._decay(1 - bad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += bad
        self.last_skipped.copy_(torch.where(bad.bool(), self.clock, self.last_skipped))
        return norm, 1 - bad

    @torch.no_grad()
    def _decay(self, good: Tensor) -> None:
        """Decoupled weight decay of groups whose decay changes in the course of the run, as AdamW applies it."""
        for group in self.optimizer.param_groups:
            weights = [p for p in group["params"] if p.grad is not None] if "decay" in group else []
            if weights:
                torch._foreach_mul_(weights, 1 - group["lr"] * group["decay"] * good)

    def read_skipped(self) -> tuple[int, int]:
        """How many updates were skipped since the last call, and the step of the last (waits for the device)."""
        count, last = int(self.skipped.item()), int(self.last_skipped.item())
        self.skipped.zero_()
        return count, last


class Statistics:
    """Running statistics of batch norms, which a forward pass updates before its step is known to be finite."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = [
            b for norm in batch_norms(module) for b in (norm.running_mean, norm.running_var) if b is not None
        ]
        self._before: Tensor | None = None

    def keep(self) -> None:
        """Remember them as they are before a step."""
        if self.buffers:
            self._before = self._now()

    def settle(self, good: Tensor) -> None:
        """As the step left them where it is good (1), as they were before where it was skipped (0)."""
        if self._before is not None:
            self._write(torch.where(good.bool(), self._now(), self._before))
            self._before = None

    def agree(self, group: ProcessGroup) -> None:
        """Average them over processes, each of which saw other images (all must call it)."""
        if group.world > 1 and self.buffers:
            mean = self._now()
            torch.distributed.all_reduce(mean)
            self._write(mean / group.world)

    def _now(self) -> Tensor:
        return torch.cat([b.flatten() for b in self.buffers])

    def _write(self, flat: Tensor) -> None:
        parts = flat.split([b.numel() for b in self.buffers])
        torch._foreach_copy_(self.buffers, [part.view_as(b) for part, b in zip(parts, self.buffers, strict=True)])


def batch_norms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Every batch norm of a module, of any number of dimensions."""
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


class Meter:
    """Running means of scalars on the device; steps whose update was skipped do not count."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.totals: Tensor | None = None  # [names + 1], the count last; always the same memory

    def add(self, values: Mapping[str, Tensor], good: Tensor, weight: float = 1.0) -> None:
        names = tuple(sorted(values))
        if self.totals is None:
            self.names = names
            self.totals = torch.zeros(len(values) + 1, device=good.device)
        if names != self.names:
            raise ValueError(f"an objective gave {', '.join(self.names)} first and then {', '.join(names)}")
        now = torch.stack([*(values[name].detach().float() for name in names), torch.ones_like(good)])
        now = now if weight == 1 else now * weight
        self.totals += torch.where(good.bool(), now, 0.0)

    def read(self, group: ProcessGroup) -> dict[str, float]:
        """Means since the last reading, over all processes; empty where nothing counted."""
        if self.totals is None:
            return {}
        summed = self.totals.clone()
        if group.world > 1:
            torch.distributed.all_reduce(summed)
        *sums, count = summed.tolist()
        self.totals.zero_()
        return {name: value / count for name, value in zip(self.names, sums, strict=True)} if count else {}

    def state(self) -> dict[str, Tensor]:
        """Sums by name, the count as `count`; empty before the first step."""
        return {} if self.totals is None else dict(zip((*self.names, "count"), self.totals.unbind(), strict=True))

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        if not state:
            return
        self.names = tuple(name for name in sorted(state) if name != "count")
        self.totals = torch.stack([*(state[n] for n in self.names), state["count"]]).to(device, torch.float32)


WARM_UP_STEPS = 3  # before a graph is captured: compilation, library handles, optimiser state


class TrainStep:
    """`feed` takes the micro-batches of a step one after the other; after `accumulate` of them the step is complete.

    The gradient, and what is logged, is that of the mean over all images of the step that could be read, on whichever
    process: micro-batches weigh as much as they have images. (What an objective does not average over images, such as a
    loss per token, is averaged over micro-batches by the same weights.)

    `graph` captures steps as a CUDA graph after a warm-up; micro-batches of another shape run without it. Where
    something must be decided on the host there is none, and `why_no_graph` says why. `fp8`: see `train_in_fp8`.
    `shard`: a file to gather a sharded model in (none: it is not sharded).
    """

    def __init__(
        self,
        objective: Objective,
        optim: OptimConfig,
        schedule: Schedule,
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
        fp8: bool = False,
        compile: bool = False,  # noqa: A002, as in the configuration
        graph: bool = False,
        ema: float = 0.0,
        accumulate: int = 1,
        group: ProcessGroup | None = None,
        shard: Path | None = None,
    ) -> None:
        self.objective = objective
        self.gathered: nn.Module | None = None  # of a sharded model: the weights that are kept, as `agree` found them
        self._mapped: dict[str, Tensor] = {}  # those, in the file `shard`
        self._file = shard
        empty: nn.Module | None = None
        if shard is not None:
            self.gathered = without_weights(objective.model)
            empty = without_weights(objective.model) if ema else None
            shard_objective(objective, device, autocast)
        self.objective.to(device)
        if shard is None and is_convolutional(objective.model) and channels_last_works(objective, device):
            self.objective.to(memory_format=torch.channels_last)  # faster
        if fp8:
            from vitrail.kernels.fp8_training import train_in_fp8

            train_in_fp8(objective.model)
        self.train()
        self.schedule, self.device, self.autocast = schedule, device, autocast
        self.accumulate, self.group = accumulate, group or ProcessGroup()
        self.optim = optim
        self.optimizer = build_optimizer(objective, optim)
        self.updater = Updater(self.optimizer, optim.clip, objective.probe_parameters)
        self.statistics = Statistics(self.objective)
        self.ema = Ema(objective.model, ema, empty) if ema else None
        self.meter = Meter()
        self.step = 0  # the next one
        self.lr = 0.0  # of the last one
        self.why_no_graph = _why_no_graph(objective, optim, device, accumulate, self.group)
        self._graph: _Graph | None = None
        self._phase = 0  # of the objective, for which the graph was captured
        self._wants_graph = graph and not self.why_no_graph
        self._compile = compile
        self._wrapped: nn.Module | None = None
        self._pieces: list[Mapping[str, Tensor]] = []
        self._shares: list[float] = []  # of the pieces
        self._missing = 0  # images of theirs that could not be read

    @property
    def captured(self) -> bool:
        """Whether steps are replayed."""
        return self._graph is not None and self._graph.graph is not None

    @property
    def model(self) -> nn.Module:
        """The weights that are evaluated and kept: the moving average where there is one."""
        return self.gathered or self._followed

    @property
    def _followed(self) -> nn.Module:
        return self.objective.model if self.ema is None else self.ema.model

    def train(self) -> None:
        """Training mode, but for batch norms of the model that are frozen: their statistics are, too."""
        self.objective.train()
        for norm in batch_norms(self.objective.model):
            weights = list(norm.parameters())
            if weights and not any(p.requires_grad for p in weights):
                norm.eval()

    def feed(self, piece: Batch) -> bool:
        """Compute a micro-batch; True where it completed a step."""
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
            # Captured again where the first batches had an unusual shape, and where the phase of the objective changes.
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

        Earlier versions gave Muon fewer matrices; their runs are resumed as they began.
        """
        matrices = {name.rpartition("/")[0] for name in saved if name.endswith("/momentum_buffer")}
        now = {name for group in self.optimizer.param_groups if group["matrices"] for name in group["names"]}
        if self.optim.name == "muon" and matrices != now:
            self.optimizer = build_optimizer(self.objective, self.optim, matrices)
            self.updater.optimizer = self.optimizer

    def agree(self) -> None:
        """Make running statistics equal on all processes, as weights are, before the model is evaluated or saved.

        Weights of a sharded model are gathered.
        """
        self.statistics.agree(self.group)
        if self.ema is not None:
            Statistics(self.ema.model).agree(self.group)
        self.gather()

    def gather(self) -> None:
        """Gather the weights of a sharded model that are evaluated and kept (all processes must call it)."""
        if self.gathered is not None and self._file is not None:
            self._mapped = gather_into(self.gathered, self._followed, self.device, self._file)

    def weights(self) -> dict[str, Tensor]:
        """The weights that are kept, on the host: a copy, or what a sharded model was last gathered in."""
        if self.gathered is not None:
            return self._mapped
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.model.state_dict().items()}

    def keep(self, weights: Mapping[str, Tensor]) -> None:
        """Evaluate and keep these weights; what a checkpoint does not store of them stays."""
        if self.gathered is not None:
            hold(self.gathered, {**self._mapped, **weights}, self.device)
        else:
            self.model.load_state_dict(weights, strict=False)

    def _compute(self, piece: Batch) -> bool:
        if self._wrapped is None:
            if self._compile:
                self.objective.compile(dynamic=False)
            # A sharded objective reduces its gradients itself, those of every micro-batch, to keep only its shard.
            self._wrapped = self.objective if self.gathered else self.group.wrap(self.objective, self.device)
        if not self._pieces:
            self.statistics.keep()
        last = len(self._pieces) == self.accumulate - 1
        self._shares.append(piece.share)
        self._missing += piece.missing
        read = self.group.sum_of(sum(self._shares), self._missing) if last else None
        alone = last or self.group.world == 1 or self.gathered is not None
        waiting = nullcontext() if alone else self._wrapped.no_sync()  # type: ignore[operator]
        with waiting:
            with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                losses: dict[str, Tensor] = self._wrapped(piece)
            loss = losses["loss"] / self.accumulate
            (loss if piece.share == 1 else loss * piece.share).backward()
        self._pieces.append({name: value.detach() for name, value in losses.items()})
        if read is not None:
            shares, missing = read()
            if missing:  # somewhere: weights were those of a complete batch
                grads = [p.grad for p in self.updater.all_parameters if p.grad is not None]
                torch._foreach_mul_(grads, self.accumulate * self.group.world / shares)
            norm, good = self.updater.apply()
            self.statistics.settle(good)
            if self.ema is not None:
                self.ema.follow(self.objective.model)
            pieces, self._pieces = self._pieces, []
            means = {name: torch.stack([p[name] for p in pieces]).float() for name in pieces[0]}
            if any(share != 1 for share in self._shares):
                weights = torch.tensor(self._shares, device=self.device) * (len(pieces) / sum(self._shares))
                means = {name: values * weights for name, values in means.items()}
            means = {name: values.mean(0) for name, values in means.items()}
            self.meter.add({**means, "gradient_norm": norm}, good, sum(self._shares) / len(pieces))
            self._shares, self._missing = [], 0
        return last


def _why_no_graph(
    objective: Objective, optim: OptimConfig, device: torch.device, accumulate: int, group: ProcessGroup
) -> str:
    if device.type != "cuda":
        return "only CUDA has graphs"
    if group.world > 1:
        return "several processes"
    if accumulate > 1:
        return "several micro-batches per step"
    if optim.weight_decay_end is not None and optim.name not in DECOUPLED:
        return f"weight decay changes, and {optim.name} takes it from the host"
    return decides_on_the_host(objective)


def decides_on_the_host(objective: Objective) -> str:
    """Why a step of this objective cannot be replayed; empty where it can."""
    reasons = ((type(part).__name__, getattr(part, "host_decision", "")) for part in objective.modules())
    return next((f"{name}: {reason}" for name, reason in reasons if reason), "")


class StaticBatch:
    """A batch at fixed addresses: others of its shapes are copied into it.

    Warm-up and capture must see one and the same batch. Compiled code guards on more than shapes, such as whether
    two tensors are the same one, and a failed guard compiles again, which no capture survives.
    """

    def __init__(self, piece: Batch) -> None:
        self.piece = piece.changed(torch.clone)

    def fits(self, piece: Batch) -> bool:
        static, other = self.piece.tensors(), piece.tensors()
        return len(static) == len(other) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(static, other, strict=True)
        )

    def take(self, piece: Batch) -> None:
        torch._foreach_copy_(self.piece.tensors(), piece.tensors())


class _Graph(StaticBatch):
    """A step on a static batch: run as it is during warm-up, then captured and replayed."""

    def __init__(self, work: Callable[[Batch], bool], piece: Batch, device: torch.device) -> None:
        super().__init__(piece)
        self.work, self.device = work, device
        self.graph: torch.cuda.CUDAGraph | None = None
        self._warm = 0
        self._aside = torch.cuda.Stream(device)

    def run(self, piece: Batch) -> bool:
        """Compute a micro-batch; True where it completed a step."""
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
        """On a side stream, as capture requires of the warm-up."""
        with on(self._aside):
            return self.work(piece)

    def _captured(self) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # the graph has its own memory pool: release that of the warm-up
        try:
            return captured(lambda: self.work(self.piece), warm_up=0, device=self.device)[0]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            advice = "this step cannot be captured as a CUDA graph (reason above); use --engine.graph false"
            raise RuntimeError(advice) from error
