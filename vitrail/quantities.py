"""Numbers as people read them."""

from __future__ import annotations

import math

from vitrail.files import readable

MISSING = "–"  # noqa: RUF001


def percent(share: float | None, digits: int = 1) -> str:
    """
    >>> percent(0.8934)
    '89.3 %'
    """
    return MISSING if share is None or not math.isfinite(share) else f"{100 * share:.{digits}f} %"


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant figures, thousands set apart.

    >>> number(1234.5), number(0.04567), number(0.0)
    ('1,234', '0.0457', '0')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def amount(value: float | None) -> str:
    """
    >>> amount(5_717_416), amount(1.08e9), amount(950)
    ('5.72 M', '1.08 G', '950')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g}"


def memory(size: float | None) -> str:
    """
    >>> memory(412 * 2**20), memory(3 * 2**30)
    ('412 MiB', '3.00 GiB')
    """
    if size is None or not math.isfinite(size):
        return MISSING
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def duration(seconds: float | None) -> str:
    """
    >>> duration(42.3), duration(725), duration(7500)
    ('42.3 s', '12 min 5 s', '2 h 5 min')
    """
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def shorten(name: str, length: int) -> str:
    """
    >>> shorten("a rather long class name", 12)
    'a rather lo…'
    """
    name = readable(name)
    return name if len(name) <= length else name[: length - 1].rstrip() + "…"
