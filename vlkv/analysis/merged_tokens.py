"""Records which patches LightKV merges (its Fig. 7)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from vlkv.compression.checking import require_layers
from vlkv.compression.observe import Observation
from vlkv.compression.policy import Policy
from vlkv.compression.tokens import Tokens
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.prompt import read_layers
from vlkv.inputs import Inputs
from vlkv.policies.lightkv import LightKV


def merged_into(params: Model, inputs: Inputs | Mapping[str, Any], method: Policy) -> Int[np.ndarray, "stages T"]:
    """For each stage of LightKV and each prompt token, the index of the token that it has been merged into by then.

    A token that is not merged has its own index.

    Args:
        params: the model.
        inputs: one question.
        method: a `LightKV`.

    Raises:
        InputError: another method, several questions, or too few layers with full attention.
    """
    if not isinstance(method, LightKV):
        raise InputError(f"{type(method).__name__} does not merge patches in stages: give LightKV")
    inputs = Inputs.of(inputs, params.config)
    require_layers(method, params.decoder.full_layers)
    if inputs.tokens.shape[0] != 1:
        raise InputError(f"inputs contain {inputs.tokens.shape[0]} questions: give only one")
    if not inputs.max_vision:
        raise InputError("the prompt has no vision tokens to merge: give an image")
    stages: dict[int, tuple[np.ndarray, ...]] = {}

    def record(stage: int, *arrays: Any) -> None:
        stages[int(stage)] = tuple(map(np.asarray, arrays))

    class Recorded(LightKV):
        """The same method; it also records the pairs that it merges."""

        def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Bool[Array, " T"]]:
            jax.debug.callback(record, stage, *self.pairs(tokens, stage), tokens.source)
            return super().reduce(tokens, obs, stage=stage)

    recorded = Recorded(**{field.name: getattr(method, field.name) for field in dataclasses.fields(method)})
    run = jax.jit(lambda p, i: read_layers(p, i, recorded, lambda *_: None).logits)
    jax.block_until_ready(run(params, inputs))
    jax.effects_barrier()
    owner, found = np.arange(inputs.tokens.shape[1]), []
    for stage in sorted(stages):
        target, merged, source = stages[stage]
        into = np.arange(len(owner))
        into[source[merged]] = source[target[merged]]  # all other tokens keep their own index
        owner = into[owner]
        found.append(owner)
    return np.stack(found)
