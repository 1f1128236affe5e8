"""A decoder in float64 numpy, written from the equations, that decodes from a given set of kept entries.

Only the weights come from the library. It uses whole matrices and explicit masks, one row at a time.
"""

import dataclasses

import numpy as np


def _array(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def _norm(x, module):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + module.eps) * (_array(module.weight) + (module.offset or 0))


def _rotate(x, positions, rope):  # x [T, heads, H], positions [T] or, for M-RoPE, [T, 3]
    if rope.channels is not None:
        x, rest = np.split(x, [rope.channels], axis=-1)
        whole = dataclasses.replace(rope, channels=None)
        return np.concatenate([_rotate(x, positions, whole), rest], axis=-1)
    half = x.shape[-1] // 2
    frequency = rope.theta ** (-np.arange(half) / half) / (1.0 if rope.divisors is None else np.array(rope.divisors))
    at = positions[:, None] if positions.ndim == 1 else positions[:, list(rope.axes)]
    # Rounded to float32 as in the model and in transformers, because positions may be large.
    angle = np.float64(np.float32(at) * np.float32(frequency))
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _project(layer, x, positions, rope):
    """Queries, keys and values; a layer that uses those of an earlier one has None for keys and values."""
    h = _norm(x, layer.attention_norm)

    def one(module, norm):
        y = np.einsum("td,nhd->tnh", h, _array(module.weight))
        y = y if module.bias is None else y + _array(module.bias)
        return y, y if norm is None else _norm(y, norm)

    q = _rotate(one(layer.query, layer.query_norm)[1], positions, rope) * layer.query_scale
    if layer.key is None:
        return q, None, None
    raw, k = one(layer.key, layer.key_norm)
    v = raw if layer.value is None else one(layer.value, None)[0]
    if layer.value_norm_eps is not None:
        v = v / np.sqrt((v**2).mean(-1, keepdims=True) + layer.value_norm_eps)
    return q, _rotate(k, positions, rope), v


def _finish(layer, x, attended):
    if layer.recurrence is not None:
        gate = np.einsum("td,nhd->tnh", _norm(x, layer.attention_norm), _array(layer.recurrence.out_gate.weight))
        attended = _norm(attended, layer.recurrence.norm) * _ACTIVATIONS["silu"](gate)
    elif layer.out_gate is not None:
        gate = np.einsum("td,nhd->tnh", _norm(x, layer.attention_norm), _array(layer.out_gate.weight))
        attended = attended / (1 + np.exp(-gate))
    out = layer.out if layer.recurrence is None else layer.recurrence.out
    h = np.einsum("tnh,dnh->td", attended, _array(out.weight))
    x = x + (h if layer.attention_out_norm is None else _norm(h, layer.attention_out_norm))
    h = _norm(x, layer.mlp_norm)
    if layer.experts is not None:
        return x + _mixture(layer.experts, h)
    gate, up = h @ _array(layer.gate.weight).T, h @ _array(layer.up.weight).T
    h = (_ACTIVATIONS[layer.activation](gate) * up) @ _array(layer.down.weight).T
    return x + (h if layer.mlp_out_norm is None else _norm(h, layer.mlp_out_norm))


def _close(layer, x, given):
    """`given` is added to the output, or mixed into it."""
    if given is not None and layer.mix_input is None:
        x = x + given
    elif given is not None:
        m = layer.mix_input
        gate = _ACTIVATIONS[m.activation](x @ _array(m.gate.weight).T) * given
        x = x + _norm(gate @ _array(m.projection.weight).T, m.norm)
    return x if layer.scale is None else x * _array(layer.scale)


def layer_inputs(decoder, ids, x, is_vision=False):
    """The vectors [T, C] of every layer, from ids and the input of the first layer; () without such vectors."""
    made = decoder.layer_inputs
    if made is None:
        return ()
    by_id = made.table.scale * _array(made.table.weight)[np.where(is_vision, made.pad, ids)]
    projected = x @ _array(made.projection.weight).T / np.sqrt(x.shape[-1])
    cut = [np.moveaxis(y.reshape(len(x), made.layers, -1), 1, 0) for y in (by_id, projected)]
    return (_norm(cut[1], made.norm) + cut[0]) / np.sqrt(2)


def delta_rule(q, k, v, decay, rate, memory):
    """The gated delta rule of one row, token by token: what each reads [T, N, V], and the memory [N, H, V]."""
    memory, out = np.array(memory, np.float64), np.zeros(v.shape)
    for t in range(len(q)):
        for head in range(v.shape[1]):
            group = head * k.shape[1] // v.shape[1]
            kept = np.exp(decay[t, head]) * memory[head]
            memory[head] = kept + np.outer(k[t, group], rate[t, head] * (v[t, head] - kept.T @ k[t, group]))
            out[t, head] = memory[head].T @ q[t, group]
    return out, memory


def recurrence(module, x, state=None):
    """Of one row x [T, D] after the norm: what each token reads, the memory, and the newest inputs of convolutions."""
    made, newest = [], []
    for i, part in enumerate((module.query, module.key, module.value)):
        conv = _array(part.conv)
        taps = conv.shape[-1]
        y = np.einsum("td,nhd->tnh", x, _array(part.weight))
        y = np.concatenate([np.zeros((taps - 1, *y.shape[1:])) if state is None else state[1][i], y])
        out = sum(y[j : j + len(x)] * conv[..., j] for j in range(taps))
        made.append(_ACTIVATIONS["silu"](out))
        newest.append(y[len(y) - taps + 1 :])
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in made[:2])
    decay = x @ _array(module.decay.weight).T + _array(module.decay.bias)
    decay = -np.exp(_array(module.decay.log_rate)) * np.log1p(np.exp(decay))
    rate = 1 / (1 + np.exp(-x @ _array(module.rate.weight).T))
    memory = np.zeros((made[2].shape[1], k.shape[2], made[2].shape[2])) if state is None else state[0]
    out, memory = delta_rule(q / np.sqrt(q.shape[-1]), k, made[2], decay, rate, memory)
    return out, memory, newest


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
    out = np.einsum("te,tef,edf->td", share, gate / (1 + np.exp(-gate)) * up, _array(experts.down))
    if experts.shared is None:
        return out
    gate, up, down = (_array(m.weight) for m in (experts.shared.gate, experts.shared.up, experts.shared.down))
    shared = (_ACTIVATIONS["silu"](h @ gate.T) * (h @ up.T)) @ down.T
    return out + shared / (1 + np.exp(-h @ _array(experts.shared_gate.weight).T))


def _softmax(x, n=0.0):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / (e.sum(-1, keepdims=True) + n * np.exp(-x.max(-1, keepdims=True)))


def _logits(decoder, x):
    table = decoder.embedding if decoder.head is None else decoder.head
    logits, cap = _norm(x, decoder.norm) @ _array(table.weight).T, decoder.logit_cap
    return logits if cap is None else cap * np.tanh(logits / cap)


def prefill(decoder, x, positions=None, reduce=None, added=(), until=None):
    """Logits of the last token, and q, k, v [T, heads, H] of each layer, for x [T, D] of one row without padding.

    A layer with a recurrence has its state instead: the memory, and the newest inputs of its convolutions.

    reduce: {number of layers: f(x, q, k, places) -> (x, kept)}. `places` are the remaining tokens and `kept` indices
    into them; q, k, v of later layers are NaN for removed tokens.
    added: [T, D] for each of the first layers, added to its output at the tokens that remain; or from `layer_inputs`.
    Reductions count layers with full attention, and windows the tokens of the whole prompt.
    until: the last token of the prompt that each token attends to; None: itself.
    """
    x = np.asarray(x, np.float64)
    length = len(x)
    places, layers = np.arange(length), []
    until = places if until is None else until
    positions = places if positions is None else np.asarray(positions)
    q = k = np.empty(0)
    owned = {}  # keys and values of the last layer of each kind
    for i, (layer, kind) in enumerate(zip(decoder.layers, decoder.kinds, strict=False)):
        window = kind.window
        done = 0 if i == 0 else decoder.kinds[i - 1].number + 1
        if reduce and done in reduce and (i == 0 or decoder.kinds[i - 1].is_counted):
            before = (x, q[places], k[places]) if i else (x, None, None)
            x, kept = reduce[done](*before, places)
            x, places = x[kept], places[kept]
        if kind.recurrent:
            read, *state = recurrence(layer.recurrence, _norm(x, layer.attention_norm))
            x = _finish(layer, x, read)
            layers.append(state)
            continue
        part = _project(layer, x, positions[places], _rope(decoder, i))
        owned[window] = owned[window] if part[1] is None else part[1:]
        part = part[0], *owned[window]
        q, k, v = (np.full((length, *y.shape[1:]), np.nan) for y in part)
        q[places], k[places], v[places] = part
        groups = q.shape[1] // k.shape[1]
        logits = np.einsum("tnh,snh->nts", part[0], np.repeat(part[1], groups, 1)) / np.sqrt(q.shape[-1])
        near = places[:, None] - places < (np.inf if window is None else window)
        last = np.arange(length) if window is None and decoder.image_block_slides else until
        weights = _softmax(np.where((places <= last[places, None]) & near, logits, -np.inf))
        x = _finish(layer, x, np.einsum("nts,snh->tnh", weights, np.repeat(part[2], groups, 1)))
        x = _close(layer, x, np.asarray(added[i], np.float64)[places] if i < len(added) else None)
        layers.append((q, k, v))
    return _logits(decoder, x[-1]), layers


def decode(decoder, layers, kept, tokens, softmax_n=0.0, first=None, evict=None, again=None):
    """Logits after each of `tokens`, attending to prompt entries where kept [L, K, T] and to all tokens fed so far.

    Layers with a window attend to the entries that it contains, whatever `kept` is. Layers with a recurrence go on from
    their state.

    tokens: ids, or the vectors [D] that they are embedded as, in a model whose layers have no other input.
    first: position of the first token; None: the prompt's length.
    evict: for methods that evict: f(layer, key head, places, attention) -> indices of the entries to delete. `places`
    [n] are the entries' tokens in order, `attention` [G, n] is what each entry received.
    again: for entries that are selected again: f(step, layer, queries [N, tokens so far, H], heads) before each token;
    `heads` has places, keys and values of each key head; it returns those that stay.
    """
    asked = [[] for _ in decoder.layers]
    first = kept[0].shape[-1] if first is None else first
    held = [
        list(layer) if kind.recurrent else
        [(np.flatnonzero(mask), layer[1][mask, head], layer[2][mask, head]) for head, mask in enumerate(keep)]
        for layer, keep, kind in zip(layers, kept, decoder.kinds, strict=True)
    ]  # fmt: skip
    out = []
    for step, token in enumerate(tokens):
        if np.ndim(token):
            x, given, seen = np.asarray(token, np.float64)[None], (), {}
        else:
            x = decoder.embedding.scale * _array(decoder.embedding.weight)[token][None]
            given, seen = layer_inputs(decoder, np.array([token]), x), {}
        if again is not None and step:
            counted = [i for i, kind in enumerate(decoder.kinds) if kind.is_counted]
            for i in counted:
                held[i] = again(step, i, np.stack(asked[i], axis=1), held[i])
        for i, layer in enumerate(decoder.layers):
            if decoder.kinds[i].recurrent:
                read, *held[i] = recurrence(layer.recurrence, _norm(x, layer.attention_norm), held[i])
                x = _finish(layer, x, read)
                continue
            q, *new = _project(layer, x, np.array([first + step]), _rope(decoder, i))
            window = decoder.kinds[i].window
            asked[i].append(q[0])
            if new[0] is not None:
                seen[window] = [_with_new(decoder, i, one, [y[:, head] for y in new], kept[0].shape[-1] + step)
                                for head, one in enumerate(held[i])]  # fmt: skip
            attended, groups = np.empty_like(q), q.shape[1] // len(seen[window])
            for head, (places, keys, values) in enumerate(seen[window]):
                queries = slice(head * groups, (head + 1) * groups)
                shares = _softmax(q[0, queries] @ keys.T / np.sqrt(q.shape[-1]), softmax_n)
                attended[0, queries] = shares @ values
                if new[0] is not None:
                    gone = [] if evict is None else evict(i, head, places, shares)
                    held[i][head] = tuple(np.delete(x, gone, axis=0) for x in (places, keys, values))
            x = _close(layer, _finish(layer, x, attended), given[i] if len(given) else None)
        out.append(_logits(decoder, x[0]))
    return np.stack(out)


def _with_new(decoder, layer, held, new, place):
    """Places, keys and values of one key head with those of the new token, without those that leave the window."""
    places = np.append(held[0], place)
    keys, values = (np.vstack([old, x]) for old, x in zip(held[1:], new, strict=True))
    window = decoder.kinds[layer].window
    near = slice(None) if window is None else places > place - window
    return places[near], keys[near], values[near]
