"""Elastic Cache: what the published code keeps and merges by mistake; its decode steps, which are PrefixKV's too."""

import numpy as np
import pytest

from tests.cache.test_decode_state import one_layer, places
from tests.policies.golden_vectors import compress, same_in_every_head
from vlkv import policies


@pytest.mark.parametrize("padding", [pytest.param((0, 0), marks=pytest.mark.full), (3, 2)], ids=["whole", "padded"])
@pytest.mark.full
def test_the_published_code_keeps_and_merges_other_tokens(golden, padding):
    g = golden("elastic")
    q, k, v = (np.pad(g[name], [(0, 0), (0, 0), padding, (0, 0)]) for name in "qkv")
    vision, valid = (np.pad(x, padding) for x in (g["is_vision"], np.ones_like(g["is_vision"])))
    sinks, recent = int(g["number_of_sink_tokens"]), int(g["number_of_recent_tokens"])
    for i in range(len(g["drop_ratios"])):
        asked = int(g[f"paper_kept_{i}"][0].sum())
        policy = policies.ElasticCache(budget=asked, sinks=sinks, recent=recent, variant="released")
        merged_k, merged_v, got = compress(policy, q, k, v, vision, valid)
        assert (np.asarray(got.budgets) == asked - 1).all()
        same_in_every_head(got.kept[:, :, valid], g[f"as_released_kept_{i}"])
        for layer, kept in enumerate(g[f"as_released_kept_{i}"]):
            for ours, name in ((merged_k, "key"), (merged_v, "value")):
                merged = np.asarray(ours)[layer][:, valid][:, kept]
                np.testing.assert_allclose(merged, g[f"as_released_merged_{name}_{i}"][layer], atol=2e-5)


@pytest.mark.default("Elastic-paper-30-25", "Prefix-released-12-25")
@pytest.mark.ci("Elastic-paper-30-25", "Prefix-released-12-25", "Elastic-released-12-4")
@pytest.mark.parametrize(
    ("cls", "variant", "budget", "distance"),
    [("Elastic", "paper", 30, 25), ("Elastic", "paper", 12, 25), ("Elastic", "paper", 30, 4),
     ("Elastic", "released", 30, 25), ("Elastic", "released", 12, 4), ("Prefix", "released", 30, 25),
     ("Prefix", "released", 12, 25)],
)  # fmt: skip
def test_while_decoding_one_entry_leaves_at_a_fixed_distance(cls, variant, budget, distance):
    """The share of the prompt holds for all that was seen; released: of the tokens asked for, at a fixed rank."""
    rng = np.random.default_rng(1)
    length, steps = 40, 20
    arrays = {name: rng.normal(size=(2, length, 4)).astype(np.float32) for name in "qkv"}
    arrays["is_vision"] = np.zeros(length, bool)
    made = {"Elastic": policies.ElasticCache, "Prefix": policies.PrefixKV}[cls]
    policy = made(budget=budget, distance=distance, variant=variant)
    cache, step = one_layer(policy, arrays, new_tokens=steps)
    kept = np.flatnonzero(places(cache, cache.decode_states[0].stored[0], length + steps)[0]).tolist()
    assert len(kept) == budget - (variant == "released" and cls == "Elastic")
    for i in range(steps):
        new = rng.normal(size=(3, 2, 4)).astype(np.float32)
        cache, _, _ = step(cache, *new)
        kept.append(length + i)
        if len(kept) > -(-budget * (length + i + 1) // length):
            end = len(kept) if variant == "paper" else budget
            del kept[end - distance if end > distance else end // 2]
        stored = places(cache, cache.decode_states[0].stored[0], length + steps)
        for head in range(2):
            assert np.flatnonzero(stored[head]).tolist() == kept
    assert len(kept) < budget + steps
