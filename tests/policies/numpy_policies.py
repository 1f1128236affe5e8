"""The methods in float64 numpy, written from the equations, for one prompt without padding.

Axes: L layers · N query heads · K key heads · T tokens · H head dim.
"""

import math

import numpy as np

from vlkv import policies

CASES: list = []  # every method with equations here, with options


def case(**options):
    """Adds the method of the function's name, with these options, to `CASES`. Options are changed in pairs, and lengths
    of windows are equal where they may be, so that programs are shared."""

    def add(function):
        CASES.append(policies.named(function.__name__)(**options))
        return function

    return add


def attention(q, k, keys=None, n=0, sees=None):
    """softmax_n(q k^T / sqrt(H)) over `keys` [T]; q [N,T,H], k [K,T,H] -> [N,T,T].

    `sees` [T,T]: which tokens each token may attend to; None: itself and those before it.
    """
    k = np.repeat(k, len(q) // len(k), axis=0)
    logits = np.einsum("nth,nsh->nts", np.float64(q), np.float64(k)) / math.sqrt(q.shape[-1])
    allowed = np.tri(q.shape[1], dtype=bool) if sees is None else sees
    if keys is not None:
        allowed = allowed & keys
    peak = logits.max(axis=-1, keepdims=True)
    e = np.where(allowed, np.exp(logits - peak), 0)
    total = e.sum(axis=-1, keepdims=True) + n * np.exp(-peak)
    return e / np.where(total > 0, total, 1)


def per_key_head(x, kv_heads):
    return x.reshape(kv_heads, -1, x.shape[-1]).mean(axis=1)


def total_budget(layers, tokens, keep=None, budget=None):
    asked = layers * budget if keep is None else math.floor(keep * layers * tokens + 0.5)
    return min(layers * tokens, max(layers, asked))


def uniform(total, layers):
    return [total // layers + (i < total % layers) for i in range(layers)]


def apportion(real, total, most, low=1):
    """Clips to [low, most], shares the excess over the layers inside the bounds, repeats; then largest remainders."""
    low = min(low, most)
    value, free = np.array(real, np.float64), np.ones(len(real), bool)
    while ((value < low) | (value > most))[free].any():
        out = free & ((value < low) | (value > most))
        excess = (value - np.clip(value, low, most))[out].sum()
        value[out] = np.clip(value, low, most)[out]
        free &= ~out
        if value[free].sum() > 0:
            value[free] *= 1 + excess / value[free].sum()
    whole = np.floor(value + 1e-9).astype(int)
    while whole.sum() > total:  # the lower bounds may sum to more than the total
        whole[min((i for i in range(len(real)) if whole[i] > low), key=lambda i: value[i] - whole[i])] -= 1
    while whole.sum() < min(total, len(real) * most):  # one pass, unless the bounds leave too little
        for i in sorted(range(len(real)), key=lambda i: -np.round((value[i] - whole[i]) * 1024)):
            whole[i] += whole.sum() < total and whole[i] < most
    return list(whole)


def pyramid(mean, window, layers, beta=20):
    low = (mean - window) / beta
    return np.linspace(2 * (mean - window) - low, low, layers) + window


def take(scores, scope, protected, budget):
    """Keeps all text, and in the scope protected tokens (later ones first), then the best; ties to the earlier."""
    order = sorted(np.flatnonzero(scope), key=lambda t: (0, -t, 0) if protected[t] else (1, -scores[t], t))
    kept = ~scope
    kept[order[:budget]] = True
    return kept


class Prompt:
    """One prompt with all layers, and the policy's budget."""

    def __init__(self, q, k, vision, scope, keep=None, budget=None, until=None, norms=None, later=None, lse=None):
        self.norms, self.later, self.lse = norms, later, lse  # of projected values [L,K,T]; of a repetition [L,N,R,H]
        self.q, self.k, self.vision = q, k, vision
        self.v = k[..., ::-1]  # as in the tests
        self.layers, self.heads, self.tokens = k.shape[:3]
        self.everything = scope == "all"
        self.scope = np.ones(self.tokens, bool) if self.everything else vision
        self.most = int(self.scope.sum())
        self.keep = keep
        self.total = total_budget(self.layers, self.most, keep, budget) if self.most else 0
        self.place = np.arange(self.tokens)
        self.sees = self.place <= (self.place if until is None else until)[:, None]  # [T, T]
        self.instruction = self.place > max(np.flatnonzero(vision), default=-1)

    def finish(self, scores, budgets, protected=None):
        """kept [L,K,T], budgets [L] or [L,K]; `protected`, [T] or [L,T], counts only when every token is in scope."""
        if protected is None or not self.everything:
            protected = np.zeros(self.tokens, bool)
        protected = np.broadcast_to(protected, (self.layers, self.tokens))
        each = [np.broadcast_to(budget, self.heads) for budget in budgets]
        kept = [
            [take(scores[layer][head], self.scope, protected[layer], each[layer][head]) for head in range(self.heads)]
            for layer in range(self.layers)
        ]
        return np.array(kept), np.array(budgets), np.array(scores)

    @property
    def equal(self):
        return uniform(self.total, self.layers)

    def attention(self, q, k, keys=None, n=0):
        return attention(q, k, keys, n, self.sees)

    def column_sums(self):
        return [self.attention(q, k).sum(axis=1) for q, k in zip(self.q, self.k, strict=True)]


@case(budget=7, sinks=2)
@case(keep=0.3, scope="vision")
def streamingllm(p, sinks=4):
    scores = np.broadcast_to(p.place, (p.layers, p.heads, p.tokens))
    return p.finish(scores, p.equal, p.place < min(sinks, p.total // p.layers))


@case(keep=0.45)
@case(keep=0.37, scope="vision")
@case(budget=6, recent=2)
@case(keep=0.5, recent=0.75)
def h2o(p, recent=None):
    recent = 0.5 if recent is None else recent
    recent = int(recent * (p.total // p.layers)) if isinstance(recent, float) else recent
    scores = [per_key_head(x, p.heads) for x in p.column_sums()]
    newest = np.cumsum(p.scope[::-1])[::-1] <= recent  # of the candidates
    return p.finish(scores, p.equal, p.scope & newest)


@case(keep=0.4)
@case(budget=6, recent=2)
def tova(p, recent=0):
    scores = [np.broadcast_to(p.attention(q, k)[:, -1].mean(axis=0), (p.heads, p.tokens))
              for q, k in zip(p.q, p.k, strict=True)]  # fmt: skip
    return p.finish(scores, p.equal, p.place >= p.tokens - recent)


@case(budget=7)
def knorm(p):
    return p.finish(-np.linalg.norm(np.float64(p.k), axis=-1), p.equal)


@case(keep=0.4)
@case(keep=0.3, scope="vision")
def keydiff(p):
    unit = p.k / np.linalg.norm(np.float64(p.k), axis=-1, keepdims=True)
    mean = unit.mean(axis=2, keepdims=True)
    cosine = (unit * mean).sum(axis=-1) / np.linalg.norm(mean, axis=-1)
    return p.finish(-cosine, p.equal)


def snap_window(p, window):
    """Rows of the observation window, and the candidates besides it."""
    if p.everything and window >= p.total // p.layers:
        window = max(1, p.total // p.layers // 2)
    inside = p.place >= p.tokens - window
    return inside, p.scope & ~inside if p.everything else p.scope


def smoothed(x, kernel, pooling):
    around = np.lib.stride_tricks.sliding_window_view(np.pad(x, [(0, 0), (kernel // 2, kernel // 2)]), kernel, axis=1)
    return around.mean(axis=-1) if pooling == "avg" else around.max(axis=-1)


@case(keep=0.61, window=4)
@case(budget=5, window=4, kernel=3, scope="vision")
@case(keep=0.3)  # the window is longer than the prompt
@case(keep=0.3, scope="vision", observers="text")  # and than the text after the image
def snapkv(p, window=32, kernel=5, pooling="avg", allocation="uniform", observers="last"):
    inside, candidates = snap_window(p, window)
    if observers == "text":
        inside &= p.place > np.max(np.flatnonzero(p.vision), initial=-1)
    scores = [
        smoothed(per_key_head(p.attention(q, k)[:, inside].sum(axis=1), p.heads) * candidates, kernel, pooling)
        for q, k in zip(p.q, p.k, strict=True)
    ]
    budgets = p.equal
    if allocation == "pyramid":
        always = (p.scope & ~candidates).sum()
        budgets = apportion(pyramid(p.total / p.layers, always, p.layers), p.total, p.most)
    return p.finish(scores, budgets, inside)


@case(keep=0.5, window=4, kernel=3, pooling="avg")
@case(keep=0.6, window=4, kernel=5, pooling="avg", scope="vision")
def pyramidkv(p, window=8, kernel=7, pooling="max"):
    return snapkv(p, window, kernel, pooling, "pyramid")


@case(keep=0.45, window=4, chunk=3)
@case(keep=0.4, window=4, kernel=3, pooling="max", chunk=4, scope="vision")
def chunkkv(p, window=32, kernel=1, pooling="avg", chunk=10):
    inside, candidates = snap_window(p, window)
    means = []
    for scores in snapkv(p, window, kernel, pooling)[2]:
        of_layer = np.zeros(p.tokens)
        for part in np.split(np.flatnonzero(candidates), range(chunk, int(candidates.sum()), chunk)):
            of_layer[part] = scores.sum(axis=0)[part].sum() / max(1, len(part))
        means.append(np.broadcast_to(of_layer, (p.heads, p.tokens)))
    return p.finish(means, p.equal, inside)


@case(keep=0.5, sinks=2, lag=4)
@case(budget=9, sinks=1, lag=5, one_order=True)
@case(keep=0.4)  # the prompt has fewer than two parts
def lagkv(p, sinks=4, lag=128, one_order=False):
    if p.tokens < sinks + 2 * lag:
        later = np.where(p.place < sinks, 1, (p.place - sinks) / max(p.tokens - sinks, 1))
        return p.finish(np.broadcast_to(later, (p.layers, p.heads, p.tokens)), p.equal)

    def spread(part, following):
        low, high = following.min(axis=0), following.max(axis=0)
        deviation = np.exp(((part - low) / (high - low)).std(axis=1, ddof=1))
        return deviation / deviation.sum()

    scores = np.ones((p.layers, p.heads, p.tokens))
    for layer, head in np.ndindex(p.layers, p.heads):
        for begin in range(sinks, p.tokens - 2 * lag + 1, lag):
            x = [
                [y[layer, head, i : i + lag] for i in (begin, begin + lag)] for y in (np.float64(p.k), np.float64(p.v))
            ]
            part = (spread(*x[0]) + spread(*x[1])) / 2
            scores[layer, head, begin : begin + lag] = part if one_order else part.argsort().argsort() / lag
    return p.finish(scores, p.equal)


@case(keep=0.5)
@case(keep=0.4, temporal=0.8, recent=0.6, scope="vision")
@case(budget=9, temporal=0.7, recent=0.5, pooled=False)
def infinipotv(p, temporal=0.5, recent=0.25, pooled=True):
    """A frame is a run of vision tokens, in lines of five patches."""
    frame = np.cumsum(p.vision & ~np.append(False, p.vision[:-1])) - 1
    patch = np.array([np.sum(frame[:t][p.vision[:t]] == frame[t]) for t in p.place])
    grid = np.where(p.vision[:, None], np.stack([frame, patch // 5, patch % 5], axis=1), -1)
    count = round(temporal * (p.total // p.layers))
    scores = np.zeros((p.layers, p.heads, p.tokens))
    for layer, head in np.ndindex(p.layers, p.heads):
        window = (7, 5, 3, 1)[layer * 4 // p.layers] if pooled else 1
        scores[layer, head] = infinipotv_head(p.k[layer, head], p.v[layer, head], grid, p.scope, count, window, recent)
    return p.finish(scores, p.equal)


def infinipotv_head(k, v, grid, scope, count, window, recent):
    """Scores [T] of one head. `window`: patches on a side; 3: tokens; 1: values are not averaged."""
    (frame, line, column), tokens = grid.T, np.arange(len(k))
    vision, norm, reach = frame >= 0, np.linalg.norm(np.float64(v), axis=1), window // 2
    unit = np.float64(k) / np.linalg.norm(np.float64(k), axis=1, keepdims=True)
    means = norm.copy()
    for t in np.flatnonzero(scope & (vision if window > 3 else scope)):
        near = scope & (abs(tokens - t) <= reach)
        if window > 3:
            near = (frame == frame[t]) & (abs(line - line[t]) <= reach) & (abs(column - column[t]) <= reach)
        means[t] = norm[near].mean()
    few = [f for f in sorted({*frame[vision]})[1:] if (frame >= f).sum() <= math.floor(recent * vision.sum() + 1e-9)]
    begin = min(np.flatnonzero(frame == min(few, default=frame.max())), default=len(k))
    begin = begin if len({*frame[vision]}) > 1 else len(k)
    kept = tokens[(tokens >= begin) & scope][-count:] if count else []
    alike = {}
    for t in np.flatnonzero(vision[:begin]):
        same = vision & (tokens >= begin) & (line == line[t]) & (column == column[t])
        alike[t] = (unit[same] @ unit[t]).mean() if same.any() else 0.0
    scores = means / max(means[scope], default=1)
    scores[sorted(alike, key=lambda t: (alike[t], t))[: max(count - len(kept), 0)]] += 2
    scores[kept] += 4
    return scores


@case(keep=0.4)
@case(budget=5, scope="vision")
def qfilters(p):
    filters = []
    for q in np.float64(p.q).reshape(-1, *p.q.shape[2:]):
        axis = np.linalg.svd(q)[2][0]
        filters.append(axis * np.sign((q @ axis).sum()))
    filters = np.reshape(filters, (p.layers, p.heads, -1, p.k.shape[-1])).mean(axis=2)
    return p.finish(np.einsum("lkth,lkh->lkt", np.float64(p.k), filters), p.equal)


@case(keep=0.6, sinks=1, recent=3, window=4)
@case(keep=0.5, sinks=2, recent=2, heads=((0.1, 0.9), (0.5, 0.2), (0.3, 0.4)))
@case(budget=7, sinks=1, recent=2, scope="vision", window=4)
def duoattention(p, sinks=128, recent=256, heads=None, window=32):
    mean = p.total // p.layers
    sinks = min(sinks, mean)
    inside = (p.place < sinks) | (p.place >= p.tokens - min(recent, mean - sinks))
    if heads is None:
        rows = [
            per_key_head(attention(*layer)[:, -window:].sum(axis=1), p.heads) for layer in zip(p.q, p.k, strict=True)
        ]
        heads = [row[:, ~inside].sum(axis=1) / row.sum(axis=1) for row in rows]
    least = int(inside.sum()) if p.everything else 0
    budgets, room = np.full((p.layers, p.heads), least), p.heads * (p.total - p.layers * least)
    for place in sorted(np.ndindex(p.layers, p.heads), key=lambda place: -np.float32(heads[place[0]][place[1]])):
        budgets[place] += min(room, p.most - least)
        room -= budgets[place] - least
    return p.finish(np.broadcast_to(p.place, (p.layers, p.heads, p.tokens)), budgets, inside)


@case(keep=0.5, window=4, kernel=3)
@case(keep=0.35, window=4, kernel=5, pooling="avg", safeguard=0.0, scope="vision")
@case(budget=6, kernel=5, pooling="avg", safeguard=0.5)
def adakv(p, window=32, kernel=7, pooling="max", safeguard=0.2):
    _, means, scores = snapkv(p, window, kernel, pooling)
    inside, candidates = snap_window(p, window)
    always, budgets = (p.scope & ~candidates).sum(), []
    for mean, layer in zip(means, scores, strict=True):
        least = min(always, mean)
        places = ((head, t) for head in range(p.heads) for t in np.flatnonzero(candidates))
        order = sorted(places, key=lambda x: (-layer[x], *x))
        counts = np.bincount([head for head, _ in order[: p.heads * (mean - least)]], minlength=p.heads)
        real = least + (1 - safeguard) * counts + safeguard * (mean - least)
        budgets.append(apportion(real, p.heads * mean, p.most))
    return p.finish(scores, budgets, inside)


@case(keep=0.5, window=4, gamma=5.0)
@case(keep=0.35, window=4, kernel=3, pooling="max", tau1=1.6, tau2=0.4, scope="vision")
def cake(p, window=32, kernel=5, pooling="avg", gamma=200.0, tau1=1.0, tau2=1.0):
    inside, candidates = snap_window(p, window)
    scores, preferences = [], []
    for q, k in zip(p.q, p.k, strict=True):
        a = attention(q, k)[:, inside] * candidates
        variance = a.var(axis=1, ddof=1) if inside.sum() > 1 else np.zeros((len(q), p.tokens))
        scores.append(smoothed(per_key_head(a.mean(axis=1) + gamma * variance, p.heads), kernel, pooling))
        entropy = -(a * np.log(a + 1e-10)).sum()
        preferences.append(max(entropy, 1e-30) ** (1 / tau1) * max(variance.sum(), 1e-30) ** (1 / tau2))
    always = min((p.scope & ~candidates).sum(), p.total // p.layers)
    real = always + (p.total - p.layers * always) * np.array(preferences) / sum(preferences)
    return p.finish(scores, apportion(real, p.total, p.most), inside)


@case(keep=0.4, window=4)
@case(budget=6, window=4, scope="vision")
def mixkv(p, window=32, kernel=5, pooling="avg"):
    inside, candidates = snap_window(p, window)
    scores = []
    for layer, (q, k) in enumerate(zip(p.q, p.k, strict=True)):
        a = smoothed(per_key_head(attention(q, k)[:, inside].sum(axis=1), p.heads) * candidates, kernel, pooling)
        found = np.zeros((p.heads, p.tokens))
        for head, keys in enumerate(np.float64(k)):
            unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
            pairs = unit @ unit.T
            w = (pairs.sum() - p.tokens) / max(p.tokens * (p.tokens - 1), 1)
            w = min(max(w, 0), 1)
            both = []
            for whole in (-unit @ unit.mean(axis=0), np.linalg.norm(np.float64(p.v[layer, head]), axis=-1)):
                x = whole[candidates]
                if len(x):
                    x = (x - x.min()) / (np.ptp(x) + 1e-8)
                    x *= a[head, candidates].mean() / (x.mean() + 1e-8)
                both.append(x)
            found[head, candidates] = w * both[0] + (1 - w) * (a[head, candidates] + both[1])
        scores.append(found)
    return p.finish(scores, p.equal, inside)


@case(keep=0.4, window=4)
@case(budget=6, window=4, neighbours=3, strength=2.0, scope="vision")
@case(budget=8, window=4, earlier=1, kernel=1)
@case(keep=0.4, window=4, earlier=0, scope="vision")
def bacon(p, window=32, kernel=5, pooling="avg", neighbours=5, earlier=4, strength=0.5):
    inside, candidates = snap_window(p, window)
    scores, evidence, rankings = [], [], []
    budgets, always = p.equal, (p.scope & ~candidates).sum()
    for layer, (q, k) in enumerate(zip(p.q, p.k, strict=True)):
        rows = attention(q, k)[:, inside]
        mean, last = (
            smoothed(per_key_head(x, p.heads) * candidates, kernel, pooling) for x in (rows.mean(axis=1), rows[:, -1])
        )
        evidence.append(np.maximum(last - mean, 0) * candidates)
        before = evidence[max(0, layer - earlier) : layer]
        found = evidence[-1] + smoothed(evidence[-1], neighbours, "avg") + (np.mean(before, axis=0) if before else 0)
        best = [np.sort(x[:, candidates])[:, ::-1][:, : 2 * max(budgets[layer] - always, 0)] for x in (mean, found)]
        if best[0].size:
            ratio = best[0].std(axis=1) / (best[1].std(axis=1) + 1e-8)
            found *= (strength * ratio * np.minimum(best[1].mean(axis=1) / (best[0].mean(axis=1) + 1e-8), 1))[:, None]
        scores.append(mean * inside.sum())
        rankings.append(mean + found)
    kept, budgets, _ = p.finish(rankings, budgets, inside)
    return kept, budgets, np.array(scores)


@case(keep=0.4, window=4, kernel=3)
@case(budget=8, window=4, first_share=0.3, epsilon=0.01)
@case(keep=0.5, window=4, scope="vision")
def criticalkv(p, window=32, kernel=5, pooling="avg", first_share=0.5, epsilon=1e-4):
    _, budgets, scores = snapkv(p, window, kernel, pooling)
    inside, free = snap_window(p, window)
    kept = []
    for layer, budget in enumerate(budgets):
        left = max(0, budget - (p.scope & ~free).sum())
        for head, attended in enumerate(scores[layer]):
            first = best(attended, free, int(first_share * left))
            product = (attended + inside.sum() * epsilon) * p.norms[layer, head]
            second = best(product, free & ~first, left - first.sum())
            kept.append(~p.scope | first | second | best(p.place, p.scope & ~free, budget))
    return np.array(kept).reshape(p.layers, p.heads, -1), np.array(budgets), np.array(scores)


def as_complex(x):
    """The channel pairs (i, i + H/2) as complex numbers."""
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def as_real(z):
    return np.concatenate([z.real, z.imag], axis=-1)


@case(keep=0.4, ahead=20, sinks=2)
@case(budget=7, ahead=20, covariance=False, epsilon=0.02)
@case(keep=0.4, ahead=20, value_norm=False, scope="vision")
def expectedattention(p, ahead=512, sinks=4, covariance=True, value_norm=True, epsilon=0.0, theta=100.0):
    """Queries are rotated by complex numbers; R is linear, so the covariance of R q is R Sigma R^T."""
    length, half = p.tokens, p.q.shape[-1] // 2
    angle = np.arange(length + ahead)[:, None] * theta ** (-np.arange(half) / half)
    future = np.exp(1j * angle[length:]).mean(axis=0)
    group, after = p.q.shape[1] // p.heads, p.place >= sinks
    scores = np.full((p.layers, p.heads, length), 0.0 if after.any() else 1.0)
    for layer, n in np.ndindex(*p.q.shape[:2]) if after.any() else ():
        queries = (as_complex(np.float64(p.q[layer, n])) * np.exp(-1j * angle[:length]))[after]
        mu, keys = queries.mean(axis=0), np.float64(p.k[layer, n // group])
        logits = keys @ as_real(mu * future) / np.sqrt(2 * half)
        if covariance:
            rotated = as_real((queries - mu) * future)
            logits += ((keys @ rotated.T) ** 2).mean(axis=1) / (4 * half)
        total = np.log(np.exp(logits[after]).sum())
        scores[layer, n // group] += np.exp(np.minimum(logits - total, 0)) / group  # sinks: relative to the same sum
    if value_norm:
        scores = (scores + epsilon) * np.linalg.norm(np.float64(p.v), axis=-1)
    return p.finish(scores, p.equal, ~after)


@case(keep=0.4, sinks=2)
@case(budget=5, scope="vision")
def kvzip(p, sinks=4):
    keys = np.repeat(np.float64(p.k), p.q.shape[1] // p.heads, axis=1)
    logits = np.einsum("lnrh,lnth->lnrt", np.float64(p.later), keys) / math.sqrt(p.k.shape[-1])
    scores = np.exp(logits - p.lse[..., None]).max(axis=2).reshape(p.layers, p.heads, -1, p.tokens).max(axis=2)
    protected = (p.place < sinks) & p.everything
    return p.finish(scores, shared_order(p, scores, p.scope & ~protected), protected)


def shared_order(p, scores, candidates, safeguard=0.0):
    """Budgets [L,K]: how many of the best candidates of all layers and heads together each head has."""
    always = min((p.scope & ~candidates).sum(), p.total // p.layers)
    left = p.heads * (p.total - p.layers * always)
    order = sorted(
        ((layer, head, t) for layer in range(p.layers) for head in range(p.heads) for t in np.flatnonzero(candidates)),
        key=lambda x: (-scores[x], *x),
    )
    counts = np.bincount([layer * p.heads + head for layer, head, _ in order[:left]], minlength=p.layers * p.heads)
    real = always + (1 - safeguard) * counts + safeguard * left / len(counts)
    return np.array(apportion(real, p.heads * p.total, p.most)).reshape(p.layers, p.heads)


@case(keep=0.4, window=4)
@case(budget=9, window=4, kernel=3, safeguard=0.3)
@case(keep=0.3, window=4, relative=False, scope="vision")
def damage(p, window=32, kernel=1, pooling="max", safeguard=0.0, relative=True):
    inside, candidates = snap_window(p, window)
    scores = np.zeros((p.layers, p.heads, p.tokens))
    for layer, (q, k) in enumerate(zip(p.q, p.k, strict=True)):
        for n, rows in enumerate(p.attention(q, k)[:, inside]):
            head = n // (len(q) // p.heads)
            value = np.float64(p.v[layer, head])
            for row in rows:
                for t in np.flatnonzero(row):
                    others = np.where(p.place == t, 0, row)
                    change = np.linalg.norm(others @ value / max(others.sum(), 1e-30) - row @ value)
                    scores[layer, head, t] += change / (np.linalg.norm(row @ value) if relative else 1)
    scores = np.array([smoothed(x * candidates, kernel, pooling) for x in scores / inside.sum() / (len(q) / p.heads)])
    return p.finish(scores, shared_order(p, scores, candidates, safeguard), inside)


@case(keep=0.4)
@case(budget=9, sinks=2, scope="all")
def tgvkv(p, sinks=4):
    rows = np.flatnonzero(p.instruction if p.instruction.any() else p.place == p.tokens - 1)
    scores, grounding = [], []
    for q, k in zip(p.q, p.k, strict=True):
        a = attention(q, k).mean(axis=0)
        text = a[np.ix_(rows, rows)].sum(axis=0) / np.arange(len(rows), 0, -1)
        vision = text @ a[rows]
        score = np.where(p.vision, vision, a.sum(axis=0) + vision.max()) if p.everything else vision
        scores.append(np.broadcast_to(score, (p.heads, p.tokens)))
        grounding.append(a[rows][:, p.vision].sum())
    share = np.array(grounding) if sum(grounding) > 0 else np.ones(p.layers)
    protected = (p.place < sinks) | (p.place == p.tokens - 1)
    return p.finish(scores, apportion(p.total * share / share.sum(), p.total, p.most), protected)


def skewness(x):
    n = len(x)
    if n < 3 or np.ptp(x) <= 1e-9 * abs(x).max():
        return 0.0
    return n / ((n - 1) * (n - 2)) * (((x - x.mean()) / x.std(ddof=1)) ** 3).sum()


def over_mean(x):
    return np.array(x) / np.mean(x) if np.mean(x) > 0 else np.ones(len(x))


@case(keep=0.4)
@case(budget=5, cutoff=0.1, scope="vision")
def flashcache(p, cutoff=0.2):
    frequency = np.arange(p.tokens)
    basis = np.cos(np.pi * frequency[:, None] * (2 * p.place + 1) / (2 * p.tokens))
    basis /= np.linalg.norm(basis, axis=1, keepdims=True)
    scores, outliers = [], []
    for layer in zip(p.k, p.v, strict=True):
        spectra = [basis @ np.float64(x) for x in layer]
        high = [np.where(frequency[:, None] <= math.floor(cutoff * p.tokens + 1e-9), 0, x) for x in spectra]
        scores.append(sum(((basis.T @ x) ** 2).mean(axis=-1) for x in high))
        outliers.append(sum((x**2).sum() / (y**2).sum() for x, y in zip(high, spectra, strict=True)))
    real = p.total * np.array(outliers) / max(sum(outliers), 1e-30)
    return p.finish(scores, apportion(real, p.total, p.most))


@case(keep=0.4)
@case(budget=5, alpha=1.0)
@case(keep=0.4, alpha=0.5, scope="all", merging=0.4)
@case(keep=0.9, alpha=0.0)
@case(keep=0.2, window="text", allocation="strength", merging=0.6)
@case(keep=0.4, window="recent", rows=4, heads="each")
@case(keep=0.4, window="vision", rows=4, allocation="uniform")
@case(keep=0.4, allocation="skewness")
@case(keep=0.6, allocation="pyramid")
def aircache(p, alpha=0.9, window="elite", rows=32, allocation="both", heads="mean"):
    scores, strength, skew = [], [], []
    for q, k in zip(p.q, p.k, strict=True):
        if window == "elite":
            text_attention = p.attention(q, k, p.instruction)[:, -1].mean(axis=0)
            watch = p.instruction & (text_attention >= alpha * text_attention.max())
        elif window == "text":
            watch = p.instruction
        else:
            group = np.flatnonzero(p.instruction if window == "recent" else p.vision)[-rows:]
            watch = np.isin(p.place, group)
        keys = np.ones(p.tokens, bool) if p.everything else p.vision | watch
        each = p.attention(q, k, keys)[:, watch].mean(axis=1) if watch.any() else np.zeros((len(q), p.tokens))
        each, importance = per_key_head(each, p.heads), each.mean(axis=0)
        scores.append(each if heads == "each" else np.broadcast_to(importance, (p.heads, p.tokens)))
        strength.append(importance[p.scope].sum())
        skew.append(max(0.0, skewness(importance[p.scope])))
    share = {
        "both": (over_mean(strength) + over_mean(skew)) / 2,
        "strength": over_mean(strength),
        "skewness": over_mean(skew),
    }
    mean = p.total / p.layers if p.keep is None else p.keep * p.most
    if allocation == "uniform":
        budgets = p.equal
    else:
        real = pyramid(mean, 0, p.layers) if allocation == "pyramid" else share[allocation] * mean
        budgets = apportion(real, p.total, p.most)
    return p.finish(scores, budgets)


@case(keep=0.4)
@case(keep=0.15, sinks=4, recent=2, merging="cosine")
@case(keep=0.35, scope="vision", merging="position")
@case(budget=9, sinks=0, recent=0)
def prefixkv(p, sinks=1, recent=1):
    scores = [np.broadcast_to(x.mean(axis=0), (p.heads, p.tokens)) for x in p.column_sums()]
    importance = [x[0][p.scope] for x in scores]
    reached = [np.cumsum(np.sort(x / x.sum())[::-1]) for x in importance]  # P_l(1), P_l(2), ...
    least = sinks + recent if p.everything else 1
    budgets = [min(least, p.total // p.layers)] * p.layers
    while sum(budgets) < p.total:  # raises the threshold p until reaching it needs one more token
        open_layers = [i for i in range(p.layers) if budgets[i] < p.most]
        budgets[min(open_layers, key=lambda i: (reached[i][budgets[i] - 1] if budgets[i] else 0, i))] += 1
    return p.finish(scores, budgets, (p.place < sinks) | (p.place >= p.tokens - recent))


@case(keep=0.4)
@case(budget=8, threshold=0.2, window=0.5)
@case(keep=0.3, scope="vision")
def vlcache(p, threshold=0.01, window=0.1):
    rows = p.instruction if p.instruction.any() else p.place == p.tokens - 1
    scores, density = [], []
    for q, k in zip(p.q, p.k, strict=True):
        a = p.attention(q, k)[:, rows]
        scores.append(per_key_head(a.sum(axis=1), p.heads))
        counted = (a > 0) & (a >= threshold * a.max(axis=-1, keepdims=True))
        density.append(counted.sum(axis=(1, 2)).mean() / (p.place[rows] + 1).sum())
    low = min(max(1, p.most // 100), p.total // p.layers)
    budgets = apportion(np.array(density) / sum(density) * p.total, p.total, p.most, low)
    windows = [max(1, int(window * n)) for n in budgets]
    return p.finish(scores, budgets, [p.place >= p.tokens - n for n in windows])


@case(keep=0.4)
@case(budget=6, sinks=2, recent=3, scope="vision")
def elasticcache(p, sinks=1, recent=1, merging="position"):
    scores = [np.broadcast_to(x.mean(axis=0), (p.heads, p.tokens)) for x in p.column_sums()]
    return p.finish(scores, p.equal, (p.place < sinks) | (p.place >= p.tokens - recent))


@case(keep=0.4, merging="pivot")
@case(keep=0.5, scope="vision", merging="weighted")
@case(budget=9, recent=3, text_prior=False, merging="average")
def lookm(p, recent=None, text_prior=True, merging="pivot", sinks=4):
    recent = p.total // p.layers // 2 if recent is None else recent
    scores = [per_key_head(x, p.heads) for x in p.column_sums()]
    if text_prior:
        scores = [x + ~p.vision * x.max(axis=-1, keepdims=True) for x in scores]
    first = 0 if text_prior else sinks
    return p.finish(scores, p.equal, (p.place < first) | (p.place >= p.tokens - recent))


def nats(p):
    return -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)


@case(keep=0.4)
@case(budget=6, entropy="all")
@case(keep=0.5, scope="vision")
def meda(p, entropy="cross-modal"):
    everywhere = np.full((p.tokens, p.tokens), True)
    scores, spread = [], []
    for q, k, sums in zip(p.q, p.k, p.column_sums(), strict=True):
        each = per_key_head(sums, p.heads)
        scores.append(each + ~p.vision * each.max(axis=-1, keepdims=True))
        if entropy == "all":
            spread.append(nats(p.attention(q, k)).mean())
        elif p.vision.any() and not p.vision.all():
            text, image = (attention(q, k, keys, sees=everywhere) for keys in (~p.vision, p.vision))
            spread.append(nats(image[:, ~p.vision]).mean() + nats(text[:, p.vision]).mean())
        else:
            spread.append(0.0)
    weight = np.exp(spread)
    budgets = apportion(
        p.total * weight / weight.sum(), p.total, p.most, min(max(1, p.most // 100), p.total // p.layers)
    )
    return p.finish(scores, budgets, [p.place >= p.tokens - n // 2 for n in budgets])


def merged(k, v, kept, way):
    """Entries [K,T,H] of one layer after each dropped one is merged into a kept one, one token at a time."""
    given = [[[] for _ in head] for head in kept]
    for head, stays in enumerate(kept):
        homes = np.flatnonzero(stays)
        for t in np.flatnonzero(~stays):
            if way == "position":
                home, weight = min(homes, key=lambda c: (abs(c - t), c)), 1.0
            else:
                a, b = np.float64(k[head, t]), np.float64(k[head, homes])
                cosine = b @ a / np.linalg.norm(a) / np.linalg.norm(b, axis=-1)
                home, weight = homes[cosine.argmax()], cosine.max() if way == "weighted" else 1.0
            given[head][home].append((t, weight))
    out = []
    for x in (np.float64(k), np.float64(v)):
        y = x.copy()
        for head, stays in enumerate(kept):
            for c in np.flatnonzero(stays):
                parts = [(x[head, t] + x[head, c]) / 2 if way == "pivot" else w * x[head, t] for t, w in given[head][c]]
                y[head, c] = (x[head, c] + sum(parts)) / (1 + len(parts))
        out.append(y)
    return out


def merged_share(x, kept, scores, scope, share):
    """AirCache: of one layer [K,T,H], the best `share` of the dropped is averaged into the nearest kept entry."""
    out = np.float64(x)
    for head, stays in enumerate(kept):
        homes, gone = np.flatnonzero(stays & scope), np.flatnonzero(~stays)
        given = {home: [np.float64(x[head, home])] for home in homes}
        for t in sorted(gone, key=lambda t, head=head: (-scores[head, t], t))[: int(share * len(gone))]:
            given[min(homes, key=lambda home, t=t: (abs(home - t), home))].append(np.float64(x[head, t]))
        for home, parts in given.items():
            out[head, home] = np.mean(parts, axis=0)
    return out


def best(x, candidates, count):
    """A mask of the `count` largest among the candidates; ties to the earlier."""
    order = sorted(np.flatnonzero(candidates), key=lambda t: (-x[t], t))
    return np.isin(np.arange(len(x)), order[:count])


@case(keep=0.4, recent=2)
@case(budget=6, spread=0.2, scope="vision")
@case(keep=0.6)
def roco(p, spread=0.5, recent=10):
    protected = (p.place >= p.tokens - recent) & p.everything
    budgets, kept, scores = p.equal, [], []
    seen_by = p.sees.sum(axis=0)  # rows
    for q, k, budget in zip(p.q, p.k, budgets, strict=True):
        a = p.attention(q, k).reshape(p.heads, -1, p.tokens)  # rows of all heads of a group
        rows = seen_by * (a.shape[1] // p.tokens)
        mean = a.sum(axis=1) / rows
        spreads = np.sqrt(np.maximum((a**2).sum(axis=1) / rows - mean**2, 0))
        scores.append(mean)
        spare = max(0, budget - protected.sum())
        for x, deviation in zip(mean, spreads, strict=True):
            stays = best(deviation, p.scope & ~protected, int(spread * spare))
            stays |= best(x, p.scope & ~protected & ~stays, spare - stays.sum())
            kept.append(~p.scope | stays | best(p.place, protected, budget))
    return np.array(kept).reshape(p.layers, p.heads, -1), np.array(budgets), np.array(scores)


@case(keep=0.6, window=4, heads="each", fill=True)
@case(budget=9, window=4, c="auto", score_n=0.0, heads="each")
@case(keep=0.4, window=4, scope="vision", fill=True)
@case(keep=0.4)
@case(keep=0.5, window=4, recent_bias=1.5)
@case(keep=0.6, window=4, recent_bias=0, c=0.3, heads="each")
@case(keep=0.4, window=4, regions=False, scope="vision")
def csp(p, c=0.5, window=None, recent_bias=1, score_n=1.0, heads="mean", regions=True, fill=False):
    rows = max(1, p.total // p.layers // 2) if window is None else window
    protected = (p.place >= p.tokens - rows * recent_bias) & p.everything
    free = p.scope & ~protected
    kept, scores = [], []
    for q, k, budget in zip(p.q, p.k, p.equal, strict=True):
        a = p.attention(q, k, n=score_n)[:, -rows:]
        same = p.vision[-rows:, None] == p.vision
        own, cross = (per_key_head((a * which).sum(axis=1), p.heads) for which in (same, ~same))
        if heads == "mean":
            own, cross = (np.broadcast_to(x.mean(axis=0), x.shape) for x in (own, cross))
        scores.append(own + cross)
        count = max(0, budget - protected.sum())
        for s, x in zip(own, cross, strict=True):
            share = x[free].sum() / max((s + x)[free].sum(), 1e-30) if c == "auto" else c
            n_own = count - int(share * count)
            n_own = min(max(n_own, count - (x[free] > 0).sum()), (s[free] > 0).sum())
            stays = best(s, free, n_own)
            stays |= best(x, free & ~stays if fill else free, count - n_own)
            if not regions:
                stays = best(s + x, free, count)
            if count >= free.sum():
                stays = free
            kept.append(~p.scope | stays | best(p.place, protected, budget))
    kept = np.array(kept).reshape(p.layers, p.heads, -1)
    return kept, kept[..., p.scope].sum(axis=-1), np.array(scores)
