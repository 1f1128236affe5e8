"""Tries a user's own methods on shapes, in seconds: before weights are read, and without compiling anything."""

from __future__ import annotations

from collections.abc import Callable

import jax

from vlkv.compression.slots import slots_of
from vlkv.config import ModelConfig
from vlkv.families import Model, abstract
from vlkv.generation.generate import generate
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.policies import Policy, own
from vlkv.tools.benching.shapes import make_inputs

_PROMPT, _VISION = 128, 64  # tokens


def try_own(policy: Policy, config: Callable[[], ModelConfig]) -> None:
    """Calls `try_on_shapes` if a class of the policy is the user's own. `config` returns that of the model."""
    if own.classes(policy):
        try_on_shapes(policy, config())


def try_on_shapes(policy: Policy, config: ModelConfig) -> None:
    """Runs all stages of a policy in `generate` on the shapes of a model and of a prompt with an image.

    Raises:
        InputError: a stage of an own class fails; one line with the file, the line and the error.
    """
    sampling = Greedy(max_new_tokens=slots_of(policy).answer + 2)
    inputs = make_inputs(config, 1, _PROMPT, 0 if config.vision is None else _VISION)

    def run(params: Model, inputs: Inputs, key: jax.Array) -> jax.Array:
        return generate(params, inputs, policy=policy, sampling=sampling, key=key).tokens

    with own.errors(*own.classes(policy), checks=True):
        jax.eval_shape(run, abstract(config), inputs, jax.random.key(0))
