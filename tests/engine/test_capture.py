"""A step that is captured as a CUDA graph asks the host for nothing: tried on the meta device, which has no numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import TEXTS, reduced_recipe
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitrail.engine.device import ProcessGroup
from vitrail.engine.run_folder import RunFolder
from vitrail.engine.step import decides_on_the_host
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model
from vitrail.recipes import RECIPES
from vitrail.run.run_data import read_data
from vitrail.run.train import Trainer

aten = torch.ops.aten
WAIT = {  # what waits for the device, or cannot be recorded, on CUDA
    *(aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.bincount),
    *(aten._linalg_svd, aten._linalg_eigh, aten.linalg_eig, aten.linalg_lstsq, aten.repeat_interleave),
}


class Watch(TorchDispatchMode):
    """Notes what would wait for the device, every copy between it and the host, and work on tensors of both."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in WAIT:
            self.seen.append(str(func))
        if func.overloadpacket in (aten._to_copy, aten.copy_):
            source = args[1] if func.overloadpacket is aten.copy_ else args[0]
            if source.device.type != out.device.type:
                self.seen.append(f"{func} from {source.device} to {out.device} of {tuple(source.shape)}")
        else:
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.ndim]
            if len({t.device.type for t in given}) > 1:
                self.seen.append(f"{func} of tensors on the device and {[t.shape for t in given if not t.is_meta]}")
        return out


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in TEXTS])
def test_a_captured_step_asks_the_host_for_nothing(
    name: str,
    teacher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = reduced_recipe(name, teacher, tmp_path / "run")
    group = ProcessGroup()
    data, bad = read_data(config, group, True)
    trainer = Trainer(config, data, bad, group, True, RunFolder(tmp_path / "run"))
    objective = trainer.objective.train()
    if decides_on_the_host(objective):
        pytest.skip("said to decide on the host")
    batch = next(iter(trainer.module.batches(0, 1))).changed(lambda t: t.to("meta"))
    objective.to("meta")
    cast = torch.autocast  # knows no such device
    monkeypatch.setattr(torch, "autocast", lambda kind, *a, **k: cast("cpu" if kind == "meta" else kind, *a, **k))
    with Watch() as watch:
        losses = objective(batch)
        losses["loss"].backward()
    assert watch.seen == []


def test_a_decomposition_keeps_a_step_from_being_captured() -> None:
    head = {"kind": "second_order", "normalization": "svpn"}
    model = create_model("vit_tiny_32", classes=list("ab"), depth=1, width=48, heads=3, head=head)
    assert decides_on_the_host(Supervised(model, SupervisedConfig())) == (
        "PowerNorm: a singular value decomposition waits for the device"
    )
