"""The error for logits that are NaN: it says from which part of the model they come, and why.

Programs mark such logits with the token -1, or with results that are NaN. The functions here look at these marks
outside jit. Only if there are any, they run the prompt once more and look at every part.

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
from vlkv.masks import end_of

Answer = Int[Array | np.ndarray, "B S"]


def check_tokens(params: Model, inputs: Inputs, tokens: Answer) -> None:
    """Raises InputError if an answer contains -1, the token of NaN logits. Waits until the tokens are computed.

    Nothing is checked under jit, or if another host has some of the tokens.
    """
    if (local := _on_this_host(tokens)) is not None and (local < 0).any():
        raise explain(params, inputs, np.asarray((local < 0).any(axis=1)), local)


def check_values(
    params: Model, inputs: Inputs, values: Float[Array | np.ndarray, "B *rest"], answer: Answer | None = None
) -> None:
    """Raises InputError if logits, or numbers computed from them, are NaN or infinite; otherwise as `check_tokens`."""
    if (local := _on_this_host(values)) is not None and not np.isfinite(local).all():
        failed = np.asarray(~np.isfinite(local).reshape(len(local), -1).all(axis=1))
        raise explain(params, inputs, failed, answer)


def _on_this_host(x: Any) -> np.ndarray | None:
    """The array, or None if its values are unknown here."""
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)


def explain(params: Model, inputs: Inputs, failed: Bool[np.ndarray, " B"], answer: Answer | None = None) -> InputError:
    """The error for the failed rows, whose logits are NaN. `answer` follows the prompts; -1 ends a row of it."""
    if inputs.pixels is not None and not np.isfinite(np.asarray(inputs.pixels, np.float32)).all():
        return InputError("the logits are NaN, because pixels of the inputs are NaN or infinite: correct the images")
    answer = np.full((len(failed), 1), -1) if answer is None else np.asarray(answer)
    finite = jax.tree.map(np.asarray, _finite_parts(params, inputs, failed, answer))
    layers = len(params.decoder.layers)
    tower = tuple(name for name in finite.weights if not name.startswith(".decoder"))
    # Name of the part, whether its output is finite, and how the names of its weights begin.
    parts: list[tuple[str, Any, tuple[str, ...]]] = [
        ("the vision tower or the projector", finite.vision, tower),
        ("the text embedding", finite.text, (".decoder.embedding",)),
    ]
    for i in range(layers):
        name = f"decoder layer {i} of 0 to {layers - 1}"
        parts.append((name, finite.layers[i], (f".decoder.layers[{i}]", ".decoder.layer_inputs")))
    head = (".decoder.norm", ".decoder.head", ".decoder.embedding")
    parts.append(("the last norm or the output head", finite.logits, head))
    dtype = params.decoder.embedding.weight[...].dtype
    half = dtype == jnp.float16
    remedy = "load the model with dtype bfloat16 or float32" if half else "compare the checkpoint with another copy"
    for part, is_finite, prefixes in parts:
        if is_finite:
            continue
        broken = [x for x, fine in finite.weights.items() if not fine and prefixes and x.startswith(prefixes)]
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
    prompt, new = params.embed(inputs), params.embed_text(jnp.maximum(answer, 0))
    added = prompt.added
    if added is not None:
        nothing = jnp.zeros((*added.shape[:2], answer.shape[1], added.shape[3]), added.dtype)
        added = jnp.concatenate([added, nothing if new.added is None else new.added], axis=2)
    end = end_of(inputs.positions, inputs.valid)[:, None, None]
    new_positions = jnp.broadcast_to(end + steps[None, :, None], (*answer.shape, inputs.positions.shape[-1]))
    x = jnp.concatenate([prompt.x, new.x], axis=1)
    valid = jnp.concatenate([inputs.valid, is_new], axis=1)

    def is_finite(x: Float[Array, "B T D"], valid: Bool[Array, "B T"]) -> Bool[Array, ""]:
        return jnp.all(jnp.isfinite(x) | ~(valid & failed[:, None])[..., None])

    def note(i: int, layers: tuple[Array, ...], x: Array) -> tuple[tuple[Array, ...], Array, None]:
        x = params.decoder.add_features(added, i, x)
        return (*layers, is_finite(x, valid)), x, None

    positions = jnp.concatenate([inputs.positions, new_positions.astype(inputs.positions.dtype)], axis=1)
    is_vision = jnp.pad(inputs.is_vision, [(0, 0), (0, answer.shape[1])])
    attend: Attend[tuple[Array, ...]] = attend_to_prompt(params.decoder, valid, params.decoder.until(is_vision))
    none: tuple[Array, ...] = ()
    layers, last = params.decoder.walk(none, x, positions, attend, note, recur=recur_over_prompt(valid))
    place = jnp.max(jnp.where(valid, jnp.arange(valid.shape[1]), 0), axis=1)
    logits = params.decoder.logits(last[jnp.arange(len(place)), place])
    weights = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return _Parts(
        vision=is_finite(prompt.x, inputs.valid & inputs.is_vision),
        text=is_finite(x, valid & ~is_vision),
        layers=jnp.stack(layers),
        logits=jnp.all(jnp.isfinite(logits) | ~failed[:, None]),
        weights={jax.tree_util.keystr(path): _is_sound(x) for path, x in weights},
    )


def _is_sound(weight: nnx.Variable) -> Bool[Array, ""]:
    """Whether no number is NaN or infinite; the infinity that its metadata names as `unbounded` has no effect."""
    x = weight[...]
    return jnp.all(jnp.isfinite(x) | (x == weight.get_metadata().get("unbounded", jnp.nan)))
