"""A decoder in float64 numpy, written from the equations, that decodes from a given set of kept entries.

Only the weights come from the library. It uses whole matrices and explicit masks, one row at a time.
"""

from __future__ import annotations

import numpy as np


def _array(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def _norm(x, module):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + module.eps) * (_array(module.weight) + (module.offset or 0))


def _rotate(x, positions, rope):  # x [T, heads, H], positions [T] or, for M-RoPE, [T, 3]
    half = x.shape[-1] // 2
    frequency = rope.theta ** (-np.arange(half) / half) / (1.0 if rope.divisors is None else np.array(rope.divisors))
    if positions.ndim == 1:
        angle = positions[:, None] * frequency
    else:
        angle = np.stack([positions[:, axis] * f for axis, f in zip(rope.axes, frequency, strict=True)], axis=1)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _project(layer, x, positions, rope):
    h = _norm(x, layer.attention_norm)
    q, k, v = (np.einsum("td,nhd->tnh", h, _array(m.weight)) for m in (layer.query, layer.key, layer.value))
    if layer.query.bias is not None:
        q, k, v = (y + _array(m.bias) for y, m in ((q, layer.query), (k, layer.key), (v, layer.value)))
    if layer.query_norm is not None:
        q, k = _norm(q, layer.query_norm), _norm(k, layer.key_norm)
    return _rotate(q, positions, rope) * layer.query_scale, _rotate(k, positions, rope), v


def _finish(layer, x, attended):
    h = np.einsum("tnh,dnh->td", attended, _array(layer.out.weight))
    x = x + (h if layer.attention_out_norm is None else _norm(h, layer.attention_out_norm))
    h = _norm(x, layer.mlp_norm)
    if layer.experts is not None:
        return x + _mixture(layer.experts, h)
    gate, up = h @ _array(layer.gate.weight).T, h @ _array(layer.up.weight).T
    h = (_ACTIVATIONS[layer.activation](gate) * up) @ _array(layer.down.weight).T
    return x + (h if layer.mlp_out_norm is None else _norm(h, layer.mlp_out_norm))


_ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_pytorch_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def _rope(decoder, layer):
    return decoder.rope if decoder.kinds[layer].window is None else decoder.sliding_rope


def _mixture(experts, h):
    """The experts one by one, each for all tokens; those that a token does not choose have share 0."""
    share = _softmax(h @ _array(experts.router.weight).T)
    share = np.where(share >= np.sort(share, axis=1)[:, -experts.active, None], share, 0)
    share = share / (share.sum(axis=1, keepdims=True) if experts.normalised else 1)
    gate, up = (np.einsum("td,efd->tef", h, _array(weight)) for weight in (experts.gate, experts.up))
    return np.einsum("te,tef,edf->td", share, gate / (1 + np.exp(-gate)) * up, _array(experts.down))


def _softmax(x, n=0.0):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / (e.sum(-1, keepdims=True) + n * np.exp(-x.max(-1, keepdims=True)))


def _logits(decoder, x):
    table = decoder.embedding if decoder.head is None else decoder.head
    return _norm(x, decoder.norm) @ _array(table.weight).T


def prefill(decoder, x, positions=None, reduce=None, added=(), until=None):
    """Logits of the last token, and q, k, v [T, heads, H] of each layer, for x [T, D] of one row without padding.

    reduce: {number of layers: f(x, q, k, places) -> (x, kept)}. `places` are the remaining tokens and `kept` indices
    into them; q, k, v of later layers are NaN for removed tokens.
    added: [T, D] for each of the first layers, added to its output at the tokens that remain.
    Reductions count layers with full attention, and windows the tokens of the whole prompt.
    until: the last token of the prompt that each token attends to; None: itself.
    """
    x = np.asarray(x, np.float64)
    length = len(x)
    places, layers = np.arange(length), []
    until = places if until is None else until
    positions = places if positions is None else np.asarray(positions)
    q = k = np.empty(0)
    for i, (layer, (window, *_)) in enumerate(zip(decoder.layers, decoder.kinds, strict=False)):
        done = 0 if i == 0 else decoder.kinds[i - 1].number + 1
        if reduce and done in reduce and (i == 0 or decoder.kinds[i - 1].window is None):
            before = (x, q[places], k[places]) if i else (x, None, None)
            x, kept = reduce[done](*before, places)
            x, places = x[kept], places[kept]
        part = _project(layer, x, positions[places], _rope(decoder, i))
        q, k, v = (np.full((length, *y.shape[1:]), np.nan) for y in part)
        q[places], k[places], v[places] = part
        groups = q.shape[1] // k.shape[1]
        logits = np.einsum("tnh,snh->nts", part[0], np.repeat(part[1], groups, 1)) / np.sqrt(q.shape[-1])
        near = places[:, None] - places < (np.inf if window is None else window)
        weights = _softmax(np.where((places <= until[places, None]) & near, logits, -np.inf))
        x = _finish(layer, x, np.einsum("nts,snh->tnh", weights, np.repeat(part[2], groups, 1)))
        x = x + (np.asarray(added[i], np.float64)[places] if i < len(added) else 0)
        layers.append((q, k, v))
    return _logits(decoder, x[-1]), layers


def decode(decoder, layers, kept, tokens, softmax_n=0.0, first=None, evict=None):
    """Logits after each of `tokens`, attending to prompt entries where kept [L, K, T] and to all tokens fed so far.

    Layers with a window attend to the entries that it contains, whatever `kept` is.

    first: position of the first token; None: the prompt's length.
    evict: for methods that evict: f(layer, key head, places, attention) -> indices of the entries to delete. `places`
    [n] are the entries' tokens in order, `attention` [G, n] is what each entry received.
    """
    first = kept.shape[-1] if first is None else first
    held = [
        [(np.flatnonzero(mask), k[mask, head], v[mask, head]) for head, mask in enumerate(keep)]
        for (_, k, v), keep in zip(layers, kept, strict=True)
    ]
    out = []
    for step, token in enumerate(tokens):
        x = decoder.embedding.scale * _array(decoder.embedding.weight)[token][None]
        for i, layer in enumerate(decoder.layers):
            q, *new = _project(layer, x, np.array([first + step]), _rope(decoder, i))
            attended, groups = np.empty_like(q), q.shape[1] // new[0].shape[1]
            for head, (before, *entries) in enumerate(held[i]):
                places = np.append(before, kept.shape[-1] + step)
                keys, values = (np.vstack([old, x[:, head]]) for old, x in zip(entries, new, strict=True))
                if decoder.kinds[i].window is not None:
                    near = places > kept.shape[-1] + step - decoder.kinds[i].window
                    places, keys, values = places[near], keys[near], values[near]
                queries = slice(head * groups, (head + 1) * groups)
                shares = _softmax(q[0, queries] @ keys.T / np.sqrt(q.shape[-1]), softmax_n)
                attended[0, queries] = shares @ values
                gone = [] if evict is None else evict(i, head, places, shares)
                held[i][head] = tuple(np.delete(x, gone, axis=0) for x in (places, keys, values))
            x = _finish(layer, x, attended)
        out.append(_logits(decoder, x[0]))
    return np.stack(out)
