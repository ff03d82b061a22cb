"""What a deployed classifier may cost: milliseconds per image on the target, and the size of its file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

HEADROOM = 0.9  # of the budget: latency of a file varies from day to day by more than of one call to the next
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9}


@dataclass(frozen=True)
class Budget:
    """A limit on the median latency of one image (batch 1), and on the bytes of the file; none: no limit."""

    latency: float  # seconds
    bytes: float | None = None
    on: Literal["cpu", "cuda"] = "cpu"
    threads: int = 2  # of the CPU

    def meets(self, latency: float, size: float, share: float = HEADROOM) -> bool:
        """Whether that latency [s] and size [bytes] are within `share` of the latency and within the size."""
        return latency <= share * self.latency and (self.bytes is None or size <= self.bytes)

    @property
    def text(self) -> str:
        target = f"{self.threads} CPU thread{'s' * (self.threads > 1)}" if self.on == "cpu" else "the accelerator"
        most = "" if self.bytes is None else f" and {self.bytes / 1e6:.3g} MB"
        return f"{1e3 * self.latency:.3g} ms on {target}{most}"


def quantity(text: str, units: tuple[str, ...], flag: str) -> float:
    """The number in "5ms" or "20 MB", in seconds or bytes. Raises `ValueError` for other texts.

    >>> quantity("5ms", ("us", "ms", "s"), "--latency")
    0.005
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*", text)
    known = {unit.lower(): unit for unit in units}
    if match is None or match[2].lower() not in known or not float(match[1]):
        raise ValueError(f"{flag}: {text!r}; use a number above 0 and a unit ({', '.join(units)}), as in 5{units[1]}")
    return float(match[1]) * UNITS[known[match[2].lower()]]
