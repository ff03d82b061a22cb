"""The pages of `vitrail app`: a form, and in a frame below it the answer. No scripts; all names are escaped."""

from __future__ import annotations

from PIL import Image

from vitrail.app.facts import KEEP
from vitrail.app.run import Viewer, picture_of
from vitrail.files import readable
from vitrail.report.html import render_page

NONE = "no map"
TEMPLATE = "app/app.html.jinja"


def kinds_shown(viewer: Viewer) -> list[str]:
    """Maps that can be chosen."""
    return [NONE, *(kind.replace("_", " ") for kind in viewer.kinds)]


def first_kind(kinds: list[str]) -> str:
    """The map that is shown where none was chosen."""
    return next((kind for kind in ("gradient attention", "grad cam") if kind in kinds), NONE)


def form_page(viewer: Viewer) -> str:
    """The page that takes a picture."""
    kinds = kinds_shown(viewer)
    shown = {"names": viewer.names, "facts": viewer.facts, "limit": viewer.limit, "examples": viewer.examples}
    return render_page(TEMPLATE, (), answers=None, kinds=kinds, first=first_kind(kinds), **shown)


def answer_page(viewer: Viewer, content: bytes, name: str, kind: str) -> str:
    """Predictions of every model for the bytes of a picture. Raises `ValueError`, one sentence, where it is none."""
    if kind not in kinds_shown(viewer):
        raise ValueError(f"there is no map {readable(kind[:40])!r}; choose one of the list")
    return _answers(viewer, picture_of(content, name), kind)


def example_page(viewer: Viewer, number: int) -> str:
    """Predictions of every model for one of the examples."""
    image, truth = viewer.examples[number]
    return _answers(viewer, image, first_kind(kinds_shown(viewer)), truth)


def _answers(viewer: Viewer, image: Image.Image, kind: str, truth: str = "") -> str:
    answers = viewer.look(image, None if kind == NONE else kind.replace(" ", "_"))
    labels = {answer.label for answer in answers}
    said = answers[0].label if len(labels) == 1 else "; ".join(f"{a.name} predicts {a.label}" for a in answers)
    return render_page(TEMPLATE, (), names=viewer.names, answers=answers, said=said, truth=truth, keep=KEEP, kind=kind)
