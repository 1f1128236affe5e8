"""prefill_attention by cuDNN's fused attention, for A100 and later: one launch instead of XLA's loop over blocks.

cuDNN expects padding at the end of each row. So the tokens of other rows are moved to the front, and their results
back. This calls jax's internal function instead of `jax.nn.dot_product_attention`, which rounds the log-sum-exp to
bfloat16.

Axes: B batch · T tokens · N query heads · K key heads · H head dim.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn.fused_attention_stablehlo import MaskType, check_compute_capability, dot_product_attention
from jax._src.lib import cuda_versions
from jaxtyping import Array, Int

from pallas_kernels.prefill_attention.reference import Attended, PrefillArguments

_LEAST = 64  # tokens: cuDNN does not support some shorter shapes, for which XLA is fast


def prefill_attention_cudnn(args: PrefillArguments, interpret: bool = False) -> Attended:
    """Implements `prefill_attention`. Padding gets zeros. `interpret` computes the same with XLA instead of cuDNN."""
    attend, valid = _xla if interpret else _cudnn, args.valid
    if valid is None:
        return attend(args, None)
    place = jnp.arange(valid.shape[1], dtype=jnp.int32)
    before = jnp.cumsum(valid, axis=1, dtype=jnp.int32)  # valid tokens up to and including each index
    count = before[:, -1:]
    to = jnp.where(valid, before - 1, count + place - before)  # tokens first, then padding; faster than a sort
    order = jax.vmap(lambda to: jnp.zeros_like(to).at[to].set(place, unique_indices=True))(to)
    q, k, v = (_take(x, order, axis=1) for x in (args.q, args.k, args.v))
    moved = dataclasses.replace(args, q=q, k=k, v=v)
    # A row without tokens attends to its first entry, which avoids a softmax over nothing.
    part = attend(moved, jnp.maximum(count[:, 0], 1))
    out = jnp.where(valid[..., None, None], _take(part.out, to, axis=1), 0)
    return Attended(out, None if part.lse is None else _take(part.lse, to, axis=2))


def missing() -> str | None:
    """Returns what this host lacks to run or compile cuDNN's attention, or None if nothing."""
    return "jax's CUDA plugin is not installed" if cuda_versions is None else None


def unsupported(args: PrefillArguments) -> str | None:
    """Returns why cuDNN cannot run with these arguments, or None if it can."""
    q, k, v = args.q, args.k, args.v
    if args.until is not None:
        return "it cannot attend in both directions within an image"
    if args.place is not None:
        return "its window counts indices, and the tokens have other places"
    if {q.dtype, k.dtype, v.dtype} not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}):
        return f"queries, keys and values are {q.dtype}, {k.dtype} and {v.dtype}, not all bfloat16 or all float16"
    most = 256 if check_compute_capability("9.0") else 128  # without a GPU on this host the check passes
    if q.shape[3] % 8 or q.shape[3] > most:
        return f"{q.shape[3]} channels of a head are not a multiple of 8 up to {most}"
    if q.shape[1] < _LEAST:
        return f"{q.shape[1]} tokens are fewer than {_LEAST}"
    return None


def _cudnn(args: PrefillArguments, count: Int[Array, " B"] | None) -> Attended:
    """Attention by cuDNN among the first `count` tokens of each row; the results of other tokens are undefined."""
    if count is None:
        mask = MaskType.CAUSAL if args.causal else MaskType.NO_MASK
    else:
        mask = MaskType.PADDING_CAUSAL if args.causal else MaskType.PADDING
    options: dict[str, Any] = {
        "scale": args.q.shape[-1] ** -0.5,
        "mask_type": mask,
        "sliding_window_length": args.window,
    }
    options |= {"q_seqlen": count, "kv_seqlen": count, "return_residual": args.return_lse}
    result = dot_product_attention(args.q, args.k, args.v, **options)
    return Attended(*result) if args.return_lse else Attended(result)


def _xla(args: PrefillArguments, count: Int[Array, " B"] | None) -> Attended:
    """The same as `_cudnn`, by jax's reference implementation in float32."""
    wide = (x.astype(jnp.float32) for x in (args.q, args.k, args.v))
    options: dict[str, Any] = {"is_causal": args.causal, "query_seq_lengths": count, "key_value_seq_lengths": count}
    options["local_window_size"] = None if args.window is None else (args.window - 1, 0)
    out, lse = jax.nn.dot_product_attention(*wide, **options, implementation="xla", return_residual=True)
    return Attended(out.astype(args.q.dtype), lse.swapaxes(1, 2) if args.return_lse else None)


def _take(x: Array, order: Int[Array, "B T"], axis: int) -> Array:
    shape = [1] * x.ndim
    shape[0], shape[axis] = order.shape
    return jnp.take_along_axis(x, order.reshape(shape), axis=axis, mode="promise_in_bounds")
