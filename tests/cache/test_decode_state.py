"""Methods that act while decoding, on one layer: A-VL against golden vectors, others against `Simulation`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import programs, reference
from tests.generation.test_step import Simulation
from vlkv import policies
from vlkv.compression.observe import Layer, LayerRun
from vlkv.config import LayerKind
from vlkv.decoder import Decoder
from vlkv.generation.prompt import Prompt
from vlkv.generation.step import feed_and_watch
from vlkv.inputs import Bounds


def one_layer(policy, arrays, new_tokens: int):
    """A cache of one layer and one row from q [N,T,H] and k, v [K,T,H], and a function that decodes a step of it."""
    q, k, v = (jnp.asarray(arrays[name][None]) for name in "qkv")
    is_vision = jnp.asarray(arrays["is_vision"][None])
    length = is_vision.shape[1]
    everything = jnp.asarray(np.ones((1, length), bool))
    layer = Layer(
        q=q, k=k, v=v, is_vision=is_vision, valid=everything,
        run=LayerRun(is_candidate=everything, source=jnp.asarray(np.arange(length)[None])),
    )  # fmt: skip
    prompt = Prompt(
        layers=(layer,), is_vision=is_vision, valid=everything,
        next_position=jnp.asarray([[length]]), logits=jnp.asarray(np.zeros((1, 2), np.float32)),
        bounds=Bounds(
            vision=int(arrays["is_vision"].sum()), text=int((~arrays["is_vision"]).sum()), instruction=length
        ),
        reducer=None,
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
        out[head, np.asarray(cache.decode_states.place)[0, 0, head][np.asarray(mask)[head]]] = True
    return out


@pytest.mark.parametrize("suffix", ["no_text_eviction", "text_eviction"])
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
        state = jax.tree.map(lambda x: x[0], cache.decode_states)
        full = places(cache, np.asarray(state.stored)[0] & np.asarray(state.is_text)[0], length + new_tokens)
        return full[:, : length + steps]

    same_in_every_head(vision_part(np.asarray(cache.decode_states.stored)[0, 0]), g["paper_secondary"])
    same_in_every_head(vision_part(np.asarray(cache.decode_states.core)[0, 0]), g["paper_initial_core"])
    same_in_every_head(text_part(), g[f"paper_text_kept_after_prefill_{suffix}"])
    for i in range(steps):
        new = (g[name][i] for name in ("q_new", "k_new", "v_new"))
        cache, out, used = step(cache, *new)
        np.testing.assert_allclose(out, g[f"paper_output_{suffix}"][i], atol=2e-5)
        same_in_every_head(
            vision_part(np.asarray(cache.decode_states.core)[0, 0]), g[f"paper_core_after_step_{suffix}"][i]
        )
        same_in_every_head(text_part(), g[f"paper_text_kept_after_step_{suffix}"][i])
        # An ordinary step reads the core and the text, nothing else.
        vision_read = int((np.asarray(used)[0] & ~np.asarray(cache.decode_states.is_text)[0, 0, 0]).sum())
        read = "paper_secondary" if (i + 1) % policy.refresh == 0 else "paper_initial_core"
        assert vision_read == g[read].sum()


LENGTH, STEPS, HEADS, GROUPS, DIM = 40, 12, 2, 3, 8
STEPPING = {
    "H2O": policies.H2O(budget=12),
    "StreamingLLM": policies.StreamingLLM(budget=12, evict=True),
    "RoCo by the mean": policies.RoCo(budget=12, spread=0.0, recent=6),
    "RoCo, half steady": policies.RoCo(budget=16, spread=0.5, recent=4),
    "RoCo, all steady": policies.RoCo(budget=12, spread=1.0, recent=3),
    "RoCo, all recent": policies.RoCo(budget=5, spread=0.5, recent=10),
    "PrefixKV, far": policies.PrefixKV(budget=30, distance=25),
    "PrefixKV, middle": policies.PrefixKV(budget=12, distance=25),
    "PrefixKV released, far": policies.PrefixKV(budget=30, distance=25, variant="released"),
    "PrefixKV released, middle": policies.PrefixKV(budget=12, distance=25, variant="released"),
    "Elastic Cache": policies.ElasticCache(budget=30, distance=4, merging="none"),
    "Elastic Cache released, far": policies.ElasticCache(budget=30, distance=25, merging="none", variant="released"),
    "Elastic Cache released, near": policies.ElasticCache(budget=12, distance=4, merging="none", variant="released"),
}


@pytest.mark.default("H2O", "StreamingLLM", "by the mean", "PrefixKV, far", "released, middle", "[Elastic Cache]")
@pytest.mark.parametrize("name", STEPPING)
def test_what_leaves_after_each_step(name):
    """Each head has its own set. The answer is attention over it and the new token."""
    policy, rng, heads = STEPPING[name], np.random.default_rng(0), (HEADS * GROUPS, HEADS, HEADS)
    arrays = {
        name: 2 * rng.normal(size=(n, LENGTH, DIM)).astype(np.float32) for name, n in zip("qkv", heads, strict=True)
    }
    cache, step = one_layer(policy, arrays | {"is_vision": np.arange(LENGTH) % 3 == 0}, new_tokens=STEPS)
    new = [2 * rng.normal(size=(STEPS, n, DIM)).astype(np.float32) for n in heads]
    held = places(cache, cache.decode_states.stored[0, 0], LENGTH + STEPS)
    layer = [np.swapaxes(np.float64(arrays[name]), 0, 1) for name in "qkv"]
    simulation = Simulation(policy, [layer], held[None, :, :LENGTH])
    keys, values = (np.float64([*x, *y]).swapaxes(0, 1) for x, y in zip(layer[1:], new[1:], strict=True))
    assert (held.sum(axis=1) == policy.budget - (name.startswith("Elastic Cache released"))).all()
    for i in range(STEPS):
        cache, out, _ = step(cache, *(x[i] for x in new))
        for head in range(HEADS):
            held[head, LENGTH + i] = True
            at, queries = np.flatnonzero(held[head]), slice(head * GROUPS, (head + 1) * GROUPS)
            shares = reference._softmax(np.float64(new[0][i, queries]) @ keys[head, at].T / np.sqrt(DIM))
            np.testing.assert_allclose(out[queries], shares @ values[head, at], atol=5e-5)
            held[head, at[np.array(simulation(0, head, at, shares), int)]] = False
        np.testing.assert_array_equal(places(cache, cache.decode_states.stored[0, 0], LENGTH + STEPS), held)
