"""What prompts and answers attend to, which `vlkv.analysis.drift` compares.

Axes: S samples · B rows of a batch · J steps · L layers · K key heads · T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.analysis.fidelity import answer_of
from vlkv.compression.candidates import observation
from vlkv.compression.filling import Prompt
from vlkv.compression.observe import Layer, LayerBudget, Observation, group_mean, split_rows_mass
from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.compression.smooth import Smooth
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation import jitted
from vlkv.generation.decode import check_room
from vlkv.generation.prompt import read_prompt
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.masks import top
from vlkv.policies import Full

_SINKS = 4
STEPS = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    8,
    12,
    16,
    24,
    32,
)  # the row of the answer at which each step begins; later rows share one
_answer = jax.jit(answer_of, static_argnames="sampling")


class Look(NamedTuple):
    """What one sample attends to. `before` and `after` are shares of the tokens in `among`, and 0 elsewhere."""

    before: Float[np.ndarray, "L K T"]  # the policy's scores after prefill
    after: Float[np.ndarray, "J L K T"]  # attention of the answer at each of its steps, mean over the heads of a group
    among: Bool[np.ndarray, " T"]  # tokens that compete for the cache
    grid: Int[np.ndarray, "T 3"]  # as in `Inputs.grid`


def observe(
    params: Model, samples: Iterable[Inputs | Mapping[str, Any]], policy: Policy, *, sampling: Greedy | None = None
) -> list[Look]:
    """What each sample attends to before and during its greedy answer with the full cache.

    Args:
        params: the model.
        samples: from the processor, padded on the right; every row of a batch is one sample.
        policy: its scores are `before`, and its scope says which tokens compete. It must not reduce the prompt.
        sampling: its `max_new_tokens` limits the answer; None: `Greedy()`. Rows whose answer is one token are left out.

    Raises:
        InputError: the policy reduces the prompt, there is no sample with a longer answer, or a prompt is too long.
    """
    sampling, slots = sampling or Greedy(), slots_of(policy)
    if slots.reduce is not None:
        raise InputError(f"{type(slots.reduce).__name__} reduces the prompt, so drift cannot be measured: leave it out")
    looks: list[Look] = []
    for inputs in (Inputs.of(sample, params.config) for sample in samples):
        check_room(params.config, inputs, sampling.max_new_tokens)
        new = sampling.max_new_tokens
        prompt = jitted.read_prompt(params, inputs, policy, new_tokens=new)
        cache = jitted.fill_cache_with(prompt, Full(), None, new_tokens=new)
        answer = np.asarray(_answer(params, cache, prompt.logits, sampling=sampling))
        before, among = (np.asarray(x) for x in _before(prompt, policy))
        ends = [row[row >= 0] for row in answer]
        longer = inputs.with_ends([0] * len(ends), ends)
        begin, count = np.asarray(inputs.valid).sum(axis=1), np.array([len(end) - 1 for end in ends])
        row = np.arange(longer.tokens.shape[1]) - begin[:, None]  # of the answer, from 0
        row = np.where(row < count[:, None], row, -1)  # what the last token attends to needs no cache
        parts = np.searchsorted(STEPS, row, side="right")[:, None] == np.arange(1, len(STEPS) + 1)[:, None]
        mean = parts / np.maximum(parts.sum(axis=-1, keepdims=True), 1)
        after = np.asarray(_after(params, longer, mean.astype(np.float32), most=new))[..., : among.shape[1]]
        looks += [
            Look(_shares(before[i], among[i]), _shares(after[i], among[i]), among[i], np.asarray(inputs.grid)[i])
            for i in range(len(ends))
            if count[i] > 0 and among[i].any()
        ]
    if not looks:
        raise InputError("drift needs a sample with tokens that compete for the cache, and an answer of two tokens")
    return looks


@jax.jit
def _before(prompt: Prompt, policy: Policy) -> tuple[Float[Array, "B L K T"], Bool[Array, "B T"]]:
    """The policy's scores, and the tokens that compete with each other."""
    scorer = slots_of(policy).score

    def of_row(number: int, row: Layer) -> tuple[Array, Array]:
        obs = observation(scorer, row, number, layers=len(prompt.layers))
        among = obs.in_scope
        if scorer.scope == "all":  # without the first tokens, to which most heads attend whatever is asked
            among &= ~scorer.protect(obs) & (jnp.cumsum(obs.valid) > _SINKS)
        return scorer.score(obs), among

    layers = [jax.vmap(partial(of_row, number))(layer) for number, layer in enumerate(prompt.layers)]
    scores, among = zip(*layers, strict=True)
    return jnp.stack(scores, axis=1), among[0]


@partial(jax.jit, static_argnames="most")
def _after(params: Model, inputs: Inputs, parts: Float[Array, "B J T"], *, most: int) -> Float[Array, "B J L K T"]:
    """Attention of the rows of each step, whose weights are `parts`."""

    def of_row(layer: Layer, parts: Float[Array, "J T"]) -> Float[Array, "J K T"]:
        obs = observation(Full(), layer, 0, layers=1)
        mass = split_rows_mass(obs, parts, most, among=jnp.any(parts > 0, axis=0))
        return jax.vmap(lambda step: group_mean(step, layer.k.shape[0]))(mass)

    return jnp.stack([jax.vmap(of_row)(layer, parts) for layer in read_prompt(params, inputs).layers], axis=2)


def _shares(x: Float[np.ndarray, "L K T"], among: Bool[np.ndarray, " T"]) -> Float[np.ndarray, "L K T"]:
    x = np.maximum(np.where(among, x, 0), 0).astype(np.float64)
    return x / np.maximum(x.sum(axis=-1, keepdims=True), 1e-30)


def captured(looks: Sequence[Look], smooth: Smooth | None, keep: float) -> Float[np.ndarray, "S J"]:
    """The share of the attention of each step that a smoothing keeps, mean over layers and heads; NaN without the step.

    Args:
        looks: from `observe`.
        smooth: smooths `before`, by which tokens are ranked; None: nothing does.
        keep: share of the competing tokens that every head keeps.
    """
    kept = np.array([np.asarray(_captured(*look, smooth, keep)) for look in looks])
    return np.where([look.after.any(axis=(1, 2, 3)) for look in looks], kept, np.nan)


@partial(jax.jit, static_argnames=("smooth", "keep"))
def _captured(
    before: Array, after: Array, among: Array, grid: Array, smooth: Smooth | None, keep: float
) -> Float[Array, " J"]:
    nothing = jnp.zeros((1, len(among), 1))
    budget = LayerBudget(asked=jnp.float32(0), mean=jnp.int32(0))
    masks: dict[str, Any] = {"is_vision": among, "valid": among, "in_scope": among, "grid": grid}
    count = jnp.maximum(jnp.floor(keep * jnp.sum(among)), 1).astype(jnp.int32)
    shares = []
    for layer in range(len(before)):
        obs = Observation(q=nothing, k=nothing, v=nothing, **masks, layer=layer, budget=budget)
        scores = before[layer].astype(jnp.float32)
        scores = scores if smooth is None else smooth(scores, obs)
        kept = top(scores, among, jnp.full(len(scores), count))
        shares.append(jnp.sum(jnp.where(kept, after[:, layer], 0), axis=-1))
    return jnp.mean(jnp.stack(shares, axis=1), axis=(1, 2))
