"""The error for logits that are NaN: it says in which part of the model they come from, and why.

Programs mark such logits at no cost: with the token -1, or with results that are NaN. The functions here look at these
marks outside jit. Only if there are any, they run the prompt once more and look at every part.

Axes: B batch · T prompt · S new tokens · L layers · D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from vlkv.decoder import Attend, attend_to_prompt, recur_over_prompt
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.inputs import Inputs


def check_tokens(params: Model, inputs: Inputs, tokens: Int[Array | np.ndarray, "B S"]) -> None:
    """Raises InputError if an answer contains -1, the token of NaN logits. Waits until the tokens are computed.

    Nothing is checked under jit, or if another host has some of the tokens.
    """
    if (found := _on_this_host(tokens)) is not None and (found < 0).any():
        raise explain(params, inputs, np.asarray((found < 0).any(axis=1)), found)


def check_values(
    params: Model,
    inputs: Inputs,
    values: Float[Array | np.ndarray, "B *rest"],
    answer: Int[Array | np.ndarray, "B S"] | None = None,
) -> None:
    """Raises InputError if logits, or numbers computed from them, are NaN or infinite; otherwise as `check_tokens`."""
    if (found := _on_this_host(values)) is not None and not np.isfinite(found).all():
        failed = np.asarray(~np.isfinite(found).reshape(len(found), -1).all(axis=1))
        raise explain(params, inputs, failed, answer)


def _on_this_host(x: Any) -> np.ndarray | None:
    """The array, or None if its values are unknown here."""
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)


def explain(
    params: Model,
    inputs: Inputs,
    failed: Bool[np.ndarray, " B"],
    answer: Int[Array | np.ndarray, "B S"] | None = None,
) -> InputError:
    """The error for rows with NaN logits.

    Args:
        params: the model.
        inputs: the prompts.
        failed: the rows with NaN logits.
        answer: the tokens after the prompts; -1 ends a row.
    """
    if inputs.pixels is not None and not np.isfinite(np.asarray(inputs.pixels, np.float32)).all():
        return InputError("the logits are NaN, because pixels of the inputs are NaN or infinite: correct the images")
    answer = np.full((len(failed), 1), -1) if answer is None else np.asarray(answer)
    found = jax.tree.map(np.asarray, _finite_parts(params, inputs, failed, answer))
    layers = len(params.decoder.layers)
    parts: list[tuple[str, Any, tuple[str, ...]]] = [  # name, whether its output is finite, names of its weights begin
        ("the vision tower or the projector", found.vision, tuple(x for x in found.weights if x[:8] != ".decoder")),
        ("the text embedding", found.text, (".decoder.embedding",)),
        *((f"decoder layer {i} of 0 to {layers - 1}", found.layers[i],
           (f".decoder.layers[{i}]", ".decoder.layer_inputs")) for i in range(layers)),
        ("the last norm or the output head", found.logits, (".decoder.norm", ".decoder.head", ".decoder.embedding")),
    ]  # fmt: skip
    dtype = params.decoder.embedding.weight[...].dtype
    half = dtype == jnp.float16
    remedy = "load the model with dtype bfloat16 or float32" if half else "compare the checkpoint with another copy"
    for part, is_finite, prefixes in parts:
        if is_finite:
            continue
        broken = [x for x, fine in found.weights.items() if not fine and prefixes and x.startswith(prefixes)]
        if broken:
            name = broken[0].removeprefix(".")
            cause = f"its weight {name} is NaN or {'too large for float16' if half else 'infinite'}"
        else:
            cause = f"a number is too large for {dtype}"
        return InputError(f"the logits are NaN, first in {part}: {cause}; {remedy}")
    return InputError(f"the logits of a new token are NaN, but with the full cache no part of the model is; {remedy}")


class _Parts(NamedTuple):
    """Whether the outputs of each part are finite at all tokens of the failed rows, and whether weights are sound."""

    vision: Bool[Array, ""]
    text: Bool[Array, ""]
    layers: Bool[Array, " L"]
    logits: Bool[Array, ""]  # of the last token
    weights: dict[str, Bool[Array, ""]]


@jax.jit
def _finite_parts(params: Model, inputs: Inputs, failed: Bool[Array, " B"], answer: Int[Array, "B S"]) -> _Parts:
    """Runs prompts and answers with the full cache."""
    inputs = jax.tree.map(jnp.asarray, inputs)
    steps = jnp.arange(answer.shape[1])
    is_new = steps < jnp.min(jnp.where(answer < 0, steps, answer.shape[1]), axis=1, keepdims=True)
    embedded = params.embed(inputs)
    prompt, added = embedded.x, embedded.added
    new = params.embed_text(jnp.maximum(answer, 0))
    if added is not None and new.added is not None:
        added = jnp.concatenate([added, new.added], axis=2)
    elif added is not None:  # nothing for the answer
        added = jnp.pad(added, [(0, 0), (0, 0), (0, answer.shape[1]), (0, 0)])
    furthest = jnp.max(jnp.where(inputs.valid[..., None], inputs.positions, -1), axis=(1, 2), keepdims=True)
    new_positions = jnp.broadcast_to(
        furthest + 1 + steps[None, :, None], (*answer.shape, inputs.positions.shape[-1])
    ).astype(inputs.positions.dtype)
    x = jnp.concatenate([prompt, new.x], axis=1)
    valid = jnp.concatenate([inputs.valid, is_new], axis=1)

    def is_finite(x: Float[Array, "B T D"], valid: Bool[Array, "B T"]) -> Bool[Array, ""]:
        return jnp.all(jnp.isfinite(x) | ~(valid & failed[:, None])[..., None])

    def note(i: int, layers: tuple[Array, ...], x: Array) -> tuple[tuple[Array, ...], Array, None]:
        x = params.decoder.add_features(added, i, x)
        return (*layers, is_finite(x, valid)), x, None

    positions = jnp.concatenate([inputs.positions, new_positions], axis=1)
    none: tuple[Array, ...] = ()
    is_vision = jnp.pad(inputs.is_vision, [(0, 0), (0, answer.shape[1])])
    attend: Attend[tuple[Array, ...]] = attend_to_prompt(params.decoder, valid, params.decoder.until(is_vision))
    layers, last = params.decoder.walk(none, x, positions, attend, note, recur=recur_over_prompt(valid))
    place = jnp.max(jnp.where(valid, jnp.arange(valid.shape[1]), 0), axis=1)
    logits = params.decoder.logits(last[jnp.arange(len(place)), place])
    weights = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return _Parts(
        vision=is_finite(prompt, inputs.valid & inputs.is_vision),
        text=is_finite(x, valid & ~is_vision),
        layers=jnp.stack(layers),
        logits=jnp.all(jnp.isfinite(logits) | ~failed[:, None]),
        weights={jax.tree_util.keystr(path): _is_sound(x) for path, x in weights},
    )


def _is_sound(weight: nnx.Variable) -> Bool[Array, ""]:
    """Whether no number is NaN or infinite; the infinity that its metadata names as `unbounded` has no effect."""
    x = weight[...]
    return jnp.all(jnp.isfinite(x) | (x == weight.get_metadata().get("unbounded", jnp.nan)))
