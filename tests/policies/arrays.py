"""Methods on arrays, without a model: one batch of queries, keys and values for all of them, and fast ways to run it.

A method is not jitted as a whole. `by_parts` jits the functions that methods share, and everything else runs
operation by operation, so that methods, scopes and budgets use the same few compiled programs.
"""

import contextlib
import dataclasses
import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vlkv import masks, policies
from vlkv.compression import budgets, candidates, merging, observe, selection
from vlkv.compression.observe import LayerBudget, LayerContext, Observation, Repeated
from vlkv.compression.tokens import Tokens
from vlkv.config import RopeConfig
from vlkv.policies import flashcache, kvzip

LAYERS, HEADS, KV_HEADS, LENGTH, HEAD_DIM, SIDE = 3, 4, 2, 28, 8, 5
ROPE = RopeConfig(theta=100.0)
# S, V, I: a system, vision or instruction token; a dot is padding.
PROMPTS = {
    "full": "SSSSVVVVVVVVVVVVVVVVIIIIIIII",
    "left padded": "......SSSVVVVVVVVVVVVIIIIIII",
    "two images": "SVVVVVVSSSVVVVVVVIIIIIIIII..",
    "image last": "SSSSSSSSSSSSVVVVVVVVVVVVVVVV",
    "two vision tokens": "SSSSSSSSSSVVIIIIIIIIIIIII...",
    "no text": "VVVVVVVVVVV.................",
    "no image": "IIIIIIIIIIIIIIIIIIIIIII.....",
    "one token": "...........................I",
}

# --- methods that select ----------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Arguments of `compress` for several rows."""

    q: np.ndarray  # [B, L, N, T, H]
    k: np.ndarray  # [B, L, K, T, H]
    v: np.ndarray
    vision: np.ndarray  # [B, T]
    valid: np.ndarray
    key: np.ndarray
    grid: np.ndarray  # [B, T, 3]
    positions: np.ndarray  # [B, T], and further arrays of the context
    norms: np.ndarray  # [B, L, K, T]
    later: np.ndarray  # queries of a repetition [B, L, N, R, H]
    lse: np.ndarray  # [B, L, N, R]


class Chosen(NamedTuple):
    """What `compress` returns, as numpy arrays."""

    k: np.ndarray
    v: np.ndarray
    kept: np.ndarray  # [B, L, K, T]
    budgets: np.ndarray  # [B, L, K]
    scores: np.ndarray  # [B, L, K, T]
    extra: dict


def drawn(seed: int) -> str:
    """A prompt with random numbers of tokens of each kind."""
    rng = np.random.default_rng(seed)
    parts = zip(".SVSVI", rng.integers(0, (4, 4, 9, 3, 4, 5)), strict=True)
    return ("".join(kind * count for kind, count in parts) + "I").ljust(LENGTH, ".")


def grid_of(text: np.ndarray) -> np.ndarray:
    """Image, line and column of the tokens of a row; consecutive vision tokens are an image's first patches."""
    image, patch, number = np.full((3, len(text)), -1)
    number = np.cumsum((text == "V") & (np.roll(text, 1) != "V")) - 1
    for one in set(number[text == "V"]):
        own = (text == "V") & (number == one)
        image[own], patch[own] = one, np.arange(own.sum())
    return np.stack([image, patch // SIDE, np.where(patch < 0, -1, patch % SIDE)], axis=-1)


@functools.cache
def batch() -> Batch:
    """PROMPTS, four drawn ones, and all of them again in reverse order with their padding on the other side."""
    text = np.array([list(row) for row in (*PROMPTS.values(), *map(drawn, range(4)))])
    rows, rng = len(text), np.random.default_rng(0)
    q, k, later = (
        2 * rng.standard_normal((rows, LAYERS, heads, length, HEAD_DIM)).astype(np.float32)
        for heads, length in ((HEADS, LENGTH), (KV_HEADS, LENGTH), (HEADS, 5))
    )
    valid = text != "."
    one = Batch(
        q, k, k[..., ::-1], text == "V", valid, rng.integers(0, 2**32, (rows, 2), dtype=np.uint32),
        np.stack([grid_of(row) for row in text]), np.maximum(valid.cumsum(axis=1) - 1, 0),
        rng.random((rows, LAYERS, KV_HEADS, LENGTH)).astype(np.float32), later,
        (8 + rng.random((rows, LAYERS, HEADS, 5))).astype(np.float32),
    )  # fmt: skip
    return Batch(*(np.concatenate(pair) for pair in zip(one, moved(one), strict=True)))


def shifts(valid: np.ndarray) -> np.ndarray:
    """[B, T]: the index of each token of the rows of `moved` in its own row."""
    ends = [np.flatnonzero(row)[-1] + 1 for row in valid]
    return np.stack([np.roll(np.arange(LENGTH), -end) for end in ends])[::-1]


def moved(one: Batch) -> Batch:
    """The same rows in reverse order, with the padding of the end at the beginning."""
    index = shifts(one.valid)
    axes = dict(q=3, k=3, v=3, vision=1, valid=1, grid=1, positions=1, norms=3)  # of the tokens

    def at(name, x):
        axis = axes.get(name)
        others = [i for i in range(1, x.ndim) if i != axis]
        return x[::-1] if axis is None else np.take_along_axis(x[::-1], np.expand_dims(index, others), axis)

    return Batch(*(at(name, x) for name, x in one._asdict().items()))


def _slim(function, **static):
    """Jits a function of an observation without the fields that differ between layers and that it does not use."""
    run = jax.jit(function, **static)
    unused = {"layer": 0, "key": None, "context": None, "grid": None}
    return lambda obs, *args, **options: run(dataclasses.replace(obs, **unused), *args, **options)


def _of_one_scope(make):
    """Jits `observation` once for each scope; the budget is that of the policy."""
    run = jax.jit(make, static_argnames=("policy", "number", "layers"))

    def made(policy, layer, number, key, *, layers, budget):
        candidates.require_context(policy, layer.context)
        alike = policies.KeyDiff(keep=0.5, scope=policy.scope)
        obs = run(alike, dataclasses.replace(layer, context=None), number=0, layers=layers, budget=budget)
        key = None if key is None else jax.random.fold_in(key, number)
        return dataclasses.replace(obs, layer=number, context=layer.context, key=key)

    return made


def _of_one_kind(within_bounds):
    """Jits `_within_bounds` once for budgets per layer, and once for those per head."""
    run = jax.jit(within_bounds, static_argnames=("policy", "kv_heads"))
    alike = {kind == "heads": policies.make(name, keep=0.5) for name, kind in (("knorm", "layers"), ("adakv", "heads"))}
    return lambda policy, *args, **options: run(alike[policy.facts.budgets == "heads"], *args, **options)


_MASS = ("most", "statistic", "threshold", "softmax_n", "causal")
_PARTS = (
    *((masks, jax.jit, name, ()) for name in ("top", "first", "last", "ordinal")),
    (masks, jax.jit, "tokens_of", ("most",)),
    *((budgets, jax.jit, name, ()) for name in ("apportion", "uniform", "smallest", "ranked")),
    *((budgets, jax.jit, name, ("safeguard",)) for name in ("by_order", "by_order_of_all_layers")),
    *((observe, _slim, name, _MASS) for name in ("rows_mass", "split_rows_mass", "each_row")),
    (observe, _slim, "column_sums", ("statistic",)),
    *((observe, _slim, name, ()) for name in ("row_counts", "prefer_text")),
    (observe, jax.jit, "instruction", ()),
    (candidates, _of_one_scope, "observation", None),
    (selection, _of_one_kind, "_within_bounds", None),
    *((observe, jax.jit, name, ("kv_heads",)) for name in ("group_mean", "head_mean")),
    (observe, jax.jit, "pool", ("kernel", "kind")),
    (observe, jax.jit, "reflected_mean", ("kernel",)),
    (flashcache, jax.jit, "low_pass", ("frequencies",)),
    *((merging, jax.jit, name, ()) for name in ("nearest_place", "nearest_key", "fold", "at", "dropped")),
    (kvzip, jax.jit, "largest", ()),
)


@functools.cache
def _replacements() -> list[tuple]:
    found = []
    for module, wrap, name, static in _PARTS:
        old = getattr(module, name)
        new = wrap(old) if static is None else wrap(old, static_argnames=static)
        for user in list(sys.modules.values()):
            if getattr(user, "__name__", "").startswith("vlkv.") and vars(user).get(name) is old:
                found.append((user, name, old, new))
    return found


@contextlib.contextmanager
def by_parts():
    """Jits the functions that methods share wherever vlkv's modules use them."""
    for user, name, _, new in _replacements():
        setattr(user, name, new)
    try:
        yield
    finally:
        for user, name, old, _ in _replacements():
            setattr(user, name, old)


@functools.lru_cache(maxsize=400)
def compress(policy: policies.Policy) -> Chosen:
    """`policies.compress` of all rows of `batch`."""
    return compress_batch(policy, batch())


def compress_batch(policy: policies.Policy, rows: Batch) -> Chosen:

    def one(row):
        context = LayerContext(
            positions=jnp.broadcast_to(row.positions[:, None], (len(row.q), LENGTH, 1)), output_norm=row.norms,
            repeated=Repeated(q=row.later, lse=row.lse), rope=ROPE,
        )  # fmt: skip
        is_needed = policies.slots_of(policy).uses or policies.slots_of(policy).repeats is not None
        return policies.compress(policy, *row[:7], context if is_needed else None)

    with by_parts():
        k, v, chosen = jax.vmap(one)(jax.tree.map(jnp.asarray, rows))
    return jax.tree.map(np.asarray, Chosen(k, v, **vars(chosen)))


# --- methods that reduce the prompt -----------------------------------------------------------------------------------


def tokens_of(x, grid, is_vision=None, valid=None, **others) -> Tokens:
    """Tokens of one row; those with an image in `grid` are vision tokens unless `is_vision` says otherwise."""
    length, grid = len(x), np.asarray(grid)
    valid = np.ones(length, bool) if valid is None else np.asarray(valid)
    arrays = dict(
        positions=np.maximum(valid.cumsum() - 1, 0)[:, None], valid=valid, grid=grid.astype(np.int32),
        is_vision=grid[:, 0] >= 0 if is_vision is None else is_vision, source=np.arange(length), size=np.ones(length),
    ) | others  # fmt: skip
    return Tokens(x=jnp.asarray(x, jnp.float32), **{name: jnp.asarray(value) for name, value in arrays.items()})


def observation(tokens: Tokens, q, k) -> Observation:
    """What a layer's `reduce` observes of these tokens."""
    own = tokens.is_vision & tokens.valid
    return Observation(
        q=jnp.asarray(q), k=jnp.asarray(k), v=jnp.asarray(k), is_vision=own, valid=tokens.valid, in_scope=own,
        budget=LayerBudget(asked=jnp.float32(1), mean=jnp.int32(1)), layer=1,
    )  # fmt: skip
