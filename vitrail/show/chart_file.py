"""A chart of a page as a file of its own: an SVG that carries the page's style, in its light colours, on white."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from markupsafe import Markup

DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{.*?\n\}", re.DOTALL)
MARGIN = 12  # on a page, names may stand out of their chart
BOX = re.compile(r'viewBox="0 0 (\d+) (\d+)"')


def standalone(chart: Markup, styles: Sequence[str]) -> str:
    """The text of an .svg file; `styles` are names of style sheets beside this file."""
    css = "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in styles)
    found = BOX.search(chart)
    assert found is not None
    width, height = (int(side) + 2 * MARGIN for side in found.groups())
    opened, _, rest = BOX.sub(f'viewBox="{-MARGIN} {-MARGIN} {width} {height}"', str(chart), count=1).partition(">")
    opened = opened.replace("<svg", f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"', 1)
    plain = f"{DARK.sub('', css)}.chart {{ width: auto; max-width: none; background: #fff; }}"
    return f"{opened}><style><![CDATA[{plain}]]></style>{rest}"


def named(charts: Iterable[tuple[str, Markup]]) -> dict[str, Markup]:
    """Charts by names for files, made of their headings; those of one heading are numbered.

    >>> list(named([("CKA of layers", Markup()), ("CKA, of layers", Markup())]))
    ['cka-of-layers', 'cka-of-layers-1']
    """
    made: dict[str, Markup] = {}
    for heading, chart in charts:
        name = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
        again = sum(other == name or re.fullmatch(rf"{name}-\d+", other) is not None for other in made)
        made[f"{name}-{again}" if again else name] = chart
    return made
