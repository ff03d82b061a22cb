"""Small batches augmented several at a time where they lie: operations a batch, and images a second.

    python benchmarks/together.py DATA [--batch 50 250] [--mib 0 1 2 8] [--images 6000] [--device cpu]

`--mib` are sizes of what is augmented together (`TOGETHER` of the device loader); 0 is one batch at a time.
The policy is that of `small-deit`, mixing included. Operations are those that torch dispatches, views of memory left
out: on an accelerator each is at least one kernel that the host must begin. Images a second are of the loader alone.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.data.augment.host import Augment
from vitrail.data.config import PreprocessConfig
from vitrail.data.loading import device_loader
from vitrail.data.loading.device_loader import DeviceLoader
from vitrail.data.loading.loader import LoaderSpec
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.recipes import recipe


class Operations(TorchDispatchMode):
    """Counts what makes new numbers."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--batch", type=int, nargs="+", default=[50, 250])
    parser.add_argument("--mib", type=int, nargs="+", default=[0, 1, 2, 8])
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    device, data = torch.device(asked.device), open_data(asked.data)
    train, chosen, form = data["train"], recipe("small-deit").data.augment, PreprocessConfig(size=32, crop_ratio=1.0)
    images = None
    for batch in asked.batch:
        steps = max(1, asked.images // batch)
        for mib in asked.mib:
            device_loader.TOGETHER[device.type] = mib << 20
            loader = DeviceLoader(
                LoaderSpec(
                    train,
                    BatchSampler(len(train), batch, 0),
                    Augment(chosen, form),
                    Preprocess(form),
                    classes=len(data.classes),
                    multilabel=False,
                    seed=0,
                    device=device,
                    workers=0,
                    start=0,
                    stop=steps,
                ),
                images,
            )
            images = loader.images
            images.pixels  # noqa: B018, reads them before the clock runs
            with Operations() as counted:
                for _ in loader:
                    pass
            began = time.perf_counter()
            for _ in loader:
                pass
            if device.type == "cuda":
                torch.cuda.synchronize()
            rate = steps * batch / (time.perf_counter() - began)
            print(f"batch {batch}, {mib} MiB: {counted.count / steps:.0f} operations, {rate:,.0f} img/s", flush=True)


if __name__ == "__main__":
    main()
