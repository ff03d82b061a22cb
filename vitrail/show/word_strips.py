"""A strip of words, coloured by their influence: green is strong, blue weak (SoT, Xie et al., 2021, arXiv
2104.10935, supplement E)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

STRONG, WEAK = (46, 125, 80), (214, 224, 242)  # green, pale blue


@dataclass(frozen=True)
class Strip:
    """One text, its words, and rows of influence per word."""

    caption: str
    words: Sequence[str]
    rows: Mapping[str, Sequence[float]]  # name -> influence of each word; its sign is not shown


def word_strips(strips: Sequence[Strip]) -> Markup:
    """The strips one below the other; within a row colours go from its weakest to its strongest word."""
    made = []
    for strip in strips:
        rows = [
            f'<tr><th scope="row" style="text-align:left;padding-right:12px;font-weight:normal">{escape(name)}</th>'
            f"<td>{_row(strip.words, values)}</td></tr>"
            for name, values in strip.rows.items()
        ]
        table = f"<table><tbody>{''.join(rows)}</tbody></table>"
        made.append(f'<div class="card wide"><h3>{escape(strip.caption)}</h3>{table}</div>')
    return Markup("".join(made))  # every part is escaped


def _row(words: Sequence[str], values: Sequence[float]) -> str:
    sizes = [abs(value) for value in values]
    low, high = min(sizes, default=0.0), max(sizes, default=0.0)
    cells = []
    for word, size in zip(words, sizes, strict=True):
        share = (size - low) / (high - low) if high > low else 0.0
        red, green, blue = (round(w + (s - w) * share) for s, w in zip(STRONG, WEAK, strict=True))
        ink = "#fff" if share > 0.6 else "#111"
        cells.append(
            f'<span style="background:rgb({red},{green},{blue});color:{ink};padding:1px 5px;margin:1px;'
            f'display:inline-block;border-radius:3px" title="{size:.3g}">{escape(word)}</span>'
        )
    return "".join(cells)
