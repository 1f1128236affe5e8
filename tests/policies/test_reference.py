"""Hand-computed examples of methods, options, and policies of one's own."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from tests import programs
from vlkv import InputError, policies
from vlkv.policies.aircache import skewness


def test_a_window_as_long_as_the_budget_shrinks_to_half_of_it():
    """30 of 150 tokens, window 32: the last 15 stay, and the 15 that these look at most; the first is one of them."""
    rng = np.random.default_rng(0)
    k = rng.normal(size=(1, 1, 150, 8)).astype(np.float32)
    q = np.broadcast_to(3 * k[:, :, :1], k.shape)
    selection = jax.jit(policies.select)(policies.SnapKV(keep=0.2, kernel=1), q, k, k, np.zeros(150, bool))
    kept = np.asarray(selection.kept)[0, 0]
    weights = np.where(np.tri(150)[135:], np.exp(q[0, 0, 135:] @ k[0, 0].T / np.sqrt(8)), 0)
    mass = (weights / weights.sum(1, keepdims=True)).sum(0)[:135]
    assert np.flatnonzero(kept).tolist() == [*sorted(np.argsort(-mass)[:15]), *range(135, 150)] and kept[0]


def test_aircache_gives_what_is_left_to_the_largest_remainders_of_eq_11():
    """47.45 entries for six layers of 73 tokens: 47. Rounded down 45; the remainders .91 and .49 get one each."""
    real = np.array([8.17, 5.47, 10.49, 7.00, 7.91, 8.41], np.float32)
    policy, most = policies.AirCache(keep=float(real.sum()) / 6 / 73, allocation="strength"), jnp.full(6, 73)
    statistics = {"strength": jnp.array(real), "skewness": jnp.zeros(6), "asked": jnp.full(6, real.sum() / 6)}
    granted = policy.allocate(statistics, total=jnp.int32(47), most=most, layers=6)
    np.testing.assert_array_equal(granted, [8, 5, 11, 7, 8, 8])


def test_aircache_counts_a_negative_skewness_as_0():
    """Shares (1 + 0) / 2, (1 + 3/4) / 2 and (1 + 9/4) / 2 of 4: 2, 3.5 and 6.5; the lower layer gets the last one."""
    statistics = {"strength": jnp.ones(3), "skewness": jnp.array([-2.0, 1.0, 3.0]), "asked": jnp.full(3, 4.0)}
    granted = policies.AirCache(keep=0.2).allocate(statistics, total=jnp.int32(12), most=jnp.full(3, 20), layers=3)
    np.testing.assert_array_equal(granted, [2, 4, 6])


def test_skewness_of_hand_computed_examples():
    everything = jnp.ones(4, bool)

    def of(*values):
        x = jnp.array([*values, *[7.0] * (4 - len(values))])
        return float(skewness(x, everything & (jnp.arange(4) < len(values)), jnp.int32(len(values))))

    assert of(0.0, 0.0, 0.0, 4.0) == pytest.approx(2.0)  # 4/(3*2) * ((3/2)^3 - 3 (1/2)^3)
    assert of(0.0, 0.0, 3.0) == pytest.approx(np.sqrt(3))
    assert of(0.0, 1e-6, 1e-6, 0.0) == pytest.approx(0.0, abs=1e-6)
    assert of(0.0, 1.0) == of(5.0) == of() == 0.0
    assert of(0.1, 0.1, 0.1, 0.1) == 0.0


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
