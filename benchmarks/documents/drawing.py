"""Draws rows of text as a page, in the fonts that matplotlib ships. kinds.py writes the rows."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFilter, ImageFont

_FONTS = (  # regular and bold
    ("DejaVuSans", "DejaVuSans-Bold"), ("DejaVuSerif", "DejaVuSerif-Bold"), ("DejaVuSansMono", "DejaVuSansMono-Bold"),
    ("STIXGeneral", "STIXGeneralBol"), ("cmr10", "cmb10"), ("cmss10", "cmss10"), ("cmtt10", "cmtt10"),
)  # fmt: skip
_GAP = 0.7  # smallest distance between two texts of a row, in heights of the font


class Cell(NamedTuple):
    """A text. `x` is from 0, the left margin, to 1, the right margin; `y` from 0, the top of the row, to 1."""

    text: str
    x: float
    align: str = "l"  # which part of the text is at x: "l" left end, "m" middle, "r" right end
    bold: bool = False
    size: float = 1.0  # of the font
    y: float = 0.5


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of texts, with rules, frames and a background. `spans` are from the left to the right end of each."""

    cells: tuple[Cell, ...] = ()
    height: float = 1.0  # in lines
    above: bool = False  # a rule above the row
    under: tuple[tuple[float, float], ...] = ()  # spans of rules under it
    frames: tuple[tuple[float, float], ...] = ()  # spans of frames around it
    shade: float = 0.0  # of the background: 0 paper, 1 ink; texts on a dark background are white


def draw(
    rows: tuple[Row, ...], size: int, lines: int, width: float, rng: np.random.Generator
) -> UInt8[np.ndarray, "size size"]:
    """A square page with the paper in its middle.

    Args:
        rows: from the top. Their heights add up to `lines` at most.
        size: pixels per side.
        lines: number of lines that fit on the page.
        width: of the paper, as a share of the page.
        rng: for the font, grey levels, rotation and noise.
    """
    margin, line = size * 0.05, size * 0.92 / lines
    font, ink, paper = _FONTS[rng.integers(len(_FONTS))], int(rng.integers(0, 60)), int(rng.integers(228, 256))
    left, right = (1 - width) / 2 * size + margin, (1 + width) / 2 * size - margin
    image = Image.new("L", (size, size), int(rng.integers(150, paper - 10)) if width < 1 else paper)
    pen = ImageDraw.Draw(image)
    used = sum(row.height for row in rows) * line
    top = margin * 0.8 + (size * 0.92 - used) * float(rng.uniform(0, 0.5))
    pen.rectangle((left - margin * 0.8, 0 if width == 1 else top - margin * 0.6, right + margin * 0.8,
                   size if width == 1 else top + used + margin * 0.6), fill=paper)  # fmt: skip
    height = line * 0.72
    while height > 5 and not all(_fits(row, font, height, right - left) for row in rows):
        height *= 0.96
    grey = ink + int(rng.integers(0, 90))  # of rules
    for row in rows:
        _draw_row(pen, row, (left, top, right, top + row.height * line), font, height, ink, paper, grey)
        top += row.height * line
    return _worn(image, rng)


def _draw_row(
    pen: ImageDraw.ImageDraw, row: Row, box: tuple[float, float, float, float], font: tuple[str, str], height: float,
    ink: int, paper: int, grey: int,
) -> None:  # fmt: skip
    left, top, right, bottom = box
    pad = (bottom - top) * 0.1

    def at(x: float) -> float:
        return left + x * (right - left)

    if row.shade:
        pen.rectangle((left, top, right, bottom), fill=int(paper + (ink - paper) * row.shade))
    if row.above:
        pen.line((left, top, right, top), fill=grey)
    for begin, end in row.under:
        pen.line((at(begin), bottom, at(end), bottom), fill=grey)
    for begin, end in row.frames:
        pen.rectangle((at(begin), top, at(end), bottom), outline=grey)
    for cell in row.cells:
        y = top + pad + cell.y * (bottom - top - 2 * pad)
        fill = paper if row.shade > 0.5 else ink
        pen.text((at(cell.x), y), cell.text, fill, _font(font[cell.bold], height * cell.size), anchor=f"{cell.align}m")


def _fits(row: Row, font: tuple[str, str], height: float, width: float) -> bool:
    """Whether the texts of a row neither overlap nor leave the paper."""
    for y in {cell.y for cell in row.cells}:
        free = 0.0
        for cell in sorted((cell for cell in row.cells if cell.y == y), key=lambda cell: cell.x):
            length = _font(font[cell.bold], height * cell.size).getlength(cell.text)
            begin = cell.x * width - length * {"l": 0, "m": 0.5, "r": 1}[cell.align]
            if begin < free - 1 or begin + length > width + 1:
                return False
            free = begin + length + _GAP * height
    return True


@cache
def _folder() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@cache
def _font(name: str, height: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_folder() / f"{name}.ttf", height)


def _worn(image: Image.Image, rng: np.random.Generator) -> UInt8[np.ndarray, "size size"]:
    """The page a little rotated, blurred, unevenly lit and noisy."""
    image = image.rotate(float(rng.normal(0, 0.4)), Image.Resampling.BICUBIC, fillcolor=image.getpixel((1, 1)))
    image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 0.45))))
    slope = np.linspace(-1, 1, image.width)
    light = 1 + rng.normal(0, 0.02) * slope[:, None] + rng.normal(0, 0.02) * slope
    pixels = np.asarray(image, np.float32) * light + rng.normal(0, rng.uniform(0, 7), image.size)
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
