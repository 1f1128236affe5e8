"""The cache of layers with a sliding window: a ring with the newest entries, whatever the policy is.

Policies neither score nor evict these entries. The token at place p, its number among all tokens of its row, is at slot
p % S of a ring of S slots, so a new token takes the slot of one that has left the window.

Axes: B batch · K key heads · N query heads · S slots of a ring · T tokens · H head dim · C queries of a block.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Kernels, decode_attention
from vlkv.cache.parts import Part, split
from vlkv.cache.writing import write_slot
from vlkv.masks import tokens_at
from vlkv.sharding.placement import axes

_RING = axes("batch", "ring_heads", "ring")
_BLOCK = 128  # queries that `attend` processes at a time, so that memory does not grow with their number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """The newest entries of one layer.

    S is the window, or less if the row never has that many tokens. A slot is empty at first, and if its token was
    dropped by a method that reduces the prompt.
    """

    k: Float[Array, "B K S H"] = field(metadata=_RING)
    v: Float[Array, "B K S H"] = field(metadata=_RING)
    place: Int[Array, "B S"] = field(metadata=axes("batch", "ring"))  # of the token in each slot; -1: none
    window: int = field(metadata={"static": True})

    @property
    def slots(self) -> int:
        """The number of slots, S."""
        return self.place.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rings:
    """The rings of all layers with a window."""

    layers: tuple[Ring, ...]
    first_new: Int[Array, " B"] = field(metadata=axes("batch"))  # place of the first token after the prompt
    new_tokens: int = field(metadata={"static": True})  # capacity for tokens after the prompt

    def places(self, used: Int[Array, " B"], valid: Bool[Array, "B T"]) -> Int[Array, "B T"]:
        """Places of new tokens that follow `used` others; -1: padding."""
        return jnp.where(valid, (self.first_new + used)[:, None] + jnp.cumsum(valid, axis=1) - 1, -1)


def ring_slots(window: int, tokens: int) -> int:
    """Slots of a ring, for rows of at most this number of tokens."""
    return min(window, tokens)


def of_prompt(
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    place: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    window: int,
    slots: int,
) -> Ring:
    """The ring of a layer after the prompt.

    Args:
        k: keys of the prompt.
        v: values of the prompt.
        place: of each token; -1: padding.
        count: number of tokens of the prompt before any reduction.
        window: of the layer.
        slots: S: the window, or at least the number of tokens.
    """
    newest = (place >= 0) & (place >= count[:, None] - slots)
    token = jax.vmap(partial(tokens_at, places=slots))(jnp.where(newest, place % slots, slots))
    has_token, token = token >= 0, jnp.maximum(token, 0)

    def take(x: Array) -> Array:
        x = jnp.take_along_axis(x, token[:, :, None, None], axis=1, mode="promise_in_bounds")
        return jnp.where(has_token[:, :, None, None], x, 0).swapaxes(1, 2)

    return Ring(k=take(k), v=take(v), place=jnp.where(has_token, jnp.take_along_axis(place, token, axis=1), -1),
                window=window)  # fmt: skip


def resize(rings: Rings, new_tokens: int) -> Rings:
    """Rings with another capacity for new tokens. Those that do not have the size of their window grow with it."""
    more = max(0, new_tokens - rings.new_tokens)

    def fit(ring: Ring) -> Ring:
        extra = ring_slots(ring.window, ring.slots + more) - ring.slots
        k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, extra), (0, 0)]) for x in (ring.k, ring.v))
        return dataclasses.replace(ring, k=k, v=v, place=jnp.pad(ring.place, [(0, 0), (0, extra)], constant_values=-1))

    return dataclasses.replace(rings, layers=tuple(map(fit, rings.layers)), new_tokens=new_tokens)


class View(NamedTuple):
    """What the queries of new tokens may attend to in a ring, in which their entries have been written."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    place: Int[Array, "B S"]  # as in Ring


def write(
    ring: Ring, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], place: Int[Array, "B T"], kernels: Kernels
) -> tuple[Ring, View]:
    """Writes new entries; returns the ring, and what their queries may attend to.

    Args:
        ring: of the layer.
        k: keys of the new tokens.
        v: their values.
        place: of each token; -1: padding, which is not written.
        kernels: implementations of the ops.
    """
    new = _write(ring, k, v, place, kernels)
    if k.shape[1] == 1:  # the new token takes the slot of the one that leaves the window
        return new, View(new.k, new.v, new.place)
    # The first of several queries still attend to entries that the last ones overwrite.
    return new, View(
        jnp.concatenate([ring.k, k.swapaxes(1, 2)], axis=2), jnp.concatenate([ring.v, v.swapaxes(1, 2)], axis=2),
        jnp.concatenate([ring.place, place], axis=1),
    )  # fmt: skip


def attend(
    view: View,
    q: Float[Array, "B T N H"],
    place: Int[Array, "B T"],
    kernels: Kernels,
    until: Int[Array, "B T"] | None = None,
    *,
    window: int,
) -> Float[Array, "B T N H"]:
    """Attention of the queries of new tokens, in float32.

    Args:
        view: from `write`, for the same tokens.
        q: queries.
        place: of each token; -1: padding.
        kernels: implementations of the ops.
        until: index of the last of these tokens that each one attends to; None: itself.
        window: of the layer.
    """
    if q.shape[1] == 1:
        return _attend_to_ring(q[:, 0], view.k, view.v, view.place >= 0, kernels)[:, None]
    last = place if until is None else jnp.take_along_axis(place, until, axis=1)
    return _attend_to_window(q, place, last, *view, window=window)


def _write(
    ring: Ring, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], place: Int[Array, "B T"], kernels: Kernels
) -> Ring:
    slots = ring.slots
    newest = (place >= 0) & (place > jnp.max(place, axis=1, keepdims=True) - slots)
    slot = jnp.where(newest, place % slots, slots)
    row = jnp.arange(len(place))[:, None]
    return dataclasses.replace(
        ring, k=write_slot(ring.k, k, slot, 1, kernels), v=write_slot(ring.v, v, slot, 1, kernels),
        place=ring.place.at[row, slot].set(place, mode="drop", wrap_negative_indices=False),
    )  # fmt: skip


@partial(jax.jit, static_argnames="kernels")
def _attend_to_ring(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    used: Bool[Array, "B S"],
    kernels: Kernels,
) -> Float[Array, "B N H"]:
    """Attention of one query of each row to the used slots of a ring, which no mesh splits."""

    def local(part: Part, q: Array, k: Array, v: Array, used: Array) -> Array:
        end = jnp.max(jnp.where(used, jnp.arange(1, used.shape[1] + 1), 0), axis=1)  # later slots need not be read
        start = jnp.zeros(k.shape[:2], jnp.int32)
        valid = jnp.broadcast_to(used[:, None], k.shape[:3])
        return decode_attention(
            q, k, v, start, start + end[:, None], valid=valid, implementation=kernels.decode_attention
        )[0]

    run = split(local, ("B N H", "B K P H", "B K P H", "B P"), "B N H", batch=q.shape[0], kv_heads=k.shape[1])
    return run(q, k, v, used)


@partial(jax.jit, static_argnames="window")
def _attend_to_window(
    q: Float[Array, "B T N H"],
    place: Int[Array, "B T"],
    last: Int[Array, "B T"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    key_place: Int[Array, "B S"],
    *,
    window: int,
) -> Float[Array, "B T N H"]:
    """Attention of several queries to the keys in their windows up to the place `last`, block by block."""
    batch, length, heads, head_dim = q.shape
    block = min(length, _BLOCK)
    after = -length % block

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, after)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(batch, -1, block, *x.shape[2:]).swapaxes(0, 1)

    def attend_block(
        args: tuple[Float[Array, "B C N H"], Int[Array, "B C"], Int[Array, "B C"]],
    ) -> Float[Array, "B C N H"]:
        q, place, last = args
        q = q.reshape(batch, block, k.shape[1], -1, head_dim)
        logits = jnp.einsum("bckgh,bksh->bkgcs", q, k, preferred_element_type=jnp.float32) * head_dim**-0.5
        key, near = key_place[:, None], place[:, :, None] - key_place[:, None] < window
        allowed = (key >= 0) & (key <= last[:, :, None]) & near
        logits = jnp.where(allowed[:, None, None], logits, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
        out = jnp.einsum("bkgcs,bksh->bckgh", weights, v, preferred_element_type=jnp.float32)
        return out.reshape(batch, block, heads, head_dim)

    out = jax.lax.map(attend_block, (split(q), split(place), split(last))).swapaxes(0, 1)
    return out.reshape(batch, -1, heads, head_dim)[:, :length]
