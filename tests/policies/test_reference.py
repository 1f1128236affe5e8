"""Hand-computed examples of methods, options, and policies of one's own."""

import dataclasses
import typing
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import vlkv
from tests import programs
from vlkv import InputError, policies
from vlkv.cache.decode_state import begin
from vlkv.policies.lightkv import scaled

# --- Random ---------------------------------------------------------------------------------------------------------


def test_random_keeps_every_token_equally_often_whatever_the_length_of_the_padded_row():
    """Draws differ between keys, layers and heads, and repeat with their key."""
    draws = 400
    draw = jax.jit(
        jax.vmap(lambda key, q, valid: policies.select(
            policies.Random(budget=5), q, q, q, jnp.zeros(len(valid), bool), valid, key).kept, (0, None, None))
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(0), draws)
    kept, longer = (
        np.asarray(draw(keys, jnp.zeros((2, 2, length, 4)), jnp.arange(length) < 20))[..., :20] for length in (20, 23)
    )
    np.testing.assert_array_equal(kept, longer)
    assert abs(kept.mean(axis=(0, 1, 2)) - 0.25).max() < 4 * np.sqrt(0.25 * 0.75 / (4 * draws))
    assert len({head.tobytes() for head in kept[:2].reshape(-1, 20)}) == 8


def test_random_without_a_key_says_so():
    q = jnp.zeros((1, 2, 6, 4))
    with pytest.raises(InputError, match="pass key="):
        policies.select(policies.Random(keep=0.5), q, q, q, jnp.zeros(6, bool))


# --- options --------------------------------------------------------------------------------------------------------


BAD_OPTIONS = [
    ("vlcache", {"threshold": 0.0}, "threshold=0.0 must lie in"),
    ("vlcache", {"window": 1.5}, "window=1.5 must lie in"),
    ("vlcache", {"variant": "shared_window", "scope": "vision"}, "variant="),
    ("elasticcache", {"sinks": -1}, "sinks=-1 must be a whole number of at least 0"),
    ("elasticcache", {"distance": 0}, "distance=0 must be a whole number of at least 1"),
    ("roco", {"spread": -0.1}, "spread=-0.1 must lie in"),
    ("csp", {"c": 1.1}, "c=1.1 must lie in"),
    ("csp", {"window": 0}, "window=0 must be a whole number"),
    ("csp", {"window": True}, "window=True must be a whole number"),
    ("csp", {"score_n": float("inf")}, "score_n=inf must be a number of at least 0"),
    ("csp", {"decode_n": -1.0}, "decode_n="),
    ("csp", {"variant": "released", "fill": True}, "fill="),
    ("adakv", {"window": 0}, "window=0 must be a whole number"),
    ("pyramidkv", {"kernel": -1}, "kernel=-1 must be a whole number"),
    ("pyramidkv", {"variant": "released", "cap": 1.5}, "cap="),
    ("prefixkv", {"profile": (0.5, 0.0)}, "profile=.* must be a tuple of numbers in"),
    ("prefixkv", {"merging": "cosine", "cap": 2.0}, "cap=2.0 cannot be combined with merging"),
    ("aircache", {"merging": 1.2}, r"merging=1\.2 must lie in \[0, 1\]"),
    ("fastv", {"layer": True}, "layer=True must be a whole number"),
    ("hired", {"alpha": 1.0}, "alpha="),
    ("hired", {"scope": "all"}, "scope="),
    ("ivtp", {"layers": ()}, "layers="),
    ("ivtp", {"layers": (0,)}, "layers="),
    ("ivtp", {"groups": 0.2}, "groups="),
    ("kivi", {"window": 48}, "window=48 must be a multiple of group=32"),
    ("downsample", {"side": 0, "keep": None}, "side=0"),
    ("downsample", {}, "keep=0.5 does not apply: downsample has its own keep"),
    ("downsample", {"most": 0, "keep": None}, "most=0"),
    ("tome", {"keep": 0.1}, r"more stages \(layers="),
    ("tome", {"keep": 0.4, "layers": (3,)}, r"more stages \(layers="),
    ("tome", {"layers": (3, 1)}, "layers"),
    ("tome", {"layers": ()}, "layers"),
    ("tome", {"scope": "all"}, "scope"),
    ("tome", {"keep": None}, "keep"),
    ("tome", {"layers": (1,), "on": "cache"}, "layers"),
    ("pitome", {"margin": (0.5, 0.4)}, "margin"),
    ("pitome", {"margin": 1.5}, "margin"),
    ("tofu", {"pruning": -1}, "pruning"),
    ("lightkv", {"windows": (True, 2, 1)}, "must be a tuple of whole numbers"),
    ("lightkv", {"rho": 0.6, "keep": None}, "rho"),
    ("lightkv", {"rho": 0.0, "keep": None}, "rho"),
    ("lightkv", {"rho": (0.5, 0.5), "keep": None}, "rho"),
    ("lightkv", {"keep": 0.05}, "more stages"),
    ("lightkv", {"rho": 0.5}, "give one of the two"),
    ("lightkv", {"windows": (4, 2), "keep": None}, "layers=None means three"),
    ("lightkv", {"windows": (4, 0, 1), "keep": None}, "windows"),
    ("lightkv", {"layers": (3, 2, 5), "keep": None}, "layers"),
    ("lightkv", {"layers": (0, 2, 5), "keep": None}, "layers"),
    ("lightkv", {"layers": (2, 5), "keep": None}, "windows"),
    ("lightkv", {"budget": 5, "keep": None}, "budget"),
    ("lightkv", {"scope": "all", "keep": None}, "scope"),
]


def test_a_bad_option_is_named():
    for name, bad, said in BAD_OPTIONS:
        with pytest.raises(InputError, match=said):
            policies.make(name, **{"keep": 0.5, **bad})


class Annotated(policies.Policy):
    pair: tuple[int, str] = (1, "x")
    many: tuple[float, ...] = ()
    own: list[int] | None = None


@pytest.mark.parametrize("bad", [{"pair": (1, 2)}, {"pair": (1,)}, {"many": ("x",)}, {"many": 1.0}, {"keep": "x"}])
def test_options_of_ones_own_are_checked(bad):
    assert Annotated(keep=0.5, pair=(2, "y"), many=(1, 0.5)).own is None
    with pytest.raises(InputError, match=f"Annotated: {next(iter(bad))}=.* must be"):
        Annotated(**{"keep": 0.5, **bad})


def test_the_annotation_of_every_option_is_known():
    """An annotation that names nothing would switch the check off without a word."""
    for policy in policies.registry.values():
        assert {field.name for field in dataclasses.fields(policy)} <= set(typing.get_type_hints(policy))


# --- policies of one's own, and what any policy may count on ---------------------------------------------------------


class Given(policies.Policy):
    """Scores handed in as the first component of the keys."""

    last: int = 0

    def score(self, obs) -> Float[Array, "K T"]:
        return obs.k[:, :, 0]

    def protect(self, obs):
        place = jnp.arange(obs.valid.shape[0])
        return obs.valid & (place >= obs.valid.shape[0] - self.last)


def kept_places(policy, scores):
    k = np.array(scores, np.float32)[None, None, :, None]
    return np.flatnonzero(programs.select(policy, k, k, k, np.zeros(len(scores), bool)).kept[0, 0]).tolist()


def test_protected_tokens_stay_whatever_their_score_and_count():
    assert kept_places(Given(budget=3, last=2), [9, 5, 7, 1, 0, 0]) == [0, 4, 5]
    assert kept_places(Given(budget=3, last=2), [1e9, 2e9, 3e9, 0, 0, 0]) == [2, 4, 5]
    assert kept_places(Given(budget=3, last=2), [np.inf, 0, np.inf, 0, 0, 0]) == [0, 4, 5]
    assert kept_places(Given(budget=1, last=2), [9, 5, 7, 1, 0, 0]) == [5]


class Thrifty(Given):
    """Ranks what is not protected backwards and takes half of what is left."""

    def rank(self, scores, statistics, candidates, count):
        return -scores, count // 2


def test_a_rank_of_ones_own_orders_what_is_not_protected_and_may_leave_budget_unspent():
    assert kept_places(Thrifty(budget=4, last=2), [9, 5, 7, 1, 0, 0]) == [3, 4, 5]
    assert kept_places(Thrifty(budget=2, last=2), [9, 5, 7, 1, 0, 0]) == [4, 5]


def test_three_different_layers_whatever_the_factor():
    for depth in range(4, 41):
        for factor in (0.05, 0.3, 0.9, 1.3, 3.0):
            first, second, third = scaled(depth, factor)
            assert 0 < first < second < third < depth


def test_all_of_the_budget_may_be_recent():
    assert policies.H2O(keep=0.5, recent=1.0).recent == 1.0
    with pytest.raises(vlkv.InputError, match=r"recent=1\.5"):
        policies.H2O(keep=0.5, recent=1.5)


def test_csp_may_observe_half_of_what_it_keeps():
    for keep, length in ((0.5, 64), (0.1, 100), (1.0, 7)):
        assert policies.CSP(keep=keep).most_rows(length) >= max(1, round(keep * length) // 2)


def test_avl_has_slots_for_vision_the_text_window_and_one_token():
    """Five vision tokens, four of text, of which half may be stored."""
    policy, vision = policies.AVL(keep=0.5, core=0.5, text=0.5), jnp.arange(9) < 5
    every = jnp.ones((2, 9), bool)
    state = begin(every, {}, vision, every[0], jnp.int32(5), new_tokens=3)
    np.testing.assert_array_equal(policy.decode_slots(state), 5 + policy.window(state) + 1)


def test_both_ends_of_a_range_are_allowed():
    for alpha in (0, 1):
        assert policies.AirCache(keep=1.0, alpha=alpha).alpha == alpha
    with pytest.raises(vlkv.InputError, match=r"alpha=1\.01 must lie in \[0, 1\]"):
        policies.AirCache(keep=1.0, alpha=1.01)


@pytest.mark.parametrize(("fraction", "count"), [(0.53, 4300), (0.29, 100), (0.001, 100)])
def test_core_and_text_window_are_rounded_down_from_the_exact_product(fraction, count):
    """Of the tokens of an image, or of text. The first loses a token in float32, the second in double precision."""
    expected = int(Fraction(str(fraction)) * count)
    policy = policies.AVL(keep=0.6, core=fraction, text=fraction)
    everything = jnp.ones(count, bool)
    for is_vision, new in ((everything, 1), (~everything, 0)):
        state = jax.jit(begin, static_argnames="new_tokens")(
            everything[None], {}, is_vision, everything, jnp.int32(count), new_tokens=new
        )
        if new:
            assert np.sum(jax.jit(policy.pick)(state, jnp.zeros(state.stored.shape))) == max(1, expected)
        else:
            assert jax.jit(policy.window)(state) == expected


def test_equal_shares_choose_the_earlier_token_wherever_it_is_stored():
    policy, count = policies.AVL(keep=0.6, core=0.3), 20
    order = np.random.default_rng(0).permutation(count)
    state = begin(jnp.ones((1, count), bool), {}, *jnp.ones((2, count), bool), jnp.int32(count), new_tokens=0)
    state = dataclasses.replace(state, place=jnp.array(order)[None])
    chosen = policy.pick(state, jnp.zeros((1, count)).at[0, 7].set(1.0))
    rest = [place for place in range(count) if place != order[7]][:5]
    assert set(order[np.flatnonzero(chosen[0])]) == {order[7], *rest}


def test_nothing_leaves_where_new_tokens_do_not_count_or_it_is_told_not_to():
    assert policies.slots_of(policies.RoCo(keep=0.5)).step is not None
    assert policies.slots_of(policies.RoCo(keep=0.5, scope="vision")).step is None
    assert policies.slots_of(policies.RoCo(keep=0.5, evict=False)).step is None
    for off in (policies.StreamingLLM(keep=0.5), policies.StreamingLLM(keep=0.5, evict=True, scope="vision")):
        assert policies.slots_of(off).step is None


def test_a_text_window_of_a_fixed_length():
    every = jnp.ones((1, 9), bool)
    state = begin(every, {}, ~every[0], every[0], jnp.int32(9), new_tokens=3)
    assert policies.AVL(keep=0.5, text=0.5, longest_text=5).window(state) == 2
    assert policies.AVL(keep=0.5, text=0.5).window(state) == 6
