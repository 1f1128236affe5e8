"""The decoder of all families, which has the shape of Llama.

Axes: B batch · T tokens · N query heads · K key heads · H head dim · D width · A position axes · S first layers.
The layers are a tuple (docs/architecture.md, decision 1), and `Decoder.walk` is the only loop over them. The caller
passes it the function that computes attention, and what this function carries from layer to layer; so prefill,
decoding, scoring and tracing share all other code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import target_platform
from vlkv.cache.states import State
from vlkv.config import DecoderConfig, LayerKind
from vlkv.decoder.experts import Experts
from vlkv.decoder.layers import (
    ACTIVATIONS,
    Embedding,
    Initializer,
    JoinHeads,
    LayerInputs,
    Linear,
    MixLayerInput,
    RMSNorm,
    SplitHeads,
    product,
    rms_normalised,
)
from vlkv.decoder.memory_maps import make_room
from vlkv.decoder.recurrence import Recurrence
from vlkv.decoder.rope import apply_rope, rope_table
from vlkv.masks import run_ends
from vlkv.sharding.ops import prefill_attention

C = TypeVar("C")  # the carry of `Decoder.walk`
Attend = Callable[[int, C, Array, Array, Array], tuple[C, Array]]  # layer, carry, q, k, v -> carry, [B,T,N,H]
Recurring = Callable[[State | None, Array], tuple[Array, State]]  # state or None, valid -> [B,T,N,V], state
Recur = Callable[[int, C, Recurring], tuple[C, Array]]  # layer, carry, its recurrence -> carry, [B,T,N,V]
After = Callable[[int, C, Array], tuple[C, Array, Array | None]]  # layer, carry, x -> carry, x, positions or None
Narrow = Callable[[C, Array, Array], tuple[C, Array, Array]]  # carry, x, attended -> the same of fewer tokens


class Rotation(NamedTuple):
    """Arrays that depend on positions and are the same in every layer."""

    table: Float[Array, "B T 1 _H"]  # for `apply_rope`
    log_scale: Float[Array, "B T 1 1"] | None  # factor of queries; see `_log_scale`


class DecoderLayer(nnx.Module):
    """Attention, and a gated MLP or experts, with residual connections. An RMSNorm precedes both, and may follow both.

    A layer with experts beside the MLP (Gemma 4) has a norm before and after the experts and one after the MLP. The sum
    of both has the norm `mlp_out_norm`. Some layers have a recurrence in place of attention.
    """

    def __init__(self, c: DecoderConfig, index: int, *, init: Initializer) -> None:
        kind, mlp_width = c.kinds[index], c.mlp_width_of(index)
        sparse = c.experts is not None and index in c.experts.layers
        beside = sparse and mlp_width > 0

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, c.norm_eps, offset=c.norm_offset, init=init)

        self.attention_norm = norm(c.width)
        r = c.recurrent if kind.recurrent else None
        self.recurrence = None if r is None else Recurrence(c.width, r, c.norm_eps, init=init)
        if r is None:
            self._add_attention(c, kind, norm, init)
        self.attention_out_norm = norm(c.width) if c.sandwich_norms else None
        self.mlp_norm = norm(c.width)
        self.mlp_out_norm = norm(c.width) if c.sandwich_norms else None
        self.activation, self.neighbours = c.activation, c.rope.neighbours
        self.query_scale = c.heads_of(kind)[1] ** 0.5 if c.query_scale is None else c.query_scale
        self.experts = Experts(c.width, c.experts, eps=c.norm_eps, init=init) if c.experts and sparse else None
        self.experts_norm, self.experts_out_norm, self.dense_out_norm = (
            norm(c.width) if beside else None for _ in range(3)
        )
        self.gate = Linear(c.width, mlp_width, bias=False, init=init) if mlp_width else None
        self.up = Linear(c.width, mlp_width, bias=False, init=init) if mlp_width else None
        self.down = Linear(mlp_width, c.width, bias=False, init=init) if mlp_width else None
        self.mix_input = None if c.layer_inputs is None else MixLayerInput(c, init=init)
        self.scale = init.constant(1.0, 1) if c.layer_scale else None

    def _add_attention(
        self, c: DecoderConfig, kind: LayerKind, norm: Callable[[int], RMSNorm], init: Initializer
    ) -> None:
        kv_heads, head_dim = c.heads_of(kind)

        def split(heads: int) -> SplitHeads:
            return SplitHeads(c.width, heads, head_dim, bias=c.qkv_bias, init=init)

        self.query = split(c.heads)
        self.key = None if kind.shared else split(kv_heads)
        self.value = None if kind.shared or (c.key_is_value and kind.window is None) else split(kv_heads)
        self.query_norm = norm(head_dim) if c.qk_norm else None
        self.key_norm = norm(head_dim) if c.qk_norm and not kind.shared else None
        self.value_norm_eps = c.norm_eps if c.value_norm else None
        self.out_gate = split(c.heads) if c.gated else None
        self.out = JoinHeads(c.width, c.heads, head_dim, bias=c.out_bias, init=init)

    @jax.jit
    def project(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"] | None, Float[Array, "B T K H"] | None]:
        """Rotated queries, rotated keys, and values. The last two are None if it shares those of an earlier one."""
        h = self.attention_norm(x)
        q, k = self.query(h), None if self.key is None else self.key(h)
        v = k if self.value is None else self.value(h)
        if target_platform() == "cpu":
            # In this order XLA starts the product of the queries first, which takes longest, and the others beside it.
            k, v, q = jax.lax.optimization_barrier((k, v, q))
        q = q if self.query_norm is None else self.query_norm(q)
        q = apply_rope(q, rotation.table, neighbours=self.neighbours)
        if self.query_scale != 1:
            q = q * jnp.asarray(self.query_scale, q.dtype)
        if rotation.log_scale is not None:
            q = q * rotation.log_scale.astype(q.dtype)
        if k is None or v is None:
            return q, None, None
        if self.value_norm_eps is not None:
            v = rms_normalised(v, self.value_norm_eps)
        k = k if self.key_norm is None else self.key_norm(k)
        return q, apply_rope(k, rotation.table, neighbours=self.neighbours), v

    @jax.jit
    def recur(
        self, x: Float[Array, "B T D"], state: State | None, valid: Bool[Array, "B T"]
    ) -> tuple[Float[Array, "B T N V"], State]:
        """Runs the layer's recurrence, in place of `project` and attention."""
        assert self.recurrence is not None
        return self.recurrence(self.attention_norm(x), state, valid)

    @jax.jit
    def join(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """Adds the output projection of `attended`, which is from attention or `recur`."""
        if self.recurrence is not None:
            h = self.recurrence.finish(self.attention_norm(x), attended)
        else:
            if self.out_gate is not None:
                attended = attended * jax.nn.sigmoid(self.out_gate(self.attention_norm(x)))
            h = self.out(attended)
        return x + (h if self.attention_out_norm is None else self.attention_out_norm(h))

    @jax.jit
    def finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Adds the output of the MLP or of the experts to that of `join`. `close` is the rest of a layer."""
        h = self.mlp_norm(x)
        if self.gate is not None and self.up is not None and self.down is not None:
            h = self.down(ACTIVATIONS[self.activation](self.gate(h)) * self.up(h))
            if self.experts is not None:
                assert self.experts_norm is not None and self.experts_out_norm is not None
                assert self.dense_out_norm is not None
                h = self.dense_out_norm(h) + self.experts_out_norm(self.experts(self.experts_norm(x), x))
        elif self.experts is not None:
            h = self.experts(h)
        return x + (h if self.mlp_out_norm is None else self.mlp_out_norm(h))

    @jax.jit
    def close(self, x: Float[Array, "B T D"], given: Float[Array, "B T _D"] | None) -> Float[Array, "B T D"]:
        """Adds or mixes in `given` after `finish` (see `Decoder.add_features`), and scales the output of the layer."""
        assert self.mix_input is None or given is not None
        if given is not None:
            x = x + given.astype(x.dtype) if self.mix_input is None else self.mix_input(x, given)
        return x if self.scale is None else x * self.scale[...]


def _log_scale(positions: Int[Array, "B T A"], log_from: int) -> Float[Array, "B T 1 1"]:
    """Log-length scaling of queries (Su 2021): log(n) / log(log_from) for the n-th token, at least 1."""
    n = jnp.max(positions, axis=-1)[..., None, None] + 1.0
    return jnp.maximum(1.0, jnp.log(n) / math.log(log_from))


class Decoder(nnx.Module):
    """Embedding, layers, final norm and output head. The head is None if it is tied to the embedding."""

    def __init__(self, c: DecoderConfig, *, init: Initializer) -> None:
        self.embedding = Embedding(c.vocab_size, c.width, scale=c.embedding_scale, init=init)
        self.layer_inputs = None if c.layer_inputs is None else LayerInputs(c, init=init)
        self.layers = nnx.data(tuple(DecoderLayer(c, i, init=init) for i in range(c.layers)))
        self.norm = RMSNorm(c.width, c.norm_eps, offset=c.norm_offset, init=init)
        self.head = None if c.tied else Linear(c.width, c.vocab_size, bias=False, init=init)
        self.head_dim, self.rope, self.log_from, self.logit_cap = c.head_dim, c.rope, c.log_from, c.logit_cap
        self.sliding_rope = c.rope if c.sliding_rope is None else c.sliding_rope
        self.sliding_head_dim = c.head_dim if c.sliding_heads is None else c.sliding_heads[1]
        self.kinds = c.kinds  # of each layer
        self.image_block, self.image_block_slides = c.image_block, c.image_block_slides

    @property
    def full_layers(self) -> int:
        """Number of layers that policies count; see `LayerKind.is_counted`."""
        return sum(kind.is_counted for kind, _ in zip(self.kinds, self.layers, strict=False))

    def until(self, is_vision: Bool[Array, "B T"]) -> Int[Array, "B T"] | None:
        """Index of the last token that each token attends to: the last one of its image. None: each token itself."""
        return run_ends(is_vision) if self.image_block else None

    def until_in(self, kind: LayerKind, until: Int[Array, "B T"] | None) -> Int[Array, "B T"] | None:
        """`until` for a layer: in some models, image tokens attend to later ones only in layers with a window."""
        return None if kind.window is None and self.image_block_slides else until

    @property
    def ahead(self) -> int:
        """Bound on the number of later tokens that a token attends to."""
        return max(0, self.image_block - 1)

    def rotation(
        self, positions: Int[Array, "B T A"], limit: Int[Array, " B"] | None = None, *, sliding: bool = False
    ) -> Rotation:
        """The argument of `DecoderLayer.project` for these positions; `limit` as in `rope_table`."""
        log_scale = None if self.log_from is None else _log_scale(positions, self.log_from)
        rope, head_dim = (self.sliding_rope, self.sliding_head_dim) if sliding else (self.rope, self.head_dim)
        return Rotation(rope_table(positions, head_dim, rope, limit), log_scale)

    def _rotations(self, positions: Int[Array, "B T A"], limit: Int[Array, " B"] | None) -> tuple[Rotation, Rotation]:
        """The rotations of layers without and with a window."""
        full, same = self.rotation(positions, limit), (self.rope, self.head_dim)
        if (self.sliding_rope, self.sliding_head_dim) == same:
            return full, full
        return full, self.rotation(positions, limit, sliding=True)

    def logits(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch vocab"]:
        """Logits in float32 from the output of the last layer."""
        h = self.norm(x)
        table = self.embedding.weight[...] if self.head is None else self.head.weight[...]
        logits = product(table, h, dtype=jnp.float32)
        return logits if self.logit_cap is None else self.logit_cap * jnp.tanh(logits / self.logit_cap)

    def inputs_of_layers(
        self, ids: Int[Array, "B T"], x: Float[Array, "B T D"], is_vision: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B L T C"] | None:
        """The vectors that every layer mixes into its output (`added` of `add_features`); None: the model has none."""
        return None if self.layer_inputs is None else self.layer_inputs(ids, x, is_vision)

    def add_features(
        self, added: Float[Array, "B S T _D"] | None, layer: int, x: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Calls `DecoderLayer.close` with this layer's part of `added`, which a model has for the first S layers.

        These are features of the tower that are added to the output (DeepStack, Meng et al. 2024), zero for text; or
        vectors that every layer mixes into its output. None: the model has neither.
        """
        return self.layers[layer].close(x, None if added is None or layer >= added.shape[1] else added[:, layer])

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T A"],
        valid: Bool[Array, "B T"],
        added: Float[Array, "B S T D"] | None = None,
        until: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Runs all layers over whole prompts, without a cache. `added` as in `add_features`; `until` from `until`."""

        def after(i: int, carry: None, x: Array) -> tuple[None, Array, None]:
            return carry, self.add_features(added, i, x), None

        attend: Attend[None] = attend_to_prompt(self, valid, until)
        _, x = self.walk(None, x, positions, attend, after, recur=recur_over_prompt(valid))
        return x

    def walk(
        self,
        carry: C,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T A"],
        attend: Attend[C],
        after: After[C] | None = None,
        limit: Int[Array, " B"] | None = None,
        *,
        recur: Recur[C] | None = None,
        narrow: Narrow[C] | None = None,
    ) -> tuple[C, Float[Array, "B _T D"]]:
        """Runs all layers; returns the last carry and the output of the last layer.

        Args:
            carry: what a layer hands to the next one besides `x`. Its structure may change.
            x: input of the first layer.
            positions: of the tokens.
            attend: attention of a layer from rotated queries, rotated keys and values. A layer without keys and values
                gets those of an earlier one (`LayerKind.shared`).
            after: gets the output of a layer, and returns the input of the next one, and the positions of its tokens if
                they have changed. It calls `add_features`, and may reduce the prompt or record. None: nothing to add.
            limit: as in `rope_table`.
            recur: called in place of `attend` in layers with a recurrence.
            narrow: called in the last layer after its attention; returns only the tokens whose output is needed, so
                that the MLP runs for them alone. None: all.
        """
        if isinstance(x, jax.core.Tracer):  # a large program is about to be compiled
            make_room()
        # Keys and values of the last layer with each window, for layers that use those of an earlier one.
        rotations, last_kv = self._rotations(positions, limit), dict[int | None, tuple[Array, Array]]()
        for i, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=False)):
            if layer.recurrence is not None:
                assert recur is not None
                carry, attended = recur(i, carry, partial(layer.recur, x))
            else:
                q, k, v = layer.project(x, rotations[kind.window is not None])
                last_kv[kind.window] = k, v = last_kv[kind.window] if k is None or v is None else (k, v)
                carry, attended = attend(i, carry, q, k, v)
            if narrow is not None and i == len(self.layers) - 1:
                carry, x, attended = narrow(carry, x, attended)
            x = layer.finish(layer.join(x, attended.astype(x.dtype)))
            if after is None:
                x = self.add_features(None, i, x)
                continue
            carry, x, new_positions = after(i, carry, x)
            rotations = rotations if new_positions is None else self._rotations(new_positions, limit)
        return carry, x


def attend_to_prompt(decoder: Decoder, valid: Bool[Array, "B T"], until: Int[Array, "B T"] | None = None) -> Attend[C]:
    """For `Decoder.walk`: attention of a whole prompt, without a cache. The carry is unchanged.

    It is causal, except that each token attends to tokens up to `until`, which is from `Decoder.until`.
    """

    def attend(i: int, carry: C, q: Array, k: Array, v: Array) -> tuple[C, Array]:
        kind = decoder.kinds[i]
        last = decoder.until_in(kind, until)
        return carry, prefill_attention(q, k, v, valid=valid, until=last, ahead=decoder.ahead, window=kind.window)

    return attend


def recur_over_prompt(valid: Bool[Array, "B T"]) -> Recur[C]:
    """For `Decoder.walk`: recurrences over a whole prompt, without a cache. The carry is unchanged."""
    return lambda i, carry, run: (carry, run(None, valid)[0])
