"""RoCo while decoding: running mean and deviation of the attention received, against float64 numpy."""

import numpy as np
import pytest

from tests.cache.test_decode_state import one_layer, places, softmax
from vlkv import policies

LENGTH, STEPS, HEADS, GROUPS, DIM = 40, 12, 2, 3, 8


def ranked(kept, mean, deviation, spread, recent):
    """Those that may leave, the first to go first: outside the window, not among the largest deviations."""
    old = kept[: len(kept) - recent]
    spare = int(spread * (len(kept) - 1 - recent))
    spared = sorted(old, key=lambda j: (-deviation[j], j))[:spare]
    return sorted(set(old) - set(spared), key=lambda j: (mean[j], j))


@pytest.mark.default("12-0.0-6")
@pytest.mark.ci("12-0.0-6", "16-0.5-4")
@pytest.mark.parametrize(("budget", "spread", "recent"), [(16, 0.5, 4), (12, 0.0, 6), (12, 1.0, 3), (5, 0.5, 10)])
def test_the_least_attended_of_the_steady_leaves(budget, spread, recent):
    rng = np.random.default_rng(0)
    arrays = {
        "q": 2 * rng.normal(size=(HEADS * GROUPS, LENGTH, DIM)).astype(np.float32),
        "k": rng.normal(size=(HEADS, LENGTH, DIM)).astype(np.float32),
        "v": rng.normal(size=(HEADS, LENGTH, DIM)).astype(np.float32),
        "is_vision": np.arange(LENGTH) % 3 == 0,
    }
    policy = policies.RoCo(budget=budget, spread=spread, recent=recent)
    cache, step = one_layer(policy, arrays, new_tokens=STEPS)
    q_new, k_new, v_new = (
        2 * rng.normal(size=(STEPS, n, DIM)).astype(np.float32) for n in (HEADS * GROUPS, HEADS, HEADS)
    )
    rows, total, squares = np.zeros((3, HEADS, LENGTH + STEPS))

    def see(head, tokens, shares):
        """One row of one query head; a row of the group counts once."""
        rows[head, tokens] += 1 / GROUPS
        total[head, tokens] += shares / GROUPS
        squares[head, tokens] += shares**2 / GROUPS

    def moments(head):
        mean = total[head] / np.maximum(rows[head], 1)
        return mean, np.sqrt(np.maximum(squares[head] / np.maximum(rows[head], 1) - mean**2, 0))

    for n in range(HEADS * GROUPS):
        logits = np.float64(arrays["q"][n]) @ np.float64(arrays["k"][n // GROUPS]).T / np.sqrt(DIM)
        for t in range(LENGTH):
            see(n // GROUPS, np.arange(t + 1), softmax(logits[t, : t + 1]))
    recent = min(recent, budget)
    kept = [np.flatnonzero(x).tolist() for x in places(cache, cache.decode_states[0].stored[0], LENGTH + STEPS)]
    assert all(len(x) == budget for x in kept)
    keys = [np.concatenate([arrays["k"][h], k_new[:, h]]).astype(np.float64) for h in range(HEADS)]
    for i in range(STEPS):
        cache, _, _ = step(cache, q_new[i], k_new[i], v_new[i])
        for h in range(HEADS):
            kept[h].append(LENGTH + i)
            for g in range(GROUPS):
                see(h, kept[h], softmax(keys[h][kept[h]] @ np.float64(q_new[i, h * GROUPS + g]) / np.sqrt(DIM)))
            kept[h].remove(ranked(kept[h], *moments(h), spread, recent)[0])
            stored = places(cache, cache.decode_states[0].stored[0], LENGTH + STEPS)[h]
            np.testing.assert_array_equal(np.flatnonzero(stored), kept[h])


def test_nothing_leaves_where_new_tokens_do_not_count_or_it_is_told_not_to():
    assert policies.RoCo(keep=0.5).updater is not None
    assert policies.RoCo(keep=0.5, scope="vision").updater is None
    assert policies.RoCo(keep=0.5, evict=False).updater is None
