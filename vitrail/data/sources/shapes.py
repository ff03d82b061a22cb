"""`synthetic:shapes`: unlimited colour pictures of one textured shape on clutter, made as they are read.

A picture is a function of (seed, index) alone: raising `n` adds pictures and changes none. Its fine label is texture
and shape (`striped star`), its coarse label the group of shapes (`pointed`), and its box encloses the shape. Colours
are drawn without regard to the label and all shapes have the same expected area, so that mean colour tells nothing: the
outline and the pattern inside must be seen.

How hard it is: a plain ViT (6 blocks of width 128, patches of 8, flips and quarter turns, one seed) is right for 49 %
of 250 test pictures of 12 classes after 60 epochs on 2,000 pictures of 64 pixels, and for 90 % of 2,500 after 20 epochs
on 20,000.

Of every ten consecutive indices eight are train, one val and one test, so that splits are disjoint by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.counter import bits, uniform
from vitrail.data.dataset import DataSet, Location, Source, Split, stacked, with_finest

OPTIONS = {"n": 2000, "seed": 0, "size": 64, "classes": 12}
GROUPS = {"round": ("disc", "ring"), "blocky": ("square", "cross"), "pointed": ("triangle", "star")}
SHAPES = tuple(shape for shapes in GROUPS.values() for shape in shapes)
TEXTURES = ("plain", "striped", "checked")
CLASSES = tuple(f"{texture} {shape}" for texture in TEXTURES for shape in SHAPES)

Floats = NDArray[np.float64]
Pixels = NDArray[np.float32]

_PLACES = {"train": range(8), "val": range(8, 9), "test": range(9, 10)}  # of every ten indices
_LABEL, _GEOMETRY = 1, 2  # independent streams of draws
_HOLE = 0.55  # radius of a ring's hole, of its own radius
_REACH = 1.56  # the farthest corner of any shape, in radii of the disc of equal area
_ANGLES = 720  # resolution of an outline
_PERIOD = 0.11  # of stripes and checks, in image sides
_LINES = 4  # strokes of clutter


@dataclass(frozen=True)
class ShapesReader:
    """Draws picture number i."""

    seed: int
    size: int
    classes: int

    def __call__(self, index: int) -> Image.Image:
        return Image.fromarray(render(self.seed, index, self.size, self.classes))


def open_shapes(location: Location) -> DataSet:
    """`n` pictures in all, `size` pixels wide, of the first `classes` kinds (6: plain shapes only)."""
    uri, values = location.uri, location.whole_numbers(OPTIONS)
    n, seed, size, classes = values.values()
    for name, low, high in (("n", 20, 2**40), ("seed", 0, 2**63), ("size", 8, 4096), ("classes", 2, len(CLASSES))):
        if not low <= values[name] <= high:
            raise ValueError(f"{uri}: {name} must be between {low} and {high}, not {values[name]}")
    reader = ShapesReader(seed, size, classes)
    names = CLASSES[:classes]
    groups = tuple(g for g, shapes in GROUPS.items() if any(name.split()[1] in shapes for name in names))
    group_of = np.array([next(i for i, g in enumerate(groups) if n.split()[1] in GROUPS[g]) for n in names])
    splits = {}
    for split, places in _PLACES.items():
        index = np.arange(n)
        index = index[np.isin(index % 10, tuple(places))]
        labels = label_of(seed, index, classes)
        keys, levels = [f"shape/{i}" for i in index.tolist()], stacked(labels, [group_of[labels]])
        splits[split] = Split(split, reader, index, keys, labels, levels, boxes_of(seed, index, size, classes))
    return DataSet(uri, names, splits, with_finest(names, False, {"coarse": groups}))


SOURCE = Source(
    {"synthetic:shapes": "coloured shapes on clutter, with boxes; ?n=2000&size=64&seed=0"}, open_shapes, options=OPTIONS
)


def label_of(seed: int, index: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """[images] the class of each picture: every run of `classes` pictures of a split holds each class once."""
    tens, digit = index // 10, index % 10
    order = np.where(digit < 8, tens * 8 + digit, tens)  # position within the split
    split = np.where(digit < 8, 0, digit)
    keys = bits(seed, _LABEL, split[:, None], (order // classes)[:, None], np.arange(classes))
    return np.argsort(keys, axis=1)[np.arange(len(index)), order % classes]


def boxes_of(seed: int, index: NDArray[np.int64], size: int, classes: int) -> NDArray[np.int64]:
    """[images, 4] left, top, right, bottom in pixels (right and bottom excluded)."""
    shapes = label_of(seed, index, classes) % len(SHAPES)
    centre, radius, turn = _geometry(seed, index)
    boxes = np.empty((len(index), 4), np.int64)
    for rows in np.array_split(np.arange(len(index)), len(index) // 10_000 + 1):
        for shape, name in enumerate(SHAPES):
            chosen = rows[shapes[rows] == shape]
            cos, sin = np.cos(turn[chosen])[:, None], np.sin(turn[chosen])[:, None]
            x, y = polygon(name).T
            corners = np.stack([cos * x - sin * y, sin * x + cos * y], -1)  # [images, corners, 2]
            corners = centre[chosen, None] + corners * radius[chosen, None, None]
            boxes[chosen, :2] = np.floor(corners.min(1) * size)
            boxes[chosen, 2:] = np.ceil(corners.max(1) * size)
    return np.clip(boxes, 0, size)


def render(seed: int, index: int, size: int, classes: int) -> NDArray[np.uint8]:
    """[size, size, 3] picture number `index`."""
    numbers = np.array([index])
    label = int(label_of(seed, numbers, classes)[0])
    texture, shape = TEXTURES[label // len(SHAPES)], SHAPES[label % len(SHAPES)]
    centre, radius, turn = (part[0] for part in _geometry(seed, numbers))
    look = np.random.Generator(np.random.Philox(key=[seed, index]))  # colours and clutter, of this picture only
    x, y = _grid(size)
    picture = _background(look, x, y)

    dx, dy = x - np.float32(centre[0]), y - np.float32(centre[1])
    cos, sin = np.float32(np.cos(turn)), np.float32(np.sin(turn))
    along, across = cos * dx + sin * dy, cos * dy - sin * dx
    distance = np.hypot(along, across)
    edge = _edge(shape, along, across) * np.float32(radius)
    cover = np.clip((edge - distance) * size + 0.5, 0, 1)  # soft over one pixel
    if shape == "ring":
        cover *= np.clip((distance - _HOLE * edge) * size + 0.5, 0, 1)

    first, second = _object_colours(look)
    paint: Pixels = np.broadcast_to(first, picture.shape)
    if texture != "plain":
        wave = np.sin(along * np.float32(2 * np.pi / _PERIOD))
        if texture == "checked":
            wave *= np.sin(across * np.float32(2 * np.pi / _PERIOD))
        paint = np.where(wave[..., None] > 0, second, first)
    picture += cover[..., None] * (paint - picture)
    picture += np.float32(0.1) * (look.random(picture.shape, dtype=np.float32) - np.float32(0.5))
    return np.clip(picture * 255 + 0.5, 0, 255).astype(np.uint8)


@cache
def polygon(shape: str) -> Floats:
    """[corners, 2] outline around the origin, of area pi (a ring's without its hole)."""
    if shape == "cross":
        half, arm = 1.0, 0.36
        right = [(half, -arm), (half, arm), (arm, arm)]
        corners = np.array([_quarter_turns(point, turns) for turns in range(4) for point in right])
    else:
        count = {"disc": 64, "ring": 64, "square": 4, "triangle": 3, "star": 10}[shape]
        angles = 2 * np.pi * np.arange(count) / count
        radii = np.where(np.arange(count) % 2, 0.45, 1.0) if shape == "star" else np.ones(count)
        corners = np.stack([radii * np.cos(angles), radii * np.sin(angles)], 1)
    following = np.roll(corners, -1, 0)
    area = 0.5 * float(np.sum(corners[:, 0] * following[:, 1] - corners[:, 1] * following[:, 0]))
    if shape == "ring":
        area *= 1 - _HOLE**2
    scaled: Floats = corners * np.sqrt(np.pi / area)
    return scaled


def _quarter_turns(point: tuple[float, float], turns: int) -> tuple[float, float]:
    x, y = point
    for _ in range(turns):
        x, y = -y, x
    return x, y


@cache
def _outline(shape: str) -> Pixels:
    """[angles] distance from the centre to the outline, for directions from -pi to pi.

    Every shape is star-shaped about its centre, so the ray in a direction leaves it once: where it crosses an edge.
    """
    start = polygon(shape)
    edge = np.roll(start, -1, 0) - start
    angles = np.linspace(-np.pi, np.pi, _ANGLES + 1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    crossing = cos * edge[:, 1] - sin * edge[:, 0]  # [angles, edges]
    crossing[np.abs(crossing) < 1e-9] = 1e-9
    distance = (start[:, 0] * edge[:, 1] - start[:, 1] * edge[:, 0]) / crossing
    place = (start[:, 0] * sin - start[:, 1] * cos) / crossing  # along the edge, 0 to 1
    hit = (distance > 0) & (place > -1e-6) & (place < 1 + 1e-6)
    return np.where(hit, distance, np.inf).min(1).astype(np.float32)


def _edge(shape: str, along: Pixels, across: Pixels) -> Pixels:
    """[size, size] radius of the outline in the direction of each pixel."""
    steps = (np.arctan2(across, along) + np.float32(np.pi)) * np.float32(_ANGLES / (2 * np.pi))
    return _outline(shape)[np.rint(steps).astype(np.int32)]


def _geometry(seed: int, index: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
    """Centre [images, 2] and radius [images] in image sides, rotation [images] in radians; all inside the picture."""
    draws = uniform(seed, _GEOMETRY, index[:, None], np.arange(4))
    radius = 0.15 + 0.08 * draws[:, 0]
    margin = _REACH * radius[:, None]
    return margin + (1 - 2 * margin) * draws[:, 1:3], radius, 2 * np.pi * draws[:, 3]


@cache
def _grid(size: int) -> tuple[Pixels, Pixels]:
    """x and y of every pixel's middle, [size, size] in image sides."""
    middle = ((np.arange(size) + 0.5) / size).astype(np.float32)
    return np.broadcast_to(middle, (size, size)), np.broadcast_to(middle[:, None], (size, size))


@cache
def _tent(size: int, cells: int) -> Pixels:
    """[size, cells] weights of linear interpolation from cell corners to pixels."""
    at = np.linspace(0, cells - 1, size)[:, None]
    return np.clip(1 - np.abs(at - np.arange(cells)), 0, 1).astype(np.float32)


def _background(look: np.random.Generator, x: Pixels, y: Pixels) -> Pixels:
    """[size, size, 3]: a coarse random field of colour, crossed by strokes."""
    size, cells = len(x), 5
    weights = _tent(size, cells)
    field = 0.35 * look.random(3, dtype=np.float32) + 0.3 * look.random((cells, cells, 3), dtype=np.float32)
    columns = (weights @ field.reshape(cells, -1).astype(np.float32)).reshape(size, cells, 3)
    picture: Pixels = weights @ columns  # [size, size, 3]
    for px, py, angle, width, length, *colour in look.random((_LINES, 8), dtype=np.float32):
        cos, sin = np.cos(2 * np.pi * angle), np.sin(2 * np.pi * angle)
        dx, dy = x - px, y - py
        beside, along = np.abs(cos * dx + sin * dy), np.abs(cos * dy - sin * dx)
        picture[(beside < 0.01 + 0.02 * width) & (along < 0.1 + 0.2 * length)] = colour
    return picture


def _object_colours(look: np.random.Generator) -> tuple[Pixels, Pixels]:
    """Two bright colours that can be told from each other, otherwise uniform; the background is dim."""
    first, second = look.random((2, 3), dtype=np.float32)
    if np.abs(second - first).max() < 0.5:
        second = (second + np.float32(0.5)) % 1
    return _bright(first), _bright(second)


def _bright(colour: Pixels) -> Pixels:
    """The colour with its strongest channel at full strength."""
    return colour / max(float(colour.max()), 0.2)
