"""Methods that act while decoding, on one layer: A-VL against golden vectors, H2O, TOVA and PrefixKV against numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import programs
from vlkv import policies
from vlkv.config import LayerKind
from vlkv.decoder import Decoder
from vlkv.generation.layer_prompt import LayerPrompt
from vlkv.generation.prompt import Prompt
from vlkv.generation.step import feed_and_watch


def one_layer(policy, arrays, new_tokens: int):
    """A cache of one layer and one row from q [N,T,H] and k, v [K,T,H], and a function that decodes a step of it."""
    q, k, v = (jnp.asarray(np.swapaxes(arrays[name], 0, 1)[None]) for name in "qkv")
    is_vision = jnp.asarray(arrays["is_vision"][None])
    length = is_vision.shape[1]
    everything = jnp.asarray(np.ones((1, length), bool))
    layer = LayerPrompt(
        q=q, k=k, v=v, is_vision=is_vision, valid=everything, is_candidate=everything,
        source=jnp.asarray(np.arange(length)[None]), grid=jnp.asarray(np.full((1, length, 3), -1)),
    )  # fmt: skip
    prompt = Prompt(
        layers=(layer,), is_vision=is_vision, valid=everything,
        next_position=jnp.asarray([[length]]), logits=jnp.asarray(np.zeros((1, 2), np.float32)),
        max_vision=int(arrays["is_vision"].sum()), max_text=int((~arrays["is_vision"]).sum()), max_instruction=length,
        max_images=1, reducer=None,
    )  # fmt: skip
    cache = programs.fill_cache(prompt, policy, new_tokens=new_tokens)

    @jax.jit
    def step(cache, q_new, k_new, v_new):
        class OneLayer(Decoder):
            """Queries, keys and values that are given."""

            def __init__(self):
                self.kinds = (LayerKind(window=None, number=0),)

            def walk(self, carry, x, positions, attend, after=None, limit=None, recur=None):
                carry, x = attend(0, carry, q_new[None, None], k_new[None, None], v_new[None, None])
                return after(0, carry, x.reshape(1, 1, -1))[:2]

            def add_features(self, added, layer, x):
                return x

        x = jnp.zeros((1, 1, q_new.size))
        cache, out, (attended,) = feed_and_watch(
            OneLayer(), cache, x, jnp.zeros((1, 1, 1), int), lambda i, state, mass, x: state.attended
        )
        return cache, out.reshape(q_new.shape), attended[0]

    return cache, step


def places(cache, mask, size: int) -> np.ndarray:
    """A mask over slots as one over the order of tokens, [K, size]."""
    out = np.zeros((mask.shape[0], size), bool)
    for head in range(mask.shape[0]):
        out[head, np.asarray(cache.decode_states[0].place)[0, head][np.asarray(mask)[head]]] = True
    return out


@pytest.mark.parametrize("suffix", [pytest.param("no_text_eviction", marks=pytest.mark.full), "text_eviction"])
def test_avl_golden(golden, suffix):
    """Outputs, cores and text windows, step by step; every K-th step attends to all secondary tokens."""
    g = golden("a_vl")
    vision, length = g["is_vision"], len(g["is_vision"])
    steps = len(g["k_new"])
    new_tokens = int(g["maximum_text_length"]) - int((~vision).sum())
    policy = policies.AVL(
        keep=float(g["secondary_ratio"]),
        core=float(g["core_ratio"]),
        refresh=int(g["core_refresh_interval"]),
        text=float(g["text_ratio"]) if suffix == "text_eviction" else None,
    )
    cache, step = one_layer(policy, g, new_tokens=new_tokens)

    def same_in_every_head(got, expected):
        np.testing.assert_array_equal(got, np.broadcast_to(expected, got.shape))

    def vision_part(mask):
        return places(cache, mask, length + new_tokens)[:, :length][:, vision]

    def text_part():
        state = cache.decode_states[0]
        full = places(cache, np.asarray(state.stored)[0] & np.asarray(state.is_text)[0], length + new_tokens)
        return full[:, : length + steps]

    same_in_every_head(vision_part(np.asarray(cache.decode_states[0].stored)[0]), g["paper_secondary"])
    same_in_every_head(vision_part(np.asarray(cache.decode_states[0].core)[0]), g["paper_initial_core"])
    same_in_every_head(text_part(), g[f"paper_text_kept_after_prefill_{suffix}"])
    for i in range(steps):
        new = (g[name][i] for name in ("q_new", "k_new", "v_new"))
        cache, out, used = step(cache, *new)
        np.testing.assert_allclose(out, g[f"paper_output_{suffix}"][i], atol=2e-5)
        same_in_every_head(
            vision_part(np.asarray(cache.decode_states[0].core)[0]), g[f"paper_core_after_step_{suffix}"][i]
        )
        same_in_every_head(text_part(), g[f"paper_text_kept_after_step_{suffix}"][i])
        # An ordinary step reads the core and the text, nothing else.
        vision_read = int((np.asarray(used)[0] & ~np.asarray(cache.decode_states[0].is_text)[0, 0]).sum())
        read = "paper_secondary" if (i + 1) % policy.refresh == 0 else "paper_initial_core"
        assert vision_read == g[read].sum()


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def test_h2o_evicts_one_entry_a_step():
    """Grouped heads, each with its own set: accumulated attention, the recent half is_candidate."""
    rng = np.random.default_rng(0)
    length, steps, heads, groups, dim = 40, 12, 2, 3, 8
    arrays = {
        "q": 2 * rng.normal(size=(heads * groups, length, dim)).astype(np.float32),
        "k": rng.normal(size=(heads, length, dim)).astype(np.float32),
        "v": rng.normal(size=(heads, length, dim)).astype(np.float32),
        "is_vision": np.zeros(length, bool),
    }
    policy = policies.H2O(budget=12)
    cache, step = one_layer(policy, arrays, new_tokens=steps)
    q_new, k_new, v_new = (
        2 * rng.normal(size=(steps, n, dim)).astype(np.float32) for n in (heads * groups, heads, heads)
    )

    score = np.zeros((heads, length + steps))
    for n in range(heads * groups):
        logits = np.float64(arrays["q"][n]) @ np.float64(arrays["k"][n // groups]).T / np.sqrt(dim)
        for t in range(length):
            score[n // groups, : t + 1] += softmax(logits[t, : t + 1]) / groups
    kept = [sorted({*range(34, 40), *sorted(range(34), key=lambda j, h=h: -score[h, j])[:6]}) for h in range(heads)]
    keys = [np.concatenate([arrays["k"][h], k_new[:, h]]).astype(np.float64) for h in range(heads)]
    values = [np.concatenate([arrays["v"][h], v_new[:, h]]).astype(np.float64) for h in range(heads)]
    for i in range(steps):
        cache, out, _ = step(cache, q_new[i], k_new[i], v_new[i])
        for h in range(heads):
            kept[h].append(length + i)
            for g in range(groups):
                n = h * groups + g
                p = softmax(keys[h][kept[h]] @ np.float64(q_new[i, n]) / np.sqrt(dim))
                np.testing.assert_allclose(out[n], p @ values[h][kept[h]], atol=2e-5)
                score[h, kept[h]] += p / groups
            old = kept[h][: len(kept[h]) - 6]
            kept[h].remove(min(old, key=lambda j, h=h: score[h, j]))
            assert len(kept[h]) == 12
            stored = places(cache, np.asarray(cache.decode_states[0].stored)[0], length + steps)[h]
            np.testing.assert_array_equal(np.flatnonzero(stored), kept[h])


def test_tova_evicts_what_the_newest_token_attends_to_least():
    """Two key heads with three query heads each; both key heads keep the same tokens, and the newest one may leave."""
    rng = np.random.default_rng(2)
    length, steps, heads, groups, dim, budget = 30, 12, 2, 3, 8, 7
    shapes = {"q": (heads * groups, length, dim), "k": (heads, length, dim), "v": (heads, length, dim)}
    arrays = {name: 2 * rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["is_vision"] = np.zeros(length, bool)
    cache, step = one_layer(policies.TOVA(budget=budget), arrays, new_tokens=steps)
    new = [2 * rng.normal(size=(steps, n, dim)).astype(np.float32) for n in (heads * groups, heads, heads)]
    keys = np.concatenate([arrays["k"], np.moveaxis(new[1], 0, 1)], axis=1).astype(np.float64)

    def attention(q, tokens):
        rows = [softmax(keys[n // groups][tokens] @ np.float64(q[n]) / np.sqrt(dim)) for n in range(heads * groups)]
        return np.mean(rows, axis=0)

    mass, newest_left = attention(arrays["q"][:, -1], list(range(length))), False
    kept = sorted(np.argsort(-mass)[:budget].tolist())
    for i in range(steps):
        cache, _, _ = step(cache, *(x[i] for x in new))
        kept.append(length + i)
        gone = kept.pop(int(np.argmin(attention(new[0][i], kept))))
        newest_left |= gone == length + i
        stored = places(cache, np.asarray(cache.decode_states[0].stored)[0], length + steps)
        for head in range(heads):
            assert np.flatnonzero(stored[head]).tolist() == kept
    assert newest_left


@pytest.mark.default("far")
@pytest.mark.parametrize(("budget", "distance"), [(30, 25), (12, 25), (30, 4)], ids=["far", "middle", "near"])
def test_prefixkv_keeps_its_share_of_what_has_been_seen(budget, distance):
    """By counting, from the sentence: over ceil(R T) the 25th newest leaves, or the middle one of no more than that."""
    rng = np.random.default_rng(1)
    length, steps = 40, 20
    arrays = {name: rng.normal(size=(2, length, 4)).astype(np.float32) for name in "qkv"}
    arrays["is_vision"] = np.zeros(length, bool)
    cache, step = one_layer(policies.PrefixKV(budget=budget, distance=distance), arrays, new_tokens=steps)
    kept = np.flatnonzero(places(cache, np.asarray(cache.decode_states[0].stored)[0], length + steps)[0]).tolist()
    assert len(kept) == budget
    for i in range(steps):
        new = rng.normal(size=(3, 2, 4)).astype(np.float32)
        cache, _, _ = step(cache, *new)
        kept.append(length + i)
        if len(kept) > -(-budget * (length + i + 1) // length):
            del kept[-distance if len(kept) > distance else len(kept) // 2]
        stored = places(cache, np.asarray(cache.decode_states[0].stored)[0], length + steps)
        for head in range(2):
            assert np.flatnonzero(stored[head]).tolist() == kept
