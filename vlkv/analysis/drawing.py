"""Draws which patches of an image several methods keep, for slides and papers. Needs only PIL."""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, UInt8
from PIL import Image, ImageDraw, ImageFont, ImageOps

from vlkv.analysis.survival import held, on_grid
from vlkv.cache.pool import PackedCache
from vlkv.compression.checking import require_policy
from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.prefill import prefill
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs, single_key
from vlkv.processing.images import Picture, open_image

_SIDE, _GAP, _COLUMNS = 340, 30, 5  # pixels: longer side of a panel, gap between panels; most panels in a row
_TITLE, _TEXT, _SMALL = 40, 28, 23  # font sizes
_INK, _GREY, _GOOD, _BAD = (28, 30, 36), (110, 114, 124), (16, 122, 70), (190, 36, 44)
_FOG = np.array([140, 146, 158])  # colour that covers a patch which no layer and head keeps
_COVERED = 0.75  # how much of such a patch it covers
_FRAME = (0, 92, 230)


@jax.jit
def _compressed(params: Model, inputs: Inputs, policy: Policy, key: Key[Array, ""] | None) -> PackedCache:
    return prefill(params, inputs, policy, sampling=Greedy(max_new_tokens=1), key=key)[0]


def draw_survivors(
    params: Model,
    inputs: Inputs | Mapping[str, Any],
    image: Picture,
    plan: Sequence[Policy] | Mapping[str, Policy],
    *,
    fit: Literal["crop", "stretch", "pad"] = "crop",
    number: int = 0,
    key: PRNGKeyArray | None = None,
    question: str = "",
    evidence: Sequence[int] = (),
) -> Image.Image:
    """Draws which patches of an image each policy keeps after prefill: one panel per policy, over the image.

        picture = vlkv.draw_survivors(params, inputs, "page.png", [policies.SnapKV(keep=0.1), policies.H2O(keep=0.1)])
        picture.save("kept.png")

    The fewer layers and key heads keep a patch, the more grey covers it. A merged entry counts as the patch that it was
    merged into.

    Args:
        params: the model.
        inputs: one question, from the processor.
        image: the image in the question.
        plan: policies, or a mapping from panel titles to policies.
        fit: how the processor fitted the image to the patch grid. "crop": it cut out the middle (CLIP); "stretch": it
            resized the image (SigLIP); "pad": it added a border (`load(..., layout="pad")`).
        number: index of the grid in `Inputs.grid`, if there are several images, views or tiles.
        key: for random policies.
        question: written under the title.
        evidence: what the answer needs, as indices of vision tokens, counted over all images. The patches are framed,
            and each panel says how much of them is kept.

    Raises:
        InputError: the plan is empty, or there is more than one question, no such image, or no such vision token.
    """
    inputs = Inputs.of(inputs, params.config)
    grid, vision = np.asarray(inputs.grid)[0], np.flatnonzero(np.asarray(inputs.is_vision & inputs.valid)[0])
    sizes = [picture.shape for picture in on_grid(np.zeros(len(grid)), grid)]
    if not 0 <= number < len(sizes):
        raise InputError(f"number={number}: the inputs have {len(sizes)} images on a grid, counted from 0")
    if any(not 0 <= token < len(vision) for token in evidence):
        raise InputError(f"evidence: the inputs have {len(vision)} vision tokens, counted from 0")
    needed = vision[list(evidence)]
    frame = grid[needed][grid[needed, 0] == number][:, 1:]
    base = fitted(open_image(image), sizes[number], fit)
    panels = []
    for name, policy, cache in compressed(params, inputs, plan, key):
        share = np.asarray(held(cache, len(grid)))[0]  # [L, T]
        recall = f", {share[:, needed].mean():.0%} of evidence" if evidence else " vision tokens"
        note = f"{share[:, vision].sum(axis=1).mean():.0f} of {len(vision)}{recall}"
        size = f"{cache.bytes / 2**20:.2f} MiB, scope {policy.scope}"
        kept = on_grid(share.mean(axis=0), grid)[number]
        panels.append(Panel(name, size, "", note, kept, frame if len(frame) else None))
    subtitle = f"Question: {question}" if question else "mean over layers and key heads"
    return draw("Image patches in the compressed cache", base, panels, subtitle)


def compressed(
    params: Model, inputs: Inputs, plan: Sequence[Policy] | Mapping[str, Policy], key: PRNGKeyArray | None
) -> Iterator[tuple[str, Policy, PackedCache]]:
    """Title, policy and cache after prefill for each policy of a plan. Arguments are as in `draw_survivors`."""
    if isinstance(plan, Policy):
        raise InputError("plan is one policy: give a list of policies, such as [policy]")
    named, key = plan if isinstance(plan, Mapping) else _names(plan), single_key(key)
    if not named:
        raise InputError("plan is empty: give at least one policy")
    if inputs.tokens.shape[0] != 1:
        raise InputError(f"inputs contain {inputs.tokens.shape[0]} questions: give only one")
    policy_key = None if key is None else jax.random.split(key)[0]  # the same key as in `generate`
    for name, policy in named.items():
        yield name, policy, _compressed(params, inputs, policy, policy_key)


def _names(plan: Sequence[Policy]) -> dict[str, Policy]:
    """A name for each policy: its class names and its keep, with a number if the name occurs more than once."""
    named: dict[str, Policy] = {}
    for policy in plan:
        require_policy(policy)
        share = "" if policy.keep is None else f" {policy.keep:.0%}"
        parts = dict.fromkeys(type(part).__name__ for part in slots_of(policy).owners)
        name = f"{' + '.join(parts)}{share}"
        same = sum(other.startswith(name) for other in named)
        named[f"{name} ({same + 1})" if same else name] = policy
    return named


def fitted(image: Image.Image, shape: tuple[int, ...], fit: str) -> Image.Image:
    """The image fitted to a grid of `shape` patches (rows, columns); `fit` is as in `draw_survivors`."""
    rows, columns = shape
    scale = max(1, max(image.size) // max(rows, columns))
    size = (columns * scale, rows * scale)
    if fit == "crop":
        return ImageOps.fit(image, size)
    if fit == "pad":
        return ImageOps.pad(image, size, color=(127, 127, 127))
    if fit != "stretch":
        raise InputError(f"fit={fit!r} must be one of crop, stretch and pad")
    return image.resize(size)


class Panel(NamedTuple):
    """The answer of one method, and the patches that it keeps."""

    name: str
    answer: str
    verdict: str  # "right", "wrong", "as full", "differs"; "" if the answer is not judged
    note: str
    kept: Float[np.ndarray, "h w"] | None  # share of the layers and heads that keep each patch; None: all of them
    frame: Int[np.ndarray, "n 2"] | None  # rows and columns of the patches that the answer needs


def draw(title: str, image: Image.Image, panels: list[Panel], subtitle: str) -> Image.Image:
    """Draws the image once per method, from left to right and from top to bottom, with title and legend."""
    scale = _SIDE / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    rows = -(-len(panels) // _COLUMNS)
    columns = -(-len(panels) // rows)  # rows of equal length
    top, text = 2 * _GAP + _TITLE + _TEXT, _TEXT + 2 * _SMALL + 26
    cell_width = max(width, _SIDE)
    legend = _legend(any(panel.frame is not None for panel in panels))
    size = max(columns * (cell_width + _GAP), legend.width + _GAP), rows * (height + text + _GAP)
    sheet = Image.new("RGB", (_GAP + size[0], top + size[1] + _GAP + 10), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((_GAP, _GAP // 2), title, fill=_INK, font=font_for(title, _TITLE))
    pen.text((_GAP, _GAP // 2 + _TITLE + 14), subtitle, fill=_GREY, font=font_for(subtitle, _TEXT))
    base = image.convert("RGB").resize((width, height), Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX)
    for i, panel in enumerate(panels):
        x, y = _GAP + i % columns * (cell_width + _GAP), top + i // columns * (height + text + _GAP)
        _panel(sheet, pen, base, panel, x, y, text)
    sheet.paste(legend, (_GAP, sheet.height - _GAP - 20))
    return sheet


def _panel(
    sheet: Image.Image, pen: ImageDraw.ImageDraw, base: Image.Image, panel: Panel, x: int, y: int, text: int
) -> None:
    width, height = base.size
    colour = {"right": _GOOD, "as full": _GOOD, "": _INK}.get(panel.verdict, _BAD)
    _line(pen, (x, y), panel.name, _INK, _TEXT)
    _line(pen, (x, y + _TEXT + 8), panel.answer, colour, _SMALL, end=f"   {panel.verdict}")
    _line(pen, (x, y + _TEXT + _SMALL + 14), panel.note, _GREY, _SMALL)
    top = y + text
    sheet.paste(base if panel.kept is None else overlaid(base, panel.kept), (x, top))
    pen.rectangle((x - 1, top - 1, x + width, top + height), outline=(170, 174, 182))
    if panel.frame is not None:
        h, w = (24, 24) if panel.kept is None else panel.kept.shape
        (low_y, low_x), (high_y, high_x) = panel.frame.min(axis=0), panel.frame.max(axis=0) + 1
        box = (x + low_x * width / w - 4, top + low_y * height / h - 4,
               x + high_x * width / w + 3, top + high_y * height / h + 3)  # fmt: skip
        pen.rectangle(box, outline=_FRAME, width=3)


def _line(
    pen: ImageDraw.ImageDraw, at: tuple[int, int], text: str, colour: tuple[int, int, int], size: int, end: str = ""
) -> None:
    """Writes one line over a panel. A text that is wider than the panel is cut; `end` is always written."""
    text = " ".join(text.split())
    font = font_for(text + end, size)
    shorter = (f"{text[:n]}...{end}" for n in range(len(text) - 1, -1, -1))
    line = next((x for x in (text + end, *shorter) if pen.textlength(x, font) <= _SIDE), end)
    pen.text(at, line, fill=colour, font=font)


def overlaid(base: Image.Image, kept: Float[np.ndarray, "h w"]) -> Image.Image:
    """The image as it is where patches are kept, and covered with grey elsewhere."""
    share = Image.fromarray(np.nan_to_num(kept).astype(np.float32)).resize(base.size, Image.Resampling.NEAREST)
    return Image.fromarray(_dimmed(np.asarray(base.convert("RGB"), np.float32), np.asarray(share)))


def _dimmed(pixels: Float[np.ndarray, "h w 3"], share: Float[np.ndarray, "h w"]) -> UInt8[np.ndarray, "h w 3"]:
    """Pixels in colour where all layers and heads keep them (share 1); low in contrast and colourless at share 0."""
    evicted = (1 - _COVERED) * pixels.mean(axis=-1, keepdims=True) + _COVERED * _FOG
    return np.clip(evicted + np.sqrt(share)[..., None] * (pixels - evicted), 0, 255).astype(np.uint8)


def outlined(base: Image.Image, owner: Int[np.ndarray, "h w"]) -> Image.Image:
    """The image, which has the grid's aspect ratio, with each group of patches in its mean colour and outlined.

    `owner` is the group of each patch, as any number.
    """
    rows, columns = owner.shape
    side = max(8, _SIDE // max(rows, columns))
    resample = Image.Resampling.NEAREST if base.width < columns * side else Image.Resampling.BOX
    pixels = np.asarray(base.convert("RGB").resize((columns * side, rows * side), resample), np.float32)
    patches = pixels.reshape(rows, side, columns, side, 3)
    _, group = np.unique(owner, return_inverse=True)
    group = group.reshape(owner.shape)
    for number in np.flatnonzero(np.bincount(group.ravel()) > 1):
        y, x = np.nonzero(group == number)
        patches[y, :, x] = patches[y, :, x].mean(axis=(0, 1, 2))
    output, n = patches.reshape(rows * side, columns * side, 3), max(1, side // 14)
    of_pixel = np.pad(group.repeat(side, 0).repeat(side, 1), n, mode="edge")
    # A line covers the pixels whose neighbours at distance n, above and below or left and right, differ in group.
    line = (of_pixel[2 * n :, n:-n] != of_pixel[: -2 * n, n:-n]) | (of_pixel[n:-n, 2 * n :] != of_pixel[n:-n, : -2 * n])
    output[line] = _FRAME
    return Image.fromarray(output.astype(np.uint8))


def _legend(framed: bool) -> Image.Image:
    words, evidence, bar = "patch kept by none ... all of the layers and heads", "evidence: what the answer needs", 220
    font = font_for("", _SMALL)
    first, second = (round(font.getlength(text)) for text in (words, evidence))
    legend = Image.new("RGB", (bar + first + second + 98 if framed else bar + first + 16, 32), "white")
    pen = ImageDraw.Draw(legend)
    stripes = np.where(np.indices((22, bar)).sum(axis=0)[..., None] % 24 < 12, (214, 128, 36), 255)
    legend.paste(Image.fromarray(_dimmed(stripes.astype(np.float32), np.tile(np.linspace(0, 1, bar), (22, 1)))), (0, 6))
    pen.rectangle((0, 6, bar, 28), outline=(170, 174, 182))
    pen.text((bar + 12, 2), words, fill=_INK, font=font)
    if framed:
        x = bar + 48 + first
        pen.rectangle((x, 6, x + 34, 28), outline=_FRAME, width=3)
        pen.text((x + 46, 2), evidence, fill=_INK, font=font)
    return legend


def font_for(text: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font that Pillow contains, which has ASCII only. For other letters that of matplotlib, if it is installed."""
    plots = None if text.isascii() else importlib.util.find_spec("matplotlib")
    if plots is None or plots.origin is None:
        return ImageFont.load_default(size=size)
    return ImageFont.truetype(Path(plots.origin).parent / "mpl-data/fonts/ttf/DejaVuSans.ttf", size)
