"""One measurement of `vlkv inspect`: what it measures, the form of its result, and the mean over several samples.

Where samples differ in length (steps of an answer, tokens of a prompt), each element is the mean over the samples that
are long enough.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image

from vlkv import analysis
from vlkv.analysis.drawing import fitted, overlaid
from vlkv.analysis.text_drawing import KeptText
from vlkv.cache.pool import PackedCache
from vlkv.compression.slots import slots_of
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation import jitted
from vlkv.generation.nan import check_values
from vlkv.generation.prompt import Prompt
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.policies import Policy
from vlkv.processing import Processor
from vlkv.tools.commands.plots import Curves, Maps, Panel

_PICTURES = 8  # most layers drawn as maps
_answer = jax.jit(analysis.answer_of)
_choose = jax.jit(analysis.choose)
_follow = jax.jit(analysis.follow)


class View(NamedTuple):
    """The result of a measurement: all arrays (for JSON), columns of the printed table, and panels of the picture."""

    arrays: dict[str, Any]
    columns: dict[str, np.ndarray]  # all of one length
    panels: list[Panel] | KeptText
    rows: str = "layer"  # what the rows of the table are; layers are counted from 0, others from 1


class Chosen(NamedTuple):
    """`analysis.choose` of one prompt."""

    budgets: np.ndarray  # [L, K]
    scores: np.ndarray  # [L, K, T]
    extra: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """One question to one model, and the policy to measure."""

    params: Model
    inputs: Inputs
    policy: Policy
    key: jax.Array
    new_tokens: int
    images: tuple[Image.Image, ...] = ()  # drawn under maps
    processor: Processor | None = None  # None: only "text" needs it

    def read(self, policy: Policy | None = None) -> Prompt:
        """Prefill of the prompt, reduced by the policy if it reduces prompts; None: not reduced."""
        if policy is None and slots_of(self.policy).reduce is None:
            policy = self.policy  # it may need norms
        prompt: Prompt = jitted.read_prompt(self.params, self.inputs, policy, new_tokens=self.new_tokens, key=self.key)
        check_values(self.params, self.inputs, prompt.logits)
        return prompt

    def fill(self, prompt: Prompt, policy: Policy | None = None) -> PackedCache:
        """The compressed cache of a prompt; None: of the case's policy."""
        return jitted.fill_cache_with(prompt, policy or self.policy, None, new_tokens=self.new_tokens, key=self.key)

    def choose(self, prompt: Prompt, policy: Policy | None = None) -> Chosen:
        """What a policy, or that of the case, would keep of the prompt."""
        chosen = _choose(prompt, policy or self.policy, key=self.key)
        return Chosen(*jax.tree.map(lambda x: np.asarray(x)[0], (chosen.budgets, chosen.scores, chosen.extra)))

    def follow(self, prompt: Prompt, cache: PackedCache, answer: jax.Array) -> analysis.Trace:
        """The trace of an answer's tokens, of which the last one is not decoded."""
        return _follow(self.params, prompt, cache, answer[:, :-1])

    def answer(self, prompt: Prompt, cache: PackedCache) -> tuple[jax.Array, int]:
        """The greedy answer [1, S], padded with -1, and its number of decoding steps."""
        tokens = _answer(self.params, cache, prompt.logits, sampling=Greedy(max_new_tokens=self.new_tokens))
        steps = int((np.asarray(tokens) >= 0).sum()) - 1
        if steps < 1:
            raise InputError("the answer is a single token, which needs no decoding: ask for a longer answer")
        return tokens, steps

    def attention(self) -> tuple[Prompt, jax.Array, int]:
        """Answers with the policy: the prompt, the attention to each token [S, L, B, E], and the number of steps."""
        prompt = self.read(self.policy)
        cache = self.fill(prompt)
        answer, steps = self.answer(prompt, cache)
        return prompt, self.follow(prompt, cache, answer).mass, steps

    def held(self, cache: PackedCache) -> np.ndarray:
        """[L, T]: the share of key heads that keep each token."""
        return np.asarray(analysis.held(cache, self.inputs.tokens.shape[1]))[0]

    def on_grid(self, values: np.ndarray) -> list[np.ndarray]:
        """Numbers per token [..., T] as one map of patches for each image."""
        return analysis.on_grid(values, np.asarray(self.inputs.grid)[0])

    def maps(self, title: str, values: np.ndarray) -> list[Panel]:
        """Maps of values [L, T] between 0 and 1 for at most `_PICTURES` layers; drawn over the images if known."""
        layers = np.unique(np.linspace(0, len(values) - 1, _PICTURES).astype(int))

        def draw(base: Image.Image | None, grid: np.ndarray) -> dict[str, np.ndarray]:
            pictures = {f"layer {i}": grid[i] for i in layers}
            if base is None:
                return pictures
            base = base.resize((grid.shape[2] * 16, grid.shape[1] * 16), Image.Resampling.NEAREST)
            return {name: np.asarray(overlaid(base, share)) for name, share in pictures.items()}

        grids = self.on_grid(values)
        return self.pictures(f"{title}; grey: 0" if len(self.images) == len(grids) else title, grids, draw)

    def pictures(
        self,
        title: str,
        grids: list[np.ndarray],
        draw: Callable[[Image.Image | None, np.ndarray], dict[str, np.ndarray]],
    ) -> list[Panel]:
        """A panel of pictures for each image: `draw` of the fitted image, or of None if it is unknown, and its grid."""
        bases: list[Image.Image | None] = [None] * len(grids)
        if len(self.images) == len(grids):
            bases = [fitted(image, grid.shape[1:], "crop") for image, grid in zip(self.images, grids, strict=True)]
        titles = [f"{title}, image {i}" for i in range(len(grids))] if len(grids) > 1 else [title]
        return [Maps(name, draw(base, grid)) for name, base, grid in zip(titles, bases, grids, strict=False)]

    @property
    def valid(self) -> np.ndarray:
        """Mask [T] of all tokens but padding."""
        return np.asarray(self.inputs.valid)[0]

    @property
    def is_vision(self) -> np.ndarray:
        """Mask [T] of the vision tokens."""
        return np.asarray(self.inputs.is_vision)[0] & self.valid

    @property
    def vision(self) -> np.ndarray:
        """`is_vision`; raises InputError if there are no vision tokens."""
        if not self.is_vision.any():
            raise InputError("the prompt has no vision tokens: give --image")
        return self.is_vision


def mean_view(views: Sequence[View]) -> View:
    """The mean of all numbers, and for curves their standard deviation over the samples."""
    if len(views) == 1:
        return views[0]
    panels = [_mean_panel(alike) for alike in zip(*(view.panels for view in views), strict=False)]
    return View(_mean([v.arrays for v in views]), _mean([v.columns for v in views]), panels, views[0].rows)


def _mean_panel(panels: Sequence[Any]) -> Panel:
    if isinstance(panels[0], Maps):
        return panels[0]._replace(pictures=_mean([panel.pictures for panel in panels]))
    lines = [panel.lines for panel in panels]
    spread = {name: np.nanstd(_stack([line[name] for line in lines]), axis=0) for name in lines[0]}
    curves: Curves = panels[0]._replace(x=_mean([panel.x for panel in panels]), lines=_mean(lines), spread=spread)
    return curves


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {name: _mean([value[name] for value in values]) for name in first if all(name in v for v in values)}
    if isinstance(first, (list, tuple)):
        return [_mean(alike) for alike in zip(*values, strict=False)]
    if first is None or np.asarray(first).dtype.kind in "USO":  # names, not numbers
        return first
    stack = _stack(values)
    counts = np.isfinite(stack).sum(axis=0)
    mean = np.where(counts > 0, np.nansum(stack, axis=0) / np.maximum(counts, 1), np.nan)
    integers = np.asarray(first).dtype.kind in "biu" and (stack == stack[:1]).all()
    return np.asarray(first) if integers else mean


def _stack(values: Sequence[Any]) -> np.ndarray:
    """Arrays along a new first axis, as float64, padded with NaN to the largest; infinite values become NaN."""
    arrays = [np.asarray(value, float) for value in values]
    shape = np.max([array.shape for array in arrays], axis=0).astype(int)
    stack = np.full((len(arrays), *shape), np.nan)
    for i, array in enumerate(arrays):
        place: Any = (i, *map(slice, array.shape))
        stack[place] = np.where(np.isfinite(array), array, np.nan)
    return stack
