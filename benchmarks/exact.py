"""The ops of `pallas_kernels` in float64 numpy, from their definitions: the reference for every kernel.

Axes: B batch · T query rows · S keys · R weightings · N query heads · K key heads · G = N/K · P pool slots ·
M bound on a segment · H head dim.
"""

import math
from typing import Any

import numpy as np


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def segments(
    q: Any, k: Any, v: Any, start: Any, length: Any, takes_part: Any, softmax_n: float = 0.0, bound: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Attention of one query per row [B, N, H] to the slots of a segment of k and v [B, K, P, H] that take part.

    `start` and `length` are [B, K]. `takes_part` [B, K, M] is counted from `start`; None: every slot of the segment.
    `softmax_n` is the constant in the denominator, `bound` M (None: P). Returns attention [B, N, H], log of the
    denominator [B, N], and the probabilities [B, N, M].
    """
    q, start, length = wide(q), np.asarray(start), np.asarray(length)
    batch, heads, head_dim = q.shape
    kv_heads, slots = np.shape(k)[1:3]
    bound = slots if bound is None else bound
    out, lse = np.zeros(q.shape), np.zeros((batch, heads))
    mass = np.zeros((batch, heads, bound))
    for b, head in np.ndindex(batch, kv_heads):
        place = np.arange(length[b, head])
        if takes_part is not None:
            place = place[np.asarray(takes_part)[b, head, : len(place)]]
        first, last = int(start[b, head]), int(start[b, head]) + int(length[b, head])
        keys, values = (wide(x[b, head, first:last])[place] for x in (k, v))  # fetches only the segment of a large pool
        of_head = slice(head * heads // kv_heads, (head + 1) * heads // kv_heads)
        p, lse[b, of_head] = _softmax(q[b, of_head] @ keys.T / math.sqrt(head_dim), softmax_n)
        mass[b, of_head][:, place] = p
        out[b, of_head] = p @ values
    return out, lse, mass


def listed(rows: Any, count: Any, text: Any, length: Any, bound: int) -> np.ndarray:
    """Which slots [B, K, M] take part in `core_attention`: the listed ones below `text`, and all from `text` on."""
    place = np.arange(bound)
    core = np.zeros((len(rows), bound), bool)
    for b, row in enumerate(np.asarray(rows)):
        core[b, row[: int(np.asarray(count)[b])]] = True
    text, length = np.asarray(text)[..., None], np.asarray(length)[..., None]
    return np.where(place < text, core[:, None], True) & (place < length)


def probabilities(
    q: Any, k: Any, mask: Any, place: Any, *, causal: bool = True, softmax_n: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """The attention matrix [N, T, S] of one prompt, and a mask of the elements that are allowed.

    q is [N, T, H], k [K, S, H], `mask` [S] says which keys exist, and `place` [T] is the index of each row among the
    keys: if `causal`, a row sees keys up to its own index.
    """
    q, k = wide(q), wide(k)
    k = np.repeat(k, q.shape[0] // k.shape[0], axis=0)
    logits = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
    allowed = np.broadcast_to(np.asarray(mask, bool), logits.shape[1:])
    if causal:
        allowed = allowed & (np.arange(k.shape[1]) <= np.asarray(place)[:, None])
    return _softmax(np.where(allowed, logits, -np.inf), softmax_n)[0], allowed


def _softmax(logits: np.ndarray, softmax_n: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities along the last axis, with a constant in the denominator, and the denominator's logarithm."""
    peak = np.max(logits, axis=-1, keepdims=True, initial=0.0 if softmax_n else -np.inf)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    e = np.exp(logits - peak)
    total = e.sum(axis=-1, keepdims=True) + softmax_n * np.exp(-peak)
    with np.errstate(divide="ignore"):
        return e / np.where(total > 0, total, 1.0), (np.log(total) + peak)[..., 0]


def counts(p: np.ndarray, allowed: np.ndarray, threshold: float, slack: float) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the probabilities [N, T, S] that reach `threshold` times their row's largest: certainly, and possibly.

    `slack` is the largest rounding error of a logit.
    """
    level = threshold * p.max(axis=-1, keepdims=True)
    return allowed & (p >= level * math.exp(slack)), allowed & (p >= level * math.exp(-slack))


def prompt(q: Any, k: Any, v: Any, valid: Any, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Attention of a prompt [B, T, N, H] and log of the denominators [B, N, T], +inf for padding."""
    q, k, v = wide(q), wide(k), wide(v)
    batch, length, heads, head_dim = q.shape
    valid = np.ones((batch, length), bool) if valid is None else np.asarray(valid)
    allowed = valid[:, None] & (np.tri(length, dtype=bool) | (not causal))
    out, lse = np.zeros(q.shape), np.full((batch, heads, length), np.inf)
    for b, n in np.ndindex(batch, heads):
        head = n * k.shape[2] // heads
        logits = np.where(allowed[b], q[b, :, n] @ k[b, :, head].T / math.sqrt(head_dim), -np.inf)
        p, lse[b, n, valid[b]] = _softmax(logits[valid[b]])
        out[b, valid[b], n] = p @ v[b, :, head]
    return out, lse
