"""One measurement of `vlkv inspect`: what it measures, and the form of its result."""

from __future__ import annotations

import dataclasses
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
from vlkv.tools.commands.plots import Maps, Panel

_PICTURES = 8  # most layers drawn as maps
_answer = jax.jit(analysis.answer_of)
follow = jax.jit(analysis.follow)


class View(NamedTuple):
    """The result of a measurement: all arrays (for JSON), columns of the printed table, and panels of the picture."""

    arrays: dict[str, Any]
    columns: dict[str, np.ndarray]  # all of one length
    panels: list[Panel] | KeptText


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

    def fill(self, prompt: Prompt, policy: Policy) -> PackedCache:
        """The compressed cache of a prompt."""
        return jitted.fill_cache_with(prompt, policy, None, new_tokens=self.new_tokens, key=self.key)

    def answer(self, prompt: Prompt, cache: PackedCache) -> tuple[jax.Array, int]:
        """The greedy answer [1, S], padded with -1, and its number of decoding steps."""
        tokens = _answer(self.params, cache, prompt.logits, sampling=Greedy(max_new_tokens=self.new_tokens))
        steps = int((np.asarray(tokens) >= 0).sum()) - 1
        if steps < 1:
            raise InputError("the answer is a single token, which needs no decoding: ask for a longer answer")
        return tokens, steps

    def trace(self) -> tuple[Prompt, jax.Array, int]:
        """Answers with the policy: the prompt, the attention to each token [S, L, B, E], and the number of steps."""
        prompt = self.read(self.policy)
        cache = self.fill(prompt, self.policy)
        answer, steps = self.answer(prompt, cache)
        return prompt, follow(self.params, prompt, cache, answer[:, :-1]).mass, steps

    def maps(self, title: str, values: np.ndarray) -> list[Panel]:
        """Maps of values [L, T] between 0 and 1 for at most `_PICTURES` layers; drawn over the images if known."""
        layers = np.unique(np.linspace(0, len(values) - 1, _PICTURES).astype(int))
        grids = analysis.on_grid(values, np.asarray(self.inputs.grid)[0])
        panels: list[Panel] = []
        drawn = len(self.images) == len(grids)
        title = f"{title}; grey: 0" if drawn else title
        for i, grid in enumerate(grids):
            shown = {f"layer {j}": grid[j] for j in layers}
            if drawn:
                base = fitted(self.images[i], grid.shape[1:], "crop")
                base = base.resize((grid.shape[2] * 16, grid.shape[1] * 16), Image.Resampling.NEAREST)
                shown = {name: np.asarray(overlaid(base, x)) for name, x in shown.items()}
            panels.append(Maps(f"{title}, image {i}" if len(grids) > 1 else title, shown))
        return panels

    @property
    def vision(self) -> np.ndarray:
        """Mask [T] of the vision tokens; raises InputError if there are none."""
        mask = np.asarray(self.inputs.is_vision & self.inputs.valid)[0]
        if not mask.any():
            raise InputError("the prompt has no vision tokens: give --image")
        return mask
