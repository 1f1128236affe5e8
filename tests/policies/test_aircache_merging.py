"""AirCache's Table 11: a share of what is dropped is merged into the nearest kept entry, against float64 numpy."""

import jax
import numpy as np
import pytest

from vlkv import InputError, policies

compress = jax.jit(jax.vmap(policies.compress, (None, 0, 0, 0, 0, 0)), static_argnums=0)
# S, V, I: a system, vision or instruction token; a dot is padding.
PROMPTS = [
    "SSSSVVVVVVVVVVVVVVVVIIIIIIII",
    "......SSSVVVVVVVVVVVVIIIIIII",
    "SVVVVVVSSSVVVVVVVIIIIIIIII..",
    "SSSSSSSSSSVVIIIIIIIIIIIII...",
    "SSSSSSSSSSSVIIIIIIIIIIIII...",
    "IIIIIIIIIIIIIIIIIIIIIII.....",
]
VISION, VALID = (np.array([[c in of for c in row] for row in PROMPTS]) for of in ("V", "SVI"))


def merged(x, kept, importance, scope, share):
    """One head [T, H] of one layer: the best of the dropped go to the nearest of the kept, one token at a time."""
    homes = np.flatnonzero(kept & scope)
    gone = sorted(np.flatnonzero(scope & ~kept), key=lambda t: (-importance[t], t))
    given = {home: [np.float64(x[home])] for home in homes}
    for t in gone[: int(share * len(gone))]:
        given[min(homes, key=lambda home, t=t: (abs(home - t), home))].append(np.float64(x[t]))
    out = np.float64(x)
    for home, parts in given.items():
        out[home] = np.mean(parts, axis=0)
    return out


@pytest.mark.default("0.4-0.3-all")
@pytest.mark.parametrize(
    ("merging", "keep", "scope"), [(1.0, 0.2, "vision"), (0.6, 0.2, "vision"), (0.4, 0.3, "all"), (0.2, 0.05, "vision")]
)
def test_the_best_share_of_the_dropped_is_averaged_into_the_nearest_kept(merging, keep, scope):
    rng = np.random.default_rng(0)
    q, k, v = (2 * rng.normal(size=(len(PROMPTS), 3, n, 28, 8)).astype(np.float32) for n in (4, 2, 2))
    plain = policies.AirCache(keep=keep, scope=scope)
    policy = policies.AirCache(keep=keep, scope=scope, merging=merging)
    got_k, got_v, got = compress(policy, q, k, v, VISION, VALID)
    _, same, dropping = compress(plain, q, k, v, VISION, VALID)
    np.testing.assert_array_equal(same, v)
    np.testing.assert_array_equal(got.kept, dropping.kept)
    changed = 0
    for row, layer, head in np.ndindex(len(PROMPTS), 3, 2):
        kept, importance = np.asarray(got.kept)[row, layer, head], np.asarray(got.scores)[row, layer, head]
        inside = VISION[row] if scope == "vision" else VALID[row]
        for ours, x in ((got_k, k), (got_v, v)):
            expected = merged(x[row, layer, head], kept, importance, inside, merging)
            np.testing.assert_allclose(np.asarray(ours)[row, layer, head][kept], expected[kept], atol=1e-5)
            changed += (abs(expected - x[row, layer, head])[kept] > 1e-3).any()
    assert changed > 12


def test_a_bad_share_is_named():
    with pytest.raises(InputError, match=r"AirCache: merging=1\.2 must lie in \[0, 1\]"):
        policies.AirCache(keep=0.5, merging=1.2)
    with pytest.raises(InputError, match=r"cap=2\.0 cannot be combined with merging"):
        policies.AirCache(keep=0.5, merging=0.5, cap=2.0)
