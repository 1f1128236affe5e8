"""Draws which tokens of a text several methods keep: a picture, or an HTML page, which can show all scripts."""

import dataclasses
import html
import itertools
import math
import os
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray
from PIL import Image, ImageDraw

from vlkv.analysis.drawing import compressed, font_for
from vlkv.analysis.survival import held_by_head
from vlkv.cache.pool import PackedCache
from vlkv.compression.policy import Policy
from vlkv.families import Model
from vlkv.files import replacing
from vlkv.inputs import Inputs
from vlkv.processing import Processor

TITLE = "Text in the compressed cache"
_LEGEND = "token kept by none ... all of the layers and heads"
_INK, _GREY, _SHADE = (28, 30, 36), (112, 114, 122), np.array([255, 138, 0])
_WIDTH, _GAP, _LINE = 720, 30, 30  # pixels: a panel, between panels, a line of text
_COLUMNS = 3  # most panels in a row of the picture
_LINES = 300  # most lines of a panel in the picture
_BREAK = 12  # width of a line break's mark in the picture
_held = jax.jit(held_by_head, static_argnums=1)

_PAGE = Path(__file__).with_name("kept_text.html")


@dataclasses.dataclass(frozen=True)
class KeptText:
    """The text of a prompt, and the share of the layers and key heads that keep each piece of it.

    A piece is a token, several tokens that are one character together, or a run of vision tokens.
    """

    pieces: tuple[str, ...]
    kept: Mapping[str, Float[np.ndarray, " n"]]  # by panel title
    notes: Mapping[str, str]  # second line of each panel
    heads: int  # layers with full attention times key heads

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the HTML page if the file's name ends in .html, otherwise the picture."""
        with replacing(Path(file)) as partial:
            if Path(file).suffix == ".html":
                partial.write_text(self.html(), encoding="utf-8")
            else:
                self.picture().save(partial, format=Image.registered_extensions().get(Path(file).suffix.lower(), "PNG"))

    def html(self) -> str:
        """A page without references to other files. A token's tooltip says how many layers and heads keep it."""
        panels = "\n".join(
            f"<div><h2>{html.escape(name)}</h2><p>{html.escape(self.notes[name])}</p>"
            f'<p class="text">{"".join(map(self._span, self.pieces, shares.tolist()))}</p></div>'
            for name, shares in self.kept.items()
        )
        colours = ", ".join(_css(share) for share in np.linspace(0, 1, 9))
        page = string.Template(_PAGE.read_text(encoding="utf-8"))
        return page.substitute(title=TITLE, legend=_LEGEND, colours=colours, panels=panels)

    def _repr_html_(self) -> str:
        _, _, after = self.html().partition("<body")
        return after.partition(">\n")[2].partition("\n</body>")[0]

    def _span(self, piece: str, share: float) -> str:
        ink = "; color: #707278" if share == 0 else ""
        text = html.escape(piece).replace("\n", "\u21b5\n")
        about = f"{share * self.heads:.3g} of {self.heads}"
        return f'<span style="background: {_css(share)}{ink}" title="{about}">{text}</span>'

    def picture(self) -> Image.Image:
        """An RGB picture. It ends after 300 lines of text, and its font has no Asian scripts: the page has all."""
        font = font_for("".join(self.pieces), 22)
        lines = _lines(self.pieces, font)
        hidden = 0 if len(lines) <= _LINES else len(self.pieces) - lines[_LINES][0][0]
        lines = lines[:_LINES]
        rows = -(-len(self.kept) // _COLUMNS)
        columns = -(-len(self.kept) // rows)  # rows of equal length
        height = 80 + _LINE * (len(lines) + bool(hidden)) + _GAP
        sheet = Image.new("RGB", (_GAP + columns * (_WIDTH + _GAP), 110 + rows * height), "white")
        pen = ImageDraw.Draw(sheet)
        pen.text((_GAP, 18), TITLE, fill=_INK, font=font_for("", 34))
        for step in range(220):
            pen.line((_GAP + step, 76, _GAP + step, 98), fill=_shade(step / 219))
        pen.rectangle((_GAP, 76, _GAP + 220, 98), outline=(170, 174, 182))
        pen.text((_GAP + 232, 72), _LEGEND, fill=_INK, font=font_for("", 22))
        for i, (name, shares) in enumerate(self.kept.items()):
            x, y = _GAP + i % columns * (_WIDTH + _GAP), 122 + i // columns * height
            pen.text((x, y), name, fill=_INK, font=font_for(name, 26))
            pen.text((x, y + 34), self.notes[name], fill=_GREY, font=font_for("", 20))
            for row, line in enumerate(lines):
                top = y + 70 + row * _LINE
                for number, left, right, text in line:
                    share = shares[number]
                    pen.rectangle((x + left, top, x + right - 2, top + _LINE - 5), fill=_shade(share))
                    pen.text((x + left, top), text, fill=_INK if share > 0 else _GREY, font=font)
            if hidden:
                end = f"... and {hidden} more tokens, which the HTML page shows"
                pen.text((x, y + 70 + len(lines) * _LINE), end, fill=_GREY, font=font_for("", 20))
        return sheet


def draw_text_survivors(
    params: Model,
    inputs: Inputs | Mapping[str, Any],
    processor: Processor,
    plan: Sequence[Policy] | Mapping[str, Policy],
    *,
    key: PRNGKeyArray | None = None,
) -> KeptText:
    """Draws which tokens of a prompt's text each policy keeps after prefill: the text once per policy.

        kept = vlkv.draw_text_survivors(params, inputs, processor, [policies.SnapKV(keep=0.2), policies.H2O(keep=0.2)])
        kept.save("kept.html")  # or kept.png; a notebook shows it as it is

    A stronger orange means that more layers and key heads keep the token, grey letters on white that none does. Layers
    with a sliding window do not count, because policies do not change them. A merged entry counts as the token that it
    was merged into. An image is one piece, shaded by the mean of its vision tokens.

    Args:
        params: the model.
        inputs: one question, from the processor.
        processor: gives the tokens' texts.
        plan: policies, or a mapping from panel titles to policies.
        key: for random policies.

    Raises:
        InputError: the plan is empty, or there is more than one question.
    """
    inputs = Inputs.of(inputs, params.config)
    return kept_text(processor, inputs, compressed(params, inputs, plan, key))


def kept_text(processor: Processor, inputs: Inputs, caches: Iterable[tuple[str, Policy, PackedCache]]) -> KeptText:
    """The pieces of one prompt, and the share of layers and key heads of each cache (title, policy) that keep them."""
    pieces, tokens = zip(*_pieces(processor, inputs), strict=True)
    kept, notes, heads = {}, {}, 0
    for name, policy, cache in caches:
        share = np.asarray(_held(cache, inputs.tokens.shape[1]))[0].mean(axis=(0, 1))  # [T]
        kept[name] = np.array([share[piece].mean() for piece in tokens])
        count = f"{share.sum():.0f} of {np.sum(inputs.valid)} tokens"
        notes[name] = f"{count}, {cache.bytes / 2**20:.2f} MiB, scope {policy.scope}"
        heads = cache.extent.shape[0] * cache.extent.shape[2]
    return KeptText(pieces, kept, notes, heads)


def _pieces(processor: Processor, inputs: Inputs) -> Iterator[tuple[str, Int[np.ndarray, " n"]]]:
    """The texts of a prompt's pieces, and the indices of their tokens."""
    ids, is_vision = np.asarray(inputs.tokens)[0], np.asarray(inputs.is_vision)[0]
    valid = np.flatnonzero(np.asarray(inputs.valid)[0])
    for run in np.split(valid, np.flatnonzero(np.diff(is_vision[valid])) + 1):
        if is_vision[run[0]]:
            yield f"[{len(run)} vision tokens]", run
            continue
        *texts, _ = processor.tokenizer.increments(ids[run].tolist(), skip=False)
        ends = [i + 1 for i, text in enumerate(texts) if text]  # of complete characters
        for begin, end in itertools.pairwise([0, *ends]):
            yield texts[end - 1], run[begin:end]


def _lines(pieces: Sequence[str], font: Any) -> list[list[tuple[int, int, int, str]]]:
    """Lines of text: for each part of a line its piece, its left and right side in pixels, and its text.

    A line ends at a line break, or before a word that is too long for it, or within a word that is longer than a line.
    """
    parts = [(i, part) for i, piece in enumerate(pieces) for part in re.findall(r"\n|[^\n]{1,40}", piece)]
    widths = [_BREAK if part == "\n" else math.ceil(font.getlength(part)) for _, part in parts]
    lines: list[list[tuple[int, int, int, str]]] = [[]]
    x = 0
    for n, ((i, part), width) in enumerate(zip(parts, widths, strict=True)):
        begins = n == 0 or part[0].isspace() or parts[n - 1][1][-1].isspace()
        word = width
        for (_, later), next_width in zip(parts[n + 1 :], widths[n + 1 :], strict=True):
            if not begins or later[0].isspace() or word > _WIDTH:
                break
            word += next_width
        if x and (x + width > _WIDTH or (begins and x + word > _WIDTH >= word)):
            lines.append([])
            x = 0
        lines[-1].append((i, x, x + width, "" if part == "\n" else part))
        x += width
        if part == "\n":
            lines.append([])
            x = 0
    return lines


def _shade(share: float) -> tuple[int, int, int]:
    """White for 0, orange for 1; the root makes small shares visible."""
    red, green, blue = np.rint(255 + np.sqrt(share) * (_SHADE - 255)).astype(int).tolist()
    return red, green, blue


def _css(share: float) -> str:
    return "#{:02x}{:02x}{:02x}".format(*_shade(share))
