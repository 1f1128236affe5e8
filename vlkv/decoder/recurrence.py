"""A layer with the gated delta rule in place of attention, as in Qwen3-Next and Qwen3.5.

Queries, keys and values pass through a causal convolution of few tokens, channel by channel, before the delta rule; a
normalised and gated output follows it. What a later token needs of the earlier ones is a `State` of constant size.

Axes: B batch · T tokens · K key heads · N value heads · H channels of a key · V channels of a value · D width ·
R = taps - 1 tokens before a token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from vlkv.cache.states import State
from vlkv.config import RecurrentConfig
from vlkv.decoder.delta_rule import delta_rule
from vlkv.decoder.layers import Initializer, JoinHeads, Linear, RMSNorm, SplitHeads, product

_EPS = 1e-6  # of the lengths of queries and keys


class Convolved(SplitHeads):
    """A projection into heads, and the weights of a convolution over tokens: taps from the oldest to the newest."""

    def __init__(self, width: int, heads: int, head_dim: int, taps: int, *, init: Initializer) -> None:
        super().__init__(width, heads, head_dim, bias=False, init=init)
        self.conv = init.normal(heads, head_dim, taps, scale=taps**-0.5)


class Decay(nnx.Module):
    """g = -exp(log_rate) softplus(x W^T + b), in float32."""

    def __init__(self, width: int, heads: int, *, init: Initializer) -> None:
        self.weight = init.normal(heads, width, scale=width**-0.5)
        self.bias, self.log_rate = init.constant(1.0, heads), init.constant(0.0, heads)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N"]:
        """The logarithm of each head's decay."""
        y = product(self.weight[...], x).astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return -jnp.exp(self.log_rate[...].astype(jnp.float32)) * jax.nn.softplus(y)


class Recurrence(nnx.Module):
    """All of it but the norm before and the residual connection after it."""

    def __init__(self, width: int, c: RecurrentConfig, norm_eps: float, *, init: Initializer) -> None:
        self.query = Convolved(width, c.key_heads, c.key_dim, c.taps, init=init)
        self.key = Convolved(width, c.key_heads, c.key_dim, c.taps, init=init)
        self.value = Convolved(width, c.heads, c.value_dim, c.taps, init=init)
        self.decay = Decay(width, c.heads, init=init)
        self.rate = Linear(width, c.heads, bias=False, init=init)
        self.out_gate = SplitHeads(width, c.heads, c.value_dim, bias=False, init=init)
        self.norm = RMSNorm(c.value_dim, norm_eps, init=init)
        self.out = JoinHeads(width, c.heads, c.value_dim, init=init, bias=False)
        self.taps = c.taps

    def __call__(
        self, x: Float[Array, "B T D"], state: State | None, valid: Bool[Array, "B T"]
    ) -> tuple[Float[Array, "B T N V"], State]:
        """What the tokens read, for `finish`, and the state after them. `x` is the input after the norm.

        Padding, where `valid` is False, changes nothing, and its results mean nothing.
        """
        parts = (self.query, self.key, self.value)
        before = (None,) * 3 if state is None else state.newest
        index = _earlier(valid, self.taps)
        convolved = [_convolve(part, x, old, index) for part, old in zip(parts, before, strict=True)]
        (q, k, v), newest = [y for y, _ in convolved], (convolved[0][1], convolved[1][1], convolved[2][1])
        q, k = (y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + _EPS) for y in (q, k))
        decay, rate = self.decay(x), jax.nn.sigmoid(self.rate(x))
        decay, rate = (jnp.where(valid[..., None], y, 0) for y in (decay, rate))
        memory = jnp.zeros((len(x), *v.shape[2:3], k.shape[3], v.shape[3])) if state is None else state.memory
        out, memory = delta_rule(q * k.shape[3] ** -0.5, k, v, decay, rate, memory)
        return out, State(memory=memory, newest=newest)

    def finish(self, x: Float[Array, "B T D"], read: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        """The output: normalised, gated, projected. `x` is the input of `__call__`."""
        gate = jax.nn.silu(self.out_gate(x).astype(jnp.float32))
        return self.out((self.norm(read) * gate).astype(x.dtype))


def _earlier(valid: Bool[Array, "B T"], taps: int) -> tuple[Int[Array, "B taps T"], Int[Array, "B R"]]:
    """For `_convolve`: which inputs the convolution of each token sees, and which are the newest after all tokens.

    Numbers 0 to R - 1 are inputs of earlier calls, R + t is that of token t. Padding is skipped.
    """
    number = jnp.arange(taps - 1 + valid.shape[1])
    there = jnp.pad(valid, ((0, 0), (taps - 1, 0)), constant_values=True)
    last = jax.lax.cummax(jnp.where(there, number, 0), axis=1)  # the last input up to each one
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)))  # the last input before each one

    def back(at: Int[Array, "B n"], steps: int) -> Int[Array, "B steps n"]:
        """Each of these inputs after the ones before it."""
        inputs = [at]
        for _ in range(steps - 1):
            inputs.insert(0, jnp.take_along_axis(before, inputs[0], axis=1))
        return jnp.stack(inputs, axis=1)

    tokens = jnp.broadcast_to(number[taps - 1 :], valid.shape)
    return back(tokens, taps), back(last[:, -1:], taps - 1)[..., 0]


def _convolve(
    part: Convolved,
    x: Float[Array, "B T D"],
    old: Float[Array, "B R heads channels"] | None,
    index: tuple[Int[Array, "B taps T"], Int[Array, "B R"]],
) -> tuple[Float[Array, "B T heads channels"], Float[Array, "B R heads channels"]]:
    """Projects, convolves and activates, in float32; also returns the newest inputs of the convolution."""
    y, (seen, newest) = part(x), index
    taps = seen.shape[1]
    old = jnp.zeros((len(x), taps - 1, *y.shape[2:]), y.dtype) if old is None else old
    every = jnp.concatenate([old.astype(y.dtype), y], axis=1)

    def take(at: Int[Array, "B n"]) -> Float[Array, "B n heads channels"]:
        return jnp.take_along_axis(every, at[..., None, None], axis=1, mode="promise_in_bounds")

    weight = part.conv[...].astype(jnp.float32)
    out = sum(take(seen[:, i]).astype(jnp.float32) * weight[..., i] for i in range(taps))
    return jax.nn.silu(jnp.asarray(out).astype(y.dtype)).astype(jnp.float32), take(newest)
