"""The decoder of all families, which has the shape of Llama.

Axes: B batch · T tokens · N query heads · K key heads · H head dim · D width · A position axes · S first layers.
The layers are a tuple (docs/architecture.md, decision 1), and `Decoder.walk` is the only loop over them. The caller
passes it the function that computes attention, and what this function carries from layer to layer; so prefill,
decoding, scoring and tracing share all other code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from vlkv.config import DecoderConfig
from vlkv.decoder.experts import Experts
from vlkv.decoder.layers import ACTIVATIONS, Embedding, Initializer, JoinHeads, Linear, RMSNorm, SplitHeads, product
from vlkv.decoder.memory_maps import make_room
from vlkv.decoder.rope import apply_rope, rope_table
from vlkv.masks import run_ends
from vlkv.sharding.ops import prefill_attention

C = TypeVar("C")  # the carry of `Decoder.walk`
# layer, carry, [B,T,N,H], [B,T,K,H], [B,T,K,H] -> carry, [B,T,N,H]
Attend = Callable[[int, C, Array, Array, Array], tuple[C, Array]]
# layer, carry, [B,T,D] -> carry, [B,t,D], [B,t,A] or None
After = Callable[[int, C, Array], tuple[C, Array, Array | None]]


class Rotation(NamedTuple):
    """Arrays that depend on positions and are the same in every layer."""

    table: Float[Array, "B T 1 _H"]  # for `apply_rope`
    log_scale: Float[Array, "B T 1 1"] | None  # factor of queries; see `_log_scale`


class DecoderLayer(nnx.Module):
    """Attention and gated MLP or experts, with RMSNorms before and possibly after both, and residual connections."""

    def __init__(self, c: DecoderConfig, index: int, *, init: Initializer) -> None:
        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, c.norm_eps, offset=c.norm_offset, init=init)

        self.attention_norm = norm(c.width)
        self.query = SplitHeads(c.width, c.heads, c.head_dim, bias=c.qkv_bias, init=init)
        self.key = SplitHeads(c.width, c.kv_heads, c.head_dim, bias=c.qkv_bias, init=init)
        self.value = SplitHeads(c.width, c.kv_heads, c.head_dim, bias=c.qkv_bias, init=init)
        self.query_norm = norm(c.head_dim) if c.qk_norm else None
        self.key_norm = norm(c.head_dim) if c.qk_norm else None
        self.out = JoinHeads(c.width, c.heads, c.head_dim, bias=c.out_bias, init=init)
        self.attention_out_norm = norm(c.width) if c.sandwich_norms else None
        self.mlp_norm = norm(c.width)
        self.mlp_out_norm = norm(c.width) if c.sandwich_norms else None
        self.activation, self.query_scale, self.neighbours = c.activation, c.query_scale, c.rope.neighbours
        if c.experts is not None and c.is_sparse(index):
            self.experts: Experts | None = Experts(c.width, c.experts, init=init)
            return
        self.experts = None
        self.gate = Linear(c.width, c.mlp_width, bias=False, init=init)
        self.up = Linear(c.width, c.mlp_width, bias=False, init=init)
        self.down = Linear(c.mlp_width, c.width, bias=False, init=init)

    @jax.jit
    def project(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Rotated queries, rotated keys, and values."""
        h = self.attention_norm(x)
        q, k = self.query(h), self.key(h)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = (apply_rope(y, rotation.table, neighbours=self.neighbours) for y in (q, k))
        if self.query_scale != 1:
            q = q * jnp.asarray(self.query_scale, q.dtype)
        if rotation.log_scale is not None:
            q = q * rotation.log_scale.astype(q.dtype)
        return q, k, self.value(h)

    @jax.jit
    def finish(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """The rest of the layer. `attended` is the output of attention, before the output projection."""
        h = self.out(attended)
        x = x + (h if self.attention_out_norm is None else self.attention_out_norm(h))
        h = self.mlp_norm(x)
        if self.experts is not None:
            h = self.experts(h)
        else:
            h = self.down(ACTIVATIONS[self.activation](self.gate(h)) * self.up(h))
        return x + (h if self.mlp_out_norm is None else self.mlp_out_norm(h))


def _log_scale(positions: Int[Array, "B T A"], log_from: int) -> Float[Array, "B T 1 1"]:
    """Log-length scaling of queries (Su 2021): log(n) / log(log_from) for the n-th token, at least 1."""
    n = jnp.max(positions, axis=-1)[..., None, None] + 1.0
    return jnp.maximum(1.0, jnp.log(n) / math.log(log_from))


class Decoder(nnx.Module):
    """Embedding, layers, final norm and output head. The head is None if it is tied to the embedding."""

    def __init__(self, c: DecoderConfig, *, init: Initializer) -> None:
        self.embedding = Embedding(c.vocab_size, c.width, scale=c.embedding_scale, init=init)
        self.layers = nnx.data(tuple(DecoderLayer(c, i, init=init) for i in range(c.layers)))
        self.norm = RMSNorm(c.width, c.norm_eps, offset=c.norm_offset, init=init)
        self.head = None if c.tied else Linear(c.width, c.vocab_size, bias=False, init=init)
        self.head_dim, self.rope, self.log_from = c.head_dim, c.rope, c.log_from
        self.sliding_rope = c.rope if c.sliding_rope is None else c.sliding_rope
        self.kinds = c.kinds  # of each layer
        self.image_block = c.image_block

    @property
    def full_layers(self) -> int:
        """Number of layers with full attention, which are those that policies count."""
        return sum(kind.window is None for kind, _ in zip(self.kinds, self.layers, strict=False))

    def until(self, is_vision: Bool[Array, "B T"]) -> Int[Array, "B T"] | None:
        """The last token that each token of a prompt attends to: that of its image. None: each token itself."""
        return run_ends(is_vision) if self.image_block else None

    @property
    def ahead(self) -> int:
        """The most tokens after its own that a token attends to."""
        return max(0, self.image_block - 1)

    def rotation(
        self, positions: Int[Array, "B T A"], limit: Int[Array, " B"] | None = None, *, sliding: bool = False
    ) -> Rotation:
        """The argument `rotation` of `DecoderLayer.project` for these positions.

        Args:
            positions: of the tokens.
            limit: as in `rope_table`.
            sliding: whether the layer has a window.
        """
        log_scale = None if self.log_from is None else _log_scale(positions, self.log_from)
        rope = self.sliding_rope if sliding else self.rope
        return Rotation(rope_table(positions, self.head_dim, rope, limit), log_scale)

    def _rotations(self, positions: Int[Array, "B T A"], limit: Int[Array, " B"] | None) -> tuple[Rotation, Rotation]:
        """The rotations of layers without and with a window."""
        full = self.rotation(positions, limit)
        return full, full if self.sliding_rope == self.rope else self.rotation(positions, limit, sliding=True)

    def logits(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch vocab"]:
        """Logits in float32 from the output of the last layer."""
        h = self.norm(x)
        table = self.embedding.weight[...] if self.head is None else self.head.weight[...]
        return product(table, h, dtype=jnp.float32)

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
            return carry, add_features(added, i, x), None

        _, x = self.walk(None, x, positions, attend_to_prompt(self, valid, until), after)
        return x

    def walk(
        self,
        carry: C,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T A"],
        attend: Attend[C],
        after: After[C] | None = None,
        limit: Int[Array, " B"] | None = None,
    ) -> tuple[C, Float[Array, "B _T D"]]:
        """Runs all layers; returns the last carry and the output of the last layer.

        Args:
            carry: what a layer hands to the next one besides `x`, like the carry of `lax.scan`. Its structure
                may change.
            x: input of the first layer.
            positions: of the tokens.
            attend: attend(i, carry, q, k, v) computes attention of layer i from rotated queries, rotated keys and
                values; returns the new carry and the result.
            after: after(i, carry, x) gets the output of layer i and returns the new carry, the input of layer i + 1,
                and the positions of its tokens or None if they are unchanged. It may reduce the prompt, add features,
                or record.
            limit: as in `rope_table`.
        """
        if isinstance(x, jax.core.Tracer):  # a large program is about to be compiled
            make_room()
        rotations = self._rotations(positions, limit)
        for i, layer in enumerate(self.layers):
            carry, attended = attend(i, carry, *layer.project(x, rotations[self.kinds[i].window is not None]))
            x = layer.finish(x, attended.astype(x.dtype))
            if after is not None:
                carry, x, moved = after(i, carry, x)
                rotations = rotations if moved is None else self._rotations(moved, limit)
        return carry, x


def add_features(added: Float[Array, "B S T D"] | None, layer: int, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The output of a layer with its features of the tower (DeepStack, Meng et al. 2024); later layers have none.

    Args:
        added: what is added after each of the first S layers, zero for text; None: nothing.
        layer: index of the layer.
        x: its output.
    """
    return x if added is None or layer >= added.shape[1] else x + added[:, layer].astype(x.dtype)


def attend_to_prompt(decoder: Decoder, valid: Bool[Array, "B T"], until: Int[Array, "B T"] | None = None) -> Attend[C]:
    """For `Decoder.walk`: attention of a whole prompt, without a cache. The carry is unchanged.

    It is causal, except that each token attends to tokens up to `until`, which is from `Decoder.until`.
    """
    return lambda i, carry, q, k, v: (
        carry,
        prefill_attention(q, k, v, valid=valid, until=until, ahead=decoder.ahead, window=decoder.kinds[i].window),
    )
