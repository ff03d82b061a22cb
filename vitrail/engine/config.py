"""How a model is trained, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from vitrail.schema import Count, Fraction, NotNegative, Positive, Range, Whole


@dataclass(frozen=True)
class OptimConfig:
    """Optimiser, schedule, and what is tuned."""

    name: Literal["adamw", "adam", "sgd", "lamb", "adagrad", "muon"] = "adamw"
    """`muon`: orthogonalised updates for hidden weight matrices, AdamW for the rest, one learning rate for both."""
    lr: Positive = 1e-3
    """Peak learning rate; at batch `lr_batch` where that is set."""
    lr_batch: Count | None = None
    """Scale the learning rate linearly: lr * batch / lr_batch."""
    epochs: Positive = 50.0
    """Length in passes over the training images."""
    steps: Count | None = None
    """Length in optimiser steps, in place of epochs."""
    schedule: Literal["cosine", "step", "linear", "constant"] = "cosine"
    warmup: NotNegative = 5.0
    """Epochs of linear warm-up (at most half of the run)."""
    warmup_lr: NotNegative = 1e-6
    floor: NotNegative = 1e-5
    """Lowest learning rate of cosine and linear schedules, absolute."""
    cooldown: NotNegative = 0.0
    """Epochs at the floor after the schedule; part of `epochs`."""
    step_every: Positive = 30.0
    """Epochs between the drops of the step schedule."""
    step_factor: Fraction = 0.1
    weight_decay: NotNegative = 0.05
    decay_all: bool = False
    """Weight decay on norms, biases and gains too, as most code for self-supervised ResNets has it."""
    weight_decay_end: NotNegative | None = None
    """Weight decay at the end, on a cosine from `weight_decay` (none: constant)."""
    momentum: Fraction = 0.9
    nesterov: bool = True
    """SGD: Nesterov's momentum; off where a paper says SGD alone."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    clip: NotNegative = 0.0
    """Largest norm of the gradient (0: no clipping)."""
    layer_decay: Annotated[float, Range(0, 1, above=True)] = 1.0
    """Learning rate of a block over that of the block above it."""
    head_rate: Positive = 1.0
    """Learning rate of the head over that of the rest: coefficients of NOLA want far more than a head does."""
    tune: str = "full"
    """full, head, last:N (N blocks, norm and head), norm, bias (BitFit), or attention (each with the head)."""


@dataclass(frozen=True)
class EngineConfig:
    """Machine, precision, and how often things happen."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    precision: Literal["auto", "float32", "bf16", "fp8"] = "auto"
    """auto: bf16 where the accelerator has it; on a CPU float32, but for training steps on one with AMX. fp8: bf16, and
    linear layers of the blocks train in 8-bit floats (Ada, Hopper or newer); faster from a width of 768."""
    compile: bool | None = None
    """torch.compile (none: on CUDA in bf16)."""
    graph: bool | None = None
    """Launch whole training steps as a CUDA graph (none: on CUDA, where nothing must be decided on the host)."""
    accumulate: Count | None = 1
    """Pieces in which a batch is computed (auto: the fewest that fit into memory)."""
    shard: Literal["none", "full"] = "none"
    """full: parameters, gradients, optimiser state and moving averages are divided among processes (FSDP2), and
    gathered block by block to compute; for models that do not fit one accelerator. Steps are not compiled."""
    activation_checkpointing: Literal["none", "blocks"] = "none"
    """blocks: keep only the input of every block and compute its activations again in the backward pass; less memory
    for about a third more time. No CUDA graphs."""
    ema: Fraction = 0.0
    """Decay of the moving average of the weights (0: off)."""
    deterministic: bool = False
    """CUDA: repeat and resume bit for bit on the same kind of accelerator, versions, batch and number of processes;
    slower, and an error where an operation cannot. On a CPU runs repeat bit for bit without it."""
    log_every: Count = 20
    """Steps between lines of metrics.jsonl."""
    track: Literal["none", "tensorboard", "mlflow", "wandb"] = "none"
    """Also show these lines to a tracker, offline, in the run folder (`tensorboard --logdir RUN`)."""
    evaluate_every: Annotated[float, Range(0)] = 1.0
    """Epochs between looks at val (0: only at the end)."""
    checkpoint_every: Annotated[float, Range(0)] = 1.0
    """Epochs between checkpoints (0: only at the end or when stopped)."""
    keep: Whole = 2
    """Checkpoints kept."""
    select: Literal["last", "best"] = "last"
    """Weights that the run keeps: the last, or those with the best main metric on val (the first metric that the first
    of `evaluators` reports; of equal ones the earlier): --engine.select best --engine.evaluate_every 1."""
    patience: Whole = 0
    """Early stopping: end after N evaluations in a row without a better main metric on val (0: never), as in
    --engine.patience 5. The learning-rate schedule stays as it is, and a cosine schedule reaches its best at its end:
    use patience with --optim.schedule constant or step, or to end hopeless runs."""

    @property
    def selects_by(self) -> str:
        """The setting by which evaluations on val decide what is kept or when to stop; empty: they do not."""
        by_patience = f"engine.patience is {self.patience}" if self.patience else ""
        return "engine.select is best" if self.select == "best" else by_patience
