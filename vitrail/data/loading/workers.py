"""Batches of bytes, made by worker processes and moved to the device: what every loader is built on.

A loader lists tasks (which rows make a batch); workers read, augment and stack them; the main process copies the result
to the device, on CUDA one ahead on a stream of its own. Everything here is picklable, so that workers can be spawned.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrail.data.dataset import BadImage, Split
from vitrail.data.loading.sampler import Draw

ViewsOf = Callable[[Image.Image, int, Draw], list[Tensor]]
"""Image, stable index, draw -> views, each uint8 [3, size, size]. Picklable."""

L = TypeVar("L", bound="PieceLoader")


class BatchTask(NamedTuple):
    """What one batch is made of."""

    step: int
    place: int  # of the first draw in the global batch
    draws: NDArray[np.int64]  # [rows, 3]: row, epoch, repeat, as in `Draw`

    @classmethod
    def once(cls, place: int, rows: Sequence[int]) -> BatchTask:
        """Each of these rows as it is: no epoch, no repeat."""
        draws = np.zeros((len(rows), 3), dtype=np.int64)
        draws[:, 0] = rows
        return cls(0, place, draws)


@dataclass
class DecodedBatch:
    """A batch in bytes, without the rows that could not be read."""

    task: BatchTask
    views: tuple[Tensor, ...]  # each [rows, 3, size, size] uint8; none where no row could be read
    label: Tensor  # [rows], or [rows, classes]
    index: Tensor  # [rows]
    levels: Tensor | None  # [rows, levels]
    places: NDArray[np.int64]  # [rows] in the global batch
    skipped: list[tuple[str, str]]  # key, reason

    def tensors(self, change: Callable[[Tensor], Tensor]) -> DecodedBatch:
        """The piece with every tensor changed."""
        levels = None if self.levels is None else change(self.levels)
        views = tuple(change(v) for v in self.views)
        return replace(self, views=views, label=change(self.label), index=change(self.index), levels=levels)

    def pin_memory(self) -> DecodedBatch:
        """Called by torch's DataLoader."""
        return self.tensors(Tensor.pin_memory)


class _Pieces(Dataset[DecodedBatch]):
    """What runs in a worker: a task in, a piece out."""

    def __init__(self, split: Split, views_of: ViewsOf) -> None:
        self.split, self.views_of = split, views_of

    def __getitem__(self, task: BatchTask) -> DecodedBatch:
        split = self.split
        made: list[list[Tensor]] = []
        rows: list[int] = []
        places: list[int] = []
        skipped: list[tuple[str, str]] = []
        for place, draw in enumerate(map(Draw._make, task.draws.tolist()), task.place):
            try:
                image = split.read(draw.row)
            except BadImage as bad:
                skipped.append((split.keys[draw.row], bad.reason))
                continue
            made.append(self.views_of(image, int(split.index[draw.row]), draw))
            rows.append(draw.row)
            places.append(place)
        label = torch.from_numpy(split.labels[rows])
        return DecodedBatch(
            task=task,
            views=tuple(torch.stack(view) for view in zip(*made, strict=True)),
            label=label.to(torch.float32) if label.ndim == 2 else label,
            index=torch.from_numpy(split.index[rows]),
            levels=None if split.levels is None else torch.from_numpy(split.levels[rows]),
            places=np.array(places, dtype=np.int64),
            skipped=skipped,
        )


class _Tasks:
    """Tasks, again for each pass: what DataLoader calls a sampler."""

    def __init__(self, tasks: Callable[[], Iterator[BatchTask]]) -> None:
        self._tasks = tasks

    def __iter__(self) -> Iterator[BatchTask]:
        return self._tasks()


class PieceLoader:
    """What training and evaluation share: workers, the copy to the device, and the list of what could not be read."""

    def __init__(
        self,
        split: Split,
        views_of: ViewsOf,
        *,
        device: torch.device | str,
        workers: int,
        start_method: str | None = None,
    ) -> None:
        if workers < 0:
            raise ValueError(f"data.workers: {workers} must be 0 or more")
        self.split, self.device, self.workers = split, torch.device(device), workers
        self.skipped: list[tuple[str, str]] = []  # (key, reason) of each image left out so far, once
        self._pieces = _Pieces(split, views_of)
        self._start_method = start_method
        self._loader: DataLoader[DecodedBatch] | None = None
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def close(self) -> None:
        """End the workers. Iterating again starts new ones."""
        loader, self._loader = self._loader, None
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()  # what its __del__ does, but now and not when the last reference goes

    def __enter__(self: L) -> L:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def tasks(self) -> Iterator[BatchTask]:
        """What each batch of a pass is made of."""
        raise NotImplementedError

    def received(self) -> Iterator[DecodedBatch]:
        """Pieces on the device; on CUDA each is copied, on a stream of its own, while the one before is used."""
        if self._loader is None:
            self._loader = DataLoader(
                self._pieces,
                batch_size=None,
                sampler=_Tasks(self.tasks),
                num_workers=self.workers,
                collate_fn=_unchanged,
                pin_memory=self._copies is not None,
                persistent_workers=self.workers > 0,
                worker_init_fn=_leave_interrupts_to_main,
                multiprocessing_context=self._start_method if self.workers else None,
                # Its own: every pass draws a seed, which must not come out of the run's generator.
                generator=torch.Generator(),
            )
        if self._copies is None:
            for piece in self._loader:
                yield piece.tensors(lambda t: t.to(self.device))
            return
        ahead: DecodedBatch | None = None
        for piece in self._loader:
            ready, ahead = self._awaited(ahead), self._sent(piece)
            if ready is not None:
                yield ready
        last = self._awaited(ahead)
        if last is not None:
            yield last

    def _sent(self, piece: DecodedBatch) -> DecodedBatch:
        with torch.cuda.stream(self._copies):
            return piece.tensors(lambda t: t.to(self.device, non_blocking=True))

    def _awaited(self, piece: DecodedBatch | None) -> DecodedBatch | None:
        if piece is None:
            return None
        current = torch.cuda.current_stream(self.device)
        assert self._copies is not None
        current.wait_stream(self._copies)

        def used_here(tensor: Tensor) -> Tensor:
            tensor.record_stream(current)  # else its memory could be given to the next copy while still read
            return tensor

        return piece.tensors(used_here)

    def note(self, skipped: list[tuple[str, str]]) -> None:
        """Add to `skipped` what is not there yet: a bad image comes again in every epoch."""
        known = {key for key, _ in self.skipped}
        self.skipped += [(key, reason) for key, reason in dict(skipped).items() if key not in known]


def _unchanged(piece: Any) -> Any:
    return piece


def _leave_interrupts_to_main(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the main one still wants its batch, and then ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
