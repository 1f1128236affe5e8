"""A-VL over 32 decode steps against float64 numpy that does what the paper says, and its Table 3."""

import numpy as np
import pytest

from tests.cache.test_decode_state import one_layer, places
from vlkv import policies

VISION, TEXT, STEPS, HEADS, GROUPS, DIM = 60, 24, 32, 2, 2, 8
LENGTH = VISION + TEXT
IS_VISION = np.array([8 <= i < 8 + VISION for i in range(LENGTH)])


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def head_mean(q, keys, places):
    """Head-mean attention of one query [N, H] over the keys [K, T, H] at these places, and what it returns' weights."""
    logits = np.stack([keys[n // GROUPS][places] @ q[n] for n in range(len(q))]) / np.sqrt(DIM)
    return softmax(logits)


class Paper:
    """The sets of Secs. 4.1 and 4.2, by the sentence."""

    def __init__(self, arrays, s, c, k, t, longest):
        self.c, self.k = c, k
        self.keys, self.values = (list(np.float64(arrays[name])) for name in "kv")
        q = np.float64(arrays["q"])
        last = head_mean(q[:, -1], self.keys, np.arange(LENGTH)).mean(0)
        vision = np.flatnonzero(IS_VISION)
        self.secondary = self.top(vision, last[vision], int(np.floor(s * VISION + 0.5)))
        self.core = self.top(self.secondary, last[self.secondary], int(np.floor(c * VISION + 1e-9)))
        self.text = np.flatnonzero(~IS_VISION).tolist()
        self.room = int(np.floor(t * (longest or TEXT + STEPS) + 1e-9))
        self.mass = np.zeros(LENGTH + STEPS)
        for row in range(LENGTH):
            self.mass[: row + 1] += head_mean(q[:, row], self.keys, np.arange(row + 1)).mean(0)
        self.shorten()

    @staticmethod
    def top(places, scores, count):
        return np.sort(places[np.argsort(-scores, kind="stable")[:count]])

    def shorten(self):
        while len(self.text) > self.room:
            first_half = self.text[: max(1, len(self.text) // 2)]
            self.text.remove(min(first_half, key=lambda i: self.mass[i]))

    def step(self, number, q, k, v):
        """One decode step, counted from 1: the attention's output [N, H], and how many entries it read."""
        self.keys = [np.concatenate([self.keys[h], np.float64(k[h])[None]]) for h in range(HEADS)]
        self.values = [np.concatenate([self.values[h], np.float64(v[h])[None]]) for h in range(HEADS)]
        self.text.append(LENGTH + number - 1)
        refresh = number % self.k == 0
        image = self.secondary if refresh else self.core
        read = np.concatenate([image, self.text]).astype(int)
        weights = head_mean(np.float64(q), self.keys, read)
        out = np.stack([weights[n] @ self.values[n // GROUPS][read] for n in range(len(q))])
        self.mass[read] += weights.mean(0)
        if refresh:
            self.core = self.top(self.secondary, weights.mean(0)[: len(image)], len(self.core))
        self.shorten()
        return out, len(read)


@pytest.mark.default("8-text window", "8-fixed length")
@pytest.mark.ci("8-text window", "8-fixed length", "3-all text")
@pytest.mark.parametrize(
    ("text", "longest"), [(1.0, None), (0.6, None), (0.6, 30)], ids=["all text", "text window", "fixed length"]
)
@pytest.mark.parametrize("refresh", [1, 3, 8])
def test_32_steps(refresh, text, longest):
    rng = np.random.default_rng(refresh)
    arrays = {
        "q": 2 * rng.normal(size=(HEADS * GROUPS, LENGTH, DIM)).astype(np.float32),
        "k": rng.normal(size=(HEADS, LENGTH, DIM)).astype(np.float32),
        "v": rng.normal(size=(HEADS, LENGTH, DIM)).astype(np.float32),
        "is_vision": IS_VISION,
    }
    policy = policies.AVL(keep=0.45, core=0.3, refresh=refresh, text=text, longest_text=longest)
    cache, step = one_layer(policy, arrays, new_tokens=STEPS)
    paper = Paper(arrays, 0.45, 0.3, refresh, text, longest)
    for i in range(STEPS):
        q, k, v = (2 * rng.normal(size=(n, DIM)).astype(np.float32) for n in (HEADS * GROUPS, HEADS, HEADS))
        cache, out, used = step(cache, q, k, v)
        expected, read = paper.step(i + 1, q, k, v)
        np.testing.assert_allclose(out, expected, atol=2e-5, err_msg=f"step {i + 1}")
        assert (np.asarray(used).sum(-1) == read).all(), "an ordinary step reads core and text, nothing else"
        if (i + 1) % refresh:
            assert read - len(paper.core) <= paper.room + 1
        stored = places(cache, cache.decode_states.stored[0, 0], LENGTH + STEPS)
        wanted = sorted([*paper.secondary, *paper.text])
        for head in range(HEADS):
            np.testing.assert_array_equal(np.flatnonzero(stored[head]), wanted)
