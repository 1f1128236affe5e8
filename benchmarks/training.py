"""Masks, losses and resumable states for the training of the demo model.

A row has its images once, followed by several questions with their answers (branches). A static mask prevents each
question from attending to the others, and all start at the same position. So the logits of a question are those that
`vlkv.forward` computes for it alone.

Axes: B rows of a batch · T tokens of a row · t tokens of its branches.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from vlkv.decoder import Decoder
from vlkv.files import replacing

Attention = Callable[..., Array]  # as jax.nn.dot_product_attention
Either = np.ndarray | Array


def branch_mask(prefix: int, lengths: Sequence[int]) -> Bool[np.ndarray, "T T"]:
    """The attention mask of a row: a token attends to earlier tokens of the prefix and of its own branch."""
    branch = np.concatenate([np.full(prefix, -1), *(np.full(n, i) for i, n in enumerate(lengths))])
    past = np.tri(len(branch), dtype=bool)
    return past & ((branch[None, :] == -1) | (branch[:, None] == branch[None, :]))


def branch_logits(
    decoder: Decoder,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    lengths: Sequence[int],
    attention: Attention = jax.nn.dot_product_attention,
) -> Float[Array, "B targets vocab"]:
    """Logits of the token after each branch token; the last branch token has none.

    Args:
        decoder: the decoder.
        x: its input: the prefix, then the branches.
        positions: for RoPE.
        lengths: numbers of tokens of the branches.
        attention: computes the attention of a layer.
    """
    text = sum(lengths)
    mask = jnp.asarray(branch_mask(x.shape[1] - text, lengths))[None, None]

    def attend(i: int, carry: None, q: Array, k: Array, v: Array) -> tuple[None, Array]:
        return carry, attention(q, k, v, mask=mask)

    _, x = decoder.walk(None, x, positions[..., None], attend)
    return decoder.logits(x[:, -text:-1])


def mean_loss(
    log_probs: Float[Array, "B targets vocab"], tokens: Int[Either, "B t"], weights: Float[Either, "B t"]
) -> Float[Array, ""]:
    """Mean negative log-likelihood of the tokens of the branches that have a weight."""
    token = -jnp.take_along_axis(log_probs, jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(token * jnp.asarray(weights)[:, 1:]) / jnp.sum(jnp.asarray(weights))


def exact_answers(
    best: Int[np.ndarray, "B targets"],
    tokens: Int[Either, "B t"],
    weights: Float[Either, "B t"],
    lengths: Sequence[int],
) -> list[list[bool]]:
    """For each branch, whether the answers are right, of the rows that have a question there.

    Each token is predicted after the correct earlier tokens. For whole answers this is the same as greedy decoding,
    which gives the correct answer exactly if every token is the most likely one after the correct tokens before it.
    """
    right, asked = best == np.asarray(tokens)[:, 1:], np.asarray(weights)[:, 1:] > 0
    parts = [slice(max(low - 1, 0), high - 1) for low, high in itertools.pairwise([0, *itertools.accumulate(lengths)])]
    return [(right | ~asked)[asked[:, part].any(1), part].all(1).tolist() for part in parts]


def grid_positions(grid: int, width: int) -> Float[np.ndarray, "V D"]:
    """Initial position embeddings of a tower with a class token: sinusoids over the grid (Vaswani et al. 2017)."""
    wave = 2.0 ** -np.linspace(-1, 4, width // 4) * np.arange(grid)[:, None]
    side = np.concatenate([np.sin(wave), np.cos(wave)], axis=1)  # [grid, width / 2]
    y, x = np.divmod(np.arange(grid**2), grid)
    return np.concatenate([np.zeros((1, width)), np.concatenate([side[y], side[x]], axis=1)])


def make_optimizer(schedule: optax.Schedule, *, clip: float, weight_decay: float) -> optax.GradientTransformation:
    """AdamW with a bound on the norm of all gradients; only matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(schedule, b2=0.98, weight_decay=weight_decay,
                    mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
    )  # fmt: skip


def save(file: Path, tree: Any, log: Any) -> None:
    """Writes arrays and a log as one file, which replaces an earlier one only when it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as partial, partial.open("wb") as stream:
        np.savez(stream, *jax.tree.leaves(tree), log=np.asarray(json.dumps(log)))


def restore(file: Path, like: Any) -> tuple[Any, Any]:
    """The arrays, in the structure of `like`, and the log that `save` has written."""
    leaves, structure = jax.tree.flatten(like)
    with np.load(file) as saved:
        arrays = [jnp.asarray(saved[f"arr_{i}"]) for i in range(len(leaves))]
        return jax.tree.unflatten(structure, arrays), json.loads(str(saved["log"]))
